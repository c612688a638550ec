"""Whether a run can be believed: how it ended, the line that proves it, what is doubtful about it.

The verdicts: complete; diverged (the run reached its end, but the last loss is NaN or infinite);
stopped early; end unknown; OOM, communication error, node failure, timeout, cancelled, traceback,
failed (how it failed); rows missing (complete, but steps.csv lacks steps); pending, running,
interrupted (the state of one of our own runs); no data.
"""

import math
from dataclasses import dataclass

import numpy as np

from analysis.common.reasons import NOTE, Reason
from analysis.logs.naming import name_of
from analysis.logs.rank_files import parts_of
from analysis.logs.record import Record
from analysis.logs.step_time import UNTIMED, no_timing
from parallel.measure.slow_steps import slow_steps
from parallel.measure.steady_time import MIN_STEADY, Steady
from parallel.measure.step_changes import NOTABLE

# A failure's kind as the readers name it -> the verdict.
VERDICTS = {
    "oom": "OOM",
    "nccl": "communication error",
    "node": "node failure",
    "timeout": "timeout",
    "cancelled": "cancelled",
    "traceback": "traceback",
    "exited": "failed",
    "diverged": "diverged",
    "launcher": "no data",
}
# The states of our own runs that are verdicts -> what proves them.
_STATES = {
    "pending": "",
    "running": "its status says running",
    "interrupted": "it was asked to stop, and can be gone on with",  # its note gives the reason
}
EARLY = "stopped early"
_FINE = ("complete", "end unknown")
MANY_SKIPPED = 0.1  # share of skipped iterations that is flagged; fp16 skips one or two
WIDE = 1.25  # high over low of a median's interval, from which the run is unsteady
UNEVEN = 0.2  # share of spikes above which the median hides how slow the run was
EXPLODED = 1.5  # the loss at the end over the lowest it had been
SKIPPED = "all skipped"
REGIMES = "regimes"  # the kind of a doubt: no single time is the run's
UNSURE = ("warm-up", "rising", "wide", "oversubscribed")  # kinds of doubts about a time
UNFIT = ("profiled", *UNTIMED, SKIPPED, REGIMES)  # kinds of doubts that rule out a step time


@dataclass
class Judgement:
    """How a run ended, and what is to be said of it.

    `proof` has the verdict as its kind and the words of the line that proves it, or what was
    counted; `line_no` is that line's number, 0 where no line proves it. `reasons` are doubts about
    the numbers, and notes.
    """

    proof: Reason
    reasons: list[Reason]
    line_no: int = 0

    @property
    def verdict(self) -> str:
        return self.proof.kind

    @property
    def doubts(self) -> list[Reason]:
        """Returns the doubts about the numbers."""
        return [reason for reason in self.reasons if reason.kind != NOTE]

    @property
    def unfit(self) -> str:
        """Returns the doubts that make the step time no result, in one text; "" where none does."""
        return "; ".join(doubt.text for doubt in self.doubts if doubt.kind in UNFIT)

    @property
    def told(self) -> list[Reason]:
        """Returns the proof with its place in the log, the doubts that it does not say itself, and
        the notes."""
        place = f"line {self.line_no}: " if self.line_no else ""
        proof = [self.proof._replace(text=place + self.proof.text)] if self.proof.text else []
        return proof + [reason for reason in self.reasons if reason.kind != self.verdict]


def judge(record: Record, time: Steady | None = None) -> Judgement:
    """Returns the verdict and the doubts about one run; `time` is its steady step time, if
    taken."""
    ended = ending(record)
    notes = [reason for reason in record.reasons if reason.kind == NOTE]
    return Judgement(ended.proof, _doubts(record, time) + ended.reasons + notes, ended.line_no)


def ending(record: Record) -> Judgement:
    """Returns how a run ended: decided once, and kept in the record."""
    if record.ending is None:
        judgement = _ended(record)
        if judgement.verdict in _FINE and (proof := _diverged(record)):
            judgement = Judgement(Reason("diverged", proof), judgement.reasons, record.last_line)
        record.ending = judgement
    return record.ending


def unfinished(record: Record) -> str:
    """Returns how a run ended that did not complete, or "".

    A log that states no end passes. So does one of another program that only ends before the last
    step of its plan: benchmarks are made so, and the verdict marks them.
    """
    verdict = ending(record).verdict
    cut = verdict == EARLY and record.state is None and record.failure is None
    return "" if verdict in _FINE or cut else verdict


def _with_loss(record: Record) -> np.ndarray:
    """Returns the entries that print a loss, be it NaN or infinite."""
    steps = record.steps
    return steps[~np.isnan(steps["loss"]) | (steps["nan_loss"] == 1)]


