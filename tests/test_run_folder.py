"""The run folder: what the one writer writes the one reader reads, whole or not at all."""

import errno
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest

from analysis.logs.readers import run_folder
from base import storage
from base.errors import UsageError
from base.storage import write_json
from parallel import train
from parallel.record import facts as parallel_facts
from parallel.record import lock, process, reader
from parallel.record.ends import Kind, kind_of, kind_of_error
from parallel.record.reader import find_runs, read_run, read_status
from parallel.record.schema import STEP_COLUMNS
from parallel.record.writer import RunFolder
from tests.conftest import ROOT
from tests.fixture_runs import edit_steps, facts, write

FACTS = {"run": "ddp"}
METRICS = {"schema_version": "2.0"}


def row(step: int, **values) -> dict:
    known = {"step_s": 0.1, "loss": 5.123456789012345, "lr": 1e-3, "loss_scale": 1.0}
    return (
        dict.fromkeys(STEP_COLUMNS) | known | {"step": step, "skipped": 0, "tokens": 128} | values
    )


def without_clock(steps: list[dict]) -> list[dict]:
    """The steps but for the times of day when they ended, of which each has one."""
    return [{k: v for k, v in step.items() if k != "ended_unix_s" or not v} for step in steps]


def test_what_is_written_is_read_back_to_the_last_digit_and_its_marker_makes_it_complete(folder):
    folder.log("a line")
    rows = [row(1), row(2, grad_norm=0.1 + 0.2, skipped=1)]
    for values in rows:
        folder.step(values)
    folder.complete(METRICS, "RUN_COMPLETE")
    folder.fail(Kind.RAISED, "teardown", rank=3)  # a failure after completion does not unmake it
    run = read_run(folder.path)
    assert (run.state, run.name, without_clock(run.steps)) == ("complete", "ddp", rows)
    assert run.metrics["schema_version"] == "2.0"
    assert (folder.path / "train.log").read_text() == "a line\nRUN_COMPLETE\n"
    (folder.path / "RUN_COMPLETE.txt").unlink()
    assert read_run(folder.path).state == "failed"


def test_two_nodes_write_one_file_though_their_processes_have_the_same_number(
    monkeypatch, tmp_path
):
    path, publish, nodes = tmp_path / "status.json", storage.publish, ["second"]

    def publish_after_the_other(*names: Path) -> None:
        if nodes:
            storage.write_synced(path, nodes.pop())
        publish(*names)

    monkeypatch.setattr(storage, "publish", publish_after_the_other)
    storage.write_synced(path, "first")
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_a_step_does_not_wait_for_the_row_and_the_line_of_the_one_before(folder):
    """A shared file system may take as long as a step to write them."""
    may_write = threading.Event()
    for file in (folder._steps, folder._log):
        write = file.write
        file.write = lambda text, write=write: may_write.wait(5) and write(text)
    folder.step(row(1))
    folder.log("a line")
    may_write.set()
    folder.fail(Kind.HANG, "no progress", rank=0)  # after which the process ends at once
    assert without_clock(read_run(folder.path).steps) == [row(1)]
    assert (folder.path / "train.log").read_text() == "a line\n"
    folder.close()


@pytest.fixture
def complete(tmp_path) -> Path:
    """A complete run of 20 steps, and its metrics' count of them."""
    folder = write(tmp_path, facts("s", "ddp", engine="ddp"))
    write_json(folder / "training_metrics.json", METRICS | {"epochs": [{"optimizer_steps": 20}]})
    return folder


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    """A run that has begun."""
    folder = RunFolder(tmp_path / "run")
    folder.begin(FACTS)
    return folder


def test_an_attempt_that_goes_on_begins_without_the_hang_of_the_one_before(tmp_path):
    """Removed by rank 0, before any rank's watchdog begins."""
    begun(tmp_path / "run")
    (tmp_path / "run" / "hang").mkdir()
    (tmp_path / "run" / "hang" / "verdict.txt").write_text("no progress for 10 s")
    folder = RunFolder(tmp_path / "run")
    folder.begin(FACTS, go_on=True)
    folder.close()
    assert not (tmp_path / "run" / "hang").exists()


def test_partial_results_stay_and_are_labelled(folder):
    folder.step(row(1))
    folder.fail(Kind.RAISED, "RuntimeError: peer gone (rank 1)", rank=1)
    folder.fail(Kind.SIGNAL, "SIGTERM (rank 0)", rank=0)
    folder.close()
    with (folder.path / "steps.csv").open("a") as steps:
        steps.write("2,0.1,5.")  # a cut last line is left out
    run = read_run(folder.path)
    assert (run.state, run.kind) == ("failed", Kind.RAISED)
    assert run.reason == "RuntimeError: peer gone (rank 1)"
    assert len(run.steps) == 1 and not (folder.path / "RUN_COMPLETE.txt").exists()


