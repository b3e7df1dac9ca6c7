"""Names of exported files: each row's stored name, made safe and distinct, in the folders of its split and class.

- A path starts with the folder of the split, then the folder of the class. If the stored name already begins with these
  folders, they are not repeated. A file without splits has no split folders.
- ``.``, ``..`` and a leading ``/`` are removed from the stored name, and control characters become ``_``. A path
  component that begins with a dot gets ``_`` in front, because readers of image folders skip hidden files.
- A suffix of the export format is kept. A suffix of another image format is replaced by the export format's first
  suffix, which is also appended to all other names.
- If a row has no stored name, or the name is too long for the file system, its file is named after the row number.
- If there are masks or further images, all images are in the folder ``images``. Beside it, each field of masks or
  further images has a folder with the field's name. A file has the same path there as the row's image has in
  ``images``, except for the suffix.
- A name gets ``~2``, ``~3``, ... before its suffix if an earlier row or a folder already has that name, for its image
  or for a file beside it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from h5pack.exporter.image_files import SourceRows
from h5pack.format import schema
from h5pack.sources.catalog import IMAGE_SUFFIXES, Catalog, NameTable, one_split

MANIFEST = "manifest.csv"
"""Name of the CSV table written into the folder of an export."""
UNLABELLED = "_no_label"
"""Class folder of the rows without a label, if classes have names."""

_IMAGES = "images"
_MAX_NUMBERED_CLASSES = 1_000
_MAX_PATH_BYTES = 2_048
_MAX_FOLDER_BYTES = 200
# Bytes that are kept free for a number, such as ~2, that may be inserted before the suffix.
_SPARE_BYTES = 12
_NUMBER_DIGITS = 6
CONTROL_CHARACTERS = (*range(32), *range(127, 160))
_PRINTABLE = dict.fromkeys(CONTROL_CHARACTERS, "_")


@dataclass(frozen=True)
class NameRules:
    """The constraints that the image format and the file system place on names."""

    suffixes: tuple[str, ...]  # suffixes of the image format, in lower case; other names get the first one
    fold_case: bool = False  # whether the file system ignores case in names
    max_name_bytes: int = 255  # maximum length of a file or folder name

    def fold(self, name: str) -> str:
        """Return a string that is the same for two names exactly if the file system treats them as the same name."""
        if not self.fold_case:
            return name
        return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


@dataclass(frozen=True)
class ExportNames:
    """The paths of an export's files and folders, relative to the folder of the export."""

    paths: NameTable  # (n,), the distinct path of each row's file
    folders: tuple[str, ...]  # parents before their subfolders; also folders of classes without rows
    renamed: int  # number of stored names that had to change by more than their suffix and leading folders
    exact_folders: bool = False  # whether each split and class has a folder with exactly its name
    # For each field of masks or further images: the path of each row's file, (n,). Masks are PNG files.
    masks: tuple[NameTable, ...] = ()


def name_files(source: SourceRows, rules: NameRules) -> ExportNames:
    """Return the path of every row's file, and the folders to create."""
    catalog = source.catalog
    split_names = catalog.split_names if has_splits(catalog) else ()
    split_folders = _folder_names(split_names, rules)
    class_folders, bare_splits, exact = _class_folders(catalog, rules)
    mask_folders = _folder_names((one.name for one in catalog.pixel_fields), rules, _IMAGES)
    top = [_IMAGES] if mask_folders else []
    digits = max(_NUMBER_DIGITS, len(str(int(source.rows.max(initial=0)))))
    paths: list[str] = []
    renamed = np.zeros(len(source), np.bool_)
    for index, name in enumerate(catalog.names):
        split = int(catalog.split_ids[index])
        front = top + split_folders[split : split + 1]
        if class_folders and split not in bare_splits:
            assert catalog.labels is not None
            front.append(class_folders[int(catalog.labels[index])])
        parts = []
        if source.has_names:
            parts = [_visible(part) for part in name.translate(_PRINTABLE).split("/") if part not in ("", ".", "..")]
        renamed[index] = source.has_names and "/".join(parts) != name
        for folder in front:
            if len(parts) > 1 and parts[0] == folder:
                del parts[0]
        path = "/".join((*front, *parts[:-1], _with_suffix(parts[-1], rules.suffixes))) if parts else ""
        if not path or _too_long(path, rules):
            path = "/".join((*front, f"{int(source.rows[index]):0{digits}d}{rules.suffixes[0]}"))
            renamed[index] = source.has_names
        paths.append(path)
    suffixes = [".png" if one.kind == schema.MASK else rules.suffixes[0] for one in catalog.pixel_fields]

    def files_of(path: str) -> list[str]:
        stem = path[len(_IMAGES) + 1 :].rpartition(".")[0]
        beside = zip(mask_folders, suffixes, strict=True)
        return [path, *(f"{folder}/{stem}{suffix}" for folder, suffix in beside)]

    folders = {folder for path in paths for file in files_of(path) for folder in _parents(file)}
    for index in _make_distinct(paths, files_of, folders, rules.fold):
        renamed[index] = source.has_names
    masks = [NameTable.of(files_of(path)[number] for path in paths) for number in range(1, 1 + len(suffixes))]
    parents = [name for split, name in enumerate(split_folders) if split not in bare_splits]
    if class_folders and (parents or not split_folders):
        # Classes without rows get their folders in the first split that has class folders.
        assert catalog.labels is not None
        used = {schema.NO_LABEL, *np.unique(catalog.labels).tolist()}
        for label, folder in class_folders.items():
            if label not in used:
                above = "/".join((*top, *parents[:1]))
                folders.update(filter(None, (*top, above, f"{above}/{folder}" if above else folder)))
    exact = exact and split_folders == [*split_names]
    return ExportNames(NameTable.of(paths), tuple(sorted(folders)), int(renamed.sum()), exact and not top, tuple(masks))


