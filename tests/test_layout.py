"""Layouts: what follows from one, every reason why one cannot run, and rows of arrays that are
layouts."""

import itertools
from dataclasses import fields, replace

import numpy as np
import pytest

from analysis.logs.record import Record
from analysis.planner.columns import FAMILIES, Columns, Step, columns, columns_of
from base.errors import UsageError
from models.config import PRESETS, GPTConfig
from parallel.config.changes import changes
from parallel.config.layout import (
    AXES,
    EXPERT_AXES,
    RANK_AXES,
    SET_AXES,
    UNEVEN,
    Layout,
    shown_axes,
    split_world,
    uneven_ends,
)
from parallel.config.resolve import resolve
from parallel.config.run_spec import SETTINGS, assembled


def test_tp_counts_fastest_then_cp_then_dp_then_pp():
    layout = Layout(tp=2, cp=5, dp=3, pp=4)
    axes = ("pp", "dp", "cp", "tp")
    seen = [tuple(layout.coords(rank)[axis] for axis in axes) for rank in range(120)]
    assert seen == list(itertools.product(range(4), range(3), range(5), range(2)))


def test_every_axis_of_the_list_is_a_size_a_setting_a_column_and_a_fact():
    declared = {kind: {f.name for f in fields(kind)} for kind in (Layout, Columns, Record)}
    assert all(set(AXES) <= names for names in declared.values())
    assert set(EXPERT_AXES) <= declared[Layout] & declared[Record] & SETTINGS.keys()
    assert set(SET_AXES) <= SETTINGS.keys() and set(RANK_AXES) <= set(AXES)


def test_world_batch_and_bubble_follow():
    layout = Layout(dp=4, tp=2, cp=3, pp=8, vpp=2, micro_batch=3, n_micro=16)
    assert layout.world_size == 192
    assert layout.global_batch == 4 * 3 * 16
    assert layout.bubble == 7 / 32


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, n_micro=3),  # in groups of pp only where chunks are interleaved
        Layout(pp=2, vpp=2, n_micro=4),
        Layout(tp=2, sequence_parallel=True),
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


def test_a_setting_that_no_layout_has_is_refused():
    for name, value, words in (
        ("cp", 0, "cp must be at least 1 and at most 1000000, not 0"),
        ("tp", 2.0, "tp must be a whole number, not 2.0"),
        ("zero_stage", 4, "zero_stage must be at least 0 and at most 3, not 4"),
        ("recompute", "some", "recompute must be one of .*, not 'some'"),
    ):
        with pytest.raises(UsageError, match=words):
            Layout(**{name: value})


SP, LOSS = {"sequence_parallel": True}, {"account_for_loss_in_pipeline_split": True}
BOTH = LOSS | {"account_for_embedding_in_pipeline_split": True}
FIRST, LAST = {"decoder_first_pipeline_num_layers": 4}, {"decoder_last_pipeline_num_layers": 8}
LAST_2 = {"decoder_last_pipeline_num_layers": 2}


