"""Sections as one HTML file that asks for nothing: style, data and scripts are inside it.

The tables are HTML with the same cells that the commands print, so they are read, printed and
spoken without any script. The raw values stand as JSON in the element `data`, and the scripts that
draw the charts in `vega`, packed: page.js starts them with the first chart.
"""

import base64
import gzip
import json
import math
import re
from dataclasses import asdict
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from analysis.common.tables import Table
from analysis.pages import charts
from analysis.pages.section import Cell, Chart, Section

_HERE = Path(__file__).parent
FIRST = 200  # rows of a long table that are drawn; page.js has the same number


@cache
def _own(name: str) -> str:
    return (_HERE / name).read_text()


@cache
def _packed() -> str:
    """The scripts that draw the charts, as gzip in base64: four tenths of their size."""
    return base64.b64encode(gzip.compress(charts.script().encode(), mtime=0)).decode()


def page(title: str, sections: list[Section]) -> str:
    """The whole file; the same sections give the same text.

    Raises:
        UsageError: vl-convert-python is not installed.
    """
    shown = [section for section in sections if not section.empty]
    tables = {name: _raw(t, name in s.long) for s in shown for name, t in s.tables.items()}
    drawn = [chart for s in shown for chart in s.charts]
    data = {
        "title": title,
        "tables": tables,
        "data": rounded({name: groups for s in shown for name, groups in s.data.items()}),
        "charts": rounded([_chart(c) for c in drawn]),
    }
    numbers = {id(chart): i for i, chart in enumerate(drawn)}
    links: dict[Cell, Cell] = {}
    for a, b in (pair for s in shown for pair in s.links):
        links.setdefault(a, b)
        links.setdefault(b, a)
    body = "\n".join(_section(section, numbers, links) for section in shown)
    own = _own("page.js")
    assert "</script" not in own.lower(), "it would end the element"
    vega = f'{_NOTICE}<script type="application/gzip;base64" id="vega">{_packed()}</script>'
    links = " ".join(f'<a href="#{anchor(s.title)}">{escape(s.title)}</a>' for s in shown)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{MARK} content="{_POLICY}">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{_own("page.css")}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<nav aria-label="Views">{links} <button type="button">Save all data as JSON</button></nav>
<main>
{body}
</main>
<script type="application/json" id="data">{_json(data)}</script>
{vega if drawn else ""}
<script>{own}</script>
</body>
</html>
"""


_NOTICE = (
    "<!-- The scripts of the charts: Vega, Vega-Lite and vega-embed, of vl-convert-python's wheel."
    " Copyright (c) University of Washington Interactive Data Lab; BSD-3-Clause licence:"
    " https://github.com/vega/vega/blob/main/LICENSE -->\n"
)
# Vega makes functions of the expressions in its specifications: 'unsafe-eval' is for those.
MARK = '<meta http-equiv="Content-Security-Policy"'  # no page of others begins as ours do
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline';"
    " img-src data:"
)


def _chart(chart: Chart) -> dict[str, Any]:
    found = {"spec": charts.whole(chart.spec), "data": chart.data, "limit": chart.limit}
    return found | ({"axes": [asdict(axis) for axis in chart.axes]} if chart.axes else {})


def _json(value: Any) -> str:
    """JSON in which no < stands, so that no text of a log can end the element."""
    return json.dumps(finite(value), separators=(",", ":")).replace("<", "\\u003c")


def finite(value: Any) -> Any:
    """The value with None in place of every number that is not finite."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def rounded(value: Any) -> Any:
    """The value with 6 digits of every number of more than 10: such a number was computed, and its
    last digits differ between processors."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    exact = not isinstance(value, float) or value == float(f"{value:.10g}")
    return value if exact or math.isnan(value) else float(f"{value:.6g}")


def _raw(table: Table, long: bool) -> dict[str, Any]:
    """What a table's cells do not say: which are numbers, and the values that they shorten; of a
    long table all values, and how the page writes them."""
    columns = table.shown
    raw = {
        c.key: [row.get(c.key) for row in table.rows]
        for c in columns
        if long or c.spec not in ("", "d")
    }
    if not long:  # page.js writes the cells of a long one
        raw = rounded(raw)
    found = {"keys": [c.key for c in columns], "numbers": _numbers(table), "raw": raw}
    if long:
        found["formats"] = [_format(c.spec) for c in columns]
        found["few"] = {key: few for key in raw if (few := _few(raw[key]))}
        found["raw"] = {key: raw[key] for key in raw if key not in found["few"]}
    return found


def _few(values: list[Any]) -> dict[str, list[Any]]:
    """A column of few values as these, and the place of each row's value among them; else {}."""
    place = {value: i for i, value in enumerate(dict.fromkeys(values))}
    if len(place) > len(values) / 4:
        return {}
    return {"values": list(place), "places": [place[value] for value in values]}


