"""Pictures and pages: one colour an engine and a part, a mark a precision, names of splits."""

import re

import pytest

from analysis import plots
from analysis.common import colours
from analysis.pages import charts, cost_views
from parallel.config.engine_abilities import ENGINES
from parallel.record.schema import CATEGORIES, EXPERT_MESSAGE_AXES
from tests.fixture_runs import drawn_rows, facts, write

MEMORY = ("weights", "gradients", "optimizer", "activations", "keys and values", "logits")
MEMORY = (*MEMORY, "buckets", "library")
PICTURES = [f"{name}.{kind}" for name in ("scaling", "splits", "tflops") for kind in ("png", "svg")]


def bars(pictures, name, value):
    """The bars of a chart and their values."""
    return {row["bar"]: row[value] for row in drawn_rows(pictures[name])}


def study(folder, *runs):
    for step_s, settings in runs:
        write(folder, facts("s", "ddp", **({"engine": "ddp"} | settings)), step_s=step_s)
    return plots.drawn([folder], None)


@pytest.mark.parametrize("parts", [(*CATEGORIES, *EXPERT_MESSAGE_AXES), MEMORY, cost_views._CLOCK])
def test_the_parts_of_a_chart_have_different_colours(parts):
    assert len({colours.PARTS.get(part, colours.GREY) for part in parts}) == len(parts)


def test_an_engine_has_one_colour_whatever_stands_beside_it(monkeypatch):
    labels = ["torchtitan", "megatron", "nanoGPT", "ddp", "GPT-NeoX"]
    scale = charts._engines([{"engine": label} for label in labels], None)["scale"]
    of_engine = dict(zip(scale["domain"], scale["range"], strict=True))
    assert of_engine == colours.of_engines(labels) and len(set(of_engine.values())) == 5
    assert colours.of_engines(["ddp"])["ddp"] == of_engine["ddp"]
    monkeypatch.setitem(ENGINES, "a new one", ENGINES["ddp"])
    of_all = colours.of_engines([*ENGINES, "x"])
    assert of_all.keys() == {*ENGINES, "x"} and len(set(of_all.values())) == len(of_all)


def test_a_precision_has_its_mark_in_points_and_its_name_at_bars(tmp_path):
    rows = [{"precision": name} for name in ("bf16", "fp8")]
    scale = charts._precisions(rows)["shape"]["scale"]
    assert scale == {"domain": ["bf16", "fp8"], "range": ["square", "diamond"]}
    assert charts._precisions(rows[:1]) == {}
    of_two = {"gpus": 2, "precision": "bf16", "tp": 2, "engine": "megatron"}
    pictures = study(tmp_path, (1.0, {}), (0.5, {"gpus": 2}), (0.4, of_two))
    names = {"1 × ddp fp32", "2 × ddp-dp2 fp32", "2 × megatron-tp2 bf16"}
    assert bars(pictures, "tflops", "tflops").keys() == names
    assert bars(pictures, "splits", "speedup").keys() == {"1 × ddp", "2 × ddp-dp2"}


def test_splits_are_bars_with_their_ideal_and_the_fastest_is_named(tmp_path):
    """At two GPUs there are three splits of megatron, of repeats one bar."""
    splits = ({"tp": 2}, {"pp": 2}, {})
    runs = [(0.6 + 0.1 * i, {"engine": "megatron", "gpus": 2} | s) for i, s in enumerate(splits)]
    pictures = study(tmp_path, (1.0, {}), (0.5, {"gpus": 2}), *runs)
    names = ["ddp-dp2", "megatron-tp2", "megatron-pp2", "megatron-dp2"]
    speedups = bars(pictures, "splits", "speedup")
    assert list(speedups) == ["1 × ddp", *(f"2 × {name}" for name in names)]
    expected = [1, 1 / 0.5, 1 / 0.6, 1 / 0.7, 1 / 0.8]
    assert list(speedups.values()) == pytest.approx(expected, rel=0.01)
    assert list(bars(pictures, "splits", "ideal").values()) == pytest.approx([1, 2, 2, 2, 2])
    line, points, *named = [drawn_rows(pictures["scaling"], layer) for layer in range(3)]
    assert line == [{"gpus": 1, "speedup": 1}, {"gpus": 2, "speedup": pytest.approx(2)}]
    assert len(points) == 5
    assert [row["run"] for rows in named for row in rows] == ["ddp", "ddp-dp2"]
    svg = charts.pictures(pictures["splits"])["svg"].decode()
    colour_of = colours.of_engines(["ddp", "megatron"])
    fills = re.findall(r'aria-roledescription="bar"[^>]*fill="(#\w+)"', svg)
    assert fills == [colour_of[row["engine"]] for row in drawn_rows(pictures["splits"])]
    svg = charts.pictures(pictures["scaling"])["svg"].decode()
    assert svg.count(">ddp-dp2<") == 1 and ">megatron-tp2<" not in svg


def test_a_repeat_that_failed_hides_no_other(tmp_path):
    for number, end in enumerate(({"loss": [], "fail": "no port"}, {}), start=1):
        about = facts("s", None, engine="ddp") | {"run": f"ddp-r{number}", "configuration": "ddp"}
        write(tmp_path, about, **end)
    assert bars(plots.drawn([tmp_path], None), "tflops", "tflops").keys() == {"1 × ddp"}


def test_a_printed_rate_without_a_time_and_a_name_with_dollars_are_drawn():
    row = dict.fromkeys(("engine", "speedup", "efficiency", "step_s", "steady_ci95", "precision"))
    row |= {"unsure": False, "notes": ""}
    (chart,) = charts.tflops([row | {"run": r"$\x{$", "gpus": 8, "tflops": 40.0}]).values()
    (bar,) = drawn_rows(chart)
    assert bar["low"] == bar["high"] == bar["end"] == 40
    assert r">8 × $\x{$<" in charts.pictures(chart)["svg"].decode()


def test_a_weak_study_has_a_weak_picture(tmp_path):
    pictures = study(tmp_path, (1.0, {"global_batch": 8}), (1.25, {"gpus": 2, "global_batch": 16}))
    assert list(bars(pictures, "splits", "efficiency").values()) == pytest.approx(
        [1, 0.8], rel=0.01
    )
    assert list(bars(pictures, "splits", "ideal").values()) == [1, 1]


def test_the_pictures_lie_beside_the_runs_and_what_they_leave_out_is_named(
    tmp_path, capsys, refused
):
    runs = tmp_path / "runs"
    write(runs, facts("s", "ddp", engine="ddp"), step_s=0.5)
    write(runs, facts("s", "ddp", engine="ddp", gpus=2), step_s=0.3)
    write(runs, facts("s", "ddp", engine="ddp", gpus=4), loss=[], fail="no port")
    write(runs, facts("s", "ddp", engine="ddp", gpus=8, recompute="full"))
    assert plots.main([str(runs)]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [str(runs / "plots" / name) for name in PICTURES]
    assert sorted(err.splitlines()) == [
        "analysis.plots: ddp-dp4: not in tflops and scaling: no data",
        "analysis.plots: ddp-dp8-recompute-full: not in scaling: invalid comparison: recompute"
        " full here, none in the baseline",
    ]
    assert "2 paths: say with --out FOLDER" in refused(plots.main, runs, runs / "ddp")
    assert plots.main([str(runs), "--out", str(tmp_path / "again")]) == 0
    for name in PICTURES:
        content = (runs / "plots" / name).read_bytes()
        assert content == (tmp_path / "again" / name).read_bytes()
        assert b"GPT scaling study" in content
