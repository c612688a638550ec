"""Drawing: speedup and TFLOP/s as figures; saving them as PNG and SVG.

The rows come from analysis/plots.py, colours from colours.py.
"""

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from analysis.common.colours import GREY, of_engines
from base.storage import output

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARK = "GPT scaling study"  # in the pictures
_GAP, _LABELS = 0.036, 24  # between two names of points, of the axes' height; at one x at most


class Point(NamedTuple):
    """A point of a picture; `engine` gives it its colour. low, high: the values of y that repeats
    span."""

    x: Any
    y: float
    engine: str
    split: str = ""
    low: float | None = None
    high: float | None = None


def _figure(title: str) -> "tuple[Figure, Any]":
    import matplotlib

    matplotlib.use("Agg")
    # The same data must give the same file: no time stamp, no random ids, text as text.
    matplotlib.rcParams.update({"svg.hashsalt": "3d", "svg.fonttype": "none"})
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def save(figure: "Figure", folder: Path, name: str, force: bool = False) -> list[Path]:
    """Write NAME.png and NAME.svg, which say in themselves who drew them; the SVG is the same bytes
    for the same data.

    Raises:
        UsageError: as `storage.output`.
    """
    about = {"png": {"Software": MARK}, "svg": {"Creator": MARK, "Date": None}}
    folder.mkdir(parents=True, exist_ok=True)
    for kind, metadata in about.items():
        with output(folder / f"{name}.{kind}", MARK, force) as file:
            figure.savefig(file, dpi=144, metadata=metadata)
    return [folder / f"{name}.{kind}" for kind in about]


def speedup(points: list[Point], title: str, start: float, weak: bool = False) -> "Figure":
    """Speedup over `start` GPUs against GPUs, with the ideal line.

    A bar spans the slowest to the fastest repeat of a point. A line joins the points of an engine
    that has one configuration at each size; several configurations are points with their splits.
    """
    figure, axes = _figure(title)
    sizes = sorted({point.x for point in points})
    for engine, colour in of_engines(point.engine for point in points).items():
        own = sorted(point for point in points if point.engine == engine)
        if len({point.x for point in own}) == len(own):
            axes.plot([p.x for p in own], [p.y for p in own], "-", color=colour)
        for point in own:
            if point.low is not None:
                axes.plot([point.x] * 2, [point.low, point.high], "_-", color=colour, markersize=10)
    axes.plot(sizes, [size / start for size in sizes], "--", color=GREY)
    if sizes[-1] >= 16 * sizes[0]:
        for axis in (axes.xaxis, axes.yaxis):
            _doubling(axes, axis)
        axes.set_xlim(sizes[0] / 1.4, sizes[-1] * 1.8)
    else:
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlim(0, sizes[-1] * 1.25)
        axes.set_ylim(0, 1.05 * max([sizes[-1] / start, *(p.high or p.y for p in points)]))
    axes.set_xlabel("GPUs")
    over = f"over {start:g} GPU{'s' if start > 1 else ''}"
    axes.set_ylabel(f"{'scaled speedup' if weak else 'speedup'} {over}")
    _draw(figure, axes, points, has_ideal=True)
    return figure


def tflops(points: list[Point], title: str, convention: str) -> "Figure":
    """TFLOP/s per GPU against GPUs; the convention is on the axis."""
    figure, axes = _figure(title)
    _doubling(axes, axes.xaxis)
    sizes = [point.x for point in points]
    axes.set_xlim(min(sizes) / 1.4, max(sizes) * 1.8)
    axes.set_ylim(0, 1.06 * max(point.y for point in points))
    axes.set_xlabel("GPUs")
    axes.set_ylabel(f"TFLOP/s per GPU ({convention})")
    _draw(figure, axes, points)
    return figure


def _doubling(axes: Any, axis: Any) -> None:
    """An axis of powers of two, printed as numbers."""
    scale = axes.set_xscale if axis is axes.xaxis else axes.set_yscale
    scale("log", base=2)
    axis.set_major_formatter("{x:g}")


def _draw(figure: "Figure", axes: Any, points: list[Point], has_ideal: bool = False) -> None:
    """The points with the names of their splits, and the legend."""
    from matplotlib.lines import Line2D

    colours = of_engines(point.engine for point in points)
    by_x: dict[float, list[Point]] = defaultdict(list)
    for point in sorted(points, key=lambda point: point.y):
        axes.plot(point.x, point.y, "o", color=colours[point.engine], alpha=0.8, clip_on=False)
        if point.split:
            by_x[point.x].append(point)
    for named in by_x.values():
        if len(named) <= _LABELS:
            _name(axes, named, colours)
    handles = [Line2D([], [], label=e, color=c, marker="o", ls="") for e, c in colours.items()]
    if has_ideal:
        handles.append(Line2D([], [], label="ideal", color=GREY, ls="--"))
    longest = max(len(handle.get_label()) for handle in handles)
    columns = max(1, min(4, 72 // (longest + 6)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def _name(axes: Any, points: list[Point], colours: dict[str, str]) -> None:
    """The splits of points at one x to their right, from below upwards, none over another."""
    to_axes = axes.transScale + axes.transLimits
    places = [to_axes.transform((point.x, point.y)) for point in points]
    heights: list[float] = []
    for _, height in places:
        heights.append(max(height, heights[-1] + _GAP) if heights else height)
    top = 1.0
    for i in reversed(range(len(heights))):
        heights[i] = min(heights[i], top)
        top = heights[i] - _GAP
    for point, (x, y), height in zip(points, places, heights, strict=True):
        line = {"arrowstyle": "-", "lw": 0.5, "shrinkA": 0, "shrinkB": 3}
        line["color"] = colours[point.engine]
        axes.annotate(
            point.split,
            (point.x, point.y),
            xytext=(x + 0.025, height),
            textcoords="axes fraction",
            va="center",
            fontsize=7,
            color="#333333",
            arrowprops=line if abs(height - y) > _GAP / 3 else None,
        )
