"""The guard of printed rates: one counts when it agrees with time, batch and sequence length.

    samples/s x seconds a step = global batch          tokens/s x seconds a step = batch x sequence
    TFLOP/s x seconds a step x GPUs = FLOPs of a step

Every record passes it (`judge_rates`). A rate that does not agree is unknown, and a note states the
numbers. So is a time or a rate that would need more FLOP/s than any card has.
"""

from typing import NamedTuple

import numpy as np

from analysis.logs.record import Record
from models.gpus import find_gpu

_AGREES = 1.1  # a factor: a rate and a time are rounded, and may be taken over other steps
WHOLE_RUN = 1.5  # the factor for a rate of a whole run, with its evaluations
_LAST = 20  # lines; the global batch is the last line's, and may have grown
_NO_CONVENTION = 30  # a factor: conventions of counting FLOPs differ by less, units by more
_FASTEST = 2e4  # TFLOP/s; no card has them, in any precision
_LEAST = 2.0  # FLOPs a parameter and token: a forward pass alone


class Scale(NamedTuple):
    """What step times are multiplied by to be seconds, and a note; 0 where no unit fits."""

    factor: float
    note: str


def units_of(batch: float, seq_len: int | None) -> dict[str, float]:
    """How many samples and, where the length is known, tokens a step is, by the rate's name."""
    amounts = {"samples_per_s": float(batch)}
    return amounts | {"tokens_per_s": float(batch * seq_len)} if seq_len else amounts


def unit_of(done: float, amounts: dict[str, float], within: float = _AGREES) -> str | None:
    """The unit in which what was done in a step is a step's amount: the nearest, None where it is
    off by more than the factor `within` in each."""
    if not done > 0:
        return None
    off = {name: abs(np.log(done / amount)) for name, amount in amounts.items() if amount > 0}
    name = min(off, key=off.__getitem__, default=None)
    return name if name is not None and off[name] <= np.log(within) else None


def scale_of(step_s: float, counted_s: float, by: str) -> Scale:
    """The scale that makes step times agree with the seconds a step that `by` counts; these are 0
    where nothing counts them."""
    said = f"steps of {step_s:.6g}, {counted_s:.6g} s a step by {by}"
    for factor, unit in ((1.0, ""), (1e-3, "ms"), (1e-6, "us")):
        if unit_of(step_s * factor, {by: counted_s}, WHOLE_RUN):
            return Scale(factor, f"{said}: read as {unit}" if unit else "")
    return Scale(0.0, f"{said}: the printed times are unknown")


def judge_rates(record: Record) -> None:
    """Remove times and rates that cannot be; a note says so."""
    _judge_speed(record, "step_s")
    if (record.global_batch or 0) > 0 and not record.per_epoch:  # an epoch times micro-steps
        for name, amount in units_of(record.global_batch, record.seq_len).items():
            _judge_rate(record, name, amount)
        _judge_tflops(record)
    for name in ("tflops", "samples_per_s", "tokens_per_s"):
        _judge_speed(record, name)


def _judge_rate(record: Record, name: str, amount: float) -> None:
    """Remove a rate that does not agree with the time of a step, in which `amount` is done."""
    step_s, rates = record.steps["step_s"], record.steps[name]
    both = np.isfinite(rates) & np.isfinite(step_s)
    if both.any():  # of an entry, whose rate and time belong together
        done = float(np.median((rates * step_s)[both][-_LAST:]))
        if not _agrees(record, name, done, amount, _AGREES):
            rates[:] = np.nan
    timed = step_s[step_s > 0]
    time = record.totals.get("step_s_mean", float(np.median(timed)) if len(timed) else None)
    if name in record.totals and time is not None:
        within = _AGREES if "step_s_mean" in record.totals else WHOLE_RUN
        if not _agrees(record, name, record.totals[name] * time, amount, within):
            del record.totals[name]


def _agrees(record: Record, name: str, done: float, amount: float, within: float) -> bool:
    agrees = unit_of(done, {name: amount}, within) is not None
    if not agrees:
        record.notes.append(
            f"{name} x seconds a step is {done:.6g}, but a step is {amount:.6g}: it is unknown"
        )
    return agrees


def _judge_tflops(record: Record) -> None:
    """Printed TFLOP/s beside 6 FLOPs a parameter and token (Kaplan et al. 2020)."""
    facts = (record.params, record.gpus, record.global_batch, record.seq_len)
    step_s, tflops = record.steps["step_s"], record.steps["tflops"]
    both = np.isfinite(tflops) & (step_s > 0)
    if not all(fact and fact > 0 for fact in facts) or not both.any():
        return
    done = float(np.median((tflops * step_s)[both])) * record.gpus * 1e12
    times = done / (6.0 * record.params * record.global_batch * record.seq_len)
    most = _NO_CONVENTION if record.uncounted else _most_by_convention(record)
    if not 1 / _NO_CONVENTION <= times <= most:
        words = f"{times:.4g} times 6 x parameters x tokens"
        record.notes.append(f"the printed TFLOP/s are {words} a second and GPU: unknown")
        tflops[:] = np.nan


def _most_by_convention(record: Record) -> float:
    """How many times 6 x parameters the widest convention counts (sc21: full attention, and all of
    the forward pass recomputed), with a quarter for what is counted otherwise."""
    attention = record.seq_len / (6 * record.model["hidden"]) if "hidden" in record.model else 1.0
    return 1.25 * 8 / 6 * (1 + attention)


def _judge_speed(record: Record, name: str) -> None:
    """Remove the column where it would need more TFLOP/s than the card has: for a forward pass
    alone; of printed TFLOP/s half, for full attention counts twice what a causal kernel does."""
    values, seq_len = record.steps[name], record.seq_len or 0
    known = values[np.isfinite(values) & (values > 0)]
    if not len(known) or (name != "tflops" and (record.uncounted or record.per_epoch)):
        return
    middle = float(np.median(known))
    layers = 8 * record.model.get("n_layer", 0) * record.model.get("hidden", 0) ** 2
    params = record.params or layers  # the least that such layers have
    each = _LEAST * params / record.gpus / 1e12 if record.gpus else 0.0  # of a token a second
    needed = {
        "tflops": middle / 2,
        "step_s": (record.global_batch or 0) * seq_len / middle * each,
        "samples_per_s": middle * seq_len * each,
        "tokens_per_s": middle * each,
    }[name]
    card = find_gpu(record.gpu_type)
    fastest = max(card.peaks.values()) if card else _FASTEST
    if needed > fastest:
        record.notes.append(
            f"{name} {middle:.4g} would need {needed:.4g} TFLOP/s of a GPU, above the {fastest:.5g}"
            f" of {card.name if card else 'any card'}: unknown"
        )
        values[:] = np.nan
