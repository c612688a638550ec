"""A rate, a time or TFLOP/s in another unit than its name says never looks complete."""

import numpy as np
import pytest

from analysis.logs.parsing.rate_words import judge_rates, of_steps, unit_of, units_of
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
    assert (
        record.notes == []
        and record.steps["tokens_per_s"][0] == 65_536
        and record.steps["tflops"][0] == 40
    )


@pytest.mark.parametrize(
    ("name", "printed", "kept", "value", "said"),
    [
        ("samples_per_s", 65_536.0, "tokens_per_s", 65_536.0, "read as tokens/s"),
        ("tokens_per_s", 32.0, "samples_per_s", 32.0, "read as samples/s"),
        ("tokens_per_s", 4096.0, "tokens_per_s", 65_536.0, "read as tokens/s of one GPU"),
        ("samples_per_s", 2.0, "samples_per_s", 32.0, "read as samples/s of one GPU"),
    ],
)
def test_a_rate_in_another_unit_is_read_as_that_one(name, printed, kept, value, said):
    record = run(**{name: printed})
    assert record.steps[kept][-1] == value and record.notes[0].endswith(said)


@pytest.mark.parametrize("wrong", [65.536, 131_072.0, 8192.0])  # in thousands; twice; of 2 GPUs
def test_a_rate_in_no_unit_is_unknown(wrong):
    record = run(tokens_per_s=wrong)
    assert (
        np.isnan(record.steps["tokens_per_s"]).all()
        and np.isnan(record.steps["samples_per_s"]).all()
    )
    assert record.notes[0].endswith("the rate is unknown")


def test_a_rate_of_the_whole_run_is_judged_by_its_steps():
    record = logged(n=3, step_s=2.0, gpus=16, global_batch=64, seq_len=2048)
    record.totals = {"samples_per_s": 60_000.0}
    judge_rates(record)
    assert record.totals == {"tokens_per_s": 60_000.0}
    record.totals = {"samples_per_s": 700.0}
    judge_rates(record)
    assert record.totals == {}


def test_tflops_of_all_gpus_are_divided_among_them():
    record = run(tflops=40.0 * 16)
    assert record.steps["tflops"][0] == pytest.approx(40.0)
    assert record.notes[0].endswith("read as those of all 16 GPUs")
    kept = run(tflops=40.0 * 16, uncounted=["64 experts"])  # its parameters do not all work
    assert kept.steps["tflops"][0] == 640


def test_tflops_above_twice_the_cards_peak_are_unknown():
    record = run(tflops=620.0, gpu_type="NVIDIA A100-SXM4-80GB", params=None, model={})
    assert record.steps["tflops"][0] == 620
    record = run(tflops=630.0, gpu_type="NVIDIA A100-SXM4-80GB", params=None, model={})
    assert (
        np.isnan(record.steps["tflops"]).all() and "above twice the 312 of A100" in record.notes[0]
    )


@pytest.mark.parametrize("step_s", [2e-5, 2e-6])
def test_a_time_that_no_card_can_keep_is_unknown(step_s):
    record = run(step_s=step_s)
    assert np.isnan(record.steps["step_s"]).all()
    assert " TFLOP/s of a GPU for the forward pass" in record.notes[0]


def test_a_unit_is_the_nearest_that_fits():
    amounts = units_of(64, 2048, 16)
    assert set(amounts) == {
        "samples_per_s",
        "tokens_per_s",
        "samples_per_s_of_a_gpu",
        "tokens_per_s_of_a_gpu",
    }
    assert unit_of(32.5, 2.0, amounts) == "samples_per_s"
    assert unit_of(4000.0, 2.0, amounts) == "tokens_per_s_of_a_gpu"
    assert unit_of(500.0, 2.0, amounts) is None
    assert list(units_of(64, None, 1)) == ["samples_per_s"]


def test_step_times_agree_with_counted_samples_or_say_in_which_unit():
    by = "the counted samples"
    assert of_steps(2.0, 64 / 32.0, by) == (1.0, "")
    assert of_steps(2000.0, 64 / 32.0, by)[0] == 1e-3
    assert of_steps(70.0, 64 / 32.0, by)[0] == 0.0
    assert of_steps(2.0, 0.0, by)[0] == 0.0
