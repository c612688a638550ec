"""What every run of a study would check when it starts, checked before slurm.submit submits: the
data, a run folder that can be written, Python and the container's image, on the machine that
submits. Each problem is one line, however many runs have it.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from base.errors import UsageError
from base.files import ROOT
from parallel.config.clusters import Cluster
from parallel.config.data_files import describe
from parallel.config.settings import RunSpec
from parallel.config.study import Study
from parallel.record.writer import check_folder

STANDARD_DATA = "data/stdlib"  # what `python -m parallel.data` makes without flags


def problems(
    study: Study, cluster: Cluster, logs: Path, names: Iterable[str] | None = None
) -> list[tuple[str, str]]:
    """(kind, text) of everything that would end these runs at their start; all runs by default.

    Kinds: data, folder, load, python, container.
    """
    names = list(study.specs if names is None else names)
    findings: dict[tuple[str, str], list[str]] = {}  # each problem once, with the texts of its runs
    for name in names:
        for kind, text in _of_run(study.specs[name], logs / study.name / name):
            # Each run has a folder of its own: one is named, and the others are counted.
            findings.setdefault((kind, "" if kind == "folder" else text), []).append(text)
    problems = list(_of_cluster(cluster))
    for (kind, _), texts in findings.items():
        some = f" ({len(texts)} of {len(names)} runs)" if len(texts) < len(names) else ""
        problems.append((kind, texts[0] + some))
    return problems


def _of_cluster(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """What is wrong for every run."""
    python = os.environ.get("PYTHON") or cluster.python
    # A bare name may come from a module that the job's set-up loads.
    here = shutil.which(python if "/" not in python else str(ROOT / python))
    if here is None and not ("/" not in python and cluster.setup):
        yield (
            "python",
            f"no Python at {python}: run make setup, or set PYTHON, or python in the cluster",
        )
    image = cluster.container.image if cluster.container is not None else ""
    by_name = "$" in image or "://" in image or "/" not in image
    if image and not by_name and not (ROOT / image).exists():
        yield "container", f"no container image at {image}"


def _of_run(spec: RunSpec, folder: Path) -> Iterator[tuple[str, str]]:
    """What is wrong for one run."""
    if text := _data_problem(spec):
        yield "data", text
    if spec.load is not None and not (ROOT / spec.load).exists():
        yield "load", f"no checkpoint at {spec.load}"
    if text := _folder_problem(ROOT / folder):
        yield "folder", text


def _data_problem(spec: RunSpec) -> str:
    """Why the run cannot train on its data, from sizes and headers alone; "" where it can."""
    path = ROOT / spec.data
    mend = "" if spec.data == STANDARD_DATA else f" --input TEXT --out {spec.data}"
    if not path.exists() and not Path(f"{path}.idx").exists():
        return f"no token files at {spec.data}: python -m parallel.data{mend} makes them"
    try:
        described = describe(path)
    except UsageError as error:
        return str(error)
    tokens, ids = described.train.stop - described.train.first, described.vocab_size
    if tokens <= spec.seq_len:
        return f"{spec.data} has {tokens} tokens, too few for one sequence of {spec.seq_len} + 1"
    if ids is not None and ids > spec.model.vocab_size:
        return f"{spec.data} has {ids} token ids, but the model has {spec.model.vocab_size}"
    return ""


def _folder_problem(folder: Path) -> str:
    """Why the run cannot write its folder; "" where it can."""
    try:
        check_folder(folder)
    except UsageError as error:
        return str(error)
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        return f"{there} is a file, no folder for runs"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written"
