"""A planned layout as other programs' flags or file: they say what was planned."""

import json
import re
import shlex

import pytest

from analysis import plan
from analysis.logs.parsing.setting_names import read_header
from analysis.logs.record import Record
from analysis.planner import pasted
from models.config import preset
from parallel.config.deepspeed_json import from_deepspeed_json
from parallel.config.layout import EXPERT_AXES, Layout
from parallel.config.study import load_study

ENDS = {"account_for_embedding_in_pipeline_split": True}
ENDS["account_for_loss_in_pipeline_split"] = True
LAST = {"decoder_first_pipeline_num_layers": 3, "decoder_last_pipeline_num_layers": 2}
LAYOUTS = {
    "gpt2": ("18b", Layout(dp=2, tp=4, pp=2, n_micro=8, zero_stage=1, recompute="full")),
    "uneven": (
        "llama3-405b",
        Layout(dp=4, tp=8, pp=16, vpp=8, n_micro=32, sequence_parallel=True, **ENDS),
    ),
    "interleaved": (
        "llama3-70b",
        Layout(dp=2, tp=4, cp=2, pp=4, vpp=5, micro_batch=2, n_micro=8, sequence_parallel=True),
    ),
    "experts": ("deepseek-v3", Layout(dp=32, pp=16, ep=32, n_micro=64, zero_stage=1, **LAST)),
    "sharded": ("llama3-8b", Layout(dp=16, micro_batch=2, n_micro=2, zero_stage=3)),
    "hybrid": ("llama3-8b", Layout(dp=16, fsdp_shard=8, zero_stage=3, offload="all")),
}


def planned(name, engine="megatron", gemms="bf16"):
    model, layout = LAYOUTS[name]
    return pasted.Plan(preset(model), layout, engine, gemms, True)


def read_back(text):
    """What our reader of other programs' logs says of a command line."""
    record = Record("log", "log")
    read_header(record, text.replace("\\\n", "").encode())
    return record


@pytest.mark.parametrize("name", LAYOUTS)
def test_megatron_lms_flags_are_read_back_as_the_layout_and_the_model(name):
    case = planned(name)
    record = read_back("pretrain_gpt.py " + pasted.megatron(case).text)
    axes = ["tp", "cp", "pp", *(EXPERT_AXES if case.config.experts else [])]
    axes += [] if case.layout.uneven or case.layout.vpp == 1 else ["vpp"]
    wanted = {name: getattr(case.layout, name) for name in (*axes, "micro_batch", "global_batch")}
    wanted["seq_len"] = case.config.max_seq_len
    assert {name: getattr(record, name) for name in wanted} == wanted
    assert (record.recompute or "none") == case.layout.recompute
    for size in ("n_layer", "hidden", "n_head", "ffn_hidden"):
        assert record.model[size] == getattr(case.config, size)


def test_megatron_core_takes_the_flags_that_are_its_settings():
    """Its fields, by type and value; the others are flags of Megatron-LM's training."""
    from parallel.config.megatron_options import check_options
    from parallel.engines.megatron_config import KINDS

    fields = {name for kind in KINDS for name in kind.__dataclass_fields__}
    renamed = {"num_experts", "norm_epsilon", "swiglu", "disable_bias_linear", "fp8_format"}
    training = {"max_position_embeddings", "group_query_attention", "position_embedding_type"}
    training |= {"rotary_base", "untie_embeddings_and_output_weights", "seq_length"}
    training |= {"micro_batch_size", "global_batch_size", "attention_backend", "rope_type"}
    training |= {"num_virtual_stages_per_pipeline_rank"}
    for name in LAYOUTS:
        words = shlex.split(pasted.megatron(planned(name)).text.replace("\\\n", " "))
        flags = {}
        for word in words:
            if word.startswith("--"):
                flags[last := word[2:].replace("-", "_")] = True
            else:
                flags[last] = json.loads(word) if word[0].isdigit() else word
        assert flags.keys() - renamed - training <= fields
        own = {k: v for k, v in flags.items() if k in fields and k not in training}
        own.pop("moe_layer_freq", None)  # Megatron-LM makes a list of the text
        check_options(own, KINDS)


@pytest.mark.parametrize("name", ["gpt2", "uneven", "interleaved", "experts"])
def test_megatron_core_cuts_the_stages_where_the_plan_does(name):
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    case = planned(name)
    text = pasted.stages(case.layout, case.config)
    cut = PipelineParallelLayerLayout(text, case.layout.pp)
    cut.validate_layer_layout(case.config.n_layer, None)
    chunks = [
        sum(kind.name == "decoder" for kind in cut.layout[stage][chunk])
        for chunk in range(case.layout.vpp)
        for stage in range(case.layout.pp)
    ]
    assert chunks == [len(chunk) for chunk in case.layout.chunks(case.config.n_layer)]


