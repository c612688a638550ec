"""Which settings differ between two runs, and whether they are two runs at all. Torch-free."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from parallel.config.duration import WORK
from parallel.config.run_spec import DEFAULTS

# Settings that may change between a run's attempts without making it another run. WORK may change
# too, where the newest checkpoint is not beyond the new end.
CIRCUMSTANCES = frozenset(
    "save_interval save_grace_s async_save load resume keep_last keep_every"
    " log_interval eval_interval eval_steps threads timeout_s hang_s breakdown"
    " profile_steps".split()
)


class Change(NamedTuple):
    """A setting that differs between two runs, or two attempts of one."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name} {self.before} not {self.now}"


def changes(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Returns the settings that differ between two runs, sorted by name. A setting that a run does
    not state has its default."""
    names = sorted(now.keys() | earlier.keys() & DEFAULTS.keys())
    earlier, now = DEFAULTS | earlier, DEFAULTS | now
    pairs = (Change(name, earlier.get(name), now.get(name)) for name in names)
    return [change for change in pairs if change.before != change.now]


def matters(change: Change) -> bool:
    """Returns whether a run with this change is another run."""
    return change.name not in CIRCUMSTANCES and change.name not in WORK
