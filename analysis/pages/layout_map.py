"""The layout map: one line a run, from its split through what it took to what it reached."""

import math
import re
from typing import Any

from analysis.common.tables import Table, cell
from analysis.pages import charts
from analysis.pages.section import Axis, Chart, Section

_SPLIT = {
    "tp": "tp",
    "pp": "pp",
    "vpp": "vpp",
    "dp": "dp",
    "micro_batch": "micro-batch",
    "recompute": "recompute",
    "zero_stage": "ZeRO",
}
_REACHED = {"step_s": "s/iter", "mfu": "MFU", "peak_gb": "peak GB", "memory_gb": "peak GB"}
FAR = 10  # largest over smallest value from which on an axis is logarithmic
OOM = "OOM"  # the verdict of a run whose line ends in the lane of those out of memory


def view(
    name: str, table: Table, colour: charts.Spec, row: str = "run", title: str = "Layout map"
) -> Section:
    """The map over a table of the page; nothing where no setting of the split varies.

    name: the table's. row: the column that tells its rows apart.
    """
    one = Section(title)
    keys = {column.key for column in table.shown}
    split = {key: _distinct(table.rows, key) for key in _SPLIT if key in keys}
    known = {
        key: [row[key] for row in table.rows if isinstance(row.get(key), int | float)]
        for key in _REACHED
        if key in keys
    }
    axes = [Axis(k, _SPLIT[k], values) for k, values in split.items() if len(values) > 1]
    reached = [
        Axis(k, _REACHED[k], None, (min(v), max(v)), min(v) > 0 and max(v) > FAR * min(v))
        for k, v in known.items()
        if v
    ]
    reached = [axis for axis in reached if axis.ends[0] < axis.ends[1]]
    if not axes or not reached or not known.get("step_s"):
        return one
    same = [
        f"{_SPLIT[k]} {_value(v[0])}" for k, v in split.items() if len(v) == 1 and v[0] is not None
    ]
    has = {_REACHED[key] for key in known if known[key]}
    lacking = [title for title in dict.fromkeys(_REACHED.values()) if title not in has]
    full = sum(r.get("verdict") == OOM for r in table.rows)
    fastest = min((r for r in table.rows if r.get("step_s")), key=lambda r: r["step_s"])
    where = ", ".join(f"{axis.title} {_value(fastest.get(axis.key))}" for axis in axes)
    said = f"{len(table.rows)} rows. The least s/iter is {fastest['step_s']:.4g}, with {where}."
    said += f" The same in all: {', '.join(same)}." * bool(same)
    said += f" {full} ran out of memory." * bool(full)
    said += f" No row has {' or '.join(lacking)}." * bool(lacking)
    said += " Drag along an axis to filter the table by it; click the axis to take that back."
    every = (*axes, *reached)
    short = any(len(known[axis.key]) < len(table.rows) for axis in reached)
    lanes = ["not known"] * short + ["out of memory"] * bool(full)
    spec = _parallel(every, colour, row, lanes)
    one.charts.append(Chart(spec, name, said, axes=every))
    return one


def _distinct(rows: list[dict[str, Any]], key: str) -> tuple[Any, ...]:
    """The values of a column, numbers upwards; unknown comes first, and no recomputation, too."""
    found = {row.get(key) for row in rows}
    return tuple(
        sorted(found, key=lambda v: (v is not None, isinstance(v, str) and v != "none", v))
    )


