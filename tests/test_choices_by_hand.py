"""How much slower a planner's first choices are than the best, on six layouts by hand."""

import numpy as np
import pytest

from analysis.planner.choice import choice, first_crashed, naive
from analysis.planner.rows import read_rows

# tp, pp, micro-batch, seconds (none: it crashed) of one model on 16 GPUs in nodes of 8
LAYOUTS = [(1, 1, 1, 3.0), (1, 1, 2, 2.0), (2, 1, 1, 2.4), (1, 2, 1, 1.0), (8, 1, 1, 5.0)]
LAYOUTS += [(8, 2, 1, 4.0), (4, 1, 1, None)]


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.csv"
    lines = ["gpu_type,gpus,layers,hidden,heads,tp,pp,micro_batch,global_batch,step_s,status"]
    for tp, pp, micro, seconds in LAYOUTS:
        end = f"{seconds},ok" if seconds else ",crashed_or_OOM"
        lines.append(f"A100,16,8,1024,8,{tp},{pp},{micro},64,{end}")
    path.write_text("\n".join(lines) + "\n")
    return read_rows([path])


RAN = np.arange(6)


def test_regret_is_measured_against_the_fastest_and_over_the_first_three(rows):
    predicted = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.5])
    found = choice(rows, RAN, predicted)  # 3.0 s first; then tp 2 in 2.4 s and pp 2 in 1.0 s:
    assert found == {  # three of different tp and pp, so not 2.0 s, which has tp 1, too
        "groups": 1, "first": 2.0, "first_p90": 2.0, "near": 0.0, "best_of_three": 0.0,
    }  # fmt: skip
    predicted[3] = 9.0  # then tp 8 pp 1 in 5.0 s is the third, and 2.4 s the best
    assert choice(rows, RAN, predicted)["best_of_three"] == pytest.approx(1.4)
    right = choice(rows, RAN, rows.measured)
    assert (right["first"], right["near"], right["best_of_three"]) == (0.0, 1.0, 0.0)


def test_what_does_not_fit_is_chosen_last(rows):
    predicted, fits = np.arange(7.0), np.array([False, False, False, True, True, True, True])
    assert choice(rows, RAN, predicted, fits)["first"] == 0.0


def test_a_first_choice_that_crashed_is_counted(rows):
    predicted, all_fit = np.array([2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 1.0]), np.ones(7, bool)
    assert first_crashed(rows, RAN, predicted, all_fit) == 1.0
    assert first_crashed(rows, RAN, predicted, np.arange(7) < 6) == 0.0


def test_rules_of_thumb_choose_without_a_model(rows):
    """Least tp x pp: 1 x 1 with micro-batch 2, 2.0 s. Megatron-LM's: tp 8 and pp 1, 5.0 s."""
    assert [rule["first"] for rule in naive(rows, RAN).values()] == [1.0, 4.0]
