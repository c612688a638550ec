"""Rates against batch and time, and against the wall clock."""

from collections import defaultdict
from collections.abc import Iterator

from analysis.published.any_table import AnyTable, Line
from analysis.published.finding import Finding
from analysis.published.rules.broken import broken, figure, of_cell
from analysis.published.rules.intervals import apart, middle, product_of, ratio_of, span_of
from analysis.published.rules.rows import tokens_of_step, tokens_rate

WALL_CLOCK = 1.01  # wall clock over the time that the counted tokens took


def rates_follow(table: AnyTable) -> Iterator[Finding]:
    """tokens/s x seconds = batch x sequence; samples/s likewise; rates of one GPU and of all."""

    def tokens(row: Line) -> tuple | None:
        name = "tokens_per_s" if row["tokens_per_s"] else "tokens_per_s_gpu"
        printed, work = tokens_rate(row), tokens_of_step(row)
        expected = ratio_of(work, span_of(row["step_s"]))
        if printed is None or expected is None:
            return None
        step, all_gpus = row["step_s"], "" if name == "tokens_per_s" else " of one GPU"
        batch = row.number("global_batch", 0) * row.number("seq_len", 0)
        batch = batch or row.number("batch_tokens")
        words = f"{figure(batch)} tokens a step / {figure(step.value)} s give"
        words += f" {figure(batch / step.value)}/s"
        return name, printed, expected, words + (f" on all GPUs, not{all_gpus}" if all_gpus else "")

    def samples(row: Line) -> tuple | None:
        name = "samples_per_s" if row["samples_per_s"] else "samples_per_s_gpu"
        printed = span_of(row["samples_per_s"]) or product_of(
            span_of(row["samples_per_s_gpu"]), span_of(row["gpus"])
        )
        expected = ratio_of(span_of(row["global_batch"]), span_of(row["step_s"]))
        if printed is None or expected is None:
            return None
        batch, step_s = row["global_batch"], row["step_s"].value
        rate = figure(batch.value / step_s)
        words = f"batch {batch.text} / {figure(step_s)} s give {rate}/s"
        return name, printed, expected, words

    def both(row: Line) -> tuple | None:
        printed, expected = span_of(row["tokens_per_s"]), span_of(row["samples_per_s"])
        expected = product_of(expected, span_of(row["seq_len"]))
        if printed is None or expected is None:
            return None
        rate, length = row["samples_per_s"], row["seq_len"]
        words = f"{rate.text} samples/s x {length.text} give {figure(rate.value * length.value)}/s"
        return "tokens_per_s", printed, expected, words

    def each(row: Line) -> tuple | None:
        printed = product_of(span_of(row["tokens_per_s_gpu"]), span_of(row["gpus"]))
        expected = span_of(row["tokens_per_s"])
        if printed is None or expected is None:
            return None
        words = f"x {row['gpus'].text} GPUs, but all GPUs make {row['tokens_per_s'].text}/s"
        return "tokens_per_s_gpu", printed, expected, words

    def days(row: Line) -> tuple | None:
        rate, printed = tokens_rate(row), span_of(row["train_days"])
        if rate is None or printed is None:
            return None
        whole = float(row.words["train_tokens"])
        expected = ratio_of((whole / 86400,) * 2, rate)
        words = f"{whole:.3g} tokens at {figure(middle(rate))}/s take {middle(expected):.4g} days"
        return "train_days", printed, expected, words

    def whole(row: Line) -> tuple | None:
        printed, expected = (
            span_of(row["tokens"]),
            product_of(tokens_of_step(row), span_of(row["steps"])),
        )
        if printed is None or expected is None:
            return None
        return (
            "tokens",
            printed,
            expected,
            f"steps x batch x sequence give {figure(middle(expected))}",
        )

    for identity in (tokens, samples, both, each, days, whole):
        yield from broken(table, "rate", identity)


def stale_rates(table: AnyTable) -> Iterator[Finding]:
    """Tokens/s that stand beside two different times of the same batch are stale in one."""
    groups: dict[str, list[Line]] = defaultdict(list)
    for row in table.rows:
        rate = row["tokens_per_s"] or row["tokens_per_s_gpu"]
        if rate and row["step_s"] and not tokens_of_step(row):  # else the rule `rate` decides
            groups[rate.text].append(row)
    for one, *others in groups.values():
        for other in others:
            rate = other["tokens_per_s"] or other["tokens_per_s_gpu"]
            times = span_of(one["step_s"]), span_of(other["step_s"])
            if None in times or (rate.high - rate.low) / rate.value > 1e-3 or apart(*times) < 0.01:
                continue
            said = (
                f"{rate.column} {rate.text} stands beside {figure(one['step_s'].value)} s on line"
                f" {one.line_no}, too"
            )
            yield of_cell(other, rate, "rate", said, "another number", "likely")


def wall_clocks(table: AnyTable) -> Iterator[Finding]:
    """A wall clock is not longer than its tokens take at the tokens/s printed beside it."""
    for row in table.rows:
        rate, wall = row.number("tokens_per_s"), row["wall_s"]
        done = row.number("tokens") or table.stated.tokens
        if rate and wall and done and wall.value > WALL_CLOCK * done / rate:
            took = f"{done:.0f} tokens at {rate:.2f}/s take {done / rate:.2f} s"
            said = f"wall clock {wall.value:g} s, but {took}: it includes evaluation or start-up"
            yield of_cell(row, wall, "wall clock", said, f"{done / rate:.2f}")
