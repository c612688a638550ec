"""Training runs in, one trustworthy row each out: seconds, tokens/s, TFLOP/s, speedup, efficiency.

    python analysis/tflops.py PATH... [--convention NAME] [--baseline NAME] [--scaling weak]

Seconds per iteration are the median after the warm-up that is found in the data (--window states
it instead, --rule seed takes the mean of everything). TFLOP/s per GPU are computed under the named
FLOPs convention; what a log printed itself stands beside them and is never mixed in. A speedup is
printed only where the fixed work is the baseline's, an efficiency only where every rank had cores
of its own. A run that failed keeps its row and its reason. Exits 2 when nothing could be read.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: find the rooms, not analysis/ itself
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from analysis import scaling
from analysis.load import load, name_of, oversubscribed
from analysis.parity import verify
from analysis.quality import Steady, steady
from analysis.records import Record
from analysis.tables import FORMATS, Column, Table, emphasise
from models.config import GPTConfig
from models.errors import UsageError
from models.flops import CONVENTIONS, DEFAULT_CONVENTION
from parallel.artifacts import read_run


def config_of(record: Record) -> GPTConfig | None:
    """The model's sizes where the log gives enough of them; None rather than a guess."""
    known = {k: v for k, v in record.model.items() if k in GPTConfig.__dataclass_fields__}
    if {"n_layer", "hidden", "vocab_size"} <= set(known):
        known.setdefault("n_head", 1)  # no FLOPs or parameter count depends on it
        if record.seq_len:
            known.setdefault("max_seq_len", record.seq_len)
        try:
            return GPTConfig(**known)
        except UsageError:
            return None
    return None


def tflops_per_gpu(record: Record, step_s: float, convention: str) -> float | None:
    """TFLOP/s per GPU at `step_s` seconds per iteration, or None where a fact is missing."""
    if not (record.gpus and record.global_batch and record.seq_len and step_s > 0):
        return None
    recompute = record.recompute == "full"
    config = config_of(record)
    if config is not None:
        per_token = CONVENTIONS[convention](config, record.seq_len, recompute)
    elif record.params and convention in ("6n", "seed"):  # these two need nothing but P
        per_token = (8.0 if convention == "seed" and recompute else 6.0) * record.params
    else:
        return None
    tokens = record.global_batch * record.seq_len
    return per_token * tokens / (step_s * record.gpus * 1e12)


def _baseline_of(record: Record, records: list[Record], wanted: str | None) -> Record | None:
    name = wanted or record.extra.get("baseline")
    same_study = [r for r in records if r.extra.get("study") == record.extra.get("study")]
    return next((r for r in same_study if name and name_of(r) == name), None) or next(
        (r for r in records if wanted and name_of(r) == wanted), None
    )


def _parity(records: list[Record], baseline: str | None) -> dict[str, str]:
    """source -> verdict, for the records that are run folders of ours."""
    runs = [read_run(Path(r.source)) for r in records if r.format == "run folder"]
    return {str(path): p.verdict for path, p in verify(runs, baseline).items()}


def _state(record: Record) -> str:
    if record.completed:
        return "complete"
    reason = record.extra.get("reason") or (record.failure.line if record.failure else "")
    return f"{record.extra.get('state', 'unknown')}: {reason}".rstrip(": ")


def rows(
    records: list[Record],
    convention: str = DEFAULT_CONVENTION,
    baseline: str | None = None,
    kind: str = "strong",
    window: tuple[int, int] | None = None,
) -> list[dict[str, Any]]:
    """One dict per record, with raw values; the table's rows."""
    parity = _parity(records, baseline)
    times = {id(r): steady(r.step_s, r.skipped, window) for r in records}
    return [
        _row(record, times, parity, _baseline_of(record, records, baseline), convention, kind)
        for record in records
    ]


