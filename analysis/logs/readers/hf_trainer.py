"""Hugging Face Trainer: its console, trainer_state.json, train_results.json and all_results.json;
and what Axolotl, ms-swift (logging.jsonl) and LLaMA-Factory (trainer_log.jsonl) add to them.

    {'loss': 2.5893, 'learning_rate': 5e-06, 'epoch': 0.01}
    {'train_runtime': 919.097, 'train_samples_per_second': 1.088, 'train_steps_per_second': 0.017}

The loss lines carry no step and no time; the end line, one per rank, is about the whole run. The
mean step time is the runtime over the number of optimizer steps, where both are said. Of a resumed
run the runtime is that of the last part, and the printed rates, which count all steps, are wrong.
elapsed_time is a clock in whole seconds, of this start; train_speed is it over all steps so far.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np

from analysis.logs.parsing.failure_line import judge_end
from analysis.logs.parsing.fields import number, positive
from analysis.logs.parsing.json_values import document, integer, known, real, rows, steps_of
from analysis.logs.parsing.line_format import Format, fill_peak, last_known, last_number
from analysis.logs.parsing.lines import Columns, Line, table
from analysis.logs.parsing.logfile import Log
from analysis.logs.parsing.model_names import read_name
from analysis.logs.parsing.progress_bar import FINE, Bar, read_bars
from analysis.logs.parsing.setting_names import header_of, read_header, state
from analysis.logs.parsing.steps import put_steps
from analysis.logs.record import UNPADDED, Record, Refusal

# A number counts only with what stands behind a value of a dict; newer versions print strings.
_VALUE = (
    rb"['\"]?(-?(?:\d{1,20}(?:\.\d{0,20})?(?:e[-+]?\d{1,3})?|nan|inf|NaN|Infinity))['\"]?"
    rb"(?=, ['\"]|\})"
)
_LOSSES = (  # the console's, and a file's with one JSON object a line
    re.compile(rb"\{'loss': "),
    re.compile(rb"\{\"(?<![^\r\n]..)(?=loss\": |current_steps\": )"),
)
_NAMES = {name: name for name in ("loss", "grad_norm", "epoch", "train_runtime")}
_NAMES |= {"num_input_tokens_seen": "(?:num_input_tokens_seen|total_tokens)"}
_NAMES |= {
    "throughput": "throughput",
    "peak_gib": r"memory(?:/max_(?:mem_)?allocated ?)?\([Gg]i[Bb]\)",
}
_NAMES["mfu"] = "MFU"  # of ms-swift
_NAMES["tokens_per_s_per_gpu"] = "tokens(?:/train_per_sec|_per_second)_per_gpu"
_FIELDS = {
    name: re.compile(rb"['\"]%b['\"]: (?!null)(?:" % label.encode() + _VALUE + rb")?")
    for name, label in _NAMES.items()
}
_COUNTER = rb"['\"](?:global_step/max_steps|iteration)['\"]: ['\"]"
_FIELDS["global_step"] = re.compile(
    rb"(?:" + _COUNTER + rb"|\"current_steps\": )(\d{1,12})(?=[/,])"
)
_FIELDS["planned"] = re.compile(
    rb"(?:" + _COUNTER + rb"\d{1,12}/|\"total_steps\": )(\d{1,12})(?=['\",])"
)
# `1d 2h 3m 4s` or `1 day, 2:03:04`: a unit in seconds -> its count.
_ELAPSED = rb"elapsed_time['\"]: ['\"]"
_DAYS, _HOURS = rb"(?:\d{1,4}(?:d | days?, ))?", rb"(?:\d{1,2}(?:h |:))?"
_UNITS = {
    86400: rb"(\d{1,4})(?:d | days?, )",
    3600: _DAYS + rb"(\d{1,2})(?:h |:\d\d:)",
    60: _DAYS + _HOURS + rb"(\d{1,2})(?:m |:\d\d['\"])",
    1: _DAYS + _HOURS + rb"(?:\d{1,2}(?:m |:))?(\d{1,2})s?['\"]",
}
_FIELDS |= {f"elapsed_{seconds}": re.compile(_ELAPSED + unit) for seconds, unit in _UNITS.items()}
_SPEEDS = {"train_speed(s/it)": False, "train_speed(iter/s)": True}  # -> whether it is a rate
_PROGRAMS = {b"axolotl.": "Axolotl", b"[INFO:swift]": "ms-swift", b'"train_speed(': "ms-swift"}
_PROGRAMS |= {b"'train_speed(": "ms-swift", b"llamafactory.": "LLaMA-Factory"}
_PROGRAMS[b'"current_steps": '] = "LLaMA-Factory"
_ADAPTERS = re.compile(
    rb"trainable params: ([\d,]{1,20}) \|\| all params: (?!\1 )"
    rb"|Params \([\d.]{1,16}M Trainable \[\d?\d\."
)
_ALL_TRAINED = re.compile(
    rb"trainable params: ([\d,]{1,20}) \|\| all params: \1 |Params \([\d.]{1,16}M Trainable \[100\."
)
_END = re.compile(rb"\{['\"]train_runtime['\"]: " + _VALUE + rb"[^\r\n{}]{0,600}\}")
_RATE = {
    "samples_per_s": re.compile(rb"['\"]train_samples_per_second['\"]: " + _VALUE),
    "loss": re.compile(rb"['\"]train_loss['\"]: " + _VALUE),
    "steps_per_s": re.compile(rb"['\"]train_steps_per_second['\"]: " + _VALUE),
    "epoch": _FIELDS["epoch"],
    "num_input_tokens_seen": _FIELDS["num_input_tokens_seen"],
}
_SIZES = {
    "micro_batch": rb"Instantaneous batch size per device = ([\d,]{1,9})",
    "global_batch": rb"Total train batch size \(w\. [^)]{1,60}\) = ([\d,]{1,9})",
    "n_micro": rb"Gradient Accumulation steps = ([\d,]{1,9})",
    "planned_steps": rb"Total optimization steps = ([\d,]{1,12})",
    "trained": rb"Number of trainable parameters = ([\d,]{1,20})",
}
_SIZES = {
    name: size + rb"(?=[ \t]{0,8}[\r\n\x1b])" for name, size in _SIZES.items()
}  # the line's end
_RESUMED = rb"Continuing training from global step ([\d,]{1,12})"
_EXAMPLES = rb"Num examples = ([\d,]{1,15})"
_OVERRIDES = re.compile(rb"config_overrides[= ]([^\s'\"]{1,300})")
_OVERRIDE = re.compile(rb"(n_embd|n_head|n_layer|n_positions)=(\d{1,7})")
_MODEL_NAME = re.compile(rb"model_name_or_path[= '\"]{1,4}([\w./-]{2,100})")
_DEEPSPEED_RANKS = rb"config\.py:\d{1,5}:print\][ \t]{1,8}world_size \.{2,40} (\d{1,6})"
_RUN_CLM = 1024  # run_clm.py cuts longer contexts to it, unless --block_size is given
_RENAMED = {"n_embd": "hidden", "n_positions": "max_seq_len"}
_RESULTS = {"wall_s": "train_runtime", "samples_per_s": "train_samples_per_second"}
_RESULTS |= {"loss": "train_loss"}
_LEAST = 0.05  # steps per second, of which three decimals are 1 %
_QUIET = np.errstate(invalid="ignore", divide="ignore", over="ignore")  # damaged numbers
_SAME_TIME = 1.1  # a factor between the runtimes that the ranks of a run print
_SAME_LOSS = 0.8  # train_loss over the mean of the losses; a resumed run divides by all steps


def _read(log: Log, record: Record) -> None:
    """Reads one log. The totals are filled where an end line stands in it."""
    record.engine = "HF Trainer"
    is_lines = log.head[:2] == b"{'" or any(pattern.match(log.head) for pattern in _LOSSES)
    if log.head[:1] == b"{" and not is_lines:
        try:
            content = document(str(log.path), log.text(), record.format)
        except Refusal:
            record.note("opens like a JSON document, but is none: read as a console log")
        else:
            return _read_document(log, record, content)
    for pattern in _LOSSES:
        if len((columns := table(log, Line(pattern, _FIELDS), record))["at"]):
            break
    at_goal = bool((columns["global_step"] >= columns["planned"]).any())
    if pattern is _LOSSES[-1]:  # its last object is about the end, without a loss
        has_loss = ~np.isnan(columns["loss"]) | (columns["nan_loss"] > 0)
        columns = {name: values[has_loss] for name, values in columns.items()}
    columns = once(columns, _keys(log, columns), record)
    ends = read_ends(record, log)
    first_at = min([*columns["at"][:1].astype(int), *ends[:1]], default=None)
    header = header_of(log, first_at)
    _read_children(record, columns, header + log.slice(first_at or 0, (first_at or 0) + 1000))
    facts = {name: last_number(pattern, header) for name, pattern in _SIZES.items()}
    record.trained = facts.pop("trained")
    if _ALL_TRAINED.search(header):
        facts["params"] = record.trained
    facts["planned_steps"] = facts["planned_steps"] or last_known(columns["planned"])
    overrides = b"".join(_OVERRIDES.findall(header)[-1:])  # configs printed later do not count
    for name, value in _OVERRIDE.findall(overrides):
        facts[_RENAMED.get(name.decode(), name.decode())] = int(value)
    state(record, facts, "log")
    read_header(record, header)
    if b"gradient_checkpointing=true" in overrides:
        record.recompute = "full"
    for name in _MODEL_NAME.findall(header)[-1:]:
        read_name(record, name.decode())
    state(record, {"gpus": deepspeed_ranks(header)}, "log")
    if not record.seq_len and b"run_clm" in header:
        block_size = last_number(rb"--block_size[= ]{1,3}(\d{1,7})", header)
        default = min(record.model.get("max_seq_len", 0), _RUN_CLM) or None
        state(record, {"seq_len": block_size or default}, "log" if block_size else "default")
    at_end = {name: record.totals.pop(name, 0.0) for name in ("num_input_tokens_seen", "epoch")}
    at_end = {name: value if 0 < value < math.inf else 0.0 for name, value in at_end.items()}
    share = _share_before(columns["epoch"], at_end["epoch"])
    before = int(last_number(_RESUMED, header) or round(share * (record.planned_steps or 0)))
    early = _ended_early(record, header, at_end["epoch"])
    steps = _iterations(columns, 0 if early else record.planned_steps or 0, at_end)
    state(record, {"seq_len": _tokens_each(columns, steps, record.global_batch)}, "log")
    runtime_s = columns.pop("train_runtime")
    columns["step_s"] = _clocked(steps, runtime_s, before)
    if not np.isfinite(runtime_s).any():
        clocked_steps, elapsed_s = steps, columns["elapsed_s"]
        if not ends and not np.isfinite(elapsed_s).any():
            clocked_steps, elapsed_s = _bars_before(log, columns["at"], record.planned_steps)
        columns["step_s"] = _by_clock(record, clocked_steps, elapsed_s)
    columns["iteration"] = np.where(np.isnan(steps), columns["iteration"], steps)
    put_steps(record, columns, log, averages=bool(np.isfinite(columns["step_s"]).any()))
    if at_goal:
        record.completed = True
    if ends:
        record.last_at, record.completed, record.whole_run = ends[-1], True, True
        _doubt_epochs(record, log, columns, share)
        if not before and len(record.steps) == 1:  # its epoch tells nothing
            _doubt_losses(record)
    _time(record, None if early else record.planned_steps, before)
    judge_end(record, log, None if len(record.steps) else ends)


def _read_children(record: Record, columns: Columns, text: bytes) -> None:
    """Fills what the programs that train through the Trainer print: their clock, rates and memory.
    text: what stands before the first step, and that step."""
    record.engine = next((name for mark, name in _PROGRAMS.items() if mark in text), record.engine)
    units = {seconds: columns.pop(f"elapsed_{seconds}") for seconds in _UNITS}
    parts = [np.nan_to_num(count) * seconds for seconds, count in units.items()]
    columns["elapsed_s"] = np.where(np.isnan(units[1]), np.nan, sum(parts))
    tokens, throughput = columns["num_input_tokens_seen"], columns.pop("throughput")
    if np.isfinite(throughput).any():  # tokens so far over the runtime, to more digits than seconds
        columns["train_runtime"] = tokens / positive(throughput)
        since = np.diff(columns["train_runtime"], prepend=np.nan)
        columns["tokens_per_s"] = np.diff(tokens, prepend=np.nan) / positive(since)
        record.doubt(UNPADDED, "its batches are as long as their longest sequence")
    fill_peak(record, columns.pop("peak_gib"))
    if np.isfinite(columns["tokens_per_s_per_gpu"]).any():
        record.doubt(UNPADDED, "its tokens/s count trained tokens alone")
    if ranks := re.findall(rb"gather_len_batches: \[([\d, ]{1,9000})\]", text):
        state(record, {"gpus": len(ranks[-1].split(b","))}, "log")
    if _ADAPTERS.search(text):
        record.uncounted.append("frozen weights")


def _bars_before(
    log: Log, places: np.ndarray, planned: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps and the seconds that the progress bar of training shows before each place;
    NaN where there is none. planned: its steps; where they are not known, they are those of most
    bars that stand before these places, for evaluations have bars, too."""
    bars = list(read_bars(log, rb"\d%")) if len(places) else []
    if not planned:
        before = np.searchsorted([bar.at for bar in bars], places) - 1
        counts = Counter(bars[index].planned for index in before if index >= 0)
        planned = max(counts, key=counts.__getitem__, default=None)
    bars = [Bar(-1, 0, 0, 0, 0), *(bar for bar in bars if bar.planned == planned)]
    before = np.searchsorted([bar.at for bar in bars], places) - 1
    drawn = np.array(bars, float)[before]
    drawn[before == 0] = np.nan
    return drawn[:, Bar._fields.index("steps")], drawn[:, Bar._fields.index("elapsed_s")]


