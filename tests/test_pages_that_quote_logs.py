"""Markdown that quotes iterations is found in a folder; only the quoted lines count."""

import shutil

import numpy as np
import pytest

from analysis.logs.load import find_logs, load
from analysis.logs.readers import read
from analysis.logs.record import Refusal
from analysis.logs.verdict import judge
from analysis.measured import profile_rows


def line(i: int, ms: float = 1000.5, end: str = " |\n") -> str:
    return (
        f" iteration {i:8d}/     100 | consumed samples: {8 * i:12d} | elapsed time per iteration"
        f" (ms): {ms} | global batch size:     8 | lm loss: 1.05E+01 | grad norm: 1.0{end}"
    )


PAGE = "# Results\n\nA run died of CUDA out of memory. Another one:\n\n```\n{}```\n\n| a | b |\n"


def test_a_folder_is_searched_for_pages_that_quote_iterations(tmp_path):
    (tmp_path / "README.md").write_text("# No log\n\nelapsed time per iteration (ms) is printed\n")
    (tmp_path / "quotes.md").write_text(PAGE.format("".join(map(line, range(1, 6)))))
    (tmp_path / "run.log").write_text("".join(map(line, range(1, 4))))
    found, refused = find_logs([tmp_path])
    assert [path.name for path in found] == ["quotes.md", "run.log"] and refused == []


def test_the_words_of_a_page_say_nothing_of_the_run(tmp_path):
    page = tmp_path / "quotes.md"
    page.write_text(PAGE.format("".join(map(line, range(1, 6)))) + "\nCUDA out of memory\n")
    record = read(page)
    assert len(record.iteration) == 5 and record.failure is None
    assert judge(record).verdict == "end unknown"
    assert "a page quotes these lines: how the run went on is not known" in record.notes


