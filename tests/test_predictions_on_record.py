"""Predictions on record: complete, in one form, and without any result."""

import csv
from operator import itemgetter

import pytest

from analysis.planner import calibration
from benchmarks.planner import record as recorded

FOLDER = recorded.FOLDER


def read(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


MADE, NAME = read(FOLDER / "made.csv"), itemgetter("file")


@pytest.mark.parametrize("made", MADE, ids=NAME)
def test_each_row_has_seconds_inside_their_interval_or_says_why_not(made):
    rows = read(FOLDER / f"{made['file']}.csv")
    names = list(rows[0])
    assert names[:7] == ["id", *recorded.FOUND]
    assert not {recorded.column_name(name) for name in names} & recorded.RESULTS
    assert len({row["id"] for row in rows}) == len(rows) == int(made["rows"])
    for row in rows:
        assert row["fits"] in ("yes", "no", "-")
        assert bool(row["why"]) == (row["fits"] != "yes")
        if row["seconds"]:
            low, middle, high = (float(row[name]) for name in ("low", "seconds", "high"))
            assert 0 < low < middle < high
        else:
            assert (row["low"], row["high"], row["fits"]) == ("", "", "no")


def test_fitted_predictions_are_of_the_same_runs_and_their_constants_are_kept():
    blind, fitted = (read(FOLDER / f"ultrascale_h100{end}.csv") for end in ("", "-fitted"))
    assert [row["id"] for row in blind] == [row["id"] for row in fitted]
    assert [row["fits"] for row in blind] == [row["fits"] for row in fitted]
    known = calibration.load_calibration(str(FOLDER / "ultrascale_h100-fitted.toml"))
    assert known.fit.n == 20


@pytest.mark.parametrize("made", [made for made in MADE if not made["fitted_on"]], ids=NAME)
def test_a_record_is_predicted_again_from_itself(made, tmp_path):
    """A change of the model that changes these numbers is put on record again, with a reason."""
    name = f"{made['file']}.csv"
    recorded.record(FOLDER / name, [], 0, tmp_path)
    # Exact on any processor: a record has five digits, and numpy differs in the sixteenth.
    assert read(tmp_path / name) == read(FOLDER / name)


def test_a_table_with_results_is_not_put_on_record(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("id,gpu_type,gpus,tokens_per_s\na,H100 SXM,8,100\n")
    with pytest.raises(SystemExit, match="has results: tokens_per_s"):
        recorded.record(path, [], 0, tmp_path)


def test_the_readme_names_the_model_and_what_was_assumed_of_a_layout_is_said():
    text = (FOLDER / "README.md").read_text()
    assert all(f"`{made['model']}`" in text and f"`{made['commit']}`" in text for made in MADE)
    rows = [row for row in read(FOLDER / "mlperf_v5.csv") if int(row["pp"]) > 1]
    assert rows and all(row["vpp"] for row in rows)
    assert all("vpp" in row["inferred"] for row in rows) and len(rows) == 6
