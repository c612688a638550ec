"""Which settings shorten a part of a step. Each move is a run that differs from the present one in
one such setting, and that could start."""

from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from base.errors import UsageError
from parallel.config.layout import RECOMPUTE, Layout
from parallel.config.refusals import refusals
from parallel.config.run_spec import RunSpec


class Move(NamedTuple):
    """Another run: the flags that make it, and its settings."""

    flags: str
    spec: RunSpec


def moves(spec: RunSpec, part: str) -> list[Move]:
    """Returns the runs that could start and that differ in one setting that acts on `part`, one of
    the parts of a step (parallel/measure/efficiencies.py). Those with another batch stand last."""
    layout, found = spec.layout, []
    for sizes in _sizes(spec, part):
        if any(not isinstance(n, str) and (n < 0 or n % 1) for n in sizes.values()):
            continue
        whole = {name: int(n) if isinstance(n, float) else n for name, n in sizes.items()}
        with suppress(UsageError):  # a size beyond its bounds
            changed = replace(spec, layout=replace(layout, **whole))
            if not refusals(changed):
                found.append(Move(_flags(layout, changed.layout, whole), changed))
    return sorted(found, key=lambda move: move.spec.global_batch != spec.global_batch)


def _sizes(spec: RunSpec, part: str) -> list[dict[str, Any]]:
    """Returns the sizes of a layout that would act on a part, whole numbers or not."""
    layout = spec.layout
    fewer_waits = {"n_micro": layout.n_micro * 2}  # a larger batch
    larger = {"micro_batch": layout.micro_batch * 2, "n_micro": layout.n_micro / 2}
    smaller = {"micro_batch": layout.micro_batch / 2, "n_micro": layout.n_micro * 2}
    lower_stage = {"zero_stage": layout.zero_stage - 1}

    def less(axis: str) -> dict[str, float]:
        """Returns half of an axis, whose ranks become data-parallel ones."""
        more_dp = {"dp": layout.dp * 2, "n_micro": layout.n_micro / 2}
        return {axis: getattr(layout, axis) / 2} | more_dp

    match part:
        case "compute":
            policies = RECOMPUTE[: RECOMPUTE.index(layout.recompute)]
            return [larger, *({"recompute": policy} for policy in policies), less("tp")]
        case "tp":
            return [less(part)]
        case "dp":
            each_micro_batch = [larger] if layout.zero_stage > 1 else []
            return [*each_micro_batch, lower_stage, fewer_waits]
        case "pp":
            return [less("pp"), {"vpp": layout.vpp / 2}]
        case "bubble":
            return [smaller, {"vpp": layout.vpp * 2}, less("pp"), fewer_waits]
        case "other":
            return [larger]
    return []


def _flags(layout: Layout, changed: Layout, sizes: dict[str, Any]) -> str:
    """Returns the flags that make another layout of the sizes that changed."""
    stated = {name: n for name, n in sizes.items() if name not in ("dp", "n_micro")}
    if changed.global_batch != layout.global_batch:
        stated["global_batch"] = changed.global_batch
    names = {name: "--" + name.replace("_", "-") for name in stated}
    return " ".join(f"{names[name]} {n}" for name, n in stated.items())
