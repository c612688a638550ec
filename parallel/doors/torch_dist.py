"""megatron-core's torch_dist: what Megatron-LM, NeMo and Megatron Bridge save.

    iter_0000100/metadata.json    the name of the format
                 common.pt        what is not a tensor; since 0.19 it is an object of the store
                 .metadata, ...   the store (stores.py)

The weights have megatron-core's names (names.py). The moments have these behind
`optimizer.state.exp_avg.`, the fp32 weights behind `fp32_param.` or `param.` there, where the
optimizer is not distributed or was saved as fully_reshardable. Other forms follow the buffers of
one layout; then the weights alone are read, and that is said.
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from base.errors import UsageError
from base.files import read_json_if_whole
from base.storage import write_synced
from models.config import GPTConfig, parameter_shapes
from models.weights import new_folder
from parallel.checkpoint.manifest import KINDS
from parallel.doors import Foreign, pickles, stores
from parallel.doors.names import Named, megatron

_LATEST, _COMMON = "latest_checkpointed_iteration.txt", "common.pt"
_STATE = "optimizer.state."
_MASTERS = ("fp32_param", "param")  # of Float16Optimizer, and of the distributed optimizer


def recognises(path: Path) -> Path | None:
    """The folder of the newest checkpoint at a path, where it is torch_dist."""
    if (path / _LATEST).is_file():
        path = path / f"iter_{int((path / _LATEST).read_text() or 0):07d}"
    backend = read_json_if_whole(path / "metadata.json").get("sharded_backend")
    return path if backend == "torch_dist" else None


def read(folder: Path, model: GPTConfig | None) -> Foreign:
    """Raises: UsageError: it is damaged, or of a model that our GPT cannot be."""
    store = stores.Store(folder)
    common = _common(folder, store)
    config = model or _config(common.get("args"), folder)
    weights = {k: s for k, s in store.shapes.items() if not k.startswith(("optimizer.", "chained"))}
    named = Named(config, weights, folder)
    masters = [f"{_STATE}{kind}." for kind in _MASTERS]
    there = {
        "param": next((p for p in masters if any(k.startswith(p) for k in store.shapes)), ""),
        **{kind: f"{_STATE}{kind}." for kind in KINDS[1:]},
    }
    complete = all(
        there[kind] + named.prefix + name in store.shapes
        for kind in KINDS
        for parts in named.parts.values()
        for name in parts.names
    )
    step = int(common.get("iteration", 0))

    def tensor(name: str, kind: str) -> Tensor:
        before = (there[kind] if complete else "") + named.prefix
        return named.tensor(name, lambda theirs, layer: store.tensor(before + theirs, layer))

    run = f"imported from torch_dist {folder}"
    if not complete:
        form = (common.get("optimizer") or {}).get("param_state_sharding_type", "none")
        run += f" without moments (its optimizer's form: {form}; fully_reshardable has them)"
    kinds = KINDS if complete else ("param",)
    adam_step = _adam_step(common, step)
    return Foreign(config, max(step, adam_step), adam_step, kinds, tensor, {"run": run})


def _common(folder: Path, store: stores.Store) -> dict[str, Any]:
    """What is not a tensor."""
    if (folder / _COMMON).is_file():
        common = pickles.load(folder / _COMMON)
    else:
        objects = (o.load() for name, o in store.objects.items() if name.startswith("common_state"))
        (common,) = next(objects, [{}])
    if not isinstance(common, dict):
        raise UsageError(f"{folder} is damaged: its common state is no table")
    return common


def _adam_step(common: dict[str, Any], otherwise: int) -> int:
    """AdamW's steps, from the parameter groups or beside the moments."""
    waiting = [common.get("optimizer")]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            for key in ("step", "common_step"):
                if value.get(key):
                    return int(value[key])
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return otherwise


# Megatron-LM's arguments -> what they must be for our GPT; where one is absent, it is so.
_ALIKE = {
    **dict.fromkeys(("num_experts", "window_size", "mtp_num_layers"), (None,)),
    **dict.fromkeys(("multi_latent_attention", "apply_layernorm_1p", "squared_relu"), (False,)),
    **dict.fromkeys(("rotary_interleaved", "attention_output_gate"), (False,)),
    "rotary_percent": (1.0,),
    "position_embedding_type": ("rope", "learned_absolute"),
}


