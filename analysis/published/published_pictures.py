"""The pictures of the published tables, and one of a predicted scaling curve."""

from pathlib import Path
from typing import Any

from analysis.common import drawing
from analysis.measured.scaling_curve import Side, curve
from analysis.planner import ranking
from analysis.planner.calibration import load_calibration
from analysis.published import recomputed
from models.config import PRESETS
from models.flops import DEFAULT_CONVENTION

PHASES = ("compute", "communication", "data loading", "data movement")  # of colours.PARTS
Figure = Any  # matplotlib's, which loads only where something is drawn


def draw(folder: Path, force: bool = False) -> list[Path]:
    """The files written to a folder."""
    return [
        *drawing.save(_speedup(), folder, "speedup", force),
        *drawing.save(_tflops(), folder, "tflops", force),
        *drawing.save(_breakdown(), folder, "breakdown", force),
        *drawing.save(_planned(), folder, "planned", force),
    ]


def _speedup() -> Figure:
    big = recomputed.big_purple().rows
    times = {"GPT-2 124M, V100, Big Purple": {int(row["gpus"]): row["step_s"] for row in big}}
    for batch in (64, 128):
        times[f"GPT epochs, batch {batch}, slowest rank"] = {
            gpus: recomputed.slowest_rank(ranks)["total_s"]
            for (of, gpus), ranks in sorted(recomputed.epochs().items())
            if of == batch
        }
    points = []
    for label, seconds in times.items():
        sides = [Side(label, gpus, (step_s,)) for gpus, step_s in seconds.items()]
        rows = curve(sides, sides[0])[0]
        points += [drawing.Point(row["gpus"], row["speedup"], label) for row in rows]
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


def _breakdown() -> Figure:
    bars = {}
    for (batch, gpus), ranks in sorted(recomputed.epochs().items()):
        slowest = recomputed.slowest_rank(ranks)
        keys = ("compute_s", "comm_s", "loading_s", "movement_s")
        bars[f"b{batch}\n{gpus} GPU"] = dict(zip(PHASES, (slowest[k] for k in keys), strict=True))
    return drawing.phases(bars, "Where an epoch's time goes (slowest rank)")


def _planned() -> Figure:
    """18B parameters on Selene, three sequences a GPU, the best layout at each size."""
    settings = {"seq_len": 2048, "precision": "bf16"}
    found = ranking.scale(PRESETS["18b"], load_calibration("selene"), 3.0, settings, ranking.MARGIN)
    return drawing.planned(found, "GPT 18B on Selene, three sequences a GPU")
