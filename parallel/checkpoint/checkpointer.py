"""Saves and loads the training state of a run: what the trainer calls, on all ranks alike.

Every rank writes the pieces that it owns (contents.py, rank_files.py) into a hidden folder. Rank 0
then writes the manifest and gives the folder its name (folders.py). Loading is in loading.py.
docs/checkpoints.md says why the libraries' own formats are not used.
"""

import errno
import os
import shutil
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from base.storage import STATE_BYTES_PER_PARAM, publish, state_bytes
from base.units import GIB
from parallel.checkpoint import folders, loading
from parallel.checkpoint.contents import Piece, slices_to_save
from parallel.checkpoint.host_copy import HostCopy
from parallel.checkpoint.rank_files import write_rank_file
from parallel.config.run_spec import RunSpec
from parallel.ranks import Ranks, attempt
from parallel.record.schema import utc_now


@dataclass
class Event:
    """A save, load or deletion that ended, as rank 0 reports it.

    blocked_s: how long training waited. total_s: seconds until it was on disk. problem: "" when it
    went well. changed: what this run computes otherwise than the one that saved what was loaded.
    """

    event: str
    step: int
    path: str
    blocked_s: float = 0.0
    total_s: float = 0.0
    bytes: int = 0
    ranks: int = 1
    problem: str = ""
    changed: str = ""

    def line(self) -> str:
        """Returns the line of the log, in Megatron-LM's words where it went well."""
        if self.problem:
            return f"  could not {self.event} checkpoint at iteration {self.step}: {self.problem}"
        if self.event == "load":
            line = f"  successfully loaded checkpoint from {self.path} at iteration {self.step}"
            return f"{line}; this run differs from it: {self.changed}" if self.changed else line
        folder = str(Path(self.path).parent)
        return f"  successfully saved checkpoint at iteration {self.step:7d} to {folder}"


class _Snapshot(NamedTuple):
    """What this rank saves of the state after `step` steps.

    scalars: the manifest's adam_step and scaler. began: when the save began. blocked_s: how long
    training waited for the snapshot; None when it waits until all is on disk.
    """

    step: int
    pieces: list[Piece]
    scalars: dict[str, Any]
    began: float
    blocked_s: float | None = None


