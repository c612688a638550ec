"""A proposal's numbers, each by hand: scaling, laws, resources, and what no run states."""

import json
import math

import numpy as np
import pytest

from analysis import proposal
from analysis.logs.load import load
from analysis.runs import proposals
from analysis.runs.fairness import Terms
from analysis.runs.proposal_parts import Request
from base.errors import UsageError
from tests.conftest import ROOT
from tests.fixture_runs import edit, facts, write
from tests.tools import mlperf_tree

CASES = ROOT.parent / "shared" / "cases"


@pytest.fixture
def tables(capsys):
    """Returns a function: the tables of a proposal by title, each with its rows."""

    def made(*arguments):
        assert proposal.main([*map(str, arguments), "--format", "json"]) == 0
        found = {}
        for row in json.loads(capsys.readouterr().out):
            found.setdefault(row["table"], []).append(row)
        return found

    return made


@pytest.fixture
def text(capsys):
    """Returns a function: a proposal as Markdown."""

    def made(*arguments):
        assert proposal.main(list(map(str, arguments))) == 0
        return capsys.readouterr().out

    return made


def study(folder, seconds, weak=False, **settings):
    """Write a study: {GPUs: seconds of a step of each repeat}; of 16 sequences of 64 tokens."""
    for gpus, times in seconds.items():
        about = {"engine": "ddp", "gpus": gpus, "micro_batch": 1} | settings
        about["global_batch"] = 16 * (gpus if weak else 1)
        for number, step_s in enumerate(times, 1):
            made = facts("s", "ddp-1", cores=64, **about)
            name = f"ddp-{gpus}"
            made |= {"run": f"{name}-r{number}", "configuration": name, "repeat": number}
            made["host"] |= {"ranks_per_node": min(gpus, 2), "cpu": "a CPU"}
            write(folder, made, step_s=step_s)
    return folder


def medians(folder):
    """The steady seconds of each run, which the fixtures' steps make 0.1 % longer than asked."""
    runs, _ = load([folder])
    return {run.run: float(np.median(run.steps["step_s"][1:])) for run in runs}


def quantities(rows, law):
    return {row["quantity"]: row for row in rows if row["run"] == law}


