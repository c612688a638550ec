"""One row for each training run: seconds, tokens/s, TFLOP/s, MFU, memory, speedup, efficiency.

    python analysis/tflops.py PATH... [--convention NAME] [--baseline NAME] [--scaling strong|weak]
        [--columns A,B,C]

Seconds per iteration are the median after the warm-up that is found in the data (--window states
it instead). TFLOP/s per GPU are computed under the named FLOPs convention; what a log printed
itself is in a column of its own. Peak GiB is that of the fullest rank: allocated on CUDA, resident
on a CPU. A speedup is printed only where both runs completed, have the same fixed work and (unless
--any-commit) commit, and shared no cores with other runs; of a study's repeats it is that of their
medians; it is weak where the runs share the batch per GPU alone; an efficiency only where every
rank had cores of its own; above 1 both are marked `?`. MFU is printed only for a GPU whose peak is
known. A run that failed keeps its row and its reason. On a terminal the table fits its width; a
pipe or a file gets it in full.

`--format json` prints an array of objects, one per run; unknown is null. source, format, verdict
and reasons; engine; steps and step_s_mean, _median, _min and _max over all logged steps;
steady_step_s, steady_n and steady_ci95; tokens_per_s, samples_per_s and printed_tflops; gpus, tp,
pp, vpp, dp, micro_batch, global_batch, seq_len, model, params. Then what this table adds: run,
origin (of what the log does not say itself), peak_gib, convention, tflops, mfu, speedup,
efficiency, speedup_ci95, parity, missing (which fact each unknown value lacks), precision and
gpu_type, and with --predict predicted_s and predicted_error; where a run has experts ep, etp,
routing (natural, or forced to balance), dropped (share of the tokens' choices), expert_load (an
expert's most tokens over the mean in its worst layer) and dispatcher; where a log times them,
compute_s and communication_s of the slowest rank; where it prints an MFU printed_mfu, mfu_peak (the
TFLOP/s that it is over) and restated_mfu (over the card's dense bf16 peak). Exits 2 when nothing
could be read.
"""

import sys
from pathlib import Path

if not __package__:  # `python analysis/tflops.py`: no file of analysis/ hides a module of Python's
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from analysis.runs.views import command

main = command("tflops", __doc__)

if __name__ == "__main__":
    sys.exit(main())
