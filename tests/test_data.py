"""Data: text becomes token files, other formats are read, and a step's sequences depend on
(seed, step) alone."""

import hashlib
import json
import resource
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from base.errors import UsageError
from parallel import batches, data, token_files, train
from parallel.config.data_files import training_tokens
from parallel.config.layout import Layout
from parallel.record.reader import read_run
from tests.conftest import run_module, write_prepared

FOX = [f"document {i}: " + "the quick brown fox. " * 20 for i in range(40)]


def folder_of(folder: Path, texts: list[str]) -> Path:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_text(text)
    return folder


@pytest.fixture
def corpus(tmp_path) -> Path:
    return folder_of(tmp_path / "text", FOX)


def test_bytes_come_back_as_the_text_and_of_one_file_the_end_is_held_out(corpus, tmp_path):
    data.prepare(tmp_path / "out", [corpus])
    loaded = token_files.load(tmp_path / "out", seq_len=8, vocab_size=257)
    assert bytes(loaded.train.ids[:11].astype(np.uint8)) == b"document 0:"
    assert (loaded.train.ids == 256).sum() + (loaded.val.ids == 256).sum() == 40
    (tmp_path / "one.txt").write_text("x" * 1000)
    meta = data.prepare(tmp_path / "one", [tmp_path / "one.txt"])
    assert meta["tokens"] == {"train": 950, "val": 51}
    one = token_files.load(tmp_path / "one", seq_len=8, vocab_size=257)
    assert [documents_of(of) for of in (loaded, one)] == [(40, True), (1, False)]


def documents_of(loaded: token_files.Data) -> tuple[int | None, bool | None]:
    return loaded.facts()["documents"], loaded.facts()["sequences_cross_documents"]


def test_bpe_is_trained_here_and_its_file_is_a_hugging_face_tokenizer(corpus, tmp_path):
    from tokenizers import Tokenizer

    path = tmp_path / "bpe" / "tokenizer.json"
    meta = data.prepare(tmp_path / "bpe", [corpus], tokenizer="bpe", vocab_size=300)
    assert 257 < meta["vocab_size"] <= 300
    ids = token_files.load(tmp_path / "bpe", 8, 300).train.ids
    text = Tokenizer.from_file(str(path)).decode(ids[:40].tolist())
    assert "document 0: the quick brown fox." in text
    (corpus / "000.txt").write_text("a story<|endoftext|>another one")
    again = data.prepare(tmp_path / "out", [corpus], tokenizer=str(path))
    assert (again["tokenizer"], again["documents"]) == (str(path), meta["documents"] + 1)
    assert token_files.load(tmp_path / "out", 8, 300).train.ids[-40:].tolist() == ids[-40:].tolist()


def test_nanogpts_files_are_read_with_their_held_out_part(tmp_path):
    ids = np.arange(1000, dtype=np.uint16) % 50
    ids.tofile(tmp_path / "train.bin")
    ids.tofile(tmp_path / "other.bin")
    alone = token_files.load(tmp_path / "train.bin", seq_len=8, vocab_size=50)
    assert documents_of(alone) == (None, None)
    assert training_tokens(str(tmp_path)) == len(alone.train.ids) == 950
    assert np.array_equal(np.concatenate([alone.train.ids, alone.val.ids]), ids)
    np.full(100, 7, dtype=np.uint16).tofile(tmp_path / "val.bin")
    for path in (tmp_path, tmp_path / "train.bin"):
        loaded = token_files.load(path, 8, 50)
        assert len(loaded.train.ids) == training_tokens(str(path)) == 1000
        assert set(loaded.val.ids) == {7}
    assert training_tokens(str(tmp_path / "other.bin")) == 950  # val.bin is not its


def test_megatron_indexed_pair_is_read(tmp_path):
    from parallel.engines.cpu import import_megatron

    import_megatron()
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "text_document.bin"), dtype=np.uint16)
    documents = [np.arange(n) for n in (50, 70, 500)]
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(str(tmp_path / "text_document.idx"))
    loaded = token_files.load(tmp_path / "text_document", seq_len=8, vocab_size=500)
    both = np.concatenate([loaded.train.ids, loaded.val.ids])
    assert np.array_equal(both, np.concatenate(documents)) and documents_of(loaded) == (3, True)


