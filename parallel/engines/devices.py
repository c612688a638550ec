"""Which device this rank trains on, what its memory holds, and the process group of all ranks."""

import contextlib
import json
import os
import re
import resource
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from base.errors import UsageError
from base.units import GIB
from models.gpus import lacking
from models.headroom import adam_bytes
from parallel.config.run_spec import RunSpec
from parallel.record.hangs import GpuWork
from parallel.record.launch import Launch
from parallel.record.signals import deadline

DRIVER = Path("/proc/driver/nvidia/version")


def choose_device(spec: RunSpec, launch: Launch) -> torch.device:
    """Returns the device that this rank trains on. From here on LOCAL_RANK is the GPU's number
    among those that this rank sees: DeepSpeed takes it for that."""
    has_gpu = torch.cuda.is_available()
    if spec.device == "cpu" or not has_gpu:
        if spec.needing_a_gpu:
            raise UsageError(f"{spec.needing_a_gpu} needs a GPU, and torch sees none")
        return torch.device("cpu")
    if launch.local_world_size > (visible := gpus_on_node(launch)):
        raise UsageError(
            f"{launch.local_world_size} ranks on this node, but {visible} GPUs visible;"
            " start one rank per GPU, or use --device cpu"
        )
    index = launch.local_rank if torch.cuda.device_count() > 1 else 0
    torch.cuda.set_device(index)
    name = torch.cuda.get_device_name(index)
    if lacks := lacking(spec.formats, name, capability_of(index)):
        raise UsageError(f"{name} has no {' and no '.join(lacks)}: take another precision")
    os.environ["LOCAL_RANK"] = str(index)
    return torch.device("cuda", index)


def capability_of(index: int) -> tuple[int, int] | str:
    """Returns NVIDIA's compute capability of a GPU, or AMD's name of its architecture. PyTorch
    calls gfx90a 9.0 and gfx942 9.4, which are no compute capabilities."""
    if torch.version.hip:
        return torch.cuda.get_device_properties(index).gcnArchName
    return torch.cuda.get_device_capability(index)


def gpus_on_node(launch: Launch) -> int:
    """Returns how many GPUs this node's ranks have. srun --gpus-per-task=1 shows each task only its
    own GPU."""
    visible = torch.cuda.device_count()
    return launch.local_world_size if launch.launcher == "srun" and visible == 1 else visible


def set_arithmetic(spec: RunSpec, device: torch.device) -> None:
    """Sets how torch's own kernels compute. What the other libraries read from the environment is
    in parallel/config/library_variables.py."""
    if device.type == "cuda":  # an image or a site may have set another default
        torch.set_float32_matmul_precision("high" if spec.tf32 else "highest")
    if spec.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        torch.utils.deterministic.fill_uninitialized_memory = False  # nothing reads such memory


def gpu_facts(device: torch.device, launch: Launch) -> dict[str, Any]:
    """Returns what run.json says of the GPU and its software; None where there is none."""
    cuda = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if cuda else None,
        "gpus_visible": gpus_on_node(launch) if cuda else 0,
        "gpus_visible_to_rank_0": torch.cuda.device_count() if cuda else 0,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "driver": driver() if cuda else None,
    }


def gpu_work(stream: torch.cuda.Stream, rank: int, folder: Path) -> GpuWork:
    """Returns what the GPU has yet to do, for the watchdog. `folder` gets what NCCL last did and
    has to do, as PyTorch records it (the last 2,000 operations), in the file that its
    `torchfrtrace` reads."""
    module = torch._C._distributed_c10d
    record = module._dump_nccl_trace(includeStackTraces=False)
    (folder / f"nccl_trace_rank_{rank}").write_bytes(record)
    return work_of_record(not stream.query(), module._dump_nccl_trace_json())


