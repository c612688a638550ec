"""A printed MFU says which peak it is over, and is restated over the card's dense bf16 peak."""

import math
import tomllib

import pytest

from analysis import audit, compare, expect, tflops
from base.intervals import Interval
from models.gpus import bf16_peak, find_gpu
from models.mfu_peaks import known_peaks, printed_mfu
from tests.conftest import ROOT

TABLE = tomllib.loads((ROOT / "models" / "mfu_peaks.toml").read_text())
PEAKS = [peak for peak in known_peaks() if peak.program]

# Public reports of a wrong denominator: where, program, card, printed MFU in %, TFLOP/s of a GPU,
# the peak that it is over, words of the sentence, the right MFU in %. Where the report prints no
# pair of numbers, they are of a run at 40 % (H20, MI325X, MI300X: of the right peak).
TITAN, PRIME = "pytorch/torchtitan", "PrimeIntellect-ai/prime-rl"
FALLBACK = "fallback for a card that it does not know"
REPORTS = [
    (f"{TITAN}#4779", "torchtitan", "MI350X", "152", "474", 312, f"torchtitan's {FALLBACK}", 20.6),
    (f"{TITAN}#2307", "torchtitan", "H20", "18.97", "59.20", 312, FALLBACK, 40.0),
    (f"{TITAN}#1393", "torchtitan", "B200", "20.00", "900.00", 4500, "with sparsity", 40.0),
    (
        f"{PRIME}#1722",
        "prime-rl",
        "MI325X",
        "167.62",
        "522.96",
        312,
        f"prime-rl's {FALLBACK}",
        40.0,
    ),
    (f"{PRIME}#3168", "prime-rl", "B300", "288.5", "900.0", 312, f"prime-rl's {FALLBACK}", 40.0),
    (f"{PRIME}#3168", "prime-rl", "GB200", "44.44", "1000.0", 2250, "took a GB200 for", 40.0),
    ("allenai/OLMo-core#614", "OLMo-core", "A100", "80.00", "124.80", 156, "halved", 40.0),
    ("allenai/OLMo-core#817", "OLMo-core", "B300", "88.32", "275.6", 312, FALLBACK, 12.25),
    ("ByteDance-Seed/VeOmni#986", "VeOmni", "GB200", "38.99", "1000.0", 2565, "2.062 GHz", 40.0),
    ("ByteDance-Seed/VeOmni#986", "VeOmni", "B200", "37.78", "900.0", 2382, "1.965 GHz", 40.0),
    ("marin-community/marin#7334", "Levanter", "GB200", "44.44", "1000.0", 2250, "took a", 40.0),
    (
        "NVIDIA-NeMo/Automodel#3569",
        "NeMo AutoModel",
        "H100 SXM",
        "20.00",
        "395.80",
        1979,
        "fp8",
        40,
    ),
    ("NVIDIA-NeMo/Automodel#3569", "NeMo AutoModel", "A100", "6.306", "124.8", 1979, "fp8", 40.0),
    ("karpathy/nanochat#147", "nanochat", "A100", "23.39", "231.29", 989, "every card", 74.1),
    (
        "karpathy/autoresearch#5",
        "autoresearch",
        "A100",
        "12.61",
        "124.8",
        989.5,
        "every card",
        40.0,
    ),
    ("karpathy/nanoGPT#464", "nanoGPT", "H100 SXM", "104", "324", 312, "the A100's peak", 32.8),
    ("AMD-AGI/Primus#772", "torchtitan", "MI355X", "563", "1757", 312, FALLBACK, 69.8),
]
IDS = [f"{report[0]} {report[2]}" for report in REPORTS]


@pytest.mark.parametrize("report", REPORTS, ids=IDS)
def test_a_row_of_a_public_report_names_its_peak_and_the_right_mfu(report, tmp_path, capsys):
    _, program, card, mfu, rate, over, words, right = report
    table = tmp_path / "t.md"
    head = "| program | GPU | precision | TFLOP/s/GPU | MFU (%) |\n|---|---|---|---|---|\n"
    table.write_text(head + f"| {program} | {card} | bf16 | {rate} | {mfu} |\n")
    audit.main([str(table)])
    said = capsys.readouterr().out
    if abs(over / bf16_peak(find_gpu(card)) - 1) > 0.026:  # the audit's slack
        assert f"over {over:,} TFLOP/s, {program}'s " in said and words in said
        assert f"it is {right:.1f} %" in said or f"it is {right + 0.05:.1f} %" in said
    else:
        assert said.endswith("nothing found\n")


