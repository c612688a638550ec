"""Where the GPU-hours of runs went: each job's time from its start to its end, cut into parts.

The parts of a job exclude each other and add up to its elapsed time:

starting    until its first step began
useful      steps that the result keeps, at the run's own steady time
slower      what these steps took beyond the steady time
evaluation  between steps: validation, and what else training waited for
saving      between steps: checkpoints (`blocked_s` of checkpoints.csv)
repeated    steps that were done again, because no checkpoint held them
ending      after the last step of a job that completed or saved
failed      after the last step of a job that did not, and steps that no checkpoint holds

Times are seconds of the wall clock; GPU-hours are times on all GPUs of the run.
"""

import math
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from analysis.common.table import Column, Table
from analysis.logs.load import name_of
from analysis.logs.readers import run_folder
from analysis.logs.record import Record
from analysis.logs.verdict import timed
from base.errors import UsageError
from parallel.checkpoint import folders
from parallel.record import reader
from parallel.record.ends import COMPLETE, INTERRUPTED, RUNNING
from parallel.record.schema import MARKER

TRY_AGAIN = 75  # the exit status of a run that was stopped and saved
PARTS = ("starting", "useful", "slower", "evaluation", "saving", "repeated", "ending", "failed")
_HOURS = [Column("hours", "GPU-hours", ".3g"), *(Column(part, part, ".3g") for part in PARTS)]
_ASKED = "JobIDRaw,Submit,Start,End,ElapsedRaw,NodeList"


class Span(NamedTuple):
    """A job's hold of its GPUs, in Unix seconds; of a run without Slurm, an attempt. saved: it was
    stopped and had saved its state. queued_s: seconds that it waited before, where Slurm says so.
    nodes: as Slurm writes a list."""

    start: float
    end: float
    saved: bool = False
    queued_s: float = 0.0
    nodes: str = ""


def accounted(jobs: Iterable[int]) -> dict[int, list[Span]]:
    """What sacct says of jobs, by id, a span for each restart; {} where no accounting answers."""
    command = ["sacct", "-XDnP", f"--jobs={','.join(map(str, jobs))}", f"--format={_ASKED}"]
    clock = os.environ | {"SLURM_TIME_FORMAT": "%s"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=clock)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    spans: dict[int, list[Span]] = {}
    for line in done.stdout.splitlines():
        job, submit, start, end, elapsed, nodes = line.split("|")
        if not (job.isdigit() and start.isdigit()):
            continue  # it never started
        begun = float(start)
        over = begun + float(elapsed) if end.isdigit() else time.time()
        spans.setdefault(int(job), []).append(
            Span(begun, over, False, begun - float(submit), nodes)
        )
    return spans


def of_run(path: Path, known: dict[int, list[Span]]) -> list[Span]:
    """The spans of a run's jobs; the exit status of each attempt says whether it saved."""
    spans = []
    for job in reader.job_ids(path):
        for number, span in enumerate(known.get(job, [])):
            file = path / (f"{job}.restart{number}.exit" if number else f"{job}.exit")
            text = file.read_text().strip() if file.exists() else ""
            spans.append(span._replace(saved=text == str(TRY_AGAIN)))
    return sorted(spans)


def recorded(path: Path, rows: list[dict[str, Any]]) -> list[Span]:
    """The attempts of a run as its folder knows them: from their starts to their last step, the
    newest to its status.

    Raises:
        UsageError: run.json does not say when one started.
    """
    facts, status = reader.read_facts(path), reader.read_status(path)
    attempts = [*(facts.get("attempts") or []), facts]
    if not all(of.get("started_utc") for of in attempts):
        raise UsageError(f"{path / 'run.json'} does not say when it started")
    starts = [datetime.fromisoformat(of["started_utc"]).timestamp() for of in attempts]
    over = time.time()
    if status.get("state") != RUNNING and status.get("time_utc"):
        over = datetime.fromisoformat(status["time_utc"]).timestamp()
    spans = []
    for of, start, following in zip(attempts, starts, [*starts[1:], math.inf], strict=True):
        ends = [row["ended_unix_s"] for row in rows if start < row["ended_unix_s"] < following]
        ends += [over] if following == math.inf else []
        spans.append(Span(start, max([start, *ends]), "saved step" in (of.get("reason") or "")))
    return spans


def steps_of(path: Path) -> list[dict[str, Any]]:
    """Every step that a run did, in the order of time. part: useful, repeated or failed.

    Raises:
        UsageError: a file is damaged, or an older version wrote it without the time of day.
    """
    aside = sorted((p for p in (path / "attempts").glob("*") if p.name.isdigit()), key=str)
    kept: dict[float, dict[str, Any]] = {}  # a result that was copied aside is there twice
    for folder in (*aside, path):
        again: dict[int, dict[str, Any]] = {}
        rows = reader.read_step_times(folder)
        if any(row.get("ended_unix_s") is None for row in rows):
            raise UsageError(f"{folder / 'steps.csv'} does not say when a step ended (older runs)")
        state = reader.read_status(folder).get("state")
        done = (folder / MARKER).exists() or (folder == path and state == RUNNING)
        saved = max(folders.steps_in(folder / folders.SAVES), default=0)
        for row in rows:
            if row["step"] in again:
                again[row["step"]]["part"] = "repeated"
            lost = not done and row["step"] > saved
            again[row["step"]] = row | {"part": "failed" if lost else "useful"}
            kept[row["ended_unix_s"]] = again[row["step"]]
    return [kept[ended] for ended in sorted(kept)]


class Job(NamedTuple):
    """What a job's split follows from. went_well: it completed or saved its state at its end.
    blocked: seconds that training waited for the save of a step. evaluated_s: of all its
    evaluations, where that is known."""

    span: Span
    rows: list[dict[str, Any]]
    went_well: bool
    blocked: dict[int, float]
    evaluated_s: float
    steady_s: float


