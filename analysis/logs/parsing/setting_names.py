"""The settings of a run, from the argument dumps in its log.

A fact keeps the first origin that states it, in the order of `record.ORIGINS`. A weaker origin that
states something else adds a note and changes nothing.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import cache
from typing import Any

from analysis.logs.parsing.fields import plain
from analysis.logs.parsing.logfile import Log
from analysis.logs.record import Record
from models.config import ACTIVATIONS, NORMS, POSITIONS
from parallel.config.axes import AXES

# Facts that a log may leave out: Record's fields and sizes of the model, with the flags' help.
COUNTS = {
    "gpus": "GPUs of the run",
    **AXES,
    "micro_batch": "sequences per micro-batch and dp rank",
    "n_micro": "micro-batches per optimizer step and dp rank",
    "global_batch": "sequences per optimizer step, all ranks",
    "seq_len": "tokens per sequence",
    "zero_stage": "ZeRO stage",
    "planned_steps": "optimizer steps that the run was to take",
}
SETTINGS = COUNTS | {
    "params": "parameters of the model",
    "precision": "what it trained in",
    "recompute": "activations that are recomputed",
    "gpu_type": "the card, as it is sold: 'H100 SXM' (H100 alone may be two cards)",
    "peak_tflops": "TFLOP/s of the card's peak in this precision, where the card is not known",
    "commit": "the commit of the training code",
    "engine": "what trained",
}
NUMBERS = ("params", "peak_tflops")
SETTING_WORDS = {
    "precision": ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4"),
    "recompute": ("none", "selective", "full"),
}
# GPTConfig's names, which are keys of Record.model.
MODEL_SIZES = {
    "n_layer": "transformer blocks",
    "hidden": "hidden size",
    "n_head": "attention heads",
    "n_kv_head": "heads of keys and values",
    "kv_channels": "size of a head, where it is not hidden / n_head",
    "vocab_size": "token ids",
    "max_seq_len": "positions of the model",
    "ffn_hidden": "feed-forward size",
}
MODEL_WORDS = {
    "position": (POSITIONS, "how positions enter the model"),
    "norm": (NORMS, "the norm before each part of a block"),
    "activation": (ACTIVATIONS, "of the feed-forward; swiglu has a gate"),
}
MODEL_SWITCHES = {
    "qk_norm": "norm each head's query and key",
    "tied": "the output layer is the word embedding",
    "bias": "linear layers have biases",
}
MODEL = (*MODEL_SIZES, *MODEL_WORDS, *MODEL_SWITCHES)

# Record's fields and model sizes -> the names that argument dumps give them, surest first.
_ALIASES = {
    "gpus": "world_size dist_world_size n_gpus_total nproc_total",
    "tp": "tensor_model_parallel_size model_parallel_size tensor_parallel_degree"
    " intra_layer_model_parallel_size",
    "pp": "pipeline_model_parallel_size pipe_parallel_size pipeline_parallel_degree",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size context_parallel_degree",
    "dp": "data_parallel_size data_parallel_replicate_degree",
    "micro_batch": "micro_batch_size train_micro_batch_size_per_gpu per_device_train_batch_size"
    " local_batch_size batch_size",
    "n_micro": "gradient_accumulation_steps",
    "global_batch": "global_batch_size train_batch_size",
    "seq_len": "seq_length seq_len encoder_seq_length sequence_length max_seq_len",
    "planned_steps": "train_iters max_steps train_steps num_iterations",
    "zero_stage": "zero_optimization_stage zero_stage",
    "n_layer": "num_layers n_layer num_hidden_layers n_layers",
    "hidden": "hidden_size n_embd",
    "n_head": "num_attention_heads n_head n_heads",
    "n_kv_head": "num_query_groups num_key_value_heads n_kv_heads n_kv_head",
    "kv_channels": "kv_channels head_dim",
    "ffn_hidden": "ffn_hidden_size intermediate_size n_inner",
    "vocab_size": "override_vocab_size padded_vocab_size vocab_size",
    "max_seq_len": "max_position_embeddings block_size",
}
# Settings whose values are words, and those that Record has under no name of its own.
_WORDS = {
    "dtype": "params_dtype torch_dtype precision",
    "bf16": "bf16",
    "fp16": "fp16",
    "fp8": "fp8",
    "granularity": "recompute_granularity activations_checkpoint_granularity",
    "checkpoint": "checkpoint_activations recompute_activations activations_checkpoint_method"
    " gradient_checkpointing",
    "distributed_optimizer": "use_distributed_optimizer",
    "gated": "swiglu gated_linear_unit",
    "activation": "activation hidden_act activation_function",
    "mlp": "mlp_type",
    "norm": "normalization norm",
    "position": "position_embedding_type pos_emb",
    "untied": "untie_embeddings_and_output_weights no_weight_tying",
    "tied": "share_embeddings_and_output_weights tie_word_embeddings",
    "bias": "add_bias_linear",
    "unbiased": "disable_bias_linear",
    "qk_norm": "qk_layernorm",
    "rms_eps": "rms_norm_eps",
    "theta": "rope_theta",
    "grouped": "group_query_attention",
    "experts": "num_experts num_moe_experts num_local_experts n_routed_experts",
    "latent": "multi_latent_attention",
    "predicted": "mtp_num_layers num_nextn_predict_layers",
}
_NAMES = " ".join([*_ALIASES.values(), *_WORDS.values()]).split()


@cache
def _setting() -> re.Pattern[bytes]:
    """`name ..... 4`, `name: 4`, `"name": 4`, `args[name] = 4`, `--name 4`; a name is found whole.

    It takes longer to compile than --help should."""
    return re.compile(
        (
            rf"\b(?<![./])(?<![a-z]-)({_any_of(set(_NAMES))})(?![\w-])"
            r"""['"\]]{0,2}[ \t]{0,3}(?:\.{2,80}|[:=]|[ \t])[ \t]{0,16}['"\[]?"""
            r"(\d{1,15}(?![\d.]\d|\w)|None|null|[A-Za-z][\w.-]{0,30})"
        ).encode()
    )


