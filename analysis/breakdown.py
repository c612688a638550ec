"""Where each rank's time went, what it sent, and where a split's efficiency was lost.

    python -m analysis.breakdown PATH... [--baseline NAME] [--scaling strong|weak]
    python -m analysis.breakdown RUN --trace pipeline.json.gz

PATH is a run folder of a run with `--breakdown`, or a folder of them. Four tables, per step, the
first three over the windows after the warm-up:

- every category's time on its slowest rank, the mean over ranks, and the spread (slowest -
  fastest); the step's time is the slowest rank's;
- tensor-, pipeline- and data-parallel messages: calls, bytes, exposed and hidden time, and whether
  the bytes are those of the closed formula (parallel/config/message_bytes.py);
- the efficiency that was lost against the baseline, decomposed;
- the few steps whose intervals were recorded: each stage's forward and backward, and the pipeline's
  time and bubble beside a simulation of the run's schedule with these times.

--trace writes these steps of one run for https://ui.perfetto.dev: one process per stage, the
simulated stage above its ranks; forward, backward, send, receive, bubble, optimizer and what else a
rank did. A simulated stage has no collectives and no send, and it waits (bubble) to the end of the
last stage, where a measured one waits in its next collective (control, embedding or dp).

What each category means is written in measure/step_parts.py. A rank without rows, or a damaged
file, is named; the others are still reported. Exits 2 when nothing could be read.
"""

if not __package__:
    import as_script

import sys
from pathlib import Path

from analysis.common.table import show
from analysis.measured import rank_times, stage_timeline
from analysis.measured.run_flags import parser_of
from base.errors import UsageError, command_line, warn
from base.files import add_force_flag
from base.storage import output
from parallel.record.trace_file import MARK


@command_line("analysis.breakdown")
def main(argv: list[str] | None = None) -> int:
    """Print the tables of what is at the paths."""
    flags = {"paths": "run folder or study", "baseline": "the one that run.json names"}
    parser = parser_of("analysis.breakdown", __doc__, "baseline", "scaling", "table", **flags)
    traced = "write the traced steps of one run for Perfetto (FILE.json.gz)"
    parser.add_argument("--trace", type=Path, metavar="FILE", help=traced)
    add_force_flag(parser)
    given = parser.parse_args(argv)
    found, problems = rank_times.read_all(given.paths)
    lines = []
    for one in found:
        try:
            lines.append(stage_timeline.of_run(one))
        except UsageError as error:
            if stage_timeline.WITHOUT not in str(error) or given.trace:
                problems.append(str(error))
    for line in problems:
        warn("analysis.breakdown", line)
    tables = rank_times.tables(found, given.baseline, given.scaling)
    if lines:
        tables.append(stage_timeline.table(lines))
    if given.trace:
        if len(lines) != 1:
            raise UsageError(f"--trace is of one run with traced steps, not of {len(lines)}")
        with output(given.trace, MARK, given.force) as file:
            stage_timeline.write(file, lines[0])
        warn(
            "analysis.breakdown", f"{given.trace}: written"
        )  # not among the tables, as JSON or CSV
    show(tables, given.format, given.columns)  # last: a reader that goes away ends the command
    return 0


if __name__ == "__main__":
    sys.exit(main())