def _diverged(record: Record) -> str:
    """Returns why a run that reached its end diverged, or "": its last loss is NaN or infinite.

    One skipped step at the end does not count: fp16 skips such a step and lowers its scale.
    """
    steps = _with_loss(record)
    if not len(steps):  # its losses are in no entries
        last = record.totals.get("loss", 0.0)
        return "" if math.isfinite(last) else f"the last loss is {last:g}"
    bad = ~np.isfinite(steps["loss"])
    skipped = steps["skipped"][-1] >= record.interval and not bad[-2:-1].any()
    return f"the last loss is {steps['loss'][-1]:g}" if bad[-1] and not skipped else ""


def _end(verdict: str, proof: str, line_no: int = 0) -> Judgement:
    return Judgement(Reason(verdict, proof), [], line_no)


def _ended(record: Record) -> Judgement:
    """Returns how a run ended, by what its log and its run folder say, whatever its losses are."""
    failure, state, planned = record.failure, record.state, record.planned_steps
    numbers = record.steps["iteration"][np.isfinite(record.steps["iteration"])]
    # How many iterations the log reached, whether it counts from 0 or from 1.
    reached = numbers.max() + (numbers.min() == 0) if len(numbers) else 0
    if record.completed or (record.completed is None and planned and reached >= planned):
        if rows_missing := record.doubts.get("rows missing"):
            return _end("rows missing", rows_missing)
        proof = f"{planned} of {planned} iterations" if planned else "it says that it completed"
        judgement = _end("complete", proof, record.last_line)
        if failure is not None:
            place = f"after the run completed, line {failure.line_no}"
            judgement.reasons.append(Reason(NOTE, f"{place}: {failure.line.strip()}"))
        return judgement
    if failure is not None:
        verdict = VERDICTS.get(failure.kind, failure.kind)
        return _end(verdict, failure.line.strip(), failure.line_no)
    if state in _STATES:
        return _end(state, _STATES[state])
    if not len(record.steps):
        return _end("no data", "no iteration was logged")
    if planned is not None and reached < planned:
        last = int(numbers.max()) if len(numbers) else "an unknown number"
        return _end(EARLY, f"ended at iteration {last} of {planned}", record.last_line)
    if record.completed is False:
        return _end(EARLY, "it never says that it completed", record.last_line)
    return _end("end unknown", "the log says neither how far it should go nor an end")


def _doubts(record: Record, time: Steady | None) -> list[Reason]:
    """Returns the doubts about a run's numbers, in the order that tables show them."""
    untimed = no_timing(record)
    doubts = [untimed] if untimed else []
    doubts += _skipped(record)
    doubts += [reason for reason in record.reasons if reason.kind not in (NOTE, *UNTIMED)]
    doubts.append(Reason("loss", _loss_doubt(record)))
    norm = record.steps["grad_norm"][np.isfinite(record.steps["grad_norm"])]
    if zeros := (norm == 0).sum():
        text = f"grad norm is zero in {zeros} of {len(norm)} iterations"
        doubts.append(Reason("grad norm", text))
    doubts.append(Reason("averages", _averaged(record)))
    if time is not None:
        doubts += _doubts_of_time(record, time)
        parts = parts_of(record)
        doubts += [Reason("slow steps", str(steps)) for steps in slow_steps(parts)] if parts else []
    if record.oversubscribed:
        text = f"oversubscribed: {record.sharing or 'more ranks than cores'}"
        doubts.append(Reason("oversubscribed", text))
    for origin, opening in (("default", "defaults of the tool"), ("from name", "from name")):
        if facts := _facts_from(origin, record):
            doubts.append(Reason(origin, f"{opening}: {facts}"))
    return [doubt for doubt in doubts if doubt.text]


def _skipped(record: Record) -> list[Reason]:
    """Returns a doubt where many entries skipped the optimizer, or all."""
    skipped, entries = np.nan_to_num(record.steps["skipped"]), len(record.steps)
    unit = "iterations" if record.interval == 1 else "entries"
    if entries and (skipped >= record.interval).all():
        text = f"all {entries} {unit} skipped: no optimizer step was timed"
        return [Reason(SKIPPED, text)]
    if (touched := (skipped > 0).sum()) > MANY_SKIPPED * entries:
        return [Reason("skipped", f"{touched} of {entries} {unit} skipped the optimizer")]
    return []


