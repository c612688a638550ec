"""The page of a plan: every layout with the planner's own numbers, opened in Chromium offline."""

import contextlib
import csv
import io
from pathlib import Path

import numpy as np
import pytest

from analysis import plan
from analysis.common.tables import cell
from analysis.planner import explain, ranking
from models import memory
from models.errors import Parser
from tests import test_page

chromium, opened = test_page.chromium, test_page.opened
needs_chromium = test_page.needs_chromium
SMALL = "--preset 1.7b --cluster dgx-h100 --gpus 8 --global-batch 64".split()
LARGE = "--preset 175b --cluster selene --gpus 512 --global-batch 1536".split()
LEFT = "#table-layouts tbody tr"


def asked(flags: list[str]) -> plan.Question:
    parser = Parser()
    plan.add_flags(parser)
    return plan.question(parser.parse_args(flags))


def written(flags: list[str], path: Path) -> tuple[str, list[dict[str, str]]]:
    """(the page, the rows that the same command prints as CSV)."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert plan.main([*flags, "--top", "10000", "--format", "csv", "--page", str(path)]) == 0
    return path.read_text(), list(csv.DictReader(io.StringIO(out.getvalue())))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return written(SMALL, tmp_path_factory.mktemp("plan") / "plan.html")


def has_the_planners_numbers(tab, printed: list[dict[str, str]], ask: plan.Question) -> None:
    shown = list(csv.DictReader(io.StringIO(tab.evaluate("sheets.layouts.csv()"))))
    x, _, used, order, limit = ask.ranked()
    assert len(shown) == len(x)
    for mine, theirs in zip(shown, printed, strict=False):  # the page goes on with what is refused
        for key, value in theirs.items():
            assert mine[key] == value or float(mine[key]) == float(value), (theirs["rank"], key)
    best, beaten = ranking.sifted(x, used, order)
    assert [len(best), len(beaten), int((used > limit).sum())] == [
        sum(row["verdict"] == verdict for row in shown)
        for verdict in ("fits", "beaten", "does not fit")
    ]
    every = np.concatenate([best, list(beaten), _by_size(used, limit)]).astype(int)
    rows = ranking.rows_of(x, every, ask.cluster, ask.config, ask.settings["precision"], ask.margin)
    seconds, gigabytes = explain.by_part(x.take(every), ask.cluster)
    for i, (mine, row) in enumerate(zip(shown, rows, strict=True)):
        assert float(mine["predicted_s"]) == row["predicted_s"]
        assert float(mine["memory_gb"]) == row["memory_gb"]
        for part, values in seconds.items():
            assert float(mine.get(f"{part.replace(' ', '_')}_s") or 0) == values[i]
        for part, values in gigabytes.items():
            assert float(mine.get(f"{part}_gb") or 0) == values[i]


def _by_size(used: np.ndarray, limit: float) -> np.ndarray:
    large = np.flatnonzero(used > limit)
    return large[np.argsort(used[large], kind="stable")]


@needs_chromium
def test_every_number_of_the_page_is_the_planners(opened, small):
    text, printed = small
    tab = opened(text)
    has_the_planners_numbers(tab, printed, asked(SMALL))
    columns = {c.key: c.spec for c in ranking.table([{"cp": 1}], [], "").columns}
    keys = tab.evaluate("sheets.layouts.keys")
    texts = tab.evaluate("sheets.layouts.rows.map((_, i) => sheets.layouts.cells(i))")
    for cells, row in zip(texts, printed, strict=False):
        shown = dict(zip(keys, cells, strict=True))
        for key, spec in columns.items():
            value = float(row[key]) if "." in spec else int(row[key]) if spec else row[key]
            assert shown[key] == cell(value, spec), (row["rank"], key)


@pytest.mark.slow
@needs_chromium
def test_all_layouts_of_175b_on_512_gpus_are_on_one_page(opened, tmp_path):
    text, printed = written(LARGE, tmp_path / "plan.html")
    assert len(text) < 3e6
    tab = opened(text)
    has_the_planners_numbers(tab, printed, asked(LARGE))
    assert tab.locator(LEFT).count() == 200


@needs_chromium
def test_bars_are_of_the_row_that_is_clicked_and_it_stands_in_the_url(opened, small):
    text, printed = small
    tab = opened(text)
    tab.click(f"{LEFT} >> nth=3")
    tab.evaluate("Promise.all(charts.map((chart) => chart.draw()))")
    bars = tab.evaluate("charts[1].view.data('rows').map((row) => row.memory_gb)")
    assert bars == [float(printed[3]["memory_gb"])]
    again = opened(text, tab.evaluate("location.hash"))
    assert again.evaluate("charts[0].wanted()[0].rank") == 4
    assert again.get_attribute(f"{LEFT} >> nth=3", "aria-current") == "true"
    again.fill("[aria-label='Filter table layouts']", "verdict=fits tp=2 pp>1")
    first = next(row for row in printed if row["tp"] == "2" and int(row["pp"]) > 1)
    assert again.evaluate("charts[0].wanted()[0].rank") == int(first["rank"])
    count = sum(row["tp"] == "2" and int(row["pp"]) > 1 for row in printed)
    assert f"{count} of 1291 rows" in again.inner_text(".tools .said")


@needs_chromium
def test_a_row_is_marked_by_keyboard(opened, small):
    text, printed = small
    tab = opened(text)
    tab.focus("[aria-label='Table layouts']")
    while tab.evaluate("document.activeElement.tagName") != "TR":  # headings come before
        tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.ariaCurrent") == "true"
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowUp", "Enter"):
        tab.keyboard.press(key)
    assert tab.evaluate("charts[0].wanted()[0].rank") == 3
    assert tab.evaluate("[...document.querySelectorAll('tbody tr[tabindex=\"0\"]')].length") == 1
    ring = "getComputedStyle(document.activeElement).outlineStyle"
    assert tab.evaluate("document.activeElement.ariaCurrent") == "true"
    assert tab.evaluate(ring) == "solid"
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press(" ")
    assert tab.evaluate("sheets.layouts.marked") == 3


@needs_chromium
def test_a_layout_that_is_not_ranked_says_why(opened, small):
    tab = opened(small[0])
    rows = tab.evaluate("objects('layouts')")
    ask = asked(SMALL)
    limit_gb = ask.ranked()[-1] / memory.GB
    for row in rows:
        assert (row["why"] is None) == (row["verdict"] == "fits")
        if row["verdict"] == "does not fit":
            parts = {k: v for k, v in row.items() if k.endswith("_gb") and k != "memory_gb"}
            largest = max(parts, key=parts.get).removesuffix("_gb").replace("_", " ")
            assert row["memory_gb"] > limit_gb and row["why"].endswith(f"part: {largest}")
        elif row["verdict"] == "beaten":
            other = rows[int(row["why"].rpartition("# ")[2]) - 1]
            assert f"recompute {other['recompute']} " in row["why"]
            assert other["predicted_s"] <= row["predicted_s"]
            assert other["memory_gb"] <= row["memory_gb"]
            assert all(other[k] == row[k] for k in ("engine", "tp", "pp", "vpp", "micro_batch"))


def test_where_nothing_fits_the_page_says_why_of_each(tmp_path, capsys):
    path = tmp_path / "plan.html"
    flags = "--preset 175b --cluster selene --gpus 16 --global-batch 16 --page".split()
    assert plan.main([*flags, str(path)]) == 2
    said = capsys.readouterr().err
    assert "do not fit on 16 GPUs" in said and f"{path} has the reason of each" in said
    assert "layouts: 0 are ranked" in path.read_text()


@pytest.mark.parametrize("other", ["--why tp=1", "--scale -"])
def test_a_page_is_of_all_layouts_of_one_size(other, tmp_path, capsys):
    flags = [*SMALL, "--page", str(tmp_path / "plan.html"), *other.split()]
    assert plan.main(flags) == 2
    assert "--page" in capsys.readouterr().err
    assert not (tmp_path / "plan.html").exists()
