"""Rehearses the first and last stage of every run of every shipped study: a line each.

    python benchmarks/rehearse_studies.py [--out logs/2-core-cpu/rehearsed.csv] [STUDY.toml ...]

Ranks that the file has already are left out, so a stopped campaign goes on; small models come
first. Ranks that hold and do the same (their runs differ in seed, steps or rates, in the number of
micro-batches beyond those that the peak needs, or in replicas that shard nothing) are rehearsed
once, and `same_as` of the others' lines names the run. A rank that could not train a step is a line
with its error.
`python -m analysis.report logs/2-core-cpu/rehearsed.md` makes the table of the file.
"""

import argparse
import csv
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from models.errors import Parser, command_line  # noqa: E402
from models.files import ROOT  # noqa: E402
from parallel.config.study import load_study  # noqa: E402
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
COLUMNS += (*(f"{kind}_bytes" for kind in KINDS), "flops", "seconds", "real_bytes", "error")


def row_of(study: str, run: str, found: Rehearsal) -> dict[str, object]:
    """A rehearsal as a line of the file."""
    kinds = {f"{kind}_bytes": found.peak.get(kind, 0) for kind in KINDS}
    kept = {name: getattr(found, name) for name in COLUMNS if hasattr(found, name)}
    seconds = {"seconds": f"{found.seconds:.1f}"}
    return {"study": study, "run": run, "same_as": ""} | kept | kinds | seconds


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
    # The operators of a rehearsal: layers of the stage times micro-batches.
    work.sort(key=lambda w: w[2].model.n_layer / w[2].pp * shortened(w[2], 0).layout.n_micro)
    known = {}  # the row of some work
    for study, run, spec, rank in work:
        if row := done.get((study, run, str(rank))):
            known.setdefault(work_of(spec, rank), row)
    processes = Processes({spec.engine for _, _, spec, _ in work})
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
            row = known[key] = row_of(study, run, found)
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
