"""Why runs failed: a table by cause, and the nodes that failed more often than by chance."""

import re
from collections import defaultdict
from typing import Any

from analysis.common.table import Column, Table
from analysis.common.terminal import who
from analysis.logs.naming import name_of
from analysis.logs.readers.run_folder import FAILURES
from analysis.logs.record import Record
from analysis.runs.verdict import VERDICTS, ending, unfinished
from parallel.record.ends import FAILED, HOST_MEMORY, SIGNALS, Kind, kind_of
from parallel.record.first_place import Place

CHANCE = 0.05  # that runs which fail on no certain node name one node as often as they do
_BY_WORDS = ("traceback", "failed", "no data")  # verdicts that do not say the cause
_STOPPED_FOR = re.compile(r"CANCELLED AT \S+ DUE TO ([A-Z ]{3,40})")
_EXCEPTION = re.compile(r"(\w*(?:Error|Exception|Exit|Interrupt))\b")
_VARIABLE = re.compile(r"0x[0-9a-fA-F]+|/\S+|\d+")  # what differs in lines of one cause
_SIGNAL = re.compile(rf"(?:task\S* [\d,-]+|line \d+: +\d+)\W+(?:{SIGNALS})")

_CAUSES = [Column("cause", "cause"), Column("runs", "runs", "d"), Column("rank", "first rank", "d")]
_CAUSES += [Column("node", "node"), Column("proof", "the line that proves it", long="below")]
_CAUSES += [Column("which", "which", long="below")]
_NODES = [Column("node", "node"), Column("n", "first in", "d"), Column("total", "of", "d")]
_NODES += [Column("chance", "chance", ".2g"), Column("leave_out", "leave out")]
_NODES += [Column("causes", "causes"), Column("which", "which")]


def cause_of(record: Record) -> str:
    """Returns the cause of a failure: its verdict, or what its line says more closely."""
    ended, line = ending(record), _line_of(record)
    if stopped := _STOPPED_FOR.search(line) if ended.verdict == "cancelled" else None:
        return f"{ended.verdict}: {stopped[1].strip().lower()}"
    if ended.verdict == VERDICTS["oom"]:  # another GPU or layout mends one, another node the other
        return f"{ended.verdict}: {'host' if re.search(HOST_MEMORY, line) else 'GPU'}"
    if ended.verdict not in _BY_WORDS:
        return ended.verdict
    exception = _EXCEPTION.search(line)
    kind = kind_of(line[exception.start() :] if exception else line)
    if _SIGNAL.search(line):
        return Kind.KILLED.value
    if kind == Kind.RAISED and exception:
        return exception[1]
    if kind in (Kind.RAISED, Kind.REFUSED, Kind.UNKNOWN):
        return ended.verdict
    return VERDICTS.get(FAILURES.get(kind), kind.value)


def _line_of(record: Record) -> str:
    """Returns the last line that proves how a run ended."""
    return str(ending(record).proof).rpartition(", line ")[2]


def _row_of(record: Record) -> tuple[str, str]:
    """Returns what the runs of one row share: the cause and, where that is an exception or no more
    than a verdict, what the line says, without numbers and paths: two AssertionErrors are two
    causes."""
    cause, line = cause_of(record), _line_of(record)
    if exception := _EXCEPTION.fullmatch(cause):
        line = line[line.find(exception[1]) :]
    elif cause not in _BY_WORDS:
        line = ""
    return cause, _VARIABLE.sub("#", line)


