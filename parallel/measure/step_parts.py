"""Where a step's time goes, on every rank: one stack of regions, and every message counted.

Off unless the run asks for it (`--breakdown`). At every moment one region is open, the innermost,
so the categories add up:

data       making batches (the loop's iterator)
move       handing them to the device
forward    the model's forward pass; what recomputation repeats of it is backward
backward   automatic differentiation, without the communication that happens inside it
optimizer  unscaling, norm, clipping, update, clearing gradients
tp dp pp embedding mixed   *exposed* communication: this thread (on CUDA: the compute stream) was
           blocked in a call or in the wait for one. The process group gives the axis: the ranks of
           tp, dp and pp groups differ in that coordinate alone; `embedding` ties the first and last
           stage's copies; `mixed` spans several axes. Waiting for a slower rank is in it.
ep etp expert_dp   the same, of megatron's groups for experts: tokens to them and back (the ranks of
           ep x etp count as ep), and gradients and weights of those with the same experts.
control    exposed too: barriers, messages of at most 64 bytes (losses, norms, overflow flags), and
           those of a region of that name (counts of an expert's tokens). Here a rank waits for the
           slowest of all.
bubble     blocked in a pipeline's message for longer than it needs to travel (`transfer_s`, the
           best of several, timed before training); a wait up to that is pp communication.
other      the rest: the region that is open when no other is.

On a CPU this is the clock of the thread. On CUDA an event is recorded in the compute stream at
every change of region, and read at the end of a step, when the loop has synchronised as it always
does. Collectives on a stream of their own are exposed only where the compute stream waits for them
inside a call that we see.

Every call that Python makes goes through torch's `ProcessGroup`, so that class is what is wrapped.
C++ callers are not seen: DDP's reducer gets a hook that does, in Python, what it does itself.
calls      collectives entered, and messages sent (receiving one is not a call)
bytes      their payload; wire_bytes: what this rank sends, `wire.wire_bytes`
"""

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from parallel.config.layout import Layout
from parallel.config.run_spec import RunSpec
from parallel.measure import ranges
from parallel.measure.wire import CONTROL_BYTES, wire_bytes
from parallel.record.schema import CATEGORIES, EXPERT_MESSAGE_AXES, MESSAGE_AXES
from parallel.record.writer import BreakdownFile

CALIBRATIONS = 32

# Kind of collective -> (which argument is the payload, ProcessGroup's methods).
_KINDS = {
    "all_reduce": (0, "allreduce allreduce_coalesced"),
    "broadcast": (0, "broadcast"),
    "reduce": (0, "reduce"),
    "all_gather": (
        0,
        "allgather _allgather_base allgather_coalesced allgather_into_tensor_coalesced"
        " all_gather_single all_gather_single_coalesced",
    ),
    "reduce_scatter": (
        1,
        "reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced reduce_scatter_single"
        " reduce_scatter_single_coalesced",
    ),
    "all_to_all": (1, "alltoall alltoall_base all_to_all_single"),
    "gather": (1, "gather"),
    "scatter": (0, "scatter"),
    "send": (0, "send"),
    "recv": (0, "recv"),
    "barrier": (0, "barrier"),
    "end": (0, "_end_coalescing"),  # the work of what a coalescing manager collected for NCCL
}
_CALLS = {name: (kind, at) for kind, (at, names) in _KINDS.items() for name in names.split()}
WAIT = "wait for a pipeline's message"  # a region: its travel is pp, what goes beyond it bubble
_active: "Breakdown | None" = None


def name_group(group: ProcessGroup | None, axis: str) -> None:
    """Counts messages over this group as those of `axis`, whatever its ranks are."""
    if _active is not None and group is not None:
        _active.axis_of_group[group.group_name] = axis


def ddp_hook() -> Callable | None:
    """Returns a communication hook for DistributedDataParallel, or None when no breakdown is on.

    It all-reduces bucket by bucket, as the reducer does without one, but sums: the reducer divides
    while it fills a bucket. A pass of our own would take time, so the engine divides its loss.
    """
    if (breakdown := _active) is None:
        return None

    def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        if bucket.is_last():
            breakdown.enter("dp")  # nothing is left of backward but waiting; left when that is
        return work.get_future().then(lambda future: future.value()[0])

    return hook


