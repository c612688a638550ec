"""Give the curves of runs to TensorBoard, Weights & Biases or MLflow, through each tool's library.

    python -m analysis.curves PATH... --to tensorboard|wandb|mlflow [--out DIR] [--follow]

PATH is a run folder, or a folder of them. The steps of steps.csv and the validation losses of
train.log go to DIR/TOOL; the settings of run.json become the run's config. `--follow` goes on while
the runs train, and ends when they have ended. The same command again writes only steps that are
new. docs/curves.md lists the tags and says how to look at them.

Exits 1 when the tool failed, 2 when nothing could be read.
"""

import importlib.util
import json
import re
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from analysis.logs.readers import run_folder
from analysis.logs.record import Record
from analysis.runs.curve_tools import TOOLS, Point, Sink, Tool
from analysis.runs.run_options import parser_of
from analysis.runs.throughput import tflops_per_gpu, utilisation
from base.errors import UsageError, command_line, printable, warn
from base.files import named_folder, read_json_if_whole
from base.storage import write_synced
from models.flops import DEFAULT_CONVENTION
from parallel.config.run_spec import settings_of
from parallel.record import schema
from parallel.record.ends import RUNNING
from parallel.record.reader import find_runs, read_facts

NAME = "analysis.curves"
EVERY_S = 5.0  # between two looks of --follow
_VALIDATION = re.compile(r" validation loss at iteration (\d+) \| lm loss value: (\S+) \|")


@command_line(NAME)
def main(argv: list[str] | None = None) -> int:
    """Writes the curves; returns 0 when the tool took those of every run."""
    parser = parser_of(NAME, __doc__, paths="run folder or folder")
    parser.add_argument("--to", choices=tuple(TOOLS), required=True, help="the tool")
    where = {"type": named_folder, "default": Path("curves"), "metavar": "DIR"}
    parser.add_argument("--out", **where, help="the folder of all tools (default: curves)")
    parser.add_argument("--follow", action="store_true", help="go on until the runs have ended")
    flags = parser.parse_args(argv)
    tool = TOOLS[flags.to]
    if missing := [name for name in tool.modules if importlib.util.find_spec(name) is None]:
        raise UsageError(
            f"--to {flags.to} needs {' and '.join(missing)}, not installed here:"
            f" pip install -c constraints.txt -e '.[{flags.to}]'"
        )
    store = flags.out / flags.to
    store.mkdir(parents=True, exist_ok=True)
    feeds, damaged, failed = [], [], False
    for folder in find_runs(flags.paths):
        try:
            feeds.append(Feed(tool, folder, store))
        except UsageError as error:
            damaged.append(str(error))
    if not feeds:
        raise UsageError("; ".join(damaged))
    warn(NAME, *damaged)
    while feeds:
        training = []
        for feed in feeds:
            try:
                if not feed.write(flags.follow):
                    training.append(feed)
            except UsageError as error:
                warn(NAME, str(error))
            except Exception as error:  # a tool's library raises what it likes
                reason = printable(f"{type(error).__name__}: {error}").partition("\n")[0]
                warn(NAME, f"{feed.folder}: {flags.to} failed: {reason}")
                failed = True
        feeds = training
        if feeds:
            time.sleep(EVERY_S)
    return int(failed)


class Feed:
    """One run on its way to a tool.

    STORE/KEY.json holds the last step that the tool has, and the id by which it knows the run. KEY
    holds the run's start: a run of the same name that began anew is another run.
    """

    def __init__(self, tool: Tool, folder: Path, store: Path):
        self.folder, self._tool, self._store = folder, tool, store
        facts = read_facts(folder)
        started = re.sub(r"\D", "", str(facts.get("started_utc")))
        key = f"{facts.get('study') or 'runs'}-{facts['run']}-{started}"
        self._files = store / re.sub(r"[^\w.+=-]+", "-", key)
        self._bookmark = store / f"{self._files.name}.json"
        self._progress = read_json_if_whole(self._bookmark) or {"last_step": 0, "ids": {}}
        self._sink: Sink | None = None

    def write(self, follow: bool) -> bool:
        """Gives the tool the steps that it does not have. Returns False where the run still trains
        and `follow` waits for more; else it closes the run in the tool, prints how many steps were
        written and returns True. Raises what the tool's library raises."""
        record = run_folder.read(self.folder)
        run, points = record.own, points_of(record)
        new = [point for point in points if point.step > self._progress["last_step"]]
        if new:
            if self._sink is None:
                study, config = run.facts.get("study") or "runs", config_of(run.facts)
                ids = self._progress["ids"]
                self._sink = self._tool.open(study, run.name, config, self._files, ids)
            self._sink.write(new)
            self._progress["last_step"] = new[-1].step
            write_synced(self._bookmark, json.dumps(self._progress) + "\n")
        if follow and run.state == RUNNING:
            return False
        if self._sink is not None:
            self._sink.close(run.state)
        old_steps = len(points) - len(new)
        line = f"{run.name}: {len(new)} steps written, {old_steps} were there: {self._store}"
        print(printable(line), flush=True)
        return True


def config_of(facts: dict[str, Any]) -> dict[str, int | float | str | bool]:
    """Returns what a tool shows of a run beside its curves: the settings, the model's sizes and
    where it ran, from run.json."""
    config = settings_of(facts) | (facts.get("model") or {}) | (facts.get("layout") or {})
    host, git = facts.get("host") or {}, facts.get("git") or {}
    config |= {"gpu": host.get("gpu"), "cpu": host.get("cpu"), "commit": git.get("commit")}
    config |= {f"version_{name}": value for name, value in (facts.get("versions") or {}).items()}
    return {key: value for key, value in config.items() if isinstance(value, int | float | str)}


def points_of(record: Record) -> list[Point]:
    """Returns a run's steps with the Unix times when they ended. Where an older version wrote none,
    the last step ended when status.json says that the run did, and each began its own seconds
    before. A value that is not known has no tag."""
    run = record.own
    log = run.path / schema.LOG
    text = log.read_text(errors="replace") if log.exists() else ""
    validation = {int(step): float(loss) for step, loss in _VALIDATION.findall(text)}
    points, end_s = [], time.time()
    if (ended_utc := run.status.get("time_utc")) and run.state != RUNNING:
        end_s = datetime.fromisoformat(ended_utc).timestamp()
    for row in reversed(run.steps):
        end_s = row.get("ended_unix_s") or end_s
        values = {
            "train/loss": row["loss"],
            "train/grad_norm": row["grad_norm"],
            "train/learning_rate": row["lr"],
            "train/skipped": row["skipped"],
            "val/loss": validation.get(row["step"]),
            "time/step_s": row["step_s"],
        }
        if run.facts["spec"]["precision"] == "fp16":
            values["train/loss_scale"] = row["loss_scale"]
        if row["step_s"] and row["tokens"]:
            rate = values["throughput/tokens_per_s"] = row["tokens"] / row["step_s"]
            tflops = tflops_per_gpu(record, rate, DEFAULT_CONVENTION).value
            values["throughput/tflops_per_gpu"] = tflops
            values["throughput/mfu"] = utilisation(record, tflops, DEFAULT_CONVENTION).value
        stated = {tag: float(value) for tag, value in values.items() if value is not None}
        points.append(Point(row["step"], end_s, stated))
        end_s -= row["step_s"] or 0.0
    return points[::-1]


if __name__ == "__main__":
    sys.exit(main())