def _row(
    record: Record,
    times: dict[int, Steady | None],
    parity: dict[str, str],
    baseline: Record | None,
    convention: str,
    kind: str,
) -> dict[str, Any]:
    time = times[id(record)]
    notes = []
    row: dict[str, Any] = {
        "run": name_of(record),
        "engine": record.engine,
        **{k: getattr(record, k) for k in ("gpus", "tp", "pp", "vpp", "dp")},
        "micro_batch": record.micro_batch,
        "global_batch": record.global_batch,
    }
    if time is not None:
        row |= {"step_s": time.step_s, "ci95": time.ci95, "steady_n": time.n}
        if record.global_batch and record.seq_len:
            row["tokens_per_s"] = record.global_batch * record.seq_len / time.step_s
        row["tflops"] = tflops_per_gpu(record, time.step_s, convention)
    if np.isfinite(record.tflops).any():
        row["printed_tflops"] = float(np.nanmedian(record.tflops))
    crowded = oversubscribed(record.extra.get("facts", {}))
    if crowded or record.oversubscribed:
        notes.append(f"oversubscribed{': ' * bool(crowded)}{crowded}")
    base = baseline and times[id(baseline)]
    if base and time and record.gpus and baseline.gpus:
        unfair = scaling.differences(record, baseline, kind)
        if unfair:
            notes.append("invalid comparison: " + "; ".join(unfair))
        else:
            row["speedup"], row["efficiency"] = scaling.speedup(
                time.step_s, record.gpus, base.step_s, baseline.gpus, kind
            )
        if record.oversubscribed or baseline.oversubscribed:
            row["efficiency"] = None
            if not record.oversubscribed:
                notes.append("the baseline is oversubscribed")
    verdict = parity.get(record.source, "not verified")
    row["parity"] = verdict.partition(":")[0]
    row["verdict"] = _state(record)
    row["notes"] = "; ".join(notes)
    return row


def table(
    found: list[dict[str, Any]], convention: str, baselines: list[str], kind: str = "strong"
) -> Table:
    """The scaling table."""
    columns = [
        Column("run", "run"),
        Column("engine", "engine"),
        *(Column(k, k, "d") for k in ("gpus", "tp", "pp", "vpp", "dp")),
        Column("step_s", "s/iter", ".4g"),
        Column("tokens_per_s", "tokens/s", ".0f"),
        Column("tflops", f"TFLOP/s/GPU ({convention})", ".3g"),
        Column("printed_tflops", "printed", ".3g"),
        Column("speedup", "speedup", ".2f"),
        Column("efficiency", "efficiency", ".2f"),
        Column("parity", "parity"),
        Column("verdict", "verdict"),
        Column("notes", "notes"),
    ]
    if all(row.get("printed_tflops") is None for row in found):
        columns = [c for c in columns if c.key != "printed_tflops"]
    stated = ", ".join(baselines) or "none stated (--baseline NAME)"
    notes = [
        f"s/iter: median after warm-up. TFLOP/s: {convention} convention."
        f" Speedup: {kind} scaling against {stated}."
    ]
    return Table(columns, found, notes=notes)


def _window(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    return int(first), int(last)


def main(argv: list[str] | None = None) -> int:
    """Print the scaling table of what is at the paths."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis.tflops",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="run folder or study")
    parser.add_argument("--convention", choices=tuple(CONVENTIONS), default=DEFAULT_CONVENTION)
    parser.add_argument("--baseline", metavar="NAME", help="the run that speedups are against")
    parser.add_argument("--scaling", choices=("strong", "weak"), default="strong")
    parser.add_argument(
        "--window", type=_window, metavar="FIRST:LAST", help="logged iterations to use, from 0"
    )
    parser.add_argument("--format", choices=FORMATS, default="text")
    arguments = parser.parse_args(argv)
    try:
        records, refused = load(arguments.paths)
        if arguments.baseline and arguments.baseline not in map(name_of, records):
            known = ", ".join(map(name_of, records))
            raise UsageError(f"no run called {arguments.baseline!r}; there are: {known}")
    except UsageError as error:
        print(f"analysis.tflops: {error}", file=sys.stderr)
        return 2
    for line in refused:
        print(f"analysis.tflops: {line}", file=sys.stderr)
    found = rows(
        records, arguments.convention, arguments.baseline, arguments.scaling, arguments.window
    )
    named = {arguments.baseline or r.extra.get("baseline") for r in records} - {None}
    text = table(found, arguments.convention, sorted(named), arguments.scaling).render(
        arguments.format
    )
    print(emphasise(text) if arguments.format == "text" else text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
