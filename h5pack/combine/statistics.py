"""Channel statistics of a pack that is made of other packs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.combine.parts import Part, Rows
from h5pack.combine.row_copies import RowOrigins
from h5pack.format import schema
from h5pack.pack.statistics import channel_sums, encoded_sums, mean_and_std, sampled_rows
from h5pack.read.encoded import EncodedIndex
from h5pack.sources.catalog import Catalog

_READ_ROWS = 64


def added_statistics(parts: Sequence[Part], merged: Catalog) -> dict[str, Any]:
    """Combine the statistics of the parts, without reading rows.

    The sums of each part are integers, so they can be recovered from its mean and standard deviation. Parts whose
    statistics describe another split or no rows are left out. If no part is left, the first part is used.
    """
    split = merged.split_names[schema.statistics_split(merged.split_names)]
    chosen = [part for part in parts if part.statistics["split"] == split and part.statistics["rows"]] or [parts[0]]
    total = np.sum([_sums(part.statistics) for part in chosen], axis=0)
    mean, std = mean_and_std(total, sum(part.statistics["pixels"] for part in chosen))
    return {
        "mean": mean,
        "std": std,
        "rows": sum(part.statistics["rows"] for part in chosen),
        "step": max(part.statistics["step"] for part in chosen),
        "split": split,
    }


def _sums(statistics: dict[str, Any]) -> npt.NDArray[np.uint64]:
    """Return the exact sums of values and of their squares, uint64 (2, C), from the mean and std of all pixels."""
    count = statistics["pixels"]
    if not count:
        return np.zeros((2, len(statistics["mean"])), np.uint64)
    mean, std = (np.asarray(statistics[name], np.longdouble) for name in ("mean", "std"))
    sums = np.stack([mean * 255 * count, (std * std + mean * mean) * 255 * 255 * count])
    exact: npt.NDArray[np.uint64] = np.rint(sums).astype(np.uint64)
    return exact


def measured_statistics(parts: Sequence[Part], merged: Catalog, order: Rows) -> dict[str, Any]:
    """Compute the statistics of the rows of `merged` with the numbers `order`, on the same sample as `convert` uses."""
    number = schema.statistics_split(merged.split_names)
    own = order[merged.split_ids[order] == number]
    encoded = parts[0].is_encoded
    chosen = own[sampled_rows(0, len(own), encoded)]
    origins = RowOrigins.of(parts, chosen)
    total = np.zeros((2, len(parts[0].statistics["mean"])), np.uint64)
    count = pixels = 0
    edges = [*range(0, len(chosen), _READ_ROWS), len(chosen)]
    for low, high in itertools.pairwise(edges):
        for owner, first, last in origins.runs(low, high):
            for sums, size in _row_sums(parts[owner], origins.rows[first:last]):
                total, count, pixels = total + sums, count + 1, pixels + size
    mean, std = mean_and_std(total, pixels)
    step = schema.statistics_step(len(own), encoded)
    return {"mean": mean, "std": std, "rows": count, "step": step, "split": merged.split_names[number]}


def _row_sums(part: Part, rows: Rows) -> list[tuple[npt.NDArray[np.uint64], int]]:
    """Return the sums (as in `_sums`) and the number of pixels of each row that can be decoded."""
    name = part.reader.images
    if isinstance(part.index, EncodedIndex):
        sums = [encoded_sums(data) for data in part.engine.read_bytes(name, rows)]
        sizes = part.index.image_sizes[rows].astype(np.int64).prod(axis=1).tolist()
        return [(found, size) for found, size in zip(sums, sizes, strict=True) if found is not None]
    values = part.engine.read(name, rows)
    return [(channel_sums(row, part.layout), row.size // len(part.statistics["mean"])) for row in values]
