"""FLOPs of models with experts as others print them, beside the `megatron` convention's.

    python benchmarks/moe_flops.py FOLDER [--out logs/published/moe-flops.md]

FOLDER has their published tables: a row that prints a rate of FLOPs (or MFU) and one of tokens says
how many FLOPs a token it counts. Rows of one model, depth and sequence length are one line.
"""

import csv
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from analysis.common.table import Column, Table
from base.errors import Parser, command_line
from base.files import ROOT
from models.config import PRESETS, Experts, GPTConfig
from models.flops import megatron

OUT = ROOT / "logs" / "published" / "moe-flops.md"
MARK = "<!-- what follows is written by benchmarks/moe_flops.py -->\n\n"
NEAR = 0.01
TABLES = {
    "automodel_h100.csv": "NeMo AutoModel, performance summary",
    "bridge_moe_ablations.csv": "Megatron-Bridge, one change at a time",
    "dgxc_moe.csv": "NVIDIA DGX Cloud recipes 25.01 to 25.05",
    "moe_modelzoo_qwen3.csv": "Megatron-MoE-ModelZoo",
}
# TFLOP/s of which DGX Cloud's MFU is a share: its rows of DeepSeek-V3 print both.
PEAKS = {("H100", "bf16"): 989, ("H100", "fp8"): 1979}
PEAKS |= {("GB200", "bf16"): 2450, ("GB200", "fp8"): 4900}
_V3, _V3_MTP, _LITE = (PRESETS[f"deepseek-{of}"] for of in ("v3", "v3-mtp", "v2-lite"))
_LARGE = PRESETS["gpt-oss-120b"]
_OLD_HEADS = {"kv_channels": 45, "position": "learned"}  # rotary positions need an even size
_PLAIN = {"vocab_size": 128256, "max_seq_len": 8192, "n_kv_head": 8, "position": "rope"}
_PLAIN |= {"norm": "rmsnorm", "activation": "swiglu", "tied": False, "bias": False}
_KIMI = {"num_experts": 384, "first_dense": 1, "moe_router_num_groups": 0}
# What the tables call a model, with any depth; a line of AutoModel counts DeepSeek-V3 without the
# block that predicts one more token, DGX Cloud with it.
MODELS = {
    "DeepSeek-V3": _V3,
    "GPT-OSS-20B": replace(PRESETS["gpt-oss-20b"], **_OLD_HEADS),
    "GPT-OSS-120B": replace(_LARGE, **_OLD_HEADS),
    "Grok-1": GPTConfig(64, 6144, 48, ffn_hidden=32768, experts=Experts(8, 2), **_PLAIN),
    "Kimi-K2": replace(
        _V3,
        n_head=64,
        vocab_size=163840,
        experts=replace(_V3.experts, moe_router_group_topk=0, **_KIMI),
    ),
    "Llama-4-Maverick": GPTConfig(
        48,
        5120,
        40,
        ffn_hidden=16384,
        experts=Experts(128, 1, 8192, 8192, first_dense=1, moe_layer_freq=2),
        **_PLAIN | {"vocab_size": 202048},
    ),
    "Moonlight-16B-A3B": replace(_LITE, vocab_size=163840, ffn_hidden=11264),
    "Qwen3-30B-A3B": PRESETS["qwen3-30b-a3b"],
    "Qwen3-235B-A22B": PRESETS["qwen3-235b-a22b"],
}
WHY = {
    "GPT-OSS-20B": "counted as printed, with heads of 2880 / 64 = 45; the model's have 64",
    "GPT-OSS-120B": "counted as printed, with heads of 2880 / 64 = 45; the model's have 64",
    "Moonlight-16B-A3B": "its own six rows differ by 1.1 %; two of them are over 1 % from ours",
}
_NO_GATE = replace(_LARGE, activation="gelu", window=None)
_BRIDGE = "Megatron-Bridge, performance summary 25.11"
_BEFORE = "before 26.06: without the gate's matrix, and all layers attend to all tokens"
# Model, who, its configuration, sequence length, GFLOP a token as printed, and a note.
PRINTED: list[tuple[str, str, GPTConfig, int, list[float], str]] = [
    ("GPT-OSS-120B", _BRIDGE, _NO_GATE, 4096, [223e3 / 8213, 153e3 / 5630], _BEFORE),
    ("GPT-OSS-120B", _BRIDGE, _NO_GATE, 8192, [565e3 / 18347, 488e3 / 15876], _BEFORE),
    (
        "GPT-OSS-120B",
        "Megatron-Bridge, pull request 5717",
        _LARGE,
        4096,
        [1077350 / 33017.081],
        "since 26.06: three matrices an expert, every second layer attends to 128 tokens",
    ),
    (
        "GPT-OSS-20B",
        "NeMo AutoModel, pull request 3091",
        PRESETS["gpt-oss-20b"],
        4096,
        [93848.227282944 / 4096],
        "its formula since July 2026",
    ),
    (
        "GPT-OSS-20B",
        "MaxText, pull request 2265",
        PRESETS["gpt-oss-20b"],
        2048,
        [547665.909645312 / 24576],
        "",
    ),
    ("GPT-OSS-120B", "MaxText, pull request 2265", _LARGE, 2048, [780268.185059328 / 24576], ""),
]


