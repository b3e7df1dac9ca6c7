"""HDF5's filter plugins, called beside the HDF5 library.

A plugin is a shared library with one function that encodes or decodes a chunk (`H5Z_func_t` of HDF5's H5Zpublic.h).
HDF5 calls it under its global lock, one chunk at a time; called from here it runs in any number of threads, and gives
the same bytes, for it is the same code. The plugins are those of the package hdf5plugin.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from pathlib import Path

from h5pack import filters
from h5pack.read.block import Block

_REVERSE = 0x0100
_MOST_BYTES = 1 << 40
"""Plugins tell of a failure by 0, or by an error's number, negated: larger than any chunk."""

_COMPRESSOR = 4
"""Which of bitshuffle's parameters says how it compresses."""

_PACKING = (2, 3)
"""LZ4, Zstd; others: not at all."""

_HEADER_BYTES = 12
_BLOCK_BYTES = 1 << 30

_LIBRARIES = {
    filters.BITSHUFFLE: "bshuf",
    filters.BLOSC: "blosc",
    filters.LZ4: "lz4",
    filters.ZSTD: "zstd",
}
"""Those that keep no state between calls, or guard it."""

_Function = ctypes.CFUNCTYPE(
    ctypes.c_size_t,
    ctypes.c_uint,
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(ctypes.c_void_p),
)


class _Description(ctypes.Structure):
    """`H5Z_class2_t`."""

    _fields_ = (
        ("version", ctypes.c_int),
        ("number", ctypes.c_int),
        ("encodes", ctypes.c_uint),
        ("decodes", ctypes.c_uint),
        ("name", ctypes.c_char_p),
        ("can_apply", ctypes.c_void_p),
        ("set_local", ctypes.c_void_p),
        ("function", ctypes.c_void_p),
    )


def is_plugin(number: int) -> bool:
    """Whether a filter's plugin can be called from several threads, and is there."""
    return number in _LIBRARIES and _function(number) is not None


def decode(number: int, parameters: tuple[int, ...], block: Block, size: int | None = None) -> Block:
    """Decode a chunk.

    Parameters
    ----------
    number : int
        A filter for which `is_plugin` holds.
    parameters : tuple of int
        The filter's, as the dataset stores them.
    block : Block
        The encoded bytes; used up.
    size : int, optional
        What they must decode to, where that is known.

    Raises
    ------
    ValueError
        If they cannot be decoded.
    """
    function = _function(number)
    assert function is not None
    if size is not None:
        _require_header(number, parameters, block, size)
    values = (ctypes.c_uint * len(parameters))(*parameters)
    room, pointer = ctypes.c_size_t(block.size), ctypes.c_void_p(block.address)
    count = block.size
    block.release()
    decoded = function(_REVERSE, len(parameters), values, count, ctypes.byref(room), ctypes.byref(pointer))
    # What the plugin leaves there is ours, after a failure too: it frees the encoded bytes only once it has others.
    failed = not 0 < decoded < _MOST_BYTES
    result = Block(0 if failed else decoded, pointer.value)
    if failed:
        raise ValueError(f"filter {number} cannot decode it")
    return result


def _require_header(number: int, parameters: tuple[int, ...], block: Block, size: int) -> None:
    """Refuse a chunk whose header promises another size, which LZ4's and bitshuffle's plugins would believe.

    Both begin with the decoded size, 8 bytes, and that of the blocks it is cut into, 4 bytes, high bytes first.
    """
    packs = number == filters.BITSHUFFLE and len(parameters) > _COMPRESSOR and parameters[_COMPRESSOR] in _PACKING
    if number != filters.LZ4 and not packs:
        return
    header = block.array()[:_HEADER_BYTES].tobytes()
    told, piece = int.from_bytes(header[:8], "big"), int.from_bytes(header[8:], "big")
    if len(header) < _HEADER_BYTES or told != size or not 0 < piece <= max(size, _BLOCK_BYTES):
        raise ValueError(f"its header tells of {told:,} bytes instead of {size:,}")


@functools.cache
def _function(number: int) -> ctypes._FuncPointer | None:
    """A plugin's function; None where there is no such plugin."""
    try:
        # Importing it also gives its plugins what they need of HDF5.
        module = importlib.import_module("hdf5plugin")
        paths = sorted(Path(module.PLUGIN_PATH).glob(f"libh5{_LIBRARIES[number]}.*"))
        library = ctypes.CDLL(str(paths[0]))
        library.H5PLget_plugin_info.restype = ctypes.POINTER(_Description)
        description = library.H5PLget_plugin_info().contents
    except (ImportError, OSError, IndexError, AttributeError):
        return None
    return _Function(description.function) if description.number == number else None
