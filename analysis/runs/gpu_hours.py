"""Where the GPU-hours of runs went: each job's time from its start to its end, cut into parts.

The parts of a job exclude each other and add up to its elapsed time:

starting    until its first step began
useful      steps that the result keeps, at the run's own steady time
slower      what these steps took beyond the steady time
evaluation  between steps: validation, and what else training waited for
saving      between steps: checkpoints (`blocked_s` of checkpoints.csv)
repeated    steps that were done again, because no checkpoint held them
ending      after the last step of a job that completed or saved
failed      after the last step of a job that did not, all of a job without a step in the result,
            and steps that no checkpoint holds

Times are seconds of the wall clock; GPU-hours are times on all GPUs of the run.
"""

import contextlib
import math
import os
import re
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from analysis.common.table import Column, Table, by_key
from analysis.logs.naming import name_of
from analysis.logs.record import Record
from analysis.runs.judged import judged
from base.errors import Reading, UsageError, by_reason
from parallel.checkpoint import folders
from parallel.record import reader
from parallel.record.ends import COMPLETE, INTERRUPTED, RUNNING
from parallel.record.launch import hostnames

PARTS = ("starting", "useful", "slower", "evaluation", "saving", "repeated", "ending", "failed")
_HOURS = [Column("hours", "GPU-hours", ".3g"), *by_key(PARTS, ".3g")]
_ASKED = "JobIDRaw,JobName,Submit,Start,End,ElapsedRaw,AllocTRES,NodeList"


class Span(NamedTuple):
    """From when to when a job held its GPUs, in Unix seconds; without Slurm, an attempt ran.

    went_well: it completed, saved its state or is running. nodes: as Slurm writes a list. gpus: how
    many it held, by Slurm (with --exclusive all of its nodes); 0 where Slurm does not say.
    """

    start: float
    end: float
    went_well: bool = False
    queued_s: float = 0.0
    nodes: str = ""
    gpus: int = 0


def accounted(jobs: Iterable[int]) -> dict[tuple[int, str], list[Span]]:
    """Returns what sacct says of jobs, by id and name, a span for each restart; nothing where no
    accounting answers. Another cluster, or an earlier year, has other jobs of the same number."""
    command = ["sacct", "-XDnP", f"--jobs={','.join(map(str, jobs))}", f"--format={_ASKED}"]
    clock = os.environ | {"SLURM_TIME_FORMAT": "%s"}
    spans: dict[tuple[int, str], list[Span]] = defaultdict(list)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=clock)
    except (OSError, subprocess.TimeoutExpired):
        return spans
    for line in done.stdout.splitlines():
        job, name, submit, start, end, elapsed, resources, nodes = line.split("|")
        if job.isdigit() and start.isdigit() and int(elapsed):  # else it never started
            ended, gpus = end.isdigit(), re.search(r"gres/gpu=(\d+)", resources)
            span = Span(
                float(start),
                end=float(start) + float(elapsed) if ended else time.time(),
                went_well=not ended,
                queued_s=float(start) - float(submit),
                nodes=nodes,
                gpus=int(gpus[1]) if gpus else 0,
            )
            spans[int(job), name].append(span)
    return spans


def noted(path: Path, attempts: list[Span]) -> dict[int, Span]:
    """Returns when jobs ran, by the run folder: their starts (<jobid>.job) and lengths
    (<jobid>.state).

    Without those of which one is not known, or that Slurm restarted: the length is of all restarts.
    A job without the first file died in its set-up; it did no step, so its start does not matter.
    """
    spans: dict[int, Span] = {}
    of_clusters_zone: dict[int, Span] = {}
    for job in reader.job_ids(path):
        elapsed_s = reader.read_job_end(path, job).get("elapsed_s")
        if not elapsed_s or any(path.glob(f"{job}.restart*")):
            continue
        if not (file := path / f"{job}.job").exists():
            spans[job] = Span(0.0, elapsed_s)
            continue
        began = re.search(r"^ +StartTime=(\S+)", file.read_text(errors="replace"), re.MULTILINE)
        if began is None:
            continue
        if began[1].isdecimal():
            spans[job] = Span(float(began[1]), float(began[1]) + elapsed_s)
            continue
        # An earlier job.sh let scontrol choose the format.
        with contextlib.suppress(ValueError):  # SLURM_TIME_FORMAT was a person's own
            start = _unix_s(began[1])
            of_clusters_zone[job] = Span(start, start + elapsed_s)
    shift_s = _zone_shift(list(of_clusters_zone.values()), attempts)
    for job, span in of_clusters_zone.items():
        spans[job] = Span(span.start + shift_s, span.end + shift_s)
    return spans


