"""The event-by-event schedules have the bubble and the memory that the closed formulas say."""

import string

import pytest

from analysis import schedule
from analysis.planner import pipeline
from base.errors import UsageError

SIZES = [(1, 4, 1), (2, 4, 1), (4, 8, 1), (4, 16, 1), (8, 8, 1)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "n_micro", "vpp"), SIZES)
def test_bubble_of_gpipe_and_1f1b(name, pp, n_micro, vpp):
    events = pipeline.simulate(name, pp, n_micro, vpp)
    assert pipeline.bubble(events) == pytest.approx((pp - 1) / n_micro)


@pytest.mark.parametrize(("pp", "n_micro", "vpp"), [(2, 4, 2), (4, 8, 2), (4, 8, 3), (4, 16, 4)])
def test_interleaving_divides_the_bubble_by_the_chunks(pp, n_micro, vpp):
    events = pipeline.simulate("interleaved", pp, n_micro, vpp)
    assert pipeline.bubble(events) == pytest.approx((pp - 1) / (vpp * n_micro))
    done = {(e.kind, e.micro, e.chunk * pp + e.stage) for e in events}
    assert len(done) == len(events) == 2 * n_micro * vpp * pp


def words(*order):
    """F0 F1 B0: kind and micro-batch; of later chunks with the chunk: F0.1."""
    return " ".join(
        f"{k}{micro}.{chunk}".removesuffix(".0") for k, micro, chunk in pipeline.order(*order)
    )


def test_gpipe_and_1f1b_do_what_their_papers_draw():
    """Huang et al. 2019, figure 2c; Narayanan et al. SC'21, figure 4 above."""
    assert words("gpipe", 0, 2, 3) == "F0 F1 F2 B0 B1 B2"
    assert words("1f1b", 0, 2, 4) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert words("1f1b", 1, 2, 4) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert words("1f1b", 0, 4, 2) == "F0 F1 B0 B1"  # fewer than the warm-up


def test_interleaving_does_what_its_paper_draws():
    """Narayanan et al. SC'21, figure 4 below: groups of pp walk through the chunks, and the last
    chunk's backward comes first. Two stages, two chunks, four micro-batches."""
    warm = "F0 F1 F0.1 F1.1"
    assert words("interleaved", 0, 2, 4, 2) == (
        f"{warm} F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3"
    )
    assert words("interleaved", 1, 2, 4, 2) == (
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3"
    )


def test_the_warmup_of_an_interleaved_stage_is_megatrons():
    """Megatron-LM: 2 (pp - stage - 1) + (vpp - 1) pp chunks go forward before one in turn."""
    for stage, n_micro, warm in ((0, 8, 10), (1, 8, 8), (2, 8, 6), (3, 8, 4), (0, 4, 7)):
        kinds = [kind for kind, _, _ in pipeline.order("interleaved", stage, 4, n_micro, 2)]
        assert kinds.index("B") == warm + 1  # never more than there are: 2 x 4
        plain = pipeline.order("1f1b", stage, 4, n_micro)
        assert pipeline.order("interleaved", stage, 4, n_micro, 1) == plain


def test_a_pipeline_takes_what_one_adds_up_by_hand():
    """Two stages, two micro-batches: F0 1, F0 1, B0 2, B0 2, and the second behind it."""
    events = pipeline.simulate("1f1b", 2, 2)
    times = {(e.stage, e.kind, e.micro): (e.start, e.end) for e in events}
    assert times == {
        (0, "F", 0): (0, 1),
        (0, "F", 1): (1, 2),
        (1, "F", 0): (1, 2),
        (1, "B", 0): (2, 4),
        (1, "F", 1): (4, 5),
        (0, "B", 0): (4, 6),
        (1, "B", 1): (5, 7),
        (0, "B", 1): (7, 9),
    }
    assert pipeline.makespan(events) == 9 and pipeline.bubble(events) == (9 - 6) / 6
    picture = pipeline.text(pipeline.simulate("1f1b", 2, 2), 2)
    assert picture == "stage   0 01..aa.bb\nstage   1 .0aa1bb..\n"
    half = pipeline.text(pipeline.simulate("gpipe", 1, 27, forward_s=0.5, backward_s=0.5), 1, 0.5)
    assert half == f"stage   0 {'0123456789' * 2}0123456{string.ascii_lowercase}a\n"
    late = [pipeline.Event(0, "F", 0, 0, 3.0, 5.0), pipeline.Event(0, "B", 0, 0, 5.0, 6.0)]
    assert pipeline.makespan(late) == 3 and pipeline.bubble(late) == 0