def test_an_interrupted_run_has_the_peak_that_its_log_prints(tmp_path):
    run = write(tmp_path, facts("s", "ddp"), fail="cancelled: SIGTERM")
    line = " iteration {} | max memory (GB): {} |\n"
    (run / "train.log").write_text(line.format(1, "1.23") + line.format(2, "1.20"))
    record = run_folder.read(run)
    assert record.peak_bytes == 1_230_000_000
    assert "the peak of memory is rank 0's, as train.log prints it" in record.notes


def test_a_consequence_makes_room_for_what_is_known_later(tmp_path):
    for first, stays in ((Kind.SIGNAL, False), (Kind.UNKNOWN, False), (Kind.HANG, True)):
        folder = RunFolder(tmp_path / first)
        folder.begin(FACTS)
        folder.fail(first, "first", 0)
        folder.fail(Kind.TIME_LIMIT, "time limit", -1, is_cause=True)
        folder.close()
        run = read_run(tmp_path / first)
        assert (run.kind, run.reason) == ((first, "first") if stays else ("time limit",) * 2)


KINDS = tomllib.loads((ROOT / "tests" / "log_ends.toml").read_text())["kinds"]


@pytest.mark.parametrize(
    ("kind", "reason"), [(kind, line) for kind, lines in KINDS.items() for line in lines]
)
def test_a_status_of_before_there_was_a_kind_has_its_reasons(tmp_path, kind, reason):
    begun(tmp_path / "run")
    path = tmp_path / "run" / "status.json"
    for written in ({}, {"kind": "of a later version"}):
        path.write_text(json.dumps({"state": "failed", "reason": reason} | written))
        assert read_status(tmp_path / "run")["kind"] == read_run(tmp_path / "run").kind == kind
    assert kind_of(reason) == kind


def test_an_error_has_a_kind():
    assert kind_of_error(OSError(errno.EDQUOT, "full")) == Kind.DISK
    assert kind_of_error(UsageError("no connection")) == Kind.REFUSED
    assert kind_of_error(MemoryError()) == Kind.MEMORY
    assert kind_of_error(ValueError("data/nccl-connection: a gloo")) == Kind.RAISED
    assert kind_of_error(AssertionError()) == kind_of_error(RuntimeError()) == Kind.RAISED
    assert kind_of_error(ConnectionRefusedError(111, "refused")) == Kind.COMMUNICATION
    assert kind_of_error(type("Broken", (Exception,), {})("it is")) == Kind.RAISED


def begun(path, facts: dict = FACTS):
    """A folder whose writer was stopped, and where it put the attempt before."""
    folder = RunFolder(path)
    aside = folder.begin(facts)
    folder.close()
    return aside


