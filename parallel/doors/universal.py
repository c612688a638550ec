"""Out: DeepSpeed's universal form (deepspeed.py says what it holds), which its engines load at any
stage and number of ranks: `{"checkpoint": {"load_universal": true}}` in the configuration, then
`engine.load_checkpoint(OUT)`.

The names are our GPT's, with the padded vocabulary of one tp rank; or those of transformers' class,
which has no padding. What DeepSpeed 0.19 reads beside the parameters is written, too.
"""

import io
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

from base.storage import write_blocks
from models.config import parameter_shapes
from models.gpt import WITH_VOCABULARY
from models.hf_config import hugging_face_names
from models.hf_weights import to_hugging_face
from models.weights import new_folder
from parallel.doors import Foreign
from parallel.doors.deepspeed import FILES

_VERSION = "0.19.0"  # of DeepSpeed, whose form this is
# More than any optimizer has. DeepSpeed loads as many groups as are stored, and keeps its own
# settings where a group states none.
_GROUPS = 10_000


def write(out: Path, foreign: Foreign, names: str = "ours") -> None:
    """Write a checkpoint as the folder `out`; one tensor at a time is in memory. names: "ours", or
    "hf".

    Raises:
        UsageError: it cannot be written, or no class of transformers has this model.
    """
    config, step = foreign.config, torch.tensor(float(foreign.adam_step))
    with new_folder(out) as aside:
        folder = aside / f"global_step{foreign.step}"
        for name, kind in product(parameter_shapes(config), foreign.kinds):
            theirs, parts = (name,), [foreign.tensor(name, kind)]
            if names == "hf":
                theirs = hugging_face_names(config, name)
                parts = to_hugging_face(config, name, parts[0])
            elif name in WITH_VOCABULARY:
                rows = config.padded_vocab(1) - config.vocab_size
                parts = [pad(parts[0], (0, 0, 0, rows))]
            for their, part in zip(theirs, parts, strict=True):
                _save({"param": part.clone()}, folder / "zero" / their / f"{FILES[kind]}.pt")
                _save(step, folder / "zero" / their / "step.pt")
        adam = {"state": {0: {"step": step}}, "param_groups": [{}]}  # as stage 3 reads it
        groups = {"param_groups": [{}] * _GROUPS, "optimizer_state_dict": adam}
        _save(groups | {"ds_version": _VERSION}, folder / "zero" / "optimizer_state.pt")
        done = {"global_steps": foreign.step, "skipped_steps": foreign.step - foreign.adam_step}
        done |= {"dp_world_size": 1, "mp_world_size": 1, "ds_version": _VERSION, "module": None}
        done |= {"lr_scheduler": {"last_batch_iteration": foreign.step - 1}, "param_shapes": None}
        for stage in ("", "zero_pp_rank_0_"):
            _save(done, folder / f"{stage}mp_rank_00_model_states.pt")
        (aside / "latest_universal").write_text(folder.name)


def _save(content: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, stream := io.BytesIO())
    write_blocks(path, [stream.getbuffer()])
