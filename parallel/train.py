r"""Train one GPT, split as asked, through one engine.

    torchrun --nproc-per-node 8 -m parallel.train --study slurm/parity.toml \
        --run-name megatron-tp2-pp2-dp2
    torchrun --nproc-per-node 2 -m parallel.train --engine ddp --preset small --steps 100
    deepspeed --module parallel.train --engine deepspeed_zero --zero-stage 2 --preset gpt2-124m
    srun --ntasks 8 python -m parallel.train --engine megatron --tp 4 --pp 2 --preset 1.7b
    python -m parallel.train --engine megatron --gpus 512 --tp 8 --pp 8 --preset 175b --check

dp follows from the number of ranks. Flags override the study, the study overrides a DeepSpeed JSON.
The run folder (--out, default logs/<study>/<run>) gets run.json, train.log, steps.csv and, when
the run completes, training_metrics.json and RUN_COMPLETE.txt. A folder that no run wrote is
refused; an earlier attempt moves to attempts/, and a line says so and why it is not gone on with.
A run whose loss is NaN at its end has failed.

With --save-interval the state is saved every so many steps, at the end, and when SIGTERM, SIGHUP or
SIGUSR1 comes; then the exit status is 75 (try again) and status.json says interrupted. The same
command goes on from the newest checkpoint of a stopped attempt; with more --steps, from a complete
one's.
"""

import argparse
import contextlib
import itertools
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

STARTED = time.perf_counter()

# The clock starts before the imports.
from models.errors import Parser, UsageError, command_line, drop_output  # noqa: E402
from models.files import named_folder  # noqa: E402
from models.flops import tflops_per_gpu  # noqa: E402
from parallel import (  # noqa: E402
    engines,
    facts,
    heap,
    launch,
    metrics,
    saved,
    spec,
    study,
    watch,
)
from parallel.artifacts import (  # noqa: E402
    FULL,
    RunFolder,
    check_folder,
    read_breakdown,
    read_json,
    read_run,
    read_status,
)

TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: interrupted, and saved


