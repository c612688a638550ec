"""MLPerf's log lines: `:::MLLOG {"key": "tracked_stats", "value": {...}, "metadata": {...}}`.

A result is timed from run_start to run_stop; evaluations are marked inside. Some logs time each
step (tracked_stats). Of the others an entry is the mean over the steps between two evaluations, by
the samples that were counted there. A count has no unit in these logs: of samples or of tokens is
what makes a possible speed. A throughput has none either, and is not read.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from analysis.logs.parsing import rate_words
from analysis.logs.parsing.failure_line import judge_end
from analysis.logs.parsing.fields import LINE_END, NUMBER
from analysis.logs.parsing.json_values import (
    integer,
    is_nan,
    known,
    mapping,
    opens_with_json,
    real,
    text,
)
from analysis.logs.parsing.line_format import Format
from analysis.logs.parsing.lines import Line, table
from analysis.logs.parsing.logfile import Log
from analysis.logs.parsing.model_names import read_name
from analysis.logs.parsing.setting_names import header_of, read_header, state
from analysis.logs.parsing.steps import put_steps
from analysis.logs.record import Failure, Record, Submission, steps_table
from parallel.config.layout import EXPERT_AXES, SET_AXES

_FACTS = {
    "global_batch_size": "global_batch",
    "max_sequence_length": "seq_len",
    "sequence_length": "seq_len",
    "micro_batch_size": "micro_batch",
    "gradient_accumulation_steps": "n_micro",
    "num_layers": "n_layer",
    "hidden_size": "hidden",
    "ffn_hidden_size": "ffn_hidden",
    "num_heads": "n_head",
    "tensor_parallelism": "tp",
    "pipeline_parallelism": "pp",
    "context_parallelism": "cp",
    "expert_parallelism": "ep",
}
_ABOUT = {"submission_org": "submitter", "submission_division": "division"}
_ABOUT |= {"submission_platform": "platform", "submission_benchmark": "benchmark"}
_PRECISION = "lowest_numerical_precision_in_linear"
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_COUNTED = ("block_stop", "eval_start", "eval_stop", "eval_accuracy", "run_stop")
_LOSSES = ("train_loss", "eval_loss")
# Of an argument dump; the batch and the steps there are of one GPU, or a limit.
_SETTINGS = (*SET_AXES, *EXPERT_AXES, "routing", "dropped", "dispatcher")
_SETTINGS += ("micro_batch", "seq_len", "precision", "recompute", "sequence_parallel")
# `train_step_timing in s`, `train_step_time_ms`, `iteration_time`, `time_per_step (s)`
_STEP_TIME = (
    rb"(?i:(?:(?:avg|average|mean|median|train|training)[ _]){0,2}"
    rb"(?:(?:step|iter|iteration)[ _](?:tim(?:e|ing)|duration)|time[ _]per[ _](?:step|iteration))"
    rb"(?:[ _]{0,2}[(]?(?:in[ _])?[mu]?s(?:ec|ecs|econds)?[)]?)?)"
)
_COUNT = rb"\"metadata\": ?\{[^\r\n]{0,2000}?\"%b\": ?(\d{1,15})(?=[,}])"
_TRACKED = Line(  # most lines of a log: they are read as other programs' steps are
    re.compile(
        rb":::MLLOG \{(?=[^\r\n]{0,4000}?\"key\": ?\"tracked_stats\")(?=[^\r\n]{0,4000}\}%b)"
        % LINE_END
    ),
    {
        "time_ms": re.compile(rb"\"time_ms\": ?\"?%b\"?(?=[,}])" % NUMBER),
        "printed": re.compile(
            rb"\"value\": ?\{[^{}\r\n]{0,2000}?\"%b\": ?\"?%b\"?(?=[,}])" % (_STEP_TIME, NUMBER)
        ),
        "step": re.compile(_COUNT % b"step"),
        "samples": re.compile(_COUNT % b"samples_count"),
    },
    valid=opens_with_json,
)
_LINE = re.compile(rb":::MLLOG (?=(\{[^\r\n]*))")
# The benchmark's rules fix the model and the length of its sequences: (our name of it, tokens).
_BENCHMARKS = {
    "gpt3": ("gpt3-175b", 2048),
    "llama270blora": ("llama2-70b", 8192),
    "llama31405b": ("llama3-405b", 8192),
    "llama318b": ("llama3-8b", 8192),
    "deepseekv3671b": ("", 4096),  # with or without multi-token prediction
    "gptoss20b": ("gpt-oss-20b", 8192),
}
_OFTEN = 20  # steps a second that no run of these benchmarks makes: the count was of tokens
_LATE_S = 60.0  # ranks that print one mark do so within it


class _Line(NamedTuple):
    """A line of the log. at: its offset, bytes. time_s: seconds since 1970."""

    at: int
    key: str
    value: Any
    time_s: float
    metadata: dict[str, Any]


def _read(log: Log, record: Record) -> None:
    """Reads one result log. What it says of the whole run is in `totals` and `submission`."""
    submission = record.submission = Submission()
    lines, end = _lines(log, record)
    marks: dict[str, _Line] = {}
    for line in lines:
        marks.setdefault(line.key, line)
        if line.key in _ABOUT:
            setattr(submission, _ABOUT[line.key], text(line.value) or "")
        elif line.key in _FACTS and (fact := integer(line.value) or 0) > 0:
            state(record, {_FACTS[line.key]: fact}, "log")
        elif line.key == _PRECISION and (word := text(line.value)):
            state(record, {"precision": _PRECISIONS.get(word.lower(), word.lower())}, "log")
    start, stop = marks.get("run_start"), marks.get("run_stop")
    _settings(record, log, start and start.at)
    benchmark = re.sub(r"\W|_", "", submission.benchmark.lower())
    model, seq_len = _BENCHMARKS.get(benchmark, ("", None))
    read_name(record, model)
    state(record, {"seq_len": seq_len}, "from name")
    if benchmark.endswith("lora"):
        record.uncounted.append("frozen weights (LoRA)")
    if start:
        run = lines[lines.index(start) :]
        steps = _tracked(log, start.at, end)
        words = "".join(f"{line.time_s:.3f} {line.key} {line.value}\n" for line in run)
        evidence = words.encode() + steps[1:].tobytes()
        record.whole_run, record.evidence = True, hashlib.sha256(evidence).hexdigest()
        _time(record, log, run, steps)
    losses = [line.value for line in lines if line.key in _LOSSES]
    losses = [real(loss) for loss in losses if is_nan(loss) or known(loss) is not None]
    if losses:
        record.totals["loss"] = losses[-1]
        record.nan_iterations = sum(map(math.isnan, losses))
    status = ""
    if stop:
        status = (text((stop.metadata | mapping(stop.value)).get("status")) or "").lower()
        record.last_at = stop.at
    record.completed = status == "success"
    judge_end(record, log, [stop.at] if stop else None)
    if record.failure is None and status not in ("", "success"):
        words = f"run_stop status: {status}"
        record.failure = Failure("stopped early", log.line_no(stop.at), words)


def _untracked(log: Log) -> Iterator[tuple[int, re.Match[bytes]]]:
    """Yields (offset, match) of the log's entries but those of timed steps."""
    for offset, block in log.blocks():
        for line in block.split(b"\n"):
            # Two ranks may write on one line.
            if b'"tracked_stats"' not in line or line.count(b":::MLLOG ") > 1:
                yield from ((offset + match.start(), match) for match in _LINE.finditer(line))
            offset += len(line) + 1


