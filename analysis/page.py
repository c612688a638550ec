"""One offline HTML file of a study: what won, by how much, whether it can be trusted, and why.

    python -m analysis.page PATH... [--out FILE.html] [--baseline NAME] [--predict CLUSTER]

PATH is a run folder, a log, or a folder of these. The file asks nothing of the
network, so it opens on a machine that has none. Its tables are those of analysis.tflops and
analysis.breakdown; rows sort and filter. A view without data is left out.
Exits 2 when nothing could be read.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.logs.fact_options import facts_of
from analysis.logs.load import load
from analysis.runs import run_table
from analysis.runs.baseline import baseline_of
from analysis.runs.fairness import scaling_of
from analysis.runs.run_options import parser_of
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
    baseline: str | None = None,
    kind: str | None = None,
    **settings: Any,
) -> "Page":
    """Makes the page of the runs and logs at paths.

    Args:
        facts: what the logs do not say, by Record's names.
        convention, baseline, kind, settings: as of `run_table.of_records`.

    Raises:
        UsageError: nothing could be read, or there is no such baseline or calibration.
    """
    from analysis.pages import SECTIONS, first_screen  # here: --help needs no charts
    from analysis.pages.section import Page, Study

    records, refused = load(paths, facts)
    kind = kind or scaling_of(records)
    table = run_table.of_records(records, convention, baseline, kind, **settings)
    base = baseline_of(baseline, records) if baseline else None
    study = Study(records, table, kind, baseline, base, refused)
    names = sorted({r.study for r in records if r.study}) or [path.name for path in paths]
    title = ", ".join(names)
    title = title if len(title) <= TITLE else f"{len(names)} logs and folders"
    sections = [section for made in SECTIONS for section in made(study)]
    return Page(f"Scaling study: {title}", first_screen.sentences(study), sections, refused)


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
    settings = {"any_commit": flags.any_commit, "predict": flags.predict}
    of_runs = (flags.convention, flags.baseline, flags.scaling)
    page = page_at(flags.paths, facts_of(flags), *of_runs, **settings)
    warn("analysis.page", *page.refused)
    text = page_html.html_of(page)
    with output(out, page_html.MARK, flags.force, flags.paths) as file:
        file.write_text(text)
    print(printable(f"{out}: {len(text) / 1e6:.2f} MB"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
