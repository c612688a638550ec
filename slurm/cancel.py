"""Cancel the jobs of a study that wait or run.

python -m slurm.cancel slurm/layouts.toml
python -m slurm.cancel slurm/layouts.toml --only megatron-tp2-pp2
"""

import sys

from models.errors import UsageError, command_line
from parallel.config.study import load_study
from slurm import states
from slurm.render import study_parser


def slurm_ids(job_ids: list[int]) -> list[str]:
    """The jobs as Slurm's commands take them: 7_0 for a job of an array, since 7, which may be that
    job's own number, means the whole array."""
    printed = states.ask(["squeue", "--noheader", "--me", "--array", "--format=%A|%i"]) or ""
    pairs = (line.split("|")[:2] for line in printed.split())
    of_arrays = {pair[0]: pair[1] for pair in pairs if "_" in pair[-1] and pair[-1][0].isdigit()}
    return [of_arrays.get(str(job_id), str(job_id)) for job_id in job_ids]


@command_line("slurm.cancel")
def main(argv: list[str] | None = None) -> int:
    parser = study_parser("slurm.cancel", __doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these runs of it")
    arguments = parser.parse_args(argv)
    study = load_study(arguments.study, arguments.cluster)
    for name in arguments.only or ():
        study.run(name)
    found, answered = states.rows(study, arguments.logs)
    if not answered:
        raise UsageError(states.no_answer())
    job_ids = [
        row.job_id
        for row in found
        if row.state in ("pending", "running") and row.job_id is not None
        if arguments.only is None or row.run in arguments.only
    ]
    if ids := slurm_ids(job_ids) if job_ids else []:
        states.slurm(["scancel", *ids])
    print(f"cancelled {len(ids)} jobs" + (f": {' '.join(ids)}" if ids else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
