"""A trace is what Perfetto, Chrome and HolisticTraceAnalysis read, and says what the tables say."""

import gzip
import json
import queue
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from analysis import breakdown as breakdown_command
from analysis import schedule
from analysis.measured import rank_times as measured_breakdown
from analysis.measured import stage_timeline as measured_timeline
from analysis.planner import pipeline
from base.errors import UsageError
from parallel.config.settings import resolve
from parallel.measure import ranges, step_parts, traced_steps
from parallel.record import trace_file
from parallel.record.schema import BREAKDOWN_COLUMNS
from parallel.record.trace_file import Interval
from parallel.record.writer import BreakdownFile
from tests import fixture_runs

NAMES = ("process_name", "process_sort_index", "thread_name", "thread_sort_index")


def read_by_the_rules(path: Path) -> dict[tuple[int, int], list[dict]]:
    """The complete events of each (pid, tid), after the rules of Google's Trace Event Format: the
    JSON object form, the fields of complete and metadata events, and events of one thread that
    nest or follow each other. Nothing of ours reads the file here.
    """
    with gzip.open(path, "rt") as file:
        content = json.load(file)
    assert content["displayTimeUnit"] in ("ms", "ns") and isinstance(content["traceEvents"], list)
    threads, named = defaultdict(list), set()
    for event in content["traceEvents"]:
        assert type(event["pid"]) is int and type(event["tid"]) is int
        assert isinstance(event["name"], str) and event["ph"] in ("X", "M")
        if event["ph"] == "M":
            assert event["name"] in NAMES
            (key,) = event["args"]
            assert key == ("name" if event["name"].endswith("_name") else "sort_index")
            named.add((event["name"], event["pid"], event["tid"]))
            continue
        assert type(event["ts"]) is float and type(event["dur"]) is float
        assert event["ts"] >= 0 and event["dur"] > 0 and isinstance(event["cat"], str)
        threads[event["pid"], event["tid"]].append(event)
    for (pid, tid), events in threads.items():
        assert ("process_name", pid, 0) in named and ("thread_name", pid, tid) in named
        events.sort(key=lambda event: (event["ts"], -event["dur"]))
        open_until: list[float] = []
        for event in events:
            while open_until and open_until[-1] <= event["ts"] + 1e-6:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1] + 1e-6
            open_until.append(event["ts"] + event["dur"])
    return dict(threads)


def total_s(events: list[dict], *kinds: str) -> float:
    return sum(e["dur"] for e in events if e["cat"] in kinds) / 1e6


