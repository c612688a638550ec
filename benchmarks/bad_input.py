"""Bad input, seeded: what every reader and command makes of it. Nothing may end in a traceback.

    python benchmarks/bad_input.py logs [--n 6500] [--seed 1] [--jobs 2] [--verbose]
    python benchmarks/bad_input.py logs --number 4711 --keep /tmp/case    # one case again, alone

logs       mutated logs (../shared/logs where it is there, and logs/), read by tflops and quality
folders    a study of three runs, one of them spoilt, through every command that reads run folders
manifests  a checkpoint's manifest forged, with the checksum that fits: verify, export and load
not-runs   every file that is no run, of this repository and of installed packages: none is read
neutral    bytes that change no fact (line ends, colours, padding ...): no field of a record changes

One row per kind of case: how many were tried, how many ended in a traceback (an exception that is
no UsageError, or a warning), hung (over 5 s of CPU time, or 60 s of waiting), or told something
wrong: a run that is no run, a lost row, JSON that is none, a control character on a terminal. Every
distinct finding is listed with a number that repeats it. Exit status 1 when there is any.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import io
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402

from analysis import readers  # noqa: E402
from analysis.tables import FORMATS  # noqa: E402
from benchmarks import spoil  # noqa: E402
from models.errors import UsageError, command_line  # noqa: E402

SHARED = Path(os.environ.get("SCALING_SHARED", ROOT.parent / "shared")) / "logs"
OWN = ROOT / "logs" / "2-core-cpu"
CPU_S, WAIT_S, MEMORY = 5.0, 60.0, 8 << 30  # of one call; bytes of address space
LARGEST = 4 << 20  # bytes of a file of an installed package that is tried
PACKAGES = ("torch", "deepspeed", "megatron", "transformers")
TRACEBACK, HANG, WRONG = COLUMNS = ("traceback", "hang", "wrong")

Problem = tuple[str, str]  # (one of COLUMNS, what it was)


class Hang(BaseException):
    """The call took longer than it may. No `except Exception` catches it."""


@dataclass
class Try:
    """One case: what was done to the input, and what came of it."""

    kind: str
    problems: list[Problem] = field(default_factory=list)
    number: int = 0


# --- one call, watched ---------------------------------------------------------------------------


def _hang(signum: int, frame: Any) -> None:
    raise Hang


def place(error: BaseException) -> str:
    """FILE:LINE of the last frame that is ours."""
    ours = [f for f in traceback.extract_tb(error.__traceback__) if _is_ours(f.filename)]
    last = ours[-1] if ours else traceback.extract_tb(error.__traceback__)[-1]
    name = Path(last.filename)
    name = name.relative_to(ROOT) if name.is_relative_to(ROOT) else name.name
    return f"{name}:{last.lineno}"


def _is_ours(filename: str) -> bool:
    rooms = [str(ROOT / room) for room in ("analysis", "models", "parallel", "slurm")]
    return filename.startswith(tuple(rooms))


def watched(action: Callable[[], Any], loud: bool = False) -> tuple[Any, list[Problem]]:
    """What `action` returns (None where it was stopped), and what is wrong with how it ended."""
    old = [signal.signal(s, _hang) for s in (signal.SIGPROF, signal.SIGALRM)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            signal.setitimer(signal.ITIMER_PROF, CPU_S)
            signal.setitimer(signal.ITIMER_REAL, WAIT_S)
            return action(), []
    except UsageError as refused:
        return refused, []
    except Hang as hang:
        return None, [(HANG, f"over {CPU_S:g} s at {place(hang)}")]
    except Exception as error:
        if loud:
            traceback.print_exc(file=sys.__stderr__)
        words = re.sub(r"/tmp/\w+/", "", str(error).partition("\n")[0])[:70]
        return None, [(TRACEBACK, f"{type(error).__name__} at {place(error)} ({words})")]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in zip((signal.SIGPROF, signal.SIGALRM), old, strict=True):
            signal.signal(number, handler)


def command(module: str, argv: list[str], loud: bool = False) -> tuple[str, list[Problem]]:
    """What `python -m module argv` prints, and what is wrong with it or with how it ends."""
    main = importlib.import_module(module).main
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))

    def call() -> int:
        try:
            return main(argv)
        except SystemExit as end:  # argparse
            return end.code

    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status, problems = watched(call, loud)
    printed, said = (stream.buffer.getvalue().decode() for stream in (out, err))
    if isinstance(status, UsageError):
        problems.append((TRACEBACK, f"UsageError leaves {module}.main"))
    problems += [(WRONG, f"{module}: {what}") for what in complaints(argv, printed, said)]
    return printed, problems


def complaints(argv: list[str], printed: str, said: str) -> Iterator[str]:
    """What no output may hold: control characters, or JSON that is none."""
    if found := re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", printed + said):
        yield f"a control character is printed: {found[0]!r}"
    if "json" not in argv or not printed:
        return
    try:
        rows = json.loads(printed, parse_constant=lambda word: math.nan)
    except ValueError:
        yield "--format json prints no JSON"
        return
    for row in rows if isinstance(rows, list) else [rows]:
        for key, value in row.items() if isinstance(row, dict) else ():
            if isinstance(value, float) and not math.isfinite(value):
                yield f"{key} is {value}"
            if isinstance(value, (int, float)) and key.endswith(("_s", "tflops")) and value < 0:
                yield f"{key} is negative"


# --- logs ----------------------------------------------------------------------------------------


@functools.cache
def foreign_logs() -> list[Path]:
    return sorted(p for p in SHARED.rglob("*") if p.is_file() and p.suffix != ".csv")


@functools.cache
def own_logs() -> list[Path]:
    names = ("train.log", "epochs.log", "training_metrics.json")
    return sorted(p for name in names for p in OWN.rglob(name))


def a_log(chance: random.Random) -> Path:
    """A real log; most are foreign, where there are any."""
    foreign = foreign_logs()
    return chance.choice(foreign if foreign and chance.random() < 0.8 else own_logs())


def spoilt(chance: random.Random, data: bytes) -> tuple[str, bytes]:
    """(how, the bytes): seldom one of the hard ways."""
    way = chance.choice(spoil.HARD if chance.random() < 0.05 else spoil.SPOILERS)
    return way.__name__, way(chance, data)


def one_log(chance: random.Random, folder: Path, loud: bool) -> Try:
    """A mutated log through both commands that judge a log."""
    source = a_log(chance)
    way, data = spoilt(chance, source.read_bytes())
    path = folder / source.name
    path.write_bytes(data)
    problems = []
    for module in ("analysis.tflops", "analysis.quality"):
        argv = [str(path), "--format", chance.choice(FORMATS)]
        problems += command(module, argv, loud)[1]
    return Try(way, problems)


# --- run folders ---------------------------------------------------------------------------------

CHECKPOINTS = """event,step,blocked_s,total_s,bytes,ranks,problem
save,10,0.5,0.7,1000000,2,
load,10,,0.2,1000000,2,
save,20,0.4,0.6,1000000,2,
"""
STATE = '{"job_id": 17, "state": "COMPLETED", "exit": "0:0", "verdict": "", "line": "done"}\n'
TRACE = {"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "mm", "ts": 1, "dur": 5, "pid": 1}]}
BESIDE = {
    "checkpoints.csv": CHECKPOINTS,
    "17.state": STATE,
    "17.out": "loading\n",
    "profiles/rank0.json": json.dumps(TRACE),
    "attempts/1/status.json": '{"state": "failed", "reason": "it was killed"}\n',
}


@functools.cache
def studies() -> list[tuple[Path, ...]]:
    """Threes of runs of one study, as they stand in logs/."""
    found = []
    for study in sorted(p for p in OWN.iterdir() if p.is_dir()):
        runs = sorted(p.parent for p in study.glob("*/run.json"))
        threes = len(runs) // 3  # of different runs, not of repeats, which sort together
        found += [tuple(runs[i::threes][:3]) for i in range(threes)]
    return found


# What is run on a study's folder; {out} is a folder for what it writes.
OF_FOLDERS = {
    "analysis.tflops": ("{study}",),
    "analysis.quality": ("{study}",),
    "analysis.scaling": ("{study}",),
    "analysis.parity": ("{study}",),
    "analysis.compare": ("{study}",),
    "analysis.compare ": ("{study}", "--repeats"),
    "analysis.checkpoints": ("{study}",),
    "analysis.breakdown": ("{study}",),
    "analysis.profile": ("{study}",),
    "analysis.scaling_report": ("{study}", "--out", "{out}/report.json"),
    "slurm.status": ("{toml}", "--logs", "{logs}"),
    "analysis.plots": ("{study}", "--out", "{out}/plots"),
}
SLOW = "analysis.plots"  # a second each: for one case of ten


def copy_study(runs: tuple[Path, ...], folder: Path) -> Path:
    """The runs as a study of their own, with the files that only some runs have."""
    study = folder / "logs" / runs[0].parent.name
    for run in runs:
        shutil.copytree(run, study / run.name)
        for name, text in BESIDE.items():
            path = study / run.name / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return study


def show(study: Path, slow: bool, loud: bool) -> tuple[dict[str, str], list[Problem]]:
    """What every command that reads run folders prints (and writes) of a study."""
    told, problems = {}, []
    toml = ROOT / "slurm" / f"{study.name}.toml"
    out = study.parent.parent / "out"
    for name, words in OF_FOLDERS.items():
        if (name == "slurm.status" and not toml.exists()) or (name == SLOW and not slow):
            continue
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        argv = [w.format(study=study, toml=toml, logs=study.parent, out=out) for w in words]
        told[name], wrong = command(name.strip(), argv, loud)
        problems += [(column, f"{name.strip()}: {what}") for column, what in wrong]
        told[name] += "".join(p.read_text() for p in sorted(out.rglob("*.json")))
    return told, problems


@functools.cache
def unharmed(runs: tuple[Path, ...], slow: bool) -> dict[str, set[str]]:
    """The runs that each command shows where nothing is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        told, _ = show(copy_study(runs, Path(folder)), slow, False)
    return {name: {r.name for r in runs if shows(text, r.name)} for name, text in told.items()}


