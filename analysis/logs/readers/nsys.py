"""`nsys stats` text: tables of what took how long.

     ** NVTX Range Summary (nvtx_sum):

     Time (%)   Total Time (ns)    Instances     Avg (ns)     ...     Style           Range
     --------  ------------------  ---------  --------------  ...
         53.9  27,65,96,75,62,725     14,244  19,41,84,748.9  ...  PushPop  :backward

The dashes say where columns end. Digits are grouped by the reader's locale, 2,765 or 27,65: commas
carry nothing. `nsys profile --stats` titles the same tables `[3/8] Executing 'nvtx_sum' stats
report`.
"""

import re

from analysis.logs.record import Refusal

Row = dict[str, float | str]

_TITLE = re.compile(r"\*\* (?:.{1,120}?) \((\w{1,60})\):|Executing '(\w{1,60})' stats report")
_RULE = re.compile(r" {0,4}-{2,}(?: {1,4}-{2,})+\s*")
_NOISE = re.compile(r"\x1b\[[\d;]{0,20}[mK]|\0|.*\r(?!$)")  # colours, zero bytes, progress bars


def tables(text: str, source: str) -> dict[str, list[Row]]:
    """Returns the rows of each report by its name. A row is a dict by column (times in seconds,
    `Time (%)` in percent). A line between rows that is no row is left out.

    Raises:
        Refusal: the last row does not reach the last column, or a table has no rows: it is cut
            off.
    """
    reports: dict[str, list[Row]] = {}
    title, header, column_ends = "", "", []
    lines = [_NOISE.sub("", line).rstrip() for line in text.split("\n")]
    for number, line in enumerate(lines, start=1):
        if match := _TITLE.search(line):
            title, column_ends = match[1] or match[2], []
        elif title and _RULE.fullmatch(line):
            column_ends, reports[title] = [match.end() for match in re.finditer(r"-+", line)], []
        elif column_ends and (row := _row(line, header, column_ends)):
            reports[title].append(row)
        elif column_ends and line and lines[number - 2]:
            if number == len(lines):  # a complete line ends in a newline
                raise Refusal(source, f"truncated: line {number} ends inside a row of {title}")
        elif line:
            header = line
    if empty := [name for name, rows in reports.items() if not rows]:
        raise Refusal(source, f"truncated: {empty[0]} has no rows")
    return reports


def _row(line: str, header: str, column_ends: list[int]) -> Row | None:
    """Returns one row; None where the line does not begin with a number or does not reach its last
    column.

    A name or a number may be wider than its rule, to the left of it."""
    row: Row = {}
    for start, end in zip([0, *column_ends], [*column_ends[:-1], None], strict=False):
        name, text = header[start:end].strip(), line[start:end].strip()
        try:
            value = float(text.replace(",", ""))
        except ValueError:
            if not row or not text:
                return None
            row[name] = text
            continue
        if name.endswith(" (ns)"):
            name, value = f"{name.removesuffix('(ns)')}(s)", value / 1e9
        row[name] = value
    return row
