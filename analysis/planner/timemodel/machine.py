"""What a GPU and its links are, from data sheets."""

from dataclasses import dataclass, fields

import numpy as np

from analysis.planner.columns import Array
from models.gpus import network_rate, pcie_rate, planning_gpu

# The share of the sheet's rate that products reach in FP8 over that in bf16. B200's bf16 was seen
# on one node (SimuMax), below GB200's, the same chip; its FP8 elsewhere (MLPerf).
FP8_OVER_BF16 = {"B200": 1.2, "B300": 1.2}


@dataclass(frozen=True)
class Machine:
    """What a GPU and its links are, from data sheets: FLOP/s and bytes/s per GPU, or per node
    (`Columns.gpus_per_node`: what fast links join).

    mesh: GPUs of a node are wired pairwise (V100), so that n of N GPUs own (n-1)/(N-1) of the
    links; False for a switch. cores: of a host CPU whose ranks share them. fp8: FLOP/s of GEMMs in
    fp8, 0 where there is none. Fields are arrays (n,) or scalars.
    """

    peak: Array | float
    memory_rate: Array | float
    link: Array | float
    network: Array | float
    mesh: Array | bool = False
    cores: Array | float = np.inf
    fp8: Array | float = 0.0

    def take(self, chosen: Array) -> "Machine":
        """Returns the rows that an index chooses, of fields that are arrays."""
        return Machine(*(getattr(self, f.name)[chosen] for f in fields(self)))

    @classmethod
    def stack(cls, machines: list["Machine"]) -> "Machine":
        """Returns one machine a row."""
        return cls(*(np.array([getattr(m, f.name) for m in machines]) for f in fields(cls)))


def machine_of(
    gpu: str | None,
    cluster: str | None,
    gpus_per_node: float,
    width: int = 2,
    low: str = "fp8",
    domain: float | None = None,
    tf32: bool = False,
    links: str = "",
) -> Machine:
    """Returns the machine of a card by name; the network's rate is the one that the cluster's
    description states, else the card's. low: what the layers' GEMMs run in where `Columns.fp8` says
    so. domain: GPUs that fast links join (`joined`, default: the node's), whose network is meant.
    width: bytes of a weight; those of 4 are multiplied in fp32, or where `tf32` and the card has
    it, in TF32. links: the PCI Express that joins a node's cards in place of their own links. An
    fp32 peak that is not known counts as an eighth of fp16's.

    Raises:
        UsageError: no such card.
    """
    card = planning_gpu(gpu)
    peak = card.peaks["fp16"]
    if width == 4:
        fp32 = card.peaks.get("fp32", peak / 8)
        peak = card.peaks.get("tf32", fp32) if tf32 else fp32
    network = network_rate(cluster, gpus_per_node) or card.network * float(gpus_per_node)
    network *= (domain or gpus_per_node) / gpus_per_node
    mesh = card.mesh and gpus_per_node <= 8  # sixteen V100s are a DGX-2, which has a switch
    link = pcie_rate(links) or card.link
    fp8 = card.peaks.get(low, 0.0) * 1e12 * FP8_OVER_BF16.get(card.name, 1.0)
    return Machine(peak * 1e12, card.memory_rate, link, network, mesh and not links, fp8=fp8)
