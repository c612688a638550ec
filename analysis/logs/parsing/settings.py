"""The settings of a run, from the argument dumps in its log.

A fact keeps the first origin that states it, in the order of `record.ORIGINS`. A weaker origin that
states something else adds a note and changes nothing.
"""

import re
from collections import defaultdict
from typing import Any

from analysis.logs.parsing.fields import plain
from analysis.logs.parsing.logfile import Log
from analysis.logs.record import Record

# Facts that a log may leave out: Record's fields and sizes of the model, with the flags' help.
COUNTS = {
    "gpus": "GPUs of the run",
    "tp": "tensor-parallel size",
    "pp": "pipeline-parallel size",
    "vpp": "model chunks per pipeline rank",
    "dp": "data-parallel size",
    "micro_batch": "sequences per micro-batch and dp rank",
    "global_batch": "sequences per optimizer step, all ranks",
    "seq_len": "tokens per sequence",
    "zero_stage": "ZeRO stage",
    "planned_steps": "optimizer steps that the run was to take",
}
SETTINGS = COUNTS | {
    "params": "parameters of the model",
    "precision": "what it trained in: fp32, bf16, fp16",
    "recompute": "activations recomputed: none, selective, full",
    "gpu_type": "the card",
    "commit": "the commit of the training code",
    "engine": "what trained",
}
MODEL_SIZES = {
    "n_layer": "transformer blocks",
    "hidden": "hidden size",
    "n_head": "attention heads",
    "vocab_size": "token ids",
    "max_seq_len": "learned positions",
    "ffn_hidden": "feed-forward size",
}

# Record's fields and model sizes -> the names that argument dumps give them, surest first.
_ALIASES = {
    "gpus": "world_size dist_world_size n_gpus_total nproc_total",
    "tp": "tensor_model_parallel_size model_parallel_size tensor_parallel_degree"
    " intra_layer_model_parallel_size",
    "pp": "pipeline_model_parallel_size pipe_parallel_size pipeline_parallel_degree",
    "vpp": "virtual_pipeline_model_parallel_size",
    "dp": "data_parallel_size data_parallel_replicate_degree",
    "micro_batch": "micro_batch_size train_micro_batch_size_per_gpu per_device_train_batch_size"
    " local_batch_size batch_size",
    "global_batch": "global_batch_size train_batch_size",
    "seq_len": "seq_length seq_len encoder_seq_length sequence_length max_seq_len",
    "planned_steps": "train_iters max_steps train_steps num_iterations",
    "zero_stage": "zero_optimization_stage zero_stage",
    "n_layer": "num_layers n_layer num_hidden_layers n_layers",
    "hidden": "hidden_size n_embd hidden_dim",
    "n_head": "num_attention_heads n_head n_heads",
    "ffn_hidden": "ffn_hidden_size intermediate_size",
    "vocab_size": "padded_vocab_size vocab_size",
    "max_seq_len": "max_position_embeddings block_size",
}
# Settings whose values are words.
_WORDS = {
    "dtype": "params_dtype torch_dtype",
    "bf16": "bf16",
    "fp16": "fp16",
    "fp8": "fp8",
    "granularity": "recompute_granularity activations_checkpoint_granularity",
    "checkpoint": "checkpoint_activations recompute_activations activations_checkpoint_method"
    " gradient_checkpointing",
    "distributed_optimizer": "use_distributed_optimizer",
}
_NAMES = " ".join([*_ALIASES.values(), *_WORDS.values()]).split()


# `name ..... 4`, `name: 4`, `"name": 4`, `args[name] = 4`, `--name 4`; a name is found whole.
_SETTING = re.compile(
    (
        r"\b(?<![./])(?<![a-z]-)("
        + "|".join(name.replace("_", "[-_]") for name in sorted(set(_NAMES), key=len, reverse=True))
        + r""")['"\]]{0,2}[ \t]{0,3}(?:\.{2,80}|[:=]|[ \t])[ \t]{0,16}['"]?"""
        r"(\d{1,15}(?![\d.]\d|\w)|None|null|[A-Za-z][\w.]{0,30})"
    ).encode()
)
_USING_WORLD = re.compile(rb"using world size: {0,3}(\d{1,7})")
_USING_SIZES = re.compile(
    rb"(?<![\w-])(data|tensor-model|pipeline-model|model)-parallel[- ]size: {0,3}(\d{1,7})"
)
_RANK_PARAMS = re.compile(
    rb"number of parameters on (?:\(tensor, pipeline\) )?model parallel rank"
    rb" {1,3}(\([\d, ]{1,20}\)|\d{1,6}): {0,3}(\d{1,15})"
)
# Megatron counts FLOPs and parameters with the padded size.
_PADDED_VOCAB = re.compile(rb"padded vocab \(size: (\d{1,9})\) with (\d{1,9}) dummy tokens")
_TOTAL_PARAMS = re.compile(rb"TOTAL_PARAMS=(\d{1,15})")
_HEADER = 1 << 19


