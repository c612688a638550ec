"""Step times, ends, rates and flags at their borders: cases made by hand. What is in another unit
than its name says never looks complete."""

import argparse
import functools

import numpy as np
import pytest

from analysis.common.reasons import Reason, of_cells
from analysis.logs.fact_options import parse_window
from analysis.logs.parsing.rate_words import judge_rates, near, scale_of
from analysis.logs.record import Failure
from analysis.logs.step_time import describe_rule, no_timing, step_times, timed
from analysis.runs.judged import Run, judged
from analysis.runs.run_row import row_of
from analysis.runs.throughput import PRINTED, throughput_of
from analysis.runs.verdict import Judgement, averages, judge, unfinished
from base.intervals import Interval
from models.flops import DEFAULT_CONVENTION
from parallel.measure.steady_time import Steady, Window
from parallel.measure.step_changes import Change
from tests.fixture_runs import logged

LOST = Reason("rows missing", "m")
record = functools.partial(logged, "x.log")


def flags(n=40, time=None, **known):
    """The doubts about a run, by their kind."""
    return {doubt.kind: doubt.text for doubt in judge(record(n, **known), time).doubts}


def test_a_step_time_is_the_logs_or_what_the_batch_takes_at_the_printed_rate():
    """16 sequences of 512 tokens at 4,096 tokens/s: 2 s; at 4 samples/s: 4 s."""
    rates = {"tokens_per_s": np.array([4096.0, np.nan, 0.0]), "samples_per_s": np.array([4.0] * 3)}
    sizes, none = {"global_batch": 16, "seq_len": 512}, np.full(3, np.nan)
    assert step_times(record(3, **rates, **sizes)).tolist() == [1, 1, 1]
    untimed = {"step_s": none} | rates
    times = step_times(record(3, **untimed, **sizes))
    assert times[0] == 2 and np.isnan(times[1:]).all()  # a rate of nothing is no time
    for known in (untimed | {"global_batch": 16}, untimed | sizes | {"tokens_per_s": none}):
        assert step_times(record(3, **known)).tolist() == [4, 4, 4]
    for known in (untimed | {"seq_len": 512}, {"step_s": none} | sizes):
        assert len(step_times(record(3, **known))) == 0
    assert step_times(record(3, step_s=np.array([np.nan, 3, 3]), **rates, **sizes))[1] == 3
    # An epoch's time is one of a micro-step.
    assert timed(record(3, **rates, **sizes, per_epoch=True)).step_s == 2


@pytest.mark.parametrize("name", ("tokens_per_s", "samples_per_s"))
@pytest.mark.parametrize("is_timed", (True, False))
def test_a_printed_rate_is_of_the_iterations_that_the_step_time_is_of(name, is_timed):
    """Of 20 entries at 2,000 and 20 at 1,000, with step times and without any."""
    rate = np.repeat([2000.0, 1000.0], 20)
    run = record(**{name: rate}, step_s=8000 / rate if is_timed else np.full(40, np.nan))
    for window, value in (((1, 20), 2000), ((25, 40), 1000), (None, None), ((90, 99), None)):
        (asked,) = judged([run], window and Window(*window))
        values, reasons = row_of(asked, None)
        assert values[name] == value
        if window is None:
            change = "steps took 4 s, then 8 s" if is_timed else "/s went from 2000 to 1000"
            assert change in of_cells(reasons)["missing"]["tokens_per_s"]


def test_a_profiled_run_and_one_without_all_its_rows_have_no_time():
    assert timed(record()).n == 40 and not judge(record()).unfit
    for extra, why in (
        ({"profiler": {"tool": "nsys"}}, "profiled with nsys: not a timing"),
        ({"profiler": {"mode": 1}}, "profiled with an unknown tool: not a timing"),
        ({"reasons": [Reason("rows missing", "9 of 20 rows")]}, "9 of 20 rows"),
    ):
        run = record(**extra, global_batch=4, samples_per_s=np.ones(40))
        judgement = judge(run)
        assert timed(run) is None and str(no_timing(run)) == why
        assert judgement.unfit and why in map(str, judgement.doubts)
        assert row_of(Run(run, None, judgement), None).values["samples_per_s"] is None


