"""Where each rank's time went, what it sent, and where a split's efficiency was lost."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from analysis.common.table import Column, Table
from analysis.logs.load import chosen, distinct
from analysis.logs.readers import run_folder
from analysis.logs.record import Record
from analysis.logs.verdict import timed
from analysis.measured.fairness import differences, scaling_of, shared_cores
from analysis.measured.scaling_curve import Side, against
from base.errors import UsageError
from parallel.config.message_bytes import step_volumes
from parallel.config.settings import RunSpec, check_setting
from parallel.record.ends import COMPLETE
from parallel.record.reader import Run, find_runs, read_breakdown, read_run
from parallel.record.schema import AXES, CATEGORIES

COLLECTIVE = tuple(axis for axis in AXES if axis != "pp")
COMPUTE = ("forward", "backward", "optimizer")
WITHOUT = "no breakdown (the run had no --breakdown)"


@dataclass
class Breakdown:
    """One run's breakdown. `ranks`: {rank: its columns' means per step}, over `steps` steps.

    A column that is unknown in some window is None.
    """

    run: Run
    spec: RunSpec
    record: Record
    ranks: dict[int, dict[str, float | None]]
    steps: int
    notes: list[str] = field(default_factory=list)
    shown: str = ""  # the run's name, with folders where others have it, too

    @property
    def name(self) -> str:
        return self.shown or self.run.name

    @property
    def whole(self) -> bool:
        """Whether every rank is there."""
        return len(self.ranks) == self.spec.layout.world_size

    @property
    def step_s(self) -> float:
        """Seconds per step, of the slowest rank."""
        return max(row["elapsed_s"] for row in self.ranks.values())

    def mean(self, *columns: str) -> float:
        """Mean over ranks of the sum of columns."""
        return sum(row[c] for row in self.ranks.values() for c in columns) / len(self.ranks)


def read(path: Path) -> tuple[Breakdown | None, list[str]]:
    """One run folder's breakdown, and one line for each thing that could not be read."""
    try:
        run = read_run(path)
        record = run_folder.read(path)
        if not (path / "breakdown").is_dir():
            return None, [f"{path}: {WITHOUT}"]
        spec = spec_of(run)
    except UsageError as error:
        return None, [str(error)]
    ranks, problems = read_breakdown(path, spec.layout.world_size)
    if not ranks:
        return None, problems
    time = timed(record)
    # Without a steady part, skip the first window if there are others.
    start = 2 if time is None else max(2, int(record.steps["iteration"][time.first]))
    found = Breakdown(run, spec, record, {}, 0)
    # The ranks of a killed run end apart.
    last = min(rows[-1]["last_step"] for rows in ranks.values())
    for rank, rows in ranks.items():
        if used := _used(rows, start, last):
            found.steps = sum(row["last_step"] - row["first_step"] + 1 for row in used)
            found.ranks[rank] = _per_step(used, found.steps)
        else:
            problems.append(f"{path / 'breakdown'}: rank {rank} has no window that all have")
    if problems and found.ranks:
        found.notes.append(f"{len(found.ranks)} of {spec.layout.world_size} ranks")
    if run.state != COMPLETE:
        found.notes.append(f"the run is {run.state}")
    if run.missing:
        found.notes.append(run.missing)
    return (found if found.ranks else None), problems


def _used(rows: list[dict[str, Any]], start: int, last: int) -> list[dict[str, Any]]:
    """The windows from step `start` to step `last`."""
    rows = [row for row in rows if row["last_step"] <= last]
    return [row for row in rows if row["first_step"] >= start] or rows[1:] or rows


def _per_step(rows: list[dict[str, Any]], steps: int) -> dict[str, float | None]:
    """A rank's columns, each the mean per step; None where a window does not know it."""
    left_out = ("rank", "first_step", "last_step", "transfer_s")
    columns = {c: [row[c] for row in rows] for c in rows[0] if c not in left_out}
    return {c: None if None in v else sum(v) / steps for c, v in columns.items()}


