"""Submit the runs of a study that are neither waiting, nor running, nor complete.

    python -m slurm.submit slurm/layouts.toml
    python -m slurm.submit slurm/layouts.toml --only failed
    python -m slurm.submit slurm/layouts.toml --only megatron-tp2-pp2 --after 4711
    python -m slurm.submit slurm/layouts.toml --max-running 2 --yes

It renders the scripts, says what they cost at worst, submits and returns; nothing stays behind on
the login node. --max-running chains the jobs: each waits for the one that many places before it,
jobs of the study that wait or run already included. (Not a job array, whose tasks would all have to
ask for the same nodes and time.)
Above the study's budget (budget_gpu_hours in [slurm], or --budget) it asks, or needs --yes.
"""

import argparse
import fcntl
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from models.bounds import check_flags
from models.errors import Parser, UsageError, command_line
from parallel.study import Study, load_study
from slurm import jobs
from slurm.render import ROOT, ask_of, estimate, planned_text, script_folder, tell, write


def choose(study: Study, found: list[jobs.Row], only: list[str] | None) -> list[str]:
    """The runs to submit: those asked for that are not waiting, running or complete."""
    open_runs = {row.run: row.state for row in found}
    startable = [
        name
        for name, state in open_runs.items()
        if state not in ("pending", "running", "complete", "unknown")
    ]
    if only is None:
        return startable
    for name in set(only) - {"failed", "missing"}:
        study.run(name)  # or a UsageError that lists the names
    return [
        name
        for name in startable
        if name in only
        or ("failed" in only and open_runs[name] in jobs.FAILURES)
        or ("missing" in only and open_runs[name] == "missing")
    ]


def submit(
    study: Study,
    names: list[str],
    logs: Path,
    after: str | None = None,
    max_running: int | None = None,
    active: Sequence[int] = (),
) -> list[tuple[str, int]]:
    """Hand the scripts to sbatch in order; (run, job id) of each.

    With max_running, each job waits for the end of the one that many places before it; `active`,
    the study's jobs that wait or run already, come first.

    Raises:
        UsageError: sbatch refused one; those before it are submitted, and it says so.
    """
    done: list[tuple[str, int]] = []
    chain = sorted(active)
    for name in names:
        waits = [after if ":" in after else f"afterany:{after}"] if after else []
        if max_running and len(chain) >= max_running:
            waits.append(f"afterany:{chain[-max_running]}")
        command = ["sbatch", "--parsable", f"--chdir={ROOT}"]
        # A job whose dependency can no longer be met would wait for ever.
        command += [f"--dependency={','.join(waits)}", "--kill-on-invalid-dep=yes"] * bool(waits)
        script = script_folder(study).absolute() / f"{name}.slurm"
        folder = logs / study.name / name
        folder.mkdir(parents=True, exist_ok=True)
        sent = subprocess.run(
            [*command, "--", str(script)],
            env=jobs.environment(),
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        if sent.returncode:
            raise UsageError(
                f"sbatch refused {name} after {len(done)} were submitted:"
                f" {' '.join(sent.stderr.split())}"
            )
        job_id = int(sent.stdout.split(";")[0])
        (folder / f"{job_id}.submitted").write_text(planned_text(study, name) + "\n")
        done.append((name, job_id))
        chain.append(job_id)
    return done


def agreed(question: str) -> bool:
    """Whether the user says yes; the end of the input is a no."""
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False


@command_line("slurm.submit")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        prog="python -m slurm.submit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("study", type=Path, metavar="TOML", help="the study file")
    parser.add_argument(
        "--only", nargs="+", metavar="WHICH", help="failed, missing, names, or several of them"
    )
    parser.add_argument("--after", metavar="JOB", help="a job id, or a dependency as afterok:4711")
    parser.add_argument("--max-running", type=int, metavar="N", help="at most N at a time")
    parser.add_argument("--budget", type=float, metavar="GPU-HOURS", help="above it, ask")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--cluster", metavar="NAME", help="of slurm/clusters.toml")
    parser.add_argument("--logs", type=Path, default=Path("logs"), metavar="DIR")
    parser.add_argument("--strict", action="store_true", help="refuse what cannot run")
    arguments = parser.parse_args(argv)
    check_flags(arguments, max_running=(1, 10**6), budget=(0, 10**12))
    logs = ROOT / arguments.logs  # the scripts run there
    study = load_study(arguments.study, arguments.cluster, arguments.strict)
    (logs / study.name).mkdir(parents=True, exist_ok=True)
    # Two submits at a time would each find the other's runs still missing.
    with (logs / study.name / ".submit.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found, answered = jobs.rows(study, logs)
        if not answered:
            raise UsageError("no Slurm answers (is SLURM_CONF set, or the test cluster up?)")
        names = choose(study, found, arguments.only)
        if not names:
            print("nothing to submit: all that was asked for waits, runs or is complete")
            return 0
        write(study, arguments.logs)
        costs, total = estimate(study, names)
        print("\n".join(tell(study, costs, total)))
        budget = arguments.budget
        if budget is None:
            budget = min(
                ask_of(study.slurm[name], str(study.path)).budget_gpu_hours for name in names
            )
        if total > budget and not arguments.yes:
            says = f"{total:.1f} GPU-hours at worst exceed the budget of {budget:g}"
            if not sys.stdin.isatty():
                raise UsageError(f"{says}: give --yes, or --budget")
            if not agreed(f"{says}. Submit? [y/N] "):
                raise UsageError("nothing was submitted")
        active = [row.job_id for row in found if row.state in ("pending", "running")]
        active = [job_id for job_id in active if job_id is not None]
        waits = arguments.after, arguments.max_running, active
        for name, job_id in submit(study, names, logs, *waits):
            print(f"submitted {name}: job {job_id}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
