"""Weights of ours for Hugging Face: a folder that transformers loads (from_pretrained).

    python -m parallel.checkpoint export logs/parity/ddp out/weights   # of a run
    python -m models.hf export out/weights out/ddp [--dtype D]

FOLDER is a weights-only folder. The model becomes a GPT-2, Llama, Qwen3, Mixtral or Qwen3-MoE of
transformers. In fp32 the logits agree to 1e-4. The other way needs no command: `parallel.train
--load HF_DIR` starts from a directory of these, or of a Mistral, on any engine and layout.

tokenizer    its files beside the weights go along as they are.
refused      in one line with the numbers: a model that none of these classes has, and pickles
             (pytorch_model.bin), which can run code when they are read: where you trust one, save
             it again with transformers' save_pretrained().

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
    """Export, and say what came out."""
    parser = Parser(prog="python -m models.hf", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="export")
    exporting = commands.add_parser("export", help="a weights folder to Hugging Face's form")
    exporting.add_argument("source", type=Path, metavar="FOLDER", help="what to read")
    exporting.add_argument("out", type=Path, metavar="HF_DIR", help="what to write")
    exporting.add_argument("--dtype", choices=tuple(BYTES), help="default: what is stored")
    print(export_weights(**vars(parser.parse_args(argv))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
