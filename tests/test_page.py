"""The offline page, opened in a real Chromium that has no network."""

import csv
import io
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from analysis.common.tables import Column, Table, cell
from analysis.logs.load import load
from analysis.measured import breakdown, tflops
from analysis.pages import charts, layout_map, memory, pipeline, published, study
from analysis.pages.html import _numbers, rounded
from analysis.pages.html import page as html_of
from analysis.pages.section import Section
from analysis.pages.whole import page_of, sections_of
from analysis.planner.pipeline import intervals, simulate
from benchmarks.page_open import of_500_runs
from models.errors import UsageError
from models.gpus import find_gpu
from models.memory import GB
from parallel.record import timeline
from tests.conftest import ROOT

PARITY = Path("logs/2-core-cpu/parity")
BREAKDOWN = Path("logs/2-core-cpu/2-core_breakdown")
COMMITTED = {
    PARITY: "logs/2-core-cpu/parity.html",
    Path("logs/2-core-cpu/2-core_breakdown"): "logs/2-core-cpu/breakdown.html",
    Path("logs/published/seed003_jeanzay_v100.csv"): "logs/published/jean-zay.html",
}
CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no chromium (apt-get install chromium)")


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

    def open_(text: str, fragment: str = ""):
        path = tmp_path / "page.html"
        path.write_text(text)
        contexts.append(chromium.new_context(offline=True))
        tab = contexts[-1].new_page()
        loud = ("error", "warning")
        tab.on("console", lambda m: wrong.append(m.text) if m.type in loud else None)
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", lambda request: wrong.append(request.url) if _asks(request.url) else None)
        tab.goto(f"file://{path}{fragment}")
        return tab

    yield open_
    for context in contexts:
        context.close()
    assert wrong == []


def _asks(url: str) -> bool:
    return not url.startswith(("file:", "data:", "blob:"))


def _page_of(*paths, **settings):
    """(a page's text, its tables by name)."""
    old = os.getcwd()
    os.chdir(ROOT)
    try:
        title, sections, _ = sections_of([Path(path) for path in paths], **settings)
    finally:
        os.chdir(old)
    return html_of(title, sections), {k: t for s in sections for k, t in s.tables.items()}


@pytest.fixture(scope="module")
def parity_page():
    return _page_of(PARITY)[0]


@pytest.fixture(scope="module")
def breakdown_page():
    return _page_of(BREAKDOWN, predict="2-core-cpu")


@pytest.fixture(scope="module")
def published_page():
    return _page_of("logs/published/seed003_jeanzay_v100.csv")


@needs_chromium
@pytest.mark.parametrize("page", ["breakdown_page", "published_page"])
def test_every_number_on_the_page_is_that_of_the_csv(opened, request, page):
    text, tables = request.getfixturevalue(page)
    tab = opened(text)
    names = tab.evaluate("Object.keys(sheets)")
    assert names == [name for name, table in tables.items() if table.rows]
    for name in names:
        shown = list(csv.DictReader(io.StringIO(tab.evaluate(f"sheets['{name}'].csv()"))))
        table = tables[name]
        expected = list(csv.DictReader(io.StringIO(table.render("csv"))))
        assert len(shown) == len(expected) == len(table.rows)
        for mine, theirs in zip(shown, expected, strict=True):
            assert mine.keys() == theirs.keys()
            for key, value in theirs.items():
                same = mine[key] == value
                assert same or float(mine[key]) == float(value), (name, key, mine[key], value)
        cells = tab.eval_on_selector_all(
            f"#table-{name} tbody tr",
            "r => r.map(x => [...x.cells].map(c => c.textContent.trim()))",
        )
        assert cells == [[cell(row.get(c.key), c.spec) for c in table.shown] for row in table.rows]


@needs_chromium
def test_the_run_table_is_that_of_the_command(opened, parity_page):
    tab = opened(parity_page)
    shown = list(csv.DictReader(io.StringIO(tab.evaluate("sheets.runs.csv()"))))
    table = tflops.report([ROOT / PARITY], None)
    expected = list(csv.DictReader(io.StringIO(table.render("csv"))))
    assert len(shown) == len(expected) == 19
    for mine, theirs in zip(shown, expected, strict=True):
        for key, value in theirs.items():
            assert mine[key] == value or float(mine[key]) == float(value), (mine["run"], key)


