"""What engines allocate beside states and activations."""

from analysis.planner.columns import Step
from analysis.planner.memory.pipeline import Stage


def keys_and_values(step: Step) -> float:
    """Returns the bytes of the keys and values of one layer and whole sequences, 2 b s k d / t
    numbers; of columns, arrays."""
    return 2.0 * step.micro_batch * step.seq * step.kv_heads * step.head_dim / step.tp * step.width


def received(step: Step) -> float:
    """Returns the bytes of keys, values and their gradients that a context-parallel rank holds of
    the others': a ring (Liu et al. 2023, arXiv 2310.01889) holds one rank's part beside its own."""
    return 2.0 * keys_and_values(step) / step.cp if step.cp > 1 else 0.0


def masks(step: Step, stage: Stage) -> float:
    """Returns the bytes of the masks of documents, b s^2 numbers of each micro-batch in flight."""
    if not step.documents:
        return 0.0
    return stage.moments[0].micro_batches * step.micro_batch * step.seq**2.0 * step.width


def buckets(step: Step) -> float:
    """Returns the bytes of the buckets through which DeepSpeed's ZeRO reduces gradients in
    backward, allocated whole, as wide as the sums but for stage 2's. Its optimizer for bf16 with
    fp32 gradients has none at stage 1 without offload; Megatron works in place."""
    if not (step.deepspeed and step.zero_stage):
        return 0.0
    if step.grad_width > step.width and step.zero_stage == 1 and not step.offload:
        return 0.0
    return step.bucket * (step.width if step.zero_stage == 2 else step.grad_width)


def workspaces(step: Step) -> float:
    """Returns the bytes of cuBLAS' and Transformer Engine's workspaces, which PyTorch allocates."""
    return step.workspaces * 2.0**20
