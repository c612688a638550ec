"""The rules every engine shares: learning rate, weight decay, kernels, iteration line."""

import contextlib
import gc
import importlib
import os
import re
import subprocess
import sys
import types

import pytest
import torch

from base.errors import UsageError
from models import gpt
from models.config import PRESETS
from models.flops import tflops_per_gpu
from parallel import trainer
from parallel.config.resolve import resolve
from parallel.engines import kernels, optim
from parallel.engines.optim import LossScale, ScaleRule, lr_at, param_groups
from parallel.record import lines
from parallel.record.ends import Kind
from parallel.record.launch import TIME_LIMIT_SIGNAL
from tests.conftest import ROOT


def test_learning_rate_warms_up_then_follows_the_cosine():
    spec = resolve(("x", {"steps": 11, "warmup_steps": 4, "lr": 1e-3, "min_lr": 1e-4}))
    rates = [lr_at(spec, step) for step in range(11)]
    assert rates[:4] == [2.5e-4, 5e-4, 7.5e-4, 1e-3]
    assert rates[4] == 1e-3 and rates[-1] == pytest.approx(1e-4)
    assert rates[7] == pytest.approx((1e-3 + 1e-4) / 2)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    for steps in (3, 6):  # with warm-up up to the last step but one, and none
        short = resolve(("x", {"steps": steps, "warmup_steps": 5, "lr": 1e-3, "min_lr": 1e-4}))
        assert lr_at(short, 5) == short.min_lr and lr_at(short, 2) == short.lr * 3 / 5
    constant = resolve(("x", {"lr_schedule": "constant", "steps": 5}))
    assert {lr_at(constant, step) for step in range(5)} == {constant.lr}


def test_a_loss_and_a_wish_to_stop_are_one_message_of_two_fp32_numbers(monkeypatch):
    """Also where the share is in bf16, which has no 1000.1."""
    sent = []

    def add_others(both):
        sent.append((both.dtype, both.tolist()))
        both += torch.tensor([1000.0, 1.0])

    monkeypatch.setattr(optim.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(optim.dist, "all_reduce", add_others)
    share = torch.tensor([0.1], dtype=torch.bfloat16)
    assert optim.mean_over_ranks(share, 2) == (pytest.approx(500.05, abs=1e-4), True)
    assert sent == [(torch.float32, [float(share), 0.0])]


def test_the_loss_scale_is_halved_from_the_second_overflow_on_and_doubled_after_good_steps():
    """As megatron-core's DynamicGradScaler, with one home for every engine."""
    rule, scale = ScaleRule(window=3), LossScale()
    seen = []
    for step in "..x..x.x...x":
        scale = scale.after(step == "x", rule)
        seen.append((scale.scale / 2**16, scale.good_steps, scale.hysteresis))
    good = [(1, 1, 2), (1, 2, 2), (1, 0, 1), (1, 1, 1), (1, 2, 1), (0.5, 0, 1), (0.5, 1, 1)]
    assert seen == [*good, (0.25, 0, 1), (0.25, 1, 1), (0.25, 2, 1), (0.5, 0, 2), (0.5, 0, 1)]
    assert LossScale(1.0, 5, 1).after(True) == (1.0, 0, 1)  # never below
    assert LossScale(8.0, 0, 1).after(False, ScaleRule(refills=True)) == (8.0, 1, 2)
    # A checkpoint of torch's GradScaler counts to 2,000 and has no hysteresis.
    assert LossScale.of({"scale": 8.0, "good_steps": 1500}) == (8.0, 999, 2)
    assert LossScale.of({"scale": 8.0, "good_steps": 0, "hysteresis": 0}) == (8.0, 0, 1)


def test_biases_and_norms_are_not_decayed():
    model = gpt.GPT(PRESETS["tiny"])
    decayed, plain = param_groups(model.parameters(), weight_decay=0.1)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    exempt = {name for name in names.values() if "norm" in name or name.endswith("bias")}
    assert {names[id(p)] for p in plain["params"]} == exempt
    assert {names[id(p)] for p in decayed["params"]} == set(names.values()) - exempt
    assert len(param_groups([torch.nn.Parameter(torch.zeros(2, 2))], 0.1)) == 1  # no empty group


def test_a_library_whose_layer_norm_is_not_pytorchs_is_not_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    library = types.ModuleType("transformer_engine.pytorch")
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", library)
    assert "does not work here" in kernels.problem("te")
    library.LayerNorm = torch.nn.LayerNorm
    monkeypatch.setattr(torch.nn.Module, "cuda", lambda module: module)
    on_cpu = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, **_: on_cpu(*shape).requires_grad_())
    assert kernels.problem("te") == ""
    library.LayerNorm = torch.nn.RMSNorm
    assert "layer norm is" in kernels.problem("te")