@needs_chromium
def test_copied_csv_and_markdown_are_the_rows_shown_and_no_formula(chromium, tmp_path):
    rows = [{"a": text, "b": i} for i, text in enumerate(["=1+1", "@x", "-5 %", "+2", "-x", "a|b"])]
    table = Table([Column("a", "a"), Column("b", "b", "d")], rows)
    (tmp_path / "page.html").write_text(html_of("t", [Section("T", tables={"t": table})]))
    context = chromium.new_context(permissions=["clipboard-read", "clipboard-write"])
    tab = context.new_page()
    tab.goto(f"file://{tmp_path}/page.html")
    for name, expected in (("CSV", table.render("csv")), ("Markdown", table.render("markdown"))):
        tab.click(f"text=Copy as {name}")
        tab.wait_for_selector("text=copied")
        assert tab.evaluate("navigator.clipboard.readText()") == expected
    assert tab.evaluate("sheets.t.csv()").splitlines()[1:3] == ["'=1+1,0", "'@x,1"]
    context.close()


@needs_chromium
def test_a_drag_along_an_axis_filters_the_table_and_a_click_frees_it(opened, parity_page):
    tab = opened(parity_page)
    place = """async () => {
        const chart = charts.find((one) => one.axes);
        await chart.draw();
        chart.at.scrollIntoView();
        const { x, y } = chart.at.getBoundingClientRect(), [left, top] = chart.view.origin();
        const step = chart.view.scale("x").step();
        return chart.axes.map(({ key }, k) =>
          [key, x + left + (k + 0.5) * step, y + top, chart.view.scale("y")(0.4)]);
    }"""
    for key, condition in (("tp", "tp=2"), ("step_s", "tp=2 step_s>=")):
        _, x, top, middle = next(axis for axis in tab.evaluate(place) if axis[0] == key)
        tab.mouse.move(x, top - 2)
        tab.mouse.down()
        tab.mouse.move(x + 3, top + middle)
        tab.mouse.up()
        assert tab.input_value("[aria-label='Filter table runs']").startswith(condition)
    names = tab.eval_on_selector_all(
        "#table-runs tbody tr:not([hidden])", "rows => rows.map(r => r.cells[0].textContent)"
    )
    low = float(re.search(r"step_s>=([\d.]+)", tab.evaluate("state.get('runs.filter')"))[1])
    report = tflops.report([ROOT / PARITY]).rows
    assert names == [r["run"] for r in report if r["tp"] == 2 and r["step_s"] >= low]
    drawn = "charts.find((one) => one.axes).view.data('rows').filter((row) => row.left).length"
    assert tab.evaluate(drawn) == len(names) < 19
    _, x, top, middle = next(axis for axis in tab.evaluate(place) if axis[0] == "tp")
    tab.mouse.click(x, top + middle)
    assert "tp=" not in tab.evaluate("state.get('runs.filter')")


@needs_chromium
def test_a_run_out_of_memory_ends_in_its_lane_of_the_layout_map(opened):
    keys = ("run", "engine", "tp", "step_s", "peak_gb", "verdict")
    values = [
        ("a", "ddp", 1, 1.0, 10.0, "complete"),
        ("b", "ddp", 2, 2.0, 20.0, "complete"),
        ("c", "ddp", 4, None, None, "OOM"),
        ("d", "ddp", 4, None, 15.0, "timeout"),
    ]
    table = Table([Column(k, k) for k in keys], [dict(zip(keys, v, strict=True)) for v in values])
    view = layout_map.view("runs", table, charts.by_engine(["ddp"]))
    assert "Runs that ran out of memory: 1." in view.charts[0].summary
    tab = opened(html_of("map", [Section("Runs", tables={"runs": table}), view]))
    ends = """charts[0].draw().then(() => {
        const walk = (item) => [item, ...(item.items ?? []).flatMap(walk)];
        const all = walk(charts[0].view.scenegraph().root).map((item) => item.datum);
        const rows = all.filter((datum) => datum?.next === "step_s");
        return Object.fromEntries(rows.map((row) => [row.run, row.end]));
    })"""
    assert tab.evaluate(ends) == {"a": 0, "b": 1, "c": -0.2, "d": -0.1}


