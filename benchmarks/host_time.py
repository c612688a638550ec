"""Measures the host's work of a step: each engine's CPU time and operations beside a plain loop's.

    python -m benchmarks.host_time [--only ENGINE ...] [--rounds 15] [--layers 12]
                                   [--micro-batches 1]

One rank, gpt2-124m's layers with 16 channels and 8 tokens: nearly all CPU time is what a host
spends to ask for the work, which on a GPU must be less than the work takes. The plain loop is the
reference GPT, loss.backward, clipping and fused AdamW. Each engine has a process of its own, in
which three steps of it and three of the loop take turns. Prints a Markdown table: CPU ms a step
(the median of rounds), its ratio to the plain loop's of the same round (median, lowest and
highest), the operations that torch dispatches, and the calls of Python functions (cProfile).
"""

import cProfile
import multiprocessing
import os
import pstats
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from analysis.common.table import Column, Table, show
from base.errors import Parser, command_line
from parallel import engines
from parallel.config.resolve import resolve
from parallel.config.run_spec import RunSpec
from parallel.engines import optim
from parallel.engines.deepspeed_common import deepspeed  # noqa: F401  (patched first)
from parallel.engines.reference import build_reference

SIZES = {"hidden": 16, "n_head": 2, "vocab_size": 31, "max_seq_len": 8, "micro_batch": 1}
ENGINES = {
    "ddp": {"engine": "ddp"},
    "fsdp2, stage 2": {"engine": "fsdp2", "zero_stage": 2},
    "fsdp2, stage 3": {"engine": "fsdp2", "zero_stage": 3},
    "deepspeed_zero, stage 1": {"engine": "deepspeed_zero", "zero_stage": 1},
    "deepspeed_zero, stage 3": {"engine": "deepspeed_zero", "zero_stage": 3},
    "deepspeed_pipe": {"engine": "deepspeed_pipe"},
    "megatron": {"engine": "megatron"},
    "megatron, stage 1": {"engine": "megatron", "zero_stage": 1},
}
COLUMNS = [
    Column("engine", "engine"),
    Column("ms", "host ms a step", ".2f"),
    Column("ratio", "to the plain loop", ".2f"),
    Column("low", "lowest", ".2f"),
    Column("high", "highest", ".2f"),
    Column("operations", "operations", "d"),
    Column("calls", "Python calls", "d"),
]


class Operations(TorchDispatchMode):
    """The number of operations that torch dispatches inside the block."""

    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += 1
        return func(*args, **(kwargs or {}))


def plain_loop(spec: RunSpec) -> Callable[[], None]:
    """Returns a step as a tutorial has it."""
    model = build_reference(spec, torch.device("cpu"))
    parameters = list(model.parameters())
    optimizer = optim.adamw(parameters, spec)

    def step() -> None:
        for tokens, labels in batches(spec):
            (model(tokens, labels) / spec.layout.n_micro).backward()
        nn.utils.clip_grad_norm_(parameters, spec.clip_grad)
        optimizer.step()
        optimizer.zero_grad()

    return step


def batches(spec: RunSpec) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the tokens and labels of each micro-batch of a step."""
    for first in range(spec.layout.n_micro):
        tokens = torch.arange(first, first + 8)[None] % 31
        yield tokens, tokens


def engine_loop(spec: RunSpec) -> Callable[[], None]:
    """Returns a step of an engine."""
    engine = engines.load(spec, torch.device("cpu"), "torch")
    return lambda: engine.step(batches(spec), spec.lr, bool)


def measured(name: str, shape: dict[str, int], rounds: int) -> dict[str, Any]:
    """Returns the row of an engine, which makes its steps in turn with the plain loop."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    steps = []
    for settings in ({}, ENGINES.get(name, {})):
        spec = resolve(("host_time.py", SIZES | shape | {"device": "cpu"} | settings))
        steps.append((engine_loop if settings else plain_loop)(spec))
        for _ in range(3):
            steps[-1]()
    with Operations() as counted:
        steps[-1]()
    times: list[tuple[float, ...]] = []
    for _ in range(rounds):
        laps = [time.process_time()]
        for step in steps:
            for _ in range(3):
                step()
            laps.append(time.process_time())
        times.append(tuple((end - begin) / 3 * 1e3 for begin, end in pairwise(laps)))
    ratios = [ours / plain for plain, ours in times]
    with cProfile.Profile() as profile:
        for _ in range(rounds):
            steps[-1]()
    calls = pstats.Stats(profile).total_calls // rounds
    numbers = (median(ours for _, ours in times), median(ratios), min(ratios), max(ratios))
    keys = (column.key for column in COLUMNS)
    return dict(zip(keys, (name, *numbers, counted.n, calls), strict=True))


@command_line("benchmarks.host_time")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.host_time", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, metavar="N")
    parser.add_argument("--layers", type=int, default=12, metavar="N")
    parser.add_argument("--micro-batches", type=int, default=1, metavar="N")
    parser.add_argument("--only", nargs="+", choices=ENGINES, metavar="ENGINE")
    arguments = parser.parse_args(argv)
    shape = {"n_layer": arguments.layers, "global_batch": arguments.micro_batches}
    names = arguments.only or ["plain loop", *ENGINES]
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        work = [(name, shape, arguments.rounds) for name in names]
        rows = pool.starmap(measured, work, chunksize=1)
    show([Table(COLUMNS, rows)], "markdown")
    return 0


if __name__ == "__main__":
    sys.exit(main())
