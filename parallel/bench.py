"""Measures in seconds what this machine's ranks can do, on every rank at once.

    torchrun --nproc-per-node 8 -m parallel.bench
    srun --nodes 2 --ntasks-per-node 8 python -m parallel.bench logs/STUDY/RUN

Each rank multiplies matrices in the precisions that it has, adds in memory, and copies: from pinned
host memory to its GPU, or within host memory. The ranks of a node and all ranks all-reduce. Each
is repeated in rounds, in which all ranks begin together. A rank has one thread, as in the CPU
studies. Messages go by NCCL on GPUs, by gloo elsewhere.

Without FOLDER rank 0 prints JSON: for each rank its node, its place and, by measure, the FLOP/s or
bytes/s of each round; `fp32` and the like are matrix products.

With the FOLDER of a run it is a preflight: are its nodes as fast as they should be? The first rank
of a node writes into the folder, too. A rank is compared with the others, with earlier preflights
of its node (logs/STUDY/preflights.csv, which gets the rates) and, in matrix products, with a
calibration. A line names each slow node. This was not tried on GPUs yet.
"""

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from base.errors import Parser, UsageError, command_line, printable, warn
from base.files import named_folder
from parallel.measure import node_rates
from parallel.measure.node_rates import IN_NODE, RankRates
from parallel.record.launch import Launch, detect, end_with_launcher, rendezvous_environment
from parallel.record.reader import read_rows
from parallel.record.writer import append_rows

ROUNDS = 9  # and one that does not count
LIMIT, PREFLIGHT_LIMIT = timedelta(minutes=3), timedelta(minutes=1)  # of what ranks do together
SIDE = {"cpu": 1024, "cuda": 8192}  # of the matrices
COPY_MIB = {"cpu": 32, "cuda": 256}
REDUCED_MIB = {"cpu": (0.25, 4), "cuda": (1, 8, 64, 512)}
WRITTEN_MIB = {"cpu": 8, "cuda": 64}
# A GPU is asked for so many at once: else it would wait for the host between short ones.
IN_A_ROW = {"cpu": 1, "cuda": 10}


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of a call, on a GPU until its work is done."""
    before = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - before


def device_of(launch: Launch) -> torch.device:
    """Returns this rank's GPU, or the CPU; srun may show each task its own GPU alone."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", launch.local_rank % torch.cuda.device_count())


def precisions(device: torch.device) -> dict[str, torch.dtype]:
    """Returns the precisions of a device's matrix products, the one that models train in first."""
    if device.type == "cpu":
        return {"fp32": torch.float32}
    kinds = {"fp16": torch.float16, "fp32": torch.float32}
    if torch.cuda.is_bf16_supported(including_emulation=False):  # both came with the A100
        kinds = {"bf16": torch.bfloat16, "tf32": torch.float32} | kinds
    return kinds


Calls = dict[str, tuple[float, Callable[[], object]]]  # FLOPs or bytes, and what to repeat


def own_calls(device: torch.device, is_preflight: bool) -> Calls:
    """Returns the calls that a rank repeats by itself; for a preflight in one precision alone."""
    side, repeats, calls = SIDE[device.type], IN_A_ROW[device.type], {}

    def products(matrix: torch.Tensor, tf32: bool) -> Callable[[], None]:
        def multiply() -> None:
            torch.backends.cuda.matmul.allow_tf32 = tf32
            for _ in range(repeats):
                torch.mm(matrix, matrix)

        return multiply

    for name, kind in precisions(device).items():
        matrix = torch.randn(side, side, device=device).to(kind)
        calls[name] = 2.0 * repeats * side**3, products(matrix, name == "tf32")
    if is_preflight:
        calls = {"matmul": next(iter(calls.values()))}
    else:
        terms, sums = torch.ones(2**25, device=device), torch.ones(2**25, device=device)
        passes = 2 if device.type == "cuda" else 3  # a CPU reads a line of y before it writes it

        def add() -> None:
            for _ in range(repeats):
                torch.add(terms, 1.0, out=sums)

        calls["memory"] = passes * repeats * terms.nbytes, add
    host = torch.ones(COPY_MIB[device.type] << 18, pin_memory=device.type == "cuda")
    copied = torch.empty(COPY_MIB[device.type] << 18, device=device)
    calls["copy"] = host.nbytes, lambda: copied.copy_(host)
    return calls


