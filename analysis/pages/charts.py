"""The charts of the page and of analysis.plots, by altair: Vega-Lite specifications that hold their
rows. vl-convert has Vega's scripts for the page, and draws a chart as SVG or PNG.

A row is a dict. A value that is None has no mark. Colours are those of every chart of ours.
"""

import base64
import math
import struct
import textwrap
import zlib
from functools import cache
from typing import Any

import altair as alt

from analysis.common import colours
from analysis.pages.section import Chart
from base.storage import finite
from models.flops import DEFAULT_CONVENTION

Row = dict[str, Any]
Rows = list[Row]
Spec = dict[str, Any]  # of Vega-Lite
MOST = 40  # bars or runs of one chart
BAR = 20  # pixels
DIGITS = 6  # of every number: what is drawn does not depend on a processor's last digits
MARK = "GPT scaling study"  # in the pictures
WIDTH, TITLE = 640, 100  # of a picture: pixels, and characters of its title's lines
GREY, INK = colours.GREY, "currentColor"  # of the page around it, which may be light or dark
_AXIS = {"labelColor": INK, "titleColor": INK, "gridColor": INK, "domainColor": INK}
_CONFIG = {
    "font": "sans-serif",
    "axis": _AXIS | {"gridOpacity": 0.15, "tickColor": INK, "labelLimit": 260},
    "legend": {"labelColor": INK, "titleColor": INK, "orient": "bottom", "columns": 2},
    "text": {"color": INK},
    "view": {"stroke": None},
}


def _chart(rows: Rows) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=rows))


def _spec(chart: alt.Chart | alt.LayerChart, height: int = 260) -> Spec:
    spec = chart.properties(width="container", height=height).to_dict(validate=False)
    return spec | {"config": _CONFIG, "background": None}


def _engines(rows: Rows) -> alt.Color:
    """Gives the same engine the same colour in every chart of every page."""
    colour_of = colours.of_engines(row["engine"] for row in rows)
    scale = alt.Scale(domain=list(colour_of), range=list(colour_of.values()))
    legend = alt.Legend(title=None) if len(colour_of) > 1 else None
    return alt.Color("engine:N", scale=scale, legend=legend)


def _precisions(rows: Rows) -> dict[str, alt.Shape]:
    """Gives each precision a mark of its own, where rows of several stand in one chart."""
    names = list(dict.fromkeys(row["precision"] for row in rows))
    if len(names) < 2:
        return {}
    marks = [colours.MARKS.get(name, colours.MARKS[None]) for name in names]
    return {"shape": alt.Shape("precision:N", scale=alt.Scale(domain=names, range=marks))}


def bars(rows: Rows, value: str, title: str) -> Spec:
    """Draws one bar a row, its `text` behind it, and a tick at `ideal`. Rows: bar, engine, text,
    ideal, low, high, end and the value."""
    order = [row["bar"] for row in rows]
    base = _chart(rows)
    y = alt.Y("bar:N", sort=order, title=None)
    x = alt.X(f"{value}:Q", title=title)
    layers = [
        base.mark_bar(opacity=0.85).encode(
            x=x, y=y, color=_engines(rows), tooltip=["bar:N", f"{value}:Q", "text:N"]
        ),
        base.mark_rule(color=INK).encode(x="low:Q", x2="high:Q", y=y),
        base.mark_tick(color=INK, thickness=2, size=16).encode(x="ideal:Q", y=y),
        base.mark_text(align="left", dx=5).encode(x="end:Q", y=y, text="text:N"),
    ]
    return _spec(alt.layer(*layers), BAR * len(order))


def against_gpus(rows: Rows, value: str, ideal: Rows, names: Rows) -> Spec:
    """Draws a value against GPUs, both logarithmic, the ideal line, and `names` beside their
    points."""
    log = {"type": "log", "nice": False}
    ticks = alt.Axis(values=sorted({row["gpus"] for row in rows}), format="d")
    x = alt.X("gpus:Q", title="GPUs", scale=alt.Scale(base=2, padding=30, **log), axis=ticks)
    y = alt.Y(f"{value}:Q", title=value, scale=alt.Scale(padding=20, **log))
    middle = math.sqrt(min(row["gpus"] for row in names) * max(row["gpus"] for row in names))
    left = [row for row in names if row["gpus"] <= middle]
    right = [row for row in names if row["gpus"] > middle]
    tips = [f"{name}:N" for name in ("run", "gpus", "speedup", "efficiency", "verdict")]
    layers = [
        _chart(ideal).mark_line(strokeDash=[4, 4], color=GREY).encode(x=x, y=y),
        _chart(rows)
        .mark_point(filled=True, size=55, opacity=0.8)
        .encode(x=x, y=y, color=_engines(rows), **_precisions(rows), tooltip=tips),
        _chart(left).mark_text(align="left", dx=8, dy=-6).encode(x=x, y=y, text="run:N"),
        _chart(right).mark_text(align="right", dx=-8, dy=-6).encode(x=x, y=y, text="run:N"),
    ]
    return _spec(alt.layer(*layers), 320)


