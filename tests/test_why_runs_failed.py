"""Why runs failed: the cause, the rank and the node that failed first, and the node to leave out.
Lines of real outputs stand in log_ends.toml."""

import json
import random
import tomllib

import pytest

from analysis import failures, tflops
from analysis.logs.readers import read
from analysis.runs.failed_runs import CHANCE, chance_of
from tests import fixture_runs
from tests.conftest import ROOT
from tests.test_readers import RUN

PLACES = tomllib.loads((ROOT / "tests" / "log_ends.toml").read_text())["first_place"]


@pytest.mark.parametrize("name", PLACES)
def test_a_job_that_died_before_its_first_step_says_why_and_where(tmp_path, rows_of, name):
    known, path = PLACES[name], tmp_path / "slurm-7.out"
    path.write_text(known["log"])
    (row,) = rows_of(failures.main, path)
    assert (row["cause"], row["runs"]) == (known["cause"], 1)
    assert (row["rank"], row["node"]) == (known.get("rank"), known.get("node"))
    assert known["proof"] in row["proof"] and row["which"] == "slurm-7.out"
    assert read(path).failure.place.is_suspect == known["suspect"]
    (shown,) = rows_of(tflops.main, path)
    assert shown["steps"] == 0 and shown["steady_step_s"] is None and shown["verdict"] != "complete"


@pytest.mark.parametrize(
    "how", ("Killed", "Segmentation fault (core dumped)", "Exited with exit code 1")
)
def test_sruns_word_alone_is_the_end_of_a_run_with_steps_but_sigterm_is_none(tmp_path, how):
    path = tmp_path / "a.out"
    path.write_text(f"{RUN}srun: error: n2: task 3: {how}\n")
    failure = read(path).failure
    expected = "traceback" if "fault" in how else "exited"
    assert (failure.kind, failure.place.rank, failure.place.node) == (expected, 3, "n2")
    path.write_text(f"{RUN}srun: error: n2: task 3: Exited with exit code 143\n")
    assert read(path).failure is None


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "OOM: GPU"),
        ("torch.cuda.OutOfMemoryError: HIP out of memory.", "OOM: GPU"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=5.0.", "OOM: host"),
        ("srun: error: n1: task 0: Out Of Memory", "OOM: host"),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory", "OOM: host"),
    ],
)
def test_memory_of_the_host_and_of_a_gpu_are_two_causes(tmp_path, rows_of, line, cause):
    path = tmp_path / "a.out"
    path.write_text(f"{RUN}{line}\n")
    (row,) = rows_of(failures.main, path)
    assert (row["cause"], row["runs"]) == (cause, 1)


def test_two_errors_of_one_kind_are_two_causes_and_numbers_and_paths_make_none(tmp_path, rows_of):
    lines = [
        "AssertionError: world size (6) is not divisible by tensor_model_parallel_size (4)",
        "AssertionError: world size (9) is not divisible by tensor_model_parallel_size (2)",
        "AssertionError: no file at /data/a.bin",
    ]
    for number, line in enumerate(lines):
        text = f'Traceback (most recent call last):\n  File "x.py", line 3, in f\n{line}\n'
        (tmp_path / f"{number}.out").write_text(text)
    (tmp_path / "shell.out").write_text("sbatch: error: Batch job submission failed: no account\n")
    (tmp_path / "found.out").write_text("slurm_script: line 12: torchrun: command not found\n")
    rows = [(row["cause"], row["runs"]) for row in rows_of(failures.main, tmp_path)]
    one = [("AssertionError", 1), ("no data", 1), ("no data", 1)]
    assert (rows[0], sorted(rows[1:])) == (("AssertionError", 2), one)


def test_a_copy_in_a_folder_beside_it_is_not_counted_but_jobs_that_died_alike_are(
    tmp_path, printed
):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        log = f"{RUN}torch.OutOfMemoryError: CUDA out of memory\n"
        (tmp_path / folder / "long.out").write_text(log)
        (tmp_path / folder / "died.out").write_text(PLACES["module"]["log"])
    text = printed(failures.main, tmp_path)
    assert "3 of 3 runs failed" in text and "b/long.out (of " in text


