"""A run does exactly the work its study states, whatever the ranks; steps are never micro-steps."""

import pytest

from models.errors import UsageError
from parallel import data
from parallel.spec import resolve
from parallel.work import training_tokens
from tests.test_spec import flags

SIXTEEN = {"preset": "gpt2-124m", "micro_batch": 4, "global_batch": 16, "seq_len": 512}


@pytest.mark.parametrize("gpus, micro_steps", [(1, 14244), (2, 7122), (4, 3561)])
def test_the_same_tokens_on_any_number_of_ranks(gpus, micro_steps):
    spec = resolve(("study", SIXTEEN | {"gpus": gpus, "train_tokens": 29_171_712}))
    assert spec.work == {
        "optimizer_steps": 3561,
        "micro_steps": micro_steps,
        "tokens_per_optimizer_step": 8192,
        "tokens": 29_171_712,
    }


def test_300_micro_steps_of_two_are_150_steps():
    spec = resolve(("study", {"gpus": 8, "micro_batch": 2, "grad_accum": 2, "steps": 150}))
    assert spec.work["micro_steps"] == 300
    assert flags("--max-train-steps", "150") == {"steps": 150}


def test_an_epoch_is_as_many_whole_steps_as_the_split_fills(tokens):
    settings = {"data": str(tokens), "global_batch": 8, "seq_len": 64, "epochs": 3}
    per_epoch = len(data.load(tokens, 64, 257).train.ids) // (8 * 64)
    assert resolve(("study", settings)).steps == 3 * per_epoch


def test_a_budget_of_tokens_is_never_exceeded():
    assert resolve(("study", SIXTEEN | {"train_tokens": 10 * 8192 + 8191})).steps == 10
    with pytest.raises(UsageError, match="train_tokens 8191 is less than one step's 8192"):
        resolve(("study", SIXTEEN | {"train_tokens": 8191}))


def test_two_statements_of_the_work_must_agree():
    both = SIXTEEN | {"steps": 3561, "train_tokens": 29_171_712}
    assert resolve(("study", both)).steps == 3561
    with pytest.raises(UsageError, match="steps 3561 = 3561 steps.* optimizer step of 4096 tokens"):
        resolve(("study", both), ("flags", {"seq_len": 256}))
    with pytest.raises(UsageError, match="no whole number of steps"):
        resolve(("study", SIXTEEN | {"steps": 1, "train_tokens": 8193}))


def test_a_later_layer_replaces_the_work_whatever_its_unit():
    study = ("study", SIXTEEN | {"train_tokens": 81920})
    assert resolve(study, ("flags", {"steps": 3})).steps == 3
    assert resolve(("study", {"steps": 3}), ("flags", {"train_tokens": 5 * 128})).steps == 5


def test_enforcement_refuses_any_other_global_batch():
    study = ("a.toml", SIXTEEN | {"enforce_global_batch_size": True})
    assert resolve(study, gpus=2).grad_accum == 2
    with pytest.raises(
        UsageError, match=r"a.toml states global_batch 16.*dp 2 x grad_accum 4 = 32"
    ):
        resolve(study, ("flags", {"grad_accum": 4}), gpus=2)
    with pytest.raises(UsageError, match="nothing states a global_batch"):
        resolve(("flags", {"enforce_global_batch_size": True}))


def test_tokens_are_counted_as_the_loader_counts_them(tokens, tmp_path):
    import numpy as np

    from parallel.cpu import import_megatron

    import_megatron()
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "pair.bin"), dtype=np.int32)
    builder.add_document(np.arange(1000) % 257, [1000])
    builder.finalize(str(tmp_path / "pair.idx"))
    (np.arange(999) % 257).astype("<u2").tofile(tmp_path / "bare.bin")
    for path in (tokens, tmp_path / "bare.bin", tmp_path / "pair", tmp_path / "pair.idx"):
        assert training_tokens(str(path)) == len(data.load(path, 16, 257).train.ids)
    with pytest.raises(UsageError, match="epochs needs the data: .*: No such file"):
        resolve(("study", {"epochs": 1, "data": str(tmp_path / "none")}))
