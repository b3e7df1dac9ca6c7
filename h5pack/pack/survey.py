"""The survey: one parallel pass over the images' headers, before anything is written."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.decode.headers import Kind
from h5pack.decode.images import read_header, refuse_bomb, strict_pillow
from h5pack.errors import RejectedImageError, SourceError
from h5pack.pack.executors import run, shared
from h5pack.sources.catalog import Catalog, FileReader, absence
from h5pack.sources.hdf5_rows import HDF5RowReader, PixelForm
from h5pack.sources.mapped import DatasetReader

_TASK_IMAGES = 512


@dataclass
class Survey:
    """What the headers told, in catalog order.

    Attributes
    ----------
    heights, widths : ndarray
        int32, (M,): upright pixels; 0 where the image is rejected.
    kinds : ndarray
        uint8, (M,): `Kind`.
    prints : ndarray
        uint64, (M,): a fingerprint of name, length and time of each file, by which a resume sees a changed source.
    reasons : dict of int to str
        Why images are rejected, by catalog index.
    labels : ndarray or None
        What a map-style dataset gave: int64 (M,), or uint8 (M, K).
    """

    heights: npt.NDArray[np.int32]
    widths: npt.NDArray[np.int32]
    kinds: npt.NDArray[np.uint8]
    prints: npt.NDArray[np.uint64]
    reasons: dict[int, str]
    labels: npt.NDArray[Any] | None = None


@dataclass(frozen=True)
class _Task:
    start: int
    names: list[str]
    max_pixels: int


@dataclass(frozen=True)
class _Part:
    start: int
    sizes: list[tuple[int, int, int]]
    prints: list[int]
    reasons: dict[int, str]
    labels: list[npt.NDArray[Any] | None]


def survey(
    catalog: Catalog, executor: Executor, in_flight: int, max_pixels: int, advance: Callable[[int], object]
) -> Survey:
    """Survey a catalog.

    Parameters
    ----------
    catalog : Catalog
    executor : Executor
        Its shared object is the catalog's reader.
    in_flight : int
        Tasks under way at once.
    max_pixels : int
    advance : callable
        Called with the number of images done, after each step.

    Raises
    ------
    SourceError
        If the storage fails, or a dataset's labels do not fit each other.
    """
    count = len(catalog)
    result = Survey(
        np.zeros(count, np.int32), np.zeros(count, np.int32), np.zeros(count, np.uint8), np.zeros(count, np.uint64), {}
    )
    if isinstance(catalog.reader, HDF5RowReader) and catalog.reader.form is not None:
        _survey_array(catalog.reader, catalog.reader.form, result, max_pixels)
        advance(count)
        return result
    labels: list[npt.NDArray[Any] | None] = [None] * count if isinstance(catalog.reader, DatasetReader) else []
    for part in run(executor, _survey_part, _tasks(catalog, max_pixels), in_flight, _describe):
        rows = slice(part.start, part.start + len(part.sizes))
        sizes = np.array(part.sizes, np.int32)
        result.heights[rows], result.widths[rows], result.kinds[rows] = sizes.T
        result.prints[rows] = part.prints
        result.reasons.update(part.reasons)
        if labels:
            labels[rows] = part.labels
        advance(len(part.sizes))
    if labels:
        result.labels = _joined_labels(labels, result.reasons)
    return result


def _survey_array(reader: HDF5RowReader, form: PixelForm, result: Survey, max_pixels: int) -> None:
    """Rows of one dataset are all of one size, and change with their file."""
    height, width = form.size(reader.index.row_shape)
    result.heights[:], result.widths[:] = height, width
    try:
        refuse_bomb(height, width, max_pixels)
    except RejectedImageError as error:
        result.reasons.update(dict.fromkeys(range(len(result.heights)), str(error)))
    result.prints[:] = reader.prints(np.arange(len(result.prints)))


def _tasks(catalog: Catalog, max_pixels: int) -> Iterator[_Task]:
    step = min(_TASK_IMAGES, max(1, len(catalog) // 16))
    for start in range(0, len(catalog), step):
        names = [catalog.names[index] for index in range(start, min(start + step, len(catalog)))]
        yield _Task(start, names, max_pixels)


def _describe(task: _Task) -> str:
    return f"the header of {task.names[0]!r} or one of the {len(task.names) - 1} images behind it"


def _survey_part(task: _Task) -> _Part:
    reader = shared()
    part = _Part(task.start, [], [], {}, [])
    with strict_pillow():
        for index, name in enumerate(task.names, task.start):
            height = width = kind = mark = 0
            label = None
            try:
                if isinstance(reader, DatasetReader):
                    pixels, label = reader.sample(int(name))
                    (height, width), kind = pixels.shape[:2], Kind.PILLOW
                    described = f"{name}\0{pixels.shape}\0{None if label is None else label.tolist()}"
                    mark = _fingerprint(described.encode())
                elif isinstance(reader, HDF5RowReader):
                    data = reader.encoded(index)
                    header = read_header(data, partial(io.BytesIO, data), task.max_pixels)
                    height, width, kind = header.height, header.width, header.kind
                    mark = int(reader.prints(np.array([index]))[0])
                else:
                    height, width, kind, mark = _survey_file(reader, name, task.max_pixels)
            except RejectedImageError as error:
                part.reasons[index] = str(error)
            part.sizes.append((height, width, kind))
            part.prints.append(mark)
            part.labels.append(label)
    return part


def _survey_file(reader: FileReader, name: str, max_pixels: int) -> tuple[int, int, int, int]:
    try:
        head, size, modified = reader.head(name)
        header = read_header(head, lambda: reader.open(name), max_pixels)
    except (OSError, ValueError) as error:
        if isinstance(error, RejectedImageError):
            raise
        reason = absence(error) if isinstance(error, OSError) else "its name cannot be opened"
        if reason is None:
            raise SourceError(f"{name}: {error}; mend the storage, then try again") from error
        raise RejectedImageError(reason) from error
    mark = _fingerprint(b"%s\0%d\0%d" % (name.encode("utf-8", "surrogateescape"), size, modified))
    return header.height, header.width, header.kind, mark


def _fingerprint(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _joined_labels(labels: list[npt.NDArray[Any] | None], reasons: dict[int, str]) -> npt.NDArray[Any] | None:
    known = [(index, label) for index, label in enumerate(labels) if index not in reasons]
    first = next((label for _, label in known if label is not None), None)
    if first is None:
        return None
    for index, label in known:
        if label is None or label.shape != first.shape:
            raise SourceError(
                f"the dataset: sample {index} has the label {None if label is None else label.tolist()!r}, the first "
                f"has {first.tolist()!r}; every sample needs a label of one kind"
            )
    joined = np.zeros((len(labels), *first.shape), first.dtype)
    for index, label in known:
        joined[index] = label
    return joined
