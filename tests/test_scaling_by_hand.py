"""What may be compared, what a curve's rows say, and who shared a host: cases made by hand."""

import dataclasses

import pytest

from analysis.logs.record import Record
from analysis.runs import fairness, scaling_curve, shared_hosts
from analysis.runs.fairness import batch_per_gpu, differences
from analysis.runs.ratio import Side, above_linear, against
from analysis.runs.scaling_curve import curve, table
from analysis.runs.shared_hosts import shared_cores
from base.errors import UsageError
from base.intervals import Interval
from tests.fixture_runs import curve_of, facts, logged, write

RUN = Record(
    "a.log",
    "a format",
    gpus=8,
    global_batch=64,
    seq_len=1024,
    precision="bf16",
    recompute="full",
    gpu_type="A100",
    commit="0123456789abcdef",
    facts={"spec": {"reset_at_documents": False}},
    params=1.5e9,
    model={"n_layer": 12, "hidden": 768},
)


def other(**changes):
    return dataclasses.replace(RUN, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seq_len": 2048}, "sequence length 2048 here, 1024 in the baseline"),
        ({"global_batch": 32}, "global batch 32 here, 64 in the baseline"),
        ({"precision": "fp16"}, "precision fp16 here, bf16 in the baseline"),
        ({"recompute": "none"}, "recompute none here, full in the baseline"),
        ({"gpu_type": "H100"}, "processor H100 here, A100 in the baseline"),
        (
            {"commit": "fedcba9876543210"},
            "commit fedcba9876 here, 0123456789 in the baseline (--any-commit ",
        ),
        ({"commit": RUN.commit + "+dirty"}, "commit 0123456789+dirty here, 0123456789 in the"),
        ({"facts": {"spec": {"reset_at_documents": True}}}, "reset_at_documents True here, False"),
        ({"model": {"n_layer": 24, "hidden": 768}}, "model n_layer 24 here, 12 in the baseline"),
        ({"params": 2e9, "model": {}}, "parameters 2000000000.0 here, 1500000000.0 in the"),
        ({"model": {"n_layer": 12, "n_head": 4}}, ""),  # of what both state nothing differs
        ({"params": 2e9}, ""),  # sizes say more than a count that is rounded
        ({"gpus": 16, "engine": "ddp", "tp": 2}, ""),  # what a study varies
        (dict.fromkeys(("seq_len", "precision", "commit", "gpu_type")) | {"facts": {}}, ""),
    ],
)
def test_what_is_fixed_must_be_equal_where_both_state_it(changes, words):
    lines = differences(other(**changes), RUN)
    assert len(lines) == len(differences(RUN, other(**changes))) == bool(words)
    assert "".join(lines).startswith(words)


def test_weak_scaling_compares_the_batch_of_a_gpu_and_any_commit_overlooks_only_the_commit():
    assert batch_per_gpu(RUN) == 8
    assert batch_per_gpu(other(global_batch=None)) is None
    assert batch_per_gpu(other(gpus=None)) is batch_per_gpu(other(gpus=0)) is None
    assert differences(other(gpus=16, global_batch=128), RUN, "weak") == []
    (line,) = differences(other(gpus=16), RUN, "weak")
    assert line == "batch per GPU 4.0 here, 8.0 in the baseline"
    changed = other(commit="f" * 40, gpu_type="H100")
    assert [d.split()[0] for d in differences(changed, RUN)] == ["commit", "processor"]
    assert [d.split()[0] for d in differences(changed, RUN, any_commit=True)] == ["processor"]


def test_what_a_run_does_not_state_is_named_and_so_are_changed_trees():
    """A model is stated by its sizes or by its count."""
    for stated in ({}, {"params": None}, {"model": {}}):
        assert fairness.unstated([RUN, other(**stated)]) == []
    neither = other(params=None, model={})
    assert fairness.unstated([neither] * 2) == ["model"]
    assert fairness.unstated([neither]) == []  # beside no other run nothing is compared
    some = [RUN, neither, other(seq_len=None), other(precision=None)]
    assert fairness.unstated(some) == ["sequence length", "precision", "model"]
    dirty = other(source="b.log", commit="0123456789abcdef+dirty")
    assert fairness.changed([RUN, dirty, other(commit=None)]) == [f"{fairness.CHANGED}: b.log"]
    assert fairness.changed([dirty] * 2) == [f"{fairness.CHANGED}: all"]
    assert fairness.changed([RUN] * 2) == []


def why(ratio):
    (reason,) = ratio.reasons
    return reason.text