def read_header(record: Record, header: bytes) -> None:
    """Fill `record` from the argument dumps in `header`, the text before training.

    The last value before training wins; where the same name was given another before, it is noted.
    """
    said: dict[str, list[bytes]] = defaultdict(list)
    for match in _SETTING.finditer(header):
        before = header[max(match.start() - 80, 0) : match.start()]
        # DeepSpeed's own world_size is the data-parallel one; its block_size is of bytes on disk.
        of_ranks = match[1].endswith(b"world_size") and b"config.py:" in before
        if not of_ranks and b"aio_config" not in before:
            said[match[1].decode().replace("-", "_")].append(match[2])
    last = {name: values[-1] for name, values in said.items()}
    facts: dict[str, Any] = {}
    for field, aliases in _ALIASES.items():
        alias = next((a for a in aliases.split() if last.get(a, b"").isdigit()), None)
        if alias is None:
            continue
        facts[field] = int(last[alias])
        given = dict.fromkeys(value.decode() for value in said[alias] if value.isdigit())
        known = record.model.get(field) or getattr(record, field, None)
        if len(given) > 1 and field != "gpus" and known is None:
            record.notes.append(
                f"contradiction: {alias} is given as {', '.join(given)};"
                f" {facts[field]}, the last before training, is used"
            )
    if padded := _PADDED_VOCAB.findall(header):
        facts["vocab_size"] = sum(map(int, padded[-1]))
    facts.update(_world(header))
    if facts.get("pp") == 0:  # GPT-NeoX's way to say that there is no pipeline
        facts["pp"] = 1
    facts.update(_words(last, facts))
    if params := _params(header, facts):
        facts["params"] = params
    state(record, {k: v for k, v in facts.items() if v is not None}, "log")


def _world(header: bytes) -> dict[str, int]:
    """Megatron's `using world size: 64, data-parallel-size: 1, tensor-model-parallel size: 4`."""
    names = {b"data": "dp", b"tensor-model": "tp", b"pipeline-model": "pp", b"model": "tp"}
    facts = {}
    at = header.rfind(b"using world size:")
    if at >= 0 and (match := _USING_WORLD.match(header, at)):
        facts["gpus"] = int(match[1])
        line = re.split(rb"[\r\n]", header[at : at + 400])[0]
        for kind, value in _USING_SIZES.findall(line):
            facts[names[kind]] = int(value)
    return facts


def _words(last: dict[str, bytes], facts: dict[str, Any]) -> dict[str, Any]:
    """Precision, recomputation and the distributed optimizer."""

    def said(field: str) -> str | None:
        return next((last[a].decode().lower() for a in _WORDS[field].split() if a in last), None)

    found: dict[str, Any] = {}
    no = (None, "none", "null", "false")
    if said("fp8") not in no:
        found["precision"] = "fp8"
    elif said("bf16") == "true" or said("dtype") in ("torch.bfloat16", "bfloat16"):
        found["precision"] = "bf16"
    elif said("fp16") == "true" or said("dtype") in ("torch.float16", "float16", "torch.half"):
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
        if name in MODEL_SIZES:
            if name not in record.model:
                record.model[name] = value
                record.origin.setdefault(name, origin)
            continue
        known = getattr(record, name)
        if known is None:
            setattr(record, name, value)
            record.origin[name] = origin
        elif known != value and origin != "from name":
            stronger = record.origin.get(name, "log")
            record.notes.append(f"{name}: {stronger} says {known}, {origin} says {value}")
