"""What works on this node's GPUs, in about ten minutes: one table, and one folder for a bug report.

    python -m parallel.gpu_check                        # all that this node's GPUs allow
    python -m parallel.gpu_check --only versions rates fp32/megatron-tp2
    python -m parallel.gpu_check --device cpu --only versions fp32/megatron-tp2   # without a GPU

versions     Python, PyTorch, the libraries, CUDA, NCCL, driver, and the card of models/gpus.toml
attention    each attention kernel's outputs and gradients beside plain attention, kernel libraries
rates        matrix products, memory and all-reduce beside the card's data sheet
fp32/RUN     the losses and gradient norms of each engine and split are those of ddp on the CPU
bf16/RUN     losses are within 0.02 of ddp's in fp32; fp16/RUN, fp8/RUN: the loss falls
speed/RUN    a step's time and MFU beside a loop of plain PyTorch
breakdown/RUN  the parts of a step's time add up to it

parallel/gpu_check.toml holds the runs. Each check runs in processes of its own, with a time limit.
What this node cannot run is skipped, with the reason. --out (default: logs/gpu-check/<host>-<time>)
gets report.md, report.json and everything that was printed and recorded, after each check. The exit
status is 1 when a check failed, or when none could be made.
"""

import json
import math
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from models.bounds import check_flags
from models.errors import Parser, UsageError, command_line
from models.files import named_folder
from parallel.gpu_bench import (
    FAILED,
    GROUPS,
    HANG,
    PASSED,
    SKIPPED,
    TOLD,
    Bench,
    Refused,
    Row,
    flags,
    last_line,
)
from parallel.record.launch import detect
from parallel.record.reader import Run, read_breakdown, read_run
from parallel.record.schema import CATEGORIES

RATE_BAR = 0.5  # of the data sheet's
FREE_BAR = 0.9
FIRST_LOSS_BAR = 0.3  # from ln(vocabulary), which is what an untrained model must score


def names() -> list[str]:
    """Every check, in the order in which they run."""
    return [*SIMPLE, *(f"{group}/{run}" for group in GROUPS for run in GROUPS[group]["runs"])]


def make(bench: Bench, check: str) -> list[Row]:
    """Make a check; its rows, which are then in the report, too."""
    try:
        rows = SIMPLE[check](bench) if check in SIMPLE else [trained(bench, *check.split("/"))]
    except Refused as error:
        rows = [Row(check, FAILED, str(error))]
    bench.add(rows)
    return rows


# --- checks that train nothing --------------------------------------------------------------------


def versions(bench: Bench) -> list[Row]:
    ranges = wanted_versions()
    rows = [Row("version of python", TOLD, bench.versions_here["python"])]
    for package, version in bench.versions_here.items():
        if package == "python":
            continue
        wanted = ranges.get(package)
        if version is None and package == "transformer-engine":
            verdict = SKIPPED
        elif version is None:
            verdict = FAILED
        elif wanted is None:
            verdict = TOLD
        else:
            verdict = PASSED if wanted.contains(version, prereleases=True) else FAILED
        expected = str(wanted or "the range of setup.py; this package is not installed")
        rows.append(Row(f"version of {package}", verdict, version or "not installed", expected))
    return rows + (_gpu_rows(bench) if bench.device == "cuda" else [])


def _gpu_rows(bench: Bench) -> list[Row]:
    machine, name, card = bench.machine, bench.name, bench.card
    least_free = min(gpu["free"] for gpu in machine["gpus"])
    alike = {gpu["name"] for gpu in machine["gpus"]} == {name}
    shown = f"{len(machine['gpus'])} x {name}, {machine['gpus'][0]['gb']:.0f} GB"
    known = card.name if card else "none: MFU and rates have no bar"
    topology = nvidia_smi("topo", "-m")
    (bench.out / "nvidia-smi.txt").write_text(f"{nvidia_smi()}\n\n{topology}\n")
    (major, minor), built = machine["capability"], machine["architectures"]
    peers = machine["peer_access"]
    apart = sum(not access for row in peers for access in row) // 2
    return [
        Row("GPUs", PASSED if alike else FAILED, shown, "all alike"),
        Row(
            "free memory of each GPU",
            PASSED if least_free >= FREE_BAR else FAILED,
            f"{least_free:.0%} at least",
            f">= {FREE_BAR:.0%}: no other process uses one",
        ),
        Row("card in models/gpus.toml", PASSED if card else TOLD, known),
        Row("driver, CUDA, NCCL, cuDNN", TOLD, ", ".join(str(machine[k]) for k in _DRIVES)),
        Row(
            "PyTorch's code for this GPU",
            PASSED if runs_on(built, major, minor) else FAILED,
            " ".join(built),
            f"sm_{major}{minor}, or one that runs on it",
        ),
        Row("GPU pairs without peer access", TOLD, str(apart), log="nvidia-smi.txt"),
    ]


