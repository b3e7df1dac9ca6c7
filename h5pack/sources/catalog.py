"""The catalog of a source: a list of its images, with labels, splits and fields, made before the survey.

The survey then finds the size of each image, usually from the header of a file. It rejects files that are not images.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from h5pack.errors import SourceError
from h5pack.format.checksums import crc32
from h5pack.format.fields import FieldValues, RaggedRows, field_kind
from h5pack.format.schema import ARRAY
from h5pack.read.hdf5 import encode_text
from h5pack.sources.reader import SourceReader
from h5pack.system.arrays import RowNumbers
from h5pack.system.text import first_names

IMAGE_SUFFIXES = frozenset((
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".bmp", ".dib", ".gif", ".tif", ".tiff", ".webp", ".avif",
    ".avifs", ".heic", ".heif", ".hif", ".jp2", ".j2k", ".jpx", ".jpf", ".ppm", ".pgm", ".pbm", ".pnm", ".pfm", ".tga",
    ".pcx", ".sgi", ".ico", ".icns", ".dds", ".qoi", ".psd",
))  # fmt: skip
"""Files with these suffixes are treated as images. Their format is later detected from the content."""

NO_SPLITS = ("all",)  # `split_names` of a source without splits
_BLOCK_NAMES = 65_536


@dataclass(frozen=True)
class NameFilter:
    """A filter that selects files by shell patterns. A pattern matches a file's name or its path in the source.

    If `include` has patterns, the filter selects the files that match one of them, whatever their suffix. As in a
    shell, a hidden file must also match one whose last component begins with a dot. If `include` has no patterns, the
    filter selects visible files with an image suffix. Files that match a pattern of `exclude` are skipped.
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

    def __init__(self, blob: bytes, offsets: npt.NDArray[np.int64]) -> None:
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
        return cls(bytes(blob), np.cumsum(np.concatenate(lengths), dtype=np.int64))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> str:
        return self.at([index])[0]

    def at(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> list[str]:
        """Return the names at `indices`. Decoding them in one call is five times as fast as one by one."""
        stored = self._stored(np.asarray(indices, np.int64))
        return os.fsdecode(b"\0".join(stored)).split("\0") if stored else []

    def _stored(self, indices: npt.NDArray[np.int64]) -> list[bytes]:
        edges = zip(self._offsets[:-1][indices].tolist(), self._offsets[1:][indices].tolist(), strict=True)
        return [self._blob[start:stop] for start, stop in edges]

    @property
    def nbytes(self) -> int:
        """Total size of the encoded names in bytes."""
        return len(self._blob)

    @property
    def checksum(self) -> int:
        """A CRC-32 of the encoded names and their lengths."""
        return crc32(self._offsets, crc32(self._blob))

    def __iter__(self) -> Iterator[str]:
        return itertools.chain.from_iterable(map(self.at, _blocks(np.arange(len(self)))))

    def encoded(self) -> Iterator[bytes]:
        """Yield each name as `encode_text` encodes it."""
        if self._blob.isascii():
            return itertools.chain.from_iterable(map(self._stored, _blocks(np.arange(len(self)))))
        return map(encode_text, self)

    def take(self, indices: npt.NDArray[np.int64]) -> NameTable:
        """Return a table of the names at `indices`, int64 (n,)."""
        blob = b"".join(b"".join(self._stored(block)) for block in _blocks(indices))
        return NameTable(blob, np.concatenate([[0], np.cumsum(np.diff(self._offsets)[indices])]))


def _blocks(indices: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    return (indices[first : first + _BLOCK_NAMES] for first in range(0, len(indices), _BLOCK_NAMES))


@dataclass(frozen=True)
class PixelField:
    """A field whose values are pixels: a mask or a further image for each image of a catalog."""

    name: str
    kind: str  # `schema.MASK` or `schema.IMAGE`
    files: NameTable  # (M,): names of the masks or further images, such as paths relative to the source


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
    """A remark in the plan of a conversion and in `ConvertReport.notes`, such as which columns are not packed."""

    text: str
    parameters: tuple[str, ...] = ()  # the parameters that occur in the text


@dataclass(frozen=True)
class Catalog:
    """The images of a source, in source order. M is the number of images."""

    kind: str  # one of `h5pack.sources.detect.KINDS`, or "dataset"
    reader: SourceReader
    names: NameTable  # (M,), for image files: paths that `FileReader` opens, usually relative to its `root`
    split_names: tuple[str, ...]  # at least one; `NO_SPLITS` for a source without splits
    split_ids: npt.NDArray[np.int32]  # (M,), index into `split_names`
    labels: npt.NDArray[Any] | None = None  # int64 (M,), or uint8 (M, K) with K labels per image
    label_names: tuple[str, ...] | None = None  # names of the classes, or of the K columns
    fields: dict[str, FieldValues] = field(default_factory=dict)  # by field name: array (M, ...), or M ragged rows
    pixel_fields: tuple[PixelField, ...] = ()
    rejects: tuple[Reject, ...] = ()  # found before the survey, e.g. images that lack a mask
    ignored: dict[str, int] = field(default_factory=dict)  # number of skipped files, folders or samples, by category
    notes: tuple[Note, ...] = ()
    # Height and width of the images that boxes and keypoints refer to, int32 (M, 2): according to COCO annotations, or
    # 0 if unknown; after the survey, those that it found, or None if there are no coordinates or all sizes are equal.
    coordinate_sizes: npt.NDArray[np.int32] | None = None
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
            coordinate_sizes=None if self.coordinate_sizes is None else self.coordinate_sizes[indices],
        )

    def filtered(self, wanted: NameFilter) -> Catalog:
        """Return a catalog of the images whose names `wanted` allows, whatever the suffix. Others count as ignored."""
        if not wanted.include and not wanted.exclude:
            return self
        refusals = [None if wanted.allows(name) else str(wanted.refusal(name)) for name in self.names]
        kept = [number for number, refusal in enumerate(refusals) if refusal is None]
        ignored = Counter(self.ignored) + Counter(refusal for refusal in refusals if refusal is not None)
        return self if len(kept) == len(self) else replace(self.take(np.array(kept, np.int64)), ignored=dict(ignored))

    def evenly_spaced(self, limit: int) -> Catalog:
        """Return a catalog of at most `limit` evenly spaced images. If images are left out, all rejects are, too."""
        if len(self) <= limit:
            return self
        return replace(self.take(np.arange(limit, dtype=np.int64) * len(self) // limit), rejects=())


def unused_note(kind: str, names: Sequence[str], advice: str, *parameters: str) -> tuple[Note, ...]:
    """Return one note that `names` are not packed, or () if `names` is empty. `kind` is, for example, "columns"."""
    return (Note(f"not packed: {kind} {first_names(names)}; {advice}", parameters),) if names else ()


def one_split(count: int) -> tuple[tuple[str, ...], npt.NDArray[np.int32]]:
    """Return the `split_names` and `split_ids` of a source without splits."""
    return NO_SPLITS, np.zeros(count, np.int32)


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