BATCH = ("--global-batch", "64", "--seq-len", "2048")
LINE = "step: {i}  loss:  7.9  grad_norm: 3.7  memory: 1.1GiB(9.25%)  tps: 6,9{tps:02d}"
LINE += "  tflops: {rate}  mfu: {mfu}%\n"
MESH = "Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=8, cp=1, tp=1\n"


def titan(path, mfu, rate, card="AMD Instinct MI350X", said=""):
    head = f"CUDA capacity: {card} with 287.98GiB memory\n{said}{MESH}"
    jitter = [7 * i % 40 for i in range(1, 41)]
    lines = (LINE.format(i=i, rate=rate, mfu=mfu, tps=tps) for i, tps in enumerate(jitter, 1))
    path.write_text(head + "".join(lines))
    return path


def test_a_log_says_what_its_mfu_is_over(tmp_path, rows_of):
    (row,) = rows_of(tflops.main, titan(tmp_path / "a.log", "152.00", "474.24"))
    sentence = (
        "printed MFU 152 %: over 312 TFLOP/s, torchtitan's fallback for a card that it does not"
        " know; over the MI350X's 2,306.9 it is 20.6 %"
    )
    assert sentence in row["reasons"]
    assert (row["printed_mfu"], row["mfu_peak"]) == (1.52, 312)
    assert row["restated_mfu"] == pytest.approx(474.24 / 2306.9, rel=1e-3)


def test_a_peak_that_the_program_states_counts_and_the_cards_own_is_no_note(tmp_path, rows_of):
    said = "Peak FLOPS used for computing MFU: 2.250e+15\n"
    log = titan(tmp_path / "a.log", "28.92", "650.69", "NVIDIA B200", said)
    (row,) = rows_of(tflops.main, log)
    assert "printed MFU 28.92 %: over 2,250 TFLOP/s, the B200's dense bf16 peak" in row["reasons"]
    assert row["restated_mfu"] == pytest.approx(0.2892)
    said = "Peak FLOPS used for computing MFU: 4.500e+15\n"
    (row,) = rows_of(tflops.main, titan(log, "14.46", "650.69", "NVIDIA B200", said))
    assert row["mfu_peak"] == 4500 and "torchtitan's peak of the B200 with" in row["reasons"][-1]
    log.write_text(log.read_text().replace("tflops: 650.69  ", ""))
    (row,) = rows_of(tflops.main, log)
    assert row["mfu_peak"] == 4500


def test_digits_leave_open_which_peak_it_is(tmp_path, rows_of):
    for mfu, rate, over in (
        ("0.04", "0.13", 312),
        ("0.041", "0.13", 312),
        ("4.11", "13.03", 317.0),
    ):
        (row,) = rows_of(tflops.main, titan(tmp_path / "a.log", mfu, rate))
        assert row["mfu_peak"] == pytest.approx(over, abs=0.05), mfu


def test_the_table_says_the_note_only_where_the_peak_is_not_the_cards(tmp_path, printed):
    own = printed(tflops.main, titan(tmp_path / "a.log", "28.92", "650.69", "NVIDIA B200"))
    other = printed(tflops.main, titan(tmp_path / "a.log", "152.00", "474.24"))
    assert "printed MFU" not in own and "printed MFU 152 %: over 312" in other


def test_without_a_card_the_peak_is_named_and_the_card_is_asked_for(tmp_path, rows_of):
    log = tmp_path / "a.log"
    log.write_text("".join(f"iter {i}: loss 9.3, time 95.3{i}ms, mfu 22.79%\n" for i in range(9)))
    (row,) = rows_of(tflops.main, log)
    assert (
        "nanoGPT's constant on every card, the A100's peak; its card is not" in row["reasons"][-1]
    )
    assert "restated_mfu" not in row  # as in no row of the table
    (row,) = rows_of(tflops.main, log, "--gpu-type", "H100 SXM", "--precision", "bf16")
    assert row["restated_mfu"] == pytest.approx(0.2279 * 312 / 989.4)


