"""The audit finds each contradiction of the published tables, and nothing in consistent rows."""

import os
from pathlib import Path

import pytest

from analysis import tables
from analysis.audit import main
from analysis.logs.published_csv import read_csv
from analysis.published.audit import audit_document, audit_paths

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "logs" / "published"
SHARED = Path(os.environ.get("SCALING_SHARED", ROOT.parent / "shared"))
JEAN_ZAY = PUBLISHED / "seed003_jeanzay_v100.csv"

needs_shared = pytest.mark.skipif(
    not (SHARED / "seeds").is_dir(), reason=f"no published documents at {SHARED}"
)

# Lines of the published document, by what is wrong with them.
WRONG = {
    "tflops": {180: "46.7 do not follow: 137 s give 49.7", 213: "48.8", 433: "79 s give 43.1"},
    "gpus": dict.fromkeys((99, 100, 101, 105, 106, 122, 252), "GPUs"),
    "batch": {77: "= 16, but", 181: "global batch of 1536", 182: "global batch of 2048"},
    "repeats": {113: "129, 217, 125, 225 s"},
}


def document(number):
    return next((SHARED / "seeds").glob(f"{number}_*.txt"))


def by_kind(findings):
    kinds = {}
    for finding in findings:
        kinds.setdefault(finding.kind, {})[finding.line] = finding.message
    return kinds


@needs_shared
def test_the_v100_tables_have_exactly_these_contradictions():
    found = by_kind(audit_paths([document("003")])[0])
    assert {kind: set(lines) for kind, lines in found.items()} == {
        kind: set(lines) for kind, lines in WRONG.items()
    }
    for kind, lines in WRONG.items():
        for line, words in lines.items():
            assert words in found[kind][line]


def test_the_transcribed_v100_rows_have_the_same_ones():
    rows = {row.line_no: row for row in read_csv(JEAN_ZAY).rows}
    found = by_kind(audit_paths([JEAN_ZAY])[0])
    for kind in ("tflops", "gpus", "batch"):
        lines = {int(rows[n].text("table").split()[1].rstrip(";")) for n in found[kind]}
        assert lines == set(WRONG[kind])


def test_rows_that_their_transcriber_found_consistent_raise_no_alarm():
    flagged = {f.line for f in audit_paths([JEAN_ZAY])[0] if f.kind in ("gpus", "batch", "tflops")}
    for row in read_csv(JEAN_ZAY).rows:
        if row.text("lint"):
            assert row.line_no in flagged
        elif row.text("table").startswith("line 213"):  # 48.8 for 49.7: within the LINT's margin
            assert row.line_no in flagged
        else:
            assert row.line_no not in flagged
    for name in ("narayanan_sc21_table1.csv", "narayanan_sc21_table2.csv"):
        assert audit_paths([PUBLISHED / name])[0] == []


@needs_shared
def test_the_epoch_times_are_means_and_the_slowest_rank_decides():
    found = by_kind(audit_paths([document("004")])[0])
    assert found["mean over ranks"][30] == (
        "training_b64_g2: 1095.70 s is the mean of ranks at 1384.64 and 806.75 s;"
        " the slowest decides (speedup 1.61, not 2.04)"
    )
    assert len(found["mean over ranks"]) == 3  # the ranks of b64_g4 are within 2 %
    assert "4.25x on 4 GPUs is not sub-linear" in found["efficiency"][225]
    assert "efficiency of 1.06, above 1" in found["efficiency"][196]


@needs_shared
def test_wall_clocks_with_evaluation_and_mixed_commits_are_found():
    first = by_kind(audit_paths([document("000")])[0])
    assert set(first["wall clock"]) == {16, 17, 18}
    assert "985.53 s" in first["wall clock"][16]
    second = by_kind(audit_paths([document("002")])[0])
    assert "d8ca451, ba03420" in second["commits"][146]


@needs_shared
@pytest.mark.skipif(not (SHARED / "logs").is_dir(), reason=f"no raw logs at {SHARED}")
def test_the_log_that_skipped_every_iteration_is_found():
    logs = SHARED / "logs" / "bigscience-workshop+bigscience"
    found = audit_paths([logs / "meg_gpt2_perf_n16.out"])[0]
    assert [f.message for f in found] == ["all 3 iterations skipped: no optimizer step was timed"]
    assert audit_paths([logs / "meg_ds_3d_gpt2_perf_n16-ds-off.out"])[0] == []


