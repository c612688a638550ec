"""The page of the runs and logs at paths."""

from pathlib import Path
from typing import Any

from analysis.logs.load import baseline_of, load
from analysis.measured import run_table
from analysis.measured.fairness import scaling_of
from analysis.pages import cost_views, run_views, step_views
from analysis.pages.section import Page, Section


def page_at(
    paths: list[Path],
    facts: dict[str, Any] | None = None,
    *,
    convention: str | None = None,
    baseline: str | None = None,
    kind: str | None = None,
    any_commit: bool = False,
    predict: str | None = None,
) -> Page:
    """The page. facts: what the logs do not say, by Record's names. The other settings are those of
    `run_table.of_records`.

    Raises:
        UsageError: nothing could be read, or there is no such baseline or calibration.
    """
    records, refused = load(paths, facts)
    kind = kind or scaling_of(records)
    settings = {"any_commit": any_commit, "predict": predict}
    table = run_table.of_records(records, convention, baseline, kind, **settings)
    base = baseline_of(baseline, records) if baseline else None
    names = sorted({r.study for r in records if r.study}) or [path.name for path in paths]
    sections = [
        run_views.scaling(records, table.rows, kind),
        Section("Runs", tables={"runs": run_views.runs(records, table)}, results=run_views.RESULTS),
        *step_views.views(records, base),
        *cost_views.views(records, baseline, kind),
        Section("About", run_views.about(records)),
        run_views.provenance(records, refused),
    ]
    summary = run_views.summary(records, table, kind, refused)
    return Page(f"Scaling study: {', '.join(names)}", summary, sections, refused)
