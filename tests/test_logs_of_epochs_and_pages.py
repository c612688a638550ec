"""Logs that time epochs, and logs that a page quotes."""

import json

import pytest

from analysis import tflops
from analysis.logs.readers import read
from analysis.logs.record import Refusal
from tests.conftest import SHARED
from tests.test_readers import FORMATS, RUN

ALONE = """\
2024-12-10 23:07:02,646 -
Epoch 0 timing breakdown:
Total epoch time: 2233.50 seconds
Data loading time: 11.67 seconds
Training compute time: 2168.11 seconds
Training communication time: 50.93 seconds
"""
RANKS, _ = FORMATS["rank epochs"]
RANKS = RANKS.replace("Epoch 3", "Epoch 0")


@pytest.fixture
def table(tmp_path, capsys):
    """The rows of files, by name, in the table of runs; {name: text}, and flags."""

    def read_all(files, *flags):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        paths = [str(tmp_path / name) for name in files]
        assert tflops.main([*paths, *flags, "--format", "json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        return {row["run"]: row | {"said": "; ".join(row["reasons"])} for row in rows}

    return read_all


def test_an_epoch_lasts_as_long_as_its_slowest_rank(table):
    """The means over ranks would make a speedup of 2233.50 / 1095.70 = 2.04."""
    rows = table({"g1.log": ALONE, "g2.log": RANKS}, "--baseline", "g1.log")
    one, two = rows["g1.log"], rows["g2.log"]
    assert (one["gpus"], one["steady_step_s"], two["gpus"]) == (1, 2233.50, 2)
    assert two["steady_step_s"] == 1384.64 and round(two["speedup"], 2) == 1.61
    assert (two["compute_s"], two["communication_s"]) == (1335.39, 41.09)
    assert "an iteration is an epoch here" in two["said"]
    assert "1095.70 s are the mean over ranks; the slowest takes 1384.64 s" in two["said"]


def test_the_batch_of_a_step_says_nothing_of_an_epoch(table):
    (row,) = table({"g2.log": RANKS}, "--global-batch=64", "--seq-len=1024").values()
    assert row["tokens_per_s"] is None and row["samples_per_s"] is None
    assert "the log times epochs" in row["missing"]["tokens_per_s"]
    assert "the global batch of 64 is no epoch's: not used" in row["said"]


def test_epochs_that_not_all_ranks_finished_do_not_count(table):
    later = RANKS.replace("Epoch 0", "Epoch 1").replace("1384.64", "1400.00")
    cut = later.replace("Epoch 1", "Epoch 2").partition("Rank 1 -")[0]
    (row,) = table({"g2.log": RANKS + later + cut}).values()
    assert (row["steps"], row["step_s_max"], row["gpus"]) == (2, 1400, 2)
    (row,) = table({"mean.log": RANKS.partition("2024-12-11 16:14:45,135")[0]}).values()
    assert row["steady_step_s"] == 1095.7 and row["gpus"] is None
    assert "the mean over ranks is printed, not the slowest" in row["said"]


def test_a_document_of_several_runs_is_refused_with_the_lines(tmp_path):
    (tmp_path / "two.log").write_text(ALONE + ALONE.replace("2233.50", "2082.29"))
    with pytest.raises(Refusal, match="several runs: lines 2 and 8 are of one rank and epoch"):
        read(tmp_path / "two.log")
    if SHARED.exists():
        with pytest.raises(Refusal, match="copy each run to a file of its own"):
            read(next((SHARED / "seeds").glob("004_*.txt")))


def test_the_short_form_of_training_metrics_times_epochs_and_states_a_ranks_rate(table):
    """29,171,712 tokens in both; the 4 ranks print a quarter of them a second each."""
    one = {"train_time_per_epoch": [2258.7619], "train_throughput": [12914.9125]}
    four = {"train_time_per_epoch": [650.3721], "train_throughput": [11213.4701]}
    texts = [json.dumps(of | {"train_loss_per_epoch": [6.2]}) for of in (one, four)]
    rows = table({"1gpu.json": texts[0], "4gpu.json": texts[1]}, "--baseline", "1gpu.json")
    assert round(rows["4gpu.json"]["speedup"], 2) == 3.47
    assert rows["4gpu.json"]["tokens_per_s"] == pytest.approx(29_171_712 / 650.3721)
    assert rows["1gpu.json"]["tokens_per_s"] == pytest.approx(12914.9125)


PAGE = "# A report\n\nIt prints\n\n```sh\n--num-layers 9\n```\n\n~~~text\n{}~~~\n\nand then ends.\n"


def test_the_log_in_a_fenced_block_of_a_named_page_is_read(table, tmp_path, capsys):
    (quoted,) = table({"page.md": PAGE.format(RUN)}).values()
    (plain,) = table({"log.out": RUN}).values()
    assert quoted["steady_step_s"] == plain["steady_step_s"] and quoted["steps"] == 40
    assert quoted["model"] == {} and quoted["verdict"] == "end unknown"
    assert "an excerpt on a page" in quoted["said"]
    (unclosed,) = table({"end.md": f"- A step:\n\n  ```\n{RUN}"}).values()
    assert unclosed["steady_step_s"] == plain["steady_step_s"]
    assert tflops.main([str(tmp_path), "--format", "json"]) == 0  # of a folder no page is read
    assert [row["run"] for row in json.loads(capsys.readouterr().out)] == ["log.out"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (PAGE.format(RUN) * 2, "2 fenced blocks of this page hold a log, at lines 10, 62; copy"),
        (PAGE.format("nothing\n"), "no fenced block of it is a log"),
        (RUN, "no fenced block of it is a log"),
    ],
)
def test_a_page_of_several_logs_or_none_is_refused(tmp_path, text, why):
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(Refusal, match=why):
        read(tmp_path / "page.md")
