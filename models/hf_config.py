"""transformers' config.json and our GPTConfig, each made from the other. No torch.

hf_classes.toml says for each model class of transformers that our GPT can be: its names, its sizes
in config.json, and the arithmetic that must be ours. What our GPT does not have is refused, with
the numbers.
"""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from base.errors import UsageError
from base.files import read_json, read_json_if_whole, read_toml
from models.config import INIT_STD, LLAMA3_ROPE, Experts, GPTConfig, in_words

CONFIG = "config.json"


@dataclass(frozen=True)
class Architecture:
    """A model class of transformers.

    ours: what GPTConfig must have for this class.
    prefix: of all its parameters but the output layer's; some files leave it out.
    blocks: the list of blocks.
    modules: our module -> theirs, inside a block (its name there) and outside (the whole name). One
        of ours may be several of theirs, whose rows follow one another. `*` is an expert's number.
    transposed: the matrices of the blocks are stored [in, out].
    sizes: config.json's name -> GPTConfig's; 0 is one that follows from the others. biases:
        config.json's names of GPTConfig's bias.
    experts: config.json's name -> that of models.config.Experts, whose coefficient of balance is
        converted (`_balance_share`); without an expert's size, that is ffn_hidden. What has no name
        is as Experts has it by default.
    absent: what transformers takes where config.json does not say. A size that is not among them
        must be there.
    arithmetic: config.json's name -> the values that mean what our GPT does. The first is written.
    unset: names of what our GPT does not have; where config.json has them, they are null, 0 or
        false.
    dropouts: config.json's names of them. They are written as 0.
    aliases: other names of sizes in config.json; transformers lets them prevail.
    """

    model_type: str
    name: str
    ours: dict[str, Any]
    prefix: str
    blocks: str
    modules: dict[str, list[str]]
    sizes: dict[str, str]
    biases: list[str]
    absent: dict[str, Any]
    arithmetic: dict[str, list]
    unset: list[str]
    dropouts: list[str]
    transposed: bool
    aliases: dict[str, str] = field(default_factory=dict)
    experts: dict[str, str] = field(default_factory=dict)


def _read_classes() -> dict[str, Architecture]:
    """Returns the classes of hf_classes.toml by model_type. A class that is `like` another has
    that one's settings where it states none."""
    tables = read_toml(Path(__file__).with_name("hf_classes.toml"), "classes")
    for table in tables.values():
        for key, inherited in tables.get(table.pop("like", ""), {}).items():
            own = table.get(key, inherited)
            table[key] = inherited | own if isinstance(own, dict) else own
    return {kind: Architecture(kind, **table) for kind, table in tables.items()}


_READ = _read_classes()
_WRITTEN = [_READ[kind] for kind in ("gpt2", "llama", "qwen3", "mixtral", "qwen3_moe")]
# What GPTConfig leaves to be derived, and config.json states.
_DERIVED = {"n_kv_head": "kv_heads", "kv_channels": "head_dim"}
_WIDTH, _BALANCE = "moe_ffn_hidden_size", "moe_aux_loss_coeff"


def architecture(config: GPTConfig) -> Architecture:
    """Returns the class of transformers that has this model's arithmetic.

    Raises:
        UsageError: no class has; the message says for each what it has instead.
    """
    if lacking := [part for part in config.parts if part != "experts"]:
        raise UsageError(f"a model with {in_words(lacking)} is not written as Hugging Face's")
    refusals, default = [], Experts.__dataclass_fields__
    experts = asdict(config.experts) if config.experts else {}
    for target in _WRITTEN:
        different = {k: v for k, v in target.ours.items() if getattr(config, k) != v}
        words = [f"{k} {v}, not {getattr(config, k)}" for k, v in different.items()]
        if target.model_type == "llama" and config.hidden % config.n_head:
            words.append(f"hidden a multiple of n_head {config.n_head}, not {config.hidden}")
        if bool(target.experts) != bool(experts):
            words.append("experts" if target.experts else "no experts")
        for name in experts.keys() - {*target.experts.values(), _WIDTH} if target.experts else ():
            if default[name].default != experts[name]:
                words.append(f"{name} {default[name].default}, not {experts[name]}")
        if not words:
            return target
        refusals.append(f"{target.name} has {words[0]}")
    raise UsageError(f"no class of Hugging Face's has this model: {'; '.join(refusals)}")


def hugging_face_names(config: GPTConfig, name: str) -> tuple[str, ...]:
    """Returns what a reference parameter is called in transformers' class, from its first row to
    its last."""
    model_class, (stem, kind) = architecture(config), name.rsplit(".", 1)
    if stem in model_class.modules:
        return tuple(f"{theirs}.{kind}" for theirs in model_class.modules[stem])
    _, index, inner = stem.split(".", 2)
    if inner.startswith("mlp.experts."):
        expert = inner.split(".")[2]
        modules = model_class.modules[inner.replace(f".{expert}.", ".*.")]
        modules = [theirs.replace("*", expert) for theirs in modules]
    else:
        modules = model_class.modules[inner]
    return tuple(f"{model_class.blocks}.{index}.{theirs}.{kind}" for theirs in modules)


