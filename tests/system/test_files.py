"""Files whole or absent, locks, reads and writes at offsets, and the page cache."""

from __future__ import annotations

import ctypes
import errno
import io
import mmap
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from h5pack.errors import H5PackError, NoSpaceError, OutputBusyError, SourceError
from h5pack.system import files
from h5pack.system.files import (
    absolute_path,
    copy_permissions,
    file_system_type,
    is_locked,
    lock,
    open_locked,
    read_all,
    wait_until_unlocked,
    write_all,
    write_atomically,
)


def opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT)


def refuse_to_allocate(*_: int) -> int:
    ctypes.set_errno(errno.EOPNOTSUPP)
    return -1


@pytest.mark.parametrize("fallocate", [files._fallocate, refuse_to_allocate, None])
def test_space_is_reserved_or_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fallocate: Any) -> None:
    monkeypatch.setattr(files, "_fallocate", fallocate)
    path = tmp_path / "f"
    path.write_bytes(b"123")
    files.reserve(path, 0, 5000)
    files.reserve(path, 2**50, 0)
    with pytest.raises(OSError) as caught:
        files.reserve(path, 0, 2**50)
    assert caught.value.errno in files.NO_SPACE
    assert path.read_bytes() == b"123"


def test_reads_and_writes_go_on_where_the_kernel_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pread, pwrite = os.pread, os.pwrite
    monkeypatch.setattr(os, "pread", lambda descriptor, count, offset: pread(descriptor, min(count, 3), offset))
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: pwrite(descriptor, data[:2], offset))
    descriptor = opened(tmp_path / "f")
    write_all(descriptor, b"0123456789", 5)
    assert read_all(descriptor, 10, 5) == b"0123456789"
    assert read_all(descriptor, 10, 12) == b"789"
    assert read_all(descriptor, 0, 0) == b""
    os.close(descriptor)


def test_only_changed_pages_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = mmap.PAGESIZE
    monkeypatch.setattr(files, "_COPY_BYTES", 3 * page)
    source, target = opened(tmp_path / "a"), opened(tmp_path / "b")
    new, old = (bytearray(np.arange(7 * page, dtype=np.uint32).astype(np.uint8)) for _ in range(2))
    for position in (0, 2 * page - 1, 5 * page):
        new[position] ^= 1
    write_all(source, bytes(new[: 6 * page]), 0)
    write_all(target, bytes(old), 0)
    written = []
    monkeypatch.setattr(files, "write_all", lambda _, data, offset: written.append((offset, len(data), data)))
    files.copy_changed(source, target, 100, 7 * page - 5)
    # Pages count from the start; beyond the end of the source there are zeros.
    changes = {2 * page - 1, 5 * page, *range(6 * page, 7 * page - 5)}
    for offset, count, data in written:
        assert count <= page
        assert data == bytes(new[offset : offset + count]).ljust(count, b"\0") or offset + count > 6 * page
        assert changes & set(range(offset, offset + count))
    assert changes <= {position for offset, count, _ in written for position in range(offset, offset + count)}
    os.close(source)
    os.close(target)


def test_an_atomic_write_replaces_the_file_or_leaves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    write_atomically(path, b"one")
    write_atomically(path, b"two")

    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        write_atomically(path, b"three")
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"two", ["f"])


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EROFS, errno.ENOTCONN, errno.ENOSPC])
@pytest.mark.parametrize("named", [None, "/disk/o.h5.partial.new"])
def test_storage_that_fails_is_one_line_about_the_file(number: int, named: str | None) -> None:
    error = OSError(number, os.strerror(number), *([] if named is None else [named, None, "/disk/o.h5.partial"]))
    with pytest.raises(H5PackError) as caught, files.reporting_disk_errors(Path("/disk/o.h5"), "make room", "resume"):
        raise error
    assert isinstance(caught.value, NoSpaceError) == (number == errno.ENOSPC)
    assert caught.value.path == ("/disk/o.h5" if named is None or number == errno.ENOSPC else named)
    assert caught.value.parameters == ("resume",)


def test_a_file_that_another_program_removed_is_named() -> None:
    with pytest.raises(H5PackError) as caught, files.reporting_disk_errors(Path("/o.h5"), "make room", "resume=True"):
        os.stat("/nowhere/o.h5.journal")
    assert (caught.value.path, caught.value.parameters) == ("/nowhere/o.h5.journal", ("resume=True",))


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EILSEQ])
def test_a_name_that_the_file_system_does_not_allow_is_named(number: int) -> None:
    with pytest.raises(H5PackError) as caught, files.reporting_disk_errors(Path("/ex"), "make room"):
        raise OSError(number, os.strerror(number), "/ex.partial/a:b")
    assert caught.value.path == "/ex.partial/a:b"
    # Errors of fsync name no file.
    with pytest.raises(OSError, match="fsync"), files.reporting_disk_errors(Path("/ex"), "make room"):
        raise OSError(number, "fsync")


