"""Run by test_steps.py in one process: what a step of every engine does to its numbers and when.

Prints a JSON line: "reads", the functions of ours that read a number of a tensor before AdamW's
update (on a GPU each waits for all that was asked of it), "later reads", those after it; "all
reads", how many the libraries read before it, too; "host", what a step asks a host to do
needlessly; "curves", loss and gradient norm of two
steps; "masters", how far DeepSpeed's first fp32 weights are from the model's; "activations", how
far megatron-core's fused ones are from the reference GPT's; "configured", its settings on a GPU;
"model", the class that ddp steps on one rank; "compiler", what is said where 0.19 has none;
"shards", which ranks hold a copy of FSDP2's with rank 3 of 4.
"""

import json
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from base.errors import UsageError
from models.gpt import gelu
from parallel import engines
from parallel.config.resolve import resolve
from parallel.engines.deepspeed_common import deepspeed  # patched first

SIZES = {"n_layer": 1, "hidden": 16, "n_head": 2, "vocab_size": 9, "max_seq_len": 8, "steps": 2}
SIZES |= {"micro_batch": 1, "global_batch": 2}
FUSIONS = ("bias_activation_fusion", "bias_dropout_fusion")
GPU_SETTINGS = ("batch_p2p_comm", "overlap_p2p_comm", "deallocate_pipeline_outputs")
GPU_SETTINGS += ("use_cpu_initialization", *FUSIONS)
UPDATES = ("_fused_adamw_", "addcdiv_", "_foreach_addcdiv_")


class Reads(TorchDispatchMode):
    """The functions in parallel/engines that read a number before AdamW's first update, and after
    it. operations: how often each was dispatched."""

    def __init__(self):
        super().__init__()
        self.functions, self.later, self.updated, self.number = [], [], False, 0
        self.operations = Counter()

    def reading(self, data, *args, make, **settings):
        """torch.tensor, which reads each tensor of nested lists."""
        if not self.updated:
            self.number += sum(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(data))
        return make(data, *args, **settings)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.updated |= name in UPDATES
        self.operations[name] += 1
        if name == "_local_scalar_dense":
            self.number += not self.updated
            callers = [f for f in traceback.extract_stack() if "/torch/" not in f.filename]
            if "parallel/engines/" in callers[-2].filename:  # the last is this function
                (self.later if self.updated else self.functions).append(callers[-2].name)
        return func(*args, **(kwargs or {}))


def batches():
    for first in (0, 1):  # two micro-batches
        tokens = torch.arange(first, first + 8)[None]
        yield tokens, tokens


def host_work() -> dict[str, int]:
    """What a step of ZeRO-3 and of FSDP2 does beside asking for its work: processes that it starts,
    ranges for a profiler that is not there, autograd's functions around local gradients."""
    spec = resolve(("test", {"engine": "deepspeed_zero", "zero_stage": 3, **SIZES}))
    engine, counts = engines.load(spec, torch.device("cpu"), "torch"), Counter()
    accelerator = deepspeed.accelerator.get_accelerator()

    def counting(what: str, function: Callable) -> Callable:
        def counted(*args, **kwargs):
            counts[what] += 1
            return function(*args, **kwargs)

        return counted

    accelerator.range_push = counting("ranges", accelerator.range_push)
    subprocess.Popen.__init__ = counting("processes", subprocess.Popen.__init__)
    engine.step(batches(), spec.lr, bool)
    spec = resolve(("test", {"engine": "fsdp2", "zero_stage": 3, **SIZES}))
    engine = engines.load(spec, torch.device("cpu"), "torch")
    api = sys.modules["torch.distributed.tensor._api"]
    api._ToTorchTensor.apply = counting("to_local", api._ToTorchTensor.apply)
    engine.step(batches(), spec.lr, bool)
    return {what: counts[what] for what in ("ranges", "processes", "to_local")}


def fused_activations() -> dict[str, float]:
    from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    torch.manual_seed(0)
    x, bias = torch.randn(64, 32), torch.randn(32)

    def swiglu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        gate, up = (x + bias).chunk(2, dim=1)
        return F.silu(gate) * up

    def values(function: Callable) -> list[torch.Tensor]:
        inputs = [t.clone().requires_grad_() for t in (x, bias)]
        y = function(*inputs)
        return [y, *torch.autograd.grad(y.square().sum(), inputs)]

    off = {}
    for name, theirs, ours in (
        ("gelu", bias_gelu_impl, lambda x, b: gelu(x + b)),
        ("swiglu", lambda x, b: bias_swiglu_impl(x, b, False, False), swiglu),
    ):
        pairs = zip(values(theirs), values(ours), strict=True)
        off[name] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return off


