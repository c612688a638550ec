"""Rows of published measurements (a CSV with the columns of logs/published) as `Columns`.

What a row leaves out is derived where an identity gives it (gas, dp, layers from parameters), or
has its usual value where that is harmless (vocabulary 51,200); else the row is left out, with the
reason.
"""

import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from analysis.logs.published_csv import Row, read_csv
from analysis.planner import memory
from analysis.planner.columns import FAMILIES, Columns, columns
from analysis.planner.engines import family_of
from analysis.planner.timemodel import Machine, machine_of
from base.errors import UsageError
from base.units import GIB
from models.config import Experts, GPTConfig, LatentAttention, SlidingWindow
from models.flops import sc21
from models.gpus import joined, planning_gpu
from parallel.config.axes import AXES, EXPERT_AXES, MODEL_AXES, RANK_AXES, SET_AXES
from parallel.config.layout import RECOMPUTE, Layout

NEEDED = ("gpu_type", "gpus", "hidden", "tp", "pp", "micro_batch", "step_s")
COUNTS = (
    *("gpus", "gpus_per_node", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len"),
    *(*AXES, *EXPERT_AXES, "micro_batch", "global_batch", "gas", "zero_ranks"),
)
# Layers of the first and the last stage, by flags of a test of Megatron-LM that its table lacks:
# tests/functional_tests/test_cases/<model>/model_config.yaml, --decoder-first-pipeline-num-layers.
ENDS = {"gpt/gpt3_mcore_te_tp1_pp4_vp1_uneven_pipeline": (2, 2)}
CRASHED = ("OOM", "crashed_or_OOM")  # statuses of runs that may have had too little memory
NATURAL = 1.4  # tokens of the fullest rank's experts over the mean where the router chooses
SLOW = 1.3  # a run this many times slower than one with no less to do met what is not modelled


def stages_without_layers(x: Columns) -> np.ndarray:
    """Stages behind that of the last layer, where the output layer counts in cutting them: stage s
    begins at the layer at which s shares of the parameters are reached."""
    share = (x.layers + x.vocab * x.hidden / memory.layer_params(x)) / x.pp  # in layers
    behind = x.pp - 1 - np.floor((x.layers - 1) / share + 1e-9)
    return np.where(x.nanotron, np.maximum(behind, 0), 0)


@dataclass
class Rows:
    """The rows that can be modelled, and why the others cannot.

    measured: seconds per step, nan where there is none. memory_gb likewise. status: ok, OOM ...
    fit: may be fitted (the row does not contradict itself).
    guessed: the model's width is not published. steady: the time is not of a first iteration.
    model: (layers, hidden) of each row, for splits.
    """

    ids: list[str]
    x: Columns
    machine: Machine
    measured: np.ndarray
    memory_gb: np.ndarray
    gpu_memory_gb: np.ndarray
    status: list[str]
    fit: np.ndarray
    guessed: np.ndarray
    steady: np.ndarray
    model: list[tuple[int, int]]
    cluster: list[str]
    gpus_per_node: np.ndarray  # of a node, where fast links join more than those, too
    gpu: list[str]
    cluster_key: list[str]
    left_out: list[tuple[str, str]]
    last_stage: np.ndarray  # whether memory_gb is that of a rank of the last pipeline stage

    @property
    def allocated(self) -> np.ndarray:
        """Gigabytes that PyTorch allocates on the rank of memory_gb, nan where no formula counts
        every tensor, (n,)."""
        last = memory.allocated(self.x, "last")
        return np.where(self.last_stage, last, memory.allocated(self.x)) / GIB

    @property
    def has_step_memory(self) -> np.ndarray:
        """Rows whose gigabytes are what a step needs, bool (n,).

        A reading of the whole card is what the allocator took. Rows in fp8 do not say whether they
        hold the weights in bf16 beside fp8.
        """
        full = self.memory_gb >= self.gpu_memory_gb
        return np.isfinite(self.memory_gb) & ~full & ~self.x.fp8 & ~self.tensors_alone

    @property
    def tensors_alone(self) -> np.ndarray:
        """Rows whose gigabytes are those of tensors, without CUDA's context and NCCL, bool (n,):
        nanotron prints PyTorch's largest sum of allocated bytes."""
        return self.x.nanotron

    @property
    def can_start(self) -> np.ndarray:
        """Whether the row's engine can start it at all, whatever its memory, bool (n,).

        nanotron wants pp - 1 micro-batches or more for its schedule, and something in each stage:
        norm, output layer and loss fill two stages behind the last layer. Of 212 such runs of the
        Ultra-Scale sweep one ran.
        """
        x = self.x
        few, empty = x.n_micro < x.pp - 1, stages_without_layers(x) > 2
        return ~(x.nanotron & (few | empty))

    def key(self, i: int) -> tuple:
        """A key that rows share when they repeat one run."""
        numbers = tuple(float(getattr(self.x, f.name)[i]) for f in fields(Columns))
        return (*numbers, self.cluster_key[i], self.status[i])


class Settings(NamedTuple):
    """The settings of one row: what `columns` takes, and whether the model's width is a guess."""

    columns: dict[str, Any]
    guessed: bool


def _yes(row: Row, name: str) -> bool:
    return row.text(name).lower() in ("1", "1.0", "true", "yes", "swiglu")


def _settings(row: Row) -> Settings:
    """The settings of one row.

    Raises:
        ValueError: what is missing or cannot be.
    """
    _check_counts(row)
    if row.text("blocks"):
        raise ValueError(f"a hybrid, which no GPT is: {row.text('blocks')}")
    if has_experts(row) and not row.number("topk"):
        raise ValueError("experts, and their sizes are not stated")
    model, guessed = _model(row)
    split = _split(row)
    engine, pp = row.text("engine"), split["pp"]
    zero = row.number("zero_stage")
    family = FAMILIES[family_of(engine)]
    recipe = bool(re.search(r"nemo|megatron-bridge", engine, re.IGNORECASE))  # of NVIDIA's
    sequence_parallel = _yes(row, "sequence_parallel")
    if zero is None and "Megatron-DeepSpeed" in engine:
        zero = 1.0  # what its launch scripts set; 1.3B would not fit 16 GB without
    if zero is None and recipe:  # its distributed optimizer, or else its FSDP
        zero = 1.0 if has_experts(row) or _weights_fit(row, split) else 3.0
    if not row.text("sequence_parallel") and recipe:
        sequence_parallel = split["tp"] > 1
    if model["layers"] + 2 < pp:  # embedding and logits may each have a stage (BLOOM)
        raise ValueError(f"{model['layers']:g} layers cannot fill {pp:g} stages")
    if (zero or 0) > 1 and pp > 1 and "FSDP2" not in engine:
        raise ValueError(f"ZeRO-{zero:g} cannot run with {pp:g} pipeline stages")
    offload = row.text("offload").lower()
    fused = re.search(
        r"torchtitan|nanotron|picotron|internevo|nemo|core|flash", engine, re.IGNORECASE
    )
    nanotron, recompute = family == "nanotron", _recompute(row)
    deepspeed = "deepspeed" in engine.lower()
    values = {
        **model,
        **split,
        **_precision(row),
        "zero_stage": zero or 0,
        "recompute": recompute,
        # Megatron-DeepSpeed's ZeRO-3 scripts set --checkpoint-in-cpu. Its runs on Jean Zay have
        # micro-batches that fit no other way.
        "host_checkpoints": deepspeed and zero == 3 and RECOMPUTE[recompute] == "full",
        "sequence_parallel": sequence_parallel,
        "offload": 0 if re.match("$|no|0|activations", offload) else 1 + ("param" in offload),
        "flash": bool(fused or re.search(r"H100|H200|H800|B[23]00|MI3", row.text("gpu_type"))),
        "gpus_per_node": joined(row.text("gpu_type"), _node(row)),
        "deepspeed": deepspeed,
        "fsdp2": "fsdp2" in engine.lower() or (recipe and zero == 3),
        "family": FAMILIES.index(family),
        "shards": row.number("zero_ranks") or split["dp"] * split["cp"],
        "plain": nanotron,
        "rotary": nanotron,
        "untied": nanotron and _untied(row, model),  # others' counts are rounded too far
    }
    return Settings(values | _of_megatron(row, values), guessed)


# Columns of latent attention -> a heading, and the word in `notes` where there is none.
_LATENTS = {
    "q_lora": ("q_lora_rank", "q_lora"),
    "kv_lora": ("kv_lora_rank", "kv_lora"),
    "rope_dim": ("qk_pos_emb_head_dim", "qk_rope"),
    "value_dim": ("v_head_dim", "v_dim"),
}


def _latent(row: Row, words: tuple[str, str]) -> float:
    """A size of latent attention; 0 where none is stated."""
    heading, word = words
    stated = re.search(rf"\b{word} (\d+)", row.text("notes"))
    return row.number(heading) or (float(stated[1]) if stated else 0.0)


def _ends(row: Row) -> tuple[int, int]:
    """Layers of the first and the last stage where the row states them; else zeros. AMP counts the
    parts of DeepSpeed's module: two before the layers, of which each is one."""
    if not (cut := re.search(r"stages begin at part ([\d ]+) of", row.text("notes"))):
        return ENDS.get(row.text("model"), (0, 0))
    begins = np.clip(np.array(cut[1].split(), int) - 2, 0, int(row.number("layers") or 0))
    held = np.diff(begins)
    return (int(held[0]), int(held[-1])) if len(held) > 1 else (0, 0)


def _of_megatron(row: Row, values: dict[str, Any]) -> dict[str, Any]:
    """What the bytes of Megatron-LM's step follow from. Its flags are columns of the tables of its
    continuous integration; what they do not say has its default there.

    Raises:
        ValueError: what no formula counts, or latent attention of unknown sizes.
    """
    engine, of_tests = row.text("engine"), bool(row.text("golden"))
    for name in ("optimizer", "pp_layout", "mtp"):
        if row.text(name) not in ("", "adam"):
            raise ValueError(f"no formula counts {name} {row.text(name)}")
    names = ("experts", "topk", "moe_ffn", "shared_ffn", "dense_layers")
    settings: dict[str, Any] = {name: row.number(name) or 0.0 for name in names}
    settings["first_layers"], settings["last_layers"] = _ends(row)
    recipe = re.search(r"Megatron-Bridge|\(Megatron-Core\)", engine)  # states 1; the usual is tp
    usual = 1.0 if recipe and has_experts(row) else values["tp"]
    settings |= {"ep": row.number("ep") or 1.0, "etp": row.number("etp") or usual}
    if has_experts(row) and "FSDP2" in engine and not row.number("ep"):
        raise ValueError("experts, and their ep is not stated")
    routing, dispatcher = row.text("routing"), row.text("dispatcher")
    # NVIDIA's containers of Megatron-Bridge take HybridEP but where tokens are dropped.
    bridge = "Megatron-Bridge" in engine and "container" in engine
    bridge = bridge and not dispatcher and "drop" not in routing
    settings |= {
        "hybrid_ep": "HybridEP" in dispatcher or bridge,
        "deep_ep": bool(re.search("DeepEP|HybridEP", dispatcher)) or bridge,
        "padded": "token drop" in routing,
        "ep_overlap": "all-to-all" in row.text("overlap"),
        "imbalance": NATURAL if "natural" in routing else 1.0,
        "mtp": float("one MTP layer" in row.text("notes") and "with one" in row.text("notes")),
    }
    latent = row.text("attention") == "mla"
    settings |= {name: latent * _latent(row, words) for name, words in _LATENTS.items()}
    if latent and not settings["kv_lora"]:
        raise ValueError("the sizes of latent attention are not stated")
    head = latent * _latent(row, ("qk_head_dim", "qk_nope"))
    head = head or row.number("kv_channels") or (has_experts(row) and row.number("head_dim"))
    settings["head_dim"] = head or values["hidden"] / values["heads"]
    core = FAMILIES[family_of(engine)] == "megatron_core" and "InternEvo" not in engine
    transformer_engine = row.text("transformer_impl") != "local"
    ampere = planning_gpu(row.text("gpu_type")).name.startswith("A100")
    # PyTorch's cuBLAS takes 32 MiB in forward and in backward, 8 on Ampere where it may differ from
    # run to run; Transformer Engine's takes 32 or 4, and 4 more of it where experts are grouped.
    own = 4.0 if ampere else 32.0
    grouped = settings["experts"] and (_yes(row, "grouped") or not of_tests)
    workspaces = 2 * (8.1 if ampere and not _yes(row, "deterministic") else 32.0)
    workspaces += transformer_engine * own * (5 if grouped else 1)
    flash, tokens = values["flash"], row.number("micro_batch") or 1.0
    if of_tests:
        unfused = row.text("attention_backend") in ("unfused", "local") or not transformer_engine
        # Containers of before have no fused attention: of a cluster's own golden values, and of
        # tests that no recipe runs any more.
        older = "dracooci" in row.text("golden") or not row.number("gpus")
        older = older and "lts" in row.text("golden")
        flash = not (unfused or (older and not row.text("attention_backend")))
        cut = (row.number("divisible") or 128) * values["tp"]
        if not row.number("vocab"):
            raise ValueError("no vocabulary")
        settings["vocab"] = math.ceil(values["vocab"] / cut) * cut
        settings["untied"] = _yes(row, "untied")
        settings["positions"] = 0 if row.text("position") else values["seq"]
        if not transformer_engine:  # its own attention keeps a buffer of scores
            scores = tokens * values["heads"] * values["seq"] ** 2 * 2 / values["tp"]
            workspaces += scores / 2**20
    elif "TE 2" in engine:
        settings["untied"] = _untied(row, values)
    return settings | {
        "dropout": of_tests or not values["glu"],
        "megatron": core or of_tests or "TE 2" in engine,
        "flash": flash,
        "biased": _yes(row, "bias"),
        "fused_gradients": transformer_engine and not _yes(row, "no_grad_acc_fusion"),
        "output_twice": values["cp"] > 1 or (ampere and flash and tokens > 1),
        "workspaces": round(workspaces),
        "te_loss": "_cef" in row.text("table"),  # a case of SimuMax with the loss fused
    }


def _gpus(row: Row) -> float | None:
    """The number of GPUs. Megatron-LM's tests run on a node of 8 but for those of releases."""
    tests = row.text("golden") and "release" not in row.text("model")
    return row.number("gpus") or (8.0 if tests else None)


def _check_counts(row: Row) -> None:
    """Raises: ValueError: a number that cannot be, or one that nothing can be derived without."""
    for name in COUNTS:
        value = row.number(name)
        if value is not None and not (0 <= value < 2**40 and value % 1 == 0):
            raise ValueError(f"{name} cannot be {value:g}")
    if (row.number("zero_stage") or 0) not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage cannot be {row.text('zero_stage')}")
    for name, value in (("gpus", _gpus(row)), ("tp", row.number("tp")), ("pp", row.number("pp"))):
        if not value:
            raise ValueError(f"no {name}")


def _model(row: Row) -> Settings:
    """The sizes of the model.

    Raises:
        ValueError: no sizes.
    """
    params, hidden, layers = (row.number(name) for name in ("params_b", "hidden", "layers"))
    pp, vocab = row.number("pp"), row.number("vocab") or 51200.0
    if not (hidden or params) or not (layers or params):
        raise ValueError("no model sizes (hidden, layers or params_b)")
    guessed = not hidden
    if not hidden:  # GPTs of this size are about 128 times as wide as deep
        hidden = 128.0 * round((params * 1e9 / 12 / 128**2 * 1.0) ** (1 / 3))
    if not layers:
        layers = round((params * 1e9 - vocab * hidden) / (12 * hidden**2) / pp) * pp
        layers = max(layers, pp)
    heads = row.number("heads") or max(1, round(hidden / 128))
    sizes = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": row.number("kv_heads") or heads,
        "ffn": row.number("ffn") or 4 * hidden,
        "glu": _yes(row, "glu"),
        "vocab": vocab,
        "seq": row.number("seq_len") or 2048.0,
    }
    return Settings(sizes, guessed)


