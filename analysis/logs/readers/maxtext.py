"""MaxText: `completed step: 5, seconds: 5.668, TFLOP/s/device: 134.909, Tokens/s/device: 8671.794,
total_weights: 196608, loss: 10.879`.

Rates are of one device, and their tokens include padding; total_weights counts those of all devices
without it. The host runs ahead of the devices: of the first steps it times how long they take to
enqueue, and a later one pays for them. Before July 2024 fewer fields are printed.
"""

import math
import re
from itertools import product

import numpy as np

from analysis.logs.parsing.fields import labelled, number, positive, ranks_of_rates, whole, word
from analysis.logs.parsing.line_format import Format, last_number
from analysis.logs.parsing.lines import Columns, Line
from analysis.logs.parsing.logfile import Log
from analysis.logs.parsing.setting_names import read_settings, state
from analysis.logs.record import Record

_SETTING = re.compile(rb"Config param (\w{1,60}): ([ -~]{1,80})")
# Its names -> those that argument dumps of others have.
_NAMES = {"num_decoder_layers": "num_layers", "emb_dim": "hidden_size"}
_NAMES |= {"mlp_dim": "ffn_hidden_size", "num_query_heads": "num_attention_heads"}
_NAMES |= {"num_kv_heads": "num_key_value_heads"}
_NAMES |= {"max_target_length": "seq_length", "steps": "train_iters", "dtype": "torch_dtype"}
_NAMES |= {"logits_via_embedding": "tie_word_embeddings", "shared_experts": "n_shared_experts"}
_NAMES |= {"base_moe_mlp_dim": "moe_intermediate_size", "moe_mlp_dim": "moe_intermediate_size"}
_NAMES |= {"first_num_dense_layers": "first_k_dense_replace"}
_WINDOWS = ("sliding_window_size", "chunk_attn_window_size")
_AXES = {"tp": ("tensor", "tensor_transpose", "tensor_sequence"), "pp": ("pipeline",)}
_AXES |= {"cp": ("context",), "ep": ("expert",)}
_BILLIONS = rb"number parameters: (\d{1,6}\.\d{1,4})(?= billion)"
_TPU = re.compile(rb"TFRT (TPU v\w{1,4}(?: lite)?)")
_WHERE = ("ici", "dcn")  # within a slice of devices, and between slices
# The first steps; so much of the median is too little for one of them.
_EARLY, _ENQUEUED = 5, 0.5


def _derive(record: Record, columns: Columns, header: bytes) -> None:
    """Fills the settings and the devices. Removes the times that are of enqueueing."""
    if tpu := _TPU.search(header):
        state(record, {"gpu_type": tpu[1].decode()}, "log")
    maxtext = {name.decode(): value.decode().strip() for name, value in _SETTING.findall(header)}
    if maxtext:
        _settings(record, maxtext)
        billions = last_number(_BILLIONS, header)  # without settings, they may be of experts
        state(record, {"params": billions and billions * 1e9}, "log")
    weights, times = columns.pop("total_weights"), positive(columns["step_s"])
    if record.gpus is None and len(weights) > 2 and (weights == weights[0]).all():  # no padding
        gpus = ranks_of_rates(weights / times, columns["tokens_per_s_per_gpu"])
        state(record, {"gpus": gpus}, "log")
    if record.gpus and b"Num_devices: " not in header:
        record.note("the number of devices follows from total_weights and Tokens/s/device")
    if not np.isfinite(times).any():
        return
    enqueued = times < _ENQUEUED * np.nanmedian(times)
    enqueued &= columns["iteration"] < np.nanmin(columns["iteration"]) + _EARLY
    if enqueued.any():
        for name in ("step_s", "tflops", "tokens_per_s_per_gpu"):
            columns[name][enqueued] = np.nan
        record.note(f"{enqueued.sum()} early times are those to enqueue a step: unknown")


