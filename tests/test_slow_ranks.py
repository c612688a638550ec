"""A slow rank is named with its node and with what it is slow in, and nobody else is."""

import json

import numpy as np
import pytest
import torch

from analysis import stragglers
from base.errors import UsageError
from parallel.config.study import load_study
from parallel.measure import ranges, rank_judge
from parallel.measure.own_times import OwnTimes
from parallel.measure.rank_judge import STEPS
from parallel.measure.slow_windows import Judge
from parallel.record.reader import read_run, read_slow_ranks
from parallel.record.schema import RUN, SLOW_COLUMNS, SLOW_RANKS, STATUS
from parallel.record.writer import RunFolder
from slurm import nodes
from tests import fixture_runs
from tests.conftest import run_module, study_file

NODES = [f"c{rank // 2}" for rank in range(8)]


def windows(n: int, noise: float = 0.02, seed: int = 0) -> np.ndarray:
    """Seconds of 8 equal ranks in n windows, (n, ranks, STEPS, 3)."""
    draw = np.random.default_rng(seed)
    times = np.empty((n, 8, STEPS, 3))
    times[..., 0] = 1 + noise * draw.standard_normal((n, 8, STEPS))
    times[..., 1] = 0.01 * draw.random((n, 8, STEPS))
    times[..., 2] = times[..., :2].sum(3).max(1, keepdims=True) + 0.5
    return times


def judged(times: np.ndarray, stages=(0,) * 8) -> list[str]:
    judge = Judge(list(stages), NODES)
    found = [judge.window(of, STEPS * (n + 1)) for n, of in enumerate(times)]
    return [str(verdict) for _, new in found for verdict in new]


def test_a_rank_that_computes_longer_is_named_once_with_its_node():
    times = windows(8)
    times[4:, 5, :, 0] *= 1.2
    times[4:, :, :, 2] += 0.2  # all wait for it
    (line,) = judged(times)
    assert line.startswith("slow rank: rank 5 on node c2 computes ")
    assert line.endswith(" longer, in 3 of 3 windows (steps 21-35)")
    assert abs(float(line.split("computes ")[1].split("%")[0]) - 20) <= 3


def test_a_rank_that_waits_for_data_is_told_from_one_that_computes():
    times = windows(8)
    times[:, 2, :, 1] += 0.3
    times[..., 2] += 0.3
    (line,) = judged(times)
    assert "rank 2 on node c1 waits for data 1" in line and "% of a step longer" in line


def test_steps_that_grow_on_no_ranks_own_account_name_no_rank():
    times = windows(12)
    times[8:, :, :, 2] += 1.0
    (line,) = judged(times)
    assert line.startswith("slow link: a step takes ") and "rank 5" not in line


def test_equal_ranks_and_windows_that_are_slow_for_all_name_nobody():
    for seed in range(20):
        times = windows(20, noise=0.03, seed=seed)
        times[5:9, :, :, 0] *= 1.5
        times[5:9, :, :, 2] += 0.5
        assert judged(times) == []


def test_windows_that_are_noisy_one_by_one_name_a_rank_together():
    """A window of 20 % counts however noisy it is; the mean of three has to stand out."""
    named = []
    for seed in range(20):
        times = windows(6, noise=0.12, seed=seed)
        assert judged(times) == []
        times[2:, 5, :, 0] *= 1.3
        named += judged(times)
    assert len(named) >= 19 and all("rank 5 on node c2 computes" in line for line in named)


@pytest.mark.parametrize(("noise", "slow"), [(0.11, True), (0.12, False)])
def test_the_mean_of_three_windows_is_compared_with_three_times_its_noise(noise, slow):
    """0.2 with 3 x 0.11 / sqrt(3) = 0.19, and with 0.21."""
    rows = [{"last_step": last, "longer": 0.2, "noise": noise} for last in (5, 10, 15)]
    assert rank_judge.is_slow(rows) == slow
    assert not rank_judge.is_slow(rows[:2])