@pytest.mark.parametrize(
    ("layout", "seq_len", "words"),
    [
        ({"tp": 5}, 1024, "tp 5 does not divide the 12 attention heads (1, 2, 3, 4, 6, 12 do)"),
        ({"pp": 5}, 1024, "pp 5 does not divide the 12 layers"),
        ({"pp": 2, "vpp": 4, "n_micro": 2}, 1024, "pp 2 x vpp 4 does not divide the 12"),
        ({"vpp": 2}, 1024, "vpp 2 interleaves pipeline stages and needs pp >= 2"),
        ({"pp": 2, "vpp": 2, "n_micro": 3}, 1024, "multiples of pp 2, but there are 3"),
        ({"pp": 5}, 1024, "12 do; with megatron decoder_first_pipeline_num_layers 2 and"),
        ({"pp": 5} | LOSS, 1024, "pp 5 with account_for_loss_in_pipeline_split True does not"),
        ({"pp": 4} | FIRST, 1024, "(1, 2, 3, 4, 6, 12 do, without these settings)"),
        (FIRST, 1024, "decoder_first_pipeline_num_layers 4 is of pipeline stages and needs pp"),
        ({"pp": 3} | FIRST | LOSS, 1024, "ends count as layers, or have a number of layers, not"),
        ({"pp": 3} | FIRST | LAST, 1024, "with decoder_first_pipeline_num_layers 4 and decoder"),
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

    # Heads of keys and the feed-forward are divided, too.
    (problem,) = Layout(tp=4).problems(PRESETS["tiny-llama"], 128)
    assert "tp 4 does not divide the 2 heads of keys and values (1, 2 do)" in problem
    (problem,) = Layout(tp=4).problems(GPTConfig(2, 64, 4, ffn_hidden=66), 64)
    assert "tp 4 does not divide ffn_hidden 66" in problem


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        ({"pp": 2, "vpp": 2}, [3, 3, 3, 3]),
        ({"pp": 2, "vpp": 7} | BOTH, [0, *[1] * 12, 0]),
        ({"pp": 4} | FIRST | LAST_2, [4, 3, 3, 2]),
        ({"pp": 3, "vpp": 2} | FIRST | {"decoder_last_pipeline_num_layers": 4}, [2] * 6),
        ({"pp": 2} | FIRST | LAST, [4, 8]),
        ({"pp": 3} | LAST_2, [5, 5, 2]),
    ],
)
def test_stages_need_not_be_equal(layout, sizes):
    layout = Layout(n_micro=4 * 3, **layout)
    chunks = layout.chunks(12)
    assert [len(chunk) for chunk in chunks] == sizes
    assert [layer for chunk in chunks for layer in chunk] == list(range(12))
    assert layout.ends(12) == (sum(sizes[:: layout.pp]), sum(sizes[layout.pp - 1 :: layout.pp]))
    assert layout.problems(PRESETS["gpt2-124m"], 1024) == []


def test_uneven_ends_hold_all_layers_and_no_more_than_other_stages():
    """Llama 3 405B has one layer fewer in the first stage and in the last (arXiv 2407.21783)."""
    assert uneven_ends(126, 16, 8) == uneven_ends(126, 16) == (7, 7)
    assert uneven_ends(32, 5) == (6, 5) and uneven_ends(32, 5, head=2.4) == (7, 4)
    assert uneven_ends(96, 64) is None and uneven_ends(7, 8) is None
    for n, pp, vpp in itertools.product(range(2, 70), range(2, 20), (1, 2, 3)):
        if n % (pp * vpp) and (ends := uneven_ends(n, pp, vpp, head=3.0)):
            layout = Layout(pp=pp, vpp=vpp, n_micro=pp, **ends.settings(vpp))
            assert layout.ends(n) == ends and max(ends) <= max(map(len, layout.chunks(n))) * vpp
            assert layout.problems(replace(PRESETS["gpt2-124m"], n_layer=n), 64) == []


