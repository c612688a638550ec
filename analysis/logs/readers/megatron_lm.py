"""Megatron-LM from 2020 to today, and those that print its iteration line: Megatron-DeepSpeed,
GPT-NeoX, Megatron-Bridge and our own engines.

     iteration        1/    1000 | elapsed time per iteration (ms): 121899.8 | learning rate: ...
     iteration=       4/  317892 | consumed_samples= 3072 | elapsed_time_per_iteration_ms=49871.4 |
     samples/sec: 206.693 | iteration        1/     512 | elapsed time per iteration (ms): 2477.1 |

All have fields between bars, in any order. A field counts when its bar is behind it, for a number
without may be cut. With timers, the lines behind say what an iteration spent where; of the fastest
and the slowest rank the slowest counts:

    time (ms) | forward-compute: 260.12 | backward-compute: 191.56 | ... | batch-generator: 10.29
        forward-backward ...............................: (8123.42, 8129.10)
"""

import re

import numpy as np

from analysis.logs.parsing.fields import positive, ranks_of_rates
from analysis.logs.parsing.line_format import Format
from analysis.logs.parsing.lines import Columns, Line, table
from analysis.logs.parsing.logfile import Log
from analysis.logs.parsing.setting_names import header_of, state
from analysis.logs.record import Record

