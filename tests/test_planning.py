"""The planner: every possible layout and no other, fast, ranked, refused in words."""

import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pytest

from analysis import plan, prune
from analysis.logs.load import load
from analysis.logs.record import Record
from analysis.planner import explain, pasted, ranking, scale
from analysis.planner.calibration import FOLDER, from_data_sheet, load_calibration
from analysis.planner.columns import columns
from analysis.planner.fitting import telling
from analysis.planner.memory.buffers import buckets
from analysis.planner.runs import priced, row_of
from analysis.planner.space import space
from base.errors import Parser, UsageError
from base.units import GIB
from models.config import PRESETS, GPTConfig, preset
from models.gpus import network_rate
from parallel.config.clusters import load_clusters
from parallel.config.layout import Layout
from parallel.config.study import load_study
from slurm import render
from tests.conftest import ROOT

ON_8 = "--cluster selene --gpus 8 --global-batch 8"
PLAN = "--cluster selene --gpus 64 --global-batch 64 --preset 18b"
LLAMA3 = "--preset llama3-8b --cluster dgx-h100 --gpus 64"


def ask(*words):
    """The question that flags are, given as texts of several or as paths."""
    parser = Parser(prog="plan")
    plan.add_flags(parser)
    return parser.parse_args([part for word in words for part in str(word).split(" ")])


def answer(*words):
    return plan.answer(ask(*words))


