"""Each step is in the tool once, with the values of steps.csv, also where a run grows.

Read back with the tools' own libraries."""

import json
import shutil
import sys
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from analysis import curves
from analysis.logs.readers import run_folder
from analysis.runs import curve_tools
from analysis.runs.curve_tools import TOOLS
from parallel.record.reader import read_run
from tests.conftest import ROOT

DDP = ROOT / "logs" / "2-core-cpu" / "parity" / "ddp"


@pytest.fixture
def growing(tmp_path) -> tuple[Path, list[str]]:
    """A run folder with a header and no step, and the lines of its steps."""
    folder = tmp_path / "run"
    shutil.copytree(DDP, folder)
    header, *rows = (folder / "steps.csv").read_text().splitlines(keepends=True)
    (folder / "steps.csv").write_text(header)
    return folder, rows


def attempts(tool: str, growing: tuple[Path, list[str]], out: Path) -> list[tuple[int, float]]:
    """Write 3 steps, again the same 3, then all; the losses of the run by step."""
    folder, rows = growing
    for lines in (rows[:3], [], rows[3:]):
        with (folder / "steps.csv").open("a") as file:
            file.writelines(lines)
        assert curves.main([str(folder), "--to", tool, "--out", str(out)]) == 0
    return [(step["step"], step["loss"]) for step in read_run(folder).steps]


def scalars(out: Path) -> dict[str, list[tuple[int, float]]]:
    """tag -> (step, value) as TensorBoard reads the event files of the one run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = [path for path in (out / "tensorboard").iterdir() if path.is_dir()]
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_has_each_step_of_a_growing_run_once(growing, tmp_path, capsys):
    losses = attempts("tensorboard", growing, tmp_path / "out")
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed] == ["3", "0", "17"]
    tags = scalars(tmp_path / "out")
    assert [step for step, _ in tags["train/loss"]] == [step for step, _ in losses]
    assert [v for _, v in tags["train/loss"]] == pytest.approx([v for _, v in losses], rel=1e-6)
    rates, tflops = (tags[f"throughput/{name}"] for name in ("tokens_per_s", "tflops_per_gpu"))
    steps = read_run(DDP).steps
    assert [v for _, v in rates] == pytest.approx([s["tokens"] / s["step_s"] for s in steps])
    per_token = [1e12 * v / rate for (_, v), (_, rate) in zip(tflops, rates, strict=True)]
    flops = 72 * 4 * 128**2 * (1 + 128 / (12 * 128) + 257 / (12 * 4 * 128))
    assert per_token == pytest.approx([flops] * 20, rel=1e-6)
    assert "throughput/mfu" not in tags  # a CPU has no known peak
    assert [step for step, _ in tags["val/loss"]] == [20]


def test_times_are_those_that_the_run_wrote_or_a_step_apart_before_its_end(tmp_path):
    """Of a copy they are the same."""
    shutil.copytree(DDP, tmp_path / "ddp", copy_function=shutil.copyfile)
    record = run_folder.read(tmp_path / "ddp")
    run, points = record.own, curves.points_of(record)
    ended = json.loads((DDP / "status.json").read_text())["time_utc"]
    assert points[-1].time_s == datetime.fromisoformat(ended).timestamp()
    gaps = [b.time_s - a.time_s for a, b in pairwise(points)]
    assert gaps == pytest.approx([step["step_s"] for step in run.steps[1:]], abs=1e-5)
    for step in run.steps:
        step["ended_unix_s"] = 1.7e9 + 2 * step["step"]
    assert [p.time_s for p in curves.points_of(record)] == [s["ended_unix_s"] for s in run.steps]


def test_follow_ends_when_the_run_has_ended(growing, tmp_path, monkeypatch):
    folder, rows = growing
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(status | {"state": "running", "host": "other"}))

    def sleep(_: float) -> None:
        with (folder / "steps.csv").open("a") as file:
            file.write(rows.pop(0))
        if not rows:
            (folder / "status.json").write_text(json.dumps(status))

    monkeypatch.setattr(curves.time, "sleep", sleep)
    flags = ["--to", "tensorboard", "--follow", "--out", str(tmp_path / "out")]
    assert curves.main([str(folder), *flags]) == 0
    steps = [step for step, _ in scalars(tmp_path / "out")["train/loss"]]
    assert steps == list(range(1, 21))


def test_a_tool_that_fails_is_named_and_ends_with_1(tmp_path, monkeypatch, refused):
    def refuse(*_: object) -> None:
        raise OSError("no server")

    monkeypatch.setitem(TOOLS, "tensorboard", TOOLS["tensorboard"]._replace(open=refuse))
    assert "ddp: tensorboard failed: OSError: no server" in refused(
        curves.main, DDP, "--to", "tensorboard", "--out", tmp_path, status=1
    )


def test_a_damaged_run_is_named_and_the_others_are_written(tmp_path, capsys):
    for name, file in (("a", "run.json"), ("b", "steps.csv"), ("c", None)):
        shutil.copytree(DDP, tmp_path / "runs" / name)
        if file:
            (tmp_path / "runs" / name / file).write_text("{")
    flags = ["--to", "tensorboard", "--out", str(tmp_path / "out")]
    assert curves.main([str(tmp_path / "runs"), *flags]) == 0
    out, err = capsys.readouterr()
    assert "ddp: 20 steps written" in out
    assert "a/run.json is damaged" in err and "b/steps.csv" in err
    assert curves.main([str(tmp_path / "runs" / "a"), *flags]) == 2


def test_a_library_that_is_absent_is_named_with_the_command_that_installs_it(monkeypatch, refused):
    missing = TOOLS["wandb"]._replace(modules=("no_such_module",))
    monkeypatch.setitem(TOOLS, "wandb", missing)
    assert "pip install -c constraints.txt -e '.[wandb]'" in refused(
        curves.main, DDP, "--to", "wandb"
    )


def test_wandb_says_nothing_and_watches_neither_the_console_nor_the_machine(tmp_path, monkeypatch):
    asked = {}
    library = ModuleType("wandb")
    library.Settings, library.init = dict, lambda **how: asked.update(how)
    monkeypatch.setitem(sys.modules, "wandb", library)
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    curve_tools.wandb("study", "ddp", {"lr": 1.0}, tmp_path / "ddp", {})
    assert asked["settings"] == {"silent": True, "console": "off", "x_disable_stats": True}
    assert (asked["mode"], asked["resume"], asked["name"]) == ("offline", "allow", "ddp")


@pytest.mark.slow
def test_wandb_keeps_a_run_offline_and_goes_on_with_it(growing, tmp_path):
    pytest.importorskip("wandb", reason="the extra wandb is not installed (125 MB)")
    attempts("wandb", growing, tmp_path / "out")
    files = sorted((tmp_path / "out" / "wandb").glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({path.name for path in files}) == 1  # two openings, one id


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's use of SQLAlchemy
def test_mlflow_keeps_a_run_in_a_local_file_and_goes_on_with_it(growing, tmp_path, monkeypatch):
    for module in TOOLS["mlflow"].modules:
        pytest.importorskip(module, reason="the extra mlflow is not installed (160 MB)")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.tracking import MlflowClient

    losses = attempts("mlflow", growing, tmp_path / "out")
    client = MlflowClient(f"sqlite:///{tmp_path}/out/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("parity")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("ddp", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((metric.step, metric.value) for metric in history) == losses
