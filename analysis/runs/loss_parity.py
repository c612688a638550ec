"""Whether every split trained the same model: losses and gradient norms beside the baseline's."""

import math
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, NamedTuple

from analysis.common.reasons import Reason
from analysis.common.table import Column, Table
from analysis.logs.naming import name_of
from analysis.logs.record import Record
from analysis.runs.baseline import fitting_baselines
from base.intervals import Interval
from models.config import INIT_STD, PARTS, GPTConfig
from parallel.config.run_spec import TRAINING, gemm_precision
from parallel.record.ends import COMPLETE
from parallel.record.reader import Run

LOSS_BAR = 2e-4  # absolute, nats per token
GRAD_NORM_BAR = 2e-3  # relative to the baseline's
FIRST_LOSS_BAR = 0.3  # from what `first_losses` expects
REPEATS = 0.25  # tokens like the one before: 0.22 of our default data's bytes, fewer of words

EQUAL, DIFFERS, NOT_VERIFIED = "equal", "DIFFERS", "not verified"


@dataclass(frozen=True)
class Parity:
    """One run beside its baseline. The differences are None where they could not be taken."""

    run: str
    verdict: Reason  # of kind EQUAL, DIFFERS or NOT_VERIFIED
    steps: int = 0
    max_loss_diff: float | None = None
    max_grad_norm_diff: float | None = None
    first_loss: float | None = None
    ln_vocab: float | None = None
    baseline: Run | None = None  # beside which it was judged


class Bars(NamedTuple):
    """By how much losses (in nats) and gradient norms (relative) of equal runs may differ."""

    loss: float = LOSS_BAR
    grad_norm: float = GRAD_NORM_BAR


def not_verified(reason: str) -> Reason:
    """Returns the verdict on a run that cannot be compared."""
    return Reason(NOT_VERIFIED, f"{NOT_VERIFIED}: {reason}")


def _work(run: Run) -> dict[str, Any]:
    """Returns what must be equal for the losses to be comparable, by name."""
    facts = run.facts
    spec, model = facts.get("spec") or {}, facts.get("model") or {}
    return {
        **{name: spec.get(name) for name in TRAINING},
        "precision": gemm_precision(spec.get("precision"), spec.get("tf32")),
        # The id after which positions and attention start again.
        "reset_at_documents": bool(spec.get("reset_at_documents")) and spec.get("end_of_text"),
        # A run from before a setting existed has its default, which is GPT-2's.
        **{
            f"model {size.name}": model.get(
                size.name, None if size.default is MISSING else size.default
            )
            for size in fields(GPTConfig)
            if size.name not in PARTS
        },
        "model parts": {part: model[part] for part in PARTS if part in model},
        "global_batch": (facts.get("layout") or {}).get("global_batch"),
        "routing": facts.get("routing", "natural"),
        "data sha256": (facts.get("data") or {}).get("sha256"),
    }


def compare(run: Run, baseline: Run | None) -> Parity:
    """Compares one run with its baseline, step by step in full precision."""
    if reason := _incomparable(run, baseline):
        return Parity(run.name, not_verified(reason), len(run.steps))
    return _judge(run, baseline)


def _incomparable(run: Run, baseline: Run | None) -> str:
    """Returns why the losses of a run and its baseline cannot be compared, or ""."""
    if run.state != COMPLETE:
        return f"the run is {run.state}: {run.reason}".rstrip(": ")
    if baseline is None:
        return "there is no baseline run here (--baseline NAME names one)"
    if baseline.state != COMPLETE:
        return f"the baseline {baseline.name} is {baseline.state}"
    for side in (run, baseline):
        if side.missing:
            return f"{side.name}: {side.missing}"
    work, baseline_work = _work(run), _work(baseline)
    if work["precision"] != "fp32":
        return f"precision {work['precision']}, only fp32 is compared"
    unequal = [name for name, value in work.items() if value != baseline_work[name]]
    if unequal:
        return "; ".join(f"{name} {work[name]}, baseline {baseline_work[name]}" for name in unequal)
    if missing := [name for name, value in work.items() if value is None]:
        return f"run.json does not say {', '.join(missing)}"
    steps = [step["step"] for step in run.steps]
    if not steps or steps != [step["step"] for step in _beside(run, baseline)]:
        return f"{len(run.steps)} steps recorded, {len(baseline.steps)} in the baseline"
    for side in (run, baseline):
        for step in side.steps:
            for column in ("loss", "grad_norm"):
                if step[column] is None:
                    name = column.replace("_", " ")
                    return f"{side.name} has no {name} at step {step['step']}"
    return ""


def _beside(run: Run, baseline: Run) -> list[dict[str, Any]]:
    """Returns the baseline's steps that the run is to have, too: the last ones where it began from
    a checkpoint."""
    loaded = (run.facts.get("spec") or {}).get("load")
    return baseline.steps[-len(run.steps) :] if loaded else baseline.steps


class StepDifference(NamedTuple):
    """|loss - baseline's| in nats, and the grad norm's difference over the baseline's."""

    step: int
    loss: float
    grad_norm: float


def of_steps(run: Run, baseline: Run) -> list[StepDifference]:
    """Returns the differences of each step.

    The baseline has the run's, and each has a loss and a grad norm (`compare` says where not).
    """
    return [
        StepDifference(
            step["step"],
            _difference(step["loss"], base["loss"]),
            _difference(step["grad_norm"], base["grad_norm"], relative=True),
        )
        for step, base in zip(run.steps, _beside(run, baseline), strict=True)
    ]


