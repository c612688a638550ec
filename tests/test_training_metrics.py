"""training_metrics.json is the published schema 2.0, field for field, and times never mix."""

import copy
import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import jsonschema
import pytest
import torch

from analysis.logs.readers import run_folder
from analysis.runs import rank_times
from parallel.measure import efficiencies, training_metrics
from parallel.measure.energy import Energy
from parallel.record import facts
from parallel.record.reader import read_run
from tests.conftest import CLEAN_ROOT, ROOT, run_module

SCHEMA = json.loads((ROOT / "parallel" / "record" / "training_metrics.schema.json").read_text())


@pytest.fixture(scope="module")
def ours(tokens, tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("run") / "ddp-dp2"
    flags = ["--max-seq-len", "16", "--n-layer", "1", "--hidden", "32", "--device", "cpu"]
    flags += ["--global-batch", "8", "--steps", "12", "--eval-interval", "4", "--data", str(tokens)]
    flags += ["--breakdown"]
    done = run_module("parallel.train", *flags, "--out", str(out), ranks=2, HF_TOKEN="hf_12345")
    assert done.returncode == 0, done.stderr
    run = read_run(out)
    return {"path": out, "stdout": done.stdout, "metrics": run.metrics, "steps": run.steps}


def leaves(content: object, at: str = "") -> Iterator[tuple[str, str]]:
    """The key path and the type of every value; list items share one path."""
    if isinstance(content, dict | list):
        inside = content.items() if isinstance(content, dict) else (("[]", v) for v in content)
        for key, value in inside:
            yield from leaves(value, f"{at}.{key}")
    else:
        yield at, "number" if type(content) in (int, float) else type(content).__name__


def test_ours_validates_and_the_schema_names_every_field_of_it(ours):
    jsonschema.validate(ours["metrics"], SCHEMA)
    assert ours["metrics"].keys() == SCHEMA["properties"].keys()


def test_a_run_ends_with_its_speed_and_what_bounds_it(ours):
    """What bounds it is what analysis finds in its breakdown, to the digit."""
    (said,) = [line for line in ours["stdout"].splitlines() if line.startswith(" verdict: ")]
    assert said in (ours["path"] / "train.log").read_text().splitlines()
    breakdown = rank_times.of_record(run_folder.read(ours["path"])).content
    bound = efficiencies.verdict(breakdown.spec.layout, breakdown.ranks)
    step_s = ours["metrics"]["summary"]["steady_step_time_sec"]
    assert said.startswith(f" verdict: {step_s:.4g} s/iter (") and said.endswith(f"; {bound}")


def test_a_run_without_a_breakdown_says_what_it_knows(ours):
    metrics = copy.deepcopy(ours["metrics"])
    for epoch in metrics["epochs"]:
        epoch["dataload_time_mean_sec"] = 0.25 * epoch["epoch_wall_time_sec"] / epoch["micro_steps"]
    metrics["summary"] |= {"mfu": 0.4, "tflops_per_gpu": 400.0}
    said = training_metrics.verdict_line(metrics, "")
    assert "MFU 40.0% of 1000 TFLOP/s; input-bound: waiting for data takes 25.0% of" in said
    assert said.endswith("train with --breakdown to see where the rest goes")
    metrics["epochs"][0]["dataload_time_mean_sec"] = None  # of a run that went on
    assert "--breakdown" in (said := training_metrics.verdict_line(metrics, ""))
    assert "waiting" not in said and "input-bound" not in said
    for damaged in ([], [1], [{"micro_steps": "3"}], [{"micro_steps": 3}]):
        assert training_metrics.data_share({"epochs": damaged}) is None
    metrics["profiler"] = {"tool": "torch"}
    assert "s/iter" not in training_metrics.verdict_line(metrics, "")


def test_the_published_examples_validate_and_ours_has_every_field_of_them(ours, shared):
    mine = set(leaves(ours["metrics"]))
    examples = sorted(shared.glob("logs/kadamrahul18+GPT2-Optimization/*training_metrics.json"))
    assert len(examples) >= 5
    for example in examples:
        theirs = json.loads(example.read_text())
        jsonschema.validate(theirs, SCHEMA)
        for path, kind in leaves(theirs):
            # null stands for what this machine has not: a GPU, Slurm, a DeepSpeed JSON.
            assert {(path, kind), (path, "NoneType")} & mine, (example.name, path, kind)


def test_every_committed_file_validates():
    files = sorted((CLEAN_ROOT / "logs").rglob("training_metrics.json"))
    validator = jsonschema.Draft202012Validator(SCHEMA)
    assert len(files) >= 30
    for file in files:
        assert [e.message for e in validator.iter_errors(json.loads(file.read_text()))] == [], file


def test_the_times_add_up_and_throughput_counts_training_alone(ours):
    summary, steps = ours["metrics"]["summary"], ours["steps"]
    parts = ["startup", "training", "evaluation", "checkpoint", "other"]
    total = sum(summary[f"{part}_time_sec"] for part in parts)
    assert total == pytest.approx(summary["total_wall_time_sec"])
    training = sum(step["step_s"] for step in steps)
    assert summary["training_time_sec"] == pytest.approx(training)
    assert summary["evaluation_time_sec"] > 0 and summary["startup_time_sec"] > 0
    assert summary["other_time_sec"] >= 0
    rate = sum(step["tokens"] for step in steps) / training
    assert summary["mean_tokens_per_sec_global"] == pytest.approx(rate)


def test_launcher_metadata_tells_the_launcher_and_no_secret(ours):
    text = (ours["path"] / "launcher_metadata.json").read_text()
    told = json.loads(text)
    assert told["launcher"] == "fork" and told["world_size"] == 2
    assert told["environment"]["OMP_NUM_THREADS"] == "1"
    assert "hf_12345" not in text
    assert (ours["path"] / "launcher_metadata.json").stat().st_mode & 0o777 == 0o600
    assert facts.scheduler({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"})["job_id"] == "7"


def test_energy_of_gpus_is_nvmls_in_joules(monkeypatch):
    millijoules = {"GPU-a": 1000, "GPU-b": 5000}
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: millijoules[handle],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    properties = [SimpleNamespace(uuid="a"), SimpleNamespace(uuid="b")]
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    energy = Energy(torch.device("cuda"))
    millijoules |= {"GPU-a": 3000, "GPU-b": 6500}
    assert energy.joules() == pytest.approx(3.5)
    assert energy.source == "NVML, 2 GPUs that rank 0 sees"
    del millijoules["GPU-b"]  # it fell off the bus: no number, and training goes on
    assert energy.joules() is None and energy.source.startswith("none (NVML: ")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Energy(torch.device("cuda")).source.startswith("none (NVML: ")
    assert Energy(torch.device("cpu")).joules() is None


@pytest.mark.parametrize("key", ["energy_accumulator", "power"])  # since ROCm 6.2.1, and before
def test_energy_of_amds_gpus_is_amd_smis_in_joules(key, monkeypatch):
    ticks = {"0000:c1:00.0": 1_000_000, "0001:0a:00.0": 0}
    smi = SimpleNamespace(
        AmdSmiInitFlags=SimpleNamespace(INIT_AMD_GPUS=2),
        amdsmi_init=lambda _: None,
        amdsmi_get_processor_handle_from_bdf=lambda address: address,
        amdsmi_get_energy_count=lambda at: {key: ticks[at], "counter_resolution": 15.3},
    )
    monkeypatch.setitem(sys.modules, "amdsmi", smi)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    places = (0, 0xC1), (1, 0x0A)
    cards = [SimpleNamespace(pci_domain_id=d, pci_bus_id=b, pci_device_id=0) for d, b in places]
    monkeypatch.setattr(torch.cuda, "get_device_properties", cards.__getitem__)
    energy = Energy(torch.device("cuda"))
    ticks["0000:c1:00.0"] += 2_000_000
    assert energy.joules() == pytest.approx(30.6)
    assert energy.source == "AMD SMI, 2 GPUs that rank 0 sees"
