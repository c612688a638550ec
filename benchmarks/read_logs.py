"""How fast logs are read, compared with the perl one-liner that this reader replaces.

    python benchmarks/read_logs.py [--mb 400] [--big-mb 2048] [--files 2000] [--folder DIR]

Makes logs of several Megatron dialects (argument dumps, warnings and timers between iteration
lines, as in real logs), reads them both ways in turn, and prints ratios: seconds depend on the
machine and on its other programs. Perl only averages one column; the reader fills a whole record.
"""

import argparse
import contextlib
import itertools
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from analysis.logs.load import read_all
from analysis.logs.readers import read
from analysis.logs.record import Refusal
from base.bounds import check_flags
from base.errors import Parser, UsageError, command_line

# Words of many formats; lines of them alone would slow a reader that scans a line twice.
PIECES = (
    "| ", "iteration ", "elapsed time per iteration (ms): ", "step: ", "loss: ", "tps: ",
    "memory: ",
    "1", "1,", ".", "e+", " ", "=", "/", "train_time:", "step_avg:", "DLLL {", ":::MLLOG {",
    "'loss': ",
    "{'train_runtime': 1", "train_step_timing in s", "[00:00<00:00,", "num_updates", "wps", "ups",
    "consumed samples: ", "SamplesPerSec=", "0/1, ", "\x1b[32m", "\x1b[", "using world size: 1",
    "micro_batch_size", "....", "Total epoch time: 1", "Training compute time:", "Error: ", "error",
    "Traceback (most recent call last)", "Tokens/s/GPU: ", "Step: 1 | ", "time_per_iteration_ms: ",
)  # fmt: skip
# The Jean Zay study's one-liner: it averages "elapsed time per iteration".
ONE_LINER = (
    "m|elapsed time per iteration .ms.: ([\\d\\.]+)| &&  do {$x+=$1; $c++};"
    ' END { print "$ARGV " . ($c ? int($x/$c/1000) : "fail")}'
)


def iteration_line(rng: random.Random, dialect: int, i: int) -> str:
    ms, loss, norm = rng.uniform(400, 130000), rng.uniform(2, 11), rng.uniform(0.1, 20)
    tail = f" number of skipped iterations: {0:3d} | number of nan iterations: {0:3d} |"
    if dialect == 0:  # 2021
        return (
            f" iteration {i:8d}/{1000000:8d} | consumed samples: {i * 8:12d} | elapsed time per"
            f" iteration (ms): {ms:.1f} | learning rate: 1.000E-04 | global batch size: {8:5d} |"
            f" lm loss: {loss:.6E} | loss scale: 4096.0 | grad norm: {norm:.3f} |{tail}\n"
        )
    if dialect == 1:  # today
        return (
            f" [2025-08-29 17:02:50.123456] iteration {i:8d}/{1000000:8d} | consumed samples:"
            f" {i * 8:12d} | elapsed time per iteration (ms): {ms:.1f} | throughput per GPU"
            f" (TFLOP/s/GPU): {ms / 300:.1f} | learning rate: 2.500000E-05 | global batch size:"
            f" {8:5d} | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: {norm:.3f} |{tail}\n"
        )
    return (  # Megatron-DeepSpeed
        f"vm-07: iteration {i:8d}/{1000000:8d} | consumed samples: {i * 8:12d} | consumed tokens:"
        f" {i * 8192:12d} | elapsed time per iteration (ms): {ms:.1f} | learning rate: 1.200E-07 |"
        f" global batch size: {8:5d} | lm loss: {loss:.6E} | loss scale: 2048.0 | actual seqlen:"
        f"  2048 |{tail} samples per second: {ms / 1000:.3f} | TFLOPs: {ms / 500:.2f} |\n"
    )


def noise_line(rng: random.Random) -> str:
    kind = rng.randrange(5)
    if kind == 0:
        return f"  some_argument_{rng.randrange(300)} ........................ {rng.random():.4f}\n"
    if kind == 1:
        return (
            "time (ms) | forward-compute: 812.31 | backward-compute: 1623.87 | optimizer: 48.21\n"
        )
    if kind == 2:
        return (
            f"[default{rng.randrange(8)}]:/usr/lib/python3/site.py:{rng.randrange(999)}: Warning\n"
        )
    if kind == 3:
        return f"{rng.randrange(64)}: > building train, validation, and test datasets ...\n"
    return f"NCCL INFO Channel {rng.randrange(32):02d} : {rng.randrange(64)}[1b000] via P2P/IPC\n"


