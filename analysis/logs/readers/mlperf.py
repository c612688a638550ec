"""MLPerf's log lines: `:::MLLOG {"key": "tracked_stats", "value": {...}, "metadata": {...}}`.

It times a whole run, from run_start to run_stop; tracked_stats holds a throughput, whose unit no
log says, and in NVIDIA's logs of GPT-3 each step's time.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from analysis.logs.parsing.endings import judge_end
from analysis.logs.parsing.json_values import is_nan, known, mapping, real, text, whole
from analysis.logs.parsing.line_format import Format
from analysis.logs.parsing.logfile import Log
from analysis.logs.parsing.model_names import read_name
from analysis.logs.parsing.rates import unit_of
from analysis.logs.parsing.settings import state
from analysis.logs.parsing.steps import put_steps
from analysis.logs.record import Failure, Record
from models.files import parse_json

# In 2018 the time and the key stood before the JSON object.
_LINE = re.compile(rb":::MLL(?:OG| (\d{1,12}\.\d{1,9}) (\w{1,60}):) (\{[^\r\n]{1,4000}\})")
_FACTS = {
    "global_batch_size": "global_batch",
    "max_sequence_length": "seq_len",
    "sequence_length": "seq_len",
    "tensor_model_parallel": "tp",
    "pipeline_model_parallel": "pp",
    "micro_batch_size": "micro_batch",
    "gradient_accumulation_steps": "n_micro",
    "num_layers": "n_layer",
    "hidden_size": "hidden",
    "ffn_hidden_size": "ffn_hidden",
    "num_heads": "n_head",
}
# `64xNVIDIA DGX H100`, `1xXE9680x8H100-SXM-80GB`, `gaudi-256`: nodes and cards of a node, or cards.
_NODES = re.compile(r"(\d{1,5})x.{0,40}?(?:x(\d{1,2})(?=[A-Z])|\b(DGX))")
_CARDS = re.compile(r"(?:gaudi|tpu-v\w{1,4})-(\d{1,6})")
_DGX = 8  # cards


def _read(log: Log, record: Record) -> None:
    """Read one result log. The run's times and throughput are in `totals`."""
    started = stopped = None
    status, end_at, losses = None, 0, []
    throughputs: list[float] = []
    times: list[tuple[int, float, int]] = []  # (offset, seconds, the step that it names)
    counted = (0, math.nan)  # samples so far, and when
    for offset, key, value, time_s, metadata in _entries(log):
        if key == "run_start" and started is None:
            started = time_s
        elif key == "run_stop" and stopped is None:
            stopped, status, end_at = time_s, text(metadata.get("status")), offset
        elif key == "tracked_stats":
            stats = mapping(value)
            if (rate := known(stats.get("throughput"))) is not None:
                throughputs.append(rate)
            if (seconds := known(stats.get("train_step_timing"))) is not None:
                times.append((offset, seconds, whole(metadata.get("step")) or 0))
        elif key in ("train_loss", "eval_loss") and (is_nan(value) or known(value) is not None):
            losses.append(real(value))
        elif key in _FACTS and (fact := whole(value)) is not None:
            state(record, {_FACTS[key]: fact}, "log")
        elif key == "submission_platform":
            _platform(record, text(value) or "")
        elif key == "submission_benchmark":
            _benchmark(record, text(value) or "")
        samples = metadata.get("samples_count", value if key == "train_samples" else None)
        if started is not None and (n := whole(samples)) and n > counted[0]:
            counted = (n, time_s)
    if started is not None:
        record.whole_run = True
    if started is not None and stopped is not None:
        record.totals["wall_s"] = stopped - started
    ends = _steps(record, log, times)
    if throughputs:
        seconds = counted[1] - started if started is not None else math.nan
        _throughput(record, float(np.mean(throughputs)), counted[0] / seconds if seconds else 0.0)
    if losses:
        record.totals["loss"] = losses[-1]
        record.nan_iterations = sum(map(math.isnan, losses))
    record.completed = status == "success"
    if end_at:
        record.last_at = end_at
    judge_end(record, log, [end_at] if end_at else ends)
    if record.failure is None and status not in (None, "success"):
        record.failure = Failure("stopped early", log.line_no(end_at), f"run_stop status: {status}")
    elif record.failure and record.failure.kind == "launcher":
        record.failure = None


def _platform(record: Record, name: str) -> None:
    gpus = None
    if nodes := _NODES.match(name):
        gpus = int(nodes[1]) * (_DGX if nodes[3] else int(nodes[2]))
    elif cards := _CARDS.match(name):
        gpus = int(cards[1])
    state(record, {"gpus": gpus, "gpu_type": name or None}, "log")


def _benchmark(record: Record, name: str) -> None:
    """The model that a benchmark of MLPerf is about."""
    if name == "gpt3":
        read_name(record, "gpt3-175b")
    elif name.endswith("_lora"):
        record.uncounted.append("frozen weights (LoRA)")


def _steps(record: Record, log: Log, times: list[tuple[int, float, int]]) -> list[int]:
    """The steps that NVIDIA's logs time one by one, each counted in tokens (or samples) so far."""
    if not times:
        record.notes.append("no step is timed: the times are of the whole run")
        return []
    each = times[0][2]
    numbers = [n / each if each and n % each == 0 else i for i, (_, _, n) in enumerate(times, 1)]
    columns = {
        "iteration": np.array(numbers, float),
        "step_s": np.array([seconds for _, seconds, _ in times]),
    }
    return put_steps(record, columns, np.array([at for at, *_ in times], np.int64), log)


def _throughput(record: Record, rate: float, samples_per_s: float) -> None:
    """`throughput` has no unit: it is samples/s in some logs, in NVIDIA's of GPT-3 tokens/s."""
    step_s = record.step_s[record.step_s > 0]
    if record.global_batch and len(step_s):
        samples_per_s = record.global_batch / float(np.median(step_s))
    unit = unit_of(rate, samples_per_s, record.seq_len, within=_ABOUT)
    numbers = f"throughput {rate:.6g}, {samples_per_s:.6g} samples/s by the log's times"
    if record.seq_len:
        numbers += f", sequences of {record.seq_len}"
    if unit is None:
        record.notes.append(f"{numbers}: its unit is unknown, and so is the rate")
        return
    record.totals[f"{unit}_per_s"] = rate
    if unit == "tokens":
        record.notes.append(f"{numbers}: it counts tokens")


_ABOUT = 2.0  # evaluations and the first steps count in one of the two and not in the other


def _entries(log: Log) -> Iterator[tuple[int, str, Any, float, dict[str, Any]]]:
    """(offset, key, value, seconds, metadata) of every line that is whole."""
    for offset, match in log.matches(_LINE):
        try:
            line = mapping(parse_json(match[3]))
        except ValueError:
            continue
        key = match[2].decode() if match[2] else text(line.get("key"))
        time_s = float(match[1]) if match[1] else real(line.get("time_ms")) / 1000
        if key is not None and math.isfinite(time_s):
            yield offset, key, line.get("value"), time_s, mapping(line.get("metadata"))


FORMAT = Format(
    name="MLPerf",
    marks=((b":::MLLOG {",), (b":::MLL ",)),
    reader=_read,
)
