"""Measures how fast each format's lines are read, beside the perl one-liner that it replaces.

    python -m benchmarks.read_logs [--mb 60] [--log FILE --pattern PATTERN]

Repeats the line of each format in tests/log_lines.toml, with other numbers in each, until a log has
so many megabytes; reads it both ways in turn, and prints the ratio of their CPU times: seconds
depend on the machine. Perl averages one column; the reader fills a whole record. Real logs have
warnings and timers between their steps: --log reads one of yours.
"""

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import numpy as np

from analysis.common.table import Column, Table, show
from analysis.logs.readers import read
from base.bounds import check_flags
from base.errors import Parser, UsageError, command_line
from base.files import ROOT

# The Jean Zay study's one-liner averages "elapsed time per iteration"; here any number.
ONE_LINER = (
    "m~{}~ && do {{$x+=$1; $c++}}; END {{ print '$ARGV ' . ($c ? int($x/$c/1000) : 'fail') }}"
)
# Kind in tests/log_lines.toml -> what stands before its counter, and the number that perl averages.
KINDS = {
    "Megatron-LM": ("iteration +", r"elapsed time per iteration .ms.: ([\d.]+)"),
    "GPT-NeoX": ("iteration +", r"elapsed time per iteration .ms.: ([\d.]+)"),
    "DeepSpeed pipeline": ("steps: ", r"iter time .s.: ([\d.]+)"),
    "DeepSpeed throughput": ("global_step=", r"CurrSamplesPerSec=([\d.]+)"),
    "DeepSpeed-Chat": ("", r"E2E latency=([\d.]+)"),
    "HF Trainer": ("'epoch': ", r"'loss': ([\d.]+)"),
    "torchtitan": ("step: ", r"tps: ([\d,]+)"),
    "nanoGPT": ("iter ", r"time ([\d.]+)ms"),
    "nanochat": ("step ", r"dt: ([\d.]+)ms"),
    "modded-nanogpt": ("step:", r"train_time:(\d+)ms"),
    "llm.c": ("step +", r"([\d.]+) ms"),
    "nanotron": ("iteration: ", r"time_per_iteration_ms: ([\d.]+)"),
    "NeMo DLLogger": ('"step": ', r"train_step_timing in s\": ([\d.]+)"),
    "MLPerf": ('"time_ms": ', r"train_step_time\": ([\d.]+)"),
    "NeMo text": (" - ", r"train_step_timing in s : ([\d.]+)"),
    "fairseq": ('"num_updates": "', r"\"wps\": \"([\d.]+)"),
}
# The last line is repeated, what stands before it is the head of the log.
MORE = {
    "modded-nanogpt": "step:11/5100 train_loss:7.0123 train_time:1390ms step_avg:139.11ms\n",
    "MLPerf": ':::MLLOG {"key": "run_start", "time_ms": 0}\n'
    ':::MLLOG {"namespace": "", "time_ms": 1e5, "event_type": "POINT_IN_TIME", '
    '"key": "tracked_stats", "value": {"train_step_time": 55.609028, "throughput": 508.97601}, '
    '"metadata": {"file": "/workspace/callbacks.py", "lineno": 190, "step": 1}}\n',
}
TAILS = {
    "MLPerf": ':::MLLOG {"key": "run_stop", "time_ms": 1e13, "value": {"status": "success"}}\n'
}


def make(path: Path, lines: str, counter: str, pattern: str, mb: int, tail: str) -> None:
    """Writes a log of `mb` megabytes: the last of the lines, each time with other numbers."""
    *head, line = f"{lines.strip()}\n".splitlines(keepends=True)
    value = re.search(pattern, line)
    line_start, line_end = line[: value.start(1)], line[value.end(1) :]
    whole, decimal_point, _ = value[1].replace(",", "").partition(".")
    with path.open("w") as log:
        size, step = log.write("".join(head)), 0
        while size < mb << 20:
            step += 1
            decimals = f".{step % 89 + 10}" if decimal_point else ""
            text = f"{line_start}{int(whole) + step % 90}{decimals}{line_end}"
            if counter:
                text = re.sub(rf"({counter})[\d.]+", rf"\g<1>{step}", text, count=1)
            size += log.write(text)
        log.write(tail)


def ratio(path: Path, pattern: str) -> tuple[float, float, float]:
    """Returns perl's seconds over ours, both read in turn, and the seconds: medians of three."""
    pairs = []
    for _ in range(3):
        begin = os.times()
        read(path)
        command = ["perl", "-lne", ONE_LINER.format(pattern), path]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        user, system, perl_user, perl_system, _ = np.subtract(os.times(), begin)
        pairs.append((user + system, perl_user + perl_system))
    ours, perl = (statistics.median(column) for column in zip(*pairs, strict=True))
    return perl / ours, ours, perl


@command_line("read_logs")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=60, help="megabytes of each log")
    parser.add_argument("--log", type=Path, help="read this log beside perl, and nothing else")
    parser.add_argument("--pattern", default=KINDS["Megatron-LM"][1], help="perl's, of --log")
    arguments = parser.parse_args(argv)
    check_flags(arguments, mb=(1, 10**6))
    if not shutil.which("perl"):
        raise UsageError("perl is not installed: there is nothing to compare with")
    if arguments.log:
        speed, ours_s, perl_s = ratio(arguments.log, arguments.pattern)
        print(f"{speed:.2f} x the one-liner's speed ({ours_s:.2f} s and {perl_s:.2f} s)")
        return 0
    lines = tomllib.loads((ROOT / "tests/log_lines.toml").read_text())
    lines = {kind: row["line"] for kind, row in lines.items()} | MORE
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, (counter, pattern) in KINDS.items():
            log = Path(folder) / "made.out"
            make(log, lines[kind], counter, pattern, arguments.mb, TAILS.get(kind, ""))
            speed, ours_s, perl_s = ratio(log, pattern)
            rows.append({"format": kind, "speed": speed})
            print(f"{kind}: {speed:.2f} ({ours_s:.2f} s and {perl_s:.2f} s)", file=sys.stderr)
    columns = [Column("format", "format"), Column("speed", "speed, of the one-liner's", ".2f")]
    show([Table(columns, rows)], "markdown")
    return 0


if __name__ == "__main__":
    sys.exit(main())
