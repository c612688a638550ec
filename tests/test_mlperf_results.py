"""MLPerf results are read with their unit, evaluations left out, and become scaling tables."""

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from analysis import scaling
from analysis.logs.load import load
from analysis.logs.parsing.mlperf_tree import place_of
from analysis.logs.readers import read
from analysis.logs.verdict import judge, timed
from base.errors import UsageError
from tests.tools.mlperf_tree import configure, describe, line, result, write

GPT3 = {"max_sequence_length": 2048, "counts_tokens": True}
LORA = {"step_key": None, "block_steps": 48, "blocks": 6}


def one(folder: Path, benchmark="gpt3", nodes=64, step_s=11.0, batch=2048, **how):
    """A made result of one file, read."""
    lines = result(benchmark, nodes, step_s, batch, ranks=1, **how)
    return read(write(folder, "Made", f"made_n{nodes}", benchmark, 0, lines))


@pytest.mark.parametrize(
    "key",
    ["train_step_time", "train_step_timing", "train_step_timing in s", "train_step_time_s"],
)
def test_each_step_is_read_under_any_name_of_its_time(tmp_path, key):
    record = one(tmp_path, step_key=key, per_step={"reduced_train_loss": 2.5}, **GPT3)
    assert record.iteration.tolist() == list(range(1, 289))
    assert timed(record).step_s == pytest.approx(11.0, rel=1e-6)
    assert judge(record, timed(record)).verdict == "complete"
    assert record.submission.samples == 288 * 2048


def test_evaluations_are_left_out_of_the_time_and_told(tmp_path):
    record = one(tmp_path, "llama2_70b_lora", 1, 4.0, 8, n_micro=4, eval_s=40.0, **LORA)
    assert record.interval == 48 and len(record.step_s) == 6
    assert timed(record).step_s == pytest.approx(4.0, rel=1e-3)
    about = record.submission
    assert about.eval_s == pytest.approx(240) and about.init_s == pytest.approx(60)
    assert about.block_s == pytest.approx(192, rel=1e-3)
    assert about.train_s + about.eval_s == pytest.approx(record.totals["wall_s"])


def test_evaluations_that_are_not_marked_are_said_to_be_in_the_times(tmp_path):
    lines = [x for x in result("gpt3", 64, 11.0, 2048, ranks=1, step_key=None, **GPT3)]
    kept = [x for x in lines if '"eval_start"' not in x and '"eval_stop"' not in x]
    record = read(write(tmp_path, "Made", "made_n64", "gpt3", 0, iter(kept)))
    assert "evaluations are not marked: the times hold them" in record.notes
    assert record.submission.eval_s is None


def test_counts_inside_of_one_block_are_no_entries(tmp_path):
    lines = [line(1.7e12, "global_batch_size", 768), line(1.7e12, "run_start")]
    lines += [line(1.7e12, "block_start")]
    for i in range(1, 9):
        lines.append(line(1.7e12 + 2e4 * i, "eval_accuracy", 0.5, epoch_num=150_000 * i))
    lines += [line(1.7002e12, "block_stop"), line(1.7002e12, "run_stop", status="success")]
    record = read(write(tmp_path, "Made", "made_n1", "bert", 0, iter(lines)))
    assert len(record.step_s) == 0
    assert record.notes == ["no step is timed: the times are of the whole run"]


@pytest.mark.parametrize(
    ("factor", "said", "step_s"),
    [(1000.0, "read as ms", 11.0), (1 / 3600, "neither is a result", None)],
)
def test_step_times_in_another_unit_never_look_complete(tmp_path, factor, said, step_s):
    text = "".join(result("gpt3", 64, 11.0, 2048, ranks=1, **GPT3))
    pattern = r'("train_step_time": )([\d.]+)'
    text = re.sub(pattern, lambda match: f"{match[1]}{float(match[2]) * factor}", text)
    record = read(write(tmp_path, "Made", "made_n64", "gpt3", 0, iter([text])))
    assert any(said in note for note in record.notes)
    time = timed(record)
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
        lines.append(line(now, "eval_start", samples_count=samples))
        now += 4000
        lines.append(line(now, "eval_stop", samples_count=samples))
    lines.append(line(now, "run_stop", status="success", samples_count=samples))
    record = read(write(tmp_path, "Made", "made_n1", "llama31_405b", 0, iter(lines)))
    assert len(record.step_s) == 270
    assert timed(record).step_s == pytest.approx(2.23)
    assert record.submission.block_s == pytest.approx(15 * 2.23)


