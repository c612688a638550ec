"""Whether the nodes of a job are as fast as they should be: measured in seconds, before training.

    torchrun --nproc-per-node 8 -m parallel.node_check logs/STUDY/RUN
    srun --nodes 2 --ntasks-per-node 8 python -m parallel.node_check logs/STUDY/RUN

Every rank multiplies matrices and copies: to its GPU from the host, or in the host's memory. The
ranks of a node, the first ranks of two nodes and all ranks all-reduce. The first rank of a node
writes into the run's folder. Each is repeated; a rank is compared with the others, with earlier
preflights of its node (logs/STUDY/preflights.csv, which gets the rates) and with a calibration. A
slow node is named in one line. On GPUs this was not tried yet.
"""

import os
import platform
import sys
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

ROUNDS = 9  # and one that does not count
TIMEOUT = timedelta(minutes=1)
# Side of the matrices and how many products, MiB of a copy, of an all-reduce, of a file.
SIZES = {"cpu": (512, 1, 32, 4, 8), "cuda": (8192, 10, 256, 256, 64)}


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call; of a GPU's work, by its own clock."""
    if device.type == "cpu":
        before = time.perf_counter()
        call()
        return time.perf_counter() - before
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1000


def precision_of(device: torch.device) -> str:
    """What models train in here."""
    if device.type == "cpu":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def pairs_of(nodes: int) -> list[list[tuple[int, int]]]:
    """Each node with the next one, in turns in which no node is in two pairs. A node's rate is its
    better pair's: a slow neighbour does not count against it."""
    ring = [(i, (i + 1) % nodes) for i in range(nodes if nodes > 2 else nodes - 1)]
    turns = [ring[0 : nodes - 1 : 2], ring[1::2]]
    turns.append(ring[nodes - 1 :] if nodes % 2 else [])
    return [turn for turn in turns if turn]


class Bench:
    """The measurements of a rank. `node_of`: the node of every rank."""

    def __init__(self, launch: Launch, device: torch.device, node_of: list[str], folder: Path):
        side, self.products, copy, reduced, written = SIZES[device.type]
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        self.a = torch.randn(side, side, device=device).to(kind[precision_of(device)])
        self.host = torch.ones(copy << 18, pin_memory=device.type == "cuda")
        self.there = torch.empty(copy << 18, device=device)
        self.data = torch.zeros(reduced << 18, device=device)
        self.text = os.urandom(1 << 20) * written
        self.device, self.control = device, dist.new_group(backend="gloo", timeout=TIMEOUT)
        nodes = list(dict.fromkeys(node_of))
        members = [[r for r, node in enumerate(node_of) if node == name] for name in nodes]
        self.is_first = any(ranks[0] == launch.rank for ranks in members)
        self.file = folder / f".preflight.{launch.rank}"
        self.node = self._group(launch.rank, members)
        self.pairs = [
            self._group(launch.rank, [[members[a][0], members[b][0]] for a, b in turn])
            for turn in pairs_of(len(nodes))
        ]
        self.all = dist.group.WORLD if launch.world_size > 1 else None

    @staticmethod
    def _group(rank: int, groups: list[list[int]]) -> dist.ProcessGroup | None:
        """The group of this rank; None where it would be alone. Every rank makes every group."""
        made = {tuple(ranks): dist.new_group(ranks, timeout=TIMEOUT) for ranks in groups}
        return next((g for ranks, g in made.items() if rank in ranks and len(ranks) > 1), None)

    def rate(self, amount: float, call: Callable[[], object], takes_part: bool = True) -> float:
        """`amount` a second of a call that all ranks begin together; 0 where it has no part."""
        dist.barrier(self.control)
        return amount / seconds(call, self.device) if takes_part else 0.0

    def reduce(self, group: dist.ProcessGroup | None) -> float:
        """Bytes/s, of the data alone."""
        return self.rate(
            self.data.nbytes, lambda: dist.all_reduce(self.data, group=group), group is not None
        )

    def multiply(self) -> None:
        for _ in range(self.products):
            torch.mm(self.a, self.a)

    def write(self) -> None:
        with self.file.open("wb") as file:
            file.write(self.text)
            os.fsync(file.fileno())

    def round(self) -> dict[str, float]:
        """A rate of every measure, 0 of one that is not this rank's."""
        flops = 2.0 * self.products * len(self.a) ** 3
        return {
            "matmul": self.rate(flops, self.multiply),
            "copy": self.rate(self.host.nbytes, lambda: self.there.copy_(self.host)),
            "in_node": self.reduce(self.node),
            "pair": max([self.reduce(pair) for pair in self.pairs], default=0.0),
            "all": self.reduce(self.all),
            "write": self.rate(len(self.text), self.write, self.is_first),
        }

    def measure(self) -> dict[str, list[float]]:
        """The rates of all rounds, by measure."""
        try:
            rounds = [self.round() for _ in range(1 + ROUNDS)][1:]
        finally:
            self.file.unlink(missing_ok=True)
        return {name: [r[name] for r in rounds] for name in rounds[0] if rounds[0][name]}


def check(launch: Launch, folder: Path, calibration: Path | None) -> None:
    """Measure on every rank; rank 0 prints what is slow, and writes preflights.csv."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        # srun may show each task its own GPU alone.
        device = torch.device("cuda", launch.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    node = os.environ.get("SLURMD_NODENAME") or platform.node()  # as Slurm calls it
    world = dist.new_group(backend="gloo", timeout=TIMEOUT)
    node_of: list[str] = [""] * launch.world_size
    dist.all_gather_object(node_of, node, world)
    measured = Rank(launch.rank, node, Bench(launch, device, node_of, folder).measure())
    ranks: list[Rank] = [measured] * launch.world_size
    dist.all_gather_object(ranks, measured, world)
    dist.destroy_process_group()
    if launch.rank == 0:
        _report(ranks, folder, calibration, precision_of(device))


def _report(ranks: list[Rank], folder: Path, calibration: Path | None, precision: str) -> None:
    study, earlier, expected = folder.absolute().parent, [], (float("nan"), 0.0)
    try:
        earlier = node_rates.read(study)
        if calibration is not None:
            expected = node_rates.expected_flops(calibration, precision)
    except UsageError as error:  # the ranks are compared with each other all the same
        warn("parallel.node_check", error)
    restart, job = os.environ.get("SLURM_RESTART_COUNT", ""), os.environ.get("SLURM_JOB_ID", "")
    job += f".restart{restart}" if job and restart not in ("", "0") else ""
    rows, lines = node_rates.report(ranks, earlier, job, folder.absolute().name, expected)
    for line in lines or [f"none of {len(rows)} nodes is slow ({len(ranks)} ranks)"]:
        print(f"preflight: {printable(line)}")
    node_rates.add(study, rows)


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
