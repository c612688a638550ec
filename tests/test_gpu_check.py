"""The check of a GPU node: what it asks of which machine, what it calls wrong, and how it ends.

Trained here on CPU: the command itself. Its judgement of GPUs is tested with what probes of such
machines would say.
"""

import json
import math
import shutil
import sys
import time

import pytest

from models.gpus import find_gpu
from parallel import gpu_bench, gpu_check
from parallel.config.settings import resolve
from parallel.gpu_bench import FAILED, PASSED, SKIPPED, TOLD, Bench, Refused
from parallel.gpu_check import make
from tests import fixture_runs

LACKS = {"bf16": "", "fp16": "", "fp8": "", "te": ""}
H100 = {"name": "NVIDIA H100 80GB HBM3", "gb": 85.0, "free": 0.99}
V100 = {"name": "Tesla V100-SXM2-16GB", "gb": 16.9, "free": 0.5}
VOLTA = {"bf16": "no bf16", "fp8": "no fp8", "te": "No module named 'transformer_engine'"}
ARCHITECTURES = ["sm_75", "sm_80", "sm_86", "sm_90", "compute_90"]


@pytest.fixture
def bench_of(monkeypatch, tmp_path):
    """A Bench on a machine of `gpus` cards; `said` is what its other commands print."""

    def make(gpu=H100, gpus=8, device="cuda", lacks=None, capability=(9, 0), said=None) -> Bench:
        machine = {
            "gpus": [gpu] * gpus,
            "why_no_gpu": "" if gpus else "this PyTorch is built without CUDA",
            "lacks": LACKS | (lacks or {}),
            "capability": list(capability),
            "architectures": ARCHITECTURES,
            "driver": "570.1",
            "cuda": "12.9",
            "nccl": "2.27.3",
            "cudnn": 91002,
            "peer_access": [[True] * gpus] * gpus,
        }
        monkeypatch.setattr(Bench, "probe", lambda self, name: machine)
        bench = Bench(device, None, tmp_path / "out")
        if said is not None:
            monkeypatch.setattr(Bench, "call", lambda *_, **__: json.dumps(said))
        return bench

    return make


def left_out(bench: Bench) -> dict[str, str]:
    """The checks that train and cannot on this machine, and why."""
    pairs = [name.split("/") for name in gpu_check.names() if "/" in name]
    reasons = {f"{g}/{r}": bench.why_not(g, r, bench.settings(g, r)) for g, r in pairs}
    return {check: why for check, why in reasons.items() if why}


def test_eight_gpus_that_lack_nothing_run_every_check(bench_of):
    assert left_out(bench_of()) == {}


def test_what_a_machine_lacks_is_skipped_with_the_reason(bench_of):
    one = left_out(bench_of(V100, gpus=1, lacks=VOLTA, capability=(7, 0)))
    assert one["fp32/megatron-tp2"] == "needs 2 GPUs, 1 are here"
    assert one["bf16/ddp"] == "no bf16"
    assert one["speed/1.3b-ddp"] == "needs a GPU of 40 GB, 17 are here"
    assert "transformer_engine" in one["fp8/megatron-delayed"]
    assert not {"fp16/megatron", "speed/124m-ddp", "fp32/fsdp2", "breakdown/ddp"} & one.keys()


def test_a_gpu_that_another_program_uses_or_that_pytorch_was_not_built_for_fails(bench_of):
    bench = bench_of(V100, capability=(7, 0))
    failed = {row.check for row in make(bench, "versions") if row.verdict == FAILED}
    assert failed == {"free memory of each GPU", "PyTorch's code for this GPU"}


def test_a_gpu_without_bf16_is_timed_in_fp16(bench_of):
    bench = bench_of()
    assert bench.settings("speed", "124m-ddp")["precision"] == "bf16"
    bench.machine["lacks"]["bf16"] = "no bf16"
    assert bench.settings("speed", "124m-ddp")["precision"] == "fp16"
    assert bench.settings("fp32", "ddp").get("precision") is None