def _by_clock(
    record: Record, steps: np.ndarray, elapsed_s: np.ndarray, resolution_s: float = 1.0
) -> np.ndarray:
    """Returns the step times by a clock, where its digits are fine enough between two lines; else
    fills the mean since the first line of this start. resolution_s: of the clock's last digit."""
    known = np.flatnonzero(np.isfinite(steps) & np.isfinite(elapsed_s))
    back = np.flatnonzero(np.diff(elapsed_s[known]) < 0)
    known = known[back[-1] + 1 :] if len(back) else known
    between = np.diff(elapsed_s[known])
    if len(between) and np.median(between) >= FINE * resolution_s:
        return _clocked(steps, elapsed_s)
    n_steps = int(steps[known[-1]] - steps[known[0]]) if len(known) else 0
    if between.sum() >= FINE * resolution_s and n_steps > 0:
        record.totals["step_s_mean"] = float(between.sum() / n_steps)
        record.mean_of = f"the time of its last {n_steps} steps"
    elif len(between):
        record.note(
            f"its clock, to {resolution_s:.2g} s, tells {between.sum():.3g} s: too few for a time"
        )
    return np.full(len(steps), np.nan)


def _by_speed(record: Record, lines: list[dict[str, Any]]) -> np.ndarray:
    """Returns the step times by the speed that ms-swift prints, in six decimals: over or under the
    steps so far it is a clock. Of a resumed run, seconds per step are over the later steps alone,
    so that this clock goes back."""
    iteration, times = record.steps["iteration"], np.full(len(lines), np.nan)
    for name, is_rate in _SPEEDS.items():
        speed = positive(np.array([real(line.get(name)) for line in lines]))
        if not np.isfinite(speed).any():
            continue
        record.engine = "ms-swift"
        elapsed_s = iteration / speed if is_rate else iteration * speed
        if not is_rate and (np.diff(elapsed_s[np.isfinite(elapsed_s)]) <= 0).any():
            record.note(f"{name} tells no step time: it was resumed")
        else:
            resolution_s = float(np.nanmax(elapsed_s * 1e-6 / speed))
            times = _by_clock(record, iteration, elapsed_s, resolution_s)
    return times


