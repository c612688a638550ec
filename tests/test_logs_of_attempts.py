"""A log to which several attempts wrote: facts and steps are those of the last one."""

import tomllib

import numpy as np
import pytest

from analysis import compare, expect, scaling
from analysis.common.reasons import of_cells
from analysis.logs.load import load
from analysis.logs.readers import read
from analysis.logs.step_time import timed
from analysis.runs.judged import judged
from analysis.runs.run_row import row_of
from analysis.runs.verdict import judge
from parallel.measure.steady_time import Window
from tests.conftest import ROOT

FORMATS = tomllib.loads((ROOT / "tests" / "log_attempts.toml").read_text())
MEGATRON = FORMATS["Megatron-LM"]["line"]
NO_TIMES = ("torchtitan", "fairseq", "HF Trainer", "modded-nanogpt", "torchtune", "Composer")
NO_TIMES += ("OLMo-core", "XTuner through mmengine", "NeMo AutoModel")


def started(n, kind="Megatron-LM"):
    """What a program prints as it starts."""
    return FORMATS[kind]["start"].format(n=n)


def steps(last, ms=1000, first=1, line=MEGATRON):
    return "".join(line.format(i=i, ms=ms) for i in range(first, last + 1))


@pytest.fixture
def read_log(tmp_path):
    def written(text):
        (tmp_path / "job.out").write_text(text)
        return read(tmp_path / "job.out")

    return written


@pytest.mark.parametrize("kind", FORMATS)
def test_facts_and_steps_are_of_the_last_attempt(read_log, kind):
    line, fact = FORMATS[kind]["line"], FORMATS[kind].get("fact")
    first = started(16, kind) + steps(12, line=line)
    alone = read_log(first)
    assert len(alone.steps) == 12 and "attempts" not in alone.doubts
    for begin in (13, 1):  # it goes on, or begins once more
        again = steps(begin + 7, 3000, begin, line)
        record = read_log(first + "requeued\n" + started(2, kind) + again)
        assert len(record.steps) == 8
        assert record.doubts["attempts"].startswith("2 attempts in one log: the last is read, from")
        if fact:
            assert (getattr(alone, fact), getattr(record, fact)) == (16, 2)
            assert f"before, {fact} was 16" in record.doubts["attempts"]
        if kind not in NO_TIMES:
            assert record.steps["step_s"].min() > 2 * alone.steps["step_s"].max()


def printed_twice(text, copy):
    return "".join(f"{line}{copy}{line}" for line in text.splitlines(keepends=True))


LAST = "attempts in one log: the last is read, from line"
NO_STEP = "logs no step of its own"
ATTEMPTS = {  # what was written -> steps, GPUs and seconds of a step that are read, and the doubt
    "two": (
        started(16) + steps(40) + started(2) + steps(40, 2000),
        *(40, 2, 2.0, f"2 {LAST} 42 on; before, gpus was 16"),
    ),
    "three": (
        "".join(started(8) + steps(20, ms) for ms in (9000, 12000, 16000)),
        *(20, 8, 16.0, f"3 {LAST} 43 on"),
    ),
    # What the earlier header states is unknown then.
    "iterations start again": (
        started(8) + steps(20) + steps(20, 5000),
        *(20, None, 5.0, f"2 {LAST} 22 on; before, gpus was 8, dp was 1"),
    ),
    "the last has no step": (
        started(8) + steps(40) + started(4),
        *(40, 8, 1.0, f"another attempt, from line 42 on, {NO_STEP}"),
    ),
    "two, and one has no step": (
        started(8) + steps(8, 9000) + started(4) + steps(8, 7000) + started(2),
        *(8, 4, 7.0, f"2 {LAST} 10 on; before, gpus was 8; another attempt, from line 19 on, "),
    ),
} | {  # Primus prints each line of its last rank again, so that a copy stands before the start.
    f"lines twice, with {copy!r}": (
        started(16)
        + printed_twice(steps(8, 9000), copy)
        + started(2)
        + printed_twice(steps(8, 3000), copy),
        *(8, 2, 3.0, f"2 {LAST} 18 on; before, gpus was 16"),
    )
    for copy in ("", "[rank-7/8] ")
}


@pytest.mark.parametrize("case", ATTEMPTS)
def test_a_table_says_which_attempt_is_read(read_log, case):
    text, n, gpus, step_s, doubt = ATTEMPTS[case]
    record = read_log(text)
    assert (len(record.steps), record.gpus) == (n, gpus)
    assert record.steps["step_s"].tolist() == [step_s] * n
    judgement = judge(record, timed(record))
    (flag,) = judgement.doubts
    assert flag.text.removesuffix(NO_STEP) == doubt.removesuffix(NO_STEP)
    assert (judgement.verdict == "complete") == (n == 40)


