"""How long a run trains: optimizer steps, from steps, epochs or a budget of tokens. Torch-free.

A step is one optimizer step: one update of the weights, from global_batch x seq_len tokens over all
ranks. A micro-step is one forward and backward pass of one micro-batch on every dp rank; a step is
grad_accum of them. Nothing here or in a study counts micro-steps.

Sequences are drawn at random from (seed, step), so an epoch is an amount of work, not one visit to
every token: as many whole steps as the training split's tokens fill, floor(tokens / tokens per
step). Tokens that fill no whole step are left out, as by a loader with drop_last. A budget of
tokens is never exceeded: floor(budget / tokens per step).
"""

from base.errors import UsageError
from parallel.config.data_files import training_tokens

WORK = ("steps", "epochs", "train_tokens")  # what one layer of settings says replaces them all


def steps_of(work: dict[str, int], tokens_per_step: int, data: str) -> int:
    """Returns the optimizer steps of a run that states `work`: one or more of WORK, which agree."""
    steps = dict(work)
    if "epochs" in work:
        if (tokens := training_tokens(data)) < tokens_per_step:
            too_few = f"epochs: the training split of {data} has {tokens} tokens"
            raise UsageError(f"{too_few}, less than one step's {tokens_per_step}")
        steps["epochs"] *= tokens // tokens_per_step
    if "train_tokens" in work:
        steps["train_tokens"] //= tokens_per_step
        if not steps["train_tokens"]:
            raise UsageError(
                f"train_tokens {work['train_tokens']} is less than one step's {tokens_per_step}"
            )
    if len(set(steps.values())) > 1:
        stated = ", ".join(f"{name} {work[name]} = {count} steps" for name, count in steps.items())
        raise UsageError(
            f"these disagree: {stated} (a step is an optimizer step of {tokens_per_step} tokens)"
        )
    return next(iter(steps.values()))
