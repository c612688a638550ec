"""The rules that any published table must keep: one function a rule, one file a family.

Each compares two numbers of one row, or one row with its neighbours, and allows what the printed
digits leave open (`headings.read_cell`). Where most rows of a table miss an identity by a little,
their numbers were averaged apart, and the tolerance is what the table itself shows.
"""

from collections.abc import Callable, Iterator

from analysis.published.any_table import AnyTable
from analysis.published.finding import Finding
from analysis.published.rules import columns, flops, layout, rates, repeated, speedups, sums
from analysis.published.rules.settle import settle

RULES: tuple[Callable[[AnyTable], Iterator[Finding]], ...] = (
    layout.gpus_of_layout,
    layout.gpus_of_nodes,
    layout.batch_of_parts,
    flops.stated_formula,
    flops.upper_bounds,
    rates.rates_follow,
    flops.of_all_gpus,
    flops.mfu_of_peak,
    flops.work_per_token,
    speedups.follow_from_times,
    speedups.ideal,
    speedups.above_bound,
    speedups.above_linear,
    columns.one_unit,
    repeated.equal_results,
    rates.stale_rates,
    repeated.far_apart,
    sums.total_rows,
    sums.total_columns,
    sums.shares_of_rows,
    sums.shares_of_columns,
    columns.best,
    columns.dates,
    rates.wall_clocks,
    columns.commits,
)


def findings_of(table: AnyTable) -> list[Finding]:
    """Everything that the rules find in one table; the first finding about a cell stands."""
    settle(table)
    found: dict[tuple, Finding] = {}
    for rule in RULES:
        for finding in rule(table):
            found.setdefault((finding.line, finding.column, finding.printed), finding)
    return sorted(found.values(), key=lambda finding: finding.line)
