"""The survey: one parallel pass over all image headers before any row is written."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.errors import (
    H5PackError,
    PackChangedError,
    PackFormatError,
    ReadError,
    RejectedImageError,
    SourceError,
    WorkerError,
)
from h5pack.format import schema
from h5pack.format.fields import RaggedRows
from h5pack.images.decode import decoder_versions, refuse_bomb, strict_pillow
from h5pack.images.geometry import Placement, turned_upright
from h5pack.images.headers import SIDEWAYS, DecodePath, ImageHeader, file_format
from h5pack.images.masks import naming_mask, require_size
from h5pack.pack.journal import SurveyJournal
from h5pack.pack.options import ConvertOptions
from h5pack.read.encoded import row_decoder
from h5pack.sources.catalog import Catalog, Note
from h5pack.sources.map_style import with_fields
from h5pack.sources.reader import (
    MISSING_FILE_REASONS,
    RUN_AGAIN,
    START_OVER,
    STORAGE_ADVICE,
    SourceReader,
    SurveyedImage,
    fingerprint,
)
from h5pack.system.processes import ElasticExecutor, run, shared
from h5pack.system.text import counted, one_of

_TASK_IMAGES = 1_024
# If there would be more tasks than this, each gets more images, because distributing a task takes time.
_MAX_TASKS = 16_384
# A box that is clipped by at most this much is not reported, because coordinates are often rounded.
_MAX_OUTSIDE_PIXELS = 0.1
HDF5_ERRORS = (ReadError, PackChangedError, PackFormatError)
"""The errors of reading from an HDF5 file; see `storage_error`."""
# The arrays of a `Survey` that are stored in its journal, and those that are stored only with `keep`.
_COLUMNS, _KEPT_COLUMNS = ("heights", "widths", "decode_paths", "fingerprints", "orientations"), ("kept_bytes",)
_JPEG_END = b"\xff\xd9"
_REJECTED = SurveyedImage(ImageHeader(0, 0, DecodePath.PILLOW), 0)


@dataclass
class Survey:
    """The results of a survey, in the order of the catalog's M images. The size of a rejected image is 0x0."""

    heights: npt.NDArray[np.int32]
    widths: npt.NDArray[np.int32]
    decode_paths: npt.NDArray[np.uint8]  # the `DecodePath` of each image
    fingerprints: npt.NDArray[np.uint64]  # 0 for images that workers rejected
    reasons: dict[int, str]  # why images are rejected, by catalog index
    labels: npt.NDArray[Any] | None = None  # of a map-style dataset's samples; else None
    unused: set[str] = field(default_factory=set)  # names of parts of samples that are not packed, such as dict keys
    file_bytes: int = 0  # size of all accepted image files together, in bytes; 0 if images are not files
    # Size in bytes of each image's file if `keep` can store it unchanged (JPEG files), else 0; always 0 without `keep`.
    kept_bytes: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    mask_dtypes: list[str] = field(default_factory=list)  # for each field of pixels, the dtype of its widest mask
    orientations: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))  # in Exif, 1 to 8
    fields: list[dict[str, Any] | None] = field(default_factory=list)  # of a map-style dataset's samples; else empty

    def reject(self, index: int, reason: str) -> None:
        """Reject an image that the workers accepted."""
        self.reasons[index] = reason
        self.heights[index] = self.widths[index] = 0

    def add(self, indices: slice | list[int], part: Survey, columns: tuple[str, ...]) -> None:
        """Add a part of the survey. Its images have the catalog indices `indices`; `columns` are the arrays to copy."""
        for name in columns:
            getattr(self, name)[indices] = getattr(part, name)
        self.reasons.update(part.reasons)
        self.unused |= part.unused
        self.mask_dtypes = _widest(self.mask_dtypes, part.mask_dtypes)
        self.file_bytes += part.file_bytes

    def encode(self, start: int, columns: tuple[str, ...]) -> bytes:
        """Return this part of a survey, without labels and fields, as the payload of a journal record.

        `start` is the index of the part's first image in the catalog.
        """
        reasons = {str(index): reason for index, reason in self.reasons.items()}
        rest = [start, len(self.heights), reasons, sorted(self.unused), self.mask_dtypes, self.file_bytes]
        return b"\0".join([json.dumps(rest).encode(), b"".join(getattr(self, name).tobytes() for name in columns)])

    @classmethod
    def decode(cls, payload: bytes, columns: tuple[str, ...]) -> tuple[int, Survey]:
        """Undo `encode`: return the index of the part's first image, and the part of the survey."""
        text, _, data = payload.partition(b"\0")
        start, count, reasons, unused, mask_dtypes, file_bytes = json.loads(text)
        part = cls.of(count)
        offset = 0
        for name in columns:
            column = np.frombuffer(data, getattr(part, name).dtype, count, offset)
            setattr(part, name, column)
            offset += column.nbytes
        part.reasons = {int(index): reason for index, reason in reasons.items()}
        part.unused, part.mask_dtypes, part.file_bytes = set(unused), mask_dtypes, file_bytes
        return start, part

    @classmethod
    def of(cls, count: int) -> Survey:
        """Return an empty survey of `count` images."""
        heights, widths = np.zeros(count, np.int32), np.zeros(count, np.int32)
        # Zeros take no memory until they are overwritten.
        return cls(
            heights, widths, np.zeros(count, np.uint8), np.zeros(count, np.uint64), {},
            kept_bytes=np.zeros(count, np.int64), orientations=np.ones(count, np.uint8),
        )  # fmt: skip


