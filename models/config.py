"""GPT sizes and architecture: one frozen dataclass, its presets (presets.toml), its parameters.

The defaults are GPT-2's: learned positions, pre-LayerNorm blocks, biases everywhere, tanh GELU,
output layer tied to the word embedding. The Llama presets have rotary positions, RMSNorm, SwiGLU,
grouped-query attention, no biases and an output layer of their own. There is no dropout, so that
any split gives the same loss.
"""

import math
import re
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from base.bounds import Bounds, checked, key
from base.errors import UsageError
from base.files import read_toml

INIT_STD = 0.02  # Radford et al. 2019; residual projections are scaled by 1/sqrt(2 n_layer)
VOCAB_MULTIPLE = 128  # Megatron-LM's --make-vocab-size-divisible-by: GEMMs like such sides
POSITIONS = ("learned", "rope")
NORMS = ("layernorm", "rmsnorm")
ACTIVATIONS = ("gelu", "swiglu")
# What the rope_scaling of every Llama 3.1 and 3.2 checkpoint has beside its factor.
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_SIZE, _DERIVED = Bounds(1, 2**53), Bounds(0, 2**53)  # 0: derived from the other sizes
_ABOVE_0 = Bounds(0, math.inf, above=True, below=True)


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and architecture of a GPT.

    ffn_hidden: 0 means 4 * hidden; with swiglu 8/3 * hidden, rounded up to a multiple of 256
        (Touvron et al. 2023, arXiv 2302.13971).
    n_kv_head: heads of keys and values (Ainslie et al. 2023, arXiv 2305.13245); 0 means n_head.
    kv_channels: size of a head; 0 means hidden / n_head.
    position: "learned", or "rope" (Su et al. 2021, arXiv 2104.09864).
    rope_scaling: Llama 3.1's stretching factor of the rotary wavelengths; 1 stretches nothing.
    qk_norm: the norm of each head's query and key, as Qwen3 has it.
    activation: "gelu" (tanh), or "swiglu" (Shazeer 2020, arXiv 2002.05202).
    tied: the output layer is the word embedding.
    bias: linear layers have biases.

    Raises:
        UsageError: a size is out of its bounds, sizes do not fit together, or a name is not known.
    """

    n_layer: int = key(MISSING, allowed=_SIZE)
    hidden: int = key(MISSING, allowed=_SIZE)
    n_head: int = key(MISSING, allowed=_SIZE)
    vocab_size: int = key(50257, allowed=_SIZE)
    max_seq_len: int = key(1024, allowed=_SIZE)
    ffn_hidden: int = key(0, allowed=_DERIVED)
    n_kv_head: int = key(0, allowed=_DERIVED)
    kv_channels: int = key(0, allowed=_DERIVED)
    position: str = key("learned", allowed=POSITIONS)
    rope_theta: float = key(10000.0, allowed=_ABOVE_0)
    rope_scaling: float = key(1.0, allowed=_ABOVE_0)
    norm: str = key("layernorm", allowed=NORMS)
    norm_eps: float = key(1e-5, allowed=_ABOVE_0)
    qk_norm: bool = key(False)
    activation: str = key("gelu", allowed=ACTIVATIONS)
    tied: bool = key(True)
    bias: bool = key(True)

    def __post_init__(self) -> None:
        for size in fields(self):
            value = checked(size, getattr(self, size.name), size.name)
            object.__setattr__(self, size.name, value)
        if not self.kv_channels and self.hidden % self.n_head:
            raise UsageError(f"hidden {self.hidden} is not a multiple of n_head {self.n_head}")
        if self.n_head % self.kv_heads:
            raise UsageError(
                f"n_head {self.n_head} is not a multiple of n_kv_head {self.n_kv_head}"
            )
        if self.position == "rope" and self.head_dim % 2:
            raise UsageError(f"rotary positions need an even head size, not {self.head_dim}")
        # What equals the derived size is stored as derived, so that equal models compare equal.
        if self.n_kv_head == self.n_head:
            object.__setattr__(self, "n_kv_head", 0)
        if self.kv_channels * self.n_head == self.hidden:
            object.__setattr__(self, "kv_channels", 0)
        if self.ffn_hidden == 0:
            gated = -(-8 * self.hidden // (3 * 256)) * 256
            object.__setattr__(self, "ffn_hidden", gated if self.gated else 4 * self.hidden)

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden // self.n_head

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a gate: three matrices, not two."""
        return self.activation == "swiglu"

    @property
    def n_params(self) -> int:
        """Trained parameters, a tied embedding counted once, no padding.

        For GPT-2's architecture this is L(12h^2 + 13h) + Vh + Sh + 2h, the formula of Megatron-LM
        and of the Jean Zay study.
        """
        outside, block = _outer_shapes(self), _block_shapes(self)
        return _elements(outside) + self.n_layer * _elements(block)

    @property
    def n_parameters(self) -> int:
        """How many tensors `n_params` counts: `parameter_shapes` has a name for each."""
        return len(_outer_shapes(self)) + self.n_layer * len(_block_shapes(self))

    def padded_vocab(self, tp: int, multiple: int = VOCAB_MULTIPLE) -> int:
        """Rows of the embedding table that is cut over `tp` ranks: the next multiple of
        `multiple` x tp. `tp` may be a numpy array.

        The added rows start at zero, their logits are masked, so they never change the loss.
        """
        return -(-self.vocab_size // (multiple * tp)) * multiple * tp


def _elements(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes.values()))


