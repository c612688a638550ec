"""Hugging Face GPT-2 directories and our weights-only folders, each made from the other.

The arithmetic is the same, only names and layouts differ: Hugging Face's Conv1D stores a matrix
[in, out] and the rows of qkv as all q, all k, all v; ours stores [out, in] and qkv head by head.
What GPT-2 can say and our GPT cannot is refused, with the numbers. transformers is not needed.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from models.config import INIT_STD, LAYER_NORM_EPS, GPTConfig, parameter_shapes
from models.errors import UsageError
from models.files import parse_json
from models.weights import (
    CONFIG,
    DTYPES,
    FORMAT,
    TENSORS,
    Aside,
    Weights,
    copy_beside,
    differing,
    read_json,
    read_weights,
    refuse_pickles,
    stored_tensors,
    write_safetensors,
    write_text,
    write_weights,
)

# Our parameter name inside a block -> GPT2LMHeadModel's. Its Conv1D stores [in, out].
_BLOCK_NAMES = {
    "norm1": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.out": "attn.c_proj",
    "norm2": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_TOP_NAMES = {"embedding.word": "wte", "embedding.position": "wpe", "norm": "ln_f"}
_INDEX = "model.safetensors.index.json"
_HEAD = "lm_head.weight"  # tied; written by some, and then equal to wte.weight
_MASKS = (".attn.bias", ".attn.masked_bias")  # constants that old files carry
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)
# config.json's name -> (GPTConfig's, another name of it there, GPT2Config's default)
_SIZES = {
    "n_layer": ("n_layer", "num_hidden_layers", 12),
    "n_embd": ("hidden", "hidden_size", 768),
    "n_head": ("n_head", "num_attention_heads", 12),
    "n_positions": ("max_seq_len", "max_position_embeddings", 1024),
    "vocab_size": ("vocab_size", "vocab_size", 50257),
}
# What our GPT computes, and the values of config.json that say the same (the first is written).
_ARITHMETIC: dict[str, tuple[tuple, str]] = {
    "activation_function": (("gelu_new", "gelu_pytorch_tanh"), "the tanh GELU"),
    "layer_norm_epsilon": ((LAYER_NORM_EPS,), "GPT-2's"),
    "scale_attn_weights": ((True,), "attention scaled by 1/sqrt(head size)"),
    "scale_attn_by_inverse_layer_idx": ((False,), "one attention scale in all layers"),
    "add_cross_attention": ((False,), "a decoder alone"),
}
_DTYPES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}


def reference_name(name: str) -> str:
    """The reference GPT's name of the parameter that GPT2LMHeadModel calls `name`.

    Raises:
        KeyError: it has no such parameter.
    """
    name = name.removeprefix("gpt2.").removeprefix("transformer.")
    stem, _, kind = name.rpartition(".")
    top = {theirs: ours for ours, theirs in _TOP_NAMES.items()}
    if stem in top:
        return f"{top[stem]}.{kind}"
    parts = stem.split(".", 2)
    if len(parts) < 3 or parts[0] != "h":
        raise KeyError(name)
    ours = {theirs: ours for ours, theirs in _BLOCK_NAMES.items()}[parts[2]]
    return f"blocks.{parts[1]}.{ours}.{kind}"


def hugging_face_name(name: str) -> str:
    """GPT2LMHeadModel's name of a reference parameter."""
    stem, kind = name.rsplit(".", 1)
    if stem in _TOP_NAMES:
        return f"transformer.{_TOP_NAMES[stem]}.{kind}"
    _, index, inner = stem.split(".", 2)
    return f"transformer.h.{index}.{_BLOCK_NAMES[inner]}.{kind}"


def to_hugging_face(config: GPTConfig, name: str, value: Tensor) -> Tensor:
    """Reshape a reference parameter (named `name`, whole) to the layout GPT2LMHeadModel uses.

    qkv rows go from head by head to all q, all k, all v; block matrices are transposed.
    """
    if ".attn.qkv." in name:
        by_head = value.view(config.n_head, 3, config.head_dim, *value.shape[1:])
        value = by_head.transpose(0, 1).reshape(value.shape)
    if name.startswith("blocks.") and value.dim() == 2:
        value = value.t()
    return value.contiguous()


def from_hugging_face(config: GPTConfig, name: str, value: Tensor) -> Tensor:
    """The inverse of `to_hugging_face`; `name` is the reference's."""
    if name.startswith("blocks.") and value.dim() == 2:
        value = value.t()
    if ".attn.qkv." in name:
        by_part = value.reshape(3, config.n_head, config.head_dim, *value.shape[1:])
        value = by_part.transpose(0, 1).reshape(value.shape)
    return value.contiguous()