def test_every_efficiency_that_is_printed_above_1_has_a_note_with_its_interval():
    assert above_linear(1.005, 2) == ""
    superlinear = above_linear(1.006, 2)
    assert "efficiency 1.01 is above 1" in superlinear and superlinear.endswith("machine)")
    assert above_linear(2.5, 1).endswith("as many GPUs: the baseline shared its machine?")
    for low, word in ((1.0, "may be 1"), (1.01, "superlinear")):
        note = above_linear(1.5, 2, Interval(low, 1.75))
        assert word in note and f"efficiency 1.50 ({low:.2f} to 1.75)" in note
    side, base = Side("s", 2, (0.4,), Interval(0.3, 0.45)), Side("b", 1, (1.0,), Interval(0.9, 1.2))
    assert "1.25 (1.00 to 2.00) may be 1" in why(against(side, base, "strong"))
    assert "1.25 is above 1" in why(against(Side("s", 2, (0.4,)), base, "strong"))
    beside = dataclasses.replace(side, shared="a ran beside b")
    withheld = against(beside, base, "strong")
    assert (withheld.speedup, why(withheld)) == (None, "no speedup: a ran beside b")
    assert why(against(base, beside, "strong")).endswith("the baseline a ran beside b")


def test_a_row_is_of_medians_and_says_how_far_apart_repeats_are():
    """Baseline 1.0 (0.8, 1.0, 1.8), two GPUs 0.5 (0.4, 0.5, 0.9): medians, not means."""
    one, two = Side("one", 1, (0.8, 1.0, 1.8)), Side("two", 2, (0.4, 0.5, 0.9))
    rows, share, _ = curve([two, one], one)
    assert [row["run"] for row in rows] == ["one", "two"]
    row = rows[1]
    assert (row["step_s"], row["fastest_s"], row["slowest_s"], row["n"]) == (0.5, 0.4, 0.9, 3)
    assert row["spread"] == pytest.approx((0.9 - 0.4) / 0.5)
    assert (row["speedup"], row["efficiency"], row["serial"], row["note"]) == (2.0, 1.0, 0.0, None)
    assert share == 0
    pair = curve([one, Side("b", 2, (0.5, 0.6))], one)[0][1]
    assert (pair["n"], pair["spread"]) == (2, pytest.approx(0.1 / 0.55))
    slow = Side("slow", 2, (1.0,), Interval(0.98, 1.02))
    (row, _), *_ = curve([slow, Side("fast", 2, (0.8, 0.9, 1.2))], slow)
    assert "efficiency 1.11 (0.82 to 1.27) may be 1" in row["note"]  # repeats say what is noise


def test_a_law_is_fitted_to_the_fastest_of_each_size_above_the_baselines():
    base, a = Side("base", 2, (1.0,)), Side("a", 4, (0.8,))
    b = Side("b", 4, (0.75,))
    assert curve([base, Side("half", 1, (5.0,)), a, b], base)[1] == pytest.approx(0.5)
    assert curve([base, b], base)[1] == pytest.approx(0.5)  # 1/S = 0.75 = f + (1 - f) / 2
    # Weak: twice the work in 1.25 of the time is 1.6 times the speed, 2 - f = 1.6.
    assert curve([base, Side("a", 4, (1.25,))], base, "weak")[1] == pytest.approx(0.4)
    slower = curve([base, Side("a", 4, (4.0,))], base)
    assert slower[1] == pytest.approx(7) and slower[0][1]["serial"] is None  # 4 = f + (1 - f) / 2


def on_host(name, began, ended, host="h", cores=4, ranks=2, threads=None, gpu=None, gpus=None):
    about = {"hostname": host, "cores": cores, "ranks_per_node": ranks, "gpu": gpu}
    spec = {"threads": threads} if threads else None
    facts = {"host": about, "spec": spec, "started_utc": began}
    return Record(name, "f", gpus=gpus, facts=facts, ended_utc=ended, run=name)


@pytest.mark.parametrize(
    ("second", "shared"),
    [
        (on_host("b", "11", "13", ranks=3), True),
        (on_host("b", "11", "13", ranks=2), False),  # four cores for four threads
        (on_host("b", "12", "13", ranks=3), False),  # when the first had ended
        (on_host("b", "09", "11", ranks=3), True),
        (on_host("b", "10", "12", ranks=1, threads=3), True),
        (on_host("b", "10", "12", ranks=1, threads=2), False),
        (on_host("b", "10", "12", ranks=None, gpus=3), True),  # of one node
        (on_host("b", "10", "12", ranks=3, cores=8), False),  # as many as either says
        (on_host("b", "10", "12", ranks=3, gpu="A100"), False),
        (on_host("b", "10", "12", ranks=3, host="i"), False),
        (on_host("b", None, "12", ranks=3), False),
        (Record("b", "f"), False),
    ],
)
def test_runs_with_more_threads_than_their_host_has_cores_shared_them(second, shared):
    first = on_host("a", "10", "12")
    for records in ([first, second], [second, first]):
        partners = shared_cores(records)
        assert set(partners) == ({"a", "b"} if shared else set())