def refused(capsys, main, *flags):
    """What a command that ends with 2 says in one line."""
    assert main([str(flag) for flag in flags]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


def test_a_model_whose_layers_pp_does_not_divide_is_planned_with_shorter_ends(tmp_path):
    """Meta trained Llama 3 405B with tp 8, pp 16 and one layer fewer at either end on 16,384 H100s
    at 400 TFLOP/s; 131,072 tokens with cp 16 (arXiv 2407.21783, section 3.3 and table 4)."""
    study = tmp_path / "study.toml"
    on = "--preset llama3-405b --gpu-type H100 --gpus 16384"
    shown = answer(on, "--global-batch 2048 --top 8 --study", study).rows
    rows = [row for row in shown if (row["tp"], row["pp"]) == (8, 16)]
    assert {row["stages"] for row in rows} == {"7-8-7"} and 320 < rows[0]["tflops"] < 480
    specs = load_study(study).specs.values()
    assert {spec.layout.ends(126) for spec in specs if spec.layout.pp == 16} == {(7, 7)}
    long = answer(on, "--global-batch 128 --seq-len 131072 --cp 16 --top 1").rows
    assert long[0]["pp"] > 2
    # 80 layers on 6 stages: 4 of 14, and the output layer is as 1.2 of them.
    asked = ask("--preset llama3-70b --gpu-type H100 --gpus 96 --global-batch 48")
    shown = plan.explanation(plan.question(asked), "pp=6,vpp=1")
    assert "(layers: first 13, last 11)" in shown


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
    x = space(config, from_data_sheet("A100 80GB"), 8, 12, seq_len, cps=(1, 3, 5), leave=7)
    assert not any(x.layout(i).problems(config, seq_len) for i in range(len(x)))
    planned = {x.layout(i) for i in range(len(x))}
    assert len(planned) == len(x) - x.fsdp2.sum()
    assert all(x.reductions[i] == x.layout(i).reductions for i in np.flatnonzero(x.fsdp2))
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
    uneven = {p for p in megatron if p.uneven}
    assert megatron - uneven == wanted
    assert {p.pp for p in uneven} == {{4: 3, 6: 4}[config.n_layer]}  # 1-2-1 and 1-2-2-1 layers
    with pytest.raises(UsageError, match="no formula has the memory .* a model with sliding"):
        space(PRESETS["gpt-oss-20b"], from_data_sheet("A100 80GB"), 8, 8, 128)
    with pytest.raises(UsageError, match="cp 4 cuts a sequence into 8 chunks"):
        space(config, from_data_sheet("A100 80GB"), 8, 12, seq_len, cps=(4,))


@pytest.mark.parametrize("name", ["tiny-moe", "tiny-mla-moe"])
def test_experts_are_laid_out_apart_from_attention(name):
    """Each ep, with experts whole or cut as the layers, that divides experts and ranks."""
    x = space(PRESETS[name], from_data_sheet("A100 80GB"), 8, 8, 128)
    layouts = {replace(x.layout(i), ep=int(x.ep[i]), etp=int(x.etp[i])) for i in range(len(x))}
    assert len(layouts) == len(x)
    assert not any(layout.problems(PRESETS[name], 128) for layout in layouts)
    assert {(p.ep, p.etp) for p in layouts if (p.tp, p.pp) == (2, 1)} == {
        *((ep, 1) for ep in (1, 2, 4, 8)),
        *((ep, 2) for ep in (1, 2, 4)),
    }
    assert all(p.zero_stage < 2 and (p.sequence_parallel or p.tp == 1) for p in layouts)
    with pytest.raises(UsageError, match="alone, in 16 bits .* not for fp32 on A100"):
        space(PRESETS[name], from_data_sheet("A100 80GB"), 8, 8, 128, "fp32")


def test_a_plan_of_mixtral_shows_and_writes_ep(tmp_path):
    """Its first layouts on 64 H100 have an ep in a node, as the published ones of Mixtral have."""
    study = tmp_path / "study.toml"
    flags = "--preset mixtral-8x7b --gpu-type H100-80GB --gpus 64 --global-batch 512 --seq-len 4096"
    assert plan.main([*flags.split(), "--study", str(study), "--top", "3"]) == 0
    specs = load_study(study).specs.values()
    assert {spec.layout.ep for spec in specs} <= {4, 8} and len(specs) == 3
    first = answer(flags)
    assert first.rows[0]["ep"] == 8 and any("forced balance" in note for note in first.notes)


def test_175b_on_512_gpus_is_planned_in_order_of_time():
    cluster = load_calibration("selene")
    r = ranking.rank(space(PRESETS["175b"], cluster, 512, 1536, 2048), cluster, 0.06)
    assert len(r.steps) > 3000 and len(r.order) > 100
    assert (np.diff(r.seconds[r.order]) >= 0).all()
    assert (r.steps.gpus == 512).all() and (r.steps.global_batch == 1536).all()
    best = int(r.order[0])
    assert sum(explain.seconds_of(r, best).values()) == pytest.approx(r.seconds[best])
    gigabytes = sum(ranking.gigabytes(r.steps.take([best]), cluster).values())
    assert gigabytes == pytest.approx(r.used[best] / GIB)


def test_context_parallel_layouts_fill_the_gpus_and_are_written_into_the_study(tmp_path):
    flags = f"{LLAMA3} --global-batch 16 --seq-len 32768 --top 3"
    x = plan.question(ask(flags, "--cp 1 2 4")).ranked().steps
    assert set(x.cp.tolist()) == {1, 2, 4} and (x.gpus == 64).all() and (x.global_batch == 16).all()
    assert not (x.deepspeed & (x.cp > 1)).any()
    assert "cp" not in [column.key for column in answer(flags).shown]
    ring = answer(flags, "--cp 4 --study", tmp_path / "planned.toml")
    assert {row["cp"] for row in ring.rows} == {4} and "cp" in [c.key for c in ring.shown]
    assert plan.NOTE_RING in ring.notes
    specs = load_study(tmp_path / "planned.toml").specs.values()
    for spec, row in zip(specs, ring.rows, strict=True):
        assert (spec.layout.cp, spec.layout.dp) == (4, row["dp"])
        assert spec.gpus == 64 == row["tp"] * row["cp"] * row["pp"] * row["dp"]


@pytest.mark.parametrize(("cluster", "asks"), [("dgx-h100", True), ("jean-zay-v100", False)])
def test_a_study_that_was_planned_in_tf32_asks_for_it(cluster, asks, tmp_path):
    flags = f"--preset 1.7b --gpus 8 --global-batch 8 --top 1 --precision fp32 --cluster {cluster}"
    table = answer(flags, "--study", tmp_path / "planned.toml")
    assert (" in tf32 with " in table.notes[0]) is asks
    assert {spec.tf32 for spec in load_study(tmp_path / "planned.toml").specs.values()} == {asks}


def test_a_plan_says_what_it_assumed_and_how_wide_its_interval_is():
    for where, why, assumed in (
        ("--gpu-type H100", "no run was fitted", True),
        ("--cluster dgx-h100", "20 runs were fitted", False),
    ):
        table = answer("--preset llama3-8b --gpus 64 --global-batch 64 --top 3", where)
        first, notes = table.rows[0], "\n".join(table.notes)
        low, high = (first[key] / first["predicted_s"] - 1 for key in ("low_s", "high_s"))
        assert f"hold 80 %, of the first {low:+.0%} to {high:+.0%}: {why}" in notes
        assert "llama3-8b: 8.03B parameters, 64 sequences of 8192 tokens a step, 64 GPUs" in notes
        assert ("--gpu-type H100 may be several cards: H100 SXM is assumed" in notes) == assumed


def test_layouts_to_measure_are_the_fastest_of_different_splits(tmp_path):
    flags = "--preset llama3-8b --cluster dgx-h100 --gpus 8 --global-batch 64 --cp 1 2"
    r = plan.question(ask(flags)).ranked()
    splits = list(zip(r.steps.tp[r.best], r.steps.cp[r.best], r.steps.pp[r.best], strict=True))
    first = list(dict.fromkeys(splits))[:3]
    assert len(set(splits[:3])) < 3  # the three fastest are not of three splits
    study = answer(flags, "--top 3 --study", tmp_path / "planned.toml")
    assert [(row["tp"], row["cp"], row["pp"]) for row in study.rows] == first
    names = [f"tp {tp} cp {cp} pp {pp}" for tp, cp, pp in first]
    assert f"at least the fastest of {names[0]}, {names[1]} and {names[2]}" in "\n".join(
        study.notes
    )
    five = ranking.to_measure(r, 5)
    assert len(set(five)) == 5 and (np.diff(r.seconds[five]) >= 0).all() and r.best[0] == five[0]
    apart = r._replace(seconds=r.seconds + np.where(np.arange(len(r.steps)) == r.best[0], 0, 9))
    assert ranking.alike_note(apart) == []
    steps = ranking.to_measure(r, 3)
    hours = 20 * 8 * r.seconds[steps].sum() / 3600  # of 8 GPUs
    assert f"of each of these 3 take {hours:,.1f} GPU-hours" in ranking.alike_note(r)[1]


def test_cp_is_listed_only_where_it_is_faster_or_smaller_than_dp():
    """cp 2 with two sequences of a micro-batch is cp 1 with one: the same tokens of a rank."""
    flags = "--preset llama3-8b --cluster dgx-h100 --gpus 8 --global-batch 64 --cp 1 2 4"
    r = plan.question(ask(flags)).ranked()
    x = r.steps.take(r.best)
    names = ("tp", "pp", "vpp", "replicas", "tokens", "zero_stage", "sequence_parallel", "fsdp2")
    table = np.array([getattr(x, name) for name in names]).T
    for split in np.unique(table, axis=0):
        used = r.used[r.best][(table == split).all(axis=1)]
        assert (np.diff(used) < 0).all()
    assert {1, 2} <= set(x.cp.tolist()) and len(r.best) < len(r.order)


def test_fp8_is_planned_on_cards_that_have_it(tmp_path):
    flags = f"{LLAMA3} --global-batch 64 --top 2"
    fp8 = answer(flags, "--precision fp8 --study", tmp_path / "planned.toml")
    first = fp8.rows[0]
    assert first["predicted_s"] < answer(flags).rows[0]["predicted_s"]
    assert plan.NOTE_FP8_MEMORY in fp8.notes
    assert first["mfu"] == pytest.approx(first["tflops"] / 1978.9)
    assert {s.precision for s in load_study(tmp_path / "planned.toml").specs.values()} == {"fp8"}
    with pytest.raises(UsageError, match="A100 of selene has no fp8: --precision bf16 or fp16"):
        answer(PLAN, "--precision fp8")


def test_a_wrong_plan_is_one_line(capsys):
    for flags, said in (
        (f"{ON_8} --cluster nowhere", "no cluster"),
        (f"{ON_8} --gpus 512 --global-batch 1537", "; 1536 or 1538 would do"),
        (
            f"{ON_8} --gpus 16384 --global-batch 1 --preset 1.7b",
            "too many for a global batch of 1: at most tp 8 x pp 24 (the layers) x dp 1 = 192",
        ),
        (ON_8, "do not fit on 8 GPUs of"),
        (f"{PLAN} --cp 3", "cp 3 cuts a sequence into 6 chunks: not one of 2048"),
        (f"{ON_8} --gpus 12 --cp 8", "no layout of 12 GPUs: no tp x cp x pp divides"),
        (f"{PLAN} --margin nan", "--margin must be at least 0 and below 1, not nan"),
        (f"{PLAN} --cp 2 --engine fsdp2", "in bf16 with cp 2: a dp x cp of 1, cp above 1 (not in"),
        (f"{PLAN} --cp 2 --engine megatron --precision fp32", "megatron can run none of the "),
        (f"{PLAN} --leave 64", "would leave all 64 GPUs idle: give at most 63"),
        (f"{PLAN} --network fast", "--network 'fast' states no rate; write it as"),
        (f"{ON_8} --network 8xNDR", "8 GPUs of selene is one node, and nothing leaves it"),
        (f"{PLAN} --gpus-per-node 4", "goes with --gpu-type"),
        (
            PLAN.replace("--cluster selene", "--gpu-type A100"),
            "A100 has 40 or 80 GB, 'A100' states none: name it as 'A100 40GB', or give"
            " analysis.plan --gpu-memory GIB",
        ),
        (f"{PLAN} --why tp=3", "there are: tp 1, 2, 4, 8"),
        (f"{PLAN} --why tq=3,tp=1", "--why: unknown 'tq'; known: cp, dp, micro_batch"),
        (f"{PLAN} --why ,", "--why: say which layout"),
        (f"{PLAN} --cluster slurm/parity.toml", "calibration slurm/parity.toml: unknown "),
    ):
        assert said in refused(capsys, plan.main, *flags.split(" "))


def test_a_mistake_in_a_cluster_file_is_one_line(tmp_path):
    for line, wrong, said in (
        ("gemm = ", "gemn = 1.0", "unknown gemn; known: gemm"),
        ("gemm = ", "gemm = -1.0", "gemm must be above 0 and below inf, not -1"),
        ("network = ", 'network = "fast"', "network 'fast' states no rate"),
        ("flash = ", 'flash = "no"', "flash must be true or false, not 'no'"),
        ("covariance = [", "covariance = [ [1, 2], ", "covariance is no 15 x 15 table"),
    ):
        lines = (FOLDER / "selene.toml").read_text().split("\n")
        lines[[text.startswith(line) for text in lines].index(True)] = wrong
        (tmp_path / "mine.toml").write_text("\n".join(lines))
        with pytest.raises(UsageError, match=re.escape(said)):
            load_calibration(str(tmp_path / "mine.toml"))


@pytest.mark.parametrize(
    ("table", "flags", "said"),
    [
        ("gpu_memory_gb = 640", "", "640 is no memory of one GPU: a H100 SXM has 80 GB"),
        ("max_nodes = 8", "--gpus 128", "128 GPUs exceed the 64 of mine"),
        ('gpu = ""', "", "names no gpu: give its table the key gpu"),
    ],
)
def test_a_plan_says_what_is_wrong_with_ones_own_cluster(table, flags, said, tmp_path, monkeypatch):
    card = "" if "gpu =" in table else 'gpu = "H100"\n'
    shape = 'description = ""\ngpus_per_node = 8\ncores_per_node = 96\n'
    text = f"[mine]\n{shape}{card}{table}\n[other]\n{shape}broken = 1\n"
    (tmp_path / "clusters.toml").write_text(text)
    monkeypatch.setenv("SCALING_CLUSTERS", str(tmp_path / "clusters.toml"))
    with pytest.raises(UsageError, match=said):
        answer(f"{LLAMA3} --global-batch 128 --cluster mine {flags}".strip())


def test_a_host_keeps_its_engines_apart_and_shares_its_memory():
    """Megatron's layouts have Megatron's memory on a CPU too, whatever engine the time is of."""
    host, config = load_calibration("2-core-cpu"), PRESETS["tiny"]
    x = space(config, host, 2, 16, config.max_seq_len, "fp32")
    megatron = x.zero_stage < 2
    assert x.slower[megatron].all() and not x.deepspeed[megatron].any()
    deepspeed = ~megatron & ~x.fsdp2
    assert x.deepspeed[deepspeed].all() and not x.deepspeed[x.fsdp2].any() and x.fsdp2.any()
    held = x.each(buckets)
    assert held[deepspeed].all() and not held[~deepspeed].any()
    assert ranking.rank(x, host, 0.0).limit == host.gpu_memory_gb * GIB / 2


def test_why_explains_the_fastest_layout_that_fits_where_one_does():
    for flags, layout, words in (
        (PLAN, "tp=8,pp=1,sp=no,mbs=1", "rank, fits in"),
        (f"{PLAN} --preset 175b", "tp=1,ZeRO=0", "does NOT fit (nor does any"),
    ):
        assert words in plan.explanation(plan.question(ask(flags)), layout)


def test_a_card_without_bf16_is_planned_in_fp16_and_the_note_says_what_is_unknown():
    sizes = "--gpus 16 --global-batch 64 --preset 1.7b --top 1"
    below = "\n".join(answer("--cluster jean-zay-v100-16g", sizes).notes)
    assert "no run; rates of the card of 32 GB) in fp16 with unfused" in below
    below = "\n".join(answer(PLAN, "--flash").notes)
    assert "in bf16 with flash" in below and "no run of this fit had flash attention" in below
    assert from_data_sheet("L4").flash and not from_data_sheet("V100 32GB").flash


def test_recomputation_is_not_offered_where_it_saves_nothing():
    """Selective: our engines never store the scores. Full: a stage of one layer keeps as much. (In
    16 bits it frees the layer while Megatron has its logits.)"""
    cluster = load_calibration("dgx-h100")
    x = space(replace(PRESETS["7.5b"], n_layer=8), cluster, 8, 64, 2048, "fp32")
    assert set(x.recompute.tolist()) == {0, 2}
    r = ranking.rank(x, cluster, 0.06)
    beaten = np.setdiff1d(r.order, r.best)
    assert len(beaten) and (x.recompute[beaten] == 2).all() and (x.pp[beaten] == 8).all()
    assert (x.recompute[r.best] == 2).any() and r.best[0] == r.order[0]


def test_the_top_is_a_study_that_renders(tmp_path, capsys):
    path = tmp_path / "planned.toml"
    flags = [*PLAN.split(" "), "--seq-len", "1024", "--study", str(path), "--top", "4"]
    assert plan.main(flags) == 0
    study = load_study(path, cluster="dgx-a100")
    assert render.main([str(path), "--cluster", "dgx-a100", "--dry-run"]) == 0
    assert "selene is no Slurm cluster: render with --cluster NAME" in capsys.readouterr().err
    assert pasted.time_limit(1.0) == "0:11:00" and pasted.time_limit(90.0) == "1:10:00"
    assert all(run.slurm[-1][1]["time"] == "0:11:00" for run in study.runs.values())
    assert [(spec.gpus, spec.global_batch) for spec in study.specs.values()] == [(64, 64)] * 4
    written = path.read_text()
    assert 'preset = "18b"' in written and "max_seq_len = 1024" in written
    assert "exists: name another file, or replace it with" in refused(capsys, plan.main, *flags)
    assert path.read_text() == written and plan.main([*flags, "--force"]) == 0


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("--preset llama3-8b", PRESETS["llama3-8b"]),
        (
            "--preset llama3-8b --n-layer 16 --rope-theta 10000",
            replace(PRESETS["llama3-8b"], n_layer=16, rope_theta=10000.0),
        ),
        ("--preset qwen3-4b --seq-len 2048", preset("qwen3-4b", max_seq_len=2048)),
        (
            "--n-layer 16 --hidden 2048 --n-head 32 --vocab-size 128256 --ffn-hidden 8192 --seq-len"
            " 4096 --n-kv-head 8 --activation swiglu --no-tied --no-bias",
            GPTConfig(
                16, 2048, 32, 8, 0, 8192, 128256, 4096, activation="swiglu", tied=False, bias=False
            ),
        ),
    ],
)
def test_a_written_plan_keeps_the_architecture(flags, wanted, tmp_path):
    where = "--cluster dgx-h100 --gpus 64 --global-batch 64 --top 3 --study"
    question = ask(flags, where, tmp_path / "planned.toml")
    assert plan.question(question).config == wanted
    sizes = f"the model: n_layer {wanted.n_layer}, hidden {wanted.hidden}, n_head {wanted.n_head}, "
    named = plan.question(question).preset is not None
    assert any(sizes in note for note in plan.answer(question).notes) is not named
    specs = load_study(tmp_path / "planned.toml").specs.values()
    assert len(specs) == 3 and {spec.model for spec in specs} == {wanted}
    assert {spec.seq_len for spec in specs} == {wanted.max_seq_len}


