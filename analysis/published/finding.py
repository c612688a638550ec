"""One thing that is wrong in a published table or a log: where, what, and how sure."""

from dataclasses import dataclass

from models.errors import printable

DIFFERENT_COMMITS = "runs of different commits are compared: "
FAR_APART = 1.2  # slowest over fastest of identical configurations that is worth a finding


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: where it stands (line 0: no single one), its kind (the rule), and
    the sentence with the numbers; of a cell, its column, what is printed and what follows.

    sure: "certain" (arithmetic), "likely" (a convention may explain it), "possible" (look at it).
    """

    file: str
    line: int
    kind: str
    message: str
    column: str = ""
    printed: str = ""
    expected: str = ""
    sure: str = "certain"

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        sure = "" if self.sure == "certain" else f" ({self.sure})"
        return printable(f"{where}: {self.message}{sure}")

    def annotation(self) -> str:
        """The finding as a workflow command of GitHub, which marks the line of a pull request."""

        def escaped(text: str, more: str = "") -> str:
            for mark in "%\r\n" + more:
                text = text.replace(mark, f"%{ord(mark):02X}")
            return text

        level = "error" if self.sure == "certain" else "warning"
        line = f",line={self.line}" if self.line else ""
        where = f"file={escaped(self.file, ':,')}{line},title={escaped(self.kind, ':,')}"
        return f"::{level} {where}::{escaped(printable(self.message))}"
