"""Nsight Systems' SQLite export (`nsys export --type sqlite`, and what `nsys stats` leaves behind).

The tables of `nsys stats`, computed from the events. Documented in the user guide's "SQLite Export
Schema Reference": every text is a row of StringIds; NVTX_EVENTS holds ranges, whose name is `text`
or, when registered, `textId`, inside the domain that an event of type 75 names;
CUPTI_ACTIVITY_KIND_KERNEL the kernels, CUPTI_ACTIVITY_KIND_RUNTIME the CUDA calls, OSRT_API the
operating system's. A table is there only when something was recorded for it. Times are nanoseconds.
"""

import math
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from analysis.logs.readers.nsys import Row
from analysis.logs.record import Refusal

FORMAT = "nsys SQLite"
MAGIC = b"SQLite format 3\0"

_RANGES = (59, 60, 70, 71)  # push/pop and start/end, of NVTX and of NVTX extended
_DOMAIN = 75

# nsys stats' report -> (table, the column that names an event, the columns of names and of counts)
_REPORTS = {
    "osrt_sum": ("OSRT_API", "nameId", "Name", "Num Calls"),
    "cuda_api_sum": ("CUPTI_ACTIVITY_KIND_RUNTIME", "nameId", "Name", "Num Calls"),
    "cuda_gpu_kern_sum": ("CUPTI_ACTIVITY_KIND_KERNEL", "demangledName", "Name", "Instances"),
}


def tables(path: Path) -> dict[str, list[Row]]:
    """Report name -> rows as `nsys.tables` gives them, the longest first.

    Raises:
        Refusal: no SQLite, cut off, or no export of Nsight Systems.
    """
    _check_whole(path)
    try:
        base = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            return _read(base, path)
        finally:
            base.close()
    except sqlite3.Error as error:
        raise Refusal(str(path), f"damaged SQLite: {error}") from error


def _check_whole(path: Path) -> None:
    """The header says how many pages there are (SQLite file format, section 1.3)."""
    with path.open("rb") as file:
        header = file.read(100)
    if not header.startswith(MAGIC) or len(header) < 100:
        raise Refusal(str(path), "truncated or no SQLite file")
    page = int.from_bytes(header[16:18], "big")
    pages = int.from_bytes(header[28:32], "big")
    promised = (65536 if page == 1 else page) * pages
    if path.stat().st_size < promised:
        raise Refusal(str(path), f"truncated: {path.stat().st_size} of {promised} bytes")


def _read(base: sqlite3.Connection, path: Path) -> dict[str, list[Row]]:
    there = {name for (name,) in base.execute("SELECT name FROM sqlite_master")}
    if "StringIds" not in there:
        raise Refusal(str(path), "SQLite, but no export of Nsight Systems: it has no StringIds")
    found = {}
    if "NVTX_EVENTS" in there:
        found["nvtx_sum"] = summed(_ranges(base), "Range", "Instances")
    for report, (table, name, heading, count) in _REPORTS.items():
        if table in there:
            events = base.execute(
                f'SELECT s.value, count(*), sum(e."end" - e.start), min(e."end" - e.start),'
                f' max(e."end" - e.start) FROM {table} e JOIN StringIds s ON s.id = e.{name}'
                " GROUP BY s.value"
            )
            found[report] = summed(events, heading, count)
    if not any(found.values()):
        raise Refusal(str(path), "an export of Nsight Systems that holds no events")
    return found


def _ranges(base: sqlite3.Connection) -> Iterable[tuple]:
    """(domain:name, count, total, shortest, longest) of every NVTX range, by process and domain."""
    columns = {row[1] for row in base.execute("PRAGMA table_info(NVTX_EVENTS)")}
    name = "coalesce(s.value, e.text)" if "textId" in columns else "e.text"
    strings = "LEFT JOIN StringIds s ON s.id = e.textId" if "textId" in columns else ""
    process = "e.globalTid >> 24"
    domains = {
        (pid, domain): text
        for pid, domain, text in base.execute(
            f"SELECT {process}, e.domainId, {name} FROM NVTX_EVENTS e {strings}"
            f" WHERE e.eventType = {_DOMAIN}"
        )
    }
    (last,) = base.execute('SELECT max(max(start), max("end")) FROM NVTX_EVENTS').fetchone()
    took = f'coalesce(e."end", {last or 0}) - e.start'  # one without an end lasts to the last
    for pid, domain, text, *numbers in base.execute(
        f"SELECT {process}, e.domainId, {name}, count(*), sum({took}), min({took}), max({took})"
        f" FROM NVTX_EVENTS e {strings} WHERE e.eventType IN {_RANGES} GROUP BY 1, 2, 3"
    ):
        yield f"{domains.get((pid, domain)) or ''}:{text or ''}", *numbers


def summed(events: Iterable[tuple], heading: str, count: str) -> list[Row]:
    """Rows as `nsys stats` prints them, the longest first.

    events: (name, count, total, shortest, longest) in ns; a name may come several times.
    `Time (%)` is of the sum of the column: what is nested in something else counts in both.
    """
    sums: dict[str, tuple[int, float, float, float]] = {}
    for name, *numbers in events:
        n, total, shortest, longest = sums.get(name, (0, 0, math.inf, -math.inf))
        sums[name] = (
            n + numbers[0],
            total + numbers[1],
            min(shortest, numbers[2]),
            max(longest, numbers[3]),
        )
    whole = sum(total for _, total, _, _ in sums.values()) or 1
    return [
        {
            "Time (%)": 100 * total / whole,
            "Total Time (s)": total / 1e9,
            count: float(n),
            "Avg (s)": total / n / 1e9,
            "Min (s)": shortest / 1e9,
            "Max (s)": longest / 1e9,
            heading: name,
        }
        for name, (n, total, shortest, longest) in sorted(sums.items(), key=lambda i: -i[1][1])
    ]
