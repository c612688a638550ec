"""The parts of a step over all ranks, and the efficiencies that follow. Torch-free: a run says them
at its end, and `analysis.breakdown` shows them.

The tree is that of POP (https://co-design.pop-coe.eu/metrics/index.html). Its factors multiply:

    global efficiency = parallel efficiency x computation scaling
    parallel efficiency = load balance x serialisation x transfer x orchestration

Of seconds per step, U is a rank's useful computing (forward, backward, optimizer), T the step, X
the time that messages travel and H the host's (data, move, other), both as the mean over ranks:

    load balance        = mean U / max U
    serialisation       = max U / (T - H - X)
    transfer            = (T - H - X) / (T - H)
    orchestration       = (T - H) / T
    computation scaling = U of all ranks of the baseline / U of all ranks (weak scaling: mean U)

POP simulates an ideal network to learn T - X; this takes the waiting that ranks measured out of
their messages. Orchestration, when a device neither computes nor sends, is that of arXiv 2603.26576
for accelerators, which puts it outermost, too.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from parallel.config.layout import Layout
from parallel.record.schema import EXPERT_BREAKDOWN_COLUMNS, EXPERT_MESSAGE_AXES, MESSAGE_AXES

COLLECTIVE = tuple(axis for axis in (*MESSAGE_AXES, *EXPERT_MESSAGE_AXES) if axis != "pp")
COMPUTE = ("forward", "backward", "optimizer")
SENT = ("tp", "dp", "pp", "other communication")  # the parts in which messages travel
GOOD = 0.8  # POP calls an efficiency below it an issue
Ranks = Mapping[int, Mapping[str, float]]  # rank -> its columns, as means per step

# The coordinates that the ranks of one group share, in collectives along an axis.
_SHARED = {"tp": ("dp", "pp"), "dp": ("tp", "pp"), "embedding": ("tp", "dp")}


class Means(NamedTuple):
    """A rank's columns as means per step, None where a window lacks one, over `steps` steps."""

    columns: dict[str, float | None]
    steps: int


def means_of(windows: list[dict[str, Any]], first_step: int) -> Means:
    """Returns the means of a rank's windows from `first_step` on; where none begins so late, of all
    but the first."""
    rows = [row for row in windows if row["first_step"] >= first_step] or windows[1:] or windows
    steps = sum(row["last_step"] - row["first_step"] + 1 for row in rows)
    names = set(rows[0]) - {"rank", "first_step", "last_step", "transfer_s"}
    columns = {name: [row[name] for row in rows] for name in names}
    means = {name: None if None in each else sum(each) / steps for name, each in columns.items()}
    return Means(dict.fromkeys(EXPERT_BREAKDOWN_COLUMNS, 0.0) | means, steps)


def mean(ranks: Ranks, *columns: str) -> float:
    """Returns the mean over ranks of the sum of the columns."""
    return sum(row[c] for row in ranks.values() for c in columns) / len(ranks)


def slowest(ranks: Ranks, *columns: str) -> float:
    """Returns the sum of the columns on the rank that has most of it."""
    return max(sum(row[c] for c in columns) for row in ranks.values())


def _least_s(layout: Layout, ranks: Ranks, axis: str) -> float:
    """Returns the mean over ranks of the seconds along an axis of the rank that waited least in
    each group of ranks that wait for each other."""
    groups: dict[tuple, list[float]] = defaultdict(list)
    for rank, row in ranks.items():
        if axis != "embedding" or row["embedding_calls"]:
            coords, n = layout.coords(rank), layout.ep * layout.etp
            shared = tuple(coords[a] for a in _SHARED.get(axis, ()))
            if axis in EXPERT_MESSAGE_AXES:  # who has the same experts, or the others of a copy
                shared = coords["pp"], rank % n if axis == "expert_dp" else rank // n
            groups[shared].append(row[f"{axis}_s"])
    return sum(len(seconds) * min(seconds) for seconds in groups.values()) / len(ranks)


