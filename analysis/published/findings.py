"""Which cells of one table break the rules of identities.py, with the numbers."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import NamedTuple

from analysis.logs.published_csv import column_name, number
from analysis.published.identities import (
    BOUNDS,
    DERIVED,
    FAR_APART,
    IDENTITIES,
    RESULTS,
    SAME,
    SHARP,
    SPEEDS,
    WHOLE,
    Identity,
    Same,
)
from analysis.published.printed_numbers import Value, agreement, tolerance
from analysis.published.read_tables import REMARKS, Line
from base.errors import printable
from base.intervals import Interval


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: its file and line, its kind, the sentence with the numbers; of a
    cell, its heading and what is printed."""

    file: str
    line: int
    kind: str
    message: str
    column: str = ""
    printed: str = ""

    def __str__(self) -> str:
        return printable(f"{self.file}:{self.line}: {self.message}")


def check(rows: list[Line]) -> tuple[list[Finding], set[int]]:
    """Returns the findings in the rows of one table, of each cell the first alone, and the lines
    that could be checked. It fills in columns that a row does not print."""
    lines: set[int] = set()
    findings = [*_identities(rows, lines), *_whole_numbers(rows, lines), *_bounds(rows)]
    doubtful = {finding.line for finding in findings}
    for row in rows:
        _derive(row)
    undoubted = [row for row in rows if row.line_no not in doubtful]
    findings += [*_same(undoubted, lines), *_equal(rows), *_repeats(rows)]
    first: dict[tuple[int, str], Finding] = {}
    for finding in findings:
        first.setdefault((finding.line, finding.column), finding)
    return sorted(first.values(), key=lambda finding: finding.line), lines


def _of_cell(row: Line, value: Value, kind: str, words: str) -> Finding:
    """Returns the finding about a row's printed value; `words` say what contradicts it."""
    message = f"{value.heading} {value.text}, but {words}"
    if row.denominator and (kind == "mfu" or row.values.get("mfu") is value):
        message += f"; {row.denominator}"
    return Finding(row.file, row.line_no, kind, message, value.heading, value.text)


def figure(number: float) -> str:
    """Returns a number for a sentence: a whole one as it is (2,097,152), else four digits."""
    if abs(number - round(number)) <= 1e-9 * abs(number) or abs(number) >= 1e4:
        return f"{number:,.0f}"
    return f"{number:.4g}"


@cache
def _terms(expression: str) -> list[tuple[str, str]]:
    """Returns the sign ("" of the first) and the column or number of each term."""
    return re.findall(r"([*/]?) ?(\w+)", expression)


def evaluate(row: Line, expression: str) -> Value | None:
    """Returns the value of an expression of columns, numbers, `*` and `/`, with the words that show
    it as its text; None where the row lacks a column."""
    interval, number, words = Interval(1.0, 1.0), 1.0, ""
    for sign, name in _terms(expression):
        if (operand := row.operand(name)) is None:
            return None
        if sign == "/":
            interval, number = interval.over(operand.interval), number / operand.number
        else:
            interval, number = interval.times(operand.interval), number * operand.number
        phrase = operand.text if name.isdecimal() else f"{name} {operand.text}"
        if words and operand.text:
            words += f" / {phrase}" if sign == "/" else f" x {phrase}"
        elif operand.text:
            words = phrase
    return Value(number, interval, "", words)


class Case(NamedTuple):
    """A row, its printed value, the right side that it meets best, and by what share it misses."""

    row: Line
    value: Value
    result: Value
    miss: float


def _identities(rows: list[Line], lines: set[int]) -> Iterator[Finding]:
    """Yields values that an identity misses by more than most rows do, and adds the lines of the
    rows that an identity is about to `lines`."""
    for identity in IDENTITIES:
        cases = [case for row in rows if (case := _case(row, identity))]
        if not cases:
            continue
        lines |= {case.row.line_no for case in cases}
        allowed = max(identity.slack, tolerance([case.miss for case in cases]))
        for row, value, result, miss in cases:
            if miss > allowed:
                words = f"{result.text} = {figure(result.number)}"
                yield _of_cell(row, value, identity.kind, words)


def _case(row: Line, identity: Identity) -> Case | None:
    """Returns what an identity says of a row; None where the row's TFLOP/s are of another
    convention or called an estimate, or it lacks a column."""
    value, formula = row.values.get(identity.left), row.words.get("formula", "")
    if identity.formula and ("estimate" in formula or identity.formula.lower() not in formula):
        return None
    results = [result for right in identity.right if (result := evaluate(row, right))]
    if value is None or not results:
        return None
    best = min(results, key=lambda result: value.interval.misses(result.interval))
    return Case(row, value, best, value.interval.misses(best.interval))


def _whole_numbers(rows: list[Line], lines: set[int]) -> Iterator[Finding]:
    """Yields values of which a count follows that is no whole number, as the GPUs of a layout over
    tp. The lines of the rows that were checked are added to `lines`."""
    for kind, expression, without in WHOLE:
        left = expression.split()[0]
        for row in rows:
            result = evaluate(row, expression)
            if result is None or without in row.values:
                continue
            lines.add(row.line_no)
            if result.number % 1:
                words = f"{result.text} = {figure(result.number)}, no whole number"
                yield _of_cell(row, row.values[left], kind, words)


