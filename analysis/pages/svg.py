"""The charts of a page as SVG files, for documents that run no scripts: the same specifications."""

import re
from html import escape
from pathlib import Path
from typing import Any

from analysis.common.tables import Table
from analysis.pages import charts
from analysis.pages.html import anchor, finite
from analysis.pages.section import Chart, Group, Section
from models.storage import output

WIDTH = 640  # pixels
MARK = "<metadata>analysis.page</metadata>"


def draw(sections: list[Section], folder: Path, force: bool = False) -> list[Path]:
    """Write every chart that has rows to a folder; the files, named after their sections.

    Raises:
        UsageError: vl-convert-python is not installed, or a file there is not ours, without force.
    """
    tables = {name: table for s in sections for name, table in s.tables.items()}
    data = {name: groups for s in sections for name, groups in s.data.items()}
    written = []
    for section in sections:
        for number, chart in enumerate(section.charts, start=1):
            text = _numbered(charts.svg(_spec(chart, tables, data)))
            text = text.replace(">", f"><title>{escape(chart.summary)}</title>{MARK}", 1)
            also = f"-{number}" * (len(section.charts) > 1)
            folder.mkdir(parents=True, exist_ok=True)
            written.append(folder / f"{anchor(section.title)}{also}.svg")
            with output(written[-1], MARK, force) as file:
                file.write_text(text)
    return written


def _numbered(text: str) -> str:
    """The SVG with its ids counted from 0; Vega counts on from one chart to the next."""
    ids = dict.fromkeys(re.findall(r'id="([a-z]+_?)(\d+)"', text))
    new = {name + number: f"{name}{i}" for i, (name, number) in enumerate(ids)}
    return re.sub(
        r'(?<=id=")[a-z]+_?\d+(?=")|(?<=url\(#)[a-z]+_?\d+(?=\))', lambda m: new[m[0]], text
    )


def _spec(chart: Chart, tables: dict[str, Table], data: dict[str, list[Group]]) -> charts.Spec:
    rows = finite(shown(chart, tables, data))
    fixed = {"background": "white", "width": WIDTH}
    return charts.whole(chart.spec) | fixed | {"data": {"name": "rows", "values": rows}}


def shown(
    chart: Chart, tables: dict[str, Table], data: dict[str, list[Group]]
) -> list[dict[str, Any]]:
    """The rows that page.js gives to the chart where nothing is filtered or sorted."""
    if chart.data in tables:
        keys = [c.key for c in tables[chart.data].shown]
        rows = [{key: row.get(key) for key in keys} for row in tables[chart.data].rows]
        return [row | {"left": True} for row in rows] if chart.axes else rows[: chart.limit or None]
    rows = [row for one in data[chart.data] for row in _rows(one)]
    own = dict.fromkeys(row.get("run") for row in rows)
    first = [row["run"] for row in tables["runs"].rows] if "runs" in tables else list(own)
    names = [name for name in first if name in own][: chart.limit or None]
    place = {name: i for i, name in enumerate(names)}
    kept = [row for row in rows if row.get("run") is None or row["run"] in place]
    return sorted(kept, key=lambda row: place.get(row.get("run"), 0))


def _rows(one: Group) -> list[dict[str, Any]]:
    columns = one["columns"]
    n = len(next(iter(columns.values()), []))
    return [one["same"] | {key: values[i] for key, values in columns.items()} for i in range(n)]
