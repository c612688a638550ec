"""The charts as Vega-Lite specifications, and the scripts from vl-convert's wheel that draw them.

A specification has no data: the page puts the rows of a table into the data set `rows`.
"""

import json
from functools import cache
from types import ModuleType
from typing import Any

from analysis.common import colours
from analysis.common.colours import GREY
from analysis.common.tables import Column
from models.errors import UsageError

Spec = dict[str, Any]
HEIGHT = 260  # pixels of a chart whose height does not depend on its rows
INK = "currentColor"  # of the page around the chart, which may be light or dark
_INKS = {"labelColor": INK, "titleColor": INK}
_CONFIG = {
    "font": "sans-serif",
    "axis": _INKS | {"gridColor": INK, "gridOpacity": 0.2, "domainColor": INK, "tickColor": INK},
    "legend": _INKS | {"orient": "bottom", "columns": 3},
    "text": {"color": INK},
    "view": {"stroke": None},
}
_LINES = {"labelExpr": "split(datum.label, '; ')", "labelFontSize": 9}  # of bars with two names
_POINT = {"type": "point", "filled": True, "size": 70, "opacity": 0.85}


@cache
def script() -> str:
    """vega-embed with Vega-Lite and Vega as one script that sets `window.vegaEmbed`.

    Raises:
        UsageError: vl-convert-python is not installed.
    """
    return _library().javascript_bundle("window.vegaEmbed=vegaEmbed;")


def svg(spec: Spec) -> str:
    """A whole specification, with its rows, as SVG.

    Raises:
        UsageError: vl-convert-python is not installed.
    """
    return _library().vegalite_to_svg(spec, allowed_base_urls=[])


def _library() -> ModuleType:
    try:
        import vl_convert
    except ModuleNotFoundError as error:
        raise UsageError(
            "charts need vl-convert-python: pip install -c constraints.txt -e '.[page]'"
        ) from error
    return vl_convert


def whole(spec: Spec) -> Spec:
    """A specification with what all charts share; its data set `rows` is empty."""
    return {
        "background": None,
        "data": {"name": "rows"},
        "width": "container",
        "height": HEIGHT,
        "config": _CONFIG,
    } | spec


def axis(field: str, title: str, log: bool = False, **more: Any) -> Spec:
    """A quantitative channel of a field."""
    scale = {"type": "log"} if log else {}
    return {"field": field, "type": "quantitative", "title": title} | (
        {"scale": scale | more.pop("scale", {})} | more
    )


def tip(**fields: str) -> list[Spec]:
    """A tooltip: heading by field; numbers with four digits."""
    return [{"field": field, "title": title} for field, title in fields.items()]


def by_engine(engines: list[str]) -> Spec:
    """Colour by engine: the same engine has the same colour in every chart of every page."""
    names = colours.of_engines(engines)
    scale = {"domain": list(names), "range": list(names.values())}
    return {"field": "engine", "type": "nominal", "title": None, "scale": scale}


def by_precision(rows: list[dict[str, Any]]) -> Spec:
    """The channel that gives each precision its mark; none where all rows have one precision."""
    names = [name for name in colours.MARKS if any(row.get("precision") == name for row in rows)]
    if len(names) < 2:
        return {}
    scale = {"domain": names, "range": [colours.MARKS[name].vega for name in names]}
    field = {"field": "precision", "type": "nominal", "title": "precision", "scale": scale}
    return {"shape": field | {"legend": {"symbolFillColor": GREY, "symbolStrokeColor": GREY}}}


