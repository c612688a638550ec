"""The rules that any published table must keep: one function a rule, one table of rules.

Each compares two numbers of one row, or one row with its neighbours, and allows what the printed
digits leave open (`headings.read_cell`). Where most rows of a table miss an identity by a little,
their numbers were averaged apart, and the tolerance is what the table itself shows.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from analysis.published.any_table import AnyTable, Line
from analysis.published.headings import MEASURED, Value
from models.gpus import find_gpu, planning_gpu

Interval = tuple[float, float]
AVERAGED = 0.002  # numbers that were averaged apart do not divide exactly
MOST_APART = 0.02  # averaging explains no more
SHARP = 3e-4  # numbers of fewer digits than this resolves are equal by chance
GAP = 5.0  # an outlier is this many times away from every other row
MIXTURE = re.compile(
    r"moe|mixtral|grok|deepseek|switch|dbrx|\ba\d+b\b|\d+ ?x ?\d+(?:\.\d+)?b|expert", re.I
)


@dataclass(frozen=True)
class Fault:
    """One broken rule: where, what is printed, what follows from the rest, and how sure.

    sure: "certain" (arithmetic), "likely" (a convention may explain it), "possible" (look at it).
    """

    line: int
    kind: str
    message: str
    column: str = ""
    printed: str = ""
    expected: str = ""
    sure: str = "certain"


def faults_of(table: AnyTable) -> list[Fault]:
    """Everything that the rules find in one table; the first finding about a cell stands."""
    settle(table)
    found: dict[tuple, Fault] = {}
    for rule in RULES.values():
        for fault in rule(table):
            found.setdefault((fault.line, fault.column), fault)
    return sorted(found.values(), key=lambda fault: fault.line)


# ---- intervals ---------------------------------------------------------------------------------


def _span(value: Value | None) -> Interval | None:
    return None if value is None or value.low <= 0 else (value.low, value.high)


def _product(*spans: Interval | None) -> Interval | None:
    if None in spans:
        return None
    return (math.prod(s[0] for s in spans), math.prod(s[1] for s in spans))


def _over(one: Interval | None, other: Interval | None) -> Interval | None:
    return None if one is None or other is None else (one[0] / other[1], one[1] / other[0])


def _apart(one: Interval, other: Interval) -> float:
    """By what share two intervals miss each other; 0 where they meet."""
    return max(one[0] / other[1] - 1, other[0] / one[1] - 1, 0.0)


def _middle(span: Interval) -> float:
    return math.sqrt(span[0] * span[1])


def _common(spans: list[Interval]) -> tuple[float, set[int]]:
    """(a point that lies in most of the intervals, which intervals hold it)."""
    best: tuple[float, set[int]] = (0.0, set())
    for point in {low for low, _ in spans}:
        held = {i for i, (low, high) in enumerate(spans) if low <= point <= high}
        if len(held) > len(best[1]):
            best = (point, held)
    if best[1]:
        low, high = max(spans[i][0] for i in best[1]), min(spans[i][1] for i in best[1])
        best = (math.sqrt(low * high), best[1])
    return best


def _allowed(misses: list[float]) -> float:
    """The tolerance beyond the digits: none where most rows need none, else what most show."""
    if not misses or median(misses) == 0:
        return 0.0
    typical = median(misses)
    return 3 * typical if typical < MOST_APART / 3 else 0.0


# ---- what a row says ---------------------------------------------------------------------------


def tokens_rate(row: Line) -> Interval | None:
    """Tokens/s of all GPUs, printed."""
    if span := _span(row["tokens_per_s"]):
        return span
    if span := _product(_span(row["tokens_per_s_gpu"]), _span(row["gpus"])):
        return span
    return None


def tokens_of_step(row: Line) -> Interval | None:
    """Tokens of one optimizer step, from the batch."""
    batch = _product(_span(row["global_batch"]), _span(row["seq_len"]))
    return batch or _span(row["batch_tokens"])


def any_rate(row: Line) -> Interval | None:
    """Tokens/s of all GPUs, printed or from the batch and the time; None where they contradict."""
    printed, derived = tokens_rate(row), _over(tokens_of_step(row), _span(row["step_s"]))
    if printed and derived and _apart(printed, derived) > MOST_APART:
        return None  # the rule `rate` names it
    return printed or derived


def _card(row: Line) -> str:
    name = row.words.get("gpu_type") or row.words.get("cluster") or ""
    card = find_gpu(name)
    if card is None and name:
        card = _usual_card(name.upper())
    return card.name if card else ""


def _usual_card(name: str) -> object:
    """The usual card of a bare name (H100: SXM), or None."""
    try:
        return planning_gpu(re.sub(r"^NVIDIA ", "", name))
    except ValueError:
        return None


def _peaks(row: Line) -> dict[str, float]:
    card = _card(row)
    return find_gpu(card).peaks if card and find_gpu(card) else {}


def _peak(row: Line) -> float | None:
    """The peak at the row's precision, or None where either is unknown."""
    precision = re.search(r"bf16|fp16|fp8|fp4|fp32|tf32", row.words.get("precision", "").lower())
    return _peaks(row).get(precision[0]) if precision else None