class _Lines(NamedTuple):
    """A run's whole lines but those of timed steps, and where the run ends in the log."""

    lines: list[_Line]
    end: int


def _lines(log: Log, record: Record) -> _Lines:
    """Returns the lines of the first run. It ends before a second run's run_start, which is one too
    late to be another rank's; a doubt in the record says so."""
    lines: list[_Line] = []
    decoder, started_s = json.JSONDecoder(), math.inf
    for at, match in _untracked(log):
        try:  # two ranks may write on one line: the first object counts
            line = mapping(decoder.raw_decode(match[1].decode("utf-8", "replace"))[0])
        except (ValueError, RecursionError):
            continue
        key, time_s = str(line.get("key")), real(line.get("time_ms")) / 1000
        if not math.isfinite(time_s):
            continue
        if key == "run_start":
            if math.isfinite(started_s) and abs(time_s - started_s) > _LATE_S:
                words = f"another run, from line {log.line_no(at)} on: the first is read"
                record.doubt("attempts", words)
                return _Lines(lines, at)
            started_s = min(started_s, time_s)
        lines.append(_Line(at, key, line.get("value"), time_s, mapping(line.get("metadata"))))
    return _Lines(lines, log.size)


def _settings(record: Record, log: Log, start: int | None) -> None:
    """Fills the layout from argument dumps before the run."""
    lines = header_of(log, start).splitlines()
    if header := b"\n".join(line for line in lines if line and b":::MLLOG" not in line):
        dump = Record(source=record.source, format=record.format)
        read_header(dump, header)
        state(record, {name: getattr(dump, name) for name in _SETTINGS}, "log")