def test_nanochats_mfu_is_over_its_flops_per_token(tmp_path, rows_of):
    """Of karpathy/nanochat#147, eight A100, before and after its pull request."""
    line = "step {:05d}/21400 (0.02%) | loss: 8.8 | lrm: 1.00 | dt: 989.44ms | tok/sec: 529,882 |"
    line += " mfu: {} | total time: 0.00m\n"
    head = "Distributed world size: 8\nEstimated FLOPs per token: 3.491758e+09\n"
    for mfu, over in (("23.39", 989), ("74.13", 312)):
        log = tmp_path / "a.log"
        log.write_text(head + "".join(line.format(i, mfu) for i in range(9)))
        (row,) = rows_of(tflops.main, log, "--gpu-type", "A100")
        assert row["mfu_peak"] == over and row["printed_tflops"] == pytest.approx(231.3, abs=0.05)
        assert row["restated_mfu"] == pytest.approx(0.7413, abs=3e-4)


def test_ms_swift_measures_what_its_mfu_is_over(tmp_path, rows_of):
    line = (
        "{{'loss': 1.2, 'grad_norm': 0.5, 'learning_rate': 6.8e-07, 'MFU': 0.3412, 'epoch': 0.{i},"
    )
    line += (
        " 'global_step/max_steps': '{i}/9', 'elapsed_time': '{i}m 0s', 'train_speed(s/it)': 60.0}}"
    )
    log = tmp_path / "a.log"
    log.write_text("".join(line.format(i=i) + "\n" for i in range(1, 10)))
    (row,) = rows_of(tflops.main, log)
    assert (
        row["printed_mfu"] == 0.3412 and "over a rate that ms-swift measures" in row["reasons"][-1]
    )


def test_a_name_of_several_cards_means_one_of_these_and_no_other():
    """A bare H100 is an SXM, a PCIe or an NVL; torchtitan's fallback is for none of them."""
    bare = printed_mfu(0.4, Interval(988, 990), "torchtitan", "NVIDIA H100").text
    assert "torchtitan's peak of the H100 SXM; no peak of NVIDIA H100 is known" in bare
    known = printed_mfu(0.4, Interval(164.9, 165.1), "nanochat", "NVIDIA A30").text
    assert "nanochat's peak of the A30;" in known
    other = printed_mfu(0.4, Interval(311, 313), "torchtitan", "NVIDIA GeForce GTX 1660").text
    assert f"torchtitan's {FALLBACK};" in other
    silent = printed_mfu(0.4, Interval(311, 313), "torchtitan").text
    assert f"torchtitan's {FALLBACK} (or torchtitan's peak of the A100)" in silent
    sheet = printed_mfu(0.2, Interval(1978, 1980), "torchtitan", "H100 SXM").text
    assert "the H100 SXM's peak in fp8, or in bf16 with sparsity" in sheet


def test_a_program_that_prints_zero_knows_no_peak_of_its_card():
    zero = printed_mfu(0.0, None, "NeMo AutoModel", "RTX PRO 6000 Blackwell Max-Q")  # its #3598
    assert "infinity for a card that it does not know" in zero.text and "438.9" in zero.text
    assert zero.restated is None
    rounded = printed_mfu(0.0, None, "torchtitan", "B200", counted_tflops=0.01)
    assert "over an unknown peak" in rounded.text


def test_a_program_has_its_peaks_however_it_is_spelled():
    for name in ("NeMo AutoModel", "nemo_automodel", "Automodel", "NeMo-AutoModel"):
        printed = printed_mfu(0.2, None, name, "A100", counted_tflops=395.8)
        assert printed.tflops == 1979 and "NeMo AutoModel's constant" in printed.text
    assert math.isnan(printed_mfu(0.2, None, "NeMo", "A100", counted_tflops=395.8).tflops)


def test_llmc_scales_the_peak_of_a_card_of_the_same_generation():
    """756 x 528 / 456 x 1830 / 1620, and 80 x 1800 / 1860 of a card that has twice as much."""
    own = printed_mfu(0.4, Interval(988.9, 988.9), "llm.c", "H100 SXM")
    assert own.is_cards and own.restated == pytest.approx(0.4, abs=0.001)
    halved = printed_mfu(0.8, Interval(77.4, 77.45), "llm.c", "RTX A6000")
    assert "llm.c's peak of the RTX A6000 at half its rate" in halved.text
    assert halved.restated == pytest.approx(0.4, abs=0.001)


