"""The one guard of printed rates: a rate counts when it agrees with time, batch and sequence.

    samples/s x seconds a step = global batch          tokens/s x seconds a step = batch x sequence

A rate that does not is unknown, and a note states the numbers. Where it agrees as the other unit,
it is kept as that one, with a note.
"""

import numpy as np

from analysis.records import Record

_AGREES = 0.1  # share; a rate and a time are rounded, and may be taken over other steps
_LAST = 20  # lines; the global batch is the last line's, and may have grown
# As a factor: no convention of counting FLOPs is so far from another, but units are.
_NO_CONVENTION = 30


def unit_of(rate: float, samples_per_s: float, seq_len: int | None, within: float) -> str | None:
    """What `rate` counts, "samples" or "tokens", given about how many samples a second there
    were; None where it is neither. within: by which factor it may be off."""
    for unit, expected in (("samples", samples_per_s), ("tokens", samples_per_s * (seq_len or 0))):
        if expected > 0 and expected / within <= rate <= expected * within:
            return unit
    return None


def judge_rates(record: Record) -> None:
    """Rates that contradict time, batch and sequence length are unknown, or of the other unit."""
    batch, seq_len, step_s = record.global_batch, record.seq_len, record.step_s
    if not batch or batch < 0 or "epochs" in record.extra:  # an epoch's times are of micro-steps
        return
    said = {"samples_per_s": batch, "tokens_per_s": batch * seq_len if seq_len else None}
    for name, expected in said.items():
        rates, times = getattr(record, name), step_s
        total = name in record.totals and "step_s_mean" in record.totals
        if total:
            _judge_total(record, name, expected, seq_len)
        both = np.isfinite(rates) & np.isfinite(times) if len(rates) == len(times) else None
        if expected is None or both is None or not both.any():
            continue
        rate, time = (float(np.median(values[both][-_LAST:])) for values in (rates, times))
        if _agree(rate * time, expected):
            continue
        other = _other(name, rate * time, batch, seq_len)
        record.notes.append(_why(name, rate, time, expected, record, other))
        setattr(record, name, np.full(len(rates), np.nan))
        if other and not np.isfinite(getattr(record, other)).any():
            setattr(record, other, rates)
    _judge_tflops(record, step_s)


def _judge_total(record: Record, name: str, expected: int | None, seq_len: int | None) -> None:
    rate, time = record.totals[name], record.totals["step_s_mean"]
    if expected is None or _agree(rate * time, expected):
        return
    other = _other(name, rate * time, record.global_batch, seq_len)
    record.notes.append(_why(name, rate, time, expected, record, other))
    del record.totals[name]
    if other:
        record.totals.setdefault(other, rate)


def _agree(one: float, other: float) -> bool:
    return abs(one - other) <= _AGREES * other


def _other(name: str, in_a_step: float, batch: int, seq_len: int | None) -> str | None:
    """The unit in which the rate agrees, where `name` is not it."""
    if name == "samples_per_s" and seq_len and _agree(in_a_step, batch * seq_len):
        return "tokens_per_s"
    if name == "tokens_per_s" and _agree(in_a_step, batch):
        return "samples_per_s"
    return None


def _why(
    name: str, rate: float, time: float, expected: int, record: Record, other: str | None
) -> str:
    what = name.removesuffix("_per_s")
    shape = f"{record.global_batch} x {record.seq_len}" if what == "tokens" else "the global batch"
    numbers = f"{rate:.6g} {what}/s x {time:.4g} s a step is {rate * time:.6g}, {shape} {expected}"
    verdict = f"read as {other.removesuffix('_per_s')}/s" if other else "the rate is unknown"
    return f"{numbers}: {verdict}"


def _judge_tflops(record: Record, step_s: np.ndarray) -> None:
    """Printed TFLOP/s beside 6 FLOPs a parameter and token (Kaplan et al. 2020)."""
    facts = (record.params, record.gpus, record.global_batch, record.seq_len)
    both = np.isfinite(record.tflops) & (step_s > 0) if len(step_s) == len(record.tflops) else []
    if not all(fact and fact > 0 for fact in facts) or not np.any(both):
        return
    printed = float(np.median(record.tflops[both]))
    flops = 6.0 * record.params * record.global_batch * record.seq_len
    counted = flops / float(np.median(step_s[both])) / record.gpus / 1e12
    if not counted / _NO_CONVENTION <= printed <= counted * _NO_CONVENTION:
        record.notes.append(
            f"{printed:.4g} TFLOP/s are printed, 6 x parameters x tokens a second and GPU are"
            f" {counted:.4g}: the printed ones are unknown"
        )
        record.tflops = np.full(len(record.tflops), np.nan)
