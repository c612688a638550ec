"""Bad input, seeded, for every reader and command. Nothing may end in a traceback.

    python tests/tools/bad_input.py logs [--n 6500] [--seed 1] [--jobs 2]
    python tests/tools/bad_input.py logs --number 4711    # repeat one case, and keep its files

logs       mutated logs (../shared/logs where it is there, and logs/), read by tflops
folders    a study of three runs, one of them damaged, read by every command that reads run folders
packed     logs in gz, tar and zip, bombs, pipes and devices, by name and through stdin
texts      documents for parallel.data: damaged JSONL, bytes, pictures, empty ones
tokens     data folders with a damaged meta.json: other tokens are never trained on
commands   command lines with bad numbers, empty values, wrong files, unknown words
output     every command where its output is full, or read no further than one line
not-runs   files of this repository and of installed packages that are not runs: each is refused
numbers    a number of a line is cut, joined or written otherwise: it is unknown, and never another
neutral    bytes that change no fact (line ends, colours, padding ...): no field of a record changes

One row per campaign: how many cases were tried, how many ended in a traceback (an exception that is
no UsageError, or a warning), hung (over 5 s of CPU time, or 60 s of waiting), or gave a wrong
answer: a run from a file that is none, a lost row, invalid JSON, a control character on a terminal.
Every distinct finding is listed with the number of a case that shows it. Exit status 1 when there
is any.
"""

import argparse
import dataclasses
import functools
import math
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a script: find the rooms
    sys.path[0] = str(ROOT)


from analysis.common.table import FORMATS, Column, Table  # noqa: E402
from analysis.logs import readers  # noqa: E402
from base.errors import Parser, UsageError, command_line  # noqa: E402
from tests.tools import bad_commands, bad_files, spoil  # noqa: E402
from tests.tools.spoil import spoilt  # noqa: E402
from tests.tools.watched import COLUMNS, WRONG, Problem, command, copy_study, watched  # noqa: E402

SHARED = Path(os.environ.get("SCALING_SHARED", ROOT.parent / "shared")) / "logs"
OWN = ROOT / "logs" / "2-core-cpu"
MEMORY = 6 << 30  # bytes of address space of a process
LARGEST = 4 << 20  # bytes of a file of an installed package that is tried
PACKAGES = ("torch", "deepspeed", "megatron", "transformers")


@functools.cache
def foreign_logs() -> list[Path]:
    return sorted(p for p in SHARED.rglob("*") if p.is_file() and p.suffix != ".csv")


@functools.cache
def own_logs() -> list[Path]:
    names = ("train.log", "training_metrics.json")
    return sorted(p for name in names for p in OWN.rglob(name))


def one_log(chance: random.Random, folder: Path, loud: bool) -> list[Problem]:
    """A mutated log through the command that judges logs; most are foreign, where there are any."""
    foreign = foreign_logs()
    source = chance.choice(foreign if foreign and chance.random() < 0.8 else own_logs())
    path = folder / source.name
    path.write_bytes(spoilt(chance, source.read_bytes())[1])
    return command("analysis.tflops", [str(path), "--format", chance.choice(FORMATS)], loud)[1]


# --- run folders ---------------------------------------------------------------------------------


@functools.cache
def studies() -> list[tuple[Path, ...]]:
    """Groups of three runs of one study in logs/."""
    groups = []
    for study in sorted(OWN.iterdir()):
        runs = sorted(p.parent for p in study.glob("*/run.json"))
        threes = len(runs) // 3  # of different runs, not of repeats, which sort together
        groups += [tuple(runs[i::threes][:3]) for i in range(threes)]
    return groups


def show(runs: tuple[Path, ...], study: Path, loud: bool) -> tuple[dict[str, set[str]], list]:
    """The runs that each command which reads run folders shows of a study, and its problems."""
    shown, problems, names = {}, [], [run.name for run in runs]
    for module in (name for name, words in bad_commands.LINES.items() if words == "logs/study"):
        text, wrong = command(module, [str(study)], loud)
        problems += [(column, f"{module}: {what}") for column, what in wrong]
        shown[module] = {
            n for n in names if re.search(rf"(?<![\w/-]){re.escape(n)}(?![\w-])", text)
        }
    return shown, problems


@functools.cache
def unharmed(runs: tuple[Path, ...]) -> dict[str, set[str]]:
    """The runs that each command shows when no file is damaged."""
    with tempfile.TemporaryDirectory() as folder:
        return show(runs, copy_study(runs, Path(folder) / runs[0].parent.name), False)[0]


