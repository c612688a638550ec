"""Strong and weak scaling against a stated baseline, which may itself have many GPUs.

    python -m analysis.scaling PATH... [--baseline NAME] [--scaling weak] [--predict CLUSTER]

One row per number of GPUs: the median over the repeats at that size with their spread, speedup,
efficiency and Karp and Flatt's serial share; below, the serial share that Amdahl's law (strong)
or Gustafson's (weak) fits to all rows. A run whose fixed work is not the baseline's, or whose
commit is not (unless --any-commit), is left out of the fit and says what differs. Exits 2 when
nothing could be read.
"""

import argparse
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: find the rooms, not analysis/ itself
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from analysis import beside
from analysis.records import Record
from analysis.tables import FORMAT_HELP, FORMATS, Column, Table, emphasise
from models.errors import Parser, UsageError, command_line

# What must be equal for a ratio of two step times to say something about the split alone.
FIXED = ("precision", "recompute", "commit", "gpu_type")
NOISE = 0.05  # how far above 1 an efficiency may be by chance where no interval is known
UNSTATED = "not stated by every run, so not compared: "  # a table's note
ANY_COMMIT = "runs of different commits are compared, too (--any-commit)"  # a table's note
CHANGED = "run from a changed working tree, so the commit does not say what ran"  # a note
WORDS = {"seq_len": "sequence length", "global_batch": "global batch", "gpu_type": "processor"}


def add_commit_flag(parser: argparse.ArgumentParser) -> None:
    """The flag that lets `differences` overlook the commit."""
    parser.add_argument(
        "--any-commit", action="store_true", help="compare runs of different commits, too"
    )


def differences(
    record: Record, baseline: Record, scaling: str = "strong", any_commit: bool = False
) -> list[str]:
    """What of the fixed work differs between the two runs; empty when the comparison is fair.

    `strong`: the same model, sequence length and global batch. `weak`: the same model, sequence
    length and batch per GPU. Either: the same precision, recomputation, processor and (unless
    `any_commit`) commit, or another one with the same code. What neither log states cannot be held
    against them; what only one states is unknown, not different.
    """
    found = []

    def compare(name: str, mine: object, theirs: object) -> None:
        if mine is not None and theirs is not None and mine != theirs:
            if name == "commit":
                mine, theirs = short_commit(mine), short_commit(theirs)
            found.append(f"{WORDS.get(name, name)} {mine} here, {theirs} in the baseline")

    for size in sorted(set(record.model) & set(baseline.model)):
        compare(f"model {size}", record.model[size], baseline.model[size])
    if not (record.model and baseline.model):
        compare("parameters", record.params, baseline.params)
    compare("seq_len", record.seq_len, baseline.seq_len)
    if scaling == "strong":
        compare("global_batch", record.global_batch, baseline.global_batch)
    else:
        compare("batch per GPU", batch_per_gpu(record), batch_per_gpu(baseline))
    same_code = None not in (record.code, baseline.code) and record.code == baseline.code
    for name in FIXED:
        if name == "commit" and (any_commit or same_code):
            continue
        compare(name, getattr(record, name), getattr(baseline, name))
    return found


def unstated(records: list[Record]) -> list[str]:
    """What of the fixed work some run does not state, so that `differences` could not see it."""
    if len(records) < 2:
        return []
    names = {"gpus": "GPUs", **WORDS, "precision": "precision"}
    del names["gpu_type"]
    found = [word for name, word in names.items() if any(getattr(r, name) is None for r in records)]
    return found + ["model"] * any(not (r.model or r.params) for r in records)


def short_commit(commit: object) -> str:
    """Ten characters of a commit, and `+dirty` where files were changed since."""
    name, plus, mark = str(commit).partition("+")
    return name[:10] + plus + mark


def is_changed(record: Record) -> bool:
    """Whether the run's code was changed since its commit."""
    return (record.commit or "").endswith("+dirty")


def changed(records: list[Record]) -> list[str]:
    """A note that names the runs whose code was changed since their commit, if there are any."""
    from analysis.load import name_of

    names = [name_of(record) for record in records if is_changed(record)]
    who = "all" if len(names) == len(records) > 1 else ", ".join(names)
    return [f"{CHANGED}: {who}"] * bool(names)


def batch_per_gpu(record: Record) -> float | None:
    """Sequences per GPU and step."""
    if record.global_batch is None or not record.gpus:
        return None
    return record.global_batch / record.gpus