def test_a_network_is_read_with_all_its_links():
    for words, gbits in (
        ("4 x 100 Gb/s", 400),
        ("100 Gb/s x 4", 400),
        ("4x HDR 200 Gb/s", 800),
        ("2x HDR100", 200),
        ("Omni-Path, 4 links/node", 400),
        ("4 GPUs/node, Omni-Path", 100),
        ("8x A100 per node, 800 Gbps InfiniBand per node", 800),
        ("400 Gb/s RDMA per GPU", 3200),
        ("0.4 Tb/s a card", 3200),
        ("4x 100 Gb/s / accelerator", 3200),
        ("400 Gb/s per node of 8 GPUs", 400),
        ("4x xdr", 3200),
        ("NDR x 8", 3200),
        ("10 GbE", 10),
        ("4 InfiniBand HDR", 800),
        ("Slingshot-11 200 Gb/s", 200),  # the number of a product is no number of links
        ("ConnectX-7 NDR", 400),
        ("8x H100 nodes", None),
        ("NVLink at 900 GB/s", None),
    ):
        assert network_rate(words, 8) == (None if gbits is None else gbits / 8 * 1e9)
    assert network_rate("0.4 Tb/s a card") is network_rate("0.4 Tb/s a card", 0) is None


def test_a_clusters_network_changes_its_times_and_is_printed(tmp_path, monkeypatch):
    """A network that is not stated, or in words that state no rate, is the maker's: 8x NDR. Every
    shipped cluster states its own."""
    shipped = [cluster.interconnect for cluster in load_clusters().values() if cluster.gpu]
    assert shipped and all(network_rate(words, 8) for words in shipped)
    shape = 'description = "mine"\ngpus_per_node = 8\ncores_per_node = 64\ngpu = "H100 SXM"\n'
    networks = {"ndr": "8x NDR", "hdr": "8x HDR", "words": "a fast one", "none": ""}
    tables = [f'[{k}]\n{shape}interconnect = "{words}"\n' for k, words in networks.items()]
    (tmp_path / "clusters.toml").write_text("".join(tables))
    monkeypatch.setenv("SCALING_CLUSTERS", str(tmp_path / "clusters.toml"))
    flags = "--gpus 64 --global-batch 64 --preset 18b --top 1 --cluster"
    seconds, notes = {}, {}
    for name in networks:
        table = answer(flags, name)
        seconds[name] = table.rows[0]["predicted_s"]
        (notes[name],) = [note for note in table.notes if note.startswith("network")]
    assert seconds["hdr"] > seconds["ndr"] == seconds["words"] == seconds["none"]
    assert notes["hdr"] == "network: 1600 Gb/s a node in each direction (8x HDR)"
    assert notes["words"].startswith("network assumed ('a fast one' states no rate): 3200 Gb/s")
    assert answer(flags, "ndr --network 8xHDR").rows[0]["predicted_s"] == seconds["hdr"]


