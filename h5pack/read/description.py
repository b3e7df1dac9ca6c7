"""Description of an HDF5 file as a dataset of images: chunk indexes, labels, splits, statistics."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import h5py
import numpy as np
import numpy.typing as npt

from h5pack.errors import PackFormatError
from h5pack.format import schema
from h5pack.format.checksums import crc32
from h5pack.format.fields import is_numeric_dtype
from h5pack.read.chunk_index import ChunkIndex, index_checksums
from h5pack.read.encoded import EncodedIndex, has_kept_images, index_encoded, index_kept, is_encoded, is_mask_group
from h5pack.read.hdf5 import (
    attribute,
    attribute_names,
    dataset_error,
    find_item,
    open_file,
    reporting_damage,
    require_complete,
    require_dataset,
    require_filters,
    text,
)
from h5pack.read.ragged import RaggedIndex, find_field, index_ragged, is_ragged, require_known_kind
from h5pack.read.storage import FileIdentity
from h5pack.read.virtual import identify, index_rows, other_files
from h5pack.read.virtual_index import VirtualIndex
from h5pack.system.arrays import RowNumbers, joined_ranges
from h5pack.system.files import absolute_path
from h5pack.system.parameters import invalid, require_local, texts

_BLOCK_ROWS = 65_536


@dataclass(frozen=True)
class FileDescription:
    """The contents of an HDF5 file, as needed to read it as a dataset of images.

    `indexes` maps each dataset's path in the file to its chunk index: first the images, then labels and fields, then
    the data of ragged fields, whose rows differ in length. Each is followed by its dataset of checksums, if any.
    """

    path: str  # absolute
    identity: FileIdentity  # identity of the file when it was described; the file may be replaced later
    indexes: dict[str, ChunkIndex]
    layout: str | None  # "nhwc" (also for encoded images) or "nchw"; None if not stored
    labels: str | None  # path of the label dataset; None if there are no labels
    fields: tuple[str, ...]  # paths of further datasets with one row per image
    classes: tuple[str, ...] | None  # class names of integer labels; None if the file has none
    columns: tuple[str, ...] | None  # column names of a label table; None if the file has none
    splits: dict[str, RowNumbers]  # the rows of each split
    mean: npt.NDArray[np.float64] | None  # (C,): mean of pixels scaled to 0..1, per channel; None if not stored
    std: npt.NDArray[np.float64] | None  # (C,): standard deviation of the same pixels; None if not stored
    # The index of each ragged field, by the field's path. The index of its data is also in `indexes`.
    ragged: dict[str, RaggedIndex] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)  # attribute "kind" of the fields that have it, by path
    statistics_rows: int = 0  # number of rows that `mean` and `std` were computed from; 0 if not stored
    files: tuple[tuple[str, int], ...] = ()  # path and first row of each file; more than one if files are read as one


def describe_file(
    path: str | os.PathLike[str],
    images: str = schema.IMAGES,
    labels: str | None = schema.LABELS,
    fields: str | Sequence[str] | None = (),
    *,
    sized: bool = True,
) -> FileDescription:
    """Describe a pack, or any HDF5 file with a dataset whose rows are images (pixels, or encoded images).

    - `images`, `labels` and `fields` are paths in the file. For a pack's fields, names suffice.
    - If there is no dataset at the default `images`, the images are the JPEG files in the group `/encoded`.
    - If there is no dataset at the default `labels`, the result has no labels. However, if the file has checksums of
      labels, the labels were lost, which is an error.
    - If `sized` is false, encoded images get the size 0 x 0, which suffices for reading their bytes.

    Raises PackFormatError if the file, or one of the datasets, is missing, damaged or unusable. Raises
    IncompletePackError if the pack is unfinished, and OptionsError if a parameter is invalid.
    """
    require_local(path)
    fields = texts("fields", () if fields is None else fields)
    if not isinstance(images, str):
        raise invalid("images", images, "give the name of a dataset")
    if not (labels is None or isinstance(labels, str)):
        raise invalid("labels", labels, "give the name of a dataset, or None")
    absolute = absolute_path(path)
    with open_file(absolute) as file:
        identity = identify(file).identity
        with reporting_damage(absolute):
            require_complete(file)
            if labels == schema.LABELS and labels not in file and schema.checksums_path(labels) not in file:
                labels = None
            images, labels = images.strip("/"), None if labels is None else labels.strip("/")
            if images == schema.IMAGES and find_item(file, images) is None and has_kept_images(file, schema.ENCODED):
                images = schema.ENCODED
            paths = tuple(find_field(file, name) for name in fields)
            return _describe(file, identity, images, labels, paths, sized=sized)


def require_tensors(pack: FileDescription) -> None:
    """Raise PackFormatError if a dataset holds numbers that PyTorch does not have, such as long doubles."""
    for name, index in pack.indexes.items():
        if not is_numeric_dtype(index.dtype):
            problem = f"holds {index.dtype}, which PyTorch does not have; store it as float64, or name another dataset"
            raise dataset_error(pack.path, name, problem)


def _describe(
    file: h5py.File,
    identity: FileIdentity,
    images: str,
    labels: str | None,
    fields: tuple[str, ...],
    *,
    sized: bool,
) -> FileDescription:
    indexes: dict[str, ChunkIndex] = {}
    ragged: dict[str, RaggedIndex] = {}
    roles, rows = {labels: "labels", images: "images"}, -1
    for name in (images, *(() if labels is None else (labels,)), *fields):
        index = _index(file, name, roles.get(name, "fields"), sized=sized)
        rows = index.rows if rows < 0 else rows
        _require_length(file, name, index.rows, images, rows)
        if isinstance(index, RaggedIndex):
            ragged[name] = index
            continue
        indexes[name] = index
        # If a dataset of an HDF5 file holds encoded images, the returned rows are decoded pixels, so checksums of its
        # rows do not apply. The checksums of a pack's encoded images (`EncodedIndex`) do: they are of the stored bytes.
        if isinstance(index, EncodedIndex) or not index.is_encoded:
            indexes.update(index_checksums(file, name, rows))
    _require_same_sources(file, indexes, images)
    for name, one in ragged.items():
        indexes.update({one.data.name: one.data, **index_checksums(file, name, rows)})
    label = None if labels is None else file[labels]
    layout = "nhwc" if indexes[images].is_encoded else attribute(file[images], schema.LAYOUT)
    return FileDescription(
        path=file.filename,
        identity=identity,
        indexes=indexes,
        layout=None if layout is None else text(layout),
        labels=labels,
        fields=fields,
        classes=None if label is None else attribute_names(label, schema.CLASSES),
        columns=None if label is None else attribute_names(label, schema.COLUMNS),
        splits=_splits(file, rows, images),
        mean=_statistic(file, "mean"),
        std=_statistic(file, "std"),
        statistics_rows=int(attribute(file[schema.STATISTICS], "rows", 0)) if schema.STATISTICS in file else 0,
        files=((file.filename, 0),),
        ragged=ragged,
        kinds={name: text(kind) for name in fields if (kind := attribute(file[name], schema.KIND)) is not None},
    )


def _index(file: h5py.File, name: str, role: str, *, sized: bool) -> ChunkIndex | RaggedIndex:
    """Return the index of the images, the labels, or one of the fields, depending on `role`."""
    if role == "images" and has_kept_images(file, name):
        return index_kept(file, name, sized=sized)
    if is_mask_group(file, name):
        if role != "fields":
            raise dataset_error(file.filename, name, "holds masks; name it in fields, not as images or labels")
        return index_kept(file, name, sized=sized)
    if role == "fields" and is_ragged(file, name):
        return index_ragged(file, name)
    dataset = require_dataset(file, name, "fields=[NAME]" if role == "fields" else f"{role}=NAME")
    require_known_kind(file, name)
    _require_rows(file, dataset, role == "images")
    if is_encoded(dataset):
        return replace(index_encoded(file, dataset, name, sized=sized), external_files=other_files(file, dataset))
    index = index_rows(file, dataset, name)
    return _single_labels(file.filename, dataset, index) if role == "labels" else index


def _require_same_sources(file: h5py.File, indexes: dict[str, ChunkIndex], images: str) -> None:
    """Raise PackFormatError if a source file of a pack's virtual images now holds other images.

    The first and the last row of each source are compared with the checksums in the pack, if it has checksums.
    """
    index, path = indexes[images], schema.checksums_path(images)
    data = index.data if isinstance(index, EncodedIndex) else index
    if not isinstance(data, VirtualIndex) or path not in indexes:
        return
    checksums, stops = file[path], np.append(data.starts[1:], data.rows)
    for number, source in enumerate(data.sources):
        own = np.flatnonzero(data.source_ids == number)
        # Open each source by itself. If its rows were read through `file`, HDF5 would keep all sources open.
        with open_file(source.file.path) as holder:
            stored = holder[source.index.name]
            for row, at in ((int(data.starts[own[0]]), own[0]), (int(stops[own[-1]]) - 1, own[-1])):
                start, stop = row, row + 1
                if isinstance(index, EncodedIndex):
                    row = int(np.searchsorted(index.offsets, row, "right")) - 1
                    start, stop = int(index.offsets[row]), int(index.offsets[row + 1])
                shift = int(data.shifts[at])
                # If the source has no allocated storage, compare fill values. Do not read them from `stored`, which
                # may lack these rows: the source may be the placeholder for rows that no mapping covers.
                fill = source.index.fill * (stop - start) if source.index.is_empty else b""
                if crc32(fill or np.ascontiguousarray(stored[start + shift : stop + shift])) != int(checksums[row]):
                    changed = source.file.path
                    problem = f"row {row} differs from its checksum, because {changed} was changed"
                    problem = f"{file.filename}: {problem}; restore that file, or join the packs again"
                    raise PackFormatError(problem, path=changed, dataset=images, rows=(row,))


def _single_labels(path: str, dataset: h5py.Dataset, index: ChunkIndex) -> ChunkIndex:
    """Return `index`. Change its shape to (N,) if each row is one integer and the dataset has no column names.

    Raises PackFormatError if such an integer does not fit into int64.
    """
    single = {*index.row_shape} == {1} and index.dtype.kind in "iu" and schema.COLUMNS not in dataset.attrs
    index = replace(index, shape=index.shape[:1]) if single else index
    if not index.row_shape and index.native_dtype == np.uint64:
        require_filters(dataset)
        for low in range(0, index.rows, _BLOCK_ROWS):
            # Such a label would become a negative number, such as -1, which means that an image has no label.
            if (largest := int(dataset[low : low + _BLOCK_ROWS].max())) >= 2**63:
                problem = f"holds {largest}, but labels are int64; name the dataset in fields, not as labels"
                raise dataset_error(path, index.name, problem)
    return index


def _require_length(file: h5py.File, name: str, length: int, images: str, rows: int) -> None:
    if length != rows:
        problem = f"has {length:,} rows, but {images!r} has {rows:,}; name datasets of equal length"
        if getattr(file[name], "shape", None) == (1, rows):
            problem = f"is a row of {rows:,} numbers, as MATLAB stores a column; pack the file with 'h5pack convert'"
        raise dataset_error(file.filename, name, problem)


def _require_rows(file: h5py.File, dataset: h5py.Dataset, images: bool) -> None:
    """Raise PackFormatError if the rows of a dataset are neither real numbers nor encoded images."""
    refuse = partial(dataset_error, file.filename, dataset.name.lstrip("/"))
    if dataset.ndim < 1:
        raise refuse("has no rows, but a single value or none; name another dataset")
    try:
        dtype = dataset.dtype
    except TypeError as error:
        raise refuse(f"has a type without a NumPy dtype ({error}); name another dataset") from error
    if is_encoded(dataset):
        return
    base, string = h5py.check_vlen_dtype(dtype), h5py.check_string_dtype(dtype)
    if isinstance(base, np.dtype):
        allowed = "only encoded images may have rows of variable length (uint8 on one axis)"
        raise refuse(f"holds variable-length {base} of shape {dataset.shape}; {allowed}; name another dataset")
    if images and string is not None:
        advice = "write encoded images as variable-length uint8 (h5py.vlen_dtype(np.uint8)), or name another dataset"
        raise refuse(f"holds strings, which lose zero bytes of encoded images; {advice}")
    if string is not None:
        advice = "pack the file with 'h5pack convert', which stores texts, or name another dataset"
        raise refuse(f"holds texts, not real numbers; {advice}")
    if dtype.kind not in "biuf":
        raise refuse(f"holds {dtype}, not real numbers; name another dataset")


def _splits(file: h5py.File, rows: int, images: str) -> dict[str, RowNumbers]:
    names, parts = _fuel_splits(file, images)
    if schema.SPLIT_ROWS in file and schema.SPLIT_NAMES in file:
        names = [text(name) for name in file[schema.SPLIT_NAMES][()]]
        parts = [range(int(start), int(stop)) for start, stop in file[schema.SPLIT_ROWS][()]]
    if len(names) != len(parts) or not all(_are_rows(part, rows) for part in parts):
        problem = f"its splits do not fit the {rows:,} rows of {images!r}; run 'h5pack verify' on the file"
        raise PackFormatError.at(file.filename, problem)
    # A split to which images were appended consists of several ranges.
    found: dict[str, list[RowNumbers]] = {}
    for name, part in zip(names, parts, strict=True):
        found.setdefault(name, []).append(part)
    return {name: joined_ranges(parts) for name, parts in found.items()}


def _fuel_splits(file: h5py.File, images: str) -> tuple[list[str], list[RowNumbers]]:
    """Return the names and the rows of the splits that the package Fuel stores in the root attribute `split`.

    Return two empty lists if the file has no such attribute.
    """
    table = np.atleast_1d(attribute(file, "split", 0))
    if not {"split", "source", "start", "stop", "indices"} <= {*(table.dtype.names or ())}:
        return [], []
    listed = [entry for entry in table if text(entry["source"]) == images]
    rows: list[RowNumbers] = [
        np.asarray(file[entry["indices"]][()], np.int64)
        if entry["indices"]
        else range(int(entry["start"]), int(entry["stop"]))
        for entry in listed
    ]
    return [text(entry["split"]) for entry in listed], rows


def _are_rows(part: RowNumbers, rows: int) -> bool:
    """Return whether all numbers in `part` are row numbers, from 0 to `rows` - 1."""
    if isinstance(part, range):
        return 0 <= part.start <= part.stop <= rows
    return bool(((part >= 0) & (part < rows)).all())


def _statistic(file: h5py.File, name: str) -> npt.NDArray[np.float64] | None:
    item = find_item(file, f"{schema.STATISTICS}/{name}")
    return None if not isinstance(item, h5py.Dataset) or item.ndim != 1 else np.asarray(item[()], np.float64)
