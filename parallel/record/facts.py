"""What run.json and launcher_metadata.json say about a run: software, machine, commit, launcher.

Torch-free: versions come from package metadata, not from imports.
"""

import contextlib
import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from base.files import ROOT
from parallel.config.run_spec import RunSpec
from parallel.config.study import Study
from parallel.record.environment import command_line, environment_facts
from parallel.record.launch import Launch
from parallel.record.schema import SCHEMA_VERSION, utc_now

PACKAGES = ("torch", "deepspeed", "megatron-core", "transformers", "numpy", "transformer-engine")
TRIED = "libraries: in the ranges whose ends were tried"  # a line of train.log
# The code that a result depends on.
TRAINS = ("base", "models", "parallel", "setup.py", "constraints.txt")


def versions() -> dict[str, str | None]:
    """Returns the installed versions; None where a package is absent."""
    installed = dict.fromkeys(PACKAGES) | {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed


def ranges() -> dict[str, Any]:
    """Returns the range of each library in setup.py for this Python (a SpecifierSet), by name: the
    tests ran with its ends."""
    from packaging.requirements import Requirement  # of transformers and deepspeed

    if (ROOT / "setup.py").exists():  # a container binds the repository and installs the rest
        lines = re.findall(r'"([\w-]+>=[^"]+)"', (ROOT / "setup.py").read_text())
    else:
        lines = metadata.requires("gpt-scaling-study") or []
    wanted = map(Requirement, lines)
    return {r.name: r.specifier for r in wanted if not r.marker or r.marker.evaluate({"extra": ""})}


def tried(installed: Mapping[str, str | None]) -> str:
    """Returns one line on `versions()`: whether training was tried with such libraries."""
    tested = ranges()
    untried = [
        f"{name} {version} (tried: {tested[name]})"
        for name, version in installed.items()
        if version and name in tested and not tested[name].contains(version, prereleases=True)
    ]
    return f"libraries: may work, not tried: {', '.join(untried)}" if untried else TRIED


def git(folder: Path) -> dict[str, Any]:
    """Returns the state of the repository at `folder`; None outside git.

    It has `commit`; `code`, a hash of what trains (TRAINS), which stays the same over commits that
    change a figure or a log; and `dirty`, whether what trains was changed since.
    """

    def ask(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    changed = ask("status", "--porcelain", "--untracked-files=no", "--", *TRAINS)
    trees = ask("rev-parse", *(f"HEAD:{path}" for path in TRAINS))
    return {
        "commit": ask("rev-parse", "HEAD"),
        "code": trees and hashlib.sha1(trees.encode()).hexdigest(),
        "dirty": None if changed is None else bool(changed),
    }


def same_code(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Returns whether two runs' `git` facts name the same code: by `code` where both have it (an
    old run.json has none), else by the commit. Uncommitted changes are not compared."""
    name = "code" if mine.get("code") and theirs.get("code") else "commit"
    return mine.get(name) == theirs.get(name)


def cores() -> int:
    """Returns how many processor cores this process may use."""
    return len(os.sched_getaffinity(0))


def load_average() -> float | None:
    """Returns how many processes ran or waited for a core in the last minute, the mean; or None."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def cpu_name() -> str:
    """Returns the name of this machine's processor, by /proc/cpuinfo where there is one."""
    with contextlib.suppress(OSError):
        about = Path("/proc/cpuinfo").read_text()
        if model := re.search(r"^model name\s*: (.*)", about, re.MULTILINE):
            return model[1].strip()
    return platform.processor() or platform.machine()


def scheduler(environment: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """Returns Slurm's facts about the job; without Slurm type is "none" and all of them are
    None."""
    names = ("JOB_ID", "JOB_NODELIST", "JOB_NUM_NODES", "PROCID", "LOCALID", "JOB_PARTITION")
    keys = ("job_id", "nodelist", "nnodes", "procid", "localid", "partition")
    stated = (environment.get(f"SLURM_{name}") for name in names)
    kind = "slurm" if "SLURM_JOB_ID" in environment else "none"
    return {"type": kind} | dict(zip(keys, stated, strict=True))


def one_machine(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether all nodes are this machine, as a cluster's table says by its
    `environment`."""
    return environment.get("SCALING_ONE_MACHINE") == "1"


def profiler(spec: RunSpec, environment: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """Returns the profiler that slows the run, or None. A profiled run is not a timing.

    Nsight Systems sets NSYS_PROFILING_SESSION_ID for what it runs.
    """
    by_nsys = "NSYS_PROFILING_SESSION_ID" in environment
    if spec.profile_steps is not None:
        tool = "nsys and torch" if by_nsys else "torch"
        return {"tool": tool, "steps": spec.profile_steps, "ranks": "0"}
    return {"tool": "nsys", "steps": "all", "ranks": "all"} if by_nsys else None


def launcher_metadata(launch: Launch) -> dict[str, Any]:
    """Returns launcher_metadata.json: who started rank 0, where, with what environment."""
    return {
        "schema_version": "1",
        "launcher": launch.launcher,
        "rank": launch.rank,
        "world_size": launch.world_size,
        "ranks_per_node": launch.local_world_size,
        "host": {"hostname": platform.node(), "platform": platform.platform(), "cores": cores()},
        "python": sys.executable,
        "working_directory": os.getcwd(),
        "command_line": command_line(),
        "environment": environment_facts(),
        "scheduler": scheduler(),
        "timestamp_utc": utc_now(),
    }


def inputs(spec: RunSpec) -> dict[str, str | None]:
    """Returns the SHA-256 of the small files a run depends on, which git may not hold; None without
    one."""

    def digest(path: Path) -> str | None:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None

    config = spec.deepspeed_config
    return {
        "deepspeed_config": digest(Path(config)) if config else None,
        "data": digest(Path(spec.data) / "meta.json"),
    }


# The keys of run.json that a study gives.
OF_STUDY = ("study", "question", "run", "configuration", "repeat", "baseline")


def planned(study: Study, run: str) -> dict[str, Any]:
    """Returns the part of run.json that is known before a job starts: what it is to train, and
    how."""
    spec, point = study.runs[run].spec, study.runs[run]
    return {
        "study": study.name,
        "question": study.question,
        "run": run,
        "configuration": point.configuration,
        "repeat": point.repeat or None,
        "baseline": study.baseline,
        **spec.as_facts(),
        "model": {"n_params": spec.model.n_params},
    }


def ranks_per_node(launch: Launch) -> int:
    """Returns how many ranks share this machine."""
    return launch.world_size if one_machine() else launch.local_world_size


def run_facts(spec: RunSpec, launch: Launch, known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns run.json as far as rank 0 knows it before torch is loaded. known: OF_STUDY, where
    there is a study, else the run's name alone."""
    sizes = {"n_params": spec.model.n_params, "padded_vocab": spec.padded_vocab}
    return {
        "schema_version": SCHEMA_VERSION,
        **{name: known.get(name) for name in OF_STUDY},
        "profiler": profiler(spec),
        "command_line": command_line(),
        **spec.as_facts(),
        **({"routing": spec.routing} if spec.routing else {}),
        "work": spec.work,
        "model": spec.trained.as_dict() | sizes,
        "versions": versions(),
        "host": {
            "hostname": platform.node(),
            "platform": platform.platform(),
            "cpu": cpu_name(),
            "cores": cores(),
            "ranks_per_node": ranks_per_node(launch),
        },
        "load": {"start": load_average()},  # measure/load_and_memory.py adds the rest
        "inputs": inputs(spec),
        "scheduler": scheduler(),
        "git": git(ROOT),
        "launcher": launch.launcher,
        "started_utc": utc_now(),
    }
