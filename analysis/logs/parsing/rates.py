"""The check of printed rates: a rate counts when it agrees with time, batch and sequence.

    samples/s x seconds a step = global batch          tokens/s x seconds a step = batch x sequence

A rate that does not is unknown, and a note states the numbers. Where it agrees as the other unit,
it is kept as that one, with a note.
"""

import numpy as np

from analysis.logs.record import Record

_AGREES = 0.1  # share; a rate and a time are rounded, and may be taken over other steps
_LAST = 20  # lines; the global batch is the last line's, and may have grown
# A factor: conventions of counting FLOPs differ by less, units by more.
_NO_CONVENTION = 30


def unit_of(rate: float, samples_per_s: float, seq_len: int | None, within: float) -> str | None:
    """What `rate` counts, "samples" or "tokens"; None where it is neither.

    samples_per_s: about how many samples a second there were. within: the factor by which it may
    be off.
    """
    for unit, expected in (("samples", samples_per_s), ("tokens", samples_per_s * (seq_len or 0))):
        if expected > 0 and expected / within <= rate <= expected * within:
            return unit
    return None


def judge_rates(record: Record) -> None:
    """Remove rates that contradict time, batch and sequence length, or give them the other unit."""
    batch, seq_len = record.global_batch, record.seq_len
    step_s, totals = record.step_s, record.totals
    if not batch or batch < 0 or record.per_epoch:  # an epoch's times are of micro-steps
        return
    in_a_step = {"samples_per_s": batch} | ({"tokens_per_s": batch * seq_len} if seq_len else {})
    for name in in_a_step:
        if name in totals and "step_s_mean" in totals:
            unit = _unit(record, name, totals[name], totals["step_s_mean"], in_a_step)
            rate = totals.pop(name)
            if unit:
                totals.setdefault(unit, rate)
        rates = getattr(record, name)
        both = np.isfinite(rates) & np.isfinite(step_s) if len(rates) == len(step_s) else rates[:0]
        if not both.any():
            continue
        rate, time = rates[both][-_LAST:], step_s[both][-_LAST:]
        in_one = float(np.median(rate * time))  # of an entry, whose rate and time belong together
        time = float(np.median(time))
        rate = in_one / time
        unit = _unit(record, name, rate, time, in_a_step)
        if unit != name:
            setattr(record, name, np.full(len(rates), np.nan))
            if unit and not np.isfinite(getattr(record, unit)).any():
                setattr(record, unit, rates)
    _judge_tflops(record, step_s)


def _unit(
    record: Record, name: str, rate: float, step_s: float, in_a_step: dict[str, int]
) -> str | None:
    """The unit in which a rate agrees with the step time: its own, the other one or None.

    A note states the numbers where it is not its own. in_a_step: samples and tokens of a step.
    """
    for unit in (name, *in_a_step):
        if abs(rate * step_s - in_a_step[unit]) <= _AGREES * in_a_step[unit]:
            break
    else:
        unit = None
    if unit != name:
        what = name.removesuffix("_per_s")
        shape = (
            f"{record.global_batch} x {record.seq_len}" if what == "tokens" else "the global batch"
        )
        verdict = f"read as {unit.removesuffix('_per_s')}/s" if unit else "the rate is unknown"
        record.notes.append(
            f"{rate:.6g} {what}/s x {step_s:.4g} s a step is {rate * step_s:.6g}, {shape}"
            f" {in_a_step[name]}: {verdict}"
        )
    return unit


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
