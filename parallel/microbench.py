"""What this machine can do: matrix products, memory, an all-reduce. Prints one JSON object.

    python -m parallel.microbench [--processes 2] [--seconds 1]

One thread a rank, as the CPU studies run; NCCL where there is a GPU, gloo elsewhere. products:
FLOP/s of a square matrix product by precision, 8192 wide on a GPU, 1024 on a CPU; memory_rate:
bytes/s of an addition; links: all-reduce bus bandwidth in bytes/s by MiB.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.benchmark import Timer

from base.bounds import Bounds, check_flags
from base.errors import Parser, command_line

SIZES = {"cpu": (0.25, 4), "cuda": (1, 8, 64, 512)}  # MiB of the all-reduces


def _least_s(call: Callable[[], object], seconds: float) -> float:
    """Seconds of a call, the least of several within `seconds`; of one at least. torch's timer
    waits for the GPU."""
    timer = Timer("call()", globals={"call": call})
    return min(timer.blocked_autorange(min_run_time=seconds).times)


def _products(device: str, seconds: float) -> dict[str, float]:
    """FLOP/s of a square matrix product by precision; the first is the one models train in."""
    n, kinds = 1024, {"fp32": torch.float32}
    if device == "cuda":
        n, kinds = 8192, {"fp16": torch.float16} | kinds
        if torch.cuda.is_bf16_supported(including_emulation=False):  # both came with the A100
            kinds = {"bf16": torch.bfloat16, "tf32": torch.float32} | kinds
    rates = {}
    for name, kind in kinds.items():
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        a, b = (torch.randn(n, n, device=device).to(kind) for _ in range(2))
        rates[name] = 2.0 * n**3 / _least_s(partial(torch.mm, a, b), seconds)
    return rates


def _all_reduce(rank: int, processes: int, meet: str, bandwidths: Any) -> None:
    """Fill in the bus bandwidth of this rank for each of SIZES, side by side."""
    cuda = torch.cuda.is_available()
    torch.set_num_threads(1)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, f"file://{meet}", rank=rank, world_size=processes)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)  # which the timer waits for
    for place, mib in enumerate(SIZES[device.type]):
        data = torch.ones(int(mib * 2**20) // 4, device=device)
        timer = Timer("all_reduce(data)", globals={"all_reduce": dist.all_reduce, "data": data})
        # A number of calls that all ranks agree on, after two that are not timed.
        work = 2 * (processes - 1) / processes * data.numel() * 4
        bandwidths[rank * len(SIZES[device.type]) + place] = work / timer.timeit(20).median
    dist.destroy_process_group()


def measure(processes: int = 2, seconds: float = 1.0) -> dict[str, Any]:
    """The rates of this machine, of one rank."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        processes = min(processes, torch.cuda.device_count())
    torch.set_num_threads(1)
    products = _products(device, seconds)
    x, y = torch.ones(2**25, device=device), torch.ones(2**25, device=device)
    passes = 2 if device == "cuda" else 3  # a CPU reads a line of y before it writes it
    memory_rate = passes * 4 * x.numel() / _least_s(lambda: torch.add(x, 1.0, out=y), seconds)
    links = {}
    if processes > 1:
        sizes = SIZES[device]
        bandwidths = mp.get_context("spawn").Array("d", processes * len(sizes))
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_all_reduce, (processes, f"{folder}/meet", bandwidths), nprocs=processes)
        links = {str(mib): min(bandwidths[at :: len(sizes)]) for at, mib in enumerate(sizes)}
    return {"products": products, "memory_rate": memory_rate, "links": links}


@command_line("parallel.microbench")
def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = Parser(prog="python -m parallel.microbench", description=__doc__)
    about = "ranks of the all-reduce (default: 2)"
    parser.add_argument("--processes", type=int, default=2, metavar="N", help=about)
    about = "seconds of each measurement (default: 1)"
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help=about)
    arguments = parser.parse_args(argv)
    check_flags(arguments, processes=(1, 1024), seconds=Bounds(0, 3600, above=True))
    print(json.dumps(measure(arguments.processes, arguments.seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
