"""The event-by-event schedules have the bubble and the memory that the closed formulas say."""

import gzip
import itertools
import json
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


def said(tasks):
    """F0 F1 B0: kind and micro-batch; of later chunks with the chunk: F0.1."""
    return " ".join(f"{kind}{micro}" + f".{chunk}" * bool(chunk) for kind, micro, chunk in tasks)


def test_gpipe_and_1f1b_do_what_their_papers_draw():
    """Huang et al. 2019, figure 2c; Narayanan et al. SC'21, figure 4 above."""
    assert said(pipeline.order("gpipe", 0, 2, 3)) == "F0 F1 F2 B0 B1 B2"
    assert said(pipeline.order("1f1b", 0, 2, 4)) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert said(pipeline.order("1f1b", 1, 2, 4)) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert said(pipeline.order("1f1b", 0, 4, 2)) == "F0 F1 B0 B1"  # fewer than the warm-up


def test_interleaving_does_what_its_paper_draws():
    """Narayanan et al. SC'21, figure 4 below: groups of pp walk through the chunks, and the last
    chunk's backward comes first. Two stages, two chunks, four micro-batches."""
    warm = "F0 F1 F0.1 F1.1"
    assert said(pipeline.order("interleaved", 0, 2, 4, 2)) == (
        f"{warm} F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3"
    )
    assert said(pipeline.order("interleaved", 1, 2, 4, 2)) == (
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3"
    )


@pytest.mark.parametrize(("stage", "warm"), [(0, 10), (1, 8), (2, 6), (3, 4)])
def test_the_warmup_of_an_interleaved_stage_is_megatrons(stage, warm):
    """Megatron-LM: 2 (pp - stage - 1) + (vpp - 1) pp chunks go forward before one in turn."""
    kinds = [kind for kind, _, _ in pipeline.order("interleaved", stage, 4, 8, 2)]
    assert kinds.index("B") == warm + 1
    kinds = [kind for kind, _, _ in pipeline.order("interleaved", 0, 4, 4, 2)]
    assert kinds.index("B") == 4 * 2  # never more than there are


def test_interleaving_one_chunk_is_1f1b():
    for stage in range(4):
        for n_micro in (4, 8):
            plain = pipeline.order("1f1b", stage, 4, n_micro)
            assert pipeline.order("interleaved", stage, 4, n_micro, 1) == plain


def test_a_pipeline_takes_what_one_adds_up_by_hand():
    """Two stages, two micro-batches, a message of 0.5: F0 1, message, F0 1, B0 2, message, B0 2."""
    events = pipeline.simulate("1f1b", 2, 2, p2p_s=0.5)
    times = {(e.stage, e.kind, e.micro): (e.start, e.end) for e in events}
    assert times == {
        (0, "F", 0): (0, 1),
        (0, "F", 1): (1, 2),
        (1, "F", 0): (1.5, 2.5),
        (1, "B", 0): (2.5, 4.5),
        (1, "F", 1): (4.5, 5.5),
        (0, "B", 0): (5, 7),
        (1, "B", 1): (5.5, 7.5),
        (0, "B", 1): (8, 10),
    }
    assert pipeline.makespan(events) == 10
    assert pipeline.bubble(events) == (10 - 6) / 6
    picture = pipeline.text(pipeline.simulate("1f1b", 2, 2), 2)
    assert picture == "stage   0 01..aa.bb\nstage   1 .0aa1bb..\n"
    half = pipeline.text(pipeline.simulate("gpipe", 1, 27, forward_s=0.5, backward_s=0.5), 1, 0.5)
    assert half == f"stage   0 {'0123456789' * 2}0123456{string.ascii_lowercase}a\n"
    late = [pipeline.Event(0, "F", 0, 0, 3.0, 5.0), pipeline.Event(0, "B", 0, 0, 5.0, 6.0)]
    assert pipeline.makespan(late) == 3 and pipeline.bubble(late) == 0


