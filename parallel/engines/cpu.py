"""Training on a CPU: keep the memory that a step frees, and let megatron-core run with gloo.

megatron-core assumes CUDA in a handful of places. Each patch below redirects one of them and says
why; none changes what is computed. Call `import_megatron()` before the first import of anything
under `megatron`. The patches are applied only where torch sees no GPU.
"""

import collections
import contextlib
import ctypes
import functools
import os
import platform
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _device

FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "as_tensor")
_TYPE_NAMES = {torch.float32: "Float", torch.bfloat16: "BFloat16", torch.float16: "Half"}
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # what mallopt(3) sets


def keep_freed_memory() -> bool:
    """Takes large blocks from the heap from now on and never shrinks it. Returns whether it could:
    without glibc it cannot.

    By default glibc maps every large block anew and unmaps it when it is freed. Each step's
    activations and gradients are then fresh pages that the kernel must clear again: on one core a
    sixth of the time of a GPT-2 124M step of 512 tokens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, -1))


def share_of_cores(gather: Callable[[Any], list[Any]]) -> int:
    """Returns how many cores this rank may keep busy: ranks that may use the same cores of a host
    share them equally. All ranks call it. gather: takes a rank's value, returns those of all.
    """
    cores = sorted(os.sched_getaffinity(0))
    host_and_cores = (platform.node(), cores)
    return max(1, len(cores) // gather(host_and_cores).count(host_and_cores))


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Leaves functions as they are that torch.compile decorates in this block.

    The decorator loads the inductor: a third of the seconds that a library takes to import.
    """
    compiler = torch.compile
    torch.compile = lambda function=None, **_: function or (lambda undecorated: undecorated)
    try:
        yield
    finally:
        torch.compile = compiler


def import_megatron(compiled: bool = True) -> None:
    """Imports megatron.core, and patches it first when there is no GPU. Later calls do nothing.

    compiled: whether torch.compile may fuse its element-wise functions on a GPU.
    """
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        patch()
    # Its fused element-wise functions are decorated; on a CPU they would later want a C++ compiler.
    decorated = uncompiled() if on_cpu or not compiled else contextlib.nullcontext()
    with decorated, warnings.catch_warnings():
        # It warns that Transformer Engine is missing; kernels.py says so, once, itself.
        warnings.simplefilter("ignore")
        import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
    import megatron.core.transformer.moe.moe_utils as moe_utils

    # 0.16 asks for it where Transformer Engine is, and gives it no value where that is not.
    vars(moe_utils).setdefault("te_general_gemm", None)
    import megatron.core.transformer.multi_latent_attention as latent

    # 0.16 takes the mocks that it has of Transformer Engine's layers for these.
    latent.HAVE_TE = latent.HAVE_TE and isinstance(latent.TELinear, type)
    if on_cpu:
        import megatron.core.tensor_parallel.random as random

        # torch queues such calls until CUDA starts, which here is never.
        random._lazy_call = lambda call, **_: call()
        import megatron.core.transformer.moe.token_dispatcher as dispatcher

        # Numbers of tokens become NumPy's when they leave a GPU, and all-to-all wants them so.
        dispatcher.maybe_move_tensor_to_cpu = _as_from_gpu


@functools.cache
def patch() -> None:
    """Applies the patches, once per process."""
    # `device=torch.cuda.current_device()` names the device of receive buffers, gathers and norms.
    torch.cuda.current_device = lambda: torch.device("cpu")
    # A `with torch.device(...)` block, with which transformers loads a model, knows torch's own
    # factories and no others. torch lists them when it enters the first one: let it do so now.
    _device._device_constructors()
    # `device="cuda"` is written out in schedules, the loss scaler and the causal mask.
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    # Tensors are moved "to the GPU" when the tied embedding starts and state is loaded.
    torch.Tensor.cuda = lambda self, *_, **__: self
    # Parameters are sorted by the *string* of their type: 'torch.cuda.FloatTensor' and its kin.
    torch.Tensor.type = _type_as_on_cuda(torch.Tensor.type)
    # Gradient reduction and p2p synchronise streams; on a CPU every call has finished already.
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_, **__: _Stream()
    torch.cuda.Stream, torch.cuda.Event = _Stream, _Stream
    torch.cuda.stream = lambda *_, **__: contextlib.nullcontext()
    # gloo gathers equal parts alone; etp ranks have as many tokens as were routed to them.
    dist.all_gather = _gather_any_parts(dist.all_gather)
    # Its random-state tracker keeps named CUDA generators. They get one of their own, apart from
    # the CPU's default generator, which the tracker checks that nobody moved.
    generator = torch.Generator()
    torch.cuda.default_generators = collections.defaultdict(lambda: generator)
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda *_, **__: generator.get_state()
        module.set_rng_state = lambda state, *_, **__: generator.set_state(state)
        module.manual_seed = generator.manual_seed


def _on_cpu(factory: Any) -> Any:
    """Returns a tensor factory that takes a CUDA device for the CPU."""

    @functools.wraps(factory)
    def redirected(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return redirected


def _gather_any_parts(original: Any) -> Any:
    """Returns an all_gather() that lets the parts differ in length: then each rank sends a copy of
    its part to every rank, by all-to-all. original: the function that takes equal parts alone."""

    @functools.wraps(original)
    def all_gather(outputs: list[torch.Tensor], own: torch.Tensor, group: Any = None) -> None:
        """Fills `outputs` with each rank's tensor, also where their lengths differ."""
        lengths = list(map(len, outputs))
        if len(set(lengths)) == 1:
            return original(outputs, own, group)
        ranks = len(outputs)
        received = own.new_empty((sum(lengths), *own.shape[1:]))
        copies = torch.cat([own for _ in range(ranks)])  # one for each rank of the group
        dist.all_to_all_single(received, copies, lengths, [len(own) for _ in range(ranks)], group)
        for output, tensor in zip(outputs, received.split(lengths), strict=True):
            output.copy_(tensor)

    return all_gather


def _as_from_gpu(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """Returns what megatron-core's `maybe_move_tensor_to_cpu` would return of a GPU's tensor."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _type_as_on_cuda(original: Any) -> Any:
    """Returns a Tensor.type() that answers as it would on CUDA; conversions pass through."""

    @functools.wraps(original)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None or self.dtype not in _TYPE_NAMES:
            return original(self, dtype, *args, **kwargs)
        return f"torch.cuda.{_TYPE_NAMES[self.dtype]}Tensor"

    return type_


class _Stream:
    """A CUDA stream or event with nothing to wait for."""

    device = torch.device("cpu")

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    __init__ = record = wait = synchronize = wait_stream = wait_event = _nothing

    def record_event(self, *_: Any) -> "_Stream":
        return self

    def query(self) -> bool:
        return True
