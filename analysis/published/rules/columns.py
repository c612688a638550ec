"""A column against itself: its unit, its best row, its dates, its commits."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator

from analysis.published.any_table import AnyTable, Line
from analysis.published.finding import DIFFERENT_COMMITS, Finding
from analysis.published.headings import MEASURED, Value
from analysis.published.rules.broken import of_cell, of_text
from analysis.published.rules.intervals import apart, span_of
from analysis.published.rules.repeated import NO_FACT

GAP = 5.0  # an outlier is this many times away from every other row


def one_unit(table: AnyTable) -> Iterator[Finding]:
    """One row is not several times away from all others: a unit changed inside a column."""
    for name in (
        "step_s",
        "tokens_per_s",
        "tokens_per_s_gpu",
        "samples_per_s",
        "tflops",
        "mfu",
        "memory_gb",
    ):
        found = []
        for row in table.rows:
            value = row[name]
            if value and value.value == 0 and _others_run(table, row, name):
                said = f"{value.column} {value.text} is nothing, but the row ran: another unit?"
                yield of_cell(row, value, "unit", said, "", "likely")
            if not value or value.value <= 0:
                continue
            scaled = value.value
            gpus, size = row.number("gpus"), _size(row)
            if name == "step_s":
                batch = row.number("global_batch") or row.number("batch_tokens")
                if not batch or not gpus:
                    continue
                scaled *= gpus / batch / (row.number("seq_len") or 1) / (size or 1)
            elif name in ("tokens_per_s", "samples_per_s"):
                scaled *= (size or 1) / (gpus or 1)
            elif name == "tokens_per_s_gpu":
                scaled *= size or 1
            found.append((math.log(scaled), row, value))
        found.sort(key=lambda item: item[0])
        if len(found) < 4:
            continue
        few = max(1, len(found) // 20)
        for side in (found, found[::-1]):
            for count in range(1, few + 1):
                away = abs(side[count][0] - side[count - 1][0])
                spread = abs(side[-1][0] - side[count][0])
                if away > math.log(GAP) and away > spread:
                    for _, row, value in side[:count]:
                        said = (
                            f"{value.column} {value.text}: per token, size and GPU"
                            f" {math.exp(away):.3g} times away from every other row: another unit?"
                        )
                        yield of_cell(row, value, "unit", said, "", "likely")
                    break


_SIZE = re.compile(r"(?<![\w.×-])(\d+(?:\.\d+)?) ?([BT])\b")


def _size(row: Line) -> float | None:
    """Billions of parameters, by a column or by the model's name (`22B`, `GPT 1T`)."""
    named = _SIZE.search(row.words.get("model", ""))
    by_name = float(named[1]) * (1000 if named[2] == "T" else 1) if named else None
    return row.number("params_b") or by_name


def _others_run(table: AnyTable, row: Line, name: str) -> bool:
    """Whether a row has another result, and every other row one that its digits tell from 0."""
    results = [row.number(k, 0) for k, _ in _SPEEDS if k != name]
    others = [other.number(name) for other in table.rows if other is not row and other[name]]
    return max(results) > 0 and len(others) > 1 and min(others) > 5 * row[name].high


_CLAIM = re.compile(r"(?i)\b(?:best|fastest|optimal)\b")


_SPEEDS = (
    ("tokens_per_s", 1),
    ("tokens_per_s_gpu", 1),
    ("samples_per_s", 1),
    ("step_s", -1),
    ("mfu", 1),
    ("tflops", 1),
)


def better_rows(
    table: AnyTable, row: Line, same: tuple[str, ...]
) -> tuple[Value, list[tuple[Line, Value]]] | None:
    """(how fast a row is, the rows that are faster beyond their digits, the fastest first).

    Only rows of the same model count, with equal values of `same`. None: the row has no speed.
    """
    peers = [
        r
        for r in table.rows
        if all(r.number(k) == row.number(k) for k in same)
        and r.words.get("model") == row.words.get("model")
    ]
    for name, sign in _SPEEDS:
        if cell := row[name]:
            found = [
                (r, r[name])
                for r in peers
                if r[name]
                and sign * (r.number(name) - cell.value) > 0
                and apart(span_of(r[name]) or (1, 1), span_of(cell) or (1, 1)) > 0
            ]
            return cell, sorted(found, key=lambda one: -sign * one[1].value)
    return None


def best(table: AnyTable) -> Iterator[Finding]:
    """A row that is called the best or the fastest is so among its own GPUs, model and batch."""
    for row in table.rows:
        claim = next(
            (
                h
                for h, t in row.cells.items()
                if len(t) < 40 and not NO_FACT.match(h) and _CLAIM.search(t)
            ),
            "",
        )
        same = ("gpus", "params_b", "global_batch", "seq_len", "layers", "hidden")
        found = better_rows(table, row, same) if claim else None
        if found and found[1]:
            cell, ((top, faster), *_) = found
            said = (
                f"{row.cells[claim]!r}: {cell.column} {cell.text}, but line {top.line_no} has"
                f" {faster.text}"
            )
            yield of_cell(row, cell, "best", said, faster.text, "likely")


_DATES = {
    "year-month-day": r"\d{4}-\d{1,2}(?:-\d{1,2})?(?:[T ].*)?",
    "year/month/day": r"\d{4}/\d{1,2}/\d{1,2}",
    "x/y/year": r"\d{1,2}/\d{1,2}/\d{2,4}",
    "day.month.year": r"\d{1,2}\.\d{1,2}\.\d{2,4}",
}


def dates(table: AnyTable) -> Iterator[Finding]:
    """The dates of a column have one form, and exist."""
    columns = [h for h, what in table.columns.items() if what.name == "date"]
    for column in columns:
        forms: dict[str, list[Line]] = defaultdict(list)
        for row in table.rows:
            text = row.cells.get(column, "")
            for form, pattern in _DATES.items():
                if re.fullmatch(pattern, text):
                    forms[form].append(row)
            if match := re.match(r"\d{4}[-/](\d{1,2})(?:[-/](\d{1,2}))?", text):
                if not 1 <= int(match[1]) <= 12 or not 1 <= int(match[2] or 1) <= 31:
                    yield of_text(row, column, "date", f"{text} is no date", "a date")
        usual = max(forms, key=lambda form: len(forms[form]), default="")
        for form, rows in forms.items():
            if form != usual and len(forms[usual]) > 2 * len(rows):
                for row in rows:
                    said = f"{column} {row.cells[column]} is {form}, the others are {usual}"
                    yield of_text(row, column, "date", said, usual, "possible")


def commits(table: AnyTable) -> Iterator[Finding]:
    """The rows of one published table (the column `table`) were measured on one commit."""
    groups: dict[str, dict[str, int]] = defaultdict(dict)
    for row in table.rows:
        commit = row.words.get("commit")
        if commit and any(row[name] for name in MEASURED):
            groups[row.cells.get("table", "")].setdefault(commit[:7], row.line_no)
    for found in groups.values():
        if len(found) > 1:
            said = DIFFERENT_COMMITS + ", ".join(found)
            yield Finding(table.file, min(found.values()), "commits", said, "commit")
