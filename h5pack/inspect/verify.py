"""`h5pack verify`: check the structure of a pack and the checksum of every row."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from h5pack.combine.parts import rejects_of, stored_layout, stored_statistics
from h5pack.errors import H5PackError, PackFormatError, ReadError, RejectedImageError, WorkerError
from h5pack.format import schema
from h5pack.format.checksums import crc32, row_checksums
from h5pack.format.fields import RaggedRows
from h5pack.format.plans import plan_cache
from h5pack.format.row_offsets import CheckTask, EncodedOffsets, RowOffsets, check_rows, check_tasks
from h5pack.pack.options import START_METHODS, check_choice
from h5pack.read.encoded import EncodedIndex, index_kept, is_mask_group, row_decoder
from h5pack.read.hdf5 import (
    VERIFY_ADVICE,
    attribute_names,
    dataset_error,
    is_filtered,
    is_pack,
    list_datasets,
    metadata_problem,
    open_file,
    reopen_tuned,
    reporting_damage,
    require_complete,
    require_filters,
    require_open_sources,
    require_utf8_splits,
    stored_names,
    text,
)
from h5pack.read.ragged import index_ragged, is_ragged, own_fields, require_known_kind
from h5pack.read.virtual import index_rows
from h5pack.system.files import absolute_path
from h5pack.system.machine import available_cpus
from h5pack.system.parameters import require_local, whole_number
from h5pack.system.processes import open_executor, run
from h5pack.system.progress import Stages
from h5pack.system.text import counted, first_lines, printable, printable_lines

_TASK_BYTES = 8 * 1024 * 1024
_BLOCK_ROWS = 65_536


@dataclass(frozen=True)
class VerifyReport:
    """The result of a verification."""

    path: str
    rows: int  #: number of rows of the pack; 0 if it could not be opened
    problems: tuple[str, ...] = ()  #: structural defects, such as missing datasets
    damaged: dict[str, list[int]] = field(default_factory=dict)  #: damaged rows of each dataset, by its name
    filenames: dict[int, str] = field(default_factory=dict)  #: stored names of the first 1,000 damaged rows, by row
    parameters: tuple[str, ...] = ()  #: parameters that the problems name, which the command line prints as options

    @property
    def ok(self) -> bool:
        """Whether the file has neither structural problems nor damaged rows."""
        return not self.problems and not self.damaged

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON-serializable dict. The keys are stable across versions."""
        names = {str(row): name for row, name in self.filenames.items()}
        found = {**vars(self), "ok": self.ok, "problems": list(self.problems), "filenames": names}
        del found["parameters"]
        return found

    def to_text(self) -> str:
        """Return the report as lines of text, with the first 20 damaged rows of each dataset."""
        if self.ok:
            return printable(f"{self.path}: {counted(self.rows, 'row')}, all checksums match")
        lines = [f"{self.path}: {problem}" for problem in self.problems]
        for name, rows in sorted(self.damaged.items()):
            damaged = counted(len(rows), "damaged row")
            lines.append(f"{self.path}: {name!r}: {damaged}; restore the file or convert again")
            named = (f"  row {row}" + (f" ({self.filenames[row]})" if row in self.filenames else "") for row in rows)
            lines += first_lines(named, len(rows))
        return printable_lines(lines)


@dataclass
class _Rows:
    """Rows to check: all rows of a large dataset (see `_Structure`), or those of one task, beginning at row `start`.

    `offsets` is None if the rows must be read through the HDF5 library, because they are compressed, virtual, or were
    repacked by another program. In this case, `chunk_rows` and `chunk_bytes` are the size of a chunk group, in rows and
    in bytes. Otherwise, they are 0.
    """

    name: str  # path of the dataset, or of a group of encoded images or masks
    checksums: npt.NDArray[np.uint32]
    offsets: RowOffsets | None = None
    chunk_rows: int = 0
    chunk_bytes: int = 0
    stored_checksums: npt.NDArray[np.uint32] | None = None  # of each chunk, as in `ChunkIndex`
    image_sizes: npt.NDArray[np.int32] | None = None  # (N, 2), as in `EncodedIndex`; None unless images are encoded
    path: str = ""  # path of the file
    start: int = 0

    def __str__(self) -> str:
        """Describe the rows for the error message if a worker process dies."""
        return f"{self.path} rows {self.start}-{self.start + len(self.checksums) - 1}"


@dataclass(frozen=True)
class _EncodedTask(CheckTask):
    """Encoded images to check."""

    image_sizes: npt.NDArray[np.int32]  # (n, 2)


