"""Pipeline schedules, event by event: GPipe, 1F1B, interleaved 1F1B and the zero-bubble ones.

F is a forward, B a backward. The zero-bubble schedules (Qi et al., "Zero Bubble Pipeline
Parallelism", arXiv 2401.10241) split the backward: B is the gradients of the inputs, for which the
stage before waits, and W the gradients of the weights, for which nobody waits. ZB-H1 holds as many
micro-batches as 1F1B, ZB-H2 about twice as many; ZB-V has two chunks a stage, and the second ones
go back from the last stage to the first. No engine here runs them, so the planner does not choose
them.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from analysis.common import drawing
from analysis.common.colours import of_part
from base.errors import UsageError

MOST_STAGES, MOST_EVENTS = 1024, 200_000  # what is simulated in seconds
ZERO_BUBBLE = ("zb-h1", "zb-h2", "zb-v")
SCHEDULES = ("gpipe", "1f1b", "interleaved", *ZERO_BUBBLE)
KINDS = {"F": "forward", "B": "backward", "W": "weight gradients"}
Task = tuple[str, int, int]  # (a kind, micro-batch, chunk or virtual stage)


@dataclass(frozen=True)
class Event:
    """One task (F, B or W) of one micro-batch through one chunk on one stage; seconds."""

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
    pp (Megatron-LM's forward_backward_pipelining_with_interleaving). zb-h1, zb-h2, zb-v: the
    handcrafted schedules of arXiv 2401.10241, its figure 3 and section 6.

    Raises:
        UsageError: the schedule does not exist for these sizes.
    """
    if schedule not in SCHEDULES:
        raise UsageError(f"unknown schedule {schedule!r}; known: {', '.join(SCHEDULES)}")
    if schedule == "zb-v" and vpp != 2:
        raise UsageError(f"zb-v has two chunks a stage: vpp 2, not {vpp}")
    if schedule not in ("interleaved", "zb-v") and vpp > 1:
        raise UsageError(f"{schedule} has no vpp {vpp}: use interleaved")
    if schedule == "zb-v":
        return _v_shaped(stage, pp, n_micro)
    if schedule in ZERO_BUBBLE:
        return _handcrafted(stage, pp, n_micro, 1 if schedule == "zb-h1" else 2)
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


def _handcrafted(stage: int, pp: int, n_micro: int, depth: int) -> list[Task]:
    """ZB-H1 (depth 1) and ZB-H2 (depth 2), figure 3: `depth` forwards more in advance for every
    stage behind, and each W as many micro-batches late for every stage before. So all stages hold
    the same number of micro-batches."""
    ahead, late = depth * (pp - stage - 1), depth * stage
    tasks = [("F", micro, 0) for micro in range(min(ahead, n_micro))]
    for micro in range(n_micro):
        if micro + ahead < n_micro:
            tasks.append(("F", micro + ahead, 0))
        tasks.append(("B", micro, 0))
        if micro >= late:
            tasks.append(("W", micro - late, 0))
    return tasks + [("W", micro, 0) for micro in range(max(0, n_micro - late), n_micro)]


def _v_shaped(stage: int, pp: int, n_micro: int) -> list[Task]:
    """ZB-V, section 6: chunk 0 goes down the stages, chunk 1 comes back up.

    The rounds are those of at least 2 pp - 1 micro-batches. Tasks of micro-batches that are not
    there are left out.
    """
    total, behind = max(n_micro, 2 * pp - 1), pp - stage
    warm = ["F0"] * (2 * behind - 1) + ["F1", "F0"] * stage + ["F1", "B1", "W1"] * behind
    steady = ["F0", "B0", "W0", "F1", "B1", "W1"] * (total - pp)
    drain = ["B0", "B1"] * stage + ["B0", "W0"] * behind + ["W1"] * stage + ["W0"] * stage
    done: Counter[str] = Counter()
    tasks = []
    for task in warm + steady + drain:
        tasks.append((task[0], done[task], int(task[1])))
        done[task] += 1
    return [task for task in tasks if task[1] < n_micro]


