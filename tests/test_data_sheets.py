"""The table of cards against what its numbers are made of: units, clocks, buses, lanes."""

from dataclasses import replace

import pytest

from analysis import tflops
from analysis.planner.calibration import from_data_sheet
from base.errors import UsageError
from models.gpus import GPUS, MODEL_FLOPS, find_gpu, joined, mfu, peak_tflops, planning_gpu

# From the makers' architecture papers and data sheets, of what a rank has (of MI250X and Max 1550
# one of a card's two chips): units; FLOPs of a unit and clock and boost clock in GHz, in 16 bit and
# in 32 bit without tensor cores; bits of the memory's bus, Gb/s of a pin, GB before what is spared
# and reserved; links to other cards (NVLink 1 to 5, xGMI), GB/s of one in one direction. "-": not
# in the papers, or none.
CARDS = """
card       | units | FLOPs |   GHz | FLOPs32 | GHz32 |  bus |   pin |  GB | links | GB/s
T4         |    40 |  1024 |  1.59 |     128 |  1.59 |  256 |    10 |  16 |     - |    -
P100 SXM2  |    56 |   256 |  1.48 |     128 |  1.48 | 4096 |  1.43 |  16 |     4 |   20
V100 SXM2  |    80 |  1024 |  1.53 |     128 |  1.53 | 4096 | 1.756 |  32 |     6 |   25
V100S PCIe |    80 |  1024 | 1.597 |     128 | 1.597 | 4096 | 2.214 |  32 |     - |    -
V100 PCIe  |    80 |  1024 |  1.38 |     128 |  1.38 | 4096 | 1.756 |  32 |     - |    -
A100       |   108 |  2048 |  1.41 |     128 |  1.41 | 5120 | 3.186 |  80 |    12 |   25
A100 PCIe  |   108 |  2048 |  1.41 |     128 |  1.41 | 5120 | 3.024 |  80 |     - |    -
A800       |   108 |  2048 |  1.41 |     128 |  1.41 | 5120 | 3.186 |  80 |     8 |   25
A10        |    72 |  1024 | 1.695 |     256 | 1.695 |  384 |  12.5 |  24 |     - |    -
A40        |    84 |  1024 |  1.74 |     256 |  1.74 |  384 |  14.5 |  48 |     - |    -
H100 PCIe  |   114 |  4096 |  1.62 |     256 | 1.755 | 5120 |   3.2 |  80 |     - |    -
H100 NVL   |     - |     - |     - |       - |     - | 6144 |   5.1 |  96 |     - |    -
H100 SXM   |   132 |  4096 |  1.83 |     256 |  1.98 | 5120 |  5.23 |  80 |    18 |   25
H800       |   132 |  4096 |  1.83 |     256 |  1.98 | 5120 |  5.23 |  80 |     8 |   25
H200 NVL   |     - |     - |     - |       - |     - | 6144 |  6.25 | 144 |    18 |   25
H200       |   132 |  4096 |  1.83 |     256 |  1.98 | 6144 |  6.25 | 144 |    18 |   25
H20        |     - |     - |     - |       - |     - | 6144 |  5.21 |  96 |    18 |   25
RTX PRO 6000 Max-Q | 188 | 1024 | 2.28 |   256 |  2.28 |  512 |    28 |  96 |     - |    -
RTX PRO 6000 | 188 |  1024 | 2.617 |     256 | 2.617 |  512 |    28 |  96 |     - |    -
RTX 3090   |    82 |   512 | 1.695 |     256 | 1.695 |  384 |  19.5 |  24 |     - |    -
RTX A6000  |    84 |  1024 |   1.8 |     256 |   1.8 |  384 |    16 |  48 |     - |    -
RTX 6000 Ada |  142 |  1024 | 2.505 |     256 | 2.505 |  384 |    20 |  48 |     - |    -
RTX 4090   |   128 |   512 |  2.52 |     256 |  2.52 |  384 |    21 |  24 |     - |    -
RTX 5090   |   170 |   512 | 2.407 |     256 | 2.407 |  512 |    28 |  32 |     - |    -
L4         |    58 |  1024 |  2.04 |     256 |  2.04 |  192 |  12.5 |  24 |     - |    -
L40S       |   142 |     - |     - |     256 |  2.52 |  384 |    18 |  48 |     - |    -
GB200      |     - |     - |     - |       - |     - | 8192 |     8 | 192 |    18 |   50
B200       |     - |     - |     - |       - |     - | 8192 |     8 | 192 |    18 |   50
GB300      |     - |     - |     - |       - |     - | 8192 |     8 | 288 |    18 |   50
B300       |     - |     - |     - |       - |     - | 8192 |     8 | 288 |    18 |   50
MI300A     |   228 |  2048 |   2.1 |     256 |   2.1 | 8192 |   5.2 | 128 |     6 |   64
Max 1550   |    64 |  4096 |   1.6 |     256 |   1.6 | 4096 |   3.2 |  64 |     8 | 26.5
Gaudi 2    |     - |     - |     - |       - |     - | 6144 |  3.27 |  96 |    21 | 12.5
Gaudi 3    |     - |     - |     - |       - |     - | 8192 |   3.6 | 128 |    21 |   25
MI250X     |   110 |  1024 |   1.7 |       - |     - | 4096 |   3.2 |  64 |     3 |   50
MI300X     |   304 |  2048 |   2.1 |     256 |   2.1 | 8192 |   5.2 | 192 |     7 |   64
MI325X     |   304 |  2048 |   2.1 |     256 |   2.1 | 8192 |     6 | 256 |     7 |   64
MI350X     |   256 |  4096 |   2.2 |       - |     - | 8192 |     8 | 288 |     7 | 76.8
MI355X     |   256 |  4096 |   2.4 |       - |     - | 8192 |     8 | 288 |     7 | 76.8
"""
HEADS, *ROWS = [[cell.strip() for cell in row.split("|")] for row in CARDS.strip().splitlines()]


