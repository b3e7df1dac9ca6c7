"""`mixing_report`: how well an order mixes the rows it hands out, measured on the samplers' own orders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.errors import OptionsError
from h5pack.feed.dataset import H5Dataset
from h5pack.feed.order import DEFAULT_WINDOW, OrderPlan, whole_number
from h5pack.feed.row_set import EpochRows, Rows
from h5pack.feed.samplers import ChunkBatchSampler
from h5pack.feed.selection import select_rows

MARGIN = 0.05
"""How much larger than a full shuffle's a label distance may be, as a share of it."""
MAX_BATCHES = 2_048
"""Batches that are looked at for one order, in all epochs together."""
MAX_WINDOW_ROWS = 2**22
"""Larger windows are not tried by themselves: a window's rows are permuted at once."""
_RUNS = 8
_T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
"""Student's t for a one-sided 95 %, of 1 to 10 degrees of freedom; beyond, 1.645 + 1.7 / freedom is a little more."""


@dataclass(frozen=True)
class OrderMixing:
    """What was measured of one order.

    Attributes
    ----------
    shuffle : str or False
        "window", "full" or False, as the samplers call them.
    window : int or None
        Chunks that are shuffled together; None where the order has no windows.
    label_distance : float or None
        0..1: total-variation distance between a batch's label histogram and that of all rows, mean over the batches.
        Of a label table the mean over its columns. None without labels that are whole numbers.
    batch_deviation : float or None
        Standard deviation of that distance over all batches.
    standard_error : float or None
        Of `label_distance`, from the means of the epochs.
    storage_correlation : float
        Spearman's rank correlation between a row's place in the epoch and its place in the file, mean over epochs.
    epoch_correlation : float or None
        The same between the places in one epoch and in the next; None where too few rows were seen in both.
    chunks_per_batch : float
        Different chunks that a batch's rows come from, mean over the batches.
    """

    shuffle: str | bool
    window: int | None
    label_distance: float | None
    batch_deviation: float | None
    standard_error: float | None
    storage_correlation: float
    epoch_correlation: float | None
    chunks_per_batch: float

    def bound(self, quantile: float) -> float:
        """The label distance, so many standard errors up."""
        return (self.label_distance or 0.0) + quantile * (self.standard_error or 0.0)


