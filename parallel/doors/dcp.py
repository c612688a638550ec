"""PyTorch's distributed checkpoint (DCP): .metadata and files, of tensors named as the saver's
modules: ours, Hugging Face's, or megatron-core's (names.py).

The moments are `state.NAME.exp_avg` behind what the saver calls its optimizer, as
torch.distributed.checkpoint.state_dict and torchtitan lay them out.
"""

import re
from pathlib import Path

from torch import Tensor

from base.errors import UsageError
from models.config import GPTConfig
from parallel.checkpoint.manifest import KINDS
from parallel.doors import Foreign, stores
from parallel.doors.names import Named

_MOMENT = re.compile(r"(?P<before>(?:.+\.)?state\.)(?P<name>.+)\.(?P<kind>exp_avg|exp_avg_sq|step)")
_ASIDE = re.compile(r"(optim|lr_scheduler|train_state|dataloader)")
_STEPS = ("train_state.step", "step", "iteration")  # of the run


def recognises(path: Path) -> Path | None:
    return path if (path / stores.TABLE).is_file() else None


def read(folder: Path, model: GPTConfig | None) -> Foreign:
    """Raises: UsageError: it is damaged, or does not hold the model."""
    if model is None:
        raise UsageError(f"{folder} does not state its model: name it with --model")
    store = stores.Store(folder)
    moments: dict[tuple[str, str], str] = {}
    for key in [*store.shapes, *store.objects]:
        if match := _MOMENT.fullmatch(key):
            moments[match["kind"], match["name"]] = key
    weights = {
        key: shape
        for key, shape in store.shapes.items()
        if key not in moments.values() and not _ASIDE.match(key) and key not in _STEPS
    }
    named = Named(model, weights, folder)

    def key_of(kind: str, theirs: str) -> str | None:
        """Where a moment is stored; its name may be without what stands before the weights'."""
        full = named.prefix + theirs
        return full if kind == "param" else moments.get((kind, full), moments.get((kind, theirs)))

    names = [name for parts in named.parts.values() for name in parts.names]
    complete = all(key_of(kind, name) for kind in KINDS for name in names)

    def number(key: str | None) -> int:
        value = store.tensor(key) if key in store.shapes else key and store.objects[key].load()
        return int(value or 0)

    adam_step = number(key_of("step", names[0]))
    step = number(next((key for key in _STEPS if key in store.shapes | store.objects), None))

    def tensor(name: str, kind: str) -> Tensor:
        return named.tensor(name, lambda n, layer: store.tensor(key_of(kind, n), layer))

    run = f"imported from PyTorch's distributed checkpoint {folder}"
    kinds = KINDS if complete else ("param",)
    return Foreign(model, max(step, adam_step), adam_step, kinds, tensor, {"run": run})
