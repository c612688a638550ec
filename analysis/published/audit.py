"""What cannot be true, or cannot be compared, in published tables (Markdown, CSV) and in logs.

A fact that a table leaves out is no fault, and rounding is none.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from analysis.logs.load import load
from analysis.logs.published_csv import (
    PublishedTable,
    Row,
    column_name,
    read_csv,
    unit_in_last_place,
)
from analysis.logs.record import Record
from analysis.logs.verdict import judge, timed
from analysis.published import rules
from analysis.published.any_table import AnyTable, gpus_in, sizes_in, tables_of
from analysis.published.documents import Document, find, parse, row_tflops
from models.config import GPTConfig
from models.errors import UsageError, printable
from models.flops import CONVENTIONS
from models.gpus import find_gpu, peak_tflops

FAR_APART = 1.2  # slowest over fastest of identical configurations that is worth a finding
SLOWEST_RANK = 1.02  # slowest rank over the mean over ranks
WALL_CLOCK = 1.01  # wall clock over the time that the counted tokens took
AVERAGED = 0.002  # seconds and TFLOPs that were averaged apart do not divide exactly
DIFFERENT_COMMITS = "runs of different commits are compared: "
ABOVE_LINEAR = 1.005  # efficiency that rounding of speedups to 0.01 cannot explain

# Columns that do not tell configurations apart: what was measured, when, and remarks.
_MEASURED = {
    "step_s", "tflops", "tokens_per_s", "mfu", "memory_gb", "status", "date", "notes", "lint",
    "warm_up", "id", "source", "table", "inferred", "speedup", "efficiency", "wall_s", "time_s",
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: where it stands (line 0: no single one), its kind (the rule), and
    the sentence with the numbers; of a cell, its column, what is printed and what follows.

    sure: "certain" (arithmetic), "likely" (a convention may explain it), "possible" (look at it).
    """

    file: str
    line: int
    kind: str
    message: str
    column: str = ""
    printed: str = ""
    expected: str = ""
    sure: str = "certain"

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        sure = "" if self.sure == "certain" else f" ({self.sure})"
        return printable(f"{where}: {self.message}{sure}")

    def annotation(self) -> str:
        """The finding as a workflow command of GitHub, which marks the line of a pull request."""

        def escaped(text: str, more: str = "") -> str:
            for mark in "%\r\n" + more:
                text = text.replace(mark, f"%{ord(mark):02X}")
            return text

        level = "error" if self.sure == "certain" else "warning"
        line = f",line={self.line}" if self.line else ""
        where = f"file={escaped(self.file, ':,')}{line},title={escaped(self.kind, ':,')}"
        return f"::{level} {where}::{escaped(printable(self.message))}"


@dataclass(frozen=True)
class Context:
    """What a document states outside of a table's rows; None where it states none or two.

    rule: "8PT" where it states the Jean Zay study's formula; sizes are then exactly as printed.
    """

    tp: int | None = None
    seq_len: float | None = None
    rule: str = ""
    gpu: str | None = None


# What is wrong: the line of the file (0: no single one), its kind, and the sentence.
Fault = tuple[int, str, str]


def faults_of_rows(table: PublishedTable, context: Context) -> Iterator[Fault]:
    """Faults of the rows of one table, each on its own."""
    for row in table.rows:
        for kind, message in (
            ("gpus", _gpus(row, context)),
            ("batch", _batch(row)),
            ("tflops", _tflops(row, context)),
            ("peak", _peak(row, context)),
        ):
            if message:
                yield row.line_no, kind, message


def _gpus(row: Row, context: Context) -> str:
    gpus, pp, dp = (row.number(k) for k in ("gpus", "pp", "dp"))
    tp, cp = row.number("tp") or context.tp, row.number("cp") or 1
    if any(size and (size < 1 or size % 1) for size in (tp, pp, dp)) or not pp or not dp:
        return ""  # seconds or bytes of these, not sizes
    if None in (gpus, pp, dp, tp) or gpus == tp * pp * dp * cp:
        return ""
    product = f"tp {tp:g} x pp {pp:g} x dp {dp:g}" + (f" x cp {cp:g}" if cp > 1 else "")
    return f"{product} = {tp * pp * dp * cp:g}, but the row says {gpus:g} GPUs"


