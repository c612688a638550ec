"""Watch one call of a command or a reader: does it end, and without a traceback?"""

import contextlib
import importlib
import io
import json
import math
import re
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from base.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
ROOMS = tuple(str(ROOT / room) for room in ("analysis", "base", "models", "parallel", "slurm"))
CPU_S, WAIT_S = 5.0, 30.0  # of one call
TRACEBACK, HANG, WRONG = COLUMNS = ("traceback", "hang", "wrong")

Problem = tuple[str, str]  # (one of COLUMNS, what it was)


class Hang(BaseException):
    """The call took longer than it may. No `except Exception` catches it."""


def _hang(signum: int, frame: Any) -> None:
    raise Hang


def place(error: BaseException) -> str:
    """FILE:LINE of the last frame that is ours."""
    frames = traceback.extract_tb(error.__traceback__)
    last = ([frame for frame in frames if frame.filename.startswith(ROOMS)] or frames)[-1]
    return f"{last.filename.removeprefix(f'{ROOT}/')}:{last.lineno}"


def watched(action: Callable[[], Any], loud: bool = False) -> tuple[Any, list[Problem]]:
    """What `action` returns (None if it was stopped), and the problems of its end."""
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
    """The output of `python -m module argv`, or what it refused with, and the problems of both."""
    package = (ROOT / module.replace(".", "/")).is_dir()
    main = importlib.import_module(f"{module}.__main__" if package else module).main
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
    names = f"{module}: ", f"{module} "  # of the command, or of its subcommand
    if status == 2 and not any(line.startswith(names) for line in said.splitlines()):
        problems.append((WRONG, f"{module}: ends with 2 and does not say why"))
    problems += [(WRONG, f"{module}: {what}") for what in complaints(argv, printed, said)]
    return said if status == 2 else printed, problems


def complaints(argv: list[str], printed: str, said: str) -> Iterator[str]:
    """What no output may hold: control characters (but the user's own words), or a wrong JSON."""
    typed = "".join(argv)
    strange = set(re.findall(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", printed + said)) - set(typed)
    if strange:
        yield f"control characters are printed: {sorted(strange)}"
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


# --- a study to run commands on ------------------------------------------------------------------

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


def copy_study(runs: tuple[Path, ...], study: Path) -> Path:
    """The runs as the study of that folder, with the files that only some runs have."""
    for run in runs:
        shutil.copytree(run, study / run.name)
        for name, text in BESIDE.items():
            path = study / run.name / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return study
