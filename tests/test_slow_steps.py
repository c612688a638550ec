"""Slow steps have a cause, and slow ranks a name, by the parts that logs of other programs have."""

import json
import tomllib

import numpy as np
import pytest

from analysis import breakdown, stragglers, tflops
from analysis.logs.load import load
from analysis.logs.rank_files import parts_of
from parallel.measure.slow_steps import PartTimes, slow_ranks_of, slow_steps
from tests.conftest import ROOT
from tests.test_breakdowns_add_up import put, write_run
from tests.test_logs_of_attempts import FORMATS
from tests.test_logs_of_attempts import steps as steps_of_megatron

SPANS = ("gc_collect", "fetching_batch", "fwd_bwd", "optim")  # as torchtitan 0.3 writes them
USUAL_MS = {"gc_collect": 0.1, "fetching_batch": 1.0, "fwd_bwd": 500.0, "optim": 20.0}


def span(name: str, ms: float, **keys: object) -> str:
    """The line of a span's end."""
    line = {"delta_ms": ms, "rank": keys.pop("rank"), "global_rank": 0, "source": "training"}
    line |= {"host_name": keys.pop("node"), **keys, "log_type": "event"}
    line |= {"log_type_name": f"{name}_end", "event_name": None, "value": ms}
    return json.dumps(line | {"caller": "x.py:1:f", "seq_id": line.pop("seq_id"), "message": ""})


def titan(folder, lost_ms, ranks=4, steps=60, first=1, stamp="20260101-100000", noise=0.01):
    """Files of torchtitan's ranks. lost_ms: (step, rank) -> what a span there takes longer; the
    others wait for it."""
    (folder / "structured_logs").mkdir(exist_ok=True, parents=True)
    draw = np.random.default_rng(first)
    began_ms = 1_700_000_000_000 + 1000 * first
    lines: list[list[str]] = [[] for _ in range(ranks)]
    for step in range(first, first + steps):
        jitter = 1 + noise * draw.standard_normal()
        lost = [lost_ms(step, rank) for rank in range(ranks)]
        step_ms = jitter * sum(USUAL_MS.values()) + 5 + max(sum(of.values()) for of in lost)
        for rank, of_rank in enumerate(lost):
            keys = {"rank": rank, "node": f"c{rank // 2}", "step": step, "time_ms": began_ms}
            for name in (*SPANS, "step"):
                ms = step_ms if name == "step" else jitter * USUAL_MS[name] + of_rank.get(name, 0)
                lines[rank].append(span(name, ms, **keys, seq_id=len(lines[rank])))
        began_ms += 600
    for rank, of_rank in enumerate(lines):
        name = f"training.global_rank_{rank}.{stamp[:-1]}{rank}-ABCDE{rank}.jsonl"
        (folder / "structured_logs" / name).write_text("\n".join([*of_rank, ""]))
    return folder


def tables(path, printed) -> list[list[dict]]:
    """The rows of the tables of slow ranks and of slow steps."""
    text = printed(stragglers.main, path, "--format", "json")
    rows = json.loads(text)
    return [[row for row in rows if "kind" in row], [row for row in rows if "part" in row]]


def slow_data(step, rank):
    return {"fetching_batch": 100.0} if rank == 3 else {}


def hiccups(step, rank):
    return {"gc_collect": 150.0} if rank == 1 and step % 10 == 0 else {}


def unnamed(step, rank):  # the others wait inside their fwd_bwd, too
    return {"fwd_bwd": 2000.0} if step in (31, 52) else {}


def test_a_rank_that_waits_for_data_in_each_step_is_named(tmp_path, printed):
    (rank,), steps = tables(titan(tmp_path, slow_data) / "structured_logs", printed)
    assert (rank["run"], rank["kind"], rank["rank"], rank["node"]) == (
        tmp_path.name,
        "data",
        3,
        "c1",
    )
    assert rank["longer"] == pytest.approx(100 / 626, rel=0.05) and rank["n"] == 12
    assert steps == []


def test_steps_in_which_one_rank_collects_garbage_name_it(tmp_path, printed):
    ranks, (steps,) = tables(titan(tmp_path, hiccups), printed)
    assert ranks == [] and (steps["part"], steps["ranks"]) == ("garbage collection", [1])
    assert steps["iterations"] == [10, 20, 30, 40, 50, 60] and steps["nodes"] == ["c0"]
    assert steps["part_s"] == pytest.approx(0.15, rel=0.01)
    assert steps["longer_s"] == pytest.approx(0.15, rel=0.1)


def test_what_all_ranks_lose_where_they_wait_for_each_other_names_none(tmp_path, printed):
    path = titan(tmp_path, unnamed)
    ranks, (steps,) = tables(path, printed)
    assert ranks == [] and (steps["part"], steps["ranks"]) == ("forward and backward", [])
    words = "steps 31 and 52 are 2 s slower than the median: 2 s of it is forward and backward,"
    assert f"{words} where ranks wait for each other" in printed(tflops.main, path)
    assert "which rank computes longer is not known" in printed(stragglers.main, path)


