"""Token files: what a run reads its ids from.

Besides a folder of parallel/data.py, a bare nanoGPT `.bin` (uint16) and a Megatron `.bin`/`.idx`
pair are read (give the path without the suffix, or the .idx); of those, the last 5 % are held out
for validation. A folder's meta.json states the SHA-256 of its files. Other files are read whole by
the first run, its ranks a share each: `<file>.<split>.scan.json` keeps their largest id and their
SHA-256 until they change.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from base.errors import UsageError, warn
from base.files import read_json_if_whole
from base.storage import own_crc32, write_json
from parallel.config.data_files import SPLITS, Description, describe
from parallel.ranks import Ranks

BLOCK_BYTES = 1 << 26  # ranks share out what is larger


class Scan(NamedTuple):
    """The largest of some ids, and their SHA-256: of several blocks that of the blocks' digests."""

    largest: int
    sha256: str


def joined(blocks: list[Scan]) -> Scan:
    """Returns the scan of a split, from those of its blocks in order."""
    digests = b"".join(bytes.fromhex(block.sha256) for block in blocks)
    whole = blocks[0].sha256 if len(blocks) == 1 else hashlib.sha256(digests).hexdigest()
    return Scan(max(block.largest for block in blocks), whole)


@dataclass(frozen=True)
class Tokens:
    """A split: a long 1-D array of ids (usually a memory map) and where it came from.

    sha256: of the file, as its meta.json states it, else of these ids, as `Scan` has it. It is None
    while they were not read yet.
    """

    ids: np.ndarray
    path: str
    sha256: str | None = None

    @property
    def block(self) -> int:
        """Returns how many ids a block of a scan has."""
        return BLOCK_BYTES // self.ids.itemsize

    def batch(self, offsets: np.ndarray, seq_len: int, limit: int) -> tuple[Tensor, Tensor]:
        """Returns tokens and next-token labels, each [len(offsets), seq_len], int64.

        Raises:
            UsageError: an id is not below `limit`, the model's vocabulary.
        """
        rows = np.stack([self.ids[offset : offset + seq_len + 1] for offset in offsets.tolist()])
        self.check(int(rows.max()), limit)
        ids = torch.from_numpy(rows.astype(np.int64))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def check(self, largest: int, limit: int) -> None:
        """Refuses an id that the embedding table has no row for."""
        if largest >= limit:
            raise UsageError(
                f"{self.path} holds token id {largest}, but the model's vocabulary has"
                f" {limit} ids; pass --vocab-size {largest + 1} or more"
            )

    def scan(self, first: int = 0, tick: Callable[[], None] = lambda: None) -> Scan:
        """Returns the scan of the block from id number `first` on; ticks every 8 MiB or so."""
        largest, digest, stop, step = 0, hashlib.sha256(), first + self.block, 1 << 22
        for start in range(first, min(stop, len(self.ids)), step):
            block = np.ascontiguousarray(self.ids[start : min(start + step, stop)])
            largest = max(largest, int(block.max()))
            digest.update(block)
            tick()
        return Scan(largest, digest.hexdigest())

    def checked(self, scan: Scan, limit: int) -> "Tokens":
        """Returns these tokens with the SHA-256 of their scan. No id may reach `limit`."""
        self.check(scan.largest, limit)
        return replace(self, sha256=scan.sha256)


@dataclass(frozen=True)
class Data:
    """The data of a run: both splits, and what the files say of them."""

    train: Tokens
    val: Tokens
    described: Description

    def facts(self) -> dict[str, Any]:
        """Returns the `data` of run.json."""
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
    """Opens token files and checks that a model of `vocab_size` ids can train on them.

    scan: compare the largest id of files without meta.json with the vocabulary, where they were
    read before or are small; else `scanned` does. One rank of a node is enough: it ends the others,
    and a batch with an id that is too large is refused on every rank.

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
        all_ids = np.memmap(split.file, dtype=split.dtype, mode="r")
        tokens = Tokens(all_ids[split.first : split.stop], str(path), split.sha256)
        if (length := len(tokens.ids)) <= seq_len:
            raise UsageError(
                f"the split {name} of {path} has {length} tokens, too few for one sequence of"
                f" {seq_len} + 1"
            )
        if scan and tokens.sha256 is None and (kept := kept_scan(name, tokens)):
            tokens = tokens.checked(kept, vocab_size)
        splits.append(tokens)
    return Data(*splits, described)


def scanned(data: Data, vocab_size: int, ranks: Ranks) -> Data:
    """Returns the data with the splits checked that `load` left unread on rank 0. All ranks call it
    and read a share each; rank 0 keeps the scan.

    Raises:
        UsageError: as `load`.
    """
    unread = [name for name in SPLITS if getattr(data, name).sha256 is None]
    for name in ranks.on_first(lambda: unread):
        tokens = getattr(data, name)
        starts = range(0, len(tokens.ids), tokens.block)[ranks.rank :: ranks.world]
        shares = ranks.on_all(
            lambda split, own_starts: [split.scan(start, ranks.tick) for start in own_starts],
            tokens,
            starts,
        )
        scan = joined([block for turn in zip_longest(*shares) for block in turn if block])
        if ranks.rank == 0:
            kept_scan(name, tokens, scan)
        data = replace(data, **{name: tokens.checked(scan, vocab_size)})
    return data


def kept_scan(name: str, tokens: Tokens, scan: Scan | None = None) -> Scan | None:
    """Returns the scan of a split; None where there is none. It is read from the file beside the
    token file where that one has not changed since; else it is `scan`, or that of a small split,
    which is kept there.

    The time of a file's last change (ctime) is compared too: no program can set it back.
    """
    file = Path(tokens.ids.filename)
    about, side = file.stat(), file.with_name(f"{file.name}.{name}.scan.json")
    state = [about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino]
    state += [len(tokens.ids), tokens.ids.dtype.str, tokens.block]
    kept = read_json_if_whole(side)
    if kept.get("file") == state and kept.get("crc32") == own_crc32(kept):
        return Scan(kept["largest"], kept["sha256"])
    if scan is None and tokens.ids.nbytes > BLOCK_BYTES:
        return None
    scan = scan or tokens.scan()
    kept = {"file": state, **scan._asdict()}
    try:
        write_json(side, kept | {"crc32": own_crc32(kept)})
    except OSError as error:
        reason = f"cannot keep {side} ({error.strerror})"
        warn("parallel.data", f"{reason}: every run will read {file} whole before it starts")
    return scan
