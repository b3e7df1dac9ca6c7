"""Decoders for HDF5 filters. Threads can decode in parallel, because decoders hold neither HDF5's lock nor the GIL.

Filter plugins, which HDF5 loads as shared libraries, are called through the same C interface (`H5Z_func_t` of
H5Zpublic.h) that HDF5 uses, but from several threads at once. The package hdf5plugin provides the plugins.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.format.checksums import fastest_zlib
from h5pack.format.schema import FilterId
from h5pack.read.hdf5 import Filter
from h5pack.system.libc import libc_function
from h5pack.system.machine import optional_module

Bytes = npt.NDArray[np.uint8]

_malloc: Any = libc_function("malloc", ctypes.c_void_p, ctypes.c_size_t)
_free: Any = libc_function("free", None, ctypes.c_void_p)


class MallocBuffer:
    """A buffer allocated by malloc. Filter plugins require such a buffer, because they may free or replace it.

    ``np.asarray(buffer)`` is an array of the memory, uint8 (size,). The memory is freed when neither the buffer nor
    such an array is in use. If `address` is not None, the buffer takes ownership of the malloc memory at this address.
    Otherwise, it allocates new memory.
    """

    def __init__(self, size: int, address: int | None = None) -> None:
        self.size = size
        self.address = _malloc(max(1, size)) if address is None else address
        if not self.address:
            raise MemoryError(f"cannot allocate {size:,} bytes")

    def __del__(self) -> None:
        if getattr(self, "address", None):
            _free(self.address)

    def release(self) -> int:
        """Return the address of the memory, which the caller now owns and must free.

        Arrays of the memory that were created before must not be used any more.
        """
        address, self.address = self.address, None
        assert address is not None
        return address

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": (self.size,), "typestr": "|u1", "data": (self.address, False)}


class UnsupportedFilterError(ValueError):
    """h5pack itself has no decoder for a filter of a dataset, or the package with the decoder is not installed."""


@dataclass(frozen=True)
class FilterPipeline:
    """The filters of a dataset, in encoding order; `size` is the size of a decoded chunk in bytes."""

    steps: tuple[Filter, ...]
    size: int

    def decode(self, encoded: MallocBuffer, mask: int, *, is_checked: bool = False) -> Bytes:
        """Decode a chunk to uint8 (size,), possibly read-only; raise ValueError if that fails.

        `encoded` must not be used afterwards. Bit i of `mask` is set if filter i was not applied to this chunk. If
        `is_checked` is true, the chunk has matched its checksum. So the sizes that it contains are correct, and are
        not checked. This saves 6% of the time.
        """
        data: MallocBuffer | Bytes = encoded
        for position in reversed(range(len(self.steps))):
            if mask >> position & 1:
                continue
            step = self.steps[position]
            size = self._size_before(position, mask)
            if step.number in _DECODERS:
                # If the size is unknown, allow for an earlier filter that enlarged the chunk.
                data = _DECODERS[step.number](np.asarray(data), step.parameters, size or 2 * self.size + 65_536)
            else:
                data = _to_malloc(data)
                if not is_checked:
                    _require_sizes(step, data, size)
                data = decode_plugin(step.number, step.parameters, data)
        decoded: Bytes = np.asarray(data)
        if len(decoded) != self.size:
            raise ValueError(f"the chunk decodes to {len(decoded):,} bytes instead of {self.size:,}")
        return decoded

    def _size_before(self, position: int, mask: int) -> int | None:
        """Return the size of a chunk in bytes before the filter at index `position` encoded it.

        Return None if the size is unknown, because an earlier filter may have compressed the chunk.
        """
        applied = [step.number for number, step in enumerate(self.steps[:position]) if not mask >> number & 1]
        if not {*applied} <= {FilterId.SHUFFLE, FilterId.FLETCHER32}:
            return None
        return self.size + _CHECKSUM_BYTES * applied.count(FilterId.FLETCHER32)


def find_pipeline(found: tuple[Filter, ...], size: int) -> FilterPipeline:
    """Return the decoder for these filters, or raise UnsupportedFilterError; a decoded chunk has `size` bytes."""
    for item in found:
        if item.number not in _DECODERS and not is_plugin(item.number):
            raise UnsupportedFilterError(f"its chunks pass through filter {item.number} ({item.name or 'unnamed'})")
        if item.number == FilterId.LZF and _imagecodecs() is None:
            problem = "its chunks pass through lzf, whose decoder is missing (pip install imagecodecs)"
            raise UnsupportedFilterError(problem)
    return FilterPipeline(found, size)


def _to_malloc(data: MallocBuffer | Bytes) -> MallocBuffer:
    if isinstance(data, MallocBuffer):
        return data
    copy = MallocBuffer(len(data))
    np.asarray(copy)[...] = data
    return copy


def _decode_gzip(data: Bytes, parameters: tuple[int, ...], size: int) -> Bytes:
    try:
        return np.frombuffer(fastest_zlib.decompress(data, bufsize=size), np.uint8)
    except fastest_zlib.error as error:
        raise ValueError(f"gzip: {error}") from error


def _unshuffle(data: Bytes, parameters: tuple[int, ...], size: int) -> Bytes:
    """Undo the shuffle filter. Trailing bytes that do not fill a whole element were not shuffled."""
    width = max(1, parameters[0]) if parameters else 1
    count = len(data) // width
    if count < 2 or width == 1:
        return data
    restored = np.empty_like(data)
    whole = count * width
    restored[:whole].reshape(count, width)[...] = data[:whole].reshape(width, count).T
    restored[whole:] = data[whole:]
    return restored


def _decode_lzf(data: Bytes, parameters: tuple[int, ...], size: int) -> Bytes:
    try:
        return np.frombuffer(_imagecodecs().lzf_decode(data, out=size), np.uint8)
    except RuntimeError as error:  # the base of `imagecodecs.LzfError`
        raise ValueError(f"lzf: {error}") from error


@functools.cache
def _imagecodecs() -> Any:
    return optional_module("imagecodecs")


_CHECKSUM_BYTES = 4
_FLETCHER_WORDS = 4_096
"""Number of words per block of `fletcher32`, few enough that their position-weighted sum is exact in a float64."""


def _check_fletcher32(data: Bytes, parameters: tuple[int, ...], size: int) -> Bytes:
    """Compare a chunk with the checksum stored after it, and return the chunk without the checksum."""
    content, stored = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if len(stored) < _CHECKSUM_BYTES:
        raise ValueError("fletcher32: the chunk is shorter than a checksum")
    low, high = fletcher32(content)
    expected = int.from_bytes(stored.tobytes(), "little")
    # HDF5 before 1.6.3 swapped the bytes of each half on some machines; later versions accept both orders.
    swapped = int.from_bytes(stored[[1, 0, 3, 2]].tobytes(), "little")
    if high << 16 | low not in (expected, swapped):
        raise ValueError("fletcher32: the chunk does not match its checksum")
    return content


def fletcher32(data: Bytes) -> tuple[int, int]:
    """Return the low and the high half of HDF5's Fletcher-32 checksum: two sums of 16-bit words, modulo 65535.

    The low half is the sum of the words w_0..w_(n-1), the high half the sum of (n - i) w_i. If the number of bytes is
    odd, the last byte is the high byte of a final word. A nonzero sum that is divisible by 65535 gives 65535, not 0,
    because H5_checksum_fletcher32 in HDF5's src/H5checksum.c folds carries back instead of dividing.
    """
    # Put zeros before the first word to fill up the first block. They change neither sum.
    blocks = -(-len(data) // (2 * _FLETCHER_WORDS))
    padded = np.zeros(blocks * 2 * _FLETCHER_WORDS, np.uint8)
    stop = len(padded) - len(data) % 2
    padded[stop - len(data) : stop] = data
    weights = np.stack([np.ones(_FLETCHER_WORDS), np.arange(_FLETCHER_WORDS, 0, -1)], axis=1)
    sums = padded.view(">u2").reshape(blocks, _FLETCHER_WORDS).astype(np.float64) @ weights
    plain, weighted = sums.astype(np.int64).T
    # A word's weight in `weights` is the number of words from it to the end of its block. To get the
    # weight n - i, add `behind`, the number of words in all later blocks.
    behind = np.arange(blocks)[::-1] * _FLETCHER_WORDS % 65_535
    return _folded(int(plain.sum())), _folded(int((weighted + plain % 65_535 * behind).sum()))


def _folded(total: int) -> int:
    return total % 65_535 or (65_535 if total else 0)


# The arguments are an encoded chunk, the filter's parameters, and the number of decoded bytes or an upper bound. Only
# the decoder of LZF needs the last one.
_DECODERS: dict[int, Callable[[Bytes, tuple[int, ...], int], Bytes]] = {
    FilterId.GZIP: _decode_gzip,
    FilterId.SHUFFLE: _unshuffle,
    FilterId.FLETCHER32: _check_fletcher32,
    FilterId.LZF: _decode_lzf,
}

_PLUGINS: dict[int, str] = {
    FilterId.BITSHUFFLE: "bshuf",
    FilterId.BLOSC: "blosc",
    FilterId.LZ4: "lz4",
    FilterId.ZSTD: "zstd",
}
"""File names (after "libh5") of the filter plugins that several threads may call at once."""
_REVERSE = 0x0100
_MAX_DECODED_BYTES = 1 << 40
"""Larger results are errors: plugins report failures as 0, or as a negative number, which is huge when unsigned."""
_BITSHUFFLE_WIDTH, _BITSHUFFLE_COMPRESSOR = 2, 4
"""Indices of two bitshuffle parameters: the size of an element in bytes, and the compressor."""
_BITSHUFFLE_ELEMENTS = 8
"""Bitshuffle transposes the bits of this many elements at a time."""
_BITSHUFFLE_WITH_HEADER = (2, 3)
"""Values of the compressor parameter that select LZ4 and Zstd. Their chunks begin with a header.

