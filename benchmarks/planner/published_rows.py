"""Rows of published measurements (a CSV with the columns of logs/published) as `Columns`.

What a row leaves out is derived where an identity gives it (gas, dp, layers from parameters), or
has its usual value where that is harmless (vocabulary 51,200); else the row is left out, with the
reason.
"""

import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np

from analysis.logs.published_csv import Row
from analysis.planner.columns import Columns
from analysis.planner.memory.peak import allocated
from analysis.planner.memory.pipeline import layer_numbers, stages
from analysis.planner.runs import row_of
from analysis.planner.timemodel.machine import Machine, machine_of
from analysis.published.published_runs import named_rows, record_of
from analysis.published.unstated import GPUS_PER_NODE, beside, complete
from base.errors import UsageError
from base.units import GIB
from models.config import GPTConfig
from models.flops import sc21
from models.gpus import planning_gpu

NEEDED = ("gpu_type", "gpus", "hidden", "tp", "pp", "micro_batch", "step_s")
CRASHED = ("OOM", "crashed_or_OOM")  # statuses of runs that may have had too little memory
SLOW = 1.3  # a run this many times slower than one with no less to do met what is not modelled


def stages_without_layers(x: Columns) -> np.ndarray:
    """Stages behind that of the last layer, where the output layer counts in cutting them: stage s
    begins at the layer at which s shares of the parameters are reached."""
    share = (x.layers + x.vocab * x.hidden / layer_numbers(x)) / x.pp  # in layers
    behind = x.pp - 1 - np.floor((x.layers - 1) / share + 1e-9)
    return np.where(x.nanotron, np.maximum(behind, 0), 0)


@dataclass
class Rows:
    """The rows that can be modelled, and why the others cannot.

    measured: seconds per step, nan where there is none. memory_gb likewise. status: ok, OOM ...
    fit: may be fitted (the row does not contradict itself).
    steady: the time is not of a first iteration.
    model: (layers, hidden) of each row, for splits.
    """

    ids: list[str]
    x: Columns
    machine: Machine
    measured: np.ndarray
    memory_gb: np.ndarray
    gpu_memory_gb: np.ndarray
    status: list[str]
    fit: np.ndarray
    steady: np.ndarray
    model: list[tuple[int, int]]
    cluster: list[str]
    gpus_per_node: np.ndarray  # of a node, where fast links join more than those, too
    gpu: list[str]
    cluster_key: list[str]
    left_out: list[tuple[str, str]]
    last_stage: np.ndarray  # whether memory_gb is that of a rank of the last pipeline stage

    @property
    def allocated(self) -> np.ndarray:
        """Gigabytes that PyTorch allocates on the rank of memory_gb, nan where no formula counts
        every tensor, (n,)."""
        ranks = zip(self.x.steps, self.last_stage.tolist(), strict=True)
        bytes_ = [allocated(step, stages(step)[-1] if is_last else None) for step, is_last in ranks]
        return np.array(bytes_) / GIB

    @property
    def has_step_memory(self) -> np.ndarray:
        """Rows whose gigabytes are what a step needs, bool (n,).

        A reading of the whole card is what the allocator took. Rows in fp8 do not say whether they
        hold the weights in bf16 beside fp8.
        """
        full = self.memory_gb >= self.gpu_memory_gb
        return np.isfinite(self.memory_gb) & ~full & ~self.x.fp8 & ~self.tensors_alone

    @property
    def tensors_alone(self) -> np.ndarray:
        """Rows whose gigabytes are those of tensors, without CUDA's context and NCCL, bool (n,):
        nanotron prints PyTorch's largest sum of allocated bytes."""
        return self.x.nanotron

    @property
    def can_start(self) -> np.ndarray:
        """Whether the row's engine can start it at all, whatever its memory, bool (n,).

        nanotron wants pp - 1 micro-batches or more for its schedule, and something in each stage:
        norm, output layer and loss fill two stages behind the last layer. Of 212 such runs of the
        Ultra-Scale sweep one ran.
        """
        x = self.x
        few, empty = x.n_micro < x.pp - 1, stages_without_layers(x) > 2
        return ~(x.nanotron & (few | empty))

    def key(self, i: int) -> tuple:
        """A key that rows share when they repeat one run."""
        numbers = tuple(float(getattr(self.x, f.name)[i]) for f in fields(Columns))
        return (*numbers, self.cluster_key[i], self.status[i])


def _seconds(row: Row, x: Columns) -> float:
    """Published seconds, or what the published tokens/s or TFLOP/s give under their formula."""
    if seconds := row.number("step_s"):
        return seconds
    tokens = int(x.global_batch[0] * x.seq[0])
    if rate := row.number("tokens_per_s"):
        return tokens / rate
    rate, formula, gpus = row.number("tflops"), row.text("formula"), int(x.gpus[0])
    if rate and re.search(r"96|eq\.?3", formula):
        sizes = (int(column[0]) for column in (x.layers, x.hidden, x.vocab, x.seq))
        n_layer, hidden, vocab, seq = sizes
        shape = GPTConfig(
            n_layer=n_layer, hidden=hidden, n_head=1, vocab_size=vocab, max_seq_len=seq
        )
        return sc21(shape, seq, recompute=True) * tokens / (rate * 1e12 * gpus)
    params = row.number("params_b")
    if rate and params and (match := re.search(r"([68])\s*PT", formula)):
        return int(match[1]) * params * 1e9 * tokens / (rate * 1e12 * gpus)
    return math.nan


