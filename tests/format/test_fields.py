"""Values of fields whose rows differ in length."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

from h5pack.errors import OptionsError
from h5pack.format.fields import (
    FieldValueError,
    RaggedRows,
    parse_ragged,
    parse_texts,
    parse_values,
    require_field_names,
    row_bytes,
)

TEXTS = ["", "plain", "zwei\nZeilen\r", "雪 é 🙂", ""]
LISTS = [[], ["one"], ["", "two\n"], ["雪"] * 3, []]


@pytest.mark.parametrize(("kind", "values"), [("text", TEXTS), ("texts", LISTS)])
def test_texts_are_the_bytes_of_utf8(kind: str, values: list[Any]) -> None:
    rows = RaggedRows.of_texts(values, kind)
    assert rows.values() == values
    joined = [text if isinstance(text, str) else "".join(f"{one}\0" for one in text) for text in values]
    stored = [text.encode() for text in joined]
    assert [rows.row(number).tobytes() for number in range(len(rows))] == stored
    assert rows.checksums().tolist() == [zlib.crc32(data) for data in stored]
    order = np.array([3, 0, 3, 2])
    assert rows[order].values() == [values[number] for number in order]


def test_arrays_are_joined_and_taken_as_numpy_would() -> None:
    random = np.random.default_rng(0)
    arrays = [random.integers(0, 9, (random.integers(0, 4), 2, 3), np.int16) for _ in range(20)]
    rows = RaggedRows.of("ragged", arrays, np.zeros((0, 2, 3), np.int16))
    assert (len(rows), rows.data.shape[0], rows.data.dtype) == (20, sum(map(len, arrays)), np.int16)
    assert rows.checksums().tolist() == [zlib.crc32(array.tobytes()) for array in arrays]
    indices = random.integers(0, 20, 50)
    for found, number in zip(rows[indices].values(), indices.tolist(), strict=True):
        np.testing.assert_array_equal(found, arrays[number], strict=True)
    assert len(rows[np.zeros(0, np.int64)]) == 0


@pytest.mark.parametrize(
    ("values", "dtype", "shape"),
    [
        ([[1, 2], [], None, [3]], np.int64, (3,)),
        ([[1], [2.5]], np.float64, (2,)),
        ([[True], [False, True]], np.int64, (3,)),
        ([[[1, 2]], [], [[3, 4], [5, 6]]], np.int64, (3, 2)),
        ([np.ones((2, 3, 4), np.float32), None], np.float64, (2, 3, 4)),
        ([np.array([2**62 + 1], np.uint64), [-1]], np.int64, (2,)),
        ([[1, 2.0**63], [2**63, 0.5]], np.float64, (4,)),
        ([[], None], np.float64, (0,)),
    ],
)
def test_lists_of_one_depth_are_ragged(values: list[Any], dtype: Any, shape: tuple[int, ...]) -> None:
    rows = parse_ragged(values)
    assert (rows.kind, rows.data.dtype, rows.data.shape) == ("ragged", dtype, shape)
    assert [len(found) for found in rows.values()] == [0 if value is None else len(value) for value in values]
    for found, value in zip(rows.values(), values, strict=True):
        assert value is None or not len(value) or np.array_equal(found, value)


@pytest.mark.parametrize(
    ("values", "row"),
    [
        ([[1], 2], 1),
        ([[1], "x"], 1),
        ([[1], {"a": 1}], 1),
        ([[[1, 2]], [[1, 2], [3]]], 1),
        ([[1], [[1]]], 1),
        ([[[1, 2]], [[1, 2, 3]]], 1),
        ([["a"]], 0),
        ([[None]], 0),
        ([[1], [2**64]], 1),
        ([[2**63]], 0),
        ([[1], [1, 2**63]], 1),
        ([[1], [np.int64(1), np.uint64(2**63)]], 1),
        ([[[1, -(2**63) - 1]]], 0),
        ([[[]]], 0),
        ([[1], np.array(5)], 1),
    ],
)
def test_lists_that_do_not_fit_together_are_an_error(values: list[Any], row: int) -> None:
    with pytest.raises(FieldValueError) as caught:
        parse_ragged(values)
    assert caught.value.row == row


@pytest.mark.parametrize(
    ("box_format", "box"), [("xyxy", [1, 2, 4, 6]), ("xywh", [1, 2, 3, 4]), ("cxcywh", [2.5, 4, 3, 4])]
)
def test_boxes_become_corners(box_format: str, box: list[float]) -> None:
    rows = parse_ragged([[], [box, box]], "boxes", box_format)
    assert rows.data.tolist() == [[1, 2, 4, 6]] * 2
    assert rows.offsets.tolist() == [0, 0, 2]
    assert parse_ragged([None], "boxes", box_format).data.shape == (0, 4)


@pytest.mark.parametrize(
    ("kind", "box_format", "entry"),
    [
        ("boxes", "xyxy", [1, 2, 3]),
        ("boxes", "xyxy", [3, 2, 1, 4]),
        ("boxes", "xywh", [1, 2, -1, 4]),
        ("boxes", "cxcywh", [1, 2, 1, -4]),
        ("boxes", "xyxy", [1, 2, float("nan"), 4]),
        ("boxes", "xyxy", 5),
        ("keypoints", "xyxy", [1]),
        ("keypoints", "xyxy", [1, float("inf")]),
        ("keypoints", "xyxy", [1, 2, 3, 4]),
    ],
)
def test_other_boxes_and_points_are_an_error(kind: str, box_format: str, entry: Any) -> None:
    with pytest.raises(FieldValueError) as caught:
        parse_ragged([[], [entry]], kind, box_format)
    assert caught.value.row == 1


@pytest.mark.parametrize("point", [[1, 2], [1, 2, 0]])
def test_points_have_two_or_three_numbers(point: list[int]) -> None:
    assert parse_ragged([[], [point]], "keypoints").data.tolist() == [point]
    with pytest.raises(FieldValueError):
        parse_ragged([[[1, 2]], [[1, 2, 3]]], "keypoints")


def test_texts_are_one_or_several() -> None:
    one, several = parse_texts(["a", None, ""]), parse_texts([["a", ""], None, []])
    assert (one.kind, one.values()) == ("text", ["a", "", ""])
    assert (several.kind, several.values()) == ("texts", [["a", ""], [], []])
    for values in (["a", 1], ["a", ["b"]], [["a", 1]], ["a", "\0"], ["a", "\ud800"], [["a"], ["\udc00"]]):
        with pytest.raises(FieldValueError):
            parse_texts(values)


@pytest.mark.parametrize(
    ("values", "kind", "found"),
    [
        ([1, None, 3], "array", np.array([1, 0, 3])),
        ([True, False], "array", np.array([1, 0], np.uint8)),
        ([np.float32(1), 2.5], "array", np.array([1, 2.5])),
        ([np.ones((2, 3), np.int8), None], "array", np.stack([np.ones((2, 3), np.int8), np.zeros((2, 3), np.int8)])),
        ([np.ones((1, 4), np.float32), None, np.zeros((0, 4), np.float32)], "ragged", [[[1] * 4], [], []]),
        ([[1, 2], [], [3]], "ragged", [[1, 2], [], [3]]),
        ([[1, 2], []], "ragged", [[1, 2], []]),
        ([[], []], "ragged", [[], []]),
        (["a", None], "text", ["a", ""]),
        ([["a"], [], None], "texts", [["a"], [], []]),
        ([None], "array", np.array([np.nan])),
        ([0.5, None], "array", np.array([0.5, np.nan])),
        ([np.float32([1, 2]), None], "array", np.array([[1, 2], [np.nan, np.nan]], np.float32)),
        ([2**63 + 1, 5, 2**63 + 3], "array", np.array([2**63 + 1, 5, 2**63 + 3], np.uint64)),
        ([np.uint64(7), -1], "array", np.array([7, -1])),
        ([[2**63 + 1, 5], [1, 2]], "array", np.array([[2**63 + 1, 5], [1, 2]], np.uint64)),
        ([1e300, 2.0], "array", np.array([1e300, 2.0])),
    ],
)
def test_values_of_samples_become_the_field_that_holds_them(values: list[Any], kind: str, found: Any) -> None:
    made = parse_values(values)
    if kind == "array":
        np.testing.assert_array_equal(made, found, strict=True)
        return
    assert made.kind == kind
    assert [value if isinstance(value, (str, list)) else value.tolist() for value in made.values()] == found
    if kind == "ragged":
        assert made.data.dtype == np.asarray(values[0]).dtype


@pytest.mark.parametrize(
    "values",
    [
        [1, [1]], [1, []], [[[1]], [1]], [np.ones((1, 2)), np.ones((1, 3))], [1, "a"], [1j],
        [2**63, -1], [[2**63, -1]], [2**64, 1],
    ],
)  # fmt: skip
def test_values_of_samples_that_do_not_fit_together_are_an_error(values: list[Any]) -> None:
    with pytest.raises(FieldValueError):
        parse_values(values)


def test_the_bytes_of_rows_are_those_of_their_entries_and_offsets() -> None:
    assert row_bytes(np.zeros((3, 2, 4), np.int16), np.arange(3)).tolist() == [16] * 3
    assert row_bytes(parse_texts(["a", "", "xyz"]), np.arange(3)).tolist() == [9, 8, 11]
    assert row_bytes(parse_ragged([[[1, 2]], []]), np.arange(2)).tolist() == [24, 8]
    assert row_bytes(parse_texts(["a", "", "xyz"]), np.array([2, 0])).tolist() == [11, 9]


def test_names_that_cannot_be_fields_are_an_error() -> None:
    require_field_names("x", ["age", "größe", "label.1"])
    for names in (["labels"], [""], ["a/b"], [".x"], ["a\0"], ["\ud83d"], ["\udcff"], ["a", "a"]):
        with pytest.raises(OptionsError):
            require_field_names("x", names)