def spec_of(run: Run) -> RunSpec:
    """A run's settings, its sizes and its split computed.

    Raises:
        UsageError: not this version's, or damaged; it names the file.
    """
    source, settings = run.path / "run.json", run.facts.get("spec") or {}
    # Without the setting, the vocabulary was padded to a multiple of tp.
    settings = {"vocab_multiple": 1} | settings
    # Settings that only another version has are not needed here.
    known = [f.name for f in fields(RunSpec) if settings.get(f.name) is not None]
    try:
        spec = RunSpec(**{name: check_setting(name, settings[name], "spec") for name in known})
        if spec.grad_accum is None or spec.seq_len is None:
            raise UsageError("no grad_accum or no seq_len")
        if problems := spec.layout.problems(spec.model, spec.seq_len):
            raise UsageError("; ".join(problems))
    except UsageError as error:
        raise UsageError(f"{source}: not this version's settings ({error})") from error
    return spec


def times(found: Iterable[Breakdown]) -> Table:
    """Every category of every run: slowest rank, mean and spread over ranks, share of the step."""
    rows = []
    for breakdown in found:
        for name in ("elapsed", *CATEGORIES):
            each = {rank: row[f"{name}_s"] for rank, row in breakdown.ranks.items()}
            if name != "elapsed" and not any(each.values()):
                continue
            slowest = max(each, key=lambda rank: each[rank])
            mean = breakdown.mean(f"{name}_s")
            rows.append(
                {
                    "run": breakdown.name,
                    "category": "step" if name == "elapsed" else name,
                    "slowest_s": each[slowest],
                    "rank": slowest,
                    "mean_s": mean,
                    "spread_s": max(each.values()) - min(each.values()),
                    "share": mean / breakdown.mean("elapsed_s"),
                }
            )
    columns = [
        Column("run", "run"),
        Column("category", "category"),
        Column("slowest_s", "s/step, slowest rank", ".4g"),
        Column("rank", "rank", "d"),
        Column("mean_s", "mean of ranks", ".4g"),
        Column("spread_s", "spread", ".2g"),
        Column("share", "share", ".1%"),
    ]
    notes = [f"{breakdown.name}: {note}" for breakdown in found for note in breakdown.notes]
    return Table(columns, rows, "Time per step", notes)


def messages(found: Iterable[Breakdown]) -> Table:
    """Every axis that sends: calls and bytes per step of the rank that sends most, and times."""
    rows = []
    for breakdown in found:
        for axis in AXES:
            senders = [r for r, row in breakdown.ranks.items() if row[f"{axis}_calls"]]
            if not senders:
                continue
            most = max(senders, key=lambda rank: breakdown.ranks[rank][f"{axis}_wire_bytes"])
            row = breakdown.ranks[most]
            exposed = {rank: breakdown.ranks[rank][f"{axis}_s"] for rank in senders}
            rows.append(
                {
                    "run": breakdown.name,
                    "axis": axis,
                    "calls": row[f"{axis}_calls"],
                    "mb": row[f"{axis}_bytes"] / 1e6,
                    "wire_mb": row[f"{axis}_wire_bytes"] / 1e6,
                    "formula": None if axis == "control" else agreement(breakdown, axis),
                    "exposed_s": max(exposed.values()),
                    "mean_s": sum(exposed.values()) / len(senders),
                }
            )
    columns = [
        Column("run", "run"),
        Column("axis", "axis"),
        Column("calls", "calls/step", "g"),
        Column("mb", "MB/step", ".4g"),
        Column("wire_mb", "MB sent/step", ".4g"),
        Column("formula", "formula"),
        Column("exposed_s", "exposed s, slowest rank", ".4g"),
        Column("mean_s", "mean of ranks", ".4g"),
    ]
    return Table(columns, rows, "Messages per step and rank")


