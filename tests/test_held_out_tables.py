"""The audit reads tables of forms that it was not made for, and finds what contradicts itself."""

import pytest

from analysis.published.audit import audit_document
from analysis.published.headings import meaning
from benchmarks.held_out_tables import FORMS, main, make


def kinds(text: str) -> list[tuple[int, str]]:
    return [(finding.line, finding.kind) for finding in audit_document(text, "page.md")]


def table(heading: str, *rows: str, before: str = "") -> str:
    cells = [
        f"| {row} |" for row in (heading, " | ".join("---" for _ in heading.split("|")), *rows)
    ]
    return before + "\n".join(cells) + "\n"


@pytest.mark.parametrize(
    ("heading", "name", "scale", "of"),
    [
        ("Throughput (T/s)", "tokens_per_s", 1, ""),
        ("Throughput (T/s/GPU)", "tokens_per_s", 1, "gpu"),
        ("Throughput (S/s)", "samples_per_s", 1, ""),
        ("Tokens/day", "tokens_per_s", 1 / 86400, ""),
        ("elapsed (ms)", "step_s", 0.001, ""),
        ("Scaling eff.", "efficiency", 1, ""),
        ("Train batch size", "global_batch", 1, ""),
        ("GPUs (H100)", "gpus", 1, ""),
        ("H100s", "gpus", 1, ""),
        ("Percentage of theoretical peak FLOP/s", "mfu", 0.01, ""),
        ("% of peak", "mfu", 0.01, ""),
    ],
)
def test_a_heading_in_a_publishers_words_is_known(heading, name, scale, of):
    what = meaning(heading)
    assert (what.name, what.scale, what.of) == (name, pytest.approx(scale), of)


@pytest.mark.parametrize("heading", ["Theoretical peak FLOP/s", "Elapsed time", "Eval batch size"])
def test_a_heading_that_says_something_else_is_not_taken(heading):
    what = meaning(heading)
    assert what is None or what.name not in ("mfu", "step_s", "global_batch", "tflops")


def test_a_rate_of_one_gpu_beside_that_of_all_is_checked():
    heading = "GPUs | tokens/s | tokens/s/GPU"
    rows = ["8 | 40,474 | 5059", "16 | 79,256 | 4953", "32 | 154,240 | 4820"]
    assert kinds(table(heading, *rows)) == []
    assert kinds(table(heading, *rows[:2], "32 | 154,240 | 8420")) == [(5, "rate")]


def test_rows_show_the_sequence_that_no_column_states():
    heading = "GPUs | Global batch | Tokens/s | Step (s)"
    rows = ["8 | 64 | 131,072 | 2.00", "16 | 128 | 209,715 | 2.50", "32 | 256 | 262,144 | 4.00"]
    assert kinds(table(heading, *rows)) == []
    assert kinds(table(heading, *rows, "64 | 512 | 524,288 | 4.90")) == [(6, "rate")]
    # Two rows of four agree on nothing.
    assert (
        kinds(table(heading, *rows[:2], "32 | 256 | 262,144 | 9.1", "64 | 512 | 5,288 | 4")) != []
    )


def test_tflops_over_mfu_is_one_peak_without_a_card():
    heading = "TFLOPS/GPU | MFU(%)"
    rows = ["408.1 | 41.24", "422.6 | 42.71", "420.2 | 42.47"]
    assert kinds(table(heading, *rows)) == []
    assert kinds(table(heading, *rows, "395.6 | 52.30")) == [(6, "mfu")]
    assert kinds(table(heading, rows[0], "395.6 | 52.30")) == []  # which one is wrong?


def test_flops_of_all_gpus_are_those_of_one_times_the_gpus():
    heading = "GPUs | Achieved teraFLOP/s per GPU | Achieved aggregate petaFLOP/s"
    rows = ["32 | 156 | 5.0", "64 | 154 | 9.8", "256 | 156 | 40.0"]
    assert kinds(table(heading, *rows)) == []
    assert kinds(table(heading, *rows, "768 | 137 | 150.5")) == [(6, "tflops")]


def test_a_percentage_of_peak_is_no_bound():
    heading = "Achieved teraFLOP/s per GPU | Percentage of theoretical peak FLOP/s"
    assert kinds(table(heading, "156 | 50%", "154 | 49%", "137 | 44%")) == []


def test_shards_are_data_parallel_and_the_heading_states_the_gpus():
    before = "### Llama on 16 H100 GPUs\n\n"
    rows = ["FSDP 16 | 32", "FSDP 8, TP 2 | 32", "FSDP 4, TP 4 | 32", "FSDP 2, TP 8 | 64"]
    heading = "Parallelism | Global batch size"
    assert kinds(table(heading, *rows, before=before)) == []
    assert kinds(table(heading, *rows[:3], "FSDP 4, TP 8 | 64", before=before)) == [(8, "gpus")]


