"""Signals save and interrupt, the same command goes on, and a rank that hangs is named."""

import contextlib
import errno
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import base.files
from analysis.logs.readers import read
from analysis.runs.verdict import judge
from base.errors import UsageError
from parallel import forked_ranks
from parallel.checkpoint import attempts, folders
from parallel.config.resolve import resolve
from parallel.record import ends, hangs
from parallel.record.hangs import GpuWork, Report, Watchdog
from parallel.record.reader import read_run, read_status
from parallel.record.schema import STEP_COLUMNS
from parallel.record.writer import RunFolder
from parallel.train import is_first_to_see
from tests.conftest import ROOT, rank_process, run_module, steps_so_far, training, wait_for

SMALL = ["--n-layer", "1", "--hidden", "16", "--n-head", "2", "--max-seq-len", "16"]
SMALL += ["--eval-steps", "1", "--device", "cpu", "--global-batch", "4"]


def start(folder: Path, tokens: Path, steps: int, *flags: str):
    return training(folder, tokens, 2, *SMALL, "--steps", str(steps), *flags)


@pytest.mark.slow
def test_signals_save_and_the_same_command_goes_on_to_the_same_curve(tokens, tmp_path):
    """SIGTERM to the launcher, then SIGUSR1 to one rank, as Slurm sends it before the limit."""
    alone, folder = tmp_path / "alone", tmp_path / "run"
    flags, saved = ["--save-interval", "100000", "--lr-schedule", "constant"], [0]

    def train_to(step: int) -> None:
        wait_for(lambda: steps_so_far(folder) >= step, 120, f"step {step}")

    for more in ([], ["--async-save"]):
        with start(folder, tokens, 250, *flags, *more) as launcher:
            train_to(saved[-1] + 3)
            if more:
                rank_process(launcher, 1).send_signal(signal.SIGUSR1)
            else:
                launcher.terminate()
            assert launcher.wait(timeout=60) != 0
        saved += folders.steps_in(folder / "checkpoints")[-1:]
        status = read_status(folder)
        assert status["state"] == judge(read(folder)).verdict == "interrupted"
        assert f"saved step {saved[-1]}" in status["reason"] and saved[-1] > saved[-2]
    for path, others in ((folder, flags), (alone, flags[2:])):
        with start(path, tokens, 250, *others) as launcher:
            assert launcher.wait(timeout=120) == 0
    run, other = read_run(folder), read_run(alone)
    assert run.state == ends.COMPLETE and len(run.facts["attempts"]) == 2
    assert len(run.steps) == 250
    # Exact: the same ranks of one machine do the same operations in the same order.
    for key in ("step", "loss", "grad_norm", "lr"):
        assert [s[key] for s in run.steps] == [s[key] for s in other.steps]
    assert run.metrics["epochs"][0]["optimizer_steps"] == 250


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(tokens, tmp_path):
    folder = tmp_path / "run"
    with start(folder, tokens, 1_000_000, "--hang-s", "10") as launcher:
        wait_for(lambda: steps_so_far(folder) >= 3, 120, "three steps")
        victim = rank_process(launcher, 1)
        victim.suspend()
        wait_for(lambda: read_status(folder)["state"] == ends.FAILED, 60, "the watchdog")
        victim.kill()
        assert launcher.wait(timeout=60) != 0
    reason = read_status(folder)["reason"]
    assert "no progress for 10 s: rank 1 hangs and does not answer" in reason
    assert "rank 0 is at" in reason and "parallel/engines/" in reason
    assert "Thread" in (folder / "hang" / "rank-00000.txt").read_text()


RANKS = """
import resource, signal, sys, time, torch
from pathlib import Path
import torch.distributed as dist
from parallel import ranks
from parallel.checkpoint import checkpointer
from parallel.engines.optim import mean_over_ranks
from parallel.record.hangs import Watchdog
from tests.tools.tiny_checkpoint import Engine, saver_of
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group('gloo', f'file://{folder}/store', rank=rank, world_size=2)
def holder_of(held):
    engine = Engine(1.0)
    state = engine.state()
    state.pieces = state.pieces[held]
    engine.state = lambda: state
    return engine
"""


