"""FLOPs: each convention against a number somebody else printed."""

import csv

import pytest

from models import flops
from models.config import PRESETS, GPTConfig


def test_sc21_is_the_papers_equation_three():
    config, B, s = PRESETS["175b"], 1536, 2048
    L, h, V = config.n_layer, config.hidden, config.vocab_size
    paper = 96 * B * s * L * h**2 * (1 + s / (6 * h) + V / (16 * L * h))
    assert flops.sc21(config, s, recompute=True) * B * s == pytest.approx(paper, rel=1e-12)


def test_sc21_without_recomputation_counts_three_passes():
    config, s = PRESETS["1.7b"], 2048
    L, h, V = config.n_layer, config.hidden, config.vocab_size
    expected = 72 * L * h**2 * (1 + s / (6 * h) + V / (12 * L * h))
    assert flops.sc21(config, s, recompute=False) == pytest.approx(expected, rel=1e-12)


def test_seed_rule_gives_the_jean_zay_tables_own_number():
    # "(52*4*2*1024*4*1*256)/(122*16*4*1000)" is printed there as 55.8667...
    nominal = GPTConfig(n_layer=64, hidden=8192, n_head=32)
    per_param = flops.seed(nominal, 1024, recompute=True) / nominal.n_params
    assert per_param == 8
    assert per_param * 52e9 * 1024 * 1024 / (122 * 64) / 1e12 == pytest.approx(55.86675, abs=1e-4)


def test_seed_rule_recomputes_every_published_row_but_the_three_that_do_not_follow(shared):
    path = shared / "published" / "seed003_jeanzay_v100.csv"
    wrong, checked = {}, 0
    for row in csv.DictReader(path.read_text().splitlines()):
        if not (row["seconds_per_iteration"] and row["tflops_per_gpu"] and row["global_batch"]):
            continue
        if "!= gbs" in row["notes"]:
            continue  # its batch contradicts itself, so it has no number of tokens
        tokens = int(row["seq"]) * int(row["global_batch"])
        seconds, gpus = float(row["seconds_per_iteration"]), int(row["gpus"])
        ours = 8 * float(row["params_b"]) * 1e9 * tokens / (seconds * gpus * 1e12)
        published = float(row["tflops_per_gpu"])
        if ours != pytest.approx(published, rel=0.011, abs=0.06):
            wrong[published] = round(ours, 1)
        checked += 1
    assert checked > 60
    assert wrong == {46.7: 49.7, 48.8: 49.7, 38.3: 43.1}


def test_palm_is_six_n_plus_attention():
    # PaLM's appendix B on its own form, 6 N + 12 L H Q T, with H Q = hidden.
    config = PRESETS["gpt2-124m"]
    n = config.n_params - 1024 * 768
    assert flops.palm(config, 1024, False) == 6 * n + 12 * 12 * 768 * 1024


def test_megatron_counts_the_causal_half_of_attention():
    config, s = PRESETS["gpt2-124m"], 1024
    full = flops.sc21(config, s, recompute=False)
    half_of_attention = 6 * config.n_layer * config.hidden * s
    for recompute in (False, True):
        assert flops.megatron(config, s, recompute) == pytest.approx(full - half_of_attention)


def test_tflops_divide_by_seconds_and_gpus():
    config = PRESETS["gpt2-124m"]
    one = flops.tflops_per_gpu(config, 1024, tokens=1e6, seconds=10, gpus=1)
    assert one == pytest.approx(flops.megatron(config, 1024, False) * 1e6 / 10 / 1e12)
    assert flops.tflops_per_gpu(config, 1024, 1e6, 10, gpus=4) == pytest.approx(one / 4)
    once = flops.sc21(config, 1024, recompute=False)  # unless it is said that layers run again
    assert flops.tflops_per_gpu(config, 1024, 1e12, 1, 1, "sc21") == once


def test_kaplans_rule_gives_the_gpt_3_papers_own_total():
    """Brown et al. 2020, table D.1: 174,600M parameters and 300B tokens are 3.14e23 FLOPs."""
    assert flops.six_n(PRESETS["175b"], 2048, False) * 300e9 == pytest.approx(3.14e23, rel=2e-3)


def test_the_seed_rule_counts_three_passes_where_nothing_is_recomputed():
    config = PRESETS["175b"]
    ratio = flops.seed(config, 2048, recompute=True) / flops.seed(config, 2048, recompute=False)
    assert ratio == pytest.approx(4 / 3)
