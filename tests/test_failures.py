"""What goes wrong: a user's mistake is one line and exit 2; a dead rank ends the run as failed."""

import contextlib
import os
import re
import signal
import subprocess

import numpy as np
import pytest

from base.errors import UsageError
from parallel.record.reader import read_run, read_status
from tests.conftest import (
    TRAIN,
    rank_process,
    run_module,
    start_training,
    steps_so_far,
    wait_for,
)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--preset", "gpt5"], "unknown preset 'gpt5'"),
        (["--engine", "ddp", "--gpus", "4"], "asks for 4 ranks, but the launcher started 1"),
        (["--global-batch", "7", "--micro-batch", "2"], "7 is not a multiple of micro_batch 2"),
        (["--data", "nowhere"], "no token files at nowhere"),
        (["--precision", "fp16", "--device", "cpu"], "fp16 needs a GPU"),
        (["--engine", "megatron", "--preset", "gpt2-1.5b", "--tp", "2"], "cannot be split"),
        (
            "--check --engine megatron --preset gpt2-1.5b --tp 8 --gpus 8".split(),
            "tp 8 does not divide the 25 attention heads",
        ),
        (["--study", "slurm/nothing.toml"], "slurm/nothing.toml: No such file"),
        (["--study", "slurm/parity.toml", "--run-name", "x"], "no run 'x'; it has: ddp"),
        (["--run-name", "ddp"], "give --study too"),
        (["--device", "cuda"], "device cuda needs a GPU, and torch sees none"),
        (["--engine", "horovod"], "argument --engine: invalid choice: 'horovod' (choose from "),
        (["--precision", "fp8"], "engine ddp offers precision fp32, bf16, fp16, not fp8"),
        (["--cp", "2"], "1 ranks cannot be split into tp 1 x cp 2 x pp 1"),
        (["--experts", "2"], "unrecognized arguments: --experts 2 ("),
        (["--warmup-stepz", "1"], "arguments: --warmup-stepz 1: is --warmup-steps meant?"),
        ([""], "unrecognized arguments:"),
        (["--steps", "-1"], "train: --steps must be at least 1 and at most 1000000000, not -1"),
        (["--seq-len", "1000"], "seq_len 1000 exceeds the model's 128 positions"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_2(flags, words, tmp_path):
    if "cuda" in flags:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a GPU here, so asking for one is no mistake")
    done = run_module(TRAIN, "--out", str(tmp_path / "run"), *flags)
    assert done.returncode == 2
    assert words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data", "{tokens}", "--vocab-size", "200"], "tokenizer of 257 ids"),
        (["--data", "{tokens}", "--load", "{tmp}/nowhere"], "no checkpoint at"),
        (["--data", "{tmp}/bare.bin"], "token id 400"),  # beyond the model's vocabulary
    ],
)
def test_what_cannot_be_read_is_said_before_there_is_a_folder(flags, words, tokens, tmp_path):
    ids = np.zeros(4000, dtype=np.uint16)
    ids[3000] = 400
    ids.tofile(tmp_path / "bare.bin")
    flags = [flag.format(tokens=tokens, tmp=tmp_path) for flag in flags]
    done = run_module(TRAIN, *flags, "--device", "cpu", "--out", str(tmp_path / "run"))
    assert done.returncode == 2 and words in done.stderr and not done.stdout
    assert done.stderr.count("\n") == 1 and not (tmp_path / "run").exists()


def test_of_many_ranks_one_speaks(tmp_path):
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", TRAIN)
    done = run_module(*torchrun, "--tp", "3", "--out", str(tmp_path / "run"))
    assert done.returncode != 0
    said = [n for n, line in enumerate(done.stderr.splitlines()) if "cannot be split" in line]
    lines = done.stderr.splitlines()
    assert lines[said[0]].startswith("parallel.train: 2 ranks cannot be split into tp 3")
    # torchrun says a page about its ranks after it, one entry for each that it saw fail, and ours
    # again as the last words of that.
    assert said[0] == 0 and len(said) in (2, 3) and said[-1] == len(lines) - 2
    for again in said[1:]:
        assert lines[again].startswith("  traceback : parallel.train: 2 ranks cannot be split")
    assert "Traceback" not in done.stdout and not (tmp_path / "run").exists()


def test_check_answers_for_a_cluster_from_a_laptop():
    flags = ["--engine", "megatron", "--preset", "175b", "--gpus", "512", "--tp", "8", "--pp", "8"]
    done = run_module(TRAIN, "--check", *flags, "--global-batch", "1536")
    assert done.returncode == 0 and '"run": "megatron-tp8-pp8-dp8-175b-gbs1536"' in done.stdout


def end(launcher: subprocess.Popen) -> None:
    launcher.stderr.close()
    if launcher.poll() is None:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()


def start_long_run(folder, tokens, engine: str, ranks: int, *flags: str) -> subprocess.Popen:
    flags = ("--engine", engine, "--steps", "100000", "--device", "cpu", *flags)
    return start_training(folder, tokens, ranks, *flags, stderr=subprocess.PIPE)


