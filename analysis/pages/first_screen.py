"""The words of a page's first screen: what won, whether it can be trusted, and what is in doubt."""

import re
from collections import Counter
from typing import Any

from analysis.common.table import Table
from analysis.common.terminal import cut, who
from analysis.logs.naming import name_of
from analysis.logs.record import Record
from analysis.pages.charts import winners
from analysis.pages.section import Study
from analysis.runs import loss_parity

Rows = list[dict[str, Any]]
NAME = 32  # characters of a run's name in a sentence
FEW = 3  # kinds of doubts of single rows that are named


def sentences(study: Study) -> list[str]:
    """Returns the study's question, what won and by how much, whether the losses are equal, and
    what is doubtful."""
    on_cpu = all(r.facts and not (r.facts.get("host") or {}).get("gpu") for r in study.records)
    return [
        *filter(None, [study.table.title]),
        _fastest(study.table.rows, study.kind, "CPU ranks" if on_cpu else "GPUs"),
        _losses(study.records, study.base),
        _doubts(study.table, study.refused),
    ]


def _fastest(rows: Rows, kind: str, unit: str) -> str:
    """Says which run won at each number of GPUs, or why none did; `unit`: ranks or GPUs."""
    best = [row for row in winners(rows) if not row["is_baseline"]]
    if not best:
        timed = [row for row in rows if row["tokens_per_s"]]
        if not timed:
            return "No run has a time, so nothing is compared."
        if slower := [row for row in rows if row["speedup"] and not row["is_baseline"]]:
            second = max(slower, key=lambda row: row["speedup"])
            next_best = f"the next is {second['run']}, {_ratio(second)}"
            return f"No run is faster than the baseline, {second['baseline']}: {next_best}."
        most = max(timed, key=lambda row: row["tokens_per_s"])
        return (
            f"No run has a speedup against a baseline. {most['run']} has the most tokens/s:"
            f" {most['tokens_per_s']:.0f} on {_counted(most['gpus'] or '-', unit)}."
        )
    named = best if len(best) <= 4 else [best[0], best[len(best) // 2], best[-1]]
    texts = "; ".join(
        f"on {_counted(row['gpus'], unit)} {row['run']}, {_ratio(row)}" for row in named
    )
    baselines = " / ".join(dict.fromkeys(row["baseline"] for row in best))
    return f"Fastest ({kind} scaling against {baselines}): {texts}."


def _counted(count: int | str, plural: str) -> str:
    """Returns the count and its noun: 1 file, 2 files."""
    return f"{count} {plural.removesuffix('s') if count == 1 else plural}"


def _ratio(row: dict[str, Any]) -> str:
    """Returns a row's speedup and efficiency in words."""
    efficiency = row["efficiency"]
    share = f"efficiency {efficiency:.2f}" if efficiency is not None else "efficiency withheld"
    if row["doubtful"]:
        share += " (doubtful: above 1)"
    return f"speedup {row['speedup']:.2f}, {share}"


def _losses(records: list[Record], base: Record | None) -> str:
    """Says how many runs have the losses of their baseline, and the largest difference."""
    verdicts = list(loss_parity.verify(records, base).values())
    if not verdicts:
        return "Losses: these logs are not compared; only run folders of this repository are."
    kinds = Counter(verdict.verdict.kind for verdict in verdicts)
    compared = [v for v in verdicts if v.max_loss_diff is not None]
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    whose = f"{name_of(base)}'s" if base else "the baseline's"
    line = f"Losses beside {whose} at every step: {counts}"
    if compared:
        worst = max(compared, key=lambda verdict: verdict.max_loss_diff)
        line += f"; the largest difference is {worst.max_loss_diff:.1e} ({worst.run}), the bar"
        line += f" {loss_parity.LOSS_BAR:g}"
    return line + "."


def _doubts(table: Table, refused: list[str]) -> str:
    """Says how many runs count, and the doubts that the table prints: those of most rows, and its
    own without what stands in brackets."""
    rows = table.rows
    complete = [row for row in rows if row["fit"] and row["verdict"] == "complete"]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        notes = row["notes"].split("; ") if row["notes"] else []
        notes = [re.sub(r"^line \d+: ", f"{row['verdict']}: ", note) for note in notes]
        for note in dict.fromkeys(note.partition(":")[0] for note in notes):
            reasons.setdefault(note, []).append(row["run"])
    common = sorted(reasons.items(), key=lambda item: -len(item[1]))
    doubts = [doubt.partition(" (")[0] for doubt in table.doubts]
    doubts += [
        f"{reason} ({who([cut(run, NAME) for run in runs], len(rows))})"
        for reason, runs in common[:FEW]
    ]
    if len(common) > FEW:
        doubts.append(f"{_counted(len(common) - FEW, 'more doubts')} below the table")
    if refused:
        doubts.append(f"{_counted(len(refused), 'files')} could not be read")
    line = f"{len(complete)} of {len(rows)} runs are complete and timed."
    return f"{line} In doubt: {'; '.join(doubts)}." if doubts else f"{line} Nothing is in doubt."
