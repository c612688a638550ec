"""A training step of the ddp engine compared with Hugging Face's GPT-2 and a plain loop; dp 2.

    python benchmarks/train_step.py [--precisions fp32,bf16] [--modes eager,compile] [--rounds 3]
    python benchmarks/train_step.py --dp [--precisions fp32] [--global-batch 8] [--seq-len 256]

The model, weights, batch, precision, clipping and fused AdamW are the same for

ours   the `ddp` engine with one rank, as `parallel.train` starts it
hf     transformers' GPT2LMHeadModel in a loop of a dozen lines
plain  a GPT as nanoGPT writes it (plain_loop.py), in the same loop

Every run is a process on core 0 with one thread. A round runs each of them once, in turn. A run's
step time is the median of its timed steps. A ratio compares two runs of one round, so that other
programs of the machine slow both; the median round, the lowest and the highest are printed. The
share is FLOP/s by the `megatron` convention over those of the fastest matrix product of the same
precision on one core here. `--same-heap` gives every run the memory setting of ours
(engines/cpu.py), to show its effect. `cpu s` is processor time per step. If it is much less than
the seconds, the machine was busy and the round is of little use.

`--dp` compares two ranks on two cores with one on one core, the same global batch: the efficiency
is the ratio of their step times, over two.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from analysis.common.table import Column, Table
from base.bounds import check_flags
from base.errors import Parser, UsageError, command_line
from models.flops import CONVENTIONS
from parallel.config.settings import RunSpec, resolve

CONTENDERS = ("ours", "hf", "plain")
LR = 3e-4


def spec_of(job: dict[str, Any]) -> RunSpec:
    """The RunSpec that a job describes."""
    settings = {k: job[k] for k in ("preset", "n_layer", "seq_len", "precision", "micro_batch")}
    return resolve(
        ("benchmark", settings | {"device": "cpu", "global_batch": job["global_batch"]}),
        ("job", {"compile": job["mode"] == "compile", "warmup_steps": 0}),
        gpus=job["ranks"],
    )


# --- in the child ---------------------------------------------------------------------------------


def plain_weights(model: Any, spec: RunSpec) -> None:
    """The run's starting weights; a GPT-2's parameters come in the order of ours."""
    import torch

    from models.config import parameter_shapes
    from models.gpt import init_parameter
    from models.hf_files import to_hugging_face

    names = parameter_shapes(spec.model)
    with torch.no_grad():
        for parameter, name in zip(model.parameters(), names, strict=True):
            value = init_parameter(spec.model, name, spec.seed)
            (value,) = to_hugging_face(spec.model, name, value)
            parameter.copy_(value.t() if name.startswith("blocks.") and value.dim() == 2 else value)


def contender(job: dict[str, Any], spec: RunSpec) -> Callable[[list], float]:
    """The step of one contender: micro-batches in, loss out."""
    import torch

    from benchmarks import plain_loop

    if job["contender"] == "ours":
        import torch.distributed as dist

        from parallel import engines

        dist.init_process_group(
            "gloo", init_method=job["store"], rank=job["rank"], world_size=job["ranks"]
        )
        engine = engines.load(spec, torch.device("cpu"), "torch")
        return lambda batches: engine.step(iter(batches), LR).loss
    if job["contender"] == "hf":
        from models import hf_model

        model = hf_model.HuggingFaceGPT(spec.model)
        hf_model.initialise(model, spec.seed)
    else:
        model = plain_loop.PlainGPT(spec.model)
        plain_weights(model, spec)
    return plain_loop.loop(model, spec, torch.device("cpu"))


def child(job: dict[str, Any]) -> dict[str, Any]:
    """One run in this process: seconds and processor seconds of each timed step, losses."""
    os.sched_setaffinity(0, {job["core"]})
    if job["contender"] == "ours" or job["same_heap"]:
        from parallel.engines import cpu

        cpu.keep_freed_memory()
    import torch

    torch.set_num_threads(1)
    spec = spec_of(job)
    if job["contender"] == "peak":
        return {"flops": matmul_flops(torch, spec.precision)}
    step = contender(job, spec)
    vocab, layout = spec.model.vocab_size, spec.layout
    generator = torch.Generator().manual_seed(job["rank"])
    batches = []
    for _ in range(layout.n_micro):
        ids = torch.randint(
            vocab, (layout.micro_batch, spec.seq_len + 1), generator=generator, dtype=torch.int64
        )
        batches.append((ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))
    seconds, cpu, losses = [], [], []
    for _ in range(job["warmup"] + job["steps"]):
        before, cpu_before = time.perf_counter(), time.process_time()
        losses.append(step(batches))
        seconds.append(time.perf_counter() - before)
        cpu.append(time.process_time() - cpu_before)
    return {"seconds": seconds[job["warmup"] :], "cpu": cpu[job["warmup"] :], "losses": losses}


def matmul_flops(torch: Any, precision: str) -> float:
    """The highest FLOP/s of one core in a matrix product of this precision, over a few shapes."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    best = 0.0
    for m, k, n in ((2048, 2048, 2048), (1024, 768, 3072), (1024, 3072, 768)):
        a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        for _ in range(6):
            before = time.perf_counter()
            torch.nn.functional.linear(a, b)
            best = max(best, 2 * m * k * n / (time.perf_counter() - before))
    return best


