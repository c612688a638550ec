"""The page of what is at paths: runs and logs, published CSVs, or both."""

from pathlib import Path
from typing import Any

from analysis.logs.load import baseline_of, find_logs, load, name_of
from analysis.pages import published, ranks, steps, study
from analysis.pages.html import page
from analysis.pages.section import Section
from models.errors import UsageError
from parallel.record.reader import is_run_folder


def page_of(
    paths: list[Path], facts: dict[str, Any] | None = None, **settings: Any
) -> tuple[str, list[str]]:
    """(the page as text, one line for each thing that was refused); settings: of `sections_of`.

    Raises:
        UsageError: as `sections_of`, or vl-convert-python is not installed.
    """
    title, sections, refused = sections_of(paths, facts, **settings)
    return page(title, sections), refused


def tables_at(path: Path) -> list[Path]:
    """The published CSVs that a path means: itself, or those that stand in the folder."""
    if path.is_dir():
        return [] if is_run_folder(path) else sorted(path.glob("*.csv"))
    return [path] if path.suffix == ".csv" and path.is_file() else []


def _has_logs(path: Path) -> bool:
    return path.is_dir() and bool(find_logs([path])[0])


def sections_of(
    paths: list[Path],
    facts: dict[str, Any] | None = None,
    *,
    convention: str | None = None,
    baseline: str | None = None,
    kind: str | None = None,
    any_commit: bool = False,
    predict: str | None = None,
    question: str = "",
) -> tuple[str, list[Section], list[str]]:
    """(the page's title, its views, one line for each thing that was refused).

    facts: what the logs do not say, by Record's names. question: what the study asks, where no
    file of a study says it. The other settings are those of `tflops.of_records`.

    Raises:
        UsageError: nothing could be read, or there is no such baseline or calibration.
    """
    tables = {table: path for path in paths for table in tables_at(path)}
    others = [path for path in paths if path not in tables.values() or _has_logs(path)]
    sections, refused, names = [], [], []
    if others:
        records, refused = load(others, facts)
        settings = (convention, baseline, kind, any_commit, predict, question)
        first, last = study.of_records(records, refused, *settings)
        base = baseline_of(baseline, records) if baseline else None
        names_of = {Path(r.source): name_of(r) for r in records}
        sections += [
            *first,
            *steps.views(records, base),
            *ranks.views(others, names_of, baseline, kind, predict),
        ]
        sections += last
        names += sorted({r.study for r in records if r.study}) or [p.name for p in others]
    for table, path in tables.items():
        try:
            sections += published.views(table)
            names.append(path.absolute().name)
        except UsageError as error:  # the others are still shown
            refused.append(str(error))
    if not sections:
        raise UsageError("; ".join(refused))
    return f"Scaling study: {', '.join(dict.fromkeys(names))}", sections, refused
