"""The table of runs: one row each with seconds, TFLOP/s, MFU, peak GiB, speedup and efficiency."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from analysis.common.table import Column, Table, by_key
from analysis.logs.load import baseline_of, name_of, own_name
from analysis.logs.record import Record
from analysis.logs.verdict import (
    UNFIT,
    Judgement,
    describe_rule,
    judge,
    no_timing,
    summary,
    timed,
    unfinished,
)
from analysis.runs import predictions, scaling_curve, throughput
from analysis.runs.fairness import (
    CHANGED,
    busy,
    changed,
    configuration,
    differences,
    is_changed,
    notes_on,
    question_of,
    scaling_of,
    shared_cores,
)
from analysis.runs.loss_parity import NOT_VERIFIED, verify
from analysis.runs.scaling_curve import MARKED, Ratio, Side, Timed, side_of
from base.errors import Answer
from base.units import GIB
from models.flops import DEFAULT_CONVENTION
from parallel.config.axes import shown_axes
from parallel.measure.steady_time import Steady, Window

# What the rows have beside the keys of `verdict.summary`; `--format json` prints them, too.
ADDED = ("run", "origin", "peak_gib", "convention", "tflops", "mfu", "speedup", "efficiency")
ADDED = (*ADDED, "speedup_ci95", "parity", "missing", "precision", "gpu_type")
# Where a run has experts.
OF_RANKS = ("compute_s", "communication_s")  # where a log has them, of the slowest rank
OF_EXPERTS = ("ep", "etp", "routing", "dropped", "expert_load", "dispatcher")


def _baseline_of(record: Record, records: list[Record]) -> Answer[Record]:
    """The baseline that the run's own run.json names; `why` where several runs fit."""
    wanted = record.baseline
    # Two machines may have the same study: the baseline is in the run's own folder.
    fits = [
        r
        for r in records
        if wanted
        and own_name(r) == wanted
        and Path(r.source).parent == Path(record.source).parent
        and r.study == record.study
    ]
    if len(fits) > 1:
        names = ", ".join(map(name_of, fits))
        return Answer(
            None, f"no speedup: the baseline {wanted} fits {names} (--baseline names one)"
        )
    return Answer(fits[0] if fits else None)


def rows(
    records: list[Record],
    convention: str | None = DEFAULT_CONVENTION,
    baseline: str | None = None,
    kind: str | None = None,
    window: Window | None = None,
    any_commit: bool = False,
) -> list[dict[str, Any]]:
    """One dict per record: `verdict.summary`'s facts and what the table adds to them.

    The speedup and the efficiency of a study's repeats are of their medians, and so are the same.
    convention: None takes for each run the first that its log has the facts for. kind: strong or
    weak scaling; None takes what the runs are. `missing` says for each unknown value which fact
    is absent and how to give it.
    """
    named = baseline_of(baseline, records) if baseline else None
    kind = kind or scaling_of(records)
    parity = verify([r.own for r in records if r.own], Path(named.source) if named else None)
    kinds = {str(path): of_run.verdict.kind for path, of_run in parity.items()}
    partners = shared_cores(records)
    times = {id(r): timed(r, window) for r in records}
    rows = [_row(record, times[id(record)], convention) for record in records]
    repeats: dict[tuple, list[Timed]] = defaultdict(list)
    for record, row in zip(records, rows, strict=True):
        if row["fit"] and not unfinished(record):
            repeats[_repeated(record)].append(Timed(record, times[id(record)]))

    def side(of: Record, base: Record) -> Side:
        alike = [
            run
            for run in repeats[_repeated(of)]
            if not differences(run.record, base, kind, any_commit)
        ]
        return side_of(alike or [Timed(of, times[id(of)])], partners)

    for record, row in zip(records, rows, strict=True):
        base, why = Answer(named) if named else _baseline_of(record, records)
        doubts = [why] if why else []
        timed_repeats = [run.record for run in repeats[_repeated(base)]] if base else []
        if timed_repeats and not any(repeat is base for repeat in timed_repeats):
            base = timed_repeats[0]
        if not row["fit"]:
            ratio = Ratio(None, None, "; ".join(row["unfit"]) or row["missing"]["step_s"])
        elif base is None:
            ratio = Ratio(None, None, why or "no baseline (--baseline NAME)")
        else:
            why = _no_ratio(record, base, times, kind, any_commit)
            ratio = Ratio(None, None, why)
            if not why:
                ratio = scaling_curve.against(side(record, base), side(base, base), kind)
            if ratio.efficiency is not None and (record.oversubscribed or base.oversubscribed):
                ratio = Ratio(ratio.speedup, None, SHARE if record.oversubscribed else CROWDED)
            doubts += filter(None, [ratio.note, ratio.why if ratio.why != SHARE else ""])
        if record.source in partners and partners[record.source] not in ratio.why:
            doubts.append(partners[record.source])
        row["baseline"] = base and name_of(base)
        row["is_baseline"] = base is not None and _repeated(record) == _repeated(base)
        row |= {"speedup": ratio.speedup, "efficiency": ratio.efficiency, "above": ratio.note}
        row["speedup_ci95"] = ratio.interval and list(ratio.interval)
        row["parity"] = kinds.get(record.source, NOT_VERIFIED)
        row["missing"] |= {key: ratio.why for key in MARKED if row[key] is None}
        row["notes"] = "; ".join(row["notes"] + doubts)
        row["reasons"] += doubts + busy([record])
    return rows


