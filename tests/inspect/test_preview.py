"""A contact sheet shows the rows it says it shows, by split and class, and reads no others."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageDraw

import h5pack
from h5pack import cli
from h5pack.errors import (
    DamagedRowsError,
    H5PackError,
    NoSpaceError,
    OptionsError,
    OutputExistsError,
    PackChangedError,
    ReadError,
    SourceError,
)
from h5pack.exporter.image_files import open_rows
from h5pack.inspect import preview as module
from h5pack.inspect.preview import PreviewReport, _beside, preview, scaled
from h5pack.sources.hdf5_catalog import HDF5Datasets
from tests.makers import flat_folder, hdf5_file, pair_folders, pixels, quick, save, split_folders
from tests.pack.test_convert_hdf5 import LABELS, PIXELS, ROWS, STORED, write
from tests.read.encoded_files import encode, jpegs, write_encoded

# The longer side of the tests' images, so that the sheet shows their very pixels.
EXACT = 24


def sheet_of(path: Path) -> npt.NDArray[np.uint8]:
    with Image.open(path) as image:
        assert image.mode == "RGB"
        return np.asarray(image)


def place_of(sheet: npt.NDArray[np.uint8], picture: npt.NDArray[np.uint8]) -> tuple[int, int]:
    """Where on a sheet a picture stands, pixel by pixel; it must stand there once."""
    height, width = picture.shape[:2]
    windows = sheet[: len(sheet) - height + 1, : sheet.shape[1] - width + 1]
    corners = np.argwhere((windows == picture[0, 0]).all(axis=2)).tolist()
    (place,) = (
        (top, left) for top, left in corners if np.array_equal(sheet[top : top + height, left : left + width], picture)
    )
    return place


def shown(report: PreviewReport) -> dict[tuple[str, str | None], list[int]]:
    return {(split.name, part.name): part.shown for split in report.splits for part in split.classes}


@pytest.mark.parametrize("stored", ["CelebA recipe", "cut and gzip", "encoded"])
def test_rows_are_shown_by_class(tmp_path: Path, stored: str) -> None:
    source = write(tmp_path / "f.h5", STORED[stored])
    report = preview(source, tmp_path / "o.png", images="x", per_class=3, tile=EXACT)
    sheet = sheet_of(tmp_path / "o.png")
    assert sheet.shape == (report.height, report.width, 3)
    assert (report.images, report.ok) == (15, True)
    tops, lefts = {}, {}
    for (_, name), rows in shown(report).items():
        assert {f"label {LABELS[row]}" for row in rows} == {name}
        for column, row in enumerate(rows):
            tops[row], lefts[row] = place_of(sheet, PIXELS[row])
            assert lefts[row] == lefts[rows[0]] + column * (20 + 8)
            assert tops[row] == tops[rows[0]]
    # A line a class, one below the other.
    first = [rows[0] for rows in shown(report).values()]
    assert [tops[row] for row in first] == sorted({tops[row] for row in first})
    assert len({lefts[row] for row in first}) == 1


def test_the_picture_behind_a_symbolic_link_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "o.png").symlink_to("far/picture")
    preview(hdf5_file(tmp_path / "f.h5", images=PIXELS), tmp_path / "o.png")
    assert (tmp_path / "o.png").is_symlink()
    with Image.open(tmp_path / "far/picture") as picture:
        assert picture.format == "PNG"


def test_splits_stand_below_each_other(tmp_path: Path) -> None:
    folder = split_folders(tmp_path / "in", {"train": {"a": 9, "b": 5}, "val": {"b": 2}, "test": {"a": 1}})
    for number, path in enumerate(sorted(folder.rglob("*.jpg"))):
        save(path, 100 + number)
    h5pack.convert(folder, tmp_path / "a.h5", **quick())
    report = preview(tmp_path / "a.h5", tmp_path / "o.png", tile=20, per_class=4)
    with h5py.File(tmp_path / "a.h5") as file:
        images, labels = file["images"][()], file["labels"][()]
    counts = {(split.name, part.name): part.rows for split in report.splits for part in split.classes}
    assert counts == {("train", "a"): 9, ("train", "b"): 5, ("val", "b"): 2, ("test", "a"): 1}
    sheet = sheet_of(tmp_path / "o.png")
    tops = []
    for (_, name), rows in shown(report).items():
        assert all("ab"[labels[row]] == name for row in rows)
        tops += [place_of(sheet, images[row])[0] for row in rows[:1]]
    assert tops == sorted(tops)
    assert sum(map(len, shown(report).values())) == report.images == 4 + 4 + 2 + 1
    only = preview(tmp_path / "a.h5", tmp_path / "o.png", splits=("val",))
    assert [split.name for split in only.splits] == ["val"]
    assert only.rows == 2


def test_only_the_rows_that_are_shown_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    h5pack.convert(flat_folder(tmp_path / "in", 60, (30, 30)), tmp_path / "a.h5", **quick())
    opened = open_rows(tmp_path / "a.h5", HDF5Datasets())
    monkeypatch.setattr(module, "open_rows", lambda *_: opened)
    assert preview(tmp_path / "a.h5", tmp_path / "o.png", per_class=7).images == 7
    stats = opened.reader.engine.snapshot()
    assert stats.rows == 7
    # And their checksums.
    assert 7 * (30 * 30 * 3 + 4) <= stats.bytes_read < 7.2 * 30 * 30 * 3


def test_rows_are_spaced_or_drawn(tmp_path: Path) -> None:
    source = hdf5_file(tmp_path / "f.h5", images=np.zeros((100, 9, 9), np.uint8))

    def rows(**settings: Any) -> list[int]:
        return shown(preview(source, tile=16, **settings))["all", None]

    assert rows(per_class=10) == list(range(0, 100, 10))
    drawn = [rows(per_class=10, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] == sorted(set(drawn[0])) != drawn[2]
    assert len(rows()) == 32


@pytest.mark.parametrize(("classes", "last", "is_class"), [(None, "label -1", True), ("abc", "no label", False)])
def test_minus_one_is_a_class_if_classes_have_no_names(
    tmp_path: Path, classes: str | None, last: str, is_class: bool
) -> None:
    labels = np.repeat([-1, 0, 2], [2, 4, 6])
    path = hdf5_file(tmp_path / "f.h5", images=np.zeros((12, 9, 9), np.uint8), labels=labels)
    if classes is not None:
        with h5py.File(path, "a") as file:
            file["labels"].attrs["classes"] = list(classes)
    (split,) = preview(path).splits
    assert ({one.name: one.rows for one in split.classes}[last], split.named) == (2, 2 + is_class)
    assert h5pack.info(path, stats=True).stats["labels"]["-1"] == 2
    drawn = h5pack.ChunkSampler(h5pack.H5Dataset(path), weights="balanced", num_samples=30)
    assert np.count_nonzero(labels[list(drawn)] == -1) == 10 * is_class


def test_classes_that_are_left_out_are_counted(tmp_path: Path, drawn: list[Any]) -> None:
    hdf5_file(tmp_path / "f.h5", images=np.zeros((60, 9, 9), np.uint8), labels=np.arange(60) % 30 - 1)
    with h5py.File(tmp_path / "f.h5", "a") as file:
        file["labels"].attrs["classes"] = [f"class {number}" for number in range(29)]
    report = preview(tmp_path / "f.h5", tmp_path / "o.png", max_classes=5)
    texts = [line.text for line in drawn[0]]
    (split,) = report.splits
    assert [part.name for part in split.classes] == [*(f"class {number}" for number in range(5)), "no label"]
    assert (split.named, split.left_out) == (29, 24)
    assert report.to_text().splitlines()[1] == "  all: 24 of 29 classes not shown"
    assert "24 more classes not shown" in texts
    more = preview(tmp_path / "f.h5", tmp_path / "p.png", max_classes=29)
    assert (more.splits[0].left_out, more.images) == (0, 60)
    assert not any("not shown" in line.text for line in drawn[0])


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The lines and captions of the sheet that was drawn last."""
    arguments: list[Any] = []
    original = module._draw

    def draw(*given: Any) -> Image.Image:
        arguments[:] = given
        return original(*given)

    monkeypatch.setattr(module, "_draw", draw)
    return arguments