def _doubts_of_time(record: Record, time: Steady) -> list[Reason]:
    """Returns the doubts about a steady step time."""
    doubts = []
    if time.n < MIN_STEADY and len(record.steps) and not record.mean_of:
        text = f"too few points: {time.n} after the warm-up, 95 % needs {MIN_STEADY}"
        doubts.append(Reason("few points", text))
    changes = _change_words(time)
    if not time.single:
        text = f"no steady time: {changes} (--window FIRST:LAST takes the time of one part)"
        doubts.append(Reason(REGIMES, text))
    elif not time.settled:
        doubts.append(Reason("warm-up", f"warm-up not over: {changes}"))
    elif time.change:
        doubts.append(Reason("rising", f"not steady: {changes}"))
    # How sure the median is matters where it has a sense.
    if time.single and time.independent < MIN_STEADY <= time.n:
        points = f"{time.n} steps count as {time.independent:.1f} independent ones"
        needed = f"a 95 % interval needs {MIN_STEADY}"
        doubts.append(Reason("few points", f"too few points: {points}, {needed}"))
    elif time.single and time.ci95 and time.ci95.high > WIDE * time.ci95.low:
        low, high = time.ci95
        text = f"unsteady: the median may be {low:.4g} to {high:.4g} s (95 %)"
        doubts.append(Reason("wide", text))
    if time.spikes:
        text = f"{time.spikes} of {time.n} steady iterations are spikes"
        if time.spikes > UNEVEN * time.n:
            text = f"uneven: {text.removesuffix('spikes')}well above the median"
        doubts.append(Reason("spikes", text))
    if period := time.period:
        nth = f"one step in {period.every}, as {period.first} and {period.first + period.every},"
        times = f"takes {period.long_s:.4g} s, {period.longer:.0%} longer than the others"
        text = f"{nth} {times}: logging, garbage collection or evaluation"
        cells = ()
        if (above := period.mean_s / time.step_s - 1) > NOTABLE:
            text += f"; the mean of all steps is {above:.1%} above the median"
            cells = ("step_s", "tokens_per_s")
        doubts.append(Reason("period", text, cells))
    return doubts


def _change_words(time: Steady) -> str:
    """Returns how the step times changed, in words."""
    if time.change is None:
        return ""
    before_s, after_s, at = time.change
    if at is None:
        return f"steps went from {before_s:.4g} s to {after_s:.4g} s"
    return f"steps took {before_s:.4g} s, then {after_s:.4g} s from iteration {at} on"


def _facts_from(origin: str, record: Record) -> str:
    """Returns the facts that the record has from this origin, with their values; "" where none is
    from there. `origin` is one of `Record.origin`, as "default" or "from name"."""
    values, facts = vars(record) | record.model, []
    for name, origin_of_fact in record.origin.items():
        if origin_of_fact != origin:
            continue
        value = values[name]
        if isinstance(value, dict):
            value = "as named"
        facts.append(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join(facts)


def _averaged(record: Record) -> str:
    """Returns why the spread of single steps is not in a run's entries, or ""."""
    if record.epochs:
        return "an iteration is an epoch here: the spread of steps is hidden"
    if record.mean_of:
        mean = f"s/iter is {record.mean_of}, with warm-up, evaluations and saves"
        return f"{mean}: the spread of steps is hidden"
    if record.running_average:
        return "running averages are printed as iterations: their spread is hidden"
    if record.interval > 1:
        return f"each entry averages {record.interval} iterations: their spread is hidden"
    return ""


def averages(records: list[Record]) -> list[str]:
    """Returns a table's notes on runs whose entries are averages, so that their noise is not
    known."""
    groups: dict[str, list[str]] = {}
    for record in records:
        groups.setdefault(_averaged(record), []).append(name_of(record))
    return [f"{text}: {', '.join(names)}" for text, names in groups.items() if text]


def _loss_doubt(record: Record) -> str:
    """Returns what is doubtful about a run's losses: NaN, infinite, or much higher at the end; ""
    where nothing is."""
    steps, n = _with_loss(record), len(record.steps)
    bad = ~np.isfinite(steps["loss"])
    end = ", to the end" if bad[-1:].any() else ""
    if nans := max(record.nan_iterations, int((steps["nan_loss"] == 1).sum())):
        return f"the loss is NaN {f'in {nans} of {n} iterations' if n else f'{nans} times'}{end}"
    if bad.any():
        first = f"first in {steps['iteration'][bad][0]:.0f}"
        return f"the loss is infinite in {bad.sum()} of {n} iterations, {first}{end}"
    loss = steps["loss"]
    if len(loss) < 20:
        return ""
    medians = [float(np.median(tenth)) for tenth in np.array_split(loss, 10)]
    if medians[-1] > EXPLODED * min(medians[:-1]) and medians[-1] > medians[0] / 2:
        return f"exploding loss: {medians[-1]:.3g} at the end, {min(medians):.3g} before"
    return ""