def work_of_record(busy: bool, record: bytes) -> GpuWork:
    """Returns what a flight record in JSON says of the GPU's work. An empty one (its buffer was
    switched off) says nothing.

    The numbers of each group are read, and not the states of single operations: those of a batch of
    messages never become complete.
    """
    trace = json.loads(record)
    created_ns = [operation["time_created_ns"] for operation in trace.get("entries", [])]
    if not created_ns:
        return GpuWork(busy, None, None)
    groups = trace["pg_status"].values()
    enqueued, completed = "last_enqueued_collective", "last_completed_collective"
    unfinished = sum(group[enqueued] != group[completed] for group in groups)
    return GpuWork(busy, unfinished, time.time() - max(created_ns) / 1e9)


def driver() -> str | None:
    """Returns the version of NVIDIA's kernel driver; None where it does not say."""
    with contextlib.suppress(OSError):
        if version := re.search(r"\d+\.\d+(\.\d+)?", DRIVER.read_text()):
            return version[0]
    return None


def check_memory(spec: RunSpec, ranks: int) -> None:
    """Refuses a model whose weights and AdamW's state alone exceed the memory of a machine
    without GPUs, on which `ranks` ranks train. Gradients and activations come on top.

    Raises:
        UsageError: with both numbers. Without it the kernel kills the process while it builds.
    """
    layout, width = spec.layout, 4 if spec.precision == "fp32" else 2
    copies = layout.expert_copies if spec.model.experts else layout.dp * layout.cp
    # What is offloaded is in this machine's memory, too.
    weights = width * (1 if layout.zero_stage == 3 or spec.engine == "fsdp2" else copies)
    adam = adam_bytes(width) * (1 if layout.zero_stage else copies)
    needed = spec.model.n_params * (weights + adam) * ranks / layout.world_size
    if needed > (free := psutil.virtual_memory().available):
        raise UsageError(
            f"{spec.model.n_params:,} parameters need {needed / GIB:.1f} GiB on this machine for"
            f" weights and AdamW alone (ranks: {ranks}), but {free / GIB:.1f} GiB of memory are"
            " available: take a smaller model, or see the run without starting it with --check"
        )


def init_process_group(
    spec: RunSpec, device: torch.device, launch: Launch, fail: Callable[[str], None]
) -> None:
    """Starts the process group of all ranks: gloo on CPU; NCCL alone on CUDA, for every group that
    a library makes has this backend, too. What ranks tell each other from host memory goes through
    parallel/ranks.py.

    Raises:
        UsageError: rank 0 cannot listen at the master's port. Where another program does, the
            other ranks would wait for its answer: after timeout_s they call `fail` and end.
    """
    timeout = timedelta(seconds=spec.timeout_s)
    # Every group that a library or we make without a limit of its own has this one.
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    backend = "gloo" if device.type == "cpu" else "nccl"
    if device.type == "cuda":  # gloo then connects two ranks when they first have a message
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    options: dict[str, Any] = {"timeout": timeout, "rank": launch.rank}
    if launch.world_size == 1:
        options["store"] = dist.HashStore()
    elif device.type == "cuda" and not spec.megatron_layers:
        # NCCL then connects here and not in the first step, and all ranks take part in splitting
        # off each later group. megatron-core makes 1,697 groups of 512 ranks; and messages that are
        # not batched, as its interleaved schedule has and overlaps, would wait for each other.
        options["device_id"] = device
    # gloo connects every two ranks of a group, and a shell often allows 1,024 open files.
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a system may allow less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    master = ":".join(os.environ.get(f"MASTER_{part}", "?") for part in ("ADDR", "PORT"))
    reason = (
        f"rank {launch.rank} did not meet the other {launch.world_size - 1} ranks at {master}"
        f" within {spec.timeout_s:g} s: not all of them came, or another program holds that port"
    )
    try:
        with deadline(spec.timeout_s, reason, fail):
            dist.init_process_group(backend, world_size=launch.world_size, **options)
    except dist.DistNetworkError as error:
        line = str(error).splitlines()[0]
        raise UsageError(f"{reason}; set MASTER_PORT to a free one ({line})") from error