def _any_of(names: set[str]) -> str:
    """A pattern for any of the names that looks at each letter once; - and _ are the same."""
    rest: dict[str, set[str]] = defaultdict(set)
    for name in names - {""}:
        rest[name[0]].add(name[1:])
    parts = (first.replace("_", "[-_]") + _any_of(after) for first, after in sorted(rest.items()))
    found = "|".join(parts)
    if "" in names:
        return f"(?:{found})?" if found else ""
    return f"(?:{found})" if len(rest) > 1 else found


# On a command line these have no value.
_SWITCH = re.compile(
    rb"--(swiglu|untie-embeddings-and-output-weights|group-query-attention|disable-bias-linear"
    rb"|multi-latent-attention|no-weight-tying)(?=[\s\\'\",]|\Z)"
)
_CARD = re.compile(
    rb"(?:CUDA capacity: |\bGPU \d{1,3}: |\[GPU\] )((?:NVIDIA|AMD|Tesla) ?[\w .-]{1,40}?)"
    rb"(?: with | \(UUID|[\r\n,])"
)
# Each rank says how many ranks it is connected to; Megatron's largest such group is dp x cp.
_GLOO = re.compile(rb"Expected number of connected peer ranks is : (\d{1,6})\b")
_USING_WORLD = re.compile(rb"using world size: {0,3}(\d{1,7})")
_USING_SIZES = re.compile(
    rb"(?<![\w-])(data|context|tensor-model|pipeline-model|model)-parallel[- ]size: {0,3}(\d{1,7})"
)
_RANK_PARAMS = re.compile(
    rb"number of parameters on (?:\(tensor, pipeline\) )?model parallel rank"
    rb" {1,3}(\([\d, ]{1,20}\)|\d{1,6}): {0,3}(\d{1,15})"
)
# Megatron and NeMo count FLOPs and parameters with the padded size.
_PADDED_VOCAB = re.compile(
    rb"(?:padded vocab \(size: (\d{1,9})\) with (\d{1,9}) dummy tokens"
    rb"|Padded vocab_size: (\d{1,9}), original vocab_size)"
)
_BF16 = ("torch.bfloat16", "bfloat16", "bf16", "bf16-mixed", "bf16-true")
_FP16 = ("torch.float16", "float16", "torch.half", "16-mixed")
_TOTAL_PARAMS = re.compile(rb"TOTAL_PARAMS=(\d{1,15})")
_HEADER = 1 << 19


