"""FLOPs and throughput of one run: TFLOP/s, MFU, and which fact is missing where there is none."""

import re
from typing import NamedTuple

import numpy as np

from analysis.common.reasons import DOUBT, MISSING, Reason
from analysis.common.statistics import median_of
from analysis.logs.model import SIZES, asked, config_of
from analysis.logs.record import COARSE, UNPADDED, Record
from analysis.logs.step_time import no_timing
from base.errors import Answer
from models.flops import CONVENTIONS, DEFAULT_CONVENTION
from models.gpus import GPUS, bf16_peak, find_gpu, mfu, peak_tflops

PRINTED = "printed"  # TFLOP/s that the log prints and that no convention here can compute


# A run folder of before.
UNMEASURED = "attention ends with each document, and run.json has no data.attended_seq_len"


def _for_tokens(record: Record) -> list[str]:
    """Returns what tokens/s need beside a time or samples/s, where the log does not state it."""
    if record.epochs:
        return []
    rate = any(np.isfinite(record.steps[name]).any() for name in ("samples_per_s", "tokens_per_s"))
    rate = rate or not {"samples_per_s", "tokens_per_s"}.isdisjoint(record.totals)
    needed = ["seq_len"] if rate else ["global_batch", "seq_len"]
    return [name for name in needed if not getattr(record, name)]


def _unstated(record: Record) -> list[str]:
    """Returns what TFLOP/s per GPU need beside the model, where the log does not state it."""
    return [*([] if record.gpus else ["gpus"]), *_for_tokens(record)]


def per_token(record: Record, convention: str) -> Answer[float]:
    """Returns FLOPs per token under `convention`."""
    recompute = record.recompute == "full"
    if convention == "seed":  # its rule is that recomputation is on, unless a log denies it
        recompute = record.recompute in (None, "full")
    elif convention == "sc21" and record.recompute is None:
        return Answer(None, asked(["recompute"]))
    # A size that is stated (52B) rather than counted is what these two multiply.
    by_params = convention in ("6n", "seed") and "experts" not in record.model  # these: the active
    if record.params and by_params and not record.uncounted:
        return Answer((8.0 if recompute and convention == "seed" else 6.0) * record.params)
    if absent := [name for name in SIZES if name not in record.model]:
        if not record.uncounted and record.trained and not record.params:
            part = f"the {record.trained:,} trainable parameters may be a part of the model's"
            return Answer(None, f"{part}, and {asked(['params', *_unstated(record)])}")
        if not record.uncounted:
            return Answer(None, asked(absent + _unstated(record)))
    config, reason = config_of(record)
    if config is None:
        return Answer(None, reason)
    if not record.seq_len:
        return Answer(None, OF_EPOCHS if record.epochs else asked(_unstated(record)))
    if record.attended_seq_len == 0:
        return Answer(None, UNMEASURED)
    seen = record.attended_seq_len or record.seq_len
    if seen > record.seq_len:
        words = f"attended_seq_len is {seen:g}, above the {record.seq_len} tokens of a sequence"
        return Answer(None, f"{words} (--attended-seq-len)")
    return Answer(CONVENTIONS[convention](config, seen, recompute))


def tflops_per_gpu(record: Record, tokens_per_s: float | None, convention: str) -> Answer[float]:
    """Returns TFLOP/s per GPU at this many tokens/s of all GPUs."""
    flops, reason = per_token(record, convention)
    if flops is None:
        return Answer(None, reason)
    if not record.gpus:
        return Answer(None, asked(_unstated(record)))
    if not tokens_per_s:
        return Answer(None)  # `tokens_missing` says why
    return Answer(flops * tokens_per_s / (record.gpus * 1e12))


