"""A study's axes, branches and names; what cannot run is left out with its reasons."""

import time

import pytest

from models.errors import UsageError
from parallel import clusters, study
from parallel.spec import resolve
from parallel.study import load_study
from tests.conftest import ROOT

HEAD = 'question = "which?"\ncluster = "local-test"\n[defaults]\npreset = "tiny"\n'


def study_of(tmp_path, text: str, head: str = HEAD, **how):
    path = tmp_path / "grid.toml"
    path.write_text(head + text)
    return load_study(path, **how)


def test_a_sweep_is_every_combination_of_product_and_zip(tmp_path):
    study = study_of(
        tmp_path,
        """[[sweep]]
        defaults = { engine = "megatron", grad_accum = 2 }
        product = { tp = [1, 2], micro_batch = [1, 2] }
        zip = { nodes = [1, 2], pp = [1, 2] }
        """,
    )
    assert list(study.settings) == [
        "megatron-dp2-mbs1",
        "megatron-pp2-dp2-mbs1",
        "megatron-dp2-mbs2",
        "megatron-pp2-dp2-mbs2",
        "megatron-tp2-mbs1",
        "megatron-tp2-pp2-mbs1",
        "megatron-tp2-mbs2",
        "megatron-tp2-pp2-mbs2",
    ]
    spec = study.run("megatron-tp2-pp2-mbs2")
    assert (spec.gpus, spec.layout.dp, spec.global_batch) == (4, 1, 4)


def test_excludes_includes_branches_and_repeats(tmp_path):
    study = study_of(
        tmp_path,
        """[[sweep]]
        product = { engine = ["ddp", "megatron"], nodes = [1, 2, 4] }
        exclude = [{ engine = "ddp", nodes = [2, 4] }]
        include = [{ engine = "megatron", nodes = 1, tp = 2 }]
        [[sweep]]
        repeats = 2
        defaults = { engine = "deepspeed_zero", zero_stage = 3, steps = 7 }
        slurm = { time = "00:02:00" }
        """,
    )
    assert list(study.settings) == [
        "ddp-dp2",
        "megatron-dp2",
        "megatron-dp4",
        "megatron-dp8",
        "megatron-tp2",
        "deepspeed-zero-zero3-r1",
        "deepspeed-zero-zero3-r2",
    ]
    assert study.run("deepspeed-zero-zero3-r2").steps == 7
    assert study.slurm["deepspeed-zero-zero3-r1"] == {"time": "00:02:00"}
    assert study.slurm["ddp-dp2"] == {}


def test_names_say_what_tells_runs_apart_and_nothing_else(tmp_path):
    study = study_of(
        tmp_path,
        """[[sweep]]
        product = { global_batch = [8, 16], micro_batch = [2] }
        include = [{ grad_accum = 32, global_batch = 32, n_layer = 6, hidden = 64 }]
        [[sweep]]
        defaults = { global_batch = 8, micro_batch = 2, label = "again" }
        """,
    )
    assert list(study.settings) == [
        "ddp-mbs2-gbs8",
        "ddp-mbs2-gbs16",
        "ddp-layers6-hidden64-mbs1-gbs32",
        "ddp-mbs2-gbs8-again",
    ]


IMPOSSIBLE = """[[sweep]]
defaults = { engine = "megatron" }
product = { tp = [1, 3, 4], gpus = [2, 4, 6] }
"""


def test_an_impossible_point_is_left_out_with_every_reason(tmp_path):
    study = study_of(tmp_path, IMPOSSIBLE)
    assert list(study.settings) == ["megatron-dp2", "megatron-dp4", "megatron-dp6"]
    reasons = dict(study.left_out)
    assert "tp 3 does not divide the 4 attention heads" in reasons["[[sweep]] 1: tp 3, gpus 6"]
    assert "tp 4 exceeds the 2 GPUs of a node" in reasons["[[sweep]] 1: tp 4, gpus 4"]
    assert "2 ranks cannot be split into tp 4" in reasons["[[sweep]] 1: tp 4, gpus 2"]
    with pytest.raises(UsageError, match="6 points cannot run: .*attention heads"):
        study_of(tmp_path, IMPOSSIBLE, strict=True)


