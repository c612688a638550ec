"""A run that goes on from a checkpoint is the run that never stopped; so is another layout's or
another engine's, within what engines differ by anyway."""

import functools
import json
import math

import pytest

from models.config import GPTConfig, parameter_shapes
from parallel.checkpoint import folders
from parallel.checkpoint.rank_files import Reader
from parallel.record.reader import read_checkpoints, read_run
from tests.checkpoint_worker import RULES, SIZES, save_of
from tests.conftest import run_module, run_worker

# The first writes the checkpoint that the others go on from; the last one's goes back to the first.
NAMES = {
    "gpt2": (
        "megatron:tp=2,pp=2",
        "deepspeed_pipe:pp=2,tp=2",
        "ddp",
        "deepspeed_zero:zero_stage=3,recompute=full",
        "fsdp2:zero_stage=3,fsdp_shard=2",
        "megatron:pp=2,decoder_first_pipeline_num_layers=3",
    ),
    "gpt2, other splits": (
        "megatron:pp=4",
        "megatron:tp=4",
        "deepspeed_zero:tp=2,zero_stage=1",
        "megatron:pp=2,zero_stage=1",
    ),
    "llama": (
        "megatron:tp=2,pp=2,sequence_parallel=true",
        "deepspeed_zero:zero_stage=3",
        "deepspeed_zero:tp=2,zero_stage=1",
        "deepspeed_pipe:pp=2,tp=2",
        "megatron:tp=2,zero_stage=1",
        "ddp",
        "fsdp2:zero_stage=3",
    ),
    "moe": (
        "megatron:ep=2",
        "megatron:tp=2,pp=2,sequence_parallel=true",
        "ddp",
        "megatron:ep=2,etp=2,zero_stage=1",
        "megatron:tp=2,ep=2,sequence_parallel=true,zero_stage=1",
        "fsdp2:zero_stage=3,fsdp_shard=2",
        "deepspeed_zero:zero_stage=1",
        "deepspeed_zero:zero_stage=3",
        "deepspeed_zero:ep=2,zero_stage=2",
        "deepspeed_pipe:pp=2,zero_stage=1",
    ),
    "mla": (
        "megatron:ep=2",
        "megatron:tp=2,pp=2,sequence_parallel=true",
        "ddp",
        "megatron:pp=2,ep=2,zero_stage=1",
        "fsdp2:zero_stage=3,fsdp_shard=2",
    ),
}
for _key, _preset in (
    ("gpt2", "qk_norm=true"),
    ("gpt2, other splits", "qk_norm=true"),
    ("llama", "preset=tiny-llama,n_kv_head=2,qk_norm=true"),
    ("moe", "preset=tiny-moe,n_kv_head=2"),
    ("mla", "preset=tiny-mla-moe"),
):
    NAMES[_key] = tuple(f"{n}{',' if ':' in n else ':'}{_preset}" for n in NAMES[_key])
ROWS = [
    pytest.param(model, name, marks=[pytest.mark.slow] if model != "gpt2" else [])
    for model, names in NAMES.items()
    for name in names
]


def checkpoint(folder) -> Reader:
    """What was saved after two steps."""
    saved = folder / folders.name_of(2)
    return Reader(saved, folders.verify(saved))


def work(ranks: int, *words: object) -> dict:
    """What tests/checkpoint_worker.py found."""
    printed = run_worker("checkpoint_worker", "deepspeed_pipe", ranks, *words)
    (line,) = [x for x in printed.splitlines() if x.startswith('{"straight"')]
    return json.loads(line)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tokens):
    """Of a model, where the checkpoints are and what was found on 4 ranks."""

    @functools.cache
    def of(model: str):
        out = tmp_path_factory.mktemp(model)
        return out, work(4, out, tokens, *NAMES[model])

    return of


@pytest.mark.parametrize(("model", "name"), ROWS)
def test_the_same_layout_goes_on_bit_for_bit(model, name, trained):
    _, found = trained(model)
    # Exact: the same ranks of one machine do the same operations in the same order.
    assert found["same"][name] == found["straight"][name][2:]
    assert found["bits"][name]  # weights and both moments of every rank, after the last step