def model_utilisation(record: Record, step_s: float) -> Answer[float]:
    """Returns MFU, 0 to 1, at a step time, by the default convention."""
    tokens = (record.global_batch or 0) * (record.seq_len or 0)
    tflops, reason = tflops_per_gpu(record, tokens / step_s, DEFAULT_CONVENTION)
    if tflops is None:
        return Answer(None, reason)
    return utilisation(record, tflops, DEFAULT_CONVENTION)


class Throughput(NamedTuple):
    """TFLOP/s per GPU or None, by which convention, and the reason for another one or none."""

    tflops: float | None
    convention: str
    reason: str


def throughput_of(
    record: Record, tokens_per_s: float | None, printed: float | None, convention: str | None = None
) -> Throughput:
    """Returns TFLOP/s by the convention. Without one it is the default; where the log does not
    state the model's sizes, 6 per stated parameter; where neither can be had, what the log itself
    prints, `printed`."""
    tflops, reason = tflops_per_gpu(record, tokens_per_s, convention or DEFAULT_CONVENTION)
    if tflops is not None or convention:
        return Throughput(tflops, convention or DEFAULT_CONVENTION, reason)
    if not set(SIZES) <= set(record.model):
        by_params = tflops_per_gpu(record, tokens_per_s, "6n").value
        if by_params is not None:
            return Throughput(by_params, "6n", reason)
    if printed is not None:
        return Throughput(printed, PRINTED, reason)
    return Throughput(None, DEFAULT_CONVENTION, reason)


def printed_rate(record: Record) -> float | None:
    """Returns the log's tokens per GPU and second in units of 1e12 over its printed TFLOP/s: times
    FLOPs per token, ours over the printed. The median of its entries; None where it prints none."""
    batch = (record.global_batch or 0) * (record.seq_len or 0)
    step_s, tflops = record.steps["step_s"], record.steps["tflops"]
    with np.errstate(all="ignore"):
        rate = batch / (step_s * (record.gpus or np.nan) * 1e12) / tflops
    return median_of(rate[rate > 0])


def of_vocabulary(record: Record) -> float:
    """Returns FLOPs per token of the vocabulary's matrix, which GPT-NeoX's own count leaves out."""
    return 6.0 * record.model["hidden"] * record.model["vocab_size"]


def printed_doubt(record: Record) -> list[Reason]:
    """Returns why what GPT-NeoX prints is not ours, where its own count is within 1 % of it."""
    rate, flops = printed_rate(record), per_token(record, "sc21").value
    if record.format != "GPT-NeoX" or None in (rate, flops):
        return []
    off = abs(rate * (flops - of_vocabulary(record)) - 1)
    if off > min(0.01, abs(rate * flops - 1)):
        return []
    again = "count recomputation and " if record.recompute == "full" else ""
    return [Reason(DOUBT, f"the printed TFLOP/s {again}leave the vocabulary's matrix out")]


def packing_doubt(record: Record, rate: Throughput) -> list[Reason]:
    """Returns what TFLOP/s of packed documents assume of attention, where their lengths are not
    known."""
    is_counted = rate.tflops is not None and rate.convention not in (PRINTED, "6n", "seed")
    if not (record.packed and is_counted) or record.attended_seq_len:
        return []
    words = f"documents are packed ({record.packed}), and attention is counted over whole sequences"
    text = f"{words}, the most that it can be (--attended-seq-len)"
    return [Reason(DOUBT, text, ("tflops", "mfu"))]


OF_EPOCHS = "the log times epochs, and does not state their tokens"
NO_RATE = "the log has neither a step time nor a rate"


# A printed rate, the time of a micro-batch, or a step's tokens -> what makes it the time of a step.
FACTS_FOR_STEP_TIME = {
    "micro_s": ("n_micro",),
    "tokens": ("gpus",),
    "samples_per_s": ("global_batch",),
    "tokens_per_s": ("global_batch", "seq_len"),
    "tokens_per_s_per_gpu": ("gpus", "global_batch", "seq_len"),
}


