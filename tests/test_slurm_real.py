"""On a real Slurm (slurmctld, slurmd, munge): sweeps train, each failure is told apart, and a run
trains in a container: Debian's charliecloud, with this machine's own files."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from analysis import tflops
from base.errors import UsageError
from parallel.config.clusters import cluster_of
from parallel.config.study import load_study
from parallel.record import reader
from slurm import render, squeue, states, submit
from tests.conftest import ROOT, wait_for
from tests.tools import testbed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A cluster of its own, and the environment that jobs need."""
    if missing := testbed.missing_packages():
        pytest.skip(f"Slurm is not here (apt-get install {' '.join(missing)})")
    if os.geteuid() != 0:
        pytest.skip("the test cluster needs root")
    folder = tmp_path_factory.mktemp("slurm")
    with pytest.MonkeyPatch.context() as patch:
        accounting = not testbed.missing_packages(accounting=True)
        patch.setenv("SLURM_CONF", str(testbed.up(10, folder, accounting)))
        patch.setenv("PYTHON", sys.executable)
        if accounting:  # an account that a job may name
            slurm_says("sacctmgr", "--immediate", "add", "account", "theirs")
            slurm_says("sacctmgr", "--immediate", "add", "user", "root", "account=theirs")
        yield folder
        testbed.down(folder)


def study_at(tmp_path: Path, tokens: Path, text: str, name: str = "real"):
    path = tmp_path / f"{name}.toml"
    path.write_text(
        'question = "?"\ncluster = "local-test"\n[slurm]\nmemory = "1900M"\n[defaults]\n'
        f'preset = "tiny"\nmax_seq_len = 16\ndevice = "cpu"\ndata = "{tokens}"\n'
        f"log_interval = 50\neval_steps = 0\n{text}"
    )
    return load_study(path)


def written(study, logs: Path) -> list[str]:
    """The script of each run, in a file of its own."""
    scripts = [logs.parent / f"{name}.slurm" for name in study.runs]
    for path in scripts:
        path.write_text(render.script(study, path.stem, logs))
    return list(map(str, scripts))


def table(study, logs: Path) -> dict[str, states.Row]:
    jobs = squeue.all_jobs()
    assert jobs is not None
    return {row.run: row for row in states.rows(study, logs, jobs)}


def when_ended(rows: Callable, seconds: float, what: str) -> dict[str, states.Row]:
    """The rows of runs, as soon as all of them have ended."""

    def ended():
        now = rows()
        waits = any(row.state in ("pending", "running", "missing") for row in now.values())
        return None if waits else now

    return wait_for(ended, seconds, what)


def test_runs_whose_scripts_are_submitted_alone_train(slurm, requeued, limited, tokens, tmp_path):
    """Two nodes, tp 2 x pp 2, through both libraries; sbatch exports nothing."""
    study = study_at(
        tmp_path,
        tokens,
        "steps = 2\n[[sweep]]\ndefaults = { nodes = 2, tp = 2, pp = 2, grad_accum = 2 }\n"
        "product = { engine = ['megatron', 'deepspeed_pipe'] }\n",
    )
    about = {"python": sys.executable, "environment": {"NCCL_SOCKET_IFNAME": "lo"}}
    about["options"] = (*study.cluster.options, "--export=NONE")
    study = replace(study, cluster=replace(study.cluster, **about))
    logs = tmp_path / "logs"
    logs.mkdir()
    for path in written(study, logs):
        slurm_says("sbatch", path)
    rows = when_ended(lambda: table(study, logs), 240, "both runs")
    assert [row.state for row in rows.values()] == ["complete"] * 2, rows
    assert [len(reader.job_ids(logs / "real" / name)) for name in study.runs] == [1, 1]
    folder = logs / "real" / "megatron-tp2-pp2"
    job_id = reader.job_ids(folder)[0]
    assert f"JobId={job_id} " in (folder / f"{job_id}.job").read_text()
    assert "SLURM_JOB_NODELIST" in (folder / f"{job_id}.env").read_text()
    rank_0 = json.loads((folder / "launcher_metadata.json").read_text())
    assert rank_0["environment"]["NCCL_SOCKET_IFNAME"] == "lo"
    assert not list(ROOT.glob("megatron*.out")) + list(ROOT.glob("deepspeed*.out"))  # moved in