def test_a_run_of_equal_stages_has_no_word_of_uneven_ones():
    even, uneven = (
        resolve(("test", {"engine": "megatron", "n_layer": 12, "data": "none"} | how))
        for how in ({"gpus": 3, "pp": 3}, {"gpus": 4, "pp": 4} | FIRST | LAST_2)
    )
    assert not set(UNEVEN) & (even.settings().keys() | even.layout.as_dict().keys())
    assert uneven.settings().items() >= (FIRST | LAST_2).items()
    assert (even.name, uneven.name) == ("megatron-pp3", "megatron-pp4-first4-last2")
    assert assembled(uneven.settings()) == uneven
    assert [c.name for c in changes(uneven.settings(), even.settings())][:2] == [*FIRST, *LAST_2]
    with pytest.raises(UsageError, match="has no decoder_last_pipeline_num_layers .megatron has"):
        resolve(("test", {"engine": "deepspeed_pipe", "gpus": 2, "pp": 2} | LAST_2))


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"ep": 3, "dp": 3}, ["ep 3 does not divide the 8 experts"]),
        ({"ep": 4, "dp": 2}, ["ep 4 does not divide the 2 ranks of a stage (tp x cp x dp)"]),
        ({"ep": 2, "etp": 2, "dp": 2}, ["ep 2 x etp 2 does not divide the 2 ranks"]),
        ({"etp": 3, "dp": 3}, ["etp 3 does not divide moe_ffn_hidden_size 128"]),
        ({"ep": 2, "etp": 2, "dp": 4}, []),
        ({"ep": 4, "dp": 2, "tp": 2}, []),  # experts are split otherwise than attention
    ],
)
def test_experts_divide_the_ranks_of_a_stage(layout, words):
    problems = Layout(**layout).problems(PRESETS["tiny-moe"], 128)
    assert len(problems) == len(words)
    assert all(map(str.__contains__, problems, words))
    (problem,) = Layout(ep=2, dp=2).problems(PRESETS["tiny"], 128)
    assert problem == "ep 2 splits experts, and the model has none"


def test_copies_of_an_expert_are_ranks_of_its_stage():
    """Of 2 stages of 8 ranks: etp counts fastest, then ep, then the copies."""
    layout = Layout(tp=2, dp=4, pp=2, ep=2, etp=2)
    assert layout.expert_copies == 2
    copies = [layout.expert_copy(rank) for rank in range(16)]
    assert copies == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4


def test_a_dense_run_has_no_word_of_experts():
    dense, routed = (
        resolve(("test", {"engine": "megatron", "preset": preset, "data": "none", "gpus": 2} | how))
        for preset, how in (("tiny", {}), ("tiny-moe", {"ep": 2}))
    )
    of_experts = {"experts", "ep", "etp", "moe_token_dispatcher_type"}
    assert not of_experts & (dense.settings().keys() | dense.layout.as_dict().keys())
    assert of_experts <= routed.settings().keys() and routed.layout.as_dict()["ep"] == 2
    assert (dense.name, routed.name) == ("megatron-dp2", "megatron-ep2-dp2")
    assert assembled(dense.settings()) == dense


def test_every_problem_is_named_and_not_the_first_alone():
    layout = Layout(tp=5, pp=5, vpp=3, n_micro=6, sequence_parallel=True)
    words = ("heads", "ffn", "layers", "multiples", "divide seq_len", "exceeds")
    for word, problem in zip(words, layout.problems(PRESETS["gpt2-124m"], 1026), strict=True):
        assert word in problem


def test_ranks_that_cannot_be_split_are_refused():
    assert split_world(16, tp=2, pp=4) == 2
    assert split_world(48, tp=2, pp=4, cp=3) == 2
    for gpus, sizes, words in (
        (6, {"tp": 1, "pp": 2, "cp": 2}, "6 ranks .* tp 1 x pp 2 x cp 2.*multiple of 4"),
        (6, {"tp": 2, "pp": 2}, "6 ranks cannot be split into tp 2 x pp 2.*multiple of 4"),
    ):
        with pytest.raises(UsageError, match=words):
            split_world(gpus, **sizes)


SIZES = {"layers": 12, "hidden": 96, "heads": 6, "vocab": 100, "seq": 64}


def test_what_is_not_given_is_one_rank_of_a_gpt_in_half_precision():
    x = columns(**SIZES)
    assert len(x) == 1 and x.layout(0) == Layout()
    one = {f: getattr(x, f)[0] for f in ("ffn", "kv_heads", "width", "grad_width", "gpus_per_node")}
    assert one == {"ffn": 384, "kv_heads": 6, "width": 2, "grad_width": 2, "gpus_per_node": 8}
    assert x.head_dim.tolist() == [16.0] and x.dropout.tolist() == [True]
    (step,) = x.rows
    assert all(getattr(step, name) == usual for name, usual in Step._field_defaults.items())
    assert not step.slower and not step.output_twice
    y = columns(**SIZES, width=4, deepspeed=True, ffn=7, kv_heads=2, slower=False)
    assert (y.grad_width[0], y.ffn[0], y.kv_heads[0], y.slower[0]) == (4, 7, 2, False)
    assert columns(**SIZES, deepspeed=True).slower.tolist() == [True]
    flags = {"deepspeed": np.array([False, True, False]), "fsdp2": np.array([False, False, True])}
    families = [FAMILIES[i] for i in columns(**SIZES, **flags).family]
    assert families == ["megatron", "deepspeed", "fsdp"]
    with pytest.raises(TypeError, match=r"no such columns: \['n_experts'\]"):
        columns(**SIZES, n_experts=8)


