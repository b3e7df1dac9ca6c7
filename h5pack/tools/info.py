"""`h5pack info`: what an HDF5 file holds, how it is stored, what that costs, and the cure."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from h5pack import schema
from h5pack.errors import PackFormatError
from h5pack.hdf5 import dataset_names, filters_of, open_file, reopen_tuned, text
from h5pack.layout import CachePlan, plan_cache, plan_chunks
from h5pack.read.encoded import index_encoded, is_encoded, reference_cache
from h5pack.sources.hdf5_catalog import channel_axes, is_image_array

_DEFAULT_CACHE_BYTES = 1024 * 1024
_FILTER_NAMES = {
    1: "gzip", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset", 307: "bzip2", 32000: "lzf",
    32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32013: "zfp", 32015: "zstd", 32026: "blosc2",
}  # fmt: skip
_MAX_SAMPLED_ROWS = 1024


@dataclass(frozen=True)
class DatasetReport:
    """How one dataset is stored.

    Attributes
    ----------
    name, dtype : str
        Rows of variable length have a dtype such as "variable-length uint8".
    shape : tuple of int
    layout : str
        chunked, contiguous, compact or virtual.
    chunks : tuple of int or None
    index : str or None
        The kind of HDF5's chunk index.
    filters : tuple of str
    bytes, stored_bytes : int
        Of the array, and in the file. Of rows of variable length 0, as nothing but reading them all would tell, and the
        bytes of the references to them.
    cache : CachePlan or None
        rdcc settings for reading rows in any order through the HDF5 library.
    faults : tuple of str
        What its chunks cost a reader of rows.
    cure : str or None
        A command that mends them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: str
    chunks: tuple[int, ...] | None
    index: str | None
    filters: tuple[str, ...]
    bytes: int
    stored_bytes: int
    cache: CachePlan | None
    faults: tuple[str, ...] = ()
    cure: str | None = None

    @property
    def overhead(self) -> float:
        """Bytes in the file over bytes of the array."""
        return self.stored_bytes / self.bytes if self.bytes else 1.0


@dataclass(frozen=True)
class FileReport:
    """What a file holds.

    Attributes
    ----------
    path : str
    bytes : int
        Size of the file.
    pack : dict or None
        What a pack says of itself; None for other files.
    datasets : tuple of DatasetReport
    stats : dict or None
        Class counts and channel statistics, where asked for.
    """

    path: str
    bytes: int
    pack: dict[str, Any] | None
    datasets: tuple[DatasetReport, ...]
    stats: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """The report for programs; keys are stable."""
        report = asdict(self)
        for dataset, source in zip(report["datasets"], self.datasets, strict=True):
            dataset["overhead"] = round(source.overhead, 4)
        return report


def info(path: str | os.PathLike[str], *, stats: bool = False) -> FileReport:
    """Describe an HDF5 file, a pack or not.

    Parameters
    ----------
    path : path
    stats : bool
        Also count classes and give channel statistics (of a pack, the stored ones; of other files, of up to 1,024
        rows).

    Raises
    ------
    PackFormatError
        If it is not an HDF5 file that can be opened.
    """
    with open_file(path) as file:
        try:
            return _report(path, file, stats)
        except (KeyError, ValueError, RuntimeError, OSError) as error:
            raise PackFormatError(
                f"{os.fspath(path)}: its metadata is damaged ({error}); restore the file, or run 'h5pack verify' on it"
            ) from error


def _report(path: str | os.PathLike[str], file: h5py.File, stats: bool) -> FileReport:
    datasets = tuple(_describe(file, file[name]) for name in dataset_names(file))
    return FileReport(
        os.fspath(path),
        os.path.getsize(path),
        _describe_pack(file) if schema.FORMAT in file.attrs else None,
        datasets,
        _stats(file) if stats else None,
    )


def _describe(file: h5py.File, dataset: h5py.Dataset) -> DatasetReport:
    layout = {
        h5py.h5d.CHUNKED: "chunked",
        h5py.h5d.CONTIGUOUS: "contiguous",
        h5py.h5d.COMPACT: "compact",
        h5py.h5d.VIRTUAL: "virtual",
    }[dataset.id.get_create_plist().get_layout()]
    filters = _filters(dataset)
    shape = tuple(dataset.shape or ())
    cache = None
    faults: tuple[str, ...] = ()
    cure = None
    if layout == "chunked":
        cache = plan_cache(shape, dataset.chunks, dataset.dtype.itemsize, filtered=bool(filters))
        if _holds_rows(dataset):
            faults = _faults(dataset, filters)
            cure = _cure(file, dataset) if faults else None
    varies = isinstance(h5py.check_vlen_dtype(dataset.dtype), np.dtype)
    if is_encoded(dataset):
        cache = reference_cache(dataset)
        faults, cure = _judge_encoded(file, dataset)
    return DatasetReport(
        name=dataset.name.lstrip("/"),
        dtype=f"variable-length {h5py.check_vlen_dtype(dataset.dtype)}" if varies else str(dataset.dtype),
        shape=shape,
        layout=layout,
        chunks=dataset.chunks,
        index=_index(file, dataset),
        filters=filters,
        bytes=int(dataset.nbytes) if dataset.shape is not None and not varies else 0,
        stored_bytes=int(dataset.id.get_storage_size()),
        cache=cache,
        faults=faults,
        cure=cure,
    )