def split(job: Job) -> Counter[str]:
    """Seconds of a job by part."""
    parts, at, before = Counter(dict.fromkeys(PARTS, 0.0)), job.span.start, None
    for row in job.rows:
        begin = max(at, row["ended_unix_s"] - row["step_s"])
        over = max(begin, row["ended_unix_s"])
        if before is None:
            parts["starting"] += begin - at
        else:
            _between(parts, begin - at, job.blocked.get(before["step"], 0.0))
        slower = max(0.0, over - begin - job.steady_s) if row["part"] == "useful" else 0.0
        parts[row["part"]] += over - begin - slower
        parts["slower"] += slower
        at, before = over, row
    left = max(0.0, job.span.end - at)
    if before is None or not job.went_well:
        parts["failed"] += left
    else:
        saving = min(left, job.blocked.get(before["step"], 0.0))
        evaluation = min(left - saving, max(0.0, job.evaluated_s - parts["evaluation"]))
        _between(parts, saving + evaluation, saving)
        parts["ending"] += left - saving - evaluation
    return parts


def _between(parts: Counter[str], gap_s: float, blocked_s: float) -> None:
    saving = min(gap_s, blocked_s)
    parts["saving"] += saving
    parts["evaluation"] += gap_s - saving


def jobs_of(record: Record, spans: list[Span]) -> list[Job]:
    """The jobs of a run, with the steps that each did; spans: of its jobs, [] where no accounting
    knows them.

    Raises:
        UsageError: a file is damaged, or does not say when steps ended.
    """
    path, rows = Path(record.source), steps_of(Path(record.source))
    run, steady = reader.read_run(path), timed(record)
    spans = spans or recorded(path, rows)
    events = [e for e in reader.read_checkpoints(path) if e["event"] == "save"]
    blocked = {e["step"]: e["blocked_s"] or 0.0 for e in events}
    evaluated_s = (run.metrics.get("summary") or {}).get("evaluation_time_sec") or 0.0
    jobs: list[Job] = []
    at = 0
    for number, span in enumerate(spans, 1):
        # Slurm's times are whole seconds.
        to = at + sum(row["ended_unix_s"] <= span.end + 1 for row in rows[at:])
        newest = number == len(spans)
        well = span.saved or (newest and run.state in (COMPLETE, INTERRUPTED, RUNNING))
        known = evaluated_s if newest else 0.0
        pace = steady.step_s if steady else math.inf
        jobs.append(Job(span, rows[at:to], well, blocked, known, pace))
        at = to
    return jobs


class Hours(NamedTuple):
    """The table of runs, that of nodes where they are known, and what was refused, a line each."""

    tables: list[Table]
    refused: list[str]


def table(records: list[Record], ask: bool = True) -> Hours:
    """GPU-hours of runs by part, and of nodes; the last row has the sum. ask: sacct is asked."""
    rows: list[dict[str, Any]] = []
    nodes: dict[str, Counter[str]] = {}
    own, refused, told = [r for r in records if r.format == run_folder.FORMAT], [], 0
    ids = {job for record in own for job in reader.job_ids(Path(record.source))}
    known = accounted(ids) if ask and ids else {}
    for record in own:
        spans = of_run(Path(record.source), known)
        try:
            jobs = jobs_of(record, spans)
        except UsageError as error:
            refused.append(str(error))
            continue
        told += bool(spans)
        queued = sum(span.queued_s for span in spans) / 3600 if spans else None
        row: Counter[str] = Counter()
        for span, parts in ((job.span, split(job)) for job in jobs):
            hours = {part: s * record.gpus / 3600 for part, s in parts.items()}
            row.update(hours, hours=(span.end - span.start) * record.gpus / 3600)
            for node in (held := hostnames(span.nodes)):
                of_node = nodes.setdefault(node, Counter())
                of_node.update({part: of / len(held) for part, of in hours.items()})
        facts = {"run": name_of(record), "jobs": len(jobs), "gpus": record.gpus, "queued": queued}
        rows.append(dict(row) | facts)
    return Hours([_of_runs(rows, told), *_of_nodes(nodes)], refused)


def _of_runs(rows: list[dict[str, Any]], told: int) -> Table:
    """told: runs that Slurm's accounting knows."""
    total = {k: sum(row[k] or 0 for row in rows) for k in ("jobs", "queued", "hours", *PARTS)}
    shares = [f"{part} {total[part] / (total['hours'] or 1):.1%}" for part in PARTS]
    source = f"GPU-hours of {told} of {len(rows)} runs are those of Slurm's accounting (sacct)"
    if told < len(rows):
        source += "; of the others a program's start is the first that the run folder knows"
    notes = [f"of all GPU-hours: {', '.join(shares)}", source]
    total = {"run": "all", **total, "queued": total["queued"] if told else None}
    columns = [Column("run", "run"), Column("jobs", "jobs", "d"), Column("gpus", "GPUs", "d")]
    columns += [Column("queued", "hours queued", ".3g", seldom=True), *_HOURS]
    return Table(columns, [*rows, total] if rows else [], notes=notes)


def _of_nodes(nodes: dict[str, Counter[str]]) -> list[Table]:
    rows = [{"node": node, "hours": sum(of.values()), **of} for node, of in sorted(nodes.items())]
    return [Table([Column("node", "node"), *_HOURS], rows, "GPU-hours by node")] * bool(rows)


def hostnames(text: str) -> list[str]:
    """The nodes of a list as Slurm writes it, node[1-3] for example."""
    if "[" not in text:
        return [name for name in text.split(",") if name]
    command = ["scontrol", "show", "hostnames", text]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.split()