def shows(text: str, run: str) -> bool:
    return re.search(rf"(?<![\w/-]){re.escape(run)}(?![\w-])", text) is not None


def harm(chance: random.Random, run: Path) -> str:
    """Spoil one file of a run; how."""
    path = chance.choice(sorted(p for p in run.rglob("*") if p.is_file()))
    way = chance.choice(["bytes"] * 12 + ["missing", "empty", "folder", "loop", "huge"])
    if way == "bytes":
        way, data = spoilt(chance, path.read_bytes() or b"\n")
        path.write_bytes(data)
        return way
    path.unlink()
    if way == "empty":
        path.touch()
    elif way == "folder":
        path.mkdir()
    elif way == "loop":
        path.symlink_to(chance.choice([path, path.parent, run.parent]))
    elif way == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 33)
    return f"{way} file"


def one_folder(chance: random.Random, folder: Path, loud: bool) -> Try:
    """A study with one harmed run through every command: the other runs must still be shown."""
    runs = chance.choice(studies())
    study, victim, slow = copy_study(runs, folder), chance.choice(runs), chance.random() < 0.1
    way = harm(chance, study / victim.name)
    told, problems = show(study, slow, loud)
    for name, expected in unharmed(runs, slow).items():
        for lost in sorted(expected - {victim.name}):
            if not shows(told[name], lost) and not problems_of(name, problems):
                problems.append((WRONG, f"{name.strip()}: an unharmed run is not shown"))
    return Try(way, problems)


