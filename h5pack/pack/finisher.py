"""The last steps: rows close up, the tables are added, the file gets its name. Each can be repeated after any kill."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt

from h5pack import schema
from h5pack.checksum import crc32
from h5pack.errors import H5PackError, OutputExistsError
from h5pack.hdf5 import chunk_table, reopen_tuned
from h5pack.pack.compression import Compression
from h5pack.pack.compressor import compressed_chunks
from h5pack.pack.output import Output, OutputLock, sync_path, write_atomically
from h5pack.pack.placement import moved_runs
from h5pack.pack.skeleton import Skeleton, Tables, build, build_compressed, require_filter
from h5pack.rows import RowPlaces, read_all, write_all

_COPY_BYTES = 8 * 1024 * 1024


def move_rows(descriptor: int, places: RowPlaces, order: npt.NDArray[np.int64]) -> int:
    """Carry out the moves of `placement.close_up`, in ascending order of their targets.

    Parameters
    ----------
    descriptor : int
        The file, for reading and writing.
    places : RowPlaces
    order : ndarray
        int64, (n,): the planned row that each final row comes from.

    Returns
    -------
    int
        Rows moved.
    """
    most = max(1, _COPY_BYTES // places.row_bytes)
    moved = 0
    for target, origin, count in moved_runs(order):
        done = 0
        while done < count:
            rows = min(
                most,
                count - done,
                places.chunk_rows - (target + done) % places.chunk_rows,
                places.chunk_rows - (origin + done) % places.chunk_rows,
            )
            data = read_all(descriptor, rows * places.row_bytes, places.offset(origin + done))
            write_all(descriptor, data, places.offset(target + done))
            done += rows
        moved += count
    return moved


def mend_rows(
    descriptor: int,
    places: RowPlaces,
    order: npt.NDArray[np.int64],
    checksums: npt.NDArray[np.uint32],
    wrong: list[int],
    decode: Callable[[int], bytes],
) -> int:
    """Repeat the moves that an interrupted run left undone.

    Parameters
    ----------
    descriptor : int
    places : RowPlaces
    order : ndarray
        int64, (n,): the planned row that each final row comes from.
    checksums : ndarray
        uint32: of the planned rows.
    wrong : list of int
        Final rows that do not hold what they should, ascending; rows before the first of them are done.
    decode : callable
        Gives the bytes of a planned row anew, where its place was overwritten (after a power cut, say).

    Returns
    -------
    int
        Rows mended.
    """
    for row in wrong:
        origin = int(order[row])
        data = read_all(descriptor, places.row_bytes, places.offset(origin))
        if origin == row or crc32(data) != int(checksums[origin]):
            data = decode(origin)
        write_all(descriptor, data, places.offset(row))
    return len(wrong)


@dataclass(frozen=True)
class Finish:
    """What the finished file is made of.

    Attributes
    ----------
    output : Output
    lock : OutputLock
    skeleton : Skeleton
    places : RowPlaces
        As planned; the final rows are the first of them.
    tables : Tables
    overwrite : bool
        Whether it was agreed to replace an output.
    """

    output: Output
    lock: OutputLock
    skeleton: Skeleton
    places: RowPlaces
    tables: Tables
    overwrite: bool

    @property
    def rows(self) -> int:
        """Rows of the finished file."""
        return len(self.tables.checksums)

    def complete(self) -> None:
        """Add the tables to ``OUT.partial`` and flush it to the disk.

        The file is never opened by HDF5 for writing: a second skeleton, sparse, lends it all bytes between the
        chunks.
        """
        output, places = self.output, self.places
        addresses = build(output.finish, self.skeleton, self.rows, self.tables)
        if not np.array_equal(addresses, places.addresses[: len(addresses)]):
            raise H5PackError(
                f"{output.partial}: HDF5 {h5py.version.hdf5_version} laid the chunks out differently when asked again; "
                "this is a fault of h5pack, please report it; your old files are untouched"
            )
        finish = os.open(output.finish, os.O_RDONLY)
        try:
            size = os.fstat(finish).st_size
            target = self.lock.descriptor
            chunk_bytes = places.chunk_rows * places.row_bytes
            position = 0
            for address in [*np.sort(addresses).tolist(), size]:
                _copy_changed(finish, target, position, address)
                position = address + chunk_bytes
            self._clear_tail(len(addresses))
            os.ftruncate(target, size)
            os.fsync(target)
        finally:
            os.close(finish)
        self._require_sound(is_sound(output.partial, *self._expected(), addresses))

    def compress(self, executor: Executor, in_flight: int, advance: Callable[[int], object]) -> None:
        """Make a compressed copy of ``OUT.partial`` with all tables, flush it to the disk, and put it in its place.

        Parameters
        ----------
        executor : Executor
            Whose workers compress.
        in_flight : int
            How many chunks at most are compressed, or wait to be stored.
        advance : callable
            Told how many rows were compressed, chunk by chunk.
        """
        output, path = self.output, self.output.compressed
        # A new file: HDF5 refuses one that it failed to close, as where the disk was full.
        path.unlink(missing_ok=True)
        try:
            chunks = compressed_chunks(
                str(output.partial), self.skeleton, self.places, self.tables.checksums, executor, in_flight, advance
            )
            build_compressed(path, self.skeleton, self.rows, self.tables, chunks)
            sync_path(path)
            check = executor.submit(is_sound, path, *self._expected(), None, self.skeleton.compression)
            self._require_sound(check.result())
        except BaseException:
            # It cannot be continued, and the space may be what is missing.
            path.unlink(missing_ok=True)
            raise
        self.lock.replace(path)

    def _clear_tail(self, chunks: int) -> None:
        """Rows past the last one are zero, also where rows stood there before they closed up."""
        nothing = self.places.row_bytes
        for number in range(self.rows, chunks * self.places.chunk_rows):
            offset = self.places.offset(number)
            row = read_all(self.lock.descriptor, nothing, offset)
            if row.count(0) < len(row):
                write_all(self.lock.descriptor, bytes(nothing), offset)

    def _expected(self) -> tuple[tuple[int, ...], dict[int, int]]:
        """The images' shape, and the checksums of some rows."""
        some = {0, self.rows // 2, self.rows - 1}
        return (self.rows, *self.skeleton.row_shape), {row: int(self.tables.checksums[row]) for row in sorted(some)}

    def _require_sound(self, sound: bool) -> None:
        if not sound:
            raise H5PackError(
                f"{self.output.partial}: reading it back gave something else than was written; check the disk, then "
                "run the same command with --resume"
            )

    def publish(self) -> None:
        """Write the rejects table, rename the file to its final name, remove the journal."""
        publish(self.output, self.lock, self.tables.rejects, self.overwrite)


def is_sound(
    path: Path,
    shape: tuple[int, ...],
    checksums: dict[int, int],
    addresses: npt.NDArray[np.int64] | None = None,
    compression: Compression | None = None,
) -> bool:
    """Open a file as a reader does, before it gets its name, and look whether all is there.

    Parameters
    ----------
    path : Path
    shape : tuple of int
        Of the images.
    checksums : dict of int to int
        Of some rows.
    addresses : ndarray or None
        int64, (chunks,): where the chunks should be; None where HDF5 has placed them.
    compression : Compression or None
    """
    if compression is not None:
        require_filter(compression)
    with h5py.File(path, "r", locking=False) as file:
        images = reopen_tuned(file[schema.IMAGES])
        chunks = chunk_table(images)
        return bool(
            int(file.attrs[schema.COMPLETE]) == 1
            and images.shape == shape
            and (chunks.addresses >= 0).all()
            and not chunks.masks.any()
            and (addresses is None or np.array_equal(chunks.addresses, addresses))
            and all(crc32(np.ascontiguousarray(images[row])) == wanted for row, wanted in checksums.items())
        )


def is_compressed(path: Path) -> bool:
    """Whether the compressed copy has taken the unfinished file's name: that one is never complete by itself."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            return int(file.attrs[schema.COMPLETE]) == 1
    except (OSError, RuntimeError, KeyError, ValueError):
        # A kill may have left anything.
        return False


def publish(output: Output, lock: OutputLock, rejects: list[tuple[str, str]], overwrite: bool) -> None:
    """Write the rejects table, rename ``OUT.partial`` to its final name, remove the journal.

    Parameters
    ----------
    output : Output
    lock : OutputLock
    rejects : list of (str, str)
        Name and reason.
    overwrite : bool
        Whether it was agreed to replace an output.

    Raises
    ------
    OutputExistsError
        If an output has appeared that nobody agreed to replace.
    """
    if rejects:
        stream = io.StringIO(newline="")
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(["filename", "reason"])
        table.writerows(rejects)
        write_atomically(output.rejects, stream.getvalue().encode("utf-8", "backslashreplace"))
    else:
        output.rejects.unlink(missing_ok=True)
    output.finish.unlink(missing_ok=True)
    journal = output.journal_identity()
    lock.share()
    if not overwrite and output.final.exists():
        raise OutputExistsError(f"{output.final}: exists by now; resume with --overwrite to replace it")
    os.replace(output.partial, output.final)
    sync_path(output.final.parent)
    # Without the name `partial` there is no lock: by now another conversion may have begun a journal of its own.
    if output.journal_identity() == journal:
        output.remove_leftovers()


def _copy_changed(source: int, target: int, start: int, stop: int) -> None:
    """Make `target` equal to `source` from `start` to `stop`, writing only what differs."""
    while start < stop:
        count = min(_COPY_BYTES, stop - start)
        data = read_all(source, count, start)
        # Beyond the end of a sparse file there are zeros.
        data += bytes(count - len(data))
        if read_all(target, count, start) != data:
            write_all(target, data, start)
        start += count
