"""Rendered scripts: committed as rendered, valid shell, and never run what a value says."""

import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from base.errors import UsageError
from parallel import train
from parallel.config.clusters import CLUSTERS, cluster_of
from parallel.config.resolve import resolve
from parallel.config.run_spec import settings_of
from parallel.config.study import load_study
from parallel.record import facts
from parallel.record.launch import Launch
from slurm import states
from slurm.render import estimate, job_of, main, planned_text, script, seconds, study_script
from tests.conftest import ROOT, study_file

STUDIES = [p for p in sorted((ROOT / "slurm").rglob("*.toml")) if p.name != "clusters.toml"]


@pytest.mark.parametrize("path", STUDIES, ids=lambda p: p.stem)
def test_what_is_committed_is_what_the_study_renders_to(path):
    """And a job's planned run is the run that the study resolves to. The scripts of the published
    studies are written when asked."""
    study = load_study(path)
    if path.parent.name == "slurm":
        assert path.with_suffix(".slurm").read_text() == study_script(study)
    for name, spec in study.specs.items():
        assert resolve(("job", settings_of(json.loads(planned_text(study, name))))) == spec


def test_a_job_trains_the_run_that_was_submitted_whatever_the_study_says_by_then(
    tmp_path, refused, printed
):
    path = study_file(tmp_path / "one.toml", "[[sweep]]\nrepeats = 2\n[defaults]\nsteps = 7\n")
    job, study = tmp_path / "9.submitted", load_study(path)
    job.write_text(planned_text(study, "ddp-r2"))
    path.unlink()
    checked = json.loads(printed(train.main, "--planned", job, "--check"))
    assert (checked["run"], checked["folder"], checked["steps"]) == ("ddp-r2", str(tmp_path), 7)
    launch = Launch(0, 1, 0, 1, "none")
    known = facts.run_facts(study.run("ddp-r2"), launch, json.loads(job.read_text()))
    wanted = {"study": "one", "configuration": "ddp", "repeat": 2, "baseline": "ddp-r1"}
    assert wanted.items() <= known.items()
    assert "is the whole run" in refused(train.main, "--planned", job, "--check", "--steps", "8")
    for there, here, words in (
        ('"tp": 1', '"tp": 2', "world_size 1 in layout is not tp 2 x cp 1"),
        ('"steps": 7, ', "", "is of another version, with other settings (steps)"),
    ):
        (tmp_path / "other").write_text(job.read_text().replace(there, here, 1))
        assert words in refused(train.main, "--planned", tmp_path / "other", "--check")


def test_of_1024_ranks_one_asks_git(tmp_path, monkeypatch):
    def far_enough(*_):
        raise UsageError("far enough")

    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.setattr(train, "set_environment", far_enough)
    for rank, refused in ((1, UsageError), (0, TypeError)):
        with pytest.raises(refused):
            train.train(resolve(), {}, tmp_path, Launch(rank, 1024, rank, 8, "none"), None)


def test_every_script_is_of_a_study_and_passes_shellcheck():
    """Rendered ones differ in their settings alone: one that has every kind of them is checked."""
    own = {path.with_suffix(".slurm") for path in STUDIES if path.parent.name == "slurm"}
    assert set((ROOT / "slurm").glob("*.slurm")) == own
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not here (apt-get install shellcheck)")
    files = [*(ROOT / "slurm").rglob("*.sh"), *sorted(own), "-"]
    study = load_study(ROOT / "slurm/published/gpt2-two-nodes.toml")
    whole = max((script(study, name) for name in study.runs), key=len)
    done = subprocess.run(["shellcheck", *files], input=whole, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[:2000]


TWO = "[[sweep]]\nproduct = { seed = [1, 2] }\n"


def header(text: str) -> list[str]:
    """The options that sbatch finds in a script: of the lines before its first command."""
    lines = text.split("\nsettings=(\n")[0].splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]


def run_script(tmp_path, text: str, tools: dict[str, str], output=subprocess.PIPE, **variables):
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
        ["bash", str(path)],
        cwd=tmp_path,
        env=environment | variables,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
    )


def study_on(tmp_path, study: str = "one", **facts):
    """A study of one run, unless its file says otherwise, on a cluster with these facts."""
    path = tmp_path / f"{study}.toml"
    if not path.exists():
        path.write_text('question = "?"\n[[run]]\n')
    base = {"gpus_per_node": 2, "cores_per_node": 2}
    return replace(load_study(path), cluster=cluster_of("mine", base | facts, CLUSTERS))


def run_on(tmp_path, tools: dict[str, str], variables: dict[str, str] | None = None, **facts):
    """Run the script of a study of one run on a cluster with these facts. What srun is given, one
    word a line, is in `seen`."""
    study = study_on(tmp_path, **facts)
    tools = {"srun": f'printf "%s\\n" "$@" >{tmp_path}/seen\n'} | tools
    return run_script(tmp_path, script(study, "ddp"), tools, **(variables or {}))


