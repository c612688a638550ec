"""Makes token files from text.

    python -m parallel.data                       the standard library's own source, byte by byte
    python -m parallel.data --input corpus/ --tokenizer bpe --vocab-size 4096 --out data/corpus
    python -m parallel.data --input corpus.txt --tokenizer path/to/gpt2 --out data/corpus

A document is a file of UTF-8 text, or one line of a .jsonl file, with its text at the key `text` or
--text-key. The folder gets `train.bin` and `val.bin` (nanoGPT's format: token ids, little-endian,
no header; uint16, or uint32 above 65,536 ids) and `meta.json`. An end-of-text id follows each
document. Every 20th document is for validation; with fewer than 20, the end of each is.
parallel.train reads the folder with --data; parallel/token_files.py lists what else it reads.
"""

import contextlib
import functools
import hashlib
import io
import itertools
import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from base.errors import Parser, UsageError, command_line, warn
from base.files import shown
from base.storage import own_crc32, publish, write_json
from parallel.config.data_files import DEFAULT_FOLDER, HELD_OUT, SPLITS

BYTE_VOCAB = 257  # 256 bytes and one end-of-document id
BPE_VOCAB = 4096
MAX_BPE = 2**20  # its trainer takes memory for all ids at once
END = "<|endoftext|>"
TEXT_KEY = "text"


def stdlib_documents(limit_bytes: int = 16_000_000) -> list[Path]:
    """Returns the standard library's own modules, in name order: a corpus that is on every
    machine."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
    documents, total = [], 0
    for path in sorted(root.rglob("*.py")):
        size = path.stat().st_size
        if size and skipped.isdisjoint(path.relative_to(root).parts[:-1]) and total < limit_bytes:
            documents.append(path)
            total += size
    return documents


def _files(inputs: list[Path]) -> list[Path]:
    """Returns the files of the inputs, those of a folder in name order; without any, stdlib's."""
    files = [] if inputs else stdlib_documents()
    for path in inputs:
        if path.is_dir():
            files += sorted(file for file in path.rglob("*") if file.is_file())
        elif path.is_file():
            files.append(path)
        else:
            raise UsageError(f"{path}: no such file or folder")
    if not files:
        raise UsageError(f"no files in {', '.join(map(str, inputs))}")
    return files


def _texts(files: Iterable[Path], text_key: str) -> Iterator[str]:
    """Yields the text of each document; an empty one, too."""
    for file in files:
        try:
            with file.open("rb") as content:
                if file.suffix.lower() != ".jsonl":
                    yield _decoded(content.read(), str(file))
                    continue
                for number, line in enumerate(content, 1):
                    if line.strip():
                        yield _text_of(line, text_key, f"{file}:{number}")
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror}") from error


def _decoded(content: bytes, place: str) -> str:
    """Returns the bytes of a file or line as text, and refuses what is none. place: its name."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{place} is no UTF-8 text: byte {error.start + 1} is {content[error.start]:#04x};"
            " convert it, or take it out of the input"
        ) from error
    if "\0" in text:
        raise UsageError(f"{place} is no text: it holds a zero byte; take it out of the input")
    return text


def _text_of(line: bytes, text_key: str, place: str) -> str:
    """Returns the text of a line of a .jsonl file. place: the file and the line's number."""
    try:
        content = json.loads(line)[text_key].encode()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{place} is no JSON object with a text at {text_key!r} (--text-key names another):"
            f" {shown(line)}"
        ) from error
    return _decoded(content, place)


class Coder(NamedTuple):
    """A tokenizer: `encode` makes token ids of a text; `end` is the id between documents."""

    name: str
    vocab_size: int
    end: int
    encode: Callable[[str], Any]


_BYTES = Coder("byte", BYTE_VOCAB, 256, lambda text: np.frombuffer(text.encode(), dtype=np.uint8))


def _train_bpe(texts: Iterable[str], vocab_size: int, out: Path) -> Coder:
    from tokenizers import ByteLevelBPETokenizer

    if not BYTE_VOCAB <= vocab_size <= MAX_BPE:
        raise UsageError(
            f"a byte-level BPE needs --vocab-size {BYTE_VOCAB} to {MAX_BPE}, not {vocab_size}"
        )

    lines = (line for text in texts for line in io.StringIO(text, newline="\n"))
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(lines, vocab_size, show_progress=False, special_tokens=[END])
    bpe.save(str(out / "tokenizer.json"))
    size, end = bpe.get_vocab_size(), bpe.token_to_id(END)
    return Coder("bpe", size, end, lambda text: bpe.encode(text).ids)


def _from_hugging_face(path: Path) -> Coder:
    from models.hf_model import end_of_text, load_tokenizer

    tokenizer = load_tokenizer(path)
    if (end := end_of_text(tokenizer)) is None:
        raise UsageError(f"the tokenizer at {path} has no end-of-text token")
    encode = functools.partial(tokenizer.encode, add_special_tokens=False, verbose=False)
    return Coder(str(path), len(tokenizer), end, encode)


