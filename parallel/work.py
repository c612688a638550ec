"""How long a run trains: optimizer steps, from steps, epochs or a budget of tokens. Torch-free.

A step is one optimizer step: one update of the weights, from global_batch x seq_len tokens over all
ranks. A micro-step is one forward and backward pass of one micro-batch on every dp rank; a step is
grad_accum of them. Nothing here or in a study counts micro-steps.

Sequences are drawn at random from (seed, step), so an epoch is an amount of work, not one visit to
every token: as many whole steps as the training split's tokens fill, floor(tokens / tokens per
step). What fills no whole step is left out, as a loader with drop_last does. A budget of tokens is
never exceeded: floor(budget / tokens per step).
"""

from pathlib import Path

from models.errors import UsageError
from models.files import parse_json

WORK = ("steps", "epochs", "train_tokens")  # what one layer of settings says replaces them all
HELD_OUT = 0.05  # the share of a bare file's tokens (or of documents) kept for validation

# Megatron's IndexedDataset: the header's one-byte code of the ids' type -> bytes per id.
_MEGATRON_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}


def steps_of(given: dict[str, int], tokens_per_step: int, data: str) -> int:
    """Optimizer steps of a run that states `given`: one or more of WORK, which must then agree.

    Raises:
        UsageError: two statements disagree, a budget is smaller than a step, or `epochs` of data
            that cannot be read; with the numbers.
    """
    found: dict[str, int] = {}
    if "epochs" in given:
        found["epochs"] = given["epochs"] * steps_per_epoch(tokens_per_step, data)
    if "train_tokens" in given:
        found["train_tokens"] = given["train_tokens"] // tokens_per_step
        if not found["train_tokens"]:
            raise UsageError(
                f"train_tokens {given['train_tokens']} is less than one step's {tokens_per_step}"
            )
        if len(given) > 1 and given["train_tokens"] % tokens_per_step:
            raise UsageError(
                f"train_tokens {given['train_tokens']} is no whole number of steps of"
                f" {tokens_per_step} tokens, but {' and '.join(set(given) - {'train_tokens'})}"
                " is given beside it"
            )
    if "steps" in given:
        found["steps"] = given["steps"]
    if len(set(found.values())) > 1:
        said = ", ".join(f"{name} {given[name]} = {steps} steps" for name, steps in found.items())
        raise UsageError(
            f"these disagree: {said} (a step is an optimizer step of {tokens_per_step} tokens)"
        )
    return next(iter(found.values()))


def steps_per_epoch(tokens_per_step: int, data: str) -> int:
    """Whole steps that the training split fills.

    Raises:
        UsageError: it fills none, or cannot be read.
    """
    tokens = training_tokens(data)
    if tokens < tokens_per_step:
        raise UsageError(
            f"epochs: the training split of {data} has {tokens} tokens, less than one step's"
            f" {tokens_per_step}"
        )
    return tokens // tokens_per_step


def held_out_from(n_tokens: int) -> int:
    """Where a bare file's training tokens end; the rest is for validation."""
    return int(n_tokens * (1 - HELD_OUT))


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
