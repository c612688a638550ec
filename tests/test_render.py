"""Rendered scripts: committed as rendered, valid shell, and never run what a value says."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from base.errors import UsageError
from parallel.config.clusters import CLUSTERS, cluster, cluster_of
from parallel.config.study import load_study
from slurm import states
from slurm.render import MARK, batches, job_of, main, script, seconds, study_script
from tests.conftest import ROOT, study_file

STUDIES = [p for p in sorted((ROOT / "slurm").rglob("*.toml")) if p.name != "clusters.toml"]


@pytest.mark.parametrize("path", STUDIES, ids=lambda p: p.stem)
def test_what_is_committed_is_what_the_study_renders_to(path):
    assert path.with_suffix(".slurm").read_text() == study_script(load_study(path))


def test_every_committed_script_is_of_a_study_and_they_are_short():
    scripts = [*(ROOT / "slurm").rglob("*.slurm"), *(ROOT / "slurm").rglob("*.sh")]
    studies = {path.with_suffix(".slurm") for path in STUDIES}
    assert {path for path in scripts if path.suffix == ".slurm"} == studies
    assert sum(path.read_text().count("\n") for path in scripts) <= 3000


def test_every_script_passes_shellcheck():
    """Of a rendered script, what differs is the array of settings, each one quoted word; shellcheck
    sees one script with every kind of setting."""
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not here (apt-get install shellcheck)")
    program = (ROOT / "slurm/job.sh").read_text().removeprefix("#!/bin/bash\n")
    for path in STUDIES:
        study = load_study(path)
        for names in batches(study, list(study.settings), Path("logs")):
            head, settings = script(study, names, study.cluster).split("\nsettings=(\n")
            settings, rest = settings.split("\n)\n", 1)
            assert all(line.startswith("#") for line in head.splitlines() if line)
            for line in settings.splitlines():
                (word,) = shlex.split(line, comments=True)
                assert re.match(r"[a-z_]+=", word), f"{path}: {line}"
            assert rest.endswith(program)
    files = [*(ROOT / "slurm").rglob("*.sh"), *(ROOT / "slurm").rglob("*.slurm")]
    study = load_study(ROOT / "slurm/published/gpt2-two-nodes.toml")
    whole = script(study, list(study.settings), study.cluster)
    for given, text in (([*map(str, files)], ""), (["-"], whole)):
        done = subprocess.run(
            ["shellcheck", *given], input=text, cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[:2000]


def header(text: str) -> list[str]:
    """The options that sbatch finds in a script: of the lines before its first command."""
    lines = text.split("\nsettings=(\n")[0].splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]


def test_the_header_asks_for_what_the_run_needs(tmp_path):
    path = tmp_path / "dgx.toml"
    path.write_text(
        'question = "?"\ncluster = "jean-zay-v100-32g"\n[slurm]\ntime = "00:20:00"\n'
        '[[run]]\nengine = "megatron"\npreset = "1.7b"\ngpus = 8\ntp = 4\nglobal_batch = 8\n'
    )
    study = load_study(path)
    text = script(study, ["megatron-tp4-dp2"], study.cluster)
    assert header(text) == [
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


def test_a_card_is_asked_for_by_its_name_and_cores_not_where_the_site_takes_none(tmp_path):
    path = tmp_path / "two.toml"
    path.write_text(
        'question = "?"\n[defaults]\ngpus = 2\n[[run]]\nslurm = { gpu_type = "a100" }\n'
        '[[run]]\nlabel = "b"\nslurm = { gpu_type = "h100-80" }\n'
    )
    base = {"description": "x", "gpus_per_node": 2, "cores_per_node": 4}

    def asked(name: str, **facts) -> list[str]:
        study = replace(load_study(path), cluster=cluster_of("mine", base | facts, CLUSTERS))
        return header(script(study, [name], study.cluster))

    assert "--gres=gpu:a100:2" in asked("ddp-dp2") and "--cpus-per-task=4" in asked("ddp-dp2")
    assert "--gres=gpu:h100-80:2" in asked("ddp-dp2-b")
    others = asked("ddp-dp2", gpu_request="gpus-per-node", cpus_per_task=False)
    assert "--gpus-per-node=a100:2" in others and not any("cpus" in line for line in others)
    with pytest.raises(UsageError, match="asks for gpu_type a100, and mine has no GPUs"):
        asked("ddp-dp2", gpu_request="none")
    path.write_text(path.read_text().replace("a100", "a100:4 --x"))
    with pytest.raises(UsageError, match="gpu_type 'a100:4 --x' is not"):
        asked("ddp-dp2")


def test_the_step_asks_for_cores_where_the_job_did(tmp_path):
    study = study_on(tmp_path, cpus_per_task=False)
    tools = {"srun": f'printf "%s\\n" "$@" >{tmp_path}/seen\n'}
    for variables, options in (({}, []), ({"SLURM_CPUS_PER_TASK": "6"}, ["--cpus-per-task=6"])):
        run_script(tmp_path, script(study, ["ddp"], study.cluster), tools, **variables)
        seen = (tmp_path / "seen").read_text().splitlines()
        assert [word for word in seen if "cpus" in word] == options
        assert "" not in seen and "--kill-on-bad-exit=1" in seen


def test_lines_after_the_run_see_how_it_ended(tmp_path):
    lines = [f'cp "$folder/77.exit" {tmp_path}/copied', "false # copy: it's gone", "echo $UNSET x"]
    study = study_on(tmp_path, after=lines)
    done = run_script(tmp_path, script(study, ["ddp"], study.cluster), {"srun": "exit 3"})
    assert (tmp_path / "copied").read_text() == "3\n" and done.returncode == 3
    said = "slurm: after the run: false # copy: it's gone: status 1\n"
    assert said in done.stdout and done.stdout.endswith("x\n")
    with pytest.raises(UsageError, match="after ' ' is not one line of shell"):
        study_on(tmp_path, after=[" "])


SECRETS = """
[mine]
description = "x"
gpus_per_node = 2
cores_per_node = 2
setup = [
    "export HF_HUB_TOKEN=hunter2a A=1", 'curl -H "Authorization: Bearer hunter2b" x', "echo a@b"
]
environment = { WANDB_API_KEY = "hunter2c", NCCL_DEBUG = "INFO" }
network = { https_proxy = "http://me:hunter2d@proxy:3128" }
"""


def test_what_is_archived_of_a_secretive_cluster_is_whole_private_and_hides_them(tmp_path):
    (tmp_path / "one.toml").write_text('question = "?"\n[[run]]\n')
    clusters = tmp_path / "clusters.toml"
    clusters.write_text(SECRETS)
    facts = tomllib.loads(SECRETS)["mine"]
    study = replace(load_study(tmp_path / "one.toml"), cluster=cluster_of("mine", facts, clusters))
    text = script(study, ["ddp"], study.cluster)
    real = f'[[ $* != *record.environment* ]] || PYTHONPATH={ROOT} exec {sys.executable} "$@"\n'
    folder = tmp_path / "logs/one/ddp"
    folder.mkdir(parents=True)
    (folder / "77.slurm").write_text("of an attempt before")
    (folder / "77.slurm").chmod(0o644)
    tools = {"srun": f'echo "$WANDB_API_KEY" >{tmp_path}/seen', "python": real, "curl": ""}
    done = run_script(tmp_path, text, tools)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "seen").read_text() == "hunter2c\n"
    kept = {name: folder / f"77.{name}" for name in ("slurm", "study.toml", "clusters.toml", "env")}
    assert {path.stat().st_mode & 0o777 for path in kept.values()} == {0o600}
    assert "hunter2" in text and not any("hunter2" in p.read_text() for p in folder.glob("77.*"))
    there = tomllib.loads(kept["clusters.toml"].read_text())["mine"]
    assert there["environment"] == {"WANDB_API_KEY": "***", "NCCL_DEBUG": "INFO"}
    assert there["setup"][2] == "echo a@b" and there["setup"][0].endswith("=*** A=1")
    archived = kept["slurm"].read_text()
    assert archived.count("\n") == text.count("\n")
    assert archived.split("\n)\n", 1)[1] == text.split("\n)\n", 1)[1]  # job.sh is as it was
    subprocess.run(["bash", "-n", str(kept["slurm"])], check=True)


def test_scripts_of_runs_are_their_owners_alone(tmp_path, capsys):
    (tmp_path / "one.toml").write_text('question = "?"\ncluster = "local-test"\n[[run]]\n')
    out = tmp_path / "scripts"
    for _ in range(2):
        assert main([str(tmp_path / "one.toml"), "--out", str(out)]) == 0
        assert (out / "ddp.slurm").stat().st_mode & 0o777 == 0o600
        (out / "ddp.slurm").chmod(0o644)  # as an earlier version left it


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
    (tmp_path / "slurm").mkdir(exist_ok=True)
    for name in ("job.sh", "clusters.toml"):
        shutil.copy(ROOT / "slurm" / name, tmp_path / "slurm")
    path = tmp_path / "job.slurm"
    path.write_text(text)
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
        ["bash", str(path), *arguments],
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
    values = {"environment": {"EVIL": word}, "network": {"NET": word}, "srun": [f"--x={word}"]}
    values["torchrun"] = [f"--y={word}"]
    values["scratch"] = "${HOME}/" + word
    where = cluster_of("hostile", base | values, CLUSTERS)
    (tmp_path / "logs").mkdir()
    path = tmp_path / f"{word}.toml"
    quoted = word.encode("unicode_escape").decode().replace('"', '\\"')
    path.write_text(
        f'question = "{quoted}"\n[slurm]\nenvironment = {{ MINE = "{quoted}" }}\n[[run]]\n'
    )
    study = replace(load_study(path), cluster=where)
    text = script(study, ["ddp"], where)
    assert len(header(text)) == 11  # no value has made a line of its own
    seen = 'printf "%s\\0" "$EVIL" "$NET" "$MINE" "$TRITON_CACHE_DIR" "$@" >"$SEEN"\n'
    tools = {"srun": seen}
    done = run_script(tmp_path, text, tools, SEEN=str(tmp_path / "seen"))
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("pwned"))
    given = (tmp_path / "seen").read_text().split("\0")
    assert given[:4] == [word, word, word, f"/home/me/{word}/triton"]
    assert f"--x={word}" in given and f"--y={word}" in given
    assert given[given.index("--study") + 1] == str(path)
    assert (tmp_path / "logs" / word / "ddp" / "77.exit").read_text() == "0\n"


@pytest.mark.parametrize("there", [True, False])
def test_proof_is_left_when_asked_for_and_a_tool_that_is_absent_is_noted(tmp_path, there):
    path = study_file(tmp_path / "proof.toml", "[[run]]\n")
    study = load_study(path)
    folder = tmp_path / "logs" / "proof" / "ddp"
    tools = {
        "srun": f'printf "%s\\n" "$@" "debug=$TORCH_DISTRIBUTED_DEBUG" "nccl=$NCCL_DEBUG"'
        f' "$NCCL_DEBUG_FILE" "$NCCL_TOPO_DUMP_FILE" >{tmp_path}/seen\n'
        f"if [[ -d {folder}/77.profiles ]]; then\n"
        f"touch {folder}/77.profiles/nsys_77_n1.nsys-rep\nfi",
        "python": '[[ $2 != parallel.record.environment ]] || touch "$3"\n',
    }
    if there:
        tools |= {"nsys": 'echo "$1 of ${2##*/}"', "ibstat": "echo mlx5_0"}
        tools |= {"nvidia-smi": "echo $*"}
    switches = dict.fromkeys(("NSYS", "NCCL_LOGS", "TORCHRUN_LOGS", "DIST_DEBUG"), "1")
    done = run_script(tmp_path, script(study, ["ddp"], study.cluster), tools, **switches)
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
    run_script(tmp_path, script(study, ["ddp"], study.cluster), tools, SLURM_JOB_ID="78")
    seen = (tmp_path / "seen").read_text().splitlines()
    assert "nsys" not in seen and "--log-dir" not in seen and "debug=" in seen
    assert {p.name for p in folder.glob("78.*")} == {
        f"78.{kind}" for kind in "env exit job slurm submitted study.toml clusters.toml".split()
    }


def study_on(tmp_path, **facts):
    """A study of one run, on a cluster with these facts."""
    path = tmp_path / "one.toml"
    path.write_text('question = "?"\n[[run]]\n')
    base = {"description": "x", "gpus_per_node": 2, "cores_per_node": 2}
    return replace(load_study(path), cluster=cluster_of("mine", base | facts, CLUSTERS))


@pytest.mark.parametrize(
    ("facts", "tools", "reason"),
    [
        (
            {"setup": ["module load cuda/12"]},
            {"module": "echo 'Lmod: no such module' >&2; exit 1"},
            "setup: module load cuda/12: status 1: Lmod: no such module",
        ),
        (  # Environment Modules before version 4
            {"setup": ["module load cuda"]},
            {"module": "echo \"x.c(213):ERROR:105: Unable to locate 'cuda'\" >&2"},
            "setup: module load cuda: status 0: x.c(213):ERROR:105: Unable to locate 'cuda'",
        ),
        (
            {"setup": ["module load a", "module load b"]},
            {"module": "[[ $2 == a ]]"},
            "setup: module load b: status 1: ",
        ),
        (
            {"setup": ["source env.sh"]},
            {},
            "setup: source env.sh: status 1: JOB: line 1: env.sh: No",
        ),
        ({"setup": ["exit 0"]}, {}, "setup: exit 0: it ended the job"),
        (
            {"setup": ["true", "cd /nowhere"]},
            {},
            "setup: cd /nowhere: status 1: JOB: line 1: cd: /no",
        ),
        ({"master_addr_suffix": "-ib0"}, {}, "master_addr_suffix: no host is called localhost-ib0"),
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
    done = run_script(tmp_path, script(study, ["ddp"], study.cluster), tools)
    job = str(tmp_path / "job.slurm")
    said = re.sub(rf"{re.escape(job)}: line \d+", "JOB: line 1", done.stdout)
    assert done.returncode == 1 and f"slurm: failed: {reason}" in said, done.stderr
    folder = tmp_path / "logs" / "one" / "ddp"
    assert (folder / "77.exit").read_text() == "1\n" and not (tmp_path / "trained").exists()
    kind, noted = states.read_end(folder, "77")
    assert kind == "refused" and f"slurm: failed: {noted}\n" in done.stdout
    row = states.judge("ddp", folder, 20, states.Job(77, "FAILED", "1:0"), 77)
    assert (row.state, row.line, row.kind) == ("failed", " ".join(noted.split()), "refused")
    if "PYTHON" not in facts.get("environment", {}):
        assert "-m slurm.record_end logs/one/ddp 77 1\n" in (tmp_path / "marked").read_text()


def test_what_the_set_up_sets_stays_and_what_it_says_is_kept(tmp_path):
    lines = [
        "export A=1 B=$UNSET",
        "echo a warning >&2",
        "set -e",
        "false || true",
        "f() { :; }; f",
    ]
    study = study_on(tmp_path, setup=lines)
    tools = {"srun": f'echo "A=$A" >{tmp_path}/seen\nexit 3'}
    done = run_script(tmp_path, script(study, ["ddp"], study.cluster), tools)
    assert (tmp_path / "seen").read_text() == "A=1\n"
    assert done.returncode == 3 and "a warning" in done.stderr
    assert (tmp_path / "logs/one/ddp/77.exit").read_text() == "3\n"  # set -e did not end it before


def test_a_clusters_own_python_runs_the_job(tmp_path):
    (tmp_path / "own").write_text(f'#!/bin/bash\necho "$*" >>{tmp_path}/ran\n')
    (tmp_path / "own").chmod(0o755)
    study = study_on(tmp_path, environment={"PYTHON": str(tmp_path / "own")})
    tools = {"srun": f'printf "%s\n" "$@" >{tmp_path}/seen\n', "python": "exit 9"}
    done = run_script(tmp_path, script(study, ["ddp"], study.cluster), tools)
    assert done.returncode == 0, done.stderr
    assert "parallel.record.environment" in (tmp_path / "ran").read_text()
    assert (tmp_path / "seen").read_text().splitlines().count(str(tmp_path / "own")) == 2


def launch_of(tmp_path, **facts) -> list[str]:
    """What srun is given on a cluster with these facts."""
    study = study_on(tmp_path, **facts)
    tools = {"srun": f'printf "%s\\n" "$@" >{tmp_path}/seen\n'}
    done = run_script(tmp_path, script(study, ["ddp"], study.cluster), tools, SCRATCH="/scratch/me")
    assert done.returncode == 0, done.stderr + done.stdout
    return (tmp_path / "seen").read_text().splitlines()


INSIDE = ["py3", "-m", "slurm.forward_signals", "py3", "-m", "torch.distributed.run"]


@pytest.mark.parametrize("request_", ["gres", "none"])
@pytest.mark.parametrize("runtime", ["apptainer", "pyxis", "charliecloud"])
def test_the_launch_enters_the_container_once_with_all_that_it_needs(tmp_path, runtime, request_):
    image = {"runtime": runtime, "image": "${SCRATCH}/gpt.img", "python": "py3"}
    image["mounts"] = ["/data", "/a b:/b", "${SCRATCH}/x"]
    srun = ["--cpu-bind=cores", "--mpi=none"]
    words = launch_of(tmp_path, container=image, srun=srun, gpu_request=request_)
    here = str(tmp_path)
    bound = [f"{here}:{here}", "/data:/data", "/a b:/b", "/scratch/me/x:/scratch/me/x"]
    start = words.index("--mpi=none") + 1
    assert words[start - 2] == "--cpu-bind=cores"
    entering, inside = words[start : words.index("py3")], words[words.index("py3") :]
    if runtime == "apptainer":
        expected = ["apptainer", "exec", "--pwd", here, *(["--nv"] if request_ == "gres" else [])]
        expected += [word for mount in bound for word in ("--bind", mount)]
        expected += ["/scratch/me/gpt.img"]
    elif runtime == "pyxis":
        expected = ["--container-image=/scratch/me/gpt.img", f"--container-workdir={here}"]
        expected += [f"--container-mounts={','.join(bound)}"]
    else:
        expected = ["ch-run", "--cd", here]
        expected += [word for mount in bound for word in ("--bind", mount)]
        expected += ["/scratch/me/gpt.img", "--"]
    assert entering == expected
    assert [word for word in inside if not word.startswith("--")][: len(INSIDE)] == INSIDE
    assert words.count(expected[0]) == 1 and inside.count("py3") == 2


def test_torchrun_binds_the_ranks_as_the_cluster_asks(tmp_path):
    words = launch_of(tmp_path, torchrun=["--numa-binding=node"])
    assert words.index("torch.distributed.run") < words.index("--numa-binding=node")
    assert words[words.index("--numa-binding=node") + 1 :][:2] == ["-m", "parallel.train"]


def test_a_run_folder_on_another_file_system_is_mounted_too(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "logs").symlink_to(tmp_path / "elsewhere")
    image = {"runtime": "apptainer", "image": "a.sif"}
    words = launch_of(tmp_path / "repository", container=image)
    assert f"{tmp_path}/elsewhere/one/ddp:{tmp_path}/elsewhere/one/ddp" in words


def test_the_signal_comes_when_the_site_wants_it(tmp_path):
    study = study_on(tmp_path, signal_lead_s=300)
    text = script(study, ["ddp"], study.cluster)
    assert "--signal=B:USR1@300\n" in text and "\n  lead=300\n" in text
    study = study_on(tmp_path, signal_lead_s=300, time="00:05:00")
    with pytest.raises(UsageError, match="signal_lead_s 300 is not below the time limit 00:05:00"):
        script(study, ["ddp"], study.cluster)


def test_what_a_sites_module_function_leaves_unset_does_not_end_the_job(tmp_path):
    lines = ['module() { echo "$SITE_HAS_NOT_SET_THIS"; }', "module load cuda"]
    study = study_on(tmp_path, setup=lines)
    text = script(study, ["ddp"], study.cluster)
    assert run_script(tmp_path, text, {"srun": ""}).returncode == 0


def test_a_job_of_another_version_ends_with_one_line(tmp_path):
    study = study_on(tmp_path)
    text = script(study, ["ddp"], study.cluster).replace("\nversion=", "\nversion=9")
    tools = {"srun": f"touch {tmp_path}/trained\n", "python": f'echo "$*" >>{tmp_path}/marked\n'}
    done = run_script(tmp_path, text, tools)
    assert done.returncode == 1 and done.stdout.count("\n") == 1
    assert done.stdout.startswith("slurm: failed: queued with version 9"), done.stdout
    assert "slurm.record_end logs/one/ddp 77 1" in (tmp_path / "marked").read_text()
    assert states.read_end(tmp_path / "logs/one/ddp", "77")[1].startswith("queued with version 9")
    assert (tmp_path / "logs/one/ddp/77.exit").read_text() == "1\n"
    assert not (tmp_path / "trained").exists()


def test_a_script_without_a_run_and_a_setting_that_is_not_known_are_refused(tmp_path):
    done = run_script(tmp_path, (ROOT / "slurm/job.sh").read_text(), {})
    assert done.returncode == 2 and "python -m slurm.submit STUDY" in done.stderr
    study = study_on(tmp_path)
    text = script(study, ["ddp"], study.cluster).replace("  ranks=", "  speed=")
    done = run_script(tmp_path, text, {})
    assert done.returncode == 2 and "knows no setting speed" in done.stderr


def test_an_attempt_keeps_what_it_is_made_of_and_its_script_can_be_submitted_alone(tmp_path):
    """The second job of an array: its copy of the script is the one rendered for it alone."""
    path = study_file(tmp_path / "two.toml", "[[sweep]]\nproduct = { seed = [1, 2] }\n")
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / "code").write_text("one\n")
    for words in (["init", "-q"], ["add", "code"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    (tmp_path / "code").write_text("two\n")
    study = load_study(path)
    names = list(study.settings)
    assert batches(study, names, Path("logs")) == [names]
    array = {"SLURM_ARRAY_JOB_ID": "76", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_NAME": "two"}
    tools = {"srun": "", "scontrol": f'echo "$*" >>{tmp_path}/asked; echo localhost\n'}
    done = run_script(tmp_path, script(study, names, study.cluster), tools, **array)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "logs/two/ddp-seed2"
    kept = {p.name.removeprefix("77."): p.read_text() for p in folder.glob("77.*")}
    assert kept["slurm"] == script(study, ["ddp-seed2"], study.cluster)
    assert kept["study.toml"] == path.read_text()
    assert kept["clusters.toml"] == (ROOT / "slurm/clusters.toml").read_text()
    head = subprocess.run([*git, "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True)
    assert kept["commit"] == head.stdout
    assert "-one\n+two\n" in kept["diff"] and kept["exit"] == "0\n"
    assert json.loads(kept["submitted"])["run"] == "ddp-seed2"
    asked = (tmp_path / "asked").read_text().splitlines()  # a plain 76 would name every job of it
    assert asked[:2] == ["update jobid=76_1 jobname=ddp-seed2", "show job 76_1"]


def test_a_study_script_submits_from_the_root_alone_and_passes_on_what_it_is_given(tmp_path):
    own = str(ROOT / "slurm/layouts.slurm")
    done = subprocess.run(["bash", own], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == "submit from the repository's root\n"
    (tmp_path / "python").write_text('#!/bin/bash\n[[ $1 == -c ]] || printf "%s\\n" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    given = ["slurm/parity.slurm", "--only", "failed"]
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(tmp_path / "python")}
    done = subprocess.run(
        ["bash", own, *given], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["-m", "slurm.submit", "slurm/layouts.toml", *given]
    (tmp_path / "python").write_text("#!/bin/bash\nexit 1\n")  # as one without tomllib
    done = subprocess.run(["bash", own], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "is no Python 3.11 or newer: run make setup" in done.stderr


def test_the_names_or_one_script_are_printed_alone(tmp_path, capsys):
    path = study_file(tmp_path / "few.toml", "[[sweep]]\nproduct = { seed = [1, 2] }\n")
    study = load_study(path)
    assert main([str(path), "--list"]) == 0
    assert capsys.readouterr().out == "ddp-seed1\nddp-seed2\n"
    assert main([str(path), "--run", "ddp-seed2"]) == 0
    assert capsys.readouterr().out == script(study, ["ddp-seed2"], study.cluster)
    assert main([str(path), "--run", "ddp-seed3"]) == 2
    assert "no run 'ddp-seed3'; it has: ddp-seed1, ddp-seed2" in capsys.readouterr().err
    assert not path.with_suffix(".slurm").exists()
    assert main([str(path)]) == 0
    assert path.with_suffix(".slurm").read_text() == study_script(study)


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
            text = script(study, ["ddp"], study.cluster)
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
    study = load_study(ROOT / "slurm/layouts.toml")
    text = script(study, ["ddp"], study.cluster)
    assert "#SBATCH --output=%x-%j.out\n" in text
    done = run_script(tmp_path, text, {})
    assert done.returncode == 2
    assert "not the repository (no slurm/layouts.toml here): submit from its root" in done.stderr


def attempt(tmp_path, restart: int, max_restarts: int = 2):
    """A restart of a job that gains one step and hears of its time limit, as the script runs it."""
    path = study_file(
        tmp_path / "again.toml",
        f"[slurm]\nrequeue = true\nmax_restarts = {max_restarts}\n[[run]]\nsave_interval = 1\n",
    )
    study, folder = load_study(path), tmp_path / "logs" / "again" / "ddp"
    tools = {
        "scontrol": f"[[ $1 != requeue ]] || touch {tmp_path}/requeued\necho localhost\n",
        "srun": f"trap '' USR1\nkill -USR1 $PPID\nsleep 0.2\ntouch {tmp_path}/trained\n"
        f"cd {folder}\necho 1 >steps.csv\n"
        """echo '{"state": "interrupted"}' >status.json\nexit 1\n""",
        "python": f'echo "$*" >>{tmp_path}/marked\n',
    }
    text = script(study, ["ddp"], study.cluster)
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
        assert "slurm.record_end" in (tmp_path / "marked").read_text()


@pytest.mark.parametrize("account", ["", "its@own $(touch pwned)"])
def test_the_others_are_submitted_once_with_the_account_of_the_first(account, tmp_path):
    path = study_file(tmp_path / "list.toml", "[[sweep]]\nproduct = { seed = [1, 2] }\n")
    assert main([str(path), "--out", str(tmp_path / "list")]) == 0
    own, other = (str(tmp_path / "list" / f"ddp-seed{n}.slurm") for n in (1, 2))
    sbatch = f'echo "${{SBATCH_ACCOUNT-none}} ${{SLURM_JOB_ID-none}} $*" >>{tmp_path}/sent\n'
    given = {"SLURM_JOB_ACCOUNT": account, "SLURM_JOB_NAME": "ddp-seed1"}
    tools = {"sbatch": sbatch, "srun": ""}
    said, text = "", Path(own).read_text()
    for _ in range(2):  # a restart does not submit them again
        done = run_script(tmp_path, text, tools, own, other, "gone.slurm", other, **given)
        assert done.returncode == 0, done.stderr
        said += done.stdout
    sent = (tmp_path / "sent").read_text()
    assert sent == f"{account or 'none'} none -- {other} {other}\n"
    assert "slurm: not submitted, no script: gone.slurm" in said
    assert not list(tmp_path.rglob("pwned"))


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
    assert "max_restarts must be at least 0 and at most 1000000, not -1" in capsys.readouterr().err


def test_a_hostile_logs_folder_is_data():
    study = load_study(ROOT / "slurm/layouts.toml")
    text = script(study, ["ddp"], study.cluster, logs=Path("a b\n#SBATCH --nodes=99"))
    assert len(header(text)) == 12 and "--nodes=99" not in header(text)
    settings = text.split("\nsettings=(\n")[1].split("\n)\n")[0]
    values = shlex.split(settings, comments=True)
    assert "study_folder=a b\n#SBATCH --nodes=99/layouts" in values


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
        assert main([str(path), "--out", str(tmp_path / "few"), *dry]) == 2
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1


def test_scripts_of_runs_that_are_gone_are_removed_and_others_kept(tmp_path):
    path = study_file(tmp_path / "few.toml", "[[run]]\ngpus = 1\n")
    folder = tmp_path / "few"
    folder.mkdir()
    (folder / "gone.slurm").write_text(f"{MARK} few.toml\n")
    (folder / "mine.slurm").write_text("my own\n")
    assert main([str(path), "--out", str(folder)]) == 0
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
    assert "likewise 1 more: [[sweep]] 1: nodes 2" in out and not (tmp_path / "few").exists()
    assert main([str(path), "--strict"]) == 2
    out = ["--out", str(tmp_path / "a" / "b")]
    assert main([str(path), *out]) == 0
    script = next((tmp_path / "a" / "b").iterdir())
    gone = script.rename(script.with_name("gone.slurm"))
    for dry, stays in (["--dry-run"], True), ([], False):
        assert main([str(path), *out, *dry]) == 0
        assert gone.exists() is stays and script.exists() is not stays
    path.write_text('question = "?"\n[[run]]\n')
    assert main([str(path)]) == 2
    assert "names no cluster" in capsys.readouterr().err
    assert cluster("dgx-h200").nodes(16) == 2
