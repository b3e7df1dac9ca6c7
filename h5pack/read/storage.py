"""Read a file's bytes without the HDF5 library, into many buffers by one system call, and notice a replaced file.

``os.preadv`` would check every buffer while it holds the GIL. This takes 266 ns per buffer, as long as copying a small
row. The C library's ``preadv`` takes an array of addresses, which NumPy computes for thousands of rows at once, and
ctypes releases the GIL during the call. On a machine with 2 cores, scattering a shuffle window of rows from the page
cache to shuffled batches was almost as fast as copying random rows in memory: 0.83 to 0.95 of that speed for rows of
116 KB, and 0.90 for rows of 3 KB.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from h5pack.errors import PackChangedError, ReadError
from h5pack.system.files import file_system_type
from h5pack.system.libc import libc_function, raise_errno

MAX_BUFFERS = os.sysconf("SC_IOV_MAX")
_MAX_CALL_BYTES = 1 << 30
_RETRY_SECONDS = (0.0, 0.05, 0.5)
CHECK_SECONDS = 1.0
"""Seconds after which most callers check again that a file was not replaced, or that rows are in the page cache."""
_MAX_PROBES = 4


_is_fuse: dict[int, bool] = {}  # by device number


@dataclass(frozen=True)
class FileIdentity:
    """Inode, size and modification time of a file. They change if the file is replaced or rewritten.

    `inode` is 0 on FUSE file systems, such as sshfs, where the inode of a file may change while the file is not open.
    """

    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, file: str | int) -> FileIdentity:
        """Return the current identity of the file at a path or of an open descriptor."""
        status = os.stat(file)
        if status.st_dev not in _is_fuse:
            _is_fuse[status.st_dev] = (file_system_type(file) or "").startswith("fuse")
        return cls(0 if _is_fuse[status.st_dev] else status.st_ino, status.st_size, status.st_mtime_ns)

    def require(self, path: str, file: str | int | None = None) -> None:
        """Raise PackChangedError if the file at `path` does not have this identity.

        `file`, if given, is an open descriptor of the file, which is checked instead of the path. Raises ReadError if
        the system cannot return the identity, for example because the disk fails.
        """
        try:
            # Compare without creating a FileIdentity, because loaders check files several times per batch.
            status = os.stat(path if file is None else file)
            same = status.st_mtime_ns == self.modified_ns and status.st_size == self.size
        except OSError as error:
            # If a file on a server is removed while it is open, the error is ESTALE.
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                problem = f"cannot be read ({error.strerror}); check its permissions and its disk"
                raise ReadError.at(path, problem) from error
            same = False
        if not same or self.inode not in (0, status.st_ino):
            problem = "the file was replaced, rewritten or removed since this dataset was opened"
            raise PackChangedError.at(path, f"{problem}; open the dataset again")


@dataclass(frozen=True)
class SourceFile:
    """A file that stores rows. `path` is absolute."""

    path: str
    identity: FileIdentity


_preadv = libc_function("preadv", ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)


def has_preadv() -> bool:
    """Return whether the system has preadv with 64-bit offsets, in the C library and in Python."""
    return _preadv is not None and ctypes.sizeof(ctypes.c_void_p) == 8 and hasattr(os, "preadv")


def preadv(descriptor: int, buffers: int, count: int, offset: int) -> int:
    """Read into `count` buffers, described by an array of `iovec` at address `buffers`; return the number of bytes."""
    assert _preadv is not None
    got: int = _preadv(descriptor, buffers, count, offset)
    if got < 0:
        raise_errno()
    return got


class Descriptor(int):
    """A file descriptor that is closed with its last reference, and therefore never while a thread reads from it."""

    def __del__(self) -> None:
        os.close(self)


class Storage:
    """Reads bytes of one file, which it opens on first use. A forked child can use its parent's descriptor."""

    def __init__(self, path: str, identity: FileIdentity) -> None:
        self.path = path
        self.identity = identity
        self._opened: dict[str, Descriptor] = {}
        self.checked = 0.0  # monotonic time of the last check that the path leads to this file

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "identity": self.identity, "_opened": {}, "checked": 0.0}

    def close(self) -> None:
        """Close the file once reads in progress have ended. The next read opens it again."""
        self._opened.pop("file", None)

    def open(self) -> int:
        """Return the file's descriptor; raise ReadError if it cannot be opened.

        Raises PackChangedError if the file was replaced or rewritten, which is checked at most once per second.
        """
        kept = self._opened.get("file")
        if kept is not None:
            if time.monotonic() - self.checked > CHECK_SECONDS:
                self.check_unchanged()
            return kept
        self.check_unchanged()
        try:
            descriptor = Descriptor(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            advice = "check its permissions and its disk"
            if error.errno == errno.EMFILE:
                advice = "raise the limit on open files ('ulimit -n')"
            raise ReadError.at(self.path, f"cannot be opened ({error.strerror}); {advice}") from error
        self.identity.require(self.path, descriptor)
        # `dict.setdefault` is atomic, so one of two racing threads wins.
        return self._opened.setdefault("file", descriptor)

    def check_unchanged(self) -> None:
        """Raise PackChangedError if the file at the path is no longer the one that was indexed."""
        self.identity.require(self.path)
        self.checked = time.monotonic()

    def scatter(
        self,
        buffers: npt.NDArray[np.uint64],
        edges: Sequence[int],
        offsets: Sequence[int],
        describe: Callable[[int], str],
    ) -> int:
        """Read extents of the file into many buffers; return the number of read calls, not counting retries.

        `buffers`, uint64 (n, 2), holds the address and size in bytes of each buffer. All sizes are equal, and the
        memory must stay alive and in place during the call. The extent at ``offsets[i]`` fills the buffers ``edges[i]``
        to ``edges[i + 1] - 1``. Raises ReadError if the bytes of buffer b cannot be read after several attempts; the
        message names them by ``describe(b)``. Raises PackChangedError if the file was replaced or rewritten.
        """
        descriptor = self.open()
        size = int(buffers[0, 1])
        max_count = max(1, min(MAX_BUFFERS, _MAX_CALL_BYTES // size))
        pointer = buffers.__array_interface__["data"][0]
        calls = 0
        for offset, start, end in zip(offsets, edges, edges[1:], strict=False):
            while start < end:
                count = min(max_count, end - start)
                try:
                    got = preadv(descriptor, pointer + 16 * start, count, offset)
                except OSError:
                    got = 0
                calls += 1
                whole = got // size
                if not whole:
                    self._fill(descriptor, buffers[start], offset, partial(describe, start))
                    whole = 1
                start, offset = start + whole, offset + whole * size
        # Another program may have written into the file since it was opened.
        self.identity.require(self.path, descriptor)
        return calls

    def read_into(self, out: npt.NDArray[Any], offset: int, describe: Callable[[int], str]) -> int:
        """Fill a C-contiguous array with the bytes at `offset`. Return value and errors are those of `scatter`."""
        descriptor, views = self.open(), cast(Any, (out,))
        try:
            got = os.preadv(descriptor, views, offset)
        except (OSError, ValueError):
            # ValueError: older versions of NumPy cannot export the buffer of a datetime array.
            got = 0
        if got == out.nbytes:
            self.identity.require(self.path, descriptor)
            return 1
        # Retry through the slow path, which handles short reads and errors.
        buffer = np.array([[out.__array_interface__["data"][0], out.nbytes]], np.uint64)
        return 1 + self.scatter(buffer, (0, 1), (offset,), describe)

    def _fill(self, descriptor: int, buffer: npt.NDArray[np.uint64], offset: int, describe: Callable[[], str]) -> None:
        """Fill one buffer after a short or failed read. Raises ReadError if several attempts fail.

        ``describe()`` returns the name of the bytes for the message.
        """
        address, size, done = int(buffer[0]), int(buffer[1]), 0
        pauses = iter(_RETRY_SECONDS)
        while done < size:
            # On macOS, reading 2 GiB or more by one call is an error.
            pair = np.array([[address + done, min(size - done, _MAX_CALL_BYTES)]], np.uint64)
            reason = "the file ends too early"
            try:
                got = preadv(descriptor, pair.__array_interface__["data"][0], 1, offset + done)
            except OSError as error:
                got, reason = 0, error.strerror or str(error)
            done += got
            if not got:
                pause = next(pauses, None)
                if pause is None:
                    self.check_unchanged()
                    advice = "check the disk, run 'h5pack verify' on the file, or restore it"
                    raise ReadError.at(self.path, f"{describe()} cannot be read ({reason}); {advice}")
                time.sleep(pause)

    def is_cached(self, offset: int, *, unknown: bool = True) -> bool:
        """Return whether the byte at `offset` is in the page cache, or `unknown` if the system cannot test it."""
        if not hasattr(os, "RWF_NOWAIT"):
            return unknown
        try:
            return bool(os.preadv(self.open(), [bytearray(1)], offset, os.RWF_NOWAIT))
        except BlockingIOError:
            return False
        except OSError:
            return unknown

    def prefetch(self, offsets: Sequence[int], sizes: Iterable[int]) -> None:
        """Start reading extents of the file into the page cache, without waiting.

        First, the first byte of a few extents is tested. If all these bytes are in the page cache, nothing is read.
        """
        step = max(1, len(offsets) // _MAX_PROBES)
        if not all(map(self.is_cached, offsets[::step])):
            for offset, size in zip(offsets, sizes, strict=True):
                self.will_need(offset, size)

    def will_need(self, offset: int, count: int) -> None:
        """Advise the system that bytes will be needed soon, so that it starts to read them into the page cache."""
        descriptor = self.open()
        try:
            os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_WILLNEED)
        except (OSError, AttributeError):
            return  # The system takes no advice.
