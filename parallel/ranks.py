"""What all ranks tell each other from host memory, and how they work on a checkpoint together: each
does its part and hears what the others did."""

import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from base.errors import Answer, UsageError
from parallel.record.hangs import waiting_for_others

HEARTBEAT_S = 1.0  # how often the ranks report their progress to each other


class Ranks:
    """The ranks of a run; all of them call each method alike.

    on_progress: called whenever one of them makes progress, for the watchdog. per_node: how many
    share a machine; by default all do.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        on_progress: Callable[[], None] = lambda: None,
        per_node: int | None = None,
    ):
        self.rank, self.world, self.on_progress, self._ticks = rank, world, on_progress, 0
        self.per_node = per_node or world
        # A group of its own: a thread that saves communicates while the main thread trains.
        self._group = dist.new_group(backend="gloo") if world > 1 else None

    def tick(self) -> None:
        self._ticks += 1
        self.on_progress()

    def gather(self, value: Any, to_all: bool = True) -> list[Any]:
        """Returns every rank's value, on every rank or on rank 0 alone."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        if to_all:
            dist.all_gather_object(values, value, group=self._group)
            return values
        # Over a tree. gloo's own gather connects rank 0 with all others, for the run's whole time.
        values, reach = [value], 1  # of this rank and those behind it
        while reach < self.world and not self.rank & reach:
            if self.rank + reach < self.world:
                box: list[Any] = [None]
                dist.recv_object_list(box, group=self._group, group_src=self.rank + reach)
                values += box[0]
            reach *= 2
        if self.rank:
            dist.send_object_list([values], group=self._group, group_dst=self.rank - reach)
        return values

    def on_all(self, work: Callable, *arguments: Any) -> list[Any]:
        """Has every rank do its work and tick; returns what each returned, on every rank.

        A rank that is done waits for the slowest, perhaps for longer than the watchdog allows.
        Once per second the ranks therefore tell each other whether anybody has made progress.

        Raises:
            RuntimeError: on one rank the work raised what it should not.
        """
        finished = threading.Event()
        own_outcome: list[Any] = []  # one, once the work is done
        outcomes: list[Any] = []  # of all ranks
        failure: list[Exception] = []  # of the heartbeat

        def heartbeat() -> None:
            """Shares progress, on a thread: the main one's stack shows where work hangs."""
            last_ticks = [0 for _ in range(self.world)]
            try:
                while not outcomes:
                    finished.wait(HEARTBEAT_S)
                    reports = self.gather((self._ticks, list(own_outcome)))
                    ticks = [count for count, _ in reports]
                    pairs = zip(ticks, last_ticks, strict=True)
                    if any(count > last for count, last in pairs):
                        self.on_progress()
                    last_ticks = ticks
                    if all(outcome for _, outcome in reports):
                        outcomes.extend(outcome for _, (outcome,) in reports)
            except Exception as error:  # a rank died; raised below
                failure.append(error)

        thread = threading.Thread(target=heartbeat, daemon=True, name="checkpoint heartbeat")
        thread.start()
        try:
            own_outcome.append(work(*arguments))
        except Exception as error:  # every rank must hear of it, or it waits for this one for ever
            traceback.print_exc()
            own_outcome.append(RuntimeError(f"rank {self.rank}: {type(error).__name__}: {error}"))
        finished.set()
        with waiting_for_others():
            thread.join()
        if failure:
            raise failure[0]
        for outcome in outcomes:
            if isinstance(outcome, RuntimeError):
                raise outcome
        return outcomes

    def on_first(self, work: Callable, *arguments: Any) -> Any:
        """Has rank 0 do the work; returns what it returned, on every rank."""
        results: list[Any] = []
        self.on_all(lambda: None if self.rank else results.append(work(*arguments)))
        if self.world > 1:  # once: it may be large
            results = results or [None]
            dist.broadcast_object_list(results, src=0, group=self._group)
        return results[0]


def attempt(work: Callable, *arguments: Any) -> Answer:
    """Returns the work's result or, where a user's mistake or the disk stopped it, none and `why`:
    that reason in words."""
    try:
        return Answer(work(*arguments))
    except UsageError as error:
        return Answer(None, str(error))
    except OSError as error:
        at_file = f" ({error.filename})" if error.filename else ""
        return Answer(None, f"{error.strerror or error}{at_file}")
