"""The views of runs, by name: each reads what its options name and makes tables of it. `python -m
analysis.NAME` prints a view, and the block NAME of a report holds it.
"""

import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from analysis.common.table import Table, show
from analysis.logs.fact_options import facts_of
from analysis.logs.load import is_log, load, load_own, load_with_ranks
from analysis.logs.naming import name_of
from analysis.runs import (
    checkpoint_costs,
    efficiency_tree,
    extra_p,
    failed_runs,
    gate,
    gpu_hours,
    log_parity,
    loss_parity,
    pairs,
    rank_times,
    run_table,
    scaling_curve,
    slowness,
    submissions,
)
from analysis.runs.baseline import baseline_of
from analysis.runs.fairness import question_of
from analysis.runs.run_options import LOGS, load_runs, parser_of, terms_of, unheeded
from analysis.runs.run_row import OF_EXPERTS, OF_PRINTED_MFU, OF_RANKS
from base.errors import UsageError, command_line, warn
from parallel.record.reader import is_run_folder


class Result(NamedTuple):
    """What a view makes: tables and the exit status of its command."""

    tables: list[Table]
    status: int = 0


def tflops(options: Namespace) -> Result:
    """Shows the throughput of each run: step time, tokens/s, TFLOP/s and MFU."""
    table = run_table.of_records(
        load_runs("analysis.tflops", options),
        options.convention,
        terms_of(options),
        options.predict,
    )
    seldom = ["predicted_s", "predicted_error"] if options.predict else []
    for key in (*OF_RANKS, *OF_EXPERTS, *OF_PRINTED_MFU):
        if any(row[key] is not None for row in table.rows):
            seldom.append(key)
    table.json_keys = [*run_table.JSON_KEYS, *seldom]
    return Result([table])


def scaling(options: Namespace) -> Result:
    """Shows speedup and efficiency by GPUs: of MLPerf's results apart from those of other runs."""
    records, refused = load(options.paths, facts_of(options))
    warn("analysis.scaling", *unheeded(records, facts_of(options)))
    results = [record for record in records if submissions.is_result(record)]
    runs = [record for record in records if not submissions.is_result(record)]
    terms = terms_of(options)
    if not runs:
        return Result(submissions.report(results, refused, terms))
    tables = submissions.report(results, [], replace(terms, baseline=None)) if results else []
    return Result([*tables, scaling_curve.report_of(runs, refused, terms)])


def compare(options: Namespace) -> Result:
    """Shows which of two runs, or of a study's pairs, is faster, and whether that is noise."""
    golden, n_paths = options.golden, len(options.paths)
    if n_paths > (1 if golden else 2):
        wanted = "NEW is compared with --golden" if golden else "two things are compared"
        raise UsageError(f"{wanted}, but {n_paths} paths were given")
    gated = options.at_most is not None
    if gated and not golden and n_paths == 1:
        raise UsageError("--at-most compares OLD NEW, or NEW with --golden FILE, not a study")
    if gated and len({os.path.realpath(path) for path in options.paths}) < n_paths:
        raise UsageError(f"--at-most: OLD and NEW are both {options.paths[1]}: nothing is compared")
    any_commit = options.any_commit or gated or golden is not None  # a gate is for other code
    sides = []
    for path in options.paths:
        runs, left_out = pairs.timed_runs([path], facts_of(options), options.window)
        warn("analysis.compare", *left_out)
        sides.append(runs)
    if golden and not os.path.lexists(golden):
        table = gate.write_golden(sides[0], golden)  # nothing was compared, so no gate has passed
        return Result([table], gate.UNKNOWN if gated else gate.PASSED)
    if golden:
        sides.insert(0, gate.read_golden(golden))
    if len(sides) == 1:
        compared = pairs.of_study(sides[0], any_commit)
    else:
        compared = [pairs.pair_of(*sides, any_commit)]
    table = pairs.table(compared, any_commit)
    if len(sides) == 2 and compared[0].values:
        table.notes.append(f"they differ in: {', '.join(compared[0].values)}")
    table.title = question_of([run.record for side in sides for run in side])
    if gated:
        verdict = gate.judge(compared[0], options.at_most)
        table.notes.append(verdict.sentence)
        table.rows[0] |= {"at_most": options.at_most, "gate": verdict.sentence}
        return Result([table], verdict.status)
    return Result([table], int(not all(pair.comparison for pair in compared)))


