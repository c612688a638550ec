"""What lies at a path of token files, from sizes and headers alone. Torch-free.

parallel/data.py writes prepared folders, parallel/token_files.py reads the ids of all kinds.
"""

import os
import struct
from pathlib import Path
from typing import NamedTuple

from base.errors import UsageError
from base.files import read_json, read_json_if_whole
from base.storage import own_crc32

DEFAULT_FOLDER = "data/stdlib"
HELD_OUT = 0.05  # the fraction of a bare file's tokens (or of documents) kept for validation
SPLITS = ("train", "val")

_PREPARED = {"<u2": 2, "<u4": 4}  # NumPy's name of the ids' type -> bytes per id
# Megatron's IndexedDataset: the header's one-byte code of the ids' type, read as unsigned: an id
# below 0 is then beyond every vocabulary.
_MEGATRON = {1: "|u1", 2: "|u1", 3: "<u2", 4: "<u4", 5: "<u8", 8: "<u2"}
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")  # magic, version, type, sequences, document bounds


class Split(NamedTuple):
    """A split of token ids: those of a file from number `first` to before `stop`.

    dtype: NumPy's name of the ids' type. sha256: of the file's bytes, as meta.json states it.
    """

    file: Path
    dtype: str
    first: int
    stop: int
    sha256: str | None = None


class Description(NamedTuple):
    """The content of a path of token files. None stands for what the files do not say."""

    train: Split
    val: Split
    tokenizer: str = "unknown"
    vocab_size: int | None = None
    documents: int | None = None


def describe(path: Path) -> Description:
    """Returns what a path holds: a prepared folder, nanoGPT's .bin or folder, Megatron's pair."""
    try:
        if path.is_dir() and ((path / "meta.json").exists() or not (path / "train.bin").exists()):
            return _prepared(path)
        if path.is_dir():
            return _bare(path / "train.bin", path / "val.bin")
        if path.suffix == ".idx" or Path(f"{path}.idx").exists():
            return _megatron(path.with_suffix("") if path.suffix == ".idx" else path)
        if not path.is_file():
            by_default = str(path) == DEFAULT_FOLDER
            hint = "; prepare it with: python -m parallel.data" if by_default else ""
            raise UsageError(f"no token files at {path}{hint}")
        if (path.parent / "meta.json").exists():
            raise UsageError(f"{path} belongs to the prepared folder {path.parent}: give that")
        return _bare(path, path.with_name("val.bin") if path.name == "train.bin" else None)
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error


def training_tokens(data: str) -> int:
    """Returns the tokens of the training split, from sizes and headers alone."""
    train = describe(Path(data)).train
    return train.stop - train.first


def _prepared(folder: Path) -> Description:
    """Returns the content of a folder of parallel/data.py, whose files must have the sizes that
    meta.json states."""
    meta = read_json(folder / "meta.json")
    if meta.get("crc32", own_crc32(meta)) != own_crc32(meta):  # earlier versions wrote none
        raise UsageError(f"{folder}/meta.json has changed since it was written: prepare it again")
    try:
        splits = []
        for name in SPLITS:
            file, tokens = folder / f"{name}.bin", meta["tokens"][name]
            if (stored := _ids_in(file, _PREPARED[meta["dtype"]])) != tokens:
                raise UsageError(
                    f"{file} holds {stored} ids, but meta.json beside it states {tokens}"
                )
            splits.append(Split(file, meta["dtype"], 0, tokens, meta["sha256"][name]))
        return Description(*splits, meta["tokenizer"], meta["vocab_size"], meta.get("documents"))
    except (KeyError, TypeError) as error:
        raise UsageError(f"{folder}/meta.json is not ours ({error!r}): prepare it again") from error


def _bare(train: Path, val: Path | None) -> Description:
    """Returns the content of nanoGPT's uint16 files; without a val.bin the end of the training file
    is held out."""
    tokens = _ids_in(train, 2)
    if val is None or not val.exists():
        return _held_out(train, "<u2", tokens)
    return Description(Split(train, "<u2", 0, tokens), Split(val, "<u2", 0, _ids_in(val, 2)))


def _megatron(prefix: Path) -> Description:
    """Returns the content of Megatron's IndexedDataset: documents one after the other in the .bin.

    The .idx has a header, the sequences' lengths (int32), where each begins in the .bin (int64,
    bytes), and the numbers of the documents' first sequences and of the last one's end (int64).
    """
    index, ids = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    size, header = ids.stat().st_size, _MEGATRON_HEADER

    def refusal(reason: str) -> UsageError:
        return UsageError(f"{index} is not a Megatron index of {ids.name}: {reason}")

    with index.open("rb") as file:
        head, length = file.read(header.size), os.fstat(file.fileno()).st_size
        if len(head) < header.size or head[:17] != b"MMIDIDX\0\0" + struct.pack("<Q", 1):
            raise refusal(f"its header is {head[:17]!r}, not that of version 1")
        _, _, code, sequences, bounds = header.unpack(head)
        if code not in _MEGATRON:
            raise refusal(f"its ids are of type {code}, which is none of whole numbers")
        needed = header.size + 12 * sequences + 8 * bounds
        if not sequences or not bounds or length not in (needed, needed + sequences):  # with modes
            raise refusal(
                f"it has {length} bytes for {sequences} sequences and {bounds} document bounds"
            )
        file.seek(header.size + 4 * (sequences - 1))
        (last,) = struct.unpack("<i", file.read(4))
        file.seek(header.size + 4 * sequences + 8 * (sequences - 1))
        (begins,) = struct.unpack("<q", file.read(8))
    dtype, id_bytes = _MEGATRON[code], int(_MEGATRON[code][-1])
    if last < 0 or begins + last * id_bytes != size:
        raise refusal(f"its sequences end at byte {begins + last * id_bytes} of {size}")
    return _held_out(ids, dtype, _ids_in(ids, id_bytes), bounds - 1)


def _held_out(file: Path, dtype: str, tokens: int, documents: int | None = None) -> Description:
    """Returns the two splits of one file, whose end is held out."""
    cut = int(tokens * (1 - HELD_OUT))
    splits = Split(file, dtype, 0, cut), Split(file, dtype, cut, tokens)
    return Description(*splits, documents=documents)


def _ids_in(file: Path, id_bytes: int) -> int:
    """Returns how many ids of `id_bytes` bytes a file holds."""
    size = file.stat().st_size
    if not size or size % id_bytes:
        reason = f"{size % id_bytes} over" if size else "the file is empty"
        raise UsageError(f"{file}: {size} bytes are no token ids of {id_bytes} bytes: {reason}")
    return size // id_bytes


def stated_by(data: str, name: str) -> int | None:
    """Returns a number of a prepared folder's meta.json: vocab_size, the tokenizer's ids, or
    end_of_text, the id after each document. None where nothing readable says it: training reads the
    data again, and tells what is wrong."""
    number = read_json_if_whole(Path(data) / "meta.json").get(name)
    return number if type(number) is int else None
