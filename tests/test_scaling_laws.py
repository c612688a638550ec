"""The fitted serial share is the one that was put in; the definitions agree with each other."""

import pytest

from analysis.measured.scaling_curve import (
    Side,
    curve,
    fit_amdahl,
    fit_gustafson,
    karp_flatt,
    serial_share,
    table,
)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3])
def test_each_law_gives_back_its_own_serial_share(share):
    sizes = (2, 4, 8, 64)
    assert fit_amdahl([(p, 1 / (share + (1 - share) / p)) for p in sizes]) == pytest.approx(share)
    assert fit_gustafson([(p, p - share * (p - 1)) for p in sizes]) == pytest.approx(share)
    assert karp_flatt(1 / (share + (1 - share) / 8), 8) == pytest.approx(share)


def test_karp_flatt_by_hand_and_where_it_is_a_share():
    assert karp_flatt(3.0, 4) == pytest.approx(1 / 9)  # (1/3 - 1/4) / (3/4)
    assert karp_flatt(4.25, 4) < 0
    for faster, share in ((4.0, 0.0), (1.0, 1.0), (2.0, 1 / 3), (4.1, None), (0.9, None)):
        assert serial_share(faster, 4) == pytest.approx(share)
    assert serial_share(4.0, 1) is karp_flatt(1.0, 1) is None


def test_the_published_1_2_4_gpu_table_follows():
    # NYU Big Purple, V100, seconds per iteration: 3.41x at efficiency 0.85 on four GPUs.
    seconds = {1: 0.276756, 2: 0.142994, 4: 0.081277}
    sides = [Side(str(n), n, (s,)) for n, s in seconds.items()]
    rows, share = curve(sides, sides[0])
    assert [round(r["speedup"], 2) for r in rows] == [1.0, 1.94, 3.41]
    assert [round(r["efficiency"], 2) for r in rows] == [1.0, 0.97, 0.85] and 0 < share < 0.1


def test_a_serial_share_lies_between_0_and_1_and_its_absence_has_a_reason(tmp_path):
    times = {1: 1.0, 2: 0.4, 4: 1.5, 8: 0.1249}
    sides = [Side(f"dp{gpus}", gpus, (step_s,)) for gpus, step_s in times.items()]
    rows, share = curve(sides, sides[0])
    assert [row["serial"] for row in rows] == [None] * 4
    none, superlinear, slower, unsure = (row["note"] for row in rows)
    assert none is None and superlinear.startswith("superlinear: ")
    assert "slower than the baseline" in slower and "too little above" in unsure
    text = table(rows, share, "strong", "dp1").render()
    (line,) = (line for line in text.splitlines() if line.startswith("dp2"))
    assert " 2.50?  " in line and " 1.25?  " in line and "superlinear: efficiency 1.25 is" in line
    for wrong in (2.98, -0.2):
        assert f"{wrong:.3f}" not in table(rows, wrong, "strong", "dp1").render()


def test_repeats_say_what_is_noise():
    spread = Side("fast", 2, (0.8, 0.9, 1.2))
    slow = Side("slow", 2, (1.0,), (0.98, 1.02))
    note = "efficiency 1.11 (0.82 to 1.27) may be 1: too little to be sure of"
    assert curve([slow, spread], slow)[0][0]["note"] == note
