"""Bytes of saved state, and how they get to the disk. No torch."""

import os
import re
import stat
import threading
import time
import zlib

import pytest

from base import storage
from base.errors import UsageError
from base.storage import new_folder, state_bytes, write_blocks, write_synced


@pytest.mark.parametrize("sizes", [[], [5], [1, 0, 3], [70_000, 1, 70_000, 9]])
def test_blocks_are_written_in_order_summed_and_counted(tmp_path, sizes):
    blocks = [bytes([i + 1]) * size for i, size in enumerate(sizes)]
    whole, ticks = b"".join(blocks), []
    path = tmp_path / "file"
    found = write_blocks(path, blocks, lambda: ticks.append(1))
    assert found == (len(whole), zlib.crc32(whole))
    assert path.read_bytes() == whole and len(ticks) == len(blocks)
    assert write_blocks(path, map(memoryview, blocks)) == found


def test_a_system_that_takes_a_block_in_parts_gets_all_of_it():
    class Slow:
        taken = b""

        def write(self, block):
            self.taken += bytes(block[:3])
            return len(block[:3])

    file = Slow()
    storage._write(file, memoryview(b"0123456789"))
    assert file.taken == b"0123456789"


def test_what_was_written_is_on_disk_when_it_returns(tmp_path, monkeypatch):
    synced, real = [], os.fsync  # the sizes of what was synced

    def fsync(handle):
        synced.append(os.fstat(handle).st_size)
        real(handle)

    monkeypatch.setattr(storage.os, "fsync", fsync)
    write_blocks(tmp_path / "file", [b"1", b"2", b"3"])
    assert len(synced) > 1 and synced[-1] == 3  # earlier ones while later blocks were summed
    synced.clear()
    write_synced(tmp_path / "small", "text")
    assert len(synced) == 2 and synced[0] == 4  # the file, whole, and its name
    open_files = len(os.listdir("/proc/self/fd"))
    storage.sync(tmp_path)
    assert len(synced) == 3 and len(os.listdir("/proc/self/fd")) == open_files


@pytest.mark.parametrize(
    ("call", "bad"), [("_write", 0), ("_write", 1), ("_write", 2), ("os.fsync", 0)]
)
def test_a_disk_that_fails_at_any_block_or_sync_is_an_error(tmp_path, monkeypatch, call, bad):
    count = iter(range(9))

    def fail(*_):
        if next(count) == bad:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"base.storage.{call}", fail)
    threads = threading.active_count()
    with pytest.raises(OSError, match="No space left"):
        write_blocks(tmp_path / "file", [b"1", b"2", b"3"])
    assert threading.active_count() == threads


def test_an_error_that_the_disk_tells_once_is_not_lost_when_the_next_sync_begins(
    tmp_path, monkeypatch
):
    blocks, syncs = [], []

    def fsync(handle):
        syncs.append(1)
        if len(syncs) == 1:
            raise OSError(5, "Input/output error")

    def until_the_second_sync():
        while len(syncs) < 2 and len(blocks) < 1000:
            blocks.append(b"1")
            yield b"1"
            time.sleep(0.001)

    monkeypatch.setattr(storage.os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output error"):
        write_blocks(tmp_path / "file", until_the_second_sync())
    assert len(syncs) == 1 and len(blocks) < 1000  # it ends where it was told


def test_a_small_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "small"
    write_synced(path, "old")
    os.umask(mask := os.umask(0))
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    write_synced(path, "new", 0o600)
    assert path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == 0o600

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_synced(path, "newer")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_folder_and_nothing_else(tmp_path, monkeypatch):
    def write(text: str) -> None:
        with new_folder(tmp_path / "weights") as aside:
            write_synced(aside / "file", text)

    def full(handle):
        raise OSError(28, "No space left on device")

    (tmp_path / ".weights.partial" / "left").mkdir(parents=True)  # of a writer that was killed
    write("old")
    with monkeypatch.context() as patch, pytest.raises(UsageError, match="weights: No space left"):
        patch.setattr(storage.os, "fsync", full)
        write("new")
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    assert (tmp_path / "weights" / "file").read_text() == "old"
    write("new")
    assert (tmp_path / "weights" / "file").read_text() == "new"


def test_the_published_split_is_2_and_12_bytes_per_parameter(shared):
    """181B on 256 GPUs: 0.34TB (1.4GB per file and GPU) and 2.00TB (8.0GB), 2.4TB in all."""
    published = next((shared / "seeds").glob("003_*.txt")).read_text()
    weights, state = (
        float(re.search(rf"([\d.]+)TB in {name}", published)[1])
        for name in ("PP layer states", "optimizer states")
    )
    total = float(re.search(r"a total ([\d.]+)TB per checkpoint", published)[1])
    tebi = 2**40  # as du prints
    assert 2 * 181e9 / tebi == pytest.approx(weights, rel=0.05)
    assert state_bytes(181e9) / tebi == pytest.approx(state, rel=0.05)
    assert (2 * 181e9 + state_bytes(181e9)) / tebi == pytest.approx(total, rel=0.05)
