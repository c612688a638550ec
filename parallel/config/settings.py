"""From what users say to a checked run: layers of settings, and flags.

Values are taken from, each overriding the one before: the defaults of `RunSpec`, a DeepSpeed JSON,
the study file, flags. Torch-free.
"""

import argparse
from collections.abc import Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from base.bounds import Words, checked, kind_of
from base.errors import UsageError
from base.files import parse_json
from models.config import (
    in_words,
    name_of,
)
from models.hf_config import holds_weights, model_of
from parallel.config.data_files import stated_by
from parallel.config.deepspeed_json import from_deepspeed_json, read_deepspeed_json
from parallel.config.duration import WORK, steps_of
from parallel.config.engine_abilities import ENGINES
from parallel.config.refusals import refusals
from parallel.config.run_spec import BOUNDS, DEFAULTS, MODEL, RunSpec

COMMAND_LINE = "command line"  # the source of settings that flags gave: they are named as flags


def check_setting(name: str, value: Any, source: str) -> Any:
    """`value` in the setting's type.

    Raises:
        UsageError: no such setting, or not its type, one of its choices or within its bounds; it
            names the source.
    """
    field = RunSpec.__dataclass_fields__.get(name)
    if field is None:
        known = ", ".join(RunSpec.__dataclass_fields__)
        raise UsageError(f"{source}: unknown setting {name!r}; known: {known}")
    flag = "--" + name.replace("_", "-")
    return checked(field, value, flag if source == COMMAND_LINE else f"{source}: {name}")


def resolve(*layers: tuple[str, dict[str, Any]], gpus: int | None = None) -> RunSpec:
    """Merge (source, settings) layers, the later overriding the earlier, into a checked RunSpec.

    `gpus` is the launcher's world size, which must agree with what the layers say. Relative paths
    are relative to the working directory, wherever the layer that names them is.

    Raises:
        UsageError: one line with every problem and its numbers.
    """
    merged = merge(*layers)
    if gpus is not None and merged.setdefault("gpus", gpus) != gpus:
        source = [source for source, settings in layers if "gpus" in settings][-1]
        asked = f"{source} asks for {merged['gpus']} ranks"
        raise UsageError(f"{asked}, but the launcher started {gpus}")
    merged = _loaded_sizes(merged) | merged
    draft = RunSpec(**merged)
    data_ids = stated_by(draft.data, "vocab_size")
    if draft.vocab_size is None and data_ids and data_ids > draft.model.vocab_size:
        merged["vocab_size"] = data_ids
    if draft.end_of_text is None and draft.reset_at_documents:
        merged["end_of_text"] = stated_by(draft.data, "end_of_text")
    merged["seq_len"] = draft.model.max_seq_len if draft.seq_len is None else draft.seq_len
    merged["grad_accum"] = _grad_accum(draft)
    merged["global_batch"] = draft.dp * draft.micro_batch * merged["grad_accum"]
    work = {name: merged[name] for name in WORK if merged.get(name) is not None}
    per_step = merged["global_batch"] * merged["seq_len"]
    if work:
        merged["steps"] = steps_of(work, per_step, draft.data)
    spec = RunSpec(**merged)
    values = ((name, bounds, getattr(spec, name)) for name, bounds in BOUNDS.items())
    problems = [bounds.problem(name, v) for name, bounds, v in values if v is not None]
    # A model or a layout of sizes out of bounds is not looked at.
    if problems := list(filter(None, problems)) or refusals(spec):
        raise UsageError("; ".join(problems))
    return spec


