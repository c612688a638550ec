"""The views of a published CSV: its table, what the audit finds, and its charts."""

import re
from pathlib import Path
from typing import Any

from analysis.common.tables import Column, Table
from analysis.logs.published_csv import PublishedTable, read_csv
from analysis.pages import audit, charts, layout_map
from analysis.pages.section import Chart, Section
from analysis.planner.rows import CRASHED
from analysis.published import recomputed
from analysis.published.audit import audit_paths


def views(path: Path) -> list[Section]:
    """The table, its charts, and the audit's findings.

    Raises:
        UsageError: the CSV cannot be read.
    """
    name = re.sub(r"\W", "_", path.stem)
    source = read_csv(path)
    if path.name == recomputed.JEAN_ZAY and path.resolve().parent == recomputed.FOLDER.resolve():
        table = recomputed.jean_zay(1, 10**6)
    else:
        table = _as_printed(source)
    found, refused, _ = audit_paths([path])
    words = [f"Source: {path}."]
    one = Section(f"Published: {path.name}", words, {name: table})
    one.charts += _charts(name, table)
    title = f"Layout map: {path.name}"
    mapped = layout_map.view(name, table, _SIZE, _key_of(table), title, ("status", CRASHED))
    lines = {row.line_no: i for i, row in enumerate(source.rows)}
    title = f"Audit: {path.name}"
    return [
        one,
        mapped,
        audit.view(title, found, refused, name, table, lambda f: lines.get(f.line)),
    ]


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class _Printed(float):
    """A number that is shown with the digits that were published, as 89.0 or 1.6577e+05."""

    def __new__(cls, text: str) -> "_Printed":
        one = super().__new__(cls, text)
        one.text = text
        return one

    def __str__(self) -> str:
        return self.text


def _as_printed(source: PublishedTable) -> Table:
    """A CSV's cells as they are printed; they sort as numbers where all of a column are. A note
    names the words that keep a column from it."""
    columns, rows = [], [{"file_line": row.line_no} for row in source.rows]
    notes = []
    for key in source.columns:
        texts = [row.text(key) for row in source.rows]
        words = [row for row in source.rows if not _NUMBER.fullmatch(row.text(key) or "0")]
        plain = not words
        numbers = sum(map(bool, texts)) - len(words)
        if 0 < len(words) < numbers:
            are = "is a word" if len(words) == 1 else "are words"
            notes.append(
                f"{key} sorts and filters as words, and no chart shows it: {len(words)} of its"
                f" {len(words) + numbers} values {are}, {words[0].text(key)!r} in line"
                f" {words[0].line_no} for one"
            )
        for row, text in zip(rows, texts, strict=True):
            row[key] = (_Printed(text) if plain else text) if text else None
        columns.append(Column(key, key, seldom=True))
    return Table([Column("file_line", "line of the file", "d"), *columns], rows, notes=notes)


def _key_of(table: Table) -> str:
    """The column that tells the rows apart: the line of the document, or of the file."""
    return "line" if any(c.key == "line" for c in table.shown) else "file_line"


def _charts(name: str, table: Table) -> list[Chart]:
    keys = {c.key for c in table.shown}
    found: list[Chart] = []
    if {"step_s", "predicted_s"} <= keys:
        pairs = [r for r in table.rows if r.get("step_s") and r.get("predicted_s")]
        titles = ["published s/iter", "predicted s/iter"]
        spec = charts.beside("step_s", "predicted_s", titles, _SIZE, pairs, "line")
        worst = max(pairs, key=lambda r: abs(r["predicted_error"]))
        said = f"{len(pairs)} rows; the largest error is {worst['predicted_error']:+.0%}, on line"
        said += f" {worst['line']}. On the dashed line both are equal."
        found.append(Chart(spec, name, said))
    for key in ("megatron", "tflops"):
        if {"gpus", key} <= keys:
            found.append(_by_gpus(name, table.rows, key))
            break
    return found


_SIZE: dict[str, Any] = {
    "field": "params_b",
    "type": "quantitative",
    "title": "parameters (billions)",
    "scale": {"type": "log", "scheme": {"name": "viridis", "extent": [0.2, 0.95]}},
}


def _by_gpus(name: str, rows: list[dict[str, Any]], key: str) -> Chart:
    known = [r for r in rows if isinstance(r.get(key), int | float) and r.get("gpus")]
    title = "model TFLOP/s per GPU" if key == "megatron" else "TFLOP/s per GPU, as printed"
    spec = charts.points("gpus", key, ["GPUs", title], _SIZE, known)
    best = max(known, key=lambda r: r[key])
    line = best.get("line") or best["file_line"]
    said = f"{len(known)} rows; most: {best[key]:.1f} on {best['gpus']:g} GPUs, line {line}."
    return Chart(spec, name, said)
