"""Totals are the sum of their parts, and shares of a whole make 100 %."""

import re
from collections.abc import Iterator

from analysis.published.any_table import AnyTable, Line
from analysis.published.finding import Finding
from analysis.published.headings import Meaning, Value, plain, read_cell
from analysis.published.rules.broken import of_cell
from analysis.published.rules.intervals import common, ratio_of, span_of

_TOTAL = re.compile(r"(?i)^\W*(?:grand )?(?:totals?|sum)\W*$")
_TOTAL_COLUMN = re.compile(r"^(?:total|sum)\b|\b(?:total|sum)$")
_SHARE = re.compile(r"\bshare\b|\bfraction\b|% of\b|\bpercent(?:age)? of\b|\bproportion\b")
_ADDS = ("step_s", "wall_s", "memory_gb", "tokens", "steps", "params_b", "gpus", "nodes")
MOST_PARTS = 12
NEAR = 15.0  # shares that sum to 100 within this are meant to make 100


def _number(row: Line, heading: str) -> Value | None:
    """The plain number of a cell; None where words stand beside it."""
    text = row.cells.get(heading, "")
    if not re.fullmatch(r"[~*`\s$]*[\d.,]+\s*(?:%|[a-zA-Zµ]{1,4})?[*`\s]*", text):
        return None
    return read_cell(text, heading, Meaning("part"))


def _sums_to(total: Value, parts: list[Value]) -> bool:
    return abs(sum(part.value for part in parts) - total.value) <= _slack([*parts, total])


def _label(row: Line) -> str:
    return next(iter(row.cells.values()), "")


def total_rows(table: AnyTable) -> Iterator[Finding]:
    """A row called total or sum is the sum of the rows above it, back to the total before."""
    since: list[Line] = []
    for row in table.rows:
        if not _TOTAL.match(_label(row)):
            since.append(row)
            continue
        cases = []
        for heading in list(row.cells)[1:]:
            meant = table.columns.get(heading)
            parts = [p for part in since if (p := _number(part, heading))]
            total = _number(row, heading)
            if meant and meant.name not in _ADDS or total is None or len(parts) < len(since):
                continue
            if len(parts) > 1 and total.value > max(part.value for part in parts):
                cases.append((total, parts))
        wrong = [(total, parts) for total, parts in cases if not _sums_to(total, parts)]
        if len(wrong) <= max(1, len(cases) // 2):  # else the row is no sum
            for total, parts in wrong:
                made = sum(part.value for part in parts)
                said = f"{total.column} {total.text}: the {len(parts)} rows above sum to {made:.6g}"
                sure = "certain" if len(cases) > len(wrong) else "likely"
                yield of_cell(row, total, "sum", said, f"{made:.6g}", sure)
        since = []


def total_columns(table: AnyTable) -> Iterator[Finding]:
    """A column called total is the sum of the columns beside it, where it is in most rows."""
    headings = list(table.rows[0].cells) if table.rows else []
    for at, heading in enumerate(headings):
        if not _TOTAL_COLUMN.search(plain(heading)):
            continue
        best: list[tuple[Line, Value, list[Value], bool]] = []
        for step in (-1, 1):
            for count in range(2, MOST_PARTS):
                beside = headings[at - count : at] if step < 0 else headings[at + 1 :][:count]
                if len(beside) < count or (step < 0 and at < count):
                    break
                cases = []
                for row in table.rows:
                    total, parts = _number(row, heading), [_number(row, h) for h in beside]
                    if total and None not in parts:
                        cases.append((row, total, parts, _sums_to(total, parts)))
                if sum(case[-1] for case in cases) > max(sum(case[-1] for case in best), 1):
                    best = cases
        held = sum(case[-1] for case in best)
        if held > len(best) / 2:
            for row, total, parts, holds in best:
                if not holds:
                    made = sum(part.value for part in parts)
                    names = " + ".join(part.column for part in parts)
                    said = f"{heading} {total.text}: {names} = {made:.6g}, as in {held} other rows"
                    yield of_cell(row, total, "sum", said, f"{made:.6g}")


def shares_of_rows(table: AnyTable) -> Iterator[Finding]:
    """Shares that make 100 % in most rows make it in each."""
    marked = {h for h in (table.rows[0].cells if table.rows else ()) if "%" in h}
    cases = []
    for row in table.rows:
        parts = [
            part
            for heading, text in row.cells.items()
            if (heading in marked or "%" in text) and (part := _number(row, heading))
        ]
        if len(parts) > 2:
            cases.append((row, parts, sum(part.value for part in parts)))
    full = [parts for _, parts, whole in cases if abs(whole - 100) <= _slack(parts)]
    if len(full) < 2 or len(full) <= len(cases) / 2:
        return
    for row, parts, whole in cases:
        if len(parts) == len(full[0]) and abs(whole - 100) > _slack(parts):
            said = f"the shares of the row make {whole:g} %, those of {len(full)} other rows 100 %"
            yield of_cell(row, parts[-1], "sum", said)


def _slack(parts: list[Value]) -> float:
    """What rounding of all numbers can move their sum by."""
    return sum(part.value - part.low for part in parts) + 1e-9


def shares_of_columns(table: AnyTable) -> Iterator[Finding]:
    """A column of shares makes 100 %, and each share is its row's part of the column beside it."""
    rows = [row for row in table.rows if not _TOTAL.match(_label(row))]
    headings = list(table.rows[0].cells) if table.rows else []
    for heading in headings:
        is_percent = "%" in heading or all("%" in row.cells.get(heading, "") for row in rows)
        if heading in table.columns or not is_percent:
            continue
        shares = [(row, share) for row in rows if (share := _number(row, heading))]
        if len(shares) < 3:
            continue
        odd: list[tuple[Line, Value, float]] = []
        for other in headings:
            whole = [_number(row, other) for row, _ in shares]
            if other == heading or None in whole:
                continue
            spans = [
                ratio_of(span_of(x), span_of(s)) for x, (_, s) in zip(whole, shares, strict=True)
            ]
            known = [i for i, span in enumerate(spans) if span]
            point, held = common([spans[i] for i in known])
            sum_of_all = sum(x.value for x in whole)
            if 2 < len(held) < len(known) < 2 * len(held) and 80 < sum_of_all / point < 120:
                odd = [
                    (*shares[i], whole[i].value / point)
                    for n, i in enumerate(known)
                    if n not in held
                ]
        for row, share, expected in odd:
            said = f"{heading} {share.text}: as the other rows divide, it is {expected:.4g} %"
            yield of_cell(row, share, "sum", said, f"{expected:.4g}")
        whole, parts = sum(share.value for _, share in shares), [share for _, share in shares]
        if not odd and _SHARE.search(plain(heading)) and _slack(parts) < abs(whole - 100) < NEAR:
            said = f"{heading}: the {len(shares)} shares make {whole:g} %"
            yield of_cell(shares[-1][0], parts[-1], "sum", said, "", "likely")
