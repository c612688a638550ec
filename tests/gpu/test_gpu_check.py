"""Every check of `python -m parallel.gpu_check` on this machine's GPUs."""

import pytest
import torch

from parallel import gpu_bench, gpu_check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]


@pytest.fixture(scope="session")
def bench(tmp_path_factory) -> gpu_bench.Bench:
    return gpu_bench.Bench("cuda", None, tmp_path_factory.mktemp("gpu-check") / "out")


@pytest.mark.parametrize("check", gpu_check.names())
def test_a_check_of_this_machines_gpus_passes(check, bench):
    rows = gpu_check.make(bench, check)
    failed = [str(row) for row in rows if row.verdict == gpu_bench.FAILED]
    assert not failed, "\n".join([*failed, str(bench.out)])
    skipped = [row.value for row in rows if row.verdict == gpu_bench.SKIPPED]
    if len(skipped) == len(rows):
        pytest.skip("; ".join(skipped))
