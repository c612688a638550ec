"""The loop around an engine: what is logged when, validation, the profiler, the progress bar."""

import gzip
import json
import math
import os
import pty
import subprocess
import sys

import pytest
import torch

from parallel.config.settings import resolve
from parallel.measure import energy_and_memory, profiler, training_metrics
from parallel.record.reader import read_run
from tests.conftest import ROOT, run_module

SMALL = ["--max-seq-len", "32", "--device", "cpu"]


def test_lines_validations_and_traces_come_when_asked_for(tokens, tmp_path):
    flags = [
        "--steps",
        "7",
        "--log-interval",
        "3",
        "--eval-interval",
        "2",
        "--profile-mode",
        "torch",
    ]
    out = ["--data", str(tokens), "--out", str(tmp_path / "run"), "--clip-grad", "0"]
    done = run_module("parallel.train", *SMALL, *flags, *out)
    assert done.returncode == 0, done.stderr
    run = read_run(tmp_path / "run")
    log = (run.path / "train.log").read_text()
    lines = [line for line in log.splitlines() if "elapsed time per iteration" in line]
    assert [int(line.split("iteration")[1].split("/")[0]) for line in lines] == [3, 6, 7]
    assert lines == [line for line in done.stdout.splitlines() if "elapsed time" in line]
    validations = [
        float(line.split("lm loss value:")[1].split("|")[0])
        for line in log.splitlines()
        if "validation loss" in line
    ]
    assert len(validations) == 4  # after 2, 4, 6 and at the end
    best = run.metrics["summary"]["best_val_loss"]
    assert abs(best - min(validations)) < 1e-6
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
    assert load["cpu_s"] <= 2 * os.cpu_count() * load["wall_s"]
    assert load["wall_s"] >= sum(step["step_s"] for step in read_run(tmp_path / "run").steps)


def test_a_machines_seconds_are_those_in_which_its_cores_were_not_idle(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 20 30 4000 500 6 7 8 9 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n")
    ticks = 100 + 20 + 30 + 6 + 7 + 8  # guest time (9) is in user time already
    assert energy_and_memory.machine_cpu_s(stat) == ticks / os.sysconf("SC_CLK_TCK")
    assert energy_and_memory.machine_cpu_s(tmp_path / "none") is None


def test_a_run_that_ends_in_nan_has_failed(tokens, tmp_path):
    flags = ["--lr", "100", "--clip-grad", "0", "--steps", "4"]
    out = ["--data", str(tokens), "--out", str(tmp_path / "run")]
    done = run_module("parallel.train", *SMALL, *flags, *out)
    run = read_run(tmp_path / "run")
    first = next(s["step"] for s in run.steps if not math.isfinite(s["loss"]))
    assert (run.state, run.reason) == ("failed", f"loss is nan since step {first}")
    assert done.returncode == 1 and done.stderr == f"parallel.train: {run.reason}\n"
    assert "RUN_COMPLETE" not in done.stdout and not (run.path / "RUN_COMPLETE.txt").exists()
    assert len(run.steps) == 4


NAN = float("nan")


@pytest.mark.parametrize(
    ("losses", "norm", "skipped", "validation", "verdict"),
    [
        ([2.0, 1.9, 1.8], 1.0, 0, 1.9, ""),
        ([2.0, NAN, 1.8], 1.0, 0, 1.9, ""),  # it came back
        ([2.0, NAN, NAN], 1.0, 0, 1.9, "loss is nan since step 2"),
        ([2.0, 1.9, float("inf")], 1.0, 0, 1.9, "loss is inf since step 3"),
        ([2.0, 1.9, NAN], 1.0, 1, 1.9, ""),  # fp16 skips it and lowers its scale
        ([2.0, NAN, NAN], 1.0, 1, None, "loss is nan since step 2"),
        ([2.0, 1.9, 1.8], NAN, 0, None, "gradient norm is nan at step 3, the last"),
        ([2.0, 1.9, 1.8], NAN, 1, 1.9, ""),
        ([2.0, 1.9, 1.8], float("inf"), 0, 1.9, ""),
        ([2.0, 1.9, 1.8], None, 0, NAN, "validation loss is nan after step 3, the last"),
    ],
)
def test_what_counts_as_an_end_in_nan(losses, norm, skipped, validation, verdict):
    steps = [
        {"step": n, "loss": loss, "grad_norm": norm, "skipped": skipped if n == 3 else 0}
        for n, loss in enumerate(losses, start=1)
    ]
    validations = [] if validation is None else [(1, NAN), (3, validation)]
    assert training_metrics.ended_in_nan(steps, validations) == verdict


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
@pytest.mark.parametrize(("done", "traced"), [(5, [8, 9]), (8, [9]), (9, [])])
def test_a_run_that_goes_on_traces_the_steps_that_were_asked_for(done, traced, tmp_path):
    asked = {"steps": 12, "profile_mode": "torch", "profile_steps": "8-9"}
    run = resolve(("test", asked))
    with profiler.attach(run, "torch", torch.device("cpu"), 0, tmp_path, done) as profile:
        for step in range(done + 1, 13):
            with torch.profiler.record_function(f"step {step} "):
                pass
            profile.step()
    trace = tmp_path / "profiles" / "trace_rank0.json.gz"
    text = gzip.decompress(trace.read_bytes()).decode() if traced else ""
    assert [step for step in range(1, 13) if f'"step {step} "' in text] == traced
    assert trace.exists() == bool(traced)


def test_a_terminal_gets_a_progress_bar_and_the_log_keeps_its_lines(tokens, tmp_path):
    master, slave = pty.openpty()
    subprocess.run(["stty", "cols", "120", "rows", "40"], stdin=slave, check=True)
    command = [sys.executable, "-m", "parallel.train", *SMALL, "--steps", "20"]
    command += ["--data", str(tokens), "--out", str(tmp_path / "run")]
    process = subprocess.Popen(command, cwd=ROOT, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    shown = b""
    try:
        while block := os.read(master, 65536):
            shown += block
    except OSError:  # how a terminal says that the other side is gone
        pass
    finally:
        os.close(master)
    assert process.wait(timeout=60) == 0
    assert b"20/20 [" in shown and b"elapsed time per iteration" not in shown
    assert (tmp_path / "run" / "train.log").read_text().count("elapsed time per iteration") == 20
