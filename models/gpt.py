"""The reference GPT on one device, and the weights every engine starts from.

The model does not know it is parallel. `config.parameter_shapes` and `init_parameter` define the
starting weights of *every* engine: each parameter is drawn in full from a generator seeded by
(seed, its name), and a rank that holds a part of it takes that part. So the starting model does not
depend on the layout.

Shapes: B sequences, S positions, H hidden, N heads, D head size, F feed-forward, V vocabulary.
"""

import hashlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.config import INIT_STD, LAYER_NORM_EPS, GPTConfig, parameter_shapes


def gelu(x: Tensor) -> Tensor:
    """GPT-2's activation: the tanh approximation of GELU (Hendrycks & Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")


def init_parameter(config: GPTConfig, name: str, seed: int) -> Tensor:
    """The starting value of one full parameter, fp32, on the CPU.

    Weights are normal with standard deviation 0.02, divided by sqrt(2 L) where they write to the
    residual stream (Radford et al. 2019, section 2.3); norms are one, biases zero.
    """
    shape = parameter_shapes(config)[name]
    if name.endswith("bias"):
        return torch.zeros(shape)
    if "norm" in name:
        return torch.ones(shape)
    std = INIT_STD
    if name.endswith(("attn.out.weight", "mlp.down.weight")):
        std /= math.sqrt(2 * config.n_layer)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator)


class Embedding(nn.Module):
    """Token ids [B, S] to hidden states [B, S, H]."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.hidden)
        self.position = nn.Embedding(config.max_seq_len, config.hidden)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        position_S = torch.arange(tokens_BS.size(1), device=tokens_BS.device)
        # The word table is also the output layer, whose gradient is dense. On a CPU, adding only
        # the rows of these tokens to it avoids a second [V, H] gradient that is nearly all zeros.
        few = tokens_BS.device.type == "cpu" and not torch.compiler.is_compiling()
        return F.embedding(tokens_BS, self.word.weight, sparse=few) + self.position(position_S)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head, self.head_dim = config.n_head, config.head_dim
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x_BSH: Tensor) -> Tensor:
        B, S, _ = x_BSH.shape
        qkv = self.qkv(x_BSH).view(B, S, self.n_head, 3, self.head_dim)
        q_BNSD, k_BNSD, v_BNSD = qkv.permute(3, 0, 2, 1, 4)
        y_BNSD = F.scaled_dot_product_attention(q_BNSD, k_BNSD, v_BNSD, is_causal=True)
        return self.out(y_BNSD.transpose(1, 2).reshape(B, S, -1))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.up = nn.Linear(config.hidden, config.ffn_hidden)
        self.down = nn.Linear(config.ffn_hidden, config.hidden)

    def forward(self, x_BSH: Tensor) -> Tensor:
        return self.down(gelu(self.up(x_BSH)))


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden, eps=LAYER_NORM_EPS)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden, eps=LAYER_NORM_EPS)
        self.mlp = MLP(config)

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_BSH = x_BSH + self.attn(self.norm1(x_BSH))
        return x_BSH + self.mlp(self.norm2(x_BSH))


class GPT(nn.Module):
    """The whole model. `recompute` drops each block's activations and recomputes them backward."""

    def __init__(self, config: GPTConfig, recompute: bool = False):
        super().__init__()
        self.config, self.recompute = config, recompute
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.hidden, eps=LAYER_NORM_EPS)

    def logits(self, tokens_BS: Tensor) -> Tensor:
        """Token ids [B, S] to logits [B, S, V]."""
        x_BSH = self.embedding(tokens_BS)
        for block in self.blocks:
            if self.recompute and self.training:
                x_BSH = checkpoint(block, x_BSH, use_reentrant=False)
            else:
                x_BSH = block(x_BSH)
        return F.linear(self.norm(x_BSH), self.embedding.word.weight)

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        """The mean cross-entropy over all B*S tokens, a scalar."""
        return mean_loss(self.logits(tokens_BS), labels_BS)


def mean_loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Cross-entropy averaged over tokens, in fp32 whatever the logits are in."""
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), labels_BS.flatten())


@torch.no_grad()
def fill(
    model: nn.Module,
    value: Callable[[str, nn.Parameter], Tensor],
    gathered: Callable[[nn.Parameter], AbstractContextManager] = nullcontext,
) -> None:
    """Set every parameter of a model, in place, to value(name, parameter).

    gathered: a context around each. Where parameters are partitioned (ZeRO-3) it gathers one and,
    on leaving, partitions what was written.
    """
    for name, parameter in model.named_parameters():
        with gathered(parameter):
            parameter.copy_(value(name, parameter))


def initialise(
    model: GPT,
    seed: int,
    gathered: Callable[[nn.Parameter], AbstractContextManager] = nullcontext,
) -> None:
    """Give a reference GPT its starting weights, in place."""
    fill(model, lambda name, _: init_parameter(model.config, name, seed), gathered)
