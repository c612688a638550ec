"""Verdicts, intervals and doubts of a comparison: a difference is claimed only when it is larger
than what the same configuration varies by."""

import math

import numpy as np
import pytest

from analysis import compare
from analysis.common.statistics import log_ratio, ratio_of_medians
from analysis.runs import pairs
from analysis.runs.fairness import CHANGED, changes
from analysis.runs.judged import judged
from analysis.runs.pairs import Comparison, Pair, compared, of_study, pair_of
from analysis.runs.ratio import INTERVALS, Side, side_of, times_ratio
from analysis.runs.repeats import unlike
from base.errors import UsageError
from base.intervals import Interval
from benchmarks.planner.held_out import repeat_noise
from tests.fixture_runs import facts, logged, write

SAME = {"global_batch": 64, "seq_len": 1024, "precision": "bf16", "params": 1e9}
ONE_OR_TWO = "one or two runs a side: too few to tell what changes from run to run"


def run(name, step_s=1.0, n=40, seed=0, **values):
    """A complete run of a foreign log with half a percent of noise."""
    noise = 1 + 0.005 * np.random.default_rng(seed).standard_normal(n)
    known = SAME | {"gpus": 8, "completed": True} | values
    return judged([logged(f"{name}.log", n, step_s=step_s * noise, **known)])[0]


def repeated(name, step_s, repeats, **values):
    return [
        run(f"{name}{i}", step_s, seed=i, run=name, repeat=repeat, **values)
        for i, repeat in enumerate(repeats)
    ]


@pytest.mark.parametrize(
    ("numbers", "gpus", "verdict"),
    [
        ((1.1, 1.05, 1.15), None, "B is faster: 1.100 times as fast as A (1.050 to 1.150)"),
        ((0.25, 0.2, 0.5), None, "B is slower: it takes 4.000 times as long as A (2.000 to 5.000)"),
        ((0.98, 0.96, 1.0), None, "within noise: B is 0.980 times as fast as A but could be 0.960"),
        ((1.25,), None, "B takes 0.800 of A's time; how much is noise is unknown"),
        ((1.25, 1.1, 2.0), (8, 24), "0.800 of A's time per step (0.500 to 0.909) and 2.400 of its"),
        ((2.0,), (8, 24), "0.500 of A's time per step and 1.500 of its"),
    ],
)
def test_a_verdict_is_one_plain_sentence(numbers, gpus, verdict):
    ratio, *ends = numbers
    comparison = Comparison(ratio, Interval(*ends) if ends else None, "runs", 3, 4, gpus=gpus)
    row = Pair("x", "y", comparison, ["but"], []).row()
    assert verdict in row["verdict"] and row["sentence"] == f"{row['verdict']}; but"
    assert ("within noise" in row["verdict"]) == (0.96 in ends)
    assert (row["ratio"], row["n_b"], row["ratio_ci95"]) == (ratio, 4, ends or None)


def test_three_runs_a_side_are_compared_as_runs_and_fewer_by_their_steps():
    """ln times 0, 1, 2 and 0, 2, 4, 6; of single runs each has its own interval."""
    three, four = (Side("x", 1, tuple(map(math.exp, ln))) for ln in ((0, 1, 2), (0, 2, 4, 6)))
    runs = compared(three, four)
    assert (runs.unit, runs.n_a, runs.n_b) == ("runs", 3, 4)
    assert runs.ratio == pytest.approx(math.exp(1) / ((math.exp(2) + math.exp(4)) / 2))
    one = Side("x", 1, (2.0,), Interval(1.8, 2.1), steps=10)
    two = Side("x", 1, (1.0, 1.2), Interval(0.9, 1.3), steps=30)
    found = compared(one, two)
    assert (found.unit, found.n_a, found.n_b) == ("steps of a run", 10, 30)
    assert (found.ratio, *found.interval) == pytest.approx((2 / 1.1, 1.8 / 1.3, 2.1 / 0.9))
    unknown = Side("x", 1, (2.0,), steps=5)
    assert compared(unknown, two) is compared(two, unknown) is None


def test_two_short_repeats_do_not_say_what_noise_is():
    """Two repeats are all below two others in a third of all cases: their range is no 95 %. What
    the steps of each allow is the least that their noise is."""
    short, long = (side_of(repeated("a", 1.0, (1, 2), n=n)) for n in (4, 40))
    assert len(short.seconds) == len(long.seconds) == 2
    assert short.ci95 is None and compared(short, short) is compared(short, long) is None
    assert long.ci95.low < min(long.seconds) and max(long.seconds) < long.ci95.high
    assert compared(long, long).is_noise


