"""transformers' config.json and our GPTConfig, each made from the other. No torch.

A table says for each model class of transformers that our GPT can be: its names, its sizes in
config.json, and the arithmetic that must be ours. What our GPT does not have is refused, with the
numbers.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from base.errors import UsageError
from models.config import INIT_STD, LLAMA3_ROPE, GPTConfig

_Meaning = dict[str, tuple[tuple, str]]


@dataclass(frozen=True)
class Architecture:
    """A model class of transformers.

    ours: what GPTConfig must have for this class.
    prefix: of all its parameters but the output layer's; some files leave it out.
    blocks: the list of blocks.
    modules: our module -> theirs, inside a block (its name there) and outside (the whole name). One
        of ours may be several of theirs, whose rows follow one another.
    transposed: the matrices of the blocks are stored [in, out].
    sizes: config.json's name -> GPTConfig's.
    absent: what transformers takes where config.json does not say. A size that is not among them
        must be there.
    aliases: other names of sizes in config.json.
    arithmetic: config.json's name -> (values that mean what our GPT does, its words). The first
        value is written.
    needed: the same, of names that are only read.
    dropouts: config.json's names of them. They are written as 0.
    """

    model_type: str
    name: str
    ours: dict[str, Any]
    prefix: str
    blocks: str
    modules: dict[str, tuple[str, ...]]
    sizes: dict[str, str]
    absent: dict[str, Any]
    arithmetic: _Meaning
    dropouts: tuple[str, ...]
    transposed: bool = False
    aliases: dict[str, str] = field(default_factory=dict)
    needed: _Meaning = field(default_factory=dict)


_GPT2 = Architecture(
    model_type="gpt2",
    name="GPT2LMHeadModel",
    ours={"position": "learned", "norm": "layernorm", "activation": "gelu", "bias": True}
    | {"n_kv_head": 0, "kv_channels": 0, "qk_norm": False},
    prefix="transformer.",
    blocks="transformer.h",
    modules={
        "embedding.word": ("transformer.wte",),
        "embedding.position": ("transformer.wpe",),
        "norm1": ("ln_1",),
        "attn.qkv": ("attn.c_attn",),
        "attn.out": ("attn.c_proj",),
        "norm2": ("ln_2",),
        "mlp.up": ("mlp.c_fc",),
        "mlp.down": ("mlp.c_proj",),
        "norm": ("transformer.ln_f",),
        "output": ("lm_head",),
    },
    transposed=True,  # Conv1D
    sizes={
        "n_layer": "n_layer",
        "n_embd": "hidden",
        "n_head": "n_head",
        "n_positions": "max_seq_len",
        "vocab_size": "vocab_size",
        "n_inner": "ffn_hidden",
        "layer_norm_epsilon": "norm_eps",
        "tie_word_embeddings": "tied",
    },
    absent={"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    | {"n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    aliases={
        "num_hidden_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    arithmetic={
        "activation_function": (("gelu_new", "gelu_pytorch_tanh"), "the tanh GELU"),
        "scale_attn_weights": ((True,), "attention scaled by 1/sqrt(head size)"),
        "scale_attn_by_inverse_layer_idx": ((False,), "one attention scale in all layers"),
        "add_cross_attention": ((False,), "a decoder alone"),
    },
    dropouts=("embd_pdrop", "attn_pdrop", "resid_pdrop"),
)
_ALL_BEFORE, _DENSE = "attention to all tokens before", "one feed-forward and no experts"
_LLAMA = Architecture(
    model_type="llama",
    name="LlamaForCausalLM",
    ours={"position": "rope", "norm": "rmsnorm", "activation": "swiglu", "qk_norm": False},
    prefix="model.",
    blocks="model.layers",
    modules={
        "embedding.word": ("model.embed_tokens",),
        "norm1": ("input_layernorm",),
        "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn.out": ("self_attn.o_proj",),
        "norm2": ("post_attention_layernorm",),
        "mlp.gate": ("mlp.gate_proj",),
        "mlp.up": ("mlp.up_proj",),
        "mlp.down": ("mlp.down_proj",),
        "norm": ("model.norm",),
        "output": ("lm_head",),
    },
    sizes={
        "num_hidden_layers": "n_layer",
        "hidden_size": "hidden",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "n_kv_head",
        "head_dim": "kv_channels",
        "max_position_embeddings": "max_seq_len",
        "vocab_size": "vocab_size",
        "intermediate_size": "ffn_hidden",
        "rms_norm_eps": "norm_eps",
        "tie_word_embeddings": "tied",
        "attention_bias": "bias",
        "mlp_bias": "bias",
    },
    absent={"num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": False}
    | {"attention_bias": False, "mlp_bias": False},
    arithmetic={"hidden_act": (("silu", "swish"), "SwiGLU, whose activation is silu")},
    dropouts=("attention_dropout",),
    needed={
        "sliding_window": ((None,), _ALL_BEFORE),
        "layer_types": (("full_attention",), _ALL_BEFORE),
        "num_local_experts": ((None, 0), _DENSE),
        "num_experts": ((None, 0), _DENSE),
    },
)
_QWEN3 = replace(
    _LLAMA,
    model_type="qwen3",
    name="Qwen3ForCausalLM",
    ours=_LLAMA.ours | {"qk_norm": True, "bias": False},
    modules=_LLAMA.modules
    | {"attn.q_norm": ("self_attn.q_norm",), "attn.k_norm": ("self_attn.k_norm",)},
    sizes={theirs: ours for theirs, ours in _LLAMA.sizes.items() if ours != "bias"},
    arithmetic=_LLAMA.arithmetic | {"attention_bias": ((False,), "Qwen3 without biases")},
    needed={k: v for k, v in _LLAMA.needed.items() if k != "sliding_window"}  # its files name one
    | {"use_sliding_window": ((False,), _ALL_BEFORE)},
)
# Read, and written as Llama.
_MISTRAL = replace(_LLAMA, model_type="mistral", absent=_LLAMA.absent | {"sliding_window": 4096})
_WRITTEN = (_GPT2, _LLAMA, _QWEN3)
_READ = (*_WRITTEN, _MISTRAL)
# What GPTConfig leaves to be derived, and config.json states.
_DERIVED = {"n_kv_head": "kv_heads", "kv_channels": "head_dim"}


def architecture(config: GPTConfig) -> Architecture:
    """The class of transformers that has this model's arithmetic.

    Raises:
        UsageError: none has; for each, what it has instead.
    """
    others = []
    for each in _WRITTEN:
        other = {k: v for k, v in each.ours.items() if getattr(config, k) != v}
        words = [f"{k} {v}, not {getattr(config, k)}" for k, v in other.items()]
        if each is _LLAMA and config.hidden % config.n_head:
            words.append(f"hidden a multiple of n_head {config.n_head}, not {config.hidden}")
        if not words:
            return each
        others.append(f"{each.name} has {words[0]}")
    raise UsageError(f"no class of Hugging Face's has this model: {'; '.join(others)}")


def hugging_face_names(config: GPTConfig, name: str) -> tuple[str, ...]:
    """What a reference parameter is called in transformers' class, from its first row to its last.

    Raises:
        UsageError: no class has this model.
    """
    of, (stem, kind) = architecture(config), name.rsplit(".", 1)
    if stem in of.modules:
        return tuple(f"{theirs}.{kind}" for theirs in of.modules[stem])
    _, index, inner = stem.split(".", 2)
    return tuple(f"{of.blocks}.{index}.{theirs}.{kind}" for theirs in of.modules[inner])


def hugging_face_config(config: GPTConfig) -> dict[str, Any]:
    """The settings of transformers' configuration class: our sizes and arithmetic, no dropout, no
    special ids.

    Raises:
        UsageError: no class has this model.
    """
    of, rope = architecture(config), {}
    if config.position == "rope":  # as transformers 4 writes it, which 5 reads too
        scaling = {"rope_type": "llama3", "factor": config.rope_scaling, **LLAMA3_ROPE}
        rope = {"rope_theta": config.rope_theta}
        rope["rope_scaling"] = scaling if config.rope_scaling != 1 else None
    return {
        **{name: getattr(config, _DERIVED.get(ours, ours)) for name, ours in of.sizes.items()},
        **rope,
        **{name: values[0] for name, (values, _) in of.arithmetic.items()},
        **dict.fromkeys(of.dropouts, 0.0),
        "initializer_range": INIT_STD,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def config_of(described: dict[str, Any], path: Path) -> tuple[GPTConfig, Architecture]:
    """Our config of the model that a config.json, read from `path`, describes, and its class.

    Raises:
        UsageError: our GPT is not this model; it names the setting.
    """
    kind = described.get("model_type")
    of = next((each for each in _READ if each.model_type == kind), None)
    if of is None:
        known = ", ".join(each.model_type for each in _READ)
        raise UsageError(f"{path}: model_type {kind!r} is not one that our GPT can be: {known}")
    values = of.absent | {of.aliases.get(name, name): v for name, v in described.items()}
    for name, (good, words) in (of.arithmetic | of.needed).items():
        value = values.get(name, good[0])
        if any(each not in good for each in (value if isinstance(value, list) else [value])):
            raise UsageError(f"{path}: {name} is {value!r:.60}, but our GPT has {words}")
    ours = dict(of.ours)
    for name, size in of.sizes.items():
        if name not in values:
            raise UsageError(f"{path}: {name} is missing")
        value = 0 if values[name] is None else values[name]
        if ours.setdefault(size, value) != value:  # only `bias` has two names
            raise UsageError(
                f"{path}: {name} is {value!r} and attention_bias {ours[size]!r}, but our GPT has"
                " biases in all linear layers or in none"
            )
    if of.ours["position"] == "rope":
        ours |= _rope(values, path)
    try:
        return GPTConfig(**ours), of
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _rope(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """GPTConfig's rope_theta and rope_scaling, from either form: rope_theta beside rope_scaling, or
    transformers 5's rope_parameters."""
    given = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise UsageError(f"{path}: rotary positions must be an object, not {given!r:.60}")
    found = {
        "rope_theta": values.get("rope_theta", 10000.0),  # transformers' own
        "partial_rotary_factor": values.get("partial_rotary_factor", 1.0),
    } | given
    kind = found.pop("rope_type", found.pop("type", "default"))
    theta, factor, wanted = found.pop("rope_theta"), 1.0, {"partial_rotary_factor": 1.0}
    if kind == "llama3":
        factor, wanted = found.pop("factor", None), wanted | LLAMA3_ROPE
    elif kind != "default":
        raise UsageError(
            f"{path}: rope_type is {kind!r}, but our GPT has rotary positions of type default or"
            " llama3"
        )
    for name in found | wanted:
        if found.get(name) != wanted.get(name):
            raise UsageError(
                f"{path}: {name} of the rotary positions is {found.get(name)!r:.60}, but our GPT"
                f" has {wanted.get(name, 'no such setting')}"
            )
    return {"rope_theta": theta, "rope_scaling": factor}