def merge(*layers: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """The settings that the layers and the DeepSpeed JSON that they name state, nothing derived but
    the ZeRO stage of an engine that has no stage 0.

    Raises:
        UsageError: a setting that is not known, or a value that it cannot have.
    """
    merged: dict[str, Any] = {}
    paths = [layer["deepspeed_config"] for _, layer in layers if layer.get("deepspeed_config")]
    if paths:
        path = paths[-1]
        layers = ((path, from_deepspeed_json(read_deepspeed_json(Path(path)), path)), *layers)
    for source, settings in layers:
        settings = {name: check_setting(name, value, source) for name, value in settings.items()}
        # Of the batch settings, what this layer says wins over what an earlier one implied.
        if "grad_accum" in settings and "global_batch" not in settings:
            merged.pop("global_batch", None)
        elif not settings.keys().isdisjoint(("global_batch", "micro_batch")) and (
            "global_batch" in merged | settings
        ):
            merged.pop("grad_accum", None)
        if set(WORK) & set(settings):
            for name in WORK:
                merged.pop(name, None)
        merged |= settings
    stages = ENGINES[merged.get("engine", DEFAULTS["engine"])].zero_stages
    if DEFAULTS["zero_stage"] not in stages:
        merged.setdefault("zero_stage", max(stages))
    return merged


def _loaded_sizes(merged: dict[str, Any]) -> dict[str, Any]:
    """The sizes of the weights that are loaded, where no preset is named."""
    folder = Path(merged.get("load") or "")
    if not merged.get("load") or "preset" in merged or not holds_weights(folder):
        return {}
    model = model_of(folder)
    if model.parts and (name := name_of(model, "")):
        return {"preset": name}
    if others := [part for part in model.parts if part != "experts"]:  # presets alone have them
        parts = in_words(others)
        raise UsageError(f"{folder} has {parts}, as no preset has them: it cannot be trained")
    unused = ("rope_theta", "rope_scaling") if model.position != "rope" else ()
    sizes = (name for name in (*MODEL, "experts") if name not in unused)
    return {name: getattr(model, name) for name in sizes}


def _grad_accum(draft: RunSpec) -> int:
    """Micro-batches per dp rank and step, from global_batch where that is what was given."""
    if draft.global_batch is None:
        return 1 if draft.grad_accum is None else draft.grad_accum
    at_once = draft.micro_batch * draft.dp
    split = f"micro_batch {draft.micro_batch} x dp {draft.dp}"
    accum, rest = divmod(draft.global_batch, at_once)
    if rest:
        problem = f"global_batch {draft.global_batch} is not a multiple of"
        raise UsageError(f"{problem} {split} = {at_once}")
    if draft.grad_accum not in (None, accum):
        stated = f"global_batch {draft.global_batch} = {split} x grad_accum {accum}"
        raise UsageError(f"{stated}, but grad_accum {draft.grad_accum} was asked for")
    return accum


def _json(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from error


def add_flags(
    parser: argparse.ArgumentParser, names: Sequence[str] = tuple(RunSpec.__dataclass_fields__)
) -> None:
    """One flag per setting, by default of all; a flag that is not given leaves no trace in the
    namespace."""
    groups = {
        "engine": "what trains",
        "preset": "the model",
        "gpus": "the split (dp = gpus / (tp x cp x pp))",
        "seq_len": "the training",
        "data": "the data",
        "save_interval": "checkpoints",
        "device": "the machine",
    }
    group = parser
    for field in (RunSpec.__dataclass_fields__[name] for name in names):
        if field.name in groups:
            group = parser.add_argument_group(groups[field.name])
        kind, allowed = kind_of(field), field.metadata["allowed"]
        help = field.metadata["help"]
        if field.default is not None:
            help += f" (default: {field.default})"
        how: dict[str, Any] = {"default": argparse.SUPPRESS, "help": help}
        if kind is bool:
            how["action"] = argparse.BooleanOptionalAction
        elif isinstance(allowed, Words):
            how["choices"] = allowed
        else:
            read = _json if is_dataclass(kind) else kind
            how |= {"type": read, "metavar": kind.__name__.upper()}
        group.add_argument("--" + field.name.replace("_", "-"), **how)


def from_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that flags gave, out of a namespace that may hold other things too."""
    return {name: value for name, value in vars(arguments).items() if name in DEFAULTS}
