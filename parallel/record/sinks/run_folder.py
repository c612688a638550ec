"""The points of a run folder, as they come: from steps.csv and the lines of train.log. Torch-free.

A point is given out when the next step is there or the run has ended: then all lines about it
stand in the log.
"""

import csv
import re
from pathlib import Path
from typing import Any

from models.config import GPTConfig
from models.flops import DEFAULT_CONVENTION, tflops_per_gpu
from models.gpus import mfu
from parallel.config.settings import gemm_precision
from parallel.record import schema
from parallel.record.sinks import Described, Point, step_values

# What lines.py writes.
_MEMORY = re.compile(r" iteration +(\d+)/.*\| max memory \(GB\): ([\d.]+) \|")
_VALIDATION = re.compile(r" validation loss at iteration (\d+) \| lm loss value: (\S+) \|")


def described(facts: dict[str, Any]) -> Described:
    """A run as run.json describes it: its settings, and what follows from them."""
    layout, host, git = (facts.get(part) or {} for part in ("layout", "host", "git"))
    config = (facts.get("spec") or {}) | (facts.get("model") or {})
    config |= {name: layout.get(name) for name in ("dp", "world_size", "n_micro")}
    config |= {
        "gpu": host.get("gpu"),
        "cpu": host.get("cpu"),
        "hostname": host.get("hostname"),
        "commit": git.get("commit"),
        "started_utc": facts.get("started_utc"),
    }
    config |= {f"version_{k}": v for k, v in (facts.get("versions") or {}).items()}
    known = {name: value for name, value in config.items() if value is not None}
    return Described(facts["run"], facts.get("study") or "runs", known)


class Tail:
    """The whole lines that were added to a growing file since the last look."""

    def __init__(self, path: Path):
        self._path, self._at = path, 0

    def lines(self) -> list[str]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                added = file.read()
        except FileNotFoundError:
            return []
        whole = added[: added.rfind(b"\n") + 1]
        self._at += len(whole)
        return whole.decode(errors="replace").splitlines()


class Source:
    """A run folder that may still grow. facts: its run.json."""

    def __init__(self, path: Path, facts: dict[str, Any]):
        self._facts = facts
        self._steps, self._log = Tail(path / schema.STEPS), Tail(path / schema.LOG)
        self._open: dict[int, dict[str, float]] = {}  # steps that are not given out yet
        self._said: dict[int, dict[str, float]] = {}  # what the log says of steps
        sizes = facts["model"].items()
        self._model = GPTConfig(**{k: v for k, v in sizes if k in GPTConfig.__dataclass_fields__})

    def new(self, ended: bool) -> list[Point]:
        """The steps that are complete since the last look, without their times (0.0); with `ended`
        all that are left."""
        for cells in csv.reader(self._steps.lines()):
            if cells != list(schema.STEP_COLUMNS):
                row = dict(zip(schema.STEP_COLUMNS, cells, strict=True))
                self._open[int(row["step"])] = self._values(row)
        for line in self._log.lines():  # read after the steps: it has the lines about each
            for pattern, tag in ((_MEMORY, "memory/peak_gb"), (_VALIDATION, "val/loss")):
                if said := pattern.search(line):
                    self._said.setdefault(int(said[1]), {})[tag] = float(said[2])
        last = max(self._open, default=0)
        done = sorted(step for step in self._open if ended or step < last)
        return [Point(step, 0.0, self._open.pop(step) | self._said.pop(step, {})) for step in done]

    def _values(self, row: dict[str, str]) -> dict[str, float]:
        known = {name: float(text) for name, text in row.items() if text != ""}
        spec, gpus = self._facts["spec"], self._facts["layout"]["world_size"]
        step_s, tokens = known.get("step_s"), known.get("tokens")
        rate = tflops = share = None
        if step_s and tokens:
            rate = tokens / step_s
            tflops = tflops_per_gpu(self._model, spec["seq_len"], tokens, step_s, gpus)
            precision = gemm_precision(spec["precision"], spec.get("tf32"))
            gpu = self._facts["host"].get("gpu")
            share, _ = mfu(tflops, gpu, precision, DEFAULT_CONVENTION)
        return step_values(
            step_s=step_s,
            tokens_per_s=rate,
            gpus=gpus,
            tflops=tflops,
            mfu=share,
            loss=known.get("loss"),
            grad_norm=known.get("grad_norm"),
            learning_rate=known.get("lr"),
            loss_scale=known.get("loss_scale") if spec["precision"] == "fp16" else None,
            skipped=known.get("skipped"),
        )