def _zone_shift(jobs: list[Span], attempts: list[Span]) -> float:
    """Returns the seconds to add to jobs' times that were read in this machine's zone, and written
    in the cluster's. The zones differ where attempts, whose times are UTC, do not begin in their
    jobs."""

    def delays(shift_s: float) -> list[float]:
        starts = [(a.start - job.start - shift_s, job) for a in attempts for job in jobs]
        return [delay for delay, job in starts if -1 <= delay <= job.end - job.start]

    def fit(shift_s: float) -> tuple[int, float]:
        return len(delays(shift_s)), -sum(delays(shift_s))

    best = max((quarter * 900.0 for quarter in range(-56, 57)), key=fit)
    unshifted = delays(0.0)
    late = sum(unshifted) > 3600 * len(unshifted)  # a program starts within an hour of its job
    return best if len(delays(best)) > len(unshifted) or late else 0.0


def _unix_s(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def recorded(run: reader.Run, rows: list[dict[str, Any]]) -> list[Span]:
    """Returns the attempts of a run as its folder knows them: from their starts to their last step,
    the newest to its status."""
    ended_utc, over = run.status.get("time_utc"), time.time()
    if run.state != RUNNING:  # ended_utc: the start, where a status still says running
        over = _unix_s(ended_utc) if ended_utc else 0.0
    spans: list[Span] = []
    for attempt in reversed([*(run.facts.get("attempts") or []), run.facts]):
        if not attempt.get("started_utc"):  # of an older version
            break
        start = _unix_s(attempt["started_utc"])
        following = spans[-1].start if spans else math.inf
        ends = [row["ended_unix_s"] for row in rows if start < row["ended_unix_s"] < following]
        went_well = "saved step" in (attempt.get("reason") or "")
        if attempt is run.facts:
            went_well = run.state in (COMPLETE, INTERRUPTED, RUNNING)
            ends.append(over)
        spans.append(Span(start, max([start, *ends]), went_well))
    return spans[::-1]


def steps_of(run: reader.Run) -> list[dict[str, Any]]:
    """Returns the steps of a run that were not moved aside, in the order of time.

    A step's `part` is useful, repeated or failed; its `blocked_s` is how long training waited for
    its save.
    """
    saves = [row for row in reader.read_checkpoints(run.path) if row["event"] == "save"]
    blocked_s = {save["step"]: save["blocked_s"] or 0.0 for save in saves}
    saved = max(folders.steps_in(run.path / folders.SAVES), default=0)
    if run.status.get("state") in (COMPLETE, RUNNING):
        saved = math.inf
    rows: list[dict[str, Any]] = []
    newest: dict[int, dict[str, Any]] = {}
    for row in run.written:
        step = row["step"]
        if row.get("ended_unix_s") is None:
            raise UsageError("steps.csv does not say when a step ended (an older run)")
        if step in newest:
            newest[step]["part"] = "repeated"
        part = "useful" if step <= saved else "failed"
        newest[step] = row | {"part": part, "blocked_s": blocked_s.get(step, 0.0)}
        rows.append(newest[step])
    return sorted(rows, key=lambda row: row["ended_unix_s"])


def split(
    span: Span, rows: list[dict[str, Any]], evaluated_s: float, steady_s: float
) -> Counter[str]:
    """Returns the seconds of a job by part. `rows` are its steps, `evaluated_s` the seconds of all
    its evaluations, or 0."""
    parts, at, blocked_s = Counter(dict.fromkeys(PARTS, 0.0)), span.start, 0.0
    if rows:
        at = min(max(at, rows[0]["ended_unix_s"] - rows[0]["step_s"]), span.end)
        parts["starting"] = at - span.start
    for row in rows:
        begin = min(max(at, row["ended_unix_s"] - row["step_s"]), span.end)
        over = min(max(begin, row["ended_unix_s"]), span.end)
        slower = max(0.0, over - begin - steady_s) if row["part"] == "useful" else 0.0
        saving = min(begin - at, blocked_s)
        parts.update({"saving": saving, "evaluation": begin - at - saving, "slower": slower})
        parts[row["part"]] += over - begin - slower
        at, blocked_s = over, row["blocked_s"]
    left = span.end - at
    if not (rows and span.went_well):
        parts["starting" if span.went_well else "failed"] += left
        return parts
    saving = min(left, blocked_s)
    evaluation = min(left - saving, max(0.0, evaluated_s - parts["evaluation"]))
    ending = left - saving - evaluation
    parts.update({"saving": saving, "evaluation": evaluation, "ending": ending})
    return parts


class Jobs(NamedTuple):
    """The jobs of a run and the seconds of each by part; how many of them sacct knows; how many
    more began, without a record of how long they ran. unfit: why the run has no
    steady time; "" where it has one."""

    parts: list[tuple[Span, Counter[str]]]
    accounted: int
    unknown: int
    unfit: str


def jobs_of(record: Record, by_sacct: dict[tuple[int, str], list[Span]]) -> Jobs:
    """Returns what sacct knows of each job, else what was noted of it, else the attempts of the
    run."""
    run, (judged_run,) = record.own, judged([record])
    steady_s = judged_run.time.step_s if judged_run.is_fit else math.inf
    if run.off_clock:
        raise UsageError(run.off_clock)
    rows = steps_of(run)
    spans: list[Span] = []
    accounted = unknown = 0
    attempts = recorded(run, rows)
    by_folder = noted(run.path, attempts)
    for job in reader.job_ids(run.path):
        spans_of_job = by_sacct.get((job, run.name), [])
        accounted += len(spans_of_job)
        if not spans_of_job and job in by_folder:
            spans_of_job = [by_folder[job]]
        if not spans_of_job and (run.path / f"{job}.out").exists():
            unknown += 1
        spans += spans_of_job
    # Attempts that began in none of these jobs.
    jobless = [a for a in attempts if not any(s.start - 1 <= a.start <= s.end for s in spans)]
    spans = sorted([*spans, *jobless])
    if not spans:
        raise UsageError("no job has begun, or run.json does not say when")
    evaluated_s = (run.metrics.get("summary") or {}).get("evaluation_time_sec") or 0.0
    parts = []
    for number, span in enumerate(spans, 1):
        # Slurm's times are whole seconds.
        well = [a.went_well for a in attempts if span.start - 1 <= a.start <= span.end]
        newest = number == len(spans)
        done = [row for row in rows if newest or row["ended_unix_s"] <= span.end + 1]
        rows = rows[len(done) :]
        span = span._replace(went_well=span.went_well or any(well[-1:]))
        evaluated = evaluated_s if newest else 0.0
        parts.append((span, split(span, done, evaluated, steady_s)))
    return Jobs(parts, accounted, max(0, unknown - len(jobless)), judged_run.unfit)


def table(records: list[Record], ask: bool = True) -> Reading[list[Table]]:
    """Returns two tables of GPU-hours by part, of runs (the last row is the sum) and of the nodes
    that are known; and a line for each reason why runs were refused. `ask` lets sacct be asked."""
    rows: list[dict[str, Any]] = []
    nodes: dict[str, Counter[str]] = defaultdict(Counter)
    left_out: list[tuple[str, str]] = []
    lacking: list[str] = []
    unsteady: list[str] = []
    accounted_jobs = 0
    ours = {record.source: record for record in records if record.own}
    numbers = {job for source in ours for job in reader.job_ids(Path(source))} if ask else set()
    by_sacct = accounted(numbers) if numbers else {}
    for record in ours.values():
        try:
            jobs = jobs_of(record, by_sacct)
        except UsageError as error:
            left_out.append((record.source, str(error)))
            continue
        accounted_jobs += jobs.accounted
        if jobs.unknown:
            lacking.append(
                f"{name_of(record)}: {jobs.unknown} jobs; how long they ran is not known"
            )
        if jobs.unfit:
            unsteady.append(f"{name_of(record)}: no step counts as slower ({jobs.unfit})")
        gpu_hours: Counter[str] = Counter()
        for span, parts in jobs.parts:
            seconds = {**parts, "hours": span.end - span.start}
            gpus = span.gpus or record.gpus
            hours = {part: s * gpus / 3600 for part, s in seconds.items()}
            gpu_hours.update(hours)
            hosts = hostnames(span.nodes)
            for node in hosts:
                nodes[node].update({part: hours[part] / len(hosts) for part in hours})
        queued_h = sum(span.queued_s for span, _ in jobs.parts) / 3600 if jobs.accounted else None
        facts = {"run": name_of(record), "jobs": len(jobs.parts), "gpus": record.gpus}
        rows.append({**gpu_hours, **facts, "queued": queued_h})
    node_rows = [{"node": node, **hours} for node, hours in sorted(nodes.items())]
    node_table = Table([Column("node", "node"), *_HOURS], node_rows, "GPU-hours by node")
    refused = by_reason(left_out)
    notes = unsteady + [f"not in these hours: {line}" for line in [*lacking, *refused]]
    return Reading([_of_runs(rows, accounted_jobs, notes), node_table], refused)


def _of_runs(rows: list[dict[str, Any]], accounted_jobs: int, remarks: list[str]) -> Table:
    """Returns the table of runs with a last row `all`. remarks: its last notes."""
    total = {k: sum(row[k] or 0 for row in rows) for k in ("jobs", "queued", "hours", *PARTS)}
    shares = [f"{part} {total[part] / (total['hours'] or 1):.1%}" for part in PARTS]
    source = (
        f"GPU-hours of {accounted_jobs} of {total['jobs']} jobs are those of Slurm's accounting"
        " (sacct)"
    )
    if accounted_jobs < total["jobs"]:
        source += "; of the others those that the run folder knows"
    notes = [f"of all GPU-hours: {', '.join(shares)}", source, *remarks]
    total = {"run": "all", **total, "queued": total["queued"] if accounted_jobs else None}
    columns = [Column("run", "run"), Column("jobs", "jobs", "d"), Column("gpus", "GPUs", "d")]
    columns += [Column("queued", "hours queued", ".3g", seldom=True), *_HOURS]
    return Table(columns, [*rows, total] if rows else [], notes=notes)
