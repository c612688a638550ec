"""Every log format is read, whatever stands around its lines; what is no log is refused."""

import gzip
import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest

from analysis import tflops
from analysis.logs import readers
from analysis.logs.load import load, read_all
from analysis.logs.parsing import lines
from analysis.logs.parsing.facts_elsewhere import from_name
from analysis.logs.parsing.logfile import Log
from analysis.logs.readers import NAMES, nanogpt, read
from analysis.logs.record import Refusal
from analysis.logs.step_time import timed
from analysis.runs.throughput import time_missing
from analysis.runs.verdict import judge
from base.errors import UsageError
from parallel.config.resolve import resolve
from parallel.record.lines import iteration_line
from tests.conftest import ROOT
from tests.tools import spoil
from tests.tools.mlperf_tree import line as mlperf


def megatron(iteration, ms=1000.0, planned=100, loss=2.5):
    return (
        f" iteration {iteration:8d}/{planned:8d} | consumed samples: {iteration * 8:12d} |"
        f" elapsed time per iteration (ms): {ms:.1f} | learning rate: 1.0E-04 | global batch size:"
        f"     8 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 1.250 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )


def iterations(numbers, ms=1000.0, **how):
    return "".join(megatron(i, ms + i, **how) for i in numbers)


RUN = "".join(megatron(i, ms=1000.0 + i, loss=3.0 - i / 100) for i in range(1, 41))


@pytest.fixture
def log(tmp_path):
    def write(content, name="job.out"):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def times(record):
    return record.steps["step_s"].tolist()


LINES = tomllib.loads((ROOT / "tests" / "log_lines.toml").read_text())
FORMATS = {kind: (row.pop("line"), row) for kind, row in LINES.items()}


@pytest.mark.parametrize("kind", FORMATS)
def test_a_line_of_each_format_is_read(log, kind):
    line, expected = FORMATS[kind]
    record = read(log(line))
    assert len(record.steps) == 1
    found = {name: record.steps[name][0] for name in expected}
    assert found == pytest.approx(expected)


def test_tokens_without_padding_give_a_rate_but_no_step_time(log):
    record = read(log(FORMATS["torchtune"][0]), {"gpus": 2, "global_batch": 4, "seq_len": 256})
    assert record.steps["tokens_per_s"].tolist() == [2 * 9077.15] and timed(record) is None


@pytest.mark.parametrize(
    ("kind", "line", "flags", "step_s"),
    [
        ("InternEvo", "tflops=.*", {"gpus": 32}, 524288 / (32 * 3345.72)),
        ("XTuner through mmengine", ".*Iter.*", {"n_micro": 4}, 4 * 16.4075),
        ("XTuner through mmengine", ".*Iter.*", {}, None),
        ("NeMo AutoModel", ".*label.*", {"global_batch": 512, "seq_len": 1024}, None),
    ],
)
def test_the_flag_that_a_printed_rate_lacks_gives_the_step_time(log, kind, line, flags, step_s):
    line = re.search(line, FORMATS[kind][0])[0] + "\n"
    found = read(log(line), flags).steps["step_s"][0]
    assert found == pytest.approx(step_s or np.nan, nan_ok=True)


def test_steps_of_as_many_tokens_each_are_timed_by_their_rate(log):
    line = "step {} | epoch 0 | loss 9.5 | grad_norm 2 | mem 38.63 GiB | tps {}(9.5/gpu)"
    for tokens, expected in (
        ((524288, 524288), [524288 / 131072, 524288 / 262144]),
        ((524288, 524000), [None, None]),
    ):
        lines = (
            line.format(i, 131072 * i) + f" | num_label_tokens {n}\n"
            for i, n in enumerate(tokens, 1)
        )
        record = read(log("".join(lines)), {"global_batch": 512, "seq_len": 1024})
        assert [None if np.isnan(s) else s for s in times(record)] == expected


def test_a_rank_has_no_rate_where_that_of_all_ranks_is_printed_as_its_own(log):
    text = FORMATS["NeMo-RL"][0].replace("(338.67 ", "(2709.39 ")
    record = read(log(text))
    assert np.isnan(record.steps["tflops"]).all() and record.gpus == 8
    assert np.isnan(record.steps["mfu"]).all()
    assert any("as those of all ranks" in note for note in record.notes)


def test_composers_gpus_follow_from_a_rate_of_all_over_that_of_one(log):
    line = FORMATS["Composer"][0]
    of_samples = "\n".join(row for row in line.split("\n") if "tokens_per_sec" not in row)
    of_samples = of_samples.replace(
        ": 12.8000", ": 12.8\n\t Train throughput/device/samples_per_sec: 1.6"
    )
    assert read(log(line)).gpus == read(log(of_samples)).gpus == 8
    stated = "num_nodes: 2\nnum_gpus_per_node: {}\n"
    assert read(log(stated.format(4) + line)).gpus == 8
    record = read(log(stated.format(8) + line))
    assert record.gpus is None and "are of 8, but it states 2 nodes of 8" in record.doubts["gpus"]


def test_torchtunes_bar_says_how_far_it_came_and_how_long_a_step_took(log):
    bars = [
        f"1|{i}|Loss: 1{i}.5: 99%|##| {i}/12 [{i:02d}:00<00:00, 60.0s/it]" for i in range(1, 13)
    ]
    bars.append(bars[-1].replace("[12:00", "[15:00"))  # with the time of a checkpoint
    for epochs, text, completed in ((1, bars, True), (1, bars[:9], False), (2, bars, False)):
        record = read(log(f"epochs: {epochs}\n" + "\r".join(text) + "\n"))
        assert record.completed is completed and record.totals["step_s_mean"] == 60
    short = read(log("1|12|Loss: 1.5: 99%|##| 12/12 [01:39<00:00,  8.2s/it]\n"))
    assert "step_s_mean" not in short.totals
    assert "to 1 s, tells 99 s: too few" in time_missing(short)


@pytest.mark.parametrize("kind", ["Megatron-LM of Apertus", "Megatron-LLaMA"])
def test_the_fields_of_a_fork_do_not_change_its_name(log, kind):
    assert read(log(FORMATS[kind][0])).engine == "Megatron-LM"


def test_ranks_are_counted_if_none_is_missing_and_one_of_them_is_read(log):
    text = FORMATS["InternLM of July 2023"][0]
    assert read(log(text)).gpus == 2
    assert read(log(text.replace("dp=0=", "dp=2="))).gpus is None
    several = "[XTuner][RANK 1]" + FORMATS["XTuner"][0].strip().partition("[RANK 0]")[2]
    assert len(read(log(FORMATS["XTuner"][0] + several)).steps) == 1


def test_differences_of_a_cumulative_clock_are_step_times(log):
    line = "step:{}/3 train_loss:9.0 train_time:{}ms step_avg:{}ms\n"
    lines = [line.format(*numbers) for numbers in ((1, 35000, "nan"), (2, 200, 100), (3, 300, 100))]
    source = 'print(f"step:{step}/{n} train_time:{ms:.0f}ms step_avg:{ms/(step):.2f}ms")\n'
    record = read(log(source + "".join(lines)))
    assert np.isnan(record.steps["step_s"][:2]).all() and record.steps["step_s"][2] == 0.1
    assert record.step_stats()["mean"] == 0.1 and record.completed


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_batch_follows_from_consumed_samples_where_no_line_prints_it(log, ranks):
    lines = [re.sub(r" global batch size:[^|]*[|]", "", megatron(i)) for i in range(1, 20)]
    lines = "".join("".join(f"{rank}: {line}" for rank in range(ranks)) for line in lines)
    record = read(log(lines))
    assert len(record.steps) == 19 and record.steps["sequences"][1:].tolist() == [8] * 18
    assert record.global_batch == 8
    assert read(log(lines.split("\n")[0] + "\n")).global_batch is None


NO_NUMBERS = ["", *"nan -nan(ind) inf 1e400 99999999999999999999 -1 0 1.2.3 x".split()]
A_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?(?!\w|\.\d)")


@pytest.mark.parametrize("kind", FORMATS)
def test_whatever_stands_where_a_number_belongs_the_file_is_read_or_refused(log, kind):
    line, _ = FORMATS[kind]
    for number in A_NUMBER.finditer(line):
        others = [line[: number.start()] + value + line[number.end() :] for value in NO_NUMBERS]
        for text in (line + "".join(others), "".join(others) + line):
            try:
                timed(read(log(text)))
            except Refusal as refusal:
                assert "\n" not in str(refusal)


def series(values):
    """A metric of Megatron-LM's golden values."""
    return {"start_step": 1, "end_step": 3, "step_interval": 1, "values": values}


def test_golden_values_leave_out_what_is_not_a_number(log):
    content = {"lm loss": series({"1": 10.5, "2": 10.4, "3": 10.3})}
    content["iteration-time"] = series({"1": "nan", "2": 8.5, "3": 0.95})
    record = read(log(json.dumps(content), "golden.json"))
    assert record.steps["iteration"].tolist() == [2, 3] and times(record) == [8.5, 0.95]
    content = {str(i): {"lm loss": 9.0, "elapsed time per iteration (ms)": 200.0} for i in (0, 1)}
    record = read(log(json.dumps(content | {"alloc": 81.9}), "golden.json"))  # by step
    assert record.steps["iteration"].tolist() == [0, 1] and times(record) == [0.2, 0.2]


def test_a_loss_of_nan_outside_of_iteration_lines_is_counted_and_diverged(log):
    golden = {"lm loss": series({"1": 10.5, "2": 10.4, "3": "nan"})}
    golden |= {"iteration-time": series({"1": 9.0, "2": 8.5, "3": 0.95})}
    losses = "".join(mlperf(3000, "eval_loss", value) for value in (2.5, float("nan")))
    run = mlperf(2000, "run_start") + losses + mlperf(62000, "run_stop", status="success")
    for text, name, count in (
        (json.dumps(golden), "golden.json", "1 of 3 iterations"),
        (run, "result_0.txt", "1 times"),
    ):
        judged = judge(read(log(text, name)))
        (flag,) = (flag.text for flag in judged.doubts if flag.kind == "loss")
        assert judged.verdict == "diverged" and count in flag, name


@pytest.mark.parametrize("loss", ["NaN", "Infinity"])
def test_a_last_loss_that_is_jsons_nan_or_infinity_is_diverged(log, loss):
    line, _ = FORMATS["NeMo DLLogger"]
    later = line.replace('"step": 4', '"step": 5').replace("11.0", loss)
    assert judge(read(log(line + later))).verdict == "diverged"


PREFIXES = (b"1: ", b"vm-07: ", b"[default7]:", b"2024-05-14 10:22:15,123 INFO ", b"\xff\xfe\x00 ")
PREFIXES += (b"\x1b[32m[rank-7/8]\x1b[0m ", b"\x1b[32m")
NUMBERED = ("Megatron-LM", "Megatron-LM in seconds", "Megatron-DeepSpeed", "GPT-NeoX", "nanotron")
NUMBERED += ("DeepSpeed pipeline", "torchtitan", "nanoGPT", "nanochat", "llm.c", "MaxText")
NUMBERED += ("torchtune", "Composer", "OLMo", "OLMo-core", "Megatron-LLaMA")
NUMBERED += ("XTuner through mmengine", "NeMo AutoModel", "NeMo-RL")


@pytest.mark.parametrize("kind", ("nanoGPT", "nanotron", "torchtitan", "DeepSpeed pipeline"))
def test_a_cut_number_is_no_number(log, kind):
    line, expected = FORMATS[kind]
    for cut in range(len(line) - 1):
        try:
            record = read(log(line + line[:cut], "cut.out"))
        except Refusal:
            continue
        for name, value in expected.items():
            known = record.steps[name][:2]
            assert np.isnan(known[-1]) or known[-1] == pytest.approx(value), (cut, name)


CUT = {  # a line -> the value that is unknown for it, in a log of what stands around it
    "  seq_length ..................... 20time to load\n": "seq_len",
    "  seq_length ..................... 20  hidden_size ......... 64\n": "seq_len",
    "  seq_length ..................... 8,192\n": "seq_len",
    "using world size: 20\n": "gpus",
}


@pytest.mark.parametrize("line", CUT)
def test_a_cut_setting_is_unknown(log, line):
    assert getattr(read(log(line + RUN)), CUT[line]) is None


def test_a_number_of_megatrons_that_is_none_is_unknown_and_counted(log):
    for ms, loss in (("1time to load", "9.90E+00"), ("9853,7", "9.90E+00"), ("6.9k", "9.9")):
        text = RUN.replace("(ms): 1002.0", f"(ms): {ms}").replace("2.980000E+00", loss)
        record = read(log(text))
        assert len(record.steps) == 39 and "2" not in record.steps["iteration"]
    record = read(log(RUN.replace("2.980000E+00", "2,98000E+00")))
    assert np.isnan(record.steps["loss"][1]) and record.steps["loss"][2] == 2.97
    (doubt,) = judge(record).doubts
    assert doubt.text == "what is cut or no whole number is unknown: loss (1)"


def test_one_word_in_a_line_does_not_change_the_program(log):
    fork = RUN.replace(
        "| learning rate", "| iteration time: 4.0 s samples/sec: 16.0 | learning rate"
    )
    record = read(log(fork))
    assert record.format == "Megatron-LM" and record.steps["samples_per_s"][0] != 16.0
    assert read(log("samples/sec: 16.0 |" + RUN, "neox.out")).format == "GPT-NeoX"


def test_two_runs_in_one_file_are_no_ranks_of_one(log):
    for who in (("", ""), ("0: ", "1: ")):
        for other_s, in_doubt in ((10.4, False), (5.0, True)):
            pairs = (
                (who[0] + megatron(i, ms=1e4), who[1] + megatron(i, ms=1e3 * other_s))
                for i in range(1, 11)
            )
            record = read(log("".join(line for pair in pairs for line in pair)))
            assert record.steps["step_s"].tolist() == [10.0] * 10
            said = "lines of the same iterations take 5 s and 10 s: are they of one run?"
            assert [text.startswith(said) for text in record.doubts.values()] == [True] * in_doubt


def test_a_step_time_of_zero_is_unknown(log):
    text = "".join(megatron(i, ms=10_000.0 * (i % 2)) for i in range(1, 41))
    record = read(log(text))
    assert timed(record).step_s == 10.0
    (doubt,) = (flag.text for flag in judge(record).doubts)
    assert doubt == "20 values of step_s are zero, negative or infinite: unknown"
    header = (
        "block_size = 1024\nnumber of parameters: 123.59M\ntokens per iteration will be: 491,520\n"
    )
    steps = (f"iter {i}: loss 9.1, time 0.00ms, mfu 22.82%\n" for i in range(1, 41))
    record = read(log(header + "".join(steps)))
    assert record.model["n_layer"] == 12 and record.gpus is None and timed(record) is None


TITAN = """[titan] Building 1-D device mesh with ['dp_shard'], [16]
[titan] Training starts at step 1, with local batch size 4, global batch size 64, {end}
"""


@pytest.mark.parametrize(
    ("end", "line", "unknown"),
    [
        ("sequence length 8192, total steps 4 (warmup 2)", "loss: 7.9  memory: 60.1GiB(75%)", ""),
        ("sequence length 8", "loss: 7.9  memory: 60.1GiB(75%)", "seq_len (1)"),
        (
            "sequence length 8192, total steps 4 (warmup 2)",
            "loss: 11,8812  memory: 60,10GiB(75,25%)",
            "loss (4), peak_gib (4), tokens_per_s_per_gpu (4)",
        ),
    ],
)
def test_torchtitans_numbers_count_as_they_are_printed_or_not_at_all(log, end, line, unknown):
    steps = (f"step: {i}  {line}  tps: 3,3{i}8  mfu: 30.01%\n" for i in range(1, 5))
    record = read(log(TITAN.format(end=end) + "".join(steps)))
    known = 64 * 8192 / (16 * np.array([3318, 3328, 3338, 3348]))
    assert times(record) == pytest.approx([np.nan] * 4 if unknown else known, nan_ok=True)
    assert record.doubts.get("numbers", "").endswith(unknown) and bool(record.doubts) == bool(
        unknown
    )


def test_a_last_line_without_its_newline_counts_when_every_field_is_there(log):
    numbers = {"nanotron": "n: 2", "nanoGPT": "iter 10", "nanochat": "122", "torchtitan": "p: 10"}
    for kind, number in numbers.items():
        line, _ = FORMATS[kind]
        last = line.splitlines(keepends=True)[-1].replace(number, number[:-1] + "9")
        record = read(log(line + last[:-1], "end.out"))
        assert len(record.steps) == 2 and not np.isnan(record.steps["loss"]).any(), kind


@pytest.mark.parametrize(
    "twice", (lambda text: text * 2, lambda text: re.sub("(.*\n)", r"\1\1", text))
)
def test_lines_without_a_number_count_once_too(log, twice):
    losses = "".join(f"{{'loss': 2.{i}, 'learning_rate': 5e-06, 'epoch': 0.{i}}}\n" for i in "123")
    chat = "".join(
        f"epoch: 0|step: {i}|ppo_ep: 1|\n|E2E latency=3.80s |x=1 |CurSamplesPerSec=8.0\n"
        for i in range(3)
    )
    for text in (losses, chat):
        assert len(read(log(twice(text))).steps) == len(read(log(text, "plain.out")).steps) == 3


def test_steps_of_a_restart_are_no_duplicates_where_only_a_rate_is_printed(log):
    line = "0/{}, RunningAvgSamplesPerSec=16.1, CurrSamplesPerSec={}\n"
    lines = [line.format(i, rate + i / 100) for rate in (15, 16) for i in range(200, 2000, 200)]
    record = read(log("".join([*lines, lines[-1]])))
    assert len(record.steps) == 18 and "1 duplicate lines dropped" in record.notes


def test_lines_that_other_formats_print_too_do_not_hide_those_between_them(log):
    line = "0/{}, RunningAvgSamplesPerSec=16.1, CurrSamplesPerSec=16.2\n" + "loading\n" * 40_000
    assert read(log(line.format(1) + RUN + line.format(2))).format == "Megatron-LM"


@pytest.mark.parametrize(("ranks", "note"), [((0, 0), "duplicate"), ((0, 1), "")])
def test_lines_that_several_ranks_print_count_once(log, ranks, note):
    lines = "".join(f"{rank}:{megatron(i, 1000.0 + rank)}" for i in range(1, 9) for rank in ranks)
    record = read(log(lines))
    assert record.steps["iteration"].tolist() == list(range(1, 9)) and set(times(record)) == {1.0}
    assert note in " ".join(record.notes)


def test_where_iterations_do_not_follow_each_other_it_is_noted(log):
    resumed = read(log(iterations((50, 51, 52, 60)), "a.out"))
    assert "resumed" in " ".join(resumed.notes) and "1 gaps" in " ".join(resumed.notes)
    every_ten = read(log(iterations((10, 20, 30)), "b.out"))
    assert every_ten.interval == 10 and not every_ten.notes
    two = read(log(iterations((1, 2)).replace("\n", "")))
    assert two.steps["iteration"].tolist() == [1, 2] and times(two) == [1.001, 1.002]
    again = read(log(iterations(range(1, 7)) + "restarting\n" + iterations(range(4, 9), 1200.0)))
    assert again.steps["iteration"].tolist() == [1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8]
    assert again.doubts == {"restart": "line 8: iterations go back from 6 to 4"}


def test_source_code_in_a_log_is_not_read(log):
    source = (
        'log_string = " iteration {:8d}/{:8d} | elapsed time per iteration (ms): {:.1f} |"\n'
        "print(f' | lm loss: {loss:.6E} | grad norm: {norm:.3f} |')\n"
    )
    assert times(read(log(source + RUN + source))) == times(read(log(RUN, "plain.out")))


DUMPS = {
    "dots": "1:   {} ........................ {}\n",
    "yaml": "    {}: {}\n",
    "assignment": "[Adapter] known_args[{}] = {}\x1b[0m\n",
    "json": '    "{}": {},\n',
    "neox": "  {} .............. {}.........................updated\n",
}


@pytest.mark.parametrize("form", DUMPS)
def test_argument_dumps_of_every_form_are_read(log, form):
    arguments = {"world_size": 64, "tensor_model_parallel_size": 4, "num_layers": 48}
    arguments |= {"pipeline_model_parallel_size": 8, "micro_batch_size": 2, "hidden_size": 8192}
    record = read(log("".join(DUMPS[form].format(*item) for item in arguments.items()) + RUN))
    assert (record.gpus, record.tp, record.pp, record.micro_batch) == (64, 4, 8, 2)
    assert record.model == {"n_layer": 48, "hidden": 8192} and record.origin["tp"] == "log"


STATED = tomllib.loads((ROOT / "tests" / "log_facts.toml").read_text())


@pytest.mark.parametrize("case", STATED)
def test_what_a_log_states_is_read(log, case):
    facts = dict(STATED[case])
    text, words, unknown = facts.pop("text"), facts.pop("notes", []), facts.pop("unknown", [])
    facts |= dict.fromkeys(unknown)
    record = read(log(text))
    assert {name: getattr(record, name) for name in facts} == facts
    assert all(word in " ".join(record.notes) for word in words)


CLOCKS = {
    "MaxText's host enqueues step 1; total_weights of all devices": [np.nan, 5.658, 5.402],
    "LLaMA-Factory's throughput is a finer clock": [0.3, 0.2, 0.2],
    "OLMo's GPUs follow from the tokens of a batch": [1 / 0.0869, 1 / 0.0865],
}


@pytest.mark.parametrize("case", CLOCKS)
def test_step_times_follow_from_what_a_log_states(log, case):
    np.testing.assert_allclose(times(read(log(STATED[case]["text"]))), CLOCKS[case])


DIED = {
    "slurm_script: line 12: torchrun: command not found\n": "launcher",
    'Traceback (most recent call last):\n  File "t.py", line 9, in <module>\nE: no\n': "traceback",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB\n": "oom",
    "slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 2021-05-23T08:46:02 ***\n": "cancelled",
    "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:1, unhandled system error\n": "nccl",
    "[rank3]:[E519 13:57:38.633000000 ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught"
    " collective operation timeout\n": "nccl",
    "KeyboardInterrupt\n": "cancelled",
}


@pytest.mark.parametrize("line", DIED)
def test_the_line_that_proves_how_a_run_ended_is_found(log, line):
    kind = DIED[line]
    if kind != "launcher":  # nothing was trained
        failure = read(log(RUN + line)).failure
        assert failure.kind == kind and failure.line_no >= 41
    for before in ("", "\x1b[32m", "gpu-29: "):
        text = "loading\n" + "".join(f"{before}{part}\n" for part in line.splitlines())
        if "NCCL error" not in line and "Keyboard" not in line:  # these alone are no run
            assert read(log(text)).failure.kind == kind
    with pytest.raises(Refusal, match="no format that is known"):
        read(log(f"When it says `{line}`, then the run died.\n", "page.txt"))


NO_FILE = "FileNotFoundError: [Errno 2] No such file or directory: 'data/x.bin'"


@pytest.mark.parametrize("who", ("", "0: ", "[rank0]:", "\x1b[31m"))
@pytest.mark.parametrize(
    "raised", (NO_FILE, "torch.distributed.DistStoreError: x", "AssertionError")
)
def test_a_traceback_is_shown_by_what_it_raised(log, who, raised):
    quoted = "    raise RuntimeError('KeyError: in the code, not raised')"
    lines = ["Traceback (most recent call last):", '  File "t.py", line 9, in <module>', quoted]
    text = "".join(f"{who}{line}\n" for line in [*lines, raised, "ValueError: a later one"])
    failure = read(log("loading\n" + text)).failure
    assert (failure.kind, failure.line_no) == ("traceback", 2)
    shown = who.replace("\x1b[31m", "")
    assert failure.line.endswith(f"(most recent call last), line 5: {shown}{raised}")
    cut = read(log("loading\n" + "".join(f"{who}{line}\n" for line in lines), "cut.out")).failure
    assert cut.line_no == 2 and cut.line.endswith("Traceback (most recent call last):")


@pytest.mark.parametrize(
    ("due", "kind"),
    [("TIME LIMIT", "timeout"), ("NODE FAILURE", "node"), ("PREEMPTION", "cancelled")],
)
def test_slurms_words_without_its_frame_prove_no_end(log, due, kind):
    prose = f"sbatch: a job is CANCELLED AT 2024 DUE TO {due}\n*** JOB titles ***\n"
    assert read(log(RUN + prose)).failure is None
    stepless = read(log(prose, "notes.out"))  # sbatch's line: a job's output, of no known end
    assert stepless.failure is None and "no format that is known" in stepless.notes[-1]
    framed = f"{RUN}{prose}*** STEP 1.0 ON n1 CANCELLED AT 2021-05-24T09:50:34 DUE TO {due} ***"
    failure = read(log(framed, "framed.out")).failure
    assert (failure.kind, failure.line_no) == (kind, 43)


def test_a_traceback_after_completion_is_no_failure(log):
    finished = iterations(range(1, 41), planned=40)
    record = read(log(finished + "Traceback (most recent call last):\nOSError: plots\n"))
    assert record.completed and record.failure is None
    assert any("after the run had completed" in note for note in record.notes)


def test_a_run_that_died_before_its_first_iteration_is_a_run(log):
    text = "using world size: 16, data-parallel-size: 16\n  seq_length ........ 2048\n"
    text += "CUDA out of memory. Tried\n"
    record = read(log(text))
    assert record.format == "Megatron-LM" and record.failure.line_no == 3
    assert record.gpus == 16 and record.seq_len == 2048 and len(record.steps) == 0


def test_a_fact_keeps_its_strongest_origin(log):
    name = "61B-megatron-mbs-2-pp16-dp-1-gas-512-200977.out"
    facts = {"params": 61e9, "micro_batch": 2, "pp": 16, "dp": 1, "n_micro": 512}
    assert from_name(name) == facts
    path = log("  micro_batch_size ...... 4\n" + RUN, name)
    path.with_name(name + ".toml").write_text("gpus = 64\nmicro_batch = 8\nhidden = 1024\n")
    record = read(path, flags={"dp": 2})
    origins = {"micro_batch": (4, "log"), "gpus": (64, "sidecar"), "dp": (2, "flag")}
    origins["pp"] = (16, "from name")
    assert {name: (getattr(record, name), record.origin[name]) for name in origins} == origins
    assert record.model["hidden"] == 1024
    assert "micro_batch: log says 4, sidecar says 8" in record.notes


BAD = {
    "empty": ("", "empty file"),
    "prose": ("Nothing was trained here.\n", "no format that is known"),
    "a profile": ("Time (%)  Total Time (ns)\n", "a profile, no log"),
    "bars": ("\r 10%|# | 1/10 [00:01<00:09, 1.2it/s]", "only progress bars"),
    "golden": ('{"lm loss": {"start_step": 1, "step_interval": 1, "values": {', "damaged"),
    "metrics": ('{"schema_version": "2.0", "epochs": [], "training_config": {', "damaged"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_read_is_refused_in_one_line(log, kind):
    content, reason = BAD[kind]
    path = log(content)
    with pytest.raises(Refusal, match=reason) as refusal:
        read(path)
    assert str(refusal.value).startswith(str(path)) and "\n" not in str(refusal.value)


ROOMS = ("analysis", "benchmarks", "models", "parallel", "slurm", "tests")


def test_no_file_of_the_repository_but_its_logs_is_a_run():
    files = [p for room in ROOMS for p in (ROOT / room).rglob("*") if "__pycache__" not in p.parts]
    files += [p for p in ROOT.iterdir() if p.is_file()]
    records, _ = read_all([path for path in files if path.is_file()], jobs=1)
    assert len(files) > 300 and [record.source for record in records] == []


def test_a_page_that_quotes_a_log_is_no_log(log, tmp_path):
    with pytest.raises(Refusal, match="code or a page by its name"):
        read(log(RUN, "page.rst"))
    with pytest.raises(UsageError, match="no logs in this folder"):
        load([tmp_path])


@pytest.mark.parametrize("command", ("tflops", "scaling", "compare"))
def test_a_table_reads_each_log_once(log, monkeypatch, command):
    paths = [str(log(RUN, f"n{gpus}-gpus{gpus}.out")) for gpus in (1, 2, 4, 8)]
    opened, read_it = [], Log.__init__
    monkeypatch.setattr(Log, "__init__", lambda *at: (opened.append(at[1]), read_it(*at))[1])
    flags = paths[:2] if command == "compare" else [*paths, "--baseline", "n1-gpus1.out"]
    importlib.import_module(f"analysis.{command}").main(flags)
    assert opened and sorted(opened) == sorted(set(opened))


@pytest.mark.parametrize("jobs", (1, 2))
def test_a_readers_own_defect_refuses_its_file_and_shows_the_others(log, monkeypatch, jobs):
    monkeypatch.setitem(vars(nanogpt.FORMAT), "prepare", lambda *_: [][1])
    good, bad = log(RUN, "good.out"), log(FORMATS["nanoGPT"][0], "bad.out")
    records, (refusal,) = read_all([bad, good], jobs=jobs)
    assert [record.source for record in records] == [str(good)]
    assert refusal.source == str(bad) and "\n" not in refusal.reason
    assert re.search(
        r"a defect of the reader.* IndexError: .*\(test_readers\.py:\d+", refusal.reason
    )


def test_a_line_of_50_megabytes_is_read(log):
    filler = "x" * 5000
    path = log("".join(megatron(i).rstrip("\n") + filler for i in range(1, 10_001)))
    assert path.stat().st_size > 50e6 and len(read(path).steps) == 10_000


def test_the_same_bytes_in_two_files_are_noted(log, tmp_path):
    for folder in "abc":
        (tmp_path / folder).mkdir()
    for name, text in (
        ("a/x.log", RUN),
        ("b/x.log", RUN),
        ("c/x.log", RUN.replace("1001.0", "1009.0")),
    ):
        log(text, name)
    a, b, c = load([tmp_path])[0]
    assert (a.copy_of, b.copy_of, c.copy_of) == ("", str(tmp_path / "a/x.log"), "")
    assert b.notes[-1].startswith(f"the same evidence as {tmp_path / 'a/x.log'} (SHA-256 ")


def test_an_edited_copy_that_is_named_by_itself_is_no_repeat(log):
    times = [1.0, 1.1, 1.3, 1.2, 1.1, 1.4]
    text = "".join(megatron(i, ms=1000 * time) for i, time in enumerate(times, 1))
    first, edited = log(text, "a.log"), log("a line more\n" + text, "b.log")
    few = log("".join(text.splitlines(keepends=True)[:4]), "few.log")
    alike = log("".join(megatron(i, ms=1000) for i in range(1, 7)), "alike.log")
    again = log("a line more\n" + alike.read_text(), "again.log")
    copies = [r.copy_of for r in load([first, edited, few, alike, again])[0]]
    assert copies == ["", str(first), "", "", ""]  # equal times prove nothing, nor do few


def test_links_that_form_a_loop_end_and_each_log_is_read_once(log, tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    path = log(RUN, "a/b/job.out")
    links = {"a/b/up": tmp_path / "a", "a/again": path.parent, "a/itself": "itself"}
    for name, target in (links | {"out": tmp_path.parent, "gone.out": "nothing"}).items():
        (tmp_path / name).symlink_to(target)
    records, refused = read_all([tmp_path])
    assert [record.source for record in records] == [str(path)]
    assert list(map(str, refused)) == [f"{tmp_path / 'gone.out'}: No such file or directory"]


@pytest.mark.parametrize("name", ("x" * 300, "/".join(["d" * 200] * 30), "a\0b", "pipe"))
def test_a_path_that_no_system_takes_or_nobody_writes_is_refused_in_one_line(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    records, (refusal,) = read_all([tmp_path / name])
    assert records == [] and "\n" not in refusal.reason


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("job.out.toml", "gpu = 64", "unknown key gpu"),
        ("job.out.toml", "gpus = 'many'", "cannot be"),
        ("job.out.toml", "engine = 5", "cannot be"),
        ("run.json", "null", "no table"),
    ],
)
def test_what_stands_beside_a_log_in_a_wrong_type_is_refused(log, name, content, why):
    path = log(RUN)
    path.with_name(name).write_text(content)
    with pytest.raises(Refusal, match=why):
        read(path)


BAR = b"\r 10%|#   | 1/10 [00:01<00:09,  1.20it/s]\r"
CHANGES = (
    spoil.NEUTRAL
    | spoil.NEUTRAL_OF_LINES
    | {
        "blank lines before": (rb"\A", b"\n" * 70_000),
        "zero bytes behind": (rb"\Z", bytes(200_000)),
        "bars behind": (rb"\Z", BAR * 4000),
        "source behind": (rb"\Z", b"loss: {loss} iter {i}/{n} |\n"),
    }
)
del CHANGES["no final newline"], CHANGES["rank prefix"]  # the last number may be cut; see above
CHAT = "".join(
    f"Epoch: 0 | Step: {i} | PPO Epoch: 1 | Actor Loss: 0.{i}\n"
    f"End-to-End => Latency: 3.4{i}s, TFLOPs: 4.02, Samples/sec: 9.22, Time/seq 0.11s\n"
    for i in range(5)
)
WHOLE = {kind: FORMATS[kind][0] for kind in NUMBERED} | {
    "Megatron-LM of many lines": RUN,
    "DeepSpeed-Chat that ended": CHAT
    + "[INFO] [launch.py:347:main] Process 9 exits successfully.\n",
    "a failure": "loading\n" + list(DIED)[2],
}


def facts(path):
    record = read(path)
    record.steps["at"] = 0
    differ = ("source", "failure", "last_at", "last_line")  # a line more moves what follows
    columns = {k: str(v) for k, v in vars(record).items() if k not in differ}
    return columns, record.failure and (record.failure.kind, record.failure.line)


@pytest.mark.parametrize("kind", WHOLE)
def test_bytes_that_say_nothing_change_nothing(log, kind):
    text = WHOLE[kind].encode()
    plain = facts(log(text, "plain.out"))
    prefixes = {prefix: (rb"(?m)^(?=.)", prefix) for prefix in PREFIXES if kind in NUMBERED}
    for name, change in (CHANGES | prefixes).items():
        assert facts(log(re.sub(*change, text), "other.out")) == plain, name


@pytest.mark.parametrize("bytes_a_step", [0, 10**9])  # every block has few steps, or none has
def test_where_blocks_end_and_how_many_steps_they_have_changes_nothing(
    log, monkeypatch, bytes_a_step
):
    noise = "".join(f"[rank{i}] something else is printed here\n" for i in range(40))
    for kind, text in WHOLE.items():
        path = log(text.replace("\n", "\n" + noise, 1) + noise, f"{len(kind)}.out")
        whole = read(path)
        with monkeypatch.context() as small:
            small.setattr(Log.blocks, "__defaults__", (0, None, 700))
            small.setattr(lines, "_SPARSE", bytes_a_step)
            in_blocks = read(path)
        assert in_blocks.steps.tobytes() == whole.steps.tobytes(), kind
        assert str(in_blocks.reasons) == str(whole.reasons), kind


def test_the_page_on_formats_shows_a_reader_as_it_is():
    page = (ROOT / "docs" / "read-logs.md").read_text()
    (shown,) = re.findall(r"```python\n(_ITERATION.*?)```", page, re.DOTALL)
    folder = Path(readers.__file__).parent
    assert shown in (folder / "nanogpt.py").read_text()
    names = [importlib.import_module(f"{readers.__name__}.{name}").FORMAT.name for name in NAMES]
    assert [name for name in names if name not in page] == []


def test_our_own_iteration_lines_are_read_with_all_that_stands_behind_megatrons_fields(log):
    sizes = {"preset": "1.7b", "global_batch": 128, "micro_batch": 8, "precision": "bf16"}
    spec = resolve(("x", {**sizes, "steps": 3}))
    row = {"step_s": 100.0, "loss": 5.5, "grad_norm": 1.25, "lr": 1e-3, "loss_scale": 1.0}
    gpu = "NVIDIA A100-SXM4-80GB"
    lines = [iteration_line(spec, [row | {"step": n}], 0, 0, gpu, 9 * 10**9) for n in (1, 2, 3)]
    assert all(" MFU (%): " in line for line in lines)
    world = "using world size: 1, data-parallel size: 1, tensor-model-parallel size: 1"
    record = read(log("\n".join([world, *lines]) + "\n"))
    assert record.format == "Megatron-LM" and record.gpus == 1
    expected = {"step_s": 100.0, "loss": 5.5, "skipped": 0, "tokens_per_s": 1.28 * spec.seq_len}
    for name, value in expected.items():
        assert record.steps[name] == pytest.approx([value] * 3, rel=1e-4), name


@pytest.mark.parametrize(
    ("said", "kind"),
    [("ERROR: a hook of the site failed", None), ("CUDA out of memory. Tried to", "oom")],
)
def test_a_launchers_error_is_no_end_of_an_mlperf_run(log, said, kind):
    failure = read(log(f"{mlperf(1.7e12, 'run_start')}{said}\n")).failure
    assert (failure and failure.kind) == kind


def test_a_gzipped_log_is_read_as_what_it_holds_and_what_cannot_be_unpacked_says_so(log, tmp_path):
    content = gzip.compress(RUN.encode())
    plain, unpacked = read(log(RUN)), read(log(content, "job.out.gz"))
    assert times(plain) == times(unpacked) and plain.last_line == unpacked.last_line == 40
    for name, mode in (("a.tar", "w"), ("a.tgz", "w:gz")):
        with tarfile.open(tmp_path / name, mode) as archive:
            archive.add(log(RUN))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("job.out", RUN)
    log(content[:-40], "cut.gz")
    log(gzip.compress(b""), "zero.gz")
    reasons = dict.fromkeys(("a.tar", "a.tgz", "a.zip"), "an archive of files: unpack it")
    reasons |= {"cut.gz": "cannot be unpacked: ", "zero.gz": "empty file"}
    for name, reason in reasons.items():
        with pytest.raises(Refusal, match=f"{name}: {reason}"):
            read(tmp_path / name)


@pytest.mark.parametrize("how", ("cat", "gzip -c", "<(cat)"))
def test_a_pipe_is_read(log, how):
    path, command = log(RUN), f"{sys.executable} -m analysis.tflops --columns step_s,verdict"
    line = f"{command} <(cat {path})" if how == "<(cat)" else f"{how} {path} | {command} -"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1.0" in done.stdout and "stopped early" in done.stdout


def test_a_line_says_how_many_files_were_not_read(log, tmp_path, capfd):
    good, bad = log(RUN, "good.out"), log("nothing", "bad.log")
    command = [sys.executable, "-m", "analysis.tflops", tmp_path]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.STDOUT, stdout=subprocess.PIPE)
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 0 and "bad.log: no format that is known" in lines[0]
    assert lines[-1] == "analysis.tflops: 1 not read, 1 read; the reasons stand above"
    assert tflops.main([str(bad)]) == 2 and tflops.main([str(good)]) == 0
    assert "not read" not in capfd.readouterr().err
