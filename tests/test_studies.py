"""A study's axes, branches and names; what cannot run is left out with its reasons."""

import re
import tomllib
from dataclasses import fields

import pytest

from base.errors import UsageError, by_reason
from parallel.config import clusters
from parallel.config.resolve import resolve
from parallel.config.study import load_study, name_without_study
from tests.conftest import ROOT

HEAD = 'question = "which?"\ncluster = "local-test"\n[defaults]\npreset = "tiny"\n'


def study_of(tmp_path, text: str, head: str = HEAD, **how):
    path = tmp_path / "grid.toml"
    path.write_text(head + text)
    return load_study(path, **how)


def test_a_sweep_is_every_combination_of_product_and_zip(tmp_path):
    text = """[[sweep]]
    defaults = { engine = "megatron", grad_accum = 2 }
    product = { tp = [1, 2], micro_batch = [1, 2] }
    zip = { nodes = [1, 2], pp = [1, 2] }
    """
    study = study_of(tmp_path, text)
    splits = ("-mbs1", "-pp2-mbs1", "-mbs2", "-pp2-mbs2")
    assert list(study.runs) == [f"megatron{tp}{rest}" for tp in ("", "-tp2") for rest in splits]
    spec = study.run("megatron-tp2-pp2-mbs2")
    assert (spec.gpus, spec.layout.dp, spec.global_batch) == (4, 1, 4)


def test_includes_branches_and_repeats(tmp_path):
    text = """[[sweep]]
    product = { engine = ["ddp", "megatron"] }
    include = [{ engine = "megatron", gpus = 2, tp = 2 }]
    [[sweep]]
    repeats = 2
    defaults = { engine = "deepspeed_zero", zero_stage = 3, steps = 7 }
    slurm = { time = "00:02:00" }
    """
    study = study_of(tmp_path, text)
    zero = [f"deepspeed-zero-zero3-r{repeat}" for repeat in (1, 2)]
    assert list(study.runs) == ["ddp", "megatron", "megatron-tp2", *zero]
    assert study.run(zero[1]).steps == 7
    ((_, table),) = study.runs[zero[0]].slurm
    assert table == {"time": "00:02:00"} and study.runs["ddp"].slurm == []


def test_names_say_what_tells_runs_apart_and_nothing_else(tmp_path):
    text = """[[sweep]]
    product = { global_batch = [8, 16], micro_batch = [2] }
    include = [{ grad_accum = 32, global_batch = 32, n_layer = 6, hidden = 64 }]
    [[sweep]]
    defaults = { global_batch = 8, micro_batch = 2, label = "again" }
    """
    names = "ddp-mbs2-gbs8 ddp-mbs2-gbs16 ddp-layers6-hidden64-mbs1-gbs32 ddp-mbs2-gbs8-again"
    assert list(study_of(tmp_path, text).runs) == names.split()


IMPOSSIBLE = """[[sweep]]
defaults = { engine = "megatron" }
product = { tp = [1, 3, 4], gpus = [2, 4, 6] }
"""


def test_an_impossible_point_is_left_out_with_every_reason(tmp_path):
    study = study_of(tmp_path, IMPOSSIBLE)
    assert list(study.runs) == ["megatron-dp2", "megatron-dp4", "megatron-dp6"]
    reasons = dict(study.left_out)
    assert "tp 3 does not divide the 4 attention heads" in reasons["[[sweep]] 1: tp 3, gpus 6"]
    assert "tp 4 exceeds the 2 GPUs of a node" in reasons["[[sweep]] 1: tp 4, gpus 4"]
    assert "2 ranks cannot be split into tp 4" in reasons["[[sweep]] 1: tp 4, gpus 2"]
    lines = by_reason(study.left_out)
    assert len(lines) == 3 and "; likewise 3 more: [[sweep]] 1: tp 3, gpus 4; [[" in lines[0]
    with pytest.raises(UsageError, match="none of its 3 points can run on local-test: .*tp 3"):
        study_of(tmp_path, IMPOSSIBLE.replace("[1, 3, 4]", "[3]"))