def test_strong_scaling_its_laws_and_hours_by_hand(tmp_path, tables):
    seconds = {1: (1.0, 1.02), 2: (0.55, 0.54), 4: (0.31, 0.3), 8: (0.2, 0.21)}
    found = tables(study(tmp_path, seconds), "--tokens", 1e9, "--gpu-watts", 500)
    times = medians(tmp_path)
    by_size = {n: [times[f"ddp-{n}-r1"], times[f"ddp-{n}-r2"]] for n in seconds}
    median = {n: sum(pair) / 2 for n, pair in by_size.items()}
    for row in found["Strong scaling"]:
        n = row["gpus"]
        assert row["speedup"] == pytest.approx(median[1] / median[n])
        assert (row["ideal"], row["nodes"], row["n"]) == (n, math.ceil(n / 2), 2)
        assert row["efficiency"] == pytest.approx(row["speedup"] / n)
        assert row["spread"] == pytest.approx(abs(np.diff(by_size[n])[0]) / median[n])
        assert row["tokens_per_s"] == pytest.approx(16 * 64 / median[n])
    laws = found["Laws of strong scaling"]
    # 1 = (1/N) / t c0 + (1 - 1/N) / t c1 for every run; f = c1 / c0.
    n = np.repeat(list(seconds), 2)
    t = np.array([s for pair in by_size.values() for s in pair])
    c0, c1 = np.linalg.lstsq(np.stack([1 / n / t, (1 - 1 / n) / t], axis=1), np.ones(8))[0]
    amdahl = quantities(laws, "Amdahl's law")
    assert amdahl["serial share f"]["value"] == pytest.approx(c1 / c0)
    assert amdahl["speedup on infinitely many GPUs"]["value"] == pytest.approx(c0 / c1)
    for factor in (2, 4):
        size = 8 * factor
        row = amdahl[f"speedup on {size} GPUs ({size // 2} nodes), {factor} x the largest measured"]
        assert row["value"] == pytest.approx(1 / (c1 / c0 + (1 - c1 / c0) / size))
        assert row["low"] < row["value"] < row["high"]
    z = np.stack([1 / n / t, (1 - 1 / n) / t, (n - 1) / t], axis=1)
    base, contended, coherent = np.linalg.lstsq(z, np.ones(8))[0]
    usl = quantities(laws, "Universal Scalability Law")
    sigma, kappa = contended / base, coherent / base
    assert usl["contention sigma"]["value"] == pytest.approx(sigma)
    assert usl["coherency kappa"]["value"] == pytest.approx(kappa)
    peak = usl["GPUs of the highest speedup"]
    assert peak["value"] == pytest.approx(math.sqrt((1 - sigma) / kappa))
    row = usl["speedup on 32 GPUs (16 nodes), 4 x the largest measured"]
    assert row["value"] == pytest.approx(32 / (1 + sigma * 31 + kappa * 32 * 31))
    # Fieller's ends of sigma: there c1 - sigma c0 is t standard errors away from 0.
    spread = np.sum((1 - z @ [base, contended, coherent]) ** 2) / 5 * np.linalg.inv(z.T @ z)
    for end in (usl["contention sigma"]["low"], usl["contention sigma"]["high"]):
        away = np.array([-end, 1.0, 0.0])
        error = 2.570582 * np.sqrt(away @ spread @ away)  # t of five degrees of freedom
        assert abs(away @ [base, contended, coherent]) == pytest.approx(error)
    # A run's noise by the four pairs: sqrt of the mean of (difference of logs)^2 / 2.
    logs = [math.log(b / a) for a, b in by_size.values()]
    noise = math.sqrt(sum(d * d for d in logs) / 2 / 4)
    error = math.exp(2.776445 * noise / math.sqrt(2))  # four degrees of freedom, two repeats
    for row in found["Resources for 1e9 tokens"]:
        hours = 1e9 / (16 * 64 / median[row["gpus"]]) / 3600
        amounts = {"days": hours / 24, "gpu_hours": hours * row["gpus"]}
        amounts["node_hours"] = hours * math.ceil(row["gpus"] / 2)
        amounts["kwh"] = amounts["gpu_hours"] * 0.5
        for key, amount in amounts.items():
            assert row[key] == pytest.approx(amount)
            assert row[f"{key}_ci95"] == pytest.approx([amount / error, amount * error], rel=1e-6)


def test_weak_scaling_by_hand(tmp_path, tables):
    found = tables(study(tmp_path, {1: (1.0,), 2: (1.1,), 4: (1.2,)}, weak=True), "--tokens=1e9")
    assert [row["gpus"] for row in found["Weak scaling"]] == [1, 2, 4]
    assert "Strong scaling" not in found
    times = medians(tmp_path)
    t = np.array([times[f"ddp-{n}-r1"] for n in (1, 2, 4)])
    for row, seconds in zip(found["Weak scaling"], t, strict=True):
        assert row["speedup"] == pytest.approx(row["gpus"] * t[0] / seconds)
        assert row["tokens_per_s"] == pytest.approx(row["gpus"] * 16 * 64 / seconds)
    n = np.array([1, 2, 4])
    c0, c1 = np.linalg.lstsq(np.stack([t, -(1 - 1 / n) * t], axis=1), np.ones(3))[0]
    laws = quantities(found["Laws of weak scaling"], "Gustafson's law")
    assert laws["serial share f"]["value"] == pytest.approx(c1 / c0)
    row = laws["speedup on 16 GPUs (8 nodes), 4 x the largest measured"]
    assert row["value"] == pytest.approx(16 - c1 / c0 * 15)


def test_a_study_of_both_kinds_has_a_part_of_each_and_leaves_no_run_of_them_out(tmp_path, tables):
    study(tmp_path, {1: (1.0,), 2: (0.6,), 4: (0.35,)})
    for gpus, step_s in ((2, 1.1), (4, 1.2)):
        made = facts("s", "ddp-1", cores=64, engine="ddp", gpus=gpus, global_batch=16 * gpus)
        made["host"] |= {"ranks_per_node": 2}
        write(tmp_path, made | {"run": f"weak-{gpus}"}, step_s=step_s)
    found = tables(tmp_path, "--tokens=1e9", "--baseline=ddp-1")
    assert [row["run"] for row in found["Strong scaling"]] == ["ddp-1", "ddp-2", "ddp-4"]
    assert [row["run"] for row in found["Weak scaling"]] == ["ddp-1", "weak-2", "weak-4"]
    hours = {row["run"]: row["gpu_hours"] for row in found["Resources for 1e9 tokens"]}
    assert hours.keys() == {"ddp-1", "ddp-2", "ddp-4", "weak-2", "weak-4"}
    assert hours["weak-4"] == pytest.approx(1e9 / (64 * 64 / 1.2) / 3600 * 4, rel=2e-3)


