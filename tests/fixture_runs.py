"""Small run folders for tests, written by RunFolder as those of real runs are."""

import csv
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from analysis.common.table import Table
from analysis.logs.load import load
from analysis.logs.record import STEP, Record, steps_table
from analysis.pages.section import Chart
from analysis.runs import run_table, scaling_curve
from analysis.runs.fairness import Terms
from models.config import GPTConfig
from parallel.config.resolve import resolve
from parallel.record.ends import kind_of
from parallel.record.writer import RunFolder

TINY = GPTConfig(n_layer=4, hidden=64, n_head=4, vocab_size=257, max_seq_len=64)


def logged(source: str = "x.log", n: int = 40, **known: Any) -> Record:
    """A log of `n` steps of one second; known: columns of its steps and fields of its record."""
    columns = {"iteration": np.arange(1.0, n + 1), "step_s": np.ones(n)}
    columns |= {name: known.pop(name) for name in STEP.names if name in known}
    return Record(source, "test", steps=steps_table(**columns), **known)


def facts(study: str, baseline: str | None, cores: int = 8, **settings: Any) -> dict[str, Any]:
    """run.json of a run with these settings, as the trainer writes it."""
    shape = {k: v for k, v in TINY.as_dict().items() if not k.startswith("rope")}  # it learns them
    defaults = shape | {"steps": 20, "global_batch": 16, "device": "cpu"}
    spec = resolve(("test", defaults | settings))
    layout = spec.layout
    return {
        "schema_version": "1",
        "study": study,
        "run": spec.name,
        "baseline": baseline,
        **spec.as_facts(),
        "model": spec.model.as_dict() | {"n_params": spec.model.n_params},
        "data": {"sha256": "d" * 64},
        "host": {"cores": cores, "gpu": None, "ranks_per_node": layout.world_size},
        "git": {"commit": "c" * 40, "dirty": False},
    }


def losses(n: int = 20) -> list[float]:
    """A plausible loss curve that starts at ln(vocab)."""
    return [math.log(TINY.vocab_size) - 0.05 * step for step in range(n)]


def write(
    root: Path,
    about: dict[str, Any],
    step_s: float = 0.5,
    loss: list[float] | None = None,
    grad_norm: list[float] | None = None,
    fail: str = "",
) -> Path:
    """Write one run folder below `root`. With `fail`, the run failed after its steps for that
    reason."""
    path = root / about["run"]
    folder = RunFolder(path)
    folder.begin(about)
    loss = losses() if loss is None else loss
    grad_norm = [1.5 - 0.01 * i for i in range(len(loss))] if grad_norm is None else grad_norm
    spec = about["spec"]
    row = {"lr": spec["lr"], "loss_scale": 1.0, "skipped": 0, "expert_load": 1.5}
    row["tokens"] = about["layout"]["global_batch"] * spec["seq_len"]
    for i, values in enumerate(zip(loss, grad_norm, strict=True)):
        seconds = 10 * step_s if i == 0 else step_s * (1 + 0.001 * (i % 3))
        row |= {"step": i + 1, "step_s": seconds}
        folder.step(row | dict(zip(("loss", "grad_norm"), values, strict=True)))
    if fail:
        folder.fail(kind_of(fail), fail, 0)
        folder.close()  # a failing process would end here and release the lock
    else:
        folder.complete({"schema_version": "2.0"}, "complete")
    return path


def edit(path: Path, **values: Any) -> None:
    """Give keys of a JSON file other values."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edit_steps(folder: Path, change: Callable[[list[dict]], Iterable[dict]]) -> None:
    """Let steps.csv have the rows that `change` makes of its own."""
    path = folder / "steps.csv"
    rows = list(csv.DictReader(path.read_text().splitlines()))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(change(rows))


def table_of(folder: Path) -> Table:
    """The table of the runs at a folder."""
    return run_table.of_records(load([folder])[0])


def curve_of(folder: Path, baseline: str | None = None) -> Table:
    """The scaling curve of the runs at a folder."""
    return scaling_curve.report_of(*load([folder]), Terms(baseline))


def drawn_rows(chart: Chart, layer: int = 0) -> list[dict[str, Any]]:
    """The rows that a layer of a chart draws."""
    return chart.spec["layer"][layer].get("data", chart.spec.get("data"))["values"]