def batches_of(tokens, seed: int = 1, step: int = 0, **split: int) -> set[tuple]:
    layout = Layout(**split)
    model = SimpleNamespace(vocab_size=257)
    spec = SimpleNamespace(layout=layout, seq_len=16, seed=seed, model=model)
    seen = []
    for dp_rank in range(layout.dp):
        for text, labels in batches.batches(tokens, spec, dp_rank, step):
            assert text.shape == labels.shape == (layout.micro_batch, 16)
            assert torch.equal(text[:, 1:], labels[:, :-1])
            seen += [tuple(row.tolist()) for row in text]
    assert len(seen) == layout.global_batch
    return set(seen)


def test_a_steps_sequences_do_not_depend_on_the_layout(tokens):
    train = token_files.load(tokens, 16, 257).train
    one = batches_of(train, micro_batch=16)
    assert one == batches_of(train, dp=2, micro_batch=2, n_micro=4)
    assert one == batches_of(train, dp=4, tp=2, pp=2, micro_batch=4)
    assert one != batches_of(train, micro_batch=16, step=1)
    assert one != batches_of(train, micro_batch=16, seed=2)


def test_ids_beyond_the_vocabulary_are_refused(tmp_path, tokens):
    with pytest.raises(UsageError, match="tokenizer of 257 ids.*has 256; pass --vocab-size 257"):
        token_files.load(tokens, 8, 256)
    np.full(1000, 300, dtype=np.uint16).tofile(tmp_path / "bare.bin")
    with pytest.raises(UsageError, match="token id 300, but the model's vocabulary has 257"):
        token_files.load(tmp_path / "bare.bin", 8, 257)
    bare = token_files.load(tmp_path / "bare.bin", 8, 301).train
    with pytest.raises(UsageError, match="token id 300, but the model's vocabulary has 257"):
        bare.batch(np.array([0]), 8, 257)
    assert bare.sha256 == bare.scan().sha256


def test_a_bare_file_is_read_whole_once_until_it_changes(tmp_path, monkeypatch, capsys):
    path, scans = tmp_path / "bare.bin", []
    scan = token_files.Tokens.scan
    monkeypatch.setattr(token_files.Tokens, "scan", lambda t: scans.append(len(t.ids)) or scan(t))
    np.full(1000, 7, dtype=np.uint16).tofile(path)
    first, again = (token_files.load(path, 8, 8) for _ in range(2))
    assert scans == [950, 50] and first.train.sha256 == again.train.sha256
    with pytest.raises(UsageError, match="token id 7, but the model's vocabulary has 7"):
        token_files.load(path, 8, 7)
    assert len(scans) == 2 and token_files.load(path, 8, 8, scan=False).train.sha256 is None
    np.full(1000, 6, dtype=np.uint16).tofile(path)
    assert token_files.load(path, 8, 7).train.sha256 != first.train.sha256
    kept = tmp_path / "bare.bin.train.scan.json"
    for damaged in (kept.read_text().replace('"largest": 6', '"largest": 9'), "[]"):  # read again
        kept.write_text(damaged)
        assert token_files.load(path, 8, 7)
    assert scans == [950, 50] * 2 + [950] * 2
    np.zeros(9, "u2").tofile(tmp_path / "val.bin")
    path.rename(tmp_path / "train.bin")  # which val.bin is held out of: all of it is for training
    assert len(token_files.load(tmp_path, 8, 7).train.ids) == scans[-2] == 1000
    assert capsys.readouterr().err == ""


class Ranks:
    """One of many ranks; what each has read of a split comes from `shares`."""

    def __init__(self, rank: int, world: int, shares: dict[int, list]):
        self.rank, self.world, self.shares, self.ticks = rank, world, shares, 0

    def on_first(self, work):
        return work()

    def on_all(self, work, *arguments):
        self.shares[self.rank] = work(*arguments)
        return [self.shares.get(rank, [token_files.Scan(0, "")]) for rank in range(self.world)]

    def tick(self) -> None:
        self.ticks += 1