def test_facts_count_wherever_they_stand_before_the_first_step(read_log):
    noise = "".join(f"{rank}: NCCL INFO ready\n" for rank in range(60000))
    start = started(2048, "an argument dump")
    record = read_log(noise + start + noise + steps(8))
    assert len(noise) > 1 << 20 and record.gpus == 2048 and not record.doubts
    record = read_log(5 * noise + start + 5 * noise + steps(8))  # between the first and last 4 MiB
    assert record.gpus == 2048 and not record.doubts
    letters = str.maketrans("0123456789", "abcdefghij")
    others = "".join(f"{rank}: NCCL INFO ready\n" for rank in range(460_000)).translate(letters)
    record = read_log(others + start + 5 * noise + steps(8))
    assert (
        record.gpus is None and "bytes before the first step, of which" in record.doubts["header"]
    )


def test_step_times_that_rise_have_no_steady_time_and_it_is_said(read_log):
    jump = steps(20) + steps(40, 1600, first=21)
    grows = "".join(steps(i, 1000 + 50 * i, first=i) for i in range(1, 41))
    for text, rise in ((jump, "took 1 s, then 1.6 s"), (grows, ""), (jump[:3500], None)):
        record = read_log(text)
        doubts = [
            flag.text for flag in judge(record, timed(record)).doubts if flag.kind == "regimes"
        ]
        assert len(doubts) == (rise is not None) and all(rise in doubt for doubt in doubts)


OVER = "[after training is done] datetime: 2026-03-25 10:00:00\n"
RUNS = {  # what was written -> of each run: where it begins, its steps, GPUs and seconds of a step
    "one after the other": (
        "".join(started(n) + steps(40, ms) + OVER for n, ms in ((8, 9000), (16, 12000))),
        [("job.out:1", 40, 8, 9.0), ("job.out:43", 40, 16, 12.0)],
    ),
    "the second was queued again": (
        started(8) + steps(40) + OVER + started(8) + steps(9, 7000) + started(4) + steps(8, 2000),
        [("job.out:1", 40, 8, 1.0), ("job.out:43", 8, 4, 2.0)],
    ),
    "it goes on behind its end": (
        started(8) + steps(20) + OVER + started(8) + steps(40, 3000, first=21) + OVER,
        [(None, 20, 8, 3.0)],
    ),
    "a program that says nothing at its end": (
        "".join(
            started(1024 * n, "nanoGPT").replace("= 40", "= 12")
            + steps(12, ms, line=FORMATS["nanoGPT"]["line"])
            for n, ms in ((1, 1000), (2, 3000))
        ),
        [("job.out:1", 12, None, 1.00035), ("job.out:16", 12, None, 3.00035)],
    ),
}


@pytest.mark.parametrize("case", RUNS)
def test_runs_of_one_log_are_rows(tmp_path, case):
    text, expected = RUNS[case]
    (tmp_path / "job.out").write_text(text)
    records = load([tmp_path / "job.out"]).content
    assert [(r.run, len(r.steps), r.gpus, r.steps["step_s"][-1]) for r in records] == expected
    assert all(("one log, from line" in " ".join(r.notes)) == (r.run is not None) for r in records)


@pytest.mark.parametrize("kind", FORMATS)
def test_two_runs_of_one_log_are_two_rows_and_a_restart_is_none(tmp_path, kind):
    line, over = FORMATS[kind]["line"], FORMATS[kind].get("over", "")
    first = started(16, kind) + steps(40, line=line) + over
    restarted = started(16, kind) + steps(20, line=line) + started(16, kind)
    restarted += steps(40, first=21, line=line) + over
    second = first.count("\n") + 1
    for text, expected in (
        (first + started(2, kind) + steps(40, 3000, line=line) + over, [1, second]),
        (restarted, [None]),
    ):
        (tmp_path / "job.out").write_text(text)
        records = load([tmp_path / "job.out"]).content
        assert [r.run and int(r.run.partition(":")[2]) for r in records] == expected
        assert {len(r.steps) for r in records} == {40 if len(records) == 2 else 20}
        losses = [loss for r in records if np.isfinite(loss := r.steps["loss"][-1])]
        assert not losses or len(losses) == len(records)  # the last step has its values


def test_a_run_whose_steps_are_lines_of_another_kind_is_a_row(tmp_path):
    bars = "".join(
        f"\r1|{i}|Loss: 1{i}.5: 99%|##| {i}/40 [00:{i:02d}<00:00, 1.0s/it]" for i in range(1, 41)
    )
    start, line = started(2, "torchtune"), FORMATS["torchtune"]["line"]
    (tmp_path / "job.out").write_text(start + bars + "\n" + start + steps(40, line=line))
    records = load([tmp_path / "job.out"]).content
    assert [(r.run, len(r.steps)) for r in records] == [("job.out:1", 40), ("job.out:5", 40)]


PREFIXES = {"srun -l": "{rank}: ", "torchrun": "[rank{rank}]:", "tee": "[default{rank}]:"}