def _weights_fit(row: Row, split: dict[str, float]) -> bool:
    """Whether a rank's weights and gradients in 16 bits fit the card without cutting them by dp."""
    each = (row.number("params_b") or 0) / (split["tp"] * split["pp"]) * 1e9
    return 4 * each < planning_gpu(row.text("gpu_type")).memory_gb * GIB


def _untied(row: Row, sizes: dict[str, Any]) -> bool:
    """Whether the published number of parameters counts an output layer beside the embedding."""
    h, share = sizes["hidden"], sizes["kv_heads"] / sizes["heads"]
    layer = h * (2 * h * (1 + share) + sizes["ffn"] * (2 + sizes["glu"]))
    table = sizes["vocab"] * h
    more = (row.number("params_b") or 0) * 1e9 - sizes["layers"] * layer - table
    return more > table / 2


def _split(row: Row) -> dict[str, float]:
    """tp, cp, pp, vpp, dp, micro_batch and n_micro.

    Raises:
        ValueError: they do not give the number of GPUs, or no batch is stated.
    """
    gpus, split = _gpus(row), {axis: row.number(axis) or 1.0 for axis in SET_AXES}
    if a_chunk := row.number("layers_per_vp"):
        split["vpp"] = (row.number("layers") or 0.0) / split["pp"] / a_chunk
    dp = gpus / math.prod(split[axis] for axis in MODEL_AXES)
    if dp < 1 or dp % 1:
        sizes = " x ".join(f"{axis} {split[axis]:g}" for axis in MODEL_AXES)
        raise ValueError(f"gpus {gpus:g} is no multiple of {sizes}")
    batch, gas, micro = (row.number(name) for name in ("global_batch", "gas", "micro_batch"))
    if not micro and batch and gas:
        micro = batch / gas / dp
    if not micro and batch and split["pp"] == 1:  # no accumulation is stated
        micro = batch / dp
    micro = micro or 1.0
    if not batch and not gas:
        if split["pp"] > 1:
            raise ValueError("no global_batch and no gas")
        gas = 1.0
    if micro % 1:
        raise ValueError(f"micro_batch would be {micro:g}, no whole number")
    n_micro = max(1.0, round(batch / micro / dp if batch else gas))
    return split | {"dp": dp, "micro_batch": micro, "n_micro": n_micro}


