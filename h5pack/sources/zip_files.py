"""The index of a zip file: the names, offsets, sizes and CRCs of its members, from its central directory."""

from __future__ import annotations

import stat
import zipfile
from pathlib import Path

from h5pack.sources.archives import ArchiveFile, Members, Storing

_ENCRYPTED = 0x1
_MAX_SIZE = 2**63 - 1
_STORINGS = {zipfile.ZIP_STORED: Storing.ZIP_STORED, zipfile.ZIP_DEFLATED: Storing.ZIP_DEFLATED}


def open_zip(path: Path) -> tuple[ArchiveFile, Members]:
    """Open a zip file and return its index."""
    file, members = ArchiveFile(str(path)), Members()
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except OSError:
        raise
    except Exception as error:
        # On damaged files, zipfile may raise any exception type.
        raise file.damaged(f"its directory of members is damaged or missing ({error})") from error
    file.require_unchanged()
    for entry in entries:
        # The name as stored: zipfile would end it at a NUL.
        name = entry.orig_filename
        if name.endswith("/"):
            members.add_folder(name)
        else:
            # Damaged sizes may exceed 64 bits.
            offset, size, stored = (
                min(value, _MAX_SIZE) for value in (entry.header_offset, entry.file_size, entry.compress_size)
            )
            members.add(name, offset, size, stored, entry.CRC, _storing(entry))
    return file, members


def _storing(entry: zipfile.ZipInfo) -> Storing:
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind == stat.S_IFLNK:
        return Storing.LINK
    if kind not in (0, stat.S_IFREG):
        return Storing.SPECIAL
    if entry.flag_bits & _ENCRYPTED:
        return Storing.ZIP_ENCRYPTED
    return _STORINGS.get(entry.compress_type, Storing.ZIP_OTHER)