@dataclass(frozen=True)
class SurveyOptions:
    """The options that a survey depends on, besides those of the source. It is resumed only with the same ones."""

    max_pixels: int
    keep: bool  # whether JPEG files are kept
    resize: bool  # whether images are resized; if not, all images of a sample must have the same size

    @classmethod
    def of(cls, options: ConvertOptions) -> SurveyOptions:
        """Return those of a conversion's options that a survey depends on."""
        return cls(options.max_pixels, keep=options.keep is not None, resize=options.size is not None)


@dataclass(frozen=True)
class SurveyTask:
    """Images that one worker surveys."""

    indices: list[int]  # of the images in the catalog
    names: list[str]
    options: SurveyOptions
    shown: str  # how messages name the first image
    # For each field of pixels: its kind, and the names of the images' masks or further images.
    masks: list[tuple[str, list[str]]]
    fingerprints: npt.NDArray[np.uint64] | None = None  # (n,): of an earlier survey, to compare with

    def __str__(self) -> str:
        return one_of(len(self.names), self.shown)


def survey(
    catalog: Catalog,
    executor: Executor,
    max_in_flight: int,
    options: ConvertOptions,
    advance: Callable[[int], object],
    journal: SurveyJournal | None = None,
) -> Survey:
    """Read the headers of all images of a catalog in the workers of `executor`, which share the catalog's reader.

    If all images are arrays of one size, no header is read. The `journal` is not used for map-style datasets, whose
    samples come with labels. Raises SourceError if storage fails or labels differ in shape, WorkerError if another
    machine could not read a file that this one can read.
    """
    count = len(catalog)
    result = Survey.of(count)
    size = catalog.reader.uniform_size()
    if size is not None:
        _survey_uniform(catalog.reader, size, result, SurveyOptions.of(options))
        result.mask_dtypes = catalog.reader.uniform_mask_dtypes()
        advance(count)
        return result
    labels: list[npt.NDArray[Any] | None] = [None] * count if catalog.reader.has_labels else []
    result.fields = [None] * count if catalog.reader.has_labels else []
    columns = _COLUMNS + _KEPT_COLUMNS * (options.keep is not None)
    done = set()
    for payload in () if journal is None else journal.payloads():
        start, part = Survey.decode(payload, columns)
        if start not in done:
            result.add(slice(start, start + len(part.heights)), part, columns)
            advance(len(part.heights) - len(part.reasons))
        done.add(start)
    # Survey rejected images again: they may have been repaired since, or their disk may have been mounted.
    rejected = sorted(result.reasons)
    result.reasons.clear()
    again = {rejected[share.start]: rejected[share] for share in shares(len(rejected))}  # tasks by their first image
    rest = (list(range(count)[share]) for share in shares(count) if share.start not in done)
    tasks = (_task(catalog, options, block) for block in itertools.chain(rest, again.values()))
    for start, part, found in run(executor, _survey, tasks, max_in_flight, resumable=journal is not None):
        result.add(again.get(start, slice(start, start + len(part.heights))), part, columns)
        if labels:
            rows = slice(start, start + len(part.heights))
            labels[rows], result.fields[rows] = found, part.fields
        elif journal is not None and start not in again:
            journal.append(part.encode(start, columns))
        advance(len(part.heights))
    if labels:
        result.labels = _joined_labels(catalog, labels, result.reasons)
    if isinstance(executor, ElasticExecutor):
        _require_missing(catalog, result.reasons, options)
    return result