def _precision(row: Row) -> dict[str, Any]:
    """Bytes of a weight and of an accumulated gradient, and whether the GEMMs run in fp8 or fp4.

    Raises:
        ValueError: the card has no such format.
    """
    precision = (row.text("precision") or "fp16").lower()
    width = 4 if re.search(r"fp32|float32|tf32", precision) else 2
    low = _low(row)
    if low and low not in planning_gpu(row.text("gpu_type")).peaks:
        raise ValueError(f"{row.text('gpu_type')} has no {low}")
    grad_width = 4 if low or re.search("bf16|bfloat16", precision) else width  # accumulated so
    # Megatron-Bridge: as its makers' other recipes in logs/published. InternEvo adds and reduces
    # `param.grad` in the weights' format (internlm/solver/optimizer/hybrid_zero_optim.py).
    if re.search("Megatron-Bridge|InternEvo", row.text("engine")):
        grad_width = 2
    if row.text("gradients"):
        grad_width = 4 if re.search("32", row.text("gradients")) else 2
    tf32 = bool(re.search("tf32", precision))
    return {"width": width, "grad_width": grad_width, "fp8": bool(low), "tf32": tf32}


def _low(row: Row) -> str:
    """The format below 16 bits in which the layers' GEMMs run: fp8, fp4 or none."""
    precision = row.text("precision").lower()
    if re.search(r"fp4|float4", precision):
        return "fp4"
    return "fp8" if re.search(r"fp8|float8|e4m3|e5m2", precision) else ""