def test_tp_is_larger_than_a_node_only_where_the_study_asks_for_it(tmp_path):
    wide = "[[run]]\nengine = 'megatron'\ngpus = 4\ntp = 4\n"
    with pytest.raises(UsageError, match="tp 4 exceeds the 2 GPUs of a node"):
        study_of(tmp_path, wide)
    assert list(study_of(tmp_path, f"[slurm]\ntp_across_nodes = true\n{wide}").runs) == [
        "megatron-tp4"
    ]


def test_a_cluster_bounds_what_can_be_placed(tmp_path):
    dgx = 'question = "which?"\n[defaults]\npreset = "tiny"\n'
    text = "[[sweep]]\nproduct = { gpus = [2, 12, 16] }"
    study = study_of(tmp_path, text, dgx, cluster="dgx-a100")
    assert list(study.runs) == ["ddp-dp2", "ddp-dp16"]
    assert study.left_out[0][1] == "12 GPUs do not fill whole nodes of 8"
    with pytest.raises(UsageError, match="nodes needs a cluster"):
        study_of(tmp_path, "[[sweep]]\nproduct = { nodes = [1] }", dgx)


def test_a_mistake_is_never_taken_for_an_impossible_point(tmp_path):
    for text, words in (
        ("[[sweep]]\nproduct = { tpp = [1] }", "unknown setting 'tpp'"),
        ("[[sweep]]\nproduct = { preset = ['gpt5'] }", "unknown preset 'gpt5'"),
        ("[[sweep]]\nproduct = { tp = 2 }", "product tp must be a list"),
        ("[[sweep]]\nzip = { tp = [1, 2], gpus = [1] }", "zip's lists differ in length"),
        ("[[sweep]]\nproduct = { tp = [1] }\nzip = { tp = [1] }", "tp in both product and zip"),
        ("[[sweep]]\nrepeats = 0", "repeats must be at least 1 .* not 0"),
        ("[[sweep]]\nproduct = { gpus = [1, 1] }", "a second run called ddp"),
        ("[[sweep]]\ndefaults = { label = 'a b' }", "label 'a b' is not a word"),
        ("[[run]]\n[walltime]", "unknown walltime; known: question, baseline, cluster, "),
        ("[[run]]\nrepeats = 3", r"\[\[run\]\] 1: repeats belongs to a \[\[sweep\]\]"),
        ("[[sweep]]\ndefaults = { zip = {} }", r"1 defaults: zip belongs to a \[\[sweep\]\]"),
        (
            "[[sweep]]\nlabel = 'x'",
            r"\[\[sweep\]\] 1: label belongs to \[defaults\], a \[\[run\]\]",
        ),
        ("[[sweep]]\ninclude = { tp = 1 }", "include must be a list of tables"),
        ("[[sweep]]\ninclude = [{ slurm = 5 }]", "slurm must be a table"),
        ("question = ", "grid.toml is not TOML"),
        ("", r"grid.toml has no \[\[run\]\] table"),
        ("[[run]]\ntp = 2\ngpus = 2\n", r"\[\[run\]\] 1: engine ddp has no tp"),
    ):
        with pytest.raises(UsageError, match=words):
            study_of(tmp_path, text)


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("repeats = 3", "a [[sweep]]"),
        ("gpus = 2", "[defaults], a [[run]] or a [[sweep]]'s defaults"),
    ],
)
def test_a_key_in_the_wrong_table_is_told_where_it_belongs(line, place, tmp_path):
    with pytest.raises(UsageError) as refused:
        study_of(tmp_path, "[[run]]", f'question = "?"\n{line}\n')
    path, name = tmp_path / "grid.toml", line.split()[0]
    assert str(refused.value) == f"study {path}: {name} belongs to {place}"


@pytest.mark.parametrize("line", ["baseline = []", "baseline = { tp = 1 }", "cluster = [1]"])
def test_a_name_is_text(tmp_path, line):
    with pytest.raises(UsageError, match="missing question"):
        study_of(tmp_path, "[[run]]", "")
    with pytest.raises(UsageError, match="(baseline|cluster) must be text, not"):
        study_of(tmp_path, "[[run]]", f'question = "?"\n{line}\n')


