"""What the audit finds, each finding linked to the cell that it is about."""

from collections.abc import Callable

from analysis.common.tables import Column, Table
from analysis.logs.published_csv import column_name
from analysis.pages.section import Section
from analysis.published.finding import Finding

# What a finding is about beside its own column; the first one that a table has leads back.
_ABOUT = {
    "gpus": ("gpus", "tp", "pp", "dp"),
    "batch": ("global_batch", "micro_batch", "gas", "dp"),
    "tflops": ("published", "tflops", "printed_tflops", "step_s"),
    "peak": ("published", "tflops", "printed_tflops"),
    "repeats": ("step_s",),
    "efficiency": ("efficiency", "speedup"),
    "wall clock": ("wall_s",),
    "commits": ("commit",),
    "skipped": ("notes", "verdict"),
    "loss": ("notes", "verdict"),
}


def view(
    title: str,
    found: list[Finding],
    refused: list[str],
    name: str,
    table: Table,
    row_of: Callable[[Finding], int | None],
) -> Section:
    """The findings, one a row; row_of: the number of the row of `table`, which the page calls
    `name`, that a finding is about."""
    audit, own = Section(title, [*refused]), f"{name}-audit"
    rows = []
    keys = [column.key for column in table.shown]
    for finding in found:
        row = row_of(finding)
        if row is not None:
            about = dict.fromkeys((column_name(finding.column), *_ABOUT.get(finding.kind, ())))
            about = [key for key in about if key in keys] or keys[:1]
            audit.links += [((own, len(rows), "finding"), (name, row, key)) for key in about]
        rows.append(
            {"line": finding.line or None, "kind": finding.kind, "finding": finding.message}
        )
    columns = [
        Column("line", "line of the file", "d", seldom=True),
        Column("kind", "about"),
        Column("finding", "finding"),
    ]
    audit.tables[own] = Table(columns, rows)
    if not (found or refused):
        audit.words.append("The audit found nothing.")
    elif audit.links:
        audit.words.append("A finding leads to the cell that it is about, and back.")
    return audit
