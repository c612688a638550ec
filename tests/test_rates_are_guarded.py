"""A rate, a time or TFLOP/s in another unit than its name says never looks complete."""

import numpy as np
import pytest

from analysis.logs.parsing.rate_words import judge_rates, near, scale_of
from analysis.runs.throughput import PRINTED, throughput_of
from models.flops import DEFAULT_CONVENTION
from tests.fixture_runs import logged

A100 = {"gpu_type": "NVIDIA A100-SXM4-80GB", "params": None, "model": {}}


def run(step_s=2.0, **facts):
    """A 1.3B model on 16 GPUs: 64 sequences of 2048 tokens in 2 s, three steps."""
    known = {"gpus": 16, "global_batch": 64, "seq_len": 2048, "params": 1.3e9}
    known |= {"model": {"n_layer": 24, "hidden": 2048}}
    record = logged(n=3, step_s=step_s, **known | facts)
    judge_rates(record)
    return record


def test_a_rate_that_agrees_is_kept_without_a_note():
    record = run(samples_per_s=32.0, tokens_per_s=65_536.0, tflops=40.0)
    assert not record.notes and not record.doubts
    assert [record.steps[name][0] for name in ("tokens_per_s", "tflops")] == [65_536, 40]
    # of experts, for not all parameters work; just below twice the card's peak of 312
    assert run(tflops=40.0 * 16, uncounted=["64 experts"]).steps["tflops"][0] == 640
    assert run(tflops=620.0, **A100).steps["tflops"][0] == 620


@pytest.mark.parametrize(
    ("name", "printed", "facts"),
    [
        ("samples_per_s", 65_536.0, {}),  # tokens
        ("samples_per_s", 2.0, {}),  # of one GPU
        ("tokens_per_s", 32.0, {}),  # samples
        ("tokens_per_s", 65.536, {}),  # thousands
        ("tokens_per_s", 131_072.0, {}),  # twice
        ("tflops", 40.0 * 16, {}),  # of all GPUs
        ("tflops", 1.0, {}),
        ("tflops", 630.0, A100),  # above twice its peak
        ("step_s", 2e-5, {}),  # no card keeps it
    ],
)
def test_a_rate_or_time_that_does_not_agree_is_unknown(name, printed, facts):
    record = run(**{name: printed}, **facts)
    (doubt,) = record.doubts.values()
    assert np.isnan(record.steps[name]).all() and doubt.endswith("unknown")


def test_a_rate_of_the_whole_run_is_judged_by_its_steps():
    for rate, kept in ((30.0, {"samples_per_s": 30.0}), (60_000.0, {})):
        assert run(totals={"samples_per_s": rate}).totals == kept


@pytest.mark.parametrize(
    ("printed", "counted_s", "factor"),
    [(2.0, 2.0, 1), (2000.0, 2.0, 1e-3), (70.0, 2.0, 0), (2.0, 0.0, 0)],
)
def test_step_times_agree_with_counted_samples_or_say_in_which_unit(printed, counted_s, factor):
    assert scale_of(printed, counted_s, "the counted samples").factor == factor
    assert near(65.0, 64) and not near(64, 80) and not near(0.0, 64)


def test_six_per_parameter_is_taken_only_where_a_log_does_not_state_its_sizes():
    """Where it does, what it prints is shown, or nothing, and the missing fact is named."""
    by_params = throughput_of(run(), 65_536.0, 40.0)
    assert by_params[:2] == (pytest.approx(6 * 1.3e9 * 65_536 / 16e12), "6n")
    stated = {"model": {"n_layer": 24, "hidden": 2048, "n_head": 16, "vocab_size": 51_200}}
    assert throughput_of(run(**stated), 65_536.0, 40.0).convention == DEFAULT_CONVENTION
    for printed, convention in ((40.0, PRINTED), (None, DEFAULT_CONVENTION)):
        without = throughput_of(run(**stated, seq_len=None), 65_536.0, printed)
        assert without[:2] == (printed, convention) and "--seq-len" in without.reason