def test_ranks_have_the_jobs_environment_where_sbatch_exports_nothing(tmp_path):
    """sbatch --export=NONE sets SLURM_EXPORT_ENV=NONE, by which srun would pass nothing on."""
    tools = {"srun": f"echo $SLURM_EXPORT_ENV $NCCL_SOCKET_IFNAME >{tmp_path}/seen\n"}
    about = {"options": ["--export=NONE"], "environment": {"NCCL_SOCKET_IFNAME": "ib0"}}
    assert run_on(tmp_path, tools, {"SLURM_EXPORT_ENV": "NONE"}, **about).returncode == 0
    assert seen(tmp_path) == ["ALL ib0"]


def seen(tmp_path) -> list[str]:
    return (tmp_path / "seen").read_text().splitlines()


def test_the_header_asks_for_what_the_run_needs(tmp_path):
    run = '[[run]]\nengine = "megatron"\npreset = "1.7b"\ngpus = 8\ntp = 4\nglobal_batch = 8\n'
    path = study_file(tmp_path / "dgx.toml", f'[slurm]\ntime = "00:20:00"\n{run}')
    study = load_study(path, "jean-zay-v100-32g")
    text = script(study, "megatron-tp4-dp2")
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
    assert job_of(study, "megatron-tp4-dp2").gpu_hours == pytest.approx(8 / 3)


def test_a_card_is_asked_for_by_its_name_and_cores_not_where_the_site_takes_none(tmp_path):
    path = tmp_path / "one.toml"
    path.write_text(
        'question = "?"\n[defaults]\ngpus = 2\n[[run]]\nslurm = { gpu_type = "a100" }\n'
        '[[run]]\nlabel = "b"\nslurm = { gpu_type = "h100-80" }\n'
    )

    def asked(name: str, **facts) -> list[str]:
        return header(script(study_on(tmp_path, **facts), name))

    assert {"--gres=gpu:a100:2", "--cpus-per-task=2"} <= set(asked("ddp-dp2"))
    assert "--gres=gpu:h100-80:2" in asked("ddp-dp2-b")
    others = asked("ddp-dp2", gpu_request="gpus-per-node", cpus_per_task=False)
    assert "--gpus-per-node=a100:2" in others and not any("cpus" in line for line in others)
    with pytest.raises(UsageError, match="asks for gpu_type a100, and mine has no GPUs"):
        asked("ddp-dp2", gpu_request="none")
    path.write_text(path.read_text().replace("a100", "a100:4 --x"))
    with pytest.raises(UsageError, match="gpu_type 'a100:4 --x' is not"):
        asked("ddp-dp2")


LEVELS = """question = "?"
[slurm]
account = "study"
qos = "long"
licenses = "matlab:2"
mail_user = "me+jobs@example.org"
mail_type = "END,FAIL"
setup = ["export FROM=study"]
environment = { A = "study", B = "study" }
options = ["--hint=multithread"]
[[run]]
slurm = { account = "run", reservation = "today", setup = ["true"], environment = { B = "run" } }
[[run]]
label = "free"
slurm = { partition = "", memory = "", teardown = ["echo over"], container = %s }
"""


def test_the_later_of_site_study_and_run_wins_and_lists_grow(tmp_path):
    (tmp_path / "one.toml").write_text(LEVELS % '{ command = ["shifter", "--image=a:b"] }')
    site = {"account": "site", "partition": "gpu", "constraint": "a100", "memory": "64G"}
    site |= {"setup": ["module purge"], "environment": {"A": "site", "C": "site"}}
    site |= {"options": ["--hint=nomultithread", "--exclusive"], "container": {}}
    site["container"] = {"runtime": "singularity", "image": "a.sif"}
    study = study_on(tmp_path, **site)
    ddp, free = script(study, "ddp"), script(study, "ddp-free")
    assert header(ddp)[2:14] == [
        "--account=run",
        "--partition=gpu",
        "--qos=long",
        "--constraint=a100",
        "--reservation=today",
        "--licenses=matlab:2",
        "--mail-user=me+jobs@example.org",
        "--mail-type=END,FAIL",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
        "--gres=gpu:1",
    ]
    assert ddp.count("--hint=") == 1 and {"--hint=multithread", "--exclusive"} <= {*header(ddp)}
    settings = ddp.split("settings=(\n")[1].split("\n)\n")[0]
    lines = [line.strip(" '") for line in settings.splitlines()]
    assert [line for line in lines if line.startswith("setup=")] == [
        "setup=module purge",
        "setup=export FROM=study",
        "setup=true",
    ]
    assert {"export=A=study", "export=B=run", "export=C=site"} <= set(lines)
    assert "--account=study" in header(free)
    assert not any(option.startswith(("--partition", "--mem=")) for option in header(free))
    assert "\n  container_runtime=singularity\n" in ddp and "\n  container_runtime=" not in free
    words = ("'teardown=echo over'", "container_command=shifter", "container_command=--image=a:b")
    assert all(f"\n  {word}\n" in free for word in words)


