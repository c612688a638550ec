"""What is known of a cluster's speed: a TOML file with at most 15 constants, or the data sheet.

`analysis/planner/calibrations/<name>.toml` are committed, each with the report of its fit;
`python -m analysis.calibrate` writes more. A cluster of slurm/clusters.toml without one starts from
its card's data sheet and the priors of analysis/planner/fitting.py.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from analysis.planner.columns import Columns
from analysis.planner.engines import families
from analysis.planner.fitting import NAMES, Fit, card_fit
from analysis.planner.timemodel.machine import Machine, machine_of
from base.bounds import Bounds, key, values_of
from base.errors import Answer, UsageError
from base.files import read_toml
from base.storage import output
from models.flops import DEFAULT_CONVENTION
from models.gpus import (
    NETWORK,
    PCIE,
    card_memory,
    check_network,
    joined,
    lacking,
    mfu,
    network_rate,
    pcie_rate,
    peak_tflops,
    planning_gpu,
)
from models.headroom import CONSTANTS
from parallel.config import clusters
from parallel.config.run_spec import gemm_precision

# FlashAttention's kernels need compute capability 8.0 (Ampere) or CDNA 2: these cards are older.
UNFUSED = ("T4", "P100 SXM2", "V100 SXM2", "V100S PCIe", "V100 PCIe")
MARK = "# Written by: python -m analysis.calibrate"
FOLDER = Path(__file__).resolve().parent / "calibrations"
RATES = ("peak", "memory_rate", "link", "network", "cores")
_POSITIVE = Bounds(0, math.inf, above=True, below=True)
_NOT_NEGATIVE = Bounds(0, math.inf, below=True)
# The tables of a file: [constants], [memory], [machine] and [fit], which has the covariance, too.
_Constants = make_dataclass("_Constants", [(n, float, key(MISSING, "", _POSITIVE)) for n in NAMES])
_Memory = make_dataclass(
    "_Memory", [(n, float, key(v, "", _NOT_NEGATIVE)) for n, v in CONSTANTS.items()]
)
_Rates = make_dataclass("_Rates", [(n, float, key(MISSING, "", _POSITIVE)) for n in RATES])


@dataclass(frozen=True)
class _Fitted:
    """The table [fit] of a file: the runs that were fitted, and how well the fit did."""

    n: int = key(MISSING, "", Bounds(0, 10**9))
    sigma: float = key(MISSING, "", _NOT_NEGATIVE)
    gpus: int = key(0, "", Bounds(0, 10**9))  # 0: not stated, as in older files
    report: str = key("")
    models: tuple[str, ...] = key(())  # layers x hidden size; none: not stated, as in older files
    rows: tuple[str, ...] = key(())


@dataclass(frozen=True, kw_only=True)
class _Stated:
    """What a file says of the cluster itself, in the file's order."""

    gpu: str = key(MISSING)
    processor: str = key("")  # of a host CPU, as its runs name it
    gpus_per_node: int = key(MISSING, "", Bounds(1, 10**9))
    gpu_memory_gb: float = key(MISSING, "", _POSITIVE)
    network: str = key("")  # words that `network_rate` understands
    links: str = key("")  # PCI Express between a node's cards, where they have no others
    flash: bool = key(False)


@dataclass(frozen=True, kw_only=True)
class _File(_Stated):
    """What a file states beside the covariance."""

    constants: _Constants = key(MISSING)
    fit: _Fitted = key(MISSING)
    memory: _Memory | None = key(None)
    machine: _Rates | None = key(None)


