"""The loop around an engine: what is logged when, validation, the profiler, who starts it."""

import gzip
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from parallel import forked_ranks, trainer
from parallel.config.resolve import resolve
from parallel.engines import devices
from parallel.measure import profiler
from parallel.ranks import Ranks
from parallel.record.launch import Launch
from parallel.record.reader import read_run
from tests.conftest import ROOT, run_module

SMALL = ["--max-seq-len", "32", "--device", "cpu"]


def test_lines_validations_and_traces_come_when_asked_for(tokens, tmp_path):
    flags = ["--steps", "7", "--log-interval", "3", "--eval-interval", "2"]
    flags += ["--profile-steps", "3-5"]
    out = ["--data", str(tokens), "--out", str(tmp_path / "run"), "--clip-grad", "0"]
    done = run_module("parallel.train", *SMALL, *flags, *out)
    assert done.returncode == 0, done.stderr
    run = read_run(tmp_path / "run")
    log = (run.path / "train.log").read_text()
    lines = [line for line in log.splitlines() if "elapsed time per iteration" in line]
    assert [int(line.split("iteration")[1].split("/")[0]) for line in lines] == [3, 6, 7]
    assert lines == [line for line in done.stdout.splitlines() if "elapsed time" in line]
    assert log.count("validation loss") == 4  # after 2, 4, 6 and at the end
    assert len(run.steps) == 7 and all(step["grad_norm"] > 0 for step in run.steps)
    with gzip.open(run.path / "profiles" / "trace_rank0.json.gz") as trace:
        assert json.load(trace)["traceEvents"]


def test_a_run_records_what_it_and_the_others_on_its_machine_computed(tokens, tmp_path):
    out = ["--data", str(tokens), "--out", str(tmp_path / "run"), "--steps", "4"]
    done = run_module("parallel.train", *SMALL, *out, ranks=2)
    assert done.returncode == 0, done.stderr
    load = read_run(tmp_path / "run").facts["load"]
    assert set(load) == {"start", "end", "wall_s", "cpu_s", "machine_cpu_s"}
    assert load["start"] >= 0 and load["end"] >= 0
    tick_s = 2 / os.sysconf("SC_CLK_TCK")  # the kernel counts the machine's seconds in these
    assert 0 < load["cpu_s"] <= load["machine_cpu_s"] + os.cpu_count() * tick_s
    assert load["wall_s"] >= sum(step["step_s"] for step in read_run(tmp_path / "run").steps)


def test_a_run_that_ends_in_nan_has_failed(tokens, tmp_path):
    # Each step multiplies the weights by -10,000: on every processor they overflow within ten.
    flags = ["--lr", "100", "--weight-decay", "100", "--clip-grad", "0", "--steps", "12"]
    out = ["--data", str(tokens), "--out", str(tmp_path / "run")]
    done = run_module("parallel.train", *SMALL, *flags, *out)
    run = read_run(tmp_path / "run")
    first = next(s["step"] for s in run.steps if not math.isfinite(s["loss"]))
    assert (run.state, run.reason) == ("failed", f"loss is nan since step {first}")
    assert done.returncode == 1 and done.stderr == f"parallel.train: {run.reason}\n"
    assert "RUN_COMPLETE" not in done.stdout and not (run.path / "RUN_COMPLETE.txt").exists()
    assert len(run.steps) == 12


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
@pytest.mark.parametrize(("done", "traced"), [(5, [8, 9]), (8, [9]), (9, [])])
def test_a_run_that_goes_on_traces_the_steps_that_were_asked_for(done, traced, tmp_path):
    run = resolve(("test", {"steps": 12, "profile_steps": "8-9"}))
    with profiler.attach(run, False, torch.device("cpu"), 0, tmp_path, done) as profiled:
        for step in range(done + 1, 13):
            with torch.profiler.record_function(f"step {step} "):
                pass
            profiled()
    trace = tmp_path / "profiles" / "trace_rank0.json.gz"
    text = gzip.decompress(trace.read_bytes()).decode() if traced else ""
    assert [step for step in range(1, 13) if f'"step {step} "' in text] == traced
    assert trace.exists() == bool(traced)


def test_a_gpu_is_asked_by_the_watchdog_and_not_waited_for_at_a_save(tmp_path, monkeypatch):
    waits, made, nothing = [], [], lambda *_: None
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "stream")
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    methods = dict.fromkeys(("raise_failure", "save"), nothing)
    saver = SimpleNamespace(due=lambda _: True, events=list, copying="", **methods)
    monkeypatch.setattr(trainer, "Checkpointer", lambda *given: made.append(given) or saver)
    log = SimpleNamespace(call=nothing)
    tell = {"log": nothing, "tell": nothing, "behind": log}
    folder = SimpleNamespace(path=tmp_path, fail=nothing, sync=nothing, **tell)
    gpu, launch = torch.device("cuda", 3), Launch(0, 1, 0, 1, "none")
    spec = resolve(("test", {"save_interval": 1, "steps": 9}))
    asked = SimpleNamespace(signal="")
    job = trainer.Job(spec, {}, folder, None, gpu, "te", launch, asked, 0)
    rank = trainer.Trainer(job, Ranks(0, 1), None)
    asks = rank.watchdog._gpu
    assert (asks.func, asks.args) == (devices.gpu_work, ("stream", 0))
    rank.last_lap = rank._now()
    assert not rank.save_if_due(1)
    assert waits == [gpu] and made[0][-1] == gpu  # the one wait is _now's above
    rank._end_of_other_work()
    assert waits == [gpu, gpu]


def test_a_run_that_loads_draws_no_starting_weights(tokens, tmp_path):
    program = """
import sys
import numpy as np
from parallel import train
raw, drawn = np.random.PCG64DXSM, []
class Counting(raw):
    def random_raw(self, size):
        drawn.append(size)
        return super().random_raw(size)
np.random.PCG64DXSM = Counting
for steps in ('1', '2'):  # the second goes on where the first ended
    assert train.main([*sys.argv[1:], '--steps', steps]) == 0
    print('drawn', 2 * sum(drawn))
    drawn.clear()
"""
    flags = [*SMALL, "--save-interval", "1", "--data", str(tokens), "--out", str(tmp_path / "run")]
    command = [*forked_ranks.prefix("ddp", 1, 0), "-m", "tests.program_worker", program, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts = [int(x.split()[1]) for x in done.stdout.splitlines() if x.startswith("drawn")]
    assert counts[0] > 100_000 and counts[1] == 0


@pytest.mark.slow
def test_the_deepspeed_launcher_starts_it(tokens, tmp_path):
    """And test_slurm_real.py has srun."""
    launcher, port = Path(sys.executable).with_name("deepspeed"), forked_ranks.free_port()
    command = [str(launcher), "--num_gpus", "2", "--no_local_rank", "--master_port", str(port)]
    command += ["--module", "parallel.train", "--engine", "deepspeed_zero", "--zero-stage", "1"]
    command += [*SMALL, "--steps", "3", "--data", str(tokens), "--out", str(tmp_path / "run")]
    path = f"{launcher.parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "PATH": path}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    run = read_run(tmp_path / "run")
    assert run.state == "complete" and run.facts["layout"]["dp"] == 2
