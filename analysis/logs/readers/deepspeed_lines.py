"""DeepSpeed's own lines, where the training script prints nothing better.

    steps: 10 loss: 5.4321 iter time (s): 0.688 samples/sec: 743.1       (pipeline engine)
    epoch=0/micro_step=10/global_step=10, RunningAvgSamplesPerSec=173.4, CurrSamplesPerSec=171.9
    0/4, RunningAvgSamplesPerSec=16.1, CurrSamplesPerSec=15.7        0/100, SamplesPerSec=15.9
    |E2E latency=7.99s |Gather latency=0.00s ... |CurSamplesPerSec=8.01 |Avg...=8.01   (chat)
    End-to-End => Latency: 3.47s, TFLOPs: 4.02, Samples/sec: 9.22, Time/seq 0.11s      (chat)

The surest kind that a log holds is read: a step time, else the current samples per second, else
the running average, which is no measurement of one step and is noted.
"""

import re

import numpy as np

from analysis.logs.parsing.fields import labelled, word
from analysis.logs.parsing.line_format import Format
from analysis.logs.parsing.lines import Columns, Line
from analysis.logs.parsing.logfile import Log
from analysis.logs.parsing.model_names import read_name
from analysis.logs.parsing.setting_names import state
from analysis.logs.readers.hf_trainer import deepspeed_ranks, once, read_ends
from analysis.logs.record import Record

_PIPE = re.compile(word(b"steps: ") + rb"(?P<iteration>\d{1,9}) loss: ")
_PIPE_FIELDS = {
    "loss": labelled(rb"loss"),
    "step_s": labelled(rb"iter time \(s\)"),
    "samples_per_s": labelled(rb"samples/sec"),
}
_CHAT = tuple(
    re.compile(label + rb"(?P<step_s>[\d.]{1,16})s(?: ?\||,)")
    for label in (rb"\|E2E latency=", b"End-to-End => Latency: ")
)
_CHAT_FIELDS = {"samples_per_s": labelled(rb"(?:CurSamplesPerSec|Samples/sec)")}
_CHAT_STEP = re.compile(rb"poch: (?<=[Ee]poch: )\d{1,6} ?\| ?[Ss]tep: \d{1,9} ?\|[^\r\n]{0,300}")
_RATE = rb"(?P<iteration>\d{1,9}), (?=(?:RunningAvg)?SamplesPerSec=)"
_THROUGHPUT = tuple(
    re.compile(counted + _RATE)
    for counted in (rb"/global_step=(?<=\d/global_step=)", rb"/(?<=\d/)")
)
_THROUGHPUT_FIELDS = {
    "samples_per_s": labelled(rb"CurrSamplesPerSec"),
    "running": labelled(rb"(?:RunningAvg)?SamplesPerSec"),
    "peak_gib": labelled(rb"MaxMemAllocated", unit=rb"GB"),
}


def _throughput(columns: Columns, record: Record, log: Log) -> Columns:
    """Returns the columns of the throughput timer's lines, which print samples per second alone."""
    if len(columns["at"]):
        if np.isnan(columns["samples_per_s"]).all():
            columns["samples_per_s"] = columns["running"]
            record.running_average = True
            record.note("samples per second are running averages, not single steps")
        record.note("no step time is printed, only samples per second")
    return columns


_PRETRAINED = re.compile(rb"--model_name_or_path[= ]{1,3}([\w./~-]{2,200})")


def _model(record: Record, columns: Columns, header: bytes) -> None:
    """Fills the GPUs and the model by its name, and notes what makes a step more or less than a
    model's."""
    if record.gpus is None:
        state(record, {"gpus": deepspeed_ranks(header)}, "log")
    for name in _PRETRAINED.findall(header)[-1:]:
        read_name(record, name.decode())
    if b"'consume layer-tokens':" in header:  # its seq_len is what a layer keeps
        record.seq_len = None
        record.uncounted.append("layers that drop tokens (random-LTD)")
    if b"--actor_model_name_or_path" in header:
        record.uncounted.append("a critic beside it, and generates text in a step")
    if b"***** Evaluating reward" in header and record.seq_len:
        record.seq_len *= 2
        record.note("a reward model's sample is two sequences: seq_len counts both")


def _finish(record: Record, log: Log) -> None:
    """Sets whether the run completed: by an end line of Hugging Face's Trainer, or the launcher's
    last word."""
    record.completed = bool(read_ends(record, log)) or None  # the engine under HF's Trainer
    if len(record.steps):  # the launcher says so for every rank
        for at in log.places(FORMAT.done[:1], record.last_at):
            record.completed, record.last_at = True, at


def _chat(columns: Columns, record: Record, log: Log) -> Columns:
    """Returns DeepSpeed-Chat's columns. Its line of a step carries no number, so the line of losses
    above it tells it from a line that was printed twice."""
    if not len(columns["at"]):
        return columns
    steps = [(at, match[0]) for at, match in log.matches(_CHAT_STEP)]
    above = np.searchsorted([at for at, _ in steps], columns["at"]) - 1
    times = zip(above.tolist(), columns["step_s"], strict=True)
    keys = [(steps[step][1], step_s) if step >= 0 else i for i, (step, step_s) in enumerate(times)]
    return once(columns, keys, record)


FORMAT = Format(
    name="DeepSpeed",
    marks=((b"SamplesPerSec=",), (b"iter time (s): ",), (b"End-to-End => Latency: ",)),
    starts=(b"DeepSpeed info: version",),
    done=(b"exits successfully", b"{'train_runtime'"),
    counts_per_epoch=True,
    embedded=True,
    lines=(  # the surest first
        Line(_PIPE, _PIPE_FIELDS),
        *(Line(start, _CHAT_FIELDS, _chat) for start in _CHAT),
        *(Line(start, _THROUGHPUT_FIELDS, _throughput) for start in _THROUGHPUT),
    ),
    facts={"gpus": rb"(?:dist_world_size=|>>> world_size ?= ?)(\d{1,6})"},
    prepare=_model,
    finish=_finish,
)