def _keys(log: Log, columns: Columns) -> Iterable[Hashable]:
    """Returns a key for each loss line, which repeated lines share. The lines carry no step, but
    epoch, rate and loss to many digits; a loss of zero has none."""
    losses, epochs = (np.nan_to_num(columns[name]).tolist() for name in ("loss", "epoch"))
    if len(set(zip(losses, epochs, strict=True))) == len(losses):
        return range(len(losses))
    texts = [log.slice(at, at + 1000).partition(b"}")[0] for at in columns["at"].astype(int)]
    return [
        text if loss != 0 and b"'epoch'" in text else number
        for number, (text, loss) in enumerate(zip(texts, columns["loss"], strict=True))
    ]


@_QUIET
def _iterations(columns: Columns, planned: int, at_end: dict[str, float]) -> np.ndarray:
    """Returns the step of each loss line: as it says, else by its tokens or its epoch over those of
    the end of the planned steps, where these are fine enough; NaN where nothing tells it."""
    for name, end_value in at_end.items():
        steps = columns[name] * planned / (end_value or np.nan)
        rounded = np.round(steps)
        if len(steps) and (np.abs(steps - rounded) < 0.1).all() and (np.diff(rounded) > 0).all():
            return rounded
    return columns["global_step"]


@_QUIET
def _tokens_each(columns: Columns, steps: np.ndarray, batch: int | None) -> int | None:
    """Returns the tokens of a sequence; None where they are not said, or not always the same."""
    tokens = columns["num_input_tokens_seen"] / (steps * (batch or np.nan))
    is_constant = (
        len(tokens) and 1 <= tokens[0] < math.inf and (tokens == np.round(tokens[0])).all()
    )
    return int(tokens[0]) if is_constant else None


