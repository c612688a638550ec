"""Results that should differ and do not, and those that should not and do."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations

from analysis.logs.published_csv import column_name
from analysis.published.any_table import AnyTable, Line
from analysis.published.finding import FAR_APART, Finding
from analysis.published.headings import MEASURED, plain
from analysis.published.rules.broken import of_cell
from analysis.published.rules.intervals import middle
from analysis.published.rules.rows import tokens_of_step

SHARP = 3e-4  # numbers of fewer digits than this resolves are equal by chance
CHANCE = 0.5  # pairs of rows of a table that may be equal by chance before equality says nothing
_NUMBER_OF_RUN = re.compile(r"\bID [\d.]+|(?i:\blog file name).*|\b(?:\d{4}-)?\d{2}-\d{2}\b")
_MOMENT = re.compile(r"(?:global |train(?:er)? )?(?:step|iter|iteration|epoch|timestamp|elapsed)s?")
_NO_SETTING = {"status", "date", "lint", "warm_up", "id", "source", "table", "inferred"}
NO_FACT = re.compile(
    r"(?i)^(?:id|source|table|notes?|remarks?|inferred|run|name|link|url|lint|line|log|file|path|format)$"
)


def facts_of(row: Line) -> tuple:
    """What a row is: every cell that is neither measured nor a remark."""
    names = (*MEASURED, "tokens_per_s_gpu", "samples_per_s_gpu", "tflops_all")
    measured = {row[k].column for k in names if row[k]}
    return tuple(
        (h, t)
        for h, t in row.cells.items()
        if h not in measured
        and not NO_FACT.match(h)
        and not re.search(r"(?i)status|date|std|note", h)
    )


def equal_results(table: AnyTable) -> Iterator[Finding]:
    """Different configurations do not print equal results; one run does not stand twice."""
    keys = (
        "step_s",
        "tokens_per_s",
        "tokens_per_s_gpu",
        "samples_per_s",
        "tflops",
        "mfu",
        "wall_s",
    )
    names = [k for k in keys if sum(bool(row[k]) for row in table.rows) > 1]
    groups: dict[tuple, list[Line]] = defaultdict(list)
    for row in table.rows:
        printed = tuple((k, row[k].text) for k in names if row[k])
        if printed:
            groups[printed].append(row)
    fewest = min((row.number("gpus", math.inf) for row in table.rows), default=math.inf)
    pairs = len(table.rows) ** 2 / 2
    for printed, rows in groups.items():
        if len(rows) < 2:
            continue
        digits = sharpest(rows[0], [k for k, _ in printed])
        for one, other in combinations(rows, 2):
            cell = other[printed[0][0]]
            if facts_of(one) == facts_of(other):
                place = [
                    {
                        h: t
                        for h, t in r.cells.items()
                        if re.match("(?i)(?:table|source|log|file|path)$", h)
                    }
                    for r in (one, other)
                ]
                if place[0] != place[1] or one.number("gpus", math.inf) <= fewest or digits > 1e-2:
                    continue
                said = f"the same run stands on line {one.line_no}, too"
                yield of_cell(other, cell, "twice", said, "one row", "possible")
            elif digits < SHARP and digits * pairs < CHANCE:
                differ = [
                    h
                    for (h, a), (_, b) in zip(facts_of(one), facts_of(other), strict=False)
                    if a != b
                ]
                if any(_MOMENT.fullmatch(plain(heading)) for heading in differ):
                    continue  # one run at two moments
                said = (
                    f"{cell.column} {cell.text}: line {one.line_no}, another configuration"
                    f" ({', '.join(differ[:3])}), has equal results"
                )
                yield of_cell(other, cell, "equal", said, "another number", "likely")


def sharpest(row: Line, names: list[str]) -> float:
    """The smallest relative interval of the printed results.

    A rate that follows from the printed time to its last digit has no more digits than the time.
    """
    widths = {k: (row[k].high - row[k].low) / max(row[k].value, 1e-12) for k in names}
    step_s, work = row["step_s"], tokens_of_step(row)
    for name in ("tokens_per_s", "tokens_per_s_gpu"):
        if name in widths and "step_s" in widths and work and step_s.value > 0:
            gpus = row.number("gpus", 1) if name == "tokens_per_s_gpu" else 1
            rate = middle(work) / step_s.value / gpus
            if row[name].low - 1 <= rate <= row[name].high + 1:  # it may have been rounded to 1
                widths[name] = widths["step_s"] = max(widths[name], widths["step_s"])
    return min(widths.values())


def far_apart(table: AnyTable) -> Iterator[Finding]:
    """Rows that differ in nothing but what was measured do not differ much in that."""
    groups: dict[tuple, list[tuple[float, Line]]] = defaultdict(list)
    for row in table.rows:
        step_s = row.number("step_s")
        if step_s:
            groups[_configuration(table, row)].append((step_s, row))
    for repeats in groups.values():
        times = [s for s, _ in repeats]
        if len(times) > 1 and max(times) > FAR_APART * min(times):
            listed = ", ".join(f"{s:g}" for s in times)
            lines = ", ".join(str(row.line_no) for _, row in repeats)
            said = (
                f"identical configurations took {listed} s (lines {lines}):"
                f" the slowest is {max(times) / min(times):.2f} times the fastest"
            )
            row = repeats[0][1]
            yield of_cell(row, row["step_s"], "repeats", said)


def _configuration(table: AnyTable, row: Line) -> tuple:
    """What tells runs apart: every cell but measurements, dates and places."""
    found = []
    for heading, text in row.cells.items():
        name = table.columns[heading].name if heading in table.columns else column_name(heading)
        if name in ("notes", "remarks"):
            # Settings may stand there; dates, numbers of runs and a transcriber's remarks do, too.
            remarks = " ".join(part for part in text.split(";") if "LINT" not in part)
            found.append(_NUMBER_OF_RUN.sub("", remarks).strip())
        elif name not in MEASURED and name not in _NO_SETTING:
            found.append(text)
    return tuple(found)
