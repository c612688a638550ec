"""Rehearses the first and last stage of every run of every shipped study: a line each.

    python benchmarks/rehearse_studies.py [--out logs/2-core-cpu/rehearsed.csv] [STUDY.toml ...]

Ranks that the file has already are left out, so a stopped campaign goes on; small models come
first. Ranks that hold and do the same (their runs differ in seed, steps or rates, in the number of
micro-batches beyond those that the peak needs, or in replicas that shard nothing) are rehearsed
once, and `same_as` of the others' lines names the run. A rank that could not train a step is a line
with its error; `commit` is that of the code that rehearsed. Delete lines to rehearse them again.
`python -m analysis.report logs/2-core-cpu/rehearsed.md` makes the table of the file.
"""

import argparse
import csv
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from base.errors import Parser, command_line  # noqa: E402
from base.files import ROOT  # noqa: E402
from parallel.config.settings import RunSpec  # noqa: E402
from parallel.config.study import load_study  # noqa: E402
from parallel.record.facts import git  # noqa: E402
from parallel.rehearse import (  # noqa: E402
    KINDS,
    Processes,
    Rehearsal,
    ranks_of,
    shortened,
    unable,
    work_of,
)

OUT = ROOT / "logs" / "2-core-cpu" / "rehearsed.csv"
COLUMNS = ("study", "run", "rank", "stage", "same_as", "micro_batches", "parameters")
COLUMNS += (
    *(f"{kind}_bytes" for kind in KINDS),
    "flops",
    "seconds",
    "real_bytes",
    "commit",
    "error",
)


def row_of(study: str, run: str, found: Rehearsal) -> dict[str, object]:
    """A rehearsal as a line of the file."""
    kinds = {f"{kind}_bytes": found.peak.get(kind, 0) for kind in KINDS}
    kept = {name: getattr(found, name) for name in COLUMNS if hasattr(found, name)}
    seconds = {"seconds": f"{found.seconds:.1f}"}
    return {"study": study, "run": run, "same_as": ""} | kept | kinds | seconds


def operators(work: tuple[str, str, RunSpec, int]) -> float:
    """How long a rehearsal takes beside others: layers of the stage times micro-batches, and ZeRO-3
    cuts and gathers each parameter."""
    _, _, spec, rank = work
    stage = spec.layout.coords(rank)["pp"]
    each = spec.model.n_layer / spec.pp * shortened(spec, stage).layout.n_micro
    return each * (8 if spec.zero_stage == 3 else 1)


@command_line("rehearse_studies")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        prog="python benchmarks/rehearse_studies.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("studies", type=Path, nargs="*", metavar="STUDY.toml")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE.csv")
    arguments = parser.parse_args(argv)
    shipped = [p for p in sorted((ROOT / "slurm").rglob("*.toml")) if p.name != "clusters.toml"]
    done: dict[tuple, dict] = {}
    if arguments.out.exists():
        with arguments.out.open(newline="") as file:
            done = {(row["study"], row["run"], row["rank"]): row for row in csv.DictReader(file)}
    work = []
    for path in [p.resolve() for p in arguments.studies] or shipped:
        study = str(path.relative_to(ROOT))
        for run, spec in load_study(path).specs.items():
            if why := unable(spec):
                print(f"{study} {run}: {why}")
                continue
            for rank in ranks_of(spec, "first-and-last"):
                work.append((study, run, spec, rank))
    work.sort(key=operators)
    facts = git(ROOT)
    commit = (facts["commit"] or "-")[:7] + "+changes" * bool(facts["dirty"])
    known = {}  # the row of some work
    for study, run, spec, rank in work:
        if row := done.get((study, run, str(rank))):
            known.setdefault(work_of(spec, rank), row)
    processes = Processes([spec for _, _, spec, _ in work])
    for at, (study, run, spec, rank) in enumerate(work):
        if (study, run, str(rank)) in done:
            continue
        print(f"{at + 1} of {len(work)}: {study} {run}, rank {rank}: ", end="", flush=True)
        key = work_of(spec, rank)
        if key in known:
            same_as = f"{known[key]['study']} {known[key]['run']}"
            row = known[key] | {"study": study, "run": run, "rank": rank, "same_as": same_as}
            print(f"as {same_as}", flush=True)
        else:
            found = processes.rehearse(spec, rank)
            row = known[key] = row_of(study, run, found) | {"commit": commit}
            print(found.error or f"{found.seconds:.0f} s", flush=True)
        new = not arguments.out.exists()
        with arguments.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