def test_who_shared_cores_is_found_without_comparing_all_with_all(monkeypatch):
    """Of 2,000 runs at one time each names three; each begins to be compared a few times alone."""
    records = [on_host(f"r{i}", "10", "12") for i in range(2000)]
    named = []
    monkeypatch.setattr(shared_hosts, "name_of", lambda record: named.append(record) or record.run)
    partners = shared_cores(records)
    assert partners["r7"].startswith("ran at the same time as 1999 of 2000 runs: r0, r1, r2 ...")
    assert len(partners) == 2000 and len(named) <= 2000 * 9
    # On four cores, two threads each: a and b fit; with c there are six; d comes when a has gone.
    stays = [("a", "10", "20"), ("b", "11", "40"), ("c", "12", "15"), ("d", "20", "30")]
    partners = shared_cores([on_host(*stay) for stay in stays])
    assert set(partners) == {"a", "b", "c"}
    assert partners["b"].startswith("ran at the same time as a, c, d on h: ")


@pytest.mark.parametrize(
    ("load", "ranks", "gpus", "cores"),
    [  # the ranks' CPU seconds, the machine's, over 10 s on 4 cores -> cores of other programs
        ((20.0, 40.9), 2, 2, None),  # 2.09 of the two that are left
        ((20.0, 41.5), 2, 2, "2.1"),
        ((18.0, 35.0), 4, 4, "1.7"),  # none is left
        ((40.0, 41.5), 2, 4, "2.1"),  # half of the ranks are on another node
        ((20.0, None), 4, 4, None),
    ],
)
def test_a_machine_without_a_core_for_each_thread_was_busy(load, ranks, gpus, cores):
    record = on_host("a", "10", "12", ranks=ranks, gpus=gpus)
    record.facts["load"] = {"cpu_s": load[0], "machine_cpu_s": load[1], "wall_s": 10.0}
    notes = shared_hosts.busy([record, on_host("b", "10", "12")])
    assert bool(notes) == bool(cores)
    if cores:
        assert f"used up to {cores} cores" in notes[0] and notes[0].endswith(": a")


def test_a_curve_leaves_out_what_has_no_time_and_says_so(tmp_path):
    write(tmp_path, facts("s", "ddp", engine="ddp"))
    write(tmp_path, facts("s", "ddp", engine="ddp", gpus=2), step_s=0.3)
    write(tmp_path, facts("s", "ddp", engine="ddp", gpus=4), loss=[])
    write(tmp_path, facts("s", "ddp", engine="ddp", gpus=8, cores=2), step_s=0.1)
    shown = curve_of(tmp_path)
    assert [row["run"] for row in shown.rows] == ["ddp", "ddp-dp2"]
    left_out = sorted(note.split(": ")[1] for note in shown.notes if note.startswith("left out"))
    assert left_out == ["ddp-dp4", "ddp-dp8"]
    with pytest.raises(
        UsageError, match="no run called 'nobody'; there are: ddp, ddp-dp2, ddp-dp4"
    ):
        curve_of(tmp_path, "nobody")
    (tmp_path / "ddp-dp4" / "run.json").write_text("{")
    with pytest.raises(UsageError, match=r"there are: ddp, .*; not read: .*ddp-dp4: run.json is d"):
        curve_of(tmp_path, "ddp-dp4")
    larger = curve_of(tmp_path, "ddp-dp2")
    assert larger.notes[0].startswith("strong scaling against ddp-dp2 (2 GPUs)")
    assert larger.rows[1]["speedup"] == 1 and larger.rows[0]["efficiency"] == pytest.approx(1.2)


def test_the_baseline_is_the_studys_else_of_the_fewest_gpus(tmp_path):
    for gpus, step_s in ((1, 0.5), (2, 0.3)):
        write(tmp_path, facts("s", "ddp-dp2", engine="ddp", gpus=gpus), step_s=step_s)
    studys = curve_of(tmp_path)
    assert studys.notes[0].startswith("strong scaling against ddp-dp2 (2 GPUs)")
    assert "the baseline: the study's" in studys.notes[0]
    (tmp_path / "ddp-dp2" / "steps.csv").unlink()
    others = curve_of(tmp_path)
    assert others.notes[0].startswith("strong scaling against ddp (1 GPU)")
    assert "the baseline: fewest GPUs" in others.notes[0]


