"""The offline page, opened in a real Chromium that has no network."""

import functools
import math
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from analysis.common.table import Column, Table, cell
from analysis.logs.load import load
from analysis.page import page_at
from analysis.pages import charts
from analysis.pages.page_html import html_of
from analysis.pages.section import BAD, GOOD, Card, Chart, FirstScreen, Page, Section, Trust
from analysis.runs import run_table
from analysis.runs.fairness import Terms
from parallel.record import reader
from tests import fixture_runs
from tests.conftest import ROOT

PARITY = Path("logs/2-core-cpu/parity")
BREAKDOWN = Path("logs/2-core-cpu/2-core_breakdown")
COMMITTED = ROOT / "logs" / "2-core-cpu" / "parity.html"
NOTHING = FirstScreen("", "", [], Trust(GOOD, "", [], []))
CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no chromium (apt-get install chromium)")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium, tmp_path):
    """text -> a tab that shows it offline; at the end nothing was asked for and nothing failed."""
    contexts, wrong = [], []

    def open_(text: str, width: int = 1280):
        path = tmp_path / "page.html"
        path.write_text(text)
        contexts.append(
            chromium.new_context(offline=True, viewport={"width": width, "height": 900})
        )
        tab = contexts[-1].new_page()
        loud = ("error", "warning")
        tab.on("console", lambda m: wrong.append(m.text) if m.type in loud else None)
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        local = ("file:", "data:", "blob:")
        tab.on("request", lambda r: None if r.url.startswith(local) else wrong.append(r.url))
        tab.goto(f"file://{path}")
        return tab

    yield open_
    for context in contexts:
        context.close()
    assert wrong == []


@functools.cache
def page_of(path: Path) -> Page:
    return page_at([path])


def texts_of(tab, name: str) -> list[list[str]]:
    """The cells of a table as they are shown, with its headings first."""
    rows = f"document.querySelectorAll('#table-{name} tr:not([hidden])')"
    cells = "[...row.cells].map(cell => cell.textContent)"
    return tab.evaluate(f"[...{rows}].map(row => {cells})")


@needs_chromium
def test_the_runs_have_the_numbers_of_the_command(opened):
    tab = opened(html_of(page_of(PARITY)))
    (heads, *rows) = texts_of(tab, "runs")
    records, _ = load([PARITY])
    expected = {row["run"]: row for row in run_table.of_records(records, None).rows}
    assert {row[0] for row in rows} == expected.keys()
    keys = {"s/iter": "step_s", "tokens/s": "tokens_per_s", "speedup": "speedup"}
    for heading, spec in (("s/iter", ".4g"), ("tokens/s", ".0f"), ("speedup", ".2f")):
        for row in rows:
            assert row[heads.index(heading)] == cell(expected[row[0]][keys[heading]], spec)


@needs_chromium
@pytest.mark.parametrize("path", [PARITY, BREAKDOWN], ids=["parity", "breakdown"])
def test_nothing_needs_sideways_scrolling_and_every_chart_is_drawn(opened, path):
    page = page_of(path)
    tab = opened(html_of(page), 390)
    assert tab.evaluate("drawAll().then(drawn => drawn.length)") == sum(
        len(section.charts) for section in page.sections
    ) + bool(page.first.picture)
    assert tab.locator(".chart svg").count() == tab.locator(".chart").count()
    for width, media in ((390, "screen"), (1280, "screen"), (703, "print")):  # 186 mm of A4
        tab.emulate_media(media=media)
        tab.set_viewport_size({"width": width, "height": 1000})
        assert tab.evaluate("document.documentElement.scrollWidth") <= width