def _their_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """GPT2LMHeadModel's names and shapes, in the order of our model."""
    return {
        hugging_face_name(name): shape[::-1] if name.startswith("blocks.") else shape
        for name, shape in parameter_shapes(config).items()
    }


# --- import --------------------------------------------------------------------------------------


def import_gpt2(
    source: Path | str,
    folder: Path | str,
    dtype: str | None = None,
    vocab_size: int | None = None,
    tokenizer: list[Path] = (),
    tokenizer_ids: int | None = None,
) -> tuple[Weights, list[str]]:
    """Make a weights-only folder from a GPT-2 directory: (what was written, remarks).

    dtype: None keeps what is stored. vocab_size: rows of the embedding to keep; None takes
    config.json's. Rows beyond are padding and are cut, with a remark. tokenizer: files to send
    along, of one with `tokenizer_ids` ids.

    Raises:
        UsageError: no GPT-2 directory in safetensors, or one that our GPT cannot express.
    """
    source, folder = Path(source), Path(folder)
    described = read_json(source / CONFIG)
    if described.get("format") == FORMAT:
        raise UsageError(f"{source} is a weights-only folder of ours already")
    config = _config_of(described, source / CONFIG)
    refuse_new(folder)
    refuse_pickles(source)
    files = _files(source)
    stored: dict[str, tuple[Path, str, tuple[str, tuple[int, ...]]]] = {}
    for file in files:
        for name, what in stored_tensors(file).items():
            if not name.endswith(_MASKS):
                stored[_our_name(name, file)] = (file, name, what)
    if "embedding.word.weight" not in stored:
        raise UsageError(f"{source}: transformer.wte.weight is missing")
    config, remarks = _cut_vocabulary(config, stored, vocab_size, source)
    remarks += _check_tokenizer(config, tokenizer_ids)
    shapes = {name: shape for name, (_, _, (_, shape)) in stored.items() if name != _HEAD}
    # What is cut has its own rules; here its rows are as many as wanted.
    shapes["embedding.word.weight"] = (config.vocab_size, *shapes["embedding.word.weight"][1:])
    found = {hugging_face_name(name): shape for name, shape in shapes.items()}
    if problems := differing(found, _their_shapes(config)):
        raise UsageError(f"{source} is not the model of its {CONFIG}: {problems}")

    def read(name: str) -> Tensor:
        file, theirs, _ = stored[name]
        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(theirs)

    if _HEAD in stored and not torch.equal(read(_HEAD), read("embedding.word.weight")):
        raise UsageError(
            f"{source}: lm_head.weight differs from wte.weight, but our output layer is tied to it"
        )

    def tensor(name: str) -> Tensor:
        value = from_hugging_face(config, name, read(name))
        return value[: config.vocab_size] if name == "embedding.word.weight" else value

    kinds = {what[0] for _, _, what in stored.values()}
    kept = _DTYPES.get(kinds.pop(), "fp32") if len(kinds) == 1 else "fp32"
    write_weights(folder, config, tensor, dtype or kept, {"source": str(source)}, tokenizer)
    return read_weights(folder, verify=False), remarks


def _config_of(described: dict[str, Any], path: Path) -> GPTConfig:
    kind = described.get("model_type")
    if kind != "gpt2":
        rotary = " with rotary positions" * any("rope" in k or "rotary" in k for k in described)
        raise UsageError(
            f"{path}: model_type {kind!r}{rotary} is not gpt2, the only architecture here (learned"
            " positions, LayerNorm, biases, tanh GELU, tied output layer)"
        )
    for name, (values, ours) in _ARITHMETIC.items():
        if described.get(name, values[0]) not in values:
            raise UsageError(f"{path}: {name} is {described[name]!r}, but our GPT has {ours}")
    sizes = {
        ours: described.get(name, described.get(other, default))
        for name, (ours, other, default) in _SIZES.items()
    }
    try:
        return GPTConfig(**sizes, ffn_hidden=described.get("n_inner") or 0)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _our_name(name: str, file: Path) -> str:
    try:
        return name if name == _HEAD else reference_name(name)
    except KeyError:
        raise UsageError(f"{file}: tensor {name} is no part of a GPT-2 language model") from None


def _files(source: Path) -> list[Path]:
    """The one safetensors file, or the parts that an index names."""
    if (source / TENSORS).exists() or not (source / _INDEX).exists():
        return [source / TENSORS]
    parts = read_json(source / _INDEX).get("weight_map")
    if not isinstance(parts, dict) or any(Path(str(p)).name != p for p in parts.values()):
        raise UsageError(f"{source / _INDEX} is damaged: it does not map tensors to files here")
    return [source / part for part in sorted(set(parts.values()))]


