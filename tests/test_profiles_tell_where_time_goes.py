"""Profiles: `nsys stats` text and torch traces give their own figures, or one line why not."""

import gzip
import json

import pytest

from analysis import profile
from analysis.logs.record import Refusal
from base.errors import UsageError
from parallel.config.resolve import resolve
from parallel.record import facts
from tests import fixture_runs
from tests.conftest import run_module

# Rows of the published GPT-2 study's second profile, nsys_stats_gn-0013.txt (200 MB buckets).
SECOND = """\
 ** NVTX Range Summary (nvtx_sum):

 Time (%)  Total Time (ns)  Instances   Style                  Range
 --------  ---------------  ---------  -------  ------------------------------------
     24.5  62,14,25,70,603        320  PushPop  :train/backward
Generating '/tmp/nsys-report-9.qdstrm'
     24.5  62,13,38,03,775        320  PushPop  :DeepSpeedEngine.backward
     16.8  42,59,24,66,395        320  PushPop  :DeepSpeedEngine.allreduce_gradients
      8.3  21,12,30,57,501        520  PushPop  NCCL:ncclAllReduce

"""


def test_the_first_published_profile_keeps_its_figures(shared):
    file = "kadamrahul18+GPT2-Optimization/baseline_2026-01-26__nsys_stats_gn-0011.txt"
    first = profile.read_profile(shared / "logs" / file)
    notes = " ".join(profile.notes(first))
    assert "all-reduce: 40.8% in :DeepSpeedEngine.allreduce_gradients, 42,748 calls" in notes
    assert "of the GPU's time in 42,748 kernels" in notes
    assert "GEMMs: 7.8% of the kernels' time" in notes
    ranges = [row for row in first.rows if row["kind"] == "range"]
    backward = next(row for row in ranges if "backward" in row["name"])
    assert (backward["total_s"], backward["share"]) == pytest.approx((2765.967562725, 0.539))
    n = 14244 * 2 + 15680 + 42748 + 8 + 14212 + 8 + 788 + 8 + 4
    assert sum(row["instances"] for row in ranges) == n


def event(category: str, name: str, start: float, us: float, thread: int = 1) -> dict:
    about = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread}
    return about | {"ts": start, "dur": us}


TRACE = [
    event("user_annotation", "ProfilerStep#3", 0, 100),
    event("user_annotation", "train/backward", 10, 60),
    event("user_annotation", "gloo:all_reduce", 20, 20, thread=2),
    event("cpu_op", "aten::linear", 10, 30),
    event("cpu_op", "aten::mm", 15, 20),
    event("cpu_op", "aten::mm", 50, 10),
]


def changed(**values) -> bytes:
    """A trace with one event that no profiler writes."""
    return json.dumps({"traceEvents": [TRACE[0] | values], "distributedInfo": 5}).encode()


def test_ranges_of_one_name_inside_each_other_count_as_the_time_that_they_cover(tmp_path):
    """An outer range of 60 us holds one of 50; another thread's, of 40, begins when 30 are left."""
    inside = [
        event("user_annotation", "train/backward", 15, 50),
        event("user_annotation", "train/backward", 40, 40, thread=2),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [*inside, *TRACE]}))
    (backward,) = (r for r in profile.read_profile(path).rows if r["name"] == "train/backward")
    assert backward["of_time"] == pytest.approx(0.7) and backward["instances"] == 3


