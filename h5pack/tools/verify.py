"""`h5pack verify`: is the pack whole, and does every row still hold what was written?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from h5pack import schema
from h5pack.checksum import row_checksums
from h5pack.errors import H5PackError, OptionsError, PackFormatError
from h5pack.hdf5 import (
    dataset_names,
    is_filtered,
    open_file,
    reopen_tuned,
    require_complete,
    require_filters,
    text,
)
from h5pack.layout import plan_cache
from h5pack.machine import available_cpus
from h5pack.pack.executors import open_executor, run
from h5pack.read.chunk_index import index_dataset
from h5pack.rows import RowPlaces, check_counted, check_tasks, describe_check

_TASK_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class VerifyReport:
    """What a verification found.

    Attributes
    ----------
    path : str
    rows : int
        Rows of the pack; 0 where it could not be opened.
    problems : tuple of str
        Faults of the structure.
    damaged : dict of str to list of int
        Rows whose checksum differs, by dataset.
    filenames : dict of int to str
        The source files of damaged rows.
    """

    path: str
    rows: int
    problems: tuple[str, ...] = ()
    damaged: dict[str, list[int]] = field(default_factory=dict)
    filenames: dict[int, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems and not any(self.damaged.values())

    def to_json(self) -> dict[str, Any]:
        """The report for programs; keys are stable."""
        return {
            "path": self.path,
            "ok": self.ok,
            "rows": self.rows,
            "problems": list(self.problems),
            "damaged": self.damaged,
            "filenames": {str(row): name for row, name in self.filenames.items()},
        }


@dataclass(frozen=True)
class _Structure:
    """What one look inside the file gave, so that the HDF5 library need not be asked again."""

    rows: int
    problems: list[str]
    damaged: dict[str, list[int]]
    places: RowPlaces | None
    """Where the images' rows lie; None where they cannot be read beside the library."""
    checksums: npt.NDArray[np.uint32]
    chunk_rows: int = 0
    """Rows of a chunk, where the library has to read them: compressed, or repacked by somebody."""
    chunk_bytes: int = 0


@dataclass(frozen=True)
class _DecodeTask:
    """Rows of whole chunks, to be read through the library."""

    path: str
    start: int
    checksums: npt.NDArray[np.uint32]


def verify(
    path: str | os.PathLike[str], *, workers: int | None = None, start_method: str | None = None, progress: bool = False
) -> VerifyReport:
    """Check a pack's structure, and the checksum of every row.

    The HDF5 library looks at the file in a process of its own, which a damaged file may bring down; the rows are read
    beside the library, in parallel. Compressed rows are read through it, by all processes.

    Parameters
    ----------
    path : path
    workers : int, optional
        Processes; None: the CPUs this process may use, at least 2.
    start_method : str, optional
        Of multiprocessing; None: fork where that is safe, else forkserver.
    progress : bool
        Show a progress bar on standard error, where that is a terminal.

    Returns
    -------
    VerifyReport

    Raises
    ------
    PackFormatError
        If the file is no pack, so that there is nothing to check it against.
    """
    if workers is not None and workers < 1:
        raise OptionsError(f"workers is {workers}; it must be at least 1")
    name = os.path.abspath(path)
    count = max(2, workers or available_cpus())
    with open_executor(count, start_method, None) as executor:
        try:
            structure = executor.submit(_inspect, name).result()
        except _NoPackError as error:
            raise PackFormatError(str(error)) from None
        except H5PackError as error:
            return VerifyReport(name, 0, (str(error).removeprefix(f"{name}: "),))
        except BrokenProcessPool:
            crash = f"HDF5 {h5py.version.hdf5_version} crashed on it; the file is damaged: restore it"
            return VerifyReport(name, 0, (crash,))
        damaged = structure.damaged
        tqdm.monitor_interval = 0
        hidden = None if progress else True
        wrong: list[int] = []
        with tqdm(total=structure.rows, desc="verify", unit=" rows", disable=hidden, leave=False) as bar:
            for checked, found in _check_images(name, structure, executor, 2 * count):
                wrong += found
                bar.update(checked)
        if wrong:
            damaged[schema.IMAGES] = sorted(wrong)
        listed = sorted({row for found in damaged.values() for row in found})
        names = executor.submit(_filenames, name, listed).result() if listed else {}
    return VerifyReport(name, structure.rows, tuple(structure.problems), damaged, names)


def _check_images(
    path: str, structure: _Structure, executor: Executor, in_flight: int
) -> Iterator[tuple[int, list[int]]]:
    """How many rows were checked, and which of them are wrong, task by task."""
    if structure.places is not None:
        rows = np.arange(structure.rows, dtype=np.int64)
        tasks = check_tasks(path, structure.places, rows, structure.checksums, _TASK_BYTES)
        yield from run(executor, check_counted, tasks, in_flight, describe_check)
    elif structure.chunk_rows:
        yield from run(executor, _decode_counted, _decode_tasks(path, structure), in_flight, _describe_decode)


class _NoPackError(PackFormatError):
    """There are no checksums to verify against."""


