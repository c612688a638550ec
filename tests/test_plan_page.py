"""The page of a plan: every layout with the planner's own numbers, opened in Chromium offline."""

import contextlib
import csv
import io
import re
from pathlib import Path

import pytest

from analysis import plan
from analysis.common.table import cell
from analysis.pages import plan_views
from analysis.planner import ranking
from base.errors import Parser
from tests import test_page

chromium, opened = test_page.chromium, test_page.opened
needs_chromium = test_page.needs_chromium
SMALL = "--preset 7.5b --n-layer 8 --cluster dgx-h100 --gpus 8 --global-batch 64".split()


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


@needs_chromium
def test_every_layout_stands_on_the_page_with_the_planners_numbers(opened, small):
    text, printed = small
    tab = opened(text)
    (heads, *rows) = test_page.texts_of(tab, "layouts")
    columns = {c.key: c for c in ranking.table([], [], "").columns}
    ask = asked(SMALL)
    r = ask.ranked()
    verdicts = [row[heads.index("verdict")] for row in rows]
    counts = [verdicts.count(verdict) for verdict in ("fits", "beaten", "does not fit")]
    shown = [len(r.best), len(r.beaten), int((r.used > r.limit).sum())]
    assert counts == [min(n, plan_views.FIRST) for n in shown]
    for row, theirs in zip(rows[: counts[0]], printed, strict=False):
        for key in ("predicted_s", "memory_gb"):
            column = columns[key]
            assert row[heads.index(column.heading)] == cell(float(theirs[key]), column.spec)
    assert tab.evaluate("drawAll().then(drawn => drawn.length)") == 1


def test_a_layout_that_is_not_ranked_says_why(small):
    assert re.search(r"recompute \w+ is no slower and needs no more memory: # \d+", small[0])
    assert re.search(r"more than the [\d.]+ GB of a rank; the largest part: \w+", small[0])


def test_where_nothing_fits_the_page_says_why_of_each(tmp_path, capsys):
    path = tmp_path / "plan.html"
    flags = "--preset 175b --cluster selene --gpus 16 --global-batch 16 --page".split()
    assert plan.main([*flags, str(path)]) == 2
    said = capsys.readouterr().err
    assert "do not fit on 16 GPUs" in said and f"{path} has the reason of each" in said
    assert "layouts: 0 are ranked" in path.read_text()