# --- in the parent --------------------------------------------------------------------------------


def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    """One run, a process per rank on cores 0, 1, ...; what each rank measured.

    Raises:
        UsageError: a rank failed; its last line.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--child", json.dumps(job | extra)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            )
            for rank in range(job["ranks"])
            if (extra := {"rank": rank, "core": rank, "store": f"file://{folder}/store"})
        ]
        outcomes = [rank.communicate() for rank in ranks]
    for rank, (_, errors) in zip(ranks, outcomes, strict=True):
        if rank.returncode:
            last = (errors.strip().splitlines() or ["no word"])[-1]
            raise UsageError(f"{job['contender']} {job['precision']} {job['mode']}: {last}")
    return [json.loads(out.strip().splitlines()[-1]) for out, _ in outcomes]


def step_s(outcome: list[dict[str, Any]], what: str = "seconds") -> float:
    """Median step of the slowest rank."""
    return max(statistics.median(rank[what]) for rank in outcome)


def told(values: list[float]) -> str:
    """The median, and the range where there are several."""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{statistics.median(values):.3f} ({min(values):.3f}..{max(values):.3f})"


def same_model(rounds: list[dict[str, list]], precision: str) -> None:
    """The losses of all contenders, step by step: they trained the same model.

    Raises:
        UsageError: they did not.
    """
    bar = 1e-3 if precision == "fp32" else 5e-2
    losses = {name: outcome[0]["losses"] for name, outcome in rounds[0].items()}
    first = losses["ours"]
    for name, other in losses.items():
        apart = max(abs(a - b) for a, b in zip(first, other, strict=True))
        if apart > bar:
            raise UsageError(f"{name} trains another model: losses are {apart:.3g} apart")


def compare(job: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    """Rows of one precision and mode: every contender, and ours against the best of the others."""
    tokens = job["global_batch"] * job["seq_len"]
    spec = spec_of(job | {"mode": "eager"})
    flops = CONVENTIONS["megatron"](spec.model, spec.seq_len, False) * tokens
    peak = run(job | {"contender": "peak"})[0]["flops"]
    outcomes = []
    for number in range(rounds):
        order = CONTENDERS[number % 3 :] + CONTENDERS[: number % 3]
        outcomes.append({name: run(job | {"contender": name}) for name in order})
        shown = ", ".join(f"{n} {step_s(o):.3f} s" for n, o in sorted(outcomes[-1].items()))
        print(f"{job['precision']} {job['mode']} round {number + 1}: {shown}", file=sys.stderr)
    same_model(outcomes, job["precision"])
    rows = []
    for name in CONTENDERS:
        times = [step_s(o[name]) for o in outcomes]
        ratios = [step_s(o[name]) / step_s(o["ours"]) for o in outcomes]
        cpu_ratios = [step_s(o[name], "cpu") / step_s(o["ours"], "cpu") for o in outcomes]
        seconds = statistics.median(times)
        rows.append(
            {
                "precision": job["precision"],
                "mode": job["mode"],
                "contender": name,
                "step_s": seconds,
                "cpu_s": statistics.median(step_s(o[name], "cpu") for o in outcomes),
                "tokens_per_s": tokens / seconds,
                "share": flops / min(times) / peak,
                "ours_over": None if name == "ours" else told(ratios),
                "ours_over_cpu": None if name == "ours" else told(cpu_ratios),
            }
        )
    return rows


def data_parallel(job: dict[str, Any], rounds: int) -> dict[str, Any]:
    """One rank on one core and two on two, in turn, the same global batch."""
    one, two, efficiencies = [], [], []
    for number in range(rounds):
        pair = {}
        for ranks in (1, 2) if number % 2 == 0 else (2, 1):
            pair[ranks] = run(job | {"contender": "ours", "ranks": ranks})
        one.append(step_s(pair[1]))
        two.append(step_s(pair[2]))
        efficiencies.append(one[-1] / two[-1] / 2)
        print(f"round {number + 1}: {one[-1]:.3f} s, {two[-1]:.3f} s", file=sys.stderr)
    return {
        "precision": job["precision"],
        "mode": job["mode"],
        "one_s": statistics.median(one),
        "two_s": statistics.median(two),
        "efficiency": told(efficiencies),
    }


@command_line("train_step")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        prog="python benchmarks/train_step.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", default="gpt2-124m")
    parser.add_argument("--n-layer", type=int, help="fewer blocks, where time is short")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--global-batch", type=int, help="default: one micro-batch; with --dp, 8")
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--modes", default="eager", help="eager,compile")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a run")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--same-heap", action="store_true")
    parser.add_argument("--dp", action="store_true", help="two ranks beside one")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    check_flags(arguments, rounds=(1, 10**6), steps=(1, 10**6), warmup=(0, 10**6))
    if arguments.child:
        print(json.dumps(child(json.loads(arguments.child))))
        return 0
    job = {k: getattr(arguments, k) for k in ("preset", "seq_len", "micro_batch")}
    job |= {k: getattr(arguments, k) for k in ("steps", "warmup", "same_heap")}
    job |= {"n_layer": arguments.n_layer, "ranks": 1, "rank": 0, "core": 0}
    job["global_batch"] = arguments.global_batch or (8 if arguments.dp else arguments.micro_batch)
    rows = []
    for precision in arguments.precisions.split(","):
        for mode in arguments.modes.split(","):
            one = job | {"precision": precision, "mode": mode}
            spec_of(one | {"mode": "eager"})
            if arguments.dp:
                rows.append(data_parallel(one, arguments.rounds))
            else:
                rows += compare(one, arguments.rounds)
    columns = [Column("precision", "precision"), Column("mode", "mode")]
    if arguments.dp:
        columns += [Column("one_s", "1 rank s", ".3f"), Column("two_s", "2 ranks s", ".3f")]
        columns += [Column("efficiency", "efficiency")]
    else:
        columns += [
            Column("contender", "contender"),
            Column("step_s", "s/step", ".3f"),
            Column("cpu_s", "cpu s", ".3f"),
            Column("tokens_per_s", "tokens/s", ".0f"),
            Column("share", "of matmul peak", ".0%"),
            Column("ours_over", "ours is x times it"),
            Column("ours_over_cpu", "by cpu s"),
        ]
    layers = f", {arguments.n_layer} blocks" if arguments.n_layer else ""
    note = f"{arguments.preset}{layers}, {job['global_batch']} x {arguments.seq_len} tokens a step"
    print(Table(columns, rows, notes=[f"{note}, {arguments.rounds} rounds"]).render(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
