"""Marked blocks are a function of the data: they are current here, and a stale one is an error."""

import pytest

from analysis import report
from base.errors import UsageError
from benchmarks import published_tables  # noqa: F401 # its blocks
from tests.conftest import ROOT
from tests.fixture_runs import facts, write


def marked():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "logs").rglob("*.md")]
    return [p for p in pages if "<!-- report:" in p.read_text()]


@pytest.mark.parametrize("path", marked(), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_table_of_the_repository_is_current(path):
    assert report.main(["--check", str(path)]) == 0


def test_a_changed_number_is_stale_until_it_is_written_again(tmp_path, capsys, printed):
    path, row = tmp_path / "x.md", "| accum2_300 (baseline) | 8 | 29971.23 |"
    path.write_text("a\n<!-- report: gpt2 -->\nold\n<!-- /report -->\nb\n")
    for arguments, status in ((["--check"], 1), ([], 0), (["--check"], 0)):
        assert report.main([*arguments, str(path)]) == status
    text = path.read_text()
    assert text.startswith("a\n<!-- report: gpt2 -->\n") and text.endswith("<!-- /report -->\nb\n")
    path.write_text(text.replace("29971.23", "29971.24"))
    capsys.readouterr()
    stale, where, old, new = printed(report.main, "--check", path, status=1).splitlines()
    assert "is stale" in stale and where.startswith("@@ ")
    assert new.startswith(f"+{row}") and old.startswith(f"-{row}".replace("23", "24"))


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ("<!-- report: nothing -->\n<!-- /report -->", "x.md:2: unknown report 'nothing'"),
        ("<!-- report: gpt2 -->", "not closed by"),
        ("<!-- report: gpt2 -->\n<!-- report: gpt2 -->\n<!-- /report -->", "before the next"),
        ("<!-- report: jeanzay 1-2 -->\n<!-- /report -->", "no row from lines 1 to 2"),
        ("<!-- report: file nowhere.md -->\n<!-- /report -->", "nowhere.md"),
        ("<!-- report: tflops nowhere -->\n<!-- /report -->", "nowhere"),
        ("<!-- report: tflops --convention x y -->\n<!-- /report -->", "--convention"),
    ],
)
def test_a_block_that_cannot_be_written_names_its_line(block, words):
    with pytest.raises(UsageError, match="x.md:2") as error:
        report.regenerate(f"title\n{block}\n", "x.md")
    assert words in str(error.value)


def test_runs_make_blocks_too_and_name_what_they_leave_out(tmp_path, monkeypatch, capsys):
    write(tmp_path / "logs", facts("s", "ddp", engine="ddp"))
    (tmp_path / "logs/hello.log").write_text("hello\n")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    text = "<!-- report: tflops logs -->\n<!-- /report -->\n<!-- report: parity logs -->\n"
    new = report.regenerate(text + "<!-- /report -->", "x.md")
    assert "| ddp | ddp | 1 | 1 |" in new and "equal" in new
    assert str(tmp_path) not in new
    assert "hello.log" in capsys.readouterr().err
