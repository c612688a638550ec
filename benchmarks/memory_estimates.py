"""Our formulas of memory beside those of others, and beside the bytes that engines allocate here.

    python benchmarks/memory_estimates.py [--out FILE.md]

Prints Markdown tables: model states by ZeRO stage and offload beside DeepSpeed's own estimators;
weights, optimizer and activations beside Megatron-LM's closed formula; activations beside the
published ones of Korthikanti et al.; the peaks that CPU runs of logs/ recorded; and, for every
engine, the bytes of all tensors that two ranks of a small GPT in fp32 hold after a backward pass or
an update, whichever is more, beside `memory.states`. For this, DeepSpeed's buckets are made
small: by default each is allocated with 5e8 elements, far more than a small model has.
"""

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402

from analysis.common.table import Column, Table, writing  # noqa: E402
from analysis.logs.load import load, name_of  # noqa: E402
from analysis.logs.published_csv import column_name, read_csv  # noqa: E402
from analysis.planner.runs import settings_of  # noqa: E402
from base.errors import Parser, UsageError, command_line  # noqa: E402
from models.config import PRESETS, GPTConfig  # noqa: E402
from parallel.config import memory  # noqa: E402
from parallel.config.layout import OFFLOAD, RECOMPUTE  # noqa: E402
from parallel.config.layout_arrays import Columns, columns, columns_of  # noqa: E402
from parallel.config.settings import RunSpec, resolve  # noqa: E402
from parallel.record.reader import read_run  # noqa: E402

KORTHIKANTI = ROOT / "logs" / "published" / "korthikanti22_fig7_activation_pct.csv"
PEAKS = [ROOT / "logs" / "2-core-cpu" / name for name in ("parity", "2-core-gpt2-124m-fp32")]
# Its biases, norms and positions, which the formulas leave out, are 2 % of it.
SMALL = {"n_layer": 4, "hidden": 256, "n_head": 4, "vocab_size": 512, "max_seq_len": 32}
# Settings of two-rank runs: every engine, every ZeRO stage, tp and pp. A pipeline has one
# micro-batch, so that after the backward pass no other micro-batch has activations.
HELD = (
    {"engine": "ddp"},
    {"engine": "fsdp2", "zero_stage": 3},
    {"engine": "deepspeed_zero", "zero_stage": 1},
    {"engine": "deepspeed_zero", "zero_stage": 2},
    {"engine": "deepspeed_zero", "zero_stage": 3},
    {"engine": "deepspeed_pipe", "pp": 2, "global_batch": 1},
    {"engine": "deepspeed_pipe", "zero_stage": 1},
    {"engine": "megatron", "zero_stage": 1},
    {"engine": "megatron", "tp": 2},
    {"engine": "megatron", "pp": 2, "global_batch": 1},
)


def compared(ours: float, theirs: float) -> dict[str, float]:
    """Two sizes in bytes as cells of a row: GB of 2^30, and ours over theirs, minus one."""
    return {"ours": ours / memory.GB, "theirs": theirs / memory.GB, "error": ours / theirs - 1}


def deepspeed_states(
    config: GPTConfig = PRESETS["7.5b"], nodes: int = 8, per_node: int = 8
) -> Table:
    """Model states of a GPU in fp16, beside DeepSpeed's estimators, which know ZeRO 2 and 3."""
    from parallel.engines import deepspeed_common  # noqa: F401  (before deepspeed: it sets the accelerator)

    from deepspeed.runtime.zero.stage3 import (  # isort: skip
        estimate_zero3_model_states_mem_needs as stage3,
    )
    from deepspeed.runtime.zero.stage_1_and_2 import (  # isort: skip
        estimate_zero2_model_states_mem_needs as stage2,
    )

    n = config.n_params
    largest = config.vocab_size * config.hidden  # the word embedding
    rows = []
    for stage in range(4):
        for offload in range(3 if stage == 3 else 2 if stage else 1):
            x = columns(
                config, dp=nodes * per_node, zero_stage=stage, offload=offload, deepspeed=True
            )
            ours = {k: float(v[0]) for k, v in memory.states(x, n * np.ones(1)).items()}
            theirs, why = None, "no estimator"
            if stage == 2:
                _, theirs = stage2(n, per_node, nodes, cpu_offload=offload > 0)
                why = "ours adds a tenth of the fp16 gradients, on their way out" * (offload > 0)
            elif stage == 3:
                _, theirs, _ = stage3(
                    n, largest, per_node, nodes, offload > 0, offload == 2, zero_init=True
                )
                why = (
                    "gathered weights: ours up to stage3_max_live_parameters (1e9), theirs the"
                    " largest layer"
                )
            row = compared(sum(ours.values()), theirs) if theirs else {}
            row |= {"ours": sum(ours.values()) / memory.GB, "why": why}
            rows.append({"stage": stage, "offload": OFFLOAD[offload]} | row)
    return Table(
        [
            Column("stage", "ZeRO", "d"),
            Column("offload", "offload"),
            Column("ours", "ours GB", ".2f"),
            Column("theirs", "DeepSpeed's GB", ".2f"),
            Column("error", "difference", "+.1%"),
            Column("why", "because"),
        ],
        rows,
        f"Model states of a GPU, {n / 1e9:.1f}B parameters in fp16 on {nodes} nodes of {per_node}",
    )