def test_a_size_that_was_not_measured_is_predicted_by_each_law_and_far_ones_are_doubted(
    tmp_path, tables, text
):
    """Times that follow Amdahl's law with f = 0.1 alone: 0.1 + 0.9 / 8 s a step on 8."""
    study(tmp_path, {n: (0.1 + 0.9 / n,) * 2 for n in (1, 2, 4)})
    *_, by_amdahl, by_usl = tables(tmp_path, "--tokens=1e9", "--size=8")["Resources for 1e9 tokens"]
    scale = medians(tmp_path)["ddp-1-r1"]  # the fixture's steps
    for row in (by_amdahl, by_usl):
        assert row["tokens_per_s"] == pytest.approx(16 * 64 / (0.1 + 0.9 / 8) / scale, rel=1e-6)
        assert (row["nodes"], row["doubtful"]) == (4, {})
    far = text(tmp_path, "--tokens=1e9", "--size=32")
    assert "?: extrapolated to 8 times the largest size that was measured: " in far
    with pytest.raises(SystemExit):
        proposal.main(["--tokens=-1"])
    assert proposal.main([str(tmp_path), "--tokens=1e9", "--size=0"]) == 2


def test_a_size_below_the_baselines_has_no_law(tmp_path):
    study(tmp_path, {2: (1.0,), 4: (0.6,)})
    records, _ = load([tmp_path])
    with pytest.raises(UsageError, match="--size 1 was not measured, and no law that begins below"):
        proposals.tables(records, [], Terms("ddp-2"), Request(1e9, size=1))


def test_one_size_has_its_fastest_configuration_and_no_law_and_no_picture(tmp_path, tables, capsys):
    study(tmp_path, {2: (1.0,)})
    about = facts("s", "ddp-1", cores=64, engine="megatron", gpus=2, tp=2, global_batch=16)
    write(tmp_path, about | {"run": "faster"}, step_s=0.5)
    found = tables(tmp_path, "--tokens=1e9", "--baseline=ddp-2")
    (row,) = found["Resources for 1e9 tokens"]
    assert row["run"] == "faster" and not any(name.startswith("Laws") for name in found)
    plot = str(tmp_path / "x.svg")
    assert proposal.main([str(tmp_path), "--tokens=1e9", "--plot", plot]) == 2
    assert "nothing to draw: no two sizes have a speedup" in capsys.readouterr().err


def test_what_no_run_states_is_a_dash_with_its_flag(tmp_path, text):
    folder = study(tmp_path, {1: (1.0,), 2: (0.6,)})
    for path in folder.iterdir():
        edit(path / "run.json", host={"cores": 8})
    shown = text(folder, "--tokens=1e9")
    for words in (
        "nodes -: no run states the GPUs of a node (--gpus-per-node): all",
        "kWh -: no run states its energy (--gpu-watts, of a GPU with its share of the node): all",
        "- machine: - (no log states it: --machine)",
        "- libraries: - (no log states it: --libraries)",
        "95 % from, to -: as many runs as unknowns tell no noise: repeat a size, or give --noise:"
        " Amdahl's law",
        "Universal Scalability Law: two sizes cannot give contention sigma and coherency kappa",
    ):
        assert words in shown, words
    given = ("--gpus-per-node=2", "--machine=Big", "--libraries=torch 2", "--noise=1%")
    shown = text(folder, "--tokens=1e9", "--gpu-watts=9", *given)
    assert "Amdahl's law is fixed by 2 sizes, so nothing tests it, and its intervals hold" in shown
    assert "- machine: Big" in shown and "- libraries: torch 2" in shown
    assert " -: " not in shown.partition("**What was measured**")[0]


