"""CelebA as it is distributed: img_align_celeba, its attribute table, partition and identities."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from h5pack.errors import SourceError
from h5pack.sources.catalog import Catalog, FileReader, NameTable, Reject, one_split
from h5pack.sources.tables import Table, binary_table, integers, read_delimited, read_spaced
from h5pack.sources.walk import NameFilter, walk

_IMAGES = "img_align_celeba"
# As the university's archives unpack (Img, Anno, Eval), as Kaggle's does, and everything side by side.
_IMAGE_FOLDERS = (f"{_IMAGES}/{_IMAGES}", _IMAGES, f"Img/{_IMAGES}/{_IMAGES}", f"Img/{_IMAGES}")
_TABLE_FOLDERS = ("", "Anno", "Eval", "anno", "eval")
_PARTITIONS = ("train", "val", "test")


def is_celeba(root: Path) -> bool:
    """Whether the folder holds CelebA's images and its attribute table."""
    return _image_folder(root) is not None and _table_path(root, "list_attr_celeba") is not None


def celeba(root: Path, wanted: NameFilter) -> Catalog:
    """Read CelebA's tables: uint8 labels (N, 40), splits where a partition is there, identities as a field.

    An image without a row in one of the tables, and a row without its image, become rejects: a row of the pack
    always has its true label.

    Raises
    ------
    SourceError
        If the images or the attribute table are missing, or a table cannot be read.
    """
    folder = _image_folder(root)
    attributes_path = _table_path(root, "list_attr_celeba")
    if folder is None or attributes_path is None:
        raise SourceError(
            f"{root}: not CelebA as distributed; it needs {_IMAGES}/ and list_attr_celeba.txt or .csv in one folder"
        )
    attributes = _read(attributes_path, None, skip=1)
    tables = {"attributes": attributes}
    for role, stem, column in (
        ("partition", "list_eval_partition", "partition"),
        ("identity", "identity_CelebA", "identity"),
    ):
        path = _table_path(root, stem)
        if path is not None:
            tables[role] = _read(path, ("image_id", column))

    for table in tables.values():
        if len(table.header) < 2:
            raise SourceError(f"{table.path}: no column beside the file names; fetch the file again")

    found = walk(str(root), wanted, folder)
    images = [name[len(folder) + 1 :] for name in found.below("")]
    names, rows, rejects = _join(root / folder, images, list(tables.values()))
    row_of = dict(zip(tables, rows, strict=True))
    split_names, split_ids = one_split(len(names))
    if "partition" in tables:
        split_names, split_ids = _PARTITIONS, _partition(tables["partition"])[row_of["partition"]]
    fields: dict[str, npt.NDArray[np.int64]] = {}
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
        rejects=tuple(Reject(f"{folder}/{name}", reason) for name, reason in rejects),
        ignored=dict(found.ignored),
    )


def _image_folder(root: Path) -> str | None:
    return next((folder for folder in _IMAGE_FOLDERS if (root / folder).is_dir()), None)


def _table_path(root: Path, stem: str) -> Path | None:
    paths = (root / folder / f"{stem}{suffix}" for folder in _TABLE_FOLDERS for suffix in (".txt", ".csv"))
    return next((path for path in paths if path.is_file()), None)


def _read(path: Path, header: tuple[str, ...] | None, skip: int = 0) -> Table:
    """CelebA's tables are delimited by spaces, Kaggle's copies by commas under a header."""
    return read_delimited(path) if path.suffix == ".csv" else read_spaced(path, header, skip)


def _join(
    folder: Path, images: list[str], tables: list[Table]
) -> tuple[list[str], list[npt.NDArray[np.int64]], list[tuple[str, str]]]:
    """Names with a row in every table, their rows in each, and (name, reason) for all others."""
    indexes = [{row[0]: number for number, row in enumerate(table.rows)} for table in tables]
    for table, index in zip(tables, indexes, strict=True):
        if len(index) < len(table.rows):
            number = next(number for number, row in enumerate(table.rows) if index[row[0]] != number)
            raise SourceError(f"{table.place(number)}: {table.rows[number][0]!r} has another row; fetch the file again")
    rejects = []
    names = []
    for name in images:
        lacking = [table.path.name for table, index in zip(tables, indexes, strict=True) if name not in index]
        if lacking:
            rejects.append((name, f"no row in {lacking[0]}"))
        else:
            names.append(name)
    present = set(images)
    for name in indexes[0]:
        # A file that --include or --exclude left out is there, and its row is no fault.
        if name not in present and not (folder / name).exists():
            rejects.append((name, f"named in {tables[0].path.name}, but there is no such file"))
    rows = [np.array([index[name] for name in names], np.int64) for index in indexes]
    return names, rows, rejects


def _column(table: Table) -> npt.NDArray[np.int64]:
    cells = table.column(table.header[1])
    values = integers(cells)
    if values is None:
        row = next(row for row, cell in enumerate(cells) if integers([cell]) is None)
        raise SourceError(f"{table.place(row)}: {cells[row]!r} is no integer; fetch the file again")
    return values


def _partition(table: Table) -> npt.NDArray[np.int32]:
    values = _column(table)
    odd = np.flatnonzero((values < 0) | (values > 2))
    if len(odd):
        raise SourceError(
            f"{table.place(odd[0])}: partition {values[odd[0]]}; partitions are 0 (train), 1 (val) and 2 (test); "
            "fetch the file again"
        )
    return values.astype(np.int32)