@pytest.mark.parametrize("who", PREFIXES.values(), ids=PREFIXES)
@pytest.mark.parametrize("kind", ("torchtitan", "an argument dump"))
def test_a_rank_that_prints_its_start_late_begins_no_attempt(read_log, kind, who):
    def of(rank, text):
        return "".join(who.format(rank=rank) + row for row in text.splitlines(keepends=True))

    line = FORMATS[kind]["line"]
    first, second, third = (
        of(0, steps(last, ms, last - 7, line)) for last, ms in ((8, 1000), (16, 1000), (24, 3000))
    )
    ranks = of(0, started(16, kind)) + first + of(1, started(16, kind)) + second
    record = read_log(ranks)
    assert len(record.steps) == 16 and record.gpus == 16 and not record.doubts
    record = read_log(ranks + of(1, started(2, kind)) + of(0, started(2, kind)) + third)
    assert len(record.steps) == 8 and record.gpus == 2
    assert record.doubts["attempts"].startswith("2 attempts in one log")


def test_an_attempt_that_failed_before_its_first_step_states_nothing(read_log):
    share = " > number of parameters on (tensor, pipeline) model parallel rank ({}, 0): 1000\n"
    failure = 'Traceback (most recent call last):\n  File "t.py", line 1, in f\nValueError: no\n'
    dead, live = (
        started(n, "an argument dump") + settings + "".join(map(share.format, range(ranks)))
        for n, settings, ranks in ((64, "  seq_length ..... 4096\n", 4), (2, "", 2))
    )
    record = read_log(dead + failure + live + steps(8))
    assert (record.gpus, record.params, record.seq_len) == (2, 2000, None)
    assert record.doubts["attempts"].startswith("2 attempts in one log: the last is read, from")
    assert not read_log(dead + live + steps(8)).doubts  # no failure: ranks, maybe


def test_a_number_that_the_first_step_runs_into_is_cut(read_log):
    start, losses = started(8, "HF Trainer"), steps(8, line=FORMATS["HF Trainer"]["line"])
    for cut in ("12", "124,"):
        assert read_log(f"{start}  Number of trainable parameters = {cut}{losses}").params is None
    record = read_log(start + "  Total train batch size (w. parallel) = 6  Gradient" + losses)
    assert record.global_batch is None and record.micro_batch == 8
    dump = ' {\n    "num_hidden_layers": 32,\n    "hidden_size": 25    "initializer_range": 0.02,\n'
    record = read_log(start + dump + losses)
    assert record.model == {"n_layer": 32} and "hidden_size (1)" in record.doubts["numbers"]


@pytest.mark.parametrize("main", (scaling.main, compare.main, expect.main))
def test_each_table_of_times_says_what_is_doubtful_about_them(tmp_path, capsys, main):
    jump = started(8) + steps(30) + steps(60, 1150, first=31)
    twice = started(8) + steps(60) + started(8) + steps(60, 900)
    for name, text in (("jump.log", jump), ("twice.log", twice)):
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path / name) for name in ("jump.log", "twice.log")]
    for command in [paths] if main is not expect.main else ([path] for path in paths):
        assert main(command) == (main is compare.main)  # whose noise is not known
    said = capsys.readouterr().out
    assert ": not steady: steps took 1 s, then 1.15 s from iteration 31 on" in said
    assert ": 2 attempts in one log: the last is read, from line 62 on" in said


RAMP = """ iteration {i:8d}/      40 | elapsed time per iteration (ms): {ms:.1f} |\
 global batch size: {batch:5d} | lm loss: 8.98E+00 | grad norm: 1.000 |
"""


def ramp(*batches):
    """A log whose settings state a batch of 128, and its lines these, at 100 ms a sequence."""
    header = "using world size: 8, data-parallel size: 8\n  seq_length ..... 2048\n"
    header += "  global_batch_size ..... 128\n  train_iters ..... 40\n"
    lines = (
        RAMP.format(i=i, ms=100 * batch + i % 3, batch=batch) for i, batch in enumerate(batches, 1)
    )
    return header + "".join(lines)


@pytest.mark.parametrize(
    ("batches", "window", "batch", "is_doubtful"),
    [
        ([16] * 40, None, 16, False),  # the ramp goes on behind the log's end
        ([112] * 24 + [128] * 16, None, 128, True),
        ([112] * 24 + [128] * 16, Window(1, 20), 112, False),
        ([112] * 24 + [128] * 16, Window(25, 40), 128, False),
    ],
)
def test_the_batch_of_a_step_is_what_its_line_prints(read_log, batches, window, batch, is_doubtful):
    (run,) = judged([read_log(ramp(*batches))], window)
    values, reasons = row_of(run, None)
    assert values["global_batch"] == batch
    assert values["tokens_per_s"] == pytest.approx(20480, rel=2e-3)
    doubts = of_cells(reasons)["doubtful"].get("tokens_per_s", "")
    assert ("batch goes from 112 to 128" in doubts) is is_doubtful


def test_steps_of_other_batches_are_not_compared(tmp_path, capsys):
    for name, batch in (("a", 16), ("b", 32)):
        (tmp_path / f"{name}.log").write_text(ramp(*[batch] * 40))
    paths = [str(tmp_path / f"{name}.log") for name in "ab"]
    assert compare.main([*paths, "--at-most", "3%"]) == 2
    assert "global batch 32 here, 16 in the baseline" in capsys.readouterr().out
