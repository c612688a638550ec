"""MLPerf's log lines: `:::MLLOG {"key": "tracked_stats", "value": {...}, "metadata": {...}}`.

A result is timed from run_start to run_stop; evaluations are marked inside. Some logs time each
step (tracked_stats). Of the others an entry is the mean over the steps between two evaluations, by
the samples that were counted there. Neither a throughput nor a count has a unit in these logs:
parsing/rates.py says which one agrees with time, batch and sequence length.
"""

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from analysis.logs.parsing import rate_words
from analysis.logs.parsing.endings import judge_end
from analysis.logs.parsing.json_values import is_nan, known, mapping, real, sequence, text, whole
from analysis.logs.parsing.line_format import Format
from analysis.logs.parsing.logfile import Log
from analysis.logs.parsing.model_names import read_name
from analysis.logs.parsing.setting_names import header_of, read_header, state
from analysis.logs.parsing.steps import put_steps
from analysis.logs.record import PER_STEP, Failure, Record, Submission
from base.files import parse_json
from parallel.config.axes import SET_AXES

# In 2018 the time and the key stood before the JSON object.
_OLD_LINE = re.compile(rb":::MLL (\d{1,12}\.\d{1,9}) (\w{1,60}): (\{[^\r\n]{1,20000}\})")
_END = re.compile(rb"[\r\n]|:::MLL")
_FAR, _LONGEST = 600, 1 << 20  # bytes from a line's mark to its key, and to its end
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
}
# tensor_parallelism, pipeline_model_parallel_size ...
_SPLITS = {"tensor": "tp", "pipeline": "pp", "context": "cp", "virtual_pipeline": "vpp"}
_FACTS |= {
    f"{split}{model}_parallel{end}": name
    for split, name in _SPLITS.items()
    for model in ("", "_model")
    for end in ("", "ism", "_size", "ism_size")
}
_NODES = ("number_of_nodes", "accelerators_per_node")  # of one run, by the rules of MLPerf HPC
_ABOUT = {"submission_org": "submitter", "submission_division": "division"}
_ABOUT |= {"submission_platform": "platform", "submission_benchmark": "benchmark"}
_MARKS = ("init_start", "init_stop", "run_start", "run_stop")
_TIMES = ("block_start", "block_stop", "eval_start", "eval_stop", "eval_accuracy")
_COUNTS = ("train_samples", "trained_samples")
_LOSSES = ("train_loss", "eval_loss")
# Of an argument dump; the batch and the steps there are of one GPU, or a limit.
_SETTINGS = (*SET_AXES, "micro_batch", "seq_len", "precision", "recompute")
_PRECISION = "lowest_numerical_precision_in_linear"
_WANTED = {*_FACTS, *_ABOUT, *_MARKS, *_TIMES, *_COUNTS, *_LOSSES, *_NODES, _PRECISION}
_WANTED |= {"tracked_stats"}
# `train_step_timing in s`, `train_step_time_ms`, `iteration_time`, `time_per_step (s)`
_STEP_TIME = re.compile(
    r"(?:(?:avg|average|mean|median|train|training)[ _]){0,2}"
    r"(?:(?:step|iter|iteration)[ _](?:tim(?:e|ing)|duration)|time[ _]per[ _](?:step|iteration))"
    r"(?:[ _]{0,2}[(]?(?:in[ _])?(s|sec|secs|seconds|ms|msec|milliseconds|us)[)]?)?$",
    re.IGNORECASE,
)
_PER_SECOND = {"m": 1e3, "u": 1e6}  # by a unit's first letter
_RATE = re.compile(
    r"(?:train(?:ing)?_)?(?:throughput|(?:samples|sequences|tokens)_per_s(?:ec(?:ond)?)?)"
    r"(?:_per_(?:gpu|device|accelerator))?$"
)
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_WANTED_KEY = re.compile(
    rb'"key": {0,4}"([a-z_]{0,24}(?:step|iter|iteration)_(?:tim|dur)[^"]{1,24}|time_per_[^"]{1,24}'
    rb'|%b)"' % "|".join(sorted(_WANTED)).encode()
)

