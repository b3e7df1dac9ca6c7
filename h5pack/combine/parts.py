"""Parts: the packs of which another pack is made. This module opens them, compares them and merges their tables."""

from __future__ import annotations

import itertools
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from h5pack.errors import PackFormatError, SourceError
from h5pack.format import schema
from h5pack.format.checksums import crc32
from h5pack.format.fields import FieldValues, RaggedRows, as_ragged, field_data, field_kind
from h5pack.pack.options import LAYOUTS
from h5pack.pack.statistics import channel_sums, encoded_sums, sampled_rows, statistics_of
from h5pack.read.chunk_index import ChunkIndex
from h5pack.read.encoded import EncodedIndex, row_decoder
from h5pack.read.engine import Engine
from h5pack.read.hdf5 import attribute, is_pack, open_file, reporting_damage, require_complete, stored_options, text
from h5pack.read.virtual_index import VirtualIndex
from h5pack.sources.catalog import Catalog, NameFilter, NameTable, Reject
from h5pack.sources.folders import split_order
from h5pack.sources.hdf5_catalog import HDF5Datasets, hdf5_catalog
from h5pack.sources.hdf5_rows import HDF5RowReader
from h5pack.sources.hdf5_tables import dataset_source_error
from h5pack.system.arrays import equal_runs
from h5pack.system.files import absolute_path
from h5pack.system.parameters import require_local
from h5pack.system.text import listed

Rows = npt.NDArray[np.int64]
_READ_ROWS = 64


@dataclass(frozen=True)
class Part:
    """A pack whose rows become rows of another pack."""

    path: Path
    catalog: Catalog
    layout: str
    options: dict[str, Any]  # the options that the pack stores
    rejects: tuple[Reject, ...]
    statistics: dict[str, Any]  # as in `PackTables`; also "pixels", the number of pixels they were computed from

    def __len__(self) -> int:
        return len(self.catalog)

    @property
    def reader(self) -> HDF5RowReader:
        """The reader of the pack's images, masks and further images."""
        assert isinstance(self.catalog.reader, HDF5RowReader)
        return self.catalog.reader

    @property
    def engine(self) -> Engine:
        """The engine that reads the pack's rows."""
        return self.reader.engine

    @property
    def pixel_datasets(self) -> tuple[str, ...]:
        """Paths of the datasets of images, masks and further images, in the order of the catalog's fields."""
        return self.reader.images, *self.reader.pixel_fields

    @property
    def pixel_dtypes(self) -> list[np.dtype[Any]]:
        """Dtypes of the fields of masks and of further images."""
        return [self.engine.indexes[dataset].dtype for dataset in self.reader.pixel_fields]

    @property
    def index(self) -> ChunkIndex:
        """The index of the images dataset."""
        return self.reader.index

    @property
    def is_encoded(self) -> bool:
        """Whether the pack keeps JPEG files."""
        return isinstance(self.index, EncodedIndex)

    @property
    def is_virtual(self) -> bool:
        """Whether all pixels, or the encoded images, are in other files, and h5pack knows which file has which row."""
        index, indexes = self.index, self.engine.indexes
        found = [index.data] if isinstance(index, EncodedIndex) else [indexes[name] for name in self.pixel_datasets]
        return all(isinstance(one, VirtualIndex) for one in found)

    def checksums(self, dataset: str) -> npt.NDArray[np.uint32]:
        """Return the checksums of all rows of a dataset."""
        found: npt.NDArray[np.uint32] = self.engine.read(schema.checksums_path(dataset), np.arange(len(self)))
        self.engine.close()
        return found

    def read_pixels(self, dataset: str, rows: Rows) -> npt.NDArray[Any]:
        """Return rows of pixels in stored byte order; raise DamagedRowsError if they do not match their checksums."""
        values = self.engine.read(dataset, rows)
        self.engine.check(dataset, rows, values)
        return values.astype(self.engine.indexes[dataset].dtype, copy=False)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The number of rows, and a CRC-32 of the checksums of the images, masks and further images."""
        checksum = 0
        for name in self.pixel_datasets:
            checksum = crc32(np.ascontiguousarray(self.checksums(name)), checksum)
        return {"rows": len(self), "checksum": f"{checksum:08x}"}


@dataclass(frozen=True)
class RowOrigins:
    """Where each row of a pack comes from."""

    owners: npt.NDArray[np.int64]  # (N,): index of the row's part
    rows: Rows  # (N,): number of the row in that part

    @classmethod
    def of(cls, parts: Sequence[Part], order: Rows) -> RowOrigins:
        """Return the origins of the rows `order`, which are numbered across all parts, one part after the other."""
        starts = np.cumsum([0, *map(len, parts)])
        owners = np.searchsorted(starts, order, "right") - 1
        return cls(owners, order - starts[owners])

    def __len__(self) -> int:
        return len(self.rows)

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Divide rows `start` to ``stop - 1`` into runs from one part each; yield (index of the part, start, stop)."""
        edges = (start + equal_runs(self.owners[start:stop])).tolist()
        return ((int(self.owners[first]), first, last) for first, last in itertools.pairwise(edges))


