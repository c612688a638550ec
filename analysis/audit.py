"""Which numbers of published tables contradict each other.

    python -m analysis.audit PATH... [--mapping HEADING=COLUMN] [--fact COLUMN=VALUE]
                             [--format text|json]

PATH is a table in CSV, TSV or Markdown, or a folder of these. Each finding is one line:
`FILE:LINE: what is printed, but what follows`. analysis/published/identities.py lists what must
hold: GPUs of the layout, batches, rates, FLOPs per token, MFU, peaks, speedups, efficiencies,
repeats, equal results. A printed number stands for an interval, by its digits.

stderr names each unknown heading, each table in which nothing could be checked, and each file that
could not be read. --mapping says what a heading means. --fact states for every row what the text
beside the table says, such as seq_len=1024 or gpu_type=H100.

Exits 0 if all was checked and nothing was found, 1 if something was found, and 2 if nothing was
found but a table or file could not be checked.
"""

import sys
from dataclasses import asdict
from pathlib import Path

from analysis.common.table import json_objects
from analysis.published.audited import audit_paths
from base.errors import Parser, UsageError, command_line, warn


@command_line("analysis.audit")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m analysis.audit", description=__doc__)
    add = parser.add_argument
    add("paths", nargs="+", type=Path, metavar="PATH", help="a table, or a folder of tables")
    words = "what a heading means (docs/audit.md lists the columns); again for another heading"
    add("--mapping", action="append", default=[], metavar="HEADING=COLUMN", help=words)
    words = "what is true of every row; again for another column"
    add("--fact", action="append", default=[], metavar="COLUMN=VALUE", help=words)
    add("--format", choices=("text", "json"), default="text", help="default: text")
    arguments = parser.parse_args(argv)
    mapping = _pairs("--mapping", arguments.mapping)
    audit = audit_paths(arguments.paths, mapping, _pairs("--fact", arguments.fact))
    warn("analysis.audit", *audit.unread, *audit.refused)
    if arguments.format == "json":
        print(json_objects([asdict(finding) for finding in audit.findings]), end="")
    else:
        for finding in audit.findings:
            print(finding)
        rows = sum(audit.checked.values())
        if not audit.findings and rows:
            print(f"rows checked: {rows}; nothing found")
    if audit.findings:
        return 1
    return 2 if audit.has_gaps or not audit.checked else 0


def _pairs(flag: str, texts: list[str]) -> dict[str, str]:
    """Returns {A: B} of the texts `A=B` of a flag; A may have = in it."""
    pairs = {}
    for text in texts:
        name, sign, value = text.rpartition("=")
        if not (sign and name.strip() and value.strip()):
            raise UsageError(f"{flag} {text}: write {flag} A=B")
        pairs[name] = value.strip()
    return pairs


if __name__ == "__main__":
    sys.exit(main())
