"""Folders of checkpoints: what is one, what is whole, kept, loaded and gone on from. No torch."""

import json
import os
import zlib

import pytest

from base.errors import UsageError
from base.storage import publish
from parallel.checkpoint import attempts, folders
from parallel.checkpoint.folders import FORMAT, MANIFEST, Damaged
from parallel.config.changes import CIRCUMSTANCES
from parallel.config.resolve import resolve
from parallel.config.run_spec import settings_of
from parallel.record.writer import RunFolder
from tests.fixture_runs import facts, write


@pytest.fixture
def save(tmp_path):
    return tmp_path / "save"


MODEL = {"n_layer": 1, "hidden": 8, "n_head": 2}


def fill(folder, step, content=b"0123456789", **about):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rank").write_bytes(content)
    entry = {"path": "rank", "bytes": len(content), "crc32": zlib.crc32(content)}
    manifest = {"format": FORMAT, "step": step, "model": MODEL, "files": [entry]}
    folders.write_manifest(folder, manifest | about)
    return folder


def some(save, *steps):
    for step in steps:
        fill(save / folders.name_of(step), step)


def test_a_checkpoints_name_is_its_step_in_eight_digits_or_more(save):
    assert [folders.name_of(step) for step in (12, 10**9)] == ["step-00000012", "step-1000000000"]
    assert folders.steps_in(save) == []
    some(save, 30, 4, 10**9)
    empty = "step-00000012"  # somebody's deletion was stopped: no writer of ours leaves it
    for name in (empty, "step-12", f"{empty}.partial", f".{empty}", "weights-00000012"):
        (save / name).mkdir()
    assert folders.steps_in(save) == [4, 30, 10**9]


def test_a_manifest_is_as_it_was_written_or_damaged(save):
    folder = fill(save / folders.name_of(3), 3)
    assert folders.read_manifest(folder)["step"] == 3 and folders.verify(folder)["step"] == 3
    path, text = folder / MANIFEST, (folder / MANIFEST).read_text()

    def assert_damaged(words):
        with pytest.raises(Damaged, match=words):
            folders.read_manifest(folder)

    for harm, words in (
        (text.replace("rank", "rink"), "its bytes have changed since they were written"),
        (text[:-9], "is damaged: "),
        (text.replace(FORMAT, "gpt-checkpoint-9"), "describes no checkpoint of ours"),
    ):
        path.write_text(harm)
        assert_damaged(words)
    path.unlink()
    assert_damaged(f"{MANIFEST}: No such file")
    for about, words in (
        ({"model": MODEL | {"n_layer": 0}}, "that this version does not know: n_layer must be"),
        ({"model": MODEL | {"of_the_future": 1}}, "does not know: .*of_the_future"),
    ):
        fill(folder, 3, **about)
        assert_damaged(words)
    with pytest.raises(Damaged, match="is of step 4, its folder of step 3"):
        folders.read_manifest(fill(folder, 4))


def test_the_first_bad_file_is_named(save):
    folder = fill(save / folders.name_of(3), 3)
    (good,) = folders.read_manifest(folder)["files"]
    ticks = []
    assert folders.damage(folder, [good, good], lambda: ticks.append(1)) == "" and len(ticks) == 2
    assert folders.damage(folder, []) == ""
    for change, words in (
        ({"bytes": 11}, "it has 10 bytes, 11 were written"),
        ({"crc32": 1}, "its bytes have changed since they were written"),
        ({"path": "gone"}, "gone: No such file"),
    ):
        assert words in folders.damage(folder, [good, good | change, good])
    (folder / "rank").write_bytes(b"0123456780")
    with pytest.raises(Damaged, match="its bytes have changed"):
        folders.verify(folder)


def test_a_checkpoint_is_hidden_until_it_is_whole(save):
    aside, folder = folders.aside_of(save, 7), save / folders.name_of(7)
    fill(aside, 7)
    assert folders.steps_in(save) == []
    publish(aside, folder)
    assert folders.verify(folder)["step"] == 7
    (save / ".step-00000007.old").mkdir()  # of an attempt that was killed here
    publish(fill(aside, 7, b"again"), folder)
    assert (folder / "rank").read_bytes() == b"again"
    assert [path.name for path in save.iterdir()] == ["step-00000007"]


def test_what_a_killed_writer_left_is_removed_and_what_somebody_else_left_stays(save):
    some(save, 1)
    fill(folders.aside_of(save, 2), 2)
    (save / ".step-00000009.old").mkdir()
    links = (".step-00000003.partial", ".step-00000004.old")
    theirs = {".keep", ".weights-old", ".step-1", ".latest.bak", ".manifest.json.old", *links}
    for name in theirs:
        place = (save.parent if name in links else save) / name
        place.mkdir()
        (place / "mine").touch()
        if name in links:
            (save / name).symlink_to(place)
    folders.tidy(save)
    assert {p.name for p in save.iterdir()} == {"step-00000001", *theirs}
    assert all((save / name / "mine").exists() for name in theirs)


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "left"),
    [(2, 0, [60, 70]), (1, 20, [20, 40, 60, 70]), (0, 20, [10, 20, 30, 40, 50, 60, 70])],
)
def test_the_newest_and_every_nth_are_kept(save, keep_last, keep_every, left):
    some(save, *range(10, 80, 10))
    gone = folders.retain(save, keep_last, keep_every)
    assert folders.steps_in(save) == left
    assert gone == sorted(set(range(10, 80, 10)) - set(left))
    assert not list(save.glob(".*"))


