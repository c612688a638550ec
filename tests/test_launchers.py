"""DeepSpeed's launcher starts the same program; test_slurm_real.py has srun."""

import os
import subprocess
import sys
from pathlib import Path

from parallel import forked_ranks
from parallel.record.reader import read_run
from tests.conftest import ROOT

SMALL = ["--preset", "tiny", "--max-seq-len", "32", "--steps", "3", "--device", "cpu"]


def test_the_deepspeed_launcher_starts_it(tokens, tmp_path):
    launcher = Path(sys.executable).with_name("deepspeed")
    port = str(forked_ranks.free_port())  # its own, 29500, may be taken
    command = [str(launcher), "--num_gpus", "2", "--no_local_rank", "--master_port", port]
    command += ["--module", "parallel.train"]
    command += ["--engine", "deepspeed_zero", "--zero-stage", "1", *SMALL]
    command += ["--data", str(tokens), "--out", str(tmp_path / "run")]
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "PATH": f"{launcher.parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = read_run(tmp_path / "run")
    assert run.state == "complete" and run.facts["layout"]["dp"] == 2
