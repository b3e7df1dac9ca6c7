"""CelebA as a source, as it is distributed: a folder of images, and tables of attributes, splits and identities."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from h5pack.errors import SourceError
from h5pack.format.fields import FieldValues
from h5pack.sources.catalog import Catalog, NameFilter, NameTable, Reject, one_split
from h5pack.sources.folders import walk
from h5pack.sources.reader import FileReader
from h5pack.sources.text_tables import TextTable, binary_table, integers, read_delimited, rectangular, text_lines

_IMAGES = "img_align_celeba"
# Possible folders of images and of tables: as in Kaggle's archive, in the university's archives, or side by side.
_IMAGE_FOLDERS = (f"{_IMAGES}/{_IMAGES}", _IMAGES, f"Img/{_IMAGES}/{_IMAGES}", f"Img/{_IMAGES}")
_TABLE_FOLDERS = ("", "Anno", "Eval", "anno", "eval")
_PARTITIONS = ("train", "val", "test")
_AGAIN = "download the file again"


def is_celeba(root: Path) -> bool:
    """Return whether the folder contains CelebA's images and attribute table."""
    return _image_folder(root) is not None and _table_path(root, "list_attr_celeba") is not None


def attributes_of(images: Path) -> Path | None:
    """Return CelebA's main folder, which contains the tables, if `images` is its folder of images; else None."""
    resolved = images.resolve()
    is_named = _IMAGES in (images.name, resolved.name)
    return next((one for one in resolved.parents[:3] if is_celeba(one)), None) if is_named else None


def celeba(root: Path, wanted: NameFilter) -> Catalog:
    """Return the catalog of CelebA: uint8 labels (M, 40), and splits and identities (a field) if their tables exist."""
    folder = _image_folder(root)
    attributes_path = _table_path(root, "list_attr_celeba")
    if folder is None or attributes_path is None:
        problem = f"not CelebA as distributed; give the folder with {_IMAGES}/ and list_attr_celeba.txt (or .csv)"
        raise SourceError.at(root, problem)
    attributes = _read(attributes_path, None, skip=1)
    tables = {"attributes": attributes}
    for role, stem in (("partition", "list_eval_partition"), ("identity", "identity_CelebA")):
        path = _table_path(root, stem)
        if path is not None:
            tables[role] = _read(path, ("image_id", role))
    for table in tables.values():
        if len(table.header) < 2:
            raise SourceError.at(table.path, f"the table has no column after the file names; {_AGAIN}")

    found = walk(str(root), wanted, folder)
    images = [name[len(folder) + 1 :] for name in found.below("")]
    names, rows, missing = _join(root / folder, images, list(tables.values()))
    rejects = (Reject(f"{folder}/{name}", reason) for name, reason in missing)
    row_of = dict(zip(tables, rows, strict=True))
    split_names, split_ids = one_split(len(names))
    if "partition" in tables:
        split_names, split_ids = _PARTITIONS, _partition(tables["partition"])[row_of["partition"]]
    fields: dict[str, FieldValues] = {}
    if "identity" in tables:
        fields["identity"] = _column(tables["identity"])[row_of["identity"]]
    columns = attributes.header[1:]
    return Catalog(
        "celeba",
        FileReader(str(root)),
        NameTable.of(f"{folder}/{name}" for name in names),
        split_names,
        split_ids,
        labels=binary_table(attributes, columns)[row_of["attributes"]],
        label_names=columns,
        fields=fields,
        rejects=tuple(reject for reject in rejects if wanted.allows(reject.name)),
        ignored=dict(found.ignored),
    )


def _image_folder(root: Path) -> str | None:
    return next((folder for folder in _IMAGE_FOLDERS if (root / folder).is_dir()), None)


def _table_path(root: Path, stem: str) -> Path | None:
    paths = (root / folder / f"{stem}{suffix}" for folder in _TABLE_FOLDERS for suffix in (".txt", ".csv"))
    return next((path for path in paths if path.is_file()), None)


def _join(
    folder: Path, images: list[str], tables: list[TextTable]
) -> tuple[list[str], list[npt.NDArray[np.int64]], list[tuple[str, str]]]:
    """Return the images that have a row in every table, their row numbers in each table, and rejects (name, reason)."""
    keys = [table.column(table.header[0]) for table in tables]
    indexes = [{key: number for number, key in enumerate(some)} for some in keys]
    for table, some, index in zip(tables, keys, indexes, strict=True):
        if len(index) < len(some):
            number = next(number for number, key in enumerate(some) if index[key] != number)
            raise table.error(number, f"{some[number]!r} occurs in two rows; {_AGAIN}")
    names, rejects = [], []
    for name in images:
        missing = [table.path.name for table, index in zip(tables, indexes, strict=True) if name not in index]
        if missing:
            rejects.append((name, f"no row in {missing[0]}"))
        else:
            names.append(name)
    present = set(images)
    for name in indexes[0]:
        # If the image exists, the name filter skipped it, so its row is no error.
        if name not in present and not (folder / name).exists():
            rejects.append((name, f"named in {tables[0].path.name}, but there is no such file"))
    rows = [np.array([index[name] for name in names], np.int64) for index in indexes]
    return names, rows, rejects


def _column(table: TextTable) -> npt.NDArray[np.int64]:
    cells = table.column(table.header[1])
    values = integers(cells)
    if values is None:
        row = next(row for row, cell in enumerate(cells) if integers([cell]) is None)
        raise table.error(row, f"{cells[row]!r} is not an integer; {_AGAIN}")
    return values


def _partition(table: TextTable) -> npt.NDArray[np.int32]:
    values = _column(table)
    odd = np.flatnonzero((values < 0) | (values > 2))
    if len(odd):
        problem = f"partition {values[odd[0]]} does not exist; the partitions are 0 (train), 1 (val) and 2 (test)"
        raise table.error(odd[0], f"{problem}; {_AGAIN}")
    return values.astype(np.int32)


def _read(path: Path, header: tuple[str, ...] | None, skip: int = 0) -> TextTable:
    """Read a table: a CSV file with a header, as in Kaggle's copy, or a text file whose cells are separated by spaces.

    In a text file, the first `skip` lines are ignored. `header` names the columns. If it is None, the line after the
    ignored ones names all columns but the first.
    """
    if path.suffix == ".csv":
        return read_delimited(path)
    lines = [(number, line.split()) for number, line in enumerate(text_lines(path), 1)]
    if header is None:
        if len(lines) <= skip:
            raise SourceError.at(path, "has no line that names the columns; download it again")
        header, skip = ("image_id", *lines[skip][1]), skip + 1
    return rectangular(path, header, lines[skip:])
