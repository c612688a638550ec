"""The views of a page's runs as a whole: scaling, their table, and where each stands."""

from dataclasses import replace
from typing import Any

from analysis.common.table import Column, Table, by_key
from analysis.logs.naming import name_of
from analysis.logs.record import Record
from analysis.pages import charts
from analysis.pages.charts import ranked
from analysis.pages.section import Section, Study
from analysis.runs.fairness import is_changed
from base.errors import printable

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
    """Says of what study the runs are, on which machine they ran, with which versions of libraries
    and at which commit; and which of these no run states."""
    records = study.records
    libraries = [record.facts.get("versions") or {} for record in records]
    versions = []
    for library in ("torch", "deepspeed", "megatron-core"):
        if stated := _all(version_of.get(library) for version_of in libraries):
            versions.append(f"{library} {stated}")
    cards = [record.gpu_type for record in records]
    processors = [(record.facts.get("host") or {}).get("cpu") for record in records]
    facts = {
        "Study": _all(record.study for record in records),
        "Machine": _all([*cards, *processors]),
        "Versions": ", ".join(versions),
        "Commit": _all(map(_commit, records)),
    }
    missing = [name.lower() for name, value in facts.items() if not value]
    lines = [f"{name}: {printable(value)}" for name, value in facts.items() if value]
    if missing:
        lines.append(f"No run states: {', '.join(missing)} (--gpu-type gives one)")
    return [Section("About", lines)]


def _commit(record: Record) -> str | None:
    """Returns a run's commit, and whether files had changed since."""
    mark = " (changed)" if is_changed(record) else ""
    return record.commit and record.commit[:12] + mark


def _all(values: Any) -> str:
    """Returns each different value once, joined by commas; without those that are unknown."""
    return ", ".join(map(str, dict.fromkeys(value for value in values if value)))


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
