"""Peaks of GPUs, each from its maker's own sheet, and MFU. A GPU that is not here has none.

Peaks are dense matrix (tensor-core) TFLOP/s with 32-bit accumulation where the sheet tells them
apart, never with sparsity. A name must identify one card: "H100" alone is an SXM (989) or a PCIe
(756) one, so it has no peak.
"""

import re
from dataclasses import dataclass

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
