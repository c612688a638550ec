"""On a terminal a table fits its width and loses no value; a pipe gets it in full. What a log says
is shown, never obeyed: by a terminal, a Markdown viewer or a spreadsheet."""

import csv
import importlib
import io
import json
import re
import sys

import pytest

from analysis import tflops
from analysis.common import terminal
from analysis.common.table import FORMATS, Column, Table, cell, chosen, show
from analysis.compare import main as compare
from base.errors import UsageError, warn

PARITY = "logs/2-core-cpu/parity"
COMMANDS = (
    ("tflops", PARITY, "--predict", "2-core-cpu"),
    ("scaling", "logs/2-core-cpu/2-core_bucket_ab"),
    ("tflops", PARITY, "--columns", "run,verdict,steps,steady_ci95,reasons"),
    ("parity", PARITY),
    ("compare", "logs/2-core-cpu/2-core_bucket_ab"),
    ("breakdown", "logs/2-core-cpu/2-core_breakdown"),
)


@pytest.fixture
def on_terminal(monkeypatch, capsys):
    """The lines of a command whose output is a terminal of `width` columns, without colours."""

    def lines(width: int, name: str, *arguments: str) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        assert importlib.import_module(f"analysis.{name}").main(list(arguments)) == 0
        return re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out).splitlines()

    return lines


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_line_is_wider_than_the_terminal(command, on_terminal):
    for width in (80, 120):
        lines = on_terminal(width, *command)
        assert len(lines) > 3
        assert [line for line in lines if len(line) > width] == []


def test_several_tables_are_one_list_of_json(capsys):
    tables = [Table([Column("a", "a")], [{"a": i}], f"T{i}") for i in (1, 2)]
    show(tables, "json")
    rows = [{"table": "T1", "a": 1}, {"table": "T2", "a": 2}]
    assert json.loads(capsys.readouterr().out) == rows
    show(tables[:1], "json")
    assert json.loads(capsys.readouterr().out) == [{"a": 1}]


def test_a_note_names_eight_runs_and_counts_more():
    names = [f"r{i}" for i in range(12)]
    assert terminal.who(names, 12) == "all"
    assert terminal.who(names[:8], 12) == "r0, r1, r2, r3, r4, r5, r6, r7"
    assert terminal.who(names[:9], 12) == "9 of 12 runs: r0, r1, r2 ..."
    rows = [{"run": name, "notes": "x" if i < 9 else "-"} for i, name in enumerate(names)]
    table = Table([Column("run", "run"), Column("notes", "notes", long="below")], rows)
    assert table.fitted(80).splitlines()[-1] == "9 of 12 runs: r0, r1, r2 ...: x"


def test_a_pipe_gets_the_table_in_full_and_a_terminal_every_number(on_terminal, printed):
    full = printed(tflops.main, PARITY)
    assert "\x1b" not in full and "deepspeed-zero-dp2-zero3-offload-all-hf" in full
    numbers = set(re.findall(r"(?<![\w.-])\d+\.\d+(?![\w.])", full))
    assert len(numbers) > 40
    for width in (40, 80, 120):
        shown = " ".join(on_terminal(width, "tflops", PARITY))
        assert {n for n in numbers if n not in shown} == set()


def table(**cells: list) -> Table:
    columns = [Column(key, key, long="below" if key == "notes" else "") for key in cells]
    rows = [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]
    return Table(columns, rows)


def test_names_are_cut_in_the_middle_and_stay_apart():
    def names(cells):
        title, rule, *lines = table(run=cells, value=[1.0, 2.0, 3.0]).fitted(60).splitlines()
        assert all(len(line) <= 60 for line in (rule, *lines))
        return [line.split()[0] for line in lines]

    apart = names([f"{i}-{'x' * 60}-{i}" for i in range(10, 13)])
    assert [(name[:3], name[-3:]) for name in apart] == [(f"{i}-", f"-{i}") for i in range(10, 13)]
    alike = names([f"{'x' * 60}-{i}-{'y' * 30}" for i in range(3)])
    assert [name[-2:] for name in alike] == ["#1", "#2", "#3"]
    assert terminal.cut("abcdefghij", 5) == "ab…ij" and terminal.cut("abcde", 5) == "abcde"


