"""The table of runs: one row each with seconds, TFLOP/s, MFU, peak GiB, speedup and efficiency."""

from collections import defaultdict
from typing import Any, NamedTuple

from analysis.common.table import Column, Table, by_key
from analysis.logs.naming import name_of
from analysis.logs.record import Record
from analysis.logs.step_time import describe_rule, no_timing
from analysis.runs import predictions, throughput
from analysis.runs.baseline import baseline_of, fitting_baselines
from analysis.runs.fairness import (
    CHANGED,
    DEFAULT_TERMS,
    Terms,
    changed,
    differences,
    is_changed,
    notes_on,
    question_of,
    scaling_of,
)
from analysis.runs.judged import Run, judged
from analysis.runs.loss_parity import NOT_VERIFIED, verify
from analysis.runs.ratio import MARKED, Ratio, against, side_of
from analysis.runs.repeats import study_key
from analysis.runs.shared_hosts import busy, shared_cores
from analysis.runs.verdict import UNFIT, Judgement, summary, unfinished
from base.units import GIB
from models.flops import DEFAULT_CONVENTION
from parallel.config.layout import shown_axes
from parallel.measure.steady_time import Steady

# What the rows have beside the keys of `verdict.summary`; `--format json` prints them, too.
ADDED = ("run", "origin", "peak_gib", "convention", "tflops", "mfu", "speedup", "efficiency")
ADDED = (*ADDED, "speedup_ci95", "parity", "missing", "precision", "gpu_type")
# Where a run has experts.
OF_RANKS = ("compute_s", "communication_s")  # where a log has them, of the slowest rank
OF_EXPERTS = ("ep", "etp", "routing", "dropped", "expert_load", "dispatcher")


def rows(
    records: list[Record],
    convention: str | None = DEFAULT_CONVENTION,
    terms: Terms = DEFAULT_TERMS,
) -> list[dict[str, Any]]:
    """Returns one dict per record: `verdict.summary`'s facts and what the table adds to them.

    The speedup and the efficiency of a study's repeats are of their medians, and so are the same.
    convention: None takes for each run the first that its log has the facts for. `missing` says for
    each unknown value which fact is absent and how to give it.
    """
    named = baseline_of(terms.baseline, records) if terms.baseline else None
    parities = verify(records, named)
    runs = judged(records, terms.window)
    study = _Comparing(runs, terms.scaling or scaling_of(records), terms.any_commit)
    rows = []
    for run, fits in zip(runs, fitting_baselines(records, named), strict=True):
        record, row = run.record, _row(run, convention)
        base, ratio, doubts = study.beside(run, fits, row["missing"])
        parity = parities.get(record.source)
        compared = {
            "baseline": base and name_of(base),
            "is_baseline": base is not None and study_key(record) == study_key(base),
            "speedup": ratio.speedup,
            "efficiency": ratio.efficiency,
            "doubtful": dict.fromkeys(MARKED, ratio.doubt) if ratio.doubt else {},
            "speedup_ci95": ratio.interval and list(ratio.interval),
            "parity": parity.verdict.kind if parity else NOT_VERIFIED,
            "notes": "; ".join(row["notes"] + doubts),
            "reasons": row["reasons"] + doubts + busy([record]),
        }
        row |= compared
        row["missing"] |= {key: ratio.missing for key in MARKED if row[key] is None}
        rows.append(row)
    return rows


class _Beside(NamedTuple):
    """A run's baseline, if it has one, its ratio to it, and the doubts about the ratio."""

    baseline: Record | None
    ratio: Ratio
    doubts: list[str]