def test_nonzero_attributes_of_a_label_table_are_listed(tmp_path: Path, drawn: list[Any]) -> None:
    labels = np.array([[1, 0, 1], [0, 0, 0], [0, 7, 1]], np.uint8)
    with h5py.File(hdf5_file(tmp_path / "f.h5", images=PIXELS[:3], labels=labels), "a") as file:
        file["labels"].attrs["columns"] = ["Smiling", "Age", "Hat"]
    preview(tmp_path / "f.h5", tmp_path / "o.png", tile=EXACT)
    assert [line.rows for line in drawn[0] if line.rows] == [[0, 1, 2]]
    assert drawn[2] == {0: ["row 0", "Smiling", "Hat"], 1: ["row 1"], 2: ["row 2", "Age = 7", "Hat"]}
    preview(hdf5_file(tmp_path / "f.h5", images=PIXELS[:3], labels=np.ones((3, 16), np.uint8)))
    assert (len(drawn[2][0]), drawn[2][0][-1]) == (1 + 12, "+ 5 more")


def test_tiles_wrap_into_columns_of_one_width(tmp_path: Path) -> None:
    source = hdf5_file(tmp_path / "f.h5", images=PIXELS)
    report = preview(source, images="images", labels="", per_class=60, tile=EXACT)
    assert (report.path, report.sheet.size) == (None, (report.width, report.height))
    assert list(tmp_path.iterdir()) == [source]
    sheet = np.asarray(report.sheet)
    places = [place_of(sheet, picture) for picture in PIXELS[:60]]
    columns = (1_200 + 8) // (20 + 8)
    tops = sorted({top for top, _ in places})
    assert [sum(place[0] == top for place in places) for top in tops] == [columns, 60 - columns]
    assert set(np.diff(sorted({left for _, left in places})).tolist()) == {20 + 8}