ASKED = """[slurm]
account = "theirs"
partition = "test"
qos = "normal"
constraint = "ib"
licenses = "matlab:2"
mail_user = "me@example.org"
mail_type = "END,FAIL"
gpu_type = "a100"
options = ["--exclusive", "--hint=nomultithread"]
[[run]]
gpus = 4
[[run]]
label = "kept"
slurm = { reservation = "kept" }
"""


def test_sbatch_takes_what_a_study_asks_for(slurm, tmp_path):
    keeps = "scontrol create reservation reservationname=kept users=root nodes=node10"
    slurm_says(*keeps.split(), "starttime=now", "duration=60")
    site = {"gpus_per_node": 2, "cores_per_node": 2, "memory": "500M"}
    if not testbed.missing_packages(accounting=True):
        site["slurm_cluster"] = "local-test"
    path = tmp_path / "asked.toml"
    path.write_text(f'question = "?"\n{ASKED}')
    try:
        for request in ("gres", "gpus-per-node", "gpus"):
            cluster = cluster_of("site", site | {"gpu_request": request}, path)
            study = replace(load_study(path), cluster=cluster)
            for name in study.runs:
                squeue.run(["sbatch", "--test-only"], render.script(study, name))
        for wrong in ("constraint", "licenses", "reservation", "partition", "gpu_type"):
            path.write_text(f'question = "?"\n[[run]]\nslurm = {{ {wrong} = "wrong" }}\n')
            study = replace(load_study(path), cluster=cluster)
            with pytest.raises(UsageError, match="sbatch: .*(Invalid|invalid|not available)"):
                squeue.run(["sbatch", "--test-only"], render.script(study, "ddp"))
    finally:
        slurm_says("scontrol", "delete", "reservationname=kept")


CHAIN = """[[run]]
engine = "fsdp2"
gpus = 2
steps = 6
load = "{folder}/ddp/checkpoints"
after = "ddp"
[[run]]
steps = 3
save_interval = 3
[[run]]
label = "vain"
steps = 3
after = "ddp-broken"
[[run]]
label = "broken"
steps = 3
vocab_size = 7
"""


def test_a_run_loads_what_the_run_that_it_waited_for_has_saved(slurm, tokens, tmp_path):
    logs = tmp_path / "logs"
    study = study_at(tmp_path, tokens, CHAIN.format(folder=logs / "real"))
    assert submit.main([str(study.path), "--logs", str(logs), "--yes", "--no-checks"]) == 0

    def ended():
        rows = table(study, logs)
        return None if {r.state for r in rows.values()} & {"pending", "running"} else rows

    rows = wait_for(ended, 240, "the chain")
    assert {name: row.state for name, row in rows.items()} == {
        "ddp": "complete",
        "fsdp2-dp2-zero3": "complete",
        "ddp-broken": "failed",
        "ddp-vain": "missing",
    }
    log = (logs / "real/fsdp2-dp2-zero3/train.log").read_text()
    assert f"loaded checkpoint from {logs}/real/ddp/checkpoints/step-00000003" in log


LONG = """steps = 1000000
[[sweep]]
defaults = { engine = "ddp", label = "cancel" }
[[sweep]]
defaults = { engine = "ddp", gpus = 2, label = "crash" }
[[sweep]]
defaults = { engine = "ddp", gpus = 4, label = "node" }
[[sweep]]
defaults = { engine = "ddp", label = "memory", threads = 1 }
slurm = { memory = "150M" }
"""


@pytest.fixture(scope="module")
def limited(slurm, tokens, tmp_path_factory):
    """A run that trains, and saves nothing, until its time limit ends it while others train."""
    tmp_path = tmp_path_factory.mktemp("limited")
    text = 'steps = 1000000\n[[sweep]]\nslurm = { time = "00:01:00" }\n'
    study, logs = study_at(tmp_path, tokens, text, "limited"), tmp_path / "logs"
    assert submit.main([str(study.path), "--logs", str(logs), "--yes"]) == 0
    return study, logs


