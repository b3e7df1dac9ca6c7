"""Writing rows into an unfinished file, with direct I/O (bypassing the page cache) on suitable file systems.

A buffered write copies every byte into the page cache, which takes CPU time that decoding needs: 3.7 CPU seconds per GB
measured on one virtual machine, where a direct write (O_DIRECT) took 0.02. Buffered writes also evict other files from
the cache in favor of an output that may be far larger than memory. Direct writes must start and end on 4,096-byte
boundaries in the file and in memory, so the first and last partial page of contiguous rows are written with buffered
writes. Only such a page can contain rows of two workers. With direct I/O, a background thread writes while the next
images are decoded.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from h5pack.format import schema
from h5pack.system.files import drop_pages, file_system_type, write_all
from h5pack.system.machine import huge_page_memory

_PAGE = schema.ALIGNMENT_BYTES
_MIN_WRITE_BYTES = 2 * 1024 * 1024
# A task ends only after its last write. So that the last write takes less time, the writes become smaller towards the
# end of a task, down to this size.
_MIN_LAST_WRITE_BYTES = 256 * 1024
# A scattered row smaller than this has too few whole pages for direct writes to pay off.
_MIN_DIRECT_ROW_BYTES = 16 * _PAGE
# Local file systems whose direct writes were measured, or are known, to run at the device's speed. On network file
# systems each direct write may wait for the server, and in-memory file systems have no page cache to bypass.
_DIRECT_FILE_SYSTEMS = ("ext4", "xfs")


class RowBuffer:
    """A buffer of rows to write: fill the rows in order, call `ready` after each one, and `wait` at the end."""

    def __init__(self, file: RowFile, buffer: npt.NDArray[np.uint8], starts: Sequence[int], row_bytes: int) -> None:
        self._file, self.buffer, self._starts, self._row_bytes = file, buffer, starts, row_bytes
        self._pending: list[Future[None]] = []

    def row(self, position: int) -> npt.NDArray[np.uint8]:
        """Return the memory of one row, uint8 (row_bytes,), to be filled."""
        start = self._starts[position]
        return self.buffer[start : start + self._row_bytes]

    def ready(self, rows: int) -> None:
        """Allow the first `rows` rows to be written; raises OSError if a write in this thread fails."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until all bytes are passed to the kernel; raises OSError if a write in the background thread failed."""
        for future in self._pending:
            future.result()


class RowFile:
    """An unfinished file to which one worker writes rows; `io` is direct, buffered or auto (see `writes_directly`).

    Two buffers alternate, so that one can be filled while the other is written. They are reused, because allocating
    memory takes longer than filling it.
    """

    def __init__(self, path: str, io: str) -> None:
        # Open for writing only. Otherwise, an NFS client could fetch a page, change a part of it, and later send the
        # whole page. That would overwrite neighboring rows that another machine has written meanwhile.
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self.direct: int | None = None
        if writes_directly(path, io):
            with contextlib.suppress(OSError):
                self.direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
        self.thread = ThreadPoolExecutor(1, "h5pack-write") if self.direct is not None else None
        self._memory = [huge_page_memory(_PAGE), huge_page_memory(_PAGE)]

    def begin_rows(self, offsets: npt.NDArray[np.int64], row_bytes: int, *, last: bool = False) -> RowBuffer:
        """Return a buffer for rows at ascending byte `offsets`, int64 (n,). `last`: whether the task ends with them.

        There is memory for two buffers, so first call `wait` on all earlier buffers except the most recent one.
        """
        if int(offsets[-1] - offsets[0]) == (len(offsets) - 1) * row_bytes:
            return ContiguousRows(self, int(offsets[0]), len(offsets), row_bytes, last=last)
        return ScatteredRows(self, offsets, row_bytes)

    def next_memory(self, size: int) -> mmap.mmap:
        """Return at least `size` bytes of memory that no pending write uses."""
        self._memory.reverse()
        if len(self._memory[0]) < size:
            self._memory[0] = huge_page_memory(size)
        return self._memory[0]

    def close(self) -> None:
        """Wait for pending writes, and close the file."""
        if self.thread is not None:
            self.thread.shutdown()
        for descriptor in (self.descriptor, self.direct):
            if descriptor is not None:
                os.close(descriptor)

    def write(self, descriptor: int, data: memoryview, offset: int) -> None:
        """Write `data` through `descriptor`, or with a buffered write if the kernel refuses a direct one."""
        try:
            write_all(descriptor, data, offset)
        except OSError as error:
            if descriptor == self.descriptor or error.errno != errno.EINVAL:
                raise
            # If the device has blocks larger than 4,096 bytes, or the file is encrypted, the kernel may accept O_DIRECT
            # when the file is opened, but refuse the write.
            write_all(self.descriptor, data, offset)