def open_part(path: str | os.PathLike[str]) -> Part:
    """Open a complete pack.

    Raises PackFormatError if the file is missing, not a pack, incomplete or damaged, and SourceError if it lacks
    checksums or has PNG masks that are not contiguous in the file.
    """
    require_local(path, "pack")
    path = Path(absolute_path(path))
    with open_file(path) as file, reporting_damage(path):
        if not is_pack(file):
            raise PackFormatError.at(path, "not an h5pack file; make a pack of it with 'h5pack convert'")
        require_complete(file)
        options, layout = stored_options(file), stored_layout(file)
        rejects, statistics = rejects_of(file), stored_statistics(file)
    catalog = hdf5_catalog(path, HDF5Datasets(), NameFilter())
    part = Part(path, catalog, layout, options, rejects, statistics)
    statistics["pixels"] = _measured_pixels(part)
    for name in part.pixel_datasets:
        index = part.engine.indexes[name]
        if schema.checksums_path(name) not in part.engine.indexes:
            problem = (
                f"has no checksums of {name!r}, so rows cannot be checked; make a new pack of it with 'h5pack convert'"
            )
            raise SourceError.at(path, problem, dataset=name)
        if isinstance(index, EncodedIndex) and index.is_mask and index.base is None:
            problem = f"its masks {name!r} are not contiguous in the file; make a new pack of it with 'h5pack convert'"
            raise SourceError.at(path, problem, dataset=name)
    # Close the file, because thousands of packs may be combined. The next read opens it again.
    part.engine.close()
    return part


def rejects_of(file: h5py.File) -> tuple[Reject, ...]:
    """Return the rejected images that a pack lists."""
    if schema.REJECTS not in file:
        return ()
    names, reasons = (file[f"{schema.REJECTS}/{one}"][()].tolist() for one in ("filenames", "reasons"))
    return tuple(Reject(text(name), text(reason)) for name, reason in zip(names, reasons, strict=True))


def stored_layout(file: h5py.File) -> str:
    """Return the layout of a pack's images; raise ValueError if it is unknown."""
    images = file.get(schema.IMAGES)
    layout = "nhwc" if images is None else text(attribute(images, schema.LAYOUT, "nhwc"))
    if layout not in LAYOUTS:
        raise ValueError(f"{schema.LAYOUT} is {layout!r}")
    return layout


