"""Training runs in, one trustworthy row each out: seconds, tokens/s, TFLOP/s, speedup, efficiency.

    python analysis/tflops.py PATH... [--convention NAME] [--baseline NAME] [--scaling weak]

Seconds per iteration are the median after the warm-up that is found in the data (--window states
it instead, --rule seed takes the mean of everything). TFLOP/s per GPU are computed under the named
FLOPs convention; what a log printed itself stands beside them and is never mixed in. A speedup is
printed only where both runs completed and the fixed work and (unless --any-commit) the commit are
the baseline's, an efficiency only where every rank had cores of its own, MFU only for a GPU whose
peak is known. A run that failed keeps its row and its reason.

`--format json` prints an array of objects, one per run; unknown is null. source, format, verdict
and reasons; engine; steps and step_s_mean, _median, _min and _max over all logged steps;
steady_step_s, steady_n and steady_ci95; tokens_per_s, samples_per_s and printed_tflops; gpus, tp,
pp, vpp, dp, micro_batch, global_batch, seq_len, model, params. Then what this table adds: run,
origin (of what the log does not say itself), convention, tflops, mfu, speedup, efficiency and
parity, and with --predict predicted_s and predicted_error. Exits 2 when nothing could be read.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: find the rooms, not analysis/ itself
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from analysis import beside, scaling
from analysis.load import add_fact_flags, baseline_of, load, name_of, own_name
from analysis.parity import verify
from analysis.quality import (
    SUMMARY,
    add_time_flags,
    describe_rule,
    judge,
    summary,
    timed,
    unfinished,
)
from analysis.readers.run_folder import oversubscribed
from analysis.records import Record
from analysis.tables import FORMAT_HELP, FORMATS, Column, Table, emphasise, json_objects
from models.config import GPTConfig
from models.errors import Parser, UsageError, command_line, warn
from models.flops import CONVENTIONS, DEFAULT_CONVENTION
from models.hardware import mfu
from parallel.artifacts import read_run
from parallel.steady import Steady

# What `--format json` adds to the keys of `quality.summary`.
ADDED = ("run", "origin", "convention", "tflops", "mfu", "speedup", "efficiency", "parity")
SAME_MODEL = 0.05  # parameters printed over those of a GPT of the printed shapes, less one


def config_of(record: Record) -> GPTConfig | None:
    """The model as a GPT, where the log gives its sizes and nothing speaks against it being one.

    Gated or grouped attention, experts and the like hide in logs whose shapes look like a GPT's;
    their parameters do not: they must agree with the shapes, or, where none are printed, the
    feed-forward size with the usual 4 x hidden. None otherwise: no number rather than a wrong one.
    """
    known = {k: v for k, v in record.model.items() if k in GPTConfig.__dataclass_fields__}
    if not {"n_layer", "hidden", "vocab_size"} <= set(known):
        return None
    known.setdefault("n_head", 1)  # no FLOPs or parameter count depends on it
    if record.seq_len:
        known.setdefault("max_seq_len", record.seq_len)
    try:
        config = GPTConfig(**known)
    except UsageError:
        return None
    if record.params is not None:
        agrees = abs(record.params / config.n_params - 1) <= SAME_MODEL
    else:
        agrees = config.ffn_hidden == 4 * config.hidden
    return config if agrees else None


def stated_size_tflops(
    params: float, tokens: float, step_s: float, gpus: float, recompute: bool = True
) -> float:
    """The seed convention for a size that is stated (52e9) rather than counted from shapes."""
    return (8.0 if recompute else 6.0) * params * tokens / (step_s * gpus * 1e12)


def flops_per_token(record: Record, convention: str) -> float | None:
    """FLOPs per token under `convention`, or None where a fact that it needs is missing."""
    recompute = record.recompute == "full"
    if convention == "seed":  # its rule is that recomputation is on, unless a log denies it
        recompute = record.recompute in (None, "full")
    elif convention == "sc21" and record.recompute is None:
        return None
    config = config_of(record)
    # A size that is stated (52B) rather than counted is what these two multiply.
    if record.params and convention in ("6n", "seed"):
        return (8.0 if recompute and convention == "seed" else 6.0) * record.params
    if config is None or not record.seq_len:
        return None
    return CONVENTIONS[convention](config, record.seq_len, recompute)


def tflops_per_gpu(record: Record, step_s: float, convention: str) -> float | None:
    """TFLOP/s per GPU at `step_s` seconds per iteration, or None where a fact is missing."""
    per_token = flops_per_token(record, convention)
    if not (per_token and record.gpus and record.global_batch and record.seq_len and step_s > 0):
        return None
    return per_token * record.global_batch * record.seq_len / (step_s * record.gpus * 1e12)


def _baseline_of(record: Record, records: list[Record]) -> tuple[Record | None, str]:
    """(the baseline that the run's own run.json names, "") or (None, why there is none)."""
    wanted = record.extra.get("baseline")
    # One study may lie there twice, from two machines: the baseline is the run's neighbour.
    fits = [
        r
        for r in records
        if wanted
        and own_name(r) == wanted
        and Path(r.source).parent == Path(record.source).parent
        and r.extra.get("study") == record.extra.get("study")
    ]
    if len(fits) > 1:
        names = ", ".join(map(name_of, fits))
        return None, f"no speedup: the baseline {wanted} fits {names} (--baseline names one)"
    return (fits[0] if fits else None), ""


def _parity(records: list[Record], baseline: Record | None) -> dict[str, str]:
    """source -> verdict, for the records that are run folders of ours."""
    runs = [read_run(Path(r.source)) for r in records if r.format == "run folder"]
    of = None if baseline is None else Path(baseline.source)
    return {str(path): p.verdict for path, p in verify(runs, of).items()}


def rows(
    records: list[Record],
    convention: str = DEFAULT_CONVENTION,
    baseline: str | None = None,
    kind: str = "strong",
    window: tuple[int, int] | None = None,
    rule: str = "median",
    any_commit: bool = False,
) -> list[dict[str, Any]]:
    """One dict per record: `quality.summary`'s facts and what the table adds to them."""
    named = baseline_of(baseline, records) if baseline else None
    parity = _parity(records, named)
    times = {id(r): timed(r, window, rule) for r in records}
    beside = scaling.shared_cores(records)
    found = []
    for record in records:
        base, why = (named, "") if named else _baseline_of(record, records)
        row = _row(record, times, parity, base, convention, kind, any_commit)
        for said in (why, beside.get(record.source, "")):
            if said:
                row["notes"] = "; ".join(filter(None, (row["notes"], said)))
                row["reasons"] = [*row["reasons"], said]
        found.append(row)
    return found


def _row(
    record: Record,
    times: dict[int, Steady | None],
    parity: dict[str, str],
    baseline: Record | None,
    convention: str,
    kind: str,
    any_commit: bool,
) -> dict[str, Any]:
    time = times[id(record)]
    judgement = judge(record, time)
    row: dict[str, Any] = {
        **summary(record, time, judgement),
        "run": name_of(record),
        "origin": {k: origin for k, origin in record.origin.items() if origin != "log"},
        "step_s": time and time.step_s,
        "convention": convention,
        **dict.fromkeys(("tflops", "mfu", "speedup", "efficiency")),
        "parity": parity.get(record.source, "not verified").partition(":")[0],
    }
    row["reasons"] = row["reasons"] + [scaling.CHANGED] * scaling.is_changed(record)
    notes = judgement.reasons
    if (
        judgement.verdict == "complete"
    ):  # its notes say why there is no time, where nothing else does
        notes = judgement.flags + judgement.notes * (time is None and not judgement.unfit)
    crowded = oversubscribed(record.extra.get("facts", {}))
    notes = [
        f"oversubscribed: {crowded}" if n.startswith("oversub") and crowded else n for n in notes
    ]
    if time is not None and not judgement.unfit:
        row["tflops"] = tflops_per_gpu(record, time.step_s, convention)
        row["mfu"], why = mfu(row["tflops"], record.gpu_type, record.precision, convention)
        doubts = [why] * ("above the peak" in why)
        row["speedup"], row["efficiency"], why = _against(record, baseline, times, kind, any_commit)
        doubts += why
        notes, row["reasons"] = notes + doubts, row["reasons"] + doubts
    row["notes"] = "; ".join(notes)
    return row


def _against(
    record: Record,
    baseline: Record | None,
    times: dict[int, Steady | None],
    kind: str,
    any_commit: bool,
) -> tuple[float | None, float | None, list[str]]:
    """(speedup, efficiency, why one of them is missing) of a run against its baseline."""
    time, base = times[id(record)], baseline and times[id(baseline)]
    if baseline is None:
        return None, None, []
    if base is None:
        return None, None, [f"the baseline {name_of(baseline)} has no time"]
    if not (time.step_s > 0 and base.step_s > 0):
        return None, None, ["no time: less than one whole second"]
    if not (record.gpus and baseline.gpus):
        return None, None, ["number of GPUs unknown"]
    if why := unfinished(record):
        return None, None, [f"no speedup: {why}"]
    if why := unfinished(baseline):
        return None, None, [f"no speedup: the baseline {name_of(baseline)} is {why}"]
    unfair = scaling.differences(record, baseline, kind, any_commit)
    if unfair:
        return None, None, ["invalid comparison: " + "; ".join(unfair)]
    ratio = record.gpus / baseline.gpus
    faster, efficiency = scaling.speedup(time.step_s, record.gpus, base.step_s, baseline.gpus, kind)
    if record.oversubscribed:
        return faster, None, []
    if baseline.oversubscribed:
        return faster, None, ["the baseline is oversubscribed"]
    lowest = None
    if time.ci95 and base.ci95:
        ends = time.ci95[1], record.gpus, base.ci95[0], baseline.gpus
        lowest = scaling.speedup(*ends, kind)[1]
    why = scaling.above_linear(efficiency, ratio, lowest)
    return faster, efficiency, [why] * bool(why)


def table(
    found: list[dict[str, Any]],
    convention: str,
    baselines: list[str],
    kind: str = "strong",
    step_rule: str = describe_rule(None, "median"),
) -> Table:
    """The scaling table."""
    columns = [
        Column("run", "run"),
        Column("engine", "engine"),
        *(Column(k, k, "d") for k in ("gpus", "tp", "pp", "vpp", "dp")),
        Column("step_s", "s/iter", ".4g"),
        *beside.columns(),
        Column("tokens_per_s", "tokens/s", ".0f"),
        Column("tflops", f"TFLOP/s/GPU ({convention})", ".3g"),
        Column("printed_tflops", "printed", ".3g"),
        Column("mfu", "MFU", ".1%"),
        Column("speedup", "speedup", ".2f"),
        Column("efficiency", "efficiency", ".2f"),
        Column("parity", "parity"),
        Column("verdict", "verdict"),
        Column("notes", "notes"),
    ]
    seldom = ("printed_tflops", "mfu", "predicted_s", "predicted_error")
    empty = {k for k in seldom if all(row.get(k) is None for row in found)}
    columns = [c for c in columns if c.key not in empty]
    stated = ", ".join(baselines) or "none stated (--baseline NAME)"
    notes = [
        f"s/iter: {step_rule}. TFLOP/s: {convention} convention."
        f" Speedup: {kind} scaling against {stated}."
    ]
    return Table(columns, found, notes=notes)


def report(
    paths: list[Path],
    convention: str = DEFAULT_CONVENTION,
    baseline: str | None = None,
    predict: str | None = None,
) -> Table:
    """The table of what is at the paths, for reports; predicted beside measured on a `predict`ed
    cluster.

    Raises:
        UsageError: nothing could be read, or there is no such baseline or calibration.
    """
    records, _ = load(paths)
    named = _check_baseline(records, baseline)
    found = rows(records, convention, baseline)
    beside.fill(found, beside.seconds(records, predict), "step_s")
    shown = table(found, convention, named)
    shown.notes.extend(_unstated(records, found) + _provenance(predict, records, found))
    return shown


def _unstated(records: list[Record], found: list[dict[str, Any]]) -> list[str]:
    """What could not be compared between the runs that have a speedup, and whose code is not
    known by their commit."""
    pairs = zip(records, found, strict=True)
    compared = [record for record, row in pairs if row["speedup"] is not None]
    open_ = scaling.unstated(compared)
    return [scaling.UNSTATED + ", ".join(open_)] * bool(open_) + scaling.changed(compared)


def _check_baseline(records: list[Record], baseline: str | None) -> list[str]:
    if baseline:
        return [name_of(baseline_of(baseline, records))]
    return sorted({r.extra.get("baseline") for r in records} - {None})


def _provenance(
    cluster: str | None, records: list[Record], found: list[dict[str, Any]]
) -> list[str]:
    """What the predictions were made of and are worth, where there are any."""
    if not cluster:
        return []
    pairs = [
        (scaling.configuration(record), row["predicted_s"], row["step_s"])
        for record, row in zip(records, found, strict=True)
    ]
    return beside.notes(beside.source(cluster), pairs)


@command_line("analysis.tflops")
def main(argv: list[str] | None = None) -> int:
    """Print the scaling table of what is at the paths."""
    parser = Parser(
        prog="python -m analysis.tflops",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="log, run or folder")
    parser.add_argument("--convention", choices=tuple(CONVENTIONS), default=DEFAULT_CONVENTION)
    parser.add_argument(
        "--baseline", metavar="NAME", help="the run that speedups are against; or its path"
    )
    parser.add_argument("--scaling", choices=("strong", "weak"), default="strong")
    scaling.add_commit_flag(parser)
    add_time_flags(parser)
    add_fact_flags(parser)
    beside.add_flag(parser)
    parser.add_argument("--format", choices=FORMATS, default="text", help=FORMAT_HELP)
    arguments = parser.parse_args(argv)
    records, refused = load(arguments.paths, arguments)
    named = _check_baseline(records, arguments.baseline)
    predicted = beside.seconds(records, arguments.predict)
    for line in refused:
        warn("analysis.tflops", line)
    found = rows(
        records,
        arguments.convention,
        arguments.baseline,
        arguments.scaling,
        arguments.window,
        arguments.rule,
        arguments.any_commit,
    )
    beside.fill(found, predicted, "step_s")
    if arguments.format == "json":
        keys = [*SUMMARY, *ADDED, *(["predicted_s", "predicted_error"] * bool(arguments.predict))]
        print(json_objects([{k: row.get(k) for k in keys} for row in found]), end="")
        return 0
    step_rule = describe_rule(arguments.window, arguments.rule)
    shown = table(found, arguments.convention, named, arguments.scaling, step_rule)
    shown.notes.extend([scaling.ANY_COMMIT] * arguments.any_commit)
    shown.notes.extend(_unstated(records, found) + _provenance(arguments.predict, records, found))
    text = shown.render(arguments.format)
    print(emphasise(text) if arguments.format == "text" else text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
