"""Megatron-LM from 2020 to today, and those that print its iteration line: Megatron-DeepSpeed,
GPT-NeoX, Megatron-Bridge and our own engines.

     iteration        1/    1000 | elapsed time per iteration (ms): 121899.8 | learning rate: ...
     iteration=       4/  317892 | consumed_samples= 3072 | elapsed_time_per_iteration_ms=49871.4 |
     samples/sec: 206.693 | iteration        1/     512 | elapsed time per iteration (ms): 2477.1 |

All have fields between bars, in any order: one expression reads a line. A field counts when its bar
is behind it, for a number without may be cut.
"""

import math
import re
from collections import Counter
from typing import NamedTuple

import numpy as np

from analysis.logs.parsing.fields import is_nan, lone_number
from analysis.logs.parsing.line_format import Columns, LineFormat
from analysis.logs.parsing.lines import LINE
from analysis.logs.parsing.logfile import Log
from analysis.logs.parsing.setting_names import header_of
from analysis.logs.record import Record

# Tool -> what only it prints: in an iteration line, or before training. A fork's line may hold
# `samples/sec:`, but only GPT-NeoX's begins with it.
_TOOLS = (
    ("GPT-NeoX", rb"approx flops per GPU|samples/sec: [^|]{1,30}\| {0,4}iteration", rb"NeoXArgs"),
    (
        "Megatron-DeepSpeed",
        rb"consumed tokens:|consumed_tokens=|\| TFLOPs:|samples per second:",
        rb"DeepSpeed info: version|DeepSpeedEngine|deepspeed.initialize",
    ),
)
_TIME = rb"elapsed[ _-]time[ _-]per[ _-]iteration[ _]?\(?%b\b[^|:=\r\n]*+[:=]"
_LABELS = {
    "ms": _TIME % b"ms",
    "step_s": _TIME % b"s",
    "loss": rb"lm[ _-]loss[ ]?[ :=]",  # `lm loss 9.1` in 2020
    "grad_norm": rb"grad[ _-]norm[^|:=\r\n]*+[:=]",
    "tflops": rb"(?:throughput[ _]per[ _][gG]|(?:\[LM\])?TFLOPs|approx[ _]flops)[^|:=\r\n]*+[:=]",
    "samples_per_s": rb"samples[ _]per[ _]second[^|:=\r\n]*+[:=]",
    "tokens_per_s_per_gpu": rb"tokens(?:[ _]per[ _](?i:gpu)|-per-second-per-gpu)[^|:=\r\n]*+[:=]",
    "skipped": rb"number[ _]of[ _]skipped[^|:=\r\n]*+[:=]",
    "nan": rb"number[ _]of[ _]nan[^|:=\r\n]*+[:=]",
    "global_batch": rb"global[ _]batch[^|:=\r\n]*+[:=]",
    "seq_len": rb"actual[ _]seqlen[^|:=\r\n]*+[:=]",
}
_VALUE = rb"([^|\r\n]*+)"
_FIELD = rb"[ ]?(?:%b)" % b"|".join(label + _VALUE for label in _LABELS.values())
_OTHER = rb"[^|/\r\n]*+(?:/(?![ ]*\d+[ ]*\|)[^|/\r\n]*+)*+"  # not the next line's `iteration 2/9 |`
_HEAD = rb"iteration[ :=]{1,16}+(\d{1,12})[ \t]{0,16}+/[ \t]{0,16}+(\d{1,12})[ \t]{0,16}+\|"
_RATE_BEFORE = rb"samples/sec: {1,3}([\d.]{1,20}) ?\| {0,4}"
_NEOX = rb"(?:%b)?" % _RATE_BEFORE
_COLOUR = re.compile(rb"\x1b\[[0-9;]{0,24}m")
_PEAK = re.compile(
    rb"\(after \d{1,9} iterations\) memory \(MB\) [^\r\n]{1,80}max allocated: ([\d.]{1,24})"
    rb"(?= {0,2}\|)"
)
_SOON = 1 << 20  # bytes behind the first iteration, in which it prints its memory
_DONE = (b"[after training is done]", b"[exiting program at iteration", b"training finished")


class _Lines(NamedTuple):
    """The timed lines of a block, and the columns that the groups of their matches are."""

    matches: list[re.Match[bytes]]
    columns: list[str]


def _lines(block: bytes) -> _Lines:
    """Returns the timed lines of a block. Most blocks have lines of one kind, so an expression of
    the first line's labels is tried: it is quicker than one of all labels."""
    head, columns = _HEAD, ["iteration", "planned"]
    at = block.find(b"elapsed")
    if b"samples/sec: " in block[block.rfind(b"\n", 0, at) + 1 : at]:  # GPT-NeoX's lines
        head, columns = _NEOX + _HEAD, ["samples", *columns]
    fields = rb"(?:(?:" + _FIELD + rb"|" + _OTHER + rb")\|)++"
    timed = len(columns) + 1, len(columns) + 2
    matches = (match for match in re.finditer(head + fields, block) if any(match.group(*timed)))
    first = next(matches, None)
    if first and len(first[0]) <= LINE:
        # An expression that begins with what is there in any case is found sooner.
        pattern, labels = head.replace(_NEOX, _RATE_BEFORE) if first[1] else head, []
        for field in block[first.end(len(columns)) : first.end()].split(b"|")[1:-1]:
            if found := re.match(_FIELD, field):
                labels.append(list(_LABELS)[found.lastindex - 1])
                pattern += re.escape(field[: found.start(found.lastindex)]) + _VALUE + rb"\|"
            else:
                pattern += re.escape(re.match(rb"[^:=]*[:=]?", field)[0]) + _OTHER + rb"\|"
        all_alike = list(re.finditer(pattern + rb"(?![^|\r\n]*\|)", block))
        if len(all_alike) == block.count(b"elapsed"):
            return _Lines(all_alike, columns + labels)
    return _Lines([first, *matches] if first else [], [*columns, *_LABELS])