@pytest.mark.parametrize(
    ("rate", "name", "expected"),
    [
        (345_000.0, "tokens_per_s", 345_000.0),
        (170.0, "samples_per_s", 170.0),
        (0.36, "samples_per_s", 0.36 * 512),  # of one GPU
        (700.0, "tokens_per_s", 700.0 * 512),
        (21.0, None, None),  # of a node: no unit that is known here
    ],
)
def test_a_throughput_is_taken_in_the_unit_that_agrees_with_counts(tmp_path, rate, name, expected):
    lines = list(result("gpt3", 64, 11.0, 2048, ranks=1, **GPT3))
    lines.append(line(1.71e12, "tracked_stats", {"throughput": rate}, step=1))
    describe(tmp_path, "Made", "made_n64", 64)
    record = read(write(tmp_path, "Made", "made_n64", "gpt3", 0, iter(lines)))
    rates = {k: v for k, v in record.totals.items() if k.endswith("_per_s")}
    if name is None:
        assert rates == {} and any("its unit is unknown" in note for note in record.notes)
    else:
        assert rates == {name: pytest.approx(expected)}


def test_the_layout_comes_from_the_only_configuration_that_fits_the_log(tmp_path):
    describe(tmp_path, "Made", "made_n64", 64)
    names = ("config_DGXH100_64x8x192x4x8_mbs1.sh", "config_DGXH100_96x8x128x4x8_mbs1.sh")
    configure(tmp_path, "Made", "gpt3", *names, "config_DGXH200_64x8x128x8x8_mbs1.sh")
    record = one(tmp_path, n_micro=128, **GPT3)
    load_one(record)
    assert (record.gpus, record.tp, record.pp, record.dp, record.micro_batch) == (512, 4, 8, 16, 1)
    assert record.origin["tp"] == "from name" and record.origin["gpus"] == "config"
    assert f"layout from the name of {names[0]}" in record.notes


def load_one(record):
    """Let `load` derive what follows from the facts of one record."""
    from analysis.logs.load import _multiply_out

    _multiply_out(record)


def test_a_configuration_whose_batch_contradicts_the_log_is_not_taken(tmp_path):
    describe(tmp_path, "Made", "made_n64", 64)
    configure(tmp_path, "Made", "gpt3", "config_DGXH100_64x8x192x8x8_mbs1.sh")
    record = one(tmp_path, n_micro=128, **GPT3)  # 8 x 8 x 2048 is not 512 x 128
    assert record.tp is None and record.pp is None


def test_two_configurations_that_fit_leave_the_layout_unknown(tmp_path):
    describe(tmp_path, "Made", "made_n1", 1, card="H200-SXM5-141GB")
    names = ("config_DGXH200_1x8x2xtp1pp1cp2.sh", "config_DGXH200_1x8x2xtp2pp1cp1.sh")
    configure(tmp_path, "Made", "llama2_70b_lora", *names)
    record = one(tmp_path, "llama2_70b_lora", 1, 3.2, 8, n_micro=2, **LORA)
    assert record.tp is None
    assert f"the layout is not known: these configurations fit: {', '.join(names)}" in record.notes


def test_the_fifth_number_is_no_pipeline_where_lora_is_tuned(tmp_path):
    describe(tmp_path, "Made", "made_n8", 8)
    configure(tmp_path, "Made", "llama2_70b_lora", "config_OCI-H100_8x8x1x4x2.sh")
    assert one(tmp_path, "llama2_70b_lora", 8, 0.6, 8, **LORA).pp is None


@pytest.mark.parametrize(
    ("platform", "gpus"),
    [
        ("64xNVIDIA DGX H100", 512),
        ("2xXE9680x8H100-SXM-80GB", 16),
        ("7x8xH100-SXM5-80GB", 56),
        ("gaudi-256", 256),
        ("tpu-v5l-4096", 4096),
        ("tpu-v5p-1024", 512),  # TensorCores
        ("128xBM.GPU.H100.8", None),  # 16 nodes, which the name does not say
        ("64xND_H200_v5", None),
    ],
)
def test_gpus_are_counted_from_the_platform_where_it_says_them(tmp_path, platform, gpus):
    lines = result("gpt3", 64, 11.0, 2048, ranks=1, **GPT3)
    text = "".join(lines).replace("64xMade DGX H100", platform)
    path = tmp_path / "result_0.txt"
    path.write_text(text)
    assert read(path).gpus == gpus


