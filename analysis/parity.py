"""Did every split train the same model? Per-step losses and grad norms beside the baseline's.

    python -m analysis.parity PATH... [--baseline NAME] [--check] [--format text|markdown|csv|json]

A run is `equal` when at every step |loss - baseline loss| <= 2e-4, the grad norms differ by at
most 2e-3 of the baseline's, and its first loss is within 0.3 of an untrained model's:
ln(vocabulary) + hidden x 0.0002; a tied output layer may make it less where tokens repeat. A run
that began from a checkpoint is compared at its own steps. Only fp32 runs of the same model, data
and schedule can be compared; of the others it says what differs. Without --baseline each run is
compared with the one that its run.json names. Exits 1 when a run DIFFERS (with --check also when
one is not verified or cannot be read), 2 when nothing could be read.
"""

import sys

from analysis.common.table import show
from analysis.runs import loss_parity
from analysis.runs.baseline import baseline_of
from analysis.runs.run_options import parser_of
from base.errors import command_line, warn


@command_line("analysis.parity")
def main(argv: list[str] | None = None) -> int:
    """Print the parity table; 0 when no run differs, 1 when one does, 2 for a user's mistake."""
    names = ("baseline", "table")
    parser = parser_of("analysis.parity", __doc__, *names, paths="run folder or study")
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit 1 also when one is not verified or cannot be read",
    )
    flags = parser.parse_args(argv)
    records, damaged = loss_parity.read_runs(flags.paths)
    warn("analysis.parity", *damaged)
    baseline = baseline_of(flags.baseline, records) if flags.baseline else None
    parities = list(loss_parity.verify(records, baseline).values())
    own = sorted({record.baseline for record in records} - {None})
    shown = loss_parity.table(parities, flags.baseline or ", ".join(own))
    show([shown], flags.format, flags.columns)
    kinds = {parity.verdict.kind for parity in parities}
    if flags.check:
        return int(bool(damaged or kinds - {loss_parity.EQUAL}))
    return int(loss_parity.DIFFERS in kinds)


if __name__ == "__main__":
    sys.exit(main())
