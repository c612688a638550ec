"""GPT sizes: one frozen dataclass, the presets, and the parameter count.

The architecture is GPT-2's: learned positions, pre-LayerNorm blocks, biases everywhere, tanh GELU,
output projection tied to the word embedding, no dropout (so that any split gives the same loss).
"""

from dataclasses import asdict, dataclass, replace

from models.errors import UsageError

INIT_STD = 0.02  # Radford et al. 2019; residual projections are scaled by 1/sqrt(2 n_layer)
LAYER_NORM_EPS = 1e-5


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT. `hidden` must be a multiple of `n_head`; `ffn_hidden` 0 means 4 * hidden.

    Raises:
        UsageError: a size is not positive, or the heads do not divide the hidden size.
    """

    n_layer: int
    hidden: int
    n_head: int
    vocab_size: int = 50257
    max_seq_len: int = 1024
    ffn_hidden: int = 0

    def __post_init__(self) -> None:
        if self.ffn_hidden == 0:
            object.__setattr__(self, "ffn_hidden", 4 * self.hidden)
        wrong = {k: v for k, v in asdict(self).items() if not isinstance(v, int) or v <= 0}
        if wrong:
            raise UsageError(f"model sizes must be positive whole numbers, but {wrong}")
        if self.hidden % self.n_head:
            raise UsageError(f"hidden {self.hidden} is not a multiple of n_head {self.n_head}")

    @property
    def head_dim(self) -> int:
        return self.hidden // self.n_head

    @property
    def n_params(self) -> int:
        """Trained parameters, the tied embedding counted once, no padding.

        L(4h^2 + 2hf + 9h + f) + (V + S + 2)h, which for f = 4h is L(12h^2 + 13h) + Vh + Sh + 2h,
        the formula of Megatron-LM and of the Jean Zay study.
        """
        h, f = self.hidden, self.ffn_hidden
        block = 4 * h * h + 2 * h * f + 9 * h + f
        return self.n_layer * block + (self.vocab_size + self.max_seq_len + 2) * h

    @property
    def n_parameters(self) -> int:
        """How many tensors `n_params` counts: `parameter_shapes` has a name for each."""
        return 12 * self.n_layer + 4

    def padded_vocab(self, tp: int) -> int:
        """Rows of the embedding table when it is cut over `tp` ranks: the next multiple of tp.

        The added rows start at zero, their logits are masked, so they never change the loss.
        """
        return -(-self.vocab_size // tp) * tp


def _gpt2(n_layer: int, hidden: int, n_head: int) -> GPTConfig:
    return GPTConfig(n_layer, hidden, n_head, vocab_size=50257, max_seq_len=1024)


def _sc21(n_layer: int, hidden: int, n_head: int) -> GPTConfig:
    return GPTConfig(n_layer, hidden, n_head, vocab_size=51200, max_seq_len=2048)


def _jean_zay(n_layer: int, hidden: int) -> GPTConfig:
    return GPTConfig(n_layer, hidden, n_head=32, vocab_size=50257, max_seq_len=1024)


PRESETS: dict[str, GPTConfig] = {
    # Small ones that train on a laptop's CPU. Byte-level text has 257 ids, an odd number on
    # purpose: every tensor-parallel split then exercises vocabulary padding.
    "tiny": GPTConfig(n_layer=4, hidden=128, n_head=4, vocab_size=257, max_seq_len=128),
    "small": GPTConfig(n_layer=4, hidden=256, n_head=8, vocab_size=257, max_seq_len=256),
    "base": GPTConfig(n_layer=8, hidden=512, n_head=8, vocab_size=257, max_seq_len=512),
    # Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2.
    # Head counts are those of the released checkpoints.
    "gpt2-124m": _gpt2(12, 768, 12),
    "gpt2-355m": _gpt2(24, 1024, 16),
    "gpt2-774m": _gpt2(36, 1280, 20),
    "gpt2-1.5b": _gpt2(48, 1600, 25),
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


def parameter_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's name and whole shape, in the order of the model.

    `attn.qkv.weight` is laid out head by head, [N, (q, k, v), D, H] flattened to [3H, H], as
    megatron-core lays it out: a tensor-parallel rank then owns consecutive rows.
    """
    h, f = config.hidden, config.ffn_hidden
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word.weight": (config.vocab_size, h),
        "embedding.position.weight": (config.max_seq_len, h),
    }
    weights = {
        "norm1": (h,),
        "attn.qkv": (3 * h, h),
        "attn.out": (h, h),
        "norm2": (h,),
        "mlp.up": (f, h),
        "mlp.down": (h, f),
    }
    for i in range(config.n_layer):
        for name, shape in weights.items():
            shapes[f"blocks.{i}.{name}.weight"] = shape
            shapes[f"blocks.{i}.{name}.bias"] = shape[:1]
    return shapes | {"norm.weight": (h,), "norm.bias": (h,)}


def preset(name: str, **sizes: int | None) -> GPTConfig:
    """The preset called `name`, with every size that is given and not None put in its place.

    Raises:
        UsageError: no such preset, or the sizes do not fit together.
    """
    if name not in PRESETS:
        raise UsageError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    given = {k: v for k, v in sizes.items() if v is not None}
    if "hidden" in given and "ffn_hidden" not in given:
        given["ffn_hidden"] = 0
    return replace(PRESETS[name], **given)


def name_of(config: GPTConfig, stated: str) -> str | None:
    """The preset whose blocks these are: `stated`, where it may be called so, or another; or None.

    Vocabulary and positions do not make another model, blocks do.
    """

    def blocks(of: GPTConfig) -> tuple[int, ...]:
        return of.n_layer, of.hidden, of.n_head, of.ffn_hidden

    if stated in PRESETS and blocks(PRESETS[stated]) == blocks(config):
        return stated
    return next((name for name, of in PRESETS.items() if of == config), None)
