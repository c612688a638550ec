"""A row shows a speedup only for the same work, and an efficiency only for ranks with own cores."""

import csv
import functools
import io
import json
from datetime import UTC, datetime, timedelta

import pandas
import pytest

from analysis import checkpoints, compare, parity, scaling
from analysis.logs.load import load
from analysis.logs.model import config_of
from analysis.logs.record import Record
from analysis.runs import run_table
from analysis.runs.fairness import CHANGED, UNSTATED
from analysis.runs.throughput import tflops_per_gpu
from analysis.tflops import main
from models.flops import CONVENTIONS
from tests.fixture_runs import TINY, edit, edit_steps, facts, table_of, write


def rows(capsys, *argv):
    assert main([*map(str, argv), "--format", "csv"]) == 0
    return {row["run"]: row for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}


def test_speedup_efficiency_and_tflops_follow_from_the_median_after_warmup(tmp_path, capsys):
    write(tmp_path, facts("s", "ddp", engine="ddp"), step_s=0.5)
    write(tmp_path, facts("s", "ddp", engine="ddp", gpus=2), step_s=0.3)
    found = rows(capsys, tmp_path)
    one, two = found["ddp"], found["ddp-dp2"]
    assert float(one["step_s"]) == pytest.approx(0.5, rel=2e-3)  # not the tenfold first step
    assert float(two["speedup"]) == pytest.approx(0.5 / 0.3)
    assert float(two["efficiency"]) == pytest.approx(0.5 / 0.3 / 2)
    assert float(two["tokens_per_s"]) == pytest.approx(16 * 64 / float(two["step_s"]))
    write(tmp_path, facts("s", "ddp", engine="ddp", gpus=2, recompute="full"), step_s=0.3)
    for convention, per_token in CONVENTIONS.items():
        found = rows(capsys, tmp_path, "--convention", convention)
        row, again = found["ddp-dp2"], found["ddp-dp2-recompute-full"]
        flops = per_token(TINY, 64, False) * 16 * 64
        assert float(row["tflops"]) == pytest.approx(flops / float(row["step_s"]) / 2 / 1e12)
        assert (again["tflops"] == row["tflops"]) == (per_token(TINY, 64, True) * 1024 == flops)


def test_more_ranks_than_cores_is_labelled_and_has_no_efficiency(tmp_path, capsys):
    write(tmp_path, facts("s", "ddp", cores=2, engine="ddp"))
    write(tmp_path, facts("s", "ddp", cores=2, engine="ddp", gpus=4))
    write(tmp_path, facts("s", "ddp", cores=2, engine="megatron", gpus=2, tp=2, threads=2))
    found = rows(capsys, tmp_path)
    assert found["ddp"]["efficiency"] == "1.0"
    assert found["ddp-dp4"]["efficiency"] == ""
    assert "oversubscribed: 4 ranks x 1 threads on 2 cores" in found["ddp-dp4"]["notes"]
    assert "oversubscribed: 2 ranks x 2 threads" in found["megatron-tp2"]["notes"]


def test_a_run_that_is_no_result_keeps_its_row_and_says_why(tmp_path, capsys):
    oom, cancelled = "rank 1: CUDA out of memory", "SIGTERM (rank 0)"
    ends = {1: {}, 2: {"loss": [], "fail": oom}, 4: {"fail": cancelled}, 8: {}, 16: {}}
    for gpus, end in ends.items():
        about = facts("s", "ddp", 16, engine="ddp", gpus=gpus)
        write(tmp_path, about, step_s=0.5 / gpus, **end)
    edit_steps(tmp_path / "ddp-dp8", lambda rows: rows[:11])
    found = rows(capsys, tmp_path)
    assert found["ddp"]["parity"] == "equal" and found["ddp-dp2"]["parity"] == "not verified"
    for name, verdict, timed, why in (
        ("ddp-dp2", "OOM", False, oom),
        ("ddp-dp4", "cancelled", True, "no speedup: cancelled"),
        ("ddp-dp8", "rows missing", False, "steps.csv has 11 of 20 steps; missing: 12-20"),
    ):
        row = found[name]
        assert row["verdict"] == verdict and why in row["notes"]
        assert bool(row["step_s"]) == bool(row["tokens_per_s"]) == timed
        assert row["speedup"] == row["efficiency"] == ""
    assert float(found["ddp-dp16"]["speedup"]) == pytest.approx(16)
    write(tmp_path, facts("s", "ddp", 16, engine="ddp"), fail=cancelled)
    row = rows(capsys, tmp_path)["ddp-dp16"]
    assert (row["speedup"], row["notes"]) == ("", "no speedup: the baseline ddp is cancelled")


