"""The tables of one document against each other."""

import re
from collections import defaultdict
from collections.abc import Iterator

from analysis.published.any_table import AnyTable, Line
from analysis.published.finding import Finding
from analysis.published.headings import COUNTS
from analysis.published.rules.broken import of_cell
from analysis.published.rules.columns import better_rows
from analysis.published.rules.repeated import SHARP, sharpest

_RESULTS = (
    "step_s",
    "tokens_per_s",
    "tokens_per_s_gpu",
    "samples_per_s",
    "tflops",
    "mfu",
    "wall_s",
)
_NAMED = re.compile(
    r"(?i)\b(?:best|fastest|optimal) (?:\w+ )?(?:layout|config|split|setup|result|run|throughput)"
)
_FACTS = (*COUNTS, "params_b")


def across(tables: list[AnyTable]) -> Iterator[Finding]:
    """Equal results of other configurations, and best layouts that another table beats."""
    yield from _equal(tables)
    yield from _best(tables)


def _equal(tables: list[AnyTable]) -> Iterator[Finding]:
    groups: dict[tuple, list[tuple[int, Line]]] = defaultdict(list)
    for n, table in enumerate(tables):
        for row in table.rows:
            names = [k for k in _RESULTS if row[k]]
            if names and sharpest(row, names) < SHARP:
                groups[tuple((k, row[k].text) for k in names)].append((n, row))
    for printed, ((n, one), *others) in groups.items():
        for m, other in others:
            differ = [k for k in _FACTS if one[k] and other[k] and one.number(k) != other.number(k)]
            if m != n and differ:
                cell = other[printed[0][0]]
                said = (
                    f"{cell.column} {cell.text}: line {one.line_no}, another configuration"
                    f" ({', '.join(differ[:3])}), has equal results"
                )
                yield of_cell(other, cell, "equal", said, "another number", "likely")


def _best(tables: list[AnyTable]) -> Iterator[Finding]:
    """A table of best layouts has the fastest rows of the others, for its GPUs and model."""
    named = [table for table in tables if _NAMED.search(table.section)]
    for table in named:
        for row in table.rows:
            for other in tables if row["gpus"] else ():
                if other in named:
                    continue
                same = ("gpus", "params_b", "seq_len")
                same = tuple(k for k in same if row[k] and any(r[k] for r in other.rows))
                found = better_rows(other, row, same) if "gpus" in same else None
                if found and found[1]:
                    cell, ((top, faster), *_) = found
                    said = (
                        f"{table.section!r}: {cell.column} {cell.text}, but line {top.line_no} has"
                        f" {faster.text}"
                    )
                    yield of_cell(row, cell, "best", said, faster.text, "likely")
