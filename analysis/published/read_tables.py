"""Tables of CSV and Markdown files as rows of our columns; HEADINGS has the vocabulary."""

import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from analysis.logs.parsing.model_names import ACTIVE
from analysis.logs.published_csv import (
    HEADINGS,
    PublishedTable,
    column_name,
    known_name,
    number,
    read_csv,
    table_of,
)
from analysis.published.printed_numbers import BILLIONS, SECONDS, Value, read_value
from base.errors import UsageError
from base.intervals import Interval
from models.gpus import Gpu, bf16_peak, usual_gpu
from models.mfu_peaks import printed_mfu

SUFFIXES = (".csv", ".tsv", ".md", ".markdown")

FACTORS = {
    "step_ms": ("step_s", 1e-3),
    "mfu_pct": ("mfu", 1e-2),
    "efficiency_pct": ("efficiency", 1e-2),
}
# What a cell may state beside its number -> the factor to our unit.
UNITS = {
    **dict.fromkeys(("step_s", "wall_s"), SECONDS),
    **dict.fromkeys(("mfu", "efficiency"), {"%": 0.01}),
    "params_b": BILLIONS,
}
WORDS = ("gpu_type", "precision", "model", "formula", "commit", "cluster", "table", "recompute")
WORDS += ("routing", "dropped", "engine")
COUNTS = (
    *("gpus", "nodes", "gpus_per_node", "tp", "pp", "dp", "cp", "ep", "micro_batch", "gas"),
    *("global_batch", "seq_len", "layers", "hidden", "heads", "ffn", "vocab", "steps", "experts"),
)
# Columns that say nothing of what a row is, or what was measured.
REMARKS = (
    *("id", "source", "date", "status", "notes", "remarks", "inferred", "lint", "line", "name"),
    *("run", "log", "format", "link", "url", "file", "path", "warm_up", "gradients"),
)
NAMES = [name for name in HEADINGS if name != "sequence_parallel"]
SAME_RATE = 0.02  # closer rates are one; of one GPU and of all they are far apart


def meaning(heading: str, mapping: dict[str, str]) -> str:
    """Returns our column for a heading, or "" for an unknown one; `mapping`: what the user says."""
    if (name := mapping.get(heading.strip().lower())) is not None:
        return name
    if heading in NAMES:
        return heading
    if "b/s" in heading.lower():
        return ""  # GB/s, not GBS
    name = known_name(heading) or ("" if "%" in heading else column_name(heading))
    return name if name in NAMES else ""


@dataclass
class Line:
    """One row: what it states in our columns, and the text of each of its cells by heading."""

    file: str
    line_no: int
    values: dict[str, Value]
    words: dict[str, str]
    cells: dict[str, str]
    card: Gpu | None = None

    def operand(self, name: str) -> Value | None:
        """Returns the value of a column or number; cp and ep are 1 where they are not stated."""
        if name in ("cp", "ep") and self.fact(name) in ("", 1):
            return Value(1.0, Interval(1.0, 1.0), "", "")
        if name.isdecimal():
            number = float(name)
            return Value(number, Interval(number, number), "", name)
        return self.values.get(name)

    @property
    def has_experts(self) -> bool:
        """Returns whether the row's model has experts, by their number or by its name."""
        counts = [self.values[name].number for name in ("experts", "ep") if name in self.values]
        return max(counts, default=1) > 1 or bool(ACTIVE.search(self.words.get("model", "")))

    @property
    def denominator(self) -> str:
        """Returns what the row's MFU is over, in words; "" where it has no MFU and TFLOP/s."""
        mfu, tflops = self.values.get("mfu"), self.values.get("tflops")
        if mfu is None or tflops is None:
            return ""
        over = tflops.interval.over(mfu.interval)
        gpu = self.card.name if self.card else self.words.get("gpu_type")
        return printed_mfu(mfu.number, over, self.words.get("engine"), gpu).text

    def states(self, name: str) -> bool:
        """Returns whether the row states a fact. Words on routing may say what is dropped."""
        on_drops = name == "dropped" and re.search("drop|capacity", self.words.get("routing", ""))
        return bool(on_drops) or name in self.values or name in self.words

    def fact(self, name: str) -> object:
        """Returns the number or the words of a column; "" where the row has neither."""
        return self.values[name].number if name in self.values else self.words.get(name, "")


class RunTable(NamedTuple):
    """A table whose rows are runs: what its headings mean, and those that were not read."""

    where: str
    columns: dict[str, str]  # heading -> our column
    unread: list[str]
    rows: list[Line]


def run_tables(path: Path, mapping: dict[str, str], facts: dict[str, str]) -> list[RunTable]:
    """Returns the tables of a file. `facts`: what is true of every row that does not state it."""
    return [_understood(str(path), table, mapping, facts) for table in _tables(path)]


def _tables(path: Path) -> list[PublishedTable]:
    """Returns the tables of a CSV, TSV or Markdown file."""
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        return [read_csv(path, needed=(), delimiter="\t" if suffix == ".tsv" else ",")]
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    if not text.strip():
        raise UsageError(f"{path}: empty file")
    if not (tables := _in_markdown(text)):
        raise UsageError(f"{path}: no table in CSV or Markdown")
    return tables


