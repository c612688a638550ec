"""The bytes of all tensors that two ranks of a small GPT in fp32 hold after a backward pass or an
update, whichever is more. DeepSpeed's buckets are made small: by default each has 5e8 elements.

    torchrun --nproc-per-node=2 -m tests.tools.held_tensors SETTINGS.json
"""

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from base.files import ROOT
from parallel import forked_ranks
from parallel.config import memory
from parallel.config.layout_arrays import columns_of
from parallel.config.settings import RunSpec, resolve

# Its biases, norms and positions, which the formulas leave out, are 2 % of it.
SMALL = {"n_layer": 4, "hidden": 256, "n_head": 4, "vocab_size": 512, "max_seq_len": 32}


def spec_of(settings: dict[str, Any]) -> RunSpec:
    """A two-rank run of the small model."""
    usual = {"gpus": 2, "device": "cpu", "kernels": "torch", "global_batch": 4, "micro_batch": 1}
    return resolve(("a test", SMALL | usual | settings))


def expected(spec: RunSpec, rank: int) -> float:
    """Bytes of weights, gradients and optimizer that a rank holds by `memory.states`.

    Gathered layers are gone when a backward pass has ended.
    """
    x = columns_of(spec)
    first, _, last = memory.stage_layers(x)
    layers = last if spec.layout.coords(rank)["pp"] == spec.layout.pp - 1 else first
    n = memory.params(x, layers, True)
    states = {k: float(v[0]) for k, v in memory.states(x, n).items()}
    return sum(states.values()) - float(memory.gathered(x, n)[0])


def storages(known: set[int] | None = None) -> dict[int, int]:
    """Bytes by address of every tensor's memory that is alive, those of `known` left out."""
    import torch

    found: dict[int, int] = {}

    def add(tensor: "torch.Tensor") -> None:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # without memory of its own
            memory_ = tensor.untyped_storage()
            if memory_.nbytes() and memory_.data_ptr() not in (known or ()):
                found[memory_.data_ptr()] = memory_.nbytes()

    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            add(thing)
            if thing.is_leaf and thing.grad is not None:  # C++ may be all that holds it
                add(thing.grad)
    return found


class _AfterBackward:
    """A listener of `parallel.measure.ranges` that counts when a backward pass has ended."""

    def __init__(self, count: Callable[[], None]):
        self.count = count

    def enter(self, name: str) -> None:
        pass

    def leave(self, name: str) -> None:
        if name == "backward":
            self.count()


def measure(settings: dict[str, Any]) -> None:
    """One rank: two steps of the small model; prints the most that rank 0's and 1's tensors
    occupied after a backward pass or an update, as one JSON line."""
    import torch
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from parallel import batches, engines, token_files
    from parallel.measure import ranges

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, spec = dist.get_rank(), spec_of(settings)
    ids = np.arange(4096, dtype=np.uint16) % SMALL["vocab_size"]
    tokens = token_files.Tokens(ids, "")
    before = set(storages())
    ranges.listeners.append(_AfterBackward(lambda: count()))
    engine = engines.load(spec, torch.device("cpu"), "torch")
    most = 0

    def count(*_: Any) -> None:
        nonlocal most
        most = max(most, sum(storages(before).values()))

    register_optimizer_step_post_hook(count)
    dp_rank = spec.layout.coords(rank)["dp"]
    vocab = SMALL["vocab_size"]
    for step in range(2):
        made = batches.batches(tokens, spec.layout, spec.seq_len, vocab, dp_rank, spec.seed, step)
        engine.step(made, spec.lr, bool)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, most)
    if rank == 0:
        print(json.dumps({"held": found}), flush=True)
    engine.close()
    dist.destroy_process_group()


def held(settings: dict[str, Any]) -> list[int]:
    """Bytes that each of two ranks held, by `measure` in processes of their own."""
    here = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
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
    return json.loads(lines[-1])["held"]


def error(settings: dict[str, Any]) -> float:
    """The formula over what the rank with the most bytes held, minus one."""
    bytes_held = held(settings)
    rank = int(np.argmax(bytes_held))
    return expected(spec_of(settings), rank) / bytes_held[rank] - 1


if __name__ == "__main__":
    measure(json.loads(sys.argv[1]))