def test_equal_ranks_are_not_named(tmp_path, printed):
    assert tables(titan(tmp_path, lambda step, rank: {}), printed) == [[], []]


def test_one_file_alone_says_what_its_rank_lost(tmp_path, printed):
    titan(tmp_path, hiccups)
    for rank, part in ((1, "garbage collection"), (2, "none that is stated")):
        (file,) = (tmp_path / "structured_logs").glob(f"*rank_{rank}.*")
        ranks, (steps,) = tables(file, printed)
        assert ranks == [] and steps["part"] == part and len(steps["iterations"]) == 6
        assert "no file of" in printed(tflops.main, file, "--columns", "run,reasons")


def test_the_files_of_the_ranks_are_one_run_with_its_console_log(tmp_path):
    path = titan(tmp_path, hiccups)
    (spans,) = load([path]).content
    assert (spans.format, len(spans.steps), spans.gpus) == ("torchtitan spans", 60, None)
    lines = [FORMATS["torchtitan"]["line"].format(i=step, ms=1000) for step in range(10, 61, 10)]
    (path / "console.log").write_text("".join(lines))
    (run,) = load([path]).content
    assert run.format == "torchtitan" and len(run.steps) == 6 and len(run.parts.iteration) == 60


@pytest.mark.parametrize(("n", "is_whole"), [(20, False), (40, True)])
def test_of_several_starts_the_last_is_read(n, is_whole, tmp_path, printed):
    """Of the first a file is missing, or a host's clock is late: it seems to end later."""
    path = titan(tmp_path, hiccups, steps=n)
    if not is_whole:
        next((path / "structured_logs").glob("*rank_0*")).unlink()
    titan(path, hiccups, steps=15, first=21, stamp="20260101-110000")
    (run,) = load([path]).content
    assert run.steps["iteration"].tolist() == list(range(21, 36)) and run.parts.ranks == (
        0,
        1,
        2,
        3,
    )
    assert run.doubts["attempts"].startswith("2 starts in one folder: the last one, iterations 21")
    for main in (stragglers.main, breakdown.main):
        assert run.doubts["attempts"] in printed(main, path)


def test_evaluations_and_saves_are_no_time_of_a_step(tmp_path):
    path = titan(tmp_path, lambda step, rank: {}, ranks=2, noise=0)
    for file in (path / "structured_logs").iterdir():
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            line["seq_id"] *= 2
        keys = {"rank": lines[0]["rank"], "node": "c0", "time_ms": 1_700_000_000_000}
        ends = [i for i, line in enumerate(lines) if line["log_type_name"] == "step_end"]
        lines[ends[29]]["value"] += 3000
        saved = json.loads(span("checkpoint_save", 3000, **keys, step=30, seq_id=2 * ends[29] - 1))
        lines.insert(ends[29], saved)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,) = load([path]).content
    assert run.steps["step_s"] == pytest.approx(0.5261)
    (steps,) = slow_steps(run.parts)
    assert (steps.iterations, steps.part, steps.part_s) == ((30,), "checkpoint", 3.0)


def test_damaged_lines_and_missing_ranks_are_told(tmp_path):
    path = titan(tmp_path, hiccups)
    first, second, *_ = sorted((path / "structured_logs").iterdir())
    text = first.read_text()
    first.write_text(text[:3000].replace('"value": ', '"value": "x', 1) + text[3000:-40])
    second.unlink()
    (run,) = load([path]).content
    assert (
        run.doubts["ranks"] == "no file of 1 of 4 ranks, as of rank 1"
        and "damaged" in run.doubts["numbers"]
    )
    assert run.parts.ranks == (0, 2, 3) and len(run.steps) == 58


def test_files_without_a_step_say_what_they_are(tmp_path, refused):
    path = titan(tmp_path, hiccups)
    for file in (path / "structured_logs").iterdir():
        file.write_text(file.read_text().splitlines()[0] + "\n")
    words = "looks like torchtitan spans, but holds no iteration"
    assert words in refused(stragglers.main, path)


def test_the_breakdown_has_the_parts_of_each_rank(tmp_path, rows_of):
    rows = {row["category"]: row for row in rows_of(breakdown.main, titan(tmp_path, slow_data))}
    assert rows["data"]["rank"] == 3 and rows["data"]["slowest_s"] == pytest.approx(0.101, rel=0.01)
    assert sum(row["share"] for row in rows.values()) == pytest.approx(2)  # the step, and its parts


def test_our_own_breakdown_names_the_rank_of_a_slow_step(tmp_path, printed):
    path = write_run(tmp_path, 0, gpus=2)
    for file in (path / "breakdown").iterdir():
        file.unlink()
    for step in range(1, 41):
        late_s = 0.5 * (step in (20, 33))
        put(path, 0, step, elapsed=0.1 + late_s, backward=0.1, dp=late_s)
        put(path, 1, step, elapsed=0.1 + late_s, backward=0.1 + late_s)
    _, (steps,) = tables(path, printed)
    assert (steps["part"], steps["ranks"], steps["iterations"]) == ("backward", [1], [20, 33])


