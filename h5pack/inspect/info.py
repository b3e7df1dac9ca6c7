"""`h5pack info`: describe an HDF5 file and its storage, find what makes row reads slow, and recommend a command."""

from __future__ import annotations

import io
import math
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import h5py
import numpy as np

from h5pack.errors import PackFormatError, ReadError, SourceError
from h5pack.format import schema
from h5pack.format.plans import CachePlan, plan_cache, plan_chunks
from h5pack.inspect.pack_metadata import describe_pack, number_text, pack_lines, shape_text
from h5pack.pack.options import convert_command, copy_name, lacks_labels
from h5pack.read.chunk_decoder import DECODED_BYTES
from h5pack.read.chunk_index import index_dataset
from h5pack.read.encoded import index_encoded, is_encoded
from h5pack.read.hdf5 import (
    NOT_UTF8,
    ExternalLink,
    attribute_names,
    chunk_grid,
    external_links,
    filters_of,
    find_item,
    is_pack,
    list_datasets,
    open_file,
    reopen_tuned,
    reporting_damage,
    require_dataset,
    require_open_sources,
)
from h5pack.read.virtual import files_of, has_other_files, missing_sources
from h5pack.sources.hdf5_catalog import FurtherDatasets, channel_axes, find_images, is_image_array, packing_options
from h5pack.sources.hdf5_tables import find_labels
from h5pack.system.parameters import flags, invalid
from h5pack.system.text import counted, format_bytes, printable_lines

_DEFAULT_CACHE_BYTES = int(h5py.h5p.create(h5py.h5p.FILE_ACCESS).get_cache()[2])  # 8 MiB; 1 MiB before HDF5 2.0
_FILTER_NAMES: dict[int, str] = {one: one.name.lower() for one in schema.FilterId}
_FILTER_NAMES |= {4: "szip", 5: "nbit", 6: "scaleoffset", 307: "bzip2", 32013: "zfp", 32026: "blosc2"}
_LAYOUTS = {getattr(h5py.h5d, name.upper()): name for name in ("chunked", "contiguous", "compact", "virtual")}
# Tables of a pack, which `FileReport.to_text` describes together in one line.
_TABLES = (schema.CHECKSUMS, schema.FILENAMES, schema.SPLITS, schema.STATISTICS, schema.REJECTS)
_MAX_SAMPLED_ROWS = 1024
_MAX_LISTED = 200  # maximum number of datasets in the text, unless it is full
_SMALL_CHUNK_BYTES = 256 * 1024
"""Smaller chunks are a fault if default chunks have at least 4 times as many rows. Chunks of one row of 114 KiB were
read at 0.6 to 0.75 of the speed of the default chunks."""
_OPENING_GAP_BYTES = 1024 * 1024