def megatron_bytes(config: GPTConfig, x: Columns) -> tuple[float, float]:
    """(weights and optimizer, activations) by Megatron-LM's closed formula, in bytes.

    megatron/training/theoretical_memory_usage.py of NVIDIA/Megatron-LM (not in megatron-core's
    wheel): 18 bytes a parameter, or 6 + 12 / dp with the distributed optimizer, of the first stage
    with its embedding; s b (18 h + 4 f) a layer with sequence parallelism and selective
    recomputation, and on the first stage the tokens and the embedding's dropout mask.
    """
    h, f, V, s = config.hidden, config.ffn_hidden, config.vocab_size, int(x.seq[0])
    b, tp, pp, vpp = (int(getattr(x, k)[0]) for k in ("micro_batch", "tp", "pp", "vpp"))
    layer = 4 * h * h + 2 * h * (f + 2)
    parameters = ((config.n_layer * layer + 2 * h) / pp + V * h) / tp
    per_parameter = 6 + 12 / int(x.dp[0]) if x.zero_stage[0] == 1 else 18
    kept = s * b * (18 * h + 4 * f) * config.n_layer + pp * s * b * (8 + h)
    if vpp > 1:
        kept *= 1 + (pp - 1) / (pp * vpp)
    elif pp > 1:
        kept *= min(1, int(x.n_micro[0]) / pp)
    if pp == 1:
        kept += 4 * s * b * (h + V)
    return parameters * per_parameter, kept / tp


# (preset, tp, pp, vpp, dp, micro-batch, micro-batches): of SC'21's and Korthikanti's tables.
LAYOUTS = (
    ("1.7b", 1, 1, 1, 32, 4, 4),
    ("18b", 8, 1, 1, 32, 4, 8),
    ("175b", 8, 8, 3, 1, 1, 64),
    ("530b", 8, 35, 3, 1, 1, 280),
    ("1t", 8, 64, 1, 6, 1, 512),
)


def megatron_parts() -> Table:
    """States and activations of the first stage, beside Megatron-LM's closed formula."""
    rows = []
    for name, tp, pp, vpp, dp, micro_batch, n_micro in LAYOUTS:
        config = PRESETS[name]
        sizes = {"tp": tp, "pp": pp, "vpp": vpp, "dp": dp, "micro_batch": micro_batch}
        x = columns(
            config,
            positions=0,  # which theirs leaves out
            **sizes,
            n_micro=n_micro,
            zero_stage=int(dp > 1),
            recompute=RECOMPUTE.index("selective"),
            sequence_parallel=tp > 1,
            grad_width=4,
        )
        parts = {k: float(np.ravel(v)[0]) for k, v in memory.parts(x, "first").items()}
        parts["activations"] /= memory.CONSTANTS["fragments"]  # of an allocator, in no formula
        parts["logits"] /= memory.CONSTANTS["fragments"]
        states, kept = megatron_bytes(config, x)
        held = sum(parts[k] for k in ("weights", "gradients", "optimizer"))
        layout = {"model": name} | sizes
        rows.append(layout | {"part": "states"} | compared(held, states))
        ours = parts["activations"] + parts["logits"]
        rows.append(layout | {"part": "activations"} | compared(ours, kept))
    return Table(
        [
            Column("model", "model"),
            *(Column(k, k, "d") for k in ("tp", "pp", "vpp", "dp")),
            Column("micro_batch", "mbs", "d"),
            Column("part", "part"),
            Column("ours", "ours GB", ".2f"),
            Column("theirs", "Megatron-LM's GB", ".2f"),
            Column("error", "difference", "+.1%"),
        ],
        rows,
        "First pipeline stage in bf16, sequence-parallel, selective recomputation",
        [
            "activations at pp 1: a logit takes 8 bytes in ours (in bf16, in fp32, and its"
            " gradient), 4 in theirs",
            "at pp > 1 ours leaves out the tokens and the embedding's dropout mask",
        ],
    )


