"""Packed documents: a run says what its sequences cross, and with reset_at_documents each document
is computed as if it were alone, in every engine."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from base.errors import UsageError
from models import gpt, hf_model
from models.config import PRESETS
from parallel import data, token_files
from parallel.config.message_bytes import step_volumes
from parallel.config.settings import resolve
from parallel.engines.cpu import import_megatron
from parallel.record.lines import header
from parallel.record.reader import Run, read_run
from tests.conftest import ROOT
from tests.test_parity import breakdown_of, train_all

END = 256  # the byte tokenizer's


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory) -> Path:
    """300 documents of 3 to 14 bytes: several in each sequence of 32 tokens."""
    text = tmp_path_factory.mktemp("text")
    draw = np.random.default_rng(0)
    for number in range(300):
        letters = draw.integers(97, 123, size=draw.integers(3, 15)).astype(np.uint8)
        (text / f"{number:03}.txt").write_bytes(letters.tobytes())
    out = tmp_path_factory.mktemp("documents") / "short"
    data.prepare(out, [text])
    return out


def test_positions_start_again_after_an_end_and_no_token_attends_across_it():
    tokens_BS = torch.tensor([[5, 9, 9, 3, 4], [1, 2, 3, 4, 5]])
    position_BS, mask_B1SS = gpt.positions(tokens_BS, end_of_text=9)
    assert position_BS.tolist() == [[0, 1, 0, 0, 1], [0, 1, 2, 3, 4]]
    assert mask_B1SS[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    assert torch.equal(mask_B1SS[1, 0], torch.ones(5, 5, dtype=torch.bool).tril())
    position_S, none = gpt.positions(tokens_BS, None)
    assert position_S.tolist() == [0, 1, 2, 3, 4] and none is None


def models_of(preset: str, end_of_text: int | None) -> list[torch.nn.Module]:
    """The models that the preset is trained as, with weights large enough to tell positions."""
    config = PRESETS[preset]
    models = [gpt.GPT(config, end_of_text=end_of_text)]
    gpt.initialise(models[0], seed=0)
    models.append(hf_model.HuggingFaceGPT(config, end_of_text=end_of_text))
    hf_model.initialise(models[1], seed=0)
    with torch.no_grad():
        for parameter in (p for model in models for p in model.parameters() if p.dim() > 1):
            parameter *= 5
    return models


def losses(logits_BSV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
    """Each token's, in place of their mean."""
    return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="none")


@pytest.mark.parametrize("preset", ["tiny", "tiny-llama"])
def test_a_packed_document_has_the_losses_that_it_has_alone(preset, monkeypatch):
    monkeypatch.setattr(gpt, "mean_loss", losses)
    monkeypatch.setattr(hf_model, "mean_loss", losses)
    tokens_BS, labels_BS = torch.randint(END, (2, 1, 31))
    tokens_BS[0, 10] = END
    for model, crossing in zip(models_of(preset, END), models_of(preset, None), strict=True):
        packed = model(tokens_BS, labels_BS)
        alone = [model(tokens_BS[:, at], labels_BS[:, at]) for at in (slice(11), slice(11, 31))]
        assert torch.allclose(packed, torch.cat(alone), atol=1e-5)
        difference = (crossing(tokens_BS, labels_BS) - packed).abs()
        assert difference[:11].max() < 1e-5 and difference[11:].max() > 0.1


@pytest.fixture(scope="module", params=["tiny", "tiny-llama"])
def trained(request, short_documents, tmp_path_factory) -> dict[str, Run]:
    """The study's runs of each preset, by name."""
    text = (ROOT / "tests" / "studies" / "documents.toml").read_text()
    path = tmp_path_factory.mktemp(request.param) / "documents.toml"
    path.write_text(text.replace('"tiny"', f'"{request.param}"'))
    folders = train_all(path, short_documents, tmp_path_factory.mktemp(request.param))
    return {name: read_run(folder) for name, folder in folders.items()}


@pytest.mark.slow
def test_every_engine_resets_alike(trained, short_documents):
    ids = token_files.load(short_documents, 32, 257).train.ids
    assert len(ids) / (ids == END).sum() < 12  # so a sequence of 32 tokens holds several
    for name, run in trained.items():
        assert run.state == "complete", run.reason
        assert len(run.steps) == 20
        for ours, theirs in zip(run.steps, trained["ddp"].steps, strict=True):
            same = abs(ours["loss"] - theirs["loss"]) <= 2e-4
            same = same and abs(ours["grad_norm"] / theirs["grad_norm"] - 1) <= 2e-3
            if name != "ddp-crossing" and not same:
                pytest.fail(f"{name}: {ours} beside {theirs}")


