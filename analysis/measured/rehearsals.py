"""Whether every run of every shipped study trains a step and fits its card, from rehearsals.

`benchmarks/rehearse_studies.py` writes the file that is read here; `parallel.rehearse` says what a
rehearsal is.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from analysis.common.table import Column, Table
from analysis.logs.published_csv import Row, read_csv
from base.files import ROOT
from models.memory import GB
from parallel.config.study import Study, load_study
from parallel.rehearse import KINDS, card_gb_of, memory_rows, too_much, unable


def studies() -> Iterator[tuple[str, Study]]:
    """The shipped studies by their paths below the repository."""
    for path in sorted((ROOT / "slurm").rglob("*.toml")):
        if path.name != "clusters.toml":
            yield str(path.relative_to(ROOT)), load_study(path)


def rank_of(study: Study, row: Row) -> dict[str, Any]:
    """A line of the file as GB at the peak beside the formula, and what is wrong."""
    if error := row.text("error"):
        return {"stage": int(row.number("stage")), "wrong": f"cannot train a step: {error}"}
    spec = study.specs[row.text("run")]
    peak = {kind: int(row.number(f"{kind}_bytes")) for kind in KINDS}
    stage = int(row.number("stage"))
    *_, (_, ours, formula) = memory_rows(spec, stage, peak)
    over = too_much(int(row.number("rank")), stage, peak, card_gb_of(study.cluster))
    return {
        "stage": stage,
        "held": ours / GB,
        "formula": formula / GB,
        "off": formula / ours - 1,
        "wrong": over,
    }


def runs(path: Path) -> list[dict[str, Any]]:
    """One row per run of every shipped study; `path`: the file of rehearsals."""
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in read_csv(path, ("study", "run")).rows:
        lines.setdefault((row.text("study"), row.text("run")), []).append(row)
    found = []
    for name, study in studies():
        for run, spec in study.specs.items():
            ranks = [rank_of(study, row) for row in lines.get((name, run), [])]
            first, last = ranks[0] if ranks else {}, ranks[-1] if len(ranks) > 1 else {}
            wrong = "; ".join(rank["wrong"] for rank in ranks if rank["wrong"])
            why = unable(spec) or ("" if len(ranks) == min(spec.pp, 2) else "not rehearsed")
            found.append(
                {
                    "study": name.removeprefix("slurm/"),
                    "run": run,
                    "card": card_gb_of(study.cluster),
                    "ranks": ranks,
                    "wrong": wrong or why or "-",
                    "kind": "wrong" if wrong else "missing" if why else "trains",
                    **{f"first_{k}": first.get(k) for k in ("held", "formula", "off")},
                    **{f"last_{k}": last.get(k) for k in ("held", "formula", "off")},
                }
            )
    return found


def report(paths: list[Path], runs_too: bool = False) -> list[Table]:
    """The studies; with runs_too also their runs."""
    (path,) = paths
    rows = runs(path)
    commits = Counter(row.text("commit") for row in read_csv(path, ("study", "run")).rows)
    of_code = ", ".join(f"{commit} {n}" for commit, n in commits.most_common())
    by_study: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_study.setdefault(row["study"], []).append(row)
    summary = []
    for study, of in by_study.items():
        offs = [rank["off"] for row in of for rank in row["ranks"] if "off" in rank]
        count = {kind: sum(row["kind"] == kind for row in of) for kind in ("trains", "missing")}
        wrong = sum(row["kind"] == "wrong" for row in of)
        summary.append(
            {
                "study": study,
                "runs": len(of),
                **count,
                "most": max((rank["held"] for row in of for rank in row["ranks"] if "held" in rank),
                    default=None),
                "card": of[0]["card"],
                "within": sum(abs(off) <= 0.03 for off in offs) / len(offs) if offs else None,
                "wrong": wrong,
            }
        )  # fmt: skip
    tables = [
        Table(
            [
                Column("study", "study"),
                Column("runs", "runs", "d"),
                Column("trains", "train a step and fit", "d"),
                Column("missing", "not rehearsed", "d"),
                Column("most", "fullest rank GB", ".1f"),
                Column("card", "card GB", "g"),
                Column("within", "formula within 3 %", ".0%"),
                Column("wrong", "do not train or fit", "d"),
            ],
            summary,
            "Every run of the shipped studies, its first and last stage rehearsed",
            [
                "formula within 3 %: of the rehearsed ranks; docs/rehearse.md says where it is not",
                f"lines by the commit of the code that rehearsed: {of_code}",
            ],
        )
    ]
    if runs_too:
        tables.append(
            Table(
                [
                    Column("study", "study"),
                    Column("run", "run"),
                    Column("card", "card GB", "g"),
                    Column("first_held", "first stage GB", ".2f"),
                    Column("first_formula", "formula GB", ".2f"),
                    Column("first_off", "difference", "+.1%"),
                    Column("last_held", "last stage GB", ".2f"),
                    Column("last_formula", "formula GB", ".2f"),
                    Column("last_off", "difference", "+.1%"),
                    Column("wrong", "else", long="below"),
                ],
                rows,
                "Bytes of a rank's tensors at the peak of a step",
                ["a GB is 2^30 bytes; the CUDA context, NCCL and what an allocator wastes are not"],
            )
        )
    return tables
