"""Tables in Markdown that cannot drift: marked blocks, regenerated from data.

    python -m analysis.report FILE.md... [--check]

A block stands between `<!-- report: NAME ARGUMENTS -->` and `<!-- /report -->`; what is between
them is written by this command and by nobody else. NAME is one of

    tflops PATH [--convention C] [--baseline NAME] [--predict CLUSTER]    the scaling table of runs
    plan ARGUMENTS                                    what analysis.plan prints
    validation                                        held-out errors on the published tables here
    parity PATH                                       their parity table
    saves PATH...                                     what runs' checkpoints cost
    compare PATH...                                   a study's configurations and its baseline
    breakdown PATH...                                 where the time and the efficiency went
    losses PATH...                                    its last table: the efficiency alone
    scaling PATH... [--baseline NAME] [--predict CLUSTER]    the curve over repeats
    audit PATH...                                     what is wrong with published tables
    file PATH                                         a Markdown table that a benchmark wrote
    jeanzay FIRST-LAST                                published rows of these lines, recomputed
    repeats | checkpoints | big-purple | t4 | bucket-ab | epochs | phases | sc21-days | sc21-weak

Paths are relative to the repository. `--check` writes nothing and exits 1 when a file is stale.
Exits 2 when a file, a block or its data cannot be read.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

if not __package__:  # run as a script: find the rooms, not analysis/ itself
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from models.errors import Parser, UsageError, command_line
from models.files import check_ends
from models.flops import CONVENTIONS, DEFAULT_CONVENTION

ROOT = Path(__file__).resolve().parent.parent
_OPEN = re.compile(r"^<!-- report: (\S.*?) -->[ \t]*$")
_CLOSE = "<!-- /report -->"


def _tflops(arguments: list[str]) -> str:
    from analysis.tflops import report

    parser = _Parser("tflops")
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--convention", choices=tuple(CONVENTIONS), default=DEFAULT_CONVENTION)
    parser.add_argument("--baseline")
    parser.add_argument("--predict")
    given = parser.parse_args(arguments)
    paths = [ROOT / path for path in given.paths]
    return report(paths, given.convention, given.baseline, given.predict).render("markdown")


def _plan(arguments: list[str]) -> str:
    from analysis.plan import rendered

    return rendered([*arguments, "--format", "markdown"])


def _validation(arguments: list[str]) -> str:
    from analysis.predict import published

    return published().render("markdown")


def _parity(arguments: list[str]) -> str:
    from analysis.parity import table, verify
    from parallel.artifacts import find_runs, read_run

    runs = [read_run(path) for path in find_runs([ROOT / path for path in arguments])]
    baselines = sorted({run.facts.get("baseline") for run in runs} - {None})
    return table(verify(runs).values(), ", ".join(baselines)).render("markdown")


def _saves(arguments: list[str]) -> str:
    from analysis.checkpoints import report

    return report([ROOT / path for path in arguments]).render("markdown")


def _compare(arguments: list[str]) -> str:
    from analysis.compare import report

    return report([ROOT / path for path in arguments]).render("markdown")


def _breakdown(arguments: list[str], chosen: slice = slice(None)) -> str:
    from analysis.breakdown import report

    tables, problems = report([ROOT / path for path in arguments])
    if problems:
        raise UsageError("; ".join(problems))
    return "\n".join(table.render("markdown") for table in tables[chosen])


def _losses(arguments: list[str]) -> str:
    return _breakdown(arguments, slice(-1, None))


def _scaling(arguments: list[str]) -> str:
    from analysis.scaling import report

    parser = _Parser("scaling")
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--baseline")
    parser.add_argument("--predict")
    given = parser.parse_args(arguments)
    paths = [ROOT / path for path in given.paths]
    return report(paths, given.baseline, arguments=given).render("markdown")


def _audit(arguments: list[str]) -> str:
    from analysis.audit import audit_paths

    found, refused, _ = audit_paths([ROOT / path for path in arguments])
    if refused:
        raise UsageError("; ".join(refused))
    lines = [str(f).replace(f"{ROOT}/", "") for f in found]
    return "".join(f"- {line}\n" for line in lines) or "- nothing\n"


def _file(arguments: list[str]) -> str:
    if len(arguments) != 1:
        raise UsageError(f"file takes one path, not {' '.join(arguments)!r}")
    path = ROOT / arguments[0]
    try:
        return path.read_text().strip() + "\n"
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error


def _jean_zay(arguments: list[str]) -> str:
    from analysis.published import jean_zay

    match = re.fullmatch(r"(\d+)-(\d+)", " ".join(arguments))
    if not match:
        raise UsageError(f"jeanzay wants FIRST-LAST, not {' '.join(arguments)!r}")
    return jean_zay(int(match[1]), int(match[2])).render("markdown")


def _published(name: str) -> Callable[[list[str]], str]:
    def block(arguments: list[str]) -> str:
        from analysis import published

        if arguments:
            raise UsageError(f"this report takes no argument, not {' '.join(arguments)!r}")
        return getattr(published, name)().render("markdown")

    return block


REPORTS: dict[str, Callable[[list[str]], str]] = {
    "tflops": _tflops,
    "parity": _parity,
    "plan": _plan,
    "validation": _validation,
    "saves": _saves,
    "compare": _compare,
    "breakdown": _breakdown,
    "losses": _losses,
    "scaling": _scaling,
    "audit": _audit,
    "file": _file,
    "jeanzay": _jean_zay,
    "repeats": _published("repeats"),
    "checkpoints": _published("checkpoints"),
    "big-purple": _published("big_purple"),
    "t4": _published("t4"),
    "bucket-ab": _published("bucket_ab"),
    "epochs": _published("epoch_speedups"),
    "phases": _published("epoch_phases"),
    "sc21-days": _published("sc21_days"),
    "sc21-weak": _published("sc21_weak"),
}


class _Parser(argparse.ArgumentParser):
    """A block's arguments: a mistake is a UsageError, not the command's own usage."""

    def __init__(self, prog: str):
        super().__init__(prog=prog, add_help=False)

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
    parser = Parser(
        prog="python -m analysis.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.md")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when stale")
    arguments = parser.parse_args(argv)
    status = 0
    for path in arguments.files:
        try:
            old = check_ends(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"{path}: {reason}") from error
        new = regenerate(old, str(path))
        if new == old:
            continue
        if arguments.check:
            print(f"{path} is stale: run python -m analysis.report {path}")
            status = 1
        else:
            path.write_text(new)
            print(f"{path}: written")
    return status


if __name__ == "__main__":
    sys.exit(main())