def survey_identity(source: object, catalog: Catalog, options: ConvertOptions) -> dict[str, Any]:
    """Return the properties that an interrupted survey and its continuation must share, as a JSON-serializable dict.

    Image files are not compared, because that would take as long as surveying them.
    """
    where: list[str | int] = []
    if isinstance(source, (str, os.PathLike)):
        where = [os.path.abspath(os.fspath(source))]
        for path in filter(os.path.isfile, [source, *sorted(catalog.reader.paths())]):
            status = os.stat(path)
            where += [status.st_size, status.st_mtime_ns]
    if options.root is not None:
        where.append(os.path.abspath(options.root))
    # Include the source's options, because they may select another column or dataset of images.
    settings = [*astuple(SurveyOptions.of(options)), repr(options.source_options)]
    return {"packages": decoder_versions(), "source": where, "catalog": catalog.identity(), "settings": settings}


def _require_missing(catalog: Catalog, reasons: dict[int, str], options: ConvertOptions) -> None:
    """Raise WorkerError if another machine or part could not open a file, but this process has no such problem."""
    for index, reason in reasons.items():
        if not reason.endswith(tuple(MISSING_FILE_REASONS)):  # Journals store only the text of a reason.
            continue
        try:
            image = catalog.reader.survey(index, catalog.names[index], options.max_pixels)
            _with_masks(catalog.reader, image, 0, _task(catalog, options, [index]))
        except RejectedImageError as error:
            if str(error) == reason:
                continue
        raise WorkerError(
            f"{catalog.shown(index)}: another {'part' if options.in_array_job else 'machine'} could not read it "
            f"({reason}), but this one finds no such problem; give all machines the same mounts"
            f"{options.start_over_advice}"
        )


def with_size_note(catalog: Catalog, survey: Survey, options: ConvertOptions) -> Catalog:
    """Return the catalog. If images are enlarged, it gets a note that counts them."""
    if options.size is None:
        return catalog
    low, narrow = survey.heights < options.size[0], survey.widths < options.size[1]
    enlarged = (low & narrow if options.fit == "pad" else low | narrow) & (survey.heights > 0)
    count = int(np.count_nonzero(enlarged))
    if not count:
        return catalog
    size = "x".join(map(str, options.size))
    note = Note(f"images smaller than {size}, which are enlarged: {count:,} of {len(catalog):,}")
    return replace(catalog, notes=(*catalog.notes, note))


def with_placed_fields(catalog: Catalog, survey: Survey, options: ConvertOptions) -> Catalog:
    """Return the catalog with boxes and keypoints scaled and moved like their resized images, as float32.

    Boxes are first clipped to their image. A note counts the boxes that reached outside of it by more than 0.1 pixels.
    Fields that came with samples are added to the catalog. Images of another size than their annotations say are
    rejected (see `_turned`).
    """
    catalog = _turned(with_fields(catalog, survey.fields), survey)
    placed = _of_kinds(catalog, schema.COORDINATE_KINDS)
    if not placed:
        return replace(catalog, coordinate_sizes=None)
    notes = catalog.notes
    if options.size is not None:
        placement = Placement.of(survey.heights, survey.widths, *options.size, options.fit)
    else:
        placement = Placement.shrunk(survey.heights, survey.widths, options.max_side)
    sizes = np.stack([survey.widths, survey.heights], axis=1).astype(np.float64)
    # Without these options, all images must have the same size.
    differ = options.size is not None or options.keep is not None
    surveyed = np.stack([survey.heights, survey.widths], axis=1) if differ else None
    for name, rows in placed.items():
        if rows.kind == schema.BOXES:
            lengths = np.diff(rows.offsets)
            known = np.repeat(sizes[:, 0] > 0, lengths)
            clipped = np.clip(rows.data, 0, np.repeat(np.tile(sizes, 2), lengths, axis=0))
            count = int((np.abs(clipped - rows.data).max(axis=1, initial=0) > _MAX_OUTSIDE_PIXELS)[known].sum())
            if count:
                text = f"{counted(count, 'box')} of {name!r} reached outside the image and had to be clipped"
                notes = (*notes, Note(text))
            rows = replace(rows, data=clipped)
        placed[name] = placement.moved(rows)
    return replace(catalog, fields={**catalog.fields, **placed}, notes=notes, coordinate_sizes=surveyed)


def _of_kinds(catalog: Catalog, kinds: tuple[str, ...]) -> dict[str, RaggedRows]:
    return {name: rows for name, rows in catalog.fields.items() if isinstance(rows, RaggedRows) and rows.kind in kinds}