def _node(row: Row) -> int:
    return int(row.number("gpus_per_node") or 8)


def _recompute(row: Row) -> int:
    """The policy's place in RECOMPUTE; without one, what the published formula counts."""
    text, notes = row.text("recompute").lower(), row.text("notes")
    if text == "selective" and re.search(r"recompute (?!core_attn)", notes) and has_experts(row):
        text = "none"  # modules of little work; the policy of this name repeats attention
    if text in RECOMPUTE:
        return RECOMPUTE.index(text)
    if text in ("uniform", "block"):  # Megatron's ways of full recomputation
        return RECOMPUTE.index("full")
    counted = re.search(r"recomput|8\s*PT|96\s*\*?\s*B|eq\.?3", row.text("tflops_formula"))
    return RECOMPUTE.index("full" if counted else "none")


def _seconds(row: Row, s: dict[str, Any]) -> float:
    """Published seconds, or what the published tokens/s or TFLOP/s give under their formula."""
    if seconds := row.number("step_s"):
        return seconds
    tokens = s["dp"] * s["micro_batch"] * s["n_micro"] * s["seq"]
    if rate := row.number("tokens_per_s"):
        return tokens / rate
    rate, formula = row.number("tflops"), row.text("tflops_formula")
    gpus = math.prod(s[axis] for axis in RANK_AXES)
    if rate and re.search(r"96|eq\.?3", formula):
        shape = GPTConfig(int(s["layers"]), int(s["hidden"]), 1, int(s["vocab"]), int(s["seq"]))
        return sc21(shape, shape.max_seq_len, recompute=True) * tokens / (rate * 1e12 * gpus)
    params = row.number("params_b")
    if rate and params and (match := re.search(r"([68])\s*PT", formula)):
        return int(match[1]) * params * 1e9 * tokens / (rate * 1e12 * gpus)
    return math.nan