def _repeated(record: Record) -> tuple:
    """What the repeats that a study made of a configuration share; another run has it alone."""
    if record.configuration is None:
        return (record.source,)
    return (Path(record.source).parent, record.study, configuration(record))


def _row(record: Record, time: Steady | None, convention: str | None) -> dict[str, Any]:
    """A run by itself; `fit` says whether it can be compared with others."""
    judgement = judge(record, time)
    fit = time is not None and not judgement.unfit
    values = summary(record, time, judgement)
    missing = throughput.plain_missing(record)
    untimed = no_timing(record)
    if time is None:
        missing["step_s"] = str(untimed or throughput.time_missing(record))
    if values["tokens_per_s"] is None:
        missing["tokens_per_s"] = str(untimed or throughput.tokens_missing(record, bool(time)))
    tflops, used, doubts = None, convention or DEFAULT_CONVENTION, []
    flags = [flag for flag in judgement.flags if flag.kind in UNFIT]
    unfit = [flag.text for flag in flags]
    if any(flag.kind != "all skipped" for flag in flags):  # else only the optimizer was skipped
        missing["tflops"] = "; ".join(unfit)
    else:
        tokens_per_s = values["tokens_per_s"]
        if convention:
            tflops, why = throughput.tflops_per_gpu(record, tokens_per_s, convention)
        else:
            printed = values["printed_tflops"]
            tflops, used, why = throughput.best_tflops_per_gpu(record, tokens_per_s, printed)
        if tflops is None:
            no_rate = missing.get("tokens_per_s", "")
            both = [why, no_rate if no_rate == throughput.NO_RATE or not why else ""]
            missing["tflops"] = "; ".join(filter(None, both))
        elif why:
            doubts.append(f"TFLOP/s: {_USED[used]}, for {why}")
    utilisation, why = throughput.utilisation(record, tflops, used)
    if utilisation is None:
        missing["mfu"] = why
    doubts += throughput.above_peak(record, tflops, used) + throughput.printed_doubt(record)
    changed = [CHANGED] if is_changed(record) else []
    return {
        **values,
        "run": name_of(record),
        "origin": {k: origin for k, origin in record.origin.items() if origin != "log"},
        "step_s": time and time.step_s,
        "convention": used,
        "tflops": tflops,
        "mfu": utilisation,
        "precision": record.precision,
        "gpu_type": record.gpu_type,
        "peak_gib": record.peak_bytes and record.peak_bytes / GIB,
        **{name: record.totals.get(name) for name in OF_RANKS},
        **{name: getattr(record, name) for name in OF_EXPERTS},
        "missing": missing,
        "unfit": unfit,
        "reasons": values["reasons"] + changed + doubts,
        "notes": _notes(judgement, time) + doubts,
        "fit": fit,
    }


SHARE, CROWDED = "the ranks share cores", "the baseline is oversubscribed"
_USED = {"6n": "6 per stated parameter", throughput.PRINTED: "as the log prints them"}


def _notes(judgement: Judgement, time: Steady | None) -> list[str]:
    if judgement.verdict != "complete":
        return judgement.reasons
    # A complete run's notes may say why it has no time.
    silent = time is None and not judgement.unfit
    return [doubt.text for doubt in judgement.doubts] + judgement.notes * silent


