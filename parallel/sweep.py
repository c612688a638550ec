"""Trains studies on this machine, one run after the other, without Slurm.

    python -m parallel.sweep slurm/parity.toml
    python -m parallel.sweep slurm/parity.toml --only ddp megatron-pp2
    python -m parallel.sweep slurm/parity.toml slurm/parity-moe.toml --quick
    python -m parallel.sweep slurm/gpu-check.toml --max-gpus 2
    python -m parallel.sweep slurm/parity.toml --fresh

Each run has one process per rank. torchrun starts them; on CPU they are forks of a process that has
imported the engine once, which saves the seconds of the imports and changes no step's time
(run.json says which: launcher is torchrun or fork).

A complete run with the same settings and the same commit, without changes since, is not trained
again: a sweep that was stopped goes on where it was. --fresh trains everything (earlier results
move to <run>/attempts/). Repeats are interleaved; with --srun inside an allocation all of them run
on the same nodes. A run with save_interval that was stopped resumes from its newest checkpoint.
<run>/console.out holds what a run printed. The exit status is 1 when a run failed; the others still
run.

At the end `python -m analysis.tflops` prints one table of the studies. For each study `python -m
analysis.page` prints what bounds its fastest run, and writes its offline page study.html.
"""

import contextlib
import math
import queue
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from tqdm import tqdm

from base.bounds import check_flags
from base.errors import Parser, UsageError, by_reason, command_line, printable
from base.files import ROOT, named_folder
from parallel import forked_ranks
from parallel.checkpoint import attempts
from parallel.config.changes import changes
from parallel.config.run_spec import RunSpec, settings_of
from parallel.config.study import Study, load_study
from parallel.record import facts
from parallel.record.ends import COMPLETE, kind_of
from parallel.record.first_place import cause
from parallel.record.launch import Launch
from parallel.record.reader import read_run, read_status
from parallel.record.writer import RunFolder


def is_done(folder: Path, spec: RunSpec, commit: dict) -> bool:
    """Returns whether the folder holds this very run, complete, from the same code, unchanged."""
    if read_status(folder).get("state") != COMPLETE:
        return False
    try:
        run = read_run(folder)
    except UsageError:  # damaged: it is run again, and moves aside
        return False
    git = run.facts.get("git") or {}
    return (
        not changes(settings_of(run.facts), spec.settings())
        and run.facts.get("inputs") == facts.inputs(spec)
        and facts.same_code(git, commit)
        and git.get("dirty") is False  # None: no git was there
        and commit["dirty"] is False
        and run.state == COMPLETE
        and not run.missing
    )


def command_of(study: Study, name: str, folder: Path, srun: bool) -> list[str]:
    """Returns what starts the run: srun over the allocation's nodes, or this machine's launcher."""
    spec = study.run(name)
    if srun:
        nodes = study.cluster.nodes(spec.gpus) if study.cluster is not None else 1
        command = ["srun", "--nodes", str(nodes), "--ntasks", str(spec.gpus), sys.executable]
    else:
        # On CPUs forks of a process that has imported the engine start at once.
        forks = spec.device == "cpu" and not spec.compile
        command = forks and forked_ranks.prefix(spec.engine, spec.threads, spec.gpus)
        # torchrun looks once a second: after it no other rank can read how a rank ended.
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--monitor-interval=1", "--nproc-per-node", str(spec.gpus)]
        command = command or torchrun
    command += ["-m", "parallel.train", "--study", str(study.path), "--run-name", name]
    command += ["--out", str(folder)]
    return command + (["--cluster", study.cluster.name] if study.cluster is not None else [])


