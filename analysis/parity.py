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

from analysis.runs.views import command

main = command("parity", __doc__)

if __name__ == "__main__":
    sys.exit(main())