@pytest.mark.parametrize(
    "more", ["--cp 2", "--precision fp8", "--engine fsdp2", "--engine megatron"]
)
def test_a_plan_of_one_kind_holds_no_other_and_is_pruned_as_planned(more, tmp_path):
    path = tmp_path / "planned.toml"
    table = answer(LLAMA3, "--global-batch 64 --top 2", more, "--study", path)
    assert {row["engine"] for row in table.rows} == {"fsdp2" if "fsdp2" in more else "megatron"}
    assert (plan.NOTE_FSDP2 in table.notes) == ("fsdp2" in more)
    pruned = prune.report(path)
    for name in ("engine", "predicted_s", "memory_gib"):
        rows = [[row[name] for row in t.rows] for t in (table, pruned)]
        assert rows[1] == pytest.approx(rows[0])
    names = [row["run"] for row in pruned.rows]
    assert pruned.notes[-1].endswith(f"slurm.submit {path} --only {' '.join(names)}")
    assert prune.report(path, top=1).notes[-1].endswith(f"--only {names[0]}")


def test_speed_is_printed_as_mfu_and_tokens_and_a_tight_layout_is_marked():
    shown = answer(PLAN, "--top 100")
    for row in shown.rows:
        assert row["mfu"] == pytest.approx(row["tflops"] / 312)
        assert row["tokens_per_s"] == pytest.approx(64 * 2048 / row["predicted_s"])
        tight = row["memory_gib"] > 0.95 * 80 * (1 - ranking.MARGIN)
        assert row["tight"] == ("tight" if tight else "")
    assert {row["tight"] for row in shown.rows} == {"tight", ""}
    shown = answer("--cluster 2-core-cpu --gpus 2 --global-batch 16 --preset tiny")
    assert shown.rows[0]["mfu"] is None
    assert "no peak known for this machine at fp32" in shown.below


