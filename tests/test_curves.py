"""Curves in the tools where people look: each step once, the same values in every tool, and no tool
that fails costs a run anything. Read back with the tools' own libraries."""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from analysis import sinks as command
from analysis.logs.load import load
from analysis.logs.readers import read
from analysis.logs.record import Refusal
from analysis.measured.points import points_of
from models.flops import tflops_per_gpu
from parallel import sweep, train
from parallel.config.settings import CURVES, resolve
from parallel.record import sinks
from parallel.record.reader import read_run
from parallel.record.sinks import Described, Point, Writer, follow, timed_back
from parallel.record.sinks.run_folder import Source, described
from tests.conftest import ROOT, TRAIN, run_module

SMALL = ["--max-seq-len", "32", "--device", "cpu"]
DDP = ROOT / "logs" / "2-core-cpu" / "parity" / "ddp"
RUN = Described("a run", "study", {"engine": "ddp", "gpus": 2, "lr": 3e-4, "tied": True})
TEXTS = ["--tensorboard", "--otlp", "--openmetrics"]


def steps(first: int, last: int) -> list[Point]:
    """Points of steps of a tenth of a second, one a second."""
    return [
        Point(step, 1e9 + step, {"train/loss": 5.0 / step, "time/step_s": 0.1, "train/skipped": 0})
        for step in range(first, last + 1)
    ]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """tag -> (step, value) as TensorBoard reads its event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read_back = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read_back.Reload()
    return {
        tag: [(event.step, event.value) for event in read_back.Scalars(tag)]
        for tag in read_back.Tags()["scalars"]
    }


# --- while a run trains ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tokens, tmp_path_factory) -> Path:
    """A run that trained 4 steps, and went on to 6 with a full disk under one of its tools."""
    folder = tmp_path_factory.mktemp("curves") / "run"
    flags = [*SMALL, "--save-interval", "2", "--eval-interval", "3", *TEXTS]
    flags += ["--data", str(tokens), "--out", str(folder)]
    done = run_module(TRAIN, *flags, "--steps", "4")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    shutil.copytree(folder, folder.with_name("first"))
    (folder / "curves" / "otlp" / "metrics.jsonl").unlink()
    (folder / "curves" / "otlp" / "metrics.jsonl").symlink_to("/dev/full")
    done = run_module(TRAIN, *flags, "--steps", "6")
    assert done.returncode == 0
    folder.with_name("stderr").write_text(done.stderr)
    return folder


def test_tensorboard_has_each_step_of_both_attempts_once(trained):
    run, found = read_run(trained), scalars(trained / "curves" / "tensorboard")
    assert len(run.steps) == 6
    for tag, column in (
        ("train/loss", "loss"),
        ("train/grad_norm", "grad_norm"),
        ("train/learning_rate", "lr"),
        ("time/step_s", "step_s"),
    ):
        assert [step for step, _ in found[tag]] == [1, 2, 3, 4, 5, 6]
        expected = [step[column] for step in run.steps]
        assert [value for _, value in found[tag]] == pytest.approx(expected, rel=1e-6)  # float32
    spec = resolve(("run.json", run.facts["spec"]))
    rates = [spec.tokens_per_step / step["step_s"] for step in run.steps]
    tflops = [
        tflops_per_gpu(spec.model, 32, spec.tokens_per_step, step["step_s"], 1)
        for step in run.steps
    ]
    per_gpu = found["throughput/tokens_per_s_per_gpu"]
    assert [value for _, value in per_gpu] == pytest.approx(rates, rel=1e-6)
    computed = found["throughput/tflops_per_gpu"]
    assert [value for _, value in computed] == pytest.approx(tflops, rel=1e-6)
    assert [step for step, _ in found["val/loss"]] == [3, 4, 6]
    assert len(found["memory/peak_gb"]) == 6 and "throughput/mfu" not in found  # a CPU
    assert set(found) <= set(sinks.TAGS)


def test_tensorboard_has_the_settings_as_hparams(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    read_back = EventAccumulator(str(trained / "curves" / "tensorboard"))
    read_back.Reload()
    content = read_back.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    hparams = metadata.parse_session_start_info_plugin_data(content).hparams
    spec = read_run(trained).facts["spec"]
    assert hparams["engine"].string_value == "ddp" and hparams["lr"].number_value == spec["lr"]
    assert hparams["hidden"].number_value == resolve(("run.json", spec)).model.hidden


def test_a_tool_whose_disk_is_full_costs_one_line_and_the_run_goes_on(trained):
    said = trained.with_name("stderr").read_text()
    wanted = "parallel.train: no more curves of otlp: OSError: [Errno 28] No space left on device"
    assert said.startswith(wanted) and said.count("\n") == 1, said
    assert f"later: python -m analysis.sinks {trained} --otlp" in said
    assert read_run(trained).state == "complete"
    assert len(scalars(trained / "curves" / "tensorboard")["train/loss"]) == 6  # the others do


def test_the_settings_are_recorded_and_the_log_says_who_writes(trained):
    run = read_run(trained)
    assert [tool for tool in CURVES if run.facts["spec"][tool]] == ["tensorboard", *CURVES[-2:]]
    assert " tensorboard, otlp, openmetrics, written by" in (run.path / "train.log").read_text()


def test_afterwards_the_same_points_are_written_as_while_it_trained(trained, tmp_path, capsys):
    first = trained.with_name("first")
    assert command.main([str(first), *TEXTS, "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    (there,) = (tmp_path / "tensorboard").iterdir()
    assert scalars(there) == scalars(first / "curves" / "tensorboard")
    (lines,) = (tmp_path / "openmetrics").glob("*/metrics.prom")
    live = (first / "curves" / "openmetrics" / "metrics.prom").read_text()
    assert lines.read_text() == live


def test_otlp_files_read_back_have_the_run_folders_steps_losses_and_tflops(trained):
    first = trained.with_name("first")
    ours, theirs = read(first), read(first / "curves" / "otlp" / "metrics.jsonl")
    assert theirs.format == "OpenTelemetry" and theirs.iteration.tolist() == [1, 2, 3, 4]
    for name in ("loss", "grad_norm", "step_s", "tokens_per_s", "skipped"):
        np.testing.assert_allclose(getattr(theirs, name), getattr(ours, name), rtol=1e-12)
    points, _ = points_of(ours)
    computed = [point.values["throughput/tflops_per_gpu"] for point in points]
    np.testing.assert_array_equal(theirs.tflops, computed)
    peak_gb = max(point.values["memory/peak_gb"] for point in points)
    assert theirs.peak_bytes == pytest.approx(peak_gb * 1e9)
    same = "engine gpus gpu_type dp micro_batch global_batch seq_len precision"
    for name in same.split():
        assert getattr(theirs, name) == getattr(ours, name), name
    assert theirs.gpu_type
    assert {k: theirs.model[k] for k in ("n_layer", "hidden")} == {
        k: ours.model[k] for k in ("n_layer", "hidden")
    }


def test_a_growing_folder_is_followed_and_a_step_trained_again_is_not_written_again(tmp_path):
    """A killed attempt left steps 1 to 4; the next one began at its checkpoint of step 2."""
    folder = tmp_path / "run"
    shutil.copytree(DDP, folder)
    header, *rows = (folder / "steps.csv").read_text().splitlines(keepends=True)
    (folder / "steps.csv").write_text(header + "".join(rows[:4]) + rows[4][:7])
    looks = iter(([], rows[2:4], rows[4:6], rows[6:7]))

    def wait(_: float) -> bool:
        more = next(looks, None)
        with (folder / "steps.csv").open("a") as file:
            file.write("".join(more or ()))
        return more is None

    follow.follow(folder, "tensorboard", lambda _: True)  # the attempt that was killed
    (folder / "steps.csv").write_text(header + "".join(rows[:4]))
    follow.follow(folder, "tensorboard", wait)
    found = scalars(folder / "curves" / "tensorboard")["train/loss"]
    losses = [step["loss"] for step in read_run(DDP).steps[:7]]
    assert [step for step, _ in found] == [1, 2, 3, 4, 5, 6, 7]
    assert [value for _, value in found] == pytest.approx(losses, rel=1e-6)


def test_a_step_is_given_out_when_its_lines_are_there(tmp_path):
    """steps.csv has a step before the log has the line with its memory."""
    folder = tmp_path / "run"
    shutil.copytree(DDP, folder)
    header, *rows = (folder / "steps.csv").read_text().splitlines(keepends=True)
    (folder / "steps.csv").write_text(header + "".join(rows[:2]))
    (folder / "train.log").write_text("")
    source = Source(folder, read_run(DDP).facts)
    assert [point.step for point in source.new(ended=False)] == [1]
    line = " iteration        2/      20 | lm loss: 1.0 | max memory (GB): 0.41 |\n"
    (folder / "train.log").write_text(line)
    with (folder / "steps.csv").open("a") as file:
        file.write(rows[2])
    (second,) = source.new(ended=False)
    assert (second.step, second.values["memory/peak_gb"]) == (2, 0.41)
    assert [point.step for point in source.new(ended=True)] == [3]


def test_followers_end_when_the_process_of_rank_0_is_gone(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(DDP, folder)
    rank_0 = "import os, sys; from pathlib import Path\n"
    rank_0 += "from parallel.record.sinks.follow import Followers\n"
    rank_0 += "Followers(Path(sys.argv[1]), ['openmetrics']); os._exit(9)"
    command = [sys.executable, "-c", rank_0, str(folder)]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 9 and done.stderr == b""  # read to its end: the follower's is closed
    text = (folder / "curves" / "openmetrics" / "metrics.prom").read_text()
    assert "scaling_study_iteration{" in text


def test_a_library_that_is_absent_is_refused_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sinks.TOOLS, "wandb", ("no_such_module",))
    for more in ([], ["--check"]):
        assert train.main(["--wandb", "--out", str(tmp_path / "run"), *more]) == 2
        said = capsys.readouterr().err
        assert said == (
            "parallel.train: --wandb needs no_such_module, not installed here:"
            " pip install -c constraints.txt -e '.[wandb]'\n"
        )
    assert not (tmp_path / "run").exists()


def test_the_flags_of_tools_make_no_other_run_of_a_study(tmp_path, capsys):
    study = ["--study", "slurm/parity.toml", "--run-name", "ddp", "--device", "cpu", "--check"]
    assert train.main([*study[:4], "--check", "--tensorboard"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["tensorboard"] and described["folder"] == "logs/parity/ddp"
    assert train.main([*study[:4], "--check", "--seed", "1"]) == 2


def test_a_sweep_trains_no_complete_run_again_because_a_tool_was_added(trained, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder, symlinks=True)
    facts = json.loads((folder / "run.json").read_text())
    facts["git"] |= {"code": "c0de", "dirty": False}
    (folder / "run.json").write_text(json.dumps(facts))
    for changed, is_done in (({"wandb": True}, True), ({"seed": 1}, False)):
        spec = resolve(("run.json", facts["spec"] | changed))
        assert sweep.is_done(folder, spec, facts["git"]) == is_done


def test_every_tool_has_a_setting_and_a_file():
    assert tuple(sinks.TOOLS) == CURVES
    files = {path.stem for path in Path(sinks.__file__).parent.glob("*.py")}
    assert set(CURVES) == files - {"__init__", "follow", "run_folder"}


# --- each format, by its own library --------------------------------------------------------


def test_otlp_lines_are_requests_of_opentelemetry(tmp_path):
    from google.protobuf import json_format
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )

    writer = Writer("otlp", RUN, tmp_path)
    bad = Point(3, 1e9 + 3, {"train/loss": math.nan, "time/step_s": 0.2, "train/skipped": 1.0})
    bad.values["memory/peak_gb"] = 2**30 / 1e9
    writer.write([*steps(1, 2), bad])
    (line,) = (tmp_path / "otlp" / "metrics.jsonl").read_text().splitlines()
    request = json_format.Parse(line, ExportMetricsServiceRequest())
    (resource,) = request.resource_metrics
    about = {entry.key: entry.value for entry in resource.resource.attributes}
    assert about["nemo.run.id"].string_value == "a run"
    assert about["scaling_study.gpus"].int_value == 2
    assert about["scaling_study.lr"].double_value == 3e-4
    assert about["scaling_study.tied"].bool_value is True
    metrics = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    losses = metrics["megatron.training.loss"].gauge.data_points
    assert [p.as_double for p in losses][:2] == [5.0, 2.5] and math.isnan(losses[2].as_double)
    assert losses[0].time_unix_nano == 1_000_000_001_000_000_000
    (peak,) = metrics["megatron.training.memory_allocated_gb"].gauge.data_points
    assert peak.as_double == 1.0  # GiB, as Megatron-LM computes it
    steps_ms = metrics["megatron.training.step_duration_ms"]
    assert steps_ms.unit == "ms" and steps_ms.histogram.aggregation_temporality == 1  # delta
    first = steps_ms.histogram.data_points[0]
    assert (first.count, first.sum, list(first.bucket_counts).index(1)) == (1, 100.0, 6)
    assert list(first.explicit_bounds)[5:7] == [75, 100]
    (skipped,) = metrics["megatron.training.skipped_iters"].sum.data_points
    assert skipped.as_int == 1 and skipped.time_unix_nano == 1_000_000_003_000_000_000


MEGATRONS = {  # megatron/core/telemetry/training_metrics.py of Megatron-LM
    "step_duration_ms loss throughput_tflops grad_norm skipped_iters learning_rate tokens_per_sec"
    " memory_allocated_gb"
}


def test_the_names_are_megatron_lms():
    from parallel.record.sinks import otlp

    names = {name for name, _, _ in otlp.GAUGES.values()} | {otlp.STEP_MS, otlp.SKIPPED}
    ours = {name.removeprefix("megatron.training.") for name in names if "megatron" in name}
    assert ours == {name for line in MEGATRONS for name in line.split()}


def test_metrics_that_megatron_lm_exports_every_so_many_seconds_are_read(tmp_path):
    """Made with OpenTelemetry's own messages: a cumulative histogram, gauges and no iteration."""
    from google.protobuf import json_format
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )

    lines = []
    for at, (count, total, loss) in enumerate([(2, 900.0, 9.5), (5, 2100.0, 9.0), (5, 2100.0, 9)]):
        request = ExportMetricsServiceRequest()
        metrics = request.resource_metrics.add().scope_metrics.add().metrics
        duration = metrics.add(name="megatron.training.step_duration_ms", unit="ms").histogram
        duration.aggregation_temporality = 2
        duration.data_points.add(time_unix_nano=10**18 + at, count=count, sum=total)
        for name, value in (("loss", loss), ("throughput_tflops", 400.0)):
            gauge = metrics.add(name=f"megatron.training.{name}").gauge
            gauge.data_points.add(time_unix_nano=10**18 + at, as_double=value)
        lines.append(json.dumps(json_format.MessageToDict(request)))
    log = tmp_path / "collector.jsonl"
    log.write_text("\n".join(lines) + "\n")
    record = read(log)
    assert record.step_s.tolist() == [0.45, 0.4]  # the third export has no new step
    assert (record.loss.tolist(), record.tflops.tolist()) == ([9.5, 9.0], [400.0, 400.0])
    assert record.iteration.tolist() == [1, 2] and "counted from 1" in " ".join(record.notes)


