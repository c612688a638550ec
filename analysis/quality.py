"""May I believe this run? Its verdict with the line that proves it, and its steady step time.

    python -m analysis.quality PATH... [--window FIRST:LAST] [--rule seed] [--format json]

One row per run: how it ended and the line that proves it, its steady step time with a 95 %
interval, and what makes its numbers doubtful. `--window` states the iterations to use by the
numbers that the log prints; `--rule seed` takes the mean of every iteration in whole seconds, as
the Jean Zay one-liner did. `--format json` prints an array with one object per run; unknown is
null. Exits 2 when nothing could be read.

The verdicts: complete; diverged (the run went on to its end, but the last loss is NaN or
infinite); stopped early; end unknown; OOM, communication error, node failure, timeout, cancelled,
traceback (what its failure was); rows missing (complete, but not all of its steps are there);
pending, running, interrupted (what the status of a run of ours says); no data.
"""

import argparse
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: find the rooms, not analysis/ itself
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from analysis.readers._log import Log
from analysis.records import Record
from analysis.tables import FORMAT_HELP, FORMATS, Column, Table, emphasise, json_objects
from models.errors import Parser, command_line, warn
from parallel.steady import MIN_STEADY, Steady, steady

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
MANY_SKIPPED = 0.1  # share of skipped iterations that is worth a word; fp16 skips one or two
UNEVEN = 0.2  # share of spikes above which the median hides how slow the run was
EXPLODED = 1.5  # the loss at the end over the lowest it had been


def step_times(record: Record) -> np.ndarray:
    """Seconds per optimizer step, one per logged entry.

    As logged; or, where the log times micro-steps or prints no time but throughput, what the
    global batch takes at the printed tokens or samples per second. Empty when neither is known.
    """
    micro = "micro_steps_per_step" in record.extra or "epochs" in record.extra
    if np.isfinite(record.step_s).any() and not micro:
        return record.step_s
    with np.errstate(divide="ignore", invalid="ignore"):
        if record.global_batch and record.seq_len and np.isfinite(record.tokens_per_s).any():
            step_s = record.global_batch * record.seq_len / record.tokens_per_s
        elif record.global_batch and np.isfinite(record.samples_per_s).any():
            step_s = record.global_batch / record.samples_per_s
        else:
            return np.empty(0)
    return np.where(np.isfinite(step_s), step_s, np.nan)


def no_timing(record: Record) -> str:
    """Why no time is taken from a run whatever its rows say, or ""."""
    if profiler := record.extra.get("profiler"):  # it slows what it watches
        return f"profiled with {profiler.get('tool', 'an unknown tool')}: not a timing"
    return record.extra.get("missing_steps") or ""


def timed(
    record: Record, window: tuple[int, int] | None = None, rule: str = "median"
) -> Steady | None:
    """`steady` of a run's optimizer steps: how every command here takes a step time.

    None where nothing was timed, or `no_timing` says why no time is taken.
    """
    if no_timing(record):
        return None
    return steady(step_times(record), record.skipped, record.iteration, window, rule)


@dataclass
class Judgement:
    """How a run ended, the line that proves it (0: no line does), and what is doubtful about it.

    `reasons` says it all in words; `unfit` is True where a doubt makes the step time no result.
    """

    verdict: str
    line_no: int = 0
    proof: str = ""
    flags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unfit: bool = False

    @property
    def reasons(self) -> list[str]:
        where = f"line {self.line_no}: " if self.line_no else ""
        return [f"{where}{self.proof}"] * bool(self.proof) + self.flags + self.notes


def judge(record: Record, time: Steady | None = None) -> Judgement:
    """The verdict and the quality flags of one run; `time` is its steady step time, if taken."""
    judgement = _verdict(record)
    flags, judgement.unfit = _flags(record, time)
    judgement.flags = [flag for flag in flags if flag != judgement.proof]
    judgement.notes += record.notes
    return judgement


def unfinished(record: Record) -> str:
    """How a run ended that did not complete, or ""; a log that tells no end is not held to one."""
    ended = _verdict(record)
    return "" if ended.verdict in ("complete", "end unknown") else ended.verdict