def korthikanti() -> Table:
    """Activations of a layer at tp 8 as shares of those that keep all: published, and ours."""
    shapes = {"22B": (6144, 64), "175B": (12288, 96), "530B": (20480, 128), "1T": (25600, 160)}
    cases = {
        "seq_parallel": (0, True),
        "selective": (1, False),
        "seq_and_selective": (1, True),
        "full_recompute": (2, False),
    }
    published = {row.text("model"): row for row in read_csv(KORTHIKANTI, ("model",)).rows}
    rows = []
    for model, (hidden, heads) in shapes.items():
        given = {"hidden": hidden, "heads": heads, "layers": 1, "vocab": 51200, "seq": 2048}
        whole = memory.kept_per_layer(columns(**given, tp=8))
        for case, (recompute, sequence_parallel) in cases.items():
            x = columns(**given, tp=8, recompute=recompute, sequence_parallel=sequence_parallel)
            ours = float((memory.kept_per_layer(x) / whole)[0])
            theirs = published[model].number(column_name(case)) / 100
            rows.append(
                {
                    "model": model,
                    "case": case.replace("_", " "),
                    "ours": ours,
                    "theirs": theirs,
                    "error": ours / theirs - 1,
                }
            )
    return Table(
        [
            Column("model", "model"),
            Column("case", "kept"),
            Column("ours", "ours", ".2%"),
            Column("theirs", "published", ".2%"),
            Column("error", "difference", "+.1%"),
        ],
        rows,
        "Activations of a layer at tp 8, of those kept without any (arXiv 2205.05198, figure 7)",
    )


def spec_of(settings: dict[str, Any]) -> RunSpec:
    """A two-rank run of the small model."""
    usual = {"gpus": 2, "device": "cpu", "kernels": "torch", "global_batch": 4, "micro_batch": 1}
    return resolve(("benchmark", SMALL | usual | settings))


def expected(spec: RunSpec, rank: int) -> float:
    """Bytes of weights, gradients and optimizer that a rank holds by `memory.states`.

    Gathered layers are gone when a backward pass has ended.
    """
    x = columns_of(spec)
    first, _, last = memory.stage_layers(x)
    layers = last if spec.layout.coords(rank)["pp"] == spec.layout.pp - 1 else first
    n = memory.params(x, layers, True)
    states = {k: float(v[0]) for k, v in memory.states(x, n).items()}
    return sum(states.values()) - float(memory.gathered(x, n)[0])


def storages(known: set[int] | None = None) -> dict[int, int]:
    """Bytes by address of every tensor's memory that is alive, those of `known` left out."""
    import torch

    found: dict[int, int] = {}

    def add(tensor: "torch.Tensor") -> None:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # without memory of its own
            memory_ = tensor.untyped_storage()
            if memory_.nbytes() and memory_.data_ptr() not in (known or ()):
                found[memory_.data_ptr()] = memory_.nbytes()

    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            add(thing)
            if thing.is_leaf and thing.grad is not None:  # C++ may be all that holds it
                add(thing.grad)
    return found


class _AfterBackward:
    """A listener of `parallel.measure.ranges` that counts when a backward pass has ended."""

    def __init__(self, count: Callable[[], None]):
        self.count = count

    def enter(self, name: str) -> None:
        pass

    def leave(self, name: str) -> None:
        if name == "backward":
            self.count()


def measure(settings: dict[str, Any]) -> None:
    """One rank: two steps of the small model; prints the most that rank 0's and 1's tensors
    occupied after a backward pass or an update, as one JSON line."""
    import torch
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from parallel import engines, token_files
    from parallel.measure import ranges

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, spec = dist.get_rank(), spec_of(settings)
    ids = np.arange(4096, dtype=np.uint16) % SMALL["vocab_size"]
    tokens = token_files.Tokens(ids, "", "", None, None)
    before = set(storages())
    ranges.listeners.append(_AfterBackward(lambda: count()))
    engine = engines.load(spec, torch.device("cpu"), "torch")
    most = 0

    def count(*_: Any) -> None:
        nonlocal most
        most = max(most, sum(storages(before).values()))

    register_optimizer_step_post_hook(count)
    dp_rank = spec.layout.coords(rank)["dp"]
    vocab = SMALL["vocab_size"]
    for step in range(2):
        made = token_files.batches(
            tokens, spec.layout, spec.seq_len, vocab, dp_rank, spec.seed, step
        )
        engine.step(made, spec.lr)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, most)
    if rank == 0:
        print(json.dumps({"held": found}), flush=True)
    engine.close()
    dist.destroy_process_group()


TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def held(settings: dict[str, Any]) -> list[int]:
    """Bytes that each of two ranks held, by `measure` under torchrun.

    Raises:
        UsageError: it failed; with its last line.
    """
    here = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as small_buckets:
        if settings["engine"].startswith("deepspeed"):
            json.dump({"zero_optimization": {"reduce_bucket_size": 1000}}, small_buckets)
            small_buckets.flush()
            settings = settings | {"deepspeed_config": small_buckets.name}
        command = [*TWO_RANKS, "-m", "benchmarks.memory_estimates", "--held", json.dumps(settings)]
        done = subprocess.run(command, cwd=ROOT, env=here, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"held"')]
    if done.returncode or not lines:
        raise UsageError(f"{settings}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    return json.loads(lines[-1])["held"]


def held_rows(runs: Iterable[dict[str, Any]] = HELD) -> list[dict[str, Any]]:
    """One row per run, of the rank with the most bytes."""
    rows = []
    for settings in runs:
        spec, bytes_held = spec_of(settings), held(settings)
        rank = int(np.argmax(bytes_held))
        ours = expected(spec, rank)
        rows.append(
            {
                "engine": spec.engine,
                **{k: getattr(spec.layout, k) for k in ("tp", "pp", "dp", "zero_stage")},
                "ours": ours / 2**20,
                "held": bytes_held[rank] / 2**20,
                "error": ours / bytes_held[rank] - 1,
            }
        )
    return rows


def held_table(rows: list[dict[str, Any]]) -> Table:
    """What the engines hold, beside the formula."""
    config = GPTConfig(**SMALL)
    return Table(
        [
            Column("engine", "engine"),
            *(Column(k, k, "d") for k in ("tp", "pp", "dp")),
            Column("zero_stage", "ZeRO", "d"),
            Column("ours", "formula MiB", ".2f"),
            Column("held", "held MiB", ".2f"),
            Column("error", "difference", "+.1%"),
        ],
        rows,
        f"Tensors that a rank holds, {config.n_params / 1e6:.1f}M parameters in fp32, two ranks",
        ["the formula leaves out biases, norms, positions and padding"],
    )


def peaks(paths: list[Path]) -> Table:
    """The formula of rank 0 without its library constant, beside the most memory that the process
    of a run on CPU had (`max_resident_bytes_rank0` of its metrics)."""
    rows = []
    for record in load(paths)[0]:
        measured = read_run(Path(record.source)).metrics["epochs"][-1]["max_resident_bytes_rank0"]
        # As scaled_dot_product_attention. What is never written of a bucket is not resident.
        x = columns(**settings_of(record) | {"flash": True, "bucket": record.params})
        ours = float(memory.first_rank(x, {"library_gb": 0.0})[0])
        rows.append(
            {
                "run": name_of(record),
                "precision": record.precision,
                "params": record.params and record.params / 1e6,
                "ours": ours / memory.GB,
                "measured": measured / memory.GB,
                "rest": (measured - ours) / memory.GB,
            }
        )
    return Table(
        [
            Column("run", "run"),
            Column("precision", "precision"),
            Column("params", "parameters (M)", ".1f"),
            Column("ours", "formula GB", ".3f"),
            Column("measured", "peak GB", ".3f"),
            Column("rest", "rest GB", ".3f"),
        ],
        rows,
        "Peak resident memory of rank 0's process, 2-core CPU",
        [
            "rest: what the formula leaves to its library constant: the interpreter, PyTorch and"
            " the engine's libraries, gloo, the allocator; the smallest runs show little else"
        ],
    )


@command_line("memory_estimates")
def main(argv: list[str] | None = None) -> int:
    """Print or write the tables."""
    parser = Parser(
        prog="python benchmarks/memory_estimates.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, metavar="FILE.md")
    parser.add_argument("--held", help=argparse.SUPPRESS)  # one rank of one measurement
    arguments = parser.parse_args(argv)
    if arguments.held:
        measure(json.loads(arguments.held))
        return 0
    tables = [deepspeed_states(), megatron_parts(), korthikanti()]
    text = "\n".join(t.render("markdown") for t in [*tables, peaks(PEAKS), held_table(held_rows())])
    if arguments.out:
        with writing(arguments.out):
            arguments.out.write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
