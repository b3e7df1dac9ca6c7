"""The manifest of an export: a CSV table with the split, labels and fields of each row, in stored order.

Lists, such as boxes, are written as JSON into one cell. ``h5pack convert DIR/manifest.csv`` with the options that
`Manifest.command` returns restores splits, labels, label columns, fields and row order.
"""

from __future__ import annotations

import csv
import json
import math
import shlex
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from h5pack.exporter.image_files import SourceRows
from h5pack.exporter.names import CONTROL_CHARACTERS, MANIFEST, ExportNames, distinct_name, has_splits
from h5pack.format import schema
from h5pack.format.fields import FieldValues, RaggedRows, field_kind
from h5pack.pack.options import ConvertOptions
from h5pack.pack.plan import order_rows
from h5pack.read.encoded import EncodedIndex
from h5pack.sources.catalog import Catalog, NameTable
from h5pack.sources.folders import split_order
from h5pack.sources.manifest import LABEL_COLUMNS, is_number
from h5pack.system.text import counted

_BLOCK_ROWS = 4_096
_MAX_FIELD_NUMBERS = 1_024
_ESCAPES = {code: chr(code).encode("unicode_escape").decode() for code in CONTROL_CHARACTERS}


@dataclass(frozen=True)
class ManifestColumn:
    """A column of the manifest. If `words` is given, `values` are indices into `words`; -1 stands for an empty cell."""

    name: str
    values: npt.NDArray[Any] | NameTable | RaggedRows  # (n,), one value per row
    words: tuple[str, ...] | None = None
    option: str | None = None  # the option of `h5pack convert` that must name this column; None if there is none

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
        # Return Python numbers, because parsing their str() gives exactly the same values.
        return cells.tolist()  # type: ignore[no-any-return]


_LABELS = "--label-columns"
_OPTIONS = {
    schema.ARRAY: "--field-columns",
    schema.RAGGED: "--field-columns",
    schema.BOXES: "--box-columns",
    schema.KEYPOINTS: "--keypoint-columns",
    schema.TEXT: "--text-columns",
    schema.TEXTS: "--text-columns",
    schema.MASK: "--mask-columns",
    schema.IMAGE: "--image-columns",
}
"""The options that read columns of fields, by the kind of the field."""


@dataclass(frozen=True)
class Manifest:
    """The contents of a manifest, not yet written to a file."""

    paths: NameTable  # (n,), the image file of each row
    columns: tuple[ManifestColumn, ...]  # the further columns
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
            has_texts = any(column.option == "--text-columns" for column in self.columns)
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
            for option in (_LABELS, *dict.fromkeys(_OPTIONS.values())):
                named = [column.name for column in self.columns if column.option == option]
                words += [option, ",".join(named)] if named else []
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
    name = partial(_column_name, {"path", "split"})
    lost: list[str] = []
    columns = [ManifestColumn("split", catalog.split_ids, catalog.split_names), *_labels(catalog, name, lost)]
    for field, values in sorted(catalog.fields.items()):
        columns += _field(field, values, catalog.labels is None, name, lost)
    for one, files in zip(catalog.pixel_fields, names.masks, strict=True):
        columns.append(ManifestColumn(name(one.name), files, option=_OPTIONS[one.kind]))
        if columns[-1].name != one.name:
            lost.append(f"the name of the field {one.name!r}, which becomes {columns[-1].name!r}")
    columns.append(ManifestColumn(name("row"), source.rows))
    if source.has_names:
        columns.append(ManifestColumn(name("source"), catalog.names))
    lost += _lost_splits(catalog)
    return Manifest(names.paths, tuple(columns), tuple(lost))


def _folder_kind(catalog: Catalog, names: ExportNames) -> str | None:
    """Return the `--source` with which convert restores all but the row order from the folders; None if it cannot."""
    classes = list(catalog.label_names or ())
    if catalog.fields or not names.exact_folders or [*_lost_splits(catalog)] or classes != sorted(classes):
        return None
    return "splits" if has_splits(catalog) else "classes"


def _folder_order(catalog: Catalog, paths: NameTable) -> str | None:
    """Return the `--order` with which convert restores the order of rows from the folders; None if it cannot."""
    # In a source of classes, the folder of a class is the first part of its paths.
    tops = catalog.split_ids if has_splits(catalog) or catalog.labels is None else catalog.labels
    keys = [(*above, *path.rpartition("/")) for *above, path in zip(catalog.split_ids, tops, paths, strict=True)]
    ranks = np.argsort(sorted(range(len(keys)), key=keys.__getitem__))
    split_ids, num_splits = np.sort(catalog.split_ids), len(catalog.split_names)
    for order, seed in (("sorted", None), ("shuffled", ConvertOptions.seed)):
        made = order_rows(np.arange(len(keys)), split_ids, num_splits, seed)
        if np.array_equal(made.origins, ranks):
            return order
    return None


