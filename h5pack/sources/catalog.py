"""The catalog of a source: which images there are, in source order, with labels and splits, before any is opened."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from h5pack.checksum import crc32
from h5pack.errors import RejectedImageError
from h5pack.sources.walk import NameFilter


class NameTable:
    """Many file names in little memory: one bytes object and an offset a name.

    A million names of 30 bytes take 38 MB, where a list of str takes 87 MB and a fork soon copies it.
    """

    def __init__(self, blob: bytes, offsets: npt.NDArray[np.int64]) -> None:
        self._blob = blob
        self._offsets = offsets

    @classmethod
    def of(cls, names: Iterable[str]) -> NameTable:
        """Collect `names`; they may hold undecodable bytes as Python's surrogate escapes."""
        # One call encodes all; no name holds a NUL, so the NULs between them tell the lengths.
        joined = os.fsencode("\0".join(names))
        if not joined:
            return cls(b"", np.zeros(1, np.int64))
        ends = np.flatnonzero(np.frombuffer(joined, np.uint8) == 0)
        offsets = np.concatenate([[0], ends - np.arange(len(ends)), [len(joined) - len(ends)]]).astype(np.int64)
        return cls(joined.replace(b"\0", b""), offsets)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> str:
        if not -len(self) <= index < len(self):
            raise IndexError(f"name {index} of {len(self)}")
        index %= len(self)
        return os.fsdecode(self._blob[self._offsets[index] : self._offsets[index + 1]])

    @property
    def nbytes(self) -> int:
        """Bytes of all names."""
        return len(self._blob)

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def take(self, indices: Iterable[int]) -> NameTable:
        """The names at `indices`, as a table of their own."""
        return NameTable.of(self[index] for index in indices)


