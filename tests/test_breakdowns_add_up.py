"""A breakdown's parts are exclusive and add up, and so do the parts of a lost efficiency."""

import _thread
import json
import random
import re
import threading

import pytest
import torch

from analysis import breakdown as command
from analysis.logs.readers import run_folder
from analysis.planner.calibration import load_calibration
from analysis.planner.runs import priced
from analysis.runs import advice, efficiency_tree, moves
from analysis.runs import rank_times as tables
from base.errors import Answer
from parallel.config.resolve import resolve
from parallel.measure import efficiencies, ranges, step_parts
from parallel.record import writer
from parallel.record.reader import read_breakdown
from parallel.record.schema import (
    BREAKDOWN_COLUMNS,
    CATEGORIES,
    EXPERT_BREAKDOWN_COLUMNS,
    MESSAGE_AXES,
)
from tests import fixture_runs


def settings(**given):
    return resolve(("test", {"preset": "tiny", "device": "cpu", "global_batch": 16} | given))


@pytest.fixture
def clock(monkeypatch):
    """A clock that only `clock(seconds)` moves."""
    now = [0.0]
    monkeypatch.setattr(step_parts.time, "perf_counter", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += seconds

    return sleep


def test_an_inner_region_pauses_the_outer_one(clock, tmp_path, monkeypatch):
    measured = step_parts.Breakdown(settings(steps=2), torch.device("cpu"), 0, tmp_path)
    monkeypatch.setattr(ranges, "listeners", [measured])
    for step in (1, 2):
        clock(1)
        with ranges.region("forward"):
            clock(2)
            with ranges.region("data"):
                clock(4)
            clock(8)
        with ranges.region("backward"):
            clock(16)
            # DDP's last bucket: nothing closes it but the end of backward.
            measured.enter("dp")
            clock(32)
        clock(64)
        measured.lap(step, 127.0)
        clock(1000)  # a validation
        measured.forget()
    measured.file.close()
    rows = read_breakdown(tmp_path, 1)[0][0]
    assert [row["first_step"] for row in rows] == [1, 2]
    for row in rows:
        seconds = {name: row[f"{name}_s"] for name in CATEGORIES if row[f"{name}_s"]}
        assert seconds == {"other": 65, "forward": 10, "data": 4, "backward": 16, "dp": 32}
        assert sum(seconds.values()) == row["elapsed_s"]


def test_a_ranks_file_is_opened_once_and_no_window_waits_for_it(tmp_path, monkeypatch):
    """1,024 ranks open 1,024 files on a shared file system."""
    opened, may_open, open_rows = [], threading.Event(), writer._open_rows

    def slow_open(path, columns):
        opened.append(may_open.wait(60))
        return open_rows(path, columns)

    monkeypatch.setattr(writer, "_open_rows", slow_open)
    measured = step_parts.Breakdown(settings(steps=5), torch.device("cpu"), 3, tmp_path)
    for step in range(1, 6):
        measured.lap(step, 1.0)
    may_open.set()
    measured.file.close()
    lines = (tmp_path / "breakdown" / "rank3.csv").read_text().splitlines()
    assert opened == [True] and len(lines) == 6


def test_waiting_longer_than_a_message_travels_is_bubble(clock, tmp_path):
    measured = step_parts.Breakdown(settings(steps=1), torch.device("cpu"), 0, tmp_path)
    measured.transfer_s = 2.0
    for waited in (1, 5):
        measured.enter(step_parts.WAIT)
        clock(waited)
        measured.leave(step_parts.WAIT)
    measured.lap(1, 6.0)
    measured.file.close()
    row = read_breakdown(tmp_path, 1)[0][0][0]
    assert (row["pp_s"], row["bubble_s"], row["other_s"]) == (1 + 2, 3, 0)


class Group:
    """A process group of neighbouring pipeline stages, of which this process is rank 0."""

    group_name, size = "stages", staticmethod(lambda: 2)


@pytest.mark.parametrize("batched", [False, True])
def test_a_batch_of_messages_is_waited_for_as_a_single_one_is(
    batched, clock, tmp_path, monkeypatch
):
    """Under NCCL a batch's messages give back nothing, and its end one work for all of them."""
    spec = settings(engine="megatron", gpus=2, pp=2, steps=1)
    monkeypatch.setattr(step_parts, "_transfer_s", lambda *_: 2.0)
    monkeypatch.setattr(step_parts.dist, "get_global_rank", lambda _, peer: peer)
    monkeypatch.setattr(step_parts.dist, "get_process_group_ranks", lambda _: [0, 1])
    measured = step_parts.Breakdown(spec, torch.device("cpu"), 0, tmp_path)
    work, message = Group(), [torch.zeros(100)]

    def call(kind, *args, gives):
        return measured.call(lambda *_: gives, kind, 0, Group, args, {})

    if batched:
        call("send", message, 1, 0, gives=None)
        call("recv", message, 1, 0, gives=None)
        assert call("end", torch.device("cpu"), gives=work) is work
    else:
        call("send", message, 1, 0, gives=Group())
        assert call("recv", message, 1, 0, gives=work) is work
    measured.wait(lambda _: clock(5), work, (), {})
    measured.lap(1, 5.0)
    measured.file.close()
    row = read_breakdown(tmp_path, 1)[0][0][0]
    assert (row["pp_s"], row["bubble_s"]) == (2, 3)
    assert (row["pp_calls"], row["pp_bytes"]) == (1, 400)


def in_python_thread(work) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def in_autograds_thread(work) -> None:
    """In one that Python does not know, as C++ starts it."""
    done = threading.Event()
    _thread.start_new_thread(lambda: (work(), done.set()), ())
    assert done.wait(10)


@pytest.mark.parametrize(
    ("run", "parts"),
    [
        (in_python_thread, {"forward": 2 + 4 + 8}),
        (in_autograds_thread, {"forward": 2 + 8, "dp": 4}),
    ],
)
def test_the_messages_of_a_save_in_the_background_are_no_part_of_a_step(
    run, parts, clock, tmp_path
):
    """Its threads are Python's; backward's, which are autograd's, are part of it."""
    spec = settings(gpus=2, steps=1)
    measured = step_parts.Breakdown(spec, torch.device("cpu"), 0, tmp_path)
    measured.axis_of_group["stages"] = "dp"
    message, work = [torch.zeros(100)], Group()

    def exchange() -> None:
        began = measured.call(lambda *_: clock(1) or work, "all_reduce", 0, Group, [message], {})
        measured.wait(lambda _: clock(3), began, (), {})

    measured.enter("forward")
    clock(2)
    run(exchange)
    clock(8)
    measured.leave("forward")
    measured.lap(1, 14.0)
    measured.file.close()
    row = read_breakdown(tmp_path, 1)[0][0][0]
    assert {name: row[f"{name}_s"] for name in CATEGORIES if row[f"{name}_s"]} == parts
    assert (row["dp_calls"], row["dp_bytes"]) == ((1, 400) if "dp" in parts else (0, 0))


def test_off_means_that_nothing_listens_and_nothing_is_wrapped(tmp_path):
    call = torch.distributed.ProcessGroup.allreduce
    assert step_parts.start(settings(), torch.device("cpu"), 0, tmp_path) is None
    assert ranges.listeners == [] and step_parts.ddp_hook() is None
    assert torch.distributed.ProcessGroup.allreduce is call
    assert not (tmp_path / "breakdown").exists()


def test_axes_are_told_by_the_ranks_that_differ():
    layout = settings(engine="megatron", gpus=8, tp=2, pp=2).layout
    axes = {"tp": [0, 1], "dp": [1, 3], "pp": [0, 4], "mixed": range(8), "control": [5]}
    for axis, group in axes.items():
        assert step_parts.axis_of(layout, group) == axis


# --- tables ---------------------------------------------------------------------------------------


def put(path, rank, step, **seconds):
    """A row of a rank's breakdown."""
    row = dict.fromkeys(BREAKDOWN_COLUMNS, 0) | {f"{axis}_calls": 1 for axis in MESSAGE_AXES}
    row |= {"rank": rank, "first_step": step, "last_step": step}
    file = writer.BreakdownFile(path, rank)
    file.write(row | {f"{part}_s": value for part, value in seconds.items()})
    file.close()


def write_run(root, seed, gpus=1, step_s=1.0, **split):
    """A run folder with a breakdown of random parts that add up to about `step_s`."""
    draw = random.Random(seed)
    engine = "megatron" if split else "ddp"
    about = fixture_runs.facts("s", "ddp", engine=engine, gpus=gpus, **split)
    path = fixture_runs.write(root, about, step_s)
    for rank in range(gpus):
        for step in range(1, 21):
            parts = {p: draw.random() * step_s / len(CATEGORIES) * 2 for p in CATEGORIES}
            put(path, rank, step, **parts, elapsed=sum(parts.values()) * draw.uniform(0.99, 1.01))
    return path


def breakdown_of(path):
    return tables.of_record(run_folder.read(path)).content


def pair_of(root, scaling="strong"):
    """A run on 8 GPUs of random parts and its baseline, as `decomposed` has them; and the
    efficiency of the table of runs."""
    write_run(root, 0)
    batch = 16 if scaling == "strong" else 128
    write_run(root, 100, gpus=8, step_s=0.3, tp=2, pp=2, global_batch=batch)
    runs, _ = tables.read([root])
    (pair,) = [p for p in tables.decomposed(runs, None, scaling).content if p.run is not p.base]
    (row,) = [row for row in fixture_runs.table_of(root).rows if row["gpus"] == 8]
    return pair, row["efficiency"]


@pytest.mark.parametrize("scaling", ["strong", "weak"])
def test_the_parts_of_a_lost_efficiency_sum_to_it(tmp_path, scaling):
    pair, efficiency = pair_of(tmp_path, scaling)
    shares = tables.lost(pair)
    assert sum(shares.values()) == pytest.approx(1 - efficiency, abs=1e-9)
    assert shares["imbalance"] > 0 and shares["tp"] != 0 and shares["bubble"] != 0
    assert sum(pair.run.parts.values()) == pytest.approx(pair.run.step_s)


@pytest.mark.parametrize("scaling", ["strong", "weak"])
def test_the_product_of_pops_tree_is_the_efficiency_of_the_table_of_runs(tmp_path, scaling):
    pair, efficiency = pair_of(tmp_path, scaling)
    own, base = (
        efficiencies.efficiencies(side.spec.layout, side.ranks).parallel
        for side in (pair.run, pair.base)
    )
    product = own * efficiency_tree.computation_scaling(pair, scaling) / base
    assert product == pytest.approx(efficiency, rel=1e-12)


def test_pops_tree_by_hand(tmp_path):
    """Two stages compute 6 s and 4 s of a step of 10 s, in which messages travel for 0.5 s and the
    host takes 1 s. One rank alone computes 9 s of a step of 10 s."""
    base = fixture_runs.write(tmp_path, fixture_runs.facts("s", "ddp", engine="ddp"), 10.0)
    about = fixture_runs.facts("s", "ddp", engine="megatron", gpus=2, pp=2)
    staged = fixture_runs.write(tmp_path, about, 10.0)
    for step in range(1, 21):
        put(base, 0, step, forward=3, backward=5, optimizer=1, other=1, elapsed=10)
        put(staged, 0, step, forward=6, bubble=2.5, pp=0.5, data=1, elapsed=10)
        put(staged, 1, step, backward=4, bubble=4.5, pp=0.5, move=1, elapsed=10)
    first, second = efficiency_tree.table(tables.read([tmp_path]).content, None, None).rows
    assert (first["efficiency"], first["parallel"], first["computation_scaling"]) == (1, 0.9, 1)
    expected = {"load_balance": 5 / 6, "serialisation": 6 / 8.5, "transfer": 8.5 / 9}
    expected |= {"orchestration": 0.9, "parallel": 0.5, "computation_scaling": 9 / (2 * 5)}
    expected |= {"base_parallel": 0.9, "efficiency": 0.5}
    assert {name: second[name] for name in expected} == pytest.approx(expected)
    assert first["low"] is None and second["low"] == "serialisation"


def test_a_low_efficiency_has_a_fact_and_the_flags_that_act_on_it(tmp_path, printed):
    """The stages' bubble is 7 s of 20: `printed` runs the command as users do."""
    about = fixture_runs.facts("s", None, engine="megatron", gpus=2, pp=2, micro_batch=2)
    path = fixture_runs.write(tmp_path, about, 20.0)
    for rank in range(2):
        for step in range(1, 21):
            put(path, rank, step, forward=13, bubble=7, elapsed=20)
    out = printed(command.main, path, "--pop")
    fact = "megatron-pp2: serialisation 0.65: bubble takes 35% of a step; try --micro-batch 1 or"
    assert fact in out and "no baseline (--baseline)" in out


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ({"forward": 8, "dp": 2}, "compute-bound: computing takes 80% of a step"),
        (
            {"backward": 7, "tp": 2, "dp": 1},
            "communication-bound: messages (most: tp) take 30% of a step, computing 70%",
        ),
        (
            {"forward": 7, "bubble": 2, "pp": 1},
            "pipeline-bound: the bubble takes 20% of a step, computing 70%",
        ),
        (
            {"forward": 4, "data": 5, "move": 1},
            "input-bound: waiting for data takes 50% of a step, computing 40%",
        ),
        (
            {"optimizer": 5, "other": 3, "data": 2},
            "host-bound: the host takes 30% of a step, computing 50%",
        ),
        ({"other": 10}, "None"),
    ],
)
def test_what_bounds_a_run_by_hand(seconds, words):
    row = dict.fromkeys({**BREAKDOWN_COLUMNS, **EXPERT_BREAKDOWN_COLUMNS}, 0.0)
    row |= {f"{name}_s": value for name, value in (seconds | {"elapsed": 10}).items()}
    assert str(efficiencies.verdict(settings(gpus=2).layout, {0: row, 1: row})) == words


