"""Chunks that are not just rows: read, decoded, put together, and kept for the next batch of the same window."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from h5pack.errors import DamagedRowsError
from h5pack.read.block import Block
from h5pack.read.chunk_index import ChunkIndex
from h5pack.read.decoded import DecodedChunks
from h5pack.read.reader import H5Reader
from h5pack.read.storage import Storage

_FEW = 4
"""Less than one row in so many of a chunk is few, for which reading all of it does not pay."""


class ChunkDecoder:
    """Gives decoded chunks, to any number of threads.

    Parameters
    ----------
    storage : Storage
    reader : H5Reader
        For chunks of which only the HDF5 library can tell how they are stored.
    kept : DecodedChunks, optional
        That other files' chunks are kept in, too; None: its own.
    """

    def __init__(self, storage: Storage, reader: H5Reader, kept: DecodedChunks | None = None) -> None:
        self.storage, self.reader = storage, reader
        self.kept = DecodedChunks() if kept is None else kept
        self._whose = () if kept is None else (storage.path,)

    def take(
        self, index: ChunkIndex, rows: npt.NDArray[np.int64], *, keep: bool
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], int, int]:
        """Bytes of some rows of one chunk.

        Parameters
        ----------
        index : ChunkIndex
            With a codec.
        rows : ndarray
            int64, (n,).
        keep : bool
            Keep the chunk for the next one who asks, while there is room.

        Returns
        -------
        values : ndarray
            uint8: rows one behind the other, perhaps read-only.
        places : ndarray
            int64, (n,): which of them are those asked for.
        read, calls : int
            Bytes that were read for it, and calls.

        Raises
        ------
        ReadError
            If it cannot be read.
        DamagedRowsError
            If it cannot be decoded.
        PackChangedError
        """
        assert index.codec is not None
        chunk = int(rows[0]) // index.chunk_rows
        key = (*self._whose, index.name, chunk)
        if not index.codec.steps and len(rows) * _FEW < index.chunk_rows and not self.kept.has(key):
            # Of pieces that are stored as they are, HDF5 reads just the rows' bytes.
            values, calls = self.through_library(index, rows)
            return values.reshape(-1), np.arange(len(rows)), values.nbytes, calls
        read = 0

        def load() -> npt.NDArray[np.uint8]:
            nonlocal read
            read = int(np.maximum(index.sizes[chunk], 0).sum())
            return self._load(index, chunk)

        loaded = self.kept.get(key, load, keep=keep)
        return loaded, rows - chunk * index.chunk_rows, read, int(read > 0)

    def _load(self, index: ChunkIndex, chunk: int) -> npt.NDArray[np.uint8]:
        """The rows of a chunk, or of the chunks that hold their pieces; behind the last row there may be anything."""
        first = chunk * index.chunk_rows
        stop = min(index.rows, first + index.chunk_rows)
        if (index.sizes[chunk] < 0).any():
            return self.through_library(index, np.arange(first, stop))[0].reshape(-1)
        if index.piece_shape is None:
            offset = int(index.addresses[chunk])
            if offset < 0:
                return np.tile(np.frombuffer(index.fill, np.uint8), index.chunk_rows)
            return self._decode(index, chunk, offset, int(index.sizes[chunk]), int(index.masks[chunk]))
        return self._put_together(index, chunk)

    def _put_together(self, index: ChunkIndex, chunk: int) -> npt.NDArray[np.uint8]:
        """Rows out of the chunks that hold their pieces."""
        assert index.piece_shape is not None
        rows = np.empty((index.chunk_rows, *index.row_shape), index.dtype)
        fill = np.frombuffer(index.fill, index.dtype).reshape(index.row_shape) if index.fill else None
        inner = index.piece_shape[1:]
        grid = [-(-size // piece) for size, piece in zip(index.row_shape, inner, strict=True)]
        addresses, sizes, masks = (
            part[chunk].reshape(-1).tolist() for part in (index.addresses, index.sizes, index.masks)
        )
        for number, place in enumerate(np.ndindex(*grid)):
            begins = [step * piece for step, piece in zip(place, inner, strict=True)]
            ends = [min(begin + piece, size) for begin, piece, size in zip(begins, inner, index.row_shape, strict=True)]
            target = tuple(slice(begin, end) for begin, end in zip(begins, ends, strict=True))
            there = (slice(None), *target)
            if addresses[number] < 0:
                assert fill is not None
                rows[there] = fill[target]
                continue
            data = self._decode(index, chunk, addresses[number], sizes[number], masks[number])
            kept = (slice(None), *(slice(0, end - begin) for begin, end in zip(begins, ends, strict=True)))
            rows[there] = data.view(index.dtype).reshape(index.piece_shape)[kept]
        return rows.reshape(-1).view(np.uint8)

    def _decode(self, index: ChunkIndex, chunk: int, offset: int, size: int, mask: int) -> npt.NDArray[np.uint8]:
        assert index.codec is not None
        first = chunk * index.chunk_rows
        stop = min(index.rows, first + index.chunk_rows)
        where = f"{index.name!r} rows {first}-{stop - 1}"
        block = Block(size)
        place = np.array([[block.address, size]], np.uint64)
        self.storage.scatter(place, (0, 1), (offset,), lambda _: where)
        try:
            return index.codec.decode(block, mask)
        except ValueError as error:
            self.storage.look()
            raise DamagedRowsError(
                f"{self.storage.path}: {where} cannot be decoded ({error}); run 'h5pack verify' on it, then restore "
                "the file or convert again",
                tuple(range(first, stop)),
            ) from error

    def through_library(self, index: ChunkIndex, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint8], int]:
        """Rows as they are stored, (n, row_bytes), by way of the HDF5 library, which reads just them; and its calls."""
        values = np.empty((len(rows), *index.row_shape), index.native_dtype)
        # It makes sure that the file is still the same.
        self.storage.open()
        calls = self.reader.read(index.name, rows, values)
        return values.astype(index.dtype, copy=False).reshape(len(rows), -1).view(np.uint8), calls

    def advise(self, index: ChunkIndex, rows: npt.NDArray[np.int64]) -> None:
        """Have the chunks of some rows fetched from the disk meanwhile, where they are not in memory already."""
        if not len(rows):
            return
        numbers = rows // index.chunk_rows
        chunks = numbers[np.append(True, np.diff(numbers) != 0)]
        addresses, sizes = index.addresses[chunks].reshape(-1), index.sizes[chunks].reshape(-1)
        there = (addresses >= 0) & (sizes > 0)
        self.storage.fetch(addresses[there].tolist(), sizes[there].tolist())