def test_runs_in_doubt_and_runs_left_out_are_named_and_in_no_fit(tmp_path, text, tables):
    folder = study(tmp_path, {1: (1.0,), 2: (0.6,), 4: (0.4,)})
    fast = facts("s", "ddp-1", cores=64, engine="ddp", gpus=4, recompute="full", global_batch=16)
    fast["host"] |= {"ranks_per_node": 2}
    write(folder, fast | {"run": "other"}, step_s=0.001)
    crowd = facts("s", "ddp-1", cores=2, engine="ddp", gpus=8, global_batch=16)
    write(folder, crowd | {"run": "crowd"}, step_s=0.001)
    shown = text(folder, "--tokens=1e9")
    assert "left out: other: invalid comparison: recompute full here, none in the" in shown
    assert "crowd: oversubscribed: 8 ranks x 1 threads on 2 cores" in shown
    sizes = tables(folder, "--tokens=1e9")["Strong scaling"]
    assert [row["run"] for row in sizes] == ["ddp-1", "ddp-2", "ddp-4"]


def test_energy_that_was_measured_is_scaled_from_the_gpus_that_were_seen(tmp_path, tables):
    """20 steps of 1,024 tokens took 4,096 J on the one GPU of two that was seen: 0.4 J a token."""
    folder = study(tmp_path, {2: (0.5,)})
    (run,) = folder.iterdir()
    about = json.loads((run / "run.json").read_text())
    edit(run / "run.json", host=about["host"] | {"gpus_visible_to_rank_0": 1})
    edit(run / "training_metrics.json", summary={"energy_joules": 4096.0})
    (row,) = tables(folder, "--tokens=9e12", "--baseline=ddp-2")["Resources for 9e12 tokens"]
    assert row["kwh"] == pytest.approx(9e12 * 0.4 / 3.6e6)


def test_mlperf_trees_have_a_part_a_series_and_nodes_of_the_systems_file(tmp_path, tables):
    root = tmp_path / "training_results_v5.0"
    for nodes, step_s in ((64, 11.0), (128, 6.0)):
        for n in range(3):
            made = mlperf_tree.result(nodes=nodes, step_s=step_s * (1 + n / 1000))
            mlperf_tree.write(root, made, f"made_n{nodes}", n)
        path = root / "Made" / "systems" / f"made_n{nodes}.json"
        path.parent.mkdir(exist_ok=True)
        system = {"number_of_nodes": nodes, "accelerators_per_node": 8}
        path.write_text(json.dumps(system | {"accelerator_model_name": "NVIDIA H100 SXM"}))
    found = tables(root, "--tokens=2e12")
    (title,) = (name for name in found if name.startswith("Strong scaling"))
    small, large = found[title]
    assert (small["gpus"], small["nodes"], large["gpus"], large["nodes"]) == (512, 64, 1024, 128)
    assert large["speedup"] == pytest.approx(11 / 6) and large["n"] == 3
    row = found["Resources for 2e12 tokens"][1]
    days = 2e12 / (2048 * 2048 / (6.0 * 1.001)) / 86400
    assert [row["days"], row["node_hours"]] == pytest.approx([days, days * 24 * 128], rel=1e-3)
    # 0, 0.1 and 0.2 % are a noise of 0.1 %; twice two degrees of freedom, the median of three.
    error = 2.776445 * 0.001 / math.sqrt(3) * math.sqrt(math.pi / 2)
    assert np.array(row["days_ci95"]) / row["days"] - 1 == pytest.approx([-error, error], rel=0.01)
    (name,) = (name for name in found if name.startswith("Laws"))
    share = quantities(found[name], "Amdahl's law")["serial share f"]["value"]
    assert share == pytest.approx(2 * 6 / 11 - 1, rel=1e-3)


def test_a_law_whose_parameter_is_kept_at_0_says_so_and_is_not_called_exact(tmp_path, text):
    seconds = {1: (1.0, 1.001), 2: (0.6, 0.601), 4: (0.31, 0.311)}  # better from 2 to 4 than to 2
    shown = text(study(tmp_path, seconds), "--tokens=1e9")
    law = "- Universal Scalability Law"
    assert f"{law}: the times bend the other way than it allows, so coherency kappa is 0" in shown
    assert f"{law} is within " in shown and f"{law} is fixed by" not in shown