def _cut_vocabulary(
    config: GPTConfig, stored: dict[str, Any], vocab_size: int | None, source: Path
) -> tuple[GPTConfig, list[str]]:
    """The config with the vocabulary that is kept, and what has to be said about the rest."""
    rows = stored["embedding.word.weight"][2][1][0]
    if rows < config.vocab_size:
        raise UsageError(
            f"{source}: the embedding has {rows} rows for a vocabulary of {config.vocab_size}"
        )
    kept = vocab_size or config.vocab_size
    if kept > rows:
        raise UsageError(f"--vocab-size {kept} is more than the {rows} rows of the embedding")
    remarks = [f"cut {rows - kept} of {rows} embedding rows: {kept} ids are kept"] * (kept < rows)
    sizes = {k: getattr(config, k) for k in ("n_layer", "hidden", "n_head", "max_seq_len")}
    return GPTConfig(**sizes, vocab_size=kept, ffn_hidden=config.ffn_hidden), remarks


# --- export --------------------------------------------------------------------------------------


def export_gpt2(
    source: Path | str,
    folder: Path | str,
    dtype: str | None = None,
    tokenizer: list[Path] = (),
    tokenizer_ids: int | None = None,
    end_id: int | None = None,
) -> GPTConfig:
    """Make a directory that GPT2LMHeadModel.from_pretrained loads from a run or weights folder.

    dtype: None keeps what is stored. tokenizer: files to send along, of one with `tokenizer_ids`
    ids, `end_id` among them its end of text.

    Raises:
        UsageError: no weights there, or damaged ones; the folder exists or cannot be written.
    """
    weights = read_weights(find_weights(Path(source)))
    config, dtype = weights.config, dtype or weights.dtype
    refuse_new(Path(folder))
    _check_tokenizer(config, tokenizer_ids)
    values = (to_hugging_face(config, name, value) for name, value in weights.tensors())
    with Aside(folder) as aside:
        write_safetensors(aside / TENSORS, _their_shapes(config), values, dtype)
        described = {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            **hugging_face_config(config),
            "bos_token_id": end_id,
            "eos_token_id": end_id,
            "dtype": str(DTYPES[dtype]).removeprefix("torch."),
        }
        write_text(aside / CONFIG, json.dumps(described, indent=2) + "\n")
        copy_beside(tokenizer, aside)
    return config


def hugging_face_config(config: GPTConfig) -> dict[str, Any]:
    """transformers' GPT2Config of our GPT: its sizes and arithmetic, no dropout, no special ids."""
    return {
        **{theirs: getattr(config, ours) for theirs, (ours, _, _) in _SIZES.items()},
        "n_inner": config.ffn_hidden,
        **{name: values[0] for name, (values, _) in _ARITHMETIC.items()},
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
        "initializer_range": INIT_STD,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def find_weights(path: Path) -> Path:
    """A weights-only folder: `path` itself, or the newest step's in a run (or its checkpoints).

    Raises:
        UsageError: there is none.
    """
    if not path.is_dir():
        raise UsageError(f"{path}: no such folder")
    if _is_weights(path):
        return path
    below = [p.parent for depth in ("*", "*/*") for p in path.glob(f"{depth}/{CONFIG}")]
    below = [p for p in below if not p.name.startswith(".") and _is_weights(p)]
    if not below:
        raise UsageError(
            f"{path}: no weights-only folder here; full checkpoints give one:"
            f" python -m parallel.checkpoint export {path / 'checkpoints'} OUT"
        )
    return max(below, key=_step)


def _is_weights(path: Path) -> bool:
    try:
        return parse_json((path / CONFIG).read_text()).get("format") == FORMAT
    except (OSError, ValueError, AttributeError):
        return False


def _step(path: Path) -> int:
    """The number that a folder's name ends with (weights-00000010)."""
    digits = re.search(r"\d*$", path.name)[0]
    return int(digits) if digits else -1


# --- both ----------------------------------------------------------------------------------------


def refuse_new(folder: Path) -> None:
    """Refuse to write where something is.

    Raises:
        UsageError: the folder exists and is not empty.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"{folder} exists already: name a new folder")


def tokenizer_files(path: Path) -> list[Path]:
    """The files of the tokenizer at a path (a folder or a tokenizer.json), [] where there is none.

    A folder's vocabulary alone (vocab.json without merges) is taken too: they go along unread.
    """
    if path.is_file():
        return [path]
    return [path / name for name in _TOKENIZER_FILES if (path / name).is_file()]


def _check_tokenizer(config: GPTConfig, ids: int | None) -> list[str]:
    """A remark on padding that stays; an id without a row is refused."""
    if ids is not None and ids > config.vocab_size:
        raise UsageError(
            f"the tokenizer has {ids} ids, but the model has {config.vocab_size} embedding rows"
        )
    if ids is None or ids == config.vocab_size:
        return []
    extra = config.vocab_size - ids
    return [f"{extra} rows have no id in the tokenizer; --vocab-size {ids} leaves them out"]