def first_losses(model: dict[str, Any]) -> Interval:
    """Returns the lowest and highest loss, in nats, that a model of these sizes should start with.

    Logits of a new model are normal with variance hidden x std^2, for the last norm makes elements
    of variance 1: the mean loss is ln V + hidden x std^2 / 2. With a tied output layer a token that
    was just read, of embedding e, has a logit that is higher by a = h.e <= |e|^2 / std = hidden x
    std: h is e / std and what the layers add. So of a share p of tokens that repeat the one before,
    ln V + ln(1 + (exp(a) - 1) / V) - p a, which is least where exp(a) = p (V - 1) / (1 - p).
    """
    vocab, hidden, p = model["vocab_size"], model["hidden"], REPEATS
    highest = math.log(vocab) + hidden * INIT_STD**2 / 2
    if not model["tied"]:
        return Interval(highest, highest)
    a = min(hidden * INIT_STD, math.log(max(1.0, p * (vocab - 1) / (1 - p))))
    lowest = math.log(vocab) + math.log1p(math.expm1(a) / vocab) - p * a
    return Interval(lowest, highest)


def _judge(run: Run, baseline: Run) -> Parity:
    """Returns the parity of a run whose steps are all in the baseline: equal, or what differs."""
    work = _work(run)
    sizes = {key: work[f"model {key}"] for key in ("vocab_size", "hidden", "tied")}
    lowest, highest = first_losses(sizes)
    ln_vocab = math.log(sizes["vocab_size"])
    steps = of_steps(run, baseline)
    loss = max(steps, key=lambda step: step.loss)
    norm = max(steps, key=lambda step: step.grad_norm)
    first, wrong = run.steps[0]["loss"], []
    if loss.loss > LOSS_BAR:
        wrong.append(f"loss by {loss.loss:.1e} at step {loss.step} (tolerance {LOSS_BAR:g})")
    if norm.grad_norm > GRAD_NORM_BAR:
        at = f"at step {norm.step} (tolerance {GRAD_NORM_BAR:g})"
        wrong.append(f"relative grad_norm by {norm.grad_norm:.1e} {at}")
    from_the_start = run.steps[0]["step"] == 1
    if from_the_start and not lowest - FIRST_LOSS_BAR <= first <= highest + FIRST_LOSS_BAR:
        expected = f"{highest:.3f}" if lowest == highest else f"{lowest:.3f} to {highest:.3f}"
        wrong.append(f"first loss {first:.3f}, expected of a new model is {expected}")
    if wrong:
        pair = (run, baseline)
        wrong += [f"{side.name} {side.facts['go_on']}" for side in pair if side.facts.get("go_on")]
    verdict = Reason(DIFFERS, f"{DIFFERS}: {'; '.join(wrong)}") if wrong else Reason(EQUAL, EQUAL)
    return Parity(
        run.name,
        verdict,
        len(steps),
        loss.loss,
        norm.grad_norm,
        first_loss=first,
        ln_vocab=ln_vocab,
    )


def _difference(value: float, base: float, relative: bool = False) -> float:
    """Returns |value - base|, over |base| where relative; infinite where one is NaN."""
    if not (math.isfinite(value) and math.isfinite(base)):
        return math.inf
    difference = abs(value - base)
    if not (relative and difference):
        return difference
    return difference / abs(base) if base else math.inf


def verify(records: list[Record], baseline: Record | None = None) -> dict[str, Parity]:
    """Returns every run of ours beside the baseline of its own study in the same folder, by source.

    `baseline` is the run to compare with; without it, each run.json names its own.
    """
    own_records = [record for record in records if record.own]
    parities = {}
    for record, fits in zip(own_records, fitting_baselines(own_records, baseline), strict=True):
        base_run = fits[0].own if fits else None
        parity = compare(record.own, base_run)
        if len(fits) > 1 and record.own.state == COMPLETE:
            sources = ", ".join(fit.source for fit in fits)
            reason = not_verified(f"the baseline is one of {sources}")
            parity = Parity(parity.run, reason, len(record.own.steps))
        parities[record.source] = replace(parity, run=name_of(record), baseline=base_run)
    return parities


COLUMNS = [
    Column("run", "run"),
    Column("steps", "steps", "d"),
    Column("max_loss_diff", "max |loss - baseline|", ".1e"),
    Column("max_grad_norm_diff", "max grad norm diff (rel)", ".1e"),
    Column("first_loss", "first loss", ".4f"),
    Column("ln_vocab", "ln(vocab)", ".4f"),
    Column("verdict", "verdict", long="word"),
]


def table(parities: Iterable[Parity], baseline: str) -> Table:
    """Returns the parity table. `baseline` has the names of the runs' baselines, for the note."""
    rows = [{c.key: getattr(parity, c.key) for c in COLUMNS} for parity in parities]
    for row in rows:
        row["verdict"] = str(row["verdict"])
    note = (
        f"tolerances: loss {LOSS_BAR:g} nats, grad norm {GRAD_NORM_BAR:g} relative, first loss"
        f" within {FIRST_LOSS_BAR:g} of ln(vocab)"
    )
    judged = [row for row in rows if row["verdict"] == EQUAL]
    if any(abs(row["first_loss"] - row["ln_vocab"]) > FIRST_LOSS_BAR for row in judged):
        note += " and of what the model's width, or a tied output layer, adds to it"
    return Table(COLUMNS, rows, notes=[f"{note}; baseline: {baseline}" if baseline else note])
