"""Made results of MLPerf: a tree of folders as a round of submissions has it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def line(time_ms: float, key: str, value: Any = None, **metadata: Any) -> str:
    """One of MLPerf's log lines."""
    content = {"namespace": "", "time_ms": round(time_ms), "event_type": "POINT_IN_TIME"}
    return f":::MLLOG {json.dumps(content | {'key': key, 'value': value, 'metadata': metadata})}\n"


def result(benchmark: str = "gpt3", **how: Any) -> str:
    """The log of one result: see `_lines`."""
    return "".join(_lines(benchmark, **how))


def _lines(
    benchmark: str,
    *,
    nodes: int = 64,
    step_s: float = 11.0,
    batch: int = 2048,
    n_micro: int = 1,
    blocks: int = 24,
    block_steps: int = 12,
    step_key: str | None = "train_step_time",
    per_step: dict[str, Any] | None = None,
    status: str = "success",
    eval_s: float = 12.8,
    shift_ms: float = 0.0,
    tokens: bool = True,
) -> Iterator[str]:
    """`blocks` of `block_steps` steps, every third one slower by 0.1 %, an evaluation and half a
    second after each.

    step_key: the name of a step's time in tracked_stats; None: no step is timed. per_step: more of
    its values. tokens: steps and evaluations are counted in tokens of sequences of 2048.
    """
    now = 1.7e12 + shift_ms
    about = {"benchmark": benchmark, "org": "Made", "division": "closed", "status": "onprem"}
    for key, value in (about | {"platform": f"{nodes}xMade DGX H100"}).items():
        yield line(now, f"submission_{key}", value)
    yield line(now, "global_batch_size", batch)
    yield line(now, "gradient_accumulation_steps", n_micro)
    if tokens:
        yield line(now, "max_sequence_length", 2048)
    now += 60_000
    yield line(now, "run_start")
    done = 0
    for _ in range(blocks):
        yield line(now, "block_start", samples_count=done)
        for i in range(block_steps):
            took = step_s * (1 + 0.001 * (i % 3 == 0))
            now, done = now + 1000 * took, done + batch
            if step_key:
                stats = {step_key: took} | (per_step or {})
                yield line(now, "tracked_stats", stats, step=done * (2048 if tokens else 1))
        counted = {"epoch_num": done * 2048} if tokens else {"samples_count": done}
        yield line(now, "block_stop", **({} if tokens else counted))
        yield line(now, "eval_start", **counted)
        now += 1000 * eval_s
        yield line(now, "eval_accuracy", 2.7, **counted)
        yield line(now, "eval_stop", **counted)
        now += 500
    yield line(now, "run_stop", status=status)
    yield line(now + 9000, "tracked_stats", {"throughput": 1.0})


def write(
    root: Path, text: str, system: str = "made_n64", n: int = 0, benchmark: str = "gpt3"
) -> Path:
    """Write result n of a system into the tree; returns its path."""
    path = root / "Made" / "results" / system / benchmark / f"result_{n}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def describe(
    root: Path,
    system: str,
    nodes: int,
    each: int = 8,
    card: str = "NVIDIA H100-SXM5-80GB",
    submitter: str = "Made",
) -> None:
    """Write the system's JSON."""
    path = root / submitter / "systems" / f"{system}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = {"number_of_nodes": str(nodes), "accelerators_per_node": str(each)}
    path.write_text(json.dumps(sizes | {"accelerator_model_name": card}))
