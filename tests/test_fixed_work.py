"""A run does exactly the work its study states, whatever the ranks; steps are never micro-steps."""

import struct

import numpy as np
import pytest

from models.errors import UsageError
from parallel import token_files
from parallel.config.data_files import training_tokens
from parallel.config.duration import steps_of, steps_per_epoch
from parallel.config.settings import resolve
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
    per_epoch = len(token_files.load(tokens, 64, 257).train.ids) // (8 * 64)
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


@pytest.mark.parametrize(
    ("code", "dtype"), [(1, "u1"), (2, "i1"), (3, "i2"), (4, "i4"), (5, "i8"), (8, "u2")]
)
def test_a_megatron_index_says_how_wide_its_ids_are(code, dtype, tmp_path):
    """megatron/core/datasets/indexed_dataset.py: b"MMIDIDX", version 1, DType; 5 % are held out."""
    header = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    for name in ("text", "words.v2"):
        (tmp_path / f"{name}.idx").write_bytes(header)
        np.zeros(1000, dtype).tofile(tmp_path / f"{name}.bin")
    for name in ("text", "text.idx", "words.v2", "words.v2.idx"):
        assert training_tokens(str(tmp_path / name)) == 950
    for damaged in (header[:-1] + b"\x07", header[:-1]):  # of floats, or cut
        (tmp_path / "text.idx").write_bytes(damaged)
        with pytest.raises(UsageError, match="text is damaged"):
            training_tokens(str(tmp_path / "text"))


def test_bare_files_hold_two_bytes_a_token_and_a_twentieth_back_unless_val_is_beside(tmp_path):
    train = tmp_path / "train.bin"
    for name in ("train.bin", "other.bin"):
        np.zeros(1000, "u2").tofile(tmp_path / name)
    assert training_tokens(str(train)) == training_tokens(str(tmp_path)) == 950
    (tmp_path / "val.bin").touch()
    assert training_tokens(str(train)) == training_tokens(str(tmp_path)) == 1000
    assert training_tokens(str(tmp_path / "other.bin")) == 950  # val.bin is not its
    (tmp_path / "meta.json").write_text('{"tokens": {"train": "123"}}')
    assert training_tokens(str(tmp_path)) == 123
    (tmp_path / "meta.json").write_text("{}")
    with pytest.raises(UsageError, match="is damaged: KeyError"):
        training_tokens(str(tmp_path))


def test_an_epoch_is_one_step_at_least(tmp_path):
    np.zeros(2000, "u2").tofile(tmp_path / "text.bin")  # 1,900 of them for training
    data = str(tmp_path / "text.bin")
    assert [steps_per_epoch(n, data) for n in (1900, 950, 949)] == [1, 2, 2]
    with pytest.raises(UsageError, match="has 1900 tokens, less than one step's 1901"):
        steps_per_epoch(1901, data)
    with pytest.raises(UsageError, match="epochs 2 = 2 steps, steps 3 = 3 steps"):
        steps_of({"epochs": 2, "steps": 3}, 1900, data)
    assert steps_of({"epochs": 2, "steps": 4, "train_tokens": 3800}, 950, data) == 4


def test_tokens_are_counted_as_the_loader_counts_them(tokens, tmp_path):
    from parallel.engines.cpu import import_megatron

    import_megatron()
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "pair.bin"), dtype=np.int32)
    builder.add_document(np.arange(1000) % 257, [1000])
    builder.finalize(str(tmp_path / "pair.idx"))
    (np.arange(999) % 257).astype("<u2").tofile(tmp_path / "bare.bin")
    for path in (tokens, tmp_path / "bare.bin", tmp_path / "pair", tmp_path / "pair.idx"):
        assert training_tokens(str(path)) == len(token_files.load(path, 16, 257).train.ids)
    with pytest.raises(UsageError, match="epochs needs the data: .*: No such file"):
        resolve(("study", {"epochs": 1, "data": str(tmp_path / "none")}))
