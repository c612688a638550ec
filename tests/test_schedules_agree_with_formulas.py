"""The event-by-event schedules have the bubble that the closed formula says."""

import pytest

from parallel.config.layout import Layout
from tests.tools import pipeline_schedules as pipeline


@pytest.mark.parametrize(
    ("name", "pp", "n_micro", "vpp"),
    [
        *((name, pp, n, 1) for name in ("gpipe", "1f1b") for pp, n in ((1, 4), (4, 8), (8, 8))),
        *(("interleaved", pp, n, vpp) for pp, n, vpp in ((2, 4, 2), (4, 8, 3), (4, 16, 4))),
    ],
)
def test_the_bubble_of_a_schedule(name, pp, n_micro, vpp):
    events = pipeline.simulate(name, pp, n_micro, vpp)
    layout = Layout(pp=pp, vpp=vpp, n_micro=n_micro)
    assert pipeline.bubble(events) == pytest.approx(layout.bubble)
    end = {(e.kind, e.micro, e.chunk * pp + e.stage): e.end for e in events}
    assert len(end) == len(events) == 2 * n_micro * vpp * pp
    for e in events:  # nothing runs before its input
        place = e.chunk * pp + e.stage
        if e.kind == "F" and place:
            assert e.start >= end["F", e.micro, place - 1]
        if e.kind == "B" and place < pp * vpp - 1:
            assert e.start >= end["B", e.micro, place + 1]
    for stage in range(pp):  # nor two things at once
        mine = sorted((e for e in events if e.stage == stage), key=lambda e: e.start)
        assert all(a.end <= b.start for a, b in zip(mine, mine[1:], strict=False))


def words(*order):
    """F0 F1 B0: kind and micro-batch; of later chunks with the chunk: F0.1."""
    tasks = (f"{kind}{micro}.{chunk}" for kind, micro, chunk in pipeline.order(*order))
    return " ".join(task.removesuffix(".0") for task in tasks)


def test_schedules_do_what_their_papers_draw():
    """Huang et al. 2019, figure 2c; Narayanan et al. SC'21, figure 4: groups of pp walk through the
    chunks, and the last chunk's backward comes first."""
    assert words("gpipe", 0, 2, 3) == "F0 F1 F2 B0 B1 B2"
    assert words("1f1b", 0, 2, 4) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert words("1f1b", 1, 2, 4) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert words("1f1b", 0, 4, 2) == "F0 F1 B0 B1"  # fewer than the warm-up
    assert words("interleaved", 0, 2, 4, 2) == (
        "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3"
    )
    assert words("interleaved", 1, 2, 4, 2) == (
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3"
    )


def test_the_warmup_of_an_interleaved_stage_is_megatrons():
    """Megatron-LM: 2 (pp - stage - 1) + (vpp - 1) pp chunks go forward before one in turn."""
    for stage, n_micro, warm in ((0, 8, 10), (1, 8, 8), (2, 8, 6), (3, 8, 4), (0, 4, 7)):
        kinds = [kind for kind, _, _ in pipeline.order("interleaved", stage, 4, n_micro, 2)]
        assert kinds.index("B") == warm + 1  # never more than there are: 2 x 4
