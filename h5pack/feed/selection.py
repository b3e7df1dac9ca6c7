"""Which rows of which dataset a sampler or loader was given: a dataset, a torch `Subset` of one, chosen indices."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed
from torch.utils.data import Subset

from h5pack.errors import OptionsError
from h5pack.feed.dataset import H5Dataset
from h5pack.feed.order import OrderPlan
from h5pack.feed.row_set import ChosenRows, RowSet, SpanRows


def select_rows(dataset: Any, rows: Sequence[int] | npt.NDArray[np.int64] | None = None) -> tuple[H5Dataset, RowSet]:
    """The dataset under `dataset`, and the rows to draw from.

    Parameters
    ----------
    dataset : H5Dataset or Subset
        A `Subset` (``random_split`` gives some) may lie on another one.
    rows : sequence of int, optional
        Indices into `dataset`; None: all.

    Raises
    ------
    OptionsError
        If there is no `H5Dataset` below, or an index is out of range.
    """
    base, subsets = dataset, []
    while isinstance(base, Subset):
        subsets.append(base)
        base = base.dataset
    if not isinstance(base, H5Dataset):
        raise OptionsError(
            f"a {type(base).__name__} has no chunks to order by; give an H5Dataset, or a torch Subset of one"
        )
    indices = chosen = None
    if rows is not None:
        indices = chosen = _in_range(np.asarray(rows), len(dataset), "rows")
    for subset in subsets:
        below: Any = subset.dataset
        inner = _in_range(np.asarray(subset.indices), len(below), "the Subset's indices")
        chosen = inner if chosen is None else inner[chosen]
    if chosen is None:
        return base, SpanRows(base.first_row, base.first_row + len(base), base.unit_rows)
    return base, ChosenRows(
        chosen + base.first_row, np.arange(len(chosen)) if indices is None else indices, base.unit_rows
    )


def _in_range(indices: npt.NDArray[Any], count: int, what: str) -> npt.NDArray[np.int64]:
    if indices.ndim != 1 or (len(indices) and indices.dtype.kind not in "iu"):
        raise OptionsError(f"{what} must be whole numbers in one axis, not {indices.dtype} {indices.shape}")
    numbers = indices.astype(np.int64)
    numbers[numbers < 0] += count
    wrong = np.flatnonzero((numbers < 0) | (numbers >= count))
    if len(wrong):
        raise OptionsError(f"{what}: {int(indices[wrong[0]])} is not one of the {count:,} rows")
    return numbers


def resolve_ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size: those given, else torch.distributed's, else 0 of 1."""
    if (rank is None) != (world_size is None):
        raise OptionsError("give both rank and world_size, or neither (torch.distributed then says)")
    if rank is not None and world_size is not None:
        return rank, world_size
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if int(os.environ.get("WORLD_SIZE", "1") or 1) > 1:
        warnings.warn(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but torch.distributed is not initialised yet: every process "
            "will read all rows; call init_process_group first, or give rank and world_size",
            stacklevel=3,
        )
    return 0, 1


def plan_batches(
    rows: RowSet,
    batch_size: int,
    shuffle: str | bool,
    seed: int,
    window: int,
    drop_last: bool,
    rank: int,
    world_size: int,
    streams: int | None,
    lanes: int,
) -> OrderPlan:
    """The order of `ChunkBatchSampler` and `H5Loader`, which is one: their arguments, with the defaults filled in."""
    return OrderPlan(
        rows,
        batch_size,
        "window" if shuffle is True else shuffle,
        seed,
        window,
        trim=drop_last,
        drop_last=drop_last,
        rank=rank,
        world_size=world_size,
        streams=world_size * lanes if streams is None else streams,
        lanes=lanes,
    )
