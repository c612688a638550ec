"""The run folder: what the one writer writes the one reader reads, whole or not at all."""

import json

import pytest

from models.errors import UsageError
from parallel import artifacts
from parallel.artifacts import RunFolder, find_runs, read_run

FACTS = {"run": "ddp"}


def row(step: int, **values) -> dict:
    return {
        "step": step,
        "step_s": 0.1,
        "loss": 5.123456789012345,
        "grad_norm": None,
        "lr": 1e-3,
        "loss_scale": 1.0,
        "skipped": 0,
        "tokens": 128,
    } | values


def test_what_is_written_is_read_back_to_the_last_digit(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.begin(FACTS)
    folder.log("a line")
    rows = [row(1), row(2, grad_norm=0.1 + 0.2, skipped=1)]
    for one in rows:
        folder.step(one)
    folder.complete({"schema_version": "2.0"}, "RUN_COMPLETE")
    run = read_run(tmp_path / "run")
    assert (run.state, run.name, run.steps) == ("complete", "ddp", rows)
    assert run.metrics["schema_version"] == "2.0"
    assert (tmp_path / "run" / "train.log").read_text() == "a line\n"


def test_partial_results_stay_and_are_labelled(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.begin(FACTS)
    folder.step(row(1))
    folder.fail("RuntimeError: peer gone (rank 1)", rank=1)
    folder.fail("SIGTERM (rank 0)", rank=0)
    folder.close()
    run = read_run(tmp_path / "run")
    assert (run.state, run.reason) == ("failed", "RuntimeError: peer gone (rank 1)")
    assert len(run.steps) == 1 and not (tmp_path / "run" / "RUN_COMPLETE.txt").exists()


def test_a_second_attempt_moves_the_first_aside(tmp_path):
    for attempt in range(3):
        folder = RunFolder(tmp_path / "run")
        folder.begin(FACTS | {"attempt": attempt})
        folder.step(row(attempt))
        folder.close()
    (tmp_path / "run" / "4711.out").write_text("slurm wrote this")
    folder.begin(FACTS)
    folder.close()
    kept = [read_run(tmp_path / "run" / "attempts" / str(n)).facts["attempt"] for n in (1, 2, 3)]
    assert kept == [0, 1, 2]
    assert (tmp_path / "run" / "4711.out").exists()
    assert find_runs([tmp_path]) == [tmp_path / "run"]


def test_complete_without_its_marker_is_not_complete(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.begin(FACTS)
    folder.complete({"schema_version": "2.0"}, "RUN_COMPLETE")
    (tmp_path / "run" / "RUN_COMPLETE.txt").unlink()
    assert read_run(tmp_path / "run").state == "failed"


def test_a_failure_after_completion_does_not_unmake_it(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.begin(FACTS)
    folder.complete({"schema_version": "2.0"}, "RUN_COMPLETE")
    folder.fail("teardown", rank=3)
    assert read_run(tmp_path / "run").state == "complete"


def test_a_cut_last_line_is_left_out_and_a_bad_one_is_named(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.begin(FACTS)
    folder.step(row(1))
    folder.close()
    steps = tmp_path / "run" / "steps.csv"
    whole = steps.read_text()
    steps.write_text(whole + "2,0.1,5.")
    assert len(read_run(tmp_path / "run").steps) == 1
    steps.write_text(whole + "x,0.1,5.0,,0.001,1.0,0,128\n")
    with pytest.raises(UsageError, match=r"steps.csv:3: invalid literal"):
        read_run(tmp_path / "run")
    steps.write_text("loss\n1\n")
    with pytest.raises(UsageError, match=r"steps.csv:1: expected columns"):
        read_run(tmp_path / "run")


def test_damaged_or_missing_folders_are_named(tmp_path):
    with pytest.raises(UsageError, match="nowhere: no such folder"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(UsageError, match="no run folder here"):
        find_runs([tmp_path])
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UsageError, match="run.json is damaged"):
        read_run(tmp_path)


def test_json_is_replaced_whole(tmp_path):
    artifacts.write_json(tmp_path / "x.json", {"a": 1})
    artifacts.write_json(tmp_path / "x.json", {"a": 2})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
