"""The view of traced steps: each stage's simulated step above what its first rank measured."""

from typing import Any

from analysis.measured import timeline
from analysis.measured.breakdown import Breakdown
from analysis.pages import charts
from analysis.pages.section import Chart, Section, group
from models.errors import UsageError
from parallel.record.timeline import KINDS, Interval

RUNS, EVENTS = 2, 4000  # that the chart shows at once; that the page holds of one run


def view(found: list[Breakdown]) -> Section:
    """The table of traced steps and the first traced step of each run as a picture; nothing where
    no run has a pipeline."""
    one = Section("Pipeline")
    traced, small = [], []
    for run in found:
        if run.spec.layout.pp < 2:
            continue
        try:
            traced.append(timeline.of_run(run))
        except UsageError as error:
            one.words.append(str(error))
    one.tables["stages"] = timeline.table(traced)
    for run in traced:
        rows = _rows(run)
        if len(rows) > EVENTS:
            one.words.append(
                f"{run.name}: {len(rows)} events are too many for the picture (at most {EVENTS});"
                " python -m analysis.breakdown --trace writes them for Perfetto."
            )
        else:
            small.append((run, rows))
    if not small:
        return one
    one.data["intervals"] = [group(rows, run=run.name) for run, rows in small]
    used = dict.fromkeys(row["part"] for _, rows in small for row in rows)
    names = [kind for kind in KINDS if kind in used]
    slow = max(traced, key=lambda t: _seconds(t.measured, t) / _seconds(t.simulated, t))
    said = (
        f"The first traced step, in ms from its first forward. Above, each stage as the schedule"
        f" would run it with its own mean forward and backward; below, what its first rank did."
        f" Measured over simulated is largest in {slow.name}:"
        f" {_seconds(slow.measured, slow) / _seconds(slow.simulated, slow):.2f}."
        f" At most {RUNS} runs are shown."
    )
    spec = charts.intervals(names, "ms")
    one.charts.append(Chart(spec, "intervals", said, RUNS))
    return one


def _seconds(intervals: list[Interval], run: timeline.Timeline) -> float:
    start, end = timeline.window(intervals, run.steps[0])
    return end - start


def _rows(run: timeline.Timeline) -> list[dict[str, Any]]:
    """The first traced step: each stage simulated, and what its first rank did."""
    step = run.steps[0]
    begin = timeline.window(run.measured, step)[0]
    rows = []
    for stage in range(run.pp):
        first = min(run.ranks(stage))
        for said, of in (("simulated", run.simulated), (f"rank {first}", run.measured)):
            rows += [
                {
                    "bar": f"{run.name}; stage {stage}, {said}",
                    "part": i.kind,
                    "micro": i.micro,
                    "start": round(1e3 * (i.start_s - begin), 4),
                    "end": round(1e3 * (i.end_s - begin), 4),
                }
                for i in of
                if i.step == step and i.stage == stage and i.rank in (None, first)
            ]
    return rows
