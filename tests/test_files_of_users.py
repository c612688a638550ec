"""Files that a user names: what has no end is refused in one line."""

import gzip

import pytest

from analysis import plots
from analysis.logs.parsing import packed
from analysis.logs.readers import torch_trace
from base.errors import UsageError
from tests.conftest import ROOT


def test_a_loop_of_links_is_refused(tmp_path, capsys):
    (tmp_path / "loop").symlink_to("loop")
    assert plots.main([str(ROOT / "logs/2-core-cpu"), "--out", str(tmp_path / "loop")]) == 2
    assert "loop" in capsys.readouterr().err


def test_a_trace_that_inflates_to_gigabytes_is_refused(tmp_path, monkeypatch):
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress(b" " * (3 << 20) + b"{}"))
    monkeypatch.setattr(packed, "MOST", 1 << 20)
    with pytest.raises(UsageError, match="more than 1 MiB"):
        torch_trace.read_trace(tmp_path / "trace.json.gz")
