"""The offline page, opened in a real Chromium that has no network."""

import csv
import io
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from analysis.logs.load import load
from analysis.measured import tflops
from analysis.pages import published, study
from analysis.pages.html import page as html_of
from analysis.pages.section import Section
from analysis.pages.steps import views as steps_views
from analysis.pages.whole import page_of
from tests.conftest import ROOT

PARITY = Path("logs/2-core-cpu/parity")
COMMITTED = {
    PARITY: "logs/2-core-cpu/parity.html",
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
        tab.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
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


@pytest.fixture(scope="module")
def parity_page():
    old = os.getcwd()
    os.chdir(ROOT)
    yield page_of([PARITY])[0]
    os.chdir(old)


@needs_chromium
def test_every_number_of_the_run_table_is_that_of_the_csv(opened, parity_page):
    tab = opened(parity_page)
    text = tab.evaluate("sheets.runs.csv()")
    shown = list(csv.DictReader(io.StringIO(text)))
    table = tflops.report([ROOT / PARITY], None)
    expected = list(csv.DictReader(io.StringIO(table.render("csv"))))
    assert len(shown) == len(expected) == 19
    for mine, theirs in zip(shown, expected, strict=True):
        for key, value in theirs.items():
            same = mine[key] == value
            assert same or float(mine[key]) == float(value), (mine["run"], key)
    cells = tab.eval_on_selector_all(
        "#table-runs tbody tr", "r => r.map(x => x.cells[0].innerText)"
    )
    assert cells == [row["run"] for row in table.rows]


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
    charts = tab.locator(".chart")
    assert charts.count() == tab.locator(".chart svg").count() == 7
    labels = [c.get_attribute("aria-label") for c in tab.locator("figure > [role=img]").all()]
    assert len(labels) == 7 and all(len(label) > 60 for label in labels)


def test_a_log_cannot_put_script_into_the_page():
    evil = "</script><script>alert(1)</script>"
    text = html_of(evil, [Section(evil, [evil])])
    assert evil not in text and "&lt;/script&gt;" in text
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)[1]
    assert json.loads(data)["title"] == evil


@pytest.mark.parametrize("path", COMMITTED, ids=str)
def test_a_committed_page_is_what_the_command_writes(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    written = Path(COMMITTED[path]).read_text()
    assert page_of([path])[0] == written, f"python -m analysis.page {path} --out {COMMITTED[path]}"


def of_500_runs() -> str:
    """The page of 500 runs of 200 steps each: the parity study's, under other names."""
    read, _ = load([ROOT / PARITY])
    many = []
    for i in range(500):
        one = read[i % len(read)]
        steps = {name: np.tile(getattr(one, name), 10) for name in ("step_s", "loss", "grad_norm")}
        name, iteration = f"{one.run}-repeat-{i}", np.arange(1.0, 201)
        many.append(replace(one, run=name, shown=name, iteration=iteration, skipped=[], **steps))
    first, last = study.of_records(many, [], None, None, "strong", False, None)
    return html_of("500 runs", [*first, *steps_views(many, None), *last])


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
