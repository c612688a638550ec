"""What every run of a study would check when it starts, checked before slurm.submit submits: the
data, a run folder that can be written, Python and the container's image, on the machine that
submits. Each problem is one line, however many runs have it.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from base.errors import UsageError
from base.files import ROOT
from parallel.checkpoint.attempts import input_problems
from parallel.config.study import Study
from parallel.record.writer import check_folder
from slurm.render import Ask, ask_of

MANY_RANKS = 64  # fewer than this import as soon from a file system as from a disk
SLOW_S = 10.0  # torch is 1,500 files: 7 ms a file is a server's answer, not a cache's


def problems(study: Study, logs: Path, names: Collection[str]) -> list[str]:
    """Returns everything that would end these runs at their start, each problem once."""
    findings: dict[str, list[str]] = {}
    for name in names:
        folder, run = ROOT / logs / study.name / name, study.runs[name]
        inputs = input_problems(run.spec, ROOT, [folder.with_name(other) for other in run.after])
        for text in (*_of_job(ask_of(study, name)), *inputs, *_of_folder(folder)):
            # Each run has a folder of its own: one is named, and the others are counted.
            findings.setdefault(text.replace(str(folder), ""), []).append(text)
    problems = []
    if not os.access(ROOT, os.W_OK | os.X_OK):
        problems.append(f"{ROOT} cannot be written: Slurm opens each job's log there")
    for texts in findings.values():
        share = f" ({len(texts)} of {len(names)} runs)" if len(texts) < len(names) else ""
        problems.append(texts[0] + share)
    return problems


def slow_start(study: Study, names: Collection[str]) -> str:
    """Returns a line where so many ranks import from this file system that it may be slow."""
    largest = max(names, key=lambda name: study.runs[name].spec.gpus)
    ranks, ask = study.runs[largest].spec.gpus, ask_of(study, largest)
    if ranks < MANY_RANKS or ask.container is not None or ask.environment_tar:
        return ""
    python = os.environ.get("PYTHON") or ask.python
    began = time.perf_counter()
    # A Python that is not there is a problem of its own.
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run([python, "-c", "import torch"], cwd=ROOT, capture_output=True, timeout=120)
    if (seconds := time.perf_counter() - began) < SLOW_S:
        return ""
    return (
        f"importing torch took {seconds:.0f} s here, and {ranks} ranks will read its files at once:"
        " a container or the cluster's environment_tar keeps them off this file system"
    )


def _of_job(ask: Ask) -> Iterator[str]:
    """Yields what a job asks for and is not there."""
    python = os.environ.get("PYTHON") or ask.python
    # A bare name may come from a module that the job's set-up loads.
    program = shutil.which(python if "/" not in python else str(ROOT / python))
    if program is None and ("/" in python or not ask.setup):
        yield f"no Python at {python}: run make setup, or set PYTHON, or python in the cluster"
    image = ask.container.image if ask.container is not None else ""
    by_name = "$" in image or "://" in image or "/" not in image
    if image and not by_name and not (ROOT / image).exists():
        yield f"no container image at {image}"


def _of_folder(folder: Path) -> Iterator[str]:
    """Yields why the run cannot write its folder."""
    try:
        check_folder(folder)
    except UsageError as error:
        yield str(error)
        return
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not place.is_dir():
        yield f"{place} is a file, no folder for runs"
    elif not os.access(place, os.W_OK | os.X_OK):
        yield f"{place} cannot be written"
