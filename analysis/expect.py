"""What should I get? A run beside what is predicted for it and what others published.

    python -m analysis.expect PATH [--cluster NAME|FILE] [--zero-stage 1 --recompute none ...]
    python -m analysis.expect --preset llama3-8b --gpu-type "H100 SXM" --gpus 64 --tp 2
        --micro-batch 1 --global-batch 128 --seq-len 8192

PATH is a run folder or a log of any program. Without PATH the flags describe the run, with the
defaults of parallel.train. The first table has the run, its predicted time (low to high is the 80 %
interval; by --cluster, else by the data sheet of --gpu-type), and the nearest published rows, one
for each table, model, card and number of GPUs, with every setting that differs. All TFLOP/s are
counted by one convention. A line says if the sizes are of another model than --preset, --params or
the log claims. If the run is slower than the interval (or, without one, than the rows), a second
table lists what it waited for, and what differs from faster rows, by gain.
"""

import math
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from analysis.common.table import Column, Table, add_table_flags, axis_columns, show
from analysis.logs.fact_options import add_fact_options, facts_of
from analysis.logs.facts import MODEL
from analysis.logs.load import load
from analysis.logs.model import SAME_MODEL, asked, config_of
from analysis.logs.naming import name_of
from analysis.logs.parsing.model_names import read_name
from analysis.logs.parsing.setting_names import state
from analysis.logs.record import Record
from analysis.planner import ranking
from analysis.planner.calibration import Calibration
from analysis.planner.runs import ASSUMED, absent, assumed, cluster_of, priced
from analysis.planner.space import engine_of, pipelines
from analysis.published.published_runs import read_published
from analysis.runs import rank_times, run_table
from analysis.runs.denominators import denominator
from analysis.runs.fairness import changes
from analysis.runs.judged import judged
from analysis.runs.run_options import unheeded
from base.bounds import check_flags
from base.errors import Answer, Parser, UsageError, command_line, warn
from base.files import ROOT
from models.config import name_of as preset_of
from models.config import preset
from models.gpus import peak_tflops, usual_gpu
from parallel.config.layout import EXPERT_AXES, SET_AXES, Ends
from parallel.config.run_spec import DEFAULTS
from parallel.measure.training_metrics import data_share

FLAGS = "flags"  # the source of a run that is not measured
# How far what differs puts a row from a run: each doubling of a number, or another word.
FAR = {"experts": 8.0, "params": 2.0, "gpu_type": 2.0, "precision": 2.0, "seq_len": 1.0}
FAR |= {"active": 1.0, "gpus": 0.5, "recompute": 0.5, "tp": 0.5, "pp": 0.5, "cp": 0.5}
FAR |= dict.fromkeys(("vpp", "ep", "etp", "micro_batch", "global_batch"), 0.25)
FAR |= dict.fromkeys(("zero_stage", "sequence_parallel", "engine"), 0.25)
# Taken over from a row together.
SPLIT = (*SET_AXES, *EXPERT_AXES, "zero_stage", "sequence_parallel")
SIZE = ("params", "active")


def flagged_run(facts: dict[str, Any], preset_name: str | None) -> Record:
    """Returns the run that flags describe. What they leave out is as in parallel.train, and the
    engine, the vocabulary's padding and the stages of an uneven pipeline as in analysis.plan."""
    record = Record(FLAGS, FLAGS)
    if preset_name:
        sizes = preset(preset_name, **{name: facts[name] for name in MODEL if name in facts})
        record.model, record.seq_len = sizes.as_dict(), facts.get("seq_len", sizes.max_seq_len)
    state(record, facts, "flag")
    for name in (*SPLIT, "recompute", "micro_batch"):
        if getattr(record, name) is None:
            setattr(record, name, DEFAULTS[name])
    record.engine = record.engine or engine_of(record.zero_stage, False)
    if config := config_of(record).value:
        record.facts["model"] = {"padded_vocab": config.padded_vocab(record.tp)}
        for vpp, *ends in pipelines(config).get(record.pp, ()):
            if any(ends) and vpp == record.vpp:
                record.facts["layout"] = Ends(*ends).settings(vpp)
    return record


