"""Logs of other programs are equal step by step, or it is said by which factor and from which step
they are not. The lines are those of Megatron-LM's issue 673, with other numbers."""

import json

import numpy as np
import pytest

from analysis.parity import main

N = 40
_NOISE = np.random.default_rng(0).standard_normal((4, N))
LOSS = 10.8 * np.exp(-0.02 * np.arange(N)) + 0.05 * _NOISE[0]
NORM = 111.0 * np.exp(-0.03 * np.arange(N)) * (1 + 0.1 * _NOISE[1])
LINE = (
    " [2025-02-20 11:18:36] iteration {:8d}/     100 | consumed samples: {:12d} | elapsed time per"
    " iteration (ms): 370.3 | throughput per GPU (TFLOP/s/GPU): 0.6 | learning rate: 1.000000E-05 |"
    " global batch size:     8 | lm loss: {:.6E} | loss scale: 1.0 | grad norm: {:.3f} | number of"
    " skipped iterations:   0 | number of nan iterations:   0 |\n"
)


@pytest.fixture
def logs(tmp_path):
    """Writes a log of these losses and gradient norms; the facts stand in a TOML beside it."""

    def write(name, loss=LOSS, norm=NORM, start=1, every=1, **facts):
        path = tmp_path / f"{name}.log"
        numbers = range(start, start + every * len(loss), every)
        rows = zip(numbers, loss, norm, strict=True)
        path.write_text("".join(LINE.format(i, 8 * i, *values) for i, *values in rows))
        facts = {"gpus": 4, "tp": 1, "pp": 1, "micro_batch": 1} | facts
        path.with_suffix(".toml").write_text("".join(f"{k} = {v}\n" for k, v in facts.items()))
        return str(path)

    return write


def verdict(capsys, *arguments):
    status = main([*arguments, "--format", "json"])
    (row,) = json.loads(capsys.readouterr().out)
    assert status == (row["kind"] == "DIFFERS")
    return row["verdict"]


def moved(values, steps):
    return np.concatenate([values[:steps] * 1.07, values[:-steps]])


def after(step, values, others):
    return np.concatenate([values[:step], others[step:]])


ROUNDED = LOSS + 1e-3 * _NOISE[2]  # as bf16 rounds
CASES = {
    "one step": (
        dict(loss=LOSS + 4.0 * (np.arange(N) == 20)),
        "the loss diverges from step 21: ",
    ),
    "digits": (dict(norm=NORM * (1 + 3e-4 * _NOISE[2])), "equal"),
    "cp": (
        dict(norm=4 * NORM, cp=4, dp=1),
        "the gradient norm of B is 4.00 times A's (4 to 4) from step 1: its cp is 4, A's is 1",
    ),
    "cp in bf16": (
        dict(loss=ROUNDED, norm=4 * NORM * (1 + 4e-3 * _NOISE[3]), cp=4, dp=1),
        "the loss differs from step 2, by less than its noise, as rounding does: 10.57954 in A",
    ),
    "accumulation": (
        dict(loss=LOSS / 8, gpus=1, cp=1, dp=1),
        "the loss of B is A's divided by 8.00 (8 to 8) from step 1: its number of accumulation",
    ),
    "resumed": (
        dict(norm=after(20, NORM, NORM / 2)),
        "the gradient norm of B is A's divided by 2.00 (2 to 2) from step 21: number of accumul",
    ),
    "clipped later": (
        dict(norm=after(10, 3 * NORM, NORM * (2 + 0.3 * _NOISE[3]))),
        "is 3.00 times A's (3 to 3) from step 1 to 10, and no constant factor later: no fact",
    ),
    "no name": (dict(norm=1.522 * NORM), "1.52 times A's (1.522 to 1.522) from step 1: no fact"),
    "later": (
        dict(loss=moved(LOSS, 1), norm=moved(NORM, 1)),
        "the loss of B is A's 1 step later (at all 39 steps); the gradient norm of B is A's 1 step",
    ),
    "earlier": (
        dict(loss=moved(LOSS[::-1], 2)[::-1]),
        "the loss of B is A's 2 steps earlier (at all 38 steps)",
    ),
    "data": (
        dict(loss=LOSS + 0.05 * _NOISE[2]),
        "the loss says different data or a different model from step 1: 10.80629 in A, ",
    ),
    "norm alone": (
        dict(norm=NORM * (1.5 + 0.3 * _NOISE[2])),
        "the gradient norm differs from step 1, where the loss does not: ",
    ),
    "diverges": (
        dict(loss=LOSS + 0.01 * np.maximum(0, np.arange(N) - 20)),
        "the loss diverges from step 22: 7.164429 in A, 7.174429 in B; by up to 1.9e-01",
    ),
    "nan": (dict(loss=after(30, LOSS, LOSS * np.nan)), "the loss diverges from step 31: "),
    "one step is no shift": (
        dict(loss=np.array([12.0, 11.5, LOSS[0]]), norm=NORM[:3]),
        "the loss says different data or a different model from step 1: 10.80629 in A, 12 in B",
    ),
    "middle": (
        dict(loss=moved(LOSS, 5)[20:], norm=NORM[20:], start=21),
        "the loss differs from the first shared step, step 21: ",
    ),
    "interval": (dict(every=10), "not verified: an entry is of 1 steps in A, 10 in B"),
    "no step": (dict(start=1000), "not verified: no step with a loss in both; no step with a grad"),
}


