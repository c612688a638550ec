"""When one of several nodes, GPUs or ranks is slower than the others: one rule. Torch-free.

What is compared is a share, by which it is slower than what is usual, in the same round or step: so
what slows all alike cancels.
"""

from collections.abc import Collection
from statistics import median

SHARE = 0.1  # it must be slower by more than this ...
SPREADS = 3.0  # ... and by more than so many times the noise of that share
OF_NORMAL = 1.4826  # a standard deviation over a median absolute deviation, of normal values


def spread(values: Collection[float]) -> float:
    """Returns a robust standard deviation, by the median absolute deviation."""
    middle = median(values)
    return OF_NORMAL * float(median(abs(value - middle) for value in values))


def is_slower(share: float, noise: float) -> bool:
    """Returns whether a share, or each one of an array, stands out of its noise, a standard
    deviation."""
    return share > max(SHARE, SPREADS * noise)