def stored_statistics(file: h5py.File) -> dict[str, Any]:
    """Return the statistics of a pack; raise KeyError or ValueError if some are missing or impossible."""
    group = file[schema.STATISTICS]
    found: dict[str, Any] = {name: group[name][()] for name in ("mean", "std")}
    numbers = {name: int(group.attrs[name]) for name in ("rows", "step")}
    images, wanted = file.get(schema.IMAGES), (found["mean"].size,)
    if isinstance(images, h5py.Dataset):
        wanted = (
            1 if images.ndim == 3 else images.shape[1 if text(images.attrs.get(schema.LAYOUT, b"")) == "nchw" else -1],
        )
    in_range = not numbers["rows"] or all(((one >= 0) & (one <= 1)).all() for one in found.values())
    if not in_range or any(one.shape != wanted for one in found.values()):
        raise ValueError("the mean and std of its statistics are not one number from 0 to 1 per channel")
    if numbers["rows"] < 0 or numbers["step"] < 1:
        raise ValueError(f"its statistics have the impossible values rows={numbers['rows']}, step={numbers['step']}")
    split, names = text(group.attrs["split"]), file.get(schema.SPLIT_NAMES)
    if names is not None and split not in map(text, names[()]):
        raise ValueError(f"they are of the split {split!r}, which it does not have")
    return {**found, **numbers, "split": split}