def test_a_link_is_slow_only_beyond_what_steps_differ_by_anyway():
    for before, lines in ((0.05, 1), (0.3, 0)):  # a step of 1.5 s takes so much longer, by turns
        times = windows(16)
        times[1:12:2, :, :, 2] += before
        times[12:, :, :, 2] += 1.0
        assert len(judged(times)) == lines


def test_one_slow_window_of_four_is_no_slow_rank():
    times = windows(12)
    times[2::4, 5, :, 0] *= 2
    times[2::4, :, :, 2] += 1
    assert judged(times) == []


def test_ranks_are_compared_within_their_stage():
    times = windows(8)
    times[:, 4:, :, 0] *= 1.5
    times[..., 2] += 0.5
    assert len(judged(times)) == 4
    assert judged(times, stages=(0,) * 4 + (1,) * 4) == []


# --- afterwards ----------------------------------------------------------------------------------


def write_slow(root, rank: int, ends: list[int], longer: float = 0.18, **settings):
    """A run of 20 steps with windows that count against a rank."""
    about = fixture_runs.facts("grid", None, engine="ddp", gpus=4, micro_batch=4, **settings)
    run = fixture_runs.write(root, about)
    folder = RunFolder(run)
    for last in ends:
        row = {"time_utc": "2026-11-24T00:00:00Z", "first_step": last - 4, "last_step": last}
        row |= {"kind": "compute", "rank": rank, "node": NODES[rank], "longer": longer}
        row["noise"] = 0.02
        folder.slow_ranks([row])
    folder.behind.wait()
    return run


def test_the_table_names_the_node_over_several_runs(tmp_path, rows_of):
    for seed, ends in ((1, [5, 10, 20]), (2, [5, 10, 15, 20]), (3, [5, 20])):
        write_slow(tmp_path / f"{seed}", 3, ends)
    *ranks, node = rows_of(stragglers.main, tmp_path)
    assert [(row["rank"], row["n"], row["windows"]) for row in ranks] == [(3, 3, 4), (3, 4, 4)]
    assert len({row["run"] for row in ranks}) == 2
    assert (node["node"], node["n"], node["of"]) == ("c1", 2, 3)


def test_steps_that_were_run_again_count_once_and_a_restarts_nodes_are_told_apart(tmp_path):
    """The second attempt began after step 12; the rank was slow again, then on another node."""
    run = write_slow(tmp_path, 3, [5, 10, 15, 20, 17, 22, 27])
    (of,) = rank_judge.verdicts(read_slow_ranks(run))
    assert (of.n, of.windows, of.last) == (5, 5, 27)
    *lines, a, b, c = (run / SLOW_RANKS).read_text().splitlines()
    moved = [line.replace("c1", "c9") for line in (a, b, c)]
    (run / SLOW_RANKS).write_text("\n".join([*lines, *moved, ""]))
    found = rank_judge.verdicts(read_slow_ranks(run))
    assert [(of.node, of.n, of.windows) for of in found] == [("c9", 3, 3)]


def test_a_verdict_looks_at_each_window_a_few_times_however_long_the_run_is(tmp_path, monkeypatch):
    looked_at, is_slow = [], rank_judge.is_slow

    def noted(rows) -> bool:
        looked_at.append(len(rows))
        return is_slow(rows)

    monkeypatch.setattr(rank_judge, "is_slow", noted)
    rank_judge.verdicts(
        read_slow_ranks(write_slow(tmp_path, 3, list(range(5, 505, 5)), longer=0.01))
    )
    assert len(looked_at) == 98 and max(looked_at) == rank_judge.WINDOWS


def test_a_damaged_line_is_refused_with_its_number(tmp_path, refused):
    path = write_slow(tmp_path, 3, [5]) / SLOW_RANKS
    path.write_text(path.read_text() + "now,1,x,compute,3,c1,0.1,0.02\n")
    with pytest.raises(UsageError, match=r"slow_ranks.csv:3: "):
        read_slow_ranks(path.parent)
    path.write_text("a,b\n")
    assert "expected columns time_utc, first_step" in refused(stragglers.main, tmp_path)