def _batch(row: Row) -> str:
    micro, dp, batch = (row.number(k) for k in ("micro_batch", "dp", "global_batch"))
    gas = row.number("gas")
    if None in (micro, dp, batch):
        return ""
    if gas is None:
        if batch % (micro * dp) == 0:
            return ""
        return f"micro batch {micro:g} x dp {dp:g} does not divide the global batch {batch:g}"
    if micro * gas * dp == batch:
        return ""
    return (
        f"micro batch {micro:g} x accumulation {gas:g} x dp {dp:g} = {micro * gas * dp:g},"
        f" but the row says a global batch of {batch:g}"
    )


def _tflops(row: Row, context: Context) -> str:
    """A printed TFLOPs that no rounding of the printed seconds gives, where the rule is known."""
    printed, step_s = row.number("tflops"), row.number("step_s")
    if printed is None or not step_s:
        return ""
    per_second = _work(row, context)  # TFLOP per GPU and iteration
    if per_second is None:
        return ""
    # Seconds may have been rounded or cut: 137 stands for 136.5 up to 138.
    step = unit_in_last_place(row.text("step_s"))
    half = 0.5 * unit_in_last_place(row.text("tflops"))
    low = per_second / (step_s + step) - half
    high = per_second / max(step_s - step / 2, 1e-12) + half
    if low * (1 - AVERAGED) <= printed <= high * (1 + AVERAGED):
        return ""
    return f"TFLOPs {printed:g} do not follow: {step_s:g} s give {per_second / step_s:.1f}"


def _work(row: Row, context: Context) -> float | None:
    """TFLOP per GPU and iteration under the rule that the row or its document states."""
    seq_len = row.number("seq_len") or context.seq_len
    rule = row.text("tflops_formula") or context.rule
    if "estimate" in rule:  # the author only estimated it
        return None
    if match := re.match(r"([68])PT", rule):
        return row_tflops(row, seq_len, step_s=1.0, recompute=match[1] == "8")
    if re.search(r"96\*?B\*?s\*?l\*?h\^2", rule):
        names = {"n_layer": "layers", "hidden": "hidden", "vocab_size": "vocab"}
        sizes = {ours: row.number(theirs) for ours, theirs in names.items()}
        gpus, batch = row.number("gpus"), row.number("global_batch")
        if None in sizes.values() or not (gpus and batch and seq_len):
            return None
        config = GPTConfig(
            n_head=1, max_seq_len=int(seq_len), **{k: int(v) for k, v in sizes.items()}
        )
        per_token = CONVENTIONS["sc21"](config, int(seq_len), True)
        return per_token * batch * seq_len / gpus / 1e12
    return None


def _peak(row: Row, context: Context) -> str:
    printed = row.number("tflops")
    name = context.gpu or f"{row.text('gpu_type')} {row.text('cluster')}".strip()
    precision = row.text("precision").partition("_")[0] or "fp16"
    peak = peak_tflops(name, precision)
    if printed is None or peak is None or printed <= peak:
        return ""
    return f"TFLOPs {printed:g} are above the {find_gpu(name).name}'s peak of {peak:g}"


def _repeats(table: PublishedTable) -> Iterator[Fault]:
    """Rows that differ in nothing but what was measured, and differ much in that."""
    groups = defaultdict(list)
    for row in table.rows:
        step_s = row.number("step_s")
        if step_s:
            key = tuple(
                (name, cell.text)
                for name, cell in row.cells.items()
                if name not in _MEASURED or (name == "notes" and "=" in cell.text)
            )
            groups[key].append((step_s, row.line_no))
    for repeats in groups.values():
        times = [s for s, _ in repeats]
        if len(times) > 1 and max(times) > FAR_APART * min(times):
            listed = ", ".join(f"{s:g}" for s in times)
            lines = ", ".join(str(line) for _, line in repeats)
            yield (
                repeats[0][1],
                "repeats",
                f"identical configurations took {listed} s (lines {lines}):"
                f" the slowest is {max(times) / min(times):.2f} times the fastest",
            )


