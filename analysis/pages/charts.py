"""The charts of the page and of analysis.plots: Vega-Lite specifications that hold their rows.
vl-convert has Vega's scripts for the page, and draws a chart as SVG or PNG.

A row is a dict. A value that is None has no mark. Colours are those of every chart of ours.
"""

import base64
import json
import math
import struct
import textwrap
import zlib
from functools import cache
from typing import Any

from analysis.common import colours
from analysis.pages.section import Chart
from base.storage import finite
from models.flops import DEFAULT_CONVENTION

Row = dict[str, Any]
Rows = list[Row]
Spec = dict[str, Any]  # of Vega-Lite
Palette = dict[str, str] | None  # the colour of each engine of a page
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
MOST = 40  # bars or runs of one chart
NAME = 12  # characters of a line of a name beside its point
HEIGHT = 340  # pixels
DOT = 10  # pixels that a point takes
BAR = 20  # pixels
DIGITS = 6  # of every number: what is drawn does not depend on a processor's last digits
MARK = "GPT scaling study"  # in the pictures
WIDTH, TITLE = 640, 100  # of a picture: pixels, and characters of its title's lines
GREY, INK = colours.GREY, "currentColor"  # of the page around it, which may be light or dark
_AXIS = {"labelColor": INK, "titleColor": INK, "gridColor": INK, "domainColor": INK}
_CONFIG = {
    "font": "sans-serif",
    "axis": _AXIS | {"gridOpacity": 0.15, "tickColor": INK, "labelLimit": 260},
    "legend": {"labelColor": INK, "titleColor": INK, "orient": "top", "columns": 3},
    "text": {"color": INK},
    "view": {"stroke": None},
}


def _name(field: str, **settings: Any) -> Spec:
    """Returns a channel that shows a field of words."""
    return {"field": field, "type": "nominal"} | settings


def _number(field: str, **settings: Any) -> Spec:
    """Returns a channel that shows a field of numbers."""
    return {"field": field, "type": "quantitative"} | settings


def _layer(mark: Spec, rows: Rows | None = None, **channels: Spec | list[Spec]) -> Spec:
    """Returns one layer; without rows of its own it has those of the chart."""
    data = {} if rows is None else {"data": {"values": rows}}
    return data | {"mark": mark, "encoding": channels}


def _spec(layers: list[Spec], height: int = 260, rows: Rows | None = None) -> Spec:
    """Returns a whole chart of layers, `height` pixels high; its layers may share `rows`."""
    data = {} if rows is None else {"data": {"values": rows}}
    size = {"width": "container", "height": height}
    return (
        {"$schema": SCHEMA, "config": _CONFIG, "background": None} | size | data | {"layer": layers}
    )


def _engines(rows: Rows, palette: Palette) -> Spec:
    """Gives an engine its colour of the palette; without one, those of the engines in the rows."""
    names = {row["engine"] for row in rows}
    palette = {k: v for k, v in (palette or colours.of_engines(names)).items() if k in names}
    scale = {"domain": list(palette), "range": list(palette.values())}
    return _name("engine", scale=scale, legend={"title": None} if len(palette) > 1 else None)


def _precisions(rows: Rows) -> dict[str, Spec]:
    """Gives each precision a mark of its own, where rows of several stand in one chart."""
    names = list(dict.fromkeys(row["precision"] for row in rows))
    if len(names) < 2:
        return {}
    marks = [colours.MARKS.get(name, colours.MARKS[None]) for name in names]
    return {"shape": _name("precision", scale={"domain": names, "range": marks})}


def bars(rows: Rows, value: str, title: str, palette: Palette = None) -> Spec:
    """Draws one bar a row, its `text` behind it, and a tick at `ideal`; the bar of a row that is
    unsure is hollow. A row has bar, engine, unsure, text, ideal, low, high, end and the value."""
    y = _name("bar", sort=[row["bar"] for row in rows], title=None)
    tips = [_name("bar"), _number(value), _name("text"), _name("doubt")]
    bar, interval = {"type": "bar"}, {"type": "rule", "color": INK}
    tick = {"type": "tick", "color": INK, "thickness": 2, "size": 16}
    text = {"type": "text", "align": "left", "dx": 5}
    layers = [
        _layer(bar, x=_number(value, title=title), y=y, tooltip=tips, **_filled(rows, palette)),
        _layer(interval, x=_number("low"), x2={"field": "high"}, y=y),
        _layer(tick, x=_number("ideal"), y=y),
        _layer(text, x=_number("end"), y=y, text=_name("text")),
    ]
    return _spec(layers, BAR * len(rows), rows)


