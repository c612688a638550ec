"""Repeats of a study become one report and one verdict; what is unfit is named."""

import json
from pathlib import Path

import pytest

from analysis import breakdown, compare, page, parity, plots, report, scaling, tflops
from analysis.logs.load import load, read_all
from analysis.runs import run_table
from analysis.runs.fairness import ANY_COMMIT, CHANGED, Terms, other_kernels
from parallel.config.study import load_study
from parallel.record.facts import planned
from parallel.sweep import command_of
from tests.conftest import ROOT
from tests.fixture_runs import drawn_rows, facts, logged, write


def repeats(folder: Path, times: dict[int, list[float]], **changes) -> None:
    """Runs ddp-r1 ... on one GPU and ddp-dp2-r1 ... on two, and so on."""
    for gpus, seconds in times.items():
        for number, step_s in enumerate(seconds, start=1):
            about = facts("s", "ddp-r1", engine="ddp", gpus=gpus)
            about |= {"configuration": about["run"], "repeat": number}
            about["run"] += f"-r{number}"
            write(folder, about | changes, step_s=step_s)


def test_table_curve_and_picture_divide_the_same_medians_of_repeats(tmp_path, rows_of, printed):
    repeats(tmp_path, {1: [1.0, 1.3, 1.2], 2: [0.9, 0.5, 0.6]})
    assert "Repeats: the medians of both sides." in printed(tflops.main, tmp_path)
    rows = rows_of(tflops.main, tmp_path)
    table = {row["run"]: (row["speedup"], row["efficiency"]) for row in rows}
    assert len(table) == 6 and len(set(table.values())) == 2
    assert table["ddp-r1"] == table["ddp-r2"] == (1, 1)  # no repeat of it is faster than it
    curved = rows_of(scaling.main, tmp_path)
    curve = {r["run"]: (r["speedup"], r["efficiency"]) for r in curved}
    intervals = {r["run"]: r["speedup_ci95"] for r in curved}
    assert rows[0]["speedup_ci95"] == intervals["ddp-dp2"] and intervals["ddp"] is None
    assert curve == {"ddp": (1, 1), "ddp-dp2": table["ddp-dp2-r1"]}
    assert curve["ddp-dp2"][0] == pytest.approx(1.2 / 0.6)
    (row,) = rows_of(compare.main, tmp_path)
    assert (row["unit"], row["ratio"]) == ("pairs of runs", curve["ddp-dp2"][0])
    assert row["ratio_ci95"] == pytest.approx(intervals["ddp-dp2"])
    bars = drawn_rows(plots.drawn([tmp_path], None)["splits"])
    assert [(bar["bar"], bar["speedup"]) for bar in bars] == [
        ("1 × ddp", 1),
        ("2 × ddp-dp2", curve["ddp-dp2"][0]),
    ]


def test_other_kernels_and_libraries_are_told_apart_and_busy_machines_named(tmp_path, printed):
    sdpa, te = "torch scaled_dot_product_attention", "Transformer Engine"
    load = {"load": {"start": 3.0, "cpu_s": 8.0, "machine_cpu_s": 90.0, "wall_s": 10.0}}
    for engine, kernels, torch in (("ddp", sdpa, "2.13.0"), ("megatron", te, "2.15.0")):
        of_run = load | {"attention": kernels, "versions": {"torch": torch, "numpy": "2.4.6"}}
        write(tmp_path, facts("s", "ddp", engine=engine) | of_run)
    for command in (tflops, scaling, compare):
        out = printed(command.main, tmp_path)
        assert f"({sdpa}: ddp; {te}: megatron)" in out, command
        apart = "libraries differ, so ratios of times compare these, too (torch 2.13.0: ddp; torch"
        assert apart in out and "numpy" not in out, command
        assert "busy: other programs used up to 8.2 cores" in out, command

    def told(*kinds):
        abouts = [{"attention": a, "spec": {"deterministic": det}} for a, det in kinds]
        return "".join(other_kernels([logged(f"{i}", facts=a) for i, a in enumerate(abouts)]))

    flash, math = f"{sdpa} (flash)", f"{sdpa} (math)"
    assert told((flash, False), (sdpa, False)) == ""  # the other: any
    names = f"{flash}: 0; {math}: 1; {math}, deterministic: 2"
    assert names in told((flash, False), (math, False), (math, True))


