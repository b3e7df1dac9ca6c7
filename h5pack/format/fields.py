"""Values of fields, mainly of fields whose rows differ in length: boxes, keypoints, other arrays, texts."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.errors import OptionsError
from h5pack.format import schema
from h5pack.format.checksums import crc32, row_checksums
from h5pack.system.arrays import range_indices
from h5pack.system.text import short_repr


@dataclass(frozen=True)
class RaggedRows:
    """Rows of different lengths: row i is ``data[offsets[i]:offsets[i + 1]]``."""

    kind: str  # one of `schema.RAGGED_KINDS`
    data: npt.NDArray[Any]  # (entries, ...); for texts, their UTF-8 bytes, uint8 (bytes,)
    offsets: npt.NDArray[np.int64]  # (N + 1,), ascending from 0
    classes: tuple[str, ...] | None = None  # class names, if the entries are class numbers

    @classmethod
    def of(cls, kind: str, rows: Sequence[npt.NDArray[Any]], empty: npt.NDArray[Any]) -> RaggedRows:
        """Create rows from arrays (n_i, ...). `empty`, an array (0, ...), sets the dtype and the shape of an entry."""
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        # Without `dtype`, NumPy would join int64 and uint64 arrays to float64, which rounds large integers.
        data = np.concatenate([empty, *rows], dtype=empty.dtype, casting="unsafe")
        return cls(kind, data, np.append(0, np.cumsum(lengths)))

    @classmethod
    def of_texts(cls, rows: Iterable[str | list[str]], kind: str) -> RaggedRows:
        """Create rows from texts, or from lists of texts for the kind `schema.TEXTS`. Texts must not contain NUL."""
        encoded = [
            (row if isinstance(row, str) else "".join(f"{one}\0" for one in row)).encode("utf-8") for row in rows
        ]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return cls(kind, np.frombuffer(b"".join(encoded), np.uint8), np.append(0, np.cumsum(lengths)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, indices: npt.NDArray[np.int64]) -> RaggedRows:
        starts, lengths = self.offsets[indices], np.diff(self.offsets)[indices]
        offsets = np.append(0, np.cumsum(lengths))
        return RaggedRows(self.kind, self.data[range_indices(starts, lengths)], offsets, self.classes)

    @property
    def nbytes(self) -> int:
        """Total size of the data and the offsets in bytes."""
        return int(self.data.nbytes + self.offsets.nbytes)

    def row(self, index: int) -> npt.NDArray[Any]:
        """Return the entries of row number `index`, (n_i, ...)."""
        return self.data[self.offsets[index] : self.offsets[index + 1]]

    def values(self) -> list[Any]:
        """Return a list with one value per row.

        A value is a str for the kind "text", a list of str for the kind "texts", and an array (n_i, ...) for other
        kinds. Raises UnicodeDecodeError if a text is not UTF-8.
        """
        edges = self.offsets.tolist()
        if self.kind not in schema.TEXT_KINDS:
            return [self.data[start:stop] for start, stop in itertools.pairwise(edges)]
        data = self.data.tobytes()
        texts = [data[start:stop].decode() for start, stop in itertools.pairwise(edges)]
        return [text.split("\0")[:-1] for text in texts] if self.kind == schema.TEXTS else texts

    def checksums(self) -> npt.NDArray[np.uint32]:
        """Return the CRC-32 of each row's bytes, uint32 (N,)."""
        entry = self.data.dtype.itemsize * math.prod(self.data.shape[1:])
        view = np.ascontiguousarray(self.data).reshape(-1).view(np.uint8)
        edges = (self.offsets * entry).tolist()
        pairs = itertools.pairwise(edges)
        return np.fromiter((crc32(view[start:stop]) for start, stop in pairs), np.uint32, len(self))


FieldValues = npt.NDArray[Any] | RaggedRows
"""The values of a field: an array (N, ...), or rows of different lengths."""


def field_kind(values: FieldValues) -> str:
    """Return the kind of a field, one of `schema.RAGGED_KINDS` or "array"."""
    return values.kind if isinstance(values, RaggedRows) else schema.ARRAY


