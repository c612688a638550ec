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
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from models.bounds import check_flags
from models.errors import Parser, UsageError, command_line, printable
from models.files import ROOT, named_folder, read_toml
from models.gpus import find_gpu
from models.storage import write_json
from parallel import forked_ranks
from parallel.config.settings import RunSpec, resolve
from parallel.record import facts
from parallel.record.ends import COMPLETE
from parallel.record.launch import detect
from parallel.record.reader import Run, read_breakdown, read_run, read_status
from parallel.record.schema import CATEGORIES, utc_now
from parallel.sweep import last_words, launcher

GROUPS = read_toml(Path(__file__).with_suffix(".toml"), "checks")
PASSED, FAILED, SKIPPED, TOLD = "passed", "FAILED", "skipped", "-"
LIMIT_S = 120  # of a check that trains nothing
HANG = {"hang_s": 90.0, "timeout_s": 180.0}  # then a run ends and names the rank that hangs
GRACE_S = 35  # torchrun gives its ranks 30 s to end
LIBRARIES = {
    "deepspeed_zero": ("deepspeed",),
    "deepspeed_pipe": ("deepspeed", "megatron-core"),
    "megatron": ("megatron-core",),
}
RATE_BAR = 0.5  # of the data sheet's
FREE_BAR = 0.9
FIRST_LOSS_BAR = 0.3  # from ln(vocabulary), which is what an untrained model must score


@dataclass(frozen=True)
class Row:
    """A line of the table. verdict: passed, FAILED, skipped, or - where nothing is expected."""

    check: str
    verdict: str
    value: str
    expected: str = ""
    again: str = ""  # the command that did it
    log: str = ""  # what it printed, in the folder

    def __str__(self) -> str:
        expected = f"   [{self.expected}]" if self.expected else ""
        return printable(f"{self.verdict:8}{self.check:38}{self.value}{expected}")


def names() -> list[str]:
    """Every check, in the order in which they run."""
    return [*SIMPLE, *(f"{group}/{run}" for group in GROUPS for run in GROUPS[group]["runs"])]


class Refused(Exception):
    """A command of a check failed or exceeded its time; the message says how."""