def test_runs_over_different_peaks_say_so_where_they_are_compared(tmp_path, printed):
    one, other = tmp_path / "one.log", tmp_path / "other.log"
    titan(one, "152.00", "474.24")
    titan(other, "20.56", "474.31")
    for command in (tflops.main, compare.main):
        said = printed(command, one, other, *BATCH)
        assert "printed MFUs are over different peaks" in said and "312 TFLOP/s: one" in said
    titan(other, "152.03", "474.31")
    assert "different peaks" not in printed(tflops.main, one, other)


def test_expect_says_it_too(tmp_path, printed):
    assert "over 312 TFLOP/s" in printed(expect.main, titan(tmp_path / "a.log", "152.00", "474.24"))


def test_without_a_precision_a_log_is_judged_by_its_cards_bf16_peak(tmp_path, rows_of):
    log = titan(tmp_path / "a.log", "60.00", "3000.00", "NVIDIA B200")
    above = "3000.0 TFLOP/s is above the B200's 2250 in bf16, and no precision is stated"
    (row,) = rows_of(tflops.main, log)
    assert any(above in reason for reason in row["reasons"])
    (row,) = rows_of(tflops.main, log, "--precision", "fp8")
    assert not any("is above" in reason for reason in row["reasons"])


def test_without_a_precision_a_row_is_judged_by_its_cards_bf16_peak(tmp_path, capsys):
    table = tmp_path / "t.csv"
    for rate, words in ((900, ""), (3000, "at most peak 2250 (in 16 bits, for no precision")):
        table.write_text(f"gpus,gpu_type,tflops\n8,B200,{rate}\n")
        audit.main([str(table)])
        assert words in capsys.readouterr().out
    rows = "8,X9,400,0.400\n8,X9,300,0.300\n8,X9,200,0.300\n"
    table.write_text("gpus,gpu_type,tflops,mfu\n" + rows)
    audit.main([str(table)])
    words = "in 2 of 3 rows 1002, which makes it 300.6; printed MFU 30 %: over about 668 TFLOP"
    assert words in capsys.readouterr().out
    table.write_text("gpus,gpu_type,precision,tflops\n8,B200,fp8,3000\n")
    audit.main([str(table)])
    assert "at most" not in capsys.readouterr().out


@pytest.mark.parametrize("program", TABLE)
def test_each_program_has_a_source_and_its_cards_are_named_as_ours(program):
    assert TABLE[program]["source"]
    for peak in (peak for peak in PEAKS if peak.program == program):
        assert peak.tflops > 0 and peak.why
        for name in peak.cards:
            card = find_gpu(name)
            assert card is None or card.name == name, name


def test_a_program_calls_no_other_number_a_cards_peak_than_its_dense_one():
    """Those that are more than 1 % off stand among the others, with why."""
    for peak in PEAKS:
        card = find_gpu(peak.cards[0]) if peak.why == f"peak of the {''.join(peak.cards)}" else None
        if card:
            assert peak.tflops == pytest.approx(bf16_peak(card), rel=0.01), peak


def test_without_tflops_beside_it_the_programs_peak_that_is_nearest_by_our_count_is_named(
    tmp_path, rows_of
):
    def read(mfu):
        log = titan(tmp_path / "a.log", mfu, "1.00")
        log.write_text(log.read_text().replace("tflops: 1.00  ", ""))
        (row,) = rows_of(tflops.main, log, *BATCH, "--convention", "palm", *SIZES.split())
        return row

    counted = read("50.00")["tflops"]
    # over no peak of torchtitan or of the MI350X
    assert "mfu_peak" not in read(f"{100 * counted / 600:.2f}")
    row = read(f"{100 * counted / 312 * 1.1:.2f}")  # a tenth more by its count
    assert row["mfu_peak"] == 312 and f"torchtitan's {FALLBACK}" in row["reasons"][-1]
    assert "(by our count of FLOPs)" in row["reasons"][-1]


SIZES = "--n-layer 32 --hidden 4096 --n-head 32 --ffn-hidden 14336 --activation swiglu"
SIZES += " --vocab-size 128256"
