"""WebDataset shards as a source: tar files in which the members of a sample have the same name up to the first dot."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.errors import SourceError
from h5pack.sources.archives import ArchiveFile, ArchiveReader, Member, Members, Storing
from h5pack.sources.catalog import IMAGE_SUFFIXES, Catalog, NameFilter, NameTable, Note, Reject, unused_note
from h5pack.sources.folders import is_visible
from h5pack.sources.manifest import LABEL_COLUMNS, SPLIT_COLUMNS, ManifestColumns, with_columns
from h5pack.sources.shards import Shards
from h5pack.sources.text_tables import TextTable
from h5pack.system.text import counted

_CLASS, _JSON, _TEXT = "cls", "json", "txt"
_TABLES = (_CLASS, _JSON, _TEXT)
_TABLE_ENDINGS = tuple(f".{ending}" for ending in _TABLES)
_MAX_TABLE_BYTES = 1024 * 1024


@dataclass
class _Samples:
    """The content of the shards that were read so far."""

    kept: frozenset[str]  # keys of ``.json`` members whose values are kept, in lower case
    names: list[str] = field(default_factory=list)  # names of the images
    files: list[ArchiveFile] = field(default_factory=list)
    members: list[npt.NDArray[np.int64]] = field(default_factory=list)  # the images of each file, as `Members.values`
    cells: list[dict[str, Any]] = field(default_factory=list)  # the kept values of each image's sample, by key
    header: dict[str, None] = field(default_factory=dict)  # all keys, kept or not, in the order of their appearance
    others: Counter[str] = field(default_factory=Counter)  # endings of the members that are not read
    ignored: Counter[str] = field(default_factory=Counter)
    rejects: list[Reject] = field(default_factory=list)
    notes: tuple[Note, ...] = ()


def is_webdataset(members: Members) -> bool:
    """Return whether a tar file is a WebDataset shard.

    In a shard, some sample has an image and a ``.cls`` member. If no member is in a folder, an image and a ``.json`` or
    ``.txt`` member are enough.
    """
    if not any(name.endswith(_TABLE_ENDINGS) for name in members.found):
        return False
    keys: dict[str, set[str]] = {}
    for name in members.found:
        key, ending = _split_name(name)
        if ending in _TABLES or f".{ending}" in IMAGE_SUFFIXES:
            keys.setdefault(key, set()).add("image" if ending not in _TABLES else ending)
    flat = not any("/" in name for name in members.found)
    return any("image" in found and (_CLASS in found or (flat and len(found) > 1)) for found in keys.values())


def webdataset(shards: Shards, opened: Iterable[tuple[ArchiveFile, Members]], columns: ManifestColumns) -> Catalog:
    """Return the catalog of WebDataset shards, with the samples in order. `opened` yields each shard and its members.

    The label is the ``.cls`` member, or else a value of the ``.json`` member. The keys of ``.json`` members are treated
    like columns of a manifest, and a ``.txt`` member like a column "txt".
    """
    named = columns.named
    tables = (_JSON, _TEXT) if _TEXT in named else (_JSON,)
    samples = _Samples(frozenset(name.lower() for name in (*named, *LABEL_COLUMNS, *SPLIT_COLUMNS)))
    for (file, members), prefix in zip(opened, shards.prefixes, strict=True):
        _add_shard(samples, file, members, prefix, shards.wanted, tables if named else ())
        file.close()
    catalog = Catalog(
        "webdataset",
        ArchiveReader.of(samples.files, samples.members),
        NameTable.of(samples.names),
        *shards.split_ids([len(some) for some in samples.members]),
        rejects=tuple(samples.rejects),
        ignored=dict(samples.ignored),
        notes=samples.notes,
    )
    unlabeled = sum(_CLASS not in cells for cells in samples.cells) if _CLASS in samples.header else 0
    table = TextTable(
        shards.named, tuple(samples.header),
        lambda column: [cells.get(column) for cells in samples.cells],
        lambda row: f": {samples.names[row]}",
        # If no column is named, .json members were read only for samples without a .cls, so others lack values.
        frozenset(samples.header) - {_CLASS} if unlabeled and not named else frozenset(),
    )  # fmt: skip
    if _CLASS in samples.header and not columns.labels:
        columns = replace(columns, labels=(_CLASS,))
    catalog = with_columns(catalog, table, columns, {_CLASS})
    if catalog.labels is None:
        text = "there are no labels in .cls or .json members"
        if len(shards.names) > 1:
            text += "; if each file is a class, put all files into one with 'tar -cf classes.tar -C FOLDER .'"
        catalog = replace(catalog, notes=(*catalog.notes, Note(text)))
    others = [f".{ending}" for ending in sorted(samples.others)]
    notes = unused_note("members", others, "a .txt member can be packed with text_columns", "text_columns")
    if unlabeled and columns.labels == (_CLASS,):
        notes += (Note(f"{counted(unlabeled, 'sample')} without a .cls: the label is -1"),)
    return replace(catalog, notes=catalog.notes + notes)


def _add_shard(
    samples: _Samples, file: ArchiveFile, members: Members, prefix: str, wanted: NameFilter, tables: tuple[str, ...]
) -> None:
    """Add a shard's samples. `tables` says which members ("json", "txt") may hold columns that the user named."""
    images: list[str] = []
    for key, parts in _grouped(file, members, samples).items():
        found = {ending: path for ending, path in parts.items() if f".{ending}" in IMAGE_SUFFIXES}
        allowed = {ending: path for ending, path in found.items() if wanted.allows(f"{prefix}{path}")}
        # The .cls comes last, because its label replaces a value "cls" in the .json.
        read = (*tables, _CLASS) if _JSON in tables or _CLASS in parts else (_JSON, *tables, _CLASS)
        samples.others.update(ending for ending in parts if ending not in found and ending not in read)
        if not allowed:
            samples.ignored["excluded samples" if found else "samples without an image"] += 1
            continue
        if len(allowed) > 1:
            endings = " and ".join(f".{ending}" for ending in sorted(allowed))
            example = f"include='*.{min(allowed)}'"
            problem = f"sample {key!r} has several images, {endings}; choose one, for example with {example}"
            raise SourceError.at(file.path, problem, example)
        images += allowed.values()
        cells: dict[str, Any] = {}
        for ending in read:
            if ending in parts:
                cells |= _cells(file, parts[ending], members.found[parts[ending]])
        samples.header |= dict.fromkeys(cells)
        samples.cells.append(
            {name: cell for name, cell in cells.items() if name in (_CLASS, _TEXT) or name.lower() in samples.kept}
        )
    samples.names += [f"{prefix}{path}" for path in images]
    samples.files.append(file)
    samples.members.append(members.values(images))
    rejects = (Reject(f"{prefix}{one.name}", one.reason) for one in members.rejects)
    samples.rejects += [one for one in rejects if wanted.refusal(one.name) is None]
    samples.notes += members.notes


