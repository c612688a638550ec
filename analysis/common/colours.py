"""The colours and the marks of every picture and every page: an engine, a part of a step and a
precision look the same wherever they are drawn. Colours are Paul Tol's, which the colour-blind tell
apart (https://personal.sron.nl/~pault/)."""

from collections.abc import Iterable

from parallel.config.engine_abilities import ENGINES

_OWN = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee")  # of the first of ENGINES
_OTHERS = ("#aa3377", "#ee7733", "#332288", "#44aa99", "#882255", "#999933", "#777777")
GREY = "#888888"  # ideal lines, limits, and parts that PARTS lacks

# By part of a step, of memory or of the wall clock. Parts of one chart differ.
PARTS = {
    "forward": "#88ccee",
    "backward": "#332288",
    "optimizer": "#44aa99",
    "tp": "#cc6677",
    "dp": "#ddcc77",
    "pp": "#ee8866",
    "bubble": "#dddddd",
    "embedding": "#aa4499",
    "mixed": "#6699cc",
    "control": "#999933",
    "ep": "#117733",
    "etp": "#882255",
    "expert_dp": "#aaaa00",
    "data": "#661100",
    "move": "#ee3377",
    "weights": "#332288",
    "gradients": "#88ccee",
    "activations": "#cc6677",
    "keys and values": "#117733",
    "logits": "#ddcc77",
    "buckets": "#882255",
    "library": "#bbbbbb",
    "startup": "#ddcc77",
    "training": "#332288",
    "evaluation": "#44aa99",
    "checkpoint": "#cc6677",
}
LAWS = {
    "Amdahl's law": "#4477aa",
    "Gustafson's law": "#ee6677",
    "Universal Scalability Law": "#228833",
}
MARKS = {  # of Vega, by precision; None: one that is not known
    "fp32": "circle",
    "bf16": "square",
    "fp16": "triangle-up",
    "fp8": "diamond",
    None: "triangle-down",
}


def label(engine: str | None) -> str:
    """Returns what a legend calls an engine."""
    return engine or "unknown"


def of_engines(labels: Iterable[str]) -> dict[str, str]:
    """Returns the colour of each label. Engines of this repository have fixed colours; the other
    labels, which should be those of all runs of a study, share the rest in alphabetical order."""
    wanted = set(labels)
    fixed = {name: colour for name, colour in zip(ENGINES, _OWN, strict=False) if name in wanted}
    unfixed = enumerate(sorted(wanted - fixed.keys()))
    return fixed | {name: _OTHERS[i % len(_OTHERS)] for i, name in unfixed}
