"""The charts, by altair; each returns a Vega-Lite specification that holds its rows.

A row is a dict. A value that is None has no mark. Colours are those of every picture of ours.
"""

import math
from typing import Any

import altair as alt

from analysis.common import colours
from analysis.runs.drawn_rows import MOST

Rows = list[dict[str, Any]]
BAR = 20  # pixels
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


def _spec(chart: alt.Chart | alt.LayerChart, height: int = 260) -> dict[str, Any]:
    spec = chart.properties(width="container", height=height).to_dict(validate=False)
    return spec | {"config": _CONFIG, "background": None}


def _engines(rows: Rows) -> alt.Color:
    """The same engine has the same colour in every chart of every page."""
    colour_of = colours.of_engines(row["engine"] for row in rows)
    scale = alt.Scale(domain=list(colour_of), range=list(colour_of.values()))
    legend = alt.Legend(title=None) if len(colour_of) > 1 else None
    return alt.Color("engine:N", scale=scale, legend=legend)


def _precisions(rows: Rows) -> dict[str, alt.Shape]:
    """A mark of its own for each precision, where rows of several stand in one chart."""
    names = list(dict.fromkeys(row["precision"] for row in rows))
    if len(names) < 2:
        return {}
    marks = [colours.MARKS.get(name, colours.MARKS[None]) for name in names]
    return {"shape": alt.Shape("precision:N", scale=alt.Scale(domain=names, range=marks))}


def bars(rows: Rows, value: str, title: str) -> dict[str, Any]:
    """One bar a row, its `text` behind it, and a tick at `ideal`. Rows: bar, engine, text, ideal,
    low, high and the value."""
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


def against_gpus(rows: Rows, value: str, ideal: Rows, names: Rows) -> dict[str, Any]:
    """A value against GPUs, both logarithmic, the ideal line, and `names` beside their points."""
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


def parts(rows: Rows, value: str, title: str, marks: Rows = ()) -> dict[str, Any]:
    """Stacked bars: rows have bar, part and the value. marks: `bar` and `mark`, a value beside."""
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


def lines(rows: Rows, value: str, title: str, bar: float | None = None) -> dict[str, Any]:
    """A value of every step, one line a run. bar: a level that no line should cross; the axis is
    then logarithmic, and a value of 0 has no mark."""
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