@pytest.mark.parametrize("case", CASES)
def test_two_logs_are_equal_or_their_difference_has_a_sentence(case, logs, capsys):
    changed, words = CASES[case]
    found = verdict(capsys, logs("a", cp=1, dp=4), logs("b", **changed))
    assert words in found
    assert ("they differ in: " in found) == ("cp" in case or case == "accumulation"), found


def test_a_factor_is_found_whatever_rounding_does_and_chance_is_none(logs, capsys):
    found = verdict(capsys, logs("a", cp=1, dp=4), logs("b", **CASES["cp in bf16"][0]))
    assert "the gradient norm of B is 4.00 times A's (3.9" in found
    for seed in range(20):
        noise = np.random.default_rng(100 + seed).standard_normal((2, N))
        other = {"loss": LOSS + 0.05 * noise[0], "norm": NORM * np.exp(0.3 * noise[1] + 0.6)}
        found = verdict(capsys, logs("a"), logs("b", **other))
        assert "times A's" not in found and "later" not in found and "divided" not in found


def test_bars_are_the_users_and_digits_that_were_not_printed_are_not_missed(logs, capsys):
    a, near = logs("a"), logs("near", loss=LOSS + 5e-4, norm=1.004 * NORM)
    assert "DIFFERS: the loss" in verdict(capsys, a, near)
    assert verdict(capsys, a, near, "--loss-bar", "1e-3", "--grad-norm-bar", "0.005") == "equal"
    small, other = logs("small", norm=NORM / 1e4), logs("other", norm=NORM / 1e4 + 9e-4)
    assert verdict(capsys, small, other) == "equal"  # 0.011 and 0.012: a unit of the last digit


def test_the_first_of_several_logs_is_the_baseline_unless_another_is_named(logs, capsys):
    paths = [logs("a"), logs("b"), logs("c", norm=2 * NORM)]
    assert main([*paths, "--check"]) == 1
    out = capsys.readouterr().out
    assert "A, the baseline: a.log" in out and "2.00 times" in out and "b.log" in out
    assert main([*paths, "--baseline", "c.log"]) == 1
    assert capsys.readouterr().out.count("A's divided by 2.00") == 2
    assert main(paths[:2]) == 0
    assert main(paths[:1]) == 2
    assert "is compared with another log: name two" in capsys.readouterr().err


def test_a_run_folder_has_the_bars_of_our_own_runs(tmp_path, capsys):
    (tmp_path / "run.json").write_text("{}")
    assert main([str(tmp_path), "--loss-bar", "1"]) == 2
    assert "run folders have fixed tolerances" in capsys.readouterr().err
