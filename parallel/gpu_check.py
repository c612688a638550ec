"""Checks this node's GPUs, libraries and links: do they reach half of the data sheet, and do
studies train on them as elsewhere? One row for each check; exit status 1 when one failed.

    python -m parallel.gpu_check                            # the node alone: a minute
    python -m parallel.gpu_check slurm/gpu-check*.toml      # and every engine, split and format
    python -m parallel.gpu_check slurm/gpu-check*.toml --srun       # in a job of two nodes

Rates are those of parallel/bench.py, beside the data sheets of models/gpus.toml. The runs of a
study share the GPUs and train at the same time, so their times say little. Runs that load a
checkpoint come after the others.
"""

import json
import math
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from base.errors import Parser, UsageError, command_line, printable
from base.files import ROOT
from base.units import GIB
from models.gpus import find_gpu, lacking
from parallel import sweep
from parallel.config.run_spec import RunSpec
from parallel.config.study import Study, load_study
from parallel.forked_ranks import environment
from parallel.measure.node_rates import IN_NODE, RankRates, slowest
from parallel.measure.slower import SHARE, SPREADS
from parallel.record import facts
from parallel.record.ends import COMPLETE
from parallel.record.reader import Run, read_run
from parallel.rehearse import unrehearsed

OK, FAILED, NOT_TRIED, NO_BAR = "ok", "FAILED", "not tried", "-"
RATE_BAR = 0.5  # of the data sheet's
FREE_BAR = 0.9  # of a GPU's memory
LOSS_BAR = 0.05  # nats, of a run in fewer bits than fp32 beside its baseline
MEMORY_BAR = 0.25  # of the rehearsed peak, from a GiB on: below, workspaces are most of it


class Row(NamedTuple):
    """A row of the table. verdict: ok, FAILED, not tried, or - where nothing is expected."""

    check: str
    verdict: str
    value: str
    expected: str = ""


def version_rows() -> list[Row]:
    """Returns a row for each library: its version beside the range of setup.py."""
    rows, ranges = [], facts.ranges()
    for package, version in facts.versions().items():
        wanted, verdict = ranges.get(package), NO_BAR
        if wanted is not None:
            verdict = verdict_of(bool(version) and wanted.contains(version, prereleases=True))
        rows.append(Row(package, verdict, version or "not installed", str(wanted or "")))
    return rows


def gpu_rows() -> list[Row]:
    """Returns the rows of the cards, their memory, and the libraries that run on them."""
    import torch

    from parallel.engines import kernels
    from parallel.engines.devices import capability_of, driver

    if not torch.cuda.is_available():
        raise UsageError(f"PyTorch {torch.__version__} sees no GPU; --cpu looks at the rest")
    count = torch.cuda.device_count()
    cards = [torch.cuda.get_device_properties(i) for i in range(count)]
    name, sheet = cards[0].name, find_gpu(cards[0].name)
    free = [torch.cuda.mem_get_info(i)[0] / card.total_memory for i, card in enumerate(cards)]
    all_alike = {card.name for card in cards} == {name}
    size = f"{cards[0].total_memory / GIB:.0f} GiB"
    capability, builds = capability_of(0), torch.cuda.get_arch_list()
    is_amd = isinstance(capability, str)
    arch = capability.partition(":")[0] if is_amd else "sm_{}{}".format(*capability)
    # NVIDIA's GPUs run what was built for an older one of their family, too; AMD's do not.
    built = verdict_of(arch in builds) if is_amd else NO_BAR
    drives = [driver(), torch.version.cuda or torch.version.hip, torch.backends.cudnn.version()]
    packages = [f"{package.name} {package.version}" for package in metadata.distributions()]
    flash = ", ".join(name for name in packages if name.startswith("flash"))
    return [
        Row("GPUs", verdict_of(all_alike), f"{count} x {name}", "all alike"),
        Row("architecture", built, arch, "PyTorch has " + " ".join(builds)),
        Row(
            "free memory", verdict_of(min(free) >= FREE_BAR), f"{min(free):.0%} of {size}", ">= 90%"
        ),
        Row("data sheet", verdict_of(bool(sheet)), sheet.name if sheet else "none", "gpus.toml"),
        Row("driver, CUDA or ROCm, cuDNN", NO_BAR, ", ".join(map(str, drives))),
        Row("Transformer Engine", NO_BAR, kernels.problem("te") or "its layer norm is PyTorch's"),
        Row("its attention", NO_BAR, flash or "cuDNN's: no flash-attn is installed"),
    ]


