"""Pipeline schedules, event by event, to test the closed formulas of bubble and memory with.

GPipe, 1F1B and interleaved 1F1B. F is a forward, B a backward.
"""

from typing import NamedTuple

Task = tuple[str, int, int]  # (F or B, micro-batch, chunk or virtual stage)
SECONDS = {"F": 1.0, "B": 2.0}  # of one chunk


class Event(NamedTuple):
    """One task (F or B) of one micro-batch through one chunk on one stage; seconds."""

    stage: int
    kind: str
    micro: int
    chunk: int
    start: float
    end: float


def order(schedule: str, stage: int, pp: int, n_micro: int, vpp: int = 1) -> list[Task]:
    """What a stage does, in order.

    gpipe: all forwards, then all backwards. 1f1b: pp - stage - 1 forwards of warm-up, then one
    forward and one backward in turn. interleaved: the same over chunks, micro-batches in groups of
    pp (Megatron-LM's forward_backward_pipelining_with_interleaving).
    """
    total = n_micro * vpp
    groups = ((k // (pp * vpp) * pp + k % pp, k // pp % vpp) for k in range(total))
    forward = [("F", micro, chunk) for micro, chunk in groups]
    backward = [("B", micro, vpp - 1 - chunk) for _, micro, chunk in forward]
    if schedule == "gpipe":
        return forward + backward
    warm = (pp - stage - 1) * 2 + (vpp - 1) * pp if vpp > 1 else pp - stage - 1
    warm = min(warm, total)
    pairs = zip(forward[warm:], backward[: total - warm], strict=True)
    return forward[:warm] + [task for pair in pairs for task in pair] + backward[total - warm :]


def simulate(schedule: str, pp: int, n_micro: int, vpp: int = 1) -> list[Event]:
    """Every event. A task starts when its stage is free and what it needs is done: forward of the
    stage (or chunk) before, backward of the one behind and its own forward."""
    queues = [order(schedule, stage, pp, n_micro, vpp)[::-1] for stage in range(pp)]
    done: dict[Task, float] = {}  # (kind, micro-batch, virtual stage) -> end
    free, events = [0.0] * pp, []
    while any(queues):
        n_before = len(events)
        for stage, queue in enumerate(queues):
            while queue:
                kind, micro, chunk = queue[-1]
                place = chunk * pp + stage
                needs = [("F", micro, place - 1), ("F", micro, place), ("B", micro, place + 1)]
                needs = needs[:1] if kind == "F" else needs[1:]
                needs = [need for need in needs if 0 <= need[2] < pp * vpp]
                if any(need not in done for need in needs):
                    break
                queue.pop()
                start = max([free[stage], *(done[need] for need in needs)])
                done[kind, micro, place] = free[stage] = start + SECONDS[kind]
                events.append(Event(stage, kind, micro, chunk, start, free[stage]))
        assert len(events) > n_before, f"{schedule} deadlocks at pp {pp}, {n_micro}, vpp {vpp}"
    return events


def bubble(events: list[Event]) -> float:
    """Idle over ideal time: a stage's work is the ideal."""
    ideal = sum(e.end - e.start for e in events if e.stage == 0)
    return (max(e.end for e in events) - ideal) / ideal


def in_flight(events: list[Event], stage: int, layers: list[int] | None = None) -> int:
    """Most micro-batch chunks whose forward is done and whose backward is not, on a stage; most
    layers of them, where each chunk of the stage has so many."""
    now = most = 0
    for e in sorted((e for e in events if e.stage == stage), key=lambda e: e.start):
        now += (1 if e.kind == "F" else -1) * (layers[e.chunk] if layers else 1)
        most = max(most, now)
    return most
