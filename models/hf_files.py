"""Hugging Face GPT-2 directories and our weights-only folders, each made from the other.

The arithmetic is the same, only names and layouts differ: Hugging Face's Conv1D stores a matrix
[in, out] and the rows of qkv as all q, all k, all v; ours stores [out, in] and qkv head by head.
A GPT-2 setting that our GPT does not have is refused, with the numbers. transformers is not needed.
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from models.config import INIT_STD, GPTConfig, parameter_shapes
from models.errors import UsageError
from models.files import read_json
from models.run_weights import CONFIG, FORMAT
from models.storage import refuse_existing, stored_tensors, write_synced
from models.tensor_files import CODES, DTYPES, write_safetensors
from models.weights import (
    METADATA,
    TENSORS,
    Weights,
    copy_beside,
    differing,
    new_folder,
    read_weights,
    refuse_pickles,
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
_EMBEDDING = "embedding.word.weight"
_HEAD = "lm_head.weight"  # tied; written by some, and then equal to wte.weight
_MASKS = (".attn.bias", ".attn.masked_bias")  # constants that old files carry
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
    "layer_norm_epsilon": ((1e-5,), "GPT-2's"),
    "scale_attn_weights": ((True,), "attention scaled by 1/sqrt(head size)"),
    "scale_attn_by_inverse_layer_idx": ((False,), "one attention scale in all layers"),
    "add_cross_attention": ((False,), "a decoder alone"),
}


def reference_name(name: str) -> str:
    """The reference GPT's name of the parameter that GPT2LMHeadModel calls `name`.

    Raises:
        KeyError: it has no such parameter.
    """
    name = name.removeprefix("gpt2.").removeprefix("transformer.")
    stem, _, kind = name.rpartition(".")
    ours = {theirs: ours for ours, theirs in (_TOP_NAMES | _BLOCK_NAMES).items()}
    block = re.fullmatch(r"h\.([^.]*)\.(.*)", stem)
    if block and block[2] in _BLOCK_NAMES.values():
        return f"blocks.{block[1]}.{ours[block[2]]}.{kind}"
    if stem not in _TOP_NAMES.values():
        raise KeyError(name)
    return f"{ours[stem]}.{kind}"


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


@dataclass(frozen=True)
class Gpt2:
    """A GPT-2 directory, checked. stored: our parameter name -> (file, its name there)."""

    config: GPTConfig
    dtype: str
    stored: dict[str, tuple[Path, str]]

    def tensor(self, name: str) -> Tensor:
        """One parameter as the reference GPT has it, without padded vocabulary rows."""
        value = from_hugging_face(self.config, name, self._stored(name))
        return value[: self.config.vocab_size] if name == _EMBEDDING else value

    def _stored(self, name: str) -> Tensor:
        file, theirs = self.stored[name]
        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(theirs)

    def is_tied(self) -> bool:
        return _HEAD not in self.stored or self._stored(_HEAD).equal(self._stored(_EMBEDDING))


def open_gpt2(source: Path, vocab_size: int | None = None) -> tuple[Gpt2, list[str]]:
    """Check that a GPT-2 directory is a model that our GPT can express: (the model, remarks).

    vocab_size: rows of the embedding to keep; None takes config.json's. Rows beyond are padding
    and are cut, with a remark.

    Raises:
        UsageError: no GPT-2 directory in safetensors, or one that our GPT cannot express.
    """
    described = read_json(source / CONFIG)
    if described.get("format") == FORMAT:
        raise UsageError(f"{source} is a weights-only folder of ours already")
    config = _config_of(described, source / CONFIG)
    refuse_pickles(source)
    stored, kinds, shapes = {}, set(), {}
    for file in _files(source):
        for theirs, (kind, shape) in stored_tensors(file).items():
            if not theirs.endswith(_MASKS):
                try:
                    name = theirs if theirs == _HEAD else reference_name(theirs)
                except KeyError:
                    words = "is no part of a GPT-2 language model"
                    raise UsageError(f"{file}: tensor {theirs} {words}") from None
                stored[name], shapes[name] = (file, theirs), shape
                kinds.add(kind)
    if _EMBEDDING not in stored:
        raise UsageError(f"{source}: transformer.wte.weight is missing")
    rows, *columns = shapes[_EMBEDDING]
    config, remarks = _cut_vocabulary(config, rows, vocab_size, source)
    shapes[_EMBEDDING] = (config.vocab_size, *columns)
    shapes.pop(_HEAD, None)
    theirs = {hugging_face_name(name): shape for name, shape in shapes.items()}
    if problems := differing(theirs, _their_shapes(config)):
        raise UsageError(f"{source} is not the model of its {CONFIG}: {problems}")
    dtype = next((name for name, of in DTYPES.items() if kinds == {CODES[of]}), "fp32")
    model = Gpt2(config, dtype, stored)
    if not model.is_tied():
        raise UsageError(
            f"{source}: lm_head.weight differs from wte.weight, but our output layer is tied to it"
        )
    return model, remarks


def import_gpt2(
    source: Path | str,
    folder: Path | str,
    dtype: str | None = None,
    vocab_size: int | None = None,
    tokenizer: list[Path] = (),
    tokenizer_ids: int | None = None,
) -> tuple[Weights, list[str]]:
    """Make a weights-only folder from a GPT-2 directory: (what was written, remarks).

    dtype: None keeps what is stored. vocab_size: see `open_gpt2`. tokenizer: files to send along,
    of one with `tokenizer_ids` ids.

    Raises:
        UsageError: no GPT-2 directory in safetensors, or one that our GPT cannot express; the
            folder exists or cannot be written.
    """
    source, folder = Path(source), Path(folder)
    refuse_existing(folder)
    model, remarks = open_gpt2(source, vocab_size)
    remarks += _check_tokenizer(model.config, tokenizer_ids)
    dtype = dtype or model.dtype
    write_weights(folder, model.config, model.tensor, dtype, {"source": str(source)}, tokenizer)
    return read_weights(folder, verify=False), remarks


def _config_of(described: dict[str, Any], path: Path) -> GPTConfig:
    kind = described.get("model_type")
    if kind != "gpt2":
        rotary = any("rope" in key or "rotary" in key for key in described)
        raise UsageError(
            f"{path}: model_type {kind!r}{' with rotary positions' if rotary else ''} is not gpt2,"
            " the only architecture here (learned positions, LayerNorm, biases, tanh GELU, tied"
            " output layer)"
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


def _files(source: Path) -> list[Path]:
    """The one safetensors file, or the parts that an index names."""
    if (source / TENSORS).exists() or not (source / _INDEX).exists():
        return [source / TENSORS]
    parts = read_json(source / _INDEX).get("weight_map")
    if not isinstance(parts, dict) or any(Path(str(p)).name != p for p in parts.values()):
        raise UsageError(f"{source / _INDEX} is damaged: it does not map tensors to files here")
    return [source / part for part in sorted(set(parts.values()))]


def _cut_vocabulary(
    config: GPTConfig, rows: int, vocab_size: int | None, source: Path
) -> tuple[GPTConfig, list[str]]:
    """The config with the vocabulary that is kept of an embedding's rows, and a remark on a cut."""
    if rows < config.vocab_size:
        raise UsageError(
            f"{source}: the embedding has {rows} rows for a vocabulary of {config.vocab_size}"
        )
    kept = vocab_size or config.vocab_size
    if kept > rows:
        raise UsageError(f"--vocab-size {kept} is more than the {rows} rows of the embedding")
    cut = f"cut {rows - kept} of {rows} embedding rows: {kept} ids are kept"
    return replace(config, vocab_size=kept), [cut] if kept < rows else []