def start(spec: RunSpec, device: torch.device, rank: int, folder: Path) -> "Breakdown | None":
    """Begins to measure this rank, where the run asks for it: before the engine is built."""
    global _active
    if not spec.breakdown:
        return None
    _active = Breakdown(spec, device, rank, folder)
    ranges.listeners.append(_active)
    _wrap_process_groups(_active)
    return _active


class Breakdown:
    """One rank's measurement. `lap` closes a step; each iteration line is a row."""

    def __init__(self, spec: RunSpec, device: torch.device, rank: int, folder: Path):
        self.spec, self.layout, self.rank = spec, spec.layout, rank
        experts = bool(spec.model.experts)
        self.axes = MESSAGE_AXES + EXPERT_MESSAGE_AXES if experts else MESSAGE_AXES
        self.file = BreakdownFile(folder, rank, experts)
        self.axis_of_group: dict[str, str] = {}
        self.transfer_s = _transfer_s(spec, device, rank) if self.layout.pp > 1 else 0.0
        self._device, self._cuda = device, device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if self._cuda else None
        # A call that returned -> the region to be in while waiting for it.
        self._region_of: Any = weakref.WeakKeyDictionary()
        self._latest: dict[str, tuple[str, str]] = {}  # group -> kind and axis of its last call
        self._new_window()
        self.forget()

    # --- time ------------------------------------------------------------------------------------

    def _now(self) -> Any:
        """Returns the moment: seconds of the host, or an event in the compute stream."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def enter(self, name: str) -> None:
        """Opens a region; the one around it pauses. Backward runs in a thread of its own on CUDA,
        while the thread that called it is blocked: one stack serves both."""
        self._marks.append((self._stack[-1], self._now()))
        self._stack.append(name)

    def leave(self, name: str) -> None:
        """Closes the innermost region of this name and what was left open inside it."""
        while len(self._stack) > 1:
            self._marks.append((self._stack[-1], self._now()))
            if self._stack.pop() == name:
                return

    def lap(self, step: int, step_s: float) -> None:
        """Closes optimizer step `step` (from 1), `step_s` long by the loop's clock."""
        self._marks.append((self._stack[-1], self._now()))
        self._settle()
        self._elapsed_s += step_s
        self._first = self._first or step
        if step == self.spec.steps or step % self.spec.log_interval == 0:
            self.file.write(self._row(step))
            self._new_window()

    def forget(self) -> None:
        """Leaves out what happened since the last lap: it was not training."""
        self._marks: list[tuple[str, Any]] = []  # what was open until when
        self.messages: list[tuple[str, int, float]] = []  # since `lap`: axis, bytes, sent bytes
        self._stack: list[str] = ["other"]
        self._last = self._now()

    def _settle(self) -> None:
        """Turns the marks and messages of the step into the window's sums."""
        last = self._last
        if self._cuda:
            self._marks[-1][1].synchronize()
        for name, moment in self._marks:
            seconds = last.elapsed_time(moment) / 1000 if self._cuda else moment - last
            if name == WAIT:
                travel = min(seconds, self.transfer_s)
                self._seconds["pp"] += travel
                self._seconds["bubble"] += seconds - travel
            else:
                self._seconds[name] += seconds
            last = moment
        self._marks, self._last = [], last
        for axis, payload, sent in self.messages:
            self._sums[axis, "calls"] += 1
            self._sums[axis, "bytes"] += payload
            self._sums[axis, "wire_bytes"] += sent
        self.messages = []

    def _new_window(self) -> None:
        self._first, self._elapsed_s = 0, 0.0
        self._seconds: dict[str, float] = defaultdict(float)
        self._sums: dict[tuple[str, str], float] = defaultdict(int)

    def _row(self, step: int) -> dict[str, Any]:
        row: dict[str, Any] = {
            "rank": self.rank,
            "first_step": self._first,
            "last_step": step,
            "elapsed_s": self._elapsed_s,
            "transfer_s": self.transfer_s,
        }
        row |= {f"{name}_s": self._seconds[name] for name in {*CATEGORIES, *self.axes}}
        counted = [(axis, sum_) for axis in self.axes for sum_ in ("calls", "bytes", "wire_bytes")]
        return row | {f"{axis}_{sum_}": self._sums[axis, sum_] for axis, sum_ in counted}

    # --- messages --------------------------------------------------------------------------------

    def call(
        self, original: Callable, kind: str, payload_index: int, group: Any, args: Any, kw: Any
    ) -> Any:
        """Makes one of ProcessGroup's calls, counted and timed."""
        if not _trains():
            return original(group, *args, **kw)
        arguments = (*args, *kw.values())
        peer = arguments[1] if kind in ("send", "recv") else None
        axis, n_ranks = self._axis(group, peer), group.size() if peer is None else 2
        if kind == "end":  # of a batch, whose one work stands for the calls before it
            kind, axis = self._latest.pop(group.group_name, (kind, axis))
        else:
            payload = 0 if kind == "barrier" else _nbytes(arguments[payload_index])
            is_small = payload <= CONTROL_BYTES and kind != "all_to_all"  # few tokens chose a rank
            if n_ranks > 1 and (is_small or self._stack[-1] == "control"):
                axis = "control"
            if n_ranks > 1 and kind != "recv":
                self.messages.append((axis, payload, wire_bytes(kind, n_ranks, payload)))
            self._latest[group.group_name] = kind, axis
        with self._within(axis):
            work = original(group, *args, **kw)
        if work is not None and n_ranks > 1:
            moves = kind in ("send", "recv") and axis == "pp"
            self._region_of[work] = WAIT if moves else axis
        return work

    def wait(self, original: Callable, work: Work, args: Any, kw: Any) -> Any:
        region = self._region_of.get(work) if _trains() else None
        with nullcontext() if region is None else self._within(region):
            return original(work, *args, **kw)

    @contextmanager
    def _within(self, region: str) -> Iterator[None]:
        self.enter(region)
        try:
            yield
        finally:
            self.leave(region)

    def _axis(self, group: ProcessGroup, peer: int | None) -> str:
        """Returns the axis of a group, or of a message to rank `peer` of it."""
        if peer is not None:
            return axis_of(self.layout, [self.rank, dist.get_global_rank(group, peer)])
        name = group.group_name
        if name not in self.axis_of_group:
            self.axis_of_group[name] = axis_of(self.layout, dist.get_process_group_ranks(group))
        return self.axis_of_group[name]