def test_a_weak_study_is_told_by_its_batches_and_every_command_scales_it(tmp_path, printed):
    """The batch per GPU stays: twice the work on twice the GPUs in 1.25 times the time."""
    for gpus, engine, step_s in ((1, "ddp", 1.0), (2, "ddp", 1.25), (2, "megatron", 1.5)):
        about = facts("s", "ddp", engine=engine, gpus=gpus, global_batch=8 * gpus)
        write(tmp_path, about, step_s=step_s)
    (tmp_path / "page.md").write_text(f"<!-- report: scaling {tmp_path} -->\n<!-- /report -->\n")
    assert report.main([str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text()
    assert "| ddp-dp2 | 2 |" in page and "left out" not in page
    for command in (tflops, scaling):
        out = printed(command.main, tmp_path)
        for text in (out, page):
            assert "weak scaling against ddp" in text and "invalid" not in text
            assert "1.60" in text and "0.80" in text
        assert "invalid comparison: global batch 16 here, 8" in printed(
            command.main, tmp_path, "--scaling", "strong"
        )
    out = printed(compare.main, tmp_path)
    assert "weak scaling: a step of B is 2 times A's work" in out and "invalid" not in out


def test_a_study_is_compared_with_its_baseline_by_pairs_and_only_at_one_commit(
    tmp_path, capsys, printed, rows_of
):
    repeats(tmp_path, {1: [1.0, 1.2, 1.4]})
    about = facts("s", "ddp-r1", engine="ddp", seed=7)
    for number, step_s in enumerate([0.91, 1.09, 1.27], start=1):
        run = {"run": f"b-r{number}", "configuration": "b", "repeat": number}
        write(tmp_path, about | run | {"git": {"commit": "e" * 40, "dirty": True}}, step_s=step_s)
    (row,) = rows_of(compare.main, tmp_path, status=1)
    assert row["verdict"] is None and row["doubts"][0].startswith("invalid comparison: commit")
    assert row["values"] == ["seed 1234 -> 7"]
    (row,) = rows_of(compare.main, tmp_path, "--any-commit")
    assert (row["a"], row["b"], row["unit"]) == ("ddp", "b", "pairs of runs")
    assert row["verdict"].startswith("B is faster: 1.10")
    assert row["ratio"] == pytest.approx(1.1, 1e-2) and CHANGED in row["doubts"]
    sides = [str(tmp_path / "ddp-r1"), str(tmp_path / "b-r1")]
    calls = [(compare, sides), (scaling, [str(tmp_path)]), (tflops, [str(tmp_path)])]
    for command, paths in calls:
        command.main(paths)
        assert "invalid comparison: commit" in (out := capsys.readouterr().out)
        assert ANY_COMMIT not in out
        assert (
            "invalid" not in (out := printed(command.main, *paths, "--any-commit"))
            and ANY_COMMIT in out
        )


def test_the_question_of_a_study_stands_above_its_tables(tmp_path, printed):
    question = "Which split is fastest?"
    repeats(tmp_path, {1: [1.0], 2: [0.6]}, question=question)
    for command in (tflops, scaling, compare):
        assert printed(command.main, tmp_path).startswith(f"{question}\n"), command
    assert page.page_at([tmp_path]).title == question
    study = load_study(ROOT / "slurm/2-core_bucket_ab.toml")
    about = planned(study, study.baseline)
    assert about["question"].endswith("?")


def test_runs_of_another_commit_or_bucket_size_are_no_repeats(tmp_path, printed, rows_of):
    """Two of B's runs took 0.5 s at one commit and with one bucket, the others 0.8 and 0.9 s."""
    write(tmp_path / "a", facts("s", "ddp", engine="ddp"))
    settings = {"engine": "deepspeed_zero", "gpus": 2, "zero_stage": 1}
    runs = (("1", 0.5, {}), ("2", 0.5, {}), ("3", 0.8, {"commit": "e" * 40}), ("4", 0.9, {}))
    for number, (name, step_s, git) in enumerate(runs):
        about = facts("s", "ddp", **settings)
        about["git"] |= git
        about["inputs"] = {"deepspeed_config": "large" if name == "4" else "small"}
        about |= {"configuration": "zero", "repeat": number + 1, "run": f"zero-r{name}"}
        write(tmp_path / "b", about, step_s=step_s)
    rows = [r for r in rows_of(compare.main, tmp_path, "--any-commit") if r["a"] == "ddp"]
    names = {row["b"]: row["ratio"] for row in rows}
    assert names == pytest.approx({"zero-r1": 1, "zero-r3": 0.625, "zero-r4": 5 / 9}, rel=1e-2)
    sides = [str(tmp_path / name) for name in "ab"]
    said = printed(compare.main, *sides, status=1)
    assert "no comparison: B's own 4 runs differ in: commit, deepspeed_config" in said
    assert "4 runs differ in: deepspeed_config" in printed(
        compare.main, *sides, "--any-commit", status=1
    )


def test_a_baseline_may_be_a_configuration_in_every_command(tmp_path, capsys, printed, refused):
    """Two of the three repeats of ddp are whole; the table says why the first has no ratio."""
    repeats(tmp_path, {1: [1.0, 1.3, 1.2], 2: [0.9, 0.5, 0.6]}, baseline=None)
    for name in ("ddp", "ddp-r2"):
        for command in (tflops, scaling, parity):
            assert command.main([str(tmp_path), "--baseline", name]) == 0, command
        assert page.page_at([tmp_path], terms=Terms(name)) and plots.drawn([tmp_path], name)
        rows = run_table.rows(load([tmp_path]).content, terms=Terms(name))
        assert {row["baseline"] for row in rows} == {"ddp-r2" if name == "ddp-r2" else "ddp-r1"}
    out = ["--out", str(tmp_path / "x")]
    for command, more in ((tflops, []), (scaling, []), (parity, []), (page, out), (plots, out)):
        assert command.main([str(tmp_path), "--baseline", "gone", *more]) == 2, command
        assert "gone" in capsys.readouterr().err
    (tmp_path / "ddp-r1" / "training_metrics.json").unlink()  # it did not end
    for command in (tflops, scaling):
        argv = [str(tmp_path), "--baseline", "ddp", "--format", "json"]
        ratios = {row["run"]: row["speedup"] for row in json.loads(printed(command.main, *argv))}
        of_two = ratios.get("ddp-dp2-r1") or ratios["ddp-dp2"]
        assert of_two == pytest.approx(1.25 / 0.6)  # the median of what is whole
    assert "none of 6 runs has a breakdown" in refused(
        breakdown.main, tmp_path, "--baseline", "ddp"
    )


def test_every_bad_metrics_file_is_one_line_and_the_others_are_reported(tmp_path, shared):
    good = shared / "logs/kadamrahul18+GPT2-Optimization/1gpu__training_metrics.json"
    content = json.loads(good.read_text())
    for name, changes in {"good": {}, "unmarked": {}, "future": {"schema_version": "3.0"}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "training_metrics.json").write_text(json.dumps(content | changes))
    (tmp_path / "good" / "RUN_COMPLETE.txt").write_text(
        "RUN_COMPLETE world_size=1 tokens_per_sec=1\n"
    )
    ours = write(tmp_path, facts("s", None, engine="ddp"))
    metrics = {"schema_version": "2.0", "hardware": {"world_size": 8}}
    (ours / "training_metrics.json").write_text(json.dumps(metrics))
    records, refused = read_all([tmp_path])
    completed = {Path(r.source).parent.name: r.completed for r in records}
    assert (completed["good"], completed["unmarked"]) == (True, False)
    reasons = "\n".join(map(str, refused))
    assert len(refused) == 2 and "schema_version '3.0' is not known" in reasons
    assert "8 ranks, but run.json started 1" in reasons


def test_the_bucket_studies_interleave_and_run_in_one_allocation():
    study = load_study(ROOT / "slurm/2-core_bucket_ab.toml")
    rounds = [study.runs[name].repeat for name in study.runs]
    assert rounds == sorted(rounds) and len(rounds) == 8
    nodes = load_study(ROOT / "slurm/published/gpt2-two-nodes_bucket_ab.toml")
    command = command_of(nodes, nodes.baseline, Path("out"), srun=True)
    assert command[:5] == ["srun", "--nodes", "2", "--ntasks", "8"]
    # Ranks have time to see how one of them ended, before torchrun asks.
    assert "--monitor-interval=1" in command_of(nodes, nodes.baseline, Path("out"), srun=False)