def test_each_failure_is_produced_and_told_from_the_others(
    slurm, limited, tokens, tmp_path, capsys
):
    study = study_at(tmp_path, tokens, LONG)
    logs = tmp_path / "logs"
    assert submit.main([str(study.path), "--logs", str(logs), "--yes"]) == 0
    trained: set[str] = set()

    def all_train():
        rows = table(study, logs)
        trained.update(name for name, row in rows.items() if row.step > 0)
        return {"ddp-cancel", "ddp-dp2-crash", "ddp-dp4-node"} <= trained

    wait_for(all_train, 300, "the runs to train")
    rows = table(study, logs)
    slurm_says("scancel", str(rows["ddp-cancel"].job_id))
    os.kill(rank_process(rows["ddp-dp2-crash"].job_id, rank=1), signal.SIGKILL)
    last = nodes_of(rows["ddp-dp4-node"].job_id)[-1]
    testbed.stop_node(last, slurm)

    rows = when_ended(lambda: table(*limited) | table(study, logs), 240, "every run to end")
    assert {name: row.state for name, row in rows.items()} == {
        "ddp": "timeout",
        "ddp-cancel": "cancelled",
        "ddp-dp2-crash": "failed",
        "ddp-dp4-node": "node failure",
        "ddp-memory": "OOM",
    }, rows
    assert all(row.line for row in rows.values())
    capsys.readouterr()
    assert tflops.main([str(logs), str(limited[1]), "--format", "json"]) == 0
    verdicts = {row["run"]: row["verdict"] for row in json.loads(capsys.readouterr().out)}
    crash = verdicts.pop("ddp-dp2-crash")
    assert crash in ("traceback", "communication error"), crash  # as its peer saw it, or torchrun
    assert verdicts == {name: rows[name].state for name in verdicts} and len(verdicts) == 4
    testbed.start_node(last, slurm)


def rank_process(job_id: int, rank: int) -> int:
    """The process of a rank of a job."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if {f"SLURM_JOB_ID={job_id}".encode(), f"RANK={rank}".encode()} <= set(variables):
            return int(process.name)
    raise AssertionError(f"no rank {rank} of job {job_id}")


def wrapped(tmp_path: Path, monkeypatch) -> None:
    """Let the scripts start tests/slurm_worker.py in place of parallel.train."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\nexec {sys.executable} "${{@/parallel.train/tests.slurm_worker}}"\n'
    )
    python.chmod(0o755)
    monkeypatch.setenv("PYTHON", str(python))


REQUEUED = """[[sweep]]
defaults = { engine = "ddp", gpus = 4, label = "limit" }
slurm = { time = "00:01:00" }
[[sweep]]
defaults = { engine = "ddp", gpus = 2, save_interval = 1 }
include = [{ label = "lost" }, { label = "again" }, { label = "goes-on" }]
slurm = { requeue = true }
"""
HOSTILE = """it's $(touch pwned) "now"
#SBATCH --nodes=99"""


@pytest.fixture(scope="module")
def requeued(slurm, tokens, tmp_path_factory):
    """Runs of tests/slurm_worker.py: one loses its node, one is told to start again, one nears its
    time limit while the tests that ask for this train, one is told that it does."""
    tmp_path = tmp_path_factory.mktemp("requeued")
    study, logs = study_at(tmp_path, tokens, REQUEUED, HOSTILE), tmp_path / "logs"
    with pytest.MonkeyPatch.context() as patch:
        wrapped(tmp_path, patch)
        assert submit.main([str(study.path), "--logs", str(logs), "--yes"]) == 0
    wait_for(lambda: all(row.step > 0 for row in table(study, logs).values()), 120, "all to train")
    rows = table(study, logs)
    _, lost, again, goes_on = study.runs
    node = nodes_of(rows[lost].job_id)[0]
    slurm_says("scancel", "--signal=USR1", "--batch", rows[goes_on].job)
    slurm_says("scontrol", "requeue", rows[again].job)
    testbed.stop_node(node, slurm)
    # A file system lets go of the locks of a node that is gone; here its tasks are only frozen.
    wait_for(
        lambda: slurm_says("sinfo", "--noheader", f"--nodes={node}", "--format=%t")[:4] == "down",
        60,
        "the node to be missed",
    )
    testbed.start_node(node, slurm)
    return study, logs


