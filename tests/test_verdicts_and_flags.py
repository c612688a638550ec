"""A run's verdict names its proof, and doubtful numbers say what is doubtful about them."""

import json
import re

import pytest

from analysis import tflops
from analysis.logs.readers import read
from analysis.runs import run_table as library
from analysis.runs import throughput
from analysis.runs.run_options import unheeded
from analysis.runs.verdict import judge
from parallel.record.schema import CHECKPOINT_COLUMNS
from tests.fixture_runs import facts, logged, write
from tests.test_readers import FORMATS

ITERATIONS = {
    "Megatron-LM": " iteration {i}/ 5 | elapsed time per iteration (ms): 9.0 | lm loss: {loss} |\n",
    "nanoGPT": "iter {i}: loss {loss}, time 100.00ms, mfu 22.82%\n",
    "torchtitan": "step: {i}  loss: {loss}  grad_norm: 1.0  memory: 1.0GiB(1%)  tps: 6,922\n",
    "modded-nanogpt": "step:{i}/5 train_loss:{loss} train_time:{i}00ms step_avg:100.00ms\n",
    "HF Trainer": "{{'loss': {loss}, 'grad_norm': 1.0, 'learning_rate': 0.1, 'epoch': {i}.0}}\n",
}


@pytest.mark.parametrize("kind", ITERATIONS)
@pytest.mark.parametrize("bad", ("nan", "inf"))
def test_a_loss_that_ends_as_no_number_is_no_good_run(tmp_path, kind, bad):
    path = tmp_path / "job.log"

    def judged(*losses):
        lines = (ITERATIONS[kind].format(i=i, loss=loss) for i, loss in enumerate(losses, 1))
        path.write_text("".join(lines) + "Training completed\n")
        return judge(read(path))

    name = {"nan": "NaN", "inf": "infinite"}[bad]
    good = judged(9.0, 8.0, 7.0, 6.0, 5.0)
    assert good.verdict != "diverged" and "loss" not in "".join(map(str, good.doubts))
    passed = judged(9.0, 8.0, bad, 6.0, 5.0)
    (flag,) = (flag.text for flag in passed.doubts if flag.kind == "loss")
    assert passed.verdict == good.verdict
    assert flag.startswith(f"the loss is {name} in 1 of 5 iterations") and "end" not in flag
    lost = judged(9.0, 8.0, bad, bad, bad)
    (flag,) = (flag.text for flag in lost.doubts if flag.kind == "loss")
    assert (lost.verdict, lost.line_no, lost.proof.text) == (
        "diverged",
        5,
        f"the last loss is {bad}",
    )
    assert flag.startswith(f"the loss is {name} in 3 of 5") and flag.endswith("to the end")


def test_an_iteration_without_a_loss_is_not_nan(tmp_path):
    path = tmp_path / "job.log"
    line = " iteration {}/ 2 | elapsed time per iteration (ms): 100.0 |{}\n"
    path.write_text(line.format(1, " lm loss: 9.0 |") + line.format(2, ""))
    assert judge(read(path)).verdict == "complete"
    path.write_text(line.format(1, " lm loss: nan |") + line.format(2, ""))  # the last that is said
    assert judge(read(path)).verdict == "diverged"


def test_json_is_one_object_per_run_with_these_keys_and_marks_what_a_name_said(tmp_path, rows_of):
    line = " iteration {}/ 9 | elapsed time per iteration (ms): 1000.0 | lm loss: 2.0E+00 |\n"
    path = tmp_path / "2B-mbs-2-pp4-dp-1-gas-8.out"
    path.write_text("".join(line.format(i) for i in range(1, 10)))
    (run,) = rows_of(tflops.main, path)
    assert list(run) == library.JSON_KEYS
    assert run["origin"]["pp"] == "from name" and run["tp"] is None
    assert any("from name: " in r and "pp 4" in r for r in run["reasons"])
    assert run["reasons"][0] == "line 9: 9 of 9 iterations"


def test_an_end_that_nobody_saw_is_no_traceback(tmp_path, rows_of):
    for name in ("ddp", "ddp-dp2"):
        write(tmp_path, facts("s", None, gpus=1 + (name != "ddp")))
    for file in (tmp_path / "ddp").iterdir():
        file.name == "run.json" or file.unlink()
    (tmp_path / "ddp-dp2" / "RUN_COMPLETE.txt").unlink()
    none, some = rows_of(tflops.main, tmp_path)
    assert (none["verdict"], some["verdict"]) == ("no data", "stopped early")
    assert "no status.json" in none["reasons"]
    assert "RUN_COMPLETE.txt is missing" in some["reasons"][-1]


