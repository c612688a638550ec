"""MLPerf results are read with their unit, evaluations left out, and become scaling tables."""

import csv
import re
import shutil
from pathlib import Path

import pytest

from analysis import scaling, tflops
from analysis.logs.load import load
from analysis.logs.readers import read
from analysis.logs.step_time import timed
from analysis.runs import run_table
from analysis.runs.verdict import judge
from tests.tools.mlperf_tree import describe, line, result, write

LORA = {"step_key": None, "block_steps": 48, "blocks": 6, "tokens": False}
ONE_NODE = LORA | {"nodes": 1, "step_s": 4.0, "batch": 8}
TEXT = result()


def test_evaluations_are_left_out_of_the_time_and_told(tmp_path):
    text = result("llama2_70b_lora", **ONE_NODE, n_micro=4, eval_s=40.0)
    record = read(write(tmp_path, text))
    assert record.interval == 48 and len(record.steps) == 6
    assert timed(record).step_s == pytest.approx(4.0, rel=1e-3)
    wall_s = record.totals["wall_s"]
    assert wall_s == pytest.approx(6 * (48 * 4 + 16 * 0.004 + 40.5))
    assert record.submission.eval_share * wall_s == pytest.approx(6 * 40.5)
    unmarked = read(write(tmp_path, re.sub(r'.*"eval_(start|stop)".*\n', "", text)))
    assert unmarked.submission.eval_share is None
    assert "evaluations are not marked: the times hold them" in unmarked.notes


@pytest.mark.parametrize(
    "key", ("train_step_timing in s", "step_time_s", "iteration_time_ms", "time_per_step", None)
)
def test_a_step_is_read_under_any_name_of_its_time_but_not_an_evaluation_or_an_epoch(tmp_path, key):
    others = {"reduced_train_loss": 2.5, "validation_step_time": 9.0, "eval_time": 3.0}
    text = result(step_key=key or "train_epoch_timing", per_step=others)
    record = read(write(tmp_path, text))
    time = timed(record)
    if key:
        assert record.steps["iteration"].tolist() == list(range(1, 289))
        assert judge(record, time).verdict == "complete" and record.submission.samples == 288 * 2048
    assert record.interval == (1 if key else 12) and time.step_s == pytest.approx(11.0, rel=1e-3)


def test_counts_inside_of_one_block_are_no_entries(tmp_path):
    marks = ((0, "run_start", {}), (0, "block_start", {}), (2e5, "block_stop", {}))
    lines = [line(1.7e12 + ms, key, **about) for ms, key, about in marks]
    for i in range(1, 9):
        lines.insert(-1, line(1.7e12 + 2e4 * i, "eval_accuracy", 0.5, epoch_num=150_000 * i))
    lines.append(line(1.7e12 + 2e5, "run_stop", status="success"))
    text = line(1.7e12, "global_batch_size", 768) + "".join(lines)
    record = read(write(tmp_path, text, benchmark="bert"))
    (row,) = run_table.rows([record])
    assert len(record.steps) == 0 and (row["verdict"], row["step_s"]) == ("complete", None)
    assert row["notes"] == "no step is timed: the times are of the whole run"


@pytest.mark.parametrize("batch", ("global_batch_size", "no batch: the lines' clock decides"))
@pytest.mark.parametrize(
    ("factor", "words", "step_s"),
    [(1, "", 11.0), (1e3, "read as ms", 11.0), (1 / 3600, "neither is a result", None)],
)
def test_step_times_in_another_unit_never_look_complete(tmp_path, batch, factor, words, step_s):
    text = TEXT.replace("global_batch_size", batch)
    printed = re.compile(r'("train_step_time": )([\d.]+)')
    text = printed.sub(lambda match: f"{match[1]}{float(match[2]) * factor}", text)
    record = read(write(tmp_path, text))
    time = timed(record)
    assert words in " ".join(record.notes)
    assert (time and time.step_s) == (step_s and pytest.approx(step_s, rel=2e-3))


def test_what_a_block_will_train_is_not_counted_at_its_start(tmp_path):
    """Round 5.1: a first block of 240 steps states its samples, the next one only its own."""
    now, samples = 1.7e12, 0
    lines = [line(now, "global_batch_size", 1280), line(now, "run_start")]
    for block in (240, 15, 15):
        lines.append(line(now, "block_start", samples_count=1280 * block))
        for _ in range(block):
            now, samples = now + 2230, samples + 1280
            stats = {"train_step_time": 2.23}
            lines.append(line(now, "tracked_stats", stats, samples_count=samples))
        lines.append(line(now, "block_stop", samples_count=1280 * block))
    lines.append(line(now, "run_stop", status="success", samples_count=samples))
    record = read(write(tmp_path, "".join(lines)))
    assert len(record.steps) == 270 and timed(record).step_s == pytest.approx(2.23)


