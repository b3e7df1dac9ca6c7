"""HDF5 files made by other tools: which datasets mean what, and what of them makes no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import h5pack
from h5pack.errors import H5PackError, OptionsError, PackFormatError, SourceError
from h5pack.format import schema
from h5pack.pack.conversion import Conversion
from h5pack.sources.catalog import Catalog, NameFilter
from h5pack.sources.detect import SourceOptions, open_source
from h5pack.sources.hdf5_catalog import (
    FurtherDatasets,
    HDF5Datasets,
    channel_axes,
    find_images,
    hdf5_catalog,
    is_hdf5,
    is_image_array,
)
from h5pack.sources.manifest import ManifestColumns
from tests.makers import pair_folders, quick, split_folders
from tests.read.encoded_files import jpegs, write_kept

ROWS = 6
LABELS = np.arange(ROWS)
IMAGES = np.arange(ROWS * 10 * 12 * 3, dtype=np.uint32).astype(np.uint8).reshape(ROWS, 10, 12, 3)


def write(path: Path, **datasets: Any) -> Path:
    """A file of these datasets; two underscores in a name stand for a slash."""
    with h5py.File(path, "w") as file:
        for name, values in datasets.items():
            file[name.replace("__", "/")] = values
    return path


def damage(path: Path, name: str) -> None:
    """Make the header of a dataset unreadable: the version of its dataspace becomes 255."""
    with h5py.File(path) as file:
        place = h5py.h5o.get_info(file[name].id).addr + 24
    data = bytearray(path.read_bytes())
    data[place] = 255
    path.write_bytes(data)


def catalog(path: Path, wanted: NameFilter | None = None, **datasets: Any) -> Catalog:
    return hdf5_catalog(path, HDF5Datasets(**datasets), wanted or NameFilter())


def test_hdf5_is_known_by_its_signature(tmp_path: Path) -> None:
    for block in (0, 512, 4096):
        h5py.File(tmp_path / f"block{block}.data", "w", userblock_size=block).close()
        assert is_hdf5(tmp_path / f"block{block}.data")
    for name, content in (("text.data", "\x89HDF is not enough" * 1000), ("empty.data", ""), ("broken.h5", "by name")):
        (tmp_path / name).write_text(content)
        assert is_hdf5(tmp_path / name) == (name == "broken.h5")
    assert not is_hdf5(tmp_path / "none.data")
    with pytest.raises(PackFormatError):
        catalog(tmp_path / "broken.h5")


def test_a_note_says_that_matlab_exchanged_height_and_width(tmp_path: Path) -> None:
    path = write(tmp_path / "m.mat", X=IMAGES.transpose(0, 3, 2, 1), labels=LABELS)
    assert catalog(path).notes == ()
    with h5py.File(path, "a") as file:
        for dataset in file.values():
            dataset.attrs["MATLAB_class"] = np.bytes_("uint8")
    assert len(catalog(path).notes) == 1


@pytest.mark.parametrize(
    ("images", "options", "notes"),
    [
        (IMAGES.astype(np.uint16) << 8, {}, 0),
        (IMAGES.astype(np.uint16) << 4, {}, 1),
        (IMAGES.astype(np.uint16) << 4, {"value_range": (0, 4095)}, 0),
        (IMAGES / 255, {}, 0),
        (IMAGES / 255e5, {}, 1),
        (IMAGES // 100, {}, 0),
        (IMAGES.astype(np.int64) // 100, {}, 1),
        (IMAGES / 100, {}, 0),  # The conversion rejects these values.
        (IMAGES[:0] / 255, {}, 0),
        (np.zeros((ROWS, 10, 12, 4), np.uint8), {}, 1),
        (np.zeros((ROWS, 2, 10, 12), np.uint8), {}, 1),
    ],
)
def test_notes_on_dark_rows_and_lost_channels(tmp_path: Path, images: Any, options: dict[str, Any], notes: int) -> None:
    assert len(catalog(write(tmp_path / "f.h5", images=images), **options).notes) == notes


def test_a_note_if_the_last_axis_is_as_long_as_the_labels(tmp_path: Path) -> None:
    images = np.zeros((10, 12, 9), np.uint8)
    for length, notes in ((9, 2), (8, 1), (10, 0)):  # One note says that the labels are not packed.
        assert len(catalog(write(tmp_path / "f.h5", images=images, labels=np.arange(length))).notes) == notes


@pytest.mark.parametrize(
    ("held", "found"),
    [
        ({"data__x": IMAGES, "data__y": np.arange(ROWS)}, ("data/x", "data/y")),
        ({"images": IMAGES, "other": IMAGES, "label": np.arange(ROWS)}, ("images", "label")),
        ({"train_set_x": IMAGES, "train_set_y": np.arange(ROWS)}, ("train_set_x", "train_set_y")),
        ({"X_train": IMAGES, "Y_train": np.arange(ROWS)}, ("X_train", "Y_train")),
        ({"images_val": IMAGES, "labels_val": LABELS, "labels": LABELS}, ("images_val", "labels_val")),
        ({"g__image": IMAGES, "labels": np.arange(ROWS)}, ("g/image", None)),
        ({"x": IMAGES, "y": np.arange(ROWS + 1)}, ("x", None)),
        ({"x": IMAGES, "y": np.zeros((ROWS, 1, 1, 1))}, ("x", "y")),
        ({"x": IMAGES, "y": np.zeros((1, ROWS))}, ("x", "y")),
        ({"x": IMAGES, "y": np.zeros((ROWS, 10, 12)), "label": LABELS}, ("x", "label")),
        ({"x": IMAGES[..., 0], "features": np.zeros((ROWS, 400))}, ("x", None)),
    ],
)
def test_images_and_labels_are_found(tmp_path: Path, held: dict[str, Any], found: tuple[str, str | None]) -> None:
    images, labels = found
    made = catalog(write(tmp_path / "f.h5", **held))
    assert made.about == f"images {images!r}" + ("" if labels is None else f", labels {labels!r}")
    assert list(made.names) == [f"{images}/{row:08d}" for row in range(ROWS)]
    assert (made.labels is None) == (labels is None)


def test_ambiguous_or_unsuitable_datasets_are_errors(tmp_path: Path) -> None:
    wanted = ("images=NAME",)
    for held, options, parameters in (
        ({"train_x": IMAGES, "test_x": IMAGES}, {}, wanted),
        ({"color": IMAGES, "depth": IMAGES}, {}, wanted),
        ({"v": np.zeros((ROWS, 400))}, {}, wanted),
        ({"x": IMAGES}, {"images": "z"}, wanted),
        ({"x": np.zeros((ROWS, 3, 20, 3), np.uint8)}, {"images": "x"}, ("channel_axis",)),
        ({"x": np.zeros((ROWS, 400), np.uint8)}, {"images": "x"}, wanted),
        ({"x": IMAGES[0]}, {"images": "x"}, wanted),
        ({"x": IMAGES}, {"channel_axis": "first"}, ("channel_axis='first'", "channel_axis='last'", *wanted)),
    ):
        path = write(tmp_path / "f.h5", **held)
        with pytest.raises((SourceError, PackFormatError)) as caught:
            catalog(path, **options)
        assert caught.value.parameters == parameters
        assert all(repr(name) in str(caught.value) for name in held) or parameters == ("channel_axis",)
        if len(held) == 2:
            assert catalog(path, images=f"/{next(iter(held))}/").about == f"images {next(iter(held))!r}"


def test_the_advice_about_an_attribute_that_does_not_fit_the_rows_can_be_followed(tmp_path: Path) -> None:
    with h5py.File(write(tmp_path / "f.h5", x=IMAGES), "a") as file:
        file["x"].attrs[schema.LAYOUT] = "nchw"
    with pytest.raises(SourceError, match=repr(schema.LAYOUT)) as caught:
        catalog(tmp_path / "f.h5")
    assert caught.value.parameters == ("channel_axis='last'", "images=NAME")
    made = catalog(tmp_path / "f.h5", channel_axis="last")
    assert np.array_equal(made.reader.read(1, ""), IMAGES[1])  # type: ignore[arg-type]


def test_datasets_that_are_not_packed_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "f.h5", images=IMAGES, labels=LABELS, boxes=np.zeros((ROWS, 4)), meta__x=np.zeros(9), n=1)
    fitting, others = catalog(path).notes
    assert "'boxes';" in fitting.text
    assert fitting.parameters == ("fields",)
    assert ("'meta/x', 'n';" in others.text, others.parameters) == (True, ())
    assert len(catalog(path, fields=("boxes",)).notes) == 1
    assert "'labels'" in catalog(path, labels="boxes").notes[0].text
    h5pack.convert(path, tmp_path / "o.h5", **quick(fields=("boxes",)))
    assert catalog(tmp_path / "o.h5").notes == ()


def test_notes_say_why_datasets_are_not_packed(tmp_path: Path) -> None:
    path = write(tmp_path / "f.h5", images=IMAGES, filenames=[f"{row}.jpg" for row in range(ROWS)], bad=LABELS)
    with h5py.File(path, "a") as file:
        file["gone"] = h5py.ExternalLink("missing.h5", "labels")
    damage(path, "bad")
    found = catalog(path)
    assert found.names[1] == "1.jpg"
    damaged, missing = (note.text for note in found.notes)
    assert ("datasets 'bad';" in damaged, "length" in damaged, "links 'gone';" in missing) == (True, False, True)


def test_kept_images_may_be_named_images(tmp_path: Path) -> None:
    path = write_kept(tmp_path / "f.h5", jpegs(ROWS))
    found, expected = (catalog(path, images=name) for name in ("images", "encoded"))
    assert (found.about, list(found.names), found.notes) == (expected.about, list(expected.names), expected.notes)
    assert h5pack.preview(path, images="images") == h5pack.preview(path, images="encoded")


def test_masks_of_kept_images_that_are_not_packed_are_named_as_fields(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("path,mask,x\n" + "images/000.jpg,masks/000.png,1\n" * 2)
    columns = {"mask_columns": "mask", "field_columns": "x", "keep": "jpeg"}
    pair_folders(tmp_path, 1)
    h5pack.convert(tmp_path / "m.csv", tmp_path / "o.h5", **quick(**columns))
    (note,) = catalog(tmp_path / "o.h5", fields=("x",)).notes
    assert ("'fields/mask'" in note.text, note.parameters[:1]) == (True, ("fields",))


@pytest.mark.parametrize(
    ("given", "parameter"), [({"labels": "y"}, "labels=NAME"), ({"fields": ["y"]}, "fields=[NAME]")]
)
def test_the_only_dataset_that_ends_alike_is_suggested(tmp_path: Path, given: dict[str, Any], parameter: str) -> None:
    path = write(tmp_path / "f.h5", images=IMAGES, study__y=LABELS)
    with pytest.raises(PackFormatError) as caught:
        catalog(path, **given)
    assert caught.value.parameters == (parameter,)
    assert str(caught.value).endswith("'study/y'")


def test_masks_of_images_with_a_side_of_one_pixel(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", images=IMAGES[:, :, :1], one=IMAGES[:, :, :1, 0], two=IMAGES[:, :, :1, :1])
    assert [one.name for one in catalog(path, fields=("one", "two")).pixel_fields] == ["one", "two"]


def test_integers_of_64_bits_are_masks_but_in_a_pack_an_array(tmp_path: Path) -> None:
    values = np.arange(ROWS * 120).reshape(ROWS, 10, 12)
    path = write(tmp_path / "a.h5", images=IMAGES, x=values)
    assert [one.name for one in catalog(path, fields=("x",)).pixel_fields] == ["x"]
    samples = [{"image": image, "x": row} for image, row in zip(IMAGES, values, strict=True)]
    h5pack.convert(samples, tmp_path / "b.h5", **quick(fields="x", order="sorted"))
    of_pack = catalog(tmp_path / "b.h5")
    assert of_pack.pixel_fields == ()
    np.testing.assert_array_equal(of_pack.fields["x"], values, strict=True)


def test_paths_are_looked_up_equally_often_for_any_number_of_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    original = h5py.Group.__getitem__
    monkeypatch.setattr(h5py.Group, "__getitem__", lambda group, name: names.append(name) or original(group, name))
    counts = []
    for count in (2, 30):
        others = {f"g{number}/x": np.zeros(4) for number in range(count)}
        path = write(tmp_path / f"{count}.h5", images=np.zeros((4, 8, 8, 3), np.uint8), **others)
        names.clear()
        assert len(open_source(path, SourceOptions()).notes) == 1
        with h5py.File(path) as file:
            assert find_images(file) == "images"
            assert FurtherDatasets().names(file, "images", None) == ["g0/x"]
        counts.append(len(names))
    assert counts[0] == counts[1]


def test_datasets_beside_other_images_or_with_commas_are_no_further_datasets(tmp_path: Path) -> None:
    values = {"train__x": IMAGES, "train__y": LABELS, "train__age": LABELS, "train__masks__m": IMAGES[..., 0]}
    values |= {"test__x": IMAGES, "test__y": LABELS, "test__meta__id": LABELS, "names": LABELS, "preview": IMAGES}
    with h5py.File(write(tmp_path / "f.h5", **values)) as file:
        assert FurtherDatasets().names(file, "train/x", "train/y") == ["names", "preview", "train/age", "train/masks/m"]
        assert FurtherDatasets().names(file, "test/x", "test/y") == ["names", "preview", "test/meta/id"]
    # A list of names that are separated by commas cannot hold the others.
    names = ("a,b", " c", "g,h__i", "j k")
    with h5py.File(write(tmp_path / "f.h5", images=IMAGES, **dict.fromkeys(names, LABELS))) as file:
        assert FurtherDatasets().names(file, "images", None) == ["j k"]
    damage(tmp_path / "f.h5", "a,b")
    with h5py.File(tmp_path / "f.h5") as file:
        assert FurtherDatasets().names(file, "images", None) == ["j k"]


def test_a_pack_keeps_its_names_labels_and_splits(tmp_path: Path) -> None:
    root = split_folders(tmp_path / "source", {"train": {"b": 4, "a": 3}, "test": {"a": 2, "b": 1}})
    h5pack.convert(root, tmp_path / "one.h5", **quick(layout="nchw"))
    made = catalog(tmp_path / "one.h5")
    names = list(made.names)
    with h5py.File(tmp_path / "one.h5") as file:
        assert [name.decode() for name in file["filenames"]] == names
        np.testing.assert_array_equal(made.labels, file["labels"][()])
    assert (made.label_names, made.split_names) == (("a", "b"), ("train", "test"))
    assert made.split_ids.tolist() == [0] * 7 + [1] * 3
    assert made.reader.form.channel_axis == "first"  # type: ignore[attr-defined]
    chosen = catalog(tmp_path / "one.h5", NameFilter(include=("train/a/*",), exclude=("*00001.jpg",)))
    assert sorted(chosen.names) == ["train/a/00000.jpg", "train/a/00002.jpg"]
    assert chosen.ignored == {"not included": 5, "excluded": 3}
    for index, name in enumerate(chosen.names):
        again = made.reader.read(names.index(name), name)
        assert np.array_equal(chosen.reader.read(index, name), again)


@pytest.mark.parametrize(("second", "others"), [("val", "rest"), ("rest", "rest_")])
def test_splits_that_leave_rows_out_or_share_them(tmp_path: Path, second: str, others: str) -> None:
    names = np.array([b"train", second.encode()])
    path = write(tmp_path / "f.h5", x=IMAGES, splits__name=names, splits__rows=np.array([[1, 3], [4, 6]]))
    made = catalog(path)
    assert made.split_names == ("train", second, others)
    assert made.split_ids.tolist() == [2, 0, 0, 2, 1, 1]
    h5pack.convert(path, tmp_path / "o.h5", **quick())
    found = h5pack.H5Dataset(tmp_path / "o.h5").splits
    assert {name: len(rows) for name, rows in found.items()} == {"train": 2, second: 2, others: 2}
    with h5py.File(path, "a") as file:
        file["splits/rows"][...] = [[0, 4], [3, 6]]
    with pytest.raises(SourceError):
        catalog(path)


def test_shapes_of_images_and_where_their_channels_may_be() -> None:
    for shape, axes in (
        *(((10, 12), ["none"]), ((10, 12, 3), ["last"]), ((1, 10, 12), ["first"]), ((4, 10, 4), ["last", "first"])),
        *(((10, 12, 5), []), ((10,), []), ((10, 3), []), ((2, 3, 10, 12), [])),
    ):
        assert channel_axes(shape) == axes
        assert is_image_array((5, *shape), np.dtype(">f4")) == (len(axes) == 1)
    for shape, dtype in (((5, 28, 28), "S4"), ((5, 3, 3), "u1"), ((28, 28), "u1")):
        assert not is_image_array(shape, np.dtype(dtype))


def test_the_error_on_very_many_images_names_some(tmp_path: Path) -> None:
    path = write(tmp_path / "f.h5", **{f"demo_{number}__frames": IMAGES for number in range(30)})
    with pytest.raises(SourceError) as caught:
        catalog(path)
    assert (str(caught.value).count("/frames'"), caught.value.parameters) == (8, ("images=NAME",))


def test_invalid_options_and_options_of_other_kinds_of_sources_are_refused(tmp_path: Path) -> None:
    for low, high in ((1.0, 1.0), (0.0, float("inf"))):
        with pytest.raises(OptionsError) as caught:
            HDF5Datasets(value_range=(low, high))
        assert caught.value.parameters == ("value_range",)
    root = split_folders(tmp_path / "source", {"train": {"a": 1}})
    path = write(tmp_path / "f.h5", x=IMAGES)
    for source, options, parameter in (
        (root, SourceOptions(datasets=HDF5Datasets("x")), "images"),
        (path, SourceOptions(columns=ManifestColumns(path="x")), "path_column"),
        (path, SourceOptions("flat"), "source_kind='flat'"),
        (root, SourceOptions("hdf5"), "source_kind='hdf5'"),
    ):
        with pytest.raises((OptionsError, SourceError)) as refused:
            open_source(source, options)
        assert parameter in refused.value.parameters


def test_damaged_files_raise_h5pack_errors(tmp_path: Path) -> None:
    path = write(tmp_path / "f.h5", x=IMAGES, y=np.arange(ROWS))
    data = path.read_bytes()
    random = np.random.default_rng(0)
    errors = []
    for _ in range(60):
        damaged = bytearray(data)
        for place in random.integers(8, min(len(data), 3_000), 3).tolist():
            damaged[place] ^= 1 << int(random.integers(8))
        (tmp_path / "d.h5").write_bytes(bytes(damaged))
        try:
            catalog(tmp_path / "d.h5")
        except H5PackError as error:
            errors.append(str(error))
    assert len(errors) > 5
    assert "\n" not in "".join(errors)


@pytest.mark.parametrize(("size", "noted"), [(None, False), ((10, 12), False), ((12, 10), True), (5, True)])
def test_arrays_of_the_images_size_that_are_not_resized_are_named(tmp_path: Path, size: Any, noted: bool) -> None:
    depth = np.linspace(0, 1, ROWS * 120, dtype=np.float32).reshape(ROWS, 10, 12)
    fields = {"depth": depth, "normals": np.stack([depth] * 3, axis=1), "x": depth[:, :4], "mask": depth > 0.5}
    path = write(tmp_path / "f.h5", images=IMAGES, **fields)
    with Conversion(path, tmp_path / "o.h5", size=size, fields=tuple(fields), num_workers=1) as conversion:
        notes = [note.text for note in conversion.plan().notes() if "resized" in note.text]
    assert [text.partition(": ")[2] for text in notes] == ["'depth', 'normals'"] * noted


@pytest.mark.parametrize("chunks", [None, (1, 4, 4, 3)])
def test_more_rows_than_the_file_can_hold_are_an_error(tmp_path: Path, chunks: tuple[int, ...] | None) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("images", (10**12, 4, 4, 3), np.uint8, chunks=chunks)
    with pytest.raises(SourceError) as caught:
        hdf5_catalog(tmp_path / "f.h5", HDF5Datasets(), NameFilter())
    assert caught.value.dataset == "images"