def attention(bench: Bench) -> list[Row]:
    found, rows = bench.probe("attention"), []
    for what, error, bar, why in found["rows"]:
        if error is None:
            rows.append(Row(f"attention {what}", SKIPPED, why))
        else:
            verdict = PASSED if error <= bar else FAILED
            rows.append(Row(f"attention {what}", verdict, f"{error:.1e} off", f"<= {bar:g}"))
    for library, why in found["usable"].items():
        absent = "No module named" in why or "needs a GPU" in why
        verdict = (SKIPPED if absent else FAILED) if why else PASSED
        rows.append(Row(f"kernels {library}", verdict, why or "its layer norm is PyTorch's"))
    return [*rows, Row("kernels auto", TOLD, found["chosen"])]


def rates(bench: Bench) -> list[Row]:
    words = [sys.executable, "-m", "parallel.microbench", "--processes", str(bench.gpus)]
    found = last_line(bench.call(words, bench.out / "rates.json"))
    card, rows = bench.card, []
    peaks = card.peaks if card else {}
    for precision, flops in found["products"].items():
        peak = peaks.get(precision)
        rows.append(_rate(f"matrix product {precision}", flops, 1e12, "TFLOP/s", peak))
    rows.append(_rate("memory", found["memory_rate"], 1e9, "GB/s", card and card.memory_rate / 1e9))
    largest = max(found["links"], key=float, default=None)
    for size, rate in found["links"].items():
        # Two cards of a mesh share some of a card's links, and no sheet says how many.
        known = card and size == largest and not card.mesh
        what = f"all-reduce of {size} MiB, {bench.gpus} ranks"
        rows.append(_rate(what, rate, 1e9, "GB/s", card.link / 1e9 if known else None))
    if not found["links"]:
        rows.append(Row("all-reduce", SKIPPED, "needs 2 GPUs, 1 is here"))
    return rows


def _rate(what: str, rate: float, unit: float, words: str, peak: float | None) -> Row:
    value = f"{rate / unit:.4g} {words}"
    if not peak:
        return Row(what, TOLD, value)
    share = rate / unit / peak
    verdict = PASSED if share >= RATE_BAR else FAILED
    return Row(what, verdict, f"{value}, {share:.0%}", f">= {RATE_BAR:.0%} of {peak:g}")


_DRIVES = ("driver", "cuda", "nccl", "cudnn")
SIMPLE: dict[str, Callable[[Bench], list[Row]]] = {
    "versions": versions,
    "attention": attention,
    "rates": rates,
}


def wanted_versions() -> dict[str, Any]:
    """The range of versions of each package of setup.py; empty where ours is not installed."""
    from packaging.requirements import Requirement  # of transformers and deepspeed

    try:
        lines = metadata.requires("gpt-scaling-study") or []
    except metadata.PackageNotFoundError:
        return {}
    return {of.name: of.specifier for of in map(Requirement, lines)}


def nvidia_smi(*words: str) -> str:
    try:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"
    return (done.stdout or done.stderr).strip()


