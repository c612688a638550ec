"""Rows of published measurements (a CSV with the columns of logs/published) as `Columns`.

What a row leaves out is derived where an identity gives it (gas, dp, layers from parameters), or
has its usual value where that is harmless (vocabulary 51,200); else the row is left out, with the
reason.
"""

import math
import re
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from analysis.logs.published_csv import Row
from analysis.planner.columns import Columns
from analysis.planner.memory.peak import allocated
from analysis.planner.memory.pipeline import layer_numbers, stages
from analysis.planner.runs import row_of
from analysis.planner.timemodel.machine import Machine, machine_of
from analysis.published.published_runs import named_rows, record_of, stated_rate
from analysis.published.unstated import GPUS_PER_NODE, beside, complete
from base.errors import UsageError
from base.units import GIB
from models.gpus import planning_gpu

NEEDED = ("gpu_type", "gpus", "hidden", "tp", "pp", "micro_batch", "step_s")
CRASHED = ("OOM", "crashed_or_OOM")  # statuses of runs that may have had too little memory
SLOW = 1.3  # a run this many times slower than one with no less to do met what is not modelled


@dataclass
class Rows:
    """The rows that can be modelled, a value of each field for each row, and why the others cannot.

    measured: seconds per step, nan where there is none. memory_gb likewise. status: ok, OOM ...
    fit: may be fitted (the row does not contradict itself).
    steady: the time is not of a first iteration.
    """

    ids: list[str]
    steps: Columns
    machine: Machine
    measured: np.ndarray
    memory_gb: np.ndarray
    gpu_memory_gb: np.ndarray
    status: np.ndarray
    fit: np.ndarray
    steady: np.ndarray
    cluster: np.ndarray
    release: np.ndarray  # of the program, as its row says: 26.04.01
    gpus_per_node: np.ndarray  # of a node, where fast links join more than those, too
    gpu: np.ndarray
    is_last_stage: np.ndarray  # whether memory_gb is that of a rank of the last pipeline stage
    left_out: list[tuple[str, str]]

    @cached_property
    def model(self) -> list[tuple[int, int]]:
        """Returns the layers and the hidden size of each row's model."""
        return list(zip(self.steps.layers.tolist(), self.steps.hidden.tolist(), strict=True))

    @cached_property
    def cluster_key(self) -> np.ndarray:
        """Returns what rows of one cluster share: the card and the first word of the cluster's
        description."""
        pairs = zip(self.gpu, self.cluster, strict=True)
        return np.array([f"{gpu} {cluster.split(' ')[0]}" for gpu, cluster in pairs])

    @property
    def allocated(self) -> np.ndarray:
        """Returns the gigabytes, (n,), that PyTorch allocates on the rank of memory_gb; nan where
        no formula counts every tensor."""
        ranks = zip(self.steps.rows, self.is_last_stage, strict=True)
        sizes = [allocated(step, stages(step)[-1] if is_last else None) for step, is_last in ranks]
        return np.array(sizes) / GIB

    @property
    def has_step_memory(self) -> np.ndarray:
        """Returns which rows' gigabytes are what a step needs, bool (n,).

        A reading of the whole card is what the allocator took. Rows in fp8 do not say whether they
        hold the weights in bf16 beside fp8.
        """
        full = self.memory_gb >= self.gpu_memory_gb
        return np.isfinite(self.memory_gb) & ~full & ~self.steps.fp8 & ~self.tensors_alone

    @property
    def tensors_alone(self) -> np.ndarray:
        """Returns which rows' gigabytes count tensors alone, bool (n,). nanotron prints PyTorch's
        largest sum of allocated bytes, in which CUDA's context and NCCL are not."""
        return self.steps.nanotron

    @property
    def can_start(self) -> np.ndarray:
        """Returns whether the row's engine can start it at all, whatever its memory, bool (n,).

        nanotron wants pp - 1 micro-batches or more for its schedule, and something in each stage:
        norm, output layer and loss fill two stages behind the last layer. The output layer counts
        in cutting stages: stage s begins at the layer at which s shares of the parameters are
        reached. Of 212 such runs of the Ultra-Scale sweep one ran.
        """
        steps = self.steps
        output_layers = steps.vocab * steps.hidden / layer_numbers(steps)
        share = (steps.layers + output_layers) / steps.pp  # in layers
        stages_without_layers = steps.pp - 1 - np.floor((steps.layers - 1) / share + 1e-9)
        return ~(steps.nanotron & ((steps.n_micro < steps.pp - 1) | (stages_without_layers > 2)))

    def repeats(self, index: np.ndarray) -> list[np.ndarray]:
        """Returns the rows of `index` in groups of those that repeat one run."""
        settings = {f.name: getattr(self.steps, f.name)[index] for f in fields(Columns)}
        runs = pandas.DataFrame(settings)
        runs = runs.assign(cluster=self.cluster_key[index], status=self.status[index])
        return [index[places] for places in runs.groupby(list(runs)).indices.values()]


