"""Bad files around a run: packed logs, documents, tokens, folders of checkpoints, lost folders.

bad_input.py runs these campaigns. Each case is one function of a seeded generator and a folder.
"""

import functools
import gzip
import io
import json
import os
import random
import shutil
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
from tests.tools.watched import WRONG, Problem, Try, command, watched


def spoilt(chance: random.Random, data: bytes) -> tuple[str, bytes]:
    """(the way, the bytes); the slow ways are chosen seldom."""
    way = chance.choice(spoil.HARD if chance.random() < 0.05 else spoil.SPOILERS)
    return way.__name__, way(chance, data)


# --- packed logs ---------------------------------------------------------------------------------

LOG = "".join(
    f" iteration {i:8d}/      20 | consumed samples: {16 * i:12d} | elapsed time per iteration"
    f" (ms): {100 + i % 3}.0 | global batch size: 16 | lm loss: {9 - i / 10:.6E} |\n"
    for i in range(1, 21)
).encode()


def tarred(data: bytes, kind: str = "w") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=kind) as archive:
        for name in ("a.log", "b.log"):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def zipped(data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.log", data)
        archive.writestr("b.log", data)
    return out.getvalue()


PACKED = {
    "gz": gzip.compress,
    "gz twice": lambda data: gzip.compress(gzip.compress(data)),
    "tar": tarred,
    "tar.gz": functools.partial(tarred, kind="w:gz"),
    "zip": zipped,
    "bomb": lambda data: gzip.compress(bytes(1 << 25)),
}


@mock.patch.object(packed, "MOST", 1 << 24)  # bytes, so that a small bomb is one
def one_packed(chance: random.Random, folder: Path, loud: bool) -> Try:
    """A packed log, whole or damaged, by its name or through stdin: read as the log, or refused."""
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
    problems: list[Problem] = []
    streamed = kind in ("gz", "tar", "zip") and chance.random() < 0.3
    for module in ("analysis.tflops", "analysis.quality"):
        if streamed:
            with path.open("rb") as stream, mock.patch("sys.stdin", io.TextIOWrapper(stream)):
                problems += command(module, ["-", "--format", "json"], loud)[1]
        else:
            problems += command(module, [str(path), "--format", "json"], loud)[1]
    if not damaged and not problems and kind != "device":
        read, problems = watched(lambda: readers.read(path), loud)
        steps = 0 if isinstance(read, UsageError) else len(read.iteration)
        if steps != (20 if kind in ("gz", "name") else 0):
            problems = [(WRONG, f"{kind}: {steps} steps are read")]
    return Try(f"{kind}, damaged" if damaged else kind, problems)


# --- documents -----------------------------------------------------------------------------------


def a_document(chance: random.Random) -> tuple[str, bytes]:
    """(the ending of its name, its bytes)."""
    text = "".join(chance.choices("abc é\n", k=chance.randint(1, 300)))
    lines = [json.dumps({"text": text[i : i + 40], "id": i}) for i in range(0, len(text), 40)]
    jsonl = "\n".join(lines).encode()
    return chance.choice(
        [
            (".txt", text.encode()),
            (".jsonl", jsonl),
            (".jsonl", spoilt(chance, jsonl)[1]),
            (".txt", spoilt(chance, text.encode())[1]),
            (".txt", chance.randbytes(200)),
            (".txt", gzip.compress(text.encode())),
            (".png", b"\x89PNG\r\n\x1a\n" + chance.randbytes(50)),
            (".txt", b""),
            (".jsonl", b"\n\n"),
        ]
    )


def texts_of(name: str, data: bytes) -> list[str] | None:
    """The documents of a file as another reader counts them; None: it is no text."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if not name.endswith(".jsonl"):
        return [text] if text else []
    texts = []
    for line in text.split("\n"):
        if line.strip():
            try:
                texts.append(json.loads(line)["text"])
            except (ValueError, KeyError, TypeError, RecursionError):
                return None
    return None if not all(isinstance(t, str) for t in texts) else [t for t in texts if t]


def one_text(chance: random.Random, folder: Path, loud: bool) -> Try:
    """Documents of every kind to tokens: their number is right, or the file is refused."""
    source, out = folder / "texts", folder / "data"
    source.mkdir()
    expected: list[str] | None = []
    for i in range(chance.randint(1, 4)):
        ending, data = a_document(chance)
        (source / f"{i}{ending}").write_bytes(data)
        texts = texts_of(ending, data)
        expected = None if expected is None or texts is None else expected + texts
    argv = ["--input", str(source), "--out", str(out), "--tokenizer", "byte"]
    problems = command("parallel.data", argv, loud)[1]
    meta = out / "meta.json"
    kind = "no text among them" if expected is None else "texts"
    if meta.exists() and not problems:
        documents = json.loads(meta.read_text())["documents"]
        if expected is None:
            problems = [(WRONG, "a file that is no text is taken as documents")]
        elif documents != len(expected):
            problems = [(WRONG, f"{documents} documents, not {len(expected)}")]
    return Try(kind, problems)


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


def one_tokens(chance: random.Random, folder: Path, loud: bool) -> Try:
    """A data folder with one damaged file: refused, or the tokens are those that were prepared."""
    from parallel import token_files  # loads torch

    for name, data in tokens().items():
        (folder / name).write_bytes(data)
    name = chance.choice(["meta.json", "meta.json", *tokens()])
    path, data = folder / name, tokens()[name]
    way = chance.choice(["bytes"] * 6 + ["dtype", "cut", "other", "missing", "pipe", "folder"])
    path.unlink()
    if way == "bytes":
        change = spoil.json_value if name == "meta.json" and chance.random() < 0.7 else None
        path.write_bytes(change(chance, data) if change else spoilt(chance, data)[1])
    elif way == "dtype":
        path.write_bytes(data)
        meta = json.loads(tokens()["meta.json"])
        kind = chance.choice(["O", "?", "<f4", "<i8", "S2", "V2", "<u8", "u1,u1", ">u2", "", "<U1"])
        (folder / "meta.json").write_text(json.dumps(meta | {"dtype": kind}))
    elif way == "cut":
        path.write_bytes(data[: chance.randrange(len(data))])
    elif way == "other":
        path.write_bytes(bytes(chance.sample(list(data), len(data))))
    elif way == "pipe":
        os.mkfifo(path)
    elif way == "folder":
        path.mkdir()
    argv = ["--check", "--preset", "tiny", "--data", str(folder), "--out", str(folder / "run")]
    problems = command("parallel.train", [*argv, "--device", "cpu"], loud)[1]
    loaded, wrong = watched(lambda: token_files.load(folder, 8, 300), loud)
    problems += wrong
    if not wrong and not isinstance(loaded, UsageError):
        kind = json.loads(tokens()["meta.json"])["dtype"]
        for split in ("train", "val"):
            prepared = np.frombuffer(tokens()[f"{split}.bin"], kind)
            if not np.array_equal(getattr(loaded, split).ids, prepared):
                problems.append((WRONG, f"{way} of {name}: other tokens are trained on"))
    return Try(f"{way} of {name}", problems)


# --- folders of checkpoints ----------------------------------------------------------------------

FOREIGN = [".weights-old", ".latest.bak", ".manifest.json.old", ".step-mine", "notes.txt"]
FOREIGN += ["step-x", "step-00000005.bak", ".step-00000004.mine", "latest.txt", "weights"]


def one_save(chance: random.Random, folder: Path, loud: bool) -> Try:
    """Saves and retention beside what others put there: all of that stays."""
    from tests.tools import tiny_checkpoint  # loads torch

    save = folder / "checkpoints"
    save.mkdir()
    kinds = chance.choices(["file", "folder", "link", "broken link"], k=3)
    theirs = dict(zip(chance.sample(FOREIGN, 3), kinds, strict=True))
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine")
    for name, kind in theirs.items():
        if kind == "file":
            (save / name).write_text("mine")
        elif kind == "folder":
            (save / name).mkdir()
            (save / name / "mine").write_text("mine")
        else:
            (save / name).symlink_to(elsewhere if kind == "link" else folder / "nothing")

    def saves() -> None:
        writer = tiny_checkpoint.saver(tiny_checkpoint.Holder(), save, keep_last=1)
        for step in range(1, chance.randint(2, 4)):
            writer.save(step)
        writer.wait()

    problems = watched(saves, loud)[1]
    for name, kind in theirs.items():
        if not os.path.lexists(save / name):
            problems.append((WRONG, f"a {kind} called {name} is gone"))
    if (elsewhere / "mine").read_text() != "mine":
        problems.append((WRONG, "a file elsewhere has changed"))
    return Try(" and ".join(sorted(set(kinds))), problems)


# --- run folders that are deleted while a run writes ---------------------------------------------


def one_deleted(chance: random.Random, folder: Path, loud: bool) -> Try:
    """Parts of a run folder are deleted between two steps: the run does not end as complete."""
    from parallel.record.writer import RunFolder  # loads torch

    facts = {"run": "x", "spec": {}, "layout": {}}
    run = RunFolder(folder / "run")
    names = ["all", "train.log", "steps.csv", "moved"]
    way, at = chance.choice(names), chance.randint(1, 4)
    row = {"step": 1, "step_s": 0.1, "loss": 5.0, "grad_norm": 1.0, "lr": 1e-3}
    row |= {"loss_scale": 1.0, "skipped": 0, "tokens": 128}

    def writes() -> None:
        run.begin(dict(facts))
        for step in range(1, 5):
            run.step(row | {"step": step})
            if step == at and way == "all":
                shutil.rmtree(run.path)
            elif step == at and way == "moved":
                run.path.rename(folder / "elsewhere")
            elif step == at:
                (run.path / way).unlink()
        run.complete({}, "RUN_COMPLETE")

    result, problems = watched(writes, loud)
    if not problems and not isinstance(result, UsageError):
        problems = [(WRONG, f"{way}: the run ends as complete")]
    run.close()
    return Try(way, problems)
