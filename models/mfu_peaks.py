"""Which peak a printed MFU is over: models/mfu_peaks.toml has what programs divide by.

MFU x peak = TFLOP/s, so a line or a row that prints two of them says the third. Each printed MFU is
restated over one peak, the card's dense one in bf16.
"""

import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

from base.files import read_toml
from base.intervals import Interval
from models.gpus import GPUS, bf16_peak, find_gpu

ROUNDING = 0.001  # share; beyond the printed digits, programs average TFLOP/s and MFU apart
COUNTED = 1.15  # a factor; conventions of counting FLOPs differ by less, most peaks by more
SAME = 0.01  # share; 989 and 989.4, 1300 and 1307.4 are one peak
_ALSO = 2  # as many entries of others are named


class KnownPeak(NamedTuple):
    """A line of models/mfu_peaks.toml, or a peak of models/gpus.toml, whose program is "".

    cards: for which it is; empty where it is for any. why: what it is, in words. since, until: when
    the program had it; "" where it had it before all, or has it.
    """

    tflops: float
    program: str
    why: str
    cards: tuple[str, ...] = ()
    since: str = ""
    until: str = ""

    def __str__(self) -> str:
        since, until = self.since and f"since {self.since}", self.until and f"until {self.until}"
        dates = ", ".join(filter(None, [since, until]))
        owner = f"{self.program}'s" if self.program else "the"
        return f"{owner} {self.why}" + (f" ({dates})" if dates else "")

    def is_for(self, gpu: str | None) -> bool:
        """Returns whether it is for a card that the name may mean, or for any."""
        return not self.cards or not _meant(gpu).isdisjoint(self.cards)


class PrintedMfu(NamedTuple):
    """A printed MFU and what it is over.

    share: as printed. tflops: the peak that it is over; infinite where the program prints 0, NaN
    where nothing says it. text: all of this in a sentence. restated: MFU over the card's dense bf16
    peak; None where that is not known. is_cards: it is over that peak, as it should be.
    """

    share: float
    tflops: float
    text: str
    restated: float | None = None
    is_cards: bool = False


@cache
def _programs() -> dict[str, dict]:
    """Returns the tables of models/mfu_peaks.toml, by program."""
    return read_toml(Path(__file__).with_name("mfu_peaks.toml"), "programs")


@cache
def known_peaks() -> tuple[KnownPeak, ...]:
    """Returns what models/mfu_peaks.toml says, then the peaks of models/gpus.toml."""
    peaks = []
    for program, table in _programs().items():
        for entry in table.get("dense", ()):
            own = find_gpu(entry) if isinstance(entry, str) else None
            card, tflops = (own.name, bf16_peak(own)) if own else entry
            peaks.append(KnownPeak(tflops, program, f"peak of the {card}", (card,)))
        for entry in table.get("others", ()):
            cards = tuple(entry.get("cards", ()))
            peaks.append(KnownPeak(**{**entry, "program": program, "cards": cards}))
    for card in GPUS:
        dense = bf16_peak(card)
        for precision, tflops in card.peaks.items():
            is_twice = math.isclose(tflops, 2 * dense, rel_tol=SAME)
            sparse = ", or in bf16 with sparsity" if is_twice else ""
            why = f"{card.name}'s peak in {precision}{sparse}"
            peaks.append(KnownPeak(tflops, "", why, (card.name,)))
        if "fp8" not in card.peaks:
            peaks.append(
                KnownPeak(2 * dense, "", f"{card.name}'s peak with sparsity", (card.name,))
            )
    return tuple(peaks)


def _listed(program: str) -> str | None:
    """Returns the name in models/mfu_peaks.toml of a program, however it is spelled (`AutoModel`,
    `nemo_automodel`, `NeMo-AutoModel`); None where it is not there."""

    def letters(name: str) -> str:
        return "".join(filter(str.isalnum, name)).lower()

    names = {name: [name, *table.get("also", ())] for name, table in _programs().items()}
    spelled = letters(program)
    return next((name for name in names if spelled in map(letters, names[name])), None)


@cache
def _meant(gpu: str | None) -> frozenset[str]:
    """Returns the cards of known peaks that a name may mean: the one that gpus.toml knows it as,
    else those whose words it has ("NVIDIA RTX A6000"), or that have its words ("NVIDIA H100").
    Without a name any is meant."""
    if card := find_gpu(gpu):
        return frozenset([card.name])
    words = set((gpu or "").lower().split()) - {"nvidia", "amd", "instinct", "tesla"}
    names = {card: set(card.lower().split()) for peak in known_peaks() for card in peak.cards}
    return frozenset(card for card, name in names.items() if words <= name or name <= words)


def peak_on_every_card(program: str | None) -> float | None:
    """Returns the TFLOP/s that a program divides by whatever the card is; None where it looks at
    the card, or is not known."""
    peaks = {peak.tflops for peak in known_peaks() if peak.program == program}
    return peaks.pop() if len(peaks) == 1 else None


