"""What the folder of an export contains: image files, and the manifest, a table with one line for each exported row.

docs/cli.md describes both. The path of an image file begins with the folders of its split and class. Then comes the
name stored for the row or, without stored names, the row number. If that path would be invalid or the path of another
file, the name is changed. Its suffix is one of the export format:

- A suffix of the format stays: in an export to JPEG, ``a.jpeg`` stays ``a.jpeg``.
- The suffix of another image format is replaced by the first suffix of the export format: ``a.bmp`` becomes ``a.png``.
- Otherwise the first suffix of the format is appended: ``a.b`` becomes ``a.b.png``.

If there are masks or further images, the rows' images are in the folder ``images``. Each field of masks or further
images has a folder with the field's name beside ``images``. The files of a row have the same path in all these folders,
except for the suffix: for example, ``images/train/a.jpg`` and ``masks/train/a.png``.

``h5pack convert DIR/manifest.csv``, with the options that `Manifest.command` returns, restores splits, labels, label
columns, fields and row order, except for what `Manifest.lost` lists.
"""

from __future__ import annotations

import csv
import itertools
import json
import shlex
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.exporter.image_files import SourceRows
from h5pack.format import schema
from h5pack.format.fields import FieldValues, RaggedRows, field_data, field_kind
from h5pack.pack.options import ConvertOptions
from h5pack.pack.row_order import order_rows
from h5pack.read.encoded import EncodedIndex
from h5pack.sources.catalog import IMAGE_SUFFIXES, NO_SPLITS, Catalog, NameTable
from h5pack.sources.folders import split_order
from h5pack.sources.manifest import LABEL_COLUMNS
from h5pack.sources.text_tables import is_number
from h5pack.system.text import counted

MANIFEST = "manifest.csv"
"""Name of the CSV table written into the folder of an export."""
UNLABELED = "_no_label"
"""Name of the class folder of rows without a label, if classes have names."""
IMAGES = "images"
"""Name of the folder of the rows' images, if there are masks or further images."""

_MAX_NUMBERED_CLASSES = 1_000
_MAX_PATH_BYTES = 2_048
_MAX_FOLDER_BYTES = 200
# Names are at least this many bytes shorter than the maximum. So a number, such as ~2, fits in front of the suffix.
_SPARE_BYTES = 12
_NUMBER_DIGITS = 6
CONTROL_CHARACTERS = (*range(32), *range(127, 160))
_PRINTABLE = dict.fromkeys(CONTROL_CHARACTERS, "_")
_BLOCK_ROWS = 4_096
_MAX_FIELD_NUMBERS = 1_024
_ESCAPES = {code: chr(code).encode("unicode_escape").decode() for code in CONTROL_CHARACTERS}


@dataclass(frozen=True)
class NameRules:
    """The constraints that the image format and the file system place on names."""

    suffixes: tuple[str, ...]  # suffixes of the image format, in lower case; a name without any of them gets the first
    fold_case: bool = False  # whether the file system ignores case in names
    max_name_bytes: int = 255  # maximum length of a file or folder name

    def fold(self, name: str) -> str:
        """Return a string that is the same for two names if the file system may treat them as the same name."""
        if not self.fold_case:
            return name
        return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


@dataclass(frozen=True)
class ExportNames:
    """The paths of an export's files and folders, relative to the folder of the export."""

    paths: NameTable  # (n,), the distinct path of each row's file
    folders: tuple[str, ...]  # parents before their subfolders; also folders of classes without rows
    renamed: int  # number of stored names that had to change by more than their suffix and leading folders
    # Whether each split and each class has a folder with exactly its name, each row has a label, and there are no masks
    # or further images.
    exact_folders: bool = False
    # For each field of masks or further images: the path of each row's file, (n,). Masks are PNG files.
    masks: tuple[NameTable, ...] = ()


