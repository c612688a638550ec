"""Speedups and efficiencies against the table's own times."""

import re
from collections import defaultdict
from collections.abc import Iterator

from analysis.published.any_table import AnyTable, Line
from analysis.published.finding import Finding
from analysis.published.headings import Meaning, Value, meaning, plain, read_cell
from analysis.published.rules.broken import as_printed, of_cell
from analysis.published.rules.intervals import (
    AVERAGED,
    Interval,
    apart,
    common,
    product_of,
    ratio_of,
    span_of,
)

ABOVE_LINEAR = 1.005  # efficiency that rounding of speedups to 0.01 cannot explain


def follow_from_times(table: AnyTable) -> Iterator[Finding]:
    """Speedups and efficiencies follow from the table's own times or rates."""
    base: Line | None = None
    meant = [what.name for what in table.columns.values()]
    if meant.count("speedup") > 1 or meant.count("efficiency") > 1:
        return  # of several times or ranks: which belongs to which is not said
    agree: dict[str, list[Line]] = defaultdict(list)  # time or rate -> rows whose speedup it gives
    others: dict[str, list[Line]] = defaultdict(list)  # and rows whose speedup another one gives
    for row in table.rows:
        speedup, efficiency = row["speedup"], row["efficiency"]
        if (
            speedup
            and speedup.low <= 1 <= speedup.high
            and re.search(r"\d[.,]\d", speedup.text)
            or (speedup and speedup.text.strip(" *~x×") == "1")
        ):
            base = row
        elif not speedup and base is None and efficiency and efficiency.value == 1:
            base = row
        if base is None or base is row:
            continue
        ratios: dict[str, Interval] = {}
        for name in ("step_s", "wall_s", "tokens_per_s", "samples_per_s", "tflops_all"):
            one, other = span_of(base[name]), span_of(row[name])
            if one and other:
                ratios[name] = (
                    ratio_of(one, other) if name in ("step_s", "wall_s") else ratio_of(other, one)
                )
        if speedup and ratios and min(speedup.low, speedup.value) > 0:
            yield from _follows(row, base, speedup, ratios, "speedup")
            gives = {name for name, ratio in ratios.items() if apart(_wide(speedup), ratio) == 0}
            for name in ratios.keys() - {"wall_s"} if gives else ():  # it holds more than steps
                (agree if name in gives else others)[name].append(row)
        gpus, first = row.number("gpus"), base.number("gpus")
        if efficiency and efficiency.low > 0 and gpus and first:
            shares = {k: (a * first / gpus, b * first / gpus) for k, (a, b) in ratios.items()}
            each = ratio_of(span_of(row["tokens_per_s_gpu"]), span_of(base["tokens_per_s_gpu"]))
            shares |= {"tokens_per_s_gpu": each} if each else {}
            if speedup and speedup.low > 0 and ratios:
                shares["speedup"] = (speedup.low * first / gpus, speedup.high * first / gpus)
            if shares:
                yield from _follows(row, base, efficiency, shares, "efficiency")
    for name, odd in others.items():
        if len(agree[name]) >= max(2, 2 * len(odd)):
            for row in odd:
                cell, speedup = row[name], row["speedup"]
                said = f"{cell.column} {cell.text}: {speedup.column} {speedup.text} does not follow"
                said += f" from it, as those of {len(agree[name])} other rows do"
                yield of_cell(row, cell, "speedup", said, "", "likely")


def _wide(cell: Value) -> Interval:
    """A speedup or efficiency, and what numbers that were averaged apart may miss it by."""
    half = (cell.high - cell.low) / 2
    return cell.low * (1 - AVERAGED) - half, cell.high * (1 + AVERAGED)


def _follows(
    row: Line, base: Line, cell: Value, ratios: dict[str, Interval], kind: str
) -> Iterator[Finding]:
    span = (cell.low, cell.high)
    if any(apart(_wide(cell), ratio) == 0 for ratio in ratios.values()):
        return
    name = min(ratios, key=lambda name: apart(span, ratios[name]))
    one, other = base[name] or row[name], row[name]
    due = one.value / other.value if name in _TIMES else other.value / one.value
    texts = [one.text, other.text]
    if name == "speedup":
        many, first = row.number("gpus"), base.number("gpus")
        due, texts = other.value * first / many, [f"{other.text} on {many:g} GPUs, from {first:g},"]
    elif kind == "efficiency" and name != "tokens_per_s_gpu":
        due *= base.number("gpus") / row.number("gpus")
        texts = [f"{v.text} on {r.number('gpus'):g} GPUs" for v, r in ((one, base), (other, row))]
    shown = as_printed(cell, due)
    said = f"{cell.column} {cell.text}: {other.column or name} {' and '.join(texts)} give {shown}"
    yield of_cell(row, cell, kind, said, shown)


