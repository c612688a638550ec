"""The bytes of all tensors that two ranks of a small GPT in fp32 hold after a backward pass or an
update, whichever is more. DeepSpeed's buckets are made small: by default each has 5e8 elements.

    torchrun --nproc-per-node=2 -m tests.tools.held_tensors SETTINGS
"""

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from analysis.planner.columns import columns_of
from analysis.planner.memory import model_states
from analysis.planner.memory.pipeline import stages
from base.files import ROOT
from parallel import batches, engines, forked_ranks, token_files
from parallel.config.resolve import resolve
from parallel.config.run_spec import RunSpec
from parallel.measure import ranges

# Its biases, norms and positions, which the formulas leave out, are 2 % of it.
SMALL = {"n_layer": 4, "hidden": 256, "n_head": 4, "vocab_size": 512, "max_seq_len": 32}
SMALL |= {"gpus": 2, "device": "cpu", "kernels": "torch", "global_batch": 4, "micro_batch": 1}


def expected(spec: RunSpec) -> float:
    """Bytes of weights, gradients and optimizer that a rank of the first stage holds, by formula.

    Gathered layers are gone when a backward pass has ended.
    """
    (step,) = columns_of(spec).rows
    first = stages(step)[0]
    n = model_states.parameters(step, first)
    held = model_states.weights(step, n) - model_states.gathered(step, n.total)
    return held + model_states.gradients(step, first, n) + model_states.optimizer(step, first, n)


def storages() -> dict[int, int]:
    """Bytes by address of every tensor's memory that is alive."""
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]  # C++ may hold it
    sizes = {}
    for tensor in tensors:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # without memory of its own
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sizes


def measure(settings: dict[str, Any]) -> None:
    """One rank: two steps of the small model; rank 0 prints the most that its and rank 1's tensors
    occupied after a backward pass or an update, as one JSON line."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, spec = dist.get_rank(), resolve(("a test", settings))
    tokens = token_files.Tokens(np.arange(4096, dtype=np.uint16) % SMALL["vocab_size"], "")
    before, totals = storages().keys(), []

    def count(*_: Any) -> None:
        totals.append(sum(size for at, size in storages().items() if at not in before))

    engine = engines.load(spec, torch.device("cpu"), "torch")
    after_backward = SimpleNamespace(
        enter=lambda name: None, leave=lambda name: name == "backward" and count()
    )
    ranges.listeners.append(after_backward)
    register_optimizer_step_post_hook(count)
    dp_rank = spec.layout.coords(rank)["dp"]
    for step in range(2):
        engine.step(batches.batches(tokens, spec, dp_rank, step), spec.lr, bool)
    most: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(most, max(totals))
    if rank == 0:
        print(json.dumps({"held": most}), flush=True)
    engine.close()
    dist.destroy_process_group()


def error(settings: dict[str, Any]) -> float:
    """The formula over what the rank with the most bytes held, minus one."""
    here = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    settings = SMALL | settings
    spec = resolve(("a test", settings))
    with tempfile.NamedTemporaryFile("w", suffix=".json") as small_buckets:
        if settings["engine"].startswith("deepspeed"):
            json.dump({"zero_optimization": {"reduce_bucket_size": 1000}}, small_buckets)
            small_buckets.flush()
            settings = settings | {"deepspeed_config": small_buckets.name}
        two_ranks = forked_ranks.prefix(settings["engine"], 1, 2)
        command = [*two_ranks, "-m", "tests.tools.held_tensors", json.dumps(settings)]
        done = subprocess.run(command, cwd=ROOT, env=here, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"held"')]
    assert done.returncode == 0 and lines, done.stderr
    return expected(spec) / max(json.loads(lines[-1])["held"]) - 1


if __name__ == "__main__":
    measure(json.loads(sys.argv[1]))
