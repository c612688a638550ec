"""Pictures and pages: one colour an engine and a part, a mark a precision, names of splits."""

import pytest

from analysis import plots
from analysis.common import colours
from analysis.common import drawing as drawing
from analysis.common.drawing import Point
from analysis.pages import altair_charts, cost_views
from parallel.config.engine_abilities import ENGINES
from parallel.record.schema import CATEGORIES
from tests.fixture_runs import facts, write

MEMORY = ("weights", "gradients", "optimizer", "activations", "keys and values", "logits")
MEMORY = (*MEMORY, "buckets", "library")
LOST = ("compute", "bubble", "tp", "dp", "pp", "other communication", "imbalance", "other")


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """What analysis.plots draws of a study's runs: figures by name."""
    figures = {}
    monkeypatch.setattr(
        drawing, "save", lambda figure, _, name, *__: figures.update({name: figure}) or []
    )

    def draw(*runs):
        for step_s, settings in runs:
            write(tmp_path, facts("s", "ddp", **({"engine": "ddp"} | settings)), step_s=step_s)
        assert plots.main([str(tmp_path)]) == 0
        return figures

    return draw


@pytest.mark.parametrize(
    "parts",
    [CATEGORIES, LOST, MEMORY, cost_views._CLOCK],
)
def test_the_parts_of_a_chart_have_different_colours(parts):
    assert len({colours.of_part(part) for part in parts}) == len(parts)


def test_plot_and_page_give_an_engine_one_colour():
    labels = ["torchtitan", "megatron", "nanoGPT", "ddp", "GPT-NeoX"]
    rows = [{"engine": label} for label in labels]
    page = altair_charts._engines(rows).to_dict()["scale"]
    on_page = dict(zip(page["domain"], page["range"], strict=True))
    points = [Point(1, 1.0, label) for label in reversed(labels)]
    legend = drawing.tflops(points, "", "").legends[0].legend_handles
    assert {handle.get_label(): handle.get_color() for handle in legend} == on_page
    assert len(set(on_page.values())) == 5
    assert set(colours.of_engines([*ENGINES, "x"])) == {*ENGINES, "x"}


def test_a_precision_has_its_mark_on_the_page():
    rows = [{"precision": name} for name in ("bf16", "fp8")]
    scale = altair_charts._precisions(rows)["shape"].to_dict()["scale"]
    assert scale == {"domain": ["bf16", "fp8"], "range": ["square", "diamond"]}
    assert altair_charts._precisions(rows[:1]) == {}


def test_splits_are_named_and_no_line_joins_them(drawn):
    """At two GPUs there are three splits of megatron; only ddp has one run at each size."""
    splits = ({"tp": 2}, {"pp": 2}, {})
    runs = [(0.6 + 0.1 * i, {"engine": "megatron", "gpus": 2} | s) for i, s in enumerate(splits)]
    figures = drawn((1.0, {}), (0.5, {"gpus": 2}), *runs)
    axes = figures["speedup"].axes[0]
    names = {text.get_text() for text in axes.texts}
    assert names == {"tp2", "pp2", "dp2"} and len(axes.texts) == 4
    lines = [line for line in axes.lines if line.get_linestyle() == "-"]
    assert [line.get_color() for line in lines] == [colours.of_engines(["ddp"])["ddp"]]
    heights = sorted(text.xyann[1] for text in axes.texts)
    assert min(b - a for a, b in zip(heights, heights[1:], strict=False)) >= 0.03


def test_points_are_named_after_their_precision_where_it_differs(drawn):
    figures = drawn((1.0, {}), (0.5, {"gpus": 2}))
    assert [text.get_text() for text in figures["tflops"].axes[0].texts] == ["dp2"]
    figures = drawn((0.4, {"gpus": 2, "precision": "bf16", "tp": 2, "engine": "megatron"}))
    names = {text.get_text() for text in figures["tflops"].axes[0].texts}
    assert names == {"fp32", "dp2 fp32", "tp2 bf16"}
    assert {text.get_text() for text in figures["speedup"].axes[0].texts} == {"dp2"}


def test_a_weak_study_has_a_weak_picture(drawn):
    figures = drawn((1.0, {"global_batch": 8}), (1.25, {"gpus": 2, "global_batch": 16}))
    axes = figures["speedup"].axes[0]
    assert (axes.get_title(), axes.get_ylabel()) == ("Weak scaling", "scaled speedup over 1 GPU")
    assert sorted(y for line in axes.lines for y in line.get_ydata() if y not in (1, 2)) == (
        pytest.approx([1.6, 1.6], rel=0.01)
    )