def python(program: str, *words: object, warm: bool = True, **how) -> subprocess.Popen:
    """A process that runs the program, its output to be read. warm: it has loaded torch."""
    command = [sys.executable, "-c"]
    if warm:
        command = [*forked_ranks.prefix("ddp", 1, 0), "-m", "tests.program_worker"]
    command += [program, *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, **pipes, **how)


def two_ranks(program, folder):
    """The exit codes and (stdout, stderr) of two processes given their rank and a folder."""
    ranks = [python(RANKS + program, rank, folder) for rank in (0, 1)]
    said = [rank.communicate(timeout=240) for rank in ranks]
    return [rank.returncode for rank in ranks], said


def test_all_ranks_hear_with_the_loss_that_one_of_them_was_asked_to_stop(tmp_path):
    program = """
mean = lambda *stop: mean_over_ranks(torch.tensor(rank + 1.0), 2, *stop)
assert mean(rank == 1) == mean(True) == (1.5, True)
assert mean() == (1.5, False)
dist.destroy_process_group()
"""
    codes, said = two_ranks(program, tmp_path)
    assert codes == [0, 0], said


def test_ranks_that_wait_for_a_slow_disk_are_patient_while_it_gets_on(tmp_path):
    """The first save lasts three times the watchdog's limit and ticks; the second hangs."""
    program = """
write = checkpointer.write_rank_file
def slowly(*given):
    for _ in range(0 if rank else 30):
        time.sleep(0.1)
        given[-1]()  # tick
    return write(*given)
def hangs(*_):
    time.sleep(0 if rank else 60)
ranks.HEARTBEAT_S = 0.2
with Watchdog(folder / 'hang', rank, 2, 1.0, lambda why: print(why, flush=True)) as dog:
    saver = saver_of(holder_of(slice(0 if rank else None)), folder, rank, 2, dog.tick)
    checkpointer.write_rank_file = slowly
    saver.save(1)
    print('patient', [e.problem for e in saver.events()], flush=True)
    checkpointer.write_rank_file = hangs
    saver.save(2)
"""
    codes, said = two_ranks(program, tmp_path)
    assert codes == [1, 1], said
    assert said[0][0].startswith("patient ['']") and said[1][0].startswith("patient []"), said
    for out, _ in said:
        assert re.search(
            r"no progress for 1 s: rank 0 hangs at <string>:\d+ hangs, in parallel/checkp", out
        )


def test_one_ranks_full_disk_ends_the_save_of_all_and_not_the_run(tmp_path):
    """Each of two ranks holds half; on the second the kernel lets no file grow beyond 1 kB."""
    program = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
free = resource.getrlimit(resource.RLIMIT_FSIZE)
for behind in (False, True):
    half = holder_of(slice(rank, None, 2))
    saver = saver_of(half, folder / str(behind), rank, 2, async_save=behind)
    for step in (1, 2, 3):
        limit = (1024, free[1]) if rank and step == 2 else free
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        saver.save(step)
        saver.wait()
    print([e.problem for e in saver.events()], flush=True)
del saver
dist.destroy_process_group()
"""
    codes, said = two_ranks(program, tmp_path)
    assert codes == [0, 0], said
    assert said[0][0] == "['', 'File too large', '']\n" * 2 and said[1][0] == "[]\n[]\n", said
    for behind in ("False", "True"):
        assert folders.steps_in(tmp_path / behind) == [1, 3]
        assert not list((tmp_path / behind).glob(".step*"))
        for step in (1, 3):
            assert len(folders.verify(tmp_path / behind / folders.name_of(step))["files"]) == 2


def test_a_signal_is_kept_from_its_handler_on_until_somebody_attends():
    """It comes in the next line already. SIGHUP is as good as SIGTERM, but not under nohup."""
    program = """
