"""What a row says: its tokens/s, its tokens a step, its card and its model."""

import re
from functools import lru_cache

from analysis.published.any_table import Line
from analysis.published.rules.intervals import (
    MOST_APART,
    Interval,
    apart,
    product_of,
    ratio_of,
    span_of,
)
from models.errors import UsageError
from models.gpus import Gpu, find_gpu, planning_gpu

MIXTURE = re.compile(
    r"moe|mixtral|grok|deepseek|switch|dbrx|\ba\d+b\b|\d+ ?x ?\d+(?:\.\d+)?b|expert", re.I
)


def tokens_rate(row: Line) -> Interval | None:
    """Tokens/s of all GPUs, printed."""
    if span := span_of(row["tokens_per_s"]):
        return span
    if span := product_of(span_of(row["tokens_per_s_gpu"]), span_of(row["gpus"])):
        return span
    return None


def tokens_of_step(row: Line) -> Interval | None:
    """Tokens of one optimizer step, from the batch."""
    batch = product_of(span_of(row["global_batch"]), span_of(row["seq_len"]))
    return batch or span_of(row["batch_tokens"])


def any_rate(row: Line) -> Interval | None:
    """Tokens/s of all GPUs, printed or from the batch and the time; None where they contradict."""
    printed, derived = tokens_rate(row), ratio_of(tokens_of_step(row), span_of(row["step_s"]))
    if printed and derived and apart(printed, derived) > MOST_APART:
        return None  # the rule `rate` names it
    return printed or derived


def samples_rate(row: Line) -> Interval | None:
    """Samples/s of all GPUs, printed or from the batch and the time; None where they contradict."""
    printed = span_of(row["samples_per_s"])
    derived = ratio_of(span_of(row["global_batch"]), span_of(row["step_s"]))
    if printed and derived and apart(printed, derived) > MOST_APART:
        return None
    return printed or derived


def card_of(row: Line) -> Gpu | None:
    """The card that the row names, or its cluster; a bare name is the usual card of it."""
    return _card(row.words.get("gpu_type") or row.words.get("cluster") or "")


@lru_cache(maxsize=4096)
def _card(name: str) -> Gpu | None:
    if not name or find_gpu(name):
        return find_gpu(name)
    try:
        return planning_gpu(re.sub(r"^NVIDIA ", "", name.upper()))
    except UsageError:
        return None


def peaks_of(row: Line) -> dict[str, float]:
    """TFLOP/s of the row's card by precision; empty where the card is not known."""
    card = card_of(row)
    return card.peaks if card else {}


def peak_of(row: Line) -> float | None:
    """The peak at the row's precision, or None where either is unknown."""
    precision = re.search(r"bf16|fp16|fp8|fp4|fp32|tf32", row.words.get("precision", "").lower())
    return peaks_of(row).get(precision[0]) if precision else None


def is_mixture(row: Line) -> bool:
    around = " ".join(
        [row.words.get("model", ""), row.words.get("around", ""), *row.cells.values()]
    )
    return bool(row["ep"] and row["ep"].value > 1) or bool(MIXTURE.search(around))


def derived_dp(row: Line) -> float | None:
    gpus, tp, pp = (row.number(k) for k in ("gpus", "tp", "pp"))
    if not (gpus and tp):
        return None
    dp = gpus / (tp * (pp or 1) * row.number("cp", 1))
    return dp if dp % 1 == 0 else None  # the rule `gpus` names it
