"""Hugging Face directories in and out.

    python -m models.hf import HF_DIR FOLDER [--dtype D]
    python -m models.hf export FOLDER HF_DIR [--dtype D]

`import` turns a directory of a GPT-2, Llama, Qwen3 or Mistral (config.json and model.safetensors,
in one file or with an index) into a weights-only folder, from which training starts on any engine
and layout. `parallel.train --load HF_DIR` starts from the directory itself. `export` turns a
weights-only folder into a directory that transformers loads (from_pretrained). In fp32 the logits
agree to 1e-4.

    python -m parallel.checkpoint export logs/parity/ddp out/weights   # of a run
    python -m models.hf export out/weights out/ddp
    python -m models.hf import ~/gpt2 data/gpt2-weights

vocabulary   rows beyond config.json's vocab_size are cut on import.
tokenizer    its files beside the weights go along as they are.
refused      in one line with the numbers: what our GPT does not have, tensors that do not fit
             config.json, and pickles (pytorch_model.bin), which can run code when they are read:
             where you trust one, save it again with transformers' save_pretrained().
ignored      dropout: our GPT trains without.

A folder is written aside and renamed when it is complete; one that exists is never overwritten.
"""

import sys
from pathlib import Path
from typing import Any

# torch and transformers are loaded where they are used: --help and mistakes are answered at once.
from base.errors import Parser, UsageError, command_line
from base.storage import BYTES


def _tokenizer_at(path: Path) -> Any:
    """The hf_weights.Tokenizer in a folder, with no file where there is none."""
    from models.hf_weights import NO_TOKENIZER, Tokenizer, tokenizer_files

    if not (files := tokenizer_files(path)):
        return NO_TOKENIZER
    from models.hf_model import end_of_text, load_tokenizer

    tokenizer = load_tokenizer(path)
    return Tokenizer(files, max(tokenizer.get_vocab().values()) + 1, end_of_text(tokenizer))


def import_weights(source: Path, out: Path, dtype: str | None) -> str:
    """Import a Hugging Face directory; the line to print."""
    from models.hf_weights import import_hugging_face

    weights = import_hugging_face(source, out, dtype, _tokenizer_at(source))
    return f"{out}: {weights.config.n_params:,} parameters in {weights.dtype}"


def export_weights(source: Path, out: Path, dtype: str | None) -> str:
    """Export a weights-only folder; the line to print.

    Raises:
        UsageError: it is none.
    """
    if source.is_dir() and not (source / "config.json").exists():
        raise UsageError(
            f"{source} is no weights-only folder; of a run or a checkpoint, this makes one: python"
            f" -m parallel.checkpoint export {source} FOLDER"
        )
    from models.hf_weights import export_hugging_face

    config = export_hugging_face(source, out, dtype, _tokenizer_at(source))
    return f"{out}: {config.n_params:,} parameters from {source}"


@command_line("models.hf")
def main(argv: list[str] | None = None) -> int:
    """Import or export, and say what came out."""
    parser = Parser(prog="python -m models.hf", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="import|export")
    importing = commands.add_parser("import", help="a Hugging Face directory to a weights folder")
    importing.add_argument("source", type=Path, metavar="HF_DIR", help="what to read")
    importing.add_argument("out", type=Path, metavar="FOLDER", help="what to write")
    importing.set_defaults(run=import_weights)
    exporting = commands.add_parser("export", help="a weights folder to Hugging Face's form")
    exporting.add_argument("source", type=Path, metavar="FOLDER", help="what to read")
    exporting.add_argument("out", type=Path, metavar="HF_DIR", help="what to write")
    exporting.set_defaults(run=export_weights)
    for command in (importing, exporting):
        command.add_argument("--dtype", choices=tuple(BYTES), help="default: what is stored")
    arguments = vars(parser.parse_args(argv))
    del arguments["command"]
    print(arguments.pop("run")(**arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
