"""The command that packs an export anew, and what it would not restore: seen by reading the folder, not assumed."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np

from h5pack.errors import H5PackError
from h5pack.sources.catalog import Catalog, NameTable
from h5pack.sources.detect import SourceOptions, open_source
from h5pack.tools.export_manifest import Manifest
from h5pack.tools.export_names import MANIFEST, has_splits, name_hashes


def command_back(
    written: Path, final: Path, expected: Catalog, paths: NameTable, manifest: Manifest, rows: list[str]
) -> tuple[str, tuple[str, ...]]:
    """How to pack an export anew.

    Parameters
    ----------
    written : Path
        Where the export lies now.
    final : Path
        What it will be called, as somebody would type it.
    expected : Catalog
        Of the rows that were exported.
    paths : NameTable
        (n,): their files.
    manifest : Manifest
    rows : list of str
        Options for rows of the same shape.

    Returns
    -------
    str
        The command: of the folder, where that alone restores splits, classes and all else, or else of the manifest.
    tuple of str
        What it loses, in words.
    """
    kind = _folder_kind(written, expected, paths)
    if kind is not None:
        options = ["--source", kind] if kind else []
        return shlex.join(["h5pack", "convert", str(final), "again.h5", *options, *rows]), ()
    table = ["h5pack", "convert", str(final / MANIFEST), "again.h5", "--order", "sorted", *manifest.options, *rows]
    return shlex.join(table), manifest.lost


def _folder_kind(written: Path, expected: Catalog, paths: NameTable) -> str | None:
    """The kind of source as which the folder gives everything back, empty where it need not be named; else None."""
    if expected.fields or (expected.labels is not None and (expected.label_names is None or expected.labels.ndim == 2)):
        return None
    named = "splits" if has_splits(expected) else "flat" if expected.labels is None else "classes"
    for kind in ("", named):
        try:
            found = open_source(written, SourceOptions(kind=kind or None))
        except H5PackError:
            continue
        if _same(found, expected, paths):
            return kind
    return None


def _same(found: Catalog, expected: Catalog, paths: NameTable) -> bool:
    """Whether a folder's catalog has the same splits and classes, and of each file the same split and class."""
    if len(found) != len(paths) or found.split_names != expected.split_names:
        return False
    if found.label_names != expected.label_names:
        return False
    hashes, wanted = name_hashes(found.names, len(paths)), name_hashes(paths, len(paths))
    order, places = np.argsort(hashes), np.argsort(wanted)
    if not np.array_equal(hashes[order], wanted[places]):
        return False
    if not np.array_equal(found.split_ids[order], expected.split_ids[places]):
        return False
    if found.labels is None or expected.labels is None:
        return found.labels is expected.labels
    return np.array_equal(found.labels[order], expected.labels[places])