@pytest.mark.parametrize("name", ["line\nbreak", "猫" * 200, "\udcff", ""])
def test_names_of_any_characters_are_drawn(name: str) -> None:
    pen = ImageDraw.Draw(Image.new("RGB", (300, 40)))
    module._write(pen, (0, 0), name, 14, "#ffffff", 200)


@pytest.mark.parametrize(
    ("size", "tile", "wanted"),
    [((28, 28), 128, (112, 112)), ((100, 60), 128, (100, 60)), ((218, 178), 109, (109, 89)), ((9, 999), 99, (1, 99))],
)
def test_images_are_scaled_to_fit_a_tile(size: tuple[int, int], tile: int, wanted: tuple[int, int]) -> None:
    picture = pixels(0, size)
    image = scaled(picture, tile)
    assert image.size == wanted[::-1]
    found = np.asarray(image).astype(int)
    gray = np.asarray(scaled(picture[:, :, :1], tile)).astype(int)
    if wanted == size:
        assert np.array_equal(found, picture)
        assert np.array_equal(gray, picture[:, :, :1].repeat(3, 2))
    elif wanted > size:
        factor = wanted[0] // size[0]
        assert np.array_equal(found, picture.repeat(factor, 0).repeat(factor, 1))
    else:
        assert np.abs(found.mean((0, 1)) - picture.mean((0, 1))).max() < 3


def test_pixels_of_other_kinds(tmp_path: Path) -> None:
    picture = pixels(3, (24, 20))
    for stored, settings, wanted in (
        (picture.transpose(2, 0, 1) / 255, {}, picture),
        ((picture / 127.5 - 1).astype(np.float32), {"value_range": (-1, 1)}, picture),
        (picture[:, :, 0], {}, np.repeat(picture[:, :, :1], 3, axis=2)),
        (np.dstack([picture, picture[:, :, 0]]), {}, picture),
        (picture.astype("<u2") * 256 + 9, {}, picture),
    ):
        source = hdf5_file(tmp_path / "f.h5", images=stored[None])
        place_of(np.asarray(preview(source, tile=EXACT, **settings).sheet), wanted)


