"""TFLOP/s and MFU against each other, the rows of one model, and the card."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from statistics import median

from analysis.published.any_table import AnyTable, Line, Stated
from analysis.published.finding import Finding
from analysis.published.rules.broken import as_printed, as_ratio, broken, figure, of_cell
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
    any_rate,
    card_of,
    is_mixture,
    peak_of,
    peaks_of,
    samples_rate,
)
from models.config import GPTConfig
from models.flops import CONVENTIONS, stated_size_tflops


def mfu_of_peak(table: AnyTable) -> Iterator[Finding]:
    """MFU x the card's peak is the TFLOP/s; their ratio is one number within a table."""

    def share(row: Line) -> tuple | None:
        peak, tflops, mfu = peak_of(row), span_of(row["tflops"]), span_of(row["mfu"])
        if peak is None or tflops is None or mfu is None:
            return None
        expected = (tflops[0] / peak, tflops[1] / peak)
        words = (
            f"{row['tflops'].text} TFLOP/s over the {card_of(row).name}'s {peak:g} are"
            f" {as_printed(row['mfu'], row['tflops'].value / peak)}"
        )
        return "mfu", mfu, expected, words

    yield from broken(table, "mfu", share, MOST_APART)  # 989 or 990, 2450 or 2500
    yield from _one_peak(table)


def _one_peak(table: AnyTable) -> Iterator[Finding]:
    """Where the card or its precision is not stated, TFLOP/s over MFU is one peak all the same."""
    groups: dict[tuple[str, str], list[tuple[Line, Interval]]] = defaultdict(list)
    for row in table.rows:
        peak = ratio_of(span_of(row["tflops"]), span_of(row["mfu"]))
        if peak and peak_of(row) is None:
            card = re.sub(r"-\d+$", "", row.words.get("gpu_type", ""))  # v5p-128: chips of a slice
            groups[card, row.words.get("precision", "")].append((row, peak))
    for members in groups.values():
        point, held = common([peak for _, peak in members])
        if len(members) < 3 or len(held) <= len(members) / 2:
            continue
        for i, (row, peak) in enumerate(members):
            if i not in held and apart(peak, (point, point)) > MOST_APART:
                value = row["mfu"]
                said = (
                    f"{value.column} {value.text}: {row['tflops'].text} TFLOP/s over it are a peak"
                    f" of {figure(middle(peak), 4)}, in {len(held)} of {len(members)} rows"
                    f" {figure(point, 4)}"
                )
                shown = as_printed(value, middle(peak) / point * value.value)
                yield of_cell(row, value, "mfu", said, shown)


def of_all_gpus(table: AnyTable) -> Iterator[Finding]:
    """TFLOP/s of one GPU x GPUs are those of all."""

    def whole(row: Line) -> tuple | None:
        printed = span_of(row["tflops_all"])
        expected = product_of(span_of(row["tflops"]), span_of(row["gpus"]))
        if not printed or not expected or row["tflops"].column == row["tflops_all"].column:
            return None
        words = f"{row['tflops'].text} TFLOP/s x {row['gpus'].text} GPUs are {middle(expected):.5g}"
        return "tflops_all", printed, expected, words

    yield from broken(table, "tflops", whole)


def stated_formula(table: AnyTable) -> Iterator[Finding]:
    """TFLOP/s follow from the seconds by the formula that the row or the document states."""
    for row in table.rows:
        printed, step_s = row["tflops"], row["step_s"]
        work = _stated_work(row, table.stated)  # TFLOP per GPU and step
        if printed is None or not step_s or step_s.value <= 0 or work is None:
            continue
        half = printed.value - printed.low
        low, high = work / step_s.high - half, work / max(step_s.low, 1e-12) + half
        if not low * (1 - AVERAGED) <= printed.value <= high * (1 + AVERAGED):
            given = f"{work / step_s.value:.1f}"
            said = f"TFLOPs {printed.value:g} do not follow: {step_s.value:g} s give {given}"
            yield of_cell(row, printed, "tflops", said, given)


def _stated_work(row: Line, stated: Stated) -> float | None:
    """TFLOP per GPU and step under the formula that the row or its document states."""
    formula = " ".join(formula_of(row)) or stated.formula
    gpus, size, batch = (row.number(k) for k in ("gpus", "params_b", "global_batch"))
    seq_len = row.number("seq_len") or stated.seq_len
    if "estimate" in formula or not (gpus and batch and seq_len):  # the author estimated it
        return None
    if match := re.match(r"([68])PT", formula):
        if not size:
            return None
        return stated_size_tflops(size * 1e9, batch * seq_len, 1.0, gpus, match[1] == "8")
    if re.search(r"96\*?B\*?s\*?l\*?h\^2", formula):
        names = {"n_layer": "layers", "hidden": "hidden", "vocab_size": "vocab"}
        sizes = {ours: row.number(theirs) for ours, theirs in names.items()}
        if None in sizes.values():
            return None
        config = GPTConfig(
            n_head=1, max_seq_len=int(seq_len), **{k: int(v) for k, v in sizes.items()}
        )
        return CONVENTIONS["sc21"](config, int(seq_len), True) * batch * seq_len / gpus / 1e12
    return None


