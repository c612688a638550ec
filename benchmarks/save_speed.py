"""How fast a checkpoint is saved and exported, compared with a plain sequential write to the disk.

    python benchmarks/save_speed.py [--mib 512] [--repeats 8] [--out DIR]

Each repeat writes a thing, and the bytes of its largest file again as one plain file (16 MiB blocks
from memory, then fsync). The order alternates. The things are:

    save           a checkpoint as a run saves it: checksum, fsync of file and folders, manifest,
                   rename
    weights        weights alone: the checkpoint is read (from the page cache, as it has just
                   been written), cast to bf16 and written for Hugging Face
    export         python -m parallel.checkpoint export: the same, after every byte is verified

The files are removed after each write. One uncounted write of each comes first. With an even number
of repeats both orders are equally frequent. Prints a line per repeat and, last, a Markdown table,
also to <out>/result.md. Its ratio is the time of the plain write over ours: the median of the pairs
and their quartiles. The exit status is 1 when the ratio of `save` is below 0.7. There is one rank,
because ranks would share the disk.
"""

import argparse
import contextlib
import io
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import torch  # noqa: E402

from base.bounds import check_flags  # noqa: E402
from base.errors import Parser, command_line  # noqa: E402
from models.config import parameter_shapes  # noqa: E402
from models.hf_weights import write_hugging_face  # noqa: E402
from parallel.checkpoint import __main__ as checkpoint  # noqa: E402
from parallel.checkpoint import folders  # noqa: E402
from parallel.checkpoint.checkpointer import Checkpointer  # noqa: E402
from parallel.checkpoint.contents import (  # noqa: E402
    KINDS,
    State,
    unpadded,
)
from parallel.checkpoint.rank_files import Reader  # noqa: E402
from parallel.config.resolve import resolve  # noqa: E402
from parallel.ranks import Ranks  # noqa: E402

BAR = 0.7
BLOCK = 1 << 24


class Engine:
    """An engine that has a whole model's state and does nothing."""

    def __init__(self, spec) -> None:
        self.pieces = []
        for name, shape in parameter_shapes(spec.model).items():
            tensors = {kind: torch.randn(shape) for kind in KINDS}
            self.pieces += unpadded(name, shape, (0,) * len(shape), shape, 0, tensors)

    def state(self) -> State:
        return State(self.pieces, 1)


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


def timed(work: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def command(*arguments: object) -> None:
    """parallel.checkpoint, as it is called."""
    with contextlib.redirect_stdout(io.StringIO()):
        if checkpoint.main([str(argument) for argument in arguments]):
            raise SystemExit(f"parallel.checkpoint {arguments} failed")


def table(times: dict[str, list[tuple[float, float]]], sizes: dict[str, int], n_params: int) -> str:
    """What was measured, as Markdown; times: (ours, plain) in seconds."""
    head = "| what | bytes per parameter | GB | GB/s | plain write GB/s | ratio | quartiles |\n"
    lines = [head, "| --- | ---: | ---: | ---: | ---: | ---: | --- |\n"]
    for name, pairs in times.items():
        gb = sizes[name] / 1e9
        ours_s, plain_s = (statistics.median(side) for side in zip(*pairs, strict=True))
        low, middle, high = statistics.quantiles([p / o for o, p in pairs], method="inclusive")
        lines.append(
            f"| {name} | {sizes[name] / n_params:.1f} | {gb:.3f} | {gb / ours_s:.2f}"
            f" | {gb / plain_s:.2f} | {middle:.2f} | {low:.2f} .. {high:.2f} |\n"
        )
    return "".join(lines)


@command_line("save_speed")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="size of the checkpoint")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("/tmp/save_speed"), metavar="DIR")
    arguments = parser.parse_args(argv)
    check_flags(arguments, mib=(1, 2**20), repeats=(2, 10**6))  # quartiles need 2
    torch.set_num_threads(1)
    layers = max(1, round(arguments.mib * 2**20 / (12 * 12 * 768 * 768)))
    sizes = {"preset": "gpt2-124m", "n_layer": layers, "vocab_size": 257}
    spec = resolve(("benchmark", {**sizes, "save_interval": 1}))
    facts = {"run": "save-speed", "git": {"commit": None}, "data": {"path": "", "sha256": None}}
    arguments.out.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(dir=arguments.out))  # on the disk that is to be measured
    target, engine = place / "written", Engine(spec)

    def save(to: Path) -> None:
        to.mkdir(parents=True)
        saver = Checkpointer(engine, spec, facts, to, Ranks(0, 1), torch.device("cpu"))
        saver.save(1)
        if problem := saver.events()[0].problem:
            raise SystemExit(problem)

    save(place / "source")
    (source,) = (place / "source").glob("step-*")

    def write_alone() -> None:
        gathered = Reader(source, folders.read_manifest(source)).gathered
        write_hugging_face(target, spec.model, gathered)

    works: dict[str, Callable[[], object]] = {
        "save": lambda: save(target),
        "weights": write_alone,
        "export": lambda: command("export", source, target),
    }
    contents: dict[str, memoryview] = {}
    for name, work in works.items():
        work()
        largest = max(target.rglob("*"), key=lambda path: path.stat().st_size)
        contents[name] = memoryview(largest.read_bytes())
        shutil.rmtree(target)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for repeat in range(1, arguments.repeats + 1):
        for name, work in works.items():
            pair = [0.0, 0.0]
            for ours in (True, False) if repeat % 2 else (False, True):
                if ours:
                    pair[0] = timed(work)
                    shutil.rmtree(target)
                else:
                    pair[1] = plain(place / "plain", contents[name])
            times[name].append((pair[0], pair[1]))
        ratios = (f"{name} {p / o:.2f}" for name, pairs in times.items() for o, p in pairs[-1:])
        print(f"{repeat}: plain write over ours: {', '.join(ratios)}", flush=True)
    text = table(times, {n: len(c) for n, c in contents.items()}, spec.model.n_params)
    shutil.rmtree(place)
    (arguments.out / "result.md").write_text(text)
    print("\n" + text, end="")
    ratio = statistics.median(p / o for o, p in times["save"])
    print(f"save: ratio {ratio:.2f} (bar {BAR})")
    return 0 if ratio >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
