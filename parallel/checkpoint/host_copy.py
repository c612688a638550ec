"""A rank's copy of what it saves, in host memory: a thread writes it while training goes on."""

from dataclasses import replace

import torch
from torch.cuda._pin_memory_utils import pin_memory
from torch.optim.optimizer import register_optimizer_step_pre_hook

from parallel.checkpoint.contents import Piece


class HostCopy:
    """Host memory that holds a copy of what a rank saves; every save uses it again.

    On a GPU it is pinned. A stream of its own fills it while forward and backward run; every
    engine's optimizer is one of torch's, and waits for it before it changes the state.
    """

    def __init__(self, device: torch.device):
        self._memory, self._live = torch.empty(0), []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream:
            register_optimizer_step_pre_hook(
                lambda *_: torch.cuda.current_stream().wait_stream(self._stream)
            )

    def of(self, pieces: list[Piece]) -> list[Piece]:
        """Returns copies of the pieces in this memory, in place of an earlier copy. They are whole
        when `finish` returns."""
        self._live = [tensor for piece in pieces for tensor in piece.tensors.values()]
        sizes = [tensor.numel() for tensor in self._live]
        if len(self._memory) != sum(sizes):
            self._memory = torch.empty(sum(sizes), dtype=torch.float32)
            if self._stream:  # not pin_memory=True, which takes up to twice: a power of two
                pin_memory(self._memory.data_ptr(), self._memory.nbytes)
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())
        copies = self._memory.split(sizes)
        with torch.cuda.stream(self._stream):
            for copy, tensor in zip(copies, self._live, strict=True):
                copy.copy_(tensor, non_blocking=True)
        remaining = iter(copies)
        return [replace(p, tensors={kind: next(remaining) for kind in p.tensors}) for p in pieces]

    def finish(self) -> None:
        """Waits until the copy is whole. Until then the copied tensors stay in the GPU's memory."""
        if self._stream:
            self._stream.synchronize()
        self._live = []
