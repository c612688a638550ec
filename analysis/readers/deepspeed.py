"""DeepSpeed's own lines, where the training script prints nothing better.

    steps: 10 loss: 5.4321 iter time (s): 0.688 samples/sec: 743.1       (pipeline engine)
    epoch=0/micro_step=10/global_step=10, RunningAvgSamplesPerSec=173.4, CurrSamplesPerSec=171.9
    0/4, RunningAvgSamplesPerSec=16.1, CurrSamplesPerSec=15.7        0/100, SamplesPerSec=15.9
    |E2E latency=7.99s |Gather latency=0.00s ... |CurSamplesPerSec=8.01 |Avg...=8.01   (chat)
    End-to-End => Latency: 3.47s, TFLOPs: 4.02, Samples/sec: 9.22, Time/seq 0.11s      (chat)
    rank=0 time (ms) | forward: 1251.98 | backward: 509.27 | step: 5.56   (wall_clock_breakdown)

The surest kind that a log holds is read: a step time, else the current samples per second, else
the running average, which is no measurement of one step and is noted.
"""

import re

import numpy as np

from analysis.readers._endings import judge_end
from analysis.readers._lines import find_int, labelled, number, table, word
from analysis.readers._log import Log
from analysis.readers._settings import header_of, read_header, state
from analysis.readers._steps import put_steps
from analysis.readers.hf_trainer import end_lines, ends_of
from analysis.records import Record

FORMAT = "DeepSpeed"
_CHAT_MARKS = (b"|E2E latency=", b"End-to-End => Latency: ")
MARKS = ((b"SamplesPerSec=",), (b"iter time (s): ",), (_CHAT_MARKS[1],))
EMBEDDED = True
BANNERS = (b"DeepSpeed info: version",)

_PIPE = re.compile(word(b"steps: ") + rb"(?P<iteration>\d{1,9}) loss: ")
_PIPE_FIELDS = {
    "loss": labelled(rb"loss"),
    "step_s": labelled(rb"iter time \(s\)"),
    "samples_per_s": labelled(rb"samples/sec"),
}
_CHAT = re.compile(rb"(?:\|E2E latency=|End-to-End => Latency: )(?P<step_s>[\d.]{1,16})s(?: ?\||,)")
_CHAT_FIELDS = {"samples_per_s": labelled(rb"(?:CurSamplesPerSec|Samples/sec)")}
_CHAT_STEP = re.compile(rb"[Ee]poch: \d{1,6} ?\| ?[Ss]tep: \d{1,9} ?\|[^\r\n]{0,300}")
_THROUGHPUT = re.compile(
    rb"(?:(?<![\w/])\d{1,9}/|micro_step=\d{1,9}/global_step=)(?P<iteration>\d{1,9}), "
    rb"(?=(?:RunningAvg)?SamplesPerSec=)"
)
_THROUGHPUT_FIELDS = {
    "samples_per_s": labelled(rb"CurrSamplesPerSec"),
    "running": labelled(rb"(?:RunningAvg)?SamplesPerSec"),
}
_SKIPPED = re.compile(rb"\] step=(\d{1,9}), skipped=(\d{1,9}),")
_TIMERS = re.compile(rb"time \(ms\) \| ([^\r\n]{1,600})")
_TIMER = re.compile(rb"(\w{1,60}): ([\d.]{1,16})")
_WORLD = re.compile(rb"(?:dist_world_size=|>>> world_size ?= ?)(\d{1,6})")


def read(log: Log) -> Record:
    """Read one log; without a step line the arrays are empty."""
    record = Record(source=str(log.path), format=FORMAT, engine=FORMAT)
    columns, offsets = table(log, _PIPE, _PIPE_FIELDS)
    if not len(offsets) and any(log.contains(mark) for mark in _CHAT_MARKS):
        columns, offsets = _chat(log, record)
        record.extra["kind"] = "DeepSpeed-Chat step 3: a step generates and trains"
    if not len(offsets):
        columns, offsets = table(log, _THROUGHPUT, _THROUGHPUT_FIELDS)
        if len(offsets) and np.isnan(columns["samples_per_s"]).all():
            columns["samples_per_s"] = columns["running"]
            record.extra["running_average"] = True
            record.notes.append("samples per second are running averages, not single steps")
        if len(offsets):
            record.notes.append("no step time is printed, only samples per second")
    header = header_of(log, int(offsets[0]) if len(offsets) else None)
    offsets = put_steps(record, columns, offsets, log)
    state(record, {"gpus": find_int(_WORLD, header)}, "log")
    read_header(record, header)
    if timers := _timers(log):
        record.extra["timers_s"] = timers
    if skipped := [int(match[2]) for _, match in log.matches(_SKIPPED)]:
        record.extra["skipped_steps"] = max(skipped)
    if ends := ends_of(log):  # the engine under HF's Trainer
        end_lines(record, [match for _, match in ends])
        record.completed = True
    if offsets and (said := log.last(b"exits successfully", offsets[-1])) is not None:
        record.completed = True  # the launcher's word for every rank
        record.extra["last_at"] = said
    judge_end(record, log, offsets)
    return record


def _chat(log: Log, record: Record) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A line for each step, which carries no number: the line of losses above it tells it from a
    line that was printed twice."""
    columns, offsets = table(log, _CHAT, _CHAT_FIELDS)
    steps = [(at, match[0]) for at, match in log.matches(_CHAT_STEP)]
    above = np.searchsorted([at for at, _ in steps], offsets) - 1
    seen: dict[tuple, int] = {}
    for i, at in enumerate(above.tolist()):
        key = (steps[at][1], columns["step_s"][i]) if at >= 0 else (i,)
        seen.setdefault(key, i)
    keep = np.array(list(seen.values()), int)
    if dropped := len(offsets) - len(keep):
        record.notes.append(f"{dropped} duplicate lines dropped")
    columns = {name: values[keep] for name, values in columns.items()}
    columns["iteration"] = np.arange(1.0, len(keep) + 1)
    return columns, offsets[keep]


def _timers(log: Log) -> dict[str, float]:
    """Mean seconds of each wall_clock_breakdown timer."""
    sums: dict[str, list[float]] = {}
    if not log.contains(b"time (ms) | "):
        return {}
    for _, match in log.matches(_TIMERS):
        for name, value in _TIMER.findall(match[1]):
            total = sums.setdefault(name.decode(), [0.0, 0])
            total[0] += number(value) / 1000
            total[1] += 1
    return {name: total / n for name, (total, n) in sums.items()}