def read_rows(paths: list[Path], needed: tuple[str, ...] = NEEDED) -> Rows:
    """Every row of the files that can be modelled; `needed` columns must be there.

    Raises:
        UsageError: unreadable, or a column is missing, or no row is usable.
    """
    modelled: list[tuple[str, Row, Settings, Machine]] = []
    left_out: list[tuple[str, str]] = []
    for path in paths:
        for row in read_csv(path, needed).rows:
            name = row.text("id") or f"{Path(path).stem}:{row.line_no}"
            try:
                s = _settings(row)
                where = row.text("gpu_type"), row.text("cluster"), _node(row)
                how = s.columns["width"], _low(row) or "fp8", s.columns["gpus_per_node"]
                machine = machine_of(*where, *how, tf32=s.columns["tf32"])
            except ValueError as error:
                left_out.append((name, str(error)))
            else:
                modelled.append((name, row, s, machine))
    if not modelled:
        why = f" ({left_out[0][0]}: {left_out[0][1]})" if left_out else ""
        raise UsageError(f"{', '.join(map(str, paths))}: no row can be modelled{why}")
    names, rows, settings, machines = zip(*modelled, strict=True)
    status = ["ok" if _status(row).lower() == "ok" else _status(row) for row in rows]
    seconds = [_seconds(row, s.columns) for row, s in zip(rows, settings, strict=True)]
    return Rows(
        ids=list(names),
        x=columns(**{k: np.array([s.columns[k] for s in settings]) for k in settings[0].columns}),
        machine=Machine.stack(machines),
        measured=np.where(np.array(status) == "ok", seconds, np.nan),
        memory_gb=np.array([row.number("memory_gb") or math.nan for row in rows]),
        gpu_memory_gb=np.array([row.number("gpu_memory_gb") or math.nan for row in rows]),
        status=status,
        fit=np.array([not row.text("lint") for row in rows]),
        steady=np.array([not row.text("warm_up") for row in rows]),
        guessed=np.array([s.guessed for s in settings]),
        model=[(int(s.columns["layers"]), int(s.columns["hidden"])) for s in settings],
        cluster=[row.text("cluster") for row in rows],
        gpus_per_node=np.array([_node(row) for row in rows]),
        gpu=[planning_gpu(row.text("gpu_type")).name for row in rows],
        cluster_key=[_cluster_key(row) for row in rows],
        left_out=left_out,
        last_stage=np.array(["that of the last rank" in row.text("notes") for row in rows]),
    )