def rate_rows(ranks: list[RankRates], gpu: str | None) -> list[Row]:
    """Returns a row for each measure of bench: the slowest GPU's rate beside the card's sheet and
    the others. The rate of an all-reduce is its bus bandwidth."""
    sheet, rows = find_gpu(gpu), []
    peaks = {"memory": sheet.memory_rate / 1e9, **sheet.peaks} if sheet else {}
    for measure in ranks[0].rates:
        measured = [rank for rank in ranks if measure in rank.rates]
        check, unit, words, peak = f"rate of {measure}", 1e12, "TFLOP/s", peaks.get(measure)
        if measure in ("memory", "copy"):
            unit, words = 1e9, "GB/s"
        if measure.startswith("all-reduce"):
            in_node = measure.endswith(IN_NODE)
            sharing = len(ranks) // len(measured) if in_node else len(ranks)
            check, unit, words = measure, 1e9 * sharing / (2 * (sharing - 1)), "GB/s"
            # Two cards of a mesh share some of a card's links, and no sheet says how many.
            peak = sheet.link / 1e9 if in_node and sheet and not sheet.mesh else None
        worst, expected, is_right = slowest(measure, measured, measured), [], True
        value = f"{worst.rate / unit:.4g} {words}"
        if peak:
            share = worst.rate / unit / peak
            value, is_right = f"{value}, {share:.0%}", share >= RATE_BAR
            expected.append(f">= {RATE_BAR:.0%} of {peak:g}")
        if len(measured) > 1 and gpu:  # ranks share a CPU
            value += f" on {worst.rank.place}, the slowest of {len(measured)}"
            value += f", {worst.short}" if worst.short else ""
            expected.append(f"within {SHARE:.0%} or {SPREADS:g} spreads of the others")
            is_right = is_right and not worst.short
        rows.append(
            Row(check, verdict_of(is_right) if expected else NO_BAR, value, ", ".join(expected))
        )
    return rows


def verdict_of(is_right: bool) -> str:
    return OK if is_right else FAILED


