"""training_metrics.json (schema 2.0, and a short form before it) and RUN_COMPLETE.txt.

One entry per epoch. Its step times are of micro-steps, which is a step's time only where
nothing is accumulated; its statistics are kept as printed. The short form has the times of the
epochs alone, and the rate of one rank; its gpus_tested are the GPUs that the process saw.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from analysis.logs.parsing.fields import number
from analysis.logs.parsing.json_values import (
    document,
    integer,
    known,
    mapping,
    rows,
    steps_of,
    text,
)
from analysis.logs.parsing.line_format import Format, last_number
from analysis.logs.parsing.logfile import Log
from analysis.logs.parsing.model_names import read_name
from analysis.logs.parsing.run_json import peak_bytes
from analysis.logs.parsing.setting_names import state
from analysis.logs.record import Record, Refusal
from parallel.record.schema import METRICS_VERSION

_NAME = "training_metrics.json"
_EPOCHS = "train_time_per_epoch"
_SIZES = re.compile(r"(n_layer|n_head|n_embd)=(\d{1,7})")

_CONFIG = {
    "micro_batch": "micro_batch_size_per_gpu",
    "global_batch": "global_batch_size",
    "seq_len": "seq_len",
    "zero_stage": "zero_stage",
}
_RUN_COMPLETE = re.compile(
    rb"^(?:.{0,60}\] ?)?RUN_COMPLETE \w{1,40}=.{0,2000}\btokens_per_sec=([\d.]{1,30}).{0,400}",
    re.MULTILINE,
)


def _read(log: Log, record: Record) -> None:
    """Reads one file: the marker of a complete run, the short form, or schema 2.0.

    Raises:
        Refusal: it is damaged, or is not such a document after all.
    """
    if match := _RUN_COMPLETE.search(log.head + b"\n" + log.tail):
        _run_complete(log, record, match)
        return
    if log.head[:1] != b"{":
        return
    content = document(str(log.path), log.text(), _NAME)
    if _EPOCHS in content and "epochs" not in content:
        _short_form(record, content)
        return
    if (version := content.get("schema_version")) != METRICS_VERSION:
        reason = f"schema_version {version!r} is not known ({METRICS_VERSION!r} is)"
        raise Refusal(str(log.path), reason)
    record.whole_run = record.per_epoch = True
    epochs = rows(content.get("epochs"))
    record.steps = steps_of(
        iteration=[epoch.get("epoch_idx", i + 1) for i, epoch in enumerate(epochs)],
        step_s=[epoch.get("step_time_mean_sec") for epoch in epochs],
        loss=[epoch.get("train_loss_avg_global") for epoch in epochs],
        tokens_per_s=[epoch.get("tokens_per_sec_global") for epoch in epochs],
    )
    stated = [known(epoch.get("step_time_p50_sec")) for epoch in epochs]
    medians = [value for value in stated if value is not None]
    if medians:
        record.totals["step_s_median"] = float(np.mean(medians))
    _settings(record, content, "log")
    record.peak_bytes = peak_bytes(content)
    record.profiler = mapping(content.get("profiler")) or None
    accumulated = integer(mapping(content.get("training_config")).get("grad_accum_steps")) or 1
    if accumulated > 1:
        record.note(f"step times are of micro-steps; {accumulated} are one optimizer step")
    if epochs:
        record.note("one entry per epoch: the mean over its micro-steps")
    completion = mapping(content.get("completion"))
    # The file is written at the end of a run: one that does not say is of a complete run.
    record.completed = bool(completion.get("printed_marker", True))
    marker_file = text(completion.get("run_complete_file"))
    # Only a file that still has its own name lies in the run's own folder.
    path = Path(record.source)
    if path.name == _NAME and marker_file and not (path.parent / marker_file).exists():
        record.completed = False
        record.note(f"no completion marker: {marker_file} is not beside it")


def _run_complete(log: Log, record: Record, match: re.Match[bytes]) -> None:
    """Reads the marker of a complete run, and the settings from the metrics file beside it."""
    record.totals["tokens_per_s"] = number(match[1])
    gpus = last_number(rb"\bworld_size=(\d{1,6})\b", match[0])
    state(record, {"gpus": gpus}, "log")
    record.format, record.completed = "RUN_COMPLETE.txt", True
    record.whole_run = True
    path = log.path.with_name(log.path.name.replace("RUN_COMPLETE.txt", _NAME))
    if path != log.path and path.is_file():
        _settings(record, document(str(path), path.read_text(), _NAME), "config")


def _short_form(record: Record, content: dict[str, Any]) -> None:
    """Reads the short form: a list of epochs' times, and of their losses and rates."""
    names = {
        "step_s": _EPOCHS,
        "loss": "train_loss_per_epoch",
        "tokens_per_s_per_gpu": "train_throughput",
    }
    columns = {name: content.get(key) for name, key in names.items()}
    columns = {name: values if isinstance(values, list) else [] for name, values in columns.items()}
    n_epochs = len(columns["step_s"])
    for name, values in columns.items():  # as many values as epochs, unknown ones None
        absent = [None for _ in range(n_epochs - len(values))]
        columns[name] = [*values, *absent][:n_epochs]
    record.steps = steps_of(iteration=range(1, n_epochs + 1), **columns)
    record.epochs = record.completed = True


def _settings(record: Record, content: dict[str, Any], origin: str) -> None:
    """Fills what the document says of model, layout and hardware."""
    config, hardware = mapping(content.get("training_config")), mapping(content.get("hardware"))
    facts = {name: integer(config.get(key)) for name, key in _CONFIG.items()}
    for name, size in _SIZES.findall(str(config.get("model_size"))):
        facts["hidden" if name == "n_embd" else name] = int(size)
    facts |= {
        "engine": "DeepSpeed" if config.get("deepspeed_enabled") else None,
        "gpus": integer(hardware.get("world_size")),
        "gpu_type": text(hardware.get("gpu_name")),
        "commit": text(content.get("git_commit")),
    }
    precision = str(config.get("precision") or "").split("_")[0]
    facts["precision"] = precision if precision in ("fp32", "bf16", "fp16", "fp8") else None
    state(record, facts, origin)
    read_name(record, str(config.get("model_name")))


FORMAT = Format(
    name=_NAME,
    marks=(
        (b'"schema_version"', b'"epochs"', b'"training_config"'),
        (b'"train_time_per_epoch"', b'"train_loss_per_epoch"'),
        (b"RUN_COMPLETE ", b"tokens_per_sec="),
    ),
    reader=_read,
)