def _speedups(table: PublishedTable) -> Iterator[Fault]:
    """Speedups and efficiencies above linear; also under a second row of headings."""
    rows, columns = table.rows, dict.fromkeys(table.columns)
    names = {name: name for name in columns}
    if rows and any("speedup" in cell.text.lower() for cell in rows[0].cells.values()):
        names = {name: column_name(cell.text) for name, cell in rows[0].cells.items()}
        rows = rows[1:]
    bases = {name: _baseline_gpus(rows, name) for name in names if names[name] == "speedup"}
    for row in rows:
        gpus = row.number("gpus") or _gpus_in_label(row)
        if not gpus:
            continue
        for name, base in bases.items():
            speedup = row.number(name)
            if speedup and base and (efficiency := speedup * base / gpus) > ABOVE_LINEAR:
                said = f"speedup {speedup:g} on {gpus:g} GPUs is an efficiency of {efficiency:.2f}"
                yield row.line_no, "efficiency", f"{said}, above 1"
        for name in (name for name, meaning in names.items() if meaning == "efficiency"):
            efficiency = row.number(name)
            if efficiency and efficiency > ABOVE_LINEAR:
                yield row.line_no, "efficiency", f"efficiency {efficiency:g} is above 1"


def _gpus_in_label(row: Row) -> float | None:
    for cell in row.cells.values():
        if match := re.search(r"\b(\d+)[ -]?x?[ -]?GPUs?\b", cell.text, re.IGNORECASE):
            return float(match[1])
    return None


def _baseline_gpus(rows: list[Row], column: str) -> float | None:
    """The GPUs of the row whose speedup is 1, which is what the others are against."""
    for row in rows:
        if row.number(column) == 1.0:
            return row.number("gpus") or _gpus_in_label(row)
    return None


def _wall_clocks(table: PublishedTable, tokens: float | None = None) -> Iterator[Fault]:
    """Wall clocks longer than the tokens took at the tokens/s printed beside them."""
    for row in table.rows:
        rate, wall = row.number("tokens_per_s"), row.number("wall_s")
        done = row.number("tokens") or tokens
        if rate and wall and done and wall > WALL_CLOCK * done / rate:
            took = f"{done:.0f} tokens at {rate:.2f}/s take {done / rate:.2f} s"
            said = f"wall clock {wall:g} s, but {took}: it includes evaluation or start-up"
            yield row.line_no, "wall clock", said


def _commits(table: PublishedTable) -> Iterator[Fault]:
    """Rows of one published table (the `table` column) that were measured on different commits."""
    groups = defaultdict(dict)
    for row in table.rows:
        if commit := row.text("commit"):
            groups[row.text("table")].setdefault(commit[:7], row.line_no)
    for commits in groups.values():
        if len(commits) > 1:
            yield min(commits.values()), "commits", DIFFERENT_COMMITS + ", ".join(commits)


_TOTAL = re.compile(r"Total epoch time: ([\d.]+) seconds")
_RANK = re.compile(r"\bRank (\d+) Epoch (\d+) timing breakdown")
_AVERAGE = re.compile(r"Average metrics")


def _ranks(lines: list[str]) -> Iterator[Fault]:
    """Means over ranks that stand for an epoch's time though a slower rank ended later.

    Read from `Average metrics` and `Rank N Epoch M timing breakdown` blocks under headings whose
    last number is that of the GPUs (`training_b64_g2`); speedups are against the block of the same
    name on one GPU.
    """
    epochs = _epochs(lines)
    for name, epoch in epochs.items():
        mean, ranks = epoch.get("mean"), epoch["ranks"]
        if mean is None or len(ranks) < 2 or max(ranks.values()) <= SLOWEST_RANK * mean:
            continue
        slowest = max(ranks.values())
        each = " and ".join(f"{ranks[rank]:.2f}" for rank in sorted(ranks))
        message = (
            f"{name}: " * bool(name)
            + f"{mean:.2f} s is the mean of ranks at {each} s; the slowest decides"
        )
        alone = epochs.get(re.sub(r"\d+$", "1", name), {}).get("alone")
        if alone:
            message += f" (speedup {alone / slowest:.2f}, not {alone / mean:.2f})"
        yield epoch["line"], "mean over ranks", message


