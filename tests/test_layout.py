"""Layouts: what follows from one, and every reason why one cannot run."""

import pytest

from models.config import PRESETS
from models.errors import UsageError
from parallel.layout import Layout, split_world


def test_tp_counts_fastest_then_dp_then_pp():
    layout = Layout(tp=2, dp=2, pp=2)
    seen = [tuple(layout.coords(rank)[axis] for axis in ("pp", "dp", "tp")) for rank in range(8)]
    assert seen == sorted(seen) and len(set(seen)) == 8


def test_world_batch_and_bubble_follow():
    layout = Layout(dp=4, tp=2, pp=8, vpp=2, micro_batch=3, n_micro=16)
    assert layout.world_size == 64
    assert layout.global_batch == 4 * 3 * 16
    assert layout.bubble == 7 / 32


def test_layout_that_fits_has_no_problems():
    assert Layout(tp=8, pp=8, dp=8, n_micro=8).problems(PRESETS["175b"], 2048, 8) == []


@pytest.mark.parametrize(
    ("layout", "preset", "seq_len", "words"),
    [
        (Layout(tp=2), "gpt2-1.5b", 1024, r"tp 2 does not divide the 25 attention heads.*1, 5, 25"),
        (Layout(tp=4), "gpt2-1.5b", 1024, "tp 4 does not divide the 25"),
        (Layout(tp=8), "gpt2-1.5b", 1024, "tp 8 does not divide the 25"),
        (Layout(pp=5), "gpt2-124m", 1024, "pp 5 does not divide the 12 layers"),
        (Layout(pp=2, vpp=4, n_micro=2), "gpt2-124m", 1024, "pp 2 x vpp 4 does not divide the 12"),
        (Layout(vpp=2), "gpt2-124m", 1024, "needs pp >= 2"),
        (Layout(pp=4, vpp=3, n_micro=6), "gpt2-124m", 1024, "multiples of pp 4, but there are 6"),
        (Layout(sequence_parallel=True), "gpt2-124m", 1024, "needs tp >= 2"),
        (Layout(tp=4, sequence_parallel=True), "gpt2-124m", 1022, "tp 4 does not divide seq_len"),
        (Layout(), "gpt2-124m", 2048, "seq_len 2048 exceeds the model's 1024 positions"),
        (Layout(offload="all", zero_stage=1), "tiny", 64, "offload all needs zero_stage 3, not 1"),
        (Layout(offload="optimizer"), "tiny", 64, "offload optimizer needs zero_stage"),
        (Layout(tp=16), "175b", 2048, "tp 16 exceeds the 8 GPUs of a node"),
    ],
)
def test_each_problem_is_named_with_its_numbers(layout, preset, seq_len, words):
    import re

    problems = layout.problems(PRESETS[preset], seq_len, gpus_per_node=8)
    assert any(re.search(words, problem) for problem in problems), problems


def test_ranks_that_cannot_be_split_are_refused():
    assert split_world(16, tp=2, pp=4) == 2
    with pytest.raises(UsageError, match="6 ranks cannot be split into tp 2 x pp 2.*multiple of 4"):
        split_world(6, tp=2, pp=2)
    with pytest.raises(UsageError, match="tp must be a positive whole number, not 0"):
        Layout(tp=0)
