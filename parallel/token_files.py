"""Token files, and the batches that a step takes from them.

A prepared folder (parallel/data.py writes it) holds `train.bin` and `val.bin` (nanoGPT's format:
token ids, little-endian, no header; uint16, or uint32 above 65,536 ids) and `meta.json`. A bare
nanoGPT `.bin` (uint16) and a Megatron `.bin`/`.idx` pair are read too (give the path without the
suffix, or the .idx); of those, the last 5 % are held out for validation. The first run reads the
files whole: `<file>.scan.json` keeps their largest id and their SHA-256 until they change.

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

from base.errors import UsageError
from base.files import read_json_if_whole
from base.storage import own_crc32, write_json
from parallel.config.data_files import Split, describe, settle
from parallel.config.layout import Layout


@dataclass(frozen=True)
class Tokens:
    """One split: a long 1-D array of ids (usually a memory map) and where it came from."""

    ids: np.ndarray
    path: str
    tokenizer: str = "unknown"
    vocab_size: int | None = None  # None: a bare file does not say
    sha256: str | None = None  # of these ids; None: they were not read

    def batch(self, offsets: np.ndarray, seq_len: int, limit: int) -> tuple[Tensor, Tensor]:
        """Tokens and next-token labels, each [len(offsets), seq_len], int64.

        Raises:
            UsageError: an id is not below `limit`, the model's vocabulary.
        """
        rows = np.stack([self.ids[o : o + seq_len + 1] for o in offsets.tolist()])
        self.check(int(rows.max()), limit)
        both = torch.from_numpy(rows.astype(np.int64))
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

    scan: compare their content with what their meta.json says, and their largest id with the
    vocabulary. One rank of a node is enough: it ends the others, and a batch with an id that is too
    large is refused on every rank.

    Raises:
        UsageError: nothing there, not what was prepared, too short for one sequence, or ids beyond
            the vocabulary.
    """
    path = Path(path)
    settle(Path(os.path.realpath(path)))
    described = describe(path)
    known = (described.tokenizer, described.vocab_size)
    train, val = (_open(split, path, *known) for split in (described.train, described.val))
    for split, tokens in (("training", train), ("validation", val)):
        if len(tokens.ids) <= seq_len:
            raise UsageError(
                f"the {split} split of {path} has {len(tokens.ids)} tokens,"
                f" too few for one sequence of {seq_len} + 1"
            )
    if train.vocab_size is not None and train.vocab_size > vocab_size:
        raise UsageError(
            f"{path} was made with a tokenizer of {train.vocab_size} ids, but the model's"
            f" vocabulary has {vocab_size}; pass --vocab-size {train.vocab_size}"
        )
    if scan:
        scans = kept_scans({"train": train, "val": val})
        for tokens, stated, (largest, sha256) in zip(
            (train, val), (described.train, described.val), scans.values(), strict=True
        ):
            if stated.sha256 not in (None, sha256):
                raise UsageError(
                    f"{stated.file} is not what was prepared: its SHA-256 is {sha256[:12]}..., and"
                    f" meta.json states {stated.sha256[:12]}...; prepare {path} again"
                )
            tokens.check(largest, vocab_size)
        train = replace(train, sha256=scans["train"][1])
    return Data(train, val, described.documents)


def _open(split: Split, path: Path, tokenizer: str, vocab_size: int | None) -> Tokens:
    ids = np.memmap(split.file, dtype=split.dtype, mode="r")[split.first : split.stop]
    return Tokens(ids, str(path), tokenizer, vocab_size)


def kept_scans(splits: dict[str, Tokens]) -> dict[str, tuple[int, str]]:
    """`Tokens.scan` of each split, from the file beside its token file where that one has not
    changed since; otherwise the ids are read, and what they are is kept there.

    The time of a file's last change (ctime) is compared too: no program can set it back.
    """
    found, kept = {}, {}
    for split, tokens in splits.items():
        file = Path(tokens.ids.filename)
        about = file.stat()
        state = {"bytes": about.st_size, "mtime_ns": about.st_mtime_ns}
        state |= {"ctime_ns": about.st_ctime_ns, "inode": about.st_ino}
        if file not in kept:
            old = read_json_if_whole(_side_file(file))
            whole = old.get("file") == state and old.pop("crc32", None) == own_crc32(old)
            kept[file] = old if whole else {}
        name = f"{split}: {len(tokens.ids)} x {tokens.ids.dtype.str}"
        scan = kept[file].get(name)
        if scan is None:
            largest, sha256 = tokens.scan()
            scan = {"largest": largest, "sha256": sha256}
            kept[file] |= {"file": state, "new": True, name: scan}
        found[split] = (scan["largest"], scan["sha256"])
    for file, scans in kept.items():
        if not scans.pop("new", False):
            continue
        try:
            write_json(_side_file(file), scans | {"crc32": own_crc32(scans)})
        except OSError as error:
            print(
                f"parallel.train: cannot keep {_side_file(file)} ({error.strerror}): every run will"
                f" read {file} whole before it starts",
                file=sys.stderr,
            )
    return found


def _side_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.scan.json")


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
