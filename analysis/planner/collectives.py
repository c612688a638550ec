"""Published all-reduce measurements (logs/published/all_reduce.csv) that help to fit a cluster."""

from dataclasses import dataclass
from functools import cache

import numpy as np

from analysis.logs.published_csv import read_csv
from analysis.planner import timemodel
from analysis.planner.timemodel import Machine
from base.files import ROOT
from models.gpus import planning_gpu

FILE = ROOT / "logs" / "published" / "all_reduce.csv"


@dataclass(frozen=True)
class AllReduces:
    """Measured all-reduces of one cluster, arrays (n,): ranks fill their nodes; size is bytes."""

    ranks: np.ndarray
    size: np.ndarray
    gpus_per_node: np.ndarray
    measured: np.ndarray

    def seconds(self, machine: Machine, constants: dict) -> np.ndarray:
        """Predicted seconds of them on a cluster's machine."""
        return timemodel.all_reduce(self.ranks, self.size, self.gpus_per_node, machine, constants)


def cluster_key(gpu: str | None, cluster: str | None) -> str:
    """Equal for rows of one cluster: the card and the first word of the cluster's description.

    Raises:
        UsageError: unknown card.
    """
    return f"{planning_gpu(gpu).name} {(cluster or '').split(' ')[0]}"


@cache
def measured_on(key: str) -> AllReduces | None:
    """The published all-reduces of a cluster; None where there are none."""
    names = ("ranks", "bytes", "gpus_per_node", "seconds")
    table = read_csv(FILE, ("gpu_type", "cluster", *names))
    rows = [r for r in table.rows if cluster_key(r.text("gpu_type"), r.text("cluster")) == key]
    if not rows:
        return None
    return AllReduces(*(np.array([r.number(n) for r in rows]) for n in names))
