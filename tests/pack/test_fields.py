"""Fields of all kinds move with their rows: through rejects, splits, shuffles, sizes, kills and other packs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

import h5pack
from h5pack.errors import OptionsError, OutputExistsError, ResumeError, SourceError
from h5pack.format import schema
from h5pack.pack.conversion import Conversion
from h5pack.pack.output import ConvertReport
from tests.crashing import convert_in_child, distinct_steps, leftovers, require_resumes
from tests.makers import FIELDS, annotated_images, quick, truncate, write_lines

NAMES = ["boxes", "points", "caption", "captions", "sizes", "score"]


def values(path: Path, **keywords: Any) -> dict[str, dict[str, Any]]:
    """The fields of each row, by the stem of its file."""
    dataset = h5pack.H5Dataset(path, fields=NAMES, check=True, **keywords)
    found = {}
    for name, sample in zip(dataset.filenames or (), dataset[:], strict=True):
        row = {key: getattr(sample, key) for key in NAMES}
        found[Path(name).stem] = {
            key: value if isinstance(value, (str, list)) else value.tolist() for key, value in row.items()
        }
    return found


def expected(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {Path(record["path"]).stem: {key: record[key] for key in NAMES} for record in records}


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"order": "sorted"}, {"seed": 3, "num_workers": 2, "val": 0.25}, {"compression": "gzip", "layout": "nchw"},
        {"keep": "jpeg"}, {"compat": True},
    ],
    ids=str,
)  # fmt: skip
def test_fields_move_with_their_rows(tmp_path: Path, settings: dict[str, Any]) -> None:
    records = annotated_images(tmp_path / "in", 25)
    for number in (3, 11, 12, 24):
        truncate(tmp_path / "in" / f"{number:03d}.jpg", 0.7)
    (tmp_path / "in" / "020.jpg").unlink()
    report = h5pack.convert(tmp_path / "in" / "list.jsonl", tmp_path / "o.h5", **quick(**FIELDS | settings))
    assert (report.images, report.rejects) == (20, 5)
    kept = [record for number, record in enumerate(records) if number not in (3, 11, 12, 20, 24)]
    assert values(tmp_path / "o.h5") == expected(kept)
    assert h5pack.verify(tmp_path / "o.h5", num_workers=1).ok
    if "val" in settings:
        parts = [values(tmp_path / "o.h5", split=name) for name in ("train", "val")]
        assert (list(map(len, parts)), parts[0] | parts[1]) == ([15, 5], expected(kept))
    with h5py.File(tmp_path / "o.h5") as file:
        assert {name: item.attrs["kind"].decode() for name, item in file["fields"].items()} == {
            "boxes": "boxes", "points": "keypoints", "caption": "text", "captions": "texts", "sizes": "ragged",
            "score": "array",
        }  # fmt: skip
        assert file["fields/boxes"].attrs["box_format"] == b"xyxy"
        assert set(file["checksums/fields"]) == set(file["fields"])


def test_a_pack_becomes_another_pack_with_all_fields(tmp_path: Path) -> None:
    records = annotated_images(tmp_path / "in", 12)
    h5pack.convert(tmp_path / "in" / "list.jsonl", tmp_path / "a.h5", **quick(**FIELDS))
    h5pack.convert(tmp_path / "a.h5", tmp_path / "b.h5", **quick(seed=9, limit=7))
    assert len(values(tmp_path / "b.h5")) == 7
    assert values(tmp_path / "b.h5").items() <= expected(records).items()
    h5pack.convert(tmp_path / "a.h5", tmp_path / "c.h5", **quick(size=(48, 40)))
    for stem, row in values(tmp_path / "c.h5").items():
        assert row["boxes"] == (2 * np.array(expected(records)[stem]["boxes"])).tolist()
        assert [point[2] for point in row["points"]] == [2] * len(row["boxes"])
    (note,) = Conversion(tmp_path / "a.h5", tmp_path / "d.h5", fields="caption", num_workers=1).plan().notes()
    assert "'fields/boxes'" in note.text


def test_killed_and_resumed_the_bytes_are_the_same(tmp_path: Path) -> None:
    annotated_images(tmp_path / "in", 20)
    truncate(tmp_path / "in" / "004.jpg", 0.7)
    source, out, settings = tmp_path / "in" / "list.jsonl", tmp_path / "out" / "o.h5", quick(**FIELDS, size=16)
    out.parent.mkdir()
    require_resumes(source, out, settings, lambda changes: distinct_steps(changes, first=True)[4::7])
    assert leftovers(out.parent) == {"o.h5", "o.h5.rejects.csv"}


@pytest.mark.parametrize("change", ["caption", "boxes", "sizes"])
def test_a_changed_field_is_not_resumed(tmp_path: Path, change: str) -> None:
    records = annotated_images(tmp_path / "in", 8)
    source, out = tmp_path / "in" / "list.jsonl", tmp_path / "o.h5"
    convert_in_child(source, out, quick(**FIELDS), kill_at=40)
    assert not out.exists()
    records[5][change] = {"caption": "another", "boxes": [[0, 1, 2, 3]], "sizes": [[1, 2]]}[change]
    write_lines(source, records)
    with pytest.raises(ResumeError):
        h5pack.convert(source, out, **quick(**FIELDS), resume=True)


def test_a_complete_pack_is_that_of_a_source_with_the_same_fields(tmp_path: Path) -> None:
    records = annotated_images(tmp_path / "in", 8)
    source, out = tmp_path / "in" / "list.jsonl", tmp_path / "o.h5"
    h5pack.convert(source, out, **quick(**FIELDS))
    assert h5pack.convert(source, out, **quick(**FIELDS), resume=True).already_complete
    more = [[0, 1, 2, 3]] * (1 + len(records[4]["boxes"]))
    values = {"caption": "another", "captions": ["x"], "score": 9.0, "sizes": [[8, 2]], "boxes": more, "points": []}
    tables = [[*records[:4], {**records[4], name: value}, *records[5:]] for name, value in values.items()]
    # Numbers become lists of different lengths, and points lose their visibility.
    tables.append([{**record, "score": [1] * (number % 2)} for number, record in enumerate(records)])
    tables.append([{**record, "points": [point[:2] for point in record["points"]]} for record in records])
    for table in tables:
        write_lines(source, table)
        with pytest.raises(OutputExistsError):
            h5pack.convert(source, out, **quick(**FIELDS), resume=True)


@pytest.mark.parametrize(
    "settings",
    [{"size": 32}, {"size": (50, 24), "fit": "pad"}, {"size": (30, 48), "fit": "stretch"},
     {"keep": "jpeg", "max_side": 48, "quality": 98}],
    ids=str,
)  # fmt: skip
def test_painted_boxes_stay_under_their_boxes(tmp_path: Path, settings: dict[str, Any]) -> None:
    records = annotated_images(tmp_path / "in", 30, None)
    h5pack.convert(tmp_path / "in" / "list.jsonl", tmp_path / "o.h5", **quick(**FIELDS | settings, order="sorted"))
    dataset, seen = h5pack.H5Dataset(tmp_path / "o.h5", fields=["boxes", "points"]), 0
    for index, record in enumerate(records):
        _, boxes, points = dataset[index]
        pixels = dataset[index].image.numpy()[:, :, 0]
        height, width = pixels.shape
        assert len(boxes) == len(record["boxes"])
        assert (boxes >= 0).all()
        assert (boxes.numpy() <= np.array([width, height] * 2)).all()
        for x, y, visible in points.tolist():
            assert bool(visible) == (0 <= x <= width and 0 <= y <= height)
            if visible:
                assert pixels[int(min(y, height - 1)), int(min(x, width - 1))] > 100
        if len(boxes) == 1 and (pixels > 127).any():
            rows, columns = np.nonzero(pixels > 127)
            found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert np.abs(boxes[0].numpy() - found).max() < 1.1
            seen += 1
    assert seen > 4


@pytest.mark.parametrize("decoder", ["simplejpeg", "pillow", "png"])
def test_an_image_that_changes_its_size_after_the_survey_is_refused(tmp_path: Path, decoder: str) -> None:
    """Its boxes would be scaled by the size that the survey found. Without boxes, the new image is packed."""
    annotated_images(tmp_path / "in", 6)
    changed = tmp_path / "in" / "004.jpg"
    before = changed.read_bytes()

    def convert(**keywords: Any) -> ConvertReport:
        settings = {"size": 16, "path_column": "path", "overwrite": True, **keywords}
        changed.write_bytes(before)
        with Conversion(tmp_path / "in" / "list.jsonl", tmp_path / "o.h5", **quick(**settings)) as conversion:
            conversion.plan()
            with Image.open(changed) as image:
                image.resize((image.width * 2, image.height)).save(changed, "PNG" if decoder == "png" else "JPEG")
            return conversion.run()

    with pytest.MonkeyPatch.context() as patch:
        if decoder == "pillow":
            patch.setattr("h5pack.images.decode._simplejpeg", lambda: None)
        with pytest.raises(SourceError) as caught:
            convert(box_columns="boxes")
        assert (caught.value.path, caught.value.parameters) == ("004.jpg", ("resume=True", "overwrite=True"))
        assert convert(keypoint_columns="points", draft=True).images == 6
        assert convert().images == 6


def test_an_image_that_changes_its_size_before_it_is_encoded_is_refused(tmp_path: Path) -> None:
    annotated_images(tmp_path / "in", 6)
    changed = tmp_path / "in" / "004.jpg"
    before = changed.read_bytes()

    def convert(**keywords: Any) -> ConvertReport:
        settings = {"keep": "jpeg", "max_side": 16, "path_column": "path", "overwrite": True, **keywords}
        changed.write_bytes(before)
        with Conversion(tmp_path / "in" / "list.jsonl", tmp_path / "o.h5", **quick(**settings)) as conversion:
            conversion.plan()
            with Image.open(changed) as image:
                image.resize((image.width * 2, image.height)).save(changed)
            return conversion.run()

    with pytest.raises(SourceError) as caught:
        convert(box_columns="boxes")
    assert (caught.value.path, caught.value.parameters) == ("004.jpg", ("resume=True", "overwrite=True"))
    assert convert().images == 6


def test_boxes_outside_are_clipped_with_a_note(tmp_path: Path) -> None:
    records = annotated_images(tmp_path / "in", 6)
    records[1]["boxes"] = [[-3, 2, 50, 40], [2, 2, 4, 4], [100, 100, 120, 130]]
    source = write_lines(tmp_path / "in" / "list.jsonl", records)
    with Conversion(source, tmp_path / "o.h5", **quick(box_columns="boxes")) as conversion:
        notes = [note.text for note in conversion.plan().notes() if "2 boxes of 'boxes'" in note.text]
        conversion.run()
    assert len(notes) == 1
    dataset = h5pack.H5Dataset(tmp_path / "o.h5", fields=["boxes"])
    (row,) = [row for row, name in enumerate(dataset.filenames or ()) if name == "001.jpg"]
    assert dataset[row].boxes.tolist() == [[0, 2, 20, 24], [2, 2, 4, 4], [20, 24, 20, 24]]


def test_columns_of_fields_need_a_manifest(tmp_path: Path) -> None:
    annotated_images(tmp_path / "in", 2)
    for settings in ({"box_columns": "a"}, {"text_columns": "a"}, {"keypoint_columns": "a"}, {"box_format": "xywh"}):
        with pytest.raises(OptionsError):
            h5pack.convert(tmp_path / "in", tmp_path / "o.h5", **quick(**settings))


class Samples(list[dict[str, Any]]):
    """The records of `annotated_images` as a map-style dataset."""

    def __init__(self, folder: Path, records: list[dict[str, Any]]) -> None:
        super().__init__({"image": Image.open(folder / one["path"]), "moved": one["moved"]} for one in records)


@pytest.mark.parametrize(
    ("kind", "shape"), [(kind, shape) for kind in schema.COORDINATE_KINDS for shape in schema.KINDS[kind].shapes]
)
def test_coordinates_of_each_kind_are_packed_exported_and_moved(
    tmp_path: Path, kind: str, shape: tuple[int, ...]
) -> None:
    parameter, crop = schema.KINDS[kind].parameter, h5pack.CenterCrop(8, resize=16)
    records, settings = annotated_images(tmp_path / "in", 6), quick(order="sorted", **{parameter: "moved"})
    for number, record in enumerate(records):
        # Ascending numbers are valid for each kind.
        record["moved"] = (2 + np.arange(number % 3 * shape[0])).reshape(-1, *shape).tolist()
    source = write_lines(tmp_path / "in" / "list.jsonl", records)
    h5pack.convert(source, tmp_path / "a.h5", **settings)
    h5pack.convert(source, tmp_path / "kept.h5", **settings, keep="jpeg")
    h5pack.convert(Samples(tmp_path / "in", records), tmp_path / "samples.h5", **settings)
    report = h5pack.convert(
        Samples(tmp_path / "in", records), tmp_path / "v.h5", **settings, val=0.5, val_groups="moved"
    )
    assert report.images == 6
    h5pack.convert(tmp_path / "a.h5", tmp_path / "again.h5", **quick(order="sorted"))
    exported = h5pack.export(tmp_path / "a.h5", tmp_path / "out", num_workers=1)
    assert f"--{parameter.replace('_', '-')} moved" in exported.again
    h5pack.convert(tmp_path / "out" / "manifest.csv", tmp_path / "exported.h5", **settings)
    for name in ("a", "kept", "samples", "again", "exported"):
        dataset = h5pack.H5Dataset(tmp_path / f"{name}.h5", labels=None, fields="moved", check=True)
        assert dataset.kinds == {"moved": kind}
        assert [sample.moved.tolist() for sample in dataset[:]] == [record["moved"] for record in records], name
    loaded, decoded = (
        h5pack.H5Dataset(tmp_path / name, labels=None, fields="moved", decode=decode)
        for name, decode in (("a.h5", None), ("kept.h5", crop))
    )
    loader = h5pack.H5Loader(loaded, 6, shuffle=False)
    (batch,) = h5pack.DeviceFeed(loader, "cpu", transform=h5pack.Normalize(crop=crop, fields={"moved": kind}))
    torch.testing.assert_close(batch.moved, [sample.moved for sample in decoded[:]])
    assert not torch.equal(batch.moved[5], loaded[5].moved)
