"""Kill training at random moments, resume it, and compare with a run that never stopped.

    python tests/tools/fault_campaign.py --kills 100 --out /tmp/faults
    python tests/tools/fault_campaign.py --kills 4 --only ddp --out /tmp/faults

Each engine has a run of --steps steps that saves every second step. An attempt is killed (SIGKILL
of one rank, or of all ranks and the launcher) at a random moment of a phase: saving, a step,
loading, start, in turns; --seed draws moments and victims. Each kill is counted under the phase
that the log shows at that moment. After each kill, these must hold: every checkpoint that the log
called saved and that retention keeps is there and undamaged; no process of the attempt is left (a
mark in its environment identifies it). Then the same command must resume from the newest
checkpoint. In the end losses, gradient norms and learning rates must equal those of the run that
never stopped, bit for bit.

Prints one line per kill; the counts go to <out>/result.md. Exit status 1 when anything was lost.
"""

import contextlib
import itertools
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from analysis.common.table import Column, Table  # noqa: E402
from base.bounds import check_flags  # noqa: E402
from base.errors import Parser, command_line  # noqa: E402
from parallel.checkpoint import folders  # noqa: E402
from parallel.record.reader import read_run, read_status  # noqa: E402

RUNS = {
    "ddp": (2, []),
    "deepspeed_zero": (2, ["--zero-stage", "2"]),
    "deepspeed_pipe": (2, ["--pp", "2"]),
    "megatron": (4, ["--tp", "2", "--pp", "2"]),
}
SMALL = ["--n-layer", "2", "--hidden", "64", "--n-head", "4", "--max-seq-len", "32"]
SMALL += ["--global-batch", "4", "--device", "cpu", "--eval-steps", "1", "--log-interval", "1"]
# What the log says when a phase begins, and how long after it a kill comes at most.
PHASES = {
    "start": ("", 4.0),
    "loading": (" loading checkpoint", 0.1),
    "step": ("elapsed time", 0.1),
    "saving": (" saving checkpoint", 0.1),
}
EXITS_WITHIN_S = 120.0
MARK = "FAULT_CAMPAIGN"  # the file of an attempt's console, which its processes have as a variable


