"""Resolve the arguments of samplers and loaders: datasets and torch `Subset`s, indices, weights and ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed
from torch.utils.data import Sampler, Subset

from h5pack.data.concat import ConcatPack
from h5pack.data.dataset import H5Dataset, is_class_label
from h5pack.errors import OptionsError
from h5pack.format.checksums import crc32
from h5pack.format.schema import NO_LABEL, checksums_path
from h5pack.order.row_ranges import RowRange, RowSampler, RowSet, RowSubset
from h5pack.order.weights import MAX_SAMPLES, WeightedRows, balanced_weights
from h5pack.order.window import OrderPlan
from h5pack.read.engine import Engine
from h5pack.system.arrays import row_array
from h5pack.system.parameters import flags, invalid, launched_number, refuse_path, whole_number
from h5pack.system.text import error_line, short_repr

_BLOCK_ROWS = 1 << 16
_DIGEST_ROWS = 64
# The plan of a batch takes time and memory in proportion to the number of streams.
_MAX_STREAMS = 1 << 20


def select_draws(
    dataset: Any,
    indices: Sequence[int] | npt.NDArray[np.int64] | None = None,
    weights: npt.ArrayLike | str | None = None,
    num_samples: int | None = None,
) -> tuple[H5Dataset, RowSampler]:
    """Return the `H5Dataset` that `dataset` is or wraps, and the `RowSampler` that chooses the rows of each epoch.

    The parameters are as for `ChunkSampler`.
    """
    base, row_set, order = select_rows(dataset, indices)
    if weights is None:
        if num_samples is not None:
            raise OptionsError(
                f"num_samples is {short_repr(num_samples)}, but without weights each row is drawn once; give weights, "
                "or omit num_samples",
                parameters=("num_samples", "weights"),
            )
        return base, row_set
    count = row_set.count if num_samples is None else whole_number("num_samples", num_samples, 1)
    if count > MAX_SAMPLES:
        raise invalid("num_samples", count, f"give at most {MAX_SAMPLES:,}, and draw more in further epochs")
    if not row_set.count:
        message = "there are no rows to draw from by weight; leave weights out, or give other indices"
        raise OptionsError(message, parameters=("weights", "indices"))
    if isinstance(weights, str):
        return base, WeightedRows(row_set, _class_weights(base, row_set, weights), count)
    numbers = _check_weights(weights, row_set.count)
    return base, WeightedRows(row_set, numbers if order is None else numbers[order], count)


def _check_weights(weights: npt.ArrayLike, count: int) -> npt.NDArray[np.float64]:
    """Return the weights as float64, (count,), or raise an OptionsError."""
    error = partial(OptionsError, parameters=("weights",))
    if isinstance(weights, torch.Tensor):
        # Convert to float64, because NumPy has no bfloat16.
        weights = weights.detach().double() if weights.is_floating_point() else weights.detach()
    try:
        given = np.asarray(weights)
    except (TypeError, ValueError) as cause:
        raise error(f"weights are not an array of numbers ({cause}); give a number for each row") from cause
    if given.dtype.kind not in "buif":
        raise error(f"weights have dtype {given.dtype}; give a number for each row, or 'balanced'")
    if given.shape != (count,):
        advice = f"give shape ({count},), such as class_weights[dataset.targets]"
        raise error(f"weights have shape {given.shape}, but there are {count:,} rows; {advice}")
    numbers = given.astype(np.float64, copy=False)
    wrong = np.flatnonzero(~((numbers >= 0) & (numbers < np.inf)))
    if len(wrong):
        raise error(f"weights[{wrong[0]}] is {numbers[wrong[0]]}; a weight must be finite and at least 0")
    if not numbers.any():
        raise error("all weights are 0, so no row can be drawn; give at least one row a weight above 0")
    return numbers


def _class_weights(dataset: H5Dataset, rows: RowSet, text: str) -> npt.NDArray[np.float64]:
    """Return row weights, in the file's order, that give all classes the same total weight."""
    parameters = "weights='balanced'", "weights"
    error = partial(OptionsError, path=dataset.path, dataset=dataset.label_name, parameters=parameters)
    if text != "balanced":
        raise error(f"weights is the text {text!r}; give a number for each row, or 'balanced'")
    if dataset.label_name is None:
        raise error(f"{dataset.path}: weights='balanced' needs labels, and the dataset has none; give numbers")
    index = dataset.engine.indexes[dataset.label_name]
    if not is_class_label(index):
        shape = " x ".join(map(str, index.row_shape))
        what = f"rows of {shape} numbers" if shape else f"{index.dtype} values"
        raise error(
            f"{dataset.path}: weights='balanced' needs a whole number per row, but {dataset.label_name!r} holds "
            f"{what}; give weights as numbers"
        )
    labels = np.empty(rows.count, np.int64)
    for low in range(0, rows.count, _BLOCK_ROWS):
        positions = np.arange(low, min(low + _BLOCK_ROWS, rows.count))
        labels[positions] = dataset.read_rows(dataset.label_name, rows.rows_at(positions)[0])
    weights = balanced_weights(labels, None if dataset.classes is None else NO_LABEL)
    if weights is None:
        raise error(f"{dataset.path}: weights='balanced' needs labels, but no row has one; give weights as numbers")
    return weights


