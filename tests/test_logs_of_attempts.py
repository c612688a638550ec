"""A log to which several attempts wrote: facts and steps are those of the last one."""

import pytest

from analysis import compare, expect, scaling
from analysis.logs.readers import read
from analysis.logs.step_time import timed
from analysis.runs.verdict import judge

MEGATRON = (
    " iteration {i:8d}/      40 | consumed samples: 9 | elapsed time per iteration (ms): {ms} |"
    " learning rate: 1E-04 | lm loss: 2.{i}E+00 | grad norm: 1.25 |\n"
)
TITAN = (
    "Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard={n}, cp=1, tp=1\n"
    "Training starts at step 1, with local batch size 1, global batch size {n}, total steps 40"
    " (warmup 2)\n"
)
NVIDIA_SMI = "".join(
    f"|   {i}  NVIDIA H100 80GB HBM3          On  |\n|    {i}   N/A  N/A           91681      C  \n"
    for i in range(2)
)
# What a program prints as it starts on n GPUs (or with a batch of n), a step's line, and the fact.
FORMATS = {
    "Megatron-LM": ("using world size: {n}, data-parallel-size: 1 \n", MEGATRON, "gpus"),
    "an argument dump": (" ---- arguments ----\n  world_size ..... {n}\n", MEGATRON, "gpus"),
    "GPT-NeoX": (
        "NeoXArgs.configure_distributed_args() using world size: {n} and model-parallel size: 1 \n",
        "samples/sec: 7.8 |" + MEGATRON,
        "gpus",
    ),
    "torchtitan": (
        TITAN,
        "step: {i}  loss: 7.{i}  grad_norm: 3.{ms}  memory: 1.1GiB(9.25%)  tps: 6,9{i:02d}  mfu:\n",
        "gpus",
    ),
    "nanotron": (
        "[Start training] datetime: 1 | mbs: 2 | global_batch_size: {n} | sequence_length: 9 |\n",
        "iteration: {i} / 40 | time_per_iteration_ms: {ms} | lm_loss: 5.{i} | grad_norm: 3.2\n",
        "global_batch",
    ),
    "nanoGPT": (
        "block_size = 1\ntokens per iteration will be: {n}\n",
        "iter {i}: loss 9.{i}, time {ms}.35ms, mfu 22.79%\n",
        "global_batch",
    ),
    "nanochat": (
        "Distributed world size: {n}\n",
        "step {i:05d}/00040 (0.5%) | loss: 3.{i} | dt: {ms}.04ms | tok/sec: 25,388 | mfu: 0.00\n",
        "gpus",
    ),
    "llm.c": (
        "| Parameter             | Value |\nworld_size: {n}\n",
        "step {i:4d}/40 | loss 9.{i} (+nanz)| norm 15.2 (+nanz)| {ms}.10 ms | 419000 tok/s\n",
        None,
    ),
    "modded-nanogpt": (
        "Running PyTorch 2.8.0 compiled for CUDA 12.6\n",
        "step:{i}/40 train_loss:7.{i} train_time:{i}{ms}ms step_avg:139.11ms\n",
        None,
    ),
    "NeMo": (
        'DLLL {{"type": "LOG", "step": "PARAMETER", "data": {{"trainer/num_nodes": {n},'
        ' "trainer/devices": 1}}}}\n',
        'DLLL {{"type": "LOG", "step": {i}, "data": {{"train_step_timing in s": {ms}.0}}}}\n',
        "gpus",
    ),
    "fairseq": (
        "'distributed_world_size': {n}, 'max_update': 40, \n",
        '{{"epoch": 1, "loss": "9.{i}", "wps": "25389.4", "ups": "0.22", "bsz": "404.6",'
        ' "num_updates": "{i}", "gnorm": "1.{ms}"}}\n',
        "gpus",
    ),
    "DeepSpeed": (
        "DeepSpeed info: version=0.9\n[config.py:999:print]   world_size ... {n}\n",
        "steps: {i} loss: 5.{i} iter time (s): {ms}.688 samples/sec: 743.1\n",
        "gpus",
    ),
    "HF Trainer": (
        "***** Running training *****\n  Instantaneous batch size per device = {n}\n",
        "{{'loss': 2.{i}, 'grad_norm': 0.{ms}, 'learning_rate': 5e-06, 'epoch': 0.{i}}}\n",
        "micro_batch",
    ),
}


def steps(line, numbers, ms=1000):
    return "".join(line.format(i=i, ms=ms) for i in numbers)