def _column_name(used: set[str], wanted: str) -> str:
    """Return a distinct name without white space around it, and without commas, which separate names in options."""
    return distinct_name(one_line(wanted).strip().replace(",", ";") or "column", used)


def _labels(catalog: Catalog, name: Callable[[str], str], lost: list[str]) -> list[ManifestColumn]:
    """Return the columns of labels; append to `lost` what `h5pack convert` would not restore.

    If class names cannot serve as labels in a table, labels are numbers, and a further column has the class names.
    """
    labels, names = catalog.labels, catalog.label_names
    if labels is None:
        return []
    if labels.ndim == 2:
        assert names is not None
        option = _LABELS if len(names) > 1 else None
        columns = [
            ManifestColumn(name(column), labels[:, number], option=option) for number, column in enumerate(names)
        ]
        changed = [(column, made.name) for column, made in zip(names, columns, strict=True) if column != made.name]
        if changed:
            lost.append("the names of label columns ({!r} becomes {!r})".format(*changed[0]))
        return columns
    if names is None:
        return [ManifestColumn(name("label"), labels)]
    unreadable = next((word for word in names if not _is_word(word)), None)
    if unreadable is not None:
        # `h5pack convert` rejects a label column that mixes numbers and words, and reads a column of only numbers as
        # integers, so class names that look like numbers cannot be labels.
        lost.append(f"the names of classes (convert cannot read back the name {unreadable!r}, so labels are numbers)")
        return [ManifestColumn(name("label"), labels), ManifestColumn(name("class"), labels, names)]
    used = {names[label] for label in np.unique(labels).tolist() if label != schema.NO_LABEL}
    unused = [word for word in names if word not in used]
    if unused:
        lost.append(f"{counted(len(unused), 'class')} without rows, such as {unused[0]!r}")
    if [word for word in names if word in used] != sorted(used):
        lost.append("the order of classes and their numbers, because convert sorts classes by name")
    return [ManifestColumn(name("label"), labels, names)]


def _field(
    field: str, values: FieldValues, unlabelled: bool, name: Callable[[str], str], lost: list[str]
) -> Iterator[ManifestColumn]:
    if isinstance(values, RaggedRows):
        mean = len(values.data) * math.prod(values.data.shape[1:]) // max(1, len(values))
        if mean > _MAX_FIELD_NUMBERS and values.kind not in schema.TEXT_KINDS:
            lost.append(f"the field {field!r}, which has on average {mean:,} numbers per row and is not in the table")
            return
        plain = values.data.dtype in (np.int64, np.float64) or values.kind != schema.RAGGED
        if not plain:
            lost.append(f"the dtype of the field {field!r}, which is {values.data.dtype}")
        if values.classes is not None:
            lost.append(f"the names of the classes of the field {field!r}")
        yield _column_of(field, values, unlabelled, name, lost)
        return
    count = math.prod(values.shape[1:])
    if count > _MAX_FIELD_NUMBERS:
        lost.append(f"the field {field!r}, which has {count:,} numbers per row and is not in the table")
        return
    if values.ndim > 1:
        flat = values.reshape(len(values), count)
        lost.append(f"the shape of the field {field!r}: each of its numbers becomes a column")
        for number in range(count):
            yield ManifestColumn(name(f"{field}.{number}"), flat[:, number], option=_OPTIONS[schema.ARRAY])
        return
    yield _column_of(field, values, unlabelled, name, lost)


def _column_of(
    field: str, values: FieldValues, unlabelled: bool, name: Callable[[str], str], lost: list[str]
) -> ManifestColumn:
    """Return the column of a field; append to `lost` if the column cannot have the field's name."""
    # In a table without labels, `h5pack convert` would take a column for labels if its name is in LABEL_COLUMNS.
    column = name(f"field_{field}" if unlabelled and field.lower() in LABEL_COLUMNS else field)
    if column != field:
        lost.append(f"the name of the field {field!r}, which becomes {column!r}")
    return ManifestColumn(column, values, option=_OPTIONS[field_kind(values)])


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