@needs_chromium
@pytest.mark.parametrize("width", [1280, 390])
def test_long_names_leave_every_column_readable(opened, width):
    """Seventeen columns beside names of 121 letters: a row has a few lines, all is shown."""
    columns = [Column(f"c{n}", f"words of {n}", "d") for n in range(16)]
    rows = [{"run": f"{'a_long_name_' * 10}{n}"} for n in range(10)]
    for n, row in enumerate(rows):
        row |= {column.key: 10**6 + n for column in columns}
    table = Table([Column("run", "run"), *columns], rows)
    tab = opened(html_of(Page("t", NOTHING, [Section("Runs", tables={"runs": table})], [])), width)
    heights = "[...document.querySelectorAll('#table-runs tbody tr')].map(row => row.offsetHeight)"
    assert max(tab.evaluate(heights)) < (110 if width > 700 else 300)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    cells = "[...document.querySelectorAll('#table-runs td')]"
    shown = f"Math.max(...{cells}.map(cell => cell.getBoundingClientRect().right))"
    assert tab.evaluate(shown) <= width
    names = [row[0] for row in texts_of(tab, "runs")[1:]]
    assert len(set(names)) == 10 and max(map(len, names)) <= 48
    tips = f"{cells}.map(cell => cell.title).filter(tip => tip)"
    assert tab.evaluate(tips) == [row["run"] for row in rows]


@needs_chromium
def test_a_click_sorts_by_value_and_the_filter_takes_words(opened):
    rows = [{"run": f"run {n}", "s": value} for n, value in enumerate((10.0, 9.0, None, 1e3, 2.5))]
    table = Table([Column("run", "run"), Column("s", "s", ".4g")], rows)
    tab = opened(html_of(Page("t", NOTHING, [Section("Runs", tables={"runs": table})], [])))
    head = tab.locator("#table-runs th button").nth(1)
    head.click()
    assert [row[1] for row in texts_of(tab, "runs")[1:]] == ["2.5", "9", "10", "1000", "-"]
    head.click()
    assert [row[1] for row in texts_of(tab, "runs")[1:]] == ["1000", "10", "9", "2.5", "-"]
    tab.locator("input").fill("RUN 3")
    assert [row[0] for row in texts_of(tab, "runs")[1:]] == ["run 3"]


def test_the_first_screen_says_what_won_whether_losses_are_equal_and_what_is_in_doubt(tmp_path):
    for name, step_s, gpus in (("ddp", 1.0, 1), ("fast", 0.55, 2), ("slow", 0.8, 2)):
        about = fixture_runs.facts("s", "ddp", gpus=gpus) | {"run": name}
        fixture_runs.write(tmp_path, about, step_s, [9.0] * 20 if name == "slow" else None)
    first = page_at([tmp_path], terms=Terms("ddp")).first
    assert first.answer == "Fastest: fast, 1.82 times ddp's speed on 2 CPU ranks."
    baseline, fast = first.cards
    assert (baseline.heading, baseline.run, baseline.figure) == ("1 CPU rank", "ddp", "baseline")
    assert (fast.heading, fast.run, fast.figure) == ("2 CPU ranks", "fast", "1.82×")
    assert fast.words[0] == "efficiency 0.91"
    assert first.trust.state == BAD and first.trust.headline == "Losses differ in 1 of 3 runs"
    assert "(slow)" in first.trust.words[0]
    assert first.trust.words[1] == "3 of 3 runs complete and timed"


def test_the_first_screen_is_against_the_baseline_that_was_asked_for(tmp_path):
    """The losses of dp2 and dp4 are equal; those of ddp, the study's own baseline, are others."""
    for gpus, step_s in ((1, 1.0), (2, 0.6), (4, 0.4)):
        loss = [9.0] * 20 if gpus == 1 else None
        fixture_runs.write(tmp_path, fixture_runs.facts("s", "ddp", gpus=gpus), step_s, loss)
    first = page_at([tmp_path], terms=Terms("ddp-dp2")).first
    assert "strong scaling against ddp-dp2" in first.about
    assert [card.figure for card in first.cards] == ["0.60×", "baseline", "1.50×"]
    assert first.trust.headline == "Losses differ in 1 of 3 runs"
    assert first.trust.words[0].startswith("beside ddp-dp2 at every step")
    first = page_at([tmp_path]).first
    assert first.about.endswith("against ddp · 0.221M parameters · 16 x 64 tokens a step")
    assert [card.is_muted for card in first.cards] == [False, False, False]
    assert first.trust.words[2] == "in doubt about the fastest: nothing"
    assert [card.figure for card in first.cards] == ["baseline", "1.67×", "2.50×"]
    assert first.trust.headline == "Losses differ in 3 of 3 runs"


