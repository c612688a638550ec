"""Whether two logs of any program have equal losses and gradient norms, step by step; if not, by
which factor, from which step. The verdicts, bars and the table are loss_parity.py's.

A factor is a ratio that stays: all of its steps are within FACTOR_SPREAD of it. It is named after
the facts of the two runs that have this value, such as cp.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

import numpy as np

from analysis.common.reasons import Reason
from analysis.common.table import Table
from analysis.logs.naming import name_of
from analysis.logs.record import Record
from analysis.runs.fairness import WORDS, changed_settings
from analysis.runs.loss_parity import COLUMNS, DIFFERS, EQUAL, Bars, Parity, not_verified
from base.errors import UsageError

VALUES = {"loss": "loss", "grad_norm": "gradient norm"}  # columns of steps, in words
FEWEST = 3  # steps that show a factor or a shift
FACTOR_SPREAD = 0.02  # bf16 changes gradient norms by less
NO_FACTOR = 1.1  # a ratio nearer to 1 may be chance
SMALL = range(2, 65)  # whole numbers that are factors without a name
SHIFTS = (1, 2)  # entries or iterations


@dataclass(frozen=True)
class Curve:
    """The values of a column, their iterations, and the unit of each one's last printed digit."""

    iteration: np.ndarray
    value: np.ndarray
    unit: np.ndarray


def curve_of(record: Record, column: str) -> Curve:
    """Returns the entries that print a value in the column, a loss of NaN included."""
    steps = record.steps
    iteration = steps["iteration"]
    if np.isnan(iteration).all():
        iteration = np.arange(1.0, len(steps) + 1)
    stated = ~np.isnan(steps[column])
    if column == "loss":
        stated |= steps["nan_loss"] == 1
    value = steps[column][stated]
    return Curve(iteration[stated], value, _printed_units(value))