def test_nodes_times_cards_are_the_gpus():
    heading = "Cluster | tokens/s | tokens/s/GPU"
    rows = ["1x8 H100 | 40,474 | 5059", "2 nodes × 8 H100-80GB | 79,256 | 4953"]
    assert kinds(table(heading, *rows)) == []
    assert kinds(table(heading, *rows, "8x8 H100 | 154,240 | 4820")) == [(5, "rate")]


def test_model_parallel_is_tensor_parallel_where_it_makes_the_gpus():
    heading = "GPUs | MP | PP | DP"
    rows = ["16 | 4 | 2 | 2", "32 | 2 | 4 | 4", "64 | 8 | 1 | 8"]
    assert kinds(table(heading, *rows)) == []
    assert kinds(table(heading, *rows, "64 | 4 | 2 | 4")) == [(6, "gpus")]
    both = ["16 | 8 | 2 | 2", "32 | 8 | 4 | 4", "64 | 8 | 1 | 8", "64 | 16 | 2 | 4"]  # tp x pp
    assert kinds(table(heading, *both)) == []


def test_data_parallel_runs_multiply_out_without_a_layout():
    heading = "GPUs | MicroBatchSize | GradAccum | GlobalBatchSize"
    rows = ["8 | 8 | 4 | 256", "64 | 8 | 2 | 1024", "32 | 2 | 8 | 512"]
    assert kinds(table(heading, *rows)) == []
    assert kinds(table(heading, *rows, "64 | 1 | 32 | 512")) == [(6, "batch")]


def test_an_efficiency_without_speedups_follows_from_the_rates():
    heading = "GPUs | tokens/s/GPU | Efficiency (%)"
    rows = ["8 | 5059 | 100.0", "16 | 4953 | 97.9", "32 | 4820 | 95.3"]
    assert kinds(table(heading, *rows)) == []
    assert kinds(table(heading, *rows, "64 | 4406 | 95.1")) == [(6, "efficiency")]


def test_a_time_of_nothing_is_another_unit():
    heading = "GPUs | Step (s) | tokens/s"
    rows = ["8 | 2.10 | 40,474", "16 | 2.15 | 79,256", "32 | 0.00 | 154,240"]
    assert (5, "unit") in kinds(table(heading, *rows))
    assert (5, "unit") not in kinds(table(heading, *rows[:2], "32 | 0.00 | 0"))  # it did not run


def test_a_rate_of_nothing_ends_no_audit():
    heading = "GPUs | Global batch | Seq | Step (s) | tokens/s"
    assert isinstance(
        kinds(table(heading, "8 | 64 | 2048 | 2.1 | 0", "16 | 64 | 2048 | 2 | 0")), list
    )


def test_most_planted_errors_are_found_and_no_clean_table_has_a_finding(capsys):
    assert main(["--seeds", "1", "--seed", "7"]) == 0
    last = capsys.readouterr().out.splitlines()[-2]
    assert "clean tables with a finding: 0 of 18" in last
    assert float(last.split()[1].rstrip("%,")) >= 93


def test_a_made_table_is_the_same_each_time():
    assert all(make(form, 3).text() == make(form, 3).text() for form in FORMS)


def test_a_tuple_of_sizes_is_a_layout():
    heading = "GPUs | (dp, tp, pp)"
    rows = ["16 | (2, 4, 2)", "32 | (4, 4, 2)", "64 | 8/8/1"]
    assert kinds(table(heading, *rows)) == []
    assert kinds(table(heading, *rows, "64 | (4, 8, 4)")) == [(6, "gpus")]


def test_steps_a_second_are_the_time_of_a_step():
    heading = "GPUs | Global batch | train_steps_per_second | train_samples_per_second"
    rows = ["8 | 256 | 0.1097 | 28.08", "16 | 256 | 0.1644 | 42.09"]
    assert kinds(table(heading, *rows)) == []
    assert kinds(table(heading, *rows, "32 | 256 | 0.4288 | 190.7")) == [(5, "rate")]


def test_rows_show_the_tokens_of_a_step_where_no_batch_is_stated():
    heading = "Setting | tokens/sec | sec/step"
    rows = ["baseline | 37,750 | 27.78", "flash | 44,028 | 23.82", "fused | 49,698 | 21.10"]
    assert kinds(table(heading, *rows)) == []
    assert kinds(table(heading, *rows, "overlap | 65,207 | 18.66")) == [(6, "rate")]
    rows = ["a | 37,750 | 27.78", "b | 4,028 | 23.82", "c | 9,698 | 21.10"]  # batches of their own
    assert kinds(table(heading, *rows)) == []


def test_the_batch_of_a_device_is_no_global_batch():
    assert meaning("per_device_train_batch_size").name == "micro_batch"
    assert meaning("batch_size (sequences)").name == "batch"