def parts(*columns: str) -> dict[str, list[float]]:
    """card -> these of its numbers, of the cards that have them."""
    places = [HEADS.index(column) for column in columns]
    known = {row[0]: [row[place] for place in places] for row in ROWS}
    return {card: list(map(float, n)) for card, n in known.items() if "-" not in n}


TENSOR, VECTOR = parts("units", "FLOPs", "GHz"), parts("units", "FLOPs32", "GHz32")
MEMORY, WIRES = parts("bus", "pin", "GB"), parts("links", "GB/s")
# The generation of the PCI Express that the others share: 16 lanes, of which three quarters arrive.
PCIE = {"T4": 3, "V100S PCIe": 3, "V100 PCIe": 3, "A10": 4, "A40": 4, "L4": 4, "L40S": 4}
PCIE |= dict.fromkeys(("H100 PCIe", "H100 NVL", "RTX PRO 6000", "RTX PRO 6000 Max-Q"), 5)
PCIE |= {"RTX 4090": 4, "RTX 5090": 5, "RTX 3090": 4, "RTX A6000": 4, "RTX 6000 Ada": 4}
PCIE["A100 PCIe"] = 4
# Gb/s of all InfiniBand ports of the maker's node of eight
DGX = {"V100 SXM2": 4 * 100, "A100": 8 * 200, "H100 SXM": 8 * 400, "H200": 8 * 400, "B200": 8 * 400}
DGX |= {"B300": 8 * 800, "Gaudi 2": 8 * 3 * 100, "Gaudi 3": 8 * 3 * 200}


def test_peaks_are_what_units_and_clock_make_of_them():
    for name, (units, per_clock, ghz) in TENSOR.items():
        rounded_down = name in ("V100 PCIe", "V100S PCIe")  # their sheet's 112 and 130
        made = pytest.approx(units * per_clock * ghz / 1e3, abs=1.1 if rounded_down else 0.5)
        for precision in {"fp16", "bf16"} & set(planning_gpu(name).peaks):
            assert peak_tflops(name, precision) == made, name
    for name, (units, per_clock, ghz) in VECTOR.items():
        made = units * per_clock * ghz / 1e3
        assert peak_tflops(name, "fp32") == pytest.approx(made, rel=0.012), name


def test_tf32_is_half_and_fp8_twice_of_bf16_and_bf16_is_fp16():
    for gpu in GPUS:
        assert gpu.source and find_gpu(gpu.name) is gpu
        half = gpu.peaks["fp16"]
        assert gpu.peaks.get("bf16", half) == half
        rounded = 10.0 if gpu.name == "L40S" else 0.0  # its sheet's 362 is of another clock
        assert gpu.peaks.get("tf32", half / 2) == pytest.approx(half / 2, abs=0.6 + rounded)
        eight = half if gpu.name == "Gaudi 3" else half * 2  # its engine is as fast in both
        assert gpu.peaks.get("fp8", eight) == pytest.approx(eight, abs=1.05 + rounded)
        # Blackwell Ultra's is half as fast again; of GeForce all others are halved, in 32-bit sums.
        four = half * (6 if "B300" in gpu.name else 8 if gpu.name == "RTX 5090" else 4)
        assert gpu.peaks.get("fp4", four) == pytest.approx(four, abs=0.5)
    twins = ("A100", "A800"), ("H200", "H100 SXM"), ("H200 NVL", "H100 NVL"), ("MI300X", "MI325X")
    for one, other in twins:  # the same chip
        for precision, peak in planning_gpu(one).peaks.items():
            assert planning_gpu(other).peaks[precision] == pytest.approx(peak, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("RTX5090", "RTX 5090"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5090 D", None),
    ],
)
def test_a_laptops_card_and_one_that_is_cut_down_are_other_cards(name, card):
    found = find_gpu(name)
    assert (found and found.name) == card


def test_memory_is_as_fast_as_its_bus_and_no_larger_than_its_chips():
    for name, (bits, gbits, gigabytes) in MEMORY.items():
        card = planning_gpu(name)
        assert card.memory_rate == pytest.approx(bits * gbits / 8 * 1e9, rel=0.025), name
        assert 0.93 * gigabytes <= card.memory_gb <= gigabytes, name