@_QUIET
def _clocked(iteration: np.ndarray, runtime_s: np.ndarray, before: int = 0) -> np.ndarray:
    """Returns the seconds per step between lines that print the runtime so far, which newer
    versions do. before: the steps that a resumed run had taken earlier."""
    steps, seconds = np.diff(iteration, prepend=before), np.diff(runtime_s, prepend=0.0)
    advances = (steps > 0) & (seconds > 0)
    return np.where(advances, seconds / np.where(advances, steps, 1), np.nan)


def _share_before(epochs: np.ndarray, end_epoch: float) -> float:
    """Returns the share of its epochs that a resumed run had behind it. The first loss of a run
    from the start comes after as long as lies between two losses; a later first loss is that of a
    resumed run."""
    finite = epochs[np.isfinite(epochs)]
    if not end_epoch or len(finite) < 2 or (np.diff(finite) < 0).any():
        return 0.0
    spacing = float(finite[-1] - finite[0]) / (len(finite) - 1)
    return float(finite[0] - spacing) / end_epoch if 0 < 2 * spacing < finite[0] else 0.0


def _doubt_epochs(record: Record, log: Log, columns: Columns, share: float) -> None:
    """Notes that epochs go back. Removes the rate of a run that was resumed, for it counts all
    steps of the run over the time of a part."""
    epochs = columns["epoch"]
    for at in np.flatnonzero(np.diff(epochs) < 0)[:1]:
        where = f"line {log.line_no(int(columns['at'][at + 1]))}: epochs go back from"
        words = f"{where} {epochs[at]:g} to {epochs[at + 1]:g}"
        record.doubt("resumed", f"{words}: if it was resumed there, its printed rates are wrong")
    if share and not record.planned_steps:
        record.totals.pop("samples_per_s", None)
        words = f"resumed after {share:.0%} of its epochs"
        record.doubt("resumed", f"{words}: its printed rates are wrong")


