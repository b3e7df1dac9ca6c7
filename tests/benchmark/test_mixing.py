"""The mixing report, on packs and on measurements whose answer is known."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
from torch.utils.data import Subset

import h5pack
from h5pack.benchmark import mixing
from h5pack.benchmark.mixing import MixingReport, mixing_report
from h5pack.data.dataset import H5Dataset
from h5pack.errors import OptionsError
from tests.data.packs import converted, write

CLASSES, CHUNK = 5, 20


def packed(folder: Path, labels: npt.NDArray[Any] | None, rows: int = 1_000) -> H5Dataset:
    """A dataset of tiny images in chunks of 20."""
    tables = {} if labels is None else {"labels": labels}
    return H5Dataset(write(folder / "images.h5", CHUNK, images=np.zeros((rows, 2, 2, 1), "u1"), **tables))


@pytest.fixture
def ordered(tmp_path: Path) -> H5Dataset:
    """1,000 rows in order of their 5 classes, 10 chunks a class."""
    return packed(tmp_path, np.repeat(np.arange(CLASSES), 200))


def of(report: MixingReport, shuffle: str | bool, window: int | None = None) -> Any:
    """The figures of one order."""
    (order,) = (order for order in report.orders if (order.shuffle, order.window) == (shuffle, window))
    return order


def windows(report: MixingReport) -> list[Any]:
    return [order for order in report.orders if order.window is not None]


def deviation(rows: int, marked: int, drawn: int) -> float:
    """The mean absolute deviation of the number of marked rows, summed over every possible number."""
    ways = [math.comb(marked, count) * math.comb(rows - marked, drawn - count) for count in range(drawn + 1)]
    return sum(way * abs(count - drawn * marked / rows) for count, way in enumerate(ways)) / math.comb(rows, drawn)


def exact_distance(sizes: Sequence[int], batch: int) -> float:
    """The mean label distance of random batches."""
    return sum(deviation(sum(sizes), size, batch) for size in sizes) / batch / 2


def stored_distance(labels: npt.NDArray[Any], batch: int) -> float:
    """The mean label distance of the full batches in stored order."""
    shares = np.bincount(labels) / len(labels)
    batches = labels[: len(labels) // batch * batch].reshape(-1, batch)
    distances = [np.abs(np.bincount(one, minlength=len(shares)) / batch - shares).sum() / 2 for one in batches]
    return float(np.mean(distances))


@pytest.mark.parametrize(
    ("sizes", "batch", "epochs", "nearly_single"),
    [
        ([200] * 5, 256, 20, False), ([500, 300, 150, 45, 5], 7, 20, False), ([999, 1], 50, 20, True),
        ([200] * 5, 1, 2, True), ([2] * 500, 50, 2, True), ([200] * 5, 1_000, 2, False),
    ],
)  # fmt: skip
def test_a_full_shuffle_has_the_calculated_distance_and_the_limit_is_near_it(
    tmp_path: Path, sizes: list[int], batch: int, epochs: int, nearly_single: bool
) -> None:
    """The limit is 5 % above that distance, or less if that is nearly as far off as single rows are."""
    report = mixing_report(packed(tmp_path, np.repeat(np.arange(len(sizes)), sizes)), batch, epochs=epochs, windows=[1])
    expected, single, full = exact_distance(sizes, batch), exact_distance(sizes, 1), of(report, "full")
    limit = expected + 0.05 * (single - expected if nearly_single else expected)
    assert (report.expected_distance, report.allowed_distance) == pytest.approx((expected, limit), rel=1e-9, abs=1e-12)
    assert not nearly_single or limit < 1.01 * expected
    assert full.label_distance == pytest.approx(expected, abs=4 * full.standard_error + 1e-12)
    assert full.standard_error < 0.2 * expected + 1e-12


@pytest.mark.parametrize(("rows", "marked", "drawn"), [(9, 0, 4), (9, 9, 4), (9, 5, 9), (10, 5, 1), (1, 1, 1)])
def test_the_mean_deviation_at_its_edges(rows: int, marked: int, drawn: int) -> None:
    assert mixing._mean_deviation(rows, marked, drawn) == pytest.approx(deviation(rows, marked, drawn), abs=1e-12)


def test_a_sorted_pack_needs_all_chunks_in_the_window_and_a_shuffled_one_few(
    ordered: H5Dataset, tmp_path_factory: pytest.TempPathFactory
) -> None:
    report = mixing_report(ordered, 100, epochs=20)
    chunks, distances = zip(*((order.chunks_per_batch, order.label_distance) for order in windows(report)), strict=True)
    assert [order.window for order in windows(report)] == [1, 2, 4, 8, 16, 32, 50]
    assert (list(chunks), list(distances)) == (sorted(chunks), sorted(distances, reverse=True))
    assert distances[-1] == pytest.approx(report.expected_distance, abs=4 * of(report, "window", 50).standard_error)
    assert (report.chunks, report.enough_window) == (50, 50)
    assert report.excess(of(report, "window", 16)) > 0.5
    assert report.advice.startswith("Use shuffle='full', or window=50 (0.0 MiB)")
    labels = np.random.default_rng(5).permutation(np.repeat(np.arange(CLASSES), 200))
    shuffled = mixing_report(packed(tmp_path_factory.mktemp("shuffled"), labels), 100, epochs=20, windows=[1, 4])
    assert shuffled.enough_window == 1
    assert shuffled.advice.startswith("window=16 is enough")
    # It is the labels that are mixed, not the chunks.
    assert of(shuffled, "window", 1).chunks_per_batch < 10 < of(shuffled, "full").chunks_per_batch


@pytest.mark.parametrize(
    ("ranked", "expected"),
    # Ranks 1, 2.5, 2.5, 4, 5 against 1 to 5: 1 less 6 * 0.5 / 120, but for the ties.
    [([10, 20, 30, 40, 900], 1), ([9, 7, 5, 3, 1], -1), ([3] * 5, 0), ([1, 2, 2, 3, 4], 9.5 / (10 * 9.5) ** 0.5)],
)
def test_spearman_by_hand(ranked: list[int], expected: float) -> None:
    assert mixing._spearman(np.arange(5), np.array(ranked)) == pytest.approx(expected)


@pytest.mark.parametrize("shuffle", ["window", "full", False])
def test_the_batches_are_the_samplers(ordered: H5Dataset, shuffle: str | bool) -> None:
    sampler = h5pack.ChunkBatchSampler(ordered, 48, shuffle=shuffle, seed=3, window=4, drop_last=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        whole = list(sampler)
        for run in (range(len(whole)), range(7, 12), range(len(whole) - 1, len(whole))):
            assert mixing._batches(sampler.plan, epoch, run).tolist() == [whole[batch] for batch in run]


@pytest.mark.parametrize(("shuffle", "window"), [("window", 3), ("full", None), (False, None)])
def test_figures_are_those_of_the_samplers_batches(ordered: H5Dataset, shuffle: str | bool, window: int | None) -> None:
    epochs, batch = 4, 48
    found = of(mixing_report(ordered, batch, seed=9, epochs=epochs, windows=[3]), shuffle, window)
    sampler = h5pack.ChunkBatchSampler(ordered, batch, shuffle=shuffle, seed=9, window=window or 16, drop_last=True)
    rows = np.array([list(sampler) for _ in range(epochs)])
    counts = np.stack([(rows // 200 == label).sum(axis=2) for label in range(CLASSES)], axis=2)
    distances = np.abs(counts / batch - 1 / CLASSES).sum(axis=2) / 2
    assert found.label_distance == pytest.approx(distances.mean())
    assert found.batch_deviation == pytest.approx(distances.std())
    assert found.standard_error == pytest.approx(statistics.stdev(distances.mean(axis=1)) / epochs**0.5)
    assert found.chunks_per_batch == np.mean([len(set(one // CHUNK)) for epoch in rows for one in epoch])
    flat = rows.reshape(epochs, -1)
    places = np.arange(flat.shape[1])
    to_file = [np.corrcoef(places, epoch.argsort().argsort())[0, 1] for epoch in flat]
    assert found.storage_correlation == pytest.approx(np.mean(to_file))
    where = [{row: place for place, row in enumerate(epoch)} for epoch in flat.tolist()]
    pairs = [[(one[row], other[row]) for row in sorted(one.keys() & other.keys())] for one, other in pairwise(where)]
    to_next = [np.corrcoef(np.array(pair).argsort(axis=0).argsort(axis=0).T)[0, 1] for pair in pairs]
    assert found.epoch_correlation == pytest.approx(np.mean(to_next))


def test_a_large_pack_is_sampled_in_evenly_spaced_runs(ordered: H5Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = mixing_report(ordered, 4, epochs=2, windows=[1, 16])
    monkeypatch.setattr(mixing, "MAX_BATCHES", 200)
    part = mixing_report(ordered, 4, epochs=2, windows=[1, 16])
    assert [(one.batches, one.epoch_batches) for one in (whole, part)] == [(250, 250), (96, 250)]
    runs = mixing._sampled_runs(250, 100)
    assert {len(run) for run in runs} == {12}
    assert (runs[0].start, runs[-1].stop) == (0, 250)
    assert set(np.diff([run.start for run in runs]).tolist()) <= {34, 35}
    assert of(part, False).storage_correlation == pytest.approx(1)
    for one, other in zip(whole.orders, part.orders, strict=True):
        assert one.label_distance == pytest.approx(other.label_distance, abs=0.1)


def test_large_windows_are_tried_when_they_are_named(ordered: H5Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixing, "MAX_WINDOW_ROWS", 8 * CHUNK)
    report = mixing_report(ordered, 50, window=4, epochs=2)
    assert [order.window for order in windows(report)] == [1, 2, 4, 8]
    assert "more than 8 chunks were not compared" in report.to_text()
    assert report.enough_window is None
    # A window of more chunks than there are is all of them.
    named = mixing_report(ordered, 50, window=4, epochs=2, windows=(1_000,))
    assert [order.window for order in windows(named)] == [4, 50]
    assert "not compared" not in named.to_text()
    assert mixing_report(ordered, 50, window=1_000, epochs=2, windows=(1,)).window == 50


NO_COLUMNS = np.empty((1_000, 0), np.int64)


@pytest.mark.parametrize("labels", [None, np.random.default_rng(0).normal(size=1_000), NO_COLUMNS])
def test_without_labels_there_is_no_label_distance(tmp_path: Path, labels: npt.NDArray[Any] | None) -> None:
    report = mixing_report(packed(tmp_path, labels), 50, epochs=2)
    assert (report.expected_distance, report.allowed_distance, report.enough_window) == (None, None, None)
    for order in report.orders:
        assert (order.label_distance, order.batch_deviation, order.standard_error) == (None, None, None)
    assert of(report, False).chunks_per_batch == 3.0
    assert of(report, False).storage_correlation == pytest.approx(1)
    assert report.advice.startswith("No integer labels")
    assert "label distance is" not in report.to_text()


def test_columns_of_a_label_table_count_alike(tmp_path: Path) -> None:
    half, tenth = np.arange(1_000) >= 500, np.arange(1_000) % 10 == 0
    report = mixing_report(packed(tmp_path, np.stack([half, tenth], 1).astype("u1")), CHUNK, epochs=2)
    both = exact_distance([500, 500], CHUNK), exact_distance([900, 100], CHUNK)
    assert report.expected_distance == pytest.approx(sum(both) / 2, rel=1e-9)
    # In stored order a batch is a chunk: one value of the first column, two of twenty in the second.
    assert of(report, False).label_distance == pytest.approx((0.5 + 0) / 2)


def test_only_the_rows_of_a_subset_count(ordered: H5Dataset) -> None:
    one_class = mixing_report(Subset(ordered, range(200, 400)), 50, epochs=2)
    assert (one_class.rows, one_class.chunks, one_class.expected_distance) == (200, 10, 0)
    assert {order.label_distance for order in one_class.orders} == {0.0}
    assert one_class.enough_window == 1
    assert "+0 %" in one_class.to_text()
    thin = mixing_report(Subset(Subset(ordered, range(0, 1_000, 2)), range(0, 500, 2)), 5, epochs=2)
    assert (thin.rows, thin.chunks) == (250, 50)
    assert of(thin, "window", 1).label_distance == pytest.approx(1 - 1 / CLASSES)


def test_repeated_rows_count_as_often_as_they_come(ordered: H5Dataset) -> None:
    rows = [*range(100), *range(100), *range(100), *range(200, 300), *range(400, 500)]
    report = mixing_report(Subset(ordered, rows), 30, epochs=2)
    assert report.rows == 500
    assert report.expected_distance == pytest.approx(exact_distance([300, 100, 100], 30), rel=1e-9)
    assert of(report, False).label_distance == pytest.approx(stored_distance(np.sort(rows) // 200, 30))
    assert of(report, False).storage_correlation > 0.99


def test_a_split_that_begins_in_the_middle_of_the_file(tmp_path: Path) -> None:
    converted(tmp_path, order="sorted")
    path = tmp_path / "o.h5"
    dataset = max((H5Dataset(path, split=split) for split in ("train", "test")), key=lambda one: one.rows.start)
    first, stop = dataset.rows.start, dataset.rows.stop
    assert first % 7
    with h5py.File(path) as file:
        labels = file["labels"][first:stop]
    report = mixing_report(dataset, 4, epochs=2)
    assert (report.rows, report.chunks) == (stop - first, len({row // 7 for row in range(first, stop)}))
    assert of(report, False).label_distance == pytest.approx(stored_distance(labels, 4))


def test_labels_are_read_once_and_images_never(ordered: H5Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[str, int]] = []
    original = H5Dataset.read_rows

    def spy(self: H5Dataset, name: str, rows: Any, out: Any = None) -> Any:
        read.append((name, len(rows)))
        return original(self, name, rows, out)

    monkeypatch.setattr(H5Dataset, "read_rows", spy)
    mixing_report(ordered, 50)
    assert read == [("labels", 1_000)]


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0}, {"batch_size": 1_001}, {"window": 2.5}, {"epochs": 1}, {"epochs": True}, {"seed": "x"},
        {"windows": []}, {"windows": [4, 0]}, {"windows": "4"}, {"indices": []}, {"dataset": [1, 2, 3]},
    ],
    ids=str,
)  # fmt: skip
def test_invalid_options_are_refused(ordered: H5Dataset, options: dict[str, Any]) -> None:
    if "indices" in options:
        options = {"dataset": Subset(ordered, options["indices"])}
    with pytest.raises(OptionsError) as caught:
        mixing_report(**{"dataset": ordered, **options})
    if "batch_size" in options:
        assert caught.value.parameters[0].partition("=")[0] == "batch_size"


def made(*figures: tuple[int, float, float]) -> tuple[mixing.OrderMixing, ...]:
    """Windows with their label distances and standard errors; then orders that the verdict is not about."""
    orders = [mixing.OrderMixing("window", *figure[:2], 0.0, figure[2], 0.0, 0.0, 1.0) for figure in figures]
    return (*orders, replace(orders[0], shuffle="full", window=None), replace(orders[0], shuffle=False, window=None))


def test_windows_are_tested_from_the_largest_to_the_first_that_fails() -> None:
    for distances, chunks, error, enough in (
        *(((0.2, 0.1, 0.1), 1_000, 0.001, 2), ((0.1, 0.2, 0.1), 1_000, 0.001, 4)),
        ((0.1, 0.1, 0.2), 1_000, 0.001, None),
        # All chunks are a full shuffle, whatever the figures.
        *(((0.2, 0.1, 0.2), 4, 0.001, 2), ((0.2, 0.2, 0.2), 4, 0.001, 4)),
        # Close, but the epochs do not show it.
        ((0.1, 0.1, 0.1), 1_000, 0.1, None),
    ):
        orders = made(*((window, distance, error) for window, distance in zip((1, 2, 4), distances, strict=True)))
        assert mixing._enough(orders, chunks, 0.11, 8) == enough


@pytest.mark.parametrize("epochs", [2, 3, 8, 11, 40])
def test_a_window_at_the_limit_passes_one_time_in_twenty(epochs: int) -> None:
    random, times = np.random.default_rng(epochs), 2_000
    means = random.normal(0.1, 0.002, (times, epochs))
    figures = zip(means.mean(axis=1).tolist(), (means.std(axis=1, ddof=1) / epochs**0.5).tolist(), strict=True)
    passed = sum(mixing._enough(made((1, *figure)), 1_000, 0.1, epochs) == 1 for figure in figures)
    assert passed / times == pytest.approx(0.05, abs=4 * (0.05 * 0.95 / times) ** 0.5)


def test_a_small_excess_that_matters_is_not_called_zero(ordered: H5Dataset) -> None:
    """With more classes than rows in a batch, even the rows of one chunk are far from the labels of all rows."""
    report = mixing_report(ordered, 50, window=4, epochs=2, windows=[50])
    distances = {"expected_distance": 0.9968, "allowed_distance": 0.9970, "enough_window": None}
    assert "0.19 %" in replace(report, **distances, orders=made((4, 0.9987, 0.0001))).advice


def test_the_advice_depends_on_the_epochs(ordered: H5Dataset) -> None:
    report = mixing_report(ordered, 50, window=4, epochs=2, windows=[50])
    limit = report.allowed_distance or 0
    for error, enough, advice in (
        (0.05, None, "Give more epochs: epochs=8"),
        (0.02, None, "Use shuffle='full', or convert in shuffled order: with window=4"),
        (0.02, 50, "Use shuffle='full', or window=50"),
    ):
        changed = replace(report, epochs=8, orders=made((4, 1.05 * limit, error * limit)), enough_window=enough)
        assert changed.advice.startswith(advice)


def test_the_report_as_text_and_json(ordered: H5Dataset) -> None:
    report = mixing_report(ordered, 50, epochs=2)
    assert json.loads(json.dumps(report.to_json()))["orders"][0]["window"] == 1
    assert report.chunk_bytes == CHUNK * 4
    lines = report.to_text().splitlines()
    names = [*(f"window={number}" for number in (1, 2, 4, 8, 16, 32, 50)), "full shuffle", "stored order"]
    assert [line[:14].strip() for line in lines[3 : 3 + len(report.orders)]] == names
    assert len({len(line) for line in lines[2 : 3 + len(report.orders)]}) == 1, "columns are aligned with their titles"
    assert lines[-1] == report.advice == report.to_json()["advice"]
