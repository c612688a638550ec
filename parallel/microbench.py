"""What this machine can do: matrix products, memory, an all-reduce. Prints one JSON object.

    python -m parallel.microbench [--processes 2] [--seconds 1]

One thread a rank, as the CPU studies run; NCCL where there is a GPU, gloo elsewhere. flops: FLOP/s
of a matrix product, 8192^3 in bf16 (fp16) on a GPU, 1024^3 in fp32 on a CPU, and products: by
precision; memory_rate: bytes/s of an addition; link: all-reduce bus bandwidth in bytes/s of 64 MiB
(on a CPU 4), and links: by MiB.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from base.bounds import Bounds, check_flags
from base.errors import Parser, command_line

SIZES = {"cpu": (0.25, 4), "cuda": (1, 8, 64, 512)}  # MiB of the all-reduces
LINK = {"cpu": 4, "cuda": 64}  # the one of them that a calibration takes


def _rate(work: float, call: Callable[[], object], seconds: float, cuda: bool) -> float:
    """Work per second, the best of repeated calls over `seconds`; of one call at least."""
    best, wait = 0.0, torch.cuda.synchronize if cuda else lambda: None
    call()
    end = time.perf_counter() + seconds
    while best == 0.0 or time.perf_counter() < end:
        wait()
        start = time.perf_counter()
        call()
        wait()
        best = max(best, work / (time.perf_counter() - start))
    return best


def _products(cuda: bool, seconds: float) -> dict[str, float]:
    """FLOP/s of a square matrix product by precision; the first is the one models train in."""
    n = 8192 if cuda else 1024
    kinds = {"fp32": torch.float32}
    if cuda:
        kinds = {"fp16": torch.float16} | kinds
        if torch.cuda.is_bf16_supported(including_emulation=False):  # both came with the A100
            kinds = {"bf16": torch.bfloat16, "tf32": torch.float32} | kinds
    rates = {}
    for name, kind in kinds.items():
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        a, b = (torch.randn(n, n, device="cuda" if cuda else "cpu").to(kind) for _ in range(2))
        rates[name] = _rate(2.0 * n**3, partial(torch.mm, a, b), seconds, cuda)
    return rates


def _all_reduce(rank: int, processes: int, meet: str, bandwidths: object) -> None:
    """Fill in the bus bandwidth of this rank for each of SIZES, side by side."""
    cuda = torch.cuda.is_available()
    torch.set_num_threads(1)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, f"file://{meet}", rank=rank, world_size=processes)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    for place, mib in enumerate(SIZES[device.type]):
        data = torch.ones(int(mib * 2**20) // 4, device=device)

        def twenty(data: torch.Tensor = data) -> None:  # ranks must agree on when to stop
            for _ in range(20):
                dist.all_reduce(data)

        # The second twenty are timed.
        work = 20 * 2 * (processes - 1) / processes * data.numel() * 4
        bandwidths[rank * len(SIZES[device.type]) + place] = _rate(work, twenty, 0.0, cuda)
    dist.destroy_process_group()


def measure(processes: int = 2, seconds: float = 1.0) -> dict[str, Any]:
    """The rates of this machine, of one rank."""
    cuda = torch.cuda.is_available()
    if cuda:
        processes = min(processes, torch.cuda.device_count())
    torch.set_num_threads(1)
    device = torch.device("cuda" if cuda else "cpu")
    products = _products(cuda, seconds)
    x, y = torch.ones(2**25, device=device), torch.ones(2**25, device=device)
    passes = 2.0 if cuda else 3.0  # a CPU reads a line of y before it writes it
    result = {
        "flops": next(iter(products.values())),
        "products": products,
        "memory_rate": _rate(
            passes * 4 * x.numel(), lambda: torch.add(x, 1.0, out=y), seconds, cuda
        ),
        "memory_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        "link": 0.0,
        "links": {},
    }
    if cuda:
        result["memory_gb"] = torch.cuda.get_device_properties(0).total_memory / 1e9
    if processes > 1:
        sizes = SIZES[device.type]
        bandwidths = mp.get_context("spawn").Array("d", processes * len(sizes))
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_all_reduce, (processes, f"{folder}/meet", bandwidths), nprocs=processes)
        slowest = [min(bandwidths[place :: len(sizes)]) for place in range(len(sizes))]
        result["links"] = dict(zip(map(str, sizes), slowest, strict=True))
        result["link"] = result["links"][str(LINK[device.type])]
    return result


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
