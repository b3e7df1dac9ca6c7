"""Channel statistics are exact integers to the last step."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from h5pack.format import schema
from h5pack.pack.statistics import channel_sums, mean_and_std, sampled_rows


def slow_sums(row: np.ndarray, layout: str) -> list[list[int]]:
    channels = np.moveaxis(row, 2, 0) if layout == "nhwc" else row
    wide = channels.astype(object)
    return [[int(plane.sum()) for plane in wide], [int((plane * plane).sum()) for plane in wide]]


@given(
    st_numpy.arrays(np.uint8, st.tuples(*[st.integers(1, high) for high in (3, 9, 9, 4)])),
    st.sampled_from(["nhwc", "nchw"]),
)
def test_sums_are_those_of_integers(rows: np.ndarray, layout: str) -> None:
    found = channel_sums(list(rows), layout)
    assert found.dtype == np.uint64
    assert found.tolist() == [slow_sums(row, layout) for row in rows]


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize(("count", "side"), [(1, 300), (3, 300), (2, 208), (100, 32), (86, 32)])
def test_sums_of_many_rows_are_those_of_integers(layout: str, count: int, side: int) -> None:
    """Rows are summed together if two of them have at most 128 KiB, which is 42 rows of 32x32 pixels."""
    rows = np.random.default_rng(side).integers(0, 256, (count, side, side, 3), np.uint8)
    rows = rows if layout == "nhwc" else np.ascontiguousarray(rows.transpose(0, 3, 1, 2))
    last = (1, 2) if layout == "nhwc" else (2, 3)
    wide = rows.astype(np.uint64)
    expected = np.stack([wide.sum(last), (wide * wide).sum(last)], axis=1)
    assert np.array_equal(channel_sums(list(rows), layout), expected)


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("height", [1, 255, 256, 257, 258, 259, 511, 513, 3_000])
def test_the_brightest_images_of_any_height_are_exact(layout: str, height: int) -> None:
    random = np.random.default_rng(height)
    # Where float32 would round, sums of odd squares would come out even.
    for low in (255, 254, 0):
        row = random.integers(low, 256, (height, 5, 3)).astype(np.uint8)
        row = row if layout == "nhwc" else np.ascontiguousarray(row.transpose(2, 0, 1))
        assert channel_sums([row], layout).tolist() == [slow_sums(row, layout)]


@pytest.mark.parametrize(
    ("start", "stop", "rows"),
    [(0, 5, 5), (3, 3, 0), (0, 4_095, 4_095), (0, 4_096, 2_048), (100, 8_100, 2_667), (0, 10**6, 2_050)],
)
def test_which_rows_are_sampled(start: int, stop: int, rows: int) -> None:
    sampled = sampled_rows(start, stop)
    assert len(sampled) == rows
    assert sampled.tolist() == list(range(start, stop, schema.statistics_step(stop - start)))


@given(st_numpy.arrays(np.uint8, st.tuples(st.integers(1, 6), st.integers(1, 7), st.integers(1, 5), st.just(3))))
def test_mean_and_std_are_numpys(rows: np.ndarray) -> None:
    total = channel_sums(list(rows), "nhwc").sum(0)
    mean, std = mean_and_std(total, len(rows) * rows.shape[1] * rows.shape[2])
    assert np.allclose(mean, (rows / 255.0).mean((0, 1, 2)), rtol=1e-12, atol=1e-14)
    assert np.allclose(std, (rows / 255.0).std((0, 1, 2)), rtol=1e-9, atol=1e-9)
    assert (std[np.ptp(rows, (0, 1, 2)) == 0] == 0).all()
    assert np.isnan(mean_and_std(np.zeros((2, 3), np.uint64), 0)).all()


def test_a_deviation_that_floats_would_lose() -> None:
    """One value of 2**46 differs by one: in float64 the variance would cancel to nothing."""
    count = 2**46
    total = np.array([[count * 255 - 1], [count * 255**2 - 509]], np.uint64)
    mean, std = mean_and_std(total, 2**46)
    variance = Fraction(count * (count * 255**2 - 509) - (count * 255 - 1) ** 2, (255 * count) ** 2)
    assert std[0] == pytest.approx(math.sqrt(variance), rel=1e-12)
    assert mean[0] == pytest.approx(1)
