"""The same GPT, whatever the engine and the split: the runs of the first study, and some of the
studies of Llama's and Qwen3's architecture. 6 steps of 8 sequences of 32 tokens here; the studies
have 20 of 16 of 128.

fp32, clipped AdamW. Gradient norms are compared because a loss can look sane on wrong
gradients. Each run's time is broken down, which must change nothing; what the ranks sent is what
the closed formulas say.
"""

import math
import statistics
from pathlib import Path

import pytest

from analysis.planner.messages import sent_bytes
from parallel import sweep
from parallel.config.run_spec import assembled, settings_of
from parallel.config.study import load_study
from parallel.record.reader import Run, read_breakdown, read_run
from parallel.record.schema import CATEGORIES, EXPERT_MESSAGE_AXES, MESSAGE_AXES
from tests.conftest import ROOT

STEPS = 6
STUDIES = {
    "first": ROOT / "slurm" / "parity.toml",
    "more": ROOT / "tests" / "studies" / "more_splits.toml",
    "uneven": ROOT / "tests" / "studies" / "uneven_stages.toml",
    "llama": ROOT / "slurm" / "parity-llama.toml",
    "qwen3": ROOT / "slurm" / "parity-qwen3.toml",
    "moe": ROOT / "slurm" / "parity-moe.toml",
    "mla": ROOT / "slurm" / "parity-mla-moe.toml",
    "hugging face": ROOT / "tests" / "studies" / "hugging_face_llama.toml",
}
FAST = {  # every engine and axis, and each kind of model
    "first": "ddp fsdp2-dp2-zero3 deepspeed-zero-dp2-zero3 deepspeed-pipe-tp2-pp2"
    " megatron-tp2-sp megatron-pp2-vpp2 megatron-dp2-zero1".split(),
    "llama": "ddp deepspeed-zero-tp2-dp2-zero2 megatron-tp2-pp2-vpp2-sp-recompute-full".split(),
    "moe": "ddp deepspeed-zero-ep2-dp2-zero1 megatron-tp2-ep2-dp2-sp".split(),
    "mla": "ddp megatron-ep2-dp2-zero1".split(),
}
SLOW = {  # of the other studies all that is not fast
    "llama": "fsdp2-dp4-zero3-shard2-recompute-full"
    " deepspeed-pipe-pp2-dp2-zero1-recompute-full".split(),
    "qwen3": "ddp deepspeed-zero-tp2-dp2-zero3 deepspeed-pipe-tp2-pp2"
    " megatron-tp2-pp2-dp2-zero1".split(),
}
for _key, _path in STUDIES.items():
    SLOW.setdefault(_key, [run for run in load_study(_path).runs if run not in FAST.get(_key, ())])
ROWS = [pytest.param(key, run) for key, runs in FAST.items() for run in runs]
ROWS += [
    pytest.param(key, run, marks=pytest.mark.slow) for key, runs in SLOW.items() for run in runs
]


def train_all(path: Path, tokens: Path, out: Path, runs: tuple[str, ...] = ()) -> dict[str, Path]:
    """Train a study's runs, all by default, on `tokens` into out/<run>; the folders by run name."""
    copy = out / path.name
    text, ours = path.read_text(), f'[defaults]\ndata = "{tokens}"\nbreakdown = true'
    for key, value in (("max_seq_len", 32), ("eval_steps", 1)):
        ours += "" if key in text else f"\n{key} = {value}"
    text = text.replace("global_batch = 16", "global_batch = 8")
    text = text.replace("steps = 20", f"steps = {STEPS}").replace(
        "warmup_steps = 5", "warmup_steps = 2"
    )
    text = text.replace("\nlr = 1e-3", "\nlr = 2e-3")  # fewer steps go as far as those of the study
    if path == STUDIES["moe"]:  # AutoEP's messages have no column
        text = text.replace("ep = 2\nzero_stage", "ep = 2\nbreakdown = false\nzero_stage", 2)
    copy.write_text(text.replace("[defaults]", ours))
    study = load_study(copy)
    sweep.sweep(study, list(runs or study.runs), out, fresh=True)
    return {run: out / run for run in runs or study.runs}


@pytest.fixture(scope="session")
def trained(tmp_path_factory, tokens) -> dict[tuple[str, str], Path]:
    """Where each row's run folder is. The fast runs of a study are trained when the first of them
    is asked for, and so are the slow ones, whose baseline may be a fast one."""

    class Trained(dict):
        def __missing__(self, row: tuple[str, str]) -> Path:
            key, name = row
            runs = FAST[key] if name in FAST.get(key, ()) else SLOW[key]
            folders = train_all(STUDIES[key], tokens, tmp_path_factory.mktemp(key), tuple(runs))
            self.update({(key, run): folder for run, folder in folders.items()})
            return self[row]

    return Trained()


def baseline_of(key: str, trained: dict) -> Run:
    return read_run(trained[key, load_study(STUDIES[key]).baseline])