def agreement(breakdown: Breakdown, axis: str) -> str | None:
    """Whether every rank sent along `axis` what the closed formula says: `equal`, or how not."""
    for rank, row in breakdown.ranks.items():
        expected = step_volumes(breakdown.spec, rank)
        volume = expected.get(axis)
        if volume is None:
            if axis in expected:
                return None  # no formula is known
            if row[f"{axis}_bytes"]:
                return f"rank {rank} should send nothing"
        elif abs(row[f"{axis}_wire_bytes"] - volume.wire_bytes) > 1e-6 * volume.wire_bytes:
            return f"rank {rank} should send {volume.wire_bytes / 1e6:.4g} MB"
    return "equal"


# The coordinates that the ranks of one group share, in collectives along an axis.
_SHARED = {"tp": ("dp", "pp"), "dp": ("tp", "pp"), "embedding": ("tp", "dp")}


def _least_s(breakdown: Breakdown, axis: str) -> float:
    """Mean over ranks of the seconds along an axis of the rank that waited least in each group of
    ranks that wait for each other."""
    groups: dict[tuple, list[float]] = defaultdict(list)
    for rank, row in breakdown.ranks.items():
        if axis != "embedding" or row["embedding_calls"]:
            coords = breakdown.spec.layout.coords(rank)
            groups[tuple(coords[a] for a in _SHARED.get(axis, ()))].append(row[f"{axis}_s"])
    return sum(len(seconds) * min(seconds) for seconds in groups.values()) / len(breakdown.ranks)


def parts(breakdown: Breakdown) -> dict[str, float]:
    """Seconds per step of a run's slowest rank, in parts that add up to it.

    bubble, pp: the mean over ranks. tp, dp, other communication (embedding, mixed, control): what
    the rank that waited least in each group spent in it, for the rest of its partners' time there
    is waiting for it; that waiting, and what the slowest rank's step exceeds the mean by, is load
    imbalance. compute: forward, backward, optimizer. other: the rest.
    """
    least = {axis: _least_s(breakdown, axis) for axis in COLLECTIVE}
    found = {
        "compute": breakdown.mean(*(f"{name}_s" for name in COMPUTE)),
        "bubble": breakdown.mean("bubble_s"),
        "tp": least["tp"],
        "dp": least["dp"],
        "pp": breakdown.mean("pp_s"),
        "other communication": sum(least[a] for a in ("embedding", "mixed", "control")),
        "imbalance": sum(breakdown.mean(f"{a}_s") - least[a] for a in COLLECTIVE)
        + (breakdown.step_s - breakdown.mean("elapsed_s")),
    }
    return found | {"other": breakdown.step_s - sum(found.values())}


def lost(breakdown: Breakdown, base: Breakdown, scaling: str = "strong") -> dict[str, float]:
    """The efficiency that a run lost against its baseline, in shares that add up to it.

    Efficiency is T0 n0 / (T n) (strong; weak: T0 / T), so 1 - efficiency is the share of the run's
    step that the baseline's, divided over the GPUs, does not explain. Each part is its seconds
    less the baseline's own, divided the same way, over the run's step time. A negative share is a
    gain.
    """
    ratio = (
        base.spec.layout.world_size / breakdown.spec.layout.world_size
        if scaling == "strong"
        else 1.0
    )
    mine, theirs = parts(breakdown), parts(base)
    return {name: (mine[name] - ratio * theirs[name]) / breakdown.step_s for name in mine}