def _inspect(path: str) -> _Structure:
    with open_file(path) as file:
        try:
            if schema.FORMAT not in file.attrs:
                raise _NoPackError(f"{path}: not a pack (it has no {schema.FORMAT} attribute), so it has no checksums")
            require_complete(file)
            return _inspect_pack(path, file)
        except H5PackError:
            raise
        except Exception as error:
            # Damage shows as any of h5py's errors.
            raise PackFormatError(f"{path}: damaged metadata ({error}); restore the file or convert again") from None


def _inspect_pack(path: str, file: h5py.File) -> _Structure:
    problems: list[str] = []
    damaged: dict[str, list[int]] = {}
    images = file.get(schema.IMAGES)
    if not isinstance(images, h5py.Dataset) or images.ndim != 4 or images.dtype != np.uint8 or images.chunks is None:
        raise PackFormatError(f"{path}: no chunked uint8 dataset 'images' of rank 4; convert again")
    rows = images.shape[0]
    _check_tables(file, rows, problems)
    if schema.LABELS in file and f"{schema.CHECKSUMS}/{schema.LABELS}" not in file:
        problems.append(f"{schema.CHECKSUMS}/{schema.LABELS}: missing")
    for name in dataset_names(file):
        if not name.startswith(f"{schema.CHECKSUMS}/") or name == f"{schema.CHECKSUMS}/{schema.IMAGES}":
            continue
        target = name.removeprefix(f"{schema.CHECKSUMS}/")
        if target not in file or len(file[target]) != len(file[name]):
            problems.append(f"{name}: there is no dataset {target!r} of as many rows")
            continue
        wrong = np.flatnonzero(row_checksums(file[target][()]) != file[name][()])
        if len(wrong):
            damaged[target] = wrong.tolist()
    checksums = file.get(f"{schema.CHECKSUMS}/{schema.IMAGES}")
    if not isinstance(checksums, h5py.Dataset) or checksums.shape != (rows,):
        problems.append("checksums/images: missing, or not one a row")
        return _Structure(rows, problems, damaged, None, np.zeros(0, np.uint32))
    expected = checksums[()]
    try:
        index = index_dataset(file, images, schema.IMAGES)
    except PackFormatError as error:
        problems.append(str(error).removeprefix(f"{path}: "))
        return _Structure(rows, problems, damaged, None, expected)
    absent = np.flatnonzero(index.addresses < 0)
    if len(absent):
        problems.append(f"images: {len(absent)} chunks have no storage, chunk {int(absent[0])} first")
        return _Structure(rows, problems, damaged, None, expected)
    if index.reason is not None or is_filtered(images):
        return _Structure(rows, problems, damaged, None, expected, images.chunks[0], int(np.prod(images.chunks)))
    return _Structure(rows, problems, damaged, RowPlaces(index.addresses, index.chunk_rows, index.row_bytes), expected)


def _check_tables(file: h5py.File, rows: int, problems: list[str]) -> None:
    for name in (schema.FILENAMES, schema.SPLIT_NAMES, schema.SPLIT_ROWS, "statistics/mean", "statistics/std"):
        if not isinstance(file.get(name), h5py.Dataset):
            problems.append(f"{name}: missing")
    for name in (schema.FILENAMES, schema.LABELS):
        item = file.get(name)
        if isinstance(item, h5py.Dataset) and len(item) != rows:
            problems.append(f"{name}: {len(item):,} rows, and images has {rows:,}")
    splits = file.get(schema.SPLIT_ROWS)
    if isinstance(splits, h5py.Dataset):
        edges = splits[()].reshape(-1, 2)
        joined = [0, *edges[:, 1].tolist()]
        if edges[:, 0].tolist() != joined[:-1] or joined[-1] != rows:
            problems.append(f"splits/rows: do not cover the {rows:,} rows one behind the other")


def _decode_tasks(path: str, structure: _Structure) -> Iterator[_DecodeTask]:
    step = structure.chunk_rows * max(1, _TASK_BYTES // structure.chunk_bytes)
    for start in range(0, structure.rows, step):
        yield _DecodeTask(path, start, structure.checksums[start : start + step])


def _decode_counted(task: _DecodeTask) -> tuple[int, list[int]]:
    """How many rows were read through the HDF5 library, and those whose checksum differs or which it does not give."""
    with open_file(task.path) as file:
        images = file[schema.IMAGES]
        require_filters(images)
        # A cache of one chunk: each is decoded once.
        images = reopen_tuned(
            images, plan_cache(images.shape, images.chunks, 1, filtered=is_filtered(images), window=1)
        )
        stop = task.start + len(task.checksums)
        wrong: list[int] = []
        for start in range(task.start, stop, images.chunks[0]):
            rows = range(start, min(start + images.chunks[0], stop))
            try:
                found = row_checksums(images[rows.start : rows.stop])
            except (OSError, RuntimeError):
                wrong += rows
            else:
                expected = task.checksums[rows.start - task.start : rows.stop - task.start]
                wrong += [start + int(place) for place in np.flatnonzero(found != expected)]
    return len(task.checksums), wrong


def _describe_decode(task: _DecodeTask) -> str:
    return f"{task.path} rows {task.start}-{task.start + len(task.checksums) - 1}"


def _filenames(path: str, rows: list[int]) -> dict[int, str]:
    try:
        with open_file(path) as file:
            stored = file[schema.FILENAMES]
            return {row: text(stored[row]) for row in rows[:1000] if row < len(stored)}
    except (H5PackError, OSError, KeyError, RuntimeError):
        return {}
