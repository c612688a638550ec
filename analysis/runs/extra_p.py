"""The parts of a step by GPUs, in the JSON lines that Extra-P reads (github.com/extra-p/extrap).

One object a line: `params` (the coordinate), `callpath`, `metric` and `value`; several values of
one coordinate are repeats (extrap 4.2.5, fileio/file_reader/jsonlines_file_reader.py).
"""

import json
from collections import defaultdict
from pathlib import Path

from analysis.runs.rank_times import Breakdown
from base.errors import UsageError
from base.storage import output

POINTS = 5  # that Extra-P asks for before it fits a model of one parameter
MARK = '{"params": {"gpus": '


def write(path: Path, breakdowns: list[Breakdown], force: bool) -> str:
    """Writes seconds per step of every part of the runs, by GPUs. Returns what was written, in
    words.

    Raises:
        UsageError: runs on as many GPUs are no repeats, so they are no one point of a curve.
    """
    by_gpus: dict[int, dict[str, list[Breakdown]]] = defaultdict(lambda: defaultdict(list))
    for run in breakdowns:
        by_gpus[run.spec.gpus][run.record.configuration].append(run)
    for gpus, runs in by_gpus.items():
        if len(runs) > 1:
            names = [repeats[0].name for repeats in runs.values()]
            raise UsageError(
                f"--extrap: {' and '.join(names)} ran on {gpus} GPUs and are no repeats:"
                " name the runs of one curve"
            )
    points = [
        {"params": {"gpus": run.spec.gpus}, "callpath": callpath, "metric": "time", "value": value}
        for run in sorted(breakdowns, key=lambda run: run.spec.gpus)
        for callpath, value in {
            "step": run.step_s,
            **{f"step->{part}": s for part, s in run.parts.items()},
        }.items()
    ]
    with output(path, MARK, force) as file:
        file.write_text("".join(json.dumps(point) + "\n" for point in points))
    few = f"; Extra-P asks for {POINTS}" if len(by_gpus) < POINTS else ""
    return f"{path}: seconds of {len(breakdowns)} runs at {len(by_gpus)} numbers of GPUs{few}"
