"""Checks, exports and imports checkpoints.

    python -m parallel.checkpoint verify PATH...               # what is damaged, if anything
    python -m parallel.checkpoint export PATH HF_DIR           # the weights for transformers
    python -m parallel.checkpoint export PATH OUT --format torch_dist  # with AdamW's moments
    python -m parallel.checkpoint import PATH OUT --model M    # another's; then --load OUT

PATH is a checkpoint, a folder of checkpoints or a run folder. `verify` reads Hugging Face's, too.
`export` takes the newest checkpoint and first checks all its bytes. Its format `hf` makes a GPT-2,
Llama, Qwen3, Mixtral or Qwen3-MoE of transformers, with the same logits; a model that fits none of
these classes is refused. To train a Hugging Face model, use `parallel.train --load HF_DIR`.
`import` finds out the format; without AdamW's moments the checkpoint is of step 0. Only tensors,
numbers, texts and tables are unpickled: a file with anything else is refused. A folder gets its
name when it is complete; an existing one is never overwritten. Each command has its own --help.
"""

import sys
from functools import partial
from pathlib import Path

# torch and transformers are loaded where they are used: --help and mistakes are answered at once.
from base.errors import Parser, UsageError, command_line
from base.storage import BYTES, refuse_existing
from models.config import in_words, preset
from models.hf_config import model_of
from parallel.checkpoint import folders

# A format of Megatron-LM's -> the form of its layers, as doors/names.py has it.
STORES = {"torch_dist": "stacked", "torch_dist-hybrid": "hybrid"}
FORMATS = ("hf", *STORES, "universal")


def _verify(folder: Path) -> str:
    """Returns, in words, what was found good in a checkpoint or a Hugging Face directory.

    Raises:
        UsageError: it is not what was written, or not the model of its config.json.
    """
    if folders.step_of(folder) is not None:
        folders.verify(folder)
        return "good"
    from models.hf_weights import open_hugging_face

    open_hugging_face(folder)
    return "names and shapes are good; Hugging Face's files have no checksums"


def _export(path: Path, out: Path, form: str, dtype: str | None, tokenizer: Path | None) -> str:
    """Writes the newest checkpoint at a path as the folder `out`; returns what was written.

    Raises:
        UsageError: it is damaged or of Hugging Face's own model; or `out` cannot be written.
    """
    refuse_existing(out)
    if form != "hf" and (dtype or tokenizer):
        flag = "--dtype" if dtype else "--tokenizer"
        raise UsageError(f"{flag} is of the format hf: {form} has fp32, and no tokenizer")
    folder = folders.candidates(path)[0]
    if folders.step_of(folder) is None:
        raise UsageError(f"{folder} holds Hugging Face's weights already")
    from parallel.checkpoint.doors import deepspeed, ours, torch_dist

    checkpoint = ours.read(folder)
    if form == "hf":
        from models.hf_weights import NO_TOKENIZER, write_hugging_face

        tokenizer_files, dtype = NO_TOKENIZER, dtype or "bf16"
        if tokenizer:
            from models.hf_model import tokenizer_at

            tokenizer_files = tokenizer_at(tokenizer)
        weights = partial(checkpoint.tensor, kind="param")
        n_bytes = write_hugging_face(out, checkpoint.config, weights, dtype, tokenizer_files)
        return f"{out}: {n_bytes} bytes of {folder}'s weights in {dtype}"
    parts = checkpoint.config.parts
    if form in STORES and parts:
        raise UsageError(f"a model with {in_words(parts)} is not written as {form}: {folder}")
    if form == "universal":
        deepspeed.write(out, checkpoint)
    else:
        torch_dist.write(out, checkpoint, STORES[form])
    return f"{out}: {folder}'s weights and moments as {form}"


def _import(path: Path, out: Path, model: str) -> str:
    """Writes another program's checkpoint as one of ours; returns what was written, in words.

    Raises:
        UsageError: it cannot be read, is of another model or may run code; `out` cannot be written.
    """
    refuse_existing(out)
    config = model_of(Path(model)) if Path(model).exists() else preset(model)
    from parallel.checkpoint import doors
    from parallel.checkpoint.doors import ours

    checkpoint = doors.read(path, config)
    ours.write(out, checkpoint)
    content = "weights and moments" if len(checkpoint.kinds) > 1 else "weights alone, as of step 0"
    return f"{out}: {checkpoint.config.n_params:,} parameters, {content}, {checkpoint.facts['run']}"


@command_line("parallel.checkpoint")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m parallel.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    verify = commands.add_parser("verify", help="read every byte and compare checksums")
    verify.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="what to read")
    exporting = commands.add_parser("export", help="write another's format")
    about = "default: hf, Hugging Face's weights"
    exporting.add_argument("--format", dest="form", choices=FORMATS, default="hf", help=about)
    about = "of Hugging Face's weights (default: bf16)"
    exporting.add_argument("--dtype", choices=tuple(BYTES), help=about)
    about = "a tokenizer's folder or tokenizer.json: its files go along with Hugging Face's weights"
    exporting.add_argument("--tokenizer", type=Path, metavar="PATH", help=about)
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