def test_a_node_is_evidence_where_its_rank_was_slow_in_half_of_the_steps(tmp_path):
    text = '[[run]]\nengine = "ddp"\ngpus = 4\nmicro_batch = 4\n'
    study = load_study(study_file(tmp_path / "grid.toml", text))
    (name,) = study.runs
    run = write_slow(tmp_path / "logs/grid", 3, [5, 10, 15])
    run.rename(run.parent / name)
    (change,) = nodes.evidence(study, tmp_path / "logs").content
    assert (change.node, change.change) == ("c1", nodes.SUSPECTED)
    assert change.why == f"{name}: slow rank: rank 3 on node c1 computes 18% longer," + (
        " in 3 of 3 windows (steps 1-15)"
    )
    run = run.parent / name
    for steps, n in ((20, 1), (40, 0)):  # 15 of the steps that a running run is to do
        facts = json.loads((run / RUN).read_text())
        facts["spec"]["steps"] = steps
        (run / RUN).write_text(json.dumps(facts))
        (run / STATUS).write_text('{"state": "running"}')
        assert len(nodes.evidence(study, tmp_path / "logs").content) == n
    path = run / SLOW_RANKS
    (run / STATUS).write_text('{"state": "complete"}')
    path.write_text(path.read_text().replace(",3,c1", ",-1,").replace("compute", "link"))
    assert nodes.evidence(study, tmp_path / "logs").content == []
    path.write_text(",".join(SLOW_COLUMNS) + "\n")
    assert nodes.evidence(study, tmp_path / "logs").content == []


# --- real ranks ----------------------------------------------------------------------------------

FLAGS = ["--preset", "tiny", "--device", "cpu", "--steps", "30", "--eval-steps", "0"]


def train(tokens, folder, **environment: str):
    out = ["--data", str(tokens), "--out", str(folder), "--max-seq-len", "64"]
    done = run_module("tests.slow_rank", *FLAGS, *out, ranks=2, **environment)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith(" slow ")]


@pytest.mark.slow
def test_a_real_slow_rank_is_named_and_the_losses_do_not_change(tokens, tmp_path):
    lines = train(tokens, tmp_path / "on", SLOW_KIND="compute", SLOW_RANK="1")
    assert any(" rank 1 " in line and " computes " in line for line in lines), lines
    lines = train(tokens, tmp_path / "late", SLOW_KIND="data", SLOW_RANK="1")
    assert any(" rank 1 " in line and "waits for data" in line for line in lines), lines
    assert train(tokens, tmp_path / "off", SLOW_KIND="off") == []
    assert not (tmp_path / "off" / SLOW_RANKS).exists()
    runs = [read_run(tmp_path / name).steps for name in ("on", "off")]
    losses = [[(row["loss"], row["grad_norm"]) for row in steps] for steps in runs]
    # Exact: the same ranks of one machine do the same operations in the same order.
    assert losses[0] == losses[1] and len(losses[0]) == 30


def test_on_a_gpu_the_forward_passes_of_training_are_timed(monkeypatch):
    clock = iter([0, 30, 100, 170])  # ms

    class Event:
        def __init__(self, enable_timing):
            self.at = None

        def record(self):
            self.at = next(clock)

        def elapsed_time(self, end):
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    own = object.__new__(OwnTimes)
    own.is_on, own._cuda, own._work, own._times = True, True, None, []
    monkeypatch.setattr(ranges, "listeners", [own])
    own.begin()
    for _ in range(2):
        with ranges.region("forward"):
            pass
        with ranges.region("backward"):
            pass
    with ranges.validation(), ranges.region("forward"):
        pass
    assert own.lap(1, 0.5, 0.1) == ([], [])
    assert own._times == [(0.1, 0.1, 0.5)]
