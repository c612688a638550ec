"""Speedup and efficiency against a stated baseline, which may itself have many GPUs."""

from analysis.records import Record

# What must be equal for a ratio of two step times to say something about the split alone.
FIXED = ("precision", "recompute", "commit")
WORDS = {"seq_len": "sequence length", "global_batch": "global batch"}


def differences(record: Record, baseline: Record, scaling: str = "strong") -> list[str]:
    """What of the fixed work differs between the two runs; empty when the comparison is fair.

    `strong`: the same model, sequence length and global batch. `weak`: the same model, sequence
    length and batch per GPU. Either: the same precision, recomputation and commit. What neither
    log states cannot be held against them; what only one states is unknown, not different.
    """
    found = []

    def compare(name: str, mine: object, theirs: object) -> None:
        if mine is not None and theirs is not None and mine != theirs:
            found.append(f"{WORDS.get(name, name)} {mine} here, {theirs} in the baseline")

    for size in sorted(set(record.model) & set(baseline.model)):
        compare(f"model {size}", record.model[size], baseline.model[size])
    if not (record.model and baseline.model):
        compare("parameters", record.params, baseline.params)
    compare("seq_len", record.seq_len, baseline.seq_len)
    if scaling == "strong":
        compare("global_batch", record.global_batch, baseline.global_batch)
    else:
        compare("batch per GPU", batch_per_gpu(record), batch_per_gpu(baseline))
    for name in FIXED:
        compare(name, getattr(record, name), getattr(baseline, name))
    return found


def batch_per_gpu(record: Record) -> float | None:
    """Sequences per GPU and step."""
    if record.global_batch is None or not record.gpus:
        return None
    return record.global_batch / record.gpus


def speedup(
    step_s: float,
    gpus: int,
    baseline_step_s: float,
    baseline_gpus: int,
    scaling: str = "strong",
) -> tuple[float, float]:
    """(speedup, efficiency) against a baseline of `baseline_gpus` GPUs.

    Strong (Amdahl 1967): the time ratio, over the ratio of GPUs. Weak (Gustafson 1988): the work
    grew with the GPUs, so the time ratio is the efficiency, and times the ratio of GPUs the scaled
    speedup.
    """
    times, ratio = baseline_step_s / step_s, gpus / baseline_gpus
    return (times, times / ratio) if scaling == "strong" else (times * ratio, times)