def _is_mixture(row: Line) -> bool:
    around = " ".join(
        [row.words.get("model", ""), row.words.get("around", ""), *row.cells.values()]
    )
    return bool(row["ep"] and row["ep"].value > 1) or bool(MIXTURE.search(around))


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
    _settle_batch(rows)
    for name, one, whole in (
        ("tokens_per_s", "tokens_per_s_gpu", tokens_of_step),
        ("samples_per_s", "samples_per_s_gpu", lambda row: _span(row["global_batch"])),
    ):
        stated = {h for h, what in table.columns.items() if what.name == name and what.of == "all"}
        of_all = of_one = 0
        for row in rows:
            value, gpus = row[name], row.number("gpus")
            if value is None or value.column in stated or not gpus or gpus < 2:
                continue
            work = _over(whole(row), _span(row["step_s"]))
            if work is None and name == "tokens_per_s":
                work = _work_by_size(row)
            if work is not None:
                rate = math.log(value.value / _middle(work))
                nearest_one = abs(rate + math.log(gpus)) < abs(rate)
                of_one += nearest_one
                of_all += not nearest_one
        if of_one > of_all:
            for row in rows:
                if row[name] and row[name].column not in stated and one not in row.values:
                    row.values[one] = row.values.pop(name)
    above = [
        row["tflops"].value > 1.05 * max(_peaks(row).values(), default=6000)
        for row in rows
        if row["tflops"] and (row.number("gpus") or 0) > 1
    ]
    if above and sum(above) > len(above) / 2:
        for row in rows:
            if row["tflops"]:
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
            _apart(tokens_rate(row), _over(tokens_of_step(row), _span(row["step_s"])))
            for row in cases
        ]
        if sum(miss < AVERAGED for miss in misses) <= len(cases) / 2:
            for row in cases:
                del row.values["global_batch"], row.values["seq_len"]


def _work_by_size(row: Line) -> Interval | None:
    """Tokens/s of all GPUs that the TFLOP/s per GPU and 6 N FLOPs a token give, roughly."""
    size, tflops, gpus = row.number("params_b"), row.number("tflops"), row.number("gpus")
    if not (size and tflops and gpus) or _is_mixture(row):
        return None
    rate = tflops * 1e12 * gpus / (6 * size * 1e9)
    return rate, rate


def _settle_batch(rows: list[Line]) -> None:
    open_ = [r for r in rows if r["batch"] and not r["global_batch"] and not r["batch_tokens"]]
    cases = [r for r in open_ if r["step_s"] and r["seq_len"] and tokens_rate(r)]
    holds = [
        0.98
        < _middle(tokens_rate(r)) * r.number("step_s") / (r.number("batch") * r.number("seq_len"))
        < 1.02
        for r in cases
        if r.number("batch") and r.number("seq_len")
    ]
    if holds and 2 * sum(holds) >= len(holds):
        for row in open_:
            row.values["global_batch"] = row["batch"]
    binary = decimal = 0
    for row in rows:
        whole, seq_len = row["batch_tokens"], row.number("seq_len")
        micro, gas, dp = (row.number(k) for k in ("micro_batch", "gas", "dp"))
        dp = dp or _derived_dp(row)
        if whole and seq_len and micro and dp:
            work = micro * (gas or 1) * dp * seq_len
            binary += abs(math.log(work / (whole.value * 1.048576))) < 0.01
            decimal += abs(math.log(work / whole.value)) < 0.01
    if binary > decimal:
        for row in rows:
            if row["batch_tokens"]:
                row.values["batch_tokens"] = row["batch_tokens"].times(1.048576)


def _derived_dp(row: Line) -> float | None:
    gpus, tp, pp = (row.number(k) for k in ("gpus", "tp", "pp"))
    if not (gpus and tp):
        return None
    return gpus / (tp * (pp or 1) * row.number("cp", 1))