def _epochs(lines: list[str]) -> dict[str, dict[str, Any]]:
    """Heading -> seconds of each rank (`ranks`), of their `mean` or of one GPU `alone`, `line`."""
    epochs: dict[str, dict[str, Any]] = {}
    name, where, at = "", "alone", 0
    for line_no, line in enumerate(lines, start=1):
        if match := re.match(r"^#+ +(\S.*?)\s*$", line):
            name, where = match[1], "alone"
            epochs.setdefault(name, {"ranks": {}})
        elif _AVERAGE.search(line):
            where, at = "mean", line_no
        elif match := _RANK.search(line):
            where = int(match[1])
        elif match := _TOTAL.search(line):
            epoch, seconds = epochs.setdefault(name, {"ranks": {}}), float(match[1])
            if isinstance(where, int):
                epoch["ranks"][where] = seconds
            else:
                epoch[where] = seconds
                epoch["line"] = at if where == "mean" else line_no
    return epochs


def _prose(document: Document) -> Iterator[Fault]:
    """Sentences that contradict their own numbers, and comparisons across commits."""
    for line_no, line in document.prose:
        if re.search(r"\bsub-?linear", line, re.IGNORECASE):
            gpus = re.search(r"(\d+) GPUs?", line)
            for value in re.findall(r"(\d+(?:\.\d+)?)x", line):
                if gpus and float(value) > ABOVE_LINEAR * float(gpus[1]):
                    message = f"{value}x on {gpus[1]} GPUs is not sub-linear: it is above linear"
                    yield line_no, "efficiency", message
    for line_no, line in document.prose:
        sizes, gpus = sizes_in(line), gpus_in(line)
        if line.lstrip().startswith("|") or not {"tp", "pp", "dp"} <= set(sizes) or not gpus:
            continue
        if (product := math.prod(v for k, v in sizes.items() if k != "ep")) != gpus:
            words = " x ".join(f"{k} {v}" for k, v in sizes.items() if k != "ep")
            yield line_no, "gpus", f"{words} = {product}, but the line says {gpus} GPUs"
    commits: dict[str, int] = {}
    for at, (line_no, line) in enumerate(document.prose):
        near = " ".join(text for _, text in document.prose[max(at - 3, 0) : at + 1])
        if re.search(r"\bcommits?\b", near, re.IGNORECASE):
            for text in re.findall(r"`([0-9a-f]{7,40})`", line):
                if re.search(r"\d", text) and re.search(r"[a-f]", text):
                    commits.setdefault(text[:7], line_no)
    if len(commits) > 1:
        yield min(commits.values()), "commits", DIFFERENT_COMMITS + ", ".join(commits)


def audit_document(text: str, file: str, gpu: str | None = None) -> list[Finding]:
    """Everything about one Markdown document."""
    return _audit_text(text, Path(file), gpu, {})[0]


def _audit_text(
    text: str, path: Path, gpu: str | None, mapping: dict[str, str]
) -> tuple[list[Finding], list[AnyTable]]:
    """(findings, tables) of a document or an HTML page."""
    file, faults, contexts = str(path), [], []
    if path.suffix.lower() not in (".html", ".htm"):
        document = parse(text, file)
        faults = [*_ranks(document.lines), *_prose(document)]
        tokens = _only(document, r"tokens\w* ?[=:] ?([\d,]{4,})")
        for table in document.tables:
            contexts.append(_context(document, table, gpu))
            faults += faults_of_rows(table, contexts[-1])
            faults += [*_repeats(table), *_speedups(table), *_wall_clocks(table, tokens)]
    tables = tables_of(path, text, mapping)
    return _together(file, faults, tables, gpu), tables


def audit_csv(
    path: Path, gpu: str | None = None, mapping: dict[str, str] | None = None
) -> tuple[list[Finding], list[AnyTable]]:
    """(everything about one CSV, its table).

    Raises:
        UsageError: it cannot be read.
    """
    table = read_csv(path, needed=())
    faults = [*faults_of_rows(table, Context(gpu=gpu)), *_repeats(table), *_speedups(table)]
    faults += [*_wall_clocks(table), *_commits(table)]
    text = path.read_text(encoding="utf-8", errors="replace")
    tables = tables_of(path, text, mapping or {})
    if not tables:
        headings = ", ".join(table.columns[:8])
        raise UsageError(
            f"{path}: no column that the audit knows in this CSV (it has {headings});"
            " say what one is with --mapping HEADING=NAME"
        )
    return _together(str(path), faults, tables, gpu), tables


