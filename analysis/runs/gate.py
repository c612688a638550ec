"""A gate for changes of code: whether NEW is slower than OLD by more than a share, beyond the noise
of both. The ratio and its interval are those of every comparison (pairs.py).

A golden file keeps OLD: the steady time of each of its runs, and the facts without which times
cannot be compared.
"""

from pathlib import Path
from typing import Any, NamedTuple

from analysis.common.reasons import Reason
from analysis.common.table import Column, Table
from analysis.logs.facts import COUNT, SETTINGS
from analysis.logs.naming import name_of
from analysis.logs.record import Record
from analysis.runs.judged import Run
from analysis.runs.pairs import Pair, pair_of
from analysis.runs.verdict import Judgement
from base.bounds import Bounds, misfit
from base.errors import UsageError
from base.files import read_json
from base.intervals import Interval
from base.storage import write_json
from parallel.measure.steady_time import Steady
from parallel.record.schema import RUN_FACTS

PASSED, SLOWER, UNKNOWN = 0, 1, 2  # exit statuses
MARK = "golden step times of analysis.compare"
_SECONDS = Bounds(0, 1e9, above=True)
# What a golden file holds, as `misfit` checks it. Facts are Record's; those of run.json are the
# tables that comparisons read.
_RUN = {"run": str, "step_s": _SECONDS, "ci95": [_SECONDS], "n": COUNT, "independent": _SECONDS}
_RUN |= {"verdict": str, "doubts": [str]}
_FACTS = {name: fact.allowed for name, fact in SETTINGS.items()}
_FACTS |= {"model": RUN_FACTS["model"], "token_ids": [COUNT], "uncounted": [str], "code": str}
_FACTS |= {"interval": COUNT, "running_average": bool}
_TABLES = ("spec", "layout", "versions", "inputs", "host", "kernels", "attention")
_RUN_JSON = {name: RUN_FACTS.get(name, dict) for name in _TABLES}
_FILE = {"holds": str, "facts": _FACTS, "run_json": _RUN_JSON, "runs": [_RUN]}


class Verdict(NamedTuple):
    """Whether NEW passes: the exit status, and one sentence."""

    status: int
    sentence: str


def judge(pair: Pair, at_most: float) -> Verdict:
    """Returns whether B is slower than A by more than the share `at_most`, which only an interval
    that lies beyond it as a whole says."""
    comparison, bar = pair.comparison, f"{100 * at_most:g} %"
    if comparison is None:
        return Verdict(UNKNOWN, f"cannot be known: {'; '.join(pair.doubts)}")
    if comparison.gpus:
        old, new = comparison.gpus
        reason = f"OLD ran on {old} GPUs and NEW on {new}: neither is slower as such"
        return Verdict(UNKNOWN, f"cannot be known: {reason}")
    if comparison.interval is None:
        reasons = "; ".join(["how much is noise is unknown", *pair.doubts])
        return Verdict(UNKNOWN, f"cannot be known: {reasons}")
    longer = Interval(1, 1).over(comparison.interval)
    low, high = longer.low - 1, longer.high - 1
    shares = (f"{100 * share:+.1f} %" for share in (1 / comparison.ratio - 1, low, high))
    found = "its step takes {} ({} to {})".format(*shares)
    if low > at_most:
        return Verdict(SLOWER, f"NEW is slower by more than {bar}: {found}")
    if high > at_most:
        words = f"NEW is not shown to be slower by more than {bar}"
        return Verdict(PASSED, f"{words}: {found}; more repeats or steps narrow this")
    return Verdict(PASSED, f"NEW is not slower by more than {bar}: {found}")


def write_golden(runs: list[Run], path: Path) -> Table:
    """Writes the runs, which are repeats of each other, as the golden file.

    Raises:
        UsageError: no comparison with these runs could say what noise is.
    """
    itself = pair_of(runs, runs, any_commit=True)
    if itself.comparison is None or itself.comparison.interval is None:
        reasons = "; ".join(itself.doubts)
        raise UsageError(f"{path} is not written, nothing could be compared with it: {reasons}")
    record = runs[0].record
    facts = {name: getattr(record, name) for name in _FACTS}
    run_json = {name: record.facts.get(name) for name in _RUN_JSON if record.facts.get(name)}
    if host := run_json.get("host"):
        run_json["host"] = {name: host.get(name) for name in ("cuda", "nccl", "driver")}
    times = [
        {
            "run": name_of(run.record),
            "step_s": run.time.step_s,
            "ci95": run.time.ci95,
            "n": run.time.n,
            "independent": run.time.independent,
            "verdict": run.judgement.verdict,
            "doubts": run.time_doubts,
        }
        for run in runs
    ]
    stated = {name: value for name, value in facts.items() if value not in (None, [], {})}
    write_json(path, {"holds": MARK, "facts": stated, "run_json": run_json, "runs": times})
    columns = [Column("run", "run"), Column("step_s", "s/iter", ".4f"), Column("n", "n", "d")]
    note = f"{path} is written: the reference of later comparisons; remove it to keep other runs"
    return Table(columns, times, notes=[note])


def read_golden(path: Path) -> list[Run]:
    """Returns the runs that a golden file holds.

    Raises:
        UsageError: the file is unreadable or no golden file, or a value in it cannot be.
    """
    content = read_json(path)
    if content.get("holds") != MARK or not (content.get("runs") and content.get("facts")):
        raise UsageError(f"{path} holds no {MARK}: remove it, and it is written again")
    if problem := misfit(content, _FILE):
        raise UsageError(f"{path} is damaged: {problem}")
    return [_run(path, content, times) for times in content["runs"]]


def _run(path: Path, content: dict[str, Any], times: dict[str, Any]) -> Run:
    """Returns one run of a golden file. It has no number of a repeat: it ran in turns with none."""
    if missing := [name for name in ("step_s", "n", "independent") if times.get(name) is None]:
        raise UsageError(f"{path} is damaged: a run has no {', '.join(missing)}")
    stated = {name: value for name in _FACTS if (value := content["facts"].get(name)) is not None}
    if model := stated.get("model"):
        stated["model"] = {name: value for name, value in model.items() if value is not None}
    record = Record(str(path), "golden file", **stated, facts=content.get("run_json") or {})
    ends = times.get("ci95")
    if ends is not None and not (len(ends) == 2 and ends[0] <= times["step_s"] <= ends[1]):
        raise UsageError(f"{path} is damaged: {times['step_s']} is not within {ends}")
    ci95 = None if ends is None else Interval(*ends)
    time = Steady(times["step_s"], times["n"], ci95, 0, 0, independent=times["independent"])
    doubts = [Reason("rising", text) for text in times.get("doubts") or []]
    return Run(record, time, Judgement(Reason(times.get("verdict") or "complete", ""), doubts))
