"""Stands in for parallel.train below a real Slurm, script and torchrun: it writes a run folder and
heeds signals, and needs no torch, so that only what the script does is waited for.

It takes steps for ten minutes; after a restart, five. On SIGUSR1 it says that it was interrupted.
"""

import os
import signal
import sys
import time
from pathlib import Path

from parallel.artifacts import STEP_COLUMNS, RunFolder
from parallel.facts import scheduler


def main() -> int:
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    out, rank = Path(flags["--out"]), os.environ["RANK"]
    chief = RunFolder(out) if rank == "0" else None
    if chief:
        chief.begin({"run": flags["--run-name"], "scheduler": scheduler()})

    def interrupted(*_) -> None:
        (out / f"heard.{rank}").touch()
        if chief:
            chief._write_status("interrupted", "SIGUSR1, saved step 1", 0)
        time.sleep(3)  # saving; torchrun ends the others when the first rank ends
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
