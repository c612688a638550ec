"""GPT sizes and architecture: one frozen dataclass, the presets, the parameters and their count.

The defaults are GPT-2's: learned positions, pre-LayerNorm blocks, biases everywhere, tanh GELU,
output layer tied to the word embedding. The Llama presets have rotary positions, RMSNorm, SwiGLU,
grouped-query attention, no biases and an output layer of their own. There is no dropout, so that
any split gives the same loss.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from base.errors import UsageError

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
_OPTIONAL = ("ffn_hidden", "n_kv_head", "kv_channels")  # 0: derived from the other sizes


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
        UsageError: a size is not positive, the sizes do not fit together, or a name is not known.
    """

    n_layer: int
    hidden: int
    n_head: int
    vocab_size: int = 50257
    max_seq_len: int = 1024
    ffn_hidden: int = 0
    n_kv_head: int = 0
    kv_channels: int = 0
    position: str = "learned"
    rope_theta: float = 10000.0
    rope_scaling: float = 1.0
    norm: str = "layernorm"
    norm_eps: float = 1e-5
    qk_norm: bool = False
    activation: str = "gelu"
    tied: bool = True
    bias: bool = True

    def __post_init__(self) -> None:
        sizes = ("n_layer", "hidden", "n_head", "vocab_size", "max_seq_len", *_OPTIONAL)
        given = {name: getattr(self, name) for name in sizes}
        least = {name: name not in _OPTIONAL for name in sizes}
        wrong = {k: v for k, v in given.items() if type(v) is not int or v < least[k]}
        if wrong:
            raise UsageError(f"model sizes must be positive whole numbers, but {wrong}")
        self._check_words()
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

    def _check_words(self) -> None:
        words = {"position": POSITIONS, "norm": NORMS, "activation": ACTIVATIONS}
        for name, known in words.items():
            if (value := getattr(self, name)) not in known:
                raise UsageError(f"{name} must be one of {', '.join(known)}, not {value!r}")
        for name in ("rope_theta", "rope_scaling", "norm_eps"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise UsageError(f"{name} must be a positive number, not {value!r}")
        for name in ("qk_norm", "tied", "bias"):
            if type(value := getattr(self, name)) is not bool:
                raise UsageError(f"{name} must be true or false, not {value!r}")

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


def _gpt2(n_layer: int, hidden: int, n_head: int) -> GPTConfig:
    return GPTConfig(n_layer, hidden, n_head, vocab_size=50257, max_seq_len=1024)


def _sc21(n_layer: int, hidden: int, n_head: int) -> GPTConfig:
    return GPTConfig(n_layer, hidden, n_head, vocab_size=51200, max_seq_len=2048)


def _jean_zay(n_layer: int, hidden: int) -> GPTConfig:
    return GPTConfig(n_layer, hidden, n_head=32, vocab_size=50257, max_seq_len=1024)


def _llama(n_layer: int, hidden: int, n_head: int, **others: Any) -> GPTConfig:
    """Llama's architecture; `others` are the sizes, and what Qwen3 has of its own."""
    style = {"position": "rope", "norm": "rmsnorm", "activation": "swiglu"}
    style |= {"tied": False, "bias": False}
    return GPTConfig(n_layer, hidden, n_head, **(style | others))


def _llama2(n_layer: int, hidden: int, n_head: int, **others: int) -> GPTConfig:
    return _llama(n_layer, hidden, n_head, vocab_size=32000, max_seq_len=4096, **others)


def _llama3(n_layer: int, hidden: int, n_head: int, ffn_hidden: int) -> GPTConfig:
    sizes = {"vocab_size": 128256, "max_seq_len": 8192, "n_kv_head": 8, "ffn_hidden": ffn_hidden}
    return _llama(n_layer, hidden, n_head, rope_theta=500000.0, **sizes)


def _qwen3(n_layer: int, hidden: int, n_head: int, ffn_hidden: int, tied: bool = True) -> GPTConfig:
    sizes = {"vocab_size": 151936, "max_seq_len": 32768, "n_kv_head": 8, "ffn_hidden": ffn_hidden}
    style = {"kv_channels": 128, "qk_norm": True, "tied": tied, "norm_eps": 1e-6}
    return _llama(n_layer, hidden, n_head, rope_theta=1e6, **sizes, **style)


PRESETS: dict[str, GPTConfig] = {
    # Small ones that train on a laptop's CPU. Byte-level text has 257 ids, an odd number on
    # purpose: every tensor-parallel split then exercises vocabulary padding.
    "tiny": GPTConfig(n_layer=4, hidden=128, n_head=4, vocab_size=257, max_seq_len=128),
    "small": GPTConfig(n_layer=4, hidden=256, n_head=8, vocab_size=257, max_seq_len=256),
    "base": GPTConfig(n_layer=8, hidden=512, n_head=8, vocab_size=257, max_seq_len=512),
    "tiny-llama": _llama(4, 128, 4, n_kv_head=2, ffn_hidden=384, vocab_size=257, max_seq_len=128),
    # Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2.
    # Head counts are those of the released checkpoints.
    "gpt2-124m": _gpt2(12, 768, 12),
    "gpt2-355m": _gpt2(24, 1024, 16),
    "gpt2-774m": _gpt2(36, 1280, 20),
    "gpt2-1.5b": _gpt2(48, 1600, 25),
    # Brown et al. 2020 (arXiv 2005.14165), table 2.1; it prints d_model 5140, which 40 heads of 128
    # do not make.
    "gpt3-13b": GPTConfig(40, 5120, 40, vocab_size=50257, max_seq_len=2048),
    # Touvron et al. 2023 (arXiv 2307.09288) and the released checkpoints' config.json.
    "llama2-7b": _llama2(32, 4096, 32, ffn_hidden=11008),
    "llama2-13b": _llama2(40, 5120, 40, ffn_hidden=13824),
    "llama2-70b": _llama2(80, 8192, 64, ffn_hidden=28672, n_kv_head=8),
    # Grattafiori et al. 2024 (arXiv 2407.21783), table 3, with the 8,192 positions of pre-training.
    # The released 3.1 checkpoints stretch them to 131,072 with rope_scaling 8.
    "llama3-8b": _llama3(32, 4096, 32, ffn_hidden=14336),
    "llama3-70b": _llama3(80, 8192, 64, ffn_hidden=28672),
    "llama3-405b": _llama3(126, 16384, 128, ffn_hidden=53248),
    # Yang et al. 2025 (arXiv 2505.09388), table 1, and the released checkpoints' config.json.
    "qwen3-0.6b": _qwen3(28, 1024, 16, ffn_hidden=3072),
    "qwen3-1.7b": _qwen3(28, 2048, 16, ffn_hidden=6144),
    "qwen3-4b": _qwen3(36, 2560, 32, ffn_hidden=9728),
    "qwen3-8b": _qwen3(36, 4096, 32, ffn_hidden=12288, tied=False),
    "qwen3-14b": _qwen3(40, 5120, 40, ffn_hidden=17408, tied=False),
    "qwen3-32b": _qwen3(64, 5120, 64, ffn_hidden=25600, tied=False),
    # Narayanan et al., SC'21 (arXiv 2104.04473), table 1; 175b is table 2's.
    "1.7b": _sc21(24, 2304, 24),
    "3.6b": _sc21(30, 3072, 32),
    "7.5b": _sc21(36, 4096, 32),
    "18b": _sc21(40, 6144, 48),
    "39b": _sc21(48, 8192, 64),
    "76b": _sc21(60, 10240, 80),
    "145b": _sc21(80, 12288, 96),
    "175b": _sc21(96, 12288, 96),
    "310b": _sc21(96, 16384, 128),
    "530b": _sc21(105, 20480, 128),
    "1t": _sc21(128, 25600, 160),
    # The MSIZE family of the Jean Zay V100 study: 32 heads, sequence length 1024. The names are
    # the study's own; its "22B" and "78B" shapes really hold 26.2 and 81.1 billion parameters.
    "msize-7.5b": _jean_zay(36, 4096),
    "msize-18b": _jean_zay(40, 6144),
    "msize-22b": _jean_zay(32, 8192),
    "msize-25b": _jean_zay(40, 7168),
    "msize-30b": _jean_zay(48, 7168),
    "msize-39b": _jean_zay(48, 8192),
    "msize-52b": _jean_zay(64, 8192),
    "msize-65b": _jean_zay(64, 9216),
    "msize-78b": _jean_zay(64, 10240),
    "msize-97b": _jean_zay(64, 11264),
    "msize-116b": _jean_zay(64, 12288),
    "msize-181b": _jean_zay(64, 15360),
    "msize-206b": _jean_zay(64, 16384),
}


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


# Names of models with experts, which are neither trained nor planned: 8x7B, Qwen3-30B-A3B, ...
_EXPERTS = re.compile(r"mixtral|deepseek|grok|dbrx|moe|\d+x\d+b|a\d+b", re.IGNORECASE)


def _unknown(name: str) -> str:
    """Why there is no preset of that name, and the nearest one."""
    if _EXPERTS.search(name):
        return f"no preset {name!r}: models with experts are neither trained nor planned here"
    from difflib import get_close_matches  # here: seldom needed

    close = get_close_matches(name.lower(), PRESETS, 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"unknown preset {name!r}; known: {', '.join(PRESETS)}{hint}"


def preset(name: str, **sizes: Any) -> GPTConfig:
    """The preset called `name`, with every size that is given and not None put in its place.

    With another hidden size or activation the feed-forward is derived anew, with another hidden
    size the head size, too, unless they are given; with another number of heads, all of them have
    keys and values of their own.

    Raises:
        UsageError: no such preset, or the sizes do not fit together.
    """
    if name not in PRESETS:
        raise UsageError(_unknown(name))
    base = PRESETS[name]
    given = {k: v for k, v in sizes.items() if v is not None}
    other = {k for k, v in given.items() if v != getattr(base, k)}
    follow = {"hidden": ("ffn_hidden", "kv_channels"), "activation": ("ffn_hidden",)}
    follow |= {"n_head": ("n_kv_head",)}
    derived = {size: 0 for of in other & follow.keys() for size in follow[of]}
    return replace(base, **derived | given)


def name_of(config: GPTConfig, stated: str) -> str | None:
    """The preset whose blocks these are: `stated`, where it may be called so, or another; or None.

    Vocabulary and positions do not make another model, blocks do.
    """

    def blocks(of: GPTConfig) -> GPTConfig:
        return replace(of, vocab_size=1, max_seq_len=1)

    if stated in PRESETS and blocks(PRESETS[stated]) == blocks(config):
        return stated
    return next((name for name, of in PRESETS.items() if of == config), None)
