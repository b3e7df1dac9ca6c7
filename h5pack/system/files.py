"""File operations without HDF5: atomic writes, locks, flushing, reading and writing, page cache."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import resource
import stat
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from h5pack.errors import H5PackError, NoSpaceError, OptionsError, OutputBusyError, SourceError
from h5pack.system.libc import MADV_HUGEPAGE, MADV_POPULATE_READ, libc_function, raise_errno

# The workers of a killed process keep its lock for milliseconds. A lock held longer belongs to a running conversion.
_LOCK_WAIT_SECONDS = 3.0
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errno values of a full disk, an exhausted quota and a limit on the size of files."""
_FAILED_STORAGE: set[int] = {
    getattr(errno, name, errno.EIO)  # macOS has no EUCLEAN.
    for name in ("EIO", "EROFS", "ESTALE", "ENODEV", "ENXIO", "ENOTCONN", "ETIMEDOUT", "EHOSTDOWN", "EUCLEAN")
}
"""The errno values of a disk that fails, was made read-only or unmounted, and of a server that does not answer."""

# After each read, the allocator would return a larger buffer to the system, so the next read would cause page faults.
_COPY_BYTES = 128 * 1024


def file_start(path: Path, count: int) -> bytes:
    """Return the first `count` bytes of a file; b"" if it cannot be read, or is not a regular file."""
    try:
        if not path.is_file():  # Opening a named pipe might wait forever.
            return b""
        with path.open("rb") as stream:
            return stream.read(count)
    except OSError:
        return b""


