"""How often a slow rank is named, how often one that is not, and what looking for it costs.

    python tests/tools/slow_rank_campaign.py [--ranks 2] [--trials 100] [--clean 300]
        [--blocks 200]
    MASTER_ADDR=127.0.0.1 srun --nodes 4 python tests/tools/slow_rank_campaign.py --ranks 4

One process group trains a small model with steps of tens of milliseconds. In a trial one rank,
drawn by chance, is slow for 20 steps: it computes 10, 20 or 50 % of its own computing again, or
its batches come later by 20 % of a step; or all ranks sleep 50 % of a step, as behind a slow link.
It is named when a line of the log would name it, and what it is slow in, within these steps.
Between trials nobody is slow, for at least 20 steps: a clean phase, in which any line is a false
alarm. Before them, phases of 20 steps take turns, with and without the measurement: its cost.
Prints Markdown tables.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402
import torch  # noqa: E402

from analysis.common.statistics import log_ratio  # noqa: E402
from analysis.common.table import Column, Table, show  # noqa: E402
from base.errors import Parser, command_line  # noqa: E402
from parallel import train, trainer  # noqa: E402

PHASE = 20
FLAGS = ["--engine", "ddp", "--preset", "tiny", "--device", "cpu", "--eval-steps", "0"]
FLAGS += ["--log-interval", "1000"]
KINDS = {f"compute {share:.0%}": ("compute", share) for share in (0.1, 0.2, 0.5)}
KINDS |= {"data 20%": ("data", 0.2), "link 50%": ("link", 0.5)}
COLUMNS = [Column("what", "slowed"), Column("n", "trials", "d"), Column("named", "named", "d")]
COLUMNS += [Column("share", "share", ".1%"), Column("others", "other lines", "d")]
COLUMNS += [Column("steps", "steps until named", ".0f"), Column("most", "at most", "d")]


def phases(ranks: int, trials: int, clean: int, blocks: int) -> list[tuple[str, int, int]]:
    """What happens to which rank for how many steps; every rank draws the same."""
    draw = random.Random(1)
    slow = [kind for kind, (what, _) in KINDS.items() for _ in range(_trials(what, trials))]
    draw.shuffle(slow)
    plan = [("warm-up", 0, 3 * PHASE), ("clean", 0, PHASE)]
    plan += [(what, 0, PHASE) for _ in range(blocks) for what in ("off", "on")]
    for kind in [*slow, *["clean"] * max(0, clean - len(slow))]:
        plan.append(("clean", 0, PHASE + draw.randrange(5)))
        if kind != "clean":
            plan.append((kind, draw.randrange(ranks), PHASE))
    return plan


def _trials(what: str, trials: int) -> int:
    return trials if what == "compute" else max(1, trials // 4)


class Phases(trainer.OwnTimes):
    """The measurement, with a run's ranks made slow as planned, and what it finds noted."""

    plan: list[tuple[str, int, int]] = []
    notes: list[dict[str, Any]] = []  # of each phase: what, rank, its verdicts, its steps' seconds
    is_first = False

    def __init__(self, layout, device, rank, gather):
        super().__init__(layout, device, rank, gather)
        self.rank, self.usual_s, self.owns = rank, 0.0, []
        self.ahead = iter(self.plan)
        Phases.is_first = rank == 0

    def begin(self) -> None:
        if not self.notes or len(self.notes[-1]["step_s"]) == self.notes[-1]["steps"]:
            self.next_phase()
        if self.notes[-1]["what"] == "off":
            return
        before = time.thread_time()
        super().begin()
        self.spent_s = time.thread_time() - before
        kind, share = self.slowed()
        if kind == "compute":
            until, ones = self._began + share * median(self.owns), torch.ones(64, 64)
            while time.thread_time() < until:
                torch.mm(ones, ones)
        elif kind == "link":
            time.sleep(share * self.usual_s)

    def slowed(self) -> tuple[str, float]:
        """What this rank is slow in now, and by which share."""
        phase = self.notes[-1]
        kind, share = KINDS.get(phase["what"], ("", 0.0))
        return (kind, share) if kind == "link" or phase["rank"] == self.rank else ("", 0.0)

    def next_phase(self) -> None:
        if self.notes and self.notes[-1]["what"] in ("clean", "warm-up"):
            self.usual_s = median(self.notes[-1]["step_s"])
        what, rank, steps = next(self.ahead)
        if what not in KINDS:  # a trial begins anywhere in a window
            self.judged()
            self._times = []
            if self._judge:
                self._judge.rows.clear()
        self.notes.append({"what": what, "rank": rank, "steps": steps, "verdicts": []})
        self.notes[-1] |= {"step_s": [], "spent_s": []}

    def lap(self, done, step_s, data_s):
        phase, found = self.notes[-1], ([], [])
        phase["step_s"].append(step_s)
        if phase["what"] != "off":
            before = time.thread_time()
            own_s = time.thread_time() - self._began
            found = super().lap(done, step_s, data_s)
            phase["spent_s"].append(time.thread_time() - before + self.spent_s)
            if phase["what"] == "clean":
                self.owns = [*self.owns[-40:], own_s]
        phase["verdicts"] += [(len(phase["step_s"]), verdict) for verdict in found[1]]
        return found