def _settings(record: Record, maxtext: dict[str, str]) -> None:
    """Fills the model, the precision, the batch and the split from MaxText's settings."""
    settings = {_NAMES.get(name, name): [value] for name, value in maxtext.items()}
    settings["multi_latent_attention"] = [str(maxtext.get("attention_type") == "mla")]
    drops_tokens = not maxtext.get("capacity_factor", "").startswith("-")  # -1: dropless
    settings["moe_token_dropping"] = [str(drops_tokens)]
    if maxtext.get("dataset_type") == "synthetic":
        record.packed = None  # one document fills each sequence
    if activations := maxtext.get("mlp_activations"):  # of two, one is the gate
        settings["swiglu"] = [str("," in activations)]
    quantization = maxtext.get("quantization", "").lower()
    if "fp8" in quantization:
        settings["fp8"] = [quantization]
    elif "int" in quantization:
        settings.pop("torch_dtype", None)
    windows = [name for name in _WINDOWS if maxtext.get(name, "0") not in ("0", "None")]
    record.uncounted += [f"a {name} of {maxtext[name]}" for name in windows]
    facts = read_settings(record, settings)
    for axis, names in _AXES.items():
        sizes = [
            maxtext.get(f"{where}_{n}_parallelism", "1") for where, n in product(_WHERE, names)
        ]
        is_stated = all(size.isdigit() and len(size) < 6 for size in sizes)  # -1: the rest
        if is_stated and (axis != "ep" or "experts" in facts):
            facts[axis] = math.prod(map(int, sizes))
    # 0.5 where two devices share a sequence.
    batch_per_device = number(maxtext.get("per_device_batch_size", "").encode())
    batch = batch_per_device * (record.gpus or np.nan) * facts.get("n_micro", 1)
    state(record, facts | {"global_batch": whole(np.array([batch]))}, "log")


_STEP = re.compile(word(b"completed step: ") + rb"(?P<iteration>\d{1,9}), seconds: ")
_FIELDS = {
    "step_s": labelled(rb"seconds"),
    "tflops": labelled(rb"TFLOP/s(?:/device)?"),
    "tokens_per_s_per_gpu": labelled(rb"Tokens/s/device"),
    "total_weights": labelled(rb"total_weights"),
    "loss": labelled(rb"loss", rb":? "),
}

# Its metrics_file, one JSON object a line.
_JSON = re.compile(rb"\{\"(?=[^\r\n]{0,3900}\"perf/step_time_seconds\": )")
_JSON_FIELDS = {
    name: labelled(rb"\"" + label + rb"\"", rb": ")
    for name, label in (
        ("iteration", b"step"),
        ("step_s", b"perf/step_time_seconds"),
        ("tflops", b"perf/per_device_tflops_per_sec"),
        ("tokens_per_s_per_gpu", b"perf/per_device_tokens_per_sec"),
        ("tokens_each", b"perf/per_device_tokens"),
        ("tflop_each", b"perf/per_device_tflops"),
        ("total_weights", b"learning/total_weights"),
        ("loss", b"learning/loss"),
        ("grad_norm", b"learning/grad_norm"),
    )
}


def _from_json(columns: Columns, record: Record, log: Log) -> Columns:
    """Returns the columns with the time that a device's tokens, or TFLOPs, took at its rate: some
    versions write steps per second as the time of a step."""
    columns = {name: values[np.isfinite(columns["iteration"])] for name, values in columns.items()}
    for amount, rate in (("tflop_each", "tflops"), ("tokens_each", "tokens_per_s_per_gpu")):
        seconds = columns.pop(amount) / positive(columns[rate])
        columns["step_s"] = np.where(np.isfinite(seconds), seconds, columns["step_s"])
    return columns


FORMAT = Format(
    name="MaxText",
    marks=(
        (b"completed step: ", b", seconds: ", b"TFLOP/s"),
        (b'"perf/step_time_seconds": ', b'"learning/loss": '),
    ),
    starts=(b"number parameters: ", b"Num_devices: "),
    lines=(Line(_STEP, _FIELDS), Line(_JSON, _JSON_FIELDS, _from_json, mark=b'{"')),
    facts={"gpus": rb"Num_devices: (\d{1,7})(?=, shape)"},
    arguments=False,
    first=0,
    prepare=_derive,
)
