"""Drawing: speedup, TFLOP/s and phases as figures, and saving them as PNG and SVG.

The rows come from analysis/measured/pictures.py (runs) and analysis/published/pictures.py
(published tables).
"""

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")  # Paul Tol, bright


def _figure(title: str) -> "tuple[Figure, Any]":
    import matplotlib

    matplotlib.use("Agg")
    # The same data must give the same file: no time stamp, no random ids, text as text.
    matplotlib.rcParams.update({"svg.hashsalt": "3d", "svg.fonttype": "none"})
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.set_prop_cycle(color=COLOURS)
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
    for colour, name in zip(COLOURS * 3, names, strict=False):
        heights = [parts.get(name, 0.0) for parts in bars.values()]
        axes.bar(list(bars), heights, bottom=bottom, label=name, color=colour)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.set_ylabel("seconds")
    axes.legend()
    return figure


def planned(found: list[dict[str, Any]], title: str) -> "Figure":
    """Predicted efficiency against GPUs, with the 80 % interval."""
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
