"""GPU-hours by part: the parts of each job add up to its time, whatever happened in it."""

import subprocess
import time
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from analysis import goodput as command
from analysis.logs.readers import read
from analysis.runs.gpu_hours import PARTS, Span, jobs_of, split, table
from tests.fixture_runs import edit, edit_steps, facts, write

START = 1_750_000_000.0


def step(ended: float, part: str = "useful", step_s: float = 2.0, blocked_s: float = 0.0) -> dict:
    row = {"step_s": step_s, "ended_unix_s": START + ended}
    return row | {"part": part, "blocked_s": blocked_s}


def test_a_job_is_cut_into_parts_that_add_up():
    """10 s of start, steps of 2 s (one of 5), a save of 3 s, a validation of 4 s."""
    rows = [step(12), step(17, step_s=5.0, blocked_s=3.0), step(22), step(28, blocked_s=1.0)]
    job = Span(START, START + 36, went_well=True)
    whole = split(job, rows, 6.0, 2.0)
    assert whole == {
        "starting": 10,
        "useful": 8,
        "slower": 3,
        "saving": 3 + 1,
        "evaluation": 4 + 2,  # 6 s in all: the rest came after the last step
        "ending": 5,
        "repeated": 0,
        "failed": 0,
    }
    killed = split(job._replace(went_well=False), rows, 0.0, 2.0)
    assert (killed["failed"], killed["ending"], killed["evaluation"]) == (8, 0, 4)
    again = [step(12, "repeated"), step(17, "failed", 5.0)]
    parts = split(job._replace(went_well=False), again, 0.0, 2.0)
    assert (parts["repeated"], parts["failed"], parts["useful"]) == (2, 5 + 19, 0)
    assert sum(whole.values()) == sum(parts.values()) == sum(killed.values()) == 36
    for well, part in ((True, "starting"), (False, "failed")):
        assert split(job._replace(went_well=well), [], 0.0, 2.0)[part] == 36


def test_steps_whose_clock_is_behind_the_jobs_end_do_not_add_to_it():
    """Slurm's times are whole seconds, and a node's clock may be ahead."""
    parts = split(Span(START, START + 16, went_well=True), [step(12), step(17), step(19)], 0.0, 2.0)
    assert sum(parts.values()) == 16 and parts["useful"] == 2 + 1


@pytest.fixture
def run(tmp_path):
    """Saved at step 4, killed after 6, went on from 4 and was complete after 10, on four GPUs."""
    folder = write(tmp_path, facts("s", None, gpus=4))
    utc = [datetime.fromtimestamp(START + s, UTC).isoformat() for s in (0, 100, 130)]
    attempts = [{"started_utc": utc[0], "reason": "killed"}]
    edit(folder / "run.json", started_utc=utc[1], attempts=attempts)
    edit(folder / "status.json", time_utc=utc[2])
    ended = [10 + 2 * n for n in range(1, 7)] + [106 + 2 * n for n in range(1, 7)]
    edit_steps(
        folder,
        lambda rows: [
            rows[n - 1] | {"step": n, "step_s": 2.0, "ended_unix_s": START + s}
            for n, s in zip([*range(1, 7), *range(5, 11)], ended, strict=True)
        ],
    )
    return folder


def test_steps_that_were_done_again_are_no_useful_ones(run):
    runs, all_ = table([read(run)], ask=False).content[0].rows
    hours = {part: 900 * runs[part] for part in PARTS}
    assert hours == {
        "starting": pytest.approx(10 + 6),
        "useful": pytest.approx(4 * 2 + 6 * 2),
        "repeated": pytest.approx(2 * 2),
        "ending": pytest.approx(12),
        **dict.fromkeys(("slower", "evaluation", "saving", "failed"), pytest.approx(0)),
    }
    assert (runs["jobs"], 900 * runs["hours"]) == (2, pytest.approx(22 + 30))
    assert all_["hours"] == pytest.approx(sum(runs[part] for part in PARTS))


def test_steps_of_a_run_that_came_to_nothing_are_failed(run):
    for name in ("RUN_COMPLETE.txt", "training_metrics.json"):
        (run / name).unlink(missing_ok=True)
    edit(run / "status.json", state="failed", kind="killed", reason="killed")
    row = table([read(run)], ask=False).content[0].rows[0]
    assert (row["useful"], 900 * row["failed"]) == (0, pytest.approx(10 * 2 + 12))


def test_a_run_without_a_status_held_its_gpus_until_its_last_step_and_not_until_today(run):
    (run / "status.json").unlink()
    row = table([read(run)], ask=False).content[0].rows[0]
    assert 900 * row["hours"] == pytest.approx(22 + 18)


def test_a_run_whose_step_times_contradict_its_clock_is_named_and_not_cut_into_parts(run):
    steps = run / "steps.csv"
    steps.write_text(steps.read_text().replace(",2.0,", ",0.2,"))
    hours, refused = table([read(run)], ask=False)
    assert not hours[0].rows
    assert refused == [f"{run}: steps.csv says 0.2 s a step, its steps end 2 s apart"]


