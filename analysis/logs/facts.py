"""The facts of a run that a log may leave out, each declared once: what it can be, the help of its
flag, the names that argument dumps give it, and the table of run.json that states it.

A sidecar's keys, the flags, the search of a log's header and the reading of run.json follow.
"""

import math
from dataclasses import fields
from typing import NamedTuple

from base.bounds import Bounds, Count, Words
from models.config import ACTIVATIONS, NORMS, POSITIONS
from parallel.config.layout import AXES, EXPERT_AXES, ROUTING, Layout


class Fact(NamedTuple):
    """A fact of a run that a log may leave out.

    allowed: what it can be, as `misfit` takes it. help: its flag's. names: what argument dumps call
    it, surest first. run_json: the table of run.json that states it under the same name.
    """

    allowed: type | Bounds | Words
    help: str
    names: str = ""
    run_json: str = ""


COUNT = Count(1, 10**15)
_AMOUNT = Bounds(0, math.inf, above=True, below=True)
_SPLIT = {f.name: f for f in fields(Layout)}
# Of an axis, what programs call its size.
_AXES = {
    "tp": "tensor_model_parallel_size model_parallel_size tensor_parallel_degree"
    " intra_layer_model_parallel_size",
    "pp": "pipeline_model_parallel_size pipe_parallel_size pipeline_parallel_degree",
    "vpp": "virtual_pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank",
    "cp": "context_parallel_size context_parallel_degree sequence_parallel_size"
    " ds_sequence_parallel_size",  # Ulysses' groups, which share a sequence
    "dp": "data_parallel_size",
    "ep": "expert_model_parallel_size moe_expert_parallel_size expert_parallel_degree",
    "etp": "expert_tensor_parallel_size expert_tensor_parallel_degree",
}
# Record's fields.
SETTINGS = {
    "gpus": Fact(COUNT, "GPUs of the run", "world_size dist_world_size n_gpus_total nproc_total"),
    **{
        axis: Fact(COUNT, _SPLIT[axis].metadata["help"], _AXES[axis], "layout")
        for axis in (*AXES, *EXPERT_AXES)
    },
    "micro_batch": Fact(
        COUNT,
        "sequences per micro-batch and dp rank",
        "micro_batch_size train_micro_batch_size_per_gpu per_device_train_batch_size"
        " local_batch_size batch_size",
        run_json="layout",
    ),
    "n_micro": Fact(
        COUNT, "micro-batches per optimizer step and dp rank", "gradient_accumulation_steps"
    ),
    "global_batch": Fact(
        COUNT,
        "sequences per optimizer step, all ranks",
        "global_batch_size train_batch_size",
        run_json="layout",
    ),
    "seq_len": Fact(
        COUNT,
        "tokens per sequence",
        "seq_length seq_len encoder_seq_length sequence_length max_seq_len",
        run_json="spec",
    ),
    "attended_seq_len": Fact(
        Bounds(0, math.inf, below=True),
        "of packed documents, that each attend to themselves alone: the sum of the squares of their"
        " tokens over the tokens",
    ),
    "zero_stage": Fact(
        Count(0, 3), "ZeRO stage", "zero_optimization_stage zero_stage", run_json="layout"
    ),
    "sequence_parallel": Fact(
        bool, "tp ranks share the sequences where tp leaves them whole", run_json="layout"
    ),
    "planned_steps": Fact(
        COUNT,
        "optimizer steps that the run was to take",
        "train_iters max_steps train_steps num_iterations",
    ),
    "params": Fact(_AMOUNT, "parameters of the model"),
    "precision": Fact(Words(("fp32", "tf32", "bf16", "fp16", "fp8", "fp4")), "what it trained in"),
    "recompute": Fact(
        Words(("none", "selective", "full")), "activations that are recomputed", run_json="layout"
    ),
    "gpu_type": Fact(str, "the card, as it is sold: 'H100 SXM' (H100 alone may be two cards)"),
    "peak_tflops": Fact(
        _AMOUNT, "TFLOP/s of the card's peak in this precision, where the card is not known"
    ),
    "commit": Fact(str, "the commit of the training code"),
    "engine": Fact(str, "what trained", run_json="spec"),
    "routing": Fact(Words(ROUTING), "whether a router chose experts, or balance was forced"),
    "dispatcher": Fact(str, "the dispatcher of tokens to experts: alltoall, allgather, deepep ..."),
    "dropped": Fact(Bounds(0, 1), "share of tokens' choices of experts that were dropped"),
}
# GPTConfig's names, which are keys of Record.model.
MODEL = {
    "n_layer": Fact(COUNT, "transformer blocks", "num_layers n_layer num_hidden_layers n_layers"),
    "hidden": Fact(COUNT, "hidden size", "hidden_size n_embd"),
    "n_head": Fact(COUNT, "attention heads", "num_attention_heads n_head n_heads"),
    "n_kv_head": Fact(
        COUNT,
        "heads of keys and values",
        "num_query_groups num_key_value_heads n_kv_heads n_kv_head",
    ),
    "kv_channels": Fact(
        COUNT, "size of a head, where it is not hidden / n_head", "kv_channels head_dim"
    ),
    "vocab_size": Fact(COUNT, "token ids", "override_vocab_size padded_vocab_size vocab_size"),
    "max_seq_len": Fact(COUNT, "positions of the model", "max_position_embeddings block_size"),
    "ffn_hidden": Fact(COUNT, "feed-forward size", "ffn_hidden_size intermediate_size n_inner"),
    "position": Fact(Words(POSITIONS), "how positions enter the model"),
    "norm": Fact(Words(NORMS), "the norm before each part of a block"),
    "activation": Fact(Words(ACTIVATIONS), "of the feed-forward; swiglu has a gate"),
    "qk_norm": Fact(bool, "norm each head's query and key"),
    "tied": Fact(bool, "the output layer is the word embedding"),
    "bias": Fact(bool, "linear layers have biases"),
}
FACTS = SETTINGS | MODEL