@needs_chromium
def test_a_finding_leads_to_its_cell_and_back_and_keeps_the_filter(opened, published_page):
    tab = opened(published_page[0], "#seed003_jeanzay_v100.filter=step_s%3C1")
    tab.click("[id$=-audit] a:has-text('tp 4 x pp 32 x dp 1 = 128')")
    at = tab.evaluate("[document.activeElement.id, document.activeElement.innerText]")
    assert at[0].endswith(".gpus") and at[1] == "64"
    assert tab.is_visible(f"[id='{at[0]}']")  # the filter had hidden its row
    assert "at=" in tab.evaluate("location.hash")
    tab.click(f"[id='{at[0]}'] a")
    assert "but the row says 64 GPUs" in tab.evaluate("document.activeElement.innerText")


@needs_chromium
def test_it_works_by_keyboard_and_prints_dark_on_light(opened, parity_page):
    tab = opened(parity_page)
    tab.emulate_media(color_scheme="dark")
    colour = "getComputedStyle(document.body).backgroundColor"
    assert tab.evaluate(colour) == "rgb(23, 25, 28)"
    tab.focus("#table-runs th:has-text('s/iter') button")
    tab.keyboard.press("Enter")
    assert tab.get_attribute("#table-runs th:has-text('s/iter')", "aria-sort") == "ascending"
    tab.emulate_media(color_scheme="dark", media="print")
    assert tab.evaluate(colour) == "rgb(255, 255, 255)"
    assert not tab.is_visible(".tools >> nth=0") and not tab.is_visible("nav")


@needs_chromium
def test_sort_and_filter_work_and_stand_in_the_url(opened, parity_page):
    tab = opened(parity_page)
    tab.click("#table-runs th:has-text('s/iter') button")
    first = tab.inner_text("#table-runs tbody tr >> nth=0 >> td >> nth=0")
    fastest = min(tflops.report([ROOT / PARITY]).rows, key=lambda row: row["step_s"])
    assert first == fastest["run"]
    tab.fill("[aria-label='Filter table runs']", "engine=megatron tp>=2")
    names = tab.eval_on_selector_all(
        "#table-runs tbody tr:not([hidden])", "rows => rows.map(r => r.cells[0].textContent)"
    )
    assert sorted(names) == ["megatron-tp2", "megatron-tp2-pp2-dp2", "megatron-tp2-sp"]
    fragment = tab.evaluate("location.hash")
    again = opened(parity_page, fragment)
    visible = "#table-runs tbody tr:not([hidden])"
    assert again.eval_on_selector_all(visible, "r => r.map(x => x.cells[0].textContent)") == names


@needs_chromium
def test_every_chart_is_drawn_and_told_in_words(opened, parity_page):
    tab = opened(parity_page)
    tab.evaluate("Promise.all(charts.map(chart => chart.draw()))")
    count = tab.evaluate("charts.length")
    assert tab.locator(".chart").count() == tab.locator(".chart svg").count() == count == 8
    labels = [c.get_attribute("aria-label") for c in tab.locator("figure > [role=img]").all()]
    assert len(labels) == count and all(len(label) > 60 for label in labels)


def test_a_log_cannot_put_script_into_the_page():
    evil = "</script><script>alert(1)</script>"
    text = html_of(evil, [Section(evil, [evil])])
    assert evil not in text and "&lt;/script&gt;" in text
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)[1]
    assert json.loads(data)["title"] == evil


def test_the_last_digits_of_another_processor_change_no_page():
    here = [0.142978123456789, {"step_s": 1 / 3}, 314187.28, 7]
    there = [here[0] * (1 + 1e-12), {"step_s": 1 / 3 - 1e-13}, 314187.28, 7]
    assert rounded(here) == rounded(there) == [0.142978, {"step_s": 0.333333}, 314187.28, 7]


