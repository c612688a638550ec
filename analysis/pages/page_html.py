"""Sections as one HTML file that asks for nothing: style, data and scripts are inside it.

The tables are plain HTML, so they are read, printed and spoken without any script. The scripts that
draw the charts are packed with gzip: page.js starts them with the first chart.
"""

import json
from pathlib import Path
from typing import Any

from analysis.common.reasons import UNKNOWN
from analysis.common.table import Column, Table
from analysis.common.terminal import cut_apart
from analysis.pages.charts import DIGITS, scripts
from analysis.pages.section import Page
from base.errors import printable
from base.storage import finite

MARK = '<meta http-equiv="Content-Security-Policy"'  # no page of others begins as ours do
LONGEST = 48  # characters of a row's name; all of it is in its tip, and in the provenance
FEW = 4  # rows of a table that needs no filter
_HERE = Path(__file__).parent


def html_of(page: Page) -> str:
    """Returns the whole file; the same page gives the same text."""
    import jinja2

    filled = [section for section in page.sections if not section.empty]
    charts = [page.first.picture] if page.first.picture else []
    charts += [chart for section in filled for chart in section.charts]
    # No < stands in the JSON, so that no text of a log can end the element.
    data = json.dumps([finite(c.spec, DIGITS) for c in charts], separators=(",", ":"))
    template = jinja2.Template(
        (_HERE / "page.html").read_text(),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    return template.render(
        mark=MARK,
        css=(_HERE / "page.css").read_text(),
        js=(_HERE / "page.js").read_text(),
        title=page.title,
        first=page.first,
        sections=filled,
        number=charts.index,
        tables_of=lambda section: [
            _table(name, table, section.results, page.palette)
            for name, table in section.tables.items()
            if table.rows
        ],
        data=data.replace("<", "\\u003c"),
        vega=scripts() if charts else "",
    )


def _table(
    name: str, table: Table, results: tuple[str, ...], palette: dict[str, str]
) -> dict[str, Any]:
    """Returns a table as page.js draws it. Columns that are the same in every row are one line
    above it. The results stand behind the first column, then the settings. Long notes of rows
    stand below."""
    first, *columns = table.shown
    constant: list[str] = []
    varied: list[Column] = []
    unknown: list[str] = []
    for column in columns:
        texts = set(table.texts(column))
        if texts == {UNKNOWN}:
            unknown.append(column.heading)
        elif len(texts) == 1 and len(table.rows) > 1 and not column.long:
            constant.append(f"{column.heading} {texts.pop()}")
        elif not column.long:
            varied.append(column)
    order = {key: place for place, key in enumerate(results)}
    varied.sort(key=lambda column: order.get(column.key, len(order)))
    columns = [first, *varied]
    heads = [{"text": column.heading, "number": table.is_numeric(column)} for column in columns]
    cells = [table.texts(column) for column in columns]
    cells[0] = cut_apart(cells[0], LONGEST)
    notes = [*_row_notes(table), *table.below]
    if unknown:
        notes.append(f"not known in any row: {', '.join(unknown)}")
    return {
        "name": name,
        "title": table.title,
        "same": ", ".join(constant),
        "filter": len(table.rows) > FEW,
        "heads": heads,
        "rows": [
            [
                {
                    "text": text,
                    "full": str(row.get(column.key)) if len(text) == LONGEST else "",  # maybe cut
                    "raw": finite(row.get(column.key), DIGITS)  # to sort by
                    if head["number"] and text != UNKNOWN
                    else None,
                    "colour": palette.get(text) if column.key == "engine" else None,
                }
                for text, column, head in zip(texts, columns, heads, strict=True)
            ]
            for row, *texts in zip(table.rows, *cells, strict=True)
        ],
        "notes": notes,
    }


def _row_notes(table: Table) -> list[str]:
    """Returns the sentences of rows in `long` columns, each once with the rows that it is about."""
    name = table.shown[0].key
    rows: dict[str, list[str]] = {}
    for column in table.shown:
        if column.long:
            for row in table.rows:
                if row.get(column.key):
                    rows.setdefault(str(row[column.key]), []).append(str(row[name]))
    return [f"{', '.join(names)}: {text}" for text, names in rows.items()]