def runs_on(built: Sequence[str], major: int, minor: int) -> bool:
    """Whether code built for these architectures runs on a GPU of a compute capability.

    Machine code (sm_90) runs on later minors of its major, PTX (compute_90) on all later ones.
    CUDA C++ Programming Guide, "Binary Compatibility" and "PTX Compatibility".
    """
    for name in built:
        if found := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name):
            kind, theirs, least = found[1], int(found[2]), int(found[3])
            if found[4]:
                fits = (theirs, least) == (major, minor)
            elif kind == "sm":
                fits = theirs == major and least <= minor
            else:
                fits = (theirs, least) <= (major, minor)
            if fits:
                return True
    return False


# --- checks that train ----------------------------------------------------------------------------


def trained(bench: Bench, group: str, run: str) -> Row:
    """Train a run, and its baseline, and judge it."""
    check, settings = f"{group}/{run}", bench.settings(group, run)
    if why := bench.why_not(group, run, settings):
        return Row(check, SKIPPED, why)
    try:
        for one in filter(None, (GROUPS[group].get("baseline"), check)):
            if why := bench.train(*one.split("/")):
                return Row(check, FAILED, f"{one}: {why}", "complete", *bench.again(one))
        value, expected, is_right = JUDGES[GROUPS[group]["judge"]](bench, group, run)
    except (Refused, UsageError) as error:
        value, expected, is_right = str(error), "", False
    verdict = TOLD if is_right is None else PASSED if is_right else FAILED
    return Row(check, verdict, value, expected, *bench.again(check))


Judged = tuple[str, str, bool | None]  # value, expected, whether it is right where one can say


def by_parity(bench: Bench, group: str, run: str) -> Judged:
    """analysis.parity: losses and gradient norms of every step beside the baseline's, fp32."""
    base = GROUPS[group]["baseline"]
    folder, baseline = bench.folder(group, run), bench.folder(*base.split("/"))
    if folder == baseline:
        return f"first loss {read_run(folder).steps[0]['loss']:.3f}", "complete", True
    row = bench.analysis("parity", folder, baseline, "--baseline", baseline)[0]
    if row["max_loss_diff"] is None:
        return row["verdict"], f"equal to {base}", False
    apart = f"loss {row['max_loss_diff']:.1e}, grad norm {row['max_grad_norm_diff']:.1e} apart"
    is_equal = row["verdict"] == "equal"
    return apart if is_equal else f"{row['verdict']} ({apart})", f"equal to {base}", is_equal


def by_losses(bench: Bench, group: str, run: str) -> Judged:
    """The losses of every step are within the bar of the baseline's."""
    bar, base = GROUPS[group]["bar"], GROUPS[group]["baseline"]
    ours, theirs = (read_run(bench.folder(*of)).steps for of in ((group, run), base.split("/")))
    pairs = zip(ours, theirs, strict=True)
    apart = max(_apart(mine["loss"], other["loss"]) for mine, other in pairs)
    return f"loss {apart:.1e} apart", f"<= {bar:g} of {base}", apart <= bar


def _apart(one: float | None, other: float | None) -> float:
    known = one is not None and other is not None and math.isfinite(one) and math.isfinite(other)
    return abs(one - other) if known else math.inf


def by_learning(bench: Bench, group: str, run: str) -> Judged:
    """The first loss is an untrained model's, and the last is lower by the bar."""
    bar, found = GROUPS[group]["bar"], read_run(bench.folder(group, run))
    losses = [step["loss"] for step in found.steps]
    untrained = math.log(bench.spec(group, run).model.vocab_size)
    first, last = losses[0], losses[-1]
    right = _apart(first, untrained) <= FIRST_LOSS_BAR and _apart(last, last) == 0
    value = f"loss {first:.3f} to {last:.3f}{_scaled(found)}"
    expected = f"from {untrained:.2f} +- {FIRST_LOSS_BAR}, down by {bar:g}"
    return value, expected, right and first - last >= bar


def _scaled(run: Run) -> str:
    skipped = sum(step["grad_norm"] is None for step in run.steps)
    return f", {skipped} of {len(run.steps)} steps skipped" if skipped else ""


