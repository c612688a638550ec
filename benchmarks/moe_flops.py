"""FLOPs of models with experts as others print them, beside the `megatron` convention's.

    python -m benchmarks.moe_flops [--out logs/published/moe-flops.md]

A row of logs/published that prints a rate of FLOPs (or MFU) and one of tokens says how many FLOPs a
token it counts. Rows of one model, depth and sequence length are one line.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from analysis.common.table import Column, Table
from analysis.logs.published_csv import Row, read_csv
from base.errors import Parser, command_line
from base.files import ROOT
from benchmarks.planner.published_rows import config_of, has_experts
from models.config import PRESETS, GPTConfig
from models.flops import megatron

FOLDER = ROOT / "logs" / "published"
OUT = FOLDER / "moe-flops.md"
MARK = "<!-- what follows is written by benchmarks/moe_flops.py -->\n\n"
NEAR = 0.01
TABLES = {
    "automodel_h100": "NeMo AutoModel, performance summary",
    "bridge_moe_ablations": "Megatron-Bridge, one change at a time",
    "dgxc_moe": "NVIDIA DGX Cloud recipes 25.01 to 25.05",
    "moe_modelzoo_qwen3": "Megatron-MoE-ModelZoo",
}
# TFLOP/s of which DGX Cloud's MFU is a share: its rows of DeepSeek-V3 print both.
PEAKS = {("H100", "bf16"): 989, ("H100", "fp8"): 1979}
PEAKS |= {("GB200", "bf16"): 2450, ("GB200", "fp8"): 4900}


class AsPrinted(NamedTuple):
    """What a publisher counts otherwise than the model has it: of a GPT in `config`, of a hybrid in
    `hybrid`'s arguments; note: in words."""

    note: str
    config: dict[str, Any] = {}
    hybrid: dict[str, Any] = {}


_45 = AsPrinted(  # rotary positions need an even size
    "counted as printed, with heads of 2880 / 64 = 45; the model's have 64",
    config={"kv_channels": 45, "position": "learned"},
)
_NANO, _SUPER = "Nemotron-3-Nano-30B-A3B", "Nemotron-3-Super-120B-A12B"
AS_PRINTED = {  # (table, model)
    ("automodel_h100", "GPT-OSS-20B"): _45,
    ("automodel_h100", "GPT-OSS-120B"): _45,
    ("automodel_h100", _NANO): AsPrinted(
        "counted as printed, with heads of 2688 / 32 = 84 not 128, and a scan of 2 d n",
        hybrid={"scan": 2, "head_dim": 84},
    ),
    ("automodel_h100", _SUPER): AsPrinted(
        "counted as printed, with a scan of 2 d n", hybrid={"scan": 2}
    ),
    ("bridge_moe_ablations", _NANO): AsPrinted(
        "counted as printed, with Mamba blocks of 2 x 2688; the model's are 64 x 64 wide",
        hybrid={"width": 2 * 2688},
    ),
    ("bridge_moe_ablations", "Moonlight-16B-A3B"): AsPrinted(
        "its six rows differ by 1.1 %, all above ours: probably a mean of rates beside one of times"
    ),
    ("dgxc_moe", "DeepSeek-V3"): AsPrinted(
        "counted with the block that predicts one more token", config={"mtp_num_layers": 1}
    ),
    ("dgxc_moe", "Nemotron-H-56B"): AsPrinted(
        "counted as printed, with all of attention's square and a scan of 6.25 d n",
        hybrid={"scan": 6.25, "causal": False},
    ),
}
_LARGE = PRESETS["gpt-oss-120b"]
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
        "since 26.06, and here: three matrices an expert, every second layer attends to 128 tokens",
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
    (
        "Qwen3-235B-A22B",
        "Primus, pipeline schedules",
        PRESETS["qwen3-235b-a22b"],
        4096,
        [406e3 / 2742.4, 431.2e3 / 2912.9, 325.8e3 / 2200.6, 437.1e3 / 2952.7]
        + [438.6e3 / 2963.1, 445.9e3 / 3012.1, 447.7e3 / 3024.5],
        "it does not state the sequence length: counted at 4,096",
    ),
]


def gflop_per_token(row: Row) -> float | None:
    """What a published row counts a token; None where it does not print both rates."""
    rate = row.number("tflops")
    if not rate and row.number("mfu"):
        of_fp8 = "is of the FP8 peak" in row.text("lint")
        rate = (
            row.number("mfu")
            * PEAKS[row.text("gpu_type"), "fp8" if of_fp8 else row.text("precision")]
        )
    if not rate or "seconds (TFLOP/s" in row.text("inferred"):  # its seconds come from its TFLOP/s
        return None
    tokens = row.number("tokens_per_s")
    if not tokens and row.number("step_s"):
        tokens = row.number("global_batch") * row.number("seq_len") / row.number("step_s")
    return rate * row.number("gpus") * 1e3 / tokens if tokens else None


