"""megatron-core's names of the reference GPT's parameters."""

# megatron-core's name inside a layer -> the reference GPT's. Transformer Engine keeps the norms
# inside the linear layers that follow them. A gated model's fc1 is "mlp.gate" and "mlp.up".
MEGATRON_LAYER = {
    f"{theirs}{kind}": f"{ours}.{kind}"
    for theirs, ours in {
        "input_layernorm.": "norm1",
        "self_attention.linear_qkv.layer_norm_": "norm1",
        "self_attention.linear_qkv.": "attn.qkv",
        "self_attention.q_layernorm.": "attn.q_norm",
        "self_attention.k_layernorm.": "attn.k_norm",
        "self_attention.linear_q_proj.": "attn.q",
        "self_attention.linear_q_down_proj.": "attn.q_down",
        "self_attention.linear_q_up_proj.layer_norm_": "attn.q_norm",
        "self_attention.linear_q_up_proj.": "attn.q_up",
        "self_attention.linear_kv_down_proj.": "attn.kv_down",
        "self_attention.kv_layernorm.": "attn.kv_norm",
        "self_attention.linear_kv_up_proj.layer_norm_": "attn.kv_norm",
        "self_attention.linear_kv_up_proj.": "attn.kv_up",
        "self_attention.linear_proj.": "attn.out",
        "pre_mlp_layernorm.": "norm2",
        "mlp.linear_fc1.layer_norm_": "norm2",
        "mlp.linear_fc1.": "mlp.up",
        "mlp.linear_fc2.": "mlp.down",
        "mlp.router.": "mlp.router",
        "mlp.shared_experts.linear_fc1.": "mlp.shared.up",
        "mlp.shared_experts.linear_fc2.": "mlp.shared.down",
    }.items()
    for kind in ("weight", "bias")
} | {"mlp.router.expert_bias": "mlp.router.expert_bias"}
MEGATRON_TOP = {
    "embedding.word_embeddings.weight": "embedding.word.weight",
    "embedding.position_embeddings.weight": "embedding.position.weight",
    "decoder.final_layernorm.weight": "norm.weight",
    "decoder.final_layernorm.bias": "norm.bias",
    "decoder.final_norm.weight": "norm.weight",  # HybridModel's
    "decoder.final_norm.bias": "norm.bias",
    "output_layer.weight": "output.weight",
}
