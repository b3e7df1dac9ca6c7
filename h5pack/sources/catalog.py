"""The catalog of a source: a list of its images, with labels, splits and fields, made before the survey.

The survey then finds the size of each image, usually from the header of a file. It rejects files that are not images.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import itertools
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from h5pack.errors import H5PackError, RejectedImageError, SourceError
from h5pack.format.checksums import crc32
from h5pack.format.fields import FieldValues, RaggedRows, field_kind
from h5pack.format.schema import ARRAY
from h5pack.images.decode import read_header
from h5pack.images.headers import ImageHeader
from h5pack.images.masks import MaskHeader, read_mask_header
from h5pack.system.arrays import RowNumbers
from h5pack.system.files import absolute_path, read_all
from h5pack.system.text import first_names

IMAGE_SUFFIXES = frozenset((
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".bmp", ".dib", ".gif", ".tif", ".tiff", ".webp", ".avif",
    ".avifs", ".heic", ".heif", ".hif", ".jp2", ".j2k", ".jpx", ".jpf", ".ppm", ".pgm", ".pbm", ".pnm", ".pfm", ".tga",
    ".pcx", ".sgi", ".ico", ".icns", ".dds", ".qoi", ".psd",
))  # fmt: skip
"""Files with these suffixes are treated as images. Their format is later detected from the content."""

RUN_AGAIN = "run again with resume=True (but without resume=True in an array job)"
START_OVER = "start over with overwrite=True (in an array job, delete all of OUT.partial* and run all parts again)"
STORAGE_ADVICE = f"repair the storage, then {RUN_AGAIN}"
_BLOCK_NAMES = 65_536


@dataclass(frozen=True)
class NameFilter:
    """A filter that selects files by shell patterns. A pattern matches a file's name or its path in the source.

    If `include` has patterns, the filter selects all files that match one of them, whatever their suffix, but, as in a
    shell, hidden files only by a pattern that begins with a dot (after its last slash), too. If it has none, the filter
    selects visible files with an image suffix. Files that match a pattern of `exclude` are skipped.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def refusal(self, relative: str) -> str | None:
        """Return the category under which a skipped file is counted, such as "hidden"; None if the file is selected."""
        if (self.include or self.exclude) and not self.allows(relative):
            return "excluded" if _matches(relative, self.exclude) else "not included"
        name = relative[relative.rfind("/") + 1 :]
        if name[:1] == ".":
            patterns = tuple(pattern for pattern in self.include if os.path.basename(pattern).startswith("."))
            return None if _matches(relative, patterns) else "hidden"
        dot = name.rfind(".")
        suffix = name[dot:].lower() if dot > 0 else ""
        return None if self.include or suffix in IMAGE_SUFFIXES else f"{suffix or 'no suffix'} files"

    def allows(self, relative: str) -> bool:
        """Return whether no pattern of `exclude` matches the path, and one of `include` does, if there are any."""
        return not _matches(relative, self.exclude) and (not self.include or _matches(relative, self.include))

    def excludes_below(self, folder: str) -> bool:
        """Return whether a pattern of `exclude` ends in "*" and matches `folder` + "/", so also all paths below it."""
        return any(pattern.endswith("*") and fnmatchcase(f"{folder}/", pattern) for pattern in self.exclude)


def _matches(relative: str, patterns: tuple[str, ...]) -> bool:
    name = relative[relative.rfind("/") + 1 :]
    return any(fnmatchcase(relative, pattern) or fnmatchcase(name, pattern) for pattern in patterns)


