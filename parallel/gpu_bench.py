"""A machine that gpu_check checks: what is started on it, with a time limit, and the report."""

import json
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from models.errors import UsageError, printable
from models.files import ROOT, read_toml
from models.gpus import find_gpu
from models.storage import write_json
from parallel import forked_ranks
from parallel.config.settings import RunSpec, resolve
from parallel.record import facts
from parallel.record.ends import COMPLETE
from parallel.record.reader import read_run, read_status
from parallel.record.schema import utc_now
from parallel.sweep import last_words, launcher

GROUPS = read_toml(Path(__file__).with_name("gpu_check.toml"), "checks")
PASSED, FAILED, SKIPPED, TOLD = "passed", "FAILED", "skipped", "-"
LIMIT_S = 120  # of a check that trains nothing
HANG = {"hang_s": 90.0, "timeout_s": 180.0}  # then a run ends and names the rank that hangs
GRACE_S = 35  # torchrun gives its ranks 30 s to end
LIBRARIES = {
    "deepspeed_zero": ("deepspeed",),
    "deepspeed_pipe": ("deepspeed", "megatron-core"),
    "megatron": ("megatron-core",),
}


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


class Refused(Exception):
    """A command of a check failed or exceeded its time; the message says how."""


class Bench:
    """A machine that is checked, and the folder that holds what was found.

    Raises:
        UsageError: there are fewer GPUs than were asked for, or the folder is not empty.
        Refused: PyTorch cannot be imported, or hangs.
    """

    def __init__(self, device: str, gpus: int | None, out: Path):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"{out} is there and not empty: name a new folder with --out")
        self.device, self.rows = device, []
        self.done: dict[str, str] = {}  # run -> why it is not complete, or ""
        self.plain: dict[str, float] = {}  # seconds of a plain step, by its settings
        with tempfile.TemporaryDirectory() as aside:  # a mistake leaves no folder behind
            self.out = Path(aside)
            self.machine = self.probe("machine")
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

    # --- what is started ---------------------------------------------------------------------

    def call(
        self,
        words: list[str],
        log: Path,
        limit_s: float = LIMIT_S,
        both: bool = False,
        fine: Sequence[int] = (0,),
    ) -> str:
        """Run a command to its end; what it printed. `both`: stderr too; else it goes to log.err.

        Raises:
            Refused: it did not end with a status that is `fine` within `limit_s`.
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
        if status not in fine:
            text = (log if both else log.with_suffix(".err")).read_text(errors="replace")
            last = (text.strip().splitlines() or ["it printed nothing"])[-1]
            raise Refused(f"exit status {status}: {last}")
        return log.read_text(errors="replace")

    def probe(self, name: str) -> dict[str, Any]:
        words = [sys.executable, "-c", f"from parallel.gpu_probes import *; show({name})"]
        return last_line(self.call(words, self.out / f"{name}.json"))

    def analysis(self, command: str, *words: Any) -> list[dict[str, Any]]:
        """The rows that a command of analysis prints about runs."""
        words = [sys.executable, "-m", f"analysis.{command}", *map(str, words), "--format", "json"]
        log = self.out / "analysis" / f"{command}.json"
        return json.loads(self.call(words, log, fine=(0, 1)))  # 1: a run differs

    # --- runs of gpu_check.toml ----------------------------------------------------------------

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

    def again(self, check: str) -> tuple[str, str]:
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
            self.call(words, self.out / "data.out", both=True)
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

    def add(self, rows: list[Row]) -> None:
        self.rows += rows
        self.report()

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


def end(process: subprocess.Popen) -> None:
    """SIGTERM, and SIGKILL when it stays; ranks end with their launcher."""
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()


def last_line(text: str) -> dict[str, Any]:
    """The JSON object that a command printed last; NCCL and others print before it.

    Raises:
        Refused: there is none.
    """
    line = (text.strip().splitlines() or [""])[-1]
    try:
        return json.loads(line)
    except ValueError as error:
        raise Refused(f"it printed no result but {line!r}") from error


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