def _doubt_losses(record: Record) -> None:
    """Removes the time and the rate of a run whose printed mean loss is too low for its losses. It
    was resumed, for this mean is the sum since then over all steps."""
    logged, printed = record.steps["loss"], record.totals.get("loss")
    mean = float(logged.mean()) if len(logged) else 0.0
    if printed is not None and 0 < mean < math.inf and printed < _SAME_LOSS * mean:
        words = f"train_loss is {printed:.4g}, and the losses are {mean:.4g}"
        record.doubt("resumed", f"{words}: it was resumed, so its runtime is a part's")
        record.totals = {"loss": float(logged[-1])}


def _ended_early(record: Record, header: bytes, end_epoch: float) -> bool:
    """Returns whether the run ended before 90 % of its planned steps, by its last epoch; a doubt
    says so."""
    examples = last_number(_EXAMPLES, header)
    if not (examples and record.global_batch and record.planned_steps):
        return False
    steps = end_epoch * math.ceil(examples / record.global_batch)
    early = 0 < steps < 0.9 * record.planned_steps
    if early:
        words = f"it ended after about {steps:.0f} of {record.planned_steps} steps"
        record.doubt("early", f"{words}: its mean step time is unknown")
        record.totals.pop("samples_per_s", None)  # it counts the planned steps
    return early


