"""A run does exactly the work its study states, whatever the ranks; steps are never micro-steps."""

import struct

import numpy as np
import pytest

from base.errors import UsageError
from parallel import token_files
from parallel.config.data_files import training_tokens
from parallel.config.duration import steps_of
from parallel.config.resolve import resolve

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


def test_a_budget_of_tokens_is_never_exceeded():
    assert resolve(("study", SIXTEEN | {"train_tokens": 10 * 8192 + 8191})).steps == 10
    with pytest.raises(UsageError, match="train_tokens 8191 is less than one step's 8192"):
        resolve(("study", SIXTEEN | {"train_tokens": 8191}))


def test_two_statements_of_the_work_must_agree_and_a_later_layer_replaces_them():
    both = SIXTEEN | {"steps": 3561, "train_tokens": 29_171_712}
    assert resolve(("study", both)).steps == 3561
    with pytest.raises(UsageError, match="steps 3561 = 3561 steps.* optimizer step of 4096 tokens"):
        resolve(("study", both), ("flags", {"seq_len": 256}))
    study = ("study", SIXTEEN | {"train_tokens": 81920})
    assert resolve(study, ("flags", {"steps": 3})).steps == 3
    assert resolve(("study", {"steps": 3}), ("flags", {"train_tokens": 5 * 128})).steps == 5


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (4, "i4"), (5, "i8"), (8, "u2")])
def test_a_megatron_index_says_how_wide_its_ids_are(code, dtype, tmp_path):
    """megatron/core/datasets/indexed_dataset.py: b"MMIDIDX", version 1, DType, the numbers of
    sequences and of documents and 1, lengths, bytes before each, documents; 5 % are held out."""

    def index(code: int, lengths=(400, 600), begins=None, documents=(0, 1, 2)) -> bytes:
        width = np.dtype(dtype).itemsize
        begins = (0, lengths[0] * width) if begins is None else begins
        head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
        return head + struct.pack("<2i2q", *lengths, *begins) + np.array(documents, "<i8").tobytes()

    for name in ("text", "words.v2"):
        (tmp_path / f"{name}.idx").write_bytes(index(code))
        np.zeros(1000, dtype).tofile(tmp_path / f"{name}.bin")
    for name in ("text", "text.idx", "words.v2", "words.v2.idx"):
        assert training_tokens(str(tmp_path / name)) == 950
    for damaged, why in (
        (index(7), "its ids are of type 7"),  # floats
        (index(code)[:17], "its header is"),
        (index(code)[:-1], "it has 81 bytes for 2 sequences and 3 document bounds"),
        (index(code, documents=()), "it has 58 bytes for 2 sequences and 0 document bounds"),
        (index(code, lengths=(400, 599)), "its sequences end at byte"),
        (index(code, begins=(0, -8)), "its sequences end at byte"),
    ):
        (tmp_path / "text.idx").write_bytes(damaged)
        with pytest.raises(UsageError, match=f"text.idx is not a Megatron index of .*: {why}"):
            training_tokens(str(tmp_path / "text"))


@pytest.mark.parametrize("dtype", ["<i2", "<i4"])
def test_an_id_below_0_is_refused_before_anything_starts(dtype, tmp_path):
    code, ids = {"<i2": 3, "<i4": 4}[dtype], np.zeros(100, dtype)
    ids[7] = -1
    ids.tofile(tmp_path / "text.bin")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 1, 2)
    (tmp_path / "text.idx").write_bytes(head + struct.pack("<iqqq", 100, 0, 0, 1))
    beyond = 2 ** (8 * ids.itemsize) - 1
    with pytest.raises(UsageError, match=f"holds token id {beyond}, but the model's vocabulary"):
        token_files.load(tmp_path / "text", 4, 257)
    unread = token_files.load(tmp_path / "text", 4, 257, scan=False).train
    with pytest.raises(UsageError, match=f"holds token id {beyond}, but the model's vocabulary"):
        unread.batch(np.array([5]), 4, 257)


def test_an_epoch_is_one_step_at_least(tmp_path):
    np.zeros(2000, "u2").tofile(tmp_path / "text.bin")  # 1,900 of them for training
    data = str(tmp_path / "text.bin")
    assert [steps_of({"epochs": 1}, n, data) for n in (1900, 950, 949)] == [1, 2, 2]
    with pytest.raises(UsageError, match="has 1900 tokens, less than one step's 1901"):
        steps_of({"epochs": 1}, 1901, data)
    with pytest.raises(UsageError, match="epochs 2 = 2 steps, steps 3 = 3 steps"):
        steps_of({"epochs": 2, "steps": 3}, 1900, data)
    assert steps_of({"epochs": 2, "steps": 4, "train_tokens": 3800}, 950, data) == 4


def test_an_epoch_is_as_many_whole_steps_as_the_split_fills(tokens, tmp_path):
    settings = {"data": str(tokens), "global_batch": 8, "seq_len": 64, "epochs": 3}
    per_epoch = len(token_files.load(tokens, 64, 257).train.ids) // (8 * 64)
    assert resolve(("study", settings)).steps == 3 * per_epoch
    with pytest.raises(UsageError, match="no token files at .*none"):
        resolve(("study", settings | {"data": str(tmp_path / "none")}))
