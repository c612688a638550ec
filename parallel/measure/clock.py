"""Time on the device: a lap ends when the device has finished what was asked of it.

One wait at the end of a step, which reads its loss and gradient norm there in any case; within a
step nothing waits for a clock.
"""

import time

import torch


class Clock:
    """Laps in seconds. On CUDA each lap synchronises; on a CPU nothing runs asynchronously."""

    def __init__(self, device: torch.device):
        self._device = device
        self._last = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap (or since the clock was made)."""
        now = self._now()
        elapsed, self._last = now - self._last, now
        return elapsed
