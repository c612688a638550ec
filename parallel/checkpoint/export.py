"""Export a checkpoint's weights alone, in a form that does not depend on the layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from base.errors import UsageError
from models.config import GPTConfig
from models.weights import write_weights
from parallel.checkpoint import folders
from parallel.checkpoint.rank_files import Reader


def open_gpt(folder: Path) -> tuple[dict[str, Any], Reader]:
    """The manifest and the reader of a checkpoint of our GPT, which has the reference names.

    Raises:
        UsageError: it is damaged, or holds Hugging Face's model.
    """
    manifest = folders.read_manifest(folder)
    if manifest["implementation"] == "hf":
        raise UsageError(f"{folder} holds Hugging Face's own layout; only our GPT is exported")
    return manifest, Reader(folder, manifest)


def export_weights(
    folder: Path, out: Path, dtype: str = "bf16", tick: Callable[[], None] = lambda: None
) -> int:
    """Write a checkpoint's weights as the weights-only folder `out`; its bytes.

    Raises:
        UsageError: the checkpoint is damaged, or `out` cannot be written.
    """
    manifest, reader = open_gpt(folder)
    facts = {key: manifest[key] for key in ("step", "run", "commit")}

    def gathered(name: str) -> Tensor:
        tick()
        return reader.gathered(name)

    return write_weights(out, GPTConfig(**manifest["model"]), gathered, dtype, facts)
