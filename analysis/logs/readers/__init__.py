"""Which format a log has. One file here reads one format.

A format is told from the content of a file, never from its name. To add one, copy nanogpt.py, put
what its lines look like into its FORMAT, and add its name to NAMES. Formats are tried in this
order: one whose logs hold another's lines comes before it.
"""

import contextlib
import importlib
import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from analysis.logs.parsing.attempts import read_runs
from analysis.logs.parsing.evidence import is_of_a_run, is_page, is_source
from analysis.logs.parsing.facts_elsewhere import complete_from_elsewhere
from analysis.logs.parsing.failure_line import judge_end
from analysis.logs.parsing.line_format import Format
from analysis.logs.parsing.logfile import Log
from analysis.logs.parsing.rate_words import complete_rates, judge_rates
from analysis.logs.parsing.setting_names import header_of, read_header
from analysis.logs.readers import run_folder
from analysis.logs.record import Record, Refusal
from base.errors import UsageError

NAMES = tuple(
    """nanotron megatron_lm torchtitan torchtitan_spans modded_nanogpt nanochat nanogpt llmc maxtext
    torchtune composer olmo internevo xtuner automodel nemo_rl metrics_file megatron_golden nemo
    mlperf fairseq rank_epochs deepspeed_lines hf_trainer""".split()
)
UNKNOWN = "unknown"


def read(path: Path | str, flags: dict[str, Any] | None = None) -> Record:
    """Returns the last of the runs that `read_file` returns."""
    return read_file(path, flags)[-1]


def read_file(
    path: Path | str, flags: dict[str, Any] | None = None, beside: Sequence[Path] = ()
) -> list[Record]:
    """Returns the runs that one log file or run folder holds, in their order there.

    `flags` are Record's field names with the values to use where the log is silent. beside: other
    files of the same run, which state facts and how it ended.

    Raises:
        Refusal: missing, unreadable, empty, or no format that is known; it says which.
    """
    path = Path(path)
    if os.path.isdir(path):
        try:
            records = [run_folder.read(path)]
        except UsageError as error:
            raise Refusal(str(path), str(error).removeprefix(f"{path}/")) from error
    else:
        with Log(path) as log:
            log.beside = beside
            records = _read_page(log) if is_page(log) else _read_log(log)
            for record in records:
                if record.last_at is not None:
                    record.last_line = log.line_no(record.last_at)
    for record in records:
        complete_from_elsewhere(record, path, flags or {})
        complete_rates(record)
        judge_rates(record)
    return records


def _read_page(page: Log) -> list[Record]:
    """Returns the runs of the one log in a fenced block of a Markdown page, as excerpts: how a run
    went on is not known."""
    logs: dict[int, list[Record]] = {}  # the first line of a block -> its runs
    for begin, end in page.fenced_blocks():
        with contextlib.suppress(Refusal):
            records = _read_log(page.part(begin, end))
            if len(records[-1].steps):
                logs[page.line_no(begin)] = records
    if len(logs) != 1:
        where = f"{len(logs)} fenced blocks of this page hold a log, at lines"
        reason = (
            f"{where} {', '.join(map(str, logs))}" if logs else "no fenced block of it is a log"
        )
        raise Refusal(str(page.path), f"{reason}; copy the log to a file of its own")
    (records,) = logs.values()
    for record in records:
        record.doubt("page", "an excerpt on a page")
        if not record.completed:
            record.completed = record.planned_steps = None
    return records


def _read_log(log: Log) -> list[Record]:
    """Returns the runs of a log file, by the first format that finds steps in it. Without steps, a
    run that died before its first one is a run, too."""
    if is_source(log) and not is_page(log):
        reason = f"{log.path.suffix} is code or a page by its name, which may quote a log"
        raise Refusal(str(log.path), f"{reason}; copy a log to a name in .log or .txt")
    tried = []
    for log_format in _candidates(log):
        records = read_runs(log_format, log)
        if any(len(record.steps) or record.whole_run for record in records):
            return records
        if not log_format.embedded:
            tried += records
    tried = tried or [_by_start(log)]
    # A run that died before its first iteration is a run: its failure is what it shows.
    run = next((record for record in tried if record.failure), tried[0])
    if not is_of_a_run(log, _starts()):
        raise Refusal(str(log.path), _why_not(log, tried))
    if run.failure is None:
        run.note(f"{_why_not(log, tried)}; and no line says how it ended")
    if run.format != UNKNOWN:
        read_header(run, header_of(log, None))
    return [run]


def _candidates(log: Log) -> Iterator[Format]:
    """Yields the formats whose marks the log holds: first by the ends of the file, then by all of
    it."""
    sample = log.head + log.tail
    likely = []
    for log_format in _formats():
        if log_format.is_in(sample.__contains__):
            # Others' logs hold the lines of an embedded one, too: look at what stands around them.
            if log_format.embedded:
                break
            likely.append(log_format)
            yield log_format
    unlikely = [log_format for log_format in _formats() if log_format not in likely]
    embedded = [f for f in unlikely if f.embedded and f.is_in(sample.__contains__)]
    embedded_marks = [marks[0] for log_format in embedded for marks in log_format.marks]
    near = next((mark for mark in embedded_marks if mark in sample), b"")
    # All marks of a format stand in its logs; the longest of them is looked for first.
    longest = {marks: max(marks, key=len) for log_format in unlikely for marks in log_format.marks}
    held_marks = log.held(set(longest.values()), near)
    likely_marks = {m for marks, mark in longest.items() if mark in held_marks for m in marks}
    held_marks |= log.held(likely_marks, near)
    for log_format in unlikely:
        if log_format in embedded or log_format.is_in(held_marks.__contains__):
            yield log_format


@cache
def _formats() -> tuple[Format, ...]:
    """Returns the formats of all readers, in the order in which they are tried."""
    return tuple(importlib.import_module(f"{__name__}.{name}").FORMAT for name in NAMES)


def _starts() -> list[bytes]:
    """Returns what programs print as they start."""
    return [start for log_format in _formats() for start in log_format.starts]


def _by_start(log: Log) -> Record:
    """Returns what a log without iterations says, read as the format whose program says there that
    it starts."""
    starts = log.held(_starts())
    for log_format in _formats():
        if starts.intersection(log_format.starts):
            return log_format.read(log)
    record = Record(source=str(log.path), format=UNKNOWN)
    judge_end(record, log, [])
    return record


def _why_not(log: Log, tried: list[Record]) -> str:
    """Returns why no run could be read, in words. tried: what the formats that fit made of the
    log."""
    names = ", ".join(dict.fromkeys(r.format for r in tried if r.format != UNKNOWN))
    if log.path.suffix.lower() == ".csv":
        return "a table, no log: analysis.audit checks published tables"
    if names:
        return f"looks like {names}, but holds no iteration that could be read"
    if b"Total Time (ns)" in log.head:
        return "a profile, no log: analysis.profile reads it"
    if b"it/s" in log.tail or b"s/it" in log.tail:
        return "no format that is known: only progress bars, which print running rates"
    return "no format that is known: no line is a step of one (docs/read-logs.md lists them)"
