"""Opening of a source of any kind. The kind of a path is either given or detected."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from h5pack.errors import NoImagesError, OptionsError, SourceError
from h5pack.sources import folders
from h5pack.sources.catalog import Catalog, NameFilter
from h5pack.sources.celeba import celeba, is_celeba
from h5pack.sources.folders import child_folders, walk
from h5pack.sources.hdf5_catalog import HDF5Datasets, hdf5_catalog, is_hdf5
from h5pack.sources.manifest import ManifestColumns, manifest
from h5pack.sources.map_style import MapStyleDataset, map_style_catalog
from h5pack.system.text import listed

KINDS = ("flat", "classes", "splits", "celeba", "manifest", "hdf5")
_MANIFEST_SUFFIXES = (".csv", ".tsv", ".tab")


@dataclass(frozen=True)
class SourceOptions:
    """How to read a source. `kind` is one of `KINDS`, or None to detect it."""

    kind: str | None = None
    names: NameFilter = field(default_factory=NameFilter)
    columns: ManifestColumns = field(default_factory=ManifestColumns)
    datasets: HDF5Datasets = field(default_factory=HDF5Datasets)
    limit: int | None = None  # maximum number of images, chosen evenly spaced; None for all


def open_source(source: str | os.PathLike[str] | MapStyleDataset, options: SourceOptions) -> Catalog:
    """Return the catalog of a source; raise SourceError if it is missing, ambiguous or malformed, or has no images."""
    if isinstance(source, (str, os.PathLike)):
        catalog = _open_path(Path(source), options)
        where, path = str(Path(source)), source
    else:
        catalog = _open_dataset(source, options)
        where, path = f"the {type(source).__name__}", None
    if len(catalog) == 0:
        skipped = ", ".join(f"{count} {kind}" for kind, count in sorted(catalog.ignored.items()))
        advice = {
            "hdf5": "check include and exclude, and what the file holds ('h5pack info')",
            "dataset": "check its length, include and exclude",
        }.get(catalog.kind, "check the path, or select files of other suffixes with include")
        what = "samples" if catalog.kind == "dataset" else "images"
        raise NoImagesError(
            f"{where}: no {what}{skipped and f' (skipped: {skipped})'}; {advice}",
            path=path,
            parameters=("include", "exclude"),
        )
    return catalog if options.limit is None else catalog.limited(options.limit)


def _open_path(path: Path, options: SourceOptions) -> Catalog:
    if not os.path.exists(path):
        raise SourceError(f"{path}: no such file or folder; check the path", path=path)
    kind = options.kind or _detect(path)
    if path.is_dir() == (kind in ("manifest", "hdf5")):
        parameter = f"source_kind={kind!r}"
        needed = "file, not a folder" if path.is_dir() else "folder, not a file"
        raise SourceError(f"{path}: {parameter} needs a {needed}; check the path", path=path, parameters=(parameter,))
    _refuse_unused(str(path), kind, options)
    if kind == "manifest":
        return manifest(path, options.columns, options.names)
    if kind == "hdf5":
        return hdf5_catalog(path, options.datasets, options.names)
    return celeba(path, options.names) if kind == "celeba" else _open_folder(path, kind, options.names)


def _open_dataset(dataset: MapStyleDataset, options: SourceOptions) -> Catalog:
    where = f"the {type(dataset).__name__}"
    if options.kind is not None:
        parameter = f"source_kind={options.kind!r}"
        raise OptionsError(f"{where}: {parameter} needs a path; leave it out", parameters=(parameter,))
    _refuse_unused(where, "dataset", options)
    return map_style_catalog(dataset).filtered(options.names)


def _refuse_unused(where: str, kind: str, options: SourceOptions) -> None:
    """Raise OptionsError if options are given that the kind of source does not have."""
    columns = ("root", "path_column", "label_columns", "split_column", "field_columns")
    datasets = ("images", "labels", "fields", "channel_axis", "value_range")
    for what, unused, names in (
        ("an HDF5 file", kind != "hdf5" and options.datasets != HDF5Datasets(), datasets),
        ("a manifest", kind != "manifest" and options.columns != ManifestColumns(), columns),
    ):
        if unused:
            path = None if kind == "dataset" else where
            raise OptionsError(f"{where}: not {what}; leave out {listed(names)}", path=path, parameters=names)


def _open_folder(path: Path, kind: str, names: NameFilter) -> Catalog:
    """Return the catalog of a folder; `kind` is "flat", "splits", "classes", or "folder" to infer it."""
    root = str(path)
    found = walk(root, names)
    if kind == "flat":
        return folders.flat(root, found)
    children = child_folders(root)
    filled = [folder for folder in children if any(found.below(folder))]
    if kind == "folder" and not filled:
        return folders.flat(root, found)
    named = [folder for folder in filled if folders.is_split_name(folder)]
    if kind == "splits" or (kind == "folder" and len(named) == len(filled)):
        for split in named if kind == "folder" else ():
            folders.refuse_pairs(root, found, [f"{split}/{name}" for name in child_folders(os.path.join(root, split))])
        return folders.splits(root, found, children)
    if kind == "folder" and named:
        other = next(folder for folder in filled if folder not in named)
        raise SourceError(
            f"{path}: {named[0]!r} looks like a split and {other!r} like a class; give source_kind='splits' or "
            "source_kind='classes', or leave one out with exclude",
            path=path,
            parameters=("source_kind='splits'", "source_kind='classes'", "exclude"),
        )
    if kind == "folder":
        folders.refuse_pairs(root, found, filled)
    return folders.classes(root, found, children)


def _detect(path: Path) -> str:
    """Return the kind of source at the path, or "folder" for a folder whose kind follows from the names below it."""
    if path.is_dir():
        return "celeba" if is_celeba(path) else "folder"
    if path.is_file() and path.suffix.lower() in _MANIFEST_SUFFIXES:
        return "manifest"
    if path.is_file() and is_hdf5(path):
        return "hdf5"
    raise SourceError(
        f"{path}: neither a folder, nor a manifest (.csv, .tsv), nor an HDF5 file; give one of these", path=path
    )
