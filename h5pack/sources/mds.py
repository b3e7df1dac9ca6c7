"""MosaicML Streaming's shards (MDS) as a source: files of samples, described by an ``index.json`` beside them.

A shard begins with the number of its samples, the offset of each sample, and the end of the last sample, all uint32. A
sample begins with the sizes, uint32, of the columns whose size varies. The bytes of all columns follow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.errors import SourceError
from h5pack.sources.archives import ArchiveFile, ArchiveReader, member_path
from h5pack.sources.catalog import Catalog, NameFilter, NameTable
from h5pack.sources.manifest import IMAGE_COLUMNS, ManifestColumns, with_columns
from h5pack.sources.shards import Shards
from h5pack.sources.text_tables import TextTable
from h5pack.system.files import file_start

INDEX = "index.json"
_IMAGES = ("jpeg", "png", "bytes")
_NUMBERS = {
    "int": np.dtype("<i8"),
    **{name: np.dtype(name).newbyteorder("<") for name in (
        "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64"
    )},
}  # fmt: skip
_TEXTS = ("str", "str_int", "str_float")

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Shard:
    """A shard: the encodings of its columns, and the offset and size of each sample's columns in the file."""

    file: ArchiveFile
    encodings: dict[str, str]  # encoding of each column, by name
    begins: Ints  # (samples,): offset of the first column of each sample
    sizes: Ints  # (samples, columns), in bytes

    def extents(self, column: str) -> tuple[Ints, Ints]:
        """Return the offset and the size in bytes of a column in each sample; both int64, (samples,)."""
        number = list(self.encodings).index(column)
        return self.begins + self.sizes[:, :number].sum(1), self.sizes[:, number]


def is_mds(path: Path) -> bool:
    """Return whether a folder, or every visible entry in it, contains an index of MDS shards."""
    folders = _folders(path)
    return bool(folders) and all(b'"mds"' in file_start(path / folder / INDEX, 65_536) for folder in folders)


def _folders(path: Path) -> list[str]:
    """Return the names of the visible entries in a folder; [""] if the folder itself has an index."""
    if (path / INDEX).is_file():
        return [""]
    return [name for name in os.listdir(path) if not name.startswith(".")]


def mds(path: Path, wanted: NameFilter, columns: ManifestColumns) -> Catalog:
    """Return the catalog of a folder of MDS shards, or of a folder of such folders, in the order of the samples."""
    folders = [folder for folder in sorted(_folders(path)) if (path / folder / INDEX).is_file()]
    found = [(name, shard) for folder in folders for name, shard in _read_index(path, folder)]
    if not found:
        raise SourceError.at(path, f"has no {INDEX} that lists MDS shards; check the path")
    shards = Shards(path, [name for name, _ in found], wanted)
    opened = [shard for _, shard in found]
    image = columns.path or _find_images(opened[0])
    images: list[str] = []
    members = []
    for shard, name in zip(opened, shards.names, strict=True):
        if shard.encodings != opened[0].encodings:
            problem = "has other columns or encodings than the first shard; pack the shards separately"
            raise SourceError.at(shard.file.path, problem)
        images += [f"{name.removesuffix('.mds')}/{row:08d}" for row in range(len(shard.begins))]
        members.append(_members(shard, image))
    counts = [len(shard.begins) for shard in opened]
    reader = ArchiveReader.of([shard.file for shard in opened], members)
    catalog = Catalog("mds", reader, NameTable.of(images), *shards.split_ids(counts), about=f"images {image!r}")
    table = TextTable(
        path, tuple(opened[0].encodings),
        lambda column: [cell for shard in opened for cell in _cells(shard, column)],
        lambda row: f": {images[row]}",
        frozenset(name for name, encoding in opened[0].encodings.items() if encoding not in {*_NUMBERS, *_TEXTS}),
    )  # fmt: skip
    return with_columns(catalog, table, columns, {image}).filtered(wanted)


def _read_index(root: Path, folder: str) -> Iterator[tuple[str, _Shard]]:
    """Yield the name, relative to `root`, and the `_Shard` of each shard of a folder."""
    path = root / folder / INDEX
    try:
        for one in json.loads(path.read_bytes())["shards"]:
            if (one["version"], one["format"]) != (2, "mds"):
                raise ValueError(f"its format is {one['format']!r}, version {one['version']!r}, not 'mds', version 2")
            name = os.path.join(folder, str(one["raw_data"]["basename"]))
            encodings = dict(zip(map(str, one["column_names"]), map(str, one["column_encodings"]), strict=True))
            sizes, samples = [0 if size is None else int(size) for size in one["column_sizes"]], int(one["samples"])
            fits = len(sizes) == len(encodings) and all(0 <= number < 2**32 for number in (samples, *sizes))
            if not fits or member_path(name) is None:
                raise ValueError("its shards are described wrongly")
            if one.get("zip_data") and not (root / name).is_file():
                problem = "is missing, because the shards are compressed; decompress them, for example with 'zstd -d'"
                raise SourceError.at(root / name, problem)
            yield name, _read_shard(root / name, encodings, sizes, samples)
    except SourceError:
        raise
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise SourceError.at(path, f"cannot be read as an index of MDS shards ({reason}); check the file") from error