@pytest.mark.parametrize("kind", FORMATS)
def test_facts_and_steps_are_of_the_last_attempt(tmp_path, kind):
    start, line, fact = FORMATS[kind]
    first, log = start.format(n=16) + steps(line, range(1, 13)), tmp_path / "job.out"
    log.write_text(first)
    alone = read(log)
    assert len(alone.steps) == 12 and not alone.doubts
    for again in (range(13, 21), range(1, 9)):  # it goes on, or begins once more
        log.write_text(first + "requeued\n" + start.format(n=2) + steps(line, again, ms=3000))
        record = read(log)
        assert len(record.steps) == 8
        assert record.doubts["attempts"].startswith("2 attempts in one log: the last is read, from")
        if fact:
            assert (getattr(alone, fact), getattr(record, fact)) == (16, 2)
            assert f"before, {fact} was 16" in record.doubts["attempts"]
        times = [record.steps["step_s"].min(), alone.steps["step_s"].max()]
        if kind not in ("torchtitan", "fairseq", "HF Trainer", "modded-nanogpt"):
            assert times[0] > 2 * times[1]


def test_a_table_says_that_there_were_several_attempts(tmp_path):
    log, first = tmp_path / "job.out", FORMATS["Megatron-LM"][0].format(n=16)
    second = FORMATS["Megatron-LM"][0].format(n=2)
    log.write_text(
        first + steps(MEGATRON, range(1, 41)) + second + steps(MEGATRON, range(1, 41), 2000)
    )
    record = read(log)
    judgement = judge(record, timed(record))
    assert judgement.verdict == "complete" and record.last_line == 82
    (doubt,) = judgement.doubts
    assert doubt.text == (
        "2 attempts in one log: the last is read, from line 42 on; before, gpus was 16"
    )


def test_of_three_attempts_the_last_is_read(tmp_path):
    log, start = tmp_path / "job.out", FORMATS["Megatron-LM"][0].format(n=8)
    parts = (start + steps(MEGATRON, range(1, 21), ms) for ms in (9000, 12000, 16000))
    log.write_text("".join(parts))
    record = read(log)
    assert record.steps["step_s"].tolist() == [16.0] * 20 and record.gpus == 8
    assert record.doubts["attempts"].startswith("3 attempts in one log")


def test_what_an_earlier_header_states_is_unknown_where_the_iterations_start_again(tmp_path):
    log, start = tmp_path / "job.out", FORMATS["Megatron-LM"][0].format(n=8)
    log.write_text(start + steps(MEGATRON, range(1, 21)) + steps(MEGATRON, range(1, 21), 5000))
    record = read(log)
    assert len(record.steps) == 20 and record.steps["step_s"].tolist() == [5.0] * 20
    assert record.gpus is None and "before, gpus was 8" in record.doubts["attempts"]


def test_an_attempt_without_a_step_is_named_and_changes_nothing(tmp_path):
    log, start = tmp_path / "job.out", FORMATS["Megatron-LM"][0]
    log.write_text(start.format(n=8) + steps(MEGATRON, range(1, 41)) + start.format(n=4))
    record = read(log)
    assert record.gpus == 8 and len(record.steps) == 40
    assert record.doubts["attempts"] == "another attempt, from line 42 on, logs no step of its own"


def test_iterations_that_go_back_without_settings_between_are_in_doubt(tmp_path):
    log = tmp_path / "job.out"
    log.write_text(steps(MEGATRON, range(1, 7)) + steps(MEGATRON, range(4, 9), 5000))
    record = read(log)
    assert len(record.steps) == 11
    assert record.doubts["restart"] == "line 7: iterations go back from 6 to 4"


def test_facts_count_wherever_they_stand_before_the_first_step(tmp_path):
    log, noise = (
        tmp_path / "job.out",
        "".join(f"{rank}: NCCL INFO ready\n" for rank in range(60000)),
    )
    start = FORMATS["an argument dump"][0].format(n=2048)
    log.write_text(noise + start + noise + steps(MEGATRON, range(1, 9)))
    record = read(log)
    assert len(noise) > 1 << 20 and record.gpus == 2048 and not record.doubts
    log.write_text(5 * noise + start + 5 * noise + steps(MEGATRON, range(1, 9)))
    record = read(log)
    assert record.gpus is None and "the middle was not searched" in record.doubts["header"]


def test_step_times_that_rise_have_no_steady_time_and_it_is_said(tmp_path):
    log = tmp_path / "job.out"
    jump = steps(MEGATRON, range(1, 21)) + steps(MEGATRON, range(21, 41), 1600)
    grows = "".join(steps(MEGATRON, [i], 1000 + 50 * i) for i in range(1, 41))
    for text, rise in ((jump, "took 1 s, then 1.6 s"), (grows, ""), (jump[:3500], None)):
        log.write_text(text)
        record = read(log)
        doubts = [
            flag.text for flag in judge(record, timed(record)).doubts if flag.kind == "rising"
        ]
        assert len(doubts) == (rise is not None) and all(rise in doubt for doubt in doubts)


PREFIXES = {"srun -l": "{rank}: ", "torchrun": "[rank{rank}]:", "tee": "[default{rank}]:"}


