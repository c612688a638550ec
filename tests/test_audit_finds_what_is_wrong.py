"""The audit finds each contradiction of the published tables, and nothing in consistent rows."""

import pytest

from analysis import tables
from analysis.audit import main
from analysis.logs.published_csv import read_csv
from analysis.published.audit import audit_document, audit_paths
from tests.conftest import ROOT, SHARED

PUBLISHED = ROOT / "logs" / "published"
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
        ("t.csv", 'gpus,tflops\n"8', "no CSV: unexpected end of data"),
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


def kinds_of(tmp_path, name, text, *flags):
    path = tmp_path / name
    path.write_text(text)
    mapping = dict(flag.split("=") for flag in flags)
    return [(f.kind, f.line) for f in audit_paths([path], mapping=mapping)[0]]


SIDEWAYS = """## Layouts

| GPUs | SeqLen | TP | PP | DP | MBS | GBS | GA |
|---|---|---|---|---|---|---|---|
| 128 | 8192 | 4 | 1 | 32 | 1 | 256 | 8 |
| 256 | 8192 | 4 | 1 | 64 | 1 | 512 | 8 |
| 512 | 8192 | 4 | 1 | 128 | 1 | 1024 | 8 |

| Some 314b BF16 | 128x GB200 GPUs | 256x GB200 GPUs | 512x GB200 GPUs |
|---|---|---|---|
| Training step time (seconds per step) | 7.325 | 7.39 | 7.324 |
| Throughput in tokens per second | 286300.61 | 567564.82 | 572679 |
| Model flops utilization | 47.59% | 47.17% | 47.6% |
"""


def test_a_table_on_its_side_knows_the_batch_from_its_neighbour(tmp_path):
    (finding,) = audit_paths_of(tmp_path, "x.md", SIDEWAYS)
    assert (finding.line, finding.kind, finding.printed) == (12, "rate", "572679")
    assert float(finding.expected) == pytest.approx(1024 * 8192 / 7.324, rel=1e-3)
    assert finding.column == "Throughput in tokens per second" and finding.sure == "certain"
    right = SIDEWAYS.replace("572679", "1145316")
    assert audit_paths_of(tmp_path, "x.md", right) == []


def audit_paths_of(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return audit_paths([path])[0]


WORDS = "Setup,Batch size,Seq length,Iteration time (ms),Throughput (tok/s/GPU),Speedup\n"


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ("8x H100 dp8,64,2048,500,32768,1.00\n16x H100 dp16,64,2048,250,32768,2.00\n", []),
        (
            "8x H100 dp8,64,2048,500,32768,1.00\n16x H100 dp16,64,2048,250,3276,2.00\n",
            [("rate", 3)],
        ),
        (
            "8x H100 dp8,64,2048,500,32768,1.00\n16x H100 dp16,64,2048,250,32768,2.40\n",
            [("speedup", 3)],
        ),
        ('"8 GPUs, dp2, tp2, pp4",64,2048,500,32768,1.00\n', [("gpus", 2)]),
    ],
)
def test_headings_in_words_and_layouts_in_cells_are_understood(tmp_path, rows, found):
    kinds = kinds_of(tmp_path, "x.csv", WORDS + rows)
    assert [kind for kind in kinds if kind[0] != "efficiency"] == found


def test_flops_per_token_that_jump_are_found(tmp_path):
    """As an MFU that counts tied embeddings twice where pp > 1 (here 16.8 % too much)."""
    rows = [(1, 40000, "0.400"), (1, 30000, "0.300"), (1, 20000, "0.200"), (2, 25000, "0.292")]
    lines = [f"8,{pp},{8 // pp},1.34,4096,H100 SXM,bf16,{rate},{mfu}" for pp, rate, mfu in rows]
    text = "gpus,pp,dp,params_b,seq,gpu_type,precision,tokens/s,mfu\n" + "\n".join(lines) + "\n"
    (finding,) = audit_paths_of(tmp_path, "x.csv", text)
    assert (finding.kind, finding.line, finding.printed) == ("jump", 5, "0.292")
    assert float(finding.expected) == pytest.approx(0.25, rel=0.002)