def test_kernels_are_the_first_that_the_engine_has_and_that_work(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert kernels.choose("auto", cpu, ("te", "torch")) == "torch"
    with pytest.raises(UsageError, match="kernels te: this engine has torch"):
        kernels.choose("te", cpu, ("torch",))
    tried, problems = [], {"te": "none", "torch": ""}
    monkeypatch.setattr(kernels, "problem", lambda name: tried.append(name) or problems[name])
    assert kernels.choose("torch", gpu, ("te", "torch")) == "torch" and tried == ["torch"]
    assert kernels.choose("auto", gpu, ("te", "torch")) == "torch"
    assert tried[1:] == ["te", "torch"]


def test_compile_needs_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(kernels.shutil, "which", lambda _: None)
    for kind, why in (("cpu", "there is no no-such-compiler here"), ("cuda", "there is no gcc")):
        with pytest.raises(UsageError, match=why):
            kernels.check_compiler(torch.device(kind))
    for compiler, why in (("no-such-compiler", "does not start"), ("false", "finds no Python.h")):
        monkeypatch.setenv("CC", compiler)
        assert why in kernels.c_compiler_problem()
    monkeypatch.setenv("CC", "true")
    assert kernels.c_compiler_problem() == ""


@pytest.mark.slow
def test_megatron_cores_fused_functions_run_on_a_gpu_without_a_compiler():
    """torch.compile of one on a CPU stands in: it would want a compiler in the first call."""
    code = (
        "import torch\n"
        "from parallel.engines import cpu\n"
        "is_available, torch.cuda.is_available = torch.cuda.is_available, lambda: True\n"
        "cpu.import_megatron(compiled=False)\n"
        "torch.cuda.is_available = is_available\n"
        "from megatron.core.fusions.fused_bias_gelu import bias_gelu\n"
        "print(bias_gelu(torch.zeros(2), torch.ones(2)).tolist()[0])\n"
    )
    environment = os.environ | {"CXX": "no-such-compiler", "CC": "no-such-compiler"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("0.841"), done.stderr


@pytest.mark.parametrize(("chosen", "is_hidden"), [("torch", True), ("te", False)])
def test_libraries_find_no_better_kernels_than_the_chosen_ones(chosen, is_hidden, monkeypatch):
    """megatron-core takes Transformer Engine's Adam wherever it can import it."""
    modules = ("transformer_engine", "transformer_engine.optimizers", "apex", "apex.optimizers")
    for name in modules:  # a library that was tried, and failed, has been imported
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    kernels.hide_others(chosen)
    for name in modules:
        with pytest.raises(ImportError) if is_hidden else contextlib.nullcontext():
            importlib.import_module(name)


ROW = {"step": 7, "step_s": 0.25, "loss": 5.5, "grad_norm": 1.25, "lr": 1e-3, "loss_scale": 1.0}


def test_iteration_line_is_megatrons():
    spec = resolve(("x", {"global_batch": 4, "steps": 20}))
    line = lines.iteration_line(spec, [ROW], 0, 0, None, 1_230_000_000)
    values = re.sub(r"^.*?\]|throughput[^|]*\|", "", line)
    assert values == (
        " iteration        7/      20 | consumed samples:           28 |"
        " elapsed time per iteration (ms): 250.0 |  learning rate: 1.000000E-03 |"
        " global batch size:     4 | lm loss: 5.500000E+00 | loss scale: 1.0 | grad norm: 1.250 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
        # Ours stand behind them: 4 sequences of 128 tokens in a quarter of a second.
        " tokens per gpu per second: 2048.0 | max memory (GB): 1.23 |"
    )


def test_a_line_has_mfu_where_the_gpus_peak_is_known():
    for given, peak in (({"precision": "bf16"}, 989.4), ({}, 66.9), ({"tf32": True}, 494.7)):
        spec = resolve(("x", {"preset": "1.7b", "global_batch": 128, "micro_batch": 128, **given}))
        row = ROW | {"step_s": 100.0}
        line = lines.iteration_line(spec, [row], 0, 0, "NVIDIA H100 80GB HBM3", 10**9)
        tflops = tflops_per_gpu(spec.model, spec.seq_len, spec.tokens_per_step, 100.0, 1)
        assert f"| MFU (%): {tflops / peak * 100:.1f} |" in line
    assert "MFU" not in lines.iteration_line(spec, [ROW], 0, 0, "NVIDIA H100", 10**9)


def test_python_collects_garbage_in_the_same_steps_on_every_rank(monkeypatch):
    collected = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append("now"))
    with trainer.garbage_collected_together() as collect:
        assert not gc.isenabled() and len(collected) == 1
        counts = [collect(done) or len(collected) for done in range(1, 250)]
        assert [counts.index(number) + 1 for number in (2, 3)] == [100, 200]
    assert gc.isenabled() and gc.get_freeze_count() == 0


class Refusing:
    """Fails at whatever is asked of it but what it is given."""

    def __init__(self, **allowed):
        self.__dict__ |= allowed

    def __getattr__(self, name):
        raise AssertionError(f"a step without a save uses {name}")


def trainer_of(rank: int, **allowed) -> Refusing:
    """A trainer of which no more than what saving needs is there."""
    spec = resolve(("x", {"save_interval": 3, "steps": 9}))
    due = allowed.pop("due", lambda done: False)
    saver = Refusing(raise_failure=lambda: None, events=list, due=due, wait=lambda: None)
    return Refusing(spec=spec, checkpointer=saver, is_rank_0=rank == 0, **allowed)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_without_a_save_asks_no_rank_no_counter_and_no_device(rank):
    one = trainer_of(rank, due=lambda done: done == 3, _report_checkpoints=lambda: "")
    one.stopping = False
    assert not trainer.Trainer.save_if_due(one, 1)
    for one.stopping, done in ((False, 3), (True, 2)):  # at the third step, or when asked to stop
        with pytest.raises(AssertionError, match="uses _save"):
            trainer.Trainer.save_if_due(one, done)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("number", "problem", "kind", "reason"),
    [
        ("SIGTERM", "", Kind.SIGNAL, "SIGTERM, saved step 2"),
        (TIME_LIMIT_SIGNAL, "", Kind.TIME_LIMIT, "time limit: SIGUSR1, saved step 2"),
        (None, "", Kind.SIGNAL, "a signal to another rank, saved step 2"),
        ("SIGTERM", "no room", Kind.SIGNAL, "SIGTERM, could not save: no room"),
    ],
)
def test_rank_0_alone_writes_why_a_run_stopped(rank, number, problem, kind, reason):
    ends = []
    one = trainer_of(rank, stopping=True, interruption=Refusing(signal=number))
    one.folder = Refusing(interrupt=lambda *end: ends.append(end))
    one._save = one._say = lambda _: None
    one._report_checkpoints = lambda: problem
    assert trainer.Trainer.save_if_due(one, 2)
    assert ends == ([(kind, reason)] if rank == 0 else [])