def _verdict(record: Record) -> Judgement:
    ended = _ended(record)
    if ended.verdict in ("complete", "end unknown") and (why := _diverged(record)):
        return Judgement("diverged", _last_line(record), why, notes=ended.notes)
    return ended


def _not_finite(record: Record) -> tuple[np.ndarray, np.ndarray]:
    """(which entries' loss is NaN or infinite, where a loss was printed at all)."""
    bad = np.isinf(record.loss)
    bad[record.extra.get("nan_at", [])] = True
    return bad, np.flatnonzero(bad | np.isfinite(record.loss))


def _diverged(record: Record) -> str:
    """Why a run that went on to its end is none to believe, or "": its last loss is no number.

    One skipped step at the end is none of it: fp16 skips such a step and lowers its scale.
    """
    bad, printed = _not_finite(record)
    if not len(printed) or not bad[last := printed[-1]]:
        return ""
    skipped = len(record.skipped) == len(bad) and record.skipped[last] >= record.interval
    if skipped and not bad[printed[-2:-1]].any():
        return ""
    return f"the last loss is {record.loss[last]:g}"


def _ended(record: Record) -> Judgement:
    failure, state = record.failure, record.extra.get("state")
    n, planned = len(record.step_s), record.planned_steps
    finished = record.completed is True or (
        record.completed is None and planned is not None and _last(record) >= planned
    )
    if finished and (missing := record.extra.get("missing_steps")):
        return Judgement("rows missing", proof=missing)
    if finished:
        proof = "it says that it completed"
        if planned is not None:
            proof = f"{planned} of {planned} iterations"
        judgement = Judgement("complete", _last_line(record), proof)
        if failure is not None:
            judgement.notes.append(
                f"after the run completed, line {failure.line_no}: {failure.line.strip()}"
            )
        return judgement
    if failure is not None:
        verdict = VERDICTS.get(failure.kind, failure.kind)
        return Judgement(verdict, failure.line_no, failure.line.strip())
    if state == "pending":
        return Judgement("pending")
    if state == "running":
        return Judgement("running", proof="its status says running")
    if state == "interrupted":  # its note gives the reason
        return Judgement("interrupted", proof="it was asked to stop, and can be gone on with")
    if n == 0 and not np.isfinite(record.samples_per_s).any():
        if tables := record.extra.get("tables"):
            return Judgement("no data", proof=f"a profile, without steps: {', '.join(tables)}")
        return Judgement("no data", proof="no iteration was logged")
    if planned is not None and _last(record) < planned:
        numbers = record.iteration[np.isfinite(record.iteration)]
        last = int(numbers.max()) if len(numbers) else "an unknown number"
        proof = f"ended at iteration {last} of {planned}"
        return Judgement("stopped early", _last_line(record), proof)
    if record.completed is False:
        return Judgement("stopped early", _last_line(record), "it never says that it completed")
    return Judgement("end unknown", proof="the log says neither how far it should go nor an end")


def _last_line(record: Record) -> int:
    """The line of what was logged last, which is as far as the run got; 0 where there is none."""
    at = record.extra.get("last_at")
    if at is None:
        return 0
    with Log(Path(record.source)) as log:
        return log.line_no(at)


def _last(record: Record) -> float:
    """How many iterations the log reached, whether it counts from 0 or from 1."""
    numbers = record.iteration[np.isfinite(record.iteration)]
    if not len(numbers):
        return 0.0
    return float(numbers.max() + (numbers.min() == 0))