def test_a_study_is_pruned_with_the_attention_that_is_asked_for():
    """Selene's fit is of unfused attention, which stores its scores and moves them."""
    study = ROOT / "slurm" / "published" / "sc21-figure13.toml"
    plain, unfused, flash = (
        prune.report(study, "selene", flash=flag).rows[0] for flag in (None, False, True)
    )
    assert plain == unfused
    assert flash["predicted_s"] < plain["predicted_s"] and flash["memory_gib"] < plain["memory_gib"]


def test_a_study_is_pruned_for_the_cluster_that_it_will_be_submitted_to(tmp_path):
    """Two nodes are 8 GPUs there and 16 here; a calibration alone has no nodes of Slurm."""
    path = tmp_path / "nodes.toml"
    path.write_text(
        'question = "?"\ncluster = "jean-zay-v100-32g"\n[defaults]\npreset = "1.7b"\n'
        'global_batch = 16\nprecision = "fp16"\nengine = "megatron"\nzero_stage = 1\n'
        "tp = 4\n[[run]]\nnodes = 2\n"
    )
    for wanted, gpus, flag in ((None, 8, ""), ("dgx-a100", 16, " --cluster dgx-a100")):
        pruned = prune.report(path, wanted)
        (row,) = pruned.rows
        assert row["gpus"] == gpus and row["fits"]
        assert pruned.notes[-1].endswith(f"slurm.submit {path}{flag} --only {row['run']}")
    pruned = prune.report(path, "selene")
    said = "nodes have the GPUs of jean-zay-v100-32g: selene is no cluster of clusters.toml"
    assert pruned.rows[0]["gpus"] == 8 and said in pruned.notes
    assert "--cluster" not in pruned.notes[-1]
    slow = prune.report(path, "dgx-a100", network="10 GbE").rows[0]["predicted_s"]
    assert slow > prune.report(path, "dgx-a100").rows[0]["predicted_s"]


