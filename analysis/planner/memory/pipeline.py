"""What the stages of a pipeline have: layers, ends, and micro-batches in flight.

[N] Narayanan et al. SC'21, arXiv 2104.04473 (schedules). [K] Korthikanti et al. 2022, arXiv
2205.05198 (section 4).
"""

import math
from functools import cache
from typing import NamedTuple

from analysis.planner.columns import Columns, Step


class ByStage(NamedTuple):
    """A number of the first, the fullest middle and the last stage; arrays of columns."""

    first: float
    middle: float
    last: float


class Chunk(NamedTuple):
    """A model chunk: its layers, and those of them without experts."""

    layers: float
    dense: float


class InFlight(NamedTuple):
    """What is between forward and backward on a stage: micro-batches, as if its chunks were equal;
    layers, those of them without experts, and micro-batches of its first chunk."""

    micro_batches: float
    layers: float
    dense: float
    in_first_chunk: int


class Stage(NamedTuple):
    """A pipeline stage: its layers, those of them without experts, what is in flight at the moments
    at which that may be the most, and whether it has the embedding, and the output layer. At the
    first of the moments the model's last chunk works."""

    layers: float
    dense: float
    moments: tuple[InFlight, ...]
    has_embedding: bool
    has_output: bool


def stages(step: Step) -> list[Stage]:
    """Returns the first stage, the middle ones that may be the fullest, and the last, of those that
    a pipeline has. A middle stage holds no less than the next one if it has no layers without
    experts where others have them."""
    end = step.pp - 1
    candidates = [_stage(step, 0)]
    for number in range(1, end):
        candidates.append(_stage(step, number))
        if not (step.experts and candidates[-1].dense):
            break  # the next middle stages have as many layers, and fewer micro-batches in flight
    if end:
        candidates.append(_stage(step, end))
    return candidates


def _stage(step: Step, number: int) -> Stage:
    """Returns a stage by its number, from 0."""
    parts = chunks(step, number)
    layers, dense = (sum(sizes) for sizes in zip(*parts, strict=True))
    moments = _moments(step, number, parts)
    return Stage(layers, dense, moments, number == 0, number == step.pp - 1)


def chunks(step: Step, number: int) -> tuple[Chunk, ...]:
    """Returns the chunks of a stage: chunk c of stage r is number c pp + r of the model. Where the
    embedding or the logits count as a layer, it is one of the model's first or last chunk."""
    pp, vpp, cut = step.pp, step.vpp, stage_layers(step)
    embedding = 1 if _has_lighter_chunk(step, cut.first) else 0  # in layers
    logits = 1 if _has_lighter_chunk(step, cut.last) else 0
    # Layers of a chunk of the first stage, of middle ones and of the last, with these.
    first = (cut.first + embedding) / vpp
    middle = cut.middle / vpp
    last = (cut.last + logits) / vpp
    if number == 0:
        sizes = [first] * vpp
    else:
        sizes = [last if number == pp - 1 else middle] * vpp
    if number == 0:
        sizes[0] -= embedding
    if number == pp - 1:
        sizes[-1] -= logits
    if not step.experts:
        return tuple(Chunk(layers, layers) for layers in sizes)
    round_layers = first + (pp - 2) * middle + last  # of one chunk of every stage
    earlier_stages = first + (number - 1) * middle if number else 0.0  # layers in the same round
    parts = []
    for chunk, layers in enumerate(sizes):
        model_layers = chunk * round_layers + earlier_stages  # of the model, before this chunk
        if chunk or number:
            model_layers -= embedding
        dense = min(max(step.dense_layers - model_layers, 0.0), layers)
        parts.append(Chunk(layers, dense))
    return tuple(parts)