def test_a_gain_is_found_with_its_size_and_one_within_the_spread_of_repeats_is_noise():
    def side(centre, between, seed):
        draw = np.random.default_rng(seed).standard_normal(8)
        return Side("x", 1, tuple(centre * (1 + between * draw)))

    gain = compared(side(1.195, 0.01, 0), side(1.0, 0.01, 1)).interval
    assert 1 < gain.low < 1.195 < gain.high
    same = (compared(side(1, 0.1, 2 * s), side(1, 0.1, 2 * s + 1)) for s in range(100))
    assert sum(not comparison.is_noise for comparison in same) <= 12  # 5 expected


@pytest.mark.parametrize(("n", "noise", "fewest"), [(12, 0.0, 98), (200, 0.9, 96)])
def test_two_single_runs_of_one_speed_are_noise(n, noise, fewest):
    """Or there is no verdict. noise: how much of a step's deviation the next one keeps."""
    rng = np.random.default_rng(0)

    def steps():
        deviations = [0.0]
        for draw in rng.standard_normal(n + 20):
            deviations.append(noise * deviations[-1] + draw)
        return 1 + 0.01 * np.array(deviations[-n:])

    two = (judged([logged(step_s=steps(), n=n, **SAME) for _ in "ab"]) for _ in range(100))
    found = [pair_of([a], [b]).comparison for a, b in two]
    assert sum(comparison is None or comparison.is_noise for comparison in found) >= fewest


def test_a_run_without_a_fit_time_is_said_and_left_out(tmp_path, monkeypatch):
    untimed, profiled, skipped, good = (run(n).record for n in ("none", "nsys", "fp16", "good"))
    untimed.steps = untimed.steps[:0]
    profiled.profiler = {"tool": "nsys"}
    skipped.steps["skipped"] = 1  # it has a time, but no optimizer step
    bad = [untimed, profiled, skipped]
    monkeypatch.setattr(pairs, "load", lambda paths, facts: ([*bad, good], ["x: refused"]))
    (timed,), left_out = pairs.timed_runs([tmp_path])
    assert timed.record is good
    names = [line.partition(":")[0] for line in left_out]
    assert names == ["x", "none.log", "nsys.log", "fp16.log"]
    monkeypatch.setattr(pairs, "load", lambda paths, facts: (bad, []))
    with pytest.raises(UsageError, match="nothing here was timed; none.log: no step was timed"):
        pairs.timed_runs([tmp_path])


def test_changes_are_what_both_state_and_what_differs():
    a = run("a", tp=1, pp=None, facts={"spec": {"lr": 1, "seed": 2, "only": 3}}).record
    b = run("b", tp=2, pp=4, facts={"spec": {"lr": 5, "seed": 2}}).record
    assert changes(a, b) == {"tp": (1, 2), "lr": (1, 5)}
    assert changes(a, b, settings=False) == {"tp": (1, 2)}
    for of, nccl, torch in ((a, "2.27.5", "2.12.0"), (b, "2.29.3", "2.13.0")):
        of.facts = {"host": {"nccl": nccl, "driver": None}, "versions": {"torch": torch}}
        of.facts |= {"attention": "the same"}
    versions = {"nccl": ("2.27.5", "2.29.3"), "torch": ("2.12.0", "2.13.0")}
    assert changes(a, b) == {"tp": (1, 2)} | versions
    b.params, a.model = 2e9, {"n_layer": 1}
    assert changes(a, b)["params"] == (1e9, 2e9)  # B does not state sizes
    a.model |= {"hidden": 8, "experts": {"num_moe_experts": 4, "moe_router_topk": 2}}
    b.model = {"n_layer": 2, "hidden": 8, "experts": {"num_moe_experts": 8, "moe_router_topk": 2}}
    sizes = {"n_layer": (1, 2), "num_moe_experts": (4, 8)}
    assert changes(a, b) == {"tp": (1, 2)} | sizes | versions


