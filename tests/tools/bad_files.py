"""Bad files around a run: packed logs, documents, tokens.

bad_input.py runs these campaigns. Each case is one function of a seeded generator and a folder.
"""

import functools
import gzip
import io
import json
import os
import random
import tarfile
import tempfile
import zipfile
from pathlib import Path
from unittest import mock

import numpy as np

from analysis.logs import readers
from analysis.logs.parsing import packed
from base.errors import UsageError
from tests.tools import spoil
from tests.tools.spoil import spoilt
from tests.tools.watched import WRONG, Problem, command, watched

# --- packed logs ---------------------------------------------------------------------------------

LOG = "".join(
    f" iteration {i:8d}/      20 | consumed samples: {16 * i:12d} | elapsed time per iteration"
    f" (ms): {100 + i % 3}.0 | global batch size: 16 | lm loss: {9 - i / 10:.6E} |\n"
    for i in range(1, 21)
).encode()


def packed_by(kind: str, data: bytes) -> bytes:
    """The data as two members of an archive."""
    out = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in ("a.log", "b.log"):
                archive.writestr(name, data)
    else:
        with tarfile.open(fileobj=out, mode=kind) as archive:
            for name in ("a.log", "b.log"):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


PACKED = {
    "gz": gzip.compress,
    "gz twice": lambda data: gzip.compress(gzip.compress(data)),
    "tar": functools.partial(packed_by, "w"),
    "tar.gz": functools.partial(packed_by, "w:gz"),
    "zip": functools.partial(packed_by, "zip"),
    "bomb": lambda data: gzip.compress(bytes(1 << 25)),
}


@mock.patch.object(packed, "MOST", 1 << 24)  # bytes, so that a small bomb is one
def one_packed(chance: random.Random, folder: Path, loud: bool) -> list[Problem]:
    """A packed log, whole or damaged: read as the log, or refused."""
    kind = chance.choice([*PACKED, "gz", "pipe", "device", "name"])
    path = folder / f"run.{kind.replace(' ', '.')}"
    damaged = kind in PACKED and chance.random() < 0.5
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to(chance.choice(["/dev/zero", "/dev/null", "/dev/full", "/dev/tty"]))
    elif kind == "name":
        path = folder / os.fsdecode(chance.choice([b"\xff.log", b"\x1b[2J.log", b"a\nb.log"]))
        path.write_bytes(LOG)
    else:
        data = PACKED[kind](LOG)
        path.write_bytes(spoilt(chance, data)[1] if damaged else data)
    problems: list[Problem] = command("analysis.tflops", [str(path), "--format", "json"], loud)[1]
    if not damaged and not problems and kind != "device":
        read, problems = watched(lambda: readers.read(path), loud)
        steps = 0 if isinstance(read, UsageError) else len(read.steps)
        if steps != (20 if kind in ("gz", "name") else 0):
            problems = [(WRONG, f"{kind}: {steps} steps are read")]
    return problems


# --- documents -----------------------------------------------------------------------------------

LINES = b"".join(b'{"text": "%d", "id": 1}\n' % number for number in range(3))
# The ending of a file's name, its bytes, and its documents; None: it is no text.
DOCUMENTS = [
    (".txt", "abc é\n".encode() * 30, 1),
    (".jsonl", LINES, 3),
    (".jsonl", LINES + b'{"text": 3}\n', None),
    (".jsonl", LINES[:-4], None),
    (".jsonl", b"\n\n", 0),
    (".txt", b"", 0),
    (".txt", b"\xff\xfe" + bytes(200), None),
    (".txt", gzip.compress(LINES), None),
    (".png", b"\x89PNG\r\n\x1a\n" + bytes(50), None),
]


def one_text(chance: random.Random, folder: Path, loud: bool) -> list[Problem]:
    """Documents of every kind to tokens: their number is right, or the file is refused."""
    source, out = folder / "texts", folder / "data"
    source.mkdir()
    files = chance.choices(DOCUMENTS, k=chance.randint(1, 4))
    for number, (ending, data, _) in enumerate(files):
        (source / f"{number}{ending}").write_bytes(data)
    damaged = chance.random() < 0.5
    if damaged:
        (source / "more.jsonl").write_bytes(spoilt(chance, LINES)[1])
    argv = ["--input", str(source), "--out", str(out), "--tokenizer", "byte"]
    problems = command("parallel.data", argv, loud)[1]
    counts = [count for *_, count in files]
    if problems or not (out / "meta.json").exists():
        return problems
    documents = json.loads((out / "meta.json").read_text())["documents"]
    if None in counts or (not damaged and documents != sum(counts)):
        problems = [(WRONG, f"{documents} documents of files with {counts}")]
    return problems


# --- token files ---------------------------------------------------------------------------------


@functools.cache
def tokens() -> dict[str, bytes]:
    """The files of a small data folder, as parallel.data writes them."""
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "a.txt", Path(folder) / "data"
        source.write_text("the quick brown fox jumps over the lazy dog. " * 200)
        words = ["--input", str(source), "--out", str(out), "--tokenizer", "byte"]
        problems = command("parallel.data", words)[1]
        assert not problems and out.is_dir(), problems
        return {path.name: path.read_bytes() for path in out.iterdir()}


def one_tokens(chance: random.Random, folder: Path, loud: bool) -> list[Problem]:
    """A data folder with a damaged meta.json: refused, or the tokens are what was prepared."""
    from parallel import token_files  # loads torch

    for name, data in tokens().items():
        (folder / name).write_bytes(data)
    path, data = folder / "meta.json", tokens()["meta.json"]
    meta = json.loads(data)
    match way := chance.choice(["other order", "harm", "harm", "value", "dtype"]):
        case "other order":
            path.write_bytes(bytes(chance.sample(list(data), len(data))))
        case "harm":
            way = spoil.harm(chance, path)
        case "value":
            path.write_bytes(spoil.json_value(chance, data))
        case "dtype":
            kinds = ["O", "?", "<f4", "<i8", "S2", "V2", "<u8", "u1,u1", ">u2", "", "<U1"]
            path.write_text(json.dumps(meta | {"dtype": chance.choice(kinds)}))
    argv = ["--check", "--preset", "tiny", "--data", str(folder), "--out", str(folder / "run")]
    problems = command("parallel.train", [*argv, "--device", "cpu"], loud)[1]
    loaded, wrong = watched(lambda: token_files.load(folder, 8, 300), loud)
    problems += wrong
    if not wrong and not isinstance(loaded, UsageError):
        for split in ("train", "val"):
            prepared = np.frombuffer(tokens()[f"{split}.bin"], meta["dtype"])
            if not np.array_equal(getattr(loaded, split).ids, prepared):
                problems.append((WRONG, f"{way}: other tokens are trained on"))
    return problems