def parity(options: Namespace) -> Result:
    """Shows whether the losses of each run equal those of its baseline."""
    bars = {"loss": options.loss_bar, "grad_norm": options.grad_norm_bar}
    bars = {name: bar for name, bar in bars.items() if bar is not None}
    are_logs = any(map(is_log, options.paths))
    if bars and not are_logs:
        raise UsageError(
            "--loss-bar and --grad-norm-bar are for logs; run folders have fixed tolerances"
        )
    records, damaged = load(options.paths) if are_logs else load_own(options.paths, is_run_folder)
    warn("analysis.parity", *damaged)
    baseline = baseline_of(options.baseline, records) if options.baseline else None
    if are_logs:
        table = log_parity.of_logs(records, baseline, loss_parity.Bars(**bars))
        kinds = {row["kind"] for row in table.rows}
    else:
        parities = list(loss_parity.verify(records, baseline).values())
        baselines = sorted({record.baseline for record in records} - {None})
        table = loss_parity.table(parities, options.baseline or ", ".join(baselines))
        kinds = {parity.verdict.kind for parity in parities}
    is_bad = loss_parity.DIFFERS in kinds
    if options.check:
        is_bad = bool(damaged or kinds - {loss_parity.EQUAL})
    return Result([table], int(is_bad))


def breakdown(options: Namespace) -> Result:
    """Shows where each rank's time went, what it sent, and which part lost efficiency."""
    runs, problems = rank_times.read(options.paths)
    warn("analysis.breakdown", *problems)
    times, own_runs = rank_times.times(runs), rank_times.breakdowns(runs)
    if not own_runs:
        if options.pop or options.extrap:
            raise UsageError("--pop and --extrap are for our own runs with --breakdown")
        return Result([times])
    if options.extrap:
        warn("analysis.breakdown", extra_p.write(options.extrap, own_runs, options.force))
    taken_apart = efficiency_tree.table if options.pop else rank_times.losses
    efficiency = taken_apart(own_runs, options.baseline, options.scaling)
    return Result([times, rank_times.messages(own_runs), efficiency])


def stragglers(options: Namespace) -> Result:
    """Shows the ranks and nodes of each run that are slower than the others, and why steps are
    slow."""
    records, problems = load_with_ranks(options.paths)
    slow = {}
    for record in records:
        try:
            slow[name_of(record)] = slowness.slowness_of(record)
        except UsageError as error:
            problems.append(str(error))
    if not slow:
        raise UsageError("; ".join(problems))
    warn("analysis.stragglers", *problems)
    return Result([table for table in slowness.tables(slow) if table.rows or table.notes])


def checkpoints(options: Namespace) -> Result:
    """Shows what the saves and loads of each run cost."""
    costs = checkpoint_costs.table(load_runs("analysis.checkpoints", options))
    warn("analysis.checkpoints", *costs.refused)
    if costs.silent:
        names = ", ".join(costs.silent)
        warn("analysis.checkpoints", f"no checkpoints.csv with a row in {names}")
    return Result([costs.table])


def failures(options: Namespace) -> Result:
    """Shows why runs failed, and on which nodes more often than by chance."""
    causes, nodes = failed_runs.tables(load_runs("analysis.failures", options))
    return Result([causes, nodes] if nodes.rows else [causes])


def goodput(options: Namespace) -> Result:
    tables, refused = gpu_hours.table(load_runs("analysis.goodput", options))
    if not any(table.rows for table in tables):
        raise UsageError("; ".join(refused) or "these are no run folders of this repository")
    return Result([table for table in tables if table.rows])


class View(NamedTuple):
    """A command that shows tables of runs. `options` are those of run_options, in the order of
    --help; `paths` is the help text of PATH."""

    make: Callable[[Namespace], Result]
    options: tuple[str, ...]
    paths: str = LOGS


_WITH_PARTS = "run folder or study; or a log with the parts of its steps"
_RATIOS = ("baseline", "scaling", "any_commit", "times", "facts")
VIEWS = {
    "tflops": View(tflops, (*_RATIOS, "predict", "table", "convention")),
    "scaling": View(scaling, (*_RATIOS, "critical_batch", "target_loss", "table")),
    "compare": View(
        compare,
        ("at_most", "golden", "any_commit", "times", "facts", "table"),
        "A B, or a study",
    ),
    "parity": View(
        parity,
        ("baseline", "loss_bar", "grad_norm_bar", "table", "check"),
        "run folder or study; or logs of any program, of which A is the first",
    ),
    "breakdown": View(
        breakdown,
        ("pop", "extrap", "force", "baseline", "scaling", "table"),
        _WITH_PARTS,
    ),
    "stragglers": View(stragglers, ("table",), _WITH_PARTS),
    "checkpoints": View(checkpoints, ("table",), "run, log, folder"),
    "failures": View(failures, ("table",)),
    "goodput": View(goodput, ("table",), "study or run folder"),
}


def command(name: str, description: str) -> Callable[..., int]:
    """Makes the `main` of `python -m analysis.NAME`, which prints the view of that name."""
    view = VIEWS[name]

    @command_line(f"analysis.{name}")
    def main(argv: list[str] | None = None) -> int:
        parser = parser_of(f"analysis.{name}", description, *view.options, paths=view.paths)
        options = parser.parse_args(argv)
        result = view.make(options)
        show(result.tables, options.format, options.columns)
        return result.status

    return main