# ---- the rules ---------------------------------------------------------------------------------

Identity = Callable[[Line], tuple[str, Interval, Interval, str] | None]


def _broken(table: AnyTable, kind: str, identity: Identity, least: float = 0.0) -> Iterator[Fault]:
    """Rows whose printed cell misses what follows by more than `least` and the table allow."""
    cases = [(row, case) for row in table.rows if (case := identity(row))]
    misses = [_apart(printed, expected) for _, (_, printed, expected, _) in cases]
    allowed = max(least, _allowed(misses))
    for row, (name, printed, expected, words) in cases:
        miss = _apart(printed, expected)
        if miss <= allowed * (1 + 1e-9) + 1e-9:
            continue
        value = row[name]
        sure = "certain" if miss > 0.01 else "likely"
        ratio = _middle(printed) / _middle(expected)
        said = f"{value.column} {value.text}: {words}, {_times(ratio)}"
        shown = f"{_middle(expected) / _middle(printed) * value.value:.6g}"
        yield Fault(row.at(value.column), kind, said, value.column, value.text, shown, sure)


def _times(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.2g} %" if 0.7 < ratio < 1.4 else f"{ratio:.3g} times that"


def _gpus(table: AnyTable) -> Iterator[Fault]:
    """tp x pp x dp (x cp) is the number of GPUs; so are nodes x GPUs of a node."""
    ways: dict[tuple[str, ...], list[tuple[Line, float]]] = defaultdict(list)
    for row in table.rows:
        if not row["gpus"] or row.number("gpus") == 0:
            continue
        sizes = {k: row.number(k) for k in ("tp", "pp", "dp", "cp", "ep")}
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
            words = " x ".join(
                f"{k} {row.number(k):g}" for k in way if row[k] and (k != "cp" or row.number(k) > 1)
            )
            said = f"{words} = {product:g}, but the row says {gpus.value:g} GPUs"
            yield Fault(row.at(gpus.column), "gpus", said, gpus.column, gpus.text, f"{product:g}")
    for row in table.rows:
        gpus, model = row["gpus"], [row.number(k) or 1 for k in ("tp", "pp", "cp")]
        if not gpus or gpus.value <= 0:
            continue
        if not row["dp"] and (row["tp"] or row["pp"]) and gpus.value % math.prod(model):
            said = f"tp x pp x cp = {math.prod(model):g} does not divide {gpus.value:g} GPUs"
            yield Fault(row.at(gpus.column), "gpus", said, gpus.column, gpus.text, "a multiple")
        nodes, each = row.number("nodes"), row.number("gpus_per_node")
        if nodes and each and nodes * each != gpus.value:
            said = (
                f"{nodes:g} nodes x {each:g} GPUs = {nodes * each:g},"
                f" but the row says {gpus.value:g} GPUs"
            )
            yield Fault(
                row.at(gpus.column), "gpus", said, gpus.column, gpus.text, f"{nodes * each:g}"
            )
        elif each and gpus.value > each and gpus.value % each:
            said = f"{gpus.value:g} GPUs are no whole number of nodes of {each:g}"
            yield Fault(
                row.at(gpus.column),
                "gpus",
                said,
                gpus.column,
                gpus.text,
                f"a multiple of {each:g}",
                "likely",
            )


def _nodes(table: AnyTable) -> Iterator[Fault]:
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
            yield Fault(
                row.at(gpus.column), "gpus", said, gpus.column, gpus.text, expected, "likely"
            )


def _batch(table: AnyTable) -> Iterator[Fault]:
    """micro batch x accumulation x dp is the global batch."""
    cases = []
    for row in table.rows:
        micro, gas = row.number("micro_batch"), row.number("gas")
        dp = row.number("dp") or _derived_dp(row)
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
                yield Fault(
                    row.at(cell.column), "batch", said, cell.column, cell.text, "a multiple"
                )
            continue
        product = micro * gas * dp
        if not batch.low <= product <= batch.high and (row["dp"] or 2 * holds > stated):
            said = (
                f"micro batch {micro:g} x accumulation {gas:g} x dp {dp:g} = {product:g},"
                f" but the row says a global batch of {batch.value:g}"
            )
            yield Fault(row.at(cell.column), "batch", said, cell.column, cell.text, f"{product:g}")