@pytest.mark.parametrize("level", ["[slurm]", "[[run]]\n[run.slurm]", "[defaults.slurm]"])
@pytest.mark.parametrize("name", ["account", "mail_user", "licenses", "reservation"])
def test_a_text_of_a_study_makes_no_line_of_a_script(tmp_path, name, level, refused):
    head = "question = '?'\ncluster = 'local-test'\n"
    last = "" if "run" in level else "[[run]]\n"
    path = tmp_path / "one.toml"
    path.write_text(f'{head}{level}\n{name} = "x\\n#SBATCH --nodes=9"\n{last}')
    line = refused(main, str(path), "--run-name", "ddp")
    assert f"{name} 'x\\n#SBATCH --nodes=9' is not what an #SBATCH line can hold" in line


def test_the_gpus_of_a_job_are_asked_for_in_the_words_of_the_site(tmp_path):
    (tmp_path / "one.toml").write_text('question = "?"\n[[run]]\ngpus = 4\nglobal_batch = 4\n')

    def asked(**facts) -> list[str]:
        return [option for option in header(script(study_on(tmp_path, **facts), "ddp-dp4"))]

    assert "--gpus=4" in asked(gpu_request="gpus")
    assert "--gpus=h100:4" in asked(gpu_request="gpus", gpu_type="h100")
    assert "--gpus-per-node=a100:2" in asked(gpu_request="gpus-per-node", gpu_type="a100")
    assert "--gres=gpu:h100:2" in asked(gpu_type="h100")
    assert "--clusters=second" in asked(slurm_cluster="second")


@pytest.mark.parametrize(
    ("key", "option", "own"),
    [
        ("options", "--nodes=7", "--nodes=1"),
        ("options", "-N7", "--nodes=1"),
        ("options", "--output=mine", "--output=%x-%j.out"),
        ("options", "--out=mine", "--output=%x-%j.out"),
        ("options", "-o/dev/null", "--output=%x-%j.out"),
        ("options", "--error=mine", "--error=%x-%j.out"),
        ("options", "--ntasks=4", "--ntasks-per-node=1"),
        ("options", "--time=99", "--time=01:00:00"),
        ("options", "--requeue", "--no-requeue"),
        ("options", "--array=1-4", "--array (none)"),
        ("options", "-pother", "--partition=mine"),
        ("srun", "--ntasks=4", "--ntasks"),
        ("srun", "-n4", "--ntasks"),
        ("torchrun", "--nproc_per_node=4", "--nproc-per-node"),
    ],
)
def test_an_option_of_a_cluster_that_contradicts_a_jobs_own_is_refused(tmp_path, key, option, own):
    study = study_on(tmp_path, **{key: [option]}, partition="mine")
    with pytest.raises(UsageError) as refused:
        estimate(study, ["ddp"])
    assert f"option {option} contradicts {own}, which each job gives" in str(refused.value)


def test_other_options_of_a_cluster_stand_in_the_script_and_its_commands(tmp_path):
    options = ["--exclusive", "--export=NONE", "--no-kill", "--mem-per-cpu=2G", "--no-requeue"]
    options += ["--partition=mine", "--nodelist=n1", "--wait-all-nodes=1", "-xn3"]
    study = study_on(tmp_path, options=options, srun=["--no-kill", "--cpu-bind=none", "--mpi=none"])
    assert set(options) <= set(header(script(study, "ddp")))


def test_the_step_asks_for_cores_where_the_job_did(tmp_path):
    for variables, options in (({}, []), ({"SLURM_CPUS_PER_TASK": "6"}, ["--cpus-per-task=6"])):
        run_on(tmp_path, {}, variables, cpus_per_task=False)
        assert [word for word in seen(tmp_path) if "cpus" in word] == options
        assert "" not in seen(tmp_path) and "--kill-on-bad-exit=1" in seen(tmp_path)


def test_lines_after_the_run_see_how_it_ended(tmp_path):
    lines = [f'cp "$folder/77.exit" {tmp_path}/copied', "false # copy: it's gone", "echo $UNSET x"]
    done = run_on(tmp_path, {"srun": "exit 3"}, teardown=lines)
    assert (tmp_path / "copied").read_text() == "3\n" and done.returncode == 3
    failed = "slurm: after the run: false # copy: it's gone: status 1\n"
    assert failed in done.stdout and done.stdout.endswith("x\n")