@pytest.mark.parametrize(
    ("first", "second", "unit"),
    [
        ((1, 2, 3), (1, 2, 3), "pairs of runs"),
        ((1, 2, 3), (1, 2, 4), "runs"),
        ((1, 2, 3), (2, 1, 3), "runs"),  # not in the order that they ran in
        ((1, 1, 2), (1, 1, 2), "runs"),
        ((None, 2, 3), (None, 2, 3), "runs"),
        ((1, 2), (1, 2), "steps of a run"),
    ],
)
def test_repeats_of_one_number_are_pairs(first, second, unit):
    verdict = pair_of(repeated("a", 1.0, first), repeated("b", 1.1, second, tp=2))
    assert verdict.comparison.unit == unit
    assert verdict.comparison.ratio == pytest.approx(1 / 1.1, abs=0.01)
    assert (ONE_OR_TWO in verdict.doubts) == (unit == "steps of a run")


def test_doubts_name_the_side_they_are_about():
    b = run("b", tp=2, commit="c+dirty", completed=None, oversubscribed=True)
    doubts = pair_of([run("a")], [b]).doubts
    assert "oversubscribed, more ranks than cores: b.log" in doubts and CHANGED in doubts
    assert any(d.startswith("not complete, its steps are counted all the same: b") for d in doubts)
    assert pair_of([run("a", commit="c")], [run("b", commit="c", tp=2)]).doubts == [ONE_OR_TWO]
    average = pair_of([run("a")], [run("b", interval=100)])
    assert any("B's entries average 100 iterations" in d for d in average.doubts)
    assert "iterations per entry 1 -> 100" in average.values
    host = {"hostname": "h", "cores": 2, "ranks_per_node": 2}
    about = {"ended_utc": "12", "facts": {"host": host, "started_utc": "10"}}
    together = pair_of([run("a", **about)], [run("b", **about)]).doubts
    assert any(d.startswith("b.log: ran at the same time as a.log on h") for d in together)
    running = pair_of([run("a", step_s=1.1, running_average=True)], [run("b")])
    assert running.comparison.is_noise is None
    base, averaged = (run("a", running_average=average) for average in (False, True))
    assert times_ratio(side_of([run("b")]), side_of([base])).interval
    assert times_ratio(side_of([run("b")]), side_of([averaged])).interval is None  # in every table
    assert any("A prints running averages" in d for d in running.doubts)


def test_repeats_may_differ_in_their_seed_but_not_in_what_a_step_costs():
    specs = ({"seed": 1, "threads": 1}, {"seed": 2, "threads": 1}, {"seed": 1, "threads": 2})
    first, seed, threads = (run("a", facts={"spec": spec}).record for spec in specs)
    assert unlike(first, seed) == unlike(seed, first) == []
    assert unlike(first, threads) == unlike(threads, first) == ["threads"]


def test_other_gpus_give_ratios_and_what_is_unknown_is_said():
    """2 s on 8 GPUs and 1 s on 32: half the time, twice the GPU-seconds."""
    verdict = pair_of(repeated("a", 2.0, (1, 2, 3)), repeated("b", 1.0, (1, 2, 3), gpus=32))
    assert "GPUs 8 -> 32" in verdict.values
    assert verdict.comparison.verdict.startswith("on 32 GPUs instead of 8, B takes 0.50")
    assert verdict.doubts == []
    unknown = pair_of([run("a", seq_len=None)], [run("b", gpus=16, seq_len=None)]).doubts
    assert "not stated on both sides, so not compared: sequence length" in unknown


def test_other_work_is_refused(tmp_path, capsys):
    a = write(tmp_path / "a", facts("s", "ddp", engine="ddp"))
    b = write(tmp_path / "b", facts("s", "ddp", engine="ddp", n_layer=8), step_s=0.2)
    for paths, status in (([a, b], 1), ([a, a], 0), ([a], 2)):
        assert compare.main(list(map(str, paths))) == status
    assert "invalid comparison: model n_layer 8 here, 4" in capsys.readouterr().out


def test_runs_of_one_name_and_a_missing_baseline_are_told(tmp_path, rows_of):
    for folder, batch in (("a", 1), ("b", 2)):  # two runs called ddp
        write(tmp_path / folder, facts("s", "gone", engine="ddp", micro_batch=batch))
    (row,) = rows_of(compare.main, tmp_path)
    assert (row["a"], row["b"]) == ("a/ddp", "b/ddp")
    assert row["doubts"][-1].startswith("the study's baseline gone has no time here: a/ddp ")


