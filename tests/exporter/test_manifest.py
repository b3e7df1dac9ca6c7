"""The table beside an export: what it says, and that a conversion reads just that."""

from __future__ import annotations

import csv
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from h5pack.exporter.image_files import SourceRows
from h5pack.exporter.manifest import Manifest, plan_manifest
from h5pack.exporter.names import ExportNames
from h5pack.sources.catalog import Catalog, NameFilter, NameTable
from h5pack.sources.manifest import ManifestColumns, manifest
from tests.exporter.test_names import catalog, rows_of


def planned(source: Catalog, sources: bool = False) -> Manifest:
    return plan_manifest(rows_of(source, sources), ExportNames(source.names, (), 0))


def options_of(plan: Manifest) -> list[str]:
    """The options of the command that packs the export again."""
    pack = SimpleNamespace(form=None, index=SimpleNamespace(row_shape=()), pack=SimpleNamespace(layout="nhwc"))
    source = SourceRows(catalog([]), pack, np.arange(0), False)  # type: ignore[arg-type]
    command, _ = plan.command(Path("out"), source, ExportNames(plan.paths, (), 0))
    start = "h5pack convert out/manifest.csv again.h5 --order sorted"
    assert command.startswith(start)
    return shlex.split(command.removeprefix(start))


def written(plan: Manifest, path: Path, left_out: tuple[int, ...] = ()) -> list[list[str]]:
    plan.write(path, left_out)
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.reader(stream))


def read(plan: Manifest, path: Path) -> Catalog:
    """The catalog that a conversion with the plan's options sees."""
    words = options_of(plan)
    options = dict(zip(words[::2], words[1::2], strict=True))
    labels, fields = (
        tuple(options[name].split(",")) if name in options else () for name in ("--label-columns", "--field-columns")
    )
    return manifest(path, ManifestColumns(labels=labels, fields=fields), NameFilter())


NUMBERS: list[npt.NDArray[Any]] = [
    np.array([0.1, np.nan, -np.inf, 5e-324], np.float64),
    np.array([0.1, 1 / 3, 1e38, -0.0], np.float32),
    np.array([2**63 - 1, -(2**63), 0, 7]),
    np.array([1.0, 2.0, 3.0, 4.0]),
    np.array([True, False, True, True]),
    np.array([0, 255, 3, 4], np.uint8),
]


@pytest.mark.parametrize("values", NUMBERS, ids=lambda values: str(values.dtype))
def test_numbers_are_restored_exactly(tmp_path: Path, values: npt.NDArray[Any]) -> None:
    plan = planned(catalog(["a.png", "b.png", "c.png", "d.png"], fields={"x": values}))
    written(plan, tmp_path / "m.csv")
    found = read(plan, tmp_path / "m.csv").fields["x"]
    np.testing.assert_array_equal(found, values)
    assert found.dtype == (np.float64 if values.dtype.kind == "f" else np.int64)


def test_paths_and_class_names_with_special_characters_are_restored(tmp_path: Path) -> None:
    names = [' lead/a.png', 'quo"te.png', "com,ma.png", "\u732b.png", "#.png", "=1+1.png"]  # fmt: skip
    words = ("a,b", 'c"d', "e f", "\u732b", "#g", "=h")
    plan = planned(catalog(names, labels=range(6), label_names=words), sources=True)
    assert len(plan.lost) == 1
    lines = written(plan, tmp_path / "m.csv")
    assert lines[0] == ["path", "split", "label", "row", "source"]
    assert [line[2] for line in lines[1:]] == list(words)
    found = read(plan, tmp_path / "m.csv")
    # White space in front of a cell is taken away, so the path begins otherwise.
    assert list(found.names) == ["./ lead/a.png", *names[1:]]
    assert [found.label_names[label] for label in found.labels] == list(words)


@pytest.mark.parametrize("odd", ["-1e3", "nan", "", " x", "a\rb"])
def test_labels_are_numbers_if_a_class_name_would_be_misread(tmp_path: Path, odd: str) -> None:
    plan = planned(catalog(["a.png", "b.png", "c.png"], labels=[1, 0, -1], label_names=("cat", odd)))
    assert "names of classes" in plan.lost[0]
    lines = written(plan, tmp_path / "m.csv")
    assert lines[0] == ["path", "split", "label", "class", "row"]
    assert [line[2] for line in lines[1:]] == ["1", "0", "-1"]
    found = read(plan, tmp_path / "m.csv")
    assert (found.labels.tolist(), found.label_names) == ([1, 0, -1], None)


def test_columns_have_names_of_their_own(tmp_path: Path) -> None:
    table = np.array([[1, 2, 3, 4]], np.uint8)
    source = catalog(["a.png"], fields={"row": np.ones(1), "x": np.zeros(1)})
    source = Catalog(**{**source.__dict__, "labels": table, "label_names": ("path", "x", "a, b", " y ")})
    plan = planned(source, sources=True)
    assert next(plan.lines(())) == ["path", "split", "path~2", "x", "a; b", "y", "row", "x~2", "row~2", "source"]
    assert options_of(plan) == ["--label-columns", "path~2,x,a; b,y", "--field-columns", "row,x~2"]
    assert [name in lost for name, lost in zip(("'path~2'", "'x~2'"), plan.lost, strict=True)] == [True, True]
    written(plan, tmp_path / "m.csv")
    assert read(plan, tmp_path / "m.csv").labels.tolist() == table.tolist()


def test_splits_that_would_be_misread() -> None:
    for splits, lost in ((("train", "val"), 0), (("all",), 0), (("val", "train"), 1), ((" val", "x"), 1)):
        assert len(planned(catalog([f"{n}.png" for n in range(len(splits))], splits=list(splits))).lost) == lost


def test_rows_without_a_file_have_no_line(tmp_path: Path) -> None:
    plan = planned(catalog([f"{n}.png" for n in range(10_000)], labels=range(10_000)))
    lines = written(plan, tmp_path / "m.csv", (0, 4_096, 9_999))
    assert len(lines) == 9_998
    assert [line[0] for line in lines[1:3]] == ["1.png", "2.png"]
    assert plan.equals(tmp_path / "m.csv", (0, 4_096, 9_999))
    assert not plan.equals(tmp_path / "m.csv", (0, 4_096))


def test_another_table_does_not_equal_it(tmp_path: Path) -> None:
    plan = planned(catalog(["a.png", "b.png"], labels=[3, 4]))
    path = tmp_path / "m.csv"
    for text in (
        "",
        "path,split,label\na.png,all,3\nb.png,all,4\n",
        "path,split,label,row\na.png,all,3,0\nb.png,all,5,1\n",
        "path,split,label,row\nb.png,all,4,1\na.png,all,3,0\n",
        "path,split,label,row\na.png,all,3,0\nb.png,all,4,1\nc.png,all,4,2\n",
        "\x89PNG\xff",
    ):
        path.write_bytes(text.encode("latin-1"))
        assert not plan.equals(path, ())
    assert not plan.equals(tmp_path / "none.csv", ())
    written(plan, path)
    assert plan.equals(path, ())


def test_names_with_control_characters_are_escaped_in_the_sources(tmp_path: Path) -> None:
    plan = plan_manifest(
        rows_of(catalog(["a\r\n\x1b[31m.jpg"]), True, [7]), ExportNames(NameTable.of(["a.png"]), (), 0)
    )
    assert written(plan, tmp_path / "m.csv")[1] == ["a.png", "all", "7", "a\\r\\n\\x1b[31m.jpg"]
