"""Where the time of a profiled run went: top ranges, kernels and collectives.

    python -m analysis.profile PATH... [--top 10] [--format json]

PATH is a run folder, whose profiles/ and <jobid>.profiles/ are read and summed up in
profiles/profile_summary.json; a folder of such runs; or one profile: `nsys stats` text or a
torch.profiler trace, which is only printed. A share is of the sum of its table, as nsys prints it:
ranges inside each other count in both, and in a trace those of one name as the time that they
cover. Where a trace tells how long the profiled steps were, `of time` is the share of that. A
profiled run says what takes the time, never how fast the run is. What cannot be read is named in
one line, and the rest is still reported; exits 2 if there was any.
"""

if not __package__:
    import as_script

import sys
from pathlib import Path

from analysis.common.table import add_table_flags, show, show_objects
from analysis.logs.record import Refusal
from analysis.measured import profile_rows
from base.bounds import check_flags
from base.errors import Parser, command_line, warn


@command_line("analysis.profile")
def main(argv: list[str] | None = None) -> int:
    """Print what is at the paths, and write each run's summary."""
    parser = Parser(prog="python -m analysis.profile", description=__doc__)
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="PATH", help="run, folder or profile"
    )
    parser.add_argument(
        "--top", type=int, default=10, metavar="N", help="entries of each kind (default: 10)"
    )
    add_table_flags(parser)
    given = parser.parse_args(argv)
    check_flags(given, top=(1, 10_000))
    refused: list[Refusal] = []
    found = [one for path in given.paths for one in profile_rows.report(path, refused, given.top)]
    for refusal in refused:
        warn("analysis.profile", refusal)
    if given.format == "json":
        show_objects([{"source": title} | summary for title, summary in found], given.columns)
    else:
        tables = [profile_rows.table(title, summary) for title, summary in found]
        show(tables, given.format, given.columns)
    return 2 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