def _trains() -> bool:
    """Returns whether this thread trains: the main one, or one of autograd's, which Python did not
    start. A save in the background has threads of Python's, and messages of its own."""
    thread = threading.current_thread()
    return thread is threading.main_thread() or isinstance(thread, threading._DummyThread)


def axis_of(layout: Layout, ranks: Iterable[int]) -> str:
    """Returns the axis along which these ranks differ; `mixed` when there are several. A run that
    is measured or rehearsed has no cp."""
    coords = [layout.coords(rank) for rank in ranks]
    axes = [axis for axis in ("tp", "dp", "pp") if len({place[axis] for place in coords}) > 1]
    if len(axes) > 1:
        return "mixed"
    return axes[0] if axes else "control"


def _nbytes(tensors: Any) -> int:
    """Returns the bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_nbytes(tensor) for tensor in tensors)


def _wrap_process_groups(breakdown: Breakdown) -> None:
    """Has every call of a process group, and every wait for one, counted and timed."""
    for method, (kind, payload_index) in _CALLS.items():
        if original := getattr(ProcessGroup, method, None):
            counted = partial(breakdown.call, original, kind, payload_index)
            setattr(ProcessGroup, method, _method(counted))
    Work.wait = _method(partial(breakdown.wait, Work.wait))


def _method(function: Callable) -> Callable:
    return lambda self, *args, **kw: function(self, args, kw)


def _transfer_s(spec: RunSpec, device: torch.device, rank: int) -> float:
    """Returns the seconds that an activation needs between neighbouring stages: half the best round
    trip.

    All ranks call it, before training. The slower of a middle stage's two neighbours counts.
    """
    layout = spec.layout
    size = 4 if spec.precision == "fp32" else 2
    n_bytes = layout.micro_batch * spec.seq_len * spec.model.hidden * size
    if layout.sequence_parallel:
        n_bytes //= layout.tp
    message = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
    stage, apart = layout.coords(rank)["pp"], layout.tp * layout.dp
    slowest = 0.0
    for first in (0, 1):  # pairs of stages (0, 1), (2, 3), ... and then (1, 2), (3, 4), ...
        leads = stage % 2 == first
        peer = rank + apart if leads else rank - apart
        if not 0 <= peer < layout.world_size:
            continue
        best = float("inf")
        for _ in range(CALIBRATIONS):
            began = time.perf_counter()
            for sends in (leads, not leads):
                dist.send(message, peer) if sends else dist.recv(message, peer)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - began)
        slowest = max(slowest, best / 2)
    return slowest