def test_the_busiest_stage_is_the_ideal():
    """F 1, F 2, B 2, B 1 in six seconds, of which the second stage works four."""
    events = pipeline.simulate("gpipe", 2, 1, 1, [1.0, 2.0], [1.0, 2.0])
    assert pipeline.makespan(events) == 6 and pipeline.bubble(events) == 0.5


def test_what_flies_is_forward_and_not_yet_backward():
    events = [pipeline.Event(0, kind, 0, 0, at, at + 1) for at, kind in enumerate("FFBFFBB")]
    assert pipeline.in_flight(events, 0) == 3 and pipeline.in_flight(events, 1) == 0


def test_an_order_that_waits_for_itself_is_our_mistake(monkeypatch):
    monkeypatch.setattr(pipeline, "order", lambda *_: [("B", 0, 0), ("F", 0, 0)])
    with pytest.raises(RuntimeError, match="gpipe deadlocks at pp 2, 1, vpp 1"):
        pipeline.simulate("gpipe", 2, 1)


def test_what_is_too_much_to_simulate_is_counted_exactly(monkeypatch):
    for pp, n_micro, vpp in ((1025, 1, 1), (2, 50_001, 1), (4, 12_504, 2)):
        name = "interleaved" if vpp > 1 else "gpipe"
        said = f"pp {pp} with {2 * pp * n_micro * vpp} events is too much"
        with pytest.raises(UsageError, match=said):
            pipeline.simulate(name, pp, n_micro, vpp)
    assert len(pipeline.simulate("gpipe", 1024, 1)) == 2048
    monkeypatch.setattr(pipeline, "MOST_EVENTS", 200)
    assert len(pipeline.simulate("gpipe", 1, 100)) == 200


def test_1f1b_holds_few_micro_batches_and_gpipe_all():
    assert pipeline.in_flight(pipeline.simulate("1f1b", 4, 16), 0) == 4
    assert pipeline.in_flight(pipeline.simulate("1f1b", 4, 16), 3) == 1
    assert pipeline.in_flight(pipeline.simulate("gpipe", 4, 16), 0) == 16


def test_no_stage_does_two_things_at_once_and_nothing_runs_before_its_input():
    events = pipeline.simulate("interleaved", 4, 8, 2, [1.0, 1.5, 1.0, 2.0], [2.0] * 4, 0.1)
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
        pipeline.simulate("interleaved", 4, 6, 2)
    with pytest.raises(UsageError, match="gpipe has no vpp 2: use interleaved"):
        pipeline.simulate("gpipe", 4, 8, 2)
    with pytest.raises(UsageError, match="unknown schedule 'zb-h3'; known: gpipe"):
        pipeline.simulate("zb-h3", 4, 8)
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
        (["--png", "/no/such/folder/x.png"], "no folder /no/such/folder"),
        (["--trace", "x.json"], "x.json: the name must end in .json.gz"),
    ],
)
def test_what_cannot_be_simulated_or_drawn_is_one_line(flags, said, capsys):
    assert schedule.main(flags) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_the_picture_and_the_trace_are_written_and_named(tmp_path, capsys):
    out, trace = tmp_path / "pipeline.png", tmp_path / "pipeline.json.gz"
    flags = ["--pp", "4", "--micro-batches", "8", "--png", str(out.with_suffix(""))]
    assert schedule.main([*flags, "--trace", str(trace)]) == 0
    assert out.stat().st_size > 5000 and trace.exists()
    assert capsys.readouterr().out.endswith(f"{out}\n{trace}\n")