class Flags(Parser):
    """A wrong flag ends a rank as every mistake does, so that `run` says it once per node."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the flags)")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Flags(
        prog="python -m parallel.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--study", type=Path, metavar="TOML", help="a study file ...")
    # Before Python 3.12.8, torchrun takes a bare --run for its own --run-path and stops.
    parser.add_argument(
        "--run-name", "--run", dest="run", metavar="NAME", help="... and which of its runs"
    )
    parser.add_argument(
        "--cluster", metavar="NAME", help="whose nodes the study counts (default: the study's own)"
    )
    parser.add_argument("--out", type=named_folder, metavar="DIR", help="the run folder")
    parser.add_argument(
        "--check", action="store_true", help="print the resolved run; start nothing"
    )
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # deepspeed's
    spec.add_flags(parser)
    return parser.parse_args(argv)


def choose(
    arguments: argparse.Namespace, place: launch.Launch
) -> tuple[spec.RunSpec, dict[str, Any], Path]:
    """The run that the flags and the study ask for, its facts, and its folder."""
    flags = spec.from_flags(arguments)
    # --check may ask about 512 GPUs from a laptop; a real run has the ranks that were started.
    gpus = None if arguments.check and place.launcher == "none" else place.world_size
    if arguments.study is None:
        if arguments.run is not None:
            raise UsageError("--run-name names a run of a study: give --study too")
        chosen = spec.resolve(("command line", flags), gpus=gpus)
        study_name, run, baseline, repeat_of = None, study.name_alone(chosen, flags), None, None
    else:
        the_study = study.load_study(arguments.study, arguments.cluster)
        if arguments.run is None:
            raise UsageError(
                f"--run-name is missing; {arguments.study} has: {', '.join(the_study.settings)}"
            )
        chosen = the_study.run(arguments.run, flags, gpus)
        if flags and chosen != the_study.run(arguments.run, gpus=gpus) and not arguments.out:
            raise UsageError(
                f"the flags make another run than {arguments.study}'s {arguments.run};"
                " say where it goes with --out DIR"
            )
        study_name, run, baseline = the_study.name, arguments.run, the_study.baseline
        repeat_of = the_study.repeat_of.get(run)
    folder = arguments.out or Path("logs") / (study_name or "runs") / run
    return chosen, facts.run_facts(chosen, study_name, run, baseline, place, repeat_of), folder


@command_line("parallel.train")
def main(argv: list[str] | None = None) -> int:
    with watch.on_signals() as asked:  # first: one that comes while torch loads counts, too
        return run(argv, asked)


def run(argv: list[str] | None, asked: watch.Interruption) -> int:
    """`main`, once signals are listened to."""
    try:
        arguments = parse(argv)
        place = launch.detect()
        run_spec, run_json, path = choose(arguments, place)
        if arguments.check:
            print(json.dumps({"run": run_json["run"], "folder": str(path), **run_json["spec"]}))
            return 0
        return train(run_spec, run_json, path, place, asked)
    except UsageError as error:
        # Once per node, for what a node lacks (its data, say) another may have.
        local_rank = 0
        with contextlib.suppress(UsageError):  # what the launcher says may be the mistake
            local_rank = launch.detect().local_rank
        if local_rank == 0:
            print(f"parallel.train: {error}", file=sys.stderr, flush=True)
        launch.tell_torchrun(f"parallel.train: {error}", 0.0 if local_rank == 0 else 2.0)
        return 2


def train(
    run_spec: spec.RunSpec,
    run_json: dict[str, Any],
    path: Path,
    place: launch.Launch,
    asked: watch.Interruption,
) -> int:
    """Check what needs torch, form the process group, and run; 0 only when it truly completed,
    TRY_AGAIN when it was interrupted and its state saved, 1 when it ended in NaN.

    Raises:
        UsageError: the device or the data are not what the run needs; before any group is formed.
    """
    if place.rank == 0:
        check_folder(path)
    launch.end_with_launcher(place)
    os.environ.update(launch.rendezvous_environment(place))
    os.environ.setdefault("OMP_NUM_THREADS", str(run_spec.threads))
    if run_spec.device == "cpu":
        # Where there are GPUs they must not be seen at all: the libraries take what they see.
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}

    # What these libraries warn of is their own use of each other, once per rank and call site.
    if not sys.warnoptions:
        for library in ("torch", "deepspeed", "megatron", "transformers"):
            warnings.filterwarnings("ignore", module=rf"{library}\.")

    import torch

    from parallel import breakdown, checkpointer, data, kernels

    torch.set_num_threads(run_spec.threads)
    # Nothing draws from these after the start, but a run must not differ from itself by them.
    checkpointer.seed_random(run_spec.seed + place.rank)
    device = choose_device(run_spec, place)
    if device.type == "cpu":
        heap.keep()
    if run_spec.compile:
        kernels.check_compiler(device)
    corpus = data.load(run_spec.data, run_spec.seq_len, run_spec.model.vocab_size)
    run_json["data"] = {
        "path": corpus.train.path,
        "tokenizer": corpus.train.tokenizer,
        "vocab_size": corpus.train.vocab_size,
        "train_tokens": len(corpus.train.ids),
        "val_tokens": len(corpus.val.ids),
        "sha256": corpus.train.sha256 or (corpus.train.digest() if place.rank == 0 else None),
    }
    run_json["host"] |= {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "gpus_visible": gpus_on_node(place) if device.type == "cuda" else 0,
        "cuda": torch.version.cuda,
    }
    run_json["kernels"] = kernels.choose(run_spec.kernels, device, engines.kernels_of(run_spec))
    folder = RunFolder(path)
    source = None
    if place.rank == 0:
        source = begin(run_spec, run_json, folder)
    began = place.rank == 0  # the others know that the folder is there when they have met rank 0
    grace_s = run_spec.save_grace_s if run_spec.save_interval else None
    try:
        if place.rank == 0:
            folder.launcher(facts.launcher_metadata(place))

        def say(what: str) -> None:
            # Before, rank 0 says why: its mistake ended the others, or it has the signal too.
            if began:
                folder.fail(f"{launch.whose(what)} (rank {place.rank})", place.rank)

        asked.attend(say, grace_s)
        init_process_group(
            run_spec, device, place, lambda reason: began and folder.fail(reason, place.rank)
        )
        began = True
        books = breakdown.start(run_spec, device, place.rank, folder.path)
        engine = engines.load(run_spec, device, run_json["kernels"])
        status = loop(
            run_spec, run_json, folder, engine, corpus, device, place, books, source, asked
        )
        engine.close()
        asked.attend(lambda _: None, None)  # what comes now changes no result
        torch.distributed.destroy_process_group()
        return status
    except BaseException as error:  # whatever it was, the folder must say so before we die
        line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        reason = f"{type(error).__name__}: {line} (rank {place.rank})"
        if began:
            folder.fail(reason, place.rank)
        if isinstance(error, UsageError):
            reason = str(error)
        full = isinstance(error, OSError) and error.errno in FULL  # no fault of the code
        with contextlib.suppress(OSError):  # nobody may be there to read it
            if isinstance(error, UsageError) or full:
                print(f"parallel.train: {reason}", file=sys.stderr)
            else:
                traceback.print_exc()
            if began and not isinstance(error, UsageError):
                reason = read_status(folder.path).get("reason", reason)  # the first one
            launch.tell_torchrun(f"parallel.train: {reason}")
            sys.stdout.flush()
            sys.stderr.flush()
        # Not sys.exit: a collective that waits for us, or for a dead peer, must not keep us alive.
        os._exit(2 if isinstance(error, UsageError) else 1)


def begin(run_spec: spec.RunSpec, run_json: dict[str, Any], folder: RunFolder) -> Path | None:
    """Begin the run folder; the checkpoint, or folder of checkpoints, to go on from, if any.

    Raises:
        UsageError: the folder is no run's, or another process writes it; the folder to save to
            holds another run's checkpoints, or later ones than the one to load, which would be
            taken for this run's; or there is none to load, or none before the last step.
    """
    settings, save = run_spec.settings(), saved.save_folder(folder.path, run_spec.settings())
    why_anew = saved.why_not_resumed(folder.path, settings)
    if why_anew is None:
        return go_on(run_spec, run_json, folder)
    load = None if run_spec.load is None else Path(run_spec.load).absolute()
    inside = folder.path.absolute()
    if load is not None and load.is_relative_to(inside) and not saved.any_at(load):
        # An attempt that began from there moved it aside, and was stopped before it saved.
        load = Path(read_json(folder.path / "run.json").get("loaded") or load)
    if run_spec.save and run_spec.save_interval and (steps := saved.steps_in(save)):
        start = None if load is None else saved.candidates(load)[0]
        if start is None or start.parent.resolve() != save.resolve():
            raise UsageError(
                f"{save} holds checkpoints already; go on from them with --load, or give another"
                " --save"
            )
        if (saved.step_of(start) or 0) < steps[-1]:  # weights alone begin at step 0
            raise UsageError(
                f"{save} holds checkpoints to step {steps[-1]}; to go on from {start.name}, give"
                " another --save"
            )
    if load is not None:
        start = saved.candidates(load)[0]  # nothing there: say so before there is a folder
        if (saved.step_of(start) or 0) >= run_spec.steps and not run_spec.load_previous:
            raise UsageError(nothing_to_train(run_spec, start.name))
    with folder.locked():
        if aside := folder.set_aside():
            if load is not None and load.is_relative_to(inside):
                moved = aside / load.relative_to(inside)  # it was of the attempt just set aside
                load = moved if moved.exists() else load
        run_json["loaded"] = None if load is None else str(load)
        folder.begin(run_json)
    if aside:
        note(folder, saved.moved_line(aside, why_anew, load))
    return load


def go_on(run_spec: spec.RunSpec, run_json: dict[str, Any], folder: RunFolder) -> Path:
    """Begin an attempt that goes on where the one before left a checkpoint; the folder of them."""
    before, reason = read_json(folder.path / "run.json"), "status.json is missing or damaged"
    if read_status(folder.path):
        reason = read_run(folder.path).reason  # a process that is gone, say
    steps = before["spec"]["steps"]
    ended = {"started_utc": before.get("started_utc"), "reason": reason, "steps": steps}
    run_json["attempts"] = [*before.get("attempts", []), ended]
    run_json["loaded"] = before.get("loaded")
    run_json["profiler"] = run_json["profiler"] or before.get("profiler")
    aside = folder.begin(run_json, go_on=True)
    if aside is not None:
        note(folder, f"the result after {steps} steps is kept in {aside}")
    if steps != run_spec.steps:
        line = f"this run goes on to step {run_spec.steps}; the earlier attempt planned {steps}"
        if run_spec.lr_schedule != "constant":
            line += f"; its learning rates were those of {steps} steps"
        note(folder, line)
    return saved.save_folder(folder.path, run_spec.settings())


def other_schedules(attempts: list[dict[str, Any]], steps: int, begin: int) -> str:
    """Which steps from `begin` on had the learning rates of a run of other than `steps` steps, in
    words; "" where none had.

    attempts: the earlier ones, oldest first: the `steps` of each and, where the next one loaded a
    checkpoint, its step, `kept_to`.
    """
    spans: list[list[int]] = []  # [steps of the schedule, first step, last step]
    for number, attempt in enumerate(attempts):
        last = min(later["kept_to"] for later in attempts[number:] if "kept_to" in later)
        if last < begin:
            continue
        if spans and spans[-1][0] == attempt["steps"]:
            spans[-1][2] = last
        else:
            spans.append([attempt["steps"], begin, last])
        begin = last + 1
    told = [
        f"steps {first} to {last} were trained with the learning rates of a run of {of} steps"
        for of, first, last in spans
        if of != steps
    ]
    return f"goes on to step {steps}; {', '.join(told)}" if told else ""


def note(folder: RunFolder, line: str) -> None:
    """Say what was done with the folder, in its log and on the console."""
    folder.log(f" {line}")
    tell(folder, line)


def tell(folder: RunFolder, line: str, on_terminal: bool = False) -> None:
    """Print a line, beside tqdm's bar where there is one; a lost console is noted in the log."""
    from tqdm import tqdm

    try:
        tqdm.write(line) if on_terminal else print(line, flush=True)
    except OSError as error:
        drop_output()  # nobody reads it any more, or its disk is full: the log has the lines
        folder.log(f" the console takes no more lines: {error.strerror}")