@pytest.mark.parametrize(
    ("engine", "flags", "victim", "number"),
    [
        ("ddp", [], 1, signal.SIGKILL),
        ("ddp", [], 0, signal.SIGSEGV),
        ("megatron", ["--pp", "2"], 1, signal.SIGKILL),
        ("deepspeed_pipe", ["--pp", "2"], 0, signal.SIGABRT),
    ],
)
def test_a_rank_that_dies_ends_the_run_as_failed(engine, flags, victim, number, tokens, tmp_path):
    folder = tmp_path / "run"
    launcher = start_long_run(folder, tokens, engine, 2, *flags)
    try:
        wait_for(lambda: steps_so_far(folder) >= 3, 120, "three steps")
        ranks = [rank_process(launcher, rank) for rank in (0, 1)]
        ranks[victim].send_signal(number)
        assert launcher.wait(timeout=90) != 0
    finally:
        end(launcher)
    assert not any(process.is_running() for process in ranks)
    run = read_run(folder)
    # Not the survivor's broken connection, nor the SIGTERM that torchrun sent it.
    assert (run.state, run.kind) == ("failed", "killed")
    assert run.reason == f"rank {victim} was killed: {number.name}"
    assert not (folder / "RUN_COMPLETE.txt").exists()
    assert len(run.steps) >= 3  # nothing that was measured is lost


def test_sigterm_is_heard_and_written_down(tokens, tmp_path):
    folder = tmp_path / "run"
    launcher = start_long_run(folder, tokens, "ddp", 2)
    try:
        wait_for(lambda: steps_so_far(folder) >= 1, 120, "a step")
        launcher.terminate()
        assert launcher.wait(timeout=60) != 0
    finally:
        end(launcher)
    status = read_status(folder)
    assert status["state"] == "failed" and "SIGTERM" in status["reason"]


def test_a_run_killed_without_a_word_is_not_running_for_ever(tokens, tmp_path):
    """One rank, SIGKILL: nobody is left to write it down, so the reader looks for the process."""
    folder = tmp_path / "run"
    launcher = start_long_run(folder, tokens, "ddp", 1)
    try:
        wait_for(lambda: steps_so_far(folder) >= 1, 120, "a step")
        assert read_run(folder).state == "running"
        rank_process(launcher, 0).kill()
        assert launcher.wait(timeout=60) != 0
    finally:
        end(launcher)
    run = read_run(folder)
    assert run.state == "failed" and "gone" in run.reason


def test_a_refused_rerun_does_not_leave_the_old_result_in_its_place(tokens, tmp_path):
    from parallel import sweep

    study = tmp_path / "small.toml"
    text = 'question = "?"\n[defaults]\nmax_seq_len = 32\nsteps = 2\ndevice = "cpu"\n'
    study.write_text(f'{text}data = "{tokens}"\n[[run]]\n')
    assert sweep.main([str(study), "--logs", str(tmp_path / "out")]) == 0
    assert read_run(tmp_path / "out" / "small" / "ddp").state == "complete"
    study.write_text(f'{text}data = "nowhere"\n[[run]]\n')
    assert sweep.main([str(study), "--logs", str(tmp_path / "out")]) == 1
    run = read_run(tmp_path / "out" / "small" / "ddp")
    assert (run.state, run.reason) == ("failed", "no token files at nowhere")
    assert read_run(tmp_path / "out" / "small" / "ddp" / "attempts" / "1").state == "complete"


def test_a_model_that_the_memory_cannot_hold_is_refused_before_it_is_built(tokens, tmp_path):
    out = tmp_path / "run"
    flags = ["--preset", "175b", "--device", "cpu", "--data", str(tokens), "--out", str(out)]
    done = run_module(TRAIN, *flags)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    said = r"parallel.train: 17\d,\d{3},\d{3},\d{3} parameters need 2\d{3}\.\d GB .* \(ranks: 1\)"
    assert re.match(said + r", but \d+\.\d GB of memory are available", done.stderr)
    assert not out.exists()


@pytest.mark.parametrize(
    ("settings", "bytes_per_param"),
    [
        ({"engine": "ddp"}, 2 * 12),  # a whole copy on each of two ranks
        ({"engine": "megatron", "tp": 2}, 12),
        ({"engine": "deepspeed_zero", "zero_stage": 1}, 2 * 4 + 8),
        ({"engine": "deepspeed_zero", "zero_stage": 1, "precision": "bf16"}, 2 * 2 + 8),
        ({"engine": "deepspeed_zero", "zero_stage": 3}, 12),
    ],
)
def test_the_memory_that_is_asked_for_is_what_the_split_leaves(
    settings, bytes_per_param, tmp_path, monkeypatch
):
    from parallel.config.settings import resolve
    from parallel.engines import devices

    spec = resolve(("test", {"gpus": 2, **settings}))
    needed = bytes_per_param * spec.model.n_params
    monkeypatch.setattr(devices, "MEMINFO", tmp_path / "meminfo")
    devices.check_memory(spec, 2)  # no such file: nothing is known
    for available, fits in ((needed // 1024 + 1, True), (needed // 1024 - 1, False)):
        devices.MEMINFO.write_text(f"MemTotal: 9 kB\nMemAvailable:   {available} kB\n")
        with contextlib.nullcontext() if fits else pytest.raises(UsageError, match="GB of memory"):
            devices.check_memory(spec, 2)


def test_flags_that_make_another_run_than_the_studys_need_a_place_of_their_own():
    flags = ["--study", "slurm/parity.toml", "--run-name", "ddp", "--steps", "3", "--check"]
    done = run_module(TRAIN, *flags)
    assert done.returncode == 2 and "say where it goes with --out DIR" in done.stderr
    assert run_module(TRAIN, *flags, "--out", "elsewhere").returncode == 0
