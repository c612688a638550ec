"""Check checkpoints, and take out what is in them. The command answers before torch is loaded.

    python -m parallel.checkpoint verify PATH...                  # what is damaged, if anything
    python -m parallel.checkpoint export PATH OUT [--dtype fp32]  # weights only, for models.hf

PATH is a checkpoint, a folder of checkpoints or a run folder. `export` takes the newest one and
first checks all its bytes.
"""

import sys
from pathlib import Path

# torch is loaded where it is used: --help, verify and mistakes are answered at once.
from base.errors import Parser, UsageError, command_line
from base.storage import BYTES, refuse_existing
from models.config import GPTConfig
from parallel.checkpoint import folders


def _verify(folder: Path) -> None:
    """Raises: UsageError: a checkpoint, or a weights-only folder, is not what was written."""
    if folders.step_of(folder) is not None:
        folders.verify(folder)
        return
    from models.weights import read_weights

    read_weights(folder)


def _export(path: Path, out: Path, dtype: str) -> str:
    """Write a checkpoint's weights as the weights-only folder `out`, and say what was written.

    Raises:
        UsageError: the checkpoint is damaged or of Hugging Face's model, whose parameters have
            other names; or `out` cannot be written.
    """
    refuse_existing(out)
    folder = folders.candidates(path)[0]
    if folders.step_of(folder) is None:
        raise UsageError(
            f"{folder} holds weights alone already; python -m models.hf export reads it"
        )
    manifest = folders.verify(folder)
    if manifest["implementation"] == "hf":
        raise UsageError(f"{folder} holds Hugging Face's own layout; only our GPT is exported")
    from models.weights import write_weights
    from parallel.checkpoint.rank_files import Reader

    facts = {key: manifest.get(key) for key in ("step", "run", "commit")}
    gathered = Reader(folder, manifest).gathered
    size = write_weights(out, GPTConfig(**manifest["model"]), gathered, dtype, facts)
    return f"{out}: {size} bytes of {folder}'s weights in {dtype}"


@command_line("parallel.checkpoint")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m parallel.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    verify = commands.add_parser("verify", help="read every byte and compare checksums")
    verify.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="what to read")
    exporting = commands.add_parser("export", help="write the full weights alone")
    exporting.add_argument("path", type=Path, metavar="PATH", help="what to read")
    exporting.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    dtypes = {"choices": tuple(BYTES), "default": "bf16", "help": "default: bf16"}
    exporting.add_argument("--dtype", **dtypes)
    arguments = parser.parse_args(argv)
    if arguments.command == "export":
        print(_export(arguments.path, arguments.out, arguments.dtype))
        return 0
    damaged = False
    for folder in [each for path in arguments.paths for each in folders.candidates(path)]:
        try:
            _verify(folder)
            print(f"{folder}: good")
        except UsageError as error:
            damaged = True
            print(error)
    return 1 if damaged else 0


if __name__ == "__main__":
    sys.exit(main())
