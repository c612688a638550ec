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
    found = tables(log.text(), str(log.path), record.notes)
    record.extra = {"whole_run": True, "tables": found}
    return record


def tables(text: str, source: str, notes: list[str] | None = None) -> dict[str, list[Row]]:
    """Report name -> rows, each a dict by column (times in seconds, `Time (%)` in percent).

    A line between rows that is none is left out; `notes` takes a word of it.

    Raises:
        Refusal: the last row does not reach the last column, or a table has no rows: it is cut
            off.
    """
    found: dict[str, list[Row]] = {}
    title, header, spans = None, "", None
    together = True  # with the line before: no blank line is between
    lines = [_plain(line) for line in text.replace("\r\n", "\n").split("\n")]
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            together = False
            continue
        if match := _TITLE.search(line):
            _has_rows(found, title, spans, source)
            title, spans = match[1] or match[2], None
            found[title] = []
        elif title and _RULE.fullmatch(line) and "-" in line:
            spans = [m.span() for m in re.finditer(r"-+", line)]
            names = [header[a:b].strip() for a, b in _widened(spans, header)]
        elif spans and (row := _row(line, spans, names)):
            found[title].append(row)
        elif spans and together:
            if number == len(lines):  # a whole line has an end
                raise Refusal(source, f"truncated: line {number} ends inside a row of {title}")
            if notes is not None:
                notes.append(f"line {number} is no row of {title}: left out")
        elif spans:
            _has_rows(found, title, spans, source)
            spans = None
        else:
            header = line
        together = True
    _has_rows(found, title, spans, source)
    return found


def _plain(line: str) -> str:
    """Without colours, zero bytes and what a progress bar drew before it."""
    return re.sub(r"\x1b\[[\d;]{0,20}[mK]", "", line).replace("\0", "").split("\r")[-1]


def _has_rows(found: dict[str, list[Row]], title: str | None, spans: object, source: str) -> None:
    if spans and not found[title]:
        raise Refusal(source, f"truncated: {title} has no rows")


def _widened(spans: list[tuple[int, int]], header: str) -> list[tuple[int, int]]:
    """A name may be wider than its rule, to the left of it: half-way to the neighbour is its."""
    ends = [b for _, b in spans]
    return [(0 if i == 0 else ends[i - 1], b) for i, b in enumerate(ends)]


def _row(line: str, spans: list[tuple[int, int]], names: list[str]) -> Row | None:
    """One row; None where the line ends before the last column or does not begin with a number."""
    row: Row = {}
    if len(line.rstrip()) <= spans[-1][0]:
        return None
    for i, ((_, end), name) in enumerate(zip(spans, names, strict=True)):
        begin = 0 if i == 0 else spans[i - 1][1]
        text = line[begin : end if i + 1 < len(spans) else None].strip()
        try:
            value = float(text.replace(",", ""))
        except ValueError:
            if i == 0:
                return None
            row[name] = text
            continue
        if name.endswith(" (ns)"):
            row[name[: -len(" (ns)")] + " (s)"] = value / 1e9
        else:
            row[name] = value
    return row