@pytest.mark.parametrize("world", [1, 3, 8, 40])
def test_ranks_read_a_share_each_of_a_large_file_once_they_have_met(world, tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "BLOCK_BYTES", 2000)
    path, shares = tmp_path / "bare.bin", {}
    ids = np.arange(20_000, dtype="<u2") % 300
    ids.tofile(path)
    scan, scans = token_files.Tokens.scan, []
    monkeypatch.setattr(token_files.Tokens, "scan", lambda t, *a: scans.append(a) or scan(t, *a))
    opened = token_files.load(path, 8, 300)
    assert scans == [()]  # validation's, of one block
    assert opened.train.sha256 is None and opened.val.sha256 is not None
    for rank in reversed(range(world)):  # the first one has all shares then
        ranks = Ranks(rank, world, shares)
        checked = token_files.scanned(opened, 300, ranks)
        assert ranks.ticks == len(shares[rank]) <= -(-19 // world)
    assert len(scans) == 1 + 19
    blocks = (hashlib.sha256(ids[at : at + 1000]).digest() for at in range(0, 19_000, 1000))
    assert checked.train.sha256 == hashlib.sha256(b"".join(blocks)).hexdigest()
    assert token_files.load(path, 8, 300).facts() == checked.facts()  # it was kept
    with pytest.raises(UsageError, match="token id 299, but the model's vocabulary has 299"):
        token_files.scanned(opened, 299, ranks)


def test_two_ranks_train_on_a_large_file_or_refuse_it(tmp_path, capsys):
    path, out = tmp_path / "bare.bin", tmp_path / "run"
    with path.open("wb") as file:
        file.truncate(150 << 20)  # zeros that take no room
        flags = ["--max-seq-len", "32", "--device", "cpu", "--steps", "1", "--data", str(path)]
        assert train.main([*flags, "--check"]) == 0
        assert "is large: the run reads and checks it, not --check" in capsys.readouterr().err
        done = run_module("parallel.train", *flags, "--out", str(out), ranks=2)
        assert done.returncode == 0, done.stderr
        kept = json.loads((tmp_path / "bare.bin.train.scan.json").read_text())
        assert read_run(out).facts["data"]["sha256"] == kept["sha256"]
        file.seek(100 << 20)
        file.write(b"\xff\xff")
    done = run_module("parallel.train", *flags, "--out", str(out), ranks=2)
    assert done.returncode == 2 and "holds token id 65535" in done.stderr
    assert train.main([*flags, "--check"]) == 2  # what the run found is kept


def test_too_little_text_and_a_file_of_a_prepared_folder_are_refused(tmp_path):
    folder = write_prepared(tmp_path / "data", 5)
    with pytest.raises(UsageError, match="split train .* has 5 tokens, too few.*64"):
        token_files.load(folder, 64, 257)
    with pytest.raises(UsageError, match="belongs to the prepared folder"):
        token_files.load(folder / "train.bin", 4, 257)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"dtype": "O"}, r"is not ours \(KeyError\('O'\)\): prepare it again"),
        ({"sha256": {"train": "d"}}, r"is not ours \(KeyError\('val'\)\)"),
        ({"dtype": "<u4"}, "train.bin holds 2500 ids, but meta.json beside it states 5000"),
    ],
)
def test_a_meta_json_that_cannot_be_is_refused(values, why, tmp_path):
    folder = write_prepared(tmp_path / "data", 5000, **values)
    with pytest.raises(UsageError, match=why):
        token_files.load(folder, 8, 257)


def test_what_meta_json_states_of_a_prepared_folder_is_not_read_again(tmp_path, monkeypatch):
    folder = write_prepared(tmp_path / "data", 5000)
    monkeypatch.setattr(token_files.Tokens, "scan", None)
    loaded = token_files.load(folder, 8, 257)
    assert loaded.facts()["sha256"] == hashlib.sha256(bytes(10_000)).hexdigest()
    assert token_files.scanned(loaded, 257, Ranks(0, 1, {})) is loaded
    assert {path.name for path in folder.iterdir()} == {"train.bin", "val.bin", "meta.json"}


