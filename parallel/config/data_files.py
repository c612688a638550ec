"""What lies at a path of token files, from sizes and headers alone. Torch-free.

parallel/data.py writes such folders, parallel/token_files.py reads the ids.
"""

import contextlib
import sys
from pathlib import Path

from models.errors import UsageError
from models.files import parse_json
from models.storage import publish

DEFAULT_FOLDER = "data/stdlib"
HELD_OUT = 0.05  # the fraction of a bare file's tokens (or of documents) kept for validation

# Megatron's IndexedDataset: the header's one-byte code of the ids' type -> bytes per id.
_MEGATRON_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}


def held_out_from(n_tokens: int) -> int:
    """Where a bare file's training tokens end; the rest is for validation."""
    return int(n_tokens * (1 - HELD_OUT))


def _number(data: str, name: str, least: int) -> int | None:
    """A whole number of a prepared folder's meta.json; None where nothing readable says it."""
    try:
        number = parse_json((Path(data) / "meta.json").read_text())[name]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # training reads the data again, and says what is wrong
    return number if type(number) is int and number >= least else None


def vocabulary(data: str) -> int | None:
    """How many ids a prepared folder's tokenizer has, if it says so."""
    return _number(data, "vocab_size", 1)


def end_of_text(data: str) -> int | None:
    """The id after each of a prepared folder's documents, if it says so."""
    return _number(data, "end_of_text", 0)


def documents(data: str) -> int | None:
    """How many documents a prepared folder has, with those held out, if it says so."""
    return _number(data, "documents", 0)


def training_tokens(data: str) -> int:
    """Tokens of the training split, from sizes and headers alone; parallel.data reads the ids.

    Raises:
        UsageError: there is nothing at the path, or it is damaged.
    """
    path = Path(data)
    try:
        if (path / "meta.json").exists():
            return int(parse_json((path / "meta.json").read_text())["tokens"]["train"])
        if path.is_dir():
            return _bare(path / "train.bin", path / "val.bin")
        if path.suffix == ".idx" or Path(f"{path}.idx").exists():
            prefix = path.with_suffix("") if path.suffix == ".idx" else path
            code = Path(f"{prefix}.idx").read_bytes()[17]  # magic (9 bytes), version (8), type
            return held_out_from(Path(f"{prefix}.bin").stat().st_size // _MEGATRON_BYTES[code])
        return _bare(path, path.with_name("val.bin") if path.name == "train.bin" else None)
    except OSError as error:
        raise UsageError(f"epochs needs the data: {error.filename}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UsageError(f"epochs needs the data, but {path} is damaged: {error!r}") from error


def _bare(train: Path, val: Path | None) -> int:
    """nanoGPT's uint16 files."""
    tokens = train.stat().st_size // 2
    return tokens if val is not None and val.exists() else held_out_from(tokens)


def aside_of(out: Path) -> Path:
    return out.parent / f".{out.name}.new"


def settle(out: Path) -> None:
    """Publish what a preparation had written when it was killed between publish's two renames."""
    aside = aside_of(out)
    if not out.exists() and (aside / "meta.json").exists():
        with contextlib.suppress(FileNotFoundError):  # another rank was first
            (aside / ".lock").unlink(missing_ok=True)
            publish(aside, out)
            print(f"parallel.data: {out}: put in place from {aside}", file=sys.stderr)
