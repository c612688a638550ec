"""A study before it is submitted: which of its runs fit the cluster, and how fast each would be.

    python -m analysis.prune slurm/layouts.toml --cluster 2-core-cpu [--top N]
        [--margin 0.06] [--format markdown]

Every run of the study is predicted as analysis.plan predicts its layouts; --cluster is a
calibration or a cluster of slurm/clusters.toml, by default the study's own. Below the table stands
the command that submits what is kept: the runs that fit or, with --top N, those N of them with most
tokens per second. Nothing is submitted here. What is printed is predicted, not measured; low to
high hold 80 %.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: find the rooms, not analysis/ itself
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from analysis import plan
from analysis.calibration import Calibration, load_calibration
from analysis.fitting import INTERVAL
from analysis.rows import host_columns
from analysis.tables import FORMAT_HELP, FORMATS, Column, Table, emphasise
from models import memory
from models.bounds import check_flags
from models.errors import Parser, UsageError, command_line
from parallel.columns import Columns, columns_of
from parallel.spec import RunSpec
from parallel.study import Study, load_study


def placed(spec: RunSpec, cluster: Calibration) -> Columns:
    """A run's settings on a cluster, as one row."""
    x = columns_of(spec)
    settings: dict[str, Any] = {
        "flash": cluster.flash,
        "gpus_per_node": cluster.gpus_per_node,
    }
    if cluster.machine_override is not None:
        settings |= host_columns(spec.engine, x.tp, x.gpus)
    arrays = {k: np.broadcast_to(np.asarray(v), (1,)) for k, v in settings.items()}
    return dataclasses.replace(x, **arrays)


def rows_of(study: Study, cluster: Calibration, margin: float) -> list[dict[str, Any]]:
    """One row per run: predicted seconds, their interval, gigabytes and whether they fit."""
    rows = []
    for name, spec in study.specs.items():
        x = placed(spec, cluster)
        machine = cluster.machine(int(x.width[0]))
        (seconds,), (used,), order = plan.rank(x, cluster, margin)
        (spread,) = cluster.fit.spread(x, machine.spread(1))
        limit = plan.usable_bytes(x, cluster, margin)
        full = f"needs {used / memory.GB:.1f} GB, has {limit / memory.GB:.1f}"
        rows.append(
            {
                "run": name,
                "engine": spec.engine,
                "gpus": spec.gpus,
                "predicted_s": float(seconds),
                "low_s": float(seconds * np.exp(-INTERVAL * spread)),
                "high_s": float(seconds * np.exp(INTERVAL * spread)),
                "tokens_per_s": spec.global_batch * spec.seq_len / float(seconds),
                "memory_gb": float(used / memory.GB),
                "fits": bool(len(order)),
                "verdict": "fits" if len(order) else full,
            }
        )
    return rows


def kept(rows: list[dict[str, Any]], top: int | None) -> list[str]:
    """Names of the runs that fit, or of the `top` fastest of them, in the study's order."""
    fitting = sorted((r for r in rows if r["fits"]), key=lambda r: -r["tokens_per_s"])[:top]
    names = {row["run"] for row in fitting}
    return [row["run"] for row in rows if row["run"] in names]


def report(
    path: Path, wanted: str | None = None, top: int | None = None, margin: float = plan.MARGIN
) -> Table:
    """The study's runs, and the command that submits those that are kept.

    Raises:
        UsageError: no such study or cluster, or the study names none and none is given.
    """
    study = load_study(path)
    if wanted is None and study.cluster is None:
        raise UsageError(f"{path} names no cluster: say where with --cluster NAME")
    cluster = load_calibration(wanted or study.cluster.name)
    rows = rows_of(study, cluster, margin)
    names = kept(rows, top)
    notes = [
        f"predicted, not measured, for {cluster.name} ({cluster.source}); low to high hold 80 %"
    ]
    notes += [f"cannot run: {what}: {why}" for what, why in study.left_out]
    if names:
        command = f"python -m slurm.submit {path} --only {' '.join(names)}"
        notes.append(f"{len(names)} of {len(rows)} runs kept: {command}")
    else:
        notes.append(f"none of {len(rows)} runs fits: nothing to submit")
    columns = [
        Column("run", "run"),
        Column("engine", "engine"),
        Column("gpus", "GPUs", "d"),
        Column("predicted_s", "predicted s/iter", "#.4g"),
        Column("low_s", "low", "#.4g"),
        Column("high_s", "high", "#.4g"),
        Column("tokens_per_s", "tokens/s", ".0f"),
        Column("memory_gb", "GB", ".1f"),
        Column("verdict", "verdict"),
    ]
    return Table(columns, rows, notes=notes)


@command_line("analysis.prune")
def main(argv: list[str] | None = None) -> int:
    """Predict a study's runs, print."""
    parser = Parser(
        prog="python -m analysis.prune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("study", type=Path, metavar="TOML")
    parser.add_argument("--cluster", metavar="NAME|FILE", help="default: the study's own")
    parser.add_argument("--top", type=int, metavar="N", help="keep the N fastest; default: all")
    parser.add_argument("--margin", type=float, default=plan.MARGIN, help="of memory left free")
    parser.add_argument("--format", choices=FORMATS, default="text", help=FORMAT_HELP)
    arguments = parser.parse_args(argv)
    check_flags(arguments, top=(1, 10_000), margin=plan.MARGINS)
    shown = report(arguments.study, arguments.cluster, arguments.top, arguments.margin)
    text = shown.render(arguments.format)
    print(emphasise(text) if arguments.format == "text" else text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
