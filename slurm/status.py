"""The state of each run of a study, one row for each run.

    python -m slurm.status slurm/layouts.toml
    python -m slurm.status slurm/*.toml

A run is pending, running (with the step and the time left), complete, OOM, timeout, node failure,
cancelled, interrupted (it saved, and can resume), failed, missing or unknown. The last column is
the line that proves it. Slurm is asked twice, however many runs there are. When every run has
ended, the commands for the study's tables and page are printed. The exit status is 1 when a run
of a study failed in any way.
"""

import shlex
import sys
from collections import Counter
from datetime import timedelta

from base.errors import UsageError, command_line, printable, warn
from slurm import squeue, states
from slurm.render import ROOT, each, load_studies, shown, study_parser

NEXT = """
next:
  python -m analysis.tflops {folder}    # time, TFLOP/s, speedup and efficiency
  python -m analysis.page {folder}      # all of it as one offline page, study.html"""


def table(rows: list[states.Row]) -> list[str]:
    """Returns the rows as lines, and a last line that counts the states."""
    wide = max((len(row.run) for row in rows), default=3)
    lines = [f"{'run':{wide}}  {'state':12}  {'job':>8}  {'iteration':>13}  {'ETA':>8}  proof"]
    for row in rows:
        steps = f"{row.step}/{row.steps}"
        eta_s = row.eta_s
        is_time = eta_s is not None and eta_s < timedelta.max.total_seconds()
        eta = str(timedelta(seconds=round(eta_s))) if is_time else "-"
        lines.append(
            f"{row.run:{wide}}  {row.state:12}  {row.job:>8}  {steps:>13}  {eta:>8}  {row.line}"
        )
    counts = Counter(row.state for row in rows)
    return [*map(printable, lines), ", ".join(f"{n} {state}" for state, n in counts.most_common())]


@command_line("slurm.status")
def main(argv: list[str] | None = None) -> int:
    arguments = study_parser("slurm.status", __doc__).parse_args(argv)
    studies, logs = load_studies(arguments), ROOT / arguments.logs
    jobs, status = {}, 0
    try:
        jobs = squeue.jobs_of(studies)
    except UsageError as error:
        warn("slurm.status", f"{error}; the rows below are from the run folders alone")
    for study in each(studies):
        rows = states.rows(study, logs, jobs.get(study.name))
        print("\n".join(table(rows)))
        if rows and all(row.state in (*states.FAILURES, "complete") for row in rows):
            print(NEXT.format(folder=shlex.quote(shown(logs / study.name))))
        status |= any(row.state in states.FAILURES for row in rows)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
