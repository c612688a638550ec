"""Which ranks were slow, in what, on which node; and which nodes were slow in several runs.

    python -m analysis.stragglers PATH... [--format markdown]

PATH is a run folder, or a folder of them. Every run on two or more ranks looks for slow ranks while
it trains and keeps the windows of five steps that count against one (slow_ranks.csv). One row for
each rank that was slow in three of four windows in a row: what it did longer than the other ranks
of its pipeline stage (compute: its own computing; data: waiting for its batches, as a share of a
step) and in how many windows from the first to the last. Kind link names no rank: steps took
longer than earlier in the run for another reason, the network or other work on the cores.
docs/breakdown-and-profile.md says how often a line is right. Exits 2 when nothing could be read.
"""

import sys
from collections import defaultdict

from analysis.common.table import Column, Table, show
from analysis.logs.load import load_own
from analysis.logs.naming import name_of
from analysis.runs.run_options import parser_of
from base.errors import UsageError, command_line, warn
from parallel.measure import slow_ranks

_RANKS = [Column("run", "run"), Column("kind", "kind"), Column("rank", "rank", "d")]
_RANKS += [Column("node", "node"), Column("longer", "longer by", ".0%")]
_RANKS += [Column("n", "windows", "d"), Column("windows", "of", "d")]
_RANKS += [Column("first", "first step", "d"), Column("last", "last step", "d")]
_NODES = [Column("node", "node"), Column("n", "slow in runs", "d"), Column("of", "of all", "d")]
_NODES.append(Column("runs", "which"))


@command_line("analysis.stragglers")
def main(argv: list[str] | None = None) -> int:
    parser = parser_of("analysis.stragglers", __doc__, "table", paths="run folder or study")
    flags = parser.parse_args(argv)
    records, problems = load_own(flags.paths)
    slow = {}
    for record in records:
        try:
            slow[name_of(record)] = slow_ranks.verdicts(record.own.path)
        except UsageError as error:
            problems.append(str(error))
    if not slow:
        raise UsageError("; ".join(problems))
    warn("analysis.stragglers", *problems)
    show([t for t in tables(slow) if t.rows or t.notes], flags.format, flags.columns)
    return 0


def tables(slow: dict[str, list[slow_ranks.Verdict]]) -> list[Table]:
    """The slow ranks of each run, by name, and the nodes that have some."""
    note = f"{len(slow)} runs read; windows of {slow_ranks.STEPS} steps"
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


if __name__ == "__main__":
    sys.exit(main())
