"""The views of a page's runs as a whole: scaling, their table, and where each stands."""

from dataclasses import replace
from typing import Any

from analysis.common.table import Column, Table, by_key
from analysis.logs.naming import name_of
from analysis.pages import charts
from analysis.pages.charts import ranked
from analysis.pages.section import Section, Study
from analysis.runs.stated_facts import fact_lines

Rows = list[dict[str, Any]]
RESULTS = ("gpus", "engine", "speedup", "efficiency", "step_s", "tokens_per_s", "tflops", "mfu")
RESULTS = (*RESULTS, "predicted_s", "predicted_error", "peak_gib", "parity", "verdict")
_SETTINGS = (
    Column("n_micro", "micro-batches", "d", seldom=True),
    Column("global_batch", "global batch", "d", seldom=True),
    Column("seq_len", "seq", "d", seldom=True),
    Column("zero_stage", "ZeRO", "d", seldom=True),
    *by_key(("recompute", "precision"), seldom=True),
)


def scaling(study: Study) -> list[Section]:
    """Shows speedup, or weak efficiency, as one bar a run, where the first screen has another
    picture."""
    drawn = charts.scaling(study.table.rows, study.kind, study.palette)
    others = [chart for name, chart in drawn.items() if name != next(iter(drawn))]
    return [Section(f"{study.kind.capitalize()} scaling", charts=others)]


def runs(study: Study) -> list[Section]:
    """Shows the table of `analysis.tflops` with every setting of the layout, in the order of
    `ranked`."""
    rows = [
        row | {column.key: getattr(record, column.key) for column in _SETTINGS}
        for record, row in zip(study.records, study.table.rows, strict=True)
    ]
    columns: list[Column] = []
    for column in study.table.columns:
        columns += _SETTINGS if column.key == "step_s" else ()
        columns.append(column)
    rows = ranked(rows)
    table = replace(study.table, title="", columns=columns, rows=rows)
    return [Section("Runs", tables={"runs": table}, results=RESULTS)]


def about(study: Study) -> list[Section]:
    """Says of what study the runs are, and what they state of machine, program and model."""
    names = dict.fromkeys(record.study for record in study.records if record.study)
    words = [f"study: {', '.join(names)}"] if names else []
    return [Section("About", words + fact_lines(study.records))]


def provenance(study: Study) -> list[Section]:
    """Says where each run stands, what read it, and which facts its log does not say itself."""
    columns = [
        *by_key(("run", "source", "format", "commit")),
        Column("started", "started", seldom=True),
        Column("origin", "facts from elsewhere than the log", seldom=True),
    ]
    rows = [
        {
            "run": name_of(record),
            "source": record.source,
            "format": record.format,
            "commit": record.commit and record.commit[:12],
            "started": record.facts.get("started_utc"),
            "origin": ", ".join(
                f"{name}: {origin}"
                for name, origin in record.origin.items()
                if origin not in ("log", "run.json")
            )
            or None,
        }
        for record in study.records
    ]
    words = [f"Not read: {line}" for line in study.refused]
    return [Section("Provenance", words, {"provenance": Table(columns, rows)})]
