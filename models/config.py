"""GPT sizes and architecture: a frozen dataclass, its presets (presets.toml), its parameters.

The defaults are GPT-2's: learned positions, pre-LayerNorm blocks, biases everywhere, tanh GELU,
output layer tied to the word embedding. The Llama presets have rotary positions, RMSNorm, SwiGLU,
grouped-query attention, no biases and an output layer of their own. There is no dropout, so that
any split gives the same loss. Presets alone have what PARTS names (experts, latent attention, ...),
under the names of Megatron-LM's flags; each engine says which of it it trains.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from base.bounds import Bounds, checked, key
from base.errors import UsageError
from base.files import read_toml

INIT_STD = 0.02  # Radford et al. 2019; residual projections are scaled by 1/sqrt(2 n_layer)
VOCAB_MULTIPLE = 128  # Megatron-LM's --make-vocab-size-divisible-by: GEMMs like such sides
POSITIONS = ("learned", "rope")
NORMS = ("layernorm", "rmsnorm")
ACTIVATIONS = ("gelu", "swiglu")
# What a model can have beyond a dense GPT: GPTConfig's name -> words.
PARTS = {
    "experts": "experts",
    "mla": "multi-head latent attention",
    "mtp_num_layers": "multi-token prediction",
    "window": "sliding windows",
    "softmax_type": "attention sinks",
}


def in_words(parts: Iterable[str]) -> str:
    """Returns parts (keys of PARTS) in words, as "experts and sliding windows"."""
    return " and ".join(PARTS[part] for part in parts)


# What the rope_scaling of every Llama 3.1 and 3.2 checkpoint has beside its factor.
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
Shapes = dict[str, tuple[int, ...]]  # of parameters, by name
# Far beyond any model: a number outside is refused before it can overflow, hang or fill the memory.
LAYERS, WIDTH, SIZE = Bounds(1, 10**4), Bounds(1, 2**20), Bounds(1, 2**24)
COUNT = Bounds(1, 2**16)  # of heads, of experts, of numbers in a head
MAYBE_COUNT, FFN = Bounds(0, 2**16), Bounds(0, 2**22)  # 0: derived from the other sizes, or none
_ABOVE_0 = Bounds(0, math.inf, above=True, below=True)


@dataclass(frozen=True)
class Experts:
    """The feed-forwards of which a router chooses some for each token (Shazeer et al. 2017, arXiv
    1701.06538), under Megatron-LM's names.

    moe_ffn_hidden_size: of one expert; 0 means the model's ffn_hidden.
    moe_shared_expert_intermediate_size: of all shared experts together, which every token passes.
    first_dense: layers at the start without experts (DeepSeek's first_k_dense_replace).
    moe_layer_freq: from there on, every so many-th layer has experts.
    moe_router_score_function: "softmax", or DeepSeek-V3's "sigmoid".
    norm_topk_prob: the chosen scores are divided by their sum; with a softmax router, not to do so
        is Megatron-LM's moe_router_pre_softmax.
    moe_router_topk_scaling_factor: and then multiplied by this.
    moe_router_enable_expert_bias: a bias of each expert, added to its score for the choice alone,
        balances the load (Wang et al. 2024, arXiv 2408.15664). No gradient trains it: each step
        adds 1e-3 to it where the expert had fewer tokens than the mean, or takes it away.
    moe_router_num_groups, moe_router_group_topk: the choice is among the experts of the best groups
        (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1.3), by the sum of a group's topk /
        group_topk best scores, as in DeepSeek-V3 (arXiv 2412.19437, section 2.1.2); 0: among all.
    moe_aux_loss_coeff: weight of the loss that balances the load (Fedus et al. 2021, arXiv
        2101.03961, equation 4).
    moe_expert_capacity_factor: tokens that an expert takes, over its even share of a micro-batch of
        one data-parallel rank; it drops those with the smallest weights. 0 drops none.
    """

    num_experts: int = key(MISSING, allowed=COUNT)
    moe_router_topk: int = key(MISSING, allowed=COUNT)
    moe_ffn_hidden_size: int = key(0, allowed=FFN)
    moe_shared_expert_intermediate_size: int = key(0, allowed=FFN)
    first_dense: int = key(0, allowed=MAYBE_COUNT)
    moe_layer_freq: int = key(1, allowed=COUNT)
    moe_router_score_function: str = key("softmax", allowed=("softmax", "sigmoid"))
    norm_topk_prob: bool = key(True)
    moe_router_topk_scaling_factor: float = key(1.0, allowed=_ABOVE_0)
    moe_router_enable_expert_bias: bool = key(False)
    moe_router_num_groups: int = key(0, allowed=MAYBE_COUNT)
    moe_router_group_topk: int = key(0, allowed=MAYBE_COUNT)
    moe_aux_loss_coeff: float = key(0.0, allowed=Bounds(0, math.inf, below=True))
    moe_expert_capacity_factor: float = key(0.0, allowed=Bounds(0, math.inf, below=True))

    def __post_init__(self) -> None:
        """Checks that so many experts, and so many groups of them, can be chosen."""
        topk, experts, groups = self.moe_router_topk, self.num_experts, self.moe_router_num_groups
        best = self.moe_router_group_topk
        if topk > experts:
            raise UsageError(f"moe_router_topk {topk} exceeds num_experts {experts}")
        fits = groups and best and not experts % groups and best <= min(groups, topk)
        if groups and not fits or best and not groups or best * experts < topk * groups:
            raise UsageError(
                f"moe_router_group_topk {best} of moe_router_num_groups {groups} cannot be chosen"
                f" from num_experts {experts}"
            )


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1), under
    Megatron-LM's names: keys and values come out of one latent of kv_lora_rank numbers a token.

    q_lora_rank: of the queries' latent; 0: they come straight from the token.
    qk_head_dim, qk_pos_emb_head_dim: of a query and a key without positions, and with rotary ones.
    v_head_dim: of a value.
    """

    kv_lora_rank: int = key(MISSING, allowed=WIDTH)
    q_lora_rank: int = key(0, allowed=FFN)
    qk_head_dim: int = key(128, allowed=COUNT)
    qk_pos_emb_head_dim: int = key(64, allowed=COUNT)
    v_head_dim: int = key(128, allowed=COUNT)


@dataclass(frozen=True)
class SlidingWindow:
    """Attention to the last window_size tokens alone, itself among them, under Megatron-LM's names.
    Of window_attn_skip_freq layers the last attends to all; 0: none does."""

    window_size: int = key(MISSING, allowed=SIZE)
    window_attn_skip_freq: int = key(0, allowed=MAYBE_COUNT)


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
    experts, mla, window: instead of a feed-forward, of heads with keys and values of their own, and
        of attention to all tokens before.
    mtp_num_layers: blocks that predict one more token each (DeepSeek-AI 2024, arXiv 2412.19437,
        section 2.2).
    softmax_type: "learnable" has a sink for each head: a logit more in the softmax (gpt-oss).

    Raises:
        UsageError: a size is out of its bounds, sizes do not fit together, or a name is not known.
    """

    n_layer: int = key(MISSING, "transformer blocks", LAYERS)
    hidden: int = key(MISSING, "hidden size", WIDTH)
    n_head: int = key(MISSING, "attention heads", COUNT)
    n_kv_head: int = key(0, "heads of keys and values; 0: n_head", MAYBE_COUNT)
    kv_channels: int = key(0, "size of a head; 0: hidden / n_head", MAYBE_COUNT)
    ffn_hidden: int = key(0, "feed-forward size; 0: 4 x hidden, with swiglu 8/3 x hidden", FFN)
    vocab_size: int = key(50257, "token ids; default: the preset's, or the data's", SIZE)
    max_seq_len: int = key(1024, "positions: the longest sequence", SIZE)
    position: str = key("learned", "how positions enter the model", POSITIONS)
    rope_theta: float = key(10000.0, "base of the rotary wavelengths", Bounds(1, 10**12))
    rope_scaling: float = key(1.0, "Llama 3.1's stretching of them", Bounds(1, 10**4))
    norm: str = key("layernorm", "the norm before each part of a block", NORMS)
    norm_eps: float = key(1e-5, "its epsilon", Bounds(0, 1, above=True))
    qk_norm: bool = key(False, "norm each head's query and key, as in Qwen3")
    activation: str = key("gelu", "of the feed-forward; swiglu has a gate", ACTIVATIONS)
    tied: bool = key(True, "the output layer is the word embedding")
    bias: bool = key(True, "linear layers have biases")
    experts: Experts | None = key(
        None, 'JSON: {"num_experts": 8, "moe_router_topk": 2}, names as in models.config.Experts'
    )
    mla: LatentAttention | None = key(None)
    mtp_num_layers: int = key(0, allowed=Bounds(0, 2**10))
    window: SlidingWindow | None = key(None)
    softmax_type: str = key("vanilla", allowed=("vanilla", "learnable"))

    def __post_init__(self) -> None:
        """Checks the sizes, and stores each in one form: equal models compare equal."""
        for size in fields(self):
            value = checked(size, getattr(self, size.name), size.name)
            object.__setattr__(self, size.name, value)
        if self.experts and not self.expert_layers:
            first = f"first_dense {self.experts.first_dense}"
            raise UsageError(f"{first} leaves no experts in n_layer {self.n_layer}")
        if not self.kv_channels and self.hidden % self.n_head:
            raise UsageError(f"hidden {self.hidden} is not a multiple of n_head {self.n_head}")
        if self.n_head % self.kv_heads:
            raise UsageError(
                f"n_head {self.n_head} is not a multiple of n_kv_head {self.n_kv_head}"
            )
        if self.position == "rope" and self.rotary_dim % 2:
            raise UsageError(f"rotary positions need an even head size, not {self.rotary_dim}")
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
        """Returns the number of heads of keys and values."""
        return self.n_kv_head or self.n_head

    @property
    def head_dim(self) -> int:
        """Returns the size of a query and of a key."""
        if self.mla:
            return self.mla.qk_head_dim + self.mla.qk_pos_emb_head_dim
        return self.kv_channels or self.hidden // self.n_head

    @property
    def rotary_dim(self) -> int:
        """Returns how many numbers of a query and of a key their position rotates."""
        return self.mla.qk_pos_emb_head_dim if self.mla else self.head_dim

    @property
    def gated(self) -> bool:
        """Returns whether the feed-forward has a gate: three matrices, not two."""
        return self.activation == "swiglu"

    @property
    def n_params(self) -> int:
        """Returns the number of trained parameters: a tied embedding counts once, padding does not.

        For GPT-2's architecture this is L(12h^2 + 13h) + Vh + Sh + 2h, the formula of Megatron-LM
        and of the Jean Zay study.
        """
        moe_blocks = self.expert_layers
        blocks = (moe_blocks, True), (self.n_blocks - moe_blocks, False)
        counts = (n * _elements(_block_shapes(self, experts)) for n, experts in blocks if n)
        return _elements(_outer_shapes(self)) + sum(counts)

    @property
    def n_active(self) -> int:
        """Returns how many parameters a token meets: of the experts, those that are chosen."""
        if not (experts := self.experts):
            return self.n_params
        unused = experts.num_experts - experts.moe_router_topk
        size = _elements({k: v for k, v in _block_shapes(self, True).items() if ".experts.0." in k})
        return self.n_params - self.expert_layers * unused * size

    def has_experts(self, layer: int) -> bool:
        """Returns whether a layer, counted from 0, has experts."""
        experts = self.experts
        if experts is None or layer < experts.first_dense:
            return False
        return (layer - experts.first_dense) % experts.moe_layer_freq == 0

    @property
    def blocks(self) -> dict[str, bool]:
        """Returns the name of each block -> whether it has experts. Those of multi-token prediction
        are last, and are as the last layer is."""
        layers = {f"blocks.{i}": self.has_experts(i) for i in range(self.n_layer)}
        last = self.has_experts(self.n_layer - 1)
        return layers | {f"mtp.{i}.block": last for i in range(self.mtp_num_layers)}

    @property
    def n_blocks(self) -> int:
        """Returns the number of blocks, those of multi-token prediction among them."""
        return self.n_layer + self.mtp_num_layers

    @property
    def expert_layers(self) -> int:
        """Returns how many of the blocks have experts."""
        if not (experts := self.experts):
            return 0
        layers = -(-max(0, self.n_layer - experts.first_dense) // experts.moe_layer_freq)
        return layers + self.mtp_num_layers * self.has_experts(self.n_layer - 1)

    @property
    def parts(self) -> list[str]:
        """Returns the names of those PARTS that the model has."""
        default = GPTConfig.__dataclass_fields__
        return [name for name in PARTS if getattr(self, name) != default[name].default]

    def as_dict(self) -> dict[str, Any]:
        """Returns the sizes as plain data, without those of PARTS that the model does not have."""
        parts = self.parts
        return {k: v for k, v in asdict(self).items() if k in parts or k not in PARTS}

    def padded_vocab(self, tp: int, multiple: int = VOCAB_MULTIPLE) -> int:
        """Returns the rows of the embedding table that is cut over `tp` ranks: the next multiple of
        `multiple` x tp. `tp` may be a numpy array.

        The added rows start at zero, their logits are masked, so they never change the loss.
        """
        return -(-self.vocab_size // (multiple * tp)) * multiple * tp


def _elements(shapes: Shapes) -> int:
    """Returns how many numbers parameters of these shapes have together."""
    return sum(map(math.prod, shapes.values()))


# What a run may set otherwise than its preset has it.
OVERRIDES = tuple(f.name for f in fields(GPTConfig) if f.name == "experts" or f.name not in PARTS)


# What Llama's architecture has otherwise than GPT-2's.
_LLAMA: dict[str, Any] = {"position": "rope", "norm": "rmsnorm", "activation": "swiglu"}
_LLAMA |= {"tied": False, "bias": False}


def _read_presets() -> dict[str, GPTConfig]:
    """Returns the models of presets.toml by name; each has its family's shared sizes."""
    families = read_toml(Path(__file__).with_name("presets.toml"), "presets")
    return {
        name: GPTConfig(**(_LLAMA if "like" in family else {}) | family["shared"] | sizes)
        for family in families.values()
        for name, sizes in family["models"].items()
    }


PRESETS = _read_presets()


def _outer_shapes(config: GPTConfig) -> Shapes:
    """Returns the parameters outside the blocks: name -> shape, in the order of the model. A
    prediction of one more token reads its embedding and the hidden state before, and shares the
    output layer."""
    h, V = config.hidden, config.vocab_size
    shapes: Shapes = {"embedding.word.weight": (V, h)}
    if config.position == "learned":
        shapes["embedding.position.weight"] = (config.max_seq_len, h)
    shapes["norm.weight"] = (h,)
    if config.norm == "layernorm":
        shapes["norm.bias"] = (h,)
    if not config.tied:
        shapes["output.weight"] = (V, h)
    norm = ("weight", "bias") if config.norm == "layernorm" else ("weight",)
    for i in range(config.mtp_num_layers):
        norms = ("embedding_norm", "hidden_norm", "norm")
        shapes |= {f"mtp.{i}.{name}.{kind}": (h,) for name in norms for kind in norm}
        shapes[f"mtp.{i}.projection.weight"] = (h, 2 * h)
    return shapes


class _Module(NamedTuple):
    """A module of a block: its weight's shape, and the names of its tensors. All but the weight
    have the shape of its first side."""

    shape: tuple[int, ...]
    tensors: tuple[str, ...]


def _block_shapes(config: GPTConfig, experts: bool) -> Shapes:
    """Returns the parameters of one block, with experts or with a feed-forward: name in it ->
    shape, in the order of the model."""
    hidden, head_dim = config.hidden, config.head_dim
    norm = ("weight", "bias") if config.norm == "layernorm" else ("weight",)
    linear = ("weight", "bias") if config.bias else ("weight",)
    modules = {"norm1": _Module((hidden,), norm)}
    if config.mla:
        modules |= _latent_modules(config, config.mla, norm, linear)
    else:
        rows = (config.n_head + 2 * config.kv_heads) * head_dim
        modules["attn.qkv"] = _Module((rows, hidden), linear)
        if config.qk_norm:
            modules |= {f"attn.{kind}_norm": _Module((head_dim,), norm) for kind in "qk"}
        modules["attn.out"] = _Module((hidden, config.n_head * head_dim), linear)
    if config.softmax_type == "learnable":
        modules["attn.sinks"] = _Module((config.n_head,), ("weight",))
    modules["norm2"] = _Module((hidden,), norm)
    widths = {"mlp": config.ffn_hidden}
    if experts and (sizes := config.experts):
        modules["mlp.router"] = _Module((sizes.num_experts, hidden), linear)
        if sizes.moe_router_enable_expert_bias:
            modules["mlp.router"] = _Module((sizes.num_experts, hidden), (*linear, "expert_bias"))
        width = sizes.moe_ffn_hidden_size or config.ffn_hidden
        widths = {f"mlp.experts.{i}": width for i in range(sizes.num_experts)}
        if sizes.moe_shared_expert_intermediate_size:
            widths["mlp.shared"] = sizes.moe_shared_expert_intermediate_size
    for name, width in widths.items():
        if config.gated:
            modules[f"{name}.gate"] = _Module((width, hidden), linear)
        modules[f"{name}.up"] = _Module((width, hidden), linear)
        modules[f"{name}.down"] = _Module((hidden, width), linear)
    return {
        f"{name}.{kind}": shape if kind == "weight" else shape[:1]
        for name, (shape, kinds) in modules.items()
        for kind in kinds
    }


def _latent_modules(
    config: GPTConfig, mla: LatentAttention, norm: tuple[str, ...], linear: tuple[str, ...]
) -> dict[str, _Module]:
    """Returns latent attention's matrices by name: down to the latents, which are normed, and up to
    the heads. The part of a key with positions is one for all heads."""
    hidden, heads = config.hidden, config.n_head
    queries = heads * config.head_dim
    q_rank, kv_rank = mla.q_lora_rank, mla.kv_lora_rank
    if q_rank:
        modules = {
            "attn.q_down": _Module((q_rank, hidden), linear),
            "attn.q_norm": _Module((q_rank,), norm),
            "attn.q_up": _Module((queries, q_rank), linear),
        }
    else:
        modules = {"attn.q": _Module((queries, hidden), linear)}
    return modules | {
        "attn.kv_down": _Module((kv_rank + mla.qk_pos_emb_head_dim, hidden), linear),
        "attn.kv_norm": _Module((kv_rank,), norm),
        "attn.kv_up": _Module((heads * (mla.qk_head_dim + mla.v_head_dim), kv_rank), linear),
        "attn.out": _Module((hidden, heads * mla.v_head_dim), linear),
    }


@functools.lru_cache(maxsize=4)  # asked for each of ten thousand experts; nobody changes it
def parameter_shapes(config: GPTConfig) -> Shapes:
    """Returns every parameter's name and whole shape, in the order of the model.

    `attn.qkv.weight` is laid out as megatron-core lays it out: group by group, and in a group the
    queries of its heads, then its key, then its value, D rows each. So a tensor-parallel rank owns
    consecutive rows. Without grouped-query attention each head is a group.
    """
    outside = _outer_shapes(config)
    embeddings = {name: shape for name, shape in outside.items() if name.startswith("embedding.")}
    kinds = {experts: _block_shapes(config, experts) for experts in {*config.blocks.values()}}
    blocks = {
        f"{block}.{name}": shape
        for block, experts in config.blocks.items()
        for name, shape in kinds[experts].items()
    }
    return embeddings | blocks | outside


@functools.lru_cache(typed=True)  # a study asks for one model thousands of times
def preset(name: str, **sizes: Any) -> GPTConfig:
    """Returns the preset called `name`, with every size that is given and not None in its place.

    With another hidden size or activation the feed-forward is derived anew, with another hidden
    size the head size, too, unless they are given; with another number of heads, all of them have
    keys and values of their own.

    Raises:
        UsageError: there is no such preset, or the sizes do not fit together.
    """
    if name not in PRESETS:
        from difflib import get_close_matches  # here: seldom needed

        close = get_close_matches(name.lower(), PRESETS, 1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UsageError(f"unknown preset {name!r}; {hint}known: {', '.join(PRESETS)}")
    base = PRESETS[name]
    stated = {size: value for size, value in sizes.items() if value is not None}
    changed = {size for size, value in stated.items() if value != getattr(base, size)}
    dependent = {"hidden": ("ffn_hidden", "kv_channels"), "activation": ("ffn_hidden",)}
    dependent |= {"n_head": ("n_kv_head",)}
    derived = {size: 0 for name in changed & dependent.keys() for size in dependent[name]}
    return replace(base, **derived | stated)


def name_of(config: GPTConfig, stated: str) -> str | None:
    """Returns the preset whose blocks these are: `stated`, where it is one, or another; or None.

    Vocabulary and positions do not make another model, blocks do.
    """
    sizes = {"vocab_size": config.vocab_size, "max_seq_len": config.max_seq_len}
    if stated in PRESETS and replace(PRESETS[stated], **sizes) == config:
        return stated
    return next((name for name, model in PRESETS.items() if model == config), None)