def _make_distinct(
    paths: list[str], files_of: Callable[[str], list[str]], folders: Iterable[str], fold: Callable[[str], str]
) -> Iterator[int]:
    """Rename, in place, the paths of which a file equals an earlier file or a folder, and yield their indices.

    ``files_of(path)`` returns the paths of a row's files: that of the image, which is `path`, and those beside it.
    """
    used = set(map(fold, folders))
    unchanged = {fold(file) for path in paths for file in files_of(path)}
    for index, path in enumerate(paths):
        files = set(map(fold, files_of(path)))
        if files & used:
            stem, dot, suffix = path.rpartition(".")
            number = 2
            while files & used or files & unchanged:
                path, number = f"{stem}~{number}{dot}{suffix}", number + 1
                files = set(map(fold, files_of(path)))
            paths[index] = path
            yield index
        used |= files


def has_splits(catalog: Catalog) -> bool:
    """Return whether the source was divided into splits."""
    return catalog.split_names != one_split(0)[0]


def _class_folders(catalog: Catalog, rules: NameRules) -> tuple[dict[int, str], set[int], bool]:
    """Return the class folder of each label, the splits without class folders, and whether the folders are exact.

    There are no class folders for files without labels, for label tables, and for over 1,000 classes without names. The
    folders are exact if classes have names, every row has a label, and each folder has exactly the name of its class.
    """
    labels, names = catalog.labels, catalog.label_names
    if labels is None or labels.ndim > 1:
        return {}, set(), False
    if names is None:
        values = np.unique(labels).tolist()
        if len(values) > _MAX_NUMBERED_CLASSES:
            return {}, set(), False
        width = max((len(str(value)) for value in values), default=1)
        return {value: f"{value:0{width}d}" for value in values}, set(), False
    folders = _folder_names(names, rules, UNLABELLED)
    labelled = labels != schema.NO_LABEL
    exact = bool(labelled.all()) and folders == [*names]
    # A split in which no row has a label gets no class folders, like an unlabelled split in a source.
    splits = set(range(len(catalog.split_names))) if has_splits(catalog) else set()
    bare_splits = splits - set(catalog.split_ids[labelled].tolist())
    return {**dict(enumerate(folders)), schema.NO_LABEL: UNLABELLED}, bare_splits, exact


def _folder_names(names: Iterable[str], rules: NameRules, *reserved: str) -> list[str]:
    """Return a distinct, safe folder name for each name, different from those in `reserved`."""
    used = set(map(rules.fold, reserved))
    found = []
    for name in names:
        plain = _visible(name.translate(_PRINTABLE).replace("/", "_") or "_")
        plain = plain.encode()[: min(_MAX_FOLDER_BYTES, rules.max_name_bytes - _SPARE_BYTES)].decode("utf-8", "ignore")
        found.append(distinct_name(plain, used, rules.fold))
    return found


def distinct_name(name: str, used: set[str], fold: Callable[[str], str] = str) -> str:
    """Return `name`, with ``~2``, ``~3``, ... at its end if `used` already has it, and add the result to `used`."""
    found, number = name, 2
    while fold(found) in used:
        found, number = f"{name}~{number}", number + 1
    used.add(fold(found))
    return found


def _visible(part: str) -> str:
    """Return a path component with ``_`` in front if it is hidden, ignored by readers, or named like the manifest."""
    return f"_{part}" if part.startswith(".") or part.casefold() in ("__macosx", MANIFEST) else part


def _with_suffix(name: str, suffixes: tuple[str, ...]) -> str:
    stem, dot, ending = name.rpartition(".")
    suffix = f".{ending.lower()}"
    if not stem or not dot or suffix not in IMAGE_SUFFIXES:
        return name + suffixes[0]
    return name if suffix in suffixes else stem + suffixes[0]


def _too_long(path: str, rules: NameRules) -> bool:
    encoded = path.encode("utf-8", "surrogatepass")
    max_bytes = rules.max_name_bytes - _SPARE_BYTES
    return len(encoded) > _MAX_PATH_BYTES or max(map(len, encoded.split(b"/"))) > max_bytes


def _parents(path: str) -> Iterator[str]:
    """Yield all parent folders of a relative path, innermost first."""
    folder = path.rpartition("/")[0]
    while folder:
        yield folder
        folder = folder.rpartition("/")[0]
