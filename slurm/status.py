"""How the runs of a study are doing, one row each.

    python -m slurm.status slurm/layouts.toml

A run is pending, running (with the iteration and the time left), complete, OOM, timeout, node
failure, cancelled, interrupted (it saved, and can go on), failed or missing. The last column is the
line that proves it. Slurm is asked twice, however many runs there are. When every run has ended,
the commands for the study's tables and page are printed. The exit status is 1 when a run failed in
any way.
"""

import shlex
import sys
from collections import Counter

from models.errors import command_line, printable
from parallel.config.study import load_study
from slurm import states
from slurm.render import study_parser


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds; - where unknown."""
    if seconds is None:
        return "-"
    minutes, secs = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{secs:02}"


def table(found: list[states.Row]) -> list[str]:
    """The rows as text, with a last line that counts the states."""
    wide = max((len(row.run) for row in found), default=3)
    lines = [f"{'run':{wide}}  {'state':12}  {'job':>8}  {'iteration':>13}  {'ETA':>8}  proof"]
    for row in found:
        steps = f"{row.step}/{row.steps}"
        lines.append(
            f"{row.run:{wide}}  {row.state:12}  {row.job_id or '-':>8}  {steps:>13}"
            f"  {duration(row.eta_s):>8}  {row.line}"
        )
    counts = Counter(row.state for row in found)
    return [*map(printable, lines), ", ".join(f"{n} {state}" for state, n in counts.most_common())]


@command_line("slurm.status")
def main(argv: list[str] | None = None) -> int:
    arguments = study_parser("slurm.status", __doc__).parse_args(argv)
    study = load_study(arguments.study, arguments.cluster)
    found, answered = states.rows(study, arguments.logs)
    if not answered:
        says = f"{states.no_answer()}; the rows below are from the run folders alone"
        print(f"slurm.status: {says}", file=sys.stderr)
    print("\n".join(table(found)))
    if found and all(row.state in (*states.FAILURES, "complete") for row in found):
        folder = shlex.quote(str(arguments.logs / study.name))
        print(
            "\nnext:\n"
            f"  python -m analysis.tflops {folder}    # time, TFLOP/s, speedup and efficiency\n"
            f"  python -m analysis.page {folder}      # all of it as one offline page, study.html"
        )
    return int(any(row.state in states.FAILURES for row in found))


if __name__ == "__main__":
    sys.exit(main())