def test_a_run_that_waits_for_a_slower_rank_is_imbalanced():
    """Of two dp ranks one computes 9 s and sends for 1 s, the other waits for half of its time."""
    rows = [dict.fromkeys({**BREAKDOWN_COLUMNS, **EXPERT_BREAKDOWN_COLUMNS}, 0.0) for _ in range(2)]
    rows[0] |= {"elapsed_s": 10, "forward_s": 9, "dp_s": 1}
    rows[1] |= {"elapsed_s": 10, "forward_s": 5, "dp_s": 5}
    bound = efficiencies.verdict(settings(gpus=2).layout, dict(enumerate(rows)))
    assert str(bound).startswith("imbalanced: waiting for slower ranks takes 20% of a step")


def test_the_next_run_has_the_planners_time_and_interval_as_they_are(tmp_path):
    """Two cores of the calibrated processor: a larger micro-batch is what computing asks for."""
    cluster = load_calibration("2-core-cpu")
    about = {"engine": "ddp", "gpus": 2}
    now, larger = (
        fixture_runs.write(tmp_path / f"{n}", fixture_runs.facts("s", None, micro_batch=n, **about))
        for n in (2, 4)
    )
    for rank in range(2):
        put(now, rank, 1, forward=9, dp=1, elapsed=10)
    (now / "training_metrics.json").write_text('{"schema_version": "2.0", "epochs": []}')
    rows = [priced(run_folder.read(path), cluster).value for path in (now, larger)]
    times = [f"{row[k]:.4g}" for row in rows for k in ("step_s", "low_s", "high_s")]
    line = advice.line_of(run_folder.read(now), "2-core-cpu")
    assert "compute-bound: computing takes 90% of a step. Next: --micro-batch 4," in line
    assert f"predicted {times[3]} s/iter ({times[4]} to {times[5]} hold 80 %)" in line
    assert f"where this run is predicted {times[0]}, by 2-core-cpu." in line
    assert "(--predict CLUSTER says" in advice.line_of(run_folder.read(now), None)


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ({(2, 1): 9, (1, 1): 8, (2, 2): 7}, "Next: --vpp 2, predicted 7 s/iter (6 to 8 hold 80 %)"),
        ({(2, 1): 9, (1, 1): 8, (2, 2): -7}, "Next: --micro-batch 1, predicted 8 s/iter"),
        ({(2, 1): 7, (1, 1): 8, (2, 2): 9}, "None of --micro-batch 1 or --vpp 2"),
        ({(2, 1): 9, (1, 1): -8, (2, 2): -7}, "(none is predicted to fit)"),
        ({(1, 1): 8, (2, 2): 7}, "(not predicted: no facts)"),
    ],
)
def test_the_next_run_is_the_fastest_that_fits_and_is_predicted_to_win(
    times, words, tmp_path, monkeypatch
):
    """times: predicted seconds by micro-batch and vpp, negative where memory would not do."""

    def priced(record, _):
        step_s = times.get((record.micro_batch, record.vpp))
        if step_s is None or record.pp == 1:
            return Answer(None, "no facts")
        low, high = abs(step_s) - 1, abs(step_s) + 1
        return Answer({"step_s": abs(step_s), "low_s": low, "high_s": high, "fits": step_s > 0})

    monkeypatch.setattr(advice, "priced", priced)
    about = fixture_runs.facts("s", None, engine="megatron", gpus=2, pp=2, micro_batch=2)
    path = fixture_runs.write(tmp_path, about)
    for rank in range(2):
        put(path, rank, 1, forward=6, bubble=4, elapsed=10)
    (path / "training_metrics.json").write_text('{"schema_version": "2.0"}')
    assert words in advice.line_of(run_folder.read(path), "2-core-cpu")