def test_a_named_baseline_is_called_so_and_smaller_sizes_are_not_called_slower(tmp_path, text):
    seconds = {1: (1.0,), 2: (0.55,), 4: (0.3,)}
    shown = text(study(tmp_path, seconds), "--tokens=1e9", "--baseline=ddp-2-r1")
    assert "- strong scaling against ddp-2 on 2 GPUs (--baseline); spread" in shown
    assert "- on fewer GPUs than the baseline, so not here: ddp-1" in shown
    assert "slower at the same size" not in shown


@pytest.mark.skipif(not CASES.is_dir(), reason="the logs of others are not beside the repository")
def test_175_billion_parameters_on_128_256_and_2048_gpus_by_hand(tables, text):
    names = ("stopped-128.log", "stopped-256.log", "header-ranks2048.log.gz")
    paths = [CASES / name for name in names]
    found = tables(*paths, "--tokens=2e12", "--gpus-per-node=8")
    t = {128: 346.67, 256: 180.8, 2048: 36.2}
    for row in found["Strong scaling"]:
        assert row["speedup"] == pytest.approx(346.67 / t[row["gpus"]])
        assert row["tokens_per_s"] == pytest.approx(1024 * 2048 / t[row["gpus"]])
        assert row["nodes"] == row["gpus"] / 8
    rows = found["Resources for 2e12 tokens"]
    # 2e12 / 57,932.4 tokens/s = 34,523,010 s = 399.57 days, on 256 nodes and 2,048 GPUs.
    assert rows[-1]["days"] == pytest.approx(399.57, abs=0.005)
    assert rows[-1]["node_hours"] == pytest.approx(399.572 * 24 * 256, rel=1e-5)
    # Amdahl on N = 1, 2, 16: relative least squares of t = a / N + b (1 - 1/N).
    n, seconds = np.array([1, 2, 16]), np.array(list(t.values()))
    z = np.stack([1 / n / seconds, (1 - 1 / n) / seconds], axis=1)
    (a, b), *_ = np.linalg.lstsq(z, np.ones(3))
    row = quantities(found["Laws of strong scaling"], "Amdahl's law")["serial share f"]
    assert row["value"] == pytest.approx(b / a) == pytest.approx(0.0448, abs=5e-5)
    assert 0.042 < row["low"] < row["value"] < row["high"] < 0.048
    verdicts = {row["run"]: row["verdict"] for row in found["What was measured"]}
    assert list(verdicts.values()) == ["stopped early", "stopped early", "complete"]
    shown = text(*paths, "--tokens=2e12")
    assert (
        "stopped early, so timed over fewer steps than planned: stopped-128.log, stopped" in shown
    )
    assert "- processor: - (no log states it: --gpu-type)" in shown


def test_the_picture_has_points_repeats_laws_and_the_ideal(tmp_path, text):
    folder = study(tmp_path / "runs", {1: (1.0, 1.1), 2: (0.6, 0.5), 4: (0.35, 0.4)})
    records, _ = load([folder])
    _, parts = proposals.tables(records, [], Terms(), Request(1e9))
    points, curves, words = proposals.drawn(parts)
    times = medians(folder)
    base = (times["ddp-1-r1"] + times["ddp-1-r2"]) / 2
    assert words == {1: "1 (1)", 2: "2 (1)", 4: "4 (2)"}
    assert points[1]["low"] == pytest.approx(base / times["ddp-2-r1"])
    assert points[1]["high"] == pytest.approx(base / times["ddp-2-r2"])
    assert {row["law"] for row in curves} == {"Amdahl's law", "Universal Scalability Law"}
    assert max(row["gpus"] for row in curves) == pytest.approx(16)
    plot = tmp_path / "scaling.svg"
    shown = text(folder, "--tokens=1e9", "--plot", plot)
    assert shown.startswith("![Speedup against GPUs, measured and by each law](scaling.svg)\n")
    drawn = plot.read_text()
    assert ">4 (2)<" in drawn and ">Amdahl's law<" in drawn
    assert proposal.main([str(folder), "--tokens=1e9", "--plot", str(tmp_path / "x.pdf")]) == 2


def test_the_picture_of_the_documentation_is_current(tmp_path, text):
    plot = tmp_path / "proposal.svg"
    text(ROOT / "logs/2-core-cpu/parity", "--tokens=1e9", "--plot", plot)
    assert plot.read_bytes() == (ROOT / "docs" / "proposal.svg").read_bytes()