@dataclass(frozen=True)
class MixingReport:
    """How well the window shuffle mixes; ``print`` it for a table and advice.

    Attributes
    ----------
    rows, chunks : int
        Rows to draw from, and chunks that hold some.
    chunk_bytes : int
        Bytes of a full chunk of images, uncompressed.
    batch_size, seed, epochs : int
    batches, epoch_batches : int
        Full batches looked at in each epoch, and full batches of an epoch.
    window : int
        The window asked about, at most `chunks`.
    expected_distance : float or None
        Label distance that a full shuffle has on average, calculated; None without labels.
    allowed_distance : float or None
        Up to here a distance counts as a full shuffle's: 5 % above `expected_distance`, or 5 % of the way from there to
        the mean distance of single rows, where that is less (as with more classes than rows a batch).
    enough_window : int or None
        The smallest window that is shown to mix the labels as a full shuffle does; None if none is.
    orders : tuple of OrderMixing
        The windows, ascending; then the full shuffle, then the stored order.

    Notes
    -----
    A random batch is not at distance 0, but its mean is known: a class's count in it is hypergeometric, and the mean
    deviation of such a count has a closed form (de Moivre's; Diaconis and Zabell, "Closed form summation for classical
    distributions", Statistical Science 1991). Batches of one epoch depend on each other, epochs do not, so the standard
    error comes from the epochs' means. A window is as good as a full shuffle if the upper end of the one-sided 95 %
    confidence interval of its mean (Student's t) is at most `allowed_distance`; that of all chunks is one. Windows are
    tested from the largest down to the first that fails, so `enough_window` is too small in 5 % of reports at most.
    """

    rows: int
    chunks: int
    chunk_bytes: int
    batch_size: int
    seed: int
    epochs: int
    batches: int
    epoch_batches: int
    window: int
    expected_distance: float | None
    allowed_distance: float | None
    enough_window: int | None
    orders: tuple[OrderMixing, ...]

    @property
    def advice(self) -> str:
        """Whether the window is large enough, and what to do if not, in one sentence."""
        window, enough = self.window, self.enough_window
        asked = next(order for order in self.orders if order.window == window)
        if self.allowed_distance is None:
            return f"No labels to judge by: a batch of window={window} has rows of {asked.chunks_per_batch:.1f} chunks."
        if enough is not None and enough <= window:
            return f"Keep window={window}: its batches mix the labels as those of a full shuffle do."
        if asked.bound(-_quantile(self.epochs)) <= self.allowed_distance:
            return f"Ask for more epochs: {self.epochs} do not show whether window={window} is large enough."
        way = f"window={enough} ({(enough or 0) * self.chunk_bytes / 2**20:,.1f} MiB)"
        off = f"a batch's labels are {100 * self.excess(asked):,.0f} % further off than a full shuffle's"
        return f"Take shuffle='full', or {way if enough else 'convert in shuffled order'}: with window={window} {off}."

    def excess(self, order: OrderMixing) -> float:
        """Share by which an order's label distance is larger than a full shuffle's; nan without labels."""
        if order.label_distance is None or self.expected_distance is None:
            return math.nan
        return order.label_distance / self.expected_distance - 1 if self.expected_distance else 0.0

    def to_json(self) -> dict[str, Any]:
        """The report for programs; keys are stable."""
        return {**asdict(self), "advice": self.advice}

    def __str__(self) -> str:
        seen = f"{self.batches:,} of {self.epoch_batches:,} batches in each of {self.epochs} epochs"
        lines = [
            f"{self.rows:,} rows in {self.chunks:,} chunks, batches of {self.batch_size}; looked at {seen}.",
            "",
            "order             label distance  to full  to file  to next epoch  chunks a batch",
        ]
        for order in self.orders:
            distance = above = follows = "-"
            if order.label_distance is not None:
                distance = f"{order.label_distance:.4f} +- {order.standard_error:.4f}"
                above = f"{round(100 * self.excess(order)):+,} %"
            if order.epoch_correlation is not None:
                follows = f"{order.epoch_correlation:+.3f}"
            name = {"full": "full shuffle", False: "stored order"}.get(order.shuffle, f"window={order.window}")
            middle = f"{distance:>18}{above:>9}{order.storage_correlation:>+9.3f}{follows:>15}"
            lines.append(f"{name:14}{middle}{order.chunks_per_batch:16.1f}")
        lines.append("")
        if self.expected_distance is not None:
            known = f"A full shuffle's label distance is {self.expected_distance:.4f} on average"
            lines.append(f"{known}; up to {self.allowed_distance:.4f} counts as equal.")
            lines.append(f"Smallest window that is shown to be equal: {self.enough_window or 'none'}.")
        tried = max(order.window or 0 for order in self.orders)
        if tried < self.chunks:
            lines.append(f"Windows of more than {tried:,} chunks were not tried; name them in windows to try them.")
        return "\n".join([*lines, self.advice])