def _flags(record: Record, time: Steady | None) -> tuple[list[str], bool]:
    flags, unfit = [], False
    if why := no_timing(record):
        flags.append(why)
        unfit = True
    n = len(record.step_s)
    skipped = np.nan_to_num(record.skipped)
    touched = int(np.sum(skipped > 0))
    unit = "iterations" if record.interval == 1 else "entries"
    if len(skipped) and (skipped >= record.interval).all():
        flags.append(f"all {len(skipped)} {unit} skipped: no optimizer step was timed")
        unfit = True
    elif touched > MANY_SKIPPED * len(skipped):
        flags.append(f"{touched} of {len(skipped)} {unit} skipped the optimizer")
    flags += _loss_flags(record)
    norm = record.grad_norm[np.isfinite(record.grad_norm)]
    if len(norm) and (norm == 0).any():
        flags.append(f"grad norm is zero in {int((norm == 0).sum())} of {len(norm)} iterations")
    flags += [_averaged(record)] * bool(_averaged(record))
    if time is not None:
        if time.n < MIN_STEADY and n:
            flags.append(f"too few points: {time.n} after the warm-up, 95 % needs {MIN_STEADY}")
        if not time.settled:
            flags.append("warm-up not over: the second half of the steady iterations is faster")
        if time.spikes > UNEVEN * time.n:
            flags.append(
                f"uneven: {time.spikes} of {time.n} steady iterations are well above the median"
            )
        elif time.spikes:
            flags.append(f"{time.spikes} of {time.n} steady iterations are spikes")
    if mixed := record.extra.get("go_on"):  # its curve is that of no one schedule
        flags.append(mixed)
    if record.oversubscribed:
        flags.append("oversubscribed: more ranks than cores")
    guessed = [name for name, origin in record.origin.items() if origin == "from name"]
    if guessed:
        flags.append("from name: " + ", ".join(f"{k} {getattr(record, k):g}" for k in guessed))
    return flags, unfit


def _averaged(record: Record) -> str:
    if record.extra.get("running_average"):
        return "running averages are printed as iterations: their spread is hidden"
    if record.interval > 1:
        return f"each entry averages {record.interval} iterations: their spread is hidden"
    return ""


def averages(records: list[Record]) -> list[str]:
    """A table's notes on runs whose entries are averages, so that their noise is not known."""
    from analysis.load import name_of

    found: dict[str, list[str]] = {}
    for record in records:
        found.setdefault(_averaged(record), []).append(name_of(record))
    return [f"{said}: {', '.join(names)}" for said, names in found.items() if said]


def _loss_flags(record: Record) -> list[str]:
    loss = record.loss
    bad, printed = _not_finite(record)
    end = ", to the end" if len(printed) and bad[printed[-1]] else ""
    if nans := record.extra.get("nan_iterations"):
        return [f"the loss is NaN in {nans} of {len(loss)} iterations{end}"]
    infinite = np.flatnonzero(bad)
    if len(infinite):
        numbers = record.iteration if len(record.iteration) == len(loss) else np.arange(len(loss))
        return [
            f"the loss is infinite in {len(infinite)} of {len(loss)} iterations, first in"
            f" {int(numbers[infinite[0]])}{end}"
        ]
    loss = loss[np.isfinite(loss)]
    if len(loss) < 20:
        return []
    parts = [float(np.median(part)) for part in np.array_split(loss, 10)]
    if parts[-1] > EXPLODED * min(parts[:-1]) and parts[-1] > parts[0] / 2:
        return [f"exploding loss: {parts[-1]:.3g} at the end, {min(parts):.3g} before"]
    return []


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _median(values: np.ndarray) -> float | None:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else None


# The keys of `summary`, in the order that JSON prints them.
SUMMARY = tuple(
    """source format verdict reasons engine steps step_s_mean step_s_median step_s_min step_s_max
    steady_step_s steady_n steady_ci95 tokens_per_s samples_per_s printed_tflops gpus tp pp vpp dp
    micro_batch global_batch seq_len model params""".split()
)


