"""One row for each training run: seconds, tokens/s, TFLOP/s, MFU, memory, speedup, efficiency.

    python analysis/tflops.py PATH... [--convention NAME] [--baseline NAME] [--scaling strong|weak]
        [--columns A,B,C]

Seconds per iteration are the median after the warm-up, which the data show (--window names the
iterations instead). TFLOP/s per GPU are computed by the named FLOPs convention; a log's own TFLOP/s
have another column. Peak GiB is the fullest rank's: allocated on CUDA, resident on a CPU. A speedup
is printed only if both runs completed, did the same work at the same commit (or with --any-commit),
and shared no cores with other runs. Repeats count by their median. Scaling is weak if the runs
share only the batch per GPU. An efficiency is printed only if every rank had cores of its own. A
value above 1 is marked `?`. MFU is printed only for a GPU whose peak is known. A run that failed
keeps its row and its reason. On a terminal the table fits its width; a pipe or a file gets the full
table.

`--format json` prints an array of objects, one for each run; unknown is null. source, format,
verdict and reasons; engine; steps and step_s_mean, _median, _min and _max over all logged steps;
steady_step_s, steady_n and steady_ci95; tokens_per_s, samples_per_s and printed_tflops; gpus, tp,
pp, vpp, dp, micro_batch, global_batch, seq_len, model, params. This table adds run, origin (of each
value that the log does not state), peak_gib, convention, tflops, mfu, speedup, efficiency,
speedup_ci95, parity, missing (which fact each unknown value lacks), precision and gpu_type, and
with --predict predicted_s and predicted_error. A run with experts has ep, etp, routing (natural, or
forced to balance), dropped (share of the tokens' choices), expert_load (the tokens of the busiest
expert over the mean, in the worst layer) and dispatcher. A log that times them has compute_s and
communication_s of the slowest rank. A log that prints an MFU has printed_mfu, mfu_peak (the TFLOP/s
that it is over) and restated_mfu (over the card's dense bf16 peak). Exits 2 when nothing could be
read.
"""

import sys
from pathlib import Path

if not __package__:  # `python analysis/tflops.py`: no file of analysis/ hides a module of Python's
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from analysis.runs.views import command

main = command("tflops", __doc__)

if __name__ == "__main__":
    sys.exit(main())
