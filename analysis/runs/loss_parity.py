"""Whether every split trained the same model: losses and gradient norms beside the baseline's."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from analysis.common.table import Column, Table
from analysis.logs.load import Name, chosen, distinct
from base.errors import Reading, Reason, UsageError
from models.config import INIT_STD, PARTS, GPTConfig
from parallel.config.run_spec import TRAINING, gemm_precision
from parallel.record.ends import COMPLETE
from parallel.record.reader import Run, find_runs, is_run_folder, read_run

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
    baseline: Path | None = None  # the folder of the run beside which it was judged


def _not_verified(why: str) -> Reason:
    return Reason(NOT_VERIFIED, f"{NOT_VERIFIED}: {why}")


def _work(run: Run) -> dict[str, Any]:
    """What must be equal for the losses to be comparable."""
    facts = run.facts
    spec, model = facts.get("spec") or {}, facts.get("model") or {}
    return {
        **{name: spec.get(name) for name in TRAINING},
        "precision": gemm_precision(spec.get("precision"), spec.get("tf32")),
        # The id after which positions and attention start again.
        "reset_at_documents": bool(spec.get("reset_at_documents")) and spec.get("end_of_text"),
        # A run from before a setting existed has its default, which is GPT-2's.
        **{
            f"model {of.name}": model.get(of.name, None if of.default is MISSING else of.default)
            for of in fields(GPTConfig)
            if of.name not in PARTS
        },
        "model parts": {part: model[part] for part in PARTS if part in model},
        "global_batch": (facts.get("layout") or {}).get("global_batch"),
        "routing": facts.get("routing", "natural"),
        "data sha256": (facts.get("data") or {}).get("sha256"),
    }


def compare(run: Run, baseline: Run | None) -> Parity:
    """Compare one run with its baseline, step by step in full precision."""
    why = _incomparable(run, baseline)
    return Parity(run.name, _not_verified(why), len(run.steps)) if why else _judge(run, baseline)


def _incomparable(run: Run, baseline: Run | None) -> str:
    """Why the losses of the two cannot be compared, or ""."""
    if run.state != COMPLETE:
        return f"the run is {run.state}: {run.reason}".rstrip(": ")
    if baseline is None:
        return "there is no baseline run here (--baseline NAME names one)"
    if baseline.state != COMPLETE:
        return f"the baseline {baseline.name} is {baseline.state}"
    for of in (run, baseline):
        if of.missing:
            return f"{of.name}: {of.missing}"
    mine, theirs = _work(run), _work(baseline)
    if mine["precision"] != "fp32":
        return f"precision {mine['precision']}, only fp32 is compared"
    if unequal := [f"{k} {mine[k]}, baseline {theirs[k]}" for k in mine if mine[k] != theirs[k]]:
        return "; ".join(unequal)
    if missing := [k for k, value in mine.items() if value is None]:
        return f"run.json does not say {', '.join(missing)}"
    theirs = [s["step"] for s in _beside(run, baseline)]
    if [s["step"] for s in run.steps] != theirs or not run.steps:
        return f"{len(run.steps)} steps recorded, {len(baseline.steps)} in the baseline"
    for of in (run, baseline):
        for step in of.steps:
            if step["loss"] is None or step["grad_norm"] is None:
                what = "loss" if step["loss"] is None else "grad norm"
                return f"{of.name} has no {what} at step {step['step']}"
    return ""


def _beside(run: Run, baseline: Run) -> list[dict[str, Any]]:
    """The baseline's steps that the run is to have, too: the last ones where it began from a
    checkpoint."""
    loaded = (run.facts.get("spec") or {}).get("load")
    return baseline.steps[-len(run.steps) :] if loaded else baseline.steps


class StepDifference(NamedTuple):
    """|loss - baseline's| in nats, and the grad norm's difference over the baseline's."""

    step: int
    loss: float
    grad_norm: float


def of_steps(run: Run, baseline: Run) -> list[StepDifference]:
    """The differences of each step.

    The baseline has the run's, and each has a loss and a grad norm (`compare` says where not).
    """
    return [
        StepDifference(
            mine["step"],
            _difference(mine["loss"], theirs["loss"]),
            _difference(mine["grad_norm"], theirs["grad_norm"], relative=True),
        )
        for mine, theirs in zip(run.steps, _beside(run, baseline), strict=True)
    ]


def first_losses(model: dict[str, Any]) -> tuple[float, float]:
    """The lowest and highest loss, in nats, that a model of these sizes should start with.

    Logits of a new model are normal with variance hidden x std^2, for the last norm makes elements
    of variance 1: the mean loss is ln V + hidden x std^2 / 2. With a tied output layer a token that
    was just read, of embedding e, has a logit that is higher by a = h.e <= |e|^2 / std = hidden x
    std: h is e / std and what the layers add. So of a share p of tokens that repeat the one before,
    ln V + ln(1 + (exp(a) - 1) / V) - p a, which is least where exp(a) = p (V - 1) / (1 - p).
    """
    vocab, hidden, p = model["vocab_size"], model["hidden"], REPEATS
    highest = math.log(vocab) + hidden * INIT_STD**2 / 2
    if not model["tied"]:
        return highest, highest
    a = min(hidden * INIT_STD, math.log(max(1.0, p * (vocab - 1) / (1 - p))))
    return math.log(vocab) + math.log1p(math.expm1(a) / vocab) - p * a, highest