def test_a_cluster_bounds_what_can_be_placed(tmp_path):
    dgx = 'question = "which?"\n[defaults]\npreset = "tiny"\n'
    text = "[[sweep]]\nproduct = { nodes = [1], gpus_of = [1] }"
    with pytest.raises(UsageError, match="unknown setting 'gpus_of'"):
        study_of(tmp_path, text, dgx, cluster="dgx-a100")
    text = "[[sweep]]\nproduct = { gpus = [2, 12, 16] }"
    study = study_of(tmp_path, text, dgx, cluster="dgx-a100")
    assert list(study.settings) == ["ddp-dp2", "ddp-dp16"]
    assert study.left_out[0][1] == "12 GPUs do not fill whole nodes of 8"
    with pytest.raises(UsageError, match="nodes needs a cluster"):
        study_of(tmp_path, "[[sweep]]\nproduct = { nodes = [1] }", dgx)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[sweep]]\nproduct = { tpp = [1] }", "unknown setting 'tpp'"),
        ("[[sweep]]\nproduct = { tp = ['two'] }", "tp must be a int, not 'two'"),
        ("[[sweep]]\nproduct = { preset = ['gpt5'] }", "unknown preset 'gpt5'"),
        ("[[sweep]]\nproduct = { tp = 2 }", "product tp must be a list"),
        ("[[sweep]]\nzip = { tp = [1, 2], gpus = [1] }", "zip's lists differ in length"),
        ("[[sweep]]\nproduct = { tp = [1] }\nzip = { tp = [1] }", "tp in both product and zip"),
        ("[[sweep]]\nproduct = { tp = [1] }\nexclude = [{ pp = 2 }]", "exclude names pp"),
        ("[[sweep]]\nrepeats = 0", "repeats must be a whole number above 0"),
        ("[[sweep]]\nproduct = { gpus = [1, 1] }", "a second run called ddp"),
        ("[[sweep]]\ndefaults = { label = 'a b' }", "label 'a b' is no word"),
        ("[[sweep]]\nproducts = {}", "unknown products; known: repeats, defaults, product, zip"),
        ("[[run]]\n[walltime]", "unknown walltime; known: question, baseline, cluster, slurm"),
        (
            "[[sweep]]\nproduct = { tp = [1, 2] }\nexclude = [{ tp = 1 }, { tp = 8 }]",
            "exclude matches no point: tp 8$",
        ),
        ("[[sweep]]\nproduct = { tp = [1] }\nexclude = [{ tp = 1 }]", "no run is left"),
        ("[[sweep]]\nexclude = [{}]", "exclude matches no point"),
        ("[[sweep]]\nproduct = 5", "product is no table"),
        ("[[sweep]]\nzip = [1]", "zip is no table"),
        ("[[sweep]]\nslurm = 'x'", "slurm is no table"),
        ("[[sweep]]\ndefaults = 1", "defaults is no table"),
        ("[[sweep]]\nexclude = 5", "exclude must be a list of tables"),
        ("[[sweep]]\ninclude = { tp = 1 }", "include must be a list of tables"),
        ("[[sweep]]\ninclude = [{ slurm = 5 }]", "slurm is no table"),
        ("[[run]]\nslurm = 5", "slurm is no table"),
        ("[sweep]\n", r"write \[\[sweep\]\]"),
    ],
)
def test_a_mistake_is_never_taken_for_an_impossible_point(tmp_path, text, words):
    with pytest.raises(UsageError, match=words):
        study_of(tmp_path, text)


@pytest.mark.parametrize("line", ["baseline = []", "baseline = { tp = 1 }", "cluster = [1]"])
def test_a_name_is_text(tmp_path, line):
    with pytest.raises(UsageError, match="must be a name, not"):
        study_of(tmp_path, "[[run]]", f'question = "?"\n{line}\n')


RANGE = list(range(1000))


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("[[sweep]]\nrepeats = 1000000000", 10**9),
        (f"[[sweep]]\nproduct = {{ seed = {RANGE}, steps = {RANGE}, gpus = {RANGE} }}", 10**9),
        (f"[[sweep]]\nproduct = {{ seed = {RANGE} }}\nzip = {{ steps = {RANGE} }}", 10**6),
        (f"[[sweep]]\nzip = {{ seed = {RANGE} }}\nrepeats = 11", 11_000),
        ("[[sweep]]\nrepeats = 6000\n[[sweep]]\nrepeats = 6000", 12_000),
        ("[[sweep]]\nrepeats = 3000\ninclude = [{}, {}, {}, {}]", 12_000),
        ("[[run]]\n" * 10_001, 10_001),
    ],
)
def test_too_many_runs_are_refused_before_any_is_made(tmp_path, monkeypatch, text, runs):
    monkeypatch.setattr("parallel.study._point", lambda *_: pytest.fail("a run was made"))
    with pytest.raises(UsageError, match=f"asks for {runs} runs: at most 10000 are made"):
        study_of(tmp_path, text.replace(", ", ","))