@pytest.mark.parametrize(
    ("run", "ranks"),  # that hold a weight's parts
    [
        ("ddp:", 1),
        ("deepspeed_zero:zero_stage=3,recompute=full,", 4),
        ("megatron:tp=2,pp=2,", 2),
        ("fsdp2:zero_stage=3,fsdp_shard=2,", 2),
        pytest.param("deepspeed_zero:tp=2,zero_stage=1,", 2, marks=pytest.mark.slow),
        pytest.param("megatron:tp=4,", 4, marks=pytest.mark.slow),
    ],
)
def test_a_rank_draws_what_it_holds_and_nothing_before_a_load(run, ranks, trained):
    name = f"{run}qk_norm=true"
    _, found = trained(next(model for model, names in NAMES.items() if name in names))
    sizes = parameter_shapes(GPTConfig(**SIZES)).items()
    weights = {name: math.prod(shape) for name, shape in sizes if len(shape) > 1}
    # On every tp rank; and the first has nearly all rows of this padded vocabulary.
    copied = sum(weights.pop(f"embedding.{table}.weight") for table in ("position", "word"))
    at_start, before_load = found["drawn"][name]
    assert before_load == 0
    rounded = 32 * len(weights)  # to rows and words
    assert at_start <= sum(weights.values()) / ranks + copied + rounded


@pytest.mark.parametrize(("model", "name"), ROWS)
def test_another_layout_and_engine_go_on_with_the_same_curve(model, name, trained):
    _, found = trained(model)
    straight = found["straight"][NAMES[model][0]][2:]
    for ours, theirs in zip(found["crossed"][name], straight, strict=True):
        assert abs(ours[0] - theirs[0]) <= 2e-4
        assert abs(ours[1] / theirs[1] - 1) <= 2e-3
    # Without the moments it would be another curve: the bar can be missed.
    assert abs(straight[1][0] - straight[0][0]) > 0.1


@pytest.mark.parametrize(("model", "name"), ROWS)
def test_every_parameter_has_the_same_gradients(model, name, trained):
    """The norm of all gradients hides those of the smallest parameters: of norms, for example."""
    whole = "gpt2" if "gpt2" in model else model
    ddp = next(name for name in NAMES[whole] if name.startswith("ddp"))
    places = (trained(model)[0], name), (trained(whole)[0], ddp)
    ours, theirs = (checkpoint(save_of(*place)) for place in places)
    assert ours.shapes == theirs.shapes
    for parameter in ours.shapes:
        gradient, exact = (of.gathered(parameter, "exp_avg") for of in (ours, theirs))
        if parameter.endswith("k_norm.bias"):  # it adds the same to all scores of a query
            weight = theirs.gathered(parameter.replace("bias", "weight"), "exp_avg")
            assert max(gradient.norm(), exact.norm()) <= 1e-4 * weight.norm()
            continue
        assert float((gradient - exact).norm()) <= 2e-3 * float(exact.norm()), parameter


def test_the_loss_scaler_goes_on_as_it_was(tokens, tmp_path):
    """fp16 on a CPU, one process: two steps overflow, then the run is saved, and two come after."""
    engines = ("ddp", "deepspeed_zero:zero_stage=1", "deepspeed_pipe", "megatron")
    names = [f"{e}{',' if ':' in e else ':'}precision=fp16" for e in engines]
    found = work(1, tmp_path, tokens, *names)
    for name in names:
        straight, (before, after) = found["straight"][name], found["scaler"][name]
        assert before == after and before["scale"] > 1, name
        assert straight[0][1] is straight[1][1] is None, name  # skipped
        # Exact: one process does the same operations in the same order.
        assert found["same"][name] == straight[2:], name
        assert found["bits"][name], name
        # The first of two overflows is let pass, whatever the engine.
        assert before == {"scale": 2.0**33, "good_steps": 0, "hysteresis": 1}, name


FP16 = ("deepspeed_zero:tp=2,", "deepspeed_zero:zero_stage=3,", "deepspeed_pipe:pp=2,")
FP16 += ("megatron:tp=2,",)
MORE_FP16 = ("ddp:", "deepspeed_zero:", "deepspeed_zero:zero_stage=1,", "deepspeed_pipe:tp=2,")


