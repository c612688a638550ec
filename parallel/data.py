"""Text into token files, and token files into batches.

    python -m parallel.data                       the standard library's own source, byte by byte
    python -m parallel.data --input corpus/ --tokenizer bpe --vocab-size 4096 --out data/corpus
    python -m parallel.data --input corpus.txt --tokenizer path/to/gpt2 --out data/corpus

A prepared folder holds `train.bin` and `val.bin` (nanoGPT's format: token ids, little-endian, no
header; uint16, or uint32 above 65,536 ids) and `meta.json`. Training also reads a bare nanoGPT
`.bin` (uint16) and a Megatron `.bin`/`.idx` pair (give the path without the suffix, or the .idx);
of those, the last 5 % are held out for validation.

Which sequences step t sees depends on (seed, t) alone, never on the layout.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import io
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from models.errors import Parser, UsageError, command_line
from models.files import parse_json
from parallel.artifacts import write_json
from parallel.layout import Layout
from parallel.work import HELD_OUT, held_out_from

if TYPE_CHECKING:  # torch takes seconds to load: --help and preparing do without
    from torch import Tensor

DEFAULT_FOLDER = "data/stdlib"
BYTE_VOCAB = 257  # 256 bytes and one end-of-document id
MAX_BPE = 2**20  # its trainer takes memory for all ids at once
SPLITS = ("train", "val")


@dataclass(frozen=True)
class Tokens:
    """One split: a long 1-D array of ids (usually a memory map) and where it came from."""

    ids: np.ndarray
    path: str
    tokenizer: str
    vocab_size: int | None  # None: a bare file does not say
    sha256: str | None

    def batch(self, offsets: np.ndarray, seq_len: int, limit: int) -> tuple[Tensor, Tensor]:
        """Tokens and next-token labels, each [len(offsets), seq_len], int64.

        Raises:
            UsageError: an id is not below `limit`, the model's vocabulary.
        """
        import torch

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

    def _blocks(self) -> Iterator[np.ndarray]:
        step = 1 << 24
        return (self.ids[at : at + step] for at in range(0, len(self.ids), step))

    def largest(self) -> int:
        """The largest id in all of it."""
        return max(int(block.max()) for block in self._blocks())

    def digest(self) -> str:
        """SHA-256 of the ids, for files that bring none."""
        digest = hashlib.sha256()
        for block in self._blocks():
            digest.update(np.ascontiguousarray(block))
        return digest.hexdigest()


@dataclass(frozen=True)
class Data:
    train: Tokens
    val: Tokens


def load(path: Path | str, seq_len: int, vocab_size: int) -> Data:
    """Open token files and check that a model of `vocab_size` ids can train on them.

    Raises:
        UsageError: nothing there, too short for one sequence, or ids beyond the vocabulary.
    """
    path = Path(path)
    _settle(Path(os.path.realpath(path)))
    if path.is_dir():
        data = _open_folder(path)
    elif path.suffix == ".idx" or Path(f"{path}.idx").exists():
        data = _open_megatron(path.with_suffix("") if path.suffix == ".idx" else path)
    elif path.is_file():
        data = _open_bare(path)
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
        if tokens.vocab_size is None:  # a bare file does not say: look
            tokens.check(tokens.largest(), vocab_size)
    return data


def _memory_map(path: Path, dtype: Any) -> np.ndarray:
    try:
        return np.memmap(path, dtype=dtype, mode="r")
    except (ValueError, TypeError) as error:
        size = path.stat().st_size
        raise UsageError(f"{path}: {size} bytes are no {dtype} token ids: {error}") from error


def _open_folder(path: Path) -> Data:
    if not (path / "meta.json").exists() and (path / "train.bin").exists():
        return _open_pair(path / "train.bin", path / "val.bin")  # nanoGPT's own folder
    try:
        meta = parse_json((path / "meta.json").read_text())
        known = (str(path), meta["tokenizer"], meta["vocab_size"])
        train, val = (
            Tokens(_memory_map(path / f"{s}.bin", meta["dtype"]), *known, meta["sha256"][s])
            for s in ("train", "val")
        )
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} is damaged: {error}; prepare it again") from error
    return Data(train, val)


def _open_bare(path: Path) -> Data:
    if (path.parent / "meta.json").exists():
        raise UsageError(f"{path} belongs to the prepared folder {path.parent}: give that")
    return _open_pair(path, path.with_name("val.bin") if path.name == "train.bin" else None)


def _open_pair(train: Path, val: Path | None) -> Data:
    """nanoGPT's uint16 files; without a val.bin the end of the other is held out."""
    ids = _memory_map(train, np.uint16)
    if val is None or not val.exists():
        return _hold_out(ids, train)
    parts = ((ids, train), (_memory_map(val, np.uint16), val))
    return Data(*(Tokens(part, str(path), "unknown", None, None) for part, path in parts))


