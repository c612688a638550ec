"""Hugging Face directories in and out, and text from a trained run.

    python -m models.hf import HF_DIR FOLDER [--dtype D] [--vocab-size N]
    python -m models.hf export RUN|FOLDER [HF_DIR] [--dtype D] [--tokenizer PATH]
    python -m models.hf generate RUN|FOLDER --prompt TEXT [--tokens N] [--temperature T] [--seed S]

`import` turns a directory of a GPT-2, Llama, Qwen3 or Mistral (config.json and model.safetensors,
in one file or with an index) into a weights-only folder, from which training starts on any engine
and layout. `export` turns the newest weights of a run, or a weights-only folder, into a directory
that transformers loads (from_pretrained). In fp32 the logits agree to 1e-4. `generate` continues a
prompt, on the GPU where torch sees one.

    python -m models.hf export logs/parity/ddp out/ddp
    python -m models.hf generate logs/parity/ddp --prompt "def main("
    python -m models.hf import ~/gpt2 data/gpt2-weights

RUN          a run folder or its folder of checkpoints: the newest checkpoint, or weights-only
             export, is taken. A checkpoint is checked first, all its bytes.
FOLDER       a weights-only folder, or one checkpoint. `generate` takes an HF_DIR too.
vocabulary   rows beyond config.json's vocab_size are cut on import; where config.json counts the
             padding too (50304 for 50257 ids), --vocab-size 50257 cuts it.
tokenizer    without --tokenizer: the files beside the weights, or what the meta.json of the run's
             data names. They go along as they are. `byte` is parallel.data's, one id per byte.
refused      in one line with the numbers: what our GPT does not have, tensors that do not fit
             config.json, and pickles (pytorch_model.bin), which can run code when they are read:
             where you trust one, save it again with transformers' save_pretrained().
ignored      dropout: our GPT trains without.

A folder is written aside and renamed when it is complete; one that exists is never overwritten.
"""

import sys
from pathlib import Path

# torch and transformers are loaded where they are used: --help and mistakes are answered at once.
from base.bounds import check_flags
from base.errors import Parser, UsageError, command_line, printable
from base.storage import BYTES, refuse_existing
from models.run_weights import (
    as_weights,
    find_weights,
    is_weights,
    step_in_name,
    tokenizer_files,
    tokenizer_of,
)


def _about_tokenizer(path: Path | None) -> tuple[list[Path], int | None, int | None]:
    """(its files, how many ids it has, its end-of-text id) of the tokenizer at a path, if any."""
    files = tokenizer_files(path) if path else []
    if not files:
        return [], None, None
    from models.hf_model import end_of_text, load_tokenizer

    tokenizer = load_tokenizer(path)
    return files, max(tokenizer.get_vocab().values()) + 1, end_of_text(tokenizer)


def _tokenizer(asked: str | None, source: Path, weights: Path) -> str | None:
    """`byte` or a path: the tokenizer that was asked for, the one beside the weights, or that of
    the run's data; None where there is none.

    Raises:
        UsageError: the one that was asked for is not there.
    """
    if asked is not None:
        if asked != "byte" and not tokenizer_files(Path(asked)):
            raise UsageError(f"no tokenizer at {asked}")
        return asked
    return str(weights) if tokenizer_files(weights) else tokenizer_of(source)


def import_weights(source: Path, out: Path, dtype: str | None, vocab_size: int | None) -> str:
    """Import a Hugging Face directory; the lines to print."""
    from models.hf_files import import_hugging_face

    files, ids, _ = _about_tokenizer(source)
    weights, remarks = import_hugging_face(source, out, dtype, vocab_size, files, ids)
    config = weights.config
    sizes = f"{config.n_layer} layers, hidden {config.hidden}, {config.n_head} heads"
    line = f"{out}: {config.n_params:,} parameters in {weights.dtype}, {sizes}"
    return "\n".join([f"{line}, {config.vocab_size} ids", *remarks])