def test_what_does_not_fit_is_pruned(tmp_path, capsys):
    path = tmp_path / "large.toml"
    path.write_text(
        'question = "?"\n[[run]]\npreset = "175b"\nengine = "megatron"\ngpus = 8\ntp = 8\n'
    )
    pruned = prune.report(path, "selene")
    assert "has 75.2" in pruned.rows[0]["verdict"] and pruned.notes[-1] == "0 of 1 runs kept"
    assert "names no cluster" in refused(capsys, prune.main, path)


def test_a_run_in_another_precision_than_the_machines_has_no_prediction():
    report = prune.report(ROOT / "slurm" / "2-core-gpt2-124m-bf16.toml", "2-core-cpu")
    assert {row["predicted_s"] for row in report.rows} == {None}


def test_gpus_may_stay_idle_when_they_divide_badly():
    used, idle = (
        space(PRESETS["1t"], load_calibration("selene"), 10000, batch, 2048, leave=leave)
        for batch, leave in ((9984 * 625, 0), (9984, 16))
    )
    assert set(used.gpus.tolist()) == {10000} and 9984 <= min(idle.gpus) <= max(idle.gpus) <= 10000
    assert (idle.pp == 32).any() and not (used.pp == 32).any()


def test_the_plan_predicts_what_the_parity_table_does():
    (record,), _ = load([ROOT / "logs" / "2-core-cpu" / "parity" / "megatron-tp2-pp2-dp2"])
    cluster, config = load_calibration("2-core-cpu"), PRESETS["tiny"]
    x = space(config, cluster, record.gpus, 16, config.max_seq_len, "fp32")
    assert (x.vocab == 384).any() and (x.vocab == 512).any()  # for tp 1 and 2; the run padded less
    x = replace(x, vocab=np.full(len(x), record.facts["model"]["padded_vocab"]))
    r = ranking.rank(x, cluster, 0.06)
    split = f"tp={record.tp},pp={record.pp},micro_batch=2,vpp=1"
    row = explain.chosen_row(r, f"{split} zero_stage=0 recompute=none sp=no").row
    assert r.seconds[row] == pytest.approx(priced(record, cluster).value["predicted_s"])


@pytest.mark.parametrize("name", ["tiny-llama", "qwen3-0.6b", "gpt2-124m"])
def test_the_model_of_a_log_is_predicted_as_the_models_columns(name):
    config = PRESETS[name]
    facts = {"gpus": 2, "global_batch": 4, "seq_len": config.max_seq_len, "precision": "bf16"}
    facts |= {"micro_batch": 1, "recompute": "none", "zero_stage": 0, "tp": 1, "pp": 1}
    record = Record("a", "b", model=config.as_dict(), **facts)
    x, y = row_of(record, lambda *_: {}), columns(config)
    names = "layers hidden heads head_dim kv_heads ffn glu untied qk_norm dropout vocab seq".split()
    assert [getattr(x, n).tolist() for n in names] == [getattr(y, n).tolist() for n in names]
    record.pp, record.facts = 2, {"layout": {"decoder_last_pipeline_num_layers": 1}}
    x = row_of(record, lambda *_: {})
    assert (x.first_layers, x.last_layers) == (config.n_layer - 1, 1)


def test_a_record_with_experts_is_predicted_as_the_plans_layout():
    """Of Megatron-LM on GPUs; of other engines and on a CPU no formula counts its bytes."""
    config, cluster = PRESETS["mixtral-8x7b"], load_calibration("dgx-h100")
    x = space(config, cluster, 64, 256, 4096)
    split = (x.tp == 2) & (x.pp == 4) & (x.vpp == 1) & (x.micro_batch == 1) & (x.ep == 8)
    x = x.take(split & (x.etp == 1) & (x.zero_stage == 1) & (x.recompute == 0))
    facts = {"gpus": 64, "global_batch": 256, "seq_len": 4096, "precision": "bf16", "tp": 2}
    facts |= {
        "micro_batch": 1,
        "recompute": "none",
        "sequence_parallel": True,
        "pp": 4,
        "ep": 8,
        "etp": 1,
        "zero_stage": 1,
        "engine": "Megatron-LM",
    }
    record = Record("a", "b", model=config.as_dict(), **facts)
    record.facts = {"model": {"padded_vocab": config.padded_vocab(2)}}
    (planned,) = cluster.fit.seconds(x, cluster.machine_for(x))
    seconds = priced(record, cluster).value["predicted_s"]
    assert seconds == pytest.approx(planned)
    record.dispatcher = "deepep"  # a token goes to a node once
    assert priced(record, cluster).value["predicted_s"] < seconds
    record.etp = None  # of Megatron-LM: tp
    assert row_of(record, cluster.columns).etp == 2
    for engine, where in (("NeMo", load_calibration("2-core-cpu")), ("ddp", cluster)):
        record.engine = engine
        assert priced(record, where).reason.endswith(f"not for bf16 of {engine} on None")


