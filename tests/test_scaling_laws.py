"""The fitted serial share is the one that was put in; the definitions agree with each other."""

import pytest

from analysis.scaling import (
    Point,
    curve,
    fit_amdahl,
    fit_gustafson,
    karp_flatt,
    main,
    speedup,
)
from models.errors import UsageError
from tests.fixture_runs import facts, write


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3])
def test_each_law_gives_back_its_own_serial_share(share):
    sizes = (2, 4, 8, 64)
    assert fit_amdahl([(p, 1 / (share + (1 - share) / p)) for p in sizes]) == pytest.approx(share)
    assert fit_gustafson([(p, p - share * (p - 1)) for p in sizes]) == pytest.approx(share)
    assert karp_flatt(1 / (share + (1 - share) / 8), 8) == pytest.approx(share)


def test_karp_flatt_by_hand_and_its_sign_above_linear():
    assert karp_flatt(3.0, 4) == pytest.approx(1 / 9)  # (1/3 - 1/4) / (3/4)
    assert karp_flatt(4.25, 4) < 0
    assert karp_flatt(1.0, 1) is None


def test_strong_and_weak_efficiency_are_ideal_where_they_should_be():
    assert speedup(0.25, 32, 1.0, 8) == (4.0, 1.0)  # a baseline of 8 GPUs
    assert speedup(1.0, 32, 1.0, 8, "weak") == (4.0, 1.0)


def test_the_published_1_2_4_gpu_table_follows():
    # NYU Big Purple, V100, seconds per iteration: 3.41x at efficiency 0.85 on four GPUs.
    seconds = {1: 0.276756, 2: 0.142994, 4: 0.081277}
    rows, share = curve([Point(str(n), n, s) for n, s in seconds.items()], 1)
    assert [round(r["speedup"], 2) for r in rows] == [1.0, 1.94, 3.41]
    assert [round(r["efficiency"], 2) for r in rows] == [1.0, 0.97, 0.85]
    assert 0 < share < 0.1


def test_repeats_at_one_size_become_a_median_and_a_spread():
    points = [Point("a", 1, 1.0), Point("b", 2, 0.5), Point("c", 2, 0.7), Point("d", 2, 0.6)]
    rows, _ = curve(points, 1)
    assert rows[1]["n"] == 3
    assert rows[1]["step_s"] == 0.6
    assert rows[1]["spread"] == pytest.approx(1 / 3)
    with pytest.raises(UsageError):
        curve(points, 3)


def test_weak_scaling_wants_equal_work_per_gpu(tmp_path, capsys):
    write(tmp_path, facts("s", "ddp", engine="ddp", global_batch=16))
    write(tmp_path, facts("s", "ddp", engine="ddp", gpus=2, global_batch=32), step_s=0.5)
    write(tmp_path, facts("s", "ddp", engine="ddp", gpus=4, global_batch=32), step_s=0.5)
    assert main([str(tmp_path), "--scaling", "weak"]) == 0
    out = capsys.readouterr().out
    assert "left out: ddp-dp4: invalid comparison: batch per GPU 8.0 here, 16.0" in out
    assert main([str(tmp_path)]) == 0
    assert "ddp-dp2: invalid comparison: global batch 32 here, 16" in capsys.readouterr().out
