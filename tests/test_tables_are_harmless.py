"""What a log says is shown, never obeyed: by a terminal, a Markdown viewer or a spreadsheet."""

import csv
import io

from analysis import tflops
from analysis.common.table import FORMATS, Column, Table
from analysis.compare import main as compare
from base.errors import warn

EVIL = "a\x1b[2J\x9b1m|b\x07\u202e\udcff\nnew"
SHOWN = r"a\x1b[2J\x9b1m|b\x07\u202e\udcff new"


def table(**row) -> Table:
    return Table([Column(name, name) for name in row], [row], title=EVIL, notes=[EVIL])


def test_no_table_holds_a_control_character():
    for format in FORMATS:
        text = table(name=EVIL).render(format)
        assert all(c.isprintable() or c == "\n" for c in text), (format, text)
    assert SHOWN in table(name=EVIL).render("text")


def test_a_name_does_not_end_a_markdown_cell_and_is_no_tag():
    row = table(name="a|b\nc", loss=1.0).render("markdown").split("\n")[4]
    assert row == "| a\\|b c | 1.0 |"
    # The backslash is escaped, too: an even number of them before | would end the cell.
    row = table(name="a\\|b").render("markdown").split("\n")[4]
    assert row == "| a\\\\\\|b |"
    tag = "<img src=x onerror=alert(1)> &lt;b>"
    shown = Table([Column("run", "<b>run")], [{"run": tag}], tag, [tag]).render("markdown")
    assert "<" not in shown and shown.count("&lt;img src=x onerror=alert(1)> &amp;lt;b>") == 3


def test_no_cell_of_a_csv_is_a_formula():
    words = ["=1+1", "+1+1", "-1+1", "@sum(a)", "\t=1", " =1", "=cmd|' /C calc'!A0"]
    numbers = ["-", "-1.5", "+2e-3", "12.5 %", "-0.1 %", "plain", "a=b"]
    text = table(**{str(i): value for i, value in enumerate([*words, *numbers, -3, 1.5, None])})
    _, cells = csv.reader(io.StringIO(text.render("csv")))
    assert all(cell.startswith("'") for cell in cells[: len(words)])
    assert cells[len(words) :] == [*numbers, "-3", "1.5", ""]


def test_no_line_of_a_command_holds_a_control_character(tmp_path, capsys):
    step = "\n".join(f"step: {i}, loss: 2.0, 100 ms" for i in range(3))
    (tmp_path / "x\x1b[31m.log").write_text(f"{step}\nRuntimeError: \x1b]0;title\x07 no\n")
    (tmp_path / "empty\x1b[31m.log").touch()
    tflops.main([str(tmp_path)])
    compare([str(tmp_path), str(tmp_path / "empty\x1b[31m.log")])
    warn("analysis.tflops", EVIL)
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err
    assert said.err.endswith(f"analysis.tflops: {SHOWN}\n")