class _Comparing:
    """The runs of a table with the repeats that a study made of each, and who shared its cores."""

    def __init__(self, runs: list[Run], kind: str, any_commit: bool):
        self.kind, self.any_commit = kind, any_commit
        self.partners = shared_cores([run.record for run in runs])
        self.run_of = {id(run.record): run for run in runs}
        self.repeats: dict[tuple, list[Run]] = defaultdict(list)
        for run in runs:
            if run.is_fit and not unfinished(run.record):
                self.repeats[study_key(run.record)].append(run)

    def beside(self, run: Run, fits: list[Record], missing: dict[str, str]) -> _Beside:
        """Returns the run beside its baseline. `fits` are the runs that may be it; `missing` says
        why values of the run are unknown."""
        base, several = self.timed(fits[0]) if len(fits) == 1 else None, ""
        if len(fits) > 1:
            names = f"{run.record.baseline} fits {', '.join(map(name_of, fits))}"
            several = f"no speedup: the baseline {names} (--baseline names one)"
        doubts = [several]
        if not run.is_fit:
            ratio = Ratio(None, None, missing=run.judgement.unfit or missing["step_s"])
        elif base is None:
            ratio = Ratio(None, None, missing=several or "no baseline (--baseline NAME)")
        else:
            ratio = self.ratio(run, base)
            doubts += [ratio.doubt, "" if ratio.missing == SHARE else ratio.missing]
        if (shared := self.partners.get(run.record.source, "")) not in ratio.missing:
            doubts.append(shared)
        return _Beside(base, ratio, [doubt for doubt in doubts if doubt])

    def timed(self, base: Record) -> Record:
        """Returns the baseline, or, where it has no time that counts, a repeat of it that has."""
        repeats = [run.record for run in self.repeats[study_key(base)]]
        return base if not repeats or any(r is base for r in repeats) else repeats[0]

    def ratio(self, run: Run, base: Record) -> Ratio:
        """Returns the run's ratio to the baseline, or why it is withheld."""
        base_run = self.run_of[id(base)]
        if reason := self._no_ratio(run, base_run):
            return Ratio(None, None, missing=reason)
        sides = [
            side_of(self.repeats[study_key(side.record)] or [side], self.partners)
            for side in (run, base_run)
        ]
        ratio = against(*sides, self.kind)
        if ratio.efficiency is not None and (run.record.oversubscribed or base.oversubscribed):
            return Ratio(
                ratio.speedup, None, missing=SHARE if run.record.oversubscribed else CROWDED
            )
        return ratio

    def _no_ratio(self, run: Run, base: Run) -> str:
        """Returns why a run with a time has no ratio to its baseline, or ""."""
        record, baseline = run.record, base.record
        if base.time is None:
            return f"the baseline {name_of(baseline)} has no time"
        if not (run.time.step_s > 0 and base.time.step_s > 0):
            return "no time: less than one whole second"
        if not (record.gpus and baseline.gpus):
            return "number of GPUs unknown"
        if ended := unfinished(record):
            return f"no speedup: {ended}"
        if ended := unfinished(baseline):
            return f"no speedup: the baseline {name_of(baseline)} is {ended}"
        if unfair := differences(record, baseline, self.kind, self.any_commit):
            return "invalid comparison: " + "; ".join(unfair)
        return ""


def _row(run: Run, convention: str | None) -> dict[str, Any]:
    """Returns the row of a run by itself; `fit` says whether it can be compared with others."""
    record, time, judgement = run
    values = summary(record, time, judgement)
    missing = throughput.plain_missing(record)
    untimed = no_timing(record)
    if time is None:
        missing["step_s"] = str(untimed or throughput.time_missing(record))
    if values["tokens_per_s"] is None:
        missing["tokens_per_s"] = str(untimed or throughput.tokens_missing(record, bool(time)))
    tflops, used, doubts = None, convention or DEFAULT_CONVENTION, []
    if judgement.kinds & {*UNFIT} - {"all skipped"}:  # else only the optimizer was skipped
        missing["tflops"] = judgement.unfit
    else:
        tokens_per_s = values["tokens_per_s"]
        if convention:
            tflops, reason = throughput.tflops_per_gpu(record, tokens_per_s, convention)
        else:
            printed = values["printed_tflops"]
            tflops, used, reason = throughput.best_tflops_per_gpu(record, tokens_per_s, printed)
        if tflops is None:
            no_rate = missing.get("tokens_per_s", "")
            reasons = [reason, no_rate if no_rate == throughput.NO_RATE or not reason else ""]
            missing["tflops"] = "; ".join(filter(None, reasons))
        elif reason:
            doubts.append(f"TFLOP/s: {_USED[used]}, for {reason}")
    utilisation, reason = throughput.utilisation(record, tflops, used)
    if utilisation is None:
        missing["mfu"] = reason
    doubts += throughput.above_peak(record, tflops, used) + throughput.printed_doubt(record)
    changed = [CHANGED] if is_changed(record) else []
    return {
        **values,
        "run": name_of(record),
        "origin": {name: origin for name, origin in record.origin.items() if origin != "log"},
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
        "reasons": values["reasons"] + changed + doubts,
        "notes": _notes(judgement, time) + doubts,
        "fit": run.is_fit,
    }


