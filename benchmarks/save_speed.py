"""Measures how fast a checkpoint is saved and exported, beside a plain sequential write.

    python -m benchmarks.save_speed [--mib 512] [--repeats 8] [--out DIR]

Each repeat writes a thing, and the bytes of its largest file again as one plain file (16 MiB blocks
from memory, then fsync). The order alternates. The things are:

    save           a checkpoint as a run saves it: checksum, fsync of file and folders, manifest,
                   rename
    export         python -m parallel.checkpoint export: every byte is verified, read again (from
                   the page cache), cast to bf16 and written for Hugging Face

The files are removed after each write. One uncounted write of each comes first. With an even number
of repeats both orders are equally frequent. Prints a line per repeat and, last, a Markdown table,
also to <out>/result.md. Its ratio is the time of the plain write over ours: the median of the pairs
and their quartiles. The exit status is 1 when the ratio of `save` is below 0.7. There is one rank,
because ranks would share the disk.
"""

import contextlib
import io
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from analysis.common.table import Column, Table
from base.bounds import check_flags
from base.errors import Parser, command_line
from models.config import parameter_shapes
from parallel.checkpoint import __main__ as checkpoint
from parallel.checkpoint.checkpointer import Checkpointer
from parallel.checkpoint.contents import KINDS, State, unpadded
from parallel.config.resolve import resolve
from parallel.config.run_spec import RunSpec
from parallel.ranks import Ranks

BAR = 0.7
BLOCK = 1 << 24
COLUMNS = [
    Column("what", "what"),
    Column("per_parameter", "bytes per parameter", ".1f"),
    Column("gb", "GB", ".3f"),
    Column("gb_per_s", "GB/s", ".2f"),
    Column("plain_gb_per_s", "plain write GB/s", ".2f"),
    Column("ratio", "ratio", ".2f"),
    Column("quartiles", "quartiles"),
]


class Engine:
    """An engine that has a whole model's state and does nothing."""

    def __init__(self, spec: RunSpec) -> None:
        self.pieces = []
        for name, shape in parameter_shapes(spec.model).items():
            tensors = {kind: torch.randn(shape) for kind in KINDS}
            self.pieces += unpadded(name, shape, (0,) * len(shape), shape, 0, tensors)

    def state(self) -> State:
        return State(self.pieces, 1)


def timed(work: Callable[[], object], written: Path) -> float:
    """Returns the seconds that a call takes, and removes what it has written."""
    began = time.perf_counter()
    work()
    took_s = time.perf_counter() - began
    shutil.rmtree(written)
    return took_s


def write_plain(folder: Path, content: memoryview) -> None:
    """Writes and syncs `content` in one file of a new folder."""
    folder.mkdir()
    with (folder / "plain").open("wb") as file:
        for start in range(0, len(content), BLOCK):
            file.write(content[start : start + BLOCK])
        file.flush()
        os.fsync(file.fileno())


def row_of(
    name: str, pairs: list[tuple[float, float]], size: int, n_params: int
) -> dict[str, object]:
    """Returns the row of a thing of `size` bytes; pairs: seconds of ours and of the plain write."""
    ours_s, plain_s = (statistics.median(side) for side in zip(*pairs, strict=True))
    low, middle, high = statistics.quantiles([p / o for o, p in pairs], method="inclusive")
    gb, quartiles = size / 1e9, f"{low:.2f} .. {high:.2f}"
    values = (name, size / n_params, gb, gb / ours_s, gb / plain_s, middle, quartiles)
    return dict(zip((column.key for column in COLUMNS), values, strict=True))


@command_line("save_speed")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__)
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

    def export() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            if checkpoint.main(["export", str(source), str(target)]):
                raise SystemExit("parallel.checkpoint export failed")

    works = {"save": lambda: save(target), "export": export}
    contents: dict[str, memoryview] = {}
    for name, work in works.items():
        work()
        largest = max(target.rglob("*"), key=lambda path: path.stat().st_size)
        contents[name] = memoryview(largest.read_bytes())
        shutil.rmtree(target)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for repeat in range(1, arguments.repeats + 1):
        for name, work in works.items():
            plain = partial(write_plain, target, contents[name])
            if repeat % 2:
                pair = timed(work, target), timed(plain, target)
            else:
                pair = (timed(plain, target), timed(work, target))[::-1]
            times[name].append(pair)
        ratios = (f"{name} {pairs[-1][1] / pairs[-1][0]:.2f}" for name, pairs in times.items())
        print(f"{repeat}: plain write over ours: {', '.join(ratios)}", flush=True)
    n_params = spec.model.n_params
    rows = [row_of(name, times[name], len(contents[name]), n_params) for name in works]
    text = Table(COLUMNS, rows).render("markdown")
    shutil.rmtree(place)
    (arguments.out / "result.md").write_text(text)
    print("\n" + text, end="")
    ratio = rows[0]["ratio"]
    print(f"save: ratio {ratio:.2f} (bar {BAR})")
    return 0 if ratio >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