def problems_of(name: str, problems: list[Problem]) -> list[Problem]:
    return [p for p in problems if p[1].startswith(f"{name.strip()}: ") and p[0] != WRONG]


# --- neutral bytes -------------------------------------------------------------------------------


def facts(path: Path) -> dict[str, Any]:
    """A record as plain data, without where in the file things stand."""
    record = readers.read(path)
    found = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    found |= {f"extra.{k}": v for k, v in found.pop("extra").items() if not k.endswith("_at")}
    found["failure"] = found["failure"] and (record.failure.kind, undressed(record.failure.line))
    found["notes"] = [undressed(note) for note in record.notes]
    return found


def undressed(words: str) -> str:
    """A quoted line without what the neutral ways put into it, and without its number."""
    words = re.sub(r"\x1b\[\d+m|\b0: |\b10%.*?s/it\]", "", words)
    return re.sub(r"line \d+", "line N", words).strip()[:200]  # longer ones are cut anyway


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other, equal_nan=True)
    return repr(one) == repr(other)


def one_neutral(chance: random.Random, folder: Path, loud: bool, number: int) -> Try:
    """One log in one neutral dress: every field must be as it was."""
    source, change = neutral_cases()[number]
    path = folder / source.name
    results = []
    for data in (source.read_bytes(), change(source.read_bytes())):
        path.write_bytes(data)
        result, problems = watched(lambda: facts(path), loud)
        if problems:
            return Try(change.__name__, problems)
        results.append({"refused": result.reason} if isinstance(result, UsageError) else result)
    before, after = results
    differ = [k for k in before | after if not same(before.get(k), after.get(k))]
    words = f"{before.get('format', 'refused')}: {', '.join(differ)}"
    told = [f"{k}: {before.get(k)!r:.80} -> {after.get(k)!r:.80}" for k in differ]
    if loud:
        print("\n".join(told))
    return Try(change.__name__, [(WRONG, words)] if differ else [])