def _grouped(file: ArchiveFile, members: Members, samples: _Samples) -> dict[str, dict[str, str]]:
    """Return the paths of the visible members as ``paths[key][ending]``: by sample, then by the ending of the name."""
    grouped: dict[str, dict[str, str]] = {}
    for path in (*members.found, *members.replaced):
        if not all(map(is_visible, path.split("/"))):
            samples.ignored["hidden"] += 1
            continue
        key, ending = _split_name(path)
        parts = grouped.setdefault(key, {})
        if ending in parts:
            problem = f"sample {key!r} has two members .{ending}; make the shard again with unique sample keys"
            raise SourceError.at(file.path, problem)
        parts[ending] = path
    return grouped


def _split_name(name: str) -> tuple[str, str]:
    """Return the key of a member's sample, and the ending of its name in lower case, such as "jpg" or "seg.png"."""
    start = name.rfind("/") + 1
    key, _, ending = name[start:].partition(".")
    return name[:start] + key, ending.lower()


def _cells(file: ArchiveFile, path: str, member: Member) -> dict[str, Any]:
    """Return the values in a member of a sample: the text of a ``.cls`` or ``.txt``, or the items of a ``.json``.

    Items of a ``.json`` that are dicts are left out.
    """
    if member.storing != Storing.RAW or member.size > _MAX_TABLE_BYTES:
        raise _unreadable(file, path, "it is not a regular file of at most 1 MiB")
    data, (_, ending) = file.read(member.size, member.offset), _split_name(path)
    try:
        if ending in (_CLASS, _TEXT):
            return {ending: data.decode().strip() if ending == _CLASS else data.decode()}
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _unreadable(file, path, str(error)) from error
    if not isinstance(values, dict):
        raise _unreadable(file, path, "it is not a JSON object")
    return {key: value for key, value in values.items() if not isinstance(value, dict)}


def _unreadable(file: ArchiveFile, name: str, problem: str) -> SourceError:
    return SourceError.at(file.path, f"{name!r} cannot be read ({problem}); make the shard again")
