"""Verdicts, intervals and doubts of a comparison: cases made by hand."""

import math
import tracemalloc

import numpy as np
import pytest

from analysis.measured import comparisons as module
from analysis.measured.comparisons import (
    Comparison,
    Verdict,
    changes,
    compare,
    judged,
    of_study,
)
from analysis.measured.fairness import ANY_COMMIT, CHANGED
from base.errors import UsageError
from tests.fixture_runs import logged

SAME = {"global_batch": 64, "seq_len": 1024, "precision": "bf16", "params": 1e9}


def run(name, step_s=1.0, n=40, seed=0, **given):
    """A complete run of a foreign log with half a percent of noise."""
    noise = 1 + 0.005 * np.random.default_rng(seed).standard_normal(n)
    facts = SAME | {"gpus": 8, "completed": True} | given
    record = logged(f"{name}.log", n, step_s=step_s * noise, **facts)
    return record, record.steps["step_s"]


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ((0.1, 0.05, 0.15), "B is faster by 10.0% ± 5.0%"),
        ((-0.1, -0.15, -0.05), "B is slower by 10.0% ± 5.0%"),
        ((0.02, -0.01, 0.05), "within noise: B is +2.0% but could be -1.0% to +5.0%"),
        ((0.02, 0.0, 0.04), "within noise: B is +2.0% but could be +0.0% to +4.0%"),
        ((-0.02, -0.04, 0.0), "within noise: B is -2.0% but could be -4.0% to +0.0%"),
        ((0.25, None, None), "B takes 0.800 of A's time; how much is noise is unknown"),
    ],
)
def test_a_verdict_is_one_plain_sentence(found, verdict):
    said = Comparison(*found, "runs", 3, 4)
    assert said.verdict == verdict
    plain = said.as_dict()
    assert plain["ratio"] == 1 + found[0] and plain["verdict"] == verdict and plain["n_b"] == 4
    assert plain["ratio_ci95"] == (None if found[1] is None else [1 + found[1], 1 + found[2]])


EQUAL = "; the times are equal within noise"


@pytest.mark.parametrize(
    ("found", "said", "noise"),
    [
        ((0.25, 0.0, 1.0), "0.800 of A's time per step (0.500 to 1.000)", EQUAL),
        ((-0.2, -0.5, 0.0), "1.250 of A's time per step (1.000 to 2.000)", EQUAL),
        ((1.0, 0.6, 3.0), "0.500 of A's time per step (0.250 to 0.625)", ""),
        ((1.0, None, None), "0.500 of A's time per step", "; how much is noise is unknown"),
    ],
)
def test_on_other_gpus_a_verdict_is_two_ratios(found, said, noise):
    verdict = Comparison(*found, "runs", 3, 3, gpus=(8, 24)).verdict
    seconds = f"{3 / (1 + found[0]):.3f} of its GPU-seconds"
    assert verdict == f"on 24 GPUs instead of 8, B takes {said} and {seconds}{noise}"


def test_three_runs_a_side_are_compared_as_runs_and_two_as_blocks():
    """ln medians 0, 1, 2 and 0, 2, 4, 6 are Welch's -2 -+ 3.926; spikes do not move a median."""
    a, b = (
        [np.array([math.exp(v)] * 9 + [1e9]) for v in side] for side in ((0, 1, 2), (0, 2, 4, 6))
    )
    found = compare(a, b)
    assert (found.unit, found.n_a, found.n_b) == ("runs", 3, 4)
    assert [math.log1p(v) for v in (found.gain, found.low, found.high)] == pytest.approx(
        [-2, -2 - 3.926, -2 + 3.926], abs=1e-3
    )
    paired = compare(a, [x * math.e for x in a], paired=True)
    assert paired.unit == "pairs of runs" and paired.low == pytest.approx(math.exp(-1) - 1)
    two = compare([np.full(10, 2.0)] * 2, [np.full(10, 1.0)] * 3)
    assert (two.unit, two.n_a, two.n_b) == ("blocks of iterations", 20, 30)
    assert (two.gain, two.low, two.high) == (1.0, 1.0, 1.0)
    assert compare([np.ones(5)], [np.ones(50)]) is compare([np.ones(50)], [np.ones(5)]) is None
    assert compare([np.ones(6)], [np.ones(6)]) is not None


