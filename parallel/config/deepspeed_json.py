"""A DeepSpeed JSON: how it is read, and which of our settings it states. Torch-free."""

import json
from pathlib import Path
from typing import Any

from base.errors import UsageError
from base.files import read_text
from parallel.config.layout import Layout


def read_deepspeed_json(path: Path) -> dict[str, Any]:
    """Returns a DeepSpeed configuration file."""
    text = read_text(Path(path), "deepspeed_config")
    try:
        config = json.loads(text)
    except ValueError as error:
        raise UsageError(f"deepspeed_config {path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"deepspeed_config {path} is not a JSON object")
    return _without_auto(config)


def _without_auto(section: dict[str, Any]) -> dict[str, Any]:
    """Returns a section of a DeepSpeed JSON without "auto", which Hugging Face's Trainer fills in
    and DeepSpeed cannot read."""
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in section.items()
        if value != "auto"
    }


def as_deepspeed_json(layout: Layout, precision: str) -> dict[str, Any]:
    """Returns what a DeepSpeed JSON says of a layout and a number format. From it
    `from_deepspeed_json` reads them again."""
    zero: dict[str, Any] = {"stage": layout.zero_stage}
    for name, offloads in (("optimizer", ("optimizer", "all")), ("param", ("all",))):
        if layout.offload in offloads:
            zero[f"offload_{name}"] = {"device": "cpu"}
    stated: dict[str, Any] = {
        "train_batch_size": layout.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.n_micro,
        "zero_optimization": zero,
    }
    for name in ("bf16", "fp16"):
        stated[name] = {"enabled": precision == name}
    if precision == "bf16":  # else DeepSpeed adds gradients up, and over dp, in bf16
        stated["data_types"] = {"grad_accum_dtype": "fp32"}
        stated["communication_data_type"] = "fp32"
    return stated


def from_deepspeed_json(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Returns the settings that a DeepSpeed JSON, as read_deepspeed_json returns it, states."""

    def section(name: str, within: dict[str, Any] = config) -> dict[str, Any]:
        content = within.get(name, {})
        if not isinstance(content, dict):
            raise UsageError(f"{source}: {name} must be an object, not {json.dumps(content)}")
        return content

    zero, optimizer = section("zero_optimization"), section("optimizer")
    adam = section("params", optimizer)
    if optimizer.get("type", "AdamW").lower() not in ("adam", "adamw"):
        kind = optimizer["type"]
        raise UsageError(f"{source}: optimizer {kind}, but every engine here trains with AdamW")
    betas = adam.get("betas", [None, None])
    if not (isinstance(betas, list) and len(betas) == 2):
        raise UsageError(f"{source}: betas must be two numbers, not {json.dumps(betas)}")
    offload = None
    for name, setting in (("offload_optimizer", "optimizer"), ("offload_param", "all")):
        device = section(name, zero).get("device", "none")
        if device not in ("none", "cpu"):
            raise UsageError(f"{source}: {name} to {device}; only cpu is offered here")
        offload = setting if device == "cpu" else offload
    enabled = [name for name in ("bf16", "fp16") if section(name).get("enabled") is True]
    stated = {
        "micro_batch": config.get("train_micro_batch_size_per_gpu"),
        "global_batch": config.get("train_batch_size"),
        "grad_accum": config.get("gradient_accumulation_steps"),
        "clip_grad": config.get("gradient_clipping"),
        "zero_stage": zero.get("stage"),
        "offload": offload,
        "precision": enabled[0] if enabled else None,
        "lr": adam.get("lr"),
        "beta1": betas[0],
        "beta2": betas[1],
        "adam_eps": adam.get("eps"),
        "weight_decay": adam.get("weight_decay"),
    }
    return {key: value for key, value in stated.items() if value is not None}
