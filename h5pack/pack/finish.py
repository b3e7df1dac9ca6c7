"""The steps after the last row is written: close gaps between rows, add the tables, rename the file.

Each step can be repeated after a kill.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt

from h5pack.errors import H5PackError, OutputExistsError
from h5pack.format import schema
from h5pack.format.checksums import crc32
from h5pack.images.decode import strict_pillow
from h5pack.pack.compression import Compression, CompressTask, compress_rows, require_filter
from h5pack.pack.file_structure import Addresses, PackTables, copy_structure, write_compressed, write_structure
from h5pack.pack.journal import RowRecord
from h5pack.pack.output import Output, OutputLock
from h5pack.pack.plan import ConvertPlan
from h5pack.pack.resume import Unfinished, UnfinishedPack
from h5pack.pack.row_order import RowOrder
from h5pack.pack.statistics import pack_statistics
from h5pack.pack.writer import Images, SampleDecoder, read_image, read_kept
from h5pack.read.hdf5 import chunk_table, encode_text, reopen_tuned, stored_options
from h5pack.sources.catalog import Reject
from h5pack.system.arrays import consecutive_runs
from h5pack.system.files import copy_permissions, read_all, sync_path, write_all, write_atomically
from h5pack.system.processes import run

_COPY_BYTES = 8 * 1024 * 1024


def _require_free(output: Output, overwrite: bool) -> None:
    if not overwrite and output.final.exists():
        problem = (
            "was created by another program; to replace it, run again with overwrite=True and resume=True (in an array "
            "job, with overwrite=True and finish=True)"
        )
        raise OutputExistsError.at(output.final, problem, "overwrite=True", "resume=True", "finish=True")


def moved_runs(origins: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Return the moves that `move_rows` makes: (target row, origin row, number of rows), ascending by target."""
    targets = np.flatnonzero(origins != np.arange(len(origins)))
    edges = consecutive_runs(targets, origins[targets])
    firsts = edges[:-1]
    moves = (targets[firsts], origins[targets][firsts], np.diff(edges))
    return list(zip(*(column.tolist() for column in moves), strict=True))


