"""The command that packs an export anew is named only where it was seen to give everything back."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h5pack.sources.catalog import Catalog
from h5pack.sources.detect import SourceOptions, open_source
from h5pack.tools.export_again import _same, command_back
from h5pack.tools.export_manifest import plan_manifest
from h5pack.tools.export_names import NameRules, name_files
from tests.makers import save, split_folders
from tests.tools.test_export_names import catalog


def command(source: Catalog, folder: Path, *rows: str) -> list[str]:
    """The words of the command for a catalog whose files are written."""
    numbers = np.arange(len(source))
    names = name_files(source, numbers, True, NameRules((".png",)))
    for path in names.folders:
        (folder / path).mkdir(parents=True)
    for path in names.paths:
        save(folder / path)
    manifest = plan_manifest(source, names.paths, numbers, None)
    (folder / "manifest.csv").write_text("")
    found, lost = command_back(folder, Path("/a folder"), source, names.paths, manifest, list(rows))
    assert lost == manifest.lost or "manifest.csv" not in found
    program, verb, out, again, *options = shlex.split(found)
    assert (program, verb, again) == ("h5pack", "convert", "again.h5")
    assert out in ("/a folder", "/a folder/manifest.csv")
    return [out.removeprefix("/a folder"), *options]


WHOLE: dict[str, tuple[list[str], dict[str, Any], list[str]]] = {
    "flat": (["a.jpg", "b.jpg"], {}, [""]),
    "classes": (["x/a.jpg", "y/b.jpg"], {"labels": [0, 1], "label_names": ("x", "y")}, [""]),
    "classes called as splits are": (
        ["train/a.jpg"],
        {"labels": [0], "label_names": ("train",)},
        ["", "--source", "classes"],
    ),
    "splits": (["a.jpg", "b.jpg"], {"splits": ["train", "val"]}, [""]),
    "odd splits": (
        ["a.jpg", "b.jpg"],
        {"splits": ["fold1", "fold2"], "labels": [0, 0], "label_names": ("x",)},
        ["", "--source", "splits"],
    ),
    "flat, in folders": (["x/a.jpg", "y/b.jpg"], {}, ["", "--source", "flat"]),
}  # fmt: skip


@pytest.mark.parametrize("source", WHOLE)
def test_a_folder_that_gives_everything_back(tmp_path: Path, source: str) -> None:
    names, settings, wanted = WHOLE[source]
    assert command(catalog(names, **settings), tmp_path, "--mode", "gray") == [*wanted, "--mode", "gray"]


PARTLY: dict[str, tuple[list[str], dict[str, Any]]] = {
    "classes in no order": (["x/a.jpg", "y/b.jpg"], {"labels": [1, 0], "label_names": ("y", "x")}),
    "splits in no order": (["a.jpg", "b.jpg"], {"splits": ["val", "train"]}),
    "a class that is no folder": (["a.jpg"], {"labels": [0], "label_names": ("x/y",)}),
    "numbers": (["a.jpg", "b.jpg"], {"labels": [0, 1]}),
    "no label, in the folder of a class": (
        ["train/x/a.jpg", "val/x/b.jpg"],
        {"splits": ["train", "val"], "labels": [0, -1], "label_names": ("x",)},
    ),
    "some without a label": (["x/a.jpg", "b.jpg"], {"labels": [0, -1], "label_names": ("x",)}),
    "no labels, in folders of splits": (["train/x/a.jpg", "val/b.jpg"], {"splits": ["train", "val"]}),
    "a field": (["a.jpg"], {"fields": {"weight": np.zeros(1)}}),
    "a split without rows": (["a.jpg"], {"splits": ["train"], "split_names": ("train", "val")}),
}


@pytest.mark.parametrize("source", PARTLY)
def test_a_folder_that_does_not(tmp_path: Path, source: str) -> None:
    names, settings = PARTLY[source]
    fields = ["--field-columns", "weight"] if source == "a field" else []
    assert command(catalog(names, **settings), tmp_path) == ["/manifest.csv", "--order", "sorted", *fields]


def test_every_file_is_compared(tmp_path: Path) -> None:
    split_folders(tmp_path / "in", {"train": {"x": 3, "y": 2}, "val": {"x": 2, "y": 1}})
    found = open_source(tmp_path / "in", SourceOptions())
    shuffled = found.take(np.array([5, 2, 7, 0, 1, 6, 4, 3]))
    assert _same(found, shuffled, shuffled.names)
    assert not _same(found, shuffled, found.names)
    assert shuffled.labels is not None
    for changes in (
        {"labels": 1 - shuffled.labels},
        {"labels": None},
        {"split_ids": 1 - shuffled.split_ids},
        {"split_names": ("val", "train")},
        {"label_names": ("x", "z")},
    ):
        assert not _same(found, replace(shuffled, **changes), shuffled.names)
    assert not _same(found, shuffled.take(np.arange(7)), shuffled.names.take(range(7)))
