"""DeepSpeed's checkpoints, as its ZeRO stages 1 to 3 save them and in the universal form.

    latest, latest_universal     the name of the newest folder
    global_step100/
      mp_rank_00_model_states.pt, zero_pp_rank_0_mp_rank_00_model_states.pt at stage 3
                                 the shape of each parameter, the steps done
      zero_pp_rank_D_mp_rank_00_optim_states.pt, with bf16_ before it for some
                                 rank D's part of the flat fp32 weights and of their moments
      zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt
                                 the universal form: each parameter and moment whole

The formats are those that ds_to_universal.py of DeepSpeed 0.19 reads and writes.
"""

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from base.errors import UsageError
from models.config import GPTConfig
from models.weights_config import holds_weights, model_of
from parallel.checkpoint.manifest import KINDS
from parallel.doors import Foreign, pickles
from parallel.doors.names import Named

FILES = {"param": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_STATES = re.compile(r"(?:bf16_|fp16_)?(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_(\w+)_states.pt")


class Run(NamedTuple):
    """Neighbouring elements of a parameter: [start, start + n) of a rank's flat tensors."""

    flat: dict[str, Tensor]
    start: int
    n: int


Runs = dict[str, list[Run]]  # of each parameter, in order


def recognises(path: Path) -> Path | None:
    """The folder with DeepSpeed's files that a path leads to, perhaps by its `latest`."""
    for latest in (path / "latest", path / "latest_universal"):
        if latest.is_file():
            path = path / Path(latest.read_text(errors="replace").strip()).name
            break
    return path if any(path.glob("*mp_rank_*_model_states.pt")) else None


def read(folder: Path, model: GPTConfig | None) -> Foreign:
    """Open a checkpoint; one parameter at a time is read. model: its sizes; else they are those of
    a config.json, in the folder or beside it.

    Raises:
        UsageError: it is damaged, incomplete, without ZeRO, or not of such a model.
    """
    if model is None:
        beside = list(filter(holds_weights, (folder, folder.parent)))
        if not beside:
            raise UsageError(f"{folder} has no config.json in it or beside it: say --model")
        model = model_of(beside[0])
    files: dict[tuple[str, int], dict[int, Path]] = defaultdict(dict)
    for file in folder.iterdir():
        if match := _STATES.fullmatch(file.name):
            files[match[3], int(match[2])][int(match[1] or 0)] = file
    with _understood(folder):
        states = {mp: pickles.load(of[0]) for (what, mp), of in files.items() if what == "model"}
        groups = {mp: state["param_shapes"] or [] for mp, state in states.items()}
        of_all = (group.items() for its in groups.values() for group in its)
        shapes = {name: tuple(shape) for items in of_all for name, shape in items}
        if (folder / "zero").is_dir():
            runs, step = _universal(folder / "zero", shapes)
        else:
            runs, step = {}, None
            for mp in sorted(states):
                of_mp, step = _zero(folder, files["optim", mp], groups[mp])
                runs = of_mp | runs  # of a tied embedding, the first stage's
        done, skipped = (states[0][f"{which}_steps"] for which in ("global", "skipped"))
        adam_step = int(done - skipped if step is None else step)
    named = Named(model, {name: shapes[name] for name in runs}, folder)
    flats = [run.flat for its in runs.values() for run in its]
    kinds = KINDS if all(kind in flat for flat in flats for kind in KINDS) else KINDS[:1]

    def tensor(name: str, kind: str) -> Tensor:
        def whole(bare: str, _: int | None) -> Tensor:
            its = runs[theirs := named.prefix + bare]
            flat = torch.cat([run.flat[kind].narrow(0, run.start, run.n) for run in its])
            return flat.view(shapes[theirs])

        with _understood(folder):
            return named.tensor(name, whole)

    if named.repeated:  # DeepSpeed names a tied layer once
        raise UsageError(f"{folder} trains {named.repeated[0]}, which the model has tied")
    facts = {"run": f"imported from {folder} of DeepSpeed {states[0].get('ds_version')}"}
    return Foreign(model, max(int(done), adam_step), adam_step, kinds, tensor, facts)


@contextlib.contextmanager
def _understood(folder: Path) -> Iterator[None]:
    """Whatever another form breaks is a mistake of the user's."""
    try:
        yield
    except UsageError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        what = f"{type(error).__name__} {error!s:.80}"
        raise UsageError(f"{folder} is not as DeepSpeed's ZeRO saves it: {what}") from error


def _zero(folder: Path, files: dict[int, Path], groups: list[dict]) -> tuple[Runs, Any]:
    """What ZeRO's ranks hold between them, and AdamW's steps."""
    ranks = [pickles.load(file)["optimizer_state_dict"] for _, file in sorted(files.items())]
    if not ranks:
        raise UsageError(f"{folder} has no ZeRO states: stages 1 to 3 and universal are read")
    counts, runs = ranks[0]["partition_count"], defaultdict(list)
    if len(ranks) != (wanted := max(counts) if isinstance(counts, list) else counts):
        raise UsageError(f"{folder} has the states of {len(ranks)} ranks, saved were {wanted}")
    for rank, state in enumerate(ranks):
        third = "fp32_flat_groups" in state
        adam = state["optimizer_state_dict" if third else "base_optimizer_state"]
        flats = state["fp32_flat_groups" if third else "single_partition_of_fp32_groups"]
        for group, flat in enumerate(flats):
            held = {"param": flat} | adam["state"].get(group, {})
            step = held.get("step", adam["param_groups"][0].get("step"))
            if third:
                places = _parts(groups[group], rank, wanted)
            else:
                mappings = state["param_slice_mappings"][group].items()
                places = ((name, at.start, at.numel) for name, at in mappings)
            for name, start, n in places:
                runs[name].append(Run(held, start, n))
    return dict(runs), step


def _parts(shapes: dict[str, torch.Size], rank: int, ranks: int) -> Iterator[tuple[str, int, int]]:
    """Where a rank has its part of each parameter at stage 3, which cuts and pads each."""
    start = 0
    for name, shape in shapes.items():
        n = -(-math.prod(shape) // ranks)
        yield name, start, max(0, min(n, math.prod(shape) - rank * n))
        start += n


def _universal(folder: Path, shapes: dict[str, tuple[int, ...]]) -> tuple[Runs, Any]:
    """What the universal form holds, and AdamW's steps. Stage 3's parameters are flat; where
    `shapes` has none, theirs are added to it."""
    trained, runs, step = set(shapes), {}, None
    for of in sorted(file.parent for file in folder.glob("*/fp32.pt")):
        if trained and of.name not in trained:
            continue  # a buffer, or the output layer's second name
        flat = {}
        for kind, name in FILES.items():
            if (file := of / f"{name}.pt").exists():
                content = pickles.load(file)
                value = content["param"] if isinstance(content, dict) else content
                flat[kind] = value.flatten()
                if value.dim() > 1 or not trained:  # whole, where tp ranks have parts
                    shapes[of.name] = tuple(value.shape)
        runs[of.name] = [Run(flat, 0, flat["param"].numel())]
        step = pickles.load(of / "step.pt") if (of / "step.pt").exists() else step
    if step is None and (file := folder / "optimizer_state.pt").exists():
        adam = pickles.load(file).get("optimizer_state_dict", {})
        step = adam.get("state", {}).get(0, {}).get("step")
    return runs, step