def test_shares_that_hide_waits_bound_nothing(tmp_path, printed):
    """fsdp2 on a GPU waits between streams, and its breakdown would say computing."""
    about = fixture_runs.facts("s", None, engine="fsdp2", gpus=2, zero_stage=3)
    path = fixture_runs.write(tmp_path, about)
    for rank in range(2):
        put(path, rank, 1, forward=10, elapsed=10)
    (path / "training_metrics.json").write_text('{"schema_version": "2.0"}')
    assert "compute-bound" in advice.line_of(run_folder.read(path), None)
    fixture_runs.edit(path / "run.json", host=about["host"] | {"gpu": "NVIDIA H100 80GB HBM3"})
    assert "between streams" in advice.line_of(run_folder.read(path), None)
    assert "between streams" in printed(command.main, path, "--pop")
    (path / "breakdown" / "rank1.csv").unlink()
    assert "no rows of rank 1" in advice.line_of(run_folder.read(path), None)


GPUS = {"engine": "megatron", "gpus": 8, "device": "cpu", "global_batch": 32, "micro_batch": 2}


@pytest.mark.parametrize(
    ("part", "given", "flags"),
    [
        ("compute", {"recompute": "full"}, "--micro-batch 4; --recompute none"),
        ("compute", {"tp": 2}, "--micro-batch 4; --tp 1"),
        ("tp", {"tp": 2}, "--tp 1"),
        ("tp", {"tp": 2, "sequence_parallel": True}, ""),  # which needs tp
        ("pp", {"pp": 4}, "--pp 2"),
        ("bubble", {"pp": 2}, "--micro-batch 1; --vpp 2; --pp 1; --global-batch 64"),
        ("dp", {"zero_stage": 1}, "--zero-stage 0; --global-batch 64"),
        ("other", {}, "--micro-batch 4"),
        ("other", {"global_batch": 16}, ""),  # each rank has one micro-batch
        ("imbalance", {}, ""),
    ],
)
def test_moves_are_runs_that_could_start(part, given, flags):
    spec = resolve(("test", {"preset": "tiny"} | GPUS | given))
    found = moves.moves(spec, part)
    assert "; ".join(move.flags for move in found) == flags
    assert all(move.spec.gpus == 8 for move in found)


