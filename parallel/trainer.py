"""The training loop: step, validate, save, and record what was measured.

Every rank has a Trainer and calls the same methods in the same order, because most of them
communicate with the other ranks. Rank 0 writes the run folder.
"""

import contextlib
import functools
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from base.errors import UsageError
from parallel import batches, engines, token_files
from parallel.checkpoint import folders
from parallel.checkpoint.attempts import nothing_to_train, other_schedules
from parallel.checkpoint.checkpointer import Checkpointer
from parallel.config.run_spec import RunSpec
from parallel.engines import devices
from parallel.engines.optim import lr_at
from parallel.measure import efficiencies, load_and_memory, profiler, ranges, training_metrics
from parallel.measure.energy import Energy
from parallel.measure.own_times import OwnTimes
from parallel.measure.rank_judge import Verdict
from parallel.measure.routing import Routing
from parallel.measure.step_parts import Breakdown
from parallel.ranks import Ranks
from parallel.record import facts, lines
from parallel.record.ends import Kind
from parallel.record.hangs import Watchdog
from parallel.record.launch import TIME_LIMIT_SIGNAL, Launch, signal_words, tell_torchrun
from parallel.record.reader import read_run, read_saves, read_windows
from parallel.record.schema import HANGS
from parallel.record.signals import Interruption
from parallel.record.writer import RunFolder

TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: interrupted, and saved
GC_STEPS = 100