def _config(stated: Any, folder: Path) -> GPTConfig:
    """The model of Megatron-LM's arguments.

    Raises:
        UsageError: there are none, or our GPT has not what they ask for.
    """
    if stated is None:
        raise UsageError(f"{folder} does not state its model: name it with --model")
    args = vars(stated)
    gated, bias = bool(args.get("swiglu")), bool(args.get("add_bias_linear", True))
    alike = _ALIKE | {"add_qkv_bias": (bias, False)}
    if not (gated or args.get("openai_gelu")):
        alike["bias_gelu_fusion"] = (True,)  # the fused one is tanh's, the other erf's
    layers = args["num_layers"]
    if pattern := (args.get("hybrid_layer_pattern") or "").replace("|", ""):
        layers = len(pattern) // 2
        alike["hybrid_layer_pattern"] = (args["hybrid_layer_pattern"],) * (pattern == "*-" * layers)
    for name, good in alike.items():
        if name in args and args[name] not in good:
            raise UsageError(f"{folder}: {name} is {args[name]!r:.40}, which our GPT does not have")
    rope = args.get("position_embedding_type", "learned_absolute") == "rope"
    grouped = args.get("group_query_attention")
    return GPTConfig(
        n_layer=layers,
        hidden=args["hidden_size"],
        n_head=args["num_attention_heads"],
        vocab_size=args.get("vocab_size") or args["padded_vocab_size"],
        max_seq_len=args["max_position_embeddings"],
        ffn_hidden=args.get("ffn_hidden_size") or 0,
        n_kv_head=(args["num_query_groups"] or 0) if grouped else 0,
        kv_channels=args.get("kv_channels") or 0,
        position="rope" if rope else "learned",
        rope_theta=float(args.get("rotary_base") or 10000),
        rope_scaling=float(args["rope_scaling_factor"]) if args.get("use_rope_scaling") else 1.0,
        norm="rmsnorm" if args.get("normalization") == "RMSNorm" else "layernorm",
        norm_eps=args.get("norm_epsilon") or args.get("layernorm_epsilon") or 1e-5,
        qk_norm=bool(args.get("qk_layernorm")),
        activation="swiglu" if gated else "gelu",
        tied=not args.get("untie_embeddings_and_output_weights"),
        bias=bias,
    )


def write(out: Path, foreign: Foreign, form: str = "stacked") -> None:
    """Write a folder with a checkpoint, as megatron-core's GPTModel has it; form: see
    names.megatron. The fp32 weights stand once, under all names under which a loader asks.

    Raises:
        UsageError: it cannot be written; nothing is left behind.
    """
    with new_folder(out) as aside:
        folder = aside / f"iter_{foreign.step:07d}"
        folder.mkdir()
        stores.write(folder, _boxes(foreign, form))
        torch.save(_common_of(foreign), folder / _COMMON)
        backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
        backends |= {"sharded_backend_version": 1, "common_backend_version": 1}
        write_synced(folder / "metadata.json", json.dumps(backends))
        write_synced(aside / _LATEST, f"{foreign.step}\n")


def _boxes(foreign: Foreign, form: str) -> Iterator[stores.Box]:
    config, shapes = foreign.config, parameter_shapes(foreign.config)
    objects = ["output_layer._extra_state/shard_0_1"]
    for name, shape in shapes.items():
        ways = list(megatron(form, config, name))
        theirs, layer = [each for parts in ways for each in parts.names], ways[0].layer
        whole, offset = shape, (0,) * len(shape)
        if config.gated and ".mlp." in name and "down" not in name:
            whole = (2 * shape[0], *shape[1:])
            offset = (shape[0] if ".up." in name else 0, *offset[1:])
        if layer is not None:
            whole, offset = (config.n_layer, *whole), (layer, *offset)
        for kind in KINDS:
            names = [f"{_STATE}{kind}.{each}" for each in theirs]
            if kind == "param":
                names += theirs + [f"{_STATE}{_MASTERS[0]}.{each}" for each in theirs]
            tensor = partial(_part, foreign, name, kind, layer)
            yield stores.Box(names, whole, offset, tensor)
        if name.startswith("blocks.") and name.endswith(".weight"):
            shard = "shard_0_1" if layer is None else f"shard_{layer}_{config.n_layer}"
            stems = [each.removesuffix(".weight") for each in theirs if "norm" not in each]
            stems += [s.replace("linear_proj", "core_attention") for s in stems if "_proj" in s]
            objects += [f"{stem}._extra_state/{shard}" for stem in stems]
    # Transformer Engine's fp8 scales: there are none.
    yield stores.Box(sorted(set(objects)), None, (), lambda: [None])


def _part(foreign: Foreign, name: str, kind: str, layer: int | None) -> Tensor:
    value = foreign.tensor(name, kind)
    return value if layer is None else value[None]


def _common_of(foreign: Foreign) -> dict[str, Any]:
    """What megatron-core's optimizers ask for beside tensors."""
    spec = foreign.facts.get("spec") or {}
    group = {
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        "default_config": True,
        "lr_mult": 1.0,
        "max_lr": spec.get("lr"),
        "min_lr": None,
        "lr": spec.get("lr"),
        "betas": (spec.get("beta1"), spec.get("beta2")),
        "eps": spec.get("adam_eps"),
        "step": foreign.adam_step,
    }
    groups = [
        group | {"wd_mult": mult, "weight_decay": mult * (spec.get("weight_decay") or 0.0)}
        for mult in (1.0, 0.0)
    ]
    adam = {
        "param_groups": groups,
        "state": {"common_step": torch.tensor(float(foreign.adam_step))},
    }
    optimizer = {"optimizer": adam, "param_state_sharding_type": "fully_reshardable"}
    return {"iteration": foreign.step, "checkpoint_version": 3.0, "optimizer": optimizer}
