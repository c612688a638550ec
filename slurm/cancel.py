"""Cancel the jobs of studies that wait or run.

python -m slurm.cancel slurm/layouts.toml
python -m slurm.cancel slurm/layouts.toml --only megatron-tp2-pp2
"""

import sys

from base.errors import UsageError, command_line
from slurm import squeue, states
from slurm.render import ROOT, load_studies, study_parser


@command_line("slurm.cancel")
def main(argv: list[str] | None = None) -> int:
    parser = study_parser("slurm.cancel", __doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these runs of a study")
    arguments = parser.parse_args(argv)
    studies = load_studies(arguments)
    if arguments.only and len(studies) > 1:
        raise UsageError(f"--only names runs of one study, not of {len(studies)}")
    for name in arguments.only or ():
        studies[0].run(name)
    jobs = squeue.all_jobs()
    ids = []
    for study in studies:
        for run, job_ids in states.job_ids(study, ROOT / arguments.logs, jobs).items():
            if arguments.only is None or run in arguments.only:
                ids += [str(job_id) for job_id in squeue.active(job_ids, jobs)]
    if ids:
        squeue.run(["scancel", *ids])
    print(f"cancelled {len(ids)} jobs" + (f": {' '.join(ids)}" if ids else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
