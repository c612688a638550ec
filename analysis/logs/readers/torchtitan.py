"""torchtitan.

    step: 10  loss:  7.94975  grad_norm: 38.7500  memory: 168.10GiB(94.25%)  tps: 6,922  ...

Coloured or not; early versions print `wps` for `tps`. Both are per device, averaged since the line
before; no step time is printed, so it follows from them where batch and GPUs are known. Since
August 2026 the batch is printed in tokens; a sequence is as long as the longest context.
"""

import math
import re

from analysis.logs.parsing.expert_settings import parts_of
from analysis.logs.parsing.fields import ANSI, NOT_LAST, THOUSANDS, labelled, number, word
from analysis.logs.parsing.line_format import Format, last_number
from analysis.logs.parsing.lines import Columns, Line
from analysis.logs.parsing.logfile import Log
from analysis.logs.parsing.model_names import read_name
from analysis.logs.parsing.setting_names import state
from analysis.logs.record import Record
from parallel.config.layout import EXPERT_AXES

_GAP = ANSI + rb" {1,8}" + ANSI
_STEP = re.compile(
    word(b"step:")
    + rb"(?<!validate step:)"
    + ANSI
    + rb" {0,8}(?P<iteration>\d{1,9})"
    + _GAP
    + rb"loss:"
)
_FIELDS = {
    "loss": labelled(rb"loss"),
    "grad_norm": labelled(rb"grad_norm"),
    "tflops": labelled(rb"tflops"),
    "mfu_pct": labelled(rb"mfu(?!: N/A)", unit=rb"%"),  # N/A: of 8 bits
    "tokens_per_s_per_gpu": labelled(rb"[tw]ps", number=THOUSANDS),
    "peak_gib": labelled(rb"memory", unit=rb"GiB"),  # reserved by PyTorch
}
# `Building llama3 8B with TransformerModelArgs(dim=4096, n_layers=32, ...)`; from 0.2.1 to
# April 2026 `Building llama3 8Bwith {` and JSON; later without them.
_BUILDING = re.compile(
    rb"Building (?!device mesh)(\w{2,20} [\w.-]{1,20}?)"
    rb"(?: ?with (?:\w{0,40}ModelArgs\(([^\r\n]{1,2000})"
    rb"|(\{(?s:.{1,4000}?)\n(?:\[\w{1,20}\]:)?\}))|(?![\w.-]))"
)
_ARGUMENT = re.compile(rb"\b(\w{2,40})(?:=|\": )([\w.]{1,20})")
_UNCOUNTED = re.compile(
    rb"Total parameter count: dense [^\r\n]{1,60}?(sparse|vision) ([1-9](?:[\d,]{0,20}\d)?)"
)
_PARTS = {b"sparse": "experts", b"vision": "an encoder of images"}
_PRECISION = re.compile(rb"(?:mixed_precision_param|training\.dtype)\W{1,60}(bfloat16|float32)")
_LINEARS = re.compile(rb"(?:Swapped|Linear layers) to (Float8|MXFP8|MX|NVFP4)Linear")
_DTYPES = {b"bfloat16": "bf16", b"float32": "fp32"}
_DTYPES |= {b"Float8": "fp8", b"MXFP8": "fp8", b"MX": "fp8", b"NVFP4": "fp4"}
_RANK_TOKENS = rb"(\d{1,12}) tokens per DP rank"
_MESH = re.compile(rb"(?<!\w)(pp|dp_replicate|dp_shard|cp|tp|ep|etp)=(\d{1,6})")
_MESH_LIST = re.compile(rb"device mesh with \[([^\]\r\n]{1,200})\], \[([\d, ]{1,80})\]")
_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def _derive(record: Record, columns: Columns, header: bytes) -> None:
    """Fills the layout from the device mesh, the precision, the model and the micro-batch."""
    mesh = _mesh(header)
    expert_axes = {axis: mesh.pop(axis, None) for axis in EXPERT_AXES}
    state(record, mesh, "log")
    for dtype in (_LINEARS.findall(header) or _PRECISION.findall(header))[-1:]:
        state(record, {"precision": _DTYPES[dtype]}, "log")
    _model(record, header)
    if "experts" in record.model:
        state(record, expert_axes, "log")
    rank_tokens = last_number(_RANK_TOKENS, header)
    if rank_tokens and record.seq_len and not rank_tokens % record.seq_len:
        state(record, {"micro_batch": rank_tokens // record.seq_len}, "log")


def _model(record: Record, header: bytes) -> None:
    """Fills the model from the arguments that it is built with, else from the flavour that is
    named."""
    built = _BUILDING.findall(header)
    if not built:
        return
    name, *arguments = built[-1]
    stated = {k.decode(): v.decode() for k, v in reversed(_ARGUMENT.findall(b"".join(arguments)))}
    sizes = {_SIZES[k]: int(v) for k, v in stated.items() if k in _SIZES and v.isdigit()}
    multiple = sizes.pop("multiple_of", 0)
    if multiple and "hidden" in sizes:  # Llama's rule
        factor = number(stated.get("ffn_dim_multiplier", "").encode())  # NaN: None or null
        factor = 1.0 if math.isnan(factor) else factor
        width = int(int(8 * sizes["hidden"] / 3) * factor)
        sizes["ffn_hidden"] = math.ceil(width / multiple) * multiple
    llama = name.lower().startswith((b"llama", b"deepseek_v3"))
    if llama or name.lower().startswith(b"qwen3"):  # torchtitan's own models of these names
        sizes |= {"activation": "swiglu", "norm": "rmsnorm", "position": "rope", "bias": False}
    if "enable_weight_tying" in stated:
        sizes["tied"] = stated["enable_weight_tying"].lower() == "true"
    elif stated and llama:
        sizes["tied"] = False
    state(record, sizes, "log")
    record.model.pop("experts", None)
    settings = {_EXPERTS.get(k, k): v.lower() for k, v in stated.items()}
    if settings.pop("moe_enabled", "true") == "false":  # their number is printed all the same
        settings.pop("num_experts", None)
    elif "num_experts" in settings and "moe_intermediate_size" not in settings:
        record.uncounted.append("experts of a width that is not stated")
    state(record, parts_of(settings, None).facts, "log")
    parts = _UNCOUNTED.search(header)
    if not parts or "experts" not in record.model:
        read_name(record, name.decode())
    if parts and not (parts[1] == b"sparse" and "experts" in record.model):
        record.uncounted.append(f"{parts[2].decode()} parameters in {_PARTS[parts[1]]}")


_SIZES = {"dim": "hidden", "n_layers": "n_layer", "n_heads": "n_head", "n_kv_heads": "n_kv_head"}
_SIZES |= {"head_dim": "kv_channels", "vocab_size": "vocab_size", "hidden_dim": "ffn_hidden"}
_SIZES["multiple_of"] = "multiple_of"  # of the feed-forward size
_SIZES["inter_dim"] = "ffn_hidden"
_EXPERTS = {"top_k": "moe_router_topk", "moe_inter_dim": "moe_intermediate_size"}
_EXPERTS |= {"num_shared_experts": "n_shared_experts", "n_dense_layers": "first_k_dense_replace"}
_EXPERTS["_debug_force_load_balance"] = "moe_router_force_load_balancing"


def _mesh(header: bytes) -> dict[str, int | None]:
    """Returns the sizes of the device mesh, and the GPUs, which are the product of all of its
    axes."""
    mesh_at = header.rfind(b"with parallelism:")
    pairs = _MESH.findall(header[mesh_at : mesh_at + 300]) if mesh_at >= 0 else []
    if mesh_at < 0 and (meshes := _MESH_LIST.findall(header)):
        names, counts = meshes[-1]
        pairs = zip(re.findall(rb"\w+", names), counts.split(b","), strict=False)
    sizes = {name.decode(): int(size) for name, size in pairs}
    if not sizes:
        return {}
    dp_shard = sizes.get("dp_shard", 1)
    sizes.setdefault("dp_replicate", sizes.pop("dp", 1))
    facts = {"tp": sizes.get("tp", 1), "pp": sizes.get("pp", 1), "cp": sizes.get("cp")}
    facts["sequence_parallel"] = facts["tp"] > 1  # its norms are always so
    facts |= {axis: sizes[axis] for axis in EXPERT_AXES if axis in sizes}
    if dp_shard > 0:
        facts["dp"] = sizes["dp_replicate"] * dp_shard
        facts["gpus"] = math.prod(size for name, size in sizes.items() if name in _AXES)
    return facts


def _finish(record: Record, log: Log) -> None:
    """Sets that the run completed where it says so behind its last step."""
    if len(record.steps) and not record.completed:
        following = log.slice(record.last_at, record.last_at + (1 << 16))
        record.completed = any(done in following for done in FORMAT.done)


FORMAT = Format(
    name="torchtitan",
    marks=((b"step:", b"tps: ", b"memory: "), (b"step:", b"wps: ", b"memory: ")),
    starts=(b"Starting job: ", b"Training starts at step", b"Trainer is initialized with"),
    done=(b"Training completed",),
    lines=(Line(_STEP, _FIELDS),),
    facts={
        "micro_batch": rb"local batch size {0,2}(\d{1,9})" + NOT_LAST,
        "global_batch": rb"global batch size {0,2}(\d{1,9})" + NOT_LAST,
        "batch_tokens": rb"(\d{1,15}) tokens per train step",
        "seq_len": rb"(?:sequence length|maximum context length) {0,2}(\d{1,9})" + NOT_LAST,
        "planned_steps": rb"total steps {0,2}(\d{1,9})" + NOT_LAST,
        "params": rb"size: {0,2}([\d,]{4,24}) total parameters",
        "mfu_flops": rb"Peak FLOPS used for computing MFU: ([\d.e+]{1,16})",
    },
    averages=True,
    prepare=_derive,
    finish=_finish,
)
