"""How fast is a checkpoint written beside a plain sequential write to the same disk?

    python benchmarks/save_speed.py [--mib 512] [--repeats 7] [--out DIR]

Writes the same bytes twice in each repeat, first the one and then the other in turn: a checkpoint
through parallel/checkpointer.py as a run writes it (checksum, fsync of file and folders, manifest,
rename, `latest`), and its largest file's bytes again as one plain file (write in 16 MiB blocks from
memory, fsync). Both are removed before the next, and one save that is not counted comes first.
Prints one line per repeat, and the ratio of the median times; the exit status is 1 when it is below
0.7. One rank: ranks on one disk share it alike.
"""

import argparse
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import torch  # noqa: E402

from models.gpt import parameter_shapes  # noqa: E402
from parallel.checkpointer import KINDS, Checkpointer, State, hold  # noqa: E402
from parallel.saved import name_of  # noqa: E402
from parallel.spec import resolve  # noqa: E402

BAR = 0.7
BLOCK = 1 << 24


class Engine:
    """Holds a whole model's state and does nothing."""

    def __init__(self, spec) -> None:
        self.held = []
        for name, shape in parameter_shapes(spec.model).items():
            tensors = {kind: torch.randn(shape) for kind in KINDS}
            self.held += hold(name, shape, (0,) * len(shape), shape, 0, tensors)

    def state(self) -> State:
        return State(self.held, 1)


def plain(path: Path, content: memoryview) -> float:
    """Seconds to write and sync `content` in one file."""
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for at in range(0, len(content), BLOCK):
            block = content[at : at + BLOCK]
            while len(block):
                block = block[file.write(block) :]
        os.fsync(file.fileno())
    took = time.perf_counter() - began
    path.unlink()
    return took


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512, help="size of the checkpoint")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("/tmp/save_speed"), metavar="DIR")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    layers = max(1, round(arguments.mib * 2**20 / (12 * 12 * 768 * 768)))
    sizes = {"preset": "gpt2-124m", "n_layer": layers, "vocab_size": 257}
    spec = resolve(("benchmark", {**sizes, "save_interval": 1}))
    facts = {"run": "save-speed", "git": {"commit": None}, "data": {"path": "", "sha256": None}}
    shutil.rmtree(arguments.out, ignore_errors=True)
    arguments.out.mkdir(parents=True)
    saver = Checkpointer(Engine(spec), spec, facts, arguments.out / "checkpoints", 0, 1)

    def save(step: int) -> float:
        """Seconds to save a checkpoint, which is removed."""
        saver.save(step)
        (event,) = saver.events()
        if event.problem:
            raise SystemExit(event.line())
        if not content:
            (file,) = (saver.save_to / name_of(step)).glob("rank-*")
            content.append(memoryview(file.read_bytes()))
        shutil.rmtree(saver.save_to)
        return event.total_s

    content: list[memoryview] = []
    save(0)
    gb = len(content[0]) / 1e9
    saves, plains = [], []
    for repeat in range(1, arguments.repeats + 1):
        for ours in (True, False) if repeat % 2 else (False, True):
            if ours:
                saves.append(save(repeat))
            else:
                plains.append(plain(arguments.out / "plain", content[0]))
        print(
            f"{repeat}: {gb:.3f} GB: checkpoint {gb / saves[-1]:.2f} GB/s,"
            f" plain {gb / plains[-1]:.2f} GB/s, ratio {plains[-1] / saves[-1]:.2f}",
            flush=True,
        )
    shutil.rmtree(arguments.out)
    ours_s, plain_s = statistics.median(saves), statistics.median(plains)
    ratio = plain_s / ours_s
    print(
        f"median of {arguments.repeats}: checkpoint {gb / ours_s:.2f} GB/s,"
        f" plain {gb / plain_s:.2f} GB/s, ratio {ratio:.2f} (bar {BAR})"
    )
    return 0 if ratio >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