def test_a_file_of_two_runs_and_a_damaged_line_are_named(tmp_path):
    for name in ("one", "two"):
        Writer("otlp", Described(name, "s"), tmp_path / name).write(steps(1, 3))
    one, two = ((tmp_path / name / "otlp" / "metrics.jsonl").read_text() for name in ("one", "two"))
    log = tmp_path / "both.jsonl"
    log.write_text(one + two)
    with pytest.raises(Refusal, match=r"holds the points of 2 runs \(one, two\)"):
        read(log)
    log.write_text(one + one[: len(one) // 2] + "\n")
    assert read(log).notes == ["1 lines are not JSON"] and len(read(log).iteration) == 3


def test_openmetrics_text_is_what_prometheus_and_node_exporter_take(tmp_path):
    from prometheus_client import parser
    from prometheus_client.openmetrics import parser as openmetrics

    texts = []
    for name in ('one "quoted"', "two"):
        writer = Writer("openmetrics", Described(name, "s", RUN.config), tmp_path / name)
        writer.write([*steps(1, 3), Point(4, 1e9, {"train/loss": math.nan, "train/skipped": 1.0})])
        texts.append((tmp_path / name / "openmetrics" / "metrics.prom").read_text())
    helps = [[line for line in text.splitlines() if line[:6] == "# HELP"] for text in texts]
    assert helps[0] == helps[1]  # node_exporter refuses another help in another file
    assert texts[0].endswith("\n# EOF\n")
    for families in (
        list(openmetrics.text_string_to_metric_families(texts[0])),
        list(parser.text_string_to_metric_families(texts[0])),
    ):
        samples = {s.name: s for family in families for s in family.samples}
        assert all(sample.timestamp is None for sample in samples.values())
        assert math.isnan(samples["megatron_training_loss"].value)
        assert samples["megatron_training_loss"].labels["run"] == 'one "quoted"'
        assert samples["megatron_training_skipped_iters_total"].value == 1
        took = "megatron_training_step_duration_ms_milliseconds"
        assert samples[f"{took}_count"].value == 3
        assert samples[f"{took}_sum"].value == pytest.approx(300.0)
        assert samples["scaling_study_training"].value == 1
    writer.close("complete")
    assert "scaling_study_training{" in texts[1]
    text = (tmp_path / "two" / "openmetrics" / "metrics.prom").read_text()
    assert 'study="s",engine="ddp",gpus="2"} 0.0' in text


def test_sums_go_on_where_another_process_stopped(tmp_path):
    Writer("openmetrics", RUN, tmp_path).write(steps(1, 3))
    again = Writer("openmetrics", RUN, tmp_path)
    again.write(steps(1, 5))
    text = (tmp_path / "openmetrics" / "metrics.prom").read_text()
    assert 'milliseconds_count{run="a run",study="study",engine="ddp",gpus="2"} 5.0' in text


def attempts(tool: str, folder: Path, then: str = "") -> str:
    """Write steps 1 to 3 and 1 to 5, each in a process of its own, as a run and its next attempt
    do; what the program `then` prints after the second."""
    program = f"""
from pathlib import Path
from parallel.record.sinks import Writer
from tests.test_curves import RUN, steps
writer = Writer({tool!r}, RUN, Path({str(folder)!r}))
writer.write(steps(1, %d))
writer.close(%r)
"""
    said = ""
    for more in (program % (3, "failed"), program % (5, "complete") + then):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", more],
            cwd=ROOT,
            env={k: v for k, v in os.environ.items() if not k.startswith(SERVERS)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        said = done.stdout
    return said


SERVERS = ("WANDB_", "MLFLOW_", "TRACKIO_")
FIVE = [(step, 5.0 / step) for step in range(1, 6)]


@pytest.mark.slow
def test_wandb_keeps_a_run_offline_and_goes_on_with_it(tmp_path):
    pytest.importorskip("wandb", reason="the extra wandb is not installed (125 MB)")
    from wandb.proto import wandb_internal_pb2

    attempts("wandb", tmp_path)
    seen, ids, config = [], set(), {}
    files = sorted((tmp_path / "wandb").glob("wandb/offline-run-*/run-*.wandb"))
    for data in (data for path in files for data in records_of(path)):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.HasField("run"):
            ids.add((record.run.run_id, record.run.project, record.run.display_name))
            config |= {e.key: json.loads(e.value_json) for e in record.run.config.update}
        if record.HasField("history"):
            items = {"/".join(i.nested_key): i.value_json for i in record.history.item}
            seen.append((json.loads(items["_step"]), json.loads(items["train/loss"])))
            assert json.loads(items["_timestamp"]) == 1e9 + seen[-1][0]  # the step's own time
    assert seen == FIVE and len(files) == 2
    assert len(ids) == 1 and {i[1:] for i in ids} == {("study", "a run")}
    assert config["lr"] == 3e-4 and config["engine"] == "ddp"


def records_of(path: Path) -> list[bytes]:
    """The records of a .wandb file: LevelDB's log format behind a header of 7 bytes."""
    content, at, found, parts = path.read_bytes(), 7, [], b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last of its pieces
            found.append(parts)
            parts = b""
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's use of SQLAlchemy
def test_mlflow_keeps_a_run_in_a_local_file_and_goes_on_with_it(tmp_path, monkeypatch):
    for module in sinks.TOOLS["mlflow"]:
        pytest.importorskip(module, reason="the extra mlflow is not installed (160 MB)")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.tracking import MlflowClient

    attempts("mlflow", tmp_path)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("study")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("a run", "FINISHED")
    assert run.data.params["lr"] == "0.0003" and run.data.params["engine"] == "ddp"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == FIVE
    assert history[0].timestamp == 1_000_000_001_000  # milliseconds


@pytest.mark.slow
def test_trackio_keeps_a_run_in_local_files_and_goes_on_with_it(tmp_path):
    pytest.importorskip("trackio", reason="the extra trackio is not installed (190 MB)")
    then = """
import json
from trackio.sqlite_storage import SQLiteStorage
logs = SQLiteStorage.get_logs("study", "a run")
print(json.dumps([SQLiteStorage.get_runs("study"), SQLiteStorage.get_run_config("study", "a run"),
    [(log["step"], log["train/loss"]) for log in logs]]))
"""
    runs, config, found = json.loads(attempts("trackio", tmp_path, then))
    assert runs == ["a run"] and config["lr"] == 3e-4
    assert found == [list(point) for point in FIVE]


# --- afterwards -----------------------------------------------------------------------------


def test_the_same_command_twice_doubles_nothing(tmp_path, capsys):
    arguments = [str(DDP), *TEXTS, "--out", str(tmp_path)]
    assert command.main(arguments) == 0
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert "ddp: tensorboard: 20 steps written, 0 were there" in capsys.readouterr().out
    assert command.main(arguments) == 0
    assert "ddp: tensorboard: 0 steps written, 20 were there" in capsys.readouterr().out
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_log_that_grew_adds_its_new_steps_and_another_run_is_refused(tmp_path, capsys):
    line = (
        " iteration {:8d}/     100 | elapsed time per iteration (ms): 2500.0 | global batch size:"
        "     8 | lm loss: {:.6E} | throughput per GPU (TFLOP/s/GPU): 140.5 |\n"
    )
    log = tmp_path / "job.out"
    arguments = [str(log), "--tensorboard", "--otlp", "--out", str(tmp_path / "curves")]
    arguments += ["--gpus", "4", "--seq-len", "1024"]
    for last in (3, 5):
        log.write_text("".join(line.format(i, 9.0 - i) for i in range(1, last + 1)))
        assert command.main(arguments) == 0
    found = scalars(tmp_path / "curves" / "tensorboard" / "job.out")
    assert found["train/loss"] == [(i, 9.0 - i) for i in range(1, 6)]
    assert found["throughput/tflops_per_gpu"] == [(i, 140.5) for i in range(1, 6)]
    assert found["throughput/tokens_per_s_per_gpu"][0] == (1, pytest.approx(8 * 1024 / 2.5 / 4))
    said = capsys.readouterr().err
    assert "job.out: TFLOP/s are those that the log prints: the log does not state n_layer" in said
    assert "job.out: no MFU: the TFLOP/s are the log's own count" in said
    log.write_text("".join(line.format(i, 8.0 - i) for i in range(1, 6)))
    assert command.main(arguments) == 1
    assert "holds another run of that name" in capsys.readouterr().err


def test_points_of_a_log_are_its_entries_and_of_a_step_twice_the_last(tmp_path):
    log = tmp_path / "job.out"
    line = " iteration {:3d}/ 10 | elapsed time per iteration (ms): {} | lm loss: {:.1f} |\n"
    entries = [(1, 1000, 9), (2, 1000, 8), (3, 1000, 7), (2, 2000, 8.5), (3, 2000, 7.5)]
    log.write_text("".join(line.format(*entry) for entry in entries))
    os.utime(log, (2e9, 2e9))
    (record,), _ = load([log])
    points, _ = points_of(record)
    assert [(p.step, p.values["train/loss"]) for p in points] == [(1, 9), (2, 8.5), (3, 7.5)]
    assert [p.time_s for p in points] == [2e9 - 4, 2e9 - 2, 2e9]


def test_a_tool_that_fails_afterwards_is_named_and_the_others_are_written(tmp_path, capsys):
    (tmp_path / "otlp").write_text("a file")
    assert command.main([str(DDP), "--otlp", "--openmetrics", "--out", str(tmp_path)]) == 1
    done = capsys.readouterr()
    assert done.err.startswith("analysis.sinks: ddp: otlp failed: ") and done.err.count("\n") == 1
    assert "ddp: openmetrics: 20 steps written" in done.out


def test_a_command_without_a_tool_names_them(capsys):
    assert command.main([str(DDP)]) == 2
    assert "say which tools: --tensorboard, --wandb" in capsys.readouterr().err


def test_times_end_at_the_end_and_are_a_step_apart():
    points = [Point(n, 0.0, {"time/step_s": s}) for n, s in ((1, 5.0), (2, 2.0), (3, 1.0))]
    assert [point.time_s for point in timed_back(points, 100.0)] == [97.0, 99.0, 100.0]


def test_no_settings_but_numbers_texts_and_booleans_are_given_to_tools():
    config = described(read_run(DDP).facts).config
    assert config["n_layer"] and config["engine"] == "ddp" and config["world_size"] == 1
    assert {type(value) for value in config.values()} <= {str, int, float, bool}
    assert time.strptime(config["started_utc"], "%Y-%m-%dT%H:%M:%SZ")