@pytest.mark.parametrize("later_s", (3600, -3600))
def test_another_run_in_the_file_is_said_in_every_table(tmp_path, later_s):
    record = read(write(tmp_path, TEXT))
    moved = re.sub(r'("time_ms": )(\d+)', lambda m: f"{m[1]}{int(m[2]) + 1000 * later_s}", TEXT)
    both = read(write(tmp_path, TEXT + moved))
    assert both.doubts["attempts"].endswith("on: the first is read")
    assert timed(both) == timed(record) and "attempts" not in record.doubts


TWO = ["config_DGXH200_64x8x128xtp4pp1cp2.sh", "config_DGXH200_64x8x128xtp2pp1cp4.sh"]
ONE = "config_DGXH100_64x8x192x4x8_mbs1.sh"
UNKNOWN = (None, None, None, None)


@pytest.mark.parametrize(
    ("names", "benchmark", "batch", "layout", "note"),
    [
        ([ONE, "config_DGXH100_96x8x128x4x8_mbs1.sh"], "gpt3", 2048, (4, 8, 16, 1), ONE),
        # 8 x 8 x 2048 is not 512 x 128
        (["config_DGXH100_64x8x192x8x8_mbs1.sh"], "gpt3", 2048, UNKNOWN, ""),
        (TWO, "gpt3", 8192, UNKNOWN, "the layout is not known: these configurations fit"),
        # some submitters write cp as the fifth number
        (["config_OCI-H100_64x8x1x4x2.sh"], "llama2_70b_lora", 8192, UNKNOWN, ""),
    ],
)
def test_the_layout_comes_from_the_only_configuration_that_fits_the_log(
    tmp_path, names, benchmark, batch, layout, note
):
    describe(tmp_path, "made_n64", 64)
    folder = tmp_path / "Made" / "benchmarks" / benchmark / "implementations" / "nemo"
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).touch()
    write(tmp_path, result(benchmark, n_micro=128, batch=batch), benchmark=benchmark)
    ((record,), _) = load([tmp_path])
    assert (record.tp, record.pp, record.dp, record.micro_batch) == layout
    assert record.gpus == 512 and note in " ".join(record.notes)


@pytest.mark.parametrize(
    ("platform", "gpus"),
    [
        ("64xNVIDIA DGX H100", 512),
        ("2xXE9680x8H100-SXM-80GB", 16),
        ("gaudi-256", 256),
        ("tpu-v5l-4096", 4096),
        ("64xND_H200_v5", None),
        ("8xH200-SXM-141GB", None),  # 8 GPUs, or 8 nodes
        ("16xDGX GB200", None),  # 4 cards a tray, 72 a rack
    ],
)
def test_gpus_are_counted_from_the_platform_where_it_says_them(tmp_path, platform, gpus):
    path = tmp_path / "result_0.txt"
    path.write_text(TEXT.replace("64xMade DGX H100", platform))
    assert read(path).gpus == gpus


@pytest.mark.parametrize(
    "name", ("Made+Other/results/made_n8/gpt3/seed1/result_2.txt", "Made+Other__made_n8__gpt3__")
)
def test_the_system_and_its_round_are_told_by_the_path_at_any_depth(tmp_path, name):
    path = tmp_path / "training_results_v4.1" / "closed" / name.replace("gpt3__", "gpt3__result_2")
    path.parent.mkdir(parents=True)
    path.write_text(TEXT)
    assert read(path).run == "v4.1 Made+Other made_n8 gpt3 2"


@pytest.fixture
def tree(tmp_path) -> Path:
    """Two sizes of one batch and one size of twice the batch, three repeats each."""
    root = tmp_path / "training_results_v4.1"
    for nodes, step_s, batch in ((64, 11.0, 2048), (512, 1.6, 2048), (128, 11.2, 4096)):
        describe(root, f"made_n{nodes}", nodes)
        for n in range(3):
            how = {"nodes": nodes, "step_s": step_s * (1 + 0.01 * n), "batch": batch}
            write(root, result(shift_ms=1e7 * n, **how), f"made_n{nodes}", n)
    (root / "Made" / "run.log").write_text("no result\n")
    return tmp_path