def above_linear(table: AnyTable) -> Iterator[Finding]:
    """No speedup is above the number of GPUs over those of the row whose speedup is 1."""
    by_name = {
        name: [(h, what) for h, what in table.columns.items() if what.name == name]
        for name in ("speedup", "efficiency")
    }
    for heading, what in by_name["speedup"]:
        cells = [(row, read_cell(row.cells.get(heading, ""), heading, what)) for row in table.rows]
        first = next((row for row, cell in cells if cell and cell.value == 1), None)
        base = first.number("gpus") if first else None
        for row, cell in cells:
            gpus = row.number("gpus")
            if cell and base and gpus and (efficiency := cell.value * base / gpus) > ABOVE_LINEAR:
                said = f"speedup {cell.value:g} on {gpus:g} GPUs is an efficiency of"
                said += f" {efficiency:.2f}, above 1"
                yield of_cell(row, cell, "efficiency", said, f"at most {gpus / base:g}")
    for heading, what in by_name["efficiency"]:
        for row in table.rows:
            cell = row["efficiency"]
            if cell is None or cell.column != heading:
                cell = read_cell(row.cells.get(heading, ""), heading, what)
            if cell and cell.value > ABOVE_LINEAR:
                said = f"efficiency {cell.value:g} is above 1"
                yield of_cell(row, cell, "efficiency", said, "at most 1")


_IDEAL = re.compile(r"\b(?:ideal|perfect|linear)\b")
_BOUND = re.compile(
    r"\b(?:ideal|perfect|theoretical(?: max(?:imum)?)?|roofline|upper bound|lower bound|bound|"
    r"limit|peak(?=.*flop)|max(?:imum)? possible)\b"
)
_TIMES = ("step_s", "wall_s")
_RATES = ("tokens_per_s", "samples_per_s", "speedup", "tflops", "efficiency", "mfu")


def _bounds_of(table: AnyTable, pattern: re.Pattern) -> Iterator[tuple[str, Meaning]]:
    """(heading, what it bounds) of the columns of ideal or largest values."""
    for heading in table.unused:
        text = plain(heading)
        if pattern.search(text) and not re.search(r"%|\bpercent|\bshare of\b|\bfraction\b", text):
            rest = pattern.sub(" ", text).strip()
            what = meaning(rest) or (Meaning("speedup") if rest in ("", "scaling") else None)
            if what and what.name in (*_TIMES, *_RATES):
                yield heading, what


def ideal(table: AnyTable) -> Iterator[Finding]:
    """An ideal column is the base times (a time: divided by) the GPUs, where it is in most rows."""
    for heading, what in _bounds_of(table, _IDEAL):
        if what.name in ("efficiency", "mfu", "tflops") or what.of == "gpu":
            continue
        cases = []
        for row in table.rows:
            cell = read_cell(row.cells.get(heading, ""), heading, what)
            gpus = span_of(row["gpus"])
            if cell and span_of(cell) and gpus:
                one = span_of(cell)
                span = product_of(one, gpus) if what.name in _TIMES else ratio_of(one, gpus)
                cases.append((row, cell, span))
        if len(cases) < 2:
            continue
        base, held = common([span for *_, span in cases])
        if what.name == "speedup" and len(cases) == len(table.rows):
            first = min(cases, key=lambda case: case[0].number("gpus"))[0]
            base = 1 / first.number("gpus")
            held = {i for i, (*_, span) in enumerate(cases) if apart(span, (base, base)) == 0}
        if 2 * len(held) <= len(cases):
            continue
        for i, (row, cell, span) in enumerate(cases):
            if i not in held and apart(span, (base, base)) > AVERAGED:
                gpus = row.number("gpus")
                due = base / gpus if what.name in _TIMES else base * gpus
                shown = f"{due / what.scale:.6g}"
                said = f"{heading} {cell.text}: {gpus:g} GPUs make {shown}, as in {len(held)} rows"
                yield of_cell(row, cell, "ideal", said, shown)


def above_bound(table: AnyTable) -> Iterator[Finding]:
    """No result is better than its own bound: an ideal, a roofline, a theoretical maximum."""
    for heading, what in _bounds_of(table, _BOUND):
        for row in table.rows:
            bound = read_cell(row.cells.get(heading, ""), heading, what)
            cell = row[
                "tokens_per_s_gpu" if (what.name, what.of) == (_RATES[0], "gpu") else what.name
            ]
            if not bound or not cell or cell.column == heading:
                continue
            time = what.name in _TIMES
            if (bound.low - cell.high if time else cell.low - bound.high) > AVERAGED * bound.value:
                side = "below" if time else "above"
                said = f"{cell.column} {cell.text} is {side} its own bound, {heading} {bound.text}"
                sure = "likely" if _IDEAL.search(plain(heading)) else "certain"
                yield of_cell(row, cell, "bound", said, f"{bound.text}", sure)
