"""Rank and rendezvous under each launcher, from the environment it sets."""

import json
import subprocess
import sys

import pytest

from base.errors import UsageError
from parallel import train
from parallel.record import launch
from parallel.record.launch import Launch, detect, hostnames, rendezvous_environment
from tests.conftest import ROOT, TRAIN, run_module

SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "123",
    "SLURM_STEP_ID": "0",
    "MASTER_ADDR": "node1",
}


def test_each_launcher_is_understood():
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    torchrun |= {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    assert detect(torchrun) == Launch(3, 8, 1, 2, "torchrun")
    deepspeed = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_SIZE": "4"}
    assert detect(deepspeed) == Launch(3, 8, 3, 4, "environment")
    assert detect(SRUN) == Launch(5, 8, 1, 4, "srun")
    assert detect(SRUN | torchrun) == detect(torchrun)  # torchrun inside a job
    in_script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
    assert detect(in_script | {"SLURM_JOB_ID": "1"}) == Launch(0, 1, 0, 1, "none")
    assert detect({}) == Launch(0, 1, 0, 1, "none")


def test_half_an_environment_is_refused():
    with pytest.raises(UsageError, match="WORLD_SIZE is not set"):
        detect({"RANK": "0"})
    with pytest.raises(UsageError, match="cannot read the launcher's environment"):
        detect({"RANK": "zero", "WORLD_SIZE": "2"})


def test_no_two_steps_of_jobs_on_a_node_meet():
    ports = {
        int(rendezvous_environment(detect(env), env)["MASTER_PORT"])
        for job in range(100, 150)
        for step in range(50)
        if (env := SRUN | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
    }
    assert len(ports) == 50 * 50
    assert max(ports) < 32768  # from there on Linux gives ports to connections


def test_a_rank_ends_with_its_launcher():
    """SIGKILL of the launcher; the rank hears SIGTERM and knows why."""
    rank = (
        "import signal, sys, time\n"
        "from parallel.record import launch\n"
        "def heard(*_):\n"
        "    print(launch.signal_words('SIGTERM'), flush=True)\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, heard)\n"
        "launch.end_with_launcher(launch.Launch(0, 2, 0, 2, sys.argv[1]))\n"
        "print('ready', flush=True)\n"
        "time.sleep(1.5 if sys.argv[1] == 'none' else 30)\n"
        "print('lives on', flush=True)\n"
    )
    launcher = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"

    def ends_how(started_by: str) -> list[str]:
        command = [sys.executable, "-c", launcher, "-c", rank, started_by]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "ready\n"
            process.kill()
            return [f"process {process.pid}", process.stdout.read()]

    for launcher_name in ("torchrun", "fork"):
        pid, said = ends_how(launcher_name)
        assert said == f"SIGTERM: the launcher ({pid}) is gone\n"
    assert ends_how("none")[1] == "lives on\n"  # a shell may end before what it has started


WATCHED = """
import os, signal, sys
from parallel.record import first_end
counts = [1, int(sys.argv[3])]
first_end._oom_kills = lambda: counts.pop(0)
reader, writer = os.pipe()
if (other := os.fork()) == 0:
    os.read(reader, 1)
    os.kill(os.getpid(), int(sys.argv[1]))
    os._exit(int(sys.argv[2]))
if (rank := os.fork()) == 0:
    me = first_end.process_number()
    watch = first_end.Siblings([me, me - os.getpid() + other], 0)
    os.write(writer, b"!")
    end = watch.first_end(float(sys.argv[4]))
    print(*(end or ["nothing"]), sep=": ", flush=True)
    os._exit(0)
os.waitpid(rank, 0)
"""


@pytest.mark.parametrize(
    ("number", "status", "oom_kills", "end"),
    [
        (9, 0, 1, "killed: rank 1 was killed: SIGKILL"),
        (9, 0, 2, "memory: rank 1 was killed: SIGKILL, and the kernel killed for lack of memory"),
        (11, 0, 2, "killed: rank 1 was killed: SIGSEGV"),
        (0, 3, 1, "unknown: rank 1 ended with exit status 3 and gave no reason"),
        (15, 0, 1, "nothing"),
    ],
)
def test_a_rank_knows_how_another_one_ended(number, status, oom_kills, end):
    """A SIGTERM, or its handler's status, is the launcher's word on the rank, and no cause."""
    wait_s = 0.5 if end == "nothing" else 30.0
    words = map(str, (number, status, oom_kills, wait_s))
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == f"{end}\n", done.stderr


def test_a_wrong_flag_is_said_once_per_node_and_on_torchruns_page(tmp_path, capsys, monkeypatch):
    lines, slept = [], []
    monkeypatch.setattr(launch.time, "sleep", slept.append)
    for rank in ("0", "1"):
        error = tmp_path / f"error-{rank}.json"
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        places |= {"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_ERROR_FILE": str(error)}
        for name, value in places.items():
            monkeypatch.setenv(name, value)
        assert train.main(["--engine", "bogus"]) == 2
        lines.append(capsys.readouterr().err)
        assert json.loads(error.read_text())["message"] + "\n" == lines[0]
    assert lines[0].startswith("parallel.train: ") and lines[0].count("\n") == 1
    assert lines[1] == "" and slept == [0.0, 2.0]
    launch.tell_torchrun("a consequence")
    assert json.loads(error.read_text())["message"] + "\n" == lines[0]
    error.unlink()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    launch.tell_torchrun("not under torchrun")
    assert not error.exists()


def test_the_rank_that_waits_for_one_that_ended_by_a_mistake_says_nothing(tokens, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    flags = ["--preset", "tiny", "--device", "cpu", "--data", str(tokens), "--out", str(tmp_path)]
    done = run_module(TRAIN, *flags, ranks=2)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "is no run folder of ours" in line


def test_a_list_of_nodes_is_known_only_with_slurm(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert hostnames("n1,n2") == ("n1", "n2") and hostnames("") == ()
    with pytest.raises(UsageError, match=r"the nodes n\[1-2\] are not known: .*scontrol"):
        hostnames("n[1-2]")
