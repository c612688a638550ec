"""The one-device model that a data-parallel engine trains, and how: ddp's and fsdp2's step.

The model is ours or Hugging Face's, with the same weights.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models import gpt
from models.config import GPTConfig, parameter_shapes
from parallel.checkpoint.contents import State, pieces_of
from parallel.config.run_spec import RunSpec
from parallel.engines import Batch, StepResult, clipping, optim
from parallel.measure.ranges import region


def build_reference(
    spec: RunSpec,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    held: Callable[[nn.Parameter], gpt.Held] = gpt.undivided,
) -> nn.Module:
    """Returns the run's model, called as (tokens, labels) -> mean loss. held: see gpt.fill.

    Our model is built without memory and filled on the device, so that the host never has more of
    it than one parameter; ZeRO-3 puts each parameter where it belongs. Hugging Face's model is
    built in host memory.
    """
    recompute = spec.layout.recompute
    if recompute == "full" and held is not gpt.undivided:
        recompute = "reentrant"
    if spec.implementation == "hf":
        from models import hf_model

        model = hf_model.HuggingFaceGPT(spec.model, recompute, spec.end_of_text)
        hf_model.initialise(model, spec.seed, held)
    else:
        with torch.device("meta") if held is gpt.undivided else nullcontext():
            model = our_gpt(spec, recompute)
        if held is gpt.undivided:
            model.to(dtype).to_empty(device=device)
        gpt.initialise(model, spec.seed, held)
    name_parameters(model, spec.model)
    return model


def our_gpt(spec: RunSpec, recompute: str) -> gpt.GPT:
    """Returns the run's GPT as our own module; its parameters are still to be filled."""
    balances_by_force = spec.moe_router_force_load_balancing
    return gpt.GPT(spec.trained, recompute, spec.end_of_text, spec.padded_vocab, balances_by_force)