SECRETS = """
[mine]
description = "x"
gpus_per_node = 2
cores_per_node = 2
setup = [
    "export HF_HUB_TOKEN=hunter2a A=1", 'curl -H "Authorization: Bearer hunter2b" x', "echo a@b"
]
[mine.environment]
WANDB_API_KEY = "hunter2c"
NCCL_DEBUG = "INFO"
https_proxy = "http://me:hunter2d@proxy:3128"
"""


def test_what_is_archived_of_a_secretive_cluster_is_whole_private_and_hides_them(tmp_path):
    clusters = tmp_path / "clusters.toml"
    clusters.write_text(SECRETS)
    facts = tomllib.loads(SECRETS)["mine"]
    study = replace(study_on(tmp_path), cluster=cluster_of("mine", facts, clusters))
    text = script(study, "ddp")
    real = f'[[ $* != *record.environment* ]] || PYTHONPATH={ROOT} exec {sys.executable} "$@"\n'
    folder = tmp_path / "logs/one/ddp"
    folder.mkdir(parents=True)
    (folder / "77.slurm").touch(0o644)  # of an attempt before
    tools = {"srun": f'echo "$WANDB_API_KEY" >{tmp_path}/seen', "python": real, "curl": ""}
    done = run_script(tmp_path, text, tools)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "seen").read_text() == "hunter2c\n"
    kept = [folder / f"77.{name}" for name in ("slurm", "clusters.toml", "study.toml", "env")]
    assert {path.stat().st_mode & 0o777 for path in kept} == {0o600}
    assert "hunter2" in text and not any("hunter2" in p.read_text() for p in folder.glob("77.*"))
    there = tomllib.loads(kept[1].read_text())["mine"]
    assert there["environment"] == {
        "WANDB_API_KEY": "***",
        "NCCL_DEBUG": "INFO",
        "https_proxy": "http://***@proxy:3128",
    }
    assert there["setup"][2] == "echo a@b" and there["setup"][0].endswith("=*** A=1")
    archived = kept[0].read_text()
    assert archived.count("\n") == text.count("\n")
    assert archived.split("\n)\n", 1)[1] == text.split("\n)\n", 1)[1]  # job.sh is as it was


HOSTILE = ["a b", "it's", 'say "x"', "$(touch pwned)", "`touch pwned`", "a\ntouch pwned"]
HOSTILE += ["; touch pwned", "*"]


@pytest.mark.parametrize("word", HOSTILE)
def test_no_value_ever_runs(tmp_path, word):
    """Run the script up to srun, for which a harmless stand-in is put in the path."""
    quoted = word.encode("unicode_escape").decode().replace('"', '\\"')
    (tmp_path / f"{word}.toml").write_text(
        f'question = "{quoted}"\n[slurm]\nenvironment = {{ MINE = "{quoted}" }}\n[[run]]\n'
    )
    values = {"environment": {"EVIL": word}, "srun": [f"--x={word}"], "description": word}
    values |= {"torchrun": [f"--y={word}"], "scratch": "${HOME}/" + word}
    study = study_on(tmp_path, word, **values)
    text = script(study, "ddp")
    assert len(header(text)) == 11  # no value has made a line of its own
    tools = {"srun": 'printf "%s\\0" "$EVIL" "$MINE" "$TRITON_CACHE_DIR" "$@" >"$SEEN"\n'}
    done = run_script(tmp_path, text, tools, SEEN=str(tmp_path / "seen"))
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("pwned"))
    given = (tmp_path / "seen").read_text().split("\0")
    assert given[:3] == [word, word, f"/home/me/{word}/triton"]
    assert f"--x={word}" in given and f"--y={word}" in given
    planned = Path(given[given.index("--planned") + 1])
    assert json.loads((tmp_path / planned).read_text())["study"] == word
    assert (tmp_path / "logs" / word / "ddp" / "77.exit").read_text() == "0\n"


@pytest.mark.parametrize("there", [True, False])
def test_proof_is_left_when_asked_for_and_a_tool_that_is_absent_is_noted(tmp_path, there):
    folder = tmp_path / "logs/one/ddp"
    tools = {
        "srun": f'printf "%s\\n" "$@" "nccl=$NCCL_DEBUG" "$NCCL_DEBUG_FILE" >{tmp_path}/seen\n'
        f"[[ ! -d {folder}/77.profiles ]] || touch {folder}/77.profiles/nsys_77_n1.nsys-rep\n"
    }
    if there:
        tools["nsys"] = 'echo "$1 of ${2##*/}"'
    switches = dict.fromkeys(("NSYS", "NCCL_LOGS", "TORCHRUN_LOGS"), "1")
    done = run_on(tmp_path, tools, switches)
    assert done.returncode == 0, done.stderr
    words = seen(tmp_path)
    assert words[words.index("--log-dir") + 1] == "logs/one/ddp/77.torchrun"
    nccl_log = f"{folder}/77.nccl/nccl_rank_%h_%p.log"
    assert {"nccl=INFO", nccl_log} <= set(words)
    assert ("nsys" in words) is there
    skipped = [line for line in done.stdout.splitlines() if line.startswith("slurm: skipped")]
    assert len(skipped) == (not there)
    left = {p.name: p.read_text() for p in folder.glob("77.*/*.txt")}
    assert left == ({"nsys_77_n1.txt": "stats of nsys_77_n1.nsys-rep\n"} if there else {})
    run_on(tmp_path, tools, {"SLURM_JOB_ID": "78"})
    words = seen(tmp_path)
    assert "nsys" not in words and "--log-dir" not in words and "nccl=" in words


