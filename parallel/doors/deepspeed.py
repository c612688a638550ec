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

import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from base.errors import UsageError
from models.config import GPTConfig
from parallel.checkpoint.manifest import KINDS
from parallel.doors import Foreign, pickles
from parallel.doors.names import Named

FILES = {"param": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_MODEL, _RANKS = "*mp_rank_00_model_states.pt", "*zero_pp_rank_*_mp_rank_00_optim_states.pt"
_OTHER = "is not as DeepSpeed's ZeRO saves it"


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
    return path if any(path.glob(_MODEL)) else None


def read(folder: Path, model: GPTConfig) -> Foreign:
    """Open a checkpoint; one parameter at a time is read.

    Raises:
        UsageError: it is damaged, incomplete, without ZeRO, or not of such a model.
    """
    with pickles.understood(folder, _OTHER):
        state = pickles.load(min(folder.glob(_MODEL)))
        groups = state["param_shapes"] or []
        shapes = {name: tuple(shape) for group in groups for name, shape in group.items()}
        if (folder / "zero").is_dir():
            runs, step = _universal(folder / "zero", shapes)
        else:
            runs, step = _zero(folder, groups)
        done, skipped = (state[f"{which}_steps"] for which in ("global", "skipped"))
        adam_step = int(done - skipped if step is None else step)
    named = Named(model, {name: shapes[name] for name in runs}, folder)
    if named.repeated:  # DeepSpeed names a tied layer once
        raise UsageError(f"{folder} trains {named.repeated[0]}, which the model has tied")
    flats = [run.flat for its in runs.values() for run in its]
    kinds = KINDS if all(kind in flat for flat in flats for kind in KINDS) else KINDS[:1]

    def tensor(name: str, kind: str) -> Tensor:
        def whole(bare: str, _: int | None) -> Tensor:
            its = runs[theirs := named.prefix + bare]
            flat = torch.cat([run.flat[kind].narrow(0, run.start, run.n) for run in its])
            return flat.view(shapes[theirs])

        with pickles.understood(folder, _OTHER):
            return named.tensor(name, whole)

    facts = {"run": f"imported from {folder} of DeepSpeed {state.get('ds_version')}"}
    return Foreign(model, max(int(done), adam_step), adam_step, kinds, tensor, facts)


def _zero(folder: Path, groups: list[dict]) -> tuple[Runs, Any]:
    """What ZeRO's ranks hold between them, and AdamW's steps."""
    files = {int(re.findall(r"pp_rank_(\d+)", f.name)[0]): f for f in folder.glob(_RANKS)}
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
            if third:  # each parameter is cut and padded
                at = 0
                for name, shape in groups[group].items():
                    size, n = math.prod(shape), -(-math.prod(shape) // wanted)
                    runs[name].append(Run(held, at, max(0, min(n, size - rank * n))))
                    at += n
                continue
            for name, run in state["param_slice_mappings"][group].items():
                runs[name].append(Run(held, run.start, run.numel))
    return dict(runs), step


def _universal(folder: Path, shapes: dict[str, tuple[int, ...]]) -> tuple[Runs, Any]:
    """What the universal form holds, and AdamW's steps where each parameter has them. Stage 3's
    parameters are flat; where `shapes` has none, theirs are added to it."""
    trained, runs, step = set(shapes), {}, None
    for of in sorted(file.parent for file in folder.glob("*/fp32.pt")):
        if trained and of.name not in trained:
            continue  # a buffer, or the output layer's second name
        stored = {file.stem: pickles.load(file) for file in of.glob("*.pt")}
        step = stored.pop("step", None)
        values = {
            kind: content["param"] if isinstance(content, dict) else content
            for kind, name in FILES.items()
            if (content := stored.get(name)) is not None
        }
        if values["param"].dim() > 1 or not trained:  # whole, where tp ranks have parts
            shapes[of.name] = tuple(values["param"].shape)
        flat = {kind: value.flatten() for kind, value in values.items()}
        runs[of.name] = [Run(flat, 0, flat["param"].numel())]
    return runs, step
