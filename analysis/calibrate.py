"""Fit a cluster's constants: from a published table, or from this machine and its own runs.

    python -m analysis.calibrate --published FILE.csv... --name NAME [--rows 20] [--network WORDS]
    python -m analysis.calibrate --here RUN_FOLDER... [--fit 5] --name NAME

--published fits at most --rows rows of a table with the columns of logs/published, chosen by their
layouts, and the cluster's published all-reduces (logs/published/all_reduce.csv), and reports the
error on the others. --here measures a matrix product, memory and an
all-reduce (python -m parallel.microbench, in a process of its own), fits --fit of the run folders
and predicts the others. Both write analysis/calibrations/NAME.toml, or --out FILE.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

if not __package__:  # run as a script: find the rooms, not analysis/ itself
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from analysis import calibration, fitting, predict
from analysis.collectives import measured_on
from analysis.rows import Rows, healthy, read_rows, rows_of_runs
from analysis.tables import FORMAT_HELP, FORMATS, Column, Table, emphasise
from analysis.timemodel import Machine
from models.bounds import check_flags
from models.errors import Parser, UsageError, command_line
from models.hardware import LINKS, network_rate, planning_gpu
from parallel.facts import cores

# A host CPU is no GPU: peaks are measured, so efficiencies start at 1; launches are Python's.
HERE_PRIORS = fitting.PRIORS | {
    "gemm": (0.7, 0.4),
    "sat": (8.0, 1.0),
    "attn": (0.4, 0.7),
    "mem": (0.5, 0.7),
    "launch": (1e-3, 1.0),
    "gap": (5e-4, 1.5),
    "link": (0.5, 0.8),
    "latency": (5e-4, 1.5),
    "step": (0.01, 1.0),
    "micro": (3e-3, 1.0),
    "engine": (2.2, 0.3),  # megatron-core layers beside plain ones
}


HERE_CORES = max(2, cores())  # each counts as a GPU; an all-reduce needs two


def measure_here(processes: int = HERE_CORES, timeout_s: float = 120.0) -> dict[str, float]:
    """FLOP/s, memory and all-reduce rates of this machine.

    Raises:
        UsageError: the micro-benchmark failed; with its last line.
    """
    command = [sys.executable, "-m", "parallel.microbench", "--processes", str(processes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UsageError(f"parallel.microbench failed: {last}")
    return json.loads(done.stdout)


def calibrate_here(
    rows: Rows, count: int, measured: dict[str, float]
) -> tuple[fitting.Fit, np.ndarray, Machine]:
    """(fit, which rows it saw, machine) of this machine's run folders."""
    machine = Machine(
        *(measured[k] for k in ("flops", "memory_rate", "link", "link")), False, HERE_CORES
    )
    slopes = fitting.slopes(rows.x, machine.spread(len(rows.ids)), HERE_PRIORS)
    chosen = fitting.choose(rows.x, count, slopes)
    # Ranks that share a core take turns: their seconds count as much shorter ones on cores of
    # their own.
    many = machine.spread(len(chosen))
    fit = fitting.fit(
        rows.x.take(chosen), many, rows.measured[chosen] / rows.crowd[chosen], HERE_PRIORS
    )
    return fit, chosen, machine


def report(rows: Rows, predicted: np.ndarray, chosen: np.ndarray) -> Table:
    """Measured beside predicted; what was fitted is marked."""
    error = predicted / rows.measured - 1
    seen = set(chosen.tolist())
    found = [
        {
            "id": rows.ids[i],
            **rows.layout(i),
            "measured_s": float(rows.measured[i]),
            "predicted_s": float(predicted[i]),
            "error": float(error[i]),
            "fitted": "fitted" if i in seen else "",
        }
        for i in range(len(rows.ids))
    ]
    columns = [
        Column("id", "run"),
        *(Column(k, k, "g") for k in ("tp", "pp", "vpp", "dp", "micro_batch")),
        Column("measured_s", "measured s", ".4g"),
        Column("predicted_s", "predicted s", ".4g"),
        Column("error", "error", "+.1%"),
        Column("fitted", "fitted"),
    ]
    return Table(columns, found, notes=[_said(error, seen)])


def _said(error: np.ndarray, seen: set[int]) -> str:
    """The report's sentence."""
    others = [i for i in range(len(error)) if i not in seen and np.isfinite(error[i])]
    inside = [i for i in seen if np.isfinite(error[i])]
    parts = [f"fitted runs: MAPE {np.mean(np.abs(error[inside])):.1%}, n = {len(inside)}"]
    if others:
        worst = np.max(np.abs(error[others]))
        parts.append(
            f"others: MAPE {np.mean(np.abs(error[others])):.1%}, n = {len(others)},"
            f" worst {worst:.0%}"
        )
    return "; ".join(parts)