def test_the_first_screen_doubts_what_the_table_doubts(tmp_path):
    """Other programs took the cores of three runs; the steps of the fourth grow to 0.8 s."""
    for name in ("ddp", "a", "b", "grows"):
        about = fixture_runs.facts("s", "ddp") | {"run": name}
        if name != "grows":
            about["load"] = {"cpu_s": 10.0, "machine_cpu_s": 90.0, "wall_s": 10.0}
        fixture_runs.write(tmp_path, about)
    fixture_runs.edit_steps(
        tmp_path / "grows",
        lambda rows: [row | {"step_s": 0.3 + 0.5 * int(row["step"]) / 20} for row in rows],
    )
    page = page_at([tmp_path])
    runs = next(section for section in page.sections if section.title == "Runs").tables["runs"]
    assert (
        runs.doubts[0].startswith("the machine was busy")
        and runs.doubts[0] in page.first.trust.doubts
    )
    assert "no steady time: grows" in page.first.trust.doubts
    assert "no steady time: steps went from 0.325 s to 0.8 s" in runs.rows[-1]["notes"]
    quiet = tmp_path / "quiet"
    fixture_runs.write(quiet, fixture_runs.facts("s", "ddp"))
    page = page_at([quiet])
    runs = next(section for section in page.sections if section.title == "Runs").tables["runs"]
    assert not page.first.trust.doubts and not runs.doubts
    assert not any(row["notes"] for row in runs.rows)


def test_the_first_screen_says_that_nothing_is_faster_than_the_baseline(tmp_path):
    for name, step_s in (("ddp", 1.0), ("slow", 2.0)):
        fixture_runs.write(tmp_path, fixture_runs.facts("s", "ddp") | {"run": name}, step_s)
    answer = page_at([tmp_path], terms=Terms("ddp")).first.answer
    assert answer == "No run is faster than the baseline, ddp: the next is slow, speedup 0.50."
    assert page_at([tmp_path / "ddp"]).first.answer.startswith("No run has a speedup against a")


def test_a_run_that_failed_is_no_fastest_run(tmp_path):
    about = fixture_runs.facts("s", "ddp")
    oom = "torch.OutOfMemoryError: CUDA out of memory"
    fixture_runs.write(tmp_path, about | {"run": "quick"}, 0.5, fail=oom)
    first = page_at([tmp_path]).first
    assert first.answer == "No run ended well, so nothing is compared: 1 x OOM." and not first.cards
    fixture_runs.write(tmp_path, about | {"run": "whole"}, 1.0)
    first = page_at([tmp_path]).first
    assert "whole has the most tokens/s" in first.answer
    assert [card.run for card in first.cards] == ["whole"]


def test_an_efficiency_above_1_is_marked_in_its_row_and_doubtful_on_the_first_screen(tmp_path):
    for step_s, gpus in ((1.0, 1), (0.4, 2), (0.3, 4)):
        fixture_runs.write(tmp_path, fixture_runs.facts("s", "ddp", gpus=gpus), step_s=step_s)
    page = page_at([tmp_path], terms=Terms("ddp"))
    assert page.first.cards[1].words[0] == "efficiency 1.25, in doubt: above 1"
    assert ">1.25?<" in html_of(page)


