"""Writes the marked blocks of Markdown pages from data.

    python -m analysis.report FILE.md... [--check]

A block stands between `<!-- report: NAME ARGUMENTS -->` and `<!-- /report -->`. This command writes
all that is between these marks. NAME is one of

    tflops | scaling | compare | parity | breakdown | stragglers | checkpoints | goodput | plan |
    proposal
        ARGUMENTS               what python -m analysis.NAME prints
    losses PATH..., pop PATH... the last table of breakdown, and of breakdown --pop
    audit PATH...               what is wrong with published tables
    file PATH...                Markdown tables that benchmarks wrote

benchmarks.published_tables knows more names; it writes all blocks, as this command does.

Paths are relative to the repository. `--check` writes nothing, prints the first lines that differ
and exits 1 when a file is stale. Exits 2 when a file, a block or its data cannot be read.
"""

import contextlib
import difflib
import importlib
import io
import re
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from analysis.common.table import Table
from analysis.runs.views import VIEWS
from base.errors import Parser, UsageError, command_line, printable
from base.files import ROOT, read_text
from base.storage import output

_OPEN = r"^<!-- report: (\S.*) -->[ \t]*$"
_CLOSE = "<!-- /report -->"
_BLOCK = re.compile(rf"{_OPEN}((?s:.*?))(?:^{_CLOSE}[ \t]*$|\Z)", re.M)
SHOWN = 20  # lines of a difference
COMMANDS = (*VIEWS, "plan", "proposal")


def _printed(name: str, arguments: list[str]) -> str:
    """Returns what a command prints as Markdown; its notes go to stderr, and a failure is
    raised in its words."""
    main = importlib.import_module(f"analysis.{name}").main
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(ROOT):
        try:
            status = main([*arguments, "--format", "markdown"])
        except SystemExit as error:  # argparse's
            status = error.code
    if status == 2:
        raise UsageError(err.getvalue().strip().rpartition("\n")[2])
    print(err.getvalue(), end="", file=sys.stderr)  # the logs that the table leaves out
    return out.getvalue()


def _paths(arguments: list[str]) -> list[Path]:
    """Returns the paths of a block, which are relative to the repository."""
    if not arguments:
        raise UsageError("name a PATH")
    return [ROOT / text for text in arguments]


def _taken_apart(with_pop: bool, arguments: list[str]) -> Table:
    """Returns the table of the efficiency that the runs at the paths lost, or POP's tree of it."""
    from analysis.runs import efficiency_tree, rank_times

    runs, problems = rank_times.read(_paths(arguments))
    if problems:
        raise UsageError("; ".join(problems))
    table = efficiency_tree.table if with_pop else rank_times.losses
    return table(rank_times.breakdowns(runs), None, None)


def _audit(arguments: list[str]) -> str:
    """Returns the findings of an audit as a Markdown list; refuses what could not be read."""
    from analysis.published.audited import audit_paths

    audit = audit_paths(_paths(arguments))
    if audit.has_gaps:
        raise UsageError("; ".join([*audit.refused, *audit.unread]))
    lines = [str(finding).replace(f"{ROOT}/", "") for finding in audit.findings]
    return "".join(f"- {line}\n" for line in lines) or "- nothing\n"


def _file(arguments: list[str]) -> str:
    """Returns the Markdown of the files at the paths."""
    return "\n".join(read_text(path, "table").strip() + "\n" for path in _paths(arguments))


# A block's name -> its Markdown, or its table.
BLOCKS: dict[str, Callable[[list[str]], Table | str]] = {
    **{name: partial(_printed, name) for name in COMMANDS},
    "losses": partial(_taken_apart, False),
    "pop": partial(_taken_apart, True),
    "audit": _audit,
    "file": _file,
}


def block(name: str, arguments: list[str]) -> str:
    """Returns the Markdown of one of BLOCKS."""
    content = BLOCKS[name](arguments)
    return content if isinstance(content, str) else content.render("markdown")


def regenerate(text: str, source: str = "") -> str:
    """Returns `text` with every marked block written anew; what is outside of them stays as it is.
    A block that is unknown, not closed or without data is refused with its file and line."""

    def written(match: re.Match[str]) -> str:
        """Returns one marked block with its content made anew."""
        opening = match[0].partition("\n")[0]
        name, *arguments = shlex.split(match[1])
        line_no = text.count("\n", 0, match.start()) + 1
        place = f"{source}:{line_no}"
        if name not in BLOCKS:
            raise UsageError(f"{place}: unknown report {name!r}; known: {', '.join(BLOCKS)}")
        if re.search(_OPEN, match[2], re.M):
            raise UsageError(f"{place}: this report is not closed before the next one")
        if not match[0].rstrip().endswith(_CLOSE):
            raise UsageError(f"{place}: this report is not closed by {_CLOSE}")
        try:
            content = block(name, arguments).rstrip("\n")
        except UsageError as error:
            raise UsageError(f"{place}: {error}") from error
        return f"{opening}\n\n{content}\n\n{_CLOSE}"

    return _BLOCK.sub(written, text)


@command_line("analysis.report")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m analysis.report", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.md", help="the pages")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when stale")
    arguments = parser.parse_args(argv)
    status = 0
    for path in arguments.files:
        old = read_text(path, "page")
        new = regenerate(old, str(path))
        if new == old:
            continue
        if arguments.check:
            print(f"{path} is stale: run python -m analysis.report {path}")
            lines = difflib.unified_diff(old.split("\n"), new.split("\n"), "", "", "", "", 0, "")
            print(*map(printable, list(lines)[2 : 2 + SHOWN]), sep="\n")
            status = 1
        else:
            with output(path, mark="", force=True) as file:
                file.write_text(new)
            print(f"{path}: written")
    return status


if __name__ == "__main__":
    sys.exit(main())
