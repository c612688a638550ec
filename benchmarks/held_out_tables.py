"""How many planted errors does analysis.audit find in tables of forms that its rules were not made for?

    python benchmarks/held_out_tables.py [--set 1] [--seeds 5] [--seed 100] [--missed] [--write FOLDER]

Makes tables as people publish them: READMEs of trainers, exports of run trackers, HTML of blogs, CSVs
with names of their own. Every table follows from a few runs of models of known size, so a clean table
has no error; in a third of the forms rates and times are averaged apart, as they are in public. Then
it plants one error at a time into a cell that other cells of the table contradict. Prints, for each
form and each kind of error, how many planted tables have a finding, how many of these name the row,
and how many clean tables have one. The forms and the errors were fixed before the first audit.
"""

# ruff: noqa: E501  (a form is read as one line a part)

import html
import io
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from analysis.published.audit import audit_paths
from analysis.published.finding import Finding
from models.errors import Parser, command_line

# Name -> parameters, layers, hidden size, heads.
MODELS = {
    "Llama-3 8B": (8.03e9, 32, 4096, 32),
    "Llama-3 70B": (70.6e9, 80, 8192, 64),
    "Llama-2 13B": (13.02e9, 40, 5120, 40),
    "GPT-3 175B": (174.6e9, 96, 12288, 96),
    "GPT 1.3B": (1.316e9, 24, 2048, 16),
    "GPT 22B": (22.0e9, 48, 6144, 64),
}
PEAKS = {"A100": 312e12, "H100": 989.4e12, "B200": 2250e12}  # dense bf16, FLOP/s
MEMORY = {"A100": 80, "H100": 80, "B200": 180}  # GB
LEAST = 0.04  # share by which an error changes what is printed
Cell = Callable[[Any], str]


@dataclass
class Column:
    """A heading, the name of its value in a run, how it is printed."""

    heading: str
    name: str
    form: Cell


@dataclass
class Form:
    """A kind of table. errors: (kind, the cells that it changes). averaged: the share by which rates
    and times may differ, for they are averaged apart."""

    name: str
    make: Callable[[random.Random], tuple[str, list[dict[str, Any]]]]  # text before, runs
    columns: list[Column]
    errors: list[tuple[str, tuple[str, ...]]]
    kind: str = "md"
    averaged: float = 0.0
    after: str = ""


def fixed(digits: int, unit: str = "") -> Cell:
    return lambda v: f"{v:.{digits}f}{unit}"


def comma(v: float) -> str:
    return f"{v:,.0f}"


def whole(v: float) -> str:
    return f"{v:.0f}"


def short(v: float) -> str:
    return f"{v:.4g}"


def kilo(v: float) -> str:
    return f"{v / 1000:.1f}k"


def percent(digits: int, sign: str = "") -> Cell:
    return lambda v: f"{100 * v:.{digits}f}{sign}"