import signal, sys, time
from parallel.record.signals import on_signals
install = signal.signal
def install_and_raise(number, handler):
    old = install(number, handler)
    if number == signal.Signals[sys.argv[1]] and callable(handler):
        signal.raise_signal(number)
    return old
signal.signal = install_and_raise
with on_signals() as asked:
    signal.signal = install
    time.sleep(0.2)
    asked.attend(lambda what: print('said', what, flush=True), eval(sys.argv[2]))
    print('asked', asked.signal, flush=True)
    time.sleep(0.2)
    signal.raise_signal(signal.SIGHUP)
    time.sleep(20)
"""

    in_a_terminal = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    nohup = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    expected = [
        ("SIGTERM", None, {}, 143, "said SIGTERM\n"),
        ("SIGHUP", None, {}, 129, "said SIGHUP\n"),
        ("SIGINT", None, in_a_terminal, 130, "said SIGINT\n"),
        ("SIGINT", 0.5, in_a_terminal, 130, "asked SIGINT\nsaid SIGINT\n"),
        ("SIGUSR1", None, {}, 129, "asked \nsaid SIGHUP\n"),
        ("SIGUSR1", 0.5, {}, 129, "asked SIGUSR1\nsaid SIGHUP\n"),
        ("SIGTERM", 1.0, nohup, 143, "asked SIGTERM\nsaid SIGTERM\n"),
    ]
    processes = [python(program, *words, warm=False, **how) for *words, how, _, _ in expected]
    for process, (*_, status, said) in zip(processes, expected, strict=True):
        assert (process.communicate(timeout=60)[0], process.returncode) == (said, status)


def test_ctrl_c_while_torch_loads_saves_after_the_first_step(tokens, tmp_path):
    flags = [*SMALL, "--steps", "1000000", "--save-interval", "1000", "--data", str(tokens)]
    command = [sys.executable, "-m", "parallel.train", *flags, "--out", str(tmp_path / "run")]
    # As in a terminal; a shell has what is in its background ignore it.
    how = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, **how) as run:

        def listens() -> bool:
            (mask,) = (
                line.split()[1]
                for line in Path(f"/proc/{run.pid}/status").read_text().splitlines()
                if line.startswith("SigCgt")
            )
            return bool(int(mask, 16) >> (signal.SIGUSR1 - 1) & 1)

        try:
            wait_for(listens, 60, "a handler", every=0.01)
            assert "libtorch" not in Path(f"/proc/{run.pid}/maps").read_text()
            run.send_signal(signal.SIGINT)
            assert run.wait(timeout=120) == 75
        finally:
            run.kill()
    assert read_status(tmp_path / "run")["reason"] == "SIGINT, saved step 1"


def test_a_rank_that_waits_for_the_gpu_is_not_the_one_that_hangs(tmp_path):
    file = tmp_path / "engine.py"
    file.write_text("norm = float(norm)\nloss.item()\nread(batch)\n")
    cuda = ("/site-packages/torch/cuda/__init__.py", 1, "synchronize")
    gloo = ("/site-packages/torch/distributed/distributed_c10d.py", 1, "all_reduce")
    for frames, waits in (
        ([cuda, (str(file), 3, "step")], True),
        ([gloo, (str(file), 3, "step")], True),
        ([(str(file), 1, "step")], True),
        ([(str(file), 2, "step")], True),
        ([(str(file), 3, "step")], False),
        ([(str(file), 3, "read"), (str(file), 1, "step")], False),
    ):
        assert hangs.waits(frames) == waits, frames

    reads = Report(1, 10, "data.py:5 read", False)
    others = [Report(rank, 11, "ddp.py:7 step", True) for rank in (0, 2)]
    # One that waits where nobody knows it got further than the one that it waits for.
    for waits in (True, False):
        told = hangs.verdict([reads, others[0]._replace(waits=waits), others[1]], 3, 9.0)
        assert told == "no progress for 9 s: rank 1 hangs at data.py:5 read"
    behind = hangs.verdict([reads._replace(waits=True), *others], 3, 9.0)
    assert "rank 1 is furthest behind, at data.py:5 read" in behind


def test_a_full_queue_of_a_gpu_blames_no_rank_that_waits_for_nccl():
    """Seven ranks are blocked in a launch, behind an all-reduce that the eighth never asks for."""
    launch = [("/site-packages/torch/nn/functional.py", 1, "linear"), ("engine.py", 7, "step")]
    read = [("data.py", 5, "read")]
    waits_for_nccl, idle = GpuWork(True, 1, 90.0), GpuWork(False, 0, 95.0)
    for frames, gpu in (
        (read, idle),  # its host hangs,
        (launch, GpuWork(True, 0, 95.0)),  # a kernel, with the queue full behind it,
        ([("/site-packages/torch/cuda/__init__.py", 1, "synchronize")], GpuWork(True, 0, 95.0)),
    ):
        at = [(frames, gpu), *[(launch, waits_for_nccl)] * 7]
        reports = [
            Report(rank, 9, where[0][2], hangs.waits(where, work))
            for rank, (where, work) in enumerate(at)
        ]
        told = hangs.verdict(reports, 8, 9.0)
        assert told == f"no progress for 9 s: rank 0 hangs at {frames[0][2]}"
    assert hangs.waits([("torch/distributed/c10d.py", 1, "recv")], idle)  # over gloo
    assert hangs.waits(launch, GpuWork(True, None, None))  # NCCL keeps no record


def test_each_report_is_read_once(tmp_path, monkeypatch):
    """Eight ranks in one process; a rank whose GPU does not answer reports all the same."""
    read, judge = [], hangs.verdict

    def noted(reports: list[Report], world: int, limit_s: float) -> str:
        read.extend(reports)
        return judge(reports, world, limit_s)

    def broken(_: Path) -> GpuWork:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(hangs, "verdict", noted)
    dogs = [Watchdog(tmp_path / "hang", rank, 8, 9.0, print, broken) for rank in range(8)]
    written = [dog._report() for dog in dogs]
    reasons = [dog._verdict(mine) for dog, mine in zip(dogs, written, strict=True)]
    assert len(set(reasons)) == 1 and len(read) == 8


def test_nccls_flight_record_says_what_is_unfinished():
    """Its form is that of PyTorch's record of gloo, which this machine has."""
    program = """
import json, time, torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from parallel.engines.devices import work_of_record
dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
work = work_of_record(True, c10d._dump_fr_trace_json())
assert 0 <= work.last_s < 60, work
parts = json.loads(c10d._dump_fr_trace_json())
(status,) = parts['pg_status'].values()
status['last_completed_collective'] = status['last_enqueued_collective'] = '7'
assert work_of_record(True, json.dumps(parts)).unfinished == 0
status['last_completed_collective'] = '6'
assert work_of_record(True, json.dumps(parts)).unfinished == 1
assert work_of_record(False, '{}') == (False, None, None)
"""
    worker = python(program)
    assert worker.communicate(timeout=120)[1] == "" and worker.returncode == 0