def test_extra_p_gets_every_part_by_gpus_and_repeats_at_one_point(tmp_path, refused):
    out = tmp_path / "parts.jsonl"
    folder = tmp_path / "runs"
    write_run(folder, 0), write_run(folder, 1, gpus=2, step_s=0.6)
    assert command.main([str(folder), "--extrap", str(out)]) == 0
    points = [json.loads(line) for line in out.read_text().splitlines()]
    (two,) = [run for run in tables.read([folder]).content if run.spec.gpus == 2]
    seconds = {p["callpath"]: p["value"] for p in points if p["params"] == {"gpus": 2}}
    assert seconds == {"step": two.step_s} | {f"step->{k}": s for k, s in two.parts.items()}
    assert {p["metric"] for p in points} == {"time"} and len(points) == 2 * len(seconds)
    write_run(folder, 2, gpus=2, pp=2)
    line = "ddp-dp2 and megatron-pp2 ran on 2 GPUs and are no repeats"
    assert line in refused(command.main, folder, "--extrap", out)


def test_waiting_for_a_slow_rank_is_imbalance_not_communication(tmp_path):
    """Of two dp ranks one computes 1 s longer; the other spends that second in the all-reduce."""
    path = fixture_runs.write(tmp_path, fixture_runs.facts("s", None, engine="ddp", gpus=2))
    for rank, (compute, blocked) in enumerate([(4.0, 0.5), (3.0, 1.5)]):
        for step in (1, 2, 3):
            put(path, rank, step, forward=compute, dp=blocked, elapsed=4.5)
    parts = breakdown_of(path).parts
    assert parts["dp"] == 0.5 and parts["imbalance"] == 0.5 and parts["compute"] == 3.5
    assert sum(parts.values()) == 4.5