def work_per_token(table: AnyTable) -> Iterator[Finding]:
    """FLOPs per token (TFLOP/s x GPUs / tokens/s) are one number for one model and sequence."""
    groups: dict[tuple, list[tuple[Line, str, Interval]]] = defaultdict(list)
    no_tokens = not any(row["seq_len"] or any_rate(row) for row in table.rows)  # then per sample
    for row in table.rows:
        each = span_of(row["tokens_per_s_gpu"])
        each = each or ratio_of(any_rate(row), span_of(row["gpus"]))
        if no_tokens:
            each = ratio_of(samples_rate(row), span_of(row["gpus"]))
        if not each or (row["gpus"] and not no_tokens and not any_rate(row)):
            continue
        keys = [
            row.number(k)
            for k in ("params_b", "layers", "hidden", "seq_len", "vocab", "ffn", "heads")
        ]
        model = (*keys, row.words.get("model", ""), row.words.get("around", ""))
        recompute = row.words.get("recompute", "")
        for name in ("tflops", "mfu", "hfu"):
            span = span_of(row[name])
            if span is None:
                continue
            if name != "tflops":
                # The publisher's own peak is not known: one card and one precision at a time.
                about = (row.words.get("precision", ""), row.words.get("gpu_type", ""))
            else:
                about = (recompute,)
            work = ratio_of(span, each)
            groups[(name, *model, *about, *formula_of(row))].append((row, name, work))
    unit = "sample" if no_tokens else "token"
    for members in groups.values():
        if len(members) < 2:
            continue
        spans = [span for *_, span in members]
        point, held = common(spans)
        misses = sorted(apart(span, (point, point)) for span in spans)
        if len(held) <= len(members) / 2:  # averaged apart, or several conventions
            allowed = 3 * median(misses)
            if 0 < allowed < MOST_APART:
                held = {i for i, s in enumerate(spans) if apart(s, (point, point)) <= allowed}
        held |= {i for i, s in enumerate(spans) if apart(s, (point, point)) <= AVERAGED}
        known = any(members[0][0][k] for k in ("params_b", "layers")) or members[0][0].words.get(
            "model"
        )
        if not known and len(held) <= len(members) / 2:
            continue  # nothing says that these rows are of one model
        if len(held) == len(members):
            continue
        if len(members) == 2:
            ratio = middle(spans[1]) / middle(spans[0])
            odd, against, sure = [1], spans[0], "likely"
            if abs(ratio - 1) < MOST_APART:
                continue
        else:
            odd, against = [i for i in range(len(members)) if i not in held], (point, point)
            sure = "certain" if len(held) > len(members) / 2 else "likely"
        rest = [row for i, (row, *_) in enumerate(members) if i not in odd]
        apart_by, convention = _told_apart([members[i][0] for i in odd], rest)
        for i in odd:
            row, name, span = members[i]
            ratio = middle(span) / middle(against)
            value = row[name]
            said = (
                f"{value.column} {value.text}: its FLOPs per {unit} are {as_ratio(ratio)} of"
                f" {len(held)} of {len(members)} rows of the same model"
            )
            if 0.7 < ratio < 1.4:
                said = said.replace(" of ", " against ", 1)
            shown = as_printed(value, value.value / ratio)
            yield of_cell(
                row, value, "jump", said + apart_by, shown, "likely" if convention else sure
            )
    yield from _across(groups)


def _told_apart(odd: list[Line], rest: list[Line]) -> tuple[str, bool]:
    """(words, whether a convention may explain it) for what all odd rows have and no other has."""
    for heading in odd[0].cells:
        if re.search(r"(?i)^(?:engine|release|version|framework|software|container)", heading):
            values = {row.cells.get(heading) for row in odd}
            if len(values) == 1 and not values & {row.cells.get(heading) for row in rest}:
                return f"; the convention of {heading} {values.pop()} may be another", True
    for name in ("pp", "tp", "cp", "ep", "vpp"):
        values = {row.number(name) for row in odd}
        others = {row.number(name) for row in rest}
        if None in values | others or len(values) > 1 or values & others:
            continue
        if len(odd) > 1 or len(others) == 1:  # one row alone has a layout of its own by chance
            they = " or ".join(f"{size:g}" for size in sorted(others))
            return f"; it has {name} {values.pop():g}, the others {they}", False
    return "", False