def field_data(values: FieldValues) -> npt.NDArray[Any]:
    """Return the array that holds a field's values: (N, ...), or, if rows differ in length, all entries, (M, ...)."""
    return values.data if isinstance(values, RaggedRows) else values


def as_ragged(values: FieldValues) -> FieldValues:
    """Return an array of rows, (N, n, ...), as ragged rows of one length; single numbers and ragged rows unchanged."""
    if isinstance(values, RaggedRows) or values.ndim < 2:
        return values
    count, length, *entry = values.shape
    return RaggedRows(schema.RAGGED, values.reshape(count * length, *entry), np.arange(count + 1) * length)


def field_checksums(values: FieldValues) -> npt.NDArray[np.uint32]:
    """Return the CRC-32 of each row's bytes, uint32 (N,)."""
    return values.checksums() if isinstance(values, RaggedRows) else row_checksums(values)


def row_bytes(values: FieldValues, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the number of bytes that each of the `rows`, int64 (n,), of a field takes in a pack, int64 (n,).

    Includes the row's offset, if the field has offsets, but not the row's checksum.
    """
    data = field_data(values)
    entry = data.dtype.itemsize * math.prod(data.shape[1:])
    if not isinstance(values, RaggedRows):
        return np.full(len(rows), entry)
    return (values.offsets[rows + 1] - values.offsets[rows]) * entry + 8


BOX_FORMATS = ("xyxy", "xywh", "cxcywh")
"""The formats of a box, in this order:

(left, top, right, bottom), (left, top, width, height) and (center x, center y, width, height).
"""


class FieldValueError(ValueError):
    """The value of row `row` does not fit its field.

    The message begins with a verb, such as "contains 'a', which is not a list". Callers put the field's name before it.
    """

    def __init__(self, row: int, problem: str, *parameters: str) -> None:
        super().__init__(problem)
        self.row, self.parameters = row, parameters  # `parameters` are the names of parameters in the message.


def parse_ragged(values: Sequence[Any], kind: str = schema.RAGGED, box_format: str = schema.XYXY) -> RaggedRows:
    """Return lists of numbers, or arrays, as rows of kind `kind`; None counts as an empty list.

    Boxes are converted from `box_format` to corners (xyxy). Boxes and keypoints become float64. Values of the kind
    "ragged" become int64 if there are numbers and all are integers or bools. Otherwise they become float64.

    Raises FieldValueError in these cases:

    - A value is not a list of numbers, or contains an integer that does not fit into int64.
    - Lists differ in depth, or in the shape of their entries.
    - An entry of a list of boxes does not have 4 numbers, or an entry of a list of keypoints does not have 2 or 3.
    - A number of a box or keypoint is not finite.
    - A box has a negative width or height.
    """
    shapes, inner = schema.KINDS[kind].shapes, None
    arrays: list[npt.NDArray[Any] | None] = []
    kinds: set[str] = set()
    for row, value in enumerate(values):
        array = _numbers_of(row, value)
        if array is not None:
            if inner is None and (not shapes or array.shape[1:] in shapes):
                inner = array.shape[1:]
            if array.shape[1:] != inner:
                wanted = _entries_text(*shapes) if inner is None else _entries_text(inner)
                raise FieldValueError(row, f"has {_entries_text(array.shape[1:])} as entries, which must be {wanted}")
            kinds.add(array.dtype.kind)
        arrays.append(array)
    dtype = np.int64 if kind == schema.RAGGED and kinds and kinds <= set("biu") else np.float64
    empty = np.zeros((0, *(inner or next(iter(shapes), ()))), dtype)
    found = RaggedRows.of(kind, [empty if array is None else array for array in arrays], empty)
    if kind != schema.RAGGED:
        _require_numbers(found, ~np.isfinite(found.data).all(axis=1), "which is not finite")
    return _corners(found, box_format) if kind == schema.BOXES else found


def _numbers_of(row: int, value: Any) -> npt.NDArray[Any] | None:
    """Return a list of numbers as an array; None if `value` is None or has no entries."""
    if value is None:
        return None
    if not isinstance(value, (list, tuple, np.ndarray)) or (isinstance(value, np.ndarray) and not value.ndim):
        raise FieldValueError(row, f"contains {short_repr(value)}, which is not a list")
    try:
        array = np.asarray(value)
    except ValueError:
        raise FieldValueError(row, "contains lists of different lengths or depths") from None
    if not len(array):
        return None
    fits = array.size and array.dtype.kind in "biuf" and (array.dtype != np.uint64 or array.max() < 2**63)
    if not fits or _is_rounded(value, array):
        problem = "whose entries are neither floats nor integers that fit into int64"
        raise FieldValueError(row, f"contains {short_repr(value)}, {problem}")
    return array


def _is_rounded(value: Any, array: npt.NDArray[Any]) -> bool:
    """Return whether `value` has only integers, but `array`, which NumPy made of it, has floats.

    NumPy does so if some of the integers are below 2**63 and others are not.
    """
    if isinstance(value, np.ndarray) or array.dtype != np.float64 or not np.abs(array).max(initial=0) >= 2**63:
        return False
    return all(isinstance(number, Integral) for number in np.asarray(value, object).flat)


def _entries_text(*shapes: tuple[int, ...]) -> str:
    sizes = ["x".join(map(str, shape)) for shape in shapes]
    return f"lists of {' or '.join(sizes)} numbers" if any(sizes) else "single numbers"


def is_numeric_dtype(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is bool, or a real number type of at most 64 bits.

    PyTorch has no larger real numbers, such as NumPy's long double.
    """
    return dtype.kind in "biuf" and dtype.itemsize <= 8


def _require_numbers(rows: RaggedRows, wrong: Any, problem: str, *parameters: str) -> None:
    if wrong.any():
        entry = int(wrong.argmax())
        row = int(np.searchsorted(rows.offsets, entry, "right")) - 1
        raise FieldValueError(row, f"contains {rows.data[entry].tolist()}, {problem}", *parameters)


def _corners(boxes: RaggedRows, box_format: str) -> RaggedRows:
    """Convert boxes from `box_format`, one of `BOX_FORMATS`, to corners."""
    first, second = boxes.data[:, :2], boxes.data[:, 2:]
    if box_format == schema.XYXY:
        problem = "whose right or bottom is less than its left or top (is it a box of box_format='xywh'?)"
        _require_numbers(boxes, (second < first).any(axis=1), problem, "box_format='xywh'")
        return boxes
    _require_numbers(boxes, (second < 0).any(axis=1), "whose width or height is negative")
    if box_format == "cxcywh":
        first = first - second / 2
    return RaggedRows(boxes.kind, np.concatenate([first, first + second], axis=1), boxes.offsets)


def parse_values(values: Sequence[Any]) -> FieldValues:
    """Return one field's values as rows. Each value is a text, a list of texts, a number, an array, or None.

    - If there are texts, `parse_texts` converts all values.
    - Numbers, and arrays of one shape, become an array (N, ...), in which None becomes NaN, or 0 if they are integers.
    - Arrays that differ only in length become ragged rows, in which None becomes a row without entries. An empty list
      counts as such an array, whatever the shape of the other arrays' entries.

    The dtype of numbers is the one to which NumPy promotes the dtypes of all values, with two exceptions:

    - If NumPy would promote values that are all integers or bools to floats, they become int64 or uint64 instead.
    - If all values are bools, they become uint8.

    Raises FieldValueError for values of other types, and for values that cannot be rows of one field.
    """
    if any(isinstance(value, str) or _is_texts(value) for value in values):
        return parse_texts(values)
    given = {row: _as_array(row, value) for row, value in enumerate(values) if value is not None}
    # Leave out empty lists, because the dtype and the shape of their entries are unknown.
    arrays = {row: array for row, array in given.items() if array.shape != (0,)}
    first = next(iter(arrays.values()), np.zeros((0,) if given else ()))
    for row, array in arrays.items():
        if not is_numeric_dtype(array.dtype):
            problem = "which is neither text nor real numbers of up to 64 bits"
            raise FieldValueError(row, f"is {short_repr(values[row])}, {problem}")
        beside_lists = not array.ndim and len(arrays) < len(given)
        expected = "others are lists" if beside_lists else f"others have {first.shape}"
        if beside_lists or array.ndim != first.ndim or array.shape[1:] != first.shape[1:]:
            raise FieldValueError(row, f"has the shape {array.shape}, but {expected}")
    dtype = np.result_type(first.dtype, *{array.dtype for array in arrays.values()})
    dtype = np.dtype(np.uint8) if dtype.kind == "b" else dtype
    if arrays and dtype.kind == "f" and all(array.dtype.kind in "biu" for array in arrays.values()):
        dtype = np.dtype(np.uint64 if max(int(one.max(initial=0)) for one in arrays.values()) >= 2**63 else np.int64)
        for row, array in arrays.items():
            if dtype.kind == "u" and int(array.min(initial=0)) < 0:
                problem = "which does not fit into uint64, but other integers do not fit into int64"
                raise FieldValueError(row, f"is {short_repr(values[row])}, {problem}")
    if len({array.shape for array in arrays.values()}) < 2 and len(arrays) == len(given):
        fixed = np.full((len(values), *first.shape), np.nan if dtype.kind == "f" else 0, dtype)
        for row, array in arrays.items():
            fixed[row] = array
        return fixed
    empty = np.zeros((0, *first.shape[1:]), dtype)
    return RaggedRows.of(schema.RAGGED, [arrays.get(row, empty) for row in range(len(values))], empty)


def _as_array(row: int, value: Any) -> npt.NDArray[Any]:
    array = np.asarray(value)
    if not _is_rounded(value, array):
        return array
    if array.min() < 0:
        raise FieldValueError(row, f"is {short_repr(value)}, whose integers fit neither into int64 nor into uint64")
    return np.array(value, np.uint64)


def _is_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(text, str) for text in value)


