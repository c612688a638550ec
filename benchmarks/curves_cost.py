"""What --tensorboard, --wandb ... cost a run: steps while the tools' processes run, and while they
are stopped, in turns, in one training.

    python benchmarks/curves_cost.py [--rounds 20 --block 20] --tensorboard --otlp ...

Takes parallel.train's flags and trains on one rank. It waits until every tool has its first steps,
then stops the tools' processes (SIGSTOP) and lets them go on again, a block of steps each; the
order changes from round to round. What gathered while they were stopped is written in the block
that follows, so a block with them has the work of two. Prints one JSON line: the median times of a
step, the ratio of blocks (with the tools over without them) with its quartiles and the 95 %
interval of its median, in wall time and in the trainer's own processor time, which a busy machine
disturbs less, and for each tool the processor seconds of its start, the milliseconds per
step after that, and the most memory in MB.
"""

import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402
import psutil  # noqa: E402

from models.bounds import check_flags  # noqa: E402
from models.errors import Parser, UsageError, command_line  # noqa: E402
from parallel.config import settings  # noqa: E402
from parallel.measure.steady_time import median_ci95  # noqa: E402
from parallel.record.reader import read_run  # noqa: E402
from parallel.record.sinks import WRITTEN  # noqa: E402
from parallel.record.sinks.follow import EVERY_S  # noqa: E402


def cpu_s(process: psutil.Process) -> float:
    """Processor seconds of a process and of what it started."""
    family = [process, *process.children(recursive=True)]
    return sum(sum(member.cpu_times()[:2]) for member in family)


def cpu_s_of(trainer: subprocess.Popen) -> float:
    """Processor seconds of the trainer alone."""
    return sum(psutil.Process(trainer.pid).cpu_times()[:2])


def rss_mb(process: psutil.Process) -> float:
    family = [process, *process.children(recursive=True)]
    return sum(member.memory_info().rss for member in family) / 1e6


def steps_so_far(folder: Path) -> int:
    path = folder / "steps.csv"
    return path.read_bytes().count(b"\n") - 1 if path.exists() else 0


def measure(folder: Path, trainer: subprocess.Popen, tools: list[str], rounds: int, block: int):
    """(steps before and after, with the tools, the trainer's processor seconds a step) of each
    block, and what each tool used."""

    def wait_for(step: int) -> int:
        while (done := steps_so_far(folder)) < step and trainer.poll() is None:
            time.sleep(0.002)
        if done < step:
            raise UsageError(f"the training ended after {done} steps")
        return done

    while not all(
        (path := folder / "curves" / tool / WRITTEN).exists() and "last_step" in path.read_text()
        for tool in tools
    ):
        wait_for(0)
        time.sleep(0.1)
    followers = {
        child.cmdline()[-1]: child
        for child in psutil.Process(trainer.pid).children()
        if child.cmdline()[-1] in tools
    }
    began, first = {tool: cpu_s(p) for tool, p in followers.items()}, steps_so_far(folder)
    blocks, at = [], first + 2
    for number in range(2 * rounds):
        running = (number + number // 2) % 2 == 0  # with, without, without, with ...
        for process in followers.values():
            for member in (process, *process.children(recursive=True)):
                member.send_signal(signal.SIGCONT if running else signal.SIGSTOP)
        start = wait_for(wait_for(at) + 2)  # the step in which it happened is of neither
        before = cpu_s_of(trainer)
        at = wait_for(start + block)
        blocks.append((start, at, running, (cpu_s_of(trainer) - before) / (at - start)))
    for process in followers.values():
        for member in (process, *process.children(recursive=True)):
            member.send_signal(signal.SIGCONT)
    wait_for(at + 1)
    time.sleep(3 * EVERY_S)
    used = {
        tool: {
            "start_cpu_s": round(began[tool], 2),
            "cpu_ms_per_step": round((cpu_s(p) - began[tool]) / (at - first) * 1e3, 3),
            "mb": round(rss_mb(p)),
        }
        for tool, p in followers.items()
    }
    return blocks, used


def ratio(of: dict[bool, list[float]]) -> dict[str, object]:
    """Blocks with the tools over blocks without them."""
    ratios = np.array(of[True]) / np.array(of[False])
    return {
        "median": round(float(np.median(ratios)), 4),
        "ci95": [round(end, 4) for end in median_ci95(ratios) or ()],
        "quartiles": np.quantile(ratios, (0.25, 0.75)).round(4).tolist(),
    }


@command_line("curves_cost")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python benchmarks/curves_cost.py", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="of a block with and one without")
    parser.add_argument("--block", type=int, default=20, help="optimizer steps of a block")
    settings.add_flags(parser)
    arguments = parser.parse_args(argv)
    check_flags(arguments, rounds=(1, 10**6), block=(2, 10**6))
    given = settings.from_flags(arguments) | {"steps": 10**6, "eval_steps": 0}
    tools = [tool for tool in settings.CURVES if given.get(tool)]
    if not tools:
        raise UsageError("say which tools: --tensorboard, --wandb ...")
    flags = []
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        flags += [flag] if value is True else [f"--no-{flag[2:]}"] if value is False else []
        flags += [] if isinstance(value, bool) else [flag, str(value)]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "run"
        command = [sys.executable, "-m", "parallel.train", *flags, "--out", str(folder)]
        trainer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        try:
            blocks, used = measure(folder, trainer, tools, arguments.rounds, arguments.block)
        finally:
            trainer.kill()
            trainer.wait()
        step_s = {row["step"]: row["step_s"] for row in read_run(folder).steps}
        time.sleep(2 * EVERY_S)  # the tools' processes end by themselves
    times, own = {True: [], False: []}, {True: [], False: []}
    for before, after, running, cpu in blocks:
        taken = [step_s[step] for step in range(before + 1, after + 1)]
        times[running].append(statistics.fmean(taken))
        own[running].append(cpu)
    found = {
        "tools": tools,
        "rounds": arguments.rounds,
        "block": arguments.block,
        "with_s": statistics.median(times[True]),
        "without_s": statistics.median(times[False]),
        "with_over_without": ratio(times),
        "trainer_cpu_with_over_without": ratio(own),
        "each": used,
    }
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