def _measured_pixels(part: Part) -> int:
    """Return the number of pixels that a pack's statistics were computed from.

    The number is an estimate if some encoded images could not be decoded when the statistics were computed.
    """
    rows, step, name = (part.statistics[key] for key in ("rows", "step", "split"))
    names = part.catalog.split_names
    if not isinstance(part.index, EncodedIndex):
        return int(rows * math.prod(part.index.row_shape) // len(part.statistics["mean"]))
    own = np.flatnonzero(part.catalog.split_ids == (names.index(name) if name in names else -1))[::step]
    sizes = part.index.image_sizes[own].astype(np.int64).prod(axis=1)
    # Statistics leave out rows that could not be decoded. It is unknown which rows these are, so assume that the rows
    # that were decoded have the mean size.
    return int(int(sizes.sum()) * rows // max(1, len(own)))


def require_alike(path: Path, own: dict[str, Any], other_path: Path | str, other: dict[str, Any], advice: str) -> None:
    """Raise SourceError if a property of a pack differs from that of another pack or source.

    The keys of `own` and `other` are the words for the properties in the message; see `table_forms`.
    """
    for what, value in own.items():
        if value != other[what]:
            problem = f"has {what} {_shown(value)}, but {other_path} has {_shown(other[what])}; {advice}"
            raise SourceError.at(path, problem)


def _content(part: Part) -> dict[str, Any]:
    images = "JPEG files" if part.is_encoded else part.index.row_shape
    return {"the layout": part.layout, "images of": images, **table_forms(part.catalog, part.pixel_dtypes)}


def table_forms(catalog: Catalog, dtypes: Iterable[Any]) -> dict[str, Any]:
    """Return the properties of the tables that must be the same in all parts, as a dict for `require_alike`.

    They are the kind of labels, the label columns, and the names and forms of fields (see `_field_forms`). `dtypes` are
    the dtypes of `Catalog.pixel_fields`, in the same order.
    """
    columns = catalog.label_names if catalog.labels is not None and catalog.labels.ndim == 2 else None
    forms = _field_forms(catalog, dtypes)
    names = listed([name for name, _ in forms]) or None
    return {
        "labels of the kind": label_kind(catalog),
        "the label columns": columns,
        "the fields": names,
        "the types of fields": forms,
    }


def _field_forms(catalog: Catalog, dtypes: Iterable[Any]) -> list[tuple[str, tuple[Any, ...]]]:
    """Return the (name, form) of each field, sorted by name. `dtypes` are the dtypes of `Catalog.pixel_fields`.

    A form is (kind, dtype, shape of an entry). If the entries are class numbers, the form ends with "classes". The form
    of a field of pixels (masks or further images) is only (kind, dtype).
    """
    columns = ((name, values, field_data(values)) for name, values in catalog.fields.items())
    forms = [
        (name, (field_kind(values), str(data.dtype), data.shape[1:], *["classes"] * _has_classes(values)))
        for name, values, data in columns
    ]
    pixels = zip(catalog.pixel_fields, dtypes, strict=True)
    return sorted([*forms, *((one.name, (one.kind, str(np.dtype(dtype)))) for one, dtype in pixels)])


def _has_classes(values: FieldValues) -> bool:
    return isinstance(values, RaggedRows) and values.classes is not None


def fitted(catalogs: Sequence[Catalog]) -> list[Catalog]:
    """Return the catalogs with the values of each field in one dtype if no number changes.

    If the first values of a field are ragged, arrays become ragged rows: a few rows may all happen to have one length.
    The dtype is that of a model: the field's values in one of the catalogs. The model is the first with entries and
    class names, else the first with entries, else the first with class names, else the first of all. `_as_model` says
    what else is taken from it.
    """
    fields = [dict(catalog.fields) for catalog in catalogs]
    for name, first in catalogs[0].fields.items():
        owners = [found for found in fields if name in found]
        columns = [as_ragged(found[name]) if field_kind(first) == schema.RAGGED else found[name] for found in owners]
        model = max(columns, key=lambda values: (len(field_data(values)) > 0, _has_classes(values)))
        for found, values in zip(owners, columns, strict=True):
            found[name] = _as_model(values, model)
    return [replace(catalog, fields=found) for catalog, found in zip(catalogs, fields, strict=True)]


def _as_model(values: FieldValues, model: FieldValues) -> FieldValues:
    """Return `values` in the dtype of `model` if no number changes, else unchanged.

    Ragged rows without entries get the shape of an entry from `model`. If `model` has class names and they have none,
    theirs become ().
    """
    if field_kind(values) != field_kind(model):
        return values
    data, dtype = field_data(values), field_data(model).dtype
    if isinstance(values, RaggedRows) and not len(data):
        classes = values.classes or (() if _has_classes(model) else None)
        return replace(values, data=field_data(model)[:0], classes=classes)
    if data.dtype == dtype:
        return values
    with np.errstate(all="ignore"):
        cast = data.astype(dtype)
        # Both comparisons are needed. uint8 200 becomes int8 -56, which becomes uint8 200 again. NumPy compares int64
        # with float64 in float64, so 2**53 + 1 equals 2**53.
        if not all(np.array_equal(one, data, equal_nan=True) for one in (cast, cast.astype(data.dtype))):
            return values
    return replace(values, data=cast) if isinstance(values, RaggedRows) else cast


def label_kind(catalog: Catalog) -> str | None:
    """Return "table", "integers" or "classes" (integers with class names); None without labels."""
    if catalog.labels is None:
        return None
    if catalog.labels.ndim == 2:
        return "table"
    return "integers" if catalog.label_names is None else "classes"


def _shown(value: Any) -> str:
    """Return a property of a pack as text for a message."""
    if isinstance(value, tuple) and all(isinstance(one, int) for one in value):
        return "x".join(map(str, value))
    return "none" if value is None or value == [] else str(value)


def merge(parts: Sequence[Part]) -> Catalog:
    """Return one catalog of the rows of all packs, one pack after the other. Its reader is that of the first pack.

    Raises SourceError if the packs do not match, or if `merge_classes` refuses their classes.
    """
    catalogs = fitted([part.catalog for part in parts])
    parts = [replace(part, catalog=catalog) for part, catalog in zip(parts, catalogs, strict=True)]
    first, wanted = catalogs[0], _content(parts[0])
    advice = "convert one of them again with the options of the other"
    for part in parts[1:]:
        require_alike(part.path, _content(part), parts[0].path, wanted, advice)
    names = first.split_names
    if any(one.split_names != names for one in catalogs):
        names = split_order(name for one in catalogs for name in one.split_names)
    splits = [np.array([names.index(name) for name in one.split_names], np.int32)[one.split_ids] for one in catalogs]
    label_names, labels = first.label_names, [one.labels for one in catalogs if one.labels is not None]
    if labels and labels[0].ndim == 1 and label_names is not None:
        label_names, maps = merge_classes((part.path, part.catalog.label_names or ()) for part in parts)
        # The label -1 of an unlabeled image selects the last entry of the map, which is also -1.
        labels = [numbers[values] for numbers, values in zip(maps, labels, strict=True)]
    return Catalog(
        "hdf5",
        first.reader,
        first.names if len(parts) == 1 else NameTable.of(name for one in catalogs for name in one.names),
        names,
        np.concatenate(splits),
        labels=np.concatenate(labels) if labels else None,
        label_names=label_names,
        fields={name: _merge_field(parts, name) for name in first.fields},
        pixel_fields=first.pixel_fields,
        rejects=_merge_rejects(parts),
    )


def _merge_rejects(parts: Sequence[Part]) -> tuple[Reject, ...]:
    """Return the rejects of all packs, without those that an earlier pack lists.

    A pack lists a rejected image repeatedly if several lines of a table name it.
    """
    merged: list[Reject] = []
    known: set[Reject] = set()
    for part in parts:
        merged += [reject for reject in part.rejects if reject not in known]
        known.update(part.rejects)
    return tuple(merged)


def merge_classes(found: Iterable[tuple[Path | str, tuple[str, ...]]]) -> tuple[tuple[str, ...], list[Rows]]:
    """Merge the classes of packs, given as (path, class names).

    Returns all class names, and for each pack an array: the new number of each class of the pack, followed by -1.
    Raises SourceError if class names of two packs differ only in case, and neither pack has both of them.
    """
    # Several classes of one pack may have the same name, such as "crane" in ImageNet. They get the keys (name, 0),
    # (name, 1) and so on. The names of two classes of one pack, such as letters, may also differ only in case.
    numbers: dict[tuple[str, int], int] = {}
    origins: dict[str, tuple[str, Path | str]] = {}
    maps: list[Rows] = []
    # Compute the map of equal class names once: thousands of packs may have the same thousands of classes.
    known_maps: dict[tuple[str, ...], Rows] = {}
    for path, names in found:
        if names in known_maps:
            maps.append(known_maps[names])
            continue
        repeats: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        keys = [(name, next(repeats[name])) for name in names]
        added = [key for key in keys if key not in numbers]
        for name in dict.fromkeys(name for name, _ in added if (name, 0) not in numbers):
            known, owner = origins.get(name.casefold(), (name, path))
            if known != name and known not in names:
                problem = (
                    f"its class {name!r} differs only in case from {known!r} of {owner}; rename one of them "
                    "in its source, and convert that source again"
                )
                raise SourceError.at(path, problem)
        for key in added:
            numbers[key] = len(numbers)
            origins.setdefault(key[0].casefold(), (key[0], path))
        known_maps[names] = np.array([*(numbers[key] for key in keys), schema.NO_LABEL], np.int64)
        maps.append(known_maps[names])
    return tuple(name for name, _ in numbers), maps


def _merge_field(parts: Sequence[Part], name: str) -> FieldValues:
    columns = [part.catalog.fields[name] for part in parts]
    ragged = [one for one in columns if isinstance(one, RaggedRows)]
    if not ragged:
        return np.concatenate([np.asarray(one) for one in columns])
    classes, data = ragged[0].classes, [one.data for one in ragged]
    if classes is not None:
        classes, maps = merge_classes((part.path, one.classes or ()) for part, one in zip(parts, ragged, strict=True))
        for part, one in zip(parts, ragged, strict=True):
            _require_classes(part, name, one)
        fits = all(values.dtype.kind in "iu" and len(classes) <= np.iinfo(values.dtype).max for values in data)
        data = [
            numbers[values.astype(np.int64)].astype(values.dtype if fits else np.int64)
            for numbers, values in zip(maps, data, strict=True)
        ]
    lengths = np.concatenate([np.diff(one.offsets) for one in ragged])
    return RaggedRows(ragged[0].kind, np.concatenate(data), np.append(0, np.cumsum(lengths)), classes)


def _require_classes(part: Part, name: str, rows: RaggedRows) -> None:
    """Raise SourceError if a field with class names has a value that is neither the number of a class nor -1."""
    count, values = len(rows.classes or ()), rows.data
    if not values.size:
        return
    if values.dtype.kind not in "iu" or not schema.NO_LABEL <= int(values.min()) <= int(values.max()) < count:
        problem = f"has {count:,} classes, but values from {values.min()} to {values.max()}; correct the field"
        raise dataset_source_error(part.path, schema.field_path(name), problem)


def added_statistics(parts: Sequence[Part], names: tuple[str, ...]) -> dict[str, Any]:
    """Return the statistics of a pack with the splits `names`, computed from those of its parts.

    `names` are in the order of the file. The sums of each part are integers, so they can be recovered from its mean and
    standard deviation without reading rows. A part is left out if its statistics are of another split than those of the
    output. If all parts would be left out, the output gets the split that the statistics of the first part are of.
    """
    split = names[schema.statistics_split(names)]
    if all(part.statistics["split"] != split for part in parts):
        split = parts[0].statistics["split"]
    chosen = [part for part in parts if part.statistics["split"] == split]
    total = np.sum([_sums(part.statistics) for part in chosen], axis=0)
    pixels, rows = (sum(part.statistics[name] for part in chosen) for name in ("pixels", "rows"))
    return statistics_of(total, pixels, rows, max(part.statistics["step"] for part in chosen), split)


def _sums(statistics: dict[str, Any]) -> npt.NDArray[np.uint64]:
    """Return the sums of values and of their squares, uint64 (2, C), from mean and std; exact up to 5e10 pixels."""
    count = statistics["pixels"]
    if not count:
        return np.zeros((2, len(statistics["mean"])), np.uint64)
    mean, std = (np.asarray(statistics[name], np.longdouble) for name in ("mean", "std"))
    sums = np.stack([mean * 255 * count, (std * std + mean * mean) * 255 * 255 * count])
    exact: npt.NDArray[np.uint64] = np.rint(sums).astype(np.uint64)
    return exact


def measured_statistics(part: Part, merged: Catalog, order: Rows) -> dict[str, Any]:
    """Return `Part.statistics` of the rows `order` of a pack, computed from the rows that `convert` would sample."""
    number = schema.statistics_split(merged.split_names)
    own = order[merged.split_ids[order] == number]
    rows = own[sampled_rows(0, len(own), part.is_encoded)]
    total, count, pixels = np.zeros((2, len(part.statistics["mean"])), np.uint64), 0, 0
    for low in range(0, len(rows), _READ_ROWS):
        for sums, size in _row_sums(part, rows[low : low + _READ_ROWS]):
            total, count, pixels = total + sums, count + 1, pixels + size
    step = schema.statistics_step(len(own), part.is_encoded)
    return {**statistics_of(total, pixels, count, step, merged.split_names[number]), "pixels": pixels}


def _row_sums(part: Part, rows: Rows) -> list[tuple[npt.NDArray[np.uint64], int]]:
    """Return (sums as in `_sums`, number of pixels) of each row. Images that cannot be decoded are left out."""
    name = part.reader.images
    if isinstance(part.index, EncodedIndex):
        images = [(encoded_sums(data), data) for data in part.engine.read_bytes(name, rows)]
        # Do not take the size from `image_sizes`, which has no checksums.
        headers = [(sums, row_decoder().header(data)) for sums, data in images if sums is not None]
        return [(sums, header.height * header.width) for sums, header in headers]
    values = part.engine.read(name, rows)
    size = values[0].size // len(part.statistics["mean"])
    return [(sums, size) for sums in channel_sums(list(values), part.layout)]