@pytest.mark.parametrize(("key", "name"), ROWS)
def test_every_split_trains_the_same_model(key, name, trained):
    run, baseline = read_run(trained[key, name]), baseline_of(key, trained)
    assert run.state == "complete", run.reason
    assert len(run.steps) == len(baseline.steps) == STEPS
    for ours, theirs in zip(run.steps, baseline.steps, strict=True):
        assert abs(ours["loss"] - theirs["loss"]) <= 2e-4
        assert abs(ours["grad_norm"] / theirs["grad_norm"] - 1) <= 2e-3
    assert abs(run.steps[0]["loss"] - math.log(257)) <= 0.3
    ours, theirs = (of.metrics["summary"]["best_val_loss"] for of in (run, baseline))
    assert abs(ours - theirs) <= 2e-4


AUTO_EP = [row.values for row in ROWS if row.values[1].startswith("deepspeed-zero-ep2")]


@pytest.mark.parametrize(("key", "name"), [row for row in ROWS if row.values not in AUTO_EP])
def test_every_rank_sends_what_the_formulas_say_and_its_parts_add_up(key, name, trained):
    run = read_run(trained[key, name])
    spec = assembled(settings_of(run.facts))
    ranks, problems = read_breakdown(run.path, spec.gpus)
    assert problems == [] and len(ranks) == spec.gpus
    axes = (*MESSAGE_AXES, *EXPERT_MESSAGE_AXES) if spec.model.experts else MESSAGE_AXES
    for rank, rows in ranks.items():
        expected = sent_bytes(spec, rank)
        for at, row in enumerate(rows[1:], 1):  # a first step also agrees on shapes and buckets
            for axis in set(axes) - {"control"}:
                sent = row[f"{axis}_wire_bytes"]
                if axis in ("ep", "etp"):  # what a rank receives is for routers to choose
                    ours = [of[at] for r, of in ranks.items() if axis in sent_bytes(spec, r)]
                    sent = sum(of[f"{axis}_wire_bytes"] for of in ours) / max(1, len(ours))
                if (wanted := expected.get(axis, 0)) is not None:  # None: no formula is known
                    assert sent == pytest.approx(wanted), axis
        assert [row["last_step"] for row in rows] == list(range(1, STEPS + 1))
        # A rank can lose its core between two readings of the clock, so one row proves nothing.
        parts = CATEGORIES + (EXPERT_MESSAGE_AXES if spec.model.experts else ())
        shares = [sum(row[f"{part}_s"] for part in parts) / row["elapsed_s"] for row in rows]
        assert statistics.median(shares) == pytest.approx(1, rel=0.02)
        worked = {part for part in CATEGORIES if any(row[f"{part}_s"] for row in rows)}
        assert {"forward", "backward", "optimizer", "data", "other"} <= worked
        assert ("bubble" in worked) == (spec.layout.pp > 1)
        assert ("tp" in worked) == (spec.layout.tp > 1)


def test_the_run_learns_is_clipped_and_its_folder_says_what_ran(trained):
    steps = baseline_of("first", trained).steps
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert max(step["grad_norm"] for step in steps) > 1.0  # so that clipping was exercised
    run = read_run(trained["first", "megatron-tp2-sp"])
    assert run.facts["layout"]["world_size"] == 2 and run.facts["baseline"] == "ddp"
    assert run.facts["model"]["vocab_size"] == 257 and run.facts["model"]["padded_vocab"] == 512
    assert run.facts["kernels"] == "torch" and run.facts["versions"]["megatron-core"]
    log = (run.path / "train.log").read_text()
    assert log.count("elapsed time per iteration (ms)") == STEPS
    assert "vocabulary padded from 257 to 512 rows, a multiple of 128 x tp 2" in log
    counts = {"optimizer_steps": STEPS, "micro_steps": STEPS * 4}
    counts |= {"tokens_processed_global": STEPS * 8 * 32}
    assert counts.items() <= run.metrics["epochs"][0].items()


def test_the_tables_say_equal_for_every_row(trained, capsys):
    from analysis import parity, tflops

    folder = str(trained["first", "ddp"].parent)
    assert parity.main(["--check", folder]) == 0
    assert tflops.main([folder]) == 0
    out = capsys.readouterr().out
    assert all(out.count(name) >= 2 for name in FAST["first"])
    assert "not verified" not in out


@pytest.mark.slow
def test_engines_agree_in_bf16(tokens, tmp_path):
    """Rounded to 8 bits at every operation, in other orders: within 0.01, where fp32 has 2e-4."""
    folders = train_all(ROOT / "tests" / "studies" / "bf16.toml", tokens, tmp_path)
    runs = {name: read_run(folder) for name, folder in folders.items()}
    for run in runs.values():
        assert run.state == "complete", run.reason
        for ours, theirs in zip(run.steps, runs["ddp"].steps, strict=True):
            assert abs(ours["loss"] - theirs["loss"]) <= 0.01