def test_a_strangers_master_port_ends_the_rank_in_time_and_words(tokens, tmp_path):
    """Rank 1 would wait for an answer that never comes; rank 0 cannot listen."""
    flags = [*SMALL, "--timeout-s", "3", "--data", str(tokens), "--out", str(tmp_path / "run")]
    program = f"import sys\nfrom parallel import train\nsys.exit(train.main({flags!r}))"
    with socket.create_server(("127.0.0.1", 0), backlog=8) as stranger:
        port = str(stranger.getsockname()[1])
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = [
            python(program, env=os.environ | place | {"RANK": rank, "LOCAL_RANK": rank})
            for rank in "01"
        ]
        said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 1], said
    met = f"other 1 ranks at 127.0.0.1:{port} within 3 s: not all of them came, or another program"
    for rank in (0, 1):
        (line,) = [line for line in said[rank].splitlines() if "did not meet" in line]
        assert line.startswith(f"parallel.train: rank {rank} did not meet the {met}")
    assert "did not meet" in read_status(tmp_path / "run")["reason"]


@pytest.mark.slow
def test_the_timeout_reaches_every_process_group():
    program = """
import os, torch, torch.distributed as dist
from parallel import engines
from parallel.engines.devices import init_process_group
from parallel.record import launch
from parallel.config.resolve import resolve
os.environ['DS_ACCELERATOR'] = 'cpu'
os.environ |= {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '0', 'LOCAL_RANK': '0'}
cpu, counts = torch.device('cpu'), []
spec = {'timeout_s': 77.0, 'n_layer': 1, 'hidden': 16, 'n_head': 2, 'max_seq_len': 16}
for name in ('megatron', 'deepspeed_pipe'):
    run = resolve(('test', {'engine': name, 'device': 'cpu', **spec}))
    if name == 'megatron':
        init_process_group(run, cpu, launch.Launch(0, 1, 0, 1, 'none'), print)
    engine = engines.load(run, cpu, 'torch')
    groups = dist.distributed_c10d._world.pg_map
    counts.append(len(groups))
    engine.close() if name == 'megatron' else None
    for group in [*groups, dist.new_group()]:
        limit = group._get_backend(cpu).options._timeout.total_seconds()
        assert limit == 77, (name, limit, group.group_desc)
print(counts, flush=True)
os._exit(0)
"""
    process = python(program, warm=False)
    out, errors = process.communicate(timeout=200)
    assert process.returncode == 0 and min(json.loads(out.splitlines()[-1])) > 3, errors[-2000:]


