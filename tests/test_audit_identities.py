"""The audit: each identity finds what breaks it, and nothing in rows that hold."""

import os
import tomllib
from pathlib import Path

import pytest

from analysis.logs.published_csv import read_csv
from analysis.published.audited import audit_paths
from analysis.published.printed_numbers import agreement, read_value, tolerance
from base.files import ROOT
from base.intervals import Interval

PUBLISHED = ROOT / "logs" / "published"
SHARED = Path(os.environ.get("SCALING_SHARED", ROOT.parent / "shared"))
JEAN_ZAY = PUBLISHED / "seed003_jeanzay_v100.csv"
needs_shared = pytest.mark.skipif(
    not (SHARED / "seeds").is_dir(), reason=f"no published documents at {SHARED}"
)
TABLES = tomllib.loads((ROOT / "tests" / "audited_tables.toml").read_text())["tables"]
CASES = [(table, rows, findings) for table in TABLES for rows, findings in table["cases"]]


@pytest.mark.parametrize(("table", "rows", "findings"), CASES)
def test_each_identity_finds_what_breaks_it_and_nothing_in_rows_that_hold(
    tmp_path, table, rows, findings
):
    path = tmp_path / "t.csv"
    path.write_text("\n".join([table["head"], *rows, ""]))
    found = audit_paths([path], facts=table.get("facts")).findings
    assert [f"{finding.kind} {finding.line}" for finding in found] == findings


def test_digits_leave_an_interval_open():
    value = read_value("46.7", "tflops", 1.0, {})
    assert value.interval == pytest.approx((46.65, 46.8))
    assert read_value("1.60517e+06", "", 1.0, {}).interval == pytest.approx((1605165, 1605180))
    assert read_value("900 ms", "", 1.0, {"ms": 1e-3}).number == pytest.approx(0.9)
    assert read_value("~650", "", 1.0, {}).interval == pytest.approx((617.5, 715))
    assert read_value("8", "", 1.0, {}, exact=True).interval == (8, 8)
    for text in ("", "OOM", "9.8-10.2", "8/16", "-", "0"):
        assert read_value(text, "", 1.0, {}) is None
    assert Interval(1, 2).misses(Interval(2.2, 3)) == pytest.approx(0.1)


def test_most_intervals_decide_and_a_table_shows_how_it_was_averaged():
    point, held = agreement([Interval(n - 0.1, n + 0.1) for n in (5, 5.05, 5.1, 9)], 0.002)
    assert point == pytest.approx(5.05, rel=0.01) and held == {0, 1, 2}
    assert tolerance([0.0] * 9 + [0.1]) < 0.001 < tolerance([0.003] * 10) < 0.02
    assert tolerance([0.0, 0.1]) == pytest.approx(0.005)


# The known errors of published tables (docs/audit.md); the others have none.
TRUE = {
    "seed003_jeanzay_v100": 15,
    "internevo_a100": 7,
    "gpt2_data_parallel": 5,  # wall clocks
    "dgx_h100": 4,
    "bigscience_tr11_a100": 2,
    "bigscience_tr8_104b_v100": 2,
    "dgxc_moe": 10,  # 8 printed accumulations, an MFU of another peak, a rate
    "megatron_golden": 1,
    # 4 rows are without multi-token prediction, for which the table has no column; 2 print a rate
    # of tokens that their TFLOP/s contradict; 2 releases print one result.
    "megatron_bridge_moe": 7,
}


@pytest.mark.parametrize(
    "folder", [PUBLISHED, pytest.param(SHARED / "published", marks=needs_shared)]
)
def test_published_tables_have_their_true_findings_and_no_other(folder):
    found = {path.stem: audit_paths([path]).findings for path in sorted(folder.glob("*.csv"))}
    wrong = {name: list(map(str, f)) for name, f in found.items() if len(f) != TRUE.get(name, 0)}
    assert found and not wrong


def test_rows_that_their_transcriber_found_consistent_raise_no_alarm():
    kinds = ("gpus", "batch", "tflops")
    flagged = {f.line for f in audit_paths([JEAN_ZAY]).findings if f.kind in kinds}
    for row in read_csv(JEAN_ZAY).rows:
        line_213 = row.text("table").startswith("line 213")  # 48.8 for 49.7: within the LINT's
        assert (row.line_no in flagged) == bool(row.text("lint") or line_213)


@needs_shared
def test_the_v100_document_has_exactly_these_contradictions():
    """Its sentences state tp, the sequence and the formula."""
    facts = {"tp": "4", "seq_len": "1024", "formula": "8PT"}
    (path,) = (SHARED / "seeds").glob("003_*.txt")
    lines = {}
    for finding in audit_paths([path], facts=facts).findings:
        lines.setdefault(finding.kind, set()).add(finding.line)
    assert lines == {
        "tflops": {180, 213, 433},
        "gpus": {99, 100, 101, 105, 106, 122, 252},
        "batch": {77, 181, 182},
        "repeats": {113},
    }
