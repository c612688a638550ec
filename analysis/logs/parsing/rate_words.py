"""The guard of printed rates: one counts when it agrees with time, batch and sequence length.

    samples/s x seconds a step = global batch          tokens/s x seconds a step = batch x sequence
    TFLOP/s x seconds a step x GPUs = FLOPs of a step

Every record passes it (`judge_rates`). A rate that agrees in another unit (samples for tokens, one
GPU's for all) is kept as that one, with a note. One that agrees in none is unknown, and a note
states the numbers. So is a time or a rate that would need more FLOP/s than any card has.
"""

import numpy as np

from analysis.logs.record import Record
from models.gpus import find_gpu

_AGREES = 0.1  # share; a rate and a time are rounded, and may be taken over other steps
WHOLE_RUN = 1.5  # the factor for a rate of a whole run, with its evaluations
_LAST = 20  # lines; the global batch is the last line's, and may have grown
# A factor: conventions of counting FLOPs differ by less, units by more.
_NO_CONVENTION = 30
_FASTEST = 2e4  # TFLOP/s; no card has them, in any precision
_LEAST = 2.0  # FLOPs a parameter and token: a forward pass alone


def units_of(batch: float, seq_len: int | None, gpus: int | None) -> dict[str, float]:
    """How much of each unit a step of `batch` sequences is: samples_per_s, tokens_per_s, and both
    of one GPU (`..._of_a_gpu`), where these are known."""
    amounts = {"samples_per_s": float(batch)}
    amounts |= {"tokens_per_s": float(batch * seq_len)} if seq_len else {}
    each = {f"{name}_of_a_gpu": n / gpus for name, n in amounts.items()} if gpus else {}
    return amounts | (each if gpus != 1 else {})


def unit_of(
    rate: float, step_s: float, amounts: dict[str, float], within: float = 1 + _AGREES
) -> str | None:
    """The unit of `units_of` in which rate x step_s is a step's amount; None where it is none.

    within: the factor by which it may be off. Of several units the nearest counts.
    """
    off = {
        name: abs(np.log(rate * step_s / amount))
        for name, amount in amounts.items()
        if rate * step_s > 0 and amount > 0
    }
    name = min(off, key=off.__getitem__, default=None)
    return name if name is not None and off[name] <= np.log(within) else None


def of_steps(step_s: float, counted_s: float, by: str) -> tuple[float, str]:
    """(what step times are multiplied by, a note) so that they agree with the seconds a step that
    `by` counts; 0 where no unit makes them agree, or where these are 0, for nothing counts them."""
    said = f"steps of {step_s:.6g}, {counted_s:.6g} s a step by {by}"
    for factor, unit in ((1.0, ""), (1e-3, "ms"), (1e-6, "us")):
        if counted_s > 0 and 1 / WHOLE_RUN <= step_s * factor / counted_s <= WHOLE_RUN:
            return factor, f"{said}: read as {unit}" if unit else ""
    return 0.0, f"{said}: the printed times are unknown"


def _name_rate(record: Record, rate: float, samples_per_s: float) -> None:
    """Put a throughput without a unit into the totals, under the unit that agrees with about how
    many samples a second there were; or note that none does."""
    amounts = units_of(samples_per_s, record.seq_len, record.gpus)
    unit = unit_of(rate, 1.0, amounts, within=WHOLE_RUN)
    numbers = f"throughput {rate:.6g}, {samples_per_s:.6g} samples/s by the log's times"
    if record.seq_len:
        numbers += f", sequences of {record.seq_len}"
    if unit is None:
        record.notes.append(f"{numbers}: its unit is unknown, and so is the rate")
        return
    name, each = _plain(unit)
    record.totals[name] = rate * (record.gpus if each else 1)
    if unit != "samples_per_s":
        record.notes.append(f"{numbers}: it counts {_words(unit)}")


def _plain(unit: str) -> tuple[str, bool]:
    """(Record's name of a unit, whether it is of one GPU)."""
    return unit.removesuffix("_of_a_gpu"), unit.endswith("_of_a_gpu")


def _words(unit: str) -> str:
    name, each = _plain(unit)
    words = name.removesuffix("_per_s")
    return f"{words} of one GPU" if each else words


def judge_rates(record: Record) -> None:
    """Remove rates that contradict time, batch and sequence length, or give them the other unit."""
    if record.unnamed_rate:
        _name_rate(record, *record.unnamed_rate)
    _judge_speed(record, "step_s")
    if (record.global_batch or 0) > 0 and not record.per_epoch:  # an epoch times micro-steps
        _judge_units(record)
        _judge_tflops(record)
    _judge_peak(record)
    _judge_speed(record, "samples_per_s")
    _judge_speed(record, "tokens_per_s")


