"""The guard of printed rates: one counts when it agrees with time, batch and sequence length.

    samples/s x seconds a step = global batch          tokens/s x seconds a step = batch x sequence
    TFLOP/s x seconds a step x GPUs = FLOPs of a step

Every record passes it (`judge_rates`). A rate that does not agree is unknown, and a note states the
numbers. So is a time or a rate that would need more FLOP/s than any card has.
"""

from typing import NamedTuple

import numpy as np

from analysis.logs.parsing.fields import positive
from analysis.logs.record import UNPADDED, Record
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


def near(value: float, expected: float, within: float = _AGREES) -> bool:
    """Returns whether both are above 0 and differ by no more than the factor `within`."""
    return value > 0 and expected > 0 and 1 / within <= value / expected <= within


def scale_of(step_s: float, counted_s: float, by: str) -> Scale:
    """Returns the scale that makes the printed step times agree with `counted_s`. That is the
    seconds of a step by something else in the log (0 where nothing counts them). by: that
    something, in words."""
    comparison = f"steps of {step_s:.6g}, {counted_s:.6g} s a step by {by}"
    for factor, unit in ((1.0, ""), (1e-3, "ms"), (1e-6, "us")):
        if near(step_s * factor, counted_s, WHOLE_RUN):
            return Scale(factor, f"{comparison}: read as {unit}" if unit else "")
    return Scale(0.0, f"{comparison}: the printed times are unknown")


def complete_rates(record: Record) -> None:
    """Fills the rates and times that follow from the printed rates and the facts, wherever these
    come from: tokens/s of all GPUs, samples/s, seconds a step."""
    steps = record.steps
    if record.epochs and record.global_batch:
        record.doubt(
            "batch",
            f"the global batch of {record.global_batch} is no epoch's: not used",
        )
        record.global_batch = None

    def fill(name: str, values: np.ndarray) -> None:
        if not np.isfinite(steps[name]).any():
            steps[name] = values

    fill("step_s", positive(steps["micro_s"]) * (record.n_micro or np.nan))
    fill("tokens_per_s", positive(steps["tokens_per_s_per_gpu"]) * (record.gpus or np.nan))
    fill("step_s", positive(steps["tokens"]) / positive(steps["tokens_per_s"]))
    if UNPADDED not in record.doubts:
        fill("samples_per_s", steps["tokens_per_s"] / (record.seq_len or np.nan))
    if not (record.per_epoch or np.isfinite(steps["step_s"]).any()):
        fill("step_s", step_s_of_rates(record))
        if np.isfinite(steps["step_s"]).any():
            record.note("step times follow from the printed rate and the batch")
        elif not record.mean_of:
            _mean_of_rate(record)


def _mean_of_rate(record: Record) -> None:
    """Fills the mean step time from the rate of the whole run, where the log prints that alone. It
    is the tokens or samples of a global batch over tokens/s or samples/s. Tokens/s go first."""
    samples, totals = record.global_batch or 0, record.totals
    tokens = samples * (record.seq_len or 0)
    for name, amount in (("tokens_per_s", tokens), ("samples_per_s", samples)):
        rate = totals.get(name, 0)
        if amount and rate > 0:
            totals["step_s_mean"] = amount / rate
            record.mean_of = "the batch over the run's rate"
            return


def step_s_of_rates(record: Record) -> np.ndarray:
    """Returns the seconds that the global batch takes at the tokens or samples per second; NaN
    where one of them is unknown."""
    batch, steps = record.batches, record.steps
    tokens_per_s = positive(steps["tokens_per_s"])
    is_padded = UNPADDED not in record.doubts
    if record.seq_len and is_padded and np.isfinite(tokens_per_s).any():
        return batch * record.seq_len / tokens_per_s
    return batch / positive(steps["samples_per_s"])


def judge_rates(record: Record) -> None:
    """Removes the times and rates that cannot be. A note says which."""
    _judge_speed(record, "step_s")
    batch, seq_len = record.global_batch or 0, record.seq_len
    if batch > 0 and not record.per_epoch:  # an epoch times micro-steps
        _judge_rate(record, "samples_per_s", batch)
        if seq_len and UNPADDED not in record.doubts:
            _judge_rate(record, "tokens_per_s", batch * seq_len)
        if seq_len:
            if (record.params or 0) > 0 and (record.gpus or 0) > 0:
                _judge_tflops(record, 6.0 * record.params * batch * seq_len / record.gpus / 1e12)
    for name in ("tflops", "samples_per_s", "tokens_per_s"):
        _judge_speed(record, name)


