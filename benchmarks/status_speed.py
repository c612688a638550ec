"""What slurm.status costs for a study of 2,000 runs: CPU seconds, memory, and calls of Slurm; and
what a round of slurm.submit --watch costs.

    python benchmarks/status_speed.py [--runs 2000] [--rounds 50]

It writes run folders of runs that are complete, run, failed and wait, a fifth of them each, and of
jobs that Slurm has forgotten, below a temporary folder, and puts a squeue and an sacct there that
print their jobs. slurm.status runs twice on a quarter of the runs and on all of them; the second
time is printed, since the first also writes down how the jobs ended. Memory is the most resident.
Then a watch of all runs makes its rounds and submits nothing, as with --at-most 1: the CPU seconds
of a round, and the resident memory after the second and after the last.
"""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from base.bounds import check_flags  # noqa: E402
from base.errors import Parser, command_line  # noqa: E402
from parallel.config.study import Study, load_study  # noqa: E402
from parallel.record.facts import planned  # noqa: E402
from slurm import states  # noqa: E402
from slurm.render import comment_of  # noqa: E402
from slurm.watch import Watch  # noqa: E402

STATES = ("COMPLETED", "RUNNING", "FAILED", "PENDING", "COMPLETED")
STATUS = ("complete", "running", "failed", "", "complete")
# The most that a process had resident since it was started: getrusage also counts its parent's.
RUN = "import sys; from slurm.status import main; code = main()"
RUN += "; print(*open('/proc/self/status')); sys.exit(code)"
HEADER = "step,step_s,loss,grad_norm,lr,loss_scale,skipped,tokens\n"


def study_of(top: Path, n: int) -> Study:
    """A study of n runs, with their folders and Slurm's answers below `top`."""
    path = top / f"runs{n}.toml"
    path.write_text(
        'question = "?"\ncluster = "local-test"\n[defaults]\npreset = "tiny"\ndevice = "cpu"\n'
        f"steps = 200\n[[sweep]]\nproduct = {{ engine = ['ddp'], seed = {list(range(n))} }}\n"
    )
    study, logs = load_study(path), top / "logs"
    comment, queue, accounts = comment_of(study, logs), [], []
    rows = "".join(f"{step},0.25,3.5,1.0,0.001,1.0,0,4096\n" for step in range(1, 201))
    for number, name in enumerate(study.runs):
        kind, job = number % len(STATES), 1000 + number
        folder = logs / study.name / name
        folder.mkdir(parents=True)
        facts = planned(study, name)
        (folder / f"{job}.submitted").write_text(json.dumps(facts))
        about = f"None|{name}|{comment}|{ROOT}"
        if kind < 4:
            queue.append(f"{job}|{STATES[kind]}|{256 if kind == 2 else 0}|{about}|1:00|")
        if STATUS[kind]:
            (folder / "run.json").write_text(
                json.dumps(facts | {"scheduler": {"job_id": str(job)}})
            )
            reason = "ValueError: x" if kind == 2 else ""
            status = {"state": STATUS[kind], "kind": "raised" if reason else "", "reason": reason}
            (folder / "status.json").write_text(json.dumps(status))
            (folder / "steps.csv").write_text(HEADER + rows)
            (folder / f"{job}.out").write_text("a line of a log\n" * 4000)
            accounts.append(f"{job}|{STATES[kind]}|{int(kind == 2)}:0|{about}|00:01:00")
        if STATUS[kind] == "complete":
            (folder / "RUN_COMPLETE.txt").write_text("complete\n")
    for tool, lines in (("squeue", queue), ("sacct", accounts)):
        (top / f"{tool}{n}").write_text("\n".join(lines) + "\n")
    return study


def cost(top: Path, study: Study, n: int) -> dict[str, float]:
    """CPU seconds and MiB of one slurm.status, and how often it called Slurm."""
    tools, calls = top / "bin", top / "calls"
    tools.mkdir(exist_ok=True)
    for tool in ("squeue", "sacct"):
        (tools / tool).write_text(f"#!/bin/sh\necho {tool} >>{calls}\nexec cat {top}/{tool}{n}\n")
        (tools / tool).chmod(0o755)
    calls.write_text("")
    environment = states.environment() | {"PATH": f"{tools}:{os.environ['PATH']}"}
    command = [sys.executable, "-c", RUN, str(study.path), "--logs", str(top / "logs")]
    child = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    most_kib = int(child.stdout.read().partition("VmHWM:")[2].split()[0])
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 1, f"slurm.status ended with {child.returncode}"  # runs failed
    seconds = used.ru_utime + used.ru_stime
    return {"cpu_s": seconds, "mib": most_kib / 1024, "calls": len(calls.read_text().split())}


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def watched(top: Path, study: Study, rounds: int) -> str:
    """The table's row of a watch's rounds, in this process."""
    flags = argparse.Namespace(
        logs=top / "logs", cluster=None, at_most=1, budget_gpu_hours=None, every=0
    )
    watch, mib = Watch([study], flags, None), []
    os.environ["PATH"] = f"{top / 'bin'}:{os.environ['PATH']}"
    before = time.process_time()
    for _ in range(rounds):
        with contextlib.redirect_stdout(io.StringIO()):
            watch.ask()
            assert watch.submit_what_may_start()
        mib.append(resident_mib())
    seconds = (time.process_time() - before) / rounds
    return f"| {len(study.runs)} | {rounds} | {seconds:.2f} | {mib[1]:.1f} | {mib[-1]:.1f} |"


@command_line("benchmarks/status_speed.py")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/status_speed.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--runs", type=int, default=2000, metavar="N", help="runs (default: 2000)")
    parser.add_argument("--rounds", type=int, default=50, metavar="N", help="of --watch (50)")
    flags = parser.parse_args(argv)
    check_flags(flags, runs=(20, 10_000), rounds=(2, 10_000))
    print("| runs | CPU s | MiB | calls of Slurm |\n| ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory(prefix="status-speed-") as top:
        for n in (flags.runs // 4, flags.runs):
            study = study_of(Path(top), n)
            cost(Path(top), study, n)
            line = cost(Path(top), study, n)
            print(f"| {n} | {line['cpu_s']:.2f} | {line['mib']:.0f} | {line['calls']} |")
        print("\n| runs | rounds | CPU s a round | MiB after 2 | MiB at last |")
        print("| ---: | ---: | ---: | ---: | ---: |")
        print(watched(Path(top), study, flags.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
