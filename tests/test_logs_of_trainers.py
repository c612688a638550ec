"""Logs without a time of each step: Hugging Face's, and those that print a rate of one GPU."""

import json
import re

import numpy as np
import pytest

from analysis import scaling, tflops
from analysis.logs.readers import read
from models.config import GPTConfig
from models.flops import tflops_per_gpu

HEADER = """\
***** Running training *****
  Num examples = {examples}
  Num Epochs = 1
  Instantaneous batch size per device = 8
  Total train batch size (w. parallel, distributed & accumulation) = 64
  Gradient Accumulation steps = {accumulated}
  Total optimization steps = {steps}
  Number of trainable parameters = 124,439,808
"""
RESUMED = "  Continuing training from global step 900\n"
FLAGS = ["--seq-len", "1024"]


def header(steps=1000, accumulated=1):
    return HEADER.format(examples=f"{64 * steps:,}", steps=f"{steps:,}", accumulated=accumulated)


def losses(first=1, last=1000, every=10):
    """A loss line each `every` steps of 1,000."""
    return "".join(
        f"{{'loss': {3 - i / 1000:.4f}, 'grad_norm': 1.2, 'epoch': {i / 1000}}}\n"
        for i in range(first + every - 1, last + 1, every)
    )


def end(runtime_s, samples_per_s=640.0, epoch=1.0):
    rates = f"'train_samples_per_second': {samples_per_s}, 'train_steps_per_second': 10.0"
    return f"{{'train_runtime': {runtime_s}, {rates}, 'train_loss': 2.5, 'epoch': {epoch}}}\n"


