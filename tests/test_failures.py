"""What goes wrong: a user's mistake is one line and exit 2; a dead rank ends the run as failed."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from base.errors import UsageError
from parallel import bench, sweep, train
from parallel.config.resolve import resolve
from parallel.engines import devices
from parallel.record.reader import read_run, read_status
from slurm import render
from tests.conftest import (
    ROOT,
    TRAIN,
    rank_process,
    run_module,
    steps_so_far,
    training,
    wait_for,
)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data", "nowhere"], "no token files at nowhere"),
        (["--study", "slurm/parity.toml", "--run-name", "x"], "no run 'x'; it has: ddp"),
        (["--run-name", "ddp"], "give --study too"),
        (["--device", "cuda"], "device cuda needs a GPU, and torch sees none"),
        (["--engine", "horovod"], "argument --engine: invalid choice: 'horovod' (choose from "),
        (["--colour", "2"], "unrecognized arguments: --colour 2 ("),
        ([""], "unrecognized arguments:"),
        (["--steps", "-1"], "train: --steps must be at least 1 and at most 1000000000, not -1"),
        (["--data", "{tokens}", "--load", "{tmp}/nowhere"], "no checkpoint at"),
        (["--data", "{tmp}/bare.bin", "--device", "cpu"], "token id 400"),  # beyond the vocabulary
        (
            ["--data", "{tokens}", "--device", "cpu", "--preset", "175b"],
            "parameters need 1951.5 GiB",
        ),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_2(flags, words, tokens, tmp_path):
    if "torch sees none" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU here, so asking for one is no mistake")
    ids = np.zeros(4000, dtype=np.uint16)
    ids[3000] = 400
    ids.tofile(tmp_path / "bare.bin")
    flags = [flag.format(tokens=tokens, tmp=tmp_path) for flag in flags]
    done = run_module(TRAIN, "--out", str(tmp_path / "run"), *flags)
    assert done.returncode == 2
    assert words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (bench.main, ["{folder}"]),
        (sweep.main, ["slurm/parity.toml", "--logs", "{folder}"]),
        (render.main, ["slurm/parity.toml", "--logs", "{folder}", "--list"]),
        (render.main, ["{folder}.toml", "--list"]),
        (train.main, ["--out", "{folder}"]),
        (train.main, ["--data", "{folder}"]),
    ],
)
def test_a_name_that_no_log_could_hold_is_refused(main, words, tmp_path, capsys):
    """A command's line may hold bytes that are no UTF-8; train.log and preflights.csv may not."""
    folder = tmp_path / "no\udcff"
    shutil.copy("slurm/parity.toml", f"{folder}.toml")
    with contextlib.suppress(SystemExit):
        assert main([word.format(folder=folder) for word in words]) == 2
    error = capsys.readouterr().err
    assert "UTF-8" in error and error.count("\n") == 1
    assert not folder.exists()


def test_a_mistake_that_every_rank_sees_is_printed_once(tokens, tmp_path):
    flags = ["--data", str(tokens), "--device", "cpu", "--max-seq-len", "32", "--steps", "1"]
    saves = run_module(TRAIN, *flags, "--save-interval", "1", "--out", str(tmp_path / "saved"))
    assert saves.returncode == 0, saves.stderr
    (saved,) = (tmp_path / "saved").rglob("*.safetensors")
    content = bytearray(saved.read_bytes())
    content[-5] ^= 1
    saved.write_bytes(content)
    flags += ["--steps", "2", "--load", str(saved.parent), "--out", str(tmp_path / "run")]
    for attempt in ("first", "second, into the same folder"):
        done = run_module(TRAIN, *flags, ranks=4)
        assert done.returncode == 2, attempt
        assert done.stderr.count("\n") == 1, f"{attempt}: {done.stderr}"
        reason = read_status(tmp_path / "run")["reason"]
        assert reason.startswith("UsageError: ") or reason.startswith("Damaged: ")
        assert done.stderr.strip().removeprefix("parallel.train: ") in reason


@contextlib.contextmanager
def long_run(folder, tokens, engine: str, ranks: int, *flags: str, steps: int = 1, **how):
    """A run without an end that has done some steps; it must end itself inside."""
    flags = ("--engine", engine, "--steps", "100000", "--device", "cpu", *flags)
    with training(folder, tokens, ranks, *flags, **how) as launcher:
        wait_for(lambda: steps_so_far(folder) >= steps, 120, f"{steps} steps")
        yield launcher
        assert launcher.wait(timeout=90) != 0


