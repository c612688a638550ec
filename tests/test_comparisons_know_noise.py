"""A difference is claimed only when it is larger than what the same configuration varies by."""

import numpy as np
import pytest

from analysis.compare import compare, main, spread
from tests.fixture_runs import facts, write


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


def test_the_published_repeats_of_one_configuration_are_80_percent_apart():
    found = spread(np.array([129.0, 217.0, 125.0, 225.0]))  # 64 GPUs, 52B, mbs 4, gbs 1024
    assert found["n"] == 4
    assert found["spread"] == pytest.approx(0.8)


def test_other_work_is_refused_with_exit_1(tmp_path, capsys):
    a = write(tmp_path / "a", facts("s", "ddp", engine="ddp"))
    b = write(tmp_path / "b", facts("s", "ddp", engine="ddp", n_layer=8), step_s=0.2)
    assert main([str(a), str(b)]) == 1
    assert capsys.readouterr().out.startswith("invalid comparison: model n_layer 8 here, 4")
    assert main([str(a), str(a)]) == 0
    assert "within noise" in capsys.readouterr().out
    assert main([str(a)]) == 2


def test_the_table_of_repeats_groups_identical_configurations(tmp_path, capsys):
    for i, step_s in enumerate((0.5, 0.7, 0.6)):
        write(tmp_path / str(i), facts("s", "ddp", engine="ddp"), step_s=step_s)
    write(tmp_path / "other", facts("s", "ddp", engine="ddp", gpus=2))
    assert main(["--repeats", str(tmp_path), "--format", "csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split('",')[1].split(",")[0] for line in lines[1:]] == ["3", "1"]
    write(tmp_path / "dead", facts("s", "ddp", engine="ddp", gpus=4), loss=[], fail="no port")
    assert main(["--repeats", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("left out: ddp-dp4: no step was timed\n")
