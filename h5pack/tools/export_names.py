"""What each exported row's file is called: its stored name below its split and class, safe, and like no other's.

The rule, row by row:

- The folder of its split comes first, then that of its class; where the stored name has them in front, they are not
  repeated. A file without splits has no split folders.
- Of the stored name, ``.`` and ``..`` and a leading ``/`` are left out, and control characters become ``_``. A part
  that begins with a dot, which readers of folders pass over, gets ``_`` in front.
- An ending that means an image becomes that of the format; any other is kept, and the format's comes behind it.
- Without a stored name, or with one that is too long for the file system, the row's number is the name.
- What would be called like another row's file or folder gets ``~2``, ``~3``, ... before its ending; the row that comes
  first keeps the name.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from h5pack import schema
from h5pack.sources.catalog import Catalog, NameTable, one_split
from h5pack.sources.walk import IMAGE_SUFFIXES

MANIFEST = "manifest.csv"
"""The table beside the images."""
UNLABELLED = "_no_label"
"""The folder of rows without a label, where others have one."""

_MOST_NUMBERED_CLASSES = 1_000
_MOST_PATH_BYTES = 2_048
_MOST_FOLDER_BYTES = 200
# A number may come before the ending.
_SPARE_BYTES = 12
_NUMBER_DIGITS = 6


@dataclass(frozen=True)
class NameRules:
    """What the format and the file system ask of names.

    Attributes
    ----------
    suffixes : tuple of str
        Endings of the format, in lower case; the first is given to names that have none of them.
    fold : bool
        Whether the file system takes names that differ in case alone for the same.
    name_bytes : int
        The longest name that it takes.
    """

    suffixes: tuple[str, ...]
    fold: bool = False
    name_bytes: int = 255


@dataclass(frozen=True)
class ExportNames:
    """Where every row goes.

    Attributes
    ----------
    paths : NameTable
        (n,), relative to the export's folder, distinct.
    folders : tuple of str
        The folders of all paths, and those of classes without rows; parents first.
    renamed : int
        Stored names that had to change in more than their ending and their folders in front.
    """

    paths: NameTable
    folders: tuple[str, ...]
    renamed: int


def name_files(catalog: Catalog, rows: npt.NDArray[np.int64], stored: bool, rules: NameRules) -> ExportNames:
    """Name the files of a catalog's rows.

    Parameters
    ----------
    catalog : Catalog
    rows : ndarray
        int64, (n,): the rows' numbers in their file.
    stored : bool
        Whether the catalog's names are the file's own, rather than made of the row numbers.
    rules : NameRules
    """
    split_folders, class_folders = _split_folders(catalog, rules), _ClassFolders(catalog, rules)
    digits = max(_NUMBER_DIGITS, len(str(int(rows.max(initial=0)))))
    renamed = 0

    def candidates() -> Iterator[str]:
        nonlocal renamed
        for number, name in enumerate(catalog.names):
            split = int(catalog.split_ids[number])
            front = [*split_folders[split : split + 1], *class_folders.of(number, split)]
            parts = _safe_parts(name) if stored else []
            plain = "/".join(parts) == name
            for folder in front:
                if len(parts) > 1 and parts[0] == folder:
                    del parts[0]
            path = "/".join((*front, *parts[:-1], _with_suffix(parts[-1], rules.suffixes))) if parts else ""
            if not path or _too_long(path, rules):
                path = "/".join((*front, f"{int(rows[number]):0{digits}d}{rules.suffixes[0]}"))
                plain = False
            renamed += stored and not plain
            yield path

    paths = NameTable.of(candidates())
    folders = _folders_of(paths)
    changes = _distinct(paths, folders, rules)
    if changes:
        paths = NameTable.of(changes.get(number, path) for number, path in enumerate(paths))
    folders |= set(class_folders.unused(split_folders, catalog))
    return ExportNames(paths, tuple(sorted(folders)), renamed + (len(changes) if stored else 0))


def has_own_names(catalog: Catalog, images: str, rows: npt.NDArray[np.int64]) -> bool:
    """Whether the names of an HDF5 file's catalog were stored, rather than made of `images` and the row numbers."""
    return any(name != f"{images}/{row:08d}" for name, row in zip(catalog.names, rows.tolist(), strict=True))


def has_splits(catalog: Catalog) -> bool:
    """Whether the source was divided into splits."""
    return catalog.split_names != one_split(0)[0]


def name_hashes(names: Iterable[str], count: int) -> npt.NDArray[np.uint64]:
    """A hash of each of `count` names, uint64 (count,), by which they are compared in little memory."""
    return np.fromiter(map(_hash, names), np.uint64, count)


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def _split_folders(catalog: Catalog, rules: NameRules) -> list[str]:
    """A folder for each split; none without splits."""
    return _folder_names(catalog.split_names, rules) if has_splits(catalog) else []