def test_the_place_is_the_innermost_line_and_the_innermost_of_this_repository():
    inside = ".venv/lib/python3/site-packages/torch/autograd/graph.py"
    torch = (str(base.files.ROOT / inside), 8, "backward")
    step = (str(base.files.ROOT / "parallel/engines/ddp.py"), 7, "step")
    loop = (str(base.files.ROOT / "parallel/trainer.py"), 6, "step")
    place = hangs.location([torch, step, loop])
    assert place == f"{inside}:8 backward, in parallel/engines/ddp.py:7 step"
    assert hangs.location([step, loop]) == "parallel/engines/ddp.py:7 step"


def begin(run: Path, **settings) -> Path | None:
    spec = resolve(("test", {"save_interval": 2, **settings}))
    about = {"run": "ddp", **spec.as_facts(), "profiler": None, "git": {}}
    with contextlib.closing(RunFolder(run)) as folder:
        return attempts.begin(spec, about, folder)


def a_stopped_run(run: Path, step: int = 2) -> None:
    begin(run)
    (run / "checkpoints" / folders.name_of(step) / "rank").mkdir(parents=True)


def test_a_complete_run_goes_on_to_more_steps_and_keeps_its_result(tmp_path, capsys):
    a_stopped_run(run := tmp_path / "run", step=20)
    folder = RunFolder(run)
    folder.begin(read_run(run).facts, go_on=True)
    folder.complete({"schema_version": "2.0"}, "RUN_COMPLETE")
    assert begin(run, steps=80) == run / "checkpoints"
    said = capsys.readouterr().out
    assert f"the result after 20 steps is kept in {run}/attempts/1" in said
    assert "this run goes on to step 80; the earlier attempt planned 20\n" in said
    assert read_run(run / "attempts" / "1").state == ends.COMPLETE
    assert not (run / "RUN_COMPLETE.txt").exists()
    (run / "status.json").write_text("")  # a crash, of a disk that lost it
    assert begin(run, steps=80) == run / "checkpoints"
    assert read_run(run).facts["attempts"][-1]["reason"] == "status.json is missing or damaged"
    assert begin(run, steps=10) is None
    moved = capsys.readouterr().out
    assert moved.startswith(f"moved the earlier attempt to {run}/attempts/2; this run starts from")
    assert moved in (run / "train.log").read_text()