def against_gpus(
    value: str, title: str, rows: list[dict[str, Any]], ends: list[float], starts: list[float]
) -> Spec:
    """A value against GPUs, both logarithmic, with intervals, an ideal line and crosses.

    rows: what is drawn, for its engines and precisions. ends: [fewest, most] GPUs. starts: the GPUs
    of each baseline; its ideal line is 1 there and grows with the GPUs (speedup), or stays at 1
    (efficiency). A row without the value is a cross on the axis.
    """
    ideal = [
        {"gpus": gpus, "y": gpus / start if value == "speedup" else 1, "start": start}
        for start in starts
        for gpus in ends
    ]
    x = axis("gpus", "GPUs", log=True, scale={"base": 2, "padding": 12}, axis={"format": "d"})
    tips = tip(run="run", gpus="GPUs", speedup="speedup", efficiency="efficiency")
    reasons = tip(run="run", verdict="verdict", **{f"{value}_why": "why it has no point"})
    engines = [row["engine"] for row in rows]
    return {
        "layer": [
            {
                "data": {"values": ideal},
                "mark": {"type": "line", "strokeDash": [4, 4], "color": GREY},
                "encoding": {
                    "x": x,
                    "y": axis("y", title, log=True),
                    "detail": {"field": "start"},
                },
            },
            {
                "transform": [{"filter": f"isValid(datum.{value}_low)"}],
                "mark": {"type": "rule", "strokeWidth": 2},
                "encoding": {
                    "x": x,
                    "y": axis(f"{value}_low", title, log=True),
                    "y2": {"field": f"{value}_high"},
                    "color": by_engine(engines),
                },
            },
            {
                "transform": [{"filter": f"isValid(datum.{value})"}],
                "mark": _POINT,
                "encoding": {
                    "x": x,
                    "y": axis(value, title, log=True),
                    "color": by_engine(engines),
                    "tooltip": tips,
                }
                | by_precision(rows),
            },
            {
                "transform": [{"filter": f"!isValid(datum.{value}) && isValid(datum.gpus)"}],
                "mark": {"type": "text", "text": "\u2715", "fontSize": 15},
                "encoding": {
                    "x": x,
                    "y": {"value": HEIGHT},
                    "color": by_engine(engines),
                    "tooltip": reasons,
                },
            },
        ]
    }


def lines(value: str, title: str, engines: list[str], bar: float | None = None) -> Spec:
    """A value of every step as one line a run; `bar`: a level that no line should cross, which
    makes the axis logarithmic (zero, which it cannot show, is left out)."""
    y = axis(value, title, log=bar is not None, scale={} if bar else {"zero": False})
    if bar is not None:
        y["axis"] = {"format": ".0e"}
    one = {
        "transform": [{"filter": f"isValid(datum.{value})" + f" && datum.{value} > 0" * bool(bar)}],
        "mark": {"type": "line", "strokeWidth": 1.5, "opacity": 0.8, "point": bar is not None},
        "encoding": {
            "x": axis("iteration", "iteration"),
            "y": y,
            "color": by_engine(engines),
            "detail": {"field": "run"},
            "tooltip": tip(run="run", iteration="iteration", **{value: title}),
        },
    }
    level = {
        "data": {"values": [{"level": bar}]},
        "mark": {"type": "rule", "strokeDash": [4, 4], "color": GREY},
        "encoding": {"y": axis("level", title, log=True)},
    }
    return {"layer": [one, *[level] * (bar is not None)]}


def strip() -> Spec:
    """Every step of every run as a cell: darker is slower; steps of the warm-up are faint."""
    over = axis("ratio", "over the run's steady time", scale={"scheme": "cividis", "reverse": True})
    shown = tip(run="run", iteration="iteration", step_s="s", part="part")
    return {
        "height": {"step": 18},
        "transform": [
            {"filter": "isValid(datum.step_s)"},
            {"calculate": "datum.step_s / datum.steady_s", "as": "ratio"},
            {
                "calculate": "datum.iteration < datum.steady_from ? 'warm-up' : 'steady'",
                "as": "part",
            },
            {
                "window": [{"op": "lead", "field": "iteration", "as": "after"}],
                "groupby": ["run"],
                "sort": [{"field": "iteration"}],
            },
            {"calculate": "datum.after === null ? datum.iteration + 1 : datum.after", "as": "next"},
        ],
        "mark": {"type": "bar", "orient": "horizontal"},
        "encoding": {
            "x": axis(
                "iteration",
                "iteration",
                scale={"zero": False, "nice": False},
                axis={"tickMinStep": 1, "format": "d"},
            ),
            "x2": {"field": "next"},
            "y": {"field": "run", "type": "nominal", "title": None, "sort": None},
            "color": over,
            "opacity": {"condition": {"test": "datum.part == 'warm-up'", "value": 0.3}, "value": 1},
            "tooltip": shown,
        },
    }