def start(console: Path, folder: Path, engine: str, flags: list[str]) -> subprocess.Popen:
    ranks, split = RUNS[engine]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", "parallel.train", "--engine", engine, *split]
    about = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), MARK: str(console)}
    console.parent.mkdir(parents=True, exist_ok=True)
    with console.open("wb") as out:
        return subprocess.Popen(
            [*command, *SMALL, "--out", str(folder), *flags],
            cwd=ROOT,
            env=os.environ | about,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def phase_of(log: str) -> str:
    """The phase in which a log that ends here was."""
    for line in reversed(log.splitlines()):
        if "successfully" in line or " iteration " in line and "elapsed" in line:
            return "step"
        for phase in ("saving", "loading"):
            if line.startswith(PHASES[phase][0]):
                return phase
    return "start"


def family(console: Path) -> list[psutil.Process]:
    """Every living process of an attempt, whatever its parent is now."""
    every = psutil.process_iter(["environ", "cmdline"])
    return [p for p in every if (p.info["environ"] or {}).get(MARK) == str(console)]


def wait_and_kill(
    process: subprocess.Popen, console: Path, n_ranks: int, phase: str, chance: random.Random
) -> str:
    """SIGKILL one rank, or all and the launcher, at a random moment of a phase; the phase that the
    log was in."""
    ranks, (sign, lasts_s) = [], PHASES[phase]
    count = chance.randrange(1, 12) if phase in ("step", "saving") else 1
    while len(ranks) < n_ranks and process.poll() is None:
        time.sleep(0.05)
        trains = [p for p in family(console) if "parallel.train" in (p.info["cmdline"] or ())]
        ranks = [p for p in trains if "RANK" in p.info["environ"]]
    while process.poll() is None and (log := console.read_text()).count(sign) < count:
        if phase == "loading" and "elapsed time" in log:
            break  # there was nothing to load
        time.sleep(0.002)
    time.sleep(lasts_s * chance.random())
    now = "complete" if process.poll() is not None else phase_of(console.read_text())
    of_one = ranks and chance.random() < 0.5
    for _ in range(1 if of_one else 2):  # some may start after the first look
        for victim in [chance.choice(ranks)] if of_one else family(console):
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
    return now


def damage_in(save: Path, before: list[int], log: str) -> list[str]:
    """What is wrong with the checkpoints after an attempt that logged this, or with how it went
    on from those that were there before."""
    problems, there = [], folders.steps_in(save)
    saved = re.findall(r"successfully saved checkpoint at iteration +(\d+)", log)
    newest = max([*map(int, saved), *before], default=0)
    if newest and (not there or there[-1] < newest):
        problems.append(f"step {newest} was saved, but there is {there}")
    for step in there:
        try:
            folders.verify(save / folders.name_of(step))
        except folders.Damaged as error:
            problems.append(str(error))
    trained = re.search(r"iteration +(\d+)/.* elapsed time", log)
    if trained and int(trained[1]) != (before[-1] if before else 0) + 1:
        problems.append(f"it went on at step {trained[1]}, with {before} there")
    return problems


class Outcome(NamedTuple):
    """Of a kill, or of the comparison when a run has ended (phase `end`)."""

    engine: str
    phase: str
    problems: list[str]


def killed(
    console: Path, folder: Path, engine: str, flags: list[str], phase: str, seed: str
) -> Outcome:
    """Start or resume the run, kill it once, and check what is left."""
    save = folder / "checkpoints"
    before, problems = folders.steps_in(save), []
    process = start(console, folder, engine, flags)
    phase = wait_and_kill(process, console, RUNS[engine][0], phase, random.Random(seed))
    process.wait(EXITS_WITHIN_S)
    _, left = psutil.wait_procs(family(console), 5)  # until the kernel has freed what was killed
    if left:
        problems.append(f"processes left: {[p.pid for p in left]}")
    complete = read_status(folder).get("state") == "complete"
    if phase == "complete" and not complete:
        problems.append(f"it ended by itself, with exit status {process.returncode}")
    problems += damage_in(save, before, console.read_text())
    return Outcome(engine, "complete" if complete else phase, problems)


def compared(engine: str, folder: Path, alone: Path) -> Outcome:
    """A run that is over beside the one that never stopped; it makes room for another."""
    names = ("step", "loss", "grad_norm", "lr")
    curves = [[[s[n] for n in names] for s in read_run(of).steps] for of in (folder, alone)]
    problems = []
    if (state := read_status(folder).get("state")) != "complete" or curves[0] != curves[1]:
        problems.append(f"{state}: {len(curves[0])} of {len(curves[1])} steps, or they differ")
    folder.rename(f"{folder}-{time.time_ns()}")
    return Outcome(engine, "end", problems)


def campaign(engine: str, kills: int, seed: str, out: Path, flags: list[str]) -> Iterator[Outcome]:
    """All kills of one engine, the end of each run and the comparison."""
    alone, folder = out / f"{engine}-alone", out / engine
    saving = ["--save-interval", "2", "--save-grace-s", "5", *flags]
    assert start(out / f"{engine}-alone.console", alone, engine, flags).wait() == 0, alone
    for number, phase in enumerate(itertools.cycle(reversed(PHASES))):
        console = out / f"{engine}-{number}.console"
        outcome = killed(console, folder, engine, saving, phase, f"{seed}-{console.stem}")
        yield outcome
        if outcome.phase == "complete":
            yield compared(engine, folder, alone)
        elif (kills := kills - 1) == 0:
            break
    if folder.exists():
        start(out / f"{engine}-end.console", folder, engine, saving).wait()
        yield compared(engine, folder, alone)


def table(outcomes: list[Outcome]) -> Table:
    """A row an engine, and their sums."""
    rows = []
    for engine in (*RUNS, "all"):
        mine = [outcome for outcome in outcomes if engine in (outcome.engine, "all")]
        phases = Counter(outcome.phase for outcome in mine)
        counts = {phase: phases[phase] for phase in PHASES}
        row = {"engine": engine, "kills": sum(counts.values())} | counts
        row |= {"runs compared": phases["end"]}
        rows.append(row | {"lost, left or unequal": sum(bool(o.problems) for o in mine)})
    return Table([Column(name, name, "d") for name in rows[0]], rows)


@command_line("fault_campaign")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="of all engines together")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of each run")
    parser.add_argument("--seed", default="1", help="of the moments and victims")
    parser.add_argument("--only", nargs="+", choices=tuple(RUNS), default=list(RUNS))
    parser.add_argument("--out", type=Path, default=Path("/tmp/faults"), metavar="DIR")
    parser.add_argument("--data", default=str(ROOT / "data" / "stdlib"), metavar="DIR")
    arguments = parser.parse_args(argv)
    check_flags(arguments, kills=(1, 10**6), steps=(4, 10**6))
    out, each = arguments.out.absolute(), -(-arguments.kills // len(arguments.only))
    flags = ["--data", str(Path(arguments.data).absolute()), "--steps", str(arguments.steps)]
    outcomes = []
    for engine in arguments.only:
        for outcome in campaign(engine, each, arguments.seed, out, flags):
            outcomes.append(outcome)
            print(engine, outcome.phase, *(outcome.problems or ["nothing lost"]), flush=True)
    (out / "result.md").write_text(table(outcomes).render("markdown"))
    print(table(outcomes).render())
    return int(any(outcome.problems for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
