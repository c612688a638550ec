"""What is known of a cluster's speed: a TOML file with at most 15 constants, or the data sheet.

`analysis/planner/calibrations/<name>.toml` are committed, each with the report of its fit;
`python -m analysis.calibrate` writes more. A cluster of slurm/clusters.toml without one starts from
its card's data sheet and the priors of analysis/planner/fitting.py.
"""

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from analysis.planner.engines import families
from analysis.planner.fitting import NAMES, Fit, prior_fit, priors_of
from analysis.planner.timemodel import Machine, machine_of
from base.errors import UsageError
from base.files import read_toml
from base.storage import output
from models.flops import DEFAULT_CONVENTION
from models.gpus import (
    NETWORK,
    check_network,
    find_gpu,
    joined,
    lacking,
    mfu,
    network_rate,
    peak_tflops,
    planning_gpu,
)
from parallel.config import clusters, memory
from parallel.config.layout_arrays import Columns
from parallel.config.settings import gemm_precision

# FlashAttention's kernels need compute capability 8.0 (Ampere) or CDNA 2: these cards are older.
UNFUSED = ("T4", "P100 SXM2", "V100 SXM2", "V100S PCIe", "V100 PCIe")
MARK = "# Written by: python -m analysis.calibrate"
FOLDER = Path(__file__).resolve().parent / "calibrations"


@dataclass(frozen=True)
class Calibration:
    """A cluster as the planner needs it. network: words that `network_rate` understands."""

    name: str
    gpu: str
    gpus_per_node: int
    gpu_memory_gb: float
    network: str
    fit: Fit
    memory: dict[str, float] = field(default_factory=lambda: dict(memory.CONSTANTS))
    flash: bool = False
    max_gpus: int | None = None
    source: str = ""
    machine_override: Machine | None = None
    domain: int | None = None  # GPUs that fast links join, where a cluster states it
    processor: str = ""  # of a host CPU, as its runs name it

    @property
    def joined(self) -> int:
        """GPUs that fast links join: a node's, or those of a rack."""
        return self.domain or joined(self.gpu, self.gpus_per_node)

    @property
    def is_host(self) -> bool:
        """Whether this is a host CPU, whose cores count as GPUs."""
        return self.machine_override is not None

    def columns(self, engine: Any, tp: Any, gpus: Any) -> dict[str, Any]:
        """The columns that a cluster sets of layouts; scalars or arrays."""
        if self.is_host:
            return host_columns(engine, tp, gpus)
        return {
            "flash": self.flash,
            "gpus_per_node": self.joined,
            "family": families(engine),
        }

    def precision(self, wanted: str | None) -> str:
        """What to plan in: bf16 where the card has it, else fp16; fp32 on a host CPU.

        Raises:
            UsageError: bf16 or fp8 on a card without, or a precision that the host was not measured
                in.
        """
        if self.is_host:
            if wanted not in (None, "fp32"):
                raise UsageError(f"{self.name} was measured in fp32 alone: --precision fp32")
            return "fp32"
        card = planning_gpu(self.gpu)
        if wanted and lacking([wanted], card.name):
            others = [n for n in ("bf16", "fp16", "fp32") if n not in lacking([n], card.name)]
            raise UsageError(
                f"the {card.name} of {self.name} has no {wanted}: --precision {' or '.join(others)}"
            )
        return wanted or ("bf16" if "bf16" in card.peaks else "fp16")

    def mfu(self, tflops: float, precision: str) -> tuple[float | None, str]:
        """`models.gpus.mfu` of the card, in the number format of the plan's GEMMs."""
        return mfu(tflops, self._card(), self.gemm_precision(precision), DEFAULT_CONVENTION)

    def gemm_precision(self, precision: str) -> str:
        """The number format of a plan's GEMMs: fp32 is planned as TF32 on a card that has it."""
        return gemm_precision(precision, bool(peak_tflops(self._card(), "tf32")))

    def _card(self) -> str:
        return self.gpu if self.is_host else planning_gpu(self.gpu).name

    def network_note(self, gpus: float = math.inf) -> list[str]:
        """A line about the network between the nodes as it is planned with, and where that is known
        from; none where no message of `gpus` GPUs leaves a node."""
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

    def machine_for(self, x: Columns) -> Machine:
        """`machine` for rows of one number format, which the first states."""
        return self.machine(int(x.width[0]), bool(x.tf32[0]))

    def machine(self, width: int = 2, tf32: bool = False) -> Machine:
        """Rates of one GPU, and of the network of all GPUs that fast links join, for weights of
        `width` bytes; those of 4 are multiplied in fp32, or in TF32."""
        if self.machine_override is not None:
            return self.machine_override
        node = self.gpus_per_node
        return machine_of(self.gpu, self.network, node, width, domain=self.joined, tf32=tf32)


