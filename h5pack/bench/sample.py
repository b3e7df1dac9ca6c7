"""The sample that a bench reads: some of the images, packed in every way that is to be compared."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import h5py

from h5pack import schema
from h5pack.bench.cell import Stored
from h5pack.bench.scratch import Scratch
from h5pack.bench.settings import DEFAULT_CHUNK_BYTES, BenchSettings
from h5pack.bench.subject import LEAST_IMAGES, Subject
from h5pack.errors import NoImagesError, OptionsError, SizesDifferError
from h5pack.feed.dataset import H5Dataset
from h5pack.hdf5 import open_file
from h5pack.layout import plan_chunks
from h5pack.machine import available_cpus, available_memory, free_bytes
from h5pack.pack.converter import convert
from h5pack.pack.options import ConvertOptions
from h5pack.pack.report import ConvertReport
from h5pack.wording import counted

SAMPLE_BYTES = 512 * 1024 * 1024
_FIRST = 64
_FIRST_BYTES = 64 * 1024 * 1024
_PACKING_SHARE = 0.2
"""Of the time: the rest is for measuring."""
_BLOCK_BYTES = 8 * 1024 * 1024
_FALLBACK_SIZE = (224, 224)


@dataclass
class Sample:
    """The packed sample.

    Attributes
    ----------
    files : list of Stored
    rows, row_bytes : int
    row_shape : tuple of int
    options : ConvertOptions
        How rows were made; what a conversion of the whole takes, too.
    pack_images_per_s : float or None
    default_rows : int
        Rows a chunk that a conversion of the whole would take by itself.
    notes : list of str
        What was left out, and why.
    """

    files: list[Stored]
    rows: int
    row_bytes: int
    row_shape: tuple[int, ...]
    options: ConvertOptions
    pack_images_per_s: float | None = None
    default_rows: int = 0
    notes: list[str] = field(default_factory=list)


def make_sample(subject: Subject, settings: BenchSettings, scratch: Scratch) -> Sample:
    """Pack some images of a subject in every way that `settings` ask for.

    Raises
    ------
    H5PackError
        If they cannot be packed, or there is no space.
    """
    if subject.note and subject.stored is not None:
        return _only_as_it_is(subject, settings, subject.note)
    begin = time.monotonic()
    packer = _Packer(subject, scratch)
    try:
        row_bytes, speed = packer.look()
    except NoImagesError as error:
        if subject.stored is None:
            raise
        return _only_as_it_is(subject, settings, f"not compared with other chunks: {error}")
    default_rows = min(plan_chunks(subject.images, row_bytes).rows, subject.images)
    wished = _wished_rows(settings, row_bytes, default_rows)
    count = len(wished) * len(settings.compressions) + settings.contiguous
    rows = _sample_rows(subject, settings, scratch, row_bytes, count, speed)
    chunk_rows = [wish for wish in wished if wish == wished[0] or 2 * wish <= rows]
    if len(chunk_rows) < len(wished):
        packer.notes.append(
            f"Chunks of {', '.join(f'{wish:,}' for wish in wished if wish not in chunk_rows)} rows were left out: they "
            f"hold more than half of the sample's {rows:,} rows."
        )
    scratch.require(int(1.1 * rows * row_bytes * count))
    # What a conversion takes by itself comes first: it must not be what time is wanting for.
    chunk_rows.sort(key=lambda wish: abs(math.log(wish / default_rows)))
    base, report = packer.base(rows, chunk_rows[0])
    dataset = H5Dataset(base)
    index = dataset.engine.indexes[dataset.names[0]]
    # Starting workers counts little beside a whole folder.
    speed = report.images / max(1e-3, report.seconds["write"])
    sample = Sample(
        [], report.images, index.row_bytes, index.row_shape, packer.options, speed, default_rows, packer.notes
    )
    if report.rejects:
        sample.notes.append(
            f"{report.rejects:,} of the sample's images cannot be packed; 'h5pack convert' lists such images."
        )
    _make_forms(sample, base, settings, scratch, chunk_rows, begin + 2 * _PACKING_SHARE * settings.seconds)
    if subject.stored is not None:
        sample.files.insert(0, _shortened(subject.stored, settings, rows))
    return sample


class _Packer:
    """Packs images of a subject; where they differ in size, and none was asked for, all get one."""

    def __init__(self, subject: Subject, scratch: Scratch) -> None:
        self._subject, self._scratch = subject, scratch
        self.options = subject.options
        self.notes: list[str] = []

    def look(self) -> tuple[int, float]:
        """Bytes a row, and images/s of packing on all CPUs, by a few of them."""
        row_bytes = 0
        path = self._scratch.path / "first.h5"
        # Two rows tell how large a row is; images may be of hundreds of megabytes.
        for limit in (2, _FIRST):
            limit = min(limit, max(2, _FIRST_BYTES // row_bytes)) if row_bytes else limit
            begin = time.monotonic()
            report = self._convert(path, limit=limit, workers=1, overwrite=True)
            speed = available_cpus() * report.images / max(1e-3, time.monotonic() - begin)
            dataset = H5Dataset(path)
            row_bytes = dataset.engine.indexes[dataset.names[0]].row_bytes
        path.unlink()
        return row_bytes, speed

    def base(self, rows: int, chunk_rows: int) -> tuple[Path, ConvertReport]:
        """A pack of as many rows."""
        path = self._scratch.path / "base.h5"
        return path, self._convert(path, limit=rows, chunk_rows=chunk_rows)

    def _convert(self, path: Path, **changes: Any) -> ConvertReport:
        try:
            return convert(self._subject.source, path, replace(self.options, **changes))
        except SizesDifferError:
            self.options = replace(self.options, size=_FALLBACK_SIZE)
            self.notes.append("The images differ in size; --size 224 was taken, as --size was not given.")
            return convert(self._subject.source, path, replace(self.options, **changes))


def _make_forms(
    sample: Sample, base: Path, settings: BenchSettings, scratch: Scratch, chunk_rows: list[int], end: float
) -> None:
    """Store the base's rows in all ways that are wanted, as far as there is time."""
    first = chunk_rows[0]
    made: list[Stored] = []
    late: list[str] = []
    for compression in settings.compressions:
        for wish in chunk_rows:
            path = base
            if (wish, compression) != (first, "none"):
                if made and time.monotonic() > end:
                    late.append(_label(wish, compression))
                    continue
                path = scratch.path / f"{wish}-{compression}.h5".replace(":", "-")
                _repack(base, path, sample, wish, compression)
            made.append(_packed(path, wish, compression, sample.row_bytes))
    sample.files += sorted(made, key=lambda one: (settings.compressions.index(one.compression), one.chunk_rows or 0))
    if settings.contiguous and time.monotonic() > end:
        late.append("contiguous")
    elif settings.contiguous:
        sample.files.append(_contiguous(base, scratch.path / "contiguous.h5", sample.row_bytes))
    if late:
        sample.notes.append(f"For want of time these were not packed: {', '.join(late)}; give more --seconds.")


