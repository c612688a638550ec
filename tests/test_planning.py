"""The planner: every possible layout and no other, fast, ranked, refused in words."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from analysis import plan, prune
from analysis.planner import explain, ranking
from analysis.planner.calibration import FOLDER, from_data_sheet, load_calibration, names
from analysis.planner.space import space
from base.errors import Parser, UsageError
from models.config import PRESETS, GPTConfig, preset
from models.gpus import network_rate
from parallel.config import memory
from parallel.config.clusters import load_clusters
from parallel.config.layout import Layout
from parallel.config.layout_arrays import columns
from parallel.config.study import load_study
from slurm import render
from tests.conftest import ROOT

ON_8 = ["--cluster", "selene", "--gpus", "8", "--global-batch", "8"]
PLAN = ["--cluster", "selene", "--gpus", "64", "--global-batch", "64", "--preset", "18b"]


def plan_flags(flags):
    parser = Parser(prog="plan")
    plan.add_flags(parser)
    return parser.parse_args(flags)


@pytest.mark.parametrize(
    "config",  # heads of keys and values, feed-forward and layers with few common divisors
    [
        GPTConfig(6, 768, 12, max_seq_len=96),
        preset("llama3-8b", n_layer=4, n_head=8, n_kv_head=4, hidden=512, ffn_hidden=36),
    ],
)
def test_what_is_planned_is_what_layout_problems_lets_run(config):
    """Of 8 GPUs and 12 sequences: every layout whose problems are none and whose tp fills nodes."""
    seq_len, sizes = 90, (1, 2, 3, 4, 6, 8)
    x = space(config, from_data_sheet("A100"), 8, 12, seq_len, cps=(1, 3, 5), leave=7)
    assert not any(x.layout(i).problems(config, seq_len) for i in range(len(x)))
    planned = {x.layout(i) for i in range(len(x))}
    assert len(planned) == len(x) - x.fsdp2.sum()
    megatron = {p for p in planned if p.zero_stage == 0 and p.recompute == "full"}
    wanted = set()
    for tp, cp, pp, vpp, micro, sp in itertools.product(
        (1, 2, 4, 8), (1, 3, 5), sizes, sizes, (1, 2, 3, 4, 6, 12), (False, True)
    ):
        dp = max((n for n in sizes if 12 % n == 0 and tp * cp * pp * n <= 8), default=0)
        if dp and 12 % (dp * micro) == 0:
            given = {"dp": dp, "tp": tp, "cp": cp, "pp": pp, "vpp": vpp, "micro_batch": micro}
            given |= {"n_micro": 12 // dp // micro, "sequence_parallel": sp, "recompute": "full"}
            layout = Layout(**given)
            wanted |= {layout} if not layout.problems(config, seq_len) else set()
    assert megatron == wanted
    with pytest.raises(UsageError, match="cp 4 cuts a sequence into 8 chunks"):
        space(config, from_data_sheet("A100"), 8, 12, seq_len, cps=(4,))


def test_175b_on_512_gpus_is_planned_in_order_of_time():
    cluster = load_calibration("selene")
    r = ranking.rank(space(PRESETS["175b"], cluster, 512, 1536, 2048), cluster, 0.06)
    assert len(r.x) > 3000 and len(r.order) > 100
    assert (np.diff(r.seconds[r.order]) >= 0).all()
    assert (r.x.gpus == 512).all() and (r.x.global_batch == 1536).all()
    best = int(r.order[0])
    assert sum(explain.seconds_of(r, best).values()) == pytest.approx(r.seconds[best])
    gigabytes = sum(ranking.gigabytes(r.x.take([best]), cluster).values())
    assert gigabytes == pytest.approx(r.used[best] / memory.GB)


def test_context_parallel_layouts_fill_the_gpus_and_are_written_into_the_study(tmp_path):
    path = tmp_path / "planned.toml"
    flags = ["--preset", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "64", "--top", "3"]
    flags += ["--global-batch", "16", "--seq-len", "32768"]
    x = plan.question(plan_flags([*flags, "--cp", "1", "2", "4"])).ranked().x
    assert set(x.cp.tolist()) == {1, 2, 4} and (x.gpus == 64).all() and (x.global_batch == 16).all()
    assert not (x.deepspeed & (x.cp > 1)).any()
    alone = plan.answer(plan_flags(flags))
    assert "cp" not in [column.key for column in alone.columns]
    ring = plan.answer(plan_flags([*flags, "--cp", "4", "--study", str(path)]))
    assert {row["cp"] for row in ring.rows} == {4} and "cp" in [c.key for c in ring.columns]
    assert plan.RING in ring.notes
    for spec, row in zip(load_study(path).specs.values(), ring.rows, strict=True):
        assert (spec.cp, spec.layout.dp) == (4, row["dp"])
        assert spec.gpus == 64 == row["tp"] * row["cp"] * row["pp"] * row["dp"]


def test_a_study_that_was_planned_in_tf32_asks_for_it(tmp_path):
    path = tmp_path / "planned.toml"
    flags = ["--preset", "1.7b", "--gpus", "8", "--global-batch", "8", "--top", "1"]
    for cluster, asks in (("dgx-h100", True), ("jean-zay-v100", False)):
        here = [*flags, "--cluster", cluster, "--precision", "fp32", "--study", str(path)]
        found = plan.answer(plan_flags([*here, "--force"]))
        assert (" in tf32 with " in found.notes[0]) is asks
        assert {spec.tf32 for spec in load_study(path).specs.values()} == {asks}


@pytest.mark.parametrize(
    ("where", "why", "assumed"),
    [
        (["--gpu-type", "H100"], "no run was fitted", True),
        (["--gpu-type", "H100 SXM"], "no run was fitted", False),
        (["--cluster", "dgx-h100"], "20 runs were fitted", False),
    ],
)
def test_a_plan_says_what_it_assumed_and_how_wide_its_interval_is(where, why, assumed):
    flags = ["--preset", "llama3-8b", "--gpus", "64", "--global-batch", "64", "--top", "3"]
    table = plan.answer(plan_flags([*flags, *where]))
    first = table.rows[0]
    low, high = (first[key] / first["predicted_s"] - 1 for key in ("low_s", "high_s"))
    notes = "\n".join(table.notes)
    assert f"hold 80 %, of the first {low:+.0%} to {high:+.0%}: {why}" in notes
    assert "llama3-8b: 8.03B parameters, 64 sequences of 8192 tokens a step, 64 GPUs" in notes
    assert ("--gpu-type H100 may be several cards: H100 SXM is assumed" in notes) == assumed


def test_layouts_to_measure_are_the_fastest_of_different_splits():
    splits = [(8, 1), (8, 1), (8, 2), (4, 1), (2, 1)]
    (note,) = ranking.alike_note(np.array([1.0, 1.029, 1.031, 1.2, 1.3]), splits)
    assert note.startswith("2 layouts")
    assert note.endswith("the fastest of tp 8 pp 1, tp 8 pp 2 and tp 4 pp 1")
    assert ranking.alike_note(np.array([1.0, 1.1]), splits[1:3]) == []
    assert "fastest of" not in ranking.alike_note(np.array([1.0, 1.0]), splits[:2])[0]
    assert ranking.alike_note(np.array([]), []) == []


def test_fp8_is_planned_on_cards_that_have_it(tmp_path, capsys):
    path = tmp_path / "planned.toml"
    flags = ["--preset", "llama3-8b", "--gpus", "64", "--global-batch", "64", "--top", "2"]
    here = [*flags, "--cluster", "dgx-h100"]
    bf16 = plan.answer(plan_flags(here)).rows[0]
    fp8 = plan.answer(plan_flags([*here, "--precision", "fp8", "--study", str(path)]))
    assert fp8.rows[0]["predicted_s"] < bf16["predicted_s"] and plan.FP8_MEMORY in fp8.notes
    assert fp8.rows[0]["mfu"] == pytest.approx(fp8.rows[0]["tflops"] / 1978.9)
    assert {spec.precision for spec in load_study(path).specs.values()} == {"fp8"}
    assert plan.main([*flags, "--cluster", "selene", "--precision", "fp8"]) == 2
    assert "the A100 of selene has no fp8: --precision bf16 or fp16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([*ON_8, "--cluster", "nowhere"], "no cluster"),
        ([*ON_8, "--gpus", "512", "--global-batch", "1537"], "; 1536 or 1538 would do"),
        (
            [*ON_8, "--gpus", "16384", "--global-batch", "1", "--preset", "1.7b"],
            "too many for a global batch of 1: at most tp 8 x pp 24 (the layers) x dp 1 = 192",
        ),
        (ON_8, "do not fit on 8 GPUs of"),
        ([*PLAN, "--cp", "3"], "cp 3 cuts a sequence into 6 chunks: not one of 2048"),
        ([*ON_8, "--gpus", "12", "--cp", "8"], "no layout of 12 GPUs: no tp x cp x pp divides"),
        ([*PLAN, "--n-layer", "1000000000"], "--n-layer must be at least 1 and at most 10000"),
        ([*PLAN, "--margin", "nan"], "--margin must be at least 0 and below 1, not nan"),
        ([*PLAN, "--why", "tp=8", "--format", "json"], "text only"),
        (
            [*PLAN, "--cp", "2", "--engine", "fsdp2"],
            "in bf16 with cp 2: a dp x cp of 1, cp above 1 (not in fp32) and fp8",
        ),
        ([*PLAN, "--leave", "64"], "would leave all 64 GPUs idle: give at most 63"),
        ([*ON_8, "--network", "8x NDR"], "8 GPUs of selene is one node, and nothing leaves it"),
        ([*PLAN, "--gpus-per-node", "4"], "goes with --gpu-type"),
        ([*PLAN, "--gpu-memory", "40"], "goes with --gpu-type"),
        (["--gpu-type", "A100-40GB", *PLAN[2:]], "add --gpu-memory 40"),
        ([*PLAN, "--why", "recompute=some"], "only none, selective, full"),
        ([*PLAN, "--why", "tp=3"], "there are: tp 1, 2, 4, 8"),
        ([*PLAN, "--why", ""], "--why: say which layout, as tp=8,pp=8,mbs=1"),
        (["--cluster", "slurm/parity.toml", *PLAN[2:]], "calibration slurm/parity.toml: unknown "),
    ],
)
def test_a_wrong_plan_is_one_line(flags, said, capsys):
    assert plan.main(flags) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "wrong", "said"),
    [
        ("gemm = ", "gemn = 1.0", "unknown gemn; known: gemm"),
        ("gemm = ", "", "constants: missing gemm"),
        ("gemm = ", "gemm = -1.0", "gemm must be above 0 and below inf, not -1"),
        ("gpu = ", "gpu = 5", "gpu must be text, not 5"),
        ("network = ", 'network = "fast"', "network 'fast' states no rate"),
        ("flash = ", 'flash = "no"', "flash must be true or false, not 'no'"),
        ("library_gb = ", "libary_gb = 4", "unknown libary_gb; known: library_gb"),
        ("covariance = [", "covariance = [ [1, 2], ", "covariance is no 15 x 15 table"),
    ],
)
def test_a_mistake_in_a_cluster_file_is_one_line(line, wrong, said, tmp_path, capsys):
    lines = (FOLDER / "selene.toml").read_text().split("\n")
    at = next(i for i, text in enumerate(lines) if text.startswith(line))
    path = tmp_path / "mine.toml"
    path.write_text("\n".join([*lines[:at], wrong, *lines[at + 1 :]]))
    assert plan.main([*PLAN, "--cluster", str(path)]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("table", "flags", "said"),
    [
        ("gpu_memory_gb = 640", [], "640 is no memory of one GPU: a H100 SXM has 80 GB"),
        ("max_nodes = 8", ["--gpus", "128"], "128 GPUs exceed the 64 of mine"),
        ('gpu = ""', [], "names no gpu: give its table the key gpu"),
    ],
)
def test_a_plan_says_what_is_wrong_with_ones_own_cluster(
    table, flags, said, tmp_path, monkeypatch, capsys
):
    path = tmp_path / "clusters.toml"
    card = "" if "gpu =" in table else 'gpu = "H100"\n'
    shape = 'description = ""\ngpus_per_node = 8\ncores_per_node = 96\n'
    path.write_text(f"[mine]\n{shape}{card}{table}\n[other]\n{shape}broken = 1\n")
    monkeypatch.setenv("SCALING_CLUSTERS", str(path))
    asked = ["--preset", "llama3-8b", "--gpus", "64", "--global-batch", "128", "--cluster", "mine"]
    assert plan.main([*asked, *flags]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_a_host_keeps_its_engines_apart_and_shares_its_memory():
    """Megatron's layouts have Megatron's memory on a CPU too, whatever engine the time is of."""
    host, config = load_calibration("2-core-cpu"), PRESETS["tiny"]
    x = space(config, host, 2, 16, config.max_seq_len, "fp32")
    megatron = x.zero_stage < 2
    assert x.slower[megatron].all() and not x.deepspeed[megatron].any()
    deepspeed = ~megatron & ~x.fsdp2
    assert x.deepspeed[deepspeed].all() and not x.deepspeed[x.fsdp2].any() and x.fsdp2.any()
    assert memory.buckets(x)[deepspeed].all() and not memory.buckets(x)[~deepspeed].any()
    assert ranking.usable_bytes(x, host, 0.0) == host.gpu_memory_gb * memory.GB / 2


def test_why_explains_the_fastest_layout_that_fits_where_one_does(capsys):
    assert plan.main([*PLAN, "--why", "tp=8,pp=1,sp=no,mbs=1"]) == 0
    out = capsys.readouterr().out
    assert "rank, fits in" in out
    assert re.search(r"\nthe fastest of \d+ such layouts, \d+ of which fit\n", out)
    assert plan.main([*PLAN[:-1], "175b", "--why", "tp=1,ZeRO=0"]) == 0
    assert "does NOT fit (nor does any" in capsys.readouterr().out


def test_a_card_without_bf16_is_planned_in_fp16_and_the_note_says_what_is_unknown(capsys):
    sizes = ["--gpus", "16", "--global-batch", "64", "--preset", "1.7b", "--top", "1"]
    assert plan.main(["--cluster", "jean-zay-v100-16g", *sizes]) == 0
    out = capsys.readouterr().out
    assert "no run; rates of the card of 32 GB) in fp16 with unfused" in out
    assert "a fit of this card exists: jean-zay-v100" in out
    assert plan.main([*PLAN, "--flash"]) == 0
    out = capsys.readouterr().out
    assert "in bf16 with flash" in out and "no run of this fit had flash attention" in out
    assert all(from_data_sheet(card).flash for card in ("A800", "A10", "L4", "L40S", "B200"))
    assert not from_data_sheet("V100").flash


def test_recomputation_is_not_offered_where_it_saves_nothing():
    """Selective: our engines never store the scores. Full: a stage of one layer keeps as much."""
    cluster = load_calibration("dgx-h100")
    x = space(replace(PRESETS["7.5b"], n_layer=8), cluster, 8, 64, 2048)
    assert set(x.recompute.tolist()) == {0, 2}
    r = ranking.rank(x, cluster, 0.06)
    beaten = np.setdiff1d(r.order, r.best)
    assert len(beaten) and (x.recompute[beaten] == 2).all() and (x.pp[beaten] == 8).all()
    assert (x.recompute[r.best] == 2).any() and r.best[0] == r.order[0]
    (problem,) = Layout(recompute="selective").problems(PRESETS["18b"], 2048)
    assert "no engine here stores" in problem


def test_the_top_is_a_study_that_renders(tmp_path, capsys):
    path = tmp_path / "planned.toml"
    assert plan.main([*PLAN, "--study", str(path), "--top", "4"]) == 0
    study = load_study(path, cluster="dgx-a100")
    assert render.main([str(path), "--cluster", "dgx-a100", "--dry-run"]) == 0
    assert "selene is no Slurm cluster: render with --cluster NAME" in capsys.readouterr().err
    assert len(study.specs) == 4
    assert plan.time_limit(1.0) == "0:11:00" and plan.time_limit(90.0) == "1:10:00"
    assert all(run.slurm["time"] == "0:12:00" for run in study.runs.values())
    assert all(spec.gpus == 64 and spec.global_batch == 64 for spec in study.specs.values())


def test_a_written_plan_names_its_own_size(tmp_path, capsys):
    path = tmp_path / "13b.toml"
    sizes = ["--n-layer", "40", "--hidden", "5120", "--n-head", "40", "--top", "2"]
    where = ["--cluster", "selene", "--gpus", "64", "--global-batch", "64", "--study", str(path)]
    assert plan.main([*sizes, *where]) == 0
    sizes = "n_layer 40, hidden 5120, n_head 40, vocab_size 51200, max_seq_len 2048"
    assert f"the model: {sizes}, ffn_hidden 20480, " in capsys.readouterr().out
    assert "preset" not in path.read_text() and "hidden = 5120" in path.read_text()
    smaller = ["--preset", "18b", "--seq-len", "1024", "--top", "2", *where]
    written = path.read_text()
    assert plan.main(smaller) == 2 and path.read_text() == written
    assert "13b.toml exists: name another file, or replace it with" in capsys.readouterr().err
    assert plan.main([*smaller, "--force"]) == 0
    assert 'preset = "18b"' in path.read_text() and "max_seq_len = 1024" in path.read_text()


LLAMA = ["--n-layer", "16", "--hidden", "2048", "--n-head", "32", "--vocab-size", "128256"]
LLAMA += ["--ffn-hidden", "8192", "--seq-len", "4096"]


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["--preset", "llama3-8b"], PRESETS["llama3-8b"]),
        (
            ["--preset", "llama3-8b", "--n-layer", "16", "--rope-theta", "10000"],
            replace(PRESETS["llama3-8b"], n_layer=16, rope_theta=10000.0),
        ),
        (["--preset", "qwen3-4b", "--seq-len", "2048"], preset("qwen3-4b", max_seq_len=2048)),
        (
            [*LLAMA, "--n-kv-head", "8", "--activation", "swiglu", "--no-tied", "--no-bias"],
            GPTConfig(
                16, 2048, 32, 128256, 4096, 8192, 8, activation="swiglu", tied=False, bias=False
            ),
        ),
    ],
)
def test_a_written_plan_keeps_the_architecture(flags, wanted, tmp_path):
    path = tmp_path / "planned.toml"
    where = ["--cluster", "dgx-h100", "--gpus", "64", "--global-batch", "64", "--top", "3"]
    ask = plan.question(plan_flags([*flags, *where]))
    assert ask.config == wanted
    plan.answer(plan_flags([*flags, *where, "--study", str(path)]))
    specs = load_study(path).specs.values()
    assert len(specs) == 3 and {spec.model for spec in specs} == {wanted}
    assert {spec.seq_len for spec in specs} == {wanted.max_seq_len}


@pytest.mark.parametrize(
    ("words", "gbits"),
    [
        ("4 x 100 Gb/s", 400),
        ("100 Gb/s x 4", 400),
        ("4x HDR 200 Gb/s", 800),
        ("2x HDR100", 200),
        ("Omni-Path, 4 links/node", 400),
        ("4 GPUs/node, Omni-Path", 100),
        ("8x A100 per node, 800 Gbps InfiniBand per node", 800),
        ("400 Gb/s RDMA per GPU", 3200),
        ("4x xdr", 3200),
        ("NDR x 8", 3200),
        ("10 GbE", 10),
        ("8x H100 nodes", None),
        ("NVLink at 900 GB/s", None),
    ],
)
def test_a_network_is_read_with_all_its_links(words, gbits):
    assert network_rate(words, 8) == (None if gbits is None else gbits / 8 * 1e9)


def test_a_clusters_network_changes_its_times_and_is_printed(tmp_path, capsys, monkeypatch):
    """A network that is not stated, or in words that state no rate, is the maker's: 8x NDR."""
    shape = 'description = "mine"\ngpus_per_node = 8\ncores_per_node = 64\ngpu = "H100 SXM"\n'
    networks = {"ndr": "8x NDR", "hdr": "8x HDR", "words": "a fast one", "none": ""}
    tables = [f'[{k}]\n{shape}interconnect = "{words}"\n' for k, words in networks.items()]
    (tmp_path / "clusters.toml").write_text("".join(tables))
    monkeypatch.setenv("SCALING_CLUSTERS", str(tmp_path / "clusters.toml"))
    flags = ["--gpus", "64", "--global-batch", "64", "--preset", "18b", "--top", "1"]
    seconds, notes = {}, {}
    for name in networks:
        table = plan.answer(plan_flags(["--cluster", name, *flags]))
        seconds[name] = table.rows[0]["predicted_s"]
        (notes[name],) = [note for note in table.notes if note.startswith("network")]
    assert seconds["hdr"] > seconds["ndr"] == seconds["words"] == seconds["none"]
    assert notes["hdr"] == "network: 1600 Gb/s a node in each direction (8x HDR)"
    assert notes["words"].startswith("network assumed ('a fast one' states no rate): 3200 Gb/s")
    table = plan.answer(plan_flags(["--cluster", "ndr", "--network", "8xHDR", *flags]))
    assert table.rows[0]["predicted_s"] == seconds["hdr"]
    assert plan.main(["--cluster", "ndr", "--network", "fast", *flags]) == 2
    assert "--network 'fast' states no rate; write it as" in capsys.readouterr().err