def test_a_model_that_its_log_does_not_state_whole_has_no_tflops_and_a_reason():
    run = Record("x.log", "test", gpus=1, global_batch=8, seq_len=2048, recompute="none")
    sizes = {"n_layer": 24, "hidden": 1024, "n_head": 16, "vocab_size": 50257}
    gate = {"ffn_hidden": 2816}
    llama = {"activation": "swiglu", "n_kv_head": 4, "tied": False}
    run.model = sizes
    n_params = config_of(run)[0].n_params
    for model, params, uncounted, why in (
        (sizes, None, [], ""),
        (sizes, 1.01 * n_params, [], ""),  # a padded vocabulary
        (sizes, 3.2 * n_params, [], "parameters"),  # experts that it does not state
        (sizes, 3.2 * n_params, ["64 experts"], "64 experts"),
        (sizes | gate, None, [], "does not state activation (--activation)"),
        (sizes | gate | llama, None, [], ""),
        (sizes | llama, None, [], "does not state ffn_hidden (--ffn-hidden)"),
    ):
        run.model, run.params, run.uncounted = model, params, uncounted
        value, reason = tflops_per_gpu(run, 8 * 2048, "megatron")
        assert (value is None) == bool(why) and why in reason
        value, _ = tflops_per_gpu(run, 8 * 2048, "6n")
        assert (value is None) == bool(uncounted or (why and params is None))
    run.params = 1e9
    assert tflops_per_gpu(run, 8 * 2048, "6n") == (pytest.approx(6e9 * 8 * 2048 / 1e12), "")


def test_another_machines_run_is_no_baseline(tmp_path):
    """One study run on two machines: each run is measured against its neighbour."""
    about = facts("s", "ddp", engine="ddp")
    write(tmp_path / "cpu", about, step_s=0.5)
    about["host"] |= {"gpu": "NVIDIA H200", "gpus_visible": 1}
    write(tmp_path / "h200", about, step_s=0.005)
    assert [row["speedup"] for row in table_of(tmp_path).rows] == [1.0, 1.0]


@pytest.mark.parametrize("file", ("run.json", "steps.csv", "checkpoints.csv"))
def test_one_damaged_folder_does_not_hide_the_others(tmp_path, capsys, file):
    for gpus in (1, 2, 4):
        write(tmp_path, facts("s", "ddp", engine="ddp", gpus=gpus))
    (tmp_path / "ddp-dp2" / file).write_bytes(b"{}\xff")
    commands = (main, parity.main, scaling.main, compare.main)
    for command in (checkpoints.main,) if file == "checkpoints.csv" else commands:
        assert command([str(tmp_path)]) == 0
        said = "".join(capsys.readouterr())
        assert all(name in said for name in (str(tmp_path / "ddp-dp2"), file, "ddp-dp4"))


def test_times_and_steps_that_cannot_be_are_no_result(tmp_path, capsys):
    """The clock says 0.5 s a step."""

    def clocked(row, step_s=0.5):
        return row | {"ended_unix_s": 1.7e9 + 0.5 * int(row["step"]), "step_s": step_s}

    changes = {
        "ddp": clocked,
        "tenth": lambda row: clocked(row, 0.05),
        "endless": lambda row: clocked(row, 1e300 if row["step"] == "9" else 0.5),
        "late": lambda row: row | {"step": int(row["step"]) + 10**9},
    }
    for name, change in changes.items():
        run = write(tmp_path, facts("s", "ddp") | {"run": name})
        edit_steps(run, functools.partial(map, change))
    long = write(tmp_path, facts("s", "ddp") | {"run": "long"}, loss=[5.0] * 50)
    assert len((long / "steps.csv").read_text().splitlines()) == 51
    found = rows(capsys, tmp_path)
    assert float(found["ddp"]["step_s"]) == 0.5
    for name, why in {
        "tenth": "steps.csv says 0.05 s a step, its steps end 0.5 s apart",
        "endless": "step 9 took 1e+300 s by steps.csv, where it ended 0.5 s after the one before",
        "late": "steps.csv goes to step 1000000020 of 20",
        "long": "steps.csv goes to step 50 of 20",
    }.items():
        assert found[name]["step_s"] == found[name]["speedup"] == "", name
        assert why in found[name]["notes"], name
    main([str(tmp_path), "--format", "json"])
    missing = {run["run"]: run["missing"] for run in json.loads(capsys.readouterr().out)}
    assert missing["tenth"]["tokens_per_s"] == missing["tenth"]["step_s"]


