"""Archives as sources: images that are read by offset from tar and zip files. Members are never unpacked to files.

The main process indexes an archive once. Workers receive the index, which is a few arrays, and read images with
``pread``. A compressed tar file is first decompressed into one unnamed file.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import chain
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from h5pack.errors import H5PackError, RejectedImageError, SourceError
from h5pack.images.decode import read_header
from h5pack.read.storage import Descriptor, FileIdentity
from h5pack.sources.catalog import Catalog, NameFilter, Note, Reject
from h5pack.sources.folders import arranged, is_split_name, is_visible, list_names
from h5pack.sources.pairs import pairs
from h5pack.sources.reader import STORAGE_ADVICE, SourceReader, SurveyedImage, named_fingerprint
from h5pack.system.files import absolute_path, read_all, reporting_disk_errors, write_all
from h5pack.system.text import format_bytes

_HEAD_BYTES = 2_048
_MAX_OPEN_FILES = 64
_MAX_NAME_BYTES = 4_096
# A member of a zip file is a bomb if it exceeds both limits: on its size in bytes, and on its expansion by
# decompression. The second limit alone is too strict, because harmless blank bitmaps expand up to 1,032 times.
_BOMB_BYTES, _BOMB_RATIO = 64 * 1024 * 1024, 100
# A compressed file is a bomb if it expands to over this size and to over `_BOMB_RATIO` times its compressed size.
_FILE_BOMB_BYTES = 1 << 30
_COPY_BYTES = 1024 * 1024
_LOCAL_HEADER, _LOCAL_HEADER_BYTES = b"PK\3\4", 30
_ZIP_ENCRYPTED_FLAG, _ZIP_UTF8_FLAG, _ZIP_DOS = 0x1, 0x800, 0
_ZIP_UNICODE_PATH = 0x7075  # extra field: version, CRC-32 of the stored name, name in UTF-8 (Info-ZIP, appnote.iz)
# Maximum ratio of the stored sizes of all members of a zip file to the size of the file. A damaged file may exceed 1.
_ZIP_MAX_SHARING = 10


class Storing(IntEnum):
    """How a member's bytes are stored, or why they cannot be read."""

    RAW = 0  # at the offset, uncompressed
    ZIP_STORED = 1  # after a local header at the offset, uncompressed
    ZIP_DEFLATED = 2  # after a local header at the offset, compressed
    ZIP_ENCRYPTED = 3
    ZIP_OTHER = 4
    LINK = 5
    SPARSE = 6
    SPECIAL = 7


_REASONS = {
    Storing.ZIP_ENCRYPTED: "it is encrypted",
    Storing.ZIP_OTHER: "its compression method is neither stored nor deflate",
    Storing.LINK: "a link in a zip file, or a link whose target is not a file of the archive",
    Storing.SPARSE: "it is stored as a sparse file",
    Storing.SPECIAL: "not a regular file",
}
_OUTSIDE = "its path is empty or absolute, or contains '..' or NUL"
_REPLACED = "a later member of the archive has the same name"
_ZIP_STORINGS = {zipfile.ZIP_STORED: Storing.ZIP_STORED, zipfile.ZIP_DEFLATED: Storing.ZIP_DEFLATED}


