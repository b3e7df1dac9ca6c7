"""The order of a pack's rows: by split, shuffled or sorted, and without the holes that rejected images leave."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from h5pack.system.arrays import shuffled_split

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowOrder:
    """The order of a pack's rows; each split is one contiguous range of rows."""

    origins: Rows  # (N,): each row's catalog index (from `order_rows`) or its row in the plan (from `close_holes`)
    split_starts: Rows  # (S + 1,): split s has the rows ``split_starts[s]`` to ``split_starts[s + 1] - 1``

    @classmethod
    def of_splits(cls, origins: list[Rows]) -> RowOrder:
        """Create the order from one array of row origins per split."""
        lengths = [len(some) for some in origins]
        joined = origins[0] if len(origins) == 1 else np.concatenate(origins)
        return cls(joined, np.cumsum([0, *lengths], dtype=np.int64))


def order_rows(indices: Rows, split_ids: npt.NDArray[np.int32], num_splits: int, seed: int | None) -> RowOrder:
    """Return the order of the images `indices` (ascending) by split. With `seed`, shuffle the images of each split."""
    members = [indices] if num_splits == 1 else [indices[split_ids == split] for split in range(num_splits)]
    if seed is not None:
        members = [some[shuffled_split(len(some), seed, split)] for split, some in enumerate(members)]
    return RowOrder.of_splits(members)


def close_holes(split_starts: npt.NDArray[np.int64], packed: npt.NDArray[np.bool_], keep_order: bool) -> RowOrder:
    """Return the order of rows without the holes that rejected images leave; its `origins` are planned rows.

    In a sorted pack (`keep_order`), all rows after a hole move to lower row numbers. In a shuffled pack, fewer rows
    move: the last rows of each split fill the holes of that split, in ascending order. Then the following splits move
    to lower row numbers. No row moves to a higher number. So if the moves are made in ascending order of their targets,
    no move overwrites a row that has yet to be moved.

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
    return RowOrder.of_splits(members)
