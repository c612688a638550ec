"""Layouts: what follows from one, and every reason why one cannot run."""

import itertools
from dataclasses import fields, replace

import pytest

from analysis.logs.record import Record
from base.errors import UsageError
from models.config import PRESETS, GPTConfig
from parallel.config.axes import AXES, RANK_AXES, SET_AXES
from parallel.config.layout import Layout, split_world
from parallel.config.layout_arrays import Columns
from parallel.config.settings import RunSpec


def test_tp_counts_fastest_then_cp_then_dp_then_pp():
    layout = Layout(tp=2, cp=2, dp=2, pp=2)
    axes = ("pp", "dp", "cp", "tp")
    seen = [tuple(layout.coords(rank)[axis] for axis in axes) for rank in range(16)]
    assert seen == list(itertools.product((0, 1), repeat=4))
    last = Layout(tp=2, cp=5, dp=3, pp=4).coords(2 * 5 * 3 * 3 + 2 * 5 * 2 + 2 * 4 + 1)
    assert last == {"tp": 1, "cp": 4, "dp": 2, "pp": 3}


def test_every_axis_of_the_list_is_a_size_a_setting_a_column_and_a_fact():
    declared = {kind: {f.name for f in fields(kind)} for kind in (Layout, Columns, Record, RunSpec)}
    assert all(set(AXES) <= names for kind, names in declared.items() if kind is not RunSpec)
    assert set(SET_AXES) <= declared[RunSpec] and set(RANK_AXES) <= set(AXES)


def test_world_batch_and_bubble_follow():
    layout = Layout(dp=4, tp=2, cp=3, pp=8, vpp=2, micro_batch=3, n_micro=16)
    assert layout.world_size == 192
    assert layout.global_batch == 4 * 3 * 16
    assert layout.bubble == 7 / 32


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2),
        Layout(pp=2, n_micro=3),  # in groups of pp only where chunks are interleaved
        Layout(pp=2, vpp=2, n_micro=4),
        Layout(pp=3, vpp=2, n_micro=6),
        Layout(tp=2, sequence_parallel=True),
        Layout(tp=3),
        Layout(tp=12, sequence_parallel=True),
        Layout(cp=9),
        Layout(cp=2, tp=12, sequence_parallel=True),
        *(Layout(zero_stage=stage) for stage in range(4)),
        *(Layout(offload="optimizer", zero_stage=stage) for stage in (1, 2, 3)),
        Layout(offload="all", zero_stage=3),
    ],
)
def test_what_is_just_possible_has_no_problem(layout):
    """12 layers and 12 heads; 1,008 positions, which every tp here divides."""
    assert layout.problems(PRESETS["gpt2-124m"], 1008) == []
    assert Layout(tp=2).problems(PRESETS["gpt2-124m"], 1023) == []  # no sequence is cut


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cp": 0}, "cp must be a positive whole number, not 0"),
        ({"tp": 2.0}, "tp must be a positive whole number, not 2.0"),
        ({"zero_stage": 4}, "zero_stage must be one of .*, not 4"),
        ({"recompute": "some"}, "recompute must be one of .*, not 'some'"),
    ],
)
def test_a_setting_that_no_layout_has_is_refused(given, words):
    with pytest.raises(UsageError, match=words):
        Layout(**given)


SP = {"sequence_parallel": True}


@pytest.mark.parametrize(
    ("layout", "seq_len", "words"),
    [
        ({"tp": 5}, 1024, "tp 5 does not divide the 12 attention heads (1, 2, 3, 4, 6, 12 do)"),
        ({"pp": 5}, 1024, "pp 5 does not divide the 12 layers"),
        ({"pp": 2, "vpp": 4, "n_micro": 2}, 1024, "pp 2 x vpp 4 does not divide the 12"),
        ({"vpp": 2}, 1024, "vpp 2 interleaves pipeline stages and needs pp >= 2"),
        ({"pp": 2, "vpp": 2, "n_micro": 3}, 1024, "multiples of pp 2, but there are 3"),
        (SP, 1024, "needs tp >= 2"),
        (SP | {"tp": 4}, 1022, "tp 4 does not divide seq_len 1022"),
        ({"cp": 3}, 1023, "cp 3 cuts seq_len 1023 unevenly into 6 chunks"),
        (SP | {"cp": 2, "tp": 4}, 1020, "tp 4 does not divide seq_len 1020 / cp 2"),
        ({}, 2048, "seq_len 2048 exceeds the model's 1024 positions"),
        ({"offload": "all", "zero_stage": 1}, 64, "offload all needs zero_stage 3, not 1"),
        ({"offload": "optimizer"}, 64, "offload optimizer needs zero_stage"),
    ],
)
def test_each_problem_is_named_with_its_numbers(layout, seq_len, words):
    """Of 12 layers and 12 heads; ffn_hidden is a multiple of 5 here."""
    config = replace(PRESETS["gpt2-124m"], ffn_hidden=3840)
    (problem,) = Layout(**layout).problems(config, seq_len)
    assert words in problem


def test_heads_of_keys_and_the_feed_forward_are_divided_too():
    (problem,) = Layout(tp=4).problems(PRESETS["tiny-llama"], 128)
    assert "tp 4 does not divide the 2 heads of keys and values (1, 2 do)" in problem
    (problem,) = Layout(tp=4).problems(GPTConfig(2, 64, 4, ffn_hidden=66), 64)
    assert "tp 4 does not divide ffn_hidden 66" in problem


def test_every_problem_is_named_and_not_the_first_alone():
    layout = Layout(tp=5, pp=5, vpp=3, n_micro=6, sequence_parallel=True)
    problems = layout.problems(PRESETS["gpt2-124m"], 1026)
    said = ("heads", "ffn", "layers", "multiples", "divide seq_len", "exceeds")
    assert len(problems) == len(said)
    assert all(word in problem for word, problem in zip(said, problems, strict=True))


def test_ranks_that_cannot_be_split_are_refused():
    assert split_world(16, tp=2, pp=4) == 2
    assert split_world(48, tp=2, pp=4, cp=3) == 2
    with pytest.raises(UsageError, match="6 ranks .* tp 1 x pp 2 x cp 2.*multiple of 4"):
        split_world(6, tp=1, pp=2, cp=2)
    with pytest.raises(UsageError, match="6 ranks cannot be split into tp 2 x pp 2.*multiple of 4"):
        split_world(6, tp=2, pp=2)
    with pytest.raises(UsageError, match="gpus 4, tp -1, pp -1: each must be positive"):
        split_world(4, tp=-1, pp=-1)
