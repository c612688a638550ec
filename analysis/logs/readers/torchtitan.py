"""torchtitan.

    step: 10  loss:  7.94975  grad_norm: 38.7500  memory: 168.10GiB(94.25%)  tps: 6,922  ...

Coloured or not; early versions print `wps` for `tps`. Both are per device, averaged since the line
before; no step time is printed, so it follows from them where batch and GPUs are known.
"""

import re

import numpy as np

from analysis.logs.parsing.fields import ANSI, labelled, positive, word
from analysis.logs.parsing.line_format import Columns, LineFormat, last_number
from analysis.logs.parsing.logfile import Log
from analysis.logs.parsing.settings import state
from analysis.logs.record import Record

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
    "tps": labelled(rb"[tw]ps"),
}
_MESH = re.compile(rb"(?<!\w)(pp|dp_replicate|dp_shard|cp|tp)=(\d{1,6})")
_MESH_LIST = re.compile(rb"device mesh with \[([^\]\r\n]{1,200})\], \[([\d, ]{1,80})\]")
_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def _derive(record: Record, columns: Columns, header: bytes) -> None:
    state(record, _mesh(header), "log")
    tokens_per_s = positive(columns["tps"]) * (record.gpus or np.nan)
    columns["tokens_per_s"] = tokens_per_s
    if record.gpus and record.global_batch and record.seq_len:
        columns["step_s"] = record.global_batch * record.seq_len / tokens_per_s
        columns["samples_per_s"] = tokens_per_s / record.seq_len
        record.notes.append("step times follow from the printed tokens per second")


def _mesh(header: bytes) -> dict[str, int | None]:
    """Sizes of the device mesh; all of them multiply to the number of GPUs."""
    at = header.rfind(b"with parallelism:")
    sizes = {}
    if at >= 0:
        sizes = {k.decode(): int(v) for k, v in _MESH.findall(header[at : at + 300])}
    elif meshes := _MESH_LIST.findall(header):
        names, counts = meshes[-1]
        keys = re.findall(rb"\w+", names)
        sizes = {k.decode(): int(v) for k, v in zip(keys, counts.split(b","), strict=False)}
    facts = {}
    if sizes:
        shard = sizes.get("dp_shard", 1)
        sizes.setdefault("dp_replicate", sizes.pop("dp", 1))
        product = int(np.prod([s for k, s in sizes.items() if k in _AXES]))
        facts = {"tp": sizes.get("tp", 1), "pp": sizes.get("pp", 1), "cp": sizes.get("cp")}
        if shard > 0:
            facts |= {"dp": sizes["dp_replicate"] * shard, "gpus": product}
    per_node = last_number(rb"(?:--nproc[_-]per[_-]node[= ]{1,3}|\bNGPU=)(\d{1,4})", header)
    nodes = last_number(rb"(?:--nnodes[= ]{1,3}|\bNNODES=)(\d{1,5})", header)
    if per_node and "gpus" not in facts:
        facts["gpus"] = per_node * (nodes or 1)
    return facts


def _finish(record: Record, log: Log, kept: list[int]) -> None:
    if kept and not record.completed:
        record.completed = b"Training completed" in log.slice(kept[-1], kept[-1] + (1 << 16))


FORMAT = LineFormat(
    name="torchtitan",
    marks=((b"step:", b"tps: ", b"memory: "), (b"step:", b"wps: ", b"memory: ")),
    banners=(b"torchtitan", b"[titan]"),
    lines=((_STEP, _FIELDS),),
    facts={
        "micro_batch": rb"local batch size {0,2}(\d{1,9})",
        "global_batch": rb"global batch size {0,2}(\d{1,9})",
        "seq_len": rb"sequence length {0,2}(\d{1,9})",
        "planned_steps": rb"total steps {0,2}(\d{1,9})",
        "params": rb"size: {0,2}([\d,]{4,24}) total parameters",
    },
    averages=True,
    prepare=_derive,
    finish=_finish,
)
