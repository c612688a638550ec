"""What saving cost, from run folders, logs and published tables; what is not said is `-`."""

import pytest

from analysis.checkpoints import main
from analysis.logs.parsing.checkpoint_lines import scan
from analysis.logs.parsing.logfile import Log
from analysis.logs.readers import read
from analysis.measured.checkpoint_costs import rows, table
from base.errors import UsageError
from parallel.record.reader import read_checkpoints
from tests.fixture_runs import facts, write

OLD = """saving checkpoint at iteration   33241 to /ckpt
[2021-08-08 01:00:00,100] [INFO] [logging.py:68:log_dist] [Rank 0] Saving model checkpoint: /ckpt
  successfully saved checkpoint at iteration   33241 to /ckpt
time (ms) | save-checkpoint: 57514.53
"""
NEW = """saving checkpoint at iteration       1 to ./checkpoints/gpt-2
  successfully saved checkpoint at iteration       1 to ./checkpoints/gpt-2
(min, max) time across ranks (ms):
    save-checkpoint ................................: (21027.08, 21027.18)
(min, max) time across ranks (ms):
    load-checkpoint ................................: (17352.38, 17353.07)
"""
NO_LOAD = """WARNING: could not find the metadata file /ckpt/latest_checkpointed_iteration.txt
    will not load any checkpoints and will start from random
time (ms) | load-checkpoint: 0.46
time (ms) | load-checkpoint: 812.00
"""
BEHIND = """[2025-01-01 00:00:00] saving checkpoint at iteration     100 to /ckpt
  scheduled an async checkpoint save at iteration     100 to /ckpt
    save-checkpoint ................................: (1500.00, 1600.00)
[2025-01-01 00:00:41] successfully saved checkpoint from iteration     100 to /ckpt
"""
TITAN = """\
[rank0]:2025-04-01 00:25:51,616 - root - INFO - Finished loading the checkpoint in 3.20 seconds.
[rank0]:2025-04-01 00:25:54,616 - root - INFO - Saving the checkpoint.
[rank0]:2025-04-01 00:25:59,616 - root - INFO - Finished saving the checkpoint in 5.53 seconds.
[rank1]:2025-04-01 00:25:59,616 - root - INFO - Finished saving the checkpoint in 5.53 seconds.
"""
NANOGPT = "saving checkpoint to out\nstep 10: train loss 4.2\nsaving checkpoint to out\n"
KILLED = """saving checkpoint at iteration 5 to /c
saving checkpoint at iteration 9 to /c
time (ms) | save-checkpoint: 2000.00
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OLD, [("save", 33241, 57.51453, 57.51453)]),
        (NEW, [("save", 1, 21.02718, 21.02718), ("load", None, 17.35307, 17.35307)]),
        (NO_LOAD, [("load", None, 0.812, 0.812)]),
        (BEHIND, [("save", 100, 1.6, 41.0)]),  # it blocks for less than it takes
        (TITAN, [("load", None, 3.2, 3.2), ("save", None, 5.53, 5.53)]),
        (NANOGPT, [("save", None, None, None)] * 2),
        (KILLED, [("save", 5, None, None), ("save", 9, 2.0, 2.0)]),
    ],
)
def test_what_the_lines_of_each_format_say(tmp_path, text, expected):
    path = tmp_path / "train.log"
    path.write_text(text)
    with Log(path) as log:
        assert [(e.kind, e.step, e.blocked_s, e.total_s) for e in scan(log)] == expected


@pytest.mark.parametrize(
    ("log", "expected"),
    [  # read by eye from the lines: 05:49:01 to 05:52:36, and so on
        ("AMD-AGI+Primus/log.txt", ("save", 1, 215.0)),
        ("EleutherAI+gpt-neox/70M_512step_59807359.out", ("save", 2, None)),
        ("EleutherAI+gpt-neox/debug_0_62691629.out", ("load", 1, 71.963)),
        ("facebookresearch+fairseq/examples__wav2vec__first_try.out", ("save", 25, None)),
        ("bigscience-workshop+bigscience/meg_gpt2_perf_n16.out", None),  # loaded nothing
    ],
)
def test_real_logs(shared, log, expected):
    with Log(shared / "logs" / log) as opened:
        found = scan(opened)
    if expected is None:
        assert found == []
        return
    kind, n, seconds = expected
    assert [e.kind for e in found] == [kind] * n
    assert all(e.total_s > 0 for e in found)
    assert seconds is None or found[0].total_s == pytest.approx(seconds, abs=1e-3)


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


def test_unknown_bytes_print_a_dash(tmp_path, capsys):
    log = tmp_path / "megatron.log"
    line = " iteration {}/ 4 | elapsed time per iteration (ms): 1000.0 | global batch size: 4 |\n"
    saved = "saving checkpoint at iteration 2 to /c\ntime (ms) | save-checkpoint: 2000.00\n"
    log.write_text("using world size: 8\n" + line.format(1) + line.format(2) + saved)
    (row,) = rows(read(log))
    assert (row["n"], row["total_s"], row["gb"], row["gb_per_s"]) == (1, 2.0, None, None)
    assert row["share"] == 0.5
    assert main([str(log)]) == 0
    assert " 50.0%" in capsys.readouterr().out
