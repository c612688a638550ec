"""A stand-in for parallel.train under a real Slurm, a job's script and torchrun.

It writes a run folder and handles SIGUSR1, but trains nothing and does not import torch, so that
the test is fast. It writes steps for ten minutes, or five steps after a restart of the job. On
SIGUSR1 it writes the status `interrupted` and exits with 75.
"""

import os
import signal
import sys
import time
from pathlib import Path

from base.files import read_json
from parallel.record.ends import Kind
from parallel.record.facts import scheduler
from parallel.record.launch import signal_words
from parallel.record.schema import STEP_COLUMNS
from parallel.record.writer import RunFolder


def main() -> int:
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    out, rank = Path(flags["--out"]), os.environ["RANK"]
    chief = RunFolder(out) if rank == "0" else None
    if chief:
        run = read_json(Path(flags["--planned"]))["run"]
        chief.begin({"run": run, "scheduler": scheduler()})

    def interrupted(*_) -> None:
        (out / f"heard.{rank}").touch()
        if chief:
            words = signal_words(signal.SIGUSR1.name)
            chief.interrupt(Kind.TIME_LIMIT, f"{words}, saved step 1")
        time.sleep(3)  # as if saving; when the first rank ends, torchrun ends the others
        os._exit(75)

    signal.signal(signal.SIGUSR1, interrupted)
    for step in range(5 if os.environ.get("SLURM_RESTART_COUNT", "0") > "0" else 3000):
        time.sleep(0.2)
        if chief:
            chief.step(dict.fromkeys(STEP_COLUMNS) | {"step": step + 1, "step_s": 0.2})
    if chief:
        chief.complete({"schema_version": "2.0"}, "[Rank 0] RUN_COMPLETE")
    return 0


if __name__ == "__main__":
    sys.exit(main())