def test_a_page_without_iterations_is_refused_when_it_is_named(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Traceback (most recent call last):\n  File 'x', line 1\nOOM\n")
    with pytest.raises(Refusal, match="a page that quotes no iteration"):
        read(page)


@pytest.mark.parametrize(
    "broken",
    [
        line(5).replace(" | elapsed", " |\n > elapsed"),
        line(5).replace("elapsed time per iteration", "elapsed time\n per iteration"),
        line(5).split(" | global")[0] + "\n",
        line(5).split(" | global")[0] + " ...\n",
    ],
    ids=["between two fields", "in a label", "behind its time", "with dots"],
)
def test_a_line_that_an_excerpt_breaks_is_read(tmp_path, broken):
    page = tmp_path / "quotes.md"
    whole = "".join(line(i, 1000.0 + i) for i in range(1, 5))
    page.write_text(PAGE.format(whole + broken + line(6, 1006.0)))
    record = read(page)
    assert record.iteration.tolist() == [1, 2, 3, 4, 5, 6]
    assert record.step_s[4] == 1.0005
    assert any(note.startswith("1 lines are split or cut") for note in record.notes)


@pytest.mark.parametrize("cut", ["100\n", "1000.\n", "\n"])
def test_a_time_that_is_cut_is_left_out_and_said(tmp_path, cut):
    page = tmp_path / "quotes.md"
    page.write_text(PAGE.format("".join(map(line, range(1, 5))) + line(5).split("1000.5")[0] + cut))
    record = read(page)
    assert record.iteration.tolist() == [1, 2, 3, 4]
    assert "1 iteration lines hold no whole time: left out" in record.notes


def test_a_time_that_ends_where_the_file_does_is_left_out(tmp_path):
    log = tmp_path / "run.log"
    log.write_text("".join(map(line, range(1, 5))) + line(5).split("1000.5")[0] + "1000.5")
    assert read(log).iteration.tolist() == [1, 2, 3, 4]


def test_the_same_bytes_in_two_files_are_noted(tmp_path):
    (tmp_path / "a.log").write_text("".join(map(line, range(1, 9))))
    shutil.copy(tmp_path / "a.log", tmp_path / "b.log")
    (tmp_path / "c.log").write_text("".join(line(i, 1000.6) for i in range(1, 9)))  # as long
    a, b, c = load([tmp_path])[0]
    assert (a.copy_of, b.copy_of, c.copy_of) == ("", str(tmp_path / "a.log"), "")
    assert b.notes[-1].startswith(f"the same evidence as {tmp_path / 'a.log'} (SHA-256 ")
    assert np.isfinite(b.step_s).all()


def test_a_folder_of_profiles_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    closed = tmp_path / "closed"
    closed.mkdir()
    listed = profile_rows.below.__globals__["os"].listdir

    def listdir(path):
        if str(path) == str(closed):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(profile_rows.below.__globals__["os"], "listdir", listdir)
    refused: list[Refusal] = []
    assert profile_rows.report(tmp_path, refused, 10) == []
    assert [str(refusal) for refusal in refused] == [f"{closed}: Permission denied"]


def lines_of(change, only=None, form=line):
    """A page of eight iterations, all changed or one of them, read."""
    made = [form(i, 1000.0 + i) for i in range(1, 9)]
    return "".join(change(x) if only in (None, i) else x for i, x in enumerate(made))


def titan(i: int, ms: float) -> str:
    return f"[titan] step: {i:3d}  loss: {9.5 - i / 10:.4f}  memory: 9.31GiB(11%)  tps: {ms:,.1f}\n"


def nanochat(i: int, ms: float) -> str:
    said = f"loss: {9.5 - i / 10:.4f} | lrm: 1.00 | dt: {ms}ms | tok/sec: 5,000 | mfu: 9.0"
    return f"step {i:05d} ({i}.00%) | {said}\n"


@pytest.mark.parametrize("form", [line, nanochat, titan])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.replace("|", "\\|"),
        lambda x: "| " + x.strip().replace("|", "&#124;") + " |\n",
        lambda x: "<tr><td>" + x.strip().replace(" | ", "</td><td>") + "</td></tr>\n",
        lambda x: "> " + x.replace(" ", "\u00a0"),
        lambda x: x.strip() + "<br>\r\n",
        lambda x: "\x1b[32m" + x.replace(": ", ": \x1b[1m", 1).strip() + "\x1b[0m\n",
        lambda x: x[:40] + "\n    " + x[40:] if x[40] == " " else x,
        lambda x: "> " + "\n> ".join(__import__("textwrap").wrap(x, 60)) + "\n",
    ],
    ids="escaped entities cells nbsp br colours broken wrapped".split(),
)
@pytest.mark.parametrize("only", [None, 3])
def test_what_a_page_adds_to_its_lines_loses_none(tmp_path, form, change, only):
    page = tmp_path / "quotes.md"
    page.write_text(PAGE.format(lines_of(change, only, form)))
    record = read(page)
    assert record.iteration.tolist() == list(range(1, 9))
    plain = tmp_path / "plain.md"
    plain.write_text(PAGE.format(lines_of(str, None, form)))
    for name in ("step_s", "tokens_per_s", "loss"):
        assert getattr(record, name).tolist() == pytest.approx(
            getattr(read(plain), name).tolist(), nan_ok=True
        )


def test_lines_that_are_joined_are_told_and_keep_their_number(tmp_path):
    broken = line(5).replace("iteration  ", "iteration\n  ")
    page = tmp_path / "quotes.md"
    again = line(4).replace("1.05E", "1.04E")
    page.write_text(PAGE.format(line(3) + line(4) + broken + again) + line(2))
    record = read(page)
    assert record.iteration.tolist() == [3, 4, 5, 4, 2]
    assert "lines that the page breaks are joined" in record.notes
    assert any(note.startswith("line 10: iterations go back from 5") for note in record.notes)


def test_lines_of_several_runs_at_one_iteration_are_all_read(tmp_path):
    other = line(3, 900.0).replace("1.05E+01", "9.9E+00")
    rank = line(3, 1000.6)
    page = tmp_path / "quotes.md"
    page.write_text(PAGE.format(line(3) + other + rank))
    record = read(page)
    assert record.step_s.tolist() == [1.0005, 0.9]
    assert "1 lines repeat an iteration and its loss: dropped" in record.notes