def test_a_library_that_is_not_installed_skips_its_engines_alone(bench_of, monkeypatch):
    bench = bench_of()
    bench.versions_here = bench.versions_here | {"megatron-core": None}
    rows = {row.check: row.verdict for row in gpu_check.versions(bench)}
    assert rows["version of megatron-core"] == FAILED
    why = left_out(bench)
    assert set(why.values()) == {"megatron-core is not installed"}
    assert "fp32/deepspeed-pipe" in why and "fp32/fsdp2" not in why
    (row,) = make(bench, "fp32/megatron")
    assert (row.verdict, row.value) == (SKIPPED, "megatron-core is not installed")


def test_rates_below_half_of_the_data_sheet_fail(bench_of):
    said = {
        "products": {"bf16": 700e12, "fp32": 20e12},
        "memory_rate": 3000e9,
        "links": {"1": 30e9, "64": 350e9, "512": 100e9},
    }
    bench = bench_of(said=said)
    rows = {row.check: row for row in make(bench, "rates")}
    assert rows["matrix product bf16"].verdict == PASSED
    assert rows["matrix product bf16"].value == "700 TFLOP/s, 71%"
    assert rows["matrix product fp32"].verdict == FAILED  # 66.9 TFLOP/s
    assert rows["memory"].verdict == PASSED
    assert rows["all-reduce of 1 MiB, 8 ranks"].verdict == TOLD
    assert rows["all-reduce of 512 MiB, 8 ranks"].verdict == FAILED
    bench.card = find_gpu(V100["name"])  # a mesh: how many links two cards share is not known
    assert {row.verdict for row in gpu_check.rates(bench) if "all-reduce" in row.check} == {TOLD}


def test_a_wrong_attention_kernel_fails_and_an_absent_one_is_skipped(bench_of, monkeypatch):
    bench = bench_of()
    rows = [("flash_attention bf16", 0.5, 0.03, ""), ("cudnn_attention bf16", None, 0.03, "none")]
    broken = "Transformer Engine does not work here: undefined symbol"
    said = {"rows": rows, "chosen": "torch"}
    said["usable"] = {"te": broken, "apex": "No module named 'apex'", "torch": ""}
    monkeypatch.setattr(Bench, "probe", lambda self, name: said)
    verdicts = {row.check: row.verdict for row in make(bench, "attention")}
    assert verdicts["attention flash_attention bf16"] == FAILED
    assert verdicts["attention cudnn_attention bf16"] == SKIPPED
    assert verdicts["kernels te"] == FAILED and verdicts["kernels apex"] == SKIPPED


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80", "sm_90"], True),  # machine code runs on later minors
        ((7, 0), ["sm_75", "sm_80"], False),  # V100, and wheels without sm_70
        ((10, 0), ["sm_90"], False),
        ((10, 0), ["sm_90", "compute_90"], True),  # PTX runs on all that is later
        ((10, 0), ["sm_90a", "compute_90a"], False),
        ((12, 0), ["sm_100", "sm_120"], True),
    ],
)
def test_a_build_of_pytorch_without_code_for_the_gpu_is_noticed(capability, built, runs):
    assert gpu_check.runs_on(built, *capability) is runs


def train_alike(bench: Bench, monkeypatch, loss=None, state="") -> None:
    """Make fp32/megatron and its baseline complete, the first with `loss`."""

    def write(self, group, run, folder):
        about = fixture_runs.facts("check", None) | {"run": run}
        where = fixture_runs.write(folder.parent, about, loss=loss if run == "megatron" else None)
        assert where == folder
        (folder / "console.out").write_text("the last words\n")
        return state if run == "megatron" else ""

    monkeypatch.setattr(Bench, "_train", write)


