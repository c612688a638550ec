"""A Markdown file with the TFLOPs column of its tables computed again.

    python analysis/tables.py --recompute FILE.md [--in-place] [--seq-len 1024]

`--recompute` prints FILE with the TFLOPs column of its tables computed again from their GPUs,
size, global batch and seconds, by the Jean Zay tables' rule (8 FLOPs per parameter and token).
Everything else stays byte for byte as it was, and so does a row that cannot be computed.
`--in-place` writes it back instead. Exits 2 when FILE cannot be read or has no such table.
"""

if not __package__:
    import as_script

import sys
from pathlib import Path

from analysis.common.table import writing
from analysis.published.documents import recompute_tflops
from base.bounds import check_flags
from base.errors import Parser, UsageError, command_line
from base.files import check_ends
from base.storage import output


@command_line("analysis.tables")
def main(argv: list[str] | None = None) -> int:
    """Print a Markdown file with its TFLOPs recomputed."""
    parser = Parser(prog="python -m analysis.tables", description=__doc__)
    parser.add_argument(
        "--recompute", type=Path, metavar="FILE.md", required=True, help="the page with the tables"
    )
    parser.add_argument("--in-place", action="store_true", help="write FILE, print nothing")
    parser.add_argument(
        "--seq-len", type=int, default=1024, metavar="N", help="tokens per sequence (default: 1024)"
    )
    arguments = parser.parse_args(argv)
    check_flags(arguments, seq_len=(1, 2**24))
    path = check_ends(arguments.recompute)
    with writing(path):
        old = path.read_bytes()
    # latin-1 maps every byte to one character and back, so what is no UTF-8 survives too
    try:
        new = recompute_tflops(old.decode("latin-1"), arguments.seq_len).encode("latin-1")
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    if not arguments.in_place:
        sys.stdout.buffer.write(new)
        sys.stdout.buffer.flush()
    elif new != old:
        with output(path, mark="", force=True) as file:
            file.write_bytes(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
