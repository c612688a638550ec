"""Resume in the same layout, in others and in other engines; compare with runs that never stopped.

    python tests/tools/resume.py --out /tmp/resume

Every run has preset tiny in fp32 and 20 steps; torchrun starts it. First, in each engine, one run
takes 20 steps. Another takes 10, is killed (SIGKILL of all its processes) and takes 10 more by the
same command. Losses, norms, learning rates and the last checkpoint (weights, both moments, random
states) must be equal bit for bit. Then the checkpoint that megatron saved after 10 steps at tp 2,
pp 2, dp 2 is resumed in other layouts and engines, and from engine to engine and back. Losses and
norms must stay within the parity bars of the run that never stopped. Prints Markdown, also to
<out>/result.md. Exit status 1 when a bar is missed. If it was stopped, the same command resumes it.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from analysis.measured.loss_parity import GRAD_NORM_BAR, LOSS_BAR  # noqa: E402
from base.errors import Parser, command_line  # noqa: E402
from parallel.checkpoint import folders  # noqa: E402
from parallel.record.reader import read_run, read_status  # noqa: E402
from tests.tools.fault_campaign import MARK, RUNS, difference, family, kill  # noqa: E402

STEPS, HALF = 20, 10
BASE = ["--preset", "tiny", "--steps", str(STEPS), "--global-batch", "16", "--micro-batch", "2"]
BASE += ["--lr", "1e-3", "--min-lr", "1e-4", "--warmup-steps", "5", "--device", "cpu"]
BASE += ["--log-interval", "1", "--eval-steps", "0", "--keep-last", "0"]

SOURCE = ("megatron tp2 pp2 dp2", 8, ["--engine", "megatron", "--tp", "2", "--pp", "2"])
ZERO_3 = ["--engine", "deepspeed_zero", "--zero-stage", "3"]
# Name, the run whose checkpoint it loads, the step of that checkpoint, ranks, flags.
TARGETS = [
    (
        "megatron tp2 pp2 dp1",
        SOURCE[0],
        HALF,
        4,
        ["--engine", "megatron", "--tp", "2", "--pp", "2"],
    ),
    ("megatron tp1 pp4", SOURCE[0], HALF, 4, ["--engine", "megatron", "--pp", "4"]),
    ("megatron tp4", SOURCE[0], HALF, 4, ["--engine", "megatron", "--tp", "4"]),
    ("ddp dp8", SOURCE[0], HALF, 8, ["--engine", "ddp"]),
    ("ddp, one process", SOURCE[0], HALF, 1, ["--engine", "ddp"]),
    ("deepspeed_zero zero 3 dp4", SOURCE[0], HALF, 4, ZERO_3),
    ("deepspeed_pipe pp2 dp2", SOURCE[0], HALF, 4, ["--engine", "deepspeed_pipe", "--pp", "2"]),
    ("ddp dp2", "deepspeed_pipe pp2 dp2", 13, 2, ["--engine", "ddp"]),
    ("megatron pp2 vpp2", "ddp dp2", 16, 2, ["--engine", "megatron", "--pp", "2", "--vpp", "2"]),
]


def train(folder: Path, ranks: int, flags: list[str], kill_after: int | None = None) -> None:
    """One attempt of a run; with `kill_after`, all of it is killed when that step is saved."""
    if read_status(folder).get("state") == "complete":
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", "parallel.train", *BASE, *flags]
    mark, log = f"{os.getpid()}-{time.time_ns()}", folder / "train.log"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.console").open("ab") as console:
        process = subprocess.Popen(
            [*command, "--out", str(folder)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
        )
        if kill_after is not None:
            said = f"successfully saved checkpoint at iteration {kill_after:7d}"
            while process.poll() is None and not (log.exists() and said in log.read_text()):
                time.sleep(0.01)
            kill(family(mark))
        if process.wait() != 0 and kill_after is None:
            raise SystemExit(f"{folder.name} failed: see {folder}.console")


def holds(folder: Path) -> list[tuple]:
    """The checksums of the last checkpoint's files."""
    manifest = folders.verify(folder / "checkpoints" / folders.name_of(STEPS))
    return [(entry["path"], entry["bytes"], entry["crc32"]) for entry in manifest["files"]]


def same_layout(out: Path, data: list[str]) -> list[list[str]]:
    rows = []
    for engine, (ranks, split) in RUNS.items():
        straight, killed = out / f"{engine}-straight", out / f"{engine}-killed"
        flags = ["--engine", engine, *split, "--save-interval", str(HALF), *data]
        train(straight, ranks, flags)
        if not folders.steps_in(killed / "checkpoints"):
            train(killed, ranks, flags, kill_after=HALF)
        train(killed, ranks, flags)
        run = read_run(killed)
        problem = difference(killed, straight)
        if not problem and holds(killed) != holds(straight):
            problem = "the last checkpoints differ"
        if not run.facts.get("attempts"):
            problem = "it was not killed"
        words = " ".join(split).replace("--", "") or f"dp {ranks}"
        rows.append([engine, words, str(ranks), str(len(run.steps)), problem or "bit for bit"])
        print(*rows[-1], sep=" | ", flush=True)
    return rows


def reshaped(out: Path, data: list[str]) -> list[list[str]]:
    def folder(name: str) -> Path:
        return out / name.replace(",", "").replace(" ", "-")

    name, ranks, flags = SOURCE
    train(folder(name), ranks, [*flags, "--save-interval", str(HALF), *data])
    straight, rows = read_run(folder(name)).steps, []
    for name, source, step, ranks, flags in TARGETS:
        load = folder(source) / "checkpoints" / folders.name_of(step)
        saving = ["--save-interval", str(step + 3), "--load", str(load)]
        train(folder(name), ranks, [*flags, *saving, *data])
        steps = read_run(folder(name)).steps
        pairs = list(zip(steps, straight[step:], strict=True))
        loss = max(abs(a["loss"] - b["loss"]) for a, b in pairs)
        norm = max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in pairs)
        good = loss <= LOSS_BAR and norm <= GRAD_NORM_BAR
        numbers = [f"{step + 1} to {STEPS}", f"{loss:.1e}", f"{norm:.1e}"]
        rows.append([source, name, *numbers, "equal" if good else "DIFFERS"])
        print(*rows[-1], sep=" | ", flush=True)
    return rows


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


@command_line("resume")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("/tmp/resume"), metavar="DIR")
    parser.add_argument("--data", default=str(ROOT / "data" / "stdlib"), metavar="DIR")
    arguments = parser.parse_args(argv)
    out, data = arguments.out.absolute(), ["--data", str(Path(arguments.data).absolute())]
    same, other = same_layout(out, data), reshaped(out, data)
    text = table(["engine", "split", "ranks", "steps", "10 + kill + 10 is 20 straight"], same)
    header = ["saved by", "gone on by", "steps", "max loss diff", "max norm diff (rel)", "verdict"]
    text += "\n" + table(header, other)
    (out / "result.md").write_text(text)
    print("\n" + text, end="")
    wrong = [row for row in same + other if row[-1] not in ("bit for bit", "equal")]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