def one_folder(chance: random.Random, folder: Path, loud: bool) -> list[Problem]:
    """Read a study with one damaged run with every command: the other runs must still be shown."""
    runs = chance.choice(studies())
    study, victim = copy_study(runs, folder / runs[0].parent.name), chance.choice(runs).name
    files = sorted(p for p in (study / victim).rglob("*") if p.is_file())
    spoil.harm(chance, chance.choice(files))
    shown, problems = show(runs, study, loud)
    stopped = {what.split(": ")[0] for column, what in problems if column != WRONG}
    for module, expected in unharmed(runs).items():
        if module not in stopped and expected - {victim} - shown[module]:
            problems.append((WRONG, f"{module}: an unharmed run is not shown"))
    return problems


# --- damaged numbers -----------------------------------------------------------------------------


@functools.cache
def number_cases() -> list[tuple[str, dict[str, Any], str, str]]:
    """(format, what its line states, the way, a log with one damaged line of three)."""
    kinds = tomllib.loads((ROOT / "tests" / "log_lines.toml").read_text())
    return [
        (kind, row, way, text)
        for kind, row in kinds.items()
        for way, text in spoil.damaged_numbers(row["line"])
    ]


def one_number(chance: random.Random, folder: Path, loud: bool, number: int) -> list[Problem]:
    """Read one log with one damaged number: every value is what its line states, or unknown."""
    kind, stated, way, text = number_cases()[number]
    path = folder / "damaged.out"
    path.write_text(text)
    if loud:
        print(text)
    record, problems = watched(lambda: readers.read(path), loud)
    if problems or isinstance(record, UsageError):
        return problems
    others = [
        f"{name} {value:g} in place of {stated[name]:g}"
        for name in stated.keys() - {"line", "iteration"}
        for value in record.steps[name].tolist()
        if not math.isnan(value) and not math.isclose(value, stated[name], rel_tol=1e-6)
    ]
    return [(WRONG, f"{way} of {kind}: {other}") for other in others]


# --- neutral bytes -------------------------------------------------------------------------------

# (format, change) -> why the record may change.
EXPLAINED = {
    ("nanotron", "no final newline"): "the last number may be cut, so it is unknown",
}
# JSON and nsys's report: their lines never have a prefix.
DOCUMENTS = (b"{", b"[", b"Generating SQLite file")


@functools.cache
def neutral_cases() -> list[tuple[Path, str]]:
    cases = []
    for source in [*foreign_logs(), *own_logs()[::10]]:
        of_lines = not source.read_bytes().startswith(DOCUMENTS)
        names = spoil.NEUTRAL | spoil.NEUTRAL_OF_LINES if of_lines else spoil.NEUTRAL
        cases += [(source, name) for name in names]
    return cases


def facts(path: Path) -> dict[str, str]:
    """A record as texts, without positions in the file; each reason to refuse one is the same."""
    try:
        record = readers.read(path)
    except UsageError:
        return {"format": "refused"}
    values = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    del values["last_at"], values["last_line"]
    values["steps"] = [row[:-1] for row in record.steps.tolist()]  # the last is where it is
    values["failure"] = record.failure and (record.failure.kind, undressed(record.failure.line))
    values["reasons"] = [(reason.kind, undressed(reason.text)) for reason in record.reasons]
    return {name: value if name == "format" else repr(value) for name, value in values.items()}


def undressed(words: str) -> str:
    """A quoted line without the neutral additions and without its number."""
    words = re.sub(r"\x1b\[\d+m|\b10%.*?s/it\]|\b0: ", "", words)
    return re.sub(r"line \d+", "line N", words).strip()[:200]  # longer ones are cut anyway


def one_neutral(chance: random.Random, folder: Path, loud: bool, number: int) -> list[Problem]:
    """Read one log with one neutral change: every field must be as before."""
    source, name = neutral_cases()[number]
    change, path, records = (spoil.NEUTRAL | spoil.NEUTRAL_OF_LINES)[name], folder / source.name, []
    for data in (source.read_bytes(), re.sub(*change, source.read_bytes())):
        path.write_bytes(data)
        record, problems = watched(lambda: facts(path), loud)
        if problems:
            return problems
        records.append(record)
    before, after = records
    differ = [k for k in before | after if before.get(k) != after.get(k)]
    if loud:
        print(*(f"{k}: {before.get(k)!r:.200} -> {after.get(k)!r:.200}" for k in differ), sep="\n")
    if not differ or (before["format"], name) in EXPLAINED:
        return []
    return [(WRONG, f"{name} of {before['format']}: {', '.join(differ)}")]


# --- files that are no runs ----------------------------------------------------------------------


