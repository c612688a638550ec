"""Last lines of logs of jobs with two nodes and two ranks on each.

srun, slurmd and torchrun 2.13 printed them.
"""

CLOSING = "W1122 01:47:43.9 683 torch/x/api.py:1028] Sending process 793 closing signal SIGTERM\n"
CHILD_FAILED = (
    "E1122 01:48:31.5 2425 torch/x/api.py:1002] failed (exitcode: {exit}) local_rank: 1 (pid: 2676)"
    " of binary: /v/bin/python\nTraceback (most recent call last):\n"
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \nFailures:\n[1]:\n"
    "  rank      : 2 (local_rank: 0)\n  exitcode  : -15 (pid: 2674)  (SIGTERM)\n"
    "  traceback : Signal 15 (SIGTERM) received by PID 2674\n"
    "Root Cause (first observed failure):\n[0]:\n  time      : 2026-11-22_01:48:31\n"
    "  host      : localhost\n  rank      : 3 (local_rank: 1)\n"
    "  exitcode  : {exit} (pid: 2676){word}\n  error_file: <N/A>\n"
)
BAD_EXIT = (
    "srun: error: node2: task 1: Exited with exit code 1\n"
    "srun: launch/slurm: _step_signal: Terminating StepId=7.0\n"
    "slurmstepd-node1: error: *** STEP 7.0 ON node1 CANCELLED AT 2026-11-22T01:48:35 ***\n"
    "srun: error: node1: task 0: Exited with exit code 143\n"
)
PEER = (
    "Traceback (most recent call last):\nRuntimeError: [/p/gloo/transport/tcp/pair.cc:537] Read"
    " error [127.0.0.1]:1: Connection reset by peer.\n"
)
KILLED = CHILD_FAILED.format(exit=-9, word="  (SIGKILL)") + (
    "  traceback : Signal 9 (SIGKILL) received by PID 2676\n"
)
FAILED_RANK = CHILD_FAILED.format(exit=1, word="")
RAISED = "Traceback (most recent call last):\nValueError: the data are gone\n"
TOLD_TO_STOP = (
    "torch/x/api.py:753] Received 15 death signal, shutting down workers\n"
    "srun: Job step aborted: Waiting up to 7 seconds for job step to finish.\n"
    "slurmstepd-node1: error: *** JOB 7 ON node1 CANCELLED AT 2026-11-22T01:48:31 ***\n"
    "slurmstepd-node1: error: *** STEP 7.0 ON node1 CANCELLED AT 2026-11-22T01:48:31 ***\n"
)