def test_every_job_counts_or_is_named(run):
    """A job that died in its set-up, one that only its attempt tells of, two that left no word."""
    (run / "7.state").write_text('{"elapsed_s": 24}')
    for job in (7, 8, 9, 10, 11):
        (run / f"{job}.out").touch()
    (run / "12.submitted").touch()  # it waits
    of_runs = table([read(run)], ask=False).content[0]
    row = of_runs.rows[0]
    assert (row["jobs"], 900 * row["failed"]) == (3, pytest.approx(24))
    assert of_runs.notes[-1].endswith(": 2 jobs; how long they ran is not known")
    assert "no step counts as slower (steps.csv has 10 of 20 steps" in of_runs.notes[-2]
    (run / "9.state").write_text('{"elapsed_s": 60}')
    (run / "9.job").write_text(f"JobId=9\n   StartTime={datetime.fromtimestamp(START + 300)}\n")
    row = table([read(run)], ask=False).content[0].rows[0]
    assert (row["jobs"], 900 * row["failed"]) == (4, pytest.approx(24 + 60))


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Kolkata"])
@pytest.mark.parametrize("form", ["%s", "%Y-%m-%dT%H:%M:%S", "%H:%M"])
def test_the_hours_are_the_same_in_every_zone_and_format(run, monkeypatch, zone, form):
    """The cluster stands in Berlin: the first job began 5 s before the run, the second at once."""
    for job, start, elapsed_s in ((7, START - 5, 40), (8, START + 100, 31)):
        began = datetime.fromtimestamp(start, ZoneInfo("Europe/Berlin"))
        text = f"{start:.0f}" if form == "%s" else began.strftime(form)
        (run / f"{job}.job").write_text(f"JobId={job}\n   StartTime={text} EndTime=Unknown\n")
        (run / f"{job}.state").write_text(f'{{"elapsed_s": {elapsed_s}}}')
    with monkeypatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        try:
            row = table([read(run)], ask=False).content[0].rows[0]
        finally:
            patch.undo()
            time.tzset()
    if form != "%H:%M":  # of which no day is known: the run's own attempts stand for its jobs
        assert (row["jobs"], 900 * row["hours"]) == (2, pytest.approx(40 + 31))
        assert 900 * row["starting"] == pytest.approx(5 + 10 + 6)
    assert (row["jobs"], 900 * row["useful"]) == (2, pytest.approx(10 * 2))


def test_jobs_of_the_same_number_and_another_name_are_not_the_runs(run):
    (run / "7.out").touch()
    span = Span(START - 5, START + 40, gpus=8)
    (first, *_), known, *_ = jobs_of(read(run), {(7, "another"): [span]})
    assert (first[0].start, known) == (START, 0)
    parts, known, *_ = jobs_of(read(run), {(7, read(run).run): [span]})
    assert [of.start for of, _ in parts] == [START - 5, START + 100] and known == 1
    assert parts[0][1]["starting"] == 15 and sum(parts[0][1].values()) == 45


def test_sacct_says_when_a_job_held_how_many_gpus_of_which_nodes(run, monkeypatch):
    """Two restarts, eight GPUs by --exclusive where the run has four; one that never started."""
    name, asked = read(run).run, []
    lines = [
        f"7|{name}|{START - 60:.0f}|{START:.0f}|{START + 50:.0f}|50|cpu=8,gres/gpu=8|n1,n2",
        f"7|{name}|{START + 50:.0f}|{START + 90:.0f}|{START + 140:.0f}|50|gres/gpu=8|n1,n3",
        f"8|{name}|{START:.0f}|Unknown|Unknown|0||None assigned",
        f"9|another|{START:.0f}|{START:.0f}|{START + 90:.0f}|90||n4",
    ]

    def sacct(command, **_):
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, "\n".join(lines), "")

    monkeypatch.setattr(subprocess, "run", sacct)
    for job in (7, 8, 9):
        (run / f"{job}.submitted").touch()
    runs, nodes = table([read(run)]).content
    row = runs.rows[0]
    assert (row["jobs"], row["hours"], row["queued"]) == (2, 800 / 3600, 100 / 3600)
    assert sum(row[part] for part in PARTS) == pytest.approx(row["hours"])
    assert {of["node"]: of["hours"] for of in nodes.rows} == pytest.approx(
        {"n1": 400 / 3600, "n2": 200 / 3600, "n3": 200 / 3600}
    )
    assert len(asked) == 1 and "2 of 2 jobs" in runs.notes[1]


def test_an_older_run_says_what_it_lacks(run, refused, printed):
    assert "of all GPU-hours: starting 30.8%, useful 38.5%" in printed(command.main, run)
    lines = [line.rpartition(",")[0] for line in (run / "steps.csv").read_text().splitlines()]
    (run / "steps.csv").write_text("\n".join(lines) + "\n")
    assert "steps.csv does not say when a step ended" in refused(command.main, run)
