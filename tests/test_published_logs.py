"""The table of published logs is what is read from them, and it agrees with what they print."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from analysis.logs.load import load
from analysis.logs.model import config_of
from analysis.runs import run_table, throughput
from models.flops import CONVENTIONS
from tests.conftest import ROOT

COMMITTED = ROOT / "logs" / "published" / "real_logs.csv"
ROWS = list(csv.DictReader(COMMITTED.read_text().splitlines()))
AGREES = 0.02
NO_VOCABULARY = "sc21 without vocabulary"  # GPT-NeoX's, since it counts its FLOPs itself


def beside_printed(record, convention):
    """Ours by a convention over what the log prints, less one: the median of its entries."""
    flops = throughput.per_token(record, convention.partition(" ")[0]).value
    if convention == NO_VOCABULARY:
        flops -= throughput.of_vocabulary(record)
    return throughput.printed_rate(record) * flops - 1


def test_the_committed_file_is_what_is_read_today(shared):
    records, _ = load([shared / "logs"])
    read = run_table.rows(records, None)
    assert len(read) == len(ROWS)
    for row, committed, record in zip(read, ROWS, records, strict=True):
        assert committed["log"] == str(Path(record.source).relative_to(shared / "logs"))
        assert (row["missing"].get("tflops") or "") in committed["why"]
        for name in ("format", "gpus", "tokens_per_s", "tflops", "convention", "printed_tflops"):
            value = row[name]
            text = f"{value:.5g}" if isinstance(value, float) else str(value or "")
            assert text == committed[name], (committed["log"], name)
        if by := committed["printed_by"]:
            assert f"{beside_printed(record, by):.5g}" == committed["printed_error"]


def test_46_logs_have_tflops_and_the_others_a_reason():
    assert sum(bool(row["tflops"]) for row in ROWS) == 46
    assert [row["log"] for row in ROWS if not row["tflops"] and not row["why"]] == []
    named = {"megatron", "6n", throughput.PRINTED}
    assert {row["convention"] for row in ROWS if row["tflops"]} == named


def test_ours_is_within_two_percent_of_the_printed_or_the_table_says_why():
    compared = [row for row in ROWS if row["printed_by"]]
    assert len(compared) >= 12
    far = [row for row in compared if abs(float(row["printed_error"])) > AGREES]
    assert len(far) == 4 and all(row["why"] for row in far)
    computed = [r for r in ROWS if r["printed_tflops"] and r["convention"] != throughput.PRINTED]
    assert all(row["printed_by"] or row["why"] for row in computed)
    assert not any(row["log"].startswith("/") for row in ROWS)


@pytest.mark.parametrize("name", ["slurm-2631.out_normal", "slurm-2691.out_2_8_280.7"])
def test_megatron_of_2023_took_no_gate_and_four_times_hidden(shared, name):
    ((record,), _) = load([shared / "logs" / "ROCm+Megatron-LM" / name])
    config, _ = config_of(record)
    old = replace(config, activation="gelu", ffn_hidden=4 * config.hidden)
    check(record, CONVENTIONS["megatron-full"](old, record.seq_len, False))


def test_gpt_neox_of_2023_left_the_output_layer_out(shared):
    ((record,), _) = load([shared / "logs" / "EleutherAI+gpt-neox" / "70M_512step_59807359.out"])
    config, _ = config_of(record)
    output = 6 * config.hidden * config.vocab_size
    check(record, CONVENTIONS["sc21"](config, record.seq_len, True) - output)
    assert abs(beside_printed(record, NO_VOCABULARY)) < 1e-3
    (row,) = run_table.rows([record])
    said = "the printed TFLOP/s count recomputation and leave the vocabulary's matrix out"
    assert said in row["notes"] and said in row["reasons"]


def check(record, flops_per_token):
    """The log's TFLOP/s are these FLOPs at its own step times, within 0.1 %."""
    tokens = record.global_batch * record.seq_len
    ours = flops_per_token * tokens / (record.steps["step_s"] * record.gpus * 1e12)
    assert abs(np.median(ours / record.steps["tflops"]) - 1) < 1e-3