# What Llama's architecture has otherwise than GPT-2's.
_LLAMA: dict[str, Any] = {"position": "rope", "norm": "rmsnorm", "activation": "swiglu"}
_LLAMA |= {"tied": False, "bias": False}


def _read_presets() -> dict[str, GPTConfig]:
    families = read_toml(Path(__file__).with_name("presets.toml"), "presets")
    return {
        name: GPTConfig(**(_LLAMA if "like" in family else {}) | family["shared"] | sizes)
        for family in families.values()
        for name, sizes in family["models"].items()
    }


PRESETS = _read_presets()


def _outer_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """The parameters outside the blocks: name -> shape, in the order of the model."""
    h, V = config.hidden, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"embedding.word.weight": (V, h)}
    if config.position == "learned":
        shapes["embedding.position.weight"] = (config.max_seq_len, h)
    shapes["norm.weight"] = (h,)
    if config.norm == "layernorm":
        shapes["norm.bias"] = (h,)
    return shapes if config.tied else shapes | {"output.weight": (V, h)}


def _block_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """The parameters of one block: name in it -> shape, in the order of the model."""
    h, f, d = config.hidden, config.ffn_hidden, config.head_dim
    norm = ("weight", "bias") if config.norm == "layernorm" else ("weight",)
    linear = ("weight", "bias") if config.bias else ("weight",)
    modules: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
        "norm1": ((h,), norm),
        "attn.qkv": (((config.n_head + 2 * config.kv_heads) * d, h), linear),
        "attn.q_norm": ((d,), norm),
        "attn.k_norm": ((d,), norm),
        "attn.out": ((h, config.n_head * d), linear),
        "norm2": ((h,), norm),
        "mlp.gate": ((f, h), linear),
        "mlp.up": ((f, h), linear),
        "mlp.down": ((h, f), linear),
    }
    if not config.qk_norm:
        del modules["attn.q_norm"], modules["attn.k_norm"]
    if not config.gated:
        del modules["mlp.gate"]
    return {
        f"{name}.{kind}": shape if kind == "weight" else shape[:1]
        for name, (shape, kinds) in modules.items()
        for kind in kinds
    }


def parameter_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's name and whole shape, in the order of the model.

    `attn.qkv.weight` is laid out as megatron-core lays it out: group by group, and in a group the
    queries of its heads, then its key, then its value, D rows each. So a tensor-parallel rank owns
    consecutive rows. Without grouped-query attention each head is a group.
    """
    outside = _outer_shapes(config)
    before = {name: shape for name, shape in outside.items() if name.startswith("embedding.")}
    blocks = {
        f"blocks.{i}.{name}": shape
        for i in range(config.n_layer)
        for name, shape in _block_shapes(config).items()
    }
    return before | blocks | outside


# Names of models with experts: mixtral, 8x7b, qwen3-30b-a3b, ...
_EXPERTS = re.compile(r"mixtral|deepseek|grok|dbrx|moe|\d+x\d+b|-a\d+b", re.IGNORECASE)


def preset(name: str, **sizes: Any) -> GPTConfig:
    """The preset called `name`, with every size that is given and not None put in its place.

    With another hidden size or activation the feed-forward is derived anew, with another hidden
    size the head size, too, unless they are given; with another number of heads, all of them have
    keys and values of their own.

    Raises:
        UsageError: no such preset, or the sizes do not fit together.
    """
    if name not in PRESETS:
        if _EXPERTS.search(name):
            words = "models with experts are neither trained nor planned here"
            raise UsageError(f"no preset {name!r}: {words}")
        from difflib import get_close_matches  # here: seldom needed

        close = get_close_matches(name.lower(), PRESETS, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UsageError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}{hint}")
    base = PRESETS[name]
    stated = {k: v for k, v in sizes.items() if v is not None}
    other = {k for k, v in stated.items() if v != getattr(base, k)}
    follow = {"hidden": ("ffn_hidden", "kv_channels"), "activation": ("ffn_hidden",)}
    follow |= {"n_head": ("n_kv_head",)}
    derived = {size: 0 for of in other & follow.keys() for size in follow[of]}
    return replace(base, **derived | stated)


def name_of(config: GPTConfig, stated: str) -> str | None:
    """The preset whose blocks these are: `stated`, where it may be called so, or another; or None.

    Vocabulary and positions do not make another model, blocks do.
    """
    sizes = {"vocab_size": config.vocab_size, "max_seq_len": config.max_seq_len}
    if stated in PRESETS and replace(PRESETS[stated], **sizes) == config:
        return stated
    return next((name for name, of in PRESETS.items() if of == config), None)