@dataclass(frozen=True, kw_only=True)
class Calibration(_Stated):
    """What the planner needs of a cluster."""

    name: str
    fit: Fit
    memory: dict[str, float] = field(default_factory=lambda: dict(CONSTANTS))
    max_gpus: int | None = None
    source: str = ""
    machine_override: Machine | None = None
    domain: int | None = None  # GPUs that fast links join, where a cluster states it

    @property
    def joined(self) -> int:
        """Returns the number of GPUs that fast links join: those of a node, or of a rack."""
        return self.domain or joined(self.gpu, self.gpus_per_node)

    @property
    def is_host(self) -> bool:
        """Returns whether this is a host CPU, whose cores count as GPUs."""
        return self.machine_override is not None

    def columns(self, engine: Any, tp: Any, gpus: Any) -> dict[str, Any]:
        """Returns the columns that a cluster sets of layouts; scalars or arrays."""
        if self.is_host:
            return host_columns(engine, tp, gpus)
        megatron = (np.asarray(engine) == "megatron") & ("bf16" in planning_gpu(self.gpu).peaks)
        return {
            "flash": self.flash,
            "gpus_per_node": self.joined,
            "family": families(engine),
            "megatron": megatron,  # with Transformer Engine, for which V100s are too old
        }

    def precision(self, asked: str | None) -> str:
        """Returns the precision to plan in: `asked`, else bf16, or fp16 on a card without;
        fp32 on a host CPU. Refuses a precision that the card lacks."""
        if self.is_host:
            if asked not in (None, "fp32"):
                raise UsageError(f"{self.name} is measured in fp32 alone, not {asked}")
            return "fp32"
        card = planning_gpu(self.gpu)
        if asked and lacking([asked], card.name):
            usual = ("bf16", "fp16", "fp32")
            possible = " or ".join(name for name in usual if not lacking([name], card.name))
            raise UsageError(
                f"the {card.name} of {self.name} has no {asked}: --precision {possible}"
            )
        return asked or ("bf16" if "bf16" in card.peaks else "fp16")

    def mfu(self, tflops: float, gemms: str) -> Answer[float]:
        """Returns `models.gpus.mfu` of the card; `gemms` is the number format of its GEMMs."""
        return mfu(tflops, self._card(), gemms, DEFAULT_CONVENTION)

    def gemm_precision(self, precision: str) -> str:
        """Returns the number format of a plan's GEMMs: for fp32 TF32, on a card that has it."""
        return gemm_precision(precision, bool(peak_tflops(self._card(), "tf32")))

    def _card(self) -> str:
        """Returns the card's name, or that of the host CPU."""
        return self.gpu if self.is_host else planning_gpu(self.gpu).name

    def on_network(self, words: str | None, gpus: float) -> "Calibration":
        """Returns the cluster with another network between its nodes, where --network states it."""
        if words is None:
            return self
        if self.is_host or gpus <= self.joined:
            place = self.name if self.is_host else f"{gpus} GPUs of {self.name}"
            raise UsageError(f"--network: {place} is one node, and nothing leaves it")
        check_network(words, self.gpus_per_node, "--network")
        return replace(self, network=words)

    def on_links(self, words: str | None) -> "Calibration":
        """Returns the cluster with PCI Express between a node's cards, where --links states it."""
        if words is None:
            return self
        if pcie_rate(words) is None:
            raise UsageError(f"--links {words!r} states no PCI Express; write it as {PCIE}")
        return replace(self, links=words, domain=self.gpus_per_node)

    def processor_note(self, processors: Iterable[str | None]) -> list[str]:
        """Returns a line that names the runs' processors that are not the calibrated host CPU; none
        where all are it, or this is no host CPU."""
        strangers = set(processors) - {None, self.processor}
        if not (self.processor and strangers):
            return []
        return [
            f"{self.name} was calibrated on {self.processor}, and runs here are of"
            f" {', '.join(sorted(strangers))}: their predicted times are of the other processor"
        ]

    def links_note(self) -> list[str]:
        """Returns a line on the PCI Express that joins a node's cards; none where other links do,
        or the node has one card."""
        if self.is_host or self.gpus_per_node < 2:
            return []
        rate = f"{self.machine().link / 1e9:.3g} GB/s a card in each direction"
        source = "as the card's sheet has it" if not self.links else "as stated"
        words = self.links or planning_gpu(self.gpu).pcie
        return [f"links of a node's cards: {words}, {rate} ({source}), no NVLink"] if words else []

    def network_note(self, gpus: float = math.inf) -> list[str]:
        """Returns a line that states the rate of the network between the nodes and its source; none
        where no message of `gpus` GPUs leaves a node."""
        if self.is_host or gpus <= self.joined:
            return []
        nodes = self.joined / self.gpus_per_node
        gbits = f"{self.machine().network / nodes * 8 / 1e9:.4g} Gb/s a node in each direction"
        if network_rate(self.network, self.gpus_per_node) is not None:
            return [f"network: {gbits} ({self.network})"]
        unread = f"{self.network!r} states no rate" if self.network else "none is stated"
        return [
            f"network assumed ({unread}): {gbits}, as in the maker's own node with"
            f" {planning_gpu(self.gpu).name}; state yours with --network, or as the cluster's key"
            f" interconnect, as {NETWORK}"
        ]

    def machine_for(self, steps: Columns) -> Machine:
        """Returns `machine` for rows of one number format, which the first states."""
        return self.machine(int(steps.width[0]), bool(steps.tf32[0]))

    def machine(self, width: int = 2, tf32: bool = False) -> Machine:
        """Returns the rates of one GPU, and of the network of all GPUs that fast links join, for
        weights of `width` bytes. Weights of 4 bytes are multiplied in fp32, or in TF32."""
        if self.machine_override is not None:
            return self.machine_override
        node, joined = self.gpus_per_node, self.joined
        return machine_of(self.gpu, self.network, node, width, "fp8", joined, tf32, self.links)


def host_columns(engine: Any, tp: Any, gpus: Any) -> dict[str, Any]:
    """Returns the columns of runs on a host CPU; scalars or arrays.

    Its ranks share one node and its attention is fused. Engines that run megatron-core's layers
    are slower than those with plain layers, by the factor `engine` of the fit.
    """
    engine, tp = np.asarray(engine), np.asarray(tp)
    core = np.isin(engine, ("megatron", "deepspeed_pipe"))
    core = core | ((engine == "deepspeed_zero") & (tp > 1))
    return {"flash": True, "gpus_per_node": gpus, "slower": core}