def test_a_run_whose_losses_are_the_baselines_passes(bench_of, monkeypatch):
    bench = bench_of()
    train_alike(bench, monkeypatch)
    (row,) = make(bench, "fp32/megatron")
    assert row.verdict == PASSED and row.value == "loss 0.0e+00, grad norm 0.0e+00 apart"


def test_a_run_that_trained_another_model_fails_and_the_report_says_how_to_see_it(
    bench_of, monkeypatch
):
    bench = bench_of()
    train_alike(
        bench, monkeypatch, [x + 0.001 * (i > 3) for i, x in enumerate(fixture_runs.losses())]
    )
    (row,) = make(bench, "fp32/megatron")
    assert row.verdict == FAILED and "loss by 1.0e-03 at step" in row.value
    page = (bench.out / "report.md").read_text()
    assert row.again.startswith("torchrun --nproc-per-node 1 -m parallel.train --")
    assert "--engine megatron" in row.again
    assert row.again in page and "the last words" in page
    told = json.loads((bench.out / "report.json").read_text())
    assert told["counts"] == {PASSED: 0, FAILED: 1, SKIPPED: 0}
    assert told["checks"][0]["check"] == "fp32/megatron"


def test_a_run_that_ends_early_fails_with_its_reason(bench_of, monkeypatch):
    bench = bench_of()
    train_alike(bench, monkeypatch, state="NCCL error")
    (row,) = make(bench, "fp32/megatron")
    assert (row.verdict, row.value) == (FAILED, "fp32/megatron: NCCL error")


def test_low_precision_has_a_bar_of_its_own_and_nan_is_above_it(bench_of, monkeypatch):
    bench = bench_of()
    for off, verdict in ((0.019, PASSED), (0.021, FAILED), (math.nan, FAILED)):
        bench.done.clear()
        shutil.rmtree(bench.out / "runs", ignore_errors=True)
        train_alike(bench, monkeypatch, [x + off for x in fixture_runs.losses()])
        (row,) = make(bench, "bf16/megatron")
        assert row.verdict == verdict, row


def test_a_run_that_learns_nothing_fails(bench_of, monkeypatch):
    bench = bench_of()
    for loss, verdict in (
        (None, PASSED),
        ([5.5] * 20, FAILED),
        ([8.0 - i for i in range(20)], FAILED),
    ):
        bench.done.clear()
        shutil.rmtree(bench.out / "runs", ignore_errors=True)
        train_alike(bench, monkeypatch, loss)
        (row,) = make(bench, "fp16/megatron")
        assert row.verdict == verdict, row


def test_a_check_that_hangs_is_ended_and_the_next_one_runs(bench_of, monkeypatch):
    bench = bench_of(device="cpu", gpus=0)
    waits = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(60)"]
    monkeypatch.setattr(gpu_bench, "launcher", lambda spec: waits)
    monkeypatch.setitem(gpu_check.GROUPS["fp32"], "limit_s", 0.5)
    (bench.out / "data").mkdir()
    began = time.monotonic()
    (row,) = make(bench, "fp32/ddp")
    assert time.monotonic() - began < 10
    assert row.verdict == FAILED and "did not end within 0.5 s" in row.value
    with pytest.raises(Refused, match="exit status 3: its last words"):
        says = "import sys; print('its last words', file=sys.stderr); sys.exit(3)"
        bench.call([sys.executable, "-c", says], bench.out / "log", 60)


def test_a_users_mistake_is_one_line_and_leaves_no_folder(bench_of, tmp_path, capsys, monkeypatch):
    out = tmp_path / "fresh"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    bench_of()
    for words, said in (
        (["--gpus", "9", "--out", str(out)], "--gpus 9, but PyTorch sees 8"),
        (["--gpus", "0", "--out", str(out)], "--gpus must be"),
        (["--only", "fp33", "--out", str(out)], "no check 'fp33'; --list lists them"),
        (["--out", str(tmp_path / "full")], "is there and not empty"),
    ):
        assert gpu_check.main(words) == 2
        errors = capsys.readouterr().err
        assert said in errors and errors.count("\n") == 1
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert gpu_check.main(["--out", str(out)]) == 2
    assert "8 processes were started: start one" in capsys.readouterr().err
    assert not out.exists()