def run(
    model: str, card: str, nodes: int, each: int, tp: int, pp: int, mbs: int, gas: int, seq: int,
    mfu: float, attention: float = 12.0, cp: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """One run, whole. attention: FLOPs of attention per token are that x layers x hidden x seq."""
    params, layers, hidden, heads = MODELS[model]
    gpus = nodes * each
    dp = gpus // (tp * pp * cp)
    gbs = mbs * gas * dp
    flops = 6 * params + attention * layers * hidden * seq
    step_s = gbs * seq * flops / (mfu * PEAKS[card] * gpus)
    found = {
        "model": model, "card": card, "nodes": nodes, "each": each, "gpus": gpus, "tp": tp, "pp": pp,
        "cp": cp, "dp": dp, "mbs": mbs, "gas": gas, "gbs": gbs, "seq": seq, "params": params,
        "layers": layers, "hidden": hidden, "heads": heads, "flops": flops, "step_s": step_s,
        "batch_tokens": gbs * seq, "steps_per_s": 1 / step_s,
    }  # fmt: skip
    return found | rates(found, step_s)


def rates(of: dict[str, Any], step_s: float) -> dict[str, Any]:
    """All that follows from the time of a step."""
    tokens = of["gbs"] * of["seq"] / step_s
    tflops = tokens * of["flops"] / of["gpus"] / 1e12
    return {
        "samples_per_s": of["gbs"] / step_s, "tokens_per_s": tokens, "each_tokens": tokens / of["gpus"],
        "tflops": tflops, "aggregate": tflops * of["gpus"] / 1000, "mfu": tflops * 1e12 / PEAKS[of["card"]],
        "hfu": tflops * 1e12 / PEAKS[of["card"]] * 4 / 3, "tokens_per_day": tokens * 86400,
        "days": 1e12 / tokens / 86400, "step_ms": step_s * 1000,
    }  # fmt: skip


def relative(runs: list[dict[str, Any]], weak: bool = False) -> list[dict[str, Any]]:
    """Add speedup and efficiency against the first run."""
    base = runs[0]
    for one in runs:
        one["speedup"] = one["tokens_per_s"] / base["tokens_per_s"]
        one["efficiency"] = one["speedup"] * base["gpus"] / one["gpus"]
    return runs


def slower(chance: random.Random, n: int, start: float = 0.47) -> list[float]:
    """MFUs that fall with the number of GPUs."""
    found = [start * chance.uniform(0.93, 1.0)]
    for _ in range(n - 1):
        found.append(found[-1] * chance.uniform(0.90, 0.985))
    return found


def layouts(
    chance: random.Random, n: int, card: str, model: str, seq: int, attention: float = 12.0
):
    """Runs of one model with different layouts on 2 to 16 nodes of 8."""
    found, seen = [], set()
    while len(found) < n:
        nodes, tp, pp = (
            chance.choice([2, 4, 8, 16]),
            chance.choice([1, 2, 4, 8]),
            chance.choice([1, 2, 4]),
        )
        mbs, gas = chance.choice([1, 2, 4]), chance.choice([4, 8, 16])
        if (nodes, tp, pp, mbs) in seen or nodes * 8 % (tp * pp):
            continue
        seen.add((nodes, tp, pp, mbs))
        found.append(
            run(model, card, nodes, 8, tp, pp, mbs, gas, seq, chance.uniform(0.31, 0.52), attention)
        )
    return found


# ---- the forms ----


def nemo(chance):
    runs = []
    for model, tp, pp, gas, nodes in (
        ("Llama-3 8B", 1, 1, 8, 1), ("Llama-3 70B", 4, 4, 16, 8), ("GPT-3 175B", 4, 8, 32, 16),
        ("Llama-2 13B", 2, 1, 8, 2), ("GPT 22B", 4, 2, 16, 4),
    ):  # fmt: skip
        seq = chance.choice([2048, 4096, 8192])
        runs.append(
            run(
                model,
                "H100",
                nodes,
                8,
                tp,
                pp,
                chance.choice([1, 2]),
                gas,
                seq,
                chance.uniform(0.38, 0.55),
            )
        )
    return "# Performance summary\n\nDGX H100, BF16.\n", runs


def megatron(chance):
    runs = []
    for model, tp, pp, nodes, gas in (
        ("GPT 1.3B", 1, 1, 4, 16), ("GPT 22B", 8, 1, 8, 32), ("Llama-3 70B", 8, 4, 32, 48), ("GPT-3 175B", 8, 8, 96, 96),
    ):  # fmt: skip
        runs.append(run(model, "A100", nodes, 8, tp, pp, 1, gas, 2048, chance.uniform(0.41, 0.53)))
    return "## Weak scaling\n\nAll runs used A100 80GB GPUs and a sequence length of 2048.\n", runs


def titan(chance):
    runs = []
    for words, tp, pp, gas, mbs in (
        ("FSDP 16", 1, 1, 1, 2), ("FSDP 8, TP 2", 2, 1, 2, 2), ("FSDP 4, TP 4", 4, 1, 4, 2), ("FSDP 2, TP 8", 8, 1, 8, 4),
    ):  # fmt: skip
        runs.append(
            run("Llama-3 8B", "H100", 2, 8, tp, pp, mbs, gas, 8192, chance.uniform(0.33, 0.46))
            | {"words": words}
        )
        runs[-1]["memory"] = chance.uniform(31, 74)
    return "### Llama 3.1 8B on 16 H100 GPUs\n\nSequence length 8192, bf16.\n", runs


def maxtext(chance):
    runs = [
        run("Llama-3 70B", "H100", n, 8, 8, 1, 2, 1, 4096, m)
        for n, m in zip((4, 8, 16, 32), slower(chance, 4), strict=True)
    ]
    return "# MaxText on A3 (H100)\n\nLlama-3 70B, context 4096.\n", runs


def deepspeed(chance):
    return "# 3D parallelism, GPT 22B on A100-80GB, seq 2048\n", layouts(
        chance, 6, "A100", "GPT 22B", 2048
    )


def wandb(chance):
    runs = layouts(chance, 8, "H100", "Llama-2 13B", 4096)
    names = [
        "amber-sun-3",
        "calm-fog-7",
        "dry-wave-12",
        "eager-oak-4",
        "faint-dew-9",
        "glad-elm-1",
        "hazy-fir-8",
        "icy-bay-5",
    ]
    for one, name in zip(runs, names, strict=True):
        one |= {"name": name, "state": "finished"}
    return "", runs


def blog(chance):
    runs = [
        run("Llama-3 8B", "H100", n, 8, 1, 1, 2, 2, 8192, m) | {"cluster": f"{n}x8 H100"}
        for n, m in zip((1, 2, 4, 8, 16), slower(chance, 5), strict=True)
    ]
    return "<h2>Scaling Llama-3 8B</h2><p>Sequence length 8192.</p>", relative(runs)


def strong(chance):
    runs = [
        run("GPT 1.3B", "A100", n, 4, 1, 1, 4, 32 // n, 1024, m)
        for n, m in zip((1, 2, 4, 8), slower(chance, 4), strict=True)
    ]
    return "# Strong scaling, GPT 1.3B\n\nA100, sequence length 1024.\n", relative(runs)


def foundry(chance):
    runs = []
    for model, nodes, mbs, gas in (
        ("GPT 1.3B", 1, 8, 4),
        ("GPT 1.3B", 8, 8, 2),
        ("Llama-3 8B", 4, 2, 8),
        ("Llama-2 13B", 8, 1, 8),
        ("Llama-3 70B", 16, 1, 4),
    ):
        runs.append(
            run(
                model,
                "H100",
                nodes,
                8,
                1,
                1,
                mbs,
                gas,
                chance.choice([2048, 4096]),
                chance.uniform(0.32, 0.48),
            )
        )
    return "# Throughput of our trainer\n", runs


def words(chance):
    runs = []
    for tp, pp, nodes in ((4, 4, 8), (8, 2, 8), (4, 8, 16), (8, 4, 16), (2, 8, 4)):
        one = run("Llama-3 70B", "H100", nodes, 8, tp, pp, 1, 32, 4096, chance.uniform(0.35, 0.49))
        runs.append(one | {"words": f"{one['gpus']} GPUs (TP{tp} PP{pp} DP{one['dp']})"})
    return "## Llama-3 70B on H100, bf16, seq len 4096\n", runs


def sideways(chance):
    runs = [
        run("GPT 22B", "A100", n, 8, 4, 2, 2, 16, 2048, m)
        for n, m in zip((2, 4, 8, 16), slower(chance, 4), strict=True)
    ]
    for i, one in enumerate(runs):
        one["name"] = f"run {chr(65 + i)}"
    return "# GPT 22B, A100\n", runs


def odd(chance):
    return "", layouts(chance, 7, "A100", "Llama-3 8B", 4096, 6.0)


def news(chance):
    runs = []
    for model, nodes in (
        ("Llama-3 8B", 4),
        ("Llama-2 13B", 4),
        ("GPT 22B", 8),
        ("Llama-3 70B", 16),
        ("GPT-3 175B", 32),
    ):
        one = run(model, "A100", nodes, 8, 8, 1, 1, 64, 2048, chance.uniform(0.38, 0.55), 0.0)
        runs.append(one | {"words": f"{nodes} nodes × 8 A100-80GB"})
    return "## How fast is it?\n\nA sequence has 2048 tokens.\n", runs


def neox(chance):
    return "Results on A100 40GB nodes, sequence length 2048, GPT 1.3B:\n", layouts(
        chance, 6, "A100", "GPT 1.3B", 2048
    )


def weak(chance):
    runs = [
        run("Llama-2 13B", "H100", n, 8, 2, 1, 2, 8, 4096, m)
        for n, m in zip((1, 2, 4, 8, 16, 32), slower(chance, 6), strict=True)
    ]
    return "## Weak scaling of Llama-2 13B (H100, 4k context)\n", relative(runs)


def days(chance):
    runs = []
    for model, nodes, seq in (
        ("Llama-3 8B", 16, 8192),
        ("Llama-2 13B", 16, 4096),
        ("Llama-3 70B", 64, 8192),
        ("GPT-3 175B", 128, 2048),
    ):
        runs.append(run(model, "H100", nodes, 8, 4, 2, 1, 32, seq, chance.uniform(0.38, 0.52)))
    return "How long do 1T tokens take?\n", runs


def fsdp(chance):
    runs = [
        run("Llama-2 13B", "A100", n, 8, 1, 1, m, 1, 4096, chance.uniform(0.42, 0.56))
        for n, m in ((1, 2), (2, 2), (4, 4), (8, 4), (16, 2))
    ]
    return "FSDP on A100 80GB, Llama-2 13B\n", runs


def shares(chance):
    runs = [
        run("GPT 22B", "H100", n, 8, 8, 2, 1, 32, 4096, m)
        for n, m in zip((4, 8, 16, 32), slower(chance, 4), strict=True)
    ]
    for one in runs:
        comm, bubble, other = chance.uniform(8, 19), chance.uniform(3, 9), chance.uniform(1, 4)
        one |= {
            "comm": comm,
            "bubble": bubble,
            "other": other,
            "compute": 100 - comm - bubble - other,
        }
    return "Where a step of GPT 22B goes (H100, s = 4096)\n", runs


TIMES = ("unit", "digits", "stale")


def errors(*given: tuple[str, str]) -> list[tuple[str, tuple[str, ...]]]:
    """`("unit digits", "step_s tokens_per_s")`: each of these kinds in each of these cells; `copied`
    changes all cells at once."""
    found = []
    for kinds, cells in given:
        for kind in kinds.split():
            if kind == "copied":
                found.append((kind, tuple(cells.split())))
            else:
                found += [(kind, (cell,)) for cell in cells.split()]
    return found


def columns(*given: tuple[str, str, Cell]) -> list[Column]:
    return [Column(*one) for one in given]


FORMS = [
    Form("NeMo README", nemo, columns(
        ("Model", "model", str), ("#-GPUs", "gpus", whole), ("GBS", "gbs", whole), ("MBS", "mbs", whole),
        ("Sequence Length", "seq", whole), ("TP", "tp", whole), ("PP", "pp", whole), ("DP", "dp", whole),
        ("Tokens / sec / GPU", "each_tokens", whole), ("Model TFLOP / sec / GPU", "tflops", whole),
        ("Global step time (s)", "step_s", fixed(2))),
        errors(("unit digits stale", "each_tokens step_s"), ("gpus", "gpus"), ("unit", "tflops"), ("copied", "each_tokens tflops step_s"), ("double", "tp"))),
    Form("Megatron README", megatron, columns(
        ("Model size", "params", lambda v: f"{v / 1e9:.1f}B"), ("Hidden size", "hidden", whole), ("Layers", "layers", whole),
        ("TP", "tp", whole), ("PP", "pp", whole), ("DP", "dp", whole), ("Number of GPUs", "gpus", whole), ("Batch size", "gbs", whole),
        ("Time per iteration (s)", "step_s", fixed(2)), ("Achieved teraFLOP/s per GPU", "tflops", whole),
        ("Percentage of theoretical peak FLOP/s", "mfu", percent(0, "%")), ("Achieved aggregate petaFLOP/s", "aggregate", fixed(1))),
        errors(("unit digits", "step_s aggregate"), ("gpus", "gpus"), ("digits stale", "tflops"), ("peak", "mfu"), ("copied", "step_s tflops mfu"), ("double", "pp"))),
    Form("torchtitan README", titan, columns(
        ("Parallelism", "words", str), ("Local batch size", "mbs", whole), ("Global batch size", "gbs", whole), ("TPS/GPU", "each_tokens", comma),
        ("TFLOPS/GPU", "tflops", fixed(1)), ("MFU(%)", "mfu", percent(2)), ("Memory(GiB)", "memory", fixed(1))),
        errors(("unit digits stale", "each_tokens"), ("digits", "tflops"), ("peak digits", "mfu"), ("words", "words"), ("unit", "memory"))),
    Form("MaxText", maxtext, columns(
        ("Hardware", "card", lambda v: f"{v} x8"), ("# chips", "gpus", whole), ("Global batch", "gbs", whole), ("Step time (s)", "step_s", fixed(3)),
        ("TFLOP/sec/chip", "tflops", fixed(1)), ("Tokens/s/chip", "each_tokens", fixed(1)), ("MFU", "mfu", percent(2, "%"))),
        errors(("unit digits stale", "step_s each_tokens"), ("peak", "mfu"), ("gpus", "gpus"), ("copied", "step_s tflops each_tokens mfu")), averaged=0.002),
    Form("DeepSpeed 3D", deepspeed, columns(
        ("Nodes", "nodes", whole), ("GPUs", "gpus", whole), ("DP", "dp", whole), ("TP", "tp", whole), ("PP", "pp", whole), ("Micro-batch", "mbs", whole), ("GAS", "gas", whole),
        ("Global BS", "gbs", whole), ("Samples per second", "samples_per_s", fixed(2)), ("sec/it", "step_s", fixed(2)), ("TFLOPs", "tflops", fixed(1))),
        errors(("unit digits stale", "samples_per_s step_s"), ("gpus", "gpus"), ("double", "nodes gas tp"), ("digits", "tflops"), ("copied", "samples_per_s step_s tflops"))),
    Form("wandb export", wandb, columns(
        ("Name", "name", str), ("State", "state", str), ("world_size", "gpus", whole), ("parallelism.tensor_parallel_size", "tp", whole), ("parallelism.pipeline_parallel_size", "pp", whole),
        ("parallelism.data_parallel_size", "dp", whole), ("data.global_batch_size", "gbs", whole), ("data.seq_length", "seq", whole), ("perf/step_time", "step_s", repr),
        ("perf/tokens_per_sec", "tokens_per_s", repr), ("perf/mfu", "mfu", repr)),
        errors(("unit digits stale", "step_s tokens_per_s"), ("gpus", "gpus"), ("peak digits", "mfu"), ("copied", "step_s tokens_per_s mfu")), kind="csv", averaged=0.003),
    Form("HTML blog", blog, columns(
        ("Cluster", "cluster", str), ("Global batch", "gbs", whole), ("Throughput (tok/s)", "tokens_per_s", comma), ("ms/iter", "step_ms", whole), ("Speedup", "speedup", fixed(2, "x")), ("Scaling eff.", "efficiency", percent(1, "%"))),
        errors(("unit digits stale", "tokens_per_s step_ms"), ("digits wrong", "efficiency"), ("digits", "speedup"), ("copied", "tokens_per_s step_ms")), kind="html"),
    Form("strong scaling", strong, columns(
        ("GPUs", "gpus", whole), ("Global BS", "gbs", whole), ("elapsed (ms)", "step_ms", fixed(1)), ("Samples per second", "samples_per_s", fixed(1)), ("Speedup", "speedup", fixed(2)), ("Scaling eff.", "efficiency", fixed(2))),
        errors(("unit digits stale", "step_ms samples_per_s"), ("gpus", "gpus"), ("wrong", "efficiency"), ("digits", "speedup"), ("copied", "step_ms samples_per_s"))),
    Form("llm-foundry", foundry, columns(
        ("Model", "model", str), ("SeqLen (T)", "seq", whole), ("# GPUs", "gpus", whole), ("GPU", "card", lambda v: f"{v.lower()}_80gb"), ("MFU", "mfu", percent(2)), ("Model TFLOP", "tflops", whole),
        ("MicroBatchSize", "mbs", whole), ("GradAccum", "gas", whole), ("GlobalBatchSize", "gbs", whole), ("Throughput (S/s)", "samples_per_s", whole), ("Throughput (T/s)", "tokens_per_s", whole),
        ("Throughput (T/s/GPU)", "each_tokens", whole), ("GlobalBatchSize (T)", "batch_tokens", whole)),
        errors(("unit digits stale", "tokens_per_s each_tokens"), ("gpus", "gpus"), ("peak digits", "mfu"), ("double", "gas seq"), ("copied", "samples_per_s tokens_per_s each_tokens"))),
    Form("layout in words", words, columns(
        ("Configuration", "words", str), ("Global batch", "gbs", whole), ("Tokens/s", "tokens_per_s", kilo), ("Iteration (s)", "step_s", fixed(2)), ("MFU", "mfu", percent(1, " %"))),
        errors(("unit digits stale", "tokens_per_s step_s"), ("words", "words"), ("peak", "mfu"), ("copied", "tokens_per_s step_s mfu"))),
    Form("on its side", sideways, columns(
        ("", "name", str), ("GPUs", "gpus", whole), ("TP", "tp", whole), ("PP", "pp", whole), ("DP", "dp", whole), ("Global batch size", "gbs", whole), ("Sequence length", "seq", whole),
        ("Step time (s)", "step_s", fixed(2)), ("Tokens/s", "tokens_per_s", comma), ("TFLOPs/GPU", "tflops", fixed(1))),
        errors(("unit digits stale", "tokens_per_s step_s"), ("gpus", "gpus"), ("double", "dp"), ("digits", "tflops")), kind="side"),
    Form("CSV, names of its own", odd, columns(
        ("n_gpu", "gpus", whole), ("tp_size", "tp", whole), ("pp_size", "pp", whole), ("dp_size", "dp", whole), ("micro_bsz", "mbs", whole), ("bsz", "gbs", whole), ("ctx", "seq", whole), ("t_iter_ms", "step_ms", fixed(1)),
        ("ktok_per_s", "tokens_per_s", lambda v: f"{v / 1000:.3f}"), ("tflops_per_gpu", "tflops", fixed(2))),
        errors(("unit digits stale", "step_ms tokens_per_s"), ("gpus", "gpus"), ("double", "tp"), ("digits", "tflops"), ("copied", "step_ms tokens_per_s tflops")), kind="csv"),
    Form("blog, tokens a day", news, columns(
        ("Model", "model", str), ("Setup", "words", str), ("Batch (tokens)", "batch_tokens", comma), ("Iteration time (s)", "step_s", fixed(1)), ("Tokens/day", "tokens_per_day", lambda v: f"{v / 1e9:.1f}B"), ("TFLOPS per GPU", "tflops", whole)),
        errors(("unit digits stale", "step_s tokens_per_day"), ("words", "words"), ("copied", "step_s tokens_per_day tflops")), averaged=0.002),
    Form("GPT-NeoX table", neox, columns(
        ("GPUs", "gpus", whole), ("MP", "tp", whole), ("PP", "pp", whole), ("DP", "dp", whole), ("Batch size per GPU", "mbs", whole), ("GAS", "gas", whole), ("Train batch size", "gbs", whole), ("Time per step", "step_s", fixed(2, "s")), ("Samples/s", "samples_per_s", fixed(1)), ("TFLOPS/GPU", "tflops", fixed(1))),
        errors(("unit digits stale", "step_s samples_per_s"), ("gpus", "gpus"), ("double", "gas pp"), ("digits", "tflops"), ("copied", "step_s samples_per_s tflops"))),
    Form("weak scaling", weak, columns(
        ("Nodes", "nodes", whole), ("H100s", "gpus", whole), ("Global batch (sequences)", "gbs", whole), ("tokens/s", "tokens_per_s", comma), ("tokens/s/GPU", "each_tokens", whole), ("MFU (%)", "mfu", percent(1)), ("Efficiency (%)", "efficiency", percent(1))),
        errors(("unit digits stale", "tokens_per_s each_tokens"), ("gpus", "gpus"), ("double", "nodes"), ("wrong", "efficiency"), ("peak", "mfu"), ("copied", "tokens_per_s each_tokens mfu"))),
    Form("days for 1T tokens", days, columns(
        ("Model", "model", str), ("GPUs (H100)", "gpus", whole), ("Sequence", "seq", whole), ("Batch size", "gbs", whole), ("s/step", "step_s", fixed(2)), ("Throughput in tokens/sec", "tokens_per_s", comma), ("Days to train on 1T tokens", "days", fixed(1)), ("MFU", "mfu", percent(1, "%"))),
        errors(("unit digits stale", "step_s tokens_per_s"), ("digits stale", "days"), ("copied", "step_s tokens_per_s days"))),
    Form("FSDP blog", fsdp, columns(
        ("GPU count", "gpus", whole), ("Batch/GPU", "mbs", whole), ("Seq", "seq", whole), ("tokens/sec/GPU", "each_tokens", comma), ("Step (s)", "step_s", fixed(3)), ("MFU%", "mfu", percent(1)), ("Model TFLOPs/GPU", "tflops", fixed(1))),
        errors(("unit digits stale", "each_tokens step_s"), ("peak digits", "mfu"), ("copied", "each_tokens step_s mfu tflops")), averaged=0.002),
    Form("shares of a step", shares, columns(
        ("#GPUs", "gpus", whole), ("Step [s]", "step_s", fixed(2)), ("Global batch size", "gbs", whole), ("Tokens per second", "tokens_per_s", comma), ("Compute %", "compute", fixed(1)), ("Communication %", "comm", fixed(1)), ("Bubble %", "bubble", fixed(1)), ("Other %", "other", fixed(1))),
        errors(("unit digits stale", "step_s tokens_per_s"), ("digits", "compute comm"), ("copied", "step_s tokens_per_s")), averaged=0.002),
]  # fmt: skip


# A second set, written after the rules were mended by the first and before they were read again.


def tuples(chance):
    runs = layouts(chance, 6, "A100", "GPT 22B", 1024)
    return "Search on 40GB A100s, GPT 22B, 1024 tokens a sequence\n", [
        one | {"words": f"({one['dp']}, {one['tp']}, {one['pp']})"} for one in runs
    ]


def sweep(chance):
    return "", layouts(chance, 9, "H100", "Llama-3 8B", 4096)


def trainer(chance):
    runs = [
        run("Llama-3 8B", "H100", n, 8, 1, 1, m, g, 2048, chance.uniform(0.25, 0.4))
        for n, m, g in ((1, 4, 8), (1, 8, 4), (2, 4, 4), (4, 4, 2), (8, 4, 1))
    ]
    return "# Fine-tuning throughput\n\nmax length 2048, packed\n", runs


def cloud(chance):
    runs = [
        run("Llama-3 70B", "H100", n, 8, 8, 2, 1, 16, 8192, m)
        for n, m in zip((16, 32, 64, 128), slower(chance, 4), strict=True)
    ]
    return "<h3>Llama-3 70B on p5.48xlarge</h3>", relative(runs)


def device(chance):
    runs = [
        run("Llama-2 13B", "H100", n, 8, 1, 1, 4, 1, 4096, m) | {"words": f"h100-{8 * n}"}
        for n, m in zip((1, 2, 4, 8, 16), slower(chance, 5), strict=True)
    ]
    return "## 13B, global batch grows with the slice\n", runs


def gcds(chance):
    runs = [
        run("GPT 22B", "A100", n, 8, 8, 2, 2, 16, 2048, m)
        for n, m in zip((2, 4, 8, 16, 32), slower(chance, 5, 0.42), strict=True)
    ]
    return "22B model; a node has 8 devices\n", relative(runs)


def ladder(chance):
    runs = []
    for i, words in enumerate(
        ("baseline", "+ flash attention", "+ fused kernels", "+ overlap", "+ fp8")
    ):
        runs.append(
            run(
                "Llama-3 8B",
                "H100",
                1,
                8,
                2,
                1,
                1,
                32,
                8192,
                0.28 + 0.05 * i + chance.uniform(0, 0.02),
            )
            | {"words": words}
        )
    return "### Ablation: Llama 3 8B, 8xH100, 128 sequences of 8K\n", relative(runs)


def memory(chance):
    runs = layouts(chance, 6, "A100", "Llama-2 13B", 2048)
    for one in runs:
        one |= {
            "memory": chance.uniform(22, 74),
            "words": f"TP={one['tp']}, PP={one['pp']}, DP={one['dp']}",
        }
    return "**7 configurations of Llama-2 13B (A100-SXM4-80GB)**\n", runs


SECOND = [
    Form("layout tuples", tuples, columns(
        ("#GPUs", "gpus", whole), ("(dp, tp, pp)", "words", str), ("#mb", "gas", whole), ("Batch size", "gbs", whole), ("Latency (s/iter)", "step_s", fixed(3)), ("Throughput (samples/s)", "samples_per_s", fixed(2)), ("TFLOPS/GPU", "tflops", fixed(2))),
        errors(("unit digits stale", "step_s samples_per_s"), ("gpus", "gpus"), ("digits", "tflops"), ("copied", "step_s samples_per_s tflops"))),
    Form("sweep CSV", sweep, columns(
        ("nodes", "nodes", whole), ("world", "gpus", whole), ("dp", "dp", whole), ("tp", "tp", whole), ("pp", "pp", whole), ("seqlen", "seq", whole), ("mbs", "mbs", whole), ("batch_accum", "gas", whole), ("gbs", "gbs", whole), ("sec_per_it", "step_s", fixed(3)), ("tok/s/gpu", "each_tokens", fixed(1)), ("mTFLOPs", "tflops", fixed(1)), ("mfu_pct", "mfu", percent(2))),
        errors(("unit digits stale", "step_s each_tokens"), ("digits", "tflops mfu"), ("gpus", "gpus"), ("double", "gas tp nodes"), ("copied", "step_s each_tokens tflops mfu")), kind="csv"),
    Form("fine-tuning", trainer, columns(
        ("num_gpus", "gpus", whole), ("per_device_train_batch_size", "mbs", whole), ("gradient_accumulation_steps", "gas", whole), ("total batch", "gbs", whole), ("train_samples_per_second", "samples_per_s", fixed(3)), ("train_steps_per_second", "steps_per_s", fixed(4)), ("tokens/s", "tokens_per_s", comma)),
        errors(("unit digits stale", "samples_per_s tokens_per_s"), ("digits", "steps_per_s"), ("gpus", "gpus"), ("double", "gas"))),
    Form("cloud blog", cloud, columns(
        ("Instances", "nodes", whole), ("Accelerators", "gpus", whole), ("Batch size (sequences)", "gbs", whole), ("Step time", "step_s", fixed(2, " s")), ("Million tokens/s", "tokens_per_s", lambda v: f"{v / 1e6:.3f}"), ("Model TFLOPS / accelerator", "tflops", fixed(0)), ("Scaling efficiency", "efficiency", percent(1, " %"))),
        errors(("unit digits stale", "step_s tokens_per_s"), ("gpus", "gpus"), ("wrong", "efficiency"), ("copied", "step_s tokens_per_s tflops")), kind="html"),
    Form("per device", device, columns(
        ("slice", "words", str), ("devices", "gpus", whole), ("batch", "gbs", whole), ("seq", "seq", whole), ("tok/s/device", "each_tokens", kilo), ("s/step", "step_s", fixed(3)), ("mfu", "mfu", percent(1))),
        errors(("unit digits stale", "each_tokens step_s"), ("peak", "mfu"), ("gpus", "gpus"), ("copied", "each_tokens step_s mfu")), averaged=0.002),
    Form("devices of a supercomputer", gcds, columns(
        ("Nodes", "nodes", whole), ("Devices", "gpus", whole), ("GBS", "gbs", whole), ("Iteration time (ms)", "step_ms", comma), ("Seqs/s", "samples_per_s", fixed(2)), ("TFLOP/s/device", "tflops", fixed(1)), ("Parallel efficiency", "efficiency", percent(0, "%"))),
        errors(("unit digits stale", "step_ms samples_per_s"), ("digits", "tflops"), ("gpus", "gpus"), ("double", "nodes"), ("wrong", "efficiency"), ("copied", "step_ms samples_per_s tflops"))),
    Form("ablation", ladder, columns(
        ("Setting", "words", str), ("tokens/sec", "tokens_per_s", comma), ("sec/step", "step_s", fixed(2)), ("Speed-up over baseline", "speedup", fixed(2, "x")), ("TFLOPs/s per GPU", "tflops", whole)),
        errors(("unit digits stale", "tokens_per_s step_s"), ("digits", "speedup"), ("copied", "tokens_per_s step_s"))),
    Form("memory and speed", memory, columns(
        ("GPUs", "gpus", whole), ("Layout", "words", str), ("Global batch", "gbs", whole), ("Peak mem (GB)", "memory", fixed(1)), ("Avg. iteration time [s]", "step_s", fixed(2)), ("Tok/s/GPU", "each_tokens", whole), ("% of peak", "mfu", percent(1))),
        errors(("unit digits stale", "step_s each_tokens"), ("gpus", "gpus"), ("peak", "mfu"), ("copied", "step_s each_tokens mfu"))),
]  # fmt: skip


@dataclass
class Made:
    """A table as text cells, and where each row stands in its document."""

    form: Form
    before: str
    runs: list[dict[str, Any]]
    cells: list[dict[str, str]] = field(default_factory=list)

    def text(self) -> tuple[str, list[int], str]:
        """(the document, the line of each row, its name)."""
        headings = [c.heading for c in self.form.columns]
        rows = [[cells[c.name] for c in self.form.columns] for cells in self.cells]
        out, lines = io.StringIO(), []
        if self.form.kind == "csv":
            quoted = [[f'"{x}"' if "," in x else x for x in row] for row in (headings, *rows)]
            out.write("".join(",".join(row) + "\n" for row in quoted))
            return out.getvalue(), [i + 2 for i in range(len(rows))], "table.csv"
        if self.form.kind == "html":
            out.write(f"<html><body>\n{self.before}\n<table>\n")
            for i, row in enumerate((headings, *rows)):
                tag = "td" if i else "th"
                cells = "".join(f"<{tag}>{html.escape(x)}</{tag}>" for x in row)
                out.write(f"<tr>{cells}</tr>\n")
            out.write("</table>\n</body></html>\n")
            return out.getvalue(), [5 + i for i in range(len(rows))], "page.html"
        if self.form.kind == "side":
            headings, *rows = [list(x) for x in zip(headings, *rows, strict=True)]
        start = self.before + "\n"
        out.write(start)
        for row in (headings, ["---"] * len(headings), *rows):
            out.write("| " + " | ".join(row) + " |\n")
        first = start.count("\n") + 3
        lines = [first + i for i in range(len(rows))]
        out.write(self.form.after)
        return out.getvalue(), ([] if self.form.kind == "side" else lines), "README.md"


def make(form: Form, seed: int) -> Made:
    """A clean table."""
    chance = random.Random(f"{form.name} {seed}")
    before, runs = form.make(chance)
    if form.averaged:
        for one in runs:  # the time is averaged apart from what follows from rates
            one["step_s"] *= 1 + chance.uniform(-form.averaged, form.averaged)
            one["step_ms"] = one["step_s"] * 1000
    cells = [{c.name: c.form(one[c.name]) for c in form.columns} for one in runs]
    return Made(form, before, runs, cells)


def number(text: str) -> float:
    found = re.search(r"-?[\d,]*\.?\d+(?:e[-+]?\d+)?", text)
    return float(found[0].replace(",", "")) if found else float("nan")


def plant(made: Made, kind: str, names: tuple[str, ...], chance: random.Random) -> int | None:
    """Plant an error; returns the row, or None where no row can have it."""
    form = {c.name: c.form for c in made.form.columns}
    rows = list(range(len(made.runs)))
    chance.shuffle(rows)
    name = names[0]
    for at in rows:
        before, one = dict(made.cells[at]), made.runs[at]
        others = [i for i in rows if i != at]
        other = chance.choice(others)
        cell = made.cells[at]
        if kind == "unit":
            cell[name] = form[name](
                one[name]
                * chance.choice(
                    [1000.0, 0.001]
                    if "tokens" not in name
                    else [1000.0, 0.001, 1.0 * max(one["gpus"], 4)]
                )
            )
        elif kind == "digits":
            digits = [i for i in range(len(cell[name]) - 1) if cell[name][i : i + 2].isdigit()]
            good = []
            for i in digits:
                text = cell[name]
                swapped = text[:i] + text[i + 1] + text[i] + text[i + 2 :]
                if swapped.lstrip("0") == swapped or swapped.startswith("0."):
                    good.append(swapped)
            good = [x for x in good if abs(number(x) / number(cell[name]) - 1) > LEAST]
            if good:
                cell[name] = chance.choice(good)
        elif kind == "stale":
            cell[name] = made.cells[other][name]
        elif kind == "copied":
            cell.update({n: made.cells[other][n] for n in names})
        elif kind in ("gpus", "double"):
            factor = (
                chance.choice([2, 4])
                if kind == "double" or one[name] < 8
                else chance.choice([2, 4, 0.5])
            )
            cell[name] = form[name](one[name] * factor)
        elif kind == "peak":  # another card's, or the one with sparsity
            cell[name] = form[name](
                one[name] * chance.choice([0.5, 989.4 / 756, 312 / 989.4, 4 / 3])
            )
        elif kind == "wrong":  # against the row before, or of another row
            cell[name] = form[name](one[name] * chance.choice([0.85, 1.12]))
            at = at if at != 0 else -1
        elif kind == "words":
            numbers = list(re.finditer(r"\d+", cell[name]))
            spot = chance.choice(numbers[: 1 if "node" in cell[name] else None])
            if "A100" in cell[name] or "FSDP" in cell[name] or "GPUs" in cell[name]:
                cell[name] = (
                    cell[name][: spot.start()] + str(int(spot[0]) * 2) + cell[name][spot.end() :]
                )
        changed = [n for n in cell if cell[n] != before[n]]
        small = any(
            abs(number(cell[n]) / number(before[n]) - 1) <= LEAST
            for n in changed
            if kind != "words" and number(before[n])
        )
        if (
            changed
            and not small
            and at >= 0
            and not (kind == "copied" and len(changed) < len(names))
        ):
            return at
        made.cells[max(at, 0)] = before
        if at < 0:
            made.cells[0] = before
    return None


def audit(text: str, name: str, folder: Path) -> list[Finding]:
    """What `python -m analysis.audit` finds in a file of this text."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return audit_paths([path])[0]


@command_line("held_out_tables")
def main(argv: list[str] | None = None) -> int:
    """Make, plant, audit, count."""
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="tables of each form and error")
    parser.add_argument("--seed", type=int, default=100, help="the first seed")
    parser.add_argument("--set", type=int, default=1, choices=(1, 2), help="which forms")
    parser.add_argument("--missed", action="store_true", help="print each miss and false alarm")
    parser.add_argument("--write", type=Path, help="write every clean table into this folder")
    given = parser.parse_args(argv)
    begun, forms = time.perf_counter(), FORMS if given.set == 1 else SECOND
    seeds = range(given.seed, given.seed + given.seeds)
    tried, found, named = Counter(), Counter(), Counter()
    clean, alarmed, alarms = Counter(), Counter(), 0
    with tempfile.TemporaryDirectory() as made_here:
        folder = Path(made_here)
        for form in forms:
            for seed in seeds:
                made = make(form, seed)
                text, _, name = made.text()
                if given.write:
                    given.write.mkdir(parents=True, exist_ok=True)
                    slug = re.sub(r"\W+", "-", form.name)
                    (given.write / f"{slug}-{seed}-{name}").write_text(text)
                findings = audit(text, name, folder)
                before = {finding.message for finding in findings}
                clean[form.name] += 1
                alarmed[form.name] += bool(findings)
                alarms += len(findings)
                if given.missed:
                    for f in findings:
                        print(f"false alarm: {form.name} {seed}: {f.kind}: {f.message}")
                for kind, names in form.errors:
                    made = make(form, seed)
                    chance = random.Random(f"{form.name} {seed} {kind} {names}")
                    original = [dict(cells) for cells in made.cells]
                    at = plant(made, kind, names, chance)
                    if at is None:
                        continue
                    text, lines, name = made.text()
                    findings = audit(text, name, folder)
                    findings = [f for f in findings if f.message not in before]
                    hit = bool(findings)
                    line = lines[at] if lines else None
                    row = any(f.line == line or f"line {line}" in f.message for f in findings)
                    for key in (form.name, kind):
                        tried[key] += 1
                        found[key] += hit
                        named[key] += hit if line is None else row
                    if given.missed and not (hit and (row or line is None)):
                        changed = {
                            n: (original[at][n], v)
                            for n, v in made.cells[at].items()
                            if v != original[at][n]
                        }
                        what = "row not named" if hit else "missed"
                        print(f"{what}: {form.name} {seed}: {kind} in row {at}: {changed}")
    print(f"{'form':24} planted  found  row named   clean  with a finding")
    for form in forms:
        n = form.name
        print(f"{n:24} {tried[n]:7} {found[n]:6} {named[n]:10} {clean[n]:7} {alarmed[n]:15}")
    kinds = dict.fromkeys(kind for form in forms for kind, _ in form.errors)
    print(f"\n{'error':24} planted  found  row named")
    for n in kinds:
        print(f"{n:24} {tried[n]:7} {found[n]:6} {named[n]:10}")
    every = [sum(c[n] for n in kinds) for c in (tried, found, named)]
    print(f"{'all':24} {every[0]:7} {every[1]:6} {every[2]:10}")
    print(
        f"found {every[1] / every[0]:.1%}, row named {every[2] / every[0]:.1%}; clean tables with a finding: {sum(alarmed.values())} of {sum(clean.values())} ({alarms} findings)"
    )
    print(f"{time.perf_counter() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
