"""Is B faster than A, or is it noise?

    python -m analysis.compare A B [--format json]       A, B: a log, a run, or a folder of repeats
    python -m analysis.compare STUDY        each configuration with its baseline, and with the
                                            fastest on as many GPUs

The ratio is that of the medians of both sides' runs, with the interval that all tables have. With
three repeats or more on both sides the interval is of runs, and where a study ran them A B A B of
pairs of neighbours. With fewer it is of the steady steps within single runs, or the range of two
runs: that cannot tell what changes from one run to the next, and says so. The verdict is plain: B
is x times as fast, takes x times as long, or is within noise. On another number of GPUs nothing is
faster as such: the ratio of times and of GPU-seconds is given. What differs, what no log states and
what makes the noise unknown (running averages) is said. Runs whose fixed work differs, or whose
commit does (unless --any-commit), are not compared: exit 1. Exits 2 when nothing could be read.
"""

import sys

from analysis.common.table import show
from analysis.logs.fact_options import facts_of
from analysis.runs import pairs
from analysis.runs.fairness import question_of
from analysis.runs.run_options import parser_of
from base.errors import UsageError, command_line, warn


@command_line("analysis.compare")
def main(argv: list[str] | None = None) -> int:
    names = ("any_commit", "times", "facts", "table")
    flags = parser_of("analysis.compare", __doc__, *names, paths="A B, or a study").parse_args(argv)
    if len(flags.paths) > 2:
        raise UsageError(f"two things are compared, but {len(flags.paths)} were given")
    sides = []
    for path in flags.paths:
        runs, left_out = pairs.timed_runs([path], facts_of(flags), flags.window)
        warn("analysis.compare", *left_out)
        sides.append(runs)
    if len(sides) == 1:
        compared = pairs.of_study(sides[0], flags.any_commit)
    else:
        compared = [pairs.pair_of(*sides, flags.any_commit)]
    shown = pairs.table(compared, flags.any_commit)
    if len(sides) == 2 and compared[0].values:
        shown.notes.append(f"they differ in: {', '.join(compared[0].values)}")
    shown.title = question_of([run.record for side in sides for run in side])
    show([shown], flags.format, flags.columns)
    return 0 if all(pair.comparison for pair in compared) else 1


if __name__ == "__main__":
    sys.exit(main())