@functools.cache
def no_runs() -> list[Path]:
    """Files of this repository, but for the runs under logs/, and of installed packages."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    paths = [p for p in paths if not any((up / "run.json").exists() for up in p.parents[:2])]
    for spec in filter(None, map(find_spec, PACKAGES)):
        paths += sorted(Path(spec.submodule_search_locations[0]).rglob("*"))
    return [p for p in paths if p.is_file() and 0 < p.stat().st_size <= LARGEST]


def one_no_run(chance: random.Random, folder: Path, loud: bool, number: int) -> list[Problem]:
    """A file that is no run must be refused."""
    path = no_runs()[number]
    result, problems = watched(lambda: readers.read(path), loud)
    if not problems and not isinstance(result, UsageError):
        end = result.failure.kind if result.failure else "no failure"
        problems = [(WRONG, f"{path} is read as {result.format} ({end})")]
    return problems


# --- campaigns -----------------------------------------------------------------------------------

# name -> (one case, how many cases: a number that may be changed, or all there are)
CAMPAIGNS: dict[str, tuple[Callable[..., list[Problem]], int | Callable[[], list]]] = {
    "logs": (one_log, 6500),
    "folders": (one_folder, 500),
    "packed": (bad_files.one_packed, 500),
    "texts": (bad_files.one_text, 500),
    "tokens": (bad_files.one_tokens, 500),
    "commands": (bad_commands.one_command, 1500),
    "output": (bad_commands.one_output, bad_commands.outputs),
    "numbers": (one_number, number_cases),
    "neutral": (one_neutral, neutral_cases),
    "not-runs": (one_no_run, no_runs),
}


def attempt(campaign: str, seed: str, number: int, keep: bool = False) -> list[Problem]:
    """The problems of case `number` of a campaign. `keep`: its files stay, and it is loud."""
    case, cases = CAMPAIGNS[campaign]
    chance = random.Random(f"{campaign}-{seed}-{number}")
    numbers = (number,) if callable(cases) else ()
    if keep:
        folder = Path(tempfile.mkdtemp())
        print(f"its files: {folder}")
        return case(chance, folder, keep, *numbers)
    with tempfile.TemporaryDirectory() as folder:
        return case(chance, Path(folder), keep, *numbers)


def _bounded() -> None:
    """In a worker: limit its memory, so that a case that takes all fails alone."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def run(campaign: str, seed: str, n: int | None = None, jobs: int = 1) -> dict[int, list[Problem]]:
    """The problems of all cases of a campaign by number, or of `n`: the first of a seeded one,
    spread over a list."""
    cases = CAMPAIGNS[campaign][1]
    numbers = range(n or cases) if isinstance(cases, int) else range(len(cases()))
    if n and callable(cases):
        numbers = sorted(random.Random(seed).sample(numbers, min(n, len(numbers))))
    one = functools.partial(attempt, campaign, seed)
    if jobs == 1:
        return dict(zip(numbers, map(one, numbers), strict=True))
    with ProcessPoolExecutor(jobs, get_context("spawn"), _bounded) as pool:
        return dict(zip(numbers, pool.map(one, numbers, chunksize=8), strict=True))


def row(campaign: str, tries: dict[int, list[Problem]]) -> dict[str, Any]:
    """The number of cases, and of those with each problem."""
    counts = {name: sum(name in dict(t) for t in tries.values()) for name in COLUMNS}
    return {"campaign": campaign, "n": len(tries)} | counts


def findings(tries: dict[int, list[Problem]]) -> list[str]:
    """Every distinct problem, the most frequent first, with a case that shows it."""
    count, example = Counter(), {}
    for number, problems in tries.items():
        for column, what in dict.fromkeys(problems):
            where = (column, re.match(r"(\w+ at \S+:\d+)|.*", what.split(": ", 1)[-1])[0])
            count[where] += 1
            example.setdefault(where, f"{what} (--number {number})")
    return [f"{n} x {where[0]}: {example[where]}" for where, n in count.most_common()]


@command_line("bad_input")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaign", nargs="+", choices=[*CAMPAIGNS, "all"])
    parser.add_argument("--n", type=int, help="how many cases; by default all, as listed above")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--number", type=int, help="this case alone: its traceback, and its files")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="the table of these campaigns")
    arguments = parser.parse_args(argv)
    chosen = list(CAMPAIGNS) if "all" in arguments.campaign else arguments.campaign
    table = Table([Column(name, name) for name in ("campaign", "n", *COLUMNS)], [])
    for campaign in chosen:
        if (number := arguments.number) is not None:
            tries = {number: attempt(campaign, arguments.seed, number, True)}
        else:
            tries = run(campaign, arguments.seed, arguments.n, arguments.jobs)
        table.rows.append(row(campaign, tries))
        print(*findings(tries), table.rows[-1], sep="\n", flush=True)
    if arguments.out:
        arguments.out.write_text(table.render("markdown"))
    return int(any(row[name] for row in table.rows for name in COLUMNS))


if __name__ == "__main__":
    sys.exit(main())