TIMERS = {
    "time (ms) | forward-compute: {fwd} | forward-recv: 200.0 | optimizer: 50.0"
    " | batch-generator: 90.0\n": {"data": 0.09, "compute": 0.66, "communication": 0.2},
    "(min, max) time across ranks (ms):\n"
    "    forward-backward ...............................: (100.0, {fwd})\n"
    "    optimizer ......................................: (49.9, 50.0)\n": {
        "compute": None,
        "forward and backward": 0.7,
    },
}


@pytest.mark.parametrize("timers", TIMERS)
def test_megatrons_timers_are_parts_of_the_iteration_before_them(timers, tmp_path, printed):
    text = ""
    for i in range(1, 41):
        late_ms = 900 * (i in (20, 33))
        text += steps_of_megatron(i, 1000 + late_ms, i) + timers.format(fwd=700.0 + late_ms)
    (tmp_path / "job.out").write_text("validation\n" + text)
    (run,) = load([tmp_path]).content
    parts = parts_of(run).parts
    for name, seconds in TIMERS[timers].items():
        assert (name in parts) == (seconds is not None)
        assert seconds is None or np.median(parts[name]) == pytest.approx(seconds)
    (name,) = parts.keys() & {"compute", "forward and backward"}
    words = f"steps 20 and 33 are 0.9 s slower than the median: 0.9 s of it is {name}"
    assert words in printed(tflops.main, tmp_path)


@pytest.mark.parametrize(("kind", "data_s"), [("OLMo-core", 0.0002), ("XTuner", 0.0065)])
def test_the_time_for_loading_data_is_a_part(kind, data_s, tmp_path):
    lines = tomllib.loads((ROOT / "tests" / "log_lines.toml").read_text())
    (tmp_path / "job.out").write_text(lines[kind]["line"])
    (run,) = load([tmp_path]).content
    assert {name: seconds.tolist() for name, seconds in parts_of(run).parts.items()} == {
        "data": [[data_s]]
    }


def test_a_log_without_parts_has_no_slow_steps(tmp_path, refused):
    (tmp_path / "job.out").write_text(steps_of_megatron(20))
    assert "no times of several ranks, and no parts of a step" in refused(stragglers.main, tmp_path)
    assert "its log states no parts of a step" in refused(breakdown.main, tmp_path)


# --- the judge -----------------------------------------------------------------------------------


def made(n=100, ranks=4, **lost) -> PartTimes:
    """Times of steps of 1 s. lost: a part -> (steps, ranks, seconds) that are lost there; where a
    part is `rest`, in none."""
    draw = np.random.default_rng(0)
    parts = {name: 0.3 + 0.005 * draw.standard_normal((ranks, n)) for name in ("data", "compute")}
    parts["communication"] = 0.4 + 0 * parts["data"]
    step_s = sum(parts.values())
    for name, (steps, who, seconds) in lost.items():
        if name in parts:
            parts[name][np.ix_(who, steps)] += seconds
        step_s[:, steps] += seconds
    return PartTimes(
        np.arange(1.0, n + 1), step_s, parts, tuple(range(ranks)), tuple("abcd"[:ranks])
    )


CASES = {
    "one rank": (dict(data=([30, 61, 92], [3], 2.0)), "data", (3,)),
    "two ranks": (dict(compute=([30, 61], [0, 2], 2.0)), "compute", (0, 2)),
    "all ranks": (dict(compute=([30], [0, 1, 2, 3], 4.0)), "compute", (0, 1, 2, 3)),
    "a period": (dict(compute=(list(range(9, 100, 10)), [1], 0.3)), "compute", (1,)),
    "behind a jump": (dict(data=(list(range(70, 100)), [1], 0.3)), "data", (1,)),
    "a network": (dict(communication=([30, 50], [0, 1, 2, 3], 2.0)), "communication", ()),
    "no part": (dict(rest=([30, 50], [], 2.0)), "", ()),
    "a part of it": (dict(data=([30], [3], 1.0), rest=([30], [], 3.0)), "", ()),
    "too little": (dict(data=([70], [3], 1.0)), None, None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_part_that_slow_steps_are_longer_in(name):
    lost, part, ranks = CASES[name]
    found = slow_steps(made(**lost))
    if part is None:
        assert found == []
        return
    (steps,) = found
    (numbers, _, seconds), *_ = lost.values()
    assert (steps.part, steps.ranks) == (part, ranks)
    assert [number - 1 for number in steps.iterations] == numbers
    assert steps.part_s == pytest.approx(seconds if part else 0, abs=0.02)


def test_a_sentence_names_steps_part_rank_and_node():
    (steps,) = slow_steps(made(data=([30, 61, 92], [3], 2.04)))
    words = (
        "steps 31, 62 and 93 are 2.04 s slower than the median: 2.04 s of it is data, on rank 3 (d)"
    )
    assert str(steps) == words


def test_a_rank_that_computes_longer_is_named_where_a_log_tells_computing():
    (verdict,) = slow_ranks_of(made(compute=(list(range(100)), [2], 0.1)))
    assert (verdict.kind, verdict.rank, verdict.node) == ("compute", 2, "c")
