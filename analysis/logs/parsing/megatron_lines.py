"""Megatron's iteration line: fields between bars.

    iteration        7/    1000 | consumed samples: 7168 | elapsed time per iteration (ms): 128.9 |

A log has few kinds of lines. The first line of a kind makes a regular expression that reads its
numbers; it is then tried on all of a block at once. float() reads each number; what it cannot read
(`current/average`, `13.3TFLOPS`) is read by `leading_number`.
"""

import re
from typing import NamedTuple

import numpy as np

from analysis.logs.parsing.fields import SIGNED, is_nan, leading_number
from analysis.logs.parsing.logfile import Log

# The columns, by how their labels begin: `lm loss`, `lm-loss` and `lm_loss` are one.
_LABEL = re.compile(
    rb"""[ ]?(?:
    (?P<step_s>elapsed[ _-]time[ _-]per[ _-]iteration) |
    (?P<loss>lm[ _-]loss[ ]?[ :=]) |
    (?P<grad_norm>grad[ _-]norm) |
    (?P<tflops>throughput[ _]per[ _]gpu | (?:\[LM\])?TFLOPs | approx[ _]flops) |
    (?P<samples_per_s>samples[ _]per[ _]second) |
    (?P<tokens_per_s_per_gpu>tokens[ _]per[ _]gpu | tokens-per-second-per-gpu) |
    (?P<skipped>number[ _]of[ _]skipped) |
    (?P<nan>number[ _]of[ _]nan) |
    (?P<global_batch>global[ _]batch) |
    (?P<seq_len>actual[ _]seqlen)
    )""",
    re.VERBOSE | re.IGNORECASE,
)
_ITERATION = rb"iteration[ :=]{1,16}(\d{1,12})[ \t]{0,16}/[ \t]{0,16}(\d{1,12})[ \t]{0,16}\|"
_SAMPLES = rb"samples/sec: {1,3}([\d.]{1,20}) ?\| {0,4}"  # GPT-NeoX opens its lines with it
_START, _BEFORE = re.compile(_ITERATION), re.compile(_SAMPLES + rb"\Z")
_NUMBER = re.compile(rb"(?i)(?:(?<!\{)[:=]|(?<=loss)(?= ))" + SIGNED)  # 2020: `loss 9.1`
COLUMNS = ("iteration", "planned", *_LABEL.groupindex, "nan_loss")
_AT_MOST, _LONGEST = 4, 4096  # fields between the iteration and its time; bytes of a line


class _Kind(NamedTuple):
    """Lines with the same labels; names: the column of each group; per_second: 1000 for ms."""

    pattern: re.Pattern[bytes]
    names: tuple[str, ...]
    per_second: float


def scan(log: Log) -> tuple[dict[str, np.ndarray], np.ndarray, int, list[int]]:
    """(columns, where in the file each line is, how many times are current/average, where lines
    begin that were not read) of a log.

    columns: COLUMNS' values for each iteration line in file order, NaN where a line lacks it;
    step_s in seconds, nan_loss 1 where the loss was printed as NaN.
    """
    dtype = np.float32 if log.size > 512 << 20 else np.float64  # half the memory
    parts: dict[str, list[np.ndarray]] = {name: [np.empty(0, dtype)] for name in COLUMNS}
    offsets, pairs = [np.empty(0, np.int64)], 0
    kinds: list[_Kind] = []
    missed: list[int] = []
    for at, block in log.blocks(size=1 << 18):  # fits a core's cache
        if not (times := block.count(b"elapsed")):
            continue
        if b"\x1b" in block:  # spaces where colours are, so that every byte stays where it is
            block = re.sub(rb"\x1b\[[0-9;]{0,24}m", lambda match: b" " * len(match[0]), block)
        left: list[int] = []
        found = [_columns(*item) for item in _by_kind(block, times, kinds, left).items()]
        missed += [at + start for start in left]
        order = np.argsort(place := np.concatenate([c["place"] for c in found] or offsets[:1]))
        offsets.append(place[order].astype(np.int64) + at)
        pairs += sum(int(columns["pairs"].sum()) for columns in found)
        for name in COLUMNS if found else ():
            values = [c.get(name, np.full(len(c["place"]), np.nan)) for c in found]
            parts[name].append(_packed(np.concatenate(values)[order], dtype))
            if len(parts[name]) > 500:  # thousands of small arrays would leave holes in memory
                parts[name] = [_packed(np.concatenate(parts[name]), dtype)]
        if len(offsets) > 500:
            offsets = [np.concatenate(offsets)]
    joined = {name: _packed(np.concatenate(parts.pop(name)), dtype) for name in COLUMNS}
    return joined, np.concatenate(offsets), pairs, missed