class Reader:
    """Fetches the images of a source; pickled or forked into the workers."""

    def read(self, index: int, name: str) -> bytes | npt.NDArray[np.uint8]:
        """The encoded file, or the decoded pixels (uint8, (h, w, 1 or 3)), of image `index`.

        Raises
        ------
        OSError
            If the storage fails.
        RejectedImageError
            If there is nothing to read; the message is the reason alone.
        """
        raise NotImplementedError

    def begin(self, indices: Sequence[int]) -> None:
        """Hear which images will be asked for next, in this order."""

    def groups(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """A number for each image, int64 (n,): those of one number are cheaper read together; None if none are."""
        return None

    def take(self, indices: npt.NDArray[np.int64]) -> Reader:
        """The reader of the images at `indices` alone, which then count from 0."""
        return self


# Without O_NONBLOCK the opening of a named pipe waits for a writer that may never come.
_OPEN_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class FileReader(Reader):
    """Reads image files below a folder.

    Attributes
    ----------
    root : str
        The folder; absolute names are taken as they are.
    """

    root: str

    def read(self, index: int, name: str) -> bytes:
        descriptor, size, _ = self._open(name)
        try:
            data = os.read(descriptor, size)
            # Linux reads at most 2 GiB a call, and a network file system may return less than was asked for.
            while len(data) < size:
                more = os.read(descriptor, size - len(data))
                if not more:
                    break
                data += more
            return data
        finally:
            os.close(descriptor)

    def head(self, name: str, head_bytes: int = 2_048) -> tuple[bytes, int, int]:
        """The first bytes of a file, its length, and its modification time in nanoseconds."""
        descriptor, size, modified = self._open(name)
        try:
            return os.read(descriptor, head_bytes), size, modified
        finally:
            os.close(descriptor)

    def open(self, name: str) -> BinaryIO:
        """A file that was seen to be regular, for reading parts of it."""
        return open(self._path(name), "rb")

    def _path(self, name: str) -> str:
        # os.path.join is as slow as opening the file.
        return name if name.startswith("/") else f"{self.root}/{name}"

    def _open(self, name: str) -> tuple[int, int, int]:
        descriptor = os.open(self._path(name), _OPEN_FLAGS)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise RejectedImageError("not a regular file")
        return descriptor, status.st_size, status.st_mtime_ns


_ABSENT = {
    errno.ENOENT: "file not found",
    errno.ENOTDIR: "file not found",
    errno.EISDIR: "not a regular file",
    errno.EACCES: "no permission to read it",
    errno.EPERM: "no permission to read it",
    errno.ELOOP: "a loop of symbolic links",
    errno.ENAMETOOLONG: "its name is too long",
    errno.ENXIO: "not a regular file",
}


def absence(error: OSError) -> str | None:
    """Why a file cannot be had, where that is the file's own fault; None where the storage failed."""
    return _ABSENT.get(error.errno or 0)


@dataclass(frozen=True)
class Reject:
    """An image that is not packed.

    Attributes
    ----------
    name : str
        File name relative to the source.
    reason : str
        Why, in words that depend on the image alone.
    """

    name: str
    reason: str


@dataclass(frozen=True)
class Catalog:
    """What a source holds, in source order.

    Attributes
    ----------
    kind : str
        flat, classes, splits, celeba, manifest, hdf5 or dataset.
    reader : Reader
        Fetches the images.
    names : NameTable
        M file names, relative to the source.
    split_names : tuple of str
        At least one.
    split_ids : ndarray
        int32, (M,): index into `split_names`.
    labels : ndarray or None
        int64 (M,), or uint8 (M, K).
    label_names : tuple of str or None
        The classes of an int64 label, or the columns of a uint8 table.
    fields : dict of str to ndarray
        Further values of each image, (M, ...).
    rejects : tuple of Reject
        Images that cannot be packed for what the source's tables say of them.
    ignored : dict of str to int
        How many other files were passed over, by kind.
    about : str
        What of the source was taken, in words, where that was found by looking.
    """

    kind: str
    reader: Reader
    names: NameTable
    split_names: tuple[str, ...]
    split_ids: npt.NDArray[np.int32]
    labels: npt.NDArray[Any] | None = None
    label_names: tuple[str, ...] | None = None
    fields: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    rejects: tuple[Reject, ...] = ()
    ignored: dict[str, int] = field(default_factory=dict)
    about: str = ""

    def __len__(self) -> int:
        return len(self.names)

    def tables_checksum(self) -> int:
        """CRC-32 of labels, splits and fields, by which a resume sees that a table has changed."""
        checksum = crc32(repr((self.split_names, self.label_names, sorted(self.fields), self.rejects)).encode())
        for values in (self.split_ids, self.labels, *(self.fields[name] for name in sorted(self.fields))):
            if values is not None:
                checksum = crc32(np.ascontiguousarray(values), checksum)
        return checksum

    def take(self, indices: npt.NDArray[np.int64]) -> Catalog:
        """The catalog of the images at `indices` alone."""
        return replace(
            self,
            reader=self.reader.take(indices),
            names=self.names.take(indices.tolist()),
            split_ids=self.split_ids[indices],
            labels=None if self.labels is None else self.labels[indices],
            fields={name: values[indices] for name, values in self.fields.items()},
        )

    def filtered(self, wanted: NameFilter) -> Catalog:
        """The catalog of the images that --include and --exclude let pass; others are counted in `ignored`.

        A table names its images, so their endings do not matter.
        """
        counted: dict[str, int] = {}
        kept = []
        for number, name in enumerate(self.names if wanted.include or wanted.exclude else ()):
            refusal = wanted.refusal(name)
            if refusal in ("excluded", "not included"):
                counted[refusal] = counted.get(refusal, 0) + 1
            else:
                kept.append(number)
        if not counted:
            return self
        return replace(self.take(np.array(kept, np.int64)), ignored={**self.ignored, **counted})

    def limited(self, limit: int) -> Catalog:
        """At most `limit` images, evenly spaced in source order, so that every class and split keeps its share."""
        if len(self) <= limit:
            return self
        return self.take(np.arange(limit, dtype=np.int64) * len(self) // limit)


def one_split(count: int, name: str = "all") -> tuple[tuple[str, ...], npt.NDArray[np.int32]]:
    """Split names and ids of a source without splits."""
    return (name,), np.zeros(count, np.int32)


def class_ids(values: Sequence[str]) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
    """Sorted distinct names, and each value's index among them."""
    names = tuple(sorted(set(values)))
    index = {name: number for number, name in enumerate(names)}
    return names, np.array([index[value] for value in values], np.int64)