def test_every_shipped_cluster_with_gpus_states_its_network():
    for name, cluster in load_clusters().items():
        assert not cluster.gpu or network_rate(cluster.interconnect, 8), name


@pytest.mark.parametrize(
    "more", [["--cp", "2"], ["--precision", "fp8"], ["--engine", "fsdp2"], ["--engine", "megatron"]]
)
def test_a_plan_of_one_kind_holds_no_other_and_is_pruned_as_planned(more, tmp_path, capsys):
    path = tmp_path / "planned.toml"
    flags = ["--preset", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "64", "--top", "2"]
    flags += ["--global-batch", "64", *more, "--study", str(path)]
    table = plan.answer(plan_flags(flags))
    assert {row["engine"] for row in table.rows} == {"fsdp2" if "fsdp2" in more else "megatron"}
    assert (plan.FSDP2 in table.notes) == ("fsdp2" in more)
    pruned = prune.report(path)
    for name in ("engine", "predicted_s", "memory_gb"):
        rows = [[row[name] for row in t.rows] for t in (table, pruned)]
        assert rows[1] == pytest.approx(rows[0])
    names = [row["run"] for row in pruned.rows]
    assert pruned.notes[-1].endswith(f"slurm.submit {path} --only {' '.join(names)}")
    assert prune.report(path, top=1).notes[-1].endswith(f"--only {names[0]}")
    assert plan.main([*flags[:-2], "--cp", "2", "--engine", "megatron", "--precision", "fp32"]) == 2
    assert "megatron can run none of the 213 splits in" in capsys.readouterr().err


