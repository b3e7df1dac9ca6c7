"""Reproducible permutations: a key gives the same order on every machine, with every release of h5pack and of NumPy.

NumPy may change its shuffles in a new release. So the random numbers come from a hash function in
`h5pack.system.arrays`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from h5pack.system.arrays import SPLITMIX64_GAMMA, shuffled, splitmix64, splitmix64_array

_MASK = (1 << 64) - 1
_ROUNDS = 8
TABLE_ROWS = 1 << 20
"""A permutation of up to this many items is stored as a table (of up to 8 MiB).

Of a larger permutation, only the requested items are computed, on each request.
"""


def derive_key(*parts: int) -> int:
    """Hash integers into a 64-bit key. Only the lower 64 bits of each integer count; each bit affects the whole key."""
    state = 0
    for part in parts:
        state = splitmix64(((state ^ (int(part) & _MASK)) + SPLITMIX64_GAMMA) & _MASK)
    return state


class Permutation:
    """A random permutation of the numbers 0 to ``count - 1``, determined by a 64-bit key.

    More than `TABLE_ROWS` items are permuted by a Feistel network, whose domain is the numbers below a power of four:
    the smallest one that is at least `count`. The network is applied to a number again and again until the result is
    below `count` (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). So even a permutation of a billion
    items takes no memory.
    """

    def __init__(self, count: int, key: int) -> None:
        self.count = count
        self._table = shuffled(count, key) if count <= TABLE_ROWS else None
        half = (max(count - 1, 1).bit_length() + 1) // 2
        self._half = np.uint64(half)
        self._low = np.uint64((1 << half) - 1)
        self._keys = [np.uint64(derive_key(key, number)) for number in range(_ROUNDS)]

    def items_at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the items at the given positions; int64, (n,)."""
        if self._table is not None:
            return self._table[positions]
        return self._walk(positions)

    def positions_of(self, items: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the positions of the given items, int64 (n,): the inverse of `items_at`."""
        if self._table is not None:
            inverse = np.empty(self.count, np.int64)
            inverse[self._table] = np.arange(self.count)
            return inverse[items]
        return self._walk(items, inverse=True)

    def _walk(self, values: npt.NDArray[np.int64], inverse: bool = False) -> npt.NDArray[np.int64]:
        """Apply the Feistel network, or its inverse, to each value once, then again while the result is too large."""
        current = self._encrypt(values.astype(np.uint64), inverse)
        outside = np.flatnonzero(current >= self.count)
        while len(outside):
            current[outside] = self._encrypt(current[outside], inverse)
            outside = outside[current[outside] >= self.count]
        return current.view(np.int64)

    def _encrypt(self, values: npt.NDArray[np.uint64], inverse: bool) -> npt.NDArray[np.uint64]:
        """Apply the network, or its inverse, once to each value.

        The inverse runs the same rounds with the keys in reverse order, and exchanges the halves of each value before
        the first round and after the last.
        """
        left, right = values >> self._half, values & self._low
        if inverse:
            left, right = right, left
        for key in reversed(self._keys) if inverse else self._keys:
            mixed = splitmix64_array((right + np.uint64(1)) * np.uint64(SPLITMIX64_GAMMA) + key)
            mixed &= self._low
            left, right = right, left ^ mixed
        if inverse:
            left, right = right, left
        joined: npt.NDArray[np.uint64] = (left << self._half) | right
        return joined
