"""Every configuration of a study beside its baseline, for machines: scaling_report.json.

    python -m analysis.scaling_report logs/STUDY [--baseline NAME] [--scaling weak]
        [--predict CLUSTER] [--out FILE]

One entry per configuration: n runs, mean, stdev, median and the mean's 95 % interval (Student's t
over the runs) of the steady step time and tokens/s; speedup_vs_1gpu and scaling_efficiency from the
medians, as analysis.scaling has them; or invalid_comparison with what differs. speedup_vs_1gpu is
null where the baseline itself has more GPUs; speedup_vs_baseline is then what there is. With
--predict, predicted_by says what predicted_s of an entry was made of, and predicted_error is
predicted over the measured median, less one. What could
not be used is in left_out, one line each. The scaling is weak where only the batch per GPU is the
same everywhere, else strong. parallel.sweep asks for this file at its end; after Slurm's jobs it is
this command. Exits 2 when nothing could be read.
"""

import argparse
import statistics
import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: find the rooms, not analysis/ itself
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from analysis import beside
from analysis.load import called, load, name_of
from analysis.quality import describe_rule, judge, timed
from analysis.records import Record
from analysis.repeats import spread_of
from analysis.scaling import (
    above_linear,
    batch_per_gpu,
    configuration,
    differences,
    named,
    shared_cores,
    speedup,
)
from models.errors import Parser, UsageError, command_line, printable
from parallel.artifacts import utc_now, write_json

FILE = "scaling_report.json"
Timed = tuple[Record, float]  # a run and its steady step time in seconds


def gather(records: list[Record]) -> tuple[list[list[Timed]], list[str]]:
    """The timed runs, repeats together, and one line for each run that cannot be used."""
    groups: dict[tuple, list[Timed]] = defaultdict(list)
    left_out = []
    for record in records:
        time = timed(record)
        judgement = judge(record, time)
        if judgement.verdict != "complete":
            why = f"{judgement.verdict}: {judgement.proof}".rstrip(": ")
            left_out.append(f"{name_of(record)}: {why}")
        elif judgement.unfit:
            left_out.append(f"{name_of(record)}: {'; '.join(judgement.flags)}")
        elif time is None or not time.step_s > 0 or not record.gpus:
            left_out.append(f"{name_of(record)}: no steady time or no number of GPUs")
        else:
            groups[configuration(record)].append((record, time.step_s))
    return list(groups.values()), left_out


def kind_of(groups: list[list[Timed]]) -> str:
    """ "weak" where the batch per GPU is the same everywhere and the global batch is not."""
    records = [group[0][0] for group in groups]
    per_gpu = {batch_per_gpu(r) for r in records}
    return "weak" if len(per_gpu) == 1 < len({r.global_batch for r in records}) else "strong"


def report(
    records: list[Record],
    refused: list[str],
    baseline: str | None = None,
    kind: str | None = None,
    predict: str | None = None,
) -> dict[str, Any]:
    """The content of scaling_report.json; predicted beside measured on a `predict`ed cluster.

    Raises:
        UsageError: no run can be used, none is called `baseline`, or there is no such cluster.
    """
    groups, left_out = gather(records)
    if not groups:
        raise UsageError("; ".join(left_out + refused) or "no run to compare")
    wanted = baseline or next((b for r in records if (b := r.extra.get("baseline"))), None)
    fits = [g for g in groups if wanted and any(called(wanted, r) for r, _ in g)]
    if len(fits) > 1:
        names = ", ".join(name_of(r) for g in fits for r, _ in g)
        raise UsageError(f"the baseline {wanted} fits {names}; name one of these with --baseline")
    base = fits[0] if fits else None
    if base is None and baseline:
        known = ", ".join(str(named(g[0][0])) for g in groups)
        raise UsageError(f"no timed configuration called {baseline!r}; there are: {known}")
    if base is None:
        base = min(groups, key=lambda g: g[0][0].gpus)
        if wanted:
            left_out.append(f"the study's baseline {wanted} has no time")
    kind = kind or kind_of(groups)
    groups.sort(key=lambda g: (g[0][0].gpus, str(named(g[0][0]))))
    together = shared_cores(records)
    entries = [_entry(group, base, kind, together) for group in groups]
    if predict:
        predicted = beside.seconds([group[0][0] for group in groups], predict)
        for entry, seconds in zip(entries, predicted, strict=True):
            entry["predicted_s"] = seconds
            entry["predicted_error"] = beside.error(seconds, entry["step_s"]["median"])
    return {
        "schema_version": "1",
        "study": base[0][0].extra.get("study"),
        "written_utc": utc_now(),
        "scaling": kind,
        "baseline": named(base[0][0]) or name_of(base[0][0]),
        "step_time_rule": describe_rule(None, "median"),
        "confidence": "95 %, Student's t over the runs",
        **({"predicted_by": beside.source(predict)} if predict else {}),
        "configurations": entries,
        "left_out": left_out + refused,
    }


