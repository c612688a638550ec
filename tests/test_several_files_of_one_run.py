"""The files of one run, which are one row: output and errors, those of its ranks and attempts."""

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
