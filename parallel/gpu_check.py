"""What this node's GPUs, libraries and links are, and whether they reach half of the data sheet.

    python -m parallel.gpu_check                   # a row a fact; exit status 1 when one failed
    python -m parallel.sweep slurm/gpu-check.toml  # then: every engine and split, trained here
    python -m analysis.parity --check logs/gpu-check

It is one process, which starts the ranks of the all-reduce. Rates are those of
parallel/microbench.py, beside the sheets of models/gpus.toml.
"""

import json
import subprocess
import sys
from typing import Any, NamedTuple

from base.errors import Parser, UsageError, command_line, printable
from models.gpus import find_gpu
from parallel.record import facts

PASSED, FAILED, TOLD = "passed", "FAILED", "-"
RATE_BAR = 0.5  # of the data sheet's
FREE_BAR = 0.9  # of a GPU's memory


class Row(NamedTuple):
    """A line of the table. verdict: passed, FAILED, or - where nothing is expected."""

    check: str
    verdict: str
    value: str
    expected: str = ""


def version_rows() -> list[Row]:
    """The libraries beside the ranges of setup.py."""
    rows, ranges = [], facts.ranges()
    for package, version in facts.versions().items():
        wanted, verdict = ranges.get(package), TOLD
        if wanted is not None:
            is_right = version is not None and wanted.contains(version, prereleases=True)
            verdict = PASSED if is_right else FAILED
        rows.append(Row(package, verdict, version or "not installed", str(wanted or "")))
    return rows


def gpu_rows() -> list[Row]:
    """The cards, their memory, and what runs on them.

    Raises:
        UsageError: PyTorch sees no GPU.
    """
    import torch

    from parallel.engines import kernels
    from parallel.engines.devices import capability_of, driver

    if not torch.cuda.is_available():
        raise UsageError(f"PyTorch {torch.__version__} sees no GPU; --cpu looks at the rest")
    count = torch.cuda.device_count()
    cards = [torch.cuda.get_device_properties(i) for i in range(count)]
    name, sheet = cards[0].name, find_gpu(cards[0].name)
    free = [torch.cuda.mem_get_info(i)[0] / card.total_memory for i, card in enumerate(cards)]
    alike = {card.name for card in cards} == {name}
    capability, builds = capability_of(0), torch.cuda.get_arch_list()
    is_amd = isinstance(capability, str)
    arch = capability.partition(":")[0] if is_amd else "sm_{}{}".format(*capability)
    # NVIDIA's GPUs run what was built for an older one of their family, too; AMD's do not.
    built = verdict_of(arch in builds) if is_amd else TOLD
    drives = [driver(), torch.version.cuda or torch.version.hip, torch.backends.cudnn.version()]
    return [
        Row("GPUs", verdict_of(alike), f"{count} x {name}", "all alike"),
        Row("architecture", built, arch, "PyTorch has " + " ".join(builds)),
        Row("memory", TOLD, f"{cards[0].total_memory / 1e9:.0f} GB"),
        Row("free memory", verdict_of(min(free) >= FREE_BAR), f"{min(free):.0%}", ">= 90%"),
        Row("data sheet", verdict_of(bool(sheet)), sheet.name if sheet else "none", "gpus.toml"),
        Row("driver, CUDA or ROCm, cuDNN", TOLD, ", ".join(map(str, drives))),
        Row("Transformer Engine", TOLD, kernels.problem("te") or "its layer norm is PyTorch's"),
    ]


def rate_rows(rates: dict[str, Any], gpu: str | None) -> list[Row]:
    """Matrix products, memory and all-reduce, as microbench.measure gives them, beside the card's
    sheet."""
    sheet, rows = find_gpu(gpu), []
    for precision, flops in rates["products"].items():
        peak = sheet.peaks.get(precision) if sheet else None
        rows.append(_rate(f"matrix product {precision}", flops, 1e12, "TFLOP/s", peak))
    memory = sheet.memory_rate / 1e9 if sheet else None
    rows.append(_rate("memory rate", rates["memory_rate"], 1e9, "GB/s", memory))
    largest = max(rates["links"], key=float, default=None)
    for size, rate in rates["links"].items():
        # Two cards of a mesh share some of a card's links, and no sheet says how many.
        known = sheet and size == largest and not sheet.mesh
        peak = sheet.link / 1e9 if known else None
        rows.append(_rate(f"all-reduce of {size} MiB", rate, 1e9, "GB/s", peak))
    return rows


def _rate(check: str, rate: float, unit: float, words: str, peak: float | None) -> Row:
    value = f"{rate / unit:.4g} {words}"
    if not peak:
        return Row(check, TOLD, value)
    share = rate / unit / peak
    expected = f">= {RATE_BAR:.0%} of {peak:g}"
    return Row(check, verdict_of(share >= RATE_BAR), f"{value}, {share:.0%}", expected)


def verdict_of(is_right: bool) -> str:
    return PASSED if is_right else FAILED


@command_line("parallel.gpu_check")
def main(argv: list[str] | None = None) -> int:
    """Print the table; 1 when a row failed."""
    parser = Parser(prog="python -m parallel.gpu_check", description=__doc__)
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help="ranks of the all-reduce")
    parser.add_argument("--cpu", action="store_true", help="the libraries and this CPU's rates")
    flags = parser.parse_args(argv)
    rows = version_rows()
    gpu = None
    if not flags.cpu:
        rows += gpu_rows()
        import torch

        gpu = torch.cuda.get_device_name(0)
    # In a process of its own: a broken driver ends or hangs that process, and not this one.
    words = [sys.executable, "-m", "parallel.microbench", "--processes", str(flags.gpus)]
    try:
        bench = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
        rows += rate_rows(json.loads(bench.stdout.strip().splitlines()[-1]), gpu)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        last = (str(error.stderr or "").strip().splitlines() or [str(error)])[-1]
        rows.append(Row("rates", FAILED, f"parallel.microbench: {last}"))
    for row in rows:
        expected = f"   [{row.expected}]" if row.expected else ""
        print(printable(f"{row.verdict:8}{row.check:30}{row.value}{expected}"))
    return int(any(row.verdict == FAILED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
