"""Files that a user wrote: what no program should follow to its depth is refused in one line."""

import gzip
import importlib
import os
from pathlib import Path

import pytest

from analysis import plots
from analysis.logs import load
from analysis.logs.parsing import packed
from analysis.logs.readers import torch_trace
from base.errors import UsageError
from base.files import below, parse_json, parse_toml, read_json
from parallel import token_files
from parallel.checkpoint import attempts, folders
from parallel.config import data_files, deepspeed_json, study
from parallel.record.reader import read_breakdown, read_checkpoints, read_run
from slurm import states
from tests.conftest import ROOT
from tests.fixture_runs import facts, write

DEEP_JSON = {"parser": "[" * 100_000 + "]" * 100_000, "ours": '{"a":' * 300 + "1" + "}" * 300}
DEEP_TOML = {"parser": "a = " + "[" * 5_000 + "]" * 5_000, "ours": ".".join("a" * 300) + " = 1"}


@pytest.mark.parametrize("which", DEEP_JSON)
def test_nested_json_is_refused_by_every_reader(tmp_path, which):
    text = DEEP_JSON[which]
    with pytest.raises(ValueError, match="nested deeper than 100 levels"):
        parse_json(text)
    for name in ("meta.json", "run.json", "manifest.json", "ds.json"):
        (tmp_path / name).write_text(text)
    (tmp_path / "a.log").write_text(text)
    for refused in (
        lambda: token_files.load(tmp_path, 8, 257),
        lambda: data_files.training_tokens(str(tmp_path)),
        lambda: deepspeed_json.read_deepspeed_json(tmp_path / "ds.json"),
        lambda: read_run(tmp_path),
        lambda: folders.read_manifest(tmp_path),
        lambda: load.load([tmp_path / "a.log"]),
    ):
        with pytest.raises(UsageError):
            refused()


def test_a_folder_nested_deeper_than_calls_is_walked(tmp_path):
    nested = [tmp_path]
    try:
        for _ in range(1200):
            nested.append(nested[-1] / "a")
            nested[-1].mkdir()
        (nested[-1] / "b.log").touch()
        found = list(below(tmp_path, Path.is_file, ".".__eq__))
        assert found == [(nested[-1] / "b.log", "")]
    finally:  # pytest's own removal calls itself
        (nested[-1] / "b.log").unlink(missing_ok=True)
        for folder in nested[:0:-1]:
            folder.rmdir()


@pytest.mark.parametrize("which", DEEP_TOML)
def test_nested_toml_is_refused(tmp_path, which):
    (tmp_path / "study.toml").write_text(DEEP_TOML[which])
    with pytest.raises(UsageError, match="study.toml is not TOML: nested deeper than 100 levels"):
        study.load_study(tmp_path / "study.toml")


def test_what_is_not_deep_is_read():
    assert parse_json('{"a": [1, {"b": [[2]]}]}') == {"a": [1, {"b": [[2]]}]}
    assert parse_json(b'{"a": "\xc2\xb5"}') == {"a": "µ"}
    assert len(parse_json("[" + "[1]," * 1000 + "[1]]")) == 1001
    assert parse_toml("a.b = [1, [2]]") == {"a": {"b": [1, [2]]}}


@pytest.mark.parametrize(
    "line",
    [
        "calibrate --runs /dev/zero --cluster dgx-a100",
        "audit /dev/zero",
        "report /dev/zero",
        "checkpoints /dev/zero",
        "plots /dev/zero --out /tmp",
    ],
)
def test_a_file_without_end_is_refused(line, capsys):
    command, *flags = line.split()
    assert importlib.import_module(f"analysis.{command}").main(flags) == 2
    said = capsys.readouterr().err
    assert "/dev/zero" in said and said.count("\n") == 1


def test_a_loop_of_links_is_refused(tmp_path, capsys):
    (tmp_path / "loop").symlink_to("loop")
    assert plots.main([str(ROOT / "logs/2-core-cpu"), "--out", str(tmp_path / "loop")]) == 2
    assert "loop" in capsys.readouterr().err


RUNS_FILES = "status.json steps.csv training_metrics.json checkpoints.csv 9.state"


@pytest.mark.parametrize("name", [*RUNS_FILES.split(), "breakdown/rank0.csv"])
def test_no_file_of_a_run_is_waited_for(tmp_path, name):
    """A pipe that nobody writes, where a run's file should be."""
    run = write(tmp_path / "run", facts("study", None))
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    words = f"{Path(name).name}: not a regular file"
    if name == "breakdown/rank0.csv":
        assert words in read_breakdown(run, 1)[1][0]
        return
    calls = {
        "checkpoints.csv": lambda: read_checkpoints(run),
        "9.state": lambda: read_json(run / name),
    }
    with pytest.raises(UsageError, match=words):
        calls.get(name, lambda: read_run(run))()


def test_a_trace_that_inflates_to_gigabytes_is_refused(tmp_path, monkeypatch):
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress(b" " * (3 << 20) + b"{}"))
    monkeypatch.setattr(packed, "MOST", 1 << 20)
    with pytest.raises(UsageError, match="more than 1 MiB"):
        torch_trace.read_trace(tmp_path / "trace.json.gz")


def test_a_pipe_in_place_of_a_file_of_ours_is_not_waited_for(tmp_path):
    for name in ("meta.json", "run.json"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "status.json").write_text("{}")
    assert data_files.stated_by(str(tmp_path), "vocab_size") is None
    assert states.ran_by(tmp_path) is None
    assert "not a regular file" in attempts.why_anew(tmp_path, {"steps": 1})


@pytest.mark.parametrize("target", ["/dev/zero", "pipe"])
def test_the_state_of_a_run_is_known_though_a_log_of_it_has_no_end(target, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("17.out", "17.end"):
        (tmp_path / name).symlink_to(target)
    assert states.tail(tmp_path / "17.out") == "" and states.read_end(tmp_path, "17") is None
