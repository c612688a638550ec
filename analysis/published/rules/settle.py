"""What headings leave open, decided by what most rows of a table, or other tables, say."""

import math
import re
from collections import defaultdict
from statistics import median

from analysis.published.any_table import AnyTable, Line, gpus_in
from analysis.published.headings import Value
from analysis.published.rules.intervals import (
    AVERAGED,
    MOST_APART,
    Interval,
    apart,
    common,
    middle,
    product_of,
    ratio_of,
    span_of,
)
from analysis.published.rules.rows import (
    derived_dp,
    is_mixture,
    peaks_of,
    tokens_of_step,
    tokens_rate,
)


def settle(table: AnyTable) -> None:
    """Decide what headings leave open, by what most rows of the table say.

    Shares in percent without a sign; tokens/s, samples/s and TFLOP/s of one GPU or of all; a
    `batch` that is the global one; a batch of tokens in units of 2^20.
    """
    rows = table.rows
    for name in ("tp", "pp", "dp", "cp", "ep", "gpus", "nodes", "gpus_per_node", "micro_batch"):
        numbers = [row.number(name) for row in rows if row[name]]
        if any(number < 1 or number % 1 for number in numbers):
            for row in rows:  # seconds or bytes of these, not sizes
                row.values.pop(name, None)
    for name in ("mfu", "hfu", "efficiency"):
        numbers = [row.number(name) for row in rows if row[name]]
        if numbers and median(numbers) > 1.5:
            for row in rows:
                if row[name]:
                    row.values[name] = row[name].times(0.01)
    for row in rows:
        if (often := row["steps_per_s"]) and often.low > 0 and not row["step_s"]:
            low, high = 1 / often.high, 1 / often.low
            row.values["step_s"] = Value(
                1 / often.value, low, high, f"1/{often.text}", often.column
            )
    _settle_model_parallel(rows)
    _settle_gpus(table)
    _settle_batch(rows)
    _settle_work(table)
    _settle_tokens(table)
    for name, one, whole in (
        ("tokens_per_s", "tokens_per_s_gpu", tokens_of_step),
        ("samples_per_s", "samples_per_s_gpu", lambda row: span_of(row["global_batch"])),
    ):
        stated = {h for h, what in table.columns.items() if what.name == name and what.of == "all"}
        of_all = of_one = 0
        for row in rows:
            value, gpus = row[name], row.number("gpus")
            if value is None or value.value <= 0 or value.column in stated or not gpus or gpus < 2:
                continue
            work = ratio_of(whole(row), span_of(row["step_s"]))
            if work is None and name == "tokens_per_s":
                work = _work_by_size(row)
            if work is not None:
                rate = math.log(value.value / middle(work))
                nearest_one = abs(rate + math.log(gpus)) < abs(rate)
                of_one += nearest_one
                of_all += not nearest_one
        if of_one > of_all:
            for row in rows:
                if row[name] and row[name].column not in stated and one not in row.values:
                    row.values[one] = row.values.pop(name)
    for row in rows:
        if row["tflops"] and row.number("tflops") > 1e6:  # FLOP/s, or a count of FLOPs
            flops = row.values.pop("tflops")
            if re.search(r"(?i)/ ?s|per s", flops.column):
                row.values["tflops"] = flops.times(1e-12)
    # Of all GPUs: more than one card can do, and not next to nothing once divided.
    of_one = {h for h, what in table.columns.items() if what.name == "tflops" and what.of == "gpu"}
    open_ = [row for row in rows if row["tflops"] and row["tflops"].column not in of_one]
    above = [
        row.number("tflops") > 1.05 * max(peaks_of(row).values(), default=6000)
        and row.number("tflops") / row.number("gpus")
        > 0.05 * max(peaks_of(row).values(), default=99)
        for row in open_
        if (row.number("gpus") or 0) > 1
    ]
    if sum(above) > len(above) / 2:
        for row in open_:
            row.values["tflops_all"] = row.values.pop("tflops")
    for row in rows:
        if row["tflops_all"] and row["gpus"] and not row["tflops"]:
            row.values["tflops"] = row["tflops_all"].times(1 / row["gpus"].value)


