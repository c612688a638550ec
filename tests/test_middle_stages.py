"""A pipeline's middle stages read no text, wait for no copy, and make progress all the same."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallel import token_files, trainer
from parallel.config.resolve import resolve
from parallel.engines import StepResult
from parallel.record.launch import Launch
from parallel.record.signals import Interruption

RUN = {"engine": "megatron", "pp": 4, "n_layer": 4, "preset": "tiny", "device": "cpu"}
DOCUMENTS = {"reset_at_documents": True, "end_of_text": 3}


class Text(token_files.Tokens):
    """Tokens that count the batches made of them."""

    made = 0

    def batch(self, *arguments):
        type(self).made += 1
        return super().batch(*arguments)


def stage(tmp_path, monkeypatch, rank: int, **settings) -> trainer.Trainer:
    """The trainer of a rank of four pipeline stages, without the others."""
    monkeypatch.setattr(trainer, "Checkpointer", lambda *_: None)
    own_times = SimpleNamespace(is_on=False, begin=lambda: None, lap=lambda *_: ([], []))
    monkeypatch.setattr(trainer, "OwnTimes", lambda *_: own_times)
    monkeypatch.setattr(Text, "made", 0)
    spec = resolve(("test", RUN | settings), gpus=4)
    text, folder = Text(np.zeros(5000, "u2"), "text"), SimpleNamespace(path=tmp_path, fail=print)
    data = token_files.Data(text, text, None)
    launch, ranks = Launch(rank, 4, rank, 4, "none"), SimpleNamespace(gather=None)
    cpu = torch.device("cpu")
    job = trainer.Job(spec, {}, folder, data, cpu, "torch", launch, Interruption(), 0.0)
    return trainer.Trainer(job, ranks, None)


@pytest.mark.parametrize(
    ("rank", "settings", "reads"),
    [(0, {}, 1), (1, {}, 0), (2, {}, 0), (3, {}, 1), (1, DOCUMENTS, 1)],
)
def test_a_middle_stage_makes_no_batches(rank, settings, reads, tmp_path, monkeypatch):
    one = stage(tmp_path, monkeypatch, rank, **settings)
    taken = list(one._batches(one._made(one.data.train, 0)))
    assert Text.made == reads * one.spec.layout.n_micro
    shapes = {tuple(part.shape) for batch in taken for part in batch}
    assert len(taken) == one.spec.layout.n_micro and shapes == {
        (one.spec.layout.micro_batch, one.spec.seq_len)
    }


def test_a_stage_that_takes_no_batches_makes_progress(tmp_path, monkeypatch):
    """DeepSpeed asks only the first and the last stage's iterator."""
    one, ticks = stage(tmp_path, monkeypatch, 1), itertools.count()
    one.engine = SimpleNamespace(step=lambda *_: StepResult(0.0, 0.0), evaluate=lambda *_: 0.0)
    one.made, one.last_lap = iter(()), 0.0
    monkeypatch.setattr(one.watchdog, "tick", lambda: next(ticks))
    one.step(1)
    one.validate(1)
    assert next(ticks) == 2


def test_a_stage_without_a_loss_copies_nothing_to_its_device():
    """Such a copy waits for all the work of the device before the optimizer is launched."""
    from parallel.engines.megatron import MegatronEngine

    class Copies(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, operation, types, arguments=(), settings=None):
            self.seen += operation is torch.ops.aten._to_copy.default
            return operation(*arguments, **settings or {})

    engine = object.__new__(MegatronEngine)
    engine.spec, engine.device = resolve(("test", RUN), gpus=4), torch.device("meta")
    engine.schedule, engine.chunks, engine.packs = (lambda **_: []), [None], False
    with Copies() as copies:
        share = engine._run(iter(()), 1, forward_only=False)
    assert (copies.seen, share.device.type, share.dtype) == (0, "meta", torch.float32)
