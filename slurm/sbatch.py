"""The command line of sbatch that submits one run; the script itself is render.py's."""

import os
from collections.abc import Collection
from pathlib import Path

from base.errors import UsageError
from parallel.config.study import Study
from slurm import nodes, squeue
from slurm.render import ROOT, ask_of, cluster_of, planned_text, script


def submit(study: Study, name: str, logs: Path, after: Collection[int] = ()) -> int:
    """Submits a run and returns the number of its job, which starts when the jobs `after` have
    completed; Slurm cancels it when one of them fails."""
    folder = ROOT / logs / study.name / name
    left_out = nodes.option(study, ROOT / logs, name)
    command = ["sbatch", "--parsable", f"--chdir={ROOT}", *left_out]
    if after:
        jobs = ":".join(map(str, after))
        command += [f"--dependency=afterok:{jobs}", "--kill-on-invalid-dep=yes"]
    account = os.environ.get("SLURM_JOB_ACCOUNT")  # of sbatch --account NAME slurm/*.slurm
    if account and not ask_of(study, name).account and "SBATCH_ACCOUNT" not in os.environ:
        command.append(f"--account={account}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        cluster = cluster_of(study).slurm_cluster
        job = int(squeue.run(command, script(study, name, logs), cluster).split(";")[0])
        (folder / f"{job}.submitted").write_text(planned_text(study, name) + "\n")
    except (UsageError, OSError) as error:
        raise UsageError(f"{name}: {error}") from error
    for text in left_out:
        print(f"job {job}: {text}")
    return job