@pytest.mark.parametrize(
    ("reason", "steps", "verdict"),
    [
        ("exit status 1", 20, "stopped early"),  # it alone proves no traceback
        ("exit status 1: Signal 11 (SIGSEGV) received by PID 3", 20, "traceback"),
        ("exit status 1: srun: error: node2: task 1: Exited with exit code 1", 20, "stopped early"),
        ("no progress for 10 s: rank 3 hangs", 20, "traceback"),
        ("loss is nan since step 3", 20, "diverged"),
        ("gradient norm is nan at step 20, the last", 20, "diverged"),
        # What could not start has none.
        ("exit status 1: parallel.train: no token files at /nowhere", 0, "no data"),
        ("RuntimeError: no (rank 1)", 0, "traceback"),
        ("rank 3 was killed: Signal 9 (SIGKILL) received by PID 7", 0, "traceback"),
    ],
)
@pytest.mark.parametrize("asked", [False, True])  # whether slurm.status has noted Slurm's word
def test_the_reason_of_a_failed_run_is_its_verdict(reason, steps, verdict, asked, tmp_path):
    about = facts("study", None, steps=40) | {"scheduler": {"job_id": "9"}}
    folder = write(tmp_path, about, loss=None if steps else [], fail=reason)
    if asked:
        state = {"job_id": 9, "state": "FAILED", "exit": "1:0", "verdict": "failed", "line": reason}
        (folder / "9.state").write_text(json.dumps(state))
    judgement = judge(read(folder))
    assert judgement.verdict == verdict
    early = verdict == "stopped early"
    assert judgement.proof.text == ("ended at iteration 20 of 40" if early else reason)
    assert any(words.endswith(reason) for words in map(str, judgement.told))


@pytest.mark.parametrize("fail", ["", "RuntimeError: no"])
def test_failed_saves_are_a_note_of_the_run(fail, tmp_path):
    folder = write(tmp_path, facts("study", None), fail=fail)
    rows = "".join(f"save,{n},0.1,0.1,0,1,No space left on device\n" for n in range(1, 7))
    (folder / "checkpoints.csv").write_text(f"{','.join(CHECKPOINT_COLUMNS)}\n{rows}")
    (row,) = library.rows([read(folder)])
    assert "6 of 6 saves failed, the last: No space left on device" in str(row["reasons"])
    (folder / "checkpoints.csv").write_bytes(b"\xff,\n\0")
    assert not any("saves failed" in note for note in read(folder).notes)


def test_a_flag_that_a_log_contradicts_is_said_not_to_be_used(tmp_path, refused):
    run = write(tmp_path / "study", facts("study", None))
    said = refused(tflops.main, run, "--gpus", "16", "--precision", "fp32", status=0)
    assert said == f"analysis.tflops: --gpus 16 is not used for {run.name}: known is 1\n"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--gpus", "0"], "--gpus must be at least 1 and at most "),
        (["--peak-tflops", "nan"], "--peak-tflops must be above 0 and "),
        (["--gpu-type", "H1000"], "unknown GPU 'H1000'; known: "),
        (["--gpu-type", "RTX 3080"], "describe another card by a table of models/gpus.toml"),
        (["--gpu-type", "RTX 3080"], "; for MFU alone give --peak-tflops, too"),
    ],
)
def test_a_fact_that_does_not_exist_is_refused(capsys, flags, why):
    assert tflops.main(["no.log", *flags]) == 2 and why in capsys.readouterr().err


def test_a_card_that_is_not_known_has_the_peak_that_is_given():
    runs = [logged(gpu_type=name, precision="bf16", peak_tflops=100.0) for name in (None, "X1")]
    known = logged(gpu_type="H100 SXM", precision="bf16", peak_tflops=100.0)
    values = [throughput.utilisation(run, 50.0, "megatron")[0] for run in (*runs, known)]
    assert values == [0.5, 0.5, pytest.approx(50 / 989.4)]
    (why,) = throughput.above_peak(runs[1], 101.0, "megatron")
    assert str(why) == "101.0 TFLOP/s is above the peak of 100 (X1)"
    (line,) = unheeded([known], {"peak_tflops": 100.0})
    assert line.startswith("--peak-tflops 100.0 is not used for") and line.endswith("989.4")


# What fills a cell: of the facts that are no part of the model, GPT-2's small one.
GIVEN = "--gpus 8 --tp 1 --pp 1 --dp 8 --micro-batch 1 --global-batch 64 --seq-len 1024"
GIVEN += " --n-layer 4 --hidden 64 --vocab-size 1000 --activation gelu --precision bf16"
FLAGS = dict(zip(GIVEN.split()[::2], GIVEN.split()[1::2], strict=True)) | {"--gpu-type": "H100 SXM"}
UNMEASURED = (throughput.NO_RATE, throughput.OF_EPOCHS, "no step was timed", "TFLOP/s is unknown")
UNMEASURED += ("the log has no peak", "the TFLOP/s are the log's own count, for the model has")
CELLS = "gpus tp pp dp micro_batch steady_step_s tokens_per_s tflops mfu".split()


@pytest.mark.parametrize("kind", FORMATS)
def test_an_empty_cell_names_the_flag_that_fills_it(tmp_path, capsys, kind):
    (tmp_path / "job.log").write_text(FORMATS[kind][0])
    given, asked = {}, {"--gpus": "8"}
    while asked:
        given |= asked
        words = [word for flag in given.items() for word in flag]
        assert tflops.main([str(tmp_path / "job.log"), "--format", "json", *words]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        reasons = row["missing"]
        named = re.findall(r"\((--[a-z-]+)\)", " ".join(reasons.values()))
        assert not set(named) & set(given), "a flag that was given is asked for again"
        asked = {flag: FLAGS[flag] for flag in named}
    for cell in CELLS:
        reason = reasons.get(cell.removeprefix("steady_"), "")
        assert row[cell] is not None or reason.startswith(UNMEASURED)
    assert None not in [row[name] for name in CELLS[:5]]
