"""The steps after the last row is written: close gaps between rows, add the tables, rename the file.

The tables are all datasets but the images. Each step can be repeated after a kill.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt

from h5pack.errors import H5PackError, OutputExistsError
from h5pack.format import schema
from h5pack.format.checksums import crc32
from h5pack.format.row_offsets import RowOffsets
from h5pack.pack.compression import Compression, compressed_chunks, require_filter
from h5pack.pack.file_structure import PackTables, write_compressed, write_structure
from h5pack.pack.journal import RowRecord
from h5pack.pack.output import Output, OutputLock
from h5pack.pack.rejects import write_rejects
from h5pack.pack.resume import UnfinishedPack
from h5pack.pack.split_order import RowOrder, moved_runs
from h5pack.pack.statistics import pack_statistics
from h5pack.read.hdf5 import chunk_table, reopen_tuned
from h5pack.sources.catalog import Reject
from h5pack.system.files import copy_changed, read_all, sync_path, write_all

_COPY_BYTES = 8 * 1024 * 1024


def move_rows(descriptor: int, places: RowOffsets, origins: npt.NDArray[np.int64]) -> None:
    """Move rows to their final positions (see `split_order.close_holes`), in ascending order of their targets.

    Parameters
    ----------
    descriptor : int
        The file, open for reading and writing.
    places : RowOffsets
        Byte offsets of the planned rows.
    origins : ndarray
        int64, (n,): the planned row that each final row comes from.
    """
    max_rows = max(1, _COPY_BYTES // places.row_bytes)
    for target, origin, count in moved_runs(origins):
        done = 0
        while done < count:
            rows = min(
                max_rows,
                count - done,
                places.chunk_rows - (target + done) % places.chunk_rows,
                places.chunk_rows - (origin + done) % places.chunk_rows,
            )
            data = read_all(descriptor, rows * places.row_bytes, places.offset(origin + done))
            write_all(descriptor, data, places.offset(target + done))
            done += rows


def repair_rows(
    descriptor: int,
    places: RowOffsets,
    origins: npt.NDArray[np.int64],
    checksums: npt.NDArray[np.uint32],
    wrong: Sequence[int],
    decode: Callable[[int], bytes],
) -> None:
    """Redo the moves of rows that an interrupted run did not complete.

    Parameters
    ----------
    descriptor, places, origins
        See `move_rows`.
    checksums : ndarray
        uint32: checksums of the planned rows.
    wrong : sequence of int
        Final rows, ascending, whose bytes do not match their checksums; all rows before the first of them are correct.
    decode : callable
        Decodes the image of a planned row again, for rows whose bytes no longer exist in the file (for example after a
        power cut).
    """
    for row in wrong:
        origin = int(origins[row])
        data = read_all(descriptor, places.row_bytes, places.offset(origin))
        if origin == row or crc32(data) != int(checksums[origin]):
            data = decode(origin)
        write_all(descriptor, data, places.offset(row))


def make_tables(pack: UnfinishedPack, written: RowRecord, final: RowOrder, descriptor: int) -> PackTables:
    """Return the data of all tables in the order of the final rows; in the file `descriptor`, rows have that order."""
    plan, catalog = pack.plan, pack.plan.catalog
    origins = plan.row_order.origins[final.origins]
    return PackTables(
        labels=None if catalog.labels is None else catalog.labels[origins],
        label_names=catalog.label_names,
        fields={name: values[origins] for name, values in catalog.fields.items()},
        filenames=catalog.names.take(origins.tolist()),
        splits=dict(zip(catalog.split_names, itertools.pairwise(final.split_starts.tolist()), strict=True)),
        checksums=written.checksums[final.origins],
        statistics=pack_statistics(plan, written, final, pack.places, descriptor),
        rejects=plan.all_rejects(written.reasons),
    )


def complete(pack: UnfinishedPack, lock: OutputLock, tables: PackTables) -> None:
    """Add the tables to ``OUT.partial`` and flush it to the disk.

    HDF5 does not open that file for writing. It writes a second, sparse file, whose bytes outside the chunks are then
    copied.
    """
    output, places = pack.output, pack.places
    addresses = write_structure(output.finish, pack.structure, len(tables.checksums), tables)
    if not np.array_equal(addresses, places.addresses[: len(addresses)]):
        raise H5PackError(
            f"{output.partial}: HDF5 {h5py.version.hdf5_version} put the chunks elsewhere the second time; this is a "
            "fault of h5pack, please report it; existing files are unchanged",
            path=output.partial,
        )
    finish = os.open(output.finish, os.O_RDONLY)
    try:
        size = os.fstat(finish).st_size
        chunk_bytes = places.chunk_rows * places.row_bytes
        position = 0
        for address in [*np.sort(addresses).tolist(), size]:
            copy_changed(finish, lock.descriptor, position, address)
            position = address + chunk_bytes
        _clear_tail(lock.descriptor, places, len(tables.checksums), len(addresses))
        os.ftruncate(lock.descriptor, size)
        os.fsync(lock.descriptor)
    finally:
        os.close(finish)
    _require_sound(pack, is_sound(output.partial, *_expected(pack, tables), addresses))


def compress(
    pack: UnfinishedPack,
    lock: OutputLock,
    tables: PackTables,
    *,
    executor: Executor,
    max_in_flight: int,
    advance: Callable[[int], object],
) -> None:
    """Write a compressed copy of ``OUT.partial`` with all tables, flush it to the disk, and replace the file by it.

    See `compressed_chunks` for the keyword parameters.
    """
    output, path, structure = pack.output, pack.output.compressed, pack.structure
    assert structure.compression is not None
    # Start with a new file, because HDF5 refuses to reopen one that it failed to close, for example on a full disk.
    path.unlink(missing_ok=True)
    try:
        chunks = compressed_chunks(
            str(output.partial),
            pack.places,
            structure.row_shape,
            tables.checksums,
            structure.compression,
            executor=executor,
            max_in_flight=max_in_flight,
            advance=advance,
        )
        write_compressed(path, structure, len(tables.checksums), tables, chunks)
        sync_path(path)
        check = executor.submit(is_sound, path, *_expected(pack, tables), None, structure.compression)
        _require_sound(pack, check.result())
    except BaseException:
        # An incomplete copy cannot be continued, and it may be what filled the disk.
        path.unlink(missing_ok=True)
        raise
    lock.replace(path)


def _clear_tail(descriptor: int, places: RowOffsets, rows: int, chunks: int) -> None:
    """Zero the unused rest of the last chunk, which may still contain rows that were moved elsewhere."""
    for row in range(rows, chunks * places.chunk_rows):
        offset = places.offset(row)
        data = read_all(descriptor, places.row_bytes, offset)
        if data.count(0) < len(data):
            write_all(descriptor, bytes(places.row_bytes), offset)


def _expected(pack: UnfinishedPack, tables: PackTables) -> tuple[tuple[int, ...], dict[int, int]]:
    """Return the images' shape, and the checksums of the first, a middle and the last row."""
    rows = len(tables.checksums)
    some = {0, rows // 2, rows - 1}
    return (rows, *pack.structure.row_shape), {row: int(tables.checksums[row]) for row in sorted(some)}


def _require_sound(pack: UnfinishedPack, sound: bool) -> None:
    if not sound:
        raise H5PackError(
            f"{pack.output.partial}: reading it back gave something else than was written; check the disk, then run "
            "again with resume=True",
            path=pack.output.partial,
            parameters=("resume=True",),
        )


def is_sound(
    path: Path,
    shape: tuple[int, ...],
    checksums: dict[int, int],
    addresses: npt.NDArray[np.int64] | None = None,
    compression: Compression | None = None,
) -> bool:
    """Return whether a pack, opened as a reader would, is complete and has the expected content.

    Parameters
    ----------
    path : Path
    shape : tuple of int
        Expected shape of the images.
    checksums : dict of int to int
        Expected checksums of some rows, by row.
    addresses : ndarray or None
        int64, (chunks,): expected byte offsets of the chunks; None if HDF5 was free to choose them.
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
            and not chunks.filter_masks.any()
            and (addresses is None or np.array_equal(chunks.addresses, addresses))
            and all(crc32(np.ascontiguousarray(images[row])) == wanted for row, wanted in checksums.items())
        )


def is_compressed(path: Path) -> bool:
    """Return whether the compressed copy has replaced the unfinished file.

    With `compression`, the file at `path` is marked complete only once it is that copy.
    """
    try:
        with h5py.File(path, "r", locking=False) as file:
            return int(file.attrs[schema.COMPLETE]) == 1
    except (OSError, RuntimeError, KeyError, ValueError):
        # A kill may have left a file that HDF5 cannot read.
        return False


def publish(output: Output, lock: OutputLock, rejects: Sequence[Reject], overwrite: bool) -> None:
    """Write ``OUT.rejects.csv``, rename ``OUT.partial`` to the output, and remove the journal.

    Raises
    ------
    OutputExistsError
        If the output exists by now and `overwrite` is False.
    """
    write_rejects(output.rejects, rejects)
    output.finish.unlink(missing_ok=True)
    journal = output.journal_identity()
    lock.share()
    if not overwrite and output.final.exists():
        raise OutputExistsError(
            f"{output.final}: exists by now; run again with resume=True and overwrite=True to replace it",
            path=output.final,
            parameters=("resume=True", "overwrite=True"),
        )
    os.replace(output.partial, output.final)
    sync_path(output.final.parent)
    # After the renaming, the lock no longer keeps other conversions out, so the journal may already belong to another.
    if output.journal_identity() == journal:
        output.remove_leftovers()
