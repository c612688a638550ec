"""Studies in, sbatch scripts out. Of Python alone: a login node may have no package.

Read in this order: render.py (what a study asks for, and the script of a run) with job.sh (what the
script does), squeue.py (what Slurm says of jobs), states.py (what became of each run), nodes.py
(which nodes are left out), submit_checks.py (what would end a run at its start), sbatch.py (one run
submitted), watch.py (rounds over studies). status.py, submit.py and cancel.py are commands.
"""