def bench_rows(gpu: str | None, nodes: int, gpus: int) -> list[Row]:
    """Returns the rows of all GPUs' rates, which are measured in other processes: a broken driver
    ends or hangs those, and not this one."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    words = [sys.executable, *torchrun]
    if nodes > 1:
        words = ["srun", f"--nodes={nodes}", f"--ntasks-per-node={gpus}", sys.executable]
    words += ["-m", "parallel.bench"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        lines = [line for line in str(error.stderr).splitlines() if "Error" in line]
        return [Row("rates", FAILED, f"parallel.bench: {[*lines, error][0]}")]
    ranks = [RankRates(**rank) for rank in json.loads(done.stdout.strip().splitlines()[-1])]
    return rate_rows(ranks, gpu)


def obstacle(spec: RunSpec, gpus: int, nodes: int) -> str:
    """Returns why a run cannot be tried on `nodes` like this with `gpus` GPUs each, or ""."""
    if not gpus:
        return f"{spec.needing_a_gpu} needs a GPU" if spec.needing_a_gpu else ""
    if spec.gpus > gpus * nodes:
        return f"{spec.gpus} GPUs, and here are {gpus * nodes}"
    import torch

    from parallel.engines import devices, kernels

    name = torch.cuda.get_device_name(0)
    if lacks := lacking(spec.formats, name, devices.capability_of(0)):
        return f"{name} has no {' and no '.join(lacks)}"
    return kernels.problem("te") if spec.te_alone else ""


def run_rows(study: Study, out: Path, gpus: int, nodes: int) -> list[Row]:
    """Trains the runs of a study in `out`, as many at once as there are GPUs for; a row each."""
    reasons = {name: obstacle(spec, gpus, nodes) for name, spec in study.specs.items()}
    tried = {name: study.run(name) for name, reason in reasons.items() if not reason}
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    beside = seen.split(",") if gpus else ()
    for loads in (False, True):
        names = [name for name in tried if bool(tried[name].load) is loads]
        names.sort(key=lambda name: tried[name].gpus)
        wide = [name for name in names if gpus and tried[name].gpus > gpus]
        sweep.sweep(study, names[: len(names) - len(wide)], out, fresh=True, side_by_side=beside)
        sweep.sweep(study, wide, out, fresh=True, srun=True)
    words = [sys.executable, "-m", "analysis.parity", str(out), "--format", "json"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment())
    parity = {row["run"]: row for row in json.loads(done.stdout or "[]")}
    runs = {name: read_run(out / name) for name in tried}
    rows = [Row(name, NOT_TRIED, reason) for name, reason in reasons.items() if reason]
    baseline = runs.get(study.baseline)
    peaks = rehearsed_peaks(study, list(tried))
    rows += [
        run_row(spec, runs[name], baseline, parity.get(name), peaks.get(name))
        for name, spec in tried.items()
    ]
    return [row._replace(check=f"{study.name}/{row.check}") for row in rows]


def rehearsed_peaks(study: Study, names: list[str]) -> dict[str, int]:
    """Returns run -> bytes of the tensors of its fullest rank, of runs that are rehearsed: in a
    process of its own, which sees no GPU."""
    names = [name for name in names if not unrehearsed(study.specs[name])]
    if not names:
        return {}
    words = [sys.executable, "-m", "parallel.rehearse", "--study", str(study.path), "--run-name"]
    words += [*names, "--format", "json"]
    unseen = environment() | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, capture_output=True, text=True, env=unseen)
    peaks = {name: 0 for name in names}
    for rank in json.loads(done.stdout or '{"ranks": []}')["ranks"]:
        peaks[rank["run"]] = max(peaks[rank["run"]], sum(rank["peak"].values()))
    return {name: peak for name, peak in peaks.items() if peak}


def run_row(
    spec: RunSpec,
    run: Run,
    baseline: Run | None,
    parity: dict[str, Any] | None,
    rehearsed: int | None,
) -> Row:
    """Returns a run's row: its loss beside its baseline's, its peak beside a rehearsal's, and its
    attention."""
    if run.state != COMPLETE or parity is None:
        return Row(run.name, FAILED, f"{run.state}: {run.reason or 'analysis.parity failed'}")
    wrong, expected, loss_diff = [], "parity's bars", parity["max_loss_diff"]
    if spec.precision == "fp32":
        if parity["verdict"] != "equal":
            wrong.append(parity["verdict"])
    else:
        baseline_steps, expected = baseline.steps if baseline else [], f"loss within {LOSS_BAR:g}"
        pairs = zip(run.steps, baseline_steps, strict=False)
        differences = (abs(step["loss"] - base["loss"]) for step, base in pairs)
        loss_diff = max(differences, default=math.inf)
        if not loss_diff <= LOSS_BAR:
            wrong.append(f"loss {loss_diff:.1e} from the baseline's")
    measured = [] if wrong else [f"loss within {loss_diff:.1e}"]
    if peak := run.metrics["epochs"][-1]["max_cuda_mem_allocated_bytes_global"]:
        ratio = f"{peak / rehearsed:.2f} x the rehearsed" if rehearsed else "not rehearsed"
        words = f"peak {peak / GIB:.2f} GiB, {ratio}"
        is_judged = bool(rehearsed) and rehearsed >= GIB
        is_off = is_judged and abs(peak / rehearsed - 1) > MEMORY_BAR
        if is_off:
            wrong.append(words)
        else:
            measured.append(words)
        if is_judged:
            expected += f", peak within {MEMORY_BAR:.0%}"
    measured += [run.facts["attention"], f"{run.metrics['summary']['total_wall_time_sec']:.0f} s"]
    return Row(run.name, verdict_of(not wrong), "; ".join(wrong + measured), expected)


@command_line("parallel.gpu_check")
def main(argv: list[str] | None = None) -> int:
    """Prints the table; returns 1 when a row failed."""
    parser = Parser(prog="python -m parallel.gpu_check", description=__doc__)
    parser.add_argument("studies", nargs="*", type=Path, metavar="TOML", help="studies to train")
    parser.add_argument("--cpu", action="store_true", help="what can be tried without a GPU")
    about = "measure the links of all nodes of this allocation, and train across them"
    parser.add_argument("--srun", action="store_true", help=about)
    flags = parser.parse_args(argv)
    studies = [load_study(path) for path in flags.studies]
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", 1)) if flags.srun else 1
    rows = [Row("commit", NO_BAR, str(facts.git(ROOT)["commit"])), *version_rows()]
    gpus, gpu = 0, None
    if not flags.cpu:
        rows += gpu_rows()
        import torch

        gpus, gpu = torch.cuda.device_count(), torch.cuda.get_device_name(0)
    rows.append(Row("GLOO_SOCKET_IFNAME", NO_BAR, os.environ.get("GLOO_SOCKET_IFNAME", "not set")))
    rows += bench_rows(gpu, nodes, gpus or 2)
    if nodes == 1:
        rows.append(Row("links between nodes", NOT_TRIED, "one node: --srun in a job of several"))
    for study in studies:
        rows += run_rows(study, Path("logs") / study.name, gpus, nodes)
    for row in rows:
        expected = f"   [{row.expected}]" if row.expected else ""
        print(printable(f"{row.verdict:10}{row.check:46}{row.value}{expected}"))
    return int(any(row.verdict == FAILED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