def test_more_gpus_than_any_run_had_are_said_and_widen_the_interval():
    """0.96 % a doubling (a deviation of 1.42 %) beyond the largest fitted run."""
    x = space(PRESETS["1.7b"], load_calibration("dgx-h100"), 2**20, 2**20, 2048)
    for cluster, most in ((load_calibration("dgx-h100"), 2048), (from_data_sheet("H100"), 10752)):
        fit = cluster.fit
        assert fit.gpus == most
        machine, inside = cluster.machine_for(x), replace(fit, gpus=2**20)
        more = fit.stated_variance(x, machine) - inside.stated_variance(x, machine)
        assert more == pytest.approx((1.48 * 0.0096 * np.log2(2**20 / most)) ** 2)
    flags = "--preset 18b --cluster dgx-h100 --top 1 --gpus"
    notes = ["\n".join(answer(flags, n, f"--global-batch {n}").notes) for n in (2048, 4096)]
    assert "extrapolated" not in notes[0]
    assert "4096 GPUs are more than the 2048 of the largest fitted run: times are" in notes[1]
    assert "extrapolated by 1.0 doublings" in notes[1]


SCALE = "--preset llama3-70b --gpu-type H100 --gpus 16384 --global-batch 2048 --scale strong"


@pytest.mark.parametrize("scale_flag", ["", " --scale strong"])
def test_hours_and_days_of_tokens_follow_from_the_predicted_step(scale_flag, printed):
    flags = f"{PLAN}{scale_flag} --tokens 3e11 --format json"
    for row in json.loads(printed(plan.main, *flags.split())):
        steps = 3e11 / (64 * 2048)
        hours = steps * row["predicted_s"] / 3600
        assert [row["hours"], row["days"] * 24] == pytest.approx([hours, hours])
        days = [steps * row[key] / 86400 for key in ("low_s", "high_s")]
        assert row["days_interval"] == pytest.approx(days)


def test_scale_is_the_fastest_layout_of_each_count_and_names_the_knee():
    table = answer(SCALE)
    counts = [row["gpus"] for row in table.rows]
    assert counts == [2**k for k in range(5, 15)]
    alone = answer(SCALE.replace("16384", "512").replace("--scale strong", "--top 1")).rows[0]
    row = table.rows[counts.index(512)]
    assert {k: row[k] for k in alone} == alone
    rates = [row["tokens_per_s"] / row["gpus"] for row in table.rows]
    assert [row["kept"] for row in table.rows] == pytest.approx([r / rates[0] for r in rates])
    assert table.rows[0]["worst"] == table.rows[0]["best"] == 1
    assert all(row["worst"] < row["kept"] < row["best"] for row in table.rows[1:])
    notes = "\n".join(table.notes)
    keeps = rates[-1] / rates[-2]
    assert keeps < scale.KNEE <= min(b / a for a, b in itertools.pairwise(rates[:-1]))
    assert f"knee at 8192 GPUs: 16384 keep {keeps:.1%} of a GPU's tokens/s; " in notes
    assert "% of what grew is tensor parallel" in notes  # tp 8 beside tp 4
    assert "no fewer GPUs: 70.6B parameters do not fit on 16 GPUs" in notes


def test_weak_scaling_keeps_the_batch_of_a_gpu_and_without_a_fall_there_is_no_knee():
    flags = "--preset llama3-70b --cluster dgx-h100 --gpus 2048 --global-batch 4096 --scale weak"
    table = answer(flags)
    batches = [row["tokens_per_s"] * row["predicted_s"] / row["gpus"] for row in table.rows]
    assert batches == pytest.approx([2 * 8192] * len(batches))
    least = min(b["kept"] / a["kept"] for a, b in itertools.pairwise(table.rows))
    assert f"no knee: each doubling keeps {least:.1%} or more" in "\n".join(table.notes)
    for row in table.rows[1:]:  # what both counts share does not widen the band of their ratio
        assert row["best"] / row["kept"] < (row["high_s"] / row["predicted_s"]) ** np.sqrt(2)


def test_the_time_to_a_target_stops_falling_where_the_batch_passes_the_critical_one():
    """A batch far above it takes as many steps as its half; one far below it half of them."""
    flags = "--preset llama3-70b --cluster dgx-h100 --gpus 2048 --global-batch 4096 --scale weak"
    assert "time to target -: larger batches need more samples (--critical-batch B)" in (
        answer(flags).notes
    )
    table = answer(f"{flags} --critical-batch 90:110")
    first, *_, last = table.rows
    times = (99.5 + 4096) / (99.5 + 4096 * first["gpus"] / 2048)  # the mean of 90 and 110
    assert last["target_samples"] == pytest.approx(times, rel=1e-3)
    assert last["target_efficiency"] == pytest.approx(last["kept"] / times, rel=1e-3)
    assert last["target_low"] < last["worst"] / times < last["best"] / times < last["target_high"]
    fewest = first["gpus"]
    for critical, words in (
        ("1", f"may stop falling at {fewest} GPUs; {2 * fewest} take 0."),
        ("1000000", "still falls at 2048 GPUs; 2048 take 0.50 ("),
    ):
        notes = "\n".join(answer(f"{flags} --critical-batch {critical}").notes)
        assert f"time to target: {words}" in notes
        assert f"a critical batch of {critical} samples (its interval is not known)" in notes
    unsure = "\n".join(answer(f"{flags} --critical-batch 1:1000000").notes)
    assert f"time to target: may stop falling at {fewest} GPUs; {2 * fewest} take 0.5" in unsure
    strong = answer(flags.replace("weak", "strong"))
    assert "time to target: still falls at 2048 GPUs; 2048 take 0.5" in "\n".join(strong.notes)


