"""Token files: what a run reads its ids from.

Besides a folder of parallel/data.py, a bare nanoGPT `.bin` (uint16) and a Megatron `.bin`/`.idx`
pair are read (give the path without the suffix, or the .idx); of those, the last 5 % are held out
for validation. The first run reads the files whole: `<file>.<split>.scan.json` keeps their largest
id and their SHA-256 until they change.
"""

import hashlib
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
