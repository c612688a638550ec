"""From what users say to a checked run: layers of settings, and flags.

Values are taken from, each overriding the one before: the defaults of `RunSpec`, a DeepSpeed JSON,
the study file, flags. Torch-free.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

from base.bounds import Words, checked, kind_of, values_of
from base.errors import UsageError
from models.config import OVERRIDES, in_words, name_of
from models.hf_config import holds_weights, model_of
from parallel.config.data_files import stated_by
from parallel.config.deepspeed_json import from_deepspeed_json, read_deepspeed_json
from parallel.config.duration import WORK, steps_of
from parallel.config.engine_abilities import ENGINES
from parallel.config.layout import Layout
from parallel.config.refusals import refusals
from parallel.config.run_spec import DEFAULTS, SETTINGS, RunSpec, assembled

COMMAND_LINE = "command line"  # the source of settings that flags gave: they are named as flags


def check_setting(name: str, value: Any, source: str) -> Any:
    """Returns `value` in the setting's type, and refuses it where the setting cannot have it."""
    if name not in SETTINGS:
        raise UsageError(f"{source}: unknown setting {name!r}; known: {', '.join(SETTINGS)}")
    if value is None and DEFAULTS[name] is None:
        return None
    flag = "--" + name.replace("_", "-")
    return checked(SETTINGS[name], value, flag if source == COMMAND_LINE else f"{source}: {name}")


def resolve(*layers: tuple[str, dict[str, Any]], gpus: int | None = None) -> RunSpec:
    """Returns a checked RunSpec, merged from (source, settings) layers: the later one overrides.

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
    draft = assembled(merged)
    data_ids = stated_by(draft.data, "vocab_size")
    if "vocab_size" not in draft.overrides and data_ids and data_ids > draft.model.vocab_size:
        merged["vocab_size"] = data_ids
    if draft.end_of_text is None and draft.reset_at_documents:
        merged["end_of_text"] = stated_by(draft.data, "end_of_text")
    merged["seq_len"] = draft.model.max_seq_len if draft.seq_len is None else draft.seq_len
    merged["grad_accum"] = _grad_accum(merged, draft.layout)
    spec = assembled(merged)
    work = {name: merged[name] for name in WORK if merged.get(name) is not None}
    if work:
        spec = replace(spec, steps=steps_of(work, spec.tokens_per_step, spec.data))
    for name in ("steps", "global_batch"):  # which may follow from settings within their bounds
        checked(SETTINGS[name], spec.value(name), name)
    if problems := refusals(spec):
        raise UsageError("; ".join(problems))
    return spec


def merge(*layers: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the settings that the layers and the DeepSpeed JSON that they name state, nothing
    derived but the ZeRO stage of an engine that has no stage 0."""
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
        if "megatron" in settings:  # each option is a setting of its own
            settings["megatron"] = merged.get("megatron", {}) | settings["megatron"]
        if set(WORK) & set(settings):
            for name in WORK:
                merged.pop(name, None)
        merged |= settings
    stages = ENGINES[merged.get("engine", DEFAULTS["engine"])].zero_stages
    if DEFAULTS["zero_stage"] not in stages:
        merged.setdefault("zero_stage", max(stages))
    return merged


def merge_tables(
    kind: type, first: dict[str, Any], *layers: tuple[str, dict[str, Any]]
) -> dict[str, Any]:
    """Returns the values of a table that a site, a study and a run may each give a part of, checked
    as those of the dataclass `kind`: a later text or number wins, later names of a table win, and
    lists are added to the earlier ones."""
    merged = dict(first)
    for source, table in layers:
        for name, value in values_of(kind, table, source).items():
            if isinstance(value, tuple):
                value = (*merged.get(name, ()), *value)
            elif isinstance(value, dict):
                value = merged.get(name, {}) | value
            merged[name] = value
    return merged


def _loaded_sizes(merged: dict[str, Any]) -> dict[str, Any]:
    """Returns the sizes of the weights that are loaded, where no preset is named."""
    folder = Path(merged.get("load") or "")
    if not merged.get("load") or "preset" in merged or not holds_weights(folder):
        return {}
    model = model_of(folder)
    if model.parts and (name := name_of(model, "")):
        return {"preset": name}
    if parts := [name for name in model.parts if name != "experts"]:  # presets alone have them
        words = in_words(parts)
        raise UsageError(f"{folder} has {words}, as no preset has them: it cannot be trained")
    unused = ("rope_theta", "rope_scaling") if model.position != "rope" else ()
    sizes = (name for name in OVERRIDES if name not in unused)
    return {name: getattr(model, name) for name in sizes}


def _grad_accum(settings: dict[str, Any], layout: Layout) -> int:
    """Returns the micro-batches per dp rank and step, from global_batch where that was given."""
    batch, stated = settings.get("global_batch"), settings.get("grad_accum")
    if batch is None:
        return 1 if stated is None else stated
    at_once = layout.micro_batch * layout.dp
    split = f"micro_batch {layout.micro_batch} x dp {layout.dp}"
    accum, remainder = divmod(batch, at_once)
    if remainder:
        raise UsageError(f"global_batch {batch} is not a multiple of {split} = {at_once}")
    if stated not in (None, accum):
        follows = f"global_batch {batch} = {split} x grad_accum {accum}"
        raise UsageError(f"{follows}, but grad_accum {stated} was asked for")
    return accum


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from error


def _option(text: str) -> dict[str, Any]:
    """Returns {KEY: VALUE} of KEY=VALUE, whose value is JSON, or else text."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return {name: json.loads(value)}
    except ValueError:
        return {name: value}


class _Option(argparse.Action):
    """The action of a flag that may be repeated: its options come together in one table."""

    def __call__(self, _: Any, namespace: Any, option: Any, __: Any = None) -> None:
        setattr(namespace, self.dest, getattr(namespace, self.dest, {}) | option)


def add_flags(parser: argparse.ArgumentParser, names: Sequence[str] = tuple(SETTINGS)) -> None:
    """Adds one flag per setting, by default for all of them. A flag that is not given leaves no
    trace in the namespace."""
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
    for name in names:
        setting = SETTINGS[name]
        if name in groups:
            group = parser.add_argument_group(groups[name])
        kind, allowed = kind_of(setting), setting.metadata["allowed"]
        help = setting.metadata["help"]
        if DEFAULTS[name] not in (None, {}):
            help += f" (default: {DEFAULTS[name]})"
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": help}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif kind is dict:
            options |= {"action": _Option, "type": _option, "metavar": "KEY=VALUE"}
        elif isinstance(allowed, Words):
            options["choices"] = allowed
        else:
            read = _json if is_dataclass(kind) else kind
            options |= {"type": read, "metavar": kind.__name__.upper()}
        group.add_argument("--" + name.replace("_", "-"), **options)


def from_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings that flags gave, out of a namespace that may hold other things too."""
    return {name: value for name, value in vars(arguments).items() if name in DEFAULTS}