@pytest.mark.parametrize(
    ("known", "verdict", "reason"),
    [
        ({"planned_steps": 40}, "complete", "40 of 40 iterations"),
        ({"completed": True}, "complete", "it says that it completed"),
        ({"planned_steps": 41}, "stopped early", "ended at iteration 40 of 41"),
        ({"completed": False}, "stopped early", "it never says that it completed"),
        ({}, "end unknown", "the log says neither how far it should go nor an end"),
        ({"state": "running"}, "running", "its status says running"),
        ({"state": "interrupted"}, "interrupted", "it was asked to stop, and"),
        ({"reasons": [LOST], "completed": True}, "rows missing", "m"),
        ({"failure": Failure("aborted", 3, "  Aborted ")}, "aborted", "line 3: Aborted"),
        ({"failure": Failure("launcher", 3, "x")}, "no data", "line 3: x"),
        ({"planned_steps": 99, "failure": Failure("oom", 7, "out")}, "OOM", "line 7: out"),
        ({"planned_steps": 40, "completed": False}, "stopped early", "it never says that it"),
        ({"n": 0, "planned_steps": 9}, "no data", "no iteration was logged"),
    ],
)
def test_an_end_is_proven_by_what_is_nearest_to_it(known, verdict, reason):
    judgement = judge(record(**known))
    assert judgement.verdict == verdict and str(judgement.told[0]).startswith(reason)
    fine = verdict in ("complete", "end unknown", "stopped early")  # as every benchmark is
    assert unfinished(record(**known)) == ("" if fine else verdict)
    if verdict == "stopped early":  # but not one of ours that failed
        assert unfinished(record(**known, state="failed")) == verdict


@pytest.mark.parametrize(
    ("before", "last_is_skipped", "verdict"),
    [(2.0, 0, "diverged"), (2.0, 1, "complete"), (np.inf, 1, "diverged")],
)
def test_one_skipped_step_at_the_end_is_fp16_lowering_its_scale(before, last_is_skipped, verdict):
    loss = np.r_[np.full(38, 2.0), before, np.inf]
    run = record(planned_steps=40, loss=loss, skipped=np.r_[np.zeros(39), last_is_skipped])
    assert judge(run).verdict == verdict


def test_the_proof_stands_first_behind_its_line_and_is_said_once():
    lost = judge(record(reasons=[LOST], completed=True, oversubscribed=True))
    assert [*map(str, lost.told)] == ["m", "oversubscribed: more ranks than cores"] and lost.unfit
    pending = judge(record(0, state="pending"))
    assert (pending.verdict, pending.told, pending.line_no) == ("pending", [], 0)
    doubted = Judgement(Reason("v", "proof"), [Reason("f", "doubt")], 7)
    assert [*map(str, doubted.told)] == ["line 7: proof", "doubt"]
    failed = judge(record(planned_steps=40, failure=Failure("traceback", 900, "KeyError")))
    assert failed.verdict == "complete"
    assert "after the run completed, line 900: KeyError" in map(str, failed.told)


def test_a_later_doubt_takes_an_earlier_ones_place_and_those_about_losses_are_not_of_times():
    run = record()
    for kind, text in (("restart", "a"), ("schedule", "rate"), ("restart", "b")):
        run.doubt(kind, text)
    run.note("odd")
    assert [*run.reasons] == [("restart", "b", ()), ("schedule", "rate", ()), ("note", "odd", ())]
    (judgement,) = judged([run])
    assert judgement.time_doubts == ["b"]


def test_steps_that_skipped_the_optimizer_alone_have_their_tflops():
    known = {"tflops": np.full(40, 50.0), "skipped": np.ones(40)}
    for extra, tflops in (({}, 50.0), ({"profiler": {"tool": "nsys"}}, None)):
        (run,) = judged([record(**known, **extra)])
        values, reasons = row_of(run, None)
        assert values["tflops"] == tflops and not values["fit"]
        missing = of_cells(reasons)["missing"].get("tflops", "")
        assert ("profiled with nsys" in missing) == bool(extra)


