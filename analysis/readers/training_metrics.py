"""training_metrics.json (schema 2.0 and the older short form) and RUN_COMPLETE.txt.

One entry per epoch. Schema 2.0's step times are of micro-steps, which is a step's time only where
nothing is accumulated; its statistics are kept as printed.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from analysis.readers._lines import number
from analysis.readers._log import Log
from analysis.readers._settings import state
from analysis.readers._typed import (
    document,
    is_nan,
    known,
    mapping,
    real,
    reals,
    rows,
    sequence,
    text,
    whole,
)
from analysis.records import Record, Refusal
from parallel.artifacts import METRICS_VERSION

FORMAT = "training_metrics.json"
MARKS = (
    (b'"schema_version"', b'"epochs"', b'"training_config"'),
    (b'"train_time_per_epoch"',),
    (b"RUN_COMPLETE ", b"tokens_per_sec="),
)

_SIZES = re.compile(r"(n_layer|n_head|n_embd)=(\d{1,7})")
_RUN_COMPLETE = re.compile(
    rb"^(?:.{0,60}\] ?)?RUN_COMPLETE \w{1,40}=.{0,2000}\btokens_per_sec=[\d.]{1,30}.{0,400}",
    re.MULTILINE,
)
_MARKER = re.compile(rb"(?<!\w)(\w{1,40})=([^\s]{1,500})")


def read(log: Log) -> Record:
    """Read one file.

    Raises:
        Refusal: it is damaged, or is not such a document after all.
    """
    record = Record(source=str(log.path), format=FORMAT)
    if marker := _RUN_COMPLETE.search(log.head + b"\n" + log.tail):
        said = dict(_MARKER.findall(marker[0]))
        record.totals["tokens_per_s"] = number(said.get(b"tokens_per_sec"))
        record.totals["wall_s"] = number(said.get(b"total_wall_time_sec"))
        if said.get(b"world_size", b"").isdigit():
            state(record, {"gpus": int(said[b"world_size"])}, "log")
        record.format, record.completed = "RUN_COMPLETE.txt", True
        record.extra["whole_run"] = True
        return record
    if log.head[:1] != b"{":
        return record
    content = document(str(log.path), log.text(), FORMAT)
    version = content.get("schema_version")
    if "train_time_per_epoch" in content and "epochs" in content:
        raise Refusal(str(log.path), "mixed schemas: both the short form's fields and schema 2.0's")
    if "train_time_per_epoch" not in content and version != METRICS_VERSION:
        raise Refusal(
            str(log.path), f"schema_version {version!r} is not known ({METRICS_VERSION!r} is)"
        )
    (_short if "train_time_per_epoch" in content else _schema_2)(record, content)
    record.extra["whole_run"] = True
    return record


def _fill(record: Record, n: int, **columns: list[Any]) -> None:
    for name in ("iteration", "step_s", "loss", "grad_norm", "tflops", "samples_per_s"):
        setattr(record, name, np.full(n, np.nan))
    record.tokens_per_s = record.skipped = np.full(n, np.nan)
    for name, values in columns.items():
        setattr(record, name, np.array([real(value) for value in values], float))
    record.count_nans(np.array([is_nan(value) for value in columns["loss"]], bool))


def _short(record: Record, content: dict[str, Any]) -> None:
    times = reals(content["train_time_per_epoch"])
    losses = sequence(content.get("train_loss_per_epoch")) + [None] * len(times)
    rates = sequence(content.get("train_throughput")) + [None] * len(times)
    _fill(
        record,
        len(times),
        iteration=list(range(1, len(times) + 1)),
        loss=losses[: len(times)],
        tokens_per_s=rates[: len(times)],
    )
    record.extra["epoch_s"] = times
    record.totals["wall_s"] = float(sum(times))
    if gpus := sequence(content.get("gpus_tested")):
        state(record, {"gpus": whole(gpus[-1])}, "log")
    record.notes.append("one entry per epoch; no step time in this form")
    record.completed = True


def _schema_2(record: Record, content: dict[str, Any]) -> None:
    config, hardware = mapping(content.get("training_config")), mapping(content.get("hardware"))
    epochs = rows(content.get("epochs"))
    _fill(
        record,
        len(epochs),
        iteration=[e.get("epoch_idx", i + 1) for i, e in enumerate(epochs)],
        step_s=[e.get("step_time_mean_sec") for e in epochs],
        loss=[e.get("train_loss_avg_global") for e in epochs],
        tokens_per_s=[e.get("tokens_per_sec_global") for e in epochs],
    )
    accumulated = whole(config.get("grad_accum_steps"))
    for name, key in (("median", "step_time_p50_sec"), ("p95", "step_time_p95_sec")):
        values = [value for e in epochs if (value := known(e.get(key))) is not None]
        if values:
            record.totals[f"step_s_{name}"] = float(np.mean(values))
    summary = mapping(content.get("summary"))
    for name, key in (
        ("wall_s", "total_wall_time_sec"),
        ("tokens_per_s", "mean_tokens_per_sec_global"),
    ):
        if (value := known(summary.get(key))) is not None:
            record.totals[name] = value
    sizes = dict(_SIZES.findall(str(config.get("model_size"))))
    facts = {
        "engine": "DeepSpeed" if config.get("deepspeed_enabled") else None,
        "gpus": whole(hardware.get("world_size")),
        "gpu_type": text(hardware.get("gpu_name")),
        "micro_batch": whole(config.get("micro_batch_size_per_gpu")),
        "global_batch": whole(config.get("global_batch_size")),
        "seq_len": whole(config.get("seq_len")),
        "zero_stage": whole(config.get("zero_stage")),
        "commit": text(content.get("git_commit")),
        "n_layer": int(sizes["n_layer"]) if "n_layer" in sizes else None,
        "n_head": int(sizes["n_head"]) if "n_head" in sizes else None,
        "hidden": int(sizes["n_embd"]) if "n_embd" in sizes else None,
    }
    precision = str(config.get("precision") or "").split("_")[0]
    facts["precision"] = precision if precision in ("fp32", "bf16", "fp16", "fp8") else None
    state(record, facts, "log")
    record.extra["epochs"] = epochs
    record.extra["profiler"] = mapping(content.get("profiler")) or None
    if accumulated and accumulated > 1:
        record.extra["micro_steps_per_step"] = accumulated
        record.notes.append(
            f"step times are of micro-steps; {accumulated} are accumulated to one optimizer step"
        )
    if len(epochs):
        record.notes.append("one entry per epoch: the mean over its micro-steps")
    completion = mapping(content.get("completion"))
    record.completed = bool(completion.get("printed_marker", True))
    marker = text(completion.get("run_complete_file"))
    # Only a file that still has its own name lies in the run's own folder.
    path = Path(record.source)
    if path.name == FORMAT and marker and not (path.parent / marker).exists():
        record.completed = False
        record.notes.append(f"no completion marker: {marker} is not beside it")
