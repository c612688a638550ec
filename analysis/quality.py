"""May I believe this run? Its verdict with the line that proves it, and its steady step time.

    python -m analysis.quality PATH... [--window FIRST:LAST] [--format json]

One row per run: how it ended and the line that proves it, its steady step time with a 95 %
interval, and what makes its numbers doubtful. `--window` states the iterations to use by the
numbers that the log prints. `--format json` prints an array with one object per run; unknown is
null. Exits 2 when nothing could be read.

analysis/logs/verdict.py lists the verdicts.
"""

import sys
from typing import Any

from analysis.common.table import Column, Table, show, show_objects
from analysis.logs.load import name_of
from analysis.logs.record import Record
from analysis.logs.verdict import describe_rule, judge, summary, timed
from analysis.measured.run_flags import load_given, parser_of
from base.errors import command_line


def _summarised(record: Record, window: tuple[int, int] | None) -> dict[str, Any]:
    time = timed(record, window)
    return summary(record, time, judge(record, time))


def table(records: list[Record], window: tuple[int, int] | None) -> Table:
    """The quality table: one row per run."""
    columns = [
        Column("run", "run"),
        Column("format", "format"),
        Column("verdict", "verdict"),
        Column("steps", "steps", "d"),
        Column("steady_step_s", "s/iter", ".4g"),
        Column("ci95", "95 % interval"),
        Column("steady_n", "of", "d"),
        Column("reasons", "reasons", long="below"),
    ]
    rows = []
    for record in records:
        row = _summarised(record, window)
        ci95 = row["steady_ci95"]
        row["run"] = name_of(record)
        row["ci95"] = f"{ci95[0]:.4g} .. {ci95[1]:.4g}" if ci95 else None
        row["reasons"] = "; ".join(row["reasons"])
        rows.append({c.key: row[c.key] for c in columns})
    return Table(columns, rows, notes=[f"s/iter: {describe_rule(window)}"])


@command_line("analysis.quality")
def main(argv: list[str] | None = None) -> int:
    """Print the verdicts of what is at the paths."""
    parser = parser_of("analysis.quality", __doc__, "times", "facts", "table")
    flags = parser.parse_args(argv)
    records = load_given("analysis.quality", flags)
    if flags.format == "json":
        show_objects([_summarised(record, flags.window) for record in records], flags.columns)
    else:
        show([table(records, flags.window)], flags.format, flags.columns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
