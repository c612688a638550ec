"""The files of one run, which are one row: output and errors, those of its ranks and attempts."""

import json

import pytest

from analysis.logs.load import load
from tests.test_logs_of_attempts import FORMATS, started, steps
from tests.test_logs_of_trainers import header

MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB\n"
LOST = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp\n"
TITAN = FORMATS["torchtitan"]["line"]
RUNS = {  # files -> of each row its file, steps, seconds of a step, facts and its end
    "errors beside the output": (
        {"job.out": started(8) + steps(9), "job.err": MEMORY},
        [("job.out", 9, 1.0, {"gpus": 8}, "oom", "job.err: torch.OutOf")],
    ),
    "errors beside a log": (
        {"job.log": started(8) + steps(9), "job.err": MEMORY, "other.log": started(2) + steps(40)},
        [("job.log", 9, 1.0, {"gpus": 8}, "oom", ""), ("other.log", 40, 1.0, {}, None, "")],
    ),
    "the header is in the errors": (
        {"a_stdout.txt": steps(9, line=FORMATS["HF Trainer"]["line"]), "a_stderr.txt": header()},
        [("a_stdout.txt", 9, None, {"micro_batch": 8, "global_batch": 64}, None, "")],
    ),
    "it died before its first step": (
        {"job.o123": started(8), "job.e123": MEMORY},
        [("job.o123", 0, None, {"gpus": 8}, "oom", "job.e123: torch.OutOf")],
    ),
    "the last rank prints the steps": (
        {"rank0.log": started(4), "rank1.log": MEMORY, "rank2.log": LOST, "rank3.log": steps(9)},
        [("rank3.log", 9, 1.0, {"gpus": 4}, "oom", "rank1.log: torch.OutOf")],
    ),
    "ranks that take other times are of other runs": (
        {"rank0.log": started(4) + steps(9), "rank1.log": started(4) + steps(9, 1500)},
        [("rank0.log", 9, 1.0, {}, None, ""), ("rank1.log", 9, 1.5, {}, None, "")],
    ),
    "ranks of LoRA": (
        {f"lora_rank{n}.log": started(4) + steps(9) for n in (8, 16)},
        [(f"lora_rank{n}.log", 9, 1.0, {}, None, "") for n in (8, 16)],
    ),
    "torchrun's folder": (
        {
            f"run_x7/attempt_{attempt}/{rank}/{name}.log": text
            for attempt, n in ((0, 4), (1, 9))
            for rank in range(2)
            for name, text in {
                "stdout": started(2, "torchtitan") + steps(n, line=TITAN),
                "stderr": MEMORY if (attempt, rank) == (0, 1) else "warning\n",
            }.items()
        },
        [("run_x7", 9, None, {"gpus": 2}, None, "")],
    ),
    "a retry in a file of its own": (
        {"j-7.attempt1.out": started(8) + steps(9) + MEMORY, "j-7.attempt2.out": steps(40)},
        [("j-7.attempt2.out", 40, 1.0, {"gpus": None}, None, "")],
    ),
}


@pytest.mark.parametrize("case", RUNS)
def test_files_of_one_run_are_one_row_and_it_says_so(tmp_path, case):
    files, rows = RUNS[case]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    records, refused = load([tmp_path])
    assert not refused and len(records) == len(rows)
    for record, (name, n, step_s, facts, kind, line) in zip(records, rows, strict=True):
        assert (record.shown, len(record.steps)) == (name, n)
        assert step_s is None or record.steps["step_s"][-1] == step_s
        assert {fact: getattr(record, fact) for fact in facts} == facts
        assert (record.failure and record.failure.kind) == kind
        assert line in (record.failure.line if kind else "")
    notes = [note for record in records for note in record.notes if note.startswith("one run with")]
    assert len(notes) == (len(rows) < len(files) and "of other runs" not in case)
    if "attempt" in "".join(files):
        assert "each in files of its own" in records[0].doubts["attempts"]