def name_files(source: SourceRows, rules: NameRules) -> ExportNames:
    """Return the path of every row's file, and the folders to create."""
    catalog = source.catalog
    split_names = catalog.split_names if has_splits(catalog) else ()
    split_folders = _folder_names(split_names, rules)
    class_folders, bare_splits, exact = _class_folders(catalog, rules)
    mask_folders = _folder_names((one.name for one in catalog.pixel_fields), rules, IMAGES)
    top = [IMAGES] if mask_folders else []
    digits = max(_NUMBER_DIGITS, len(str(int(source.rows.max(initial=0)))))
    paths: list[str] = []
    renamed = np.zeros(len(source), np.bool_)
    for index, name in enumerate(catalog.names):
        split = int(catalog.split_ids[index])
        front = top + split_folders[split : split + 1]
        if class_folders and split not in bare_splits:
            assert catalog.labels is not None
            front.append(class_folders[int(catalog.labels[index])])
        path, renamed[index] = _stored_path(name, front, rules) if source.has_names else ("", False)
        if not path:
            path = "/".join((*front, f"{int(source.rows[index]):0{digits}d}{rules.suffixes[0]}"))
            renamed[index] = source.has_names
        paths.append(path)
    suffixes = [".png" if one.kind == schema.MASK else rules.suffixes[0] for one in catalog.pixel_fields]

    def files_of(path: str) -> list[str]:
        stem = path[len(IMAGES) + 1 :].rpartition(".")[0]
        beside = zip(mask_folders, suffixes, strict=True)
        return [path, *(f"{folder}/{stem}{suffix}" for folder, suffix in beside)]

    lowest = {file.rpartition("/")[0] for path in paths for file in files_of(path)}
    parents = [name for split, name in enumerate(split_folders) if split not in bare_splits]
    if class_folders and (parents or not split_folders):
        # Classes without rows get their folders in the first split that has class folders.
        assert catalog.labels is not None
        empty = class_folders.keys() - {schema.NO_LABEL, *np.unique(catalog.labels).tolist()}
        lowest |= {"/".join((*top, *parents[:1], class_folders[label])) for label in empty}
    folders = {str(above) for path in map(PurePosixPath, lowest) for above in (path, *path.parents)} - {"."}
    renamed[[*_make_distinct(paths, files_of, folders, rules.fold)]] = source.has_names
    masks = [NameTable.of(files_of(path)[number] for path in paths) for number in range(1, 1 + len(suffixes))]
    exact = exact and split_folders == [*split_names] and not top
    return ExportNames(NameTable.of(paths), tuple(sorted(folders)), int(renamed.sum()), exact, tuple(masks))


def _stored_path(name: str, front: list[str], rules: NameRules) -> tuple[str, bool]:
    """Return the path of a file with a stored name in the folder `front`, and whether the name had to change.

    The path is "" if it would be too long, or if nothing of the name is left.
    """
    parts = [_visible(part) for part in name.translate(_PRINTABLE).split("/") if part not in ("", ".", "..")]
    is_renamed = "/".join(parts) != name
    for folder in front:
        if len(parts) > 1 and parts[0] == folder:
            del parts[0]
    path = "/".join((*front, *parts[:-1], _with_suffix(parts[-1], rules.suffixes))) if parts else ""
    encoded = path.encode("utf-8", "surrogatepass")
    is_long = max(map(len, encoded.split(b"/"))) > rules.max_name_bytes - _SPARE_BYTES
    return "" if is_long or len(encoded) > _MAX_PATH_BYTES else path, is_renamed


def _make_distinct(
    paths: list[str], files_of: Callable[[str], list[str]], folders: Iterable[str], fold: Callable[[str], str]
) -> Iterator[int]:
    """Change `paths` in place, so that no file has the path of an earlier file or of a folder; yield changed indices.

    ``files_of(path)`` returns the paths of a row's files: its image, which is `path`, its masks and further images.
    """
    used = set(map(fold, folders))
    unchanged = {fold(file) for path in paths for file in files_of(path)}
    # The next number to try for each path, because thousands of files may have the same path.
    numbers: defaultdict[str, Iterator[int]] = defaultdict(partial(itertools.count, 2))
    for index, path in enumerate(paths):
        files = set(map(fold, files_of(path)))
        if files & used:
            stem, dot, suffix = path.rpartition(".")
            number = numbers[path]
            while files & used or files & unchanged:
                path = f"{stem}~{next(number)}{dot}{suffix}"
                files = set(map(fold, files_of(path)))
            paths[index] = path
            yield index
        used |= files