@pytest.mark.parametrize("who", PREFIXES.values(), ids=PREFIXES)
@pytest.mark.parametrize("kind", ("torchtitan", "an argument dump"))
def test_a_rank_that_prints_its_start_late_begins_no_attempt(tmp_path, kind, who):
    start, line, _ = FORMATS[kind]
    log = tmp_path / "job.out"

    def of(rank, text):
        return "".join(who.format(rank=rank) + row for row in text.splitlines(keepends=True))

    first, second = (of(0, steps(line, numbers)) for numbers in (range(1, 9), range(9, 17)))
    log.write_text(of(0, start.format(n=16)) + first + of(1, start.format(n=16)) + second)
    record = read(log)
    assert len(record.steps) == 16 and record.gpus == 16 and not record.doubts
    again = of(1, start.format(n=2)) + of(0, start.format(n=2))
    log.write_text(log.read_text() + again + of(0, steps(line, range(17, 25), 3000)))
    record = read(log)
    assert len(record.steps) == 8 and record.gpus == 2
    assert record.doubts["attempts"].startswith("2 attempts in one log")


def test_lines_that_are_printed_twice_stay_with_their_attempt(tmp_path):
    """Primus prints each line of its last rank again, so that a copy stands before the start."""
    log, header = tmp_path / "job.out", FORMATS["Megatron-LM"][0]
    for twice in ("{0}{0}", "{0}[rank-7/8] {0}"):
        first, second = (
            "".join(twice.format(MEGATRON.format(i=i, ms=ms)) for i in range(1, 9))
            for ms in (9000, 3000)
        )
        log.write_text(header.format(n=16) + first + header.format(n=2) + second)
        record = read(log)
        assert record.steps["step_s"].tolist() == [3.0] * 8 and record.gpus == 2
        assert record.doubts["attempts"].startswith("2 attempts in one log")


def test_an_attempt_that_failed_before_its_first_step_states_nothing(tmp_path):
    share = " > number of parameters on (tensor, pipeline) model parallel rank ({}, 0): 1000\n"
    log, start = tmp_path / "job.out", FORMATS["an argument dump"][0]
    failure = 'Traceback (most recent call last):\n  File "t.py", line 1, in f\nValueError: no\n'
    dead = start.format(n=64) + "  seq_length ..... 4096\n" + "".join(map(share.format, range(4)))
    live = start.format(n=2) + "".join(map(share.format, range(2)))
    log.write_text(dead + failure + live + steps(MEGATRON, range(1, 9)))
    record = read(log)
    assert (record.gpus, record.params, record.seq_len) == (2, 2000, None)
    assert record.doubts["attempts"].startswith("2 attempts in one log: the last is read, from")
    log.write_text(dead + live + steps(MEGATRON, range(1, 9)))  # no failure: ranks, maybe
    assert not read(log).doubts


def test_of_three_attempts_the_one_without_a_step_is_named(tmp_path):
    log, start = tmp_path / "job.out", FORMATS["Megatron-LM"][0]
    parts = [start.format(n=n) + steps(MEGATRON, range(1, 9), ms) for n, ms in ((8, 9), (4, 7))]
    log.write_text("".join(parts) + start.format(n=2))
    record = read(log)
    assert record.gpus == 4 and "the last is read, from line 10 on" in record.doubts["attempts"]
    assert "another attempt, from line 19 on, logs no step" in record.doubts["attempts"]


def test_a_number_that_the_first_step_runs_into_is_cut(tmp_path):
    log, start = tmp_path / "job.out", FORMATS["HF Trainer"][0].format(n=8)
    losses = steps(FORMATS["HF Trainer"][1], range(1, 9))
    for cut in ("12", "124,"):
        log.write_text(start + f"  Number of trainable parameters = {cut}" + losses)
        assert read(log).params is None
    log.write_text(start + "  Total train batch size (w. parallel) = 6  Gradient" + losses)
    assert read(log).global_batch is None and read(log).micro_batch == 8
    dump = ' {\n    "num_hidden_layers": 32,\n    "hidden_size": 25    "initializer_range": 0.02,\n'
    log.write_text(start + dump + losses)
    record = read(log)
    assert record.model == {"n_layer": 32} and "hidden_size (1)" in record.doubts["numbers"]


@pytest.mark.parametrize("main", (scaling.main, compare.main, expect.main))
def test_each_table_of_times_says_what_is_doubtful_about_them(tmp_path, capsys, main):
    header = FORMATS["Megatron-LM"][0].format(n=8)
    jump = header + steps(MEGATRON, range(1, 31)) + steps(MEGATRON, range(31, 61), 1600)
    twice = header + steps(MEGATRON, range(1, 61)) + header + steps(MEGATRON, range(1, 61), 900)
    for name, text in (("jump.log", jump), ("twice.log", twice)):
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path / name) for name in ("jump.log", "twice.log")]
    for command in [paths] if main is not expect.main else ([path] for path in paths):
        assert main(command) == 0
    said = capsys.readouterr().out
    assert ": no steady time: steps took 1 s, then 1.6 s" in said
    assert ": 2 attempts in one log: the last is read, from line 62 on" in said
