"""Sample text from a GPT on one device."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from base.errors import UsageError
from models import gpt
from models.config import GPTConfig


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back. end: the end-of-text id, None where there is none."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    end: int | None


def load_tokenizer(name: str) -> Tokenizer:
    """`byte` (parallel.data's: an id per byte, 256 ends a document), or one at a path.

    Raises:
        UsageError: nothing there that transformers can read.
    """
    if name == "byte":

        def decode(ids: list[int]) -> str:
            return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

        return Tokenizer(lambda text: list(text.encode("utf-8", "replace")), decode, 256)
    from models import hf_model

    tokenizer = hf_model.load_tokenizer(Path(name))
    return Tokenizer(
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        tokenizer.decode,
        hf_model.end_of_text(tokenizer),
    )


def load_gpt(config: GPTConfig, tensor: Callable[[str], Tensor]) -> gpt.GPT:
    """The GPT whose parameters tensor(name) gives, in fp32, on the GPU where torch sees one."""
    model = gpt.GPT(config).eval()
    gpt.fill(model, lambda name, _: tensor(name))
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


@torch.no_grad()
def sample(
    model: gpt.GPT, prompt: list[int], n: int, temperature: float, seed: int, end: int | None = None
) -> list[int]:
    """Up to `n` ids that follow the ids of the prompt, fewer where `end` is drawn.

    Each is drawn from softmax(logits / temperature); 0 takes the most likely. What lies further
    back than the model's positions is not seen.

    Raises:
        UsageError: the prompt is empty, or has an id that the model has no row for.
    """
    config, device = model.config, next(model.parameters()).device
    if not prompt:
        raise UsageError("the prompt has no token: give at least one character")
    if max(prompt) >= config.vocab_size:
        raise UsageError(
            f"the prompt has token id {max(prompt)}, but the model has {config.vocab_size} ids:"
            " it was trained with another tokenizer"
        )
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(n):
        context_BS = torch.tensor([tokens[-config.max_seq_len :]], device=device)
        logits_V = model.logits(context_BS)[0, -1].float().cpu()
        if temperature == 0:
            drawn = logits_V.argmax()
        else:
            probabilities_V = torch.softmax(logits_V / temperature, dim=0)
            drawn = torch.multinomial(probabilities_V, 1, generator=generator)
        if int(drawn) == end:
            break
        tokens.append(int(drawn))
    return tokens[len(prompt) :]
