"""Virtual files: the tables of all rows of several packs, and HDF5 virtual datasets over their rows."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from h5pack.combine.combination import Combination, CombineReport
from h5pack.pack import finish
from h5pack.pack.file_structure import create_file, describe_dataset, describe_file, require_group
from h5pack.pack.options import ConvertOptions
from h5pack.pack.output import Output, OutputLock
from h5pack.read.chunk_index import ChunkIndex
from h5pack.read.encoded import EncodedIndex
from h5pack.read.virtual_index import VirtualIndex
from h5pack.system.arrays import consecutive_runs, run_edges
from h5pack.system.files import reporting_full_disk, sync_path

_MAPPING_BYTES = 512
"""Upper bound on the bytes that one mapping (see `_VirtualRows`) takes in a virtual file, without the file name."""


def write_virtual(plan: Combination, out: Path, *, overwrite: bool, added: int = 0) -> CombineReport:
    """Write the virtual file of a combination. Interrupted calls are not resumed, because writing takes little time."""
    begin = time.perf_counter()
    output = Output(out, permissions_of=plan.permissions_of(out))
    output.check(ConvertOptions(overwrite=overwrite), resumable=False)
    lock = OutputLock(output)
    try:
        with reporting_full_disk(output.partial, "make room, then run again"):
            output.require_not_begun(lock, ConvertOptions(overwrite=overwrite))
            lock.renew()
            try:
                make_virtual(plan, output, lock, output.final.parent)
                finish.publish(output, lock, overwrite, plan.tables.rejects)
            except BaseException:
                output.structure.unlink(missing_ok=True)
                output.partial.unlink(missing_ok=True)
                raise
        size = os.fstat(lock.descriptor).st_size
        seconds = {"write": time.perf_counter() - begin}
        rejects = len(plan.tables.rejects)
        return CombineReport(str(output.final), plan.rows, size, 0, rejects, added=added, seconds=seconds)
    finally:
        lock.release()


def make_virtual(plan: Combination, output: Output, lock: OutputLock, folder: Path) -> None:
    """Replace ``OUT.partial`` by the virtual file, which refers to packs by paths relative to `folder`."""
    lock.create(output.structure)
    _write(plan, output.structure, folder)
    sync_path(output.structure)
    lock.replace(output.structure)


def _write(plan: Combination, path: Path, folder: Path) -> None:
    mappings = [list(_mappings(plan, number)) for number in range(1 + len(plan.pixel_rows))]
    files = {one.file for found in mappings for one in found}
    # Store % as %%, because HDF5 would replace %b in a name by a number.
    names = {file: os.fsencode(_relative(file, folder).replace("%", "%%")) for file in files}
    room = sum(len(names[one.file]) + _MAPPING_BYTES for found in mappings for one in found)
    room += plan.structure.metadata_bytes
    # HDF5 1.8 has no virtual datasets, so `compat` is not possible.
    structure = replace(plan.structure, compat=False, compression=None, metadata_bytes=room)
    lengths = [plan.stored_rows(plan.rows), *[plan.rows] * len(structure.fields)]
    with create_file(path, structure) as file:
        for (name, row_shape, dtype), found, rows in zip(structure.datasets, mappings, lengths, strict=True):
            shape = (rows, *row_shape)
            require_group(file, os.path.dirname(name))
            dataset = _create(file, name, shape, dtype, _sources(shape, found, names))
            describe_dataset(dataset, structure)
        describe_file(file, structure, plan.tables)


class _VirtualRows(NamedTuple):
    """Consecutive rows of a virtual dataset (bytes, if images are encoded), and where they are stored."""

    first: int  # first row in the virtual dataset
    length: int
    file: str
    dataset: str
    start: int  # first row in the source dataset
    rows: int  # number of rows of the whole source dataset


def _mappings(plan: Combination, number: int) -> Iterator[_VirtualRows]:
    """Yield mappings in ascending order of rows. Rows of a virtual part are mapped to the files that store them."""
    for owner, start, stop in plan.origins.runs(0, plan.rows):
        part, rows = plan.parts[owner], plan.origins.rows[start:stop]
        index = part.engine.indexes[part.pixel_datasets[number]]
        for low, high in itertools.pairwise(consecutive_runs(rows).tolist()):
            first, begin, end = start + low, int(rows[low]), int(rows[high - 1]) + 1
            if isinstance(index, EncodedIndex) and plan.offsets is not None:
                data = index.data
                first, begin, end = int(plan.offsets[first]), int(index.offsets[begin]), int(index.offsets[end])
            else:
                data = index
            if begin < end:
                yield from _sources_of(str(part.path), data, first, begin, end)


def _sources_of(path: str, index: ChunkIndex, first: int, begin: int, end: int) -> Iterator[_VirtualRows]:
    if not isinstance(index, VirtualIndex):
        yield _VirtualRows(first, end - begin, path, index.name, begin, index.rows)
        return
    ranges = index.ranges(begin, end)
    counts = np.diff(np.append(ranges.firsts, end))
    starts = ranges.firsts + ranges.shifts
    # A range ends where its chunk ends, so join ranges that follow each other in one source.
    joins = (np.diff(ranges.source_ids) == 0) & (starts[1:] == starts[:-1] + counts[:-1])
    for low, high in itertools.pairwise(run_edges(~joins).tolist()):
        source = index.sources[int(ranges.source_ids[low])]
        count, start = int(counts[low:high].sum()), int(starts[low])
        here = first + int(ranges.firsts[low]) - begin
        yield _VirtualRows(here, count, source.file.path, source.index.name, start, source.index.rows)


def _sources(shape: tuple[int, ...], mappings: list[_VirtualRows], names: dict[str, bytes]) -> h5py.h5p.PropDCID:
    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    create.set_obj_track_times(False)
    origin = (0,) * (len(shape) - 1)
    for one in mappings:
        here, there = h5py.h5s.create_simple(shape), h5py.h5s.create_simple((one.rows, *shape[1:]))
        here.select_hyperslab((one.first, *origin), (one.length, *shape[1:]))
        there.select_hyperslab((one.start, *origin), (one.length, *shape[1:]))
        create.set_virtual(here, names[one.file], one.dataset.replace("%", "%%").encode(), there)
    return create


def _relative(path: str, folder: Path) -> str:
    """Return the path of a file relative to `folder`, along symbolic links if that is right, else along real folders.

    For the system, ".." leads from a linked folder to the parent of the link's target.
    """
    found = os.path.relpath(path, folder)
    parent, name = os.path.split(path)
    if os.path.realpath(folder / os.path.dirname(found)) != os.path.realpath(parent):
        found = os.path.relpath(os.path.join(os.path.realpath(parent), name), os.path.realpath(folder))
    return found


def _create(file: h5py.File, name: str, shape: tuple[int, ...], dtype: str, create: h5py.h5p.PropDCID) -> h5py.Dataset:
    kind, space = h5py.h5t.py_create(np.dtype(dtype)), h5py.h5s.create_simple(shape)
    return h5py.Dataset(h5py.h5d.create(file.id, name.encode(), kind, space, create))
