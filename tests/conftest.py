"""What the tests share: where things are, and how a command is run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("SCALING_SHARED", ROOT.parent / "shared"))


@pytest.fixture
def shared() -> Path:
    """Published material beside the checkout; tests that need it skip where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"published material is not here ({SHARED}; set SCALING_SHARED)")
    return SHARED


def run_module(*arguments: str, ranks: int = 0, timeout: float = 300, **environment: str):
    """`python -m ...` from the repository root, under torchrun with `ranks` ranks if not 0."""
    command = [sys.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*command, "-m", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture(scope="session")
def tokens(tmp_path_factory) -> Path:
    """A prepared folder of the standard library's text."""
    from parallel import data

    out = tmp_path_factory.mktemp("tokens") / "stdlib"
    data.prepare(out, [])
    return out