def has_splits(catalog: Catalog) -> bool:
    """Return whether the source was divided into splits."""
    return catalog.split_names != NO_SPLITS


def _class_folders(catalog: Catalog, rules: NameRules) -> tuple[dict[int, str], set[int], bool]:
    """Return the class folder of each label, the splits without class folders, and whether the folders are exact.

    There are no class folders if there are no labels, if the labels are a table, or if there are over 1,000 classes
    without names. The folders are exact if classes have names, every row has a label, and each folder has exactly the
    name of its class.
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
    folders = _folder_names(names, rules, UNLABELED)
    labeled = labels != schema.NO_LABEL
    exact = bool(labeled.all()) and folders == [*names]
    # A split in which no row has a label gets no class folders, like a split without labels in a source.
    splits = set(range(len(catalog.split_names))) if has_splits(catalog) else set()
    bare_splits = splits - set(catalog.split_ids[labeled].tolist())
    return {**dict(enumerate(folders)), schema.NO_LABEL: UNLABELED}, bare_splits, exact


def _folder_names(names: Iterable[str], rules: NameRules, *reserved: str) -> list[str]:
    """Return a distinct and valid folder name for each name. None of the results is one of the names in `reserved`."""
    used = set(map(rules.fold, reserved))
    found = []
    for name in names:
        plain = _visible(name.translate(_PRINTABLE).replace("/", "_") or "_")
        plain = plain.encode()[: min(_MAX_FOLDER_BYTES, rules.max_name_bytes - _SPARE_BYTES)].decode("utf-8", "ignore")
        found.append(distinct_name(plain, used, rules.fold))
    return found


def distinct_name(name: str, used: set[str], fold: Callable[[str], str] = str) -> str:
    """Return `name`, with ``~2``, ``~3``, ... at its end if `used` already has it, and add the result to `used`.

    The names in `used` are folded by `fold`.
    """
    found, number = name, 2
    while fold(found) in used:
        found, number = f"{name}~{number}", number + 1
    used.add(fold(found))
    return found


def _visible(part: str) -> str:
    """Return a path component, with ``_`` in front if `h5pack convert` would ignore it or if it is the manifest's name.

    `h5pack convert` ignores files and folders whose names begin with a dot, and the folder ``__MACOSX``.
    """
    return f"_{part}" if part.startswith(".") or part.casefold() in ("__macosx", MANIFEST) else part


def _with_suffix(name: str, suffixes: tuple[str, ...]) -> str:
    stem, dot, ending = name.rpartition(".")
    suffix = f".{ending.lower()}"
    if not stem or not dot or suffix not in IMAGE_SUFFIXES:
        return name + suffixes[0]
    return name if suffix in suffixes else stem + suffixes[0]


@dataclass(frozen=True)
class ManifestColumn:
    """A column of the manifest. If `words` is given, `values` are indices into `words`; -1 stands for an empty cell."""

    name: str
    values: npt.NDArray[Any] | NameTable | RaggedRows  # (n,), one value per row
    words: tuple[str, ...] | None = None
    parameter: str | None = None  # the parameter of `h5pack.convert` that must name this column; None if there is none

    def cells(self, start: int, stop: int) -> list[Any]:
        """Return the cells of rows `start` to `stop` - 1: str, int or float."""
        if isinstance(self.values, NameTable):
            return list(map(one_line, self.values.at(range(start, stop))))
        if isinstance(self.values, RaggedRows):
            values = self.values[np.arange(start, stop)]
            if values.kind == schema.TEXT:
                return values.values()
            lists = values.values() if values.kind == schema.TEXTS else [row.tolist() for row in values.values()]
            return [json.dumps(row, ensure_ascii=False) for row in lists]
        cells = self.values[start:stop]
        if self.words is not None:
            named = (*map(one_line, self.words), "")
            return [named[value] for value in cells.tolist()]
        if cells.dtype.kind == "b":
            cells = cells.view(np.uint8)
        # Return Python's numbers, because parsing the str() of such a number gives exactly the same value.
        return cells.tolist()  # type: ignore[no-any-return]


_LABELS = "label_columns"


@dataclass(frozen=True)
class Manifest:
    """The contents of a manifest, not yet written to a file."""

    paths: NameTable  # (n,), the image file of each row
    columns: tuple[ManifestColumn, ...]  # the columns after `path`
    lost: tuple[str, ...]  # what `h5pack convert` would not restore from the manifest

    def lines(self, left_out: Collection[int]) -> Iterator[list[str]]:
        """Yield the cells of the header line, then of each row that is not in `left_out` (the rows without a file)."""
        yield ["path", *(column.name for column in self.columns)]
        for start in range(0, len(self.paths), _BLOCK_ROWS):
            stop = min(start + _BLOCK_ROWS, len(self.paths))
            # Put "./" in front of a path that begins with white space, because readers strip white space there.
            paths = (f"./{path}" if path[:1].isspace() else path for path in self.paths.at(range(start, stop)))
            cells = zip(paths, *(column.cells(start, stop) for column in self.columns), strict=True)
            for row, line in enumerate(cells, start):
                if row not in left_out:
                    yield list(map(str, line))

    def write(self, path: Path, left_out: Collection[int]) -> None:
        """Write the manifest without the rows in `left_out`, which have no file."""
        with path.open("w", newline="", encoding="utf-8") as stream:
            # Texts may contain carriage returns, which older versions of Python do not quote by themselves.
            has_texts = any(column.parameter == "text_columns" for column in self.columns)
            quoting: Any = csv.QUOTE_ALL if has_texts else csv.QUOTE_MINIMAL
            csv.writer(stream, lineterminator="\n", quoting=quoting).writerows(self.lines(left_out))

    def equals(self, path: Path, left_out: Collection[int]) -> bool:
        """Return whether the file at `path` already has the contents that `write` would give it."""
        try:
            with path.open(newline="", encoding="utf-8") as stream:
                return all(found == line for found, line in zip(csv.reader(stream), self.lines(left_out), strict=True))
        except (OSError, ValueError, csv.Error):
            return False

    def command(self, folder: Path, source: SourceRows, names: ExportNames) -> tuple[str, tuple[str, ...]]:
        """Return the command that packs the export in `folder` again, and texts that say what it would not restore.

        The command reads the manifest. If that would lose something that the names of the folders preserve, such as
        classes without rows, the command reads the folders instead.
        """
        kind, lost = _folder_kind(source.catalog, names) if self.lost else None, self.lost
        if kind is not None:
            words = ["h5pack", "convert", str(folder), "again.h5", "--source", kind]
            order = _folder_order(source.catalog, self.paths)
            words += ["--order", order] if order == "sorted" else []
            lost = ("the order of rows",) if order is None else ()
        else:
            words = ["h5pack", "convert", str(folder / MANIFEST), "again.h5", "--order", "sorted"]
            for parameter in (_LABELS, *dict.fromkeys(kind.parameter for kind in schema.KINDS.values())):
                named = [column.name for column in self.columns if column.parameter == parameter]
                words += [f"--{parameter.replace('_', '-')}", ",".join(named)] if named else []
            if (np.diff(source.catalog.split_ids) < 0).any():
                lost = (*lost, "the order of rows, because convert stores the rows of each split together")
        form = source.reader.form
        if form is not None and form.channels(source.reader.index.row_shape) in (1, 2):
            words += ["--mode", "gray"]
        if source.reader.pack.layout == "nchw":
            words += ["--layout", "nchw"]
        if isinstance(source.reader.index, EncodedIndex):
            words += ["--keep", "jpeg"]
        return shlex.join(words), lost


def plan_manifest(source: SourceRows, names: ExportNames) -> Manifest:
    """Return the manifest of the rows of `source`, whose files have these `names`."""
    catalog = source.catalog
    name = partial(_column_name, {"path", "split"}, catalog.labels is None)
    lost: list[str] = []
    columns = [ManifestColumn("split", catalog.split_ids, catalog.split_names), *_labels(catalog, name, lost)]
    for field, values in sorted(catalog.fields.items()):
        columns += _field(field, values, name, lost)
    for one, files in zip(catalog.pixel_fields, names.masks, strict=True):
        columns.append(_column(one.name, files, one.kind, name, lost))
    columns.append(ManifestColumn(name("row"), source.rows))
    if source.has_names:
        columns.append(ManifestColumn(name("source"), catalog.names))
    lost += _lost_splits(catalog)
    return Manifest(names.paths, tuple(columns), tuple(lost))


def _folder_kind(catalog: Catalog, names: ExportNames) -> str | None:
    """Return the value of `--source` with which `h5pack convert` restores the exported rows from the folders.

    The order of the rows may differ. Return None if the folders do not suffice to restore everything else.
    """
    classes = list(catalog.label_names or ())
    if catalog.fields or not names.exact_folders or [*_lost_splits(catalog)] or classes != sorted(classes):
        return None
    return "splits" if has_splits(catalog) else "classes"


def _folder_order(catalog: Catalog, paths: NameTable) -> str | None:
    """Return the value of `--order` with which `h5pack convert` restores the order of rows from the folders.

    Return None if no value of `--order` restores it.
    """
    # `h5pack convert` sorts images by split, folder and name. Without splits, it sorts them by class, folder and name.
    # With splits, the second key below repeats the first, which has no effect.
    tops = catalog.split_ids if has_splits(catalog) or catalog.labels is None else catalog.labels
    keys = [(*above, *path.rpartition("/")) for *above, path in zip(catalog.split_ids, tops, paths, strict=True)]
    ranks = np.argsort(sorted(range(len(keys)), key=keys.__getitem__))
    split_ids, num_splits = np.sort(catalog.split_ids), len(catalog.split_names)
    for order, seed in (("sorted", None), ("shuffled", ConvertOptions.seed)):
        made = order_rows(np.arange(len(keys)), split_ids, num_splits, seed)
        if np.array_equal(made.origins, ranks):
            return order
    return None


def is_header(cells: Sequence[str]) -> bool:
    """Return whether `cells` are the column names of a manifest that an export wrote, rather than of a user's table."""
    return [*cells[:2]] == ["path", "split"] and any(cell.startswith("row") for cell in cells[-2:])


