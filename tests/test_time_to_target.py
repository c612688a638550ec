"""A larger batch needs more samples: the law's fit and interval, by hand, and what tables say."""

import argparse
import math
import statistics
from importlib import metadata

import numpy as np
import pytest

from analysis import scaling
from analysis.common import convergence
from analysis.common.convergence import CriticalBatch, Point, fitted, of_benchmark, point_of
from analysis.logs.record import SCHEDULE
from analysis.runs import scaling_curve, time_to_target
from analysis.runs.fairness import Terms
from base.errors import UsageError
from base.intervals import Interval
from benchmarks import reference_convergence
from tests.fixture_runs import logged
from tests.tools.mlperf_tree import describe, result, write


def exact(*batches, a=100.0, critical=100.0):
    return [Point(batch, 1, a * (1 + batch / critical), 0.0) for batch in batches]


def test_the_law_is_found_again_and_two_batches_tell_no_noise():
    """110, 120 and 140 samples of batches of 10, 20 and 40 are 100 (1 + B / 100)."""
    law = fitted(exact(10, 20, 40), "made").value
    assert law.value == pytest.approx(100) and law.off == pytest.approx(0, abs=1e-9)
    assert law.samples_ratio(40, 10).value == pytest.approx(140 / 110)
    assert [*law.interval] == pytest.approx([100, 100])
    two = fitted(exact(10, 40), "made").value
    assert two.value == pytest.approx(100) and two.interval == Interval(0, math.inf)
    ratio = two.samples_ratio(40, 10)
    assert ratio.value == pytest.approx(140 / 110) and ratio.interval == Interval(1, 4)


def test_samples_that_do_not_grow_or_grow_as_the_batch_are_the_ends_of_the_law():
    points = [Point(batch, 1, mean, 0) for batch, mean in ((1, 101), (2, 99), (4, 100))]
    level = fitted(points, "made").value
    assert level.value == level.interval.high == math.inf
    assert level.samples_ratio(4, 1).value == 1 and level.interval.low > 0
    steps = fitted([Point(b, 1, 100 * b, 0) for b in (1, 2, 4)], "made").value
    assert steps.value == pytest.approx(0, abs=1e-9)
    assert steps.samples_ratio(4, 1).value == pytest.approx(4)
    falling = fitted([Point(b, 1, 100 - 20 * b, 0) for b in (1, 2, 3)], "made")
    assert falling == (None, "the samples to the target fall as the batch grows")
    assert fitted(exact(10), "made") == (None, "1 batch of two that a critical batch needs")


def test_an_interval_is_no_narrower_than_the_runs_own_noise():
    """Three batches that lie on the law by chance; six runs of each differ by 10 %. With r the
    law's samples over the measured ones, 3 - (sum r)^2 / sum r^2 is the least sum of squares: at an
    end of the interval it is t^2 (2.131, 15 degrees) times the variance of a mean."""
    points = [point._replace(runs=6, deviation=0.1 * point.mean) for point in exact(10, 40, 160)]
    for end in fitted(points, "made").value.interval:
        r = np.array([(1 + point.batch / end) / point.mean for point in points])
        assert 3 - r.sum() ** 2 / (r @ r) == pytest.approx(2.131**2 * 0.1**2 / 6, rel=1e-3)


def test_intervals_of_made_runs_hold_the_truth():
    """Five batches of one run each, 5 % from run to run: 95 % intervals, 1,000 trials."""
    random, held = np.random.default_rng(7), 0
    for _ in range(1000):
        points = [
            point_of(point.batch, point.mean * (1 + 0.05 * random.standard_normal(1)))
            for point in exact(10, 30, 100, 300, 1000)
        ]
        low, high = fitted(points, "made").value.interval
        held += low <= 100 <= high
    assert 930 <= held <= 970


@pytest.mark.parametrize(
    ("benchmark", "off"), [("llama31_8b", 0.036), ("gpt_oss_20b", 0.012), ("llama31_405b", 0.005)]
)
def test_the_law_fits_mlperfs_reference_points(benchmark, off):
    assert of_benchmark(benchmark).value.off == pytest.approx(off, abs=6e-4)