def _judge_encoded(file: h5py.File, dataset: h5py.Dataset) -> tuple[tuple[str, ...], str | None]:
    """Faults and cure of rows of variable-length bytes, if they are images, which row 0 tells."""
    name = dataset.name.lstrip("/")
    try:
        rows = index_encoded(file, dataset, name).rows
    except PackFormatError:
        rows = 0
    if not rows:
        return (), None
    return (
        ("each row is an encoded image: decoded again in every epoch",),
        f"h5pack convert {file.filename} packed.h5 --images {name}",
    )


def _filters(dataset: h5py.Dataset) -> tuple[str, ...]:
    return tuple(_FILTER_NAMES.get(item.number) or f"{item.name} ({item.number})" for item in filters_of(dataset))


def _index(file: h5py.File, dataset: h5py.Dataset) -> str | None:
    """The kind of chunk index that HDF5 chooses for this file version and these axes (h5py has no call for it)."""
    if dataset.chunks is None:
        return None
    superblock = file.id.get_create_plist().get_version()[0]
    if superblock < 3:
        return "B-tree v1"
    unlimited = sum(size is None for size in dataset.maxshape)
    if unlimited:
        return "extensible array" if unlimited == 1 else "B-tree v2"
    if math.prod(_grid(dataset)) == 1:
        return "single chunk"
    early = dataset.id.get_create_plist().get_alloc_time() == h5py.h5d.ALLOC_TIME_EARLY
    return "implicit" if early and not _filters(dataset) else "fixed array"


def _grid(dataset: h5py.Dataset) -> list[int]:
    return [max(1, math.ceil(size / chunk)) for size, chunk in zip(dataset.shape, dataset.chunks, strict=True)]


def _holds_rows(dataset: h5py.Dataset) -> bool:
    """Whether it looks like images or features: numbers, with more than one axis, of some size."""
    return dataset.ndim >= 2 and dataset.dtype.kind in "biuf" and len(dataset) > 1 and dataset.nbytes > 1024 * 1024


def _faults(dataset: h5py.Dataset, filters: tuple[str, ...]) -> tuple[str, ...]:
    """What the chunks cost somebody who reads single rows."""
    shape, chunks, itemsize = dataset.shape, dataset.chunks, dataset.dtype.itemsize
    chunk_bytes = math.prod(chunks) * itemsize
    pieces = math.prod(_grid(dataset)[1:])
    found = []
    if pieces > 1:
        found.append(f"chunks {chunks} cut every row into {pieces} pieces, each read on its own")
    stored = dataset.id.get_storage_size()
    if not filters and stored > 1.05 * dataset.nbytes:
        found.append(
            f"the file stores {stored / dataset.nbytes:.2f} times the data: chunks reach past the array's edge"
        )
    guessed = h5py._hl.filters.guess_chunk(shape, dataset.maxshape, itemsize)
    if pieces > 1 and tuple(chunks) == tuple(guessed):
        found.append("this is h5py's guess (chunks=True), which knows nothing of rows")
    # A pack was compressed on purpose, and h5pack decodes its chunks once a window.
    own = schema.FORMAT in dataset.file.attrs
    if filters and not own and pieces * chunk_bytes > _DEFAULT_CACHE_BYTES:
        found.append(
            f"one row needs {pieces * chunk_bytes / 2**20:.1f} MiB of chunks, more than HDF5's default cache of 1 MiB: "
            "each row read decodes them anew"
        )
    if chunk_bytes < 16_384 and dataset.nbytes > 2**24:
        found.append(f"chunks of {chunk_bytes:,} bytes: the index costs more than the reading")
    return tuple(found)