TABLE = """# Runs

TFLOPs are `size * 4 * 2 * seq * gbs / (s * gpus)`, `seq_len = 1024`, TP=4.

| GPUs | Size | DP | PP | GAS | MBS | GBS | Speed | TFlops |
| ---: | ---: | -: | -: | --: | --: | --: | ----: | -----: |
{row}
"""


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ("|   64 | 52B  |  1 | 16 | 256 |   4 | 1024 |  129s |   52.8 |", None),
        ("|   64 | 52B  |  1 | 16 | 256 |   4 | 1024 |   OOM |        |", None),
        ("|   64 | 52B  |  1 |  8 | 256 |   4 | 1024 |  129s |   52.8 |", "gpus"),
        ("|   64 | 52B  |  1 | 16 | 128 |   4 | 1024 |  129s |   52.8 |", "batch"),
        ("|   64 | 52B  |  1 | 16 | 256 |   4 | 1024 |  129s |   52.0 |", "tflops"),
        ("|   64 | 52B  |  1 | 16 | 256 |   4 | 1024 |   50s |  136.3 |", "peak"),
    ],
)
def test_one_row_one_finding(row, kind):
    found = audit_document(TABLE.format(row=row), "x.md", gpu="V100-SXM2")
    assert [f.kind for f in found] == [kind] * bool(kind)


def test_bad_files_are_named_and_the_rest_is_audited(tmp_path, capsys):
    bad = tmp_path / "bad.csv"
    bad.write_text("a,b\n1,2\n")
    assert main([str(bad)]) == 2
    assert "bad.csv: no column that the audit knows" in capsys.readouterr().err
    good = tmp_path / "good.md"
    good.write_text(TABLE.format(row="| 64 | 52B | 1 | 16 | 256 | 4 | 1024 | 129s | 52.8 |"))
    assert main([str(bad), str(good)]) == 0
    assert main([str(JEAN_ZAY), str(tmp_path / "nowhere.csv")]) == 1


def test_a_raw_log_of_ranks_is_audited_too(tmp_path):
    path = tmp_path / "epochs.log"
    lines = ["Average metrics:", "    Total epoch time: 10.00 seconds"]
    lines += ["    Training compute time: 9.00 seconds"]
    for rank, seconds in ((0, 14.0), (1, 6.0)):
        lines += [f"Rank {rank} Epoch 0 timing breakdown:"]
        lines += [f"    Total epoch time: {seconds:.2f} seconds"]
        lines += ["    Training compute time: 5.00 seconds"]
    path.write_text("\n".join(lines) + "\n")
    (finding,) = audit_paths([path])[0]
    assert finding.message.startswith("10.00 s is the mean of ranks at 14.00 and 6.00 s")


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("t.csv", "", "empty file"),
        ("t.csv", 'gpus,tflops\n"8', "unexpected end of data"),
        ("t.csv", "gpus,tp,pp\n8,1", "truncated: line 2 ends after 2 of 3 columns"),
        ("t.md", "", "empty file"),
    ],
)
def test_a_table_that_cannot_be_read_is_one_line_and_exit_2(tmp_path, capsys, name, content, cause):
    path = tmp_path / name
    path.write_text(content)
    assert main([str(path)]) == 2
    assert capsys.readouterr().err == f"analysis.audit: {path}: {cause}\n"
    assert tables.main(["--recompute", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"analysis.tables: {path}: no table with GPUs")


def test_nothing_found_is_told_from_nothing_to_audit(tmp_path, capsys):
    (tmp_path / "none.md").write_text("# Words\n\nand no table\n")
    (tmp_path / "good.md").write_text(
        "| GPUs | TP | PP | DP |\n|---|---|---|---|\n| 8 | 2 | 2 | 2 |\n"
    )
    assert main([str(tmp_path / "none.md")]) == 0
    assert capsys.readouterr().out == "nothing to audit\n"
    assert main([str(tmp_path / "good.md")]) == 0
    assert capsys.readouterr().out.startswith("1 row of a table or log checked")


def test_the_gpus_of_a_context_parallel_mesh_multiply_out(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(
        "Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=4, cp=2, tp=1\n"
        "step: 10  loss:  7.9  grad_norm: 3.5  memory: 16.10GiB(9.25%)  tps: 6,922\n"
    )
    assert audit_paths([log]) == ([], [], {str(log): 1})
