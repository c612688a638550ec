"""A run's settings: where each comes from, which wins, and what is refused."""

import argparse
import json

import pytest

from base.errors import UsageError
from parallel.config.resolve import add_flags, from_flags, resolve
from parallel.config.study import load_study
from tests.conftest import study_file


def flags(*words: str) -> dict:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return from_flags(parser.parse_args(words))


def test_only_flags_that_were_given_count():
    assert flags("--tp", "2", "--sequence-parallel") == {"tp": 2, "sequence_parallel": True}
    assert flags() == {}


def test_later_layers_override_earlier_ones():
    spec = resolve(
        ("study", {"engine": "megatron", "tp": 2, "gpus": 4, "lr": 1e-3}), ("flags", {"lr": 5e-4})
    )
    assert (spec.layout.tp, spec.layout.dp, spec.lr) == (2, 2, 5e-4)


def test_the_vocabulary_comes_from_the_data_where_the_presets_is_too_small(tmp_path):
    from parallel.config.study import name_without_study

    def sizes(in_data: int, **given) -> tuple[int | None, int]:
        (tmp_path / "meta.json").write_text(json.dumps({"vocab_size": in_data}))
        spec = resolve(("flags", {"data": str(tmp_path), **given}))
        return spec.settings()["vocab_size"], spec.model.vocab_size

    assert sizes(4096) == sizes(4096, preset="small") == (4096, 4096)
    assert sizes(4096, preset="gpt2-124m") == (None, 50257)  # the model of that name, still
    assert sizes(4096, vocab_size=5000) == (5000, 5000)
    assert sizes(4096, vocab_size=300) == (300, 300)  # which training refuses, with both numbers
    assert sizes(200) == (None, 257)
    given = {"preset": "small", "data": str(tmp_path)}
    (tmp_path / "meta.json").write_text('{"vocab_size": 4096}')
    name = name_without_study(resolve(("flags", given)), given)
    for damaged in ("", "[]", '{"vocab_size": "4096"}', "{}"):
        (tmp_path / "meta.json").write_text(damaged)
        spec = resolve(("flags", given))
        assert spec.value("vocab_size") is None and name_without_study(spec, given) == name


def test_accumulation_follows_from_the_global_batch_and_back():
    study = ("study", {"gpus": 2, "micro_batch": 2, "global_batch": 16})
    assert resolve(study).grad_accum == 4
    assert resolve(("flags", {"gpus": 2, "micro_batch": 2, "grad_accum": 3})).global_batch == 12
    # A flag for one batch setting overrides the study's other.
    assert resolve(study, ("flags", {"grad_accum": 1})).global_batch == 4
    assert resolve(study, ("flags", {"micro_batch": 4})).grad_accum == 2
    with pytest.raises(UsageError, match="7 is not a multiple of micro_batch 2 x dp 2 = 4"):
        resolve(study, ("flags", {"global_batch": 7}))
    with pytest.raises(UsageError, match="grad_accum 4, but grad_accum 3 was asked"):
        resolve(("flags", study[1] | {"grad_accum": 3}))


def test_deepspeed_json_gives_what_nothing_else_does(tmp_path):
    path = tmp_path / "ds.json"
    stated = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": True},
        "optimizer": {"params": {"lr": 2e-4, "betas": [0.9, 0.99]}},
        "train_batch_size": "auto",
    }
    path.write_text(json.dumps(stated))
    json_layer = {"deepspeed_config": str(path), "engine": "deepspeed_zero", "gpus": 2}
    spec = resolve(("study", json_layer))
    assert (spec.layout.micro_batch, spec.grad_accum, spec.global_batch) == (4, 2, 16)
    assert (spec.layout.zero_stage, spec.layout.offload, spec.precision) == (2, "optimizer", "bf16")
    assert (spec.clip_grad, spec.lr, spec.beta2) == (0.5, 2e-4, 0.99)
    spec = resolve(("study", json_layer), ("flags", {"zero_stage": 1, "micro_batch": 1}))
    assert (spec.layout.zero_stage, spec.layout.micro_batch, spec.lr) == (1, 1, 2e-4)


