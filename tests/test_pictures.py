"""Pictures and pages: one colour an engine and a part, a mark a precision, names of splits."""

import pytest
from PIL import Image

from analysis import page
from analysis.common import colours
from analysis.logs.load import load
from analysis.measured import drawn_rows, run_table
from analysis.measured.fairness import scaling_of
from analysis.pages import altair_charts, cost_views
from parallel.config.engine_abilities import ENGINES
from parallel.record.schema import CATEGORIES
from tests.fixture_runs import facts, write

MEMORY = ("weights", "gradients", "optimizer", "activations", "keys and values", "logits")
MEMORY = (*MEMORY, "buckets", "library")


def bars(chart, value):
    """The bars of a chart and their values."""
    return {row["bar"]: row[value] for row in chart.rows}


def study(folder, *runs):
    for step_s, settings in runs:
        write(folder, facts("s", "ddp", **({"engine": "ddp"} | settings)), step_s=step_s)
    records, _ = load([folder])
    return run_table.rows(records), scaling_of(records)


@pytest.mark.parametrize("parts", [CATEGORIES, MEMORY, cost_views._CLOCK])
def test_the_parts_of_a_chart_have_different_colours(parts):
    assert len({colours.of_part(part) for part in parts}) == len(parts)


def test_an_engine_has_one_colour_whatever_stands_beside_it(monkeypatch):
    labels = ["torchtitan", "megatron", "nanoGPT", "ddp", "GPT-NeoX"]
    scale = altair_charts._engines([{"engine": label} for label in labels]).to_dict()["scale"]
    of_engine = dict(zip(scale["domain"], scale["range"], strict=True))
    assert of_engine == colours.of_engines(labels) and len(set(of_engine.values())) == 5
    assert colours.of_engines(["ddp"])["ddp"] == of_engine["ddp"]
    monkeypatch.setitem(ENGINES, "a new one", ENGINES["ddp"])
    of_all = colours.of_engines([*ENGINES, "x"])
    assert of_all.keys() == {*ENGINES, "x"} and len(set(of_all.values())) == len(of_all)


def test_a_precision_has_its_mark_in_points_and_its_name_at_bars(tmp_path):
    rows = [{"precision": name} for name in ("bf16", "fp8")]
    scale = altair_charts._precisions(rows)["shape"].to_dict()["scale"]
    assert scale == {"domain": ["bf16", "fp8"], "range": ["square", "diamond"]}
    assert altair_charts._precisions(rows[:1]) == {}
    of_two = {"gpus": 2, "precision": "bf16", "tp": 2, "engine": "megatron"}
    rows, kind = study(tmp_path, (1.0, {}), (0.5, {"gpus": 2}), (0.4, of_two))
    names = {"1 × ddp fp32", "2 × ddp-dp2 fp32", "2 × megatron-tp2 bf16"}
    assert bars(drawn_rows.tflops(rows), "tflops").keys() == names
    assert bars(drawn_rows.ratios(rows, kind), "speedup").keys() == {"1 × ddp", "2 × ddp-dp2"}


def test_splits_are_bars_with_their_ideal_and_the_fastest_is_named(tmp_path):
    """At two GPUs there are three splits of megatron."""
    splits = ({"tp": 2}, {"pp": 2}, {})
    runs = [(0.6 + 0.1 * i, {"engine": "megatron", "gpus": 2} | s) for i, s in enumerate(splits)]
    rows, kind = study(tmp_path, (1.0, {}), (0.5, {"gpus": 2}), *runs)
    names = ["ddp-dp2", "megatron-tp2", "megatron-pp2", "megatron-dp2"]
    chart = drawn_rows.ratios(rows, kind)
    speedups = bars(chart, "speedup")
    assert list(speedups) == ["1 × ddp", *(f"2 × {name}" for name in names)]
    expected = [1, 1 / 0.5, 1 / 0.6, 1 / 0.7, 1 / 0.8]
    assert list(speedups.values()) == pytest.approx(expected, rel=0.01)
    assert list(bars(chart, "ideal").values()) == pytest.approx([1, 2, 2, 2, 2])
    points, _, line, named = drawn_rows.points(rows, kind)
    assert line == [{"gpus": 1, "speedup": 1}, {"gpus": 2, "speedup": pytest.approx(2)}]
    assert len(points) == 5 and [row["run"] for row in named] == ["ddp", "ddp-dp2"]


def test_a_printed_rate_without_a_time_is_drawn():
    row = dict.fromkeys(("engine", "speedup", "efficiency", "step_s", "steady_ci95", "precision"))
    (bar,) = drawn_rows.tflops([row | {"run": "a", "gpus": 8, "tflops": 40.0}]).rows
    assert bar["low"] == bar["high"] == bar["end"] == 40


def test_a_weak_study_has_a_weak_picture(tmp_path):
    weak = (1.0, {"global_batch": 8}), (1.25, {"gpus": 2, "global_batch": 16})
    chart = drawn_rows.ratios(*study(tmp_path, *weak))
    assert list(bars(chart, "efficiency").values()) == pytest.approx([1, 0.8], rel=0.01)
    assert list(bars(chart, "ideal").values()) == [1, 1]


def test_the_same_runs_give_the_same_pictures_which_say_who_drew_them(tmp_path, capsys):
    study(tmp_path, (0.5, {}), (0.3, {"gpus": 2}))
    for folder in ("a", "b"):
        assert page.main([str(tmp_path), "--pictures", str(tmp_path / folder)]) == 0
    pictures = sorted((tmp_path / "a").iterdir())
    assert {path.suffix for path in pictures} == {".png", ".svg"} and len(pictures) % 2 == 0
    assert str(tmp_path / "a" / "strong-scaling-3.svg") in capsys.readouterr().out.splitlines()
    for path in pictures:
        content = path.read_bytes()
        assert content == (tmp_path / "b" / path.name).read_bytes()
        assert b"GPT scaling study" in content
        assert path.suffix == ".svg" or Image.open(path).text["Software"] == "GPT scaling study"