def tree(folder) -> dict:
    """Every file below a folder and what is in it."""
    return {str(p): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def put(folder, *names: str, text: str = "mine") -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize("name", ["mine", "study", "link", "mine/thesis.tex"])
def test_a_folder_that_no_run_wrote_is_refused_and_left_as_it_is(tmp_path, name, capsys):
    """Neither what another tool left, nor a folder of runs, a link to it or a file in it."""
    out, mine = tmp_path / name, tmp_path / "mine"
    put(mine, "thesis.tex", "train.log", "checkpoints/epoch-1.pt")
    put(mine, "run.json", text='{"run": "mine", "model": "gpt", "state": "finished"}')
    put(mine, "status.json", text='{"state": "complete"}')
    (tmp_path / "link").symlink_to(mine)
    begun(tmp_path / "study" / "ddp")
    before = tree(tmp_path)
    with pytest.raises(UsageError):
        RunFolder(out).begin(FACTS)
    assert train.main(["--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert f"{out} is " in said and said.count("\n") == 1
    assert tree(tmp_path) == before


def test_what_somebody_put_into_a_run_folder_stays_where_it_is(tmp_path):
    run = tmp_path / "run"
    begun(run, FACTS | {"repeat": 7})
    put(run, ".steps.csv.77", ".4711.state.77")  # of writers that were killed
    put(run, "notes.txt", "export/model.safetensors", "4711.out", "attempts/9/run.json")
    aside = begun(run)
    assert aside == run / "attempts" / "10" and read_run(aside).facts["repeat"] == 7
    moved = {"run.json", "status.json", "train.log", "steps.csv", ".steps.csv.77"}
    assert {p.name for p in aside.iterdir()} == moved
    stay = ("notes.txt", "export/model.safetensors", "4711.out")
    assert all((run / name).exists() for name in stay)
    assert begun(run) == run / "attempts" / "11" and find_runs([tmp_path]) == [run]


@pytest.mark.parametrize("kept", ["all", "no run.json"])
def test_an_attempt_whose_move_was_killed_is_moved_on_by_the_same_command(
    kept, tmp_path, monkeypatch
):
    """SIGKILL after each of the files: the folder stays a run's, and one attempt stays one."""
    rename = Path.rename
    for files_moved in range(6):
        run, moved = tmp_path / f"killed-after-{files_moved}", []
        begun(run, FACTS | {"repeat": 7})
        put(run, "RUN_COMPLETE.txt", "checkpoints/step-00000001/manifest.json", "slow_ranks.csv")
        if kept == "no run.json":
            (run / "run.json").unlink()
        names = {path.name for path in run.iterdir()} - {".lock"}

        def killed(path, target, moved=moved, files_moved=files_moved):
            if len(moved) == files_moved:
                raise KeyboardInterrupt
            moved.append(path.name)
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            begun(run)
        monkeypatch.setattr(Path, "rename", rename)
        assert len(moved) == files_moved and begun(run) == (aside := run / "attempts" / "1")
        assert {path.name for path in aside.iterdir()} == names
        if kept == "all":
            assert read_run(aside).facts["repeat"] == 7


def test_an_attempt_without_a_status_gets_no_files_of_the_next(tmp_path):
    run = tmp_path / "run"
    begun(run)
    put(run, "attempts/3/steps.csv")
    assert begun(run) == run / "attempts" / "4"
    assert (run / "attempts" / "3" / "steps.csv").read_text() == "mine"


def test_a_run_folder_has_one_writer(folder):
    run = folder.path
    folder.step(row(1))
    folder.behind.wait()
    before = tree(run)
    us = f"is being written by process {os.getpid()} on {platform.node()} since 20"
    for second in (lambda: RunFolder(run).begin(FACTS), lambda: RunFolder(run).set_aside()):
        with pytest.raises(UsageError, match=us):
            second()
    # who started the second one says so
    RunFolder(run).fail(Kind.UNKNOWN, "exit status 2", rank=-1)
    assert tree(run) == before and RunFolder(run).lock.is_held_by_another()
    folder.complete(METRICS, "RUN_COMPLETE")
    assert not RunFolder(run).lock.is_held_by_another()
    assert begun(run) == run / "attempts" / "1"


def test_a_writer_is_found_by_its_process_where_there_are_no_locks(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", no_locks)
    run = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        begun(run)
        start = process.process_start(other.pid)
        status = read_status(run) | {"pid": other.pid, "process_start": start}
        write_json(run / "status.json", status)
        assert read_run(run).state == "running"
        with pytest.raises(UsageError, match=f"is being written by process {other.pid} on"):
            RunFolder(run).begin(FACTS)
        write_json(run / "status.json", status | {"process_start": start - 1})
        assert read_run(run).state == "failed"  # the number was given again
        write_json(run / "status.json", status)
        other.stdin.close()
        while process.process_start(other.pid) is not None:  # until it is a zombie
            os.sched_yield()
        run_ = read_run(run)
        assert (run_.state, run_.reason[:19]) == ("failed", "the process is gone")
        begun(run)


@pytest.mark.parametrize("full", ["of the last lines", "of a new file"])
def test_a_run_whose_end_the_disk_does_not_take_is_not_complete(full, folder, monkeypatch):
    def no_room(path, text, mode=0):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    if full == "of a new file":
        monkeypatch.setattr(storage, "write_synced", no_room)
    else:
        folder._steps.close()
        folder._steps = open("/dev/full", "a", buffering=1)
        folder.step(row(1))
    with pytest.raises(OSError, match="No space left"):
        folder.complete(METRICS, "RUN_COMPLETE")
    run = read_run(folder.path)
    assert run.state == "failed" and "No space left" in run.reason
    assert not (run.path / "RUN_COMPLETE.txt").exists()


class FullAtTimes(io.FileIO):
    """A file on a disk that takes nothing while `is_full`."""

    is_full = False

    def write(self, content):
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(content)


@pytest.mark.parametrize("name", ["steps.csv", "train.log"])
def test_a_line_waits_for_room_on_the_disk_and_the_second_that_finds_none_ends_the_run(
    name, folder
):
    disk = FullAtTimes(folder.path / name, "a")
    stream = io.TextIOWrapper(io.BufferedWriter(disk), line_buffering=True)
    attribute = {"steps.csv": "_steps", "train.log": "_log"}[name]
    getattr(folder, attribute).close()
    setattr(folder, attribute, stream)

    def write(step: int, is_full: bool) -> None:
        disk.is_full = is_full
        folder.step(row(step))
        folder.log(f"line of step {step}")
        folder.behind.wait()

    for step, is_full in enumerate((False, True, False, True, False), start=1):
        write(step, is_full)
    assert [step["step"] for step in read_run(folder.path).steps] == [1, 2, 3, 4, 5]
    assert (folder.path / "train.log").read_text().count("line of step") == 5
    write(6, True)
    with pytest.raises(OSError, match=rf"No space left on device: '.*{name}'") as full:
        write(7, True)
    assert kind_of_error(full.value) == Kind.DISK
    with pytest.raises(OSError, match="No space left"):
        folder.step(row(8))  # on the main thread, which ends the run
    disk.is_full = False
    with pytest.raises(OSError, match="No space left"):
        folder.close()


@pytest.mark.parametrize(
    ("gone", "end", "arguments"),
    [
        ("all", "complete", ({}, "marker")),
        ("train.log", "interrupt", (Kind.SIGNAL, "SIGTERM")),
        ("all", "update", (FACTS,)),
        ("steps.csv", "sync", ()),
    ],
)
def test_a_run_whose_folder_was_deleted_is_not_complete(gone, end, arguments, folder):
    folder.step(row(1))
    if gone == "all":
        shutil.rmtree(folder.path)
        (folder.path / "checkpoints").mkdir(parents=True)  # a save makes it again
    else:
        (folder.path / gone).unlink()
    with pytest.raises(UsageError, match=r"(train.log|steps.csv) was deleted while the run wrote"):
        getattr(folder, end)(*arguments)
    assert not (folder.path / "RUN_COMPLETE.txt").exists()
    folder.close()


def test_only_a_change_of_what_trains_makes_the_commit_dirty(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    put(tmp_path, "base/files.py", "models/gpt.py", "parallel/train.py", "setup.py")
    put(tmp_path, "constraints.txt", "slurm/clusters.toml", "logs/plots/a.png")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    put(tmp_path, "slurm/clusters.toml", "logs/plots/a.png", "models/new.txt", text="changed")
    before = parallel_facts.git(tmp_path)
    assert before["dirty"] is False and len(before["commit"]) == 40
    subprocess.run([*git, "commit", "-qam", "a figure and a cluster"], check=True)
    after = parallel_facts.git(tmp_path)
    assert after["commit"] != before["commit"] and after["code"] == before["code"]
    assert parallel_facts.same_code(before, after)
    put(tmp_path, "models/gpt.py", text="changed")
    assert parallel_facts.git(tmp_path)["dirty"] is True
    subprocess.run([*git, "commit", "-qam", "the model"], check=True)
    assert not parallel_facts.same_code(before, parallel_facts.git(tmp_path))
    assert parallel_facts.same_code({"commit": "a"}, {"commit": "a", "code": "b"})


def test_the_lock_of_another_host_is_waited_for(tmp_path, monkeypatch, capsys):
    """A requeued run may come before the file server has let go of the dead host's lock."""
    elsewhere = {"host": "node9", "pid": 7, "time_utc": "2026-01-01T00:00:00Z"}
    flock = lock._flock
    held = iter([(None, elsewhere), (None, elsewhere)])
    monkeypatch.setattr(lock, "_flock", lambda path: next(held, None) or flock(path))
    monkeypatch.setattr(lock, "LOCK_WAIT_S", 0.2)
    folder = RunFolder(tmp_path / "run")
    folder.begin(FACTS)
    folder.close()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "locked by process 7 on node9: waiting up to 0.2 s" in said
    monkeypatch.setattr(lock, "_flock", lambda path: (None, elsewhere))
    with pytest.raises(UsageError, match="if node9 is dead, delete"):
        RunFolder(tmp_path / "run").begin(FACTS)


def test_what_is_no_number_is_null_in_json(tmp_path):
    write_json(tmp_path / "x.json", {"a": [float("nan"), {"b": float("inf")}]})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": [None, {"b": None}]}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("layout", 5, "layout cannot be 5"),
        ("spec.steps", "20", "spec.steps cannot be '20'"),
        ("layout.dp", 2, "world_size 1 in layout is not tp 1 x cp 1 x dp 2 x pp 1"),
        (
            "layout.micro_batch",
            7,
            "global_batch 16 in layout is not dp 1 x micro_batch 7 x n_micro",
        ),
        ("spec.tp", 2, "tp 2 in spec, 1 in layout"),  # of an older file
        ("run", "\ud800", "run cannot be"),
        ("run", "", "it names no run"),
        ("load", {"cpu_s": float("inf")}, "load.cpu_s cannot be inf"),
        ("attempts", [{"steps": 20}, 5], r"attempts\[1\] cannot be 5"),
        ("attempts", [{"steps": "20"}], r"attempts\[0\].steps cannot be '20'"),
    ],
)
def test_a_fact_of_another_kind_is_refused_with_its_file_and_key(complete, key, value, said):
    path = complete / "run.json"
    content = part = json.loads(path.read_text())
    *keys, last = key.split(".")
    for name in keys:
        part = part[name]
    part[last] = value
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=rf"run.json is damaged: {said}"):
        read_run(complete)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("status.json", "[]", r"status.json is damaged: it holds \[\], no object"),
        ("status.json", '{"state": 5}', "status.json is damaged: state cannot be 5"),
        ("status.json", '{"state": "gone"}', "status.json is damaged: state cannot be 'gone'"),
        ("run.json", "{", "run.json is damaged"),
        ("training_metrics.json", '{"hardware": 5}', "damaged: hardware cannot be 5"),
        ("steps.csv", "loss\n1\n", "steps.csv:1: expected columns"),
        ("steps.csv", "\udcff", "steps.csv is damaged: 'utf-8' codec"),
        ("steps.csv", "9" * 200_000, "steps.csv is damaged: field larger"),
        ("steps.csv", ("\n1,", "\nx,"), "steps.csv:2: invalid literal"),
        ("steps.csv", ("\n1,", "\n-1,"), "steps.csv:2: -1 is out of range"),
        ("steps.csv", ("\n1,", "\n,"), "steps.csv: step None cannot have taken"),
        *(
            ("steps.csv", ("\n1,5.0,", f"\n1,{s},"), "1 cannot have taken")
            for s in ("-1", "0", "nan", "inf")
        ),
    ],
)
def test_a_damaged_file_is_refused_with_its_name_and_line(complete, name, content, said):
    path = complete / name
    text = content if isinstance(content, str) else path.read_text().replace(*content, 1)
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match=said):
        read_run(complete)


