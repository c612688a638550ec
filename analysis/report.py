"""Writes the marked blocks of Markdown pages from data.

    python -m analysis.report FILE.md... [--check]

A block stands between `<!-- report: NAME ARGUMENTS -->` and `<!-- /report -->`; what is between
them is written by this command and by nobody else. NAME is one of

    tflops PATH [--convention C] [--baseline NAME] [--predict CLUSTER] [--columns A,B,C]
                                                      the scaling table of runs
    plan ARGUMENTS                                    what analysis.plan prints
    parity PATH                                       their parity table
    compare PATH...                                   a study's configurations and its baseline
    breakdown PATH...                                 where the time and the efficiency went
    losses PATH...                                    its last table: the efficiency alone
    scaling PATH... [--baseline NAME] [--predict CLUSTER] [--columns A,B,C]
                                                      the curve over repeats
    audit PATH...                                     what is wrong with published tables
    file PATH                                         a Markdown table that a benchmark wrote
    jeanzay FIRST-LAST                                published rows of these lines, recomputed
    real-logs                                         published logs, read
    repeats | checkpoints | big-purple | t4 | bucket-ab | epochs | sc21-days

Paths are relative to the repository. `--check` writes nothing, prints the first lines that differ
and exits 1 when a file is stale.
Exits 2 when a file, a block or its data cannot be read.
"""

if not __package__:
    import as_script

import argparse
import difflib
import importlib
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from analysis.common.table import Table, chosen, column_names, writing
from base.errors import Parser, UsageError, command_line, printable
from base.files import ROOT, check_ends
from base.storage import output
from models.flops import CONVENTIONS, DEFAULT_CONVENTION

_OPEN = re.compile(r"^<!-- report: (\S.*?) -->[ \t]*$")
_CLOSE = "<!-- /report -->"
SHOWN = 20  # lines of a difference
_SETTINGS: dict[str, dict[str, Any]] = {
    "--convention": {"choices": tuple(CONVENTIONS), "default": DEFAULT_CONVENTION},
    "--columns": {"type": column_names},
    "--runs": {"action": "store_true"},
}


def _given(name: str, arguments: list[str], *flags: str) -> argparse.Namespace:
    """A block's paths, below the repository, and its flags.

    Raises:
        UsageError: a flag that this block does not have, or no path.
    """
    parser = _Parser(prog=name, add_help=False)
    parser.add_argument("paths", nargs="+", type=lambda text: ROOT / text)
    for flag in flags:
        parser.add_argument(flag, **_SETTINGS.get(flag, {}))
    return parser.parse_args(arguments)


def _markdown(tables: list[Table], columns: list[str] | None = None) -> str:
    return "\n".join(table.render("markdown") for table in chosen(tables, columns))


def _measured(name: str, *flags: str) -> Callable[[list[str]], str]:
    """A block of the one table that `report` of analysis/NAME.py makes of paths."""

    def block(arguments: list[str]) -> str:
        given = vars(_given(name, arguments, *flags))
        columns = given.pop("columns", None)
        library = importlib.import_module(f"analysis.{name}")
        return _markdown([library.report(**given)], columns)

    return block


def _plan(arguments: list[str]) -> str:
    from analysis import plan

    parser = _Parser(prog="plan", add_help=False)
    plan.add_flags(parser)
    return plan.answer(parser.parse_args(arguments)).render("markdown")


def _breakdown_tables(arguments: list[str]) -> list[Table]:
    from analysis.measured.rank_times import report

    tables, problems = report(_given("breakdown", arguments).paths)
    if problems:
        raise UsageError("; ".join(problems))
    return tables


def _audit(arguments: list[str]) -> str:
    from analysis.published.audit import audit_paths

    audit = audit_paths(_given("audit", arguments).paths)
    if audit.has_gaps:
        raise UsageError("; ".join([*audit.refused, *audit.unread]))
    lines = [str(finding).replace(f"{ROOT}/", "") for finding in audit.findings]
    return "".join(f"- {line}\n" for line in lines) or "- nothing\n"


def _file(arguments: list[str]) -> str:
    if len(arguments) != 1:
        raise UsageError(f"file takes one path, not {' '.join(arguments)!r}")
    path = ROOT / arguments[0]
    with writing(path):
        return path.read_text().strip() + "\n"


def _jean_zay(arguments: list[str]) -> str:
    from analysis.published.recomputed import jean_zay

    match = re.fullmatch(r"(\d+)-(\d+)", " ".join(arguments))
    if not match:
        raise UsageError(f"jeanzay wants FIRST-LAST, not {' '.join(arguments)!r}")
    return _markdown([jean_zay(int(match[1]), int(match[2]))])


def _published(name: str) -> Callable[[list[str]], str]:
    """A block of the table that this function of analysis/published/recomputed.py makes."""

    def block(arguments: list[str]) -> str:
        from analysis.published import recomputed

        if arguments:
            raise UsageError(f"this report takes no argument, not {' '.join(arguments)!r}")
        return _markdown([getattr(recomputed, name)()])

    return block


PUBLISHED = "real-logs repeats checkpoints big-purple t4 bucket-ab epochs sc21-days".split()
REPORTS: dict[str, Callable[[list[str]], str]] = {
    "tflops": _measured(
        "measured.run_table", "--convention", "--baseline", "--predict", "--columns"
    ),
    "parity": _measured("measured.loss_parity"),
    "plan": _plan,
    "compare": _measured("compare"),
    "breakdown": lambda arguments: _markdown(_breakdown_tables(arguments)),
    "losses": lambda arguments: _markdown(_breakdown_tables(arguments)[-1:]),
    "scaling": _measured("measured.scaling_curve", "--baseline", "--predict", "--columns"),
    "audit": _audit,
    "file": _file,
    "jeanzay": _jean_zay,
    **{name: _published(name.replace("-", "_")) for name in PUBLISHED},
}


class _Parser(argparse.ArgumentParser):
    """A block's arguments: a mistake is a UsageError, not the command's own usage."""

    def error(self, message: str) -> None:
        raise UsageError(f"{self.prog}: {message}")


def regenerate(text: str, source: str = "") -> str:
    """`text` with every marked block written anew; what is outside of them stays as it is.

    Raises:
        UsageError: a block that is unknown, not closed or without data; it names file and line.
    """
    out: list[str] = []
    lines = iter(enumerate(text.split("\n"), start=1))
    for line_no, line in lines:
        out.append(line)
        match = _OPEN.match(line)
        if not match:
            continue
        name, *arguments = shlex.split(match[1])
        where = f"{source}:{line_no}"
        if name not in REPORTS:
            raise UsageError(f"{where}: unknown report {name!r}; known: {', '.join(REPORTS)}")
        for _, inside in lines:
            if inside.rstrip() == _CLOSE:
                break
            if _OPEN.match(inside):
                raise UsageError(f"{where}: this report is not closed before the next one")
        else:
            raise UsageError(f"{where}: this report is not closed by {_CLOSE}")
        try:
            out += ["", *REPORTS[name](arguments).rstrip("\n").split("\n"), "", _CLOSE]
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from error
    return "\n".join(out)


@command_line("analysis.report")
def main(argv: list[str] | None = None) -> int:
    """Regenerate the files, or say which are stale."""
    parser = Parser(prog="python -m analysis.report", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.md", help="the pages")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when stale")
    arguments = parser.parse_args(argv)
    status = 0
    for path in arguments.files:
        check_ends(path)
        with writing(path):
            old = path.read_text()
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
