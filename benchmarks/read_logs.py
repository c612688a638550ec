"""How fast a log is read, compared with the perl one-liner that this reader replaces.

    python benchmarks/read_logs.py [--mb 400] [--log FILE]

Makes logs of Megatron's lines (with warnings and timers between them, as in real logs), reads them
both ways in turn, and prints the ratio: seconds depend on the machine and on its other programs.
Perl only averages one column; the reader fills a whole record.
"""

import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from analysis.logs.readers import read
from base.bounds import check_flags
from base.errors import Parser, UsageError, command_line

# The Jean Zay study's one-liner: it averages "elapsed time per iteration".
ONE_LINER = (
    "m|elapsed time per iteration .ms.: ([\\d\\.]+)| &&  do {$x+=$1; $c++};"
    ' END { print "$ARGV " . ($c ? int($x/$c/1000) : "fail")}'
)
NOISE = (
    "  some_argument ........................ 0.1234\n",
    "time (ms) | forward-compute: 812.31 | backward-compute: 1623.87 | optimizer: 48.21\n",
    "[default3]:/usr/lib/python3/site.py:12: Warning\n",
    "NCCL INFO Channel 03 : 7[1b000] via P2P/IPC\n",
)


def make(path: Path, mb: int, share: float) -> None:
    """A log of `mb` megabytes, of which iteration lines are about `share`."""
    rng, size, lines, i = random.Random(1), 0, 0, 0
    with path.open("w") as out:
        while size < mb << 20:
            text = rng.choice(NOISE)
            if lines <= share * size:
                i += 1
                text = (
                    f" iteration {i:8d}/ 1000000 | consumed samples: {i * 8:12d} | elapsed time per"
                    f" iteration (ms): {rng.uniform(400, 9e4):.1f} | learning rate: 1.000E-04 |"
                    f" global batch size:     8 | lm loss: {rng.uniform(2, 11):.6E} | loss scale:"
                    f" 4096.0 | grad norm: {rng.uniform(0.1, 20):.3f} | number of skipped"
                    " iterations:   0 | number of nan iterations:   0 |\n"
                )
                lines += len(text)
            size += len(text)
            out.write(text)


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def beside_perl(path: Path, name: str) -> None:
    """Read `path` both ways, in turn, and print the ratio of the medians."""

    def perl() -> None:
        subprocess.run(["perl", "-lne", ONE_LINER, path], check=True, stdout=subprocess.DEVNULL)

    pairs = [(seconds(lambda: read(path)), seconds(perl)) for _ in range(3)]
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"{name}: {theirs / ours:.2f} x the one-liner's speed ({ours:.2f} s and {theirs:.2f} s)")


@command_line("read_logs")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=400, help="megabytes of each log")
    parser.add_argument("--log", type=Path, help="read this log beside perl, and nothing else")
    arguments = parser.parse_args(argv)
    check_flags(arguments, mb=(1, 10**6))
    if not shutil.which("perl"):
        raise UsageError("perl is not installed: there is nothing to compare with")
    if arguments.log:
        beside_perl(arguments.log, arguments.log.name)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        for share in (0.06, 0.95):
            log = Path(folder) / "made.out"
            make(log, arguments.mb, share)
            beside_perl(log, f"{arguments.mb} MB, {share:.0%} iteration lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
