"""A GPT-2 and a training step as they are written without a framework, to time engines beside.

The model, the batch, the precision, clipping and the fused AdamW are the `ddp` engine's.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.config import GPTConfig
from models.tensor_files import DTYPES
from parallel.config.settings import RunSpec
from parallel.engines import Batch
from parallel.engines.optim import adamw


class Attention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.hidden, 3 * config.hidden)
        self.c_proj = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        heads = (B, T, self.n_head, C // self.n_head)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.c_attn(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.hidden, config.ffn_hidden)
        self.gelu = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(config.ffn_hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class PlainGPT(nn.Module):
    """A GPT-2 as nanoGPT writes it: fused qkv split in three, tied head, cross-entropy inside."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.hidden)
        self.wpe = nn.Embedding(config.max_seq_len, config.hidden)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.hidden)
        self.lm_head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """The mean loss; both are token ids [batch, sequence]."""
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def loop(
    model: nn.Module, spec: RunSpec, device: torch.device
) -> Callable[[Sequence[Batch]], float]:
    """One step over micro-batches, which returns the loss."""
    parameters = list(model.parameters())
    optimizer = adamw(parameters, spec)
    scaler = torch.amp.GradScaler(device.type, enabled=spec.precision == "fp16")
    if spec.compile:
        model = torch.compile(model)
    dtype = DTYPES[spec.precision]

    def step(batches: Sequence[Batch]) -> float:
        total = torch.zeros((), device=device)
        for tokens, labels in batches:
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                loss = model(tokens, labels) / len(batches)
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, spec.clip_grad)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return total.item()

    return step
