"""What this machine can do: matrix products, memory, copies from the host, an all-reduce.

    torchrun --nproc-per-node 8 -m parallel.microbench
    srun --nodes 2 --ntasks-per-node 8 python -m parallel.microbench

One thread a rank, as the CPU studies run; NCCL where there are GPUs, gloo elsewhere. Every rank
measures its own GPU, all at once; of a CPU, rank 0 does, alone. Rank 0 prints a JSON list of what
the ranks have measured. rates: FLOP/s of a square matrix product by precision, 8192 wide on a GPU,
1024 on a CPU, the first one that models train in; bytes/s of `memory` in an addition and of the
copy from pinned `host` memory. links: all-reduce bus bandwidth in bytes/s by MiB.
"""

import json
import os
import platform
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from base.errors import Parser, command_line
from parallel.record.launch import Launch, detect, end_with_launcher, rendezvous_environment

SIZES = {"cpu": (0.25, 4), "cuda": (1, 8, 64, 512)}  # MiB of the all-reduces
TIMEOUT = timedelta(minutes=3)


def _least_s(call: Callable[[], object]) -> float:
    """Seconds of a call, the least within one. torch's timer waits for the current GPU."""
    timer = Timer("call()", globals={"call": call})
    return min(timer.blocked_autorange(min_run_time=1.0).times)


def rates_of(device: torch.device) -> dict[str, float]:
    """What a rank measures by itself, on the current device."""
    n, kinds, rates = 1024, {"fp32": torch.float32}, {}
    if device.type == "cuda":
        n, kinds = 8192, {"fp16": torch.float16} | kinds
        if torch.cuda.is_bf16_supported(including_emulation=False):  # both came with the A100
            kinds = {"bf16": torch.bfloat16, "tf32": torch.float32} | kinds
    for name, kind in kinds.items():
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        a, b = (torch.randn(n, n, device=device).to(kind) for _ in range(2))
        rates[name] = 2.0 * n**3 / _least_s(partial(torch.mm, a, b))
    x, y = torch.ones(2**25, device=device), torch.ones(2**25, device=device)
    passes = 2 if device.type == "cuda" else 3  # a CPU reads a line of y before it writes it
    rates["memory"] = passes * x.nbytes / _least_s(lambda: torch.add(x, 1.0, out=y))
    if device.type == "cuda":
        host = torch.ones(2**25, pin_memory=True)
        rates["host"] = host.nbytes / _least_s(lambda: y.copy_(host, non_blocking=True))
    return rates


def _all_reduces(device: torch.device, world: int) -> dict[str, float]:
    """Bus bandwidth of this rank by MiB."""
    rates = {}
    for mib in SIZES[device.type]:
        data = torch.ones(int(mib * 2**20) // 4, device=device)
        timer = Timer("all_reduce(data)", globals={"all_reduce": dist.all_reduce, "data": data})
        # A number of calls that all ranks agree on, after two that are not timed.
        rates[str(mib)] = 2 * (world - 1) / world * data.nbytes / timer.timeit(20).median
    return rates


def measure(launch: Launch) -> list[dict[str, Any]]:
    """What each rank has measured, on every rank."""
    cuda, world = torch.cuda.is_available(), launch.world_size
    torch.set_num_threads(1)
    device, place = torch.device("cpu"), f"{platform.node()} rank {launch.rank}"
    if cuda:
        place = f"{platform.node()} GPU {launch.local_rank}"
        # srun may show each task its own GPU alone.
        device = torch.device("cuda", launch.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)  # which the timer waits for
    rates = rates_of(device) if cuda or launch.rank == 0 else {}
    measured = {"place": place, "rates": rates, "links": {}}
    if world == 1:
        return [measured]
    dist.init_process_group("nccl" if cuda else "gloo", timeout=TIMEOUT)
    measured["links"] = _all_reduces(device, world)
    ranks: list[Any] = [None] * world
    # From host memory, as the ranks of a run tell each other what they have.
    dist.all_gather_object(ranks, measured, dist.new_group(backend="gloo", timeout=TIMEOUT))
    dist.destroy_process_group()
    return ranks


@command_line("parallel.microbench")
def main(argv: list[str] | None = None) -> int:
    Parser(prog="python -m parallel.microbench", description=__doc__).parse_args(argv)
    launch = detect()
    end_with_launcher(launch)
    os.environ.update(rendezvous_environment(launch))
    ranks = measure(launch)
    if launch.rank == 0:
        print(json.dumps(ranks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
