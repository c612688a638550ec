"""What a run on GPUs sets before and while torch starts; shown without a GPU, with stand-ins."""

import contextlib
import json
import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from base.errors import UsageError
from models.gpus import lacking
from parallel import forked_ranks, gpu_check
from parallel.config import library_variables
from parallel.config.resolve import resolve
from parallel.engines import devices
from parallel.record.launch import Launch
from tests.conftest import ROOT

MEGATRON = {"engine": "megatron", "gpus": 2}
ONE_EACH = Launch(13, 16, 5, 8, "srun")


def spec_of(**settings):
    return resolve(("test", settings))


@pytest.mark.parametrize(
    ("settings", "connections"),
    [
        (MEGATRON | {"tp": 2}, "1"),
        (MEGATRON | {"cp": 2, "precision": "bf16"}, "1"),
        (MEGATRON | {"pp": 2}, None),
        ({"engine": "deepspeed_zero", "gpus": 2, "tp": 2, "zero_stage": 3}, None),
        ({"engine": "fsdp2", "gpus": 2, "zero_stage": 3}, None),
    ],
)
def test_kernels_start_in_order_where_messages_of_tp_overlap_them(settings, connections):
    environment = {}
    library_variables.set_variables(spec_of(**settings), environment)
    assert environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == connections
    assert environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_a_users_own_variable_is_kept_and_said():
    spec = spec_of(**MEGATRON, tp=2)
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    environment = dict(own)
    values = library_variables.set_variables(spec, environment)
    assert values == own | {"NVIDIA_TF32_OVERRIDE": "0"} == environment
    lines = library_variables.kept(spec, values)
    assert {line.partition("=")[0] for line in lines} == set(own)