def prediction(record: Record, cluster: Answer[Calibration]) -> Answer[dict[str, Any]]:
    """Returns the run's row in a plan; without one, which facts are absent."""
    if cluster.value:
        return priced(record, cluster.value)
    names = absent(record)
    return Answer(None, "; ".join(filter(None, [cluster.reason, names and asked(names)])))


def _size(record: Record) -> dict[str, Any]:
    """Returns whether the model has experts, its parameters, and of experts those that a token
    meets."""
    config = config_of(replace(record, params=None)).value
    experts = bool(record.model.get("experts"))
    return {
        "experts": experts,
        "params": config.n_params if config else record.params,
        "active": config.n_active if config and experts else None,
    }


def differing(record: Record, row: Record) -> dict[str, tuple[Any, Any]]:
    """Returns {name: (value of the run, value of the row)} of the facts that both state and that
    differ."""
    pairs = changes(record, row, settings=False)
    pairs = {name: pair for name, pair in pairs.items() if name in FAR or name in SPLIT}
    row_size, card = _size(row), usual_gpu(record.gpu_type or "")
    pairs |= {name: (value, row_size[name]) for name, value in _size(record).items()}
    pairs["gpu_type"] = card and card.name, row.gpu_type
    pairs = {k: pair for k, pair in pairs.items() if None not in pair and pair[0] != pair[1]}
    near = [k for k in SIZE if k in pairs and abs(pairs[k][0] / pairs[k][1] - 1) <= SAME_MODEL]
    return {k: pair for k, pair in pairs.items() if k not in near}


def distance(pairs: dict[str, tuple[Any, Any]]) -> float:
    """Returns how far a row is by what differs: doublings, weighed by FAR; another card counts one
    more."""
    total = 1.0 if "gpu_type" in pairs else 0.0
    for name, pair in pairs.items():
        if name == "gpu_type":
            pair = tuple(peak_tflops(card, "fp16") for card in pair)
        words = any(isinstance(value, str) for value in pair) or not all(pair)
        total += FAR.get(name, 0.0) * (1 if words else abs(math.log2(pair[0] / pair[1])))
    return total


@cache
def _published() -> list[Record]:
    """Returns the rows of logs/published whose models are of a known size."""
    rows = read_published(sorted((ROOT / "logs" / "published").glob("*.csv"))).content
    return [row for row in rows if _size(row)["params"]]


def nearest(record: Record, count: int) -> list[Record]:
    """Returns the nearest published rows, one of each table, model, card and number of GPUs."""
    rows = sorted(_published(), key=lambda row: distance(differing(record, row)))
    kinds: dict[tuple, Record] = {}
    for row in rows:
        kinds.setdefault((row.source.rpartition("-")[0], row.params, row.gpu_type, row.gpus), row)
    return list(kinds.values())[:count]


def _text(name: str, value: Any) -> str:
    """Returns a fact in words; sizes are in billions."""
    return f"{name} {value / 1e9:.4g}B" if name in SIZE else f"{name} {value}"


def expected(record: Record, runs: list[Record], notes: list[str]) -> Table:
    """Returns a row for each run, measured or published, beside `record`."""
    rows = run_table.rows(runs)
    for run, row in zip(runs, rows, strict=True):
        row["tokens_per_s_gpu"] = (row["tokens_per_s"] or 0) / (run.gpus or math.inf) or None
        row["params_b"] = (_size(run)["params"] or 0) / 1e9 or None
        if run is not record:
            pairs = differing(record, run)
            names = sorted(pairs, key=lambda name: -distance({name: pairs[name]}))
            row["differs"] = ", ".join(_text(name, pairs[name][1]) for name in names)
            row |= {"published": run.notes[0], "distance": distance(pairs)}
            del row["missing"]["step_s"]  # which counts for one global batch alone
    columns = [
        Column("run", "run"),
        Column("params_b", "B parameters", ".4g"),
        Column("gpu_type", "card"),
        Column("gpus", "gpus", "d"),
        *axis_columns(rows),
        Column("micro_batch", "micro_batch", "d"),
        Column("seq_len", "sequence length", "d"),
        Column("precision", "precision"),
        Column("step_s", "s/iter", "#.4g", seldom=True),
        Column("low_s", "low", "#.4g", seldom=True),
        Column("high_s", "high", "#.4g", seldom=True),
        Column("tokens_per_s_gpu", "tokens/s/GPU", ".0f"),
        Column("tflops", "TFLOP/s/GPU", ".4g"),
        Column("mfu", "MFU", ".1%"),
        Column("distance", "distance", ".2f", seldom=True),
        Column("differs", "differs in", seldom=True, long="below"),
        Column("published", "published in", seldom=True, long="below"),
    ]
    return Table(columns, rows, "expected", notes)


