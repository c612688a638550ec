"""The row of one run by itself: its facts, rates, TFLOP/s and MFU, and why the unknown ones are."""

from typing import Any, NamedTuple

import numpy as np

from analysis.common.reasons import ASIDE, DOUBT, MISSING, Reason
from analysis.common.statistics import median_of
from analysis.logs.naming import name_of
from analysis.logs.parsing.json_values import known
from analysis.logs.record import SEVERAL_BATCHES, Record
from analysis.runs import throughput
from analysis.runs.denominators import denominator
from analysis.runs.fairness import CHANGED, is_changed
from analysis.runs.judged import Run
from analysis.runs.verdict import REGIMES, SKIPPED, UNFIT, UNSURE
from base.units import GIB
from models.flops import DEFAULT_CONVENTION
from parallel.measure.steady_time import Steady

# What a row has of its record as it stands.
_FACTS = """source format engine gpus tp cp pp vpp dp micro_batch global_batch seq_len model params
    precision gpu_type""".split()
OF_RANKS = ("compute_s", "communication_s")  # where a log has them, of the slowest rank
OF_PRINTED_MFU = ("printed_mfu", "mfu_peak", "restated_mfu")
OF_EXPERTS = ("ep", "etp", "routing", "dropped", "expert_load", "dispatcher")
OF_WHOLE_RUN = "the log states it of the whole run alone, not of iterations (--window)"
_USED = {"6n": "6 per stated parameter", throughput.PRINTED: "as the log prints them"}


class Row(NamedTuple):
    """The row of a run by itself, and why its values are unknown or in doubt."""

    values: dict[str, Any]
    reasons: list[Reason]


def row_of(run: Run, convention: str | None) -> Row:
    """Returns the row of a run; its `fit` says whether it can be compared with others.
    `convention` None takes the first that its log has the facts for."""
    record, time = run.record, run.time
    untimed = "" if time else run.judgement.unfit
    entries = record.steps[run.entries]
    totals = {} if run.window else record.totals  # a window shows no number of the whole run
    rates = _Rates(None, None) if untimed else _rates(record, time, entries, totals)
    is_mixed = any(doubt.kind == REGIMES for doubt in run.judgement.doubts)
    printed = entries if len(entries) or run.window else record.steps
    printed_tflops = None if is_mixed else median_of(printed["tflops"])
    missing = throughput.plain_missing(record)
    of_whole = OF_WHOLE_RUN if run.window and record.totals and not len(entries) else ""
    if time is None:
        no_time = untimed or of_whole or throughput.time_missing(record)
        missing.append(Reason(MISSING, no_time, ("step_s",)))
    if run.window and (parts := tuple(name for name in OF_RANKS if name in record.totals)):
        missing.append(Reason(MISSING, OF_WHOLE_RUN, parts))
    no_tokens = ""
    if rates.tokens_per_s is None:
        no_tokens = untimed or of_whole or throughput.tokens_missing(record, time is not None)
        missing.append(Reason(MISSING, no_tokens, ("tokens_per_s",)))
    rate = _throughput(run, rates.tokens_per_s, printed_tflops, convention)
    mfu, no_mfu = throughput.utilisation(record, rate.tflops, rate.convention)
    doubts = [Reason(ASIDE, CHANGED)] if is_changed(record) else []
    if rate.tflops is None:
        # That no rate is known says more than which facts the FLOPs lack.
        also = no_tokens if no_tokens == throughput.NO_RATE or not rate.reason else ""
        reason = "; ".join(filter(None, [rate.reason, also]))
        missing.append(Reason(MISSING, reason, ("tflops",)))
    elif rate.reason:
        doubts.append(Reason(DOUBT, f"TFLOP/s: {_USED[rate.convention]}, for {rate.reason}"))
    if mfu is None:
        if rate.convention == throughput.PRINTED:
            no_mfu = f"{no_mfu}, for {rate.reason}"
        missing.append(Reason(MISSING, no_mfu, ("mfu",)))
    doubts += throughput.packing_doubt(record, rate)
    doubts += throughput.above_peak(record, rate.tflops, rate.convention)
    doubts += throughput.printed_doubt(record)
    printed = denominator(
        record, entries if run.window else record.steps[time.first if time else 0 :]
    )
    if printed:
        doubts.append(Reason(ASIDE if printed.is_cards else DOUBT, printed.text))
    logged = record.step_stats(entries if run.window else None)
    values = {
        **{name: getattr(record, name) for name in (*_FACTS, *OF_EXPERTS)},
        **{name: totals.get(name) for name in OF_RANKS},
        **{f"step_s_{name}": seconds for name, seconds in logged.items()},
        "run": name_of(record),
        "origin": {name: origin for name, origin in record.origin.items() if origin != "log"},
        "verdict": run.judgement.verdict,
        "fit": run.is_fit,
        "unsure": any(doubt.kind in UNSURE for doubt in run.judgement.doubts),
        "steps": len(record.steps),
        "step_s": time and time.step_s,
        "steady_step_s": time and time.step_s,
        "steady_n": time.n if time else 0,
        "steady_ci95": list(time.ci95) if time and time.ci95 else None,
        "tokens_per_s": rates.tokens_per_s,
        "samples_per_s": rates.samples_per_s,
        "printed_tflops": printed_tflops,
        "tflops": rate.tflops,
        "convention": rate.convention,
        "mfu": mfu,
        "printed_mfu": printed and printed.share,
        "mfu_peak": printed and known(printed.tflops),  # TFLOP/s that it is over
        "restated_mfu": printed and printed.restated,
        "peak_gib": record.peak_bytes and record.peak_bytes / GIB,
    }
    return Row(values, [*missing, *run.judgement.told, *doubts])


class _Rates(NamedTuple):
    samples_per_s: float | None
    tokens_per_s: float | None


def _rates(
    record: Record, time: Steady | None, entries: np.ndarray, totals: dict[str, float]
) -> _Rates:
    """Returns the rates of all GPUs: what the steady time says, else what the log prints in the
    entries that it is of, else in `totals`."""
    samples, tokens = (median_of(entries[name]) or totals.get(name) for name in _Rates._fields)
    of_whole_run = record.mean_of and samples  # a printed rate of the whole run leaves padding out
    if time is not None and time.step_s > 0 and record.global_batch and not of_whole_run:
        samples = record.global_batch / time.step_s
        if SEVERAL_BATCHES in record.doubts:  # its steps are of several batches
            samples = median_of(entries["sequences"] / entries["step_s"])
        tokens = None if record.seq_len else tokens
    if samples and record.seq_len and not tokens:
        tokens = samples * record.seq_len
    return _Rates(known(samples), known(tokens))


def _throughput(
    run: Run, tokens_per_s: float | None, printed: float | None, convention: str | None
) -> throughput.Throughput:
    """Returns the run's TFLOP/s per GPU, or why there are none."""
    unfit = {doubt.kind for doubt in run.judgement.doubts if doubt.kind in UNFIT}
    if unfit - {SKIPPED}:  # where the optimizer alone was skipped, the rest took its time
        used = convention or DEFAULT_CONVENTION
        return throughput.Throughput(None, used, run.judgement.unfit)
    return throughput.throughput_of(run.record, tokens_per_s, printed, convention)
