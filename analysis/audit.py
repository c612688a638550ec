"""What cannot be true, or cannot be compared, in published tables (Markdown, CSV) and in logs.

    python -m analysis.audit FILE... [--gpu-type NAME] [--format json]

One line per finding, `FILE:LINE: what is wrong, with the numbers`. It looks for: tp x pp x dp that
is not the number of GPUs; micro batch x accumulation x dp that is not the global batch; TFLOPs that
do not follow from the seconds beside them; more than the GPU's peak; efficiency above 1; a mean
over ranks reported as the time when the slowest rank decides it; a wall clock that holds more than
the training; different commits compared; identical configurations far apart; and runs that never
took an optimizer step. What a table does not say is not held against it, and rounding never is.
Exits 0 without findings, 1 with, 2 when nothing could be read.
"""

if not __package__:
    import as_script

import sys
from dataclasses import asdict
from pathlib import Path

from analysis.common.tables import show_objects
from analysis.published.audit import audit_paths
from models.errors import Parser, command_line, warn


@command_line("analysis.audit")
def main(argv: list[str] | None = None) -> int:
    """Print the findings."""
    parser = Parser(prog="python -m analysis.audit", description=__doc__)
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="FILE", help="a table (Markdown, CSV) or a log"
    )
    parser.add_argument("--gpu-type", metavar="NAME", help="the card, where the tables do not say")
    parser.add_argument(
        "--format", choices=("text", "json"), default="text", help="how to print (default: text)"
    )
    given = parser.parse_args(argv)
    found, refused, checked = audit_paths(given.paths, given.gpu_type)
    for line in refused:
        warn("analysis.audit", line)
    if not checked:
        return 2
    if given.format == "json":
        show_objects([asdict(finding) for finding in found])
    else:
        for finding in found:
            print(finding)
        if not found:
            count = sum(checked.values())
            rows = "row of a table or log" if count == 1 else "rows of tables and logs"
            print(f"{count} {rows} checked, nothing found" if count else "nothing to audit")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
