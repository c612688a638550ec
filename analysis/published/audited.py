"""The audit of files and folders: their tables, what is wrong in them, what was not checked."""

from pathlib import Path
from typing import NamedTuple

from analysis.published.findings import Finding, check
from analysis.published.read_tables import NAMES, SUFFIXES, run_tables
from base.errors import UsageError
from base.files import below

# Our column -> what a result of a model with experts depends on.
OF_EXPERTS = {
    "routing": "whether their load was balanced by force",
    "dropped": "what share of the tokens was dropped",
    "ep": "how the experts were split",
}


class Audit(NamedTuple):
    """What an audit found.

    `refused` are files that cannot be read; `unread` has a line for each heading and table that was
    not checked, and for rows that do not state one of OF_EXPERTS; `checked` counts each table's
    rows in which something could be checked.
    """

    findings: list[Finding]
    refused: list[str]
    unread: list[str]
    checked: dict[str, int]

    @property
    def has_gaps(self) -> bool:
        """Tells whether a file or a table could not be checked."""
        return bool(self.refused) or 0 in self.checked.values()


def audit_paths(
    paths: list[Path], mapping: dict[str, str] | None = None, facts: dict[str, str] | None = None
) -> Audit:
    """Audits the tables of files and folders, and returns what is wrong or unread in them.

    Args:
        mapping: heading -> our column, where HEADINGS lacks it.
        facts: our column -> what is true of every row that does not state it.

    Raises:
        UsageError: a name is no column of ours; or no table has a heading of the mapping.
    """
    mapping = {heading.strip().lower(): name for heading, name in (mapping or {}).items()}
    for name in [*mapping.values(), *(facts or {})]:
        if name not in NAMES:
            raise UsageError(f"no column {name}; there are: {', '.join(NAMES)}")
    audit, tables = Audit([], [], [], {}), []
    for path in paths:
        for file, reason in below(path, Path.is_file, lambda name: name.startswith(".")):
            if reason:
                audit.refused.append(f"{file}: {reason}")
            elif file != path and file.suffix.lower() not in SUFFIXES:
                audit.unread.append(f"{file}: skipped: no {', '.join(SUFFIXES)}")
            else:
                try:
                    tables += run_tables(file, mapping, facts or {})
                except UsageError as error:
                    audit.refused.append(str(error))
    for table in tables:
        findings, rows = check(table.rows)
        audit.findings.extend(findings)
        audit.checked[table.where] = len(rows)
        if table.unread:
            audit.unread.append(f"{table.where}: unread: {', '.join(table.unread)}")
        experts = [row for row in table.rows if row.has_experts]
        for name, words in OF_EXPERTS.items():
            if silent := sum(not row.states(name) for row in experts):
                audit.unread.append(
                    f"{table.where}: {silent} of {len(experts)} rows with experts do not state"
                    f" {words} ({name})"
                )
        if not rows:
            read = ", ".join(dict.fromkeys(table.columns.values())) or "no column"
            audit.unread.append(f"{table.where}: skipped: nothing to check in {read}")
    headings = {h.strip().lower() for table in tables for h in [*table.columns, *table.unread]}
    if audit.checked and (unused := [heading for heading in mapping if heading not in headings]):
        raise UsageError(f"--mapping {unused[0]}: no table has this heading")
    return audit