def _column_name(used: set[str], unlabeled: bool, wanted: str) -> str:
    """Return a distinct name for a column, without commas, control characters or surrounding white space.

    Commas would separate the name into several names in the value of an option.
    """
    name = one_line(wanted).strip().replace(",", ";") or "column"
    # If the table has no labels, `h5pack convert` would read a column with a name in LABEL_COLUMNS as labels.
    return distinct_name(f"field_{name}" if unlabeled and name.lower() in LABEL_COLUMNS else name, used)


def _labels(catalog: Catalog, name: Callable[[str], str], lost: list[str]) -> list[ManifestColumn]:
    """Return the columns of labels; append to `lost` what `h5pack convert` would not restore.

    If class names cannot serve as labels in a table, labels are numbers, and a further column has the class names.
    """
    labels, names = catalog.labels, catalog.label_names
    if labels is None:
        return []
    if labels.ndim == 2:
        assert names is not None
        parameter = _LABELS if len(names) > 1 else None
        columns = [ManifestColumn(name(one), labels[:, number], None, parameter) for number, one in enumerate(names)]
        changed = [(column, made.name) for column, made in zip(names, columns, strict=True) if column != made.name]
        if changed:
            lost.append("the names of label columns ({!r} becomes {!r})".format(*changed[0]))
        return columns
    repeats = Counter(names or ())
    unreadable = next((word for word in names or () if repeats[word] > 1 or not _is_word(word)), None)
    if (names is None or unreadable is not None) and {*np.unique(labels)} == {schema.NO_LABEL, 1}:
        lost.append("which rows have no label (-1), because convert reads labels of only -1 and 1 as 0 and 1")
    if names is None:
        return [ManifestColumn(name("label"), labels)]
    if unreadable is not None:
        # `h5pack convert` reads a label column of only integers as integers, and rejects any other column with a number
        # in it. So class names that look like numbers cannot be labels. A name that several classes share cannot be a
        # label, either, because `h5pack convert` would make one class of them.
        lost.append(f"the names of classes (convert cannot read back the name {unreadable!r}, so labels are numbers)")
        return [ManifestColumn(name("label"), labels), ManifestColumn(name("class"), labels, names)]
    used = {names[label] for label in np.unique(labels).tolist() if label != schema.NO_LABEL}
    unused = [word for word in names if word not in used]
    if unused:
        lost.append(f"{counted(len(unused), 'class')} without rows, such as {unused[0]!r}")
    if [word for word in names if word in used] != sorted(used):
        lost.append("the order of classes and their numbers, because convert sorts classes by name")
    return [ManifestColumn(name("label"), labels, names)]