def start(
    study: Study, name: str, spec: RunSpec, folder: Path, srun: bool, gpus: Sequence[str]
) -> str:
    """Runs one run of the study to its end, on `gpus` where it does not have all of them. Returns
    why it failed, or "" when it is complete."""
    run_folder = RunFolder(folder)
    why_anew = attempts.why_anew(folder, spec.settings())
    if why_anew is not None and (aside := run_folder.set_aside(also=["console.out"])):
        print(f"{name}: {attempts.moved_line(aside, why_anew, spec.load)}", flush=True)
    console_out = folder / "console.out"
    began_at = console_out.stat().st_size if console_out.exists() else 0  # it goes on
    environment = forked_ranks.environment() | {"OMP_NUM_THREADS": str(spec.threads)}
    if srun:  # sbatch --export=NONE keeps it from passing the environment on
        environment["SLURM_EXPORT_ENV"] = "ALL"
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    with (
        console_out.open("ab") as console,
        subprocess.Popen(
            command_of(study, name, folder, srun),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            status = process.wait()
        except BaseException:  # Ctrl-C: the launcher got it too and ends its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            process.kill()
            raise
    if not status:
        return ""
    if not (folder / "run.json").exists():
        # It was refused before it began; the table must show it too.
        launch = Launch(0, spec.gpus, 0, spec.gpus, "sweep")
        run_folder.begin(facts.run_facts(spec, launch, facts.planned(study, name)))
        run_folder.close()
    printed = console_out.read_bytes()[began_at:].decode(errors="replace")
    line = cause(printed) or f"exit status {status}"
    run_folder.fail(kind_of(line), line.removeprefix("parallel.train: "), rank=-1)
    return f"{read_status(folder).get('reason')} (see {console_out})"


def check_inputs(study: Study, names: Sequence[str]) -> None:
    """Refuses the runs if none of them could train, for lack of data or of checkpoints, say."""
    problems = [(name, next(attempts.input_problems(study.run(name)), "")) for name in names]
    if names and all(problem for _, problem in problems):
        raise UsageError("; ".join(by_reason(problems)))


def sweep(
    study: Study,
    names: list[str],
    out: Path,
    fresh: bool,
    srun: bool = False,
    side_by_side: Sequence[str] = (),
) -> list[str]:
    """Runs the named runs into out/<name>, in this order, and returns the names of those that
    failed. A terminal shows a bar of runs. side_by_side: GPUs that runs share out; the times of
    such runs say little."""
    commit = facts.git(ROOT)
    to_train = [n for n in names if fresh or not is_done(out / n, study.run(n), commit)]
    check_inputs(study, to_train)
    failed: list[str] = []
    bar = tqdm(total=len(names), desc=study.name, unit="run", disable=None)
    free: queue.SimpleQueue[str] = queue.SimpleQueue()

    def run(number: int, name: str, gpus: Sequence[str]) -> None:
        """Trains one run on these GPUs and prints how it ended; a failed one goes into `failed`."""
        began = time.monotonic()
        if name not in to_train:
            outcome = "already complete"
        else:
            try:
                for other in study.runs[name].after:
                    if read_status(out / other).get("state") != COMPLETE:
                        waits = f"it waits for {other}, which is not complete"
                        raise UsageError(f"not trained: {waits}")
                reason = start(study, name, study.run(name), out / name, srun, gpus)
            except UsageError as error:
                reason = str(error)
            outcome = f"complete in {time.monotonic() - began:.0f} s"
            if reason:
                outcome = f"FAILED: {reason}"
                failed.append(name)
        tqdm.write(printable(f"[{number}/{len(names)}] {name}: {outcome}"))
        sys.stdout.flush()
        bar.update()

    def give_back(gpus: Sequence[str]) -> None:
        for gpu in gpus:
            free.put(gpu)

    give_back(side_by_side)
    with bar, ThreadPoolExecutor(max(1, len(side_by_side))) as pool:
        tasks: dict[str, Future[None]] = {}
        for number, name in enumerate(names, start=1):
            if not side_by_side:
                run(number, name, ())
                continue
            wait(tasks[other] for other in study.runs[name].after if other in tasks)
            gpus = [free.get() for _ in range(study.run(name).gpus)]
            tasks[name] = pool.submit(run, number, name, gpus)
            tasks[name].add_done_callback(lambda _, gpus=gpus: give_back(gpus))
        for task in tasks.values():
            task.result()
    return failed


def report(studies: Sequence[Path]) -> None:
    """Has analysis print the table of the studies' folders and write study.html into each, in
    processes of its own, side by side: it decides what is comparable."""
    commands = [("tflops", *studies), *(("page", folder) for folder in studies)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", f"analysis.{command}", *map(str, paths)],
            env=forked_ranks.environment(),
            stdin=subprocess.DEVNULL,
        )
        for command, *paths in commands
    ]
    for process in processes:
        process.wait()


def runs_of(study: Study, arguments: Namespace) -> list[str]:
    """Returns the names of the runs that were asked for, each of which can start, behind those that
    it waits for; and prints what is left out."""
    for line in study.assumed:
        print(line, flush=True)
    for line in by_reason(study.left_out):
        print(f"left out: {line}", flush=True)
    names = arguments.only or (study.quick if arguments.quick else list(study.runs))
    if not names:
        raise UsageError(f"{study.path} has no quick runs: quick = [NAME, ...] names them")
    larger = [n for n in names if study.run(n).gpus > (arguments.max_gpus or math.inf)]
    if larger:
        print(f"left out: more than {arguments.max_gpus} GPUs: {', '.join(larger)}")
    waits: dict[str, int] = {}  # the length of each run's chain; sorting by it keeps other orders
    for name, run in study.runs.items():
        waits[name] = max((waits[other] + 1 for other in run.after), default=0)
    return sorted((name for name in names if name not in larger), key=waits.__getitem__)


@command_line("parallel.sweep")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m parallel.sweep", description=__doc__)
    help = "a study file; several are trained one after the other"
    parser.add_argument("studies", nargs="+", type=Path, metavar="TOML", help=help)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--only", nargs="+", metavar="NAME", help="these runs of one study")
    help = "the runs that each study calls quick, those that tell most"
    choice.add_argument("--quick", action="store_true", help=help)
    parser.add_argument("--max-gpus", type=int, metavar="N", help="leave out runs of more GPUs")
    help = "the cluster of clusters.toml to plan nodes for (default: the study's own)"
    parser.add_argument("--cluster", metavar="NAME", help=help)
    help = "runs are in DIR/<study>/<run> (default: logs)"
    parser.add_argument("--logs", type=named_folder, default="logs", metavar="DIR", help=help)
    parser.add_argument("--fresh", action="store_true", help="run what is complete again, too")
    help = "start ranks by srun, inside an allocation"
    parser.add_argument("--srun", action="store_true", help=help)
    arguments = parser.parse_args(argv)
    check_flags(arguments, max_gpus=(1, 2**20))
    studies = [load_study(path, arguments.cluster) for path in arguments.studies]
    if arguments.only and len(studies) > 1:
        raise UsageError(f"--only names runs of one study, not of {len(studies)}")
    if len({study.name for study in studies}) < len(studies):
        raise UsageError("studies of one name would share a folder: train them one by one")
    chosen = [(study, runs_of(study, arguments)) for study in studies]  # before the first starts
    folders = [arguments.logs / study.name for study in studies]
    failed: list[str] = []
    for (study, names), out in zip(chosen, folders, strict=True):
        failed += sweep(study, names, out, arguments.fresh, arguments.srun)
    report(folders)
    if failed:
        total = sum(len(names) for _, names in chosen)
        print(f"{len(failed)} of {total} runs failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