def _time(record: Record, log: Log, run: list[_Line], steps: np.ndarray) -> None:
    """Fills the entries and the times of the whole run, from run_start on. steps: as `_tracked`
    returns them."""
    submission, batch = record.submission, record.global_batch
    keys = [line.key for line in run]
    evaluations, blocks = keys.count("eval_start"), keys.count("block_stop")
    if "run_stop" in keys:  # what stands behind it is no training
        run = run[: keys.index("run_stop") + 1]
        record.totals["wall_s"] = run[-1].time_s - run[0].time_s
    trained_s = _training(run)
    if evaluations and record.totals.get("wall_s"):
        submission.eval_share = 1 - trained_s[-1] / record.totals["wall_s"]
    counts = _counts(run, trained_s, "samples_count")
    if counts.shape[1] == 1:
        counts = _counts(run, trained_s, "epoch_num")
    at, seconds, count = _samples(record, counts)
    submission.samples = int(count[-1]) or None
    spans, added = np.diff(seconds), np.diff(count)
    usable = spans > 0
    samples_per_s = float(added[usable].sum() / spans[usable].sum()) if usable.any() else 0.0
    if steps.size and (factor := _factor(record, steps, samples_per_s)):
        # By the log's counts where each step has its own: ranks may repeat a step.
        _, times, counts, _ = steps
        iteration = np.arange(1.0, len(counts) + 1)
        if counts.all() and len(set(counts)) == len(set(zip(counts, times, strict=True))):
            iteration = np.unique(counts, return_inverse=True)[1] + 1.0
        columns = {"iteration": iteration, "step_s": factor * times, "at": steps[0]}
        put_steps(record, columns, log)
    elif steps.size:
        record.note("printed and counted times differ, so neither is a result")
    elif batch and usable.any() and max(blocks, evaluations) >= len(spans):
        columns = {"iteration": count[1:] / batch, "step_s": spans * batch / added, "at": at[1:]}
        record.steps = steps_table(**{name: values[usable] for name, values in columns.items()})
        record.interval = max(1, round(float(np.median(added[usable])) / batch))
        record.last_at = int(record.steps["at"][-1])
        record.note("no step is timed: an entry is the mean between two evaluations")
        if not evaluations:
            record.note("evaluations are not marked: the times hold them")
    else:
        record.note("no step is timed: the times are of the whole run")


