"""Whether the nodes of a job are as fast as they should be: measured in seconds, before training.

    torchrun --nproc-per-node 8 -m parallel.node_check logs/STUDY/RUN
    srun --nodes 2 --ntasks-per-node 8 python -m parallel.node_check logs/STUDY/RUN

Every rank multiplies matrices and copies: to its GPU from the host, or in the host's memory. The
ranks of a node and all ranks all-reduce. The first rank of a node writes into the run's folder.
Each is repeated; a rank is compared with the others, with earlier preflights of its node
(logs/STUDY/preflights.csv, which gets the rates) and with a calibration. A slow node is named in
one line. On GPUs this was not tried yet.
"""

import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from base.errors import Parser, UsageError, command_line, printable, warn
from parallel.record import node_rates
from parallel.record.launch import Launch, detect, end_with_launcher, rendezvous_environment
from parallel.record.node_rates import Rank
from parallel.record.reader import read_rows
from parallel.record.writer import append_rows

ROUNDS = 9  # and one that does not count
TIMEOUT = timedelta(minutes=1)
# Side of the matrices and how many products, MiB of a copy, of an all-reduce, of a file.
SIZES = {"cpu": (512, 1, 32, 4, 8), "cuda": (8192, 10, 256, 256, 64)}
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, on a GPU until its work is done."""
    before = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - before


def calls_of(
    rank: int, node_of: list[str], device: torch.device, precision: str, folder: Path
) -> dict[str, tuple[float, Callable[[], object]]]:
    """What this rank repeats: FLOPs or bytes, and the call, by measure. node_of: the node of every
    rank. A measure in which this rank has no part is absent. With 0 bytes it takes part, and
    another rank's time counts: the ranks of an all-reduce wait for each other."""
    side, products, copy, reduced, written = SIZES[device.type]
    a = torch.randn(side, side, device=device).to(KINDS[precision])
    host = torch.ones(copy << 18, pin_memory=device.type == "cuda")
    there = torch.empty(copy << 18, device=device)
    data = torch.zeros(reduced << 18, device=device)
    text = os.urandom(1 << 20) * written
    members = [[r for r, of in enumerate(node_of) if of == node] for node in dict.fromkeys(node_of)]
    in_node, _ = dist.new_subgroups_by_enumeration(members, timeout=TIMEOUT)

    def multiply() -> None:
        for _ in range(products):
            torch.mm(a, a)

    def write() -> None:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(text)
            os.fsync(file.fileno())

    calls = {
        "matmul": (2.0 * products * side**3, multiply),
        "copy": (host.nbytes, lambda: there.copy_(host)),
    }
    is_first = rank == node_of.index(node_of[rank])
    if node_of.count(node_of[rank]) > 1:
        amount = data.nbytes if is_first else 0
        calls["in_node"] = amount, lambda: dist.all_reduce(data, group=in_node)
    if len(node_of) > 1:
        calls["all"] = data.nbytes if rank == 0 else 0, lambda: dist.all_reduce(data)
    if is_first:
        calls["write"] = len(text), write
    return calls


def check(launch: Launch, folder: Path, calibration: Path | None) -> None:
    """Measure on every rank; rank 0 prints what is slow, and writes preflights.csv."""
    torch.set_num_threads(1)
    device, precision = torch.device("cpu"), "fp32"
    if torch.cuda.is_available():
        # srun may show each task its own GPU alone.
        device = torch.device("cuda", launch.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bf16" if has_bf16 else "fp16"
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    hosts = dist.new_group(backend="gloo", timeout=TIMEOUT)  # of all ranks
    node = os.environ.get("SLURMD_NODENAME") or platform.node()  # as Slurm calls it
    node_of: list[str] = [""] * launch.world_size
    dist.all_gather_object(node_of, node, hosts)
    calls = calls_of(launch.rank, node_of, device, precision, folder)
    rates: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(1 + ROUNDS):
        for name in node_rates.MEASURES:
            dist.barrier(hosts)  # all ranks begin together
            if name in calls:
                amount, call = calls[name]
                rates[name].append(amount / seconds(call, device))
    counted = {name: values[1:] for name, values in rates.items() if calls[name][0]}
    measured = Rank(launch.rank, node, counted)
    ranks: list[Rank] = [measured] * launch.world_size
    dist.all_gather_object(ranks, measured, hosts)
    dist.destroy_process_group()
    if launch.rank == 0:
        _report(ranks, folder.absolute(), calibration, precision)


def _report(ranks: list[Rank], folder: Path, calibration: Path | None, precision: str) -> None:
    path, earlier, expected = folder.parent / node_rates.FILE, [], node_rates.UNKNOWN
    try:
        earlier = read_rows(path, node_rates.COLUMNS)
        if calibration is not None:
            expected = node_rates.expected_flops(calibration, precision)
    except UsageError as error:  # the ranks are compared with each other all the same
        warn("parallel.node_check", error)
    job = os.environ.get("SLURM_JOB_ID", "")
    rows, lines = node_rates.report(ranks, earlier, job, folder.name, expected)
    for line in lines or [f"none of {len(rows)} nodes is slow ({len(ranks)} ranks)"]:
        print(f"preflight: {printable(line)}")
    append_rows(path, node_rates.COLUMNS, rows)


@command_line("parallel.node_check")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m parallel.node_check", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the run's folder")
    what = "of analysis.calibrate, for the GPUs' matrix products"
    parser.add_argument("--calibration", type=Path, metavar="FILE", help=what)
    arguments = parser.parse_args(argv)
    launch = detect()
    end_with_launcher(launch)
    os.environ.update(rendezvous_environment(launch))
    arguments.folder.mkdir(parents=True, exist_ok=True)
    check(launch, arguments.folder, arguments.calibration)
    return 0


if __name__ == "__main__":
    sys.exit(main())