def _modelled(name: str, row: Row) -> dict[str, Any]:
    """Returns the values of a row, by the fields of Rows.

    Raises:
        ValueError: a number that cannot be, or one that the row lacks.
    """
    record = complete(record_of(row, name), row)
    columns = beside(record, row)
    steps = row_of(record, lambda engine, tp, gpus: columns)
    low = record.precision if record.precision in ("fp8", "fp4") else "fp8"
    card, node = row.text("gpu_type"), int(row.number("gpus_per_node") or GPUS_PER_NODE)
    domain, width = columns["gpus_per_node"], int(steps.width[0])
    machine = machine_of(card, row.text("cluster"), node, width, low, domain, bool(steps.tf32[0]))
    status, step_s = row.text("status"), row.number("step_s")
    status = "ok" if status.lower() in ("", "ok") else status
    if not step_s and (rate := stated_rate(record, row)):
        step_s = int(steps.global_batch[0] * steps.seq[0]) / rate
    if not step_s or status != "ok":
        step_s = math.nan
    return {
        "ids": name,
        "steps": steps,
        "machine": machine,
        "measured": step_s,
        "memory_gb": row.number("memory_gb") or math.nan,
        "gpu_memory_gb": row.number("gpu_memory_gb") or math.nan,
        "status": status,
        "fit": not row.text("lint"),
        "steady": not row.text("warm_up"),
        "cluster": row.text("cluster"),
        "release": " ".join(re.findall(r"\b\d\d\.\d\d(?:\.\d+)?\b", row.text("engine"))),
        "gpus_per_node": node,
        "gpu": planning_gpu(card).name,
        "is_last_stage": row.text("memory_of") == "the last rank",
    }


def read_rows(paths: list[Path], needed: tuple[str, ...] = NEEDED) -> Rows:
    """Returns every row of the files that can be modelled; `needed` columns must be there."""
    modelled, left_out = [], []
    for path in paths:
        for name, row in named_rows(Path(path), needed):
            try:
                modelled.append(_modelled(name, row))
            except ValueError as error:
                left_out.append((name, str(error)))
    if not modelled:
        reason = f" ({left_out[0][0]}: {left_out[0][1]})" if left_out else ""
        raise UsageError(f"{', '.join(map(str, paths))}: no row can be modelled{reason}")
    columns = {name: [row[name] for row in modelled] for name in modelled[0]}
    ids, steps, machines = (columns.pop(name) for name in ("ids", "steps", "machine"))
    return Rows(
        ids=ids,
        steps=Columns.stack(steps),
        machine=Machine.stack(machines),
        left_out=left_out,
        **{name: np.array(values) for name, values in columns.items()},
    )


def healthy(rows: Rows) -> np.ndarray:
    """Returns False for the runs that met a slow network, bool (n,).

    A cluster has slow days if two of its identical runs are 1.3 times apart (Jean Zay's V100 nodes:
    129 and 217 s); only there is a run called slow. It is slow if a run with no less to do was 1.3
    times as fast. On one split of one model the time t grows with the size b and the number m of
    micro-batches. The time of a sequence in a pipeline slot, t / (b (m + (pp - 1) / vpp)), does not
    grow with them.
    """
    steps, measured_s = rows.steps, rows.measured
    slot = measured_s / (steps.micro_batch * (steps.n_micro + (steps.pp - 1) / steps.vpp))
    timed = np.flatnonzero(np.isfinite(measured_s) & rows.fit & rows.steady)
    names = "layers hidden heads seq tp pp vpp dp cp recompute fp8".split()
    splits = pandas.DataFrame({name: getattr(steps, name)[timed] for name in names})
    splits = splits.assign(zero_3=steps.zero_stage[timed] == 3, cluster=rows.cluster[timed])
    splits = splits.assign(release=rows.release[timed])  # a later one may be faster
    unsteady = set()
    for repeats in rows.repeats(timed):
        for release in set(rows.release[repeats]):
            seconds = measured_s[repeats[rows.release[repeats] == release]]
            if seconds.max() > SLOW * seconds.min():
                unsteady.add(rows.cluster[repeats[0]])
    good = np.ones(len(measured_s), bool)
    for places in splits.groupby(list(splits)).indices.values():
        group = timed[places]
        if rows.cluster[group[0]] in unsteady:
            size, count = steps.micro_batch[group], steps.n_micro[group]
            more = (size >= size[:, None]) & (count >= count[:, None])  # [i, j]: j does, beside i
            slow = more & (measured_s[group][:, None] > SLOW * measured_s[group])
            slow |= more.T & (slot[group][:, None] > SLOW * slot[group])
            good[group] = ~slow.any(axis=1)
    return good