def _printed_units(values: np.ndarray) -> np.ndarray:
    """Returns the unit of the last digit of each value, as its log prints them: with as many
    decimals as any value has or, of powers of ten, with as many digits. Digits of zero at the end
    are lost in a single number, and not in all."""
    some = values[np.isfinite(values)][:: 1 + len(values) // 10_000]  # these are enough
    numbers = [Decimal(repr(value)) for value in some.tolist()]
    if not numbers:
        return np.zeros(len(values))
    digits = max(len(number.as_tuple().digits) for number in numbers)
    decimals = max(-number.as_tuple().exponent for number in numbers)
    with np.errstate(divide="ignore", invalid="ignore"):
        leading = np.floor(np.log10(np.abs(values)))
    units = np.maximum(10.0**-decimals, 10.0 ** (leading + 1 - digits))
    return np.where(np.isfinite(units), units, 10.0**-decimals)


@dataclass(frozen=True)
class Steps:
    """The steps that two logs share: both values, and by how much they may differ."""

    number: np.ndarray
    a: np.ndarray
    b: np.ndarray
    allowed: np.ndarray

    @property
    def beyond(self) -> np.ndarray:
        """Returns which steps differ by more than is allowed."""
        with np.errstate(invalid="ignore"):  # two infinities
            return ~(np.abs(self.a - self.b) <= self.allowed)


def shared_steps(a: Curve, b: Curve, column: str, bars: Bars, shift: float = 0) -> Steps:
    """Returns the steps of A that B has `shift` steps later. Beside the bar, values may differ by
    what rounding to the printed digits hides."""
    number, in_a, in_b = np.intersect1d(a.iteration, b.iteration - shift, return_indices=True)
    value = a.value[in_a]
    bar = bars.grad_norm * np.abs(value) if column == "grad_norm" else bars.loss
    rounding = (a.unit[in_a] + b.unit[in_b]) / 2
    return Steps(number, value, b.value[in_b], (bar + rounding) * (1 + 1e-9))


def compare(record: Record, baseline: Record, bars: Bars) -> Parity:
    """Returns a run beside the baseline: equal at all steps that both print, or one sentence for
    each of the two values that is not."""
    name, n = name_of(record), len(record.steps)
    if record.interval != baseline.interval:
        averages = f"{baseline.interval} steps in A, {record.interval} in B"
        return Parity(name, not_verified(f"an entry is of {averages}: log both alike"), n)
    shared, findings, silent = {}, [], []
    for column, words in VALUES.items():
        curves = [curve_of(side, column) for side in (baseline, record)]
        if missing := [s for s, c in zip("AB", curves, strict=True) if not len(c.value)]:
            silent.append(f"no {words} in {' and '.join(missing)}")
            continue
        steps = shared_steps(*curves, column, bars)
        if shift := _shift(curves, column, bars, baseline, record):
            findings.append(shift)
        elif not len(steps.number):
            silent.append(f"no step with a {words} in both")
        elif steps.beyond.any():
            started = all(curve.iteration[0] == steps.number[0] for curve in curves)
            loss_differs = "loss" in shared and bool(shared["loss"].beyond[0])
            findings.append(
                _factor(steps, words, baseline, record)
                or _divergence(steps, words, started, column == "loss" or loss_differs)
            )
        shared[column] = steps
    shared = {column: steps for column, steps in shared.items() if len(steps.number)}
    if not shared and not findings:
        return Parity(name, not_verified("; ".join(silent)), n)
    if findings:
        if settings := changed_settings(baseline, record):
            findings.append(f"they differ in: {', '.join(settings)}")
        verdict = Reason(DIFFERS, f"{DIFFERS}: {'; '.join([*findings, *silent])}")
    else:
        verdict = Reason(EQUAL, "; ".join([EQUAL, *silent]))
    losses, norms = shared.get("loss"), shared.get("grad_norm")
    return Parity(
        name,
        verdict,
        max((len(steps.number) for steps in shared.values()), default=0),
        _largest(losses.a, losses.b) if losses else None,
        _largest(norms.a, norms.b, relative=True) if norms else None,
        float(losses.b[0]) if losses else None,
    )


def _largest(a: np.ndarray, b: np.ndarray, relative: bool = False) -> float:
    """Returns the largest difference, infinite where a value is not finite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        difference = np.abs(a - b)
        difference = np.where(difference == 0, 0.0, difference / np.abs(a if relative else 1.0))
    return float(np.where(np.isnan(difference), math.inf, difference).max())


def _shift(curves: list[Curve], column: str, bars: Bars, a: Record, b: Record) -> str:
    """Returns that B has A's values some steps later or earlier, or ""."""
    if not shared_steps(*curves, column, bars).beyond.any():
        return ""
    batches = [a.global_batch or 0, b.global_batch or 0]
    ratio = max(batches) // min(batches) if all(batches) else 1
    sizes = {*SHIFTS, *(entries * a.interval for entries in SHIFTS), ratio}
    for shift in sorted({*sizes, *(-size for size in sizes)}, key=abs):
        steps = shared_steps(*curves, column, bars, shift)
        n = len(steps.number)
        if n < max(FEWEST, min(len(curve.value) for curve in curves) / 2) or steps.beyond.any():
            continue
        later = f"{abs(shift)} step{'s' * (abs(shift) > 1)} {'later' if shift > 0 else 'earlier'}"
        return f"the {VALUES[column]} of B is A's {later} (at all {n} steps)"
    return ""


def _factor(steps: Steps, words: str, a: Record, b: Record) -> str:
    """Returns by which constant factor B's values are A's from the first step that differs, or
    "". One that is neither a fact nor a whole number must hold to the end and explain A's noise."""
    first = int(np.argmax(steps.beyond))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = steps.b[first:] / steps.a[first:]
    factor = float(np.median(ratios[:FEWEST]))
    if len(ratios) < FEWEST or not math.isfinite(factor) or factor <= 0:
        return ""
    if 1 / NO_FACTOR < factor < NO_FACTOR:
        return ""
    names = _facts_of_value(factor, a, b)
    size = max(factor, 1 / factor)
    whole = min(SMALL, key=lambda number: abs(number - size))
    exact = [value for _, value in names] or [whole] * _near(size, whole)
    if exact:
        factor = exact[0] if factor > 1 else 1 / exact[0]
    else:
        factor = float(np.median(ratios))
    near = np.abs(ratios / factor - 1) <= FACTOR_SPREAD
    n = len(near) if near.all() else int(np.argmin(near))
    if n < FEWEST:
        return ""
    if not exact and (n < len(near) or not _is_rounding(steps.a[first:], steps.b[first:] / factor)):
        return ""  # two trends may have one ratio by chance, two noises not
    held, numbers = ratios[:n], steps.number[first:]
    sizes = held if factor > 1 else 1 / held
    middle, low, high = (float(f(sizes)) for f in (np.median, np.min, np.max))
    times = f"{middle:.2f} times A's" if factor > 1 else f"A's divided by {middle:.2f}"
    until = "" if n == len(near) else f" to {numbers[n - 1]:.0f}, and no constant factor later"
    sentence = f"the {words} of B is {times} ({low:.4g} to {high:.4g}) from step {numbers[0]:.0f}"
    because = ", or ".join(name for name, _ in names) or "no fact that the logs state is this"
    return f"{sentence}{until}: {because}"


def _near(value: float, other: float) -> bool:
    return abs(value / other - 1) <= FACTOR_SPREAD


def _facts_of_value(factor: float, a: Record, b: Record) -> list[tuple[str, float]]:
    """Returns the facts that are the factor, in words, and their value: those that differ between
    the runs by it, the larger in B first; else those of this value in one run; else in both."""
    size = max(factor, 1 / factor)
    grown: list[tuple[str, float]] = []
    shrunk, single, double = [], [], []
    for (name, in_a), (_, in_b) in zip(_facts(a), _facts(b), strict=True):
        if in_a and in_b and _near(size, in_b / in_a):
            grown.append((f"its {name} is {in_b:g}, A's is {in_a:g}", in_b / in_a))
        elif in_a and in_b and _near(size, in_a / in_b):
            shrunk.append((f"its {name} is {in_b:g}, A's is {in_a:g}", in_a / in_b))
        elif in_a and in_a == in_b and _near(size, in_a):
            double.append((f"{name} is {in_a:g} in both", in_a))
        else:
            for value, whose in ((in_b, "its"), (in_a, "A's")):
                if value and _near(size, value):
                    single.append((f"{whose} {name} is {value:g}", value))
    return grown + shrunk or single or double


def _facts(record: Record) -> Iterator[tuple[str, float | None]]:
    """Yields what losses and gradients are divided by, or summed over, by its name."""
    for name in ("cp", "tp", "dp", "pp", "ep", "gpus", "micro_batch", "global_batch", "seq_len"):
        yield WORDS.get(name, name), getattr(record, name)
    rank_batch = (record.micro_batch or 0) * (record.dp or 0)
    accumulation = record.global_batch / rank_batch if record.global_batch and rank_batch else None
    yield "number of accumulation steps", record.n_micro or accumulation
    tokens = (record.global_batch or 0) * (record.seq_len or 0)
    yield "number of tokens in a step", tokens or None


def _divergence(steps: Steps, words: str, started: bool, first_loss: bool) -> str:
    """Returns from which step on values differ without a factor, and by how much. `started`: the
    first shared step begins both logs. first_loss: the value is the loss, or the loss differs
    there, too."""
    first = int(np.argmax(steps.beyond))
    values = f"{steps.a[first]:.7g} in A, {steps.b[first]:.7g} in B"
    at = f"step {steps.number[first]:.0f}"
    largest = _largest(steps.a, steps.b)
    up_to = f"; by up to {largest:.1e}" if math.isfinite(largest) else ""
    if _is_rounding(steps.a[first:], steps.b[first:]):
        little = "by less than its noise, as rounding does"
        return f"the {words} differs from {at}, {little}: {values}{up_to}"
    if first:
        return f"the {words} diverges from {at}: {values}{up_to}"
    if not started:
        return f"the {words} differs from the first shared step, {at}: {values}{up_to}"
    if first_loss:
        return f"the {words} says different data or a different model from {at}: {values}"
    return f"the {words} differs from {at}, where the loss does not: {values}"


def _is_rounding(a: np.ndarray, b: np.ndarray) -> bool:
    """Tells whether the logs differ by far less than A does from one step's data to the next's.

    A second difference is of noise alone; of two logs of different data, values differ by as much.
    """
    noise, difference = np.abs(np.diff(a, 2)), np.abs(a - b)
    if not len(noise) or not np.max(difference) <= np.max(noise):  # one step that is far off
        return False
    return bool(np.median(difference) < np.median(noise) / 4)


def of_logs(records: list[Record], baseline: Record | None, bars: Bars) -> Table:
    """Returns the parity table of logs beside the baseline, which is the first of them by default.

    Raises:
        UsageError: there is no second log.
    """
    baseline = baseline or records[0]
    others = [record for record in records if record is not baseline]
    if not others:
        raise UsageError(f"{baseline.source} is compared with another log: name two")
    rows = []
    for record in others:
        parity = compare(record, baseline, bars)
        row = {c.key: getattr(parity, c.key) for c in COLUMNS}
        rows.append(row | {"verdict": str(parity.verdict), "kind": parity.verdict.kind})
    columns = [c for c in COLUMNS if c.key != "ln_vocab"]
    notes = [
        f"A, the baseline: {name_of(baseline)}; B: the run of the row",
        f"tolerances, beside the rounding of printed digits: loss {bars.loss:g} nats, grad norm"
        f" {bars.grad_norm:g} relative (in bf16 equal runs may differ by more: --loss-bar,"
        " --grad-norm-bar)",
    ]
    return Table(columns, rows, notes=notes)
