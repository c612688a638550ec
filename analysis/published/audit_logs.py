"""What is wrong with logs: runs that measured nothing, products that fail, commits, repeats."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from analysis.logs.record import Record
from analysis.logs.verdict import judge, timed
from analysis.measured import tflops
from analysis.published.finding import DIFFERENT_COMMITS, FAR_APART, Finding
from models.gpus import peak_tflops

LEAST_STEPS = 5  # fewer equal times may be chance
SLOWEST_RANK = 1.02  # slowest rank over the mean over ranks


def audit_records(records: list[Record]) -> list[Finding]:
    """Everything about logs: runs that measured nothing, products that fail, efficiencies above 1,
    commits, repeats."""
    found = []
    groups: dict[tuple, list[tuple[Record, float]]] = defaultdict(list)
    found += _same_evidence(records)
    for record in records:
        time = timed(record)
        judgement = judge(record, time)
        kinds = {"all skipped": "skipped", "loss": "loss"}
        faults = [(kinds[f.kind], f.text) for f in judgement.flags if f.kind in kinds]
        faults += _of_record(record)
        found += [Finding(record.source, 0, *fault) for fault in faults]
        if time is not None and not judgement.unfit and record.global_batch and record.gpus:
            groups[_work_of(record)].append((record, time.step_s))
    for row in tflops.rows(records):
        if row["above"]:
            found.append(Finding(row["source"], 0, "efficiency", row["above"]))
    for members in groups.values():
        found += [Finding(members[0][0].source, 0, *fault) for fault in _compared(members)]
    return found


def _same_evidence(records: list[Record]) -> Iterator[Finding]:
    """Logs with the bytes of another, or with all its step times, which no two runs share."""
    first: dict[bytes, Record] = {}
    for record in records:
        times = record.step_s
        if record.copy_of:
            said = f"the same evidence as {record.copy_of}: one run, or a copied file"
            yield Finding(record.source, 0, "twice", said)
        elif len(times) >= LEAST_STEPS and len(set(times.tolist())) > len(times) / 2:
            other = first.setdefault(times.tobytes(), record)
            if other is not record:
                said = f"all {len(times)} step times are those of {other.source}"
                yield Finding(record.source, 0, "twice", said)


def _of_record(record: Record) -> Iterator[tuple[str, str]]:
    """(kind, sentence) about what does not add up in one log."""
    sizes, cp = (record.tp, record.pp, record.dp), record.cp or 1
    if all(sizes) and record.gpus and record.gpus != (product := math.prod(sizes) * cp):
        yield "gpus", f"tp x pp x dp = {product}, but the log says {record.gpus} GPUs"
    if record.micro_batch and record.dp and record.global_batch:
        if record.global_batch % (record.micro_batch * record.dp):
            per_step = f"micro batch {record.micro_batch} x dp {record.dp}"
            yield "batch", f"{per_step} does not divide the global batch {record.global_batch}"
    peak = peak_tflops(record.gpu_type, record.precision)
    printed = record.tflops[record.tflops > 0]
    if peak and len(printed) and float(printed.max()) > peak:
        yield "peak", f"printed TFLOP/s {printed.max():.1f} are above the peak of {peak:g}"


def _work_of(record: Record) -> tuple:
    model = tuple(sorted(record.model.items()))
    return (record.params, model, record.seq_len, record.global_batch, record.precision)


def _compared(members: list[tuple[Record, float]]) -> Iterator[tuple[str, str]]:
    """(kind, sentence) about logs of the same work that were given together."""
    commits = {record.commit for record, _ in members if record.commit}
    if len(commits) > 1:
        yield "commits", DIFFERENT_COMMITS + ", ".join(sorted(commit[:7] for commit in commits))
    same = defaultdict(list)
    for record, step_s in members:
        layout = [getattr(record, k) for k in ("engine", "gpus", "tp", "cp", "pp", "vpp", "dp")]
        rest = [record.micro_batch, record.zero_stage, record.recompute, record.run]
        # A log states few settings: only files whose names differ in digits alone are repeats.
        rest.append(re.sub(r"\d+", "", Path(record.source).name))
        same[tuple(layout + rest)].append(step_s)
    for times in same.values():
        if len(times) > 1 and max(times) > FAR_APART * min(times):
            listed = ", ".join(f"{s:.4g}" for s in times)
            yield "repeats", f"identical configurations took {listed} s"


_TOTAL = re.compile(r"Total epoch time: ([\d.]+) seconds")
_RANK = re.compile(r"\bRank (\d+) Epoch (\d+) timing breakdown")
_AVERAGE = re.compile(r"Average metrics")


def means_over_ranks(lines: list[str], file: str) -> Iterator[Finding]:
    """Means over ranks that stand for an epoch's time though a slower rank ended later.

    Read from `Average metrics` and `Rank N Epoch M timing breakdown` blocks under headings whose
    last number is that of the GPUs (`training_b64_g2`); speedups are against the block of the same
    name on one GPU.
    """
    epochs = _epochs(lines)
    for name, epoch in epochs.items():
        mean, ranks = epoch.get("mean"), epoch["ranks"]
        if mean is None or len(ranks) < 2 or max(ranks.values()) <= SLOWEST_RANK * mean:
            continue
        slowest = max(ranks.values())
        each = " and ".join(f"{ranks[rank]:.2f}" for rank in sorted(ranks))
        message = (
            f"{name}: " * bool(name)
            + f"{mean:.2f} s is the mean of ranks at {each} s; the slowest decides"
        )
        alone = epochs.get(re.sub(r"\d+$", "1", name), {}).get("alone")
        if alone:
            message += f" (speedup {alone / slowest:.2f}, not {alone / mean:.2f})"
        yield Finding(file, epoch["line"], "mean over ranks", message)


def _epochs(lines: list[str]) -> dict[str, dict[str, Any]]:
    """Heading -> seconds of each rank (`ranks`), of their `mean` or of one GPU `alone`, `line`."""
    epochs: dict[str, dict[str, Any]] = {}
    name, where, at = "", "alone", 0
    for line_no, line in enumerate(lines, start=1):
        if match := re.match(r"^#+ +(\S.*?)\s*$", line):
            name, where = match[1], "alone"
            epochs.setdefault(name, {"ranks": {}})
        elif _AVERAGE.search(line):
            where, at = "mean", line_no
        elif match := _RANK.search(line):
            where = int(match[1])
        elif match := _TOTAL.search(line):
            epoch, seconds = epochs.setdefault(name, {"ranks": {}}), float(match[1])
            if isinstance(where, int):
                epoch["ranks"][where] = seconds
            else:
                epoch[where] = seconds
                epoch["line"] = at if where == "mean" else line_no
    return epochs