def _judge_rate(record: Record, name: str, amount: float) -> None:
    """Removes a rate that does not agree with the time of a step. amount: the tokens or samples of
    a step."""
    step_s, rates = record.steps["step_s"], record.steps[name]
    has_both = np.isfinite(rates) & np.isfinite(step_s)
    # The product is taken of each entry, whose rate and time belong together.
    measured = (rates[has_both] * step_s[has_both])[-_LAST:]
    if len(measured) and not _agrees(record, name, float(np.median(measured)), amount, _AGREES):
        rates[:] = np.nan
    timed = step_s[step_s > 0]
    mean_s = record.totals.get("step_s_mean", float(np.median(timed)) if len(timed) else None)
    if name in record.totals and mean_s is not None:
        within = _AGREES if "step_s_mean" in record.totals else WHOLE_RUN
        if not _agrees(record, name, record.totals[name] * mean_s, amount, within):
            del record.totals[name]


def _agrees(record: Record, name: str, measured: float, amount: float, within: float) -> bool:
    """Returns whether a rate times seconds, `done`, is the `amount` of a step within the factor
    `within`. Where it is not, the record gets a doubt with both numbers."""
    if near(measured, amount, within):
        return True
    words = f"{name} x seconds a step is {measured:.6g}, but a step is {amount:.6g}"
    record.doubt(f"contradictory {name}", f"{words}: it is unknown")
    return False


def _judge_tflops(record: Record, counted_tflops: float) -> None:
    """Removes printed TFLOP/s that no convention of counting gives. counted_tflops: TFLOPs of a
    step and GPU, at 6 a parameter and token (Kaplan et al. 2020). The widest convention (sc21: full
    attention, and all of the forward pass recomputed) counts 8 and the attention; a quarter is for
    what is counted otherwise."""
    step_s, tflops = record.steps["step_s"], record.steps["tflops"]
    has_both = np.isfinite(tflops) & (step_s > 0)
    if not has_both.any():
        return
    ratio = float(np.median((tflops * step_s)[has_both])) / counted_tflops
    attention = record.seq_len / (6 * record.model["hidden"]) if "hidden" in record.model else 1.0
    unusual = record.uncounted or "experts" in record.model
    largest_ratio = _NO_CONVENTION if unusual else 1.25 * 8 / 6 * (1 + attention)
    if not 1 / _NO_CONVENTION <= ratio <= largest_ratio:
        words = f"{ratio:.4g} times 6 x parameters x tokens"
        doubt = f"the printed TFLOP/s are {words} a second and GPU: unknown"
        record.doubt("contradictory tflops", doubt)
        tflops[:] = np.nan


def _judge_speed(record: Record, name: str) -> None:
    """Removes the column where it would need more TFLOP/s than the card has, for a forward pass
    alone. Of printed TFLOP/s half counts, for full attention counts twice what a causal kernel
    does."""
    values, seq_len = record.steps[name], record.seq_len or 0
    positive_values = values[np.isfinite(values) & (values > 0)]
    unusual = record.uncounted or record.per_epoch or "experts" in record.model
    if not len(positive_values) or (name != "tflops" and unusual):
        return
    median = float(np.median(positive_values))
    layer_params = 8 * record.model.get("n_layer", 0) * record.model.get("hidden", 0) ** 2
    params = record.params or layer_params  # the least that such layers have
    # TFLOP/s of a GPU that one token a second needs
    per_token_per_s = _LEAST * params / record.gpus / 1e12 if record.gpus else 0.0
    needed = {
        "tflops": median / 2,
        "step_s": (record.global_batch or 0) * seq_len / median * per_token_per_s,
        "samples_per_s": median * seq_len * per_token_per_s,
        "tokens_per_s": median * per_token_per_s,
    }[name]
    card = find_gpu(record.gpu_type)
    fastest = max(card.peaks.values()) if card else _FASTEST
    if needed > fastest:
        record.doubt(
            f"contradictory {name}",
            f"{name} {median:.4g} would need {needed:.4g} TFLOP/s of a GPU, above the {fastest:.5g}"
            f" of {f'{card.name} in any precision' if card else 'any card'}: unknown",
        )
        values[:] = np.nan