def name_parameters(model: nn.Module, config: GPTConfig) -> None:
    """Gives each parameter what `pieces_of` reads: its name and shape, and that it is there whole,
    with the padding of the vocabulary. Hugging Face's have names and shapes of their own."""
    shapes = parameter_shapes(config)
    for name, parameter in model.named_parameters():
        part = tuple(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO-3 empties parameters
        parameter.references = [whole(name, shapes.get(name, part)) | {"part": part}]


def whole(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Returns a reference to a parameter of which nothing is elsewhere."""
    return {"name": name, "shape": shape, "offset": (0,) * len(shape), "part": shape}


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterator[Batch],
    n: int,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> Tensor:
    """Returns the mean loss of n micro-batches on this rank, a scalar."""
    total = torch.zeros((), device=device)
    model.eval()
    for _ in range(n):
        batch = next(batches)
        with region("forward"), autocast():
            total += model(*batch) / n
    model.train()
    return total


class DataParallelEngine:
    """An engine whose ranks all train one model on data of their own: what ddp and fsdp2 share.

    model: called as (tokens, labels) -> mean loss; evaluated: the same, for evaluation.
    loss_weight: of a micro-batch in the step's loss. autocast: the context of a forward pass. A
    subclass has `reducing(last)`, the context of a micro-batch, in which gradients are reduced once
    a step.
    """

    shards = 1  # ranks that share a copy of the state

    def __init__(
        self,
        spec: RunSpec,
        device: torch.device,
        model: nn.Module,
        evaluated: nn.Module,
        loss_weight: float,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
    ):
        self.spec, self.device = spec, device
        self.model, self.evaluated, self.loss_weight = model, evaluated, loss_weight
        self.modules = [evaluated]
        self.autocast = autocast
        self.parameters = list(evaluated.parameters())
        self.optimizer = optim.adamw(self.parameters, spec)
        layers = {
            name: module
            for name, module in evaluated.named_modules()
            if isinstance(module, gpt.MixtureOfExperts)
        }
        self.biased = {
            name: module for name, module in layers.items() if module.router.expert_bias is not None
        }
        self.loss_scale = optim.LossScale()
        self.scaler = torch.amp.GradScaler(device.type, enabled=spec.precision == "fp16")

    def grad_norm(self) -> Tensor:
        """Returns the L2 norm of the whole gradient."""
        return nn.utils.get_total_norm([p.grad for p in self.parameters])

    def held(self, parameter: nn.Parameter) -> tuple[dict[str, Tensor], int]:
        """Returns, for `pieces_of`, this rank's tensors of a parameter and its moments, and the
        number of their first element in the parameter."""
        return optim.adam_tensors(self.optimizer, parameter), 0

    def step(self, batches: Iterator[Batch], lr: float, stop: Callable[[], bool]) -> StepResult:
        """Does one optimizer step; see `Engine.step`. A step whose fp16 gradients overflow is
        skipped."""
        n_micro, total = self.spec.layout.n_micro, torch.zeros((), device=self.device)
        mixtures = self.biased.values()
        tokens_E = [0] * len(mixtures)
        for micro, batch in enumerate(batches):
            with self.reducing(last=micro + 1 == n_micro):
                with region("forward"), self.autocast():
                    loss = self.model(*batch)
                tokens_E = [
                    counted_E + mixture.tokens_E
                    for counted_E, mixture in zip(tokens_E, mixtures, strict=True)
                ]
                with region("backward"):
                    self.scaler.scale(loss * self.loss_weight).backward()
            total += loss.detach() / n_micro
        with region("optimizer"):
            self.scaler.unscale_(self.optimizer)
            norm = self.grad_norm()
            clipping.clip_gradients(self.parameters, self.spec, norm)
            optim.set_lr(self.optimizer.param_groups, lr)
            self.scaler.step(self.optimizer)
            self.optimizer.zero_grad(set_to_none=True)
        norm, scale = float(norm), 1.0  # only now: reading waits for the device
        skipped = self.scaler.is_enabled() and not norm < float("inf")
        if self.scaler.is_enabled():
            scale, self.loss_scale = self.loss_scale.scale, self.loss_scale.after(skipped)
            self.scaler.update(self.loss_scale.scale)  # torch's own rule has no hysteresis
        if self.biased and not skipped:
            optim.balance([mixture.router.expert_bias for mixture in mixtures], tokens_E)
        loss, stopped = optim.mean_over_ranks(total, self.spec.layout.dp, stop())
        return StepResult(loss, None if skipped else norm, scale, skipped, stopped)

    def evaluate(self, batches: Iterator[Batch], n: int) -> float:
        mean = evaluate(self.evaluated, batches, n, self.device, self.autocast)
        return optim.mean_over_ranks(mean, self.spec.layout.dp).loss

    def state(self) -> State:
        """Returns what this rank has of the parameters and moments, and the experts' biases."""
        trained = ((p, *self.held(p)) for p in self.parameters)
        pieces = pieces_of(trained, self.spec.layout, dist.get_rank(), self.shards)
        biases = ((f"{name}.router", mixture.router) for name, mixture in self.biased.items())
        pieces += optim.biases_of(biases, self.spec.layout)
        scaler = self.loss_scale._asdict() if self.scaler.is_enabled() else {}
        return State(pieces, optim.adam_step(self.optimizer), scaler)

    def restore(self, adam_step: int, scaler: dict[str, float]) -> None:
        """Sets AdamW's count of steps, and fp16's loss scale where the run has one."""
        optim.set_adam_step(self.optimizer, adam_step)
        if scaler and self.scaler.is_enabled():
            self.loss_scale = optim.LossScale.of(scaler)
            scaler_state = self.scaler.state_dict() | {"scale": self.loss_scale.scale}
            self.scaler.load_state_dict(scaler_state)

    def describe(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        # Freed after the process group has ended, DDP can wait for a thread of gloo for ever.
        del self.model