class Checkpointer:
    """Saves and loads one run's state.

    facts: run.json, of which rank 0 takes what every manifest says. device: what the engine trains
    on.
    copying: for the log, whether training waits for a save; "" where nothing was to be copied.
    """

    def __init__(
        self,
        engine: Any,
        spec: RunSpec,
        facts: dict[str, Any],
        save_to: Path,
        ranks: Ranks,
        device: torch.device,
    ):
        self.engine, self.spec, self.facts, self.save_to = engine, spec, facts, save_to
        self.ranks = ranks
        self._events: deque[Event] = deque()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future | None = None  # the save in the background
        self._copy: HostCopy | None = None  # what that one writes
        copies_wanted = device.type == "cuda" if spec.async_save is None else spec.async_save
        self.copying = self._start_copying(device) if spec.save_interval and copies_wanted else ""
        if ranks.rank == 0 and spec.save_interval:
            folders.tidy(save_to)

    def _start_copying(self, device: torch.device) -> str:
        """Starts to copy the state to host memory at each save, if every node has enough of it.
        Returns what the log says of it."""
        ranks = self.ranks.per_node
        needed = self.predicted_bytes() / self.ranks.world * ranks
        free = psutil.virtual_memory().available
        if allowed := int(os.environ.get("SLURM_MEM_PER_NODE") or 0):  # MiB; a job with more dies
            free = min(free, allowed * 2**20 - ranks * psutil.Process().memory_info().rss)
        free = min(self.ranks.gather(free))
        sizes = (
            f"copies of the state, {needed / GIB:.2f} GiB on a node with {free / GIB:.2f} GiB free"
        )
        if needed > free:
            return f" saving while training waits: no memory for {sizes}"
        self._copy = HostCopy(device)
        return f" saving while training goes on: {sizes}"

    def events(self) -> list[Event]:
        """Returns what ended since the last call; rank 0's are to be reported."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def _note(self, event: str, step: int, path: Path, **values: Any) -> None:
        """Keeps an event for the next call of `events`."""
        self._events.append(Event(event, step, str(path), ranks=self.ranks.world, **values))

    def raise_failure(self) -> None:
        """Raises what a save in the background raised, if it has ended."""
        if self._saving is not None and self._saving.done():
            self.wait()

    def load(self, path: Path | None) -> int:
        """Fills the engine from rank 0's `path`, a checkpoint or weights alone (see loading.load),
        and returns the step to resume from, 0 without a path."""
        began = time.perf_counter()
        loaded = loading.load(self.engine, self.spec, self.ranks, path)
        if loaded is None:
            return 0
        seconds = time.perf_counter() - began
        self._note("load", **loaded._asdict(), blocked_s=seconds, total_s=seconds)
        if path == self.save_to:  # a kill after a save may have kept it from deleting
            self._retain(loaded.step)
        return loaded.step

    def due(self, step: int) -> bool:
        """Returns whether the state after `step` steps is to be saved."""
        every = self.spec.save_interval
        return bool(every) and (step % every == 0 or step == self.spec.steps)

    def save(self, step: int) -> None:
        """Saves the state after `step` steps. A full disk ends the save, not the run."""
        self.wait()
        began = time.perf_counter()
        state = self.engine.state()
        scalars = {"adam_step": state.adam_step, "scaler": state.scaler}
        pieces = slices_to_save(state.pieces)
        if self._copy is None:
            self._write(_Snapshot(step, pieces, scalars, began))
            return
        pieces = self._copy.of(pieces)
        snapshot = _Snapshot(step, pieces, scalars, began, time.perf_counter() - began)
        self._saving = self._thread.submit(self._write, snapshot)

    def wait(self) -> None:
        """Waits until the background save has ended, and raises what it raised; its event's
        blocked_s counts the wait."""
        if self._saving is None:
            return
        saving, self._saving, began = self._saving, None, time.perf_counter()
        error = saving.exception()  # waits
        for event in self._events:  # rank 0's
            if event.event == "save":
                event.blocked_s += time.perf_counter() - began
        if error is not None:
            raise error

    def _write(self, snapshot: _Snapshot) -> None:
        """Writes a snapshot in three rounds, so that no rank goes on where another has failed:
        check the room, write the files, publish the folder."""
        if self._copy is not None:
            self._copy.finish()
        aside = folders.aside_of(self.save_to, snapshot.step)
        _, problem = self.ranks.on_first(attempt, self._make_room, aside)
        entries = []
        if not problem:
            ranks = self.ranks
            arguments = aside, ranks.rank, snapshot.pieces, ranks.tick
            written = ranks.on_all(attempt, lambda: entries.append(write_rank_file(*arguments)))
            problem = next((reason for _, reason in written if reason), "")
            # To rank 0 alone, and once: they grow with ranks times parameters.
            entries = [] if problem else ranks.gather(entries[0], to_all=False)
        self.ranks.on_first(self._finish, snapshot, aside, entries, problem)

    def _make_room(self, aside: Path) -> None:
        """Makes the hidden folder, empty. Raises an OSError where the disk has no room for what
        will be written, or gives no permission."""
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        needed, free = self.predicted_bytes(), shutil.disk_usage(aside).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"{needed} bytes are needed, {free} are free", str(aside))

    def predicted_bytes(self) -> int:
        """Returns the bytes of one checkpoint's tensors; they do not depend on the layout."""
        return int(state_bytes(self.spec.model.n_params))

    def _finish(
        self, snapshot: _Snapshot, aside: Path, entries: list[dict[str, Any]], problem: str
    ) -> None:
        """Does rank 0's work once the files are written: publishes the checkpoint and deletes old
        ones, or removes what a failed save left."""
        step, folder = snapshot.step, self.save_to / folders.name_of(snapshot.step)
        if not problem:
            _, problem = attempt(self._publish, snapshot, aside, entries)
        total_s = time.perf_counter() - snapshot.began
        size = sum(entry["bytes"] for entry in entries)
        blocked_s = total_s if snapshot.blocked_s is None else snapshot.blocked_s
        times = {"blocked_s": blocked_s, "total_s": total_s}
        self._note("save", step, folder, bytes=size, problem=problem, **times)
        if problem:
            shutil.rmtree(aside, ignore_errors=True)
            return
        self._retain(step)

    def _retain(self, step: int) -> None:
        """Deletes the checkpoints that are not to be kept, once that of `step` is whole."""
        rules = self.spec.keep_last, self.spec.keep_every
        _, problem = attempt(folders.retain, self.save_to, *rules)
        if problem:
            self._note("delete", step, self.save_to, problem=problem)

    def _publish(self, snapshot: _Snapshot, aside: Path, entries: list[dict[str, Any]]) -> None:
        """Writes the manifest and gives the folder its name. An OSError says that the files do not
        hold the whole state."""
        elements = sum(p["stop"] - p["start"] for entry in entries for p in entry["pieces"])
        counted, predicted = STATE_BYTES_PER_PARAM * elements, self.predicted_bytes()
        if counted != predicted:
            raise OSError(0, f"{counted} bytes of state, predicted were {predicted}", str(aside))
        facts, spec, step = self.facts, self.spec, snapshot.step
        data = {name: facts["data"][name] for name in ("path", "sha256")}
        manifest = {
            "format": folders.FORMAT,
            "step": step,
            "time_utc": utc_now(),
            "run": facts["run"],
            **{name: getattr(spec, name) for name in ("engine", "implementation", "precision")},
            "world_size": self.ranks.world,
            "model": spec.model.as_dict(),
            **spec.as_facts(),
            "commit": facts["git"]["commit"],
            "data": data | {"seed": spec.seed, "next_step": step},
            **snapshot.scalars,
            "files": entries,
        }
        folders.write_manifest(aside, manifest)
        publish(aside, self.save_to / folders.name_of(step))