class _Modelled(NamedTuple):
    """A row that can be modelled: what it is called, its cells, its run and its columns."""

    name: str
    row: Row
    x: Columns
    machine: Machine


def _modelled(name: str, row: Row) -> _Modelled:
    """Raises: ValueError: what the row lacks, or what cannot be."""
    record = complete(record_of(row, name), row)
    columns = beside(record, row)
    x = row_of(record, lambda engine, tp, gpus: columns)
    low = record.precision if record.precision in ("fp8", "fp4") else "fp8"
    card, node = row.text("gpu_type"), _node(row)
    domain, width = columns["gpus_per_node"], int(x.width[0])
    machine = machine_of(card, row.text("cluster"), node, width, low, domain, bool(x.tf32[0]))
    return _Modelled(name, row, x, machine)


def read_rows(paths: list[Path], needed: tuple[str, ...] = NEEDED) -> Rows:
    """Returns every row of the files that can be modelled; `needed` columns must be there."""
    modelled: list[_Modelled] = []
    left_out: list[tuple[str, str]] = []
    for path in paths:
        for name, row in named_rows(Path(path), needed):
            try:
                modelled.append(_modelled(name, row))
            except ValueError as error:
                left_out.append((name, str(error)))
    if not modelled:
        reason = f" ({left_out[0][0]}: {left_out[0][1]})" if left_out else ""
        raise UsageError(f"{', '.join(map(str, paths))}: no row can be modelled{reason}")
    names, rows, xs, machines = zip(*modelled, strict=True)
    x = Columns.stack(xs)
    status = [re.sub("^(ok|)$", "ok", row.text("status"), flags=re.IGNORECASE) for row in rows]
    seconds = list(map(_seconds, rows, xs))
    return Rows(
        ids=list(names),
        x=x,
        machine=Machine.stack(machines),
        measured=np.where(np.array(status) == "ok", seconds, np.nan),
        memory_gb=np.array([row.number("memory_gb") or math.nan for row in rows]),
        gpu_memory_gb=np.array([row.number("gpu_memory_gb") or math.nan for row in rows]),
        status=status,
        fit=np.array([not row.text("lint") for row in rows]),
        steady=np.array([not row.text("warm_up") for row in rows]),
        model=list(zip(x.layers.tolist(), x.hidden.tolist(), strict=True)),
        cluster=[row.text("cluster") for row in rows],
        gpus_per_node=np.array([_node(row) for row in rows]),
        gpu=[planning_gpu(row.text("gpu_type")).name for row in rows],
        cluster_key=[_cluster_key(row) for row in rows],
        left_out=left_out,
        last_stage=np.array([row.text("memory_of") == "the last rank" for row in rows]),
    )


def _node(row: Row) -> int:
    return int(row.number("gpus_per_node") or GPUS_PER_NODE)


def _cluster_key(row: Row) -> str:
    """Equal for rows of one cluster: the card and the first word of the cluster's description."""
    return f"{planning_gpu(row.text('gpu_type')).name} {row.text('cluster').split(' ')[0]}"


def healthy(rows: Rows) -> np.ndarray:
    """False for the runs that met a slow network, bool (n,).

    A cluster has slow days if two of its identical runs are 1.3 times apart (Jean Zay's V100 nodes:
    129 and 217 s); only there is a run called slow. It is slow if a run with no less to do was 1.3
    times as fast. On one split of one model the time t grows with the size b and the number m of
    micro-batches. The time of a sequence in a pipeline slot, t / (b (m + (pp - 1) / vpp)), does not
    grow with them.
    """
    x, t = rows.x, rows.measured
    slot = t / (x.micro_batch * (x.n_micro + (x.pp - 1) / x.vpp))
    groups: dict[tuple, list[int]] = {}
    same: dict[tuple, list[int]] = {}
    for i in range(len(t)):
        if np.isfinite(t[i]) and rows.fit[i] and rows.steady[i]:
            key = (*rows.model[i], int(x.heads[i]), int(x.seq[i]), int(x.tp[i]), int(x.pp[i]))
            key += (int(x.vpp[i]), int(x.dp[i]), int(x.zero_stage[i]) == 3, int(x.recompute[i]))
            key += (int(x.cp[i]), bool(x.fp8[i]), rows.cluster[i])
            groups.setdefault(key, []).append(i)
            same.setdefault(rows.key(i), []).append(i)
    unsteady = {rows.cluster[g[0]] for g in same.values() if t[g].max() > SLOW * t[g].min()}
    good = np.ones(len(t), bool)
    for group in groups.values():
        if rows.cluster[group[0]] in unsteady:
            size, count = x.micro_batch[group], x.n_micro[group]
            more = (size >= size[:, None]) & (count >= count[:, None])  # [i, j]: j does, beside i
            slow = more & (t[group][:, None] > SLOW * t[group])
            slow |= more.T & (slot[group][:, None] > SLOW * slot[group])
            good[group] = ~slow.any(axis=1)
    return good
