"""The views of `--breakdown`: where each rank's time went, and what efficiency was lost to."""

from pathlib import Path

from analysis.common.tables import Column, Table
from analysis.measured import breakdown, predictions
from analysis.pages import charts, pipeline
from analysis.pages.section import Chart, Section, group
from analysis.planner.calibration import load_calibration
from analysis.planner.runs import predicted_terms
from models.errors import UsageError
from parallel.record.schema import CATEGORIES

RUNS = 12  # that the chart of ranks shows at once


# Terms of the time model -> the columns of a breakdown that measure the same; the last have none.
_TERMS = {
    "compute": ("forward", "backward", "tp"),
    "bubble": ("bubble",),
    "p2p": ("pp",),
    "data_parallel": ("dp",),
    "embedding": ("embedding",),
    "optimizer": ("optimizer",),
    "not predicted": ("data", "move", "mixed", "control", "other"),
}
# Which part's colour a term has.
_SHOWN = {"p2p": "pp", "data_parallel": "dp", "not predicted": "other"}


def views(
    paths: list[Path],
    names: dict[Path, str],
    baseline: str | None,
    kind: str | None,
    predict: str | None = None,
) -> list[Section]:
    """The breakdown per rank, its residuals by term where a cluster is given to `predict` on, the
    pipeline and the waterfall; none where no run has a breakdown.

    names: what the page's table of runs calls each run folder; its filter goes by these names.
    """
    folders = [path for path in paths if path.is_dir()]
    try:
        found, problems = breakdown.read_all(folders) if folders else ([], [])
    except UsageError:  # no run folder has one
        return []
    if not found:
        return []
    for one in found:
        one.shown = names[one.run.path]
    unread = [line for line in problems if not line.endswith(breakdown.WITHOUT)]
    try:
        lost = _lost(breakdown.losses(found, baseline, kind))
    except UsageError as error:  # the baseline has no breakdown: the other views are still there
        lost = Section("Efficiency lost", [str(error)])
    return [_by_term(found, predict), _by_rank(found, unread), pipeline.view(found), lost]


def _by_term(found: list[breakdown.Breakdown], predict: str | None) -> Section:
    """Each term of the prediction beside what the rank that computed longest measured of it."""
    one = Section("Residual by term")
    if not predict:
        return one
    calibration = load_calibration(predict)
    rows = []
    for run in found:
        terms, why = predicted_terms(run.record, calibration)
        if why:
            one.words.append(f"{run.name}: not predicted: {why}")
            continue
        rank = max(run.ranks, key=lambda r: run.ranks[r]["forward_s"] + run.ranks[r]["backward_s"])
        for term, columns in _TERMS.items():
            measured = sum(run.ranks[rank][f"{c}_s"] for c in columns)
            guess = terms.get(term, 0.0)
            if guess or measured:
                rows.append(
                    {"run": run.name, "rank": rank, "term": term.replace("_", " ")}
                    | {"predicted_s": guess, "measured_s": measured, "residual_s": guess - measured}
                    | {"part": _SHOWN.get(term, term)}
                )
    columns = [
        Column("run", "run"),
        Column("rank", "rank", "d"),
        Column("term", "term"),
        Column("predicted_s", "predicted s", ".4g"),
        Column("measured_s", "measured s", ".4g"),
        Column("residual_s", "predicted - measured s", "+.4g"),
    ]
    notes = [
        f"predicted by {predictions.source(predict)}",
        "measured: of the rank whose forward and backward took longest, as the time model counts"
        " the slowest stage; waiting for another rank is in the term of the message",
        "compute: forward, backward and the exposed messages of tp, which the model overlaps with"
        " launching kernels",
    ]
    one.tables["terms"] = Table(columns, rows, notes=notes)
    if rows:
        worst = max(rows, key=lambda r: abs(r["residual_s"]))
        said = (
            f"Predicted less measured seconds of a step by term: to the right of 0 the model says"
            f" more than was measured. The largest is {worst['residual_s']:+.3g} s, {worst['term']}"
            f" of {worst['run']}. At most {RUNS} runs are shown."
        )
        drawn = [{k: r[k] for k in ("run", "term", "part", "residual_s")} for r in rows]
        one.data["residuals"] = [group([r | {"order": i} for i, r in enumerate(drawn)])]
        names = {r["term"]: r["part"] for r in rows}
        spec = charts.parts("run", "residual_s", "predicted - measured s", "term", names)
        one.charts.append(Chart(spec, "residuals", said, RUNS))
    return one


def _by_rank(found: list[breakdown.Breakdown], unread: list[str]) -> Section:
    rows, used = [], []
    for one in found:
        slowest = max(one.ranks, key=lambda rank: one.ranks[rank]["elapsed_s"])
        for rank, row in sorted(one.ranks.items()):
            known = [c for c in CATEGORIES if row[f"{c}_s"]]
            used += known
            end = sum(row[f"{c}_s"] for c in known)
            for place, category in enumerate(known):
                rows.append(
                    {
                        "run": one.name,
                        "bar": f"{one.name}; rank {rank}",
                        "part": category,
                        "order": place,
                        "seconds": row[f"{category}_s"],
                        "end": end,
                        "mark": "slowest" if rank == slowest and len(one.ranks) > 1 else None,
                    }
                )
    names = [c for c in CATEGORIES if c in used]
    spec = charts.parts("bar", "seconds", "seconds per step", "part", names, "mark")
    said = (
        f"{len(found)} runs with a breakdown; one bar a rank, the slowest is marked."
        f" At most the first {RUNS} runs that the filter leaves are shown."
    )
    tables = {"times": breakdown.times(found), "messages": breakdown.messages(found)}
    data = {"ranks": [group(rows)]}
    return Section("Breakdown per rank", unread, tables, [Chart(spec, "ranks", said, RUNS)], data)


def _lost(table: Table) -> Section:
    one = Section("Efficiency lost", tables={"lost": table})
    if not table.rows:
        return one
    names = [c.key for c in table.columns[4:-1]]
    rows = []
    for row in table.rows:
        at = 1.0
        for name in names:
            rows.append(
                {"run": row["run"], "part": name, "lost": row[name]}
                | {"from": at, "to": at - row[name]}
            )
            at -= row[name]
    one.data["lost_parts"] = [group(rows)]
    worst = max(table.rows, key=lambda row: row["lost"])
    said = (
        f"From an efficiency of 1, each part takes its share; the bars end at the efficiency."
        f" Most was lost by {worst['run']}: {worst['lost']:.3f}."
    )
    one.charts.append(Chart(charts.waterfall(names), "lost_parts", said))
    return one
