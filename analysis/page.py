"""One offline HTML file of a study: what won, by how much, whether it can be trusted, and why.

    python -m analysis.page PATH... [--out FILE.html] [--baseline NAME] [--predict CLUSTER]

PATH is a run folder, a log, or a folder of these. The file asks nothing of the
network, so it opens on a machine that has none. Its tables are those of analysis.tflops and
analysis.breakdown; rows sort and filter. A view without data is left out. The command prints what
bounds the run with the most tokens/s, where it is ours.
Exits 2 when nothing could be read.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.logs.fact_options import facts_of
from analysis.logs.load import load
from analysis.runs import run_table
from analysis.runs.baseline import baseline_of
from analysis.runs.fairness import DEFAULT_TERMS, Terms, scaling_of
from analysis.runs.run_options import parser_of, terms_of
from base.errors import command_line, printable, warn
from base.files import add_force_flag
from base.storage import check_output, output

if TYPE_CHECKING:
    from analysis.pages.section import Page


TITLE = 100  # characters of the names in a title


def page_at(
    paths: list[Path],
    facts: dict[str, Any] | None = None,
    convention: str | None = None,
    terms: Terms = DEFAULT_TERMS,
    predict: str | None = None,
) -> "Page":
    """Makes the page of the runs and logs at paths. `facts` are what the logs do not say, by
    Record's names; the other settings are those of `run_table.of_records`."""
    from analysis.pages import SECTIONS, first_screen  # here: --help needs no charts
    from analysis.pages.section import Page, Study

    records, refused = load(paths, facts)
    table = run_table.of_records(records, convention, terms, predict)
    base = baseline_of(terms.baseline, records) if terms.baseline else None
    kind = terms.scaling or scaling_of(records)
    study = Study(records, table, kind, terms.baseline, base, refused, predict)
    names = sorted({r.study for r in records if r.study}) or [path.name for path in paths]
    title = ", ".join(names)
    title = title if len(title) <= TITLE else f"{len(names)} logs and folders"
    sections = [section for sections_of in SECTIONS for section in sections_of(study)]
    title = table.title or f"Scaling study: {title}"
    return Page(title, first_screen.first_screen(study), sections, refused, study.palette)


@command_line("analysis.page")
def main(argv: list[str] | None = None) -> int:
    names = ("baseline", "scaling", "any_commit", "facts", "predict", "convention")
    parser = parser_of("analysis.page", __doc__, *names)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file to write (default: study.html beside PATH)"
    )
    add_force_flag(parser)
    flags = parser.parse_args(argv)
    from analysis.pages import page_html

    path = flags.paths[0]
    out = flags.out or (path if path.is_dir() else path.parent) / "study.html"
    check_output(out, page_html.MARK, flags.force, flags.paths)
    page = page_at(flags.paths, facts_of(flags), flags.convention, terms_of(flags), flags.predict)
    warn("analysis.page", *page.refused)
    text = page_html.html_of(page)
    with output(out, page_html.MARK, flags.force, flags.paths) as file:
        file.write_text(text)
    if page.first.bound:
        print(printable(page.first.bound))
    print(printable(f"{out}: {len(text) / 1e6:.2f} MB"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