@needs_chromium
@pytest.mark.parametrize("width", [1280, 390])
def test_every_name_of_the_picture_is_whole_and_no_point_lies_on_another(opened, width):
    tab = opened(html_of(page_of(PARITY)), width)
    tab.evaluate("drawAll().then(drawn => drawn.length)")
    box = "(({x, y, width, height}) => [x, y, x + width, y + height])(e.getBoundingClientRect())"
    chart = "document.querySelector('header .chart svg')"
    boxes = f"[...{chart}.querySelectorAll(QUERY)].map(e => {box})"
    (left, top, right, bottom) = tab.evaluate(f"(e => {box})({chart})")
    names = tab.evaluate(boxes.replace("QUERY", "'.mark-text.role-mark text'"))
    assert len(names) == 4
    assert all(left <= a and top <= b and c <= right and d <= bottom for a, b, c, d in names)
    points = tab.evaluate(boxes.replace("QUERY", "'.mark-symbol.role-mark path'"))
    centres = [((a + c) / 2, (b + d) / 2) for a, b, c, d in points]
    assert len(centres) == 19
    for i, (x, y) in enumerate(centres):
        assert all(math.dist((x, y), other) > 7 for other in centres[:i])


def test_marks_of_runs_that_are_unsure_are_hollow_and_the_caption_says_so(tmp_path):
    for name, gpus in (("ddp", 1), ("grew", 2), ("calm", 2)):
        about = fixture_runs.facts("s", "ddp", gpus=gpus) | {"run": name}
        if name == "grew":
            about["host"] = about["host"] | {"cores": 1}
        fixture_runs.write(tmp_path, about, 1.0 / gpus)
    page = page_at([tmp_path], terms=Terms("ddp"))
    assert "Hollow" in page.first.picture.caption
    unsure = {r["run"]: r["unsure"] for r in fixture_runs.drawn_rows(page.first.picture, 1)}
    assert unsure == {"ddp": False, "grew": True, "calm": False}


def test_columns_that_are_the_same_in_every_row_stand_above_and_unknown_ones_below():
    columns = [Column(name, name) for name in ("run", "engine", "tp", "mfu")]
    columns.append(Column("notes", "notes", long="below"))
    same = {"engine": "ddp", "mfu": None, "notes": "spikes"}
    rows = [{"run": "a", "tp": 1} | same, {"run": "b", "tp": 2} | same]
    text = html_of(Page("t", NOTHING, [Section("Runs", tables={"runs": Table(columns, rows)})], []))
    assert "The same in every row: engine ddp." in text
    assert re.findall(r'<button type="button">(\w+)', text) == ["run", "tp"]
    assert "not known in any row: mfu" in text and "a, b: spikes" in text


def test_a_log_cannot_put_script_into_the_page():
    evil = "</script><script>alert(1)</script><b>"
    table = Table([Column("run", evil)], [{"run": evil}], evil, [evil])
    rows = [{"run": evil, "engine": evil, "iteration": 1, "loss": 1.0}]
    chart = Chart(charts.lines(rows, "loss", evil), evil)
    card, trust = Card(evil, evil, evil, [evil], evil), Trust(evil, evil, [evil], [evil])
    first = FirstScreen(evil, evil, [card], trust, Chart(chart.spec, evil))
    text = html_of(Page(evil, first, [Section(evil, [evil], {"t": table}, [chart])], []))
    assert evil not in text and text.count("<script") == 3 and "<b>" not in text


def test_the_committed_page_is_what_the_command_writes():
    """`make report` writes it again."""
    assert html_of(page_of(PARITY)) == COMMITTED.read_text()


def test_a_page_reads_each_steps_csv_once(monkeypatch):
    opened, read = Counter(), reader.read_rows
    monkeypatch.setattr(
        reader, "read_rows", lambda path, *kinds: opened.update([path]) or read(path, *kinds)
    )
    page_at([BREAKDOWN])
    steps = {path.parent: n for path, n in opened.items() if path.name == "steps.csv"}
    assert len(steps) > 2 and set(steps.values()) == {1}


def test_no_control_character_of_a_log_is_in_a_page():
    table = Table(
        [Column("run", "r\x1bun")], [{"run": "a\x1b[31m<b>"}, {"run": "c\u202e"}], "T\x07"
    )
    words = ["w\x1bords"]
    first = FirstScreen("a\x1bbout", "an\x07swer", [], Trust("good", "h\x1b", words, words))
    page = Page("ti\x1b<t>", first, [Section("S\x1b", words, {"runs": table})], [])
    shown = html_of(page)
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", shown) and "<b>" not in shown