def test_the_baseline_is_beside_all_others_and_the_fastest_of_a_size_beside_its_own():
    def study(baseline, times):
        return [
            run(name, step_s, seed=i, gpus=gpus, run=name, baseline=baseline)
            for i, (name, (gpus, step_s)) in enumerate(times.items())
        ]

    times = {"b1": (1, 1.0), "c2": (2, 0.9), "a2": (2, 0.6), "d2": (2, 0.7), "e4": (4, 0.5)}
    verdicts = of_study(study("b1", times))
    beside = [("b1", name) for name in ("a2", "c2", "d2", "e4")]
    assert [(v.a, v.b) for v in verdicts] == [*beside, ("a2", "d2"), ("a2", "c2")]
    rows = pairs.table(verdicts, any_commit=False).rows
    assert [row["gpus"] for row in rows] == [2, 2, 2, 4, 2, 2]
    ratios = [1 / 0.6, 1 / 0.9, 1 / 0.7, 1 / 0.5, 0.6 / 0.7, 0.6 / 0.9]
    assert [row["ratio"] for row in rows] == pytest.approx(ratios, rel=0.01)
    notes, of_baseline = (pairs.table(v, False).notes for v in (verdicts, verdicts[:4]))
    assert INTERVALS in notes and len(notes) == len(of_baseline) + 1
    assert any(
        note.startswith("below the rows of the baseline, A is the fastest") for note in notes
    )
    one_size = {"c": (1, 1.0), "a": (1, 2.0), "b": (1, 4.0)}
    without = of_study(study(None, one_size))
    assert [(v.a, v.b) for v in without] == [("a", "b"), ("a", "c"), ("c", "b")]
    assert not any("has no time here" in doubt for v in without for doubt in v.doubts)
    with pytest.raises(UsageError, match="two things are compared, but there is only c"):
        of_study(study("c", one_size)[:1])


def test_the_noise_of_repeats_is_the_least_error_of_one_number():
    """1, 2, 4: predicting 2 errs by 1, 0 and 1/2; predicting 1 by 0, 1/2, 3/4: the least."""
    assert repeat_noise([[1.0, 2.0, 4.0]]) == pytest.approx(1.25 / 3)
    assert repeat_noise([[1.0], [2.0, 2.0], [1.0, 2.0]]) == pytest.approx(0.5 / 4)
    assert repeat_noise([[1.0], [2.0]]) is repeat_noise([]) is None
    # Jean Zay's four identical 52B runs, seconds: no single number is nearer than 21.6 %.
    assert repeat_noise([[129, 217, 125, 225]]) == pytest.approx(0.2160, abs=1e-4)


def test_pairs_are_a_t_interval_of_their_own_ratios():
    """ln ratios 1, 2, 3 whatever both drift by."""
    drift = [1.0, 50.0, 9.0]
    a = [d * math.exp(k) for d, k in zip(drift, (1, 2, 3), strict=True)]
    assert log_ratio(a, drift, paired=True) == pytest.approx((2, 2 - 2.484, 2 + 2.484), abs=1e-3)


def test_a_ratio_is_that_of_the_medians_and_lies_in_its_interval():
    """A run that was disturbed (9 s) moves neither the ratio of medians nor leaves its interval."""
    ratio, low, high = ratio_of_medians([2.0, 2.1, 9.0], [1.0, 1.05, 1.1], paired=True)
    assert ratio == 2 and low < 2 < high
    alike = ratio_of_medians([2.0, 2.0, 2.2], [1.0, 1.0, 1.0])
    assert alike.value == 2 and alike.low <= 2 <= alike.high
    # Six pairs of which five have the ratio 2: the t interval of their logarithms is beyond it.
    apart = ratio_of_medians([2.0] * 5 + [2e6], [1.0] * 5 + [1.0])
    assert apart.value == 2 and apart.low <= 2


def test_unpaired_sides_are_welchs():
    """ln times 0, 1, 2 and 0, 2, 4, 6: variances of the means 1/3 and 5/3, 4.08 degrees of freedom,
    t of them is 2.756, times sqrt(2) is 3.898."""
    a, b = ([math.exp(v) for v in side] for side in ((0, 1, 2), (0, 2, 4, 6)))
    assert log_ratio(a, b) == pytest.approx((-2, -2 - 3.898, -2 + 3.898), abs=1e-3)
    same = pytest.approx(math.log(0.5))
    assert log_ratio([1.0, 1.0], [2.0, 2.0]) == (same, same, same)
    # One side without variance: the other's degrees of freedom, 1 of two runs.
    middle, low, high = log_ratio([1.0, 1.0], [1.0, math.exp(2)])
    assert (middle, high - low) == pytest.approx((-1, 2 * 12.706), abs=2e-3)
