"""The audit: which tables it reads, what it says of those that it cannot check, and what breaks
each of its identities."""

import tomllib

import pytest

from analysis.audit import main
from analysis.logs.published_csv import HEADINGS, read_csv
from analysis.published.audited import audit_paths
from analysis.published.printed_numbers import agreement, read_value, tolerance
from analysis.published.read_tables import NAMES, meaning
from base.files import ROOT
from base.intervals import Interval
from tests.conftest import SHARED

MARKDOWN = "| GPUs | TP | PP | DP |\n|---|---|---|---|\n| 8 | 2 | 2 | {dp} |\n"
BARE = "GPUs | TP | PP | DP\n--- | --- | --- | ---\n8 | 2 | 2 | {dp}\n\nwords\n"
ONE_END = "a \\| b | GPUs | TP | PP | DP |\n--|--|--|--|--\n| x | 8 | 2 | 2 | {dp}\n"
CSV = "gpus,tp,pp,dp\n8,2,2,{dp}\n"


def test_a_table_of_each_format_is_read(tmp_path, rows_of):
    for name, text, line in (
        ("t.md", MARKDOWN, 3),
        ("t.md", BARE, 3),
        ("t.md", ONE_END, 3),
        ("t.csv", CSV, 2),
        ("t.tsv", CSV.replace(",", "\t"), 2),
        ("t.txt", "# Words\n\n" + MARKDOWN, 5),
    ):
        path = tmp_path / name
        for dp, findings in ((2, []), (4, [(str(path), line, "gpus", "8")])):
            path.write_text(text.format(dp=dp))
            printed = rows_of(main, path, status=len(findings))
            assert [(f["file"], f["line"], f["kind"], f["printed"]) for f in printed] == findings


def test_a_heading_that_is_not_known_is_said_and_can_be_named(tmp_path, capsys, refused):
    path = tmp_path / "t.csv"
    path.write_text("GPUs,Batch,Seq,Took,tokens/s\n8,64,2048,4000,9\n")
    said = refused(main, path)
    assert "t.csv:1: unread: Batch, Took" in said and "skipped: nothing to check" in said
    mapping = "Batch=global_batch Took=step_ms tokens/s=tokens_per_s".split()
    assert main([str(path), *(f"--mapping={pair}" for pair in mapping)]) == 1
    said = capsys.readouterr()
    assert "tokens/s 9, but global_batch 64 x seq_len 2048 / step_s 4000 = 32,768" in said.out
    assert said.err == ""


def test_a_flag_that_would_change_nothing_is_a_mistake(tmp_path, refused):
    for flags, words in (
        (["--mapping", "Tokes=gpus"], "--mapping tokes: no table has this heading"),
        (["--mapping", "GPUs="], "--mapping GPUs=: write --mapping A=B"),
        (["--mapping", "GPUs=gpu_count"], "no column gpu_count; there are: gpus, nodes"),
        (["--fact", "speed=5"], "no column speed"),
    ):
        path = tmp_path / "t.md"
        path.write_text(MARKDOWN.format(dp=2))
        assert words in refused(main, path, *flags)


def test_a_table_that_cannot_be_read_is_one_line_and_exit_2(tmp_path, refused):
    for name, content, cause in (
        ("t.csv", "", "empty file"),
        ("t.csv", 'gpus,tflops\n"8', "no CSV: unexpected end of data"),
        ("t.csv", "gpus,tp,pp\n8,1", "truncated: line 2 ends after 2 of 3 columns"),
        ("t.md", "", "empty file"),
        ("t.md", "# Words\n\nand no table\n", "no table in CSV or Markdown"),
        ("run.log", " iteration 1/ 100 | elapsed time per iteration (ms): 9\n", "no table in"),
    ):
        path = tmp_path / name
        path.write_text(content)
        said = refused(main, path)
        assert said.startswith(f"analysis.audit: {path}: {cause}") and said.count("\n") == 1