def text(
    rng: random.Random, dialect: int, numbers: Iterator[int], size: int, share: float
) -> Iterator[str]:
    """About `size` bytes of log, of which iteration lines are about `share`."""
    written = lines = 0
    while written < size:
        line = iteration_line(rng, dialect, next(numbers))
        written += len(line)
        lines += len(line)
        yield line
        while lines > share * written:
            line = noise_line(rng)
            written += len(line)
            yield line


def make(path: Path, mb: int, share: float, seed: int) -> None:
    """A log of `mb` megabytes, in one dialect up to 64 MB and in all of them beyond."""
    rng, numbers = random.Random(seed), itertools.count(1)
    with path.open("w") as out:
        for part in range(max(1, mb // 64)):
            out.writelines(text(rng, (seed + part) % 3, numbers, min(mb, 64) << 20, share))


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def beside_perl(path: Path, what: str) -> None:
    """Read `path` both ways, in turn, and print the ratios of the medians."""

    def perl() -> None:
        subprocess.run(["perl", "-lne", ONE_LINER, path], check=True, stdout=subprocess.DEVNULL)

    pairs = [(seconds(lambda: read(path)), seconds(perl)) for _ in range(5)]
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    gb = path.stat().st_size / 1e9
    print(
        f"{what}: {theirs / ours:.2f} x the one-liner's speed"
        f" ({gb / ours:.2f} against {gb / theirs:.2f} GB/s); bar: 1 x, dense 0.33 x"
    )


def growth(folder: Path) -> None:
    """Print how much longer eight times the text takes, with or without line ends."""
    rng, path = random.Random(3), folder / "pieces.out"

    def attempt() -> None:
        with contextlib.suppress(Refusal):
            read(path)

    ratios = []
    for _ in range(25):
        unit = "".join(rng.choices(PIECES, k=rng.randint(1, 6)))
        small = unit * (100_000 // len(unit) + 1)
        took = []
        for times in (1, 8):
            path.write_text(small * times)
            took.append(min(seconds(attempt) for _ in range(2)))
        ratios.append(took[1] / took[0])
    print(f"8 times the text of words of logs takes {max(ratios):.1f} x the time; bar: 20 x")


@command_line("read_logs")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=400, help="megabytes read beside perl")
    parser.add_argument("--big-mb", type=int, default=2048, help="megabytes for the memory test")
    parser.add_argument("--files", type=int, default=2000, help="logs of 1 MB read as a batch")
    parser.add_argument("--folder", type=Path, help="where to make the logs (a temporary folder)")
    parser.add_argument("--log", type=Path, help="read this log beside perl, and nothing else")
    arguments = parser.parse_args(argv)
    check_flags(arguments, mb=(0, 10**6), big_mb=(0, 10**6), files=(0, 10**6))
    if not shutil.which("perl"):
        raise UsageError("perl is not installed: there is nothing to compare with")
    if arguments.log:
        beside_perl(arguments.log, arguments.log.name)
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        measure(Path(folder), arguments)
    return 0


def measure(folder: Path, arguments: argparse.Namespace) -> None:
    growth(folder)
    if arguments.mb:
        for share, what in ((0.06, "6 % iteration lines"), (0.95, "95 % iteration lines")):
            log = folder / "mixed.out"
            make(log, arguments.mb, share, seed=1)
            beside_perl(log, f"{arguments.mb} MB, {what}")
            log.unlink()
    if arguments.big_mb:
        for share in (0.06, 0.95):
            log = folder / "big.out"
            make(log, arguments.big_mb, share, seed=2)
            command = [sys.executable, __file__, "--peak", str(log)]
            peak = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            what = f"{arguments.big_mb} MB, {share:.0%} iteration lines"
            print(f"{what}: {peak.strip()} MB resident; bar: 300")
            log.unlink()
    if arguments.files:
        batch = folder / "batch"
        batch.mkdir()
        first = [batch / f"{i}.out" for i in range(min(arguments.files, 20))]
        for i, path in enumerate(first):
            make(path, 1, 0.06 if i % 4 else 0.5, seed=i)
        for i in range(len(first), arguments.files):
            shutil.copy(first[i % len(first)], batch / f"{i}.out")
        elapsed = seconds(lambda: read_all([batch], jobs=2))
        print(f"{arguments.files} logs of 1 MB in 2 processes: {elapsed:.1f} s; bar: 10")


def print_peak(path: str) -> int:
    """Linux's own count: ru_maxrss would include the parent process's peak."""
    read(path)
    status = Path("/proc/self/status").read_text()
    print(int(status.split("VmHWM:")[1].split()[0]) // 1024)
    return 0


if __name__ == "__main__":
    sys.exit(print_peak(sys.argv[2]) if sys.argv[1:2] == ["--peak"] else main())
