"""Whether a file without iterations is the log of a run.

A page about SIGTERM and a program that catches an error are no runs. Evidence is a line that only a
launcher, a scheduler or a framework prints, in its exact form, at the beginning of a line.
"""

import re
from collections.abc import Iterable

from analysis.logs.parsing.logfile import Log

# Code and other pages, which quote logs. A log with such a name must be renamed to be read.
_SOURCES = frozenset(
    ".md .markdown .py .pyi .pyx .ipynb .sh .bash .slurm .sbatch .c .cc .cpp .cu .cuh .h .hpp .js"
    " .css .pl .go .rs .rst .tex .html .htm .toml .yaml .yml .cfg .ini .svg .xml".split()
)
# What may stand before a line: who printed it, a colour, a progress bar.
_WHO = (
    rb"(?:^|\r)(?![\r\n])(?:\x1b\[[\d;]{0,20}[mK]|\[?(?:rank|default)-?\d{1,6}\]?:? ?| ?\d{1,6}: "
    rb"|[\w.-]{1,60}: ){0,4}"
)
_CLOCK = rb"\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,]?\d{0,9}\]?"
_LINES = (
    rb"Traceback \(most recent call last\):[^\n]{0,40}\n(?:[^\n]{0,400}\n){0,4}?"
    rb"[^\n]{0,80}File \"[^\"\n]{1,400}\", line \d{1,6}",
    rb"(?:slurmstepd|srun|slurmd|sbatch)(?:-[\w.]{1,60})?: ",
    rb"[\w./-]{1,200}: line \d{1,6}: [^\n]{1,300}: (?:command not found|No such file or directory)",
    rb"[\w./-]{1,200}: line \d{1,6}: {1,9}\d{1,9} (?:Killed|Segmentation fault|Aborted|Bus error)",
    rb"(?:ba|da|z)?sh: (?:line )?\d{1,6}: [^\n]{1,300}: (?:command )?not found",
    rb"[\w./-]{0,200}python[\d.]{0,6}: can't open file ",
    rb"[WEIC]\d{4} \d\d:\d\d:\d\d\.\d{3,9} +\d+ [^\n]{1,300}\.py:\d+\] ",  # torch
    rb"\[[WEI]\d{3,9} \d\d:\d\d:\d\d\.\d{3,9} [\w.]+:\d+\] ",  # its C++
    rb"(?:\[\d{1,6}\] )?[\w.-]{1,80}:\d{1,9}:\d{1,9} \[\d{1,4}\] (?:\S{1,100} )?NCCL [IW]",
    _CLOCK + rb" ?\[(?:INFO|WARNING|ERROR)\] \[[\w.]+\.py:\d+:\w+\] ",  # DeepSpeed
    rb"> padded vocab \(size: \d+\) with \d+ dummy",  # Megatron
    rb"\[NeMo [IWE] \d{4}-\d\d-\d\d ",
    rb"\d\d/\d\d/\d{4} \d\d:\d\d:\d\d \[[A-Z]+\|DP=\d",  # nanotron
    rb"\[titan\] ?" + _CLOCK,
    _CLOCK + rb"\[fairseq[\w.]*\]\[",
    _CLOCK + rb" \| [A-Z]+ \| fairseq",
    _CLOCK + rb" - nanochat\.\w+ - ",
    rb"[\w.]{0,60}OutOfMemoryError: (?:CUDA|HIP) out of memory\. Tried to allocate \d",
    rb"=>> PBS: job killed: ",
    rb"Fatal Python error: ",
    rb"terminate called after throwing an instance of ",
)


def is_page(log: Log) -> bool:
    """Returns whether the file's name is that of a Markdown page, whose fenced blocks may hold a
    log."""
    return log.path.suffix.lower() in (".md", ".markdown")


def is_source(log: Log) -> bool:
    """Returns whether the file's name is that of code or a page, which may quote a log."""
    return log.path.suffix.lower() in _SOURCES


def is_of_a_run(log: Log, starts: Iterable[bytes]) -> bool:
    """Returns whether the log holds a line that only a run prints. starts: what programs print as
    they start."""
    lines = b"|".join([*_LINES, *map(re.escape, starts)])
    evidence = re.compile(b"%b(?:%b)" % (_WHO, lines), re.MULTILINE)
    return any(True for _ in log.matches(evidence))
