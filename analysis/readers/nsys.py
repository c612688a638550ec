"""`nsys stats` text: tables of what took how long.

     ** NVTX Range Summary (nvtx_sum):

     Time (%)   Total Time (ns)    Instances     Avg (ns)     ...     Style           Range
     --------  ------------------  ---------  --------------  ...
         53.9  27,65,96,75,62,725     14,244  19,41,84,748.9  ...  PushPop  :backward

The dashes say where columns are. Digits are grouped by the reader's locale, 2,765 or 27,65: commas
carry nothing. A profile has no steps: its tables are in `extra["tables"]`. `nsys profile --stats`
titles the same tables `[3/8] Executing 'nvtx_sum' stats report`.
"""

import re

from analysis.readers._log import Log
from analysis.records import Record, Refusal

FORMAT = "nsys stats"
EMBEDDED = True
MARKS = ((b"Time (%)", b"Total Time (ns)"),)
Row = dict[str, float | str]

_TITLE = re.compile(r"\*\* (?:.{1,120}?) \((\w{1,60})\):|Executing '(\w{1,60})' stats report")
_RULE = re.compile(r" {0,4}-{2,}(?: {1,4}-{2,})*\s*")


def read(log: Log) -> Record:
    """Read one file; `extra["tables"]` is what `tables` finds.

    Raises:
        Refusal: it is cut off in a table.
    """
    record = Record(source=str(log.path), format=FORMAT)
    if b"Total Time (ns)" not in log.head:
        return record  # a training log that was profiled: the tables at its end are not the run
    record.extra = {"whole_run": True, "tables": tables(log.text(), str(log.path))}
    return record


def tables(text: str, source: str) -> dict[str, list[Row]]:
    """Report name -> rows, each a dict by column (times in seconds, `Time (%)` in percent).

    Raises:
        Refusal: a row does not reach the last column, or a table has no rows: it is cut off.
    """
    found: dict[str, list[Row]] = {}
    title, header, spans = None, "", None
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        if match := _TITLE.search(line):
            title, spans = match[1] or match[2], None
            found[title] = []
        elif title and _RULE.fullmatch(line) and "-" in line:
            spans = [m.span() for m in re.finditer(r"-+", line)]
            names = [header[a:b].strip() for a, b in _widened(spans, header)]
        elif spans and line.strip():
            if len(line.rstrip()) <= spans[-1][0]:
                raise Refusal(source, f"truncated: line {number} ends inside a row of {title}")
            found[title].append(_row(line, spans, names))
        elif spans:
            if not found[title]:
                raise Refusal(source, f"truncated: {title} has no rows")
            spans = None
        else:
            header = line
    return found


def _widened(spans: list[tuple[int, int]], header: str) -> list[tuple[int, int]]:
    """A name may be wider than its rule, to the left of it: half-way to the neighbour is its."""
    ends = [b for _, b in spans]
    return [(0 if i == 0 else ends[i - 1], b) for i, b in enumerate(ends)]


def _row(line: str, spans: list[tuple[int, int]], names: list[str]) -> Row:
    row: Row = {}
    for i, ((_, end), name) in enumerate(zip(spans, names, strict=True)):
        begin = 0 if i == 0 else spans[i - 1][1]
        text = line[begin : end if i + 1 < len(spans) else None].strip()
        try:
            value = float(text.replace(",", ""))
        except ValueError:
            row[name] = text
            continue
        if name.endswith(" (ns)"):
            row[name[: -len(" (ns)")] + " (s)"] = value / 1e9
        else:
            row[name] = value
    return row
