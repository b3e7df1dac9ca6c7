"""Direct and buffered writes leave the same bytes, in any steps, and their errors reach the caller."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from unittest.mock import Mock

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import h5pack
from h5pack.pack import direct_io
from h5pack.pack.direct_io import ContiguousRows, RowFile, writes_directly
from h5pack.system.files import cached_pages, file_system_type
from tests.makers import flat_folder, quick


@settings(max_examples=20)
@given(
    runs=st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 30_000), st.integers(1, 7)), min_size=1, max_size=5),
    min_write_bytes=st.sampled_from([1, 4096, 10_000, 1 << 20]),
)
def test_direct_buffered_and_plain_writes_agree(runs: list[tuple[int, int, int]], min_write_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_io, "_MIN_WRITE_BYTES", min_write_bytes)
        patch.setattr(direct_io, "_MIN_LAST_WRITE_BYTES", min_write_bytes // 8 + 1)
        expected = bytearray()
        files = {io: RowFile(str(new(Path(folder) / io)), io) for io in ("direct", "buffered")}
        random = np.random.default_rng(min_write_bytes)
        position = 0
        for gap, count, steps in runs:
            position += gap
            data = random.integers(0, 256, count, np.uint8)
            for file in files.values():
                rows = ContiguousRows(file, position, count, row_bytes=1, last=gap % 2 == 1)
                for step in range(1, steps + 1):
                    stop = count * step // steps
                    rows.buffer[count * (step - 1) // steps : stop] = data[count * (step - 1) // steps : stop]
                    rows.ready(stop)
                rows.wait()
            expected += bytes(position - len(expected)) + data.tobytes()
            position += count
        for io, file in files.items():
            file.close()
            assert (Path(folder) / io).read_bytes() == expected, io


def new(path: Path) -> Path:
    path.touch()
    return path


def test_rows_are_written_while_the_next_is_filled(tmp_path: Path) -> None:
    file = RowFile(str(new(tmp_path / "f")), "direct")
    first, second = (ContiguousRows(file, start, 8192, row_bytes=1) for start in (0, 8192))
    assert not np.shares_memory(first.buffer, second.buffer)
    for value, rows in enumerate((first, second), 1):
        rows.buffer[:] = value
        rows.ready(8192)
    first.wait()
    second.wait()
    file.close()
    assert (tmp_path / "f").read_bytes() == b"\1" * 8192 + b"\2" * 8192


@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_a_failing_write_reaches_the_caller(tmp_path: Path, io: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RowFile(str(new(tmp_path / "f")), io)
    monkeypatch.setattr(os, "pwrite", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    rows = ContiguousRows(file, 0, 10_000, row_bytes=1)

    def write() -> None:
        rows.ready(10_000)
        rows.wait()

    with pytest.raises(OSError, match="No space left"):
        write()
    monkeypatch.undo()
    file.close()


def test_devices_that_refuse_direct_writes_get_buffered_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RowFile(str(new(tmp_path / "f")), "direct")
    if file.direct is None:
        pytest.skip("needs a file system with O_DIRECT: TMPDIR=/a/folder/on/ext4")
    pwrite = os.pwrite

    def choosy(descriptor: int, data: memoryview, offset: int) -> int:
        if descriptor == file.direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", choosy)
    rows = ContiguousRows(file, 100, 50_000, row_bytes=1)
    rows.buffer[:] = 7
    rows.ready(50_000)
    rows.wait()
    file.close()
    assert (tmp_path / "f").read_bytes() == bytes(100) + b"\7" * 50_000


def test_which_file_systems_are_written_directly(tmp_path: Path) -> None:
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    kinds = {fields[4]: fields[fields.index("-") + 1] for fields in mounts}
    for mount, kind in kinds.items():
        if kind in ("ext4", "xfs", "tmpfs", "proc") and os.path.isdir(mount):
            assert writes_directly(mount, "auto") == (kind in ("ext4", "xfs"))
    assert not writes_directly(str(tmp_path / "nowhere"), "auto")


def test_direct_writes_leave_no_pages_of_rows_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 8,400 bytes, whose chunks end with a partial page."""
    monkeypatch.undo()  # Only flushed pages can be dropped.
    source = flat_folder(tmp_path / "in", 60, (40, 70))
    pages = {}
    for io in ("direct", "buffered"):
        h5pack.convert(source, tmp_path / f"{io}.h5", **quick(io=io, chunk_rows=10))
        pages[io] = cached_pages(tmp_path / f"{io}.h5")
    with h5py.File(tmp_path / "direct.h5") as file:
        first = file["images"].id.get_chunk_info(0).byte_offset
    if file_system_type(tmp_path) == "tmpfs":
        pytest.skip("tmpfs keeps all pages")
    assert pages["direct"] <= -(-first // 4096)
    assert pages["buffered"] >= 60 * 40 * 70 * 3 // 4096
