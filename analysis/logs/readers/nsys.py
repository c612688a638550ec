"""`nsys stats` text: tables of what took how long.

     ** NVTX Range Summary (nvtx_sum):

     Time (%)   Total Time (ns)    Instances     Avg (ns)     ...     Style           Range
     --------  ------------------  ---------  --------------  ...
         53.9  27,65,96,75,62,725     14,244  19,41,84,748.9  ...  PushPop  :backward

The dashes say where columns are. Digits are grouped by the reader's locale, 2,765 or 27,65: commas
carry nothing. A profile has no steps: its tables are in `Record.tables`. `nsys profile --stats`
titles the same tables `[3/8] Executing 'nvtx_sum' stats report`.
"""

import re

from analysis.logs.parsing.line_format import Format
from analysis.logs.parsing.logfile import Log
from analysis.logs.record import Record, Refusal

Row = dict[str, float | str]

_TITLE = re.compile(r"\*\* (?:.{1,120}?) \((\w{1,60})\):|Executing '(\w{1,60})' stats report")
_RULE = re.compile(r" {0,4}-{2,}(?: {1,4}-{2,})*\s*")


def _read(log: Log, record: Record) -> None:
    """Read one file; `Record.tables` is what `tables` finds.

    Raises:
        Refusal: it is cut off in a table.
    """
    if b"Total Time (ns)" not in log.head:
        return  # a training log that was profiled: the tables at its end are not the run
    found = tables(log.text(), str(log.path), record.notes)
    record.whole_run, record.tables = True, found


def tables(text: str, source: str, notes: list[str] | None = None) -> dict[str, list[Row]]:
    """Report name -> rows, each a dict by column (times in seconds, `Time (%)` in percent).

    A line between rows that is no row is left out; `notes` gets a sentence about it.

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
            rules = [match.span() for match in re.finditer(r"-+", line)]
            ends = [end for _, end in rules]
            # A name or a number may be wider than its rule, to the left of it.
            spans = [slice(*bounds) for bounds in zip([0, *ends], ends, strict=False)]
            names = [header[span].strip() for span in spans]
            spans[-1], last = slice(spans[-1].start, None), rules[-1][0]
        elif spans and len(line.rstrip()) > last and (row := _row(line, spans, names)):
            found[title].append(row)
        elif spans and together:
            if number == len(lines):  # a complete line ends in a newline
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


def _row(line: str, spans: list[slice], names: list[str]) -> Row | None:
    """One row; None where the line does not begin with a number."""
    row: Row = {}
    for i, (span, name) in enumerate(zip(spans, names, strict=True)):
        text = line[span].strip()
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


FORMAT = Format(
    name="nsys stats",
    marks=((b"Time (%)", b"Total Time (ns)"),),
    embedded=True,
    reader=_read,
)