SHARE, CROWDED = "the ranks share cores", "the baseline is oversubscribed"
_USED = {"6n": "6 per stated parameter", throughput.PRINTED: "as the log prints them"}


def _notes(judgement: Judgement, time: Steady | None) -> list[str]:
    """Returns how a run ended, or of a complete run its doubts, and why it has no time."""
    if judgement.verdict != "complete":
        return [reason.text for reason in judgement.told]
    doubts = [doubt.text for doubt in judgement.doubts]
    # A complete run's notes may say why it has no time.
    says_why = time is None and not judgement.unfit
    return [reason.text for reason in judgement.reasons] if says_why else doubts


def of_records(
    records: list[Record],
    convention: str | None = DEFAULT_CONVENTION,
    terms: Terms = DEFAULT_TERMS,
    predict: str | None = None,
) -> Table:
    """Returns the scaling table of runs, with predicted beside measured on a `predict`ed cluster;
    `convention` None: each row names its own where they differ."""
    if terms.baseline:
        baselines = [name_of(baseline_of(terms.baseline, records))]
    else:
        baselines = sorted({r.baseline for r in records} - {None})
    run_rows = rows(records, convention, terms)
    predicted = predictions.of_runs(records, predict)
    for row, prediction in zip(run_rows, predicted, strict=True):
        row["predicted_s"] = prediction.value
        row["predicted_error"] = None
        if prediction.value and row["step_s"]:  # positive: the run was faster than predicted
            row["predicted_error"] = prediction.value / row["step_s"] - 1
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
        Column("notes", "notes", long="below", explains=MARKED),
        Column("global_batch", "global batch", "d", asked=True),
        Column("seq_len", "sequence length", "d", asked=True),
        Column("steps", "steps", "d", asked=True),
        Column("steady_ci95", "95 % interval", ".4g", asked=True),
        Column("speedup_ci95", "interval of the speedup", ".2f", asked=True),
        Column("reasons", "reasons", asked=True, long="below"),
        Column("precision", "precision", asked=True),
        Column("gpu_type", "processor", asked=True),
    ]
    against = f"{terms.scaling or scaling_of(records)} scaling against {', '.join(baselines)}"
    if not baselines:
        against = "none, for no baseline is stated (--baseline NAME)"
    note = (
        f"s/iter: {describe_rule(terms.window)}. TFLOP/s: {shared or 'the named'} convention."
        f" Speedup: {against}."
    )
    pairs = list(zip(records, run_rows, strict=True))
    compared = [record for record, row in pairs if row["speedup"] is not None]
    if len({study_key(record) for record in compared}) < len(compared):
        note += " Repeats: the medians of both sides."
    errors = [row["predicted_error"] for row in run_rows]
    notes = [note, *predictions.notes_on(predict, errors, records)]
    doubts = [*busy(records), *notes_on(compared, terms.any_commit)]
    if not compared:
        doubts += changed(records)
    return Table(columns, run_rows, question_of(records), notes, doubts)
