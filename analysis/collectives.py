"""Published all-reduce measurements (logs/published/all_reduce.csv) that help to fit a cluster."""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from analysis import timemodel
from analysis.timemodel import Machine
from models.hardware import planning_gpu

FILE = Path(__file__).resolve().parent.parent / "logs" / "published" / "all_reduce.csv"


@dataclass(frozen=True)
class AllReduces:
    """Measured all-reduces of one cluster, arrays (n,): ranks fill their nodes; size is bytes."""

    ranks: np.ndarray
    size: np.ndarray
    gpus_per_node: np.ndarray
    measured: np.ndarray

    def seconds(self, machine: Machine, constants: dict) -> np.ndarray:
        """What the time model says of them on a cluster's machine."""
        return timemodel.all_reduce(self.ranks, self.size, self.gpus_per_node, machine, constants)


def cluster_key(gpu: str | None, cluster: str | None) -> str:
    """Equal for rows of one cluster: the card and the first word of the cluster's description.

    Raises:
        UsageError: unknown card.
    """
    return f"{planning_gpu(gpu).name} {(cluster or '').split(' ')[0]}"


@cache
def measured_on(key: str) -> AllReduces | None:
    """The all-reduces that were published of a cluster, None where none were."""
    with FILE.open(newline="", encoding="utf-8") as lines:
        rows = [r for r in csv.DictReader(lines) if cluster_key(r["gpu_type"], r["cluster"]) == key]
    if not rows:
        return None
    names = ("ranks", "bytes", "gpus_per_node", "seconds")
    return AllReduces(*(np.array([float(r[n]) for r in rows]) for n in names))
