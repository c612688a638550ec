"""What cannot be true, or cannot be compared, in published tables and in logs.

    python -m analysis.audit FILE... [--gpu-type NAME] [--mapping HEADING=NAME]
                             [--format text|json|github]

One line per finding, `FILE:LINE: what is wrong, with the numbers`. It looks for: layouts that are
not the number of GPUs; batches that do not multiply out; tokens/s or samples/s that do not follow
from the batch and the seconds; TFLOPs or MFU whose FLOPs per token jump between rows of one
model; more than a card's peak or memory; speedups and efficiencies that the table's own times do
not give; a row in another unit; equal results of different configurations; a "best" row that is
not; totals and shares that do not sum; results above their own ideal or bound; sentences that the
tables beside them contradict; the same evidence in two files; a mean over ranks given as the time
that the slowest rank decides; a wall clock that holds more than the training; different commits
compared; identical configurations far apart; and runs that never took an optimizer step. What a
table does not say is not held against it, and rounding never is: each tolerance is what the
printed digits leave open.

A table is Markdown, HTML or CSV. The meaning of each column is guessed from its heading and printed
on stderr; so are the columns in which twice the number would not be noticed. Where a guess is
wrong: `--mapping "Rate=tokens_per_s/gpu"`, `--mapping "Took=step_s:0.001"` (a factor to our unit:
seconds, tokens/s, TFLOP/s, GB), `--mapping "Size=-"` (not used).

Exits 0 without findings, 1 with, 2 when nothing could be read or a FILE does not exist.
"""

if not __package__:
    import as_script

import sys
from dataclasses import asdict
from pathlib import Path

from analysis.common.tables import show_objects
from analysis.published.audit import audit_paths
from models.errors import Parser, UsageError, command_line, warn


@command_line("analysis.audit")
def main(argv: list[str] | None = None) -> int:
    """Print the findings."""
    parser = Parser(prog="python -m analysis.audit", description=__doc__)
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="FILE", help="a table (Markdown, HTML, CSV) or a log"
    )
    parser.add_argument("--gpu-type", metavar="NAME", help="the card, where the tables do not say")
    parser.add_argument(
        "--mapping",
        action="append",
        default=[],
        metavar="HEADING=NAME",
        help="what a heading means: a name as printed on stderr, /gpu for of one GPU, :FACTOR",
    )
    parser.add_argument(
        "--format",
        choices=("text", "json", "github"),
        default="text",
        help="how to print (default: text); github: annotations of a workflow",
    )
    given = parser.parse_args(argv)
    if wrong := [text for text in given.mapping if "=" not in text.strip("= ")]:
        raise UsageError(f"--mapping {wrong[0]}: write HEADING=NAME")
    mapping = dict(text.rsplit("=", 1) for text in given.mapping)
    says: list[str] = []
    found, refused, checked = audit_paths(given.paths, given.gpu_type, mapping, says)
    for line in says:
        warn("analysis.audit", f"columns: {line}")
    for line in refused:
        warn("analysis.audit", line)
    if not checked:
        return 2
    if given.format == "json":
        show_objects([asdict(finding) for finding in found])
    elif given.format == "github":
        for finding in found:
            print(finding.annotation())
    else:
        for finding in found:
            print(finding)
        if not found:
            count = sum(checked.values())
            rows = "row of a table or log" if count == 1 else "rows of tables and logs"
            print(f"{count} {rows} checked, nothing found" if count else "nothing to audit")
    gone = any(not path.exists() for path in given.paths)  # a misspelt name must not pass a check
    return 1 if found else 2 * gone


if __name__ == "__main__":
    sys.exit(main())
