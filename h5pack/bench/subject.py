"""What a bench is about: a folder of images, an HDF5 file, or pictures made for it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

from h5pack import schema
from h5pack.bench.cell import Stored
from h5pack.errors import H5PackError, OptionsError, SourceError
from h5pack.feed.dataset import H5Dataset
from h5pack.pack.options import ConvertOptions
from h5pack.read.encoded import holds_encoded
from h5pack.sources.detect import open_source
from h5pack.sources.hdf5_catalog import is_hdf5
from h5pack.sources.hdf5_rows import HDF5RowReader
from h5pack.tools.info import DatasetReport, info
from h5pack.tools.synth import make_folder
from h5pack.wording import counted

LEAST_IMAGES = 8
_GENERATED = 4_000
_GENERATED_SIZE = (218, 178)


@dataclass(frozen=True)
class Subject:
    """What is asked about.

    Attributes
    ----------
    name : str
        In reports.
    kind : str
        "folder", "file" or "generated".
    source : str
        What to convert.
    images : int
        In all.
    options : ConvertOptions
        How its images become rows; without chunks, a limit or compression.
    stored : Stored or None
        Of a file: as it is.
    faults : tuple of str
    cure : str or None
        See `h5pack.tools.info`.
    note : str
        Why it cannot be converted; empty where it can.
    """

    name: str
    kind: str
    source: str
    images: int
    options: ConvertOptions
    stored: Stored | None = None
    faults: tuple[str, ...] = ()
    cure: str | None = None
    note: str = ""


def find_subject(path: str | os.PathLike[str] | None, options: ConvertOptions, scratch: Path) -> Subject:
    """Look at what is to be benched; nothing: make pictures.

    Raises
    ------
    SourceError, PackFormatError
        If there are no images.
    OptionsError
        If there are too few.
    """
    if path is None:
        folder = scratch / "images"
        make_folder(folder, _GENERATED, _GENERATED_SIZE, workers=options.workers or 1)
        subject = Subject("generated images", "generated", str(folder), _GENERATED, options)
    elif Path(path).is_file() and is_hdf5(Path(path)):
        subject = _file(os.fspath(path), options)
    else:
        images = len(open_source(path, options.source_options))
        subject = Subject(os.fspath(path), "folder", os.fspath(path), images, options)
    if subject.images < LEAST_IMAGES:
        count = counted(subject.images, "image")
        raise OptionsError(f"{subject.name}: {count}, too few to measure anything; at least {LEAST_IMAGES} are needed")
    return subject


def _file(path: str, options: ConvertOptions) -> Subject:
    note, images = "", options.images or schema.IMAGES
    try:
        catalog = open_source(path, options.source_options)
        if isinstance(catalog.reader, HDF5RowReader):
            images = catalog.reader.images
    except SourceError as error:
        # Rows of other numbers can be read all the same.
        note = f"not compared with other chunks, since it cannot be converted: {error}"
    report = info(path)
    found = next((one for one in report.datasets if one.name.strip("/") == images.strip("/")), None)
    try:
        dataset = H5Dataset(path, images=images)
    except H5PackError:
        if note:
            raise SourceError(f"{note.partition('converted: ')[2]}") from None
        raise
    if found is None:
        # A link or a name with slashes.
        found = next(one for one in info(dataset.path).datasets if one.name.strip("/") == images.strip("/"))
    if dataset.label_name is not None and options.labels is None:
        options = replace(options, labels=dataset.label_name)
    first = len(found.shape) == 4 and found.shape[1] in (1, 3) and found.shape[3] not in (1, 3)
    gray = len(found.shape) == 3 or (len(found.shape) == 4 and 1 in (found.shape[1], found.shape[3]))
    options = replace(
        options, images=images, layout="nchw" if first else options.layout, mode="gray" if gray else options.mode
    )
    return Subject(path, "file", path, len(dataset), options, _as_it_is(found, dataset), found.faults, found.cure, note)


def _as_it_is(found: DatasetReport, dataset: H5Dataset) -> Stored:
    index = dataset.engine.indexes[dataset.names[0]]
    # Images of several sizes have no row shape in common.
    row_bytes = max(1, index.row_bytes)
    chunks = None if found.chunks is None or holds_encoded(index) else found.chunks
    return Stored(
        label="as it is",
        path=dataset.path,
        images=dataset.names[0],
        labels=dataset.label_name,
        rows=len(dataset),
        chunk_rows=None if chunks is None else chunks[0],
        chunk_bytes=None if chunks is None else math.prod(chunks) * index.dtype.itemsize,
        row_bytes=row_bytes,
        compression="encoded images" if holds_encoded(index) else "+".join(found.filters) or "none",
        stored_bytes=found.stored_bytes,
        overhead=found.overhead,
        own=True,
    )
