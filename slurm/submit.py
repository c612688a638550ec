"""Submit the runs of a study that are neither waiting, nor running, nor complete.

    python -m slurm.submit slurm/layouts.toml
    python -m slurm.submit slurm/layouts.toml --only failed
    python -m slurm.submit slurm/layouts.toml --only megatron-tp2-pp2 --yes
    python -m slurm.submit slurm/layouts.toml --watch --at-most 8 --budget-gpu-hours 500
    sbatch --dependency=afterany:4711 slurm/layouts.slurm       # when another job has ended

It prints what the runs cost at worst, submits them and returns; nothing stays behind on the login
node. Above the study's budget (budget_gpu_hours in [slurm]) it needs --yes.
--watch stays until every run has ended. It submits a run again after what a retry can mend (a lost
node, a hang, a time limit, a broken connection), at most max_restarts times. DIR/<study>/tries.csv
has each retry. It stays within the budget. It may be ended and started again. Its exit status is 0
when every run is complete, else 1.
"""

import argparse
import shutil
import sys

from base.bounds import check_flags
from base.errors import UsageError, command_line, printable, warn
from parallel.config.study import Study
from slurm import sbatch, states, submit_checks
from slurm.render import (
    ROOT,
    ask_of,
    cluster_of,
    each,
    estimate,
    job_of,
    load_studies,
    study_parser,
)
from slurm.watch import Watch


def choose(study: Study, rows: list[states.Row], only: list[str] | None) -> list[str]:
    """Returns the runs to submit: those asked for that do not wait, run or have completed, and
    whose state is known."""
    for row in rows:
        if row.state == "unknown" and (only is None or row.run in only):
            print(printable(f"{row.run} is left alone: {row.line}"))
    left_alone = ("pending", "running", "complete", "unknown")
    startable = {row.run: row.state for row in rows if row.state not in left_alone}
    if only is None:
        return list(startable)
    for name in set(only) - {"failed", "missing"}:
        study.run(name)  # or a UsageError that lists the names
    wanted = {"missing"} & set(only)
    if "failed" in only:
        wanted |= states.FAILURES.keys() - set(states.STOPPED)
        stopped = [n for n, state in startable.items() if state in states.STOPPED and n not in only]
        if stopped:
            print(f"cancelled or interrupted, not failed: {', '.join(stopped)}")
    return [name for name, state in startable.items() if name in only or state in wanted]


def submit_study(study: Study, arguments: argparse.Namespace) -> None:
    """Submits the runs of a study that `choose` returns, in one round, and prints the job of each.
    It refuses what something would end at its start, and costs above the budget without --yes."""
    round_ = Watch([study], arguments)
    # Two submits at a time would each find the other's runs still missing.
    with states.locked([study], round_.logs):
        warn("slurm.submit", *round_.ask())
        names = choose(study, round_.rows[study.name], arguments.only)
        if not names:
            print("nothing to submit: all that was asked for waits, runs or is complete")
            return
        jobs: dict[str, int] = {}  # of runs that others wait for
        for name in names:
            if line := round_.gate_of_studies(study, name):
                raise UsageError(f"{name}: {line}; --watch waits")
            for row in round_.incomplete(study, name):
                if row.state in ("pending", "running") and row.job_id is not None:
                    jobs[row.run] = row.job_id
                elif row.run not in names:
                    raise UsageError(
                        f"{name} waits for {row.run}, which is {row.state}: submit both"
                    )
        print("\n".join(estimate(study, names)))
        check(study, names, arguments)
        budget = min(ask_of(study, name).budget_gpu_hours for name in names)
        total = sum(job_of(study, name).gpu_hours for name in names)
        if total > budget and not arguments.yes:
            raise UsageError(
                f"{total:.1f} {cluster_of(study).hours} at worst exceed the budget of {budget:g}:"
                " nothing was submitted; give --yes"
            )
        for name in names:
            awaited = [jobs[other] for other in study.runs[name].after if other in jobs]
            jobs[name] = sbatch.submit(study, name, arguments.logs, awaited)
            line = f", after {', '.join(map(str, awaited))}" if awaited else ""
            print(f"submitted {name}: job {jobs[name]}{line}", flush=True)


def check(study: Study, names: list[str], arguments: argparse.Namespace) -> None:
    """Refuses runs that something would end at their start."""
    if arguments.no_checks:
        return
    if problems := submit_checks.problems(study, ROOT / arguments.logs, names):
        for problem in problems:
            warn("slurm.submit", problem)
        raise UsageError("nothing was submitted; --no-checks submits all the same")
    if line := submit_checks.slow_start(study, names):
        warn("slurm.submit", line)


def watch(arguments: argparse.Namespace) -> int:
    """Checks the studies as `submit_study` does, and watches them."""
    if arguments.only is not None or arguments.yes:
        raise UsageError("--watch takes all runs, within --budget-gpu-hours: no --only, no --yes")
    if shutil.which("squeue") is None:
        raise UsageError("no Slurm here: squeue is not found (module load slurm?)")
    arguments.every = arguments.every or 30.0
    studies = load_studies(arguments)
    for study in studies:
        estimate(study, list(study.runs))
        check(study, list(study.runs), arguments)
    return Watch(studies, arguments).until_the_end()


@command_line("slurm.submit")
def main(argv: list[str] | None = None) -> int:
    parser = study_parser("slurm.submit", __doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="WHICH",
        help="failed (not cancelled or interrupted), missing, names, or several of them",
    )
    parser.add_argument("--yes", action="store_true", help="submit whatever it costs")
    parser.add_argument(
        "--no-checks",
        "--no-preflight",
        action="store_true",
        help="submit although something seems to be missing",
    )
    parser.add_argument(
        "--watch", action="store_true", help="stay, and submit again what a retry can mend"
    )
    parser.add_argument("--at-most", type=int, metavar="N", help="jobs that wait or run at a time")
    parser.add_argument("--every", type=float, metavar="S", help="seconds between rounds (30)")
    parser.add_argument(
        "--budget-gpu-hours",
        type=float,
        metavar="H",
        help="that --watch may spend on a study, what it has cost included (default: the study's)",
    )
    arguments = parser.parse_args(argv)
    check_flags(arguments, at_most=(1, 10**6), every=(0.1, 86400), budget_gpu_hours=(0, 10**12))
    if arguments.watch:
        return watch(arguments)
    for flag in ("at_most", "every", "budget_gpu_hours"):
        if getattr(arguments, flag) is not None:
            raise UsageError(f"--{flag.replace('_', '-')} belongs to --watch")
    status = 0
    for study in each(load_studies(arguments)):
        try:
            submit_study(study, arguments)
        except UsageError as error:  # the other studies are submitted all the same
            warn("slurm.submit", error)
            status = 2
    return status


if __name__ == "__main__":
    sys.exit(main())
