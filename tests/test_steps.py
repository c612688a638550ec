"""What a step does around its arithmetic: when it waits, and where its batch comes from."""

import json
import os
import threading
import time

import pytest
import torch

from base.errors import UsageError
from parallel.batches import ahead as ahead_of
from parallel.engines import cpu
from tests.conftest import run_worker

ENGINES = ("ddp", "ddp:fp16", "fsdp2", "deepspeed_zero", "deepspeed_zero:fp16", "deepspeed_pipe")
ENGINES += ("megatron",)


@pytest.fixture(scope="module")
def steps() -> dict:
    """What tests/step_worker.py prints."""
    printed = run_worker("step_worker", "deepspeed_pipe", 1, *ENGINES)
    return json.loads(printed.splitlines()[-1])


@pytest.mark.parametrize("engine", ENGINES)
def test_no_engine_reads_a_number_before_its_optimizer_has_been_asked_to_step(engine, steps):
    assert steps["reads"][engine] == []


def test_without_fused_kernels_megatron_core_reads_one_norm_of_all_gradients(steps):
    """And not that of each: 149 reads a step of GPT-2 124M."""
    assert steps["all reads"]["megatron"] <= 2


@pytest.mark.parametrize("engine", ENGINES)
def test_a_steps_numbers_are_read_once_each_and_loss_and_stop_together(engine, steps):
    """Beside those two the norm and, where it may change, the scale."""
    may_change = engine.endswith("fp16") or engine == "megatron"
    assert len(steps["later reads"][engine]) <= 1 + may_change


def test_a_host_does_nothing_for_nobody(steps):
    """No process a step (numactl), no ranges of a profiler that is not there, no autograd."""
    assert steps["host"] == {"ranges": 0, "processes": 0, "to_local": 0}
    assert steps["squares"]["deepspeed_pipe"] <= 1  # of all gradients together


@pytest.mark.parametrize("engine", ENGINES)
def test_two_steps_of_two_learning_rates_and_two_micro_batches_are_those_of_ddp(engine, steps):
    for ours, theirs in zip(steps["curves"][engine], steps["curves"]["ddp"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3)
    (loss, _), (after, _) = steps["curves"]["ddp"]
    assert after < 0.99 * loss  # so that the learning rate matters


def test_deepspeeds_fp16_optimizer_starts_from_the_models_weights(steps):
    """While DeepSpeed builds it, it takes a step, which decays the fp32 weights."""
    assert steps["masters"] == 0.0


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_megatrons_fused_activation_is_the_reference_models(name, steps):
    assert steps["activations"][name] < 1e-6


def test_on_a_gpu_the_interleaved_schedule_sends_one_message_at_a_time_beside_its_work(steps):
    """And what it has sent is freed, where gloo is not what still reads it."""
    on = dict.fromkeys(("bias_activation_fusion", "bias_dropout_fusion"), True)
    on |= {"use_cpu_initialization": False}
    for name, batched, freed in (("pp", True, True), ("vpp", False, True), ("gloo", False, False)):
        p2p = {"batch_p2p_comm": batched, "overlap_p2p_comm": not batched}
        expected = on | p2p | {"deallocate_pipeline_outputs": freed}
        assert steps["configured"][name] == expected


@pytest.mark.parametrize("engine", ["megatron", "deepspeed_pipe"])
def test_on_a_cpu_nothing_is_fused_that_nothing_compiles(engine, steps):
    assert set(steps["configured"][engine].values()) == {False}


def test_transformer_engine_is_given_no_mask_of_documents_for_which_it_writes_all_scores(steps):
    ours, theirs = "FusedAttention", "DotProductAttention"
    of = steps["configured"]
    assert of["whole torch"] == of["documents torch"] == of["documents te"] == ours
    assert of["whole te"] == theirs


def test_the_next_batch_is_made_while_one_is_used_and_what_is_wrong_is_raised_where_it_is_used():
    made, go_on = [], threading.Event()

    def made_batches():
        for number in range(3):
            made.append(number)
            if number == 1:
                assert go_on.wait(10)
            yield number
        raise UsageError("token id 300")

    with ahead_of(made_batches(), torch.device("cpu")) as ahead:
        assert next(ahead) == 0
        while 1 not in made:  # asked for by nobody yet
            time.sleep(0.001)
        assert made == [0, 1]
        go_on.set()
        assert [next(ahead), next(ahead)] == [1, 2]
        with pytest.raises(UsageError, match="token id 300"):
            next(ahead)
    with ahead_of(iter([7]), torch.device("cpu")) as ahead:
        assert list(ahead) == [7]


def test_one_rank_has_no_wrapper_that_reduces_its_gradients(steps):
    assert steps["model"] == "GPT"


def test_the_shards_of_a_copy_are_neighbours_and_one_copy_has_no_dimension(steps):
    assert steps["shards"] == {"copy shard": [2, 3], "shard": [0, 1, 2, 3]}


def test_norms_that_cannot_be_recomputed_for_want_of_a_compiler_are_refused_in_words(steps):
    assert "megatron-core compiles C++ for it with ninja" in steps["compiler"]
    assert steps["compiler"].endswith("here: ninja is not here")


def test_gathered_parts_may_differ_in_length(monkeypatch):
    """gloo gathers equal parts alone: these go by all-to-all, each whole to every rank."""
    mine, other = torch.arange(12.0).view(2, 3, 2), torch.arange(6.0).view(1, 3, 2)

    def exchange(received, sent, lengths, sent_lengths, group):
        assert (lengths, sent_lengths) == ([2, 1], [2, 2]) and sent.equal(torch.cat([mine] * 2))
        torch.cat([mine, other], out=received)

    monkeypatch.setattr(cpu.dist, "all_to_all_single", exchange)
    parts = [torch.empty_like(mine), torch.empty_like(other)]
    cpu._gather_any_parts(None)(parts, mine)
    assert parts[0].equal(mine) and parts[1].equal(other)
    alike = []
    cpu._gather_any_parts(lambda *all_of_it: alike.append(all_of_it))([mine, mine], mine)
    assert len(alike) == 1


def test_ranks_that_may_use_the_same_cores_share_them(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    # torchrun: 8 ranks on the node's 16 cores; srun: each rank has cores of its own.
    assert cpu.share_of_cores(lambda mine: [mine] * 8) == 2
    bound = [("here", [rank]) for rank in range(1, 8)]
    assert cpu.share_of_cores(lambda mine: [mine, *bound]) == 16
