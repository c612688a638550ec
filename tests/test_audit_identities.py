"""The audit: each identity finds what breaks it, and nothing in rows that hold."""

import os
from pathlib import Path

import pytest

from analysis.logs.published_csv import read_csv
from analysis.published.audit import audit_paths
from analysis.published.intervals import Interval, agreement, read_value, tolerance
from base.files import ROOT

PUBLISHED = ROOT / "logs" / "published"
SHARED = Path(os.environ.get("SCALING_SHARED", ROOT.parent / "shared"))
JEAN_ZAY = PUBLISHED / "seed003_jeanzay_v100.csv"
needs_shared = pytest.mark.skipif(
    not (SHARED / "seeds").is_dir(), reason=f"no published documents at {SHARED}"
)


def findings(tmp_path, head, *rows, **facts):
    """(kind, line) of what is found in a CSV."""
    path = tmp_path / "t.csv"
    path.write_text("\n".join([head, *rows]) + "\n")
    return [(f.kind, f.line) for f in audit_paths([path], facts=facts).findings]


LAYOUT = "gpus,tp,pp,dp,cp,ep,micro_batch,gas,global_batch,seq,step_s,tokens_per_s,samples_per_s"


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ("8,2,2,2,1,1,4,8,64,2048,2,65536,32", None),
        ("8,2,2,4,1,1,4,8,128,2048,2,131072,64", "gpus"),
        ("16,2,2,2,2,1,4,8,64,2048,2,65536,32", None),
        ("8,2,2,2,1,1,4,8,96,2048,2,98304,48", "batch"),
        ("8,2,2,2,1,1,4,8,64,2048,2,32768,32", "rate"),
        ("8,2,2,2,1,1,4,8,64,2048,2.00,,64", "rate"),
        ("8,2,2,2,1,1,4,8,64,2048,2,1,", "rate"),
        ("8,2,2,2,1,1,4,8,64,,2,65536,32", "rate"),  # samples/s by the batch alone: holds
    ],
)
def test_layout_batch_and_rate_multiply_out(tmp_path, row, kind):
    found = findings(tmp_path, LAYOUT, row)
    if ",,2,65536" in row:  # an empty seq checks no tokens, and is no alarm
        assert found == []
    else:
        assert [k for k, _ in found] == ([kind] if kind else [])


def test_dp_beside_ep_may_be_of_the_ranks_that_hold_the_same_experts(tmp_path):
    head = "gpus,tp,pp,dp,ep,micro_batch,gas,global_batch"
    assert findings(tmp_path, head, "64,4,1,2,8,1,64,1024", "64,4,1,16,8,1,64,1024") == []
    assert findings(tmp_path, head, "64,4,1,3,8,1,64,1024") == [("gpus", 2), ("batch", 2)]


def test_what_is_not_stated_must_still_be_a_whole_number(tmp_path):
    assert findings(tmp_path, "gpus,tp,pp", "12,8,1", "16,8,1") == [("gpus", 2)]
    head = "gpus,micro_batch,dp,global_batch"
    assert findings(tmp_path, head, "8,3,8,64", "8,4,8,64") == [("batch", 2)]


def test_a_rate_of_one_gpu_or_of_all_is_decided_by_most_rows(tmp_path):
    head = "GPUs,global batch size,seq,step time (s),tokens/s"
    rows = ["8,64,2048,2,8192", "16,64,2048,1,8192", "32,64,2048,0.5,8192", "64,64,2048,0.5,8192"]
    assert findings(tmp_path, head, *rows) == [("rate", 5)]
    head = "GPUs,global batch size,seq,step time (s),tokens/s/GPU,tokens/s (total)"
    assert findings(tmp_path, head, "8,64,2048,2,8192,65536") == []
    assert findings(tmp_path, head, "8,64,2048,2,8192,55536") == [("rate", 2)]


def test_tflops_follow_from_the_formula_that_is_stated(tmp_path):
    head = "gpus,size,gbs,seq,step_s,tflops"
    rows = ("64,52B,1024,1024,137,49.7", "64,52B,1024,1024,137,46.7")
    assert findings(tmp_path, head, *rows, formula="8PT") == [("tflops", 3)]
    assert findings(tmp_path, head, *rows, formula="8PT estimate") == []
    assert findings(tmp_path, head, *rows) == []  # without a formula and a model nothing tells


def test_mfu_is_tflops_over_the_cards_peak_and_neither_is_above_it(tmp_path):
    head = "gpus,gpu,precision,tflops,mfu_pct"
    rows = ("8,H100,bf16,400,40.4", "8,H800,bf16,400,50.4", "8,H800,bf16,1200,121")
    assert findings(tmp_path, head, *rows) == [("mfu", 3), ("peak", 4), ("peak", 4)]
    assert findings(tmp_path, "gpus,gpu,tflops", "8,H800,400") == []  # known, no precision


def test_flops_per_token_are_one_number_for_a_model(tmp_path):
    """As an MFU that counts tied embeddings twice where pp > 1 (here 16.8 % too much)."""
    head = "gpus,params_b,seq,gpu_type,precision,tokens_per_s,mfu"
    rows = [f"8,1.34,4096,H100 SXM,bf16,{n}0000,0.{n}00" for n in (4, 3, 2)]
    assert findings(tmp_path, head, *rows, "8,1.34,4096,H100 SXM,bf16,25000,0.250") == []
    odd = "8,1.34,4096,H100 SXM,bf16,25000,0.292"
    assert findings(tmp_path, head, *rows, odd) == [("flops", 5)]
    no_size = [row.replace("1.34", "") for row in [*rows, odd]]
    assert findings(tmp_path, head.replace("params_b", "note"), *no_size[:2]) == []