def test_a_run_that_goes_on_prints_its_own_mistake_too(tmp_path):
    for _ in range(2):
        with contextlib.closing(RunFolder(tmp_path / "run")) as folder:
            folder.begin({"run": "ddp"}, go_on=True)
        assert is_first_to_see(tmp_path / "run")
        assert not is_first_to_see(tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"lr": 1e-2}, "is in the folder of the run itself: give another --out"),
        ({"lr": 1e-2, "steps": 2}, "step-00000002 is the state after all of the run's 2 steps"),
    ],
)
def test_what_a_run_cannot_begin_with_is_refused_before_anything_moves(settings, why, tmp_path):
    a_stopped_run(tmp_path)
    with pytest.raises(UsageError, match=why):
        begin(tmp_path, load=str(tmp_path), **settings)
    assert not (tmp_path / "attempts").exists()


def test_a_line_cut_short_by_a_kill_is_taken_away_before_the_next(tmp_path):
    row = dict.fromkeys(STEP_COLUMNS) | {"step_s": 1.0, "skipped": 0, "tokens": 4}
    folder = RunFolder(tmp_path / "run")
    for steps in ({1: 9.0, 2: 8.0, 3: 7.0}, {3: 7.0, 4: 6.0}):
        folder.begin({"run": "ddp"}, go_on=True)
        for step, loss in steps.items():
            folder.step(row | {"step": step, "loss": loss})
        folder.close()
        with (tmp_path / "run" / "steps.csv").open("a") as file:
            file.write("4,0.1,6.")
    steps = read_run(tmp_path / "run").steps
    assert [(s["step"], s["loss"]) for s in steps] == [(1, 9.0), (2, 8.0), (3, 7.0), (4, 6.0)]


def test_a_note_that_the_console_does_not_take_ends_no_run(tmp_path, monkeypatch):
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    folder = RunFolder(tmp_path / "run")
    folder.begin({"run": "ddp"})
    monkeypatch.setattr(sys, "stdout", Full())
    folder.note("a word")
    folder.close()
    log = (tmp_path / "run" / "train.log").read_text()
    assert " a word\n" in log and "the console takes no more lines: Broken pipe" in log


MIXED = "steps {} to {} were trained with the learning rates of a run of {} steps"


def test_a_run_of_two_schedules_keeps_the_fact_and_every_table_tells_it(tokens, tmp_path, capsys):
    from analysis import parity, tflops

    one = [*SMALL, "--save-interval", "2", "--data", str(tokens)]
    for name, steps in (("other", 10), ("run", 8), ("run", 10)):
        flags = [*one, "--out", str(tmp_path / name), "--steps", str(steps)]
        done = run_module("parallel.train", *flags)
        assert done.returncode == 0, done.stderr
    said = f"goes on to step 10; {MIXED.format(1, 8, 8)}"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["go_on"] == said
    assert "go_on" not in json.loads((tmp_path / "other" / "run.json").read_text())
    assert tflops.main([str(tmp_path), "--format", "csv"]) == 0
    assert capsys.readouterr().out.count(said) == 1
    assert parity.main([str(tmp_path), "--baseline", str(tmp_path / "other")]) == 1
    assert capsys.readouterr().out.count(said) == 1


def test_which_steps_had_another_schedules_learning_rates_is_known_after_every_attempt():

    def told(*given: tuple, begin: int = 1, steps: int = 10) -> str:
        pairs = [{"steps": s} | ({} if to is None else {"kept_to": to}) for s, to in given]
        return attempts.other_schedules(pairs, steps, begin)

    assert told((10, 4), (10, 6)) == ""
    head = "goes on to step 10; "
    assert told((8, 4), (8, 6)) == head + f"{MIXED.format(1, 4, 8)}, {MIXED.format(5, 6, 8)}"
    assert told((4, 4), (8, 8)) == f"{head}{MIXED.format(1, 4, 4)}, {MIXED.format(5, 8, 8)}"
    assert told((8, 8), (10, 9)) == head + MIXED.format(1, 8, 8)
    # A later checkpoint was damaged, so that training went on from before; one died before it read.
    assert told((8, None), (10, 3)) == head + MIXED.format(1, 3, 8)
    assert told((10, 2), (8, 6), begin=2) == head + MIXED.format(3, 6, 8)
    assert told((8, 0)) == ""
