"""Every configuration of a study beside its baseline, as plain data: scaling_report.json."""

import statistics
from collections import defaultdict
from dataclasses import asdict
from typing import Any

from analysis.common.statistics import spread_of
from analysis.logs.load import called, name_of
from analysis.logs.record import Record
from analysis.logs.verdict import describe_rule, judge, timed
from analysis.measured import predictions
from analysis.measured.fairness import (
    busy,
    configuration,
    differences,
    named,
    other_kernels,
    scaling_of,
    shared_cores,
    sharing,
)
from analysis.measured.scaling_curve import against, of_repeats, of_run
from base.errors import UsageError
from parallel.config.axes import AXES
from parallel.measure.steady_time import Steady
from parallel.record.schema import utc_now

FILE = "scaling_report.json"
Timed = tuple[Record, Steady]  # a run and its steady step time


def gather(records: list[Record]) -> tuple[list[list[Timed]], list[str]]:
    """The timed runs, repeats together, and one line for each run that cannot be used."""
    groups: dict[tuple, list[Timed]] = defaultdict(list)
    left_out = []
    for record in records:
        time = timed(record)
        judgement = judge(record, time)
        if judgement.verdict != "complete":
            why = f"{judgement.verdict}: {judgement.proof}".rstrip(": ")
            left_out.append(f"{name_of(record)}: {why}")
        elif judgement.unfit:
            left_out.append(f"{name_of(record)}: {'; '.join(map(str, judgement.flags))}")
        elif time is None or not time.step_s > 0 or not record.gpus:
            left_out.append(f"{name_of(record)}: no steady time or no number of GPUs")
        else:
            groups[configuration(record)].append((record, time))
    return list(groups.values()), left_out


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
    groups, left_out = gather(records)
    if not groups:
        raise UsageError("; ".join(left_out + refused) or "no run to compare")
    base, missing = _baseline(groups, records, baseline)
    left_out += missing
    kind = kind or scaling_of([group[0][0] for group in groups])
    groups.sort(key=lambda g: (g[0][0].gpus, str(named(g[0][0]))))
    partners = shared_cores(records)
    entries = [_entry(group, base, kind, partners) for group in groups]
    if predict:
        predicted, lacking = predictions.seconds([group[0][0] for group in groups], predict)
        for entry, seconds, why in zip(entries, predicted, lacking, strict=True):
            off = predictions.error(seconds, entry["step_s"]["median"])
            entry |= {"predicted_s": seconds, "predicted_error": off}
            if why:
                entry["not_predicted_because"] = why["predicted_s"]
    return {
        "schema_version": "1",
        "study": base[0][0].study,
        "written_utc": utc_now(),
        "scaling": kind,
        "baseline": named(base[0][0]) or name_of(base[0][0]),
        "step_time_rule": describe_rule(None, "median"),
        "confidence": "95 %, Student's t over the runs",
        **({"predicted_by": predictions.source(predict)} if predict else {}),
        "configurations": entries,
        "left_out": left_out + refused,
    }


def _baseline(
    groups: list[list[Timed]], records: list[Record], baseline: str | None
) -> tuple[list[Timed], list[str]]:
    """(the configuration that the others are compared with, a line where it is not the study's).

    Raises:
        UsageError: no timed configuration is called `baseline`, or several are.
    """
    wanted = baseline or next((b for r in records if (b := r.baseline)), None)
    fits = [g for g in groups if wanted and any(called(wanted, r) for r, _ in g)]
    if len(fits) > 1:
        names = ", ".join(name_of(r) for g in fits for r, _ in g)
        raise UsageError(f"the baseline {wanted} fits {names}; name one of these with --baseline")
    if fits:
        return fits[0], []
    if baseline:
        known = ", ".join(str(named(g[0][0])) for g in groups)
        raise UsageError(f"no timed configuration called {baseline!r}; there are: {known}")
    missing = [f"the study's baseline {wanted} has no time"] * bool(wanted)
    return min(groups, key=lambda g: g[0][0].gpus), missing


def _entry(
    group: list[Timed], base: list[Timed], kind: str, partners: dict[str, str]
) -> dict[str, Any]:
    record, start = group[0][0], base[0][0]
    times = [time.step_s for _, time in group]
    per_step = record.global_batch and record.seq_len and record.global_batch * record.seq_len
    unfair = list(dict.fromkeys(d for r, _ in group for d in differences(r, start, kind)))
    entry: dict[str, Any] = {
        "configuration": named(record) or name_of(record),
        "runs": [name_of(r) for r, _ in group],
        **{k: getattr(record, k) for k in ("engine", "gpus", *AXES, "zero_stage")},
        **{k: getattr(record, k) for k in ("precision", "seq_len", "global_batch", "commit")},
        "fixed_work": record.facts.get("work"),
        "n": len(times),
        "step_s": asdict(spread_of(times)) | {"median": statistics.median(times)},
        "tokens_per_sec": asdict(spread_of([per_step / t for t in times])) if per_step else None,
        **dict.fromkeys(("speedup_vs_1gpu", "speedup_vs_baseline", "scaling_efficiency")),
    }
    if unfair:
        return entry | {"invalid_comparison": unfair}
    shared = sharing([r for r, _ in group], [r for r, _ in base], partners)
    sides = (of_repeats([of_run(t, r.gpus) for r, t in side]) for side in (group, base))
    found = against(*sides, kind, shared)
    crowded = record.oversubscribed or start.oversubscribed
    why = found.why or ("oversubscribed: ranks share cores" if crowded else "")
    doubts = busy([r for r, _ in group]) + other_kernels([start, record])
    odd = "; ".join(filter(None, (not why and found.note, *doubts)))
    return entry | {
        "speedup_vs_1gpu": found.speedup if start.gpus == 1 else None,
        "speedup_vs_baseline": found.speedup,
        "scaling_efficiency": None if crowded else found.efficiency,
        **({"no_efficiency": why} if why else {}),
        **({"note": odd} if odd else {}),
    }