def _filled(rows: Rows, palette: Palette) -> dict[str, Spec]:
    """Colours marks by engine, and leaves those of rows that are unsure hollow."""
    colour = _engines(rows, palette)
    unsure = {"test": "datum.unsure", "value": 0.12}
    edge = {"condition": unsure | {"value": [3, 2]}, "value": [1, 0]}
    filled = {"condition": unsure, "value": 0.85}
    return {"color": colour, "stroke": colour, "strokeDash": edge, "fillOpacity": filled}


def against_gpus(
    rows: Rows, value: str, ideal: Rows, names: Rows, palette: Palette, unit: str
) -> Spec:
    """Draws a value against GPUs, both logarithmic, the ideal line, and `names` above their points;
    points that would lie on each other stand side by side."""
    log = {"type": "log", "nice": False}
    sizes = sorted({row["gpus"] for row in rows})
    room = [30, {"expr": "width - 85"}]  # for the names of the last points
    scale = log | {"base": 2, "range": room}
    ticks = {"values": sizes, "format": "d"}
    y = _number(value, title=value, scale=log | {"padding": 30})
    axes = {"x": _number("gpus", title=unit, scale=scale, axis=ticks), "y": y}
    tips = [_name(field) for field in ("run", "gpus", "speedup", "efficiency", "verdict", "doubt")]
    line = {"type": "line", "strokeDash": [4, 4], "color": GREY}
    dots = {"type": "point", "filled": True, "size": 60, "strokeWidth": 1.5}
    dots["xOffset"] = {"expr": "datum.aside"}
    look = _filled(rows, palette) | _precisions(rows)
    points = _layer(dots, _apart(rows, value), **axes, tooltip=tips, **look)
    layers = [_layer(line, ideal, **axes), points]
    # A name stands beside its point, below the ideal line.
    wrapped = [row | {"name": "\n".join(textwrap.wrap(row["run"], NAME))} for row in names]
    name = {"type": "text", "align": "left", "dx": 9, "dy": 4, "lineBreak": "\n", "lineHeight": 12}
    layers.append(_layer(name, wrapped, **axes, text=_name("name")))
    return _spec(layers, HEIGHT)


def _apart(rows: Rows, value: str) -> Rows:
    """Returns the rows with `aside`, the pixels by which a point stands beside its number of GPUs,
    so that none lies on another one; the first of a number of GPUs keeps its place."""
    values = [row[value] for row in rows]
    height = HEIGHT / (math.log(max(values) / min(values)) or 1.0)
    placed: dict[int, list[tuple[int, float]]] = {}
    for row in rows:
        y, others = math.log(row[value]) * height, placed.setdefault(row["gpus"], [])
        sides = (side * step * DOT for step in range(len(rows)) for side in (-1, 1))
        free = (x for x in sides if all(x != px or abs(y - py) >= DOT for px, py in others))
        others.append((next(free), y))
    places = {gpus: iter(points) for gpus, points in placed.items()}
    return [row | {"aside": next(places[row["gpus"]])[0]} for row in rows]


def laws(points: Rows, curves: Rows, sizes: dict[int, str]) -> Chart:
    """Draws speedup against GPUs, both logarithmic: measured, with a bar from the slowest to the
    fastest repeat, each law's curve, and the ideal line. A point has run, scaling, gpus, speedup,
    low and high; a row of a curve scaling, law, gpus and speedup. `sizes` has the ticks' words."""
    log, words = {"type": "log", "nice": False, "base": 2}, json.dumps(sizes)
    ticks = {"values": list(sizes), "labelExpr": f"{words}[datum.value]", "labelOverlap": True}
    x = _number("gpus", title="GPUs (nodes)", scale=log | {"padding": 20}, axis=ticks)
    y = _number("speedup", title="speedup", scale=log | {"padding": 20})
    names = list(dict.fromkeys(row["law"] for row in curves))
    scale = {"domain": names, "range": [colours.LAWS[name] for name in names]}
    start = min(points, key=lambda row: row["gpus"])
    ends = [row["gpus"] for row in (*points, *curves)]
    ideal = [{"gpus": n, "speedup": n / start["gpus"]} for n in (min(ends), max(ends))]
    tips = [_name("run"), _number("gpus"), _number("speedup")]
    line, dashed = {"type": "line"}, {"type": "line", "strokeDash": [4, 4], "color": GREY}
    dots = {"type": "point", "filled": True, "size": 60, "color": INK}
    span = {"type": "rule", "color": INK, "strokeWidth": 2}
    colour = _name("law", scale=scale, legend={"title": None})
    shape = _name("scaling", legend={"title": None})
    layers = [
        _layer(dashed, ideal, x=x, y=y),
        _layer(line, curves, x=x, y=y, color=colour, detail=_name("scaling")),
        _layer(span, points, x=x, y=y | {"field": "low"}, y2={"field": "high"}),
        _layer(dots, points, x=x, y=y, shape=shape, tooltip=tips),
    ]
    caption = "Points: medians, with a bar from the slowest to the fastest repeat. Dashed: ideal."
    caption += " Lines: the laws that fit, drawn to four times the largest measured size."
    return Chart(_spec(layers, 320), caption)