def join(tables: list[AnyTable]) -> None:
    """Give a table without batches those that the document's other tables state for its GPUs.

    Only where all that know these GPUs agree, and where most rows of the table then keep
    tokens/s x seconds = batch x sequence.
    """
    stated: dict[float, set[tuple[float, float]]] = defaultdict(set)
    source: dict[float, tuple[Value, Value]] = {}
    for table in tables:
        for row in table.rows:
            gpus, batch, seq_len = row.number("gpus"), row["global_batch"], row["seq_len"]
            if gpus and batch and seq_len:
                stated[gpus].add((batch.value, seq_len.value))
                source[gpus] = (batch, seq_len)
    for table in tables:
        known = [row for row in table.rows if len(stated.get(row.number("gpus"), ())) == 1]
        cases = [row for row in known if tokens_rate(row) and row["step_s"]]
        if any(row["global_batch"] or row["seq_len"] or row["batch"] for row in table.rows):
            continue
        if len(cases) < 2 or len({row.number("gpus") for row in cases}) < len(cases):
            continue
        for row in cases:
            row.values["global_batch"], row.values["seq_len"] = source[row.number("gpus")]
        misses = [
            apart(tokens_rate(row), ratio_of(tokens_of_step(row), span_of(row["step_s"])))
            for row in cases
        ]
        if sum(miss < AVERAGED for miss in misses) <= len(cases) / 2:
            for row in cases:
                del row.values["global_batch"], row.values["seq_len"]


def _work_by_size(row: Line) -> Interval | None:
    """Tokens/s of all GPUs that the TFLOP/s per GPU and 6 N FLOPs a token give, roughly."""
    size, tflops, gpus = row.number("params_b"), row.number("tflops"), row.number("gpus")
    if not (size and tflops and gpus) or is_mixture(row):
        return None
    rate = tflops * 1e12 * gpus / (6 * size * 1e9)
    return rate, rate


def _settle_model_parallel(rows: list[Line]) -> None:
    """`MP` is tp where it makes the GPUs with pp and dp in most rows; elsewhere it may be both."""
    cases = [row for row in rows if row["mp"] and not row["tp"] and row["dp"] and row["gpus"]]
    holds = [
        row.number("mp") * row.number("pp", 1) * row.number("dp") == row.number("gpus")
        for row in cases
    ]
    for row in rows if sum(holds) > max(len(holds) / 2, 1) else ():
        if row["mp"] and not row["tp"]:
            row.values["tp"] = row["mp"]


def _settle_gpus(table: AnyTable) -> None:
    """Where no row has a number of GPUs: that of the heading above, if most layouts make it."""
    _gpus_by_nodes(table.rows)
    stated = gpus_in(table.section)
    cases = [row for row in table.rows if row["dp"] and (row["tp"] or row["pp"] or row["cp"])]
    if not stated or any(row["gpus"] for row in table.rows):
        return
    products = [
        row.number("dp") * math.prod(row.number(k, 1) for k in ("tp", "pp", "cp"))
        for row in table.rows
        if row["dp"]
    ]
    if cases and sum(product == stated for product in products) > max(len(products) / 2, 1):
        for row in table.rows:
            if dp := row["dp"]:
                for name in ("tp", "pp"):
                    row.values.setdefault(name, Value(1.0, 1.0, 1.0, "1", dp.column))
                row.values["gpus"] = Value(stated, stated, stated, str(stated), dp.column)


def _gpus_by_nodes(rows: list[Line]) -> None:
    """Where no row has a number of GPUs: tp x pp x dp, if most rows make the same of a node."""
    cases = [row for row in rows if all(row[name] for name in ("nodes", "tp", "pp", "dp"))]
    if len(cases) < 3 or any(row["gpus"] or row["gpus_per_node"] for row in rows):
        return
    made = [math.prod(row.number(k, 1) for k in ("tp", "pp", "dp", "cp")) for row in cases]
    each = [gpus / max(row.number("nodes"), 1) for row, gpus in zip(cases, made, strict=True)]
    usual = max(set(each), key=each.count)
    if usual % 1 or 2 * each.count(usual) <= len(each):
        return
    for row, gpus in zip(cases, made, strict=True):
        row.values["gpus"] = Value(gpus, gpus, gpus, row["dp"].text, row["dp"].column)