def test_speed_is_printed_as_mfu_and_tokens_and_a_tight_layout_is_marked():
    shown = plan.answer(plan_flags([*PLAN, "--top", "100"]))
    limit = 80 * (1 - ranking.MARGIN)
    for row in shown.rows:
        tokens = 64 * 2048  # of a step
        assert row["mfu"] == pytest.approx(row["tflops"] / 312)
        assert row["tokens_per_s"] == pytest.approx(tokens / row["predicted_s"])
        assert row["tight"] == ("tight" if row["memory_gb"] > 0.95 * limit else "")
    assert {row["tight"] for row in shown.rows} == {"tight", ""}
    host = ["--cluster", "2-core-cpu", "--gpus", "2", "--global-batch", "16", "--preset", "tiny"]
    shown = plan.answer(plan_flags(host))
    assert shown.rows[0]["mfu"] is None
    assert "no peak known for this machine at fp32" in shown.below


def test_a_study_is_pruned_with_the_attention_that_is_asked_for():
    """Selene's fit is of unfused attention, which stores its scores and moves them."""
    study = ROOT / "slurm" / "published" / "sc21-figure13.toml"
    plain, unfused, flash = (
        prune.report(study, "selene", flash=flag).rows[0] for flag in (None, False, True)
    )
    assert plain == unfused
    assert flash["predicted_s"] < plain["predicted_s"] and flash["memory_gb"] < plain["memory_gb"]


