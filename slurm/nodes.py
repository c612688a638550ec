"""The nodes that the jobs of a study leave out: which, since when, and why.

    python -m slurm.nodes slurm/layouts.toml                    # look for evidence, and list
    python -m slurm.nodes slurm/layouts.toml --forgive node3    # and use this node again

A node is suspected if a preflight found it slow, if a rank on it was slow in half of a run's steps,
or if a job died of it. With leave_out_nodes = true in the study's [slurm] table, new and waiting
jobs leave suspected nodes out, for leave_out_days. A node stays in use if a run would have too few
nodes without it. DIR/<study>/nodes.csv has a line for each change.
"""

import os
import re
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from base.errors import Reading, UsageError, command_line, printable, warn
from parallel.config.clusters import JobSettings
from parallel.config.study import Study
from parallel.measure import node_rates
from parallel.measure.rank_judge import STEPS, verdicts
from parallel.record.ends import RUNNING
from parallel.record.first_place import LOST_NODE
from parallel.record.launch import hostnames
from parallel.record.reader import read_job_end, read_rows, read_run, read_slow_ranks
from parallel.record.schema import SLOW_RANKS, utc_now
from parallel.record.writer import append_rows
from slurm import squeue, states
from slurm.render import ROOT, ask_of, cluster_of, each, job_of, load_studies, study_parser

LEDGER = "nodes.csv"  # beside the runs of a study
SUSPECTED, LEFT_OUT, PUT_BACK = "suspected", "left out", "put back"
FORGIVEN, EXPIRED = "forgiven", "expired"
_ONLY_NODE = re.compile(r"^ +NodeList=([^\s,\[(]+)$", re.MULTILINE)
_CLOSED = ("down", "dr", "fail", "unk", "inval")  # how the states of nodes that take no job begin


class Change(NamedTuple):
    """A line of nodes.csv. Evidence against a node is known by its time, or by its words."""

    time_utc: str
    node: str
    change: str
    why: str

    @property
    def age_days(self) -> float:
        return (datetime.now(UTC) - datetime.fromisoformat(self.time_utc)).total_seconds() / 86400


def read_changes(folder: Path) -> list[Change]:
    """Returns every change that was written down for a study."""
    kinds = {**dict.fromkeys(Change._fields, str), "time_utc": _time}
    return [Change(**row) for row in read_rows(folder / LEDGER, kinds)]


def _time(text: str) -> str:
    """Returns a time that names its time zone; refuses one that does not."""
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError(f"{text} names no time zone")
    return text


def write_changes(folder: Path, changes: Iterable[Change]) -> None:
    """Prints changes and adds them to the study's nodes.csv."""
    for change in changes:
        append_rows(folder / LEDGER, Change._fields, [change._asdict()])
        print(printable(f"node {change.node}: {change.change}: {change.why}"))


def suspects(changes: Iterable[Change]) -> dict[str, Change]:
    """Returns the newest evidence against each node that is suspected, the node longest suspected
    first."""
    suspected: dict[str, Change] = {}
    for change in changes:
        if change.change == SUSPECTED:
            suspected[change.node] = change
        elif change.change in (FORGIVEN, EXPIRED):
            suspected.pop(change.node, None)
    return suspected


def _marks(change: Change) -> set[tuple[str, str]]:
    """Returns what tells evidence from other evidence: a slow rank's words grow with the run, and a
    log has another time where it was copied."""
    return {(change.node, change.time_utc), (change.node, change.why)}


def _days(study: Study) -> int:
    return max(ask_of(study, run).leave_out_days for run in study.runs)


# --- evidence ------------------------------------------------------------------------------------


def evidence(study: Study, logs: Path) -> Reading[list[Change]]:
    """Returns the evidence against nodes in the runs and preflights of a study, and a line for each
    damaged file, which is left out."""
    top, reading = logs / study.name, Reading([], [])
    sources = [_slow_in_preflights(top), *(_slow_in_run(top / run) for run in study.runs)]
    for source in [*sources, *(_lost_nodes(top / run) for run in study.runs)]:
        try:
            reading.content.extend(source)
        except UsageError as error:
            reading.left_out.append(f"{error}: no evidence against nodes is read from it")
    return reading


def _slow_in_preflights(top: Path) -> Iterator[Change]:
    """Yields the nodes that a preflight measured as too slow."""
    kinds = {**node_rates.COLUMNS, "time_utc": _time}
    for row in read_rows(top / node_rates.FILE, kinds):
        if row["short"]:
            reason = f"preflight of job {row['job']}, {row['run']}: {row['short']}"
            yield Change(row["time_utc"], row["node"], SUSPECTED, reason)


