"""Is B faster than A, or is it noise?

    python -m analysis.compare A B [--format json]       A, B: a log, a run, or a folder of repeats
    python -m analysis.compare STUDY        each configuration with its baseline, and with the
                                            fastest on as many GPUs
    python -m analysis.compare OLD NEW --at-most 3%         a gate: may this change of code go in?
    python -m analysis.compare NEW --golden FILE --at-most 3%       with the reference in a file

The ratio is that of the medians of both sides' runs, with the interval that all tables have. With
three repeats or more on both sides the interval is of runs, and where a study ran them A B A B of
pairs of neighbours. With fewer it is what the steady steps of each run allow, of which those of a
run that drifts count as fewer (none where too few are left); it cannot tell what changes from one
run to the next, and says so. The verdict is plain: B is x times as fast, takes x times as long, or
is within noise. On another number of GPUs nothing is faster as such: the ratio of times and of
GPU-seconds is given. What differs, what no log states and what makes the noise unknown (running
averages) is said. Runs whose fixed work differs, or whose commit does (unless --any-commit), are
not compared: exit 1. Exits 2 when nothing could be read.

With --at-most the last line says whether B is slower than A by more than that share. Exit 1: the
whole interval is. 0: it is not, or noise may explain it. 2: it cannot be known (no interval,
unlike work, other GPUs, nothing read, or the golden file was only now written).
"""

import sys

from analysis.runs.views import command

main = command("compare", __doc__)

if __name__ == "__main__":
    sys.exit(main())