# The benchmark's rules fix the model and the length of its sequences: (our name of it, tokens).
_BENCHMARKS = {
    "gpt3": ("gpt3-175b", 2048),
    "llama2_70b_lora": ("llama2-70b", 8192),
    "llama31_405b": ("llama3-405b", 8192),
    "llama31_8b": ("llama3-8b", 8192),
    "deepseek_v3_671b": (None, 4096),  # experts: no convention here counts their FLOPs
    "deepseekv3_671b": (None, 4096),
    "gpt_oss_20b": (None, 8192),
}
# Their `epoch_num` counts epochs; elsewhere it counts samples or tokens.
_EPOCHS = ("resnet", "ssd", "unet3d", "maskrcnn", "rnnt", "gnn", "dlrm", "minigo", "transformer")
UNMARKED = "evaluations are not marked: the times hold them"
_OFTEN = 20  # steps a second that no run of these benchmarks makes: the count was of tokens
_EPOCH_S = (1e9, 1e10)  # seconds since 1970, of the years 2001 to 2286
_LATE_S = 60.0  # ranks that print one mark do so within it


@dataclass
class _Clock:
    """Seconds of training since run_start: evaluations, and all between two blocks, left out."""

    started: float
    idle_s: float = 0.0
    since: float | None = None  # when training stopped for an evaluation
    in_block: bool = True
    evaluations: int = 0  # that are marked
    blocks: int = 0
    steps_inside: int = 0  # that were timed during evaluations

    def see(self, key: str, now: float) -> None:
        """A mark of a block or an evaluation."""
        if key in ("block_stop", "eval_start"):
            self.since = now if self.since is None else self.since
            self.in_block = self.in_block and key != "block_stop"
            self.evaluations += key == "eval_start"
            self.blocks += key == "block_stop"
        elif key == "block_start" or (key == "eval_stop" and self.in_block):
            self.in_block = True
            if self.since is not None:
                self.idle_s += now - self.since
                self.since = None

    def trained(self, now: float) -> float:
        return (now if self.since is None else self.since) - self.started - self.idle_s

    @property
    def overlaps(self) -> bool:
        """Whether training goes on while another part of the machine evaluates. A step's line may
        come late: one in each evaluation is none of it."""
        return self.steps_inside > 2 * self.evaluations > 0


