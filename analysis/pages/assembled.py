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
    question: str = "",
) -> Page:
    """The page. facts: what the logs do not say, by Record's names. question: what the study asks,
    where no file of a study says it. The other settings are those of `tflops.of_records`.

    Raises:
        UsageError: nothing could be read, or there is no such baseline or calibration.
    """
    records, refused = load(paths, facts)
    kind = kind or scaling_of(records)
    settings = {"any_commit": any_commit}
    table = run_table.of_records(records, convention, baseline, kind, predict=predict, **settings)
    other = "weak" if kind == "strong" else "strong"
    others = run_table.rows(records, convention, baseline, other, **settings)
    base = baseline_of(baseline, records) if baseline else None
    names = sorted({r.study for r in records if r.study}) or [path.name for path in paths]
    sections = [
        *run_views.first_views(records, table, others, kind),
        *step_views.views(records, base),
        *cost_views.views(records, baseline, kind),
        Section("About", run_views.about(records, question)),
        run_views.provenance(records, refused),
    ]
    summary = run_views.summary(records, table, kind, refused)
    return Page(f"Scaling study: {', '.join(names)}", summary, sections, refused)