SET_UPS_THAT_FAIL = [
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
    ({"setup": ["exit 0"]}, {}, "setup: exit 0: it ended the job"),
    ({"setup": ["true", "cd /no"]}, {}, "setup: cd /no: status 1: JOB: line 1: cd: /no"),
    ({"master_addr_suffix": "-ib0"}, {}, "master_addr_suffix: no host is called localhost-ib0"),
    ({"environment": {"UID": "x"}}, {}, "export UID: not possible"),
    ({"scratch": "${NOWHERE}/x"}, {}, "scratch: NOWHERE is not set"),
    ({"environment": {"PYTHON": "/no/it"}}, {}, "no working Python: /no/it ended with status 127"),
]


@pytest.mark.parametrize(("facts", "tools", "reason"), SET_UPS_THAT_FAIL)
def test_a_set_up_that_fails_ends_the_job_with_its_reason(tmp_path, facts, tools, reason):
    marks = {"srun": f"touch {tmp_path}/trained\n", "python": f'echo "$*" >>{tmp_path}/marked\n'}
    done = run_on(tmp_path, tools | marks, **facts)
    assert done.returncode == 1 and not (tmp_path / "trained").exists(), done.stderr
    folder = tmp_path / "logs" / "one" / "ddp"
    end = states.read_end(folder, "77")
    job = re.escape(str(tmp_path / "job.slurm"))
    assert re.sub(rf"{job}: line \d+", "JOB: line 1", end.reason).startswith(reason)
    assert end.kind == "refused" and f"slurm: failed: {end.reason}\n" in done.stdout
    assert (folder / "77.exit").read_text() == "1\n"
    if "PYTHON" not in facts.get("environment", {}):
        assert "-m slurm.record_end logs/one/ddp 77 1\n" in (tmp_path / "marked").read_text()


def test_what_the_set_up_sets_stays_and_what_it_leaves_unset_does_not_end_the_job(tmp_path):
    """A cluster's own Python runs the job."""
    lines = ["export A=1 B=$UNSET", "echo a warning >&2", "set -e", "false || true"]
    lines += ['module() { echo "$SITE_HAS_NOT_SET_THIS"; }', "module load cuda"]
    own = tmp_path / "bin" / "own"
    tools = {"srun": f'echo "A=$A" "$@" >{tmp_path}/seen\nexit 3', "python": "exit 9", "own": ""}
    done = run_on(tmp_path, tools, setup=lines, environment={"PYTHON": str(own)})
    (words,) = seen(tmp_path)
    assert words.startswith("A=1 ") and words.count(f" {own} -m") == 2
    assert done.returncode == 3 and "a warning" in done.stdout
    assert (tmp_path / "logs/one/ddp/77.exit").read_text() == "3\n"  # set -e did not end it before


@pytest.mark.parametrize("request_", ["gres", "none"])
@pytest.mark.parametrize("runtime", ["apptainer", "singularity", "pyxis", "charliecloud"])
def test_the_launch_enters_the_container_once_with_all_that_it_needs(tmp_path, runtime, request_):
    """The study's folder is on another file system, which is mounted, too."""
    here, elsewhere = tmp_path / "repository", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    (here / "logs").symlink_to(elsewhere)
    container = {"runtime": runtime, "image": "${SCRATCH}/gpt.img", "python": "py3"}
    container["mounts"] = ["/data", "/a b:/b", "${SCRATCH}/x"]
    facts = {"srun": ["--cpu-bind=cores"], "torchrun": ["--numa-binding=node"]}
    facts |= {"container": container, "gpu_request": request_}
    assert run_on(here, {}, {"SCRATCH": "/scratch/me"}, **facts).returncode == 0
    words = seen(here)
    bound = [f"{here}:{here}", f"{elsewhere}/one:{elsewhere}/one"]
    bound += ["/data:/data", "/a b:/b", "/scratch/me/x:/scratch/me/x"]
    binds = [word for mount in bound for word in ("--bind", mount)]
    image, nvidia = "/scratch/me/gpt.img", ["--nv"] if request_ == "gres" else []
    expected = {
        "apptainer": ["apptainer", "exec", "--pwd", str(here), *nvidia, *binds, image],
        "singularity": ["singularity", "exec", "--pwd", str(here), *nvidia, *binds, image],
        "pyxis": [
            *(f"--container-image={image}", f"--container-workdir={here}"),
            f"--container-mounts={','.join(bound)}",
        ],
        "charliecloud": ["ch-run", "--cd", str(here), *binds, image, "--"],
    }[runtime]
    start, inside = words.index("--cpu-bind=cores") + 1, words.index("py3")
    assert words[start:inside] == expected
    launch = [word for word in words[inside:] if not word.startswith("--")]
    assert launch[:6] == "py3 -m slurm.forward_signals py3 -m torch.distributed.run".split()
    assert words[words.index("--numa-binding=node") + 1 :][:2] == ["-m", "parallel.train"]
    assert "--monitor-interval=1" in words[: words.index("--numa-binding=node")]  # the site's wins


