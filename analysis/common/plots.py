"""Drawing: speedup, points, bars, phases and losses as figures; saving them as PNG and SVG.

The rows come from analysis/measured/pictures.py (runs) and analysis/published/pictures.py
(published tables).
"""

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.storage import output
from parallel.config.engine_abilities import ENGINES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARK = "GPT scaling study"  # in the pictures
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")  # Paul Tol, bright


def colour_of(label: str) -> str | None:
    """The colour of an engine, the same in every picture; None for another label."""
    names = list(ENGINES)
    return COLOURS[names.index(label) % len(COLOURS)] if label in names else None


def _figure(title: str, height: float = 4.2) -> "tuple[Figure, Any]":
    import matplotlib

    matplotlib.use("Agg")
    # The same data must give the same file: no time stamp, no random ids, text as text.
    matplotlib.rcParams.update({"svg.hashsalt": "3d", "svg.fonttype": "none"})
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.set_prop_cycle(color=COLOURS)
    axes.grid(alpha=0.3)
    return figure, axes


def save(figure: "Figure", folder: Path, name: str, force: bool = False) -> list[Path]:
    """Write NAME.png and NAME.svg; the SVG is the same bytes for the same data."""
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths:
        write(figure, path, force=force)
    return paths


def write(figure: "Figure", path: Path, dpi: int = 144, force: bool = False) -> None:
    """Write a picture that says in itself who drew it; its suffix names the format.

    Raises:
        UsageError: as `storage.output`.
    """
    known = {".png": {"Software": MARK}, ".svg": {"Creator": MARK, "Date": None}}
    with output(path, MARK, force) as file:
        figure.savefig(file, dpi=dpi, metadata=known.get(path.suffix.lower()))


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
            axes.plot(gpus, faster, "o-", label=label, color=colour_of(label))
        else:
            middle = [statistics.median(by_size[size]) for size in sorted(by_size)]
            said = f"{label} (line: medians)"
            axes.plot(sorted(by_size), middle, "-", label=said, color=colour_of(label))
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
        at = zip(*sorted(pairs), strict=True)
        axes.plot(*at, "o", label=label, color=colour_of(label))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("GPUs")
    axes.set_ylabel(f"TFLOP/s per GPU ({convention})")
    axes.legend()
    return figure


def points(series: dict[str, list[tuple[Any, float]]], title: str, x: str, y: str) -> "Figure":
    """One value against another, (x, y) by label; an x of words has a place for each word."""
    figure, axes = _figure(title)
    found = [pair[0] for pairs in series.values() for pair in pairs]
    words = sorted({str(one) for one in found}) if any(isinstance(o, str) for o in found) else []
    for label, pairs in series.items():
        at = [words.index(str(one)) if words else one for one, _ in pairs]
        ys, colour = [value for _, value in pairs], colour_of(label)
        axes.plot(at, ys, "o", label=label, alpha=0.8, color=colour)
    if words:
        axes.set_xticks(range(len(words)), words)
        axes.set_xlim(-0.5, len(words) - 0.5)
    elif min(found) > 0 and max(found) >= 8 * min(found):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    elif len(set(found)) <= 8:
        axes.set_xticks(sorted(set(found)))
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def bars(values: dict[str, tuple[str, list[float]]], title: str, x: str) -> "Figure":
    """One bar a configuration, as long as the median of its repeats: (label, values) by name. A
    line spans the lowest to the highest repeat."""
    figure, axes = _figure(title, max(4.2, 1.2 + 0.2 * len(values)))
    for label in dict.fromkeys(label for label, _ in values.values()):
        mine = {name: v for name, (of, v) in values.items() if of == label}
        middle = [statistics.median(v) for v in mine.values()]
        axes.barh(list(mine), middle, label=label, color=colour_of(label))
        for name, found in mine.items():
            if len(found) > 1:
                axes.plot([min(found), max(found)], [name] * 2, "|-", color="#222222", lw=1)
    axes.invert_yaxis()
    axes.set_xlabel(x)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def losses(curves: dict[str, list[tuple[Any, Any]]], title: str) -> "Figure":
    """Loss against iteration, one line a run: (iterations, losses) of each run by label."""
    figure, axes = _figure(title)
    for label, runs in curves.items():
        line = None
        for iterations, values in runs:
            colour = line.get_color() if line else colour_of(label)
            (line,) = axes.plot(
                iterations, values, lw=1, alpha=0.8, color=colour, label=label if not line else None
            )
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss (nats per token)")
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
