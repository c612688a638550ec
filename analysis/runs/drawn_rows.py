"""What pictures and pages draw of a table of runs: a bar a run, and points against GPUs."""

from typing import Any, NamedTuple

from models.flops import DEFAULT_CONVENTION

Rows = list[dict[str, Any]]
MOST = 40  # bars of one picture or chart


class Bars(NamedTuple):
    """rows: bar (its name), engine, text, ideal, low, high, end and the value `key`."""

    rows: Rows
    key: str
    title: str
    caption: str


class Points(NamedTuple):
    """rows and those `named` have gpus, run, engine, precision and the value `key`; ideal: gpus and
    the value."""

    rows: Rows
    key: str
    ideal: Rows
    named: Rows


def ranked(rows: Rows) -> Rows:
    """Rows by number of GPUs; of one number the fastest first, and runs without a ratio last."""

    def key(row: dict[str, Any]) -> tuple[float, float, float]:
        return (row["gpus"] or 0, -(row["speedup"] or 0), row["step_s"] or float("inf"))

    return sorted(rows, key=key)


def winners(rows: Rows) -> Rows:
    """The row with the most speedup at each number of GPUs."""
    best: dict[int, dict[str, Any]] = {}
    for row in ranked(rows):
        if row["speedup"] is not None:
            best.setdefault(row["gpus"], row)
    return list(best.values())


def points(rows: Rows, kind: str) -> Points | None:
    """Speedup, or weak efficiency, against GPUs; None where all runs have one number of GPUs."""
    key, ideal = _key(kind), _ideal(rows, kind)
    known = [row for row in rows if row[key] is not None]
    if len({row["gpus"] for row in known}) < 2:
        return None
    names = ("run", "engine", "gpus", "speedup", "efficiency", "verdict", "precision")
    data = [{n: row[n] for n in names} | {"engine": _engine(row)} for row in known]
    fastest = {row["run"] for row in winners(known)}
    line = [{"gpus": n, key: value} for n, value in sorted(ideal.items())]
    return Points(data, key, line, [row for row in data if row["run"] in fastest])


def ratios(rows: Rows, kind: str) -> Bars | None:
    """The same as one bar a run; None where fewer than two are compared."""
    key = _key(kind)
    known = [row for row in rows if row[key] is not None]
    return _bars(known, key, key, _ideal(rows, kind)) if len(known) > 1 else None


def tflops(rows: Rows) -> Bars | None:
    """A bar for each run whose TFLOP/s and GPUs are known; None where none is."""
    known = [row for row in rows if row["tflops"] and row["gpus"]]
    title = f"TFLOP/s per GPU ({DEFAULT_CONVENTION})"
    return _bars(known, "tflops", title, {}) if known else None


def _key(kind: str) -> str:
    return "speedup" if kind == "strong" else "efficiency"


def _ideal(rows: Rows, kind: str) -> dict[int, float]:
    """By number of GPUs."""
    known = [row for row in rows if row["efficiency"]]
    return {row["gpus"]: row[_key(kind)] / row["efficiency"] for row in known}


def _engine(row: dict[str, Any]) -> str:
    return row["engine"] or "unknown"


def _bars(rows: Rows, key: str, title: str, ideal: dict[int, float]) -> Bars:
    """One bar a run, by number of GPUs; `ideal` by number of GPUs is a tick."""
    shown, sizes = ranked(rows), {row["gpus"] for row in rows}
    if len(shown) > MOST:  # of each number of GPUs the fastest
        each = max(1, MOST // len(sizes))
        shown = [row for n in sorted(sizes) for row in [r for r in shown if r["gpus"] == n][:each]]
    bars = [_bar(row, key, ideal.get(row["gpus"])) for row in shown]
    if len({row["precision"] for row in shown}) > 1:
        for bar, row in zip(bars, shown, strict=True):
            bar["bar"] += f" {row['precision'] or '?'}"
    caption = f"{title[0].upper()}{title[1:]} by number of GPUs, the fastest first; the line is the"
    caption += " 95 % interval of the run's own median step"
    caption += ", the tick is ideal." if ideal else "."
    if len(shown) < len(rows):
        caption += f" The fastest {len(shown)} of {len(rows)} runs."
    return Bars(bars, key, title, caption)


def _bar(row: dict[str, Any], key: str, ideal: float | None) -> dict[str, Any]:
    step_s = row["step_s"] or 1.0  # printed TFLOP/s may stand without a time
    low, high = row["steady_ci95"] or (step_s, step_s)
    end = row[key] * step_s / low
    text = f"{row[key]:.3g}" if key == "tflops" else f"{row[key]:.2f}"
    if key == "speedup" and row["efficiency"] is not None:
        text += f" (efficiency {row['efficiency']:.2f})"
    return {
        "bar": f"{row['gpus']} × {row['run']}",
        "engine": _engine(row),
        key: row[key],
        "text": text,
        "ideal": ideal,
        "low": row[key] * step_s / high,
        "high": end,
        "end": max(end, ideal or 0),
    }
