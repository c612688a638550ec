"""Token files, and the batches that a step takes from them.

A prepared folder (parallel/data.py writes it) holds `train.bin` and `val.bin` (nanoGPT's format:
token ids, little-endian, no header; uint16, or uint32 above 65,536 ids) and `meta.json`. A bare
nanoGPT `.bin` (uint16) and a Megatron `.bin`/`.idx` pair are read too (give the path without the
suffix, or the .idx); of those, the last 5 % are held out for validation. These files say neither
their largest id nor their SHA-256: they are read whole once, and `<file>.scan.json` keeps both.

A sequence starts anywhere in its split's stream of tokens, so it crosses the ends of documents.
Which sequences step t sees depends on (seed, t) alone, never on the layout.
"""

import hashlib
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.errors import UsageError
from models.files import parse_json, read_json_if_whole
from models.storage import write_json
from parallel.config.data_files import DEFAULT_FOLDER, documents, held_out_from, settle
from parallel.config.layout import Layout


@dataclass(frozen=True)
class Tokens:
    """One split: a long 1-D array of ids (usually a memory map) and where it came from."""

    ids: np.ndarray
    path: str
    tokenizer: str = "unknown"
    vocab_size: int | None = None  # None: a bare file does not say
    sha256: str | None = None

    def batch(self, offsets: np.ndarray, seq_len: int, limit: int) -> tuple[Tensor, Tensor]:
        """Tokens and next-token labels, each [len(offsets), seq_len], int64.

        Raises:
            UsageError: an id is not below `limit`, the model's vocabulary.
        """
        rows = np.stack([self.ids[o : o + seq_len + 1] for o in offsets.tolist()]).astype(np.int64)
        self.check(int(rows.max()), limit)
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def check(self, largest: int, limit: int) -> None:
        """Refuse an id that the embedding table has no row for."""
        if largest >= limit:
            raise UsageError(
                f"{self.path} holds token id {largest}, but the model's vocabulary has"
                f" {limit} ids; pass --vocab-size {largest + 1} or more"
            )

    def scan(self) -> tuple[int, str]:
        """The largest id in all of it, and the SHA-256 of the ids."""
        largest, digest, step = 0, hashlib.sha256(), 1 << 24
        for at in range(0, len(self.ids), step):
            block = np.ascontiguousarray(self.ids[at : at + step])
            largest = max(largest, int(block.max()))
            digest.update(block)
        return largest, digest.hexdigest()


@dataclass(frozen=True)
class Data:
    """Both splits, and how many documents they hold together; None: the files do not say."""

    train: Tokens
    val: Tokens
    documents: int | None = None

    def facts(self) -> dict[str, Any]:
        """What run.json says of them."""
        train = self.train
        return {
            "path": train.path,
            "tokenizer": train.tokenizer,
            "vocab_size": train.vocab_size,
            "train_tokens": len(train.ids),
            "val_tokens": len(self.val.ids),
            "documents": self.documents,
            "sequences_cross_documents": None if self.documents is None else self.documents > 1,
            "sha256": train.sha256,
        }


def load(path: Path | str, seq_len: int, vocab_size: int, scan: bool = True) -> Data:
    """Open token files and check that a model of `vocab_size` ids can train on them.

    scan: look for the largest id where no file says it. One rank of a node is enough: it ends the
    others, and a batch with an id that is too large is refused on every rank.

    Raises:
        UsageError: nothing there, too short for one sequence, or ids beyond the vocabulary.
    """
    path = Path(path)
    settle(Path(os.path.realpath(path)))
    if path.is_dir():
        data = _open_folder(path)
    elif path.suffix == ".idx" or Path(f"{path}.idx").exists():
        data = _open_megatron(path.with_suffix("") if path.suffix == ".idx" else path)
    elif path.is_file():
        if (path.parent / "meta.json").exists():
            raise UsageError(f"{path} belongs to the prepared folder {path.parent}: give that")
        data = _open_pair(path, path.with_name("val.bin") if path.name == "train.bin" else None)
    else:
        hint = "; prepare it with: python -m parallel.data" if str(path) == DEFAULT_FOLDER else ""
        raise UsageError(f"no token files at {path}{hint}")
    for split, tokens in (("training", data.train), ("validation", data.val)):
        if len(tokens.ids) <= seq_len:
            raise UsageError(
                f"the {split} split of {path} has {len(tokens.ids)} tokens,"
                f" too few for one sequence of {seq_len} + 1"
            )
        if tokens.vocab_size is not None and tokens.vocab_size > vocab_size:
            raise UsageError(
                f"{path} was made with a tokenizer of {tokens.vocab_size} ids, but the model's"
                f" vocabulary has {vocab_size}; pass --vocab-size {tokens.vocab_size}"
            )
    if scan and data.train.vocab_size is None:  # a bare file does not say: look
        found = kept_scans({"train": data.train, "val": data.val})
        for split, tokens in (("train", data.train), ("val", data.val)):
            tokens.check(found[split][0], vocab_size)
        data = replace(data, train=replace(data.train, sha256=found["train"][1]))
    return data