class _ClassFolders:
    """Which folder the rows of a class lie in."""

    def __init__(self, catalog: Catalog, rules: NameRules) -> None:
        self._labels = labels = catalog.labels if catalog.labels is not None and catalog.labels.ndim == 1 else None
        self._named = catalog.label_names is not None
        self._folders: dict[int, str] = {}
        self._bare: set[int] = set()
        if labels is None:
            return
        if catalog.label_names is not None:
            self._folders = dict(enumerate(_folder_names(catalog.label_names, rules, UNLABELLED)))
            self._folders[schema.NO_LABEL] = UNLABELLED
            if has_splits(catalog):
                # A split none of whose rows has a label holds them without class folders, as it would in a source.
                labelled = set(catalog.split_ids[labels != schema.NO_LABEL].tolist())
                self._bare = set(range(len(catalog.split_names))) - labelled
            return
        values = np.unique(labels)
        if len(values) <= _MOST_NUMBERED_CLASSES:
            width = max((len(str(value)) for value in values.tolist()), default=1)
            self._folders = {value: f"{value:0{width}d}" for value in values.tolist()}

    def of(self, number: int, split: int) -> tuple[str, ...]:
        """The folder of a row of a split, as a tuple; empty where it has none."""
        if self._labels is None or split in self._bare or not self._folders:
            return ()
        return (self._folders[int(self._labels[number])],)

    def unused(self, split_folders: Sequence[str], catalog: Catalog) -> Iterator[str]:
        """Folders of named classes without rows, beside those of the others."""
        if self._labels is None or not self._named:
            return
        used = set(np.unique(self._labels).tolist())
        homes = [name for split, name in enumerate(split_folders) if split not in self._bare]
        if split_folders and not homes:
            return
        for label, folder in self._folders.items():
            if label not in used and label != schema.NO_LABEL:
                yield from homes[:1]
                yield "/".join((*homes[:1], folder))


def _folder_names(names: Iterable[str], rules: NameRules, *taken: str) -> list[str]:
    """A distinct folder name for each of some names."""
    fold = _key(rules)
    seen = {fold(name) for name in taken}
    found = []
    for name in names:
        plain = _visible(_plain(name).replace("/", "_") or "_")
        plain = plain.encode()[: min(_MOST_FOLDER_BYTES, rules.name_bytes - _SPARE_BYTES)].decode("utf-8", "ignore")
        folder, number = plain, 2
        while fold(folder) in seen:
            folder, number = f"{plain}~{number}", number + 1
        seen.add(fold(folder))
        found.append(folder)
    return found


def _visible(part: str) -> str:
    """A part of a path that readers of folders do not pass over, and that is not the manifest's."""
    return f"_{part}" if part.startswith(".") or part.casefold() in ("__macosx", MANIFEST) else part


def _safe_parts(name: str) -> list[str]:
    return [_visible(part) for part in _plain(name).split("/") if part not in ("", ".", "..")]


def _plain(name: str) -> str:
    if name.isprintable():
        return name
    return "".join("_" if unicodedata.category(sign) == "Cc" else sign for sign in name)


def _with_suffix(name: str, suffixes: tuple[str, ...]) -> str:
    stem, dot, ending = name.rpartition(".")
    suffix = f".{ending.lower()}"
    if not stem or not dot or suffix not in IMAGE_SUFFIXES:
        return name + suffixes[0]
    return name if suffix in suffixes else stem + suffixes[0]


def _too_long(path: str, rules: NameRules) -> bool:
    encoded = path.encode("utf-8", "surrogatepass")
    most = rules.name_bytes - _SPARE_BYTES
    return len(encoded) > most and (len(encoded) > _MOST_PATH_BYTES or max(map(len, encoded.split(b"/"))) > most)


def _folders_of(paths: NameTable) -> set[str]:
    """All folders that files lie in, and those above."""
    folders: set[str] = set()
    for path in paths:
        folder = path.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    return folders


def _key(rules: NameRules) -> Callable[[str], str]:
    """What of a name the file system looks at."""
    if not rules.fold:
        return str
    return lambda name: unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


def _distinct(paths: NameTable, folders: set[str], rules: NameRules) -> dict[int, str]:
    """New paths for rows whose own is an earlier row's, or a folder's.

    Names are compared by hashes of 64 bits, eight bytes a row: equal names have equal hashes, and two others that agree
    by chance only cost one of them a number.
    """
    fold = _key(rules)

    def hashed(path: str) -> int:
        return int.from_bytes(
            hashlib.blake2b(fold(path).encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big"
        )

    hashes = np.fromiter((hashed(path) for path in paths), np.uint64, len(paths))
    of_folders = {hashed(folder) for folder in folders}
    order = np.argsort(hashes, kind="stable")
    ascending = hashes[order]
    again = np.zeros(len(paths), np.bool_)
    again[order[1:]] = ascending[1:] == ascending[:-1]
    again |= np.isin(hashes, np.array(sorted(of_folders), np.uint64))
    taken: set[int] = set()
    numbers: dict[int, int] = {}

    def is_free(value: int) -> bool:
        place = int(np.searchsorted(ascending, np.uint64(value)))
        held = place < len(ascending) and int(ascending[place]) == value
        return not held and value not in taken and value not in of_folders

    changes: dict[int, str] = {}
    for row in np.flatnonzero(again).tolist():
        stem, dot, suffix = paths[row].rpartition(".")
        number = numbers.get(int(hashes[row]), 2)
        while not is_free(hashed(path := f"{stem}~{number}{dot}{suffix}")):
            number += 1
        numbers[int(hashes[row])] = number + 1
        taken.add(hashed(path))
        changes[row] = path
    return changes
