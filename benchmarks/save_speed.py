"""How fast is a checkpoint written beside a plain sequential write to the same disk?

    python benchmarks/save_speed.py [--mib 512] [--repeats 5] [--out DIR]

Writes the same number of bytes twice, in turn: one plain file (write in 16 MiB blocks, fsync), and
a checkpoint through parallel/checkpoint.py as a run writes it (checksum, fsync of file and folders,
manifest, rename, `latest`). Both are removed between repeats. Prints one line per repeat and the
median ratio; the exit status is 1 when it is below 0.7. One rank: ranks on one disk share it alike.
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
from parallel.checkpoint import KINDS, Checkpointer, State, hold  # noqa: E402
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


def plain(path: Path, size: int, block: bytes) -> float:
    """Seconds to write and sync `size` bytes in one file."""
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for at in range(0, size, BLOCK):
            file.write(block[: min(BLOCK, size - at)])
        os.fsync(file.fileno())
    took = time.perf_counter() - began
    path.unlink()
    return took


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512, help="size of the checkpoint")
    parser.add_argument("--repeats", type=int, default=5)
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
    block, ratios = os.urandom(BLOCK), []
    for repeat in range(1, arguments.repeats + 1):
        saver.save(repeat)
        (event,) = saver.events()
        if event.problem:
            print(event.line(), file=sys.stderr)
            return 2
        shutil.rmtree(saver.save_to)
        plain_s = plain(arguments.out / "plain", event.bytes, block)
        gb = event.bytes / 1e9
        ratios.append(plain_s / event.total_s)
        print(
            f"{repeat}: {gb:.3f} GB: checkpoint {gb / event.total_s:.2f} GB/s,"
            f" plain {gb / plain_s:.2f} GB/s, ratio {ratios[-1]:.2f}",
            flush=True,
        )
    shutil.rmtree(arguments.out)
    ratio = statistics.median(ratios)
    print(f"median ratio {ratio:.2f} (bar {BAR})")
    return 0 if ratio >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