def host_columns(engine: Any, tp: Any, gpus: Any) -> dict[str, Any]:
    """The columns of runs on a host CPU; scalars or arrays.

    Its ranks share one node and its attention is fused. Engines that run megatron-core's layers
    are slower than those with plain layers, by the factor `engine` of the fit.
    """
    engine, tp = np.asarray(engine), np.asarray(tp)
    core = np.isin(engine, ("megatron", "deepspeed_pipe"))
    core = core | ((engine == "deepspeed_zero") & (tp > 1))
    return {"flash": True, "gpus_per_node": gpus, "slower": core}


def names() -> list[str]:
    """Every cluster that can be planned for."""
    return sorted({p.stem for p in FOLDER.glob("*.toml")} | set(_with_cards()))


def _with_cards() -> dict[str, Any]:
    return {name: c for name, c in clusters.load_clusters().items() if c.gpu}


def fits_of(gpu: str) -> list[str]:
    """Committed calibrations of the same card."""
    card, found = planning_gpu(gpu), []
    for path in sorted(FOLDER.glob("*.toml")):
        other = find_gpu(read_toml(path, "calibration")["gpu"])
        found += [path.stem] if other == card else []
    return found


def load_calibration(wanted: str) -> Calibration:
    """A calibration by name or file.

    Raises:
        UsageError: no such name or file, or what it holds is no calibration.
    """
    path = FOLDER / f"{wanted}.toml"
    if not path.exists():
        path = Path(wanted)
    if path.suffix == ".toml":
        return _read(path)
    if clusters.is_named(wanted):
        return uncalibrated(wanted)
    raise UsageError(f"no cluster or calibration {wanted!r}; known: {', '.join(names())}")


def uncalibrated(
    name: str, gpu: str | None = None, gpus_per_node: int = 8, network: str = ""
) -> Calibration:
    """A cluster by the data sheet of its card: of the card `gpu`, or as a clusters file has `name`.
    network: words in the place of the file's.

    Raises:
        UsageError: no such card, or the file has no such cluster or states no card, or `network`
            states no rate.
    """
    if gpu:
        found = from_data_sheet(gpu, gpus_per_node, name)
    else:
        stated = clusters.cluster(name)
        if not stated.gpu:
            raise UsageError(
                f"cluster {name} of {stated.source} names no gpu: give its table the key gpu, or"
                " plan for another with --cluster NAME"
            )
        found = from_data_sheet(
            stated.gpu,
            stated.gpus_per_node,
            name,
            stated.gpu_memory_gb,
            stated.interconnect,
            stated.domain,
            stated.max_nodes and stated.max_nodes * stated.gpus_per_node,
        )
    if network:
        check_network(network, found.gpus_per_node, "--network")
        found = replace(found, network=network)
    return found


def from_data_sheet(
    gpu: str,
    gpus_per_node: int = 8,
    name: str = "",
    memory_gb: float | None = None,
    network: str = "",
    domain: int | None = None,
    max_gpus: int | None = None,
) -> Calibration:
    """A cluster that nobody has measured: its card's data sheet and the priors. network: words; the
    network of the maker's own node is taken where they state no rate. domain: GPUs that fast links
    join (default: the card's).

    Raises:
        UsageError: unknown card.
    """
    card = planning_gpu(gpu)
    return Calibration(
        name or card.name,
        gpu,
        gpus_per_node,
        memory_gb or card.memory_gb,
        network,
        prior_fit(priors_of(card.name)),
        flash=card.name not in UNFUSED,
        source="data sheet and priors, fitted on no run",
        domain=domain,
        max_gpus=max_gpus,
    )


def _number(path: Path, table: dict[str, Any], name: str, or_zero: bool = False) -> float:
    """The positive (`or_zero`: or 0), finite number called `name`.

    Raises:
        UsageError: it is missing or something else.
    """
    if name not in table:
        raise UsageError(f"calibration {path} has no {name}")
    value = table[name]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if 0 < value < np.inf or (or_zero and value == 0):
            return float(value)
    raise UsageError(f"calibration {path}: {name} must be a positive number, not {value!r}")


