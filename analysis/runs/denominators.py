"""What the MFU that a log prints is over, and which runs' MFUs are over different peaks."""

from collections import defaultdict

import numpy as np

from analysis.common.statistics import median_of
from analysis.common.terminal import who
from analysis.logs.naming import name_of
from analysis.logs.record import Record
from analysis.runs.throughput import tflops_per_gpu
from base.intervals import Interval
from models.mfu_peaks import PrintedMfu, figure, printed_mfu

_STATED = 0.005  # share; programs state their peak with three digits or more


def denominator(record: Record, entries: np.ndarray | None = None) -> PrintedMfu | None:
    """Returns what the printed MFU is over: the peak that the program states, else its TFLOP/s over
    its MFU, as far as their digits go, else by our count. None where it prints no MFU. entries: the
    rows of the table of steps that count, else all."""
    entries = record.steps if entries is None else entries
    mfu, tflops = entries["mfu"], entries["tflops"]
    if (share := median_of(mfu)) is None:
        return None
    over, has_both = None, (mfu > 0) & (tflops > 0)
    if record.mfu_flops:
        stated = record.mfu_flops / 1e12
        over = Interval(stated * (1 - _STATED), stated * (1 + _STATED))
    elif has_both.any():
        mfu, tflops = mfu[has_both], tflops[has_both]
        half_mfu, half_tflops = _half_unit(100 * mfu) / 100, _half_unit(tflops)
        lows = (tflops - half_tflops) / (mfu + half_mfu)
        highs = (tflops + half_tflops) / np.maximum(mfu - half_mfu, mfu / 2)
        over = Interval(max(float(np.median(lows)), 1e-9), float(np.median(highs)))
    counted = None if over else tflops_per_gpu(record, _tokens_per_s(record, entries), "palm").value
    program = record.engine or record.format
    return printed_mfu(share, over, program, record.gpu_type, record.peak_tflops, counted)


def _tokens_per_s(record: Record, entries: np.ndarray) -> float | None:
    """Returns the median of the tokens per second that are printed, or that the times make."""
    made = record.batches_of(entries) * (record.seq_len or np.nan) / entries["step_s"]
    return median_of(np.where(np.isnan(entries["tokens_per_s"]), made, entries["tokens_per_s"]))


def _half_unit(values: np.ndarray) -> float:
    """Returns half a unit of the last decimal that the numbers were printed with."""
    for decimals in range(6):
        if np.allclose(values, np.round(values, decimals), rtol=0, atol=1e-9 * values.max()):
            return 0.5 * 10.0**-decimals
    return 0.0


def other_denominators(records: list[Record]) -> list[str]:
    """Returns a note that names the peaks that the runs' printed MFUs are over, where they are not
    all over their own card's, or over one number."""
    by_peak: dict[str, list[str]] = defaultdict(list)
    for record in records:
        if printed := denominator(record):
            own = "their card's bf16 peak" if printed.is_cards else ""
            by_peak[own or f"{figure(printed.tflops)} TFLOP/s"].append(name_of(record))
    if len(by_peak) < 2:
        return []
    peaks = "; ".join(f"{peak}: {who(names, len(records))}" for peak, names in by_peak.items())
    return [f"the printed MFUs are over different peaks, so they do not compare ({peaks})"]