@pytest.mark.parametrize("path", COMMITTED, ids=str)
def test_a_committed_page_is_what_the_command_writes(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    written = Path(COMMITTED[path]).read_text()
    assert page_of([path])[0] == written, f"python -m analysis.page {path} --out {COMMITTED[path]}"


@pytest.mark.slow
@needs_chromium
def test_500_runs_fit_into_a_page_that_opens(opened):
    text = of_500_runs()
    assert len(text.encode()) <= 1.5e6
    assert opened(text).locator("#table-runs tbody tr").count() == 500


@pytest.mark.parametrize("name", ["seed003_checkpoint_save", "dgx_h100"])
def test_a_published_csv_is_shown_as_it_is_printed(name):
    path = ROOT / "logs/published" / f"{name}.csv"
    with path.open(newline="") as lines:
        rows = list(csv.reader(lines))[1:]
    table = published.views(path)[0].tables[name]
    assert len(table.rows) == len(rows)
    assert [row["file_line"] for row in table.rows] == list(range(2, len(rows) + 2))
    assert html_of(name, published.views(path)).count("<tr>") > len(rows)


def test_a_run_has_one_name_on_a_page_of_several_studies():
    folders = [ROOT / PARITY / "ddp-dp2", ROOT / BREAKDOWN]
    sections = sections_of(folders)[1]
    tables = {key: table for one in sections for key, table in one.tables.items()}
    runs = {row["run"] for row in tables["runs"].rows}
    assert "2-core_breakdown/ddp-dp2" in runs
    data = {key: groups[0] for one in sections for key, groups in one.data.items()}
    for key in ("times", "lost"):
        assert {row["run"] for row in tables[key].rows} <= runs, key
    for key in ("ranks", "lost_parts"):  # a chart draws the runs that the table of runs shows
        assert set(data[key]["columns"]["run"]) <= runs, key


def test_the_ideal_line_is_1_at_the_gpus_of_the_baseline():
    def row(gpus, efficiency):
        known = {"gpus": gpus, "speedup": efficiency * gpus / 4, "efficiency": efficiency}
        return (
            known
            | {"run": f"r{gpus}", "engine": "ddp", "verdict": "complete"}
            | dict.fromkeys(("steady_ci95", "step_s"))
            | {"missing": {}}
        )

    for kind in ("strong", "weak"):
        charts_ = study.scaling([row(2, 1.1), row(4, 1.0), row(16, 0.7)], kind).charts
        lines = [chart.spec["layer"][0]["data"]["values"] for chart in charts_]
        assert [(at["gpus"], at["y"]) for at in lines[0]] == [(2, 0.5), (16, 4)]
        assert [(at["gpus"], at["y"]) for at in lines[1]] == [(2, 1), (16, 1)]


def test_published_numbers_sort_as_numbers_and_keep_their_digits():
    views = published.views(ROOT / "logs/published/ultrascale_h100.csv")
    table = views[0].tables["ultrascale_h100"]
    times = [row["step_s"] for row in table.rows if row["step_s"] is not None]
    assert len(times) == 1026 and all(isinstance(seconds, float) for seconds in times)
    assert {"step_s", "tokens_per_s", "memory_gb"} <= set(_numbers(table))
    assert max(times) > 100 and cell(table.rows[0]["tokens_per_s"]) == "314187.28"
    mapped = next(view for view in views if view.title.startswith("Layout map"))
    assert mapped.charts[0].axes[-1].key == "memory_gb"


def test_a_csv_that_cannot_be_read_is_named_and_the_others_are_shown(tmp_path):
    good, bad = tmp_path / "good.csv", tmp_path / "bad.csv"
    good.write_text("gpus,tflops\n8,100\n")
    bad.write_text("bytes,ms\n8,9.5\n")
    title, sections, refused = sections_of([bad, good])
    assert title == "Scaling study: good.csv" and "good" in sections[0].tables
    assert refused == [f"{bad}: no column gpus in this CSV"]
    with pytest.raises(UsageError, match="no column gpus"):
        sections_of([bad])


def test_a_column_with_a_word_stays_as_it_is_printed_and_a_note_says_so(tmp_path):
    path = tmp_path / "some.csv"
    path.write_text("gpus,seconds_per_iteration\n8,9.50\n16,OOM\n32,7.5\n")
    table = published.views(path)[0].tables["some"]
    assert [row["step_s"] for row in table.rows] == ["9.50", "OOM", "7.5"]
    assert [cell(row["gpus"]) for row in table.rows] == ["8", "16", "32"]
    assert table.notes == [
        "step_s sorts and filters as words, and no chart shows it: 1 of its 3 values is a word,"
        " 'OOM' in line 3 for one"
    ]


def test_a_row_that_crashed_has_a_lane_of_its_own(tmp_path):
    path = tmp_path / "some.csv"
    path.write_text(
        "gpus,tp,seconds_per_iteration,status\n"
        "8,1,9.5,ok\n8,2,7.5,ok\n8,4,,crashed_or_OOM\n8,8,,not run\n"
    )
    view = next(v for v in published.views(path) if v.title.startswith("Layout map"))
    assert "Runs that crashed or ran out of memory: 1." in view.charts[0].summary
    words = [d["text"] for d in view.charts[0].spec["layer"][-1]["data"]["values"]]
    assert words == ["not known", "crashed or out of memory"]


def test_a_folder_of_csvs_is_a_path(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.csv").write_text("gpus,tflops\n8,100\n")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "c.csv").write_text("gpus,tflops\n8,100\n")
    title, sections, refused = sections_of([tmp_path])
    tables = [name for one in sections for name in one.tables]
    assert title == f"Scaling study: {tmp_path.name}" and refused == []
    assert [name for name in tables if "audit" not in name] == ["a", "b"]
    shutil.copytree(ROOT / PARITY / "ddp", tmp_path / "ddp")
    tables = {name for one in sections_of([tmp_path])[1] for name in one.tables}
    assert {"a", "b", "runs"} <= tables


def test_the_terms_of_a_prediction_add_up_and_so_does_what_was_measured(breakdown_page):
    tables = breakdown_page[1]
    of_rank = {one.name: one.ranks for one in breakdown.read_all([ROOT / BREAKDOWN])[0]}
    for run in tables["runs"].rows:
        terms = [row for row in tables["terms"].rows if row["run"] == run["run"]]
        assert sum(row["predicted_s"] for row in terms) == pytest.approx(run["predicted_s"])
        elapsed = of_rank[run["run"]][terms[0]["rank"]]["elapsed_s"]
        # The parts and the whole are read from the clock one after the other: microseconds apart.
        assert sum(row["measured_s"] for row in terms) == pytest.approx(elapsed, abs=5e-5)


def test_memory_by_part_and_the_cards_line_are_in_the_unit_of_the_peak():
    (record,), _ = load([ROOT / PARITY / "ddp"])
    record.facts = record.facts | {"host": {"gpu": "Tesla V100-SXM2-32GB"}}
    record.gpu_type, record.peak_bytes = "Tesla V100-SXM2-32GB", 5_000_000_000
    rows = [{"peak_gb": 5.0}]
    view = memory.view([record], rows)
    (row,) = view.tables["memory"].rows
    card = find_gpu(record.gpu_type)
    assert row["card_gb"] == card.memory_gb * GB / 1e9
    parts = memory.predicted(record)[0]["first"]
    assert row["predicted_gb"] == pytest.approx(sum(parts.values()))
    assert parts["library"] == pytest.approx(4.2 * GB / 1e9, 1e-5)
    limits = [
        layer["data"]["values"][0]["limit"]
        for layer in view.charts[0].spec["layer"]
        if "data" in layer
    ]
    assert limits == [row["card_gb"]]


def test_the_pipeline_shows_the_intervals_that_the_ranks_traced(tmp_path):
    run = tmp_path / "megatron-pp2"
    shutil.copytree(ROOT / BREAKDOWN / "megatron-pp2", run)
    events = simulate("1f1b", 2, 4, 1, 0.02, 0.04)
    for rank in (0, 1):
        mine = [
            i._replace(rank=rank, step=11, start_s=i.start_s + 5, end_s=i.end_s + 5)
            for i in intervals(events, 0.0, [0.01, 0.01])
            if i.stage == rank
        ]
        mine.append(timeline.Interval(rank, "data", None, 4.9, 5.0, 0, rank, 11))
        about = {"steps": [11], "clock": {"error_s": 1e-5}}
        timeline.write(timeline.file_of(run, rank), mine, about)
    view = pipeline.view(breakdown.read_all([run])[0])
    assert [row["pipeline_s"] for row in view.tables["stages"].rows] == pytest.approx([0.3, 0.3])
    (data,) = view.data["intervals"]
    columns = data["columns"]
    shown = (columns[key] for key in ("bar", "part", "start", "end"))
    drawn = sorted(zip(*shown, strict=True))
    measured = [d for d in drawn if d[0].endswith("rank 1") and d[1] == "forward"]
    assert [d[2] for d in measured] == pytest.approx(
        [1e3 * e.start for e in events if e.stage == 1 and e.kind == "F"]
    )
    assert len([d for d in drawn if d[0].endswith("simulated") and d[1] == "backward"]) == 8


def test_the_verdict_has_the_studys_question_or_says_how_to_give_it(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    said = sections_of([PARITY])[1][0].words[0]
    assert said.startswith("Question: Do all engines train the same GPT")
    monkeypatch.chdir(tmp_path)  # the study's file is not there
    assert "--question TEXT" in sections_of([ROOT / PARITY])[1][0].words[0]
    asked = sections_of([ROOT / PARITY], question="Why?")[1][0].words[0]
    assert asked == "Question: Why?"
