"""Whole chunks of datasets with filters: read, decoded, and kept for the next batch of the same window."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from h5pack.errors import ReadError
from h5pack.read.block import Block
from h5pack.read.chunk_index import ChunkIndex
from h5pack.read.decoded import DecodedChunks
from h5pack.read.reader import H5Reader
from h5pack.read.storage import Storage

_PROBES = 4


class ChunkDecoder:
    """Gives decoded chunks, to any number of threads.

    Parameters
    ----------
    storage : Storage
    reader : H5Reader
        For chunks of which only the HDF5 library can tell how they are stored.
    """

    def __init__(self, storage: Storage, reader: H5Reader) -> None:
        self.storage, self.reader = storage, reader
        self.kept = DecodedChunks()

    def get(self, index: ChunkIndex, chunk: int, *, keep: bool) -> tuple[npt.NDArray[np.uint8], int]:
        """A chunk's bytes, perhaps read-only, and how many bytes were read for it.

        Parameters
        ----------
        index : ChunkIndex
            With a codec.
        chunk : int
        keep : bool
            Keep it for the next one who asks, while there is room.

        Raises
        ------
        ReadError
            If it cannot be read, or decoded.
        PackChangedError
        """
        read = 0

        def load() -> npt.NDArray[np.uint8]:
            nonlocal read
            read = max(0, int(index.sizes[chunk]))
            return self._load(index, chunk)

        return self.kept.get((index.name, chunk), load, keep=keep), read

    def _load(self, index: ChunkIndex, chunk: int) -> npt.NDArray[np.uint8]:
        assert index.codec is not None
        first = chunk * index.chunk_rows
        stop = min(index.rows, first + index.chunk_rows)
        offset, size = int(index.addresses[chunk]), int(index.sizes[chunk])
        if offset < 0:
            return np.tile(np.frombuffer(index.fill, np.uint8), index.chunk_rows)
        if size < 0:
            values = np.empty((stop - first, *index.row_shape), index.native_dtype)
            # It makes sure that the file is still the same.
            self.storage.open()
            self.reader.read(index.name, np.arange(first, stop), values)
            return np.frombuffer(values.astype(index.dtype, copy=False).tobytes(), np.uint8)
        block = Block(size)
        where = f"{index.name!r} rows {first}-{stop - 1}"
        place = np.array([[block.address, size]], np.uint64)
        self.storage.scatter(place, (0, 1), (offset,), lambda _: where)
        try:
            return index.codec.decode(block, int(index.masks[chunk]))
        except ValueError as error:
            self.storage.look()
            raise ReadError(
                f"{self.storage.path}: {where} cannot be decoded ({error}); run 'h5pack verify' on it, then restore "
                "the file or convert again"
            ) from error

    def advise(self, index: ChunkIndex, rows: npt.NDArray[np.int64]) -> None:
        """Have the chunks of some rows fetched from the disk meanwhile, where they are not in memory already."""
        if not len(rows):
            return
        numbers = rows // index.chunk_rows
        chunks = numbers[np.append(True, np.diff(numbers) != 0)]
        chunks = chunks[(index.addresses[chunks] >= 0) & (index.sizes[chunks] > 0)]
        step = max(1, len(chunks) // _PROBES)
        if all(self.storage.is_cached(int(offset)) for offset in index.addresses[chunks[::step]]):
            return
        for offset, size in zip(index.addresses[chunks].tolist(), index.sizes[chunks].tolist(), strict=True):
            self.storage.advise(offset, size)
