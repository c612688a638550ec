"""The slow ranks of runs, and the nodes on which they were."""

from collections.abc import Iterable
from pathlib import Path

from analysis.common.table import Column, Table
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
    ranks, problems, runs_of, read = Table(_RANKS, [], "Slow ranks"), [], {}, 0
    for folder in folders:
        try:
            name, verdicts = read_facts(folder)["run"], slow_ranks.verdicts(folder)
        except UsageError as error:
            problems.append(str(error))
            continue
        read += 1
        for verdict in verdicts:
            row = {"run": name} | verdict._asdict()
            if verdict.kind == "link":
                row |= {"rank": None, "node": None}
            else:
                runs_of.setdefault(verdict.node, {})[str(folder)] = name
            ranks.rows.append(row)
    if not read:
        raise UsageError("; ".join(problems))
    ranks.notes.append(f"{read} runs read; windows of {slow_ranks.STEPS} steps")
    nodes = Table(_NODES, [], "Nodes with slow ranks")
    for node, names in sorted(runs_of.items(), key=lambda item: -len(item[1])):
        row = {"node": node, "n": len(names), "of": read, "runs": ", ".join(names.values())}
        nodes.rows.append(row)
    return Reading([ranks, nodes] if nodes.rows else [ranks], problems)