def read_header(record: Record, header: bytes) -> None:
    """Fill `record` from the argument dumps in `header`, the text before training.

    The last value before training wins; where the same name was given another before, it is noted.
    """
    said: dict[str, list[str]] = defaultdict(list)
    for match in _setting().finditer(header):
        before = header[max(match.start() - 80, 0) : match.start()]
        # DeepSpeed's own world_size is the data-parallel one; its block_size is of bytes on disk.
        of_ranks = match[1].endswith(b"world_size") and b"config.py:" in before
        named, value = match[1].decode().replace("-", "_"), match[2].decode().partition("..")[0]
        between = header[match.end(1) : match.start(2)].strip(b" \t")
        prose = not between and value[0].isalpha() and not before.endswith(b"--")
        if not of_ranks and not prose and b"aio_config" not in before:
            said[named].append(value)
    for name in _SWITCH.findall(header):
        said.setdefault(name.decode().replace("-", "_"), ["True"])
    facts, uncounted = read_settings(record, said)
    if (padded := _PADDED_VOCAB.findall(header)) and "override_vocab_size" not in said:
        facts["vocab_size"] = sum(int(n) for n in padded[-1] if n)
    facts.update(_world(header, facts))
    if params := _params(header, facts):
        facts["params"] = params
    if card := _CARD.search(header):
        facts["gpu_type"] = card[1].decode().strip()
    state(record, {k: v for k, v in facts.items() if v is not None}, "log")
    record.uncounted += [why for why in uncounted if why not in record.uncounted]


def read_settings(
    record: Record, said: Mapping[str, list[str]]
) -> tuple[dict[str, Any], list[str]]:
    """(facts by Record's and GPTConfig's names, what no FLOPs convention counts) of settings.

    said: a setting's name -> its values in the order that they were printed; the last one counts,
    and a `record` that did not know it gets a note where there were others.
    """
    last = {name: values[-1] for name, values in said.items() if values}
    facts: dict[str, Any] = {}
    for field, aliases in _ALIASES.items():
        alias = next((a for a in aliases.split() if last.get(a, "").isdigit()), None)
        if alias is None:
            continue
        facts[field] = int(last[alias])
        given = dict.fromkeys(value for value in said[alias] if value.isdigit())
        known = record.model.get(field) or getattr(record, field, None)
        if len(given) > 1 and field != "gpus" and known is None:
            record.notes.append(
                f"contradiction: {alias} is given as {', '.join(given)};"
                f" {facts[field]}, the last before training, is used"
            )
    if facts.get("pp") == 0:  # GPT-NeoX's way to say that there is no pipeline
        facts["pp"] = 1
    if last.get("group_query_attention", "").lower() == "false":
        facts.pop("n_kv_head", None)  # Megatron prints num_query_groups all the same
    words = {
        field: next((last[a].lower() for a in aliases.split() if a in last), None)
        for field, aliases in _WORDS.items()
    }
    facts.update(_words(words, facts) | _architecture(words))
    return facts, _uncounted(words)


def _architecture(words: Mapping[str, str | None]) -> dict[str, Any]:
    """What is no size, in GPTConfig's words. An activation without a gate counts as gelu."""
    found: dict[str, Any] = {}
    activation = words["activation"] or ""
    if (
        words["gated"] == "true"
        or words["mlp"] == "llama"
        or activation.endswith("glu")
        or activation in ("silu", "swish")  # of Hugging Face's models, the gated ones
    ):
        found["activation"] = "swiglu"
    elif words["gated"] == "false" or activation.startswith(("gelu", "relu", "squared")):
        found["activation"] = "gelu"
    for name, ours in _BEGINNINGS.items():
        if word := next((w for w in ours if (words[name] or "").startswith(w)), None):
            found[name] = ours[word]
    found |= {"norm": "rmsnorm"} if words["rms_eps"] else {}
    found |= {"position": "rope"} if words["theta"] else {}
    if words["qk_norm"] in ("true", "false"):
        found["qk_norm"] = words["qk_norm"] == "true"
    for name, no in (("tied", "untied"), ("bias", "unbiased")):
        if words[name] in ("true", "false") or words[no] in ("true", "false"):
            found[name] = words[name] == "true" or (words[name] is None and words[no] == "false")
    return found


_BEGINNINGS = {
    "norm": {"rms": "rmsnorm", "layer": "layernorm"},
    "position": {"rope": "rope", "rotary": "rope", "learned": "learned"},
}


