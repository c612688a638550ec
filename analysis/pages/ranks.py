"""The views of `--breakdown`: where each rank's time went, and what efficiency was lost to."""

from pathlib import Path

from analysis.common.tables import Table
from analysis.measured import breakdown
from analysis.pages import charts
from analysis.pages.section import Chart, Section, group
from models.errors import UsageError
from parallel.record.schema import CATEGORIES

RUNS = 12  # that the chart of ranks shows at once


def views(paths: list[Path], baseline: str | None, kind: str) -> list[Section]:
    """The breakdown per rank and the waterfall; none where no run has a breakdown."""
    folders = [path for path in paths if path.is_dir()]
    try:
        found, problems = breakdown.read_all(folders) if folders else ([], [])
    except UsageError:  # no run folder has one
        return []
    if not found:
        return []
    unread = [line for line in problems if not line.endswith(breakdown.WITHOUT)]
    try:
        lost = _lost(breakdown.losses(found, baseline, kind))
    except UsageError as error:  # the baseline has no breakdown: the other views are still there
        lost = Section("Efficiency lost", [str(error)])
    return [_by_rank(found, unread), lost]


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
                        "bar": f"{one.name}, rank {rank}",
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