def test_a_folder_is_audited_to_its_end_and_each_skipped_table_is_said(tmp_path, capsys):
    (tmp_path / "a.csv").write_text('gpus,tflops\n"8')
    (tmp_path / "b.md").write_text(MARKDOWN.format(dp=4) + "\n\n| a | b |\n|---|---|\n| 1 | 2 |\n")
    (tmp_path / "c.png").write_bytes(b"\x89PNG")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "d.csv").write_text(CSV.format(dp=2))
    assert main([str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out.count("\n") == 1
    assert "b.md:3: GPUs 8, but tp 2 x pp 2 x dp 4 = 16\n" in said.out
    lines = [
        line.removeprefix(f"analysis.audit: {tmp_path}/")[:17] for line in said.err.split("\n")
    ]
    skipped = ["b.md:6: skipped: ", "b.md:6: unread: a", "c.png: skipped: n"]
    assert sorted(lines) == ["", "a.csv: no CSV: un", *skipped]
    (tmp_path / "b.md").unlink()
    assert main([str(tmp_path)]) == 2  # nothing found, but a file was not read
    assert main([str(tmp_path / "deep"), str(tmp_path / "nowhere.csv")]) == 2


def test_no_heading_is_listed_for_two_columns_and_ours_are_known():
    headings = [h.strip() for known in HEADINGS.values() for h in known.split(";")]
    assert len(headings) == len(set(headings))
    for name in NAMES:
        if not name.endswith(("_ms", "_pct", "_some")):
            assert meaning(name, {}) == name
    for heading in ("local batch", "Batch size", "theoretical peak FLOP/s", "GB/s", "eval batch"):
        assert meaning(heading, {}) == ""
    assert [meaning(h, {}) for h in ("MFU (%)", "mfu_pct", "MFU")] == ["mfu_pct", "mfu_pct", "mfu"]


def found(tmp_path, text, name="t.md"):
    (tmp_path / name).write_text(text)
    return [f"{f.line} {f.kind}" for f in audit_paths([tmp_path / name]).findings]


def test_nodes_times_gpus_in_one_cell_are_the_gpus(tmp_path):
    head = "| GPUs | Step time (s) | Speedup |\n|---|---|---|\n| 1x H100 SXM | 16.0 | 1.00x |\n"
    for cell in ("2x8xH100 SXM", "2 x 8 H100 SXM", "2×8", "16x80GB H100"):
        assert found(tmp_path, head + f"| {cell} | 1.25 | 12.80x |\n") == []
        assert found(tmp_path, head + f"| {cell} | 0.8 | 20.0x |\n") == ["4 efficiency"]


def test_mfu_without_a_precision_is_over_the_cards_bf16_peak(tmp_path):
    head = "| GPU | TFLOP/s/GPU | MFU |\n|---|---|---|\n"
    for card, tflops, mfu in (("H100 SXM", 460, 46.5), ("B200", 441, 19.6)):
        assert found(tmp_path, head + f"| {card} | {tflops} | {mfu}% |\n") == []
        assert found(tmp_path, head + f"| {card} | {tflops} | {mfu / 1.2:.1f}% |\n") == ["3 mfu"]
    assert found(tmp_path, head + "| B200 | 900 | 20.0% |\n") == ["3 mfu"]  # fp8's 4,500
    stated = head.replace("| MFU |", "| MFU | precision |").replace("|\n|-", "|\n|---|-")
    assert found(tmp_path, stated + "| B200 | 900 | 20.0% | bf16 |\n") == ["3 mfu"]
    assert found(tmp_path, stated + "| B200 | 900 | 20.0% | fp8 |\n") == []
    assert found(tmp_path, stated + "| B200 | 900 | 288.5% | bf16 |\n") == ["3 mfu"]


def test_a_share_far_above_one_can_only_be_percent(tmp_path):
    head = "gpus,gpu_type,tflops,mfu,efficiency\n"
    rows = "256,A100,121.5,38.96,98.2\n512,A100,118.1,37.86,{}\n"
    assert found(tmp_path, head + rows.format(95.4), "t.csv") == []
    assert found(tmp_path, head + rows.format(125.4), "t.csv") == ["3 efficiency"]
    assert found(tmp_path, "gpus,efficiency\n1,1\n2,1.4\n4,0.9\n", "t.csv") == ["3 efficiency"]


@pytest.mark.parametrize("case", ["2x8-gpus.md", "mfu-h100.md", "mfu-b200.md", "mfu-percent.csv"])
def test_public_tables_that_are_right_have_no_finding(case, shared, printed):
    assert "nothing" in printed(main, shared / "cases" / f"audit-{case}")


def test_a_number_that_nothing_measures_is_no_traceback(tmp_path):
    largest, path = "1.7976931348623157e308", tmp_path / "t.csv"
    for heading in ("step_s", "tokens_per_s", "tflops", "params_b", "global_batch", "mfu"):
        path.write_text(
            f"gpus,{heading},global_batch,seq_len\n1,{largest},16,8\n2,4,16,{largest}\n{largest},1,1,1\n"
        )
        assert not [f for f in audit_paths([path]).findings if largest in f.printed]


PUBLISHED = ROOT / "logs" / "published"
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