def speedup(
    step_s: float,
    gpus: int,
    baseline_step_s: float,
    baseline_gpus: int,
    scaling: str = "strong",
) -> tuple[float, float]:
    """(speedup, efficiency) against a baseline of `baseline_gpus` GPUs.

    Strong (Amdahl 1967): the time ratio, over the ratio of GPUs. Weak (Gustafson 1988): the work
    grew with the GPUs, so the time ratio is the efficiency, and times the ratio of GPUs the scaled
    speedup.
    """
    times, ratio = baseline_step_s / step_s, gpus / baseline_gpus
    return (times, times / ratio) if scaling == "strong" else (times * ratio, times)


def karp_flatt(speedup: float, ratio: float) -> float | None:
    """The experimentally determined serial fraction, (1/S - 1/p) / (1 - 1/p), p = `ratio` > 1.

    Karp & Flatt 1990, "Measuring parallel processor performance". Growing with p: overhead grows.
    Negative: the speedup is above linear. Above 1: there is none. Neither is a share of anything.
    """
    return None if ratio <= 1 else (1 / speedup - 1 / ratio) / (1 - 1 / ratio)


def serial_share(speedup: float, ratio: float) -> float | None:
    """`karp_flatt`, where it is a share (0 to 1); else None."""
    share = karp_flatt(speedup, ratio)
    return share if share is not None and 0 <= share <= 1 else None


def above_linear(efficiency: float, ratio: float, lowest: float | None = None) -> str:
    """What an efficiency well above 1 says on `ratio` times the baseline's GPUs, or "".

    `lowest`: the least that the intervals or repeats of both sides allow, where that is known.
    """
    if efficiency <= 1 + NOISE or (lowest is not None and lowest <= 1):
        return ""
    if ratio == 1:
        return (
            f"{efficiency:.2f} times as fast as the baseline on as many GPUs: another split, or"
            " the baseline shared its machine"
        )
    return (
        f"superlinear: efficiency {efficiency:.2f} is above 1 (each GPU's part fits its caches or"
        " memory better, or the baseline shared its machine)"
    )


def shared_cores(records: list[Record]) -> dict[str, str]:
    """source -> which run ran on the same host's cores at the same time, for runs on CPU.

    Only where both say when they began and ended and, together, have more threads than cores. A
    job with cores of its own among them cannot be told from one without, so it is said as doubt.
    """
    from analysis.load import name_of

    hosts: dict[str, list[tuple[str, str, int, int, Record]]] = defaultdict(list)
    for record in records:
        facts = record.extra.get("facts") or {}
        host, spec = facts.get("host") or {}, facts.get("spec") or {}
        began, ended = facts.get("started_utc"), record.extra.get("ended_utc")
        ranks = host.get("ranks_per_node") or record.gpus
        if began and ended and ranks and host.get("cores") and host.get("hostname"):
            if not host.get("gpu"):
                threads = ranks * (spec.get("threads") or 1)
                told = (began, ended, threads, host["cores"], record)
                hosts[host["hostname"]].append(told)
    found: dict[str, str] = {}
    for name, runs in hosts.items():
        runs.sort(key=lambda run: run[:2])
        for i, (_, ended, threads, cores, record) in enumerate(runs):
            for began, _, others, cores_too, other in runs[i + 1 :]:
                if began >= ended:
                    break
                if threads + others > max(cores, cores_too):
                    for one, two in ((record, other), (other, record)):
                        said = f"ran at the same time as {name_of(two)} on {name}"
                        found.setdefault(one.source, f"{said}: they may have shared its cores")
    return found


def fit_amdahl(points: list[tuple[float, float]]) -> float | None:
    """The serial share f of Amdahl 1967, 1/S = f + (1 - f)/p, by least squares over (p, S)."""
    x = [1 - 1 / p for p, _ in points]
    y = [1 / s - 1 / p for p, s in points]
    square = sum(a * a for a in x)
    return sum(a * b for a, b in zip(x, y, strict=True)) / square if square else None


def fit_gustafson(points: list[tuple[float, float]]) -> float | None:
    """The serial share f of Gustafson 1988, S = p - f (p - 1), by least squares over (p, S)."""
    x = [p - 1 for p, _ in points]
    y = [p - s for p, s in points]
    square = sum(a * a for a in x)
    return sum(a * b for a, b in zip(x, y, strict=True)) / square if square else None


AXES = ("engine", "gpus", "tp", "pp", "vpp", "dp", "micro_batch", "global_batch", "seq_len")


