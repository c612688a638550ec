"""The views of a page's runs as a whole: scaling, their table, and where each stands."""

from dataclasses import replace
from typing import Any

from analysis.common.table import Column, Table, by_key
from analysis.logs.naming import name_of
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
    """Shows speedup, or weak efficiency, against GPUs, and the same as one bar a run."""
    drawn = charts.scaling(study.table.rows, study.kind)
    return [Section(f"{study.kind.capitalize()} scaling", charts=list(drawn.values()))]


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
    """Says of what study the runs are, and on which machine they ran."""
    records = study.records
    hosts = [r.facts.get("host") or {} for r in records]
    versions = [
        f"{name} {_all((r.facts.get('versions') or {}).get(name) for r in records)}"
        for name in ("torch", "deepspeed", "megatron-core")
    ]
    facts = {
        "Study": _all(r.study for r in records),
        "Machine": _all([*(r.gpu_type for r in records), *(h.get("cpu") for h in hosts)]),
        "Versions": ", ".join(name for name in versions if name.split(" ", 1)[1]),
        "Commit": _all(
            r.commit and r.commit[:12] + (" (changed)" if is_changed(r) else "") for r in records
        ),
    }
    missing = [name.lower() for name, value in facts.items() if not value]
    lines = [f"{name}: {printable(value)}" for name, value in facts.items() if value]
    if missing:
        lines.append(f"No run states: {', '.join(missing)} (--gpu-type gives one)")
    return [Section("About", lines)]


def _all(values: Any) -> str:
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