def _rate(table: AnyTable) -> Iterator[Fault]:
    """tokens/s x seconds = batch x sequence; samples/s likewise; rates of one GPU and of all."""

    def tokens(row: Line) -> tuple | None:
        name = "tokens_per_s" if row["tokens_per_s"] else "tokens_per_s_gpu"
        printed, work = tokens_rate(row), tokens_of_step(row)
        expected = _over(work, _span(row["step_s"]))
        if printed is None or expected is None:
            return None
        step, all_gpus = row["step_s"], "" if name == "tokens_per_s" else " of one GPU"
        words = f"{_middle(work):.6g} tokens a step / {step.text} s give {_middle(expected):.6g}/s"
        return name, printed, expected, words + (f" on all GPUs, not{all_gpus}" if all_gpus else "")

    def samples(row: Line) -> tuple | None:
        name = "samples_per_s" if row["samples_per_s"] else "samples_per_s_gpu"
        printed = _span(row["samples_per_s"]) or _product(
            _span(row["samples_per_s_gpu"]), _span(row["gpus"])
        )
        expected = _over(_span(row["global_batch"]), _span(row["step_s"]))
        if printed is None or expected is None:
            return None
        words = (
            f"batch {row['global_batch'].text} / {row['step_s'].text} s give"
            f" {_middle(expected):.6g}/s"
        )
        return name, printed, expected, words

    def both(row: Line) -> tuple | None:
        printed, expected = _span(row["tokens_per_s"]), _span(row["samples_per_s"])
        expected = _product(expected, _span(row["seq_len"]))
        if printed is None or expected is None:
            return None
        words = (
            f"{row['samples_per_s'].text} samples/s x {row['seq_len'].text} give"
            f" {_middle(expected):.6g}/s"
        )
        return "tokens_per_s", printed, expected, words

    def each(row: Line) -> tuple | None:
        printed = _product(_span(row["tokens_per_s_gpu"]), _span(row["gpus"]))
        expected = _span(row["tokens_per_s"])
        if printed is None or expected is None:
            return None
        words = f"x {row['gpus'].text} GPUs, but all GPUs make {row['tokens_per_s'].text}/s"
        return "tokens_per_s_gpu", printed, expected, words

    def days(row: Line) -> tuple | None:
        rate, printed = tokens_rate(row), _span(row["train_days"])
        if rate is None or printed is None:
            return None
        whole = float(row.words["train_tokens"])
        expected = _over((whole / 86400,) * 2, rate)
        words = f"{whole:.3g} tokens at {_middle(rate):.6g}/s take {_middle(expected):.4g} days"
        return "train_days", printed, expected, words

    def whole(row: Line) -> tuple | None:
        printed, expected = _span(row["tokens"]), _product(tokens_of_step(row), _span(row["steps"]))
        if printed is None or expected is None:
            return None
        return "tokens", printed, expected, f"steps x batch x sequence give {_middle(expected):.6g}"

    for identity in (tokens, samples, both, each, days, whole):
        yield from _broken(table, "rate", identity)


def _tflops(table: AnyTable) -> Iterator[Fault]:
    """MFU x the card's peak is the TFLOP/s; their ratio is one number within a table."""

    def share(row: Line) -> tuple | None:
        peak, tflops, mfu = _peak(row), _span(row["tflops"]), _span(row["mfu"])
        if peak is None or tflops is None or mfu is None:
            return None
        expected = (tflops[0] / peak, tflops[1] / peak)
        words = (
            f"{row['tflops'].text} TFLOP/s over the {_card(row)}'s {peak:g} are"
            f" {_middle(expected):.4g}"
        )
        return "mfu", mfu, expected, words

    yield from _broken(table, "mfu", share, MOST_APART)  # 989 or 990, 2450 or 2500