def parts(rows: Rows, value: str, title: str, marks: Rows = ()) -> Spec:
    """Draws stacked bars of rows with bar, part and the value; `marks` have `bar` and `mark`, a
    value beside it."""
    order = list(dict.fromkeys(row["bar"] for row in rows))[:MOST]
    rows = [row for row in rows if row["bar"] in order]
    names = list(dict.fromkeys(row["part"] for row in rows))
    scale = {"domain": names, "range": [colours.PARTS.get(name, GREY) for name in names]}
    colour = _name("part", scale=scale, legend={"title": None})
    numbered = [row | {"order": names.index(row["part"])} for row in rows]
    y = _name("bar", sort=order, title=None)
    tips = [_name("bar"), _name("part"), _number(value)]
    bar = {"type": "bar", "stroke": "white", "strokeWidth": 0.4}
    place = {"x": _number(value, title=title), "y": y, "order": _number("order")}
    layers = [_layer(bar, numbered, **place, color=colour, tooltip=tips)]
    if marks:
        tick = {"type": "tick", "thickness": 4, "size": 18, "color": INK}
        tips = [_name("bar"), _number("mark")]
        layers.append(_layer(tick, list(marks), x=_number("mark"), y=y, tooltip=tips))
    return _spec(layers, BAR * len(order))


def lines(
    rows: Rows, value: str, title: str, bar: float | None = None, palette: Palette = None
) -> Spec:
    """Draws a value of every step, one line a run. `bar` is a level that no line should cross; with
    it the axis is logarithmic, and a value of 0 has no mark."""
    marked = [row for row in rows if row.get(value) is not None and (bar is None or row[value] > 0)]
    scale = {"zero": False} if bar is None else {"type": "log"}
    y = _number(value, title=title, scale=scale, axis={} if bar is None else {"format": ".0e"})
    tips = [_name("run"), _number("iteration"), _number(value)]
    line = {"type": "line", "strokeWidth": 1.5, "opacity": 0.8, "point": bar is not None}
    x, colour = _number("iteration", title="iteration"), _engines(marked, palette)
    layers = [_layer(line, marked, x=x, y=y, color=colour, detail=_name("run"), tooltip=tips)]
    if bar is not None:
        rule = {"type": "rule", "strokeDash": [4, 4], "color": GREY}
        layers.append(_layer(rule, [{"level": bar}], y=_number("level")))
    return _spec(layers)


def ranked(rows: Rows) -> Rows:
    """Returns the rows in order of their number of GPUs; of each number the fastest first and runs
    without a ratio last."""

    def key(row: Row) -> tuple[float, float, float]:
        return (row["gpus"] or 0, -(row["speedup"] or 0), row["step_s"] or float("inf"))

    return sorted(rows, key=key)


def winners(rows: Rows) -> Rows:
    """Returns the row with the most speedup at each number of GPUs."""
    best: dict[int, Row] = {}
    for row in ranked(rows):
        if row["speedup"] is not None:
            best.setdefault(row["gpus"], row)
    return list(best.values())


def scaling(rows: Rows, kind: str, palette: Palette = None, unit: str = "GPUs") -> dict[str, Chart]:
    """Draws speedup, or weak efficiency, against GPUs (`scaling`, where runs differ in them) and as
    one bar a run (`splits`, where two are compared)."""
    ratio = "speedup" if kind == "strong" else "efficiency"
    compared = [row for row in rows if row[ratio] is not None]
    ideal = {r["gpus"]: r[ratio] / r["efficiency"] for r in compared if r["efficiency"]}
    charts = {}
    if len({row["gpus"] for row in compared}) > 1:
        names = ("run", "gpus", "speedup", "efficiency", "verdict", "precision")
        points = [{n: row[n] for n in names} | _drawn(row) for row in ranked(compared)]
        fastest = {row["run"] for row in winners(compared)}
        line = [{"gpus": n, ratio: value} for n, value in sorted(ideal.items())]
        named = [row for row in points if row["run"] in fastest]
        caption = f"The fastest run of each number of {unit} has its name. Dashed: ideal {ratio}."
        caption += _hollow(points)
        charts["scaling"] = Chart(against_gpus(points, ratio, line, named, palette, unit), caption)
    if len(compared) > 1:
        charts["splits"] = _bar_a_run(compared, ratio, ratio, ideal, palette)
    return charts