@pytest.mark.parametrize("moment", ["Unknown", "2999-01-01T00:00:00Z", "2026-01-01T00:00:00"])
@pytest.mark.parametrize("key", ["time_utc", "started_utc"])
def test_a_time_that_has_not_been_is_named_and_the_other_runs_are_shown(
    tmp_path, capsys, key, moment
):
    write(tmp_path, facts("s", "ddp"))
    bad = write(tmp_path, facts("s", "ddp") | {"run": "bad"})
    file = bad / ("status.json" if key == "time_utc" else "run.json")
    edit(file, **{key: moment})
    assert main([str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert f"bad: {file.name} is damaged: {key} cannot be '{moment}'" in err
    assert "ddp" in out and "bad" not in out


def test_runs_that_ran_together_on_one_hosts_cores_say_so(tmp_path, capsys, printed):
    now = datetime.now(UTC)
    for gpus, ago in ((1, 600), (2, 60)):
        about = facts("s", "ddp", cores=2, engine="ddp", gpus=gpus)
        about["host"]["hostname"] = "node1"
        about["started_utc"] = (now - timedelta(seconds=ago)).strftime("%Y-%m-%dT%H:%M:%SZ")
        write(tmp_path, about, step_s=1.0 if gpus == 1 else 0.2)  # both end now
    shared = rows(capsys, tmp_path)
    assert "ran at the same time as ddp on node1" in shared["ddp-dp2"]["notes"]
    assert "as ddp-dp2 on node1" in shared["ddp"]["notes"]
    for row in shared.values():
        assert row["speedup"] == row["efficiency"] == "" and "no speedup: " in row["notes"]
    assert "ddp-dp2 ran at the same time as ddp on node1" in printed(scaling.main, tmp_path)
    alone = tmp_path / "ddp-dp2" / "run.json"  # a job with a host of its own
    alone.write_text(alone.read_text().replace("node1", "node2"))
    row = rows(capsys, tmp_path)["ddp-dp2"]
    assert "at the same time" not in row["notes"]
    assert "superlinear: efficiency 2.50 (2.50 to 2.50)" in row["notes"]
    out = printed(main, tmp_path, "--columns", "run,efficiency")
    assert "2.50?" in out and "efficiency ?: superlinear: efficiency 2.50" in out


def test_columns_are_named_by_key_or_heading_and_keep_the_reasons_of_their_dashes(
    tmp_path, capsys, printed
):
    about = facts("s", "ddp", engine="ddp", gpus=2)
    about["baseline"] = None
    write(tmp_path, about)
    out = printed(main, tmp_path, "--columns", "run,printed,processor,speedup,efficiency")
    assert out.split()[:5] == ["run", "printed", "processor", "speedup", "efficiency"]
    assert "speedup, efficiency -: no baseline (--baseline NAME): ddp-dp2" in out
    write(tmp_path, facts("s", "ddp-dp2", engine="ddp", gpus=4, recompute="full"))
    assert "-: invalid comparison: recompute full here, none in" in printed(
        main, tmp_path, "--columns", "run,efficiency"
    )
    assert main([str(tmp_path)]) == 0  # the notes of the rows say it
    assert "efficiency -: invalid" not in capsys.readouterr().out


def test_runs_of_other_code_are_no_comparison(tmp_path, capsys, printed):
    """A changed working tree is told from its commit; commits with the same code are compared."""
    other, dirty = "commit eeeeeeeeee here", "commit cccccccccc+dirty here, cccccccccc in the base"
    gits = {1: ("c1", ""), 2: ("e1", ""), 4: ("e2", other), 8: ("c1", dirty)}
    for gpus, ((commit, code), why) in gits.items():
        git = {"commit": commit * 40, "code": code * 40, "dirty": why == dirty}
        write(tmp_path, facts("s", "ddp", engine="ddp", gpus=gpus) | {"git": git})
    found = rows(capsys, tmp_path)
    for gpus, (_, why) in [*gits.items()][1:]:
        row = found[f"ddp-dp{gpus}"]
        assert bool(row["speedup"]) == (not why)
        assert row["notes"].startswith(f"invalid comparison: {why}" if why else "")
    for gpus in (1, 2):
        write(tmp_path / "changed", facts("s", "ddp", engine="ddp", gpus=gpus) | {"git": git})
    for command in (main, scaling.main):
        assert f"{CHANGED}: all" in printed(command, tmp_path / "changed")


def test_runs_of_one_name_are_told_apart_and_a_baseline_that_fits_several_is_refused(
    tmp_path, capsys, refused, printed
):
    write(tmp_path / "a", facts("s", "ddp", engine="ddp")).rename(tmp_path / "a" / "copy")
    write(tmp_path / "a", facts("s", "ddp", engine="ddp"))
    write(tmp_path / "a", facts("s", "ddp", engine="ddp", gpus=2))
    write(tmp_path / "c", facts("s", "ddp", engine="ddp", micro_batch=2))
    for command in (main, parity.main):
        out = printed(command, tmp_path)
        assert "ddp (a/copy)" in out and {"a/ddp", "c/ddp"} <= set(out.split())
    row = rows(capsys, tmp_path)["ddp-dp2"]  # the study's own baseline is there twice
    assert row["speedup"] == "" and "the baseline ddp fits" in row["notes"]
    for command in (main, parity.main, scaling.main):
        (line,) = refused(command, tmp_path, "--baseline", "ddp").splitlines()
        assert "fits" in line and "ddp (a/copy), a/ddp, c/ddp" in line
        for named in ("a/ddp", str(tmp_path / "a" / "ddp")):
            assert command([str(tmp_path), "--baseline", named]) == 0
        assert capsys.readouterr().err == ""


def test_what_no_log_states_is_said_not_to_be_compared(tmp_path, printed):
    line = " iteration {}/ 9 | elapsed time per iteration (ms): {} | lm loss: 2.0E+00 |\n"
    for gpus in (1, 2):
        text = "".join(line.format(i, 1000.0 / gpus) for i in range(1, 10))
        (tmp_path / f"dp{gpus}.log").write_text(
            f"using world size: {gpus}, data-parallel-size: {gpus}\n{text}"
        )
    for command in (main, scaling.main):
        out = printed(command, tmp_path, "--baseline", "dp1.log")
        assert f"{UNSTATED}sequence length, global batch, precision, model" in out
        assert " 2.00 " in out


def test_a_frame_has_the_convention_and_the_columns_of_the_work(tmp_path):
    write(tmp_path, facts("s", "ddp", engine="ddp", precision="fp32"))
    frame = pandas.DataFrame(run_table.rows(load([tmp_path]).content, None))
    of_work = ["convention", "global_batch", "seq_len", "precision"]
    assert frame.loc[0, of_work].tolist() == ["megatron", 16, 64, "fp32"]
    assert "gpu_type" in frame


def log(path, header, ms, planned):
    """A log of Megatron-LM on 8 GPUs, where the header does not say otherwise."""
    line = (
        " iteration {i:8d}/{planned:8d} | elapsed time per iteration (ms): {ms:.1f} |"
        " global batch size: 8 | lm loss: 2.5 |\n"
    )
    steps = "".join(line.format(i=i, planned=planned, ms=ms + i % 3) for i in range(1, 21))
    path.write_text(f"  world_size ..... 8\n  seq_length ..... 64\n{header}{steps}")
    return path


def test_a_run_that_stopped_early_is_marked_and_has_its_speedup(tmp_path, capsys):
    slow = log(tmp_path / "slow.log", "", 3000, 143066)
    fast = log(tmp_path / "fast.log", "  world_size ..... 16\n", 1600, 143066)
    row = rows(capsys, slow, fast, "--baseline", "slow.log")["fast.log"]
    assert float(row["speedup"]) == pytest.approx(3001 / 1601)
    assert row["verdict"] == "stopped early" and "iteration 20 of 143066" in row["notes"]
    command = [str(slow), str(fast), "--baseline", "slow.log"]
    assert scaling.main(command) == 0 and main(command) == 0
    said = "stopped early, so timed over fewer steps than planned: all"
    assert capsys.readouterr().out.count(said) == 2


PADDED = " > padded vocab (size: {}) with {} dummy tokens (new size: {})\n"
DUMPED = "  padded_vocab_size ..... {}\n  tensor_model_parallel_size ..... {}\n"


@pytest.mark.parametrize(
    ("here", "fair"),
    [
        (PADDED.format(151643, 165, 151808), True),  # 128 x tp 2
        (PADDED.format(151642, 166, 151808), False),
        (DUMPED.format(152064, 4), True),
        (DUMPED.format(152064 + 512, 4), False),  # it would be padded to 512 less
        (DUMPED.format(151643, 1), True),  # not padded at all
    ],
)
def test_a_vocabulary_that_is_padded_for_tp_is_one_model(tmp_path, capsys, here, fair):
    base = log(tmp_path / "tp1.log", PADDED.format(151643, 37, 151680), 3000, 20)
    padded = log(tmp_path / "tp.log", here, 3600, 20)
    row = rows(capsys, base, padded, "--baseline", "tp1.log")["tp.log"]
    assert bool(row["speedup"]) == fair
    if fair:
        assert float(row["speedup"]) == pytest.approx(3001 / 3601)
    assert ("invalid comparison: model vocab_size" in row["notes"]) != fair
    assert compare.main([str(base), str(padded)]) == (0 if fair else 1)
    if fair:  # no dict of all sizes
        one = "vocab_size (one vocabulary, padded to multiples of tp) 151680 -> "
        assert one in capsys.readouterr().out.partition("they differ in: ")[2]
