"""A run is equal only when losses, grad norms and the first loss all are the baseline's."""

import math

import pytest
import torch

from analysis.logs.load import load_own
from analysis.parity import main
from analysis.runs.loss_parity import first_losses, verify
from models import gpt
from models.config import preset
from tests.fixture_runs import edit_steps, facts, losses, write

NORMS = [1.5 - 0.01 * i for i in range(20)]  # as `write` has them


def verdicts(root):
    return {p.run: p.verdict.text for p in verify(load_own([root]).content).values()}


@pytest.fixture
def study(tmp_path):
    write(tmp_path, facts("s", "ddp", engine="ddp"))
    return tmp_path


def test_differences_within_the_bars_are_equal(study):
    near = {"loss": [x + 1.9e-4 for x in losses()], "grad_norm": [x * 1.0019 for x in NORMS]}
    write(study, facts("s", "ddp", engine="ddp", gpus=2), **near)
    assert set(verdicts(study).values()) == {"equal"}
    assert main([str(study), "--check", "--format", "json"]) == 0


@pytest.mark.parametrize(
    ("loss", "grad_norm", "word"),
    [
        ([*losses()[:-1], losses()[-1] + 3e-4], None, "loss by 3.0e-04 at step 20"),
        (None, [46.0, *NORMS[1:]], "grad_norm by 3.0e+01 at step 1"),
        (None, [1.5 * 1.0021, *NORMS[1:]], "grad_norm by 2.1e-03"),
        ([*losses()[:-1], math.nan], None, "loss by inf at step 20"),
    ],
)
def test_beyond_a_bar_differs_and_names_the_step(study, loss, grad_norm, word):
    write(study, facts("s", "ddp", engine="ddp", gpus=2), loss=loss, grad_norm=grad_norm)
    verdict = verdicts(study)["ddp-dp2"]
    assert verdict.startswith("DIFFERS") and word in verdict
    assert main([str(study)]) == 1


def test_equal_weights_that_were_never_initialised_are_not_equal(tmp_path):
    for gpus in (1, 2):
        about = facts("s", "ddp", engine="ddp", gpus=gpus)
        write(tmp_path, about, loss=[87.0 - 0.05 * i for i in range(20)])
    for verdict in verdicts(tmp_path).values():
        assert "first loss 87.000, expected of a new model is " in verdict


def test_a_run_from_a_checkpoint_is_compared_with_the_baselines_last_steps(study):
    """Its first loss need not be that of an untrained model."""
    for gpus, off, load in ((2, 0.0, "c"), (4, 3e-4, "c"), (8, 0.0, None)):
        about = facts("s", "ddp", engine="ddp", gpus=gpus)
        about["spec"]["load"] = load
        steps = [*losses()[:-1], losses()[-1] + off]
        edit_steps(write(study, about, loss=steps), lambda rows: rows[12:])
    said = verdicts(study)
    assert said["ddp-dp2"] == "equal"
    assert said["ddp-dp4"].startswith("DIFFERS: loss by 3.0e-04 at step 20")
    assert said["ddp-dp8"].startswith("not verified: 8 steps recorded, 20 in the baseline")


@pytest.mark.parametrize("gpus", [1, 2])  # the baseline's, and the run's that is compared with it
@pytest.mark.parametrize(("key", "words"), [("loss", "loss"), ("grad_norm", "grad norm")])
def test_a_step_without_a_loss_or_a_norm_is_not_equal_to_anything(tmp_path, gpus, key, words):
    runs = {n: write(tmp_path, facts("s", "ddp", engine="ddp", gpus=n)) for n in (1, 2)}
    edit_steps(runs[gpus], lambda rows: [*rows[:4], rows[4] | {key: ""}, *rows[5:]])
    said = verdicts(tmp_path)["ddp-dp2"]
    assert said == f"not verified: {'ddp' if gpus == 1 else 'ddp-dp2'} has no {words} at step 5"


