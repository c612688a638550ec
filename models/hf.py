"""Hugging Face: the GPT-2 model class with our starting weights, and tokenizers from a local path.

The only file that imports transformers.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch import Tensor, nn
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from models.config import LAYER_NORM_EPS, GPTConfig
from models.errors import UsageError
from models.gpt import fill, init_parameter, mean_loss

# Our parameter name inside a block -> GPT2LMHeadModel's. Its Conv1D stores [in, out].
_BLOCK_NAMES = {
    "norm1": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.out": "attn.c_proj",
    "norm2": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


class HuggingFaceGPT2(nn.Module):
    """`transformers.GPT2LMHeadModel` called like the reference model: (tokens, labels) -> loss."""

    def __init__(self, config: GPTConfig, recompute: bool = False):
        super().__init__()
        self.config = config
        self.gpt2 = GPT2LMHeadModel(
            GPT2Config(
                n_layer=config.n_layer,
                n_embd=config.hidden,
                n_head=config.n_head,
                n_inner=config.ffn_hidden,
                vocab_size=config.vocab_size,
                n_positions=config.max_seq_len,
                layer_norm_epsilon=LAYER_NORM_EPS,
                activation_function="gelu_new",
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                resid_pdrop=0.0,
                use_cache=False,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
        if recompute:
            self.gpt2.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        return mean_loss(self.gpt2(tokens_BS).logits, labels_BS)


def reference_name(name: str) -> str:
    """The reference GPT's name of the parameter that HuggingFaceGPT2 calls `name`."""
    name = name.removeprefix("gpt2.").removeprefix("transformer.")
    top = {"wte": "embedding.word", "wpe": "embedding.position", "ln_f": "norm"}
    stem, kind = name.rsplit(".", 1)
    if stem in top:
        return f"{top[stem]}.{kind}"
    _, index, inner = stem.split(".", 2)
    ours = {theirs: ours for ours, theirs in _BLOCK_NAMES.items()}[inner]
    return f"blocks.{index}.{ours}.{kind}"


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


def load_tokenizer(path: Path):
    """A Hugging Face tokenizer from a local folder or a `tokenizer.json`; never from a hub.

    Raises:
        UsageError: nothing there that transformers can read.
    """
    path = Path(path)
    try:
        if path.is_file():
            return PreTrainedTokenizerFast(tokenizer_file=str(path))
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers raises whatever its parsers raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"no tokenizer at {path}: {reason}") from error


def initialise(
    model: HuggingFaceGPT2,
    seed: int,
    whole: Callable[[nn.Parameter], AbstractContextManager] = nullcontext,
) -> None:
    """Give a HuggingFaceGPT2 the reference GPT's starting weights, in place."""

    def value(name: str, _: nn.Parameter) -> Tensor:
        ours = reference_name(name)
        return to_hugging_face(model.config, ours, init_parameter(model.config, ours, seed))

    fill(model, value, whole)
