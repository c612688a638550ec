"""Studies in, sbatch scripts out. Of Python alone: a login node may have no package.

Read in this order: render.py (what a study asks for, and the script of a run) with job.sh (what the
script does), squeue.py (what Slurm says of jobs), states.py (what became of each run), nodes.py
(which nodes are left out), watch.py (submitting). status.py, submit.py and cancel.py are commands.
"""
