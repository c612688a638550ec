r"""Trains one GPT with one engine and one split.

    torchrun --nproc-per-node 8 -m parallel.train --study slurm/parity.toml \
        --run-name megatron-tp2-pp2-dp2
    torchrun --nproc-per-node 2 -m parallel.train --engine ddp --preset small --steps 100
    deepspeed --module parallel.train --engine deepspeed_zero --zero-stage 2 --preset gpt2-124m
    srun --ntasks 8 python -m parallel.train --engine megatron --tp 4 --pp 2 --preset 1.7b
    python -m parallel.train --engine megatron --gpus 512 --tp 8 --pp 8 --preset 175b --check

dp follows from the number of ranks. Flags override the study, the study overrides a DeepSpeed JSON.
The run folder (--out, default logs/<study>/<run>) gets run.json, train.log, steps.csv and, when
the run completes, training_metrics.json and RUN_COMPLETE.txt. A folder that no run wrote is
refused; an earlier attempt moves to attempts/.

With --save-interval N the state is saved every N steps, at the end, and when SIGTERM, SIGHUP or
SIGUSR1 comes; then the exit status is 75 (try again) and status.json says interrupted. The same
command resumes from the newest checkpoint of a stopped attempt; with more --steps, from that of a
complete one.
"""
# ruff: noqa: E402

import argparse
import contextlib
import json
import os
import random
import sys
import time
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

STARTED = time.perf_counter()

# The clock starts before the imports.
from base.errors import Parser, UsageError, command_line, warn
from base.files import named_folder, read_json
from base.storage import write_json
from parallel.checkpoint import attempts, folders
from parallel.config import library_variables
from parallel.config.engine_abilities import kernels_of
from parallel.config.resolve import add_flags, from_flags, resolve
from parallel.config.run_spec import DEFAULTS, RunSpec, settings_of
from parallel.config.study import choose_runs, load_study
from parallel.record.ends import CONSEQUENCES, Kind, kind_of_error
from parallel.record.facts import launcher_metadata, planned, ranks_per_node, run_facts
from parallel.record.first_end import Siblings, process_number
from parallel.record.launch import (
    Launch,
    detect,
    end_with_launcher,
    rendezvous_environment,
    signal_words,
    tell_torchrun,
)
from parallel.record.reader import read_status
from parallel.record.schema import TOLD, checked_facts
from parallel.record.signals import Interruption, on_signals
from parallel.record.writer import RunFolder, check_folder

if TYPE_CHECKING:
    from parallel.trainer import Job


