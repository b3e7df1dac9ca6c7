"""Zip files as sources: the index of their members. Images are read from them by `h5pack.sources.archives`."""

from __future__ import annotations

import stat
import struct
import zipfile
import zlib
from pathlib import Path

from h5pack.sources.archives import ArchiveFile, Members, Storing

_ENCRYPTED_FLAG, _UTF8_FLAG, _DOS = 0x1, 0x800, 0
_UNICODE_PATH = 0x7075  # extra field: version, CRC-32 of the stored name, name in UTF-8 (Info-ZIP, appnote.iz)
_MAX_SIZE = 2**63 - 1
_MAX_SHARING = 10  # maximum ratio of the stored sizes of a zip file's members to its size; over 1 if it is damaged
_STORINGS = {zipfile.ZIP_STORED: Storing.ZIP_STORED, zipfile.ZIP_DEFLATED: Storing.ZIP_DEFLATED}


def open_zip(path: Path) -> tuple[ArchiveFile, Members]:
    """Open a zip file and return its index."""
    file, members = ArchiveFile(str(path)), Members()
    with file.parsing("its directory of members is damaged or missing"), zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    file.require_unchanged()
    for entry in entries:
        name = _name(entry)
        if entry.create_system == _DOS and "/" not in name:
            # Some tools for Windows separate folders by backslashes, against the format's specification.
            name = name.replace("\\", "/")
        if name.endswith("/"):
            members.add_folder(name)
        else:
            # The sizes in a damaged file may be too large for int64.
            offset, size, stored = (
                min(value, _MAX_SIZE) for value in (entry.header_offset, entry.file_size, entry.compress_size)
            )
            members.add(name, offset, size, stored, entry.CRC, _storing(entry))
    if sum(min(stored, file.size) for stored in members.stored_sizes) > _MAX_SHARING * file.size:
        raise file.damaged("is a zip bomb: its members share their bytes")
    return file, members


def _name(entry: zipfile.ZipInfo) -> str:
    """Return a member's name in Unicode, whichever way the archiver stored it."""
    # Use the stored name, because zipfile cuts off `entry.filename` at a NUL.
    name, extra = entry.orig_filename, entry.extra
    if entry.flag_bits & _UTF8_FLAG:
        return name
    stored = name.encode("cp437")
    while len(extra) > 9:
        kind, count, version, checksum = struct.unpack_from("<HHBL", extra)
        if (kind, version, checksum) == (_UNICODE_PATH, 1, zlib.crc32(stored)):
            stored = extra[9 : 4 + count]
            break
        extra = extra[4 + count :]
    try:
        # Some archivers, such as that of macOS, store UTF-8 without setting the flag.
        return stored.decode()
    except UnicodeDecodeError:
        return name


def _storing(entry: zipfile.ZipInfo) -> Storing:
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind == stat.S_IFLNK:
        return Storing.LINK
    if kind not in (0, stat.S_IFREG):
        return Storing.SPECIAL
    if entry.flag_bits & _ENCRYPTED_FLAG:
        return Storing.ZIP_ENCRYPTED
    return _STORINGS.get(entry.compress_type, Storing.ZIP_OTHER)