def test_a_requeued_run_keeps_its_first_attempt_and_a_signal_comes_before_the_limit(
    slurm, requeued
):
    study, logs = requeued
    limit, lost, again, goes_on = study.runs

    def folder(run: str) -> Path:
        return logs / HOSTILE / run

    rows = when_ended(lambda: table(study, logs), 240, "the end of all four")
    ended = {limit: "interrupted"} | dict.fromkeys((lost, again, goes_on), "complete")
    assert {name: row.state for name, row in rows.items()} == ended, rows
    assert rows[limit].line.startswith("time limit: SIGUSR1, saved step 1; Slurm: FAILED 75:0")
    assert rows[limit].kind == "time limit"
    assert len([*folder(limit).glob("heard.[0-3]")]) == 4
    for run in (lost, again, goes_on):
        job_id = rows[run].job_id
        names = {p.name for p in folder(run).iterdir()}
        for suffix in ("out", "env", "job", "slurm"):
            assert {f"{job_id}.{suffix}", f"{job_id}.restart1.{suffix}"} <= names
        assert (folder(run) / "attempts/1/steps.csv").read_text().count("\n") > 1
        assert (folder(run) / "steps.csv").read_text().count("\n") == 6
        assert (folder(run) / f"{job_id}.restart1.exit").read_text() == "0\n"
    # torchrun said 1 of ranks that had saved and said 75: try again.
    for run in (limit, goes_on):
        assert (folder(run) / f"{rows[run].job_id}.exit").read_text() == "75\n"
    assert not [*ROOT.glob("pwned"), *logs.parent.rglob("pwned")]


def test_accounting_knows_what_the_queue_forgets(slurm, monkeypatch):
    """Three jobs, which end well, badly and by scancel."""
    if missing := testbed.missing_packages(accounting=True):
        pytest.skip(f"no accounting is here (apt-get install {' '.join(missing)})")
    comment = """it's $(x) "now" """.strip()
    flags = ["--output=/dev/null", f"--comment={comment}"]
    for index, does in enumerate(("true", "exit 3", "sleep 300")):
        slurm_says("sbatch", f"--job-name=run{index}", *flags, f"--wrap={does}")

    def jobs() -> dict[str, squeue.Job]:
        return {job.name: job for job in squeue.all_jobs().values() if job.comment == comment}

    wait_for(lambda: [*sorted(jobs())] == ["run0", "run1", "run2"], 20, "their names")
    wait_for(lambda: jobs()["run2"].state == "RUNNING", 60, "the third to run")
    slurm_says("scancel", str(jobs()["run2"].job_id))
    wait_for(lambda: not {j.state for j in jobs().values()} & squeue.ACTIVE, 60, "their end")
    queued, ask = jobs(), squeue.run
    monkeypatch.setattr(
        squeue, "run", lambda words, **on: ask(words, **on) if "sacct" in words else ""
    )
    facts = ("job_id", "state", "name", "comment", "folder")

    def same() -> bool:
        kept = jobs()
        return len(kept) == 3 and all(
            getattr(kept[name], fact) == getattr(queued[name], fact)
            for name in queued
            for fact in facts
        )

    wait_for(same, 20, f"accounting to say what the queue did: {queued}")
    assert [jobs()[f"run{n}"].exit for n in (0, 1)] == ["0:0", "3:0"]
    assert jobs()["run2"].state == "CANCELLED"