def prepare(
    out: Path,
    inputs: list[Path],
    tokenizer: str = "byte",
    vocab_size: int = BPE_VOCAB,
    text_key: str = TEXT_KEY,
) -> dict:
    """Tokenizes documents into out/train.bin and out/val.bin, and describes them in out/meta.json.

    All is written aside, and gets its name when it is whole. text_key: of the text in a line of a
    .jsonl file.

    Raises:
        UsageError: an input or the tokenizer cannot be read, there is no text, something is at
            `out`, or it cannot be written.
    """
    files = _files(inputs)
    if text_key != TEXT_KEY and ".jsonl" not in {file.suffix.lower() for file in files}:
        raise UsageError(f"--text-key {text_key} is of .jsonl files, and the input has none")
    out = Path(os.path.realpath(out))  # of a link, what it names is made
    if out.exists():
        raise UsageError(f"{out} is there already: remove it, or give another --out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as aside:
            folder = Path(aside) / out.name
            folder.mkdir()
            if tokenizer == "byte":
                coder = _BYTES
            elif tokenizer == "bpe":
                coder = _train_bpe(_texts(files, text_key), vocab_size, folder)
            else:
                coder = _from_hugging_face(Path(tokenizer))
            source = [str(p) for p in inputs] or "the Python standard library's source"
            meta = _write(folder, files, coder, text_key, source)
            publish(folder, out)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror or error}") from error
    return meta


def _write(folder: Path, files: list[Path], coder: Coder, text_key: str, source: Any) -> dict:
    """Writes the token files and, last, meta.json into the folder; returns meta.json's content."""
    dtype = "<u2" if coder.vocab_size <= 2**16 else "<u4"
    period = round(1 / HELD_OUT)
    few = len(list(itertools.islice(filter(None, _texts(files, text_key)), period))) < period
    hashes = {split: hashlib.sha256() for split in SPLITS}
    counts = dict.fromkeys(SPLITS, 0)
    with contextlib.ExitStack() as stack:
        written = {s: stack.enter_context((folder / f"{s}.bin").open("wb")) for s in SPLITS}
        bar = tqdm(files, "tokenizing", unit="file", disable=not sys.stderr.isatty())
        number = empty = ended = 0
        for text in _texts(bar, text_key):
            if not text:
                empty += 1
                continue
            ids = np.append(np.asarray(coder.encode(text), dtype=np.uint32), np.uint32(coder.end))
            ended += int((ids == coder.end).sum())  # a file may hold several documents
            number += 1
            # A few are cut, so that they too leave something to validate on.
            if few:
                cut = int(len(ids) * (1 - HELD_OUT))
                parts = {"train": ids[:cut], "val": ids[cut:]}
            else:
                parts = {"train" if number % period else "val": ids}
            for split, split_ids in parts.items():
                block = split_ids.astype(dtype).tobytes()
                written[split].write(block)
                hashes[split].update(block)
                counts[split] += len(split_ids)
        for file in written.values():
            file.flush()
            os.fsync(file.fileno())
    if not number:
        raise UsageError(f"no text: the {empty} documents of the input are empty")
    if empty:
        warn("parallel.data", f"left out {empty} empty documents of {empty + number}")
    meta = {
        "tokenizer": coder.name,
        "vocab_size": coder.vocab_size,
        "dtype": dtype,
        "documents": ended,
        "end_of_text": int(coder.end),
        "tokens": counts,
        "sha256": {split: digest.hexdigest() for split, digest in hashes.items()},
        "source": source,
    }
    meta["crc32"] = own_crc32(meta)
    write_json(folder / "meta.json", meta)
    return meta


@command_line("parallel.data")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m parallel.data", description=__doc__)
    about = "text or .jsonl files, or folders of them (default: the standard library's source)"
    parser.add_argument("--input", type=Path, nargs="+", default=[], metavar="PATH", help=about)
    about = f"folder to write (default: {DEFAULT_FOLDER})"
    parser.add_argument("--out", type=Path, default=DEFAULT_FOLDER, metavar="DIR", help=about)
    about = "byte, bpe (trained here), or a local tokenizer's path (default: byte)"
    parser.add_argument("--tokenizer", default="byte", metavar="NAME|PATH", help=about)
    about = f"token ids of a BPE trained here (default: {BPE_VOCAB})"
    parser.add_argument("--vocab-size", type=int, metavar="N", help=about)
    about = f"of the text in a line of a .jsonl file (default: {TEXT_KEY})"
    parser.add_argument("--text-key", default=TEXT_KEY, metavar="KEY", help=about)
    parser.add_argument("--if-missing", action="store_true", help="do nothing if it is there")
    arguments = parser.parse_args(argv)
    if arguments.vocab_size is not None and arguments.tokenizer != "bpe":
        raise UsageError(
            f"--vocab-size {arguments.vocab_size} is of a BPE trained here; the tokenizer"
            f" {arguments.tokenizer} has its own: leave it out, or give --tokenizer bpe"
        )
    if arguments.if_missing and (arguments.out / "meta.json").exists():
        return 0
    vocab_size = BPE_VOCAB if arguments.vocab_size is None else arguments.vocab_size
    flags = (arguments.tokenizer, vocab_size, arguments.text_key)
    meta = prepare(arguments.out, arguments.input, *flags)
    print(
        f"{arguments.out}: {meta['documents']} documents, {meta['tokens']['train']:,} training and"
        f" {meta['tokens']['val']:,} validation tokens, {meta['vocab_size']} ids"
        f" ({meta['tokenizer']})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