def _slow_in_run(folder: Path) -> Iterator[Change]:
    """Yields the nodes of ranks that were slow in at least half of a run's steps. Of a running run
    all steps count that it is to do."""
    if not (folder / SLOW_RANKS).exists():
        return
    rows = read_slow_ranks(folder)
    slow = [verdict for verdict in verdicts(rows) if verdict.kind != "link"]
    if not slow:
        return
    run = read_run(folder)
    began = {(row["rank"], row["node"]): row["time_utc"] for row in reversed(rows)}
    planned = (run.facts.get("spec") or {}).get("steps")
    steps = planned if run.state == RUNNING and planned else len(run.steps)
    for verdict in slow:
        if verdict.n * STEPS >= steps / 2:
            why = f"{folder.name}: {verdict}"
            yield Change(began[verdict.rank, verdict.node], verdict.node, SUSPECTED, why)


def _lost_nodes(folder: Path) -> Iterator[Change]:
    """Yields the nodes that a run's jobs lost: as srun names them, or the only node of a job."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    for name in (name for name in names if name.endswith(".out")):
        attempt, job = name.removesuffix(".out"), name.partition(".")[0]
        died = read_job_end(folder, job).get("verdict") == "node failure"
        if not died and not any(file.startswith(f"{job}.restart") for file in names):
            continue
        lists = LOST_NODE.findall(states.tail(folder / name))
        if died and not lists:
            lists = _ONLY_NODE.findall(states.tail(folder / f"{attempt}.job"))
        ended = datetime.fromtimestamp((folder / name).stat().st_mtime, UTC).isoformat()
        reason = f"job {attempt.replace('.restart', ', restart ')} of {folder.name} lost it"
        for node in sorted({node for text in lists for node in hostnames(text)}):
            yield Change(ended, node, SUSPECTED, reason)


# --- what is left out ----------------------------------------------------------------------------


def left_out(suspected: Iterable[str], need: int, takes_jobs: dict[str, bool]) -> list[str]:
    """Returns the first suspected nodes, as long as `need` nodes that take jobs remain. Slurm
    refuses the names of nodes that it does not know."""
    usable = {node for node, takes in takes_jobs.items() if takes}
    nodes = []
    for node in suspected:
        if node in takes_jobs and len(usable - {node}) >= need:
            usable.discard(node)
            nodes.append(node)
    return nodes


def nodes_of(ask: JobSettings, cluster: str) -> dict[str, bool]:
    """Returns each node of a job's partition (without one, of the default), and whether it takes
    jobs with the job's constraint."""
    partition = os.environ.get("SBATCH_PARTITION") or ask.partition
    command = ["sinfo", "--noheader", "--Node", "--format=%N|%P|%t|%f"]
    if partition:
        command.append(f"--partition={partition}")
    kinds = [
        set(features_wanted.split("&"))
        for features_wanted in ask.constraint.split("|")
        if features_wanted
    ]
    nodes = {}
    for line in squeue.run(command, cluster=cluster).splitlines():
        node, group, state, features = line.strip().split("|")
        is_open = not (state.startswith(_CLOSED) or state.endswith("*"))
        fits = not kinds or any(kind <= set(features.split(",")) for kind in kinds)
        if partition or group.endswith("*"):
            nodes[node] = is_open and fits
    return nodes


def option(study: Study, logs: Path, run: str) -> list[str]:
    """Returns sbatch's option that leaves nodes out of new jobs, with those that the run's own
    options leave out. It is none where the study does not ask for it, or nodes.csv is damaged,
    which `update` has said. A line says which suspected nodes stay in use."""
    if not ask_of(study, run).leave_out_nodes:
        return []
    try:
        suspected = suspects(read_changes(logs / study.name))
    except UsageError:
        return []
    if not suspected:
        return []
    job, cluster = job_of(study, run), cluster_of(study).slurm_cluster
    nodes = left_out(suspected, job.nodes, nodes_of(job.ask, cluster))
    if kept := ", ".join(node for node in suspected if node not in nodes):
        print(f"node {kept}: not left out: unknown to Slurm here, or {run} may need it")
    # sbatch's own option replaces the script's.
    excluded = (text for text in job.ask.options if "--exclude=" in text)
    also = [text.removeprefix("--exclude=") for text in excluded]
    return [f"--exclude={','.join([*also, *nodes])}"] if nodes else []


# --- changes -------------------------------------------------------------------------------------