def slurm_says(*command: str, cwd: Path = ROOT) -> str:
    environment = squeue.environment()
    return subprocess.run(
        command, env=environment, cwd=cwd, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def nodes_of(job_id: int) -> list[str]:
    held = slurm_says("squeue", "--noheader", "--format=%N", f"--job={job_id}")
    return slurm_says("scontrol", "show", "hostnames", held.strip()).split()


def test_two_jobs_never_share_a_run_folder(slurm, tokens, tmp_path, monkeypatch):
    wrapped(tmp_path, monkeypatch)
    study = study_at(tmp_path, tokens, '[[run]]\nengine = "ddp"\n', "twice")
    logs = tmp_path / "logs"
    logs.mkdir()
    (script,) = written(study, logs)
    first = int(slurm_says("sbatch", "--parsable", script))
    wait_for(lambda: table(study, logs)["ddp"].step > 0, 60, "the run to train")
    second = int(slurm_says("sbatch", "--parsable", "--wait", script))
    folder = logs / "twice" / "ddp"
    assert f"not run: job {first} is running it" in (folder / f"{second}.skipped").read_text()
    assert table(study, logs)["ddp"].job_id == first
    slurm_says("scancel", str(first))
    wait_for(lambda: table(study, logs)["ddp"].state == "cancelled", 60, "the end")


def fresh_clone(tmp_path: Path, tokens: Path, monkeypatch) -> Path:
    """The repository as a user gets it, with data, in which a training takes no time: a wrapper of
    Python stands in for torchrun and marks the run complete."""
    clone = tmp_path / "clone"
    for room in ("base", "models", "parallel", "slurm"):
        shutil.copytree(ROOT / room, clone / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(tokens, clone / "data/stdlib")
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/bash\n"
        'if [[ " $* " == *" -m slurm.forward_signals "* ]]; then\n'
        "  [[ $SLURM_NODEID == 0 ]] || exit 0\n"
        '  cd "${@: -1}" && touch RUN_COMPLETE.txt && echo \'{"state": "complete"}\' >status.json\n'
        f'else\n  exec {sys.executable} "$@"\nfi\n'
    )
    python.chmod(0o755)
    monkeypatch.setenv("PYTHON", str(python))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return clone


def test_sbatch_of_every_study_typed_literally_submits_every_run_with_its_account(
    slurm, tokens, tmp_path, monkeypatch
):
    clone = fresh_clone(tmp_path, tokens, monkeypatch)
    literally = ("bash", "-c", "sbatch --parsable --account theirs slurm/*.slurm")
    sent = slurm_says(*literally, cwd=clone)
    written = [load_study(path.with_suffix(".toml")) for path in clone.glob("slurm/*.slurm")]
    # Slurm refuses the runs of a cluster with GPUs here; the other studies are submitted.
    studies = [study for study in written if study.cluster.name == "local-test"]
    wanted = {f"{study.name}/{name}" for study in studies for name in study.runs}
    assert len(written) == len(list((clone / "slurm").glob("*.toml"))) - 1  # clusters.toml is none
    assert len(wanted) > 60 and len(studies) < len(written)

    def done():
        ended = {str(p.parent.relative_to(clone / "logs")) for p in clone.glob("logs/*/*/*.exit")}
        return ended == wanted

    said = clone / f"2-core-gpt2-124m-bf16-{sent.strip()}.out"
    try:
        wait_for(done, 400, "every run of every study to end")
    finally:
        print(said.read_text()[-3000:] if said.exists() else "the first script did not start")
    assert {p.read_text() for p in clone.glob("logs/*/*/*.exit")} == {"0\n"}
    for study in studies:
        for name in study.runs:
            folder = clone / "logs" / study.name / name
            (job_id,) = reader.job_ids(folder)
            kept = (folder / f"{job_id}.slurm").read_text()
            assert f"\n#SBATCH --job-name={name}\n" in kept
            job = (folder / f"{job_id}.job").read_text()
            assert f"JobName={name}\n" in job and " Account=theirs " in job
    assert "nothing to submit" in slurm_says("bash", "slurm/layouts.slurm", cwd=clone)


def test_ranks_run_from_the_copy_of_their_environment_that_each_node_has(
    slurm, tokens, tmp_path, monkeypatch
):
    """Two nodes, which share /tmp here; the copied environment borrows this one's packages."""
    environment = tmp_path / "environment"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", environment)
    (environment / "lib").symlink_to(os.path.realpath(Path(sys.prefix) / "lib"))
    subprocess.run(["tar", "-C", environment, "-cf", tmp_path / "gpt.tar", "."], check=True)
    own = tmp_path / "clusters.toml"
    keys = CLUSTERS.split("\n[contained.container]")[0].format()
    own.write_text(f'{keys}\nenvironment_tar = "{tmp_path}/gpt.tar"\n')
    monkeypatch.setenv("SCALING_CLUSTERS", str(own))
    path = study_at(tmp_path, tokens, "steps = 2\nnodes = 2\n[[run]]\nengine = 'ddp'\n").path
    study, logs = load_study(path, "contained"), tmp_path / "logs"
    logs.mkdir()
    (script,) = written(study, logs)
    slurm_says("sbatch", script)
    (row,) = when_ended(lambda: table(study, logs), 240, "the run").values()
    assert row.state == "complete", row
    copy = f"/tmp/gpt-environment-{row.job_id}.0"
    told = reader.read_json_if_whole(logs / "real" / row.run / "launcher_metadata.json")
    assert f"{copy}/bin/python" in json.dumps(told), told
    assert not list(Path("/tmp").glob(f"{Path(copy).name}*"))


# Its Python is a script that only the image has, so a run that starts is inside.
PYTHON = "/only/in/the/image/python"
CLUSTERS = """[contained]
gpus_per_node = 2
cores_per_node = 2
partition = "test"
gpu_request = "none"
memory = "1900M"
time = "00:05:00"
srun = ["--cpu-bind=none"]
setup = ["export SET_UP=1"]
environment = {{ GLOO_SOCKET_IFNAME = "lo", SCALING_ONE_MACHINE = "1" }}

[contained.container]
runtime = "charliecloud"
image = "{image}"
mounts = {mounts}
python = "{python}"
"""


@pytest.fixture
def image(tokens, tmp_path):
    """A folder that ch-run takes for an image: empty places for this machine's own folders."""
    if shutil.which("ch-run") is None:
        pytest.skip("charliecloud is not here (apt-get install charliecloud)")
    root = tmp_path / "image"
    ours = {"/usr", sys.base_prefix, os.path.realpath(sys.prefix), str(ROOT), str(tmp_path)}
    mounts = sorted(ours | {os.path.realpath(tokens)})
    for place in ["/proc", "/sys", "/dev", "/etc", "/tmp", "/only/in/the/image", *mounts]:
        (root / place.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        (root / "etc" / name).touch()
    python = root / PYTHON.lstrip("/")
    python.write_text(f'#!/bin/sh\nNCCL_TOPO_FILE=/in/the/image exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    tried = ["ch-run", *(f"--bind={mount}" for mount in mounts), str(root), "--", PYTHON, "-V"]
    done = subprocess.run(
        tried, env=os.environ | {"USER": "root"}, capture_output=True, text=True, timeout=60
    )
    if "clone" in done.stderr or "unshare" in done.stderr or "user namespace" in done.stderr:
        pytest.skip(f"this kernel gives no user namespaces: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return root, [mount for mount in mounts if mount != str(ROOT)]  # which the job mounts


def test_a_run_trains_in_charliecloud_and_saves_when_its_time_is_over(
    slurm, image, tokens, tmp_path, monkeypatch
):
    """Two nodes."""
    root, mounts = image
    own = tmp_path / "clusters.toml"
    own.write_text(CLUSTERS.format(image=root, mounts=json.dumps(mounts), python=PYTHON))
    monkeypatch.setenv("SCALING_CLUSTERS", str(own))
    text = "steps = 1000000\nsave_interval = 1000000\nnodes = 2\n[[run]]\nengine = 'ddp'\n"
    path, logs = study_at(tmp_path, tokens, text, "inside").path, tmp_path / "logs"
    flags = ["--cluster", "contained", "--logs", str(logs), "--yes"]
    assert submit.main([str(path), *flags]) == 0

    def row() -> states.Row:
        return table(load_study(path, "contained"), logs)["ddp"]

    wait_for(lambda: row().step > 0 or row().state in states.FAILURES, 240, "the run to train")
    folder, job_id = logs / "inside/ddp", row().job_id
    log = (folder / f"{job_id}.out").read_text()
    assert row().state == "running", log
    told = reader.read_json_if_whole(folder / "launcher_metadata.json")
    assert told["environment"]["NCCL_TOPO_FILE"] == "/in/the/image", told
    slurm_says("scancel", "--batch", "--signal=USR1", str(job_id))  # as before the time limit
    end = when_ended(lambda: {"ddp": row()}, 120, "the run to end")["ddp"]
    assert end.state == "interrupted", (end, (folder / f"{job_id}.out").read_text())
    assert end.kind == "time limit" and "time limit: SIGUSR1, saved step" in end.line
    assert states.read_end(folder, str(job_id))[0] == "time limit"