def test_a_torch_trace_counts_an_operators_own_time(tmp_path):
    path = tmp_path / "trace_rank3.json.gz"
    content = json.dumps({"traceEvents": TRACE, "distributedInfo": {"rank": 3}})
    path.write_bytes(gzip.compress(content.encode()))
    trace = profile.read_profile(path)
    assert (trace.rank, trace.steps, trace.profiled_s) == (3, 1, pytest.approx(100e-6))
    own = {row["name"]: row["total_s"] for row in trace.rows if row["kind"] == "operator"}
    assert own == {"aten::mm": pytest.approx(30e-6), "aten::linear": pytest.approx(10e-6)}
    (backward,) = (row for row in trace.rows if row["name"] == "train/backward")
    assert backward["of_time"] == pytest.approx(0.6)
    assert "all-reduce: 25.0% in gloo:all_reduce, 1 calls" in profile.notes(trace)
    assert "GEMMs: 75.0% of the operators' time" in profile.notes(trace)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("cut.txt", SECOND.encode()[:-30], "truncated: line 9 ends inside a row of nvtx_sum"),
        ("headless.txt", "\n".join(SECOND.splitlines()[:4]).encode() + b"\n\n", "has no rows"),
        ("cut.json", json.dumps({"traceEvents": TRACE}).encode()[:-20], "damaged torch trace"),
        ("cut.json.gz", gzip.compress(b"[" * 999, mtime=0)[:-9], "cannot be unpacked"),
        ("other.json", b'{"a": 1}', "no torch trace"),
        ("empty.json", b"", "empty file"),
        ("notes.txt", b"remember the milk\n", "no profile that is known"),
        ("dur.json", changed(dur={"a": 1}), "dur {'a': 1}"),
        ("ts.json", changed(ts=None), "ts None"),
        ("nan.json", changed(dur=float("nan")), "dur nan"),
        ("name.json", changed(name=[[]]), "name [[]]"),
    ],
)
def test_a_cut_or_unknown_profile_is_one_line_and_the_rest_is_read(
    name, content, why, tmp_path, capsys
):
    for run in ("bad", "good"):
        (tmp_path / run / "profiles").mkdir(parents=True)
    (tmp_path / "bad" / "profiles" / name).write_bytes(content)
    (tmp_path / "good" / "profiles" / "nsys_stats_a.txt").write_text(SECOND)
    with pytest.raises(Refusal):
        profile.read_profile(tmp_path / "bad" / "profiles" / name)
    assert profile.main([str(tmp_path / "bad"), str(tmp_path / "good")]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and name in printed.err and why in printed.err
    assert "16.8%" in printed.out and "520 calls" in printed.out


def test_a_profiled_run_is_in_no_headline(tmp_path):
    spec = resolve(("test", {"profile_steps": "3-5"}))
    assert facts.profiler(spec, {}) == {"tool": "torch", "steps": "3-5", "ranks": "0"}
    assert facts.profiler(resolve(), {}) is None
    assert facts.profiler(resolve(), {"NSYS_PROFILING_SESSION_ID": "7"})["tool"] == "nsys"
    plain = fixture_runs.facts("study", "ddp")
    marked = fixture_runs.facts("study", "ddp", gpus=2) | {"profiler": facts.profiler(spec, {})}
    for about in (plain, marked):
        fixture_runs.write(tmp_path, about)
    one, two = fixture_runs.table_of(tmp_path).rows
    assert one["speedup"] == 1.0 and "profiled" not in one["notes"]
    assert "profiled with torch: not a timing" in two["notes"]
    for name in ("step_s", "tokens_per_s", "tflops", "mfu", "speedup", "efficiency"):
        assert two[name] is None, name
    curve = fixture_runs.curve_of(tmp_path)
    assert [row["gpus"] for row in curve.rows] == [1]
    assert "left out: ddp-dp2: profiled with torch" in curve.notes[-1]


def test_rank_0_traces_its_ranges(tokens, tmp_path):
    flags = "--max-seq-len 32 --device cpu --steps 3 --eval-steps 1 --profile-steps 2-3".split()
    flags += ["--data", str(tokens), "--out", str(tmp_path / "run")]
    done = run_module("parallel.train", *flags, ranks=2)
    assert done.returncode == 0, done.stderr
    profiles, refused = profile.profiles_at(tmp_path / "run")
    (traced,) = profiles.values()
    counted = {row["name"]: row["instances"] for row in traced.rows if row["kind"] == "range"}
    assert counted["train/forward"] == counted["train/backward"] == 2
    assert counted["train/optimizer"] == 2 and counted["val/forward"] == 1
    assert counted["gloo:all_reduce"] >= 2 and (traced.rank, traced.steps, refused) == (0, 2, [])


@pytest.mark.parametrize("steps", ["3-50", "0-2", "4-3", "a-b", "", "1-2-3"])
def test_steps_that_are_not_there_are_refused(steps):
    with pytest.raises(UsageError, match="profile_steps"):
        resolve(("test", {"profile_steps": steps}))