class Bench:
    """A machine that is checked, and the folder that holds what was found.

    Raises:
        UsageError: there are fewer GPUs than were asked for, or the folder is not empty.
    """

    def __init__(self, device: str, gpus: int | None, out: Path):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"{out} is there and not empty: name a new folder with --out")
        self.device, self.rows = device, []
        self.done: dict[str, str] = {}  # run -> why it is not complete, or ""
        self.plain: dict[str, float] = {}  # seconds of a plain step, by its settings
        with tempfile.TemporaryDirectory() as aside:  # a mistake leaves no folder behind
            self.out = Path(aside)
            try:
                self.machine = self.probe("machine")
            except Refused as error:
                raise UsageError(f"PyTorch does not work here: {error}") from error
        there = len(self.machine["gpus"]) if device == "cuda" else (gpus or 2)
        if not there:
            why = self.machine["why_no_gpu"]
            raise UsageError(f"there is no GPU: {why}; --device cpu tries the checks without one")
        if (gpus or 1) > there:
            raise UsageError(f"--gpus {gpus}, but PyTorch sees {there}")
        self.out, self.gpus = out, gpus or there
        out.mkdir(parents=True, exist_ok=True)
        name = self.machine["gpus"][0]["name"] if device == "cuda" else None
        self.name, self.card = name or facts.cpu_name(), find_gpu(name)
        self.versions_here = facts.versions()

    def run(self, check: str) -> list[Row]:
        """Make a check; its rows, which are also in the report."""
        try:
            rows = SIMPLE[check](self) if check in SIMPLE else [self.trained(*check.split("/"))]
        except Refused as error:
            rows = [Row(check, FAILED, str(error))]
        self.rows += rows
        self.report()
        return rows

    # --- what is started ---------------------------------------------------------------------

    def call(self, words: list[str], log: Path, limit_s: float, both: bool = False) -> str:
        """Run a command to its end; what it printed. `both`: stderr too; else it goes to log.err.

        Raises:
            Refused: it did not end with status 0 within `limit_s`.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        hidden = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        environment = forked_ranks.environment() | {"OMP_NUM_THREADS": "1"}
        environment |= hidden if self.device == "cpu" else {"NCCL_DEBUG": "WARN"}
        with (
            log.open("wb") as printed,
            log.open("ab") if both else log.with_suffix(".err").open("wb") as errors,
            subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=printed, stderr=errors, env=environment
            ) as process,
        ):
            try:
                status = process.wait(limit_s)
            except BaseException as error:  # Ctrl-C, too
                end(process)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise Refused(f"did not end within {limit_s:g} s") from error
        if status:
            text = (log if both else log.with_suffix(".err")).read_text(errors="replace")
            last = (text.strip().splitlines() or ["it printed nothing"])[-1]
            raise Refused(f"exit status {status}: {last}")
        return log.read_text(errors="replace")

    def probe(self, name: str) -> dict[str, Any]:
        words = [sys.executable, "-c", f"from parallel.gpu_probes import *; show({name})"]
        return last_line(self.call(words, self.out / f"{name}.json", LIMIT_S))

    def analysis(self, command: str, *words: Any) -> list[dict[str, Any]]:
        """The rows that a command of analysis prints about runs."""
        words = [sys.executable, "-m", f"analysis.{command}", *map(str, words), "--format", "json"]
        log = self.out / "analysis" / f"{command}.json"
        return json.loads(self.call(words, log, LIMIT_S))

    # --- checks that train nothing -----------------------------------------------------------

    def versions(self) -> list[Row]:
        ranges = wanted_versions()
        rows = [Row("version of python", TOLD, self.versions_here["python"])]
        for package, version in self.versions_here.items():
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
        return rows + (self._gpu_rows() if self.device == "cuda" else [])

    def _gpu_rows(self) -> list[Row]:
        machine, name, card = self.machine, self.name, self.card
        least_free = min(gpu["free"] for gpu in machine["gpus"])
        alike = {gpu["name"] for gpu in machine["gpus"]} == {name}
        shown = f"{len(machine['gpus'])} x {name}, {machine['gpus'][0]['gb']:.0f} GB"
        known = card.name if card else "none: MFU and rates have no bar"
        topology = nvidia_smi("topo", "-m")
        (self.out / "nvidia-smi.txt").write_text(f"{nvidia_smi()}\n\n{topology}\n")
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

    def attention(self) -> list[Row]:
        found, rows = self.probe("attention"), []
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

    def rates(self) -> list[Row]:
        words = [sys.executable, "-m", "parallel.microbench", "--processes", str(self.gpus)]
        found = last_line(self.call(words, self.out / "rates.json", LIMIT_S))
        card, rows = self.card, []
        peaks = card.peaks if card else {}
        for precision, flops in found["products"].items():
            peak = peaks.get(precision)
            rows.append(self._rate(f"matrix product {precision}", flops, 1e12, "TFLOP/s", peak))
        rows.append(
            self._rate("memory", found["memory_rate"], 1e9, "GB/s", card and card.memory_rate / 1e9)
        )
        largest = max(found["links"], key=float, default=None)
        for size, rate in found["links"].items():
            # Two cards of a mesh share some of a card's links, and no sheet says how many.
            known = card and size == largest and not card.mesh
            what = f"all-reduce of {size} MiB, {self.gpus} ranks"
            rows.append(self._rate(what, rate, 1e9, "GB/s", card.link / 1e9 if known else None))
        if not found["links"]:
            rows.append(Row("all-reduce", SKIPPED, "needs 2 GPUs, 1 is here"))
        return rows

    def _rate(self, what: str, rate: float, unit: float, words: str, peak: float | None) -> Row:
        value = f"{rate / unit:.4g} {words}"
        if not peak:
            return Row(what, TOLD, value)
        share = rate / unit / peak
        verdict = PASSED if share >= RATE_BAR else FAILED
        return Row(what, verdict, f"{value}, {share:.0%}", f">= {RATE_BAR:.0%} of {peak:g}")

    # --- checks that train -------------------------------------------------------------------

    def settings(self, group: str, run: str) -> dict[str, Any]:
        """The settings of a run of gpu_check.toml on this machine."""
        table = GROUPS[group]
        given = table["defaults"] | table["runs"][run]
        given |= table.get("half", {}) if self.machine["lacks"]["bf16"] else {}
        given = {"device": self.device, "data": str(self.out / "data")} | HANG | given
        if self.device == "cpu":
            given |= table.get("cpu", {}) | {"device": "cpu"}
        return {name: value for name, value in given.items() if name not in ("needs", "gpu_gb")}

    def why_not(self, group: str, run: str, settings: dict[str, Any]) -> str:
        """Why this machine cannot make the run, or ""."""
        table, one = GROUPS[group], GROUPS[group]["runs"][run]
        needs = {*table.get("needs", ()), *one.get("needs", ())}
        gpus, reasons = settings.get("gpus", 1), [self.machine["lacks"][need] for need in needs]
        if gpus > self.gpus:
            reasons.append(f"needs {gpus} GPUs, {self.gpus} are here")
        for package in LIBRARIES.get(settings.get("engine", ""), ()):
            if self.versions_here[package] is None:
                reasons.append(f"{package} is not installed")
        least, cards = one.get("gpu_gb", 0), self.machine["gpus"]
        there = cards[0]["gb"] if self.device == "cuda" else 0
        if least > there:
            reasons.append(f"needs a GPU of {least} GB, {there:.0f} are here")
        try:
            resolve(("gpu_check.toml", settings))
        except UsageError as error:
            reasons.append(str(error))
        return "; ".join(filter(None, reasons))

    def trained(self, group: str, run: str) -> Row:
        """Train a run, and its baseline, and judge it."""
        check, settings = f"{group}/{run}", self.settings(group, run)
        if why := self.why_not(group, run, settings):
            return Row(check, SKIPPED, why)
        for one in filter(None, (GROUPS[group].get("baseline"), check)):
            if why := self.train(*one.split("/")):
                return Row(check, FAILED, f"{one}: {why}", "complete", *self._again(one))
        try:
            value, expected, is_right = JUDGES[GROUPS[group]["judge"]](self, group, run)
        except (Refused, UsageError) as error:
            value, expected, is_right = str(error), "", False
        verdict = TOLD if is_right is None else PASSED if is_right else FAILED
        return Row(check, verdict, value, expected, *self._again(check))

    def _again(self, check: str) -> tuple[str, str]:
        """The command that trains a run, and where it printed."""
        words, ranks = self.words(*check.split("/")), self.spec(*check.split("/")).gpus
        command = shlex.join(["torchrun", "--nproc-per-node", str(ranks), *words])
        return command, f"runs/{check}/console.out"

    def folder(self, group: str, run: str) -> Path:
        return self.out / "runs" / group / run

    def spec(self, group: str, run: str) -> RunSpec:
        return resolve(("gpu_check.toml", self.settings(group, run)))

    def words(self, group: str, run: str) -> list[str]:
        """What a launcher is to start."""
        settings, out = self.settings(group, run), ["--out", str(self.folder(group, run))]
        return ["-m", "parallel.train", *flags(settings), *out]

    def train(self, group: str, run: str) -> str:
        """Train a run, once; why it is not complete, or ""."""
        check, folder = f"{group}/{run}", self.folder(group, run)
        if check not in self.done:
            self.done[check] = self._train(group, run, folder)
        return self.done[check]

    def _train(self, group: str, run: str, folder: Path) -> str:
        console, limit_s = folder / "console.out", GROUPS[group]["limit_s"]
        data = self.out / "data"
        if not data.exists():
            words = [sys.executable, "-m", "parallel.data", "--out", str(data), "--input"]
            words += [str(path) for path in sorted((ROOT / "parallel").rglob("*.py"))]
            self.call(words, self.out / "data.out", LIMIT_S, both=True)
        try:
            words = [*launcher(self.spec(group, run)), *self.words(group, run)]
            self.call(words, console, limit_s, both=True)
        except Refused as error:
            why = read_status(folder).get("reason") or last_words(console)
            return f"{why} ({error})" if "did not end" in str(error) else why or str(error)
        state = read_run(folder).state
        return "" if state == COMPLETE else f"the run is {state}"

    # --- the report --------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        return {v: sum(row.verdict == v for row in self.rows) for v in (PASSED, FAILED, SKIPPED)}

    def report(self) -> None:
        """Write report.json and report.md of what is known so far."""
        told = {
            "written_utc": utc_now(),
            "command_line": facts.command_line(),
            "host": platform.node(),
            "platform": platform.platform(),
            "cpu": facts.cpu_name(),
            "cores": facts.cores(),
            "device": self.device,
            "gpus": self.gpus,
            "git": facts.git(ROOT),
            "versions": self.versions_here,
            "machine": self.machine,
        }
        rows = [asdict(row) for row in self.rows]
        write_json(self.out / "report.json", told | {"counts": self.counts(), "checks": rows})
        (self.out / "report.md").write_text(self._markdown(told))

    def _markdown(self, told: dict[str, Any]) -> str:
        def cell(text: str) -> str:
            return printable(text).replace("|", "\\|")

        on = self.name if self.device == "cpu" else f"{self.gpus} x {self.name}"
        counted = ", ".join(f"{n} {verdict}" for verdict, n in self.counts().items())
        lines = [f"# GPU check of {told['host']}", "", f"- {told['command_line']}"]
        lines += [f"- {told['written_utc']}, {on}, commit {told['git']['commit']}", f"- {counted}"]
        if self.device == "cpu":
            lines.append("- without a GPU, with tiny models: it shows that the command works")
        lines += ["", "| check | value | expected | verdict |", "| --- | --- | --- | --- |"]
        for row in self.rows:
            cells = map(cell, (row.check, row.value, row.expected, row.verdict))
            lines.append(f"| {' | '.join(cells)} |")
        for row in self.rows:
            if row.verdict == FAILED and row.again:
                console = self.out / row.log
                tail = console.read_text(errors="replace").splitlines()[-40:]
                lines += ["", f"## {row.check}", "", f"    {row.again}", ""]
                lines += [f"The end of {row.log}:", ""]
                lines += [f"    {printable(line)}" for line in tail]
        return "\n".join(lines) + "\n"


_DRIVES = ("driver", "cuda", "nccl", "cudnn")
SIMPLE: dict[str, Callable[[Bench], list[Row]]] = {
    "versions": Bench.versions,
    "attention": Bench.attention,
    "rates": Bench.rates,
}


def end(process: subprocess.Popen) -> None:
    """SIGTERM, and SIGKILL when it stays; ranks end with their launcher."""
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()


def last_line(text: str) -> dict[str, Any]:
    """The JSON object that a command printed last; NCCL and others print before it."""
    return json.loads(text.strip().splitlines()[-1])


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


def flags(settings: dict[str, Any]) -> list[str]:
    """Settings as flags of parallel.train."""
    words = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return words


# --- judges ---------------------------------------------------------------------------------------

Judged = tuple[str, str, bool | None]  # value, expected, whether it is right where one can say


def by_parity(bench: Bench, group: str, run: str) -> Judged:
    """analysis.parity: losses and gradient norms of every step beside the baseline's, fp32."""
    base = GROUPS[group]["baseline"]
    folder, baseline = bench.folder(group, run), bench.folder(*base.split("/"))
    if folder == baseline:
        return f"first loss {read_run(folder).steps[0]['loss']:.3f}", "complete", True
    try:
        found = bench.analysis("parity", folder, baseline, "--baseline", baseline)
    except Refused:  # a run that differs ends it with 1; its table is written
        found = json.loads((bench.out / "analysis" / "parity.json").read_text())
    row = found[0]
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
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends the checks, too
    began, stamp = time.monotonic(), time.strftime("%Y%m%d-%H%M%S")
    out = arguments.out or Path("logs") / "gpu-check" / f"{platform.node()}-{stamp}"
    bench = Bench(arguments.device, arguments.gpus, out)
    try:
        for check in checks:
            for row in bench.run(check):
                print(row, flush=True)
    finally:
        signal.signal(signal.SIGTERM, before)
        counts, seconds = bench.counts(), time.monotonic() - began
        counted = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
        print(f"{counted} in {seconds:.0f} s; for a bug report, attach {out} (report.md)")
    return int(bool(counts[FAILED] or not counts[PASSED]))


if __name__ == "__main__":
    sys.exit(main())