def test_a_tree_of_results_gives_strong_and_weak_tables(tree, printed):
    every, strong, weak = printed(scaling.main, tree).split("\n\n")
    assert every.count("  gpt3  ") == 3 and "1 files that are no MLPerf results" in every
    series = "gpt3, Made, H100 SXM, v4.1, closed, sequences of 2048"
    assert strong.startswith(f"strong scaling: {series}; global batch 2048\n")
    assert re.search(r"made_n512 gpt3 +4096 +3 +1\.616 +2\.0% +6\.8[78] +\S+; \S+ +0\.86", strong)
    assert weak.startswith(f"weak scaling: {series}; 4 sequences a GPU\n")
    assert re.search(r"made_n128 gpt3 +1024 +3 +11\.31\d* +2\.0% +1\.96 +\S+; \S+ +0\.98", weak)


def test_only_timed_runs_of_one_batch_are_repeats_and_each_counts_once(tree, refused, printed):
    made = tree / "training_results_v4.1"
    results = made / "Made" / "results"
    shutil.copytree(results / "made_n512", results / "made_n512-POWER")
    describe(made, "made_n512-POWER", 512)
    text = (results / "made_n64" / "gpt3" / "result_0.txt").read_text()
    renamed = text.replace("64xMade DGX H100", "64xAnother DGX H100")  # the same measurements
    (results / "made_n64" / "gpt3" / "result_5.txt").write_text(renamed)
    for n, status, batch in ((3, "aborted", 2048), (4, "success", 4096)):
        write(made, result(step_s=9.0, batch=batch, status=status, shift_ms=9e7 * n), n=n)
    shown = printed(scaling.main, tree, "--baseline", "made_n512")
    assert "against v4.1 Made made_n512 gpt3 (4096 GPUs)" in shown
    assert "left out: v4.1 Made made_n64 gpt3 3: stopped early" in shown
    assert re.search(r"made_n64 +gpt3 +512 +2048 +3 ", shown)
    assert re.search(r"made_n64 +gpt3 +512 +4096 +1 ", shown)
    assert not re.search(r"made_n512-POWER +gpt3 +4096", shown)
    assert "no table compares with 'nothing'" in refused(
        scaling.main, tree, "--baseline", "nothing"
    )


def test_a_baseline_that_one_of_the_tables_has_is_taken_there(tree, printed):
    """The weak table of the other batch has no system of 64 nodes with this one."""
    path = tree / "training_results_v4.1/Made/results/made_n128/gpt3/result_0.txt"
    for name in ("made_n128", str(path), "v4.1 Made made_n128 gpt3"):
        _, strong, weak = printed(scaling.main, tree, "--baseline", name).split("\n\n")
        assert "against v4.1 Made made_n128" in weak and "made_n128" not in strong
        assert "against v4.1 Made made_n128 gpt3 0" in printed(
            tflops.main, tree, "--baseline", name
        )


def test_the_argument_dump_of_a_log_states_the_layout(tmp_path):
    dump = "      tensor_model_parallel_size: 4\n      pipeline_model_parallel_size: 1\n"
    dump += "      micro_batch_size: 1\n      max_steps: 1024\n      global_batch_size: 48\n"
    record = read(write(tmp_path, dump + result("llama2_70b_lora", **ONE_NODE)))
    assert (record.tp, record.pp, record.micro_batch, record.global_batch) == (4, 1, 1, 8)
    assert record.planned_steps is None and judge(record).verdict == "complete"


def test_new_keys_and_values_of_other_types_do_no_harm(tmp_path):
    values = {"tensor_parallelism": 8, "pipeline_parallelism": 4, "context_parallelism": 2}
    values |= {"lowest_numerical_precision_in_linear": "fp8", "tracked_stats": [1, 2]}
    values |= {"a_new_key": {"deep": [1, {"x": None}]}, "global_batch_size": "many"}
    odd = [line(1.7e12, key, value) for key, value in values.items()]
    odd += [line(1.7e12, "eval_accuracy", None, epoch_num="one"), ":::MLLOG {broken\n"]
    text = "".join([*odd, result("llama31_405b", step_s=5.0, batch=1152, tokens=False)])
    record = read(write(tmp_path, text))
    assert (record.tp, record.pp, record.cp, record.precision) == (8, 4, 2, "fp8")
    assert record.seq_len == 8192 and timed(record).step_s == pytest.approx(5.0)


# What is known of the real logs, independently: mlperf_truth.csv beside them.
FIELDS = {name: name for name in ("gpus", "tp", "pp", "cp", "vpp")}
FIELDS |= {"mbs": "micro_batch", "gbs": "global_batch", "seq": "seq_len", "ga": "n_micro"}