def test_damaged_rows_are_crossed_out_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = jpegs(4)
    rows[2] = rows[2][:300]
    write_encoded(tmp_path / "f.h5", rows)
    report = preview(tmp_path / "f.h5", labels="")
    assert [(row.row, row.reason) for row in report.damaged] == [(2, "truncated")]
    assert report.images == 3
    good = preview(write_encoded(tmp_path / "good.h5", jpegs(4)))
    alarms = [(np.asarray(one.sheet) == (0xB3, 0x26, 0x1E)).all(axis=2).sum() for one in (report, good)]
    assert alarms[0] > 100
    assert alarms[1] == 0
    assert cli.main(["preview", str(tmp_path / "f.h5"), str(tmp_path / "o.png")]) == 1
    assert "row 2 (images/00000002): truncated" in capsys.readouterr().err


def test_messages_of_libtiff_become_reasons(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = encode(np.arange(3072, dtype=np.uint8).reshape(32, 32, 3), "TIFF", compression="jpeg")
    source = write_encoded(tmp_path / "f.h5", [data, data.replace(b"\xff\xd8", b"\xff\xd9")])
    shown = preview(source).damaged
    assert [row.row for row in shown] == [1]
    assert "libtiff" in shown[0].reason
    h5pack.export(source, tmp_path / "out", num_workers=1)
    assert capfd.readouterr().err == ""


def test_a_file_without_showable_rows_is_an_error(tmp_path: Path) -> None:
    hdf5_file(tmp_path / "f.h5", images=np.full((3, 9, 9), -2.0))
    with pytest.raises(DamagedRowsError) as caught:
        preview(tmp_path / "f.h5", tmp_path / "o.png")
    assert (caught.value.rows, caught.value.parameters) == ((0, 1, 2), ("value_range",))
    assert [path.name for path in tmp_path.iterdir()] == ["f.h5"]


@pytest.mark.parametrize("labels", [np.array([0.5, 1.0, 2.0]), np.full((3, 2), 256)])
def test_fields_are_not_recommended_instead_of_labels(tmp_path: Path, labels: npt.NDArray[Any]) -> None:
    """`convert` has a parameter `fields`, but `preview` has none."""
    source = hdf5_file(tmp_path / "f.h5", images=PIXELS[:3], y=labels)
    with pytest.raises(SourceError) as caught:
        preview(source)
    assert caught.value.parameters == ("labels=NAME", "labels=''")
    assert "fields=" not in str(caught.value)


def test_one_row_is_counted_in_the_singular(tmp_path: Path) -> None:
    source = hdf5_file(tmp_path / "f.h5", images=PIXELS[:1])
    assert "1 rows" not in preview(source).to_text() + h5pack.info(source, stats=True).to_text()
    assert "1 rows" not in repr(h5pack.H5Dataset(source))


@pytest.mark.parametrize("failure", [ReadError("no disk"), PackChangedError("replaced")])
def test_storage_errors_have_no_advice_for_conversions(
    failure: H5PackError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hdf5_file(tmp_path / "f.h5", images=PIXELS)
    monkeypatch.setattr("h5pack.read.engine.Engine.read", mock.Mock(side_effect=failure))
    with pytest.raises(type(failure)) as caught:
        preview(tmp_path / "f.h5")
    assert caught.value.parameters == ()


def test_the_picture_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    source = write(tmp_path / "f.h5", STORED["contiguous"])
    (tmp_path / "o.png").write_bytes(b"what was there")

    full = mock.patch("os.replace", side_effect=OSError(28, os.strerror(28)))
    with full, pytest.raises(NoSpaceError):
        preview(source, tmp_path / "o.png", images="x")
    assert (tmp_path / "o.png").read_bytes() == b"what was there"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.h5", "o.png"]
    for name, kind in (("o.png", "PNG"), ("o.JPG", "JPEG"), ("o.jpeg", "JPEG"), ("o.webp", "WEBP")):
        report = preview(source, tmp_path / name, images="x")
        with Image.open(tmp_path / name) as image:
            assert (image.format, image.size) == (kind, (report.width, report.height))


def test_a_picture_of_another_user_in_a_shared_folder_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "f.h5", STORED["contiguous"])
    (tmp_path / "o.png").touch()
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(SourceError):
        preview(source, tmp_path / "o.png", images="x")


def test_bad_options(tmp_path: Path) -> None:
    source = write(tmp_path / "f.h5", STORED["contiguous"])
    for settings in ({"per_class": 0}, {"max_classes": 0}, {"tile": 15}, {"seed": -1}):
        with pytest.raises(OptionsError) as caught:
            preview(source, **settings)  # type: ignore[arg-type]
        assert caught.value.parameters == tuple(f"{name}={value}" for name, value in settings.items())
    with pytest.raises(OptionsError):
        preview(source, value_range=(1, 0))
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "f.png").symlink_to(source)
    outputs = {"o.gif": OptionsError, "no/o.png": SourceError, "folder.png": OutputExistsError, "f.png": OptionsError}
    for out, error in outputs.items():
        with pytest.raises(error):
            preview(source, tmp_path / out)
    with h5py.File(source, "a") as file:
        file["y"][...] = np.arange(ROWS)
    too_large = {"o.png": {"tile": 2048, "labels": "", "per_class": 60}, "o.webp": {"tile": 300, "max_classes": 60}}
    for out, keywords in too_large.items():
        with pytest.raises(OptionsError) as caught:
            preview(source, tmp_path / out, images="x", **keywords)  # type: ignore[arg-type]
        assert caught.value.parameters == ("per_class", "max_classes", "tile")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.h5", "f.png", "folder.png"]


