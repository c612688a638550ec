"""Train a step of one rank with tensors that have shapes but no storage.

torch's FakeTensorMode runs every operator on shapes alone, and the `fake` backend of
torch.distributed answers every collective at once. So one process on any machine builds the part of
a model that a rank of any run holds, with the engine's own code. No number is computed and no CUDA
kernel is run: that a kernel exists, is fast or is right is not rehearsed.
"""

import contextlib
import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses import fake_tensor
from torch.distributed import device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from models import gpt

HOST = "host"  # what offload keeps in host memory; no part of a peak
_BIAS_DROPOUT = "megatron.core.fusions.fused_bias_dropout"
_SWIGLU = "megatron.core.fusions.fused_bias_swiglu"
_RANDOM = "megatron.core.tensor_parallel.random"
# What is allocated in a region of a step (parallel/measure/ranges.py) and is not one of the kinds
# that `Memory.mark` names. The engine's own buffers are made while it is built.
_KIND_IN = {"build": "buffers", "forward": "activations"}


@contextlib.contextmanager
def without_storage(rank: int, world_size: int) -> Iterator[None]:
    """Runs everything in the block on shapes alone, as `rank` of `world_size`; once a process."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    for owner, name, replacement in (
        (nn.Module, "_apply", _apply),
        (dist, "all_gather_object", _all_gather_object),
        (dist, "_coalescing_manager", _coalescing_manager),
        (nn.parallel, "DistributedDataParallel", OneCopy),
        (F, "rms_norm", _rms_norm),
        (F, "embedding", _embedding),
        (torch, "tensor", _tensor),
        (gpt, "_takes_fewer_keys", lambda _, mask: mask is None),  # as on a GPU
        (device_mesh, "init_device_mesh", _init_device_mesh),
        (sys.modules.get(_BIAS_DROPOUT), "_bias_dropout_add_func", _bias_dropout_add),
        (sys.modules.get(_SWIGLU), "swiglu_back", _swiglu_back),
        (sys.modules.get(_SWIGLU), "weighted_swiglu", _weighted_swiglu),
        (sys.modules.get(_SWIGLU), "weighted_swiglu_back", _weighted_swiglu_back),
    ):
        if owner is None:  # an engine without megatron-core
            continue
        original = getattr(owner, name)
        for holder in (owner, *sys.modules.values()):  # those that imported it by its name, too
            if getattr(holder, "__dict__", {}).get(name) is original:
                setattr(holder, name, replacement)
    if random := sys.modules.get(_RANDOM):  # what it has of Transformer Engine to recompute
        random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=bool)
        random._get_share_storage = lambda: _share
        random.activation_recompute_forward = lambda **_: contextlib.nullcontext()
        random.fp8_autocast = lambda **_: contextlib.nullcontext()
    register_module_forward_hook(_by_turns)
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        yield


class OneCopy(nn.Module):
    """A module that stands in for DistributedDataParallel, whose C++ reducer reads storages. Its
    buckets hold all gradients from the start; its all-reduces are not counted."""

    def __init__(self, module: nn.Module, **_: Any):
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    def register_comm_hook(self, *_: Any) -> None:
        pass

    def no_sync(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()


def _apply(self: nn.Module, fn: Callable, recurse: bool = True) -> nn.Module:
    """Stands in for nn.Module._apply, which swaps data: parameters without storage refuse that.

    A parameter that changes its type becomes a new one, with the attributes of the old.
    """
    done = vars(fn).setdefault("done", {})  # modules that share a parameter share the function
    for child in self.children() if recurse else ():
        child._apply(fn)
    for name, parameter in self._parameters.items():
        if parameter is None:
            continue
        if id(parameter) not in done:
            changed = fn(parameter.data)
            new = parameter
            if changed.dtype != parameter.dtype or changed.device != parameter.device:
                new = nn.Parameter(changed, parameter.requires_grad)
                # A tensor without storage keeps its device there.
                new.__dict__.update(parameter.__dict__ | new.__dict__)
            done[id(parameter)] = parameter, new  # the old one too, so that its id stays its own
        self._parameters[name] = done[id(parameter)][1]
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


class _RMSNorm(torch.autograd.Function):
    """RMSNorm as its CUDA kernel does it: one pass, which keeps its input and a number per row. On
    a CPU torch makes a dozen operators of it, which keep several copies in fp32."""

    @staticmethod
    def forward(context: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        per_row = hidden.new_empty((*hidden.shape[:-1], 1), dtype=torch.float32)
        context.save_for_backward(hidden, weight, per_row)
        return torch.empty_like(hidden)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        hidden, weight, _ = context.saved_tensors
        return torch.empty_like(hidden), torch.empty_like(weight)


def _rms_norm(hidden: torch.Tensor, shape: Any, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _RMSNorm.apply(hidden, weight)


def _bias_dropout_add(x_with_bias: Any, residual: torch.Tensor, *_: Any) -> torch.Tensor:
    """Adds a bias and the residual in one kernel, as megatron-core compiles it on a GPU."""
    hidden, bias = x_with_bias
    return hidden + residual if bias is None else (hidden + residual).add_(bias)


def _swiglu_back(gradient: torch.Tensor, gate_and_up: torch.Tensor) -> torch.Tensor:
    """Returns the gradients of a gate's inputs, one kernel as megatron-core compiles it."""
    return torch.empty_like(gate_and_up)


