"""The last norm, the output layer's logits, s b V / t values, and the loss.

[K] Korthikanti et al. 2022, arXiv 2205.05198, section 4.3, counts logits in fp32 alone.
"""

from analysis.planner.columns import Step


def logits(step: Step) -> float:
    """Returns the bytes of the last norm and of the logits when backward begins.

    Logits are there in compute precision, in fp32 and, as published peaks look, as a gradient,
    which a loss compiled into FSDP2's model does not hold. PyTorch's own loss holds three in fp32,
    Transformer Engine's two in compute precision.
    """
    edge = 2.0 * step.tokens * step.hidden * step.width / step.sequence_cut
    values = step.tokens * step.vocab / step.tp
    if step.plain:
        return edge + values * 12.0
    if step.te_loss:
        return edge + values * 2.0 * step.width
    if step.fsdp2:
        return edge + values * (step.width + 4.0)
    return edge + values * (2.0 * step.width + 4.0)


def output_goes_back(step: Step) -> float:
    """Returns the bytes of the last norm, of the logits, and of the gradients of Megatron core's
    output layer (tensor_parallel/layers.py).

    Its loss has the logits in 16 bits and in fp32, Transformer Engine's writes the gradient in
    their place. The output layer's own gradient is there in 16 bits, empty or not, and the gathered
    and the scattered gradient of its input. Sequence parallelism gathers in a buffer that stays.
    """
    cut = step.sequence_cut
    inputs, values = 2.0 * step.tokens * step.hidden, step.tokens * step.vocab / step.tp
    gathers = inputs if cut > 1 else 0.0
    back = 2.0 * values + 2.0 * step.vocab * step.hidden / step.tp + inputs + gathers / cut
    loss = (2.0 if step.te_loss else 6.0) * values
    return 2.0 * inputs / cut + max(loss, back) + gathers
