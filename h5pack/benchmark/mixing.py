"""`mixing_report`, which measures how well a shuffle mixes rows. It reads labels, but no images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.data.dataset import H5Dataset
from h5pack.data.samplers import ChunkBatchSampler
from h5pack.data.selection import select_draws
from h5pack.errors import OptionsError
from h5pack.order.row_ranges import EpochRows, Rows
from h5pack.order.window import DEFAULT_WINDOW, OrderPlan
from h5pack.system.parameters import invalid, whole_number
from h5pack.system.text import counted

MARGIN = 0.05
"""A label distance counts as equal to that of a full shuffle if it exceeds it by at most this fraction.

See `MixingReport.allowed_distance` for the exact rule.
"""
MAX_BATCHES = 2_048
"""Maximum number of batches to sample from one order in all epochs together.

In each epoch, at least `_RUNS` batches are sampled, even if that exceeds the maximum.
"""
MAX_WINDOW_ROWS = 2**22
"""By default, windows with more rows are not compared, because all rows of a window are permuted at once in memory."""
_RUNS = 8
"""Number of runs of consecutive batches that are sampled from an epoch with many batches."""
_T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
"""One-sided 95 % quantiles of Student's t for 1 to 10 degrees of freedom.

For more degrees of freedom, `_quantile` uses 1.645 + 1.7 / degrees of freedom, a slight overestimate.
"""


@dataclass(frozen=True)
class OrderMixing:
    """Measurements of one order of the rows.

    Without integer labels, `label_distance`, `batch_deviation` and `standard_error` are None.
    """

    shuffle: str | bool  # "window", "full" or False.
    window: int | None  # Number of chunks that are shuffled together; None unless `shuffle` is "window".
    # Total-variation distance (0 to 1) between the label histogram of a batch and that of all rows: the mean over all
    # batches, and over the columns if a row has several labels.
    label_distance: float | None
    batch_deviation: float | None  # Standard deviation of the label distance over all batches.
    standard_error: float | None  # Standard error of `label_distance`, from the means of the epochs.
    # Spearman's rank correlation between a row's position in the epoch and its position in the file: the mean over the
    # epochs.
    storage_correlation: float
    # Spearman's rank correlation between a row's positions in two consecutive epochs: the mean over these pairs. None
    # if the batches that were sampled from consecutive epochs have fewer than three rows in common.
    epoch_correlation: float | None
    chunks_per_batch: float  # Number of distinct chunks that a batch's rows come from: the mean over the batches.

    def bound(self, quantile: float) -> float:
        """Return the label distance plus `quantile` standard errors."""
        return (self.label_distance or 0.0) + quantile * (self.standard_error or 0.0)


@dataclass(frozen=True)
class MixingReport:
    """How well the window shuffle mixes a dataset's rows.

    Even a perfectly random batch has a label distance above 0. The mean of this distance is known: the count of a class
    in a batch is hypergeometric, and the mean absolute deviation of such a count has a closed form (Diaconis and
    Zabell, "Closed form summation for classical distributions", Statistical Science 1991). Batches of one epoch depend
    on each other but epochs do not, so the standard error is calculated from the means of the epochs. A window counts
    as equal to a full shuffle if the upper end of the one-sided 95 % confidence interval of its mean distance
    (Student's t) is at most `allowed_distance`; a window of all chunks is a full shuffle. Windows are tested from the
    largest down to the first that fails, so `enough_window` is too small in at most 5 % of reports.
    """

    rows: int  # Number of rows in an epoch.
    chunks: int  # Number of chunks that hold these rows.
    chunk_bytes: int  # Uncompressed size of a full chunk of images.
    batch_size: int
    seed: int
    epochs: int
    batches: int  # Number of full batches that were sampled in each epoch.
    epoch_batches: int  # Number of full batches in an epoch.
    window: int  # The window that the advice is about, in chunks; at most `chunks`.
    expected_distance: float | None  # Exact mean label distance of full shuffles; None without integer labels.
    # Largest label distance that counts as equal to that of a full shuffle; None without integer labels. It exceeds
    # `expected_distance` by 5 % of the smaller of two numbers:
    # - `expected_distance`;
    # - the mean label distance of batches of one row, minus `expected_distance`. This is small if there are more
    #   classes than rows per batch.
    allowed_distance: float | None
    # Smallest window shown to mix labels as well as a full shuffle. None if there is no such window, or without integer
    # labels.
    enough_window: int | None
    orders: tuple[OrderMixing, ...]  # The windows in ascending order, then the full shuffle, then the stored order.

    @property
    def advice(self) -> str:
        """One sentence that says whether the window is large enough and what to do if not, or why this is unknown."""
        window, enough = self.window, self.enough_window
        asked = next(order for order in self.orders if order.window == window)
        if self.allowed_distance is None:
            chunks = f"{asked.chunks_per_batch:.1f} chunks"
            return f"No integer labels to compare: with window={window} the rows of a batch come from {chunks}."
        if enough is not None and enough <= window:
            return f"window={window} is enough: it mixes the labels as well as a full shuffle."
        if asked.bound(-_quantile(self.epochs)) <= self.allowed_distance:
            return f"Give more epochs: epochs={self.epochs} is too few to show whether window={window} is large enough."
        other = "convert in shuffled order"
        if enough is not None:
            other = f"window={enough} ({enough * self.chunk_bytes / 2**20:,.1f} MiB)"
        # With many classes, even rows of one chunk are almost as far from all labels as those of a full shuffle.
        percent = 100 * self.excess(asked)
        excess = f"{percent:,.0f}" if percent >= 1 else f"{percent:.2f}"
        label_distance = f"the label distance of a batch is {excess} % above a full shuffle's"
        return f"Use shuffle='full', or {other}: with window={window} {label_distance}."

    def excess(self, order: OrderMixing) -> float:
        """Return the fraction by which an order's label distance exceeds `expected_distance`; nan without labels."""
        if order.label_distance is None or self.expected_distance is None:
            return math.nan
        return order.label_distance / self.expected_distance - 1 if self.expected_distance else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON-serializable dict. The keys are stable across versions."""
        return {**asdict(self), "advice": self.advice}

    def to_text(self) -> str:
        """Return a table of the orders, and the advice."""
        sampled = f"{self.batches:,} of {self.epoch_batches:,} full batches in each of {self.epochs} epochs"
        lines = [
            f"{self.rows:,} rows in {counted(self.chunks, 'chunk')}, batches of {self.batch_size}; sampled {sampled}.",
            "",
            "order             label distance  vs full  vs file  vs next epoch  chunks a batch",
            *map(self._line, self.orders),
            "",
        ]
        if self.expected_distance is not None:
            known = f"A full shuffle's label distance is {self.expected_distance:.4f} on average"
            lines.append(f"{known}; a distance up to {self.allowed_distance:.4f} counts as equal.")
            lines.append(f"Smallest window shown to be equal to a full shuffle: {self.enough_window or 'none'}.")
        largest = max(order.window or 0 for order in self.orders)
        if largest < self.chunks:
            lines.append(f"Windows of more than {largest:,} chunks were not compared; for these, give windows=SIZES.")
        return "\n".join([*lines, self.advice])

    def _line(self, order: OrderMixing) -> str:
        distance = above = follows = "-"
        if order.label_distance is not None:
            distance = f"{order.label_distance:.4f} +- {order.standard_error:.4f}"
            above = f"{round(100 * self.excess(order)):+,} %"
        if order.epoch_correlation is not None:
            follows = f"{order.epoch_correlation:+.3f}"
        name = {"full": "full shuffle", False: "stored order"}.get(order.shuffle, f"window={order.window}")
        middle = f"{distance:>18}{above:>9}{order.storage_correlation:>+9.3f}{follows:>15}"
        return f"{name:14}{middle}{order.chunks_per_batch:16.1f}"


def mixing_report(
    dataset: Any,
    batch_size: int = 256,
    *,
    window: int = DEFAULT_WINDOW,
    seed: int = 0,
    epochs: int = 8,
    windows: Sequence[int] | None = None,
) -> MixingReport:
    """Measure how well the window shuffle mixes a dataset's rows, compared with a full shuffle and the stored order.

    The orders are those of `ChunkBatchSampler` and `H5Loader` on one rank. The labels are read once, the images never.
    In each epoch of an order, at most 2,048 / `epochs` batches are sampled, or 8 if that is more. If an epoch has more
    batches, 8 evenly spaced runs of consecutive batches are sampled.

    Parameters
    ----------
    dataset : H5Dataset, ConcatPack or Subset
        The rows to shuffle.
    batch_size : int
        Rows per batch. A smaller last batch is left out.
    window : int
        Number of chunks that are shuffled together; the advice is about this window.
    seed : int
        Seed of the shuffles.
    epochs : int
        Number of epochs to sample, at least 2. More epochs make the result more certain.
    windows : sequence of int, optional
        Windows to compare besides `window`. Default: powers of two and all chunks, up to 2**22 rows per window.

    Returns
    -------
    MixingReport
        ``print(report.to_text())`` shows the comparison and the advice.

    Raises
    ------
    OptionsError
        If a value is invalid, or the rows do not fill a batch.
    """
    epochs = whole_number("epochs", epochs, 2)
    plan = ChunkBatchSampler(dataset, batch_size, seed=seed, window=window, drop_last=True, rank=0, num_replicas=1).plan
    base, rows = select_draws(dataset)[0], plan.rows.epoch_rows(0)
    if not plan.num_batches:
        advice = "give a smaller batch_size" if rows.count else "give a dataset with rows"
        problem = f"{rows.count:,} rows do not fill a batch of {batch_size}; {advice}"
        raise OptionsError(problem, parameters=("batch_size",))
    compared = _windows(rows, plan.window, windows)
    name = base.label_name
    labels = None
    if name is not None:
        index = base.engine.indexes[name]
        # A table without columns, (N, 0), has no labels to count.
        labels = _LabelTable(base, name, rows) if index.dtype.kind in "iu" and index.row_bytes else None
    plans = [replace(plan, window=number) for number in compared]
    plans += [replace(plan, shuffle="full"), replace(plan, shuffle=False)]
    runs = _sampled_runs(plan.num_batches, max(_RUNS, MAX_BATCHES // epochs))
    orders = tuple(_measured(one, labels, epochs, runs) for one in plans)
    expected = allowed = None
    if labels is not None:
        expected = labels.expected(plan.batch_size)
        allowed = expected + MARGIN * min(expected, labels.expected(1) - expected)
    return MixingReport(
        rows=rows.count,
        chunks=rows.chunk_count,
        chunk_bytes=base.engine.indexes[base.names[0]].row_bytes * rows.chunk_rows,
        batch_size=plan.batch_size,
        seed=plan.seed,
        epochs=epochs,
        batches=sum(map(len, runs)),
        epoch_batches=plan.num_batches,
        window=min(plan.window, rows.chunk_count),
        expected_distance=expected,
        allowed_distance=allowed,
        enough_window=None if allowed is None else _enough(orders, rows.chunk_count, allowed, epochs),
        orders=orders,
    )


def _windows(rows: EpochRows, asked: int, windows: Sequence[int] | None) -> list[int]:
    if windows is None:
        numbers = [1 << power for power in range(rows.chunk_count.bit_length())] + [rows.chunk_count]
        numbers = [number for number in numbers if number * rows.chunk_rows <= max(MAX_WINDOW_ROWS, rows.chunk_rows)]
    elif not hasattr(windows, "__len__") or getattr(windows, "ndim", 1) != 1 or not len(windows):
        raise invalid("windows", windows, "give a list of whole numbers, or None for powers of two")
    else:
        numbers = [whole_number("windows", number, 1) for number in windows]
    return sorted({min(number, rows.chunk_count) for number in (*numbers, asked)})


def _quantile(epochs: int) -> float:
    """Return the one-sided 95 % quantile of Student's t for the mean of `epochs` epochs."""
    return _T_95[epochs - 2] if epochs - 2 < len(_T_95) else 1.645 + 1.7 / (epochs - 1)


def _enough(orders: tuple[OrderMixing, ...], chunks: int, allowed: float, epochs: int) -> int | None:
    """Test windows from the largest to the first that fails, and return the last one that passes; None if none passes.

    A window of all `chunks` always passes, because it is a full shuffle.
    """
    enough = None
    for order in sorted((order for order in orders if order.window), key=lambda order: -(order.window or 0)):
        if order.window != chunks and order.bound(_quantile(epochs)) > allowed * (1 + 1e-9):
            break
        enough = order.window
    return enough


def _sampled_runs(batches: int, max_batches: int) -> list[range]:
    """Return the batch numbers to sample: all, or at most `max_batches` in evenly spaced runs."""
    if batches <= max_batches:
        return [range(batches)]
    length = max_batches // _RUNS
    starts = [run * (batches - length) // (_RUNS - 1) for run in range(_RUNS)]
    return [range(start, start + length) for start in starts]


def _batches(plan: OrderPlan, epoch: int, run: range) -> Rows:
    """Return the file rows of the batches whose numbers are in `run`: int64, (len(run), batch_size).

    All these batches must be full.
    """
    parts, wanted = [], len(run) * plan.batch_size
    for group in plan.chunk_groups(epoch, run.start):
        rows = np.empty_like(group.rows)
        rows[group.positions] = group.rows
        parts.append(rows)
        if sum(map(len, parts)) >= wanted:
            break
    return np.concatenate(parts)[:wanted].reshape(len(run), plan.batch_size)


def _measured(plan: OrderPlan, labels: _LabelTable | None, epochs: int, runs: list[range]) -> OrderMixing:
    places = np.concatenate([np.arange(run.start * plan.batch_size, run.stop * plan.batch_size) for run in runs])
    distances: list[list[float]] = []
    chunks: list[int] = []
    to_file: list[float] = []
    to_next: list[float] = []
    before: Rows | None = None
    for epoch in range(epochs):
        found = np.concatenate([_batches(plan, epoch, run) for run in runs])
        rows = found.reshape(-1)
        to_file.append(_spearman(places, rows))
        if before is not None:
            _, here, there = np.intersect1d(rows, before, return_indices=True)
            if len(here) > 2:
                to_next.append(_spearman(places[here], places[there]))
        before = rows
        chunks += [len(np.unique(batch // plan.rows.chunk_rows)) for batch in found]
        if labels is not None:
            distances.append([labels.distance(batch) for batch in found])
    means = np.array([np.mean(epoch) for epoch in distances])
    return OrderMixing(
        shuffle=plan.shuffle,
        window=plan.window if plan.shuffle == "window" else None,
        label_distance=float(means.mean()) if distances else None,
        batch_deviation=float(np.std(distances)) if distances else None,
        standard_error=float(means.std(ddof=1) / math.sqrt(epochs)) if distances else None,
        storage_correlation=float(np.mean(to_file)),
        epoch_correlation=float(np.mean(to_next)) if to_next else None,
        chunks_per_batch=float(np.mean(chunks)),
    )


def _ranks(values: Rows) -> npt.NDArray[np.float64]:
    """Return the ranks of values, starting at 1; equal values get their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: npt.NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return ranks


def _spearman(one: Rows, other: Rows) -> float:
    """Return Spearman's rank correlation of two arrays; 0 if all values of one of them are equal."""
    left, right = (ranks - ranks.mean() for ranks in (_ranks(one), _ranks(other)))
    scale = math.sqrt(float(left @ left) * float(right @ right))
    return float(left @ right) / scale if scale else 0.0


class _LabelTable:
    """The integer labels, (n,) or (n, K), of an epoch's rows."""

    def __init__(self, dataset: H5Dataset, name: str, rows: EpochRows) -> None:
        self._stored, repeats = np.unique(rows.rows_at(np.arange(rows.count))[0], return_counts=True)
        table = dataset.read_rows(name, self._stored).reshape(len(self._stored), -1)
        self.rows, self.columns = rows.count, table.shape[1]
        self._codes = np.empty(table.shape, np.int64)  # Class numbers from 0; equal labels in two columns differ.
        classes = 0
        for column in range(self.columns):
            values, codes = np.unique(table[:, column], return_inverse=True)
            self._codes[:, column] = codes + classes
            classes += len(values)
        self._counts = np.zeros(classes, np.int64)
        np.add.at(self._counts, self._codes, repeats[:, None])
        self._shares = self._counts / self.rows

    def distance(self, batch: Rows) -> float:
        """Return the total-variation distance between the labels of a batch and of all rows; mean over the columns."""
        codes = self._codes[np.searchsorted(self._stored, batch)]
        counts = np.bincount(codes.reshape(-1), minlength=len(self._shares))
        return float(np.abs(counts / len(batch) - self._shares).sum()) / 2 / self.columns

    def expected(self, batch_size: int) -> float:
        """Return the expected `distance` of a random batch drawn without replacement."""
        sizes, times = (column.tolist() for column in np.unique(self._counts, return_counts=True))
        deviations = [_mean_deviation(self.rows, size, batch_size) for size in sizes]
        return float(np.dot(times, deviations)) / batch_size / 2 / self.columns


def _mean_deviation(rows: int, marked: int, drawn: int) -> float:
    """Return the mean absolute deviation of the number of marked rows among `drawn` rows, drawn without replacement.

    By de Moivre's sum, it is 2 m (rows - marked - drawn + m) / rows times the probability of m marked rows, where m
    is the first integer above the mean.
    """
    above = drawn * marked // rows + 1
    if above > min(drawn, marked):
        return 0.0
    chance = _log_binomial(marked, above) + _log_binomial(rows - marked, drawn - above) - _log_binomial(rows, drawn)
    return 2 * above * (rows - marked - drawn + above) / rows * math.exp(chance)


def _log_binomial(items: int, taken: int) -> float:
    return math.lgamma(items + 1) - math.lgamma(taken + 1) - math.lgamma(items - taken + 1)