def _together(
    file: str, faults: list[Fault], tables: list[AnyTable], gpu: str | None
) -> list[Finding]:
    """One finding for a line and kind: those of the rules first, which name the cell."""
    found = {}
    rules.join(tables)
    for table in tables:
        for row in table.rows if gpu else ():
            row.words["gpu_type"] = gpu
        for fault in rules.faults_of(table):
            found[(fault.line, fault.kind, fault.column)] = Finding(file, *astuple(fault))
    named = {key[:2] for key in found}
    named |= {(line, "efficiency") for line, kind, _ in found if kind == "speedup"}
    for line, kind, message in faults:
        finding = Finding(file, line, kind, message)
        if kind == "tflops":  # the stated formula says more than the other rows, of the same cell
            for key in [key for key in found if key[:2] == (line, "jump")]:
                other = found.pop(key)
                finding = replace(other, kind=kind, message=message)
        elif (line, kind) in named:
            continue
        found.setdefault((line, kind, message), finding)
    return sorted(found.values(), key=lambda finding: finding.line)


def _context(document: Document, table: PublishedTable, gpu: str | None) -> Context:
    tp = r"(?<![*\w])(?:TP|TP_SIZE) ?= ?(\d+)\b(?! ?\*)"  # not PP*TP=8*4
    seq_len = r"(?i)\bseq(?:uence)?[ _]?len(?:gth)?`?\s*(?:is|=|:)\s*(\d+)"
    # 8 = 4 passes (with recomputation) x 2 per multiply-add, as the Jean Zay study writes it.
    stated = next(find(document, r"\* ?4 ?\* ?2 ?\*"), None)
    section_tp = _only(document, tp, table.section_lines, fences=True)
    return Context(
        tp=int(section_tp) if section_tp else None,
        seq_len=_only(document, seq_len, table.section_lines) or _only(document, seq_len),
        rule="8PT" if stated else "",
        gpu=gpu,
    )


def _only(
    document: Document,
    pattern: str,
    lines: tuple[int, int] | None = None,
    fences: bool = False,
) -> float | None:
    """The one number that `pattern` finds in the prose (and code fences); None for two or none."""
    if fences:
        first, last = lines or (1, len(document.lines))
        text = "\n".join(document.lines[first - 1 : last])
        values = {float(m[1].replace(",", "")) for m in re.finditer(pattern, text)}
    else:
        values = {float(m[1].replace(",", "")) for _, m in find(document, pattern, lines)}
    return values.pop() if len(values) == 1 else None


def audit_records(records: list[Record]) -> list[Finding]:
    """Everything about logs: runs that measured nothing, products that fail, commits, repeats."""
    found = []
    groups: dict[tuple, list[tuple[Record, float]]] = defaultdict(list)
    for record in records:
        time = timed(record)
        judgement = judge(record, time)
        kinds = {"all skipped": "skipped", "loss": "loss"}
        faults = [(kinds[f.kind], f.text) for f in judgement.flags if f.kind in kinds]
        faults += _of_record(record)
        found += [Finding(record.source, 0, *fault) for fault in faults]
        if time is not None and not judgement.unfit and record.global_batch and record.gpus:
            groups[_work_of(record)].append((record, time.step_s))
    for members in groups.values():
        found += [Finding(members[0][0].source, 0, *fault) for fault in _compared(members)]
    return found