@pytest.mark.parametrize("name", ["gpt2", "sharded", "hybrid"])
def test_deepspeed_takes_its_json_and_says_the_same_sizes(name, monkeypatch):
    from parallel.engines.deepspeed_common import deepspeed

    case = planned(name, "deepspeed_zero")
    layout = case.layout
    answer = pasted.deepspeed(case)
    stated = json.loads(answer.text)

    class Ranks:
        def get_data_parallel_world_size(self):
            return layout.dp

    monkeypatch.setattr(deepspeed.comm, "get_rank", lambda: 0)  # there are no processes
    config = deepspeed.runtime.config.DeepSpeedConfig(stated, mpu=Ranks())
    assert config.train_micro_batch_size_per_gpu == layout.micro_batch
    assert config.gradient_accumulation_steps == layout.n_micro
    assert config.zero_config.stage == layout.zero_stage
    assert (config.zero_config.offload_param is not None) == (layout.offload == "all")
    again = from_deepspeed_json(stated, "it")
    assert again["global_batch"] == layout.global_batch and again["precision"] == "bf16"
    needs = [line for line in answer.unsaid if "PipelineModule" in line]
    assert len(needs) == (layout.pp > 1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_torchtitans_flags_are_read_back_as_the_layout(name):
    case = planned(name)
    answer = pasted.torchtitan(case)
    record = read_back("torchtitan.train " + answer.text.replace(".", " --"))
    axes = ("tp", "cp", "pp", "global_batch", "seq_len")
    wanted = {axis: getattr(case.layout, axis) for axis in axes[:4]}
    assert {axis: getattr(record, axis) for axis in axes} == wanted | {
        "seq_len": case.config.max_seq_len
    }
    local = case.layout.micro_batch * (case.layout.n_micro if case.layout.pp > 1 else 1)
    assert f"--training.local_batch_size {local} " in answer.text
    assert any("ZeRO 1" in line for line in answer.unsaid) == (case.layout.zero_stage == 1)
    if name == "experts":  # 3, fourteen times 4, and 2 layers
        less = re.findall(r"(first|last)_stage_less_layers (\d)", answer.text)
        assert less == [("first", "1"), ("last", "2")]
    if name == "hybrid":
        assert "replicate_degree 2 " in answer.text and "shard_degree 8 " in answer.text


def test_show_prints_the_first_layout_or_the_one_of_why(capsys, tmp_path):
    flags = "--preset llama3-8b --cluster dgx-h100 --gpus 64 --global-batch 128".split()
    assert plan.main([*flags, "--show", "megatron", "--why", "tp=2,pp=2"]) == 0
    text = capsys.readouterr().out
    assert "--tensor-model-parallel-size 2 \\\n" in text and "not measured" in text
    assert plan.main([*flags, "--show", "study"]) == 0
    study = tmp_path / "one.toml"
    study.write_text(capsys.readouterr().out)
    assert len(load_study(study).runs) == 1
    assert plan.main([*flags, "--show", "deepspeed", "--top", "3"]) == 2
    assert "--show prints one layout" in capsys.readouterr().err


def test_a_plan_of_experts_is_shown_with_their_split(capsys):
    flags = "--preset mixtral-8x7b --cluster dgx-h100 --gpus 64 --global-batch 256".split()
    assert plan.main([*flags, "--show", "megatron", "--why", "ep=4,tp=2,etp=1"]) == 0
    text = capsys.readouterr().out
    assert "--expert-model-parallel-size 4 \\\n--expert-tensor-parallel-size 1 \\\n" in text
    assert " ep 4 etp 1, " in text


def test_muon_is_planned_for_megatron_lm_alone(capsys):
    flags = "--preset llama3-8b --cluster dgx-h100 --gpus 64 --global-batch 128".split()
    flags += ["--optimizer", "muon_layer_sharded"]
    assert plan.main([*flags, "--show", "megatron"]) == 0
    text = capsys.readouterr().out
    assert "--optimizer muon \\\n--muon-tp-mode layer_sharded \\\n" in text
    assert plan.main([*flags, "--show", "study"]) == 2
    assert "every engine of a study trains with AdamW" in capsys.readouterr().err
