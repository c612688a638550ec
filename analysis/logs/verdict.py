"""Whether a run can be believed: how it ended, the line that proves it, what is doubtful about it.

The verdicts: complete; diverged (the run reached its end, but the last loss is NaN or infinite);
stopped early; end unknown; OOM, communication error, node failure, timeout, cancelled, traceback
(how it failed); rows missing (complete, but steps.csv lacks steps); pending, running, interrupted
(the state of one of our own runs); no data.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from analysis.logs.load import name_of
from analysis.logs.record import Record
from base.errors import Reason
from parallel.measure.steady_time import MIN_STEADY, Steady, steady

# A failure's kind as the readers name it -> the verdict.
VERDICTS = {
    "oom": "OOM",
    "nccl": "communication error",
    "node": "node failure",
    "timeout": "timeout",
    "cancelled": "cancelled",
    "traceback": "traceback",
    "diverged": "diverged",
    "launcher": "no data",
}
# The states of our own runs that are verdicts -> what proves them.
_STATES = {
    "pending": "",
    "running": "its status says running",
    "interrupted": "it was asked to stop, and can be gone on with",  # its note gives the reason
}
MANY_SKIPPED = 0.1  # share of skipped iterations that is flagged; fp16 skips one or two
UNEVEN = 0.2  # share of spikes above which the median hides how slow the run was
EXPLODED = 1.5  # the loss at the end over the lowest it had been
UNFIT = ("profiled", "rows missing", "all skipped")  # kinds of flags that rule out a step time


def step_times(record: Record) -> np.ndarray:
    """Seconds per optimizer step, one per logged entry.

    The logged time. Where the log times micro-steps or prints only throughput: the time that the
    global batch takes at the printed tokens or samples per second. Empty where neither is known.
    """
    steps = record.steps
    if np.isfinite(steps["step_s"]).any() and not record.per_epoch:
        return steps["step_s"]
    with np.errstate(divide="ignore", invalid="ignore"):
        if record.global_batch and record.seq_len and np.isfinite(steps["tokens_per_s"]).any():
            step_s = record.global_batch * record.seq_len / steps["tokens_per_s"]
        elif record.global_batch and np.isfinite(steps["samples_per_s"]).any():
            step_s = record.global_batch / steps["samples_per_s"]
        else:
            return np.empty(0)
    return np.where(np.isfinite(step_s), step_s, np.nan)


def no_timing(record: Record) -> Reason | None:
    """Why no time is taken from a run whatever its rows say, or None."""
    if record.profiler:  # it slows the steps that it watches
        tool = record.profiler.get("tool", "an unknown tool")
        return Reason("profiled", f"profiled with {tool}: not a timing")
    return Reason("rows missing", record.missing_steps) if record.missing_steps else None


def timed(record: Record, window: tuple[int, int] | None = None) -> Steady | None:
    """`steady` of a run's optimizer steps: how every command here takes a step time.

    None where nothing was timed, or `no_timing` says why no time is taken.
    """
    if no_timing(record):
        return None
    steps = record.steps
    return steady(step_times(record), steps["skipped"], steps["iteration"], window)


@dataclass
class Judgement:
    """How a run ended, the line that proves it (0: no line does), and what is doubtful about it.

    proof: the words of that line, or what was counted. flags: doubts about the numbers.
    """

    verdict: str
    line_no: int = 0
    proof: str = ""
    flags: list[Reason] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def reasons(self) -> list[str]:
        """Proof, doubts and notes in words."""
        where = f"line {self.line_no}: " if self.line_no else ""
        proof = [f"{where}{self.proof}"] if self.proof else []
        return proof + [flag.text for flag in self.doubts] + self.notes

    @property
    def doubts(self) -> list[Reason]:
        """The flags that the proof does not already say."""
        return [flag for flag in self.flags if flag.kind != self.verdict]

    @property
    def unfit(self) -> bool:
        """Whether a doubt makes the step time no result."""
        return any(flag.kind in UNFIT for flag in self.flags)

    @property
    def only_skipped(self) -> bool:
        """Whether the time is one of whole iterations but for the optimizer, which was skipped."""
        return {flag.kind for flag in self.flags if flag.kind in UNFIT} == {"all skipped"}


def judge(record: Record, time: Steady | None = None) -> Judgement:
    """The verdict and the quality flags of one run; `time` is its steady step time, if taken."""
    judgement = _verdict(record)
    judgement.flags = _flags(record, time)
    judgement.notes += record.notes
    return judgement


def unfinished(record: Record) -> str:
    """How a run ended that did not complete, or "". A log that states no end passes."""
    ended = _verdict(record)
    return "" if ended.verdict in ("complete", "end unknown") else ended.verdict


def _verdict(record: Record) -> Judgement:
    ended = _ended(record)
    if ended.verdict in ("complete", "end unknown") and (why := _diverged(record)):
        return Judgement("diverged", record.last_line, why, notes=ended.notes)
    return ended


def _not_finite(record: Record) -> tuple[np.ndarray, np.ndarray]:
    """(which entries' loss is NaN or infinite, where a loss was printed at all)."""
    loss = record.steps["loss"]
    bad = np.isinf(loss) | (record.steps["nan_loss"] == 1)
    return bad, np.flatnonzero(bad | np.isfinite(loss))


def _diverged(record: Record) -> str:
    """Why a run that reached its end diverged, or "": its last loss is NaN or infinite.

    One skipped step at the end does not count: fp16 skips such a step and lowers its scale.
    """
    bad, printed = _not_finite(record)
    if not len(printed):  # its losses are in no entries
        last = record.totals.get("loss", record.totals.get("train_loss", 0.0))
        return "" if math.isfinite(last) else f"the last loss is {last:g}"
    if not bad[last := printed[-1]]:
        return ""
    skipped = record.steps["skipped"][last] >= record.interval
    if skipped and not bad[printed[-2:-1]].any():
        return ""
    return f"the last loss is {record.steps['loss'][last]:g}"


def _ended(record: Record) -> Judgement:
    failure, state = record.failure, record.state
    planned = record.planned_steps
    finished = record.completed is True or (
        record.completed is None and planned is not None and _last(record) >= planned
    )
    if finished and record.missing_steps:
        return Judgement("rows missing", proof=record.missing_steps)
    if finished:
        proof = f"{planned} of {planned} iterations"
        judgement = Judgement("complete", record.last_line, proof)
        if planned is None:
            judgement.proof = "it says that it completed"
        if failure is not None:
            judgement.notes.append(
                f"after the run completed, line {failure.line_no}: {failure.line.strip()}"
            )
        return judgement
    if failure is not None:
        verdict = VERDICTS.get(failure.kind, failure.kind)
        return Judgement(verdict, failure.line_no, failure.line.strip())
    if state in _STATES:
        return Judgement(state, proof=_STATES[state])
    if not len(record.steps):
        if record.tables:
            names = ", ".join(record.tables)
            return Judgement("no data", proof=f"a profile, without steps: {names}")
        return Judgement("no data", proof="no iteration was logged")
    if planned is not None and _last(record) < planned:
        numbers = _iterations(record)
        last = int(numbers.max()) if len(numbers) else "an unknown number"
        proof = f"ended at iteration {last} of {planned}"
        return Judgement("stopped early", record.last_line, proof)
    if record.completed is False:
        return Judgement("stopped early", record.last_line, "it never says that it completed")
    return Judgement("end unknown", proof="the log says neither how far it should go nor an end")


def _last(record: Record) -> float:
    """How many iterations the log reached, whether it counts from 0 or from 1."""
    numbers = _iterations(record)
    return float(numbers.max() + (numbers.min() == 0)) if len(numbers) else 0.0


def _iterations(record: Record) -> np.ndarray:
    numbers = record.steps["iteration"]
    return numbers[np.isfinite(numbers)]


def _flags(record: Record, time: Steady | None) -> list[Reason]:
    """The doubts about a run's numbers, in the order that tables show them."""
    norm = record.steps["grad_norm"]
    norm = norm[np.isfinite(norm)]
    zeros = f"grad norm is zero in {(norm == 0).sum()} of {len(norm)} iterations"
    shared = f"oversubscribed: {record.sharing or 'more ranks than cores'}"
    doubts = (
        no_timing(record),
        _skipped(record),
        Reason("loss", _loss_doubt(record)),
        Reason("grad norm", zeros if (norm == 0).any() else ""),
        _averaged(record),
        *_time_flags(record, time),
        Reason("schedule", record.schedule_note),  # no single schedule has its loss curve
        Reason("oversubscribed", shared if record.oversubscribed else ""),
        Reason("default", _weak(record, "default", "defaults of the tool: ")),
        Reason("from name", _weak(record, "from name", "from name: ")),
    )
    return [doubt for doubt in doubts if doubt and doubt.text]


def _weak(record: Record, origin: str, said: str) -> str:
    """The facts that have this origin, with their values; "" where there are none."""
    stated = vars(record) | record.model
    values = ((name, stated[name]) for name, of in record.origin.items() if of == origin)
    names = [f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in values]
    return said + ", ".join(names) if names else ""


def _skipped(record: Record) -> Reason | None:
    skipped = np.nan_to_num(record.steps["skipped"])
    touched, n = int(np.sum(skipped > 0)), len(skipped)
    unit = "iterations" if record.interval == 1 else "entries"
    if n and (skipped >= record.interval).all():
        return Reason("all skipped", f"all {n} {unit} skipped: no optimizer step was timed")
    if touched > MANY_SKIPPED * n:
        return Reason("skipped", f"{touched} of {n} {unit} skipped the optimizer")
    return None


def _time_flags(record: Record, time: Steady | None) -> list[Reason]:
    if time is None:
        return []
    flags = []
    if time.n < MIN_STEADY and len(record.steps):
        said = f"too few points: {time.n} after the warm-up, 95 % needs {MIN_STEADY}"
        flags.append(Reason("few points", said))
    if not time.settled:
        said = "warm-up not over: the second half of the steady iterations is faster"
        flags.append(Reason("warm-up", said))
    if time.spikes:
        said = f"{time.spikes} of {time.n} steady iterations are"
        uneven = time.spikes > UNEVEN * time.n
        said = f"uneven: {said} well above the median" if uneven else f"{said} spikes"
        flags.append(Reason("spikes", said))
    return flags


def _averaged(record: Record) -> Reason | None:
    if record.running_average:
        said = "running averages are printed as iterations"
    elif record.interval > 1:
        said = f"each entry averages {record.interval} iterations"
    else:
        return None
    return Reason("averages", f"{said}: their spread is hidden")


def averages(records: list[Record]) -> list[str]:
    """A table's notes on runs whose entries are averages, so that their noise is not known."""
    found: dict[Reason | None, list[str]] = {}
    for record in records:
        found.setdefault(_averaged(record), []).append(name_of(record))
    return [f"{said}: {', '.join(names)}" for said, names in found.items() if said]


def _loss_doubt(record: Record) -> str:
    loss = record.steps["loss"]
    bad, printed = _not_finite(record)
    end = ", to the end" if len(printed) and bad[printed[-1]] else ""
    nans = max(record.nan_iterations, int(np.nansum(record.steps["nan_loss"])))
    if nans:
        where = f"in {nans} of {len(loss)} iterations" if len(loss) else f"{nans} times"
        return f"the loss is NaN {where}{end}"
    infinite = np.flatnonzero(bad)
    if len(infinite):
        return (
            f"the loss is infinite in {len(infinite)} of {len(loss)} iterations, first in"
            f" {int(record.steps['iteration'][infinite[0]])}{end}"
        )
    loss = loss[np.isfinite(loss)]
    if len(loss) < 20:
        return ""
    parts = [float(np.median(part)) for part in np.array_split(loss, 10)]
    if parts[-1] > EXPLODED * min(parts[:-1]) and parts[-1] > parts[0] / 2:
        return f"exploding loss: {parts[-1]:.3g} at the end, {min(parts):.3g} before"
    return ""


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _median(values: np.ndarray) -> float | None:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else None


# The keys of `summary`, in the order that JSON prints them.
SUMMARY = tuple(
    """source format verdict reasons engine steps step_s_mean step_s_median step_s_min step_s_max
    steady_step_s steady_n steady_ci95 tokens_per_s samples_per_s printed_tflops gpus tp cp pp vpp
    dp micro_batch global_batch seq_len model params""".split()
)


def summary(record: Record, time: Steady | None, judgement: Judgement) -> dict[str, Any]:
    """One run as plain data: what `--format json` prints. Unknown is None; seconds, tokens/s."""
    logged = record.step_stats()
    samples = tokens = None
    if time is not None and time.step_s > 0 and record.global_batch:
        samples = record.global_batch / time.step_s
        tokens = samples * record.seq_len if record.seq_len else None
    samples = (
        samples or _median(record.steps["samples_per_s"]) or record.totals.get("samples_per_s")
    )
    tokens = tokens or _median(record.steps["tokens_per_s"]) or record.totals.get("tokens_per_s")
    if samples and record.seq_len:
        tokens = tokens or samples * record.seq_len
    if no_timing(record):
        samples = tokens = None
    computed = {
        "verdict": judgement.verdict,
        "reasons": judgement.reasons,
        "steps": logged.pop("n"),
        **{f"step_s_{name}": seconds for name, seconds in logged.items()},
        "steady_step_s": time and time.step_s,
        "steady_n": time.n if time else 0,
        "steady_ci95": list(time.ci95) if time and time.ci95 else None,
        "tokens_per_s": _number(tokens),
        "samples_per_s": _number(samples),
        "printed_tflops": _median(record.steps["tflops"][time.first if time else 0 :]),
    }
    return {name: computed[name] if name in computed else getattr(record, name) for name in SUMMARY}


def describe_rule(window: tuple[int, int] | None) -> str:
    """How a step time was taken, for a table's note."""
    if window:
        return f"median of iterations {window[0]} to {window[1]}"
    return "median after the warm-up that the data show"