def tables(records: list[Record]) -> list[Table]:
    """Returns the failures by cause, the most frequent first, and the nodes that failed first in
    several runs."""
    copies = [record for record in records if _is_copy(record)]
    records = [record for record in records if not _is_copy(record)]
    failed = [record for record in records if _has_failed(record)]
    silent = [r for r in records if ending(r).verdict == "no data" and r not in failed]
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in failed:
        groups[_row_of(record)].append(record)
    causes = Table(
        _CAUSES, [], "Failures by cause", [f"{len(failed)} of {len(records)} runs failed"]
    )
    if copies:
        sources = ", ".join(f"{record.source} (of {record.copy_of})" for record in copies)
        causes.notes.append(f"copies of other runs are not counted: {sources}")
    if silent:
        names = who([name_of(record) for record in silent], len(records))
        causes.notes.append(f"no step is in the log, and no line that says how it ended: {names}")
    for (cause, _), group in sorted(groups.items(), key=lambda item: -len(item[1])):
        runs = [_run(record) for record in group]
        shown = max(runs, key=lambda run: (run["node"] is not None, run["rank"] is not None))
        row = {"cause": cause, "runs": len(runs)} | {k: shown[k] for k in ("rank", "node")}
        names = [run["run"] for run in runs]
        row |= {"proof": f"{shown['run']}: {shown['proof']}", "which": who(names, 0)}
        causes.rows.append(row | {"failures": runs})
    if any(row["node"] is None for row in causes.rows):
        causes.notes.append("-: the log does not name it; srun, torchrun and NCCL_DEBUG=INFO do")
    return [causes, _nodes(failed)]


def _is_copy(record: Record) -> bool:
    """Returns whether a run is another's copy. Jobs that die before their first step may print the
    same; two that measured the same are one."""
    return bool(record.copy_of) and len(record.steps) > 0


def _has_failed(record: Record) -> bool:
    """Returns whether a run failed, by a line of its log or its own word."""
    is_stated = record.failure is not None or record.state == FAILED
    return ending(record).verdict == "diverged" or bool(is_stated and unfinished(record))


def _run(record: Record) -> dict[str, Any]:
    """Returns what JSON says of a run that failed."""
    place = record.failure.place if record.failure else None
    rank, node = (place.rank, place.node or None) if place else (None, None)
    proof = ", ".join(map(str, ending(record).told[:1]))
    return {"run": name_of(record), "source": record.source, "rank": rank, "node": node} | {
        "line_no": ending(record).line_no or None,
        "proof": proof,
    }


def _nodes(failed: list[Record]) -> Table:
    """Returns the nodes that failed first in two runs or more, and which to leave out."""
    places = {name_of(r): r.failure.place for r in failed if r.failure}
    nodes = frozenset().union(*(place.nodes for place in places.values()))
    suspected = {name: place for name, place in places.items() if place.is_suspect}
    causes = {name_of(record): cause_of(record) for record in failed}
    runs: dict[str, list[str]] = defaultdict(list)
    for name, place in suspected.items():
        runs[place.node].append(name)
    table = Table(_NODES, [], "Nodes that failed first in several runs")
    for node, names in sorted(runs.items(), key=lambda item: -len(item[1])):
        if len(names) > 1:
            by_chance = [_share(node, place, len(nodes)) for place in suspected.values()]
            chance = chance_of(len(names), by_chance, len(nodes))
            row = {"node": node, "n": len(names), "total": len(suspected), "chance": chance}
            row["leave_out"] = "yes" if chance <= CHANCE else "no"
            row["causes"] = ", ".join(dict.fromkeys(causes[name] for name in names))
            table.rows.append(row | {"which": who(names, 0)})
    if table.rows:
        note = "chance: of a node that is first as often, where each is as likely; the logs name"
        table.notes.append(f"{note} {len(nodes)} nodes")
    if excluded := [row["node"] for row in table.rows if row["leave_out"] == "yes"]:
        table.notes.append(
            f"sbatch --exclude={','.join(excluded)} leaves out what failed too often"
        )
    return table


def _share(node: str, place: Place, n_nodes: int) -> float:
    """Returns how likely a node fails first in a run where each is as likely: of those that its log
    names or, where that is one alone, of those in all logs."""
    if len(place.nodes) == 1:
        return 1 / n_nodes
    return (node in place.nodes) / len(place.nodes)


def chance_of(n: int, probabilities: list[float], n_nodes: int) -> float:
    """Returns how likely any of the nodes is first in n of the runs or more, at most: n_nodes times
    the tail of the sum of independent runs, in which a node is first with these probabilities."""
    first_in = [1.0]  # how likely the node was first in 0, 1, 2 ... of the runs so far
    for p in probabilities:
        before, more = [*first_in, 0.0], [0.0, *first_in]
        first_in = [(1 - p) * a + p * b for a, b in zip(before, more, strict=True)]
    return min(1.0, n_nodes * sum(first_in[n:]))
