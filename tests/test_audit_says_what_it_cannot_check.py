"""The audit names the columns in which it would not notice a wrong number."""

from pathlib import Path

from analysis.audit import main
from analysis.published.any_table import tables_of
from analysis.published.audit import audit_paths
from analysis.published.unchecked import unchecked

HEAD = "| GPUs | batch size | seq len | s/step | tokens/s | peak memory (GB) |\n|" + "---|" * 6
ROWS = [(8, 256, 4096, 16.0, 65536, 61.2), (16, 256, 4096, 8.4, 124830, 58.7)]
ROWS += [(32, 256, 4096, 4.5, 233017, 55.1)]


def table(columns: slice) -> str:
    """The columns of the table above as Markdown."""
    lines = [*HEAD.split("\n"), *("| " + " | ".join(map(str, row)) + " |" for row in ROWS)]
    return "\n".join("|" + "|".join(line.split("|")[1:-1][columns]) + "|" for line in lines)


def blind(text: str) -> list[str]:
    (one,) = tables_of(Path("t.md"), text, {})
    before = [dict(row.values) for row in one.rows]
    found = unchecked(one)
    assert [row.values for row in one.rows] == before
    return found


def test_a_column_that_an_identity_holds_is_checked_and_memory_is_not():
    assert blind(table(slice(0, 6))) == ["peak memory (GB)"]


def test_without_the_batch_nothing_holds_the_seconds():
    assert "s/step" in blind(table(slice(3, 6)))


def test_the_columns_are_named_beside_those_that_were_read(tmp_path, capsys):
    path = tmp_path / "t.md"
    path.write_text(table(slice(0, 6)))
    assert main([str(path)]) == 0
    said = capsys.readouterr().err
    assert "twice the number would not be noticed in peak memory (GB)" in said


def test_a_column_of_zeros_alone_is_none_that_is_not_checked(tmp_path):
    lines = ["gpus,tp,pp,dp,skipped,tokens/s,loss,seconds_per_iteration"]
    lines += [f"{n},1,1,{n},0,{n}00,0,0" for n in (8, 16)]
    (tmp_path / "x.csv").write_text("\n".join(lines) + "\n")
    says: list[str] = []
    audit_paths([tmp_path / "x.csv"], says=says)
    assert says and "seconds" not in says[0].partition("not be noticed")[2]