def waits(record: Record) -> dict[str, float]:
    """Returns the share of a step that a run of ours waited for each cause, by its breakdown or its
    own clock."""
    if record.own is None:
        return {}
    if breakdown := rank_times.of_record(record).content:
        parts = breakdown.parts | {"data": breakdown.mean("data_s")}
        return {k: s / breakdown.step_s for k, s in parts.items() if k not in ("compute", "other")}
    return {"data": data_share(record.own.metrics) or 0.0}


class Cause(NamedTuple):
    """Why a run may be slower than another: what is so in each, in words, the source of the other,
    and the share that the run would win, None where no formula gives it."""

    cause: str
    here: str
    there: str | None
    run: str
    gain: float | None

    @property
    def order(self) -> tuple[bool, float]:
        """Returns the sort key: the largest gain first, then by distance those without one."""
        return self.gain is None, -(self.gain or FAR.get(self.cause, 0.0))


def _difference(
    cause: str,
    pairs: dict[str, tuple[Any, Any]],
    record: Record,
    row: Record,
    cluster: Answer[Calibration],
) -> Cause:
    """Returns a cause whose settings differ, `pairs`, with the gain that is predicted for the run
    if it had the row's values. Where none can be predicted it has no gain."""
    ours, theirs = (", ".join(_text(k, pair[i]) for k, pair in pairs.items()) for i in (0, 1))
    if cause in (*SIZE, "experts", "gpu_type"):  # no setting of this run
        return Cause(cause, ours, theirs, row.source, None)
    values = {name: pair[1] for name, pair in pairs.items()} | {"dp": None}
    predicted = prediction(record, cluster).value
    changed = prediction(replace(record, **values), cluster).value
    if not predicted or not changed or changed["tflops"] == predicted["tflops"]:
        return Cause(cause, ours, theirs, row.source, None)
    theirs += "" if changed["fits"] else " (would not fit, as predicted)"
    return Cause(cause, ours, theirs, row.source, changed["tflops"] / predicted["tflops"] - 1)


def causes(record: Record, faster: list[Record], cluster: Answer[Calibration]) -> Table:
    """Returns what the run waited for, and what differs from the nearest faster row that differs
    in it."""
    shares = {name: share for name, share in waits(record).items() if 0.001 < share < 1}
    by_cause = {
        f"waits: {k}": Cause(
            f"waits: {k}", f"{share:.1%} of a step", None, name_of(record), share / (1 - share)
        )
        for k, share in shares.items()
    }
    for row in faster:
        pairs = differing(record, row)
        groups = {name: {name: pair} for name, pair in pairs.items() if name not in SPLIT}
        if split := {name: pairs[name] for name in SPLIT if name in pairs}:
            groups["split"] = split
        for name, group in groups.items():
            if name not in by_cause:
                by_cause[name] = _difference(name, group, record, row, cluster)
    columns = [Column(key, key) for key in ("cause", "here", "there")]
    columns += [Column("gain", "gain", "+.1%"), Column("run", "run")]
    rows = [cause._asdict() for cause in sorted(by_cause.values(), key=lambda cause: cause.order)]
    note = "gain: in TFLOP/s per GPU, as predicted with the row's value; of a wait, at most; -: no"
    note += " formula prices it, or the run cannot be split so"
    return Table(columns, rows, "why it is slower", [note])


def _claim_notes(record: Record, claimed: str | None) -> list[str]:
    """Returns what contradicts the preset that the run is said to train, or the log's own words."""
    config, reason = config_of(record)
    notes = [f"another model than is claimed: {reason}"] if "are stated" in reason else []
    if config and claimed and preset_of(config, claimed) != claimed:
        sizes = f"{config.n_params:,} parameters, not {preset(claimed).n_params:,}"
        notes.append(f"another model than {claimed}: {sizes}")
    return notes