def time_missing(record: Record) -> str:
    """Returns why a run has no time: none may be taken from it, or a printed rate needs a fact that
    the log does not state."""
    if untimed := no_timing(record):
        return untimed.text
    if coarse := record.doubts.get(COARSE):
        return f"no step was timed: {coarse}"
    if UNPADDED in record.doubts:
        return "no step was timed, and none follows from tokens/s without padding"
    has_rate = {
        name: np.isfinite(record.steps[name]).any() or name in record.totals
        for name in FACTS_FOR_STEP_TIME
    }
    needed = next((facts for name, facts in FACTS_FOR_STEP_TIME.items() if has_rate[name]), ())
    absent = [name for name in needed if not getattr(record, name)]
    return asked(absent) if absent else "no step was timed"


def tokens_missing(record: Record, timed: bool) -> str:
    """Returns why a run has no tokens/s; `timed`: whether it has a step time."""
    if untimed := no_timing(record):
        return untimed.text
    if np.isfinite(record.steps["tokens_per_s_per_gpu"]).any() and not record.gpus:
        return asked(["gpus"])
    if record.epochs and timed:
        return OF_EPOCHS
    rate = np.isfinite(record.steps["samples_per_s"]).any() or "samples_per_s" in record.totals
    return asked(_for_tokens(record)) if (timed or rate) and _for_tokens(record) else NO_RATE


def utilisation(record: Record, tflops: float | None, convention: str) -> Answer[float]:
    """Returns MFU, 0 to 1."""
    if convention == PRINTED:
        return Answer(None, "the TFLOP/s are the log's own count")
    if tflops is None:
        return Answer(None, "TFLOP/s is unknown")
    absent = [name for name in ("gpu_type", "precision") if getattr(record, name) is None]
    if absent and record.peak_tflops is None:
        return Answer(None, asked(absent))
    value, reason = mfu(tflops, record.gpu_type, record.precision, convention, record.peak_tflops)
    if value is None and not absent and find_gpu(record.gpu_type) is None:
        card = _parts(record.gpu_type)
        if cards := [f'"{g.name}"' for g in GPUS if card and set(card) <= set(_parts(g.name))]:
            reason += f"; give --gpu-type {' or '.join(cards)}"
    return Answer(value, reason)


def _parts(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower().replace("nvidia", ""))


def above_peak(record: Record, tflops: float | None, convention: str) -> list[Reason]:
    """Returns what is wrong with more TFLOP/s than the card's peak; [] where there are not. Without
    a precision it is the peak in bf16."""
    card = find_gpu(record.gpu_type)
    if record.precision is None and card and tflops and tflops > bf16_peak(card):
        above = f"{tflops:.1f} TFLOP/s is above the {card.name}'s {bf16_peak(card):g} in bf16"
        return [Reason(DOUBT, f"{above}, and no precision is stated (--precision)")]
    peak = peak_tflops(record.gpu_type, record.precision) or record.peak_tflops
    if not (peak and tflops and tflops > peak):
        return []
    above = mfu(tflops, record.gpu_type, record.precision, convention, peak)
    return [Reason(DOUBT, above.reason)]


def plain_missing(record: Record) -> list[Reason]:
    """Returns why columns of plain facts are empty."""
    missing = {("peak_gib",): "the log has no peak of memory"} if record.peak_bytes is None else {}
    for columns in (("gpus", "tp", "pp", "dp"), ("micro_batch",)):
        if absent := tuple(name for name in columns if getattr(record, name) is None):
            missing[absent] = asked(absent)
    if experts := record.model.get("experts"):
        if record.routing is None:
            missing["routing",] = asked(["routing"])
        if record.dropped is None:
            times = experts.get("moe_expert_capacity_factor")
            takes = f"an expert takes {times:g} times its even share, and " if times else ""
            missing["dropped",] = takes + asked(["dropped"])
    return [Reason(MISSING, text, columns) for columns, text in missing.items()]
