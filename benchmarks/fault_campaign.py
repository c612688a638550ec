"""Kill training at random moments, go on, and compare with a run that was left alone.

    python benchmarks/fault_campaign.py --kills 100 --out /tmp/faults
    python benchmarks/fault_campaign.py --kills 4 --only ddp --out /tmp/faults

For each engine a run of --steps steps that saves every other step. An attempt is killed (SIGKILL of
one rank, or of all and the launcher) at a random moment of a phase drawn by --seed: start, loading,
a step, saving. After each kill: every checkpoint that the log called saved and that retention keeps
is there and whole, no process and no listening port of the attempt is left. Then the same command
goes on. In the end losses, gradient norms and learning rates must equal those of the undisturbed
run, bit for bit. Prints one line per kill; counts go to <out>/result.json and result.md. Stopped,
it goes on where it was. Exit status 1 when anything was lost.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from parallel import saved  # noqa: E402
from parallel.artifacts import read_run, read_status, write_json  # noqa: E402

RUNS = {
    "ddp": (2, []),
    "deepspeed_zero": (2, ["--zero-stage", "2"]),
    "deepspeed_pipe": (2, ["--pp", "2"]),
    "megatron": (4, ["--tp", "2", "--pp", "2"]),
}
SMALL = ["--n-layer", "2", "--hidden", "64", "--n-head", "4", "--max-seq-len", "32"]
SMALL += ["--global-batch", "4", "--device", "cpu", "--eval-steps", "1", "--log-interval", "1"]
PHASES = ("start", "loading", "step", "saving")
EXITS_WITHIN_S = 90.0


def start(folder: Path, engine: str, steps: int, *flags: str) -> subprocess.Popen:
    ranks, split = RUNS[engine]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", "parallel.train", "--engine", engine, *split]
    command += [*SMALL, "--steps", str(steps), "--out", str(folder), *flags]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.console").open("ab") as console:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def log_of(folder: Path) -> str:
    path = folder / "train.log"
    return path.read_text(errors="replace") if path.exists() else ""


def phase_of(log: str) -> str:
    """What a log that ends here was in the middle of."""
    for line in reversed(log.splitlines()):
        if "successfully" in line or " iteration " in line and "elapsed" in line:
            return "step"
        if line.startswith(" saving checkpoint"):
            return "saving"
        if line.startswith(" loading checkpoint"):
            return "loading"
        if line.startswith("watchdog:"):
            return "start"
    return "start"


def wait_for_phase(process, folder: Path, seen: int, phase: str, chance: random.Random) -> str:
    """Wait until the attempt whose log begins at `seen` is in `phase`, or has passed it."""
    if phase == "start":
        time.sleep(chance.uniform(0.5, 6.0))
        return "start"
    signs = {"loading": " loading checkpoint", "step": "elapsed time", "saving": " saving checkp"}
    skip = chance.randrange(1, 12) if phase in ("step", "saving") else 1
    while process.poll() is None:
        log = log_of(folder)[seen:]
        if log.count(signs[phase]) >= skip:
            break
        if phase == "loading" and "elapsed time" in log:
            break  # there was nothing to load
        time.sleep(0.002)
    time.sleep(chance.uniform(0.0, 0.15 if phase == "step" else 0.08))
    return phase


def family(process: subprocess.Popen) -> list[psutil.Process]:
    try:
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def ports_of(processes: list[psutil.Process]) -> set[int]:
    found = set()
    for process in processes:
        try:
            found |= {c.laddr.port for c in process.net_connections("tcp") if c.status == "LISTEN"}
        except psutil.Error:
            continue
    return found


def listening() -> set[int]:
    return {c.laddr.port for c in psutil.net_connections("tcp") if c.status == "LISTEN"}


def alive(processes: list[psutil.Process]) -> list[int]:
    found = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def kill(process: subprocess.Popen, chance: random.Random) -> tuple[str, list, set[int]]:
    """SIGKILL one rank, or all of them and the launcher."""
    everyone = family(process)
    ports = ports_of(everyone)
    ranks = {}
    for child in everyone[1:]:
        try:
            if "parallel.train" in child.cmdline() and "RANK" in (env := child.environ()):
                ranks[int(env["RANK"])] = child
        except psutil.Error:
            continue
    if ranks and chance.random() < 0.5:
        victim = chance.choice(sorted(ranks))
        ranks[victim].kill()
        return f"rank {victim}", everyone, ports
    for member in everyone:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    return "all", everyone, ports


def newest_saved(log: str) -> int:
    found = re.findall(r"successfully saved checkpoint at iteration +(\d+)", log)
    return int(found[-1]) if found else 0


def losses(folder: Path) -> list[tuple]:
    return [(s["step"], s["loss"], s["grad_norm"], s["lr"]) for s in read_run(folder).steps]


def one_kill(folder: Path, engine: str, steps: int, number: int, seed: str, flags: list) -> dict:
    """Start (or go on with) the run, kill it once, and look what is left."""
    chance = random.Random(f"{seed}-{engine}-{number}")
    seen = len(log_of(folder))
    process = start(folder, engine, steps, *flags)
    wanted = chance.choice(PHASES)
    wait_for_phase(process, folder, seen, wanted, chance)
    whom, everyone, ports = kill(process, chance)
    problems = []
    try:
        status = process.wait(EXITS_WITHIN_S)
    except subprocess.TimeoutExpired:
        problems.append(f"the launcher did not end within {EXITS_WITHIN_S:g} s")
        os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
    log = log_of(folder)
    time.sleep(0.2)
    if left := alive(everyone):
        problems.append(f"processes left: {left}")
    if open_ports := ports & listening():
        problems.append(f"ports left: {sorted(open_ports)}")
    save = folder / "checkpoints"
    newest, there = newest_saved(log), saved.steps_in(save)
    if newest and (not there or there[-1] < newest):
        problems.append(f"step {newest} was saved, but there is {there}")
    for step in there:
        try:
            saved.verify(save / saved.name_of(step))
        except saved.Damaged as error:
            problems.append(str(error))
    return {
        "engine": engine,
        "number": number,
        "phase": phase_of(log[seen:]) if status else "complete",
        "killed": whom,
        "exit": status,
        "newest": there[-1] if there else 0,
        "problems": problems,
    }


def campaign(engine: str, kills: int, steps: int, seed: str, out: Path, flags: list) -> list[dict]:
    """All kills of one engine, then the end of the run and the comparison."""
    alone, folder, record = out / f"{engine}-alone", out / engine, out / f"{engine}.jsonl"
    if read_status(alone).get("state") != "complete":
        assert start(alone, engine, steps, *flags).wait() == 0, f"see {alone}.console"
    done = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    tries = len(done)
    done = [d for d in done if d["phase"] != "complete"]
    saving = ["--save-interval", "2", "--save-grace-s", "5", *flags]
    while len(done) < kills:
        if read_status(folder).get("state") == "complete":
            # All steps are done but not all kills: another run of the same, from the start.
            compare(engine, folder, alone)
            folder.rename(out / f"{engine}-{tries}")
        outcome = one_kill(folder, engine, steps, tries, seed, saving)
        tries += 1
        with record.open("a") as file:
            print(json.dumps(outcome), file=file)
        if outcome["phase"] != "complete":
            done.append(outcome)
        words = "; ".join(outcome["problems"]) or "nothing lost"
        print(
            f"{engine} {len(done)}/{kills}: killed {outcome['killed']} while {outcome['phase']},"
            f" newest checkpoint {outcome['newest']}: {words}",
            flush=True,
        )
    if read_status(folder).get("state") != "complete":
        if start(folder, engine, steps, *saving).wait() != 0:
            done.append({"engine": engine, "phase": "end", "problems": ["did not complete"]})
            return done
    if problem := compare(engine, folder, alone):
        done.append({"engine": engine, "phase": "end", "problems": [problem]})
    return done


def compare(engine: str, folder: Path, alone: Path) -> str:
    """ "" when the two runs' curves are the same, bit for bit."""
    ours, theirs = losses(folder), losses(alone)
    differ = [a[0] for a, b in zip(ours, theirs, strict=False) if a != b]
    problem = ""
    if len(ours) != len(theirs) or differ:
        problem = f"{len(ours)} of {len(theirs)} steps, the first that differs: {differ[:1]}"
    print(f"{engine}: the curve of {len(ours)} steps {problem or 'is the same bit for bit'}")
    return problem


