"""Packed documents: a run says what its sequences cross, and with reset_at_documents each document
is computed as if it were alone, in every engine."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from analysis import curves
from analysis.logs.load import load
from analysis.logs.model import config_of
from analysis.runs import throughput
from base.errors import UsageError
from models import gpt, hf_model
from models.config import PRESETS
from models.flops import megatron
from parallel import batches, data, token_files
from parallel.config.resolve import resolve
from parallel.record.reader import read_run
from tests.conftest import ROOT
from tests.fixture_runs import facts, write
from tests.test_parity import STEPS, train_all

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
    tokens_BS[0, 10:12] = END  # the second ends an empty document
    documents = slice(11), slice(11, 12), slice(12, 31)
    for model, crossing in zip(models_of(preset, END), models_of(preset, None), strict=True):
        packed = model(tokens_BS, labels_BS)
        alone = [model(tokens_BS[:, at], labels_BS[:, at]) for at in documents]
        assert torch.allclose(packed, torch.cat(alone), atol=1e-5)
        difference = (crossing(tokens_BS, labels_BS) - packed).abs()
        assert difference[:11].max() < 1e-5 and difference[11:].max() > 0.1


def test_attention_works_as_in_sequences_of_the_squares_of_documents_lengths(short_documents):
    """The mask has len (len + 1) / 2 pairs of each document; the run's first steps are measured."""
    data = {"data": str(short_documents), "reset_at_documents": True, "max_seq_len": 32}
    spec = resolve(("test", data | {"global_batch": 8, "steps": 3, "preset": "tiny"}))
    tokens = token_files.load(short_documents, 32, 257).train
    made = [batches.batches(tokens, spec, 0, step) for step in range(3)]
    pairs = [gpt.positions(rows, END)[1].sum(dim=(1, 2, 3)) for step in made for rows, _ in step]
    squares = 2.0 * torch.cat(pairs) - 32
    attended = batches.attended_seq_len(tokens, spec)
    assert len(squares) == 24 and attended == pytest.approx(float(squares.mean()) / 32)
    assert 6 < attended < 14
    more = batches.attended_seq_len(tokens, replace(spec, steps=10**6))
    assert more == batches.attended_seq_len(tokens, replace(spec, steps=128))  # 1,024 sequences


def test_flops_are_of_the_attention_within_documents_and_an_old_folder_says_what_it_lacks(tmp_path):
    counted, shown = {}, {}
    for name, seen in (("whole", None), ("documents", 16.0), ("old", 0.0)):
        about = facts(name, name, gpus=1)
        about["spec"]["reset_at_documents"] = name != "whole"
        about["data"] |= {"attended_seq_len": seen} if seen else {}
        folder = write(tmp_path / name, about)
        ((record,), _) = load([folder])
        counted[name] = throughput.per_token(record, "megatron")
        values = curves.points_of(record)[-1].values
        shown[name] = values.get("throughput/tflops_per_gpu"), values["throughput/tokens_per_s"]
        assert throughput.per_token(record, "6n").value
    config = config_of(record).value
    assert counted["whole"].value == megatron(config, record.seq_len, False)
    assert counted["documents"].value == megatron(config, 16.0, False) < counted["whole"].value
    assert counted["old"].reason.endswith("and run.json has no data.attended_seq_len")
    for name in ("whole", "documents"):
        tflops, tokens_per_s = shown[name]
        assert tflops == pytest.approx(counted[name].value * tokens_per_s / 1e12)
    assert shown["old"][0] is None


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["tiny", "tiny-llama"])
def test_every_engine_resets_alike_and_parity_knows(preset, short_documents, tmp_path, capsys):
    from analysis import parity

    text = (ROOT / "tests" / "studies" / "documents.toml").read_text()
    path = tmp_path / "documents.toml"
    path.write_text(text.replace('"tiny"', f'"{preset}"'))
    folders = train_all(path, short_documents, tmp_path)
    trained = {name: read_run(folder) for name, folder in folders.items()}
    for name, run in trained.items():
        assert run.state == "complete", run.reason
        assert len(run.steps) == STEPS
        for ours, theirs in zip(run.steps, trained["ddp"].steps, strict=True):
            if name != "ddp-crossing":
                assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-4), name
                assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-3), name
    crossing, resetting = trained["ddp-crossing"], trained["ddp"]
    pairs = zip(crossing.steps, resetting.steps, strict=True)
    assert max(abs(ours["loss"] - theirs["loss"]) for ours, theirs in pairs) > 2e-3
    parity.main([str(resetting.path.parent)])
    assert "reset_at_documents False, baseline 256" in capsys.readouterr().out
    assert "at id 256" in (resetting.path / "train.log").read_text()
    seen = [run.facts["data"].get("attended_seq_len") for run in (crossing, resetting)]
    assert seen[0] is None and 6 < seen[1] < 14
    log, metrics = load([resetting.path]).content[0], resetting.metrics["summary"]
    per_token = throughput.per_token(log, "megatron").value
    rate = metrics["steady_tokens_per_sec_global"] / 1e12
    assert metrics["tflops_per_gpu"] == pytest.approx(per_token * rate)
    assert "at id 256" not in (crossing.path / "train.log").read_text()


def test_without_the_id_that_ends_a_document_a_reset_is_refused(short_documents, tmp_path):
    np.zeros(1000, dtype=np.uint16).tofile(tmp_path / "bare.bin")
    bare, prepared = {"data": str(tmp_path / "bare.bin")}, {"data": str(short_documents)}
    reset = {"reset_at_documents": True}
    pipe = {"engine": "deepspeed_pipe", "gpus": 2, "pp": 2, "end_of_text": 3}
    split = {"engine": "megatron", "gpus": 2, "cp": 2, "device": "cuda", "end_of_text": 3}
    for settings, reason in (
        (bare | reset, "bare.bin does not say it: give end_of_text, or prepare t"),
        (bare | reset | {"end_of_text": 300}, "end_of_text 300 is not among the 257 ids"),
        (bare | {"end_of_text": 3}, "end_of_text 3 is used with reset_at_documents True"),
        (reset | {"data": str(tmp_path)}, "does not say it: give end_of_text"),
        (bare | reset | pipe, "engine deepspeed_pipe has no reset_at_documents"),
        (bare | reset | split, "needs whole sequences on each rank, so cp 1, not 2"),
        (prepared | reset | {"end_of_text": 3}, f"not the data's: .* says {END}"),
    ):
        with pytest.raises(UsageError, match=reason):
            resolve(("test", settings))
    assert resolve(("test", bare | reset | {"end_of_text": 3})).end_of_text == 3
    assert resolve(("test", prepared | reset)).end_of_text == END
    assert resolve(("test", prepared)).end_of_text is None
