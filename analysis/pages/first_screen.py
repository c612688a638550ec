"""A page's first screen: what won and by how much, whether it can be trusted, and one picture."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from analysis.common import colours
from analysis.common.table import Table
from analysis.common.terminal import counted, cut, who
from analysis.logs.naming import name_of
from analysis.logs.record import Record
from analysis.pages import charts
from analysis.pages.charts import winners
from analysis.pages.section import BAD, GOOD, IN_DOUBT, Card, Chart, FirstScreen, Study, Trust
from analysis.runs import loss_parity
from analysis.runs.advice import line_of
from analysis.runs.loss_parity import DIFFERS, EQUAL
from analysis.runs.verdict import unfinished

Row = dict[str, Any]
Rows = list[Row]
NAME = 32  # characters of a run's name in a sentence
CARDS = 8  # the smallest number of GPUs, and the largest ones


def first_screen(study: Study) -> FirstScreen:
    """Returns what the page of a study says first."""
    on_cpu = all(r.facts and not (r.facts.get("host") or {}).get("gpu") for r in study.records)
    unit = "CPU ranks" if on_cpu else "GPUs"
    rows = study.table.rows
    pairs = zip(study.records, rows, strict=True)
    ended = [row for record, row in pairs if not unfinished(record)]
    fastest = winners(rows) or _busiest(ended)
    shown = fastest if len(fastest) <= CARDS else [fastest[0], *fastest[1 - CARDS :]]
    return FirstScreen(
        _about(study, len(fastest) - len(shown), unit),
        _answer(rows, ended, study.kind, unit),
        [_card(row, unit, study.palette) for row in shown],
        _trust(study),
        _picture(study, unit),
        _bound(study, fastest),
    )


def _about(study: Study, left_out: int, unit: str) -> str:
    """Says which runs the page is of, and how many numbers of GPUs have no card."""
    names = sorted({record.study for record in study.records if record.study})
    processors = dict.fromkeys(row["gpu_type"] for row in study.table.rows if row["gpu_type"])
    baselines = dict.fromkeys(row["baseline"] for row in study.table.rows if row["baseline"])
    facts = [
        study.table.title and ", ".join(names),  # which else are the page's title
        counted(len(study.table.rows), "runs"),
        ", ".join(processors),
        baselines and f"{study.kind} scaling against {', '.join(baselines)}",
        *_work(study.table.rows),
        left_out and f"{left_out} more numbers of {unit} in the picture",
    ]
    return " · ".join(fact for fact in facts if fact)


def _work(rows: Rows) -> list[str]:
    """Returns the model's size and the batch, where all runs have the same."""
    sizes = {row["params"] for row in rows}
    batches = {(row["global_batch"], row["seq_len"]) for row in rows}
    words = []
    if len(sizes) == 1 and (params := sizes.pop()):
        size = f"{params / 1e9:.3g}B" if params >= 1e9 else f"{params / 1e6:.3g}M"
        words.append(f"{size} parameters")
    if len(batches) == 1 and None not in (batch := batches.pop()):
        words.append("{} x {} tokens a step".format(*batch))
    return words


def _answer(rows: Rows, ended: Rows, kind: str, unit: str) -> str:
    """Says which run won and by how much, or why none did. `ended`: the rows of runs that did not
    fail; `unit`: CPU ranks or GPUs."""
    best = [row for row in winners(rows) if not row["is_baseline"]]
    if best:
        first = max(best, key=lambda row: row["speedup"])
        most = "Fastest" if kind == "strong" else "Most work in the same time"
        place = f"{first['baseline']}'s speed on {counted(first['gpus'], unit)}"
        return f"{most}: {first['run']}, {first['speedup']:.2f} times {place}."
    if rows and not ended:
        verdicts = Counter(row["verdict"] for row in rows)
        why = ", ".join(f"{n} x {verdict}" for verdict, n in verdicts.most_common())
        return f"No run ended well, so nothing is compared: {why}."
    timed = [row for row in ended if row["tokens_per_s"]]
    if not timed:
        return "No run has a time, so nothing is compared."
    if slower := [row for row in rows if row["speedup"] and not row["is_baseline"]]:
        second = max(slower, key=lambda row: row["speedup"])
        next_best = f"the next is {second['run']}, speedup {second['speedup']:.2f}"
        return f"No run is faster than the baseline, {second['baseline']}: {next_best}."
    most = max(timed, key=lambda row: row["tokens_per_s"])
    return (
        "No run has a speedup against a baseline (--baseline NAME)."
        f" {most['run']} has the most tokens/s: {most['tokens_per_s']:.0f}"
        f" on {counted(most['gpus'] or '-', unit)}."
    )


def _bound(study: Study, fastest: Rows) -> str:
    """Says what bounds the run with the most tokens/s, and which other run may be faster."""
    if not fastest:
        return ""
    first = max(fastest, key=lambda row: row["tokens_per_s"] or 0)
    rows = zip(study.records, study.table.rows, strict=True)
    record = next(record for record, row in rows if row is first)
    return line_of(record, study.predict)


def _busiest(rows: Rows) -> Rows:
    """Returns the row with the most tokens/s at each number of GPUs, where no row has a ratio."""
    timed = sorted((row for row in rows if row["tokens_per_s"]), key=lambda r: -r["tokens_per_s"])
    best = {row["gpus"]: row for row in reversed(timed) if row["gpus"]}
    return [best[gpus] for gpus in sorted(best)]


