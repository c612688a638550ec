"""A Markdown page as the log that it quotes.

Pages change the lines that they quote: bars are escaped or become cells, signs become entities, a
line gets a mark before it, and long lines are broken. What is read is the page without all that.
"""

import html
import re
from pathlib import Path

from analysis.logs.parsing.logfile import LONGEST_LINE, Log

_CELLS = re.compile(r"</t[dh]>\s*<t[dh][^>\n]{0,80}>", re.IGNORECASE)
_BREAK = re.compile(r"<(?:br|/tr|/li|/p)\s*/?>", re.IGNORECASE)
_TAG = re.compile(
    r"</?(?:a|b|code|div|em|i|li|p|pre|span|strong|table|tbody|td|th|thead|tr|ul)(?:\s[^>\n]{0,200})?>",
    re.IGNORECASE,
)
_ESCAPED = re.compile(r"\\([|_*\[\]<>#`~-])")
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,24}[A-Za-z]")
_MARK = re.compile(r"^[ \t]{0,8}(?:>[ \t]?){1,8}", re.MULTILINE)
_FENCE = re.compile(r"[ \t]{0,8}(?:```|~~~|\|?[ \t]{0,8}:?-{3,}|#{1,6} |$)")
# Where the record of an iteration begins, in any format.
_BEGINS = re.compile(
    r"\b(?:iteration[ :=]{1,16}\d{1,12}[ \t]{0,16}/|step:[ \t]{0,8}\d{1,12}\b|iter \d{1,12}:"
    r"|step \d{1,12}(?:/\d{1,12})? ?[(|]|epoch=\d{1,9}/micro_step=)"
)


class Page(Log):
    """A page's text without what Markdown and HTML add to a quoted line.

    joined: whether the lines of a paragraph or block that begin no iteration are put behind the one
    that does. Every line keeps its number.
    """

    def __init__(self, path: Path, joined: bool = False):
        super().__init__(path)
        text = super().slice(0, min(self.size, LONGEST_LINE)).decode("utf-8", "replace")
        text = _BREAK.sub("\r", _CELLS.sub(" | ", text))
        text = html.unescape(_ESCAPED.sub(r"\1", _TAG.sub(" ", text))).replace("\xa0", " ")
        text = _MARK.sub("", _COLOUR.sub("", text))
        self._text = (_joined(text) if joined else text).encode()
        self.size = len(self._text)

    def slice(self, start: int, end: int) -> bytes:
        """The text's bytes from `start` up to `end`, both cut to it."""
        return self._text[max(start, 0) : max(end, 0)]


def _joined(text: str) -> str:
    """Each iteration of a block in one line, with as many blank lines behind it as it had more."""
    found: list[str] = []
    block: list[str] = []
    for line in [*text.split("\n"), ""]:
        if not _FENCE.match(line):
            block.append(line)
            continue
        broken = "\n".join(block)
        whole = re.sub(r"\s", " ", broken)  # as long: what begins where is the same
        starts = [match.start() for match in _BEGINS.finditer(whole)]
        for start, end in zip([0, *starts], [*starts, len(whole)], strict=True):
            found.append(whole[start:end] + "\r" + "\n" * broken.count("\n", start, end))
        found.append("\n" * bool(block) + line + "\n")
        block = []
    return "".join(found)