def _packed(values: np.ndarray, dtype: type) -> np.ndarray:
    """The values, in the memory of one where all are the same."""
    if len(values) and ((values == values[0]).all() or np.isnan(values).all()):
        return np.broadcast_to(values[:1].astype(dtype), len(values))
    return values.astype(dtype, copy=False)


def _by_kind(
    block: bytes, times: int, kinds: list[_Kind], missed: list[int]
) -> dict[_Kind, list[re.Match[bytes]]]:
    """The block's lines by their kind; `kinds` are those met so far, the usual one first. Where a
    line of no kind begins is added to `missed`."""
    if kinds:
        matches = list(kinds[0].pattern.finditer(block))
        if len(matches) == times:  # else there is another kind, or one ran into the next line
            return {kinds[0]: matches}
    found: dict[_Kind, list[re.Match[bytes]]] = {}
    starts = list(_START.finditer(block))
    for start, following in zip(starts, [*starts[1:], None], strict=False):
        begin, end = start.start(), following.start() if following else len(block)
        text = re.split(rb"[\r\n]", block[start.end() : min(end, start.end() + _LONGEST)])[0]
        before = _BEFORE.search(block, max(begin - 60, 0), begin)
        begin, end = before.start() if before else begin, start.end() + len(text)
        fits = ((kind, kind.pattern.match(block, begin, end)) for kind in kinds)
        kind, match = next((pair for pair in fits if pair[1]), (None, None))
        if match is None and (kind := _kind(text, bool(before))):
            if match := kind.pattern.match(block, begin, end):
                kinds.append(kind)
        if match:
            found.setdefault(kind, []).append(match)
        else:
            missed.append(start.start())
    kinds.sort(key=lambda kind: -len(found.get(kind, ())))
    del kinds[64:]  # more are not remembered from block to block
    return found


def _kind(text: bytes, samples: bool) -> _Kind | None:
    """The kind of the line whose text behind `iteration N/ M |` this is; None without a time."""
    pattern, names = _SAMPLES * samples + _ITERATION, ["samples_per_s"] * samples
    names, per_second = [*names, "iteration", "planned"], 1000.0
    for place, piece in enumerate(text.split(b"|")[:-1]):  # behind the last bar it may be cut
        label = _LABEL.match(piece)
        number = _NUMBER.search(piece[:120]) if label else None
        name = label.lastgroup if number else None
        if name in (None, *names) or (name == "step_s" and place > _AT_MOST):
            # Its first bytes tell this kind of line from others that have a column here.
            pattern += re.escape(piece[:3])
            pattern += rb"[^|]*+\|" if "step_s" in names else rb"[^|\r\n]*+\|"
            continue
        pattern += re.escape(piece[: number.start() + 1]) + rb"([^|]*+)\|"
        names.append(name)
        per_second = 1.0 if name == "step_s" and re.match(rb".{27,28}\(?s", piece) else per_second
    if "step_s" not in names:
        return None
    return _Kind(re.compile(pattern + rb"[^|\r\n]{0,400}+(?!\|)"), tuple(names), per_second)


def _columns(kind: _Kind, matches: list[re.Match[bytes]]) -> dict[str, np.ndarray]:
    """The lines' numbers by column, their `place` in the block, and `pairs`: current/average."""
    columns = {"place": np.array([match.start() for match in matches], float)}
    columns["pairs"] = np.zeros(len(matches))
    groups = zip(*[match.groups() for match in matches], strict=True)
    for name, texts in zip(kind.names, groups, strict=True):
        same = texts.count(texts[0]) == len(texts)
        try:
            numbers = list(map(float, texts[:1] if same else texts))
        except ValueError:
            numbers, behind = zip(*map(leading_number, texts), strict=True)
            columns["pairs"] += [name == "step_s" and unit == b"/" for unit in behind]
        columns[name] = np.array(numbers) if len(numbers) > 1 else np.full(len(texts), numbers[0])
        if name == "loss" and np.isnan(columns["loss"]).any():
            columns["nan_loss"] = np.array(list(map(is_nan, texts)), float)
    columns["step_s"] /= kind.per_second
    timed = ~np.isnan(columns["step_s"])
    return {name: values[timed] for name, values in columns.items()}