def _time(record: Record, steps: int | None, before: int = 0) -> None:
    """Fills the mean step time: the runtime over the steps that it covers; where their number is
    not said, by the printed steps per second. before: those of an earlier part."""
    steps_per_s = record.totals.pop("steps_per_s", 0.0)
    if record.totals and not record.mean_of:
        record.completed = record.whole_run = True
    if before:
        record.totals.pop("samples_per_s", None)
        record.doubt("resumed", f"resumed at step {before}: its printed rates are wrong")
    timed = np.isfinite(record.steps["step_s"]).any()
    if steps and steps > before and not timed and 0 < record.totals.get("wall_s", 0.0) < math.inf:
        record.totals["step_s_mean"] = record.totals["wall_s"] / (steps - before)
        part = f"the last {steps - before} of {steps} steps" if before else f"{steps} steps"
        record.mean_of = f"the runtime over {part}"
    is_whole = "resumed" not in record.doubts and "early" not in record.doubts
    if not (steps or timed or record.mean_of) and is_whole and steps_per_s >= _LEAST:
        record.totals["step_s_mean"], record.mean_of = 1 / steps_per_s, "its steps per second"


def _read_document(log: Log, record: Record, content: dict[str, Any]) -> None:
    """Reads trainer_state.json, or results, whose trainer_state.json may lie beside them.

    Raises:
        Refusal: that is damaged.
    """
    state_path = log.path.with_name("trainer_state.json")
    if "log_history" not in content and state_path.is_file():
        with Log(state_path) as state_log:
            content = document(str(state_path), state_log.text(), record.format) | content
    history = rows(content.get("log_history"))
    steps = [row for row in history if "loss" in row and known(row.get("step")) is not None]
    names = {"iteration": "step", "loss": "loss", "grad_norm": "grad_norm"}
    columns = {name: [row.get(key) for row in steps] for name, key in names.items()}
    clock = [[real(row.get(key)) for row in steps] for key in ("step", "train_runtime")]
    record.steps = steps_of(**columns, step_s=_clocked(*map(np.array, clock)))
    if not np.isfinite(record.steps["step_s"]).any():
        record.steps["step_s"] = _by_speed(record, steps)
    facts = {"planned_steps": integer(content.get("max_steps"))}
    facts["micro_batch"] = integer(content.get("train_batch_size"))
    steps_taken = integer(content.get("global_step"))
    end_rows = [row for row in [*history, content] if "loss" not in row and "train_runtime" in row]
    for end in end_rows[-1:]:
        totals = {name: known(end.get(key)) for name, key in _RESULTS.items()}
        record.totals = {name: value for name, value in totals.items() if value is not None}
        record.evidence = hashlib.sha256(repr(record.totals).encode()).hexdigest()
        if steps_per_s := known(end.get("train_steps_per_second")):
            record.totals["steps_per_s"] = steps_per_s
        steps_taken = integer(end.get("step")) or steps_taken
        if steps_taken and facts["planned_steps"] not in (None, steps_taken):
            record.doubt("early", f"it ended at step {steps_taken} of {facts['planned_steps']}")
            record.totals.pop("samples_per_s", None)  # it counts the planned steps
        facts["planned_steps"] = steps_taken
    state(record, facts, "log")
    if steps_taken and record.steps["iteration"][-1:] >= 0.9 * steps_taken:
        _doubt_losses(record)
    _time(record, steps_taken)


