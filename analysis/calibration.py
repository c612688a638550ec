"""What is known of a cluster's speed: a TOML file with at most 15 constants, or the data sheet.

`analysis/calibrations/<name>.toml` are committed, each with the report of its fit;
`python -m analysis.calibrate` writes more. A cluster of slurm/clusters.toml without one starts from
its card's data sheet and the priors of analysis/fitting.py.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from analysis.fitting import NAMES, Fit, prior_fit, priors_of
from analysis.tables import writing
from analysis.timemodel import Machine, machine_of
from models import memory
from models.errors import UsageError
from models.files import read_toml
from models.hardware import LINKS, find_gpu, planning_gpu
from parallel.clusters import load_clusters

# FlashAttention's kernels need compute capability 8.0 (Ampere) or CDNA 2: these cards are older.
UNFUSED = ("T4", "P100 SXM2", "V100 SXM2", "V100S PCIe", "V100 PCIe")
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

    def machine(self, width: int = 2) -> Machine:
        """Rates of one GPU and of one node's network."""
        if self.machine_override is not None:
            return self.machine_override
        return machine_of(self.gpu, self.network, self.gpus_per_node, width)


def names() -> list[str]:
    """Every cluster that can be planned for."""
    return sorted({p.stem for p in FOLDER.glob("*.toml")} | set(_with_cards()))


def _with_cards() -> dict[str, Any]:
    return {name: c for name, c in load_clusters().items() if c.gpu}


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
    clusters = _with_cards()
    if wanted in clusters:
        found = clusters[wanted]
        return from_data_sheet(found.gpu, found.gpus_per_node, wanted, found.gpu_memory_gb)
    raise UsageError(f"no cluster or calibration {wanted!r}; known: {', '.join(names())}")


def from_data_sheet(
    gpu: str, gpus_per_node: int = 8, name: str = "", memory_gb: float | None = None
) -> Calibration:
    """The priors, for a cluster nobody has measured.

    Raises:
        UsageError: unknown card.
    """
    card = planning_gpu(gpu)
    return Calibration(
        name or card.name,
        gpu,
        gpus_per_node,
        memory_gb or LINKS[card.name].memory_gb,
        "",
        prior_fit(priors_of(card.name)),
        flash=card.name not in UNFUSED,
        source="data sheet and priors, no run of this card was compared",
    )


def _read(path: Path) -> Calibration:
    table = read_toml(path, "calibration")
    if missing := [k for k in ("gpu", "constants", "fit") if k not in table]:
        raise UsageError(f"{path} is no calibration: it has no {', '.join(missing)}")
    try:
        constants = {n: float(table["constants"][n]) for n in NAMES}
        fit = Fit(
            constants,
            np.array(table["fit"]["covariance"], float),
            float(table["fit"]["sigma"]),
            int(table["fit"]["n"]),
        )
        override = table.get("machine")
        return Calibration(
            path.stem,
            table["gpu"],
            int(table["gpus_per_node"]),
            float(table["gpu_memory_gb"]),
            table.get("network", ""),
            fit,
            memory.CONSTANTS | table.get("memory", {}),
            bool(table.get("flash", False)),
            table.get("max_gpus"),
            f"{path.name}: {fit.n} runs, {table['fit'].get('report', '')}",
            Machine(**override) if override else None,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"calibration {path}: {type(error).__name__} {error}") from error


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
        return f"{v!r}" if isinstance(v, (int, float)) else '"' + str(v).replace('"', "'") + '"'

    lines = [f"# Written by: python -m analysis.calibrate. {report}"]
    lines += [f"{k} = {value(v)}" for k, v in facts.items() if v is not None]
    lines += ["", "[constants]  # analysis/fitting.py says what each is"]
    lines += [f"{n} = {float(fit.constants[n]):.6g}" for n in NAMES]
    lines += ["", "[memory]", *(f"{k} = {float(v):.4g}" for k, v in constants.items())]
    if machine is not None:
        lines += ["", "[machine]  # measured here: FLOP/s and bytes/s"]
        for key in ("peak", "memory_rate", "link", "network"):
            lines.append(f"{key} = {float(getattr(machine, key)):.6g}")
        lines.append(f"mesh = {value(bool(machine.mesh))}")
    lines += ["", "[fit]", f"n = {fit.n}", f"sigma = {fit.sigma:.4f}", f'report = "{report}"']
    lines += ["rows = [", *(f'  "{row}",' for row in rows), "]", "covariance = ["]
    for row in fit.covariance:
        lines.append("  [" + ", ".join(f"{v:.4g}" for v in row) + "],")
    with writing(path):
        path.write_text("\n".join([*lines, "]"]) + "\n")