def test_links_are_as_fast_as_their_lanes():
    for name, (links, gigabytes) in WIRES.items():
        assert planning_gpu(name).link == pytest.approx(links * gigabytes * 1e9, rel=0.002)
    for name, generation in PCIE.items():
        made = 0.75 * 2 ** (generation + 1) * 1e9
        assert planning_gpu(name).link == pytest.approx(made, rel=0.05)
    for name, gbits in DGX.items():
        assert planning_gpu(name).network == pytest.approx(gbits / 8 / 8 * 1e9)
    meshes = {gpu.name for gpu in GPUS if gpu.mesh}
    amd = {"MI300X", "MI300A", "MI325X", "MI350X", "MI355X"}
    assert meshes == amd | {"P100 SXM2", "V100 SXM2", "Max 1550", "Gaudi 2", "Gaudi 3"}
    assert {gpu.name for gpu in GPUS} == set(MEMORY)


def test_a_rank_has_one_chip_of_a_card_of_two(rows_of, shared):
    """Eight ranks a node of four MI250X (12 of six Max 1550), as the public logs of Frontier."""
    log = shared / "cases" / "stopped-128.log"
    for card, peak in (("MI250X", 191.5), ("Max 1550", 419.4)):
        (row,) = rows_of(tflops.main, log, "--gpu-type", card)
        assert row["tflops"] == pytest.approx(49.7, abs=0.05)
        assert row["mfu"] == pytest.approx(49.7 / peak, rel=1e-3)
        assert from_data_sheet(card).gpu_memory_gb == 64


def test_a_bare_name_is_the_makers_servers_card_to_plan_with_but_has_no_peak():
    for name, card in (("V100", "V100 SXM2"), ("NVIDIA H100", "H100 SXM"), ("p100", "P100 SXM2")):
        assert planning_gpu(name).name == card
        assert find_gpu(name) is None and peak_tflops(name, "fp16") is None
    assert planning_gpu("Tesla V100-PCIE-32GB").name == "V100 PCIe"
    for name, words in (("X9000", "unknown GPU 'X9000'; known: T4"), (None, "no GPU type; known")):
        with pytest.raises(UsageError, match=words):
            planning_gpu(name)


def test_mfu_says_why_there_is_none():
    assert mfu(None, "A100", "bf16", "palm") == (None, "")
    assert mfu(312.0, "A100", "BF16", "megatron") == (1.0, "")
    assert "above the peak of 312" in mfu(400.0, "A100", "bf16", "palm")[1]
    assert "recomputation" in mfu(156.0, "A100", "bf16", "seed")[1]
    assert mfu(1.0, None, None, "6n")[1] == "no peak known for this machine at its precision"
    assert mfu(1.0, "V100-SXM2", "bf16", "6n")[1] == "no peak known for V100-SXM2 at bf16"
    assert peak_tflops("A100", None) is None
    assert set(MODEL_FLOPS) == {"megatron", "megatron-full", "palm", "6n"}


def test_links_of_a_rack_join_more_than_a_node():
    """GB200 NVL72: 18 nodes of 4; tp 8 is inside, and the network is that of the 72."""
    assert {gpu.name: gpu.domain for gpu in GPUS if gpu.domain} == {"GB200": 72, "GB300": 72}
    assert joined("NVIDIA GB200", 4) == 72 and joined("H100 SXM", 8) == joined("", 8) == 8
    rack = from_data_sheet("GB200", 4)
    assert rack.joined == 72 and rack.machine().network == 72 * 50e9
    assert "1600 Gb/s a node" in rack.network_note()[0]
    assert replace(rack, domain=36).joined == 36
    assert replace(rack, network="400 Gb/s").machine().network == 18 * 50e9


@pytest.mark.parametrize(
    ("name", "gb"),
    [
        ("NVIDIA A100-SXM4-40GB", 40),
        ("A100_80GB", 80),
        ("A100 40 GiB", 40),
        ("Tesla V100-SXM2-16GB", 16),
        ("V100-SXM3-32GB", 32),
        ("V100 32G", 32),
        ("NVIDIA H100 80GB HBM3", 80),
        ("GB200", 186),
        ("NVIDIA GH200 480GB", 80),  # of its CPU
        ("A100", "A100 has 40 or 80 GB, 'A100' states none: name it as 'A100 40GB'"),
        ("V100-SXM2", "has 16 or 32 GB"),
        ("A100-64GB", "states 64"),
        ("B200 192GB", "B200 has 180 GB, 'B200 192GB' states 192"),
    ],
)
def test_memory_is_of_the_name_or_is_asked_for_where_a_card_has_several_sizes(name, gb):
    if isinstance(gb, int):
        assert from_data_sheet(name).gpu_memory_gb == gb
    else:
        with pytest.raises(UsageError, match=gb):
            from_data_sheet(name)
        assert from_data_sheet(name, memory_gb=64).gpu_memory_gb == 64
