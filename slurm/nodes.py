"""The nodes that the jobs of a study leave out: which, since when, and why.

    python -m slurm.nodes slurm/layouts.toml                    # look for evidence, and list
    python -m slurm.nodes slurm/layouts.toml --forgive node3    # and use this node again

A node is suspected when a preflight found it slow, a rank on it was slow in half of a run's steps,
or a job died of it. With leave_out_nodes = true
in the study's [slurm] table, its jobs leave suspected nodes out: new ones, and those that wait.
After leave_out_days a node is used again. A node without which a run could not start stays in use.
Every change is a line of DIR/<study>/nodes.csv.
"""

import fcntl
import os
import re
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple

from base.errors import UsageError, command_line, printable
from base.files import read_json_if_whole
from parallel.config.clusters import Cluster
from parallel.config.study import Study
from parallel.measure.slow_ranks import slow_nodes
from parallel.record import node_rates, reader
from parallel.record.schema import SLOW_RANKS
from parallel.record.writer import append_rows
from slurm import states
from slurm.render import ROOT, ask_of, cluster_of, each, job_of, load_studies, study_parser

LEDGER = "nodes.csv"  # beside the runs of a study
SUSPECTED, LEFT_OUT, PUT_BACK = "suspected", "left out", "put back"
FORGIVEN, EXPIRED = "forgiven", "expired"
_LOST = re.compile(r"^srun: error: Node failure on (\S+)", re.MULTILINE)
_CLOSED = ("down", "dr", "fail", "unk", "inval")  # how the states of nodes that take no job begin


class Change(NamedTuple):
    """A line of nodes.csv. source: the file and job that show it, where it is evidence."""

    time_utc: str
    node: str
    change: str
    why: str
    source: str = ""

    @property
    def age_days(self) -> float:
        return (datetime.now(UTC) - datetime.fromisoformat(self.time_utc)).total_seconds() / 86400


def read_changes(folder: Path) -> list[Change]:
    """Every change that was written down for a study. Raises: UsageError: a line that is none."""
    kinds = {**dict.fromkeys(Change._fields, str), "time_utc": _time}
    return [Change(**row) for row in reader.read_rows(folder / LEDGER, kinds)]