@pytest.mark.parametrize(
    ("engine", "flags", "victim", "number"),
    [
        ("ddp", [], 1, signal.SIGKILL),
        pytest.param("ddp", [], 0, signal.SIGSEGV, marks=pytest.mark.slow),
        pytest.param("deepspeed_pipe", ["--pp", "2"], 0, signal.SIGABRT, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_ends_the_run_as_failed(engine, flags, victim, number, tokens, tmp_path):
    folder = tmp_path / "run"
    with long_run(folder, tokens, engine, 2, *flags, steps=3) as launcher:
        ranks = [rank_process(launcher, rank) for rank in (0, 1)]
        ranks[victim].send_signal(number)
    assert not any(process.is_running() for process in ranks)
    run = read_run(folder)
    # Not the survivor's broken connection, nor the SIGTERM that torchrun sent it.
    assert (run.state, run.kind) == ("failed", "killed")
    assert run.reason == f"rank {victim} was killed: {number.name}"
    assert not (folder / "RUN_COMPLETE.txt").exists()
    assert len(run.steps) >= 3  # nothing that was measured is lost


def test_sigterm_is_heard_and_written_down(tokens, tmp_path):
    folder = tmp_path / "run"
    with long_run(folder, tokens, "ddp", 2, forked=True) as launcher:
        launcher.terminate()
    wait_for(lambda: read_status(folder)["state"] != "running", 60, "the ranks' last word")
    status = read_status(folder)
    assert status["state"] == "failed" and "SIGTERM" in status["reason"]


def test_a_run_killed_without_a_word_is_not_running_for_ever(tokens, tmp_path):
    """One rank, SIGKILL: nobody is left to write it down, so the reader looks for the process."""
    folder = tmp_path / "run"
    with long_run(folder, tokens, "ddp", 1, forked=True):
        run = read_run(folder)
        assert run.state == "running" and run.facts["engine"] == {}  # what the library resolved
        os.kill(read_status(folder)["pid"], signal.SIGKILL)
    run = read_run(folder)
    assert run.state == "failed" and "gone" in run.reason


def test_a_refused_rerun_does_not_leave_the_old_result_in_its_place(tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "report", lambda _: None)
    study, run = tmp_path / "small.toml", tmp_path / "out" / "small" / "ddp"
    text = 'question = "?"\n[[run]]\nmax_seq_len = 32\nsteps = 2\ndevice = "cpu"\n'
    (bad := np.zeros(4000, dtype=np.uint16))[3000] = 400  # beyond the vocabulary: the run sees it
    bad.tofile(tmp_path / "bad.bin")
    for data, status in ((tokens, 0), (tmp_path / "bad.bin", 1)):
        study.write_text(f'{text}data = "{data}"\n')
        assert sweep.main([str(study), "--logs", str(tmp_path / "out")]) == status
    assert read_run(run).state == "failed" and "token id 400" in read_run(run).reason
    assert read_run(run / "attempts" / "1").state == "complete"


@pytest.mark.parametrize(
    ("settings", "bytes_per_param"),
    [
        ({"engine": "ddp"}, 2 * 12),  # a whole copy on each of two ranks
        ({"engine": "megatron", "tp": 2}, 12),
        ({"engine": "deepspeed_zero", "zero_stage": 1, "precision": "bf16"}, 2 * 2 + 12),
        ({"engine": "deepspeed_zero", "zero_stage": 3, "offload": "optimizer"}, 12),
    ],
)
def test_the_memory_that_is_asked_for_is_what_the_split_leaves(
    settings, bytes_per_param, monkeypatch
):
    spec = resolve(("test", {"gpus": 2, **settings}))
    available = 0.9 * bytes_per_param * spec.model.n_params
    monkeypatch.setattr(
        devices.psutil, "virtual_memory", lambda: SimpleNamespace(available=available)
    )
    with pytest.raises(UsageError, match="GiB of memory"):
        devices.check_memory(spec, 2)
    available *= 1.2
    devices.check_memory(spec, 2)


def test_flags_that_make_another_run_than_the_studys_need_a_place_of_their_own():
    flags = ["--study", "slurm/parity.toml", "--run-name", "ddp", "--steps", "3", "--check"]
    done = run_module(TRAIN, *flags)
    assert done.returncode == 2 and "say where it goes with --out DIR" in done.stderr
    assert run_module(TRAIN, *flags, "--out", "elsewhere").returncode == 0


@pytest.mark.slow
def test_runs_killed_at_random_lose_nothing(tokens, tmp_path):
    """A few kills of tests/tools/fault_campaign.py."""
    command = [sys.executable, str(ROOT / "tests" / "tools" / "fault_campaign.py")]
    command += ["--kills", "4", "--steps", "60", "--only", "ddp", "--seed", "ci"]
    command += ["--out", str(tmp_path), "--data", str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ddp end nothing lost\n") >= 1  # its curve is that of the other run
    assert len(done.stdout.split("engine")[0].splitlines()) >= 5