def by_speed(bench: Bench, group: str, run: str) -> Judged:
    """The median step's time, beside that of a loop of plain PyTorch over the same batch."""
    (row,) = bench.analysis("tflops", bench.folder(group, run))
    step_s = row["steady_step_s"] or row["step_s_median"]
    mfu = f"{row['mfu']:.1%} MFU" if row["mfu"] is not None else f"no MFU ({row['missing']['mfu']})"
    plain_s = plain_step_s(bench, group, run)
    ratio, tokens_per_s = step_s / plain_s, row["tokens_per_s"]
    value = f"{step_s:.4f} s, {ratio:.2f} x plain, {tokens_per_s:.0f} tokens/s, {mfu}"
    if bench.device == "cpu":
        return value, "", None
    bar = GROUPS[group]["bar"]
    return value, f"<= {bar:g} x the plain loop's {plain_s:.4f} s", ratio <= bar


def plain_step_s(bench: Bench, group: str, run: str) -> float:
    """Seconds of a step of the plain loop with a run's model and batch, measured once.

    Raises:
        Refused: it failed.
    """
    left_out = ("engine", "zero_stage", "data", "eval_steps", *HANG)
    given = {k: v for k, v in bench.settings(group, run).items() if k not in left_out}
    key = json.dumps(given)
    if key not in bench.plain:
        words = [sys.executable, "-m", "parallel.plain_loop", *flags(given)]
        log = bench.out / f"plain-{len(bench.plain)}.json"
        text = bench.call(words, log, GROUPS[group]["limit_s"])
        bench.plain[key] = last_line(text)["step_s"]
    return bench.plain[key]


def by_parts(bench: Bench, group: str, run: str) -> Judged:
    """The parts of every window of every rank add up to its time."""
    bar, gpus = GROUPS[group]["bar"], bench.spec(group, run).gpus
    ranks, problems = read_breakdown(bench.folder(group, run), gpus)
    if problems:
        return "; ".join(problems), "rows of every rank", False
    apart = max(
        abs(sum(row[f"{part}_s"] for part in CATEGORIES) / row["elapsed_s"] - 1)
        for rows in ranks.values()
        for row in rows
    )
    return f"parts are {apart:.1e} off the step", f"<= {bar:g}", apart <= bar


JUDGES = {
    "parity": by_parity,
    "losses": by_losses,
    "learns": by_learning,
    "speed": by_speed,
    "parts": by_parts,
}


def chosen(only: Sequence[str] | None) -> list[str]:
    """The checks that --only names: checks, or groups of them.

    Raises:
        UsageError: there is none of that name.
    """
    known = names()
    for name in only or ():
        if name not in known and name not in GROUPS:
            raise UsageError(f"no check {name!r}; --list lists them; groups: {', '.join(GROUPS)}")
    return [n for n in known if not only or n in only or n.partition("/")[0] in only]


@command_line("parallel.gpu_check")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m parallel.gpu_check", description=__doc__)
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs to use (default: all)")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="what to check (default: cuda)"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these checks, or groups of them")
    parser.add_argument("--list", action="store_true", help="print the checks' names alone")
    parser.add_argument("--out", type=named_folder, metavar="DIR", help="the folder to write")
    arguments = parser.parse_args(argv)
    checks = chosen(arguments.only)
    if arguments.list:
        print("\n".join(checks))
        return 0
    check_flags(arguments, gpus=(1, 1024))
    if (started := detect().world_size) > 1:
        raise UsageError(f"{started} processes were started: start one, which starts the ranks")
    began, stamp = time.monotonic(), time.strftime("%Y%m%d-%H%M%S")
    out = arguments.out or Path("logs") / "gpu-check" / f"{platform.node()}-{stamp}"
    try:
        bench = Bench(arguments.device, arguments.gpus, out)
    except Refused as error:
        print(Row("machine", FAILED, f"PyTorch does not work here: {error}"))
        return 1
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends the checks, too
    try:
        for check in checks:
            for row in make(bench, check):
                print(row, flush=True)
    finally:
        signal.signal(signal.SIGTERM, before)
        counts, seconds = bench.counts(), time.monotonic() - began
        counted = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
        print(f"{counted} in {seconds:.0f} s; for a bug report, attach {out} (report.md)")
    return int(bool(counts[FAILED] or not counts[PASSED]))


if __name__ == "__main__":
    sys.exit(main())