def read_all(descriptor: int, count: int, offset: int) -> bytes:
    """Read and return `count` bytes at `offset`, or fewer if the file ends earlier."""
    parts = []
    while count:
        part = os.pread(descriptor, count, offset)
        if not part:
            break
        parts.append(part)
        count, offset = count - len(part), offset + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def write_all(descriptor: int, data: memoryview | bytes, offset: int) -> None:
    """Write all of `data` at `offset`, repeating the system call if it writes only a part."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


_fallocate = libc_function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_KEEP_SIZE = 1


def reserve(path: Path, start: int, count: int) -> None:
    """Allocate disk space for `count` bytes of a file from byte `start` on; keep the file's size.

    If space cannot be allocated, as on macOS and older versions of NFS, only check that enough is free. Raises OSError
    if there is too little space, or if the limit on the size of files would be exceeded.
    """
    if not count:
        return
    # With _KEEP_SIZE, fallocate ignores the limit on the size of files, so check the limit here.
    if 0 <= resource.getrlimit(resource.RLIMIT_FSIZE)[0] < start + count:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), os.fspath(path))
    with path.open("r+b") as file:
        if _fallocate is not None:
            if not _fallocate(file.fileno(), _KEEP_SIZE, start, count):
                return
            if ctypes.get_errno() in NO_SPACE:
                raise_errno(path)
        status = os.fstatvfs(file.fileno())
    # ramfs and some FUSE file systems do not know their size, and say 0.
    if status.f_blocks and status.f_bavail * status.f_frsize < count:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))


def copy_changed(source: int, target: int, start: int, stop: int) -> None:
    """Copy bytes `start` to ``stop - 1`` of one open file to the same offsets of another; write only pages that differ.

    `source` and `target` are file descriptors.
    """
    for offset in range(start, stop, _COPY_BYTES):
        count = min(_COPY_BYTES, stop - offset)
        # Treat bytes beyond the end of a file as zeros.
        new, old = (read_all(descriptor, count, offset).ljust(count, b"\0") for descriptor in (source, target))
        if new != old:
            for page in range(0, count, mmap.PAGESIZE):
                data = new[page : page + mmap.PAGESIZE]
                if data != old[page : page + mmap.PAGESIZE]:
                    write_all(target, data, offset + page)


_FICLONERANGE = 0x4020940D


def clone_range(source: int, target: int, start: int, count: int, offset: int) -> bool:
    """Copy `count` bytes from `start` of descriptor `source` to `offset` of `target`, by sharing blocks of the disk.

    Returns False if the file system cannot share blocks (XFS, Btrfs and others can), or if `start`, `count` or `offset`
    is not a multiple of the block size. Raises OSError if the disk is full.
    """
    try:
        fcntl.ioctl(target, _FICLONERANGE, struct.pack("=qQQQ", source, start, count, offset))
    except OSError as error:
        if error.errno in NO_SPACE:
            raise
        return False
    return True


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file so that, even after a crash, `path` has either all of `data` or its earlier state."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def copy_permissions(status: os.stat_result, target: int | Path, *, writable: bool = False) -> None:
    """Give a file the owner, group and mode in `status`, as far as the system permits that.

    If the group cannot be set, the file's present group gets only permissions that all users have. With `writable`, the
    owner may always read and write. `target` is a path or a file descriptor.
    """
    mode = stat.S_IMODE(status.st_mode) | (0o600 if writable else 0)
    try:
        os.chown(target, -1, status.st_gid)
    except OSError:
        mode &= ~0o070 | (mode & 0o007) << 3
    with contextlib.suppress(OSError):
        os.chmod(target, mode)
    # Change the owner last, because only root may change the mode of another user's file.
    with contextlib.suppress(OSError):
        os.chown(target, status.st_uid, -1)


def max_open_files() -> int:
    """Return how many files this process may have open at a time."""
    found = os.sysconf("SC_OPEN_MAX")
    return found if found >= 0 else sys.maxsize  # -1: no limit


@contextlib.contextmanager
def reporting_disk_errors(path: Path, advice: str, *parameters: str) -> Iterator[None]:
    """Raise an H5PackError instead of an OSError if a disk is full or fails, a file is gone, or a name is refused.

    For a full disk, the error is a NoSpaceError about `path`, and its message ends with `advice`. `parameters` are the
    parameters that `advice` names. For a file that is too large, the error is a NoSpaceError about `path`, too. Every
    other H5PackError is about the file that the OSError names, or about `path` if the OSError names no file. All other
    OSErrors are raised unchanged.
    """
    try:
        yield
    except OSError as error:
        again = f"run again with {' and '.join(parameters)}" if parameters else "run again"
        # Errors of fsync and of write have no filename.
        named = isinstance(error.filename, (str, bytes))
        if error.errno == errno.EFBIG:  # FAT allows 4 GiB.
            problem = f"its file system or 'ulimit -f' allows no file of this size; change that, then {again}"
            raise NoSpaceError.at(path, problem, *parameters) from error
        if error.errno in NO_SPACE:
            raise NoSpaceError.at(path, f"{os.strerror(error.errno)}; {advice}", *parameters) from error
        if error.errno in _FAILED_STORAGE:
            problem = f"{os.strerror(error.errno)}; check the disk, then {again}"
        elif named and error.errno == errno.ENOENT:
            problem = f"another program removed it, or its file system does not allow this name; {again}"
        elif named and error.errno == errno.ENAMETOOLONG:
            problem = "the name is too long; give a shorter name"
        elif named and error.errno == errno.ELOOP:
            problem = "a loop of symbolic links; remove it, or give another name"
        elif named and error.errno in (errno.EINVAL, errno.EILSEQ):  # FAT and exFAT refuse names with a colon.
            problem = "its file system does not allow this name; choose a folder on another file system"
        else:
            raise
        raise H5PackError.at(os.fsdecode(error.filename if named else path), problem, *parameters) from error


def sync_path(path: Path) -> None:
    """Flush a file's bytes, or a folder's entries (after files were created or renamed in it), to the disk.

    Some file systems, such as older CIFS and shared folders of VirtualBox, cannot flush folders; then nothing is done.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
    finally:
        os.close(descriptor)