# --- export --------------------------------------------------------------------------------------


def export_gpt2(
    source: Path | str,
    folder: Path | str,
    dtype: str | None = None,
    tokenizer: list[Path] = (),
    tokenizer_ids: int | None = None,
    end_id: int | None = None,
) -> GPTConfig:
    """Make a directory that GPT2LMHeadModel.from_pretrained loads from a weights-only folder.

    dtype: None keeps what is stored. tokenizer: files to send along, of one with `tokenizer_ids`
    ids, `end_id` among them its end of text.

    Raises:
        UsageError: no weights there, or damaged ones; the folder exists or cannot be written.
    """
    weights = read_weights(source)
    config, dtype = weights.config, dtype or weights.dtype
    refuse_existing(Path(folder))
    _check_tokenizer(config, tokenizer_ids)
    values = (to_hugging_face(config, name, value) for name, value in weights.tensors())
    with new_folder(folder) as aside:
        layout = {n: (DTYPES[dtype], shape) for n, shape in _their_shapes(config).items()}
        write_safetensors(aside / TENSORS, layout, values, METADATA)
        described = {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            **hugging_face_config(config),
            "bos_token_id": end_id,
            "eos_token_id": end_id,
            "dtype": str(DTYPES[dtype]).removeprefix("torch."),
        }
        write_synced(aside / CONFIG, json.dumps(described, indent=2) + "\n")
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
