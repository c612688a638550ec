"""`analysis.compare --at-most` fails a change of code that is slower beyond noise, and no other."""

import json

import numpy as np
import pytest

from analysis.compare import main
from analysis.runs import gate
from analysis.runs.judged import judged
from analysis.runs.pairs import pair_of
from tests.fixture_runs import facts, logged, write
from tests.tools.gate_campaign import statuses

LINE = (
    " iteration {:8d}/     100 | consumed samples: {:d} | elapsed time per iteration (ms): {:.1f} |"
    " learning rate: 1.0E-05 | global batch size: {:5d} | lm loss: 6.612992E+00 | loss scale: 1.0 |"
    " number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)


@pytest.fixture
def log(tmp_path):
    """Writes a log whose steps take this many seconds, with noise of 1 %."""

    def written(name, step_s, n=60, batch=8, gpus=8, noise=0.01):
        path = tmp_path / f"{name}.log"
        draw = np.random.default_rng(len(name)).standard_normal(n)
        times = 1000 * step_s * (1 + noise * draw)
        lines = (LINE.format(i, batch * i, ms, batch) for i, ms in enumerate(times, 1))
        path.write_text("".join(lines))
        path.with_suffix(".toml").write_text(f"gpus = {gpus}\n")
        return str(path)

    return written


def gated(capsys, *arguments):
    """The exit status, and the sentence of the gate or of the refusal."""
    status = main([*arguments, "--at-most", "3%"])
    printed = capsys.readouterr()
    return status, (printed.out or printed.err).splitlines()[-1]


@pytest.mark.parametrize(
    ("new", "status", "words"),
    [
        ({"step_s": 1.0}, 0, "NEW is not slower by more than 3 %: its step takes "),
        ({"step_s": 0.5}, 0, "NEW is not slower by more than 3 %: its step takes -50.1 % (-50.5 %"),
        ({"step_s": 1.04, "noise": 0.1}, 0, "not shown to be slower by more than 3 %: its step"),
        (
            {"step_s": 1.08},
            1,
            "NEW is slower by more than 3 %: its step takes +7.8 % (+6.9 % to +8.3 %)",
        ),
        ({"step_s": 2.0, "n": 4}, 2, "cannot be known: no verdict: too few points"),
        ({"step_s": 2.0, "batch": 9}, 2, "cannot be known: invalid comparison: global batch 9"),
        ({"step_s": 2.0, "gpus": 4}, 2, "OLD ran on 8 GPUs and NEW on 4: neither is slower"),
    ],
)
def test_only_what_is_slower_beyond_noise_fails(new, status, words, log, capsys):
    found, sentence = gated(capsys, log("old", 1.0), log("newer", **new))
    assert found == status and words in sentence
    assert main([log("old", 1.0), log("newer", **new)]) == (status == 2 and "GPUs" not in words)


def test_what_cannot_be_read_or_has_no_noise_is_unknown(log, tmp_path, capsys):
    (tmp_path / "empty.log").write_text("nothing\n")
    assert gated(capsys, log("old", 1.0), str(tmp_path / "empty.log"))[0] == 2
    assert gated(capsys, log("old", 1.0))[1].endswith("NEW with --golden FILE, not a study")
    status, sentence = gated(capsys, log("old", 1.0), log("old", 1.0))
    assert status == 2 and sentence.endswith("old.log: nothing is compared")
    with pytest.raises(SystemExit) as ended:
        gated(capsys, log("old", 1.0), log("new", 1.0), "--at-most", "3")
    assert ended.value.code == 2 and "'3' is no share in percent, as 3%" in capsys.readouterr().err
    runs = judged([logged(f"{name}.log", step_s=np.ones(40)) for name in "ab"])
    runs[1].record.running_average = True
    verdict = gate.judge(pair_of(runs[:1], runs[1:]), 0.03)
    assert verdict.status == 2 and "how much is noise is unknown; " in verdict.sentence


def test_a_golden_file_is_written_once_and_stands_for_old(log, tmp_path, capsys):
    golden = str(tmp_path / "golden.json")
    old, new = log("old", 1.0), log("slower", 1.08)
    status, line = gated(capsys, log("short", 1.0, n=4), "--golden", golden)
    assert status == 2 and "golden.json is not written, nothing could be compared" in line
    status, line = gated(capsys, old, "--golden", golden)  # nothing was compared, so none passes
    assert status == 2 and "golden.json is written: the reference of later" in line
    assert gated(capsys, old, "--golden", golden)[0] == 0
    for status, path in ((0, log("odd", 1.0)), (1, new)):  # the same times in another file
        beside, gold = (
            gated(capsys, *paths) for paths in ([old, path], [path, "--golden", golden])
        )
        assert beside == gold and gold[0] == status
    assert gated(capsys, log("batch", 1.0, batch=9), "--golden", golden)[0] == 2
    assert gated(capsys, old, new, "--golden", golden)[1].endswith("but 2 paths were given")
    other = str(tmp_path / "other.json")
    assert main([old, "--golden", other]) == 0 and main([new, "--golden", other]) == 0


def test_repeats_of_ours_are_kept_with_what_makes_them_comparable(tmp_path, capsys):
    """Other code is compared, another size is not; both sides' own commits may differ."""
    golden = str(tmp_path / "golden.json")

    def study(name, step_s, commit="c", **settings):
        for repeat in (1, 2, 3):
            about = facts("s", None, engine="ddp", **settings)
            about |= {"run": f"ddp-{repeat}", "configuration": "ddp", "repeat": repeat}
            about["git"] = {"commit": commit * 40, "dirty": False}
            write(tmp_path / name, about, step_s * (1 + 0.001 * repeat))
        return str(tmp_path / name)

    assert main([study("old", 1.0), "--golden", golden]) == 0
    kept = json.loads((tmp_path / "golden.json").read_text())["facts"]
    assert kept["sequence_parallel"] is False and "repeat" not in kept  # ran in turns with nobody
    capsys.readouterr()
    for name, status, words in (
        ("same", 0, "NEW is not slower by more than 3 %"),
        ("slow", 1, "NEW is slower by more than 3 %: its step takes +6.0 % (+5."),
        (
            "other",
            2,
            "cannot be known: invalid comparison: model n_layer 8 here, 4 in the baseline",
        ),
    ):
        path = study(name, 1.06 if status else 1.0, "d", **{"n_layer": 8} if status == 2 else {})
        found, sentence = gated(capsys, path, "--golden", golden)
        assert found == status and words in sentence, sentence


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda c: [], "holds [], no object"),
        (lambda c: c | {"holds": "x"}, "holds no golden step times"),
        (lambda c: c | {"runs": []}, "holds no golden step times"),
        (lambda c: c | {"runs": [{"run": "x"}]}, "a run has no step_s, n, independent"),
        (lambda c: c | {"runs": [c["runs"][0] | {"step_s": -1}]}, "runs[0].step_s cannot be -1"),
        (lambda c: c | {"runs": [c["runs"][0] | {"ci95": [5.0, 6.0]}]}, "is not within [5.0, 6.0]"),
        (lambda c: c | {"facts": {"gpus": "many"}}, "facts.gpus cannot be 'many'"),
        (lambda c: c | {"facts": 3}, "facts cannot be 3"),
        (
            lambda c: c | {"run_json": {"spec": {"threads": {}}}},
            "run_json.spec.threads cannot be {}",
        ),
    ],
)
def test_a_damaged_golden_file_is_refused_in_one_line(damage, words, log, tmp_path, capsys):
    golden = tmp_path / "golden.json"
    assert main([log("old", 1.0), "--golden", str(golden)]) == 0
    capsys.readouterr()
    golden.write_text(json.dumps(damage(json.loads(golden.read_text()))))
    status, line = gated(capsys, log("old", 1.0), "--golden", str(golden))
    assert status == 2 and words in line


@pytest.mark.parametrize(("keeps", "runs"), [(0.0, 1), (0.6, 1), (0.6, 3)])
def test_equal_code_passes_and_a_tenth_slower_fails(keeps, runs):
    """docs/ci-gate.md has more trials."""
    equal = statuses(0.0, keeps, 0.01, runs, 60, 100)
    assert equal[gate.SLOWER] <= 1 and equal[gate.UNKNOWN] <= 2
    assert statuses(0.1, keeps, 0.01, runs, 60, 50)[gate.SLOWER] >= 20