# Tool -> what only it prints: in an iteration line, or before training. A fork's line may hold
# `samples/sec:`, but only GPT-NeoX's begins with it; Apertus' has billions of `consumed tokens:`.
_TOOLS = (
    ("GPT-NeoX", rb"approx flops per GPU|samples/sec: [^|]{1,30}\| {0,4}iteration", rb"NeoXArgs"),
    (
        "Megatron-DeepSpeed",
        rb"consumed tokens: {1,24}\d{1,24} {0,4}\||consumed_tokens=|\| TFLOPs:|samples per second:",
        rb"DeepSpeed info: version|DeepSpeedEngine|deepspeed.initialize",
    ),
)
# A colour is read as blanks are.
_BLANKS = rb"(?:[ \t]|\x1b\[[0-9;]{0,24}m){0,16}+"
_VALUE = (
    rb"(-?(?:\d{1,24}(?:\.\d{0,20})?|\.\d{1,20})(?:[eE][-+]?\d{1,3})?|-?(?i:nan|inf))"  # .6E: NAN
    rb"([KMGTP]?FLOPS)?"
)
_NUMBER = rb"(?:%b%b%b(?=[|/])|%b(?=[^|\s\x1b]))(?=[^|\r\n]*\|)" % (
    _BLANKS,
    _VALUE,
    _BLANKS,
    _BLANKS,
)
_TIME = rb"elapsed[ _-]time[ _-]per[ _-]iteration[ _]?\(?%b\b[^|:=\r\n]*+[:=]"
_LABELS = {
    "ms": _TIME % b"ms",
    "step_s": _TIME % b"s",
    "loss": rb"lm[ _-]loss[ ]?[ :=]",  # `lm loss 9.1` in 2020
    "grad_norm": rb"grad[ _-]norm[^|:=\r\n]*+[:=]",
    "tflops": rb"(?:throughput[ _]per[ _][gG]|(?:\[LM\])?TFLOPs|approx[ _]flops)[^|:=\r\n]*+[:=]",
    "samples_per_s": rb"samples[ _]per[ _]second[^|:=\r\n]*+[:=]",
    "tokens_per_s_per_gpu": rb"(?:tokens(?:[ _]per[ _](?i:gpu)|-per-second-per-gpu|/sec/(?i:gpu))"
    rb"|average token/sec/GPU)[^|:=\r\n]*+[:=]",
    "tokens_per_s": rb"average overall token/sec[^|:=\r\n]*+[:=]",
    "skipped": rb"number[ _]of[ _]skipped[^|:=\r\n]*+[:=]",
    "nan": rb"number[ _]of[ _]nan[^|:=\r\n]*+[:=]",
    "global_batch": rb"global[ _]batch[^|:=\r\n]*+[:=]",
    "consumed": rb"consumed[ _]samples[^|:=\r\n]*+[:=]",
    "seq_len": rb"actual[ _]seqlen[^|:=\r\n]*+[:=]",
}
# Of a label that stands twice in a line, the last one counts.
_FIELDS = {
    name: re.compile(rb"\A[^\r\n]*\|[ ]?(?:%b)%b" % (label, _NUMBER))
    for name, label in _LABELS.items()
}
_FIELDS["average"] = re.compile(  # any digit of `current/average`
    rb"\A[^\r\n]*\|[ ]?(?:%b|%b)[^|/\r\n]*/[^|\r\n]*?(\d)(?=[^|\r\n]*\|)"
    % (_TIME % b"ms", _TIME % b"s")
)
_ITERATION = re.compile(
    rb"(?:samples/sec: {1,3}(?P<samples>[\d.]{1,20}) ?\| {0,4})?"  # GPT-NeoX
    rb"iteration(?:[ :=]|\x1b\[[0-9;]{0,24}m){1,16}+(?P<iteration>\d{1,12})"
    + _BLANKS
    + rb"/"
    + _BLANKS
    + rb"(?P<planned>\d{1,12})"
    + _BLANKS
    + rb"\|(?=[^\r\n]{0,4000}?elapsed[ _-]time[ _-]per[ _-]iteration)"
)
_PEAK = re.compile(
    rb"\(after \d{1,9} iterations\) memory \(MB\) [^\r\n]{1,80}max allocated: ([\d.]{1,24})"
    rb"(?= {0,2}\|)"
)
_SOON = 1 << 20  # bytes behind the first iteration, in which it prints its memory and timers
# Parts of a step -> the timers that add up to them. batch-generator runs in forward-compute, and
# all in forward-backward.
_TIMERS = {
    "data_s": ("batch-generator",),
    "compute_s": ("forward-compute", "backward-compute", "optimizer"),
    "communication_s": (
        *("forward-recv", "forward-send", "backward-recv", "backward-send"),
        *("forward-send-backward-recv", "backward-send-forward-recv", "forward-send-forward-recv"),
        *("backward-send-backward-recv", "backward-params-all-reduce", "all-grads-sync"),
        *("backward-embedding-all-reduce", "backward-layernorm-all-reduce", "params-all-gather"),
        *("embedding-grads-all-reduce", "layernorm-grads-all-reduce", "grads-all-reduce"),
        "grads-reduce-scatter",
    ),
    "forward_backward_s": ("forward-backward",),
}
_TIMER_NAMES = [name.encode() for names in _TIMERS.values() for name in names]
_TIMER_FIELDS = {
    name.decode(): re.compile(
        rb"(?:\A|\| )%b(?: \.{2,60})?: (?:\([\d.]{1,20}, )?([\d.]{1,20})(?![\w.])" % name
    )
    for name in _TIMER_NAMES
}
_TIMER_LINES = (
    Line(re.compile(rb"time \(ms\)(?= \| (?:forward|batch))"), _TIMER_FIELDS),
    Line(
        re.compile(rb"(?<= )(?=(?:%b) \.{2,60}: \(?\d)" % b"|".join(_TIMER_NAMES)),
        _TIMER_FIELDS,
        mark=b" ...",
    ),
)


