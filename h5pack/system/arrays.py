"""Integer arrays: runs of equal or consecutive values, and permutations that are reproducible on every machine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

SPLITMIX64_GAMMA = 0x9E3779B97F4A7C15
SPLITMIX64_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = (1 << 64) - 1
_BLOCK = 1 << 16


def run_edges(breaks: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Divide n items into runs, and return the edges of the runs, int64 (runs + 1,).

    Run i consists of the items ``edges[i]`` to ``edges[i + 1] - 1``, so the first edge is 0, and the last is n.
    ``breaks[i]``, bool (n - 1,), says whether item i + 1 begins a new run.
    """
    cuts = np.flatnonzero(breaks)
    edges = np.empty(len(cuts) + 2, np.int64)
    edges[0], edges[-1] = 0, len(breaks) + 1
    np.add(cuts, 1, out=edges[1:-1])
    return edges


def equal_runs(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the edges of the runs of equal values, as `run_edges` does; ``[0]`` if there are no values."""
    return run_edges(values[1:] != values[:-1]) if len(values) else np.zeros(1, np.int64)


def consecutive_runs(*columns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the edges of the runs in which every column, int64 (n,), increases by one from item to item.

    The edges are those of `run_edges`; ``[0]`` if the columns are empty.
    """
    if not len(columns[0]):
        return np.zeros(1, np.int64)
    breaks = np.diff(columns[0]) != 1
    for values in columns[1:]:
        breaks |= np.diff(values) != 1
    return run_edges(breaks)


def limited_runs(
    edges: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64], max_length: int
) -> Iterator[tuple[int, int]]:
    """Divide runs of ranges into shorter runs, which span at most `max_length` or consist of a single longer range.

    Range i goes from ``starts[i]`` to ``stops[i] - 1``. `edges` are the edges of the runs to divide (see `run_edges`).
    Within such a run, starts and stops ascend. For each shorter run, yield (first, last). The shorter run consists of
    the ranges `first` to ``last - 1``.
    """
    for low, high in itertools.pairwise(edges.tolist()):
        while low < high:
            count = int(np.searchsorted(stops[low:high], starts[low] + max_length, "right")) or 1
            yield low, low + count
            low += count


def limited_stops(lengths: npt.NDArray[np.int64], max_length: int) -> list[int]:
    """Divide n items into runs so that the `lengths`, (n,), of the items of a run add up to at most `max_length`.

    An item that is longer than `max_length` is a run by itself. Return the end of each run, which is the index of the
    run's last item, plus 1.
    """
    stops = np.cumsum(lengths)
    return [last for _, last in limited_runs(np.array([0, len(lengths)]), stops - lengths, stops, max_length)]


RowNumbers = range | npt.NDArray[np.int64]
"""Row numbers as a range, or int64 (n,)."""


def joined_ranges(parts: Sequence[RowNumbers]) -> RowNumbers:
    """Return row numbers one after the other: int64 (n,), or a range if all parts are adjacent ranges.

    Ranges must have the step 1.
    """
    ranges = [part for part in parts if isinstance(part, range)]
    if len(ranges) == len(parts) and all(one.stop == other.start for one, other in itertools.pairwise(ranges)):
        return range(ranges[0].start, ranges[-1].stop)
    return np.concatenate([row_array(part) for part in parts])


def row_array(rows: RowNumbers) -> npt.NDArray[np.int64]:
    """Return row numbers as int64 (n,). NumPy converts a range number by number, which takes 100 times as long."""
    return np.arange(rows.start, rows.stop, rows.step) if isinstance(rows, range) else np.asarray(rows, np.int64)


def moved_rows(rows: RowNumbers, count: int) -> RowNumbers:
    """Return row numbers increased by `count`. If `rows` is a range, so is the result."""
    if isinstance(rows, range):
        return range(rows.start + count, rows.stop + count, rows.step)
    return rows + count


def splitmix64(value: int) -> int:
    """Return the hash of a 64-bit integer by the finalizer of splitmix64.

    Reference: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
    """
    value = ((value ^ (value >> 30)) * SPLITMIX64_FACTORS[0]) & _MASK
    value = ((value ^ (value >> 27)) * SPLITMIX64_FACTORS[1]) & _MASK
    return value ^ (value >> 31)


def splitmix64_array(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply `splitmix64` to every element of a one-dimensional array in place, and return `values`."""
    # Work in blocks to keep the shifted copies small: for ten million elements, each would take 80 MB.
    for start in range(0, len(values), _BLOCK):
        block = values[start : start + _BLOCK]
        block ^= block >> np.uint64(30)
        block *= np.uint64(SPLITMIX64_FACTORS[0])
        block ^= block >> np.uint64(27)
        block *= np.uint64(SPLITMIX64_FACTORS[1])
        block ^= block >> np.uint64(31)
    return values


def hash_sequence(count: int, key: int) -> npt.NDArray[np.uint64]:
    """Return the first `count` outputs of the splitmix64 generator with the initial state `key`, uint64 (count,)."""
    states = np.arange(1, count + 1, dtype=np.uint64)
    states *= np.uint64(SPLITMIX64_GAMMA)
    states += np.uint64(key)
    return splitmix64_array(states)


def shuffled(count: int, key: int) -> npt.NDArray[np.int64]:
    """Return a permutation of 0..count-1, int64 (count,), that depends only on `count` and the 64-bit seed `key`.

    Each number is stored in the low bits of a uint64 whose high bits are a hash. Then these uint64 values are sorted.
    NumPy's ``Generator.permutation`` is not used, because its results may change between releases.
    """
    bits = np.uint64(max(count - 1, 0).bit_length())
    keys = hash_sequence(count, key)
    keys <<= bits
    keys |= np.arange(count, dtype=np.uint64)
    keys.sort()
    keys &= (np.uint64(1) << bits) - np.uint64(1)
    table: npt.NDArray[np.int64] = keys.view(np.int64)
    return table


def shuffled_split(count: int, seed: int, split: int) -> npt.NDArray[np.int64]:
    """Return the permutation, int64 (count,), by which a pack shuffles the rows of its split number `split`.

    The permutation is 0..count-1, sorted by a hash of each number. The hash depends on `seed` and `split`, but not on
    the release of h5pack or NumPy.
    """
    key = splitmix64((seed * SPLITMIX64_GAMMA + (split + 1) * 0xD1B54A32D192ED03) % 2**64)
    # No two hashes are equal, because splitmix64 is a bijection.
    return np.argsort(hash_sequence(count, key))


def range_indices(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the concatenated integers of several ranges, int64: ``starts[i]`` to ``starts[i] + lengths[i] - 1``."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def all_between(first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the numbers from ``first[i]`` to ``last[i]`` for all i, ascending and without repetitions."""
    return np.unique(range_indices(first, last - first + 1))
