"""GPUs by name, MFU, and the network of a node from words. models/gpus.toml lists the GPUs.

A name must identify one card: "H100" alone is an SXM (989 TFLOP/s) or a PCIe one (756), so it has
no peak.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from base.errors import Answer, UsageError
from base.files import read_toml

# Model FLOPs only: what MFU is defined on. sc21 and seed count recomputation, which is HFU.
MODEL_FLOPS = ("megatron", "megatron-full", "palm", "6n")


@dataclass(frozen=True)
class Gpu:
    """One card of models/gpus.toml, which says what its numbers are.

    peaks: dense TFLOP/s by precision. Rates are bytes/s, one direction, per card: to its memory,
    over its links to the others of a node, and its share of the node's network. domain: cards that
    the links join where they reach beyond a node, else 0. other_gb: other sizes of memory that the
    same name has.
    """

    name: str
    peaks: dict[str, float]
    pattern: str
    memory_gb: float
    memory_rate: float
    link: float
    network: float
    source: str
    mesh: bool = False
    domain: int = 0
    pcie: str = ""
    other_gb: tuple[float, ...] = ()


_PCIE = re.compile(r"\s*PCIe ?([1-7])(?:\.0)? ?x ?(1|2|4|8|16)\s*", re.IGNORECASE)
PCIE = '"PCIe 4.0 x16"'  # how the PCI Express of a card can be written


def pcie_rate(words: str) -> float | None:
    """Returns bytes/s of a card over PCI Express in one direction, from its generation and lanes:
    three quarters of 16 GB/s for 16 lanes of the third arrive, and each generation doubles that.
    None where the words state no such link."""
    if not (stated := _PCIE.fullmatch(words)):
        return None
    return 12e9 * 2.0 ** (int(stated[1]) - 3) * int(stated[2]) / 16


def _read_cards() -> tuple[Gpu, ...]:
    """Returns the cards of models/gpus.toml in its order, with rates in bytes/s."""
    cards = read_toml(Path(__file__).with_name("gpus.toml"), "cards")
    for card in cards.values():
        if isinstance(card["link"], str):
            card["pcie"] = card["link"]
            card["link"] = pcie_rate(card["pcie"]) / 1e9
        card |= {rate: card[rate] * 1e9 for rate in ("memory_rate", "link", "network")}
    return tuple(Gpu(name, card.pop("tflops"), **card) for name, card in cards.items())


GPUS = _read_cards()


def find_gpu(name: str | None) -> Gpu | None:
    """Returns the card that `name` means, or None when it means none or more than one."""
    if not name:
        return None
    return next((card for card in GPUS if re.search(card.pattern, name, re.IGNORECASE)), None)


# Of the number formats of matrix products: those that no CPU of ours trains in, and NVIDIA's first
# compute capability with each (all of its GPUs have fp32 and fp16).
ON_GPUS = ("fp16", "tf32", "fp8")
FIRST_WITH = {"bf16": (8, 0), "tf32": (8, 0), "fp8": (8, 9)}
# AMD's with each: CDNA 1 to 4 are gfx908, gfx90a, gfx94x, gfx95x; RDNA 3 and 4 gfx11xx, gfx12xx.
GFX_WITH = {
    "bf16": ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12"),
    "tf32": ("gfx94",),
    "fp8": ("gfx94", "gfx95", "gfx12"),
}


def lacking(
    formats: Iterable[str], gpu: str | None, capability: tuple[int, int] | str | None = None
) -> list[str]:
    """Returns those of the number formats (fp32, tf32, fp16, bf16, fp8) that a GPU does not have.

    gpu: its name; None where there is none. capability: what PyTorch says of it, AMD's by name
    ("gfx942:sramecc+:xnack-"); without it the card's sheet counts, and nothing is lacking where the
    card is not known.
    """
    asked = dict.fromkeys(formats)
    if gpu is None:
        return [name for name in asked if name in ON_GPUS]
    if isinstance(capability, str):
        return [name for name in asked if not capability.startswith(GFX_WITH.get(name, "gfx"))]
    if capability is not None:
        return [name for name in asked if capability < FIRST_WITH.get(name, (0, 0))]
    card = find_gpu(gpu)
    return [name for name in asked if card and name in FIRST_WITH and name not in card.peaks]


def joined(name: str | None, gpus_per_node: int) -> int:
    """Returns how many GPUs fast links join: those of a node, or of the maker's rack where the
    card's links reach beyond a node (GB200: 4 a node, 72 in an NVLink domain)."""
    card = find_gpu(name)
    return max(card.domain if card else 0, gpus_per_node)