def simulate(
    schedule: str,
    pp: int,
    n_micro: int,
    vpp: int = 1,
    forward_s: float | list[float] = 1.0,
    backward_s: float | list[float] = 2.0,
    p2p_s: float = 0.0,
    weight_s: float | list[float] | None = None,
) -> list[Event]:
    """Every event; the times are of one chunk, one number or one a stage.

    weight_s: the part of backward_s that is W, in a zero-bubble schedule; without it, half. A task
    starts when its stage is free and what it needs has arrived: forward from the stage (or chunk)
    before, backward from the one behind and its own forward, W its own backward.

    Raises:
        UsageError: no such schedule, or W takes longer than the backward that it is part of;
            RuntimeError (ours): the order deadlocks.
    """
    if min(pp, n_micro, vpp) < 1:
        raise UsageError(f"pp {pp}, micro-batches {n_micro} and vpp {vpp} must be positive")
    split = schedule in ZERO_BUBBLE
    kinds = "FBW" if split else "FB"
    n_events = len(kinds) * pp * n_micro * vpp
    if pp > MOST_STAGES or n_events > MOST_EVENTS:
        raise UsageError(
            f"pp {pp} with {n_events} events is too much to simulate: at most pp"
            f" {MOST_STAGES} and {MOST_EVENTS} events ({len(kinds)} pp n_micro vpp)"
        )
    seconds = dict.fromkeys("FBW", [0.0] * pp)
    seconds["F"], seconds["B"] = _per_stage(forward_s, pp), _per_stage(backward_s, pp)
    if split:
        whole = seconds["B"]
        seconds["W"] = [b / 2 for b in whole] if weight_s is None else _per_stage(weight_s, pp)
        seconds["B"] = [b - w for b, w in zip(whole, seconds["W"], strict=True)]
        if min(seconds["B"]) < 0:
            raise UsageError(
                f"weight gradients take {weight_s}, more than a backward's {backward_s}"
            )
    queues = [order(schedule, stage, pp, n_micro, vpp)[::-1] for stage in range(pp)]
    stage_of, place_of = _places(schedule, pp, vpp)
    done: dict[Task, float] = {}  # (kind, micro-batch, virtual stage) -> end
    free, events = [0.0] * pp, []
    while any(queues):
        n_before = len(events)
        for stage, queue in enumerate(queues):
            while queue:
                kind, micro, chunk = queue[-1]
                place = place_of[stage, chunk]
                needs = _needs(kind, micro, place, pp * vpp - 1)
                if any(need not in done for need in needs):
                    break
                queue.pop()
                # What comes from this stage itself, as where ZB-V turns, is there at once.
                arrived = [done[n] + (p2p_s if stage_of[n[2]] != stage else 0.0) for n in needs]
                start = max([free[stage], *arrived])
                end = start + seconds[kind][stage]
                done[kind, micro, place] = free[stage] = end
                events.append(Event(stage, kind, micro, chunk, start, end))
        if len(events) == n_before:
            raise RuntimeError(f"{schedule} deadlocks at pp {pp}, {n_micro}, vpp {vpp}")
    return events


def _per_stage(value: float | list[float], pp: int) -> list[float]:
    return value if isinstance(value, list) else [value] * pp