def kept_scans(splits: dict[str, Tokens]) -> dict[str, tuple[int, str]]:
    """`Tokens.scan` of each split, from the file beside its token file where that is of its size
    and time; otherwise the ids are read, and what they are is kept there."""
    found, kept = {}, {}
    for split, tokens in splits.items():
        file = Path(tokens.ids.filename)
        about = file.stat()
        state = {"bytes": about.st_size, "mtime_ns": about.st_mtime_ns}
        if file not in kept:
            old = read_json_if_whole(_side_file(file))
            kept[file] = old if old.get("file") == state else {}
        name = f"{split}: {len(tokens.ids)} x {tokens.ids.dtype.str}"
        scan = kept[file].get(name)
        if not (isinstance(scan, dict) and list(map(type, scan.values())) == [int, str]):
            largest, sha256 = tokens.scan()
            scan = {"largest": largest, "sha256": sha256}
            kept[file] |= {"file": state, "new": True, name: scan}
        found[split] = (scan["largest"], scan["sha256"])
    for file, scans in kept.items():
        if not scans.pop("new", False):
            continue
        try:
            write_json(_side_file(file), scans)
        except OSError as error:
            print(
                f"parallel.train: cannot keep {_side_file(file)} ({error.strerror}): every run will"
                f" read {file} whole before it starts",
                file=sys.stderr,
            )
    return found


def _side_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.scan.json")


def _memory_map(path: Path, dtype: Any) -> np.ndarray:
    try:
        return np.memmap(path, dtype=dtype, mode="r")
    except (ValueError, TypeError) as error:
        size = path.stat().st_size
        each = np.dtype(dtype).itemsize
        why = f"{size % each} over" if size % each else str(error)
        raise UsageError(f"{path}: {size} bytes are no token ids of {each} bytes: {why}") from error


def _open_folder(path: Path) -> Data:
    if not (path / "meta.json").exists() and (path / "train.bin").exists():
        return _open_pair(path / "train.bin", path / "val.bin")  # nanoGPT's own folder
    try:
        meta = parse_json((path / "meta.json").read_text())
        known = (str(path), meta["tokenizer"], meta["vocab_size"])
        return Data(
            *(
                Tokens(_memory_map(path / f"{s}.bin", meta["dtype"]), *known, meta["sha256"][s])
                for s in ("train", "val")
            ),
            documents(str(path)),
        )
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} is damaged: {error}; prepare it again") from error


def _open_pair(train: Path, val: Path | None) -> Data:
    """nanoGPT's uint16 files; without a val.bin the end of the other is held out."""
    ids = _memory_map(train, np.uint16)
    if val is None or not val.exists():
        return _hold_out(ids, train)
    return Data(Tokens(ids, str(train)), Tokens(_memory_map(val, np.uint16), str(val)))


def _open_megatron(prefix: Path) -> Data:
    from parallel.engines.cpu import import_megatron

    import_megatron()
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    for suffix in (".bin", ".idx"):
        if not Path(f"{prefix}{suffix}").exists():
            raise UsageError(
                f"{prefix}{suffix}: no such file (a Megatron pair needs .bin and .idx)"
            )
    # Looked at first: given less than its header, the reader breaks noisily when it is discarded.
    with Path(f"{prefix}.idx").open("rb") as index:
        if not (head := index.read(34)).startswith(b"MMIDIDX\x00\x00") or len(head) < 34:
            raise UsageError(f"{prefix}.idx is not a Megatron index: its header is {head[:9]!r}")
    try:
        index = IndexedDataset(str(prefix), mmap=True).index
    except Exception as error:  # it asserts, unpacks and maps: any of these is a bad file
        reason = str(error).strip() or type(error).__name__
        raise UsageError(f"{prefix}.idx is not a Megatron index: {reason}") from error
    # The documents lie one after the other in the .bin: the whole file is one array of ids.
    ids = _memory_map(Path(f"{prefix}.bin"), index.dtype)
    return _hold_out(ids, prefix, len(index.document_indices) - 1)


def _hold_out(ids: np.ndarray, path: Path, documents: int | None = None) -> Data:
    cut = held_out_from(len(ids))
    return Data(Tokens(ids[:cut], str(path)), Tokens(ids[cut:], str(path)), documents)


def offsets(n_tokens: int, seq_len: int, global_batch: int, seed: int, step: int) -> np.ndarray:
    """Where each of the step's `global_batch` sequences starts, from (seed, step) alone."""
    generator = np.random.Generator(np.random.Philox(key=[seed, step]))
    return generator.integers(0, n_tokens - seq_len, size=global_batch)


def batches(
    tokens: Tokens,
    layout: Layout,
    seq_len: int,
    vocab_size: int,
    dp_rank: int,
    seed: int,
    step: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """This dp rank's n_micro micro-batches of the step: (tokens, labels), [micro_batch, seq_len].

    Micro-batch m is rows [m * dp * micro_batch, ...) of the step's global batch, dp ranks side by
    side, so every layout with the same global batch sees the same sequences.
    """
    starts = offsets(len(tokens.ids), seq_len, layout.global_batch, seed, step)
    per_micro = starts.reshape(layout.n_micro, layout.dp, layout.micro_batch)
    for micro in range(layout.n_micro):
        yield tokens.batch(per_micro[micro, dp_rank], seq_len, vocab_size)


class Ahead:
    """What an iterator gives, each item made by a thread while the one before it is used.

    A step ends by waiting for the device. Without the thread the device would then wait for the
    next step's first batch. `device` is the one whose pinned memory the items are made in.
    """

    def __init__(self, items: Iterator[Any], device: torch.device):
        on_gpu = device.type == "cuda"  # a thread begins on GPU 0, whichever is the process's own
        start = (torch.cuda.set_device, (device,)) if on_gpu else (None, ())
        self._pool = ThreadPoolExecutor(1, "batches", *start)
        self._items = items
        self._next = self._pool.submit(next, items, None)

    def __iter__(self) -> "Ahead":
        return self

    def __next__(self) -> Any:
        """Raises: whatever making the item raised."""
        if (item := self._next.result()) is None:
            raise StopIteration
        self._next = self._pool.submit(next, self._items, None)
        return item

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(self, *_: Any) -> None:
        self._pool.shutdown()
