"""FLOPs and throughput of one run: TFLOP/s, MFU, and which fact is missing where there is none."""

from collections import defaultdict
from collections.abc import Iterator

from analysis.logs.load import name_of
from analysis.logs.record import Record
from models.config import GPTConfig
from models.errors import UsageError
from models.flops import CONVENTIONS, DEFAULT_CONVENTION
from models.gpus import mfu, peak_tflops

SAME_MODEL = 0.05  # parameters printed over those of a GPT of the printed shapes, less one


def config_of(record: Record) -> GPTConfig | None:
    """The model as a GPT, where the log gives its sizes and nothing speaks against it being one.

    Gated or grouped attention, experts and the like hide in logs whose shapes look like a GPT's;
    their parameters do not: they must agree with the shapes, or, where none are printed, the
    feed-forward size with the usual 4 x hidden. None otherwise: an unknown number is better than a
    wrong one.
    """
    known = {k: v for k, v in record.model.items() if k in GPTConfig.__dataclass_fields__}
    if not {"n_layer", "hidden", "vocab_size"} <= set(known):
        return None
    known.setdefault("n_head", 1)  # no FLOPs or parameter count depends on it
    if record.seq_len:
        known.setdefault("max_seq_len", record.seq_len)
    try:
        config = GPTConfig(**known)
    except UsageError:
        return None
    if record.params is not None:
        agrees = abs(record.params / config.n_params - 1) <= SAME_MODEL
    else:
        agrees = config.ffn_hidden == 4 * config.hidden
    return config if agrees else None


def flops_per_token(record: Record, convention: str) -> float | None:
    """FLOPs per token under `convention`, or None where a fact that it needs is missing."""
    recompute = record.recompute == "full"
    if convention == "seed":  # its rule is that recomputation is on, unless a log denies it
        recompute = record.recompute in (None, "full")
    elif convention == "sc21" and record.recompute is None:
        return None
    config = config_of(record)
    # A size that is stated (52B) rather than counted is what these two multiply.
    if record.params and convention in ("6n", "seed"):
        return (8.0 if recompute and convention == "seed" else 6.0) * record.params
    if config is None or not record.seq_len:
        return None
    return CONVENTIONS[convention](config, record.seq_len, recompute)


def tflops_per_gpu(record: Record, step_s: float, convention: str) -> float | None:
    """TFLOP/s per GPU at `step_s` seconds per iteration, or None where a fact is missing."""
    per_token = flops_per_token(record, convention)
    if not (per_token and record.gpus and record.global_batch and record.seq_len and step_s > 0):
        return None
    return per_token * record.global_batch * record.seq_len / (step_s * record.gpus * 1e12)


def utilisation(record: Record, tflops: float | None, convention: str) -> float | None:
    """MFU, 0 to 1, or None where it is unknown; `unknown` says why."""
    return mfu(tflops, record.gpu_type, record.precision, convention)[0]


def above_peak(record: Record, tflops: float | None, convention: str) -> list[str]:
    """What is wrong with more TFLOP/s than the card's peak; [] where there are not."""
    peak = peak_tflops(record.gpu_type, record.precision)
    if not (peak and tflops and tflops > peak):
        return []
    return [mfu(tflops, record.gpu_type, record.precision, convention)[1]]


def peak_gb(record: Record) -> float | None:
    """GB (1e9 bytes) that the fullest rank held, or None."""
    return None if record.peak_bytes is None else record.peak_bytes / 1e9


def missing(records: list[Record], convention: str = DEFAULT_CONVENTION) -> dict[str, list[str]]:
    """Column -> notes that name the fact behind each `-` under micro-batch, peak GB and MFU."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for record in records:
        for key, why in _missing(record, convention):
            groups[key, why].append(name_of(record))
    notes: dict[str, list[str]] = defaultdict(list)
    for (key, why), names in groups.items():
        who = "all" if len(names) == len(records) > 1 else ", ".join(names)
        notes[key].append(f"{why}: {who}")
    return notes


def _missing(record: Record, convention: str) -> Iterator[tuple[str, str]]:
    if record.micro_batch is None:
        yield "micro_batch", "micro-batch -: the log does not state it"
    if record.peak_bytes is None:
        yield "peak_gb", "peak GB -: the log has no peak of memory"
    facts = {"GPUs": record.gpus, "global batch": record.global_batch}
    facts |= {"sequence length": record.seq_len}
    facts |= {"model sizes": flops_per_token(record, convention)}
    if absent := [name for name, value in facts.items() if not value]:
        yield "mfu", f"MFU -: the log does not state {', '.join(absent)}"
    elif why := mfu(0.0, record.gpu_type, record.precision, convention)[1]:
        yield "mfu", f"MFU -: {why}"
