"""What rank 0 connects to: the groups of a run of 1,024 ranks on GPUs, or the sockets of six."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel.config.resolve import resolve
from parallel.engines import cpu, devices
from parallel.ranks import Ranks
from parallel.record.launch import Launch

WORLD, RANKS = 1024, 6


def count_groups() -> None:
    """Print the sizes of the gloo groups that rank 0 of WORLD is in; every group is a stand-in."""
    make, gloo = distributed_c10d._new_process_group_helper, []

    def noted(size: int, rank: int, members: list[int], backend: str, *rest, **kwargs):
        backends = distributed_c10d.BackendConfig(distributed_c10d.Backend(backend))
        if "gloo" in backends.device_backend_map.values() and (not members or 0 in members):
            gloo.append(size)
        kwargs["device_id"] = None
        group, store = make(size, rank, members, "fake", *rest, **kwargs)
        if not members:  # what later groups inherit
            distributed_c10d._world.pg_map[group] = (backend, store)
        return group, store

    distributed_c10d._new_process_group_helper = noted
    distributed_c10d.rendezvous = lambda *_, **__: iter([(FakeStore(), 0, WORLD)])
    settings = {"engine": "megatron", "preset": "175b", "tp": 8, "pp": 8, "zero_stage": 1}
    spec = resolve(("test", settings), gpus=WORLD)
    devices.init_process_group(spec, torch.device("cuda", 0), Launch(0, WORLD, 0, 8, "srun"), print)
    Ranks(0, WORLD)
    cpu.import_megatron()
    from parallel.engines import megatron_config

    megatron_config.start(spec, cuda=False)
    print(json.dumps({"groups": gloo, "lazy": os.environ.get("TORCH_GLOO_LAZY_INIT")}))


def count_sockets(folder: Path, rank: int) -> None:
    """Print the sockets that this rank has open when the ranks have told each other something."""
    dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
    store = dist.FileStore(str(folder / "store"), RANKS)
    distributed_c10d._world.pg_map[dist.group.WORLD] = ("fake", store)
    ranks = Ranks(rank, RANKS)
    for _ in range(2):
        assert ranks.gather(rank) == list(range(RANKS))
        assert ranks.on_first(lambda: "read") == "read"
        collected = ranks.gather(rank, to_all=False)
        assert rank or collected == list(range(RANKS))
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    (folder / f"counted-{rank}").touch()
    while len(list(folder.glob("counted-*"))) < RANKS:
        time.sleep(0.05)
    if rank == 0:
        print(sum(link.startswith("socket:") for link in links))


if __name__ == "__main__":
    count_groups() if len(sys.argv) == 1 else count_sockets(Path(sys.argv[1]), int(sys.argv[2]))