def test_a_machine_without_a_gpu_is_told_what_to_do(bench_of, monkeypatch):
    with pytest.raises(Exception, match="built without CUDA; --device cpu tries the checks"):
        bench_of(gpus=0)


def test_the_command_trains_and_judges_on_a_cpu(tmp_path, capsys):
    """Two ranks of ddp beside one; fp16 is skipped."""
    out = tmp_path / "out"
    checks = ["fp32/ddp-dp2", "fp16/ddp"]
    assert gpu_check.main(["--device", "cpu", "--only", *checks, "--out", str(out)]) == 0
    told = json.loads((out / "report.json").read_text())
    verdicts = {row["check"]: row["verdict"] for row in told["checks"]}
    assert verdicts == {"fp32/ddp-dp2": PASSED, "fp16/ddp": SKIPPED}
    printed = capsys.readouterr().out
    assert all(check in printed for check in verdicts) and f"attach {out}" in printed
    assert "fp32/ddp-dp2" in (out / "report.md").read_text()


def test_a_pytorch_that_cannot_be_imported_fails(bench_of, tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise Refused("exit status 1: ImportError: libcudart.so.12")

    monkeypatch.setattr(Bench, "probe", broken)
    assert gpu_check.main(["--out", str(tmp_path / "out")]) == 1
    assert "FAILED  machine" in (said := capsys.readouterr().out) and "libcudart" in said


def test_a_check_that_prints_no_result_fails_and_the_next_one_runs(bench_of, monkeypatch):
    bench = bench_of()
    monkeypatch.setattr(Bench, "call", lambda *_, **__: "NCCL version 2.27.3\n")
    (row,) = make(bench, "rates")
    assert row.verdict == FAILED and "printed no result but 'NCCL version 2.27.3'" in row.value


def test_skipped_is_not_passed(bench_of, tmp_path, monkeypatch):
    bench_of(gpus=1)
    out = str(tmp_path / "again")
    assert gpu_check.main(["--only", "fp32/megatron-tp2", "--out", out]) == 1


def test_a_run_names_the_kernel_that_torch_picks_for_its_attention():
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from parallel.engines.kernels import attention_of

    cpu, sdpa = torch.device("cpu"), "torch scaled_dot_product_attention"
    llama = {"preset": "llama3-8b", "hidden": 64, "n_head": 4, "n_kv_head": 2, "seq_len": 32}
    for settings in ({}, llama, {"reset_at_documents": True, "end_of_text": 3}):
        spec = resolve(("test", {"preset": "tiny"} | settings))
        assert attention_of(spec, "torch", cpu) == f"{sdpa} (flash)"
        with sdpa_kernel(SDPBackend.MATH):
            assert attention_of(spec, "torch", cpu) == f"{sdpa} (math)"
    assert attention_of(spec, "te", cpu) == "Transformer Engine"


def test_the_attention_of_this_cpu_is_right_and_a_wrong_one_is_noticed():
    import torch
    from torch.nn import functional as F

    from parallel import gpu_probes
    from parallel.engines.kernels import error_of

    found = {what: (error, bar) for what, error, bar, _ in gpu_probes.attention()["rows"]}
    for precision in ("fp32", "bf16"):
        for what in ("flash_attention", "grouped queries (flash)", "documents (flash)"):
            error, bar = found[f"{what} {precision}"]
            assert 0 < error <= bar
    inputs = [torch.randn(1, 2, 16, 8) for _ in range(3)]
    wrong = error_of(F.scaled_dot_product_attention, gpu_probes.plain, inputs)  # not causal
    assert wrong > gpu_probes.BARS["bf16"]
    assert error_of(lambda q, k, v: (q + k + v) * math.nan, gpu_probes.plain, inputs) == math.inf