@pytest.fixture
def row(tmp_path, capsys):
    """The row of a log's run in the table of runs."""

    def read(text, *flags, name="job.log"):
        (tmp_path / name).write_text(text)
        assert tflops.main([str(tmp_path / name), *flags, "--format", "json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)
        return found | {"said": "; ".join(found["reasons"])}

    return read


def test_the_mean_step_is_the_runtime_over_the_steps_and_says_so(row):
    found = row(header() + losses() + end(10_000.0, 6.4), *FLAGS)
    assert found["steady_step_s"] == 10 and found["tokens_per_s"] == pytest.approx(6553.6)
    assert (
        "s/iter is the runtime over 1000 steps, with warm-up, evaluations and saves"
        in found["said"]
    )
    assert found["verdict"] == "complete" and "few points" not in found["said"]
    assert found["reasons"][0] == "line 109: 1000 of 1000 iterations"  # where it says its runtime


def test_a_runtime_that_is_printed_with_an_exponent_is_read_whole(row):
    said = "'train_runtime': '2.534e+04', 'train_samples_per_second': '5.051', 'epoch': '1'"
    text = header(2000) + "{'loss': '2.981', 'epoch': '0.01'}\n{" + said + "}\n"
    found = row(text)
    assert found["steady_step_s"] == 12.67 and found["samples_per_s"] == 5.051


@pytest.mark.parametrize("said", [RESUMED, ""])
def test_the_runtime_of_a_resumed_run_is_of_its_last_steps_alone(row, said):
    """100 steps of 64 sequences of 1,024 tokens in 100 s; Hugging Face prints the rate of 1,000."""
    found = row(header() + said + losses(901) + end(100.0), *FLAGS)
    assert found["steady_step_s"] == 1 and found["tokens_per_s"] == 65_536
    assert "the runtime over the last 100 of 1000 steps" in found["said"]
    assert "resumed at step 900" in found["said"]
    for damaged in ("nan", "1e999", "1.2.3", "'inf'"):
        text = header() + said + losses(901) + end(100.0)
        row(text.replace("'epoch': 1.0}", f"'epoch': {damaged}}}"))
        odd = row(text.replace("'train_runtime': 100.0", f"'train_runtime': {damaged}"))
        assert odd["steady_step_s"] is None
    unknown = row(header().replace("Total train", "") + said + losses(901) + end(100.0), *FLAGS)
    assert unknown["samples_per_s"] is None  # the printed one counts ten times the steps


# What stands before training, how many parameters are trained -> those of the model, and why FLOPs
# are not known.
TRAINED = (
    ("", "4,194,304", None, "the 4,194,304 trainable parameters may be a part of the model's"),
    ("--model_name_or_path=org/Some-7B\n", "4,194,304", None, "4,194,304 trained parameters of 7"),
    ("--model_name_or_path=org/Some-7B\n", "6,738,415,616", 6738415616, None),
    ("--model_name_or_path gpt2\n", "294,912", None, "294,912 trained parameters of 124,439,808"),
    ("", "124,439,808", 124439808, None),  # as many as GPT-2 has, to the last digit
    ("trainable params: 7,000 || all params: 7,000 || x\n", "7,000", 7000, None),
    ("trainable params: 7 || all params: 7,000 || x\n", "7", None, "the model has frozen weights"),
)


@pytest.mark.parametrize(("before", "trained", "params", "reason"), TRAINED)
def test_trained_parameters_are_the_models_where_something_else_says_so(
    row, before, trained, params, reason
):
    text = before + header().replace("124,439,808", trained) + losses() + end(1000.0)
    found = row(text, *FLAGS)
    assert found["params"] == params and (found["tflops"] is None) == (params is None)
    assert (reason or "") in found["missing"].get("tflops", "")
    if not before and not params:
        given = row(text, "--params", "7e9", *FLAGS)
        assert given["tflops"] == pytest.approx(6 * 7e9 * 65_536 / 8 / 1e12)
        assert "4,194,304 parameters are trained, and FLOPs count 7,000,000,000" in given["said"]


def test_of_an_appended_log_the_last_attempt_counts(row):
    first = header(accumulated=2) + losses(1, 500) + "Traceback (most recent call last):\n"
    second = header(accumulated=1) + RESUMED.replace("900", "500") + losses(501) + end(500.0)
    found = row(first + second, *FLAGS)
    assert (found["steady_step_s"], found["tokens_per_s"], found["gpus"]) == (1, 65_536, 8)
    assert found["steps"] == 50 and "2 attempts in one log: the last is read" in found["said"]


def test_a_resumed_run_without_a_header_has_no_rate(row):
    found = row(losses(501) + end(500.0, 128.0), *FLAGS)
    assert found["samples_per_s"] is None and found["tokens_per_s"] is None
    assert "resumed after 50% of its epochs: its printed rates are wrong" in found["said"]
    whole = row(losses() + end(1000.0, 64.0), *FLAGS)
    assert whole["tokens_per_s"] == 65_536 and "resumed" not in whole["said"]
    back = row(losses(1, 600) + losses(501).replace("2.", "1.") + end(500.0, 128.0), *FLAGS)
    assert "line 61: epochs go back from 0.6 to 0.51" in back["said"]


def test_a_resumed_run_with_one_loss_is_told_by_its_mean_loss(row):
    """Hugging Face divides the losses since the resume by all steps."""
    found = row(header() + losses(501, every=500) + end(500.0, 128.0).replace("2.5", "1.0"))
    assert found["steady_step_s"] is None and found["samples_per_s"] is None
    assert "train_loss is 1, and the losses are 2: it was resumed" in found["said"]
    whole = row(header() + losses(every=1000) + end(1000.0, 64.0))
    assert whole["steady_step_s"] == 1 and "it was resumed" not in whole["said"]


def test_a_loss_behind_the_end_begins_another_run(row, rows_of, tmp_path):
    first, second = losses() + end(1000.0, 64.0), losses().replace("2.", "1.") + end(250.0, 256.0)
    (tmp_path / "two.log").write_text(first + second)
    rows = rows_of(tflops.main, tmp_path / "two.log", *FLAGS)
    assert [(row["run"], row["samples_per_s"]) for row in rows] == [
        ("two.log:1", 64),
        ("two.log:102", 256),
    ]
    same = row(first + losses() + end(250.0, 256.0), *FLAGS)  # to the last digit
    assert same["samples_per_s"] is None
    assert "its ends print runtimes of 250 to 1000 s, of several runs: unknown" in same["said"]
    ranks = row(header() + losses() + end(1000.0, 64.0) + end(1000.4, 64.0), *FLAGS)
    assert ranks["tokens_per_s"] == pytest.approx(65_536, rel=1e-3)
    assert "several" not in ranks["said"] and "attempts" not in ranks["said"]


def test_a_run_that_ended_early_has_no_mean_over_the_planned_steps(row):
    found = row(header() + losses(1, 300) + end(300.0, epoch=0.3))
    assert found["steady_step_s"] is None and found["samples_per_s"] is None
    assert "ended after about 300 of 1000 steps: its mean step time is unknown" in found["said"]


def test_runs_of_hugging_face_have_a_speedup(tmp_path, rows_of):
    for gpus, runtime_s in ((8, 10_000.0), (16, 5_600.0), (32, 3_300.0)):
        text = header() + losses() + end(runtime_s, round(64_000 / runtime_s, 3))
        (tmp_path / f"{gpus}gpus.log").write_text(text.replace("per device = 8", "per device = 2"))
    for main in (tflops.main, scaling.main):
        rows = {row["gpus"]: row for row in rows_of(main, tmp_path, "--baseline", "8gpus.log")}
        for gpus, speedup, efficiency in ((8, 1, 1), (16, 1.786, 0.893), (32, 3.030, 0.758)):
            assert rows[gpus]["speedup"] == pytest.approx(speedup, abs=5e-4)
            assert rows[gpus]["efficiency"] == pytest.approx(efficiency, abs=5e-4)


def test_a_runs_rate_and_the_batch_are_a_time_and_what_is_missing_is_named(row):
    marker = "RUN_COMPLETE run_id=r world_size=4 tokens_per_sec=65536.0\n"
    bare = row(marker, name="RUN_COMPLETE.txt")
    asked = "the log does not state global batch (--global-batch), sequence length (--seq-len)"
    assert bare["steady_step_s"] is None and bare["missing"]["step_s"] == asked
    found = row(marker, "--global-batch=128", *FLAGS, name="RUN_COMPLETE.txt")
    assert (found["steady_step_s"], found["tokens_per_s"]) == (2, 65_536)
    assert (
        "s/iter is the batch over the run's rate, with warm-up, evaluations and saves"
        in found["said"]
    )
    alone = row(TITAN)
    assert alone["missing"]["step_s"] == "the log does not state GPUs (--gpus)"


def test_a_line_that_is_cut_off_has_no_loss(row):
    lines = losses().splitlines(keepends=True)
    lines[12] = "{'loss': 2.8\n"
    found = row(header() + "".join(lines) + end(1000.0))
    assert found["steps"] == 100 and "unknown: loss (1)" in found["said"]


PARTS = """\
Model config Gemma3Config {
  "text_config": {
    "hidden_size": 2560,
    "num_hidden_layers": 34,
    "rope_scaling": {
      "factor": 8.0
    },
    "vocab_size": 262208
  },
  "vision_config": {
    "hidden_size": 1152,
    "num_hidden_layers": 27,
    "rope_scaling": {
      "factor": 8.0
    },
    "vocab_size": 9
  }
}
"""


def test_of_a_model_of_images_and_text_the_language_model_is_read(row, tmp_path):
    sizes = {"n_layer": 34, "hidden": 2560, "vocab_size": 262208}
    printed = row(PARTS + header() + losses() + end(1000.0))
    (tmp_path / "config.json").write_text(PARTS[PARTS.index("{") :])
    beside = row(header() + losses() + end(1000.0))
    both = row(PARTS + header() + losses() + end(1000.0))
    for found in (printed, beside, both):
        assert found["model"] == sizes and "contradiction" not in found["said"]
        why = "the model has an encoder of images, which no convention counts"
        assert found["missing"]["tflops"] == why


def test_ranks_that_share_a_sequence_are_no_data_parallel_ranks(row):
    arguments = "world_size: 8\nper_device_train_batch_size=1,\ngradient_accumulation_steps=1,\n"
    text = arguments + "sequence_parallel_size=2,\nThe global_batch_size: 4\n"
    line = "{{'loss': '1.7', 'epoch': '0.1', 'global_step/max_steps': '{}/5'}}\n"
    text += "".join(line.format(i) for i in range(1, 6))
    text += end(12.01, 3.331)
    found = row(text)
    assert (found["dp"], found["cp"], found["steady_step_s"]) == (4, 2, 2.402)
    unsaid = row(text.replace("sequence_parallel_size=2,\n", ""))
    assert unsaid["dp"] is None and "would be dp 8 of 1 sequences a rank" in unsaid["said"]


TITAN = "[titan] Training starts at step 1, with local batch size 5, global batch size 20, sequence"
TITAN += " length 8192, total steps 50\n"
TITAN += "".join(
    f"[titan] step: {i:2d}  loss: 12.2  memory: 81.67GiB(85.93%)  wps: 112,000\n" for i in range(50)
)
MESH = "[titan] Building 1-D device mesh with ['dp_shard'], [4]\n"


def test_a_rate_of_one_gpu_counts_with_the_gpus_that_a_flag_gives(row):
    stated = row(MESH + TITAN)
    for found in (stated, row(TITAN, "--gpus=4"), row(TITAN, "--dp=4", "--tp=1", "--pp=1")):
        assert found["gpus"] == 4 and found["tokens_per_s"] == 448_000
        step_s = pytest.approx(20 * 8192 / 448_000, rel=1e-12)
        assert found["steady_step_s"] == step_s and found["step_s_mean"] == step_s
    line = " iteration {} /  3 | elapsed time per iteration (ms): 4000.0 | tokens per GPU"
    line += " (tokens/s/GPU): 8192.0 | global batch size: 64 | lm loss: 9.1 |\n"
    found = row("".join(map(line.format, "123")), "--gpus", "8")
    assert found["tokens_per_s"] == 65_536


def test_a_slower_ranks_line_on_its_mesh_hides_no_model(row):
    sizes = "TransformerModelArgs(dim=4096, n_layers=4, n_heads=32, vocab_size=128256)"
    late = "[rank1] Building device mesh with parallelism: pp=1, dp_shard=4, cp=1, tp=1\n"
    found = row(f"[titan] Building llama3 8B with {sizes}\n{late}{TITAN}")
    assert found["model"]["hidden"] == 4096 and found["model"]["n_layer"] == 4
    assert found["gpus"] == 4


def test_the_runtime_that_newer_versions_print_in_each_line_times_the_steps(row):
    """A first step of 27 s, then 3.5 s a step, of 64 sequences of 1,024 tokens."""
    clock = "'epoch': {0}, 'num_input_tokens_seen': {1}, 'train_runtime': {2}, 'x': 1}}"
    lines = "".join(
        "{'loss': 2.5, " + clock.format(i / 40, i * 65_536, 27 + 3.5 * (i - 1)) + "\n"
        for i in [*range(1, 12), *range(31, 41)]
    )
    last = end(200.0, 12.8).replace("}", ", 'num_input_tokens_seen': 2621440}")
    found = row(header(40) + lines + last)
    assert (found["steady_step_s"], found["step_s_max"], found["steady_n"]) == (3.5, 27, 20)
    assert found["seq_len"] == 1024 and found["tokens_per_s"] == pytest.approx(65_536 / 3.5)
    coarse = row(header(40) + re.sub(r"'num_input\w+': \d+, |(?<=\.\d)\d+(?=, 'num)", "", lines))
    assert coarse["steady_step_s"] is None  # nothing tells how many steps lie between two lines
    history = [{"step": i, "loss": 2.5, "train_runtime": 27 + 3.5 * (i - 1)} for i in range(1, 31)]
    state = {"log_history": history, "max_steps": 40, "global_step": 30}
    running = row(json.dumps(state), name="trainer_state.json")
    assert (running["steady_step_s"], running["verdict"]) == (3.5, "stopped early")


RESULTS = {"epoch": 1.0, "train_loss": 2.0, "train_runtime": 1000.0, "train_samples": 6400}
RESULTS |= {"train_samples_per_second": 6.4, "train_steps_per_second": 0.1}


def trainer_state(steps=100, every=10, **known):
    history = [{"step": i, "loss": 2.0, "epoch": i / 100} for i in range(every, steps + 1, every)]
    history.append({"step": steps, **RESULTS, **known})
    state = {"global_step": steps, "max_steps": 100, "train_batch_size": 8, "log_history": history}
    return json.dumps(state, indent=2)


def test_what_the_trainer_saves_is_read(row, tmp_path, rows_of):
    flags = ("--global-batch", "64", *FLAGS)
    state = row(trainer_state(), *flags, name="trainer_state.json")
    results = row(json.dumps(RESULTS), *flags, name="all_results.json")
    (tmp_path / "trainer_state.json").unlink()
    for found in (state, results, row(json.dumps(RESULTS), *flags, name="train_results.json")):
        assert (found["steady_step_s"], found["samples_per_s"]) == (10, 6.4)
        assert found["tokens_per_s"] == pytest.approx(6553.6) and found["verdict"] == "complete"
    assert state["steps"] == results["steps"] == 10
    assert (state["micro_batch"], state["reasons"][0]) == (8, "100 of 100 iterations")
    (tmp_path / "trainer_state.json").write_text(trainer_state())
    (found,) = rows_of(tflops.main, tmp_path)
    assert "one run with " in " ".join(found["reasons"])


def test_a_trainers_state_says_how_far_it_came(row):
    early = row(trainer_state(60), name="trainer_state.json")
    assert "it ended at step 60 of 100" in early["said"]
    assert early["steady_step_s"] == pytest.approx(1000 / 60) and early["samples_per_s"] is None
    resumed = row(trainer_state(train_loss=0.2), name="trainer_state.json")
    assert resumed["steady_step_s"] is None and resumed["samples_per_s"] is None
    assert "train_loss is 0.2, and the losses are 2: it was resumed" in resumed["said"]
    running = json.loads(trainer_state(60))
    running["log_history"].pop()
    found = row(json.dumps(running), name="trainer_state.json")
    assert (found["verdict"], found["steady_step_s"]) == ("stopped early", None)


def test_the_progress_bar_of_a_killed_run_times_its_steps(tmp_path):
    bar = "\r {}%|##   | {}/200 [{:02d}:{:02d}<13:22,  4.22s/it]"
    text = ""
    for i in range(1, 101):
        drawn = bar.format(i // 2, i, *divmod(5 + 4 * i, 60))
        loss = f"{{'loss': {3 - i / 100}, 'learning_rate': 5e-06, 'epoch': {i / 200}}}\n"
        text += drawn + (loss + drawn if i % 10 == 0 else "")
        text += "\r 50%|###  | 5/10 [09:07<00:07,  1.42it/s]" if i == 50 else ""  # an evaluation
    (tmp_path / "job.out").write_text(text)
    record = read(tmp_path / "job.out")
    assert record.totals["step_s_mean"] == 4 and record.mean_of == "the time of its last 90 steps"
    (tmp_path / "job.out").write_text(text[: len(text) // 6])
    record = read(tmp_path / "job.out")
    assert not record.totals


@pytest.mark.parametrize("name", ["train_speed(s/it)", "train_speed(iter/s)"])
def test_ms_swifts_speed_of_all_steps_so_far_tells_the_time_of_each(tmp_path, name):
    means = {i: (30 + 4 * i) / i for i in range(10, 101, 10)}
    state = {"global_step": 100, "max_steps": 200}
    speeds = {i: round(mean if "s/it" in name else 1 / mean, 6) for i, mean in means.items()}
    state["log_history"] = [{"loss": 3.0, "step": i, name: speed} for i, speed in speeds.items()]
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    record = read(tmp_path / "trainer_state.json")
    assert record.steps["step_s"][1:] == pytest.approx(4, rel=1e-4) and record.engine == "ms-swift"
    if name == "train_speed(s/it)":  # once resumed, it is over the later steps alone
        state["log_history"] += [{"loss": 3.0, "step": i, name: 4.1} for i in (60, 70)]
        (tmp_path / "trainer_state.json").write_text(json.dumps(state))
        assert np.isnan(read(tmp_path / "trainer_state.json").steps["step_s"]).all()


def test_a_window_shows_no_number_of_the_whole_run(row):
    text = header() + losses() + end(10_000.0, 6.4)
    found = row(text, *FLAGS, "--window", "100:200")
    numbers = ("steady_step_s", "step_s_mean", "tokens_per_s", "samples_per_s", "tflops")
    assert [found[name] for name in numbers] == [None] * 5
    assert "of the whole run alone, not of iterations" in found["missing"]["tokens_per_s"]


PACKED = {  # what stands before the first step -> the setting that packs documents
    "  reset_attention_mask ....... True\n": "reset_attention_mask",
    "  reset_attention_mask ....... False\n": None,
    "python pretrain_gpt.py --reset-attention-mask \\\n": "reset_attention_mask",
    "sample_packing: true\n": "sample_packing",
    "packing=True,\n": "packing",
    "dataset:\n  packed: False\n": None,
    "packed documents are read\n": None,
}


@pytest.mark.parametrize(("setting", "name"), PACKED.items(), ids=PACKED)
def test_tflops_of_packed_documents_say_which_attention_they_assume(row, setting, name):
    sizes = dict(num_layers=4, hidden_size=512, num_attention_heads=8, padded_vocab_size=50304)
    sizes |= dict(seq_length=2048, max_position_embeddings=2048, world_size=8)
    dump = "".join(f"  {key} .... {size}\n" for key, size in sizes.items())
    line = (
        " iteration {:8d}/ 20 | elapsed time per iteration (ms): 1000.0 | global batch size: 8 |\n"
    )
    text = dump + setting + "".join(map(line.format, range(1, 21)))
    found = row(text)
    config = GPTConfig(n_layer=4, hidden=512, n_head=8, vocab_size=50304, max_seq_len=2048)
    whole, parts = (tflops_per_gpu(config, seen, 8 * 2048, 1.0, 8) for seen in (2048, 256))
    assert found["tflops"] == pytest.approx(whole)
    doubt = f"packed ({name}), and attention is counted over whole sequences"
    assert (doubt in found["said"]) == bool(name)
    found = row(text, "--attended-seq-len", "256")
    assert found["tflops"] == pytest.approx(parts) and "packed" not in found["said"]
    found = row(text, "--attended-seq-len", "4096")
    assert "above the 2048 tokens of a sequence" in found["missing"]["tflops"]
    stated = "attention stops there, at id 0, as if sequences had 256 tokens\n"
    assert row(stated + text)["tflops"] == pytest.approx(parts)