def test_errors_that_storage_does_not_cause_are_not_reported_as_such() -> None:
    for error in (OSError(errno.EMFILE, "many"), OSError("without a number"), SourceError.at("a.jpg", "is damaged")):
        with pytest.raises(type(error)) as caught, files.reporting_disk_errors(Path("o.h5"), "make room"):
            raise error
        assert caught.value is error


@pytest.mark.parametrize("permitted", [True, False])
@pytest.mark.parametrize(
    ("mode", "writable", "kept", "reduced"), [(0o640, False, 0o640, 0o600), (0o474, True, 0o674, 0o644)]
)
def test_a_group_that_cannot_be_kept_gets_no_more_than_all_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, permitted: bool, mode: int, writable: bool, kept: int, reduced: int
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for path in (old, new):
        path.write_bytes(b"")
    old.chmod(mode)
    if not permitted:
        monkeypatch.setattr(os, "chown", Mock(side_effect=PermissionError(errno.EPERM, "chown")))
    copy_permissions(old.stat(), new, writable=writable)
    assert new.stat().st_mode & 0o7777 == (kept if permitted else reduced)


def test_file_systems_are_flushed_or_it_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncfs = Mock(return_value=0)
    monkeypatch.setattr(files, "libc_function", lambda *_: syncfs)
    files.sync_file_system(tmp_path)
    syncfs.return_value = -1
    ctypes.set_errno(errno.EIO)
    monkeypatch.setattr(os, "sync", Mock())
    with pytest.raises(OSError):
        files.sync_file_system(tmp_path)
    assert (syncfs.call_count, os.sync.call_count) == (2, 0)
    # A sandbox refuses the call.
    ctypes.set_errno(errno.EPERM)
    files.sync_file_system(tmp_path)
    assert os.sync.call_count == 1
    monkeypatch.setattr(files, "libc_function", lambda *_: None)
    files.sync_file_system(tmp_path)
    assert os.sync.call_count == 2


def test_only_folders_need_no_flush_where_the_file_system_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").touch()
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EINVAL, "fsync")))
    files.sync_path(tmp_path)
    with pytest.raises(OSError, match="fsync"):
        files.sync_path(tmp_path / "f")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, "fsync")))
    with pytest.raises(OSError, match="fsync"):
        files.sync_path(tmp_path)


def test_a_file_system_without_hard_links_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").touch()
    files.link_file(tmp_path / "f", tmp_path / "g")
    assert (tmp_path / "g").samefile(tmp_path / "f")
    with pytest.raises(FileExistsError):
        files.link_file(tmp_path / "f", tmp_path / "g")
    for number, kind in ((errno.EPERM, SourceError), (errno.ENOTSUP, SourceError), (errno.EIO, OSError)):
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError(number, "link")))
        with pytest.raises(kind) as caught:
            files.link_file(tmp_path / "f", tmp_path / "h")
        assert getattr(caught.value, "path", None) == (str(tmp_path) if kind is SourceError else None)


def test_names_may_have_any_length_where_no_limit_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert files.max_name_bytes(tmp_path) == os.pathconf(tmp_path, "PC_NAME_MAX")
    for unknown in (0, -1):
        monkeypatch.setattr(os, "pathconf", lambda *_, unknown=unknown: unknown)
        assert files.max_name_bytes(tmp_path) == sys.maxsize


def test_the_file_system_is_that_of_the_mount() -> None:
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    types = {fields[4]: fields[fields.index("-") + 1] for fields in mounts}
    assert file_system_type("/proc") == types["/proc"] == "proc"
    assert file_system_type("/nowhere/at/all") is None


def test_mounts_may_have_names_of_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = os.stat(tmp_path).st_dev
    number = b"%d:%d" % (os.major(device), os.minor(device))
    spaces = "/a\xa0-\xa0b".encode()
    mounts = b"1 0 0:0 / /\xff rw - nfs none rw\n2 0 " + number + b" / " + spaces + b" rw shared:1 - xfs none rw\n"

    def opened(path: str, mode: str = "r") -> Any:
        stream = io.BytesIO(mounts)
        return stream if "b" in mode else io.TextIOWrapper(stream, "utf-8")

    monkeypatch.setattr(files, "open", opened, raising=False)
    assert file_system_type(tmp_path) == "xfs"


