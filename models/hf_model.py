"""Hugging Face's GPT-2 class with our weights, and its tokenizers: the only file that imports
transformers.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from models.config import GPTConfig
from models.errors import UsageError
from models.gpt import fill, init_parameter, mean_loss, positions
from models.hf_files import hugging_face_config, reference_name, to_hugging_face
from models.run_weights import tokenizer_files


class HuggingFaceGPT2(nn.Module):
    """`transformers.GPT2LMHeadModel` called like the reference model: (tokens, labels) -> loss."""

    def __init__(self, config: GPTConfig, recompute: bool = False, end_of_text: int | None = None):
        super().__init__()
        self.config, self.end_of_text = config, end_of_text
        self.gpt2 = GPT2LMHeadModel(GPT2Config(**hugging_face_config(config), use_cache=False))
        if recompute:
            self.gpt2.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        position, mask = positions(tokens_BS, self.end_of_text)
        # Given positions alone, transformers looks for packed sequences in them.
        position_BS = None if mask is None else position
        output = self.gpt2(tokens_BS, position_ids=position_BS, attention_mask=mask)
        return mean_loss(output.logits, labels_BS)


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """A Hugging Face tokenizer from a local folder or a `tokenizer.json`; never from a hub.

    Raises:
        UsageError: nothing there that transformers can read.
    """
    path = Path(path)
    try:
        if not path.is_file() and tokenizer_files(path) == [path / "tokenizer.json"]:
            path = path / "tokenizer.json"
        if path.is_file():
            return PreTrainedTokenizerFast(tokenizer_file=str(path))
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers raises whatever its parsers raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"no tokenizer at {path}: {reason}") from error


def end_of_text(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id that ends a text: the tokenizer's own, or GPT-2's `<|endoftext|>`."""
    end = tokenizer.eos_token_id
    return tokenizer.get_vocab().get("<|endoftext|>") if end is None else end


def initialise(
    model: HuggingFaceGPT2,
    seed: int,
    gathered: Callable[[nn.Parameter], AbstractContextManager] = nullcontext,
) -> None:
    """Give a HuggingFaceGPT2 the reference GPT's starting weights, in place."""

    def value(name: str, _: nn.Parameter) -> Tensor:
        ours = reference_name(name)
        return to_hugging_face(model.config, ours, init_parameter(model.config, ours, seed))

    fill(model, value, gathered)
