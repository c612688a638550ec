"""GPUs against the layout and the nodes; the batch against its parts."""

import math
from collections import defaultdict
from collections.abc import Iterator

from analysis.published.any_table import AnyTable, Line
from analysis.published.finding import Finding
from analysis.published.rules.broken import of_cell
from analysis.published.rules.rows import derived_dp


def gpus_of_layout(table: AnyTable) -> Iterator[Finding]:
    """tp x pp x dp (x cp) is the number of GPUs; so are nodes x GPUs of a node."""
    ways: dict[tuple[str, ...], list[tuple[Line, float]]] = defaultdict(list)
    for row in table.rows:
        if not row["gpus"] or row.number("gpus") == 0:
            continue
        sizes = {k: row.number(k) for k in ("tp", "pp", "dp", "cp", "ep")}
        sizes["tp"] = sizes["tp"] or table.stated.tp
        if sizes["tp"] and sizes["pp"] and sizes["dp"]:
            base = sizes["tp"] * sizes["pp"] * sizes["dp"]
            ways[("tp", "pp", "dp", "cp")].append((row, base * (sizes["cp"] or 1)))
            ways[("tp", "pp", "dp")].append((row, base))
            ways[("tp", "pp", "dp", "ep")].append((row, base * (sizes["ep"] or 1)))
    holds = {
        way: sum(row.number("gpus") == product for row, product in rows)
        for way, rows in ways.items()
    }
    way = ("tp", "pp", "dp", "cp")
    if holds and max(holds.values()) > len(ways[way]) / 2 > holds[way]:
        way = max(holds, key=holds.get)
    for row, product in ways.get(way, ()):
        gpus = row["gpus"]
        if gpus.value != product:
            sizes = {k: row.number(k) or 1 for k in way}
            sizes["tp"] = row.number("tp") or table.stated.tp
            words = " x ".join(
                f"{k} {size:g}" for k, size in sizes.items() if size > 1 or k in ("tp", "pp", "dp")
            )
            said = f"{words} = {product:g}, but the row says {gpus.value:g} GPUs"
            yield of_cell(row, gpus, "gpus", said, f"{product:g}")
    for row in table.rows:
        gpus, model = row["gpus"], [row.number(k) or 1 for k in ("tp", "pp", "cp")]
        if not gpus or gpus.value <= 0:
            continue
        if not row["dp"] and (row["tp"] or row["pp"]) and gpus.value % math.prod(model):
            said = f"tp x pp x cp = {math.prod(model):g} does not divide {gpus.value:g} GPUs"
            yield of_cell(row, gpus, "gpus", said, "a multiple")
        nodes, each = row.number("nodes"), row.number("gpus_per_node")
        if nodes and each and nodes * each != gpus.value:
            said = (
                f"{nodes:g} nodes x {each:g} GPUs = {nodes * each:g},"
                f" but the row says {gpus.value:g} GPUs"
            )
            yield of_cell(row, gpus, "gpus", said, f"{nodes * each:g}")
        elif each and gpus.value > each and gpus.value % each:
            said = f"{gpus.value:g} GPUs are no whole number of nodes of {each:g}"
            yield of_cell(row, gpus, "gpus", said, f"a multiple of {each:g}", "likely")


def gpus_of_nodes(table: AnyTable) -> Iterator[Finding]:
    """GPUs a node are the same in every row of a table."""
    each = [
        (row, row.number("gpus") / row.number("nodes"))
        for row in table.rows
        if row["gpus"] and row.number("nodes") and not row["gpus_per_node"]
    ]
    many = [ratio for _, ratio in each if ratio >= 1]
    if len(many) < 3:
        return
    usual = max(set(many), key=many.count)
    for row, ratio in each:
        if ratio != usual and many.count(usual) > len(many) / 2 and row.number("nodes") > 1:
            gpus = row["gpus"]
            said = (
                f"{gpus.value:g} GPUs on {row.number('nodes'):g} nodes are {ratio:g} a node,"
                f" elsewhere {usual:g}"
            )
            expected = f"{usual * row.number('nodes'):g}"
            yield of_cell(row, gpus, "gpus", said, expected, "likely")


def batch_of_parts(table: AnyTable) -> Iterator[Finding]:
    """micro batch x accumulation x dp is the global batch."""
    cases = []
    alone = _only_data_parallel(table)
    for row in table.rows:
        micro, gas = row.number("micro_batch"), row.number("gas")
        dp = row.number("dp") or derived_dp(row) or (alone and row.number("gpus"))
        batch, name = row["global_batch"], "global_batch"
        if not batch and row["batch_tokens"] and row["seq_len"]:
            batch, name = row["batch_tokens"].times(1 / row["seq_len"].value), "batch_tokens"
        if batch and micro and dp and batch.value > 0:
            cases.append((row, row[name], batch, micro, gas, dp))
    holds = sum(
        batch.low <= m * (gas or 1) * dp <= batch.high for _, _, batch, m, gas, dp in cases if gas
    )
    stated = sum(gas is not None for *_, gas, _ in cases)
    for row, cell, batch, micro, gas, dp in cases:
        if gas is None:
            if batch.low == batch.high and batch.value % (micro * dp):
                said = (
                    f"micro batch {micro:g} x dp {dp:g} does not divide the global batch"
                    f" {batch.value:g}"
                )
                yield of_cell(row, cell, "batch", said, "a multiple")
            continue
        product = micro * gas * dp
        if not batch.low <= product <= batch.high and (row["dp"] or 2 * holds > stated):
            said = (
                f"micro batch {micro:g} x accumulation {gas:g} x dp {dp:g} = {product:g},"
                f" but the row says a global batch of {batch.value:g}"
            )
            yield of_cell(row, cell, "batch", said, f"{product:g}")


def _only_data_parallel(table: AnyTable) -> bool:
    """Whether no column states a split, and micro batch x accumulation x GPUs is the global batch
    in most rows."""
    rows = [row for row in table.rows if row["global_batch"] and row["micro_batch"] and row["gas"]]
    if any(row[name] for row in table.rows for name in ("tp", "pp", "dp", "cp", "ep")):
        return False
    holds = [
        math.prod(row.number(k, 0) for k in ("micro_batch", "gas", "gpus"))
        == row.number("global_batch")
        for row in rows
    ]
    return sum(holds) > max(len(holds) / 2, 2)
