"""Channel statistics: mean and standard deviation, exact because all sums are integers until the final division."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.errors import RejectedImageError
from h5pack.format import schema
from h5pack.format.row_offsets import RowOffsets
from h5pack.images.decode import strict_pillow
from h5pack.pack.journal import RowRecord
from h5pack.pack.plan import ConvertPlan
from h5pack.pack.row_order import RowOrder
from h5pack.read.encoded import row_decoder
from h5pack.system.files import read_all

# The sum of up to 257 uint8 values fits into uint16.
_BLOCK_LINES, _BLOCK_BYTES = 256, 128 * 1024


def statistics_range(plan: ConvertPlan, row_order: RowOrder) -> tuple[int, int]:
    """Return the (start, stop) rows of the split that the statistics describe."""
    split = schema.statistics_split(plan.catalog.split_names)
    return int(row_order.split_starts[split]), int(row_order.split_starts[split + 1])


def sampled_rows(start: int, stop: int, encoded: bool = False) -> npt.NDArray[np.int64]:
    """Return the rows from `start` to ``stop - 1`` that the statistics use; see `schema.statistics_step`."""
    return np.arange(start, stop, schema.statistics_step(stop - start, encoded), dtype=np.int64)


def channel_sums(rows: Sequence[npt.NDArray[np.uint8]], layout: str) -> npt.NDArray[np.uint64]:
    """Return the exact sums of each row's values and of their squares, uint64 (n, 2, C).

    `rows` are n > 0 rows of the same shape: (H, W, C) or (C, H, W), depending on `layout`. Small rows are summed
    together; lines of larger ones are summed in small blocks, which stay in the CPU cache. Summing a whole row with
    64-bit integers would take ten times as long.
    """
    step = _BLOCK_BYTES // rows[0].size
    if step < 2:
        return np.concatenate([_sums(row[np.newaxis], layout) for row in rows])
    return np.concatenate([_sums(np.stack(rows[low : low + step]), layout) for low in range(0, len(rows), step)])


def _sums(rows: npt.NDArray[np.uint8], layout: str) -> npt.NDArray[np.uint64]:
    last = layout == "nhwc"
    channels = rows.shape[3 if last else 1]
    # For nhwc, treat the channels as further columns: (n, H, W * C). For nchw, treat them as rows: (n * C, H, W).
    lines = rows.reshape(*rows.shape[:2], -1) if last else rows.reshape(-1, *rows.shape[2:])
    columns = np.zeros((2, lines.shape[0], lines.shape[2]), np.uint64)
    step = max(1, min(_BLOCK_LINES, _BLOCK_BYTES // (lines.shape[0] * lines.shape[2])))
    for start in range(0, lines.shape[1], step):
        block = lines[:, start : start + step].astype(np.uint16)
        columns[0] += block.sum(1, dtype=np.uint16)
        block *= block
        columns[1] += block.sum(1, dtype=np.uint32)
    sums: npt.NDArray[np.uint64]
    if last:
        sums = columns.reshape(2, len(rows), -1, channels).sum(2, np.uint64)
    else:
        sums = columns.sum(2, np.uint64).reshape(2, -1, channels)
    return np.swapaxes(sums, 0, 1)


def mean_and_std(total: npt.NDArray[np.uint64], count: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return mean and population standard deviation of pixels, scaled to 0 to 1, float64 (C,) each.

    `total`, uint64 (2, C), has the sums of the values and of their squares; `count` is the number of pixels. If it is
    0, the results are NaN.
    """
    sums, squares = ([int(value) for value in line] for line in total)
    if not count:
        return np.full(len(sums), math.nan), np.full(len(sums), math.nan)
    mean = [value / (255 * count) for value in sums]
    # Python's integers have arbitrary precision, so the difference of two large numbers is exact.
    variance = [square * count - value * value for value, square in zip(sums, squares, strict=True)]
    std = [math.sqrt(value) / (255 * count) for value in variance]
    return np.array(mean), np.array(std)


def pack_statistics(
    plan: ConvertPlan, written: RowRecord, final: RowOrder, row_offsets: RowOffsets, descriptor: int
) -> dict[str, Any]:
    """Return the channel statistics of the finished pack, computed from a sample of the rows of one split."""
    start, stop = statistics_range(plan, final)
    encoded = plan.options.keep is not None
    rows = sampled_rows(start, stop, encoded)
    known = dict(zip(written.sampled.tolist(), written.sums, strict=True))
    total = np.zeros((2, plan.options.channels), np.uint64)
    count = row_pixels = 0
    for row in rows.tolist():
        sums = known.get(int(final.origins[row]))
        if sums is None:
            data = read_all(descriptor, int(row_offsets.edges(row, 1)[-1]), row_offsets.offset(row))
            if encoded:
                sums = encoded_sums(data)
            else:
                (sums,) = channel_sums([np.frombuffer(data, np.uint8).reshape(plan.row_shape)], plan.options.layout)
        if sums is not None:
            total += sums
            count += 1
            row_pixels += plan.pixels_of(int(final.origins[row]))
    split = plan.catalog.split_names[schema.statistics_split(plan.catalog.split_names)]
    return statistics_of(total, row_pixels, count, schema.statistics_step(stop - start, encoded), split)


def statistics_of(total: npt.NDArray[np.uint64], pixels: int, rows: int, step: int, split: str) -> dict[str, Any]:
    """Return `PackTables.statistics`: mean and std of `rows` rows, sampled in steps of `step` from the split `split`.

    `total` has the sums of these rows (see `channel_sums`), and `pixels` is the number of their pixels.
    """
    mean, std = mean_and_std(total, pixels)
    return {"mean": mean, "std": std, "rows": rows, "step": step, "split": split}


def encoded_sums(data: bytes) -> npt.NDArray[np.uint64] | None:
    """Return the `channel_sums` of an encoded image; None if it cannot be decoded."""
    try:
        with strict_pillow():
            pixels = row_decoder().pixels(data)
    except RejectedImageError:
        return None
    sums: npt.NDArray[np.uint64] = channel_sums([pixels], "nhwc")[0]
    return sums