def load_calibration(name: str) -> Calibration:
    """Returns a calibration by its name or file."""
    path = FOLDER / f"{name}.toml"
    if not path.exists():
        path = Path(name)
    if path.suffix == ".toml":
        return _read(path)
    if clusters.is_named(name):
        return of_cluster(name)
    names = {
        cluster_name for cluster_name, cluster in clusters.load_clusters().items() if cluster.gpu
    }
    names |= {path.stem for path in FOLDER.glob("*.toml")}
    raise UsageError(f"no cluster or calibration {name!r}; known: {', '.join(sorted(names))}")


def of_cluster(name: str) -> Calibration:
    """Returns a cluster of a clusters file by the data sheet of its card."""
    stated = clusters.cluster(name)
    if not stated.gpu:
        raise UsageError(
            f"cluster {name} of {stated.source} names no gpu: give its table the key gpu, or"
            " plan for another with --cluster NAME"
        )
    memory_gb = stated.gpu_memory_gb or None
    planned = replace(
        from_data_sheet(stated.gpu, stated.gpus_per_node, name, memory_gb),
        network=stated.interconnect,
        domain=stated.domain,
        max_gpus=stated.max_nodes and stated.max_nodes * stated.gpus_per_node,
    )
    return planned.on_links(stated.links or None)


def from_data_sheet(
    gpu: str, gpus_per_node: int = 8, name: str = "", memory_gb: float | None = None
) -> Calibration:
    """Returns a cluster that nobody has measured: its card's data sheet, the network of the maker's
    own node, and the priors. `memory_gb` is that of one card; None takes `card_memory`'s."""
    card, rates = planning_gpu(gpu), ""
    memory_gb = memory_gb or card_memory(gpu)
    if memory_gb != card.memory_gb:
        rates = f"; rates of the card of {card.memory_gb:g} GB"
    return Calibration(
        name=name or card.name,
        gpu=gpu,
        gpus_per_node=gpus_per_node,
        gpu_memory_gb=memory_gb,
        fit=card_fit(card.name),
        flash=card.name not in UNFUSED,
        source=f"data sheet and priors, fitted on no run{rates}",
    )


def _read(path: Path) -> Calibration:
    """Returns the calibration that a file states; refuses a file that is none."""
    where, table = f"calibration {path}", read_toml(path, "calibration")
    fitted = table.get("fit")
    rows = fitted.pop("covariance", None) if isinstance(fitted, dict) else None
    stated = values_of(_File, table, where)
    try:
        covariance = np.array(rows, float)
    except (TypeError, ValueError):
        covariance = np.zeros(0)
    if covariance.shape != (len(NAMES), len(NAMES)) or not np.isfinite(covariance).all():
        raise UsageError(f"{where}: covariance is no {len(NAMES)} x {len(NAMES)} table of numbers")
    constants, fitted = asdict(stated.pop("constants")), stated.pop("fit")
    behind = {"gpus": fitted.gpus or stated["gpus_per_node"], "models": frozenset(fitted.models)}
    rates, constants_of_memory = stated.pop("machine", None), stated.pop("memory", None)
    if rates is None:
        planning_gpu(stated["gpu"])
        if words := stated.get("network"):
            check_network(words, stated["gpus_per_node"], f"{where}: network")
    return Calibration(
        name=path.stem,
        **stated,
        fit=Fit(constants, covariance, fitted.sigma, fitted.n, **behind),
        memory=asdict(constants_of_memory or _Memory()),
        source=f"{path.name}: {fitted.n} runs, {fitted.report}",
        machine_override=Machine(**asdict(rates)) if rates else None,
    )


def write(path: Path, cluster: Calibration, report: str, rows: list[str]) -> None:
    """Writes a calibration to a file, with the ids of the fitted rows and the report of the fit."""
    fit = cluster.fit
    lines = [f"{MARK}. {report}"]
    for fact in fields(_Stated):
        if (value := getattr(cluster, fact.name)) != "":
            lines.append(f"{fact.name} = {json.dumps(value)}")
    lines += ["", "[constants]  # analysis/planner/fitting.py says what each is"]
    lines += [f"{n} = {float(fit.constants[n]):.6g}" for n in NAMES]
    lines += ["", "[memory]", *(f"{k} = {float(v):.4g}" for k, v in cluster.memory.items())]
    if cluster.is_host:
        lines += ["", "[machine]  # measured here: FLOP/s and bytes/s"]
        lines += [f"{n} = {float(getattr(cluster.machine_override, n)):.6g}" for n in RATES]
    lines += ["", "[fit]", f"n = {fit.n}", f"sigma = {fit.sigma:.4f}", f"gpus = {fit.gpus}"]
    lines += [f"report = {json.dumps(report)}", f"models = {json.dumps(sorted(fit.models))}"]
    lines += ["rows = ["]
    lines += [*(f"  {json.dumps(row)}," for row in rows), "]", "covariance = ["]
    lines += ["  [" + ", ".join(f"{v:.4g}" for v in row) + "]," for row in fit.covariance]
    with output(path, MARK, force=True) as file:  # the command has checked the name
        file.write_text("\n".join([*lines, "]"]) + "\n")