def _jump(table: AnyTable) -> Iterator[Fault]:
    """FLOPs per token (TFLOP/s x GPUs / tokens/s) are one number for one model and sequence."""
    groups: dict[tuple, list[tuple[Line, str, Interval]]] = defaultdict(list)
    for row in table.rows:
        rate, gpus = any_rate(row), _span(row["gpus"])
        if not rate or not gpus:
            continue
        keys = [
            row.number(k)
            for k in ("params_b", "layers", "hidden", "seq_len", "vocab", "ffn", "heads")
        ]
        model = (*keys, row.words.get("model", ""), row.words.get("around", ""))
        recompute = row.words.get("recompute", "")
        for name in ("tflops", "mfu", "hfu"):
            span = _span(row[name])
            if span is None:
                continue
            if name != "tflops":
                # The publisher's own peak is not known: one card and one precision at a time.
                about = (row.words.get("precision", ""), row.words.get("gpu_type", ""))
            else:
                about = (recompute,)
            work = _over(_product(span, gpus), rate)
            groups[(name, *model, *about, *_formula(row))].append((row, name, work))
    for members in groups.values():
        if len(members) < 2:
            continue
        spans = [span for *_, span in members]
        point, held = _common(spans)
        misses = sorted(_apart(span, (point, point)) for span in spans)
        if len(held) <= len(members) / 2:  # averaged apart, or several conventions
            allowed = 3 * median(misses)
            if 0 < allowed < MOST_APART:
                held = {i for i, s in enumerate(spans) if _apart(s, (point, point)) <= allowed}
        held |= {i for i, s in enumerate(spans) if _apart(s, (point, point)) <= AVERAGED}
        known = any(members[0][0][k] for k in ("params_b", "layers")) or members[0][0].words.get(
            "model"
        )
        if not known and len(held) <= len(members) / 2:
            continue  # nothing says that these rows are of one model
        if len(held) == len(members):
            continue
        if len(members) == 2:
            ratio = _middle(spans[1]) / _middle(spans[0])
            odd, against, sure = [1], spans[0], "likely"
            if abs(ratio - 1) < MOST_APART:
                continue
        else:
            odd, against = [i for i in range(len(members)) if i not in held], (point, point)
            sure = "certain" if len(held) > len(members) / 2 else "likely"
        for i in odd:
            row, name, span = members[i]
            ratio = _middle(span) / _middle(against)
            value = row[name]
            said = (
                f"{value.column} {value.text}: its FLOPs per token are {_times(ratio)} of"
                f" {len(held)} of {len(members)} rows of the same model"
            )
            if 0.7 < ratio < 1.4:
                said = said.replace(" of ", " against ", 1)
            percent = 100 if name != "tflops" and "%" in value.text + value.column else 1
            shown = f"{percent * value.value / ratio:.4g}" + " %" * (percent == 100)
            yield Fault(row.at(value.column), "jump", said, value.column, value.text, shown, sure)
    yield from _across(groups)


def _across(groups: dict[tuple, list[tuple[Line, str, Interval]]]) -> Iterator[Fault]:
    """MFU far from that of the other cards and precisions of the model, by each card's own peak.

    A publisher's peak may differ from ours by a little, so only what is far is a finding.
    """
    models: dict[tuple, list[tuple[Line, str, float]]] = defaultdict(list)
    for (name, *model), members in groups.items():
        for row, _, span in members:
            if name == "mfu" and (peak := _peak(row)) and row["params_b"]:
                models[tuple(model[:8])].append((row, name, _middle(span) * peak))
    for members in models.values():
        usual = median(work for *_, work in members)
        for row, name, work in members:
            near = sum(abs(math.log(w / usual)) < 0.05 for *_, w in members)
            if near > len(members) / 2 and abs(math.log(work / usual)) > 0.1:
                value, ratio = row[name], work / usual
                said = (
                    f"{value.column} {value.text}: its FLOPs per token by the {_card(row)}'s peak"
                    f" are {ratio:.3g} times those of {near} of {len(members)} rows of the model"
                )
                shown = f"{value.value / ratio:.4g}"
                yield Fault(
                    row.at(value.column), "jump", said, value.column, value.text, shown, "likely"
                )


def _formula(row: Line) -> tuple[str, ...]:
    return tuple(
        t for h, t in row.cells.items() if "formula" in h.lower() or "convention" in h.lower()
    )


