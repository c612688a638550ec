"""A difference is claimed only when it is larger than what the same configuration varies by."""

import json

import numpy as np
import pytest

from analysis.compare import main
from analysis.logs.record import Record
from analysis.measured.comparisons import compare, judged, timed_runs
from tests.fixture_runs import facts, logged, write


def runs(centre, n_runs, between, within=0.01, n=50, seed=0):
    rng = np.random.default_rng(seed)
    return [
        centre * (1 + between * rng.standard_normal()) * (1 + within * rng.standard_normal(n))
        for _ in range(n_runs)
    ]


def test_a_real_gain_is_found_with_its_size():
    found = compare(runs(1.195, 8, 0.01), runs(1.0, 8, 0.01, seed=1))
    assert found.unit == "runs"
    assert found.low < 0.195 < found.high
    assert found.verdict.startswith("B is faster by ")


def test_the_other_way_round_is_slower():
    assert "slower" in compare(runs(1.0, 8, 0.01), runs(1.2, 8, 0.01, seed=1)).verdict


def test_a_gain_within_the_spread_of_repeats_is_noise():
    found = compare(runs(1.05, 4, 0.2), runs(1.0, 4, 0.2, seed=1))
    assert found.verdict.startswith("within noise")


def test_identical_sides_are_within_noise_nineteen_times_in_twenty():
    claims = sum(
        "within noise"
        not in compare(runs(1, 8, 0.1, seed=2 * s), runs(1, 8, 0.1, seed=2 * s + 1)).verdict
        for s in range(100)
    )
    assert claims <= 12  # 5 expected; a percentile bootstrap of 8 runs is a little too sure


def test_drifting_iterations_are_resampled_in_blocks():
    slow = 1 + 0.05 * np.sin(np.arange(200) / 30)
    alone = compare([slow], [slow[::-1].copy()])
    shuffled = np.random.default_rng(0).permutation(slow)
    mixed = compare([shuffled], [shuffled])
    assert alone.unit == "blocks of iterations"
    assert alone.high - alone.low > 1.5 * (mixed.high - mixed.low)


def test_single_numbers_have_no_verdict():
    assert compare([np.array([82.0])], [np.array([71.0])]) is None


def test_other_work_is_refused_with_exit_1(tmp_path, capsys):
    a = write(tmp_path / "a", facts("s", "ddp", engine="ddp"))
    b = write(tmp_path / "b", facts("s", "ddp", engine="ddp", n_layer=8), step_s=0.2)
    assert main([str(a), str(b)]) == 1
    assert capsys.readouterr().out.startswith("invalid comparison: model n_layer 8 here, 4")
    assert main([str(a), str(a)]) == 0
    assert "within noise" in capsys.readouterr().out
    assert main([str(a)]) == 2


def log_of(name: str, gpus: int | None, step_s: float, **facts) -> tuple[Record, np.ndarray]:
    """A run as a foreign log tells it, and its steady step times."""
    noise = 1 + 0.001 * np.random.default_rng(len(name)).standard_normal(40)
    record = logged(f"{name}.log", 40, step_s=step_s * noise, gpus=gpus, **facts)
    return record, record.steps["step_s"]


def test_other_gpus_are_named_and_give_no_faster_by():
    same = {"global_batch": 64, "seq_len": 1024, "precision": "bf16", "params": 1e9}
    found = judged([log_of("a", 16, 2.048, **same)], [log_of("bb", 32, 1.0, **same)])
    said = "\n".join(found.lines())
    assert "faster" not in said
    assert said.startswith("on 32 GPUs instead of 16, B takes 0.488 of A's time per step (0.48")
    assert "and 0.977 of its GPU-seconds" in said and "they differ in: GPUs 16 -> 32" in said
    assert "GPU-seconds per token: A 0.0005, B 0.000488" in said
    assert found.as_dict()["ratio"] == pytest.approx(2.048, rel=1e-3)
    unknown = judged([log_of("a", 16, 2.0)], [log_of("bb", 32, 1.0)]).doubts
    assert "GPU-seconds per token: - (no global batch or sequence length)" in unknown
    assert (
        "not stated on both sides, so not compared: sequence length, global batch, precision, model"
        in unknown
    )
    one_side = judged([log_of("a", 16, 2.0, **same)], [log_of("bb", None, 1.0, **same)])
    assert "not stated on both sides, so not compared: GPUs" in one_side.doubts
    equal = judged([log_of("a", 16, 2.0, **same)], [log_of("bb", 16, 1.0, **same)])
    assert equal.found.verdict.startswith("B is faster by")


def test_running_averages_have_no_interval_and_means_of_iterations_are_said():
    same = {"global_batch": 64, "seq_len": 1024, "precision": "bf16", "params": 1e9}
    a, b = log_of("a", 8, 1.1, **same), log_of("bb", 8, 1.0, **same, interval=100)
    said = judged([a], [b])
    assert any("B's entries average 100 iterations" in d for d in said.doubts)
    assert "iterations per entry 1 -> 100" in said.values
    assert "(95 %, 40 and 40 entries)" in said.lines()[0]
    a[0].running_average = True
    said = judged([a], [b])
    assert (said.found.low, said.found.high) == (None, None)
    assert said.lines()[0].startswith("B takes 0.909 of A's time; how much is noise is unknown")
    assert any("A prints running averages" in d for d in said.doubts)
    assert said.as_dict()["ratio_ci95"] is None


def test_a_side_is_one_configuration(tmp_path, capsys):
    mixed = [log_of("a", 8, 1.0), log_of("aa", 16, 0.6)]
    said = judged(mixed, [log_of("b", 8, 1.0)])
    assert said.doubts == ["no comparison: A's own 2 runs differ in: GPUs"]
    for folder, batch in (("a", 1), ("b", 2), ("c", 4)):  # three runs called ddp
        write(tmp_path / folder, facts("s", None, engine="ddp", micro_batch=batch))
    assert main([str(tmp_path), "--format", "json"]) == 0
    pairs = [(row["a"], row["b"]) for row in json.loads(capsys.readouterr().out)]
    assert pairs == [("a/ddp", "b/ddp"), ("a/ddp", "c/ddp")]


def test_a_baseline_that_is_not_there_is_said(tmp_path, capsys):
    write(tmp_path, facts("s", "gone", engine="ddp"))
    write(tmp_path, facts("s", "gone", engine="ddp", recompute="full"))
    assert main([str(tmp_path), "--format", "json"]) == 1
    (said,) = json.loads(capsys.readouterr().out)
    assert said["doubts"][-1].startswith("the study's baseline gone has no time here: ddp stands")


def test_iterations_that_skipped_the_optimizer_are_not_compared(tmp_path):
    """An fp16 overflow ends an iteration early; its time is no step's."""
    path = write(tmp_path, facts("s", None, engine="ddp"), step_s=0.5)
    steps = path / "steps.csv"
    rows = [line.split(",") for line in steps.read_text().splitlines()]
    for row in rows[6::3]:
        row[rows[0].index("step_s")], row[rows[0].index("skipped")] = "0.1", "1"
    steps.write_text("\n".join(",".join(row) for row in rows) + "\n")
    ((_, times),), _ = timed_runs([path])
    assert len(times) == 19 - len(rows[6::3]) and times.min() >= 0.5
