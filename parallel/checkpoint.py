"""Check checkpoints, and take out what is in them. The command answers before torch is loaded.

    python -m parallel.checkpoint verify PATH...                  # what is damaged, if anything
    python -m parallel.checkpoint export PATH OUT [--dtype fp32]  # weights only, for models.hf
    python -m parallel.checkpoint export PATH OUT --format dcp    # for other programs of PyTorch

PATH is a checkpoint, a folder of them or a run's folder, of which the newest is exported, once all
its bytes are as they were written. `--format dcp` writes a folder of torch.distributed.checkpoint:
fp32 weights and AdamW's two moments, whole, under the reference names (parallel/dcp.py). Nothing of
that format is read here, for its readers unpickle.
"""

import argparse
import sys
from pathlib import Path

# torch is loaded where it is used: --help, verify and mistakes are answered at once.
from models.errors import Parser, UsageError, command_line
from parallel import saved


def _verify(folder: Path) -> None:
    """Raises: UsageError: a checkpoint, or a weights-only folder, is not what was written."""
    if saved.step_of(folder) is not None:
        saved.verify(folder)
        return
    from models.weights import read_weights

    read_weights(folder)


def _export(arguments: argparse.Namespace) -> str:
    """Export a checkpoint and say what was written."""
    if arguments.out.exists() and not (arguments.out.is_dir() and not any(arguments.out.iterdir())):
        raise UsageError(f"{arguments.out} exists already: name a new folder")
    folder = saved.candidates(arguments.path)[0]
    if saved.step_of(folder) is None:
        raise UsageError(
            f"{folder} holds weights alone already; python -m models.hf export reads it"
        )
    saved.verify(folder)
    if arguments.format == "dcp":
        if arguments.dtype not in (None, "fp32"):
            raise UsageError(f"--format dcp is the state in fp32, not {arguments.dtype}")
        from parallel.dcp import export_dcp

        size = export_dcp(folder, arguments.out)
        return f"{arguments.out}: {size} bytes of {folder}'s weights and moments in fp32"
    from parallel.checkpointer import export

    dtype = arguments.dtype or "bf16"
    size = export(folder, arguments.out, dtype)
    return f"{arguments.out}: {size} bytes of {folder}'s weights in {dtype}"


@command_line("parallel.checkpoint")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        prog="python -m parallel.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    verify = commands.add_parser("verify", help="read every byte and compare checksums")
    verify.add_argument("paths", type=Path, nargs="+", metavar="PATH")
    exporting = commands.add_parser("export", help="write the weights alone, whole, or all to DCP")
    exporting.add_argument("path", type=Path, metavar="PATH")
    exporting.add_argument("out", type=Path, metavar="OUT")
    exporting.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="of weights: bf16")
    exporting.add_argument("--format", default="weights", choices=("weights", "dcp"))
    arguments = parser.parse_args(argv)
    if arguments.command == "export":
        print(_export(arguments))
        return 0
    bad = 0
    for path in arguments.paths:
        found = saved.candidates(path)
        if saved.step_of(path) is not None:
            found = found[:1]
        elif saved.step_of(found[0]) is not None:  # a folder of them: its exports, too
            found += sorted(found[0].parent.glob("weights-*"))
        for folder in found:
            try:
                _verify(folder)
                print(f"{folder}: good")
            except UsageError as damaged:
                bad += 1
                print(damaged)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