RANGE = list(range(1000))


def test_too_many_runs_are_refused_before_any_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr("parallel.config.study._point", lambda *_: pytest.fail("a run was made"))
    for text, runs in (
        ("[[sweep]]\nrepeats = 1000000000", 10**9),
        (f"[[sweep]]\nproduct = {{ seed = {RANGE}, steps = {RANGE}, gpus = {RANGE} }}", 10**9),
        (f"[[sweep]]\nzip = {{ seed = {RANGE} }}\nrepeats = 11", 11_000),
        ("[[run]]\n" * 10_001, 10_001),
    ):
        with pytest.raises(UsageError, match=f"asks for {runs} runs: at most 10000 are made"):
            study_of(tmp_path, text.replace(", ", ","))


def test_a_folder_is_no_study(tmp_path):
    with pytest.raises(UsageError, match="Is a directory"):
        load_study(tmp_path)


@pytest.mark.parametrize("name", ["..toml", ".toml", ".hidden.toml", "plain"])
def test_a_study_keeps_to_a_folder_of_its_own(tmp_path, name):
    """Its scripts and logs go to a folder of its name, which must lie below where it says."""
    path = tmp_path / "below" / name
    path.parent.mkdir()
    path.write_text(HEAD + "[[run]]\n")
    with pytest.raises(UsageError, match="call the file NAME.toml"):
        load_study(path)


def test_a_baseline_that_is_not_named_is_told(tmp_path):
    two = "[[sweep]]\nproduct = { gpus = [1, 2] }\n"
    assert study_of(tmp_path, two).assumed == ["no baseline is named: it is ddp, the first run"]
    assert study_of(tmp_path, two, 'baseline = "ddp-dp2"\n' + HEAD).assumed == []
    assert study_of(tmp_path, "[[sweep]]\nrepeats = 3\n").assumed == []
    with pytest.raises(UsageError, match="baseline 'x' is no run; it has: ddp, ddp-dp2"):
        study_of(tmp_path, two, 'baseline = "x"\n' + HEAD)
    with pytest.raises(UsageError, match="quick: x is no run; it has: ddp, ddp-dp2"):
        study_of(tmp_path, two, 'quick = ["ddp", "x"]\n' + HEAD)


def test_a_wrong_cluster_is_refused():
    for facts, words in (
        ({"partition": "a\n#SBATCH --nodes=9"}, "partition 'a.*nodes=9' is not"),
        ({"options": ["--mem=$(id)"]}, "options '--mem=..id.' is not"),
        ({"environment": {"A B": "x"}}, "environment 'A B' is not"),
        ({"gpus": 4}, "unknown gpus; known: .*gpus_per_node, cores_per_node, "),
        ({"signal_lead_s": -1}, "signal_lead_s must be at least 0 and at most 65535, not -1"),
        ({"gpu": "A100 SXM", "gpu_memory_gb": 800}, "gpu_memory_gb 800 .* has 80 GB"),
        ({"master_addr_suffix": "-ib0;id"}, "master_addr_suffix '-ib0;id' is not"),
        ({"srun": ["cpu-bind=cores"]}, "srun 'cpu-bind=cores' is not"),
        ({"teardown": [" "]}, "teardown ' ' is not"),
        ({"after": ["true"]}, "shell lines after a run are called teardown now"),
        ({"setup": [1]}, "setup: 1 must be text"),
        ({"container": {"image": "x"}}, "container: give runtime and image, or command"),
        ({"container": {"command": ["x"], "mounts": ["/d"]}}, "or command, which has its mounts"),
        ({"container": {"runtime": "docker", "image": "x"}}, "runtime .* pyxis.* not 'docker'"),
        ({"container": {"runtime": "pyxis", "image": ""}}, "image '' is not"),
        ({"container": {"runtime": "pyxis", "image": "x", "mounts": ["a:b:c"]}}, "mounts 'a:b:c'"),
    ):
        base = {"description": "x", "gpus_per_node": 4, "cores_per_node": 40}
        with pytest.raises(UsageError, match=f"clusters.toml .mine.*{words}"):
            clusters.cluster_of("mine", base | facts, "clusters.toml")
    with pytest.raises(UsageError, match="missing cores_per_node"):
        clusters.cluster_of("mine", {"description": "x", "gpus_per_node": 4}, "clusters.toml")