def test_fourteen_jobs_are_a_table_by_cause_with_the_node_to_leave_out(tmp_path, printed):
    """n7 has a broken file system: four of its jobs lack a module; the others failed elsewhere."""
    module = PLACES["module"]["log"]
    for job in range(4):
        (tmp_path / f"slurm-{job}.out").write_text(module.replace("n17", "n7"))
    for job, name in enumerate(("time limit",) * 6 + ("preempted", "quota", "ecc", "peer")):
        (tmp_path / f"slurm-1{job}.out").write_text(PLACES[name]["log"])
    for job in range(3):
        steps = RUN.replace("(ms): 1", f"(ms): {job + 1}")
        text = f"n{job}0:1:2 [0] NCCL INFO Bootstrap\n{steps}"
        (tmp_path / f"slurm-2{job}.out").write_text(text)
    (tmp_path / "slurm-30.out").write_text("srun: job 30 queued and waiting for resources\n")
    (tmp_path / "notes.txt").write_text("Job 12 died of NCCL, I think.\n")
    text = printed(failures.main, tmp_path)
    assert "14 of 18 runs failed" in text and "how it ended: slurm-30.out" in text
    assert "sbatch --exclude=n7 " in text
    causes, nodes = (
        [
            row
            for row in json.loads(printed(failures.main, tmp_path, "--format", "json"))
            if row["table"] == title
        ]
        for title in ("Failures by cause", "Nodes that failed first in several runs")
    )
    assert [(row["cause"], row["runs"]) for row in causes[:2]] == [
        ("timeout", 6),
        ("ModuleNotFoundError", 4),
    ]
    assert [run["node"] for run in causes[1]["failures"]] == ["n7"] * 4
    assert (nodes[0]["node"], nodes[0]["n"], nodes[0]["leave_out"]) == ("n7", 4, "yes")


def test_chance_is_that_of_the_binomial_distribution_and_its_false_alarms_are_few():
    assert chance_of(3, [0.1] * 3, 10) == pytest.approx(0.01)
    assert chance_of(2, [0.1] * 2, 10) == pytest.approx(0.1)
    assert chance_of(1, [0.5, 0.0], 1) == 0.5 and chance_of(2, [0.5, 0.5], 8) == 1.0
    draw, alarms = random.Random(1), 0
    for _ in range(1000):
        first = [draw.randrange(12) for _ in range(14)]
        most = max(map(first.count, first))
        alarms += chance_of(most, [1 / 12] * 14, 12) <= CHANCE
    assert alarms <= CHANCE * 1000


def test_a_jobs_errors_beside_its_output_are_one_run_with_one_place(tmp_path, rows_of):
    """The traceback is in one file, srun's word on the node in the other."""
    raised, told = PLACES["ecc"]["log"].split("srun:", 1)
    (tmp_path / "slurm-7.out").write_text(f"loading\n{raised}")
    (tmp_path / "slurm-7.err").write_text(f"srun:{told}")
    (row,) = rows_of(failures.main, tmp_path)
    assert (row["cause"], row["rank"], row["node"], row["runs"]) == ("node failure", 5, "n17", 1)
    (tmp_path / "slurm-7.out").write_text("loading\n")
    (tmp_path / "slurm-7.err").write_text(PLACES["module"]["log"])
    (row,) = rows_of(failures.main, tmp_path)
    assert (row["cause"], row["rank"], row["node"]) == ("ModuleNotFoundError", 9, "n17")


def test_a_run_folder_names_the_rank_of_its_reason(tmp_path, rows_of):
    about = fixture_runs.facts("s", None) | {"scheduler": {"job_id": "9"}}
    folder = fixture_runs.write(tmp_path, about, fail="ValueError: the data are gone (rank 1)")
    (folder / "9.out").write_text("srun: error: n2: task 1: Exited with exit code 1\n")
    (row,) = rows_of(failures.main, folder)
    assert (row["cause"], row["rank"], row["node"]) == ("ValueError", 1, "n2")