def test_the_system_and_its_round_are_told_by_the_path_at_any_depth(tmp_path):
    top = tmp_path / "training_results_v4.1" / "closed" / "Made+Other"
    place = place_of(top / "results" / "made_n8" / "gpt3" / "seed1" / "result_12.txt")
    assert place[:5] == ("v4.1", "Made+Other", "made_n8", "gpt3", 12) and place.top == top
    flat = place_of(tmp_path / "v3.1" / "Made__made_n8__gpt3__result_2.txt")
    assert flat[:5] == ("v3.1", "Made", "made_n8", "gpt3", 2)


@pytest.fixture
def tree(tmp_path) -> Path:
    """Two sizes of one batch and one size of twice the batch, three repeats each."""
    root = tmp_path / "training_results_v4.1"
    for nodes, step_s, batch in ((64, 11.0, 2048), (512, 1.6, 2048), (128, 11.2, 4096)):
        describe(root, "Made", f"made_n{nodes}", nodes)
        for n in range(3):
            lines = result(
                "gpt3", nodes, step_s * (1 + 0.01 * n), batch, ranks=1, shift_ms=1e7 * n, **GPT3
            )
            write(root, "Made", f"made_n{nodes}", "gpt3", n, lines)
    (root / "Made" / "README.md").write_text("no log\n")
    (root / "Made" / "run.log").write_text("no result\n")
    return tmp_path


def test_a_tree_of_results_gives_strong_and_weak_tables(tree, capsys):
    assert scaling.main([str(tree)]) == 0
    shown = capsys.readouterr().out
    every, strong, weak = shown.split("\n\n")
    assert every.count("  gpt3  ") == 3 and "1 files that are no MLPerf results" in every
    assert strong.startswith(
        "strong scaling: gpt3, Made, H100 SXM, v4.1; global batch 2048 of 2048"
    )
    assert re.search(r"made_n512 +4096 +2048 +3 +1\.616 +1\.98% +6\.8[78] +0\.859", strong)
    assert "against made_n64 (512 GPUs); Amdahl's law fits a serial share" in strong
    assert weak.startswith("weak scaling: gpt3, Made, H100 SXM, v4.1; 4 sequences a GPU")
    assert re.search(r"made_n128 +1024 +4096 +3 +11\.31\d* +1\.98% +1\.96 +0\.98", weak)


