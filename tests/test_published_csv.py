"""CSV files of published measurements: one reader, one vocabulary, remarks in columns."""

import pytest

from analysis.logs.published_csv import column_name, number, read_csv


@pytest.mark.parametrize(
    ("heading", "name"),
    [
        ("seconds_per_iteration", "step_s"),
        ("step_s", "step_s"),
        ("Speed", "step_s"),
        ("epoch_s", "epoch_s"),  # seconds of an epoch
        ("Epochs", "epochs"),  # a number of them
        ("seq", "seq_len"),
        ("Wall time (s)", "wall_s"),
    ],
)
def test_a_heading_has_one_name(heading, name):
    assert column_name(heading) == name


@pytest.mark.parametrize(
    ("text", "value"),
    [("137s", 137.0), ("29,971.23", 29971.23), (".5", 0.5), ("2e-3", 0.002), ("OOM", None)]
    + [("1e999", None), ("", None)],
)
def test_a_cell_is_the_number_it_starts_with(text, value):
    assert number(text) == value


def test_remarks_of_other_peoples_tables_become_columns(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(
        "gpus,notes\n8,ID 3; LINT tp*pp*dp=32 != gpus 16; log lost\n"
        "8,first iteration after resume\n\n8,gradients in bf16; FULL_SHARD\n"
    )
    names = ("lint", "warm_up", "gradients")
    rows = read_csv(path).rows
    assert [tuple(row.text(name) for name in names) for row in rows] == [
        ("tp*pp*dp=32 != gpus 16", "", ""),
        ("", "yes", ""),
        ("", "", "bf16"),
    ]
    assert [row.line_no for row in rows] == [2, 3, 5]
