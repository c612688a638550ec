"""Speedups and efficiencies against the table's own times."""

from collections.abc import Iterator

from analysis.published.any_table import AnyTable, Line
from analysis.published.finding import Finding
from analysis.published.headings import Value, read_cell
from analysis.published.rules.broken import of_cell
from analysis.published.rules.intervals import AVERAGED, Interval, apart, middle, ratio_of, span_of

ABOVE_LINEAR = 1.005  # efficiency that rounding of speedups to 0.01 cannot explain


def follow_from_times(table: AnyTable) -> Iterator[Finding]:
    """Speedups and efficiencies follow from the table's own times or rates."""
    base: Line | None = None
    meant = [what.name for what in table.columns.values()]
    if meant.count("speedup") > 1 or meant.count("efficiency") > 1:
        return  # of several times or ranks: which belongs to which is not said
    for row in table.rows:
        speedup, efficiency = row["speedup"], row["efficiency"]
        if (
            speedup
            and speedup.low <= 1 <= speedup.high
            and "." in speedup.text
            or (speedup and speedup.text.strip(" *~x×") == "1")
        ):
            base = row
        if base is None or base is row:
            continue
        ratios: dict[str, Interval] = {}
        for name in ("step_s", "wall_s", "tokens_per_s", "samples_per_s", "tflops_all"):
            one, other = span_of(base[name]), span_of(row[name])
            if one and other:
                ratios[name] = (
                    ratio_of(one, other) if name in ("step_s", "wall_s") else ratio_of(other, one)
                )
        if speedup and ratios and min(speedup.low, speedup.value) > 0:
            yield from _follows(row, speedup, (speedup.low, speedup.high), ratios, "speedup")
        gpus, first = row.number("gpus"), base.number("gpus")
        if efficiency and efficiency.low > 0 and gpus and first:
            shares = {k: (a * first / gpus, b * first / gpus) for k, (a, b) in ratios.items()}
            if speedup and speedup.low > 0 and ratios:
                shares["speedup"] = (speedup.low * first / gpus, speedup.high * first / gpus)
            if shares:
                span = (efficiency.low, efficiency.high)
                yield from _follows(row, efficiency, span, shares, "efficiency")


def _follows(
    row: Line, cell: Value, span: Interval, ratios: dict[str, Interval], kind: str
) -> Iterator[Finding]:
    wide = (span[0] * (1 - AVERAGED) - (span[1] - span[0]) / 2, span[1] * (1 + AVERAGED))
    if any(apart(wide, ratio) == 0 for ratio in ratios.values()):
        return
    name, ratio = min(ratios.items(), key=lambda item: apart(span, item[1]))
    said = f"{cell.column} {cell.text}: the table's own {name} give {middle(ratio):.3f}"
    yield of_cell(row, cell, kind, said, f"{middle(ratio):.3f}")


def above_linear(table: AnyTable) -> Iterator[Finding]:
    """No speedup is above the number of GPUs over those of the row whose speedup is 1."""
    by_name = {
        name: [(h, what) for h, what in table.columns.items() if what.name == name]
        for name in ("speedup", "efficiency")
    }
    for heading, what in by_name["speedup"]:
        cells = [(row, read_cell(row.cells.get(heading, ""), heading, what)) for row in table.rows]
        first = next((row for row, cell in cells if cell and cell.value == 1), None)
        base = first.number("gpus") if first else None
        for row, cell in cells:
            gpus = row.number("gpus")
            if cell and base and gpus and (efficiency := cell.value * base / gpus) > ABOVE_LINEAR:
                said = f"speedup {cell.value:g} on {gpus:g} GPUs is an efficiency of"
                said += f" {efficiency:.2f}, above 1"
                yield of_cell(row, cell, "efficiency", said, f"at most {gpus / base:g}")
    for heading, what in by_name["efficiency"]:
        for row in table.rows:
            cell = row["efficiency"]
            if cell is None or cell.column != heading:
                cell = read_cell(row.cells.get(heading, ""), heading, what)
            if cell and cell.value > ABOVE_LINEAR:
                said = f"efficiency {cell.value:g} is above 1"
                yield of_cell(row, cell, "efficiency", said, "at most 1")
