"""One offline HTML file of a study: its verdict, its table of runs, and what its curves show.

    python -m analysis.page PATH... [--out FILE.html] [--baseline NAME] [--predict CLUSTER]
    python -m analysis.page PATH... --svg FOLDER

PATH is a run folder, a log, a published CSV, or a folder of these. The file asks nothing of the
network, so it opens on a machine that has none. Its tables are those of analysis.tflops and
analysis.breakdown; rows sort and filter, and copy as Markdown or CSV. The charts show the runs that
the filter leaves. The raw values stand in the file as JSON. A view without data is left out.
--svg writes the charts alone, each as an SVG file; with --out the page, too.
Exits 2 when nothing could be read.
"""

if not __package__:
    import as_script

import sys
from pathlib import Path

from analysis.common.tables import writing
from analysis.logs.flags import facts_of
from analysis.measured.flags import parser_of
from models.errors import command_line, printable, warn
from models.files import add_force_flag, named_folder
from models.flops import CONVENTIONS
from models.storage import check_output, output


@command_line("analysis.page")
def main(argv: list[str] | None = None) -> int:
    """Write the page and say in one line what it is."""
    flags = ("baseline", "scaling", "any_commit", "facts", "predict")
    parser = parser_of("analysis.page", __doc__, *flags)
    parser.add_argument(
        "--convention",
        choices=tuple(CONVENTIONS),
        help="the formula for FLOPs (default: that of analysis.tflops)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file to write (default: study.html beside PATH)"
    )
    parser.add_argument(
        "--question",
        default="",
        metavar="TEXT",
        help="what is asked (default: the study's question)",
    )
    said = "write the charts as SVG files to this folder, and the page only with --out"
    parser.add_argument("--svg", type=named_folder, metavar="FOLDER", help=said)
    add_force_flag(parser)
    given = parser.parse_args(argv)
    from analysis.pages import html, svg  # here: --help needs no tables
    from analysis.pages.whole import sections_of

    path = given.paths[0]
    out = given.out or (path if path.is_dir() else path.parent) / "study.html"
    if given.out or not given.svg:
        check_output(out, html.MARK, given.force, given.paths)
    title, sections, refused = sections_of(
        given.paths,
        facts_of(given),
        convention=given.convention,
        baseline=given.baseline,
        kind=given.scaling,
        any_commit=given.any_commit,
        predict=given.predict,
        question=given.question,
    )
    for line in refused:
        warn("analysis.page", line)
    if given.svg:
        with writing(given.svg):
            written = svg.draw(sections, given.svg, given.force)
        print(*map(printable, map(str, written)), sep="\n")
        if not given.out:
            return 0
    text = html.page(title, sections)
    with output(out, html.MARK, given.force, given.paths) as file:
        file.write_text(text)
    print(printable(f"{out}: {len(text) / 1e6:.2f} MB"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