def summary(record: Record, time: Steady | None, judgement: Judgement) -> dict[str, Any]:
    """One run as plain data: what `--format json` prints. Unknown is None; seconds, tokens/s."""
    logged = record.step_stats()
    samples = tokens = None
    if time is not None and time.step_s > 0 and record.global_batch:
        samples = record.global_batch / time.step_s
        tokens = samples * record.seq_len if record.seq_len else None
    samples = samples or _median(record.samples_per_s) or record.totals.get("samples_per_s")
    tokens = tokens or _median(record.tokens_per_s) or record.totals.get("tokens_per_s")
    if samples and record.seq_len:
        tokens = tokens or samples * record.seq_len
    if no_timing(record):
        samples = tokens = None
    return {
        "source": record.source,
        "format": record.format,
        "verdict": judgement.verdict,
        "reasons": judgement.reasons,
        "engine": record.engine,
        "steps": logged["n"],
        **{f"step_s_{name}": logged[name] for name in ("mean", "median", "min", "max")},
        "steady_step_s": time and time.step_s,
        "steady_n": time.n if time else 0,
        "steady_ci95": list(time.ci95) if time and time.ci95 else None,
        "tokens_per_s": _number(tokens),
        "samples_per_s": _number(samples),
        "printed_tflops": _median(record.tflops),
        **{k: getattr(record, k) for k in ("gpus", "tp", "pp", "vpp", "dp")},
        **{k: getattr(record, k) for k in ("micro_batch", "global_batch", "seq_len")},
        "model": record.model,
        "params": record.params,
    }


def _summarised(
    record: Record, window: tuple[int, int] | None = None, rule: str = "median"
) -> dict[str, Any]:
    time = timed(record, window, rule)
    return summary(record, time, judge(record, time))


def table(records: list[Record], window: tuple[int, int] | None, rule: str) -> Table:
    """The quality table: one row per run."""
    from analysis.load import name_of  # here, because loading needs this module's verdicts

    columns = [
        Column("run", "run"),
        Column("format", "format"),
        Column("verdict", "verdict"),
        Column("steps", "steps", "d"),
        Column("steady_step_s", "s/iter", ".4g"),
        Column("ci95", "95 % interval"),
        Column("steady_n", "of", "d"),
        Column("reasons", "reasons"),
    ]
    rows = []
    for record in records:
        row = _summarised(record, window, rule)
        ci95 = row["steady_ci95"]
        row["run"] = name_of(record)
        row["ci95"] = f"{ci95[0]:.4g} .. {ci95[1]:.4g}" if ci95 else None
        row["reasons"] = "; ".join(row["reasons"])
        rows.append({c.key: row[c.key] for c in columns})
    return Table(columns, rows, notes=[f"s/iter: {describe_rule(window, rule)}"])


def describe_rule(window: tuple[int, int] | None, rule: str) -> str:
    """How a step time was taken, for a table's note."""
    if rule == "seed":
        return "mean of all iterations, cut to whole seconds (the seed rule)"
    if window:
        return f"median of iterations {window[0]} to {window[1]}"
    return "median after the warm-up that the data show"


def parse_window(text: str) -> tuple[int, int]:
    """`FIRST:LAST` as two iteration numbers; argparse's `type`."""
    first, colon, last = text.partition(":")
    try:
        if not colon or int(first) > int(last):
            raise ValueError
        return int(first), int(last)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:LAST") from None


def add_time_flags(parser: argparse.ArgumentParser) -> None:
    """How the step time is taken: the flags that every command here shares."""
    parser.add_argument(
        "--window",
        type=parse_window,
        metavar="FIRST:LAST",
        help="iterations to use, by the numbers in the log",
    )
    parser.add_argument(
        "--rule",
        choices=("median", "seed"),
        default="median",
        help="seed: mean of all, whole seconds",
    )


@command_line("analysis.quality")
def main(argv: list[str] | None = None) -> int:
    """Print the verdicts of what is at the paths."""
    from analysis.load import add_fact_flags, load

    parser = Parser(
        prog="python -m analysis.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="log, run or folder")
    add_time_flags(parser)
    add_fact_flags(parser)
    parser.add_argument("--format", choices=FORMATS, default="text", help=FORMAT_HELP)
    arguments = parser.parse_args(argv)
    records, refused = load(arguments.paths, arguments)
    for line in refused:
        warn("analysis.quality", line)
    if arguments.format == "json":
        found = [_summarised(record, arguments.window, arguments.rule) for record in records]
        print(json_objects(found), end="")
        return 0
    text = table(records, arguments.window, arguments.rule).render(arguments.format)
    print(emphasise(text) if arguments.format == "text" else text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