def _weighted_swiglu(gate_and_up: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the gated product of an expert's weighted tokens, one kernel on a GPU."""
    return torch.empty_like(gate_and_up.chunk(2, -1)[0])


def _weighted_swiglu_back(
    gradient: torch.Tensor, gate_and_up: torch.Tensor, weights: torch.Tensor
) -> Any:
    return torch.empty_like(gate_and_up), torch.empty_like(weights)


def _by_turns(module: nn.Module, _: Any, output: Any) -> Any:
    """Has megatron-core's router send tokens to the experts by turns, as the reference GPT's does
    with a forced balance: there are no numbers to choose by."""
    if type(module).__name__ != "TopKRouter":
        return None
    weights_TE, chosen_TE = output
    T, E = chosen_TE.shape
    turns_TC = torch.arange(T * module.topk).view(T, -1) % E
    return weights_TE, torch.zeros(T, E, dtype=torch.bool).scatter_(1, turns_TC, True)


def _share(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Gives a norm's output, which was freed, as many bytes as the recomputed one has."""
    output.untyped_storage().resize_(recomputed.untyped_storage().nbytes())


def _embedding(*args: Any, make: Callable = F.embedding, sparse: bool = False, **kw: Any) -> Any:
    """Stands in for F.embedding, with a dense gradient as on a GPU."""
    return make(*args, **kw)


def _all_gather_object(answers: list[Any], own_answer: Any, group: Any = None) -> None:
    """Answers for every rank with this one's object; torch's pickles it into a storage."""
    answers[:] = [own_answer] * len(answers)


@contextlib.contextmanager
def _coalescing_manager(*_: Any, **__: Any) -> Iterator[Any]:
    """Lets collectives run one by one: the fake backend cannot take several as one call."""
    yield SimpleNamespace(wait=lambda: None)


def _init_device_mesh(*args: Any, make: Callable = device_mesh.init_device_mesh, **kw: Any) -> Any:
    """Returns a mesh of ranks, made with real numbers: its coordinates stand in a tensor."""
    with fake_tensor.unset_fake_temporarily():
        return make(*args, **kw)


def _tensor(data: Any, *args: Any, make: Callable = torch.tensor, **kwargs: Any) -> torch.Tensor:
    """Stands in for torch.tensor, which reads the storages of tensors in lists; pins none."""
    kwargs.pop("pin_memory", None)
    tensors = [leaf for leaf in tree_leaves(data) if isinstance(leaf, torch.Tensor)]
    if tensors and isinstance(data, list):
        return torch.stack(tensors)
    return make(data, *args, **kwargs)


def _has_no_numbers(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, fake_tensor.FakeTensor | DTensor) or tensor.device.type == "meta"


def held_part(parameter: nn.Parameter) -> torch.Tensor:
    """Returns this rank's part of a parameter: FSDP2's shard, ZeRO-3's partition, or all."""
    is_shard = isinstance(parameter, DTensor)
    return parameter.to_local() if is_shard else getattr(parameter, "ds_tensor", parameter)


class Memory(TorchDispatchMode):
    """A count of the bytes of all living storages, by kind, and of the moment with the most.

    It listens to the regions of a step. Allocators round blocks up and fragment; that is not in it.
    Reading a number of a tensor without storage gives 1, of an integer or truth value 0. With
    experts, integers and truth values that no such tensor gave are real: sizes follow from them.
    """

    def __init__(self, vocabulary: int, experts: bool = False):
        super().__init__()
        self.vocabulary = vocabulary  # columns of a logits tensor on this rank
        self.experts = experts
        self.regions = ["build"]
        self.held: Counter[str] = Counter()
        self.peak: dict[str, int] = {}
        self._most = 0
        self._live = WeakIdKeyDictionary(ref_type=weakref.ref)  # storage -> [kind, bytes]

    def enter(self, name: str) -> None:
        self.regions.append(name)

    def leave(self, name: str) -> None:
        while self.regions.pop() != name:
            pass

    def __enter__(self) -> "Memory":
        for module in (_fsdp_param, _fsdp_param_group):
            for resize in {"alloc_storage", "free_storage"} & vars(module).keys():
                setattr(module, resize, self._resizing(getattr(module, resize)))
        if library := sys.modules.get(_RANDOM):
            for name in ("discard_output_and_register_recompute", "_recompute"):
                resize = getattr(library.CheckpointWithoutOutput, name)
                setattr(library.CheckpointWithoutOutput, name, self._resizing(resize))
            torch.UntypedStorage.copy_ = lambda storage, *_: storage  # a fake's cache keeps both
        return super().__enter__()

    def _resizing(self, resize: Callable) -> Callable:
        """Returns `resize`, counted. It changes the storages of FSDP2's tensor, or of the outputs
        that megatron-core computes again, and is no operator that is dispatched."""

        def resizing(owner: Any, *args: Any) -> None:
            tensors = [owner] if isinstance(owner, torch.Tensor) else owner.outputs or []
            resize(owner, *args)
            for storage in (tensor.untyped_storage() for tensor in tensors):
                if entry := self._live.get(storage):
                    self._free(entry)
                    entry[1] = storage.nbytes()
                    self._add(*entry)

        return resizing

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], fake_tensor.FakeTensor):
            return args[0].fake_device
        try:
            result = self._call(func, args, kwargs or {})
        except fake_tensor.DataDependentOutputException:
            return 1.0 if args[0].dtype.is_floating_point else 0
        except fake_tensor.DynamicOutputShapeException:
            if func is not torch.ops.aten.masked_select.default or _has_no_numbers(args[1]):
                raise
            with fake_tensor.unset_fake_temporarily():
                chosen = int(args[1].sum())
            result = args[0].new_empty(chosen)
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                # A DTensor has no bytes itself: the operators on its local part come here, too.
                if not isinstance(tensor, DTensor) and tensor.device.type != "meta":
                    self._see(tensor)
        return result

    def _call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Runs the operator on shapes alone or, with experts, on integers that are known."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_real = self.experts and not any(map(_has_no_numbers, tensors))
        if not (is_real and tensors):
            result = func(*args, **kwargs)
            if not is_real or not isinstance(result, torch.Tensor) or result.is_floating_point():
                return result
        with fake_tensor.unset_fake_temporarily():
            return func(*args, **kwargs)

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._live:
            return
        kind = _KIND_IN.get(self.regions[-1], "temporary")
        if kind != "buffers" and tensor.dim() > 1 and tensor.size(-1) == self.vocabulary:
            kind = "logits"
        entry = self._live[storage] = [kind, storage.nbytes()]
        self._add(*entry)
        weakref.finalize(storage, self._free, entry)

    def _add(self, kind: str, size: int) -> None:
        self.held[kind] += size
        on_gpu = self.held.total() - self.held[HOST]
        if on_gpu > self._most:
            self._most, self.peak = on_gpu, dict(self.held)

    def _free(self, entry: list[Any]) -> None:
        self.held[entry[0]] -= entry[1]

    def mark(self, tensor: torch.Tensor | None, kind: str) -> None:
        """Counts a tensor's storage under a kind from now on."""
        if tensor is None:
            return
        self._see(tensor)
        entry = self._live[tensor.untyped_storage()]
        self._free(entry)
        entry[0] = kind
        self.held[kind] += entry[1]

    def mark_engine(self, engine: Any, offload: str) -> int:
        """Counts an engine's weights, gradients (also those to come) and Adam's moments as such.

        Returns the number of its parameters. offload: the layout's.
        """
        parameters = [p for p in gc.get_objects() if isinstance(p, nn.Parameter)]
        weights = HOST if offload == "all" else "weights"
        for parameter in parameters:
            self.mark(held_part(parameter), weights)
            self.mark(getattr(parameter, "main_grad", None), "gradients")
            parameter.register_post_accumulate_grad_hook(self.mark_gradient)
        for piece in engine.state().pieces:  # it makes the moments
            for tensor in piece.tensors.values():
                self.mark(tensor, "optimizer" if offload == "none" else HOST)
        for parameter in parameters:  # a parameter may be its own master
            self.mark(held_part(parameter), weights)
        gc.collect()
        return sum(getattr(p, "ds_numel", p.numel()) for p in parameters)

    def mark_gradient(self, parameter: nn.Parameter) -> None:
        """Counts a parameter's gradient, unless it lies in a bucket that holds others too."""
        gradient = None if parameter.grad is None else held_part(parameter.grad)
        if gradient is not None and gradient.untyped_storage().nbytes() == gradient.nbytes:
            self.mark(gradient, "gradients")

    def restart(self) -> None:
        """Forgets the peak of what came before: a step begins."""
        self.regions, self._most = ["step"], 0
        self._add(HOST, 0)
