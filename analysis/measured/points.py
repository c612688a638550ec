"""The points of a run for the tools that draw curves: parallel/record/sinks, of any log."""

from datetime import datetime
from pathlib import Path

import numpy as np

from analysis.logs.load import name_of
from analysis.logs.parsing.settings import SETTINGS
from analysis.logs.readers import run_folder
from analysis.logs.record import Record
from analysis.measured.throughput import best_tflops_per_gpu, utilisation
from parallel.record.ends import COMPLETE, FAILED, RUNNING
from parallel.record.sinks import Described, Point, step_values, timed_back
from parallel.record.sinks.run_folder import Source, described


def described_as(record: Record) -> Described:
    """A run's name, study and settings: a run folder's own, or what its log says."""
    if _is_own(record):
        own = described(record.facts)
        return Described(name_of(record), own.study, own.config)
    known = {name: getattr(record, name) for name in SETTINGS} | record.model
    known |= {"source": record.source, "format": record.format}
    plain = {k: v for k, v in known.items() if isinstance(v, bool | int | float | str)}
    return Described(name_of(record), record.study or "logs", plain)


def _is_own(record: Record) -> bool:
    """Whether a run folder of ours holds it, with steps and all facts about them."""
    facts = {"spec", "layout", "model", "host"}
    return (
        record.format == run_folder.FORMAT
        and len(record.iteration) > 0
        and (facts <= record.facts.keys())
    )


def points_of(record: Record) -> tuple[list[Point], list[str]]:
    """A run's points, and in words what is not known or was chosen.

    A step that a log has twice counts as it was last. The times end when the run ended, or where
    nothing says when, at the time at which the file was changed.
    """
    source, end = Path(record.source), record.ended_utc
    said = []
    if end is not None:
        end_s = datetime.fromisoformat(end).timestamp()
    else:
        end_s = source.stat().st_mtime
        said.append("no time of its end is known: its times end when the file was changed")
    if _is_own(record):
        points = Source(source, record.facts).new(ended=record.state != RUNNING)
    else:
        points, more = _of_log(record)
        said += more
    return timed_back(points, end_s), said


def _of_log(record: Record) -> tuple[list[Point], list[str]]:
    said = []
    # TFLOP/s are proportional to tokens/s: those at one token/s are the factor.
    factor, convention, why = best_tflops_per_gpu(record, 1.0, None)
    printed = factor is None and np.isfinite(record.tflops).any()
    if printed:
        convention = "printed"
        said.append(f"TFLOP/s are those that the log prints: {why}")
    elif factor is None:
        said.append(f"no TFLOP/s: {why}")
    if record.per_epoch:
        said.append("a step of its curves is an epoch, and step times are of micro-steps")
    found: dict[int, Point] = {}
    no_mfu = ""
    columns = (record.step_s, record.loss, record.grad_norm, record.tflops, record.skipped)
    for at, step in enumerate(record.iteration):
        if not np.isfinite(step):
            continue
        step_s, loss, norm, tflops, skipped = (_known(column, at) for column in columns)
        rate = _known(record.tokens_per_s, at)
        if rate is None and step_s and record.global_batch and record.seq_len:
            rate = record.global_batch * record.seq_len / step_s
        if not printed:
            tflops = factor * rate if factor is not None and rate is not None else None
        share, reason = utilisation(record, tflops, convention)
        no_mfu = no_mfu or reason
        found[int(step)] = Point(
            int(step),
            0.0,
            step_values(
                step_s=step_s,
                tokens_per_s=rate,
                gpus=record.gpus,
                tflops=tflops,
                mfu=share,
                loss=np.nan if at in record.nan_at else loss,
                grad_norm=norm,
                skipped=skipped,
            ),
        )
    if no_mfu:
        said.append(f"no MFU: {no_mfu}")
    return [found[step] for step in sorted(found)], said


def _known(column: np.ndarray, at: int) -> float | None:
    return float(column[at]) if at < len(column) and not np.isnan(column[at]) else None


def end_of(record: Record) -> str:
    """How the run ended, of parallel.record.ends: for a log as far as it shows that."""
    if record.state:
        return record.state
    return COMPLETE if record.completed else FAILED if record.failure else RUNNING
