"""What cannot be true, or cannot be compared, in published tables and in logs.

A fact that a table leaves out is no fault, and rounding is none.
"""

import hashlib
import re
from pathlib import Path

from analysis.logs.load import load
from analysis.logs.parsing.logfile import Log
from analysis.logs.published_csv import read_csv
from analysis.published.any_table import AnyTable, html_prose, tables_of
from analysis.published.audit_logs import audit_records, means_over_ranks
from analysis.published.audit_prose import findings_in_prose, stated_beside
from analysis.published.claims import contradicted
from analysis.published.documents import Document, parse
from analysis.published.finding import Finding
from analysis.published.rules import findings_of
from analysis.published.rules.across import across
from analysis.published.rules.settle import join
from analysis.published.unchecked import unchecked
from models.errors import UsageError
from models.gpus import planning_gpu


def audit_document(text: str, file: str, gpu: str | None = None) -> list[Finding]:
    """Everything about one Markdown document."""
    return _audit_text(text, Path(file), gpu, {})[0]


def _audit_text(
    text: str, path: Path, gpu: str | None, mapping: dict[str, str], test_columns: bool = False
) -> tuple[list[Finding], list[AnyTable]]:
    """(findings, tables) of a document or an HTML page."""
    tables = tables_of(path, text, mapping)
    if path.suffix.lower() in (".html", ".htm"):
        document = Document(str(path), [], prose=html_prose(text))
    else:
        document = parse(text, str(path))
    stated = {t.line_no: stated_beside(document, t) for t in document.tables}
    for table in tables:
        table.stated = stated.get(table.line_no, table.stated)
    found = [*means_over_ranks(document.lines, str(path)), *findings_in_prose(document)]
    # Decides what headings leave open, before claims are read.
    found += _of_tables(tables, gpu, test_columns)
    return _sorted([*found, *contradicted(document, tables), *across(tables)]), tables


def audit_csv(
    path: Path,
    gpu: str | None = None,
    mapping: dict[str, str] | None = None,
    test_columns: bool = False,
) -> tuple[list[Finding], list[AnyTable]]:
    """(everything about one CSV, its table). test_columns: also find the table's `unchecked`.

    Raises:
        UsageError: it cannot be read.
    """
    columns = read_csv(path, needed=()).columns
    text = path.read_text(encoding="utf-8", errors="replace")
    tables = tables_of(path, text, mapping or {})
    if not tables:
        headings = ", ".join(columns[:8])
        raise UsageError(
            f"{path}: no column that the audit knows in this CSV (it has {headings});"
            " say what one is with --mapping HEADING=NAME"
        )
    return _of_tables(tables, gpu, test_columns), tables


def _of_tables(tables: list[AnyTable], gpu: str | None, test_columns: bool) -> list[Finding]:
    join(tables)
    for table in tables:
        for row in table.rows if gpu else ():
            row.words["gpu_type"] = gpu
    for table in tables if test_columns else ():
        table.unchecked = unchecked(table)
    return _sorted([finding for table in tables for finding in findings_of(table)])


def _sorted(found: list[Finding]) -> list[Finding]:
    return sorted(found, key=lambda finding: finding.line)


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

    Raises:
        UsageError: no such card; no table has a heading of the mapping.
    """
    found: list[Finding] = []
    refused: list[str] = []
    checked: dict[str, int] = {}
    first: dict[str, Path] = {}  # the first file with these bytes
    logs = []
    headings: set[str] = set()
    if gpu:
        planning_gpu(gpu)
    for path in paths:
        try:
            suffix = path.suffix.lower()
            if suffix in (".csv", ".tsv"):
                findings, tables = audit_csv(path, gpu, mapping, says is not None)
            elif suffix in (".html", ".htm") or (path.is_file() and _is_document(path)):
                text = path.read_text(encoding="utf-8", errors="replace")
                if not text.strip():
                    raise UsageError(f"{path}: empty file")
                test_columns = says is not None
                findings, tables = _audit_text(text, path, gpu, mapping or {}, test_columns)
            else:
                logs.append(path)
                continue
            found += findings
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            if (same := first.setdefault(digest, path)) != path:
                said = f"the same bytes as {same} (SHA-256 {digest[:12]})"
                found.append(Finding(str(path), 0, "twice", said))
            checked[str(path)] = sum(len(table.rows) for table in tables)
            headings |= {h.strip().lower() for t in tables for row in t.rows[:1] for h in row.cells}
            if says is not None:
                says += dict.fromkeys(table.says() for table in tables)
        except UsageError as error:
            refused.append(str(error))
        except OSError as error:
            refused.append(f"{path}: {error.strerror}")
    if checked and (wrong := [h for h in mapping or () if h.strip().lower() not in headings]):
        raise UsageError(f"--mapping {wrong[0]}: no table that was read has this heading")
    if logs:
        try:
            records, left = load(logs)
            refused += left
            found += audit_records(records)
            for record in records:
                if record.averages:  # epochs that every rank printed
                    with Log(Path(record.source)) as log:
                        found += means_over_ranks(log.text().split("\n"), record.source)
            checked |= {record.source: 1 for record in records}
        except UsageError as error:
            refused.append(str(error))
    return found, refused, checked
