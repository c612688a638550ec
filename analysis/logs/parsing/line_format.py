"""What a log format is: one declaration. analysis/logs/readers/nanogpt.py is the shortest."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from analysis.logs.parsing.failure_line import judge_end
from analysis.logs.parsing.fields import BEHIND, NOT_LAST, number, positive, ranks_of_rates
from analysis.logs.parsing.lines import Columns, Line, table
from analysis.logs.parsing.logfile import Log
from analysis.logs.parsing.setting_names import header_of, read_header, read_packing, state
from analysis.logs.parsing.steps import put_steps
from analysis.logs.record import Record
from base.units import GIB


@dataclass(frozen=True, kw_only=True)
class Format:
    """A log format.

    name: what records and tables show. marks: a file with all byte strings of one tuple may hold
    its entries. starts: byte strings that the program prints once as it starts: they tell a log
    without a step, prove that it is of a run, and a later one begins another attempt. ends: those
    of the lines that it prints at its end, where these tell of the whole run. done: what it prints
    when a run is over, where it does.

    lines: of these kinds, the first one that the log holds is read. facts: Record's fields (and
    batch_tokens) -> what the text before training says; the last match counts. arguments: whether
    argument dumps may stand there. averages: an entry is the mean since the entry before. first:
    the number of the first iteration. counts_per_epoch: the counter of iterations starts again with
    each epoch. embedded: other formats' logs hold its lines too.

    prepare sees the columns before they become the record's, with the text before training; finish
    sees the record. reader: reads a file that is a document, or whose entry is more than a line, in
    place of all of these; it leaves no entries where the marks stand in something else.
    """

    name: str
    marks: tuple[tuple[bytes, ...], ...]
    starts: tuple[bytes, ...] = ()
    ends: tuple[bytes, ...] = ()
    done: tuple[bytes, ...] = ()
    lines: tuple[Line, ...] = ()
    facts: Mapping[str, bytes] = field(default_factory=dict)
    arguments: bool = True
    averages: bool = False
    first: int = 1
    counts_per_epoch: bool = False
    embedded: bool = False
    prepare: Callable[[Record, Columns, bytes], None] | None = None
    finish: Callable[[Record, Log], None] | None = None
    reader: Callable[[Log, Record], None] | None = None

    def is_in(self, holds: Callable[[bytes], bool]) -> bool:
        """Returns whether its marks are among what a text or a log holds."""
        return any(all(map(holds, marks)) for marks in self.marks)

    def read(self, log: Log) -> Record:
        """Returns what the log says, read as this format."""
        record = Record(source=str(log.path), format=self.name)
        (self.reader or self._read_lines)(log, record)
        return record

    def _read_lines(self, log: Log, record: Record) -> None:
        """Fills the record: the log's entries as steps, and the facts that the text before them
        states."""
        record.engine = self.name
        columns: Columns = {"at": np.empty(0)}
        for line in self.lines:
            columns = table(log, line, record)
            if line.derive:
                columns = line.derive(columns, record, log)
            if len(columns["at"]):
                break
        first_at = int(columns["at"][0]) if len(columns["at"]) else None
        header = header_of(log, first_at)
        if log.unsearched:
            words = f"bytes before the first step, of which {log.unsearched:,} were not searched"
            record.doubt("header", f"{(first_at or log.size) - log.begin:,} {words} for settings")
        self._settle_facts(record, columns, header)
        if "mfu_pct" in columns:
            columns["mfu"] = columns.pop("mfu_pct") / 100
        if "ms" in columns:
            printed_s = columns.get("step_s", np.nan)
            columns["step_s"] = np.where(np.isnan(printed_s), columns.pop("ms") / 1000, printed_s)
        if self.prepare:
            self.prepare(record, columns, header)
        put_steps(record, columns, log, self.averages)
        if record.planned_steps and len(record.steps):
            last_planned = record.planned_steps - 1 + self.first
            record.completed = bool(record.steps["iteration"][-1] >= last_planned)
        if self.finish:
            self.finish(record, log)
        judge_end(record, log)

    def _is_cut(self, fact: str, header: bytes) -> bool:
        """Returns whether a fact that is never the last of its line stands at a line's end."""
        open_end = self.facts[fact].removesuffix(NOT_LAST)
        return open_end != self.facts[fact] and re.search(open_end, header) is not None

    def _settle_facts(self, record: Record, columns: Columns, header: bytes) -> None:
        """Fills what the lines and the text before them say once about all of the run."""
        facts = {name: last_number(pattern, header) for name, pattern in self.facts.items()}
        cut = {name: self._is_cut(name, header) for name in facts if facts[name] is None}
        record.doubt_numbers(cut)
        batch_tokens = facts.pop("batch_tokens", None)
        record.mfu_flops = facts.pop("mfu_flops", None)
        if planned := last_known(columns.pop("planned", ())):
            facts["planned_steps"] = planned
        state(record, facts, "log")
        if self.arguments:
            read_header(record, header)
        else:
            read_packing(record, header)
        fill_peak(record, columns.pop("peak_gib", np.empty(0)))
        if "global_batch" in columns:
            columns["sequences"] = columns.pop("global_batch")
            _settle_batch(record, last_known(columns["sequences"]))
        stated = {"seq_len": last_known(columns.pop("seq_len", ()))}
        if "per_gpu" in columns:
            stated["gpus"] = ranks_of_rates(columns["tokens_per_s"], columns["per_gpu"])
        state(record, {k: v for k, v in stated.items() if getattr(record, k) is None}, "log")
        if batch_tokens:
            record.seq_len = record.seq_len or record.model.get("max_seq_len")
            if "tokens_per_s" not in columns and "ms" in columns:
                columns["tokens_per_s"] = batch_tokens / positive(columns["ms"] / 1000)
            if record.seq_len and not batch_tokens % record.seq_len:
                record.global_batch = batch_tokens // record.seq_len


def fill_peak(record: Record, peaks_gib: np.ndarray) -> None:
    """Fills the peak of memory. One that is not above 0, as torchtitan's -0.00GiB on a CPU, was not
    measured."""
    measured = peaks_gib[np.isfinite(peaks_gib) & (peaks_gib > 0)]
    if len(measured):
        record.peak_bytes = int(measured.max() * GIB)


def _settle_batch(record: Record, printed: int | None) -> None:
    """Fills the batch that the last line prints. What a setting states may be where a ramp of the
    batch ends, which the run need not reach."""
    setting = record.global_batch
    if printed and setting not in (None, printed):
        record.note(f"global_batch: the settings say {setting}, the lines {printed}: these count")
        record.global_batch = None
    state(record, {"global_batch": printed}, "log")


def last_number(pattern: bytes, text: bytes) -> int | float | None:
    """Returns the number in the last match's group: what is said last before training counts."""
    matches = re.findall(pattern + BEHIND, text)
    value = number(matches[-1].replace(b"_", b"")) if matches else np.nan
    if not np.isfinite(value):
        return None
    return int(value) if value == int(value) else value


def last_known(values: np.ndarray | tuple[()]) -> int | None:
    """Returns the last number of a column of whole numbers; None where there is none."""
    numbers = np.asarray(values)[np.isfinite(values)]
    return int(numbers[-1]) if len(numbers) else None