def _timed(columns: Columns, record: Record, log: Log) -> Columns:
    """Returns the columns of the lines that print a time. Fills what they and the lines behind the
    first one say of the run: the tool, how many iterations had a loss of NaN, and the peak of
    memory."""
    timed = ~(np.isnan(columns["ms"]) & np.isnan(columns["step_s"]))
    columns = {name: values[timed] for name, values in columns.items()}
    if n_averages := np.isfinite(columns.pop("average")).sum():
        record.note(f"{n_averages} values print current/average: the current one is used")
    samples = columns.pop("samples")
    columns["samples_per_s"] = np.where(np.isnan(samples), columns["samples_per_s"], samples)
    gpus = ranks_of_rates(columns["tokens_per_s"], columns["tokens_per_s_per_gpu"])
    state(record, {"gpus": gpus}, "log")
    nan_counts = columns["nan"]
    record.nan_iterations = int(nan_counts[np.isfinite(nan_counts)].sum())
    consumed = columns.pop("consumed")
    if np.isnan(columns["global_batch"]).all():
        columns["global_batch"] = _batches(columns["iteration"], consumed)
    batches = columns["global_batch"][np.isfinite(columns["global_batch"])]
    if len(batches) and (batches != batches[-1]).any():
        record.note(f"the global batch grows from {batches[0]:.0f} to {batches[-1]:.0f}")
    line, first = b"", None
    if len(columns["at"]):
        first = int(columns["at"][0])
        line = log.slice(first - 400, first).rpartition(b"\n")[2]
        line += log.slice(first, first + 1500).partition(b"\n")[0]
        if peaks := _PEAK.findall(log.slice(first, first + _SOON)):
            record.peak_bytes = int(max(map(float, peaks)) * 2**20)
        _add_timers(columns, log, log.slice(first, first + _SOON))
    header = header_of(log, first)
    if b"reserve_length:" in line or b"Loading extension module token_dropping" in header:
        record.uncounted.append("layers that drop tokens (random-LTD)")
    record.format = record.engine = _tool(header, line)
    return columns


def _batches(iteration: np.ndarray, consumed: np.ndarray) -> np.ndarray:
    """Returns the global batch of each entry by the samples consumed since the one before it, for
    forks print no batch; NaN where these make no whole number. Several ranks may print one."""
    numbers, first, inverse = np.unique(iteration, return_index=True, return_inverse=True)
    samples = positive(np.diff(consumed[first], prepend=np.nan))
    batches = samples / np.diff(numbers, prepend=np.nan)
    return np.where(batches == np.round(batches), batches, np.nan)[inverse]


def _add_timers(columns: Columns, log: Log, sample: bytes) -> None:
    """Adds the parts of each iteration, by the timers behind its line, where the log has these in a
    sample of it."""
    line = next((line for line in _TIMER_LINES if line.start.search(sample)), None)
    if line is None:
        return
    timers = table(log, line, Record("", ""))
    entry = np.searchsorted(columns["at"], timers.pop("at")) - 1
    unknown = np.full(len(columns["at"]), np.nan)
    spent_s = {}
    for name in _TIMER_FIELDS:
        values = timers.pop(name)
        rows = np.flatnonzero((entry >= 0) & np.isfinite(values))
        if len(rows):
            spent_s[name] = unknown.copy()
            spent_s[name][entry[rows]] = values[rows] / 1000
    for part, names in _TIMERS.items():
        known = [spent_s[name] for name in names if name in spent_s]
        columns[part] = sum(known) if known else unknown
    has_compute = np.isfinite(spent_s.get("forward-compute", unknown))
    columns["compute_s"] = np.where(has_compute, columns["compute_s"], np.nan)
    columns["forward_backward_s"][has_compute] = np.nan
    within = np.nan_to_num(columns["data_s"])
    for part in ("compute_s", "forward_backward_s"):
        columns[part] = columns[part] - within


def _tool(header: bytes, line: bytes = b"") -> str:
    """Returns which tool wrote the log, by the text before training and an iteration line (or
    nothing)."""
    for name, in_line, in_header in _TOOLS:
        if re.search(in_line, line) or re.search(in_header, header):
            return name
    return "Megatron-LM"


def _finish(record: Record, log: Log) -> None:
    """Sets `completed` of a run that is not known to have taken its planned steps: None where its
    last words say that training is done, else False."""
    if len(record.steps) and not record.completed:
        tail = log.slice(record.last_at, record.last_at + (1 << 16))
        record.completed = None if any(done in tail for done in FORMAT.done) else False


FORMAT = Format(
    name="Megatron-LM",
    marks=((b"elapsed time per iteration (",), (b"elapsed_time_per_iteration_ms=",)),
    starts=(
        b"using world size:",
        b"> initializing torch distributed",
        b"NeoXArgs.configure_distributed_args()",
        b" arguments ---",
        b" micro-batches of ",  # our own engines
    ),
    done=(b"[after training is done]", b"[exiting program at iteration", b"training finished"),
    lines=(Line(_ITERATION, _FIELDS, _timed, mark=b"elapsed", closed=True),),
    averages=True,
    finish=_finish,
)
