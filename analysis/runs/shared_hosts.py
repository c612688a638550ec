"""Which runs shared a host's cores with other runs, or with other programs."""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from heapq import heappop, heappush
from itertools import islice
from typing import NamedTuple

from analysis.common.terminal import FEW, who
from analysis.logs.naming import name_of
from analysis.logs.record import Record

SPARE = 0.1  # cores that a machine's own services use, and that disturb no run


def _threads(record: Record) -> int:
    """Returns the threads that the run had on rank 0's machine, 0 where it does not say."""
    host, spec = record.facts.get("host") or {}, record.facts.get("spec") or {}
    return (host.get("ranks_per_node") or record.gpus or 0) * (spec.get("threads") or 1)


class _Stay(NamedTuple):
    """A run on a host's cores, from when it began to when it ended."""

    began: str
    ended: str
    threads: int
    cores: int
    record: Record


def shared_cores(records: list[Record]) -> dict[str, str]:
    """Returns, by the source of each run on CPU that shared cores, the runs that it shared them
    with, in words.

    Only runs that state when they began and ended are compared, and only where those of one moment
    together have more threads than cores. Slurm may have given each its own cores, so this is a
    doubt, and a ratio of such times is withheld.
    """
    hosts: dict[str, list[_Stay]] = defaultdict(list)
    for record in records:
        host, threads = record.facts.get("host") or {}, _threads(record)
        stay = _Stay(
            record.facts.get("started_utc"), record.ended_utc, threads, host.get("cores"), record
        )
        if all(stay[:4]) and host.get("hostname") and not host.get("gpu"):
            hosts[host["hostname"]].append(stay)
    partners: dict[str, str] = {}
    for host_name, stays in hosts.items():
        stays.sort(key=lambda stay: stay[:2])
        begins = [stay.began for stay in stays]
        ends = sorted(stay.ended for stay in stays)
        for stay in _crowded(stays):
            # Who began before this one ended, less who ended before it began.
            n_begun = bisect_left(begins, stay.ended)
            meetings = (o for o in stays[:n_begun] if o is not stay and stay.began < o.ended)
            n = n_begun - bisect_right(ends, stay.began) - 1
            names = [name_of(partner.record) for partner in islice(meetings, FEW + 1)]
            partners[stay.record.source] = (
                f"ran at the same time as {who(names, len(stays), n)} on {host_name}:"
                " they may have shared its cores"
            )
    return partners


def _crowded(stays: list[_Stay]) -> list[_Stay]:
    """Returns the stays that, at some moment, had more threads than cores together with others. All
    stays are on one host and come in the order in which they began."""
    present: dict[int, _Stay] = {}  # by number, of those that have not ended
    alone: set[int] = set()  # of these, the numbers of those that were in no crowd yet
    crowded: list[int] = []
    ends: list[tuple[str, int]] = []
    threads, cores = 0, Counter()
    for number, stay in enumerate(stays):
        while ends and ends[0][0] <= stay.began:
            _, over = heappop(ends)
            gone = present.pop(over)
            alone.discard(over)
            threads -= gone.threads
            cores[gone.cores] -= 1
        present[number] = stay
        alone.add(number)
        heappush(ends, (stay.ended, number))
        threads += stay.threads
        cores[stay.cores] += 1
        if [s.began for s in stays[number + 1 : number + 2]] == [stay.began]:
            continue  # the next one was there at this moment, too
        if len(present) > 1 and threads > max(n for n, count in cores.items() if count):
            crowded += alone
            alone.clear()
    return [stays[number] for number in sorted(crowded)]


def busy(records: list[Record]) -> list[str]:
    """Returns a note on the runs whose machine had fewer cores left than they have threads, if
    there are any: other programs used the rest."""
    cores_taken: dict[str, float] = {}
    for record in records:
        load, host = record.facts.get("load") or {}, record.facts.get("host") or {}
        seconds = [load.get(name) for name in ("machine_cpu_s", "cpu_s", "wall_s")]
        if None in seconds or not (seconds[2] and record.gpus and host.get("cores")):
            continue
        machine_cpu_s, cpu_s, wall_s = seconds
        share_here = min(1.0, (host.get("ranks_per_node") or record.gpus) / record.gpus)
        others_cores = (machine_cpu_s - cpu_s * share_here) / wall_s
        if others_cores > max(0, host["cores"] - _threads(record)) + SPARE:
            cores_taken[name_of(record)] = others_cores
    if not cores_taken:
        return []
    most = max(cores_taken.values())
    names = who(list(cores_taken), len(records))
    return [
        f"the machine was busy: other programs used up to {most:.1f} cores, so these times may be"
        f" too long: {names}"
    ]
