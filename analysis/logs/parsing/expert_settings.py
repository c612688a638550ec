"""What a model has beyond a dense GPT, and how its tokens are routed, from settings by name: of
Megatron-LM and those that take its names, Hugging Face, Megatron-DeepSpeed and torchtitan."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

# Experts' and LatentAttention's fields -> the names of settings, surest first.
_EXPERTS = {
    "num_experts": "num_experts num_moe_experts num_local_experts n_routed_experts",
    "moe_router_topk": "moe_router_topk num_experts_per_tok topk",
    "moe_ffn_hidden_size": "moe_ffn_hidden_size moe_intermediate_size",
    "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size"
    " shared_expert_intermediate_size",
    "first_dense": "first_k_dense_replace",
}
_LATENT = {
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
    "qk_head_dim": "qk_head_dim qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_pos_emb_head_dim qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
_FORCED = "moe_router_force_load_balancing debug_moe_force_load_balance moe_force_load_balance"
_FORCED += " fake_balanced_gate"
_CAPACITY = "moe_expert_capacity_factor moe_train_capacity_factor"
_DISPATCHER = "moe_token_dispatcher_type moe_flex_dispatcher_backend moe_enable_deepep"
_LAYERS = "moe_layer_freq"
NAMES = " ".join([*_EXPERTS.values(), *_LATENT.values(), _FORCED, _DISPATCHER, _LAYERS]).split()
NAMES += "n_shared_experts multi_latent_attention mtp_num_layers expert_interval".split()
NAMES += "moe_token_dropping moe_latent_size".split()
# Values that are a list of layers (1: with experts), or a decimal.
LONG = re.compile(
    rf"({_LAYERS}|{_CAPACITY.replace(' ', '|')})".replace("_", "[-_]")
    .replace("moe", r"moe(?<!\wmoe)")  # found sooner than behind a boundary
    .encode()
    + rb"['\"\]]{0,2}[ \t.:=]{1,80}+['\"]?"
    + rb"(\(?\[[\[\]()\d, *+]{1,2000}+|(?:\r?\n[ \t]{0,20}- [01]){1,500}+"
    + rb"|\d{1,4}\.?\d{0,4}(?!\w)|None|null)"
)


class Parts(NamedTuple):
    """The parts that a model has beyond a dense GPT. facts: by Record's and GPTConfig's names.
    uncounted: the parts that no FLOPs convention counts, in words."""

    facts: dict[str, Any]
    uncounted: list[str]


def parts_of(settings: Mapping[str, str], n_layer: int | None) -> Parts:
    """Returns the experts, the latent attention, the layers that predict further tokens and the
    routing that the settings state. settings: a setting's name -> its last value, in lower case."""
    facts: dict[str, Any] = {}
    uncounted = []
    latent = settings.get("multi_latent_attention", "true" if "kv_lora_rank" in settings else "")
    if latent == "true":
        facts["mla"] = _numbers(settings, _LATENT)
    if settings.get("mtp_num_layers", "").isdigit() and int(settings["mtp_num_layers"]):
        facts["mtp_num_layers"] = int(settings["mtp_num_layers"])
    experts = _numbers(settings, _EXPERTS)
    if experts.get("num_experts", 1) < 2:
        return Parts(facts, uncounted)
    shared = settings.get("n_shared_experts", "")
    if shared.isdigit() and "moe_ffn_hidden_size" in experts:
        width = int(shared) * experts["moe_ffn_hidden_size"]
        experts.setdefault("moe_shared_expert_intermediate_size", width)
    # Of so many layers the last has experts.
    if (interval := settings.get("expert_interval", "")).isdigit():
        experts |= {"first_dense": int(interval) - 1, "moe_layer_freq": int(interval)}
    if layers := settings.get(_LAYERS, ""):
        placed = {"moe_layer_freq": int(layers)} if layers.isdigit() else placed_in(layers, n_layer)
        if placed is None:
            uncounted.append(f"experts in the layers {layers[:60]}")
        experts |= placed or {}
    if settings.get("moe_latent_size", "").isdigit():
        uncounted.append(f"experts in a latent of {settings['moe_latent_size']}")
    capacity = _first(settings, _CAPACITY)
    dropless = capacity in ("none", "null") or settings.get("moe_token_dropping") == "false"
    if not dropless and re.fullmatch(r"\d+\.?\d*", capacity) and float(capacity):
        experts["moe_expert_capacity_factor"] = float(capacity)
    facts |= {"experts": experts, "dropped": 0.0 if dropless else None}
    facts["routing"] = {"true": "forced", "false": "natural"}.get(_first(settings, _FORCED))
    facts["dispatcher"] = settings.get("moe_token_dispatcher_type")
    if facts["dispatcher"] == "flex":
        deepep = "deepep" if settings.get("moe_enable_deepep") == "true" else "flex"
        facts["dispatcher"] = settings.get("moe_flex_dispatcher_backend", deepep)
    return Parts(facts, uncounted)


def _first(settings: Mapping[str, str], names: str) -> str:
    """Returns the value of the first of the names that is set; empty where none is."""
    return next((settings[name] for name in names.split() if name in settings), "")


def _numbers(settings: Mapping[str, str], fields: dict[str, str]) -> dict[str, int]:
    """Returns the whole numbers that the settings state, by the names of our fields."""
    values = {}
    for field, names in fields.items():
        if (value := _first(settings, names)).isdigit():
            values[field] = int(value)
    return values


def placed_in(layers: str, n_layer: int | None) -> dict[str, int] | None:
    """Returns first_dense and moe_layer_freq of a list of layers: Megatron's `[0, 1, 1]` or
    `([0]*1+[1]*26)`, or YAML's. None where no two such numbers describe it, or where it has not as
    many layers as the model."""
    if layers.startswith(("\n", "\r")):
        layers = f"[{','.join(re.findall('[01]', layers))}]"
    inside, _, repeats = layers.replace(" ", "").strip("(").partition(")")
    terms = re.findall(r"\[([01,]+)\](?:\*(\d{1,4}))?", inside)
    kinds = "".join(kind.replace(",", "") * int(n or 1) for kind, n in terms)
    kinds *= int(repeats[1:5] or 1) if re.fullmatch(r"(\*\d{1,4})?", repeats) else 0
    first = kinds.find("1")
    period = max(kinds.find("1", first + 1) - first, 1)
    made = "".join(str(int(i >= first and (i - first) % period == 0)) for i in range(len(kinds)))
    if first < 0 or made != kinds or len(kinds) != (n_layer or len(kinds)):
        return None
    return {"first_dense": first, "moe_layer_freq": period}
