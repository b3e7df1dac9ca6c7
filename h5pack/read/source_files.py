"""The files that an engine reads from: its own, and those that virtual datasets take their rows from."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from h5pack.read.chunk_decoder import ChunkDecoder
from h5pack.read.chunk_index import ChunkIndex
from h5pack.read.identity import SourceFile
from h5pack.read.reader import H5Reader
from h5pack.read.runs import plan_runs
from h5pack.read.spans import read_spans
from h5pack.read.storage import LOOK_SECONDS, Storage
from h5pack.read.virtual_index import VirtualIndex, is_empty

_MOST_FILES = 256
"""Files that stay open at once, at most. Each may take a descriptor, and another one with the HDF5 library."""

Taken = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], int, int]


def most_files() -> int:
    """Files to keep open at once: few beside the descriptors that this process may have."""
    if not hasattr(os, "sysconf"):
        return _MOST_FILES
    descriptors = os.sysconf("SC_OPEN_MAX")
    return _MOST_FILES if descriptors < 0 else max(1, min(_MOST_FILES, descriptors // 8))


class SourceFiles:
    """Opens each file on its first read in each process, and lets go of the oldest where there are many.

    Parameters
    ----------
    own : ChunkDecoder
        Over the engine's own file; the chunks that it keeps are those of all files.
    most : int
        Files to keep open at once, besides the own one.
    """

    def __init__(self, own: ChunkDecoder, most: int | None = None) -> None:
        self.own = own
        self.most = most_files() if most is None else most
        self._opened: dict[SourceFile, ChunkDecoder] = {}
        self._looked: dict[str, float] = {}

    def close(self) -> None:
        """Close all files in this process, once running reads are done; the next read opens them again."""
        self.own.storage.close()
        self.own.reader.close()
        self.own.kept.clear()
        # A file is closed with the last who reads from it.
        self._opened = {}
        self._looked.clear()

    def of(self, file: SourceFile) -> ChunkDecoder:
        """What reads from a file, and decodes its chunks."""
        if file.path == self.own.storage.path and file.identity == self.own.storage.identity:
            return self.own
        opened = self._opened
        found = opened.get(file)
        if found is None:
            storage, reader = Storage(file.path, file.identity), H5Reader(file.path, file.identity)
            # One step of the interpreter, so of two threads that come at once one wins; and no lock stays locked in a
            # forked child.
            found = opened.setdefault(file, ChunkDecoder(storage, reader, self.own.kept))
            while len(opened) > self.most:
                # Another thread may have taken the oldest meanwhile.
                with contextlib.suppress(KeyError, RuntimeError, StopIteration):
                    del opened[next(iter(opened))]
        return found

    def storage(self, index: ChunkIndex, owner: int | None) -> Storage:
        """The file that a source of a dataset lies in; of None, the dataset's own."""
        if owner is None:
            return self.own.storage
        assert isinstance(index, VirtualIndex)
        return self.of(index.sources[owner].file).storage

    def storage_of(self, index: ChunkIndex) -> Callable[[int | None], Storage]:
        """`storage` for one dataset."""
        return partial(self.storage, index)

    def look(self, index: ChunkIndex) -> None:
        """Make sure that every file that a dataset's rows come from is still the one that was indexed.

        Raises
        ------
        PackChangedError
        """
        for file in index.files:
            file.identity.require(file.path)

    def look_at_times(self, index: ChunkIndex) -> None:
        """`look`, at most once a second: for datasets that the HDF5 library puts together, which looks at nothing.

        Raises
        ------
        PackChangedError
        """
        if index.files and time.monotonic() - self._looked.get(index.name, 0.0) > LOOK_SECONDS:
            self.look(index)
            self._looked[index.name] = time.monotonic()

    def take(self, index: ChunkIndex, rows: npt.NDArray[np.int64], *, keep: bool) -> Taken:
        """Bytes of some rows of one chunk, or piece; as `ChunkDecoder.take` gives them."""
        if not isinstance(index, VirtualIndex):
            return self.own.take(index, rows, keep=keep)
        piece = int(index.chunks_of(rows[:1])[0])
        source = index.sources[index.owners[piece]]
        there = rows + index.shifts[piece]
        if source.index.codec is not None:
            return self.of(source.file).take(source.index, there, keep=keep)
        if source.index.reason is not None:
            values, calls = self.of(source.file).through_library(source.index, there)
            return values.reshape(-1), np.arange(len(rows)), values.nbytes, calls
        if index.addresses[piece] < 0:
            return np.frombuffer(source.index.fill, np.uint8), np.zeros(len(rows), np.int64), 0, 0
        flat = np.empty((len(rows), index.row_bytes), np.uint8)
        _, size, calls = read_spans(source.index, there, flat, lambda _: self.of(source.file).storage)
        return flat.reshape(-1), np.arange(len(rows)), size, calls

    def advise(self, index: ChunkIndex, rows: npt.NDArray[np.int64]) -> None:
        """Have the chunks of some rows fetched from the disk meanwhile, where they are not in memory already."""
        if not isinstance(index, VirtualIndex):
            self.own.advise(index, rows)
            return
        for owner, there in index.deal(rows):
            source = index.sources[owner]
            if is_empty(source.index):
                continue
            if source.index.codec is not None:
                self.of(source.file).advise(source.index, there)
            elif source.index.raw:
                runs = plan_runs(source.index, there)
                present = runs.offsets >= 0
                if present.any():
                    sizes = np.diff(runs.edges)[present] * index.row_bytes
                    self.of(source.file).storage.fetch(runs.offsets[present].tolist(), sizes.tolist())
