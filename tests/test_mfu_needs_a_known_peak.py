"""MFU exists only against a peak with a source; what cannot be is an error in words."""

from models.gpus import GPUS, find_gpu, mfu, peak_tflops


def test_a_name_of_one_card_has_its_peak_and_another_none():
    assert peak_tflops("Tesla V100-SXM2-16GB", "fp16") == 125.0
    assert peak_tflops("NVIDIA H100 80GB HBM3", "bf16") == 989.4
    assert peak_tflops("NVIDIA H100 PCIe", "bf16") == 756.0
    assert peak_tflops("NVIDIA H200", "fp8") == 1978.9
    for name in ("H100", "Some GPU", "", None, "RTX A1000"):
        assert peak_tflops(name, "bf16") is None
        assert mfu(50.0, name, "bf16", "palm")[0] is None


def test_every_peak_names_its_source_and_its_own_card():
    for gpu in GPUS:
        assert gpu.source
        assert find_gpu(gpu.name) is gpu


def test_mfu_is_of_model_flops_only_and_never_above_one():
    assert mfu(156.0, "A100", "bf16", "palm") == (0.5, "")
    assert "recomputation" in mfu(156.0, "A100", "bf16", "seed")[1]
    value, why = mfu(400.0, "A100", "bf16", "palm")
    assert value is None and "above the peak of 312" in why