def _of_record(record: Record) -> Iterator[tuple[str, str]]:
    """(kind, sentence) about what does not add up in one log."""
    sizes, cp = (record.tp, record.pp, record.dp), record.cp or 1
    if all(sizes) and record.gpus and record.gpus != (product := math.prod(sizes) * cp):
        yield "gpus", f"tp x pp x dp = {product}, but the log says {record.gpus} GPUs"
    if record.micro_batch and record.dp and record.global_batch:
        if record.global_batch % (record.micro_batch * record.dp):
            per_step = f"micro batch {record.micro_batch} x dp {record.dp}"
            yield "batch", f"{per_step} does not divide the global batch {record.global_batch}"
    peak = peak_tflops(record.gpu_type, record.precision)
    printed = record.tflops[record.tflops > 0]
    if peak and len(printed) and float(printed.max()) > peak:
        yield "peak", f"printed TFLOP/s {printed.max():.1f} are above the peak of {peak:g}"


def _work_of(record: Record) -> tuple:
    model = tuple(sorted(record.model.items()))
    return (record.params, model, record.seq_len, record.global_batch, record.precision)


def _compared(members: list[tuple[Record, float]]) -> Iterator[tuple[str, str]]:
    """(kind, sentence) about logs of the same work that were given together."""
    commits = {record.commit for record, _ in members if record.commit}
    if len(commits) > 1:
        yield "commits", DIFFERENT_COMMITS + ", ".join(sorted(commit[:7] for commit in commits))
    same = defaultdict(list)
    for record, step_s in members:
        layout = [getattr(record, k) for k in ("engine", "gpus", "tp", "cp", "pp", "vpp", "dp")]
        rest = [record.micro_batch, record.zero_stage, record.recompute, record.run]
        # A log states few settings: only files whose names differ in digits alone are repeats.
        rest.append(re.sub(r"\d+", "", Path(record.source).name))
        same[tuple(layout + rest)].append(step_s)
    for times in same.values():
        if len(times) > 1 and max(times) > FAR_APART * min(times):
            listed = ", ".join(f"{s:.4g}" for s in times)
            yield "repeats", f"identical configurations took {listed} s"


_IS_MARKDOWN = re.compile(rb"(?m)^\s*\|(?:[ \t]*:?-+:?[ \t]*\|)+[ \t]*\r?$")


def _is_document(path: Path) -> bool:
    """Whether a file is a Markdown document: by its name, or by a table's rule and a heading."""
    if path.suffix.lower() in (".md", ".markdown"):
        return True
    try:
        with path.open("rb") as stream:
            head = stream.read(1 << 20)
    except OSError:
        return False
    return bool(re.search(rb"(?m)^#{1,6} \S", head) and _IS_MARKDOWN.search(head))


def audit_paths(
    paths: list[Path],
    gpu: str | None = None,
    mapping: dict[str, str] | None = None,
    says: list[str] | None = None,
) -> tuple[list[Finding], list[str], dict[str, int]]:
    """(findings, refusals, rows checked in each file that was read) for tables and logs together.

    A log counts as one row. mapping: heading -> our name of it, where the guess is wrong; says: is
    filled with one line a table, what its headings were taken for.
    """
    found: list[Finding] = []
    refused: list[str] = []
    checked: dict[str, int] = {}
    logs = []
    for path in paths:
        try:
            suffix = path.suffix.lower()
            if suffix in (".csv", ".tsv"):
                findings, tables = audit_csv(path, gpu, mapping)
            elif suffix in (".html", ".htm") or (path.is_file() and _is_document(path)):
                text = path.read_text(encoding="utf-8", errors="replace")
                if not text.strip():
                    raise UsageError(f"{path}: empty file")
                findings, tables = _audit_text(text, path, gpu, mapping or {})
            else:
                logs.append(path)
                continue
            found += findings
            checked[str(path)] = sum(len(table.rows) for table in tables)
            if says is not None:
                says += dict.fromkeys(table.says() for table in tables)
        except UsageError as error:
            refused.append(str(error))
        except OSError as error:
            refused.append(f"{path}: {error.strerror}")
    if logs:
        try:
            records, left = load(logs)
            refused += left
            found += audit_records(records)
            for record in records:
                if record.averages:  # epochs that every rank printed
                    text = Path(record.source).read_text(encoding="utf-8", errors="replace")
                    found += [Finding(record.source, *f) for f in _ranks(text.split("\n"))]
            checked |= {record.source: 1 for record in records}
        except UsageError as error:
            refused.append(str(error))
    return found, refused, checked