class ExpertRow(NamedTuple):
    """A published run of a model with experts, as it was set.

    row: its cells (routing, dispatcher, overlap, engine, gpu_type, status, memory_gb, lint ...).
    step_s: seconds, nan where none is published.
    """

    row: Row
    config: GPTConfig
    layout: Layout
    step_s: float


def has_experts(row: Row) -> bool:
    """Whether a row says that its model has experts."""
    return (row.number("experts") or row.number("ep") or 1) > 1


# Names of the parts of a model -> headings.
_MODEL = {"n_layer": "layers", "hidden": "hidden", "n_head": "heads", "n_kv_head": "kv_heads"}
_MODEL |= {"ffn_hidden": "ffn", "kv_channels": "head_dim", "vocab_size": "vocab"}
_MODEL |= {"max_seq_len": "seq_len"}
_EXPERTS = {"num_experts": "experts", "moe_router_topk": "topk", "moe_ffn_hidden_size": "moe_ffn"}
_EXPERTS |= {"moe_shared_expert_intermediate_size": "shared_ffn", "first_dense": "dense_layers"}
_LATENT, _WINDOW = (
    {of.name: of.name for of in fields(p)} for p in (LatentAttention, SlidingWindow)
)


def _sizes(row: Row, headings: dict[str, str]) -> dict[str, int]:
    return {of: int(row.number(name)) for of, name in headings.items() if row.text(name)}