_RULE = re.compile(r"^\s*(?=.*\|)\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$")
_BAR = re.compile(r"(?<!\\)\|")


def _in_markdown(text: str) -> list[PublishedTable]:
    """Returns the tables of a Markdown document outside of code fences."""
    outside: dict[int, str] = {}
    fenced = False
    for line_no, line in enumerate(text.split("\n"), start=1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            outside[line_no] = line.strip()
    tables = []
    for rule in [no for no, line in outside.items() if _RULE.match(line)]:
        if "|" not in outside.get(rule - 1, ""):
            continue
        end = rule + 1
        while "|" in outside.get(end, ""):
            end += 1
        lines = [(no, _cells(outside[no])) for no in (rule - 1, *range(rule + 1, end))]
        headings, *rows = [(no, texts) for no, texts in lines if any(texts)]
        tables.append(table_of(*headings, rows))
    return tables


def _cells(line: str) -> list[str]:
    """Returns the texts between the unescaped bars of a line, with or without bars at its ends."""
    texts = [text.strip() for text in _BAR.split(line)]
    if not texts[0]:  # a bar at the line's begin
        del texts[0]
    if texts and not texts[-1]:
        del texts[-1]
    return texts


def _understood(
    file: str, table: PublishedTable, mapping: dict[str, str], facts: dict[str, str]
) -> RunTable:
    """Returns a table with its cells read as our columns; `facts` hold for every row of it."""
    names = [meaning(heading, mapping) for heading in table.headings]
    columns = {h: name for h, name in zip(table.headings, names, strict=True) if name}
    unread = [h for h in table.headings if h and h not in columns and column_name(h) not in REMARKS]
    rows = []
    for row in table.rows:
        texts = [row.text(column) for column in table.columns]
        cells = dict(zip(table.headings, texts, strict=True))
        line = Line(file, row.line_no, {}, {}, cells)
        for name, text in facts.items():
            _put(line, name, "--fact", text)
        for heading, name, text in zip(table.headings, names, texts, strict=True):
            if name and text:
                _put(line, name, heading, text)
        if card := usual_gpu(line.words.get("gpu_type", "")):
            line.card = card
            precision = re.search(r"bf16|fp16|fp8|fp4|fp32|tf32", line.words.get("precision", ""))
            peak = card.peaks.get(precision[0]) if precision else bf16_peak(card)
            if peak:
                unstated = "" if precision else " (in 16 bits, for no precision is stated)"
                text = f"{peak:g}{unstated}"
                line.values["peak"] = Value(peak, Interval(peak, peak), card.name, text)
        rows.append(line)
    _settle_rates(rows)
    _settle_percents(rows)
    return RunTable(f"{file}:{table.line_no}", columns, unread, rows)


_PRODUCT = re.compile(
    r"^[\s*~]*(\d{1,6})\s*[x×*]\s*(\d{1,6})(?!\d|\s*[GM]i?B)(?=\s*(?:[x×*]\s*)?(?:[A-Za-z]|$))"
)


def _put(line: Line, name: str, heading: str, text: str) -> None:
    """Reads the text of a cell into the line's column `name`, where it is a number or words."""
    if name in WORDS:
        line.words[name] = text.lower()
        return
    name, factor = FACTORS.get(name, (name, 1.0))
    if name == "gpus":  # 2x8xH100: two nodes of eight
        text = _PRODUCT.sub(lambda sizes: str(int(sizes[1]) * int(sizes[2])), text)
    exact = name in (*COUNTS, "params_b")
    if value := read_value(text, heading, factor, UNITS.get(name, {}), exact):
        line.values[name] = value


def _settle_rates(rows: list[Line]) -> None:
    """Gives tokens/s whose heading does not say whose they are to one GPU or to all, as the batch
    and time of most rows say. Where no row can tell, the rate is not used."""
    votes = {"tokens_per_s": 0, "tokens_per_s_gpu": 0}
    for row in rows:
        names = ("tokens_per_s_some", "global_batch", "seq_len", "step_s", "gpus")
        if not all(name in row.values for name in names):
            continue
        rate, batch, seq_len, step_s, gpus = (row.values[name].interval for name in names)
        of_all = batch.times(seq_len).over(step_s)
        votes["tokens_per_s"] += rate.misses(of_all) < SAME_RATE
        votes["tokens_per_s_gpu"] += gpus.low > 1 and rate.misses(of_all.over(gpus)) < SAME_RATE
    for row in rows:
        value = row.values.pop("tokens_per_s_some", None)
        if value and max(votes.values()):
            row.values.setdefault(max(votes, key=votes.get), value)


def _settle_percents(rows: list[Line]) -> None:
    """Divides MFU or efficiency by 100 where most numbers of the table are above 2, which no share
    is. Numbers whose heading or cell says that they are percent are no part of it."""
    for name in ("mfu", "efficiency"):
        values = [row.values[name] for row in rows if name in row.values]
        values = [value for value in values if value.number == number(value.text)]
        if values and median(value.number for value in values) > 2:
            for row in rows:
                if (value := row.values.get(name)) in values:
                    share = Interval(*(end / 100 for end in value.interval))
                    row.values[name] = value._replace(number=value.number / 100, interval=share)
