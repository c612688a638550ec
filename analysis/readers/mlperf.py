"""MLPerf's log lines: `:::MLLOG {"key": "tracked_stats", "value": {...}, "metadata": {...}}`.

It times a whole run, from run_start to run_stop, and prints no steps; throughput comes from
tracked_stats.
"""

import re
from typing import Any

import numpy as np

from analysis.readers._endings import judge_end
from analysis.readers._log import Log
from analysis.readers._settings import state
from analysis.records import Failure, Record
from models.files import parse_json

FORMAT = "MLPerf"
MARKS = ((b":::MLLOG {",), (b":::MLL ",))

_LINE = re.compile(rb":::MLLOG (\{[^\r\n]{1,4000}\})")
_OLD = re.compile(rb":::MLL (\d{1,12}\.\d{1,9}) (\w{1,60}): (\{[^\r\n]{1,4000}\})")
_FACTS = {
    "global_batch_size": "global_batch",
    "max_sequence_length": "seq_len",
    "sequence_length": "seq_len",
    "tensor_model_parallel": "tp",
    "pipeline_model_parallel": "pp",
    "micro_batch_size": "micro_batch",
    "num_layers": "n_layer",
    "hidden_size": "hidden",
}


def read(log: Log) -> Record:
    """Read one result log. The run's times and throughput are in `totals`."""
    record = Record(source=str(log.path), format=FORMAT)
    started = stopped = None
    status, end_at, throughputs, losses = None, 0, [], []
    for offset, key, value, time_s, metadata in _entries(log):
        if key == "run_start" and started is None:
            started = time_s
        elif key == "run_stop" and stopped is None:
            stopped, status, end_at = time_s, metadata.get("status"), offset
        elif key == "tracked_stats" and isinstance(value, dict):
            if isinstance(rate := value.get("throughput"), int | float):
                throughputs.append(float(rate))
        elif key in ("train_loss", "eval_loss") and isinstance(value, int | float):
            losses.append(float(value))
        elif key in _FACTS and isinstance(value, int):
            state(record, {_FACTS[key]: value}, "log")
        elif key == "submission_benchmark":
            record.extra["benchmark"] = value
        elif key == "submission_org":
            record.extra["org"] = value
    if started is not None:
        record.extra["whole_run"] = True
    if started is not None and stopped is not None:
        record.totals["wall_s"] = stopped - started
    if throughputs:
        record.totals["samples_per_s"] = float(np.mean(throughputs))
    if losses:
        record.totals["loss"] = losses[-1]
    record.extra["status"] = status
    record.completed = status == "success"
    if end_at:
        record.extra["last_at"] = end_at
    judge_end(record, log, [end_at] if end_at else [])
    if record.failure is None and status not in (None, "success"):
        record.failure = Failure("stopped early", log.line_no(end_at), f"run_stop status: {status}")
    elif record.failure and record.failure.kind == "launcher":
        record.failure = None
    return record


def _entries(log: Log) -> Any:
    """(offset, key, value, seconds, metadata) of every line that is whole."""
    for offset, match in log.matches(_LINE):
        try:
            line = parse_json(match[1])
            yield (
                offset,
                line["key"],
                line.get("value"),
                line["time_ms"] / 1000,
                line.get("metadata") or {},
            )
        except (ValueError, KeyError, TypeError):
            continue
    for offset, match in log.matches(_OLD):
        try:
            line = parse_json(match[3])
        except ValueError:
            continue
        metadata = line.get("metadata") or {}
        yield offset, match[2].decode(), line.get("value"), float(match[1]), metadata