def _known(over: Interval, program: str | None, gpu: str | None) -> list[KnownPeak]:
    """Returns the known peaks within `over`, the likeliest first: the program's own for this card,
    its fallback, the card's own, those of other programs for it, other cards'."""

    def order(peak: KnownPeak) -> tuple[bool, bool, bool, bool, float]:
        is_for = peak.is_for(gpu)
        is_own = is_for and peak.program == program
        is_sheet = is_for and not peak.program and gpu is not None
        is_general = bool(peak.cards) == (gpu is None)  # than what would be said first
        off = abs(math.log(peak.tflops / over.middle)) if math.isfinite(peak.tflops) else 0.0
        return not is_own, not is_sheet, not is_for, is_general, off

    return sorted((p for p in known_peaks() if over.low <= p.tflops <= over.high), key=order)


def figure(tflops: float) -> str:
    """Returns TFLOP/s for a sentence: 2,306.9, or 312."""
    return f"{tflops:,.1f}".removesuffix(".0")


def _words(over: Interval, peaks: list[KnownPeak], program: str | None, gpu: str | None) -> str:
    """Returns the peak that a printed MFU is over, in words: whose it is, or may be, too."""
    if not peaks:
        return f"about {float(f'{over.middle:.3g}'):,.0f} TFLOP/s, which is no peak that is known"
    first, *rest = peaks
    number = f"{figure(first.tflops)} TFLOP/s, " if math.isfinite(first.tflops) else ""
    if first.program == program:  # of a card that is not stated it may have the same number, too
        others = [p for p in rest if p.program == program and gpu is None]
    else:
        others = [p for p in rest if p.program != first.program and p.is_for(gpu)]
    words = [f"{p.program}'s" if p.why == first.why else str(p) for p in others]
    also = list(dict.fromkeys(words))[:_ALSO]
    return f"{number}{first}" + (f" (or {', or '.join(also)})" if also else "")


def printed_mfu(
    share: float,
    over: Interval | None,
    program: str | None = None,
    gpu: str | None = None,
    given_peak: float | None = None,
    counted_tflops: float | None = None,
) -> PrintedMfu:
    """Returns what a printed MFU is over, and restates it.

    share: the printed MFU (1.52: 152 %). over: TFLOP/s over MFU as far as the printed digits say
    them, or the peak that the program states; None where MFU is all that is printed: then it is the
    program's one peak of all cards, or that of the program or of the card that is nearest by
    `counted_tflops`, TFLOP/s as they are counted here. program: its name in models/mfu_peaks.toml.
    given_peak: dense TFLOP/s in bf16 of a card that is not known.
    """
    card = find_gpu(gpu)
    gpu = card.name if card else gpu
    program = _listed(program or "")
    head, own_peaks = f"printed MFU {100 * share:.4g} %", None
    if over is not None:
        over = Interval(over.low * (1 - ROUNDING), over.high * (1 + ROUNDING))
    else:
        own_peaks = [p for p in known_peaks() if p.program in ("", program) and p.is_for(gpu)]
        if share == 0:  # rounded, or over infinity, as some have it for an unknown card
            over = Interval(math.inf, math.inf)
        elif every_card := peak_on_every_card(program):
            over = Interval(every_card, every_card)
        elif counted_tflops and gpu:
            over = Interval(counted_tflops / COUNTED / share, counted_tflops * COUNTED / share)
            head += " (by our count of FLOPs)"
    peaks = _known(over, program, gpu) if over else []
    if own_peaks is not None:  # too little is known to name one of others
        peaks = [peak for peak in peaks if peak in own_peaks]
        if not peaks:
            unknown = "an unknown peak, for no TFLOP/s stand beside it"
            measured = _programs().get(program, {}).get("measured", unknown)
            return PrintedMfu(share, math.nan, f"{head}: over {measured}")
    tflops = peaks[0].tflops if peaks else over.middle
    dense = bf16_peak(card) if card else given_peak
    name = f"the {card.name}'s" if card else "the given"
    if dense and abs(tflops / dense - 1) <= SAME:
        words = f"{head}: over {figure(tflops)} TFLOP/s, {name} dense bf16 peak"
        return PrintedMfu(share, tflops, words, share * tflops / dense, is_cards=True)
    words = f"{head}: over {_words(over, peaks, program, gpu)}"
    if not dense:
        lacking = f"no peak of {gpu} is known" if gpu else "its card is not stated (gpu_type)"
        return PrintedMfu(share, tflops, f"{words}; {lacking}")
    if not math.isfinite(tflops):
        return PrintedMfu(share, tflops, f"{words}; {name} is {figure(dense)}")
    restated = share * tflops / dense
    words += f"; over {name} {figure(dense)} it is {100 * restated:.1f} %"
    words += ", which is impossible" if restated > 1 else ""
    return PrintedMfu(share, tflops, words, restated)