@pytest.mark.parametrize(
    ("tied", "below", "verdict"),
    [
        (True, 0.33, "equal"),
        (True, 0.95, "DIFFERS"),
        (False, 0.33, "DIFFERS"),
        (True, -0.33, "DIFFERS"),
    ],
)
def test_a_tied_model_may_start_lower_where_tokens_repeat(tied, below, verdict, tmp_path):
    settings = {"engine": "ddp", "hidden": 128, "tied": tied}
    write(tmp_path, facts("s", "ddp", **settings), loss=[x - below for x in losses()])
    (found,) = verdicts(tmp_path).values()
    assert found.startswith(verdict)


@pytest.mark.parametrize(("tied", "hidden"), [(True, 128), (False, 128), (False, 2048)])
def test_a_new_models_loss_is_in_the_range_that_is_expected(tied, hidden):
    """Each fourth token is the one before it. A wide model's logits are far apart."""
    config = preset("tiny-llama", vocab_size=257, tied=tied, hidden=hidden, n_layer=1)
    model = gpt.GPT(config)
    gpt.initialise(model, seed=0)
    tokens = torch.randint(257, (8, 257), generator=torch.Generator().manual_seed(0))
    tokens[:, 4::4] = tokens[:, 3:-1:4]
    with torch.no_grad():
        loss = float(model(tokens[:, :-1], tokens[:, 1:]))
    low, high = first_losses(config.as_dict())
    assert high - math.log(257) == pytest.approx(hidden * 0.0002)
    assert low < high - 0.5 if tied else low == high
    assert low < loss < high - 0.25 if tied else abs(loss - high) < 0.05


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"lr": 1e-3}, "lr 0.001, baseline 0.0003"),
        ({"global_batch": 32}, "global_batch 32, baseline 16"),
        ({"precision": "bf16"}, "precision bf16"),
        ({"n_layer": 8}, "model n_layer 8, baseline 4"),
    ],
)
def test_what_cannot_be_compared_is_not_verified_and_says_why(study, change, word):
    write(study, facts("s", "ddp", engine="ddp", gpus=2, **change))
    verdict = verdicts(study)["ddp-dp2"]
    assert verdict.startswith("not verified") and word in verdict
    assert main([str(study)]) == 0
    assert main([str(study), "--check"]) == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [("run.json", "{"), ("steps.csv", "step,loss\n"), ("1.submitted", None)],
)
def test_a_check_of_what_cannot_be_read_or_has_not_begun_fails(study, name, content, capsys):
    assert main([str(study), "--check"]) == 0
    bad = write(study, facts("s", "ddp", engine="ddp", gpus=4))
    if content is None:
        (bad / "run.json").rename(bad / name)
    else:
        (bad / name).write_text(content)
    assert main([str(study)]) == 0
    assert main([str(study), "--check"]) == 1
    said = "".join(capsys.readouterr())
    assert ("not verified: the run is" if content is None else f"ddp-dp4/{name}") in said


def test_a_failed_run_and_a_short_one_are_not_verified(study):
    write(study, facts("s", "ddp", engine="ddp", gpus=2), fail="rank 1 died")
    write(study, facts("s", "ddp", engine="megatron", gpus=2, tp=2), loss=losses(19))
    found = verdicts(study)
    assert "failed: rank 1 died" in found["ddp-dp2"]
    assert "steps.csv has 19 of 20 steps; missing: 20" in found["megatron-tp2"]


def test_a_baseline_may_be_called_as_its_folder_is_and_its_flag_is_named_where_there_is_none(
    tmp_path, capsys, rows_of
):
    one = write(tmp_path, facts("s", None, engine="ddp"))
    write(tmp_path, facts("s", None, engine="ddp", gpus=2))
    one.rename(tmp_path / "first-try")
    for name, status in (("first-try", 0), ("ddp", 0), ("nobody", 2)):
        assert main([str(tmp_path), "--check", "--baseline", name]) == status
    assert capsys.readouterr().out.count("equal") == 4
    rows = rows_of(main, tmp_path)
    assert all(row["steps"] == 20 and "--baseline" in row["verdict"] for row in rows)