def shared_calls(
    rank: int, node_of: list[str], device: torch.device, folder: Path | None, limit: timedelta
) -> Calls:
    """Returns the calls that this rank makes together with others. node_of: the node of every rank.

    A measure in which it has no part is absent. With 0 bytes it takes part, and another rank's time
    counts: the ranks of an all-reduce wait for each other.
    """
    ranks_of: dict[str, list[int]] = {}
    for member, node in enumerate(node_of):
        ranks_of.setdefault(node, []).append(member)
    in_node, _ = dist.new_subgroups_by_enumeration(list(ranks_of.values()), timeout=limit)
    is_first, calls = rank == ranks_of[node_of[rank]][0], {}

    def reduces(mib: float, group: Any, counts: bool) -> tuple[float, Callable[[], None]]:
        data, repeats = torch.zeros(int(mib * 2**18), device=device), 20 if mib <= 8 else 1

        def reduce() -> None:
            for _ in range(repeats):
                dist.all_reduce(data, group=group)

        return repeats * data.nbytes if counts else 0, reduce

    sizes, largest = REDUCED_MIB[device.type], REDUCED_MIB[device.type][-1]
    of_all = {f"all-reduce of {mib:g} MiB": mib for mib in sizes}
    of_node = f"all-reduce of {largest:g} MiB {IN_NODE}"
    if folder is not None:
        of_all, of_node = {"all": largest}, "in_node"
    if len(ranks_of[node_of[rank]]) > 1:
        calls[of_node] = reduces(largest, in_node, is_first)
    if len(node_of) > 1:
        calls |= {name: reduces(mib, None, rank == 0) for name, mib in of_all.items()}
    if folder is not None and is_first:
        text = os.urandom(1 << 20) * WRITTEN_MIB[device.type]

        def write() -> None:
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                file.write(text)
                os.fsync(file.fileno())

        calls["write"] = len(text), write
    return calls


def measure(launch: Launch, folder: Path | None = None) -> list[RankRates]:
    """Returns the rates that each rank has measured, on every rank."""
    torch.set_num_threads(1)
    node = os.environ.get("SLURMD_NODENAME") or platform.node()  # as Slurm calls it
    device, place = device_of(launch), f"{node} rank {launch.rank}"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        place = f"{node} GPU {launch.local_rank}"
    limit = LIMIT if folder is None else PREFLIGHT_LIMIT
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=limit)
    # From host memory, as the ranks of a run tell each other what they have.
    hosts = dist.new_group(backend="gloo", timeout=limit)
    node_of: list[str] = [""] * launch.world_size
    dist.all_gather_object(node_of, node, hosts)
    calls = own_calls(device, folder is not None)
    calls |= shared_calls(launch.rank, node_of, device, folder, limit)
    measures: list[list[str]] = [[]] * launch.world_size
    dist.all_gather_object(measures, list(calls), hosts)
    order = dict.fromkeys(name for names in measures for name in names)
    rates: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(1 + ROUNDS):
        for name in order:
            dist.barrier(hosts)  # all ranks begin together
            if name in calls:
                amount, call = calls[name]
                rates[name].append(amount / seconds(call, device))
    counted = {name: values[1:] for name, values in rates.items() if calls[name][0]}
    own_rates = RankRates(launch.rank, node, place, counted)
    ranks: list[RankRates] = [own_rates] * launch.world_size
    dist.all_gather_object(ranks, own_rates, hosts)
    dist.destroy_process_group()
    return ranks


def report(ranks: list[RankRates], folder: Path, calibration: Path | None, precision: str) -> None:
    """Prints which nodes are slow, and adds their rates to preflights.csv beside the run."""
    path, earlier, expected = folder.parent / node_rates.FILE, [], node_rates.UNKNOWN
    try:
        earlier = read_rows(path, node_rates.COLUMNS)
        if calibration is not None:
            expected = node_rates.expected_flops(calibration, precision)
    except UsageError as error:  # the ranks are compared with each other all the same
        warn("parallel.bench", error)
    job = os.environ.get("SLURM_JOB_ID", "")
    rows, lines = node_rates.report(ranks, earlier, job, folder.name, expected)
    for line in lines or [f"none of {len(rows)} nodes is slow ({len(ranks)} ranks)"]:
        print(f"preflight: {printable(line)}")
    append_rows(path, node_rates.COLUMNS, rows)


@command_line("parallel.bench")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m parallel.bench", description=__doc__)
    about = "the folder of the run that a preflight is for"
    parser.add_argument("folder", nargs="?", type=named_folder, metavar="FOLDER", help=about)
    about = "of analysis.calibrate, for the GPUs' matrix products of a preflight"
    parser.add_argument("--calibration", type=Path, metavar="FILE", help=about)
    arguments = parser.parse_args(argv)
    folder, launch = arguments.folder, detect()
    end_with_launcher(launch)
    os.environ.update(rendezvous_environment(launch))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    ranks = measure(launch, folder)
    if launch.rank == 0 and folder is not None:
        precision = next(iter(precisions(device_of(launch))))
        report(ranks, folder.absolute(), arguments.calibration, precision)
    elif launch.rank == 0:
        print(json.dumps([rank._asdict() for rank in ranks]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
