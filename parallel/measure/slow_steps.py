"""Which steps of a run are slow, on which rank, and in which part of a step. Torch-free.

steady_time.py and step_changes.py say which steps are slow: spikes, the long ones of a period, and
those behind a jump up. What such a step takes longer than the median of the others lies in the
parts that stand out: each one's excess over its own usual time, where slower.py says that this
share of it stands out of the part's spread. A rank's own part (data, computing) names it. In the
other parts ranks wait for each other, so only what all ranks lose there counts, and no rank is
named. `tests/tools/steady_campaign.py` counts false alarms and what is found.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from parallel.measure.rank_judge import NOBODY, STEPS, Verdict, verdicts
from parallel.measure.slow_windows import Judge
from parallel.measure.slower import OF_NORMAL, SPREADS, is_slower, spread
from parallel.measure.steady_time import spike_bound, steady_iterations
from parallel.measure.step_changes import FEWEST, NOTABLE, change_of, period_of

COMPUTE = ("compute", "move", "forward", "backward", "optimizer")
OWN = frozenset((*COMPUTE, "data", "garbage collection", "other"))  # no waiting for other ranks
_SHOWN = 3  # steps that a sentence lists


class PartTimes(NamedTuple):
    """Seconds of a run's steps and of their parts.

    iteration: (steps,). step_s and each of `parts`: (ranks, steps). ranks, nodes: the rank of each
    row and its node; (None,) and ("",) where a log does not say. interval: how many steps an entry
    is the mean of. began_s, ended_s: the first and the last moment, in seconds since 1970.
    """

    iteration: np.ndarray
    step_s: np.ndarray
    parts: Mapping[str, np.ndarray]
    ranks: tuple[int | None, ...] = (None,)
    nodes: tuple[str, ...] = ("",)
    interval: int = 1
    began_s: float = 0.0
    ended_s: float = 0.0

    @property
    def knows_computing(self) -> bool:
        """Returns whether the parts tell what a rank computes from what it waits for others."""
        return not self.parts.keys().isdisjoint(COMPUTE)


class SlowSteps(NamedTuple):
    """Steps that are slow for one reason.

    longer_s: the seconds by which such a step is longer than the median of the other steps. part_s:
    how many of these seconds lie in `part`, which is "" where no stated part has them. ranks and
    nodes: the ranks that lost them, and where these ran; none where the times do not say. lost: the
    lost seconds over the time of the run.
    """

    iterations: tuple[int, ...]
    longer_s: float
    part: str
    part_s: float
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    n_ranks: int
    lost: float
    interval: int

    @property
    def steps(self) -> str:
        """Returns which steps, or entries of several steps, these are, in words."""
        numbers = self.iterations
        one, several = ("step", "steps") if self.interval == 1 else ("entry", "entries")
        if len(numbers) == 1:
            return f"{one} {numbers[0]}"
        if len(numbers) > _SHOWN:
            return f"{len(numbers)} {several} from {numbers[0]} to {numbers[-1]}"
        return f"{several} {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"

    @property
    def place(self) -> str:
        """Returns on which ranks, in words; "" where that is not known."""
        if len(self.ranks) == 1:
            node = f" ({self.nodes[0]})" if self.nodes[0] else ""
            return f"rank {self.ranks[0]}{node}"
        if len(self.ranks) == self.n_ranks:
            return "all ranks" if self.ranks else ""
        return f"{len(self.ranks)} of {self.n_ranks} ranks" if self.ranks else ""

    def __str__(self) -> str:
        verb = "are" if len(self.iterations) > 1 else "is"
        slower = f"{self.steps} {verb} {self.longer_s:.3g} s slower than the median"
        if not self.part:
            return f"{slower}: in none of the parts that are stated"
        if self.n_ranks > 1 and not self.ranks:
            where = ", where ranks wait for each other: which one is slow is not known"
        else:
            where = f", on {self.place}" if self.place else ""
        return f"{slower}: {self.part_s:.3g} s of it is {self.part}{where}"


def groups_of_slow_steps(step_s: np.ndarray, iteration: np.ndarray) -> list[np.ndarray]:
    """Returns the indices of the slow steps behind the warm-up: those of a period together, those
    behind a jump together, each other one by itself."""
    groups, index = [], np.arange(len(step_s))
    change = change_of(step_s, iteration)
    if change and change.at is not None and change.after_s > change.before_s:
        groups.append(index[iteration >= change.at])
    if period := period_of(step_s, iteration):
        groups.append(index[(iteration - period.first) % period.every == 0])
    groups += list(np.flatnonzero(step_s > spike_bound(step_s))[:, None])
    is_grouped, apart = np.zeros(len(step_s), bool), []
    for group in groups:  # a step is in one group
        apart.append(group[~is_grouped[group]])
        is_grouped[group] = True
    return [group for group in apart if len(group)]


class _Cause(NamedTuple):
    """The part of a step that slow steps lose their time in: "" where no stated part is; the
    seconds there; and the places of the ranks."""

    part: str = ""
    part_s: float = 0.0
    ranks: tuple[int, ...] = ()


def slow_steps(times: PartTimes) -> list[SlowSteps]:
    """Returns the slow steps of a run by cause, those that cost most first. Slow steps of one cause
    that cost less than NOTABLE of the time in all are left out."""
    longest_s = times.step_s.max(axis=0)
    kept = _behind_warmup(longest_s)
    if len(kept) < FEWEST or not times.parts:
        return []
    step_s, iteration = longest_s[kept], times.iteration[kept]
    groups = groups_of_slow_steps(step_s, iteration)
    usual = np.setdiff1d(np.arange(len(kept)), np.concatenate([*groups, np.empty(0, int)]))
    if not groups or not len(usual):
        return []
    longer_s = step_s - np.median(step_s[usual])
    parts = {part: _Excess(seconds[:, kept], usual) for part, seconds in times.parts.items()}
    noise_s = spread(step_s[usual])
    causes: dict[tuple[str, tuple[int, ...]], list[tuple[int, float]]] = defaultdict(list)
    for group in groups:
        group_noise_s = noise_s / len(group) ** 0.5
        cause = _cause(parts, group, float(np.median(longer_s[group])), group_noise_s)
        ranks = () if times.ranks == (None,) else cause.ranks
        causes[cause.part, ranks] += [(step, cause.part_s) for step in group.tolist()]
    found = []
    for (part, ranks), members in causes.items():
        steps = sorted(step for step, _ in members)
        lost = float(longer_s[steps].sum() / step_s.sum())
        if lost > NOTABLE:
            found.append(
                SlowSteps(
                    iterations=tuple(iteration[steps].astype(int).tolist()),
                    longer_s=float(np.median(longer_s[steps])),
                    part=part,
                    part_s=float(np.median([part_s for _, part_s in members])),
                    ranks=tuple(times.ranks[rank] for rank in ranks),
                    nodes=tuple(times.nodes[rank] for rank in ranks),
                    n_ranks=len(times.ranks),
                    lost=lost,
                    interval=times.interval,
                )
            )
    return sorted(found, key=lambda steps: -steps.lost)


def _behind_warmup(step_s: np.ndarray) -> np.ndarray:
    """Returns the indices of the steps behind the warm-up, which ends before the first two steps
    that are no spikes of the steady ones. `steady` may drop more: up to an evaluation."""
    steady_s = step_s[steady_iterations(step_s)]
    if not len(steady_s):
        return np.empty(0, int)
    is_usual = step_s <= spike_bound(steady_s)
    pairs = np.flatnonzero(is_usual[1:-1] & is_usual[2:])  # the first step always compiles
    return np.arange(pairs[0] + 1 if len(pairs) else len(step_s), len(step_s))


class _Excess:
    """What each rank spends in one part beyond its own usual time there. seconds: (ranks, steps).
    usual: the steps that are not slow."""

    def __init__(self, seconds: np.ndarray, usual: np.ndarray):
        self.seconds = seconds - np.median(seconds[:, usual], axis=1, keepdims=True)
        self.noise_s = OF_NORMAL * np.median(np.abs(self.seconds[:, usual]), axis=1)  # a spread

    def of(self, group: np.ndarray) -> np.ndarray:
        """Returns the median over the steps of a group, of each rank."""
        return np.median(self.seconds[:, group], axis=1)


def _cause(
    parts: Mapping[str, _Excess], group: np.ndarray, longer_s: float, noise_s: float
) -> _Cause:
    """Returns where the steps of a group are longer. noise_s: of that excess.

    The parts that stand out are added up, the largest first, until no more than noise is left; they
    are the cause where they hold half of it. First those that are a rank's own.
    """
    for is_own, pick in ((True, np.argmax), (False, np.argmin)):
        outstanding: dict[str, np.ndarray] = {}
        for name in (name for name in parts if (name in OWN) == is_own):
            lost_s = parts[name].of(group)
            rank = int(pick(lost_s))
            part_noise_s = parts[name].noise_s[rank] / len(group) ** 0.5
            if longer_s > 0 and is_slower(lost_s[rank] / longer_s, part_noise_s / longer_s):
                outstanding[name] = lost_s
        chosen: list[str] = []
        together = np.zeros(1)
        for name in sorted(outstanding, key=lambda name: -outstanding[name].max()):
            if chosen and longer_s - together[pick(together)] <= SPREADS * noise_s:
                break
            chosen.append(name)
            together = together + outstanding[name]
        part_s = float(together[pick(together)])
        if chosen and part_s >= longer_s / 2:
            ranks = np.flatnonzero(together >= part_s / 2) if is_own else []
            return _Cause(" and ".join(chosen), part_s, tuple(map(int, ranks)))
    return _Cause()


def slow_ranks_of(times: PartTimes) -> list[Verdict]:
    """Returns who was slow in a run, by the rule that finds them while one of ours trains. Where
    the parts do not say what a rank computes, waiting for data alone is compared."""
    nothing = np.zeros_like(times.step_s)
    computing_s = sum((times.parts.get(name, nothing) for name in COMPUTE), nothing)
    if not times.knows_computing:
        computing_s = nothing + np.nan
    all_times = np.stack([computing_s, times.parts.get("data", nothing), times.step_s], axis=-1)
    judge, rows = Judge([0] * len(times.ranks), list(times.nodes)), []
    for end in range(STEPS, len(times.iteration) + 1, STEPS):
        window, _ = judge.window(all_times[:, end - STEPS : end], int(times.iteration[end - 1]))
        for row in window:
            rank = row["rank"]
            rows.append(row | {"rank": rank if rank == NOBODY else times.ranks[rank]})
    return verdicts(rows)