def test_load_means_a_checkpoint_or_the_newest(save):
    run = write(save, facts("s", None))
    some(save, 10, 20, 30)
    some(run / "checkpoints", 5)

    def steps(path):
        return [folders.step_of(folder) for folder in folders.candidates(path)]

    assert steps(save) == [30, 20, 10]
    assert steps(save / folders.name_of(20)) == [20]
    assert folders.candidates(run) == [run / "checkpoints" / "step-00000005"]
    weights = save / "weights-00000010"
    weights.mkdir()
    (weights / "config.json").touch()
    assert folders.candidates(weights) == [weights]
    for nothing in (save / folders.name_of(25), save.parent, save.parent / "none", save / "x"):
        with pytest.raises(UsageError, match="no checkpoint at"):
            folders.candidates(nothing)


def test_a_run_goes_on_only_from_its_own_stopped_attempt(save):
    about = facts("s", None, save_interval=5)
    run = write(save, about, fail="stopped")
    some(run / "checkpoints", 10)
    settings = settings_of(about)
    assert settings.keys() >= CIRCUMSTANCES

    def why(**changes):
        return attempts.why_anew(run, settings | changes)

    # Circumstances, and more steps; and not fewer than its newest checkpoint has.
    for changes in ({}, {"log_interval": 7, "steps": 40, "keep_last": 5}, {"steps": 10}):
        assert why(**changes) is None
    assert why(lr=1.0) == f"lr changed from {settings['lr']} to 1.0"
    both = why(lr=1.0, beta1=0.5)
    assert both.startswith("beta1 changed from ") and " and lr changed from " in both
    assert why(resume=False) == "--no-resume was given"
    assert why(save_interval=0).startswith("without save_interval")
    assert why(load="/x") == "the earlier one began at step 0 and this one is to load /x"
    assert "checkpoint, of step 10, is beyond the steps asked for, 9" in why(steps=9)
    assert attempts.why_anew(save / "none", settings) == ""
    path = run / "run.json"
    text = json.loads(path.read_text())
    text["spec"]["load"] = "x"
    path.write_text(json.dumps(text))
    assert why(load=os.path.abspath("x")) is None and why(load="x") is None and why() is None
    assert why(load="/y") is not None
    path.write_text("[")
    assert why().startswith(f"the earlier one cannot be read ({path} is damaged: ")
    path.unlink()
    assert why() == f"the earlier one cannot be read ({path}: No such file or directory)"


def test_an_empty_folder_of_a_later_step_keeps_no_run_from_going_on(save, capsys):
    about = facts("s", None, save_interval=2, steps=7)
    run = write(save, about, fail="stopped")
    spec = resolve(("test", {k: v for k, v in settings_of(about).items() if v is not None}))
    fill(
        run / "checkpoints" / "step-00000006",
        6,
        run=about["run"],
        spec=about["spec"],
        layout=about["layout"],
    )
    (empty := run / "checkpoints" / "step-00000008").mkdir()
    folder = RunFolder(run)
    assert attempts.begin(spec, about | {"profiler": None}, folder) == run / "checkpoints"
    folder.close()
    assert folders.candidates(run) == [run / "checkpoints" / "step-00000006"]
    assert capsys.readouterr().out == f"{empty} is empty, and no checkpoint: it is removed\n"
    assert not empty.exists()


def test_a_complete_run_goes_on_only_for_more_steps(save):
    about = facts("s", None, save_interval=5)
    run = write(save, about)
    some(run / "checkpoints", 20)
    settings = settings_of(about)
    complete = "the earlier one is complete"
    assert attempts.why_anew(run, settings) == complete
    why = attempts.why_anew(run, settings | {"log_interval": 9})
    assert why == f"{complete} and log_interval changed from {settings['log_interval']} to 9"
    assert attempts.why_anew(run, settings | {"steps": 21}) is None
    (run / "RUN_COMPLETE.txt").unlink()
    assert attempts.why_anew(run, settings) is None  # the marker was to be written last


def test_another_models_checkpoint_is_refused_before_there_is_a_folder(save):
    settings = {k: v for k, v in settings_of(facts("s", None)).items() if v is not None}
    spec = resolve(("test", settings | {"load": str(save)}))
    model = spec.model.as_dict() | {"n_layer": 3}
    fill(save / "step-00000005", 5, model=model, implementation="gpt")
    with pytest.raises(UsageError, match="step-00000005 holds another model: n_layer 3 not 4"):
        attempts.begin(spec, {"run": "two"}, RunFolder(save.parent / "two"))
    assert not (save.parent / "two").exists()


def test_a_run_goes_on_from_its_own_state_alone_and_keeps_its_profiler(save):
    about = facts("s", None, save_interval=5) | {"profiler": {"tool": "nsys"}}
    run = write(save, about, fail="stopped")
    ours = settings_of(about)
    spec = resolve(("test", {k: v for k, v in ours.items() if v is not None}))
    newest, before = run / "checkpoints" / "step-00000010", (run / "run.json").read_text()
    for name, theirs, why in (
        (about["run"], ours | {"lr": 1.0, "log_interval": 9}, f"lr 1.0 not {ours['lr']}"),
        ("other", ours, f"run other not {about['run']}"),
    ):
        fill(newest, 10, run=name, spec=theirs)
        with pytest.raises(UsageError, match=rf"step-00000010 is another run's \({why}\): take"):
            attempts.begin(spec, about, RunFolder(run))
        assert (run / "run.json").read_text() == before
    fill(newest, 10, run=about["run"], spec=ours | {"log_interval": 9, "steps": 15})
    folder = RunFolder(run)
    assert attempts.begin(spec, about | {"profiler": None}, folder) == run / "checkpoints"
    folder.close()
    now = json.loads((run / "run.json").read_text())
    assert now["profiler"] == {"tool": "nsys"} and now["attempts"][0]["steps"] == spec.steps
