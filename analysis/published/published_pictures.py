"""The pictures of the published tables."""

from pathlib import Path
from typing import Any

from analysis.common import drawing
from analysis.published import recomputed
from models.flops import DEFAULT_CONVENTION

Figure = Any  # matplotlib's, which loads only where something is drawn


def draw(folder: Path, force: bool = False) -> list[Path]:
    """The files written to a folder."""
    return [
        *drawing.save(_speedup(), folder, "speedup", force),
        *drawing.save(_tflops(), folder, "tflops", force),
    ]


def _speedup() -> Figure:
    label = "GPT-2 124M, V100, Big Purple"
    rows = recomputed.big_purple().rows
    points = [drawing.Point(int(row["gpus"]), row["speedup"], label) for row in rows]
    for row in recomputed.epochs().rows:
        label = f"GPT epochs, batch {row['batch']}, slowest rank"
        points.append(drawing.Point(row["gpus"], row["speedup"], label))
    return drawing.speedup(points, "Published strong scaling, recomputed", 1)


def _tflops() -> Figure:
    rows = [row for row in recomputed.jean_zay(1, 10**6).rows if row.get("megatron")]
    points = [drawing.Point(row["gpus"], row["megatron"], _library(row["engine"])) for row in rows]
    return drawing.tflops(points, "GPT-2 7.5B to 206B on Jean Zay's V100s", DEFAULT_CONVENTION)


def _library(engine: str) -> str:
    """The label of an engine as the Jean Zay tables write it."""
    if engine.startswith("HF"):
        return "Hugging Face"
    if "DeepSpeed" in engine:
        return "with DeepSpeed"
    return "Megatron-LM" if engine.startswith("Megatron") else engine.split(" 1.1.5")[0]
