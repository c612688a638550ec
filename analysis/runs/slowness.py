"""Which ranks were slow in which runs, which nodes had some, and why single steps were slow: by
slow_ranks.csv, or by the parts of steps that a log has."""

from collections import defaultdict
from typing import NamedTuple

from analysis.common.table import Column, Table
from analysis.logs.rank_files import doubts_of_parts, parts_of
from analysis.logs.record import Record
from base.errors import UsageError
from parallel.measure import rank_judge
from parallel.measure.slow_steps import SlowSteps, slow_ranks_of, slow_steps
from parallel.record.reader import read_slow_ranks

_RANKS = [Column("run", "run"), Column("kind", "kind"), Column("rank", "rank", "d")]
_RANKS += [Column("node", "node"), Column("longer", "longer by", ".0%")]
_RANKS += [Column("n", "windows", "d"), Column("windows", "of", "d")]
_RANKS += [Column("first", "first step", "d"), Column("last", "last step", "d")]
_NODES = [Column("node", "node"), Column("n", "slow in runs", "d"), Column("of", "of all", "d")]
_NODES.append(Column("runs", "which"))


_STEPS = [Column("run", "run"), Column("steps", "slow steps"), Column("n", "n", "d")]
_STEPS += [Column("longer_s", "slower by (s)", ".3g"), Column("part", "part")]
_STEPS += [Column("part_s", "of it (s)", ".3g"), Column("place", "on")]
_STEPS.append(Column("lost", "share of the time", ".1%"))
NO_COMPUTING = "which rank computes longer is not known: its parts hold waiting for other ranks"
NO_RANKS = "its log has no times of several ranks, and no parts of a step"


class Slowness(NamedTuple):
    """What a run says of slow ranks and slow steps. note: what cannot be known of it."""

    ranks: list[rank_judge.Verdict]
    steps: list[SlowSteps]
    note: str = ""


def slowness_of(record: Record) -> Slowness:
    """Returns the slow ranks and slow steps of a run.

    Raises:
        UsageError: it says nothing of its ranks nor of the parts of its steps.
    """
    parts = parts_of(record)
    steps = slow_steps(parts) if parts else []
    if record.own:
        try:
            return Slowness(rank_judge.verdicts(read_slow_ranks(record.own.path)), steps)
        except UsageError as error:
            if parts is None:
                raise
            return Slowness([], steps, str(error))
    if parts is None:
        raise UsageError(f"{record.source}: {NO_RANKS}")
    notes, ranks = doubts_of_parts(record), []
    if len(parts.ranks) == 1:
        notes.append("times of one rank alone, which is compared with nobody")
    else:
        ranks = slow_ranks_of(parts)
        notes += [] if parts.knows_computing else [NO_COMPUTING]
    return Slowness(ranks, steps, "; ".join(notes))


def tables(slow: dict[str, Slowness]) -> list[Table]:
    """Returns the slow ranks of each run, by name, the nodes that have some, and the slow steps."""
    note = f"{len(slow)} runs read; windows of {rank_judge.STEPS} steps"
    ranks, runs_of = Table(_RANKS, [], "Slow ranks", [note]), defaultdict(dict)
    ranks.notes += [f"{name}: {run.note}" for name, run in slow.items() if run.note]
    for name, run in slow.items():
        for verdict in run.ranks:
            row = {"run": name} | verdict._asdict()
            if verdict.kind == "link":
                row |= {"rank": None, "node": None}
            else:
                runs_of[verdict.node][name] = True
            ranks.rows.append(row)
    nodes = Table(_NODES, [], "Nodes with slow ranks")
    for node, runs in sorted(runs_of.items(), key=lambda item: -len(item[1])):
        row = {"node": node, "n": len(runs), "of": len(slow), "runs": ", ".join(runs)}
        nodes.rows.append(row)
    steps = Table(_STEPS, [], "Slow steps")
    for name, run in slow.items():
        for cause in run.steps:
            row = {"run": name, "n": len(cause.iterations)} | cause._asdict()
            row |= {"steps": cause.steps, "place": cause.place or None}
            steps.rows.append(row | {"part": cause.part or "none that is stated"})
    return [ranks, nodes, steps]
