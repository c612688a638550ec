"""Bytes of a card that do not follow from how a model is split: AdamW's of a parameter, what
libraries hold, what is left free."""

from base.units import GIB

# No formula gives these; published peaks do (docs/planner-accuracy.md). library_gb: CUDA context,
# NCCL's buffers, workspaces. fragments: factor on what comes and goes in a step, for the
# allocator's fragments.
CONSTANTS = {"library_gb": 4.2, "fragments": 1.05}
MARGIN = 0.06  # share of a card that is left free, because the bytes are estimates


def adam_bytes(width: int) -> float:
    """Returns the bytes of AdamW's state of one parameter whose weight has `width` bytes.

    They are two moments in fp32 and, in mixed precision, a master weight (Rajbhandari et al. 2020,
    section 3.1).
    """
    return 8.0 if width == 4 else 12.0


def usable(card_gb: float, margin: float = MARGIN) -> float:
    """Returns the bytes that a step may take on a card of card_gb GiB."""
    return card_gb * GIB * (1.0 - margin)


def taken(tensors: float, coming_and_going: float) -> float:
    """Returns the bytes that tensors take on a card: with the allocator's fragments of those that
    do not stay, the CUDA context and NCCL's buffers."""
    fragments = (CONSTANTS["fragments"] - 1.0) * coming_and_going
    return tensors + fragments + CONSTANTS["library_gb"] * GIB