def _moments(step: Step, number: int, parts: tuple[Chunk, ...]) -> tuple[InFlight, ...]:
    """Returns the moments of a stage with these chunks.

    1F1B: pp - r micro-batches on stage r [N 2.2]; in DeepSpeed two or more
    (TrainSchedule.num_pipe_buffers).
    """
    if step.vpp > 1:
        return _interleaved(step.pp, step.n_micro, number, parts)
    ahead = step.pp - number
    if step.deepspeed and step.pp > 1:
        ahead = max(ahead, 2)
    ahead = min(ahead, step.n_micro)
    ((layers, dense),) = parts
    return (InFlight(ahead, ahead * layers, ahead * dense, ahead),)


@cache
def _interleaved(
    pp: int, n_micro: int, number: int, parts: tuple[Chunk, ...]
) -> tuple[InFlight, ...]:
    """Returns the moments of a stage of an interleaved pipeline between which what is in flight
    changes evenly, as megatron-core's schedules.py has them.

    Stage r runs (vpp - 1) g + 2 (pp - r - 1) forwards, then a forward and a backward in turn: 1 +
    (pp - 1) / (pp vpp) times pp micro-batches on the first stage [K 4]. Each chunk has a group of g
    micro-batches before the next has it, backward in reverse; g is pp or, where pp does not divide
    them, all micro-batches (microbatch_group_size_per_vp_stage).
    """
    vpp = len(parts)
    group = n_micro if n_micro % pp else pp
    period, total = group * vpp, n_micro * vpp
    ahead = min((vpp - 1) * group + 2 * (pp - number - 1) + 1, total)
    last = min(total - ahead, period)  # after a period all is as before
    turns = {*range(0, last, group), *range(-ahead % group, last, group), last}  # of backwards

    def passed(tasks: int, chunk: int) -> int:
        """Returns the micro-batches of a chunk among the first so many forwards."""
        rounds, tasks_of_round = divmod(tasks, period)
        return rounds * group + min(max(tasks_of_round - chunk * group, 0), group)

    moments = []
    for backwards in sorted(turns):
        flying = [passed(ahead + backwards, c) - passed(backwards, vpp - 1 - c) for c in range(vpp)]
        layers = sum(n * chunk.layers for n, chunk in zip(flying, parts, strict=True))
        dense = sum(n * chunk.dense for n, chunk in zip(flying, parts, strict=True))
        moments.append(InFlight(sum(flying) / vpp, layers, dense, flying[0]))
    return tuple(dict.fromkeys(moments))


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
        cut = min(math.ceil(share), layers)
        last_begins = min(math.ceil(share * (pp - 1)), layers)
        return ByStage(cut, cut, layers - last_begins)
    most = math.ceil(layers / pp)
    if layers % pp == 0:
        return ByStage(most, most, most)
    if _ends_count(step):
        return ByStage(most - 1, most, most - 1)
    return ByStage(most, most, most - 1)


def stages_of(steps: Columns) -> ByStage:
    """Returns the layers of the stages of every row."""
    return ByStage(*steps.each(stage_layers).T)


def layer_numbers(step: Step) -> float:
    """Returns the weights of one layer's matrices, whole: h (2 a d + 2 k d) + 2 h f, or 3 h f with
    a gate; 12 h^2 for a GPT."""
    heads = 2.0 * step.head_dim * (step.heads + step.kv_heads)
    return step.hidden * (heads + step.ffn * (2.0 + step.glu))


def _ends_count(step: Step) -> bool:
    """Returns whether embedding and logits count as a layer each when stages are cut."""
    return step.layers % step.pp != 0 and (step.layers + 2) % step.pp == 0


def _has_lighter_chunk(step: Step, layers: float) -> bool:
    """Returns whether one chunk of an end stage has a layer less than its others, because the
    embedding or the logits take that layer's place. layers: of the whole stage."""
    if step.vpp == 1:
        return False
    # Where stages are stated, by the layers that vpp does not divide; else by the BLOOM rule.
    return layers % step.vpp != 0 if step.first_layers else _ends_count(step)