def _parallel(
    axes: tuple[Axis, ...], colour: charts.Spec, row: str, lanes: list[str]
) -> charts.Spec:
    """One line a row through parallel axes; rows with `left` false are faint.

    lanes: what rows have that lack an axis's value, "not known" and "out of memory" at most, from
    above; they go through these lanes below the axes.
    """
    names = [axis.title for axis in axes]
    scales = {
        a.key: {"title": a.title, "values": a.values, "log": a.log, "next": after.key}
        | {"low": _scaled(a, a.ends[0]), "high": _scaled(a, a.ends[1])}
        for a, after in zip(axes, (*axes[1:], axes[-1]), strict=True)
    }
    x = {
        "field": "axis",
        "type": "nominal",
        "title": None,
        "sort": names,
        "scale": {"type": "band", "paddingInner": 0, "paddingOuter": 0},
        "axis": {"orient": "top", "labelAngle": -20, "grid": False, "ticks": False}
        | {"domain": False, "labelFontSize": 11, "labelLimit": 90, "labelOverlap": False},
    }
    domain = [(_FULL if "out of memory" in lanes else _UNKNOWN) - 0.05 if lanes else -0.03, 1.03]
    y = {"field": "at", "type": "quantitative", "axis": None, "scale": {"domain": domain}}
    ticks = [
        {"axis": axis.title, "at": place, "text": text}
        for axis in axes
        for place, text in _ticks(axis)
    ]
    words = [
        {"axis": next(a.title for a in axes if a.values is None), "at": at, "text": text}
        for at, text in ((_FULL, "out of memory"), (_UNKNOWN, "not known"))
        if text in lanes
    ]
    encoding = {"x": x, "y": y, "text": {"field": "text"}}
    faint = {"test": "datum.left === false", "value": "#888888"}
    return {
        "height": 340,
        "params": [{"name": "scales", "value": scales}],
        "layer": [
            {
                "data": {"values": [{"axis": name, "at": 0, "end": 1} for name in names]},
                "mark": {"type": "rule", "color": charts.INK, "opacity": 0.5},
                "encoding": {"x": x, "y": y, "y2": {"field": "end"}},
            },
            {
                "transform": [
                    {"fold": [axis.key for axis in axes[:-1]], "as": ["key", "value"]},
                    {"calculate": "scales[datum.key].next", "as": "next"},
                    {"calculate": "scales[datum.key].title", "as": "axis"},
                    {"calculate": "scales[datum.next].title", "as": "to"},
                    {"calculate": _at("datum.key"), "as": "at"},
                    {"calculate": _at("datum.next"), "as": "end"},
                ],
                # Segments, not a line a row: Vega makes a data flow of its own for each line.
                "mark": {"type": "rule", "strokeWidth": 1.5, "strokeCap": "round"},
                "encoding": {
                    "x": x,
                    "x2": {"field": "to"},
                    "y": y,
                    "y2": {"field": "end"},
                    "color": colour | {"condition": faint},
                    "opacity": {"condition": faint | {"value": 0.12}, "value": 0.8},
                    "tooltip": charts.tip(**{row: row, "step_s": "s/iter", "verdict": "verdict"}),
                },
            },
            {
                "data": {"values": ticks},
                "mark": {"type": "text", "align": "left", "dx": 5, "fontSize": 10},
                "encoding": encoding,
            },
            *[
                {
                    "data": {"values": words},
                    "mark": {"type": "text", "align": "right", "dx": -8, "fontSize": 10},
                    "encoding": encoding,
                }
            ]
            * bool(lanes),
        ],
    }


_UNKNOWN, _FULL = -0.1, -0.2  # where the lanes below the axes are


def _at(key: str) -> str:
    """The expression of where a row stands on the axis whose key an expression gives."""
    share = "((of.log ? log(value) : value) - of.low) / (of.high - of.low)"
    index = "indexof(of.values, value) / (length(of.values) - 1)"
    lane = f"datum.verdict == '{OOM}' ? {_FULL} : {_UNKNOWN}"
    said = f"of.values ? {index} : isValid(value) ? {share} : {lane}"
    return re.sub(r"\bvalue\b", f"datum[{key}]", said.replace("of.", f"scales[{key}]."))


def _ticks(axis: Axis) -> list[tuple[float, str]]:
    """(share of the axis, what stands there)."""
    if axis.values is not None:
        last, every = len(axis.values) - 1, -(-len(axis.values) // 9)
        return [(i / last, _value(axis.values[i])) for i in range(0, last + 1, every)]
    low, high = (_scaled(axis, end) for end in axis.ends)
    shares = [(i / 4, low + i / 4 * (high - low)) for i in range(5)]
    return [(share, f"{math.exp(at) if axis.log else at:.3g}") for share, at in shares]


def _scaled(axis: Axis, number: float) -> float:
    return math.log(number) if axis.log else number


def _value(of: Any) -> str:
    """A setting's value as it is written; unknown is -."""
    return f"{of:g}" if isinstance(of, float) else cell(of)