def gflop_per_token(row: dict[str, str]) -> float | None:
    """What a published row counts a token; None where it does not print both rates, or prints an
    MFU of another peak than it says."""
    rate = float(row["tflops_per_gpu"] or 0)
    if not rate and row["mfu"] and "is of the FP8 peak" not in row["notes"]:
        rate = float(row["mfu"]) * PEAKS[row["gpu_type"], row["precision"]]
    if not rate or "seconds (TFLOP/s" in row["inferred"]:  # its seconds come from its TFLOP/s
        return None
    seconds = row["seconds_per_iteration"]
    tokens = float(row["global_batch"]) * int(row["seq"]) / float(seconds) if seconds else 0
    tokens = float(row["tokens_per_s"] or tokens)
    return rate * float(row["gpus"]) * 1e3 / tokens if tokens else None


def lines(folder: Path) -> list[dict[str, Any]]:
    """One per model, depth and sequence length of each table."""
    printed: dict[tuple[str, str, int, int], list[float]] = {}
    for name in TABLES:
        for row in csv.DictReader((folder / name).read_text().splitlines()):
            value = gflop_per_token(row) if row["model"] in MODELS else None
            if value is not None:
                of = (name, row["model"], int(row["layers"]), int(row["seq"]))
                printed.setdefault(of, []).append(value)
    rows = []
    for (name, model, layers, seq_len), values in sorted(printed.items()):
        with_mtp = (name, model) == ("dgxc_moe.csv", "DeepSeek-V3")
        config = replace(_V3_MTP if with_mtp else MODELS[model], n_layer=layers)
        note = "counted with the block that predicts one more token" if with_mtp else ""
        note = WHY.get(model, note)
        rows.append(_line(f"{model}, {layers} layers", TABLES[name], config, seq_len, values, note))
    return rows + [_line(*each) for each in PRINTED]


def _line(
    model: str, who: str, config: GPTConfig, seq_len: int, values: list[float], note: str
) -> dict[str, Any]:
    counted = megatron(config, seq_len, recompute=False) / 1e9
    low, high = min(values), max(values)
    return {
        "model": model,
        "who": who,
        "seq_len": seq_len,
        "rows": len(values),
        "low": low,
        "high": high,
        "counted": counted,
        "off": max((counted / value - 1 for value in (low, high)), key=abs),
        "note": note or "-",
    }


def page(folder: Path) -> str:
    """The table as Markdown, and what is not in it."""
    rows = lines(folder)
    far = [row["model"] for row in rows if abs(row["off"]) > NEAR]
    columns = [
        Column("model", "model"),
        Column("who", "printed by"),
        Column("seq_len", "tokens", "d"),
        Column("rows", "rows", "d"),
        Column("low", "least GFLOP/token", ".2f"),
        Column("high", "most", ".2f"),
        Column("counted", "counted", ".2f"),
        Column("off", "off", "+.2%"),
        Column("note", "note"),
    ]
    below = (
        f"{len(rows) - len(far)} of {len(rows)} lines are within {NEAR:.0%}; off: of the row that"
        " is furthest. Not counted: hybrids of Mamba or delta nets and attention (Nemotron-H,"
        " Nemotron 3, Qwen3-Next), and rows that print one rate alone (Primus; Megatron-LM's"
        " layer; ModelZoo's on long sequences and on GB200 and GB300)."
    )
    return MARK + Table(columns, rows).render("markdown").rstrip() + f"\n\n{below}\n"


@command_line("moe_flops")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args(argv)
    arguments.out.write_text(page(arguments.folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
