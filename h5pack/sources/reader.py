"""Readers, which fetch the images of a source: the base class, and the reader of image files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from h5pack.errors import H5PackError, RejectedImageError, SourceError
from h5pack.images.decode import read_header
from h5pack.images.headers import ImageHeader
from h5pack.images.masks import MaskHeader, read_mask_header
from h5pack.system.arrays import SPLITMIX64_GAMMA
from h5pack.system.files import absolute_path, read_all

RUN_AGAIN = "run again with resume=True (but without resume=True in an array job)"
START_OVER = "start over with overwrite=True (in an array job, delete all of OUT.partial* and run all parts again)"
STORAGE_ADVICE = f"repair the storage, then {RUN_AGAIN}"


class SurveyedImage(NamedTuple):
    """The result of the survey for one image."""

    header: ImageHeader
    fingerprint: int  # a 64-bit hash to detect changes, for example of the size and time of the image's file
    label: npt.NDArray[Any] | None = None  # None if the sample has no label, or the reader's `has_labels` is false
    unused: tuple[str, ...] = ()  # names of the parts of a sample that are not packed
    file_bytes: int = 0  # size of the image's file in bytes; 0 if the image has no file of its own
    fields: dict[str, Any] | None = None  # values by field name; None if the reader's `has_labels` is false


class SourceReader:
    """Base class of readers, which fetch the images of a source. Worker processes get a pickled or forked copy."""

    row_bytes = 0  # bytes of memory for an image and its masks while the reader holds them; 0 if unknown
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
        """Return the images to survey again, to find out whether any image at `indices` has changed.

        Default: all; none if `uniform_size` is not None, because such images are not surveyed.
        """
        return indices if self.uniform_size() is None else indices[:0]

    def uniform_size(self) -> tuple[int, int] | None:
        """Return (height, width) if all images are arrays of the same size; else None.

        Images of the same size need no survey: `fingerprints` and, for masks or further images, `uniform_mask_dtypes`
        replace it.
        """
        return None

    def fingerprints(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Return the fingerprints of images, uint64 (n,); see `uniform_size`."""
        raise NotImplementedError

    def uniform_mask_dtypes(self) -> list[str]:
        """Return the dtype, e.g. "|u1", of each of `Catalog.pixel_fields`; see `uniform_size`."""
        return []

    def announce(self, indices: Sequence[int]) -> None:
        """Name the images that will be read next, in this order, so that the reader can prefetch them."""

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
        # Without the name, because `Catalog.identity` has a checksum of all names.
        return SurveyedImage(header, (modified * SPLITMIX64_GAMMA + size) % 2**64, file_bytes=size)

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