def _entry(
    group: list[Timed], base: list[Timed], kind: str, together: dict[str, str]
) -> dict[str, Any]:
    record, start = group[0][0], base[0][0]
    times = [step_s for _, step_s in group]
    per_step = record.global_batch and record.seq_len and record.global_batch * record.seq_len
    unfair = list(dict.fromkeys(d for r, _ in group for d in differences(r, start, kind)))
    entry: dict[str, Any] = {
        "configuration": named(record) or name_of(record),
        "runs": [name_of(r) for r, _ in group],
        **{k: getattr(record, k) for k in ("engine", "gpus", "tp", "pp", "dp", "zero_stage")},
        **{k: getattr(record, k) for k in ("precision", "seq_len", "global_batch", "commit")},
        "fixed_work": (record.extra.get("facts") or {}).get("work"),
        "n": len(times),
        "step_s": asdict(spread_of(times)) | {"median": statistics.median(times)},
        "tokens_per_sec": asdict(spread_of([per_step / t for t in times])) if per_step else None,
        **dict.fromkeys(("speedup_vs_1gpu", "speedup_vs_baseline", "scaling_efficiency")),
    }
    if unfair:
        return entry | {"invalid_comparison": unfair}
    faster, efficiency = speedup(
        entry["step_s"]["median"],
        record.gpus,
        statistics.median(step_s for _, step_s in base),
        start.gpus,
        kind,
    )
    crowded = record.oversubscribed or start.oversubscribed
    lowest = None
    if len(times) > 1 or len(base) > 1:
        fastest = min(step_s for _, step_s in base)
        lowest = speedup(max(times), record.gpus, fastest, start.gpus, kind)[1]
    odd = "" if crowded else above_linear(efficiency, record.gpus / start.gpus, lowest)
    shared = [f"{name_of(r)} {said}" for r, _ in group if (said := together.get(r.source))]
    odd = "; ".join(filter(None, (odd, *shared)))
    return entry | {
        "speedup_vs_1gpu": faster if start.gpus == 1 else None,
        "speedup_vs_baseline": faster,
        "scaling_efficiency": None if crowded else efficiency,
        **({"no_efficiency": "oversubscribed: ranks share cores"} if crowded else {}),
        **({"note": odd} if odd else {}),
    }


@command_line("analysis.scaling_report")
def main(argv: list[str] | None = None) -> int:
    """Write the report and say in one line what is in it."""
    parser = Parser(
        prog="python -m analysis.scaling_report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="a study's runs")
    parser.add_argument("--baseline", metavar="NAME", help="default: the study's own")
    parser.add_argument("--scaling", choices=("strong", "weak"), help="default: what the runs are")
    beside.add_flag(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"default: DIR/{FILE}")
    arguments = parser.parse_args(argv)
    records, refused = load([arguments.folder])
    found = report(records, refused, arguments.baseline, arguments.scaling, arguments.predict)
    out = arguments.out or arguments.folder / FILE
    try:
        write_json(out, found)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from error
    for line in found["left_out"]:
        print(printable(f"left out: {line}"))
    invalid = sum("invalid_comparison" in entry for entry in found["configurations"])
    said = f"{out}: {len(found['configurations'])} configurations against {found['baseline']}"
    print(printable(said + (f", {invalid} of them invalid comparisons" if invalid else "")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