def _settle_work(table: AnyTable) -> None:
    """The tokens of a sequence, or how often a GPU's batch is accumulated, where no column says it:
    the number that most rows' rates, times and batches have in common.

    It is a power of two times a small number, and what the document states, if it does.
    """
    for known, filled in ((("global_batch",), "seq_len"), (("micro_batch", "seq_len"), "gas")):
        cases = []
        for row in table.rows:
            if row["seq_len" if filled == "seq_len" else "global_batch"] or row["batch_tokens"]:
                continue
            if filled == "gas" and any(row[name] for name in ("gas", "batch", "tp", "pp", "dp")):
                continue
            rate = span_of(row["tokens_per_s"])
            each = product_of(span_of(row["tokens_per_s_gpu"]), span_of(row["gpus"]))
            sizes = [
                span_of(row[name]) or (span_of(row["batch"]) if name == "global_batch" else None)
                for name in known
            ]
            sizes += [span_of(row["gpus"])] if filled == "gas" else []
            for done in (rate, each):
                work = ratio_of(product_of(done, span_of(row["step_s"])), product_of(*sizes))
                if work:
                    cases.append((row, work))
                    break
        near = [work for _, work in cases]
        if len(near) < 3:
            continue
        low = [(a * (1 - MOST_APART / 4), b * (1 + MOST_APART / 4)) for a, b in near]
        point, held = common(low)
        whole = _whole_size(point, 64 if filled == "seq_len" else 1)
        stated = table.stated.seq_len if filled == "seq_len" else None
        if len(held) <= len(near) / 2 or whole is None or stated not in (None, whole):
            continue
        for row, _ in cases:
            if filled == "seq_len":
                text = f"{whole:g} (by {len(held)} rows)"
                row.values["seq_len"] = Value(whole, whole, whole, text, "")
                row.values.setdefault("global_batch", row["batch"] or row["global_batch"])
            else:
                batch = whole * row.number("micro_batch") * row.number("gpus")
                row.values["global_batch"] = Value(batch, batch, batch, f"{batch:g}", "")


def _settle_tokens(table: AnyTable) -> None:
    """Where nothing states a batch: the tokens of a step, in all or for a GPU, that most rows'
    rates times their seconds have in common."""
    rows = [row for row in table.rows if row["step_s"]]
    if any(row[name] for row in rows for name in ("global_batch", "batch", "batch_tokens")):
        return
    if any(row[name] for row in rows for name in ("micro_batch", "gas", "samples_per_s")):
        return
    for of_one in (False, True):
        cases = []
        for row in rows:
            rate = tokens_rate(row) or (None if of_one else span_of(row["tokens_per_s_gpu"]))
            work = product_of(rate, span_of(row["step_s"]))
            work = ratio_of(work, span_of(row["gpus"])) if of_one else work
            if work and tokens_rate(row):
                cases.append((row, work))
        point, held = common([work for _, work in cases])
        if len(cases) > 2 and len(held) > max(len(cases) / 2, 2):
            for row, _ in cases:
                tokens = point * (row.number("gpus") if of_one else 1)
                text = f"{tokens:.6g} (by {len(held)} rows)"
                row.values["batch_tokens"] = Value(tokens, tokens, tokens, text, "")
            return


def _whole_size(point: float, unit: int) -> float | None:
    """The whole multiple of a unit that a number is within 1 %; None where it is near none."""
    whole = max(round(point / unit), 1) * unit
    return float(whole) if abs(point / whole - 1) < 0.01 and whole <= (1 << 20) else None


def _settle_batch(rows: list[Line]) -> None:
    open_ = [r for r in rows if r["batch"] and not r["global_batch"] and not r["batch_tokens"]]
    cases = [r for r in open_ if r["step_s"] and r["seq_len"] and tokens_rate(r)]
    holds = [
        0.98
        < middle(tokens_rate(r)) * r.number("step_s") / (r.number("batch") * r.number("seq_len"))
        < 1.02
        for r in cases
        if r.number("batch") and r.number("seq_len")
    ]
    for row in open_ if not cases else ():
        if (rate := row["samples_per_s"]) and row["step_s"]:
            done = product_of(span_of(rate), span_of(row["step_s"]))
            holds += [done is not None and apart(done, (row.number("batch"),) * 2) < MOST_APART]
    if holds and 2 * sum(holds) >= len(holds):
        for row in open_:
            row.values["global_batch"] = row["batch"]
    binary = decimal = 0
    for row in rows:
        whole, seq_len = row["batch_tokens"], row.number("seq_len")
        micro, gas, dp = (row.number(k) for k in ("micro_batch", "gas", "dp"))
        dp = dp or derived_dp(row)
        if whole and seq_len and micro and dp:
            work = micro * (gas or 1) * dp * seq_len
            binary += abs(math.log(work / (whole.value * 1.048576))) < 0.01
            decimal += abs(math.log(work / whole.value)) < 0.01
    if binary > decimal:
        for row in rows:
            if row["batch_tokens"]:
                row.values["batch_tokens"] = row["batch_tokens"].times(1.048576)