class NameTable:
    """A compact sequence of many file names: one bytes object that holds all names, and the offset of each name.

    A million names of 30 bytes take 38 MB. A list of str takes 87 MB, and forked processes soon copy it, because Python
    writes reference counts into it.
    """

    def __init__(self, blob: bytes | bytearray, offsets: npt.NDArray[np.int64]) -> None:
        self._blob = blob
        self._offsets = offsets

    @classmethod
    def of(cls, names: Iterable[str]) -> NameTable:
        """Return a table of `names`. They must not contain NUL. A surrogate escape stands for an undecodable byte."""
        blob, lengths, remaining = bytearray(), [np.zeros(1, np.int32)], iter(names)
        # Encode block by block, because str objects need several times the memory of the encoded names.
        while block := list(itertools.islice(remaining, _BLOCK_NAMES)):
            # Encode a block in one call, with NUL after each name.
            text = "\0".join([*block, ""])
            if not text.isascii() and (coding := sys.getfilesystemencoding()) != "utf-8":
                raise SourceError(f"Python decodes file names as {coding}, not UTF-8; set PYTHONUTF8=1, then run again")
            joined = os.fsencode(text)
            ends = np.flatnonzero(np.frombuffer(joined, np.uint8) == 0)
            lengths.append((np.diff(ends, prepend=-1) - 1).astype(np.int32))
            blob += joined.replace(b"\0", b"")
        return cls(blob, np.cumsum(np.concatenate(lengths), dtype=np.int64))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> str:
        return self.at([index])[0]

    def at(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> list[str]:
        """Return the names at `indices`. Decoding them in one call is five times as fast as one by one."""
        found = np.asarray(indices, np.int64)
        edges = zip(self._offsets[:-1][found].tolist(), self._offsets[1:][found].tolist(), strict=True)
        joined = b"\0".join([self._blob[start:stop] for start, stop in edges])
        return os.fsdecode(joined).split("\0") if len(found) else []

    @property
    def nbytes(self) -> int:
        """Total size of the encoded names in bytes."""
        return len(self._blob)

    @property
    def checksum(self) -> int:
        """A CRC-32 of the encoded names and their lengths."""
        return crc32(self._offsets, crc32(self._blob))

    def __iter__(self) -> Iterator[str]:
        return self._each(np.arange(len(self)))

    def _each(self, indices: npt.NDArray[np.int64]) -> Iterator[str]:
        for first in range(0, len(indices), _BLOCK_NAMES):
            yield from self.at(indices[first : first + _BLOCK_NAMES])

    def take(self, indices: npt.NDArray[np.int64]) -> NameTable:
        """Return a table of the names at `indices`, int64 (n,)."""
        return NameTable.of(self._each(indices))


@dataclass(frozen=True)
class PixelField:
    """A field whose values are pixels: a mask or a further image for each image of a catalog."""

    name: str
    kind: str  # `schema.MASK` or `schema.IMAGE`
    files: NameTable  # (M,): names of the masks or further images, such as paths relative to the source


class SurveyedImage(NamedTuple):
    """The result of the survey for one image."""

    header: ImageHeader
    fingerprint: int  # a 64-bit hash to detect changes, for example of the name, size and time of the image's file
    label: npt.NDArray[Any] | None = None  # None if the sample has no label, or the reader's `has_labels` is false
    unused: tuple[str, ...] = ()  # names of the parts of a sample that are not packed
    file_bytes: int = 0  # size of the image's file in bytes; 0 if the image has no file of its own
    fields: dict[str, Any] | None = None  # values by field name; None if the reader's `has_labels` is false


class SourceReader:
    """Base class of readers, which fetch the images of a source. Worker processes get a pickled or forked copy."""

    row_bytes = 0  # of an image that `begin` announced, with its masks, in memory; 0 if unknown
    has_labels = False  # whether `survey` returns labels and fields; if true, the catalog has none before the survey

    def read(self, index: int, name: str) -> bytes | npt.NDArray[np.uint8]:
        """Return image `index`, either as the bytes of its file or as pixels, uint8 (h, w, 1 or 3).

        Raise RejectedImageError with the reason if the image is damaged, OSError or another H5PackError if the storage
        fails.
        """
        raise NotImplementedError

    def survey(self, index: int, name: str, max_pixels: int) -> SurveyedImage:
        """Return the size, decode path and fingerprint of image `index`, reading as little of the image as possible.

        Raise the errors of `read`, and RejectedImageError with the reason if the image cannot be packed.
        """
        raise NotImplementedError

    def read_field(self, number: int, index: int, name: str) -> bytes | npt.NDArray[Any]:
        """Return the mask or further image that belongs to image `index`, as the bytes of a file or as pixels.

        The pixels of a mask are (h, w). `number` is the index of the field in `Catalog.pixel_fields`, and `name` is
        from the `PixelField.files` of this field.
        """
        return self.read(index, name)

    def survey_mask(self, number: int, index: int, name: str, max_pixels: int) -> tuple[MaskHeader, int]:
        """Return the header and fingerprint of the mask that `read_field` returns. Raise the errors of `survey`."""
        with _reporting(name):
            data = self.read_field(number, index, name)
        if isinstance(data, bytes):
            return read_mask_header(lambda: io.BytesIO(data), max_pixels), fingerprint(data)
        return MaskHeader(data.shape[0], data.shape[1], data.dtype.str), fingerprint(data.tobytes())

    def ends(self, index: int, name: str) -> tuple[bytes, bytes, int]:
        """Return the first 3 and last 2 bytes of an image file, and its size in bytes; (b"", b"", 0) for pixels."""
        data = self.read(index, name)
        return (data[:3], data[-2:], len(data)) if isinstance(data, bytes) else (b"", b"", 0)

    def changing(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the images to survey again, to find out whether any image at `indices` has changed. Default: all."""
        return indices

    def uniform_size(self) -> tuple[int, int] | None:
        """Return (height, width) if all images are arrays of the same size, so that no survey is needed; else None."""
        return None

    def fingerprints(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Return the fingerprints of images, uint64 (n,). Call only if `uniform_size` is not None."""
        raise NotImplementedError

    def uniform_mask_dtypes(self) -> list[str]:
        """Return the dtype, e.g. "|u1", of each of `Catalog.pixel_fields`. Call only if `uniform_size` is not None."""
        return []

    def begin(self, indices: Sequence[int]) -> None:
        """Announce the images that will be read next, in this order, so that the reader can prefetch them."""

    def groups(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """Return a group number per image, int64 (n,), if images of a group are faster to read together; else None."""
        return None

    def take(self, indices: npt.NDArray[np.int64]) -> SourceReader:
        """Return a reader of only the images at `indices`, int64 (n,), which are renumbered from 0."""
        return self

    def paths(self) -> Iterable[str]:
        """Return the absolute paths of archives, tables and HDF5 files with the data to pack; none for image files."""
        return ()

    def sample_index(self, index: int) -> int | None:
        """Return the index of image `index` in a map-style dataset, or None for other sources."""
        return None


def fingerprint(data: bytes) -> int:
    """Return a 64-bit hash of `data`."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _survey_error(name: str, error: OSError | ValueError) -> H5PackError:
    """Return the error for a file that cannot be read: RejectedImageError, or SourceError if the storage fails."""
    reason: str | None = "its name is not a valid file name"
    if isinstance(error, OSError):
        reason = _MISSING_FILE_REASONS.get(error.errno or 0)
    if reason is None:
        return SourceError.at(name, f"cannot be read ({error}); {STORAGE_ADVICE}", "resume=True")
    return RejectedImageError(reason)


@contextlib.contextmanager
def _reporting(name: str) -> Iterator[None]:
    """Turn an OSError or ValueError into RejectedImageError or, if the storage fails, into SourceError."""
    try:
        yield
    except H5PackError:
        raise
    except (OSError, ValueError) as error:
        raise _survey_error(name, error) from error


def named_fingerprint(name: str, *numbers: int) -> int:
    """Return a 64-bit hash of a name and numbers, such as the size and the time of a file."""
    return fingerprint(name.encode("utf-8", "surrogateescape") + b"\0%d" * len(numbers) % numbers)


# Without O_NONBLOCK, opening a named pipe would wait for a writer, possibly forever.
_OPEN_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class FileReader(SourceReader):
    """Reads image files. Names are absolute, or relative to the folder `root`."""

    root: str

    def __post_init__(self) -> None:
        # Workers of a cluster may have another working directory.
        object.__setattr__(self, "root", absolute_path(self.root))

    def read(self, index: int, name: str) -> bytes:
        descriptor, size, _ = self._open(name)
        try:
            return read_all(descriptor, size, 0)
        finally:
            os.close(descriptor)

    def survey(self, index: int, name: str, max_pixels: int) -> SurveyedImage:
        try:  # The context manager `_reporting` would take 1 us for each image.
            head, size, modified = self.head(name)
            header = read_header(head, lambda: self.open(name), max_pixels)
        except H5PackError:
            raise
        except (OSError, ValueError) as error:
            raise _survey_error(name, error) from error
        return SurveyedImage(header, named_fingerprint(name, size, modified), file_bytes=size)

    def survey_mask(self, number: int, index: int, name: str, max_pixels: int) -> tuple[MaskHeader, int]:
        with _reporting(name):
            _, size, modified = self.head(name, 1)
            return read_mask_header(lambda: self.open(name), max_pixels), named_fingerprint(name, size, modified)

    def ends(self, index: int, name: str) -> tuple[bytes, bytes, int]:
        descriptor, size, _ = self._open(name)
        try:
            return os.pread(descriptor, 3, 0), os.pread(descriptor, 2, max(0, size - 2)), size
        finally:
            os.close(descriptor)

    def head(self, name: str, head_bytes: int = 2_048) -> tuple[bytes, int, int]:
        """Return the first bytes of a file, its size in bytes, and its modification time in nanoseconds."""
        descriptor, size, modified = self._open(name)
        try:
            return os.read(descriptor, head_bytes), size, modified
        finally:
            os.close(descriptor)

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading. Call `head` first, because it rejects anything but a regular file."""
        return open(self._path(name), "rb")

    def _path(self, name: str) -> str:
        # os.path.join takes four times as long.
        return name if name.startswith("/") else f"{self.root}/{name}"

    def _open(self, name: str) -> tuple[int, int, int]:
        descriptor = os.open(self._path(name), _OPEN_FLAGS)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise RejectedImageError("not a regular file")
        return descriptor, status.st_size, status.st_mtime_ns


_MISSING_FILE_REASONS = {
    errno.ENOENT: "file not found",
    errno.ENOTDIR: "file not found",
    errno.EISDIR: "not a regular file",
    errno.EACCES: "no permission to read it",
    errno.EPERM: "no permission to read it",
    errno.ELOOP: "a loop of symbolic links",
    errno.ENAMETOOLONG: "its name is too long",
    errno.ENXIO: "not a regular file",
}

MISSING_FILE_REASONS = frozenset(_MISSING_FILE_REASONS.values())
"""The reasons for rejecting a file that is missing or cannot be opened."""


@dataclass(frozen=True)
class Reject:
    """An image that is not packed: its name, and the reason, whose text must be the same in every run."""

    name: str
    reason: str
    sample: int | None = None  # the sample's index in a map-style dataset; None for other sources

    @property
    def shown(self) -> str:
        """The text for the image in messages: its name, or the index and (if known) the file name of a sample."""
        if self.sample is None:
            return self.name
        return f"sample {self.sample}" + (f" ({self.name})" if self.name != sample_name(self.sample) else "")


class Note(NamedTuple):
    """A remark in the plan of a conversion, such as which columns are not packed."""

    text: str
    parameters: tuple[str, ...] = ()  # the parameters that occur in the text


@dataclass(frozen=True)
class Catalog:
    """The images of a source, in source order. M is the number of images."""

    kind: str  # one of `h5pack.sources.detect.KINDS`, or "dataset"
    reader: SourceReader
    names: NameTable  # (M,), for image files: paths that `FileReader` opens, usually relative to its `root`
    split_names: tuple[str, ...]  # at least one; ("all",) for a source without splits
    split_ids: npt.NDArray[np.int32]  # (M,), index into `split_names`
    labels: npt.NDArray[Any] | None = None  # int64 (M,), or uint8 (M, K) with K labels per image
    label_names: tuple[str, ...] | None = None  # names of the classes, or of the K columns
    fields: dict[str, FieldValues] = field(default_factory=dict)  # by field name: array (M, ...), or M ragged rows
    pixel_fields: tuple[PixelField, ...] = ()
    rejects: tuple[Reject, ...] = ()  # found before the survey, e.g. images that lack a mask
    ignored: dict[str, int] = field(default_factory=dict)  # number of skipped files, folders or samples, by category
    notes: tuple[Note, ...] = ()
    # COCO only: height and width of each image according to its annotations, int32 (M, 2), or 0 if unknown.
    annotated_sizes: npt.NDArray[np.int32] | None = None
    about: str = ""  # text that the plan shows after the kind, e.g. the datasets, columns or folders in use

    def __len__(self) -> int:
        return len(self.names)

    def reject(self, index: int, reason: str) -> Reject:
        """Return a `Reject` of image `index`."""
        return Reject(self.names[index], reason, self.reader.sample_index(index))

    def shown(self, index: int) -> str:
        """Return the name by which messages refer to image `index`."""
        return self.reject(index, "").shown

    def tables_checksum(self) -> int:
        """Return a CRC-32 of labels, splits, fields and rejects, by which a resumed conversion detects changes."""
        checksum = crc32(repr((self.split_names, self.label_names, sorted(self.fields), self.rejects)).encode())
        for values in (self.split_ids, self.labels, *(self.fields[name] for name in sorted(self.fields))):
            if isinstance(values, RaggedRows):
                checksum = crc32(repr((values.kind, values.classes)).encode(), checksum)
            for array in (values.data, values.offsets) if isinstance(values, RaggedRows) else (values,):
                if array is not None:
                    checksum = crc32(np.ascontiguousarray(array), checksum)
        for one in self.pixel_fields:
            checksum = crc32(f"{one.name}\0{one.kind}\0{one.files.checksum}".encode(), checksum)
        return checksum

    def identity(self) -> dict[str, int]:
        """Return a JSON-serializable dict that changes if the names, the order or the tables of the images change."""
        return {"images": len(self), "names": self.names.checksum, "tables": self.tables_checksum()}

    def field_texts(self) -> list[str]:
        """Return a phrase for each of `fields`, such as "field crowd (ragged)"."""
        kinds = {name: field_kind(values) for name, values in sorted(self.fields.items())}
        return [f"field {name}" + (f" ({kind})" if kind != ARRAY else "") for name, kind in kinds.items()]

    def take(self, indices: npt.NDArray[np.int64]) -> Catalog:
        """Return a catalog of only the images at `indices`."""
        return replace(
            self,
            reader=self.reader.take(indices),
            names=self.names.take(indices),
            split_ids=self.split_ids[indices],
            labels=None if self.labels is None else self.labels[indices],
            fields={name: values[indices] for name, values in self.fields.items()},
            pixel_fields=tuple(replace(one, files=one.files.take(indices)) for one in self.pixel_fields),
            annotated_sizes=None if self.annotated_sizes is None else self.annotated_sizes[indices],
        )

    def filtered(self, wanted: NameFilter) -> Catalog:
        """Return a catalog of the images whose names `wanted` allows, whatever the suffix. Others count as ignored."""
        if not wanted.include and not wanted.exclude:
            return self
        refusals = [None if wanted.allows(name) else str(wanted.refusal(name)) for name in self.names]
        kept = [number for number, refusal in enumerate(refusals) if refusal is None]
        ignored = Counter(self.ignored) + Counter(refusal for refusal in refusals if refusal is not None)
        return self if len(kept) == len(self) else replace(self.take(np.array(kept, np.int64)), ignored=dict(ignored))

    def limited(self, limit: int) -> Catalog:
        """Return a catalog of at most `limit` evenly spaced images. If images are left out, all rejects are, too."""
        if len(self) <= limit:
            return self
        return replace(self.take(np.arange(limit, dtype=np.int64) * len(self) // limit), rejects=())


def unused_note(kind: str, names: Sequence[str], advice: str, *parameters: str) -> tuple[Note, ...]:
    """Return one note that `names` are not packed, or () if `names` is empty. `kind` is, for example, "columns"."""
    return (Note(f"not packed: {kind} {first_names(names)}; {advice}", parameters),) if names else ()


def one_split(count: int) -> tuple[tuple[str, ...], npt.NDArray[np.int32]]:
    """Return the `split_names` and `split_ids` of a source without splits."""
    return ("all",), np.zeros(count, np.int32)


def split_ids(
    rows: Mapping[str, RowNumbers], count: int, where: str, path: Path | None = None
) -> tuple[tuple[str, ...], npt.NDArray[np.int32]]:
    """Return the `split_names` and `split_ids` of `count` rows, given the rows of each split.

    Rows in no split form a split named "rest", or "rest_" if another split has that name, and so on. If splits overlap,
    raise SourceError; its message begins with `where`.
    """
    if not rows:
        return one_split(count)
    ids = np.full(count, len(rows), np.int32)
    for number, part in enumerate(rows.values()):
        own = slice(part.start, part.stop) if isinstance(part, range) else part
        if (ids[own] != len(rows)).any():
            raise SourceError(f"{where}: its splits overlap; correct the rows of its splits", path=path)
        ids[own] = number
    rest = next(name for length in itertools.count() if (name := "rest" + "_" * length) not in rows)
    return ((*rows, rest) if (ids == len(rows)).any() else tuple(rows)), ids


def sample_name(index: int) -> str:
    """Return the name to use for a sample of a map-style dataset that has no file name."""
    return f"{index:08d}"
