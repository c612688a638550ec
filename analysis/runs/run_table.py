"""The table of runs: one row each with seconds, TFLOP/s, MFU, peak GiB, speedup and efficiency."""

from typing import Any

from analysis.common.reasons import (
    ASIDE,
    DOUBT,
    MISSING,
    NOTE,
    Reason,
    of_cells,
    sentences,
)
from analysis.common.table import Column, Table, axis_columns, by_key
from analysis.logs.naming import name_of
from analysis.logs.record import Record
from analysis.logs.step_time import describe_rule
from analysis.runs import predictions, throughput
from analysis.runs.baseline import baseline_of, fitting_baselines
from analysis.runs.denominators import other_denominators
from analysis.runs.fairness import (
    DEFAULT_TERMS,
    Terms,
    changed,
    notes_on,
    question_of,
    scaling_of,
)
from analysis.runs.judged import Run, judged
from analysis.runs.loss_parity import NOT_VERIFIED, verify
from analysis.runs.ratio import MARKED, Ratio, Sides, withheld
from analysis.runs.repeats import study_key
from analysis.runs.run_row import row_of
from analysis.runs.shared_hosts import busy
from models.flops import DEFAULT_CONVENTION

# What `--format json` prints of a row, in this order; where it is known, what the row has of ranks,
# experts and a printed MFU, too.
JSON_KEYS = """source format verdict reasons engine steps step_s_mean step_s_median step_s_min
    step_s_max steady_step_s steady_n steady_ci95 tokens_per_s samples_per_s printed_tflops gpus tp
    cp pp vpp dp micro_batch global_batch seq_len model params run origin peak_gib convention tflops
    mfu speedup efficiency speedup_ci95 parity missing precision gpu_type""".split()


def rows(
    records: list[Record],
    convention: str | None = DEFAULT_CONVENTION,
    terms: Terms = DEFAULT_TERMS,
    predict: str | None = None,
) -> list[dict[str, Any]]:
    """Returns one dict per record: its own row, and what it is beside its baseline.

    The speedup and the efficiency of a study's repeats are of their medians, and so are the same.
    convention: None takes for each run the first that its log has the facts for. `missing` says for
    each unknown value which fact is absent and how to give it.
    """
    named = baseline_of(terms.baseline, records) if terms.baseline else None
    parities = verify(records, named)
    runs = judged(records, terms.window)
    sides = Sides(runs, terms.scaling or scaling_of(records), terms.any_commit)
    baselines = fitting_baselines(records, named)
    predicted = predictions.of_runs(records, predict)
    rows = []
    for run, fits, prediction in zip(runs, baselines, predicted, strict=True):
        record, (row, reasons) = run.record, row_of(run, convention)
        base, ratio = _beside(run, fits, sides)
        parity = parities.get(record.source)
        error = None
        if prediction.value and row["step_s"]:  # positive: the run was faster than predicted
            error = prediction.value / row["step_s"] - 1
        reasons += ratio.reasons
        reasons += [Reason(ASIDE, text) for text in busy([record])]
        if prediction.reason:
            reasons.append(Reason(MISSING, prediction.reason, ("predicted_s",)))
        compared = {
            "baseline": base and name_of(base),
            "is_baseline": base is not None and study_key(record) == study_key(base),
            "speedup": ratio.speedup,
            "efficiency": ratio.efficiency,
            "speedup_ci95": ratio.interval and list(ratio.interval),
            "parity": parity.verdict.kind if parity else NOT_VERIFIED,
            "predicted_s": prediction.value,
            "predicted_error": error,
            "notes": "; ".join(sentences(reasons, _silent(run))),
            "reasons": sentences(reasons),
        }
        rows.append(row | compared | of_cells(reasons))
    return rows


def _beside(run: Run, fits: list[Record], sides: Sides) -> tuple[Record | None, Ratio]:
    """Returns a run's baseline, if it has one, and the ratio to it. `fits` are the runs that may be
    the baseline."""
    base, ratio = None, Ratio()
    if len(fits) > 1:
        names = f"{run.record.baseline} fits {', '.join(map(name_of, fits))}"
        ratio = withheld(f"no speedup: the baseline {names} (--baseline names one)")
    elif fits:
        base = sides.baseline(fits[0])
    reasons = [*ratio.reasons]
    if not run.is_fit:
        untimed = run.judgement.unfit or throughput.time_missing(run.record)
        reasons.append(Reason(MISSING, untimed, MARKED))
    elif base:
        ratio = sides.ratio(run, base)
        reasons += ratio.reasons
    elif not fits:
        reasons.append(Reason(MISSING, "no baseline (--baseline NAME)", MARKED))
    if run.shared and not any(run.shared in reason.text for reason in reasons):
        reasons.append(Reason(DOUBT, run.shared))
    return base and base.record, ratio._replace(reasons=tuple(reasons))


def _silent(run: Run) -> set[str]:
    """Returns the kinds of reasons that are none of the notes on a run: on a complete one how it
    ended, and what is worth saying of a run without a time."""
    kinds = {MISSING, ASIDE}
    if run.judgement.verdict == "complete":
        kinds.add("complete")
        if run.time or run.judgement.unfit:
            kinds.add(NOTE)
    return kinds


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
    run_rows = rows(records, convention, terms, predict)
    used = dict.fromkeys(row["convention"] for row in run_rows if row["tflops"] is not None)
    shared = convention or (next(iter(used), DEFAULT_CONVENTION) if len(used) < 2 else None)
    columns = [
        *by_key(("run", "engine")),
        Column("gpus", "gpus", "d"),
        *axis_columns(run_rows),
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
        Column("printed_mfu", "printed MFU", ".1%", asked=True),
        Column("mfu_peak", "its peak", ".5g", asked=True),
        Column("restated_mfu", "over the bf16 peak", ".1%", asked=True),
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
        doubts += changed(records) + other_denominators(records)
    return Table(columns, run_rows, question_of(records), notes, doubts)