def test_the_interval_of_blocks_is_that_of_a_median_of_independent_steps():
    """The median's standard error is 1.2533 s / sqrt(n); of two sides' difference sqrt(2) times."""
    rng = np.random.default_rng(1)
    a, b = (100 + rng.standard_normal(400) for _ in "ab")
    found = compare([a], [b])
    wide = 2 * 1.96 * 1.2533 * math.sqrt(2) / math.sqrt(400) / 100
    assert found.high - found.low == pytest.approx(wide, rel=0.25)
    assert found.low < found.gain < found.high
    assert compare([a], [b]) == found and compare([a], [b], seed=1) != found


def test_blocks_are_as_long_as_the_root_of_their_run_and_never_leave_it():
    class Last:
        """Draws the last block there is."""

        def integers(self, low, high, size):
            assert low == 0
            drawn.append((high, size))
            return np.full(size, high - 1)

    drawn = []
    x = np.arange(10.0)
    medians = module._block_medians([x, np.array([5.0])], Last())
    assert drawn == [(8, (10_000, 4)), (1, (10_000, 1))]  # blocks of three, and of one
    assert medians.shape == (10_000,)
    # 7, 8, 9 thrice, then the 7 that fills ten; and 5.
    assert medians[0] == np.median([7, 8, 9] * 3 + [7, 5])


def test_a_run_without_a_fit_time_is_said_and_left_out(tmp_path, monkeypatch):
    good = run("good")
    untimed, profiled, skipped = (run(name)[0] for name in ("untimed", "profiled", "skipped"))
    untimed.steps = untimed.steps[:0]
    profiled.profiler = {"tool": "nsys"}
    skipped.steps["skipped"] = 1  # it has a time, but no optimizer step
    bad = [untimed, profiled, skipped]
    monkeypatch.setattr(module, "load", lambda paths, facts: ([*bad, good[0]], ["x: refused"]))
    ((record, x),), left_out = module.timed_runs([tmp_path])
    assert record is good[0] and set(x) <= set(good[1])
    assert left_out == [
        "x: refused",
        "untimed.log: no step was timed",
        "profiled.log: profiled with nsys: not a timing",
        "skipped.log: all 40 iterations skipped: no optimizer step was timed",
    ]
    monkeypatch.setattr(module, "load", lambda paths, facts: (bad, []))
    with pytest.raises(UsageError, match="nothing here was timed; untimed.log: no step was timed"):
        module.timed_runs([tmp_path])


def test_lines_count_runs_pairs_or_iterations():
    def lines(unit, low=0.05, differ=()):
        found = Comparison(0.1, low, low and 0.15, unit, 3, 4)
        return Verdict("x", "y", found, ["but"], list(differ), ["tp 1 -> 2"]).lines()

    assert lines("runs")[0] == "B is faster by 10.0% ± 5.0% (95 %, 3 and 4 runs)"
    assert lines("pairs of runs")[0].endswith("(95 %, 3 pairs)")
    assert lines("blocks of iterations")[0].endswith("(95 %, 3 and 4 iterations)")
    assert lines("runs", None)[0].endswith("unknown (3 and 4 runs)")
    assert lines("runs")[1:] == ["but"]
    assert lines("runs", differ=["tp"])[1] == "A is x, B is y; they differ in: tp 1 -> 2"
    refused = Verdict("x", "y", None, ["why"], ["tp"], ["tp 1 -> 2"])
    assert refused.lines() == ["why"] and refused.as_dict()["verdict"] is None