def _sample_rows(
    subject: Subject, settings: BenchSettings, scratch: Scratch, row_bytes: int, files: int, least_speed: float
) -> int:
    """How many rows time, memory and disk allow.

    All files should fit into the page cache together, with as much left for the batches.
    """
    if settings.rows is not None:
        return max(LEAST_IMAGES, min(settings.rows, subject.images))
    room = min(SAMPLE_BYTES, available_memory() // (3 * files), int(0.8 * free_bytes(scratch.path)) // files)
    by_time = int(least_speed * _PACKING_SHARE * settings.seconds)
    return max(LEAST_IMAGES, min(subject.images, room // row_bytes, max(by_time, _FIRST)))


def _wished_rows(settings: BenchSettings, row_bytes: int, default_rows: int) -> list[int]:
    """Rows a chunk to try, ascending."""
    wished = set(settings.chunk_rows) | {max(1, size // row_bytes) for size in settings.chunk_bytes}
    if not wished:
        wished = {max(1, size // row_bytes) for size in DEFAULT_CHUNK_BYTES} | {default_rows}
    return sorted(wished)


def _repack(base: Path, path: Path, sample: Sample, chunk_rows: int, compression: str) -> Path:
    """The base's rows in other chunks, in the same order."""
    # Starting workers takes longer than copying the rows.
    options = ConvertOptions(
        workers=1,
        order="sorted",
        chunk_rows=chunk_rows,
        compression=compression,
        layout=sample.options.layout,
        mode=sample.options.mode,
    )
    convert(base, path, options)
    return path


def _label(chunk_rows: int, compression: str) -> str:
    return counted(chunk_rows, "row") + ("" if compression == "none" else f" {compression}")


def _packed(path: Path, chunk_rows: int, compression: str, row_bytes: int) -> Stored:
    with open_file(path) as file:
        images = file[schema.IMAGES]
        stored = int(images.id.get_storage_size())
        rows, size = len(images), int(images.nbytes)
    label = _label(chunk_rows, compression)
    return Stored(
        label, os.fspath(path), schema.IMAGES, schema.LABELS, rows, chunk_rows, chunk_rows * row_bytes, row_bytes,
        compression, stored, stored / size,
    )  # fmt: skip


def _contiguous(base: Path, path: Path, row_bytes: int) -> Stored:
    """The rows of a pack one behind the other, as ``create_dataset`` without chunks stores them."""
    with open_file(base) as source, h5py.File(path, "w", libver=("v110", "v110")) as file:
        images = source[schema.IMAGES]
        copied = file.create_dataset(schema.IMAGES, images.shape, images.dtype)
        step = max(1, _BLOCK_BYTES // row_bytes)
        for start in range(0, len(images), step):
            copied[start : start + step] = images[start : start + step]
        if schema.LABELS in source:
            file[schema.LABELS] = source[schema.LABELS][()]
        rows, size = len(images), int(images.nbytes)
    return Stored(
        "contiguous", os.fspath(path), schema.IMAGES, schema.LABELS, rows, None, None, row_bytes, "none", size, 1.0
    )


def _shortened(stored: Stored, settings: BenchSettings, rows: int) -> Stored:
    """The first rows of a file, whole chunks of them."""
    if stored.chunk_rows is not None:
        rows = -(-rows // stored.chunk_rows) * stored.chunk_rows
    return replace(stored, rows=min(stored.rows, rows))


def _only_as_it_is(subject: Subject, settings: BenchSettings, note: str) -> Sample:
    """A sample of a file that cannot be packed anew."""
    if subject.stored is None:
        raise OptionsError(f"{subject.name}: nothing to measure")
    row_bytes = subject.stored.row_bytes
    rows = settings.rows or max(LEAST_IMAGES, min(SAMPLE_BYTES, available_memory() // 4) // row_bytes)
    stored = _shortened(subject.stored, settings, rows)
    dataset = H5Dataset(stored.path, images=stored.images, labels=stored.labels)
    shape = dataset.engine.indexes[stored.images].row_shape
    return Sample([stored], stored.rows, row_bytes, shape, subject.options, notes=[note])