@functools.cache
def neutral_cases() -> list[tuple[Path, Callable[[bytes], bytes]]]:
    cases = []
    for source in [*foreign_logs(), *own_logs()[::10]]:
        lines = source.read_bytes()[:1] not in (b"{", b"[")
        cases += [(source, way) for way in spoil.NEUTRAL + spoil.NEUTRAL_OF_LINES * lines]
    return cases


# --- files that are no runs ----------------------------------------------------------------------


@functools.cache
def no_runs() -> list[tuple[str, Path]]:
    """(whose, file): this repository's, but for the runs under logs/, and installed packages'."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    ours = [ROOT / name for name in listed.stdout.split("\0") if name]
    found = [("this repository", p) for p in ours if not in_a_run(p)]
    for package in PACKAGES:
        spec = find_spec(package)
        for top in spec.submodule_search_locations if spec else ():
            found += [(package, p) for p in sorted(Path(top).rglob("*"))]
    return [(w, p) for w, p in found if p.is_file() and 0 < p.stat().st_size <= LARGEST]


def in_a_run(path: Path) -> bool:
    return any((above / "run.json").exists() for above in path.parents[:2])


def one_no_run(chance: random.Random, folder: Path, loud: bool, number: int) -> Try:
    """A file that is no run must be refused."""
    whose, path = no_runs()[number]
    result, problems = watched(lambda: readers.read(path), loud)
    if not problems and not isinstance(result, UsageError):
        name = path.relative_to(ROOT) if whose == "this repository" else path
        end = result.failure.kind if result.failure else "no failure"
        problems = [(WRONG, f"{name} is read as {result.format} ({end})")]
    return Try(whose, problems)


# --- manifests -----------------------------------------------------------------------------------

SIZES = {"n_layer": 1, "hidden": 8, "n_head": 2, "vocab_size": 11, "max_seq_len": 4}
STEP = 10


def holder() -> Any:
    """An engine that only holds a tiny model's parameters and moments, each a number of its own."""
    import torch

    from models.config import preset
    from models.gpt import parameter_shapes
    from parallel.checkpointer import KINDS, State, hold

    class Holder:
        def __init__(self) -> None:
            self.adam_step, self.tensors = 0, {}
            for name, shape in parameter_shapes(preset("tiny", **SIZES)).items():
                self.tensors[name] = {kind: torch.zeros(shape) for kind in KINDS}

        def state(self) -> State:
            held = []
            for name, kinds in self.tensors.items():
                shape = tuple(kinds["param"].shape)
                held += hold(name, shape, (0,) * len(shape), shape, 0, kinds)
            return State(held, self.adam_step)

        def restore(self, adam_step: int, scaler: dict) -> None:
            self.adam_step = adam_step

        def numbers(self) -> list:
            return [t.tolist() for kinds in self.tensors.values() for t in kinds.values()]

    return Holder()