def test_what_flies_is_forward_and_not_yet_backward():
    events = [pipeline.Event(0, kind, 0, 0, at, at + 1) for at, kind in enumerate("FFBFFBB")]
    assert pipeline.in_flight(events, 0) == 3 and pipeline.in_flight(events, 1) == 0
    for name, stage, held in (("1f1b", 0, 4), ("1f1b", 3, 1), ("gpipe", 0, 16)):
        assert pipeline.in_flight(pipeline.simulate(name, 4, 16), stage) == held


def test_what_is_too_much_to_simulate_is_counted_exactly(monkeypatch):
    for pp, n_micro, vpp in ((1025, 1, 1), (2, 50_001, 1), (4, 12_504, 2)):
        name = "interleaved" if vpp > 1 else "gpipe"
        said = f"pp {pp} with {2 * pp * n_micro * vpp} events is too much"
        with pytest.raises(UsageError, match=said):
            pipeline.simulate(name, pp, n_micro, vpp)
    assert len(pipeline.simulate("gpipe", 1024, 1)) == 2048
    monkeypatch.setattr(pipeline, "MOST_EVENTS", 200)
    assert len(pipeline.simulate("gpipe", 1, 100)) == 200


def test_no_stage_does_two_things_at_once_and_nothing_runs_before_its_input():
    events = pipeline.simulate("interleaved", 4, 8, 2, 1.5, 2.0)
    for stage in range(4):
        mine = sorted((e for e in events if e.stage == stage), key=lambda e: e.start)
        assert all(a.end <= b.start for a, b in zip(mine, mine[1:], strict=False))
    end = {(e.kind, e.micro, e.chunk * 4 + e.stage): e.end for e in events}
    for e in events:
        place = e.chunk * 4 + e.stage
        if e.kind == "F" and place:
            assert e.start >= end["F", e.micro, place - 1] - 1e-9
        if e.kind == "B" and place < 7:
            assert e.start >= end["B", e.micro, place + 1] - 1e-9


def test_interleaving_needs_whole_groups():
    with pytest.raises(UsageError, match="multiples of pp 4, not 6"):
        pipeline.simulate("interleaved", 4, 6, 2)
    with pytest.raises(UsageError, match="gpipe has no vpp 2: use interleaved"):
        pipeline.simulate("gpipe", 4, 8, 2)
    with pytest.raises(UsageError, match="unknown schedule 'zb-h1'; known: gpipe"):
        pipeline.simulate("zb-h1", 4, 8)
    for sizes in ((0, 4, 1), (2, 0, 1), (2, 4, 0)):
        with pytest.raises(UsageError, match=f"pp {sizes[0]}, micro-batches {sizes[1]} and"):
            pipeline.simulate("interleaved", *sizes)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--pp", "0"], "--pp must be at least 1 and at most 1024, not 0"),
        (["--pp", "1024", "--micro-batches", "99999"], "at most pp 1024 and 200000 events"),
        (["--vpp", "9" * 4000], "--vpp must be at least 1 and at most 200000, not 999999999999..."),
        (["--backward", "nan"], "--backward must be above 0 and at most 100, not nan"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(flags, said, capsys):
    assert schedule.main(flags) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