def _field(field: str, values: FieldValues, name: Callable[[str], str], lost: list[str]) -> Iterator[ManifestColumn]:
    data, kind = field_data(values), field_kind(values)
    count = data.size // max(1, len(values))
    if count > _MAX_FIELD_NUMBERS and kind not in schema.TEXT_KINDS:
        mean = f"{'' if kind == schema.ARRAY else 'on average '}{count:,}"
        lost.append(f"the field {field!r}, which has {mean} numbers per row and is not in the table")
        return
    # `h5pack convert` reads integers as int64. It reads a column of single integers as uint64 if one is too large for
    # int64.
    is_large = data is values and data.dtype == np.uint64 and int(data.max(initial=0)) >= 2**63
    if kind in (schema.ARRAY, schema.RAGGED) and not is_large and data.dtype not in (np.int64, np.float64):
        lost.append(f"the dtype of the field {field!r}, which is {data.dtype}")
    if isinstance(values, RaggedRows) and values.classes is not None:
        lost.append(f"the names of the classes of the field {field!r}")
    if kind != schema.ARRAY or data.ndim == 1:
        yield _column(field, values, kind, name, lost)
        return
    lost.append(f"the shape of the field {field!r}: each of its numbers becomes a column")
    for number, column in enumerate(data.reshape(len(data), count).T):
        yield ManifestColumn(name(f"{field}.{number}"), column, parameter=schema.KINDS[kind].parameter)