def nothing_to_train(run_spec: spec.RunSpec, start: str) -> str:
    return f"{start} is the state after all of the run's {run_spec.steps} steps: give more --steps"


def choose_device(run_spec: spec.RunSpec, place: launch.Launch) -> Any:
    """This rank's torch.device.

    Raises:
        UsageError: CUDA was asked for and is not there, or fp16 on a CPU.
    """
    import torch

    there = torch.cuda.is_available()
    if run_spec.device == "cuda" and not there:
        raise UsageError("device cuda was asked for, but torch sees no GPU")
    if run_spec.device == "cpu" or not there:
        if run_spec.precision == "fp16":
            raise UsageError("fp16 needs a GPU and torch sees none; use fp32 or bf16")
        return torch.device("cpu")
    if place.local_world_size > (visible := gpus_on_node(place)):
        raise UsageError(
            f"{place.local_world_size} ranks on this node, but {visible} GPUs visible;"
            " start one rank per GPU, or use --device cpu"
        )
    index = place.local_rank if torch.cuda.device_count() > 1 else 0
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def gpus_on_node(place: launch.Launch) -> int:
    """GPUs that this node's ranks have; srun --gpus-per-task=1 shows each task its own alone."""
    import torch

    visible = torch.cuda.device_count()
    return place.local_world_size if place.launcher == "srun" and visible == 1 else visible