def bf16_peak(card: Gpu) -> float:
    """Returns a card's dense TFLOP/s in bf16; of a card without it (V100) in fp16."""
    return card.peaks.get("bf16", card.peaks["fp16"])


def peak_tflops(name: str | None, precision: str | None) -> float | None:
    """Returns a card's dense TFLOP/s at `precision` (fp32, tf32, fp16, bf16, fp8, fp4), or None."""
    card = find_gpu(name)
    return card.peaks.get((precision or "").lower()) if card else None


def mfu(
    tflops: float | None,
    gpu: str | None,
    precision: str | None,
    convention: str,
    given_peak: float | None = None,
) -> Answer[float]:
    """Returns model FLOPs utilisation, 0 to 1, or why there is none.

    Chowdhery et al. 2022 (PaLM), section 4.1: observed throughput of model FLOPs over the peak. A
    throughput above the peak is an error, not a utilisation; the sentence says so. given_peak:
    TFLOP/s of a card that is not known.
    """
    if tflops is None:
        return Answer(None)
    card = find_gpu(gpu)
    peak = peak_tflops(gpu, precision) or given_peak
    if peak is None:
        return Answer(
            None, f"no peak known for {gpu or 'this machine'} at {precision or 'its precision'}"
        )
    if tflops > peak:
        source = card.name if card else gpu or "as given"
        return Answer(None, f"{tflops:.1f} TFLOP/s is above the peak of {peak:g} ({source})")
    if convention not in MODEL_FLOPS:
        return Answer(None, f"the {convention} convention counts recomputation: no MFU")
    return Answer(tflops / peak)


# A bare name in a published table nearly always means the card of the maker's own servers.
USUAL = {"V100": "V100 SXM2", "H100": "H100 SXM", "A100": "A100", "P100": "P100 SXM2"}
GBITS = {"EDR": 100, "HDR": 200, "NDR": 400, "XDR": 800, "OMNI-PATH": 100, "OPA": 100}


def usual_gpu(name: str) -> Gpu | None:
    """Returns the card that `name` means: as `find_gpu`, but a bare V100 or H100 is the SXM one."""
    bare = re.match(r"\s*(?:NVIDIA\s+)?([A-Z]+\d+[A-Z]?)", name, re.IGNORECASE)
    usual = USUAL.get(bare[1].upper(), "") if bare else ""
    return find_gpu(name) or next((g for g in GPUS if g.name == usual), None)


def planning_gpu(name: str | None) -> Gpu:
    """Returns the card to plan with, by `usual_gpu`.

    Raises:
        UsageError: there is no such card; the message has the known ones.
    """
    if name and (card := usual_gpu(name)):
        return card
    problem = f"unknown GPU {name!r}" if name else "no GPU type"
    remedy = "; describe another card by a table of models/gpus.toml" if name else ""
    raise UsageError(f"{problem}; known: {', '.join(g.name for g in GPUS)}{remedy}")