@contextlib.contextmanager
def garbage_collected_together() -> Iterator[Callable[[int], None]]:
    """Collects garbage every GC_STEPS steps: the yielded function is called with the number of
    steps done. Left alone, each rank collects in another step, and the others wait for it. What was
    built before is never looked at again."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield lambda done: None if done % GC_STEPS else gc.collect()
    finally:
        gc.unfreeze()
        gc.enable()


@dataclass
class Job:
    """The job of one rank: what it is to train, on what, and who may stop it.

    facts: run.json, which rank 0 makes, adds to and writes; the other ranks have none. kernels: the
    kernel set. interruption: what asked the run to stop. started: time.perf_counter() at the
    program's start.
    """

    spec: RunSpec
    facts: dict[str, Any]
    folder: RunFolder
    data: token_files.Data
    device: torch.device
    kernels: str
    launch: Launch
    interruption: Interruption
    started: float


class Trainer:
    """The training of one rank. breakdown: the measurement of where its time goes, or None."""

    def __init__(
        self, job: Job, ranks: Ranks, engine: engines.Engine, breakdown: Breakdown | None = None
    ):
        self.spec, self.facts, self.folder, self.data = job.spec, job.facts, job.folder, job.data
        self.device, self.interruption, self.started = job.device, job.interruption, job.started
        self.ranks, self.engine, self.breakdown = ranks, engine, breakdown
        spec, path = self.spec, self.folder.path
        self.rank, self.world = job.launch.rank, job.launch.world_size
        self.is_rank_0 = self.rank == 0
        coords = spec.layout.coords(self.rank)
        self.dp_rank, self.unread = coords["dp"], batches.unread(spec, coords["pp"], self.device)
        hung = functools.partial(self.folder.fail, Kind.HANG, rank=self.rank)
        gpu = None
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            gpu = functools.partial(devices.gpu_work, stream, self.rank)
        self.watchdog = Watchdog(path / HANGS, self.rank, self.world, spec.hang_after_s, hung, gpu)
        self.save_to = path / folders.SAVES
        self.ranks.on_progress = self.watchdog.tick
        self.checkpointer = Checkpointer(
            self.engine, spec, self.facts, self.save_to, self.ranks, self.device
        )
        self.rows: list[dict[str, Any]] = []  # rank 0's: steps.csv, of earlier attempts too
        self.rows_since_line: list[dict[str, Any]] = []
        self.stopping = False  # a signal came to a rank before the last step's end
        self.measured = training_metrics.Measured()
        self.own_times = OwnTimes(spec.layout, self.device, self.rank, self.ranks.gather)
        self.routing = None
        if spec.model.experts:
            self.routing = Routing(spec, self.engine.modules, self.device)

    def run(self, source: Path | None) -> int:
        """Trains to the last step, from rank 0's checkpoint `source` if there is one.

        Returns the exit status: TRY_AGAIN when interrupted, with the state saved; 1 on rank 0 after
        NaN.

        Raises:
            UsageError: the checkpoint to load is none, damaged, another model's or at the end.
            OSError: the disk did not take the run's end.
        """
        with self.watchdog, contextlib.ExitStack() as stack:
            vocab_size = self.spec.model.vocab_size
            self.data = token_files.scanned(self.data, vocab_size, self.ranks)
            self._write_header()
            first = self._load(source)
            steps = (self._made(self.data.train, step) for step in range(first, self.spec.steps))
            self.made = stack.enter_context(
                batches.ahead(itertools.chain.from_iterable(steps), self.device)
            )
            profiled = stack.enter_context(self._profiler(first))
            self.load = load_and_memory.Load()
            if self.is_rank_0:
                self.energy = Energy(self.device)
            self.last_lap = self._now()
            if self.breakdown:
                stack.callback(self.breakdown.file.close)
                self.breakdown.forget()  # building the engine
            self.measured.startup_s = time.perf_counter() - self.started
            collect = stack.enter_context(garbage_collected_together())
            for done in range(first + 1, self.spec.steps + 1):
                self.step(done)
                collect(done)  # the next step's time holds it
                interval = self.spec.eval_interval
                if done == self.spec.steps or (interval and done % interval == 0):
                    self.validate(done)
                    self.measured.evaluation_s += self._end_of_other_work()
                profiled()
                if self.save_if_due(done):
                    return TRY_AGAIN
        return self.finish()

    # --- before the first step ---

    def _write_header(self) -> None:
        if self.is_rank_0:
            self.facts |= {"engine": self.engine.describe(), "data": self.data.facts()}
            if self.spec.end_of_text is not None:
                attended = batches.attended_seq_len(self.data.train, self.spec)
                self.facts["data"]["attended_seq_len"] = attended
            self.folder.update(self.facts)
            for line in lines.header(self.spec, self.facts):
                self._say(line)
            if self.own_times.is_on:
                self.folder.slow_ranks([])
            if self.checkpointer.copying:
                self._say(self.checkpointer.copying)

    def _load(self, source: Path | None) -> int:
        """Loads the checkpoint; returns how many steps are done."""
        if source is not None:
            self._say(f" loading checkpoint from {source}")
        first = self.checkpointer.load(source)
        self._report_checkpoints()
        if self.is_rank_0 and "attempts" in self.facts:
            self._take_over_attempts(first)
        if first == self.spec.steps:
            if self.is_rank_0 and not self.rows:
                raise UsageError(nothing_to_train(self.spec, folders.name_of(first)))
            self.validate(first)
        return first

    def _take_over_attempts(self, first: int) -> None:
        """Keeps earlier attempts' rows up to step `first`, and notes which schedule they had."""
        self.rows = [row for row in read_run(self.folder.path).steps if row["step"] <= first]
        self.measured.wall_s = sum(row["step_s"] for row in self.rows)
        attempts = self.facts["attempts"]
        attempts[-1]["kept_to"] = first
        first_row = self.rows[0]["step"] if self.rows else 1
        mixed = other_schedules(attempts, self.spec.steps, first_row)
        if mixed and self.spec.lr_schedule != "constant":
            self.facts["go_on"] = mixed
        self.folder.update(self.facts)

    def _profiler(self, first: int) -> contextlib.AbstractContextManager:
        in_nsys = "nsys" in (facts.profiler(self.spec) or {"tool": ""})["tool"]
        steps = self.spec.profiled_steps
        if self.is_rank_0 and steps and first >= steps[-1]:
            self._say(f" no trace: the profile_steps {self.spec.profile_steps} are over")
        return profiler.attach(self.spec, in_nsys, self.device, self.rank, self.folder.path, first)

    # --- steps ---

    def step(self, done: int) -> None:
        """Trains the optimizer step after which `done` are done."""
        self.watchdog.tick()  # deepspeed_pipe's middle stages take no batches
        lr = lr_at(self.spec, done - 1)
        made = itertools.islice(self.made, self.spec.layout.n_micro)
        has_line = done % self.spec.log_interval == 0 or done == self.spec.steps
        if self.routing:
            self.routing.begin(has_line)
        data_s = self.measured.data_s
        self.own_times.begin()
        result = self.engine.step(self._batches(made), lr, lambda: bool(self.interruption.signal))
        expert_load = self.routing.read() if self.routing and has_line else None
        step_s = self._lap()
        if self.breakdown:
            self.breakdown.lap(done, step_s)
        self._report_slow_ranks(*self.own_times.lap(done, step_s, self.measured.data_s - data_s))
        self.stopping = result.stop
        if not self.is_rank_0:
            return
        row = {
            "step": done,
            "step_s": step_s,
            "lr": lr,
            "skipped": int(result.skipped),
            "tokens": self.spec.tokens_per_step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "loss_scale": result.loss_scale,
        }
        if self.routing:
            row["expert_load"] = expert_load
        self.rows.append(row)
        self.rows_since_line.append(row)
        self.folder.step(row)
        if has_line:
            gpu, peak = self.facts["host"]["gpu"], load_and_memory.peak_memory(self.device)
            peak_bytes = peak["resident" if gpu is None else "allocated"]
            rows, self.rows_since_line = self.rows_since_line, []
            skipped = sum(row["skipped"] for row in rows)
            nans = sum(row["loss"] != row["loss"] for row in rows)
            attended = self.facts["data"].get("attended_seq_len")
            line = lines.iteration_line(self.spec, rows, skipped, nans, gpu, peak_bytes, attended)
            self._say(line)

    def _report_slow_ranks(self, rows: list[dict[str, Any]], verdicts: list[Verdict]) -> None:
        if rows:
            self.folder.slow_ranks(rows)
        for verdict in verdicts:
            self._say(f" {verdict}")

    def _made(self, tokens: token_files.Tokens, step: int) -> Iterator[engines.Batch]:
        """Yields this rank's micro-batches of a step, in memory from which a GPU copies alone."""
        if self.unread is not None:
            yield from itertools.repeat(self.unread, self.spec.layout.n_micro)
            return
        for batch in batches.batches(tokens, self.spec, self.dp_rank, step):
            yield tuple(t.pin_memory() for t in batch) if self.device.type == "cuda" else batch

    def _batches(self, made: Iterator[engines.Batch]) -> Iterator[engines.Batch]:
        """Yields micro-batches on the device; counts the seconds that training waits for them."""
        while True:
            before = time.perf_counter()
            with ranges.region("data"):
                batch = next(made, None)
            self.measured.data_s += time.perf_counter() - before
            self.watchdog.tick()
            if batch is None:
                return
            with ranges.region("move"):
                moved = tuple(tensor.to(self.device, non_blocking=True) for tensor in batch)
            yield moved

    def _now(self, wait: bool = True) -> float:
        """Returns the clock, in seconds, when the device has finished what was asked of it. A step
        reads its loss at its end in any case; within a step nothing waits for a clock."""
        if wait and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _lap(self, wait: bool = True) -> float:
        """Returns the seconds since the last lap."""
        last_lap, self.last_lap = self.last_lap, self._now(wait)
        return self.last_lap - last_lap

    def _end_of_other_work(self, wait: bool = True) -> float:
        """Leaves what happened since the last lap out of training; returns its seconds."""
        seconds = self._lap(wait)
        if self.breakdown:
            self.breakdown.forget()
        return seconds

    # --- validation ---

    def validate(self, done: int) -> None:
        """Measures the loss on held-out text after `done` steps: the same sequences every time."""
        n = self.spec.eval_steps
        if n == 0:
            return
        self.watchdog.tick()
        training_data_s = self.measured.data_s
        made = itertools.chain.from_iterable(self._made(self.data.val, step) for step in range(n))
        with ranges.validation():
            loss = self.engine.evaluate(self._batches(made), n * self.spec.layout.n_micro)
        self.measured.data_s = training_data_s
        self.measured.validations.append((done, loss))
        if self.is_rank_0:
            self._say(lines.validation_line(done, loss))

    # --- checkpoints ---

    def save_if_due(self, done: int) -> bool:
        """Saves the state after `done` steps where it is due or a signal came.

        Returns whether the run is to end now: it was interrupted, and has saved.
        """
        if not self.spec.save_interval:
            return False
        self.checkpointer.raise_failure()
        last = done == self.spec.steps
        stop = self.stopping and not last
        if not (stop or self.checkpointer.due(done)):
            self._report_checkpoints()
            return False
        self._save(done)
        if stop or last:
            self.checkpointer.wait()
        problem = self._report_checkpoints()
        if not stop:
            # A GPU may go on copying what is saved; what was to be waited for has been.
            self.measured.checkpoint_s += self._end_of_other_work(wait=False)
        elif self.is_rank_0:
            outcome = f"could not save: {problem}" if problem else f"saved step {done}"
            signal = self.interruption.signal or "a signal to another rank"
            reason = f"{signal_words(signal)}, {outcome}"
            self._say(f" interrupted by {reason}; the same command goes on")
            limit = signal == TIME_LIMIT_SIGNAL
            self.folder.interrupt(Kind.TIME_LIMIT if limit else Kind.SIGNAL, reason)
        return stop

    def _save(self, done: int) -> None:
        if self.is_rank_0:
            self._say(f" saving checkpoint at iteration {done} to {self.save_to}")
            with contextlib.suppress(OSError):  # a full disk ends no training
                self.folder.sync()  # an attempt that loads this finds the rows up to here
        self.checkpointer.save(done)

    def _report_checkpoints(self) -> str:
        """Writes which saves and loads have ended; returns what went wrong with the last, if it
        did."""
        problem = ""
        for event in self.checkpointer.events() if self.is_rank_0 else ():
            problem = event.problem
            self._say(event.line())
            self.folder.checkpoint(vars(event))
        return problem

    # --- the end ---

    def finish(self) -> int:
        """Records the end of a run that did all its steps; returns its exit status, 1 where it is
        NaN."""
        self._report_slow_ranks(*self.own_times.judged())
        measured = self.measured
        measured.peak = load_and_memory.peak_memory(self.device)
        # Every rank got here, so the run is complete.
        measured.peak_all = load_and_memory.largest(self.ranks.gather(measured.peak))
        load = self.load.facts(self.ranks.gather)
        where_time_went = self._where_time_went() if self.breakdown else ""
        if not self.is_rank_0:
            return 0
        self.facts["load"] |= load
        self.folder.update(self.facts)
        if broken := training_metrics.ended_in_nan(self.rows, measured.validations):
            self.folder.fail(Kind.DIVERGED, broken, 0)
            self.folder.close()
            print(f"parallel.train: {broken}", file=sys.stderr, flush=True)
            tell_torchrun(f"parallel.train: {broken}")
            return 1
        measured.wall_s += time.perf_counter() - self.started
        measured.energy_j, measured.energy_source = self.energy.joules(), self.energy.source
        if "attempts" in self.facts:
            measured.data_s = None
        document = training_metrics.training_metrics(self.facts, self.rows, measured)
        saves = read_saves(self.folder.path)
        document["summary"] |= {"saves": saves.total, "failed_saves": saves.failed}
        if self.routing:
            document["summary"] |= self.routing.facts()
        self._say(training_metrics.verdict_line(document, where_time_went))
        marker = training_metrics.complete_marker(self.folder.path, document)
        self.folder.complete(document, marker, saves.remark)
        self.folder.tell(marker)
        return 0

    def _where_time_went(self) -> str:
        """Returns rank 0 what bounds the run, by the breakdowns of all ranks; "" where one cannot
        be read, or no rank computed. All ranks call it."""
        first = None
        if self.is_rank_0:
            first = self.rows[training_metrics.steady_time_of(self.rows).first]["step"]
        first = self.ranks.gather(first)[0]
        own = None
        with contextlib.suppress(UsageError):
            windows = read_windows(self.breakdown.file.path)
            own = efficiencies.means_of(windows, max(2, first)).columns
        ranks = dict(enumerate(self.ranks.gather(own, to_all=False)))
        if not self.is_rank_0 or None in ranks.values():
            return ""
        if reason := efficiencies.unseen(self.spec.engine, self.facts["host"]["gpu"]):
            return reason
        return str(efficiencies.verdict(self.spec.layout, ranks) or "")

    def _say(self, line: str) -> None:
        self.folder.log(line)
        self.folder.behind.call(self.folder.tell, line)
