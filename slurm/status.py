"""How the runs of a study are doing, one row each.

    python -m slurm.status slurm/layouts.toml

pending, running (iteration k/n and the time left), complete, OOM, timeout, node failure, cancelled,
interrupted (saved, and can go on), failed or missing, with the line that proves it. Slurm is asked
twice, however many runs there are.
The exit status is 1 when a run failed in any way.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from models.errors import Parser, command_line, printable
from parallel.study import load_study
from slurm import jobs


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds; - where unknown."""
    if seconds is None:
        return "-"
    minutes, secs = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{secs:02}"


def table(found: list[jobs.Row]) -> list[str]:
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
    parser = Parser(
        prog="python -m slurm.status",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("study", type=Path, metavar="TOML", help="the study file")
    parser.add_argument("--cluster", metavar="NAME", help="as given to slurm.render")
    parser.add_argument("--logs", type=Path, default=Path("logs"), metavar="DIR")
    arguments = parser.parse_args(argv)
    study = load_study(arguments.study, arguments.cluster)
    found, answered = jobs.rows(study, arguments.logs)
    if not answered:
        print("slurm.status: no Slurm answers; this is what the run folders say", file=sys.stderr)
    print("\n".join(table(found)))
    return int(any(row.state in jobs.FAILURES for row in found))


if __name__ == "__main__":
    sys.exit(main())