def _open_megatron(prefix: Path) -> Data:
    from parallel.cpu import import_megatron

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
        dtype = IndexedDataset(str(prefix), mmap=True).index.dtype
    except Exception as error:  # it asserts, unpacks and maps: any of these is a bad file
        reason = str(error).strip() or type(error).__name__
        raise UsageError(f"{prefix}.idx is not a Megatron index: {reason}") from error
    # The documents lie one after the other in the .bin: the whole file is one array of ids.
    return _hold_out(_memory_map(Path(f"{prefix}.bin"), dtype), prefix)


def _hold_out(ids: np.ndarray, path: Path) -> Data:
    cut = held_out_from(len(ids))
    train, val = (Tokens(part, str(path), "unknown", None, None) for part in (ids[:cut], ids[cut:]))
    return Data(train, val)


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


# --- preparing -----------------------------------------------------------------------------------


def stdlib_documents(limit_bytes: int = 16_000_000) -> list[Path]:
    """The standard library's own modules, in name order: a corpus that is on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
    found, total = [], 0
    for path in sorted(root.rglob("*.py")):
        if skipped.isdisjoint(path.relative_to(root).parts[:-1]) and total < limit_bytes:
            found.append(path)
            total += path.stat().st_size
    return found


def _documents(inputs: list[Path]) -> list[Path]:
    if not inputs:
        return stdlib_documents()
    found: list[Path] = []
    for path in inputs:
        if path.is_dir():
            found += sorted(p for p in path.rglob("*") if p.is_file())
        elif path.is_file():
            found.append(path)
        else:
            kind = "neither a file nor a folder" if path.exists() else "no such file or folder"
            raise UsageError(f"{path}: {kind}")
    if not found:
        raise UsageError(f"no files in {', '.join(map(str, inputs))}")
    return found


def _read(document: Path) -> bytes:
    try:
        return document.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {document}: {error.strerror}") from error


class _Bytes:
    """The tokenizer that needs nothing: one id per byte, 256 between documents."""

    name, vocab_size, end = "byte", BYTE_VOCAB, 256

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, dtype=np.uint8).astype(np.uint32)


class _Subwords:
    """A `tokenizers` or transformers tokenizer behind the same call."""

    def __init__(self, name: str, vocab_size: int, end: int, encode):
        self.name, self.vocab_size, self.end, self._encode = name, vocab_size, end, encode

    def encode(self, text: bytes) -> np.ndarray:
        return np.asarray(self._encode(text.decode("utf-8", "replace")), dtype=np.uint32)


def _train_bpe(documents: list[Path], vocab_size: int, out: Path) -> _Subwords:
    from tokenizers import ByteLevelBPETokenizer

    if not BYTE_VOCAB <= vocab_size <= MAX_BPE:
        raise UsageError(
            f"a byte-level BPE needs --vocab-size {BYTE_VOCAB} to {MAX_BPE}, not {vocab_size}"
        )

    def lines() -> Iterator[str]:  # not the files' names: a byte that is no UTF-8 would end it
        for document in documents:
            yield from io.StringIO(_read(document).decode("utf-8", "replace"), newline="\n")

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        lines(),
        vocab_size,
        show_progress=False,
        special_tokens=["<|endoftext|>"],
    )
    bpe.save(str(out / "tokenizer.json"))
    end = bpe.token_to_id("<|endoftext|>")
    return _Subwords("bpe", bpe.get_vocab_size(), end, lambda text: bpe.encode(text).ids)


def _from_hugging_face(path: Path) -> _Subwords:
    from models.hf_model import load_tokenizer

    tokenizer = load_tokenizer(path)
    end = tokenizer.eos_token_id
    if end is None:
        end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    if end is None:
        raise UsageError(f"the tokenizer at {path} has no end-of-text token")
    encode = lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # noqa: E731
    return _Subwords(str(path), len(tokenizer), end, encode)


def prepare(out: Path, inputs: list[Path], tokenizer: str = "byte", vocab_size: int = 4096) -> dict:
    """Tokenize documents into out/train.bin and out/val.bin, and describe them in out/meta.json.

    Every 20th document is held out. All is written aside, in `.NAME.new`, and takes the place of
    an earlier preparation when it is whole.

    Raises:
        UsageError: an input or the tokenizer cannot be read, there is no text, something else than
            a prepared folder is at `out`, or it cannot be written.
    """
    documents = _documents(inputs)
    out = Path(os.path.realpath(out))  # a link's target is replaced, not the link
    aside = _aside(out)
    try:
        _settle(out)
        _check_replaceable(out)
        aside.mkdir(parents=True, exist_ok=True)
        with (aside / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"{out}: another preparation is writing it, in {aside}") from None
            for left in set(aside.iterdir()) - {aside / ".lock"}:
                print(
                    f"parallel.data: removed {left}, which a killed attempt left", file=sys.stderr
                )
                left.unlink()
            try:
                meta = _write(aside, documents, inputs, tokenizer, vocab_size)
                (aside / ".lock").unlink()
                _swap(aside, out)
            finally:  # also after Ctrl-C; what a kill leaves, the next preparation removes
                shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror or error}") from error
    return meta


def _aside(out: Path) -> Path:
    return out.parent / f".{out.name}.new"


def _settle(out: Path) -> None:
    """Where a preparation was killed between the two renames of a swap, end the swap."""
    aside = _aside(out)
    if not out.exists() and (aside / "meta.json").exists():
        with contextlib.suppress(FileNotFoundError):  # another rank was first
            (aside / ".lock").unlink(missing_ok=True)
            aside.rename(out)
            print(f"parallel.data: {out}: put in place from {aside}", file=sys.stderr)


def _swap(aside: Path, out: Path) -> None:
    """`aside` takes the place of `out`; killed between, `_settle` does the rest."""
    old = out.parent / f".{out.name}.old"
    shutil.rmtree(old, ignore_errors=True)  # of a preparation killed before it could
    if out.exists():
        out.rename(old)
    aside.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def _check_replaceable(out: Path) -> None:
    """Raises: UsageError: something is there that no preparation of ours wrote."""
    if not out.exists():
        return
    if not out.is_dir():
        raise UsageError(f"{out} is a file; --out names a folder")
    names = {path.name for path in out.iterdir()}
    partial = {f"{split}.bin.partial" for split in SPLITS}  # of a killed one, in earlier versions
    known = {"meta.json", "tokenizer.json", "train.bin", "val.bin"} | partial
    ours = names <= known and ("meta.json" in names or names & partial)
    if names and not ours:
        other = min(names - known, default=min(names))
        raise UsageError(
            f"{out} holds {other} and is no folder that parallel.data wrote: it is not replaced;"
            " give another --out"
        )


def _write(
    folder: Path, documents: list[Path], inputs: list[Path], tokenizer: str, vocab_size: int
) -> dict:
    """Fill the folder, meta.json last; what that says."""
    if tokenizer == "byte":
        coder = _Bytes()
    elif tokenizer == "bpe":
        coder = _train_bpe(documents, vocab_size, folder)
    else:
        coder = _from_hugging_face(Path(tokenizer))
    dtype = "<u2" if coder.vocab_size <= 2**16 else "<u4"
    every = round(1 / HELD_OUT)
    hashes = {split: hashlib.sha256() for split in SPLITS}
    counts = dict.fromkeys(hashes, 0)
    with contextlib.ExitStack() as stack:
        files = {s: stack.enter_context((folder / f"{s}.bin").open("wb")) for s in SPLITS}
        quiet = not sys.stderr.isatty()
        read = 0
        for number, document in enumerate(
            tqdm(documents, "tokenizing", unit="file", disable=quiet)
        ):
            text = _read(document)
            read += len(text)
            ids = np.append(coder.encode(text), np.uint32(coder.end))
            # One file alone is cut, so that it too leaves something to validate on.
            cut = int(len(ids) * (1 - HELD_OUT)) if len(documents) < every else None
            parts = {"train": ids[:cut], "val": ids[cut:]} if cut is not None else {}
            parts = parts or {"val" if number % every == every - 1 else "train": ids}
            for split, part in parts.items():
                block = part.astype(dtype).tobytes()
                files[split].write(block)
                hashes[split].update(block)
                counts[split] += len(part)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    if not read:
        raise UsageError(f"no text: the {len(documents)} files of the input are empty")
    meta = {
        "tokenizer": coder.name,
        "vocab_size": coder.vocab_size,
        "dtype": dtype,
        "documents": len(documents),
        "tokens": counts,
        "sha256": {split: digest.hexdigest() for split, digest in hashes.items()},
        "source": [str(p) for p in inputs] or "the Python standard library's source",
    }
    write_json(folder / "meta.json", meta)
    return meta


@command_line("parallel.data")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        prog="python -m parallel.data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--input", type=Path, nargs="+", default=[], metavar="PATH", help="text files or folders"
    )
    parser.add_argument("--out", type=Path, default=Path(DEFAULT_FOLDER), help="folder to write")
    parser.add_argument(
        "--tokenizer", default="byte", help="byte, bpe (trained here), or a local tokenizer's path"
    )
    parser.add_argument("--vocab-size", type=int, default=4096, help="ids of a BPE trained here")
    parser.add_argument("--if-missing", action="store_true", help="do nothing if it is there")
    arguments = parser.parse_args(argv)
    _settle(Path(os.path.realpath(arguments.out)))
    if arguments.if_missing and (arguments.out / "meta.json").exists():
        return 0
    meta = prepare(arguments.out, arguments.input, arguments.tokenizer, arguments.vocab_size)
    print(
        f"{arguments.out}: {meta['documents']} documents, {meta['tokens']['train']:,} training and"
        f" {meta['tokens']['val']:,} validation tokens, {meta['vocab_size']} ids"
        f" ({meta['tokenizer']})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
