"""Is B faster than A, or is it noise?

    python -m analysis.compare A B [--format json]       A, B: a log, a run, or a folder of repeats
    python -m analysis.compare STUDY        each configuration with its baseline, and with the
                                            fastest on as many GPUs
    python -m analysis.compare OLD NEW --at-most 3%         a gate: may this change of code go in?
    python -m analysis.compare NEW --golden FILE --at-most 3%       with the reference in a file

The ratio is that of the medians of A's and B's repeats, with a 95 % interval. If both have three
repeats or more, the interval is that of the repeats, and of neighbouring pairs if a study ran them
in the order A B A B. Otherwise it follows from the steps of each run after the warm-up, where
steps that drift count as fewer. Then it does not include what changes from one run to the next,
and a note says so. The verdict is that B is x times as fast, takes x times as long, or is within
noise. For different numbers of GPUs the ratios of times and of GPU-seconds are given, and nothing
is called faster. Notes say what differs, what no log states, and why the noise is unknown (running
averages). Runs whose work differs, or whose commit does (unless --any-commit), are not compared:
exit 1. Exits 2 when nothing could be read.

With --at-most the last line says whether B is slower than A by more than that share. Exit 1: the
whole interval is. 0: it is not, or noise may explain it. 2: it is unknown (no interval, unlike
work, other GPUs, nothing read, or the golden file was only now written).
"""

import sys

from analysis.runs.views import command

main = command("compare", __doc__)

if __name__ == "__main__":
    sys.exit(main())