def _read_shard(path: Path, encodings: dict[str, str], fixed: Sequence[int], samples: int) -> _Shard:
    """Read the offsets of samples and columns. `fixed` has each column's size in bytes, or 0 if the size varies."""
    file = ArchiveFile(str(path))
    stored = file.read(4 * (samples + 2), 0)
    if len(stored) != 4 * (samples + 2):
        raise file.damaged("is damaged, or cut short")
    head = np.frombuffer(stored, "<u4").astype(np.int64)
    varying = [number for number, size in enumerate(fixed) if not size]
    begins, ends = head[1:-1], head[2:]
    wrong = head[0] != samples or (samples and begins[0] < 4 * (samples + 2))
    if wrong or (ends < begins + 4 * len(varying)).any() or (samples and ends[-1] > file.size):
        raise file.damaged("is damaged, or cut short")
    sizes = np.tile(np.array(fixed, np.int64), (samples, 1)).reshape(samples, len(fixed))
    if varying:
        heads = b"".join(_values(file, begins, np.full(samples, 4 * len(varying))))
        sizes[:, varying] = np.frombuffer(heads, "<u4").reshape(samples, len(varying))
    if (sizes.sum(1) + 4 * len(varying) != ends - begins).any():
        raise file.damaged("has a sample whose columns do not fit its size")
    file.close()
    return _Shard(file, encodings, begins + 4 * len(varying), sizes)


def _values(file: ArchiveFile, offsets: Ints, sizes: Ints) -> Iterator[bytes]:
    """Yield ``sizes[i]`` bytes at ``offsets[i]``; raise SourceError at the end if the file has changed."""
    for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True):
        yield file.read_unchecked(size, offset)
    file.require_unchanged()


def _find_images(shard: _Shard) -> str:
    """Return the column of images: one encoded as jpeg or png, or if there is none, as bytes.

    If there are several such columns, return the one with a usual name. Raise SourceError if the choice is unclear.
    """
    for encodings in (("jpeg", "png"), ("bytes",)):
        named = [name for name, encoding in shard.encodings.items() if encoding.split(":")[0] in encodings]
        found = [name for name in named if name.lower() in IMAGE_COLUMNS] or named
        if len(found) == 1:
            return found[0]
        if found:
            break
    raise _wrong_column(shard, "it is unclear which column holds the images")


def _wrong_column(shard: _Shard, problem: str) -> SourceError:
    found = ", ".join(f"{name!r} {encoding}" for name, encoding in shard.encodings.items())
    advice = "name a column of jpeg, png or bytes with path_column"
    return SourceError.at(shard.file.path, f"{problem} (found: {found}); {advice}", "path_column")


def _members(shard: _Shard, image: str) -> Ints:
    """Return the `Member` of each image of a shard as a row of an array, int64 (samples, 6)."""
    if shard.encodings.get(image, "").split(":")[0] not in _IMAGES:
        raise _wrong_column(shard, f"{image!r} is not a column of image files")
    offsets, sizes = shard.extents(image)
    return np.column_stack([offsets, sizes, sizes, np.zeros((len(sizes), 3), np.int64)])


def _cells(shard: _Shard, column: str) -> list[Any]:
    """Return the numbers or texts of a column; raise SourceError if it does not hold numbers or text."""
    encoding = shard.encodings[column]
    kind = _NUMBERS.get(encoding)
    if kind is None and encoding not in _TEXTS:
        problem = f"column {column!r} holds {encoding}, neither numbers nor text; leave it out"
        raise SourceError.at(shard.file.path, problem)
    offsets, sizes = shard.extents(column)
    if kind is not None and (sizes != kind.itemsize).any():
        raise shard.file.damaged(f"column {column!r} has values that are not {encoding}")
    found = _values(shard.file, offsets, sizes)
    cells = [_text(shard, data) for data in found] if kind is None else np.frombuffer(b"".join(found), kind).tolist()
    shard.file.close()
    return cells


def _text(shard: _Shard, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise shard.file.damaged(f"has text that is not UTF-8 ({error})") from error
