"""Made results of MLPerf: a tree of folders as a round of submissions has it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def line(time_ms: float, key: str, value: Any = None, **metadata: Any) -> str:
    """One of MLPerf's log lines."""
    about = {"file": "/workspace/llm/custom_callbacks.py", "lineno": 100} | metadata
    content = {"namespace": "", "time_ms": round(time_ms), "event_type": "POINT_IN_TIME"}
    return f":::MLLOG {json.dumps(content | {'key': key, 'value': value, 'metadata': about})}\n"


def result(
    benchmark: str,
    nodes: int,
    step_s: float,
    global_batch: int,
    *,
    each: int = 8,
    n_micro: int = 1,
    blocks: int = 24,
    block_steps: int = 12,
    step_key: str | None = "train_step_time",
    per_step: dict[str, Any] | None = None,
    status: str = "success",
    eval_s: float = 12.8,
    shift_ms: float = 0.0,
    noise: float = 0.001,
    ranks: int | None = None,
    counts_tokens: bool = False,
    **facts: Any,
) -> Iterator[str]:
    """The lines of one result: `blocks` of `block_steps` steps, an evaluation after each.

    step_key: the name of a step's time in tracked_stats; None: no step is timed. per_step: more of
    its values. counts_tokens: steps and evaluations are counted in tokens of sequences of 2048.
    noise: how much slower every third step is. facts: more keys before the run.
    """
    now, unit = 1.7e12 + shift_ms, 2048 if counts_tokens else 1
    for _ in range(nodes * each if ranks is None else ranks):
        yield line(now, "init_start")
    about = {"benchmark": benchmark, "org": "Made", "division": "closed", "status": "onprem"}
    for key, value in (about | {"platform": f"{nodes}xMade DGX H100"}).items():
        yield line(now, f"submission_{key}", value)
    facts = {"global_batch_size": global_batch, "gradient_accumulation_steps": n_micro} | facts
    for key, value in facts.items():
        yield line(now, key, value)
    now += 60_000
    yield line(now, "init_stop")
    yield line(now, "run_start")
    done = 0
    for _ in range(blocks):
        yield line(now, "block_start", samples_count=done)
        for i in range(block_steps):
            took = step_s * (1 + noise * (i % 3 == 0))
            now, done = now + 1000 * took, done + global_batch
            if step_key:
                stats = {step_key: took} | (per_step or {})
                yield line(now, "tracked_stats", stats, step=done * unit)
        counted = {"epoch_num": done * unit} if counts_tokens else {"samples_count": done}
        yield line(now, "block_stop", **({} if counts_tokens else counted))
        yield line(now, "eval_start", **counted)
        now += 1000 * eval_s
        yield line(now, "eval_accuracy", 2.7, **counted)
        yield line(now, "eval_stop", **counted)
    yield line(now, "run_stop", status=status)


def write(
    root: Path, submitter: str, system: str, benchmark: str, n: int, lines: Iterator[str]
) -> Path:
    """Write result n of a system into the tree; returns its path."""
    path = root / submitter / "results" / system / benchmark / f"result_{n}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))
    return path


def describe(
    root: Path, submitter: str, system: str, nodes: int, each: int = 8, card: str = "H100-SXM5-80GB"
) -> None:
    """Write the system's JSON."""
    path = root / submitter / "systems" / f"{system}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    said = {"number_of_nodes": str(nodes), "accelerators_per_node": str(each)}
    path.write_text(json.dumps(said | {"accelerator_model_name": f"NVIDIA {card}"}))


def configure(root: Path, submitter: str, benchmark: str, *names: str) -> None:
    """Write configurations of these names."""
    folder = root / submitter / "benchmarks" / benchmark / "implementations" / "nemo"
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
