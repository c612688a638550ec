"""Check checkpoints, and bring them in and out. The command answers before torch is loaded.

    python -m parallel.checkpoint verify PATH...                  # what is damaged, if anything
    python -m parallel.checkpoint export PATH OUT [--dtype fp32]  # weights only, for models.hf
    python -m parallel.checkpoint export PATH OUT --format torch_dist  # with AdamW's moments
    python -m parallel.checkpoint import PATH OUT --model M       # another's; then --load OUT

PATH is a checkpoint, a folder of checkpoints or a run folder. `verify` reads weights alone, too.
`export` takes the newest checkpoint and first checks all its bytes. `import` finds out the format,
and writes a checkpoint where there are AdamW's moments, else the weights alone. Nothing is
unpickled but tensors, numbers, texts and tables: a file with anything else is refused. Each command
has its own --help.
"""

import sys
from pathlib import Path

# torch is loaded where it is used: --help, verify and mistakes are answered at once.
from base.errors import Parser, UsageError, command_line
from base.storage import BYTES, refuse_existing
from models.config import in_words, preset
from models.weights_config import model_of
from parallel.checkpoint import folders


def _verify(folder: Path) -> str:
    """What is good of a checkpoint, or of weights alone, in words.

    Raises:
        UsageError: it is not what was written, or not the model of its config.json.
    """
    if folders.step_of(folder) is not None:
        folders.verify(folder)
        return "good"
    from models.hf_weights import HuggingFaceFolder, open_weights

    if isinstance(open_weights(folder, lambda: None), HuggingFaceFolder):
        return "names and shapes are good; Hugging Face's files have no checksums"
    return "good"


def _export(path: Path, out: Path, dtype: str | None, form: str) -> str:
    """Write a checkpoint's weights, or all of it in another's format, as the folder `out`, and say
    what was written.

    Raises:
        UsageError: it is damaged or of Hugging Face's own model; or `out` cannot be written.
    """
    refuse_existing(out)
    if dtype and form != "weights":
        raise UsageError(f"--dtype is of weights alone: {form} has fp32")
    folder = folders.candidates(path)[0]
    if folders.step_of(folder) is None:
        raise UsageError(f"{folder} holds weights alone already: use python -m models.hf export")
    from parallel.checkpoint.doors import deepspeed, ours, torch_dist

    checkpoint = ours.read(folder)
    if form == "weights":
        dtype = dtype or "bf16"
        size = ours.write(out, checkpoint._replace(kinds=("param",)), dtype)
        return f"{out}: {size} bytes of {folder}'s weights in {dtype}"
    if form == "universal":
        deepspeed.write(out, checkpoint)
    elif parts := checkpoint.config.parts:
        raise UsageError(f"a model with {in_words(parts)} is not written as {form}: {folder}")
    else:
        torch_dist.write(out, checkpoint, form.partition("-")[2] or "stacked")
    return f"{out}: {folder}'s weights and moments as {form}"


def _import(path: Path, out: Path, model: str) -> str:
    """Write another's checkpoint as one of ours, and say what was written.

    Raises:
        UsageError: it cannot be read, is of another model or may run code; `out` cannot be written.
    """
    refuse_existing(out)
    sizes = model_of(Path(model)) if Path(model).exists() else preset(model)
    from parallel.checkpoint import doors
    from parallel.checkpoint.doors import ours

    foreign = doors.read(path, sizes)
    ours.write(out, foreign)
    held = "weights and moments" if len(foreign.kinds) > 1 else "weights alone"
    return f"{out}: {foreign.config.n_params:,} parameters, {held}, {foreign.facts['run']}"


@command_line("parallel.checkpoint")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m parallel.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    verify = commands.add_parser("verify", help="read every byte and compare checksums")
    verify.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="what to read")
    exporting = commands.add_parser("export", help="write the weights, or another's format")
    dtypes = {"choices": tuple(BYTES), "help": "of weights (default: bf16)"}
    exporting.add_argument("--dtype", **dtypes)
    forms = ("weights", "torch_dist", "torch_dist-hybrid", "universal")
    help_ = "default: weights"
    exporting.add_argument("--format", dest="form", choices=forms, default=forms[0], help=help_)
    importing = commands.add_parser("import", help="read another's checkpoint")
    importing.add_argument("--model", required=True, help="its sizes: a preset or a config.json")
    for command in (exporting, importing):
        command.add_argument("path", type=Path, metavar="PATH", help="what to read")
        command.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    arguments = vars(parser.parse_args(argv))
    command = arguments.pop("command")
    if command != "verify":
        print((_export if command == "export" else _import)(**arguments))
        return 0
    damaged = False
    for folder in [each for path in arguments["paths"] for each in folders.candidates(path)]:
        try:
            print(f"{folder}: {_verify(folder)}")
        except UsageError as error:
            damaged = True
            print(error)
    return 1 if damaged else 0


if __name__ == "__main__":
    sys.exit(main())