def test_the_real_logs_agree_with_what_is_known_of_them(shared, tmp_path):
    """As a tree, with their systems and empty configurations of the real names."""
    logs, truth = shared / "logs", {}
    with (logs / "mlperf_truth.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            truth[row["round"], row["submitter"], row["system"]] = row
    for (version, submitter, system), row in truth.items():
        sizes = int(row["nodes"]), int(row["accel_per_node"])
        root = tmp_path / f"training_results_{version}"
        describe(root, system, *sizes, row["accelerator"], submitter)
    for name in (logs / "mlperf_config_names.txt").read_text().splitlines():
        version, _, path = name.partition(" ")
        there = tmp_path / f"training_results_{version}" / path
        there.parent.mkdir(parents=True, exist_ok=True)
        there.touch()
    for log in logs.glob("mlcommons+training_results_*/*__*__*__result_*.txt"):
        submitter, system, benchmark, name = log.name.split("__")
        root = tmp_path / log.parent.name.removeprefix("mlcommons+") / submitter
        (root / "results" / system / benchmark).mkdir(parents=True, exist_ok=True)
        shutil.copy(log, root / "results" / system / benchmark / name)
    records, _ = load([tmp_path])
    for record in records:
        about = record.submission
        row = truth[about.round, about.submitter, about.system]
        assert about.benchmark == row["benchmark"]
        for column, field in FIELDS.items():
            if row[column] and not (field == "gpus" and record.gpus is None):
                assert getattr(record, field) == int(row[column]), (about.system, field)
        time = timed(record).step_s
        if row["s_per_step_median"]:
            assert time == pytest.approx(float(row["s_per_step_median"]), rel=5e-3)
        elif row["throughput_samples_s"]:
            samples_per_s = record.global_batch / time
            assert samples_per_s == pytest.approx(float(row["throughput_samples_s"]), rel=2e-2)
    assert len({record.submission.system for record in records}) == 8


@pytest.mark.parametrize(
    ("benchmark", "factor", "per", "step_s"),
    [
        ("llama31_405b", 8192, 1, 5.0),  # the rules say how many tokens a sample has
        ("llama31_405b", 8001, 1, None),
        ("a_new_benchmark", 8000, 1, None),  # tokens of sequences of unknown length
        ("a_new_benchmark", 1, 1152, None),  # steps
        ("a_new_benchmark", 1, 160, None),  # epochs
    ],
)
def test_counts_of_samples_that_are_none_are_divided_or_make_no_time(
    tmp_path, benchmark, factor, per, step_s
):
    text = result(benchmark, nodes=128, step_s=5.0, batch=1152, **LORA)
    counted = re.compile(r'("samples_count": )(\d+)')
    text = counted.sub(lambda match: match[1] + str(int(match[2]) * factor // per), text)
    record = read(write(tmp_path, text))
    time, samples = timed(record), record.submission.samples
    assert (time and time.step_s) == (step_s and pytest.approx(step_s, rel=1e-3))
    assert samples == (6 * 48 * 1152 if step_s else None)
    words = "counts of samples are of tokens" if step_s else "are not of samples"
    assert any(words in note for note in record.notes)


def test_a_run_that_was_cut_is_no_result_and_a_second_one_in_a_log_is_not_read(tmp_path):
    record = read(write(tmp_path, result(step_s=22.0, shift_ms=-9e7) + TEXT))
    assert timed(record).step_s == pytest.approx(22.0, rel=1e-3) and len(record.steps) == 288
    record = read(write(tmp_path, TEXT[: len(TEXT) * 2 // 3]))
    assert judge(record, timed(record)).verdict == "stopped early"
    assert "wall_s" not in record.totals and timed(record).step_s == pytest.approx(11.0, rel=1e-3)


def test_what_several_ranks_print_counts_once(tmp_path):
    marks = "run_start|block_start|block_stop|eval_start|eval_stop|run_stop"
    many = re.sub(rf'.*"(?:{marks})".*\n', r"\g<0>" * 4, TEXT)
    many = re.sub(r'.*"tracked_stats".*\n', r"\g<0>" * 2, many)
    record, alone = read(write(tmp_path, many)), read(write(tmp_path, TEXT, n=1))
    assert record.steps["iteration"].tolist() == list(range(1, 289))
    assert "288 duplicate lines dropped" in record.notes
    assert timed(record).step_s == timed(alone).step_s
    assert record.submission.eval_share == pytest.approx(alone.submission.eval_share)