def config_of(row: Row) -> GPTConfig:
    """The model of a row with experts; its vocabulary has an output layer of its own.

    Raises:
        ValueError: it is no GPT, or sizes are missing or do not fit together.
    """
    if row.text("blocks") or not row.text("layers"):
        raise ValueError(f"no layers of a GPT: {row.text('blocks') or row.text('model')}")
    experts = _sizes(row, _EXPERTS)
    if every := int(row.number("moe_layer_freq") or 0):  # the last of so many has experts
        experts |= {"moe_layer_freq": every, "first_dense": every - 1}
    parts: dict[str, Any] = {"experts": Experts(**experts)}
    if row.text("attention") == "mla":
        parts["mla"] = LatentAttention(**_sizes(row, _LATENT))
    if row.text("window_size"):
        parts["window"] = SlidingWindow(**_sizes(row, _WINDOW))
    like_llama = {"position": "rope", "norm": "rmsnorm", "tied": False, "bias": False}
    activation = "swiglu" if _yes(row, "glu") else "gelu"
    return GPTConfig(**_sizes(row, _MODEL), **like_llama, **parts, activation=activation)


class ExpertRows(NamedTuple):
    """The rows of models with experts, and (id, reason) of those that are left out."""

    rows: list[ExpertRow]
    left_out: list[tuple[str, str]]


def read_expert_rows(paths: list[Path]) -> ExpertRows:
    """Every row of the files whose model has experts.

    Raises:
        UsageError: unreadable, or a column is missing.
    """
    rows: list[ExpertRow] = []
    left_out: list[tuple[str, str]] = []
    for path in paths:
        for row in filter(has_experts, read_csv(path, (*NEEDED, "experts", "ep")).rows):
            try:
                _check_counts(row)
                if not row.number("global_batch"):
                    raise ValueError("no global_batch")
                split = _split(row) | {axis: row.number(axis) or 1.0 for axis in EXPERT_AXES}
                split |= {"zero_stage": row.number("zero_stage") or 0}
                layout = Layout(
                    **{name: int(value) for name, value in split.items()},
                    sequence_parallel=_yes(row, "sequence_parallel"),
                    recompute=RECOMPUTE[_recompute(row)],
                )
                config = config_of(row)
                seconds = _seconds(row, split | {"seq": config.max_seq_len})
            except ValueError as error:
                left_out.append((row.text("id"), str(error)))
            else:
                rows.append(ExpertRow(row, config, layout, seconds))
    return ExpertRows(rows, left_out)


def _status(row: Row) -> str:
    return row.text("status") or "ok"


def _cluster_key(row: Row) -> str:
    """Equal for rows of one cluster: the card and the first word of the cluster's description."""
    return f"{planning_gpu(row.text('gpu_type')).name} {row.text('cluster').split(' ')[0]}"


def healthy(rows: Rows) -> np.ndarray:
    """False for the runs that met a slow network, bool (n,).

    A cluster has slow days if two of its identical runs are 1.3 times apart (Jean Zay's V100 nodes:
    129 and 217 s); only there is a run called slow. It is slow if a run with no less to do was 1.3
    times as fast. On one split of one model the time t grows with the size b and the number m of
    micro-batches. The time of a sequence in a pipeline slot, t / (b (m + (pp - 1) / vpp)), does not
    grow with them.
    """
    x, t = rows.x, rows.measured
    slot = t / (x.micro_batch * (x.n_micro + (x.pp - 1) / x.vpp))
    groups: dict[tuple, list[int]] = {}
    same: dict[tuple, list[int]] = {}
    for i in range(len(t)):
        if np.isfinite(t[i]) and rows.fit[i] and rows.steady[i]:
            key = (*rows.model[i], int(x.heads[i]), int(x.seq[i]), int(x.tp[i]), int(x.pp[i]))
            key += (int(x.vpp[i]), int(x.dp[i]), int(x.zero_stage[i]) == 3, int(x.recompute[i]))
            key += (int(x.cp[i]), bool(x.fp8[i]), rows.cluster[i])
            groups.setdefault(key, []).append(i)
            same.setdefault(rows.key(i), []).append(i)
    unsteady = {rows.cluster[g[0]] for g in same.values() if t[g].max() > SLOW * t[g].min()}
    good = np.ones(len(t), bool)
    for group in groups.values():
        if rows.cluster[group[0]] not in unsteady:
            continue
        for i in group:
            for j in group:
                more = x.micro_batch[j] >= x.micro_batch[i] and x.n_micro[j] >= x.n_micro[i]
                less = x.micro_batch[j] <= x.micro_batch[i] and x.n_micro[j] <= x.n_micro[i]
                if (more and t[i] > SLOW * t[j]) or (less and slot[i] > SLOW * slot[j]):
                    good[i] = False
    return good
