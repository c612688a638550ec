"""What this machine can do: matrix products, memory, an all-reduce. Prints one JSON object.

    python -m parallel.microbench [--processes 2] [--seconds 1]

One thread a rank, as the CPU studies run; NCCL where there is a GPU, gloo elsewhere. flops: FLOP/s
of a 1024^3 product; memory_rate: bytes/s of an addition; link: all-reduce bus bandwidth, bytes/s.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from models.bounds import Bounds, check_flags
from models.errors import Parser, command_line


def _rate(work: float, call: Callable[[], object], seconds: float, cuda: bool) -> float:
    """Work per second, the best of repeated calls over `seconds`; of one call at least."""
    best = 0.0
    call()
    end = time.perf_counter() + seconds
    while best == 0.0 or time.perf_counter() < end:
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
        best = max(best, work / (time.perf_counter() - start))
    return best


def _all_reduce(rank: int, processes: int, meet: str, bandwidths: object) -> None:
    cuda = torch.cuda.is_available()
    torch.set_num_threads(1)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, f"file://{meet}", rank=rank, world_size=processes)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    data = torch.ones((64 if cuda else 4) * 2**20 // 4, device=device)
    dist.all_reduce(data)
    start, n = time.perf_counter(), 20  # a fixed number: ranks must agree on when to stop
    for _ in range(n):
        dist.all_reduce(data)
    if cuda:
        torch.cuda.synchronize()
    once = (time.perf_counter() - start) / n
    bandwidths[rank] = 2 * (processes - 1) / processes * data.numel() * 4 / once
    dist.destroy_process_group()


def measure(processes: int = 2, seconds: float = 1.0) -> dict[str, float]:
    """The rates of this machine, of one rank."""
    cuda = torch.cuda.is_available()
    if cuda:
        processes = min(processes, torch.cuda.device_count())
    torch.set_num_threads(1)
    device = torch.device("cuda" if cuda else "cpu")
    n = 8192 if cuda else 1024
    kind = torch.bfloat16 if cuda else torch.float32
    a, b = torch.randn(n, n, device=device).to(kind), torch.randn(n, n, device=device).to(kind)
    x, y = torch.ones(2**25, device=device), torch.ones(2**25, device=device)
    result = {
        "flops": _rate(2.0 * n**3, lambda: torch.mm(a, b), seconds, cuda),
        "memory_rate": _rate(3.0 * x.numel() * 4, lambda: torch.add(x, 1.0, out=y), seconds, cuda),
        "memory_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        "link": 0.0,
    }
    if cuda:
        result["memory_gb"] = torch.cuda.get_device_properties(0).total_memory / 1e9
    if processes > 1:
        bandwidths = mp.get_context("spawn").Array("d", processes)
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_all_reduce, (processes, f"{folder}/meet", bandwidths), nprocs=processes)
        result["link"] = min(bandwidths)
    return result


@command_line("parallel.microbench")
def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = Parser(prog="python -m parallel.microbench", description=__doc__)
    parser.add_argument(
        "--processes", type=int, default=2, metavar="N", help="ranks of the all-reduce (default: 2)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=1.0,
        metavar="S",
        help="seconds of each measurement (default: 1)",
    )
    arguments = parser.parse_args(argv)
    check_flags(arguments, processes=(1, 1024), seconds=Bounds(0, 3600, above=True))
    print(json.dumps(measure(arguments.processes, arguments.seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