def hugging_face_config(config: GPTConfig) -> dict[str, Any]:
    """Returns the settings of transformers' configuration class: our sizes and arithmetic, no
    dropout, no special ids."""
    model_class, rope = architecture(config), {}
    if config.position == "rope":  # as transformers 4 writes it, which 5 reads too
        scaling = {"rope_type": "llama3", "factor": config.rope_scaling, **LLAMA3_ROPE}
        rope = {"rope_theta": config.rope_theta}
        rope["rope_scaling"] = scaling if config.rope_scaling != 1 else None
    experts = {}
    if config.experts:
        width = getattr(config.experts, _WIDTH) or config.ffn_hidden
        balance = config.experts.moe_aux_loss_coeff / _balance_share(config)
        stated = asdict(config.experts) | {_WIDTH: width, _BALANCE: float(f"{balance:.12g}")}
        experts = {theirs: stated[ours] for theirs, ours in model_class.experts.items()}
        if _WIDTH not in model_class.experts.values():
            config = replace(config, ffn_hidden=width)
    return {
        **{
            name: getattr(config, _DERIVED.get(ours, ours))
            for name, ours in model_class.sizes.items()
        },
        **rope,
        **experts,
        **{name: values[0] for name, values in model_class.arithmetic.items()},
        **dict.fromkeys(model_class.biases, config.bias),
        **dict.fromkeys(model_class.dropouts, 0.0),
        "initializer_range": INIT_STD,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def config_of(described: dict[str, Any], path: Path) -> tuple[GPTConfig, Architecture]:
    """Returns our config of the model that a config.json, read from `path`, describes, and its
    class.

    Raises:
        UsageError: our GPT is not this model; the message names the setting.
    """
    kind = described.get("model_type")
    if kind is None:  # as of weights that earlier versions exported
        advice = "of a run, python -m parallel.checkpoint export RUN HF_DIR makes one"
        raise UsageError(f"{path} is none of Hugging Face's: it states no model_type; {advice}")
    if (model_class := _READ.get(str(kind))) is None:
        kinds = ", ".join(_READ)
        raise UsageError(f"{path}: model_type {kind!r} is not one that our GPT can be: {kinds}")
    named = {
        size: described[name] for name, size in model_class.aliases.items() if name in described
    }
    values = model_class.absent | described | named
    ours = dict(model_class.ours)
    refused = {name: values[name] for name in model_class.unset if values.get(name)}
    for name, allowed in model_class.arithmetic.items():
        if values.get(name, allowed[0]) not in allowed:
            refused[name] = values[name]
    if any(layer_type != "full_attention" for layer_type in values.get("layer_types") or ()):
        refused["layer_types"] = values["layer_types"]
    biases = {name: values.get(name, False) for name in model_class.biases}
    if len(set(map(str, biases.values()))) > 1:
        refused |= biases
    for name, value in refused.items():
        accepted = " or ".join(
            map(str, model_class.arithmetic.get(name, ["no such thing in this class"]))
        )
        raise UsageError(f"{path}: {name} is {value!r:.60}, but our GPT has {accepted}")
    for name, size in model_class.sizes.items():
        if name not in values:
            raise UsageError(f"{path}: {name} is missing")
        ours[size] = 0 if values[name] is None else values[name]
    if model_class.experts:
        ours["experts"] = {size: values.get(name) for name, size in model_class.experts.items()}
    if biases:
        ours["bias"] = biases[model_class.biases[0]]
    if model_class.ours["position"] == "rope":
        ours |= _rope(values, path)
    try:
        config = GPTConfig(**ours)
        if config.experts:
            coefficient = config.experts.moe_aux_loss_coeff * _balance_share(config)
            experts = replace(config.experts, moe_aux_loss_coeff=coefficient)
            config = replace(config, experts=experts)
        return config, model_class
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def holds_weights(path: Path) -> bool:
    """Returns whether training can start from a folder, which is a Hugging Face directory."""
    return "model_type" in read_json_if_whole(path / CONFIG)


def model_of(path: Path) -> GPTConfig:
    """Returns the model of a Hugging Face directory, or of its config.json.

    Raises:
        UsageError: it is missing, damaged, or a model that our GPT cannot be.
    """
    path = path / CONFIG if path.is_dir() else path
    return config_of(read_json(path), path)[0]


def _balance_share(config: GPTConfig) -> float:
    """Returns our moe_aux_loss_coeff over transformers' router_aux_loss_coef. Its loss is the mean
    over layers where ours is their sum, and it adds up the shares of a token's k choices, which
    makes it k times as large (load_balancing_loss_func)."""
    assert config.experts
    return config.experts.moe_router_topk / config.expert_layers


def _rope(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns GPTConfig's rope_theta and rope_scaling, from either form: rope_theta beside
    rope_scaling, or transformers 5's rope_parameters."""
    stated = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(stated, dict):
        raise UsageError(f"{path}: rotary positions must be an object, not {stated!r:.60}")
    rotary = {
        "rope_theta": values.get("rope_theta", 10000.0),  # transformers' own
        "partial_rotary_factor": values.get("partial_rotary_factor", 1.0),
    } | stated
    kind = rotary.pop("rope_type", rotary.pop("type", "default"))
    theta, factor, required = rotary.pop("rope_theta"), 1.0, {"partial_rotary_factor": 1.0}
    if kind == "llama3":
        factor, required = rotary.pop("factor", None), required | LLAMA3_ROPE
    elif kind != "default":
        raise UsageError(
            f"{path}: rope_type is {kind!r}, but our GPT has rotary positions of type default or"
            " llama3"
        )
    for name in rotary | required:
        if rotary.get(name) != required.get(name):
            raise UsageError(
                f"{path}: {name} of the rotary positions is {rotary.get(name)!r:.60}, but our GPT"
                f" has {required.get(name, 'no such setting')}"
            )
    return {"rope_theta": theta, "rope_scaling": factor}
