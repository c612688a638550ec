"""Is B faster than A, or is it noise?

    python -m analysis.compare A B [--format json]       A, B: a log, a run, or a folder of repeats
    python -m analysis.compare STUDY        each configuration with its baseline, and with the
                                            fastest on as many GPUs

With three repeats or more on both sides the unit is the run, and where a study ran them A B A B
the pair of neighbours; with fewer it is a block of steady iterations within the runs, which cannot
see what changes from one run to the next, and says so. The verdict is plain: B faster by x % +- y,
slower, or within noise. On another number of GPUs nothing is faster as such: the ratio of times and
of GPU-seconds is given. What differs, what no log states and what makes the noise unknown (running
averages) is said. Runs whose fixed work differs, or whose commit does (unless --any-commit),
are not compared: exit 1. Exits 2 when nothing could be read.
"""

if not __package__:
    import as_script

import sys

from analysis.common.table import show, show_objects
from analysis.logs.fact_flags import facts_of
from analysis.measured import comparisons
from analysis.measured.fairness import ANY_COMMIT
from analysis.measured.run_flags import parser_of
from base.errors import UsageError, command_line, printable, warn


@command_line("analysis.compare")
def main(argv: list[str] | None = None) -> int:
    """Print the verdict, or the table of a study."""
    flags = ("any_commit", "times", "facts", "table")
    parser = parser_of("analysis.compare", __doc__, *flags, paths="A B, or a study")
    given = parser.parse_args(argv)
    if len(given.paths) > 2:
        raise UsageError(f"two things are compared, but {len(given.paths)} were given")
    sides = []
    for path in given.paths:
        runs, left_out = comparisons.timed_runs([path], facts_of(given), given.window)
        for line in left_out:
            warn("analysis.compare", line)
        sides.append(runs)
    if len(sides) == 1:
        verdicts = comparisons.of_study(sides[0], given.any_commit)
    else:
        verdicts = [comparisons.judged(*sides, given.any_commit)]
    if given.format == "json":
        show_objects([verdict.as_dict() for verdict in verdicts], given.columns)
    elif len(sides) == 1 or given.columns:
        shown = comparisons.table(verdicts, given.any_commit)
        show([shown], given.format, given.columns)
    else:
        lines = verdicts[0].lines() + ([ANY_COMMIT] if given.any_commit else [])
        print(*map(printable, lines), sep="\n")
    return 0 if all(verdict.found for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