@dataclass
class _Found:
    """What the lines say, in their order. times: (offset, seconds, count, when); counts: (offset,
    seconds of training, seconds since run_start, count, whether it is surely of samples), growing.
    rates: by their key."""

    clock: _Clock | None = None
    marks: dict[str, float] = field(default_factory=dict)
    status: str | None = None
    start_at: int | None = None  # offsets of run_start and run_stop
    end_at: int = 0
    rates: dict[str, list[float]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    times: list[tuple[int, float, int, float]] = field(default_factory=list)
    counts: list[tuple[int, float, float, int, bool]] = field(default_factory=list)

    def count(self, offset: int, now: float, n: int | None, sure: bool) -> None:
        if self.clock and n and n > (self.counts[-1][3] if self.counts else 0):
            trained_s = self.clock.trained(now)
            self.counts.append((offset, trained_s, now - self.clock.started, n, sure))

    def starts_again(self, now: float) -> bool:
        """Whether a run_start at `now` is another run's, and not another rank's."""
        return self.clock is not None and now - self.clock.started > _LATE_S


def _read(log: Log, record: Record) -> None:
    """Read one result log. What it says of the whole run is in `totals` and `submission`."""
    about = record.submission = Submission()
    found, hashed = _Found(), hashlib.sha256()
    nodes: dict[str, int | None] = {}
    for offset, key, value, now, metadata in _entries(log, record):
        if key == "run_start" and found.starts_again(now):
            line = log.line_no(offset)
            if "run_stop" in found.marks:
                record.notes.append(f"line {line}: another run_start: the first run is read")
                break
            record.notes.append(f"line {line}: run_start again, without a run_stop: read from here")
            found, hashed = _Found(), hashlib.sha256()
        if key in _ABOUT:
            setattr(about, _ABOUT[key], text(value) or "")
        elif key in _FACTS and (fact := whole(value)) is not None and fact > 0:
            state(record, {_FACTS[key]: fact}, "log")
        elif key in _NODES:
            nodes[key] = whole(value)
        elif key == _PRECISION and (word := text(value)):
            state(record, {"precision": _PRECISIONS.get(word.lower(), word.lower())}, "log")
        else:
            _see(found, offset, key, value, now, metadata)
        if found.clock:
            hashed.update(f"{now:.3f} {key} {value}\n".encode())
    if found.clock is None:
        found.clock = _Clock(math.nan)
    else:
        record.whole_run = True
        record.evidence = hashed.hexdigest()
    if all(nodes.get(name) for name in _NODES):
        state(record, {"gpus": math.prod(nodes[name] for name in _NODES)}, "log")
    _settings(record, log, found)
    _benchmark(record, about.benchmark)
    ends = _steps(record, log, found)
    if found.losses:
        record.totals["loss"] = found.losses[-1]
        record.nan_iterations = sum(map(math.isnan, found.losses))
    record.completed = found.status == "success"
    if found.end_at:
        record.last_at = found.end_at
    judge_end(record, log, [found.end_at] if found.end_at else ends)
    if record.failure is None and found.status not in (None, "success"):
        said = f"run_stop status: {found.status}"
        record.failure = Failure("stopped early", log.line_no(found.end_at), said)
    elif record.failure and record.failure.kind == "launcher":
        record.failure = None


def _see(
    found: _Found, offset: int, key: str, value: Any, now: float, metadata: dict[str, Any]
) -> None:
    """One line that tells a time, a count or a result."""
    if key in _MARKS and key not in found.marks:
        found.marks[key] = now
        if key == "run_start":
            found.clock, found.start_at = _Clock(now), offset
        elif key == "run_stop":
            said = text(metadata.get("status")) or text(mapping(value).get("status"))
            found.status, found.end_at = said and said.lower(), offset
    elif key in _LOSSES and (is_nan(value) or known(value) is not None):
        found.losses.append(real(value))
    elif key == "tracked_stats" or _STEP_TIME.match(key):
        stats = mapping(value) if key == "tracked_stats" else {key: value}
        for name, said in stats.items():
            if _RATE.match(name) and (rate := known(said)) is not None:
                found.rates.setdefault(name, []).append(rate)
        n = next((n for k in ("step", "samples_count") if (n := whole(metadata.get(k)))), 0)
        for name, seconds in stats.items():
            if match := _STEP_TIME.match(name):
                per_second = _PER_SECOND.get((match[1] or "s")[0].lower(), 1.0)
                each = [known(one) for one in sequence(seconds) or [seconds]]
                found.times += [
                    (offset, one / per_second, n, now) for one in each if one is not None
                ]
                if found.clock and found.clock.since is not None:
                    found.clock.steps_inside += len(each)
    if found.clock and "run_stop" not in found.marks and key in _TIMES:
        found.clock.see(key, now)
    if (samples := whole(metadata.get("samples_count"))) is not None:
        # At its start, a block may say how many samples it will have: these are not trained yet.
        if key in (*_TIMES, "run_stop") and key != "block_start":
            found.count(offset, now, samples, True)
    elif key.startswith("eval_"):
        found.count(offset, now, whole(metadata.get("epoch_num")), False)
    elif key == "trained_samples" or (
        key == "train_samples" and (found.counts or "run_stop" in found.marks)
    ):  # before the first evaluation, train_samples is the size of the data
        found.count(offset, found.marks.get("run_stop", now), whole(value), False)


def _benchmark(record: Record, name: str) -> None:
    """The model that a benchmark of MLPerf is about, and the length of its sequences."""
    name = re.sub(r"\W", "_", name.lower().replace("3.1", "31"))
    model, seq_len = _BENCHMARKS.get(name, (None, None))
    if model:
        read_name(record, model)
    state(record, {"seq_len": seq_len}, "from name")
    if name.endswith("_lora"):
        record.uncounted.append("frozen weights (LoRA)")


def _settings(record: Record, log: Log, found: _Found) -> None:
    """The layout, from argument dumps before the run."""
    lines = header_of(log, found.start_at).splitlines()
    if header := b"\n".join(line for line in lines if line and b":::MLL" not in line):
        said = Record(source=record.source, format=record.format)
        read_header(said, header)
        state(record, {name: getattr(said, name) for name in _SETTINGS}, "log")


def _steps(record: Record, log: Log, found: _Found) -> list[int]:
    """Fill the entries, the times of the whole run and the throughput; returns where the last
    entries are."""
    about, marks, clock = record.submission, found.marks, found.clock
    if {"run_start", "run_stop"} <= set(marks):
        record.totals["wall_s"] = marks["run_stop"] - marks["run_start"]
        about.train_s = clock.trained(marks["run_stop"])
        about.eval_s = clock.idle_s + marks["run_stop"] - (clock.since or marks["run_stop"])
        if clock.overlaps:
            about.train_s = record.totals["wall_s"]
        if clock.overlaps or not clock.evaluations:
            about.eval_s = None
    if {"init_start", "run_start"} <= set(marks):
        about.init_s = marks["run_start"] - marks["init_start"]
    about.status = found.status or ""
    at, trained_s, counts = _counted(record, found)
    about.samples = int(counts[-1]) if len(counts) else None
    spans, done = np.diff(trained_s, prepend=0.0), np.diff(counts, prepend=0.0)
    usable = spans > 0
    marked = max(clock.blocks, clock.evaluations) >= len(spans)
    if len(spans) > 1 and marked:
        # The first span may hold the warm-up, and several evaluations that were left out.
        about.block_s = float(np.median(spans[1:]))
    counted_per_s = float(done[usable].sum() / spans[usable].sum()) if usable.any() else 0.0
    step_s = _timed(record, found, counted_per_s)
    printed = any(seconds > 0 for _, seconds, _, _ in found.times)
    if step_s is not None:
        last = _number(record, log, found, step_s)
    elif record.global_batch and usable.any() and marked and not printed:
        last = _put_blocks(record, at[usable], spans[usable], done[usable], counts[usable])
        if not clock.evaluations:
            record.notes.append(UNMARKED)
    else:
        why = "printed and counted times contradict each other, so neither is a result"
        record.notes.append(why if printed else "no step is timed: the times are of the whole run")
        last = []
    if found.rates:
        middle = float(np.median(step_s)) if step_s is not None else 0.0
        expected = record.global_batch / middle if middle and record.global_batch else counted_per_s
        if not expected and found.counts and record.totals.get("wall_s"):
            expected = found.counts[-1][3] / record.totals["wall_s"]
        values = found.rates.get("throughput") or next(iter(found.rates.values()))
        record.unnamed_rate = (float(np.mean(values)), expected)
    return last


def _counted(record: Record, found: _Found) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(offsets, seconds of training, samples) at each count; empty where it is no count of samples.

    A count of tokens is divided: one that would mean an impossible speed, or that agrees with the
    steps' own times as such.
    """
    known_unit = [count for count in found.counts if count[4]]
    table = np.array(known_unit or found.counts, float).reshape(-1, 5)
    at, trained_s, elapsed_s, counts, sure = table.T
    if found.clock.overlaps:
        trained_s = elapsed_s
        record.notes.append("steps are timed during evaluations: their time is not left out")
    seq_len, batch = record.seq_len, record.global_batch
    if not len(counts) or not batch:
        return at, trained_s, counts
    done, spent = counts[-1], trained_s[-1]
    benchmark, unit = record.submission.benchmark.lower(), ""
    if np.median(np.diff(counts, prepend=0.0)) < batch:
        unit = f"fewer than a batch of {batch} lie between two evaluations"
    elif benchmark.startswith(_EPOCHS) and not sure.any():
        unit = f"{benchmark} counts epochs"
    elif spent > 0:
        often = done / spent / batch > _OFTEN
        if found.times and seq_len:  # the steps' own times say which one it is
            middle = float(np.median([seconds for _, seconds, _, _ in found.times]))
            amounts = rate_words.units_of(batch, seq_len, None)
            agrees = rate_words.unit_of(done / spent, middle, amounts, rate_words.WHOLE_RUN)
            often = agrees == "tokens_per_s" if agrees else often
        if often and seq_len and not (counts % seq_len).any():
            record.notes.append(f"counts of samples are of tokens: {done:.0f} / {seq_len}")
            return at, trained_s, counts / seq_len
        if often:
            unit = f"{done / spent / batch:.4g} steps/s of {batch} samples are more than any run's"
            unit += "" if seq_len else "; where they are of tokens, --seq-len N divides them"
    if unit:
        record.notes.append(f"counts up to {done:.0f} are not of samples ({unit}): unknown")
        return at[:0], trained_s[:0], counts[:0]
    return at, trained_s, counts


def _timed(record: Record, found: _Found, counted_per_s: float) -> np.ndarray | None:
    """Seconds of each step, where they agree with what was counted between evaluations, or else
    with when their lines were written."""
    step_s = np.array([seconds for _, seconds, _, _ in found.times])
    if not len(step_s) or not (step_s > 0).any():
        return None
    middle, batch = float(np.median(step_s[step_s > 0])), record.global_batch
    if batch and counted_per_s:
        counted_s, by = batch / counted_per_s, "the counted samples"
    else:
        written = np.diff(sorted({now for *_, now in found.times}))
        counted_s, by = (float(np.median(written)) if len(written) else 0.0), "their lines' times"
    factor, said = rate_words.of_steps(middle, counted_s, by)
    record.notes += [said] * bool(said)
    return step_s * factor if factor else None


def _number(record: Record, log: Log, found: _Found, step_s: np.ndarray) -> list[int]:
    """Put the steps that are timed one by one, each with its number where the log counts them."""
    counts = [n for _, _, n, _ in found.times]
    batch, seq_len = record.global_batch or 1, record.seq_len or 1
    numbers = np.arange(1.0, len(counts) + 1)
    # Not where a line lists several times, nor where one count has several.
    alone = len({at for at, *_ in found.times}) == len(counts)
    alone = alone and len(set(counts)) == len({(n, s) for _, s, n, _ in found.times})
    for unit in (batch * seq_len, batch, 1):
        if alone and counts[0] and not any(n % unit for n in counts):
            numbers = np.array(counts, float) / unit
            break
    columns = {"iteration": numbers, "step_s": step_s}
    return put_steps(record, columns, np.array([at for at, *_ in found.times], np.int64), log)


def _put_blocks(
    record: Record, at: np.ndarray, spans: np.ndarray, done: np.ndarray, counts: np.ndarray
) -> list[int]:
    """An entry for each span between two counts: the mean of its steps."""
    batch = record.global_batch
    for name in PER_STEP:
        setattr(record, name, np.full(len(spans), np.nan))
    record.iteration, record.step_s = counts / batch, spans * batch / done
    record.interval = max(1, round(float(np.median(done)) / batch))
    record.last_at = int(at[-1])
    record.notes.append("no step is timed: an entry is the mean between two evaluations")
    return [int(offset) for offset in at[-4:]]


def _entries(log: Log, record: Record) -> Iterator[tuple[int, str, Any, float, dict[str, Any]]]:
    """(offset, key, value, seconds, metadata) of every line that is whole and of use here."""
    odd = False
    for offset, key, content, old_s in _old_lines(log) if log.contains(b":::MLL ") else _lines(log):
        try:
            line = mapping(parse_json(content))
        except ValueError:
            continue
        time_s = float(old_s) if old_s else real(line.get("time_ms")) / 1000
        if not old_s and math.isfinite(time_s) and not _EPOCH_S[0] <= time_s < _EPOCH_S[1]:
            time_s, unit = _of_1970(time_s)
            if unit and not odd:
                odd = True
                record.notes.append(f"time_ms {line.get('time_ms')} is read as {unit} since 1970")
        if math.isfinite(time_s):
            yield offset, key, line.get("value"), time_s, mapping(line.get("metadata"))


def _of_1970(time_s: float) -> tuple[float, str]:
    """(seconds, their unit) of a time that is printed in another unit than ms, if it is one of
    these years; else the same time, of a clock that starts elsewhere."""
    for unit, factor in (("s", 1e3), ("us", 1e-3), ("ns", 1e-6)):
        if _EPOCH_S[0] <= time_s * factor < _EPOCH_S[1]:
            return time_s * factor, unit
    return time_s, ""


def _lines(log: Log) -> Iterator[tuple[int, str, bytes, bytes]]:
    """(offset, key, its JSON, b"") of every line with a key of use: most lines are ones that each
    rank prints before the run, and are not looked at."""
    initialised = False
    for at, block in log.blocks():
        for match in _WANTED_KEY.finditer(block):
            if match[1] == b"init_start":  # of each rank
                if initialised:
                    continue
                initialised = True
            begin = block.rfind(b":::MLLOG {", max(match.start() - _FAR, 0), match.start())
            if begin >= 0:
                stop = _END.search(block, match.end(), match.end() + _LONGEST)
                text = block[begin + 9 : stop.start() if stop else match.end() + _LONGEST]
                text = text[: text.rfind(b"}") + 1]
                if len(text) > match.start() - begin and not _END.search(
                    block, begin + 9, match.start()
                ):
                    yield at + begin, match[1].decode(), text, b""


def _old_lines(log: Log) -> Iterator[tuple[int, str, bytes, bytes]]:
    """The same of logs of 2018, with the time."""
    for offset, match in log.matches(_OLD_LINE):
        if (key := match[2].decode()) in _WANTED:
            yield offset, key, match[3], match[1]


FORMAT = Format(
    name="MLPerf",
    marks=((b":::MLLOG {",), (b":::MLL ",)),
    reader=_read,
)