def test_a_container_starts_in_the_sites_own_words(tmp_path):
    words = ["podman-hpc", "run", "--volume=${PWD}:${PWD}", "--workdir=${PWD}", "${WORK}/a b"]
    about = {"container": {"command": words, "python": "py3"}}
    assert run_on(tmp_path, {}, {"WORK": "/w"}, **about).returncode == 0
    given = seen(tmp_path)
    start = given.index("podman-hpc")
    assert given[start + 2 : start + 6] == [
        f"--volume={tmp_path}:{tmp_path}",
        f"--workdir={tmp_path}",
        "/w/a b",
        "py3",
    ]
    assert run_on(tmp_path, {}, {"SLURM_JOB_ID": "78"}, **about).returncode == 1
    reason = states.read_end(tmp_path / "logs/one/ddp", "78").reason
    assert reason == "container command: WORK is not set"


def test_ranks_may_start_from_a_copy_of_their_environment_on_each_node(tmp_path, tmp_path_factory):
    """The stand-ins of sbcast and srun work on this node."""
    home = tmp_path_factory.mktemp("python")
    (home / "bin").mkdir()
    (home / "bin" / "python").symlink_to("/bin/true")
    tar = tmp_path / "gpt.tar"
    subprocess.run(["tar", "-C", home, "-cf", tar, "."], check=True)
    srun = f'while [[ $1 == --* ]]; do shift; done; echo $* >>{tmp_path}/steps; "$@"\n'
    tools = {"sbcast": 'cp -- "$2" "$3"\n', "srun": srun}
    facts, variables = {"environment_tar": "${WORK}/gpt.tar"}, {"SLURMD_NODENAME": "n1"}
    done = run_on(tmp_path, tools, variables | {"WORK": str(tmp_path)}, **facts)
    assert done.returncode == 0, done.stdout
    copy = "/tmp/gpt-environment-77.0"
    unpack, train, remove = (tmp_path / "steps").read_text().splitlines()
    assert train.startswith(f"{copy}/bin/python -m slurm.forward_signals {copy}/bin/python -m ")
    assert unpack.startswith("bash -c ") and remove == f"rm -rf {copy} {copy}.tar"
    assert not glob.glob(f"{copy}*")
    tar.unlink()
    assert run_on(tmp_path, tools, variables | {"WORK": str(tmp_path)}, **facts).returncode == 1
    assert "environment_tar: sbcast" in states.read_end(tmp_path / "logs/one/ddp", "77").reason
    container = {"runtime": "apptainer", "image": "x.sif"}
    with pytest.raises(UsageError, match="environment_tar and container"):
        study_on(tmp_path, **facts, container=container)


def test_the_signal_comes_when_the_site_wants_it(tmp_path):
    text = script(study_on(tmp_path, signal_lead_s=300), "ddp")
    assert "--signal=B:USR1@300\n" in text and "\n  lead=300\n" in text
    with pytest.raises(UsageError, match="signal_lead_s 300, not below the time limit 00:05:00"):
        script(study_on(tmp_path, signal_lead_s=300, time="00:05:00"), "ddp")


@pytest.mark.parametrize("stopped", [False, True])
def test_a_preflight_comes_first_and_does_not_keep_a_run_from_training(tmp_path, stopped):
    study = study_on(tmp_path)
    text = script(study, "ddp")
    assert "\n  preflight=0\n" in text
    stop = "trap '' TERM; kill -TERM $PPID; sleep 1; exit 0\n" if stopped else ""
    tools = {"srun": f'echo "$*" >>{tmp_path}/steps\n{stop}[[ "$*" != *parallel.bench* ]]\n'}
    done = run_script(tmp_path, text.replace("preflight=0", "preflight=1", 1), tools)
    steps = (tmp_path / "steps").read_text().splitlines()
    assert steps[0].endswith(" -m parallel.bench logs/one/ddp")
    assert [" -m parallel.train " in step for step in steps] == [False, True][: 2 - stopped]
    status = (tmp_path / "logs/one/ddp/77.exit").read_text()
    assert (status == "0\n") is not stopped and done.returncode == int(status)


