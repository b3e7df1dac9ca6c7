"""Where chunks stand along the axis: by their bytes, with names that do not touch."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h5pack.bench.figure_axis import ChunkAxis, free_height
from tests.bench import reports

ROW = 116_412


def test_chunks_stand_at_the_logarithm_of_their_bytes_and_others_to_the_right() -> None:
    files = [reports.as_it_is(ROW), *(reports.packed(rows, ROW) for rows in (1, 2, 36)), reports.contiguous(ROW)]
    axis = ChunkAxis(files, 5.0)
    assert [form.label for form in axis.line] == ["1 row", "2 rows", "36 rows"]
    assert [form.label for form in axis.apart] == ["contiguous", "as it is"]
    assert axis.places["2 rows"] - axis.places["1 row"] == pytest.approx(1)
    assert axis.places["36 rows"] == pytest.approx(math.log2(36 * ROW))
    assert axis.border is not None
    assert axis.places["36 rows"] < axis.border < axis.places["contiguous"] < axis.places["as it is"] < axis.limits[1]
    assert axis.place(reports.packed(36, ROW, "gzip")) == axis.places["36 rows"]


@given(
    rows=st.lists(st.integers(1, 4096), max_size=30, unique=True),
    apart=st.integers(0, 2),
    important=st.integers(0, 40),
)
def test_names_do_not_touch(rows: list[int], apart: int, important: int) -> None:
    forms = [reports.packed(count, ROW) for count in sorted(rows)]
    forms += [reports.contiguous(ROW), reports.as_it_is(ROW)][:apart]
    axis = ChunkAxis(forms, 5.0)
    assert set(axis.places) == {form.label for form in forms}
    chosen = forms[important % len(forms)].label if forms else None
    labelled = axis.labelled(chosen, {form.label: f"{form.label}\n1 MiB" for form in forms})
    inches = 5.0 / (axis.limits[1] - axis.limits[0])
    places = [axis.places[form.label] * inches for form in labelled]
    for (form, place), (other, next_place) in pairwise(zip(labelled, places, strict=True)):
        # At 8 points a sign takes less than a sixteenth of an inch.
        assert next_place - place >= (len(form.label) + len(other.label)) / 2 / 16
    assert chosen is None or chosen in [form.label for form in labelled]
    assert {form.label for form in axis.apart} <= {form.label for form in labelled}
    assert all(axis.limits[0] < place < axis.limits[1] for place in axis.places.values())


@given(st.lists(st.floats(0, 100), max_size=12), st.floats(0, 100))
def test_words_stand_where_nothing_is(heights: list[float], close_to: float) -> None:
    height = free_height(heights, 100.0, close_to)
    edges = sorted([0.0, 100.0, *heights])
    widest = max(high - low for low, high in pairwise(edges))
    assert min(abs(height - edge) for edge in edges) >= 0.399 * widest


def test_of_bands_about_as_wide_the_nearest_is_taken() -> None:
    assert free_height([50.0], 100.0, 90.0) == 75.0
    assert free_height([50.0], 100.0, 10.0) == 25.0
    assert free_height([30.0], 100.0, 10.0) == 65.0