def _across(groups: dict[tuple, list[tuple[Line, str, Interval]]]) -> Iterator[Finding]:
    """MFU far from that of the other cards and precisions of the model, by each card's own peak.

    A publisher's peak may differ from ours by a little, so only what is far is a finding.
    """
    models: dict[tuple, list[tuple[Line, str, float]]] = defaultdict(list)
    for (name, *model), members in groups.items():
        for row, _, span in members:
            if name == "mfu" and (peak := peak_of(row)) and row["params_b"]:
                models[tuple(model[:8])].append((row, name, middle(span) * peak))
    for members in models.values():
        usual = median(work for *_, work in members)
        for row, name, work in members:
            near = sum(abs(math.log(w / usual)) < 0.05 for *_, w in members)
            if near > len(members) / 2 and abs(math.log(work / usual)) > 0.1:
                value, ratio, card = row[name], work / usual, card_of(row).name
                said = (
                    f"{value.column} {value.text}: its FLOPs per token by the {card}'s peak"
                    f" are {ratio:.3g} times those of {near} of {len(members)} rows of the model"
                )
                shown = f"{value.value / ratio:.4g}"
                yield of_cell(row, value, "jump", said, shown, "likely")


def formula_of(row: Line) -> tuple[str, ...]:
    return tuple(
        t for h, t in row.cells.items() if "formula" in h.lower() or "convention" in h.lower()
    )


def upper_bounds(table: AnyTable) -> Iterator[Finding]:
    """No result is above its own bound: the card's peak, its memory, 100 %."""
    for row in table.rows:
        peak = peak_of(row) or max(peaks_of(row).values(), default=None)
        tflops, size = row["tflops"], row.number("params_b")
        usual = peak_of(row) or peaks_of(row).get("fp16")  # where no precision is stated
        if tflops and peak and usual and tflops.low > usual:
            said = (
                f"{tflops.column} {tflops.text}: above the {card_of(row).name}'s peak of {usual:g}"
            )
            sure = "certain" if tflops.low > peak else "likely"
            yield of_cell(row, tflops, "peak", said, f"at most {usual:g}", sure)
        for name in ("mfu", "hfu"):
            share = row[name]
            if share and share.low > 1:
                said = f"{share.column} {share.text} is above 100 %"
                yield of_cell(row, share, "peak", said, "at most 100 %")
        memory, card = row["memory_gb"], card_of(row)
        room = row.number("gpu_memory_gb") or (card.memory_gb if card else None)
        if card and room:
            room = max(room, card.memory_gb) if not row["gpu_memory_gb"] else room
        if memory and room and any_rate(row) and memory.low > 1.1 * room:
            said = f"{memory.column} {memory.text}: a card has {room:g} GB"
            yield of_cell(row, memory, "memory", said, f"at most {room:g}", "likely")
        rate, gpus = any_rate(row), row.number("gpus")
        if not (rate and gpus and size):
            continue
        shape = [row.number(k) for k in ("layers", "hidden", "seq_len")]
        attention = 12 * math.prod(shape) if None not in shape else 0.0
        if not attention and (row.number("seq_len") or 0) > 8192:
            continue  # attention may be most of the work
        # TFLOP/s per GPU by 6 N, and with the attention of all positions
        work = 6 * size * 1e9 * middle(rate) / gpus / 1e12
        most = work + attention * middle(rate) / gpus / 1e12
        cell = next(row[k] for k in ("step_s", "tokens_per_s", "tokens_per_s_gpu") if row[k])
        if peak and work > 1.1 * peak and not is_mixture(row):
            said = (
                f"{cell.column} {cell.text}: 6 x {size:g}B x tokens/s / GPUs = {work:.4g} TFLOP/s a"
                f" GPU, above the {card_of(row).name}'s peak of {peak:g}"
            )
            yield of_cell(row, cell, "peak", said, "slower", "certain")
        elif tflops and tflops.value > 0 and not is_mixture(row):
            ratio = tflops.value / work
            if not (ratio > 0.6 and tflops.value < 2 * most):
                said = (
                    f"{tflops.column} {tflops.text}: 6 x {size:g}B x tokens/s / GPUs = {work:.4g}"
                    f" TFLOP/s; attention and recomputation do not make it {ratio:.3g} times that"
                )
                yield of_cell(row, tflops, "size", said, f"{work:.4g}", "likely")
