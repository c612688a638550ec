"""Strong and weak scaling curves over repeats, against a baseline of any number of GPUs.

    python -m analysis.scaling PATH... [--baseline NAME] [--scaling strong|weak]

The baseline is the study's, else the run on the fewest GPUs, where --baseline names no other. One
row per configuration: the median over the repeats at that size with their spread, speedup,
efficiency and Karp and Flatt's serial share; below, the serial share that Amdahl's law (strong)
or Gustafson's (weak) fits to all rows. A run whose fixed work is not the baseline's, or whose
commit is not (unless --any-commit), is left out of the fit and says what differs.

PATH may be a tree of MLPerf training results (.../SUBMITTER/results/SYSTEM/BENCHMARK/result_0.txt):
then a table of every result is printed, and for each submitter, benchmark and accelerator a strong
scaling table of each global batch and a weak one of each batch per GPU that have two sizes.
Exits 2 when nothing could be read.
"""

import sys

from analysis.common.table import show
from analysis.logs.fact_options import facts_of
from analysis.logs.load import load
from analysis.runs import scaling_curve, submissions
from analysis.runs.run_options import parser_of, unheeded
from base.errors import command_line, warn


@command_line("analysis.scaling")
def main(argv: list[str] | None = None) -> int:
    flags = ("baseline", "scaling", "any_commit", "times", "facts", "table")
    parser = parser_of("analysis.scaling", __doc__, *flags)
    arguments = parser.parse_args(argv)
    records, refused = load(arguments.paths, facts_of(arguments))
    warn("analysis.scaling", *unheeded(records, facts_of(arguments)))
    results = [record for record in records if submissions.is_result(record)]
    runs = [record for record in records if not submissions.is_result(record)]
    settings = {"scaling": arguments.scaling, "window": arguments.window}
    if not runs:
        tables = submissions.report(results, refused, baseline=arguments.baseline, **settings)
    else:
        tables = submissions.report(results, [], **settings) if results else []
        curve = scaling_curve.report_of(
            runs, refused, arguments.baseline, any_commit=arguments.any_commit, **settings
        )
        tables.append(curve)
    show(tables, arguments.format, arguments.columns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