def measured(n=40, shift=0, prefix=""):
    """What a run printed: the time and the loss of each step are others."""
    rows = (steps(i, 1000 + i * 7 % 31 + shift, i) for i in range(1, n + 1))
    return started(8) + "".join(
        prefix + row.replace("loss: 9.0", f"loss: {9 - i / 100}") for i, row in enumerate(rows)
    )


def state(n, *, timed=True, done=False, shift=0.0):
    """A trainer_state.json; its seconds of a step are 1.001, 1.002 ..."""
    history, seconds = [], 0.0
    for i in range(1, n + 1):
        seconds += 1 + i / 1000 + shift
        history.append({"step": i, "loss": 3 - i / 50, "epoch": i / 40})
        history[-1] |= {"train_runtime": round(seconds, 4)} if timed else {}
    result = {"train_loss": 3.0, "train_runtime": seconds, "train_samples_per_second": 8.0}
    history += [{"step": n, "epoch": 1.0, **result}] if done else []
    return json.dumps({"global_step": n, "max_steps": 40, "log_history": history})


CHECKPOINTS = {f"out/checkpoint-{n}/trainer_state.json": state(n) for n in (2, 20, 40)}
SAME_STEPS = {  # files -> the rows, as (file, steps)
    "nodes": ({f"node{n}.log": f"# {n}\n{measured()}" for n in range(4)}, [("node0.log", 40)]),
    "workers, one of which is cut": (
        {"worker0.log": measured(30), "worker1.log": measured(40)},
        [("worker1.log", 40)],
    ),
    "tee": (
        {"slurm-7.out": measured(prefix="0: "), "train.log": measured()},
        [("slurm-7.out", 40)],
    ),
    "a folder below": ({"console.log": measured(), "a/b/x.log": measured()}, [("console.log", 40)]),
    "other folders": (
        {"a/x.log": measured(), "b/x.log": measured()},
        [("a/x.log", 40), ("b/x.log", 40)],
    ),
    "repeats with the same losses": (
        {"r1.log": measured(), "r2.log": measured(shift=1)},
        [("r1.log", 40), ("r2.log", 40)],
    ),
    "too few steps to tell": (
        {"a.log": measured(4), "b.log": measured(4) + "\n"},
        [("a.log", 4), ("b.log", 4)],
    ),
    "times that are all alike": (
        {"a.log": started(8) + steps(9), "b.log": started(8) + steps(9) + "\n"},
        [("a.log", 9), ("b.log", 9)],
    ),
    "checkpoints of a whole run": (
        CHECKPOINTS | {"out/trainer_state.json": state(40, done=True)},
        [("trainer_state.json", 40)],
    ),
    "checkpoints alone": (CHECKPOINTS, [("trainer_state.json", 40)]),
    "checkpoints of two runs": (
        CHECKPOINTS | {"b/checkpoint-20/trainer_state.json": state(20, shift=0.01)},
        [("checkpoint-20/trainer_state.json", 20), ("checkpoint-40/trainer_state.json", 40)],
    ),
    "checkpoints without times": (
        {
            "checkpoint-20/trainer_state.json": state(20, timed=False),
            "trainer_state.json": state(40, timed=False, done=True),
        },
        [("trainer_state.json", 40)],
    ),
}


@pytest.mark.parametrize("case", SAME_STEPS)
def test_files_whose_steps_agree_are_one_run_and_a_note_names_the_others(tmp_path, case):
    files, rows = SAME_STEPS[case]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    records, refused = load([tmp_path])
    assert not refused and [(record.shown, len(record.steps)) for record in records] == rows
    notes = [note for record in records for note in record.notes if note.endswith("the same steps")]
    assert len(notes) == (len(rows) < len(files))


def test_a_copy_says_why_its_run_failed(tmp_path):
    (tmp_path / "node0.log").write_text(measured(30))
    (tmp_path / "node1.log").write_text(measured(29) + MEMORY)
    (record,) = load([tmp_path])[0]
    assert (len(record.steps), record.failure.kind) == (30, "oom")
    assert record.failure.line.startswith("node1.log: torch.OutOfMemoryError")