def hybrid(
    row: Row, scan: float = 7, width: float = 0, head_dim: int = 0, causal: bool = True
) -> float:
    """FLOPs per token of blocks that are attention, Mamba-2, or a feed-forward with or without
    experts, as Megatron-LM counts them: a block of Mamba is d wide (heads x their size), has states
    of n numbers in g groups, and 2 h (3 d + 2 g n + heads) + `scan` d n FLOPs forward.

    width, head_dim: d, and the size of a head of attention, if not the row's.
    """
    blocks = {kind: int(n) for n, kind in re.findall(r"(\d+) ([\w-]+)", row.text("blocks"))}
    heads, size, n, groups = map(int, re.findall(r"\d+", row.text("mamba")))
    d, h = width or heads * size, row.number("hidden")
    mamba = 2 * h * (3 * d + 2 * groups * n + heads) + scan * d * n
    latent = row.number("moe_latent_size") or h
    experts = latent * (row.number("moe_ffn") or 0) * (row.number("topk") or 0)
    experts += h * (row.number("shared_ffn") or 0) + (h * latent if latent < h else 0)
    of_head = head_dim or row.number("head_dim") or h / row.number("heads")
    queries, keys = (of_head * row.number(name) for name in ("heads", "kv_heads"))
    attention = 4 * h * (queries + keys) + 4 * queries * row.number("seq_len") * (1 - causal / 2)
    forward = blocks["attention"] * attention + blocks["Mamba-2"] * mamba
    forward += 4 * blocks.get("MoE", 0) * experts
    forward += 4 * blocks.get("MLP", 0) * h * (row.number("ffn") or 0)
    return 3 * (forward + 2 * h * row.number("vocab"))


def counted(table: str, row: Row) -> float:
    """FLOPs per token of a row's model, as its publisher counts it."""
    as_printed = AS_PRINTED.get((table, row.text("model")), AsPrinted(""))
    if row.text("blocks"):
        return hybrid(row, **as_printed.hybrid)
    config = replace(config_of(row), **as_printed.config)
    return megatron(config, config.max_seq_len, recompute=False)


def lines() -> list[dict[str, Any]]:
    """One per model, depth and sequence length of each table."""
    printed: dict[tuple[str, str, int, int], list[float]] = {}
    first: dict[tuple[str, str, int, int], Row] = {}
    for table in TABLES:
        for row in read_csv(FOLDER / f"{table}.csv").rows:
            known = (has_experts(row) and row.text("layers")) or row.text("mamba")
            value = gflop_per_token(row) if known and "delta" not in row.text("blocks") else None
            if value is not None:
                layers, seq_len = int(row.number("layers")), int(row.number("seq_len"))
                of = (table, row.text("model"), layers, seq_len)
                printed.setdefault(of, []).append(value)
                first.setdefault(of, row)
    rows = []
    for of, values in sorted(printed.items()):
        table, model, layers, seq_len = of
        note = AS_PRINTED[table, model].note if (table, model) in AS_PRINTED else ""
        name, flops = f"{model}, {layers} layers", counted(table, first[of])
        rows.append(_line(name, TABLES[table], flops, seq_len, values, note))
    for model, who, config, seq_len, values, note in PRINTED:
        flops = megatron(config, seq_len, recompute=False)
        rows.append(_line(model, who, flops, seq_len, values, note))
    return rows


def _line(
    model: str, who: str, flops: float, seq_len: int, values: list[float], note: str
) -> dict[str, Any]:
    low, high = min(values), max(values)
    return {
        "model": model,
        "who": who,
        "seq_len": seq_len,
        "rows": len(values),
        "low": low,
        "high": high,
        "counted": flops / 1e9,
        "off": max((flops / 1e9 / value - 1 for value in (low, high)), key=abs),
        "note": note or "-",
    }


def page() -> str:
    """The table as Markdown, and what is not in it."""
    rows = lines()
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
        " is furthest. h: hidden, d: the width of a Mamba block, n: its state. Not counted:"
        " Qwen3-Next (gated delta nets; its one row has two digits, 23.2 to 24.6), Nemotron 3 Ultra"
        " (its shape is not published), and rows that print one rate alone (Primus' steps, SimuMax,"
        " Megatron-LM's layer; ModelZoo's on long sequences and on GB200 and GB300)."
    )
    return MARK + Table(columns, rows).render("markdown").rstrip() + f"\n\n{below}\n"


@command_line("moe_flops")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.moe_flops", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args(argv)
    arguments.out.write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