def test_a_sheet_of_wide_images_is_not_refused_for_the_height_of_its_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_PIXELS", 1_000_000)
    source = hdf5_file(tmp_path / "f.h5", images=np.zeros((100, 8, 128, 3), np.uint8))
    report = preview(source, per_class=100)
    assert report.images == 100
    assert report.width * report.height < 1_000_000 < 100 * 128 * 128
    opened = open_rows(source, HDF5Datasets())
    monkeypatch.setattr(module, "open_rows", lambda *_: opened)
    monkeypatch.setattr(module, "MAX_PIXELS", 100_000)
    monkeypatch.setattr("h5pack.sources.hdf5_rows._BATCH_BYTES", 1)  # read row by row
    with pytest.raises(OptionsError):
        preview(source, per_class=100)
    # The first image shows that the sheet is too large.
    assert opened.reader.engine.snapshot().rows == 1


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "f.h5", STORED["CelebA recipe"])
    options = ["--images", "x", "--per-class", "2", "--max-classes", "3"]
    arguments = ["preview", str(source), str(tmp_path / "o.png"), *options]
    assert cli.main([*arguments, "--tile", "40", "--seed", "3", "--channel-axis", "first", "--split", "all"]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{tmp_path / 'o.png'}: 6 images of 60 rows ")
    assert second == "  all: 2 of 5 classes not shown"
    assert "--max-classes 5" in third
    assert cli.main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == ({field.name for field in fields(PreviewReport)} | {"ok"}) - {"sheet"}
    (split,) = report["splits"]
    assert set(split) == {"name", "rows", "classes", "named", "left_out"}
    assert split["classes"][0] == {"name": "label 0", "rows": 12, "shown": [0, 30]}
    for extra, code, message in (
        *((["--value-range", "0:9:1"], 2, "--value-range 0:9:1"), (["--tile", "1"], 2, "--tile")),
        *((["--split", "val"], 2, "'val'"), (["--labels", "z"], 1, "'z'")),
    ):
        assert cli.main([*arguments, *extra]) == code
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1


def test_masks_are_drawn_beside_their_images(tmp_path: Path) -> None:
    source = pair_folders(tmp_path / "in", 3, (40, 40))
    for number in range(3):
        mask = np.zeros((40, 40), np.uint8)
        mask[:, 20:] = 1 + number
        Image.fromarray(mask).save(source / "masks" / f"{number:03d}.png")
    h5pack.convert(source, tmp_path / "o.h5", **quick(source_kind="pairs", order="sorted"))
    sheet = np.asarray(h5pack.preview(tmp_path / "o.h5", tile=40).sheet)
    for color in ((128, 0, 0), (0, 128, 0), (128, 128, 0)):
        assert np.count_nonzero((sheet == color).all(2)) >= 800
    assert np.count_nonzero((sheet == 0).all(2)) >= 3 * 800


def test_only_zero_has_the_color_of_zero() -> None:
    mask = np.array([[0, 1, 255], [256, -1, -257]], np.int32)
    drawn = np.asarray(_beside(Image.new("RGB", (3, 2)), [mask]))[:, 3:]
    assert (drawn == 0).all(2).tolist() == [[True, False, False], [False, False, False]]
