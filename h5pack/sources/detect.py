"""What kind of source a path is: found by looking, or forced."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from h5pack.errors import NoImagesError, OptionsError, SourceError
from h5pack.sources import folders
from h5pack.sources.catalog import Catalog
from h5pack.sources.celeba import celeba, is_celeba
from h5pack.sources.hdf5_catalog import HDF5Datasets, hdf5_catalog, is_hdf5
from h5pack.sources.manifest import ManifestColumns, manifest
from h5pack.sources.mapped import MapStyle, mapped
from h5pack.sources.walk import NameFilter, child_folders, walk

KINDS = ("flat", "classes", "splits", "celeba", "manifest", "hdf5")
_MANIFEST_SUFFIXES = (".csv", ".tsv", ".tab")


@dataclass(frozen=True)
class SourceOptions:
    """How to read a source.

    Attributes
    ----------
    kind : str, optional
        One of `KINDS`; None: look.
    names : NameFilter
    columns : ManifestColumns
    datasets : HDF5Datasets
    limit : int, optional
        Take at most this many images, evenly spaced in source order.
    """

    kind: str | None = None
    names: NameFilter = field(default_factory=NameFilter)
    columns: ManifestColumns = field(default_factory=ManifestColumns)
    datasets: HDF5Datasets = field(default_factory=HDF5Datasets)
    limit: int | None = None


def open_source(source: str | os.PathLike[str] | MapStyle, options: SourceOptions) -> Catalog:
    """List the images of a source.

    Parameters
    ----------
    source : path or map-style dataset
    options : SourceOptions

    Raises
    ------
    SourceError
        If the source is missing, ambiguous or malformed.
    NoImagesError
        If there is nothing in it that could be an image.
    """
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        catalog = _open_path(path, options)
        where = str(path)
    else:
        catalog = mapped(source)
        where = f"the {type(source).__name__}"
    if len(catalog) == 0:
        passed = ", ".join(f"{count} {kind}" for kind, count in sorted(catalog.ignored.items()))
        raise NoImagesError(
            f"{where}: no images"
            + (f" (passed over: {passed})" if passed else "")
            + (
                "; look at --include and --exclude, and at what the file holds ('h5pack info')"
                if catalog.kind == "hdf5"
                else "; check the path, or name other endings with --include"
            )
        )
    return catalog if options.limit is None else catalog.limited(options.limit)


def _open_path(path: Path, options: SourceOptions) -> Catalog:
    if not os.path.exists(path):
        raise SourceError(f"{path}: no such file or folder; check the path")
    kind = options.kind or _look(path)
    if kind != "hdf5" and options.datasets != HDF5Datasets():
        raise OptionsError(
            f"{path}: --images, --labels, --fields, --channel-axis and --value-range are for HDF5 files, and this is "
            "none; leave them out"
        )
    if kind == "manifest":
        if not path.is_file():
            raise SourceError(f"{path}: a manifest is a CSV or TSV file; give the file, not its folder")
        return manifest(path, options.columns, options.names)
    if options.columns != ManifestColumns():
        raise OptionsError(f"{path}: columns and --root are a manifest's, and this is none; leave them out")
    if kind == "hdf5":
        if path.is_dir():
            raise SourceError(f"{path}: a folder; --source hdf5 needs a file")
        return hdf5_catalog(path, options.datasets, options.names)
    if not path.is_dir():
        raise SourceError(f"{path}: not a folder; --source {kind} needs one")
    if kind == "celeba":
        return celeba(path, options.names)
    root = str(path)
    found = walk(root, options.names)
    if kind == "flat":
        return folders.flat(root, found)
    if kind == "splits":
        return folders.splits(root, found, child_folders(root))
    if kind == "classes":
        return folders.classes(root, found, child_folders(root))
    children = child_folders(root)
    if not any(found.folders.get(folder) or any(found.below(folder)) for folder in children):
        return folders.flat(root, found)
    filled = [folder for folder in children if any(found.below(folder))]
    named = [folder for folder in filled if folders.is_split_name(folder)]
    if len(named) == len(filled):
        return folders.splits(root, found, children)
    if named:
        other = next(folder for folder in filled if folder not in named)
        raise SourceError(
            f"{path}: {named[0]!r} looks like a split and {other!r} like a class; say which with --source splits or "
            "--source classes, or leave one out with --exclude"
        )
    return folders.classes(root, found, children)


def _look(path: Path) -> str:
    """The kind that a look at the path's top tells; "folder" where the walk must tell."""
    if path.is_file():
        if path.suffix.lower() in _MANIFEST_SUFFIXES:
            return "manifest"
        if is_hdf5(path):
            return "hdf5"
        raise SourceError(
            f"{path}: neither a folder of images, nor a .csv or .tsv manifest, nor an HDF5 file; see h5pack convert -h"
        )
    return "celeba" if is_celeba(path) else "folder"


def check_kind(kind: str | None) -> None:
    """Refuse a kind that is not one of `KINDS`.

    Raises
    ------
    OptionsError
    """
    if kind is not None and kind not in KINDS:
        raise OptionsError(f"source {kind!r} is none of {', '.join(KINDS)}")