class ContiguousRows(RowBuffer):
    """Rows that are contiguous in the file; with direct I/O, they are written while the buffer is filled."""

    def __init__(self, file: RowFile, start: int, rows: int, row_bytes: int, *, last: bool = False) -> None:
        self._start, self._size, self._last = start, rows * row_bytes, last
        # For a direct write, the data must begin at a page boundary both in memory and in the file. So the rows have
        # the same offset within a page in memory as in the file.
        skew = start % _PAGE if file.direct is not None else 0
        buffer = np.frombuffer(file.next_memory(skew + self._size), np.uint8, self._size, skew)
        super().__init__(file, buffer, range(0, self._size, row_bytes), row_bytes)
        self._written = 0

    def ready(self, rows: int) -> None:
        size, file = rows * self._row_bytes, self._file
        complete = size == self._size
        enough = _MIN_WRITE_BYTES
        if self._last:
            enough = min(enough, max(_MIN_LAST_WRITE_BYTES, (self._size - self._written) // 2))
        if not complete and size < self._written + enough:
            return
        if file.direct is None:
            if complete:
                file.write(file.descriptor, self.buffer.data, self._start)
            return
        self._submit(file.descriptor, min(-self._start % _PAGE, size))
        self._submit(file.direct, (self._start + size) // _PAGE * _PAGE - self._start)
        if complete:
            self._submit(file.descriptor, size)

    def _submit(self, descriptor: int, stop: int) -> None:
        """Let the background thread write the bytes up to `stop` that it has not yet received."""
        if stop > self._written:
            data, offset = self.buffer.data[self._written : stop], self._start + self._written
            assert self._file.thread is not None
            self._pending.append(self._file.thread.submit(self._file.write, descriptor, data, offset))
            self._written = stop


class ScatteredRows(RowBuffer):
    """Rows that are not contiguous in the file; they are written when all of them are ready."""

    def __init__(self, file: RowFile, offsets: npt.NDArray[np.int64], row_bytes: int) -> None:
        self._direct = file.direct is not None and row_bytes >= _MIN_DIRECT_ROW_BYTES
        # As in `ContiguousRows`, each row has the same offset within a page in memory as in the file.
        stride = -(-(row_bytes + _PAGE) // _PAGE) * _PAGE if self._direct else row_bytes
        starts = np.arange(len(offsets)) * stride + (offsets % _PAGE if self._direct else 0)
        buffer = np.frombuffer(file.next_memory(len(offsets) * stride), np.uint8)
        super().__init__(file, buffer, starts.tolist(), row_bytes)
        self._offsets = offsets.tolist()

    def ready(self, rows: int) -> None:
        if rows < len(self._offsets):
            return
        if self._file.thread is None:
            self._write()
        else:
            self._pending.append(self._file.thread.submit(self._write))

    def _write(self) -> None:
        file, data, size, offsets = self._file, self.buffer.data, self._row_bytes, self._offsets
        if file.direct is None or not self._direct:
            # Here, all rows are contiguous in memory. So rows that are also contiguous in the file need only one write.
            breaks = [row for row in range(1, len(offsets)) if offsets[row] - offsets[row - 1] != size]
            for first, last in itertools.pairwise([0, *breaks, len(offsets)]):
                file.write(file.descriptor, data[first * size : last * size], offsets[first])
            return
        for offset, start in zip(offsets, self._starts, strict=True):
            head = -offset % _PAGE
            whole = (size - head) // _PAGE * _PAGE
            file.write(file.direct, data[start + head : start + head + whole], offset + head)
            for begin, end in ((0, head), (head + whole, size)):
                if begin < end:
                    file.write(file.descriptor, data[start + begin : start + end], offset + begin)


def writes_directly(path: str, io: str) -> bool:
    """Return whether to write rows to the file at `path` with direct I/O. If `io` is auto, do so on ext4 and XFS."""
    wanted = io == "direct" or (io == "auto" and file_system_type(path) in _DIRECT_FILE_SYSTEMS)
    return wanted and hasattr(os, "O_DIRECT")  # macOS has no O_DIRECT.


def drop_partial_pages(path: str, io: str, descriptor: int, start: int) -> None:
    """Drop the file's pages from the page cache, from byte `start` on, if rows were written with direct I/O.

    The cache then holds the pages that needed buffered writes. If one of these pages stayed in the cache, the kernel
    could not load the 2 MiB around it into one large folio, from which rows can be copied faster (see
    `h5pack.read.mapping`).
    """
    if writes_directly(path, io):
        drop_pages(descriptor, start)
