"""The page's charts as SVG files: the same rows and specifications, drawn without a browser."""

import json
import xml.etree.ElementTree as xml

import pytest

from analysis import page
from analysis.pages import svg
from analysis.pages.html import finite
from analysis.pages.html import page as html_of
from analysis.pages.whole import sections_of
from tests import test_page
from tests.conftest import ROOT

chromium, opened = test_page.chromium, test_page.opened
BREAKDOWN = ROOT / "logs/2-core-cpu/2-core_breakdown"


@pytest.fixture(scope="module")
def sections():
    return sections_of([BREAKDOWN], predict="2-core-cpu")[1]


@test_page.needs_chromium
def test_a_file_draws_the_rows_that_the_page_draws(sections, opened):
    tab = opened(html_of("study", sections))
    theirs = tab.evaluate("charts.map((chart) => chart.wanted())")
    tables = {name: table for s in sections for name, table in s.tables.items()}
    data = {name: groups for s in sections for name, groups in s.data.items()}
    charts = [chart for s in sections for chart in s.charts]
    assert len(charts) == len(theirs) > 10
    for chart, rows in zip(charts, theirs, strict=True):
        mine = json.loads(json.dumps(finite(svg.shown(chart, tables, data))))
        assert mine == rows, chart.data


def test_every_chart_is_a_file_that_repeats_asks_for_nothing_and_has_its_words(sections, tmp_path):
    written = svg.draw(sections, tmp_path / "a")
    charts = [chart for s in sections for chart in s.charts]
    assert len({path.name for path in written}) == len(charts)
    for path, again, chart in zip(written, svg.draw(sections, tmp_path / "b"), charts, strict=True):
        text = path.read_text()
        assert text == again.read_text()
        root = xml.fromstring(text)
        assert (root[0].text or "") == chart.summary
        links = [v for one in root.iter() for k, v in one.attrib.items() if k.endswith("href")]
        assert links == [] and "url(http" not in text


def test_the_flag_writes_the_charts_and_the_page_only_where_it_is_named(tmp_path, capsys):
    folder, file = tmp_path / "charts", tmp_path / "study.html"
    paths = [str(BREAKDOWN / "ddp"), str(BREAKDOWN / "ddp-dp2")]
    assert page.main([*paths, "--svg", str(folder)]) == 0
    written = capsys.readouterr().out.splitlines()
    assert sorted(written) == sorted(map(str, folder.iterdir())) and written
    assert not file.exists() and not (BREAKDOWN / "ddp" / "study.html").exists()
    assert page.main([*paths, "--svg", str(folder), "--out", str(file)]) == 0
    assert file.exists()
    with pytest.raises(SystemExit, match="2"):
        page.main([*paths, "--svg", written[0]])
    assert f"--svg: {written[0]} is a file: name a folder" in capsys.readouterr().err