def _section(path: Path, table: dict[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(table.get(name, {}), dict):
        raise UsageError(f"calibration {path}: {name} is no table")
    return table.get(name, {})


_KINDS = (("gpu", str), ("processor", str), ("network", str), ("flash", bool), ("max_gpus", int))


def _read(path: Path) -> Calibration:
    """Raises: UsageError: what the file holds is no calibration, with the first thing wrong."""
    table = read_toml(path, "calibration")
    if missing := [k for k in ("gpu", "constants", "fit") if k not in table]:
        raise UsageError(f"{path} is no calibration: it has no {', '.join(missing)}")
    for name, kind in _KINDS:
        if not isinstance(table.get(name, kind()), kind):
            raise UsageError(f"calibration {path}: {name} cannot be {table[name]!r}")
    constants, fitted, held, rates = (
        _section(path, table, name) for name in ("constants", "fit", "memory", "machine")
    )
    if unknown := sorted(set(held) - set(memory.CONSTANTS)):
        raise UsageError(
            f"calibration {path}: unknown memory constant {', '.join(unknown)};"
            f" known: {', '.join(memory.CONSTANTS)}"
        )
    try:
        covariance = np.array(fitted.get("covariance"), float)
    except (TypeError, ValueError):
        covariance = np.zeros(0)
    if covariance.shape != (len(NAMES), len(NAMES)) or not np.isfinite(covariance).all():
        raise UsageError(
            f"calibration {path}: covariance is no {len(NAMES)} x {len(NAMES)} table of numbers"
        )
    fit = Fit(
        {name: _number(path, constants, name) for name in NAMES},
        covariance,
        _number(path, fitted, "sigma", or_zero=True),
        int(_number(path, fitted, "n", or_zero=True)),
    )
    override = None
    if rates:
        if not isinstance(mesh := rates.get("mesh", False), bool):
            raise UsageError(f"calibration {path}: mesh cannot be {mesh!r}")
        needed = ("peak", "memory_rate", "link", "network", "cores")
        peak, memory_rate, link, network, cores = (_number(path, rates, name) for name in needed)
        override = Machine(peak, memory_rate, link, network, mesh, cores)
    else:
        planning_gpu(table["gpu"])
        if said := table.get("network"):
            check_network(
                said, _number(path, table, "gpus_per_node"), f"calibration {path}: network"
            )
    return Calibration(
        path.stem,
        table["gpu"],
        int(_number(path, table, "gpus_per_node")),
        _number(path, table, "gpu_memory_gb"),
        table.get("network", ""),
        fit,
        memory.CONSTANTS | {name: _number(path, held, name, or_zero=True) for name in held},
        table.get("flash", False),
        table.get("max_gpus"),
        f"{path.name}: {fit.n} runs, {fitted.get('report', '')}",
        override,
        processor=table.get("processor", ""),
    )


def write(
    path: Path,
    facts: dict[str, Any],
    fit: Fit,
    constants: dict[str, float],
    report: str,
    rows: list[str],
    machine: Machine | None = None,
) -> None:
    """Write a calibration; what a fit was made of and how it did stands in the file."""

    def value(v: Any) -> str:
        if isinstance(v, bool):
            return str(v).lower()
        return f"{v!r}" if isinstance(v, (int, float)) else json.dumps(str(v))

    lines = [f"{MARK}. {report}"]
    lines += [f"{k} = {value(v)}" for k, v in facts.items() if v is not None]
    lines += ["", "[constants]  # analysis/planner/fitting.py says what each is"]
    lines += [f"{n} = {float(fit.constants[n]):.6g}" for n in NAMES]
    lines += ["", "[memory]", *(f"{k} = {float(v):.4g}" for k, v in constants.items())]
    if machine is not None:
        lines += ["", "[machine]  # measured here: FLOP/s and bytes/s"]
        for key in ("peak", "memory_rate", "link", "network"):
            lines.append(f"{key} = {float(getattr(machine, key)):.6g}")
        lines += [f"mesh = {value(bool(machine.mesh))}", f"cores = {machine.cores}"]
    lines += ["", "[fit]", f"n = {fit.n}", f"sigma = {fit.sigma:.4f}", f"report = {value(report)}"]
    lines += ["rows = [", *(f"  {value(row)}," for row in rows), "]", "covariance = ["]
    for row in fit.covariance:
        lines.append("  [" + ", ".join(f"{v:.4g}" for v in row) + "],")
    with output(path, MARK, force=True) as file:  # the command has checked the name
        file.write_text("\n".join([*lines, "]"]) + "\n")