def known(source="a.log", gpus=8, step_s=1.0, n=30, **extra):
    steps = logged(n=n, step_s=step_s).steps
    return other(source=source, gpus=gpus, completed=True, steps=steps, **extra)


@pytest.mark.parametrize("lacks", [{"gpus": None}, {"gpus": 0}, {"step_s": 0.0}, {"n": 0}], ids=str)
def test_of_a_log_that_states_no_gpus_or_time_there_is_no_point(lacks):
    why = r"the log does not state GPUs \(--gpus\)" if "gpus" in lacks else "no steady time"
    with pytest.raises(UsageError, match=f"^x: refused; a.*: {why}"):
        scaling_curve.report_of([known(**lacks)], ["x: refused"])


def test_a_point_has_its_configurations_name_or_its_logs():
    repeats = [known("x", 16, 0.5, run=f"r-{i}", configuration="r") for i in (1, 2)]
    odd = known("y", 32, 0.25, run="r-3", configuration="r")  # two configurations have that name
    for records, names in (
        ([*repeats, known("logs/a.log")], ["a.log", "r"]),
        ([known("a.log"), known("b.log", 16, 0.5)], ["a.log", "b.log"]),
        ([repeats[0], odd], ["r-1", "r-3"]),
    ):
        assert [row["run"] for row in scaling_curve.report_of(records, []).rows] == names


def test_a_serial_share_lies_between_0_and_1_and_its_absence_has_a_reason():
    times = {1: 1.0, 2: 0.4, 4: 1.5, 8: 0.1249}
    sides = [Side(f"dp{gpus}", gpus, (step_s,)) for gpus, step_s in times.items()]
    rows, share, _ = found = curve(sides, sides[0])
    assert [row["serial"] for row in rows] == [None] * 4
    none, superlinear, slower, unsure = (row["note"] for row in rows)
    assert none is None and superlinear.startswith("superlinear: ")
    assert "slower than the baseline" in slower and "too little above" in unsure
    for wrong in (2.98, -0.2):
        shown = table(found._replace(share=wrong), "strong", "dp1")
        assert f"{wrong:.3f}" not in shown.render()


def test_shares_have_intervals_and_each_law_says_of_which_time_its_share_is():
    """On two GPUs a share is 2 / S - 1 by Karp and Flatt and Amdahl, 2 - S by Gustafson."""
    base, side = Side("a", 1, (1.0,), Interval(0.9, 1.1)), Side("b", 2, (0.7,), Interval(0.6, 0.8))
    (_, row), share, interval = found = curve([base, side], base)
    assert row["speedup_ci95"] == pytest.approx([0.9 / 0.8, 1.1 / 0.6])
    assert [row["serial"], share] == pytest.approx([0.4, 0.4])
    wanted = [2 * 0.6 / 1.1 - 1, 2 * 0.8 / 0.9 - 1]  # 2 / S - 1
    assert row["serial_ci95"] == pytest.approx(wanted)
    assert [*interval] == pytest.approx(wanted)
    assert (
        "fits a serial share of 0.400 (0.091 to 0.778) of the b"
        in table(found, "strong", "a").below[2]
    )
    weak = curve([base, Side("b", 2, (1 / 0.615,))], base, "weak")
    assert (weak.rows[1]["serial"], weak.share) == pytest.approx((0.626, 0.770), abs=1e-3)
    (line,) = (note for note in table(weak, "weak", "a").below if "Gustafson" in note)
    assert "0.770 (its noise is not known) of a run's own time as serial, where Karp-" in line


def test_a_superlinear_efficiency_names_the_settings_that_differ(tmp_path):
    base = facts("s", "ddp", engine="megatron", pp=2, gpus=2, micro_batch=1)
    write(tmp_path, base | {"run": "ddp"})
    other = facts("s", "ddp", engine="megatron", pp=2, vpp=2, gpus=4, micro_batch=2)
    write(tmp_path, other, step_s=0.2)
    row = curve_of(tmp_path).rows[1]
    assert "superlinear: efficiency 1.25 (1.2" in row["note"] and "caches" not in row["note"]
    assert "vpp 1 -> 2" in row["note"] and "micro_batch 1 -> 2" in row["note"]
    assert "grad_accum" not in row["note"] and "dp 1" not in row["note"]