def _places(schedule: str, pp: int, vpp: int) -> tuple[list[int], dict[tuple[int, int], int]]:
    """(the stage of each virtual stage, (stage, chunk) -> its virtual stage)."""
    stages = [
        pp - 1 - at % pp if schedule == "zb-v" and at >= pp else at % pp for at in range(pp * vpp)
    ]
    return stages, {(stage, at // pp): at for at, stage in enumerate(stages)}


def _needs(kind: str, micro: int, place: int, last: int) -> list[Task]:
    """The tasks that must be done before one of virtual stage `place` of 0 to `last`."""
    if kind == "F":
        return [("F", micro, place - 1)] if place > 0 else []
    if kind == "W":
        return [("B", micro, place)]
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


def longest_wait_s(events: list[Event]) -> float:
    """The most that a stage waits between its own first start and its own last end.

    The zero-bubble paper's bubble: each stage begins the next step when it has ended this one, for
    its optimizer does not wait for the other stages. In gpipe, 1f1b and interleaved with equal
    stages it is the makespan less a stage's work, for the first stage starts first and ends last.
    """
    stages: dict[int, list[Event]] = {}
    for e in events:
        stages.setdefault(e.stage, []).append(e)
    busy = busy_s(events)
    return max(makespan(mine) - busy[stage] for stage, mine in stages.items())


def zero_bubble_form(
    schedule: str, pp: int, n_micro: int, forward_s: float, input_s: float, weight_s: float
) -> tuple[float, int]:
    """(bubble in seconds, most micro-batches that a stage holds) of arXiv 2401.10241.

    With T_F, T_B, T_W = forward_s, input_s, weight_s of a stage (table 2; section 6 for zb-v):
    zb-h1   (pp - 1) (T_F + T_B - T_W) and pp       from pp micro-batches on, T_W up to T_F
    zb-h2   (pp - 1) (T_F + T_B - 2 T_W) and 2 pp - 1    from 2 pp - 1 on, T_W up to T_F and up to
            (T_F + T_B) / 2
    zb-v    0 and pp    from 2 pp - 1 on, T_F = T_B = T_W; no form for other times is known
    A bubble is `longest_wait_s`. A micro-batch is held until its W, and no message takes time.

    Raises:
        UsageError: the form does not hold for these numbers; it says which.
    """
    least = pp if schedule == "zb-h1" else 2 * pp - 1
    times = f"(T_F {forward_s:g}, T_B {input_s:g}, T_W {weight_s:g})"
    if n_micro < least:
        raise UsageError(
            f"the formula of {schedule} needs at least {least} micro-batches at pp {pp}"
        )
    if schedule == "zb-v":
        if not forward_s == input_s == weight_s:
            raise UsageError(f"the formula of zb-v needs T_F = T_B = T_W {times}")
        return 0.0, pp
    if weight_s > forward_s:
        raise UsageError(f"the formula of {schedule} needs T_W up to T_F {times}")
    depth = 1 if schedule == "zb-h1" else 2
    each = forward_s + input_s - depth * weight_s
    if each < 0:
        raise UsageError(f"the formula of {schedule} needs 2 T_W up to T_F + T_B {times}")
    return (pp - 1) * each, depth * (pp - 1) + 1


def in_flight(events: list[Event], stage: int) -> int:
    """Most micro-batch chunks whose forward is done and whose last task is not, on a stage: the
    backward, or W where it is apart."""
    last = "W" if any(e.kind == "W" for e in events) else "B"
    now = most = 0
    for e in sorted((e for e in events if e.stage == stage), key=lambda e: e.start):
        now += (e.kind == "F") - (e.kind == last)
        most = max(most, now)
    return most


def text(events: list[Event], pp: int, unit: float = 1.0) -> str:
    """One line a stage; a column is `unit` seconds. Digits are F, small letters B, capitals W."""
    width = round(makespan(events) / unit)
    rows = [["."] * width for _ in range(pp)]
    for e in events:
        letter = chr(ord("a") + e.micro % 26)
        sign = {"F": str(e.micro % 10), "B": letter, "W": letter.upper()}[e.kind]
        for column in range(round(e.start / unit), min(round(e.end / unit), width)):
            rows[e.stage][column] = sign
    return "\n".join(f"stage {i:>3} {''.join(row)}" for i, row in enumerate(rows)) + "\n"


def draw(events: list[Event], pp: int, title: str, path: Path, force: bool = False) -> None:
    """The pipeline as a picture: forward, backward and the weights' gradients in their colours of
    every picture; later chunks lighter."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 0.6 * pp + 1.5), layout="tight")
    axis = figure.subplots()
    for e in events:
        colour, span = of_part(KINDS[e.kind]), e.end - e.start
        axis.barh(e.stage, span, left=e.start, color=colour, alpha=1 / (1 + e.chunk), ec="white")
        if len(events) <= 400:
            middle = e.start + span / 2
            ink = "black" if e.kind == "F" or e.chunk else "white"
            axis.text(
                middle, e.stage, str(e.micro), ha="center", va="center", fontsize=7, color=ink
            )
    axis.invert_yaxis()
    axis.set_yticks(range(pp), [f"stage {i}" for i in range(pp)])
    axis.set_xlabel("time (forward of one chunk = 1)")
    axis.set_title(title)
    drawing.write(figure, path, 120, force)
