"""Shuffling that is pinned: for a key the order is the same in every release, on every machine, with every numpy.

Numpy's generators promise no such thing for their shuffles, so the keys come from our own hash: splitmix64 (Steele,
Lea, Flood 2014, "Fast splittable pseudorandom number generators"), whose outputs pass BigCrush.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_ROUNDS = 8
TABLE_ROWS = 1 << 20
"""Up to this many items a permutation is a sorted table (8 MiB); beyond, it is computed item by item in no memory."""


def derive_key(*parts: int) -> int:
    """A 64-bit key out of integers, each of which changes all of it."""
    state = 0
    for part in parts:
        state = _mix(((state ^ (int(part) & _MASK)) + _GOLDEN) & _MASK)
    return state


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mix_all(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`_mix` of every element, in place."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def shuffled(count: int, key: int) -> npt.NDArray[np.int64]:
    """A random permutation of 0..count-1, held as a table.

    Every number gets 64 - log2(count) hashed bits above itself, and the sums are sorted.

    Returns
    -------
    ndarray
        int64, (count,).
    """
    numbers = np.arange(count, dtype=np.uint64)
    bits = np.uint64(max(count - 1, 0).bit_length())
    keys = numbers + np.uint64(1)
    keys *= np.uint64(_GOLDEN)
    keys += np.uint64(key)
    _mix_all(keys)
    keys <<= bits
    keys |= numbers
    keys.sort()
    keys &= (np.uint64(1) << bits) - np.uint64(1)
    table: npt.NDArray[np.int64] = keys.view(np.int64)
    return table


class Permutation:
    """A random permutation of 0..count-1 that can be asked at any place.

    Large ones are Feistel networks over the next power of four, walked until the value is in range (Black and Rogaway
    2002, "Ciphers with arbitrary finite domains"), so a billion items take no memory.

    Parameters
    ----------
    count : int
    key : int
        64 bits.
    """

    def __init__(self, count: int, key: int) -> None:
        self.count = count
        self._table = shuffled(count, key) if count <= TABLE_ROWS else None
        half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
        self._half = np.uint64(half)
        self._low = np.uint64((1 << half) - 1)
        self._keys = [np.uint64(derive_key(key, number)) for number in range(_ROUNDS)]

    def at(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The items at places; int64, (n,)."""
        if self._table is not None:
            return self._table[places]
        return self._walk(places, self._encrypt)

    def where(self, items: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The places of items: the inverse of `at`; int64, (n,)."""
        if self._table is not None:
            inverse = np.empty(self.count, np.int64)
            inverse[self._table] = np.arange(self.count)
            return inverse[items]
        return self._walk(items, self._decrypt)

    def _walk(self, values: npt.NDArray[np.int64], step: object) -> npt.NDArray[np.int64]:
        current: npt.NDArray[np.uint64] = step(values.astype(np.uint64))  # type: ignore[operator]
        outside = np.flatnonzero(current >= self.count)
        while len(outside):
            current[outside] = step(current[outside])  # type: ignore[operator]
            outside = outside[current[outside] >= self.count]
        return current.view(np.int64)

    def _round(self, half: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
        mixed: npt.NDArray[np.uint64] = _mix_all((half + np.uint64(1)) * np.uint64(_GOLDEN) + key) & self._low
        return mixed

    def _encrypt(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values >> self._half, values & self._low
        for key in self._keys:
            left, right = right, left ^ self._round(right, key)
        return self._joined(left, right)

    def _decrypt(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values >> self._half, values & self._low
        for key in reversed(self._keys):
            left, right = right ^ self._round(left, key), left
        return self._joined(left, right)

    def _joined(self, left: npt.NDArray[np.uint64], right: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        joined: npt.NDArray[np.uint64] = (left << self._half) | right
        return joined
