"""torchtitan's structured logs: what one rank did in each step, a line of JSON for where each span
begins and where it ends.

    {..., "rank": 1, ..., "host_name": "c2", ..., "step": 20, ..., "time_ms": 1795849835611, ...,
     "log_type_name": "fwd_bwd_end", "event_name": null, "value": 698.9, ...}

A file is of one rank and one start (`structured_logs/training.global_rank_1.STAMP.jsonl`);
analysis/logs/rank_files.py makes one run of them. `value` is milliseconds of a clock that never
jumps. All times are the host's: on a GPU fwd_bwd is how long launching takes. Evaluations and saves
lie inside a step here, and are no part of a step's time in our tables.
"""

import json
import re
from collections import Counter, defaultdict

import numpy as np

from analysis.logs.parsing.json_values import integer, real, text
from analysis.logs.parsing.line_format import Format
from analysis.logs.parsing.logfile import Log
from analysis.logs.record import Record, steps_table
from parallel.measure.slow_steps import PartTimes

# Spans that lie side by side in a step -> parts of it. What is left of a step is waiting for the
# other ranks' number of tokens, or for the GPU.
_SPANS = {
    "fetching_batch": "data",
    "gc_collect": "garbage collection",
    "fwd_bwd": "forward and backward",
    "optim": "clipping and optimizer",
    "collect_dist_metrics": "metrics",
    "eval": "evaluation",
    "checkpoint_save": "checkpoint",
}
_ASIDE = ("evaluation", "checkpoint")
_MEANT = re.compile(rb'"(?:%b)_end"' % "|".join(("step", *_SPANS)).encode())
_LONGEST = 1 << 16  # bytes of a line
_LAST = b'"torch_distributed_teardown_end"'  # after an exception there is none


def _read(log: Log, record: Record) -> None:
    """Fills the steps and their parts of the rank that wrote the file."""
    record.engine = "torchtitan"
    spans: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))  # of each step
    places: dict[int, int] = {}  # where each step ends in the file
    line: dict[str, object] = {}
    began_ms, damaged, repeated, seen = 0, 0, 0, -1
    for offset, block in log.blocks():
        end = 0
        for mark in _MEANT.finditer(block):
            if mark.start() < end:
                continue  # it stands in the same line
            begin = block.rfind(b"\n", end, mark.start()) + 1 or end
            end = block.find(b"\n", mark.end()) + 1 or len(block)
            content = block[begin:end] if end - begin < _LONGEST else b""
            parsed = _parsed(content)
            name, step = text(parsed.get("log_type_name")) or "", integer(parsed.get("step"))
            name, number = name.removesuffix("_end"), integer(parsed.get("seq_id"))
            seconds = real(parsed.get("value")) / 1000
            if step is None or step < 0 or number is None or not 0 <= seconds < np.inf:
                damaged += 1
            elif number <= seen:
                repeated += 1
            elif name in ("step", *_SPANS):
                spans[step][_SPANS.get(name, name)] += seconds
                began_ms = began_ms or integer(parsed.get("time_ms"))
                seen, line = number, parsed
                if name == "step":
                    places[step] = offset + begin
    steps = sorted(step for step in places if spans[step]["step"] > 0)
    if damaged:
        record.doubt("numbers", f"{damaged} lines of spans are damaged and left out")
    if repeated:
        record.note(f"{repeated} lines of spans that do not follow the one before are left out")
    in_steps = Counter(name for step in steps for name in spans[step])
    usual = {name for name, n in in_steps.items() if 2 * n > len(steps)}
    steps = [step for step in steps if usual <= spans[step].keys()]  # else a line of it is lost
    if not steps:
        return
    names = [name for name in _SPANS.values() if any(name in spans[step] for step in steps)]
    parts = {name: np.array([[spans[step].get(name, 0.0) for step in steps]]) for name in names}
    step_s = np.array([[spans[step]["step"] for step in steps]])
    rank, node = integer(line.get("rank")), text(line.get("host_name")) or ""
    clock = {"began_s": (began_ms or 0) / 1000}
    clock["ended_s"] = (integer(line.get("time_ms")) or 0) / 1000
    record.parts = PartTimes(np.array(steps, float), step_s, parts, (rank,), (node,), **clock)
    aside_s = sum(parts[name] for name in _ASIDE if name in parts)
    at_end = [places[step] for step in steps]
    record.steps = steps_table(iteration=steps, step_s=(step_s - aside_s)[0], at=at_end)
    record.last_at = at_end[-1]
    record.completed = True if log.contains(_LAST, record.last_at) else None


def _parsed(content: bytes) -> dict[str, object]:
    """Returns the object of a line of JSON; an empty one where it is none."""
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


FORMAT = Format(
    name="torchtitan spans",
    marks=((b'"log_type_name": "', b'"host_name": ', b'"seq_id": '),),
    reader=_read,
)
