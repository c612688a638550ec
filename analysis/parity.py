"""Did every split train the same model? Losses and gradient norms beside the baseline's.

    python -m analysis.parity PATH... [--baseline NAME] [--check] [--format text|markdown|csv|json]
    python -m analysis.parity A.log B.log...     logs of any program, each beside the first

A run is `equal` when at every step |loss - baseline loss| <= 2e-4, the gradient norms differ by at
most 2e-3 of the baseline's, and its first loss is within 0.3 of an untrained model's:
ln(vocabulary) + hidden x 0.0002; a tied output layer may make it less where tokens repeat. A run
that began from a checkpoint is compared at its own steps. Only fp32 runs of the same model, data
and schedule can be compared; for other runs it says what differs. Without --baseline each run is
compared with the one that its run.json names. Exits 1 when a run DIFFERS (with --check also when
one is not verified or cannot be read), 2 when nothing could be read.

Two logs are compared at all steps that both print, with the same tolerances plus the rounding of
the printed digits. If they differ, a sentence says from which step, and how: by a constant factor
(a ratio that stays within 2 %), with the settings of the two runs that have this value; by a shift
of steps; as rounding does; or as other data or another model do.
"""

import sys

from analysis.runs.views import command

main = command("parity", __doc__)

if __name__ == "__main__":
    sys.exit(main())