def test_the_slowest_rank_is_the_time(tmp_path):
    one = breakdown_of(write_run(tmp_path, 1, gpus=2))
    (step,) = [row for row in tables.times([one]).rows if row["category"] == "step"]
    each = [row["elapsed_s"] for row in one.ranks.values()]
    assert step["slowest_s"] == max(each) and step["spread_s"] == max(each) - min(each)
    assert min(each) < step["mean_s"] < max(each)


def test_what_is_missing_or_torn_is_named_and_the_rest_reported(tmp_path, capsys):
    write_run(tmp_path, 1)
    two = write_run(tmp_path, 2, gpus=2)
    eight = write_run(tmp_path, 3, gpus=8, tp=2, pp=2)
    (two / "breakdown" / "rank1.csv").unlink()
    damaged = eight / "breakdown" / "rank5.csv"
    damaged.write_text(damaged.read_text().replace("0.", "x.", 1))
    blank = eight / "breakdown" / "rank6.csv"
    blank.write_text(re.sub(r",[\d.]+\n", ",\n", blank.read_text(), count=1))
    fixture_runs.write(tmp_path, fixture_runs.facts("s", "ddp", engine="ddp", gpus=4))
    assert command.main([str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    words = ("no rows of rank 1", "ddp-dp4: no breakdown", "rank5.csv:2")
    words += ("rank6.csv: row 1 is no window of steps",)
    assert all(word in err for word in words) and err.count("\n") == 4
    assert "ddp-dp2: 1 of 2 ranks" in out and "ddp-dp2: needs every rank" in out
    one = breakdown_of(eight)
    assert sorted(one.ranks) == [0, 1, 2, 3, 4, 7]


def test_a_run_that_goes_on_keeps_its_rows_and_tells_repeated_steps_once(tmp_path):
    for first, last, seconds in ((1, 5, 1.0), (4, 8, 2.0)):  # killed in step 6, saved after step 3
        for step in range(first, last + 1):
            put(tmp_path, 0, step, elapsed=seconds)
        path = tmp_path / "breakdown" / "rank0.csv"
        path.write_text(path.read_text() + "0,6,")
    rows = read_breakdown(tmp_path, 1)[0][0]
    assert [row["last_step"] for row in rows] == list(range(1, 9))
    assert [row["elapsed_s"] for row in rows] == [1.0] * 3 + [2.0] * 5


def test_a_run_without_a_breakdown_says_so_whatever_version_wrote_it(tmp_path, refused):
    about = fixture_runs.facts("s", None)
    about["spec"]["of_another_version"] = 1
    fixture_runs.write(tmp_path, about)
    assert tables.WITHOUT in refused(command.main, tmp_path)
