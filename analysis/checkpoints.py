"""What saving and loading cost: seconds, bytes, GB/s, and the share of time that saving took.

    python -m analysis.checkpoints PATH... [--bytes-per-param B] [--format markdown]

PATH is a run folder (its checkpoints.csv is read), a study, or a log of Megatron-LM,
Megatron-DeepSpeed, DeepSpeed, GPT-NeoX, torchtitan or fairseq. One row for each run and kind of
event: how many, the median seconds that training waited (blocked) and until it was on disk
(total), the median bytes, and bytes over total seconds, in all and for each rank. The share is the
waiting over the waiting and the logged steps together. Those that failed (a full disk, a damaged
file) are counted apart; only their waiting counts with the others'.

No log says its bytes: `--bytes-per-param 14` states them for checkpoints of 2 bytes of weights and
12 of fp32 state, where the number of parameters is known. What is not known prints `-`.
A published table (a CSV with a column save_ms, as logs/published/seed003_checkpoint_save.csv) is
printed with what its rows give. Exits 2 when nothing could be read.
"""

if not __package__:
    import as_script

import sys

from analysis.common.table import show
from analysis.measured import checkpoint_costs
from analysis.measured.run_flags import load_given, parser_of
from base.bounds import Bounds, check_flags
from base.errors import command_line, warn


@command_line("analysis.checkpoints")
def main(argv: list[str] | None = None) -> int:
    """Print the table of what is at the paths."""
    flags = {"paths": "run, log, folder, CSV"}
    parser = parser_of("analysis.checkpoints", __doc__, "facts", "table", **flags)
    parser.add_argument(
        "--bytes-per-param",
        type=float,
        metavar="B",
        help="a checkpoint's bytes per parameter, where a log tells only its seconds",
    )
    given = parser.parse_args(argv)
    check_flags(given, bytes_per_param=Bounds(0, 1000, above=True))
    published = [path for path in given.paths if path.suffix == ".csv"]
    others = [path for path in given.paths if path not in published]
    tables = []
    if published:
        from analysis.published.recomputed import checkpoints as recomputed

        tables += [recomputed(path) for path in published]
    if others:
        records = load_given("analysis.checkpoints", given, others)
        shown, silent, damaged = checkpoint_costs.table(records, given.bytes_per_param)
        for line in damaged:
            warn("analysis.checkpoints", line)
        if silent:
            warn("analysis.checkpoints", f"no checkpoint in {', '.join(silent)}")
        tables.append(shown)
    show(tables, given.format, given.columns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