def saver(engine: Any, save: Path) -> Any:
    from parallel.checkpointer import Checkpointer
    from parallel.spec import resolve

    spec = resolve(("bad input", {**SIZES, "save_interval": 1, "keep_last": 0, "steps": 100}))
    facts = {"run": "r", "git": {"commit": "c"}, "data": {"path": "d", "sha256": "s"}}
    return Checkpointer(engine, spec, facts, save, 0, 1)


@functools.cache
def good_checkpoint() -> dict[str, bytes]:
    """The files of a small checkpoint of step 10."""
    engine = holder()
    for number, kinds in enumerate(engine.tensors.values()):
        for tensor in kinds.values():
            tensor.uniform_(0.1, 1.0).add_(number)
    engine.adam_step = STEP
    with tempfile.TemporaryDirectory() as save:
        writer = saver(engine, Path(save))
        writer.save(STEP)
        writer.wait()
        (folder,) = Path(save).glob("step-*")
        return {p.name: p.read_bytes() for p in folder.iterdir()}


def forge(chance: random.Random, folder: Path) -> str:
    """Change what the manifest says and give it the checksum that fits; how."""
    from parallel import saved

    (file,) = folder.glob("*.safetensors")
    if chance.random() < 0.03:
        file.rename(folder.parent.parent / "elsewhere")
        file.symlink_to(folder.parent.parent / "elsewhere")
        return "linked file"
    path = folder / saved.MANIFEST
    way = chance.choice([spoil.json_value] * 4 + [spoil.json_number] * 2 + [spoil.deep])
    data = way(chance, path.read_bytes())
    path.write_bytes(data)
    with contextlib.suppress(ValueError, RecursionError):
        manifest = json.loads(data)
        if isinstance(manifest, dict):
            saved.write_manifest(folder, manifest)
    return way.__name__


def one_manifest(chance: random.Random, folder: Path, loud: bool) -> Try:
    """A forged manifest through verify, both exports and loading: refused, or of no effect."""
    good = {}
    for name in ("good", "bad"):
        save = folder / name / "checkpoints"
        step = save / f"step-{STEP:08d}"
        step.mkdir(parents=True)
        for file, data in good_checkpoint().items():
            (step / file).write_bytes(data)
        way = forge(chance, step) if name == "bad" else ""
        results, problems = through(save, folder / name, loud)
        good = good or results
    if way == "linked file":  # what stands elsewhere may change
        good = dict.fromkeys(good)
    differ = [what for what in good if results.get(what) not in (None, good[what])]
    problems += [(WRONG, f"{what} gives something else") for what in differ]
    return Try(way, problems)


def through(save: Path, out: Path, loud: bool) -> tuple[dict[str, Any], list[Problem]]:
    """What each way of reading a checkpoint gives, None where it refuses."""
    results, problems = {}, command("parallel.checkpoint", ["verify", str(save)], loud)[1]
    for form in ("weights", "dcp"):
        words = ["export", str(save), str(out / form), "--format", form]
        problems += command("parallel.checkpoint", words, loud)[1]
        files = [
            p for p in sorted((out / form).rglob("*")) if p.suffix in (".safetensors", ".distcp")
        ]
        # DCP's bytes hold Adam's step, of which any number up to the step may be right.
        told = [p.read_bytes() if form == "weights" else p.stat().st_size for p in files]
        results[f"export --format {form}"] = told or None
    engine = holder()
    with contextlib.redirect_stderr(io.StringIO()):
        step, wrong = watched(lambda: saver(engine, save).load(save), loud)
    problems += [(column, f"load: {what}") for column, what in wrong]
    if not wrong and not isinstance(step, UsageError):
        counted = engine.adam_step in range(STEP + 1)  # steps that were skipped do not count
        results["load"] = (step, counted, engine.numbers())
    return results, problems


# --- campaigns -----------------------------------------------------------------------------------