def _bounds(table: AnyTable) -> Iterator[Fault]:
    """No result is above its own bound: the card's peak, its memory, 100 %."""
    for row in table.rows:
        peak = _peak(row) or max(_peaks(row).values(), default=None)
        tflops, size = row["tflops"], row.number("params_b")
        if tflops and peak and tflops.low > peak:
            said = f"TFLOPs {tflops.value:g} are above the {_card(row)}'s peak of {peak:g}"
            yield Fault(
                row.at(tflops.column), "peak", said, tflops.column, tflops.text, f"at most {peak:g}"
            )
        for name in ("mfu", "hfu"):
            share = row[name]
            if share and share.low > 1:
                said = f"{share.column} {share.text} is above 100 %"
                yield Fault(
                    row.at(share.column), "peak", said, share.column, share.text, "at most 100 %"
                )
        memory, card = row["memory_gb"], find_gpu(_card(row))
        room = row.number("gpu_memory_gb") or (card.memory_gb if card else None)
        if card and room:
            room = max(room, card.memory_gb) if not row["gpu_memory_gb"] else room
        if memory and room and any_rate(row) and memory.low > 1.1 * room:
            said = f"{memory.column} {memory.text}: a card has {room:g} GB"
            yield Fault(
                row.at(memory.column),
                "memory",
                said,
                memory.column,
                memory.text,
                f"at most {room:g}",
                "likely",
            )
        rate, gpus = any_rate(row), row.number("gpus")
        if not (rate and gpus and size):
            continue
        shape = [row.number(k) for k in ("layers", "hidden", "seq_len")]
        attention = 12 * math.prod(shape) if None not in shape else 0.0
        if not attention and (row.number("seq_len") or 0) > 8192:
            continue  # attention may be most of the work
        # TFLOP/s per GPU by 6 N, and with the attention of all positions
        work = 6 * size * 1e9 * _middle(rate) / gpus / 1e12
        most = work + attention * _middle(rate) / gpus / 1e12
        cell = next(row[k] for k in ("step_s", "tokens_per_s", "tokens_per_s_gpu") if row[k])
        if peak and work > 1.1 * peak and not _is_mixture(row):
            said = (
                f"{cell.column} {cell.text}: 6 x {size:g}B x tokens/s / GPUs = {work:.4g} TFLOP/s a"
                f" GPU, above the {_card(row)}'s peak of {peak:g}"
            )
            yield Fault(
                row.at(cell.column), "peak", said, cell.column, cell.text, "slower", "certain"
            )
        elif tflops and tflops.value > 0 and not _is_mixture(row):
            ratio = tflops.value / work
            if not (ratio > 0.6 and tflops.value < 2 * most):
                said = (
                    f"{tflops.column} {tflops.text}: 6 x {size:g}B x tokens/s / GPUs = {work:.4g}"
                    f" TFLOP/s; attention and recomputation do not make it {ratio:.3g} times that"
                )
                yield Fault(
                    row.at(tflops.column),
                    "size",
                    said,
                    tflops.column,
                    tflops.text,
                    f"{work:.4g}",
                    "likely",
                )


def _speedup(table: AnyTable) -> Iterator[Fault]:
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
            one, other = _span(base[name]), _span(row[name])
            if one and other:
                ratios[name] = (
                    _over(one, other) if name in ("step_s", "wall_s") else _over(other, one)
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
) -> Iterator[Fault]:
    wide = (span[0] * (1 - AVERAGED) - (span[1] - span[0]) / 2, span[1] * (1 + AVERAGED))
    if any(_apart(wide, ratio) == 0 for ratio in ratios.values()):
        return
    name, ratio = min(ratios.items(), key=lambda item: _apart(span, item[1]))
    said = f"{cell.column} {cell.text}: the table's own {name} give {_middle(ratio):.3f}"
    yield Fault(row.at(cell.column), kind, said, cell.column, cell.text, f"{_middle(ratio):.3f}")


_NO_FACT = re.compile(
    r"(?i)^(?:id|source|table|notes?|remarks?|inferred|run|name|link|url|lint|line)$"
)


def _facts(row: Line) -> tuple:
    """What a row is: every cell that is neither measured nor a remark."""
    measured = {
        row[k].column
        for k in (*MEASURED, "tokens_per_s_gpu", "samples_per_s_gpu", "tflops_all")
        if row[k]
    }
    return tuple(
        (h, t)
        for h, t in row.cells.items()
        if h not in measured
        and not _NO_FACT.match(h)
        and not re.search(r"(?i)status|date|std|note", h)
    )