@pytest.mark.parametrize(
    "flags",
    [
        ["--pp", "3", "--micro-batches", "5", "--transfer", "0.25"],
        ["--schedule", "gpipe", "--pp", "1"],
        ["--schedule", "interleaved", "--vpp", "2", "--backward", "1.7"],
        ["--schedule", "zb-h2", "--weight", "0.7"],
        ["--schedule", "zb-v", "--transfer", "0.1"],
    ],
    ids=lambda flags: " ".join(flags),
)
def test_a_simulated_trace_has_the_tables_makespan_and_idle_time(flags, tmp_path, capsys):
    path = tmp_path / "pipeline.json.gz"
    assert schedule.main([*flags, "--trace", str(path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {int(cells[0]): cells for cells in lines if cells[0].isdigit()}
    said = next(line for line in lines if line[0] == "makespan")
    threads = read_by_the_rules(path)
    assert sorted(threads) == [(stage, 0) for stage in sorted(rows)]
    ends = [e["ts"] + e["dur"] for events in threads.values() for e in events]
    assert max(ends) / 1e6 == pytest.approx(float(said[1].rstrip(",")), rel=1e-5)
    for (stage, _), events in threads.items():
        work = total_s(events, "forward", "backward", "weight gradients")
        idle = total_s(events, "bubble", "receive")
        assert [work, idle] == pytest.approx([float(cell) for cell in rows[stage][1:3]], abs=1e-4)


def test_a_receive_is_the_message_and_the_wait_before_it_is_bubble():
    """Two stages, two micro-batches, a message of 0.5 (as in the schedules' own test)."""
    events = pipeline.simulate("1f1b", 2, 2, p2p_s=0.5)
    found = [i[:5] for i in pipeline.intervals(events, 0.5, [1.0, 2.0]) if i.stage == 0]
    assert found == [
        (0, "forward", 0, 0, 1),
        (0, "forward", 1, 1, 2),
        (0, "bubble", None, 2, 4.5),
        (0, "receive", 0, 4.5, 5),
        (0, "backward", 0, 5, 7),
        (0, "bubble", None, 7, 7.5),
        (0, "receive", 1, 7.5, 8),
        (0, "backward", 1, 8, 10),
        (0, "optimizer", None, 10, 11),
        (0, "bubble", None, 11, 12),
    ]


def test_a_trace_is_read_back(tmp_path):
    path = tmp_path / "t.json.gz"
    wrote = [
        Interval(1, "forward", 3, 0.25, 0.5, 1, 7, 12),
        Interval(0, "bubble", None, 0.5, 1.0),
        Interval(0, "other", None, 1.0, 1.0 + 1e-10),  # below a nanosecond: left out
    ]
    trace_file.write(path, wrote, {"rank": 7})
    assert trace_file.read(path) == (wrote[:2], {"schema_version": "1", "rank": 7})
    assert [p.name for p in tmp_path.iterdir()] == ["t.json.gz"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda c: c.pop("traceEvents"), "KeyError"),
        (lambda c: c["otherData"].update(schema_version="2"), "schema_version '2' is not known"),
        (lambda c: c["traceEvents"][-1].update(cat="nap"), "an event of kind 'nap'"),
        (lambda c: c["traceEvents"][-1].update(dur=-1), "for -1.0"),
        (lambda c: c["traceEvents"][-1].update(ts="x"), "ValueError"),
    ],
)
def test_a_damaged_trace_is_named(spoil, said, tmp_path):
    path = tmp_path / "t.json.gz"
    trace_file.write(path, [Interval(0, "forward", 0, 0.0, 1.0)], {})
    content = json.loads(gzip.decompress(path.read_bytes()))
    spoil(content)
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    with pytest.raises(UsageError, match=f"t.json.gz is damaged: .*{said}"):
        trace_file.read(path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UsageError, match="t.json.gz is damaged: EOFError"):
        trace_file.read(path)


# --- what a run records ---------------------------------------------------------------------------


def settings(**given):
    return resolve(("test", {"preset": "tiny", "device": "cpu", "global_batch": 16} | given))


@pytest.mark.parametrize(
    ("first", "last", "steps"),
    [(0, 100, [11, 12, 13]), (0, 12, [10, 11, 12]), (5, 7, [6, 7]), (40, 100, [51, 52, 53])],
)
def test_three_steps_are_traced_after_ten_or_the_last_ones(first, last, steps):
    traced = traced_steps.TracedSteps(settings().layout, 0, torch.device("cpu"), first, last)
    assert [done for done in range(first + 1, last + 1) if traced.is_on(done)] == steps


def test_a_run_that_has_no_step_left_leaves_the_trace_as_it_is(tmp_path):
    measured = step_parts.Breakdown(settings(steps=5), torch.device("cpu"), 0, tmp_path)
    measured.trace(5)
    assert not measured.is_trace_due(5)


def test_a_steps_intervals_follow_each_other_and_a_paused_forward_stays_one(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(step_parts.time, "perf_counter", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += seconds

    measured = step_parts.Breakdown(settings(steps=2), torch.device("cpu"), 0, tmp_path)
    monkeypatch.setattr(ranges, "listeners", [measured])
    measured.transfer_s = 2.0
    measured.trace(0)
    for step in (1, 2):
        if measured.is_trace_due(step - 1):
            assert measured.trace_at(step - 1) == ""
            sleep(50)
            measured.forget()
        for _ in range(2):
            with ranges.region("forward"):
                sleep(1)
                with ranges.region("data"):
                    sleep(4)
                sleep(8)
        measured.enter(step_parts.Message("receive"))
        sleep(5)
        measured.leave(step_parts.Message("receive"))
        measured.enter(step_parts.Message("send", waits=False))
        sleep(3)
        measured.leave(step_parts.Message("send", waits=False))
        with ranges.region("backward"):
            sleep(16)
            measured.enter(step_parts.Waiting("dp"))
            sleep(2)
        measured.lap(step, 50.0)
    assert measured.is_trace_due(2)
    assert measured.trace_at(2) == "steps 1 to 2 traced, the clocks of ranks agree within 0 us"
    assert not measured.is_trace_due(2)
    intervals, about = trace_file.read(trace_file.file_of(tmp_path, 0))
    assert about["steps"] == [1, 2] and about["clock"]["error_s"] == 0
    second = [(i.kind, i.micro, i.start_s - 202, i.end_s - 202) for i in intervals if i.step == 2]
    assert second == [
        ("forward", 0, 0, 1),
        ("data", None, 1, 5),
        ("forward", 0, 5, 13),
        ("forward", 1, 13, 14),
        ("data", None, 14, 18),
        ("forward", 1, 18, 26),
        ("bubble", None, 26, 29),
        ("receive", None, 29, 31),
        ("send", None, 31, 34),
        ("backward", 0, 34, 50),
        ("dp", None, 50, 52),
    ]


@pytest.mark.parametrize("kinds", [("send", "recv"), ("recv", "send")])
def test_a_batch_that_has_both_waits_for_what_it_receives(kinds, tmp_path, monkeypatch):
    spec = settings(engine="megatron", gpus=2, pp=2, steps=1)
    monkeypatch.setattr(step_parts, "_transfer_s", lambda *_: 2.0)
    monkeypatch.setattr(step_parts.dist, "get_global_rank", lambda _, peer: peer)
    monkeypatch.setattr(step_parts.dist, "get_process_group_ranks", lambda _: [0, 1])
    measured = step_parts.Breakdown(spec, torch.device("cpu"), 0, tmp_path)
    group = SimpleNamespace(group_name="stages", size=lambda: 2)

    class Work:
        pass

    work, only_sent = Work(), Work()

    def call(kind, *args, gives=None):
        return measured.call(lambda *_: gives, kind, 0, group, args, {})

    for kind in kinds:
        call(kind, [torch.zeros(100)], 1, 0)
    call("end", torch.device("cpu"), gives=work)
    call("send", [torch.zeros(100)], 1, 0)
    call("end", torch.device("cpu"), gives=only_sent)
    found = [measured._region_of[one] for one in (work, only_sent)]
    assert found == [step_parts.Message("receive"), step_parts.Message("send")]


@pytest.mark.parametrize("world", [1, 4])
def test_clocks_are_compared_to_within_the_error_that_is_said(world, monkeypatch):
    """Threads play ranks whose clocks differ; messages take time, and another time each way. The
    last is on the first one's machine, where nothing is compared."""
    apart = {0: 0.0, 1: 5000.0, 2: -3.0, 3: 0.0}
    boxes = defaultdict(queue.Queue)
    here = threading.local()
    real = time.perf_counter

    def send(message, peer, group=None):
        time.sleep(0.0001 if here.rank else 0.002)
        boxes[here.rank, peer].put(message.clone())

    def recv(message, peer, group=None):
        message.copy_(boxes[peer, here.rank].get(timeout=20))

    clock = SimpleNamespace(perf_counter=lambda: real() + apart[here.rank])
    monkeypatch.setattr(traced_steps, "time", clock)
    monkeypatch.setattr(traced_steps, "clock_name", lambda: float(here.rank % 3))
    monkeypatch.setattr(traced_steps, "dist", SimpleNamespace(send=send, recv=recv))
    found = {}

    def play(rank):
        here.rank = rank
        found[rank] = traced_steps.compare_clocks(rank, world)

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(world):
        seconds, error_s = found[rank]
        if rank:
            assert abs(seconds - apart[rank]) <= error_s < 0.5
            assert (error_s == 0) == (rank == 3)
        else:
            assert seconds == 0
    assert found[0].error_s == max([found[rank].error_s for rank in range(1, world)], default=0)


def test_the_clocks_drift_is_in_the_error():
    traced = traced_steps.TracedSteps(settings().layout, 1, torch.device("cpu"), 0, 3)
    traced._compared = [traced_steps.Offset(5.0, 0.25), traced_steps.Offset(5.5, 0.125)]
    traced.begin(0.0625)
    assert traced.clock() == {
        "offset_s": 5.25,
        "error_s": 0.25 + 0.5 / 2 + 0.0625,
        "drift_s": 0.5,
    }


# --- measured beside simulated --------------------------------------------------------------------


@pytest.fixture
def two_stages(tmp_path):
    """A run on two stages whose steps 2 and 3 were traced: forwards of 1 s, backwards of 2 s, and
    the pipeline that 1f1b gives with 2 micro-batches and messages of 0.5 s, but for a second in
    which both stages wait before the last message. A step takes 11.75 s."""
    about = fixture_runs.facts(
        "s", None, engine="megatron", gpus=2, pp=2, micro_batch=2, global_batch=4
    )
    path = fixture_runs.write(tmp_path, about, 11.75)
    events = pipeline.simulate("1f1b", 2, 2, p2p_s=0.5)
    for rank in (0, 1):
        file = BreakdownFile(path, rank)
        for step in range(1, 21):
            row = dict.fromkeys(BREAKDOWN_COLUMNS, 0) | {"rank": rank, "elapsed_s": 11.75}
            file.write(row | {"first_step": step, "last_step": step, "transfer_s": 0.5})
        intervals = []
        for step, at in ((2, 1000.0), (3, 1011.75)):
            for i in pipeline.intervals(events, 0.5, [0.75, 0.5]):
                late = at + (i.start_s >= 7.5)
                moved = {"start_s": i.start_s + late, "end_s": i.end_s + late}
                intervals += [i._replace(**moved, rank=rank, step=step)] * (i.stage == rank)
            intervals.append(Interval(rank, "bubble", None, at + 7.5, at + 8.5, 0, rank, step))
        clock = {"offset_s": 0.0, "error_s": 1e-5 * rank, "drift_s": 0.0}
        about = {"steps": [2, 3], "clock": clock, "rank": rank}
        trace_file.write(trace_file.file_of(path, rank), intervals, about)
    return path


def test_a_measured_pipeline_stands_beside_its_simulation(two_stages, tmp_path, capsys):
    out = tmp_path / "both.json.gz"
    assert breakdown_command.main([str(two_stages), "--trace", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "steps 2 to 3, clocks of ranks within 10 us" in printed
    one, _ = measured_breakdown.read(two_stages)
    found = measured_timeline.of_run(one)
    rows = measured_timeline.table([found]).rows
    assert [(r["forward_s"], r["backward_s"]) for r in rows] == [pytest.approx((1, 2))] * 2
    assert [(r["pipeline_s"], r["simulated_s"]) for r in rows] == [pytest.approx((11, 10))] * 2
    # A stage works 6 of 10 s; two messages (stage 0) or one are no bubble; and the second stage
    # waits 0.25 s for the optimizer of the first.
    assert [r["simulated_bubble_s"] for r in rows] == pytest.approx([3.0, 3.5 + 0.25])
    assert [r["bubble_s"] for r in rows] == pytest.approx([3.0 + 1, 3.5 + 0.25 + 1])
    threads = read_by_the_rules(out)
    assert sorted(threads) == [(0, 0), (0, 1), (1, 0), (1, 2)]
    for (stage, thread), events in threads.items():
        key = "bubble_s" if thread else "simulated_bubble_s"
        assert total_s(events, "bubble") / 2 == pytest.approx(rows[stage][key])
    for step, at in ((2, 0.0), (3, 11.75)):
        assert measured_timeline.window(found.simulated, step)[0] == pytest.approx(at)


def test_an_interleaved_rank_names_its_micro_batches_and_chunks():
    """Recorded are the how-manieth: Megatron's second stage does F2.1 fifth of its forwards."""
    order = pipeline.order("interleaved", 1, 2, 4, 2)
    recorded = Interval(1, "forward", 6, 3.0, 4.0, rank=1, step=2)
    found = measured_timeline._named(recorded, order, 2.0)
    assert found == Interval(1, "forward", 2, 1.0, 2.0, 1, 1, 2)
    with pytest.raises(UsageError, match="rank 1: forward 8 of 8 in step 2"):
        measured_timeline._named(recorded._replace(micro=8), order, 0.0)


def test_traces_that_are_missing_or_do_not_fit_are_said(two_stages, capsys):
    one, _ = measured_breakdown.read(two_stages)
    other = trace_file.file_of(two_stages, 1)
    intervals, about = trace_file.read(other)
    for wrong, said in (
        (([], about), "rank 1 has no forward in a step that it traced"),
        ((intervals, {"steps": [2, 3]}), "a trace without its steps or its clock"),
    ):
        trace_file.write(other, *wrong)
        with pytest.raises(UsageError, match=said):
            measured_timeline.of_run(one)
    trace_file.write(other, intervals, about | {"steps": [3, 4]})
    with pytest.raises(UsageError, match="the ranks traced different steps"):
        measured_timeline.of_run(one)
    other.unlink()
    assert breakdown_command.main([str(two_stages)]) == 0
    captured = capsys.readouterr()
    assert "trace_rank1.json.gz: no such file" in captured.err
    assert "Traced steps" not in captured.out
    trace_file.file_of(two_stages, 0).unlink()
    assert breakdown_command.main([str(two_stages)]) == 0
    assert capsys.readouterr().err == ""  # a run of an earlier version: no reason to warn
    assert breakdown_command.main([str(two_stages), "--trace", "x.json.gz"]) == 2
    assert "--trace is of one run with traced steps, not of 0" in capsys.readouterr().err


# --- a reader that is not ours --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The inplace keyword")  # the library's own
@pytest.mark.parametrize("flags", [["--transfer", "0.25"], ["--schedule", "zb-h1"]])
def test_holistic_trace_analysis_finds_the_same_makespan_and_idle_time(
    flags, two_stages, tmp_path, capsys, monkeypatch
):
    """To it a stage is idle where no event has a stream, between the first and last that have."""
    how = "pip install --no-deps HolisticTraceAnalysis plotly narwhals pydot (79 MB)"
    pytest.importorskip("hta", reason=f"HolisticTraceAnalysis is not here: {how}")
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
    from hta.analyzers.breakdown_analysis import BreakdownAnalysis
    from hta.common.trace import Trace

    def read(path: Path, lane: str) -> dict[int, dict]:
        trace = Trace({0: str(path)}, str(tmp_path))
        trace.load_traces(True)
        lanes = {int(key): part for key, part in trace.traces[0].groupby(lane)}
        trace.traces = lanes
        found = BreakdownAnalysis.get_temporal_breakdown(trace, visualize=False)
        return {
            row["rank"]: row
            | {"start": lanes[row["rank"]].ts.min()}
            | {"end": (lanes[row["rank"]].ts + lanes[row["rank"]].dur).max()}
            for row in found.to_dict("records")
        }

    path = tmp_path / "pipeline.json.gz"
    assert schedule.main([*flags, "--trace", str(path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    makespan = float(next(line for line in lines if line[0] == "makespan")[1].rstrip(","))
    stages = read(path, "pid")
    assert max(s["end"] for s in stages.values()) / 1e6 == pytest.approx(makespan)
    receiving = {i: 0.0 for i in stages}
    for i in trace_file.read(path)[0]:
        receiving[i.stage] += i.end_s - i.start_s if i.kind == "receive" else 0.0
    for cells in lines:
        if cells[0].isdigit():
            busy_s = (
                stages[int(cells[0])]["kernel_time(us)"] - stages[int(cells[0])]["idle_time(us)"]
            )
            idle_s = makespan - busy_s / 1e6 + receiving[int(cells[0])]
            assert idle_s == pytest.approx(float(cells[2]), abs=1e-4)

    one, _ = measured_breakdown.read(two_stages)
    rows = measured_timeline.table([measured_timeline.of_run(one)]).rows
    # Of two steps; the second stage's first 1 s and last 0.25 s are before and after its work.
    for rank, outside_s in ((0, 0.0), (1, 1.25)):
        found = read(trace_file.file_of(two_stages, rank), "pid")[rank]
        assert found["kernel_time(us)"] / 1e6 == pytest.approx(2 * 11.75 - outside_s)
        idle_s = found["idle_time(us)"] / 1e6
        assert idle_s == pytest.approx(2 * rows[rank]["bubble_s"] - outside_s)