def test_counts_to_measure_leave_the_least_unknown():
    """Of three rows, of which two err together, one of the two is measured before the third."""
    together = np.array([[1.0, 0.99, 0.0], [0.99, 1.0, 0.0], [0.0, 0.0, 0.9]])
    assert telling(together, 1).tolist() == [0] and telling(together, 2).tolist() == [0, 2]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (SCALE.replace("H100", "RTX3080"), "describe another card by a table of models/gpus.toml"),
        (f"{SCALE} --top 3 --leave 8", "of each count: no --top, --leave"),
        (f"{SCALE} --why tp=8", "of each count: no --why"),
        (f"{SCALE} --critical-batch 84", "is of batches that grow: give --scale weak"),
        (SCALE.replace("16384", "32"), "or more: 70.6B parameters do not fit on 16"),
        (SCALE.replace("16384", "105"), "or more: 105 GPUs: no layout of 105 GPUs"),
    ],
)
def test_scale_that_cannot_be_is_one_line(flags, why, capsys):
    assert why in refused(capsys, plan.main, *flags.split(" "))


def test_cards_without_nvlink_are_stated_and_slower(tmp_path, monkeypatch):
    sizes = "--preset llama2-7b --gpus 8 --global-batch 64 --top 1"
    switch = answer(sizes, "--gpu-type A100-SXM4-80GB")
    for flags in ("--gpu-type A100-SXM4-80GB --links PCIe4.0x16", "--gpu-type A100-PCIE-80GB"):
        pcie = answer(sizes, flags)
        assert "x16, 24 GB/s a card in each direction" in "\n".join(pcie.notes)
        assert pcie.rows[0]["predicted_s"] > switch.rows[0]["predicted_s"]
    assert not any("PCI" in note for note in switch.notes)
    table = '[boxes]\ngpu = "A100 80GB"\ngpus_per_node = 8\ncores_per_node = 64\n'
    file = tmp_path / "clusters.toml"
    file.write_text(table + 'links = "PCIe 3.0 x8"\n')
    monkeypatch.setenv("SCALING_CLUSTERS", str(file))
    assert load_calibration("boxes").machine().link == 6e9
    file = tmp_path / "wrong.toml"
    file.write_text(table + 'links = "NVLink"\n')
    monkeypatch.setenv("SCALING_CLUSTERS", str(file))
    with pytest.raises(UsageError, match=r"links .NVLink. is not PCI Express, as PCIe 4.0 x16"):
        load_calibration("boxes")
    with pytest.raises(
        UsageError, match="--links 'fast' states no PCI Express; write it as \"PCIe"
    ):
        answer(sizes, "--gpu-type A100-SXM4-80GB --links fast")


def test_shards_stay_in_a_node_where_the_network_is_slow(tmp_path):
    """Hybrid sharding: between nodes go a gradient's shards, once a step, and no weights."""
    flags = "--preset llama3-8b --gpu-type H100-SXM --gpus 64 --global-batch 256 --engine fsdp2"
    study = tmp_path / "planned.toml"
    slow = answer(flags, "--network", "100Gb/s", "--top 3 --study", study)
    assert slow.rows[0]["fsdp_shard"] == 8
    (whole,) = (row for row in slow.rows if row["fsdp_shard"] is None)
    assert whole["predicted_s"] > 1.3 * slow.rows[0]["predicted_s"]
    specs = load_study(study).specs.values()
    assert {spec.layout.fsdp_shard for spec in specs} == {8, None}


def test_offload_is_tried_where_it_is_asked_for_and_an_engine_has_it(tmp_path):
    """24 GiB hold a third of what Adam has for 7B parameters on two nodes of one card each."""
    flags = "--preset llama2-7b --gpu-type RTX4090 --gpus 2 --gpus-per-node 1 --global-batch 8"
    with pytest.raises(UsageError, match="do not fit on 2 GPUs"):
        answer(flags)
    study = tmp_path / "planned.toml"
    shown = answer(flags, "--offload none optimizer all --top 20 --study", study)
    assert {row["engine"] for row in shown.rows} <= {"fsdp2", "deepspeed_zero"}
    assert all(row["offload"] for row in shown.rows) and "Adam on the host" in str(shown.notes)
    assert {spec.layout.offload for spec in load_study(study).specs.values()} >= {"all"}


def test_the_slowest_network_that_is_near_a_free_one_is_named():
    """64 V100s with ZeRO-3: DeepSpeed's authors say that 100 Gb/s a node are too few, 200 to 400
    do and 800 to 1000 are ideal (deepspeedai/DeepSpeed, issue 2928)."""
    flags = "--preset llama2-13b --gpu-type V100-SXM2-32GB --gpus 64 --global-batch 512"
    swept = answer(flags, "--engine deepspeed_zero --networks 10")
    over = {row["gbits"]: row["over"] for row in swept.rows}
    assert over[100] > 0.5 and 0.1 < over[400] < over[200] < 0.5 and over[800] < 0.1
    assert list(over.values()) == sorted(over.values(), reverse=True)
    (need,) = (note for note in swept.notes if note.startswith("deepspeed_zero: within 10 %"))
    assert 400 < float(re.search(r"from ([\d,.]+) Gb/s", need)[1].replace(",", "")) < 800
    with pytest.raises(UsageError, match="8 GPUs are one node"):
        answer(flags.replace("--gpus 64", "--gpus 8"), "--networks")