def parts(
    y: str,
    value: str,
    title: str,
    part: str,
    names: list[str] | dict[str, str],
    marked: str = "",
) -> Spec:
    """Stacked horizontal bars: one a `y`, `value` by `part`; rows with `marked` get its words.

    names: the parts in their order, or with the part whose colour each has.
    """
    alike = names if isinstance(names, dict) else {name: name for name in names}
    scale = {"domain": list(names), "range": [colours.of_part(part) for part in alike.values()]}
    where = {"field": y, "type": "nominal", "title": None, "sort": None, "axis": _LINES}
    bars = {
        "mark": {"type": "bar", "stroke": "white", "strokeWidth": 0.5},
        "encoding": {
            "x": axis(value, title, stack=True),
            "y": where,
            "color": {"field": part, "type": "nominal", "title": None, "scale": scale},
            "order": {"field": "order", "type": "quantitative"},
            "tooltip": tip(**{y: "", part: "part", value: title}),
        },
    }
    words = {
        "transform": [{"filter": f"isValid(datum.{marked}) && datum.order == 0"}],
        "mark": {"type": "text", "align": "left", "dx": 4},
        "encoding": {
            "x": axis("end", title),
            "y": where,
            "text": {"field": marked, "type": "nominal"},
        },
    }
    return {"height": {"step": 24}, "layer": [bars, *[words] * bool(marked)]}


def waterfall(names: list[str]) -> Spec:
    """What each part took of an efficiency of 1, from left to right; they end at the efficiency."""
    scale = {"domain": names, "range": [colours.of_part(name) for name in names]}
    return {
        "height": {"step": 22},
        "mark": {"type": "bar", "stroke": "white", "strokeWidth": 0.5},
        "encoding": {
            "x": axis("from", "efficiency"),
            "x2": {"field": "to"},
            "y": {"field": "run", "type": "nominal", "title": None, "sort": None},
            "color": {"field": "part", "type": "nominal", "title": None, "scale": scale},
            "tooltip": tip(run="run", part="part", lost="lost"),
        },
    }


def memory(names: dict[str, str], limit: float | None) -> Spec:
    """Stacked GB by part, one bar a run and stage; the field `peak` is a mark, `limit` the card's.

    names: the parts' fields, each with its words.
    """
    found = parts("bar", "gb", "GB", "part", list(names.values()))
    found["transform"] = [
        {"calculate": "datum.stage ? datum.run + '; ' + datum.stage + ' stage' : datum.run"}
        | {"as": "bar"}
    ]
    found["layer"][0]["transform"] = [
        {"fold": list(names), "as": ["key", "gb"]},
        {"filter": "isValid(datum.gb)"},
        {"calculate": f"({json.dumps(names)})[datum.key]", "as": "part"},
        {"calculate": f"indexof({json.dumps(list(names))}, datum.key)", "as": "order"},
    ]
    found["layer"][0]["mark"]["opacity"] = 0.75
    where = found["layer"][0]["encoding"]["y"]
    peak = {
        "transform": [{"filter": "isValid(datum.peak)"}],
        "mark": {"type": "tick", "thickness": 4, "color": INK, "size": 20},
        "encoding": {
            "x": axis("peak", "GB"),
            "y": where,
            "tooltip": tip(bar="", peak="measured peak, GB"),
        },
    }
    line = {
        "data": {"values": [{"limit": limit}]},
        "mark": {"type": "rule", "strokeDash": [4, 4], "color": INK},
        "encoding": {"x": axis("limit", "GB"), "tooltip": tip(limit="the card's GB")},
    }
    return found | {"layer": [*found["layer"], peak, *[line] * (limit is not None)]}


def intervals(kinds: list[str], spans: str) -> Spec:
    """What each stage did when: one line a `bar`, coloured by `part`, from `start` to `end`."""
    scale = {"domain": kinds, "range": [colours.of_part(kind) for kind in kinds]}
    return {
        "height": {"step": 28},
        "mark": {"type": "bar", "stroke": "white", "strokeWidth": 0.3},
        "encoding": {
            "x": axis("start", spans, scale={"zero": False, "nice": False}),
            "x2": {"field": "end"},
            "y": {"field": "bar", "type": "nominal", "title": None, "sort": None}
            | {"axis": _LINES},
            "color": {"field": "part", "type": "nominal", "title": None, "scale": scale},
            "tooltip": tip(bar="", part="what", micro="micro-batch", start="from", end="to"),
        },
    }