@dataclass
class _Structure:
    """The results of the structural check, which a worker process carries out with the HDF5 library."""

    rows: int
    problems: list[str] = field(default_factory=list)
    damaged: dict[str, list[int]] = field(default_factory=dict)
    large: list[_Rows] = field(default_factory=list)  # the images, and the fields that are stored like the images
    seen: set[str] = field(default_factory=set)  # names of all large datasets, including those that cannot be checked


def verify(
    path: str | os.PathLike[str],
    *,
    num_workers: int | None = None,
    start_method: str | None = None,
    progress: bool = False,
) -> VerifyReport:
    """Check a pack's structure and the checksum of every row.

    The HDF5 library runs only in worker processes, because a damaged file may crash it. Uncompressed images are read
    without the library; compressed and virtual images are read through it.

    Parameters
    ----------
    path : path
    num_workers : int, optional
        Number of worker processes; at least 2 are used. Default: the number of CPUs this process may use.
    start_method : str, optional
        "fork", "forkserver" or "spawn". Default: "fork" if that is safe, else "forkserver".
    progress : bool
        Show a progress bar on standard error, if that is a terminal.

    Returns
    -------
    VerifyReport

    Raises
    ------
    PackFormatError
        If there is no readable file, or if it is not a pack, and therefore has no checksums.
    ReadError
        If a virtual pack has more sources than this process may open files.
    WorkerError
        If a worker process cannot start, or dies while it checks rows.
    """
    require_local(path)
    check_choice("start_method", start_method, START_METHODS)
    name = absolute_path(path)
    if not (os.path.isfile(name) and os.access(name, os.R_OK)):
        open_file(name).close()  # Raise the error.
    count = max(2, available_cpus() if num_workers is None else whole_number("num_workers", num_workers, 1))
    with open_executor(count, start_method, None, isolated=True) as executor:
        try:
            structure = executor.submit(_inspect, name).result()
        except (ReadError, WorkerError):
            raise
        except H5PackError as error:
            return VerifyReport(name, 0, (_problem(name, error),), parameters=error.parameters)
        except BrokenProcessPool:
            cause = f"HDF5 {h5py.version.hdf5_version} crashed while it read the file, or memory ran out (see 'dmesg')"
            return VerifyReport(name, 0, (f"{cause}; restore the file, or free memory",))
        if structure is None:
            raise PackFormatError.at(name, "not an h5pack file, so it has no checksums; describe it with 'h5pack info'")
        _check_large(name, structure, executor, 2 * count, progress=progress)
        damaged = structure.damaged
        listed = sorted({row for found in damaged.values() for row in found})
        names = executor.submit(_filenames, name, listed).result() if listed else {}
    return VerifyReport(name, structure.rows, tuple(structure.problems), damaged, names)


def _check_large(path: str, structure: _Structure, executor: Executor, in_flight: int, *, progress: bool) -> None:
    """Check the rows of large datasets, and add the damaged rows, in ascending order, to `structure.damaged`."""
    total = sum(len(one.checksums) for one in structure.large)
    with Stages(progress)("verify", total, unit=" rows") as advance:
        for one in structure.large:
            wrong: list[int] = []
            for checked, found in _checked(path, one, executor, in_flight):
                wrong += found
                advance(checked)
            if wrong:
                structure.damaged[one.name] = sorted(wrong)