def configuration(record: Record) -> tuple:
    """What two runs must share to be repeats of each other."""
    facts = [getattr(record, k) for k in (*AXES, "precision", "recompute", "zero_stage")]
    return (*facts, record.params, tuple(sorted(record.model.items())), named(record))


def named(record: Record) -> str | None:
    """What a study calls the configuration: the run's name without its repeat."""
    return record.extra.get("configuration") or record.extra.get("run")


@dataclass(frozen=True)
class Point:
    """One timed run: enough to scale by. Points of one configuration are repeats."""

    name: str
    gpus: int
    step_s: float
    configuration: tuple = ()
    predicted_s: float | None = None


def curve(
    points: list[Point], baseline: Point, scaling: str = "strong"
) -> tuple[list[dict[str, Any]], float | None]:
    """(one row per configuration, fitted serial share) of repeats at several sizes.

    Rows: run, gpus, n repeats, step_s (their median), spread ((slowest - fastest) / median),
    speedup, efficiency, serial (Karp-Flatt, where it is a share), note (why it is none, and what is
    odd about the efficiency). The baseline's own repeats are what it is against.
    The fit is to the fastest configuration of each size: a law is about what the machine can do.
    """
    groups = defaultdict(list)
    for point in points:
        groups[point.gpus, point.configuration].append(point)
    alike = groups.get((baseline.gpus, baseline.configuration), [baseline])
    base = statistics.median(p.step_s for p in alike)
    rows = []
    best: dict[float, float] = {}
    for (gpus, _), repeats in sorted(groups.items(), key=lambda g: (g[0][0], g[1][0].name)):
        times = [p.step_s for p in repeats]
        step_s = statistics.median(times)
        faster, efficiency = speedup(step_s, gpus, base, baseline.gpus, scaling)
        ratio = gpus / baseline.gpus
        fastest = min(p.step_s for p in alike)
        lowest = speedup(max(times), gpus, fastest, baseline.gpus, scaling)[1]
        rows.append(
            {
                "run": repeats[0].name,
                "gpus": gpus,
                "n": len(times),
                "step_s": step_s,
                "spread": (max(times) - min(times)) / step_s if len(times) > 1 else None,
                "fastest_s": min(times),
                "slowest_s": max(times),
                "predicted_s": repeats[0].predicted_s,
                "predicted_error": beside.error(repeats[0].predicted_s, step_s),
                "speedup": faster,
                "efficiency": efficiency,
                "serial": serial_share(faster, ratio),
                "note": _note(karp_flatt(faster, ratio), efficiency, ratio, lowest),
            }
        )
        if ratio > 1:
            best[ratio] = max(faster, best.get(ratio, 0.0))
    return rows, (fit_amdahl if scaling == "strong" else fit_gustafson)(list(best.items()))


def _note(share: float | None, efficiency: float, ratio: float, lowest: float) -> str:
    said = above_linear(efficiency, ratio, lowest)
    if share is not None and share > 1:
        said = "no serial share, slower than the baseline on more GPUs"
    elif share is not None and share < 0 and not said:
        said = f"no serial share: efficiency {efficiency:.3f} is above 1, too little to be sure of"
    return said


def table(rows: list[dict[str, Any]], share: float | None, scaling: str, baseline: str) -> Table:
    """The scaling curve as a table."""
    columns = [
        Column("run", "run"),
        Column("gpus", "GPUs", "d"),
        Column("n", "runs", "d"),
        Column("step_s", "s/iter", ".4g"),
        Column("spread", "spread", ".1%"),
        *(beside.columns() if any(row["predicted_s"] for row in rows) else ()),
        Column("speedup", "speedup", ".2f"),
        Column("efficiency", "efficiency", ".2f"),
        Column("serial", "serial share (Karp-Flatt)", ".3f"),
    ]
    law = {"strong": "Amdahl", "weak": "Gustafson"}[scaling]
    notes = [f"{scaling} scaling against {baseline}; spread: (slowest - fastest) / median"]
    if share is not None and 0 <= share <= 1:
        notes.append(f"{law}'s law, at each size's fastest, fits a serial share of {share:.3f}")
    elif share is not None:
        why = "above linear" if share < 0 else "slower than the baseline"
        notes.append(f"{law}'s law, at each size's fastest, fits no serial share: {why}")
    noted: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        noted[row["note"]].append(row["run"])
    notes += [f"{note}: {', '.join(runs)}" for note, runs in noted.items() if note]
    return Table(columns, rows, notes=notes)