def test_changes_are_what_both_state_and_what_differs():
    def facts(**spec):
        return {"facts": {"spec": spec}}

    a, b = run("a", tp=1, pp=None, **facts(lr=1, seed=2, only=3))[0], run("b", tp=2, pp=4)[0]
    assert changes(a, b) == {"tp": (1, 2)}
    b.facts = facts(lr=5, seed=2)["facts"]
    assert changes(a, b) == {"tp": (1, 2), "lr": (1, 5)}
    assert changes(a, b, settings=False) == {"tp": (1, 2)}
    for of, nccl, torch in ((a, "2.27.5", "2.12.0"), (b, "2.29.3", "2.13.0")):
        of.facts |= {"host": {"nccl": nccl, "driver": None}, "versions": {"torch": torch}}
        of.facts |= {"attention": "the same"}
    of_both = {"nccl": ("2.27.5", "2.29.3"), "torch": ("2.12.0", "2.13.0")}
    assert changes(a, b) == {"tp": (1, 2), "lr": (1, 5)} | of_both
    b.params = 2e9
    assert changes(a, b)["params"] == (1e9, 2e9)
    a.model = {"n_layer": 1}
    assert changes(a, b)["params"] == (1e9, 2e9)  # B does not state sizes
    b.model = {"n_layer": 2}
    assert "params" not in changes(a, b) and changes(a, b)["model"] == (a.model, b.model)
    b.params = None
    assert "params" not in changes(a, b)


def repeated(name, step_s, repeats, **given):
    return [
        run(f"{name}{i}", step_s, seed=i, run=name, repeat=repeat, **given)
        for i, repeat in enumerate(repeats)
    ]


@pytest.mark.parametrize(
    ("first", "second", "unit"),
    [
        ((1, 2, 3), (1, 2, 3), "pairs of runs"),
        ((1, 2, 3), (1, 2, 4), "runs"),
        ((1, 2, 3), (2, 1, 3), "runs"),  # not in the order that they ran in
        ((1, 1, 2), (1, 1, 2), "runs"),
        ((None, 2, 3), (None, 2, 3), "runs"),
        ((1, 2), (1, 2), "blocks of iterations"),
    ],
)
def test_repeats_of_one_number_are_pairs(first, second, unit):
    said = judged(repeated("a", 1.0, first), repeated("b", 1.1, second, tp=2))
    assert said.found.unit == unit and said.found.gain == pytest.approx(1 / 1.1 - 1, abs=0.01)
    doubt = "one or two runs a side: what changes from run to run is not in this interval"
    assert (doubt in said.doubts) == (unit == "blocks of iterations")


def test_doubts_name_the_side_they_are_about():
    a, b = run("a"), run("b", tp=2, commit="c+dirty")
    b[0].completed, b[0].oversubscribed = None, True
    doubts = judged([a], [b]).doubts
    assert "oversubscribed, more ranks than cores: b.log" in "; ".join(doubts)
    assert any(d.startswith("not complete, its steps are counted all the same: b") for d in doubts)
    assert CHANGED in doubts
    assert not any("average" in d or "GPU-seconds" in d for d in doubts)
    clean = judged([run("a", commit="c")], [run("b", commit="c", tp=2)]).doubts
    assert [d.split(":")[0] for d in clean] == ["one or two runs a side"]


def test_gpu_seconds_per_token_are_medians_of_medians_over_a_steps_tokens():
    """2 s on 8 GPUs and 1 s on 32 for 64 x 1,024 tokens."""
    sides = repeated("a", 2.0, (1, 2, 3)), repeated("b", 1.0, (1, 2, 3), gpus=32)
    said = next(d for d in judged(*sides).doubts if d.startswith("GPU-seconds per token: A "))
    a, b = (
        float(word.strip(" AB")) for word in said.removeprefix("GPU-seconds per token:").split(",")
    )
    assert a == pytest.approx(2 * 8 / 65536, rel=0.01)
    assert b == pytest.approx(1 * 32 / 65536, rel=0.01)
    unknown = [repeated(n, 1.0, (1, 2, 3), gpus=g, seq_len=None) for n, g in (("a", 8), ("b", 16))]
    assert (
        "GPU-seconds per token: - (no global batch or sequence length)" in judged(*unknown).doubts
    )


