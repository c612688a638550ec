"""A column's row is a layout: the same sizes, the same derived numbers, the same problems."""

import numpy as np
import pytest

from models.config import PRESETS
from parallel.config.layout import Layout
from parallel.config.layout_arrays import FAMILIES, FLAGS, columns, columns_of
from parallel.config.settings import resolve

SIZES = {"layers": 12, "hidden": 96, "heads": 6, "vocab": 100, "seq": 64}


def test_what_is_not_given_is_one_rank_of_a_gpt_in_half_precision():
    x = columns(**SIZES)
    assert len(x) == 1 and x.layout(0) == Layout()
    one = {f: getattr(x, f)[0] for f in ("ffn", "kv_heads", "width", "grad_width", "gpus_per_node")}
    assert one == {"ffn": 384, "kv_heads": 6, "width": 2, "grad_width": 2, "gpus_per_node": 8}
    assert x.head_dim.tolist() == [16.0] and x.dropout.tolist() == [True]
    for name in (*FLAGS, "slower"):
        assert getattr(x, name).tolist() == [False], name
    y = columns(**SIZES, width=4, deepspeed=True, ffn=7, kv_heads=2, slower=False)
    assert (y.grad_width[0], y.ffn[0], y.kv_heads[0], y.slower[0]) == (4, 7, 2, False)
    assert columns(**SIZES, deepspeed=True).slower.tolist() == [True]
    flags = {"deepspeed": np.array([False, True, False]), "fsdp2": np.array([False, False, True])}
    families = [FAMILIES[i] for i in columns(**SIZES, **flags).family]
    assert families == ["megatron", "deepspeed", "fsdp"]
    with pytest.raises(TypeError, match=r"no such columns: \['experts'\]"):
        columns(**SIZES, experts=8)


def test_a_llamas_architecture_is_in_its_columns():
    names = ("heads", "head_dim", "kv_heads", "ffn", "glu", "untied", "qk_norm", "dropout")
    for config, found in (
        (PRESETS["llama3-8b"], [32, 128, 8, 14336, True, True, False, False]),
        (PRESETS["qwen3-0.6b"], [16, 128, 8, 3072, True, False, True, False]),
        (PRESETS["gpt2-124m"], [12, 64, 12, 3072, False, False, False, True]),
    ):
        x = columns(config)
        assert [getattr(x, name)[0] for name in names] == found
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


def test_published_zero_3_keeps_checkpoints_in_host_memory_and_our_engines_do_not():
    rows = {"deepspeed": True, "zero_stage": 3, "recompute": 2}
    assert columns(**SIZES | rows).host_checkpoints.tolist() == [True]
    given = {"preset": "tiny", "engine": "deepspeed_zero", "zero_stage": 3, "recompute": "full"}
    assert columns_of(resolve(("test", given | {"gpus": 2}))).host_checkpoints.tolist() == [False]