def report(
    record: Record, cluster: Answer[Calibration], claimed: str | None, count: int
) -> list[Table]:
    """Returns the tables of one run: expected speeds and, if it is slow, causes. `claimed` is the
    preset that it is said to train, `count` the number of published rows beside it."""
    notes = [f"in doubt: {words}" for words in judged([record])[0].time_doubts]
    notes += _claim_notes(record, claimed)
    if printed := denominator(record):
        notes.append(printed.text)
    (forecast, reason), rows = prediction(record, cluster), nearest(record, count)
    needed = (cluster.value, config_of(record).value, record.gpus, record.global_batch)
    if record.source == FLAGS and not all((*needed, record.seq_len)):
        raise UsageError(reason.replace("the log does", "the flags do"))
    if record.gpu_type and not usual_gpu(record.gpu_type):
        notes, rows = [*notes, f"no published row is of {record.gpu_type}"], []
    elif not _size(record)["params"]:
        notes, rows = [*notes, "no published row is near a model of unknown size (--params)"], []
    measured = [] if record.source == FLAGS else [record]
    table = expected(record, measured + rows, notes)
    own_row, other_rows = (table.rows[0] if measured else {}), table.rows[len(measured) :]
    if forecast:
        predicted = {
            "run": "predicted",
            "gpu_type": cluster.value.gpu,
            "seq_len": record.seq_len,
            "precision": record.precision,
            **forecast,
            "tokens_per_s_gpu": forecast["tokens_per_s"] / record.gpus,
            "params_b": config_of(record).value.n_params / 1e9,
        }
        table.rows.insert(len(measured), predicted)
        notes.append(f"predicted by {cluster.value.name} ({cluster.value.source})")
        notes += cluster.value.processor_note([record.gpu_type])
        notes += [ASSUMED] if assumed(record) else []
        notes += ranking.width_note([predicted], cluster.value)
        notes += cluster.value.network_note(record.gpus)
    else:
        notes.append(f"no prediction: {reason}")
    key, step_s = "mfu" if own_row.get("mfu") else "tflops", own_row.get("step_s")
    speed, speeds = own_row.get(key), [row[key] or 0 for row in other_rows]
    faster = [row for row, rate in zip(rows, speeds, strict=True) if speed and speed < rate]
    if step_s and (step_s > forecast["high_s"] if forecast else faster):
        return [table, causes(record, faster, cluster)]
    return [table]


@command_line("analysis.expect")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m analysis.expect", description=__doc__)
    add = parser.add_argument
    add("path", nargs="?", type=Path, metavar="PATH", help="run folder or log (default: the flags)")
    add("--preset", metavar="NAME", help="the model that the run trains, or is said to train")
    add("--cluster", metavar="NAME|FILE", help="a calibration or a cluster of clusters.toml")
    add("--top", type=int, default=5, metavar="N", help="published rows (default: 5)")
    ranking.add_network_flag(parser)
    add_fact_options(parser)
    add_table_flags(parser)
    arguments = parser.parse_args(argv)
    check_flags(arguments, top=(1, 1000))
    facts, claimed = facts_of(arguments), arguments.preset
    if claimed:
        preset(claimed)  # refuses one that is not known
    if arguments.path:
        records, left_out = load([arguments.path], facts)
        for line in left_out + unheeded(records, facts):
            warn("analysis.expect", line)
        if len(records) > 1:
            names = ", ".join(map(name_of, records[:3]))
            raise UsageError(f"{arguments.path} has {len(records)} runs: name one ({names} ...)")
        record = records[0]
        if claimed:
            read_name(record, claimed)
    else:
        record = flagged_run(facts, claimed)
    cluster = cluster_of(record, arguments.cluster)
    if cluster.value:
        gpus = record.gpus or math.inf
        cluster = cluster._replace(value=cluster.value.on_network(arguments.network, gpus))
    if record.source == FLAGS and cluster.value:
        record.precision = record.precision or cluster.value.precision(None)
    show(report(record, cluster, claimed, arguments.top), arguments.format, arguments.columns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