OWN = """[mine]
gpus_per_node = 4
cores_per_node = 64
setup = ["module purge", "source env.sh"]
srun = ["--cpu-bind=cores"]
container = { runtime = "pyxis", image = "/images/a.sqsh", mounts = ["/data"] }

[dgx-a100]
gpus_per_node = 4
cores_per_node = 64

[typo]
gpus_per_nodes = 4
"""


@pytest.mark.parametrize("place", ["SCALING_CLUSTERS", "HOME"])
def test_a_users_own_clusters_file_adds_to_the_shipped_one(tmp_path, monkeypatch, capsys, place):
    at_home = place == "HOME"
    path = tmp_path / (".config/gpt-scaling-study" if at_home else "") / "clusters.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(OWN)
    monkeypatch.delenv("SCALING_CLUSTERS", raising=False)
    monkeypatch.setenv(place, str(tmp_path if at_home else path))
    mine = clusters.cluster("mine")
    assert (mine.source, mine.container.runtime) == (path, "pyxis")
    assert (mine.container.python, mine.setup) == ("python3", ("module purge", "source env.sh"))
    text = "[[sweep]]\nproduct = { nodes = [1] }"
    head = 'question = "which?"\n'
    assert study_of(tmp_path, text, head, cluster="mine").specs["ddp"].gpus == 4
    # One that replaces a shipped cluster says so.
    study = study_of(tmp_path, text, head, cluster="dgx-a100")
    assert study.specs["ddp"].gpus == 4
    assert study.assumed == [f"cluster dgx-a100 of {path} replaces the one of {clusters.CLUSTERS}"]
    # A wrong table is an error only for who uses it.
    with pytest.raises(UsageError, match="unknown gpus_per_nodes"):
        clusters.cluster("typo")
    with pytest.raises(UsageError, match="no cluster 'other' in .*; there are: local-test, "):
        clusters.cluster("other")
    names = clusters.load_clusters().keys()
    assert "typo" not in names and {"mine", "dgx-a100", "dgx-h100"} <= names
    said = capsys.readouterr().err
    assert said.startswith("cluster typo is left out: ") and said.count("\n") == 1
    monkeypatch.setenv("SCALING_CLUSTERS", str(tmp_path / "none.toml"))
    with pytest.raises(UsageError, match="none.toml: No such file"):
        clusters.cluster("dgx-a100")


def test_a_file_that_is_not_found_changes_no_names_of_runs(tmp_path, monkeypatch):
    study = ROOT / "slurm" / "2-core_bucket_ab.toml"
    mixed = tmp_path / "mixed.toml"
    mixed.write_text(study.read_text().replace("include = [", 'include = [{ label = "none" },'))
    assert load_study(mixed).runs.keys() > load_study(study).runs.keys()
    monkeypatch.chdir(tmp_path)
    for path in (study, mixed):
        with pytest.raises(UsageError, match=f"bucket500.*No such file.*looked for in {tmp_path}"):
            load_study(path)


def test_names_do_not_depend_on_how_many_points_a_cluster_can_run(tmp_path):
    text = """[[sweep]]
    product = { engine = ["ddp", "megatron"], nodes = [1, 2, 8] }
    [[sweep]]
    defaults = { engine = "deepspeed_zero", nodes = 2 }
    include = [{ grad_accum = 2 }, { grad_accum = 4 }, { global_batch = 16 }]
    """
    small = study_of(tmp_path, text)  # 4 nodes of 2
    large = study_of(tmp_path, text, cluster="dgx-a100")
    batches = ["gas2", "gas4", "gbs16"]
    zero = [f"deepspeed-zero-zero0-nodes2-{batch}" for batch in batches]
    each = [f"{engine}-nodes{n}" for engine in ("ddp", "megatron") for n in (1, 2, 8)]
    assert list(large.runs) == each + zero
    assert list(small.runs) == [name for name in each if "8" not in name] + zero
    with pytest.raises(UsageError, match="its baseline ddp-nodes8 cannot run: 8 nodes exceed the"):
        study_of(tmp_path, text, 'baseline = "ddp-nodes8"\n' + HEAD)