def tflops(rows: Rows, palette: Palette = None) -> dict[str, Chart]:
    """Draws a bar for each run whose TFLOP/s and GPUs are stated."""
    stated = [row for row in rows if row["tflops"] and row["gpus"]]
    title = f"TFLOP/s per GPU ({DEFAULT_CONVENTION})"
    return {"tflops": _bar_a_run(stated, "tflops", title, {}, palette)} if stated else {}


def _drawn(row: Row) -> Row:
    """Returns how a row's mark looks: by its engine, and by what is in doubt."""
    doubt = row["notes"] or "none"
    return {"engine": colours.label(row["engine"]), "unsure": row["unsure"], "doubt": doubt}


def _hollow(drawn: Rows) -> str:
    """Returns the sentence of a caption about hollow marks, where there are any."""
    if not any(row["unsure"] for row in drawn):
        return ""
    return " Hollow: warm-up not over, not steady, or more ranks than cores."


def _bar_a_run(
    rows: Rows, value: str, title: str, ideal: dict[int, float], palette: Palette
) -> Chart:
    """Draws one bar a run, by number of GPUs; `ideal` by number of GPUs is a tick."""
    drawn, sizes = ranked(rows), {row["gpus"] for row in rows}
    if len(drawn) > MOST:  # of each number of GPUs the fastest
        limit = max(1, MOST // len(sizes))
        drawn = [row for n in sorted(sizes) for row in [r for r in drawn if r["gpus"] == n][:limit]]
    marks = [_bar(row, value, ideal.get(row["gpus"])) for row in drawn]
    if len({row["precision"] for row in drawn}) > 1:
        for mark, row in zip(marks, drawn, strict=True):
            mark["bar"] += f" {row['precision'] or '?'}"
    caption = f"{title[0].upper()}{title[1:]} by number of GPUs, the fastest first; the line is the"
    caption += " 95 % interval of the run's own median step"
    caption += ", the tick is ideal." if ideal else "."
    if len(drawn) < len(rows):
        caption += f" The fastest {len(drawn)} of {len(rows)} runs."
    return Chart(bars(marks, value, title, palette), caption + _hollow(marks))


def _bar(row: Row, value: str, ideal: float | None) -> Row:
    """Returns the row of one run's bar: its value, its interval and the ideal as a tick."""
    step_s = row["step_s"] or 1.0  # printed TFLOP/s may stand without a time
    low, high = row["steady_ci95"] or (step_s, step_s)
    end = row[value] * step_s / low
    text = f"{row[value]:.3g}" if value == "tflops" else f"{row[value]:.2f}"
    if value == "speedup" and row["efficiency"] is not None:
        text += f" (efficiency {row['efficiency']:.2f})"
    return {
        "bar": f"{row['gpus']} × {row['run']}",
        **_drawn(row),
        value: row[value],
        "text": text,
        "ideal": ideal,
        "low": row[value] * step_s / high,
        "high": end,
        "end": max(end, ideal or 0),
    }


def pictures(chart: Chart) -> dict[str, bytes]:
    """Draws the chart with its caption as title: `svg` and `png`, which say in themselves who drew
    them. The same data give the same bytes."""
    title = {"text": textwrap.wrap(chart.caption, TITLE), "fontWeight": "normal", "fontSize": 11}
    spec = finite(chart.spec, DIGITS) | {"width": WIDTH, "background": "white", "title": title}
    svg, png = vega().vegalite_to_svg(spec), vega().vegalite_to_png(spec, scale=2)
    text = b"tEXtSoftware\0" + MARK.encode()
    chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    header = 33  # bytes of the signature and of IHDR
    return {
        "png": png[:header] + chunk + png[header:],
        "svg": f"<!-- {MARK} -->\n{svg}".encode(),
    }


@cache
def scripts() -> str:
    """Returns vega-embed with Vega-Lite and Vega, as gzip in base64."""
    bundle = vega().javascript_bundle("window.vegaEmbed=vegaEmbed;")
    return base64.b64encode(zlib.compress(bundle.encode(), 9, wbits=31)).decode()


def vega() -> Any:
    """Loads vl-convert, whose engine takes more memory than all the rest: only where it draws."""
    import vl_convert

    return vl_convert