def test_iterations_that_count_from_zero_are_one_more_than_the_last():
    for first, last, done in ((0, 39, True), (1, 39, False), (0, 38, False)):
        numbers = np.arange(first, last + 1.0)
        run = record(len(numbers), planned_steps=40, iteration=numbers)
        assert (judge(run).verdict == "complete") == done
    gap = record(planned_steps=40, iteration=np.r_[np.nan, np.arange(2.0, 41)])
    assert judge(gap).verdict == "complete"
    numberless = judge(record(3, planned_steps=1, iteration=np.full(3, np.nan)))
    assert str(numberless.proof) == "ended at iteration an unknown number of 1"


@pytest.mark.parametrize(
    ("n", "kind"), [(4, None), (5, "skipped"), (39, "skipped"), (40, "all skipped")]
)
def test_more_than_a_tenth_of_skipped_steps_is_said(n, kind):  # a tenth is usual in fp16
    skipped = np.r_[np.ones(n), np.zeros(40 - n)]
    doubts = flags(skipped=skipped)
    assert [*doubts] == ([kind] if kind else []) and all(str(n) in text for text in doubts.values())
    assert bool(judge(record(skipped=skipped)).unfit) == (kind == "all skipped")
    assert flags(skipped=np.full(40, np.nan)) == {}


def test_entries_that_average_ten_iterations_skip_ten():
    some, every = (flags(interval=10, skipped=np.full(40, n)) for n in (9.0, 10.0))
    assert [*some] == ["skipped", "averages"] and some["skipped"].startswith("40 of 40 entries")
    assert [*every] == ["all skipped", "averages"]
    hidden, running = flags(interval=10)["averages"], flags(running_average=True)["averages"]
    assert "averages 10 iterations" in hidden
    assert flags(running_average=True, interval=10) == {"averages": running}
    runs = [record(), record(interval=10), record(interval=10), record(running_average=True)]
    assert averages(runs) == [f"{hidden}: x.log, x.log", f"{running}: x.log"]


@pytest.mark.parametrize(
    ("long_s", "mean"), [(1.3, "the mean of all steps is 6.0% above the median"), (1.05, "")]
)
def test_a_period_says_how_far_the_mean_is_above_the_median_and_marks_the_time(long_s, mean):
    """One step in five of 1.3 s beside 1 s: (4 x 1 + 1.3) / 5 = 1.06."""
    step_s = 1 + (long_s - 1) * (np.arange(60) % 5 == 0)
    run = record(60, step_s=step_s)
    (period,) = (doubt for doubt in judge(run, timed(run)).doubts if doubt.kind == "period")
    assert period.text.endswith(mean or "logging, garbage collection or evaluation")
    assert period.columns == (("step_s", "tokens_per_s") if mean else ())


def test_running_averages_are_searched_for_no_period():
    step_s = 1 + 0.1 * (np.arange(40) % 5 == 0)
    assert timed(record(step_s=step_s)).period.every == 5
    assert timed(record(step_s=step_s, running_average=True)).period is None
    for after_s, is_told in ((1.3, False), (0.7, True)):  # a slow step lifts many; a warm-up ends
        step_s = 1 + 0.01 * np.sin(np.arange(40)) + (after_s - 1) * (np.arange(40) >= 35)
        time = timed(record(step_s=step_s, running_average=True))
        assert (time.change is not None, time.single) == (is_told, not is_told)
        assert timed(record(step_s=step_s)).change is not None


@pytest.mark.parametrize(
    ("loss", "flag"),
    [
        (np.r_[np.full(36, 2.0), np.full(4, 3.0)], None),  # 1.5 times the lowest it had been
        (np.r_[np.full(36, 2.0), np.full(4, 3.1)], "exploding loss: 3.1 at the end, 2 before"),
        (np.r_[np.full(4, 9.0), np.full(32, 2.0), np.full(4, 4.5)], None),  # half of where it began
        (np.r_[np.full(4, 9.0), np.full(32, 2.0), np.full(4, 4.6)], "exploding loss: 4.6 at the"),
        (np.r_[np.full(15, 2.0), np.full(4, 9.0)], None),  # of fewer than twenty nothing is said
        (np.r_[np.full(16, 2.0), np.full(4, 9.0)], "exploding loss: 9 at the end, 2 before"),
        (np.r_[np.full(30, 2.0), np.inf, np.full(9, 2.0)], "the loss is infinite in 1 of 40"),
        (np.r_[np.full(30, np.nan), np.full(10, 2.0)], None),
        (np.full(40, np.nan), None),
    ],
)
def test_a_loss_explodes_above_its_lowest_and_near_its_beginning(loss, flag):
    doubts = flags(len(loss), loss=loss)
    assert [*doubts] == (["loss"] if flag else [])
    assert not flag or doubts["loss"].startswith(flag)
    nan = flags(loss=np.full(40, 2.0), nan_iterations=3)
    assert nan == {"loss": "the loss is NaN in 3 of 40 iterations"}


