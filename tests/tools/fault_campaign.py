"""Kill training at random moments, resume it, and compare with a run that never stopped.

    python tests/tools/fault_campaign.py --kills 100 --out /tmp/faults
    python tests/tools/fault_campaign.py --kills 4 --only ddp --out /tmp/faults

Each engine has a run of --steps steps that saves every second step. An attempt is killed (SIGKILL
of one rank, or of all ranks and the launcher) at a random moment of a phase: start, loading, a
step, saving. Phases and victims come in turns, shuffled by --seed. Each kill is counted under the
phase that the log shows at that moment. After each kill, these must hold: every checkpoint that the
log called saved and that retention keeps is there and undamaged; no process of the attempt is left
(a mark in its environment identifies it). Then the same command must resume from the newest
checkpoint. In the end losses, gradient norms and learning rates must equal those of the run that
never stopped, bit for bit.

Prints one line per kill; counts go to <out>/result.json and result.md. Exit status 1 when anything
was lost.
"""

import argparse
import contextlib
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from base.bounds import check_flags  # noqa: E402
from base.errors import Parser, command_line  # noqa: E402
from base.storage import write_json  # noqa: E402
from parallel.checkpoint import folders  # noqa: E402
from parallel.record.reader import read_checkpoints, read_run, read_status  # noqa: E402

RUNS = {
    "ddp": (2, []),
    "deepspeed_zero": (2, ["--zero-stage", "2"]),
    "deepspeed_pipe": (2, ["--pp", "2"]),
    "megatron": (4, ["--tp", "2", "--pp", "2"]),
}
SMALL = ["--n-layer", "2", "--hidden", "64", "--n-head", "4", "--max-seq-len", "32"]
SMALL += ["--global-batch", "4", "--device", "cpu", "--eval-steps", "1", "--log-interval", "1"]
PHASES = ("start", "loading", "step", "saving")
TURNS = [(phase, whom) for phase in PHASES[1:] * 2 + PHASES[:1] for whom in ("all", "one")]
STARTING_S = 4.0  # a kill of the phase `start` comes at most this long after the ranks exist
EXITS_WITHIN_S = 120.0
MARK = "FAULT_CAMPAIGN"


def start(folder: Path, engine: str, steps: int, flags: list[str], mark: str) -> subprocess.Popen:
    ranks, split = RUNS[engine]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", "parallel.train", "--engine", engine, *split]
    command += [*SMALL, "--steps", str(steps), "--out", str(folder), *flags]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.console").open("ab") as console:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


class Log:
    """The part of train.log that one attempt appended."""

    def __init__(self, folder: Path):
        self.path = folder / "train.log"
        found = self.path.stat() if self.path.exists() else None
        self.begin, self.file = (found.st_size, found.st_ino) if found else (0, None)

    def text(self) -> str:
        if not self.path.exists():
            return ""
        with self.path.open("rb") as file:
            # An attempt that starts from the beginning, because nothing was saved, has a new log.
            anew = os.fstat(file.fileno()).st_ino != self.file
            file.seek(0 if anew else self.begin)
            return file.read().decode(errors="replace")


def phase_of(log: str) -> str:
    """The phase in which a log that ends here was."""
    for line in reversed(log.splitlines()):
        if "successfully" in line or " iteration " in line and "elapsed" in line:
            return "step"
        if line.startswith(" saving checkpoint"):
            return "saving"
        if line.startswith(" loading checkpoint"):
            return "loading"
    return "start"


def family(mark: str) -> list[psutil.Process]:
    """Every living process of an attempt, whatever its parent is now."""
    every = psutil.process_iter(["environ", "cmdline"])
    return [process for process in every if (process.info["environ"] or {}).get(MARK) == mark]


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def ranks_of(processes: list[psutil.Process]) -> list[tuple[int, psutil.Process]]:
    ranks = [
        (int(process.info["environ"]["RANK"]), process)
        for process in processes
        if "RANK" in process.info["environ"] and "parallel.train" in (process.info["cmdline"] or ())
    ]
    return sorted(ranks, key=lambda pair: pair[0])


def median_s(folder: Path, event: str, otherwise: float) -> float:
    """How long the run's saves or loads took so far."""
    times = [row["total_s"] for row in read_checkpoints(folder) if row["event"] == event]
    return statistics.median(times) if times else otherwise