def _time(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError(f"{text} names no time zone")
    return text


def write_changes(folder: Path, changes: Iterable[Change]) -> None:
    """Print changes and add them to the study's nodes.csv."""
    for change in changes:
        append_rows(folder / LEDGER, Change._fields, [change._asdict()])
        print(printable(f"node {change.node}: {change.change}: {change.why}"))


def suspects(changes: Iterable[Change]) -> dict[str, Change]:
    """The newest evidence against each node that is suspected, the node longest suspected first."""
    found: dict[str, Change] = {}
    for change in changes:
        if change.change == SUSPECTED:
            found[change.node] = change
        elif change.change in (FORGIVEN, EXPIRED):
            found.pop(change.node, None)
    return found


def _now(node: str, change: str, why: str) -> Change:
    return Change(_text(datetime.now(UTC)), node, change, why)


def _text(time: datetime) -> str:
    return time.isoformat(timespec="seconds")


# --- evidence ------------------------------------------------------------------------------------


def evidence(study: Study, logs: Path) -> Iterator[Change]:
    """What the runs and the preflights of a study show against nodes."""
    for row in node_rates.read(logs / study.name):
        if row["short"]:
            why = f"preflight of job {row['job']}, {row['run']}: {row['short']}"
            source = f"{node_rates.FILE} {row['job']} {row['time_utc']}"
            yield Change(row["time_utc"], row["node"], SUSPECTED, why, source)
    for run in study.runs:
        folder = logs / study.name / run
        for node, why, _, time_utc in slow_nodes(folder):
            yield Change(
                time_utc, node, SUSPECTED, f"{run}: {why}", f"{run}/{SLOW_RANKS} {time_utc}"
            )
        names = sorted(os.listdir(folder)) if folder.is_dir() else []
        for name in (name for name in names if name.endswith(".out")):
            attempt, job = name.removesuffix(".out"), name.partition(".")[0]
            ended = read_json_if_whole(folder / f"{job}.state").get("verdict") == "node failure"
            if ended or any(other.startswith(f"{job}.restart") for other in names):
                when = datetime.fromtimestamp((folder / name).stat().st_mtime, UTC)
                for node in _lost_nodes(folder, attempt, ended):
                    why = f"job {job} of {run} lost it"
                    yield Change(_text(when), node, SUSPECTED, why, f"{run}/{name}")


def _lost_nodes(folder: Path, attempt: str, ended: bool) -> list[str]:
    """The nodes that an attempt lost, as srun names them in its log; the only node of a job that
    `ended` so."""
    if names := _LOST.findall(states.tail(folder / f"{attempt}.out")):
        return sorted({node for name in names for node in hostnames(name)})
    held = re.search(r"^ +NodeList=(\w\S*)", states.tail(folder / f"{attempt}.job"), re.MULTILINE)
    nodes = hostnames(held[1]) if ended and held else ()
    return list(nodes) if len(nodes) == 1 else []


@cache
def hostnames(text: str) -> tuple[str, ...]:
    """The nodes of a list as Slurm writes it, node[1-3] for example."""
    if "[" not in text:
        return tuple(filter(None, text.split(",")))
    return tuple(states.slurm(["scontrol", "show", "hostnames", text]).split())


# --- what is left out ----------------------------------------------------------------------------


class Choice(NamedTuple):
    """The suspected nodes that a run leaves out, and those that it may need."""

    left_out: list[str]
    kept: list[str]


def excluded(study: Study, logs: Path, run: str) -> Choice:
    """What new jobs of a run leave out: nothing where the study does not ask for it.

    Raises:
        UsageError: nodes.csv is damaged, or no Slurm answers.
    """
    nodes = list(suspects(read_changes(logs / study.name)))
    if not nodes or not ask_of(study, run).leave_out_nodes:
        return Choice([], [])
    return _choose(nodes, job_of(study, run).nodes, nodes_of(cluster_of(study)))


def _choose(nodes: list[str], need: int, takes_jobs: dict[str, bool]) -> Choice:
    """The first nodes, as long as `need` nodes that take jobs remain. Slurm refuses the names of
    nodes that it does not know."""
    usable = {node for node, takes in takes_jobs.items() if takes}
    left_out: list[str] = []
    for node in nodes:
        if node in takes_jobs and len(usable - {*left_out, node}) >= need:
            left_out.append(node)
    return Choice(left_out, [node for node in nodes if node not in left_out])


def nodes_of(cluster: Cluster) -> dict[str, bool]:
    """Each node of this cluster's partition, and whether it takes jobs with its constraint and
    options. Raises: UsageError: no Slurm answers."""
    partition = os.environ.get("SBATCH_PARTITION") or cluster.partition
    command = ["sinfo", "--noheader", "--Node", "--format=%N|%P|%t|%f"]
    if partition:
        command.append(f"--partition={partition}")
    kinds = [set(part.split("&")) for part in cluster.constraint.split("|") if part]
    nodes, closed = {}, _of_options(cluster)
    for line in states.slurm(command).splitlines():
        node, its_partition, state, features = line.strip().split("|")
        is_open = not state.startswith(_CLOSED) and not state.endswith("*") and node not in closed
        fits = not kinds or any(kind <= set(features.split(",")) for kind in kinds)
        if partition or its_partition.endswith("*"):
            nodes[node] = is_open and fits
    return nodes


def _of_options(cluster: Cluster) -> list[str]:
    """The nodes that the cluster's own options leave out."""
    options = (option.partition("=") for option in cluster.options)
    return [node for name, _, text in options if name == "--exclude" for node in hostnames(text)]


def option(study: Study, logs: Path, run: str) -> list[str]:
    """sbatch's option that leaves nodes out, with those of the cluster's own options. A line says
    which suspected nodes stay in use."""
    nodes, kept = excluded(study, logs, run)
    for node in kept:
        print(f"node {node}: not left out: unknown to Slurm here, or {run} may need it")
    return [f"--exclude={','.join([*_of_options(cluster_of(study)), *nodes])}"] if nodes else []


# --- changes -------------------------------------------------------------------------------------


def update(study: Study, logs: Path, rows: Iterable[states.Row]) -> None:
    """Look for new evidence, let old evidence expire, and change the jobs that wait. Each change is
    written down and printed. Who calls it holds the study's lock.

    Raises:
        UsageError: nodes.csv is damaged, or no Slurm answers.
    """
    folder = logs / study.name
    changes = read_changes(folder)
    known = {(change.node, change.source) for change in changes}
    days = max(ask_of(study, name).leave_out_days for name in study.runs)
    new = [c for c in evidence(study, logs) if (c.node, c.source) not in known]
    new = sorted(change for change in new if change.age_days < days)
    new += [
        _now(node, EXPIRED, f"{days} days are over since: {change.why}")
        for node, change in suspects([*changes, *new]).items()
        if change.age_days >= days
    ]
    if new:
        write_changes(folder, new)
    if changes or new:
        _update_pending(study, logs, [row for row in rows if row.state == "pending"])


def _update_pending(study: Study, logs: Path, rows: list[states.Row]) -> None:
    """Let the jobs that wait leave out what new ones would."""
    rows = [row for row in rows if ask_of(study, row.run).leave_out_nodes]
    if not rows:
        return
    changes = read_changes(logs / study.name)
    ours, suspected = {change.node for change in changes}, list(suspects(changes))
    takes_jobs, jobs = nodes_of(cluster_of(study)), ",".join(row.job for row in rows)
    printed = states.slurm(["squeue", "--noheader", "--array", f"--jobs={jobs}", "--format=%i|%x"])
    lists = dict(line.strip().split("|") for line in printed.splitlines())
    for row in (row for row in rows if row.job in lists):  # the others have started meanwhile
        wanted = set(_choose(suspected, job_of(study, row.run).nodes, takes_jobs).left_out)
        before = set(hostnames(lists[row.job]))
        wanted |= before - ours  # what somebody else left out stays
        if wanted == before:
            continue
        names = ",".join(sorted(wanted))
        states.slurm(["scontrol", "update", f"jobid={row.job}", f"excnodelist={names}"])
        where = f"job {row.job} of {row.run}, which waits"
        new = [_now(node, LEFT_OUT, where) for node in sorted(wanted - before)]
        new += [_now(node, PUT_BACK, where) for node in sorted(before - wanted)]
        write_changes(logs / study.name, new)


def forgive(folder: Path, nodes: list[str]) -> None:
    """Suspect nodes no longer; what is known against them does not count again.

    Raises:
        UsageError: one is not suspected.
    """
    known = suspects(read_changes(folder))
    for node in nodes:
        if node not in known:
            raise UsageError(f"{node} is not suspected; these are: {', '.join(known) or 'none'}")
    write_changes(folder, [_now(node, FORGIVEN, f"was: {known[node].why}") for node in nodes])


def table(study: Study, logs: Path) -> list[str]:
    """The suspected nodes as lines."""
    days = max(ask_of(study, name).leave_out_days for name in study.runs)
    asks = any(ask_of(study, name).leave_out_nodes for name in study.runs)
    found = suspects(read_changes(logs / study.name)).values()
    lines = [
        f"{change.node}  for {change.age_days:.1f} of {days} days  {change.why}" for change in found
    ]
    if found and not asks:
        lines.append("none is left out: leave_out_nodes is not set in [slurm]")
    return [*map(printable, lines)] or ["no node is suspected"]


@command_line("slurm.nodes")
def main(argv: list[str] | None = None) -> int:
    parser = study_parser("slurm.nodes", __doc__)
    parser.add_argument("--forgive", nargs="+", metavar="NODE", help="use these nodes again")
    arguments = parser.parse_args(argv)
    studies, jobs = load_studies(arguments), states.ask_slurm()
    if jobs is None:
        raise UsageError(states.no_answer())
    for study in each(studies):
        logs = ROOT / arguments.logs
        (logs / study.name).mkdir(parents=True, exist_ok=True)
        with (logs / study.name / ".submit.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if arguments.forgive:
                forgive(logs / study.name, arguments.forgive)
            update(study, logs, states.rows(study, logs, jobs))
        print("\n".join(table(study, logs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