def _training(run: list[_Line]) -> list[float]:
    """Returns the seconds of training up to each line, without evaluations and what lies between
    blocks."""
    idle_s, pause_start_s, in_block, seconds = 0.0, math.inf, True, []
    for line in run:
        if line.key in ("block_stop", "eval_start"):
            pause_start_s = min(pause_start_s, line.time_s)
            in_block = in_block and line.key != "block_stop"
        elif line.key == "block_start" or (line.key == "eval_stop" and in_block):
            idle_s += max(line.time_s - pause_start_s, 0.0)
            pause_start_s, in_block = math.inf, True
        seconds.append(min(line.time_s, pause_start_s) - run[0].time_s - idle_s)
    return seconds


def _counts(run: list[_Line], trained_s: list[float], name: str) -> np.ndarray:
    """Returns the lines that count more under a name than all before them, (3, n): the line's
    offset, the seconds of training up to it, and the count. The first column is 0. What a block
    says at its start it will train does not count."""
    counts = [(0, 0.0, 0)]
    for line, seconds in zip(run, trained_s, strict=True):
        count = integer(line.metadata.get(name)) if line.key in _COUNTED else None
        if count and count > counts[-1][2]:
            counts.append((line.at, seconds, count))
    return np.array(counts, float).T


def _tracked(log: Log, start: int, end: int) -> np.ndarray:
    """Returns the step times in the tracked_stats of [start, end), (4, n). The rows are the line's
    offset, the printed time, the count in the line (0 where there is none), and when it was
    written, in seconds."""
    columns = table(log, _TRACKED, Record(source=str(log.path), format="MLPerf"))
    counts = np.where(columns["step"] > 0, columns["step"], columns["samples"])
    counts = np.where(counts > 0, counts, 0.0)
    steps = np.array([columns["at"], columns["printed"], counts, columns["time_ms"] / 1000])
    is_step = (steps[0] >= start) & (steps[0] < end) & (steps[1] > 0)
    return steps[:, is_step & np.isfinite(steps).all(axis=0)]


def _samples(record: Record, counts: np.ndarray) -> np.ndarray:
    """Returns the counts in samples: as they are, or of tokens over the sequence length. Only the
    first column, which is 0, is left of counts that can be neither."""
    seq_len, batch = record.seq_len, record.global_batch
    _, seconds, count = counts
    if len(count) == 1 or not batch:
        return counts
    steps_per_s = count[-1] / seconds[-1] / batch if seconds[-1] > 0 else 0.0
    if np.median(np.diff(count)) < batch:
        reason = f"fewer than a batch of {batch} lie between two evaluations"
    elif steps_per_s <= _OFTEN:  # possible: they are of samples
        return counts
    elif seq_len and not (count % seq_len).any():
        record.note(f"counts of samples are of tokens: {count[-1]:.0f} / {seq_len}")
        return counts / [[1], [1], [seq_len]]
    else:
        reason = (
            f"{steps_per_s:.4g} steps/s of {batch} are more than any run's: if tokens, --seq-len"
        )
    record.note(f"counts up to {count[-1]:.0f} are not of samples ({reason}): unknown")
    return counts[:, :1]


def _factor(record: Record, steps: np.ndarray, samples_per_s: float) -> float:
    """Returns what the printed step times are multiplied by to be seconds. It is found by the
    samples that were counted between evaluations, else by when the lines were written; 0 where no
    unit fits."""
    counted_s, counted_by = 0.0, "their lines' times"
    written = np.diff(np.unique(steps[3]))
    if record.global_batch and samples_per_s:
        counted_s, counted_by = record.global_batch / samples_per_s, "the counted samples"
    elif len(written):
        counted_s = float(np.median(written))
    factor, note = rate_words.scale_of(float(np.median(steps[1])), counted_s, counted_by)
    if note:
        record.note(note)
    return factor


FORMAT = Format(name="MLPerf", marks=((b":::MLLOG {",),), reader=_read)
