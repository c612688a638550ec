"""Published numbers follow from published facts under the convention that each was made with. Those
that logs/published/*.md show are checked as they stand there: test_reports_cannot_drift.py."""

import re

import pytest

from analysis.logs.published_csv import read_csv
from analysis.runs.scaling_curve import karp_flatt
from benchmarks import published_tables
from models.config import PRESETS, GPTConfig
from models.flops import CONVENTIONS


def test_sc21_table_2s_days_follow_from_equation_3():
    rows = read_csv(published_tables.FOLDER / "narayanan_sc21_table2.csv").rows
    assert len(rows) == 12
    for row in rows:
        shape = [int(row.number(k)) for k in ("layers", "hidden", "heads")]
        config = GPTConfig(*shape, vocab_size=51200, max_seq_len=2048)
        tflops, gpus = row.number("tflops"), row.number("gpus")
        days = 300e9 * CONVENTIONS["sc21"](config, 2048, True) / (tflops * 1e12 * gpus) / 86400
        published = float(re.search(r"300B tokens (\d+) days", row.text("notes"))[1])
        # TFLOP/s are printed to 1, which is worth about a day where they are low
        assert abs(days - published) <= 0.5 + days * 0.5 / tflops, row


def test_sc21_table_1s_aggregates_are_its_tflops_times_its_gpus():
    rows = read_csv(published_tables.FOLDER / "narayanan_sc21_table1.csv").rows
    presets = [c for name, c in PRESETS.items() if c.vocab_size == 51200 and name != "175b"]
    assert len(rows) == len(presets) == 10
    for row, config in zip(rows, presets, strict=True):
        petaflops = float(re.search(r"([\d.]+) aggregate", row.text("notes"))[1])
        tflops, gpus = row.number("tflops"), row.number("gpus")
        # Both printed: the product agrees to the rounding of either.
        assert abs(tflops * gpus / 1000 - petaflops) <= 0.5 * gpus / 1000 + 0.05
        assert (row.number("layers"), row.number("hidden")) == (config.n_layer, config.hidden)


def test_karp_flatt_by_hand_and_where_it_is_a_share():
    for faster, share in ((4, 0), (3, 1 / 9), (2, 1 / 3), (1, 1), (4.1, None), (0.9, None)):
        assert published_tables.serial_share(faster, 4) == pytest.approx(share)
    assert published_tables.serial_share(4.0, 1) is karp_flatt(1.0, 1) is None