def drop_pages(descriptor: int, start: int = 0) -> None:
    """Flush an open file, then drop its pages from byte `start` on from the page cache, if the system can.

    The next read then returns what is on the disk. The dropped pages may have had other bytes: after a failed flush,
    Linux treats pages that it could not write as if they had been written.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # A file system that is always read-only, such as squashfs, cannot flush.
            raise
    with contextlib.suppress(OSError, AttributeError):
        os.posix_fadvise(descriptor, start, 0, os.POSIX_FADV_DONTNEED)


def sync_file_system(folder: Path) -> None:
    """Flush the file system that contains `folder` to the disk; one call is cheaper than flushing every file."""
    sync = libc_function("syncfs", ctypes.c_int, ctypes.c_int)
    if sync is None:
        os.sync()
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if sync(descriptor):
            if ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM):
                raise_errno(folder)
            os.sync()  # A sandbox or an old kernel refuses syncfs.
    finally:
        os.close(descriptor)


def file_system_type(path: str | int | os.PathLike[str]) -> str | None:
    """Return the type, such as ext4, of the file system of a path or a descriptor; None if /proc does not list it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        device = os.stat(path).st_dev
        number = b"%d:%d" % (os.major(device), os.minor(device))
        # Paths in other lines may be undecodable, or contain spaces that only `str.split` knows.
        with open("/proc/self/mountinfo", "rb") as mounts:
            for line in mounts:
                fields = line.split()
                if fields[2] == number:
                    return fields[fields.index(b"-") + 1].decode()
    return None


def link_file(file: Path, name: Path) -> None:
    """Hard-link a file as `name`; raise FileExistsError if `name` exists, SourceError if links are not supported."""
    try:
        os.link(file, name)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        problem = (
            "its file system has no hard links, which conversions in parts or on several machines need; choose another "
            "folder"
        )
        raise SourceError.at(name.parent, problem) from error


def max_name_bytes(folder: Path) -> int:
    """Return the maximum length, in bytes, of the name of a file in `folder`."""
    # Some FUSE file systems return 0, because they do not know a limit.
    found = os.pathconf(folder, "PC_NAME_MAX")
    return found if found > 0 else sys.maxsize


def require_writable(folder: Path) -> None:
    """Raise SourceError unless `folder` exists and files can be created in it."""
    with reporting_disk_errors(folder, "choose another folder"):
        try:
            # `Path.is_dir` is not used, because in Python 3.14 it returns False for every error.
            exists = stat.S_ISDIR(os.stat(folder).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            exists = False
        except PermissionError:  # A parent folder does not allow access. `os.access` below detects this.
            exists = True
        if not exists:
            if os.path.exists(folder):
                raise SourceError.at(folder, "a file, not a folder for the output; choose another folder")
            raise SourceError.at(folder, "the folder for the output does not exist; create it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SourceError.at(
            folder, "no permission to create files here, or a read-only disk; change that, or choose another folder"
        )


def require_replaceable(*paths: Path, writable: bool = True) -> None:
    """Raise SourceError if one of the `paths` exists and cannot be replaced or, with `writable`, cannot be written.

    In a folder with the sticky bit, such as /tmp, only the owner of a file, or of the folder, can rename or delete it.
    """
    for path in paths:
        with reporting_disk_errors(path, "choose another folder"), contextlib.suppress(FileNotFoundError):
            folder, status = path.parent.stat(), path.lstat()
            if stat.S_IFMT(status.st_mode) not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):  # such as /dev/null
                raise SourceError.at(path, "is neither a file nor a folder; give another name")
            is_sticky = folder.st_mode & stat.S_ISVTX and os.geteuid() not in (0, folder.st_uid, status.st_uid)
            # Another process may have removed the file in between.
            if is_sticky or (writable and not os.access(path, os.W_OK) and path.exists()):
                problem = f"you may not replace it; ask user {status.st_uid}, who owns it, or give another name"
                if status.st_uid == os.geteuid():
                    problem = "its permissions do not allow writing; change them with chmod, or give another name"
                raise SourceError.at(path, problem)
            path.stat()  # An OSError if a symbolic link leads to itself.


def absolute_path(path: str | bytes | os.PathLike[str]) -> str:
    """Return an absolute path without "..", with which the system opens the same file as with `path`.

    ``os.path.abspath`` replaces "LINK/.." by the folder that contains LINK. But if LINK is a symbolic link to a folder,
    the system resolves "LINK/.." to the parent of that folder.
    """
    path = os.fsdecode(path)
    found = os.path.abspath(path)
    if os.pardir not in path.split(os.sep):
        return found
    real = os.path.realpath(path)
    return found if os.path.realpath(found) == real else real