def test_eight_times_the_batch_of_llama_31_8b_needs_2_14_times_the_samples():
    """20 runs needed 161,587.2 samples with a batch of 16, and 345,907.2 with 128."""
    law = of_benchmark("Llama3.1_8B", "v5.1").value
    ratio = law.samples_ratio(128, 16)
    assert ratio.value == pytest.approx(345907.2 / 161587.2)
    assert f"{ratio.value:.2f} {8 / ratio.value:.1f}" == "2.14 3.7"
    errors = [4480.1 / 161587.2, 24813.2 / 345907.2]  # standard deviations of the runs
    half = 2.07 * math.hypot(*errors) / math.sqrt(20)  # t of 24 degrees
    assert ratio.interval.high == pytest.approx(ratio.value * math.exp(half), rel=2e-3)
    assert law.value == pytest.approx(84.0, abs=0.1)
    assert law.samples_ratio(48, 16).value == pytest.approx((84.04 + 48) / (84.04 + 16), rel=1e-4)


def test_the_largest_batch_is_within_the_interval_of_what_the_others_predict():
    *_, largest = points = of_benchmark("llama31_8b").value.points
    ratio = fitted(points[:3], "").value.law_ratio(largest.batch, points[0].batch)
    measured = largest.mean / points[0].mean
    assert measured / ratio.value == pytest.approx(1.10, abs=0.005)  # predicted 10 % too low
    assert ratio.interval.low < measured < ratio.interval.high
    rows = [row for row in reference_convergence.coverage().rows if "holds" in row]
    assert len(rows) == 13 and [r["benchmark"] for r in rows if not r["holds"]] == ["retinanet"]


def test_the_file_of_points_is_what_the_package_states():
    try:
        metadata.version(reference_convergence.PACKAGE)
    except metadata.PackageNotFoundError:
        pytest.skip("mlperf-logging is not installed (the extra mlperf)")
    assert reference_convergence.main(["--check"]) == 0


@pytest.mark.parametrize(
    ("words", "value", "interval"),
    [("84", 84, None), ("50:200", 100, Interval(50, 200)), ("llama31-8b", 84.04, ...)],
)
def test_a_critical_batch_is_stated_as_a_number_a_range_or_a_benchmark(words, value, interval):
    law = convergence.stated(words)
    assert law.value == pytest.approx(value, rel=1e-3)
    assert interval is ... or law.interval == interval


@pytest.mark.parametrize("words", ("0", "200:50", "-3", "nan", "1e3", "llama9", ""))
def test_another_critical_batch_is_refused_with_the_benchmarks_that_there_are(words):
    with pytest.raises(argparse.ArgumentTypeError):
        convergence.stated(words)


SIZES = {"n_layer": 12, "hidden": 768}


ADDED = [column.key for column in time_to_target.COLUMNS]


def run(gpus, batch, loss=None, name="", **more):
    """A log of 700 steps of one second on `gpus` GPUs, 25 % slower on more than one."""
    columns = {"step_s": np.full(700, more.pop("step_s", 1.0 if gpus == 1 else 1.25))}
    columns |= {} if loss is None else {"loss": loss}
    about = {"gpus": gpus, "global_batch": batch, "completed": True, "model": SIZES}
    return logged(name or f"{gpus}.log", 700, **columns, **about, **more)


def losses(batch, samples):
    """A loss that falls from 10 by 5 for each `samples`."""
    return 10 - 5 * np.arange(1, 701) * batch / samples


def table_of(runs, **terms):
    return scaling_curve.report_of(runs, [], Terms(**terms))


def test_a_stated_critical_batch_gives_the_efficiency_to_target():
    """(84 + 32) / (84 + 8) = 1.26 times the samples, and 0.8 of the speed: 0.63."""
    runs = [run(1, 8), run(4, 32)]
    table = table_of(runs, critical_batch=CriticalBatch(84.0, Interval(60, 120), "stated"))
    one, four = table.rows
    assert (one["target_samples"], one["target_efficiency"]) == (1, 1)
    assert four["target_samples"] == pytest.approx(116 / 92)
    assert four["target_samples_ci95"] == pytest.approx([152 / 128, 92 / 68])
    assert four["target_efficiency"] == pytest.approx(0.8 * 92 / 116)
    assert four["target_efficiency_ci95"] == pytest.approx([0.8 * 68 / 92, 0.8 * 128 / 152])
    assert "4.log: 4 times the GPUs reach the target 2.5 (2.4 to 2.7) times sooner" in table.below
    assert "measured between" not in "".join(table.notes)
    assert [c.key for c in table.columns[-6:]] == ["serial_ci95", *ADDED, "note"]
    single = table_of(runs, critical_batch=convergence.stated("84")).rows[1]
    assert single["target_efficiency"] == four["target_efficiency"]
    assert single["target_samples_ci95"] is single["target_efficiency_ci95"] is None


