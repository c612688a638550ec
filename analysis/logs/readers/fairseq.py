"""fairseq: its JSON lines and its `simple` lines, of the inner training loop.

    [train_inner][INFO] - {"epoch": 1, "loss": "9.427", "wps": "25389.4", ...}
    | INFO | train_inner | epoch 001:  200 / 694 loss=9.427, ppl=689, wps=25389.4, ...
    | epoch 010:   2000 / 8223 loss=1.27 (1.50), wps=962, wpb=908, bsz=32, ...             (2018)

Words (tokens) per second are averaged since the line before; no step time is printed.
"""

import re

import numpy as np

from analysis.logs.parsing.fields import NOT_LAST, labelled
from analysis.logs.parsing.line_format import Format
from analysis.logs.parsing.lines import Columns, Line
from analysis.logs.parsing.logfile import Log
from analysis.logs.record import Record

_REST = rb"[^\r\n{}=]{0,200}?(?=\{\"|loss=)"
_STARTS = tuple(
    re.compile(start)
    for start in (
        b"train_inner" + _REST,
        rb"\| epoch (?P<epoch>\d{1,6}):? {1,8}(?P<within>\d{1,9}) / (?P<updates>\d{1,9})" + _REST,
        rb"<(?<=\d\d<)[\d:?]{1,12}, {1,4}[\d.]{1,12}(?:it/s|s/it)" + _REST,
        rb"\{\"epoch(?:(?<![^\r\n].{7})|(?<=[\d;\[]m.{7})|(?<=\xef\xbb\xbf.{7}))",
    )
)
_IS = rb"(?:\"?: \"?|=)"
_FIELDS = {
    "iteration": labelled(rb"num_updates", _IS),
    "loss": labelled(rb"loss", _IS),
    "grad_norm": labelled(rb"gnorm", _IS),
    "tokens_per_s": labelled(rb"wps", _IS),
    "batch": labelled(rb"bsz", _IS),
    "ups": labelled(rb"ups", _IS),
}


def _numbered(columns: Columns, record: Record, log: Log) -> Columns:
    """Returns the columns of the lines that say which update they are of."""
    if "updates" in columns:
        counted = (columns["epoch"] - 1) * columns["updates"] + columns["within"]
        numbered = np.isfinite(columns["iteration"])  # in 2018 its updates were not
        columns["iteration"] = np.where(numbered, columns["iteration"], counted)
    has_iteration = np.isfinite(columns["iteration"])
    columns["samples_per_s"] = columns["batch"] * columns["ups"]
    return {name: values[has_iteration] for name, values in columns.items()}


def _finish(record: Record, log: Log) -> None:
    """Notes that no step time is printed, and sets whether the run says that its training is
    done."""
    if len(record.steps):
        record.note("no step time is printed, only words per second")
        record.completed = bool(log.places(FORMAT.done, record.last_at)) or None


FORMAT = Format(
    name="fairseq",
    marks=((b"num_updates", b"wps", b"ups"), (b"| epoch ", b" loss=", b", wps=", b", wpb=")),
    starts=(b"distributed_world_size",),
    done=(b"done training in",),
    lines=tuple(Line(start, _FIELDS, _numbered) for start in _STARTS),
    facts={
        "gpus": rb"'distributed_world_size': (\d{1,6})" + NOT_LAST,
        "planned_steps": rb"'max_update': (\d{1,9})" + NOT_LAST,
    },
    averages=True,
    finish=_finish,
)
