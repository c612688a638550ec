"""torchtitan.

    step: 10  loss:  7.94975  grad_norm: 38.7500  memory: 168.10GiB(94.25%)  tps: 6,922  ...

Coloured or not; early versions print `wps` for `tps`. Both are per device, averaged since the line
before; no step time is printed, so it follows from them where batch and GPUs are known.
"""

import re

import numpy as np

from analysis.readers._endings import judge_end
from analysis.readers._lines import ANSI, find_int, labelled, positive, table, word
from analysis.readers._log import Log
from analysis.readers._settings import header_of, read_header, state
from analysis.readers._steps import put_steps
from analysis.records import Record

FORMAT = "torchtitan"
MARKS = ((b"step:", b"tps: ", b"memory: "), (b"step:", b"wps: ", b"memory: "))
BANNERS = (b"torchtitan", b"[titan]")

_START = re.compile(
    word(b"step:")
    + rb"(?<!validate step:)"
    + ANSI
    + rb" {0,8}(?P<iteration>\d{1,9})"
    + ANSI
    + rb" {1,8}"
    + ANSI
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
_PER_NODE = re.compile(rb"(?:--nproc[_-]per[_-]node[= ]{1,3}|\bNGPU=)(\d{1,4})")
_NODES = re.compile(rb"(?:--nnodes[= ]{1,3}|\bNNODES=)(\d{1,5})")
_TRAINER = {
    "micro_batch": re.compile(rb"local batch size {0,2}(\d{1,9})"),
    "global_batch": re.compile(rb"global batch size {0,2}(\d{1,9})"),
    "seq_len": re.compile(rb"sequence length {0,2}(\d{1,9})"),
    "planned_steps": re.compile(rb"total steps {0,2}(\d{1,9})"),
    "params": re.compile(rb"size: {0,2}([\d,]{4,24}) total parameters"),
}


def read(log: Log) -> Record:
    """Read one log; without a step line the arrays are empty."""
    record = Record(source=str(log.path), format=FORMAT, engine=FORMAT)
    columns, found = table(log, _START, _FIELDS)
    header = header_of(log, int(found[0]) if len(found) else None)
    facts = {name: find_int(pattern, header) for name, pattern in _TRAINER.items()}
    state(record, facts | _mesh(header), "log")
    read_header(record, header)
    tps = positive(columns["tps"]) * (record.gpus or np.nan)
    columns["tokens_per_s"] = tps
    if record.gpus and record.global_batch and record.seq_len:
        columns["step_s"] = record.global_batch * record.seq_len / tps
        columns["samples_per_s"] = tps / record.seq_len
        record.notes.append("step times follow from the printed tokens per second")
    kept = put_steps(record, columns, found, log, averages=True)
    if kept and np.isnan(record.tokens_per_s).all():
        record.extra["tokens_per_s_per_gpu"] = columns["tps"]
    if kept:
        record.completed = b"Training completed" in log.slice(kept[-1], kept[-1] + (1 << 16))
        if record.planned_steps and record.iteration[-1] >= record.planned_steps:
            record.completed = True
    judge_end(record, log, kept)
    return record


def _mesh(header: bytes) -> dict[str, int]:
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
        facts = {"tp": sizes.get("tp", 1), "pp": sizes.get("pp", 1)}
        if shard > 0:
            facts |= {"dp": sizes["dp_replicate"] * shard, "gpus": product}
    per_node, nodes = find_int(_PER_NODE, header), find_int(_NODES, header)
    if per_node and "gpus" not in facts:
        facts["gpus"] = per_node * (nodes or 1)
    return facts


_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