def update(study: Study, logs: Path, rows: Iterable[states.Row]) -> list[str]:
    """Looks for new evidence, lets old evidence expire, and changes the jobs that wait. Each change
    is written down and printed. The caller holds the study's lock. Returns a line for each damaged
    file, which is left out."""
    try:
        changes, days = read_changes(logs / study.name), _days(study)
    except UsageError as error:
        return [f"{error}: until it is mended, or moved away, no node is left out"]
    seen, reading = set().union(*map(_marks, changes)), evidence(study, logs)
    new = [
        change
        for change in sorted(reading.content)
        if not seen & _marks(change) and change.age_days < days
    ]
    for node, change in suspects([*changes, *new]).items():
        if change.age_days >= days:
            reason = f"{days} days are over since: {change.why}"
            new.append(Change(utc_now(), node, EXPIRED, reason))
    write_changes(logs / study.name, new)
    pending = [row for row in rows if row.state == "pending"]
    pending = [row for row in pending if ask_of(study, row.run).leave_out_nodes]
    if pending and (changes or new):
        write_changes(logs / study.name, _pending(study, pending, [*changes, *new]))
    return reading.left_out


def _pending(study: Study, rows: list[states.Row], changes: list[Change]) -> Iterator[Change]:
    """Lets the jobs that wait leave out what new ones would; yields what has changed."""
    ours, suspected = {change.node for change in changes}, suspects(changes)
    jobs, cluster = ",".join(row.job for row in rows), cluster_of(study).slurm_cluster
    asked = ["squeue", "--noheader", "--array", f"--jobs={jobs}", "--format=%i|%x"]
    printed = squeue.run(asked, cluster=cluster)
    lists = dict(line.strip().split("|") for line in printed.splitlines())
    places: dict[
        tuple[str, str], dict[str, bool]
    ] = {}  # of each partition and constraint, asked once
    for row in (row for row in rows if row.job in lists):  # the others have started meanwhile
        excluded = set(hostnames(lists[row.job]))
        job = job_of(study, row.run)
        place = (job.ask.partition, job.ask.constraint)
        takes_jobs = places[place] = places.get(place) or nodes_of(job.ask, cluster)
        nodes = set(left_out(suspected, job.nodes, takes_jobs))
        nodes |= excluded - ours  # what somebody else left out stays
        if nodes == excluded:
            continue
        names = ",".join(sorted(nodes))
        try:
            update = ["scontrol", "update", f"jobid={row.job}", f"excnodelist={names}"]
            squeue.run(update, cluster=cluster)
        except UsageError as error:
            if "no longer pending" in str(error):  # it has started just now
                continue
            raise
        waiting_job = f"job {row.job} of {row.run}, which waits"
        for node in sorted(nodes ^ excluded):
            yield Change(utc_now(), node, LEFT_OUT if node in nodes else PUT_BACK, waiting_job)


def forgive(folder: Path, nodes: list[str]) -> None:
    """Clears nodes of suspicion; evidence that is already known does not count again."""
    suspected = suspects(read_changes(folder))
    for node in nodes:
        if node not in suspected:
            names = ", ".join(suspected) or "none"
            raise UsageError(f"{node} is not suspected; these are: {names}")
        write_changes(folder, [Change(utc_now(), node, FORGIVEN, f"was: {suspected[node].why}")])


@command_line("slurm.nodes")
def main(argv: list[str] | None = None) -> int:
    parser = study_parser("slurm.nodes", __doc__)
    parser.add_argument("--forgive", nargs="+", metavar="NODE", help="use these nodes again")
    arguments = parser.parse_args(argv)
    logs, status = ROOT / arguments.logs, 0
    studies = load_studies(arguments)
    jobs = squeue.jobs_of(studies)
    for study in each(studies):
        try:
            with states.locked([study], logs):
                if arguments.forgive:
                    forgive(logs / study.name, arguments.forgive)
                left_out = update(study, logs, states.rows(study, logs, jobs[study.name]))
            suspected, days = suspects(read_changes(logs / study.name)), _days(study)
        except UsageError as error:  # the other studies are looked at all the same
            warn("slurm.nodes", error)
            status = 2
            continue
        warn("slurm.nodes", *left_out)
        for change in suspected.values():
            age = f"for {change.age_days:.1f} of {days} days"
            print(printable(f"{change.node}  {age}  {change.why}"))
        if not suspected:
            print("no node is suspected")
        elif not any(ask_of(study, run).leave_out_nodes for run in study.runs):
            print("none is left out: leave_out_nodes is not set in [slurm]")
    return status


if __name__ == "__main__":
    sys.exit(main())
