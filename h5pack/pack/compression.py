"""How the chunks of a pack's images are compressed: the choices, as options name them and as HDF5 does."""

from __future__ import annotations

import re
from dataclasses import dataclass

from h5pack import filters
from h5pack.errors import OptionsError

NONE = "none"
COMPRESSIONS = (NONE, "gzip", "zstd", "bitshuffle-lz4")
"""What `--compression` may name; gzip and zstd also with a level."""

_LEVELS = {"gzip": (4, 9), "zstd": (3, 22)}
"""The level that is taken without one, and the highest; the lowest is 1."""
_BITSHUFFLE_LZ4 = (0, 2)
"""Blocks of the filter's own choice, each compressed by LZ4."""


@dataclass(frozen=True)
class Compression:
    """One filter of HDF5, and its settings.

    Attributes
    ----------
    name : str
        As an option, always with its level: the same for all ways to ask for it.
    number : int
        By which HDF5 knows the filter.
    parameters : tuple of int
        The filter's.
    """

    name: str
    number: int
    parameters: tuple[int, ...]


def parse_compression(text: str) -> Compression | None:
    """Read a choice, such as gzip, zstd:7 or bitshuffle-lz4; None for none.

    Raises
    ------
    OptionsError
    """
    if text == NONE:
        return None
    if text == "bitshuffle-lz4":
        return Compression(text, filters.BITSHUFFLE, _BITSHUFFLE_LZ4)
    match = re.fullmatch(r"(gzip|zstd)(?::([1-9][0-9]?))?", text)
    if match is not None:
        usual, most = _LEVELS[match[1]]
        level = int(match[2]) if match[2] else usual
        if level <= most:
            number = filters.GZIP if match[1] == "gzip" else filters.ZSTD
            return Compression(f"{match[1]}:{level}", number, (level,))
    levels = (f"{name}:1 to {name}:{most}" for name, (_, most) in _LEVELS.items())
    raise OptionsError(f"compression {text!r} is none of {', '.join([*COMPRESSIONS, *levels])}")


def most_bytes(count: int) -> int:
    """Upper bound of what `count` bytes become, however little they can be compressed.

    Bitshuffle-LZ4 grows most: 52 bytes for each block of 8,192. zstd adds 1 in 256, gzip 1 in 1,000.
    """
    return count + count // 64 + 1024
