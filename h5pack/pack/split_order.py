"""Splits and the order of rows: which image goes to which row, and how gaps left by rejected images are closed.

This module computes with integers only and does no I/O.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from h5pack.system.arrays import SPLITMIX64_GAMMA, consecutive_runs, hash_sequence, splitmix64

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowOrder:
    """The order of a pack's rows; each split is one contiguous range of rows."""

    origins: Rows  # (N,): where each row comes from: catalog index (`order_rows`) or planned row (`close_holes`)
    split_starts: Rows  # (S + 1,): split s has the rows ``split_starts[s]`` to ``split_starts[s + 1] - 1``


def order_rows(indices: Rows, split_ids: npt.NDArray[np.int32], num_splits: int, seed: int | None) -> RowOrder:
    """Return the order of images: split after split, each one shuffled, or in source order if `seed` is None.

    `indices`, int64 (N,), are the images' catalog indices, ascending; `split_ids`, int32 (N,), their split numbers.
    """
    members = [indices[split_ids == split] for split in range(num_splits)]
    if seed is not None:
        members = [some[shuffled_split(len(some), seed, split)] for split, some in enumerate(members)]
    return _joined(members)


def shuffled_split(count: int, seed: int, split: int) -> Rows:
    """Return a permutation of a split's positions, int64 (count,).

    The positions are sorted by a hash of their number, so the permutation is the same in every release.
    """
    key = splitmix64((seed * SPLITMIX64_GAMMA + (split + 1) * 0xD1B54A32D192ED03) % 2**64)
    return np.argsort(hash_sequence(count, key), kind="stable").astype(np.int64)


def close_holes(split_starts: Rows, packed: npt.NDArray[np.bool_], keep_order: bool) -> RowOrder:
    """Return the order of the rows that remain if rejected images are left out. `origins` are planned rows.

    In a sorted pack (`keep_order`), later rows move to lower row numbers. In a shuffled pack, a split's last rows fill
    its holes in ascending order, which moves no more rows than there are holes; then the following splits move to lower
    row numbers. No row moves to a higher number. If the moves are made in ascending order of their targets, none of
    them overwrites a row that has yet to be moved.

    `split_starts`, int64 (S + 1,), are the planned splits; `packed`, bool (N,), says which planned rows have an image.
    """
    members = []
    for start, stop in itertools.pairwise(split_starts.tolist()):
        good = np.flatnonzero(packed[start:stop]).astype(np.int64)
        rows = good
        if not keep_order:
            rows = np.arange(len(good), dtype=np.int64)
            holes = np.flatnonzero(~packed[start : start + len(good)])
            rows[holes] = good[len(good) - len(holes) :]
        members.append(rows + start)
    return _joined(members)


def _joined(members: list[Rows]) -> RowOrder:
    starts = np.zeros(len(members) + 1, np.int64)
    np.cumsum([len(some) for some in members], out=starts[1:])
    return RowOrder(np.concatenate(members), starts)


def moved_runs(origins: Rows) -> list[tuple[int, int, int]]:
    """Return runs of consecutive rows that move together as (target, origin, number of rows), targets ascending."""
    targets = np.flatnonzero(origins != np.arange(len(origins)))
    edges = consecutive_runs(targets, origins[targets])
    firsts = edges[:-1]
    moves = (targets[firsts], origins[targets][firsts], np.diff(edges))
    return list(zip(*(column.tolist() for column in moves), strict=True))