def _bounds(rows: list[Line]) -> Iterator[Finding]:
    """Yields values above what is possible."""
    for bound in BOUNDS:
        for row in rows:
            value, most = row.values.get(bound.left), evaluate(row, bound.right)
            if value and most and value.interval.low > most.interval.high * (1 + bound.slack):
                yield _of_cell(row, value, bound.kind, f"at most {most.text} is possible")


def _derive(row: Line) -> None:
    """Fills in what a row does not print, from what it prints."""
    for name, expression in DERIVED:
        result = evaluate(row, expression)
        if name not in row.values and result:
            row.values[name] = result._replace(text=figure(result.number))


def _same(rows: list[Line], lines: set[int]) -> Iterator[Finding]:
    """For each rule of SAME, yields the rows whose expression differs from that of most rows of
    their group. The lines of the rows that were checked are added to `lines`."""
    for same in SAME:
        groups: dict[tuple, list[tuple[Line, Value]]] = defaultdict(list)
        for row in rows:
            if result := evaluate(row, same.expression):
                groups[tuple(row.fact(name) for name in same.group)].append((row, result))
        for members in groups.values():
            yield from _odd_ones(same, members, lines)


def _odd_ones(same: Same, members: list[tuple[Line, Value]], lines: set[int]) -> Iterator[Finding]:
    """Yields the rows of a group that most rows contradict, and adds the lines of a group that has
    a majority to `lines`. Two rows have none; where one of them has speedup or efficiency 1, it is
    the baseline, and decides."""
    left = same.expression.split()[0]
    agreed, agreeing = agreement([result.interval for _, result in members], same.slack)
    if len(members) == 2 and same.kind in ("speedup", "efficiency"):
        bases = [n for n, (row, _) in enumerate(members) if row.values[left].number == 1]
        if len(bases) != 1:
            return
        if len(agreeing) < 2:
            agreed, agreeing = members[bases[0]][1].interval.middle, set(bases)
    elif len(members) < 3 or 2 * len(agreeing) <= len(members):
        return
    lines |= {row.line_no for row, _ in members}
    for n, (row, result) in enumerate(members):
        if n not in agreeing:
            value = row.values[left]
            printed = number(value.text) or value.number  # 55 of an MFU of 55 %
            as_most = figure(printed * agreed / result.number)
            words = (
                f"{same.expression} is {figure(result.number)}, in {len(agreeing)} of"
                f" {len(members)} rows {figure(agreed)}, which makes it {as_most}"
            )
            yield _of_cell(row, value, same.kind, words)


def _configuration(row: Line, without: Collection[str]) -> dict[str, str]:
    """Returns the cells of a row, by heading, that say which configuration it is: all but results
    and the columns `without`."""
    results = {row.values[name].heading for name in RESULTS if name in row.values}
    return {
        heading: text
        for heading, text in row.cells.items()
        if heading not in results and column_name(heading) not in without
    }


def _equal(rows: list[Line]) -> Iterator[Finding]:
    """Yields rows of different configurations that print equal results."""
    groups: dict[tuple[tuple[str, str], ...], list[Line]] = defaultdict(list)
    for row in rows:
        printed = [(name, row.values[name]) for name in SPEEDS if name in row.values]
        key = tuple((name, value.text) for name, value in printed if value.heading)
        low, high = printed[0][1].interval if key else (1.0, 2.0)
        if high / low - 1 <= min(SHARP, 1 / len(rows) ** 2):  # more digits than chance repeats
            groups[key].append(row)
    remarks = (*REMARKS, "table", "commit", "formula")
    for key, members in groups.items():
        for first, second in combinations(members, 2):
            settings, other_settings = (
                _configuration(first, remarks),
                _configuration(second, remarks),
            )
            differ = [name for name, text in settings.items() if text != other_settings.get(name)]
            if differ:
                words = (
                    f"line {first.line_no} differs ({', '.join(differ[:3])}) and has equal results"
                )
                yield _of_cell(second, second.values[key[0][0]], "equal", words)


# Of a remark, what is no setting: numbers of runs, files, dates, and a transcriber's LINT.
_NO_SETTING = re.compile(
    r"LINT[^;]*|\bID [\d.]+|(?i:log file name).*|\b(?:\d{4}-)?\d{2}-\d{2}\b|[; ]+$"
)


def _repeats(rows: list[Line]) -> Iterator[Finding]:
    """Yields rows that differ in nothing but what was measured, and differ much in that."""
    groups: dict[tuple, list[Line]] = defaultdict(list)
    ignored = [name for name in (*REMARKS, "table") if name not in ("notes", "remarks")]
    for row in (row for row in rows if "step_s" in row.values):
        texts = _configuration(row, ignored).values()
        groups[tuple(_NO_SETTING.sub("", text) for text in texts)].append(row)
    for members in groups.values():
        times = [row.values["step_s"].number for row in members]
        if max(times) > FAR_APART * min(times):
            row, lines = members[0], ", ".join(str(row.line_no) for row in members)
            words = (
                f"identical configurations took {', '.join(map(figure, times))} s (lines {lines}):"
                f" the slowest is {max(times) / min(times):.2f} times the fastest"
            )
            yield Finding(row.file, row.line_no, "repeats", words, row.values["step_s"].heading)
