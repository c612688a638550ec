"""Hugging Face's model classes with our weights, and its tokenizers: the only file that imports
transformers.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import transformers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from base.errors import UsageError
from models.config import GPTConfig, parameter_shapes
from models.gpt import (
    RECOMPUTED,
    Held,
    fill,
    init_parameter,
    mean_loss,
    positions,
    rope_frequencies,
    undivided,
)
from models.hf_config import architecture, hugging_face_config, hugging_face_names
from models.hf_weights import Tokenizer, to_hugging_face


class HuggingFaceGPT(nn.Module):
    """A model of transformers that is called as the reference model is: (tokens, labels) -> loss.

    The class is a submodule called as its model_type is, so the parameters of a checkpoint are
    gpt2.transformer..., llama.model... .
    """

    def __init__(self, config: GPTConfig, recompute: str = "none", end_of_text: int | None = None):
        super().__init__()
        self.config, self.end_of_text = config, end_of_text
        hf_class = architecture(config)
        self.model_type, model = hf_class.model_type, getattr(transformers, hf_class.name)
        settings = hugging_face_config(config) | {"use_cache": False}
        self.add_module(
            self.model_type, model(transformers.AutoConfig.for_model(self.model_type, **settings))
        )
        if config.position == "rope":
            # DeepSpeed's zero.Init rounds what the class computes them from to 16 bits.
            self.theirs.model.rotary_emb.inv_freq = rope_frequencies(config)
        if options := RECOMPUTED.get(recompute):
            self.theirs.gradient_checkpointing_enable(options)

    @property
    def theirs(self) -> nn.Module:
        """Returns the model of transformers."""
        return self.get_submodule(self.model_type)

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        """Returns the mean cross-entropy over all B*S tokens, a scalar."""
        position, mask = positions(tokens_BS, self.end_of_text)
        # Given positions alone, transformers looks for packed sequences in them.
        position_BS = None if mask is None else position
        output = self.theirs(tokens_BS, position_ids=position_BS, attention_mask=mask)
        return mean_loss(output.logits, labels_BS)


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)


def tokenizer_at(path: Path) -> Tokenizer:
    """Returns the tokenizer at `path` as files to send along with weights.

    Raises:
        UsageError: `load_tokenizer` finds none.
    """
    tokenizer = load_tokenizer(path)
    n_ids = max(tokenizer.get_vocab().values()) + 1
    return Tokenizer(_tokenizer_files(path), n_ids, end_of_text(tokenizer))


def _tokenizer_files(path: Path) -> list[Path]:
    """Returns the files of a tokenizer: `path` itself, or those known in that folder."""
    if path.is_file():
        return [path]
    return [path / name for name in _TOKENIZER_FILES if (path / name).is_file()]


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Returns a Hugging Face tokenizer from a local folder or a `tokenizer.json`; never from a hub.

    Raises:
        UsageError: there is nothing that transformers can read.
    """
    path = Path(path)
    if path.is_dir() and not any(path.glob("*token*")):
        raise UsageError(f"no tokenizer at {path}: the folder holds no tokenizer.json")
    try:
        files = _tokenizer_files(path)
        if files in ([path], [path / "tokenizer.json"]):
            return transformers.PreTrainedTokenizerFast(tokenizer_file=str(files[0]))
        return transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers raises whatever its parsers raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"no tokenizer at {path}: {reason}") from error


def end_of_text(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Returns the id that ends a text: the tokenizer's own, or GPT-2's `<|endoftext|>`."""
    end = tokenizer.eos_token_id
    return tokenizer.get_vocab().get("<|endoftext|>") if end is None else end


def initialise(
    model: HuggingFaceGPT, seed: int, held_of: Callable[[nn.Parameter], Held] = undivided
) -> None:
    """Gives a HuggingFaceGPT the reference GPT's starting weights, in place."""
    config = model.config
    parts_of_ours = {
        f"{model.model_type}.{theirs}": (name, part)
        for name in parameter_shapes(config)
        for part, theirs in enumerate(hugging_face_names(config, name))
    }

    @functools.lru_cache(maxsize=1)  # one of ours may be several of theirs, one after the other
    def parts(name: str) -> list[Tensor]:
        return to_hugging_face(config, name, init_parameter(config, name, seed))

    def value(name: str, _: nn.Parameter, start: int, n: int) -> Tensor:
        name, part = parts_of_ours[name]
        return parts(name)[part].reshape(-1)[start : start + n]

    fill(model, value, held_of)