def test_a_preparation_that_fails_leaves_nothing_and_none_replaces_what_is_there(corpus, tmp_path):
    out = tmp_path / "data" / "x"
    with pytest.raises(UsageError, match="no tokenizer at"):
        data.prepare(out, [corpus], tokenizer=str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="no text: the 1 documents of the input are empty"):
        data.prepare(out, [folder_of(tmp_path / "empty", [""])])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limits[1]))  # as on a full disk
    try:
        with pytest.raises(UsageError, match=f"cannot write {out}: File too large"):
            data.prepare(out, [corpus])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(out.parent.iterdir()) == []
    data.prepare(out, [corpus])
    before = (out / "meta.json").read_text()
    with pytest.raises(UsageError, match="data/x is there already: remove it, or give another"):
        data.prepare(out, [corpus])
    assert data.main(["--out", str(out), "--if-missing"]) == 0
    assert (out / "meta.json").read_text() == before
    (out / "meta.json").write_text(before.replace('"end_of_text": 256', '"end_of_text": 250'))
    with pytest.raises(UsageError, match="x/meta.json has changed since it was written"):
        token_files.load(out, 8, 257)


def test_an_input_or_a_vocabulary_that_cannot_be_is_named(tmp_path, capsys):
    with pytest.raises(UsageError, match="/dev/zero: no such file or folder"):
        data.prepare(tmp_path / "out", [Path("/dev/zero")])
    (tmp_path / "some.txt").write_text("text " * 50)
    for size in (256, 2**40):
        with pytest.raises(UsageError, match=f"--vocab-size 257 to 1048576, not {size}"):
            data.prepare(tmp_path / "x", [tmp_path / "some.txt"], "bpe", size)
    assert data.main(["--vocab-size", "300", "--out", str(tmp_path / "out")]) == 2
    assert "the tokenizer byte has its own" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.txt", b"na\xefve", " is no UTF-8 text: byte 3 is 0xef"),
        ("a.txt", bytes(100), " is no text: it holds a zero byte"),
        *(
            ("a.jsonl", b'{"text": "some"}\n' + line, ":2 is no JSON object with a text at 'text'")
            for line in (b'{"content": "x"}', b"[1]", b'"text"', b"{", b'{"text": 5}')
        ),
        ("a.jsonl", b'{"text": "\\ud800"}', ":1 is no JSON object with a text at 'text'"),
    ],
)
def test_a_file_or_a_line_that_is_no_text_is_named(name, content, why, corpus, tmp_path):
    (corpus / name).write_bytes(content)
    with pytest.raises(UsageError, match=f"{name}{why}"):
        data.prepare(tmp_path / "out", [corpus])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_each_line_of_a_jsonl_file_is_a_document(tokenizer, tmp_path, capsys):
    texts = [f"document {n}:\nit has two lines é" for n in range(40)]
    file = tmp_path / "a.jsonl"  # a blank line is none
    file.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n\n" for text in texts))
    meta = data.prepare(tmp_path / "lines", [file], tokenizer, 300)
    files = data.prepare(tmp_path / "files", [folder_of(tmp_path / "t", texts)], tokenizer, 300)
    assert meta["documents"] == 40 and capsys.readouterr().err == ""
    assert meta["sha256"] == files["sha256"]


def test_the_text_of_a_line_has_a_key_and_empty_documents_are_left_out(tmp_path, capsys):
    file = tmp_path / "a.JSONL"
    file.write_text('{"content": "some text"}\n{"content": ""}\n')
    flags = ["--input", str(file), "--out", str(tmp_path / "out")]
    assert data.main(["--text-key", "x", "--input", __file__, *flags[2:]]) == 2
    assert "--text-key x is of .jsonl files" in capsys.readouterr().err
    assert data.main([*flags, "--text-key", "content"]) == 0
    printed = capsys.readouterr()
    assert "1 documents" in printed.out
    assert printed.err == "parallel.data: left out 1 empty documents of 2\n"


def test_check_refuses_the_data_that_the_start_refuses(tmp_path, capsys):
    bare = tmp_path / "bare.bin"
    flags = ["--check", "--preset", "tiny", "--data", str(bare)]
    assert train.main(flags) == 0
    assert f"no token files at {bare} here: they are not checked" in capsys.readouterr().err
    np.full(4000, 300, dtype=np.uint16).tofile(bare)
    assert train.main(flags) == 2
    assert "holds token id 300, but the model's vocabulary has 257 ids" in capsys.readouterr().err
    np.zeros(4000, dtype=np.uint16).tofile(bare)
    assert train.main([*flags, "--reset-at-documents", "--end-of-text", "3"]) == 0
