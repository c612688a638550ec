"""Rendered scripts: committed as rendered, valid shell, and never run what a value says."""

import re
import shlex
import shutil
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from models.errors import UsageError
from parallel.clusters import cluster, cluster_of
from parallel.study import load_study
from slurm import jobs
from slurm.render import MARK, job_of, main, render, script_folder, seconds, write
from tests.conftest import ROOT

STUDIES = [p for p in sorted((ROOT / "slurm").glob("*.toml")) if p.name != "clusters.toml"]


@pytest.mark.parametrize("path", STUDIES, ids=lambda p: p.stem)
def test_what_is_committed_is_what_the_study_renders_to(path):
    study = load_study(path)
    committed = {p.stem: p.read_text() for p in script_folder(study).glob("*.slurm")}
    assert committed == {name: render(study, name, study.cluster) for name in study.settings}


def test_every_script_passes_shellcheck():
    """Before "ranks=" a script has comments and its values, each one quoted word; what comes after
    is one of a few texts, of which shellcheck sees each in one whole script."""
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not here (apt-get install shellcheck)")
    programs = {}
    for path in sorted((ROOT / "slurm").glob("*/*.slurm")):
        values, program = path.read_text().split("\nranks=", 1)
        for line in values.splitlines():
            given = shlex.split(line, comments=True)
            assert given in ([], ["set", "-uo", "pipefail"]) or (
                len(given) == 1 and re.match(r"[a-z_]+=", line)
            ), f"{path}: {line}"
        programs[program] = str(path)
    assert 1 < len(programs) < 30
    done = subprocess.run(["shellcheck", *programs.values()], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[:2000]


def test_the_header_asks_for_what_the_run_needs(tmp_path):
    path = tmp_path / "dgx.toml"
    path.write_text(
        'question = "?"\ncluster = "jean-zay-v100-32g"\n[slurm]\ntime = "00:20:00"\n'
        '[[run]]\nengine = "megatron"\npreset = "1.7b"\ngpus = 8\ntp = 4\nglobal_batch = 8\n'
    )
    study = load_study(path)
    text = render(study, "megatron-tp4-dp2", study.cluster)
    header = [line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH" in line]
    assert header == [
        "--job-name=megatron-tp4-dp2",
        "--comment=dgx",
        "--partition=gpu_p13",
        "--constraint=v100-32g",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=40",
        "--gres=gpu:4",
        "--hint=nomultithread",
        "--exclusive",
        "--time=00:20:00",
        "--signal=B:USR1@120",
        "--no-requeue",
        "--open-mode=append",
        "--output=%x-%j.out",
    ]
    assert text.startswith("#!/bin/bash\n#SBATCH")
    assert job_of(study, "megatron-tp4-dp2", study.cluster).gpu_hours == pytest.approx(8 / 3)


HOSTILE = [
    "a b",
    "it's",
    'say "x"',
    "$(touch pwned)",
    "`touch pwned`",
    "a\ntouch pwned",
    "; touch pwned",
    "*",
]


def run_script(
    tmp_path,
    text: str,
    tools: dict[str, str],
    *arguments: str,
    stdout=None,
    stderr=None,
    **variables,
):
    """Run a script outside Slurm, with stand-ins for the tools that it calls."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    fakes = {"scontrol": "echo localhost\n", "python": "", "squeue": ""} | tools
    for tool, body in fakes.items():
        (folder / tool).write_text(f"#!/bin/bash\n{body}")
        (folder / tool).chmod(0o755)
    script = tmp_path / "job.slurm"
    script.write_text(text)
    environment = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "HOME": "/home/me",
        "PYTHON": str(folder / "python"),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "ddp",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "1",
    }
    return subprocess.run(
        ["bash", str(script), *arguments],
        cwd=tmp_path,
        env=environment | variables,
        stdout=stdout or subprocess.PIPE,
        stderr=stderr or subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("word", HOSTILE)
def test_no_value_ever_runs(tmp_path, word):
    """Run the script up to srun, for which a harmless stand-in is put in the path."""
    base = {"description": word, "gpus_per_node": 2, "cores_per_node": 2}
    values = {"environment": {"EVIL": word}, "network": {"NET": word}, "modules": [word]}
    values["scratch"] = "${HOME}/" + word
    where = cluster_of("hostile", base | values, "test")
    (tmp_path / "logs").mkdir()
    path = tmp_path / f"{word}.toml"
    quoted = word.encode("unicode_escape").decode().replace('"', '\\"')
    path.write_text(
        f'question = "{quoted}"\n[slurm]\nenvironment = {{ MINE = "{quoted}" }}\n[[run]]\n'
    )
    study = replace(load_study(path), cluster=where)
    text = render(study, "ddp", where)
    assert text.count("#SBATCH") == 11  # no value has made a line of its own
    seen = 'printf "%s\\0" "$EVIL" "$NET" "$MINE" "$TRITON_CACHE_DIR" "$@" >"$SEEN"\n'
    tools = {"srun": seen, "module": 'printf "%s\\0" "$@" >"$SEEN.modules"\n'}
    done = run_script(tmp_path, text, tools, SEEN=str(tmp_path / "seen"))
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("pwned"))
    assert (tmp_path / "seen.modules").read_text().split("\0")[:2] == ["load", word]
    given = (tmp_path / "seen").read_text().split("\0")
    assert given[:4] == [word, word, word, f"/home/me/{word}/triton"]
    assert given[given.index("--study") + 1] == str(path)
    assert (tmp_path / "logs" / word / "ddp" / "77.exit").read_text() == "0\n"


@pytest.mark.parametrize("there", [True, False])
def test_proof_is_left_when_asked_for_and_a_tool_that_is_absent_is_noted(tmp_path, there):
    path = tmp_path / "proof.toml"
    path.write_text('question = "?"\ncluster = "local-test"\n[[run]]\n')
    study = load_study(path)
    folder = tmp_path / "logs" / "proof" / "ddp"
    tools = {
        "srun": f'printf "%s\\n" "$@" "debug=$TORCH_DISTRIBUTED_DEBUG" "nccl=$NCCL_DEBUG"'
        f' "$NCCL_DEBUG_FILE" "$NCCL_TOPO_DUMP_FILE" >{tmp_path}/seen\n'
        f"if [[ -d {folder}/77.profiles ]]; then\n"
        f"touch {folder}/77.profiles/nsys_77_n1.nsys-rep\nfi",
        "python": '[[ $2 != parallel.environment ]] || touch "$3"\n',
    }
    if there:
        tools |= {"nsys": 'echo "$1 of ${2##*/}"', "ibstat": "echo mlx5_0"}
        tools |= {"nvidia-smi": "echo $*"}
    switches = dict.fromkeys(("NSYS", "NCCL_LOGS", "TORCHRUN_LOGS", "DIST_DEBUG"), "1")
    done = run_script(tmp_path, render(study, "ddp", study.cluster), tools, **switches)
    assert done.returncode == 0, done.stderr
    seen = (tmp_path / "seen").read_text().splitlines()
    assert seen[seen.index("--log-dir") + 1] == "logs/proof/ddp/77.torchrun"
    assert {"debug=INFO", "nccl=INFO", f"{folder}/77.nccl/nccl_topo.xml"} <= set(seen)
    assert f"{folder}/77.nccl/nccl_rank_%h_%p.log" in seen
    skipped = [line for line in done.stdout.splitlines() if line.startswith("slurm: skipped")]
    left = {p.name: p.read_text() for p in folder.glob("77.*/*.txt")}
    if there:
        assert seen[seen.index("nsys") + 1] == "profile" and not skipped
        assert left == {
            "ibstat.txt": "mlx5_0\n",
            "topo.txt": "topo -m\n",
            "nsys_stats_n1.txt": "stats of nsys_77_n1.nsys-rep\n",
        }
    else:
        assert "nsys" not in seen and not left and len(skipped) == 3
        assert "slurm: skipped the profile: no nsys here" in skipped
    (tmp_path / "seen").unlink()
    run_script(tmp_path, render(study, "ddp", study.cluster), tools, SLURM_JOB_ID="78")
    seen = (tmp_path / "seen").read_text().splitlines()
    assert "nsys" not in seen and "--log-dir" not in seen and "debug=" in seen
    assert {p.name for p in folder.glob("78.*")} == {
        f"78.{kind}" for kind in ("env", "exit", "job", "slurm", "submitted")
    }


def study_on(tmp_path, **facts):
    """A study of one run, on a cluster with these facts."""
    path = tmp_path / "one.toml"
    path.write_text('question = "?"\n[[run]]\n')
    base = {"description": "x", "gpus_per_node": 2, "cores_per_node": 2}
    return replace(load_study(path), cluster=cluster_of("mine", base | facts, "test"))


@pytest.mark.parametrize(
    ("facts", "tools", "reason"),
    [
        ({"modules": ["cuda/12"]}, {"module": "exit 1"}, "module load cuda/12 ended with status 1"),
        ({"modules": ["a", "b"]}, {"module": "[[ $2 == a ]]"}, "module load b ended with status 1"),
        ({"modules": ["cuda"]}, {}, "module load cuda ended with status 127"),
        ({"environment": {"UID": "x"}}, {}, "export UID: not possible"),
        ({"scratch": "${NOWHERE}/x"}, {}, "scratch: NOWHERE is not set"),
        (
            {"environment": {"PYTHON": "/no/python"}},
            {},
            "no working Python: /no/python ended with status 127",
        ),
        (
            {"environment": {"PYTHON": "/bin/false"}},
            {},
            "no working Python: /bin/false ended with status 1",
        ),
    ],
)
def test_a_set_up_that_fails_ends_the_job_with_its_reason(tmp_path, facts, tools, reason):
    study = study_on(tmp_path, **facts)
    tools |= {"srun": f"touch {tmp_path}/trained\n", "python": f'echo "$*" >>{tmp_path}/marked\n'}
    done = run_script(tmp_path, render(study, "ddp", study.cluster), tools)
    assert done.returncode == 1 and f"slurm: failed: {reason}\n" in done.stdout, done.stderr
    folder = tmp_path / "logs" / "one" / "ddp"
    assert (folder / "77.exit").read_text() == "1\n" and not (tmp_path / "trained").exists()
    log = done.stderr + done.stdout
    assert jobs.cause(log) == f"slurm: failed: {reason}"
    if "PYTHON" not in facts.get("environment", {}):
        assert f"-m slurm.mark logs/one/ddp {reason} " in (tmp_path / "marked").read_text()


def test_a_clusters_own_python_runs_the_job(tmp_path):
    (tmp_path / "own").write_text(f'#!/bin/bash\necho "$*" >>{tmp_path}/ran\n')
    (tmp_path / "own").chmod(0o755)
    study = study_on(tmp_path, environment={"PYTHON": str(tmp_path / "own")})
    tools = {"srun": f'printf "%s\n" "$@" >{tmp_path}/seen\n', "python": "exit 9"}
    done = run_script(tmp_path, render(study, "ddp", study.cluster), tools)
    assert done.returncode == 0, done.stderr
    assert "parallel.environment" in (tmp_path / "ran").read_text()
    assert (tmp_path / "seen").read_text().splitlines().count(str(tmp_path / "own")) == 2


def test_what_a_sites_module_function_leaves_unset_does_not_end_the_job(tmp_path):
    study = study_on(tmp_path, modules=["cuda"])
    text = render(study, "ddp", study.cluster)
    text = text.replace("set +u", 'module() { echo "$SITE_HAS_NOT_SET_THIS"; }\nset +u')
    assert run_script(tmp_path, text, {"srun": ""}).returncode == 0


@pytest.mark.parametrize("end", ["runs", "fails", "is skipped", "is killed"])
@pytest.mark.parametrize("elsewhere", [True, False])
def test_the_jobs_log_is_never_lost(tmp_path, elsewhere, end):
    """As Slurm does, write to a log that was opened in the submit folder; the run folder may lie
    on another file system, where what is moved is copied."""
    shm = Path("/dev/shm")
    if elsewhere and (not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev):
        pytest.skip("there is no second file system here")
    study = study_on(tmp_path, **({"scratch": "${NOWHERE}"} if end == "fails" else {}))
    tools = {"srun": "echo trained\n" + "kill -9 $PPID\n" * (end == "is killed")}
    with tempfile.TemporaryDirectory(dir=shm if elsewhere else tmp_path) as place:
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "one").symlink_to(place)
        folder = tmp_path / "logs" / "one" / "ddp"
        arguments = []
        if end == "is skipped":
            folder.mkdir()
            (folder / "RUN_COMPLETE.txt").touch()
            arguments = ["job.slurm", "job.slurm"]
        with (tmp_path / "ddp-77.out").open("a") as log:
            print("before", file=log, flush=True)
            text = render(study, "ddp", study.cluster)
            run_script(tmp_path, text, tools, *arguments, stdout=log, stderr=subprocess.STDOUT)
            print("after", file=log, flush=True)  # slurmstepd's word
        name, word = {
            "runs": ("77.out", "trained"),
            "fails": ("77.out", "slurm: failed: scratch: NOWHERE is not set"),
            "is skipped": ("77.skipped", "slurm: not run: it is complete"),
            "is killed": ("77.out", "trained"),
        }[end]
        text = (folder / name).read_text()
        assert text.startswith("before\n") and word in text
        assert text.endswith("after\n") or (elsewhere and end != "is killed")
        left = [p.name for p in tmp_path.glob("*.out")]  # what a killed script could not copy
        assert left == [".ddp-77.out"] * (elsewhere and end == "is killed")


def test_a_job_submitted_from_another_folder_leaves_its_word_there(tmp_path):
    """Slurm opens a job's log before its script runs: in a folder that is always there."""
    text = render(study := load_study(ROOT / "slurm/layouts.toml"), "ddp-dp4", study.cluster)
    assert "#SBATCH --output=%x-%j.out\n" in text
    done = run_script(tmp_path, text, {})
    assert done.returncode == 2
    assert "not the repository (no slurm/layouts.toml here): submit from its root" in done.stderr


def attempt(tmp_path, restart: int, max_restarts: int = 2):
    """A restart of a job that gains one step and hears of its time limit, as the script runs it."""
    path = tmp_path / "again.toml"
    path.write_text(
        'question = "?"\ncluster = "local-test"\n[slurm]\nrequeue = true\n'
        f"max_restarts = {max_restarts}\n[[run]]\nsave_interval = 1\n"
    )
    study, folder = load_study(path), tmp_path / "logs" / "again" / "ddp"
    tools = {
        "scontrol": f"[[ $1 != requeue ]] || touch {tmp_path}/requeued\necho localhost\n",
        "srun": f"trap '' USR1\nkill -USR1 $PPID\nsleep 0.2\ntouch {tmp_path}/trained\n"
        f"cd {folder}\necho 1 >steps.csv\n"
        """echo '{"state": "interrupted"}' >status.json\nexit 1\n""",
        "python": f'echo "$*" >>{tmp_path}/marked\n',
    }
    text = render(study, "ddp", study.cluster)
    done = run_script(tmp_path, text, tools, SLURM_RESTART_COUNT=str(restart))
    seen = [name for name in ("trained", "requeued") if (tmp_path / name).exists()]
    return done, seen


@pytest.mark.parametrize(
    ("restart", "max_restarts", "seen", "says"),
    [
        (0, 2, ["trained", "requeued"], ""),
        (1, 2, ["trained", "requeued"], ""),
        (2, 2, ["trained"], "slurm: not started again: restarted 2 times already"),
        (3, 2, [], "slurm: not run: restarted 2 times already"),  # Slurm's own, for a lost node
        (0, 0, ["trained"], "slurm: not started again: restarted 0 times already"),
    ],
)
def test_a_run_that_gains_a_step_per_time_limit_is_not_restarted_for_ever(
    restart, max_restarts, seen, says, tmp_path
):
    done, happened = attempt(tmp_path, restart, max_restarts)
    assert (done.returncode, happened) == (75, seen), done.stderr
    assert says in done.stdout and (says or "max_restarts" not in done.stdout)
    if not seen:
        assert "slurm.mark" in (tmp_path / "marked").read_text()


@pytest.mark.parametrize("account", ["", "its@own $(touch pwned)"])
def test_the_others_are_submitted_once_with_the_account_of_the_first(account, tmp_path):
    path = tmp_path / "list.toml"
    path.write_text(
        'question = "?"\ncluster = "local-test"\n[[sweep]]\nproduct = { seed = [1, 2] }\n'
    )
    study = load_study(path)
    own, other = map(str, write(study))
    sbatch = f'echo "${{SBATCH_ACCOUNT-none}} ${{SLURM_JOB_ID-none}} $*" >>{tmp_path}/sent\n'
    text = render(study, "ddp-seed1", study.cluster)
    given = {"SLURM_JOB_ACCOUNT": account, "SLURM_JOB_NAME": "ddp-seed1"}
    tools = {"sbatch": sbatch, "srun": ""}
    said = ""
    for _ in range(2):  # a restart does not submit them again
        done = run_script(tmp_path, text, tools, own, other, "gone.slurm", other, **given)
        assert done.returncode == 0, done.stderr
        said += done.stdout
    sent = (tmp_path / "sent").read_text()
    assert sent == f"{account or 'none'} none -- {other} {other}\n"
    assert "slurm: not submitted, no script: gone.slurm" in said
    assert not list(tmp_path.rglob("pwned"))


def test_what_cannot_be_written_is_said_in_a_line(tmp_path, capsys):
    path = tmp_path / "few.toml"
    path.write_text('question = "?"\ncluster = "local-test"\n[[run]]\n')
    (tmp_path / "few").touch()
    assert main([str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"slurm.render: cannot write {tmp_path}/few: ")


def test_restarts_are_in_the_estimate(tmp_path, capsys):
    path = tmp_path / "few.toml"
    path.write_text(
        'question = "?"\ncluster = "dgx-h200"\n[slurm]\ntime = "01:00:00"\nrequeue = true\n'
        "[[run]]\nnodes = 1\nsave_interval = 5\n"
    )
    assert main([str(path), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert (
        "32.00 GPU-hours at worst" in out and "max_restarts are counted: 3 of a run at most" in out
    )
    path.write_text(path.read_text().replace("requeue = true", "max_restarts = -1"))
    assert main([str(path), "--dry-run"]) == 2
    assert "max_restarts cannot be -1" in capsys.readouterr().err


def test_a_hostile_logs_folder_is_data():
    study = load_study(ROOT / "slurm/layouts.toml")
    text = render(study, "ddp-dp4", study.cluster, logs=Path("a b\n#SBATCH --nodes=99"))
    header, program = text.split("set -uo pipefail")
    assert header.count("#SBATCH") == 12 and "--nodes=99" not in header
    values = shlex.split(program.split("\nranks=")[0], comments=True)
    assert "folder=a b\n#SBATCH --nodes=99/layouts/ddp-dp4" in values


@pytest.mark.parametrize(
    ("limit", "total"),
    [("90", 5400), ("10:30", 630), ("01:00:00", 3600), ("1-12", 129600), ("2-01:30:00", 178200)],
)
def test_time_limits_are_read_as_slurm_reads_them(limit, total):
    assert seconds(limit) == total


def test_a_wrong_time_limit_is_refused():
    for limit in ("soon", "0", "1:2:3:4", "", "99:99:99", "00:60:00", "1:99", "1-24", "1-2:60"):
        with pytest.raises(UsageError, match="time limit"):
            seconds(limit)


REFUSED = {
    "an option that no line holds": ('[slurm]\nmemory = "1 G"\n[[run]]\n', "#SBATCH"),
    "no time": ('[slurm]\ntime = "99:99:99"\n[[run]]\n', "time limit '99:99:99'"),
    "an unknown key": ("[slurm]\nwalltime = 5\n[[run]]\n", "unknown walltime; known: time, memory"),
    "nothing to go on from": (
        "[slurm]\nrequeue = true\n[[run]]\n",
        "ddp asks for requeue without save_interval",
    ),
    "a file in the folder's place": ("[[run]]\n", "cannot write"),
    "a folder in a script's place": ("[[run]]\n", "cannot write"),
    "a name that is too long": (f'[[run]]\nlabel = "{"x" * 250}"\n', "cannot write"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_dry_run_refuses_what_the_real_one_refuses(case, tmp_path, capsys):
    text, words = REFUSED[case]
    path = tmp_path / "few.toml"
    path.write_text(f'question = "?"\ncluster = "local-test"\n{text}')
    if "file in" in case:
        (tmp_path / "few").touch()
    if "folder in" in case:
        (tmp_path / "few" / "ddp.slurm").mkdir(parents=True)
    for dry in (["--dry-run"], []):
        assert main([str(path), *dry]) == 2
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1


def test_two_thousand_scripts_render_in_two_seconds(tmp_path):
    path = tmp_path / "many.toml"
    path.write_text(
        'question = "?"\ncluster = "local-test"\n[[sweep]]\n'
        f"product = {{ seed = {list(range(2000))} }}\n"
    )
    before = time.process_time()  # of this process: others may want the same cores
    study = load_study(path)
    paths = write(study)
    assert time.process_time() - before < 2 and len(paths) == 2000


def test_scripts_of_runs_that_are_gone_are_removed_and_others_kept(tmp_path):
    path = tmp_path / "few.toml"
    path.write_text('question = "?"\ncluster = "local-test"\n[[run]]\ngpus = 1\n')
    folder = tmp_path / "few"
    folder.mkdir()
    (folder / "gone.slurm").write_text(f"{MARK} few.toml\n")
    (folder / "mine.slurm").write_text("my own\n")
    assert main([str(path)]) == 0
    assert sorted(p.name for p in folder.iterdir()) == ["ddp.slurm", "mine.slurm"]


def test_dry_run_writes_nothing_and_says_what_it_costs(tmp_path, capsys):
    path = tmp_path / "few.toml"
    path.write_text(
        'question = "?"\ncluster = "dgx-h200"\n[slurm]\ntime = "02:00:00"\n'
        "[[sweep]]\nproduct = { nodes = [1, 2], tp = [1, 3] }\ndefaults = { engine = 'megatron' }\n"
    )
    assert main([str(path), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "2 runs on dgx-h200: 48.00 GPU-hours at worst" in out
    assert out.count("left out: [[sweep]] 1:") == 2 and not (tmp_path / "few").exists()
    assert main([str(path), "--strict"]) == 2
    path.write_text('question = "?"\n[[run]]\n')
    assert main([str(path)]) == 2
    assert "names no cluster" in capsys.readouterr().err
    assert cluster("dgx-h200").nodes(16) == 2
