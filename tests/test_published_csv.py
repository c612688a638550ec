"""CSV files of published measurements: one reader, one vocabulary, remarks in columns."""

import pytest

from analysis.logs.model import config_of
from analysis.logs.published_csv import column_name, number, read_csv
from analysis.published.published_runs import named_rows, record_of
from base.files import ROOT
from benchmarks.planner.held_out import EXPERTS
from benchmarks.planner.published_rows import read_rows
from models.config import PRESETS
from models.flops import megatron

PUBLISHED = ROOT / "logs" / "published"


@pytest.mark.parametrize(
    ("heading", "name"),
    [
        ("seconds_per_iteration", "step_s"),
        ("step_s", "step_s"),
        ("Speed", "step_s"),
        ("epoch_s", "epoch_s"),  # seconds of an epoch
        ("Epochs", "epochs"),  # a number of them
        ("seq", "seq_len"),
        ("Wall time (s)", "wall_s"),
    ],
)
def test_a_heading_has_one_name(heading, name):
    assert column_name(heading) == name


@pytest.mark.parametrize(
    ("text", "value"),
    [("137s", 137.0), ("29,971.23", 29971.23), (".5", 0.5), ("2e-3", 0.002), ("OOM", None)]
    + [("1e999", None), ("", None)],
)
def test_a_cell_is_the_number_it_starts_with(text, value):
    assert number(text) == value


def test_remarks_of_other_peoples_tables_become_columns(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(
        "gpus,notes\n8,ID 3; LINT tp*pp*dp=32 != gpus 16; log lost\n"
        "8,first iteration after resume\n\n8,gradients in bf16; FULL_SHARD\n"
    )
    names = ("lint", "warm_up", "gradients")
    rows = read_csv(path).rows
    assert [tuple(row.text(name) for name in names) for row in rows] == [
        ("tp*pp*dp=32 != gpus 16", "", ""),
        ("", "yes", ""),
        ("", "", "bf16"),
    ]
    assert [row.line_no for row in rows] == [2, 3, 5]


def models_with_experts(table):
    """Each row of a table whose model has experts: its cells, its run and its model."""
    for name, row in named_rows(PUBLISHED / table):
        if row.number("topk") and not row.text("blocks"):
            record = record_of(row, name)
            record.model["tied"], record.params = False, None  # published counts are rounded
            yield row, record, config_of(record).value


@pytest.mark.parametrize(
    ("name", "count"), list(zip(EXPERTS, (49, 17, 18, 11, 6, 6, 71), strict=True))
)
def test_published_runs_of_models_with_experts_are_read_whole(name, count):
    """Their layouts fill their GPUs, and their sizes give the released number of parameters."""
    rows = [row for file in EXPERTS[name] for row in models_with_experts(file)]
    assert len(rows) == count
    for row, record, config in rows:
        assert record.tp * (record.cp or 1) * record.pp * record.dp == record.gpus
        assert (record.ep or 1) == (row.number("ep") or 1)
        assert config.n_params / 1e9 == pytest.approx(row.number("params_b"), rel=0.01)


@pytest.mark.parametrize(
    ("file", "model", "preset"),
    [
        ("moe_modelzoo_qwen3.csv", "Qwen3-235B-A22B", "qwen3-235b-a22b"),
        ("primus_moe.csv", "DeepSeek-V2-Lite", "deepseek-v2-lite"),
        ("dgxc_moe.csv", "DeepSeek-V3", "deepseek-v3"),
        ("automodel_h100.csv", "GPT-OSS-120B", "gpt-oss-120b"),
    ],
)
def test_a_row_of_a_released_model_has_the_work_of_its_preset(file, model, preset):
    config = next(c for row, _, c in models_with_experts(file) if row.text("model") == model)
    assert megatron(config, 4096, False) == megatron(PRESETS[preset], 4096, False)


def test_no_hybrid_is_predicted_as_a_dense_model():
    rows = read_rows([PUBLISHED / "bridge_moe_ablations.csv"])
    assert len(rows.ids) == 18 and {name for name, _ in rows.left_out} == {
        f"bridge_moe_ablations-{n:03}" for n in (*range(7, 13), 18, 19, 20)
    }
    assert set(rows.steps.experts) == {0, 64, 128}


def test_facts_of_a_layout_in_remarks_are_columns(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('gpus,notes\n8,"head_dim 128; blocks: 23 Mamba-2, 6 attention; x"\n')
    row = read_csv(path).rows[0]
    assert (row.number("head_dim"), row.text("blocks")) == (128, "23 Mamba-2, 6 attention")