def move_rows(pack: UnfinishedPack, origins: npt.NDArray[np.int64]) -> None:
    """Move planned rows to their final positions, in ascending order.

    `origins`, int64 (N,), has the planned row of each final position (see `close_holes`).
    """
    # Encoded rows never move, because images that cannot be packed are known before the first row is written.
    descriptor = pack.lock.descriptor
    for row_offsets, (target, origin, count) in itertools.product(pack.all_offsets, moved_runs(origins)):
        max_rows, done = max(1, _COPY_BYTES // row_offsets.row_bytes), 0
        while done < count:
            rows = min(
                max_rows,
                count - done,
                row_offsets.chunk_rows - (target + done) % row_offsets.chunk_rows,
                row_offsets.chunk_rows - (origin + done) % row_offsets.chunk_rows,
            )
            pack.own_lock.confirm()
            data = read_all(descriptor, rows * row_offsets.row_bytes, row_offsets.offset(origin + done))
            write_all(descriptor, data, row_offsets.offset(target + done))
            done += rows


def repair_rows(pack: UnfinishedPack, written: RowRecord, origins: npt.NDArray[np.int64], wrong: Sequence[int]) -> None:
    """Redo the moves of rows that an interrupted run did not complete.

    `wrong` has the final positions, ascending, at which the bytes are not those of the row. A row whose bytes no longer
    exist in the file, for example after a power cut, is decoded or read again.
    """
    plan, descriptor = pack.plan, pack.lock.descriptor
    decoder = SampleDecoder(plan.pixels, plan.pixel_rows)
    for row in wrong:
        pack.own_lock.confirm()
        origin = int(origins[row])
        again: list[bytes] = []
        for number, (offsets, checksums) in enumerate(zip(pack.all_offsets, written.all_checksums, strict=True)):
            size = int(offsets.edges(origin, 1)[-1])
            data = read_all(descriptor, size, offsets.offset(origin))
            if origin == row or crc32(data) != int(checksums[origin]):
                again = again or ([_kept(pack, origin, size)] if pack.job.keep else _decoded(plan, decoder, origin))
                data = again[number]
            write_all(descriptor, data, offsets.offset(row))


def _decoded(plan: ConvertPlan, decoder: SampleDecoder, row: int) -> list[bytes]:
    """Decode the image of a planned row, its masks and further images again; return the bytes of each."""
    (image,) = Images.of(plan, plan.row_order.origins[row : row + 1])
    pixels = np.empty(plan.row_shape, np.uint8)
    fields = [np.empty(one.row_shape, one.dtype) for one in plan.pixel_rows]
    with strict_pillow():
        source = read_image(plan.catalog.reader, image[0], image[1])
        decoder.decode(plan.catalog.reader, image, source, pixels, fields)
    return [part.tobytes() for part in (pixels, *fields)]


def _kept(pack: UnfinishedPack, row: int, size: int) -> bytes:
    """Return the bytes of a planned row, read again from the image's file or from the temporary files."""
    plan, index = pack.plan, int(pack.plan.row_order.origins[row])
    (encoded,) = plan.encoded_files(np.array([index]))
    return read_kept(plan.catalog.reader, index, plan.catalog.names[index], size, encoded)


def make_tables(pack: UnfinishedPack, written: RowRecord, final: RowOrder) -> PackTables:
    """Return the data of all tables. The rows in the file must have the order `final`.

    Some of these rows are read for the channel statistics.
    """
    plan, catalog = pack.plan, pack.plan.catalog
    origins, starts = plan.row_order.origins[final.origins], final.split_starts.tolist()
    return PackTables(
        labels=None if catalog.labels is None else catalog.labels[origins],
        label_names=catalog.label_names,
        fields={name: values[origins] for name, values in catalog.fields.items()},
        filenames=catalog.names.take(origins),
        splits=list(zip(catalog.split_names, starts[:-1], starts[1:], strict=True)),
        checksums=written.checksums[final.origins],
        pixel_checksums=tuple(some[final.origins] for some in written.field_checksums),
        encoded=plan.encoded_tables(),
        encoded_masks=plan.mask_tables(),
        statistics=pack_statistics(plan, written, final, pack.all_offsets[0], pack.lock.descriptor),
        rejects=plan.all_rejects(written.reasons),
    )


def complete(pack: Unfinished, tables: PackTables) -> None:
    """Add the tables to ``OUT.partial`` and flush it to the disk."""
    output, descriptor = pack.output, pack.own_lock.descriptor
    rows, plan = len(tables.checksums), pack.plan
    addresses = write_structure(output.structure, pack.structure, plan.stored_rows(rows), tables, plan.rows)
    if not all(np.array_equal(some, old[: len(some)]) for some, old in zip(addresses, pack.addresses, strict=True)):
        problem = (
            f"HDF5 {h5py.version.hdf5_version} placed the chunks at other addresses than before; "
            "this is an error in h5pack, please report it; existing files are unchanged"
        )
        raise H5PackError.at(output.partial, problem)
    for offsets, some, size in zip(pack.all_offsets, addresses, pack.structure.all_chunk_bytes, strict=True):
        last = offsets.offset(rows - 1) + int(offsets.edges(rows - 1, 1)[-1])
        _clear(descriptor, last, int(some[-1]) + size)
    copy_structure(output.structure, descriptor, addresses, pack.structure)
    os.fsync(descriptor)
    require_sound(output.partial, _expected(pack, tables), addresses)


def compress(
    pack: UnfinishedPack, tables: PackTables, executor: Executor, max_in_flight: int, advance: Callable[[int], object]
) -> None:
    """Write a compressed copy of ``OUT.partial`` with all tables, flush it, and replace ``OUT.partial`` by it."""
    structure, step = pack.structure, pack.structure.chunk_rows
    compression, partial = structure.compression, str(pack.output.partial)
    assert compression is not None
    tasks = (
        CompressTask(
            partial, start, offsets.offset(start), (step, *shape), checksums[start : start + step], compression, dtype
        )
        for offsets, checksums, (_, shape, dtype) in zip(
            pack.all_offsets, tables.all_checksums, structure.datasets, strict=True
        )
        for start in range(0, len(checksums), step)
    )

    def chunks() -> Iterator[bytes]:
        resumable = not pack.plan.options.in_array_job
        for rows, stored in run(executor, compress_rows, tasks, max_in_flight, ordered=True, resumable=resumable):
            advance(rows)  # Do this first, because no code would run after the last `yield`.
            yield stored

    complete_compressed(pack, tables, chunks(), executor)


def complete_compressed(pack: Unfinished, tables: PackTables, chunks: Iterable[bytes], executor: Executor) -> None:
    """Write a compressed file from its chunks (see `write_compressed`), flush it, and replace ``OUT.partial`` by it."""
    path = pack.output.compressed
    # Start the workers before HDF5 opens a file, because forked workers would inherit the open file.
    executor.submit(os.getpid).result()
    # Start with a new file, because HDF5 refuses to reopen one that it failed to close, for example on a full disk.
    pack.own_lock.create(path)
    try:
        write_compressed(path, pack.structure, len(tables.checksums), tables, chunks)
        sync_path(path)
        executor.submit(require_sound, path, _expected(pack, tables), None, pack.structure.compression).result()
    except BaseException:
        # An incomplete copy cannot be continued, and it may be what filled the disk.
        path.unlink(missing_ok=True)
        raise
    pack.own_lock.replace(path)


def _clear(descriptor: int, start: int, stop: int) -> None:
    """Zero the unused rest of the last chunk, which may still contain rows that were moved elsewhere."""
    for offset in range(start, stop, _COPY_BYTES):
        data = read_all(descriptor, min(_COPY_BYTES, stop - offset), offset)
        if data.count(0) < len(data):
            write_all(descriptor, bytes(len(data)), offset)


Expected = tuple[str, tuple[int, ...], dict[tuple[int, int], int]]
"""A dataset's path and shape, and the checksums of the first, middle and last sample, by (start, stop) along axis 0."""


def _expected(pack: Unfinished, tables: PackTables) -> list[Expected]:
    """Return the expected content of the images dataset, and of each field that is chunked like it."""
    rows, plan, structure = len(tables.checksums), pack.plan, pack.structure
    some = [(row, plan.stored_rows(row), plan.stored_rows(row + 1)) for row in sorted({0, rows // 2, rows - 1})]
    return [
        (dataset, (plan.stored_rows(rows), *shape), {(start, stop): int(checksums[row]) for row, start, stop in some})
        for (dataset, shape, _), checksums in zip(structure.datasets, tables.all_checksums, strict=True)
    ]


def require_sound(
    path: Path, expected: Sequence[Expected], addresses: Addresses | None, compression: Compression | None = None
) -> None:
    """Raise H5PackError if a pack is not complete, or does not have the content `expected`.

    Also raise it if chunks do not have the given `addresses`. If `addresses` is None, do not check addresses.
    """
    if compression is not None:
        require_filter(compression)
    try:
        with open_unlocked(path) as file:
            sound = int(file.attrs[schema.COMPLETE]) == 1 and all(
                _is_sound_dataset(file, one, None if addresses is None else addresses[number])
                for number, one in enumerate(expected)
            )
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        if getattr(error, "errno", None):
            raise
        # HDF5 cannot read the file, because some bytes were lost.
        sound = False
    if not sound:
        problem = (
            "the file does not contain the written data; check the disk, then run again with "
            "resume=True (in an array job, with finish=True)"
        )
        raise H5PackError.at(path, problem, "resume=True", "finish=True")


def _is_sound_dataset(file: h5py.File, expected: Expected, addresses: npt.NDArray[np.int64] | None) -> bool:
    name, shape, checksums = expected
    dataset = reopen_tuned(file[name])
    chunks = chunk_table(dataset)
    return bool(
        dataset.shape == shape
        and (chunks.addresses >= 0).all()
        and not chunks.filter_masks.any()
        and (addresses is None or np.array_equal(chunks.addresses, addresses))
        and all(crc32(dataset[start:stop]) == wanted for (start, stop), wanted in checksums.items())
    )


@contextlib.contextmanager
def open_unlocked(path: Path) -> Iterator[h5py.File]:
    """Open an HDF5 file without HDF5's file lock, which would conflict with the `OutputLock` of this process.

    If HDF5_USE_FILE_LOCKING is TRUE in the environment, HDF5 ignores ``locking=False`` when it opens a file by name.
    But without a name, it does not find the source files of virtual datasets, and reads fill values instead.
    """
    with open(path, "rb") as stream, h5py.File(stream, "r") as file:
        yield file


def is_complete(path: Path) -> bool:
    """Return whether ``OUT.partial``, at `path`, is complete.

    If it is, and is compressed or virtual, a resumed conversion only has to rename it.
    """
    try:
        with open_unlocked(path) as file:
            return int(file.attrs[schema.COMPLETE]) == 1
    except (OSError, RuntimeError, KeyError, ValueError):
        # A kill may have left a file that HDF5 cannot read.
        return False


def shards_of(file: Path, out: Path) -> set[Path]:
    """Return the paths of the shards of `file`, which is the output of a conversion to `out`, or its ``OUT.partial``.

    The set is empty if the file has no shards or does not exist.
    """
    try:
        with open_unlocked(file) as opened:
            images = opened.get(schema.IMAGES, opened.get(schema.ENCODED_DATA))
            if "shard_bytes" not in stored_options(opened) or images is None or not images.is_virtual:
                return set()
            # Names are stored with %% instead of %, because HDF5 takes %b for the number of a block.
            names = {source.file_name.replace("%%", "%") for source in images.virtual_sources()}
    except (OSError, RuntimeError, KeyError, ValueError):
        # There is no file, or one that HDF5 cannot read.
        return set()
    kind = re.compile(rf"{re.escape(out.stem)}-\d{{5,}}{re.escape(out.suffix)}")
    return {out.with_name(name) for name in names if kind.fullmatch(name)}


def publish(output: Output, lock: OutputLock, overwrite: bool, rejects: Sequence[Reject]) -> None:
    """Write or remove ``OUT.rejects.csv``, rename ``OUT.partial`` to the output, and remove the temporary files."""
    old = output.old_status()
    lock.share()
    _require_free(output, overwrite)
    if rejects:
        stream = io.StringIO(newline="")
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(["filename", "reason"])
        table.writerows((reject.name, reject.reason) for reject in rejects)
        write_atomically(output.rejects, encode_text(stream.getvalue()))
        if old is not None:
            copy_permissions(old, output.rejects)
    else:
        output.rejects.unlink(missing_ok=True)
    journal = output.journal_identity()
    _require_free(output, overwrite)
    os.replace(output.partial, output.final)
    if old is not None:
        copy_permissions(old, lock.descriptor)
    sync_path(output.final.parent)
    # After the renaming, the lock no longer excludes other conversions. One may have begun, with a journal of its own.
    if output.journal_identity() == journal:
        output.remove_leftovers()