def wait_and_kill(
    process: subprocess.Popen,
    folder: Path,
    log: Log,
    mark: str,
    turn: tuple[str, str],
    n_ranks: int,
    chance: random.Random,
) -> tuple[str, str]:
    """SIGKILL one rank, or all and the launcher, at a random moment of a phase; (the phase that the
    log was in, which processes were killed)."""
    phase, whom = turn
    everyone = ranks = []
    while len(ranks) < n_ranks and process.poll() is None:
        time.sleep(0.05)
        everyone = family(mark)
        ranks = ranks_of(everyone)
    victims = everyone if whom == "all" else []
    if whom == "one" and ranks:
        rank, victim = chance.choice(ranks)
        victims, whom = [victim], f"rank {rank}"
    signs = {"loading": " loading checkpoint", "step": "elapsed time", "saving": " saving checkp"}
    skip = chance.randrange(1, 12) if phase in ("step", "saving") else 1
    moment = chance.random()
    if phase == "start":
        time.sleep(STARTING_S * moment)
    else:
        event = "load" if phase == "loading" else "save"
        lasts_s = 0.1 if phase == "step" else median_s(folder, event, 0.05)
        while process.poll() is None and (text := log.text()).count(signs[phase]) < skip:
            if phase == "loading" and "elapsed time" in text:
                break  # there was nothing to load
            time.sleep(0.002)
        time.sleep(lasts_s * moment)
    now = "complete" if process.poll() is not None else phase_of(log.text())
    kill(victims)
    if whom == "all":
        kill(family(mark))  # what started after the list was made
    return now, whom


def newest_saved(log: str) -> int:
    found = re.findall(r"successfully saved checkpoint at iteration +(\d+)", log)
    return int(found[-1]) if found else 0


def losses(folder: Path) -> list[tuple]:
    return [(s["step"], s["loss"], s["grad_norm"], s["lr"]) for s in read_run(folder).steps]


def damage_in(save: Path, before: list[int], log: str) -> list[str]:
    """What is wrong with the checkpoints after an attempt that logged this, or with how it went
    on from those that were there before."""
    problems, there = [], folders.steps_in(save)
    newest = max([newest_saved(log), *before])
    if newest and (not there or there[-1] < newest):
        problems.append(f"step {newest} was saved, but there is {there}")
    for step in there:
        try:
            folders.verify(save / folders.name_of(step))
        except folders.Damaged as error:
            problems.append(str(error))
    loaded = re.search(r"successfully loaded checkpoint from .* at iteration (\d+)", log)
    trained = re.search(r"iteration +(\d+)/.* elapsed time", log)
    if before and loaded and int(loaded[1]) != before[-1]:
        problems.append(f"step {before[-1]} was there, but it loaded {loaded[1]}")
    if trained and int(trained[1]) != (before[-1] if before else 0) + 1:
        problems.append(f"it went on at step {trained[1]}, with {before} there")
    return problems


def one_kill(folder: Path, engine: str, steps: int, number: int, seed: str, flags: list) -> dict:
    """Start or resume the run, kill it once, and check what is left."""
    turns = TURNS.copy()
    random.Random(f"{seed}-{engine}-{number // len(TURNS)}").shuffle(turns)
    chance, turn = random.Random(f"{seed}-{engine}-{number}"), turns[number % len(TURNS)]
    save, log, mark = folder / "checkpoints", Log(folder), f"{os.getpid()}-{time.time_ns()}"
    before, problems = folders.steps_in(save), []
    process = start(folder, engine, steps, flags, mark)
    phase, whom = wait_and_kill(process, folder, log, mark, turn, RUNS[engine][0], chance)
    began = time.monotonic()
    try:
        status = process.wait(EXITS_WITHIN_S)
    except subprocess.TimeoutExpired:
        problems.append(f"the launcher did not end within {EXITS_WITHIN_S:g} s")
        kill(family(mark))
        status = process.wait()
    ended_s = time.monotonic() - began
    for _ in range(50):  # until the kernel has freed what was killed
        if not (left := family(mark)):
            break
        time.sleep(0.1)
    if left:
        problems.append(f"processes left: {[p.pid for p in left]}")
    if phase == "complete" and read_status(folder).get("state") != "complete":
        problems.append(f"it ended by itself, with exit status {status}")
    problems += damage_in(save, before, log.text())
    return {
        "engine": engine,
        "number": number,
        "turn": turn,
        "phase": phase if status else "complete",
        "killed": whom,
        "exit": status,
        "ended_s": round(ended_s, 1),
        "newest": (folders.steps_in(save) or [0])[-1],
        "problems": problems,
    }


