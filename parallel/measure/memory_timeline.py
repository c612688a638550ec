"""A picture and a JSON file of what a rehearsed step holds, by kind, over the operators it runs."""

import json
from pathlib import Path

from models.memory import GB

# From the bottom: what stays for the whole step first.
_ORDER = (
    "weights",
    "optimizer",
    "gradients",
    "buffers",
    "activations",
    "logits",
    "temporary",
)


def write(stem: Path, timeline: list[tuple[int, str, dict[str, int]]]) -> None:
    """STEM.json and STEM.png of (operators run so far, region, kind -> bytes) in order."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    stem.parent.mkdir(parents=True, exist_ok=True)
    points = [{"operator": n, "region": region, "bytes": held} for n, region, held in timeline]
    Path(f"{stem}.json").write_text(json.dumps(points) + "\n")
    kinds = [kind for kind in _ORDER if any(held.get(kind) for _, _, held in timeline)]
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    sizes = [[held.get(kind, 0) / GB for _, _, held in timeline] for kind in kinds]
    axes.stackplot([n for n, _, _ in timeline], sizes, labels=kinds, step="post")
    axes.set_xlabel("operators of the step")
    axes.set_ylabel("GB")
    axes.set_title(stem.name)
    axes.legend(loc="upper left", fontsize="small")
    figure.savefig(f"{stem}.png", dpi=120)
    pyplot.close(figure)