def test_a_missing_or_closed_folder_is_no_place_for_an_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.require_writable(tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    for folder in (tmp_path / "missing", tmp_path):
        with pytest.raises(SourceError) as caught:
            files.require_writable(folder)
        assert caught.value.path == str(folder)
    monkeypatch.setattr(os, "stat", Mock(side_effect=PermissionError))
    with pytest.raises(SourceError, match="permission"):
        files.require_writable(tmp_path / "closed" / "folder")


def test_a_folder_on_a_disk_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner in (Path, os):
        monkeypatch.setattr(owner, "stat", Mock(side_effect=OSError(errno.EIO, "failed", str(tmp_path))))
    monkeypatch.setattr(os, "open", Mock(side_effect=OSError(errno.EIO, "failed", str(tmp_path / "f"))))
    for action in (
        lambda: files.require_writable(tmp_path),
        lambda: files.require_other_files([tmp_path / "f"], []),
        lambda: open_locked(tmp_path / "f", "busy"),
    ):
        with pytest.raises(H5PackError) as caught:
            action()
        assert str(caught.value.path).startswith(str(tmp_path))
    monkeypatch.setattr(os, "open", Mock(side_effect=OSError(errno.ENOSPC, "full", str(tmp_path / "f"))))
    with pytest.raises(NoSpaceError):
        open_locked(tmp_path / "f", "busy")


def test_a_file_of_another_user_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = tmp_path / "others"
    others.touch()
    tmp_path.chmod(0o1777)
    files.require_replaceable(others, tmp_path / "missing")
    monkeypatch.setattr(os, "access", lambda *_: False)
    files.require_replaceable(others, writable=False)
    with pytest.raises(SourceError):
        files.require_replaceable(others)
    monkeypatch.undo()
    monkeypatch.setattr(os, "geteuid", lambda: others.stat().st_uid + 1)
    with pytest.raises(SourceError) as caught:
        files.require_replaceable(tmp_path / "missing", others, writable=False)
    assert caught.value.path == str(others)
    tmp_path.chmod(0o777)
    files.require_replaceable(others)


def test_a_pipe_or_device_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # like /dev/null, which root could replace
    for writable in (False, True):
        with pytest.raises(SourceError):
            files.require_replaceable(tmp_path / "pipe", writable=writable)
    files.require_replaceable(tmp_path, writable=False)


def test_two_dots_after_a_link_lead_to_the_parent_of_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "far/away").mkdir(parents=True)
    (tmp_path / "link").symlink_to("far/away")
    monkeypatch.chdir(tmp_path)
    for path, found in (
        ("link/../a", "far/a"),
        ("link/../../a", "a"),
        ("link/a", "link/a"),
        ("far/away/../a", "far/a"),
        ("link/../../link/a", "far/away/a"),
        ("far/../link/a", "link/a"),
        (Path("a"), "a"),
        (b"link/../a", "far/a"),
    ):
        assert absolute_path(path) == str(tmp_path / found)


def test_a_lock_keeps_others_out_until_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_LOCK_WAIT_SECONDS", 0.0)
    path = tmp_path / "f"
    first = open_locked(path, "busy")
    assert is_locked(path)
    with pytest.raises(OutputBusyError, match="busy") as caught:
        open_locked(path, "busy")
    assert caught.value.path == str(path)
    other = opened(path)
    assert lock(other) is False
    assert lock(first, shared=True, wait=True) is True
    assert lock(other, shared=True) is True
    assert not is_locked(path)
    os.close(first)
    assert lock(other) is True
    os.close(other)
    os.close(open_locked(path, "busy"))


def test_a_file_that_was_replaced_before_it_was_locked_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = tmp_path / "f", []

    def replaced_once(descriptor: int) -> bool:
        calls.append(descriptor)
        if len(calls) == 1:
            path.unlink()
            path.write_bytes(b"new")
        return True

    monkeypatch.setattr(files, "lock", replaced_once)
    descriptor = open_locked(path, "busy")
    assert os.path.samestat(os.fstat(descriptor), os.stat(path))
    assert len(calls) == 2
    os.close(descriptor)


def test_a_file_system_without_locks_locks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "no locks")))
    path = tmp_path / "f"
    descriptor = open_locked(path, "busy")
    assert lock(descriptor) is None
    assert not is_locked(path)
    os.close(descriptor)


def test_waiting_for_a_file_reports_failed_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = OutputBusyError("busy")
    wait_until_unlocked(tmp_path / "none", busy)
    monkeypatch.setattr(files, "is_locked", lambda _: True)
    with pytest.raises(OutputBusyError) as caught:
        wait_until_unlocked(tmp_path / "a", busy, 0)
    assert caught.value is busy
    monkeypatch.setattr(files, "is_locked", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
    with pytest.raises(H5PackError) as failed:
        wait_until_unlocked(tmp_path / "a", busy)
    assert failed.value.path == str(tmp_path / "a")


def test_a_file_is_loaded_and_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(2 * mmap.PAGESIZE + 1))
    files.make_hot(path)
    assert files.cached_pages(path) == 3
    # Some file systems, such as tmpfs, keep the pages.
    left = files.drop_cache(path)
    assert left in (0, 3)
    files.make_hot(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EINVAL, "fsync")))  # as on squashfs
        assert files.drop_cache(path) == left
    files.make_hot(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fadvise", Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
        patch.setattr(files, "time", Mock())
        assert files.drop_cache(path) == 3
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    assert files.drop_cache(path) == 3
    monkeypatch.setattr(mmap, "mmap", Mock(side_effect=OSError(errno.ENODEV, "No such device")))  # as on some FUSE
    files.make_hot(path)