def test_html_tables_thousands_and_a_given_mapping(tmp_path):
    html = (
        "<table>\n<tr><th>GPUs</th><th>Batch size</th><th>Seq</th><th>Took</th>"
        "<th>Tokens/s</th></tr>\n"
        "<tr><td>8</td><td>1,024</td><td>2048</td><td>4000</td><td>524&#44;288</td></tr>\n"
        "<tr><td>16</td><td>1,024</td><td>2048</td><td>2000</td><td>1,408,576</td></tr>\n</table>\n"
    )
    flags = ("Took=step_s:0.001", "Batch size=global_batch")
    assert kinds_of(tmp_path, "x.html", html, *flags) == [("rate", 4)]
    assert kinds_of(tmp_path, "x.html", html) == []  # `Took` says nothing


def test_equal_results_of_another_batch_size_or_layout_are_found(tmp_path):
    head = "gpus,tp,pp,dp,micro_batch,global_batch,seq,seconds_per_iteration\n"
    rows = "8,1,1,8,1,64,2048,1.23456\n8,2,1,4,1,64,2048,1.23456\n8,4,1,2,1,64,2048,1.41234\n"
    assert kinds_of(tmp_path, "x.csv", head + rows) == [("equal", 3)]


def test_annotations_mark_the_line_for_github(tmp_path, capsys):
    path = tmp_path / "x.md"
    path.write_text(SIDEWAYS)
    assert main([str(path), "--format", "github"]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"::error file={path},line=12,title=rate::Throughput in tokens")
    assert main([str(path), "--mapping", "nonsense"]) == 2
    assert "write HEADING=NAME" in capsys.readouterr().err
    assert main([str(path), "--mapping", "GPUs=gpu_count"]) == 2
    assert "no such name" in capsys.readouterr().err


# Findings in each published table that are true (docs/audit.md, logs/published/*.md); the others
# have none.
TRUE = {
    "seed003_jeanzay_v100": 15,
    "internevo_a100": 8,
    "gpt2_data_parallel": 7,  # wall clocks, commits
    "dgx_h100": 4,
    "bigscience_tr11_a100": 3,
    "bigscience_tr8_104b_v100": 2,
}


@pytest.mark.parametrize(
    "folder", [PUBLISHED, pytest.param(SHARED / "published", marks=needs_shared)]
)
def test_published_tables_have_their_true_findings_and_no_other(folder):
    found = {path.stem: audit_paths([path])[0] for path in sorted(folder.glob("*.csv"))}
    wrong = {name: list(map(str, f)) for name, f in found.items() if len(f) != TRUE.get(name, 0)}
    assert found and not wrong


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--mapping", "Tokes=gpus"], "--mapping Tokes: no table that was read has this heading"),
        (["--mapping", "GPUs="], "--mapping GPUs=: write HEADING=NAME"),
        (["--gpu-type", "H1000"], "unknown GPU 'H1000'"),
    ],
)
def test_a_flag_that_would_change_nothing_is_a_mistake(tmp_path, capsys, flags, said):
    path = tmp_path / "good.md"
    path.write_text("| GPUs | TP | PP | DP |\n|---|---|---|---|\n| 8 | 2 | 2 | 2 |\n")
    assert main([str(path), *flags]) == 2
    assert said in capsys.readouterr().err


def test_a_file_that_does_not_exist_does_not_pass(tmp_path):
    path = tmp_path / "good.md"
    path.write_text("| GPUs | TP | PP | DP |\n|---|---|---|---|\n| 8 | 2 | 2 | 2 |\n")
    assert main([str(path), str(tmp_path / "god.md")]) == 2
