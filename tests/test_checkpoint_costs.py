"""What saving cost, from run folders; what is not said is `-`."""

import csv
import io

import pytest

from analysis import goodput
from analysis.checkpoints import main
from analysis.logs.readers import read
from analysis.runs.checkpoint_costs import rows, table
from base.errors import UsageError
from parallel.record.reader import read_checkpoints
from tests.fixture_runs import facts, write


@pytest.fixture
def run(tmp_path):
    """A run folder of 20 steps, 20 s in all, that saved twice and loaded once."""
    folder = write(tmp_path, facts("s", None, gpus=4), step_s=1 / 1.45)
    (folder / "checkpoints.csv").write_text(
        "event,step,blocked_s,total_s,bytes,ranks,problem\n"
        "save,5,1,4,8000000000,4,\nsave,10,3,4,8000000000,4,\nload,0,5,5,8000000000,4,\n"
    )
    return folder


def test_a_run_folders_rates_and_share(run):
    save, load = rows(read(run))
    assert (save["n"], save["ranks"], save["blocked_s"], save["total_s"]) == (2, 4, 2.0, 4.0)
    assert (save["gb"], save["gb_per_s"], save["gb_per_s_per_rank"]) == (8.0, 2.0, 0.5)
    assert save["share"] == pytest.approx(4 / (20 + 9), rel=1e-3)  # all waiting: 9 s
    assert load["gb_per_s"] == 1.6


def test_failed_saves_are_counted_apart_and_their_reason_is_shown(run):
    with (run / "checkpoints.csv").open("a") as file:
        file.write("save,15,6.0,6.0,0,4,No space left on device\n")
    shown = table([read(run)]).table
    save = shown.rows[0]
    assert (save["n"], save["failed"], save["blocked_s"]) == (2, 1, 2.0)
    # the training waited for it all the same
    assert save["share"] == pytest.approx(10 / (20 + 15), rel=1e-3)
    assert f"{run.name}: save of step 15: No space left on device" in shown.notes


def test_a_row_cut_by_a_kill_is_left_out_and_a_damaged_one_is_named(run):
    path = run / "checkpoints.csv"
    whole = path.read_text()
    path.write_text(whole + "save,15,\n")
    assert [row["step"] for row in read_checkpoints(run)] == [5, 10, 0]
    for harm, why in (
        (whole.replace("save,5,1", "save,5,one"), "checkpoints.csv:2: .*'one'"),
        (whole.replace("save,5,1", "save,5,inf"), "checkpoints.csv:2: inf is out of range"),
        ("event,step\n", "checkpoints.csv:1: expected columns"),
    ):
        path.write_text(harm)
        with pytest.raises(UsageError, match=why):
            read_checkpoints(run)


def test_a_load_of_unknown_bytes_prints_a_dash_and_a_log_is_named(run, tmp_path, capsys):
    (run / "checkpoints.csv").write_text(
        "event,step,blocked_s,total_s,bytes,ranks,problem\nload,5,2,2,,4,\n"
    )
    log = tmp_path / "megatron.log"
    line = " iteration {}/ 4 | elapsed time per iteration (ms): 1000.0 | global batch size: 4 |\n"
    log.write_text(line.format(1) + "time (ms) | save-checkpoint: 2000.00\n")
    assert main([str(run), str(log), "--format", "csv"]) == 0
    out, said = capsys.readouterr()
    assert [row["gb"] for row in csv.DictReader(io.StringIO(out))] == [""]
    assert said.endswith(" in megatron.log\n")


@pytest.mark.parametrize("command", [main, goodput.main])
def test_flags_that_would_change_nothing_are_refused(run, command, capsys):
    with pytest.raises(SystemExit, match="2"):
        command([str(run), "--gpus", "8"])
    assert "unrecognized arguments: --gpus 8" in capsys.readouterr().err
