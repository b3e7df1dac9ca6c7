"""Copies rows of packs into the file of another pack.

If the file system supports it, disk blocks are shared between the files. Otherwise, rows are read, compared with their
checksums, and written. Threads suffice, because most of this work releases the GIL.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from h5pack.combine.parts import Part, RowOrigins, Rows
from h5pack.format import schema
from h5pack.format.checksums import crc32
from h5pack.format.row_offsets import RowOffsets
from h5pack.read.encoded import EncodedIndex
from h5pack.system.arrays import consecutive_runs
from h5pack.system.files import clone_range, read_all, write_all

_TASK_BYTES = 8 * 1024 * 1024
_BLOCK = schema.ALIGNMENT_BYTES


class RowCopier:
    """Copies the rows of one dataset to their offsets in an unfinished file, from any number of threads.

    `number` is the position of the dataset in `Part.pixel_datasets`. With `resumes`, rows are not copied again if the
    file already has their bytes.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        number: int,
        origins: RowOrigins,
        offsets: RowOffsets,
        checksums: npt.NDArray[np.uint32],
        descriptor: int,
        *,
        resumes: bool,
    ) -> None:
        self._parts, self._number, self._origins = parts, number, origins
        self._offsets, self._checksums, self._descriptor = offsets, checksums, descriptor
        self._resumes = resumes
        self._copied_parts: set[int] = set()  # indices of parts that cannot share disk blocks with the file

    def tasks(self) -> Iterator[tuple[int, int]]:
        """Yield the (start, stop) rows of each task, which are contiguous in the file."""
        for start, count in self._offsets.runs(np.arange(len(self._origins)), _TASK_BYTES):
            yield start, start + count

    def copy(self, task: tuple[int, int]) -> tuple[int, int]:
        """Copy the rows of a task, or share their blocks on disk; return the number of rows, and bytes of copied rows.

        Raises DamagedRowsError if copied rows do not match their checksums, and OSError if writing fails. Shared rows
        are not checked.
        """
        copied = 0
        for owner, start, stop in self._origins.runs(*task):
            if owner not in self._copied_parts and self._clone(owner, start, stop):
                continue
            if self._resumes and self._is_written(start, stop):
                continue
            data = self._read(self._parts[owner], self._origins.rows[start:stop])
            write_all(self._descriptor, data, self._offsets.offset(start))
            copied += len(data)
        return task[1] - task[0], copied

    def _clone(self, owner: int, start: int, stop: int) -> bool:
        """Share the disk blocks of rows that are contiguous in their part; copy the partial blocks at both ends.

        Returns False, without having copied anything, if sharing is not possible.
        """
        part = self._parts[owner]
        source = self._source_range(part, start, stop)
        if source is None:
            return False
        first, count = source
        target = self._offsets.offset(start)
        head = -first % _BLOCK
        middle = (count - head) // _BLOCK * _BLOCK
        if (target - first) % _BLOCK or middle <= 0:
            return False
        descriptor = part.engine.storage.open()
        if not clone_range(descriptor, self._descriptor, first + head, middle, target + head):
            self._copied_parts.add(owner)
            return False
        for begin, end in ((0, head), (head + middle, count)):
            write_all(self._descriptor, read_all(descriptor, end - begin, first + begin), target + begin)
        return True

    def _source_range(self, part: Part, start: int, stop: int) -> tuple[int, int] | None:
        """Return the offset and the size in bytes of rows in their part's file; None if they are not contiguous."""
        rows = self._origins.rows[start:stop]
        index = part.engine.indexes[part.pixel_datasets[self._number]]
        if len(consecutive_runs(rows)) != 2:
            return None
        count = int(self._offsets.edges(start, stop - start)[-1])
        if isinstance(index, EncodedIndex):
            base = index.base if index.library_reason is None else None
            return None if base is None else (base + int(index.offsets[rows[0]]), count)
        first, last = index.offset_of(int(rows[0])), index.offset_of(int(rows[-1]))
        if first is None or last is None or last - first != count - index.row_bytes:
            return None
        return first, count

    def _is_written(self, start: int, stop: int) -> bool:
        edges = self._offsets.edges(start, stop - start).tolist()
        data = memoryview(read_all(self._descriptor, edges[-1], self._offsets.offset(start)))
        wanted = self._checksums[start:stop].tolist()
        if len(data) < edges[-1]:
            return False
        return all(crc32(data[a:b]) == one for (a, b), one in zip(itertools.pairwise(edges), wanted, strict=True))

    def _read(self, part: Part, rows: Rows) -> bytes | memoryview:
        dataset, engine = part.pixel_datasets[self._number], part.engine
        if not isinstance(engine.indexes[dataset], EncodedIndex):
            return part.read_pixels(dataset, rows).reshape(-1).view(np.uint8).data
        found = engine.read_bytes(dataset, rows)
        engine.check(dataset, rows, found)
        return b"".join(found)