def _card(row: Row, unit: str, palette: dict[str, str]) -> Card:
    """Returns the card of the fastest run on a number of GPUs."""
    words = []
    if row["efficiency"] is not None:
        doubt = ", in doubt: above 1" if row["doubtful"].get("efficiency") else ""
        words.append(f"efficiency {row['efficiency']:.2f}{doubt}")
    elif row["speedup"] is not None:
        words.append(f"no efficiency: {row['missing'].get('efficiency', 'not known')}")
    if row["speedup_ci95"]:
        words.append("speedup {:.2f} to {:.2f} (95 %)".format(*row["speedup_ci95"]))
    elif row["steady_ci95"]:
        words.append("{:.4g} to {:.4g} s/iter (95 %)".format(*row["steady_ci95"]))
    elif row["step_s"]:
        words.append(f"{row['step_s']:.4g} s/iter, interval not known")
    if row["speedup"] is None:
        figure = f"{row['tokens_per_s']:.0f} tokens/s"
    else:
        figure = "baseline" if row["is_baseline"] else f"{row['speedup']:.2f}×"
    return Card(
        counted(row["gpus"], unit),
        row["run"],
        figure,
        words,
        palette[colours.label(row["engine"])],
        is_muted=row["unsure"] or (row["speedup"] or 1) < 1,
    )


def _trust(study: Study) -> Trust:
    """Returns whether the losses are equal, how many runs count, and what is in doubt."""
    rows = study.table.rows
    verdicts = list(loss_parity.verify(study.records, study.base).values())
    kinds = Counter(verdict.verdict.kind for verdict in verdicts)
    doubts = _doubts(study.table, study.refused)
    state = BAD if kinds[DIFFERS] else GOOD if kinds[EQUAL] else IN_DOUBT
    if not verdicts:
        headline = "Losses not compared"
    elif kinds[DIFFERS]:
        headline = f"Losses differ in {kinds[DIFFERS]} of {counted(len(verdicts), 'runs')}"
    else:
        headline = f"Losses equal in {kinds[EQUAL]} of {counted(len(verdicts), 'runs')}"
    complete = [row for row in rows if row["fit"] and row["verdict"] == "complete"]
    complete_runs = f"{len(complete)} of {counted(len(rows), 'runs')} complete and timed"
    words = [_losses(verdicts, study.base), complete_runs, *_doubts_of_fastest(rows)]
    return Trust(state, headline, words, doubts)


def _doubts_of_fastest(rows: Rows) -> list[str]:
    """Says what is in doubt about the fastest run and its baseline; nothing where no run won."""
    best = [row for row in winners(rows) if not row["is_baseline"]]
    if not best:
        return []
    first = max(best, key=lambda row: row["speedup"])
    base = next((row for row in rows if row["run"] == first["baseline"]), first)
    notes = [f"{row['run']}: {row['notes']}" for row in (first, base) if row["notes"]]
    return [f"in doubt about the fastest: {'; '.join(dict.fromkeys(notes)) or 'nothing'}"]


def _losses(verdicts: list[loss_parity.Parity], base: Record | None) -> str:
    """Says beside which run the losses are judged, and how large the largest difference is."""
    if not verdicts:
        return "only run folders of this repository are; analysis.parity compares two logs"
    whose = f"beside {name_of(base)}" if base else "beside the baseline"
    compared = [verdict for verdict in verdicts if verdict.max_loss_diff is not None]
    if not compared:
        return f"{whose}: no step could be compared"
    worst = max(compared, key=lambda verdict: verdict.max_loss_diff)
    largest = f"largest difference {worst.max_loss_diff:.1e} ({cut(worst.run, NAME)})"
    return f"{whose} at every step: {largest}, the bar is {loss_parity.LOSS_BAR:g}"


def _doubts(table: Table, refused: list[str]) -> list[str]:
    """Returns the doubts that the table prints: its own, and those of rows with their runs, the
    most frequent first."""
    reasons: dict[str, list[str]] = {}
    for row in table.rows:
        notes = row["notes"].split("; ") if row["notes"] else []
        notes = [re.sub(r"^line \d+: ", f"{row['verdict']}: ", note) for note in notes]
        for note in dict.fromkeys(note.partition(":")[0] for note in notes):
            reasons.setdefault(note, []).append(row["run"])
    common = sorted(reasons.items(), key=lambda item: -len(item[1]))
    doubts = list(table.doubts)
    doubts += [f"{reason}: {_names(names, len(table.rows))}" for reason, names in common]
    if refused:
        doubts.append(f"{counted(len(refused), 'files')} could not be read")
    return doubts


def _names(names: Iterable[str], total: int) -> str:
    return who([cut(name, NAME) for name in names], total)


def _picture(study: Study, unit: str) -> Chart | None:
    """Returns the picture that answers the question: the ratio against GPUs, else one bar a run,
    else TFLOP/s; None where nothing can be drawn."""
    rows = study.table.rows
    drawn = charts.scaling(rows, study.kind, study.palette, unit) or charts.tflops(
        rows, study.palette
    )
    return next(iter(drawn.values()), None)