def _uncounted(words: Mapping[str, str | None]) -> list[str]:
    """What the model has that no convention here counts."""
    experts, predicted = (
        int(value) if (value := words[name] or "").isdigit() else 0
        for name in ("experts", "predicted")
    )
    parts = {
        f"{experts} experts": experts > 1,
        "multi-latent attention": words["latent"] == "true",
        f"{predicted} layers that predict further tokens": predicted > 0,
    }
    return [part for part, there in parts.items() if there]


def _world(header: bytes, stated: Mapping[str, Any]) -> dict[str, int]:
    """Megatron's `using world size: 64, data-parallel-size: 1, tensor-model-parallel size: 4`; else
    how many ranks are connected."""
    names = {b"data": "dp", b"context": "cp", b"tensor-model": "tp", b"model": "tp"}
    names[b"pipeline-model"] = "pp"
    facts = {}
    at = header.rfind(b"using world size:")
    if at >= 0 and (match := _USING_WORLD.match(header, at)):
        facts["gpus"] = int(match[1])
        line = re.split(rb"[\r\n]", header[at : at + 400])[0]
        for kind, value in _USING_SIZES.findall(line):
            facts[names[kind]] = int(value)
    elif "gpus" not in stated and {"tp", "pp"} <= set(stated) and b"[Gloo]" in header:
        # Lines of several ranks run into each other; of a whole group, most stay readable.
        peers = Counter(map(int, _GLOO.findall(header)))
        if groups := [n + 1 for n, lines in peers.items() if 2 * lines > n]:
            facts["gpus"] = max(groups) * stated["tp"] * stated["pp"]
    return facts


def _words(words: Mapping[str, str | None], facts: dict[str, Any]) -> dict[str, Any]:
    """Precision, recomputation and the distributed optimizer."""
    said = words.__getitem__
    found: dict[str, Any] = {}
    no = (None, "none", "null", "false")
    if said("fp8") not in no:
        found["precision"] = "fp8"
    elif said("bf16") == "true" or said("dtype") in _BF16:
        found["precision"] = "bf16"
    elif said("fp16") == "true" or said("dtype") in _FP16:
        found["precision"] = "fp16"
    elif said("dtype") in ("torch.float32", "torch.float", "float32"):
        found["precision"] = "fp32"
    if said("granularity") not in no:
        found["recompute"] = said("granularity")
    elif said("checkpoint") not in no:
        found["recompute"] = "full"
    elif said("granularity") or said("checkpoint"):
        found["recompute"] = "none"
    if said("distributed_optimizer") == "true":
        found["zero_stage"] = max(facts.get("zero_stage", 0), 1)
    return found


def _params(header: bytes, facts: dict[str, Any]) -> int | None:
    """The sum over the model-parallel ranks that each print their share, when all of them did."""
    shares = {match[1]: int(match[2]) for match in _RANK_PARAMS.finditer(header)}
    ranks = facts.get("tp", 1) * facts.get("pp", 1)
    if shares and len(shares) >= ranks:
        return sum(shares.values())
    total = _TOTAL_PARAMS.search(header)
    return int(total[1]) if total else None


def header_of(log: Log, first: int | None) -> bytes:
    """The text before the first record, without colours; of a long one, its first and its last
    _HEADER bytes."""
    end = log.size if first is None else first
    if end <= 2 * _HEADER:
        return plain(log.slice(0, end))
    return plain(log.slice(0, _HEADER) + b"\n" + log.slice(end - _HEADER, end))


def state(record: Record, facts: dict[str, Any], origin: str) -> None:
    """Fill what is unknown in `record`; note what contradicts a stronger origin."""
    for name, value in facts.items():
        if value is None:
            continue
        if name in MODEL:
            if name not in record.model:
                record.model[name] = value
                record.origin.setdefault(name, origin)
            continue
        known = getattr(record, name)
        if value == 0 and name in COUNTS and name != "zero_stage":
            record.notes.append(f"{name}: {origin} says 0: unknown")
        elif known is None:
            setattr(record, name, value)
            record.origin[name] = origin
        elif known != value and origin != "from name":
            stronger = record.origin.get(name, "log")
            record.notes.append(f"{name}: {stronger} says {known}, {origin} says {value}")