@pytest.mark.parametrize(
    "flags",
    [
        ["--pp", "3", "--micro-batches", "5", "--transfer", "0.25"],
        ["--schedule", "interleaved", "--vpp", "2", "--backward", "1.7"],
        ["--schedule", "zb-h2", "--weight", "0.7"],
    ],
    ids=lambda flags: " ".join(flags),
)
def test_a_trace_has_the_tables_makespan_and_work(flags, tmp_path, capsys):
    """By Google's Trace Event Format: complete events, of which one process has no two at once."""
    path = tmp_path / "pipeline.json.gz"
    assert schedule.main([*flags, "--trace", str(path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {int(cells[0]): cells for cells in lines if cells[0].isdigit()}
    makespan = next(line for line in lines if line[0] == "makespan")[1].rstrip(",")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {stage: f"stage {stage}" for stage in rows}
    tasks = sorted((e["pid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X")
    assert max(ts + dur for _, ts, dur in tasks) / 1e6 == pytest.approx(float(makespan), rel=1e-5)
    for (stage, ts, dur), (other, after, _) in itertools.pairwise(tasks):
        assert stage != other or ts + dur <= after + 1e-3
    for stage, cells in rows.items():
        work_s = sum(dur for pid, _, dur in tasks if pid == stage) / 1e6
        assert work_s == pytest.approx(float(cells[1]), abs=1e-4)


# --- zero bubble (arXiv 2401.10241) ---------------------------------------------------------------

TIMES = [(1, 1, 1), (2, 2, 1), (3, 4, 2), (2, 5, 2), (5, 3, 4), (4, 1, 1)]  # T_F, T_B, T_W


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("name", pipeline.ZERO_BUBBLE)
def test_bubble_and_memory_of_the_zero_bubble_schedules(name, times):
    """As their closed forms say, wherever the forms hold: what they do not cover they refuse."""
    checked, vpp = 0, 2 if name == "zb-v" else 1
    forward, inputs, weights = map(float, times)
    for pp in (1, 2, 3, 4, 8):
        for n_micro in (pp, 2 * pp - 1, 2 * pp, 3 * pp + 1):
            try:
                form = pipeline.zero_bubble_form(name, pp, n_micro, *times)
            except UsageError:
                continue
            given = forward, inputs + weights, 0.0, weights
            events = pipeline.simulate(name, pp, n_micro, vpp, *given)
            held = max(pipeline.in_flight(events, stage) for stage in range(pp))
            assert (pipeline.longest_wait_s(events), held) == (form[0], form[1] * vpp)
            assert len(events) == 3 * n_micro * vpp * pp == len(set(events))
            checked += 1
    if name == "zb-v":
        assert checked == (16 if times == (1, 1, 1) else 0)
    else:
        assert checked == (20 if name == "zb-h1" else 16)


def test_the_forms_are_those_of_the_paper():
    """Table 2: (p - 1)(T_F + T_B - T_W) with p held, (p - 1)(T_F + T_B - 2 T_W) with 2 p - 1."""
    assert pipeline.zero_bubble_form("zb-h1", 4, 8, 3, 4, 2) == (3 * (3 + 4 - 2), 4)
    assert pipeline.zero_bubble_form("zb-h2", 4, 8, 3, 4, 2) == (3 * (3 + 4 - 2 * 2), 7)
    assert pipeline.zero_bubble_form("zb-v", 4, 8, 2, 2, 2) == (0, 4)


def test_where_a_form_does_not_hold_the_numbers_are_said():
    for name, n_micro, times, said in (
        ("zb-h1", 3, (1, 1, 1), "zb-h1 needs at least 4 micro-batches at pp 4"),
        ("zb-h2", 6, (1, 1, 1), "zb-h2 needs at least 7 micro-batches at pp 4"),
        ("zb-h1", 8, (1, 1, 2), r"T_W up to T_F \(T_F 1, T_B 1, T_W 2\)"),
        ("zb-h2", 8, (3, 1, 3), "needs 2 T_W up to T_F \\+ T_B"),
        ("zb-v", 8, (1, 2, 1), "zb-v needs T_F = T_B = T_W"),
    ):
        with pytest.raises(UsageError, match=said):
            pipeline.zero_bubble_form(name, 4, n_micro, *times)


def test_with_long_weight_gradients_the_form_would_be_too_small():
    """T_W above T_F: the simulation waits longer than (p - 1)(T_F + T_B - T_W)."""
    events = pipeline.simulate("zb-h1", 2, 4, 1, 2.0, 2.0 + 3.0, 0.0, 3.0)
    assert pipeline.longest_wait_s(events) == 2 > (2 - 1) * (2 + 2 - 3)


def test_the_handcrafted_schedules_do_what_figure_3_draws():
    """Its first and last device, of four with eight micro-batches; ours count from 0."""
    first = said(pipeline.order("zb-h1", 0, 4, 8))
    assert first.startswith("F0 F1 F2 F3 B0 W0 F4 B1 W1 F5") and first.endswith("B6 W6 B7 W7")
    assert said(pipeline.order("zb-h1", 3, 4, 8)) == (
        "F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 W7"
    )
    first = said(pipeline.order("zb-h2", 0, 4, 8))
    assert first.startswith("F0 F1 F2 F3 F4 F5 F6 B0 W0 F7 B1 W1 B2")
    last = said(pipeline.order("zb-h2", 3, 4, 8))
    assert last.startswith("F0 B0 F1") and last.endswith("F6 B6 W0 F7 B7 W1 W2 W3 W4 W5 W6 W7")


@pytest.mark.parametrize(("pp", "n_micro"), [(1, 1), (2, 2), (2, 3), (4, 8), (4, 4), (8, 20)])
def test_zb_v_is_the_schedule_that_pytorch_runs(pp, n_micro):
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = object.__new__(theirs.ScheduleZBVZeroBubble)
    schedule.pp_group_size, schedule.num_stages, schedule._n_microbatches = pp, 2 * pp, n_micro
    for stage in range(pp):
        actions = schedule._calculate_single_rank_operations(stage)
        kinds = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}
        tasks = [
            (kinds[a.computation_type.name], a.microbatch_index, int(a.stage_index >= pp))
            for a in actions
            if a is not None
        ]
        assert pipeline.order("zb-v", stage, pp, n_micro, 2) == tasks


def test_zb_v_turns_on_the_last_stage_without_a_message():
    """Two stages, one micro-batch, a message of 0.5: down 1 + 0.5 + 1, up 1 + 0.5 + 1."""
    events = pipeline.simulate("zb-v", 2, 1, 2, 1.0, 2.0, 0.5)
    ends = {(e.kind, e.stage, e.chunk): e.end for e in events}
    assert ends["F", 1, 0] == 2.5 and ends["F", 1, 1] == 3.5 and ends["F", 0, 1] == 5.0


def test_weight_gradients_are_capitals_and_nobody_waits_for_them(capsys):
    assert schedule.main(["--schedule", "zb-h1", "--pp", "2", "--micro-batches", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("stage   0 01.aA2bBcC\nstage   1 .0a1bA2cBC\n")
    assert "makespan 10, bubble 0.1111, formula 0.1111\n" in out
    assert schedule.main(["--schedule", "zb-v", "--weight", "0.5"]) == 0
    out = capsys.readouterr().out
    assert "formula -\n- the formula of zb-v needs T_F = T_B = T_W (T_F 2, T_B 3, T_W 1)" in out


def test_a_split_that_cannot_be_is_one_line(capsys):
    for flags, said_ in (
        (["--weight", "1"], "1f1b does not split the backward"),
        (
            ["--schedule", "zb-h1", "--weight", "3"],
            "weight gradients take 3.0, more than a backward",
        ),
        (["--schedule", "zb-v", "--vpp", "3"], "zb-v has two chunks a stage: vpp 2, not 3"),
        (["--schedule", "zb-h2", "--vpp", "2"], "zb-h2 has no vpp 2"),
    ):
        assert schedule.main(flags) == 2
        assert said_ in capsys.readouterr().err