def _nccl() -> str:
    return "nccl"


def configured() -> dict[str, dict]:
    """megatron-core's settings of runs on a GPU, which no test has, and what computes attention."""
    from parallel.engines import layers, megatron_config

    settings = {"engine": "megatron", "device": "auto", **SIZES, "n_layer": 4, "gpus": 2, "pp": 2}
    found, backend = {}, dist.get_backend
    for name, vpp, dist.get_backend in (("gloo", 2, backend), ("pp", 1, _nccl), ("vpp", 2, _nccl)):
        config = megatron_config.transformer_config(
            resolve(("test", settings | {"vpp": vpp})), cuda=True
        )
        found[name] = {of: getattr(config, of) for of in GPU_SETTINGS}
    dist.get_backend = backend
    one = resolve(("test", settings | {"gpus": 1, "pp": 1}))
    config = megatron_config.start(one, cuda=False)
    # In the place of Transformer Engine's layers stand those that megatron-core has without it.
    library = "megatron.core.extensions.transformer_engine"
    sys.modules[library] = SimpleNamespace(TENorm=layers.SequenceParallelNorm)
    specs = layers.gpt_layer_specs
    specs.get_gpt_layer_with_transformer_engine_spec = lambda **_: specs.get_gpt_layer_local_spec()
    for name, spec in (("whole", one), ("documents", replace(one, end_of_text=0))):
        for kernels in ("torch", "te"):
            layer = layers.block_submodules(spec, config, kernels).layer_specs[0].submodules
            attention = layer.self_attention.submodules.core_attention
            found[f"{name} {kernels}"] = attention.__name__
    return found


def no_compiler() -> str:
    from parallel.engines import megatron_versions

    def fail() -> None:
        raise RuntimeError("ninja is not here")

    megatron_versions.random._get_share_storage = fail
    try:
        megatron_versions.check_norms_computed_again()
    except UsageError as error:
        return str(error)
    return ""


def shards() -> dict[str, list[int]]:
    """By the dimensions of FSDP2's mesh; the groups are stand-ins."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    found = {}
    for size in (2, 4):
        settings = {"engine": "fsdp2", "zero_stage": 3, "gpus": 4, "fsdp_shard": size, **SIZES}
        spec = resolve(("test", settings | {"global_batch": 4}))
        engine = engines.load(spec, torch.device("cpu"), "torch")
        mesh = next(engine.model.parameters()).device_mesh
        found[" ".join(mesh.mesh_dim_names)] = dist.get_process_group_ranks(engine.shard_group)
    return found


def main() -> None:
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    dist.init_process_group("gloo")
    cpu = torch.device("cpu")
    keys = ("reads", "later reads", "all reads", "squares", "curves", "configured")
    found = {key: {} for key in keys}
    for name in sys.argv[1:]:
        engine, _, precision = name.partition(":")
        # fp16 rounds small gradients to zero: at some seeds the second norm is 3e-3 off by that.
        settings = {"engine": engine, "zero_stage": 2 * (engine == "fsdp2"), "seed": 1, **SIZES}
        if precision:  # which a device that is no GPU is refused
            settings |= {"precision": precision, "device": "auto"}
        spec = resolve(("test", settings))
        built = engines.load(spec, cpu, "torch")
        if precision and engine == "deepspeed_zero":
            pairs = list(built._masters())
            found["masters"] = max(float((half - own).abs().max()) for half, own in pairs)
        usual = torch.tensor
        with Reads() as reads:
            torch.tensor = partial(reads.reading, make=usual)
            first = built.step(batches(), 10 * spec.lr, bool)
        torch.tensor = usual
        assert reads.updated, name
        both = first, built.step(batches(), spec.lr, bool)
        found["reads"][name], found["later reads"][name] = reads.functions, reads.later
        found["all reads"][name] = reads.number
        found["squares"][name] = reads.operations["square"] + reads.operations["pow"]
        found["curves"][name] = [[step.loss, step.grad_norm] for step in both]
        if name == "ddp":
            found["model"] = type(built.model).__name__
        if engine in ("megatron", "deepspeed_pipe"):
            found["configured"][name] = {of: built.describe()[of] for of in FUSIONS}
            sys.modules["megatron.core"].parallel_state.destroy_model_parallel()
    found["host"] = host_work()
    found["activations"] = fused_activations()
    found["configured"] |= configured()
    found["compiler"], found["shards"] = no_compiler(), shards()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
