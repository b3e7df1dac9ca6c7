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
from h5pack.feed.dataset import H5Dataset, is_class_label
from h5pack.feed.draws import MOST_SAMPLES, WeightedRows
from h5pack.feed.order import OrderPlan, whole_number
from h5pack.feed.row_set import ChosenRows, RowSet, RowSource, SpanRows
from h5pack.schema import NO_LABEL

_BLOCK_ROWS = 1 << 16


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
    return _select(dataset, rows)[:2]


def select_draws(
    dataset: Any,
    rows: Sequence[int] | npt.NDArray[np.int64] | None = None,
    weights: npt.ArrayLike | str | None = None,
    samples: int | None = None,
) -> tuple[H5Dataset, RowSource]:
    """The dataset under `dataset`, and the rows to draw from: each once, or by weight.

    Parameters
    ----------
    dataset : H5Dataset or Subset
    rows : sequence of int, optional
        Indices into `dataset`; None: all.
    weights : array-like or "balanced", optional
        Numbers of 0 and above, one for each index of `dataset`, or of `rows` where they are given. "balanced": such
        that each class weighs the same, by the dataset's labels. None: all rows once.
    samples : int, optional
        Draws an epoch; None: as many as there are rows.

    Raises
    ------
    OptionsError
        If a value makes no sense.
    """
    base, row_set, order = _select(dataset, rows)
    if weights is None:
        if samples is not None:
            raise OptionsError(f"samples is {samples!r}, but only weighted rows are drawn by number; give weights, too")
        return base, row_set
    samples = row_set.count if samples is None else whole_number("samples", samples, 1)
    if samples > MOST_SAMPLES:
        raise OptionsError(f"samples is {samples:,}; give at most {MOST_SAMPLES:,}, and set_epoch for more")
    if not row_set.count:
        raise OptionsError("there are no rows to draw from by weight; leave weights out, or give other rows")
    if isinstance(weights, str):
        return base, WeightedRows(row_set, _balancing(base, row_set, weights), samples)
    numbers = _require_weights(weights, row_set.count)
    return base, WeightedRows(row_set, numbers if order is None else numbers[order], samples)


def _require_weights(weights: npt.ArrayLike, count: int) -> npt.NDArray[np.float64]:
    try:
        given = np.asarray(weights)
    except (TypeError, ValueError) as error:
        raise OptionsError(f"weights are no array of numbers ({error}); give a number for each row") from error
    if given.dtype.kind not in "buif":
        raise OptionsError(f"weights are {given.dtype}; give a number for each row, or 'balanced'")
    if given.shape != (count,):
        raise OptionsError(f"weights have shape {given.shape}, and there are {count:,} rows; give ({count},)")
    numbers = given.astype(np.float64, copy=False)
    some = False
    for low in range(0, count, _BLOCK_ROWS):
        block = numbers[low : low + _BLOCK_ROWS]
        wrong = np.flatnonzero(~((block >= 0) & (block < np.inf)))
        if len(wrong):
            raise OptionsError(
                f"weights[{low + int(wrong[0])}] is {block[wrong[0]]}; a weight must be 0 or more, and finite"
            )
        some = some or bool(block.any())
    if not some:
        raise OptionsError("all weights are 0, so that nothing can be drawn; give some row a weight above 0")
    return numbers


def _balancing(dataset: H5Dataset, rows: RowSet, text: str) -> npt.NDArray[np.float64]:
    """Weights of rows in stored order, with which each class weighs the same."""
    if text != "balanced":
        raise OptionsError(f"weights is the text {text!r}; give a number for each row, or 'balanced'")
    if dataset.label_name is None:
        raise OptionsError(f"{dataset.path}: weights='balanced' needs labels, and it has none; give weights as numbers")
    index = dataset.engine.indexes[dataset.label_name]
    if not is_class_label(index):
        shape = " x ".join(map(str, index.row_shape))
        what = f"a table of {shape} columns" if shape else f"{index.dtype} numbers"
        raise OptionsError(
            f"{dataset.path}: weights='balanced' needs a whole number a row, and {dataset.label_name!r} holds {what}; "
            "give weights as numbers"
        )
    labels = np.empty(rows.count, np.int64)
    for low in range(0, rows.count, _BLOCK_ROWS):
        places = np.arange(low, min(low + _BLOCK_ROWS, rows.count))
        labels[places] = dataset.read_rows(dataset.label_name, rows.pick(places)[0])
    classes, counts = np.unique(labels, return_counts=True)
    shares = 1 / counts
    if dataset.classes is not None:
        # In a pack, that is no class.
        shares[classes == NO_LABEL] = 0
    if not shares.any():
        raise OptionsError(f"{dataset.path}: weights='balanced' needs labels, and none of the rows has one")
    weights = np.empty(rows.count)
    for low in range(0, rows.count, _BLOCK_ROWS):
        weights[low : low + _BLOCK_ROWS] = shares[np.searchsorted(classes, labels[low : low + _BLOCK_ROWS])]
    return weights


def _select(
    dataset: Any, rows: Sequence[int] | npt.NDArray[np.int64] | None
) -> tuple[H5Dataset, RowSet, npt.NDArray[np.int64] | None]:
    """Dataset, rows, and at which place of `rows` or of `dataset` each of them stands; None: as they are stored."""
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
        return base, SpanRows(base.first_row, base.first_row + len(base), base.unit_rows), None
    order = np.argsort(chosen, kind="stable")
    called = order if indices is None else indices[order]
    return base, ChosenRows(chosen[order] + base.first_row, called, base.unit_rows), order


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
    rows: RowSource,
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
