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
    jobs = squeue.jobs_of(studies)
    by_cluster: dict[str, list[str]] = {}
    for study in studies:
        cluster = study.cluster.slurm_cluster if study.cluster else ""
        for run, job_ids in states.job_ids(study, ROOT / arguments.logs, jobs[study.name]).items():
            if arguments.only is None or run in arguments.only:
                active = squeue.active(job_ids, jobs[study.name])
                by_cluster.setdefault(cluster, []).extend(map(str, active))
    for cluster, job_ids in by_cluster.items():
        if job_ids:
            squeue.run(["scancel", *job_ids], cluster=cluster)
    ids = [job_id for job_ids in by_cluster.values() for job_id in job_ids]
    print(f"cancelled {len(ids)} jobs" + (f": {' '.join(ids)}" if ids else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
