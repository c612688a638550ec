"""Token files, and the batches that a step takes from them.

Besides a folder of parallel/data.py, a bare nanoGPT `.bin` (uint16) and a Megatron `.bin`/`.idx`
pair are read (give the path without the suffix, or the .idx); of those, the last 5 % are held out
for validation. The first run reads the
files whole: `<file>.<split>.scan.json` keeps their largest id and their SHA-256 until they change.

A sequence starts anywhere in its split's stream of tokens, so it crosses the ends of documents.
Which sequences step t sees depends on (seed, t) alone, never on the layout.
"""

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from base.errors import UsageError, warn
from base.files import read_json_if_whole
from base.storage import own_crc32, write_json
from parallel.config.data_files import SPLITS, Description, describe
from parallel.config.layout import Layout


class Scan(NamedTuple):
    """The largest id of a split, and the SHA-256 of its ids."""

    largest: int
    sha256: str


@dataclass(frozen=True)
class Tokens:
    """One split: a long 1-D array of ids (usually a memory map) and where it came from."""

    ids: np.ndarray
    path: str
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

    def scan(self) -> Scan:
        """Read all of it."""
        largest, digest, step = 0, hashlib.sha256(), 1 << 24
        for at in range(0, len(self.ids), step):
            block = np.ascontiguousarray(self.ids[at : at + step])
            largest = max(largest, int(block.max()))
            digest.update(block)
        return Scan(largest, digest.hexdigest())


@dataclass(frozen=True)
class Data:
    """Both splits, and what the files say of them."""

    train: Tokens
    val: Tokens
    described: Description

    def facts(self) -> dict[str, Any]:
        """For run.json."""
        documents = self.described.documents
        return {
            "path": self.train.path,
            "tokenizer": self.described.tokenizer,
            "vocab_size": self.described.vocab_size,
            "train_tokens": len(self.train.ids),
            "val_tokens": len(self.val.ids),
            "documents": documents,
            "sequences_cross_documents": None if documents is None else documents > 1,
            "sha256": self.train.sha256,
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
    described = describe(Path(path))
    if (ids := described.vocab_size) is not None and ids > vocab_size:
        raise UsageError(
            f"{path} was made with a tokenizer of {ids} ids, but the model's vocabulary has"
            f" {vocab_size}; pass --vocab-size {ids}"
        )
    splits = []
    for name in SPLITS:
        split = getattr(described, name)
        every = np.memmap(split.file, dtype=split.dtype, mode="r")
        tokens = Tokens(every[split.first : split.stop], str(path))
        if (length := len(tokens.ids)) <= seq_len:
            raise UsageError(
                f"the split {name} of {path} has {length} tokens, too few for one sequence of"
                f" {seq_len} + 1"
            )
        if scan:
            largest, sha256 = kept_scan(name, tokens)
            if split.sha256 not in (None, sha256):
                raise UsageError(
                    f"{split.file} is not what was prepared: its SHA-256 is {sha256[:12]}..., and"
                    f" meta.json states {split.sha256[:12]}...; prepare {path} again"
                )
            tokens.check(largest, vocab_size)
            tokens = replace(tokens, sha256=sha256)
        splits.append(tokens)
    return Data(*splits, described)


def kept_scan(name: str, tokens: Tokens) -> Scan:
    """`Tokens.scan` of a split, from the file beside its token file where that one has not changed
    since; otherwise the ids are read, and what they are is kept there.

    The time of a file's last change (ctime) is compared too: no program can set it back.
    """
    file = Path(tokens.ids.filename)
    about, side = file.stat(), file.with_name(f"{file.name}.{name}.scan.json")
    state = [about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino]
    state += [len(tokens.ids), tokens.ids.dtype.str]
    kept = read_json_if_whole(side)
    if kept.get("file") == state and kept.get("crc32") == own_crc32(kept):
        return Scan(kept["largest"], kept["sha256"])
    scan = tokens.scan()
    kept = {"file": state, **scan._asdict()}
    try:
        write_json(side, kept | {"crc32": own_crc32(kept)})
    except OSError as error:
        reason = f"cannot keep {side} ({error.strerror})"
        warn("parallel.train", f"{reason}: every run will read {file} whole before it starts")
    return scan


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


@contextmanager
def ahead(items: Iterator[Any], device: torch.device) -> Iterator[Iterator[Any]]:
    """What an iterator gives, each item made by a thread while the one before it is used.

    A step ends by waiting for the device. Without the thread the device would then wait for the
    next step's first batch. `device` is the one whose pinned memory the items are made in. What
    making an item raises is raised where it is taken.
    """
    on_gpu = device.type == "cuda"  # a thread begins on GPU 0, whichever is the process's own
    start = (torch.cuda.set_device, (device,)) if on_gpu else (None, ())
    with ThreadPoolExecutor(1, "batches", *start) as pool:

        def taken(following: Future) -> Iterator[Any]:
            while (item := following.result()) is not None:
                following = pool.submit(next, items, None)
                yield item

        yield taken(pool.submit(next, items, None))