class Flags(Parser):
    """A parser that raises UsageError for a wrong flag, so that `run` prints it once per node."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the flags)")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Flags(prog="python -m parallel.train", description=__doc__)
    parser.add_argument("--study", type=Path, metavar="TOML", help="a study file ...")
    parser.add_argument("--run-name", dest="run", metavar="NAME", help="... and which of its runs")
    help = "the run as slurm.render resolved it for its job, in place of --study"
    parser.add_argument("--planned", type=Path, metavar="FILE", help=help)
    help = "the cluster to plan nodes for or, with --check, to check for (default: the study's)"
    parser.add_argument("--cluster", metavar="NAME", help=help)
    help = "the run folder (default: logs/<study>/<run>)"
    parser.add_argument("--out", type=named_folder, metavar="DIR", help=help)
    parser.add_argument("--check", action="store_true", help="print the resolved run; no start")
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # deepspeed's
    add_flags(parser)
    return parser.parse_args(argv)


class AskedRun(NamedTuple):
    """The run that the flags and the study ask for, what is known of it before it starts
    (facts.OF_STUDY, or its name alone), and its folder."""

    spec: RunSpec
    plan: dict[str, Any]
    folder: Path


def choose(arguments: argparse.Namespace, launch: Launch) -> AskedRun:
    """Returns the run that the flags and the study ask for."""
    # --check may ask about 512 GPUs from a laptop; a real run has the ranks that were started.
    gpus = None if arguments.check and launch.launcher == "none" else launch.world_size
    if arguments.study is not None and arguments.run is None:
        names = ", ".join(load_study(arguments.study, arguments.cluster).runs)
        raise UsageError(f"--run-name is missing; {arguments.study} has: {names}")
    names = [arguments.run] if arguments.run else arguments.run
    flags = from_flags(arguments)
    if path := arguments.planned:
        if flags or arguments.study or arguments.run or arguments.cluster:
            raise UsageError(f"--planned {path} is the whole run: give it --out or --check alone")
        plan = checked_facts(read_json(path), path)
        settings = settings_of(plan)
        if not (unknown := settings.keys() - DEFAULTS.keys()):
            spec = resolve((str(path), settings), gpus=gpus)
            unknown = spec.as_facts()["spec"].keys() - settings.keys()
        if unknown:
            raise UsageError(
                f"{path} is of another version, with other settings"
                f" ({', '.join(sorted(unknown)[:3])}): submit the run again"
            )
        return AskedRun(spec, plan, arguments.out or path.parent)
    choice = choose_runs(arguments.study, names, flags, arguments.cluster, gpus, arguments.check)
    ((run, spec),), study = choice.runs.items(), choice.study
    if arguments.check and (needing := spec.needing_a_gpu):
        place = f"cluster {choice.cluster.name}" if choice.cluster else "a machine that has one"
        warn("parallel.train", f"{needing} needs a GPU: this run is checked for {place}")
    if study and spec != study.run(run, gpus=gpus) and not arguments.out:
        raise UsageError(
            f"the flags make another run than {arguments.study}'s {run}; say where it goes with"
            " --out DIR"
        )
    folder = arguments.out or Path("logs") / (study.name if study else "runs") / run
    plan = planned(study, run) if study else {"run": run, "configuration": run}
    return AskedRun(spec, plan, folder)


@command_line("parallel.train")
def main(argv: list[str] | None = None) -> int:
    with on_signals() as interruption:  # first: a signal while torch loads counts, too
        return run(argv, interruption)


def run(argv: list[str] | None, interruption: Interruption) -> int:
    """Does what `main` does, with the signals handled."""
    local_rank = 0
    with contextlib.suppress(UsageError):  # the launcher's variables may be the mistake
        local_rank = detect().local_rank
    try:
        arguments = parse(argv)
        launch = detect()
        spec, plan, path = choose(arguments, launch)
        if arguments.check:
            check_inputs(spec)
            model = spec.trained.as_dict() | {"n_params": spec.model.n_params}
            described = {"run": plan["run"], "folder": str(path), "model": model}
            print(json.dumps(described | spec.settings()))
            return 0
        return train(spec, plan, path, launch, interruption)
    except UsageError as error:
        # Once per node: another node may have what this one lacks, its data for example.
        if local_rank == 0:
            print(f"parallel.train: {error}", file=sys.stderr, flush=True)
        tell_torchrun(f"parallel.train: {error}", 0.0 if local_rank == 0 else 2.0)
        return 2


def check_inputs(spec: RunSpec) -> None:
    """Refuses data or a checkpoint as the start would; a line says where they are not here."""
    if Path(spec.data).exists() or Path(f"{spec.data}.idx").exists():
        from parallel import token_files

        data = token_files.load(spec.data, spec.seq_len, spec.model.vocab_size)
        if data.train.sha256 is None:
            line = f"{spec.data} is large: the run reads and checks it, not --check"
            warn("parallel.train", line)
    else:
        warn("parallel.train", f"no token files at {spec.data} here: they are not checked")
    if spec.load is not None and not Path(spec.load).exists():
        warn("parallel.train", f"no checkpoint at {spec.load} here: it is not checked")
    elif spec.load is not None:
        attempts.check_first(spec, folders.candidates(Path(spec.load))[0])


def train(
    spec: RunSpec, plan: Mapping[str, Any], path: Path, launch: Launch, interruption: Interruption
) -> int:
    """Checks what needs torch, forms the process group, and runs. Returns 0 only when the run truly
    completed, TRY_AGAIN when it was interrupted and its state saved, 1 when it ended in NaN."""
    facts = {}
    if launch.rank == 0:
        check_folder(path)
        facts = run_facts(spec, launch, plan)
    end_with_launcher(launch)
    variables = set_environment(spec, launch)

    import numpy
    import torch

    from parallel import token_files
    from parallel.engines import cpu, devices, kernels
    from parallel.trainer import Job

    torch.set_num_threads(spec.threads)
    # Nothing draws from these after the start, but a run must not differ from itself by them.
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(spec.seed + launch.rank)
    device = devices.choose_device(spec, launch)
    devices.set_arithmetic(spec, device)
    if device.type == "cpu":
        devices.check_memory(spec, ranks_per_node(launch))
        cpu.keep_freed_memory()
    if spec.compile:
        kernels.check_compiler(device)
    offered = kernels_of(spec.engine, spec.layout.tp)
    chosen = kernels.choose("te" if spec.te_alone else spec.kernels, device, offered)
    kernels.hide_others(chosen)  # before megatron-core is imported
    data = token_files.load(
        spec.data, spec.seq_len, spec.model.vocab_size, scan=launch.local_rank == 0
    )
    if launch.rank == 0:
        facts |= {"kernels": chosen, "attention": kernels.attention_of(spec, chosen, device)}
        facts["host"] |= devices.gpu_facts(device, launch)
        facts["variables"] = variables if device.type == "cuda" else {}
        facts["data"] = data.facts()
    folder = RunFolder(path)
    job = Job(spec, facts, folder, data, device, chosen, launch, interruption, STARTED)
    return train_in_folder(job)


def set_environment(spec: RunSpec, launch: Launch) -> dict[str, str]:
    """Sets what torch and the libraries read when imported; returns the variables of a GPU run."""
    os.environ.update(rendezvous_environment(launch))
    os.environ.setdefault("OMP_NUM_THREADS", str(spec.threads))
    variables = library_variables.set_variables(spec) if spec.device != "cpu" else {}
    if spec.device == "cpu":
        # Where there are GPUs they must not be seen at all: the libraries take what they see.
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    # What these libraries warn of is their own use of each other, once per rank and call site.
    if not sys.warnoptions:
        for library in ("torch", "deepspeed", "megatron", "transformers"):
            warnings.filterwarnings("ignore", module=rf"{library}\.")
    return variables


def train_in_folder(job: "Job") -> int:
    """Begins the run folder and trains: whatever ends the run is written there. Returns the exit
    status."""
    import torch.distributed

    from parallel import engines
    from parallel.engines import cpu, kernels
    from parallel.engines.devices import init_process_group
    from parallel.measure import step_parts
    from parallel.ranks import Ranks
    from parallel.trainer import Trainer

    spec, folder, device, launch = job.spec, job.folder, job.device, job.launch
    host = job.facts.get("host", {})  # rank 0's is in run.json
    source = attempts.begin(spec, job.facts, folder) if launch.rank == 0 else None
    # The other ranks know that the folder is there when they have met rank 0. Until then it writes.
    begun = launch.rank == 0
    siblings: Siblings | None = None

    def fail(kind: Kind, reason: str) -> None:
        follows = siblings and kind in (*CONSEQUENCES, Kind.COMMUNICATION)
        # A launcher sends SIGTERM after it has seen a rank end, a connection breaks before.
        if follows and (end := siblings.first_end(0.0 if kind == Kind.SIGNAL else 0.5)):
            kind, reason = end
        if begun:
            folder.fail(kind, reason, launch.rank, is_cause=kind not in CONSEQUENCES)

    def fail_by_signal(signal: str) -> None:
        fail(Kind.SIGNAL, f"{signal_words(signal)} (rank {launch.rank})")

    try:
        if launch.rank == 0:
            file = folder.path / "launcher_metadata.json"  # for its owner alone
            write_json(file, launcher_metadata(launch), 0o600)
        job.interruption.attend(fail_by_signal, spec.save_grace_s if spec.save_interval else None)
        init_process_group(spec, device, launch, lambda reason: fail(Kind.COMMUNICATION, reason))
        begun = True
        ranks = Ranks(launch.rank, launch.world_size, per_node=ranks_per_node(launch))
        siblings = Siblings(ranks.gather(process_number()), launch.rank)
        loads = ranks.gather(source is not None)[0]  # rank 0 alone knows
        if spec.layout.offload != "none" and device.type == "cuda" and spec.threads == 1:
            # AdamW updates what is offloaded on the CPU, while nothing else runs there.
            host["optimizer_threads"] = cpu.share_of_cores(ranks.gather)
            torch.set_num_threads(host["optimizer_threads"])
        if spec.megatron_layers and device.type == "cuda":
            problems = filter(None, ranks.gather(kernels.c_compiler_problem()))
            host["uncompiled"] = next(problems, "")  # all ranks compute alike
            cpu.import_megatron(compiled=not host["uncompiled"])
        recorded = step_parts.start(spec, device, launch.rank, folder.path)
        engine = engines.load(spec, device, job.kernels, draws=not loads)
        status = Trainer(job, ranks, engine, recorded).run(source)
        engine.close()
        job.interruption.attend(lambda _: None, None)  # what comes now changes no result
        torch.distributed.destroy_process_group()
        return status
    except BaseException as error:  # whatever it was, the folder must say so before we die
        line = (str(error).strip().splitlines() or [""])[0]
        reason = first_reason = f"{type(error).__name__}: {line} (rank {launch.rank})"
        is_mistake = isinstance(error, UsageError)
        if is_mistake:
            first_reason = str(error)
            # Before anything else: where another rank ends first, the launcher may end this one.
            if not begun or is_first_to_see(folder.path):
                with contextlib.suppress(OSError):  # nobody may be there to read it
                    print(f"parallel.train: {error}", file=sys.stderr, flush=True)
        fail(kind_of_error(error), reason)
        if begun and not is_mistake:
            first_reason = read_status(folder.path).get("reason", reason)
        end_by_error(error, reason, first_reason)


def is_first_to_see(folder: Path) -> bool:
    """Returns whether no rank has asked before about the mistake that ends this attempt.

    The store of the process group cannot tell: it ends with rank 0, and torch then prints why.
    """
    try:
        (folder / TOLD).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # nothing can be written; a line too many is better than none
        pass
    return True


def end_by_error(error: BaseException, reason: str, first_reason: str) -> NoReturn:
    """Prints why this rank ends, unless a mistake has been told, tells torchrun why the run did,
    and ends the process.

    sys.exit would wait: a collective that waits for this rank, or for a dead one, may keep the
    process alive.
    """
    with contextlib.suppress(OSError):  # nobody may be there to read it
        if kind_of_error(error) == Kind.DISK:
            print(f"parallel.train: {reason}", file=sys.stderr)
        elif not isinstance(error, UsageError):
            traceback.print_exc()
        tell_torchrun(f"parallel.train: {first_reason}")
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(2 if isinstance(error, UsageError) else 1)


if __name__ == "__main__":
    exit_status = main()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Everything is on disk, so Python's own teardown is left out. DeepSpeed and megatron-core hold
    # their process groups, and gloo's threads run as long. The teardown once aborted a rank of a
    # complete run ("terminate called without an active exception"); the cause was not found.
    os._exit(exit_status)