Other values select no compression, and the chunks have no header.
"""
_HEADER_BYTES, _BLOSC_HEADER_BYTES = 12, 16
_MAX_BLOCK_BYTES = 1 << 30

_Function = ctypes.CFUNCTYPE(
    ctypes.c_size_t,
    ctypes.c_uint,
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(ctypes.c_void_p),
)


class _PluginDescription(ctypes.Structure):
    """The C struct `H5Z_class2_t`, with which a plugin describes its filter."""

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
    """Return whether the plugin of a filter is installed and may be called from several threads at once."""
    return number in _PLUGINS and _plugin_function(number) is not None


def decode_plugin(number: int, parameters: tuple[int, ...], encoded: MallocBuffer) -> MallocBuffer:
    """Decode a chunk with a filter for which `is_plugin` is true; raise ValueError if that fails.

    `encoded` must not be used afterwards.
    """
    function = _plugin_function(number)
    assert function is not None
    values = (ctypes.c_uint * len(parameters))(*parameters)
    room, pointer = ctypes.c_size_t(encoded.size), ctypes.c_void_p(encoded.release())
    decoded = function(_REVERSE, len(parameters), values, encoded.size, ctypes.byref(room), ctypes.byref(pointer))
    # Take ownership of the memory at `pointer` even after a failure: it is the input, or the buffer that replaced it.
    failed = not 0 < decoded < _MAX_DECODED_BYTES
    result = MallocBuffer(0 if failed else decoded, pointer.value)
    if failed:
        raise ValueError(f"filter {number} cannot decode the chunk")
    return result


def _require_sizes(step: Filter, encoded: MallocBuffer, size: int | None) -> None:
    """Raise ValueError if a chunk of Blosc, LZ4 or bitshuffle contains wrong sizes, which the plugins would trust.

    A chunk of Blosc contains its decoded size (bytes 4 to 7, little-endian) and its own size (bytes 12 to 15). A chunk
    of LZ4 or bitshuffle begins with two big-endian integers: the decoded size of the chunk (8 bytes) and that of a
    block (4 bytes). Blocks follow, each of which begins with its compressed size (4 bytes, big-endian). Chunks of other
    filters, and of bitshuffle without compression, are not checked. `size` is the number of decoded bytes, if known.
    """
    number, parameters = step.number, step.parameters
    data = np.asarray(encoded).data
    if number == FilterId.BLOSC:
        decoded, own = (int.from_bytes(data[start : start + 4], "little") for start in (4, 12))
        if len(data) < _BLOSC_HEADER_BYTES or own != len(data) or size not in (None, decoded):
            found = f"{own:,} bytes that decode to {decoded:,}"
            raise ValueError(f"the chunk's header is damaged: {found} do not fit a chunk of {len(data):,} bytes")
        return
    is_shuffled = (
        number == FilterId.BITSHUFFLE
        and len(parameters) > _BITSHUFFLE_COMPRESSOR
        and parameters[_BITSHUFFLE_COMPRESSOR] in _BITSHUFFLE_WITH_HEADER
    )
    if number != FilterId.LZ4 and not is_shuffled:
        return
    header = data[:_HEADER_BYTES]
    promised, block = int.from_bytes(header[:8], "big"), int.from_bytes(header[8:], "big")
    size = promised if size is None else size
    if len(header) < _HEADER_BYTES or promised != size or not 0 < block <= max(size, _MAX_BLOCK_BYTES):
        found = f"{promised:,} bytes in blocks of {block:,}"
        raise ValueError(f"the chunk's header is damaged: {found} do not fit a chunk of {size:,} bytes")
    if is_shuffled:
        found_bytes = _bitshuffle_bytes(data, size, parameters[_BITSHUFFLE_WIDTH], block)
    else:
        found_bytes = _blocks_end(data, -(-size // block))
    if found_bytes != len(data):
        raise ValueError("the sizes of the chunk's blocks are damaged: their sum is not the size of the chunk")


def _bitshuffle_bytes(data: memoryview, size: int, width: int, block: int) -> int:
    """Return the size in bytes that a compressed chunk of bitshuffle must have, according to the sizes of its blocks.

    Return -1 if a block would end past the end of the chunk, or if `width` or `block` is impossible. `data` is the
    compressed chunk, which decodes to `size` bytes of elements of `width` bytes. After the header, `data` consists of:

    - blocks, each of which holds `block` decoded bytes
    - if enough elements remain, a smaller last block, which holds a multiple of 8 elements
    - the remaining elements, at most 7, without a size and uncompressed
    """
    unit = _BITSHUFFLE_ELEMENTS * width
    if not unit or block % unit or size % width:
        return -1
    end = _blocks_end(data, size // block + (size % block >= unit))
    return end if end < 0 else end + size % unit


def _blocks_end(data: memoryview, count: int) -> int:
    """Return the position after the `count` blocks of a chunk, according to their sizes; -1 if it is past the end."""
    position = _HEADER_BYTES
    for _ in range(count):
        position += 4 + int.from_bytes(data[position : position + 4], "big")
        if position > len(data):
            return -1
    return position


@functools.cache
def _plugin_function(number: int) -> ctypes._FuncPointer | None:
    """Return the C function of a filter plugin; None if hdf5plugin is missing or broken, or does not contain it."""
    try:
        # Importing hdf5plugin also loads the symbols of HDF5, which the plugins need.
        module = importlib.import_module("hdf5plugin")
        paths = sorted(Path(module.PLUGIN_PATH).glob(f"libh5{_PLUGINS[number]}.*"))
        library = ctypes.CDLL(str(paths[0]))
        library.H5PLget_plugin_info.restype = ctypes.POINTER(_PluginDescription)
        description = library.H5PLget_plugin_info().contents
    except Exception:
        return None
    return _Function(description.function) if description.number == number else None