def test_what_does_not_fit_is_pruned(tmp_path, capsys):
    path = tmp_path / "large.toml"
    path.write_text(
        'question = "?"\n[[run]]\npreset = "175b"\nengine = "megatron"\ngpus = 8\ntp = 8\n'
    )
    assert prune.main([str(path), "--cluster", "selene"]) == 0
    out = capsys.readouterr().out
    assert "has 75.2" in out and "0 of 1 runs kept\n" in out
    for flags, said in (
        ([str(path)], "names no cluster"),
        ([str(path), "--cluster", "nowhere"], "no cluster or calibration"),
        ([str(path), "--cluster", "selene", "--top", "0"], "--top must be at least 1"),
        (["no.toml"], "No such file"),
    ):
        assert prune.main(flags) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1


def test_a_run_in_another_precision_than_the_machines_is_kept_without_a_prediction():
    report = prune.report(ROOT / "slurm" / "2-core-gpt2-124m-bf16.toml", "2-core-cpu")
    assert {row["predicted_s"] for row in report.rows} == {None}


def test_every_committed_calibration_reads():
    for name in names():
        found = load_calibration(name)
        assert found.fit.covariance.shape == (15, 15)
    assert from_data_sheet("H100 SXM").flash


def test_gpus_may_stay_idle_when_they_divide_badly():
    cluster = load_calibration("selene")
    all_used = space(PRESETS["1t"], cluster, 10000, 9984 * 625, 2048)
    some_idle = space(PRESETS["1t"], cluster, 10000, 9984, 2048, leave=16)
    assert (all_used.gpus == 10000).all()
    assert ((some_idle.gpus >= 9984) & (some_idle.gpus <= 10000)).all()
    assert (some_idle.pp == 32).any() and not (all_used.pp == 32).any()