def losses(found: list[Breakdown], baseline: str | None, scaling: str | None) -> Table:
    """The efficiency-loss decomposition of every run beside its baseline; scaling: strong or weak,
    None takes what the runs are.

    Raises:
        UsageError: no breakdown of a run called `baseline`.
    """
    scaling = scaling or scaling_of([breakdown.record for breakdown in found])
    named = None
    if baseline:
        runs = [(breakdown.name, breakdown.run.name, breakdown.run.path) for breakdown in found]
        named = found[chosen(baseline, runs)]
    rows, notes = [], []
    partners = shared_cores([breakdown.record for breakdown in found])
    for breakdown in found:
        fits = [named] if named else [b for b in found if _is_baseline(b, breakdown)]
        if len(fits) == 1 and fits[0] is breakdown:
            continue
        if why := _not_decomposed(breakdown, fits, baseline, scaling):
            notes.append(f"{breakdown.name}: {why}")
            continue
        ratio = against(_side(breakdown, partners), _side(fits[0], partners), scaling)
        if ratio.why or ratio.note:
            notes.append(f"{breakdown.name}: {ratio.why or ratio.note}")
        if (efficiency := ratio.efficiency) is not None:
            rows.append(
                {"run": breakdown.name, "gpus": breakdown.spec.gpus, "efficiency": efficiency}
                | {"lost": 1 - efficiency, "baseline": fits[0].name}
                | lost(breakdown, fits[0], scaling)
            )
    names = list(parts(found[0])) if rows else []
    columns = [
        Column("run", "run"),
        Column("gpus", "gpus", "d"),
        Column("efficiency", "efficiency", ".3f"),
        Column("lost", "lost", ".3f"),
        *(Column(name, name, ".3f") for name in names),
        Column("baseline", "baseline"),
    ]
    notes.insert(0, "lost = 1 - efficiency = the sum of the columns after it; negative: a gain")
    return Table(columns, rows, f"Efficiency lost ({scaling} scaling)", notes)


def _side(breakdown: Breakdown, partners: dict[str, str]) -> Side:
    why = partners.get(breakdown.record.source)
    shared = f"{breakdown.name} {why}" if why else ""
    return Side(breakdown.name, breakdown.spec.gpus, (breakdown.step_s,), shared=shared)


def _not_decomposed(
    breakdown: Breakdown, fits: list[Breakdown], baseline: str | None, scaling: str
) -> str:
    """Why a run's efficiency cannot be taken apart against the baseline that fits, or ""."""
    wanted = baseline or breakdown.run.facts.get("baseline")
    if len(fits) > 1:
        return f"the baseline {wanted} fits {', '.join(fit.name for fit in fits)}"
    if not fits:
        return f"no breakdown of the baseline {wanted}" if wanted else "no baseline (--baseline)"
    base = fits[0]
    if not (breakdown.whole and base.whole):
        return "needs every rank"
    if unfinished := [b.name for b in (breakdown, base) if b.run.state != COMPLETE]:
        return f"no efficiency: {', '.join(unfinished)} did not complete"
    if unfair := differences(breakdown.record, base.record, scaling):
        return f"invalid comparison: {'; '.join(unfair)}"
    return (
        "oversubscribed: more ranks than cores or GPUs" if breakdown.record.oversubscribed else ""
    )


def _is_baseline(base: Breakdown, breakdown: Breakdown) -> bool:
    """Whether `base` is the baseline that the run names, in the same study folder."""
    beside = breakdown.run.path.parent == base.run.path.parent
    return beside and base.run.name == breakdown.run.facts.get("baseline")


def read_all(paths: list[Path]) -> tuple[list[Breakdown], list[str]]:
    """Every breakdown at the paths, and one line for each thing that could not be read.

    Raises:
        UsageError: nothing could be read.
    """
    found, problems = [], []
    for path in find_runs(paths):
        breakdown, unread = read(path)
        problems += unread
        if breakdown is not None:
            found.append(breakdown)
    if not found:
        if len(problems) > 1 and all(line.endswith(WITHOUT) for line in problems):
            where = ", ".join(map(str, paths))
            problems = [f"{where}: none of {len(problems)} runs has a breakdown (--breakdown)"]
        raise UsageError("; ".join(problems))
    shown = distinct(
        [breakdown.run.name for breakdown in found], [breakdown.run.path for breakdown in found]
    )
    for breakdown, name in zip(found, shown, strict=True):
        breakdown.shown = name
    return found, problems


def report(
    paths: list[Path], baseline: str | None = None, scaling: str | None = None
) -> tuple[list[Table], list[str]]:
    """The three tables of what is at the paths, and one line for each thing that could not be read.

    Raises:
        UsageError: nothing could be read, or nothing is called `baseline`.
    """
    found, problems = read_all(paths)
    return [times(found), messages(found), losses(found, baseline, scaling)], problems