@dataclass(frozen=True)
class DatasetReport:
    """The storage of one dataset.

    If rows have variable length, `bytes` is 0, because the size is unknown without reading all rows, and `stored_bytes`
    counts only the references to the rows.
    """

    name: str
    dtype: str  #: such as "uint8"; for rows of variable length, such as "variable-length uint8"
    shape: tuple[int, ...]
    layout: str  #: "chunked", "contiguous", "compact" or "virtual"
    chunks: tuple[int, ...] | None  #: shape of a chunk; None if the dataset has no chunks
    index: str | None  #: kind of chunk index, such as "B-tree v1"; None if the dataset has no chunks
    filters: tuple[str, ...]
    bytes: int  #: size of the uncompressed array
    stored_bytes: int  #: size of the dataset's stored data in the file
    cache: CachePlan | None  #: recommended chunk cache for reading rows in any order through the HDF5 library
    faults: tuple[str, ...] = ()  #: what makes reading single rows slow, or impossible
    fix: tuple[str, ...] | None = None  #: command that writes a copy without the faults, as a list of arguments
    files: int = 0  #: number of files that a virtual dataset refers to
    #: size of all decoded chunks, which `H5Loader` keeps in memory; 0 if it does not keep them, or `faults` is empty
    kept_bytes: int = 0
    #: variant of `fix` that packs a field as labels. It is set only if `fix` has fields but no labels, and exactly one
    #: of these fields has a single integer per row.
    label_fix: tuple[str, ...] | None = None

    @property
    def overhead(self) -> float:
        """Ratio of the stored size to the size of the array; 1 if `bytes` is 0."""
        return self.stored_bytes / self.bytes if self.bytes else 1.0

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON-serializable dict."""
        return {**asdict(self), "overhead": round(self.overhead, 4)}

    def to_text(self, path: str, full: bool = False) -> str:
        """Return the report as lines of text; `full` adds details. `path`, the file's path, is used in commands."""
        share = f", {self.overhead:.3f} times the array's size" if self.bytes and self.layout == "chunked" else ""
        size = f"{format_bytes(self.stored_bytes)} stored{share}"
        stored = f"refers to {counted(self.files, 'file')}" if self.layout == "virtual" else size
        lines = [f"/{self.name}: {self.dtype} {shape_text(self.shape) or 'scalar'}, {self.layout}, {stored}"]
        details = []
        if self.chunks is not None:
            filters = ", ".join(self.filters) or "no filter"
            count = math.prod(-(-size // part) for size, part in zip(self.shape, self.chunks, strict=True))
            index = f", {self.index}" if full else ""
            details.append(f"  chunks {count:,} of {shape_text(self.chunks)}{index}, {filters}")
        if full and self.cache is not None:
            details.append(f"  chunk cache, only for h5py: {self.cache.keywords} ({self.cache.reason})")
        lines += [f"  fault: {fault}" for fault in self.faults]
        if self.fix is not None:
            if self.kept_bytes:
                once = "decodes" if self.filters else "reads"
                kept = f"{once} each chunk once and keeps it in memory, {format_bytes(self.kept_bytes)} in all"
                lines.append(f"  H5Loader: {kept}; each worker of a DataLoader {once} chunks again")
            without, labeled = "", self.label_fix or self.fix
            if self.label_fix is not None:
                name, without = labeled[labeled.index("--labels") + 1], " without labels"
                lines.append(f"  fix if {name} has the labels: {shlex.join(self.label_fix)}")
            lines.append(f"  fix{without}: {shlex.join(self.fix)}")
            if not without and lacks_labels(self.fix):
                how = shlex.join(["h5pack", "info", path, "--labels"])
                text = f"if a field NAME has the labels, '{how} NAME' prints a fix that packs the field as labels"
                lines.append(f"  labels: found none; {text}")
            if "--fields" in self.fix:
                groups = "--val-groups FIELD to keep images with equal values of FIELD in one split"
                lines.append(f"  split: add --val 0.1 for a validation split, and {groups}")
            measure = ["h5pack", "bench", path, "--images", self.name]
            measure += labeled[labeled.index("--labels") :][:2] if "--labels" in labeled and path in labeled else ()
            lines.append(f"  measure: {shlex.join(measure)}")
        return printable_lines([*lines, *details])


@dataclass(frozen=True)
class FileReport:
    """The result of `info`: the datasets of an HDF5 file, and its metadata if it is a pack."""

    path: str  #: the file, as given
    bytes: int  #: size of the file
    pack: dict[str, Any] | None  #: metadata of a pack; None for other files
    datasets: tuple[DatasetReport, ...]
    #: (start, stop) byte ranges that a program reads to open the file and to look up every chunk of datasets with two
    #: or more axes. Over a network, each range takes one request. A range may include gaps of up to 1 MiB.
    opening: tuple[tuple[int, int], ...]
    links: tuple[ExternalLink, ...]  #: links to datasets or groups in other files; `datasets` includes these datasets
    #: command that writes a copy that can be opened with one range; None if one range suffices already
    opening_fix: tuple[str, ...] | None = None
    stats: dict[str, Any] | None = None  #: class counts and channel statistics, if requested

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON-serializable dict. The keys are stable across versions."""
        return {**asdict(self), "datasets": [dataset.to_json() for dataset in self.datasets]}

    def to_text(self, full: bool = False) -> str:
        """Return the report as lines of text.

        `full` adds chunk caches for h5py, the ranges that opening reads, and the datasets after the first 200.
        """
        lines = [f"{self.path}: {format_bytes(self.bytes)}"]
        lines += ["not an h5pack file"] if self.pack is None else pack_lines(self.pack)
        faulty = any(one.faults for one in self.datasets) or not all(one.found for one in self.links)
        lines += [] if faulty else ["faults   none"]
        lines += [f"link     /{one.name}: to {one.target}{'' if one.found else ', not found'}" for one in self.links]
        tables = [one for one in self.datasets if self.pack is not None and one.name.partition("/")[0] in _TABLES]
        listed = [dataset for dataset in self.datasets if dataset not in tables]
        hidden = [] if full else listed[_MAX_LISTED:]
        for dataset in listed[: len(listed) - len(hidden)]:
            lines += dataset.to_text(self.path, full).split("\n")
        if hidden:
            faulty_count = sum(bool(dataset.faults) for dataset in hidden)
            lines.append(f"... and {len(hidden):,} more datasets ({faulty_count:,} with faults), which --full lists")
        if tables:
            stored = format_bytes(sum(one.stored_bytes for one in tables))
            names = ", ".join(dict.fromkeys(one.name.partition("/")[0] for one in tables))
            lines.append(f"tables   {names}: {counted(len(tables), 'dataset')}, {stored} stored")
        if full:
            size = format_bytes(sum(stop - start for start, stop in self.opening))
            one = "; to need only 1 range (faster over a network, not on a local disk)"
            fix = "" if self.opening_fix is None else f"{one}: {shlex.join(self.opening_fix)}"
            lines.append(f"opening  reads {counted(len(self.opening), 'range')} of the file, {size} in all{fix}")
        stats = self.stats or {}
        if stats.get("labels"):
            splits = stats.get("split_labels", {}).items()
            columns = self.pack is not None and "columns" in self.pack
            lines.append("labels: images with each attribute" if columns else "labels: images of each class")
            for name, count in stats["labels"].items():
                parts = ", ".join(f"{split} {counts.get(name, 0):,}" for split, counts in splits)
                lines.append(f"  {name}: {count:,}" + (f" ({parts})" if parts else ""))
        channels = stats.get("channels")
        # `pack_lines` has already shown the stored mean and std of a pack.
        if channels is not None and not (self.pack or {}).get("mean"):
            mean, std = number_text(channels["mean"]), number_text(channels["std"])
            lines.append(f"channels of {counted(channels['rows'], 'row')}: mean {mean}, std {std}")
        return printable_lines(lines)


def info(path: str | os.PathLike[str], *, labels: str | None = None, stats: bool = False) -> FileReport:
    """Describe any HDF5 file: its datasets, how they are stored, and what makes reading single rows slow.

    Parameters
    ----------
    path : path
    labels : str, optional
        Name of the dataset of labels, for counting classes, and for commands that fix faults; "" if there are none.
        Default: detected.
    stats : bool
        Also count the rows of each class, and report channel statistics. A pack stores its channel statistics; for
        other files, they are measured on up to 1,024 rows.

    Returns
    -------
    FileReport

    Raises
    ------
    OptionsError
        If a parameter is of another type.
    PackFormatError
        If the file is missing, damaged or not HDF5, or has no dataset `labels`.
    """
    flags(stats=stats)
    if not isinstance(labels, str | None):
        raise invalid("labels", labels, "give the name of a dataset, or None")
    with open_file(path) as file, reporting_damage(path):
        if labels:
            require_dataset(file, labels, "labels=NAME")
        opening, links = opening_ranges(file.filename), external_links(file)
        pack = describe_pack(file) if is_pack(file) else None
        listed = list_datasets(file, links)
        missing = missing_sources({name: one for name, opened in listed.items() if has_other_files(one := opened())})
        further = FurtherDatasets()
        return FileReport(
            path=file.filename,
            bytes=os.path.getsize(file.filename),
            pack=pack,
            datasets=tuple(describe_dataset(one(), labels, name, missing, further) for name, one in listed.items()),
            opening=opening,
            opening_fix=_opening_fix(file, opening),
            links=links,
            stats=_stats(file, pack or {}, labels) if stats else None,
        )


class _LoggedFile(io.FileIO):
    """A file that appends the (start, stop) byte range of each read to `ranges`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "rb")
        self.ranges: list[tuple[int, int]] = []

    def readinto(self, buffer: Any) -> int:
        start, count = self.tell(), super().readinto(buffer) or 0
        self.ranges.append((start, start + count))
        return count


def opening_ranges(path: str | os.PathLike[str]) -> tuple[tuple[int, int], ...]:
    """Return the byte ranges that a program reads to open an HDF5 file; see `FileReport.opening`."""
    with _LoggedFile(path) as log:
        with h5py.File(log, "r") as file:
            dict(file.attrs)
            for opened in list_datasets(file, links=()).values():
                found = opened()
                dict(found.attrs)
                if found.chunks is not None and found.ndim > 1:
                    found.id.chunk_iter(lambda _: None)
            statistics = (f"{schema.STATISTICS}/{name}" for name in ("mean", "std"))
            for name in (schema.SPLIT_NAMES, schema.SPLIT_ROWS, *statistics):
                if isinstance(file.get(name), h5py.Dataset):
                    file[name][()]
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(log.ranges):
            if merged and start - merged[-1][1] <= _OPENING_GAP_BYTES:
                merged[-1] = merged[-1][0], max(merged[-1][1], stop)
            else:
                merged.append((start, stop))
    return tuple(merged)


def _opening_fix(file: h5py.File, opening: tuple[tuple[int, int], ...]) -> tuple[str, ...] | None:
    """Return a command that writes a copy with all metadata in one place; None if `opening` is already one range."""
    if len(opening) < 2:
        return None
    if is_pack(file):
        return ("h5pack", "subset", file.filename, copy_name(file.filename))
    total = sum(stop - start for start, stop in opening)
    # Make the metadata block larger than `total`, because metadata that does not fit is stored elsewhere.
    block = -(-min(2 * total, total + _OPENING_GAP_BYTES // 2) // 2**16) * 2**16
    return ("h5repack", "-M", str(block), file.filename, copy_name(file.filename))


def faults_of(path: str | os.PathLike[str], name: str) -> tuple[str, ...]:
    """Return the faults of a dataset (see `DatasetReport`); none if `name` is a group, such as `/encoded`."""
    with open_file(path) as file:
        found = file.get(name)
        return describe_dataset(found).faults if isinstance(found, h5py.Dataset) else ()


def describe_dataset(
    dataset: h5py.Dataset,
    labels: str | None = None,
    name: str = "",
    missing: dict[str, str] | None = None,
    further: FurtherDatasets | None = None,
) -> DatasetReport:
    """Describe how a dataset is stored, and what makes reading single rows of it slow.

    `labels` is the dataset of labels that the command in `fix` names: None to detect it, "" if there are none.
    `name` is the path in the report: of a dataset in another file, that of the link to it. `missing` is what
    `missing_sources` returns, if that is known. `further` is shared by several calls.
    """
    name, layout = name or dataset.name.lstrip("/"), _LAYOUTS[dataset.id.get_create_plist().get_layout()]
    filters = tuple(_FILTER_NAMES.get(item.number) or f"{item.name} ({item.number})" for item in filters_of(dataset))
    shape, cache = tuple(dataset.shape or ()), None
    if layout == "chunked":
        cache = plan_cache(shape, dataset.chunks, dataset.id.get_type().get_size(), filtered=bool(filters))
    element = h5py.check_vlen_dtype(dataset.dtype)
    varies = element is not None
    problem = (missing_sources({name: dataset}) if missing is None else missing).get(name)
    if isinstance(dataset.name, bytes):
        problem = f"its name {NOT_UTF8}"
    kept_bytes = 0 if problem else _kept_bytes(dataset)
    faults = (problem,) if problem else _faults(dataset, filters, kept=kept_bytes > 0)
    fix, label_fix = _fixes(dataset, labels, further) if faults and not problem else (None, None)
    return DatasetReport(
        name=name,
        dtype=f"variable-length {getattr(element, '__name__', element)}" if varies else str(dataset.dtype),
        shape=shape,
        layout=layout,
        chunks=dataset.chunks,
        index=_index_kind(dataset, filters),
        filters=filters,
        bytes=int(dataset.nbytes) if dataset.shape is not None and not varies else 0,
        stored_bytes=int(dataset.id.get_storage_size()),
        cache=cache,
        faults=faults,
        fix=fix,
        label_fix=label_fix,
        kept_bytes=kept_bytes if faults else 0,
        files=len({source.file_name for source in dataset.virtual_sources()}) if layout == "virtual" else 0,
    )


def _index_kind(dataset: h5py.Dataset, filters: tuple[str, ...]) -> str | None:
    """Return the kind of chunk index, or None if there are no chunks.

    h5py cannot query the kind. It is derived from the dataset's properties, by the rules of HDF5.
    """
    if dataset.chunks is None:
        return None
    if dataset.file.id.get_create_plist().get_version()[0] < 3:
        return "B-tree v1"
    if unlimited := sum(size is None for size in dataset.maxshape):
        return "extensible array" if unlimited == 1 else "B-tree v2"
    if dataset.shape == dataset.maxshape == dataset.chunks:
        return "single chunk"
    early = dataset.id.get_create_plist().get_alloc_time() == h5py.h5d.ALLOC_TIME_EARLY
    return "implicit" if early and not filters else "fixed array"


def _kept_bytes(dataset: h5py.Dataset) -> int:
    """Return the size of all decoded chunks if `H5Loader` keeps them by default (`H5Loader.decodes_once`), else 0."""
    if dataset.chunks is None or dataset.ndim < 2 or dataset.dtype.kind not in "biuf" or dataset.nbytes > DECODED_BYTES:
        return 0
    try:
        size = index_dataset(dataset.file, dataset, dataset.name.lstrip("/")).decoded_bytes
    except PackFormatError:  # H5Loader cannot read the dataset, for example because a decoder is missing.
        return 0
    return size if size <= DECODED_BYTES else 0


def _faults(dataset: h5py.Dataset, filters: tuple[str, ...], *, kept: bool) -> tuple[str, ...]:
    """Return the faults (see `DatasetReport`) of encoded images or of a chunked numeric array above 1 MiB."""
    if is_encoded(dataset):
        try:
            rows = index_encoded(dataset.file, dataset, dataset.name.lstrip("/")).rows
        except (PackFormatError, ReadError):
            # Row 0 cannot be read or decoded, so it is unknown whether the rows hold images.
            rows = 0
        return ("each row is an encoded image, which must be decoded in every epoch",) if rows else ()
    if dataset.chunks is None or dataset.ndim < 2 or dataset.dtype.kind not in "biuf":
        return ()
    if len(dataset) < 2 or dataset.nbytes <= 1024 * 1024:
        return ()
    chunks, chunk_bytes = dataset.chunks, math.prod(dataset.chunks) * dataset.dtype.itemsize
    per_row = math.prod(chunk_grid(dataset)[1:])
    # In a pack, compression and chunks beyond the array are not faults: the options of its conversion chose them.
    own = is_pack(dataset.file)
    found = []
    if per_row > 1:
        found.append(f"chunks {chunks} split each row into {per_row} parts, which must be put together")
    ratio = dataset.id.get_storage_size() / dataset.nbytes
    if not filters and not own and ratio > 1.05:
        found.append(f"the file stores {ratio:.2f} times the array's size, because chunks extend beyond the array")
    times = "once" if kept else "once per shuffle window"
    if filters and not own and per_row * chunk_bytes > _DEFAULT_CACHE_BYTES:
        found.append(
            f"the chunks of one row take {per_row * chunk_bytes / 2**20:.1f} MiB, but the default cache of HDF5 "
            f"{h5py.version.hdf5_version} has only {format_bytes(_DEFAULT_CACHE_BYTES)}, so h5py decodes the chunks "
            f"again for each row (H5Loader: {times})"
        )
    elif filters and not own:
        found.append(
            f"chunks of {counted(chunks[0], 'row')} are compressed with {', '.join(filters)}, so they must be decoded "
            f"(by H5Loader {times})"
        )
    if dataset.nbytes <= 2**24:
        return tuple(found)
    row_bytes = dataset.nbytes // len(dataset)
    usual = plan_chunks(len(dataset), row_bytes, whole_pages=True).rows
    if chunk_bytes < 16_384:
        found.append(f"chunks have only {chunk_bytes:,} bytes, so looking them up takes longer than reading them")
    elif not filters and per_row == 1 and chunk_bytes < _SMALL_CHUNK_BYTES and 4 * chunks[0] <= usual:
        found.append(
            f"chunks of {counted(chunks[0], 'row')} ({format_bytes(chunk_bytes)}) are read more slowly than the chunks "
            f"of {counted(usual, 'row')} ({format_bytes(usual * row_bytes)}) that h5pack makes by default"
        )
    return tuple(found)


def _fixes(
    dataset: h5py.Dataset, labels: str | None, further: FurtherDatasets | None
) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """Return `DatasetReport.fix`, which writes uncompressed chunks of whole rows or decodes images, and `label_fix`."""
    name, path = dataset.name.lstrip("/"), dataset.file.filename
    is_image = dataset.dtype == np.uint8 and is_image_array(dataset.shape, dataset.dtype)
    if is_encoded(dataset) or (is_image and len(channel_axes(dataset.shape[1:])) == 1):
        fix = convert_command(path, packing_options(dataset.file, name, labels, further))
        fields = [dataset.file[one] for one in fix[fix.index("--fields") + 1].split(",")] if lacks_labels(fix) else []
        names = [field.name for field in fields if field.ndim == 1 and field.dtype.kind in "iu"]
        if len(names) != 1:
            return fix, None
        return fix, convert_command(path, packing_options(dataset.file, name, names[0], further))
    row_bytes = math.prod(dataset.shape[1:]) * dataset.dtype.itemsize
    rows = plan_chunks(len(dataset), row_bytes, whole_pages=True).rows
    chunk = "x".join(map(str, (min(rows, len(dataset)), *dataset.shape[1:])))
    return ("h5repack", "-f", f"{name}:NONE", "-l", f"{name}:CHUNK={chunk}", path, copy_name(path)), None


def _stats(file: h5py.File, pack: dict[str, Any], name: str | None) -> dict[str, Any]:
    result: dict[str, Any] = {}
    try:
        path = find_images(file)
    except SourceError:
        return result
    images = find_item(file, path)
    rows = len(images) if isinstance(images, h5py.Dataset) and images.shape else 0
    labels = file.get(find_labels(file, path, rows) or "" if name is None else name)
    for one in (images, labels):
        if isinstance(one, h5py.Dataset):
            files_of(one)  # HDF5 would read fill values in place of a missing source.
    if isinstance(labels, h5py.Dataset) and labels.shape and labels.dtype.kind in "iu":
        result["labels"] = _label_counts(labels)
        if len(splits := pack.get("splits", {})) > 1:
            result["split_labels"] = {name: _label_counts(labels, parts) for name, parts in splits.items()}
    if pack.get("mean"):
        result["channels"] = {"mean": pack["mean"], "std": pack["std"], "rows": pack["statistics_rows"]}
    elif isinstance(images, h5py.Dataset):
        result["channels"] = _measured_channels(reopen_tuned(images))
    return result


def _label_counts(labels: h5py.Dataset, parts: Sequence[Sequence[int]] = ()) -> dict[str, int]:
    values = np.concatenate([labels[start:stop] for start, stop in parts or [(0, len(labels))]])
    require_open_sources(labels)
    if {*values.shape[1:]} == {1} and schema.COLUMNS not in labels.attrs:
        values = values.reshape(-1)
    if values.ndim == 2:
        columns = attribute_names(labels, schema.COLUMNS) or map(str, range(values.shape[1]))
        return dict(zip(columns, np.count_nonzero(values, axis=0).tolist(), strict=True))
    numbers, counts = np.unique(values, return_counts=True)
    classes = attribute_names(labels, schema.CLASSES) or ()
    found: Counter[str] = Counter()  # Several classes may have the same name; their counts are added.
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        found[classes[number] if 0 <= number < len(classes) else str(number)] += count
    return dict(found)


def _measured_channels(images: h5py.Dataset) -> dict[str, Any] | None:
    """Measure the mean and std of each channel on evenly spaced rows. uint8 values are divided by 255.

    Return None if the images do not have 4 axes, are no numbers, or have values that are not finite.
    """
    if images.ndim != 4 or images.dtype.kind not in "iuf" or not images.size:
        return None
    rows = np.unique(np.linspace(0, len(images) - 1, min(len(images), _MAX_SAMPLED_ROWS)).astype(np.int64))
    axis = 3 if images.shape[3] in (1, 3, 4) else 1
    sums, scale = np.zeros((2, images.shape[axis])), 255.0 if images.dtype == np.uint8 else 1.0
    with np.errstate(all="ignore"):
        for row in rows.tolist():
            pixels = np.moveaxis(images[row].astype(np.float64), axis - 1, 2) / scale
            sums += [pixels.sum((0, 1)), (pixels * pixels).sum((0, 1))]
    require_open_sources(images)
    if not np.isfinite(sums).all():
        return None
    mean, square = sums / (len(rows) * math.prod(images.shape[1:]) / images.shape[axis])
    return {"mean": mean.tolist(), "std": np.sqrt(np.maximum(square - mean**2, 0)).tolist(), "rows": len(rows)}