def test_speedup_and_efficiency_follow_from_the_baseline(tmp_path):
    head = "gpus,step_s,speedup,efficiency"
    rows = ("1,8.00,1.00,1.00", "2,4.10,1.95,0.98", "4,2.20,3.64,0.91")
    assert findings(tmp_path, head, *rows) == []
    assert findings(tmp_path, head, *rows, "8,1.50,6.33,0.67") == [
        ("speedup", 5),
        ("efficiency", 5),
    ]
    assert findings(tmp_path, head, rows[0], "2,4.10,1.95,0.98") == []
    assert findings(tmp_path, head, rows[0], "2,4.10,1.65,") == [("speedup", 3)]
    assert findings(tmp_path, "gpus,speedup", "1,1.00", "2,2.2") == [("efficiency", 3)]
    weak = ("1,1000,1.00", "2,1900,1.90", "4,3500,3.10")
    assert findings(tmp_path, "gpus,tokens_per_s,speedup", *weak) == [("speedup", 4)]


# What breaks one identity and no other: its kind, the columns, and rows of which the last is wrong.
MEGATRON = "gpus,size,gbs,seq,step_s,tflops,formula"
SAMPLES = ("30.0,150.0", "28.0,140.0", "26.0,150.0")
STEPS = ("8,7,1024,64,2.000,150", "16,7,1024,64,1.250,120", "32,7,1024,64,1.000,90")
UNKNOWN_PEAK = ("400,0.400", "300,0.300", "200,0.300")
BROKEN = [
    ("gpus", "gpus,nodes,gpus_per_node", "16,2,8", "16,4,8"),
    ("gpus", "gpus,nodes", "16,2", "32,4", "64,4"),
    ("rate", "samples_per_s,seq,tokens_per_s", "32.00,2048,65536", "32.00,2048,32768"),
    ("rate", "steps,gbs,seq,tokens", "10,64,2048,1310720", "20,64,2048,1310720"),
    ("wall clock", "tokens,tokens_per_s,wall_s", "65536,1024,64.0", "65536,1024,66.0"),
    ("tflops", MEGATRON, *(f"64,52B,1024,1024,137,{n},6PT" for n in (37.3, 46.7))),
    (
        "tflops",
        MEGATRON,
        *(f"64,52,1024,1024,137,{n},Megatron eq.3 hardware" for n in (52.7, 12.7)),
    ),
    ("tflops", MEGATRON, *(f"64,52,1024,1024,137,{n},96*B*s*l*h^2(...)" for n in (52.7, 12.7))),
    ("flops", "gpus,size,tgs,tflops", "8,7,3000,150.0", "16,7,2800,140.0", "32,7,2600,150.0"),
    ("flops", "gpus,size,seq,samples/s,tflops", *(f"8,7,1024,{n}" for n in SAMPLES)),
    ("flops", "gpus,size,seq,gbs,step_s,tflops", *(f"{n}.0" for n in STEPS)),
    ("mfu", "gpus,gpu,precision,tflops,mfu", *(f"8,X9,bf16,{n}" for n in UNKNOWN_PEAK)),
    ("speedup", "gpus,wall_s,speedup", "1,100.0,1.00", "2,52.0,1.92", "4,30.0,2.50"),
    (
        "efficiency",
        "gpus,step_s,gbs,efficiency",
        "1,8.00,64,1.00",
        "2,4.10,64,0.98",
        "4,2.20,64,0.71",
    ),
    ("efficiency", "gpus,tgs,efficiency", "1,1000,1.00", "2,950,0.95", "4,900,0.80"),
    ("efficiency", "gpus,efficiency", "1,1.00", "2,0.98", "4,1.06"),
]


@pytest.mark.parametrize(("kind", "head", "rows"), [(k, h, rows) for k, h, *rows in BROKEN])
def test_each_identity_finds_what_breaks_it_alone(tmp_path, kind, head, rows):
    assert findings(tmp_path, head, *rows[:-1]) == []
    assert findings(tmp_path, head, *rows) == [(kind, len(rows) + 1)]


def test_totals_are_the_sum_of_their_rows_and_columns(tmp_path):
    rows = ("forward,2.0,10,12", "backward,4.0,20,24", "total,6.0,30,36")
    assert findings(tmp_path, "part,a,b,total", *rows) == []
    odd = (*rows[:2], "total,6.0,30,39")
    assert ("sum", 4) in findings(tmp_path, "part,a,b,total", *odd)


def test_equal_results_of_other_configurations_and_unequal_repeats_are_found(tmp_path):
    head = "gpus,tp,pp,dp,micro_batch,global_batch,seq,seconds_per_iteration,notes"
    rows = ("8,1,1,8,1,64,2048,1.23456,", "8,2,1,4,1,64,2048,1.23456,")
    assert findings(tmp_path, head, *rows) == [("equal", 3)]
    same = ("8,1,1,8,1,64,2048,1.2,", "8,1,1,8,1,64,2048,1.5,")
    assert findings(tmp_path, head, *same) == [("repeats", 2)]
    assert findings(tmp_path, head, same[0], "8,1,1,8,1,64,2048,1.5,flash") == []


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