@pytest.mark.slow
def test_a_pipeline_sends_the_tokens_too(trained):
    spec, ranks = breakdown_of(trained["deepspeed-pipe-tp2-pp2-recompute-full"].path)
    for rank, rows in ranks.items():
        volume = step_volumes(spec, rank)["pp"]
        assert (rows[-1]["pp_calls"], rows[-1]["pp_bytes"]) == (volume.calls, volume.bytes)


@pytest.mark.slow
def test_the_reset_changes_what_is_computed_and_parity_knows(trained, capsys):
    from analysis import parity

    crossing, resetting = trained["ddp-crossing"], trained["ddp"]
    differ = [
        abs(ours["loss"] - theirs["loss"])
        for ours, theirs in zip(crossing.steps, resetting.steps, strict=True)
    ]
    assert max(differ) > 2e-3
    parity.main([str(resetting.path.parent)])
    assert "reset_at_documents False, baseline 256" in capsys.readouterr().out
    said = (resetting.path / "train.log").read_text()
    assert "positions start again and attention stops there, at id 256" in said
    assert "attention crosses them too (--reset-at-documents" in (
        (crossing.path / "train.log").read_text()
    )


def test_a_run_says_how_many_documents_its_sequences_cross(short_documents, tmp_path):
    import_megatron()
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "pair.bin"), dtype=np.uint16)
    for length in (50, 70, 500):
        builder.add_document(np.arange(length), [length])
    builder.finalize(str(tmp_path / "pair.idx"))
    np.zeros(1000, dtype=np.uint16).tofile(tmp_path / "bare.bin")
    (tmp_path / "one.txt").write_text("x" * 1000)
    data.prepare(tmp_path / "one", [tmp_path / "one.txt"])
    for path, number, crosses, words in (
        (short_documents, 300, True, ": 300, in one stream of tokens; sequences cross their ends"),
        (tmp_path / "pair", 3, True, ": 3, in one stream"),
        (tmp_path / "bare.bin", None, None, ": unknown (the token files do not say), in one"),
        (tmp_path / "one", 1, False, ": 1, so no sequence crosses a document's end"),
    ):
        facts = token_files.load(path, 8, 512).facts()
        assert facts["documents"] == number
        assert facts["sequences_cross_documents"] is crosses
        spec = resolve(("test", {"data": str(path), "vocab_size": 512}))
        sizes = {"n_params": 1, "vocab_size": 512, "padded_vocab": 512}
        split = vars(spec.layout) | {"n_micro": 1}
        run = {"run": "r", "model": sizes, "layout": split, "kernels": "torch", "data": facts}
        run |= {"attention": "torch", "variables": {}, "host": {"gpu": None}}
        assert any(f"documents of {path}{words}" in line for line in header(spec, run))


def test_several_documents_in_one_file_are_counted(tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text("a story<|endoftext|>another one")
    meta = data.prepare(tmp_path / "out", [tmp_path / "text"], "bpe", 300)
    assert meta["documents"] == 40
    ids = token_files.load(tmp_path / "out", 4, 300).train.ids
    assert (ids == meta["end_of_text"]).sum() == 38


def test_without_the_id_that_ends_a_document_a_reset_is_refused(short_documents, tmp_path):
    np.zeros(1000, dtype=np.uint16).tofile(tmp_path / "bare.bin")
    bare, prepared = {"data": str(tmp_path / "bare.bin")}, {"data": str(short_documents)}
    reset = {"reset_at_documents": True}
    split = {"engine": "megatron", "gpus": 2, "cp": 2, "device": "cuda", "end_of_text": 3}
    for settings, reason in (
        (bare | reset, "bare.bin does not say it: give end_of_text, or prepare t"),
        (bare | reset | {"end_of_text": 300}, "end_of_text 300 is not among the 257 ids"),
        (bare | {"end_of_text": 3}, "end_of_text 3 is used with reset_at_documents True"),
        (reset | {"data": str(tmp_path)}, "does not say it: give end_of_text"),
        (bare | reset | split, "needs whole sequences on each rank, so cp 1, not 2"),
        (prepared | reset | {"end_of_text": 3}, f"not the data's: .* says {END}"),
    ):
        with pytest.raises(UsageError, match=reason):
            resolve(("test", settings))
    assert resolve(("test", bare | reset | {"end_of_text": 3})).end_of_text == 3
    assert resolve(("test", prepared | reset)).end_of_text == END
    assert resolve(("test", prepared)).end_of_text is None