def test_the_studys_baseline_is_beside_every_other_configuration():
    def study(baseline):
        return [
            run(name, step_s, seed=i, tp=tp, run=name, baseline=baseline)
            for i, (name, step_s, tp) in enumerate((("c", 1.0, 1), ("a", 2.0, 2), ("b", 4.0, 4)))
        ]

    found = of_study(study("c"))
    assert [(v.a, v.b) for v in found] == [("c", "a"), ("c", "b")]
    assert [round(v.found.gain, 1) for v in found] == [-0.5, -0.8]
    assert [(v.a, v.b) for v in of_study(study(None))] == [("a", "b"), ("a", "c"), ("c", "b")]
    assert not any("stands in" in d for v in found for d in v.doubts)
    missing = of_study(study("z"))[:2]
    assert all("baseline z has no time here: a stands in for it" in v.doubts[-1] for v in missing)
    with pytest.raises(UsageError, match="two things are compared, but there is only c"):
        of_study(study("c")[:1])
    rows = module.table(found).rows
    assert [row["n"] for row in rows] == [40, 40] and rows[0]["ratio"] == pytest.approx(
        0.5, rel=0.01
    )
    low, high = (float(v) for v in rows[0]["ci95"].split(" .. "))
    assert low <= rows[0]["ratio"] + 1e-3 and high >= rows[0]["ratio"] - 1e-3
    refused = module.table([Verdict("x", "y", None, ["why"], [])]).rows[0]
    assert (refused["n"], refused["ratio"], refused["ci95"], refused["verdict"]) == (None,) * 3 + (
        "why",
    )
    noted = module.table(found, any_commit=True).notes
    assert ANY_COMMIT in noted and ANY_COMMIT not in module.table(found).notes


def test_the_fastest_of_each_number_of_gpus_is_beside_the_others_there():
    times = {"b1": (1, 1.0), "c2": (2, 0.9), "a2": (2, 0.6), "d2": (2, 0.7), "e4": (4, 0.5)}
    runs = [
        run(name, step_s, seed=i, gpus=gpus, run=name, baseline="b1")
        for i, (name, (gpus, step_s)) in enumerate(times.items())
    ]
    found = of_study(runs)
    against_baseline = [("b1", name) for name in ("a2", "c2", "d2", "e4")]
    assert [(v.a, v.b) for v in found] == [*against_baseline, ("a2", "d2"), ("a2", "c2")]
    assert [row["gpus"] for row in module.table(found).rows] == [2, 2, 2, 4, 2, 2]
    assert "the fastest on as many GPUs (A)" in module.table(found).notes[1]
    assert len(module.table(found[:4]).notes) == 1


def test_runs_that_no_study_names_are_called_as_their_first_log():
    found = of_study([run("b", n=9), run("a", n=9, tp=2), *(run(x, n=9, tp=4) for x in "cd")])
    against_a = [("a.log", "b.log"), ("a.log", "c.log")]
    assert [(v.a, v.b) for v in found] == [*against_a, ("b.log", "c.log")]
    repeats = [run(f"r{i}", n=9, tp=2, run=f"r-{i}", configuration="r") for i in "12"]
    (beside_a_study,) = of_study([run("b", n=9), *repeats])
    assert (beside_a_study.a, beside_a_study.b) == ("b.log", "r")
    assert not any("baseline" in doubt for doubt in beside_a_study.doubts)  # no study names one
    with pytest.raises(UsageError, match="there is only r$"):
        of_study(repeats)


def test_a_long_run_is_resampled_in_little_memory():
    """All resamples at once are 3,000 x 10,000 times and as many indices, of 8 bytes each."""
    rng = np.random.default_rng(0)
    a, b = ([1 + rng.random(n)] for n in (3000, 2000))
    tracemalloc.start()
    assert compare(a, b).unit == module.BLOCKS
    assert tracemalloc.get_traced_memory()[1] < 1e8
    tracemalloc.stop()


def test_how_many_are_resampled_at_once_changes_no_number(monkeypatch):
    sides = [[1 + np.random.default_rng(seed).random(n)] for seed, n in ((1, 200), (2, 100))]
    monkeypatch.setattr(module, "RESAMPLES", 50)
    found = []
    for at_once in (1, 1000, 10**6):
        monkeypatch.setattr(module, "AT_ONCE", at_once)
        found.append(compare(*sides))
    assert found[0] == found[1] == found[2]
