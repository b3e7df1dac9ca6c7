"""Chunks that passed through filters, decoded beside the HDF5 library: outside its lock and Python's, in any thread."""

from __future__ import annotations

import functools
import importlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack import filters
from h5pack.hdf5 import Filter
from h5pack.read import plugins
from h5pack.read.block import Block

_CHECKSUM_BYTES = 4
_FLETCHER_WORDS = 4_096
"""Words a block: the sums of so many, weighted by their place, are whole numbers that a float64 holds exactly."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Codec:
    """A dataset's filters, in the order in which they encode.

    Attributes
    ----------
    steps : tuple of (int, tuple of int)
        Number and parameters of each.
    size : int
        Bytes of a decoded chunk.
    """

    steps: tuple[tuple[int, tuple[int, ...]], ...]
    size: int

    def decode(self, block: Block, mask: int) -> Bytes:
        """Decode a chunk.

        Parameters
        ----------
        block : Block
            Its bytes as stored; used up.
        mask : int
            Bit i: filter i was left out for this chunk.

        Returns
        -------
        ndarray
            uint8, (size,), perhaps read-only.

        Raises
        ------
        ValueError
            If the bytes cannot be decoded, or not to a chunk.
        """
        data: Block | Bytes = block
        for place in reversed(range(len(self.steps))):
            if mask >> place & 1:
                continue
            number, parameters = self.steps[place]
            if plugins.is_plugin(number):
                # The first that encoded had a chunk before it.
                data = plugins.decode(number, parameters, _as_block(data), None if place else self.size)
            else:
                data = _DECODERS[number](_as_array(data), parameters, self.size)
        decoded = _as_array(data)
        if len(decoded) != self.size:
            raise ValueError(f"it decodes to {len(decoded):,} bytes instead of {self.size:,}")
        return decoded


def find_codec(found: tuple[Filter, ...], size: int) -> Codec | str:
    """What decodes chunks that passed through these filters, or why nothing does.

    Parameters
    ----------
    found : tuple of Filter
        In the order in which they encode.
    size : int
        Bytes of a decoded chunk.
    """
    for item in found:
        if item.number not in _DECODERS and not plugins.is_plugin(item.number):
            return f"its chunks pass through filter {item.number} ({item.name or 'unnamed'})"
        if item.number == filters.LZF and _imagecodecs() is None:
            return "its chunks pass through lzf, whose decoder is missing: pip install 'h5pack[compress]'"
    return Codec(tuple((item.number, item.parameters) for item in found), size)


def _as_array(data: Block | Bytes) -> Bytes:
    return data.array() if isinstance(data, Block) else data


def _as_block(data: Block | Bytes) -> Block:
    if isinstance(data, Block):
        return data
    block = Block(len(data))
    block.array()[...] = data
    return block


def _gunzip(data: Bytes, parameters: tuple[int, ...], size: int) -> Bytes:
    try:
        return np.frombuffer(_inflate()(data, bufsize=size), np.uint8)
    except Exception as error:
        # zlib's and isal's errors have no class in common.
        raise ValueError(f"gzip: {error}") from error


@functools.cache
def _inflate() -> Callable[..., bytes]:
    try:
        found: Callable[..., bytes] = importlib.import_module("isal.isal_zlib").decompress
    except ImportError:
        return zlib.decompress
    return found


def _unshuffle(data: Bytes, parameters: tuple[int, ...], size: int) -> Bytes:
    """Put each element's bytes together again; what does not fill an element is at the end, as it was."""
    width = max(1, parameters[0]) if parameters else 1
    count = len(data) // width
    if count < 2 or width == 1:
        return data
    restored = np.empty_like(data)
    whole = count * width
    restored[:whole].reshape(count, width)[...] = data[:whole].reshape(width, count).T
    restored[whole:] = data[whole:]
    return restored


def _unlzf(data: Bytes, parameters: tuple[int, ...], size: int) -> Bytes:
    # What other filters made of a chunk may be larger than it.
    for room in (size, 2 * size + 1_024, 16 * size + 65_536):
        try:
            return np.frombuffer(_imagecodecs().lzf_decode(data, out=room), np.uint8)
        except Exception as error:
            why = error
    raise ValueError(f"lzf: {why}") from why


@functools.cache
def _imagecodecs() -> Any:
    try:
        return importlib.import_module("imagecodecs")
    except ImportError:
        return None


def _check_fletcher32(data: Bytes, parameters: tuple[int, ...], size: int) -> Bytes:
    """Compare a chunk with the checksum behind it."""
    content, stored = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if len(stored) < _CHECKSUM_BYTES:
        raise ValueError("fletcher32: it is too short")
    low, high = fletcher32(content)
    wanted = int.from_bytes(stored.tobytes(), "little")
    # HDF5 before 1.6.3 swapped the bytes of each half on some machines; later ones accept that.
    swapped = int.from_bytes(stored[[1, 0, 3, 2]].tobytes(), "little")
    if high << 16 | low not in (wanted, swapped):
        raise ValueError("fletcher32: it differs from its checksum")
    return content


def fletcher32(data: Bytes) -> tuple[int, int]:
    """HDF5's checksum of bytes, as its low and its high half: Fletcher's sums of 16-bit words, modulo 65535.

    The first half sums the words w_0..w_(n-1), the second sums (n - i) w_i. A last odd byte is a word's high byte. Both
    stay 65535 rather than 0 where words other than zero add up to it (H5_checksum_fletcher32 in HDF5's src/H5checksum.c
    folds carries back instead of dividing).
    """
    words = data[: len(data) // 2 * 2].view(">u2")
    if len(data) % 2:
        words = np.append(words, np.array([int(data[-1]) << 8], ">u2"))
    first = second = 0
    weights = np.stack([np.ones(_FLETCHER_WORDS), np.arange(_FLETCHER_WORDS, 0, -1)], axis=1)
    whole = len(words) // _FLETCHER_WORDS * _FLETCHER_WORDS
    sums = words[:whole].reshape(-1, _FLETCHER_WORDS).astype(np.float64) @ weights
    tail = words[whole:].astype(np.float64)
    blocks = [(_FLETCHER_WORDS, *pair) for pair in sums.tolist()]
    blocks.append((len(tail), float(tail.sum()), float((tail * np.arange(len(tail), 0, -1)).sum())))
    for count, plain, weighted in blocks:
        # The sums so far count again with each word that follows.
        second += count * first + int(weighted)
        first += int(plain)
    return _folded(first), _folded(second)


def _folded(total: int) -> int:
    return total % 65_535 or (65_535 if total else 0)


_DECODERS: dict[int, Callable[[Bytes, tuple[int, ...], int], Bytes]] = {
    filters.GZIP: _gunzip,
    filters.SHUFFLE: _unshuffle,
    filters.FLETCHER32: _check_fletcher32,
    filters.LZF: _unlzf,
}