def _equal(table: AnyTable) -> Iterator[Fault]:
    """Different configurations do not print equal results; one run does not stand twice."""
    keys = (
        "step_s",
        "tokens_per_s",
        "tokens_per_s_gpu",
        "samples_per_s",
        "tflops",
        "mfu",
        "wall_s",
    )
    names = [k for k in keys if sum(bool(row[k]) for row in table.rows) > 1]
    groups: dict[tuple, list[Line]] = defaultdict(list)
    for row in table.rows:
        printed = tuple((k, row[k].text) for k in names if row[k])
        if printed:
            groups[printed].append(row)
    fewest = min((row.number("gpus", math.inf) for row in table.rows), default=math.inf)
    for printed, rows in groups.items():
        if len(rows) < 2:
            continue
        sharpest = min(
            (rows[0][k].high - rows[0][k].low) / max(rows[0][k].value, 1e-12) for k, _ in printed
        )
        for one, other in combinations(rows, 2):
            cell = other[printed[0][0]]
            if _facts(one) == _facts(other):
                place = [
                    {h: t for h, t in r.cells.items() if re.match("(?i)table|source$", h)}
                    for r in (one, other)
                ]
                if (
                    place[0] != place[1]
                    or one.number("gpus", math.inf) <= fewest
                    or sharpest > 1e-2
                ):
                    continue
                said = f"the same run stands on line {one.line_no}, too"
                yield Fault(
                    other.at(cell.column),
                    "twice",
                    said,
                    cell.column,
                    cell.text,
                    "one row",
                    "possible",
                )
            elif sharpest < SHARP:
                differ = [
                    h for (h, a), (_, b) in zip(_facts(one), _facts(other), strict=False) if a != b
                ]
                said = (
                    f"{cell.column} {cell.text}: line {one.line_no}, another configuration"
                    f" ({', '.join(differ[:3])}), has equal results"
                )
                yield Fault(
                    other.at(cell.column),
                    "equal",
                    said,
                    cell.column,
                    cell.text,
                    "another number",
                    "likely",
                )


def _stale(table: AnyTable) -> Iterator[Fault]:
    """Tokens/s that stand beside two different times of the same batch are stale in one."""
    groups: dict[str, list[Line]] = defaultdict(list)
    for row in table.rows:
        rate = row["tokens_per_s"] or row["tokens_per_s_gpu"]
        if rate and row["step_s"] and not tokens_of_step(row):  # else the rule `rate` decides
            groups[rate.text].append(row)
    for one, *others in groups.values():
        for other in others:
            rate = other["tokens_per_s"] or other["tokens_per_s_gpu"]
            times = _span(one["step_s"]), _span(other["step_s"])
            if None in times or (rate.high - rate.low) / rate.value > 1e-3 or _apart(*times) < 0.01:
                continue
            said = (
                f"{rate.column} {rate.text} stands beside {one['step_s'].text} s on line"
                f" {one.line_no}, too"
            )
            yield Fault(
                other.at(rate.column),
                "rate",
                said,
                rate.column,
                rate.text,
                "another number",
                "likely",
            )