def parts(rows: Rows, value: str, title: str, marks: Rows = ()) -> Spec:
    """Draws stacked bars: rows have bar, part and the value. marks: `bar` and `mark`, a value
    beside."""
    order = list(dict.fromkeys(row["bar"] for row in rows))[:MOST]
    rows = [row for row in rows if row["bar"] in order]
    names = list(dict.fromkeys(row["part"] for row in rows))
    scale = alt.Scale(domain=names, range=[colours.PARTS.get(name, GREY) for name in names])
    y = alt.Y("bar:N", sort=order, title=None)
    x = alt.X(f"{value}:Q", title=title)
    numbered = [row | {"order": names.index(row["part"])} for row in rows]
    layers = [
        _chart(numbered)
        .mark_bar(stroke="white", strokeWidth=0.4)
        .encode(
            x=x,
            y=y,
            color=alt.Color("part:N", scale=scale, legend=alt.Legend(title=None)),
            order="order:Q",
            tooltip=["bar:N", "part:N", f"{value}:Q"],
        )
    ]
    if marks:
        tick = _chart(list(marks)).mark_tick(thickness=4, size=18, color=INK)
        layers.append(tick.encode(x="mark:Q", y=y, tooltip=["bar:N", "mark:Q"]))
    return _spec(alt.layer(*layers), BAR * len(order))


def lines(rows: Rows, value: str, title: str, bar: float | None = None) -> Spec:
    """Draws a value of every step, one line a run. bar: a level that no line should cross; the
    axis is then logarithmic, and a value of 0 has no mark."""
    shown = [row for row in rows if row.get(value) is not None and (bar is None or row[value] > 0)]
    scale = alt.Scale(zero=False) if bar is None else alt.Scale(type="log")
    axis = alt.Axis() if bar is None else alt.Axis(format=".0e")
    y = alt.Y(f"{value}:Q", title=title, scale=scale, axis=axis)
    mark = _chart(shown).mark_line(strokeWidth=1.5, opacity=0.8, point=bar is not None)
    tips = ["run:N", "iteration:Q", f"{value}:Q"]
    layers = [
        mark.encode(
            x=alt.X("iteration:Q", title="iteration"),
            y=y,
            color=_engines(shown),
            detail="run:N",
            tooltip=tips,
        )
    ]
    if bar is not None:
        level = _chart([{"level": bar}]).mark_rule(strokeDash=[4, 4], color=GREY)
        layers.append(level.encode(y="level:Q"))
    return _spec(alt.layer(*layers))


def ranked(rows: Rows) -> Rows:
    """Returns the rows by number of GPUs; of one number the fastest first, and runs without a ratio
    last."""

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


def scaling(rows: Rows, kind: str) -> dict[str, Chart]:
    """Draws speedup, or weak efficiency, against GPUs (`scaling`, where runs differ in them) and as
    one bar a run (`splits`, where two are compared)."""
    ratio = "speedup" if kind == "strong" else "efficiency"
    compared = [row for row in rows if row[ratio] is not None]
    ideal = {r["gpus"]: r[ratio] / r["efficiency"] for r in compared if r["efficiency"]}
    charts = {}
    if len({row["gpus"] for row in compared}) > 1:
        names = ("run", "engine", "gpus", "speedup", "efficiency", "verdict", "precision")
        points = [{n: row[n] for n in names} | {"engine": _engine(row)} for row in compared]
        fastest = {row["run"] for row in winners(compared)}
        line = [{"gpus": n, ratio: value} for n, value in sorted(ideal.items())]
        named = [point for point in points if point["run"] in fastest]
        caption = f"The fastest run of each number of GPUs has its name. Dashed: ideal {ratio}."
        charts["scaling"] = Chart(against_gpus(points, ratio, line, named), caption)
    if len(compared) > 1:
        charts["splits"] = _bar_a_run(compared, ratio, ratio, ideal)
    return charts


def tflops(rows: Rows) -> dict[str, Chart]:
    """Draws a bar for each run whose TFLOP/s and GPUs are stated."""
    stated = [row for row in rows if row["tflops"] and row["gpus"]]
    title = f"TFLOP/s per GPU ({DEFAULT_CONVENTION})"
    return {"tflops": _bar_a_run(stated, "tflops", title, {})} if stated else {}


def _engine(row: Row) -> str:
    return row["engine"] or "unknown"


def _bar_a_run(rows: Rows, value: str, title: str, ideal: dict[int, float]) -> Chart:
    """Draws one bar a run, by number of GPUs; `ideal` by number of GPUs is a tick."""
    shown, sizes = ranked(rows), {row["gpus"] for row in rows}
    if len(shown) > MOST:  # of each number of GPUs the fastest
        each = max(1, MOST // len(sizes))
        shown = [row for n in sorted(sizes) for row in [r for r in shown if r["gpus"] == n][:each]]
    marks = [_bar(row, value, ideal.get(row["gpus"])) for row in shown]
    if len({row["precision"] for row in shown}) > 1:
        for mark, row in zip(marks, shown, strict=True):
            mark["bar"] += f" {row['precision'] or '?'}"
    caption = f"{title[0].upper()}{title[1:]} by number of GPUs, the fastest first; the line is the"
    caption += " 95 % interval of the run's own median step"
    caption += ", the tick is ideal." if ideal else "."
    if len(shown) < len(rows):
        caption += f" The fastest {len(shown)} of {len(rows)} runs."
    return Chart(bars(marks, value, title), caption)


def _bar(row: Row, value: str, ideal: float | None) -> Row:
    step_s = row["step_s"] or 1.0  # printed TFLOP/s may stand without a time
    low, high = row["steady_ci95"] or (step_s, step_s)
    end = row[value] * step_s / low
    text = f"{row[value]:.3g}" if value == "tflops" else f"{row[value]:.2f}"
    if value == "speedup" and row["efficiency"] is not None:
        text += f" (efficiency {row['efficiency']:.2f})"
    return {
        "bar": f"{row['gpus']} × {row['run']}",
        "engine": _engine(row),
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
