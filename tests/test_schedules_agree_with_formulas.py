"""The event-by-event schedules have the bubble and the memory that the closed formulas say."""

import pytest

from analysis import schedule
from models.errors import UsageError

SIZES = [(1, 4, 1), (2, 4, 1), (4, 8, 1), (4, 16, 1), (8, 8, 1)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "n_micro", "vpp"), SIZES)
def test_bubble_of_gpipe_and_1f1b(name, pp, n_micro, vpp):
    events = schedule.simulate(name, pp, n_micro, vpp)
    assert schedule.bubble(events) == pytest.approx((pp - 1) / n_micro)


@pytest.mark.parametrize(("pp", "n_micro", "vpp"), [(2, 4, 2), (4, 8, 2), (4, 8, 3), (4, 16, 4)])
def test_interleaving_divides_the_bubble_by_the_chunks(pp, n_micro, vpp):
    events = schedule.simulate("interleaved", pp, n_micro, vpp)
    assert schedule.bubble(events) == pytest.approx((pp - 1) / (vpp * n_micro))
    done = {(e.kind, e.micro, e.chunk * pp + e.stage) for e in events}
    assert len(done) == len(events) == 2 * n_micro * vpp * pp


def test_1f1b_holds_few_micro_batches_and_gpipe_all():
    assert schedule.in_flight(schedule.simulate("1f1b", 4, 16), 0) == 4
    assert schedule.in_flight(schedule.simulate("1f1b", 4, 16), 3) == 1
    assert schedule.in_flight(schedule.simulate("gpipe", 4, 16), 0) == 16


def test_no_stage_does_two_things_at_once_and_nothing_runs_before_its_input():
    events = schedule.simulate("interleaved", 4, 8, 2, [1.0, 1.5, 1.0, 2.0], [2.0] * 4, 0.1)
    for stage in range(4):
        mine = sorted((e for e in events if e.stage == stage), key=lambda e: e.start)
        assert all(a.end <= b.start for a, b in zip(mine, mine[1:], strict=False))
    end = {(e.kind, e.micro, e.chunk * 4 + e.stage): e.end for e in events}
    for e in events:
        place = e.chunk * 4 + e.stage
        if e.kind == "F" and place:
            assert e.start >= end["F", e.micro, place - 1] + 0.1 - 1e-9
        if e.kind == "B" and place < 7:
            assert e.start >= end["B", e.micro, place + 1] + 0.1 - 1e-9


def test_interleaving_needs_whole_groups():
    with pytest.raises(UsageError, match="multiples of pp 4, not 6"):
        schedule.simulate("interleaved", 4, 6, 2)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--pp", "0"], "must be positive"),
        (["--pp", "1000000", "--micro-batches", "2"], "at most pp 1024 and 200000 events"),
        (["--png", "/no/such/folder/x.png"], "No such file"),
    ],
)
def test_what_cannot_be_simulated_or_drawn_is_one_line(flags, said, capsys):
    assert schedule.main(flags) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_the_picture_is_drawn(tmp_path):
    out = tmp_path / "pipeline.png"
    assert schedule.main(["--pp", "4", "--micro-batches", "8", "--png", str(out)]) == 0
    assert out.stat().st_size > 5000