# name -> (one case, how many cases: a number that may be changed, or all there are)
CAMPAIGNS: dict[str, tuple[Callable[..., Try], int | Callable[[], list]]] = {
    "logs": (one_log, 6500),
    "folders": (one_folder, 500),
    "manifests": (one_manifest, 200),
    "neutral": (one_neutral, neutral_cases),
    "not-runs": (one_no_run, no_runs),
}


def attempt(campaign: str, seed: str, number: int, keep: Path | None = None) -> Try:
    """Case `number` of a campaign, in a folder of its own. `keep` keeps that folder."""
    case, cases = CAMPAIGNS[campaign]
    chance = random.Random(f"{campaign}-{seed}-{number}")
    given = (number,) if callable(cases) else ()
    with contextlib.ExitStack() as stack:
        if keep:
            keep.mkdir(parents=True)
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = case(chance, folder, keep is not None, *given)
    found.number = number
    return found


def _bounded() -> None:
    """In a worker: what takes all memory fails there, and not the machine."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def run(campaign: str, seed: str, n: int | None = None, jobs: int = 1) -> list[Try]:
    """All cases of a campaign, or `n`: the first of a seeded one, spread over a list."""
    cases = CAMPAIGNS[campaign][1]
    numbers = range(n or cases) if isinstance(cases, int) else range(len(cases()))
    if n and callable(cases):
        numbers = sorted(random.Random(seed).sample(numbers, min(n, len(numbers))))
    one = functools.partial(attempt, campaign, seed)
    if jobs == 1:
        return list(map(one, numbers))
    with ProcessPoolExecutor(jobs, get_context("spawn"), _bounded) as pool:
        return list(pool.map(one, numbers, chunksize=8))


def table(campaign: str, tries: list[Try]) -> str:
    """One row per kind of case: how many cases, and how many of them had each problem."""
    lines = ["| campaign | case | n | " + " | ".join(COLUMNS) + " |"]
    lines.append("| --- | --- " + "| ---: " * (1 + len(COLUMNS)) + "|")
    groups = {
        kind: [t for t in tries if t.kind == kind] for kind in sorted({t.kind for t in tries})
    }
    for kind, group in {**groups, "all": tries}.items():
        counts = [sum(any(c == name for c, _ in t.problems) for t in group) for name in COLUMNS]
        lines.append("| " + " | ".join(map(str, [campaign, kind, len(group), *counts])) + " |")
    return "\n".join(lines) + "\n"


def findings(tries: list[Try]) -> list[str]:
    """Every distinct problem, the most frequent first, with a case that shows it."""
    count, example = Counter(), {}
    for one in tries:
        for column, what in dict.fromkeys(one.problems):
            where = (column, re.match(r"(\w+ at \S+:\d+)|.*", what.split(": ", 1)[-1])[0])
            count[where] += 1
            example.setdefault(where, f"{what} (--number {one.number})")
    return [f"{n} x {where[0]}: {example[where]}" for where, n in count.most_common()]


@command_line("bad_input")
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("campaign", nargs="+", choices=[*CAMPAIGNS, "all"])
    parser.add_argument("--n", type=int, help="how many cases; by default all, as listed above")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--number", type=int, help="this case alone, with its traceback")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="with --number: keep its files")
    parser.add_argument("--verbose", action="store_true", help="all findings, not the first 20")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="write the tables here too")
    arguments = parser.parse_args(argv)
    chosen = list(CAMPAIGNS) if "all" in arguments.campaign else arguments.campaign
    tables, bad = [], 0
    for campaign in chosen:
        if arguments.number is not None:
            keep = arguments.keep or Path(tempfile.mkdtemp()) / "case"
            tries = [attempt(campaign, arguments.seed, arguments.number, keep)]
            print(f"its files: {keep}")
        else:
            tries = run(campaign, arguments.seed, arguments.n, arguments.jobs)
        found = findings(tries)
        print("\n".join(found if arguments.verbose else found[:20]), flush=True)
        tables.append(table(campaign, tries))
        print(tables[-1], flush=True)
        bad += len(found)
    if arguments.out:
        arguments.out.write_text("\n".join(tables))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