def _no_ratio(
    record: Record, baseline: Record, times: dict[int, Steady | None], kind: str, any_commit: bool
) -> str:
    """Why a run with a time has no ratio to its baseline, or ""."""
    time, base = times[id(record)], times[id(baseline)]
    if base is None:
        return f"the baseline {name_of(baseline)} has no time"
    if not (time.step_s > 0 and base.step_s > 0):
        return "no time: less than one whole second"
    if not (record.gpus and baseline.gpus):
        return "number of GPUs unknown"
    if ended := unfinished(record):
        return f"no speedup: {ended}"
    if ended := unfinished(baseline):
        return f"no speedup: the baseline {name_of(baseline)} is {ended}"
    if unfair := differences(record, baseline, kind, any_commit):
        return "invalid comparison: " + "; ".join(unfair)
    return ""


def of_records(
    records: list[Record],
    convention: str | None = DEFAULT_CONVENTION,
    baseline: str | None = None,
    kind: str | None = None,
    *,
    window: Window | None = None,
    any_commit: bool = False,
    predict: str | None = None,
) -> Table:
    """The scaling table of runs, with predicted beside measured on a `predict`ed cluster;
    `convention` None: each row names its own where they differ.

    Raises:
        UsageError: there is no such baseline or calibration.
    """
    if baseline:
        baselines = [name_of(baseline_of(baseline, records))]
    else:
        baselines = sorted({r.baseline for r in records} - {None})
    kind = kind or scaling_of(records)
    run_rows = rows(records, convention, baseline, kind, window, any_commit)
    predicted = predictions.of_runs(records, predict)
    for row, prediction in zip(run_rows, predicted, strict=True):
        row["predicted_s"] = prediction.value
        known = prediction.value and row["step_s"]  # positive: the run was faster than predicted
        row["predicted_error"] = prediction.value / row["step_s"] - 1 if known else None
        if prediction.why:
            row["missing"]["predicted_s"] = prediction.why
    used = dict.fromkeys(row["convention"] for row in run_rows if row["tflops"] is not None)
    shared = convention or (next(iter(used), DEFAULT_CONVENTION) if len(used) < 2 else None)
    columns = [
        *by_key(("run", "engine")),
        *by_key(("gpus", *shown_axes(run_rows)), "d"),
        Column("micro_batch", "micro-batch", "d"),
        Column("step_s", "s/iter", ".4g"),
        Column("predicted_s", "predicted s/iter", ".4g", seldom=predict is None),
        Column("predicted_error", "error", "+.1%", seldom=predict is None),
        Column("compute_s", "compute s", ".4g", seldom=True),
        Column("communication_s", "communication s", ".4g", seldom=True),
        Column("tokens_per_s", "tokens/s", ".0f"),
        Column("tflops", f"TFLOP/s/GPU ({shared})" if shared else "TFLOP/s/GPU", ".3g"),
        Column("convention", "convention", asked=shared is not None),
        Column("printed_tflops", "printed", ".3g", seldom=True),
        Column("peak_gib", "peak GiB", ".3g"),
        Column("mfu", "MFU", ".1%"),
        Column("routing", "routing", seldom=True),
        Column("dropped", "dropped", ".2%", seldom=True),
        Column("expert_load", "expert load", ".2f", seldom=True),
        Column("dispatcher", "dispatcher", seldom=True),
        *by_key(("speedup", "efficiency"), ".2f"),
        *by_key(("parity", "verdict")),
        Column("notes", "notes", long="below", tells=MARKED),
        Column("global_batch", "global batch", "d", asked=True),
        Column("seq_len", "sequence length", "d", asked=True),
        Column("steps", "steps", "d", asked=True),
        Column("steady_ci95", "95 % interval", ".4g", asked=True),
        Column("speedup_ci95", "interval of the speedup", ".2f", asked=True),
        Column("reasons", "reasons", asked=True, long="below"),
        Column("precision", "precision", asked=True),
        Column("gpu_type", "processor", asked=True),
    ]
    against = f"{kind} scaling against {', '.join(baselines)}"
    if not baselines:
        against = "none, for no baseline is stated (--baseline NAME)"
    note = (
        f"s/iter: {describe_rule(window)}. TFLOP/s: {shared or 'the named'} convention. Speedup:"
        f" {against}."
    )
    pairs = list(zip(records, run_rows, strict=True))
    compared = [record for record, row in pairs if row["speedup"] is not None]
    if len({_repeated(record) for record in compared}) < len(compared):
        note += " Repeats: the medians of both sides."
    errors = [row["predicted_error"] for row in run_rows]
    notes = [note, *predictions.notes_on(predict, errors, records)]
    doubts = [*busy(records), *notes_on(compared, any_commit)]
    if not compared:
        doubts += changed(records)
    reasons = scaling_curve.reasons(run_rows)
    title = question_of(records)
    return Table(columns, run_rows, title, notes, doubts=doubts, reasons=reasons)