def init_process_group(
    run_spec: spec.RunSpec, device: Any, place: launch.Launch, say: Callable[[str], None]
) -> None:
    """gloo on CPU; on CUDA, NCCL for GPU tensors and gloo for the rest.

    Raises:
        UsageError: rank 0 cannot listen at the master's port. Where another program does, the
            other ranks would wait for its answer: after timeout_s they end, with `say` of why.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    timeout = timedelta(seconds=run_spec.timeout_s)
    # Every group that a library or we make without a limit of its own has this one.
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    alone = {"store": dist.HashStore()} if place.world_size == 1 else {}
    master = ":".join(os.environ.get(f"MASTER_{of}", "?") for of in ("ADDR", "PORT"))
    reason = (
        f"rank {place.rank} did not meet the other {place.world_size - 1} ranks at {master} within"
        f" {run_spec.timeout_s:g} s: not all of them came, or another program holds that port"
    )
    try:
        with watch.deadline(run_spec.timeout_s, reason, say):
            dist.init_process_group(
                backend, timeout=timeout, rank=place.rank, world_size=place.world_size, **alone
            )
    except dist.DistNetworkError as error:
        line = str(error).splitlines()[0]
        raise UsageError(f"{reason}; set MASTER_PORT to a free one ({line})") from error


def loop(
    run_spec: spec.RunSpec,
    run_json: dict[str, Any],
    folder: RunFolder,
    engine: engines.Engine,
    corpus: Any,
    device: Any,
    place: launch.Launch,
    books: Any,
    source: Path | None,
    asked: watch.Interruption,
) -> int:
    """Train for run_spec.steps optimizer steps; rank 0 logs and, at the end, says complete.

    books: the breakdown of time, or None. source: rank 0's checkpoint to go on from.
    The exit status: TRY_AGAIN when interrupted, with the state saved; rank 0's is 1 after NaN.

    Raises:
        UsageError: the checkpoint to go on from is none, damaged, another model's or at the end.
        OSError: the disk did not take the run's end.
    """
    from tqdm import tqdm

    from parallel import breakdown, data, meters, profiler, ranges
    from parallel.checkpointer import Checkpointer
    from parallel.clock import Clock
    from parallel.optim import lr_at

    layout, seq_len, model = run_spec.layout, run_spec.seq_len, run_spec.model
    dp_rank = layout.coords(place.rank)["dp"]
    chief = place.rank == 0
    on_terminal = chief and sys.stdout.isatty()
    waited = [0.0]  # seconds rank 0 spent making batches

    def batches(tokens: data.Tokens, step: int) -> Iterator[engines.Batch]:
        made = data.batches(tokens, layout, seq_len, model.vocab_size, dp_rank, run_spec.seed, step)
        while True:
            before = time.perf_counter()
            with ranges.region("data"):
                batch = next(made, None)
            waited[0] += time.perf_counter() - before
            dog.tick()
            if batch is None:
                return
            with ranges.region("move"):
                moved = tuple(t.to(device, non_blocking=True) for t in batch)
            yield moved

    def validate() -> float | None:
        """Loss on held-out text; the same sequences every time."""
        if run_spec.eval_steps == 0:
            return None
        held_out = itertools.chain.from_iterable(
            batches(corpus.val, number) for number in range(run_spec.eval_steps)
        )
        with ranges.validation():
            return engine.evaluate(held_out, run_spec.eval_steps * layout.n_micro)

    def say(line: str) -> None:
        folder.log(line)
        tell(folder, line, on_terminal)

    def check(step: int) -> None:
        """Validate after `step` steps, and say so."""
        waited_for_training = waited[0]
        val_loss = validate()
        waited[0] = waited_for_training
        if val_loss is not None:
            validations.append((step, val_loss))
        if chief and val_loss is not None:
            say(
                f" validation loss at iteration {step} |"
                f" lm loss value: {val_loss:.6E} |"
                f" lm loss PPL: {perplexity(val_loss):.6E} |"
            )

    def report() -> str:
        """Say which saves and loads have ended; what went wrong with the last, if it did."""
        problem = ""
        for event in saver.events():
            problem = event.problem
            say(event.line())
            folder.checkpoint(vars(event))
        return problem

    if chief:
        run_json["engine"] = engine.describe()
        folder.update(run_json)
        for line in preamble(run_spec, run_json):
            say(line)
    hang = folder.path / "hang"
    dog = watch.Watchdog(
        hang,
        place.rank,
        place.world_size,
        run_spec.hang_after_s,
        lambda reason: folder.fail(reason, place.rank),
    )
    save_to = saved.save_folder(folder.path, run_spec.settings())
    saver = Checkpointer(
        engine, run_spec, run_json, save_to, place.rank, place.world_size, dog.tick
    )
    bar = tqdm(total=run_spec.steps, desc=run_json["run"], unit="step", disable=not on_terminal)
    # Inside `nsys profile` the ranges are there without being asked for.
    mode = run_spec.profile_mode
    mode = "nvtx" if mode == "none" and run_json["profiler"] else mode
    rows: list[dict[str, Any]] = []
    skipped = nans = 0
    since_line, validations = [], []
    evaluation_s = checkpoint_s = earlier_s = 0.0
    with dog, contextlib.ExitStack() as profiling:
        watch.forget(hang)
        if source is not None:
            say(f" loading checkpoint from {source}")
        first = saver.load(source)
        report()
        if chief and "attempts" in run_json:
            rows = [row for row in read_run(folder.path).steps if row["step"] <= first]
            earlier_s = sum(row["step_s"] for row in rows)
            run_json["attempts"][-1]["kept_to"] = first
            begin_at = rows[0]["step"] if rows else 1
            told = other_schedules(run_json["attempts"], run_spec.steps, begin_at)
            if told and run_spec.lr_schedule != "constant":
                run_json["go_on"] = told
            folder.update(run_json)
        bar.update(first)
        if chief and first == run_spec.steps and not rows:
            raise UsageError(nothing_to_train(run_spec, saved.name_of(first)))
        if first == run_spec.steps:
            check(first)
        if chief and mode == "torch" and first >= spec.profiled_steps(run_spec)[1]:
            say(f" no trace: the profile_steps {run_spec.profile_steps} are over")
        profile = profiling.enter_context(
            profiler.attach(run_spec, mode, device, place.rank, folder.path, first)
        )
        clock = Clock(device)
        if books:
            books.forget()  # the engine was built
        energy = meters.Energy(meters.visible_gpus(device))
        startup_s = time.perf_counter() - STARTED
        for step in range(first, run_spec.steps):
            lr = lr_at(run_spec, step)
            result = engine.step(batches(corpus.train, step), lr)
            step_s = clock.lap()
            if books:
                books.lap(step + 1, step_s)
            skipped += result.skipped
            nans += result.loss != result.loss
            if chief:
                row = {
                    "step": step + 1,
                    "step_s": step_s,
                    "lr": lr,
                    "skipped": int(result.skipped),
                    "tokens": run_spec.tokens_per_step,
                    "loss": result.loss,
                    "grad_norm": result.grad_norm,
                    "loss_scale": result.loss_scale,
                }
                rows.append(row)
                folder.step(row)
                since_line.append(row)
                if (step + 1) % run_spec.log_interval == 0 or step + 1 == run_spec.steps:
                    line = iteration_line(run_spec, since_line, skipped, nans)
                    folder.log(line)
                    if on_terminal:
                        bar.set_postfix_str(f"loss {result.loss:.4f}")
                    else:
                        tell(folder, line)
                    since_line, skipped, nans = [], 0, 0
                bar.update()
            last = step + 1 == run_spec.steps
            if last or (run_spec.eval_interval and (step + 1) % run_spec.eval_interval == 0):
                energy.count()
                check(step + 1)
                evaluation_s += clock.lap()  # validation is not training time
                energy.skip()
                if books:
                    books.forget()
            profile.step()
            if run_spec.save_interval:
                energy.count()
                stop = saver.agree(bool(asked.signal)) and not last
                if stop or saver.due(step + 1):
                    if chief:
                        say(f" saving checkpoint at iteration {step + 1} to {save_to}")
                        with contextlib.suppress(OSError):  # a full disk ends no training
                            folder.sync()  # who goes on from there has the rows up to there
                    saver.save(step + 1)
                if stop or last:
                    saver.wait()
                problem = report()
                if stop:
                    if chief:
                        what = f"could not save: {problem}" if problem else f"saved step {step + 1}"
                        heard = launch.whose(asked.signal or "a signal to another rank")
                        reason = f"{heard}, {what}"
                        say(f" interrupted by {reason}; the same command goes on")
                        folder.interrupt(reason)
                    return TRY_AGAIN
                checkpoint_s += clock.lap()  # nor is saving
                energy.skip()
                if books:
                    books.forget()
    bar.close()
    peak = meters.peak_memory(device)
    peak_all = meters.most_of_all_ranks(peak)  # complete means: every rank got here
    exposed_s = None
    if chief and books:
        every_rank, _ = read_breakdown(folder.path, place.world_size)
        exposed_s = metrics.exposed_s(every_rank, place.world_size, run_spec.steps)
        lines = breakdown.epoch_lines(run_spec, every_rank, rows, validations)
        folder.epochs(lines)
        for line in lines:
            say(line)
    if chief and (broken := metrics.ended_in_nan(rows, validations)):
        folder.fail(broken, 0)
        folder.close()
        print(f"parallel.train: {broken}", file=sys.stderr, flush=True)
        launch.tell_torchrun(f"parallel.train: {broken}")
        return 1
    if chief:
        measured = metrics.Measured(
            startup_s=startup_s,
            evaluation_s=evaluation_s,
            checkpoint_s=checkpoint_s,
            wall_s=time.perf_counter() - STARTED + earlier_s,
            data_s=None if "attempts" in run_json else waited[0],
            peak=peak,
            peak_all=peak_all,
            validations=validations,
            exposed_communication_s=exposed_s,
            energy_j=energy.joules,
            energy_source=energy.source,
        )
        n_saves, failed, remark = 0, [], ""
        try:
            n_saves, failed = folder.saves()
        except UsageError as error:  # an earlier attempt's file: no reason to fail now
            remark = str(error)
        found = metrics.training_metrics(run_json, rows, measured)
        found["summary"] |= {"saves": n_saves, "failed_saves": len(failed)}
        if failed:
            remark = f"{len(failed)} of {n_saves} saves failed, the last: {failed[-1]}"
        marker = metrics.complete_marker(folder.path, found)
        folder.complete(found, marker, remark)
        tell(folder, marker, on_terminal)
    return 0


def preamble(run_spec: spec.RunSpec, run_json: dict[str, Any]) -> list[str]:
    """What the log says once, before the first iteration."""
    model, layout = run_json["model"], run_json["layout"]
    lines = [
        f"run {run_json['run']}: engine {run_spec.engine}, {model['n_params']:,} parameters,"
        f" tp {layout['tp']} pp {layout['pp']} vpp {layout['vpp']} dp {layout['dp']},"
        f" {layout['n_micro']} micro-batches of {layout['micro_batch']},"
        f" seq_len {run_spec.seq_len}, {run_spec.precision}",
        f"kernels: {run_json['kernels']}",
        f"watchdog: no progress for {run_spec.hang_after_s:g} s ends the run",
    ]
    if run_spec.deepspeed_config:
        lines.append(
            f"from {run_spec.deepspeed_config}: all but its optimizer and scheduler; AdamW and the"
            " run's own schedule are the same in every engine"
        )
    if model["padded_vocab"] != model["vocab_size"]:
        lines.append(
            f"vocabulary padded from {model['vocab_size']} to {model['padded_vocab']} rows for"
            f" tp {layout['tp']}; the added logits are masked"
        )
    return lines


def iteration_line(
    run_spec: spec.RunSpec, rows: list[dict[str, Any]], skipped: int, nans: int
) -> str:
    """Megatron-LM's iteration line over `rows`, the steps since the last one."""
    last = rows[-1]
    step_s = sum(r["step_s"] for r in rows) / len(rows)
    loss = sum(r["loss"] for r in rows) / len(rows)
    tflops = tflops_per_gpu(
        run_spec.model, run_spec.seq_len, run_spec.tokens_per_step, step_s, run_spec.gpus
    )
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
    norm = "" if last["grad_norm"] is None else f" grad norm: {last['grad_norm']:.3f} |"
    return (
        f" [{stamp}] iteration {last['step']:8d}/{run_spec.steps:8d} |"
        f" consumed samples: {last['step'] * run_spec.layout.global_batch:12d} |"
        f" elapsed time per iteration (ms): {step_s * 1000:.1f} |"
        f" throughput per GPU (TFLOP/s/GPU): {tflops:.{1 if tflops >= 1 else 5}f} |"
        f" learning rate: {last['lr']:.6E} |"
        f" global batch size: {run_spec.layout.global_batch:5d} |"
        f" lm loss: {loss:.6E} |"
        f" loss scale: {last['loss_scale']:.1f} |{norm}"
        f" number of skipped iterations: {skipped:3d} |"
        f" number of nan iterations: {nans:3d} |"
    )


def perplexity(loss: float) -> float:
    return 2.718281828459045 ** min(loss, 20.0)  # Megatron-LM caps it there too


if __name__ == "__main__":
    sys.exit(main())