def _checked(path: str, rows: _Rows, executor: Executor, in_flight: int) -> Iterator[tuple[int, list[int]]]:
    """Check a large dataset in several tasks; yield the number of rows and the damaged rows of each task."""
    if rows.offsets is not None:
        tasks = check_tasks(path, rows.offsets, range(len(rows.checksums)), rows.checksums, _TASK_BYTES)
        sizes = rows.image_sizes
        if sizes is None:
            return run(executor, check_rows, tasks, in_flight, resumable=False)
        encoded = (_EncodedTask(**vars(one), image_sizes=sizes[one.start :][: len(one.checksums)]) for one in tasks)
        return run(executor, _check_encoded, encoded, in_flight, resumable=False)
    chunks = max(1, _TASK_BYTES // rows.chunk_bytes)
    step, stored = rows.chunk_rows * chunks, rows.stored_checksums
    decode_tasks = (
        replace(
            rows,
            path=path,
            start=start,
            checksums=rows.checksums[start : start + step],
            stored_checksums=None if stored is None else stored[start // rows.chunk_rows :][:chunks],
        )
        for start in range(0, len(rows.checksums), step)
    )
    return run(executor, _decode_counted, decode_tasks, in_flight, resumable=False)


def _inspect(path: str) -> _Structure | None:
    """Check the structure of a pack; return None if the file is not a pack.

    Raises PackFormatError if the pack's images or their offsets are unusable.
    """
    with open_file(path) as file, reporting_damage(path):
        if not is_pack(file):
            return None
        require_complete(file)
        if schema.IMAGES not in file and schema.ENCODED in file:
            index = index_kept(file, sized=False)  # The size of each row is checked below.
            found = _Structure(index.rows)
            _add_kept(file, index, found)
        else:
            images = file.get(schema.IMAGES)
            if not (isinstance(images, h5py.Dataset) and images.ndim == 4 and images.dtype == np.uint8):
                raise PackFormatError.at(path, "no uint8 dataset 'images' with 4 axes; convert again")
            found = _Structure(images.shape[0])
            _add_large(file, schema.IMAGES, found)
        for name in own_fields(file):
            field = file[name]
            if is_mask_group(file, name):
                try:
                    _add_kept(file, index_kept(file, name, sized=False), found)
                except PackFormatError as error:
                    found.seen.add(name)
                    found.problems.append(_problem(file.filename, error))
            elif isinstance(field, h5py.Dataset) and (field.chunks or field.is_virtual) and field.ndim > 1:
                _add_large(file, name, found)
        _check_tables(file, found.rows, found.problems)
        _check_other_rows(file, found)
        return found


def _problem(path: str, error: H5PackError) -> str:
    """Return the text of an error as a problem for the report: without the path, and without advice to run verify."""
    return str(error).removeprefix(f"{path}: ").removesuffix(f"; {VERIFY_ADVICE}")


def _add_large(file: h5py.File, name: str, found: _Structure) -> None:
    """Add a dataset to `found.large`; if its rows cannot be checked, add a problem instead."""
    dataset = file[name]
    checksums = _checksums(file, name, found)
    if checksums is None:
        return
    try:
        index = index_rows(file, dataset, name)
    except PackFormatError as error:
        found.problems.append(_problem(file.filename, error))
        return
    absent: Any = () if dataset.is_virtual else np.flatnonzero(index.addresses < 0)
    if len(absent):
        found.problems.append(
            f"{name}: {counted(len(absent), 'chunk')} without stored data; the first is chunk {int(absent[0])}"
        )
    elif index.raw and not dataset.is_virtual:
        offsets = RowOffsets(index.addresses, index.chunk_rows, index.row_bytes)
        found.large.append(_Rows(name, checksums, offsets))
    else:
        chunk_bytes = index.group_rows * index.row_bytes
        found.large.append(_Rows(name, checksums, None, index.group_rows, chunk_bytes, index.stored_checksums))


def _add_kept(file: h5py.File, index: EncodedIndex, found: _Structure) -> None:
    """Add encoded images or masks to `found.large`. If their bytes are not contiguous in the file, check them here."""
    if index.offsets[0] != 0 or index.offsets[-1] != index.data.rows:
        found.problems.append(f"{index.name}/offsets: the rows do not cover all bytes of {index.data.name}")
    checksums = _checksums(file, index.name, found)
    if index.rows != found.rows:
        found.problems.append(f"{index.name}: {index.rows:,} rows, but {schema.ENCODED} has {found.rows:,}")
    elif checksums is not None and index.base is not None:
        offsets = EncodedOffsets.of(index.base, index.offsets)
        sizes = None if index.is_mask else index.image_sizes
        found.large.append(_Rows(index.name, checksums, offsets, image_sizes=sizes))
    elif checksums is not None and (wrong := _damaged_kept(file, index, checksums)):
        found.damaged[index.name] = wrong


def _damaged_kept(file: h5py.File, index: EncodedIndex, checksums: npt.NDArray[np.uint32]) -> list[int]:
    """Read encoded rows through the HDF5 library; return those that differ from their checksums or are unreadable."""
    data, wrong = file[index.data.name], []
    require_filters(data)
    for row, (start, stop) in enumerate(itertools.pairwise(index.offsets.tolist())):
        try:
            encoded = data[start:stop]
            differs = crc32(encoded) != checksums[row]
            differs = differs or (not index.is_mask and _has_other_size(encoded, index.image_sizes[row]))
        except (OSError, RuntimeError):
            differs = True
        if differs:
            wrong.append(row)
    require_open_sources(data)
    return wrong


def _check_encoded(task: _EncodedTask) -> tuple[int, list[int]]:
    """Like `check_rows`, but also return the rows of images whose size differs from the size that the pack stores."""
    return check_rows(task, lambda row, data: _has_other_size(data, task.image_sizes[row - task.start]))


def _has_other_size(data: memoryview | npt.NDArray[np.uint8], size: npt.NDArray[np.int32]) -> bool:
    """Return whether an encoded image does not have this size; False if its header cannot be read."""
    try:
        header = row_decoder().header(bytes(data))
    except RejectedImageError:
        return False
    return (header.height, header.width) != tuple(size.tolist())


def _checksums(file: h5py.File, name: str, found: _Structure) -> npt.NDArray[np.uint32] | None:
    """Return the checksums of a large dataset; if not every row has one, add a problem and return None."""
    found.seen.add(name)
    checksums = file.get(f"{schema.CHECKSUMS}/{name}")
    if not isinstance(checksums, h5py.Dataset) or checksums.shape != (found.rows,):
        found.problems.append(f"{schema.CHECKSUMS}/{name}: missing, or does not have one checksum per row")
        return None
    require_filters(checksums)
    return checksums[()]  # type: ignore[no-any-return]


def _check_other_rows(file: h5py.File, found: _Structure) -> None:
    """Compare the rows of all datasets except the large ones with their checksums."""
    small = sorted(set(own_fields(file)) - found.seen)
    for name in (*(schema.LABELS,) * (schema.LABELS in file), *small):
        if f"{schema.CHECKSUMS}/{name}" not in file:
            found.problems.append(f"{schema.CHECKSUMS}/{name}: missing")
    for name, opened in list_datasets(file).items():
        target = name.removeprefix(f"{schema.CHECKSUMS}/")
        if target == name or target in found.seen or name.startswith(f"{schema.CHUNK_CHECKSUMS}/"):
            continue
        try:
            with reporting_damage(file.filename):
                stored = _checksums_of(file, target)
        except PackFormatError as error:
            found.problems.append(_problem(file.filename, error))
            continue
        if stored is None or len(stored) != len(dataset := opened()):
            found.problems.append(f"{name}: no dataset {target!r} with the same number of rows")
            continue
        wrong = np.flatnonzero(stored != dataset[()])
        if len(wrong):
            found.damaged[target] = wrong.tolist()


def _checksums_of(file: h5py.File, name: str) -> npt.NDArray[np.uint32] | None:
    """Return the checksums of the rows of labels or a field; None if there is no such dataset or group."""
    if name not in file:
        return None
    if is_ragged(file, name):
        index = index_ragged(file, name)
        if index.offsets[0] != 0 or index.offsets[-1] != index.data.rows:
            problem = "has entries that belong to no row; restore the file or convert again"
            raise dataset_error(file.filename, name, problem)
        return RaggedRows(index.kind, file[index.data.name][()], index.offsets).checksums()
    dataset = file[name]
    if not isinstance(dataset, h5py.Dataset):
        return None
    if dataset.dtype.hasobject:
        raise dataset_error(file.filename, name, "holds no numbers; restore the file or convert again")
    found = [row_checksums(dataset[low : low + _BLOCK_ROWS]) for low in range(0, len(dataset), _BLOCK_ROWS)]
    require_open_sources(dataset)
    return np.concatenate([np.empty(0, np.uint32), *found])


def _check_tables(file: h5py.File, rows: int, problems: list[str]) -> None:
    for name in (schema.FILENAMES, schema.SPLIT_NAMES, schema.SPLIT_ROWS, "statistics/mean", "statistics/std"):
        if not isinstance(file.get(name), h5py.Dataset):
            problems.append(f"{name}: missing")
    damaged = set()
    for name in ("/", *file, *own_fields(file)):
        try:
            for attribute in getattr(file.get(name), "attrs", ()):
                file[name].attrs.get_id(attribute)
        except (KeyError, OSError, RuntimeError) as error:
            problems.append(f"{name}: {metadata_problem(error)}")
            damaged.add(name)
    for name in (schema.FILENAMES, schema.LABELS, *own_fields(file)):
        item = file.get(name)
        length = len(item) if isinstance(item, h5py.Dataset) else rows
        if name != schema.FILENAMES and is_ragged(file, name):
            length = len(item[schema.FIELD_OFFSETS]) - 1
        if length != rows:
            problems.append(f"{name}: {length:,} rows, but there are {rows:,} images")
    for name in sorted({schema.LABELS, *own_fields(file)} - damaged):
        try:
            require_known_kind(file, name)
            _check_attributes(file, name, problems)
        except PackFormatError as error:
            problems.append(_problem(file.filename, error))
    names, splits = file.get(schema.SPLIT_NAMES), file.get(schema.SPLIT_ROWS)
    if isinstance(splits, h5py.Dataset):
        count = getattr(names, "shape", None) or (splits.shape or ())[:1]
        if splits.shape != (*count, 2):
            problems.append(f"splits/rows: shape {splits.shape}, but there must be a start and a stop for each name")
        elif [0, *splits[:, 1].tolist()] != [*splits[:, 0].tolist(), rows]:
            problems.append(f"splits/rows: the splits do not cover the {rows:,} rows in order")
    for name, read in (
        ("images", stored_layout), (schema.STATISTICS, stored_statistics), (schema.REJECTS, rejects_of),
        # File names have no checksums, but decompressing them fails if they are damaged.
        (schema.FILENAMES, lambda file: deque(stored_names(file[schema.FILENAMES]), maxlen=0)),
        (schema.SPLIT_NAMES, require_utf8_splits),
    ):  # fmt: skip
        try:
            if not any(problem.startswith(name) for problem in problems):
                read(file)
        except (KeyError, TypeError, ValueError) as error:
            problems.append(f"{name}: {error.args[0]}")
        except OSError as error:
            problems.append(f"{name}: {metadata_problem(error, 'its data is damaged')}")


def _check_attributes(file: h5py.File, name: str, problems: list[str]) -> None:
    """Add a problem if a field has no kind, or if the values of labels or a field do not fit the class or column names.

    `name` is the path of the labels or the field.
    """
    item = file.get(name)
    # A field without checksums was not written by h5pack. `_check_other_rows` reports that its checksums are missing.
    is_own = item is not None and schema.checksums_path(name) in file
    if name != schema.LABELS and is_own and schema.KIND not in item.attrs:
        problems.append(f"{name}: no attribute {schema.KIND!r}, so its values are not transformed with images")
    values = item.get(schema.FIELD_DATA) if isinstance(item, h5py.Group) else item
    if not isinstance(values, h5py.Dataset) or values.dtype.kind not in "biuf" or not values.size:
        return
    columns, classes = (attribute_names(item, kind) for kind in (schema.COLUMNS, schema.CLASSES))
    if columns is not None and values.shape[1:] != (len(columns),) and classes is None:
        problems.append(f"{name}: {counted(len(columns), 'column name')}, but rows of shape {values.shape[1:]}")
    if classes is not None:
        numbers = values[()]
        low, high = numbers.min(), numbers.max()
        if not (low >= schema.NO_LABEL and high < len(classes)):
            problems.append(f"{name}: {counted(len(classes), 'class name')}, but labels from {low} to {high}")


def _decode_counted(task: _Rows) -> tuple[int, list[int]]:
    """Check a task's rows; return their number, and the rows that differ from their checksums or cannot be read."""
    with open_file(task.path) as file:
        images = file[task.name]
        require_filters(images)
        # A cache of one chunk suffices, because chunks are read in order.
        if images.chunks:
            filtered = is_filtered(images)
            cache = plan_cache(images.shape, images.chunks, images.dtype.itemsize, filtered=filtered, window=1)
            images = reopen_tuned(images, cache)
        wrong: list[int] = []
        for number, first in enumerate(range(0, len(task.checksums), task.chunk_rows)):
            start, expected = task.start + first, task.checksums[first : first + task.chunk_rows]
            try:
                # A filter may crash on damaged data, so check the stored bytes before HDF5 decodes them.
                if task.stored_checksums is not None:
                    _, data = images.id.read_direct_chunk((start, *[0] * (images.ndim - 1)))
                    if crc32(data) != int(task.stored_checksums[number]):
                        raise OSError("the chunk is damaged")
                differs = row_checksums(images[start : start + len(expected)]) != expected
            except (OSError, RuntimeError):
                differs = np.ones(len(expected), np.bool_)
            wrong += (start + np.flatnonzero(differs)).tolist()
        require_open_sources(images)
    return len(task.checksums), wrong


def _filenames(path: str, rows: list[int]) -> dict[int, str]:
    try:
        with open_file(path) as file:
            stored = file[schema.FILENAMES]
            return {row: text(stored[row]) for row in rows[:1000] if row < len(stored)}
    except (H5PackError, OSError, KeyError, RuntimeError):
        return {}