def _column(field: str, values: Any, kind: str, name: Callable[[str], str], lost: list[str]) -> ManifestColumn:
    """Return the column of a field; append to `lost` if the column cannot have the field's name."""
    column = name(field)
    if column != field:
        lost.append(f"the name of the field {field!r}, which becomes {column!r}")
    return ManifestColumn(column, values, parameter=schema.KINDS[kind].parameter)


def _lost_splits(catalog: Catalog) -> Iterator[str]:
    counts = np.bincount(catalog.split_ids, minlength=len(catalog.split_names))
    empty = [name for name, count in zip(catalog.split_names, counts.tolist(), strict=True) if not count]
    if empty:
        yield f"{counted(len(empty), 'split')} without rows, such as {empty[0]!r}"
    filled = [name for name in catalog.split_names if name not in empty]
    if any(name != (one_line(name).strip() or "all") for name in filled):
        yield "the names of splits (a table cannot hold an empty name, line breaks or surrounding spaces)"
    elif list(split_order(filled)) != filled:
        yield "the order of splits"


def _is_word(name: str) -> bool:
    """Return whether `h5pack convert` reads a cell with this name as text and does not change it."""
    return bool(name) and name == one_line(name).strip() and not is_number(name)


def one_line(name: str) -> str:
    """Return a name with its control characters escaped, because a bare carriage return would end a CSV line."""
    return name.translate(_ESCAPES)