def beside(
    x: str, y: str, titles: list[str], colour: Spec, rows: list[dict[str, Any]], run: str
) -> Spec:
    """One value of rows against another, both logarithmic, with the line on which they are
    equal."""
    values = [row[key] for row in rows for key in (x, y)]
    equal = [{"x": end, "y": end} for end in (min(values), max(values))]
    return {
        "layer": [
            {
                "data": {"values": equal},
                "mark": {"type": "line", "strokeDash": [4, 4], "color": GREY},
                "encoding": {"x": axis("x", titles[0], True), "y": axis("y", titles[1], True)},
            },
            {
                "transform": [{"filter": f"isValid(datum.{x}) && isValid(datum.{y})"}],
                "mark": _POINT,
                "encoding": {
                    "x": axis(x, titles[0], True),
                    "y": axis(y, titles[1], True),
                    "color": colour,
                    "tooltip": tip(**{run: run, x: titles[0], y: titles[1]}),
                }
                | by_precision(rows),
            },
        ]
    }


def points(x: str, y: str, titles: list[str], colour: Spec, rows: list[dict[str, Any]]) -> Spec:
    """One point a row; x is logarithmic."""
    return {
        "transform": [{"filter": f"isValid(datum.{x}) && isValid(datum.{y})"}],
        "mark": _POINT,
        "encoding": {
            "x": axis(x, titles[0], True, scale={"base": 2, "padding": 12}, axis={"format": "d"}),
            "y": axis(y, titles[1]),
            "color": colour,
            "tooltip": tip(line="line", **{x: titles[0], y: titles[1]}),
        }
        | by_precision(rows),
    }


def parts_of_one(parts: list[Column], total: str, title: str, line: float | None = None) -> Spec:
    """One row's columns as bars, the largest first, below their sum; `line`: a limit of the sum."""
    names = {total: "all"} | {c.key: c.heading.rpartition(" ")[0] for c in parts}
    largest = {"field": "value", "op": "max", "order": "descending"}
    where = {"field": "part", "type": "nominal", "title": None, "sort": largest}
    share = f"format(datum.value, '.4~g') + ' (' + format(datum.value / datum.{total}, '.1%') + ')'"
    found = [
        {"fold": list(names), "as": ["key", "value"]},
        {"filter": "datum.value > 0"},
        {"calculate": f"({json.dumps(names)})[datum.key]", "as": "part"},
        {
            "calculate": f"datum.key == '{total}' ? format(datum.value, '.4~g') : {share}",
            "as": "said",
        },
    ]
    x = axis("value", title)
    colour = {"condition": {"test": "datum.part == 'all'", "value": GREY}, "value": colours.FIRST}
    limit = {
        "data": {"values": [{"limit": line}]},
        "mark": {"type": "rule", "strokeDash": [4, 4], "color": GREY},
        "encoding": {"x": axis("limit", title)},
    }
    bars = {
        "mark": "bar",
        "encoding": {"x": x, "y": where, "color": colour, "tooltip": tip(part="part", said=title)},
    }
    words = {
        "mark": {"type": "text", "align": "left", "dx": 4},
        "encoding": {"x": x, "y": where, "text": {"field": "said", "type": "nominal"}},
    }
    room = {  # for the words
        "transform": [*found, {"calculate": "datum.value * 1.2", "as": "room"}],
        "mark": {"type": "tick", "opacity": 0},
        "encoding": {"x": axis("room", title), "y": where},
    }
    layers = [{"transform": found} | bars, {"transform": found} | words, room]
    return {"height": {"step": 18}, "layer": [*layers, *[limit] * (line is not None)]}


def memory_and_time(engines: list[str], layout: dict[str, str], limit_gb: float) -> Spec:
    """Seconds against gigabytes of layouts; those over the limit are faint."""
    close = {"nice": False, "padding": 8}
    x = axis("memory_gb", "predicted GB", True, scale=close)
    y = axis("predicted_s", "predicted s/iter", True, scale=close)
    shown = tip(**layout, predicted_s="predicted s/iter", memory_gb="GB", why="why not ranked")
    faint = {"condition": {"test": "datum.verdict == 'does not fit'", "value": 0.4}, "value": 0.8}
    return {
        "layer": [
            {
                "mark": {"type": "point", "filled": True, "size": 25},
                "encoding": {
                    "x": x,
                    "y": y,
                    "color": by_engine(engines),
                    "opacity": faint,
                    "tooltip": shown,
                },
            },
            {
                "data": {"values": [{"limit": limit_gb}]},
                "mark": {"type": "rule", "strokeDash": [4, 4], "color": GREY},
                "encoding": {"x": axis("limit", "predicted GB", True, scale=close)},
            },
        ]
    }