def require_other_files(outputs: Iterable[Path], inputs: Iterable[str | os.PathLike[str]]) -> None:
    """Raise OptionsError if an output is one of the existing files `inputs`, possibly under another name."""
    existing = {}
    missing = contextlib.suppress(FileNotFoundError, NotADirectoryError)
    for out in outputs:
        with reporting_disk_errors(out, "choose another folder"), missing:
            status = out.stat()
            existing[status.st_dev, status.st_ino] = out
    for path in inputs if existing else ():
        with missing:
            status = os.stat(path)
            if (found := existing.get((status.st_dev, status.st_ino))) is not None:
                raise OptionsError.at(found, "is one of the files to read; give the output another name")


def lock(descriptor: int, *, shared: bool = False, wait: bool = False) -> bool | None:
    """Lock an open file with flock: with a shared lock if `shared`, else exclusively. If `wait`, wait for the lock.

    Returns True if the file is now locked, False if another open file holds a conflicting lock, and None if the file
    system (such as some network file systems) has no such locks.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the one at `path`, i.e. was not removed, renamed or replaced."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def is_locked(path: Path) -> bool:
    """Return whether another open file holds an exclusive lock on a file."""
    with path.open("rb") as stream:
        return lock(stream.fileno(), shared=True) is False


def wait_until_unlocked(path: Path, busy: OutputBusyError, seconds: float | None = None) -> None:
    """Wait until no other open file holds an exclusive lock on a file. If there is no such file, return at once.

    Raises the error `busy` after `seconds`, by default as many as `open_locked` waits.
    """
    deadline = time.monotonic() + (_LOCK_WAIT_SECONDS if seconds is None else seconds)
    with reporting_disk_errors(path, "make room, then run again"), contextlib.suppress(FileNotFoundError):
        while is_locked(path):
            if time.monotonic() > deadline:
                raise busy
            time.sleep(0.02)


def open_locked(path: Path, busy: str) -> int:
    """Open a file, creating it if it does not exist, lock it exclusively, and return its descriptor.

    Raises OutputBusyError with the message `busy` if another process still holds the lock after 3 seconds. On file
    systems without locks (see `lock`), the file is opened without a lock, so a second writer is not noticed.
    """
    deadline = time.monotonic() + _LOCK_WAIT_SECONDS
    while True:
        with reporting_disk_errors(path, "make room, then run again"):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        locked = lock(descriptor)
        # Another writer may have renamed or removed the file between opening and locking. Then open it again.
        if locked is None or (locked and is_at(descriptor, path)):
            return descriptor
        os.close(descriptor)
        if not locked:
            if time.monotonic() > deadline:
                raise OutputBusyError(busy, path=path)
            time.sleep(0.05)


def cached_pages(path: Path) -> int:
    """Return how many pages of a file are in the page cache, without reading the file.

    If the file is another user's, and this process may not write it, Linux reports all pages as cached.
    """
    mincore: Any = libc_function("mincore", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:
        flags = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(mapped, np.uint8)
        failed = mincore(view.ctypes.data, size, flags.ctypes.data)
        # The memory map cannot be closed while an array refers to it.
        del view
        if failed:
            raise_errno(path)
        return int(np.count_nonzero(flags & 1))


def drop_cache(path: Path) -> int:
    """Drop a file's pages from the page cache, and return how many remain in it.

    Without posix_fadvise, no page can be dropped, and the result is at least 1, even if no page was cached. If this
    machine is virtual, its host may still have the pages in a cache of its own.
    """
    if not hasattr(os, "posix_fadvise"):
        return max(1, cached_pages(path))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for _ in range(5):
            drop_pages(descriptor)
            if not (cached := cached_pages(path)):
                break
            time.sleep(0.2)
        return cached
    finally:
        os.close(descriptor)


def make_hot(path: Path) -> None:
    """Load all pages of a file into the page cache, in large folios if the kernel and the file system have them."""
    with contextlib.suppress(OSError):  # Some file systems cannot map files.
        if cached_pages(path) == -(-path.stat().st_size // mmap.PAGESIZE):
            return
    with path.open("rb", buffering=0) as file:
        if sys.platform == "linux":
            with contextlib.suppress(OSError), mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                mapped.madvise(MADV_HUGEPAGE)
                mapped.madvise(MADV_POPULATE_READ)
        block = bytearray(1 << 22)
        while file.readinto(block):
            pass
