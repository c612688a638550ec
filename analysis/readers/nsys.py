"""`nsys stats` text: tables of what took how long.

     ** NVTX Range Summary (nvtx_sum):

     Time (%)   Total Time (ns)    Instances     Avg (ns)     ...     Style           Range
     --------  ------------------  ---------  --------------  ...
         53.9  27,65,96,75,62,725     14,244  19,41,84,748.9  ...  PushPop  :backward

The dashes say where columns are. Digits are grouped by the reader's locale, 2,765 or 27,65: commas
carry nothing. A profile has no steps: its tables are in `extra["tables"]`.
"""

import re

from analysis.readers._log import Log
from analysis.records import Record

FORMAT = "nsys stats"
EMBEDDED = True
MARKS = ((b"Time (%)", b"Total Time (ns)"),)

_TITLE = re.compile(r"\*\* (.{1,120}?) \((\w{1,60})\):")
_RULE = re.compile(r" {0,4}-{2,}(?: {1,4}-{2,})*\s*")


def read(log: Log) -> Record:
    """Read one file; `extra["tables"]` is report name -> rows, each a dict by column (times in
    seconds, `Time (%)` in percent)."""
    record = Record(source=str(log.path), format=FORMAT)
    if b"Total Time (ns)" not in log.head:
        return record  # a training log that was profiled: the tables at its end are not the run
    tables: dict[str, list[dict[str, float | str]]] = {}
    title, header, spans = None, "", None
    for line in log.text().replace("\r\n", "\n").split("\n"):
        if match := _TITLE.search(line):
            title, spans = match[2], None
            tables[title] = []
        elif title and _RULE.fullmatch(line) and "-" in line:
            spans = [m.span() for m in re.finditer(r"-+", line)]
            names = [header[a:b].strip() for a, b in _widened(spans, header)]
        elif spans and line.strip():
            tables[title].append(_row(line, spans, names))
        elif spans:
            spans = None
        else:
            header = line
    record.extra = {"whole_run": True, "tables": tables}
    return record


def _widened(spans: list[tuple[int, int]], header: str) -> list[tuple[int, int]]:
    """A name may be wider than its rule, to the left of it: half-way to the neighbour is its."""
    ends = [b for _, b in spans]
    return [(0 if i == 0 else ends[i - 1], b) for i, b in enumerate(ends)]


def _row(line: str, spans: list[tuple[int, int]], names: list[str]) -> dict[str, float | str]:
    row: dict[str, float | str] = {}
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
