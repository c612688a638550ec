"""Which ranks were slow in which runs, and which nodes had some, by slow_ranks.csv."""

from collections import defaultdict

from analysis.common.table import Column, Table
from parallel.measure import rank_judge

_RANKS = [Column("run", "run"), Column("kind", "kind"), Column("rank", "rank", "d")]
_RANKS += [Column("node", "node"), Column("longer", "longer by", ".0%")]
_RANKS += [Column("n", "windows", "d"), Column("windows", "of", "d")]
_RANKS += [Column("first", "first step", "d"), Column("last", "last step", "d")]
_NODES = [Column("node", "node"), Column("n", "slow in runs", "d"), Column("of", "of all", "d")]
_NODES.append(Column("runs", "which"))


def tables(slow: dict[str, list[rank_judge.Verdict]]) -> list[Table]:
    """Returns the slow ranks of each run, by name, and the nodes that have some."""
    note = f"{len(slow)} runs read; windows of {rank_judge.STEPS} steps"
    ranks, runs_of = Table(_RANKS, [], "Slow ranks", [note]), defaultdict(dict)
    for name, verdicts in slow.items():
        for verdict in verdicts:
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
    return [ranks, nodes]