def deepspeed_ranks(header: bytes) -> int | None:
    """Returns the ranks that DeepSpeed counts. They are all GPUs where it splits no model; None
    where it does."""
    split = b"PipelineEngine" in header or b"PipelineModule" in header or b"autotp" in header
    return None if split else last_number(_DEEPSPEED_RANKS, header)


def once(columns: Columns, keys: Iterable[Hashable], record: Record) -> Columns:
    """Returns the columns without lines whose key stood before, numbered from 1. keys: one a line;
    a range where all differ."""
    kept: slice | np.ndarray = slice(None)
    if not isinstance(keys, range):
        first_lines: dict[Hashable, int] = {}
        for i, key in enumerate(keys):
            first_lines.setdefault(key, i)
        kept = np.array(list(first_lines.values()), int)
    count = len(columns["at"])
    columns = {name: values[kept] for name, values in columns.items()}
    if n_dropped := count - len(columns["at"]):
        record.note(f"{n_dropped} duplicate lines dropped")
    return columns | {"iteration": np.arange(1.0, len(columns["at"]) + 1)}


def read_ends(record: Record, log: Log) -> list[int]:
    """Returns the offsets of the end lines: one per rank, all of the same run. Fills the run's
    rate, which is their mean, and its time, which is the longest. Where their times are of several
    runs, neither is known."""
    ends = list(log.matches(_END)) if log.held(FORMAT.ends) else []
    times = [number(match[1]) for _, match in ends]
    if ends and max(times) > _SAME_TIME * min(times):
        words = f"its ends print runtimes of {min(times):g} to {max(times):g} s"
        record.doubt("ends", f"{words}, of several runs: unknown")
    elif ends:
        record.totals["wall_s"] = max(times)
    for name, pattern in _RATE.items():
        rates = [number(rate[1]) for _, match in ends if (rate := pattern.search(match[0]))]
        if rates and "ends" not in record.doubts:
            record.totals[name] = float(np.mean(rates))
    return [at for at, _ in ends]


FORMAT = Format(
    name="HF Trainer",
    marks=(
        (b"train_runtime",),
        (b"{'loss': ", b"'learning_rate': "),
        (b'"log_history"',),
        (b'"current_steps": ', b'"total_steps": '),
        (b'{"loss": ', b'"train_speed('),
    ),
    starts=(b"***** Running training *****",),
    ends=(b"{'train_runtime'", b'{"train_runtime"'),
    done=(b"{'train_runtime'", b'{"train_runtime"'),
    embedded=True,
    reader=_read,
)