def mixing_report(
    dataset: Any,
    batch_size: int = 256,
    *,
    window: int = DEFAULT_WINDOW,
    seed: int = 0,
    epochs: int = 8,
    windows: Sequence[int] | None = None,
) -> MixingReport:
    """Measure how well the window shuffle mixes a dataset's rows, beside a full shuffle and the stored order.

    The orders are those that `ChunkBatchSampler` and `H5Loader` take on one rank. No image is read; the labels are,
    once.

    Parameters
    ----------
    dataset : H5Dataset or Subset
        A torch `Subset` of an `H5Dataset` is looked at alone.
    batch_size : int
        Rows a batch. A last smaller batch is left out.
    window : int
        The window that the advice is about.
    seed : int
        Of the orders.
    epochs : int
        How many epochs of each order, at least 2: what the confidence in the means comes from.
    windows : sequence of int, optional
        The windows to compare besides `window`. None: powers of two, and all chunks, up to windows of
        2**22 (4,194,304) rows.

    Returns
    -------
    MixingReport

    Raises
    ------
    OptionsError
        If a value makes no sense, there are no chunks, or the rows do not fill a batch.

    Notes
    -----
    At most 2,048 batches are looked at for each order, or 8 an epoch where that is more: 8 runs of consecutive ones,
    spread evenly over each epoch. Labels that are not whole numbers count as none.
    """
    epochs = whole_number("epochs", epochs, 2)
    plan = ChunkBatchSampler(dataset, batch_size, seed=seed, window=window, drop_last=True, rank=0, world_size=1).plan
    base, rows = select_rows(dataset)[0], plan.rows.of_epoch(0)
    if not plan.batches:
        raise OptionsError(f"{rows.count:,} rows do not fill a batch of {batch_size}; give a smaller batch_size")
    tried = _windows(rows, plan.window, windows)
    labels = _Labels.read(base, rows)
    plans = [replace(plan, window=number) for number in tried]
    plans += [replace(plan, shuffle="full"), replace(plan, shuffle=False)]
    wanted = _wanted(plan.batches, max(_RUNS, MAX_BATCHES // epochs))
    orders = tuple(_measured(one, labels, epochs, wanted) for one in plans)
    expected = allowed = None
    if labels is not None:
        expected = labels.expected(plan.batch_size)
        allowed = expected + MARGIN * min(expected, labels.expected(1) - expected)
    return MixingReport(
        rows=rows.count,
        chunks=rows.chunks,
        chunk_bytes=base.engine.indexes[base.names[0]].row_bytes * rows.unit_rows,
        batch_size=plan.batch_size,
        seed=plan.seed,
        epochs=epochs,
        batches=len(wanted),
        epoch_batches=plan.batches,
        window=min(plan.window, rows.chunks),
        expected_distance=expected,
        allowed_distance=allowed,
        enough_window=None if allowed is None else _enough(orders, rows.chunks, allowed, epochs),
        orders=orders,
    )


def _windows(rows: EpochRows, asked: int, windows: Sequence[int] | None) -> list[int]:
    """The windows to try, ascending."""
    if windows is None:
        numbers = [1 << power for power in range(rows.chunks.bit_length())] + [rows.chunks]
        numbers = [number for number in numbers if number * rows.unit_rows <= max(MAX_WINDOW_ROWS, rows.unit_rows)]
    elif not hasattr(windows, "__len__") or not len(windows):
        raise OptionsError(f"windows is {windows!r}; give whole numbers, or None for powers of two")
    else:
        numbers = [whole_number("a window", number, 1) for number in windows]
    return sorted({min(number, rows.chunks) for number in (*numbers, asked)})


def _quantile(epochs: int) -> float:
    """Standard errors from the mean of that many epochs to the end of its one-sided 95 % confidence interval."""
    return _T_95[epochs - 2] if epochs - 2 < len(_T_95) else 1.645 + 1.7 / (epochs - 1)


def _enough(orders: tuple[OrderMixing, ...], chunks: int, allowed: float, epochs: int) -> int | None:
    """The smallest window that passes, tested from the largest down to the first that fails; all chunks pass."""
    enough = None
    for order in sorted((order for order in orders if order.window), key=lambda order: -(order.window or 0)):
        if order.window != chunks and order.bound(_quantile(epochs)) > allowed * (1 + 1e-9):
            break
        enough = order.window
    return enough


def _wanted(batches: int, most: int) -> Rows:
    """The batches to look at, ascending: all, or `most` of them in evenly spaced runs; int64, (n,)."""
    if batches <= most:
        return np.arange(batches)
    run = np.arange(most // _RUNS)
    return np.concatenate([number * (batches - len(run)) // (_RUNS - 1) + run for number in range(_RUNS)])


def _batches(plan: OrderPlan, epoch: int, wanted: Rows) -> Rows:
    """Rows of the file of some full batches, whose numbers ascend; int64, (n, batch_size)."""
    found = np.empty((len(wanted), plan.batch_size), np.int64)
    where = {batch: at for at, batch in enumerate(wanted.tolist())}
    done = 0
    while done < len(wanted):
        for segment in plan.segments(epoch, int(wanted[done])):
            for (batch, slot, share), rows in segment.deal(segment.rows):
                if batch in where:
                    found[where[batch], slot : slot + share] = rows
            # The segment's last batch may go on in the next one.
            whole = slot + share == plan.batch_size
            done = int(np.searchsorted(wanted, segment.last + whole))
            if done == len(wanted) or wanted[done] > segment.last + 1:
                break
    return found


def _measured(plan: OrderPlan, labels: _Labels | None, epochs: int, wanted: Rows) -> OrderMixing:
    distances: list[list[float]] = []
    chunks: list[int] = []
    to_file: list[float] = []
    to_next: list[float] = []
    before: tuple[Rows, Rows] | None = None
    for epoch in range(epochs):
        found = _batches(plan, epoch, wanted)
        rows, places = found.reshape(-1), (wanted[:, None] * plan.batch_size + np.arange(plan.batch_size)).reshape(-1)
        to_file.append(_spearman(places, rows))
        if before is not None:
            _, here, there = np.intersect1d(rows, before[0], return_indices=True)
            if len(here) > 2:
                to_next.append(_spearman(places[here], before[1][there]))
        before = rows, places
        chunks += [len(np.unique(batch // plan.rows.unit_rows)) for batch in found]
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
    """Ranks from 1, those of equal values their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: npt.NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return ranks


def _spearman(one: Rows, other: Rows) -> float:
    """Spearman's rank correlation; 0 where all of one side is equal."""
    left, right = (ranks - ranks.mean() for ranks in (_ranks(one), _ranks(other)))
    scale = math.sqrt(float(left @ left) * float(right @ right))
    return float(left @ right) / scale if scale else 0.0


class _Labels:
    """The labels, (n,) or (n, K), of `stored` rows, each of which is drawn `repeats` times an epoch."""

    def __init__(self, stored: Rows, values: npt.NDArray[Any], repeats: Rows) -> None:
        self._stored = stored
        table = values.reshape(len(values), -1)
        self.columns = table.shape[1]
        self._codes = np.empty(table.shape, np.int64)  # Numbers from 0; each column has its own.
        begin = 0
        for column in range(self.columns):
            classes, codes = np.unique(table[:, column], return_inverse=True)
            self._codes[:, column] = codes + begin
            begin += len(classes)
        counts = np.zeros(begin, np.int64)
        np.add.at(counts, self._codes, repeats[:, None])
        self._counts, self.rows, self._shares = counts, int(repeats.sum()), counts / repeats.sum()

    @classmethod
    def read(cls, dataset: H5Dataset, rows: EpochRows) -> _Labels | None:
        """The labels of the rows of an order; None where there are none, or no whole numbers."""
        name = dataset.label_name
        if name is None or dataset.engine.indexes[name].dtype.kind not in "iu":
            return None
        stored, repeats = np.unique(rows.pick(np.arange(rows.count))[0], return_counts=True)
        return cls(stored, dataset.read_rows(name, stored), repeats)

    def distance(self, batch: Rows) -> float:
        """Total-variation distance between the labels of a batch and those of all rows, mean over the columns."""
        codes = self._codes[np.searchsorted(self._stored, batch)]
        counts = np.bincount(codes.reshape(-1), minlength=len(self._shares))
        return float(np.abs(counts / len(batch) - self._shares).sum()) / 2 / self.columns

    def expected(self, batch_size: int) -> float:
        """The mean of `distance` over random batches without replacement."""
        sizes, times = (column.tolist() for column in np.unique(self._counts, return_counts=True))
        deviations = [_mean_deviation(self.rows, size, batch_size) for size in sizes]
        return float(np.dot(times, deviations)) / batch_size / 2 / self.columns


def _mean_deviation(rows: int, marked: int, drawn: int) -> float:
    """Mean absolute deviation from its mean of how many marked rows are among rows drawn without replacement.

    De Moivre's sum: with m the first whole number above the mean, it is 2 m (rows - marked - drawn + m) / rows times
    the chance of m.
    """
    above = drawn * marked // rows + 1
    if above > min(drawn, marked):
        return 0.0
    chance = _choices(marked, above) + _choices(rows - marked, drawn - above) - _choices(rows, drawn)
    return 2 * above * (rows - marked - drawn + above) / rows * math.exp(chance)


def _choices(items: int, taken: int) -> float:
    """The logarithm of the binomial coefficient."""
    return math.lgamma(items + 1) - math.lgamma(taken + 1) - math.lgamma(items - taken + 1)
