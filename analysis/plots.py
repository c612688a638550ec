"""Pictures of the tables, as PNG and SVG.

    python -m analysis.plots                              the published tables, to logs/plots
    python -m analysis.plots PATH... [--out FOLDER] [--baseline NAME]

With paths: speedup, TFLOP/s and phases of these runs, to PATH/plots (beside a file; of several
paths --out says where). logs/plots is the published tables' alone. Every file that is written is
named, and so is every run that a picture leaves out, with the reason. The speedup has its ideal
line, a point for every run, a line through the medians of the sizes and, where a row is of
repeats, its spread from slowest to fastest. Exits 2 when there is nothing to draw.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # run as a script: find the rooms, not analysis/ itself
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from models.errors import Parser, UsageError, command_line, warn
from models.flops import DEFAULT_CONVENTION

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from analysis.records import Record

PUBLISHED = Path(__file__).resolve().parent.parent / "logs" / "plots"
PHASES = ("compute", "communication", "data loading", "data movement")
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")  # Paul Tol, bright


def _figure(title: str) -> "tuple[Figure, Any]":
    import matplotlib

    matplotlib.use("Agg")
    # The same data must give the same file: no time stamp, no random ids, text as text.
    matplotlib.rcParams.update({"svg.hashsalt": "3d", "svg.fonttype": "none"})
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.set_prop_cycle(color=_COLOURS)
    axes.grid(alpha=0.3)
    return figure, axes


def save(figure: "Figure", folder: Path, name: str) -> list[Path]:
    """Write NAME.png and NAME.svg; the SVG is the same bytes for the same data."""
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(paths[0], dpi=144, metadata={"Software": None})
    figure.savefig(paths[1], metadata={"Date": None})
    return paths


def speedup(series: dict[str, list[dict[str, Any]]], title: str) -> "Figure":
    """Speedup against GPUs: rows of `scaling.curve` by label, with the ideal line.

    A bar spans the slowest to the fastest repeat of a size; without repeats there is none. Where a
    size has several rows, each is a point and the line goes through their medians.
    """
    figure, axes = _figure(title)
    sizes = [row["gpus"] for rows in series.values() for row in rows]
    smallest, largest = min(sizes), max(sizes)
    for label, rows in series.items():
        gpus = [row["gpus"] for row in rows]
        base = rows[0]["speedup"] * rows[0]["step_s"]
        faster = [row["speedup"] for row in rows]
        by_size: dict[float, list[float]] = {}
        for size, one in zip(gpus, faster, strict=True):
            by_size.setdefault(size, []).append(one)
        if len(by_size) == len(rows):
            axes.plot(gpus, faster, "o-", label=label)
        else:
            middle = [statistics.median(by_size[size]) for size in sorted(by_size)]
            axes.plot(sorted(by_size), middle, "-", label=f"{label} (line: medians)")
            axes.plot(gpus, faster, "o", color=axes.lines[-1].get_color(), alpha=0.7)
        colour = axes.lines[-1].get_color()
        for row in rows:
            if row.get("n", 1) > 1:
                span = [base / row["slowest_s"], base / row["fastest_s"]]
                axes.plot([row["gpus"]] * 2, span, "_-", color=colour, markersize=10)
    ideal = [smallest, largest]
    axes.plot(ideal, [g / smallest for g in ideal], "--", color="#888888", label="ideal")
    axes.set_xlabel("GPUs")
    axes.set_ylabel(f"speedup over {smallest:g}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def tflops(points: dict[str, list[tuple[float, float]]], title: str, convention: str) -> "Figure":
    """TFLOP/s per GPU against GPUs, (gpus, tflops) by label; the convention is on the axis."""
    figure, axes = _figure(title)
    for label, pairs in points.items():
        axes.plot(*zip(*sorted(pairs), strict=True), "o", label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("GPUs")
    axes.set_ylabel(f"TFLOP/s per GPU ({convention})")
    axes.legend()
    return figure


def phases(bars: dict[str, dict[str, float]], title: str) -> "Figure":
    """Where the time goes: stacked seconds by phase, one bar a label."""
    figure, axes = _figure(title)
    bottom = [0.0] * len(bars)
    names = list(dict.fromkeys(name for parts in bars.values() for name in parts))
    for colour, name in zip(_COLOURS * 3, names, strict=False):
        heights = [parts.get(name, 0.0) for parts in bars.values()]
        axes.bar(list(bars), heights, bottom=bottom, label=name, color=colour)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.set_ylabel("seconds")
    axes.legend()
    return figure


def planned(found: list[dict[str, Any]], title: str) -> "Figure":
    """Predicted efficiency against GPUs: rows of `plan.scale`, with the 80 % interval."""
    figure, axes = _figure(f"{title} (predicted, not measured)")
    gpus = [row["gpus"] for row in found]
    low, high = (
        [row["efficiency"] * row["predicted_s"] / row[edge] for row in found]
        for edge in ("high_s", "low_s")
    )
    axes.fill_between(gpus, low, high, alpha=0.2, label="80 % interval")
    axes.plot(gpus, [row["efficiency"] for row in found], "o-", label="predicted")
    axes.set_xscale("log", base=2)
    axes.set_xlim(8, 16384)
    axes.set_ylim(0, None)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("TFLOP/s per GPU over the best of all sizes")
    axes.legend()
    return figure


def _planned() -> "Figure":
    """18B parameters on Selene, three sequences a GPU, the best layout at each size."""
    from analysis import plan
    from analysis.calibration import load_calibration
    from models.config import PRESETS

    settings = {"seq_len": 2048}
    curve = plan.scale(PRESETS["18b"], load_calibration("selene"), 3.0, settings, plan.MARGIN)
    return planned(curve, "GPT 18B on Selene, three sequences a GPU")


def published(folder: Path) -> list[Path]:
    """The pictures of logs/published, and what the planner makes of them."""
    from analysis import published as data
    from analysis.scaling import Point, curve

    big = data.big_purple().rows
    points = [Point("", int(row["gpus"]), row["step_s"]) for row in big]
    series = {"GPT-2 124M, V100, Big Purple": curve(points, points[0])[0]}
    found = data.epochs()
    for batch in (64, 128):
        points = []
        for (of, gpus), ranks in sorted(found.items()):
            if of == batch:
                slowest = max(s["total_s"] for rank, s in ranks.items() if rank != "mean")
                points.append(Point("", gpus, slowest))
        series[f"GPT epochs, batch {batch}, slowest rank"] = curve(points, points[0])[0]
    written = save(speedup(series, "Published strong scaling, recomputed"), folder, "speedup")
    rows = data.jean_zay(1, 10**6).rows
    parts: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.get("megatron"):
            engine = row["remarks"].split(";")[0]
            label = "Hugging Face" if engine.startswith("HF") else engine.split(" 1.1.5")[0]
            label = "with DeepSpeed" if "DeepSpeed" in engine and "HF" not in engine else label
            label = "Megatron-LM" if label.startswith("Megatron") else label
            parts.setdefault(label, []).append((row["gpus"], row["megatron"]))
    figure = tflops(parts, "GPT-2 7.5B to 206B on Jean Zay's V100s", DEFAULT_CONVENTION)
    written += save(figure, folder, "tflops")
    bars = {}
    for (batch, gpus), ranks in sorted(found.items()):
        slowest = max((s for r, s in ranks.items() if r != "mean"), key=lambda s: s["total_s"])
        keys = ("compute_s", "comm_s", "loading_s", "movement_s")
        bars[f"b{batch}\n{gpus} GPU"] = dict(zip(PHASES, (slowest[k] for k in keys), strict=True))
    figure = phases(bars, "Where an epoch's time goes (slowest rank)")
    written += save(figure, folder, "breakdown")
    return written + save(_planned(), folder, "planned")


def _phases(record: "Record") -> dict[str, float]:
    """Seconds by phase where the log breaks its time down; {} where it does not."""
    if ranks := record.extra.get("ranks"):
        slowest = max(ranks, key=lambda rank: rank.get("epoch_s", 0.0))
        keys = ("compute_s", "comm_s", "data_s", "move_s")
        return {name: slowest.get(key, 0.0) for name, key in zip(PHASES, keys, strict=True)}
    # DeepSpeed's wall_clock_breakdown; its other timers are parts of these.
    timers = record.extra.get("timers_s", {})
    return {name: timers[name] for name in ("fwd", "bwd", "step") if name in timers}


def of_runs(paths: list[Path], folder: Path, baseline: str | None) -> tuple[list[Path], list[str]]:
    """(the pictures of runs and logs, one line for each run that a picture leaves out).

    Raises:
        UsageError: nothing could be read, or nothing of it can be drawn.
    """
    from analysis.load import load, name_of
    from analysis.tflops import rows as scaling_rows

    records, left_out = load(paths)
    rows = scaling_rows(records, baseline=baseline)
    written: list[Path] = []
    by_engine: dict[str, list[tuple[float, float]]] = {}
    curves: dict[str, list[dict[str, Any]]] = {}
    for record, row in zip(records, rows, strict=True):
        label, missing = row["engine"] or "unknown", []
        if row["tflops"] and row["gpus"]:
            by_engine.setdefault(label, []).append((row["gpus"], row["tflops"]))
        else:
            missing.append("tflops")
        if row["speedup"] and row["efficiency"]:  # oversubscribed rows have no efficiency
            curves.setdefault(label, []).append(row)
        else:
            missing.append("speedup")
        if missing:
            why = row["notes"] if row["verdict"] == "complete" else row["verdict"]
            if not (why or baseline or record.extra.get("baseline")):
                why = "no baseline is stated (--baseline NAME)"
            why = why or "a fact that it needs is not known"
            left_out.append(f"{row['run']}: not in {' and '.join(missing)}: {why}")
    if by_engine:
        figure = tflops(by_engine, "TFLOP/s per GPU", DEFAULT_CONVENTION)
        written += save(figure, folder, "tflops")
    if curves:
        for found in curves.values():
            found.sort(key=lambda row: (row["gpus"], row["run"]))
        written += save(speedup(curves, "Strong scaling"), folder, "speedup")
    bars = {name_of(record): parts for record in records if (parts := _phases(record))}
    if bars:
        written += save(phases(bars, "Where a step's time goes"), folder, "breakdown")
    if not written:
        nothing = "no run here has a number of GPUs and a steady time: nothing to draw"
        raise UsageError("; ".join([nothing, *left_out]))
    return written, left_out


def _folder_for(paths: list[Path], out: Path | None) -> Path:
    """Where the pictures go.

    Raises:
        UsageError: several paths and no --out, or runs' pictures where the published ones are.
    """
    if not paths:
        return out or Path("logs/plots")
    if out is None and len(paths) > 1:
        raise UsageError(f"{len(paths)} paths: say with --out FOLDER where the pictures go")
    path = paths[0]
    folder = out or (path if path.is_dir() else path.parent) / "plots"
    if os.path.realpath(folder) == os.path.realpath(PUBLISHED):  # a loop of links is no error here
        raise UsageError(f"{folder} holds the published tables' pictures: take another --out")
    return folder


@command_line("analysis.plots")
def main(argv: list[str] | None = None) -> int:
    """Draw the pictures and name the files."""
    parser = Parser(
        prog="python -m analysis.plots",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="logs, runs, folders")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="default: PATH/plots; without paths logs/plots"
    )
    parser.add_argument(
        "--baseline", metavar="NAME", help="the run that speedups are against; or its path"
    )
    arguments = parser.parse_args(argv)
    folder, left_out = _folder_for(arguments.paths, arguments.out), []
    if arguments.paths:
        written, left_out = of_runs(arguments.paths, folder, arguments.baseline)
    else:
        written = published(folder)
    for line in left_out:
        warn("analysis.plots", line)
    print(*written, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
