"""The readers agree with values that were computed independently from real logs.

The logs are published beside the repository, not in it; without them these tests say so and skip.
"""

import csv
import re

import pytest

from analysis.logs.readers import read
from analysis.logs.record import Refusal
from analysis.logs.step_time import timed
from analysis.runs.verdict import judge
from tests.conftest import SHARED

TRUTH = SHARED / "logs" / "truth.csv"
TOLERANCE = 0.002

# Files that hold no training step with a time or a rate, and what their refusal must say, or
# their row: a job's output without a step is a run.
STEPLESS = (
    "awslabs+awsome-distributed-training/slurm-esm1nv-train-102.out",
    "deepspeedai+DeepSpeedExamples/fast_io__model_checkpoint__log_9_21_22__gpt2-unfused.txt",
)
REFUSED = {
    "hpcaitech+ColossalAI/vilt_vanilla.txt": "only progress bars",
    "kadamrahul18+GPT2-Optimization/baseline_2026-01-26__nsys_stats_gn-0011.txt": "a profile",
}
VERDICTS = {  # a word of the independent judgement -> ours
    "OOM": "OOM",
    "cancelled": "cancelled",
    "KeyboardInterrupt": "cancelled",
    "time limit": "timeout",
    "launcher error": "no data",
    "traceback": "traceback",
}


needs_logs = pytest.mark.skipif(not TRUTH.exists(), reason=f"no real logs at {TRUTH.parent}")
LINES = TRUTH.read_text().splitlines() if TRUTH.exists() else []
ROWS = [row for row in csv.DictReader(LINES) if row["path"] not in (*REFUSED, *STEPLESS)]
LAYOUT = {"world": "gpus", "tp": "tp", "pp": "pp", "dp": "dp", "mbs": "micro_batch"}
LAYOUT |= {"gbs": "global_batch", "seq": "seq_len", "planned_iters": "planned_steps"}


@needs_logs
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["path"])
def test_what_is_read_agrees(row):
    path = TRUTH.parent / row["path"]
    record = read(path)
    stats = record.step_stats()
    # Where no line carries an iteration number, the lines themselves are counted.
    assert stats["n"] == int(row["n_iters"]) or stats["n"] == int(row["n_iter_lines"])
    for name in ("mean", "median", "min", "max"):
        if row[f"{name}_s"]:
            assert stats[name] == pytest.approx(float(row[f"{name}_s"]), rel=TOLERANCE), name
    for column, field in LAYOUT.items():
        assert not row[column] or getattr(record, field) == int(row[column]), field
    verdicts, line_no = ("complete", "stopped early", "end unknown", "no data"), None
    if row["failed"] == "yes":
        line_no = int(row["fail_line_no"])
        verdicts = [v for word, v in VERDICTS.items() if word in row["fail_kind"]][:1]
    elif re.findall(r"loss\W{1,6}([\w.+-]+)", path.read_text())[-1:] in (["nan"], ["inf"]):
        verdicts = ("diverged",)
    judgement = judge(record, timed(record))
    assert judgement.verdict in verdicts
    assert (record.failure and record.failure.line_no) == line_no
    assert line_no in (None, judgement.line_no)
    if row["tflops_mean"]:
        tflops = float(row["tflops_mean"])
        assert record.steps["tflops"].mean() == pytest.approx(tflops, rel=TOLERANCE)
    if "ranks=" in row["params_printed"]:
        printed = int(row["params_printed"].split("ranks=")[1].split()[0])
        assert record.params == (printed if record.ep in (None, 1) else None)  # 1 / ep of experts


@needs_logs
@pytest.mark.parametrize("path", REFUSED)
def test_a_file_without_steps_is_refused_with_its_reason(path):
    with pytest.raises(Refusal, match=REFUSED[path]):
        read(TRUTH.parent / path)


@needs_logs
@pytest.mark.parametrize("path", STEPLESS)
def test_the_output_of_a_job_without_steps_is_a_row_without_numbers(path):
    record = read(TRUTH.parent / path)
    assert judge(record).verdict == "no data" and not len(record.steps)
    assert "but holds no iteration that could be read" in "; ".join(record.notes)
