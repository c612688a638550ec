"""What must hold in a table of runs, as data. A name is a column of ours (published_csv.HEADINGS).

A formula is written `left = right`, where `*` and `/` join columns and numbers from left to right.
`ep` and `cp` are 1 where a row does not state them; any other column must be there.
"""

from typing import NamedTuple


class Identity(NamedTuple):
    """left = right in every row. Of several right sides, the one that a row meets best counts.

    slack: what a row may miss it by beyond its digits and what its table shows. formula: how the
    row's TFLOP/s convention begins, where the identity is of one convention.
    """

    kind: str
    left: str
    right: tuple[str, ...]
    slack: float = 0.0
    formula: str = ""


class Same(NamedTuple):
    """An expression that has one value in all rows with equal `group` columns."""

    kind: str
    expression: str
    group: tuple[str, ...]
    slack: float


class Bound(NamedTuple):
    """The rule that left <= right in every row; `slack` is the share that may lie above it."""

    kind: str
    left: str
    right: str
    slack: float = 0.0


# FLOPs for each parameter and token; params_b is in 10^9, tflops in 10^12
EIGHT = "8 * params_b * global_batch * seq_len / step_s / gpus / 1000"
SIX = "6 * params_b * global_batch * seq_len / step_s / gpus / 1000"
IDENTITIES = (
    # dp beside ep: of all ranks, or of the ranks that hold the same experts
    Identity("gpus", "gpus", ("tp * pp * dp * cp", "tp * pp * dp * cp * ep")),
    Identity("gpus", "gpus", ("nodes * gpus_per_node",)),
    Identity("batch", "global_batch", ("micro_batch * gas * dp", "micro_batch * gas * dp * ep")),
    Identity("rate", "tokens_per_s", ("global_batch * seq_len / step_s",)),
    Identity("rate", "tokens_per_s_gpu", ("global_batch * seq_len / step_s / gpus",)),
    Identity("rate", "tokens_per_s_gpu", ("tokens_per_s / gpus",)),
    Identity("rate", "samples_per_s", ("global_batch / step_s",)),
    Identity("rate", "tokens_per_s", ("samples_per_s * seq_len",)),
    Identity("rate", "tokens", ("steps * global_batch * seq_len",)),
    Identity("wall clock", "wall_s", ("tokens / tokens_per_s",), 0.01),
    Identity("tflops", "tflops", (EIGHT,), formula="8PT"),
    Identity("tflops", "tflops", (SIX,), formula="6PT"),
    # Megatron's formulas, which add the attention and the output layer
    Identity("tflops", "tflops", (EIGHT,), 0.15, formula="Megatron eq.3 hardware"),
    Identity("tflops", "tflops", (EIGHT,), 0.15, formula="96*B*s*l*h^2"),
    Identity("mfu", "mfu", ("tflops / peak",), 0.025),  # 989 or 1000, 2450 or 2500
)
# Where a row does not print a column, it follows from others.
DERIVED = (
    ("tokens_per_s", "tokens_per_s_gpu * gpus"),
    ("tokens_per_s", "samples_per_s * seq_len"),
    ("tokens_per_s", "global_batch * seq_len / step_s"),
)
# A whole number of each: ranks that hold one model; accumulations, where a row states none.
WHOLE = (
    ("gpus", "gpus / tp / pp / cp", "dp"),
    ("batch", "global_batch / micro_batch / dp", "gas"),
)
MODEL = ("model", "params_b", "layers", "hidden", "ffn", "heads", "vocab", "seq_len")
SAME = (
    Same("flops", "tflops * gpus / tokens_per_s", (*MODEL, "recompute", "formula"), 0.006),
    Same("flops", "mfu * gpus / tokens_per_s", (*MODEL, "gpu_type", "precision"), 0.006),
    Same("mfu", "tflops / mfu", ("gpu_type", "precision"), 0.025),
    Same("gpus", "gpus / nodes", ("cluster", "gpu_type"), 0.0),
    # the baseline's time, rate and GPUs
    Same("speedup", "speedup * step_s", (*MODEL, "table"), 0.002),
    Same("speedup", "speedup / tokens_per_s", (*MODEL, "table"), 0.002),
    Same("speedup", "speedup * wall_s", (*MODEL, "table"), 0.002),
    Same("efficiency", "efficiency * gpus / speedup", (*MODEL, "table"), 0.002),
    Same("efficiency", "efficiency * gpus * step_s", (*MODEL, "table", "global_batch"), 0.002),
    Same("efficiency", "efficiency / tokens_per_s_gpu", (*MODEL, "table"), 0.002),
)
BOUNDS = (
    Bound("peak", "tflops", "peak"),
    Bound("peak", "mfu", "1"),
    Bound("efficiency", "efficiency", "1", 0.005),
    Bound("efficiency", "speedup", "gpus", 0.005),
)
# Equal numbers with more digits than this do not come from two configurations by chance.
SHARP = 3e-4
FAR_APART = 1.2  # slowest over fastest of identical configurations
SPEEDS = ("step_s", "tokens_per_s", "tokens_per_s_gpu", "samples_per_s", "tflops", "mfu", "wall_s")
RESULTS = (*SPEEDS, "speedup", "efficiency", "memory_gb")
