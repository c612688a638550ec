"""Peaks of GPUs, each from its maker's own sheet, and MFU. A GPU that is not here has none.

Peaks are dense matrix (tensor-core) TFLOP/s with 32-bit accumulation where the sheet tells them
apart, never with sparsity. A name must identify one card: "H100" alone is an SXM (989) or a PCIe
(756) one, so it has no peak.
"""

import re
from dataclasses import dataclass

from models.errors import UsageError

# Model FLOPs only: what MFU is defined on. sc21 and seed count recomputation, which is HFU.
MODEL_FLOPS = ("megatron", "palm", "6n")


@dataclass(frozen=True)
class Gpu:
    """One card: a pattern for its names, dense peaks by precision in TFLOP/s, and the source."""

    name: str
    pattern: str
    peaks: dict[str, float]
    source: str


def _half(value: float, **other: float) -> dict[str, float]:
    return {"fp16": value, "bf16": value, **other}


_NVIDIA = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center"
_V100 = (
    "NVIDIA V100 datasheet, https://images.nvidia.com/content/technologies/volta/pdf/"
    "volta-v100-datasheet-update-us-1165301-r5.pdf"
)
_A100 = (
    f"NVIDIA A100 datasheet, {_NVIDIA}/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_A10 = f"NVIDIA A10 datasheet, {_NVIDIA}/a10/pdf/a10-datasheet.pdf"
_H100 = (
    "NVIDIA H100 datasheet (sparse figures halved),"
    " https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
)
_H200 = "NVIDIA H200 Tensor Core GPU datasheet (sheet's sparse figures halved)"
_ADA = "NVIDIA L4 / L40S datasheet (sparse figures halved where only they are printed)"
_AMD_CDNA3 = "AMD Instinct MI300X / MI325X data sheet"
_AMD_CDNA4 = "AMD Instinct MI350X / MI355X data sheet"
_BLACKWELL = "NVIDIA Blackwell architecture technical brief (dense figures)"

GPUS = (
    Gpu("T4", r"\bT4\b", {"fp16": 65.0, "fp32": 8.1}, "NVIDIA T4 datasheet, 2019-03"),
    Gpu(
        "P100 SXM2", r"\bP100[- ]SXM2", {"fp16": 21.2, "fp32": 10.6}, "NVIDIA Tesla P100 datasheet"
    ),
    Gpu("V100 SXM2", r"\bV100[- ]SXM[23]", {"fp16": 125.0, "fp32": 15.7}, _V100),
    Gpu("V100S PCIe", r"\bV100S\b", {"fp16": 130.0, "fp32": 16.4}, _V100),
    Gpu("V100 PCIe", r"\bV100[- ]PCIE", {"fp16": 112.0, "fp32": 14.0}, _V100),
    Gpu("A100", r"\bA100\b", _half(312.0, tf32=156.0, fp32=19.5), _A100),
    Gpu("A800", r"\bA800\b", _half(312.0, tf32=156.0, fp32=19.5), "NVIDIA A800 datasheet"),
    Gpu(
        "A10",
        r"\bA10\b",
        _half(125.0, tf32=62.5, fp32=31.2),
        _A10,
    ),
    Gpu("A40", r"\bA40\b", _half(149.7, tf32=74.8, fp32=37.4), "NVIDIA A40 datasheet"),
    Gpu("H100 PCIe", r"\bH100[- ]PCIE", _half(756.0, tf32=378.0, fp8=1513.0, fp32=51.0), _H100),
    Gpu("H100 NVL", r"\bH100[- ]NVL", _half(835.0, tf32=417.0, fp8=1670.0, fp32=60.0), _H100),
    Gpu(
        "H100 SXM",
        r"\bH100[- ](SXM|80GB HBM3)|\bGH200\b",
        _half(989.4, tf32=494.7, fp8=1978.9, fp32=66.9),
        _H100,
    ),
    Gpu("H200 NVL", r"\bH200[- ]NVL", _half(835.5, tf32=417.5, fp8=1670.5, fp32=60.0), _H200),
    Gpu("H200", r"\bH200\b", _half(989.4, tf32=494.7, fp8=1978.9, fp32=66.9), _H200),
    Gpu("L4", r"\bL4\b", _half(121.0, tf32=60.0, fp8=242.5, fp32=30.3), _ADA),
    Gpu("L40S", r"\bL40S\b", _half(362.0, tf32=183.0, fp8=733.0, fp32=91.6), _ADA),
    Gpu("GB200", r"\bGB200\b", _half(2500.0, tf32=1250.0, fp8=5000.0), _BLACKWELL),
    Gpu("B200", r"\bB200\b", _half(2250.0, tf32=1125.0, fp8=4500.0), _BLACKWELL),
    Gpu("MI250X", r"\bMI250X\b", _half(383.0), "AMD Instinct MI250X data sheet"),
    Gpu("MI300X", r"\bMI300X\b", _half(1307.4, fp8=2614.9, fp32=163.4), _AMD_CDNA3),
    Gpu("MI325X", r"\bMI325X\b", _half(1307.4, fp8=2614.9, fp32=163.4), _AMD_CDNA3),
    Gpu("MI350X", r"\bMI350X\b", _half(2306.9, fp8=4613.7), _AMD_CDNA4),
    Gpu("MI355X", r"\bMI355X\b", _half(2516.6, fp8=5033.2), _AMD_CDNA4),
)


def find_gpu(name: str | None) -> Gpu | None:
    """The card that `name` means, or None when it means none or more than one."""
    if not name:
        return None
    return next((g for g in GPUS if re.search(g.pattern, name, re.IGNORECASE)), None)


def peak_tflops(name: str | None, precision: str | None) -> float | None:
    """Dense peak in TFLOP/s of one card at `precision` (fp32, tf32, fp16, bf16, fp8), or None."""
    gpu = find_gpu(name)
    return gpu.peaks.get((precision or "").lower()) if gpu else None


def mfu(
    tflops: float | None, gpu: str | None, precision: str | None, convention: str
) -> tuple[float | None, str]:
    """(model FLOPs utilisation in 0..1, "") or (None, why there is none).

    Chowdhery et al. 2022 (PaLM), section 4.1: observed throughput of model FLOPs over the peak.
    More than the peak is not a utilisation but an error, and is said in words.
    """
    if tflops is None:
        return None, ""
    peak = peak_tflops(gpu, precision)
    if peak is None:
        return None, f"no peak known for {gpu or 'this machine'} at {precision or 'its precision'}"
    if tflops > peak:
        return None, f"{tflops:.1f} TFLOP/s is above the peak of {peak:g} ({find_gpu(gpu).name})"
    if convention not in MODEL_FLOPS:
        return None, f"the {convention} convention counts recomputation: no MFU"
    return tflops / peak, ""


@dataclass(frozen=True)
class Links:
    """Bytes per second of one card's memory, its links to the others of a node, and its share of
    the node's network; bytes of memory. All from the maker's sheet, one direction."""

    memory_rate: float
    link: float
    network: float
    memory_gb: float
    mesh: bool = False


# The same sheets as the peaks above. Network: of the maker's own reference node (DGX), per GPU.
LINKS = {
    "T4": Links(320e9, 12e9, 3e9, 16),
    "P100 SXM2": Links(732e9, 80e9, 6e9, 16, mesh=True),
    "V100 SXM2": Links(900e9, 150e9, 6.25e9, 32, mesh=True),
    "V100S PCIe": Links(1134e9, 12e9, 6.25e9, 32),
    "V100 PCIe": Links(900e9, 12e9, 6.25e9, 32),
    "A100": Links(2039e9, 300e9, 25e9, 80),
    "A800": Links(2039e9, 200e9, 25e9, 80),
    "A10": Links(600e9, 24e9, 6e9, 24),
    "A40": Links(696e9, 24e9, 6e9, 48),
    "H100 PCIe": Links(2000e9, 48e9, 50e9, 80),
    "H100 NVL": Links(3900e9, 48e9, 50e9, 94),
    "H100 SXM": Links(3350e9, 450e9, 50e9, 80),
    "H200 NVL": Links(4800e9, 450e9, 50e9, 141),
    "H200": Links(4800e9, 450e9, 50e9, 141),
    "L4": Links(300e9, 24e9, 3e9, 24),
    "L40S": Links(864e9, 24e9, 6e9, 48),
    "GB200": Links(8000e9, 900e9, 50e9, 186),
    "B200": Links(8000e9, 900e9, 50e9, 180),
    "MI250X": Links(3277e9, 150e9, 25e9, 128),
    "MI300X": Links(5300e9, 448e9, 50e9, 192, mesh=True),  # seven links, one to each other card
    "MI325X": Links(6000e9, 448e9, 50e9, 256, mesh=True),
    "MI350X": Links(8000e9, 538e9, 50e9, 288, mesh=True),
    "MI355X": Links(8000e9, 538e9, 50e9, 288, mesh=True),
}
# A bare name in a published table nearly always means the card of the maker's own servers.
USUAL = {"V100": "V100 SXM2", "H100": "H100 SXM", "A100": "A100", "P100": "P100 SXM2"}
GBITS = {"EDR": 100, "HDR": 200, "NDR": 400, "Omni-Path": 100, "OPA": 100}


def planning_gpu(name: str | None) -> Gpu:
    """The card to plan with: as `find_gpu`, but a bare V100 or H100 is the SXM one.

    Raises:
        UsageError: no such card, with the known ones.
    """
    known = ", ".join(g.name for g in GPUS)
    if not name:
        raise UsageError(f"no GPU type; known: {known}")
    bare = re.match(r"\s*(?:NVIDIA\s+)?([A-Z]+\d+[A-Z]?)", name, re.IGNORECASE)
    usual = USUAL.get(bare[1].upper(), "") if bare else ""
    found = find_gpu(name) or next((g for g in GPUS if g.name == usual), None)
    if found is None:
        raise UsageError(f"unknown GPU {name!r}; known: {known}")
    return found


# "4 x 100 Gb/s", "4 EFA x 100 Gb/s", "4 NICs of 100 Gb/s" or "100 Gb/s x 4".
_RATE = re.compile(
    r"(?:(\d+)\s*(?:(?:[A-Za-z-]+\s+){0,2}[x×*]|(?:links?|ports?|rails?|NICs?|HCAs?)\s+of)\s*)?"
    r"(\d+(?:\.\d+)?)\s*([GT])b(?:ps|it/s|/s)(?:\s*[x×*]\s*(\d+))?"
)
_LINKS = r"(EDR|HDR|NDR|Omni-Path|OPA)(\d{3})?\b"
_COUNTED = re.compile(rf"\b(\d+)\s*[x×*]?\s*{_LINKS}")
_NAMED = re.compile(rf"\b{_LINKS}(?:\W+(\d+)\s*[x×*]?\s*(?:links?|ports?|rails?|NICs?|HCAs?)\b)?")
_PER_GPU = re.compile(r"[^,;()]{0,30}(?:per|a|/)\s*(?:GPU|card|accelerator)\b", re.IGNORECASE)
_PER_NODE = re.compile(r"[^,;()]{0,30}(?:per|a|/)\s*(?:node|server|host)\b", re.IGNORECASE)


def network_rate(cluster: str | None, gpus_per_node: float | None = None) -> float | None:
    """Bytes/s of a node's network from a description that states it, else None.

    "800 Gbps InfiniBand per node", "4 x 100 Gb/s", "400 Gb/s RDMA per GPU" (of `gpus_per_node`),
    "8x HDR InfiniBand per node", "2x HDR100", "4 Omni-Path links/node", "Omni-Path, 4 links/node".
    """
    text = cluster or ""
    counted, named = _COUNTED.search(text), _NAMED.search(text)
    if found := _RATE.search(text):
        before, rate, unit, after = found.groups()
        count, rest = before or after, text[found.end() :]
        gbits = float(rate) * (1000 if unit == "T" else 1) * int(count or 1)
        if _PER_GPU.match(rest):
            return gbits / 8 * 1e9 * gpus_per_node if gpus_per_node else None
        if count or not counted or _PER_NODE.match(rest):
            return gbits / 8 * 1e9  # else the rate is one of the counted links'
    if counted:
        return int(counted[1]) * float(counted[3] or GBITS[counted[2]]) / 8 * 1e9
    if named:
        return int(named[3] or 1) * float(named[2] or GBITS[named[1]]) / 8 * 1e9
    return None
