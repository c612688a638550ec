"""Where and why a run failed first, as its log says: the rank, the node, the line. Torch-free."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from parallel.record.ends import NOT_ASKED, SIGNALS

LOST_NODE = re.compile(r"^srun: error: Node failure on (\S+)", re.MULTILINE)
_HOST = r"([A-Za-z][\w.-]{0,80})"
# What names a node in the line that proves a failure; the surest first.
_NAMED = [
    LOST_NODE,
    re.compile(rf"lost connection to node {_HOST}"),
    re.compile(rf"Connection closed by remote peer {_HOST}<\d"),
    re.compile(rf"srun: error: {_HOST}: task"),
    re.compile(rf"slurmstepd-{_HOST}: "),
    re.compile(rf"^(?:\[\d+\] )?{_HOST}:\d+:\d+ \[\d+\] .{{0,200}}NCCL WARN"),
    re.compile(rf"^{_HOST}: (?:Traceback|\[rank)"),
]
_RANK = re.compile(r"(?i)(?<!local )(?<!group )\brank ?(\d{1,7})\b")
_LABEL = re.compile(r"^ {0,6}(\d{1,7}): ")  # by srun --label: the task
_RAISED = re.compile(r"\b[\w.]{1,200}(?:Error|Exception|Exit)(?:: .*|$)")
# torchrun's summary of a process.
_BY_TORCHRUN = re.compile(
    r"time +: (\S{1,40})\s+(?:\d+: +)?host +: (\S{1,120})\s+(?:\d+: +)?rank +: (\d{1,7}) .{0,40}"
    r"\s+(?:\d+: +)?exitcode +: " + NOT_ASKED + r"(-?\d+)"
)
_TORCHRUN = re.compile(r"torchrun|torch/distributed/(?:run|launch|elastic)")
_BY_SRUN = re.compile(
    rf"srun: error: {_HOST}: tasks? (\d{{1,7}})([\d,-]{{0,300}}):"
    r" (?!Terminated|Exited with exit code 143\b)(.{1,60})"
)
_BY_NCCL = re.compile(
    rf"^(?:\[\d+\] )?{_HOST}:\d+:\d+ \[\d+\] NCCL INFO .{{0,60}}comm \w+ rank (\d+) nranks (\d+)",
    re.MULTILINE,
)
_MENTIONED = [
    re.compile(rf"^(?:\[\d+\] )?{_HOST}:\d+:\d+ \[\d+\] ", re.MULTILINE),
    re.compile(rf"\*\*\* (?:JOB|STEP) \S+ ON {_HOST} CANCELLED"),
]


class Place(NamedTuple):
    """The rank that failed first and its node: None and "" where the log does not name them.

    is_suspect: the failure speaks against the node. nodes: all that the log names.
    """

    rank: int | None = None
    node: str = ""
    is_suspect: bool = False
    nodes: frozenset[str] = frozenset()


class _Process(NamedTuple):
    """A process that ended, and how, as its launcher says; under torchrun, srun names no rank.
    is_alone: the launcher names no other that ended alike on its node."""

    time: str
    node: str
    rank: int | None
    how: str
    is_alone: bool = True


def place_of(kind: str, line: str, text: str) -> Place:
    """Returns where a run failed first. kind: of the failure's sign. line: the one that proves it.
    text: of its log."""
    by_torchrun = _TORCHRUN.search(text) is not None
    processes = list(_ended(text, by_torchrun))
    hosts = _hosts(text) | {p.rank: p.node for p in processes if p.rank is not None}
    mentioned = {_short(host) for pattern in _MENTIONED for host in pattern.findall(text)}
    mentioned |= {*hosts.values(), *(process.node for process in processes)} - {""}
    if kind in ("timeout", "cancelled"):  # somebody stopped it: it failed nowhere
        return Place(nodes=frozenset(mentioned))

    first = min(processes, key=lambda process: process.time, default=None)
    names = [match for pattern in _NAMED if (match := pattern.search(line))]
    if kind == "node":
        names += LOST_NODE.finditer(text)
    node = _short(names[0][1]) if names else ""
    rank, nodes_alike, is_first = _rank_in(line, by_torchrun), set(), True
    if not names and rank is not None:
        node = hosts.get(rank, "")
    elif first and node in ("", first.node):
        is_first = rank is not None or first.is_alone
        rank, node = rank if rank is not None else first.rank, first.node
    if not names:
        nodes_alike = {hosts.get(other, "") for other in _raised_by(line, text, by_torchrun)}
        if first and first.node == node:
            nodes_alike |= {p.node for p in processes if (p.time, p.how) == (first.time, first.how)}
    # A collective fails on the ranks that wait, and rank 0 does what no other does, as saving.
    is_cause = kind == "node" or (rank != 0 and (names or kind != "nccl"))
    is_suspect = bool(node and is_cause and not nodes_alike - {node, ""})
    return Place(rank if is_first else None, node, is_suspect, frozenset(mentioned | {node} - {""}))


def _ended(text: str, by_torchrun: bool) -> Iterator[_Process]:
    """Yields the processes that ended by themselves: as torchrun lists them, else as srun does."""
    listed = _BY_TORCHRUN.findall(text)
    for time, host, rank, how in listed:
        yield _Process(time, _short(host), int(rank), how)
    for host, task, others, how in () if listed else _BY_SRUN.findall(text):
        rank = None if by_torchrun else int(task)
        yield _Process("", _short(host), rank, how.strip(), not others)


def _hosts(text: str) -> dict[int, str]:
    """Returns the nodes of ranks as NCCL prints them, where it starts for all ranks."""
    found = [(int(size), int(rank), _short(host)) for host, rank, size in _BY_NCCL.findall(text)]
    world_size = max((size for size, *_ in found), default=0)
    return {rank: host for size, rank, host in found if size == world_size}


def _rank_in(line: str, by_torchrun: bool) -> int | None:
    """Returns the rank that a line names; under torchrun a task of srun is no rank."""
    rank = _RANK.search(line) or (None if by_torchrun else _LABEL.search(line))
    return int(rank[1]) if rank else None


def _raised_by(line: str, text: str, by_torchrun: bool) -> set[int | None]:
    """Returns the ranks that raised what the line says."""
    if not (raised := _RAISED.search(line.rpartition(", line ")[2])):
        return set()
    printed = re.finditer(rf"^(.{{0,80}}?){re.escape(raised[0])}", text, re.MULTILINE)
    return {_rank_in(match[1], by_torchrun) for match in printed}


def _short(host: str) -> str:
    """Returns the name that Slurm has of a host: without its domain; "" for an address."""
    return "" if host[0].isdigit() or host == "localhost" else host.partition(".")[0]


# Why a run failed, the surest first. torchrun names the process that died first as its root cause;
# then a program's own refusal, the shell's and the interpreter's words, and what was raised.
_ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):\s+\[\d+\]:\s+time .*\s+host .*\s+rank +: (\d+).*"
    rf"\s+exitcode +: {NOT_ASKED}-.*\s+error_file.*\s+traceback : (Signal .*)"
)
_SIGNAL = re.compile(r"Signal (?!15 )\d+ \(SIG\w+\) received by PID \d+")
_REASONS = [
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        r"^parallel\.train: .*$",
        r"^.*(?:bad interpreter|execve\(\): |command not found|No module named ).*$",
        r"^(?!\S*(?:ChildFailedError|SignalException))\S*(?:Error|Exception|Interrupt)(?:: .*| *)$",
        r"^.*(?:No such file or directory|Permission denied).*$",
        rf"^srun: error: .*: (?:Exited with|{SIGNALS}).*$",
    )
]


def killed_rank(text: str) -> str:
    """Returns the rank that a signal killed, as torchrun names it in a log, or ""."""
    if root := _ROOT_CAUSE.search(text):
        return f"rank {root[1]} was killed: {root[2].strip()}"
    line = _SIGNAL.search(text)
    return line[0] if line else ""


def cause(text: str) -> str:
    """Returns the line of a job's log that says why its run failed; "" where none does."""
    matches = (pattern.search(text) for pattern in _REASONS)
    return killed_rank(text) or next((match[0].strip() for match in matches if match), "")
