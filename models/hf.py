"""GPT-2 directories of Hugging Face in and out: the command.

    python -m models.hf import GPT2_DIR FOLDER [--dtype D] [--vocab-size N]
    python -m models.hf export RUN|FOLDER GPT2_DIR [--dtype D] [--tokenizer PATH]

`import` turns a GPT-2 directory (config.json and model.safetensors, in one file or with an index)
into a weights-only folder, from which training starts on any engine and layout. `export` turns
the newest weights-only export of a run, or such a folder, into a directory that
`GPT2LMHeadModel.from_pretrained` loads and generates text with. In fp32 the logits agree to 1e-4;
in bf16 they are what 8 bits of mantissa leave.

    python -m models.hf import ~/gpt2 data/gpt2-weights
    python -m models.hf export logs/parity/ddp out/ddp --tokenizer ~/gpt2

dtype        fp32, bf16 or fp16; without it, what is stored.
vocabulary   our weights hold one row for every id and none for padding. Rows beyond config.json's
             vocab_size are cut on import; where config.json counts the padding too (50304 for
             50257 ids), --vocab-size 50257 cuts it. Keeping more rows than there are, or fewer
             than the tokenizer beside has ids, is refused. An export is never padded.
tokenizer    the files of one beside the weights go along as they are; --tokenizer names another (a
             folder or a tokenizer.json), whose end-of-text id goes into config.json.
refused      in one line with the numbers: another architecture (rotary positions, RMSNorm, ...),
             activation, LayerNorm epsilon or attention scale, an output layer that is not tied,
             tensors that do not fit config.json; and pickles (pytorch_model.bin), which can run
             code when they are read: where you trust one, load it with transformers and save it
             again with save_pretrained().
ignored      dropout: our GPT trains without.

A folder is written aside and renamed when it is whole; one that exists is never overwritten.
Exits 2 when it refuses.
"""

import argparse
import sys
from pathlib import Path

# torch and transformers are loaded where they are used: --help and mistakes are answered at once.
from models.errors import Parser, UsageError, command_line
from models.storage import BYTES


def _tokenizer(path: Path) -> tuple[list[Path], int | None, int | None]:
    """(its files, how many ids it has, its end-of-text id) of the tokenizer at a path, if any."""
    from models.hf_files import tokenizer_files

    files = tokenizer_files(path)
    if not files:
        return [], None, None
    from models.hf_model import load_tokenizer

    tokenizer = load_tokenizer(path)
    vocabulary = tokenizer.get_vocab()
    end = tokenizer.eos_token_id
    if end is None:
        end = vocabulary.get("<|endoftext|>")
    return files, max(vocabulary.values()) + 1, end


def _import(arguments: argparse.Namespace) -> str:
    from models.hf_files import import_gpt2

    files, ids, _ = _tokenizer(arguments.source)
    weights, remarks = import_gpt2(
        arguments.source, arguments.out, arguments.dtype, arguments.vocab_size, files, ids
    )
    config = weights.config
    sizes = f"{config.n_layer} layers, hidden {config.hidden}, {config.n_head} heads"
    said = f"{arguments.out}: {config.n_params:,} parameters in {weights.dtype}, {sizes}"
    return "\n".join([f"{said}, {config.vocab_size} ids", *remarks])


def _export(arguments: argparse.Namespace) -> str:
    from models.hf_files import export_gpt2, find_weights, tokenizer_files

    if arguments.tokenizer and not tokenizer_files(arguments.tokenizer):
        raise UsageError(f"no tokenizer at {arguments.tokenizer}")
    source = find_weights(arguments.source)
    files, ids, end = _tokenizer(arguments.tokenizer or source)
    config = export_gpt2(source, arguments.out, arguments.dtype, files, ids, end)
    return f"{arguments.out}: {config.n_params:,} parameters from {source}"


@command_line("models.hf")
def main(argv: list[str] | None = None) -> int:
    """Import or export, and say what was written."""
    parser = Parser(
        prog="python -m models.hf",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="import|export")
    importing = commands.add_parser("import", help="a GPT-2 directory to a weights-only folder")
    importing.add_argument("source", type=Path, metavar="GPT2_DIR")
    importing.add_argument("out", type=Path, metavar="FOLDER")
    importing.add_argument("--vocab-size", type=int, metavar="N", help="embedding rows to keep")
    importing.set_defaults(run=_import)
    exporting = commands.add_parser("export", help="a run or weights folder to a GPT-2 directory")
    exporting.add_argument("source", type=Path, metavar="RUN|FOLDER")
    exporting.add_argument("out", type=Path, metavar="GPT2_DIR")
    exporting.add_argument("--tokenizer", type=Path, metavar="PATH", help="one to send along")
    exporting.set_defaults(run=_export)
    for command in (importing, exporting):
        command.add_argument("--dtype", choices=tuple(BYTES), help="default: what is stored")
    arguments = parser.parse_args(argv)
    print(arguments.run(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
