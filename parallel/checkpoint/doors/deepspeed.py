"""DeepSpeed's checkpoints, as its ZeRO stages 1 to 3 save them and in the universal form.

    latest, latest_universal     the name of the newest folder
    global_step100/
      mp_rank_00_model_states.pt, zero_pp_rank_0_mp_rank_00_model_states.pt at stage 3
                                 the shape of each parameter, the steps done
      zero_pp_rank_D_mp_rank_00_optim_states.pt, with bf16_ before it for some
                                 rank D's part of the flat fp32 weights and of their moments
      zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt
                                 the universal form: each parameter and moment whole

They are as ds_to_universal.py of DeepSpeed 0.19 reads and writes them.
"""

import io
import math
import re
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from base.errors import UsageError
from base.storage import new_folder, write_blocks
from models.config import GPTConfig, parameter_shapes
from models.gpt import WITH_VOCABULARY
from parallel.checkpoint.contents import KINDS
from parallel.checkpoint.doors import WholeCheckpoint, pickles
from parallel.checkpoint.doors.names import Named

_FILES = {"param": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_MODEL, _RANKS = "*mp_rank_00_model_states.pt", "*zero_pp_rank_*_mp_rank_00_optim_states.pt"
_OTHER = "is not as DeepSpeed's ZeRO saves it"
_VERSION = "0.19.0"  # of DeepSpeed, whose universal form is written
# More than any optimizer has. DeepSpeed loads as many groups as are stored, and keeps its own
# settings where a group states none.
_GROUPS = 10_000
# Of each parameter its neighbouring elements, in order: kind -> flat tensor.
Runs = dict[str, list[dict[str, Tensor]]]


def read(folder: Path, model: GPTConfig) -> WholeCheckpoint:
    """Opens a checkpoint; one parameter at a time is read.

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
        steps_done, skipped = (state[f"{word}_steps"] for word in ("global", "skipped"))
        adam_step = int(steps_done - skipped if step is None else step)
    named = Named(model, {name: shapes[name] for name in runs}, folder)
    if named.repeated:  # DeepSpeed names a tied layer once
        raise UsageError(f"{folder} trains {named.repeated[0]}, which the model has tied")
    runs_of_all = [run for runs_of_one in runs.values() for run in runs_of_one]
    stored = {kind: sum(kind in run for run in runs_of_all) for kind in KINDS}
    if len({*stored.values(), len(runs_of_all)}) > 1 and any(stored[kind] for kind in KINDS[1:]):
        raise UsageError(f"{folder} is incomplete: of {len(runs_of_all)} tensors it has {stored}")
    kinds = KINDS if stored["exp_avg"] else KINDS[:1]

    def tensor(name: str, kind: str) -> Tensor:
        """Returns a full parameter of ours, or one of its two moments."""

        def whole(bare: str, _: int | None) -> Tensor:
            """Returns one of DeepSpeed's tensors, joined from what the ranks hold of it."""
            stored_name = named.prefix + bare
            return torch.cat([run[kind] for run in runs[stored_name]]).view(shapes[stored_name])

        with pickles.understood(folder, _OTHER):
            return named.tensor(name, whole)

    facts = {"run": f"imported from {folder} of DeepSpeed {state.get('ds_version')}"}
    return WholeCheckpoint(model, max(int(steps_done), adam_step), adam_step, kinds, tensor, facts)


def _zero(folder: Path, groups: list[dict]) -> tuple[Runs, Any]:
    """Returns the runs of elements that ZeRO's ranks hold between them, and AdamW's steps."""
    files = {int(re.findall(r"pp_rank_(\d+)", f.name)[0]): f for f in folder.glob(_RANKS)}
    ranks = [pickles.load(file)["optimizer_state_dict"] for _, file in sorted(files.items())]
    if not ranks:
        raise UsageError(f"{folder} has no ZeRO states: stages 1 to 3 and universal are read")
    counts, runs = ranks[0]["partition_count"], defaultdict(list)
    if len(ranks) != (wanted := max(counts) if isinstance(counts, list) else counts):
        raise UsageError(f"{folder} has the states of {len(ranks)} ranks, saved were {wanted}")
    for rank, state in enumerate(ranks):
        stage_3 = "fp32_flat_groups" in state
        adam = state["optimizer_state_dict" if stage_3 else "base_optimizer_state"]
        flats = state["fp32_flat_groups" if stage_3 else "single_partition_of_fp32_groups"]
        for group, flat in enumerate(flats):
            tensors = {"param": flat} | adam["state"].get(group, {})
            step = tensors.get("step", adam["param_groups"][0].get("step"))
            if stage_3:  # each parameter is cut and padded
                begin, places = 0, []
                for name, shape in groups[group].items():
                    size, length = math.prod(shape), -(-math.prod(shape) // wanted)
                    places.append((name, begin, max(0, min(length, size - rank * length))))
                    begin += length
            else:
                mappings = state["param_slice_mappings"][group].items()
                places = [(name, run.start, run.numel) for name, run in mappings]
            for name, *place in places:
                runs[name].append(
                    {kind: tensors[kind].narrow(0, *place) for kind in KINDS if kind in tensors}
                )
    return dict(runs), step


def _universal(folder: Path, shapes: dict[str, tuple[int, ...]]) -> tuple[Runs, Any]:
    """Returns the runs of elements that the universal form holds, and AdamW's steps where each
    parameter states them. Stage 3's parameters are flat; where `shapes` has none, theirs are added
    to it."""
    trained, runs, step = set(shapes), {}, None
    for parameter_folder in sorted(file.parent for file in folder.glob("*/fp32.pt")):
        if trained and parameter_folder.name not in trained:
            continue  # a buffer, or the output layer's second name
        stored = {file.stem: pickles.load(file) for file in parameter_folder.glob("*.pt")}
        step = stored.pop("step", None)
        values = {
            kind: content["param"] if isinstance(content, dict) else content
            for kind, name in _FILES.items()
            if (content := stored.get(name)) is not None
        }
        if values["param"].dim() > 1 or not trained:  # whole, where tp ranks have parts
            shapes[parameter_folder.name] = tuple(values["param"].shape)
        runs[parameter_folder.name] = [{kind: value.flatten() for kind, value in values.items()}]
    return runs, step


def write(out: Path, checkpoint: WholeCheckpoint) -> None:
    """Writes the universal form, which DeepSpeed's engines load at any stage and number of ranks,
    with our names and the padded vocabulary of one tp rank.

    Raises:
        UsageError: it cannot be written; nothing is left behind.
    """
    config, step = checkpoint.config, torch.tensor(float(checkpoint.adam_step))
    with new_folder(out) as aside:
        folder = aside / f"global_step{checkpoint.step}"
        for name, kind in product(parameter_shapes(config), checkpoint.kinds):
            value = checkpoint.tensor(name, kind)
            if name in WITH_VOCABULARY:
                value = pad(value, (0, 0, 0, config.padded_vocab(1) - config.vocab_size))
            _save({"param": value.clone()}, folder / "zero" / name / f"{_FILES[kind]}.pt")
            _save(step, folder / "zero" / name / "step.pt")
        adam = {"state": {0: {"step": step}}, "param_groups": [{}]}  # as stage 3 reads it
        groups = {"param_groups": [{}] * _GROUPS, "optimizer_state_dict": adam}
        _save(groups | {"ds_version": _VERSION}, folder / "zero" / "optimizer_state.pt")
        state = {
            "global_steps": checkpoint.step,
            "skipped_steps": checkpoint.step - checkpoint.adam_step,
        }
        state |= {"dp_world_size": 1, "mp_world_size": 1, "ds_version": _VERSION, "module": None}
        state |= {
            "lr_scheduler": {"last_batch_iteration": checkpoint.step - 1},
            "param_shapes": None,
        }
        for stage in ("", "zero_pp_rank_0_"):
            _save(state, folder / f"{stage}mp_rank_00_model_states.pt")
        (aside / "latest_universal").write_text(folder.name)


def _save(content: Any, path: Path) -> None:
    """Writes what torch.save makes of an object, synced, into a new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, stream := io.BytesIO())
    write_blocks(path, [stream.getbuffer()])