def _judge(run: Run, baseline: Run) -> Parity:
    work = _work(run)
    sizes = {key: work[f"model {key}"] for key in ("vocab_size", "hidden", "tied")}
    lowest, highest = first_losses(sizes)
    ln_vocab = math.log(sizes["vocab_size"])
    steps = of_steps(run, baseline)
    loss = max(steps, key=lambda step: step.loss)
    norm = max(steps, key=lambda step: step.grad_norm)
    first, wrong = run.steps[0]["loss"], []
    if loss.loss > LOSS_BAR:
        wrong.append(f"loss by {loss.loss:.1e} at step {loss.step} (bar {LOSS_BAR:g})")
    if norm.grad_norm > GRAD_NORM_BAR:
        at = f"at step {norm.step} (bar {GRAD_NORM_BAR:g})"
        wrong.append(f"relative grad_norm by {norm.grad_norm:.1e} {at}")
    from_the_start = run.steps[0]["step"] == 1
    if from_the_start and not lowest - FIRST_LOSS_BAR <= first <= highest + FIRST_LOSS_BAR:
        expected = f"{highest:.3f}" if lowest == highest else f"{lowest:.3f} to {highest:.3f}"
        wrong.append(f"first loss {first:.3f}, expected of a new model is {expected}")
    if wrong:
        both = (run, baseline)
        wrong += [f"{of.name} {of.facts['go_on']}" for of in both if of.facts.get("go_on")]
    verdict = Reason(DIFFERS, f"{DIFFERS}: {'; '.join(wrong)}") if wrong else Reason(EQUAL, EQUAL)
    return Parity(run.name, verdict, len(steps), loss.loss, norm.grad_norm, first, ln_vocab)


def _difference(mine: float, theirs: float, relative: bool = False) -> float:
    """|mine - theirs|, over |theirs| where relative; infinite where one is NaN."""
    if not (math.isfinite(mine) and math.isfinite(theirs)):
        return math.inf
    difference = abs(mine - theirs)
    if not (relative and difference):
        return difference
    return difference / abs(theirs) if theirs else math.inf


def verify(runs: Iterable[Run], baseline: Path | None = None) -> dict[Path, Parity]:
    """Every run beside the baseline of its own study in the same folder, by folder.

    `baseline` is the folder of the run to compare with; without it, each run.json names its own.
    """
    runs = list(runs)
    named: dict[tuple, list[Run]] = defaultdict(list)
    for run in runs:
        named[run.path.parent, run.facts.get("study"), run.name].append(run)
    parities = {}
    for run, name in zip(runs, _names(runs), strict=True):
        fits = named[run.path.parent, run.facts.get("study"), run.facts.get("baseline")]
        if baseline is not None:
            fits = [other for other in runs if other.path == baseline]
        parity = compare(run, fits[0] if fits else None)
        if len(fits) > 1 and run.state == COMPLETE:
            where = ", ".join(str(fit.path) for fit in fits)
            parity = Parity(name, _not_verified(f"the baseline is one of {where}"), len(run.steps))
        parities[run.path] = replace(parity, run=name, baseline=fits[0].path if fits else None)
    return parities


def _names(runs: list[Run]) -> list[str]:
    return distinct([run.name for run in runs], [run.path for run in runs])


def read_runs(paths: list[Path]) -> Reading[list[Run]]:
    """The runs at the paths, also those that have not begun; one line for each folder that cannot
    be read.

    Raises:
        UsageError: every one is damaged, or there is none.
    """
    runs, damaged = [], []
    for path in find_runs(paths, is_run_folder, damaged):
        try:
            runs.append(read_run(path))
        except UsageError as error:  # the others are still reported
            damaged.append(str(error))
    if not runs:
        raise UsageError("; ".join(damaged))
    return Reading(runs, damaged)


def called(wanted: str, runs: list[Run]) -> Run:
    """The one run that `--baseline wanted` means.

    Raises:
        UsageError: none or several, with the names to choose from.
    """
    shown = _names(runs)
    facts = [(run.facts.get("configuration"), run.facts.get("repeat")) for run in runs]
    names = [
        Name(name, run.name, run.path, *of_study)
        for name, run, of_study in zip(shown, runs, facts, strict=True)
    ]
    return runs[chosen(wanted, names)]


_COLUMNS = [
    Column("run", "run"),
    Column("steps", "steps", "d"),
    Column("max_loss_diff", "max |loss - baseline|", ".1e"),
    Column("max_grad_norm_diff", "max grad norm diff (rel)", ".1e"),
    Column("first_loss", "first loss", ".4f"),
    Column("ln_vocab", "ln(vocab)", ".4f"),
    Column("verdict", "verdict", long="word"),
]


def table(parities: Iterable[Parity], baseline: str) -> Table:
    """The parity table; baseline: the names of the runs' baselines, for the note."""
    rows = [{c.key: getattr(parity, c.key) for c in _COLUMNS} for parity in parities]
    for row in rows:
        row["verdict"] = str(row["verdict"])
    note = (
        f"bars: loss {LOSS_BAR:g} nats, grad norm {GRAD_NORM_BAR:g} relative, first loss within"
        f" {FIRST_LOSS_BAR:g} of ln(vocab)"
    )
    judged = [row for row in rows if row["verdict"] == EQUAL]
    if any(abs(row["first_loss"] - row["ln_vocab"]) > FIRST_LOSS_BAR for row in judged):
        note += " and of what the model's width, or a tied output layer, adds to it"
    return Table(_COLUMNS, rows, notes=[f"{note}; baseline: {baseline}" if baseline else note])
