"""How fast analysis.scaling reads a round of MLPerf results: a made tree of 600 files.

    python benchmarks/mlperf_tree.py [--systems 60] [--repeats 10] [--folder DIR]

Half of the made systems pretrain GPT-3 and time each step, half tune Llama 2 with LoRA and time the
blocks between evaluations; all ranks print their lines before the run. The seconds depend on what
else the machine does, so those of its processors stand beside them.
"""

import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from base.bounds import check_flags
from base.errors import Parser, command_line

BAR_S = 10.0


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


def make_round(root: Path, systems: int, repeats: int) -> None:
    """A round of results: sizes from 8 to 512 GPUs, a few submitters, repeats of each system."""
    for i in range(systems):
        nodes, submitter = 2 ** (i % 7), f"Made{i // 14}"
        if i % 2:
            benchmark, batch = "llama2_70b_lora", 8 * nodes
            how = {"step_key": None, "blocks": 9, "block_steps": 48, "step_s": 0.5, "n_micro": 8}
            configure(root, submitter, benchmark, f"config_DGXH100_{nodes}x8x1xtp4pp1cp2.sh")
        else:
            benchmark, batch = "gpt3", 2048
            how = {"step_s": 700 / nodes, "counts_tokens": True, "max_sequence_length": 2048}
            how |= {"n_micro": 8192 // nodes}
            configure(root, submitter, benchmark, f"config_DGXH100_{nodes}x8x16x4x8_mbs1.sh")
        system = f"made_n{nodes}_{i // 14}"
        describe(root, submitter, system, nodes)
        for n in range(repeats):
            lines = result(benchmark, nodes, global_batch=batch, shift_ms=1e7 * n + i, **how)
            write(root, submitter, system, benchmark, n, lines)


@command_line("mlperf_tree")
def main(argv: list[str] | None = None) -> int:
    """Make the tree, read it, and say how long that took."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", type=int, default=60, help="systems and benchmarks")
    parser.add_argument("--repeats", type=int, default=10, help="results of each")
    parser.add_argument("--folder", type=Path, help="where to make the tree (a temporary folder)")
    given = parser.parse_args(argv)
    check_flags(given, systems=(1, 10_000), repeats=(1, 1000))
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        root = Path(folder) / "training_results_v0.0"
        make_round(root, given.systems, given.repeats)
        files = list(root.rglob("result_*.txt"))
        mb = sum(path.stat().st_size for path in files) / 1e6
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "analysis.scaling", str(root)]
        begun = time.perf_counter()
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[1]
        )
        took = time.perf_counter() - begun
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        said = f"{took:.1f} s, {cpu:.1f} s of processors; bar: {BAR_S:.0f} s on 2 cores"
        print(f"{len(files)} files of {mb:.0f} MB: {said}")
        shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
