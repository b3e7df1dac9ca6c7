"""Values of fields whose rows differ in length: boxes, keypoints, other arrays, texts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.format import schema
from h5pack.format.checksums import crc32
from h5pack.system.arrays import range_indices


@dataclass(frozen=True)
class RaggedRows:
    """Rows of different lengths: row i is ``data[offsets[i]:offsets[i + 1]]``."""

    kind: str  # one of `schema.RAGGED_KINDS`
    data: npt.NDArray[Any]  # (entries, ...); uint8 (bytes,) of text
    offsets: npt.NDArray[np.int64]  # (N + 1,), ascending, the first one 0

    @classmethod
    def of(cls, kind: str, rows: Sequence[npt.NDArray[Any]], empty: npt.NDArray[Any]) -> RaggedRows:
        """Return arrays (n_i, ...) as rows; `empty` is one without entries, which determines dtype and inner shape."""
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        data = np.concatenate([empty, *rows]).astype(empty.dtype, copy=False)
        return cls(kind, data, np.append(0, np.cumsum(lengths)))

    @classmethod
    def of_texts(cls, rows: Iterable[str | list[str]], kind: str) -> RaggedRows:
        """Return texts, or lists of texts of kind `schema.TEXTS`, as rows; they must not contain NUL."""
        encoded = [
            (row if isinstance(row, str) else "".join(f"{one}\0" for one in row)).encode("utf-8") for row in rows
        ]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return cls(kind, np.frombuffer(b"".join(encoded), np.uint8), np.append(0, np.cumsum(lengths)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, indices: npt.NDArray[np.int64]) -> RaggedRows:
        starts, lengths = self.offsets[indices], np.diff(self.offsets)[indices]
        return RaggedRows(self.kind, self.data[range_indices(starts, lengths)], np.append(0, np.cumsum(lengths)))

    @property
    def nbytes(self) -> int:
        """Bytes of the data and the offsets."""
        return int(self.data.nbytes + self.offsets.nbytes)

    def row(self, index: int) -> npt.NDArray[Any]:
        """Return the entries of a row, (n_i, ...)."""
        return self.data[self.offsets[index] : self.offsets[index + 1]]

    def values(self) -> list[Any]:
        """Return the value of each row: an array (n_i, ...), a str or a list of str.

        Raises UnicodeDecodeError if text is not valid UTF-8.
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
        view = memoryview(np.ascontiguousarray(self.data).reshape(-1).view(np.uint8))
        edges = (self.offsets * entry).tolist()
        pairs = itertools.pairwise(edges)
        return np.fromiter((crc32(view[start:stop]) for start, stop in pairs), np.uint32, len(self))


FieldValues = npt.NDArray[Any] | RaggedRows
"""The values of a field: an array (N, ...), or rows of different lengths."""


def field_kind(values: FieldValues) -> str:
    """Return the kind of a field, one of `schema.RAGGED_KINDS` or "array"."""
    return values.kind if isinstance(values, RaggedRows) else schema.ARRAY
