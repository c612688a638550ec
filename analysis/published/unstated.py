"""What a published row leaves unsaid: what the runs of its engine have there, or what follows.

What a row says of no other, its table states in a cell (logs/published): `gradients`, say.
"""

import math
import re
from typing import Any

from analysis.logs.published_csv import Row
from analysis.logs.record import Record
from analysis.planner.columns import FAMILIES
from analysis.planner.engines import family_of, fuses_attention, is_recipe
from base.units import GIB
from models.config import GPTConfig
from models.gpus import joined, planning_gpu
from parallel.config.layout import AXES, EXPERT_AXES, MODEL_AXES, RECOMPUTE

VOCAB, SEQ_LEN, GPUS_PER_NODE = 51200, 2048, 8
HEAD = 128  # the usual size of a head
# Layers of the first and the last stage, by flags of a test of Megatron-LM that its table lacks:
# tests/functional_tests/test_cases/<model>/model_config.yaml, --decoder-first-pipeline-num-layers.
ENDS = {"gpt/gpt3_mcore_te_tp1_pp4_vp1_uneven_pipeline": (2, 2)}
# Containers from which on the recipes of Megatron-Bridge (scripts/performance/configs) take what.
# Until HybridEP: DeepEP on Hopper, all-to-all on Blackwell, both with the fused sort of tokens.
NEVER, HYBRID_EP, STEP_GRAPH = (0, 0), (26, 2), (26, 6)
NATURAL = 1.4  # tokens of the fullest rank's experts over the mean where the router chooses
COUNTS = (
    *("gpus", "gpus_per_node", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len"),
    *(*AXES, *EXPERT_AXES, "micro_batch", "global_batch", "gas", "zero_ranks"),
)


def yes(row: Row, name: str) -> bool:
    """Returns whether a cell says yes."""
    return row.text(name).lower() in ("1", "1.0", "true", "yes", "swiglu")


def has_experts(row: Row) -> bool:
    """Returns whether a row says that its model has experts."""
    return (row.number("experts") or row.number("ep") or 1) > 1


def complete(record: Record, row: Row) -> Record:
    """Fills in what the row leaves unsaid of the run, and returns the run.

    Raises:
        ValueError: a number that cannot be, or one that follows from nothing.
    """
    _check(row)
    _complete_model(record, row)
    _complete_split(record, row)
    engine, layers, pp = row.text("engine"), record.model["n_layer"], record.pp
    record.precision = record.precision or "fp16"
    if lacks := {"fp8", "fp4"} & {record.precision} - set(planning_gpu(record.gpu_type).peaks):
        raise ValueError(f"{row.text('gpu_type')} has no {lacks.pop()}")
    if record.sequence_parallel is None:
        record.sequence_parallel = is_recipe(engine) and record.tp > 1
    if record.zero_stage is None and "Megatron-DeepSpeed" in engine:
        record.zero_stage = 1  # what its launch scripts set; 1.3B would not fit 16 GB without
    if record.zero_stage is None and is_recipe(engine):  # its distributed optimizer, or its FSDP
        record.zero_stage = 1 if has_experts(row) or _weights_fit(record, row) else 3
    record.zero_stage = record.zero_stage or 0
    record.recompute = _recompute(row)
    offload = row.text("offload").lower()
    if not re.match("$|no|0|activations", offload):
        record.facts["layout"] = {"offload": "all" if "param" in offload else "optimizer"}
    if row.text("optimizer") == "muon":  # Megatron-LM's usual --muon-tp-mode
        record.facts.setdefault("layout", {})["muon"] = "duplicated"
    if ranks := row.number("zero_ranks"):
        record.facts.setdefault("layout", {})["fsdp_shard"] = int(ranks)
    if layers + 2 < pp:  # embedding and logits may each have a stage (BLOOM)
        raise ValueError(f"{layers:g} layers cannot fill {pp:g} stages")
    if record.zero_stage > 1 and pp > 1 and "FSDP2" not in engine:
        raise ValueError(f"ZeRO-{record.zero_stage} cannot run with {pp:g} pipeline stages")
    return record


def _check(row: Row) -> None:
    """Refuses, by ValueError, what cannot be, is no GPT, or is counted by no formula."""
    for name in COUNTS:
        value = row.number(name)
        if value is not None and not (0 <= value < 2**40 and value % 1 == 0):
            raise ValueError(f"{name} cannot be {value:g}")
    if (row.number("zero_stage") or 0) not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage cannot be {row.text('zero_stage')}")
    for name, value in (("gpus", _gpus(row)), ("tp", row.number("tp")), ("pp", row.number("pp"))):
        if not value:
            raise ValueError(f"no {name}")
    if row.text("blocks"):
        raise ValueError(f"a hybrid, which no GPT is: {row.text('blocks')}")
    for name in ("optimizer", "pp_layout", "mtp"):
        if row.text(name) not in ("", "adam", "muon"):
            raise ValueError(f"no formula counts {name} {row.text(name)}")
    if has_experts(row):
        if not row.number("topk"):
            raise ValueError("experts, and their sizes are not stated")
        if "FSDP2" in row.text("engine") and not row.number("ep"):
            raise ValueError("experts, and their ep is not stated")
    if row.text("attention") == "mla" and not row.number("kv_lora_rank"):
        raise ValueError("the sizes of latent attention are not stated")


def _gpus(row: Row) -> float | None:
    """Returns the number of GPUs. Tests of Megatron-LM run on a node of 8, releases do not."""
    tests = row.text("golden") and "release" not in row.text("model")
    return row.number("gpus") or (8.0 if tests else None)


def _complete_model(record: Record, row: Row) -> None:
    """Fills in the sizes of the model; refuses, by ValueError, a row from which none follow."""
    model, params = record.model, row.number("params_b")
    if not model.get("hidden") or not (model.get("n_layer") or params):
        raise ValueError("no model sizes (hidden, layers or params_b)")
    if row.text("golden") and not row.number("vocab"):
        raise ValueError("no vocabulary")
    record.seq_len = record.seq_len or SEQ_LEN
    hidden, vocab = model["hidden"], model.setdefault("vocab_size", VOCAB)
    if "n_layer" not in model:
        pp = int(row.number("pp"))
        model["n_layer"] = round((params * 1e9 - vocab * hidden) / (12 * hidden**2) / pp) * pp
        model["n_layer"] = max(model["n_layer"], pp)
    model.setdefault("n_head", max(1, round(hidden / HEAD)))
    model.setdefault("ffn_hidden", 4 * hidden)
    if hidden % model["n_head"]:  # BLOOM's searches had heads of 128.6
        model.setdefault("kv_channels", hidden // model["n_head"])
    if experts := model.get("experts"):  # counted in each layer
        experts["moe_layer_freq"], experts["first_dense"] = 1, int(row.number("dense_layers") or 0)
    model.pop("window", None)  # counted as if it saw all
    model["tied"] = not _untied(record, row)
    record.params = None  # as it is published it is rounded, or counts otherwise


def _untied(record: Record, row: Row) -> bool:
    """Returns whether the output layer is a matrix of its own: as tests of Megatron-LM say, and
    where the published number of parameters counts one. Others' counts are rounded too far."""
    if row.text("golden"):
        return yes(row, "untied")
    if not re.search("nanotron|TE 2", row.text("engine")):
        return False
    sizes = {name: record.model[name] for name in ("n_layer", "hidden", "n_head", "vocab_size")}
    sizes |= {name: record.model.get(name) for name in ("n_kv_head", "ffn_hidden")}
    sizes["activation"] = record.model.get("activation", "gelu")
    one_table = GPTConfig(**sizes, position="rope", norm="rmsnorm", bias=False)
    more = (row.number("params_b") or 0) * 1e9 - one_table.n_params
    return more > one_table.vocab_size * one_table.hidden / 2


def _complete_split(record: Record, row: Row) -> None:
    """Fills in the split; refuses, by ValueError, one that does not give the number of GPUs, or a
    row that states no batch."""
    record.gpus = int(_gpus(row))
    record.cp, record.vpp = record.cp or 1, record.vpp or 1
    if layers := row.number("layers_per_vp"):
        record.vpp = int(record.model["n_layer"] / record.pp / layers)
    dp = record.gpus / math.prod(getattr(record, axis) for axis in MODEL_AXES)
    if dp < 1 or dp % 1:
        sizes = " x ".join(f"{axis} {getattr(record, axis)}" for axis in MODEL_AXES)
        raise ValueError(f"gpus {record.gpus} is no multiple of {sizes}")
    record.dp = int(dp)
    batch, gas, micro = (row.number(name) for name in ("global_batch", "gas", "micro_batch"))
    if not micro and batch and gas:
        micro = batch / gas / dp
    if not micro and batch and record.pp == 1:  # no accumulation is stated
        micro = batch / dp
    micro = micro or 1.0
    if not batch and not gas:
        if record.pp > 1:
            raise ValueError("no global_batch and no gas")
        gas = 1.0
    if micro % 1:
        raise ValueError(f"micro_batch would be {micro:g}, no whole number")
    record.micro_batch = int(micro)
    record.global_batch = int(batch or gas * micro * dp)
    if has_experts(row):
        # A recipe of Megatron-Bridge states 1; the usual is tp.
        alone = re.search(r"Megatron-Bridge|\(Megatron-Core\)", row.text("engine"))
        record.ep, record.etp = record.ep or 1, record.etp or (1 if alone else record.tp)


def _weights_fit(record: Record, row: Row) -> bool:
    """Returns whether a rank's weights and gradients in 16 bits fit the card, not cut by dp."""
    each = (row.number("params_b") or 0) / (record.tp * record.pp) * 1e9
    return 4 * each < planning_gpu(record.gpu_type).memory_gb * GIB


def _recompute(row: Row) -> str:
    """Returns the policy of recomputation; without one, what the published formula counts."""
    text = row.text("recompute").lower()
    if text == "selective" and "core_attn" not in (_repeated(row) or {"core_attn"}):
        return "none"  # the policy of this name repeats attention
    if text in RECOMPUTE:
        return text
    if text in ("uniform", "block"):  # Megatron's ways of full recomputation
        return "full"
    counted = re.search(r"recomput|8\s*PT|96\s*\*?\s*B|eq\.?3", row.text("formula"))
    return "full" if counted else "none"


def _repeated(row: Row) -> set[str]:
    """Returns the modules that selective recomputation repeats, as megatron-core names them."""
    return set(re.findall(r"\w+", row.text("repeated_modules")))


def beside(record: Record, row: Row) -> dict[str, Any]:
    """Returns the planner's columns that no log states: what the run's program and card do, and
    what the row says of memory and experts."""
    engine, card = row.text("engine"), row.text("gpu_type")
    family = FAMILIES[family_of(engine)]
    first, last = ENDS.get(row.text("model"), (0, 0))  # layers of the end stages
    columns = {
        "family": FAMILIES.index(family),
        "gpus_per_node": joined(card, int(row.number("gpus_per_node") or GPUS_PER_NODE)),
        "flash": fuses_attention(engine) or bool(re.search("H100|H200|H800|B[23]00|MI3", card)),
        # How positions enter a model is not published, but of nanotron's.
        "positions": 0,
        "rotary": family == "nanotron",
        "plain": family == "nanotron",
        # Megatron-DeepSpeed's ZeRO-3 scripts set --checkpoint-in-cpu. Its runs on Jean Zay have
        # micro-batches that fit no other way.
        "host_checkpoints": "deepspeed" in engine.lower()
        and record.zero_stage == 3
        and record.recompute == "full",
        "whole_gradients": record.pp > 1 and _sends_whole_gradients(engine, row.text("date")),
        # A table says so of its runs; InternEvo's own show none of Megatron core's overlap.
        "gradients_wait": "none" in row.text("overlap") or "InternEvo" in engine,
        "imbalance": NATURAL if "natural" in row.text("routing") else 1.0,
        "mtp": int(yes(row, "mtp_layer")),
        "first_layers": row.number("first_layers") or first,
        "last_layers": row.number("last_layers") or last,
    }
    if "kv_channels" not in row.cells and record.model["hidden"] % record.model["n_head"]:
        columns["head_dim"] = record.model["hidden"] / record.model["n_head"]
    if row.text("gradients"):
        columns["grad_width"] = 4 if "32" in row.text("gradients") else 2
    return columns | _recipe(record, row) | _megatron_columns(record, row, columns["flash"])


def _recipe(record: Record, row: Row) -> dict[str, bool | int]:
    """Returns the columns of how experts run, and of what backward repeats: as the row says, or as
    the recipes of its release do."""
    engine, card, dispatcher = row.text("engine"), row.text("gpu_type"), row.text("dispatcher")
    release, drops = _container(engine), "token drop" in row.text("routing")
    usual = release > NEVER and not drops and not dispatcher
    hybrid_ep = "HybridEP" in dispatcher or (usual and release >= HYBRID_EP)
    hopper = bool(re.search("H[12]00", card))
    chunked = record.pp == 1 or record.vpp > 1  # megatron-core's overlap asks for model chunks
    graph = has_experts(row) and chunked and "MX" in row.text("precision")
    graph = graph and release >= STEP_GRAPH
    modules = _repeated(row)
    if release > NEVER and row.text("attention") == "mla" and not graph:
        modules.add("mla_up_proj")  # as all recipes do that fill the card's memory
    return {
        "hybrid_ep": hybrid_ep,
        "deep_ep": hybrid_ep or "DeepEP" in dispatcher or (usual and hopper),
        "padded": drops,
        "fused_sort": release > NEVER,
        "step_graph": graph,
        "fp8_attention": graph and "300" in card,
        "ep_overlap": "all-to-all" in row.text("overlap") or graph,
        "repeated": len(modules - {"core_attn"}),
        "repeats_latent": "mla_up_proj" in modules,
        "repeats_mlp": "mlp" in modules,
    }


def _container(engine: str) -> tuple[int, int]:
    """Returns the release of NVIDIA's container that ran Megatron-Bridge, (26, 6); (0, 0) without
    one."""
    release = re.search(r"Megatron-Bridge.*container (\d\d)\.(\d\d)", engine)
    return (int(release[1]), int(release[2])) if release else NEVER


def _sends_whole_gradients(engine: str, date: str) -> bool:
    """Returns whether DeepSpeed's stages scattered activations alone, as on Jean Zay until its
    branch megatron2.4-3d cut gradients, too, on June 11, 2021 (a096d32d7). A date without a year is
    of that table."""
    return "DeepSpeed" in engine and bool(re.fullmatch(r"\d\d-\d\d", date)) and date < "06-11"


def _megatron_columns(record: Record, row: Row, flash: bool) -> dict[str, Any]:
    """Returns the columns of Megatron-LM's memory. Its flags are columns of the tables of its
    continuous integration; what they do not say has its default there."""
    engine, tests = row.text("engine"), bool(row.text("golden"))
    model, gated = record.model, record.model.get("activation") == "swiglu"
    heads, tokens = model["n_head"], row.number("micro_batch") or 1.0
    core = FAMILIES[family_of(engine)] == "megatron_core" and "InternEvo" not in engine
    transformer_engine = row.text("transformer_impl") != "local"
    ampere = planning_gpu(row.text("gpu_type")).name.startswith("A100")
    # PyTorch's cuBLAS takes 32 MiB in forward and in backward, 8 on Ampere where it may differ from
    # run to run; Transformer Engine's takes 32 or 4, and 4 more of it where experts are grouped.
    grouped = has_experts(row) and (yes(row, "grouped") or not tests)
    workspaces = 2 * (8.1 if ampere and not yes(row, "deterministic") else 32.0)
    workspaces += transformer_engine * (4.0 if ampere else 32.0) * (5 if grouped else 1)
    columns: dict[str, Any] = {}
    if tests:
        unfused = row.text("attention_backend") in ("unfused", "local") or not transformer_engine
        # Containers of before have no fused attention: of a cluster's own golden values, and of
        # tests that no recipe runs any more.
        older = "dracooci" in row.text("golden") or not row.number("gpus")
        older = older and "lts" in row.text("golden")
        flash = not (unfused or (older and not row.text("attention_backend")))
        cut = (row.number("divisible") or 128) * record.tp
        columns["vocab"] = math.ceil(model["vocab_size"] / cut) * cut
        columns["positions"] = 0 if row.text("position") else record.seq_len
        columns["scattered"] = False  # the pipeline is Megatron core's
        if not transformer_engine:  # its own attention keeps a buffer of scores
            workspaces += tokens * heads * record.seq_len**2 * 2 / record.tp / 2**20
    return columns | {
        "dropout": tests or not gated,
        "megatron": core or tests or "TE 2" in engine,
        "flash": flash,
        "biased": yes(row, "bias"),
        "fused_gradients": transformer_engine and not yes(row, "no_grad_acc_fusion"),
        "output_twice": record.cp > 1 or (ampere and flash and tokens > 1),
        "workspaces": round(workspaces),
        "te_loss": "_cef" in row.text("table"),  # a case of SimuMax with the loss fused
    }