def deepspeeds(**settings) -> dict:
    """The JSON that DeepSpeed gets of a run with these settings."""
    from parallel.engines.deepspeed_common import config

    return config(resolve(("flags", settings)))


def test_deepspeed_gets_the_users_json_with_our_values_over_it(tmp_path):
    path = tmp_path / "ds.json"
    zero = {"stage": 1, "reduce_bucket_size": 200000000, "allgather_bucket_size": "auto"}
    path.write_text(json.dumps({"zero_optimization": zero, "wall_clock_breakdown": True}))
    config = deepspeeds(deepspeed_config=str(path), engine="deepspeed_zero", zero_stage=2, gpus=2)
    ours = {"stage": 2, "overlap_comm": True}  # unless the JSON says otherwise
    assert config["zero_optimization"] == {"reduce_bucket_size": 200000000} | ours
    assert config["wall_clock_breakdown"] is True
    assert config["train_batch_size"] == 2
    assert config["timers"] == {"throughput": {"enabled": False}}  # it would wait for the device


@pytest.mark.parametrize(
    ("engine", "stage"),
    [("deepspeed_zero", 1), ("deepspeed_zero", 2), ("deepspeed_zero", 3), ("deepspeed_pipe", 1)],
)
def test_deepspeed_adds_gradients_of_bf16_up_in_fp32_over_micro_batches_and_ranks(engine, stage):
    config = deepspeeds(engine=engine, zero_stage=stage, precision="bf16")
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config["communication_data_type"] == "fp32"
    of_fp32 = deepspeeds(engine=engine, zero_stage=stage, precision="fp32")
    assert "communication_data_type" not in of_fp32


def test_fsdp2_has_the_stage_3_that_it_is_known_for_unless_another_is_stated(tmp_path):
    alone = resolve(("flags", {"engine": "fsdp2", "gpus": 2}))
    assert alone.layout.zero_stage == 3 and alone.name == "fsdp2-dp2-zero3"
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    stated = {"engine": "fsdp2", "deepspeed_config": str(path)}
    assert resolve(("flags", stated)).layout.zero_stage == 2
    assert (
        resolve(("study", {"engine": "fsdp2"}), ("flags", {"engine": "ddp"})).layout.zero_stage == 0
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"bf16": true}', "bf16 must be an object, not true"),
        ('{"optimizer": {"params": {"betas": [0.9]}}}', "betas must be two numbers"),
        ('{"optimizer": {"type": "Lamb"}}', "Lamb, but every engine here trains with AdamW"),
        ('{"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}', "only cpu is offered"),
        ("{", "is not JSON"),
        (None, "ds.json: No such file"),
    ],
)
def test_a_deepspeed_json_that_asks_for_something_else_is_refused(tmp_path, content, words):
    if content is not None:
        (tmp_path / "ds.json").write_text(content)
    with pytest.raises(UsageError) as caught:
        resolve(("flags", {"deepspeed_config": str(tmp_path / "ds.json")}))
    assert words in str(caught.value) and "ds.json" in str(caught.value)


def test_the_launchers_world_size_must_agree():
    with pytest.raises(UsageError, match="asks for 4 ranks, but the launcher started 2"):
        resolve(("study", {"gpus": 4}), gpus=2)


def test_a_study_is_its_defaults_and_its_runs(tmp_path):
    text = "[defaults]\nsteps = 7\n[[run]]\ngpus = 1\n[[run]]\ngpus = 2\nsteps = 3\n"
    study = load_study(study_file(tmp_path / "a_study.toml", text))
    assert (study.name, study.baseline, [*study.runs]) == ("a_study", "ddp", ["ddp", "ddp-dp2"])
    assert [study.run(name).steps for name in study.runs] == [7, 3]
    assert study.run("ddp", flags={"steps": 1}).steps == 1