def _unit(table: AnyTable) -> Iterator[Fault]:
    """One row is not several times away from all others: a unit changed inside a column."""
    for name in (
        "step_s",
        "tokens_per_s",
        "tokens_per_s_gpu",
        "samples_per_s",
        "tflops",
        "mfu",
        "memory_gb",
    ):
        found = []
        for row in table.rows:
            value = row[name]
            if not value or value.value <= 0:
                continue
            scaled = value.value
            gpus, size = row.number("gpus"), row.number("params_b")
            if name == "step_s":
                batch = row.number("global_batch") or row.number("batch_tokens")
                if not batch or not gpus:
                    continue
                scaled *= gpus / batch / (row.number("seq_len") or 1) / (size or 1)
            elif name in ("tokens_per_s", "samples_per_s"):
                scaled *= (size or 1) / (gpus or 1)
            elif name == "tokens_per_s_gpu":
                scaled *= size or 1
            found.append((math.log(scaled), row, value))
        found.sort(key=lambda item: item[0])
        if len(found) < 4:
            continue
        few = max(1, len(found) // 20)
        for side in (found, found[::-1]):
            for count in range(1, few + 1):
                away = abs(side[count][0] - side[count - 1][0])
                spread = abs(side[-1][0] - side[count][0])
                if away > math.log(GAP) and away > spread / 2:
                    for _, row, value in side[:count]:
                        said = (
                            f"{value.column} {value.text}: per token, size and GPU"
                            f" {math.exp(away):.3g} times away from every other row: another unit?"
                        )
                        yield Fault(
                            row.at(value.column),
                            "unit",
                            said,
                            value.column,
                            value.text,
                            "",
                            "likely",
                        )
                    break


def _sums(table: AnyTable) -> Iterator[Fault]:
    """Shares that make 100 % in most rows make it in each."""
    shares: dict[Line, list[tuple[str, float, float]]] = {}
    headings = [h for h in table.rows[0].cells if "%" in h] if table.rows else []
    for number, row in enumerate(table.rows):
        parts = []
        for heading, text in row.cells.items():
            match = re.match(r"^\**(\d+(?:\.(\d+))?) ?(%?)\**$", text)
            if match and (match[3] or heading in headings):
                parts.append((heading, float(match[1]), 10.0 ** -len(match[2] or "")))
        shares[number] = parts
    full = [
        n
        for n, parts in shares.items()
        if len(parts) > 2
        and abs(sum(p for _, p, _ in parts) - 100) <= sum(u for *_, u in parts) / 2
    ]
    if len(full) < 2 or len(full) <= sum(len(parts) > 2 for parts in shares.values()) / 2:
        return
    for n, parts in shares.items():
        total = sum(p for _, p, _ in parts)
        if len(parts) == len(shares[full[0]]) and n not in full:
            row = table.rows[n]
            said = f"the shares of the row make {total:g} %, those of {len(full)} other rows 100 %"
            yield Fault(row.at(parts[-1][0]), "sum", said, parts[-1][0], f"{total:g}", "100")


_CLAIM = re.compile(r"(?i)\b(?:best|fastest|optimal)\b")


def _best(table: AnyTable) -> Iterator[Fault]:
    """A row that is called the best or the fastest is so among its own GPUs, model and batch."""
    for row in table.rows:
        claim = next(
            (
                h
                for h, t in row.cells.items()
                if len(t) < 40 and not _NO_FACT.match(h) and _CLAIM.search(t)
            ),
            "",
        )
        if not claim:
            continue
        same = ("gpus", "params_b", "global_batch", "seq_len", "layers", "hidden")
        peers = [
            r
            for r in table.rows
            if all(r.number(k) == row.number(k) for k in same)
            and r.words.get("model") == row.words.get("model")
        ]
        for name, sign in (
            ("tokens_per_s", 1),
            ("tokens_per_s_gpu", 1),
            ("samples_per_s", 1),
            ("step_s", -1),
            ("mfu", 1),
            ("tflops", 1),
        ):
            cell = row[name]
            if not cell:
                continue
            better = [
                r
                for r in peers
                if r[name]
                and sign * (r.number(name) - cell.value) > 0
                and _apart(_span(r[name]) or (1, 1), _span(cell) or (1, 1)) > 0
            ]
            if better:
                top = max(better, key=lambda r: sign * r.number(name))
                said = (
                    f"{row.cells[claim]!r}: {cell.column} {cell.text}, but line {top.line_no}"
                    f" has {top[name].text}"
                )
                yield Fault(
                    row.at(cell.column),
                    "best",
                    said,
                    cell.column,
                    cell.text,
                    top[name].text,
                    "likely",
                )
            break


_DATES = {
    "year-month-day": r"\d{4}-\d{1,2}(?:-\d{1,2})?(?:[T ].*)?",
    "year/month/day": r"\d{4}/\d{1,2}/\d{1,2}",
    "x/y/year": r"\d{1,2}/\d{1,2}/\d{2,4}",
    "day.month.year": r"\d{1,2}\.\d{1,2}\.\d{2,4}",
}


def _dates(table: AnyTable) -> Iterator[Fault]:
    """The dates of a column have one form, and exist."""
    columns = [h for h, what in table.columns.items() if what.name == "date"]
    for column in columns:
        forms: dict[str, list[Line]] = defaultdict(list)
        for row in table.rows:
            text = row.cells.get(column, "")
            for form, pattern in _DATES.items():
                if re.fullmatch(pattern, text):
                    forms[form].append(row)
            if match := re.match(r"\d{4}[-/](\d{1,2})(?:[-/](\d{1,2}))?", text):
                if not 1 <= int(match[1]) <= 12 or not 1 <= int(match[2] or 1) <= 31:
                    yield Fault(
                        row.at(column), "date", f"{text} is no date", column, text, "a date"
                    )
        usual = max(forms, key=lambda form: len(forms[form]), default="")
        for form, rows in forms.items():
            if form != usual and len(forms[usual]) > 2 * len(rows):
                for row in rows:
                    said = f"{column} {row.cells[column]} is {form}, the others are {usual}"
                    yield Fault(
                        row.at(column), "date", said, column, row.cells[column], usual, "possible"
                    )


RULES: dict[str, Callable[[AnyTable], Iterator[Fault]]] = {
    "gpus": _gpus,
    "nodes": _nodes,
    "batch": _batch,
    "bounds": _bounds,
    "rate": _rate,
    "mfu": _tflops,
    "jump": _jump,
    "speedup": _speedup,
    "unit": _unit,
    "equal": _equal,
    "stale": _stale,
    "sums": _sums,
    "best": _best,
    "dates": _dates,
}