def test_the_folder_of_a_run_without_a_study_is_named_after_its_flags():
    for given, name in (
        ({}, "ddp"),
        ({"micro_batch": 1}, "ddp"),  # what it is in any case
        ({"micro_batch": 4}, "ddp-mbs4"),
        ({"lr": 1e-2, "seed": 7, "data": "data/code"}, "ddp-lr0.01-seed7-code"),
        ({"clip_grad": 1e9}, "ddp-clip_grad1e+09"),
        ({"preset": "small", "precision": "bf16"}, "ddp-small-bf16"),
        # With others of these a run goes on.
        ({"steps": 80, "breakdown": True, "profile_steps": "3-5", "save_interval": 2}, "ddp"),
        ({"engine": "megatron", "gpus": 4, "tp": 2, "global_batch": 8}, "megatron-tp2-dp2-gbs8"),
        (
            {"engine": "megatron", "gpus": 8, "tp": 2, "pp": 2, "sequence_parallel": True},
            "megatron-tp2-pp2-dp2-sp",
        ),
        ({"engine": "fsdp2", "gpus": 8, "fsdp_shard": 4}, "fsdp2-dp8-zero3-shard4"),
    ):
        assert name_without_study(resolve(("flags", given)), given) == name


WAITING = """[[run]]
label = "second"
after = "first"
[[run]]
label = "last"
after = "ddp-second"
[[sweep]]
repeats = 2
defaults = { label = "first" }
"""


def test_a_run_stands_behind_those_that_it_waits_for(tmp_path):
    study = study_of(tmp_path, WAITING.replace('= "first"\n[[run]]', '= "ddp-first"\n[[run]]'))
    assert list(study.runs) == ["ddp-first-r1", "ddp-first-r2", "ddp-second", "ddp-last"]
    assert study.runs["ddp-second"].after == ("ddp-first-r1", "ddp-first-r2")
    assert study.runs["ddp-last"].after == ("ddp-second",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (WAITING, r"\[\[run\]\] 1: after: ddp-second waits for 'first', which is no run of"),
        ("[[run]]\nafter = 'ddp'\n", "study .*: after: ddp waits for ddp: none of them can start"),
        (
            "[[sweep]]\n[sweep.zip]\nseed = [1, 2, 3]\n"
            "after = ['ddp-seed2', 'ddp-seed3', 'ddp-seed1']\n",
            "after: ddp-seed1 waits for ddp-seed2 waits for ddp-seed3 waits for ddp-seed1: none",
        ),
        ("[[run]]\nafter = ['ddp']\n", r"\[\[run\]\] 1: after must be text"),
    ],
)
def test_waiting_for_no_run_or_in_a_circle_is_refused_with_the_names(tmp_path, text, words):
    with pytest.raises(UsageError, match=words):
        study_of(tmp_path, text)


def test_a_run_that_waits_for_one_that_is_left_out_is_left_out(tmp_path):
    text = """[[sweep]]
    defaults = { engine = "megatron", gpus = 4, global_batch = 4 }
    zip = { tp = [1, 4, 2], after = ["", "", "megatron-tp4"] }
    """
    study = study_of(tmp_path, text)
    assert list(study.runs) == ["megatron-dp4"]
    assert "waits for megatron-tp4, which cannot run" in study.left_out[-1][1]


def test_the_page_on_slurm_names_every_key_of_a_cluster():
    page = (ROOT / "docs" / "slurm.md").read_text()
    keys = {f.name for f in (*fields(clusters.Cluster), *fields(clusters.Container)) if f.metadata}
    assert keys <= set(re.findall(r"`(?:container\.)?([a-z_]+)`", page))
    (site,) = re.findall(r"^```toml\n(\[my-site\].*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(site.splitlines()) == 10
    (name, facts), *others = tomllib.loads(site).items()
    assert clusters.cluster_of(name, facts, "docs/slurm.md").setup[0] == "module purge"
    assert not others
