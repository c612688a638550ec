"""Each rule of the audit finds what it is for, in the cell where it stands, and nothing beside."""

import pytest

from analysis.published.audit import audit_paths
from analysis.published.headings import meaning

HEAD = "gpus,tp,pp,dp,global_batch,seq,seconds_per_iteration,tokens_per_s"


def audited(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return audit_paths([path])[0]


def found(tmp_path, name, text):
    """(kind, line, printed) of every finding."""
    return [(f.kind, f.line, f.printed) for f in audited(tmp_path, name, text)]


def csv(*rows, head=HEAD):
    return "\n".join([head, *rows]) + "\n"


def cases(*pairs):
    """One right and one wrong text a rule."""
    return pytest.mark.parametrize(("text", "wrong"), pairs)


RUNS = [
    "8,1,1,8,64,2048,2.0,65536",
    "16,1,1,16,128,2048,2.1,124830",
    "32,1,1,32,256,2048,2.2,238313",
]


@cases((csv(*RUNS, "64,1,1,64,512,2048,2.25,466034"), []))
def test_rows_that_agree_have_no_finding(tmp_path, text, wrong):
    assert found(tmp_path, "x.csv", text) == wrong


MEMORY = "gpus,gpu_type,seq,global_batch,seconds_per_iteration,mem_gb\n8,H100 SXM,2048,64,2.0,{}\n"


@cases((MEMORY.format("79.5"), []), (MEMORY.format("95.2"), [("memory", 2, "95.2")]))
def test_a_card_holds_no_more_than_its_memory(tmp_path, text, wrong):
    assert found(tmp_path, "x.csv", text) == wrong


def units(last):
    head = "model,GPUs,tokens/s"
    rows = ["a,8,70000", "a,16,139000", "a,32,270000", f"a,64,{last}"]
    return csv(*rows, head=head)


@cases((units(512000), []), (units("512"), [("unit", 5, "512")]))
def test_a_row_in_another_unit_is_found(tmp_path, text, wrong):
    assert found(tmp_path, "x.csv", text) == wrong


def test_rows_that_are_far_from_each_other_have_no_outlier(tmp_path):
    """Different models on different cards: the slowest is slow, not in another unit."""
    rows = ["a,8,953.3", "b,8,40.1", "c,8,2.9", "d,8,0.7", "e,8,0.0042"]
    assert found(tmp_path, "x.csv", csv(*rows, head="log,gpus,tflops")) == []


BEST = "layout,gpus,tokens/s\n{},8,{}\ndp4 tp2,8,90000\ndp2 tp4,8,70000\n"


@cases(
    (BEST.format("dp8 (best)", 95000), []),
    (BEST.format("dp8 (best)", 85000), [("best", 2, "85000")]),
    (BEST.format("dp8", 85000), []),
)
def test_a_row_called_best_is_the_fastest_of_its_gpus(tmp_path, text, wrong):
    assert found(tmp_path, "x.csv", text) == wrong


DATES = csv(
    "8,1000.5,2024-05-01",
    "16,1900.7,2024-05-02",
    "32,3600.1,{}",
    "64,7000.2,2024-05-04",
    head="gpus,tokens/s,date",
)


@cases(
    (DATES.format("2024-05-03"), []),
    (DATES.format("03.05.2024"), [("date", 4, "03.05.2024")]),
    (DATES.format("2024-15-03"), [("date", 4, "2024-15-03")]),
)
def test_the_dates_of_a_column_have_one_form_and_exist(tmp_path, text, wrong):
    assert found(tmp_path, "x.csv", text) == wrong


@cases(
    (csv(*RUNS, *["32,1,1,32,256,2048,2.2,238313"] * 2), []),  # two digits may be equal by chance
    (csv(*RUNS, *["32,1,1,32,256,2048,2.2134,236870"] * 2), [("twice", 6, "2.2134")]),
)
def test_one_run_does_not_stand_twice(tmp_path, text, wrong):
    assert found(tmp_path, "x.csv", text) == wrong


def equal(time, rate):
    return csv(
        "16,1,1,16,128,2048,2.12,123652",
        f"16,2,1,8,128,2048,{time},{rate}",
        "16,4,1,4,128,2048,2.55,102801",
    )


@cases(
    (equal("2.12", "123652"), []),  # three digits may be equal by chance, and give the rate
    (equal("2.1234", "123454"), []),
    (
        csv("16,1,1,16,128,2048,2.1234,123454", "16,2,1,8,128,2048,2.1234,123454"),
        [("equal", 3, "2.1234")],
    ),
)
def test_equal_results_need_more_digits_than_chance_gives(tmp_path, text, wrong):
    assert found(tmp_path, "x.csv", text) == wrong


COMMITS = "gpus,tokens/s,commit\n8,1000.5,efa0448aaa\n16,1900.7,{}\n"


@cases(
    (COMMITS.format("efa0448aaa"), []),
    (COMMITS.format("bfcef35bbb"), [("commits", 2, "")]),
)
def test_rows_of_different_commits_are_compared(tmp_path, text, wrong):
    assert found(tmp_path, "x.csv", text) == wrong


WALL = "gpus,tokens,tokens_per_s,wall_s\n8,1000000,5000,{}\n"


@cases((WALL.format("201"), []), (WALL.format("230"), [("wall clock", 2, "230")]))
def test_a_wall_clock_holds_the_tokens_alone(tmp_path, text, wrong):
    assert found(tmp_path, "x.csv", text) == wrong


FAR = "gpus,tp,seconds_per_iteration,notes\n8,2,2.00,{}\n8,2,2.60,{}\n"


@cases(
    (FAR.format("", ""), [("repeats", 2, "2.00")]),
    (FAR.format("05-25", "05-27"), [("repeats", 2, "2.00")]),
    (FAR.format("shards over 8 ranks", "shards over all ranks"), []),
)
def test_identical_rows_are_near_unless_a_note_tells_them_apart(tmp_path, text, wrong):
    assert found(tmp_path, "x.csv", text) == wrong


NODES = "nodes,gpus,tokens/s\n1,8,1000\n2,16,1950\n4,32,3800\n8,{},7400\n"


@cases((NODES.format(64), []), (NODES.format(32), [("gpus", 5, "32")]))
def test_nodes_have_the_same_gpus_each(tmp_path, text, wrong):
    assert found(tmp_path, "x.csv", text) == wrong


UTILISED = (
    "gpus,gpu_type,precision,tflops/gpu,mfu\n8,H100 SXM,bf16,400,{}\n16,H100 SXM,bf16,380,38.4%\n"
)


@cases((UTILISED.format("40.4%"), []), (UTILISED.format("44.0%"), [("mfu", 2, "44.0%")]))
def test_mfu_is_the_share_of_the_cards_peak(tmp_path, text, wrong):
    assert found(tmp_path, "x.csv", text) == wrong


STALE = "gpus,step time (s),tokens/s\n8,2.10,31207.6\n8,2.45,{}\n"


@cases((STALE.format("26749.4"), []), (STALE.format("31207.6"), [("rate", 3, "31207.6")]))
def test_one_rate_does_not_stand_beside_two_times(tmp_path, text, wrong):
    assert found(tmp_path, "x.csv", text) == wrong


# ---- totals and shares -------------------------------------------------------------------------

TOTAL = """
| Phase | Time (s) | Calls |
|---|---|---|
| forward | 1.25 | 12 |
| backward | 2.51 | 24 |
| all-reduce | 0.44 | 6 |
| **Total** | **{}** | {} |
"""


@cases(
    (TOTAL.format("4.20", 42), []),
    (TOTAL.format("4.21", 42), []),  # rounding of three numbers
    (TOTAL.format("4.60", 42), [("sum", 7, "**4.60**")]),
    (TOTAL.format("4.20", 24), []),  # the largest part: it counts calls, not their sum
    (TOTAL.format("4.20", 45), [("sum", 7, "45")]),
)
def test_a_total_row_is_the_sum_of_its_parts(tmp_path, text, wrong):
    assert found(tmp_path, "x.md", text) == wrong


PARTS = """
| Run | Forward s | Backward s | Comm s | Total s |
|---|---|---|---|---|
| a | 1.25 | 2.50 | 0.45 | 4.20 |
| b | 1.35 | 2.70 | 0.55 | 4.60 |
| c | 1.45 | 2.90 | 0.65 | {} |
"""


@cases((PARTS.format("5.00"), []), (PARTS.format("5.90"), [("sum", 6, "5.90")]))
def test_a_total_column_is_the_sum_of_the_columns_beside_it(tmp_path, text, wrong):
    assert found(tmp_path, "x.md", text) == wrong


def test_a_total_that_no_row_sums_to_is_something_else(tmp_path):
    text = PARTS.replace("4.20", "9.1").replace("4.60", "9.2").format("9.3")
    assert found(tmp_path, "x.md", text) == []


def test_a_total_of_rates_is_no_sum(tmp_path):
    text = "| Run | Steps | Tokens/s |\n|---|---|---|\n| a | 100 | 5,001 |\n| b | 200 | 6,002 |\n"
    assert found(tmp_path, "x.md", text + "| Total | 300 | 7,003 |\n") == []


def test_a_total_that_few_rows_sum_to_is_something_else(tmp_path):
    text = PARTS.replace("| 4.60", "| 9.2").format("9.3") + "| d | 1.5 | 2.5 | 0.5 | 4.50 |\n"
    assert found(tmp_path, "x.md", text + "| e | 1.6 | 2.5 | 0.5 | 9.50 |\n") == []


SHARES = """
| Kernel | ms | Share of time |
|---|---|---|
| gemm | 50.0 | 50.0 % |
| attention | 30.0 | {} % |
| norm | 15.0 | 15.0 % |
| other | 5.0 | 5.0 % |
"""


@cases((SHARES.format("30.0"), []), (SHARES.format("33.0"), [("sum", 5, "33.0 %")]))
def test_a_share_is_its_rows_part_of_the_column_beside_it(tmp_path, text, wrong):
    assert found(tmp_path, "x.md", text) == wrong


ALONE = "| Kernel | Share of time (%) |\n|---|---|\n| a | 53.9 |\n| b | 40.8 |\n| c | {} |\n"


@cases((ALONE.format("5.3"), []), (ALONE.format("9.3"), [("sum", 5, "9.3")]))
def test_a_column_of_shares_makes_100(tmp_path, text, wrong):
    assert found(tmp_path, "x.md", text) == wrong


ROWS = """
| GPUs | Compute % | Comm % | Idle % |
|---|---|---|---|
| 8 | 80.0 | 15.0 | 5.0 |
| 16 | 75.0 | 18.0 | 7.0 |
| 32 | 70.0 | {} | 9.0 |
"""


@cases((ROWS.format("21.0"), []), (ROWS.format("12.0"), [("sum", 6, "9.0")]))
def test_the_shares_of_a_row_make_100_as_in_the_others(tmp_path, text, wrong):
    assert found(tmp_path, "x.md", text) == wrong


# ---- ideals and bounds -------------------------------------------------------------------------

IDEAL = """
| GPUs | Speedup | Ideal speedup |
|---|---|---|
| 1 | 1.00 | 1 |
| 2 | 1.95 | 2 |
| 4 | 3.80 | 4 |
| 8 | 7.10 | {} |
"""
IDEAL_S = """
| GPUs | Step time (s) | Ideal time (s) |
|---|---|---|
| 1 | 8.00 | 8.00 |
| 2 | 4.20 | 4.00 |
| 4 | 2.30 | 2.00 |
| 8 | 1.20 | {} |
"""


@cases(
    (IDEAL.format("8"), []),
    (IDEAL.format("9"), [("ideal", 7, "9")]),
    (IDEAL_S.format("1.00"), []),
    (IDEAL_S.format("1.10"), [("ideal", 7, "1.10")]),
)
def test_an_ideal_is_the_base_times_the_gpus(tmp_path, text, wrong):
    assert found(tmp_path, "x.md", text) == wrong


def test_a_constant_ideal_is_weak_scaling(tmp_path):
    text = IDEAL_S.replace("4.00", "8.00").replace("| 2.00", "| 8.00").format("8.00")
    text = text.replace("4.20", "8.2").replace("2.30", "8.3").replace("1.20", "8.4")
    assert found(tmp_path, "x.md", text) == []


ROOF = """
| GPUs | TFLOP/s per GPU | Roofline TFLOP/s per GPU |
|---|---|---|
| 8 | {} | 420 |
| 16 | 390 | 415 |
"""


@cases((ROOF.format("401"), []), (ROOF.format("431"), [("bound", 4, "431")]))
def test_no_result_is_above_its_own_bound(tmp_path, text, wrong):
    assert found(tmp_path, "x.md", text) == wrong


# ---- claims in prose ---------------------------------------------------------------------------

PROSE = """# Results

{}

| GPUs | Layout | Tokens/s | MFU | Speedup | Efficiency |
|---|---|---|---|---|---|
| 1 | dp1 | 10,000 | 40.0% | 1.00 | 100% |
| 4 | tp2 dp2 | 34,100 | 34.1% | 3.41 | 85.3% |
| 8 | tp2 pp4 | 58,100 | 29.1% | 5.81 | 72.6% |
| 8 | tp4 pp2 | 52,000 | 26.0% | 5.20 | 65.0% |
"""


@pytest.mark.parametrize(
    ("sentence", "kinds"),
    [
        ("We reach a 5.81x speedup on 8 GPUs.", []),
        ("We reach a 5.8x speedup on 8 GPUs.", []),
        ("We reach a 7.6x speedup on 8 GPUs.", ["claim"]),
        ("Scaling from 1 to 8 GPUs gives a speedup of 7.6x.", ["claim"]),
        ("Going from 4 to 8 GPUs is 1.70x faster.", []),
        ("The speedup is 3.41x on 4 GPUs and 5.81x on 8 GPUs.", []),
        ("An ideal speedup of 8x on 8 GPUs is out of reach.", []),
        ("On 16 GPUs we saw a 9x speedup.", []),  # no such row
        ("It runs at about 5.5x speedup on 8 GPUs.", []),
        ("It runs at about 4.5x speedup on 8 GPUs.", ["claim"]),
        ("This is 73 % scaling efficiency on 8 GPUs.", []),
        ("This is 95 % efficiency on 8 GPUs.", ["claim"]),
        ("Efficiency of 85 % at 4 GPUs.", []),
        ("We get 34 % MFU on 4 GPUs.", []),
        ("We get 47 % MFU on 4 GPUs.", ["claim"]),
        ("It trains at 58,100 tokens/s on 8 GPUs.", []),
        ("It trains at 7.26k tokens/s per GPU on 8 GPUs.", []),
        ("It trains at 85,100 tokens/s on 8 GPUs.", ["claim"]),
        ("The 8 GPUs are 5.8 times faster than one.", []),
        ("The 8 GPUs are 7.6 times faster than one.", ["claim"]),
        ("A speedup of 5.81 on 8 GPUs.", []),
        ("A speedup of 6.4 on 8 GPUs.", ["claim"]),
        ("The scaling efficiency is 0.95 on 8 GPUs.", ["claim"]),
        ("tp2 pp4 is 12 % faster than tp4 pp2 on 8 GPUs.", []),
        ("tp2 pp4 is 19 % faster than the other on 8 GPUs.", ["claim"]),
        ("tp4 pp2 reaches 52,000 tokens/s on 8 GPUs.", []),
        ("tp4 pp2 reaches 58,100 tokens/s.", ["claim"]),  # those of tp2 pp4
        ("On 2 nodes it trains at 99,000 tokens/s.", []),  # the table has no nodes
        ("With fp8 it trains at 99,000 tokens/s on 16 GPUs.", []),
        ("The best layout on 8 GPUs is tp2 pp4.", []),
        ("Best: tp4 pp2.", ["best"]),
        ("The fastest on 8 GPUs is TP=4, PP=2.", ["best"]),
        ("tp4 pp2 needs the least memory, and is best for long sequences.", []),
    ],
)
def test_a_claim_in_prose_agrees_with_the_rows_of_its_document(tmp_path, sentence, kinds):
    text = PROSE.format(sentence)
    assert [f.kind for f in audited(tmp_path, "x.md", text)] == kinds
    table = "".join(
        "<tr>"
        + "".join(f"<td>{cell.strip()}</td>" for cell in line.strip("|").split("|"))
        + "</tr>"
        for line in text.splitlines()
        if line.startswith("|") and "---" not in line
    )
    page = f"<h1>Results</h1>\n<p>{sentence}</p>\n<table>{table}</table>\n"
    assert [f.kind for f in audited(tmp_path, "x.html", page)] == kinds


def test_a_claim_about_another_model_precision_or_number_of_nodes_is_of_other_rows(tmp_path):
    table = (
        "\n\n| Nodes | GPUs | Params | Precision | Tokens/s |\n|---|---|---|---|---|\n"
        "| 1 | 8 | 7B | bf16 | 80,100 |\n| 2 | 16 | 7B | bf16 | 155,300 |\n"
    )
    for sentence, kinds in (
        ("The 7B model trains at 80,100 tokens/s on 8 GPUs.", []),
        ("The 7B model trains at 99,000 tokens/s on 8 GPUs.", ["claim"]),
        ("The 13B model trains at 99,000 tokens/s on 8 GPUs.", []),
        ("With fp8 it trains at 99,000 tokens/s on 8 GPUs.", []),
        ("On 2 nodes it trains at 155k tokens/s.", []),
        ("On 2 nodes it trains at 199k tokens/s.", ["claim"]),
    ):
        assert [f.kind for f in audited(tmp_path, "x.md", sentence + table)] == kinds, sentence


def test_a_claim_is_found_on_the_line_where_its_sentence_begins(tmp_path):
    text = PROSE.format("Some words first.\nWe reach a 7.6x\nspeedup on 8 GPUs.")
    (finding,) = audited(tmp_path, "x.md", text)
    assert (finding.line, finding.printed) == (4, "7.6")
    assert float(finding.expected) == pytest.approx(5.81, rel=0.01)


# ---- tables of one document, files of one call -----------------------------------------------

TWO = """## All

| GPUs | TP | Tokens/s |
|---|---|---|
| 8 | 1 | 65,536.1 |
| 8 | 2 | 61,123.7 |
| 16 | 1 | 120,333.4 |

## {}

| GPUs | TP | Tokens/s |
|---|---|---|
| 8 | {} | {} |
"""


@cases(
    (TWO.format("Best layouts", 1, "65,536.1"), []),
    (TWO.format("Best layouts", 2, "61,123.7"), [("best", 13, "61,123.7")]),
    (TWO.format("Other runs", 2, "61,123.7"), []),
    (TWO.format("Other runs", 4, "61,123.7"), [("equal", 13, "61,123.7")]),
)
def test_the_tables_of_a_document_agree_with_each_other(tmp_path, text, wrong):
    assert found(tmp_path, "x.md", text) == wrong


def log(layout, times):
    lines = [
        f" iteration {i:8}/      10 | consumed samples: {i * 64:12} | elapsed time per iteration"
        f" (ms): {ms} | learning rate: 1.0E-04 | global batch size:    64 | lm loss: 9.{i}E+00 |"
        for i, ms in enumerate(times, 1)
    ]
    return f"using world size: 8, data-parallel-size: {layout}\n" + "\n".join(lines) + "\n"


def test_equal_evidence_in_two_files_is_found(tmp_path):
    times = ["1001.3", "998.7", "1003.2", "999.1", "1000.4", "1002.8"]
    (tmp_path / "a.log").write_text(log(8, times))
    (tmp_path / "b.log").write_text(log(4, times))  # another layout, the same times
    (tmp_path / "c.log").write_text(log(8, times))  # the same bytes
    (tmp_path / "d.log").write_text(log(8, times[::-1]))
    findings = audit_paths([tmp_path / f"{name}.log" for name in "abcd"])[0]
    kinds = {(f.kind, f.file.rpartition("/")[2]) for f in findings}
    assert kinds == {("twice", "b.log"), ("twice", "c.log")}


def test_two_tables_of_the_same_bytes_are_found(tmp_path):
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text(csv(*RUNS))
    (tmp_path / "c.csv").write_text(csv(*RUNS[:2]))
    findings = audit_paths([tmp_path / name for name in ("a.csv", "b.csv", "c.csv")])[0]
    assert [(f.kind, f.file.rpartition("/")[2]) for f in findings] == [("twice", "b.csv")]


# ---- columns -----------------------------------------------------------------------------------


def test_sequence_parallel_is_no_sequence_length(tmp_path):
    text = csv("8,1,64,1.5,40000", head="gpus,seq_parallel,global_batch,step_s,tokens_per_s")
    assert found(tmp_path, "x.csv", text) == []


def test_a_card_without_a_precision_is_likely_above_its_usual_peak(tmp_path):
    head = "gpus,gpu_type,tflops/gpu"
    (one,) = audited(tmp_path, "x.csv", csv("8,H100 SXM,1100", head=head))
    assert (one.kind, one.sure) == ("peak", "likely")  # fp8 may explain it
    (two,) = audited(tmp_path, "x.csv", csv("8,H100 SXM,2100", head=head))
    assert (two.kind, two.sure) == ("peak", "certain")


def test_what_tells_the_odd_rows_of_a_jump_apart_is_said(tmp_path):
    rows = [(1, "400"), (1, "400"), (1, "400"), (2, "467")]
    lines = [f"8,{pp},7,4096,{10000 * n},{tflops}" for n, (pp, tflops) in enumerate(rows, 1)]
    lines = [f"8,{pp},7,4096,{70000},{tflops}" for pp, tflops in rows]
    text = csv(*lines, head="gpus,pp,params_b,seq,tokens_per_s,tflops")
    findings = [f for f in audited(tmp_path, "x.csv", text) if f.kind == "jump"]
    assert [f.line for f in findings] == [5]
    assert "pp 2" in findings[0].message


def test_a_count_of_flops_is_no_rate_and_a_date_names_no_card(tmp_path):
    head = "gpus,tp,flops,started"
    rows = [f"8,{tp},641728512.0,2026-11-21T11:17:12Z" for tp in (1, 2, 4)]
    assert found(tmp_path, "x.csv", csv(*rows, head=head)) == []
    rows = ["2,2,2,2026-11-21T11:17:12Z"]
    assert found(tmp_path, "x.csv", csv(*rows, head="tp,pp,dp,started")) == []
    rows = [f"8,H100 SXM,{flops}" for flops in ("4.01e14", "4.13e14", "1.21e15")]
    kinds = found(tmp_path, "x.csv", csv(*rows, head="gpus,gpu_type,FLOP/s per GPU"))
    assert kinds == [("peak", 4, "1.21e15")]


def test_labels_in_words_do_not_turn_a_table_on_its_side(tmp_path):
    text = "| file | killed | left |\n|---|---|---|\n| models/memory.py | 90 | 1 |\n"
    text += "".join(f"| part{n}.py | {n} | 29 |\n" for n in range(4))
    assert found(tmp_path, "x.md", text) == []


def test_peaks_of_cards_are_no_results_and_a_caption_names_the_precision(tmp_path):
    peaks = "| Type | B200 TFLOPS | Since |\n|---|---|---|\n| tf32 | 1125 | A100 |\n"
    peaks += "| fp16 | 2250 | P100 |\n"
    assert found(tmp_path, "x.md", peaks) == []
    table = "**{}:**\n\n| GPU | TFLOPS |\n|---|---|\n| H200 SXM | 1453.4 |\n| B200 SXM | 3432.5 |\n"
    assert found(tmp_path, "x.md", table.format("FP8")) == []
    kinds = [("peak", 5, "1453.4"), ("peak", 6, "3432.5")]
    assert found(tmp_path, "x.md", table.format("BF16")) == kinds


def test_versions_of_repositories_are_no_runs_of_different_commits(tmp_path):
    text = "| Repository | Commit | Date |\n|---|---|---|\n| a | 38410cf | 2025-06-01 |\n"
    assert found(tmp_path, "x.md", text + "| b | 624304a | 2025-06-02 |\n") == []


def test_every_run_of_a_table_on_its_side_is_named(tmp_path):
    """A row of such a table holds the cells of all runs: each odd one is a finding."""
    text = "| GPU Number | 8 | 16 | 32 | 64 | 128 |\n|---|---|---|---|---|---|\n"
    text += "| TGS (Tokens/GPU/Second) | 4000 | 3900 | 3800 | 3700 | 3600 |\n"
    text += "| TFLOPS | 200 | 195 | 190 | 195 | 190 |\n"
    assert found(tmp_path, "x.md", text) == [("jump", 4, "195"), ("jump", 4, "190")]


def test_equal_results_of_long_tables_may_be_chance(tmp_path):
    rows = [f"8,{n},{60 + 0.17 * min(n, 78):.2f}" for n in range(80)]  # the last two are equal
    text = csv(*rows, head="gpus,micro_batch,mfu (%)")
    assert found(tmp_path, "x.csv", text) == []
    text = csv(*rows[-4:], head="gpus,micro_batch,mfu (%)")
    assert found(tmp_path, "x.csv", text) == [("equal", 5, "73.26")]


def test_the_gpus_of_one_replica_leave_dp_out(tmp_path):
    text = "TP=8, PP=10 - 80 GPUs{}, can fit DP=4.\n"
    assert found(tmp_path, "x.md", text.format(" for one replica")) == []
    assert [kind for kind, *_ in found(tmp_path, "x.md", text.format(""))] == ["gpus"]


def test_bytes_a_second_are_no_batch():
    assert meaning("GB/s") is None and meaning("GBS").name == "global_batch"


def test_cells_of_html_that_reach_into_rows_below_do_not_shift_columns(tmp_path):
    head = "<tr><th rowspan=2>Nodes</th><th rowspan=2>GPUs</th><th colspan=2>Split</th>"
    head += "<th rowspan=2>Model</th></tr><tr><th>TP</th><th>PP</th></tr>"
    rows = "<tr><td>1</td><td>8</td><td>2</td><td>1</td><td rowspan=3>7B</td></tr>"
    rows += "<tr><td>2</td><td>16</td><td>2</td><td>2</td></tr>"
    rows += "<tr><td>4</td><td>30</td><td>2</td><td>2</td></tr>"
    path = tmp_path / "x.html"
    path.write_text(f"<table>{head}{rows}</table>")
    says: list[str] = []
    found_here = audit_paths([path], says=says)[0]
    expected = "'Nodes' = nodes, 'GPUs' = gpus, 'Split TP' = tp, 'Split PP' = pp, 'Model' = model"
    assert says[0].split(";")[0] == f"{path}:1: {expected}"
    (finding,) = found_here
    assert finding.message == "tp x pp x cp = 4 does not divide 30 GPUs"


GERMAN = """| GPUs | Tokens/s | Speedup |
|---|---|---|
| 8 | 67.298 | 1,00 |
| 16 | 131.547 | 1,95 |
| 128 | 909.491 | {} |
"""


@cases((GERMAN.format("13,51"), []), (GERMAN.format("15,31"), [("speedup", 5, "15,31")]))
def test_numbers_with_decimal_commas_are_read(tmp_path, text, wrong):
    assert found(tmp_path, "x.md", text) == wrong


def test_a_cell_that_is_not_one_number_is_named_and_not_cut(tmp_path):
    path = tmp_path / "x.md"
    table = "| GPUs | Tokens/s | Step (s) |\n|---|---|---|\n| 8 | 42,54 | 1.5 |\n"
    path.write_text(table + "| 16 | 10,000 | 9.8-10.2 |\n")
    says: list[str] = []
    assert audit_paths([path], says=says)[0] == []
    said = "; not read as one number: '42,54' on line 3, '9.8-10.2' on line 4"
    assert said in says[0]


@pytest.mark.parametrize(
    ("heading", "name"),
    [
        ("Seq./s", "samples_per_s"),
        ("Sec./iter.", "step_s"),
        ("config/world_size", "gpus"),
        ("perf.mfu", "mfu"),
        ("No. of params", "params_b"),
    ],
)
def test_abbreviated_and_grouped_headings_are_known(heading, name):
    assert meaning(heading).name == name


def test_a_finding_is_said_in_the_words_and_units_of_the_table(tmp_path):
    text = "| GPUs | Iteration time (ms) | Efficiency |\n|---|---|---|\n| 8 | 31160 | 100.0% |\n"
    (finding,) = audited(tmp_path, "x.md", text + "| 128 | 2310 | 94.5% |\n")
    assert finding.message == (
        "Efficiency 94.5%: Iteration time (ms) 31160 on 8 GPUs and 2310 on 128 GPUs give 84.31 %"
    )
    text = csv(*RUNS, "64,1,1,64,512,2048,2.25,566034").replace("tokens_per_s", "Rate (tok/s)")
    (finding,) = audited(tmp_path, "x.csv", text)
    said = "1,048,576 tokens a step / 2.25 s give 466,034/s, +22 %"
    assert finding.message == f"Rate (tok/s) 566034: {said}"


CLAIM = """| GPUs | Step (s) | Speedup |
|---|---|---|
| 8 | 31.16 | 1.00 |
| 64 | 4.25 | 7.33 |
| 128 | 2.31 | 13.49 |

{}
"""


@cases(
    (CLAIM.format("At 64 GPUs one iteration takes 4.25 seconds."), []),
    (CLAIM.format("At 64 GPUs one iteration takes 2.45 seconds."), [("claim", 7, "2.45seconds")]),
    (CLAIM.format("At 64 GPUs an iteration takes 27 s less than on 8."), []),
    (CLAIM.format("128 GPUs reach an efficiency of 84 % over 8 GPUs."), []),
    (CLAIM.format("128 GPUs reach an efficiency of 94 % over 8 GPUs."), [("claim", 7, "94")]),
)
def test_seconds_of_an_iteration_and_what_is_compared_are_read_in_sentences(tmp_path, text, wrong):
    assert found(tmp_path, "x.md", text) == wrong


NODES = """| Nodes | DP | TP | PP | GBS | Sec/it | TFLOPs |
|---|---|---|---|---|---|---|
| 32 | 2 | 4 | 16 | 1024 | 160.0 | 85.2 |
| 64 | 4 | 4 | 16 | 1024 | 82.5 | 82.6 |
| 64 | 8 | 4 | 8 | 2048 | 170.2 | {} |
| 64 | {} | 4 | 32 | 1024 | 84.7 | 80.5 |
"""


@cases(
    (NODES.format(80.1, 2), []),
    (NODES.format(160.2, 2), [("jump", 5, "160.2")]),
    (NODES.format(80.1, 4), [("gpus", 6, "4"), ("jump", 6, "80.5")]),
)
def test_gpus_that_no_column_states_come_from_nodes_and_layouts(tmp_path, text, wrong):
    assert found(tmp_path, "x.md", text) == wrong


def test_slices_of_one_card_have_one_peak(tmp_path):
    head = "| Accelerator Type | TFLOP/s/chip | MFU |\n|---|---|---|\n"
    rows = ["v5p-128 | 328 | 71.5%", "v5p-256 | 323 | 70.4%", "v5p-512 | 315 | 86.7%"]
    text = head + "".join(f"| {row} |\n" for row in [*rows, "v5p-1024 | 316 | 68.8%"])
    assert found(tmp_path, "x.md", text) == [("mfu", 5, "86.7%")]


SIZES = """| Model | GPUs | Iteration time | Global batch |
|---|---|---|---|
| 22B | 8 | 1.10 s | 4 |
| 175B | 64 | 13.75 s | 64 |
| 530B | 280 | {} s | 280 |
| 1T | 512 | 71.49 s | 512 |
"""


@cases((SIZES.format("37.83"), []), (SIZES.format("0.3783"), [("unit", 5, "0.3783 s")]))
def test_models_of_other_sizes_are_no_other_unit(tmp_path, text, wrong):
    assert found(tmp_path, "x.md", text) == wrong


def test_steps_of_one_run_are_no_configurations(tmp_path):
    rows = [f"{i},{3 - 0.01 * i:.3f},524288.1,4.0123" for i in range(1, 5)]
    text = csv(*rows, head="{},loss,tokens_per_s,step_time")
    assert found(tmp_path, "x.csv", text.format("step")) == []
    assert {kind for kind, *_ in found(tmp_path, "y.csv", text.format("layers"))} == {"equal"}


def test_a_second_number_of_gpus_in_a_sentence_needs_no_unit(tmp_path):
    said = "Efficiency is good: 92 % efficiency on 64 GPUs, {} % efficiency on 128."
    table = "| GPUs | Step (s) |\n|---|---|\n| 16 | 21.843 |\n| 64 | 5.946 |\n| 128 | 3.255 |\n\n"
    assert found(tmp_path, "x.md", table + said.format(84)) == []
    assert found(tmp_path, "y.md", table + said.format(74)) == [("claim", 7, "74")]


BOTH = "gpus,s/iter,tokens/s,speedup\n1,8.0,1000,1.00\n2,{},1980,1.98\n4,2.1,3810,3.81\n"
BOTH += "8,1.1,7270,7.27\n"


@cases(
    (BOTH.format("4.04"), []), (BOTH.format("8.08"), [("rate", 3, "1980"), ("speedup", 3, "8.08")])
)
def test_a_time_gives_the_speedup_that_the_rate_beside_it_gives(tmp_path, text, wrong):
    assert found(tmp_path, "x.csv", text) == wrong


def test_in_weak_scaling_the_times_give_no_speedup(tmp_path):
    weak = "gpus,s/iter,tokens/s,speedup\n1,8.0,1000,1.00\n2,8.1,1975,1.98\n4,8.2,3902,3.90\n"
    assert found(tmp_path, "x.csv", weak) == []


LAYOUTS = "gpus,layout,tokens/s\n8,tp2 dp4,1000\n16,{},1900\n"


@cases(
    (LAYOUTS.format("tp2 dp8"), []),
    (LAYOUTS.format("tp4 dp8"), [("gpus", 3, "16")]),
    (LAYOUTS.format("tp4 pp2"), []),  # dp follows
)
def test_a_layout_in_words_that_names_dp_is_whole(tmp_path, text, wrong):
    assert found(tmp_path, "x.csv", text) == wrong