def test_a_file_without_end_is_refused_at_once(tmp_path):
    with pytest.raises(UsageError, match="study /dev/zero is larger than the 4 MiB"):
        load_study("/dev/zero")
    large = tmp_path / "large.toml"
    large.write_text(f'question = "{"?" * (4 << 20)}"')
    with pytest.raises(UsageError, match="larger than the 4 MiB"):
        load_study(large)
    for path, words in ((tmp_path, "Is a directory"), ("a\0b.toml", "null byte")):
        with pytest.raises(UsageError, match=words):
            load_study(path)


@pytest.mark.parametrize(
    "name", ["...toml", "..toml", ".toml", ".hidden.toml", "plain", "....toml"]
)
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


def test_every_cluster_reads():
    found = clusters.load_clusters()
    assert {"local-test", "jean-zay-v100-16g", "jean-zay-v100-32g"} <= set(found)
    assert found["dgx-h200"].gpus_per_node == 8


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"partition": "a b"}, "cannot stand in an #SBATCH line"),
        ({"partition": "a\n#SBATCH --nodes=9"}, "cannot stand in an #SBATCH line"),
        ({"options": ["--mem=$(id)"]}, "cannot stand in an #SBATCH line"),
        ({"environment": {"A B": "x"}}, "no name of an environment variable"),
        ({"environment": {"A": 1}}, "the value of A must be text"),
        ({"gpus": 4}, "unknown gpus; known: description, gpus_per_node, cores_per_node, gpu,"),
        ({"name": "other"}, "unknown name"),
        ({"gpus_per_node": 0}, "must be positive"),
        ({"gpus_per_node": True}, "cannot be True"),
    ],
)
def test_a_wrong_cluster_is_refused(facts, words):
    base = {"description": "x", "gpus_per_node": 4, "cores_per_node": 40}
    with pytest.raises(UsageError, match=words):
        clusters.cluster_of("mine", base | facts, "clusters.toml")
    with pytest.raises(UsageError, match="missing cores_per_node"):
        clusters.cluster_of("mine", {"description": "x", "gpus_per_node": 4}, "clusters.toml")


def test_two_thousand_runs_are_checked_in_two_seconds(tmp_path):
    text = """[[sweep]]
    defaults = { engine = "megatron", preset = "18b", global_batch = 5040 }
    product = { tp = [1, 2, 4, 8], pp = [1, 2, 4, 5, 8], nodes = [10, 16, 32, 64],
                micro_batch = [1, 2, 3], seed = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10] }
    """.replace(",\n", ",")
    before = time.process_time()  # of this process: others may want the same cores
    study = study_of(tmp_path, text, cluster="dgx-a100")
    assert len(study.settings) + len(study.left_out) == 2400
    assert time.process_time() - before < 2


def test_every_shipped_study_reads_and_leaves_out_only_with_reasons():
    for path in sorted((ROOT / "slurm").glob("*.toml")):
        if path.name != "clusters.toml":
            assert all(why for _, why in load_study(path).left_out)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "ddp"),
        ({"micro_batch": 1}, "ddp"),  # what it is in any case
        ({"micro_batch": 4}, "ddp-mbs4"),
        ({"lr": 1e-2, "seed": 7, "data": "data/code"}, "ddp-lr0.01-seed7-code"),
        ({"clip_grad": 1e9}, "ddp-clip_grad1e+09"),
        ({"preset": "small", "precision": "bf16"}, "ddp-small-bf16"),
        # With others of these a run goes on.
        ({"steps": 80, "breakdown": True, "profile_mode": "nvtx", "save_interval": 2}, "ddp"),
        ({"engine": "megatron", "gpus": 4, "tp": 2, "global_batch": 8}, "megatron-tp2-dp2-gbs8"),
    ],
)
def test_the_folder_of_a_run_without_a_study_is_named_after_its_flags(given, name):
    assert study.name_alone(resolve(("flags", given)), given) == name