def report(
    paths: list[Path],
    baseline: str | None = None,
    scaling: str = "strong",
    arguments: argparse.Namespace | None = None,
) -> Table:
    """The scaling curve of what is at the paths; `arguments` may hold the flags.

    Raises:
        UsageError: nothing could be read or timed, or there is no such baseline.
    """
    from analysis.load import called, load, name_of
    from analysis.quality import averages, judge, timed, unfinished

    window, rule = getattr(arguments, "window", None), getattr(arguments, "rule", "median")
    any_commit = getattr(arguments, "any_commit", False)
    predict = getattr(arguments, "predict", None)
    records, refused = load(paths, arguments)
    points, left_out = [], list(refused)
    for record, predicted_s in zip(records, beside.seconds(records, predict), strict=True):
        time = timed(record, window, rule)
        if judge(record, time).unfit or record.oversubscribed:
            left_out.append(f"{name_of(record)}: {'; '.join(judge(record, time).flags)}")
        elif why := unfinished(record):
            left_out.append(f"{name_of(record)}: {why}")
        elif time is None or not time.step_s > 0 or not record.gpus:
            left_out.append(f"{name_of(record)}: no steady time or no number of GPUs")
        else:
            point = Point(
                name_of(record), record.gpus, time.step_s, configuration(record), predicted_s
            )
            points.append((record, point))
    if not points:
        raise UsageError("; ".join(left_out))
    wanted = [pair for pair in points if baseline and called(baseline, pair[0])]
    if baseline and not wanted:
        raise UsageError(
            f"no timed run called {baseline!r}; there are: {', '.join(p.name for _, p in points)}"
        )
    if len({point.configuration for _, point in wanted}) > 1:
        names = ", ".join(point.name for _, point in wanted)
        raise UsageError(f"--baseline {baseline} fits {names}; name one of these")
    base, start = min(wanted or points, key=lambda pair: pair[1].gpus)
    fair = []
    for record, point in points:
        if unfair := differences(record, base, scaling, any_commit):
            left_out.append(f"{point.name}: invalid comparison: {'; '.join(unfair)}")
        else:
            fair.append((record, point))
    # Repeats share their configuration's name, unless other configurations have it, too.
    kinds: dict[str | None, set[tuple]] = defaultdict(set)
    for record, point in fair:
        kinds[named(record)].add(point.configuration)
    fair_points = [
        point if len(kinds[of := named(record)]) > 1 else replace(point, name=of or point.name)
        for record, point in fair
    ]
    rows, share = curve(fair_points, start, scaling)
    called_base = next(p.name for (r, _), p in zip(fair, fair_points, strict=True) if r is base)
    shown = table(rows, share, scaling, f"{called_base} ({base.gpus} GPUs)")
    shown.notes += averages([record for record, _ in fair])
    if open_ := unstated([record for record, _ in fair]):
        shown.notes.append(UNSTATED + ", ".join(open_))
    beside_each_other = shared_cores([record for record, _ in fair])
    shown.notes += [
        f"{name_of(r)}: {beside_each_other[r.source]}"
        for r, _ in fair
        if r.source in beside_each_other
    ]
    shown.notes += changed([record for record, _ in fair])
    if predict:
        pairs = [(point.configuration, point.predicted_s, point.step_s) for _, point in fair]
        shown.notes += beside.notes(beside.source(predict), pairs)
    shown.notes += [ANY_COMMIT] * any_commit
    shown.notes += [f"left out: {line}" for line in left_out]
    return shown


@command_line("analysis.scaling")
def main(argv: list[str] | None = None) -> int:
    """Print the scaling curve of what is at the paths."""
    from analysis.load import add_fact_flags
    from analysis.quality import add_time_flags

    parser = Parser(
        prog="python -m analysis.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="log, run or folder")
    parser.add_argument(
        "--baseline", metavar="NAME", help="a run, configuration or path; default: fewest GPUs"
    )
    parser.add_argument("--scaling", choices=("strong", "weak"), default="strong")
    add_commit_flag(parser)
    add_time_flags(parser)
    add_fact_flags(parser)
    beside.add_flag(parser)
    parser.add_argument("--format", choices=FORMATS, default="text", help=FORMAT_HELP)
    arguments = parser.parse_args(argv)
    shown = report(arguments.paths, arguments.baseline, arguments.scaling, arguments=arguments)
    text = shown.render(arguments.format)
    print(emphasise(text) if arguments.format == "text" else text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