def _cure(file: h5py.File, dataset: h5py.Dataset) -> str:
    name = dataset.name.lstrip("/")
    axes = channel_axes(dataset.shape[1:])
    if dataset.dtype == np.uint8 and is_image_array(dataset.shape, dataset.dtype) and len(axes) == 1:
        # As it was, so that who reads it need not change.
        as_before = {"first": " --layout nchw", "last": "", "none": ""}[axes[0]]
        gray = axes == ["none"] or dataset.shape[3 if axes == ["last"] else 1] < 3
        return f"h5pack convert {file.filename} packed.h5 --images {name}{as_before}{' --mode gray' * gray}"
    row_bytes = math.prod(dataset.shape[1:]) * dataset.dtype.itemsize
    rows = plan_chunks(len(dataset), row_bytes).rows
    chunk = "x".join(map(str, (min(rows, len(dataset)), *dataset.shape[1:])))
    return f"h5repack -f {name}:NONE -l {name}:CHUNK={chunk} {file.filename} repacked.h5"


def _describe_pack(file: h5py.File) -> dict[str, Any]:
    described: dict[str, Any] = {
        "format": int(file.attrs[schema.FORMAT]),
        "version": text(file.attrs.get(schema.VERSION, b"")),
        "created": text(file.attrs.get(schema.CREATED, b"")),
        "complete": bool(file.attrs.get(schema.COMPLETE, 0)),
        "options": text(file.attrs.get(schema.OPTIONS, b"")),
    }
    if not described["complete"]:
        return described
    names, rows = file.get(schema.SPLIT_NAMES), file.get(schema.SPLIT_ROWS)
    described["splits"] = (
        {text(name): [int(start), int(stop)] for name, (start, stop) in zip(names[()], rows[()], strict=True)}
        if names is not None and rows is not None
        else {}
    )
    labels = file.get(schema.LABELS)
    if labels is not None:
        for kind in (schema.CLASSES, schema.COLUMNS):
            if kind in labels.attrs:
                described[kind] = [text(name) for name in labels.attrs[kind]]
    for name in ("mean", "std"):
        stored = file.get(f"{schema.STATISTICS}/{name}")
        described[name] = [] if stored is None else _finite(stored[()])
    described["rejects"] = len(file[f"{schema.REJECTS}/filenames"]) if schema.REJECTS in file else 0
    return described


def _finite(values: npt.NDArray[np.float64]) -> list[float | None]:
    """Numbers as JSON can hold them: the statistics of a split without rows are NaN."""
    return [float(value) if math.isfinite(value) else None for value in values]


def _stats(file: h5py.File) -> dict[str, Any]:
    result: dict[str, Any] = {}
    labels = file.get(schema.LABELS)
    if isinstance(labels, h5py.Dataset) and labels.dtype.kind in "iu":
        result["labels"] = _label_counts(labels)
    if f"{schema.STATISTICS}/mean" in file:
        group = file[schema.STATISTICS]
        result["channels"] = {
            "mean": _finite(group["mean"][()]),
            "std": _finite(group["std"][()]),
            "rows": int(group.attrs["rows"]),
        }
    elif isinstance(file.get(schema.IMAGES), h5py.Dataset):
        result["channels"] = _measured_channels(reopen_tuned(file[schema.IMAGES]))
    return result


def _label_counts(labels: h5py.Dataset) -> dict[str, int]:
    values = labels[()]
    if values.ndim == 2:
        names = [text(name) for name in labels.attrs.get(schema.COLUMNS, range(values.shape[1]))]
        return {name: int(np.count_nonzero(column)) for name, column in zip(names, values.T, strict=True)}
    numbers, counts = np.unique(values, return_counts=True)
    classes = labels.attrs.get(schema.CLASSES)
    named = {
        number: text(classes[number]) if classes is not None and 0 <= number < len(classes) else str(number)
        for number in numbers.tolist()
    }
    return {named[number]: int(count) for number, count in zip(numbers.tolist(), counts, strict=True)}


def _measured_channels(images: h5py.Dataset) -> dict[str, Any] | None:
    """Mean and standard deviation along the channel axis (the last of 1, 3 or 4, else axis 1) of evenly spaced rows."""
    if images.ndim != 4 or images.dtype.kind not in "iuf":
        return None
    rows = np.unique(np.linspace(0, len(images) - 1, min(len(images), _MAX_SAMPLED_ROWS)).astype(np.int64))
    axis = 3 if images.shape[3] in (1, 3, 4) else 1
    scale = 255.0 if images.dtype == np.uint8 else 1.0
    sums = np.zeros((2, images.shape[axis]))
    others = tuple(other for other in range(3) if other != axis - 1)
    for row in rows.tolist():
        pixels = images[row].astype(np.float64) / scale
        sums += [pixels.sum(others), (pixels * pixels).sum(others)]
    mean, square = sums / (len(rows) * math.prod(images.shape[1:]) / images.shape[axis])
    return {"mean": mean.tolist(), "std": np.sqrt(np.maximum(square - mean**2, 0)).tolist(), "rows": len(rows)}