def _turned(catalog: Catalog, survey: Survey) -> Catalog:
    """Turn an image's boxes if the annotated size is that before Exif turns the image; reject images of other sizes.

    The annotated size is the size of an image according to its annotations (`Catalog.coordinate_sizes`).
    """
    sizes = catalog.coordinate_sizes
    if sizes is None:
        return catalog
    own = np.stack([survey.heights, survey.widths], axis=1)
    differs = (sizes > 0).all(axis=1) & (own > 0).all(axis=1) & (own != sizes).any(axis=1)
    # Only COCO gives annotated sizes, and boxes are the only coordinates that are read from it.
    boxes = {name: replace(rows, data=rows.data.copy()) for name, rows in _of_kinds(catalog, (schema.BOXES,)).items()}
    for index in np.flatnonzero(differs).tolist():
        height, width = own[index].tolist()
        orientation = int(survey.orientations[index])
        if orientation not in SIDEWAYS or (width, height) != tuple(sizes[index].tolist()):
            wanted = "x".join(map(str, sizes[index].tolist()))
            survey.reject(index, f"it is {height}x{width}, but its annotations are for {wanted}")
            continue
        for rows in boxes.values():
            corners = rows.row(index).reshape(-1, 2)
            turned = turned_upright(corners, orientation, height, width).reshape(-1, 4)
            low, high = np.minimum(turned[:, :2], turned[:, 2:]), np.maximum(turned[:, :2], turned[:, 2:])
            rows.row(index)[:] = np.concatenate([low, high], axis=1)
    return replace(catalog, fields={**catalog.fields, **boxes})


def _survey_uniform(reader: SourceReader, size: tuple[int, int], result: Survey, options: SurveyOptions) -> None:
    """Fill `result` for images that are arrays of one size, so that no header needs to be read."""
    try:
        refuse_bomb(*size, options.max_pixels)
        result.heights[:], result.widths[:] = size
    except RejectedImageError as error:
        result.reasons.update(dict.fromkeys(range(len(result.heights)), str(error)))
    result.fingerprints[:] = reader.fingerprints(np.arange(len(result.heights)))


