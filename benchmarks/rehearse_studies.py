"""Rehearses the first and last stage of every run of every shipped study: a line each.

    python benchmarks/rehearse_studies.py [--out logs/2-core-cpu/rehearsed.csv] [STUDY.toml ...]

Ranks that the file has already are left out, so a stopped campaign goes on. A rank that could not
train a step is a line with its error; `commit` is that of the code that rehearsed. `same_as` of an
older line names the run whose rehearsal was taken over for it; new lines have no `flops`.
Delete lines to rehearse them again.
`python benchmarks/rehearsed_table.py` makes the table of the file.
"""

import argparse
import csv
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from base.errors import Parser, command_line  # noqa: E402
from parallel.config.study import load_study  # noqa: E402
from parallel.record.facts import git  # noqa: E402
from parallel.rehearse import (  # noqa: E402
    KINDS,
    import_libraries,
    ranks_of,
    rehearse_apart,
    unrehearsed,
)

OUT = ROOT / "logs" / "2-core-cpu" / "rehearsed.csv"
KEPT = ("rank", "stage", "micro_batches", "parameters", "error")
COLUMNS = ("study", "run", "rank", "stage", "same_as", "micro_batches", "parameters")
COLUMNS += (*(f"{kind}_bytes" for kind in KINDS), "flops", "seconds", "real_bytes")
COLUMNS += ("commit", "error")


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
    done: set[tuple[str, str, str]] = set()
    if arguments.out.exists():
        with arguments.out.open(newline="") as file:
            done = {(row["study"], row["run"], row["rank"]) for row in csv.DictReader(file)}
    work = []
    for path in [p.resolve() for p in arguments.studies] or shipped:
        study = str(path.relative_to(ROOT))
        for run, spec in load_study(path).specs.items():
            if why := unrehearsed(spec):
                print(f"{study} {run} is left out: {why}")
                continue
            for rank in ranks_of(spec, "first-and-last"):
                if (study, run, str(rank)) not in done:
                    work.append((study, run, spec, rank))
    import_libraries(spec for _, _, spec, _ in work)
    facts = git(ROOT)
    commit = (facts["commit"] or "-")[:7]
    if facts["dirty"]:
        commit += "+changes"
    with arguments.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n", restval="")
        if not file.tell():
            writer.writeheader()
        for at, (study, run, spec, rank) in enumerate(work, start=1):
            print(f"{at} of {len(work)}: {study} {run}, rank {rank}: ", end="", flush=True)
            rehearsal = rehearse_apart(spec, rank)
            row = {"study": study, "run": run, "commit": commit}
            row |= {name: getattr(rehearsal, name) for name in KEPT}
            row |= {f"{kind}_bytes": rehearsal.peak.get(kind, 0) for kind in KINDS}
            writer.writerow(row | {"seconds": f"{rehearsal.seconds:.1f}"})
            file.flush()
            print(rehearsal.error or f"{rehearsal.seconds:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