def test_json_of_a_tree_is_one_list(tree, capsys):
    assert scaling.main([str(tree), "--format", "json", "--scaling", "strong"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 5 and [row["speedup"] for row in rows[3:]] == [1.0, pytest.approx(6.875)]


def test_a_result_that_was_submitted_twice_counts_once(tree, capsys):
    made = tree / "training_results_v4.1" / "Made" / "results"
    shutil.copytree(made / "made_n512", made / "made_n512-POWER")
    describe(tree / "training_results_v4.1", "Made", "made_n512-POWER", 512)
    text = (made / "made_n64" / "gpt3" / "result_0.txt").read_text()
    renamed = text.replace("64xMade DGX H100", "64xAnother DGX H100")  # the same measurements
    (made / "made_n64" / "gpt3" / "result_3.txt").write_text(renamed)
    assert scaling.main([str(tree)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("the same evidence as") == 4
    assert not re.search(r"made_n512-POWER +gpt3 +4096", shown)
    assert re.search(r"made_n64 +gpt3 +512 +2048 +3 ", shown)


def test_a_run_that_missed_the_target_is_no_repeat(tree, capsys):
    made = tree / "training_results_v4.1"
    lines = result("gpt3", 64, 9.0, 2048, ranks=1, status="aborted", shift_ms=9e7, **GPT3)
    write(made, "Made", "made_n64", "gpt3", 3, lines)
    assert scaling.main([str(tree)]) == 0
    shown = capsys.readouterr().out
    assert "left out: v4.1 Made made_n64 gpt3 3: stopped early" in shown
    assert re.search(r"made_n64 +gpt3 +512 +2048 +3 ", shown)


def test_a_baseline_that_no_table_has_is_refused(tree, capsys):
    assert scaling.main([str(tree), "--baseline", "made_n512"]) == 0
    assert "against made_n512 (4096 GPUs)" in capsys.readouterr().out
    assert scaling.main([str(tree), "--baseline", "nothing"]) == 2
    assert "no table compares with 'nothing'" in capsys.readouterr().err


def power(folder: Path, name: str, watts: float, started: float, seconds: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [line(started, "power_measurement_start"), line(started, "conversion_eff", 0.5)]
    for second in range(1, seconds + 1):
        lines.append(line(started + 1000 * second, "power_reading", {"value": watts}))
    lines.append(line(started + 1000 * seconds, "power_measurement_stop"))
    (folder / name).write_text("".join(lines))


def test_power_logs_give_joules_a_run_and_a_token(tmp_path):
    describe(tmp_path, "Made", "made_n2", 2)
    lines = list(result("llama2_70b_lora", 2, 2.0, 8, ranks=1, **LORA))
    path = write(tmp_path, "Made", "made_n2", "llama2_70b_lora", 0, iter(lines))
    folder = path.parent / "power" / "result_0"
    power(folder, "node_0.txt", 8000, 1.7e12, 30)
    half = read(path)
    assert half.submission.energy_j is None
    (path.parent / "power" / "result_1").mkdir()
    empty = write(tmp_path, "Made", "made_n2", "llama2_70b_lora", 1, iter(lines))
    assert read(empty).submission.energy_j is None
    said = "the power logs are of 1 nodes, the system has 2: the energy is unknown"
    assert said in half.notes
    power(folder, "node_1.txt", 6000, 1.7e12, 30)
    (folder / "sw_0.txt").write_text(line(1.7e12, "interconnect_power_est", 1000.0))
    record = read(path)
    expected = (0.5 * 8000 + 0.5 * 6000 + 1000) * record.totals["wall_s"]
    assert record.submission.energy_j == pytest.approx(expected)
    power(folder, "node_1.txt", 6.0, 1.7e12, 30)  # kW
    assert read(path).submission.energy_j is None


def test_the_argument_dump_of_a_log_states_the_layout(tmp_path):
    dump = "      tensor_model_parallel_size: 4\n      pipeline_model_parallel_size: 1\n"
    dump += "      micro_batch_size: 1\n      max_steps: 1024\n      global_batch_size: 48\n"
    text = dump + "".join(result("llama2_70b_lora", 1, 4.0, 8, ranks=1, **LORA))
    record = read(write(tmp_path, "Made", "made_n1", "llama2_70b_lora", 0, iter([text])))
    assert (record.tp, record.pp, record.micro_batch, record.global_batch) == (4, 1, 1, 8)
    assert record.planned_steps is None and judge(record).verdict == "complete"


def test_new_keys_and_values_of_other_types_do_no_harm(tmp_path):
    odd = [
        line(1.7e12, "tensor_parallelism", 8),
        line(1.7e12, "pipeline_parallelism", 4),
        line(1.7e12, "context_parallelism", 2),
        line(1.7e12, "lowest_numerical_precision_in_linear", "fp8"),
        line(1.7e12, "a_new_key", {"deep": [1, {"x": None}]}),
        line(1.7e12, "tracked_stats", [1, 2]),
        line(1.7e12, "eval_accuracy", None, epoch_num="one"),
        line(1.7e12, "global_batch_size", "many"),
        ":::MLLOG {broken\n",
    ]
    lines = [*odd, *result("llama31_405b", 64, 5.0, 1152, ranks=1)]
    record = read(write(tmp_path, "Made", "made_n64", "llama31_405b", 0, iter(lines)))
    assert (record.tp, record.pp, record.cp, record.precision) == (8, 4, 2, "fp8")
    assert record.seq_len == 8192 and timed(record).step_s == pytest.approx(5.0)


# What is known of the real logs, independently: mlperf_truth.csv beside them.
FIELDS = {"gpus": "gpus", "tp": "tp", "pp": "pp", "cp": "cp", "vpp": "vpp", "mbs": "micro_batch"}
FIELDS |= {"gbs": "global_batch", "seq": "seq_len", "ga": "n_micro"}


@pytest.fixture
def real(shared, tmp_path) -> Path:
    """The real logs as a tree, with empty configurations of the real names."""
    logs = shared / "logs"
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
    return tmp_path


def test_the_real_logs_agree_with_what_is_known_of_them(shared, real):
    with (shared / "logs" / "mlperf_truth.csv").open(newline="") as lines:
        truth = {
            tuple(r[k] for k in ("round", "submitter", "system")): r for r in csv.DictReader(lines)
        }
    records, _ = load([real])
    systems = set()
    for record in records:
        about = record.submission
        row = truth[about.round, about.submitter, about.system]
        systems.add(about.system)
        assert about.benchmark == row["benchmark"]
        for column, field in FIELDS.items():
            if row[column] and not (field == "gpus" and record.gpus is None):
                assert getattr(record, field) == int(row[column]), (about.system, field)
        time = timed(record).step_s
        if row["s_per_step_median"]:
            assert time == pytest.approx(float(row["s_per_step_median"]), rel=5e-3)
        if row["block_s_median"]:
            if about.system != "HLS-Gaudi2-N32-PT":  # one block with 24 evaluations in it
                assert about.block_s == pytest.approx(float(row["block_s_median"]), rel=1e-2)
        if row["throughput_samples_s"] and not row["s_per_step_median"]:
            samples_per_s = record.global_batch / time
            assert samples_per_s == pytest.approx(float(row["throughput_samples_s"]), rel=2e-2)
        assert record.gpus == int(row["gpus"])
    assert len(systems) == 8


def test_the_step_median_of_a_result_survives_a_slow_first_step(tmp_path):
    text = "".join(result("gpt3", 64, 11.0, 2048, ranks=1, noise=0.0, **GPT3))
    text = text.replace('"train_step_time": 11.0', '"train_step_time": 60.0', 1)
    record = read(write(tmp_path, "Made", "made_n64", "gpt3", 0, iter([text])))
    assert timed(record).first == 1 and timed(record).step_s == 11.0
    assert np.isclose(record.step_s[0], 60.0)


def test_a_prediction_of_results_is_refused(tree):
    with pytest.raises(UsageError, match="--predict is for runs"):
        scaling.main.__wrapped__([str(tree), "--predict", "dgx-h100"])


def test_steps_that_two_ranks_print_count_once(tmp_path):
    lines = list(result("gpt3", 64, 11.0, 2048, ranks=1, **GPT3))
    twice = [x for x in lines for _ in range(1 + ("tracked_stats" in x))]
    record = read(write(tmp_path, "Made", "made_n64", "gpt3", 0, iter(twice)))
    assert record.iteration.tolist() == list(range(1, 289))
    assert "288 duplicate lines dropped" in record.notes


def test_a_line_that_lists_the_times_of_a_block_is_read(tmp_path):
    lines = list(result("gpt3", 64, 11.0, 2048, ranks=1, step_key=None, **GPT3))
    listed = line(1.7e12, "tracked_stats", {"train_step_time": [11.0] * 12}, step=7)
    blocks = [x + listed * ('"block_stop"' in x) for x in lines]
    record = read(write(tmp_path, "Made", "made_n64", "gpt3", 0, iter(blocks)))
    assert record.iteration.tolist() == list(range(1, 289)) and record.interval == 1


LATER = {"max_sequence_length": 8192}


@pytest.mark.parametrize(
    ("key", "factor"),
    [
        ("step_time", 1),
        ("iteration_time_ms", 1e3),
        ("time_per_step", 1),
        ("avg_step_time (ms)", 1e3),
    ],
)
def test_other_names_of_a_steps_time_are_read_in_their_unit(tmp_path, key, factor):
    lines = result("llama31_8b", 1, 2.0 * factor, 128, ranks=1, step_key=key, **LATER)
    # The clock of the lines runs in seconds, whatever the unit of the times.
    text = "".join(result("llama31_8b", 1, 2.0, 128, ranks=1, step_key=key, **LATER))
    if factor > 1:
        text = re.sub(
            rf'("{re.escape(key)}": )([\d.]+)', lambda m: m[1] + str(float(m[2]) * 1e3), text
        )
    record = read(write(tmp_path, "Made", "made_n1", "llama31_8b", 0, iter([text])))
    assert len(list(lines)) and record.seq_len == 8192
    assert len(record.step_s) == 288 and timed(record).step_s == pytest.approx(2.0, rel=1e-2)


def test_times_of_evaluation_and_of_epochs_are_no_steps(tmp_path):
    more = {"validation_step_time": 9.0, "train_epoch_timing": 900.0, "eval_time": 3.0}
    record = one(tmp_path, step_key=None, per_step=more, **GPT3)
    assert record.interval == 12 and timed(record).step_s == pytest.approx(11.0, rel=1e-3)


@pytest.mark.parametrize("unit", [1e-3, 1e3, 1e6])
def test_time_stamps_in_another_unit_are_read_as_such_and_told(tmp_path, unit):
    text = "".join(result("gpt3", 64, 11.0, 2048, ranks=1, **GPT3))
    text = re.sub(r'("time_ms": )(\d+)', lambda m: f"{m[1]}{int(m[2]) * unit!r}", text)
    record = read(write(tmp_path, "Made", "made_n64", "gpt3", 0, iter([text])))
    assert timed(record).step_s == pytest.approx(11.0, rel=1e-3)
    assert record.totals["wall_s"] == pytest.approx(288 * 11.0 + 24 * 12.8, rel=1e-3)
    assert any("since 1970" in note for note in record.notes)


def test_step_times_without_a_batch_are_held_against_their_lines_clock(tmp_path):
    text = "".join(result("gpt3", 64, 11.0, 2048, ranks=1, **GPT3))
    text = "\n".join(x for x in text.split("\n") if '"global_batch_size"' not in x)
    assert timed(read_text(tmp_path, text)).step_s == pytest.approx(11.0, rel=1e-3)
    in_ms = re.sub(r'("train_step_time": )([\d.]+)', lambda m: m[1] + str(float(m[2]) * 1e3), text)
    record = read_text(tmp_path, in_ms)
    assert timed(record).step_s == pytest.approx(11.0, rel=1e-3)
    assert any("read as ms" in note for note in record.notes)
    in_h = re.sub(r'("train_step_time": )([\d.]+)', lambda m: m[1] + str(float(m[2]) / 3600), text)
    record = read_text(tmp_path, in_h)
    assert timed(record) is None and any("unknown" in note for note in record.notes)


def read_text(folder, text, benchmark="gpt3", system="made_n64"):
    """A result of these lines, read."""
    return read(write(folder, "Made", system, benchmark, 0, iter([text])))


def test_samples_that_are_tokens_are_divided_under_any_key(tmp_path):
    how = {"step_key": None, "blocks": 6, "block_steps": 48, **LATER}
    text = "".join(result("llama31_405b", 128, 5.0, 1152, ranks=1, **how))
    text = re.sub(r'("samples_count": )(\d+)', lambda m: m[1] + str(int(m[2]) * 8192), text)
    record = read_text(tmp_path, text, "llama31_405b")
    assert timed(record).step_s == pytest.approx(5.0, rel=1e-3)
    assert record.submission.samples == 6 * 48 * 1152
    assert any(note.startswith("counts of samples are of tokens") for note in record.notes)


def test_counts_that_cannot_be_of_samples_make_no_step_time(tmp_path):
    how = {"step_key": None, "blocks": 6, "block_steps": 48}
    text = "".join(result("a_new_benchmark", 128, 5.0, 1152, ranks=1, **how))
    tokens = re.sub(r'("samples_count": )(\d+)', lambda m: m[1] + str(int(m[2]) * 8000), text)
    record = read_text(tmp_path, tokens, "a_new_benchmark")
    assert timed(record) is None and record.submission.samples is None
    assert any("--seq-len N divides them" in note for note in record.notes)
    steps = re.sub(r'("samples_count": )(\d+)', lambda m: m[1] + str(int(m[2]) // 1152), text)
    record = read_text(tmp_path, steps, "a_new_benchmark")
    assert timed(record) is None
    assert any("fewer than a batch of 1152" in note for note in record.notes)


def test_epochs_are_no_samples(tmp_path):
    text = "".join(result("unet3d", 8, 0.1, 16, ranks=1, step_key=None, blocks=9, block_steps=200))
    epochs = re.sub(r'"samples_count": (\d+)', lambda m: f'"epoch_num": {int(m[1]) // 160}', text)
    record = read_text(tmp_path, epochs, "unet3d")
    assert timed(record) is None and record.submission.samples is None
    assert any("unet3d counts epochs" in note for note in record.notes)


def test_the_size_of_the_data_is_no_count_of_samples(tmp_path):
    lines = list(result("llama2_70b_lora", 1, 4.0, 8, ranks=1, **LORA))
    at = next(i for i, x in enumerate(lines) if '"run_start"' in x) + 1
    lines.insert(at, line(1.7e12 + 60_000, "train_samples", 3901))
    record = read_text(tmp_path, "".join(lines), "llama2_70b_lora")
    assert record.submission.samples == 6 * 48 * 8
    assert timed(record).step_s == pytest.approx(4.0, rel=1e-3)


def test_a_run_that_was_cut_is_no_result(tmp_path):
    text = "".join(result("gpt3", 64, 11.0, 2048, ranks=1, **GPT3))
    record = read_text(tmp_path, text[: len(text) * 2 // 3])
    assert judge(record, timed(record)).verdict == "stopped early"
    assert "wall_s" not in record.totals and timed(record).step_s == pytest.approx(11.0, rel=1e-3)


def test_a_run_that_starts_again_in_its_log_is_read_from_there(tmp_path):
    first = "".join(result("gpt3", 64, 22.0, 2048, ranks=1, **GPT3))
    second = "".join(result("gpt3", 64, 11.0, 2048, ranks=1, shift_ms=9e7, **GPT3))
    record = read_text(tmp_path, first[: len(first) // 2].rpartition("\n")[0] + "\n" + second)
    assert timed(record).step_s == pytest.approx(11.0, rel=1e-3) and len(record.step_s) == 288
    assert any("run_start again" in note for note in record.notes)
    both = read_text(tmp_path, first + second)
    assert timed(both).step_s == pytest.approx(22.0, rel=1e-3) and len(both.step_s) == 288
    assert any("another run_start: the first run is read" in note for note in both.notes)


def test_each_rank_may_print_the_marks(tmp_path):
    lines = list(result("gpt3", 64, 11.0, 2048, ranks=1, **GPT3))
    marks = ("run_start", "block_start", "block_stop", "eval_start", "eval_stop", "run_stop")
    many = [x for x in lines for _ in range(4 if any(f'"{m}"' in x for m in marks) else 1)]
    record, alone = read_text(tmp_path, "".join(many)), read_text(tmp_path, "".join(lines))
    assert timed(record).step_s == timed(alone).step_s
    assert record.submission.train_s == pytest.approx(alone.submission.train_s)


def test_evaluations_beside_training_are_not_taken_out(tmp_path):
    lines = list(result("gpt3", 64, 11.0, 2048, ranks=1, eval_s=0.0, **GPT3))
    kept = [x for x in lines if '"block_st' not in x and '"eval_st' not in x]
    marked = []
    for i, x in enumerate(kept):
        marked.append(x)
        at = int(re.search(r'"time_ms": (\d+)', x)[1])
        if '"eval_accuracy"' in x and i < len(kept) - 2:
            marked.append(line(at, "eval_start", epoch_num=1))
        if "tracked_stats" in x and i % 13 == 9:
            marked.append(line(at, "eval_stop", epoch_num=1))
    record = read_text(tmp_path, "".join(marked))
    assert timed(record).step_s == pytest.approx(11.0, rel=1e-3)
    assert record.submission.eval_s is None
    assert record.submission.train_s == pytest.approx(288 * 11.0, rel=1e-2)
    assert any("steps are timed during evaluations" in note for note in record.notes)


def test_a_list_of_thousands_of_times_is_read(tmp_path):
    lines = list(result("gpt3", 64, 11.0, 2048, ranks=1, step_key=None, **GPT3))
    times = [11.0 + 1e-12 * i for i in range(288 * 8)]
    lines.insert(-1, line(1.7e12 + 4e6, "tracked_stats", {"train_step_time": times}, step=7))
    assert len(read_text(tmp_path, "".join(lines)).step_s) == 288 * 8


def test_the_layout_is_read_under_the_names_of_any_trainer(tmp_path):
    facts = {"tensor_model_parallel_size": 4, "pipeline_parallel_size": 8, "context_parallel": 2}
    facts |= {"virtual_pipeline_model_parallel_size": 5, "number_of_nodes": 64}
    record = one(tmp_path, accelerators_per_node=8, **facts, **GPT3)
    assert (record.tp, record.pp, record.cp, record.vpp, record.gpus) == (4, 8, 2, 5, 512)
    assert record.origin["gpus"] == "log"


@pytest.mark.parametrize(
    ("platform", "gpus"),
    [
        ("8xH200-SXM-141GB", None),  # 8 GPUs, or 8 nodes
        ("64x NVIDIA B200", None),
        ("16xDGX GB200", None),  # 4 cards a tray, 72 a rack
        ("8xDGX GB300 NVL72", None),
        ("16xDGX B200", 128),
    ],
)
def test_a_platform_that_may_mean_cards_or_nodes_counts_none(tmp_path, platform, gpus):
    configure(tmp_path, "Made", "gpt3", "config_DGXH200_8x8x256x4x8_mbs1.sh")
    # The configuration fits all that the log says, so 8 nodes would give its layout.
    text = "".join(result("gpt3", 64, 11.0, 2048, ranks=1, n_micro=1024, **GPT3))
    record = read_text(tmp_path, text.replace("64xMade DGX H100", platform))
    assert record.gpus == gpus
    assert (gpus is not None) == any("GPUs are read from the system's" in n for n in record.notes)


def test_a_system_is_found_under_another_spelling_of_its_name(tmp_path):
    describe(tmp_path, "Made", "Made N64 (v2)", 64)
    describe(tmp_path, "Made", "other", 8)
    record = one(tmp_path, **GPT3)
    assert record.gpus == 512 and "GPUs are read" in " ".join(record.notes)  # by its platform
    named = tmp_path / "Made" / "systems" / "MADE-n64.JSON"
    named.write_bytes(b"\xef\xbb\xbf" + (tmp_path / "Made" / "systems" / "other.json").read_bytes())
    from analysis.logs.parsing import mlperf_tree

    mlperf_tree._descriptions.cache_clear()
    record = one(tmp_path, **GPT3)
    assert record.gpus == 64 and "the system made_n64 is described by made-n64.json" in record.notes


def test_results_of_one_folder_with_two_batches_are_two_results(tree, capsys):
    made = tree / "training_results_v4.1"
    lines = result("gpt3", 64, 22.0, 4096, ranks=1, shift_ms=9e7, **GPT3)
    write(made, "Made", "made_n64", "gpt3", 3, lines)
    assert scaling.main([str(tree)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"made_n64 +gpt3 +512 +2048 +3 ", shown)
    assert re.search(r"made_n64 +gpt3 +512 +4096 +1 ", shown)


def test_results_of_any_name_and_depth_are_read(tmp_path):
    top = tmp_path / "training_results_v6.0"
    describe(top, "Made", "made_n64", 64)
    text = "".join(result("gpt3", 64, 11.0, 2048, ranks=1, **GPT3))
    for place in ("gpt3/seed_1/result_0.txt", "gpt3/seed_2/result_0.txt", "gpt3/result_seed3.txt"):
        path = top / "Made" / "results" / "made_n64" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace('"value": 2.7', f'"value": 2.{len(place)}{place[10]}'))
    records, refused = load([tmp_path])
    assert not refused and [r.submission.round for r in records] == ["v6.0"] * 3
    assert len({r.shown for r in records}) == 3 and all(r.gpus == 512 for r in records)


def test_the_reviews_factor_is_told(tmp_path):
    path = write(tmp_path, "Made", "made_n64", "gpt3", 0, result("gpt3", 64, 11.0, 2048, ranks=1))
    (path.parent / "scaling.json").write_text('{"scaling_factor": 1.05}')
    assert any("the time x 1.05, which is not applied" in note for note in read(path).notes)


def test_what_else_lies_beside_power_logs_does_no_harm(tmp_path):
    describe(tmp_path, "Made", "made_n1", 1)
    lines = result("llama2_70b_lora", 1, 2.0, 8, ranks=1, **LORA)
    path = write(tmp_path, "Made", "made_n1", "llama2_70b_lora", 0, lines)
    folder = path.parent / "power" / "result_0"
    power(folder, "node_0.txt", 8000, 1.7e12, 30)
    (folder / "README.md").write_text("no reading\n")
    (folder / "raw").mkdir()
    record = read(path)
    assert record.submission.energy_j == pytest.approx(0.5 * 8000 * record.totals["wall_s"])
    power(folder, "node_0.txt", 8e6, 1.7e12, 30)  # mW
    assert read(path).submission.energy_j is None


def test_nodes_of_the_json_and_of_the_platform_that_differ_are_noted(tmp_path):
    describe(tmp_path, "Made", "made_n64", 32)
    record = one(tmp_path, **GPT3)
    assert record.gpus == 256
    said = "the system's JSON has 32 nodes (256 GPUs, which are used), the log's "
    assert f"{said}submission_platform is 64xMade DGX H100" in record.notes
    describe(tmp_path / "right", "Made", "made_n64", 64)
    assert not any("platform" in note for note in one(tmp_path / "right", **GPT3).notes)
