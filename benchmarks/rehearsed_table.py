"""Whether every run of every shipped study trains a step and fits its card, from rehearsals.

    python benchmarks/rehearsed_table.py

`benchmarks/rehearse_studies.py` writes logs/2-core-cpu/rehearsed.csv, which is read here;
`parallel.rehearse` says what a rehearsal is. The table goes to rehearsed.md beside it.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from analysis.common.table import Column, Table
from analysis.logs.published_csv import Row, read_csv
from base.errors import Parser, command_line
from base.files import ROOT
from base.units import GIB
from parallel.config.study import Study, load_study
from parallel.rehearse import KINDS, card_gb_of, memory_rows, too_much, unrehearsed

REHEARSED = ROOT / "logs" / "2-core-cpu" / "rehearsed.csv"
MARK = "<!-- what follows is written by benchmarks/rehearsed_table.py -->\n\n"


def rank_of(study: Study, row: Row) -> dict[str, Any]:
    """A line of the file as GiB at the peak beside the formula, and what is wrong."""
    stage = int(row.number("stage"))
    if error := row.text("error"):
        return {"stage": stage, "wrong": f"cannot train a step: {error}"}
    peak = {kind: int(row.number(f"{kind}_bytes")) for kind in KINDS}
    most = memory_rows(study.specs[row.text("run")], stage, peak)[-1]
    return {
        "stage": stage,
        "held": most.rehearsed / GIB,
        "wrong": too_much(int(row.number("rank")), stage, peak, card_gb_of(study.cluster)),
    } | (
        {}
        if most.formula is None
        else {"formula": most.formula / GIB, "off": most.formula / most.rehearsed - 1}
    )


def runs(path: Path) -> list[dict[str, Any]]:
    """One row per run of every shipped study; `path`: the file of rehearsals."""
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in read_csv(path, ("study", "run")).rows:
        lines.setdefault((row.text("study"), row.text("run")), []).append(row)
    rows = []
    for toml in sorted((ROOT / "slurm").rglob("*.toml")):
        if toml.name == "clusters.toml":
            continue
        name, study = str(toml.relative_to(ROOT)), load_study(toml)
        for run, spec in study.specs.items():
            ranks = [rank_of(study, row) for row in lines.get((name, run), [])]
            wrong = "; ".join(rank["wrong"] for rank in ranks if rank["wrong"])
            missing = "" if len(ranks) == min(spec.pp, 2) else "not rehearsed"
            if why := unrehearsed(spec):
                missing += f": {why}"
            row = {"study": name.removeprefix("slurm/"), "run": run, "ranks": ranks}
            row |= {"card": card_gb_of(study.cluster), "else": wrong or missing or "-"}
            kinds = {"wrong": wrong, "missing": missing, "trains": True}
            row["kind"] = next(kind for kind, holds in kinds.items() if holds)
            for at, end in zip((0, -1), ("first", "last"), strict=True):
                rank = ranks[at] if len(ranks) > -at else {}
                row |= {f"{end}_{key}": rank.get(key) for key in ("held", "formula", "off")}
            rows.append(row)
    return rows


def table(path: Path = REHEARSED) -> Table:
    """The runs, and below them how many train a step and fit."""
    rows = runs(path)
    commits = Counter(row.text("commit") for row in read_csv(path, ("study", "run")).rows)
    of_code = ", ".join(f"{commit} {n}" for commit, n in commits.most_common())
    kinds = Counter(row["kind"] for row in rows)
    differences = [abs(rank["off"]) for row in rows for rank in row["ranks"] if "off" in rank]
    near = sum(difference <= 0.03 for difference in differences)
    return Table(
        [
            Column("study", "study"),
            Column("run", "run"),
            Column("card", "card GiB", "g"),
            Column("first_held", "first stage GiB", ".2f"),
            Column("first_formula", "formula GiB", ".2f"),
            Column("first_off", "difference", "+.1%"),
            Column("last_held", "last stage GiB", ".2f"),
            Column("last_formula", "formula GiB", ".2f"),
            Column("last_off", "difference", "+.1%"),
            Column("else", "else", long="below"),
        ],
        rows,
        "Bytes of a rank's tensors at the peak of a step",
        [
            f"of {len(rows)} runs {kinds['trains']} train a step and fit their cards,"
            f" {kinds['wrong']} do not, {kinds['missing']} are not rehearsed",
            f"the formula is within 3 % on {near} of {len(differences)} ranks;"
            " docs/rehearse.md says where it is not",
            "the CUDA context, NCCL and what an allocator wastes are not counted",
            f"lines by the commit of the code that rehearsed: {of_code}",
        ],
    )


@command_line("rehearsed_table")
def main(argv: list[str] | None = None) -> int:
    Parser(prog="python benchmarks/rehearsed_table.py", description=__doc__).parse_args(argv)
    page = REHEARSED.with_suffix(".md")
    words = page.read_text().partition(MARK)[0]
    page.write_text(words + MARK + table().render("markdown"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
