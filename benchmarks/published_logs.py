"""Read a folder of published logs and write what they print beside what is computed from them.

    python benchmarks/published_logs.py FOLDER [--out logs/published/real_logs.csv]

A row is a log: its TFLOP/s and their convention, or why there are none; what it prints, by which
convention, and how far ours by that convention is from it (logs/published/real-logs.md).
"""

import csv
import io
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from analysis.logs.load import load
from analysis.logs.record import Record
from analysis.runs import throughput
from analysis.runs.run_table import rows
from base.errors import Parser, command_line

COLUMNS = tuple(
    """log format gpus tokens_per_s tflops convention printed_tflops printed_by printed_error
    why""".split()
)
AGREES = 0.02
_OF_2023 = "Megatron-LM of 2023 counts f = 4h without a gate; by that formula ours is within 0.1 %"
_RUNNING = (
    "its MFU is a running mean that takes evaluations in; the first one, of one iteration, gave the"
    " number of GPUs"
)
# The end of a log's path -> why what it prints is further from ours than AGREES.
DIFFERENCES = {
    "slurm-2631.out_normal": _OF_2023,
    "slurm-2691.out_2_8_280.7": _OF_2023,
    "pretrain_ls_0.02.txt": _RUNNING,
    "pretrain_ls_decay_0.05.txt": _RUNNING,
    "tiny_llama_15it.log": "6n counts no attention; the log has no sizes for another convention",
}


def table(folder: Path, paths: list[Path] | None = None) -> list[dict[str, Any]]:
    """One row a log that can be read at or below the folder (or at the paths), in name order."""
    records, _ = load(paths or [folder])
    listed = []
    for record, row in zip(records, rows(records, None), strict=True):
        log = str(Path(record.source).relative_to(folder))
        why = next((text for end, text in DIFFERENCES.items() if log.endswith(end)), "")
        if row["tflops"] is None:
            why = row["missing"]["tflops"]
        elif row["convention"] != "megatron":
            why = "; ".join([*(r for r in row["reasons"] if r.startswith("TFLOP/s: ")), why])
        printed = beside_printed(record)
        row |= {"printed_by": printed.convention, "printed_error": printed.error}
        listed.append(row | {"log": log, "why": why.strip("; ")})
    return listed


NO_VOCABULARY = "sc21 without vocabulary"  # GPT-NeoX's, since it counts its FLOPs itself
# What a format's tool prints; of several, the log's numbers decide.
_PRINTED_BY = {
    "Megatron-LM": ("megatron", "megatron-full"),
    "NeMo": ("megatron", "megatron-full"),
    "Megatron-DeepSpeed": ("sc21",),
    "GPT-NeoX": ("sc21", NO_VOCABULARY),
    "torchtitan": ("palm",),
    "nanoGPT": ("palm",),
    "nanotron": ("megatron-full",),
}


class Printed(NamedTuple):
    """The convention of the TFLOP/s that a log prints, and ours by it over the printed, less one:
    the median over the log's entries. None where it prints none or the model is not known."""

    convention: str | None = None
    error: float | None = None


def beside_printed(record: Record) -> Printed:
    """What a log prints, beside ours by its own convention."""
    rate, candidates = throughput.printed_rate(record), []
    for convention in _PRINTED_BY.get(record.format, ()) if rate else ():
        flops, _ = throughput.per_token(record, convention.partition(" ")[0])
        if flops is not None:
            if convention == NO_VOCABULARY:
                flops -= throughput.of_vocabulary(record)
            candidates.append(Printed(convention, rate * flops - 1))
    return min(candidates, key=lambda printed: abs(printed.error), default=Printed())


def text(listed: list[dict[str, Any]]) -> str:
    """The rows as CSV, numbers with five digits."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in listed:
        values = (row[name] for name in COLUMNS)
        writer.writerow([f"{v:.5g}" if isinstance(v, float) else v for v in values])
    return out.getvalue()


@command_line("published_logs.py")
def main(argv: list[str] | None = None) -> int:
    """Write the file, or print it."""
    parser = Parser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="logs at or below it")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write it here")
    arguments = parser.parse_args(argv)
    written = text(table(arguments.folder))
    if arguments.out:
        arguments.out.write_text(written)
    else:
        print(written, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
