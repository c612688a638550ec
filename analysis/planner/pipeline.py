"""Pipeline schedules, event by event: GPipe, 1F1B and interleaved 1F1B. F is a forward, B a
backward."""

from typing import NamedTuple

from base.errors import UsageError

MOST_STAGES, MOST_EVENTS = 1024, 200_000  # what is simulated in seconds
SCHEDULES = ("gpipe", "1f1b", "interleaved")
Task = tuple[str, int, int]  # (F or B, micro-batch, chunk or virtual stage)


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

    Raises:
        UsageError: the schedule does not exist for these sizes.
    """
    if schedule not in SCHEDULES:
        raise UsageError(f"unknown schedule {schedule!r}; known: {', '.join(SCHEDULES)}")
    if schedule != "interleaved" and vpp > 1:
        raise UsageError(f"{schedule} has no vpp {vpp}: use interleaved")
    if schedule == "interleaved" and n_micro % pp:
        raise UsageError(f"interleaving needs micro-batches in multiples of pp {pp}, not {n_micro}")
    total = n_micro * vpp
    forward = [_virtual("F", k, pp, vpp) for k in range(total)]
    backward = [_virtual("B", k, pp, vpp) for k in range(total)]
    if schedule == "gpipe":
        return forward + backward
    warm = (pp - stage - 1) * 2 + (vpp - 1) * pp if vpp > 1 else pp - stage - 1
    warm = min(warm, total)
    steady = [
        task
        for pair in zip(forward[warm:], backward[: len(forward) - warm], strict=True)
        for task in pair
    ]
    return forward[:warm] + steady + backward[len(forward) - warm :]


def _virtual(kind: str, k: int, pp: int, vpp: int) -> Task:
    """The k-th task of a stage: groups of pp micro-batches walk through the chunks."""
    group, inside = divmod(k, pp * vpp)
    chunk = inside // pp
    return kind, group * pp + inside % pp, chunk if kind == "F" else vpp - 1 - chunk


def simulate(
    schedule: str,
    pp: int,
    n_micro: int,
    vpp: int = 1,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
) -> list[Event]:
    """Every event; the times are of one chunk. A task starts when its stage is free and what it
    needs has arrived: forward from the stage (or chunk) before, backward from the one behind and
    its own forward.

    Raises:
        UsageError: no such schedule, or too many events.
    """
    if min(pp, n_micro, vpp) < 1:
        raise UsageError(f"pp {pp}, micro-batches {n_micro} and vpp {vpp} must be positive")
    n_events = 2 * pp * n_micro * vpp
    if pp > MOST_STAGES or n_events > MOST_EVENTS:
        raise UsageError(
            f"pp {pp} with {n_events} events is too much to simulate: at most pp"
            f" {MOST_STAGES} and {MOST_EVENTS} events (2 pp n_micro vpp)"
        )
    seconds = {"F": forward_s, "B": backward_s}
    queues = [order(schedule, stage, pp, n_micro, vpp)[::-1] for stage in range(pp)]
    done: dict[Task, float] = {}  # (kind, micro-batch, virtual stage) -> end
    free, events = [0.0] * pp, []
    while any(queues):
        n_before = len(events)
        for stage, queue in enumerate(queues):
            while queue:
                kind, micro, chunk = queue[-1]
                place = chunk * pp + stage
                needs = _needs(kind, micro, place, pp * vpp - 1)
                if any(need not in done for need in needs):
                    break
                queue.pop()
                start = max([free[stage], *(done[need] for need in needs)])
                end = start + seconds[kind]
                done[kind, micro, place] = free[stage] = end
                events.append(Event(stage, kind, micro, chunk, start, end))
        assert len(events) > n_before, f"{schedule} deadlocks at pp {pp}, {n_micro}, vpp {vpp}"
    return events


def _needs(kind: str, micro: int, place: int, last: int) -> list[Task]:
    """The tasks that must be done before one of virtual stage `place` of 0 to `last`."""
    if kind == "F":
        return [("F", micro, place - 1)] if place > 0 else []
    behind = [("B", micro, place + 1)] if place < last else []
    return [("F", micro, place), *behind]


def makespan(events: list[Event]) -> float:
    """From the first start to the last end."""
    return max(e.end for e in events) - min(e.start for e in events)


def bubble(events: list[Event]) -> float:
    """Idle over ideal time: the busiest stage's work is the ideal."""
    ideal = max(busy_s(events).values())
    return (makespan(events) - ideal) / ideal


def busy_s(events: list[Event]) -> dict[int, float]:
    """What each stage works."""
    busy: dict[int, float] = {}
    for e in events:
        busy[e.stage] = busy.get(e.stage, 0.0) + e.end - e.start
    return busy


def in_flight(events: list[Event], stage: int) -> int:
    """Most micro-batch chunks whose forward is done and whose backward is not, on a stage."""
    now = most = 0
    for e in sorted((e for e in events if e.stage == stage), key=lambda e: e.start):
        now += 1 if e.kind == "F" else -1
        most = max(most, now)
    return most


def text(events: list[Event], pp: int, unit: float = 1.0) -> str:
    """One line a stage; a column is `unit` seconds. Digits are F, small letters B."""
    width = round(makespan(events) / unit)
    rows = [["."] * width for _ in range(pp)]
    for e in events:
        sign = str(e.micro % 10) if e.kind == "F" else chr(ord("a") + e.micro % 26)
        for column in range(round(e.start / unit), min(round(e.end / unit), width)):
            rows[e.stage][column] = sign
    return "\n".join(f"stage {i:>3} {''.join(row)}" for i, row in enumerate(rows)) + "\n"
