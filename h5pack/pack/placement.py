"""Which row each image goes to, and how rows close up where images turned out not to decode: pure integers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Placement:
    """Rows of a pack, each split one contiguous range.

    Attributes
    ----------
    order : ndarray
        int64, (N,): what stands in each row (an index into the catalog, or a planned row).
    starts : ndarray
        int64, (S + 1,): split s is rows ``starts[s]`` to ``starts[s + 1]``.
    """

    order: Rows
    starts: Rows


def place(indices: Rows, split_ids: npt.NDArray[np.int32], splits: int, seed: int | None) -> Placement:
    """Lay out images split by split, each split shuffled, or in source order.

    Parameters
    ----------
    indices : ndarray
        int64, (N,): catalog indices of the images to place, ascending.
    split_ids : ndarray
        int32, (N,): the split of each.
    splits : int
        How many splits there are.
    seed : int or None
        None: source order.
    """
    ranges = [indices[split_ids == split] for split in range(splits)]
    if seed is not None:
        ranges = [members[shuffled(len(members), seed, split)] for split, members in enumerate(ranges)]
    starts = np.zeros(splits + 1, np.int64)
    np.cumsum([len(members) for members in ranges], out=starts[1:])
    return Placement(np.concatenate(ranges), starts)


def shuffled(count: int, seed: int, stream: int) -> Rows:
    """A permutation that is the same for ever: positions sorted by a hash of (seed, stream, position).

    numpy promises no stable order from ``Generator.permutation`` between releases. The hash is the finaliser of
    SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).

    Returns
    -------
    ndarray
        int64, (count,).
    """
    gamma = 0x9E3779B97F4A7C15
    key = _mix(np.array([(seed * gamma + (stream + 1) * 0xD1B54A32D192ED03) % 2**64], np.uint64))
    with np.errstate(over="ignore"):
        hashes = _mix(key + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(gamma))
    return np.argsort(hashes, kind="stable").astype(np.int64)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


def close_up(starts: Rows, packed: npt.NDArray[np.bool_], keep_order: bool) -> Placement:
    """Remove the rows that hold nothing.

    In a sorted pack later rows move down. In a shuffled one a split's last rows fill its holes in ascending order,
    which moves no more rows than there are holes; then the splits behind move down.

    A row never moves up, so carrying out the moves in ascending order of their targets overwrites nothing that is
    still to be moved.

    Parameters
    ----------
    starts : ndarray
        int64, (S + 1,): the planned splits.
    packed : ndarray
        bool, (N,): which planned rows hold an image.
    keep_order : bool
        Whether the pack is sorted.

    Returns
    -------
    Placement
        `order` gives for each final row the planned row it comes from.
    """
    parts = []
    for start, stop in itertools.pairwise(starts.tolist()):
        good = np.flatnonzero(packed[start:stop]).astype(np.int64)
        rows = good
        if not keep_order:
            rows = np.arange(len(good), dtype=np.int64)
            holes = np.flatnonzero(~packed[start : start + len(good)])
            rows[holes] = good[len(good) - len(holes) :]
        parts.append(rows + start)
    closed = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=closed[1:])
    return Placement(np.concatenate(parts), closed)


def moved_runs(order: Rows) -> list[tuple[int, int, int]]:
    """Runs of consecutive rows that move together, as (target, origin, rows), in ascending order of their targets."""
    targets = np.flatnonzero(order != np.arange(len(order)))
    if not len(targets):
        return []
    origins = order[targets]
    breaks = np.flatnonzero((np.diff(targets) != 1) | (np.diff(origins) != 1)) + 1
    firsts = np.concatenate([[0], breaks])
    lengths = np.diff(np.concatenate([firsts, [len(targets)]]))
    return list(zip(targets[firsts].tolist(), origins[firsts].tolist(), lengths.tolist(), strict=True))