def card_memory(name: str) -> float:
    """Returns GB of the card that a name means: those in it (A100-SXM4-40GB), or its sheet's.

    Raises:
        UsageError: no such card; or it has several sizes, and the name states none or another.
    """
    card = planning_gpu(name)
    sizes = sorted({*card.other_gb, card.memory_gb})
    stated = re.search(r"(?<![\d.])(\d{2,3})\s?G(?:i?B)?(?![\w/])", name, re.IGNORECASE)
    # More than twice the largest is another memory (GH200 480GB: its CPU's).
    size = float(stated[1]) if stated and float(stated[1]) <= 2 * sizes[-1] else None
    if size in sizes or (size is None and len(sizes) == 1):
        return size or sizes[0]
    raise UsageError(
        f"{card.name} has {' or '.join(f'{size:g}' for size in sizes)} GB, {name!r} states"
        f" {f'{size:g}' if size else 'none'}: name it as '{card.name} {sizes[0]:g}GB', or give"
        " analysis.plan --gpu-memory GIB (a cluster: the key gpu_memory_gb)"
    )


# A kind of link, which becomes its rate; then a rate, and how many of it stand before or behind:
# "4 x 100 Gb/s", "4 EFA x 100 Gb/s", "4 NICs of 100 Gb/s", "100 Gb/s x 4" or "10 GbE".
_LINK = re.compile(
    r"((?<=\d)\s+(?:(?:InfiniBand|IB)\s+)?)?(?<![a-wyz])"
    r"(EDR|HDR|NDR|XDR|Omni-Path|OPA)(\d{3})?\b(?:\s+(\d{3})\s*Gb(?:/s|ps))?",
    re.IGNORECASE,
)
_PORTS = r"(?:links?|ports?|rails?|NICs?|HCAs?)"
_RATE = re.compile(
    rf"(?:(?<![-\w])(\d+)\s*(?:(?:[A-Za-z-]+\s+)?[x×*]|{_PORTS}\s+of)\s*)?"
    r"(?:(?:InfiniBand|IB)\s+)?"
    r"(\d+(?:\.\d+)?)\s*([GT])b(?:ps|it/s|/s|[eE]\b)"
    rf"(?:\s*[x×*]\s*(\d+)|\W+(\d+)\s*[x×*]?\s*{_PORTS}\b)?"
)
_PER_GPU = re.compile(r"[^,;()]{0,30}(?:per|a|/)\s*(?:GPU|card|accelerator)\b", re.IGNORECASE)


NETWORK = '"8x NDR", "4x 200 Gb/s" or "10 GbE"'  # how a network can be written


def check_network(words: str, gpus_per_node: float, where: str) -> None:
    """Refuses words that state no rate of a node's network; `where` they stand begins the message.

    Raises:
        UsageError: they state none.
    """
    if not network_rate(words, gpus_per_node):
        raise UsageError(f"{where} {words!r} states no rate; write it as {NETWORK}")


def network_rate(cluster: str | None, gpus_per_node: float | None = None) -> float | None:
    """Returns bytes/s of a node's network from a description that states it, else None.

    "8x NDR", "NDR x 8", "8 x InfiniBand HDR", "2x HDR100", "Omni-Path, 4 links/node", "10 GbE",
    "4 x 100 Gb/s", "800 Gbps InfiniBand per node", "400 Gb/s RDMA per GPU" (of `gpus_per_node`).
    """

    def in_gbits(link: re.Match[str]) -> str:
        times = " x " if link[1] else ""  # "4 HDR" is "4 x HDR"
        return f"{times}{link[4] or link[3] or GBITS[link[2].upper()]} Gb/s"

    text = _LINK.sub(in_gbits, cluster or "")
    rate = _RATE.search(text)
    if rate is None:
        return None
    bits_per_s = float(rate[2]) * (1e12 if rate[3] == "T" else 1e9)
    node_rate = bits_per_s / 8 * int(rate[1] or rate[4] or rate[5] or 1)
    if not _PER_GPU.match(text, rate.end()):
        return node_rate
    return node_rate * gpus_per_node if gpus_per_node else None
