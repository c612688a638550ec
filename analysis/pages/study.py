"""The views of runs and logs: verdict, run table, scaling, prediction, memory, provenance."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from analysis.common.tables import Column, Table
from analysis.logs.load import name_of
from analysis.logs.record import Record
from analysis.measured import predictions, tflops
from analysis.measured.fairness import is_changed, scaling_of
from analysis.pages import audit, charts, costs, layout_map, memory
from analysis.pages.section import Chart, Section, group
from analysis.published.audit_logs import audit_records
from models.errors import printable
from models.files import read_toml

# Layout columns that the page has beside those of analysis.tflops, before its column s/iter.
_LAYOUT = (
    Column("n_micro", "micro-batches", "d", seldom=True),
    Column("global_batch", "global batch", "d", seldom=True),
    Column("seq_len", "seq", "d", seldom=True),
    Column("zero_stage", "ZeRO", "d", seldom=True),
    Column("recompute", "recompute", seldom=True),
    Column("precision", "precision", seldom=True),
)
_SPREAD = (
    Column("ci_low_s", "95 % from", ".4g", seldom=True),
    Column("ci_high_s", "to", ".4g", seldom=True),
)


def run_table(records: list[Record], found: Table) -> Table:
    """The table of `analysis.tflops` with every layout column and the interval of s/iter."""
    rows = []
    for record, row in zip(records, found.rows, strict=True):
        layout = {c.key: getattr(record, c.key) for c in _LAYOUT}
        low, high = row["steady_ci95"] or (None, None)
        rows.append(row | layout | {"ci_low_s": low, "ci_high_s": high})
    columns: list[Column] = []
    for column in found.columns:
        columns += _LAYOUT if column.key == "step_s" else ()
        columns.append(replace(column, heading="GPUs") if column.key == "gpus" else column)
        columns += _SPREAD if column.key == "step_s" else ()
    return replace(found, columns=columns, rows=rows)


def engines_of(rows: list[dict[str, Any]]) -> list[str]:
    """The engines of rows, in the order in which they first stand there."""
    return list(dict.fromkeys(row["engine"] or "unknown" for row in rows))


# What the first lines say, and how to give what no run states; "" where nothing can.
_NOT_GIVEN = {
    "Question": "--question TEXT, or `question` in the study's file",
    "Study": "",
    "Baseline": "--baseline NAME",
    "Convention": "",
    "Machine": "--gpu-type NAME",
    "Versions": "",
    "Commit": "",
}


def verdict(
    records: list[Record], refused: list[str], found: Table, kind: str, question: str, named: str
) -> Section:
    """What was asked, against what, where, and which runs count.

    kind: of scaling. question, named: the question and the baseline that were given; "" for none.
    """
    used = _all(row["convention"] for row in found.rows if row["tflops"] is not None)
    packages = ("torch", "deepspeed", "megatron-core", "nccl")
    versions = [
        f"{key} {of}" for key in packages if (of := _all(_version(r, key) for r in records))
    ]
    hosts = [r.facts.get("host") or {} for r in records]
    said = {
        "Question": printable(question or " / ".join(_questions(records))),
        "Study": _all(r.study for r in records),
        "Baseline": printable(named) or _all(r.baseline for r in records),
        "Convention": f"TFLOP/s by {used}, {kind} scaling" if used else f"{kind} scaling",
        "Machine": _all([*(r.gpu_type for r in records), *(h.get("cpu") for h in hosts)]),
        "Versions": ", ".join(versions),
        "Commit": _all(r.commit and r.commit[:12] + " (changed)" * is_changed(r) for r in records),
    }
    one = Section("Verdict")
    for name, how in _NOT_GIVEN.items():
        lacking = f"- (no run states it{f'; give it with {how}' if how else ''})"
        one.words.append(f"{name}: {said[name] or lacking}")
    counts = Counter(row["verdict"] for row in found.rows)
    fit = sum(bool(row["fit"]) and row["verdict"] == "complete" for row in found.rows)
    each = ", ".join(f"{n} {name}" for name, n in counts.most_common())
    one.words.append(
        f"{len(found.rows)} runs: {each}. {fit} of them are complete and have a step time."
    )
    columns = [Column("run", "run"), Column("verdict", "verdict"), Column("why", "why")]
    out = [row for row in found.rows if not row["fit"] or row["verdict"] != "complete"]
    rows = [{"run": r["run"], "verdict": r["verdict"], "why": _why(r)} for r in out]
    rows += [{"run": None, "verdict": "not read", "why": line} for line in refused]
    if rows:
        one.tables["out"] = Table(columns, rows, "Runs that do not count, and why")
    return one


def _version(record: Record, package: str) -> str | None:
    """A package's version; run.json has NCCL's among the facts of the host."""
    room = record.facts.get("host" if package == "nccl" else "versions") or {}
    return room.get(package)


def _questions(records: list[Record]) -> list[str]:
    """The questions of the studies: of the file that a job kept beside its run, else of the one
    that the run's command line names, where it is still there under the study's name."""
    files: dict[Path, None] = {}
    for record in records:
        words = str(record.facts.get("command_line") or "").split()
        named = [Path(b) for a, b in pairwise(words) if a == "--study"]
        kept = sorted(Path(record.source).glob("*.study.toml")) if record.facts else []
        files |= dict.fromkeys(kept[-1:] or [p for p in named if p.stem == record.study])
    found = [read_toml(path, "study").get("question") for path in files if path.is_file()]
    return list(dict.fromkeys(str(one) for one in found if one))


def _why(row: dict[str, Any]) -> str | None:
    return row["notes"] or row["missing"].get("speedup") or row["missing"].get("step_s")


def _all(values: Any) -> str:
    return printable(", ".join(map(str, dict.fromkeys(v for v in values if v))))


def scaling(rows: list[dict[str, Any]], kind: str) -> Section:
    """Speedup and efficiency against GPUs of rows of `tflops.rows`, strong or weak."""
    one = Section(f"Speedup and efficiency, {kind} scaling")
    sizes = [row["gpus"] for row in rows if row["speedup"] is not None]
    if len(set(sizes)) < 2:
        return one
    data = []
    for row in rows:
        point = {k: row[k] for k in ("run", "gpus", "speedup", "efficiency", "verdict")}
        point |= {"engine": row["engine"] or "unknown", "precision": row.get("precision")}
        low, high = row["steady_ci95"] or (None, None)
        for key in ("speedup", "efficiency"):
            point[f"{key}_why"] = row["missing"].get(key)
            bounds = row[key] is not None and low
            point[f"{key}_low"] = row[key] * row["step_s"] / high if bounds else None
            point[f"{key}_high"] = row[key] * row["step_s"] / low if bounds else None
        data.append(point)
    one.data[kind] = [group(data)]
    ends = [min(sizes), max(sizes)]
    # efficiency = speedup / (gpus / the baseline's): strong and weak alike
    both = [p for p in data if p["speedup"] and p["efficiency"]]
    starts = sorted({round(p["gpus"] * p["efficiency"] / p["speedup"]) for p in both})
    for key in ("speedup", "efficiency"):
        if any(p[key] is not None for p in data):
            spec = charts.against_gpus(key, key, data, ends, starts)
            one.charts.append(Chart(spec, kind, _said(data, key, ends, starts)))
    return one


def _said(data: list[dict[str, Any]], key: str, ends: list[float], starts: list[int]) -> str:
    """A chart of `against_gpus` in words."""
    known = [p for p in data if p[key] is not None]
    best = max(known, key=lambda p: p[key])
    ideal = "The dashed line is ideal."
    if key == "speedup" and len(starts) > 1:
        own = ", ".join(map(str, starts))
        ideal = f"Each dashed line is ideal for a baseline on one number of GPUs: {own}."
    said = (
        f"{len(known)} runs on {ends[0]:g} to {ends[1]:g} GPUs. The highest {key} is"
        f" {best[key]:.2f}, of {best['run']} on {_gpus(best['gpus'])}. A bar is the run's own 95 %"
        f" interval of its median step. {ideal}"
    )
    if crosses := len(data) - len(known):
        said += f" Without {key}: {crosses}, each a cross on the axis that tells why."
    return said


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count != 1)}"


def predicted(found: Table, shown: str) -> Section:
    """Predicted against measured seconds, and the error of each run."""
    one = Section("Predicted against measured")
    pairs = [r for r in found.rows if r.get("predicted_s") and r["step_s"]]
    if not pairs:
        return one
    titles = ["measured s/iter", "predicted s/iter"]
    colour = charts.by_engine(engines_of(found.rows))
    spec = charts.beside("step_s", "predicted_s", titles, colour, pairs, "run")
    worst = max(pairs, key=lambda r: abs(r["predicted_error"]))
    said = (
        f"{len(pairs)} runs. The largest error is {worst['predicted_error']:+.1%}, of"
        f" {worst['run']}. On the dashed line both are equal."
    )
    one.charts.append(Chart(spec, shown, said))
    columns = [Column("run", "run"), Column("step_s", "measured s/iter", ".4g")]
    one.tables["predicted"] = Table([*columns, *predictions.columns()], pairs)
    return one


def provenance(records: list[Record]) -> Section:
    """Where each run stands, what read it, and which facts its log does not say itself."""
    columns = [
        Column("run", "run"),
        Column("source", "source"),
        Column("format", "format"),
        Column("commit", "commit"),
        Column("started", "started", seldom=True),
        Column("ended", "ended", seldom=True),
        Column("origin", "facts from elsewhere than the log"),
    ]
    rows = []
    for record in records:
        from_elsewhere: dict[str, list[str]] = {}
        for name, origin in record.origin.items():
            if origin not in ("log", "run.json"):
                from_elsewhere.setdefault(origin, []).append(name)
        said = "; ".join(f"{where}: {', '.join(n)}" for where, n in from_elsewhere.items())
        rows.append(
            {
                "run": name_of(record),
                "source": record.source,
                "format": record.format,
                "commit": record.commit and record.commit[:12],
                "started": record.facts.get("started_utc"),
                "ended": record.ended_utc,
                "origin": said or None,
            }
        )
    return Section("Provenance", tables={"provenance": Table(columns, rows)})


def of_records(
    records: list[Record],
    refused: list[str],
    convention: str | None,
    baseline: str | None,
    kind: str | None,
    any_commit: bool,
    predict: str | None,
    question: str = "",
) -> tuple[list[Section], list[Section]]:
    """(the first views of runs, the last ones); the views of steps and ranks stand between.

    Raises:
        UsageError: there is no such baseline or calibration.
    """
    kind = kind or scaling_of(records)
    settings = {"any_commit": any_commit, "predict": predict}
    found = tflops.of_records(records, convention, baseline, kind, **settings)
    shown = run_table(records, found)
    other = "weak" if kind == "strong" else "strong"
    others = tflops.rows(records, convention, baseline, other, any_commit=any_commit)
    first = [
        verdict(records, refused, found, kind, question, baseline or ""),
        Section("Runs", tables={"runs": shown}),
        layout_map.view("runs", shown, charts.by_engine(engines_of(found.rows))),
        scaling(shown.rows, kind),
        scaling(run_table(records, replace(found, rows=others)).rows, other),
        predicted(shown, "runs"),
    ]
    row_of = {record.source: i for i, record in reversed(list(enumerate(records)))}
    findings = audit_records(records)
    last = [
        memory.view(records, found.rows),
        costs.view(records),
        audit.view("Audit", findings, [], "runs", shown, lambda f: row_of.get(f.file)),
        provenance(records),
    ]
    return first, last
