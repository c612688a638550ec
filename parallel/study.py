"""Studies: a TOML file that asks one question, and the runs that answer it. Torch-free.

question = "Does every engine train the same GPT?"
baseline = "ddp"            # the run that speedups and parity are measured against

[defaults]                  # settings of every run: the flags of parallel.train
preset = "tiny"

[[run]]                     # one table per run; its name follows from its split
engine = "megatron"
gpus = 2
tp = 2
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.errors import UsageError
from parallel.spec import RunSpec, resolve


@dataclass(frozen=True)
class Study:
    """A study file: its name (the file's stem), question, baseline and the settings of its runs."""

    name: str
    path: Path
    question: str
    baseline: str
    settings: dict[str, list[tuple[str, dict[str, Any]]]]  # run name -> layers for resolve()

    def run(
        self, name: str, flags: dict[str, Any] | None = None, gpus: int | None = None
    ) -> RunSpec:
        """The run called `name`, with `flags` overriding the study's settings.

        Raises:
            UsageError: no such run, or it cannot start.
        """
        if name not in self.settings:
            raise UsageError(f"{self.path}: no run {name!r}; it has: {', '.join(self.settings)}")
        return resolve(*self.settings[name], ("command line", flags or {}), gpus=gpus)


def load_study(path: Path | str) -> Study:
    """Read and check a study file.

    Raises:
        UsageError: unreadable, not TOML, a key that is not known, two runs of one name, a baseline
            that is no run, or a run that cannot start.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"study {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"study {path} is not TOML: {error}") from error
    if unknown := set(table) - {"question", "baseline", "defaults", "run"}:
        raise UsageError(f"study {path}: unknown {', '.join(sorted(unknown))}")
    if not isinstance(table.get("run"), list) or not table["run"]:
        raise UsageError(f"study {path} has no [[run]] table")
    if not isinstance(table.get("question"), str):
        raise UsageError(f"study {path} asks no question (question = ...)")
    settings: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for number, run in enumerate(table["run"], start=1):
        source = f"{path} [[run]] {number}"
        layers = [(f"{path} [defaults]", table.get("defaults", {})), (source, run)]
        try:
            name = resolve(*layers).name
        except UsageError as error:
            message = str(error)
            raise UsageError(message if str(path) in message else f"{source}: {message}") from error
        if name in settings:
            raise UsageError(f"{source}: a second run called {name}")
        settings[name] = layers
    baseline = table.get("baseline", next(iter(settings)))
    if baseline not in settings:
        raise UsageError(
            f"study {path}: baseline {baseline!r} is no run; it has: {', '.join(settings)}"
        )
    return Study(path.stem, path, table["question"], baseline, settings)
