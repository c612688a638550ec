"""Every scaling table shows predicted beside measured, with one sign and with what it is worth."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from analysis import prune, tflops
from analysis.calibrate import read_runs
from analysis.logs.load import load
from analysis.planner.calibration import load_calibration
from analysis.planner.runs import priced, row_of
from analysis.runs import predictions
from base.errors import UsageError
from tests.fixture_runs import edit_steps

RUNS = Path(__file__).parent.parent / "logs" / "2-core-cpu" / "parity"
HERE = ["--predict", "2-core-cpu"]


def test_in_the_table_of_runs(tmp_path, capsys, printed):
    assert tflops.main([str(RUNS), *HERE, "--format", "json"]) == 0
    for row in json.loads(capsys.readouterr().out):
        wanted = row["predicted_s"] / row["steady_step_s"] - 1
        assert row["predicted_error"] == pytest.approx(wanted)
    assert tflops.main([str(RUNS), "--predict", "nowhere"]) == 2
    folder = shutil.copytree(RUNS / "ddp", tmp_path / "ddp")
    path = folder / "run.json"
    path.write_text(path.read_text().replace('"precision": "fp32"', '"precision": "bf16"'))
    why = "2-core-cpu is measured in fp32 alone, not bf16"
    out = printed(tflops.main, folder, *HERE)
    assert f"predicted s/iter -: {why}: ddp" in out
    assert "predicted, not measured, by 2-core-cpu" in out


def test_fp32_is_predicted_in_tf32_only_where_the_run_asked_for_it():
    """Of an H100: 66.9 TFLOP/s in fp32, 494.7 in TF32, which is off unless a run asks for it."""
    (record,), _ = load([RUNS / "ddp"])
    h100 = load_calibration("dgx-h100")
    seconds = []
    for precision, peak in (("fp32", 66.9e12), ("tf32", 494.7e12)):
        asked = replace(record, precision=precision)
        assert h100.machine_for(row_of(asked, h100.columns)).peak == pytest.approx(peak)
        seconds.append(priced(asked, h100).value["predicted_s"])
    assert seconds[0] > seconds[1]


def test_a_study_of_fp32_is_pruned_by_the_format_that_its_runs_ask_for(tmp_path):
    study = tmp_path / "formats.toml"
    study.write_text(
        'question = "?"\n[defaults]\npreset = "1.7b"\ngpus = 8\nglobal_batch = 8\nzero_stage = 1\n'
        'precision = "fp32"\nengine = "megatron"\n[[run]]\n[[run]]\ntf32 = true\n'
    )
    slow, fast = prune.report(study, "dgx-h100").rows
    assert slow["predicted_s"] > 2 * fast["predicted_s"]


def test_a_calibrated_cpu_says_where_runs_are_of_another_processor():
    (run,), _ = load([RUNS / "ddp"])
    record = replace(run, gpu_type="Intel(R) Xeon(R) Processor @ 2.50GHz")  # of the calibration
    (line,) = predictions.notes_on("2-core-cpu", [0.15, None, -0.05], [record])
    assert line.startswith("predicted, not measured, by 2-core-cpu (")
    assert line.endswith("; here MAPE 10.0%, n = 2")
    _, line = predictions.notes_on("2-core-cpu", [], [replace(record, gpu_type="EPYC 9654")])
    assert "2.50GHz" in line and "EPYC 9654" in line
    assert len(predictions.notes_on("dgx-h100", [], [record])) == 1


def test_a_calibration_takes_each_run_with_its_own_numbers_and_names_the_others(tmp_path):
    for name in ("ddp", "ddp-dp2"):
        shutil.copytree(RUNS / name, tmp_path / name)
    edit_steps(shutil.copytree(RUNS / "ddp", tmp_path / "stopped"), lambda rows: rows[:1])
    place = load_calibration("2-core-cpu").columns
    runs = read_runs([tmp_path], place)
    assert runs.ids == ["ddp (ddp)", "ddp-dp2"] and runs.steps.dp.tolist() == [1, 2]
    assert runs.measured == pytest.approx([0.2083, 0.1186], abs=1e-4)  # as README has them
    (why,) = runs.left_out
    assert why == "ddp (stopped): steps.csv has 1 of 20 steps; missing: 2-20"
    with pytest.raises(UsageError, match="no run with a time and all its settings; ddp: steps"):
        read_runs([tmp_path / "stopped"], place)