def select_rows(
    dataset: Any, indices: Sequence[int] | npt.NDArray[np.int64] | None = None
) -> tuple[H5Dataset, RowSet, npt.NDArray[np.int64] | None]:
    """Return the `H5Dataset`, the chosen rows in file order, and each row's position in `indices`.

    If `indices` is None, the positions are those in `dataset`; they are None if `dataset` is not a `Subset` and has
    consecutive rows.
    """
    base, subsets, digested = dataset, [], False
    while isinstance(base, Subset):
        subsets.append(base)
        base = base.dataset
    if isinstance(base, ConcatPack):
        # Do not call `joined`: it refuses datasets with transforms, but a DataLoader can use these.
        first, *others = base.datasets
        base, digested = first.joined_with(others), True
    refuse_path("dataset", base)
    if not isinstance(base, H5Dataset):
        advice = "give an H5Dataset or a ConcatPack, or a torch Subset of one"
        if isinstance(base, Sampler):
            advice += (
                ". If Lightning created this sampler, give its Trainer use_distributed_sampler=False. For predictions, "
                "give the Trainer an H5Loader, or a DataLoader with batch_size= instead of batch_sampler="
            )
        raise OptionsError(
            f"dataset is a {type(base).__name__}, which has no chunks; {advice}", parameters=("dataset",)
        )
    given = chosen = None
    if indices is not None:
        given = chosen = _check_indices(indices, len(dataset), "indices")
    for subset in subsets:
        below: Any = subset.dataset
        inner = _check_indices(subset.indices, len(below), "the Subset's indices")
        chosen = inner if chosen is None else inner[chosen]
    digest = _pack_digest(base)
    if chosen is None:
        if isinstance(base.rows, range):
            start, stop = base.rows.start, base.rows.stop
            return base, RowRange(start, stop, base.group_rows, digest, digested=digested), None
        chosen = np.arange(len(base))
    rows = base.file_rows(chosen)
    order = np.argsort(rows, kind="stable")
    yielded = order if given is None else given[order]
    return base, RowSubset(rows[order], yielded, base.group_rows, digest), order


def require_no_transform(dataset: Any) -> None:
    """Raise an OptionsError if a transform, or a method of a subclass, changes single samples of `dataset`.

    Pass the object that the user gave. An H5Loader may read a copy of it, which lacks transforms that were set later.
    """
    kinds = [type(dataset)]
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
        kinds.append(type(dataset))
    methods = ("__getitem__", "__getitems__")
    plain = {getattr(kind, name) for kind in (Subset, ConcatPack, H5Dataset) for name in methods}
    is_plain = all(getattr(kind, name) in plain for kind in kinds for name in methods)
    for one in dataset.datasets if isinstance(dataset, ConcatPack) else (dataset,):
        if not (is_plain and one.is_plain):
            raise OptionsError(
                "H5Loader handles whole batches, so it cannot call a dataset's transform or a subclass's __getitem__ "
                "for each sample; give H5Loader transform= (and target_transform=) instead, or use a DataLoader",
                parameters=("transform=", "target_transform="),
            )


def _pack_digest(dataset: H5Dataset) -> int | None:
    """Return the CRC-32 of the checksums of the file's first rows; None if it has no checksums.

    The result differs if the same images are packed again with another seed.
    """
    name = checksums_path(dataset.names[0])
    index = dataset.engine.indexes.get(name)
    if index is None:
        return None
    # Use another engine, so that the dataset's statistics do not count these rows.
    with closing(Engine(dataset.path, dataset.engine.storage.identity, {name: index})) as engine:
        return crc32(engine.read(name, np.arange(min(_DIGEST_ROWS, index.rows))).astype("<u4"))