def parts(layout: Layout, ranks: Ranks) -> dict[str, float]:
    """Returns seconds per step of a run's slowest rank, in parts that add up to it.

    bubble, pp: the mean over ranks. tp, dp, other communication (embedding, mixed, control and of
    experts): what the rank that waited least in each group spent in it, for the rest of its
    partners' time there is waiting for it; that waiting, and what the slowest rank's step exceeds
    the mean by, is load imbalance. compute: forward, backward, optimizer. other: the rest.
    """
    least = {axis: _least_s(layout, ranks, axis) for axis in COLLECTIVE}
    waiting_s = sum(mean(ranks, f"{axis}_s") - least[axis] for axis in COLLECTIVE)
    step_s = slowest(ranks, "elapsed_s")
    seconds = {
        "compute": mean(ranks, *(f"{name}_s" for name in COMPUTE)),
        "bubble": mean(ranks, "bubble_s"),
        "tp": least["tp"],
        "dp": least["dp"],
        "pp": mean(ranks, "pp_s"),
        "other communication": sum(least[a] for a in COLLECTIVE if a not in ("tp", "dp")),
        "imbalance": waiting_s + step_s - mean(ranks, "elapsed_s"),
    }
    return seconds | {"other": step_s - sum(seconds.values())}


class Efficiencies(NamedTuple):
    """The factors of a run's parallel efficiency; the module says what each is."""

    load_balance: float
    serialisation: float
    transfer: float
    orchestration: float

    @property
    def parallel(self) -> float:
        return self.load_balance * self.serialisation * self.transfer * self.orchestration


def efficiencies(layout: Layout, ranks: Ranks) -> Efficiencies | None:
    """Returns the factors of a run's parallel efficiency; None where no rank computed."""
    seconds, step_s = parts(layout, ranks), slowest(ranks, "elapsed_s")
    most_useful = slowest(ranks, *(f"{name}_s" for name in COMPUTE))
    if not most_useful > 0:
        return None
    on_device = step_s - seconds["other"]
    ideal = on_device - sum(seconds[name] for name in SENT)
    return Efficiencies(
        load_balance=seconds["compute"] / most_useful,
        serialisation=most_useful / ideal,
        transfer=ideal / on_device,
        orchestration=on_device / step_s,
    )


def unseen(engine: str | None, gpu: str | None) -> str:
    """Returns why a breakdown's shares say nothing of an engine's efficiency; "" where they do."""
    if engine == "fsdp2" and gpu:
        return "fsdp2's waits on a GPU are between streams, so its breakdown has them in computing"
    return ""


class Verdict(NamedTuple):
    """What bounds a run, in a word and by the part of a step that would have to shrink, and the
    shares that say so, in words."""

    bound: str
    part: str
    why: str

    def __str__(self) -> str:
        return f"{self.bound}: {self.why}"


def verdict(layout: Layout, ranks: Ranks) -> Verdict | None:
    """Returns what bounds a run: its computing, where that is a good parallel efficiency, else what
    takes most of the rest; None where no rank computed."""
    seconds, step_s = parts(layout, ranks), slowest(ranks, "elapsed_s")
    shares = {name: part_s / step_s for name, part_s in seconds.items()}
    if not shares["compute"] > 0:
        return None
    if shares["compute"] >= GOOD:
        why = f"computing takes {shares['compute']:.0%} of a step"
        return Verdict("compute-bound", "compute", why)
    most_sent, data = max(SENT, key=shares.__getitem__), mean(ranks, "data_s") / step_s
    sent = sum(shares[name] for name in SENT)
    losses = {
        "communication-bound": (sent, most_sent, f"messages (most: {most_sent}) take"),
        "pipeline-bound": (shares["bubble"], "bubble", "the bubble takes"),
        "imbalanced": (shares["imbalance"], "imbalance", "waiting for slower ranks takes"),
        "input-bound": (data, "data", "waiting for data takes"),
        "host-bound": (shares["other"] - data, "other", "the host takes"),
    }
    bound = max(losses, key=lambda name: losses[name][0])
    share, part, words = losses[bound]
    return Verdict(bound, part, f"{words} {share:.0%} of a step, computing {shares['compute']:.0%}")
