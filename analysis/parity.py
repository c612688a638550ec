"""Did every split train the same model? Per-step losses and grad norms beside the baseline's.

    python -m analysis.parity PATH... [--baseline NAME] [--check] [--format text|markdown|csv|json]

A run is `equal` when at every step |loss - baseline loss| <= 2e-4, the grad norms differ by at
most 2e-3 of the baseline's, and its first loss is within 0.3 of ln(vocabulary), which is what an
untrained model must score. Only fp32 runs of the same model, data and schedule can be compared;
of the others it says what differs. Without --baseline each run is compared with the one that its
run.json names; where none names any, with the only complete run on the fewest GPUs. Exits 1 when a
run DIFFERS (with --check also when one is not verified), 2 when nothing could be read.
"""

if not __package__:
    import as_script

import sys

from analysis.common.table import show
from analysis.measured import loss_parity
from analysis.measured.run_flags import parser_of
from base.errors import command_line, warn


@command_line("analysis.parity")
def main(argv: list[str] | None = None) -> int:
    """Print the parity table; 0 when no run differs, 1 when one does, 2 for a user's mistake."""
    flags = {"paths": "run folder or study"}
    parser = parser_of("analysis.parity", __doc__, "baseline", "table", **flags)
    parser.add_argument("--check", action="store_true", help="exit 1 when one is not verified too")
    given = parser.parse_args(argv)
    runs, damaged = loss_parity.read_runs(given.paths)
    base = loss_parity.called(given.baseline, runs) if given.baseline else None
    fits = [] if base else loss_parity.possible_baselines(runs)
    if len(fits) == 1:
        (base,) = fits
        warn("analysis.parity", f"baseline: {base.name}, the only complete run on fewest GPUs")
    elif fits:
        places = ", ".join(str(run.path) for run in fits)
        said = f"no run names a baseline, and {len(fits)} complete runs are on fewest GPUs"
        warn("analysis.parity", f"{said}: {places}; say which with --baseline")
    for line in damaged:
        warn("analysis.parity", line)
    found = list(loss_parity.verify(runs, base and base.path).values())
    baselines = {run.facts.get("baseline") for run in runs} - {None}
    if base:
        baselines = {given.baseline or base.name}
    shown = loss_parity.table(found, ", ".join(sorted(baselines)))
    show([shown], given.format, given.columns)
    failed = (lambda p: not p.equal) if given.check else (lambda p: p.differs)
    return int(any(map(failed, found)))


if __name__ == "__main__":
    sys.exit(main())