def test_a_job_of_another_version_ends_with_one_line(tmp_path):
    text = script(study_on(tmp_path), "ddp").replace("\nversion=", "\nversion=9")
    tools = {"srun": f"touch {tmp_path}/trained\n", "python": f'echo "$*" >>{tmp_path}/marked\n'}
    done = run_script(tmp_path, text, tools)
    assert done.returncode == 1 and done.stdout.count("\n") == 1
    assert "slurm.record_end logs/one/ddp 77 1" in (tmp_path / "marked").read_text()
    end = states.read_end(tmp_path / "logs/one/ddp", "77")
    assert end.reason.startswith("queued with version 9")
    assert not (tmp_path / "trained").exists()


def test_a_script_without_a_run_and_a_setting_that_is_not_known_are_refused(tmp_path):
    unknown = script(study_on(tmp_path), "ddp").replace("  ranks=", "  speed=")
    without = (ROOT / "slurm/job.sh").read_text()
    for text, words in ((unknown, "knows no setting speed"), (without, "slurm.submit STUDY")):
        done = run_script(tmp_path, text, {})
        assert done.returncode == 2 and words in done.stdout


def test_an_attempt_keeps_what_it_is_made_of_and_its_script_can_be_submitted_alone(tmp_path):
    path = study_file(tmp_path / "two.toml", TWO)
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / "code").write_text("one\r\n")
    for words in (["init", "-q"], ["add", "code"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    (tmp_path / "code").write_text('two\r\ntoken = "hunter2"\n')
    study = load_study(path)
    tools = {"srun": "", "scontrol": f'echo "$*" >>{tmp_path}/asked; echo localhost\n'}
    tools["python"] = f'[[ $2 != parallel.record.* ]] || exec {sys.executable} "$@"\n'
    variables = {"PYTHONPATH": str(ROOT)}
    done = run_script(tmp_path, script(study, "ddp-seed2"), tools, **variables)
    assert done.returncode == 0, done.stdout
    folder = tmp_path / "logs/two/ddp-seed2"
    kept = {p.name.removeprefix("77."): p.read_bytes().decode() for p in folder.glob("77.*")}
    assert kept["slurm"] == script(study, "ddp-seed2")
    assert kept["study.toml"] == path.read_text()
    assert kept["clusters.toml"] == (ROOT / "slurm/clusters.toml").read_text()
    head = subprocess.run([*git, "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True)
    assert kept["commit"] == head.stdout
    assert '-one\r\n+two\r\n+token = "***"\n' in kept["diff"] and kept["exit"] == "0\n"
    for name in ("slurm", "study.toml", "clusters.toml", "diff", "env"):
        assert (folder / f"77.{name}").stat().st_mode & 0o077 == 0, name  # its owner's alone
    assert json.loads(kept["submitted"])["run"] == "ddp-seed2"
    assert (tmp_path / "asked").read_text().startswith("show job 77\n")


def test_the_names_or_one_script_are_printed_alone(tmp_path, printed):
    path = study_file(tmp_path / "few.toml", TWO)
    study = load_study(path)
    for flags, status, text in (
        (["--list"], 0, "ddp-seed1\nddp-seed2\n"),
        (["--run", "ddp-seed2"], 0, script(study, "ddp-seed2")),
        (["--run", "ddp-seed3"], 2, ""),
    ):
        assert printed(main, path, *flags, status=status) == text
    assert not path.with_suffix(".slurm").exists()
    assert main([str(path)]) == 0
    assert path.with_suffix(".slurm").read_text() == study_script(study)


@pytest.mark.parametrize(
    ("restart", "max_restarts", "happens"),
    [
        (1, 2, ["trained", "requeued"]),
        (2, 2, ["trained"]),
        (3, 2, []),  # Slurm's own, for a lost node
        (0, 0, ["trained"]),
    ],
)
def test_a_run_that_gains_a_step_per_time_limit_is_not_restarted_for_ever(
    restart, max_restarts, happens, tmp_path
):
    """Each restart of the job gains one step and hears of its time limit."""
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
    text = script(study, "ddp")
    done = run_script(tmp_path, text, tools, SLURM_RESTART_COUNT=str(restart))
    assert done.returncode == 75, done.stdout
    assert [name for name in ("trained", "requeued") if (tmp_path / name).exists()] == happens
    assert (f"restarted {max_restarts} times already" in done.stdout) is ("requeued" not in happens)
    if not happens:
        assert "slurm.record_end" in (tmp_path / "marked").read_text()


def test_time_limits_are_read_as_slurm_reads_them():
    limits = {"90": 5400, "10:30": 630, "01:00:00": 3600, "1-12": 129600, "2-01:30:00": 178200}
    assert {limit: seconds(limit) for limit in limits} == limits
    for limit in ("soon", "1:2:3:4", "", "99:99:99", "00:60:00", "1:99", "1-2:60"):
        with pytest.raises(UsageError, match="time limit"):
            seconds(limit)


def test_a_study_script_submits_from_the_root_alone_and_passes_on_what_it_is_given(tmp_path):
    python = tmp_path / "python"
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(python)}
    given = ["slurm/parity.slurm", "--only", "failed"]

    def submit(folder, body: str) -> tuple[int, str]:
        python.write_text(f"#!/bin/bash\n{body}\n")
        python.chmod(0o755)
        command = ["bash", str(ROOT / "slurm/layouts.slurm"), *given]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    assert submit(tmp_path, "exit 0") == (2, "submit from the repository's root\n")
    status, printed = submit(ROOT, '[[ $1 == -c ]] || printf "%s\\n" "$@"')
    assert printed.splitlines() == ["-m", "slurm.submit", "slurm/layouts.toml", *given]
    status, printed = submit(ROOT, "exit 1")  # as one without tomllib
    assert status == 2 and "is no Python 3.11 or newer: run make setup" in printed


@pytest.mark.parametrize("end", ["fails", "is skipped", "is killed"])
@pytest.mark.parametrize("elsewhere", [True, False])
def test_the_jobs_log_is_never_lost(tmp_path, elsewhere, end):
    """As Slurm does, write to a log that was opened in the submit folder; the run folder may lie
    on another file system, where what is moved is copied."""
    shm = Path("/dev/shm")
    if elsewhere and (not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev):
        pytest.skip("there is no second file system here")
    study = study_on(tmp_path, **({"scratch": "${NOWHERE}"} if end == "fails" else {}))
    tools = {"srun": "echo trained\n" + ("kill -9 $PPID\n" if end == "is killed" else "")}
    if end == "is skipped":
        tools["squeue"] = f'echo "70|one|{tmp_path}"'
    with tempfile.TemporaryDirectory(dir=shm if elsewhere else tmp_path) as place:
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "one").symlink_to(place)
        with (tmp_path / "ddp-77.out").open("a") as log:
            print("before", file=log, flush=True)
            run_script(tmp_path, script(study, "ddp"), tools, output=log)
            print("after", file=log, flush=True)  # slurmstepd's word
        name, word = {
            "fails": ("77.out", "slurm: failed: scratch: NOWHERE is not set"),
            "is skipped": ("77.skipped", "slurm: not run: job 70 is running it"),
            "is killed": ("77.out", "trained"),
        }[end]
        text = (tmp_path / "logs" / "one" / "ddp" / name).read_text()
        assert text.startswith("before\n") and word in text
        assert text.endswith("after\n") or (elsewhere and end != "is killed")
        left = [p.name for p in tmp_path.glob("*.out")]  # what a killed script could not copy
        assert left == ([".ddp-77.out"] if elsewhere and end == "is killed" else [])


@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_a_dry_run_refuses_what_the_real_one_refuses(dry, tmp_path, refused):
    for text, words in (
        ('memory = "1 G"', "memory '1 G' is not what an #SBATCH line can hold"),
        ('options = ["-A", "me"]', "options 'me' is not an option of sbatch"),
        ("max_restarts = -1", "max_restarts must be at"),
        ("requeue = true", "ddp asks for requeue without save_interval"),
    ):
        path = study_file(tmp_path / "few.toml", f"[slurm]\n{text}\n[[run]]\n")
        assert words in refused(main, path, *dry)


def test_dry_run_writes_nothing_and_says_what_it_costs(tmp_path, refused, printed):
    path = tmp_path / "few.toml"
    text = "[slurm]\ntime = '02:00:00'\nrequeue = true\n[defaults]\nsave_interval = 5\n[[sweep]]\n"
    text += "product = { nodes = [1, 2], tp = [1, 3] }\ndefaults = { engine = 'megatron' }\n"
    study_file(path, text)
    out = printed(main, path, "--dry-run", "--cluster", "dgx-h200")
    assert "2 runs on dgx-h200: 192.00 GPU-hours at worst" in out  # of four attempts each
    assert "likewise 1 more: [[sweep]] 1: nodes 2" in out
    assert list(tmp_path.iterdir()) == [path]
    path.write_text('question = "?"\n[[run]]\n')
    assert "names no cluster" in refused(main, path)
