"""The layout map: one line a run, from its split through what it took to what it reached."""

import json
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
# The column that says how a run ended, and its values of runs that ran, or may have run, out of
# memory: their lines end in a lane of their own.
Lost = tuple[str, tuple[str, ...]]
OOM: Lost = ("verdict", ("OOM",))
_UNKNOWN, _FULL = -0.1, -0.2  # where the lanes below the axes are


def view(
    name: str,
    table: Table,
    colour: charts.Spec,
    row: str = "run",
    title: str = "Layout map",
    lost: Lost = OOM,
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
    full = [r for r in table.rows if r.get(lost[0]) in lost[1]]
    words = "out of memory"
    if any(r[lost[0]] != "OOM" for r in full):
        words = f"crashed or {words}"
    fastest = min((r for r in table.rows if r.get("step_s")), key=lambda r: r["step_s"])
    where = ", ".join(f"{axis.title} {_value(fastest.get(axis.key))}" for axis in axes)
    said = f"{len(table.rows)} rows. The least s/iter is {fastest['step_s']:.4g}, with {where}."
    said += f" The same in all: {', '.join(same)}." * bool(same)
    said += f" Runs that {words.replace('out', 'ran out')}: {len(full)}." * bool(full)
    said += f" No row has {' or '.join(lacking)}." * bool(lacking)
    said += " Drag along an axis to filter the table by it; click the axis to take that back."
    every = (*axes, *reached)
    others = [r for r in table.rows if r.get(lost[0]) not in lost[1]]
    short = any(not isinstance(r.get(a.key), int | float) for r in others for a in reached)
    lanes = {_UNKNOWN: "not known"} if short else {}
    lanes |= {_FULL: words} if full else {}
    spec = _parallel(every, colour, row, lanes, lost)
    one.charts.append(Chart(spec, name, said, axes=every))
    return one


def _distinct(rows: list[dict[str, Any]], key: str) -> tuple[Any, ...]:
    """The values of a column, numbers upwards; unknown comes first, and no recomputation, too."""
    found = {row.get(key) for row in rows}
    return tuple(
        sorted(found, key=lambda v: (v is not None, isinstance(v, str) and v != "none", v))
    )


def _parallel(
    axes: tuple[Axis, ...], colour: charts.Spec, row: str, lanes: dict[float, str], lost: Lost
) -> charts.Spec:
    """One line a row through parallel axes; rows with `left` false are faint.

    lanes: the place below the axes and the words of each lane, from above; rows that lack an axis's
    value go through _FULL where they are `lost`, else through _UNKNOWN.
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
    domain = [min(lanes) - 0.05 if lanes else -0.03, 1.03]
    y = {"field": "at", "type": "quantitative", "axis": None, "scale": {"domain": domain}}
    ticks = [
        {"axis": axis.title, "at": place, "text": text}
        for axis in axes
        for place, text in _ticks(axis)
    ]
    words = [
        {"axis": next(a.title for a in axes if a.values is None), "at": at, "text": text}
        for at, text in lanes.items()
    ]
    encoding = {"x": x, "y": y, "text": {"field": "text"}}
    faint = {"test": "datum.left === false", "value": charts.GREY}
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
                    {"calculate": _at("datum.key", lost), "as": "at"},
                    {"calculate": _at("datum.next", lost), "as": "end"},
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
                    "tooltip": charts.tip(**{row: row, "step_s": "s/iter", lost[0]: lost[0]}),
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


def _at(key: str, lost: Lost) -> str:
    """The expression of where a row stands on the axis whose key an expression gives."""
    share = "((of.log ? log(value) : value) - of.low) / (of.high - of.low)"
    index = "indexof(of.values, value) / (length(of.values) - 1)"
    lane = f"indexof({json.dumps(lost[1])}, datum.{lost[0]}) < 0 ? {_UNKNOWN} : {_FULL}"
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