def _judge_units(record: Record) -> None:
    """See that samples/s and tokens/s agree with the time of a step."""
    batch, step_s, totals = record.global_batch, record.steps["step_s"], record.totals
    amounts = units_of(batch, record.seq_len, record.gpus)
    timed = step_s[step_s > 0]
    for name in [name for name in ("samples_per_s", "tokens_per_s") if name in amounts]:
        if name in totals and ("step_s_mean" in totals or len(timed)):
            within = 1 + _AGREES if "step_s_mean" in totals else WHOLE_RUN
            time = totals["step_s_mean"] if "step_s_mean" in totals else float(np.median(timed))
            rate = totals.pop(name)
            if unit := _unit(record, name, rate, time, amounts, within):
                plain, each = _plain(unit)
                totals.setdefault(plain, rate * (record.gpus if each else 1))
        rates = record.steps[name].copy()
        both = np.isfinite(rates) & np.isfinite(step_s)
        if not both.any():
            continue
        rate, time = rates[both][-_LAST:], step_s[both][-_LAST:]
        in_one = float(np.median(rate * time))  # of an entry, whose rate and time belong together
        time = float(np.median(time))
        unit = _unit(record, name, in_one / time, time, amounts, 1 + _AGREES)
        if unit != name:
            record.steps[name] = np.nan
            plain, each = _plain(unit) if unit else ("", False)
            if unit and not np.isfinite(record.steps[plain]).any():
                record.steps[plain] = rates * (record.gpus if each else 1)


def _unit(
    record: Record,
    name: str,
    rate: float,
    step_s: float,
    amounts: dict[str, float],
    within: float,
) -> str | None:
    """The unit in which a rate agrees with the step time: its own, another one or None.

    A note states the numbers where it is not its own.
    """
    own = unit_of(rate, step_s, {name: amounts[name]}, within)
    unit = own or unit_of(rate, step_s, amounts, within)
    if unit != name:
        what, shape, verdict = (
            name.removesuffix("_per_s"),
            "the global batch",
            "the rate is unknown",
        )
        if what == "tokens":
            shape = f"{record.global_batch} x {record.seq_len}"
        if unit:
            words, *of_a_gpu = _words(unit).split(" ", 1)
            verdict = " ".join([f"read as {words}/s", *of_a_gpu])
        record.notes.append(
            f"{rate:.6g} {what}/s x {step_s:.4g} s a step is {rate * step_s:.6g}, {shape}"
            f" {amounts[name]:.0f}: {verdict}"
        )
    return unit


def _judge_tflops(record: Record) -> None:
    """Printed TFLOP/s beside 6 FLOPs a parameter and token (Kaplan et al. 2020)."""
    facts = (record.params, record.gpus, record.global_batch, record.seq_len)
    step_s, tflops = record.steps["step_s"], record.steps["tflops"]
    both = np.isfinite(tflops) & (step_s > 0)
    if not all(fact and fact > 0 for fact in facts) or not both.any():
        return
    printed = float(np.median(tflops[both]))
    flops = 6.0 * record.params * record.global_batch * record.seq_len
    counted = flops / float(np.median(step_s[both])) / record.gpus / 1e12
    said = (
        f"{printed:.4g} TFLOP/s are printed, 6 x parameters x tokens a second and GPU are"
        f" {counted:.4g}"
    )
    most = _most_by_convention(record)
    of_all = printed / counted > most >= printed / counted / record.gpus >= 1 / most
    if of_all and not record.uncounted:
        record.notes.append(f"{said}: read as those of all {record.gpus} GPUs")
        record.steps["tflops"] /= record.gpus
    elif not counted / _NO_CONVENTION <= printed <= counted * _NO_CONVENTION:
        record.notes.append(f"{said}: the printed ones are unknown")
        record.steps["tflops"] = np.nan


def _most_by_convention(record: Record) -> float:
    """How many times 6 x parameters the widest convention counts (sc21: full attention, and all of
    the forward pass recomputed), with a quarter for what is counted otherwise."""
    attention = record.seq_len / (6 * record.model["hidden"]) if "hidden" in record.model else 1.0
    return 1.25 * 8 / 6 * (1 + attention)


def _fastest(record: Record) -> tuple[float, str]:
    """(the most TFLOP/s that a card of the run can have, in words)."""
    card = find_gpu(record.gpu_type)
    fastest = max(card.peaks.values()) if card else _FASTEST
    return fastest, f"the {fastest:.5g} of {card.name if card else 'any card'}"


def _judge_peak(record: Record) -> None:
    """Remove printed TFLOP/s above twice the card's peak: full attention counts up to twice what a
    causal kernel does."""
    fastest, words = _fastest(record)
    printed = record.steps["tflops"][np.isfinite(record.steps["tflops"])]
    if len(printed) and (middle := float(np.median(printed))) > 2 * fastest:
        record.notes.append(f"{middle:.4g} TFLOP/s are printed, above twice {words}: unknown")
        record.steps["tflops"] = np.nan


def _judge_speed(record: Record, name: str) -> None:
    """Remove the column where a forward pass alone would need more TFLOP/s than the card has."""
    values, seq_len = record.steps[name], record.seq_len or 0
    known = values[np.isfinite(values) & (values > 0)]
    shape = record.model.get("n_layer", 0), record.model.get("hidden", 0)
    params = record.params or 8 * shape[0] * shape[1] ** 2  # the least that such layers have
    if not len(known) or not record.gpus or record.uncounted or record.per_epoch:
        return
    middle = float(np.median(known))
    tokens_per_s = {
        "step_s": (record.global_batch or 0) * seq_len / middle,
        "samples_per_s": middle * seq_len,
        "tokens_per_s": middle,
    }[name]
    needed = _LEAST * params * tokens_per_s / record.gpus / 1e12
    fastest, words = _fastest(record)
    if needed > fastest:
        record.notes.append(
            f"{name} {middle:.4g} would need {needed:.4g} TFLOP/s of a GPU for the forward pass"
            f" alone, above {words}: unknown"
        )
        record.steps[name] = np.nan
