"""Random states of torch in a process: seeded at the start, saved as bytes, and put back.

Nothing draws random numbers after the start: there is no dropout, and the order of the data depends
on (seed, step) alone. The states are saved so that code that does draw resumes correctly too.
"""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_random(seed: int) -> None:
    """Start every random state of this process from a seed."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def random_states(tracker: Any) -> dict[str, Tensor]:
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    if tracker is not None:
        # Sorted, so that the same states are the same bytes in a run that was resumed.
        named = sorted(tracker.get_states().items())
        states |= {f"tracker/{name}": state for name, state in named}
    return states


def set_random_states(states: dict[str, Tensor], tracker: Any) -> None:
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    if tracker is not None:
        prefix = "tracker/"
        named = {n.removeprefix(prefix): s for n, s in states.items() if n.startswith(prefix)}
        tracker.set_states(named)