def _check_indices(given: Any, count: int, what: str) -> npt.NDArray[np.int64]:
    """Return indices of `count` rows as nonnegative int64, (n,), or raise an OptionsError."""
    error = partial(OptionsError, parameters=("indices",))
    try:
        indices = row_array(given) if isinstance(given, range) else np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as cause:  # Such as a tensor on a GPU.
        raise error(f"{what} are not an array of whole numbers ({error_line(cause)})") from cause
    if indices.ndim != 1 or (len(indices) and indices.dtype.kind not in "iu"):
        found = f"dtype {indices.dtype} and shape {indices.shape}"
        raise error(f"{what} have {found}; give whole numbers in one dimension")
    # Check before converting, because an index of uint64 that exceeds int64 would become negative.
    wrong = np.flatnonzero((indices < -count) | (indices >= count))
    if len(wrong):
        problem = f"{what} contain {int(indices[wrong[0]])}, but there are only {count:,} rows"
        raise error(f"{problem}; give indices of existing rows")
    numbers = indices.astype(np.int64, copy=False)
    return np.where(numbers < 0, numbers + count, numbers) if (numbers < 0).any() else numbers


def distributed_ranks() -> tuple[int, int] | None:
    """Return the rank and the number of ranks of torch.distributed, or None if it is not initialized."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return None


def resolve_ranks(rank: int | None, num_replicas: int | None) -> tuple[int, int]:
    """Return (rank, num_replicas): the arguments, else the values of torch.distributed, else (0, 1).

    A warning names the caller of the function that calls this, such as the line that constructs a sampler.
    """
    if (rank is None) != (num_replicas is None):
        raise OptionsError(
            "only one of rank and num_replicas is given; give both, or neither to take them from torch.distributed",
            parameters=("rank", "num_replicas"),
        )
    if rank is not None and num_replicas is not None:
        return whole_number("rank", rank, None), whole_number("num_replicas", num_replicas, 1)
    if (ranks := distributed_ranks()) is not None:
        return ranks
    if launched_number("WORLD_SIZE", 1) > 1:
        warnings.warn(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but torch.distributed is not initialized yet: every process "
            "will read all rows; call init_process_group first, or give rank and num_replicas",
            stacklevel=3,  # the caller of the constructor
        )
    return 0, 1


def warn_of_later_ranks() -> None:
    """Warn if torch.distributed was initialized only after a loader was created, which therefore reads all rows."""
    if (distributed_ranks() or (0, 1))[1] > 1:
        warnings.warn(
            "torch.distributed was initialized after the loader was created: every process reads all rows; create the "
            "loader later (in Lightning, in a method such as train_dataloader), or give rank and num_replicas",
            stacklevel=3,  # the caller of the loader's `__iter__`
        )


def plan_order(
    rows: RowSampler,
    batch_size: int,
    shuffle: str | bool,
    seed: int,
    window: int,
    drop_last: bool,
    *,
    ranks: tuple[int, int],
    streams: int | None = None,
    lanes: int = 1,
    single_rows: bool = False,
) -> OrderPlan:
    """Return the plan of an order from the parameters of a sampler's or loader's constructor.

    `ranks` is the result of `resolve_ranks`. `single_rows` is for samplers of single rows: each batch of the plan then
    has `batch_size` rows from each stream of this rank, and `drop_last` leaves out only the rows that do not divide
    evenly among the streams.
    """
    rank, num_replicas = ranks
    lanes, (drop_last,) = whole_number("lanes", lanes, 1, _MAX_STREAMS), flags(drop_last=drop_last)
    streams = None if streams is None else whole_number("streams", streams, 1, _MAX_STREAMS)
    own_streams = 1 if streams is None else max(1, streams // num_replicas)
    return OrderPlan(
        rows,
        batch_size * own_streams if single_rows else batch_size,
        shuffle=shuffle,
        seed=seed,
        window=window,
        trim=drop_last,
        drop_last=drop_last and not single_rows,
        rank=rank,
        num_replicas=num_replicas,
        streams=num_replicas * lanes if streams is None else streams,
        lanes=lanes,
    )