@command_line("analysis.calibrate")
def main(argv: list[str] | None = None) -> int:
    """Fit, report, write."""
    parser = Parser(
        prog="python -m analysis.calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--published", nargs="+", type=Path, metavar="FILE")
    source.add_argument("--here", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--name", required=True)
    parser.add_argument("--rows", type=int, default=fitting.MAX_ROWS, help="of a published table")
    parser.add_argument("--fit", type=int, default=5, help="run folders to fit")
    parser.add_argument("--network", default="", help='a node\'s network, as "8x HDR InfiniBand"')
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--format", choices=FORMATS, default="text", help=FORMAT_HELP)
    arguments = parser.parse_args(argv)
    out = arguments.out or calibration.FOLDER / f"{arguments.name}.toml"
    check_flags(arguments, rows=(1, 10_000), fit=(1, 10_000))
    if not out.parent.is_dir():  # known before a minute of measuring
        raise UsageError(f"{out}: no folder {out.parent}")
    if arguments.published:
        table = _published(arguments, out)
    else:
        table = _here(arguments, out)
    text = table.render(arguments.format)
    print(emphasise(text) if arguments.format == "text" else text, end="")
    print(f"wrote {out}", file=sys.stderr)
    return 0


def _published(arguments: argparse.Namespace, out: Path) -> Table:
    rows = read_rows(arguments.published)
    good = healthy(rows) & rows.fit & rows.steady & ~rows.guessed & np.isfinite(rows.measured)
    index = np.flatnonzero(good)
    if not len(index):
        raise UsageError("no row to fit")
    x, machine = rows.x.take(index), rows.machine.take(index)
    if len(cards := sorted({planning_gpu(rows.gpu[i]).name for i in index})) > 1:
        raise UsageError(f"rows of {' and '.join(cards)}: a calibration is of one card")
    card = planning_gpu(rows.gpu[index[0]])
    priors = fitting.priors_of(card.name)
    chosen = index[fitting.choose(x, arguments.rows, fitting.slopes(x, machine, priors))]
    table = measured_on(rows.cluster_key[chosen[0]])
    x, machine = rows.x.take(chosen), rows.machine.take(chosen)
    fit = fitting.fit(x, machine, rows.measured[chosen], priors, table)
    predicted = np.where(good, fit.seconds(rows.x, rows.machine), np.nan)
    with_memory = np.flatnonzero(
        rows.fit & ~rows.guessed & predict.told(rows) & (np.array(rows.status) == "ok")
    )
    picked = (
        with_memory[fitting.choose(rows.x.take(with_memory), arguments.rows)]
        if len(with_memory) > 2
        else with_memory[:0]
    )
    constants, _ = predict.fit_memory(rows, picked)
    first = int(chosen[0])
    sizes = rows.gpu_memory_gb[np.isfinite(rows.gpu_memory_gb)]
    said = arguments.network or rows.cluster[first]
    network = said if network_rate(said, rows.x.gpus_per_node[first]) is not None else ""
    if arguments.network and not network:
        raise UsageError(
            f'--network {said!r} states no rate; write it as "4 x 100 Gb/s per node" or "8x HDR"'
        )
    facts = {
        "gpu": card.name,
        "gpus_per_node": int(rows.x.gpus_per_node[first]),
        "gpu_memory_gb": float(sizes.max() if len(sizes) else LINKS[card.name].memory_gb),
        "network": network,
        "flash": bool(np.median(rows.x.flash[chosen])),
    }
    places = {int(k): n for n, k in enumerate(index)}
    seen = np.array([places[int(k)] for k in chosen])
    said = _said((predicted / rows.measured - 1)[index], set(seen.tolist()))
    if table is not None:
        error = table.seconds(machine.take(np.zeros(1, int)), fit.constants) / table.measured - 1
        said += f"; all-reduces: MAPE {np.mean(np.abs(error)):.0%}, n = {len(error)}"
    calibration.write(out, facts, fit, constants, said, [rows.ids[i] for i in chosen])
    return report(rows.take(index), predicted[index], seen)


def _here(arguments: argparse.Namespace, out: Path) -> Table:
    rows = rows_of_runs(arguments.here)
    if len(rows.ids) <= arguments.fit:
        raise UsageError(f"{len(rows.ids)} runs with a time: {arguments.fit} to fit and no other")
    measured = measure_here()
    fit, chosen, machine = calibrate_here(rows, arguments.fit, measured)
    predicted = fit.seconds(rows.x, machine.spread(len(rows.ids))) * rows.crowd
    said = _said(predicted / rows.measured - 1, set(chosen.tolist()))
    facts = {
        "gpu": "this machine",
        "gpus_per_node": HERE_CORES,
        "gpu_memory_gb": measured["memory_gb"],
    }
    constants = {"library_gb": 0.6, "fragments": 1.05}
    names = [rows.ids[i] for i in chosen]
    calibration.write(out, facts, fit, constants, said, names, machine)
    return report(rows, predicted, chosen)


if __name__ == "__main__":
    sys.exit(main())