class SlowData(trainer.Trainer):
    """The loop, whose batches come late where a trial says so."""

    def _batches(self, made: Iterator) -> Iterator:
        def late() -> Iterator:
            kind, share = self.own_times.slowed()
            time.sleep(share * self.own_times.usual_s if kind == "data" else 0)
            yield from made

        return super()._batches(late())


def work(plan: list[tuple[str, int, int]], arguments: list[str]) -> None:
    """Train as one rank; rank 0 prints the tables."""
    Phases.plan, trainer.OwnTimes, trainer.Trainer = plan, Phases, SlowData
    with open(os.devnull, "w") as nothing:
        printed, sys.stdout = sys.stdout, nothing
        status = train.main(arguments)
        sys.stdout = printed
    if status == 0 and Phases.is_first:
        notes = Phases.notes
        show([table(notes), cost(notes)], "markdown")
    sys.stdout.flush()
    os._exit(status)


def table(notes: list[dict[str, Any]]) -> Table:
    rows = []
    for what in (*KINDS, "clean"):
        of = [phase for phase in notes if phase["what"] == what]
        kind, _ = KINDS.get(what, ("", 0))
        steps, others = [], 0
        for phase in of:
            right = [n for n, v in phase["verdicts"] if _names(v, kind, phase["rank"])]
            steps += right[:1]
            others += len(phase["verdicts"]) - len(right)
        named = len(steps) if kind else sum(bool(phase["verdicts"]) for phase in of)
        row = {"what": what, "n": len(of), "named": named, "share": named / max(1, len(of))}
        row |= {"steps": median(steps) if steps else None, "most": max(steps, default=None)}
        rows.append(row | {"others": others})
    false = Counter(v.kind for p in notes if p["what"] == "clean" for _, v in p["verdicts"])
    kinds = ", ".join(f"{n} {kind}" for kind, n in false.items()) or "none"
    title = "Slow ranks that were named"
    return Table(COLUMNS, rows, title, [f"clean: phases with a line; these lines: {kinds}"])


def _names(verdict: Any, kind: str, rank: int) -> bool:
    return verdict.kind == kind and (kind == "link" or verdict.rank == rank)


def cost(notes: list[dict[str, Any]]) -> Table:
    of = {what: [p for p in notes if p["what"] == what] for what in ("on", "off")}
    on, off = ([median(p["step_s"]) for p in of[what]] for what in ("on", "off"))
    ratio = np.exp(log_ratio(on, off, paired=True)) - 1
    spent = sum(sum(p["spent_s"]) for p in of["on"]) / sum(sum(p["step_s"]) for p in of["on"])
    row = {"turns": len(on), "step_ms": 1000 * median(off), "longer": ratio[0], "low": ratio[1]}
    columns = [Column("turns", "turns", "d"), Column("step_ms", "ms a step", ".1f")]
    columns += [Column("longer", "step longer by", ".2%"), Column("low", "lowest", ".2%")]
    columns += [Column("high", "highest", ".2%"), Column("spent", "CPU time in its calls", ".2%")]
    row |= {"high": ratio[2], "spent": spent}
    return Table(columns, [row], "Cost on rank 0 (95 % interval)")


@command_line("tests.tools.slow_rank_campaign")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python tests/tools/slow_rank_campaign.py", description=__doc__)
    parser.add_argument("--data", default="data/stdlib", help="token data of parallel.data")
    for name, default in (("ranks", 2), ("trials", 100), ("clean", 300), ("blocks", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    flags = parser.parse_args(argv)
    plan = phases(flags.ranks, flags.trials, flags.clean, flags.blocks)
    steps = sum(steps for *_, steps in plan)
    if "RANK" in os.environ or "SLURM_STEP_ID" in os.environ:
        out = os.environ.get(
            "STRAGGLERS_OUT", f"logs/runs/stragglers-{os.environ.get('SLURM_JOB_ID')}"
        )
        arguments = [*FLAGS, "--steps", str(steps), "--data", flags.data]
        work(plan, [*arguments, "--out", out])
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(flags.ranks), __file__, *(argv or sys.argv[1:])]
        environment = os.environ | {"STRAGGLERS_OUT": f"{folder}/run"}
        return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
