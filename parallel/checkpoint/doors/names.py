"""What others call our parameters, and how theirs become ours.

A dialect gives for a parameter of ours the ways in which it may be stored; the dialect is taken in
which all are found.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from base.errors import UsageError
from models.config import GPTConfig, parameter_shapes
from models.gpt import WITH_VOCABULARY
from models.hf_config import hugging_face_names
from models.hf_weights import differing, from_hugging_face
from models.megatron_names import MEGATRON_LAYER, MEGATRON_TOP

Shape = tuple[int, ...]


def _half(index: int, parts: list[Tensor]) -> Tensor:
    """Returns one half of a gated model's first linear layer: the gate (0) or up (1)."""
    return parts[0].chunk(2)[index]


class Parts(NamedTuple):
    """The tensors of another program that make one parameter of ours.

    join: makes our tensor of theirs. layer: the index into a tensor that stacks all layers.
    """

    names: tuple[str, ...]
    join: Callable[[list[Tensor]], Tensor] = itemgetter(0)
    layer: int | None = None


def _ours(config: GPTConfig, name: str) -> Iterator[Parts]:
    """Yields our own way to store a parameter: under its name."""
    yield Parts((name,))


def _hugging_face(config: GPTConfig, name: str) -> Iterator[Parts]:
    """Yields the way in which transformers stores a parameter of ours."""
    yield Parts(hugging_face_names(config, name), partial(from_hugging_face, config, name))


def megatron(form: str, config: GPTConfig, name: str) -> Iterator[Parts]:
    """Yields megatron-core's ways to store a parameter of ours. form: "stacked", all layers in one
    tensor; "layers"; or "hybrid", where attention and MLP are layers of their own."""
    if not name.startswith("blocks."):
        yield from (Parts((theirs,)) for theirs, ours in MEGATRON_TOP.items() if ours == name)
        return
    _, index, inner = name.split(".", 2)
    number = int(index)
    is_mlp = inner.startswith(("norm2", "mlp"))
    join = itemgetter(0)
    if inner.startswith(("mlp.gate", "mlp.up")) and config.gated:
        join = partial(_half, int(inner.startswith("mlp.up")))
        inner = inner.replace("gate", "up")
    layer_number = {"stacked": "", "layers": f"{number}.", "hybrid": f"{2 * number + is_mlp}."}
    layer = number if form == "stacked" else None
    for theirs in (theirs for theirs, ours in MEGATRON_LAYER.items() if ours == inner):
        yield Parts((f"decoder.layers.{layer_number[form]}{theirs}",), join, layer)


_DIALECTS = [_ours, _hugging_face]
_DIALECTS += [partial(megatron, form) for form in ("stacked", "layers", "hybrid")]
_REPEATED = ("lm_head.weight", "output_layer.weight", "output.weight")  # where it is tied, too


class Named:
    """The parameters of a model among others' tensors, in whichever dialect they are.

    shapes: others' names -> shapes. What stands before all names (`module.`) is found.
    repeated: what they call the output layer, which must be the embedding, as it is tied.

    Raises:
        UsageError: they are not this model; it names the first three that differ.
    """

    def __init__(self, config: GPTConfig, shapes: Mapping[str, Shape], where: object):
        self.config, wanted = config, parameter_shapes(config)
        tried = [self._find(dialect, shapes, wanted) for dialect in _DIALECTS]
        self.prefix, ways_by_name = max(tried, key=lambda each: len(each[1]))
        self.parts = {name: ways[0] for name, ways in ways_by_name.items()}

        def empty(name: str, layer: int | None) -> Tensor:
            shape = shapes[self.prefix + name][layer is not None :]
            return torch.empty(shape, device="meta")

        stored = {name: tuple(self.tensor(name, empty).shape) for name in self.parts}
        used = {
            self.prefix + name
            for ways in ways_by_name.values()
            for parts in ways
            for name in parts.names
        }
        self.repeated = [n for n in _REPEATED if config.tied and self.prefix + n in shapes]
        used |= {self.prefix + name for name in self.repeated}
        # What no parameter of ours uses is a difference, too.
        stored |= {n: shapes[n] for n in shapes if n.startswith(self.prefix) and n not in used}
        if problems := differing(stored, wanted):
            raise UsageError(f"{where} does not hold this model: {problems}")

    def _find(
        self, dialect: Callable, shapes: Mapping[str, Shape], wanted: Mapping[str, Shape]
    ) -> tuple[str, dict[str, list[Parts]]]:
        """Returns the prefix of all names in a dialect, and those ways to store each of our
        parameters that the folder has."""
        try:
            ways_by_name = {name: list(dialect(self.config, name)) for name in wanted}
        except UsageError:  # no class of Hugging Face's has this model
            return "", {}
        (first,) = ways_by_name["embedding.word.weight"][0].names
        prefixed = (name for name in shapes if f".{name}".endswith(f".{first}"))
        prefix = next(prefixed, first).removesuffix(first)

        def stored(parts: Parts) -> bool:
            """Returns whether the folder has all tensors of this way to store a parameter."""
            theirs = [shapes.get(prefix + name) for name in parts.names]
            return all(theirs) and (parts.layer is None or theirs[0][0] == self.config.n_layer)

        stored_ways = {name: list(filter(stored, ways)) for name, ways in ways_by_name.items()}
        return prefix, {name: ways for name, ways in stored_ways.items() if ways}

    def tensor(self, name: str, read: Callable[[str, int | None], Tensor]) -> Tensor:
        """Returns a parameter of ours in fp32, without the rows that pad the vocabulary. read:
        returns a tensor of theirs, or a layer of it, by its name without `prefix`."""
        parts = self.parts[name]
        value = parts.join([read(part, parts.layer) for part in parts.names]).float()
        return value[: self.config.vocab_size] if name in WITH_VOCABULARY else value
