"""One offline HTML file of a study: what won, by how much, whether it can be trusted, and why.

    python -m analysis.page PATH... [--out FILE.html] [--baseline NAME] [--predict CLUSTER]

PATH is a run folder, a log, or a folder of these. The file asks nothing of the
network, so it opens on a machine that has none. Its tables are those of analysis.tflops and
analysis.breakdown; rows sort and filter. A view without data is left out.
Exits 2 when nothing could be read.
"""

import sys
from pathlib import Path

from analysis.logs.fact_flags import facts_of
from analysis.measured.run_flags import parser_of
from base.errors import command_line, printable, warn
from base.files import add_force_flag
from base.storage import check_output, output


@command_line("analysis.page")
def main(argv: list[str] | None = None) -> int:
    """Write the page and say in one line what it is."""
    flags = ("baseline", "scaling", "any_commit", "facts", "predict", "convention")
    parser = parser_of("analysis.page", __doc__, *flags)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file to write (default: study.html beside PATH)"
    )
    add_force_flag(parser)
    given = parser.parse_args(argv)
    from analysis.pages import page_html  # here: --help needs no tables
    from analysis.pages.assembled import page_at

    path = given.paths[0]
    out = given.out or (path if path.is_dir() else path.parent) / "study.html"
    check_output(out, page_html.MARK, given.force, given.paths)
    page = page_at(
        given.paths,
        facts_of(given),
        convention=given.convention,
        baseline=given.baseline,
        kind=given.scaling,
        any_commit=given.any_commit,
        predict=given.predict,
    )
    for line in page.refused:
        warn("analysis.page", line)
    text = page_html.html_of(page)
    with output(out, page_html.MARK, given.force, given.paths) as file:
        file.write_text(text)
    print(printable(f"{out}: {len(text) / 1e6:.2f} MB"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