def _format(spec: str) -> tuple[str, int, str]:
    """What writes numbers like the format spec: JavaScript's function, its digits, the unit."""
    if spec in ("", "d"):
        return "toString", 10, ""
    assert re.fullmatch(r"\.\d[f%]|#\.\dg", spec), f"page.js cannot write {spec!r}"
    digits = int(re.sub(r"\D", "", spec))
    return "toPrecision" if spec.endswith("g") else "toFixed", digits, "%" * spec.endswith("%")


def _numbers(table: Table) -> list[str]:
    """The keys of the columns that hold numbers; they stand to the right."""
    return [
        c.key
        for c in table.shown
        if c.spec
        or all(isinstance(r.get(c.key), int | float | None) for r in table.rows)
        and any(r.get(c.key) is not None for r in table.rows)
    ]


def anchor(title: str) -> str:
    """What names a section in the URL: its title's letters and digits, between dashes."""
    return "-".join("".join(c if c.isalnum() else " " for c in title.lower()).split())


def _section(section: Section, numbers: dict[int, int], links: dict[Cell, Cell]) -> str:
    name = anchor(section.title)
    parts = [f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(section.title)}</h2>']
    parts += [f"<p>{escape(words)}</p>" for words in section.words]
    parts += [
        _table(key, table, links, FIRST if key in section.long else None)
        for key, table in section.tables.items()
        if table.rows
    ]
    if section.charts:
        figures = "\n".join(_figure(numbers[id(c)], c) for c in section.charts)
        parts.append(f'<div class="charts">{figures}</div>')
    return "\n".join([*parts, "</section>"])


def _figure(number: int, chart: Chart) -> str:
    said = f"<figcaption>{escape(chart.summary)}</figcaption>" if chart.summary else ""
    label = escape(chart.summary or "the same runs as the chart before", quote=True)
    # vega-embed overwrites the label of the element that it draws in.
    drawn = f'<div class="chart" id="chart-{number}"></div>'
    return f'<figure><div role="img" aria-label="{label}">{drawn}</div>{said}</figure>'


def _at(at: Cell) -> str:
    return ".".join(map(str, at))


def _td(at: Cell, text: str, number: bool, links: dict[Cell, Cell]) -> str:
    if at in links:
        kind = "found n" if number else "found"
        return f'<td id="{_at(at)}" class="{kind}"><a href="#{_at(links[at])}">{text}</a>'
    return f"<td class=n>{text}" if number else f"<td>{text}"


_WIDEST = 44  # characters of a column; what is longer goes on in the next line


def _width(heading: str, texts: list[str]) -> int:
    """Characters that a column is wide: a fixed width lays 500 rows out in two thirds of the time
    that the browser needs to find one."""
    words = max(map(len, re.split(r"[ -]", heading)))  # they are bold, and a sort's arrow follows
    return 3 + max(min(max(map(len, texts)), _WIDEST), round(1.15 * words))


def _table(key: str, table: Table, links: dict[Cell, Cell], most: int | None) -> str:
    columns, numbers = table.shown, _numbers(table)
    texts = [table.texts(column) for column in columns]
    widths = [_width(c.heading, of) for c, of in zip(columns, texts, strict=True)]
    cols = "".join(f'<col style="width:{width}ch">' for width in widths)
    heads = "".join(
        f'<th scope="col"{" class=n" * (c.key in numbers)}><button type="button">'
        f"{escape(c.heading)}</button>"
        for c in columns
    )
    hint = f", or {numbers[0]}&gt;=2" if numbers else ""
    lines = []
    for i, line in enumerate(list(zip(*texts, strict=True))[:most]):
        cells = [
            _td((key, i, c.key), escape(text, quote=False), c.key in numbers, links)
            for c, text in zip(columns, line, strict=True)
        ]
        lines.append(f"<tr>{''.join(cells)}")
    caption = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    below = [f"the first {most} rows that filter and sort leave are shown"] if most else []
    notes = "".join(f"<li>{escape(note)}</li>" for note in [*below, *table.below])
    body = "\n".join(lines)
    return f"""<div class="tools"><label>Filter <input type="search"
placeholder="words{hint}" aria-label="Filter table {escape(key)}"></label>
<button type="button">Copy as Markdown</button>
<button type="button">Copy as CSV</button><span class="said" role="status"></span></div>
<div class="scroll" tabindex="0" role="region" aria-label="Table {escape(key)}">
<table id="table-{key}">{caption}<colgroup>{cols}</colgroup><thead><tr>{heads}</tr></thead>
<tbody>
{body}
</tbody></table></div>
{f"<ul class=notes>{notes}</ul>" if notes else ""}"""
