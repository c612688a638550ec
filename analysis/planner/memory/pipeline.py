"""What the stages of a pipeline have: layers, ends, and micro-batches in flight.

[N] Narayanan et al. SC'21, arXiv 2104.04473 (schedules). [K] Korthikanti et al. 2022, arXiv
2205.05198 (section 4).
"""

import math
from typing import NamedTuple

from analysis.planner.columns import Columns, Step


class ByStage(NamedTuple):
    """Of the first, the fullest middle and the last stage of a pipeline; arrays of columns."""

    first: float
    middle: float
    last: float


class Stage(NamedTuple):
    """A pipeline stage: its layers, those of them without experts, the micro-batches' worth of them
    that it holds at its peak, and whether it has the embedding, and the output layer."""

    layers: float
    dense: float
    in_flight: float
    has_embedding: bool
    has_output: bool


def stages(step: Step) -> list[Stage]:
    """Returns the first, the fullest middle and the last stage, of those that a pipeline has."""
    cut, flying = stage_layers(step), in_flight(step)
    before = ByStage(0, cut.first if step.pp > 1 else 0, step.layers - cut.last)
    dense = cut
    if step.experts:
        dense = ByStage(
            *(
                min(max(step.dense_layers - begun, 0), layers)
                for begun, layers in zip(before, cut, strict=True)
            )
        )
    alone = step.pp == 1
    first = Stage(cut.first, dense.first, flying.first, True, alone)
    middle = Stage(cut.middle, dense.middle, flying.middle, False, False)
    last = Stage(cut.last, dense.last, flying.last, alone, True)
    return [first] if alone else [first, last] if step.pp == 2 else [first, middle, last]


def stage_layers(step: Step) -> ByStage:
    """Returns the layers of the stages: those that are stated. The middle stages share the others,
    the fullest of them has the fraction of a layer. Below pp 3 the middle's number is that of the
    fullest stage.

    Elsewhere: if pp divides the layers, all stages are equal. If it divides layers + 2, embedding
    and logits count as a layer each (the BLOOM rule). Otherwise the first stages have one layer
    more (DeepSpeed's partition_uniform).

    nanotron's build_model: a stage ends with the layer at which the parameters of all layers until
    there reach its share of the parameters of layers and output layer.
    """
    layers, pp = step.layers, step.pp
    if step.first_layers:
        first, last = step.first_layers, step.last_layers
        middle = math.ceil((layers - first - last) / (pp - 2)) if pp > 2 else max(first, last)
        return ByStage(first, middle, last)
    if step.nanotron:
        share = (layers + step.vocab * step.hidden / layer_numbers(step)) / pp  # in layers
        begun, cut = min(math.ceil(share * (pp - 1)), layers), min(math.ceil(share), layers)
        return ByStage(cut, cut, layers - begun)
    most = math.ceil(layers / pp)
    if layers % pp == 0:
        return ByStage(most, most, most)
    if _ends_count(step):
        return ByStage(most - 1, most, most - 1)
    return ByStage(most, most, most - 1)


def stages_of(x: Columns) -> ByStage:
    """Returns the layers of the stages of every row."""
    return ByStage(*x.each(stage_layers).T)


def layer_numbers(step: Step) -> float:
    """Returns the weights of one layer's matrices, whole: h (2 a d + 2 k d) + 2 h f, or 3 h f with
    a gate; 12 h^2 for a GPT."""
    heads = 2.0 * step.head_dim * (step.heads + step.kv_heads)
    return step.hidden * (heads + step.ffn * (2.0 + step.glu))


def _ends_count(step: Step) -> bool:
    """Whether embedding and logits count as a layer each when stages are cut."""
    return step.layers % step.pp != 0 and (step.layers + 2) % step.pp == 0


def _has_lighter_chunk(step: Step, layers: float) -> bool:
    """Whether the chunks of a stage with the embedding or the logits, of so many layers, are not
    equal, because these take a layer's place in one of them."""
    if step.vpp == 1:
        return False
    return layers % step.vpp != 0 if step.first_layers else _ends_count(step)


def in_flight(step: Step) -> ByStage:
    """Returns the micro-batches' worth of a stage's layers that the stages hold at their peak.

    1F1B: min(pp, n_micro) and 1 (2 in DeepSpeed, TrainSchedule.num_pipe_buffers). Interleaved:
    1 + (pp - 1) / (pp vpp) times pp on the first [K 4], where micro-batches go in groups of pp; if
    pp does not divide them, they are one group (microbatch_group_size_per_vp_stage).
    """
    pp, vpp, n_micro = step.pp, step.vpp, step.n_micro
    first, last = float(pp), 1.0
    if vpp > 1:
        group = n_micro if n_micro % pp else pp
        last = (group * (vpp - 1.0) + 1.0) / vpp
        first = last + 2.0 * (pp - 1.0) / vpp
        cut = stage_layers(step)
        if _has_lighter_chunk(step, cut.last):
            chunk = (cut.last + 1.0) / vpp  # the logits take a layer's place in the last one
            held = group * (vpp - 1.0) * chunk + chunk - 1.0
            last = held / max(chunk * vpp - 1.0, 1.0)
        if _has_lighter_chunk(step, cut.first):
            deepest = 2.0 * pp - 1.0  # micro-batches of the first chunk, which has the embedding
            chunk = (cut.first + 1.0) / vpp
            held = (group * (vpp - 1.0) + deepest) * chunk - deepest
            first = held / max(cut.first, 1.0)
    if step.deepspeed and pp > 1:
        last = max(last, 2.0)
    first, last = min(first, n_micro), min(last, n_micro)
    return ByStage(first, max(first - 1.0, last), last)