def export_weights(source: Path, out: Path | None, dtype: str | None, tokenizer: str | None) -> str:
    """Export the newest weights at `source`; the line to print."""
    from models.hf_config import architecture
    from models.hf_files import export_hugging_face
    from models.weights import read_weights

    found = find_weights(source)
    if out is not None:
        refuse_existing(out)
        out.parent.mkdir(parents=True, exist_ok=True)
    chosen = _tokenizer(tokenizer, source, found)
    files, ids, end = _about_tokenizer(None if chosen in (None, "byte") else Path(chosen))
    with as_weights(found, dtype, (out or found).parent) as weights:
        if out is None:
            name = architecture(read_weights(weights, verify=False).config).model_type
            step = step_in_name(found)
            out = found.parent / (name if step is None else f"{name}-{step:08d}")
        config = export_hugging_face(weights, out, dtype, files, ids, end)
    return f"{out}: {config.n_params:,} parameters from {found}"


def generate_text(
    source: Path, prompt: str, tokens: int, temperature: float, seed: int, tokenizer: str | None
) -> str:
    """The prompt and what the model at `source` continues it with."""
    is_theirs = (source / "config.json").is_file() and not is_weights(source)
    found = source if is_theirs else find_weights(source)
    chosen = _tokenizer(tokenizer, source, found)
    if chosen is None:
        raise UsageError(f"{source}: no tokenizer is known; give --tokenizer byte or a path")
    from models import generate, hf_files
    from models.weights import read_weights

    coder = generate.load_tokenizer(chosen)
    if is_theirs:
        stored, _ = hf_files.open_hugging_face(source)
        model = generate.load_gpt(stored.config, stored.tensor)
    else:
        with as_weights(found, None) as folder:
            weights = read_weights(folder)
            model = generate.load_gpt(weights.config, weights.tensor)
    ids = generate.sample(model, coder.encode(prompt), tokens, temperature, seed, coder.end)
    return "\n".join(map(printable, (prompt + coder.decode(ids)).splitlines()))


def _parser() -> Parser:
    parser = Parser(prog="python -m models.hf", description=__doc__)
    names = "import|export|generate"
    commands = parser.add_subparsers(dest="command", required=True, metavar=names)
    importing = commands.add_parser("import", help="a Hugging Face directory to a weights folder")
    importing.add_argument("source", type=Path, metavar="HF_DIR", help="what to read")
    importing.add_argument("out", type=Path, metavar="FOLDER", help="what to write")
    importing.add_argument("--vocab-size", type=int, metavar="N", help="embedding rows to keep")
    importing.set_defaults(run=import_weights)
    exporting = commands.add_parser("export", help="a run or weights folder to Hugging Face's form")
    exporting.add_argument("source", type=Path, metavar="RUN|FOLDER", help="what to read")
    what = "what to write (default: MODEL_TYPE-STEP beside the weights)"
    exporting.add_argument("out", type=Path, nargs="?", metavar="HF_DIR", help=what)
    exporting.set_defaults(run=export_weights)
    for command in (importing, exporting):
        command.add_argument("--dtype", choices=tuple(BYTES), help="default: what is stored")
    generating = commands.add_parser("generate", help="text from a run, continuing a prompt")
    generating.add_argument("source", type=Path, metavar="RUN|FOLDER", help="what to read")
    generating.add_argument("--prompt", required=True, metavar="TEXT", help="text to continue")
    for flag, metavar, default, what in (
        ("--tokens", "N", 200, "most tokens to add"),
        ("--temperature", "T", 0.8, "divides the logits; 0 takes the most likely token"),
        ("--seed", "S", 0, "of the draws"),
    ):
        kind, text = type(default), f"{what} (default: {default})"
        generating.add_argument(flag, type=kind, default=default, metavar=metavar, help=text)
    generating.set_defaults(run=generate_text)
    for command, use in ((exporting, "to send along"), (generating, "of the prompt")):
        text = f"tokenizer {use} (default: beside the weights, or of the run's data)"
        command.add_argument("--tokenizer", metavar="PATH", help=text)
    return parser


@command_line("models.hf")
def main(argv: list[str] | None = None) -> int:
    """Import, export or generate, and say what came out."""
    arguments = _parser().parse_args(argv)
    if arguments.command == "generate":
        check_flags(arguments, tokens=(1, 10**6), temperature=(0, 100), seed=(0, 2**63 - 1))
    given = {k: v for k, v in vars(arguments).items() if k not in ("command", "run")}
    print(arguments.run(**given))
    return 0


if __name__ == "__main__":
    sys.exit(main())
