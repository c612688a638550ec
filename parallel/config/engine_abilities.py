"""What each engine can do; `refusals` refuses what an engine cannot. Torch-free."""

from dataclasses import dataclass

from parallel.config.layout import RECOMPUTE, UNEVEN


@dataclass(frozen=True)
class Ability:
    """The abilities of the engine parallel/engines/NAME.py; a run that asks for anything else is
    refused with a sentence.

    parts: those of PARTS that a model may have beyond a dense GPT. axes: those that may be above 1.
    options: the settings that it reads and not every engine does. The other fields hold the values
    that a setting may have.
    """

    parts: tuple[str, ...] = ("experts",)
    axes: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    zero_stages: tuple[int, ...] = (0,)
    offload: tuple[str, ...] = ("none",)
    recompute: tuple[str, ...] = ("none", "full")
    implementations: tuple[str, ...] = ("gpt",)
    precisions: tuple[str, ...] = ("fp32", "bf16", "fp16")
    kernels: tuple[str, ...] = ("torch",)

    @property
    def values(self) -> dict[str, tuple]:
        """Returns the values that a setting can have, by its name."""
        return {
            "zero_stage": self.zero_stages,
            "offload": self.offload,
            "recompute": self.recompute,
            "implementation": self.implementations,
            "precision": self.precisions,
        }


_MEGATRON_KERNELS = ("te", "torch")  # what megatron-core's layers can be made of

ENGINES: dict[str, Ability] = {
    "ddp": Ability(
        parts=("experts", "mla"),
        options=("compile", "reset_at_documents"),
        recompute=RECOMPUTE,
        implementations=("gpt", "hf"),
    ),
    "fsdp2": Ability(
        parts=("experts", "mla"),
        options=("compile", "reset_at_documents", "fsdp_shard", "reduce_each_micro_batch"),
        zero_stages=(2, 3),
        offload=("none", "all"),
        recompute=RECOMPUTE,
    ),
    "deepspeed_zero": Ability(
        parts=("experts", "mla"),
        axes=("tp", "ep"),
        options=("reset_at_documents",),
        zero_stages=(0, 1, 2, 3),
        offload=("none", "optimizer", "all"),
        implementations=("gpt", "hf"),
        kernels=_MEGATRON_KERNELS,  # with tp > 1
    ),
    "deepspeed_pipe": Ability(
        axes=("tp", "pp"),
        zero_stages=(0, 1),
        kernels=_MEGATRON_KERNELS,
    ),
    "megatron": Ability(
        parts=("experts", "mla"),
        axes=("tp", "cp", "pp", "vpp", "ep", "etp"),
        options=(
            "sequence_parallel",
            "reset_at_documents",
            "moe_token_dispatcher_type",
            *UNEVEN,
            "megatron",
        ),
        zero_stages=(0, 1),
        recompute=RECOMPUTE,  # selective of norms, through Transformer Engine alone
        precisions=("fp32", "bf16", "fp16", "fp8"),  # fp8 and cp through Transformer Engine alone
        kernels=_MEGATRON_KERNELS,
    ),
}
OPTIONS = tuple(dict.fromkeys(name for able in ENGINES.values() for name in able.options))


def kernels_of(engine: str, tp: int) -> tuple[str, ...]:
    """Returns the kernel sets that an engine has code for, best first."""
    if engine == "deepspeed_zero" and tp == 1:
        return ("torch",)  # the reference model, not megatron-core's layers
    return ENGINES[engine].kernels