@pytest.mark.parametrize("name", ["megatron-tp2-pp2-dp2"])
def test_the_plan_predicts_what_the_parity_table_does(name):
    from analysis.logs.load import load
    from analysis.planner.runs import predicted_seconds

    folder = Path(__file__).parent.parent / "logs" / "2-core-cpu" / "parity" / name
    (record,), _ = load([folder])
    cluster = load_calibration("2-core-cpu")
    config = PRESETS["tiny"]
    x = space(config, cluster, record.gpus, 16, config.max_seq_len, "fp32")
    assert (x.vocab == 384).any() and (x.vocab == 512).any()  # for tp 1 and 2; the run padded less
    x = replace(x, vocab=np.full(len(x), record.facts["model"]["padded_vocab"]))
    r = ranking.rank(x, cluster, 0.06)
    wanted = {"tp": record.tp, "pp": record.pp, "micro_batch": 2, "vpp": 1, "zero_stage": 0}
    row = explain.why(r, wanted | {"recompute": 0, "sequence_parallel": 0}).row
    assert r.seconds[row] == pytest.approx(predicted_seconds(record, cluster)[0])


@pytest.mark.parametrize("name", ["tiny-llama", "qwen3-0.6b", "gpt2-124m"])
def test_the_model_of_a_log_is_predicted_as_the_models_columns(name):
    from dataclasses import asdict

    from analysis.logs.record import Record
    from analysis.planner.runs import row_of

    config = PRESETS[name]
    facts = {"gpus": 2, "global_batch": 4, "seq_len": config.max_seq_len, "precision": "bf16"}
    record = Record("a", "b", model=asdict(config), **facts)
    x, y = row_of(record, lambda *_: {}), columns(config)
    names = "layers hidden heads head_dim kv_heads ffn glu untied qk_norm dropout vocab seq".split()
    assert [getattr(x, n).tolist() for n in names] == [getattr(y, n).tolist() for n in names]
