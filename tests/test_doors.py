"""Others' checkpoints come in and go out through the libraries' own writers and readers."""

import zlib

import pytest
import torch

from models.config import parameter_shapes, preset
from parallel.checkpoint import __main__ as checkpoint
from parallel.checkpoint import folders
from parallel.checkpoint.manifest import KINDS
from parallel.checkpoint.rank_files import Reader
from parallel.doors import Foreign, ours
from tests.tools.tiny_checkpoint import SIZES, Engine, saver_of

MODEL = preset("tiny", **SIZES)


def drawn(name: str, kind: str) -> torch.Tensor:
    draw = torch.Generator().manual_seed(zlib.crc32(f"{kind}/{name}".encode()))
    return torch.rand(parameter_shapes(MODEL)[name], generator=draw)


@pytest.mark.parametrize(("file_bytes", "files"), [(4 << 30, 1), (1200, 9)])
def test_what_is_imported_is_a_checkpoint_in_files_of_a_size(
    file_bytes, files, tmp_path, monkeypatch
):
    monkeypatch.setattr(ours, "FILE_BYTES", file_bytes)
    foreign = Foreign(MODEL, 7, 6, KINDS, drawn, {"run": "imported from a test"})
    written = ours.write(tmp_path / "in", foreign)
    (folder,) = folders.candidates(tmp_path / "in")
    manifest = folders.verify(folder)
    assert (manifest["step"], manifest["adam_step"]) == (7, 6)
    assert written == sum(file["bytes"] for file in manifest["files"])
    assert len(manifest["files"]) == files
    reader = Reader(folder, manifest)
    for name in parameter_shapes(MODEL):
        assert all(reader.gathered(name, kind).equal(drawn(name, kind)) for kind in KINDS)
    engine = Engine()
    saver = saver_of(engine, tmp_path / "run")
    assert saver.load(tmp_path / "in") == 7 and engine.adam_step == 6
    (event,) = saver.events()
    assert event.line().endswith("imported from a test, whose settings and data are not known")
    assert checkpoint.main(["export", str(folder), str(tmp_path / "weights")]) == 0
