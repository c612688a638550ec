"""Rows of published measurements (a CSV with the columns of logs/published) as runs."""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

from analysis.common.reasons import NOTE, Reason
from analysis.logs.facts import FACTS
from analysis.logs.model import config_of
from analysis.logs.parsing.setting_names import read_settings, state
from analysis.logs.published_csv import Row, read_csv
from analysis.logs.record import Record
from analysis.runs.throughput import per_token
from base.errors import Reading
from models.config import SlidingWindow
from models.gpus import planning_gpu

# Columns -> the fact that they state; other columns are called as the fact.
_COLUMNS = "layers=n_layer heads=n_head kv_heads=n_kv_head ffn=ffn_hidden vocab=vocab_size"
_FACTS = FACTS | {column: FACTS[fact] for column, fact in (c.split("=") for c in _COLUMNS.split())}
# Columns -> the arguments of programs whose logs are read; other columns are called as these.
_ARGUMENTS = {name: fact.names.split()[0] for name, fact in _FACTS.items() if fact.names} | {
    "experts": "num_experts",
    "moe_ffn": "moe_ffn_hidden_size",
    "shared_ffn": "moe_shared_expert_intermediate_size",
    "dense_layers": "first_k_dense_replace",
    "moe_layer_freq": "expert_interval",
    "recompute": "recompute_granularity",
}
_PRECISIONS = ("fp4", "fp8", "bf16", "fp16")


def named_rows(path: Path, needed: tuple[str, ...] = ()) -> Iterator[tuple[str, Row]]:
    """Yields each row of a table, and what it is called."""
    for row in read_csv(path, needed).rows:
        yield row.text("id") or f"{path.stem}:{row.line_no}", row


def record_of(row: Row, source: str) -> Record:
    """Returns a row as a run: its settings, as far as it states them."""
    settings = {_ARGUMENTS.get(name, name): [text] for name, text in row.cells.items() if text}
    gated = row.text("glu").lower() in ("1", "1.0", "true", "yes")
    settings |= {"swiglu": [str(gated)], "position_embedding_type": ["rope"] if gated else []}
    settings["precision"] = []
    words = [name for name in _PRECISIONS if name in row.text("precision").lower()]
    settings |= {name: ["true"] for name in words[:1]}
    record = Record(source, "published", engine=row.text("engine") or None)
    state(record, read_settings(record, settings), "log")
    sizes = {field.name: row.number(field.name) for field in fields(SlidingWindow)}
    if sizes["window_size"]:
        record.model["window"] = {name: int(value or 0) for name, value in sizes.items()}
    record.gpu_type = planning_gpu(row.text("gpu_type")).name
    record.routing = row.text("routing") or None
    record.reasons.insert(0, Reason(NOTE, row.text("source")))
    if params := row.number("params_b"):
        record.params = params * 1e9
        record.model["tied"] = config_of(record).value is not None  # else an output layer beside
    return record


def with_rate(record: Record, row: Row) -> Record:
    """Returns the run with the tokens per second that its row states.

    Raises:
        ValueError: it did not end well, contradicts itself, or states no steady rate.
    """
    for remark in ("lint", "warm_up", "blocks"):  # blocks: of a hybrid, which no GPT is
        if row.text(remark):
            raise ValueError(f"{remark}: {row.text(remark)}")
    if row.text("status") not in ("", "ok"):
        raise ValueError(f"it ended: {row.text('status')}")
    rate = stated_rate(record, row)
    if not rate or not record.gpus:
        raise ValueError("no rate, or no number of GPUs")
    record.totals["tokens_per_s"] = rate
    return record


def stated_rate(record: Record, row: Row) -> float | None:
    """Returns the tokens per second of a row's run: by its seconds, as it is printed, or by its
    TFLOP/s under SC'21's equation 3. None where the row has none of them."""
    tokens, step_s = (record.global_batch or 0) * (record.seq_len or 0), row.number("step_s")
    if tokens and step_s:
        return tokens / step_s
    if rate := row.number("tokens_per_s"):
        return rate
    flops, tflops = per_token(record, "sc21").value, row.number("tflops")
    if flops and tflops and record.gpus and "eq.3" in row.text("formula"):
        return tflops * 1e12 * record.gpus / flops
    return None


def read_published(paths: Iterable[Path]) -> Reading[list[Record]]:
    """Returns the rows of all tables as runs, and (id, reason) of those that are left out."""
    records, left_out = [], []
    for path in paths:
        for name, row in named_rows(path):
            try:
                records.append(with_rate(record_of(row, name), row))
            except ValueError as error:
                left_out.append((name, str(error)))
    return Reading(records, left_out)