def scan(log: Log, record: Record) -> Columns:
    """Returns the columns of all iteration lines in file order, NaN where a line lacks one. at:
    where the line begins; nan_loss: 1 where NaN was printed as the loss."""
    names = ("iteration", "planned", *_LABELS, "nan_loss", "at")
    parts: dict[str, list[np.ndarray]] = {name: [np.empty(0)] for name in names}
    n_averages, unreadable = 0, Counter()
    for at, block in log.blocks():
        if b"elapsed" not in block:
            continue
        if b"\x1b" in block:  # spaces where colours are, so that every byte stays where it is
            block = _COLOUR.sub(lambda match: b" " * len(match[0]), block)
        lines = _lines(block)
        if not lines.matches:
            continue
        groups = zip(*(match.groups(b"") for match in lines.matches), strict=True)
        texts = dict(zip(lines.columns, groups, strict=True))
        columns = dict.fromkeys(names, np.full(len(lines.matches), np.nan))
        columns |= {name: _numbers(values) for name, values in texts.items()}
        if "samples" in columns:
            columns["samples_per_s"] = columns["samples"]
        columns["nan_loss"] = np.zeros(len(lines.matches))
        for name in texts.keys() & _LABELS.keys():
            if np.isnan(columns[name]).any():
                unreadable[name] += sum(map(_is_none, texts[name]))
        if "loss" in texts and np.isnan(columns["loss"]).any():
            columns["nan_loss"] = np.array(list(map(is_nan, texts["loss"])), float)
        for name in texts.keys() & {"ms", "step_s"}:
            n_averages += b"".join(texts[name]).count(b"/")
        columns["at"] = np.array([at + match.start() for match in lines.matches])
        timed = ~(np.isnan(columns["ms"]) & np.isnan(columns["step_s"]))
        for name in names:
            parts[name].append(columns[name][timed])
    if n_averages:
        record.note(f"{n_averages} values print current/average: the current one is used")
    record.doubt_numbers(unreadable)
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def _is_none(text: bytes) -> bool:
    """Returns whether something is printed that is neither a number nor NaN."""
    return bool(text.strip()) and math.isnan(lone_number(text)) and not is_nan(text)


def _numbers(texts: tuple[bytes, ...]) -> np.ndarray:
    """Returns a column's numbers. Most columns of a block hold one value, which is read once."""
    is_constant = texts[0] == texts[-1] and texts.count(texts[0]) == len(texts)
    distinct = texts[:1] if is_constant else texts
    try:
        numbers = np.fromiter(map(float, distinct), float, len(distinct))
    except ValueError:  # one is missing, `current/average` or `13.3TFLOPS`
        numbers = np.array([lone_number(text) for text in distinct])
    return np.broadcast_to(numbers, len(texts))


def _scan(log: Log, record: Record) -> Columns:
    """Returns the columns of the iteration lines. Fills what they and the lines behind the first
    one say of the run: the tool, how many iterations had a loss of NaN, and the peak of memory."""
    columns = scan(log, record)
    nan_counts = columns["nan"]
    record.nan_iterations = int(nan_counts[np.isfinite(nan_counts)].sum())
    batches = columns["global_batch"][np.isfinite(columns["global_batch"])]
    if len(batches) and (batches != batches[-1]).any():
        record.note(f"the global batch grows from {batches[0]:.0f} to {batches[-1]:.0f}")
    line, first = b"", None
    if len(columns["at"]):
        first = int(columns["at"][0])
        line = log.slice(first - 400, first).rpartition(b"\n")[2]
        line += log.slice(first, first + 1500).partition(b"\n")[0]
        if peaks := _PEAK.findall(log.slice(first, first + _SOON)):
            record.peak_bytes = int(max(map(float, peaks)) * 2**20)
    header = header_of(log, first)
    if b"reserve_length:" in line or b"Loading extension module token_dropping" in header:
        record.uncounted.append("layers that drop tokens (random-LTD)")
    record.format = record.engine = _tool(header, line)
    return columns


def _tool(header: bytes, line: bytes = b"") -> str:
    """Returns which tool wrote the log, by the text before training and an iteration line (or
    nothing)."""
    for name, in_line, in_header in _TOOLS:
        if re.search(in_line, line) or re.search(in_header, header):
            return name
    return "Megatron-LM"


def _finish(record: Record, log: Log) -> None:
    """Sets `completed` of a run that is not known to have taken its planned steps: None where its
    last words say that training is done, else False."""
    if len(record.steps) and not record.completed:
        tail = log.slice(record.last_at, record.last_at + (1 << 16))
        record.completed = None if any(done in tail for done in _DONE) else False


FORMAT = LineFormat(
    name="Megatron-LM",
    marks=((b"elapsed time per iteration (",), (b"elapsed_time_per_iteration_ms=",)),
    banners=(
        b"using world size:",
        b"> initializing torch distributed",
        b"NeoXArgs.configure_distributed_args()",
        b"> padded vocab (size:",
    ),
    starts=(b"using world size:", b" arguments ---", b" micro-batches of "),  # the last: ours
    scan=_scan,
    averages=True,
    finish=_finish,
)