def keep(run: Path, steps) -> None:
    """Leave these steps' rows alone in steps.csv."""
    edit_steps(run, lambda rows: [rows[n - 1] for n in steps])


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (range(1, 21), ""),
        (range(1, 12), "steps.csv has 11 of 20 steps; missing: 12-20"),
        (range(4, 21), "steps.csv has 17 of 20 steps; missing: 1-3"),
        ([*range(1, 7), *range(8, 15), *range(17, 21)], "has 17 of 20 steps; missing: 7, 15-16"),
        ([], "steps.csv has 0 of 20 steps; missing: 1-20"),
    ],
)
def test_a_complete_run_says_which_rows_are_missing(complete, kept, said):
    keep(complete, kept)
    missing = read_run(complete).missing
    assert missing.endswith(said) and bool(missing) == bool(said)


def test_a_run_that_was_loaded_at_a_later_step_misses_nothing(complete):
    keep(complete, range(11, 21))
    write_json(complete / "training_metrics.json", METRICS | {"epochs": [{"optimizer_steps": 10}]})
    assert read_run(complete).missing == ""
    known = json.loads((complete / "run.json").read_text())
    known["spec"]["steps"] = 2**50  # counted, not listed
    write_json(complete / "run.json", known)
    assert read_run(complete).missing.endswith(f"missing: 21-{2**50}")


def test_a_folder_that_is_missing_or_cannot_be_read_is_named(tmp_path, monkeypatch, capsys):
    for name, why in (("nowhere", "nowhere: no such folder"), ("", "no run folder here")):
        with pytest.raises(UsageError, match=why):
            find_runs([tmp_path / name])
    met = [(tmp_path / "ddp", ""), (tmp_path / "shut", "Permission denied")]
    (tmp_path / "ddp").mkdir()
    monkeypatch.setattr(reader, "below", lambda *_: met)
    assert find_runs([tmp_path]) == [tmp_path / "ddp"]
    assert capsys.readouterr().err == f"{tmp_path / 'shut'}: Permission denied: left out\n"