def shares(count: int) -> Iterator[slice]:
    """Yield one slice per task of a survey of `count` images."""
    step = max(min(_TASK_IMAGES, max(1, count // 16)), count // _MAX_TASKS)
    return (slice(start, start + step) for start in range(0, count, step))


def _task(catalog: Catalog, options: ConvertOptions, block: list[int]) -> SurveyTask:
    masks = [(one.kind, one.files.at(block)) for one in catalog.pixel_fields]
    return SurveyTask(block, catalog.names.at(block), SurveyOptions.of(options), catalog.shown(block[0]), masks)


def again_task(
    catalog: Catalog, options: ConvertOptions, indices: npt.NDArray[np.int64], fingerprints: npt.NDArray[np.uint64]
) -> SurveyTask:
    """Return a task for `first_changed_of` that surveys the images `indices` again.

    `fingerprints`, uint64 (M,), has the earlier fingerprints of all images of the catalog.
    """
    return replace(_task(catalog, options, indices.tolist()), fingerprints=fingerprints[indices])


def first_changed_of(task: SurveyTask) -> int | None:
    """Return the catalog index of the first image of a task whose fingerprint has changed; None if there is none."""
    _, found, _ = _survey(task)
    changed = np.flatnonzero(found.fingerprints != task.fingerprints)
    return task.indices[int(changed[0])] if len(changed) else None


def memory_error(name: str) -> SourceError:
    """Return the error for an image that cannot be decoded because too little memory is free."""
    problem = (
        f"does not fit into memory; free memory, then {RUN_AGAIN}, or, to reject it, give a smaller max_pixels and "
        f"{START_OVER}"
    )
    return SourceError.at(name, problem, "resume=True", "overwrite=True", "max_pixels")


def storage_error(error: H5PackError) -> SourceError:
    """Return an error of the HDF5 file whose rows are converted, with advice for the conversion."""
    message, parameters = f"{error}; then {RUN_AGAIN}", ("resume=True",)
    if isinstance(error, PackChangedError):
        problem = f"was replaced, rewritten or removed while it was read; if the file is complete now, {START_OVER}"
        message, parameters = f"{error.path}: {problem}", ("overwrite=True",)
    return SourceError(message, path=error.path, dataset=error.dataset, rows=error.rows, parameters=parameters)


def _survey(task: SurveyTask) -> tuple[int, Survey, list[npt.NDArray[Any] | None]]:
    """Return a task's first catalog index, the survey of its images, and their labels (empty without labels)."""
    reader: SourceReader = shared()
    found, labels = Survey.of(len(task.names)), []
    with strict_pillow():
        for position, (index, name) in enumerate(zip(task.indices, task.names, strict=True)):
            try:
                image = reader.survey(index, name, task.options.max_pixels)
                if task.masks:
                    image, dtypes = _with_masks(reader, image, position, task)
                    found.mask_dtypes = _widest(found.mask_dtypes, dtypes)
                if task.options.keep:
                    found.kept_bytes[position] = _kept_bytes(reader, index, name)
            except RejectedImageError as error:
                found.reasons[index], image = str(error), _REJECTED
            except HDF5_ERRORS as error:
                raise storage_error(error) from error
            except OSError as error:
                raise SourceError.at(name, f"cannot be read ({error}); {STORAGE_ADVICE}", "resume=True") from error
            except MemoryError as error:
                raise memory_error(name) from error
            # Fill arrays, because sending one object per image would take as long as reading its header.
            header = image.header
            found.heights[position], found.widths[position] = header.height, header.width
            found.decode_paths[position], found.orientations[position] = header.decode_path, header.orientation
            found.fingerprints[position] = image.fingerprint
            found.unused.update(image.unused)
            found.file_bytes += image.file_bytes
            if reader.has_labels:
                labels.append(image.label)
                found.fields.append(image.fields)
    return task.indices[0], found, labels


def _with_masks(
    reader: SourceReader, image: SurveyedImage, position: int, task: SurveyTask
) -> tuple[SurveyedImage, list[str]]:
    """Return `image` with a fingerprint that covers its masks and further images, and the dtype of each of these."""
    marks, dtypes = [image.fingerprint], []
    index = task.indices[position]
    height, width, decode_path = image.header.height, image.header.width, image.header.decode_path
    for number, (kind, masks) in enumerate(task.masks):
        name = masks[position]
        with naming_mask(name, kind):
            if kind == schema.IMAGE:
                further = reader.survey(index, name, task.options.max_pixels)
                if not task.options.resize:
                    require_size(further.header.height, further.header.width, height, width)
                marks.append(further.fingerprint)
                dtypes.append("|u1")
                continue
            header, mark = reader.survey_mask(number, index, name, task.options.max_pixels)
            # Exif may turn the image by 90 degrees. So accept a mask whose height and width are swapped here. Its size
            # is checked again when it is decoded.
            if decode_path != DecodePath.PILLOW or (header.height, header.width) != (width, height):
                require_size(header.height, header.width, height, width)
            marks.append(mark)
            dtypes.append(header.dtype)
    return image._replace(fingerprint=fingerprint(np.array(marks, np.uint64).tobytes())), dtypes


def _widest(dtypes: list[str], others: list[str]) -> list[str]:
    """Return the wider of the two dtypes of each field; one of the lists may be empty."""
    if not dtypes or not others:
        return dtypes or others
    return [max(pair, key=lambda name: np.dtype(name).itemsize) for pair in zip(dtypes, others, strict=True)]


def _kept_bytes(reader: SourceReader, index: int, name: str) -> int:
    """Return the size of a JPEG file in bytes, or 0 for another format; raise RejectedImageError if it is truncated."""
    head, tail, size = reader.ends(index, name)
    if file_format(head) != "jpeg":
        return 0
    if tail != _JPEG_END:
        # Other bytes may follow the end marker of a complete file, so decode it.
        data = reader.read(index, name)
        assert isinstance(data, bytes)
        row_decoder().pixels(data)
    return size


def _joined_labels(
    catalog: Catalog, labels: list[npt.NDArray[Any] | None], reasons: dict[int, str]
) -> npt.NDArray[Any] | None:
    known = [(index, label) for index, label in enumerate(labels) if index not in reasons]
    first = next((label for _, label in known if label is not None), None)
    if first is None:
        return None
    for index, label in known:
        if label is None or label.shape != first.shape:
            raise SourceError(
                f"{catalog.shown(index)} of the dataset has the label {None if label is None else label.tolist()!r}, "
                f"but the first label is {first.tolist()!r}; all labels must be integers, or lists of the same length",
                rows=[catalog.reader.sample_index(index) or 0],
            )
    joined = np.zeros((len(labels), *first.shape), first.dtype)
    for index, label in known:
        joined[index] = label
    return joined