def test_what_is_doubtful_about_a_time():
    def of(n=40, spikes=0, settled=True, independent=40.0):
        change = None if settled else Change(1.1, 1.0, 20)
        return flags(time=Steady(1.0, n, None, 0, spikes, settled, independent, change))

    assert of() == of(n=6) == {}
    assert of(n=5)["few points"].startswith("too few points: 5 ")
    assert flags(0, time=Steady(1.0, 5, None, 0, 0)) == {}  # of epochs, which are few by nature
    drifting = "40 steps count as 5.9 independent ones, a 95 % interval needs 6"
    assert of(independent=5.9) == {"few points": f"too few points: {drifting}"}
    assert [*of(settled=False)] == ["warm-up"]
    for n, text in ((1, "1 of 40 "), (8, "8 of 40 "), (9, "uneven: 9 of 40 ")):  # a fifth
        assert of(spikes=n)["spikes"].startswith(text)


def test_a_gradient_norm_of_zero_and_what_only_a_name_said_are_marked():
    norm = np.r_[np.full(38, 1.0), 0.0, np.nan]
    assert flags(grad_norm=norm) == {"grad norm": "grad norm is zero in 1 of 39 iterations"}
    assert flags(grad_norm=np.full(40, np.nan)) == {}
    origin = {"pp": "from name", "tp": "log", "dp": "from name"}
    assert flags(origin=origin, pp=4, tp=2, dp=8) == {"from name": "from name: pp 4, dp 8"}


def test_a_row_prefers_what_the_time_says_to_what_was_printed():
    """8 sequences of 100 tokens in 2 s: 4 samples and 400 tokens a second."""
    time = Steady(2.0, 40, Interval(1.9, 2.1), 0, 0)

    def rates(time=time, **known):
        run = record(**({"global_batch": 8, "seq_len": 100} | known))
        found = row_of(Run(run, time, judge(run), entries=np.arange(40)), None).values
        return found["samples_per_s"], found["tokens_per_s"]

    nines = np.full(40, 9.0)
    assert rates() == rates(samples_per_s=nines, tokens_per_s=nines) == (4, 400)
    assert rates(seq_len=None) == (4, None)
    assert rates(seq_len=None, tokens_per_s=np.r_[7.0, np.full(39, np.nan)]) == (4, 7)
    assert rates(None) == rates(global_batch=None) == (None, None)
    assert rates(None, samples_per_s=np.r_[3.0, 5.0, np.full(38, np.nan)]) == (4, 400)
    assert rates(None, totals={"samples_per_s": 5.0}) == (5, 500)
    assert rates(None, seq_len=None, totals={"tokens_per_s": 5.0}) == (None, 5)
    assert rates(None, samples_per_s=np.full(40, 2.0), tokens_per_s=np.full(40, 7.0)) == (2, 7)
    assert rates(Steady(0.0, 40, None, 0, 0), totals={"samples_per_s": np.inf}) == (None, None)
    run = record(5)
    names = ("steps", "step_s_mean", "steady_step_s", "steady_n", "steady_ci95")
    for steady, values in ((time, (2.0, 40, [1.9, 2.1])), (None, (None, 0, None))):
        row = row_of(Run(run, steady, judge(run)), None).values
        assert tuple(row[name] for name in names) == (5, 1.0, *values)


def test_a_window_is_two_numbers_in_order():
    assert parse_window("3:7") == (3, 7) and parse_window("5:5") == (5, 5)
    for text in ("7:3", "3", "3:", ":3", "a:b", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="is not FIRST:LAST"):
            parse_window(text)
    assert describe_rule(parse_window("3:7")) == "median of iterations 3 to 7"
    assert describe_rule(None).startswith("median after the warm-up")


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