def test_a_llamas_architecture_is_in_its_columns():
    names = ("heads", "head_dim", "kv_heads", "ffn", "glu", "untied", "qk_norm", "dropout")
    for preset, values in (
        ("llama3-8b", [32, 128, 8, 14336, True, True, False, False]),
        ("qwen3-0.6b", [16, 128, 8, 3072, True, False, True, False]),
        ("gpt2-124m", [12, 64, 12, 3072, False, False, False, True]),
    ):
        x = columns(PRESETS[preset])
        assert [getattr(x, name)[0] for name in names] == values
    x = columns(PRESETS["llama3-8b"], glu=np.array([True, False]), dropout=True)
    assert x.glu.tolist() == [True, False] and x.dropout.tolist() == [True, True]


def test_rows_are_layouts():
    given = {"dp": 3, "tp": 2, "cp": 2, "pp": 2, "vpp": 3, "micro_batch": 5, "n_micro": 4}
    layout = Layout(
        **given, sequence_parallel=True, zero_stage=1, recompute="full", offload="optimizer"
    )
    stages, cut = np.array([0, 1]), np.array([False, True])
    x = columns(**SIZES, **given, sequence_parallel=cut, zero_stage=stages, recompute=2, offload=1)
    assert x.layout(1) == layout
    assert x.take(x.zero_stage == 1).layout(0) == layout and len(x.take(stages == 1)) == 1
    assert x.gpus.tolist() == [layout.world_size] * 2 == [24, 24]
    assert x.global_batch.tolist() == [layout.global_batch] * 2 == [60, 60]


@pytest.mark.parametrize(
    ("engine", "precision", "width", "grad_width"),
    [
        ("megatron", "fp32", 4, 4),
        ("megatron", "bf16", 2, 4),  # it accumulates gradients in fp32
        ("megatron", "fp16", 2, 4),  # as in bf16
        ("deepspeed_pipe", "bf16", 2, 4),
    ],
)
def test_a_runs_settings_are_a_row(engine, precision, width, grad_width):
    given = {"preset": "tiny", "engine": engine, "precision": precision, "device": "cuda"}
    given |= {"zero_stage": int(engine == "deepspeed_pipe")}
    spec = resolve(("test", given | {"gpus": 4, "tp": 2, "recompute": "full", "seq_len": 32}))
    x = columns_of(spec)
    assert x.layout(0) == spec.layout and spec.layout.recompute == "full"
    assert (x.width[0], x.grad_width[0], x.seq[0]) == (width, grad_width, 32)
    assert x.deepspeed[0] == x.slower[0] == (engine == "deepspeed_pipe")
    assert (x.layers[0], x.hidden[0]) == (spec.model.n_layer, spec.model.hidden)


def test_a_table_shows_the_seldom_axes_only_where_a_row_has_more_than_one_of_them():
    usual = ["tp", "pp", "vpp", "dp"]
    rows = [{"tp": 8, "cp": 1, "ep": None}, {"cp": None, "etp": 1}]
    assert shown_axes(rows) == shown_axes([]) == usual
    assert shown_axes([*rows, {"cp": 2}]) == ["tp", "cp", "pp", "vpp", "dp"]
    assert shown_axes([*rows, {"etp": 2}]) == [*usual, "etp"]
