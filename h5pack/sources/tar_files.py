"""The index of a tar file, and of the tar files in it: the names, offsets and sizes of its members.

`_plain_header` parses simple headers, and `tarfile` parses all others. The loop over members in `tarfile` is not used,
because it ends silently at a damaged header.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import lzma
import os
import posixpath
import re
import tarfile
import zlib
from pathlib import Path
from typing import BinaryIO, cast

from h5pack.errors import SourceError
from h5pack.sources.archives import ArchiveFile, Member, Members, Storing, member_path
from h5pack.sources.catalog import Note
from h5pack.sources.folders import is_visible

_BLOCK_BYTES = 512
_MAX_HEADER_BYTES = 1024 * 1024
_MAX_LINKS = 8
_DIGITS = re.compile(rb"\d{300}")
_SUFFIX = ".tar"
_GZIP, _BZIP2, _XZ, _ZSTD = b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"


class _Headers:
    """A file object from which `tarfile` reads the headers of the tar file in the bytes `start` to `stop` of `file`.

    It refuses extended headers of more than 1 MiB. It also refuses numbers of 300 digits or more, for which `tarfile`
    needs quadratic time.
    """

    def __init__(self, file: ArchiveFile, start: int, stop: int) -> None:
        self._file, self._position, self._stop = file, start, stop
        self._header_bytes = 0  # read of an extended header: newer versions of Python read a long one 1 MiB at a time

    def read(self, count: int) -> bytes:
        self._header_bytes = self._header_bytes + count if count > _BLOCK_BYTES else 0
        if self._header_bytes > _MAX_HEADER_BYTES:
            raise tarfile.HeaderError(f"an extended header of more than {_MAX_HEADER_BYTES:,} bytes")
        data = self._file.read_unchecked(min(count, self._stop - self._position), self._position)
        if _DIGITS.search(data):
            raise tarfile.HeaderError("an extended header with a number of hundreds of digits")
        self._position += len(data)
        return data

    def seek(self, position: int) -> None:
        self._position = position

    def tell(self) -> int:
        return self._position


def open_tar(path: Path, scratch: Path) -> tuple[ArchiveFile, Members]:
    """Open a tar file and return its index. If it is compressed, decompress it into an unnamed file in `scratch`.

    If it holds only tar files, as ImageNet's does, each of the inner tar files is treated as a folder.
    """
    file = ArchiveFile(str(path))
    start = file.read(6, 0)
    if start.startswith((_GZIP, _BZIP2, _XZ, _ZSTD)):
        file.decompress(_decompressor(path, start), scratch)
    members = _index(file, 0, file.size)
    if members.found and all(path.endswith(_SUFFIX) for path in members.found):
        members = _members_of_tar_files(file, members)
    return file, members


def _members_of_tar_files(file: ArchiveFile, tars: Members) -> Members:
    """Return the members of the tar files in a tar file: the members of "a/x.tar" are in the folder "a/x"."""
    found = Members(rejects=tars.rejects, folders=tars.folders, notes=tars.notes)
    for tar, member in tars.found.items():
        # Hidden members are not tar files if macOS added them, such as "._x.tar".
        if member.storing != Storing.RAW or not is_visible(posixpath.basename(tar)):
            found.add(tar, member)
            continue
        inner = _index(file, member.offset, member.offset + member.size, f"{tar!r} in it ")
        folder = tar.removesuffix(_SUFFIX)
        found.folders |= {folder, *(f"{folder}/{name}" for name in inner.folders)}
        found.notes += inner.notes
        found.rejects += inner.rejects
        found.replaced += [f"{folder}/{path}" for path in inner.replaced]
        for path, one in inner.found.items():
            found.add(f"{folder}/{path}", one)
    return found


def _decompressor(path: Path, start: bytes) -> BinaryIO:
    if start.startswith(_ZSTD):
        try:
            zstd = importlib.import_module("compression.zstd")
        except ImportError:
            problem = "compressed with zstd, which needs Python 3.14; decompress it with 'zstd -d'"
            raise SourceError.at(path, problem) from None
        return cast(BinaryIO, zstd.open(path))
    module = gzip if start.startswith(_GZIP) else bz2 if start.startswith(_BZIP2) else lzma
    return cast(BinaryIO, module.open(path))


def _index(file: ArchiveFile, start: int, stop: int, subject: str = "") -> Members:
    """Return the members of the tar file in the bytes from `start` to `stop` of `file`.

    Messages about the tar file as a whole begin with `subject`.
    """
    members, links, archive = Members(), dict[str, str](), os.path.basename(file.path)
    if file.copy_path is not None:
        archive = f"the decompressed {archive}"
    stream = _Headers(file, start, stop)
    with file.parsing(f"{subject}is not a tar file, or its first header is damaged"):
        tar = tarfile.TarFile(fileobj=cast(BinaryIO, stream), errors="surrogateescape", encoding="utf-8")
    position, last = start, ""
    while True:
        stream.seek(position)
        plain = None if tar.pax_headers else _plain_header(stream.read(_BLOCK_BYTES))
        if plain is not None and position + _BLOCK_BYTES + plain[1] <= stop:
            last, count = plain
            members.add(last, Member(position + _BLOCK_BYTES, count, count))
            position += _BLOCK_BYTES + -(-count // _BLOCK_BYTES) * _BLOCK_BYTES
            continue
        stream.seek(position)
        try:
            member = tarfile.TarInfo.fromtarfile(tar)
        except SourceError:
            raise
        except Exception as error:
            block = file.read(min(_BLOCK_BYTES, stop - position), position)
            if len(block) == _BLOCK_BYTES and not any(block):
                break
            problem = f"the header at byte {position:,} of {archive}, after {last!r}, is damaged ({error})"
            if position == start:
                problem = f"{subject}is not a tar file, or its first header is damaged"
            elif position + _BLOCK_BYTES > stop:
                problem = f"{subject}was cut short after {last!r}: {archive} has no end mark at byte {stop:,}"
            raise file.damaged(problem) from error
        if member.size < 0 or tar.offset <= position:
            raise file.damaged(f"the header at byte {position:,} of {archive} is damaged")
        position, last = tar.offset, member.name
        if member.isdir():
            members.add_folder(member.name)
            continue
        if member.isreg() and member.offset_data + member.size > stop and not member.issparse():
            raise file.damaged(f"{subject}was cut short within {last!r}, at byte {stop:,} of {archive}")
        _add(members, links, member)
    file.require_unchanged()
    _resolve(members, links)
    if _continues(file, position, stop):
        text = f"bytes after the end mark at byte {position:,} of {archive} are not read"
        members.notes = (Note(text),)
    return members


def _plain_header(block: bytes) -> tuple[str, int] | None:
    """Return the name and size of a regular file; None if the header needs `tarfile`, which is several times slower."""
    if len(block) < _BLOCK_BYTES or block[156:157] != tarfile.REGTYPE or block[345]:
        return None
    try:
        size, checksum = (int(block[start:stop].strip(b" \0"), 8) for start, stop in ((124, 136), (148, 156)))
    except ValueError:
        return None
    # The checksum is the sum of all bytes, with spaces in its own field. The lower half of Adler-32 is this sum plus 1,
    # modulo 65,521, and is computed 20 times as fast.
    blank = block[:148] + b"        " + block[156:]
    if size < 0 or zlib.adler32(blank) & 0xFFFF != (checksum + 1) % 65_521:
        return None
    return block[:100].partition(b"\0")[0].decode("utf-8", "surrogateescape"), size


def _add(members: Members, links: dict[str, str], member: tarfile.TarInfo) -> None:
    """Add a member. If it is a link that cannot be resolved yet, set ``links[path]`` to the path of its target."""
    found, target = Member(storing=Storing.SPECIAL), ""
    if member.issparse():
        found = Member(storing=Storing.SPARSE)
    elif member.isreg():
        found = Member(member.offset_data, member.size, member.size)
    elif member.islnk():
        linked = member_path(member.linkname) or ""
        found = members.found.get(linked, Member(storing=Storing.LINK))
        target = linked if linked in members.found else ""
    elif member.issym():
        found = Member(storing=Storing.LINK)
        target = posixpath.normpath(posixpath.join(posixpath.dirname(member.name), member.linkname))
    path = members.add(member.name, found)
    if path is not None and found.storing == Storing.LINK:
        links[path] = target


def _resolve(members: Members, links: dict[str, str]) -> None:
    """Replace each link by its target if the archive has it. `links` maps paths of links to paths of targets.

    A target may be a link, too.
    """
    for _ in range(_MAX_LINKS):
        for link, target in links.items():
            if members.found[link].storing == Storing.LINK:
                members.found[link] = members.found.get(target, members.found[link])


def _continues(file: ArchiveFile, position: int, stop: int) -> bool:
    """Return whether the bytes from `position` to `stop`, after the end mark, are not all zeros."""
    zeros = bytes(_MAX_HEADER_BYTES)
    for start in range(position, stop, _MAX_HEADER_BYTES):
        count = min(_MAX_HEADER_BYTES, stop - start)
        if file.read(count, start) != zeros[:count]:
            return True
    return False
