"""The slow ranks of runs, and the nodes on which they were."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from analysis.common.table import Column, Table
from analysis.logs.load import distinct
from base.errors import Reading, UsageError
from parallel.measure import slow_ranks
from parallel.record.reader import read_facts

_RANKS = [
    Column("run", "run"),
    Column("kind", "kind"),
    Column("rank", "rank", "d"),
    Column("node", "node"),
    Column("longer", "longer by", ".0%"),
    Column("n", "windows", "d"),
    Column("windows", "of", "d"),
    Column("first", "first step", "d"),
    Column("last", "last step", "d"),
]
_NODES = [Column("node", "node"), Column("n", "slow in runs", "d"), Column("of", "of", "d")]
_NODES.append(Column("runs", "which"))


def report(folders: Iterable[Path]) -> Reading[list[Table]]:
    """The slow ranks of each run folder, and the nodes that have some, with one line for each run
    that could not be read.

    Raises:
        UsageError: nothing could be read.
    """
    read, problems = {}, []
    for folder in folders:
        try:
            read[folder] = read_facts(folder)["run"], slow_ranks.verdicts(folder)
        except UsageError as error:
            problems.append(str(error))
    if not read:
        raise UsageError("; ".join(problems))
    ranks, runs_of = Table(_RANKS, [], "Slow ranks"), defaultdict(list)
    ranks.notes.append(f"{len(read)} runs read; windows of {slow_ranks.STEPS} steps")
    names = distinct([name for name, _ in read.values()], list(read))
    for name, (_, verdicts) in zip(names, read.values(), strict=True):
        for verdict in verdicts:
            row = {"run": name} | verdict._asdict()
            if verdict.kind == "link":
                row |= {"rank": None, "node": None}
            elif name not in runs_of[verdict.node]:
                runs_of[verdict.node].append(name)
            ranks.rows.append(row)
    nodes = Table(_NODES, [], "Nodes with slow ranks")
    for node, runs in sorted(runs_of.items(), key=lambda item: -len(item[1])):
        row = {"node": node, "n": len(runs), "of": len(read), "runs": ", ".join(runs)}
        nodes.rows.append(row)
    return Reading([ranks, nodes] if nodes.rows else [ranks], problems)
