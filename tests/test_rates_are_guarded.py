"""A rate, a time or TFLOP/s in another unit than its name says never looks complete."""

import numpy as np
import pytest

from analysis.logs.parsing.rate_words import judge_rates, scale_of, unit_of, units_of
from tests.fixture_runs import logged


def run(step_s=2.0, **facts):
    """A 1.3B model on 16 GPUs: 64 sequences of 2048 tokens in 2 s, three steps."""
    known = {"gpus": 16, "global_batch": 64, "seq_len": 2048, "params": 1.3e9}
    known |= {"model": {"n_layer": 24, "hidden": 2048}}
    record = logged(n=3, step_s=step_s, **known | facts)
    judge_rates(record)
    return record


def test_a_rate_that_agrees_is_kept_without_a_note():
    record = run(samples_per_s=32.0, tokens_per_s=65_536.0, tflops=40.0)
    assert record.notes == []
    assert [record.steps[name][0] for name in ("tokens_per_s", "tflops")] == [65_536, 40]


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("samples_per_s", 65_536.0),  # tokens
        ("samples_per_s", 2.0),  # of one GPU
        ("tokens_per_s", 32.0),  # samples
        ("tokens_per_s", 65.536),  # thousands
        ("tokens_per_s", 131_072.0),  # twice
        ("tflops", 40.0 * 16),  # of all GPUs
        ("tflops", 1.0),
    ],
)
def test_a_rate_that_does_not_agree_is_unknown(name, printed):
    record = run(**{name: printed})
    assert np.isnan(record.steps[name]).all() and "unknown" in record.notes[0]


def test_a_rate_of_the_whole_run_is_judged_by_its_steps():
    for rate, kept in ((30.0, {"samples_per_s": 30.0}), (60_000.0, {})):
        assert run(totals={"samples_per_s": rate}).totals == kept


def test_tflops_of_experts_are_kept_for_not_all_parameters_work():
    assert run(tflops=40.0 * 16, uncounted=["64 experts"]).steps["tflops"][0] == 640


def test_tflops_above_twice_the_cards_peak_are_unknown():
    card = {"gpu_type": "NVIDIA A100-SXM4-80GB", "params": None, "model": {}}
    assert run(tflops=620.0, **card).steps["tflops"][0] == 620
    record = run(tflops=630.0, **card)
    assert np.isnan(record.steps["tflops"]).all()
    assert "315 TFLOP/s of a GPU, above the 312 of A100" in record.notes[0]


@pytest.mark.parametrize("step_s", [2e-5, 2e-6])
def test_a_time_that_no_card_can_keep_is_unknown(step_s):
    record = run(step_s=step_s)
    assert np.isnan(record.steps["step_s"]).all()
    assert " TFLOP/s of a GPU, above the 20000 of any card" in record.notes[0]


def test_a_unit_is_the_nearest_that_fits():
    amounts = units_of(64, 2048)
    assert amounts == {"samples_per_s": 64, "tokens_per_s": 131_072}
    assert unit_of(65.0, amounts) == "samples_per_s" and unit_of(1000.0, amounts) is None
    assert list(units_of(64, None)) == ["samples_per_s"]


@pytest.mark.parametrize(
    ("printed", "counted_s", "factor"),
    [(2.0, 2.0, 1), (2000.0, 2.0, 1e-3), (70.0, 2.0, 0), (2.0, 0.0, 0)],
)
def test_step_times_agree_with_counted_samples_or_say_in_which_unit(printed, counted_s, factor):
    assert scale_of(printed, counted_s, "the counted samples").factor == factor