class ArchiveFile:
    """A file of many images, such as an archive, that several processes read by offset.

    A compressed archive is read from a decompressed copy. Other files must not change: see `require_unchanged`.
    """

    def __init__(self, path: str) -> None:
        self.path = absolute_path(path)
        if os.path.exists(path) and not os.path.isfile(path):
            raise SourceError.at(path, "not a regular file; check the path")  # Opening a pipe might block forever.
        self.identity = FileIdentity.of(self.path)
        self.size = self.identity.size  # in bytes; after `decompress`, the size of the decompressed copy
        self.descriptor: Descriptor | None = None
        # The path in /proc of the decompressed copy, or None. The copy has no name on disk, so it disappears when the
        # process ends.
        self.copy_path: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self.descriptor is None or self.copy_path is None or os.path.exists(self.copy_path):
            return {**self.__dict__, "descriptor": None}
        # Without /proc, as on macOS, a new worker process gets a duplicate of the copy's descriptor.
        return {**self.__dict__, "descriptor": DupFd(int(self.descriptor))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        duplicate = state["descriptor"]
        self.__dict__.update(state, descriptor=None if duplicate is None else Descriptor(duplicate.detach()))

    def decompress(self, stream: BinaryIO, folder: Path) -> None:
        """Copy `stream`, the decompressed content, into an unnamed file in `folder`, which later reads use."""
        position = 0
        advice = "make room there, or decompress the archive yourself and pack the result"
        with stream, tempfile.TemporaryFile(dir=folder) as target, reporting_disk_errors(folder, advice):
            while True:
                with self.parsing("cannot be decompressed"):
                    data = stream.read(_COPY_BYTES)
                if not data:
                    break
                if position > max(_FILE_BOMB_BYTES, _BOMB_RATIO * self.size):
                    problem = f"expands to over {_BOMB_RATIO} times its size; if it is not a decompression bomb, "
                    raise SourceError.at(self.path, problem + "decompress it yourself and pack the result")
                write_all(target.fileno(), data, position)
                position += len(data)
            self.require_unchanged()
            self.descriptor = Descriptor(os.dup(target.fileno()))
        self.size, self.copy_path = position, f"/proc/{os.getpid()}/fd/{int(self.descriptor)}"

    def open(self) -> int:
        """Return the file's descriptor; open it if necessary."""
        if self.descriptor is None:
            self.descriptor = Descriptor(os.open(self.copy_path or self.path, os.O_RDONLY | os.O_CLOEXEC))
        return self.descriptor

    def close(self) -> None:
        """Close the file; the next read opens it again. A decompressed copy stays open: closing it might delete it."""
        if self.copy_path is None:
            self.descriptor = None

    def read(self, count: int, offset: int) -> bytes:
        """Return `count` bytes at `offset`, or fewer if the file ends earlier. Check that the file is unchanged."""
        data = self.read_unchecked(count, offset)
        if self.copy_path is None:
            self.require_unchanged()
        return data

    def read_unchecked(self, count: int, offset: int) -> bytes:
        """Read without checking that the file is unchanged; the caller must call `require_unchanged` afterwards."""
        # Limit `count` to the file, because a damaged archive may declare more bytes than can be allocated.
        return read_all(self.open(), max(0, min(count, self.size - offset)), offset)

    def require_unchanged(self) -> None:
        """Raise SourceError if the file at `path` was replaced, rewritten or removed since this object was created."""
        try:
            same = FileIdentity.of(self.path) == self.identity
        except FileNotFoundError:
            same = False
        if not same:
            problem = (
                "was replaced, rewritten or removed during the conversion; if the file is complete now, start "
                "over with overwrite=True"
            )
            raise SourceError.at(self.path, problem, "overwrite=True")

    @contextlib.contextmanager
    def parsing(self, problem: str) -> Iterator[None]:
        """Turn a parser's error of any type into SourceError. Errors of the storage are raised unchanged."""
        try:
            yield
        except Exception as error:
            # OSErrors of parsers, such as gzip.BadGzipFile, have no errno.
            if isinstance(error, H5PackError) or (isinstance(error, OSError) and error.errno):
                raise
            self.require_unchanged()
            raise self.damaged(f"{problem} ({error})") from error

    def unreadable(self, name: str, error: OSError) -> SourceError:
        """Return the error to raise if the storage fails while the image `name` is read from the archive."""
        return SourceError.at(self.path, f"{name} cannot be read ({error}); {STORAGE_ADVICE}", "resume=True")

    def damaged(self, problem: str) -> SourceError:
        """Return the error for a damaged archive; its message begins with the archive's path and `problem`."""
        return SourceError.at(self.path, f"{problem}; download or make it again")


class _Extent(io.RawIOBase):
    """A file object that reads the `size` bytes at `offset` of an archive."""

    def __init__(self, file: ArchiveFile, offset: int, size: int) -> None:
        self._file, self._offset, self._size, self._position = file, offset, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = max(0, offset + (0, self._position, self._size)[whence])
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(max(0, min(len(buffer), self._size - self._position)), self._offset + self._position)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


class Member(NamedTuple):
    """Where and how the bytes of a member are stored."""

    offset: int = 0
    size: int = 0  # in bytes, uncompressed, as the archive declares
    stored: int = 0  # in bytes, as stored in the archive
    checksum: int = 0  # CRC-32 in zip files, else 0
    storing: int = Storing.RAW
    file: int = 0  # index into `ArchiveReader.files`


@dataclass
class Members:
    """The index of one archive."""

    found: dict[str, Member] = field(default_factory=dict)  # the last member of each path
    replaced: list[str] = field(default_factory=list)  # the path of each member that a later one replaces
    rejects: list[Reject] = field(default_factory=list)  # members with an invalid name
    folders: set[str] = field(default_factory=set)  # folders that the archive lists
    notes: tuple[Note, ...] = ()

    def values(self, paths: Iterable[str]) -> npt.NDArray[np.int64]:
        """Return the `Member` at each of the paths as a row of an array, int64 (n, 6)."""
        values = chain.from_iterable(map(self.found.__getitem__, paths))
        return np.fromiter(values, np.int64).reshape(-1, len(Member._fields))

    def add(self, name: str, member: Member) -> str | None:
        """Add a member, which replaces an earlier one of the same path. Return its path; None if it is rejected."""
        path = member_path(name)
        if path is None or len(path) > _MAX_NAME_BYTES:
            shown = name[:_MAX_NAME_BYTES].replace("\0", "\\x00")
            self.rejects.append(Reject(shown, _OUTSIDE if path is None else "its name is too long"))
            return None
        if path in self.found:
            self.replaced.append(path)
        self.found[path] = member
        return path

    def add_folder(self, name: str) -> None:
        """Add a folder that the archive lists, if its name is valid."""
        path = member_path(name)
        if path is not None and len(path) <= _MAX_NAME_BYTES:
            self.folders.add(path)


def member_path(name: str) -> str | None:
    """Return a member's path without empty parts and "."; None if it is empty, absolute, or has ".." or a NUL."""
    if (
        "/." not in name
        and "//" not in name
        and "\0" not in name
        and name[:1] not in ("", ".", "/")
        and name[-1] != "/"
    ):
        return name
    parts = [part for part in name.split("/") if part not in ("", ".")]
    return None if name.startswith("/") or ".." in parts or "\0" in name or not parts else "/".join(parts)


@dataclass
class ArchiveReader(SourceReader):
    """Reads members of archives."""

    files: tuple[ArchiveFile, ...]
    members: npt.NDArray[np.int64]  # (M, 6), the values of each `Member`
    masks: tuple[ArchiveReader, ...] = ()  # for each field of masks, a reader of one mask per image
    _opened: list[int] = field(default_factory=list, init=False)  # indices of the open `files`, first opened first

    @classmethod
    def of(cls, files: Sequence[ArchiveFile], members: Sequence[npt.NDArray[np.int64]]) -> ArchiveReader:
        """Return a reader of `files`. ``members[i]`` is the result of `Members.values`, int64 (n, 6), for file i."""
        file_ids = np.repeat(np.arange(len(files)), [len(some) for some in members])
        return cls(tuple(files), np.column_stack([np.concatenate(members)[:, :-1], file_ids]))

    def paths(self) -> list[str]:
        return [file.path for file in self.files]

    def take(self, indices: npt.NDArray[np.int64]) -> ArchiveReader:
        return replace(self, members=self.members[indices], masks=tuple(one.take(indices) for one in self.masks))

    def read_field(self, number: int, index: int, name: str) -> bytes:
        return self.masks[number].read(index, name)

    def read(self, index: int, name: str) -> bytes:
        member = self._member(index)
        if member.storing != Storing.RAW:
            return self._unzipped(member, None)
        data = self._file(member).read(member.size, member.offset)
        if len(data) < member.size:
            raise RejectedImageError("it is cut off by the end of the archive")
        return data

    def survey(self, index: int, name: str, max_pixels: int) -> SurveyedImage:
        member = self._member(index)
        if member.storing in _REASONS:
            raise RejectedImageError(_REASONS[Storing(member.storing)])
        file, size = self._file(member), member.size
        try:
            if member.storing == Storing.RAW:
                head = file.read(min(size, _HEAD_BYTES), member.offset)
                open_file: Callable[[], BinaryIO] = lambda: io.BufferedReader(_Extent(file, member.offset, size))  # noqa: E731
            else:
                head = self._unzipped(member, _HEAD_BYTES)
                open_file = lambda: io.BytesIO(self._unzipped(member, None))  # noqa: E731
            header = read_header(head, open_file, max_pixels)
        except OSError as error:
            raise file.unreadable(name, error) from error
        parts = (member.offset, size, member.checksum, file.identity.size, file.identity.modified_ns)
        return SurveyedImage(header, named_fingerprint(name, *parts))

    def changing(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        # One image per archive is enough, because the fingerprint of an image includes the archive's size and time.
        return indices[np.unique(self.members[indices, -1], return_index=True)[1]]

    def _member(self, index: int) -> Member:
        return Member._make(self.members[index].tolist())

    def _file(self, member: Member) -> ArchiveFile:
        file = self.files[member.file]
        if file.descriptor is None:
            self._opened.append(member.file)
            if len(self._opened) > _MAX_OPEN_FILES:
                self.files[self._opened.pop(0)].close()
        return file

    def _unzipped(self, member: Member, count: int | None) -> bytes:
        """Return the first `count` bytes of a zip file's member; all bytes, checked by CRC-32, if `count` is None."""
        size, stored = member.size, member.stored
        if size > max(_BOMB_BYTES, _BOMB_RATIO * stored):
            raise RejectedImageError(
                f"zip bomb: {format_bytes(stored)} expand to {format_bytes(size)}, over {_BOMB_RATIO} times as much"
            )
        wanted = size if count is None else min(size, count)
        data = self._stored_bytes(member, stored if count is None else min(stored, count))
        if member.storing == Storing.ZIP_DEFLATED:
            try:
                decoder = zlib.decompressobj(-zlib.MAX_WBITS)
                # Request one byte more than wanted, to notice excess bytes, and because a limit of 0 means no limit.
                data = decoder.decompress(data, wanted + 1)
            except zlib.error as error:
                raise RejectedImageError(f"cannot be decompressed: {error}") from error
        if count is not None:
            return data[:wanted]
        if len(data) != size:
            raise RejectedImageError("its size differs from the one that the archive declares")
        if zlib.crc32(data) != member.checksum:
            raise RejectedImageError("it does not match its CRC-32 in the archive")
        return data

    def _stored_bytes(self, member: Member, count: int) -> bytes:
        """Return the first `count` stored bytes of a member of a zip file, which follow a header of variable length."""
        file, offset = self._file(member), member.offset
        # The variable part of the header is usually shorter than 256 bytes, so one read is usually enough.
        data = file.read(_LOCAL_HEADER_BYTES + 256 + count, offset)
        if data[:4] != _LOCAL_HEADER or len(data) < _LOCAL_HEADER_BYTES:
            raise RejectedImageError("its header in the archive is damaged")
        start = _LOCAL_HEADER_BYTES + int.from_bytes(data[26:28], "little") + int.from_bytes(data[28:30], "little")
        data = data[start : start + count] if len(data) >= start + count else file.read(count, offset + start)
        if len(data) < count:
            raise RejectedImageError("it is cut off by the end of the archive")
        return data


def members_catalog(file: ArchiveFile, members: Members, wanted: NameFilter, kind: str) -> Catalog:
    """Return the catalog of an archive as if its members were files in a folder.

    `kind` is "flat", "classes", "splits" or "pairs", or "folder" to infer it.
    """
    if base := _only_folder(members, kind):
        members = replace(
            members,
            found={path.removeprefix(base): member for path, member in members.found.items()},
            replaced=[path.removeprefix(base) for path in members.replaced],
            folders={path.removeprefix(base) for path in members.folders} - {base[:-1]},
        )
    # `include` selects images only, so it must not be applied to the masks of pairs.
    selected = NameFilter(exclude=wanted.exclude) if kind == "pairs" else wanted
    listing = list_names(file.path, members.found, members.folders, selected)
    catalog = pairs(listing, wanted) if kind == "pairs" else arranged(listing, kind)
    replaced = {*members.replaced}.intersection(catalog.names)
    tables = (catalog.names, *(one.files for one in catalog.pixel_fields))
    reader, *masks = (ArchiveReader((file,), members.values(table)) for table in tables)
    return replace(
        catalog,
        reader=replace(reader, masks=tuple(masks)),
        rejects=(
            *(one for one in members.rejects if wanted.refusal(one.name) is None),
            *catalog.rejects,
            *(Reject(path, _REPLACED) for path in members.replaced if path in replaced),
        ),
        notes=(*catalog.notes, *members.notes),
    )


def _only_folder(members: Members, kind: str) -> str:
    """Return the folder that contains all visible members, such as "data/". The caller strips it from all paths.

    Return "" if there is no such folder, or if it must not be stripped: if it is named like a split, or if `kind` is
    "classes" or "splits" and all members are directly in it, because then the folder itself is the class or split.
    """
    paths = [path for path in members.found if is_visible(path.partition("/")[0])]
    tops = {path.partition("/")[0] if "/" in path else "" for path in paths}
    tops |= {top for top in (path.partition("/")[0] for path in members.folders) if is_visible(top)}
    top = tops.pop() if len(tops) == 1 else ""
    is_kept = is_split_name(top) or (kind in ("classes", "splits") and all(path.count("/") < 2 for path in paths))
    return "" if not top or is_kept else f"{top}/"


def open_zip(path: Path) -> tuple[ArchiveFile, Members]:
    """Open a zip file and return its index."""
    file, members = ArchiveFile(str(path)), Members()
    with file.parsing("its directory of members is damaged or missing"), zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    file.require_unchanged()
    for entry in entries:
        name = _zip_name(entry)
        if entry.create_system == _ZIP_DOS and "/" not in name:
            # Some tools for Windows separate folders by backslashes, against the format's specification.
            name = name.replace("\\", "/")
        if name.endswith("/"):
            members.add_folder(name)
        else:
            # In a damaged file, sizes may be too large for int64, and offsets negative.
            found = (entry.header_offset, entry.file_size, entry.compress_size)
            offset, size, stored = (max(0, min(value, 2**63 - 1)) for value in found)
            members.add(name, Member(offset, size, stored, entry.CRC, _zip_storing(entry)))
    if sum(min(entry.compress_size, file.size) for entry in entries) > _ZIP_MAX_SHARING * file.size:
        raise file.damaged("is a zip bomb: its members share their bytes")
    return file, members


def _zip_name(entry: zipfile.ZipInfo) -> str:
    """Return a member's name in Unicode, whichever way the archiver stored it."""
    # Use the stored name, because zipfile cuts off `entry.filename` at a NUL.
    name, extra = entry.orig_filename, entry.extra
    if entry.flag_bits & _ZIP_UTF8_FLAG:
        return name
    stored = name.encode("cp437")
    while len(extra) > 9:
        kind, count, version, checksum = struct.unpack_from("<HHBL", extra)
        if (kind, version, checksum) == (_ZIP_UNICODE_PATH, 1, zlib.crc32(stored)):
            stored = extra[9 : 4 + count]
            break
        extra = extra[4 + count :]
    try:
        # Some archivers, such as that of macOS, store UTF-8 without setting the flag.
        return stored.decode()
    except UnicodeDecodeError:
        return name


def _zip_storing(entry: zipfile.ZipInfo) -> Storing:
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind == stat.S_IFLNK:
        return Storing.LINK
    if kind not in (0, stat.S_IFREG):
        return Storing.SPECIAL
    if entry.flag_bits & _ZIP_ENCRYPTED_FLAG:
        return Storing.ZIP_ENCRYPTED
    return _ZIP_STORINGS.get(entry.compress_type, Storing.ZIP_OTHER)
