"""The first screen of a page of runs, their table, scaling, and where each stands."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from analysis.common.table import Column, Table, by_key
from analysis.common.terminal import cut, who
from analysis.logs.load import name_of
from analysis.logs.record import Record
from analysis.pages import charts
from analysis.pages.charts import ranked, winners
from analysis.pages.section import Section
from analysis.runs import loss_parity
from analysis.runs.fairness import is_changed
from analysis.runs.scaling_curve import reasons
from base.errors import printable

Rows = list[dict[str, Any]]
RESULTS = ("gpus", "engine", "speedup", "efficiency", "step_s", "tokens_per_s", "tflops", "mfu")
RESULTS = (*RESULTS, "predicted_s", "predicted_error", "peak_gib", "parity", "verdict")
NAME = 32  # characters of a run's name in a sentence
FEW = 3  # kinds of doubts of single rows that the first screen names
_SETTINGS = (
    Column("n_micro", "micro-batches", "d", seldom=True),
    Column("global_batch", "global batch", "d", seldom=True),
    Column("seq_len", "seq", "d", seldom=True),
    Column("zero_stage", "ZeRO", "d", seldom=True),
    *by_key(("recompute", "precision"), seldom=True),
)


def summary(
    records: list[Record], table: Table, kind: str, refused: list[str], base: Record | None = None
) -> list[str]:
    """The study's question, what won and by how much, whether the losses are equal, and what is
    doubtful: of the rows of `table`. base: the baseline that was asked for."""
    on_cpu = all(r.facts and not (r.facts.get("host") or {}).get("gpu") for r in records)
    unit = "CPU ranks" if on_cpu else "GPUs"
    return [
        *filter(None, [table.title]),
        _fastest(table.rows, kind, unit),
        _losses(records, base),
        _doubts(table, refused),
    ]


def _fastest(rows: Rows, kind: str, unit: str) -> str:
    best = [row for row in winners(rows) if not row["is_baseline"]]
    if not best:
        known = [row for row in rows if row["tokens_per_s"]]
        if not known:
            return "No run has a time, so nothing is compared."
        if slower := [row for row in rows if row["speedup"] and not row["is_baseline"]]:
            second = max(slower, key=lambda row: row["speedup"])
            next_best = f"the next is {second['run']}, {_ratio(second)}"
            return f"No run is faster than the baseline, {second['baseline']}: {next_best}."
        most = max(known, key=lambda row: row["tokens_per_s"])
        return (
            f"No run has a speedup against a baseline. {most['run']} has the most tokens/s:"
            f" {most['tokens_per_s']:.0f} on {_counted(most['gpus'] or '-', unit)}."
        )
    shown = best if len(best) <= 4 else [best[0], best[len(best) // 2], best[-1]]
    each = "; ".join(
        f"on {_counted(row['gpus'], unit)} {row['run']}, {_ratio(row)}" for row in shown
    )
    baselines = " / ".join(dict.fromkeys(row["baseline"] for row in best))
    return f"Fastest ({kind} scaling against {baselines}): {each}."


def _counted(count: int | str, plural: str) -> str:
    """The count and its noun: 1 file, 2 files."""
    return f"{count} {plural.removesuffix('s') if count == 1 else plural}"


def _ratio(row: dict[str, Any]) -> str:
    efficiency = row["efficiency"]
    share = f"efficiency {efficiency:.2f}" if efficiency is not None else "efficiency withheld"
    if row["above"]:
        share += " (doubtful: above 1)"
    return f"speedup {row['speedup']:.2f}, {share}"


def _losses(records: list[Record], base: Record | None) -> str:
    runs = [record.own for record in records if record.own]
    verdicts = list(loss_parity.verify(runs, Path(base.source) if base else None).values())
    if not verdicts:
        return "Losses: these logs are not compared; only run folders of this repository are."
    kinds = Counter(verdict.verdict.kind for verdict in verdicts)
    known = [v for v in verdicts if v.max_loss_diff is not None]
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    whose = f"{name_of(base)}'s" if base else "the baseline's"
    line = f"Losses beside {whose} at every step: {counts}"
    if known:
        worst = max(known, key=lambda verdict: verdict.max_loss_diff)
        line += f"; the largest difference is {worst.max_loss_diff:.1e} ({worst.run}), the bar"
        line += f" {loss_parity.LOSS_BAR:g}"
    return line + "."


def _doubts(table: Table, refused: list[str]) -> str:
    """How many runs count, and the doubts that the table prints: those of most rows, and its own
    without what stands in brackets."""
    rows = table.rows
    good = [row for row in rows if row["fit"] and row["verdict"] == "complete"]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        notes = row["notes"].split("; ") if row["notes"] else []
        notes = [re.sub(r"^line \d+: ", f"{row['verdict']}: ", note) for note in notes]
        for note in dict.fromkeys(note.partition(":")[0] for note in notes):
            reasons.setdefault(note, []).append(row["run"])
    common = sorted(reasons.items(), key=lambda item: -len(item[1]))
    each = [doubt.partition(" (")[0] for doubt in table.doubts]
    each += [
        f"{reason} ({who([cut(run, NAME) for run in runs], len(rows))})"
        for reason, runs in common[:FEW]
    ]
    if len(common) > FEW:
        each.append(f"{_counted(len(common) - FEW, 'more doubts')} below the table")
    if refused:
        each.append(f"{_counted(len(refused), 'files')} could not be read")
    line = f"{len(good)} of {len(rows)} runs are complete and timed."
    return f"{line} In doubt: {'; '.join(each)}." if each else f"{line} Nothing is in doubt."


def runs(records: list[Record], table: Table) -> Table:
    """The table of `analysis.tflops` with every setting of the layout, in the order of `ranked`."""
    rows = [
        row | {column.key: getattr(record, column.key) for column in _SETTINGS}
        for record, row in zip(records, table.rows, strict=True)
    ]
    columns: list[Column] = []
    for column in table.columns:
        columns += _SETTINGS if column.key == "step_s" else ()
        columns.append(column)
    rows = ranked(rows)
    return replace(table, title="", columns=columns, rows=rows, reasons=reasons(rows))


def about(records: list[Record]) -> list[str]:
    """Of what study, on which machine."""
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
    return lines


def _all(values: Any) -> str:
    return ", ".join(map(str, dict.fromkeys(value for value in values if value)))


def scaling(rows: Rows, kind: str) -> Section:
    """Speedup, or weak efficiency, against GPUs, and the same as one bar a run."""
    return Section(f"{kind.capitalize()} scaling", charts=list(charts.scaling(rows, kind).values()))


def provenance(records: list[Record], refused: list[str]) -> Section:
    """Where each run stands, what read it, and which facts its log does not say itself."""
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
        for record in records
    ]
    words = [f"Not read: {line}" for line in refused]
    return Section("Provenance", words, {"provenance": Table(columns, rows)})