def test_one_row_keeps_its_columns_and_a_long_word_is_broken():
    assert "same in every row" not in table(run=["a"], gpus=[1]).fitted(80)
    said = table(run=["a", "b"], gpus=[1, 1], notes=["", "w" * 200]).fitted(80)
    assert "same in every row: gpus 1" in said and said.count("w") == 201  # and the one of "row"
    assert max(map(len, said.splitlines())) <= 80


def test_columns_are_chosen_in_the_order_given_and_an_unknown_one_names_the_known():
    first = table(run=["a"], gpus=[1], step_s=[0.5])
    (kept,) = chosen([first], ["step_s", "run"])
    assert kept.render("csv") == "step_s,run\n0.5,a\n"
    assert kept.render("json") == '[\n{"step_s": 0.5, "run": "a"}\n]\n'
    with pytest.raises(UsageError, match="^no column speed, x; there are: run, gpus, step_s$"):
        chosen([first], ["run", "speed", "gpus", "x"])
    other = table(rank=[1])
    assert [t.columns[0].key for t in chosen([first, other], ["gpus"])] == ["gpus"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_known_column_that_no_row_has_is_a_column_of_dashes(format, printed, capsys):
    names = "run,cp,etp,steady_n,predicted_s,notes"
    text = printed(tflops.main, f"{PARITY}/ddp", "--columns", names, "--format", format)
    if format == "json":
        (row,) = json.loads(text)
        assert list(row) == names.split(",") and row["etp"] is None and row["notes"]
    else:
        assert "etp" in text
    assert tflops.main([f"{PARITY}/ddp", "--columns", "eptp", "--format", format]) == 2


def test_thousands_are_not_printed_as_powers():
    assert cell(3001.2, ".3g") == "3001" and cell(144270.0, ".5g") == "144270"
    assert cell(0.0, ".1e") == "0.0e+00" and cell(1.75e11, ".3g") == "1.75e+11"


def test_a_seldom_column_is_printed_where_a_row_has_it_or_it_is_chosen():
    columns = [Column("run", "run"), Column("mfu", "MFU", seldom=True)]
    empty = Table(columns, [{"run": "a", "mfu": None, "missing": {"mfu": "no peak"}}])
    assert "MFU" not in empty.render() and "no peak" not in empty.render()
    (kept,) = chosen([empty], ["run", "mfu"])
    assert "MFU" in kept.render() and "no peak" in kept.render()


EVIL = "a\x1b[2J\x9b1m|b\x07\u202e\udcff\nnew"
SHOWN = r"a\x1b[2J\x9b1m|b\x07\u202e\udcff new"


def evil(**row) -> Table:
    return Table([Column(name, name) for name in row], [row], title=EVIL, notes=[EVIL])


def test_no_table_holds_a_control_character():
    for format in FORMATS:
        text = evil(name=EVIL).render(format)
        assert all(c.isprintable() or c == "\n" for c in text), (format, text)
    assert SHOWN in evil(name=EVIL).render("text")


def test_a_name_does_not_end_a_markdown_cell_and_is_no_tag():
    row = evil(name="a|b\nc", loss=1.0).render("markdown").split("\n")[4]
    assert row == "| a\\|b c | 1.0 |"
    # The backslash is escaped, too: an even number of them before | would end the cell.
    row = evil(name="a\\|b").render("markdown").split("\n")[4]
    assert row == "| a\\\\\\|b |"
    tag = "<img src=x onerror=alert(1)> &lt;b>"
    shown = Table([Column("run", "<b>run")], [{"run": tag}], tag, [tag]).render("markdown")
    assert "<" not in shown and shown.count("&lt;img src=x onerror=alert(1)> &amp;lt;b>") == 3


def test_a_name_is_no_link_and_no_picture_in_markdown():
    for name in ("[x](javascript:alert(1))", "![x](https://tracker/x.png)"):
        shown = Table([Column("run", name)], [{"run": name}], name, [name]).render("markdown")
        assert "](" not in shown and shown.count("x&#93;(") == 4


def test_no_cell_of_a_csv_is_a_formula():
    words = ["=1+1", "+1+1", "-1+1", "@sum(a)", "\t=1", " =1", "=cmd|' /C calc'!A0"]
    numbers = ["-", "-1.5", "+2e-3", "12.5 %", "-0.1 %", "plain", "a=b"]
    text = evil(**{str(i): value for i, value in enumerate([*words, *numbers, -3, 1.5, None])})
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