def markdown(results: list[dict]) -> str:
    lines = ["| engine | ranks | kills | start | loading | step | saving | one rank | all | lost |"]
    lines.append("| --- " + "| ---: " * 9 + "|")
    for engine, (ranks, _) in RUNS.items():
        mine = [r for r in results if r["engine"] == engine and "killed" in r]
        if not mine:
            continue
        phases = Counter(r["phase"] for r in mine)
        one = sum(r["killed"] != "all" for r in mine)
        lost = sum(bool(r["problems"]) for r in results if r["engine"] == engine)
        cells = [engine, ranks, len(mine), *(phases[p] for p in PHASES), one, len(mine) - one, lost]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100, help="of all engines together")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of each run")
    parser.add_argument("--seed", default="1", help="of the moments and victims")
    parser.add_argument("--only", nargs="+", choices=tuple(RUNS), default=list(RUNS))
    parser.add_argument("--out", type=Path, default=Path("/tmp/faults"), metavar="DIR")
    parser.add_argument("--data", default=str(ROOT / "data" / "stdlib"), metavar="DIR")
    arguments = parser.parse_args(argv)
    out, each = arguments.out.absolute(), -(-arguments.kills // len(arguments.only))
    flags = ["--data", str(Path(arguments.data).absolute())]
    results = []
    for engine in arguments.only:
        results += campaign(engine, each, arguments.steps, arguments.seed, out, flags)
        lost = [r for r in results if r["problems"]]
        counts = {"kills": sum("killed" in r for r in results), "lost": len(lost)}
        write_json(out / "result.json", counts | {"seed": arguments.seed, "results": results})
        (out / "result.md").write_text(markdown(results))
    print(markdown(results))
    print(f"{counts['kills']} kills, {counts['lost']} with something lost or left")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
