"""A study before it is submitted: which of its runs fit the cluster, and how fast each would be.

    python -m analysis.prune slurm/layouts.toml --cluster 2-core-cpu [--top N]

Every run of the study is predicted as analysis.plan predicts its layouts. --cluster is a
calibration or a cluster of slurm/clusters.toml, by default the study's own. The command below the
table submits the runs that fit or, with --top N, the N of them with the most tokens per second.
Nothing is submitted here. All numbers are predicted, not measured; low to high is the 80 %
interval.
"""

import sys
from pathlib import Path

import numpy as np

from analysis.common.table import Column, Table, add_table_flags, by_key, show
from analysis.planner import ranking
from analysis.planner.calibration import Calibration, load_calibration
from analysis.planner.columns import columns_of
from analysis.planner.memory.peak import check_counted
from base.bounds import check_flags
from base.errors import Parser, UsageError, by_reason, command_line
from base.units import GIB
from parallel.config.clusters import is_named
from parallel.config.run_spec import RunSpec
from parallel.config.study import load_study

_PREDICTED = ("predicted_s", "low_s", "high_s", "unknown", "tokens_per_s", "memory_gib")


def row_of(
    name: str, spec: RunSpec, cluster: Calibration, margin: float, flash: bool | None
) -> dict[str, object]:
    """Returns a run's predicted seconds, their interval, its GiB and whether they fit; without them
    where the cluster does not compute in the run's precision."""
    run = {"run": name, "engine": spec.engine, "gpus": spec.gpus}
    try:
        cluster.precision(spec.gemm_precision)
    except UsageError as error:
        return run | dict.fromkeys(_PREDICTED) | {"fits": False, "verdict": str(error)}
    stated = {} if flash is None else {"flash": flash}
    steps = columns_of(spec, **cluster.columns(spec.engine, spec.layout.tp, spec.gpus) | stated)
    check_counted(spec.model, steps, f"{name}: {spec.engine} in {spec.precision} on {cluster.gpu}")
    ranked = ranking.rank(steps, cluster, margin)
    (row,) = ranking.rows_of(ranked, np.array([0]), spec.model, spec.gemm_precision)
    fits = len(ranked.order) > 0
    needs = f"needs {row['memory_gib']:.1f} GiB, has {ranked.limit / GIB:.1f}"
    predicted = {name: row[name] for name in _PREDICTED}
    return run | predicted | {"fits": fits, "verdict": "fits" if fits else needs}


def report(
    path: Path,
    wanted: str | None = None,
    top: int | None = None,
    margin: float = ranking.MARGIN,
    flash: bool | None = None,
    network: str | None = None,
) -> Table:
    """Returns the study's runs and the command that submits those that are kept: the `top` fastest
    of those that fit, or all that fit, in the study's order."""
    submitted_to = wanted if wanted and is_named(wanted) else None  # a cluster of Slurm
    study = load_study(path, submitted_to)
    if wanted is None and study.cluster is None:
        raise UsageError(f"{path} names no cluster: say where with --cluster NAME")
    most_gpus = max((spec.gpus for spec in study.specs.values()), default=0)
    cluster = load_calibration(wanted or study.cluster.name).on_network(network, most_gpus)
    rows = [row_of(name, spec, cluster, margin, flash) for name, spec in study.specs.items()]
    fastest = sorted((row for row in rows if row["fits"]), key=lambda row: -row["tokens_per_s"])[
        :top
    ]
    kept = [row["run"] for row in rows if row in fastest]
    notes = [
        f"predicted, not measured, for {cluster.name} ({cluster.source})",
        *ranking.width_note(rows, cluster),
        *cluster.network_note(most_gpus),
    ]
    if any(spec.reset_at_documents for spec in study.specs.values()):
        notes.append("reset_at_documents: GiB with its masks, of torch's attention; no time of it")
    notes += [f"cannot run: {line}" for line in by_reason(study.left_out)]
    if wanted and not submitted_to and any(run.nodes for run in study.runs.values()):
        notes.append(
            f"nodes have the GPUs of {study.cluster.name}: {wanted} is no cluster of clusters.toml"
        )
    flags = f" --cluster {submitted_to}" if submitted_to else ""
    command = f": python -m slurm.submit {path}{flags} --only {' '.join(kept)}" if kept else ""
    notes.append(f"{len(kept)} of {len(rows)} runs kept{command}")
    columns = [
        *by_key(("run", "engine")),
        Column("gpus", "GPUs", "d"),
        *ranking.SECONDS,
        Column("tokens_per_s", "tokens/s", ".0f"),
        Column("memory_gib", "GiB", ".1f"),
        Column("verdict", "verdict"),
    ]
    return Table(columns, rows, notes=notes)


@command_line("analysis.prune")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m analysis.prune", description=__doc__)
    add = parser.add_argument
    add("study", type=Path, metavar="TOML", help="the study file")
    where = "a calibration or a cluster of clusters.toml (default: the study's own)"
    add("--cluster", metavar="NAME|FILE", help=where)
    add("--top", type=int, metavar="N", help="runs kept, the fastest (default: all)")
    ranking.add_flags(parser)
    add_table_flags(parser)
    arguments = parser.parse_args(argv)
    check_flags(arguments, top=(1, 10_000), margin=ranking.MARGINS)
    names = ("study", "cluster", "top", "margin", "flash", "network")
    table = report(*(getattr(arguments, name) for name in names))
    show([table], arguments.format, arguments.columns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
