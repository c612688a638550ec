"""What the prose of a document states for its tables, and where it contradicts numbers."""

import math
import re
from collections.abc import Iterator

from analysis.logs.published_csv import PublishedTable
from analysis.published.any_table import Stated, gpus_in, sizes_in
from analysis.published.documents import Document, find
from analysis.published.finding import DIFFERENT_COMMITS, Finding
from analysis.published.rules.speedups import ABOVE_LINEAR


def findings_in_prose(document: Document) -> Iterator[Finding]:
    """Sentences that contradict their own numbers, and comparisons across commits."""
    for line_no, line in document.prose:
        if re.search(r"\bsub-?linear", line, re.IGNORECASE):
            gpus = re.search(r"(\d+) GPUs?", line)
            for value in re.findall(r"(\d+(?:\.\d+)?)x", line):
                if gpus and float(value) > ABOVE_LINEAR * float(gpus[1]):
                    message = f"{value}x on {gpus[1]} GPUs is not sub-linear: it is above linear"
                    yield Finding(document.source, line_no, "efficiency", message)
    for line_no, line in document.prose:
        sizes, gpus = sizes_in(line), gpus_in(line)
        if line.lstrip().startswith("|") or not {"tp", "pp", "dp"} <= set(sizes) or not gpus:
            continue
        if "replica" in line.lower():
            continue  # the GPUs of one replica
        if (product := math.prod(v for k, v in sizes.items() if k != "ep")) != gpus:
            words = " x ".join(f"{k} {v}" for k, v in sizes.items() if k != "ep")
            said = f"{words} = {product}, but the line says {gpus} GPUs"
            yield Finding(document.source, line_no, "gpus", said)
    commits: dict[str, int] = {}
    for at, (line_no, line) in enumerate(document.prose):
        near = " ".join(text for _, text in document.prose[max(at - 3, 0) : at + 1])
        if re.search(r"\bcommits?\b", near, re.IGNORECASE):
            for text in re.findall(r"`([0-9a-f]{7,40})`", line):
                if re.search(r"\d", text) and re.search(r"[a-f]", text):
                    commits.setdefault(text[:7], line_no)
    if len(commits) > 1:
        said = DIFFERENT_COMMITS + ", ".join(commits)
        yield Finding(document.source, min(commits.values()), "commits", said)


def stated_beside(document: Document, table: PublishedTable) -> Stated:
    """What the document states for a table: in its section, else anywhere."""
    tp = r"(?<![*\w])(?:TP|TP_SIZE) ?= ?(\d+)\b(?! ?\*)"  # not PP*TP=8*4
    seq_len = r"(?i)\bseq(?:uence)?[ _]?len(?:gth)?`?\s*(?:is|=|:)\s*(\d+)"
    # 8 = 4 passes (with recomputation) x 2 per multiply-add, as the Jean Zay study writes it.
    stated = next(find(document, r"\* ?4 ?\* ?2 ?\*"), None)
    section_tp = _only(document, tp, table.section_lines, fences=True)
    return Stated(
        tp=int(section_tp) if section_tp else None,
        seq_len=_only(document, seq_len, table.section_lines) or _only(document, seq_len),
        tokens=_only(document, r"tokens\w* ?[=:] ?([\d,]{4,})"),
        formula="8PT" if stated else "",
    )


def _only(
    document: Document,
    pattern: str,
    lines: tuple[int, int] | None = None,
    fences: bool = False,
) -> float | None:
    """The one number that `pattern` finds in the prose (and code fences); None for two or none."""
    if fences:
        first, last = lines or (1, len(document.lines))
        text = "\n".join(document.lines[first - 1 : last])
        values = {float(m[1].replace(",", "")) for m in re.finditer(pattern, text)}
    else:
        values = {float(m[1].replace(",", "")) for _, m in find(document, pattern, lines)}
    return values.pop() if len(values) == 1 else None