@pytest.mark.parametrize("runs", [FP16, pytest.param(MORE_FP16, marks=pytest.mark.slow)])
def test_fp16_measures_and_clips_the_gradient_of_the_whole_model(runs, tokens, tmp_path):
    """And divides it by the scale that it was multiplied with, which every engine doubles after
    step 2, the thousandth good one."""
    names = [f"{run}precision=fp16" for run in runs]
    found = work(2, tmp_path / "raised", tokens, "ddp", *names)
    baseline = checkpoint(tmp_path / "raised" / "ddp")
    for name in names:
        for (_, norm, scale), (_, exact, _) in zip(
            found["straight"][name][:2], found["straight"]["ddp"], strict=False
        ):
            assert abs(norm / exact - 1) <= 2e-3 and scale == 2.0**10, name
        assert [scale for _, _, scale in found["straight"][name][2:]] == [2.0**11] * 2, name
        # Exact: the same ranks do the same operations in the same order.
        assert found["same"][name] == found["straight"][name][2:] and found["bits"][name], name
        ours, off, size = checkpoint(save_of(tmp_path / "raised", name)), 0.0, 0.0
        for parameter in baseline.shapes:
            exact = baseline.gathered(parameter, "exp_avg")
            off += float((ours.gathered(parameter, "exp_avg") - exact).square().sum())
            size += float(exact.square().sum())
        assert off <= 1e-3**2 * size, (name, (off / size) ** 0.5)


def test_a_step_that_doubles_the_scale_has_its_gradients_of_the_scale_before(tokens, tmp_path):
    """Where nothing is clipped, DeepSpeed's ZeRO alone would halve them."""
    ddp, zero = (f"{of}clip_grad=100" for of in ("ddp:", "deepspeed_zero:zero_stage=1,"))
    work(2, tmp_path / "raised", tokens, ddp, f"{zero},precision=fp16")
    runs = (save_of(tmp_path / "raised", name) for name in (ddp, f"{zero},precision=fp16"))
    exact, ours = map(checkpoint, runs)
    off, size = 0.0, 0.0
    for parameter in exact.shapes:
        gradient, true = (of.gathered(parameter, "exp_avg") for of in (ours, exact))
        off += float((gradient - true).square().sum())
        size += float(true.square().sum())
    assert off <= 1e-3**2 * size, (off / size) ** 0.5


def test_the_loss_that_balances_experts_is_multiplied_by_the_scale_too(tokens, tmp_path):
    """A pipeline stage adds its gradient by itself; it is most of a router's first gradients."""
    ddp, pipe = (f"{of}preset=tiny-moe" for of in ("ddp:", "deepspeed_pipe:pp=2,precision=fp16,"))
    work(2, tmp_path / "raised", tokens, ddp, pipe)
    exact, ours = (checkpoint(save_of(tmp_path / "raised", name)) for name in (ddp, pipe))
    for block in range(4):  # a rounded score can choose another expert
        of_router = f"blocks.{block}.mlp.router.weight"
        gradient, true = (of.gathered(of_router, "exp_avg") for of in (ours, exact))
        assert float((gradient - true).norm()) <= 0.1 * float(true.norm()), of_router


def test_one_process_goes_on_from_four_and_the_moments_matter(trained, tokens, tmp_path):
    out, found = trained("gpt2")
    load = str(out / "megatron-tp2-pp2-qk_normtrue" / folders.name_of(2))
    settings = SIZES | RULES | {"device": "cpu", "data": tokens, "load": load, "qk_norm": True}

    def train(folder, **changes) -> str:
        flags = []
        for name, value in (settings | changes | {"out": folder}).items():
            flags += ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]
        done = run_module("parallel.train", *flags)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "this run differs from it" not in train(tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert [step["step"] for step in run.steps] == [3, 4]
    for step, theirs in zip(run.steps, found["straight"][NAMES["gpt2"][0]][2:], strict=True):
        assert abs(step["loss"] - theirs[0]) <= 2e-4
    assert [(e["event"], e["step"]) for e in read_checkpoints(run.path)] == [("load", 2)]
    differs = "at iteration 2; this run differs from it: global_batch 2 not 4, seed 7 not 1234\n"
    assert differs in train(tmp_path / "smaller", global_batch=2, seed=7)
