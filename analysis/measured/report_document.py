"""Every configuration of a study beside its baseline, as plain data: scaling_report.json."""

from dataclasses import asdict
from typing import Any

from analysis.common.statistics import spread_of
from analysis.logs.load import name_of
from analysis.logs.record import Record
from analysis.logs.verdict import describe_rule
from analysis.measured import predictions
from analysis.measured.fairness import (
    busy,
    by_configuration,
    differences,
    group_called,
    other_kernels,
    scaling_of,
    shared_cores,
)
from analysis.measured.scaling_curve import Timed, against, gather, side_of
from base.errors import UsageError, by_reason
from parallel.config.axes import AXES
from parallel.record.schema import utc_now

FILE = "scaling_report.json"


def report(
    records: list[Record],
    refused: list[str],
    baseline: str | None = None,
    kind: str | None = None,
    predict: str | None = None,
) -> dict[str, Any]:
    """The content of scaling_report.json; predicted beside measured on a `predict`ed cluster.

    Raises:
        UsageError: no run can be used, none is called `baseline`, or there is no such cluster.
    """
    runs, untimed = gather(records)
    left_out = by_reason(untimed)
    if not runs:
        raise UsageError("; ".join(left_out + refused) or "no run to compare")
    groups = by_configuration(sorted(runs, key=lambda run: run.record.gpus))
    wanted = baseline or next((b for r in records if (b := r.baseline)), None)
    start = group_called(wanted, groups) if wanted else None
    if not start and baseline:
        raise UsageError(
            f"no timed configuration called {baseline!r}; there are: {', '.join(groups)}"
        )
    if not start:
        start = next(iter(groups))
        if wanted:
            left_out.append(f"the study's baseline {wanted} has no time")
    kind = kind or scaling_of([run.record for run in runs])
    partners = shared_cores(records)
    entries = [
        _entry(name, repeats, groups[start], kind, partners) for name, repeats in groups.items()
    ]
    if predict:
        firsts = [repeats[0].record for repeats in groups.values()]
        for entry, predicted in zip(entries, predictions.of_runs(firsts, predict), strict=True):
            off = predictions.error(predicted.seconds, entry["step_s"]["median"])
            entry |= {"predicted_s": predicted.seconds, "predicted_error": off}
            if predicted.missing:
                entry["not_predicted_because"] = predicted.missing["predicted_s"]
    return {
        "schema_version": "1",
        "study": groups[start][0].record.study,
        "written_utc": utc_now(),
        "scaling": kind,
        "baseline": start,
        "step_time_rule": describe_rule(None, "median"),
        "confidence": "95 %, Student's t over the runs",
        **({"predicted_by": predictions.source(predict)} if predict else {}),
        "configurations": entries,
        "left_out": left_out + refused,
    }


def _entry(
    name: str, group: list[Timed], base: list[Timed], kind: str, partners: dict[str, str]
) -> dict[str, Any]:
    record, start = group[0].record, base[0].record
    side = side_of(group, partners)
    tokens = (record.global_batch or 0) * (record.seq_len or 0)
    unfair = list(dict.fromkeys(d for run in group for d in differences(run.record, start, kind)))
    entry: dict[str, Any] = {
        "configuration": name,
        "runs": [name_of(run.record) for run in group],
        **{k: getattr(record, k) for k in ("engine", "gpus", *AXES, "zero_stage")},
        **{k: getattr(record, k) for k in ("precision", "seq_len", "global_batch", "commit")},
        "fixed_work": record.facts.get("work"),
        "n": len(group),
        "step_s": asdict(spread_of(side.seconds)) | {"median": side.step_s},
        "tokens_per_sec": asdict(spread_of([tokens / s for s in side.seconds])) if tokens else None,
        **dict.fromkeys(("speedup_vs_1gpu", "speedup_vs_baseline", "scaling_efficiency")),
    }
    if unfair:
        return entry | {"invalid_comparison": unfair}
    ratio = against(side, side_of(base, partners), kind)
    crowded = record.oversubscribed or start.oversubscribed
    why = ratio.why or ("oversubscribed: ranks share cores" if crowded else "")
    doubts = busy([run.record for run in group]) + other_kernels([start, record])
    if ratio.note and not why:
        doubts.insert(0, ratio.note)
    return entry | {
        "speedup_vs_1gpu": ratio.speedup if start.gpus == 1 else None,
        "speedup_vs_baseline": ratio.speedup,
        "scaling_efficiency": None if crowded else ratio.efficiency,
        **({"no_efficiency": why} if why else {}),
        **({"note": "; ".join(doubts)} if doubts else {}),
    }
