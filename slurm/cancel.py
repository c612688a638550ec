"""Cancel what waits or runs of a study.

python -m slurm.cancel slurm/layouts.toml
python -m slurm.cancel slurm/layouts.toml --only megatron-tp2-pp2
"""

import argparse
import subprocess
import sys
from pathlib import Path

from models.errors import Parser, UsageError, command_line
from parallel.study import load_study
from slurm import jobs


@command_line("slurm.cancel")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        prog="python -m slurm.cancel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("study", type=Path, metavar="TOML", help="the study file")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these runs of it")
    parser.add_argument("--cluster", metavar="NAME", help="as given to slurm.render")
    parser.add_argument("--logs", type=Path, default=Path("logs"), metavar="DIR")
    arguments = parser.parse_args(argv)
    study = load_study(arguments.study, arguments.cluster)
    for name in arguments.only or ():
        study.run(name)
    found, answered = jobs.rows(study, arguments.logs)
    if not answered:
        raise UsageError("no Slurm answers (is SLURM_CONF set, or the test cluster up?)")
    ids = [
        str(row.job_id)
        for row in found
        if row.state in ("pending", "running") and row.job_id is not None
        if arguments.only is None or row.run in arguments.only
    ]
    if ids:
        done = subprocess.run(
            ["scancel", *ids], env=jobs.environment(), capture_output=True, text=True
        )
        if done.returncode:
            raise UsageError(f"scancel: {' '.join(done.stderr.split())}")
    print(f"cancelled {len(ids)} jobs" + (f": {' '.join(ids)}" if ids else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
