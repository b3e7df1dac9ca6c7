"""Writing runs of rows into an unfinished file, past the page cache where the file system suits it.

A buffered write copies every byte into the page cache, page by page, on the CPU that should decode; measured on one
virtual machine, 3.7 CPU seconds a GB, where a direct write (O_DIRECT) took 0.02. It also pushes everything else out of
memory, for a file that may be far larger. Direct writes must start and end on 4,096-byte boundaries in file and memory,
so a run's first and last partial page are buffered; no two runs share any other page. A thread writes while the next
images are decoded.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import numpy.typing as npt

from h5pack import schema
from h5pack.rows import write_all

_PAGE = schema.ALIGNMENT_BYTES
_PIECE_BYTES = 2 * 1024 * 1024
# A smaller row that lies alone has too few whole pages.
_DIRECT_ROW_BYTES = 16 * _PAGE
# Local file systems whose direct writes were measured, or are known, to run at the device's speed. Network file
# systems may wait for the server at each write, and memory file systems have nothing to bypass.
_DIRECT_FILE_SYSTEMS = ("ext4", "xfs")


class RowFile:
    """One worker's way into the file.

    Two buffers take turns, so that one is written while the next is filled; they are reused, because fresh memory
    costs more than filling it.

    Parameters
    ----------
    path : str
    io : str
        direct, buffered, or auto: direct on the file systems that suit it.
    """

    def __init__(self, path: str, io: str) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.direct = _open_direct(path) if io == "direct" or (io == "auto" and suits_direct(path)) else None
        self.thread = ThreadPoolExecutor(1, "h5pack-write") if self.direct is not None else None
        self._memory = [_memory(_PAGE), _memory(_PAGE)]

    def begin(self, offset: int, count: int) -> Run:
        """Start a run of `count` bytes at `offset`; the run before the last must have been waited for."""
        # File and memory must be aligned together.
        skew = offset % _PAGE if self.direct is not None else 0
        return Run(self, self._take(skew + count), offset, skew, count)

    def begin_rows(self, offsets: npt.NDArray[np.int64], row_bytes: int) -> RowRun:
        """Start some rows at ascending `offsets`, int64 (n,), in bytes; see `begin`."""
        count = len(offsets)
        if int(offsets[-1] - offsets[0]) == (count - 1) * row_bytes:
            return RowsTogether(self.begin(int(offsets[0]), count * row_bytes), row_bytes)
        # Direct writes need whole pages at the same place within a page in memory as in the file.
        direct = self.direct is not None and row_bytes >= _DIRECT_ROW_BYTES
        skews = offsets % _PAGE if direct else np.zeros(count, np.int64)
        step = -(-(row_bytes + _PAGE) // _PAGE) * _PAGE if direct else row_bytes
        return RowsApart(self, self._take(count * step), offsets, skews + np.arange(count) * step, row_bytes, direct)

    def _take(self, count: int) -> mmap.mmap:
        """The memory whose turn it is, of at least `count` bytes."""
        self._memory.reverse()
        if len(self._memory[0]) < count:
            self._memory[0] = _memory(count)
        return self._memory[0]

    def close(self) -> None:
        """Wait for the thread, and close the file."""
        if self.thread is not None:
            self.thread.shutdown()
        for descriptor in (self.descriptor, self.direct):
            if descriptor is not None:
                os.close(descriptor)

    def write(self, descriptor: int, data: memoryview, offset: int) -> None:
        """Write `data` through `descriptor`, or buffered where the kernel takes no direct write after all."""
        try:
            write_all(descriptor, data, offset)
        except OSError as error:
            if descriptor == self.descriptor or error.errno != errno.EINVAL:
                raise
            # Larger device blocks, or encryption: the kernel took the flag but not the write.
            write_all(self.descriptor, data, offset)


class Run:
    """Bytes on their way to one place in the file: fill `buffer`, call `ready` as it fills, then `wait`.

    Attributes
    ----------
    buffer : ndarray
        uint8, (count,).
    """

    def __init__(self, file: RowFile, memory: mmap.mmap, start: int, skew: int, count: int) -> None:
        self.buffer: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8, count, skew)
        self._file = file
        self._start = start
        self._count = count
        self._written = 0
        self._worthwhile = _PIECE_BYTES
        self._pending: list[Future[None]] = []

    def ready(self, count: int) -> None:
        """The first `count` bytes are final; they are handed on as soon as they make a piece.

        Raises
        ------
        OSError
            Where the write is buffered and fails; a direct one's failure is `wait`'s.
        """
        last = count == self._count
        if not last and count < self._worthwhile:
            return
        file = self._file
        if file.direct is None:
            if last:
                file.write(file.descriptor, self.buffer.data, self._start)
            return
        head = min(-self._start % _PAGE, self._count)
        if count < head:
            return
        self._submit(file.descriptor, head)
        whole = (self._start + count) // _PAGE * _PAGE - self._start
        if last or whole - self._written >= _PIECE_BYTES:
            self._submit(file.direct, whole)
        if last:
            self._submit(file.descriptor, count)
        self._worthwhile = self._written + _PIECE_BYTES

    def wait(self) -> None:
        """Return when all bytes are handed to the kernel.

        Raises
        ------
        OSError
        """
        for future in self._pending:
            future.result()

    def _submit(self, descriptor: int, stop: int) -> None:
        """Write the bytes from those written to `stop`, in the thread."""
        if stop > self._written:
            data = self.buffer.data[self._written : stop]
            assert self._file.thread is not None
            self._pending.append(
                self._file.thread.submit(self._file.write, descriptor, data, self._start + self._written)
            )
            self._written = stop


class RowRun(Protocol):
    """Rows on their way to their places: fill each `row`, call `ready`, then `wait`."""

    def row(self, place: int) -> npt.NDArray[np.uint8]:
        """Memory of a row, uint8 (row_bytes,)."""
        ...

    def ready(self, rows: int) -> None:
        """The first so many rows are final."""
        ...

    def wait(self) -> None:
        """Return when all bytes are handed to the kernel."""
        ...


class RowsTogether:
    """Rows that lie one behind the other; a `RowRun`.

    Parameters
    ----------
    run : Run
    row_bytes : int
    """

    def __init__(self, run: Run, row_bytes: int) -> None:
        self._run, self._row_bytes = run, row_bytes

    def row(self, place: int) -> npt.NDArray[np.uint8]:
        """See `RowRun`."""
        return self._run.buffer[place * self._row_bytes : (place + 1) * self._row_bytes]

    def ready(self, rows: int) -> None:
        """See `RowRun`; raises OSError where the write is buffered and fails."""
        self._run.ready(rows * self._row_bytes)

    def wait(self) -> None:
        """See `RowRun`; raises OSError."""
        self._run.wait()


class RowsApart:
    """Rows each at its own place; a `RowRun`. They are written when all are ready.

    Parameters
    ----------
    file : RowFile
    memory : mmap
    offsets, places : ndarray
        int64, (n,): where each row starts in the file and in `memory`, in bytes.
    row_bytes : int
    direct : bool
        Write the whole pages of each row past the page cache.
    """

    def __init__(
        self,
        file: RowFile,
        memory: mmap.mmap,
        offsets: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
        row_bytes: int,
        direct: bool,
    ) -> None:
        self._file, self._row_bytes, self._direct = file, row_bytes, direct
        self._offsets, self._places = offsets.tolist(), places.tolist()
        self._buffer = np.frombuffer(memory, np.uint8)
        self._pending: Future[None] | None = None

    def row(self, place: int) -> npt.NDArray[np.uint8]:
        """See `RowRun`."""
        return self._buffer[self._places[place] : self._places[place] + self._row_bytes]

    def ready(self, rows: int) -> None:
        """See `RowRun`; raises OSError where nothing writes beside this thread and the write fails."""
        if rows < len(self._offsets):
            return
        if self._file.thread is None:
            self._write()
        else:
            self._pending = self._file.thread.submit(self._write)

    def wait(self) -> None:
        """See `RowRun`; raises OSError."""
        if self._pending is not None:
            self._pending.result()

    def _write(self) -> None:
        file, data, size = self._file, self._buffer.data, self._row_bytes
        if file.direct is None or not self._direct:
            # Here rows lie one behind the other in memory; some do in the file, too.
            breaks = [place for place in range(1, len(self._offsets)) if self._follows_not(place)]
            for first, last in itertools.pairwise([0, *breaks, len(self._offsets)]):
                file.write(file.descriptor, data[first * size : last * size], self._offsets[first])
            return
        for offset, place in zip(self._offsets, self._places, strict=True):
            head = -offset % _PAGE
            whole = (size - head) // _PAGE * _PAGE
            file.write(file.direct, data[place + head : place + head + whole], offset + head)
            for begin, end in ((0, head), (head + whole, size)):
                if begin < end:
                    file.write(file.descriptor, data[place + begin : place + end], offset + begin)

    def _follows_not(self, place: int) -> bool:
        return bool(self._offsets[place] - self._offsets[place - 1] != self._row_bytes)


def _memory(count: int) -> mmap.mmap:
    """Page-aligned memory of this process alone, in huge pages where they are to be had: fewer to pin for a write."""
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def suits_direct(path: str) -> bool:
    """Whether direct writes suit the file system that holds `path`, by Linux's own table of mounts."""
    try:
        device = os.stat(path).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        with open("/proc/self/mountinfo") as mounts:
            for line in mounts:
                fields = line.split()
                if fields[2] == number:
                    return fields[fields.index("-") + 1] in _DIRECT_FILE_SYSTEMS
    except (OSError, ValueError, IndexError):
        pass
    return False


def _open_direct(path: str) -> int | None:
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
    except OSError:
        return None