def campaign(engine: str, kills: int, steps: int, seed: str, out: Path, flags: list) -> list[dict]:
    """All kills of one engine, the end of each run and the comparison."""
    alone, folder, outcomes = out / f"{engine}-alone", out / engine, []
    assert start(alone, engine, steps, flags, "alone").wait() == 0, f"see {alone}.console"
    saving = ["--save-interval", "2", "--save-grace-s", "5", *flags]
    done = 0
    while done < kills or folder.exists():
        if done == kills and read_status(folder).get("state") != "complete":
            start(folder, engine, steps, saving, "end").wait()
        if read_status(folder).get("state") == "complete" or done == kills:
            problem = difference(folder, alone)
            same = "DIFFERS from" if problem else "is bit for bit"
            words = f"the curve of {len(losses(folder))} steps {same} the undisturbed one"
            outcome = {"engine": engine, "phase": "end", "problems": [problem] if problem else []}
            folder.rename(out / f"{engine}-{len(outcomes)}")  # kills are left: another run
        else:
            tries = sum("killed" in outcome for outcome in outcomes)
            outcome = one_kill(folder, engine, steps, tries, seed, saving)
            done += outcome["phase"] != "complete"
            words = f"killed {outcome['killed']} while {outcome['phase']}"
        outcomes.append(outcome)
        problems = "; ".join(outcome["problems"]) or "nothing lost"
        print(f"{engine} {done}/{kills}: {words}: {problems}", flush=True)
    return outcomes


def difference(folder: Path, alone: Path) -> str:
    """ "" when the two runs' curves are the same, bit for bit."""
    if (state := read_status(folder).get("state")) != "complete":
        return f"the run is {state}"
    ours, theirs = losses(folder), losses(alone)
    differ = [a[0] for a, b in zip(ours, theirs, strict=False) if a != b]
    if len(ours) != len(theirs) or differ:
        return f"{len(ours)} of {len(theirs)} steps, the first that differs: {differ[:1]}"
    return ""


def markdown(results: list[dict]) -> str:
    lines = ["| engine | ranks | kills | start | loading | step | saving | one rank | all | curves"]
    lines[0] += " equal bit for bit | lost or left |"
    lines.append("| --- " + "| ---: " * 10 + "|")
    total = ["all", "", *[0] * 9]
    for engine, (ranks, _) in RUNS.items():
        mine = [r for r in results if r["engine"] == engine and r["phase"] != "complete"]
        kills, ends = [r for r in mine if "killed" in r], [r for r in mine if "killed" not in r]
        if not kills:
            continue
        phases = Counter(r["phase"] for r in kills)
        one = sum(r["killed"] != "all" for r in kills)
        counts = [len(kills), *(phases[p] for p in PHASES), one, len(kills) - one]
        counts += [sum(not r["problems"] for r in ends), sum(bool(r["problems"]) for r in mine)]
        total[2:] = [a + b for a, b in zip(total[2:], counts, strict=True)]
        lines.append("| " + " | ".join(map(str, [engine, ranks, *counts])) + " |")
    lines.append("| " + " | ".join(map(str, total)) + " |")
    return "\n".join(lines) + "\n"


@command_line("fault_campaign")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="of all engines together")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of each run")
    parser.add_argument("--seed", default="1", help="of the moments and victims")
    parser.add_argument("--only", nargs="+", choices=tuple(RUNS), default=list(RUNS))
    parser.add_argument("--out", type=Path, default=Path("/tmp/faults"), metavar="DIR")
    parser.add_argument("--data", default=str(ROOT / "data" / "stdlib"), metavar="DIR")
    arguments = parser.parse_args(argv)
    check_flags(arguments, kills=(1, 10**6), steps=(4, 10**6))
    out, each = arguments.out.absolute(), -(-arguments.kills // len(arguments.only))
    flags = ["--data", str(Path(arguments.data).absolute())]
    results = []
    for engine in arguments.only:
        results += campaign(engine, each, arguments.steps, arguments.seed, out, flags)
        lost = sum(bool(r["problems"]) for r in results)
        kills = sum("killed" in r and r["phase"] != "complete" for r in results)
        counts = {"kills": kills, "lost": lost, "seed": arguments.seed}
        write_json(out / "result.json", counts | {"results": results})
        (out / "result.md").write_text(markdown(results))
    print(markdown(results))
    print(f"{kills} kills, {lost} times something lost, left or unequal")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