def parse_texts(values: Sequence[Any]) -> RaggedRows:
    """Return texts, or lists of texts, as rows. If one value is a list, all must be lists or None.

    None counts as an empty list if other values are lists, else as an empty text. Raises FieldValueError for other
    values, and for a text with a NUL or an unpaired surrogate.
    """
    several = any(isinstance(value, (list, tuple)) for value in values)
    rows: list[Any] = []
    for row, value in enumerate(values):
        texts = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        if several and not isinstance(value, (list, tuple, type(None))):
            raise FieldValueError(row, f"contains {short_repr(value)}, which is not a list, but other values are lists")
        for text in texts:
            if not isinstance(text, str):
                raise FieldValueError(row, f"contains {short_repr(text)}, which is not a text")
            if "\0" in text or not _is_unicode(text):
                raise FieldValueError(row, f"contains {short_repr(text)}, which has a NUL or an unpaired surrogate")
        rows.append(list(texts) if several else (texts[0] if texts else ""))
    return RaggedRows.of_texts(rows, schema.TEXTS if several else schema.TEXT)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_field_name(name: str) -> bool:
    """Return whether the format allows this name for a field."""
    is_text = name != "" and "\0" not in name and _is_unicode(name)
    return is_text and name not in schema.RESERVED and "/" not in name and not name.startswith(".")


def field_name(path: str) -> str:
    """Return the name of the field that a dataset becomes: the last part of its path.

    If packs reserve that name, "_" is appended, e.g. "labels_".
    """
    name = os.path.basename(path)
    return f"{name}_" if name in schema.RESERVED else name


def require_field_names(where: str, names: Sequence[str], path: str | os.PathLike[str] | None = None) -> None:
    """Raise OptionsError if a name is not allowed for a field, or not unique. The message begins with `where`."""
    for number, name in enumerate(names):
        is_double = name in names[:number]
        if is_double or not is_field_name(name):
            why = "packs reserve it, or it is empty, contains '/', NUL or an unpaired surrogate, or begins with '.'"
            problem = f"{name!r} cannot be the name of a field, because {'another field has it' if is_double else why}"
            raise OptionsError(f"{where}: {problem}; rename it or leave it out", path=path)
