"""Export a checkpoint's weights alone, in a form that does not depend on the layout."""

from pathlib import Path

from base.errors import UsageError
from models.config import GPTConfig
from models.weights import write_weights
from parallel.checkpoint import folders
from parallel.checkpoint.rank_files import Reader


def export_weights(folder: Path, out: Path, dtype: str = "bf16") -> int:
    """Write a checkpoint's weights as the weights-only folder `out`; its bytes.

    Raises:
        UsageError: the checkpoint is damaged or of Hugging Face's model, whose parameters have
            other names; or `out` cannot be written.
    """
    manifest = folders.read_manifest(folder)
    if manifest["implementation"] == "hf":
        raise UsageError(f"{folder} holds Hugging Face's own layout; only our GPT is exported")
    reader = Reader(folder, manifest)
    facts = {key: manifest.get(key) for key in ("step", "run", "commit")}
    return write_weights(out, GPTConfig(**manifest["model"]), reader.gathered, dtype, facts)