def test_without_a_critical_batch_both_cells_are_empty_and_say_which_flag_fills_them():
    table = table_of([run(1, 8), run(4, 32)])
    assert [row["target_samples"] for row in table.rows] == [None, None]
    (line,) = [line for line in table.below if "efficiency to target" in line]
    assert line.startswith("times the samples to target, efficiency to target -: no critical ba")
    assert "--target-loss NATS fits one to your runs (or --critical-batch B)" in line
    strong = table_of([run(1, 8), run(4, 8)], target_loss=5.0)
    assert "target_samples" not in strong.rows[0]
    assert time_to_target.SAME_BATCH in strong.notes
    with pytest.raises(UsageError, match="two answers: give one"):
        table_of([run(1, 8), run(4, 32)], target_loss=5.0, critical_batch=convergence.stated("84"))


def test_a_critical_batch_is_fitted_to_the_samples_at_which_runs_reached_a_loss():
    """a = 3,200 and B_c = 16: 4,800, 6,400 and 9,600 samples. A mean over the last tenth of the
    samples is at 95 % of them, so it reaches the loss 1 / 0.95 later, in every run."""
    needed = {8: 4800, 16: 6400, 32: 9600}
    runs = [run(batch // 8, batch, losses(batch, n)) for batch, n in needed.items()]
    assert time_to_target.samples_to(runs[0], 5.0) == pytest.approx(4800 / 0.95, rel=5e-3)
    larger = run(8, 64, losses(64, 1e9))  # it does not reach the loss
    table = table_of([*runs, larger], target_loss=5.0)
    assert [row["target_samples"] for row in table.rows] == pytest.approx(
        [1, 32 / 24, 48 / 24, 80 / 24], rel=1e-2
    )
    notes = "\n".join(table.notes)
    assert "fitted to 3 batches and 3 runs at a loss of 5 (the mean over the last 10%" in notes
    assert "never reached a loss of 5 (" in notes and "samples so far): 8.log" in notes
    assert "not fitted" not in notes and "never" not in "".join(
        table_of(runs, target_loss=5.0).notes
    )
    alone = table_of([runs[0], larger], target_loss=5.0)
    assert "1 batch of two that a critical batch needs, at a loss of 5" in "\n".join(alone.below)
    runs[0].steps = runs[0].steps[9::10]  # a log of each tenth step
    assert time_to_target.samples_to(runs[0], 5.0) == pytest.approx(4800 / 0.95, rel=0.02)
    runs[1].steps["iteration"] -= 1  # the first step is number 0
    assert time_to_target.samples_to(runs[1], 5.0) == pytest.approx(6400 / 0.95, rel=5e-3)
    runs[0].steps["loss"][:] = math.nan
    assert time_to_target.samples_to(runs[0], 5.0) is None


def test_a_loss_that_runs_have_at_their_first_entry_fits_nothing(tmp_path):
    runs = [run(1, 8, losses(8, 4800)), run(2, 16, losses(16, 6400))]
    below = "\n".join(table_of(runs, target_loss=100.0).below)
    assert "0 batch of two that a critical batch needs, at a loss of 100" in below
    assert "first entry, which does not say when they reached it: all" in below
    with pytest.raises(SystemExit):
        scaling.main([str(tmp_path), "--target-loss", "nan"])


def test_runs_whose_entries_are_not_the_steps_of_one_schedule_are_named_and_not_fitted():
    runs = [run(1, 8, losses(8, 4800)), run(2, 16, losses(16, 6400))]
    odd = {name: run(2, 16, losses(16, 100), f"{name}.log") for name in ("rate", "back", "epochs")}
    odd["rate"].doubt(SCHEDULE, "another learning rate")
    odd["back"].doubt("restart", "iterations go back")
    odd["epochs"].epochs = True
    odd["micro"] = run(2, 16, losses(16, 100), "micro.log", micro_s=np.ones(700))
    notes = table_of([*runs, *odd.values()], target_loss=5.0).notes
    (line,) = [note for note in notes if note.startswith("not fitted, for these are not the steps")]
    assert all(name in line for name in odd)
    assert "fitted to 2 batches and 2 runs" in "\n".join(notes)


def test_how_much_sooner_is_said_of_the_best_run_on_the_most_gpus():
    """0.8 of the speed on 4 GPUs and 92 / 116 of the samples: 2.5; the slower run has 0.4."""
    slow = run(4, 32, name="slow.log", tp=4)
    slow.steps["step_s"] *= 2
    law = convergence.stated("84")
    notes = table_of([run(1, 8), slow, run(4, 32, tp=1), run(2, 16)], critical_batch=law).notes
    assert "4.log: 4 times the GPUs reach the target 2.5 times sooner" in notes
    same = table_of([run(1, 8), run(1, 8, name="b")], critical_batch=law, scaling="weak")
    assert "sooner" not in "".join(same.notes) and same.columns[-1].key == "note"
    faster = run(4, 32, step_s=0.5)
    row = table_of([run(1, 8), faster], critical_batch=law).rows[1]
    assert row["doubtful"]["target_efficiency"].startswith("superlinear: efficiency 2.00")
    host = {"hostname": "h", "cores": 1, "ranks_per_node": 1}
    at_once = {"facts": {"host": host, "started_utc": "10"}, "ended_utc": "11"}
    row = table_of([run(1, 8, **at_once), run(4, 32, **at_once)], critical_batch=law).rows[1]
    assert row["target_samples"] and row["target_efficiency"] is None
    assert row["missing"]["target_efficiency"] == row["missing"]["efficiency"] != ""
    silent = table_of([run(1, 8), run(4, None)], critical_batch=law, scaling="weak")
    assert "-: not every log states its global batch (--global-batch)" in "".join(silent.below)


def test_repeats_of_both_batches_are_compared_as_they_were_measured():
    """Three runs each, of 100, 110 and 120, and of 150, 165 and 180 samples."""
    points = [point_of(8, [100, 110, 120]), point_of(16, [150, 165, 180]), Point(32, 1, 300, 0)]
    law = fitted(points, "made").value
    ratio = law.samples_ratio(16, 8)
    assert ratio.value == pytest.approx(1.5)
    error = statistics.stdev([100, 110, 120]) / 110 * math.sqrt(2 / 3)
    assert ratio.interval.high == pytest.approx(1.5 * math.exp(2.776 * error), rel=1e-3)
    assert law.samples_ratio(32, 8) == law.law_ratio(32, 8)
    assert law.samples_ratio(8, 8) == (1, None)
    assert law.in_words.endswith(f"made, off by at most {law.off:.1%}") and law.off > 0
    assert point_of(8, [100, 110]).deviation == pytest.approx(math.sqrt(50))


@pytest.fixture
def tree(tmp_path):
    """Weak scaling at one speed a GPU: batches of 16 and 128 on 8 and 64 GPUs."""
    root = tmp_path / "training_results_v5.1"
    for nodes in (1, 8):
        describe(root, f"made_n{nodes}", nodes)
        text = result("llama31_8b", nodes=nodes, batch=16 * nodes, step_s=2.0, tokens=False)
        write(root, text, f"made_n{nodes}", 0, "llama31_8b")
    return root


def test_a_tree_of_results_has_its_time_to_target_at_once(tree, printed):
    weak = printed(scaling.main, tree, "--scaling", "weak").partition("weak scaling: ")[2]
    assert "2.14  " in weak and "0.47  " in weak
    assert "; measured between batches with repeated runs\n" in weak
    assert "8 times the GPUs reach the target 3.7 (3.6 to 3.9) times sooner" in weak
    assert "a critical batch of 84 samples (63.1 to 114), fitted to 5 batches and 100 refer" in weak
    stated = printed(scaling.main, tree, "--scaling", "weak", "--critical-batch", "84")
    assert "2.12  " in stated  # (84 + 128) / (84 + 16)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("training_results_v3.0", "reference points have no llama31_8b v3.0, but bert"),
        ("results_of_may", "the path names no round of MLPerf, as training_results_v5.1 does"),
    ],
)
def test_a_round_without_points_says_so(tree, place, reason, printed):
    text = printed(scaling.main, tree.rename(tree.parent / place), "--scaling", "weak")
    assert "efficiency to target -: " in text and reason in text