def test_a_variable_that_contradicts_the_arithmetic_is_refused():
    exact = {"deterministic": True}
    for settings, name, value in (
        ({}, "NVIDIA_TF32_OVERRIDE", "1"),
        ({"tf32": True}, "NVIDIA_TF32_OVERRIDE", "0"),
        (exact, "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1"),
        (exact, "NCCL_ALGO", "Ring,Tree"),
    ):
        with pytest.raises(UsageError, match=name):
            library_variables.set_variables(spec_of(**settings), {name: value})
    allowed = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "^NVLS"}
    values = library_variables.set_variables(spec_of(deterministic=True), dict(allowed))
    assert values.items() > allowed.items() and values["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"


def test_the_variables_are_there_before_torch_is_imported(tmp_path):
    """A stand-in for torch prints what it finds and ends the program."""
    (tmp_path / "torch.py").write_text(
        "import os\nprint(os.environ['CUDA_DEVICE_MAX_CONNECTIONS'],"
        " os.environ['PYTORCH_ALLOC_CONF'])\nos._exit(0)\n"
    )
    flags = ["--engine", "megatron", "--tp", "2", "--out", str(tmp_path / "run")]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "PYTORCH_"))}
    environment |= {"PYTHONPATH": f"{tmp_path}:{ROOT}", "TORCHELASTIC_RUN_ID": "1"}
    environment |= {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    command = [sys.executable, "-m", "parallel.train", *flags]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout == "1 expandable_segments:True\n", done.stderr


@pytest.fixture
def gpus(monkeypatch):
    """Lets torch see as many GPUs as the function that is returned is told."""

    def see(count: int, capability: tuple[int, int] = (9, 0)) -> list[int]:
        chosen: list[int] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
        return chosen

    monkeypatch.setenv("LOCAL_RANK", "5")
    return see


def test_a_rank_that_sees_its_own_gpu_alone_takes_that(gpus):
    """srun --gpus-per-task=1. DeepSpeed takes LOCAL_RANK for the GPU's number."""
    spec = spec_of(gpus=16)
    chosen = gpus(1)
    assert devices.choose_device(spec, ONE_EACH) == torch.device("cuda", 0)
    assert chosen == [0] and os.environ["LOCAL_RANK"] == "0"
    assert devices.gpus_on_node(ONE_EACH) == 8
    assert devices.choose_device(spec_of(gpus=16, device="cpu"), ONE_EACH).type == "cpu"
    chosen = gpus(8)
    assert devices.choose_device(spec, ONE_EACH) == torch.device("cuda", 5)
    assert chosen == [5] and os.environ["LOCAL_RANK"] == "5"
    gpus(1)
    with pytest.raises(UsageError, match="8 ranks on this node, but 1 GPUs visible"):
        devices.choose_device(spec, Launch(5, 8, 5, 8, "torchrun"))


@pytest.mark.parametrize("asked", [{"tf32": True}, {"precision": "bf16"}])
def test_a_number_format_needs_a_gpu_that_has_it(asked, gpus):
    gpus(8, (7, 0))
    with pytest.raises(UsageError, match="a GPU has no (tf32|bf16): take another precision"):
        devices.choose_device(spec_of(**asked), ONE_EACH)
    devices.choose_device(spec_of(precision="fp16"), ONE_EACH)


@pytest.mark.parametrize(
    ("arch", "has_fp8", "verdict"),
    [("gfx942:sramecc+:xnack-", True, "ok"), ("gfx90a:sramecc+:xnack-", False, "FAILED")],
)
def test_an_amd_gpu_is_known_by_its_architecture(arch, has_fp8, verdict, gpus, monkeypatch):
    """PyTorch says 9.4 of an MI300X and 9.0 of an MI250X, which has no fp8."""
    gpus(1, (9, 4 if has_fp8 else 0))
    card = SimpleNamespace(gcnArchName=arch, name="AMD Instinct MI300X", total_memory=192 * 10**9)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["gfx942", "gfx950"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (190 * 10**9, 192 * 10**9))
    assert ("fp8" in lacking(["bf16", "fp8"], card.name, devices.capability_of(0))) != has_fp8
    assert lacking(["bf16"], card.name, arch) == []
    refused = contextlib.nullcontext() if has_fp8 else pytest.raises(UsageError, match="no fp8")
    with refused:
        devices.choose_device(spec_of(**MEGATRON, precision="fp8"), ONE_EACH)
    (row,) = [row for row in gpu_check.gpu_rows() if row.check == "architecture"]
    assert (row.verdict, row.value) == (verdict, arch.partition(":")[0])


def test_fp32_is_no_tf32_unless_asked_for(monkeypatch):
    said = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", said.append)
    for settings, kind in (({}, "cuda"), ({"tf32": True}, "cuda"), ({}, "cpu")):
        devices.set_arithmetic(spec_of(**settings), torch.device(kind))
    assert said == ["highest", "high"]
    assert "NVIDIA_TF32_OVERRIDE" not in library_variables.wanted(spec_of(tf32=True))


def test_nccl_connects_at_the_start_on_the_ranks_own_gpu(monkeypatch):
    """But not where megatron-core makes hundreds of groups, each of which all ranks would split."""
    ids = []
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda _, **of: ids.append(of.get("device_id"))
    )
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(devices.distributed_c10d, name, None)
    gpu, cpu, plain = torch.device("cuda", 5), torch.device("cpu"), {"gpus": 16}
    split = {"engine": "deepspeed_zero", "gpus": 16, "tp": 2}
    for settings, device in ((plain, gpu), (MEGATRON, gpu), (split, gpu), (plain, cpu)):
        devices.init_process_group(spec_of(**settings), device, ONE_EACH, print)
    assert ids == [gpu, None, None, None]
    assert len(set(resource.getrlimit(resource.RLIMIT_NOFILE))) == 1  # gloo opens many files


def test_the_driver_is_read_where_it_says_its_version(tmp_path, monkeypatch):
    path = tmp_path / "version"
    monkeypatch.setattr(devices, "DRIVER", path)
    assert devices.driver() is None
    path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26")
    assert devices.driver() == "570.124.06"


def worker(*arguments: object, **variables: str) -> subprocess.Popen:
    command = [*forked_ranks.prefix("ddp", 1, 0), "-m", "tests.gloo_worker", *map(str, arguments)]
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_GLOO_LAZY_INIT"} | variables
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_one_group_of_1024_ranks_on_gpus_is_gloos(tmp_path):
    """All other groups are NCCL's alone; and gloo connects a rank to those it has a message for."""
    (*_, counted) = map(json.loads, worker().communicate()[0].splitlines())
    assert counted == {"groups": [1024], "lazy": "1"}
    ranks = [worker(tmp_path, rank, TORCH_GLOO_LAZY_INIT="1") for rank in range(6)]
    printed = [rank.communicate()[0] for rank in ranks]
    assert (
        int(printed[0]) == 5
    )  # where it listens; neighbours in a ring (1, 5), in a tree (1, 2, 4)
