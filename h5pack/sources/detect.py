"""Opening of a source of any kind. The kind is given or detected."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from h5pack.errors import H5PackError, NoImagesError, OptionsError, SourceError
from h5pack.format import schema
from h5pack.sources.archives import ArchiveFile, Members, members_catalog, open_zip
from h5pack.sources.catalog import Catalog, NameFilter, Note, unused_note
from h5pack.sources.celeba import attributes_of, celeba, is_celeba
from h5pack.sources.coco import coco, is_coco
from h5pack.sources.folders import Listing, arranged, suffix_pattern, walk
from h5pack.sources.hdf5_catalog import HDF5_SUFFIXES, HDF5Datasets, hdf5_catalog, is_hdf5
from h5pack.sources.manifest import JSON_LINES, ManifestColumns, manifest
from h5pack.sources.map_style import MapStyleDataset, map_style_catalog
from h5pack.sources.mds import is_mds, mds
from h5pack.sources.pairs import pairs
from h5pack.sources.shards import TABLE_SUFFIXES, TAR_SUFFIXES, Shards, find_shards, shards_kind
from h5pack.sources.tables import tables
from h5pack.sources.tar_files import open_tar
from h5pack.sources.webdataset import is_webdataset, webdataset
from h5pack.system.files import file_start
from h5pack.system.text import listed

_MANIFEST_SUFFIXES = (".csv", ".tsv", ".tab", *JSON_LINES)
_TABLE_ENDINGS = (*_MANIFEST_SUFFIXES, ".json")
# The library `datasets` of Hugging Face caches transformed data in files with such names, beside the data.
_CACHES = "cache-*.arrow"
_MAX_TABLES = 100
_PARQUET_MAGIC = b"PAR1"
_ZIP_STARTS = (b"PK\3\4", b"PK\5\6")
_TAR_MAGIC, _TAR_MAGIC_OFFSET = b"ustar", 257

# The parameters of `convert` that set attributes of `HDF5Datasets` and `ManifestColumns`, by attribute.
_DATASET_PARAMETERS = {name: name for name in ("images", "labels", "fields", "channel_axis", "value_range")}
COLUMN_PARAMETERS = {
    "root": "root", "path": "path_column", "labels": "label_columns", "split": "split_column",
    "fields": "field_columns", "masks": "mask_columns", "images": "image_columns", "texts": "text_columns",
    **{kind: schema.KINDS[kind].parameter for kind in schema.COORDINATE_KINDS}, "box_format": "box_format",
}  # fmt: skip
_OF_SHARDS = {*COLUMN_PARAMETERS.values()} - {"root", "mask_columns", "image_columns"}
# Parameters that apply to a dataset's samples: keys of the samples, and a format.
_OF_SAMPLES = {"fields", "box_format", *(schema.KINDS[kind].parameter for kind in schema.COORDINATE_KINDS)}
_FOLDER_ADVICE = (
    "check the path, select files of other suffixes with include, or give a dataset in Python that reads them"
)


class _Kind(NamedTuple):
    """The properties of a kind of source."""

    needs: tuple[str, ...] = ()  # what the path may be, in words; () if it may be a pattern, or there is no path
    parameters: Collection[str] = ()  # the parameters in the tables above that apply
    advice: str = "check the path, include and exclude"  # what to do if there are no images


KINDS = {
    **dict.fromkeys(("flat", "classes", "splits", "pairs"), _Kind(("a folder", "an archive"), advice=_FOLDER_ADVICE)),
    "celeba": _Kind(("a folder",), advice=_FOLDER_ADVICE),
    "manifest": _Kind(("a file",), COLUMN_PARAMETERS.values()),
    "coco": _Kind(("a file", "a folder"), {"root"}),
    "hdf5": _Kind(("a file",), _DATASET_PARAMETERS, "check include, exclude and what 'h5pack info' finds in the file"),
    "webdataset": _Kind(parameters=_OF_SHARDS - {"path_column"}),
    "parquet": _Kind(parameters=_OF_SHARDS),
    "mds": _Kind(("a folder",), _OF_SHARDS),
}
_ALL_KINDS = KINDS | {
    "folder": KINDS["flat"],  # a folder or an archive whose kind depends on the names of its files
    "dataset": _Kind((), _OF_SAMPLES, "check its length, include and exclude"),
}


@dataclass(frozen=True)
class SourceOptions:
    """How to read a source. `kind` is one of `KINDS`, or None to detect it."""

    kind: str | None = None
    wanted: NameFilter = field(default_factory=NameFilter)
    columns: ManifestColumns = field(default_factory=ManifestColumns)
    datasets: HDF5Datasets = field(default_factory=HDF5Datasets)
    limit: int | None = None  # maximum number of images, which are evenly spaced in the source; None: all


def open_source(
    source: str | os.PathLike[str] | MapStyleDataset, options: SourceOptions, scratch: Path | None = None
) -> Catalog:
    """Return the catalog of a source. Raise OptionsError if an option does not apply to its kind.

    Raise SourceError if the source is missing, ambiguous or malformed, or has no images. Compressed tar files are
    decompressed into the folder `scratch`, by default the system's temporary folder.
    """
    if isinstance(source, (str, os.PathLike)):
        try:
            catalog = _open_path(Path(source), options, scratch or Path(tempfile.gettempdir()))
        except H5PackError:
            raise
        except OSError as error:
            advice = "make it readable, or repair the storage"
            if error.errno == errno.EMFILE:  # Each compressed tar file needs an open file until the conversion ends.
                advice = "decompress archives first, or raise the limit of 'ulimit -n'"
            problem = f"cannot be read ({error.strerror or error}); {advice}"
            raise SourceError.at(error.filename or source, problem) from error
        where, path = str(Path(source)), source
    else:
        where, path = f"the {type(source).__name__}", None
        if options.kind is not None:
            parameter = f"source_kind={options.kind!r}"
            raise OptionsError(f"{where}: not a path; leave out {parameter}", parameters=(parameter,))
        _refuse_unused(where, "dataset", options)
        keys = replace(options.columns, fields=options.datasets.fields)
        catalog = map_style_catalog(source, keys).filtered(options.wanted)
    if len(catalog) == 0:
        left_out = [f"{count} {kind}" for kind, count in sorted(catalog.ignored.items())]
        for one in catalog.rejects[:1]:
            left_out.append(f"{len(catalog.rejects):,} rejected, such as {one.shown}: {one.reason}")
        skipped = ", ".join(left_out)
        advice = _ALL_KINDS[catalog.kind].advice
        if any(f"{suffix} files" in catalog.ignored for suffix in HDF5_SUFFIXES):
            advice = "give one of the HDF5 files, or a dataset in Python that reads them, such as an H5Dataset"
        what = "samples" if catalog.kind == "dataset" else "images"
        raise NoImagesError(
            f"{where}: no {what}{skipped and f' (skipped: {skipped})'}; {advice}",
            path=path,
            parameters=("include", "exclude"),
        )
    return catalog if options.limit is None else catalog.evenly_spaced(options.limit)


def _open_path(path: Path, options: SourceOptions, scratch: Path) -> Catalog:
    wanted = options.wanted
    kind = options.kind or _detect(path, wanted)
    needs = _ALL_KINDS[kind].needs
    try:
        if needs:
            os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise SourceError.at(path, "no such file or folder; check the path") from None
    if "an archive" in needs and (archive := _archive_format(path)):
        opened = open_zip(path) if archive == "zip" else open_tar(path, scratch)
        if archive == "tar" and kind == "folder" and is_webdataset(opened[1]):
            kind = "webdataset"
        _refuse_unused(str(path), kind, options)
        return _open_archive(path, opened, kind, options)
    if needs and (found := "a folder" if path.is_dir() else "a file") not in needs:
        parameter = f"source_kind={kind!r}"
        raise SourceError.at(path, f"{parameter} needs {' or '.join(needs)}, not {found}; check the path", parameter)
    _refuse_unused(str(path), kind, options)
    match kind:
        case "webdataset" | "parquet":
            return _open_shards(path, kind, options, scratch)
        case "mds":
            return mds(path, wanted, options.columns)
        case "manifest":
            return manifest(path, options.columns, wanted)
        case "coco":
            return coco(path, wanted, options.columns.root)
        case "hdf5":
            return hdf5_catalog(path, options.datasets, wanted)
        case "pairs":
            # `include` selects images only, so it must not be applied to the masks.
            return pairs(walk(str(path), NameFilter(exclude=wanted.exclude)), wanted)
        case "celeba":
            return celeba(path, wanted)
    return _open_folder(path, kind, wanted)


def _open_folder(path: Path, kind: str, wanted: NameFilter) -> Catalog:
    found = walk(str(path), wanted)
    catalog, whole = arranged(found, kind), attributes_of(path)
    notes = catalog.notes
    if whole is not None and catalog.labels is None:
        text = "these are CelebA's images without their attributes; give its main folder, {}, for labels and splits"
        notes += (Note(text.format(whole)),)
    elif catalog.labels is None or notes or schema.NO_LABEL in catalog.labels:
        notes += unused_note("tables", _tables(path, found, wanted), "to pack one, give it as the source")
    return replace(catalog, notes=notes)


def _tables(path: Path, found: Listing, wanted: NameFilter) -> list[str]:
    """Return the relative paths of visible manifests and COCO annotation files in a folder that are not excluded.

    Return none if `include` has patterns. Leave out suffixes that more than 100 files have, because each such file
    probably annotates a single image.
    """
    patterns = tuple(suffix_pattern(end) for end in _TABLE_ENDINGS if 0 < found.ignored[f"{end} files"] <= _MAX_TABLES)
    below = walk(str(path), NameFilter(patterns, wanted.exclude)).below("") if patterns else ()
    return [
        name for name in below if not name.lower().endswith(".json") or b'"images"' in file_start(path / name, 65_536)
    ]


def _refuse_unused(where: str, kind: str, options: SourceOptions) -> None:
    """Raise OptionsError if an option is given that does not apply to this kind of source."""
    used = _ALL_KINDS[kind].parameters
    table = "a manifest" if "label_columns" in used else "a source with columns, such as a manifest"
    for what, values, parameters in (
        ("an HDF5 file", options.datasets, _DATASET_PARAMETERS),
        (table, options.columns, COLUMN_PARAMETERS),
    ):
        changed = [name for name in parameters if getattr(values, name) != getattr(type(values), name)]
        given = [parameters[name] for name in changed if parameters[name] not in used]
        if given:
            path = None if kind == "dataset" else where
            raise OptionsError(f"{where}: not {what}; leave out {listed(given)}", path=path, parameters=given)


def _open_shards(path: Path, kind: str, options: SourceOptions, scratch: Path) -> Catalog:
    wanted = options.wanted
    if kind == "parquet":
        wanted = replace(wanted, exclude=(*wanted.exclude, _CACHES))
    shards = find_shards(path, wanted, TAR_SUFFIXES if kind == "webdataset" else TABLE_SUFFIXES)
    if not shards.names:
        what = "tar" if kind == "webdataset" else "Parquet or Arrow"
        raise NoImagesError.at(path, f"no {what} files; check the path, include and exclude", "include", "exclude")
    if kind == "parquet":
        return tables(shards, options.columns)
    return webdataset(shards, (open_tar(one, scratch) for one in shards.paths), options.columns)


def _open_archive(path: Path, opened: tuple[ArchiveFile, Members], kind: str, options: SourceOptions) -> Catalog:
    if kind == "webdataset":
        return webdataset(Shards(path.parent, [path.name], options.wanted), [opened], options.columns)
    catalog = members_catalog(*opened, options.wanted, kind)
    has_tables = any(f"{suffix} files" in catalog.ignored for suffix in _TABLE_ENDINGS)
    if has_tables and catalog.labels is None and catalog.kind != "pairs":
        note = Note("tables and JSON files in an archive are not read; unpack it, and give such a file as the source")
        catalog = replace(catalog, notes=(*catalog.notes, note))
    return catalog


def _archive_format(path: Path) -> str:
    """Return "tar" or "zip", judged by the name of a file, or else by its first bytes; "" if it is neither."""
    name, start = path.name.lower(), file_start(path, _TAR_MAGIC_OFFSET + len(_TAR_MAGIC))
    if path.is_file() and name.endswith((".zip", *TAR_SUFFIXES)):
        return "zip" if name.endswith(".zip") else "tar"
    return "zip" if start.startswith(_ZIP_STARTS) else "tar" if start.endswith(_TAR_MAGIC) else ""


def _detect(path: Path, wanted: NameFilter) -> str:
    """Return one of `KINDS`, or "folder". The kind of a "folder" or archive depends on the names of its files."""
    if os.path.isdir(path):
        if not os.access(path, os.R_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        named = (("celeba", is_celeba), ("coco", is_coco), ("mds", is_mds))
        return next((kind for kind, check in named if check(path)), "") or shards_kind(path, wanted) or "folder"
    if not os.path.exists(path):
        return (shards_kind(path, wanted) if "{" in str(path) else "") or "folder"
    if path.is_file():
        suffix = path.suffix.lower()
        if suffix in _MANIFEST_SUFFIXES:
            return "manifest"
        if suffix == ".json":
            return "coco"
        if suffix in TABLE_SUFFIXES or file_start(path, 4) == _PARQUET_MAGIC:
            return "parquet"
        if is_hdf5(path):
            return "hdf5"
        if _archive_format(path):
            return "folder"
    problem = (
        "neither a folder, nor a manifest (.csv, .tsv, .jsonl), COCO (.json), an archive (.tar, .zip), a "
        "Parquet file or an HDF5 file; give one of these, or a dataset in Python that reads it"
    )
    raise SourceError.at(path, problem)
